"""The theorem of circulations against the replay, on small worlds, whether its premises hold or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.arrays import BoolArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Kind, Pool
from tasp_lab.schedule.model import LazySteps, ScheduleModel, Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.theorems import Paths, paths_prove
from tests.support.small_task import SmallTask, adding


@dataclass(frozen=True)
class Circulation:
    """Blocks that go around among n ranks, each of which has one block that stays, and its result.

    Blocks: those of the paths, the n that stay, the n results, and the sums that follow in a backward pass. A call is
    needed for path i at rank r if ``needed[i, r]``: it adds part i to the result of r, and part r to the sum of i.
    """

    paths: Paths
    needed: BoolArray
    initial: BoolArray
    final: BoolArray
    lanes: int

    @property
    def n(self) -> int:
        return len(self.initial)

    def rank_at(self, path: int, index: int) -> int:
        place = (self.paths.start[path] + self.paths.direction * index) % self.n
        return int(self.paths.rings[self.paths.ring[path], place])

    def steps(self) -> list[Step]:
        """The steps, written down one by one."""
        paths, count, n = self.paths, len(self.paths.block), self.n
        steps = []
        for s in range(n + 1):
            transfers: list[tuple[int, ...]] = []
            calls: list[tuple[int, list[int], int, int]] = []
            for i in range(count):
                lane = int(paths.ring[i])
                if s < paths.hops[i]:
                    transfers.append((self.rank_at(i, s), self.rank_at(i, s + 1), lane, i))
                if paths.last_gift is not None and 0 <= paths.first_use[i] <= s - 1 <= paths.last_gift[i]:
                    last = s - 1 == paths.last_gift[i]
                    there = int(paths.owner[i]) if last else self.rank_at(i, s)
                    transfers.append((self.rank_at(i, s - 1), there, lane, count + 2 * n + i, 1))
                here = self.rank_at(i, s)
                if s < n and self.needed[i, here] and (s <= paths.hops[i] or here == paths.owner[i]):
                    calls.append((here, [i, count + here], count + n + here, i))
                    if paths.following is not None:
                        calls.append((here, [i, count + here], count + 2 * n + i, here))
            steps.append(Step.of(transfers, [adding(*calls)] if calls else []))
        return steps

    def schedule(self, noted: list[bool] | None = None) -> Schedule:
        """Replayed; whether the theorem proves it is noted."""
        paths, count, n = self.paths, len(self.paths.block), self.n
        pool = Pool("arrivals", 2)
        kinds = Kind("moving", "", pool), Kind("staying"), Kind("result", "add"), Kind("following", "add", pool)
        sizes = [count, n, n, 0 if paths.following is None else count]
        exists = np.zeros((sum(sizes), max(count, n)), dtype=bool)
        exists[: count + n, 0] = True
        exists[count + n : count + 2 * n, :count] = self.needed.T
        exists[count + 2 * n :, :n] = self.needed[: sizes[3]]
        parts = np.repeat([1, 1, count, n], sizes)
        blocks = Blocks(kinds, np.repeat(np.arange(4), sizes), np.ones(sum(sizes), dtype=np.int64), parts)
        initial, final = self.initial.copy(), self.final.copy()
        steps = Noted(self.steps(), self.is_proved, [] if noted is None else noted)
        return Schedule("circulation", n, self.lanes, blocks, initial, final, steps, SmallTask(exists))

    def is_proved(self, schedule: Schedule) -> bool:
        rank, count = np.arange(self.n), len(self.paths.block)
        return paths_prove(self.paths, count + rank, rank, count + self.n + rank, rank, schedule)


@dataclass(frozen=True)
class Noted(LazySteps, trusted=True):
    steps: list[Step]
    is_proved: Callable[[Schedule], bool]
    noted: list[bool]

    def __len__(self) -> int:
        return len(self.steps)

    def step(self, index: int) -> Step:
        return self.steps[index]

    def prove(self, schedule: ScheduleModel) -> None:
        self.noted.append(self.is_proved(schedule))


@st.composite
def circulations(draw: st.DrawFn) -> Circulation:
    """Blocks of any rank along any rings, from their owner or elsewhere, as far as they must or farther."""
    n, backward = draw(st.integers(1, 4)), draw(st.booleans())
    rings = np.array(draw(st.lists(st.permutations(range(n)), min_size=1, max_size=2)))
    count, direction = draw(st.integers(1, 4)), draw(st.sampled_from([1, -1]))
    columns = {name: np.zeros(count, dtype=np.int64) for name in ("ring", "start", "hops", "owner", "last_gift")}
    first, last = np.full((2, count), -1)
    needed = np.array(draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=count, max_size=count)))
    for i in range(count):
        columns["ring"][i] = draw(st.integers(0, len(rings) - 1))
        columns["start"][i] = draw(st.integers(0, n - 1))
        ranks = np.roll(rings[columns["ring"][i]], -columns["start"][i])
        ranks = np.roll(ranks[::-1], 1) if direction < 0 else ranks
        at_end = draw(st.booleans())
        columns["owner"][i] = ranks[-1] if at_end else ranks[0]
        used = [k for k in range(n) if needed[i, ranks[k]] and ranks[k] != columns["owner"][i]]
        first[i], last[i] = (used[0], used[-1]) if used else (-1, -1)
        most = n - 2 if at_end and n > 1 else n - 1
        columns["hops"][i] = draw(st.integers(max(last[i], 0), most))
        columns["last_gift"][i] = draw(st.integers(max(last[i], 0), most))
    gifts = columns.pop("last_gift")
    following = np.arange(count) + count + 2 * n
    paths = Paths(
        rings=rings,
        direction=direction,
        lanes=len(rings),
        block=np.arange(count),
        first_use=first,
        last_use=last,
        following=following if backward else None,
        last_gift=gifts if backward else None,
        home_lane=np.full(count, -1),
        **columns,
    )
    rank, path = np.arange(n), np.arange(count)
    initial, final = np.zeros((2, n, count + 2 * n + count * backward), dtype=bool)
    initial[rings[paths.ring, paths.start], path] = initial[paths.owner, path] = True
    initial[rank, count + rank] = final[rank, count + n + rank] = True
    if backward:
        final[paths.owner, following] = True
    return Circulation(paths, needed, initial, final, len(rings))


@given(circulations())
def test_what_is_proved_is_what_a_replay_finds(case: Circulation) -> None:
    schedule = case.schedule()
    assert case.is_proved(schedule)
    assert schedule.transfers == case.paths.transfers


@st.composite
def spoilt(draw: st.DrawFn) -> Circulation:
    case = draw(circulations())
    paths, count = case.paths, len(case.paths.block)
    for _ in range(draw(st.integers(1, 2))):
        columns = ["ring", "start", "hops", "owner", "first_use", "last_use"]
        columns += ["last_gift"] if paths.following is not None else []
        what = draw(st.sampled_from([*columns, "rings", "initial", "final", "needed", "lanes"]))
        changes: dict[str, Any] = {}
        if what in columns:
            values = getattr(paths, what).copy()
            low, high = {"ring": (0, len(paths.rings) - 1), "start": (0, case.n - 1), "owner": (0, case.n - 1)}.get(
                what, (-1, case.n)
            )
            values[draw(st.integers(0, count - 1))] = draw(st.integers(low, high))
            changes[what] = values
            paths = replace(paths, **changes)
        elif what == "rings":
            rings = paths.rings.copy()
            rings[draw(st.integers(0, len(rings) - 1)), draw(st.integers(0, case.n - 1))] = draw(
                st.integers(0, case.n - 1)
            )
            paths = replace(paths, rings=rings)
        elif what == "lanes":
            case = replace(case, lanes=draw(st.integers(max(case.lanes - 1, 1), case.lanes + 1)))
        else:
            values = getattr(case, what).copy()
            values[draw(st.integers(0, values.shape[0] - 1)), draw(st.integers(0, values.shape[1] - 1))] ^= True
            changes[what] = values
            case = replace(case, **changes)
    return replace(case, paths=paths)


def uses_are_stated(case: Circulation) -> bool:
    """What is not checked: `first_use` and `last_use` are those of the calls."""
    paths = case.paths
    for i in range(len(paths.block)):
        ranks = [case.rank_at(i, k) for k in range(case.n)]
        used = [k for k, rank in enumerate(ranks) if case.needed[i, rank] and rank != paths.owner[i]]
        if (paths.first_use[i], paths.last_use[i]) != ((used[0], used[-1]) if used else (-1, -1)):
            return False
    return True


@settings(max_examples=400)
@given(spoilt())
def test_what_the_theorem_accepts_the_replay_accepts(case: Circulation) -> None:
    noted: list[bool] = []
    try:
        schedule = case.schedule(noted)
    except ScheduleError:
        assert not (uses_are_stated(case) and noted[0])
    else:
        assert not noted[0] or not uses_are_stated(case) or schedule.transfers == case.paths.transfers


def around_three() -> Circulation:
    """Three blocks around one ring, each with a sum that returns to its owner; every rank needs every block."""
    rank, minus = np.arange(3), np.full(3, 2)
    held = np.zeros((3, 12), dtype=bool)
    initial, final = held.copy(), held.copy()
    initial[rank, rank] = initial[rank, 3 + rank] = final[rank, 6 + rank] = final[rank, 9 + rank] = True
    paths = Paths(
        rings=np.array([[0, 1, 2]]),
        direction=1,
        lanes=1,
        block=rank,
        ring=np.zeros(3, dtype=np.int64),
        start=rank,
        hops=minus,
        owner=rank,
        first_use=np.ones(3, dtype=np.int64),
        last_use=minus,
        following=9 + rank,
        last_gift=minus,
        home_lane=np.full(3, -1),
    )
    return Circulation(paths, np.ones((3, 3), dtype=bool), initial, final, 1)


@pytest.mark.parametrize(
    ("what", "at", "value"),
    [
        ("initial", (0, 6), True),
        ("initial", (1, 9), True),
        ("initial", (0, 0), False),
        ("initial", (1, 0), True),
        ("initial", (2, 5), False),
        ("final", (1, 6), True),
        ("final", (0, 9), False),
        ("rings", (0, 1), 0),
        ("hops", 1, 1),
        ("hops", 1, 3),
        ("last_gift", 2, 1),
        ("owner", 0, 1),
        ("owner", 0, 2),
    ],
)
def test_each_premise_is_checked(what: str, at: Any, value: int) -> None:
    case, noted = around_three(), list[bool]()
    case.schedule(noted)
    place = case if what in ("initial", "final") else case.paths
    values = getattr(place, what).copy()
    values[at] = value
    changes: dict[str, Any] = {what: values}
    case = replace(case, **changes) if place is case else replace(case, paths=replace(case.paths, **changes))
    with pytest.raises(ScheduleError):
        case.schedule(noted)
    assert noted == [True, False]
