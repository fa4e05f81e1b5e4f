"""What each GPU holds during a step, item by item, at the moment of its peak.

Of two moments the one with more counts: the backward pass begins, with the activations of all layers and the logits; or
that of the first layer to be passed backward begins, with the buffers of its attention and what is computed again.

- **Parameters, gradients, optimizer** in mixed precision: 16 bits per parameter to compute with, 32 for its gradient,
  its master copy and each of Adam's two moments. ZeRO stages shard them from the end over the ranks with the same
  parameters; stage 3 shards master copies and gathers from them. Without training 16 bits are all.
- **Gathered**, with stage 3: two layers in 16 bits, embedding and output, and the gradients of one layer.
- **Saved activations**, 2 bytes per element, of each layer: what its backward pass reads, or with checkpointing its
  input, and with selective checkpointing also the results of attention and of every other matrix product; of all
  micro-batches under way. The last stage also keeps the input of the last norm and that of the output matrix. Inputs of
  layers on the host need buffers for two of them.
- **Recomputed activations**: what the backward pass reads of one layer, which is computed again. Kernels are fused:
  norms, rotary positions and attention keep nothing else but a log-sum-exp per head.
- **Activation gradients**: that of a hidden state, and within a layer those of the hidden vectors of its MLP.
- **Dummy gradients**: see `tasp_lab.machines.stack.StepSoftware`.
- **Logits**: of one chunk, what the software holds of them, see there.
- **Attention buffers**: what arrives from other ranks, of the pass that needs most.
- **Tensor buffers**: the hidden states of all positions of a tensor group, gathered, and their sums.

Left out: copies of experts' inputs that are unbalanced, workspaces of matrix products (64 MiB), and free blocks of the
allocator. What the context and the communication library take is kept back from the memory of a GPU
(`tasp_lab.prediction.training_step.rates.RESERVED_BYTES`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from tasp_lab.core.choices import Checkpointing
from tasp_lab.prediction.training_step.costs import (
    ELEMENT_BYTES,
    LayerKind,
    expert_parameters,
    kept,
    kinds_of,
    passed_mlps,
    stored_parameters,
)
from tasp_lab.prediction.training_step.layout import StepPlan, parts_of
from tasp_lab.prediction.training_step.phases import GRADIENT_BYTES, PARAMETER_BYTES, AttentionPass
from tasp_lab.prediction.training_step.pipeline import most_under_way, order_of
from tasp_lab.schedule.buffer_layout import memory_bytes
from tasp_lab.schedules.registry import family_of, one_name
from tasp_lab.workload.models.model import Model
from tasp_lab.workload.models.parameters import (
    attention_parameters,
    embedding_parameters,
    layer_of,
    parameter_count,
)

MASTER_BYTES, MOMENT_BYTES = 4, 8
"""Per parameter: in float32, and the two moments of Adam."""

HOST_BUFFERS = 2
"""Inputs of layers on the GPU while those of all layers are on the host: one in use, one on its way."""


class MemoryUse(NamedTuple):
    """Bytes of the GPU that needs most."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    saved_activations: int
    recomputed_activations: int
    activation_gradients: int
    dummy_gradients: int
    logits: int
    attention_buffers: int
    tensor_buffers: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def attention_buffers(passes: Iterable[AttentionPass]) -> int:
    """Bytes of the buffers of attention, of the rank and the pass that need most."""
    return max(int(memory_bytes(each.schedule).max()) for each in passes)


def memory_use(plan: StepPlan, buffers: int, tokens: int) -> MemoryUse:
    """What the GPU holds that needs most; `tokens` are the most positions of a rank in a micro-batch, `buffers` the
    bytes of `attention_buffers`.

    The layout of the plan is one of a number of ranks, see `Layout.on`.
    """
    return max((stage_memory(plan, stage, tokens, buffers) for stage in range(plan.layout.pp)), key=sum)


def least_memory(plan: StepPlan, attention_buffers: int = 0) -> MemoryUse:
    """The memory of the first stage, which has most micro-batches under way, or the last, which has the logits.

    No less than that of the stage that needs most has; a prediction checks all stages.
    """
    layout = plan.layout
    tokens = -(-plan.sequence // (layout.cp or 1)) * plan.batch
    return max((stage_memory(plan, stage, tokens, attention_buffers) for stage in {0, layout.pp - 1}), key=sum)


def stage_memory(plan: StepPlan, stage: int, tokens: int, attention_buffers: int) -> MemoryUse:
    """What a rank of a stage holds at its peak, with buffers of its attention schedule of so many bytes."""
    model, layout, trains = plan.model, plan.layout, plan.trains
    has_output = stage == layout.pp - 1
    sent = ELEMENT_BYTES * tokens * model.hidden_size
    # more micro-batches than a pipeline begins with do not add to those under way
    microbatches = min(layout.microbatches, (layout.interleave + 2) * layout.pp)
    divided = layout.pp, layout.interleave, microbatches
    first, again, gradients = _activation_bytes(
        model, trains, layout.checkpointing, *divided, stage, returns_results(plan)
    )
    logits = tokens * model.vocabulary * (plan.software.logit_bytes if trains else ELEMENT_BYTES)
    in_layer = MemoryUse(
        *_states_bytes(plan, stage),
        _gathered_bytes(plan, stage),
        _shared(tokens * first, layout.tp),
        _shared(tokens * again, layout.tp),
        _shared(tokens * gradients, layout.tp),
        _dummy_bytes(plan, stage),
        0,
        attention_buffers,
        2 * sent if layout.tp > 1 else 0,
    )
    if not has_output:
        return in_layer
    ends = 2 * sent if trains else 0  # inputs of the last norm and of the output, until the output is passed backward
    at_output = in_layer._replace(
        saved_activations=_shared(tokens * first + ends, layout.tp),
        recomputed_activations=0,
        activation_gradients=_shared(sent, layout.tp) if trains else 0,
        logits=_shared(logits, layout.tp * layout.logit_chunks),
        attention_buffers=0,
    )
    return max(in_layer, at_output, key=sum)


def returns_results(plan: StepPlan) -> bool:
    """Whether results of attention are sent back to the owners of their positions, as Ulysses and USP do.

    Then they are kept twice: as computed, for the backward pass of attention, and as they arrived, the input of the
    output projection (NVIDIA/TransformerEngine v2.11, context_parallel.py, AttnFuncWithCPAndQKVOA2A, out_part; queries,
    keys and values are kept as they arrived alone).
    """
    name = one_name(plan.schedule.rpartition("+")[2])  # of a hybrid that of its softmax layers
    return (plan.layout.cp or 1) > 1 and family_of(name) in ("ulysses", "usp")


def stage_parameters(plan: StepPlan, stage: int, ep: int = 1) -> int:
    """The parameters of a rank of a stage: its layers, and embedding, last norm and output if it has them.

    With the experts of one of `ep` ranks that share them.
    """
    model, layout = plan.model, plan.layout
    held = _layers_of(model, layout.chunks, layout.pp, stage, ep)
    if layout.pp == 1:
        beside = parameter_count(model) - _layers_of(model, layout.chunks, 1, stage, 1).parameters
        return _shared(held.parameters + beside, layout.tp)
    return _shared(held.parameters + _vocabulary_parameters(plan, stage), layout.tp)


class _Layers(NamedTuple):
    """The parameters of the layers of a stage, and those of the largest of them."""

    parameters: int
    largest: int


# Of the thousands of layouts that a plan searches, many have the same stages: what follows from these is cached.
@lru_cache(maxsize=4096)
def _layers_of(model: Model, chunks: int, pp: int, stage: int, ep: int) -> _Layers:
    held = [stored_parameters(model, kind, ep) for part in parts_of(model, chunks)[stage::pp] for kind in part]
    return _Layers(sum(held), max(held))


def _vocabulary_parameters(plan: StepPlan, stage: int) -> int:
    """Embedding and output of a stage; tied ones are at both ends of a pipeline."""
    model, pp = plan.model, plan.layout.pp
    if pp == 1:
        return embedding_parameters(model).stored
    one, last = model.vocabulary * model.hidden_size, stage == pp - 1
    return (one if stage == 0 else 0) + (one + model.hidden_size if last else 0)


def _shared(size: int, ranks: int) -> int:
    """An equal part, rounded up."""
    return -(-size // ranks)


def _states_bytes(plan: StepPlan, stage: int) -> tuple[int, int, int]:
    """Parameters, gradients and optimizer states of a rank."""
    layout, every, held = plan.layout, stage_parameters(plan, stage), stage_parameters(plan, stage, plan.layout.ep)

    def of(size_bytes: int, sharded_from: int) -> int:
        """So many bytes per parameter. Of sharded ones ranks that share experts have as many as others."""
        shards = (layout.cp or 1) * (layout.dp or 1)
        return _shared(size_bytes * every, shards) if layout.zero >= sharded_from else size_bytes * held

    if not plan.trains:
        return of(PARAMETER_BYTES, 3), 0, 0
    # Stage 3 has the master copies as its parameters, and gathers 16 bits of them.
    parameters = of(MASTER_BYTES if layout.zero == 3 else PARAMETER_BYTES, 3)
    gradients = of(GRADIENT_BYTES, 2)
    optimizer = 0 if layout.offload else of(MOMENT_BYTES + (0 if layout.zero == 3 else MASTER_BYTES), 1)
    if layout.offload and layout.zero == 3 and plan.software.offloads_shards:
        parameters = gradients = 0
    return parameters, gradients, optimizer


def _dummy_bytes(plan: StepPlan, stage: int) -> int:
    """A 16-bit tensor per shape of a matrix of the stage: those of its largest layer, and the output.

    Of experts one stands for all, which have the same shapes. FSDP has gradients of its own, see `_gathered_bytes`.
    """
    model, layout = plan.model, plan.layout
    if not (plan.trains and plan.software.dummy_gradients) or layout.zero == 3:
        return 0
    parts = parts_of(model, layout.chunks)[stage :: layout.pp]
    largest = max(_distinct_matrices(model, kind) for part in parts for kind in part)
    output = model.vocabulary * model.hidden_size if stage == layout.pp - 1 else 0
    return _shared(PARAMETER_BYTES * (largest + output), layout.tp)


def _distinct_matrices(model: Model, kind: LayerKind) -> int:
    """The elements of the matrices of a layer, with one expert for all."""
    if kind.experts is not None:
        return attention_parameters(model, kind.letter).matrices + expert_parameters(model, kind.experts)
    return layer_of(model, kind.letter, has_experts=False).matrices


def _gathered_bytes(plan: StepPlan, stage: int) -> int:
    """Parameters in 16 bits that were gathered, and the gradients of a layer before they are reduced."""
    layout = plan.layout
    if layout.zero < 2 or (not plan.trains and (layout.cp or 1) * (layout.dp or 1) == 1 and layout.zero == 3):
        return 0
    largest = _shared(_layers_of(plan.model, layout.chunks, layout.pp, stage, layout.ep).largest, layout.tp)
    gradients = GRADIENT_BYTES * largest if plan.trains else 0
    if layout.zero == 2:
        return gradients
    vocabulary = _shared(_vocabulary_parameters(plan, stage), layout.tp)
    return 2 * PARAMETER_BYTES * largest + gradients + PARAMETER_BYTES * vocabulary


@lru_cache(maxsize=4096)
def _activation_bytes(
    model: Model,
    trains: bool,
    checkpointing: Checkpointing,
    pp: int,
    interleave: int,
    microbatches: int,
    stage: int,
    returned: bool,
) -> tuple[int, int, int]:
    """Of one position: over all layers and micro-batches that are under way, of a layer that is computed again, and of
    gradients in a layer. `returned`: see `returns_results`.
    """
    parts = parts_of(model, pp * interleave)
    twice = ELEMENT_BYTES * model.attention.heads * model.attention.value_size if returned else 0
    whole = {
        kind: ELEMENT_BYTES * _saved_elements(model, kind) + _row_bytes(model) + (twice if kind.letter == "S" else 0)
        for kind in set(kinds_of(model))
    }
    own = {kind for part in parts[stage::pp] for kind in part}
    largest = max(whole[kind] for kind in own)
    if not trains:
        return largest, 0, 0
    own_mlps = [passed_mlps(model, kind) for kind in own]
    gradients = ELEMENT_BYTES * (model.hidden_size + max(mlps.vectors * mlps.width for mlps in own_mlps))
    none, host = checkpointing == "none", checkpointing == "offload"
    saved = whole if none else dict.fromkeys(whole, ELEMENT_BYTES * model.hidden_size)
    if checkpointing == "selective":
        results = model.attention.heads * model.attention.value_size
        saved = {kind: size + ELEMENT_BYTES * (results + kept(model, kind)) + _row_bytes(model)
                 for kind, size in saved.items()}  # fmt: skip
    sizes = [sum(saved[kind] for kind in part) for part in parts]
    under_way = sizes[0]  # without a pipeline a micro-batch ends before the next one begins
    if pp > 1:
        under_way = most_under_way(order_of(stage, pp, interleave, microbatches), sizes.__getitem__)
    if host:
        under_way = min(under_way, HOST_BUFFERS * ELEMENT_BYTES * model.hidden_size)
    return under_way, 0 if none else largest, gradients


def _row_bytes(model: Model) -> int:
    """A log-sum-exp per head, in float32."""
    return 4 * model.attention.heads


def _saved_elements(model: Model, kind: LayerKind) -> int:
    """Elements per position that the backward pass of a layer reads.

    The input and its norm, queries, keys, values and results; the sum behind attention and its norm; of an MLP its one
    or two hidden vectors and their product.
    """
    attention = model.attention
    kv_heads = attention.heads if kind.letter == "L" else attention.kv_head_count
    keys = attention.heads * attention.head_dim + kv_heads * (attention.head_dim + attention.value_size)
    mlps = passed_mlps(model, kind)
    attended = 4 * model.hidden_size + keys + attention.heads * attention.value_size
    return attended + 2 * mlps.copies * model.hidden_size + (mlps.vectors + 1) * mlps.width
