"""FLOPs and bytes of what stands between attention passes: projections, MLP or experts, norms, output.

A token costs two FLOPs per parameter of a matrix forward, and four backward. Element-wise work is a number of bytes per
token, read and written by fused kernels, in 16 bits:

- before attention a norm reads and writes the hidden state, rotary positions queries and keys;
- behind it the residual is added and normed (two read, two written), the activation of the MLP reads its one or two
  inputs and writes one, and the residual is added again (two read, one written);
- experts copy what a token sends to each of those that it takes there and back;
- the loss reads the logits twice and writes their gradient.

Backward, all of it moves twice as much. These counts are assumptions about kernels, not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tasp_lab.workload.models.model import Linear, Model
from tasp_lab.workload.models.parameters import attention_parameters, layer_of

ELEMENT_BYTES = 2
"""Of activations."""

BACKWARD = 2
"""Backward work over forward work: gradients of inputs and of parameters."""


class Cost(NamedTuple):
    """FLOPs of matrices and bytes of element-wise work, of a number of tokens."""

    flops: int
    moved_bytes: int

    def plus(self, other: Cost) -> Cost:
        """Both together."""
        return Cost(self.flops + other.flops, self.moved_bytes + other.moved_bytes)

    def times(self, factor: int) -> Cost:
        """So many times the work."""
        return Cost(self.flops * factor, self.moved_bytes * factor)


NO_COST = Cost(0, 0)


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike: L or S for linear or softmax attention, and whether they have experts."""

    letter: str
    has_experts: bool


@lru_cache(maxsize=256)
def kinds_of(model: Model) -> tuple[LayerKind, ...]:
    """The kind of each layer."""
    dense = len(model.pattern) if model.experts is None else model.experts.dense_layers
    return tuple(LayerKind(letter, number >= dense) for number, letter in enumerate(model.pattern))


def stored_parameters(model: Model, kind: LayerKind) -> int:
    """The parameters of a layer."""
    return layer_of(model, kind.letter, has_experts=kind.has_experts).stored


def before_attention(model: Model, kind: LayerKind) -> Cost:
    """What a token costs before attention, forward: a norm, and the projections of queries, keys and values."""
    attention = model.attention
    rotated = attention.heads + _kv_heads(model, kind)
    moved = 2 * model.hidden_size + 2 * rotated * attention.head_dim
    matrices = attention_parameters(model, kind.letter).matrices - _output_matrix(model)
    return Cost(2 * matrices, ELEMENT_BYTES * moved)


def output_projection(model: Model) -> Cost:
    """What the output projection of attention costs a token, forward."""
    return Cost(2 * _output_matrix(model), 0)


def behind_projection(model: Model, kind: LayerKind) -> Cost:
    """What a token costs behind the output projection, forward: residuals, a norm, the MLP or experts."""
    matrices = layer_of(model, kind.letter, has_experts=kind.has_experts).matrices
    matrices -= attention_parameters(model, kind.letter).matrices
    moved = 7 * model.hidden_size + _activated(model, kind)
    return Cost(2 * matrices, ELEMENT_BYTES * moved)


def output_cost(model: Model) -> Cost:
    """What a token costs at the end of the forward pass: the output matrix and the loss, if there are any."""
    return Cost(2 * model.vocabulary * model.hidden_size, ELEMENT_BYTES * model.vocabulary)


def _output_matrix(model: Model) -> int:
    return model.attention.heads * model.attention.value_size * model.hidden_size


def _kv_heads(model: Model, kind: LayerKind) -> int:
    if kind.letter == "S":
        return model.attention.kv_head_count
    return (model.linear or Linear()).kv_heads or model.attention.heads


def _activated(model: Model, kind: LayerKind) -> int:
    """Elements that the activation of an MLP or of experts moves per token, with the copies to experts and back."""
    if kind.has_experts and model.experts is not None:
        used = model.experts.active + model.experts.shared
        return 3 * used * model.experts.width + 4 * model.experts.active * model.hidden_size
    return 0 if model.mlp is None else (3 if model.mlp.gated else 2) * model.mlp.width
