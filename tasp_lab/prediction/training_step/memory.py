"""What each GPU holds during a step.

- **States** in mixed precision: 4 bytes per parameter in float32, 4 for its gradient, 8 for the two moments of Adam;
  without training 2. With FSDP each rank has its share of them, besides two gathered layers, the gathered embedding and
  output, and the gradients of one layer; else a copy of all parameters in 16 bits.
- **Activations**, 2 bytes per element, of each layer: what its backward pass reads, or with checkpointing its input,
  and with selective checkpointing also the results of attention. A layer that is computed again needs all of them at
  once. Kernels are fused: norms, rotary positions and attention keep nothing else but a log-sum-exp per head.
- **Logits**: 2 bytes, and 4 for their gradient.
- **Attention buffers**: what arrives from other ranks, of the pass that needs most.

Left out: fragmentation, and copies of experts' inputs that are unbalanced. What the context and the communication
library take is kept back from the memory of a GPU (`tasp_lab.prediction.training_step.rates.RESERVED_BYTES`).
"""

from __future__ import annotations

from typing import NamedTuple

from tasp_lab.prediction.training_step.attention_passes import AllPasses
from tasp_lab.prediction.training_step.costs import ELEMENT_BYTES, LayerKind, kinds_of, stored_parameters
from tasp_lab.prediction.training_step.phases import GRADIENT_BYTES, PARAMETER_BYTES
from tasp_lab.prediction.training_step.plan import StepPlan
from tasp_lab.schedule.buffer_layout import memory_bytes
from tasp_lab.workload.models.model import Model
from tasp_lab.workload.models.parameters import embedding_parameters, parameter_count

MASTER_BYTES, MOMENT_BYTES = 4, 8
"""Per parameter: in float32, and the two moments of Adam."""

LOGIT_BYTES = 6
"""Per logit: in 16 bits, and its gradient in float32."""


class MemoryUse(NamedTuple):
    """Bytes of the GPU that needs most."""

    states: int
    gathered: int
    activations: int
    logits: int
    attention_buffers: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def memory_use(plan: StepPlan, passes: AllPasses, ranks: int, tokens: int) -> MemoryUse:
    """What the GPU with most positions holds; `tokens` are its positions, over all its sequences of a micro-batch."""
    model = plan.model
    return MemoryUse(
        states_bytes(plan, ranks),
        _gathered_bytes(plan, ranks),
        tokens * _activation_bytes(plan),
        tokens * model.vocabulary * (LOGIT_BYTES if plan.trains else ELEMENT_BYTES),
        max(
            int(memory_bytes(each.schedule).max())
            for layer in passes.layers.values()
            for each in (layer.forward, layer.backward)
            if each is not None
        ),
    )


def states_bytes(plan: StepPlan, ranks: int) -> int:
    """Parameters, gradients and optimiser states of a rank, rounded up."""
    each = MASTER_BYTES + GRADIENT_BYTES + MOMENT_BYTES if plan.trains else PARAMETER_BYTES
    total = each * parameter_count(plan.model)
    return -(-total // ranks) if plan.fsdp else total


def _gathered_bytes(plan: StepPlan, ranks: int) -> int:
    """Parameters in 16 bits beside the states, and the gradients of a layer before they are reduced."""
    model = plan.model
    if ranks == 1 and not plan.trains:
        return 0
    if not plan.fsdp:
        return PARAMETER_BYTES * parameter_count(model) if plan.trains else 0
    largest = max(stored_parameters(model, kind) for kind in set(kinds_of(model)))
    layers = 2 * PARAMETER_BYTES + (GRADIENT_BYTES if plan.trains else 0)
    return layers * largest + PARAMETER_BYTES * embedding_parameters(model).stored


def _activation_bytes(plan: StepPlan) -> int:
    """Of one position, over all layers."""
    kinds = kinds_of(plan.model)
    whole = {kind: ELEMENT_BYTES * _saved_elements(plan.model, kind) + _row_bytes(plan.model) for kind in set(kinds)}
    largest = max(whole.values())
    if not plan.trains:
        return largest
    if plan.checkpointing == "none":
        return sum(whole[kind] for kind in kinds)
    kept = ELEMENT_BYTES * plan.model.hidden_size
    if plan.checkpointing == "selective":
        results = plan.model.attention.heads * plan.model.attention.value_size
        kept += ELEMENT_BYTES * results + _row_bytes(plan.model)
    return kept * len(kinds) + largest


def _row_bytes(model: Model) -> int:
    """A log-sum-exp per head, in float32."""
    return 4 * model.attention.heads


def _saved_elements(model: Model, kind: LayerKind) -> int:
    """Elements per position that the backward pass of a layer reads.

    The input and its norm, queries, keys, values and results; the sum behind attention and its norm; of an MLP its one
    or two hidden vectors and their product.
    """
    attention = model.attention
    kv_heads = attention.kv_head_count if kind.letter == "S" else attention.heads
    keys = attention.heads * attention.head_dim + kv_heads * (attention.head_dim + attention.value_size)
    found = 4 * model.hidden_size + keys + attention.heads * attention.value_size
    if kind.has_experts and model.experts is not None:
        experts = model.experts
        copies = 2 * experts.active * model.hidden_size
        return found + copies + 3 * (experts.active + experts.shared) * experts.width
    return found + (0 if model.mlp is None else (3 if model.mlp.gated else 2) * model.mlp.width)
