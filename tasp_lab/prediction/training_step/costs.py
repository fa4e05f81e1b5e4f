"""FLOPs and bytes of what stands between attention passes: projections, MLP or experts, norms, output.

A token costs two FLOPs per parameter of a matrix forward, and four backward. Element-wise work is a number of bytes per
token, read and written by fused kernels, in 16 bits:

- before attention a norm reads and writes the hidden state, rotary positions queries and keys;
- behind it the residual is added and normed (two read, two written), the activation of the MLP reads its one or two
  inputs and writes one, and the residual is added again (two read, one written);
- experts copy what a token sends to each of those that it takes there and back.

Matrices of layers in 8 bits need their inputs cast: one pass for the largest element, one for the cast. Backward, all
of it moves twice as much. These counts are assumptions about kernels, not measurements.

The output is a matrix in 16 bits, also where those of layers have 8 (torchtitan 9dec370, float8.py, leaves it out), and
the loss is PyTorch's cross entropy of float32 logits (train.py there): see `LOSS_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tasp_lab.workload.models.model import Linear, Model
from tasp_lab.workload.models.parameters import attention_matrices, attention_parameters, layer_of, mlp_matrices

ELEMENT_BYTES = 2
"""Of activations."""

BACKWARD = 2
"""Backward work over forward work: gradients of inputs and of parameters."""

CAST_BYTES = 5
"""What a cast to 8 bits moves per element: 16 bits read for the largest element, again for the cast, 8 written."""

LOSS_BYTES = (14, 22)
"""What the loss moves per logit, forward and backward. Forward: a cast to float32 (2 read, 4 written) and the logarithm
of the softmax (4, 4). Backward: its gradient (4 written), that of the logits (8 read, 4 written), and a cast (4, 2)."""


class Cost(NamedTuple):
    """FLOPs of matrices, bytes of element-wise work and elements of inputs of matrices, of a number of tokens."""

    flops: int
    moved_bytes: int
    inputs: int = 0

    def plus(self, other: Cost) -> Cost:
        """Both together."""
        return Cost(self.flops + other.flops, self.moved_bytes + other.moved_bytes, self.inputs + other.inputs)

    def times(self, factor: int) -> Cost:
        """So many times the work."""
        return Cost(self.flops * factor, self.moved_bytes * factor, self.inputs * factor)


NO_COST = Cost(0, 0)


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike: their letter (`Model.pattern`), and whether they have experts."""

    letter: str
    has_experts: bool


@lru_cache(maxsize=256)
def kinds_of(model: Model) -> tuple[LayerKind, ...]:
    """The kind of each layer."""
    return tuple(map(LayerKind, model.pattern, model.expert_layers))


def stored_parameters(model: Model, kind: LayerKind) -> int:
    """The parameters of a layer."""
    return layer_of(model, kind.letter, has_experts=kind.has_experts).stored


def before_attention(model: Model, kind: LayerKind) -> Cost:
    """What a token costs before attention, forward: a norm, and the projections of queries, keys and values."""
    attention = model.attention
    rotated = attention.heads + _kv_heads(model, kind)
    moved = 2 * model.hidden_size + 2 * rotated * attention.head_dim
    shapes = attention_matrices(model, kind.letter)[:-1]
    matrices = sum(inputs * outputs for inputs, outputs in shapes)
    return Cost(2 * matrices, ELEMENT_BYTES * moved, sum({inputs for inputs, _ in shapes}))


def output_projection(model: Model) -> Cost:
    """What the output projection of attention costs a token, forward."""
    inputs = model.attention.heads * model.attention.value_size
    return Cost(2 * inputs * model.hidden_size, 0, inputs)


def behind_projection(model: Model, kind: LayerKind) -> Cost:
    """What a token costs behind the output projection, forward: residuals, a norm, the MLP or experts."""
    matrices = layer_of(model, kind.letter, has_experts=kind.has_experts).matrices
    matrices -= attention_parameters(model, kind.letter).matrices
    moved = 7 * model.hidden_size + _activated(model, kind)
    return Cost(2 * matrices, ELEMENT_BYTES * moved, _mlp_inputs(model, kind))


def repeated_selectively(model: Model, kind: LayerKind) -> tuple[Cost, Cost, Cost]:
    """What selective checkpointing computes again of a token: before attention, its output projection, and behind it.

    All element-wise work, and the matrices that are not `kept`, save the last one of an MLP, whose result no backward
    pass reads.
    """
    again = [2 * inputs * outputs for inputs, outputs in _matrices(model, kind)]
    again = [0 if number % 2 == 0 else flops for number, flops in enumerate(again)]
    projections = len(attention_matrices(model, kind.letter))
    before, behind = before_attention(model, kind), behind_projection(model, kind)
    rest = behind.flops if kind.has_experts else sum(again[projections:])
    return (
        Cost(sum(again[: projections - 1]), before.moved_bytes, before.inputs),
        Cost(again[projections - 1], 0, output_projection(model).inputs if again[projections - 1] else 0),
        Cost(rest, behind.moved_bytes, behind.inputs),
    )


def kept(model: Model, kind: LayerKind) -> int:
    """Elements per token that selective checkpointing keeps, besides the input of the layer and what attention gives.

    As in torchtitan (9dec370, parallelize_llama.py): the results of every other matrix product, the first among them.
    """
    return sum(outputs for _, outputs in _matrices(model, kind)[::2])


def _matrices(model: Model, kind: LayerKind) -> list[tuple[int, int]]:
    """Inputs and outputs of the matrices of a layer, without the last one of an MLP and without experts, whose products
    are grouped: they are computed again.
    """
    return [*attention_matrices(model, kind.letter), *(() if kind.has_experts else mlp_matrices(model)[:-1])]


def output_flops(model: Model) -> int:
    """FLOPs of the output matrix for a token, forward."""
    return 2 * model.vocabulary * model.hidden_size


def _mlp_inputs(model: Model, kind: LayerKind) -> int:
    """Inputs of the matrices of an MLP, or of the experts that a token takes."""
    if kind.has_experts and model.experts is not None:
        return (model.experts.active + model.experts.shared) * (model.hidden_size + model.experts.width)
    return 0 if model.mlp is None else model.hidden_size + model.mlp.width


def _kv_heads(model: Model, kind: LayerKind) -> int:
    if kind.letter != "L":
        return model.attention.kv_head_count
    return (model.linear or Linear()).kv_heads or model.attention.heads


def _activated(model: Model, kind: LayerKind) -> int:
    """Elements that the activation of an MLP or of experts moves per token, with the copies to experts and back."""
    if kind.has_experts and model.experts is not None:
        used = model.experts.active + model.experts.shared
        return 3 * used * model.experts.width + 4 * model.experts.active * model.hidden_size
    return 0 if model.mlp is None else (3 if model.mlp.gated else 2) * model.mlp.width
