"""How the blocks of one side of attention travel: the one form of its schedules, from which their steps follow.

    circulation = Circulation(task, rings, ring_of)                 # which blocks, through which ranks
    travel = Travel(circulation, around(8), RingLanes.of(circulation))
    schedule = travel_schedule("ring-attention", topology, TravelSteps(travel), pools)

A block visits ranks in the order of a ring; *hop* h is the h-th of them, hop 0 its owner. A `Route` says in hops, hence
for all blocks at once, from where a block comes to a hop and in which step. A step later calls use it there, if the
mask needs it. What they yield of it, its gradient or the result of queries, is a sum that gifts take from hop to hop
and at last home:

- around a ring a block comes from the hop before, and its sum goes on to the next hop a step behind it (`around`);
- back around the ring it starts where a forward pass left it (`back`);
- straight from its owner it comes to any hop, and sums go straight home (`straight_home`).

Routes are shared by all blocks, or by those of one row: the pieces of a shard, or each block has a row of its own. What
no mask needs does not travel: a block goes where it is needed and to hops on the way there, a sum leaves a hop that has
some of it. So bytes, lanes and the number of steps follow, too, and around rings the proof, see
`tasp_lab.schedule.theorems`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray, distinct, lock, stable_order
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.calls import BlockLists, Calls, ranges
from tasp_lab.schedule.composition.sequence import joined
from tasp_lab.schedule.model import LazySteps, ScheduleModel, Step, Traffic
from tasp_lab.schedule.proof import no_copies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.theorems import Paths, paths_prove
from tasp_lab.schedules.attention.circulation import Circulation, Hops
from tasp_lab.schedules.attention.span_blocks import owner_schedule
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.topology.graph import Topology


class Gifts(NamedTuple):
    """Where sums go, int arrays (rows, gifts): from hop `source` to hop `target` at a step.

    A gift is made of blocks to whose sum nothing is added after a hop that is from `first` to `last`: so a complete sum
    may go straight home while others go on.
    """

    source: IntArray
    target: IntArray
    step: IntArray
    first: IntArray
    last: IntArray

    @classmethod
    def of(cls, *columns: IntArray | int) -> Gifts:
        """Gifts from one column per field; columns broadcast together, and one row may have one dimension."""
        return cls(*np.atleast_2d(*np.broadcast_arrays(*columns)))

    @classmethod
    def joined(cls, *gifts: Gifts) -> Gifts:
        """The gifts of several tables, one after the other."""
        return cls(*(np.concatenate(columns, axis=1) for columns in zip(*gifts, strict=True)))


class Route(NamedTuple):
    """The hop from which a block comes to each hop, and the step of that transfer: int arrays (rows, hops).

    A block is at a hop from the start if it comes from that hop itself; to hops of another travel it comes from -1.
    `direction` is 1 for `around`, -1 for `back`.
    """

    via: IntArray
    arrival: IntArray
    gifts: Gifts
    direction: int = 0


NO_GIFTS = Gifts.of(np.zeros((1, 0), dtype=np.int64), 0, 0, 0, 0)


def around(n: int, gifts: Gifts = NO_GIFTS) -> Route:
    """From hop to hop of a ring of n ranks, one per step."""
    before = np.maximum(np.arange(n) - 1, 0)[None]
    return Route(before, before, gifts, 1)


def onward(n: int, *, shortcuts: bool) -> Gifts:
    """Sums that follow around a ring of n ranks a step behind; complete ones go straight home with `shortcuts`."""
    hop, least = np.arange(1, n), np.arange(2, n + 1) * shortcuts
    going_on = Gifts.of(hop, (hop + 1) % n, hop + 1, np.where(hop < n - 1, least, 0), n)
    ending = hop[: max(n - 2, 0) * shortcuts]
    return Gifts.joined(going_on, Gifts.of(ending, 0, ending + 1, ending, ending))


def back(n: int) -> Route:
    """From the last hop of a ring of n ranks, where blocks are at the start, back to the first; sums follow home."""
    hop = np.arange(n)
    gifts = Gifts.of(hop[1:], hop[1:] - 1, n - hop[1:], 0, n)
    return Route(np.minimum(hop + 1, n - 1)[None], (n - 2 - hop)[None], gifts, -1)


def straight_home(arrival: IntArray) -> Gifts:
    """What calls yield at each hop, given to the owner a step after them; `arrival` is that of a `Route`."""
    hop, n = np.arange(1, arrival.shape[1]), arrival.shape[1]
    return Gifts.of(hop, 0, arrival[:, 1:] + 2, 0, n)


class RingLanes(NamedTuple):
    """A lane per ring, and one per hop from which sums go straight home: so a rank sends to one peer on a lane.

    Rings may be windows of hops, between which blocks have another lane: `inner` and `outer` are int arrays (blocks,).
    """

    number: int
    inner: IntArray
    outer: IntArray
    window: int

    @classmethod
    def of(cls, circulation: Circulation) -> RingLanes:
        """A lane for each ring of a circulation."""
        return cls(len(circulation.rings), circulation.ring_of, circulation.ring_of, circulation.world_size)


class PeerLanes(NamedTuple):
    """The lane of each two ranks, of blocks and of gifts: int arrays (source, destination).

    If `home` is given, it is the lane of gifts to owners.
    """

    number: int
    sends: IntArray
    gifts: IntArray
    home: int | None = None

    @classmethod
    def by_distance(cls, number: int, sends: IntArray, gifts: IntArray) -> PeerLanes:
        """From the lanes of distances, modulo the number of ranks: int arrays (distances,)."""
        rank = np.arange(len(sends))
        distance = (rank - rank[:, None]) % len(rank)
        return cls(number, sends[distance], gifts[distance])


class _Timetable:
    """Which blocks something happens to at a step; `step` is an int array (rows, places).

    A place is a hop, or the number of a gift. `active` is a bool array (places, blocks).
    """

    def __init__(self, step: IntArray, planned: BoolArray, of_row: BlockLists, active: BoolArray) -> None:
        row, place = np.nonzero(planned)
        order = np.argsort(step[row, place], kind="stable")
        self.row, self.place = row[order], place[order]
        self.steps, begin = np.unique(step[row, place][order], return_index=True)
        lock(self)
        self._of_row, self._active = of_row, active  # a table that its owner may fill later
        self._known = dict(zip(self.steps.tolist(), pairwise([*begin.tolist(), len(order)]), strict=True))

    def __contains__(self, step: int) -> bool:
        """Whether something may happen at a step: arrays of nothing take as long to make as those of a few blocks."""
        return step in self._known

    def at(self, step: int) -> tuple[IntArray, IntArray, IntArray]:
        """The rows, places and blocks of a step, int arrays (entries,); of one row and place these are numbers."""
        first, end = self._known.get(step, (0, 0))
        row, place = self.row[first:end], self.place[first:end]
        if len(row) == 1 and len(self._of_row) == 1:  # all blocks alike, as around rings: numbers instead of arrays
            return row[0], place[0], np.flatnonzero(self._active[place[0]])
        entry, position = ranges(self._of_row.offset[row], self._of_row.offset[row + 1])
        row, place, block = row[entry], place[entry], self._of_row.block[position]
        happens = self._active[place, block]
        return row[happens], place[happens], block[happens]

    @property
    def last(self) -> int:
        """The last step at which something happens; -1 if nothing does."""
        return next((step for step in self.steps[::-1].tolist() if len(self.at(step)[2])), -1)


class Travel:
    """The travel of the blocks of a circulation along a route.

    Parameters
    ----------
    circulation : the blocks, the ranks at their hops, and the calls there.
    route, row : how they travel, and the row of each block in the route, an int array (blocks,); by default the first.
    lanes : of transfers.
    trim : whether a block goes only where the mask needs it and on the way there, or along the whole route.
    complete : int array (blocks,), the hop after which nothing is added to a sum; by default the last that is used.

    Tables of hops and blocks are made when they are needed: of several ways to choose from, bytes decide.
    """

    def __init__(
        self,
        circulation: Hops,
        route: Route,
        lanes: RingLanes | PeerLanes,
        row: IntArray | None = None,
        *,
        trim: bool = True,
        complete: IntArray | None = None,
    ) -> None:
        self.circulation, self.route, self.lanes, self.trim = circulation, route, lanes, trim
        self.row = np.zeros(len(circulation.blocks), dtype=np.int64) if row is None else row
        self.complete = circulation.last if complete is None else complete
        sizes = np.bincount(self.row, minlength=len(route.via))
        self._of_row = BlockLists.of_sizes(sizes, np.argsort(self.row, kind="stable"))
        hops = np.arange(circulation.world_size)
        self._visited: BoolArray = (route.via >= 0) & (hops > 0)
        self._sent: BoolArray = self._visited & (route.via != hops)
        # Sums that go straight home while others go on, from some hops: those after which some are complete.
        ends, known = np.flatnonzero(route.gifts.last[0] < circulation.world_size), distinct(self.complete)
        first, last = np.searchsorted(known, [route.gifts.first[0, ends], route.gifts.last[0, ends] + 1])
        self._home_from = distinct(route.gifts.source[0, ends[first < last]])
        self._outer_lanes = distinct(lanes.outer) if isinstance(lanes, RingLanes) else hops[:0]
        for column in (route.via, route.arrival, *route.gifts):
            column.flags.writeable = False
        lock(self)

    @cached_property
    def used(self) -> BoolArray:
        """Which blocks are used at each hop: bool array (hops, blocks)."""
        used = self.circulation.used
        if not self._visited[:, 1:].all():
            used = used & self._visited[self.row].T
            used.flags.writeable = False
        return used

    @cached_property
    def there(self) -> BoolArray:
        """Which come to each hop, or lie there from the start: bool array (hops, blocks)."""
        if not self.trim:
            there = np.ones_like(self.used)
        else:
            there = self.used.copy()
            arrivals = _Timetable(self.route.arrival, self._sent, self._of_row, there)
            for step in arrivals.steps[::-1].tolist():  # what comes last first: it needs those on its way
                row, hop, block = arrivals.at(step)
                there[self.route.via[row, hop], block] = True
        there[0] = there.flags.writeable = False
        return there

    @cached_property
    def arrivals(self) -> _Timetable:
        return _Timetable(self.route.arrival, self._sent, self._of_row, self.there)

    @cached_property
    def calls(self) -> _Timetable:
        return _Timetable(self.route.arrival + 1, self._visited, self._of_row, self.used)

    @cached_property
    def gifts(self) -> _Timetable:
        step = self.route.gifts.step
        return _Timetable(step, np.ones_like(step, np.bool_), self._of_row, self.given)

    @cached_property
    def given(self) -> BoolArray:
        """Which sums each gift takes, bool array (gifts, blocks): those that have some part at its hop by then."""
        source, target, step, first, last = self.route.gifts
        row = self.row if len(step) > 1 else slice(1)
        given: BoolArray = (self.complete >= first[row].T) & (self.complete <= last[row].T)
        timetable, has = _Timetable(step, np.ones_like(step, np.bool_), self._of_row, given), self.used.copy()
        for now in timetable.steps.tolist():
            row, number, block = timetable.at(now)
            here, there = source[row, number], target[row, number]
            made = has[here, block]
            given[number, block] = made
            has[here, block] = False  # first of all, then what comes: sums of one step pass each other
            has[there[made] if np.ndim(there) else there, block[made]] = True
        given.flags.writeable = False
        return given

    @property
    def lane_count(self) -> int:
        """The number of lanes."""
        return self.lanes.number + len(self._home_from) * len(self._outer_lanes)

    @property
    def bytes_sent(self) -> int:
        """The bytes that all ranks send."""
        size, circulation = self.circulation.task.block_bytes, self.circulation
        sent = (self.there & self._sent[self.row].T).sum(axis=0) @ size[circulation.blocks]
        return int(sent + (self.given.sum(axis=0) @ size[circulation.gradients] if self.given.size else 0))

    def at_start(self) -> BoolArray:
        """The blocks that lie at other ranks than their owners from the start: bool array (world_size, all blocks)."""
        hops = np.arange(len(self.there))
        return self._places((self.route.via == hops)[self.row].T & (hops > 0)[:, None])

    def places(self) -> BoolArray:
        """The blocks that come to other ranks than their owners, or lie there: bool array (world_size, all blocks)."""
        return self._places(self.there)

    def _places(self, there: BoolArray) -> BoolArray:
        found = no_copies(self.circulation.world_size, len(self.circulation.task.tensor))
        hop, block = np.nonzero(there)
        found[self.circulation.at(hop, block), self.circulation.blocks[block]] = True
        return found

    def sends(self, step: int) -> Step:
        """The blocks that are sent at a step, in the order of their calls at each rank."""
        row, there, block = self.arrivals.at(step)
        order = self.circulation.order(block, self.circulation.at(there, block))
        return self._transfers(order, block, self.route.via[row, there], there, np.zeros(1, np.bool_), gives=False)

    def gives(self, step: int) -> Step:
        """The sums that are given at a step; around rings those from hops that blocks have just come to first."""
        row, number, block = self.gifts.at(step)
        source, target, _, _, last = (column[row, number] for column in self.route.gifts)
        if isinstance(self.lanes, PeerLanes):
            came = np.broadcast_to(-self.route.arrival[row, source], len(block))
            order = stable_order(came, self.circulation.at(source, block), block)
        else:
            hops = [-source] if np.ndim(source) else []
            order = self.circulation.order(block, self.circulation.at(target, block), *hops)
        ends = np.asarray(last < self.circulation.world_size)
        return self._transfers(order, block, source, target, ends, gives=True)

    def _transfers(
        self, order: IntArray, block: IntArray, here: IntArray, there: IntArray, ends: BoolArray, *, gives: bool
    ) -> Step:
        """Transfers from hop to hop, in this order; the sums that end there go straight home while others go on."""
        circulation, lanes, block = self.circulation, self.lanes, block[order]
        here, there = (each[order] if np.ndim(each) else each for each in (here, there))
        source, destination = circulation.at(here, block), circulation.at(there, block)
        if isinstance(lanes, PeerLanes):
            lane = (lanes.gifts if gives else lanes.sends)[source, destination]
            if gives and lanes.home is not None:
                lane = np.where(there == 0, lanes.home, lane)
        else:
            lane = lanes.inner[block]
            if lanes.window < circulation.world_size:
                lane = np.where(here // lanes.window == there // lanes.window, lane, lanes.outer[block])
            if ends.any():
                ends = ends[order] if np.ndim(ends) else ends
                lane = np.where(ends, self._home_lane(lanes, here, block), lane)
        number = (circulation.gradients if gives else circulation.blocks)[block]
        return Step(source, destination, lane, number, np.full(len(block), gives))

    def _home_lane(self, lanes: RingLanes, hop: IntArray, block: IntArray | slice) -> IntArray:
        """The lane of sums that go straight home from a hop while others go on."""
        outer: IntArray = np.searchsorted(self._outer_lanes, lanes.outer[block])
        return lanes.number + np.searchsorted(self._home_from, hop) * len(self._outer_lanes) + outer

    def calls_at(self, step: int) -> tuple[Calls, ...]:
        """The calls of a step on blocks that have come."""
        _, hop, block = self.calls.at(step)
        return self.circulation.calls_with(block, self.circulation.at(hop, block))

    def paths(self) -> Paths | None:
        """The paths around rings; None along another route."""
        circulation, route, n = self.circulation, self.route, self.circulation.world_size
        if not route.direction or not isinstance(self.lanes, RingLanes):
            return None
        used, is_back = circulation.last > 0, route.direction < 0
        first, last, start = circulation.first, circulation.last, circulation.start
        if is_back:
            first, last, start = n - 1 - last, n - 1 - first, (start + n - 1) % n
        following, last_gift, home_lane = None, None, np.full(len(used), -1)
        if circulation.task.is_backward:
            following, last_gift = circulation.gradients, np.full(len(used), max(n - 2, 0) if is_back else n - 1)
            if not is_back and (route.gifts.last < n).any():
                last_gift = np.where(last < n - 1, last, n - 1)
                home_lane = np.where(last < n - 1, self._home_lane(self.lanes, last, slice(None)), -1)
        hops = last if self.trim else np.full(len(used), n - 1)
        if is_back:
            hops = np.where(used, last, 0) if self.trim else np.full(len(used), max(n - 2, 0))
        return Paths(
            rings=circulation.rings,
            direction=route.direction,
            lanes=self.lane_count,
            block=circulation.blocks,
            ring=circulation.ring_of,
            start=start,
            hops=hops,
            owner=circulation.owner,
            first_use=np.where(used, first, -1),
            last_use=np.where(used, last, -1),
            home_lane=home_lane,
            following=following,
            last_gift=last_gift,
        )


class TravelSteps(LazySteps, trusted=True):
    """The steps in which the blocks of one side travel, or of both; at step `own` ranks compute with what they own."""

    def __init__(self, *travels: Travel, own: int = 0) -> None:
        self.travels, self.own = travels, own

    @property
    def task(self) -> AttentionTask:
        task: AttentionTask = self.travels[0].circulation.task
        return task

    @property
    def lanes(self) -> int:
        return max(each.lane_count for each in self.travels)

    @property
    def bytes_sent(self) -> int:
        """The bytes that all ranks send."""
        if self._paths is not None:
            return int(self._paths.bytes_by_place(self.task.block_bytes).sum())
        return sum(each.bytes_sent for each in self.travels)

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        ends = [max(each.arrivals.last + 2, each.gifts.last + 1, each.calls.last + 1) for each in self.travels]
        return max(self.own + 1, *ends)

    @cached_property
    def _paths(self) -> Paths | None:
        return self.travels[0].paths() if len(self.travels) == 1 else None

    def step(self, index: int) -> Step:
        sends = self.sends(index)
        return Step(sends.source, sends.destination, sends.lane, sends.block, sends.gives, self._calls(index))

    def calls(self, index: int) -> tuple[Calls, ...]:
        return self._calls(index) if self._kept is None else self[index].calls

    def _calls(self, index: int) -> tuple[Calls, ...]:
        own = self.travels[0].circulation.calls_at_owners() if index == self.own else ()
        return sum((each.calls_at(index) for each in self.travels if index in each.calls), own)

    def sends(self, index: int) -> Step:
        there = [each.sends(index) for each in self.travels if index in each.arrivals]
        return joined(there + [each.gives(index) for each in self.travels if index in each.gifts])

    @property
    def busiest_bytes(self) -> int:
        """The bytes by which ways around rings are compared: all of one ring, else those of a rank's busiest lane."""
        assert self._paths is not None, "around rings"
        by_place = self._paths.bytes_by_place(self.task.block_bytes)
        return int(by_place.sum() if len(by_place) == 1 else by_place.max(initial=0))

    def traffic(self, size_bytes: IntArray) -> Traffic | None:
        return None if self._paths is None else self._paths.traffic(size_bytes)

    def prove(self, schedule: ScheduleModel) -> int | None:
        """Around rings by induction along the paths (`tasp_lab.schedule.theorems`)."""
        if (paths := self._paths) is None:
            return None
        task, circulation = self.task, self.travels[0].circulation
        # A subclass may need or compute other parts than the theorem presumes.
        if type(task) is not AttentionTask or type(circulation) is not Circulation or not circulation.is_whole:
            return None
        owner, results = task.owner[circulation.stationary], task.output_of[circulation.stationary]
        fits = schedule.task is task and np.array_equal(schedule.blocks.parts, task.parts)
        proved = fits and paths_prove(paths, circulation.stationary, owner, results, owner, schedule)
        return paths.transfers if proved else None


def travel_schedule(
    name: str,
    topology: Topology,
    steps: TravelSteps,
    pools: Mapping[int, Pool | None],
    *,
    kept: BoolArray | None = None,
) -> Schedule:
    """The schedule of these steps; `pools` are those of tensors that travel, `kept` what stays where it has come."""
    copies = None
    for each in steps.travels:
        if each.route.direction < 0:
            copies = each.at_start()
    return owner_schedule(
        name, topology, steps.task, steps, lanes=steps.lanes, circulating=pools, copies=copies, kept=kept
    )
