"""Lower bound of the time of an attention pass, for every schedule of the task.

**Compute.** All ranks together compute all tiles, so the busiest one computes at least the average.

**Communication.** Take a set S of ranks, queries that S owns, and keys (with their values) that S has not got at the
start. Each pair of a query and a key that it attends to is either computed in S, and then the key enters S; or
elsewhere, and then a part of the result enters S, since results end at the owners of their queries. So what enters S is
a vertex cover, by keys and results, of the graph of these pairs, and weighs no less than the lightest cover of any part
of that graph. The part used is that of blocks with a full mask, whose positions have the same neighbours. If their
neighbours are nested, as under a causal mask, the lightest cover is known: the results of all queries beyond some
point, and the keys that those before it attend to. If they are not, it is that of a single block of queries.

In a backward pass the gradients of queries take the place of results, and foreign queries with the keys of S make a
second cover, by query records and gradients of keys. Both consist of different data, so they add. Results and gradients
weigh as much as in the dtype of the layer, or in that on the wire if it is narrower: the least that a schedule may use.

S is each single rank, all ranks whose links share a capacity, and the complement of the cut that bounds AllGather. What
enters S takes at least its bytes over the bandwidth of all links into S, plus the lowest latency of a route into it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.attention.task import KEYS, QUERIES, AttentionTask
from tasp_lab.machines.machine import Machine
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.limits import bottleneck, like, ranks_behind
from tasp_lab.units import Number


def attention_bound_s(machine: Machine, task: AttentionTask, initial: BoolArray | None = None) -> Number:
    """Lower bound of the time of a pass in seconds; exact for exact numbers.

    `initial`, a bool array (world_size, blocks), is what each rank holds at the start; by default the blocks it owns.

    Eight ranks compute for 1 s each, and each receives 7/8 of the keys, or results of its own two positions, over seven
    links:

    >>> from fractions import Fraction
    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.attention.circulation import cut_blocks
    >>> from tasp_lab.machines.machine import ComputeRate
    >>> from tasp_lab.workload.sequence_layout import contiguous
    >>> from tasp_lab.workload.layer import Workload
    >>> layer = Workload(sequence=16, heads=1, head_dim=1)             # 4 FLOPs per pair, results of 2 bytes
    >>> task, _ = cut_blocks(layer, contiguous(16, 8), [Fraction(1)])
    >>> mesh, rate = full_mesh(8, Fraction(4), Fraction(1)), ComputeRate(Fraction(128))
    >>> attention_bound_s(Machine(mesh, compute=rate), task)           # 1 + 4 / 28
    Fraction(8, 7)
    """
    compute_s = machine.least_compute_s(machine.rate_of(task.workload, task.passing), task.total_flops)
    held = task.owned(KEYS, QUERIES) if initial is None else initial
    return max(compute_s, _communication_s(machine.topology, task, held) if len(held) > 1 else 0)


def _communication_s(topology: Topology, task: AttentionTask, held: BoolArray) -> Number:
    """The largest of the bounds on communication."""
    latency = topology.min_latencies_into_ranks_s
    received = [entering_bytes(task, held, [rank]) for rank in range(topology.world_size)]
    into = topology.bandwidths_into_ranks_bytes_per_s
    bounds = [like(topology, received[rank] / into[rank]) + latency[rank] for rank in np.flatnonzero(received).tolist()]
    for group in topology.shared:
        if behind := [rank for rank in ranks_behind(topology, group) if received[rank]]:
            sums = sum(received[rank] for rank in behind)
            bounds.append(sums / group.bandwidth_bytes_per_s + min(latency[rank] for rank in behind))
    cut = bottleneck(topology)
    outside = [rank for rank in range(topology.world_size) if rank not in cut.inside]
    if crossing := entering_bytes(task, held, outside):
        bounds.append(like(topology, crossing / cut.bandwidth_bytes_per_s) + min(latency[rank] for rank in outside))
    return max(bounds, default=0)


def entering_bytes(task: AttentionTask, held: BoolArray, ranks: list[int]) -> int:
    """The bytes that any schedule of the task brings into a set of ranks, which holds `held` at the start."""
    mine, here = np.isin(task.owner, ranks), held[ranks].any(axis=0)
    keys, queries = task.tensor == KEYS, task.tensor == QUERIES
    total = _covers(task, np.flatnonzero(queries & mine), np.flatnonzero(keys & ~here))
    if task.is_backward:
        total += _covers(task, np.flatnonzero(keys & mine), np.flatnonzero(queries & ~here))
    return total


@dataclass(frozen=True, eq=False)
class _Runs:
    """Positions of one rank, tensor and group of blocks that follow one another; int arrays (runs,)."""

    group: IntArray
    start: IntArray
    count: IntArray
    position_bytes: IntArray

    @classmethod
    def of(cls, task: AttentionTask, blocks: IntArray) -> _Runs:
        """The runs of blocks of one tensor, in the order of groups and positions."""
        blocks = blocks[np.lexsort((task.start[blocks], task.owner[blocks], task.group[blocks]))]
        columns = np.stack([task.group[blocks], task.owner[blocks]])
        ends = task.start[blocks] + task.layout.stride * task.count[blocks]
        follows = (columns[:, 1:] == columns[:, :-1]).all(axis=0) & (task.start[blocks[1:]] == ends[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~follows])[: len(blocks)])
        count = np.add.reduceat(task.count[blocks], first) if len(first) else task.count[:0]
        each = blocks[first]
        return cls(task.group[each], task.start[each], count, task.block_bytes[each] // task.count[each])

    def of_group(self, group: int) -> _Runs:
        chosen = self.group == group
        return _Runs(self.group[chosen], self.start[chosen], self.count[chosen], self.position_bytes[chosen])


def _covers(task: AttentionTask, own: IntArray, foreign: IntArray) -> int:
    """The bytes of the lightest covers of blocks `own` of one tensor against `foreign` ones of the other.

    A cover consists of results or gradients of `own` blocks, and of `foreign` blocks themselves.
    """
    if not len(own) or not len(foreign):
        return 0
    rows, columns = _Runs.of(task, own), _Runs.of(task, foreign)
    output_bytes = task.least_output_bytes_per_position(int(task.tensor[own[0]]))
    total = 0
    for group in np.intersect1d(rows.group, columns.group).tolist():
        row, column = rows.of_group(group), columns.of_group(group)
        total += _cover(
            _full_tiles(task, own, row, column), row.count * output_bytes, column.count * column.position_bytes
        )
    return total


def _full_tiles(task: AttentionTask, own: IntArray, row: _Runs, column: _Runs) -> BoolArray:
    """Whether every query of a tile attends to every key: bool array (rows, columns)."""
    queries, keys = ((row.start[:, None], row.count[:, None]), (column.start[None, :], column.count[None, :]))
    if task.tensor[own[0]] == KEYS:
        queries, keys = keys, queries
    low, high = task.run_bands(*queries, *keys)
    full: BoolArray = (low <= 1 - keys[1]) & (high >= queries[1] - 1)
    return full


def _cover(full: BoolArray, row_bytes: IntArray, column_bytes: IntArray) -> int:
    """The lightest cover of a bipartite graph, a bool array (rows, columns), if the neighbours of rows are nested.

    Otherwise the heaviest of the lightest covers of single rows.

    >>> nested = np.array([[1, 0, 0], [1, 1, 1]], dtype=bool)
    >>> _cover(nested, np.array([9, 4]), np.array([1, 2, 3]))      # the first column, and the second row
    5
    """
    neighbours = full @ column_bytes
    order = np.argsort(neighbours, kind="stable")
    full, row_bytes, neighbours = full[order], row_bytes[order], neighbours[order]
    if (full[:-1] > full[1:]).any():
        return int(np.minimum(neighbours, row_bytes).max())
    beyond = np.append(np.cumsum(row_bytes[::-1])[::-1], 0)
    return int((np.insert(neighbours, 0, 0) + beyond).min())
