"""What lazy steps tell by their form holds for the classes whose tests compare it with the steps, and for no others."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import NoLinkError, ScheduleError
from tasp_lab.formats.nccl import graph
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.composition import in_chunks, in_sequence, over_groups, replicated
from tasp_lab.schedule.model import CheckedSteps, LazySteps, ScheduleModel, Step, Traffic
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.circulation import Circulation
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.rank_order import RenumberedSteps, on_ranks
from tasp_lab.schedules.attention.travel import RingLanes, Travel, TravelSteps, around
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.collectives.all_gather import RingSteps, ring_all_gather
from tasp_lab.topology.builders import full_mesh, ring
from tasp_lab.workload.layer import Workload
from tests.support.dtypes import NAMES, built, mutated
from tests.support.routes import direct

NO_TRAFFIC = Traffic(*np.zeros((5, 0), dtype=np.int64))


def own_classes(of: type[LazySteps] = LazySteps) -> Iterator[type[LazySteps]]:
    for each in of.__subclasses__():
        if each.__module__.startswith("tasp_lab."):
            yield each
        yield from own_classes(each)


def lazy_schedules() -> dict[type[LazySteps], Schedule]:
    """A schedule for each class of lazy steps that registered schedules have, proved or replayed."""
    found: dict[type[LazySteps], Schedule] = {}
    cut = AttentionOptions("both", tail_chunks=2)
    layer = Workload(24, heads=4, kv_heads=4, head_dim=2, mask="full")
    for passes in (
        *(built(name, 4) for name in NAMES),
        build_schedules("token-ring", full_mesh(4), layer, options=cut),
        build_schedules("usp:2x2", full_mesh(4), layer, options=AttentionOptions("both", groups="strided")),
    ):
        for schedule in passes:
            steps = schedule.steps
            if isinstance(steps, CheckedSteps):
                steps = steps._steps
            if isinstance(steps, LazySteps):
                found.setdefault(type(steps), replace(schedule, steps=steps))
    return found


LAZY = lazy_schedules()


def as_subclass(steps: Sequence[Step], **methods: Any) -> Any:
    """The steps as those of a subclass with other methods."""
    again = copy(steps)
    object.__setattr__(again, "__class__", type("Mine", (type(steps),), methods))  # frozen ones, too
    return again


def own(schedule: Schedule) -> Sequence[Step]:
    return schedule.steps._steps if isinstance(schedule.steps, CheckedSteps) else schedule.steps


@pytest.mark.parametrize("kind", LAZY, ids=lambda kind: kind.__name__)
def test_a_subclass_that_overrides_a_step_does_not_inherit_the_proof(kind: type[LazySteps]) -> None:
    schedule = LAZY[kind]
    for seed in range(8):
        steps = mutated(schedule, random.Random(seed))
        try:
            transfers = replace(schedule, steps=steps).transfers
        except ScheduleError:
            with pytest.raises(ScheduleError):
                replace(schedule, steps=as_subclass(own(schedule), step=lambda self, index, steps=steps: steps[index]))
        else:
            again = as_subclass(own(schedule), step=lambda self, index, steps=steps: steps[index])
            assert replace(schedule, steps=again).transfers == transfers


@pytest.mark.parametrize("kind", LAZY, ids=lambda kind: kind.__name__)
def test_a_subclass_that_overrides_nothing_is_replayed(kind: type[LazySteps]) -> None:
    schedule = LAZY[kind]
    again = replace(schedule, steps=as_subclass(own(schedule)))
    assert isinstance(again.steps, CheckedSteps)
    assert (again.digest, again.transfers) == (schedule.digest, schedule.transfers)
    assert again.bytes_by_rank().tolist() == schedule.bytes_by_rank().tolist()


@pytest.mark.parametrize("shortcut", ["sends", "calls", "traffic", "hops_repeat", "prove", "reordered", "__len__"])
@pytest.mark.parametrize("kind", LAZY, ids=lambda kind: kind.__name__)
def test_what_a_subclass_tells_of_itself_is_not_used(kind: type[LazySteps], shortcut: str) -> None:
    """Its facts are those of its steps, whatever it tells, or it is refused."""
    lies: dict[str, Any] = {
        "sends": lambda self, index: Step.of(()),
        "calls": lambda self, index: (),
        "traffic": lambda self, size_bytes: NO_TRAFFIC,
        "hops_repeat": True,
        "prove": lambda self, schedule: 1,
        "reordered": (LAZY[kind], np.arange(4)),
        "__len__": lambda self: 1,
    }
    schedule = LAZY[kind]
    try:
        found = replace(schedule, steps=as_subclass(own(schedule), **{shortcut: lies[shortcut]}))
    except ScheduleError:
        assert shortcut not in ("calls", "traffic", "hops_repeat", "prove")
        return
    assert found.transfers == sum(map(len, found.steps)) == sum(map(len, list(found.steps)))
    sent = sum(np.bincount(step.source, found.block_bytes[step.block], 4) for step in found.steps)
    assert found.bytes_by_rank().tolist() == np.zeros(4).tolist() if isinstance(sent, int) else sent.tolist()


def test_each_class_of_the_package_that_takes_a_shortcut_is_trusted_and_its_steps_are_tested() -> None:
    """No class relies on a shortcut that is not used; `LAZY` has each trusted class that has steps."""
    names = "sends", "calls", "traffic", "hops_repeat", "prove", "reordered"
    for kind in own_classes():
        if not kind.is_trusted and not getattr(kind, "__abstractmethods__", None):
            assert all(getattr(kind, name) is getattr(LazySteps, name) for name in names), kind
    assert {kind for kind in own_classes() if kind.is_trusted} - {CheckedSteps} <= set(LAZY)


def test_other_names_of_ranks_prove_nothing_but_the_same_schedule() -> None:
    """With the task, copies or lanes of another schedule the steps are replayed, and refused where they fail."""
    layer = Workload(24, heads=4, head_dim=2)
    straight = build_schedules("usp:2x2", full_mesh(4), layer)[0]
    other = on_ranks(straight, np.array([0, 2, 1, 3]))
    assert isinstance(other.steps, RenumberedSteps)
    assert other.steps.prove(other) == other.transfers == straight.transfers
    assert replace(other, lanes=other.lanes + 1).steps.prove(replace(other, lanes=other.lanes + 1)) is None
    assert other.steps.prove(straight) is None
    for wrong in ({"task": straight.task}, {"initial": straight.initial}, {"final": straight.final}):
        with pytest.raises(ScheduleError):
            replace(other, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError):
        replace(other, steps=RenumberedSteps(straight, np.array([0, 0, 1, 3])))


class Swap(LazySteps):
    """Two ranks swap their blocks; `second` is what they do when the step is made again."""

    def __init__(self, second: Sequence[tuple[int, ...]]) -> None:
        self.rows: list[Sequence[tuple[int, ...]]] = [second, [(0, 1, 0, 0), (1, 0, 0, 1)]]

    def __len__(self) -> int:
        return 1

    def step(self, index: int) -> Step:
        return Step.of(self.rows.pop() if len(self.rows) > 1 else self.rows[0])


class SwapInSequence(Sequence[Step]):
    """The same as a sequence of no class of ours."""

    def __init__(self, second: Sequence[tuple[int, ...]]) -> None:
        self.made = Swap(second)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return self.made[index]


OTHERS: list[Sequence[tuple[int, ...]]] = [
    [(0, 1, 0, 0)],
    [],
    [(1, 0, 0, 1), (0, 1, 0, 0)],
    [(0, 1, 1, 0), (1, 0, 0, 1)],
    [(0, 1, 0, 0, True), (1, 0, 0, 1)],
]


def swap(steps: Sequence[Step]) -> Schedule:
    initial, final = np.eye(2, dtype=bool), np.ones((2, 2), dtype=bool)
    return Schedule("swap", 2, 2, Blocks.of_data(np.array([4, 4])), initial, final, steps)


@pytest.mark.parametrize("second", OTHERS)
@pytest.mark.parametrize("kind", [Swap, SwapInSequence])
def test_a_step_that_is_another_one_later_is_refused(kind: Any, second: Sequence[tuple[int, ...]]) -> None:
    schedule = swap(kind(second))
    for use in (lambda: list(schedule.steps), lambda: schedule.traffic, lambda: schedule.digest):
        with pytest.raises(ScheduleError, match=r"^step 0 is another one than when the schedule was proved, expected"):
            use()


@pytest.mark.parametrize("kind", [Swap, SwapInSequence])
def test_a_step_that_stays_the_same_is_accepted(kind: Any) -> None:
    schedule = swap(kind([(0, 1, 0, 0), (1, 0, 0, 1)]))
    assert schedule.bytes_by_rank().tolist() == [4, 4]
    assert schedule.digest == swap(list(schedule.steps)).digest


def test_steps_that_change_within_a_composition_are_refused() -> None:
    for compose in (
        lambda of: in_chunks(of, 2),
        lambda of: replicated(of, np.array([[0, 1], [2, 3]])),
        lambda of: in_sequence(of, replace(of, initial=of.final, steps=[])),
        lambda of: over_groups(of, of),
    ):
        schedule = swap(Swap(OTHERS[0]))
        with pytest.raises(ScheduleError, match="step 0 is another one than when"):
            compose(schedule)


class Plain(LazySteps):
    """Steps of a user, with a length that may be another one later."""

    def __init__(self, steps: list[Step], length: int) -> None:
        self.steps, self.length = steps, length

    def __len__(self) -> int:
        return self.length

    def step(self, index: int) -> Step:
        return self.steps[index]


def test_the_length_of_steps_is_that_of_the_proof() -> None:
    steps = list(ring_all_gather(full_mesh(4), 8).steps)
    mine = Plain(steps, 3)
    schedule = replace(ring_all_gather(full_mesh(4), 8), steps=mine)
    mine.length = 1
    assert len(schedule.steps) == 3
    for shown in (lambda: list(schedule.steps), lambda: replace(schedule, steps=Plain(steps, 4))):
        with pytest.raises(ScheduleError, match=r"^step \d is missing, expected [34] steps$"):
            shown()
    with pytest.raises(ScheduleError, match="rank 0 never received"):
        replace(schedule, steps=Plain(steps, 2))


def test_a_list_within_lazy_steps_may_not_change() -> None:
    steps = list(ring_all_gather(full_mesh(4), 8).steps)
    schedule = replace(ring_all_gather(full_mesh(4), 8), steps=Plain(steps, 3))
    steps[1] = steps[0]
    with pytest.raises(ScheduleError, match=r"^step 1 is another one"):
        schedule.traffic  # noqa: B018


class Restless(Step):
    """A step whose blocks depend on when they are read."""

    def __len__(self) -> int:
        return 0


def test_a_subclass_of_step_is_refused() -> None:
    step = Restless(*np.array([[0, 1], [1, 0], [0, 0], [0, 1]]))
    for steps in ([step], Plain([step], 1)):
        with pytest.raises(ScheduleError, match=r"^step 0: .* of type Restless, expected a Step$"):
            swap(steps)


class Lying(LazySteps):
    """One step of a ring's hops that tells that all steps are alike, and proved."""

    hops_repeat = True

    def __len__(self) -> int:
        return 1

    def step(self, index: int) -> Step:
        return Step.of([(0, 2, 0, 0)])

    def prove(self, schedule: ScheduleModel) -> int:
        return 12

    def traffic(self, size_bytes: IntArray) -> Traffic:
        return NO_TRAFFIC


def test_a_users_class_proves_nothing() -> None:
    with pytest.raises(ScheduleError, match="rank 0 never received"):
        replace(ring_all_gather(full_mesh(4), 8), steps=Lying())


def test_routes_of_a_users_class_are_checked_step_by_step() -> None:
    class Repeating(Plain):
        hops_repeat = True

    rows = [[(0, 1, 0, 0), (1, 2, 0, 1), (2, 3, 0, 2), (3, 0, 0, 3)], [(0, 2, 0, 0)]]
    kept = np.ones((4, 4), dtype=bool)
    gather = ring_all_gather(full_mesh(4), 8)
    schedule = replace(gather, final=gather.initial, kept=kept, steps=Repeating(list(map(Step.of, rows)), 2))
    with pytest.raises(NoLinkError, match="step 1: rank 0 sends to rank 2"):
        schedule.check_routes(direct(ring(4)))


def test_the_rings_of_the_caller_may_change() -> None:
    rings = np.array([[0, 1, 2, 3]])
    steps = RingSteps(rings)
    rings[:] = 0
    assert steps[0].source.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="WRITEABLE"):
        steps.rings.flags.writeable = True


def test_a_circulation_of_another_class_or_of_fewer_calls_is_replayed() -> None:
    """The theorem presumes that all that the mask needs is computed."""
    schedule = built("ring-attention", 4)[0]
    assert isinstance(schedule.steps, TravelSteps)
    own = schedule.steps.travels[0].circulation
    task, rings, ring_of = own.task, own.rings, own.ring_of

    def with_circulation(circulation: Circulation) -> None:
        travel = Travel(circulation, around(4), RingLanes.of(circulation), trim=False)
        replace(schedule, steps=TravelSteps(travel))

    with pytest.raises(ScheduleError, match="parts of"):
        with_circulation(Circulation(task, rings, ring_of, travels=np.zeros((4, 4), dtype=bool)))

    class Idle(Circulation):
        def calls_with(self, circulating: IntArray, ranks: IntArray) -> Any:
            return ()

    with pytest.raises(ScheduleError, match="parts of"):
        with_circulation(Idle(task, rings, ring_of))


def test_no_format_writes_the_rings_of_a_subclass() -> None:
    gather = ring_all_gather(full_mesh(4), 8)
    graph(gather, full_mesh(4))
    with pytest.raises(ScheduleError):
        graph(replace(gather, steps=as_subclass(gather.steps)), full_mesh(4))


@pytest.mark.parametrize("kind", LAZY, ids=lambda kind: kind.__name__)
def test_no_array_that_trusted_steps_read_can_be_written_to(kind: type[LazySteps]) -> None:
    steps: Any = own(LAZY[kind])
    if kind.is_trusted:
        travels = [*getattr(steps, "travels", ())]
        tables = [table for each in travels for table in (each.arrivals, each.calls, each.gifts)]
        for owner in (steps, *travels, *tables, *(each.circulation for each in travels)):
            for name, values in vars(owner).items():
                assert not isinstance(values, np.ndarray) or not values.flags.writeable, name
