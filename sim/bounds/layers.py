"""Lower bounds of the time of a pass of a layer, of any kind, for every schedule of its task.

**Softmax attention, compute.** All ranks together compute all tiles, so the busiest one computes at least the average.

**Softmax attention, communication.** Take a set S of ranks, queries that S owns, and keys (with their values) that S
has not got at the start. Each pair of a query and a key that it attends to is either computed in S, and then the key
enters S; or elsewhere, and then a part of the result enters S, since results end at the owners of their queries. So
what enters S is a vertex cover, by keys and results, of the graph of these pairs, and weighs no less than the lightest
cover of any part of that graph. The part used is that of blocks with a full mask, whose positions have the same
neighbours. If their neighbours are nested, as under a causal mask, the lightest cover is known: the results of all
queries beyond some point, and the keys that those before it attend to. If they are not, it is that of a single block of
queries.

In a backward pass the gradients of queries take the place of results, and foreign queries with the keys of S make a
second cover, by query records and gradients of keys. Both consist of different data, so they add. Results and gradients
weigh as much as in the dtype of the layer, or in that on the wire if it is narrower: the least that a schedule may use.

S is each single rank, all ranks whose links share a capacity, and the complement of the cut that bounds AllGather. What
enters S takes at least its bytes over the bandwidth of all links into S, plus the lowest latency of a route into it.

**Linear attention, compute.** All ranks together attend within all chunks, and compute what other chunks contribute to
each one: by applying a state to its positions, or from all their pairs. So the busiest one computes at least the
average.

**Linear attention, communication.** Take a rank whose chunk follows others. What one of those contributes to its
results comes in its results, computed elsewhere, or it is computed there, and then a state comes, or the keys of which
it is made. So its results come, or a state, or the keys of all chunks that it follows: at least the least of these.
Heads may come in different ways, but weigh alike in each. Backward it is the same with gradients of keys, of states,
and queries. These bytes take at least as long as the bandwidth of all links into the rank lets them, plus the lowest
latency of a route into it.

**Hybrids, compute.** All ranks together compute all layers, so the busiest one computes at least the average.

**Hybrids, layers.** Each layer takes at least the bound of its kind of attention. Bounds of layers are not added: a
rank may communicate for one layer while others compute another one. Re-layouts are no work that has to be done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray, distinct
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import ComputeRate, Machine, fastest
from tasp_lab.schedule.schedule import OncePerSchedule, Schedule
from tasp_lab.schedule.stacked_task import StackedTask
from tasp_lab.schedules.attention.task import KEYS, QUERIES, AttentionTask
from tasp_lab.schedules.hybrid.relayout import RelayoutTask
from tasp_lab.schedules.hybrid.stack import layers_of
from tasp_lab.schedules.linear import task as linear
from tasp_lab.schedules.linear.flops import least_flops
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.topology.cuts import bottleneck, like, ranks_behind
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.ranges import pairs_of_runs


def layer_bound_s(machine: Machine, schedule: Schedule) -> Number:
    """Lower bound of the time of a pass of a layer or a hybrid in seconds, exact for exact numbers.

    0 for tasks of which no bound is known.
    """
    task = schedule.task
    if isinstance(task, LinearTask):
        return linear_bound_s(machine, task)
    if isinstance(task, AttentionTask):
        return _attention_bound_s(machine, task, _runs_of(schedule))
    if isinstance(task, StackedTask) and task.ranks is None and all(
        isinstance(each, AttentionTask | LinearTask | RelayoutTask) for each in task.layers
    ):  # fmt: skip
        return hybrid_bound_s(machine, schedule)
    return 0


def hybrid_bound_s(machine: Machine, schedule: Schedule) -> Number:
    """Lower bound of the time of a pass in seconds; exact for exact numbers.

    Two layers compute twice as long as one, if nothing else takes longer:

    >>> from dataclasses import replace
    >>> from fractions import Fraction
    >>> from tasp_lab.schedules.build import hybrid_schedules
    >>> from tasp_lab.machines.machine import ComputeRate
    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.workload.layer import Workload
    >>> mesh = full_mesh(2, Fraction(10**9), Fraction(0))
    >>> machine = Machine(mesh, compute=ComputeRate(Fraction(64)))
    >>> full = Workload(16, heads=1, head_dim=1, mask="full", kind="hybrid", layers="S")
    >>> layers = [full, replace(full, layers="SS")]
    >>> [hybrid_bound_s(machine, hybrid_schedules("lasp-2+ring-attention", mesh, each)[0]) for each in layers]
    [Fraction(8, 1), Fraction(16, 1)]
    """
    flops, bounds_s, rates = 0, dict[int, Number](), list[ComputeRate]()
    for task, initial in layers_of(schedule):
        assert isinstance(task, AttentionTask | LinearTask), "there are no other layers"
        rates.append(machine.rate_of(task.workload, task.passing))
        if isinstance(task, AttentionTask):
            flops += task.total_flops
            if id(task) not in bounds_s:
                bounds_s[id(task)] = attention_bound_s(machine, task, initial | task.owned(KEYS, QUERIES))
        else:
            flops += least_flops(task)
            if id(task) not in bounds_s:
                bounds_s[id(task)] = linear_bound_s(machine, task)
    compute_s = machine.least_compute_s(fastest(rates), flops)
    return max(compute_s, *bounds_s.values())


def linear_bound_s(machine: Machine, task: LinearTask) -> Number:
    """Lower bound of the time of a pass in seconds; exact for exact numbers.

    The second of two ranks gets a state of 64 bytes, less than the keys of the first or its results, at 8 bytes/s:

    >>> from fractions import Fraction
    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.workload.layer import Workload
    >>> from tasp_lab.workload.sequence_layout import contiguous
    >>> layer = Workload(sequence=16, heads=1, head_dim=4, mask="causal", kind="linear")
    >>> mesh = full_mesh(2, Fraction(8), Fraction(1))
    >>> linear_bound_s(Machine(mesh), LinearTask(layer, contiguous(16, 2)))
    Fraction(9, 1)
    """
    compute_s = machine.least_compute_s(machine.rate_of(task.workload, task.passing), least_flops(task))
    return max(compute_s, _linear_communication_s(machine.topology, task))


def _linear_communication_s(topology: Topology, task: LinearTask) -> Number:
    """The largest of the bounds of single ranks."""
    layer = task.workload
    state_bytes = 4 * layer.batch * layer.kv_head_count * layer.head_dim * layer.value_size
    result, source = (linear.KEY_GRADIENTS, linear.QUERIES) if task.is_backward else (linear.RESULTS, linear.KEYS)
    latency, into = topology.min_latencies_into_ranks_s, topology.bandwidths_into_ranks_bytes_per_s
    chunks = task.receivers
    found: Number = 0
    for chunk, rank in zip(chunks.tolist(), task.owner[chunks].tolist(), strict=True):
        others = task.others(np.array([chunk]), back=task.is_backward)[1]
        sizes = task.block_bytes[task.block(source, others)]
        least = min(state_bytes, int(task.block_bytes[task.block(result, np.array([chunk]))][0]), int(sizes.sum()))
        found = max(found, like(topology, least / into[rank]) + latency[rank])
    return found


def attention_bound_s(machine: Machine, task: AttentionTask, initial: BoolArray | None = None) -> Number:
    """Lower bound of the time of a pass in seconds; exact for exact numbers.

    `initial`, a bool array (world_size, blocks), is what each rank holds at the start; by default the blocks it owns.

    Eight ranks compute for 1 s each, and each receives 7/8 of the keys, or results of its own two positions, over seven
    links:

    >>> from fractions import Fraction
    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.schedules.attention.circulation import cut_blocks
    >>> from tasp_lab.machines.machine import ComputeRate
    >>> from tasp_lab.workload.sequence_layout import contiguous
    >>> from tasp_lab.workload.layer import Workload
    >>> layer = Workload(sequence=16, heads=1, head_dim=1)             # 4 FLOPs per pair, results of 2 bytes
    >>> task, _ = cut_blocks(layer, contiguous(16, 8), [Fraction(1)])
    >>> mesh, rate = full_mesh(8, Fraction(4), Fraction(1)), ComputeRate(Fraction(128))
    >>> attention_bound_s(Machine(mesh, compute=rate), task)           # 1 + 4 / 28
    Fraction(8, 7)
    """
    return _attention_bound_s(machine, task, Runs.of(task, task.owned(KEYS, QUERIES) if initial is None else initial))


def _attention_bound_s(machine: Machine, task: AttentionTask, runs: Runs) -> Number:
    compute_s = machine.least_compute_s(machine.rate_of(task.workload, task.passing), task.total_flops)
    return max(compute_s, _communication_s(machine.topology, runs) if len(runs.held) > 1 else 0)


@lru_cache(maxsize=64)  # a prediction is checked against it, and reports it
def _communication_s(topology: Topology, runs: Runs) -> Number:
    """The largest of the bounds on communication."""
    latency, cut = topology.min_latencies_into_ranks_s, bottleneck(topology)
    outside = tuple(rank for rank in range(topology.world_size) if rank not in cut.inside)
    *received, crossing = _entering(runs, outside)
    into = topology.bandwidths_into_ranks_bytes_per_s
    bounds = [like(topology, received[rank] / into[rank]) + latency[rank] for rank in np.flatnonzero(received).tolist()]
    for group in topology.shared:
        if behind := [rank for rank in ranks_behind(topology, group) if received[rank]]:
            sums = sum(received[rank] for rank in behind)
            bounds.append(sums / group.bandwidth_bytes_per_s + min(latency[rank] for rank in behind))
    if crossing:
        bounds.append(like(topology, crossing / cut.bandwidth_bytes_per_s) + min(latency[rank] for rank in outside))
    return max(bounds, default=0)


@OncePerSchedule
def _runs_of(schedule: Schedule) -> Runs:
    """The runs of a layer of softmax attention."""
    assert isinstance(schedule.task, AttentionTask), "one layer"
    return Runs.of(schedule.task, schedule.initial)


@lru_cache(maxsize=256)
def _entering(runs: Runs, outside: tuple[int, ...]) -> tuple[int, ...]:
    """The bytes that enter each rank, and those that enter the ranks `outside`; kept for schedules alike in both."""
    return tuple(runs.entering_bytes(ranks) for ranks in (*([rank] for rank in range(len(runs.held))), list(outside)))


@dataclass(frozen=True, eq=False)
class Runs:
    """The blocks of keys and queries of a task as runs: positions of one owner and group that follow one another.

    A group has the same KV heads and is of one document. `tensor`, `group`, `owner`, `start`, `count`, `position_bytes`
    and `output_bytes` (of a result or gradient of a position) are int arrays (runs,); `held` a bool array
    (world_size, runs). Groups that are alike but for their number are one group with the bytes of all.
    """

    task: AttentionTask
    tensor: IntArray
    group: IntArray
    owner: IntArray
    start: IntArray
    count: IntArray
    position_bytes: IntArray
    output_bytes: IntArray
    held: BoolArray

    @cached_property
    def _content(self) -> tuple[object, ...]:
        """All that the bytes depend on."""
        task = self.task
        positions = self.tensor, self.group, self.owner, self.start, self.count
        columns = *positions, self.position_bytes, self.output_bytes, self.held
        return task.workload, task.layout, task.is_backward, *(each.tobytes() for each in columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Runs) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @classmethod
    def of(cls, task: AttentionTask, held: BoolArray) -> Runs:
        """The runs in the order of tensors, groups and positions."""
        blocks = np.flatnonzero((task.tensor == KEYS) | (task.tensor == QUERIES))
        entry, document, start, count = task.pieces_of(task.start[blocks], task.count[blocks])
        blocks, documents = blocks[entry], len(task.workload.document_starts)
        columns = np.stack([task.tensor[blocks], task.group[blocks] * documents + document, task.owner[blocks]])
        order = np.lexsort((start, *columns[::-1]))
        blocks, start, count, columns = blocks[order], start[order], count[order], columns[:, order]
        has, ends = held[:, blocks], start + task.layout.stride * count
        follows = (columns[:, 1:] == columns[:, :-1]).all(axis=0) & (start[1:] == ends[:-1])
        follows &= (has[:, 1:] == has[:, :-1]).all(axis=0)
        first = np.flatnonzero(np.concatenate([[True], ~follows])[: len(blocks)])
        count = np.add.reduceat(count, first) if len(first) else count
        at, start = blocks[first], start[first]
        tensor, group, _ = columns[:, first]
        output_bytes = np.zeros_like(tensor)
        for kind, (each, heads) in enumerate(task.kinds[0]):
            output_bytes[task.kinds[1][at] == kind] = task.least_output_bytes_per_position(each, heads)
        position_bytes = task.block_bytes[at] // task.count[at]
        columns = np.stack([tensor, task.owner[at], start, count, position_bytes, output_bytes])
        kept, number, times = _alike(group, np.concatenate([columns, has[:, first]]))
        tensor, owner, start, count, position_bytes, output_bytes = columns[:, kept]
        return cls(
            task, tensor, number, owner, start, count, times * position_bytes, times * output_bytes, has[:, first[kept]]
        )

    def entering_bytes(self, ranks: list[int]) -> int:
        """The bytes that any schedule brings into a set of ranks."""
        is_inside = np.zeros(len(self.held), dtype=bool)
        is_inside[ranks] = True
        mine, here = is_inside[self.owner], self.held[ranks].any(axis=0)
        keys, queries = self.tensor == KEYS, self.tensor == QUERIES
        total = self._covers(queries & mine, keys & ~here)
        if self.task.is_backward:
            total += self._covers(keys & mine, queries & ~here)
        return total

    def _covers(self, own: BoolArray, foreign: BoolArray) -> int:
        """The bytes of the lightest covers of runs `own` of one tensor against `foreign` ones of the other.

        A cover consists of results or gradients of `own` runs, and of `foreign` runs themselves.
        """
        if not own.any() or not foreign.any():
            return 0
        total = 0
        for group in sorted(set(self.group[own].tolist()) & set(self.group[foreign].tolist())):
            row, column = (np.flatnonzero(side & (self.group == group)) for side in (own, foreign))
            row_bytes = self.count[row] * self.output_bytes[row]
            total += _cover(self._full_tiles(row, column), row_bytes, self.count[column] * self.position_bytes[column])
        return total

    def _full_tiles(self, row: IntArray, column: IntArray) -> BoolArray:
        """Whether every query of a tile attends to every key: bool array (rows, columns)."""
        layer, stride = self.task.workload, self.task.layout.stride
        if layer.ranges is not None:
            own, other = ((self.start[each], self.count[each]) for each in (row, column))
            are_keys = self.tensor[row[0]] == KEYS
            pairs = pairs_of_runs(layer.slices, other if are_keys else own, own if are_keys else other, stride)
            every: BoolArray = (pairs.T if are_keys else pairs) == own[1][:, None] * other[1]
            return every
        queries = self.start[row][:, None], self.count[row][:, None]
        keys = self.start[column][None, :], self.count[column][None, :]
        if self.tensor[row[0]] == KEYS:
            queries, keys = keys, queries
        ahead = np.subtract(queries[0], keys[0])
        low, high = layer.visible.band(ahead, queries[1], keys[1], stride)
        full: BoolArray = (low <= 1 - keys[1]) & (high >= queries[1] - 1)
        return full


def _alike(group: IntArray, content: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The columns of one of all groups with the same content, the number of each, and how many groups it stands for."""
    members: dict[bytes, list[IntArray]] = {}
    for each in distinct(group).tolist():
        columns = np.flatnonzero(group == each)
        members.setdefault(content[:, columns].tobytes(), []).append(columns)
    sizes = [len(found[0]) for found in members.values()]
    kept = np.concatenate([group[:0], *(found[0] for found in members.values())])
    number = np.repeat(np.arange(len(sizes)), sizes)
    return kept, number, np.repeat([len(found) for found in members.values()], sizes).astype(np.int64)


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
    beyond = row_bytes.sum() - row_bytes.cumsum()
    return min(int(row_bytes.sum()), int((neighbours + beyond).min()))
