"""All ways to train a model on so many GPUs, and closed-form bounds of their time: what `plan` searches.

    for each in candidates(load_model("llama-3-8b"), 131072, 2**20, ranks=16, domain=8):
        print(each.layout, bounds_of(each, Speeds.of(machine, rates, each.layer)))

A candidate is a `StepPlan` without a schedule. Of layouts that differ in their order alone only the usual one is
enumerated: tensor groups inside an NVLink domain, then context, data and pipeline parallelism.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import accumulate
from typing import NamedTuple

from tasp_lab.core.choices import Checkpointing, MatrixDtype
from tasp_lab.core.errors import ScheduleError, WorkloadError
from tasp_lab.core.units import format_count
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.training_step.costs import (
    ELEMENT_BYTES,
    Cost,
    LayerKind,
    before_attention,
    behind_projection,
    kinds_of,
    output_matrix,
    output_projection,
    repeated_selectively,
    stored_parameters,
)
from tasp_lab.prediction.training_step.layout import Layout, StepPlan
from tasp_lab.prediction.training_step.phases import GRADIENT_BYTES, PARAMETER_BYTES
from tasp_lab.prediction.training_step.rates import StepRates, compute_of_step
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.kernel_shapes import pairs_in_band
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.models.model import Model

CHECKPOINTINGS: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""Those that are tried by default: offload takes no less time than full, so it is tried where nothing fits."""

INTERLEAVES = (1, 2, 4)
"""Parts of the model per pipeline stage that are tried."""

ZERO_STAGES = (1, 3)
"""What is sharded over ranks with the same parameters: optimizer states, or all states as FSDP does. Stage 0 needs more
memory than stage 1 and sends as much, stage 2 more messages than stage 1."""

TRAINS = AttentionOptions("both")

LARGE_BATCH = 2**15
"""Positions of a rank from which on several sequences in a micro-batch are not tried: matrices are large enough."""


def candidates(
    model: Model,
    sequence: int,
    batch_tokens: int,
    ranks: int,
    domain: int,
    *,
    checkpointings: Sequence[Checkpointing] = CHECKPOINTINGS,
    matrix_dtype: MatrixDtype = "bf16",
    logit_chunks: int = 1,
    offload: bool = False,
) -> Iterator[StepPlan]:
    """Every layout of a step of `batch_tokens` positions in sequences of `sequence` on so many ranks.

    Parameters
    ----------
    domain : the ranks of an NVLink domain; tensor groups do not exceed it.
    checkpointings, matrix_dtype, logit_chunks, offload : of `Layout` and `StepPlan`.

    Raises `WorkloadError` for a batch that is not a whole number of sequences.

    >>> from tasp_lab.workload.models.catalogue import load_model
    >>> found = list(candidates(load_model("llama-3-8b"), 8192, 16384, 4, 4, checkpointings=["full"]))
    >>> sorted({(each.layout.tp, each.layout.cp, each.layout.pp, each.layout.dp) for each in found})[:4]
    [(1, 1, 2, 2), (1, 1, 4, 1), (1, 2, 1, 2), (1, 2, 2, 1)]
    """
    sequences, rest = divmod(batch_tokens, sequence)
    if rest or sequences < 1:
        raise WorkloadError(
            f"batch tokens: {batch_tokens}, expected a multiple of the sequence of {format_count(sequence)} positions"
        )
    for tp, cp, pp in _degrees(model, sequence, ranks, domain):
        dp = ranks // (tp * cp * pp)
        if sequences % dp:
            continue
        for batch in _batches(sequences // dp, sequence // (tp * cp)):
            microbatches = sequences // dp // batch
            for zero in ZERO_STAGES if cp * dp > 1 else (0,):
                for interleave in INTERLEAVES:
                    if interleave > 1 and (pp == 1 or microbatches % pp or pp * interleave > len(model.pattern)):
                        continue
                    for checkpointing in checkpointings:
                        layout = Layout(tp, cp, pp, dp, zero, interleave, microbatches, checkpointing, logit_chunks,
                                        offload, overlap=True)  # fmt: skip
                        yield StepPlan(model, sequence, "", layout, batch, TRAINS, matrix_dtype)


def _degrees(model: Model, sequence: int, ranks: int, domain: int) -> Iterator[tuple[int, int, int]]:
    """Tensor, context and pipeline parallelism; the rest of the ranks is data parallelism."""
    for tp in _divisors(ranks):
        if tp > domain or domain % tp:
            continue
        for cp in _divisors(ranks // tp):
            # two parts of a sequence per rank, as zigzag layouts have, and whole positions in tensor groups
            if sequence % (2 * cp * tp if cp > 1 else tp):
                continue
            for pp in _divisors(ranks // tp // cp):
                try:
                    Layout(tp, cp, pp, 1).check(model)
                except ScheduleError:
                    continue
                yield tp, cp, pp


def _batches(sequences: int, positions: int) -> Iterator[int]:
    """Sequences of a micro-batch: one, and more while ranks have few positions."""
    batch = 1
    while sequences % batch == 0 and (batch == 1 or batch * positions <= LARGE_BATCH):
        yield batch
        batch *= 2


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def domain_of(topology: Topology) -> int:
    """The ranks of a node, within which links are fastest: the fewest of all nodes."""
    nodes = list(topology.node_of_rank)
    return min(nodes.count(node) for node in set(nodes))


# -------------------------------------------------------------------------------------------------------- bounds


class Speeds(NamedTuple):
    """What bounds need of a machine.

    Attributes
    ----------
    matrices, forward, backward : the highest rates of matrix products and of attention, in FLOP/s.
    memory : bytes per second of element-wise work; 0 if it takes no time.
    inside, across, domain : see `network_of` and `domain_of`.
    """

    matrices: float
    forward: float
    backward: float
    memory: float
    inside: float
    across: float
    domain: int

    @classmethod
    def of(cls, machine: Machine, rates: StepRates, layer: Workload) -> Speeds:
        """The speeds of a machine at which a layer's attention and messages run at most."""
        compute, heads = compute_of_step(machine, rates), (layer.head_dim, layer.value_dim)
        forward, backward = (
            float(compute.attention.rate(layer.dtype, passing, "softmax", *heads).flops_per_s or math.inf)
            for passing in ("forward", "backward")
        )
        matrices, memory = compute.rates.highest_flops_per_s, float(compute.rates.memory_bytes_per_s or math.inf)
        return cls(matrices, forward, backward, memory, *network_of(machine.topology), domain_of(machine.topology))


def network_of(topology: Topology) -> tuple[float, float]:
    """Bytes per second into a rank: over all of its links, and from other nodes while all ranks of a node receive.

    >>> from tasp_lab.topology.builders import nodes
    >>> network_of(nodes(2, 4, "switch", nic_bandwidth_bytes_per_s=1, link_bandwidth_bytes_per_s=50))
    (51.0, 1.0)
    """
    inside = float(max(topology.bandwidths_into_ranks_bytes_per_s, default=0))
    n, domain = topology.world_size, domain_of(topology)
    used = Counter[int]()
    for rank in range(n) if n > domain else ():
        pair = rank, (rank + domain) % n
        used.update(topology.route(*pair).constraints if topology.has_route(*pair) else ())
    rates = [float(topology.constraints[each].bandwidth_bytes_per_s) / count for each, count in used.items()]
    return inside, min(rates, default=inside)


def bounds_of(plan: StepPlan, speeds: Speeds) -> tuple[float, float]:
    """Seconds of a step in closed form: a lower bound, and what is expected.

    The bound has kernel calls at the highest rates there are, recomputation, pipeline bubbles, and the messages of
    tensor groups, between which nothing is computed. What is expected has the other messages besides, at the bandwidth
    of their links where kernel calls cannot hide them. It decides what is simulated first, nothing else.

    Stage s starts once the first micro-batch went through the parts of the model before it, and these end their
    backward passes behind its last one. So a step takes at least ``m w(s) + sum of w(c), c < s``, where m is the
    number of micro-batches, w(s) the work of one at stage s, and w(c) that of part c of the model; with equal stages
    that is what 1F1B takes (arXiv:2104.04473, section 2.2).
    """
    layout, model = plan.layout, plan.model
    work = {kind: _layer_s(plan, kind, speeds) for kind in set(kinds_of(model))}
    tensor_s, context_s, state_s = _message_s(plan, speeds)
    tokens = plan.sequence * plan.batch / (layout.cp or 1) / layout.tp
    output = _training(output_matrix(model))
    output = output._replace(moved_bytes=sum(plan.software.loss_bytes) * model.vocabulary)
    output_s = _cost_s(output, tokens, speeds)

    def step_s(messages: bool) -> float:
        of_layer = {
            kind: attention_s + other_s + tensor_s + (context_s(attention_s) if messages else 0.0)
            for kind, (attention_s, other_s) in work.items()
        }
        gathered_s = state_s if messages and layout.zero == 3 else 0.0
        of_part = {kinds: sum(of_layer[kind] for kind in kinds) for kinds in set(plan.parts)}
        parts = [of_part[kinds] for kinds in plan.parts]
        parts[-1] += output_s
        parts = [max(own, len(kinds) * gathered_s) for own, kinds in zip(parts, plan.parts, strict=True)]
        before = accumulate(parts, initial=0.0)
        return max(
            layout.microbatches * sum(parts[stage :: layout.pp]) + before_s
            for stage, before_s in zip(range(layout.pp), before, strict=False)
        )

    once_s = 0.0 if layout.zero == 3 else state_s * max(map(len, plan.parts)) * layout.interleave
    return step_s(False), step_s(True) + once_s


def _layer_s(plan: StepPlan, kind: LayerKind, speeds: Speeds) -> tuple[float, float]:
    """The least time of a layer, both passes of a micro-batch, at a rank: of attention, and of all else."""
    layout, layer, model, work = plan.layout, plan.layer_of(kind.letter), plan.model, plan.element_wise
    cp = layout.cp or 1
    cost = before_attention(model, kind, work).plus(output_projection(model)).plus(behind_projection(model, kind, work))
    again = {"none": (), "selective": (repeated_selectively(model, kind, work),)}.get(layout.checkpointing, (cost,))
    cost = reduce(Cost.plus, again, _training(cost))
    attention_s = 0.0
    if kind.letter != "L":
        low, high = layer.visible.band(0, layer.sequence, layer.sequence)
        pairs = int(pairs_in_band(low, high, layer.sequence, layer.sequence))  # of one head and sequence
        flops = pairs * layer.flops_per_pair / cp
        backward = pairs * layer.backward_flops_per_pair / cp
        attention_s = flops * (1 + layout.repeats_layers) / speeds.forward + backward / speeds.backward
    return attention_s, _cost_s(cost, layer.sequence * layer.batch / cp / layout.tp, speeds)


def _training(cost: Cost) -> Cost:
    """Work forward and backward."""
    return cost.plus(cost.backward("inputs", "weights"))


def _cost_s(cost: Cost, tokens: float, speeds: Speeds) -> float:
    return tokens * (cost.flops / speeds.matrices + cost.moved_bytes / speeds.memory)


def _message_s(plan: StepPlan, speeds: Speeds) -> tuple[float, Callable[[float], float], float]:
    """Messages of a layer and micro-batch: of tensor groups, of context groups beside so much attention, of states.

    States without FSDP are those of a whole step.
    """
    layout, layer, model = plan.layout, plan.layer, plan.model
    cp, tp = layout.cp or 1, layout.tp
    passes = 2 + layout.repeated
    # a gather and a sum around attention, and around the MLP; inputs of both again (arXiv:2205.05198, section 4.2.2)
    hidden_bytes = ELEMENT_BYTES * model.hidden_size * plan.sequence * plan.batch / cp
    tensor_s = (4 * passes + 2) * hidden_bytes * (tp - 1) / tp / speeds.inside if tp > 1 else 0.0
    rate = speeds.inside if tp * cp <= speeds.domain else speeds.across
    # keys go around a ring, backward with their gradients; or heads are exchanged, and nothing hides that
    ring_s = (passes + 1) * layer.kv_bytes_per_position * plan.sequence * (cp - 1) / cp / rate
    moved = layer.query_bytes_per_position + layer.output_bytes_per_position + layer.kv_bytes_per_position
    heads_s = (passes + 1) * moved * plan.sequence / cp * (cp - 1) / cp / rate if layer.heads >= cp else math.inf

    def context_s(attention_s: float) -> float:
        return min(max(0.0, ring_s - attention_s), heads_s)

    sharing = cp * (layout.dp or 1)
    beside = max(1, min(sharing, speeds.domain // tp))  # ranks of a node with the same parameters
    kinds = kinds_of(model)
    size = sum(stored_parameters(model, kind) for kind in kinds) / len(kinds) / tp
    moved_bytes = (2 * PARAMETER_BYTES if layout.zero == 3 else PARAMETER_BYTES) + GRADIENT_BYTES
    inside_s = size * moved_bytes * (beside - 1) / beside / speeds.inside
    across_s = size * moved_bytes / beside / speeds.across if sharing > beside else 0.0
    return tensor_s, context_s, max(inside_s, across_s)
