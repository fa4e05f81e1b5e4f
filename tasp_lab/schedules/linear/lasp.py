"""The chain of states: LASP (arXiv:2404.02882) and All-Scan, of ZeCO (arXiv:2507.01004).

Each rank makes the state of its chunk and attends within the chunk. Meanwhile states go from rank to rank: what comes
is decayed by the chunk, its state is added, and the sum is given to the next rank. So every rank sends one state, on
world_size - 1 hops one after another. All-Scan does so in **pieces**, groups of KV heads: each is sent on as soon as it
has been added to, so the hops of different pieces overlap. Backward the gradients of states go the other way.

Where a document starts a chain begins, and nothing is sent to the chunk that it starts with.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.linear.task import LinearTask, chunk_layout, layer_schedule
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload


@schedule(
    "lasp",
    "linear",
    moves="one state, decayed and added to at each rank, on n - 1 hops one after another",
    layout=chunk_layout,
    moves_states=True,
)
@schedule(
    "all-scan",
    "linear",
    moves="the state of `lasp` in `--pieces`, groups of KV heads, each sent on at once (ZeCO)",
    layout=chunk_layout,
    options=("pieces",),
    moves_states=True,
)
def lasp(
    name: str, topology: Topology, workload: Workload, options: AttentionOptions, decays: tuple[float, ...]
) -> tuple[Schedule, ...]:
    """The passes of ``lasp``, or of ``all-scan`` with states in pieces.

    Raises `ScheduleError` for a full mask, for pieces of unequal size, and if neighbours have no links.
    """
    if not workload.visible.is_causal:
        raise ScheduleError(f"schedule {name!r} passes states from chunk to chunk, expected a causal mask")
    pieces = (options.pieces or best_pieces(topology, workload)) if name == "all-scan" else 1

    def one_pass(backward: bool) -> Schedule:
        layout = chunk_layout(workload, topology.world_size)
        try:
            task = LinearTask(workload, layout, decays, "fp32" if backward else None, pieces)
        except ScheduleError as error:
            raise ScheduleError(f"schedule {name!r}: {error}") from None
        return layer_schedule(name, topology, task, _steps(task), kept=task.owned(task.states.chunk))

    return options.build(one_pass)


def best_pieces(topology: Topology, workload: Workload) -> int:
    """The divisor of the number of KV heads with the least time of the chain, if each hop takes as long as the slowest.

    K pieces take world_size - 2 + K hops, each the latency and the time of a K-th of a state. What a library takes to
    launch a message is not counted, as schedules do not depend on the library; tuning counts it
    (`tasp_lab.prediction.evaluate.tuned`).
    """
    heads, hops = workload.kv_head_count, topology.world_size - 2
    state_bytes = 4 * workload.batch * heads * workload.head_dim * workload.value_size
    latency_s, transfer_s = 0.0, 0.0
    for rank in range(1, topology.world_size):
        if topology.has_route(rank - 1, rank):
            route = topology.route(rank - 1, rank)
            slowest = min(topology.constraints[each].bandwidth_bytes_per_s for each in route.constraints)
            latency_s = max(latency_s, float(route.latency_s))
            transfer_s = max(transfer_s, float(state_bytes / slowest))
    divisors = [each for each in range(1, heads + 1) if heads % each == 0]
    return min(divisors, key=lambda pieces: (hops + pieces) * (latency_s + transfer_s / pieces))


def _steps(task: LinearTask) -> list[Step]:
    """Piece p is added to by the d-th rank of its chain at step 1 + p + 2 d, and sent at the step behind that."""
    states, chunks = task.states, np.arange(len(task.owner))
    calls: dict[int, list[Calls]] = defaultdict(list)
    sent: dict[int, list[tuple[int, int, int, int, bool]]] = defaultdict(list)
    made, begin = task.makers, task.last if task.is_backward else task.first
    target = made + states.ahead
    depth = np.abs(made - begin[target])
    for piece in range(task.pieces):
        when = 1 + piece + 2 * depth
        for step in np.unique(when).tolist():
            now = when == step
            calls[step].append(task.chain(states.chain, made[now], np.full_like(made[now], piece)))
        block = task.block(states.summed, target, piece)
        rows = zip(when.tolist(), task.owner[made].tolist(), task.owner[target].tolist(), block.tolist(), strict=True)
        for step, source, destination, each in rows:
            sent[step + 1].append((source, destination, 0, each, True))
    if len(made):
        calls[0].append(task.calls(states.make, made))
    calls[1].append(task.calls(states.within, chunks))
    received = task.receivers
    when = task.pieces + 2 * np.abs(received - begin[received])
    for step in np.unique(when).tolist():
        calls[step].append(task.calls(states.apply, received[when == step]))
    return [Step.of(sent[step], calls[step]) for step in range(0 if len(made) else 1, max(calls) + 1)]
