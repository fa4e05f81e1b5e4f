"""Ring Attention of linear attention: keys and values circulate, as if there were no states (arXiv:2310.01889).

At each step every rank attends with its queries to the keys that have come, while it sends them on. It is the baseline
of the papers: ``ring-linear-attention`` multiplies queries with keys, as they do, and is quadratic in the sequence;
``ring-linear-attention-right`` makes the state of the keys and multiplies queries with that. Backward the gradients of
keys travel a step behind the keys, and from the last rank that adds to them straight to their owner, or, without a
route, on around the ring.

Keys go as far as a query attends to them. The layer has no gates: keys of other chunks would have to carry them.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import single_rings
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.linear.task import (
    ATTEND,
    ATTEND_BY_STATE,
    DIFFERENTIATE_BY_STATE,
    DIFFERENTIATE_TILE,
    KEY_GRADIENTS,
    KEYS,
    TENSORS,
    LinearTask,
    chunk_layout,
    layer_schedule,
)
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

Row = tuple[int, int, int, int, bool]
"""Source, destination, lane and block of a transfer, and whether it gives."""


RING_OPTIONS = ("trim", "buffers", "gradient_dtype")


@schedule(
    "ring-linear-attention",
    "linear",
    moves="keys and values around one ring; queries times keys, quadratic in the sequence",
    layout=chunk_layout,
    options=RING_OPTIONS,
    is_baseline=True,
)
@schedule(
    "ring-linear-attention-right",
    "linear",
    moves="the same; a state of each chunk's keys, linear in the sequence",
    layout=chunk_layout,
    options=RING_OPTIONS,
    is_baseline=True,
)
def ring_linear_attention(
    name: str, topology: Topology, workload: Workload, options: AttentionOptions, decays: tuple[float, ...]
) -> tuple[Schedule, ...]:
    """The passes of ``ring-linear-attention`` or ``ring-linear-attention-right``.

    Raises `ScheduleError` for a decay that depends on the data, and if there is no ring.
    """
    if workload.decay in ("scalar", "channel"):
        raise ScheduleError(
            f"schedule {name!r}: decay {workload.decay!r} depends on the data of all chunks in between, "
            "expected none or head"
        )
    layout, by_state = chunk_layout(workload, topology.world_size), name.endswith("-right")

    def one_pass(backward: bool) -> Schedule:
        dtype = options.wire_dtype(workload.dtype, backward=True, sums=True) if backward else None
        task = LinearTask(workload, layout, decays, dtype)
        tensors = (KEYS, KEY_GRADIENTS) if backward else (KEYS,)
        pools = {tensor: Pool(TENSORS[tensor], options.buffers) for tensor in tensors}
        found = [
            layer_schedule(
                name, topology, task, _Circulation(task, topology, ring, by_state, options.trim).steps(),
                lanes=3 if backward else 1, pools=pools, has_states=False,
            )
            for ring in single_rings(topology)
        ]  # fmt: skip
        return min(found, key=lambda schedule: int(schedule.bytes_by_rank().sum()))

    return options.build(one_pass)


class _Circulation:
    """Keys of all chunks around one ring, an int array (world_size,) of ranks."""

    def __init__(self, task: LinearTask, topology: Topology, ring: IntArray, by_state: bool, trim: bool) -> None:
        self._task, self._topology, self._ring = task, topology, ring
        self._by_state, self._straight = by_state, trim
        n = topology.world_size
        position, chunk_at = np.empty(n, dtype=np.int64), np.full(n, -1)
        position[ring] = np.arange(n)
        chunk_at[position[task.owner]] = np.arange(len(task.owner))
        self._home = position[task.owner]
        hops = np.arange(n)
        query = chunk_at[(self._home[:, None] + hops) % n]
        key = np.arange(len(task.owner))[:, None]
        attends = (query >= 0) & (task.first[query] <= key) & ((key <= query) | task.is_full)
        self._query = np.where(attends, query, -1)
        """The chunk of queries that the keys of each chunk come to at each hop, -1 for none: (chunks, hops)."""
        self._reach = np.where(attends, hops, 0).max(axis=1)
        self._sent_to = self._reach if trim else np.full_like(self._reach, n - 1)

    def _at(self, chunk: IntArray, hop: int) -> IntArray:
        """The rank at which the keys of chunks are after so many hops."""
        found: IntArray = self._ring[(self._home[chunk] + hop) % len(self._ring)]
        return found

    def steps(self) -> list[Step]:
        task, chunks = self._task, np.arange(len(self._task.owner))
        sent: dict[int, list[Row]] = defaultdict(list)
        calls: dict[int, list[Calls]] = defaultdict(list)
        for hop in range(int(self._sent_to.max()) + 1):
            moving = chunks[self._sent_to > hop]
            self._send(sent[hop], moving, hop, KEYS)
            used = chunks[self._query[:, hop] >= 0]
            calls[hop] += self._calls(used, hop)
        if task.is_backward:
            self._send_gradients(sent)
        return [Step.of(sent[step], calls[step]) for step in range(max([*sent, *calls]) + 1)]

    def _calls(self, key: IntArray, hop: int) -> list[Calls]:
        """Calls with the keys that come at a hop: through their state, but within a chunk under a causal mask."""
        if not len(key):
            return []
        through_state = self._by_state and (hop > 0 or self._task.is_full)
        kernels = (DIFFERENTIATE_TILE, DIFFERENTIATE_BY_STATE) if self._task.is_backward else (ATTEND, ATTEND_BY_STATE)
        return [self._task.tiles(kernels[through_state], self._query[key, hop], key, self._at(key, hop))]

    def _send(self, rows: list[Row], chunk: IntArray, hop: int, tensor: int, *, to_hop: int | None = None) -> None:
        """Send blocks of chunks from the rank of a hop to the next one, or to that of another hop.

        Gradients are given, on lanes of their own: 1 around the ring, 2 straight home.
        """
        end = hop + 1 if to_hop is None else to_hop
        gives = tensor == KEY_GRADIENTS
        lane = 0 if not gives else 1 if to_hop is None else 2
        columns = (self._at(chunk, hop), self._at(chunk, end), self._task.block(tensor, chunk))
        rows += [(*each[:2], lane, each[2], gives) for each in zip(*(x.tolist() for x in columns), strict=True)]

    def _send_gradients(self, sent: dict[int, list[Row]]) -> None:
        """The gradients of keys leave each rank at the step behind its call, with the parts of all before."""
        chunks, n = np.flatnonzero(self._reach > 0), len(self._ring)
        first = np.where(self._query[:, 1:] >= 0, np.arange(1, n), n).min(axis=1, initial=n)
        last = self._ring[(self._home[chunks] + self._reach[chunks]) % n]
        straight = self._straight and bool(self._topology.have_routes(last, self._ring[self._home[chunks]]).all())
        for hop in range(1, n):
            onward = self._reach[chunks] > hop if straight else np.full(len(chunks), True)
            self._send(sent[hop + 1], chunks[onward & (first[chunks] <= hop)], hop, KEY_GRADIENTS)
            if straight:
                self._send(sent[hop + 1], chunks[self._reach[chunks] == hop], hop, KEY_GRADIENTS, to_hop=0)
