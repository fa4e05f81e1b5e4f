"""FLOPs and bytes of what stands between attention passes: projections, MLP or experts, norms, output.

A token costs two FLOPs per parameter of a matrix forward, and four backward. Element-wise work is a number of bytes per
token, read and written by kernels that are fused or eager (`ElementWise`), in 16 bits:

- before attention a norm reads and writes the hidden state, rotary positions queries and keys;
- behind it the residual is added and normed, the activation of the MLP reads its one or two inputs and writes one, and
  the residual is added again;
- experts copy what a token sends to each of those that it takes there and back.

Matrices of layers in 8 bits need their inputs cast: one pass for the largest element, one for the cast. Backward, all
of it moves twice as much. These counts are assumptions about kernels, not measurements.

The output is a matrix in 16 bits, also where those of layers have 8 (torchtitan 9dec370, float8.py, leaves it out), and
the loss is that of the software, see `tasp_lab.machines.stack.StepSoftware`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Literal, NamedTuple

from tasp_lab.workload.kernel_shapes import Product, ProductKind
from tasp_lab.workload.models.model import Experts, Linear, Model
from tasp_lab.workload.models.parameters import attention_matrices, layer_of, mlp_matrices

ELEMENT_BYTES = 2
"""Of activations."""

BACKWARD = 2
"""Backward work over forward work: gradients of inputs and of parameters."""

CAST_BYTES = 5
"""What a cast to 8 bits moves per element: 16 bits read for the largest element, again for the cast, 8 written."""


class ElementWise(NamedTuple):
    """What element-wise work moves per element, in bytes, and its kernels, forward.

    Parameters
    ----------
    norm, rotary, residual : of a norm, of rotary positions, and of a sum with the residual.
    residual_norm : of a sum with the residual and its norm.
    gated, plain : of the activation of an MLP, per element of its width, with two inputs and with one.
    before, behind : kernels before attention and behind it.
    """

    norm: int
    rotary: int
    residual: int
    residual_norm: int
    gated: int
    plain: int
    before: int
    behind: int


FUSED = ElementWise(norm=4, rotary=4, residual=6, residual_norm=8, gated=6, plain=4, before=3, behind=4)
"""Each read and written once, in 16 bits; the residual is summed and normed in one kernel."""

EAGER = ElementWise(norm=36, rotary=20, residual=6, residual_norm=42, gated=10, plain=4, before=16, behind=10)
"""Each operation a kernel, as in the Llama of Transformers (modeling_llama.py). LlamaRMSNorm: a cast to float32 (2
read, 4 written), the square (4, 4), its mean (4), the product with its root (4, 4), a cast (4, 2), the weight (2, 2).
apply_rotary_pos_emb: two products (2, 2 each), half of the elements negated (1, 1), both halves joined (2, 2), a sum
(4, 2). LlamaMLP: SiLU (2, 2), and its product (4, 2)."""

LOSS_LAUNCHES = 3
"""Element-wise kernels of the loss, each way."""


class Matrix(NamedTuple):
    """A matrix that tokens are multiplied with.

    Parameters
    ----------
    inputs, outputs : its sizes.
    divided : which of them tensor groups divide; the other's results or inputs are then those of all tokens of a group.
    kind : what the product makes.
    experts, active : of matrices of experts, how many there are, and of how many each token takes one.
    """

    inputs: int
    outputs: int
    divided: Literal["inputs", "outputs"]
    kind: ProductKind = "results"
    experts: int = 1
    active: int = 1

    @property
    def flops(self) -> int:
        """FLOPs of a token."""
        return 2 * self.inputs * self.outputs * self.active

    def product(self, tokens: int, tp: int, ep: int = 1) -> Product:
        """The product with so many tokens at a rank of a tensor group, one of `ep` ranks that share experts."""
        inputs, outputs = (-(-size // (tp if name == self.divided else 1))
                           for name, size in (("inputs", self.inputs), ("outputs", self.outputs)))  # fmt: skip
        copies = max(1, self.experts // ep)
        rows = -(-tokens * self.active // copies)
        sizes = {
            "results": (rows, inputs, outputs),
            "inputs": (rows, outputs, inputs),
            "weights": (outputs, rows, inputs),
            "sums": (outputs, rows, inputs),
        }
        return Product(*sizes[self.kind], self.kind, copies)


class Cost(NamedTuple):
    """What a token costs: matrices, and the bytes, kernels and inputs of matrices of element-wise work."""

    matrices: tuple[Matrix, ...] = ()
    moved_bytes: int = 0
    inputs: int = 0
    launches: int = 0

    @property
    def flops(self) -> int:
        """FLOPs of all matrices."""
        return sum(each.flops for each in self.matrices)

    def plus(self, other: Cost) -> Cost:
        """Both together."""
        return Cost(
            self.matrices + other.matrices,
            self.moved_bytes + other.moved_bytes,
            self.inputs + other.inputs,
            self.launches + other.launches,
        )

    def backward(self, *makes: ProductKind) -> Cost:
        """The backward pass of forward work: these gradients by each matrix, and twice the element-wise work."""
        matrices = tuple(each._replace(kind=kind) for each in self.matrices for kind in makes)
        return Cost(matrices, BACKWARD * self.moved_bytes, BACKWARD * self.inputs, BACKWARD * self.launches)


NO_COST = Cost()


class LayerKind(NamedTuple):
    """Layers that are alike: their letter (`Model.pattern`), and their experts, if they have any."""

    letter: str
    experts: Experts | None = None


@lru_cache(maxsize=256)
def kinds_of(model: Model) -> tuple[LayerKind, ...]:
    """The kind of each layer."""
    kinds = zip(model.pattern, model.expert_layers, strict=True)
    return tuple(LayerKind(letter, model.experts if has_experts else None) for letter, has_experts in kinds)


class PassedMlps(NamedTuple):
    """The MLPs that a token passes in a layer: one, the experts that it takes, or none.

    Parameters
    ----------
    number : how many.
    width : elements of a hidden vector of all of them together.
    vectors : hidden vectors of each, two where it is gated.
    copies : to how many experts a token is copied, and back.
    """

    number: int
    width: int
    vectors: int
    copies: int


def passed_mlps(model: Model, kind: LayerKind) -> PassedMlps:
    """What a token passes behind attention."""
    if kind.experts is not None:
        count = kind.experts.active + kind.experts.shared
        return PassedMlps(count, count * kind.experts.width, 2, kind.experts.active)
    if model.mlp is None:
        return PassedMlps(0, 0, 0, 0)
    return PassedMlps(1, model.mlp.width, 2 if model.mlp.gated else 1, 0)


def stored_parameters(model: Model, kind: LayerKind, ep: int = 1) -> int:
    """The parameters of a layer, with the experts of one of `ep` ranks that share them."""
    stored = layer_of(model, kind.letter, has_experts=kind.experts is not None).stored
    return (
        stored
        if kind.experts is None
        else stored - (kind.experts.count - kind.experts.count // ep) * expert_parameters(model, kind.experts)
    )


def moved_parameters(model: Model, kind: LayerKind, ep: int, ranks: int) -> int:
    """The parameters of a layer as if all of them were gathered by `ranks` that have parts of them.

    Those of experts are gathered by `ranks` / `ep`, of which each receives less of them.
    """
    stored = stored_parameters(model, kind, ep)
    if ep == 1 or kind.experts is None:
        return stored
    own, fewer = kind.experts.count // ep * expert_parameters(model, kind.experts), ranks // ep
    return stored - own + -(-own * (fewer - 1) * ranks // (fewer * (ranks - 1)))


def expert_parameters(model: Model, experts: Experts) -> int:
    """The parameters of one expert."""
    return 3 * model.hidden_size * experts.width


def before_attention(model: Model, kind: LayerKind, work: ElementWise = FUSED) -> Cost:
    """What a token costs before attention, forward: a norm, and the projections of queries, keys and values."""
    attention = model.attention
    rotated = attention.heads + _kv_heads(model, kind)
    moved_bytes = work.norm * model.hidden_size + work.rotary * rotated * attention.head_dim
    shapes = attention_matrices(model, kind.letter)[:-1]
    return Cost(_joined(shapes), moved_bytes, sum({inputs for inputs, _ in shapes}), work.before)


def output_projection(model: Model) -> Cost:
    """What the output projection of attention costs a token, forward."""
    inputs = model.attention.heads * model.attention.value_size
    return Cost((Matrix(inputs, model.hidden_size, "inputs"),), 0, inputs)


def behind_projection(model: Model, kind: LayerKind, work: ElementWise = FUSED) -> Cost:
    """What a token costs behind the output projection, forward: residuals, a norm, the MLP or experts."""
    mlps = passed_mlps(model, kind)
    activated = (work.gated if mlps.vectors == 2 else work.plain) * mlps.width
    copied = 4 * ELEMENT_BYTES * mlps.copies * model.hidden_size  # read and written, to experts and back
    moved_bytes = (work.residual_norm + work.residual) * model.hidden_size + activated + copied
    inputs = mlps.number * model.hidden_size + mlps.width
    return Cost(_mlp(model, kind), moved_bytes, inputs, work.behind + (2 if mlps.copies else 0))


def repeated_selectively(model: Model, kind: LayerKind, work: ElementWise = FUSED) -> Cost:
    """What selective checkpointing computes again of a token.

    All element-wise work, and the matrices that are not `kept`, save the last one of an MLP, whose result no backward
    pass reads.
    """
    projections = len(attention_matrices(model, kind.letter))
    again = list(enumerate(_matrices(model, kind)))[1::2]
    first, rest = before_attention(model, kind, work), behind_projection(model, kind, work)
    if kind.experts is None:
        rest = rest._replace(matrices=_joined([shape for number, shape in again if number >= projections]))
    found = first._replace(matrices=_joined([shape for number, shape in again if number < projections - 1])).plus(rest)
    return found.plus(output_projection(model)) if projections % 2 == 0 else found


def _joined(shapes: Sequence[tuple[int, int]]) -> tuple[Matrix, ...]:
    """Matrices whose outputs tensor groups divide; those that follow each other and read the same input are one.

    So they are in Megatron-LM and in many others (``linear_qkv``, ``linear_fc1``).
    """
    groups = ((inputs, sum(outputs for _, outputs in group)) for inputs, group in groupby(shapes, key=itemgetter(0)))
    return tuple(Matrix(inputs, outputs, "outputs") for inputs, outputs in groups)


def _mlp(model: Model, kind: LayerKind) -> tuple[Matrix, ...]:
    """The matrices of an MLP, or of a router, experts and shared experts."""
    experts = kind.experts
    if experts is None:
        *first, last = mlp_matrices(model) or ((0, 0),)
        return (*_joined(first), Matrix(*last, "inputs")) if first else ()
    hidden, width = model.hidden_size, experts.width
    own = experts.count, experts.active
    found = [Matrix(hidden, experts.count, "outputs")]
    found += [Matrix(hidden, 2 * width, "outputs", "results", *own), Matrix(width, hidden, "inputs", "results", *own)]
    if experts.shared:
        found += [Matrix(hidden, 2 * width * experts.shared, "outputs")]
        found += [Matrix(width * experts.shared, hidden, "inputs")]
    return tuple(found)


def kept(model: Model, kind: LayerKind) -> int:
    """Elements per token that selective checkpointing keeps, besides the input of the layer and what attention gives.

    As in torchtitan (9dec370, parallelize_llama.py): the results of every other matrix product, the first among them.
    """
    return sum(outputs for _, outputs in _matrices(model, kind)[::2])


def _matrices(model: Model, kind: LayerKind) -> list[tuple[int, int]]:
    """Inputs and outputs of the matrices of a layer, without the last one of an MLP and without experts, whose products
    are grouped: they are computed again.
    """
    return [*attention_matrices(model, kind.letter), *(mlp_matrices(model)[:-1] if kind.experts is None else ())]


def output_matrix(model: Model) -> Cost:
    """What the output matrix costs a token, forward."""
    return Cost((Matrix(model.hidden_size, model.vocabulary, "outputs"),) if model.vocabulary else ())


def _kv_heads(model: Model, kind: LayerKind) -> int:
    if kind.letter != "L":
        return model.attention.kv_head_count
    return (model.linear or Linear()).kv_heads or model.attention.heads
