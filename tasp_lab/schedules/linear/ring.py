"""Ring Attention of linear attention: keys and values circulate, as if there were no states (arXiv:2310.01889).

At each step every rank attends with its queries to the keys that have come, while it sends them on. It is the baseline
of the papers: ``ring-linear-attention`` multiplies queries with keys, as they do, and is quadratic in the sequence;
``ring-linear-attention-right`` makes the state of the keys and multiplies queries with that. Backward the gradients of
keys travel a step behind the keys, and from the last rank that adds to them straight to their owner, or, without a
route, on around the ring.

Keys go as far as a query attends to them. The layer has no gates: keys of other chunks would have to carry them.
"""

from __future__ import annotations

import numpy as np

from tasp_lab.core.arrays import IntArray, stable_order
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.circulation import Hops
from tasp_lab.schedules.attention.forward import single_rings
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.travel import PeerLanes, Travel, TravelSteps, around, onward
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
                name, topology, task, TravelSteps(_travel(_KeysOfChunks(task, ring, by_state), topology, options.trim)),
                lanes=3 if backward else 1, pools=pools, has_states=False,
            )
            for ring in single_rings(topology)
        ]  # fmt: skip
        return min(found, key=lambda schedule: int(schedule.bytes_by_rank().sum()))

    return options.build(one_pass)


def _travel(keys: _KeysOfChunks, topology: Topology, trim: bool) -> Travel:
    """Keys on lane 0, their gradients around the ring on lane 1, or straight home on lane 2."""
    n, route = keys.world_size, around(keys.world_size)
    shortcuts = trim and bool(topology.have_routes(keys.at(keys.last), keys.owner)[keys.last > 0].all())
    if keys.task.is_backward:
        route = around(n, onward(n, shortcuts=shortcuts))
    none = np.zeros((n, n), dtype=np.int64)
    return Travel(keys, route, PeerLanes(3, none, none + 1, 2 if shortcuts else None), trim=trim)


class _KeysOfChunks(Hops):
    """Keys of all chunks around one ring, an int array (world_size,) of ranks."""

    task: LinearTask

    def __init__(self, task: LinearTask, ring: IntArray, by_state: bool) -> None:
        chunks = np.arange(len(task.owner))
        super().__init__(ring[None], np.zeros_like(chunks), task.owner)
        self.task, self._by_state, self.blocks = task, by_state, task.block(KEYS, chunks)
        self.gradients = task.block(KEY_GRADIENTS, chunks)
        self._chunk_at = np.full(len(ring), -1)
        self._chunk_at[task.owner] = chunks
        query = np.stack([self._chunk_at[self.at(hop)] for hop in range(len(ring))])
        self._use((query >= 0) & (task.first[query] <= chunks) & ((chunks <= query) | task.is_full))

    def order(self, blocks: IntArray, ranks: IntArray, *before: IntArray) -> IntArray:
        return stable_order(*before, ranks, blocks)

    def calls_with(self, blocks: IntArray, ranks: IntArray) -> tuple[Calls, ...]:
        return self._calls(blocks, ranks, by_state=self._by_state)

    def calls_at_owners(self) -> tuple[Calls, ...]:
        """Through states, too, but not within a chunk under a causal mask."""
        return self._calls(np.arange(len(self.owner)), self.owner, by_state=self._by_state and self.task.is_full)

    def _calls(self, chunks: IntArray, ranks: IntArray, *, by_state: bool) -> tuple[Calls, ...]:
        kernels = (DIFFERENTIATE_TILE, DIFFERENTIATE_BY_STATE) if self.task.is_backward else (ATTEND, ATTEND_BY_STATE)
        return (self.task.tiles(kernels[by_state], self._chunk_at[ranks], chunks, ranks),) if len(chunks) else ()
