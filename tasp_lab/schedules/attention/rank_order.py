"""Which ranks form a group: the order of ranks in which the groups of a family of schedules are consecutive.

A family such as ``usp:UxR`` is built with groups of consecutive ranks, on a topology whose ranks are renumbered in this
order; its schedules are then given back to the ranks of the machine (`in_order`).

``auto`` compares exchanges within groups, in which each rank sends equally many bytes to every other member: of
consecutive ranks, of strided ones, and of ranks that the fastest links or nodes join. It takes the order of which the
least goes from node to node; of those the one of which other ranks forward the least, since in the rest of a schedule
they would forward, too; of those the one whose busiest link needs the least time; of equal ones, the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import FloatArray, IntArray, frozen
from tasp_lab.core.errors import NoLinkError, ScheduleError
from tasp_lab.schedule.composition.sequence import moved
from tasp_lab.schedule.model import LazySteps, ScheduleModel, Step, Traffic
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.topology.components import strong_components
from tasp_lab.topology.derived import renumbered
from tasp_lab.topology.graph import Topology

LEAST_GAIN = 1e-9
"""By how much, of its time, an order must be faster than those before it: rounding decides nothing."""


def rank_order(name: str, groups: str, members: int, ranks: int | Topology) -> IntArray:
    """The rank that acts as rank i, for each i: an int array (world_size,), group by group.

    Parameters
    ----------
    name : the schedule, for messages.
    groups : see `tasp_lab.schedules.attention.options.AttentionOptions`.
    members : the ranks of each group.
    ranks : the topology, or if it is not known the number of ranks; ``auto`` then means ``consecutive``.

    Raises `ScheduleError` for lists of ranks that are not these groups.

    >>> rank_order("usp:2x4", "strided", 2, 8).tolist()
    [0, 4, 1, 5, 2, 6, 3, 7]
    """
    world_size = ranks if isinstance(ranks, int) else ranks.world_size
    if groups == "strided":
        return _strided(world_size, members)
    if groups == "consecutive" or (groups == "auto" and isinstance(ranks, int)):
        return np.arange(world_size)
    if groups == "auto" and not isinstance(ranks, int):
        return _fastest(ranks, members)
    lists = [[int(rank) for rank in each.split(",")] for each in groups.split("|")]
    order = [rank for each in lists for rank in each]
    if {len(each) for each in lists} != {members} or sorted(order) != list(range(world_size)):
        raise ScheduleError(
            f"schedule {name!r}: groups {groups!r}, expected {world_size // members} lists of {members}, "
            f"each of the ranks 0 to {world_size - 1} once"
        )
    return np.array(order)


def listed(order: IntArray, members: int) -> str:
    """An order as lists of ranks.

    >>> listed(np.array([0, 2, 1, 3]), 2)
    '0,2|1,3'
    """
    return "|".join(",".join(map(str, group)) for group in order.reshape(-1, members).tolist())


def in_order(
    build: Callable[[Topology], tuple[Schedule, ...]], topology: Topology, order: IntArray
) -> tuple[Schedule, ...]:
    """The schedules that `build` makes for the topology with its ranks in this order, on the ranks of the topology.

    Raises what `build` raises; `NoLinkError` names ranks of the topology.
    """
    try:
        built = build(renumbered(topology, order))
    except NoLinkError as error:
        ends = int(order[error.source]), int(order[error.destination])
        raise NoLinkError(error.where, *ends, error.topology, error.why) from None
    return tuple(on_ranks(each, order) for each in built)


def on_ranks(schedule: Schedule, order: IntArray) -> Schedule:
    """The schedule in which rank ``order[i]`` does what rank i does in the given one."""
    if np.array_equal(order, np.arange(schedule.world_size)):
        return schedule
    assert isinstance(schedule.task, AttentionTask), "families are of attention"
    assert schedule.initial_part is None, "attention starts with complete blocks"
    place = np.argsort(order)
    return replace(
        schedule,
        initial=schedule.initial[place],
        final=schedule.final[place],
        steps=RenumberedSteps(schedule, order),
        task=_on_ranks(schedule.task, order),
        kept=None if schedule.kept is None else schedule.kept[place],
    )


class RenumberedSteps(LazySteps, trusted=True):
    """The steps of a schedule of attention, in which rank ``order[i]`` does what rank i does there."""

    def __init__(self, of: Schedule, order: IntArray) -> None:
        self.of, self.order = of, frozen("the order of ranks", order, np.int64, 1, "an int array (ranks,)")

    @property
    def reordered(self) -> tuple[Schedule, IntArray]:  # type: ignore[override]
        return self.of, self.order

    def __len__(self) -> int:
        return len(self.of.steps)

    def step(self, index: int) -> Step:
        return moved(self.of.steps[index], 0, self.order)

    def traffic(self, size_bytes: IntArray) -> Traffic | None:
        if size_bytes is not self.of.block_bytes:
            return None
        found = self.of.traffic
        source, destination = self.order[found.source], self.order[found.destination]
        sent = found._replace(source=source, destination=destination)
        in_order = np.lexsort((destination, source, found.lane))
        return Traffic(*(column[in_order] for column in sent))

    def prove(self, schedule: ScheduleModel) -> int | None:
        """No rule of a schedule says which rank is which, so it holds for the other names of ranks, too."""
        of, task, place = self.of, schedule.task, np.argsort(self.order)
        if type(of) is not Schedule or type(of.task) is not AttentionTask or type(task) is not AttentionTask:
            return None
        same = (
            np.array_equal(self.order[place], np.arange(of.world_size))
            and (schedule.world_size, schedule.lanes) == (of.world_size, of.lanes)
            and (schedule.fused, schedule.algorithm, schedule.own_bytes) == (of.fused, of.algorithm, of.own_bytes)
            and schedule.blocks is of.blocks
            and schedule.initial_part is of.initial_part is None
            and np.array_equal(schedule.initial, of.initial[place])
            and np.array_equal(schedule.left, of.left[place])
            and task.content == _on_ranks(of.task, self.order).content
        )
        return of.transfers if same else None


def _on_ranks(task: AttentionTask, order: IntArray) -> AttentionTask:
    return replace(task, owner=order[task.owner], layout=task.layout.on_ranks(order))


@lru_cache(maxsize=64)
def _fastest(topology: Topology, members: int) -> IntArray:
    """The order of the fastest exchange within groups."""
    best = np.arange(topology.world_size)
    if members in (1, topology.world_size) or (topology.table.is_mesh and not topology.shared):
        return best
    by_node = np.argsort(topology.node_of_rank, kind="stable")
    others = [_strided(topology.world_size, members), _by_links(topology), by_node]
    least = exchange(topology, best, members)
    for order in {each.tobytes(): each for each in others if not np.array_equal(each, best)}.values():
        found = exchange(topology, order, members)
        if found < least._replace(time_s=least.time_s * (1 - LEAST_GAIN)):
            best, least = order, found
    return best


def _strided(world_size: int, members: int) -> IntArray:
    return np.arange(world_size).reshape(members, -1).T.ravel()


class Exchange(NamedTuple):
    """An exchange: transfers between nodes, those that ranks forward, seconds of the busiest link per byte of each."""

    between_nodes: float
    forwarded: float
    time_s: float


def exchange(topology: Topology, order: IntArray, members: int) -> Exchange:
    """The exchange in which each rank sends to each other member of its group; infinite if some have no route."""
    groups, node = order.reshape(-1, members), np.array(topology.node_of_rank)
    bandwidths, between, forwarded = _constraint_bandwidths_bytes_per_s(topology), 0, 0
    used = np.zeros(len(bandwidths))
    for distance in range(1, members):
        source, destination = groups.ravel(), np.roll(groups, distance, axis=1).ravel()
        if not topology.have_routes(source, destination).all():
            return Exchange(inf, inf, inf)
        constraints = topology.routes(source, destination)[0]
        used += np.bincount(constraints[constraints >= 0], minlength=len(used))
        between += int(np.count_nonzero(node[source] != node[destination]))
        forwarded += int(np.count_nonzero(~topology.are_linked(source, destination)))
    return Exchange(between, forwarded, float((used / bandwidths).max(initial=0)))


def _constraint_bandwidths_bytes_per_s(topology: Topology) -> FloatArray:
    """The bandwidth of each link and each shared capacity."""
    shared = [float(each.bandwidth_bytes_per_s) for each in topology.shared]
    return np.concatenate([topology.link_bandwidths_bytes_per_s, np.array(shared, dtype=np.float64)])


def _by_links(topology: Topology) -> IntArray:
    """The ranks in an order in which those that faster links join are neighbours.

    Ranks are joined at a rate if links of this rate or more lead from one to the other and back. They are sorted by
    whom they are joined to at the lowest rate, then at the next one, and so on.
    """
    ends, size = topology.link_ends, len(topology.vertices)
    rates = topology.link_bandwidths_bytes_per_s.copy()
    if topology.shared:
        number = {link.name: index for index, link in enumerate(topology.links)}
        for each in topology.shared:
            links = [number[name] for name in each.links]
            rates[links] = np.minimum(rates[links], float(each.bandwidth_bytes_per_s))
    keys = [np.arange(topology.world_size)]
    for rate in np.unique(rates)[::-1]:
        joined = strong_components(ends[rates >= rate], size)[: topology.world_size]
        first, which = np.unique(joined, return_index=True, return_inverse=True)[1:]
        keys.append(first[which])
    return np.lexsort(keys)
