"""What a task fixes before there is a schedule: what starts empty, what must be there in the end, how parts join."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from sim import simulate
from sim.bounds import least
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.blocks import Blocks, Field, Kind
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.rank_part import SCATTERED, rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules import registry
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import owner_schedule
from tasp_lab.schedules.attention.task import KEYS, QUERIES, RESULTS, AttentionTask
from tasp_lab.schedules.build import collective, linear_schedules
from tasp_lab.schedules.collectives.conditions import check_collective
from tasp_lab.schedules.collectives.kinds import KINDS
from tasp_lab.schedules.registry import COLLECTIVES, LINEAR, ScheduleSpec
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.one_device import run_in_process
from tests.support.systems import passes_of, schedules_for, token_ring
from tests.support.worlds import SCHEDULES

MESH = full_mesh(4)
LAYER = Workload(32, heads=4, kv_heads=4, head_dim=8, dtype="fp32", mask="full")
LINEAR_LAYER = Workload(32, heads=4, head_dim=8, dtype="fp32", mask="causal", kind="linear")


def _layers() -> Iterator[tuple[str, Callable[[], tuple[Schedule, ...]]]]:
    """Both passes of all registered schedules of layers, and the small schedules with a task."""
    for name in schedules_for(LAYER, 4):
        yield name, lambda name=name: tuple(passes_of(name, MESH, LAYER))  # type: ignore[misc]
    for name in LINEAR:
        yield name, lambda name=name: linear_schedules(name, MESH, LINEAR_LAYER, None, AttentionOptions("both"))  # type: ignore[misc]
    for name, build in SCHEDULES.items():
        yield f"small {name}", lambda build=build: (build(),)  # type: ignore[misc]


LAYERS = dict(_layers())


def _with_kinds(schedule: Schedule, change: Callable[[Kind], Kind]) -> Schedule:
    old = schedule.blocks
    return replace(schedule, blocks=Blocks([change(kind) for kind in old.kinds], old.kind, old.bytes, old.parts))


@pytest.mark.parametrize("name", LAYERS)
def test_schedules_start_and_end_as_their_tasks_say(name: str) -> None:
    """Only saved data of a forward pass lie at further ranks, and nothing that a task asks for is left out."""
    for schedule in LAYERS[name]():
        if schedule.task is None:
            continue
        contract, blocks = schedule.task.contract, np.arange(len(schedule.blocks))
        starts = contract.starts_at == np.arange(schedule.world_size)[:, None]
        assert (schedule.initial <= starts | contract.saved).all()
        assert (schedule.initial | contract.saved >= starts).all()
        ends = contract.ends_at >= 0
        assert schedule.final[contract.ends_at[ends], blocks[ends]].all()
        sums = np.array([bool(kind.join) for kind in schedule.blocks.kinds])[schedule.blocks.kind]
        assert not schedule.initial[:, sums].any()


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_computed_starts_empty(name: str) -> None:
    """Without any step, a schedule that lists what it promises among its initial copies has done nothing."""
    for schedule in LAYERS[name]():
        if schedule.task is None:
            continue
        with pytest.raises(ScheduleError, match=r"starts with block \d+ .*, which (is empty until|only rank \d+ has)"):
            replace(schedule, steps=[], initial=schedule.initial | schedule.final)
        with pytest.raises(ScheduleError, match=r"rank \d+ does not promise block \d+ .*, which the task asks for"):
            replace(schedule, final=np.zeros_like(schedule.final))


@pytest.mark.parametrize("name", LAYERS)
def test_joins_and_fields_are_those_of_the_kernels(name: str) -> None:
    """Whatever is changed of a kind but its pool, and what is bound: it is refused."""
    for schedule in LAYERS[name]():
        if schedule.task is None:
            continue
        for number, kind in enumerate(schedule.blocks.kinds):
            for changed in _other_kinds(kind):
                kinds = [changed if at == number else each for at, each in enumerate(schedule.blocks.kinds)]
                old = schedule.blocks
                with pytest.raises(ScheduleError):
                    replace(schedule, blocks=Blocks(kinds, old.kind, old.bytes, old.parts), steps=list(schedule.steps))


def _other_kinds(kind: Kind) -> Iterator[Kind]:
    for join in ("add", "merge"):
        if join != kind.join:
            yield replace(kind, join=join)
    yield replace(kind, name=f"other {kind.name}")
    yield replace(kind, fields=kind.fields[:-1])
    yield replace(kind, fields=(*kind.fields, Field("more", "fp32", (1,))))
    yield replace(kind, fields=tuple(replace(each, dtype="fp16" if each.dtype != "fp16" else "bf16", home_dtype=None)
                                     for each in kind.fields))  # fmt: skip


def test_the_message_names_the_block_and_both_kinds() -> None:
    with pytest.raises(
        ScheduleError, match=r"block 8 is a sum joined by 'add', expected that it is a sum joined by 'merge'"
    ):
        _with_kinds(token_ring(MESH, LAYER), lambda kind: replace(kind, join="add") if kind.join == "merge" else kind)
    with pytest.raises(
        ScheduleError, match=r"block 8 has the fields out \(fp32, 1x4x8\), expected that it has the fields"
    ):
        _with_kinds(token_ring(MESH, LAYER), lambda kind: replace(kind, fields=kind.fields[:1]) if kind.join else kind)


@pytest.mark.parametrize("whole_steps", [False, True])
def test_results_may_be_made_where_the_caller_has_no_tensor_of_them(whole_steps: bool) -> None:
    """Results are bound and have no pool. Those of other ranks lie in the memory until they are given away."""
    schedule = _queries_visit()
    results = schedule.task.blocks_of(RESULTS)  # type: ignore[union-attr]
    assert [each.bound for each in schedule.blocks.kinds] == [True, False, True]
    assert sorted(rank_part(schedule, 0).resident) == [*_queries(schedule), results[1]]
    run_in_process(schedule, whole_steps=whole_steps)


def _queries(schedule: Schedule) -> list[int]:
    assert isinstance(schedule.task, AttentionTask)
    found: list[int] = schedule.task.blocks_of(QUERIES).tolist()
    return found


def _queries_visit() -> Schedule:
    """Two ranks send their queries to each other, attend to their own keys, and give the results back."""
    layer = Workload(8, heads=2, kv_heads=1, head_dim=8, dtype="fp32", mask="full")
    (whole, *_) = passes_of("ring-attention", full_mesh(2), layer)
    task = whole.task
    assert isinstance(task, AttentionTask)
    queries, results, keys = (task.blocks_of(each).tolist() for each in (QUERIES, RESULTS, KEYS))
    calls = [
        Calls.of("attend", [(rank, [[queries[rank ^ other]], [keys[rank]]], (-3, 3)) for rank in (0, 1)])
        for other in (0, 1)
    ]
    steps = [
        Step.of([(rank, 1 - rank, 0, queries[rank]) for rank in (0, 1)], [calls[0]]),
        Step.of([], [calls[1]]),
        Step.of([(rank, 1 - rank, 0, results[1 - rank], True) for rank in (0, 1)]),
    ]
    kept = np.zeros_like(whole.initial)
    kept[:, queries] = True
    return owner_schedule("visit", full_mesh(2), task, steps, lanes=1, circulating={QUERIES: None}, kept=kept)


@pytest.mark.parametrize("whole_steps", [False, True])
@pytest.mark.parametrize("passing", [0, 1])
def test_operands_that_do_not_lie_side_by_side_are_gathered(passing: int, whole_steps: bool) -> None:
    """Keys of several rings come in the order of their step; calls take them in reverse, as a full mask allows."""
    schedule = passes_of("tasp", full_mesh(4), LAYER)[passing]
    steps = list(schedule.steps)
    for at, step in enumerate(steps[1:], 1):
        ((kernel, rows),) = [(each.kernel, each.rows()) for each in step.calls] or [("", [])]
        turned_rows = [(rank, [blocks[::-1] for blocks in operands], params) for rank, operands, params in rows]
        steps[at] = replace(step, calls=(Calls.of(kernel, turned_rows),) if rows else ())
    turned = replace(schedule, steps=steps)
    operands = [operand for call in rank_part(turned, 0).calls for operand in call.operands]
    scattered = [each for each in operands if each.offset == SCATTERED]
    assert scattered
    assert all(sum(len(piece.blocks) for piece in each.pieces) == len(each.blocks) for each in scattered)
    run_in_process(turned, whole_steps=whole_steps)


# -- collectives ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_what_their_names_say(name: str) -> None:
    schedule, kind = collective(name, MESH, 64), COLLECTIVES[name].kind
    for other in KINDS:
        if other == kind:
            check_collective(schedule, other, 64)
        else:
            with pytest.raises(ScheduleError, match=f"is not an? {other} of 64 B, but an? {kind} of 64 B"):
                check_collective(schedule, other, 64)
    with pytest.raises(ScheduleError, match=f"is not an? {kind} of 63 B, but an? {kind} of 64 B"):
        check_collective(schedule, kind, 63)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_registered_collective_that_moves_nothing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof takes its start as it is, since it has no task; the collective does not."""

    right = collective(name, MESH, 64)

    def nothing(topology: object, shard_bytes: int, *rings: object) -> Schedule:
        data = Blocks.of_data(right.block_bytes)
        return replace(right, blocks=data, steps=[], initial=right.final, initial_part=None, kept=None)

    spec = ScheduleSpec(COLLECTIVES[name].kind, nothing)
    monkeypatch.setitem(registry.SCHEDULES, name, spec)
    with pytest.raises(ScheduleError, match=f"is not an? {spec.kind} of 64 B, but no collective"):
        collective(name, MESH, 64)


# -- the bound --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "schedule", [collective("ring", MESH, 64), token_ring(MESH, LAYER)], ids=lambda each: each.name
)
def test_a_time_below_the_bound_is_an_error_of_ours(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(MESH)
    time_s = simulate.simulate(schedule, machine).time_s
    assert time_s >= least.least_s(schedule, machine) > 0
    monkeypatch.setattr(least, "least_s", lambda *_: 2 * time_s)
    with pytest.raises(
        AssertionError, match=f"'{schedule.name}' on full-mesh:4: predicted .* s, and nothing takes less"
    ):
        simulate.simulate(schedule, machine)
