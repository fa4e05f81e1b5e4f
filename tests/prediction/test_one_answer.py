"""One question has one answer: in Python, on the command line, in a ranking, in a study, on any number of workers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

import tasp_lab
from tasp_lab.cli.process import main
from tasp_lab.core.errors import QuantityError, RunError
from tasp_lab.core.workers import as_they_end, in_order, processes
from tasp_lab.machines.catalogue import catalogue_names, load_machine
from tasp_lab.machines.libraries.library import RootComplexLibrary
from tasp_lab.machines.machine import IDEAL
from tasp_lab.machines.profile import member
from tasp_lab.machines.sampling import Sampling
from tasp_lab.prediction.columns import fields_of, view_of
from tasp_lab.schedules.attention.options import OPTIONS, AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import options_of, uses_rings
from tasp_lab.study.evaluate import evaluate
from tasp_lab.study.point import Point
from tasp_lab.topology.routing import ANY_ROUTE
from tasp_lab.workload.layer import Workload

SCHEDULES = ("ring", "multi-ring")
SHARD_BYTES = 3 * 2**20
LARGE = {"ascend-910c-384", "trn2-64"}
"""Machines whose many rings take half a minute to find: one ring tells as much here."""
OTHERS = ("full-mesh:8", "nodes:2x4:switch", "h100-2x4", "gh200-3x1")


def schedules_on(name: str) -> tuple[str, ...]:
    return SCHEDULES[: 1 if name in LARGE else None]


def asked_on_the_command_line(capsys: pytest.CaptureFixture[str], name: str, *options: str) -> dict[str, object]:
    chosen = [word for schedule in schedules_on(name) for word in ("--schedule", schedule)]
    main(["predict", name, *chosen, "--shard-bytes", str(SHARD_BYTES), *options, "--json"])
    document = json.loads(capsys.readouterr().out)
    times = {each["schedule"]: each["time_s"] for each in document["predictions"]}
    return {"library": document["library"]} | times


def asked_in_python(name: str, library: str = "auto") -> dict[str, object]:
    found = tasp_lab.predict(name, schedules_on(name), SHARD_BYTES, library=library)
    return {"library": found.library} | {each.schedule: float(each.time_s) for each in found}


@pytest.mark.parametrize("name", [*catalogue_names(), *OTHERS])
def test_python_and_the_command_line_agree(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert asked_in_python(name) == asked_on_the_command_line(capsys, name)


@pytest.mark.parametrize("library", ["ideal", "gloo", "nccl"])
def test_they_agree_with_every_library(capsys: pytest.CaptureFixture[str], library: str) -> None:
    found = asked_in_python("h100-2x2", library)
    assert found == asked_on_the_command_line(capsys, "h100-2x2", "--library", library)
    assert found["library"] == library


@pytest.mark.parametrize("name", catalogue_names())
def test_a_machine_comes_with_the_library_of_its_profile(name: str) -> None:
    found, machine = member(name), load_machine(name)
    if "peer_write_share" in machine.parameters:
        assert isinstance(machine.comm_library, RootComplexLibrary)
    else:
        assert machine.comm_library == (IDEAL if found is None else found.comm_library)
    assert load_machine(name, library="ideal").comm_library == IDEAL


@pytest.mark.parametrize("name", ["h100-2x4", "mi300x-8", "torus:3x3", "dgx-1v"])
def test_a_library_changes_no_link_and_no_compute_rate(name: str) -> None:
    """Of the topology, a library decides only how many ranks may forward a message."""
    own, wires = load_machine(name), load_machine(name, library="ideal")
    assert wires.topology.forwarding == ANY_ROUTE
    assert (replace(own.topology, forwarding=ANY_ROUTE), own.compute) == (wires.topology, wires.compute)


LAYER = tasp_lab.Workload(8192, heads=8, mask="causal")
TIMES = ("time_s", "time_low_s", "time_high_s", "compute_s", "exposed_s", "bound_s")


@pytest.mark.parametrize("schedule", ["tasp", "ulysses", "kv-all-gather"])
@pytest.mark.parametrize(("machine", "overrides"), [("h100-8", ()), ("mi300x-8", ("link.bandwidth=x0.5",))])
def test_a_layer_has_the_same_numbers_whoever_asks(machine: str, overrides: tuple[str, ...], schedule: str) -> None:
    options, sampling = AttentionOptions("both"), Sampling(2)
    point = Point(machine, schedule, LAYER, options, overrides=overrides, sampling=sampling)
    row = evaluate(point)
    question = tasp_lab.Question(
        machine, schedule, LAYER, options, overrides=overrides, sampling=sampling, engine="array"
    )
    asked = tasp_lab.answer(question)
    asks = {"overrides": overrides, "engine": "array", "samples": sampling.samples, "seed": sampling.seed}
    predicted = tasp_lab.predict(machine, schedule, LAYER, options=options, **asks)[-1]  # type: ignore[arg-type]
    (ranked,) = tasp_lab.compare(machine, LAYER, schedule, options=options, **asks).candidates  # type: ignore[arg-type]
    numbers = {name: float(getattr(asked, name)) for name in TIMES}
    numbers |= {name: getattr(asked, name) for name in ("buffer_bytes", "bytes_per_rank")}
    assert numbers["time_low_s"] < numbers["time_s"] < numbers["time_high_s"]
    for other in (predicted, ranked):
        assert {name: getattr(other, name) for name in numbers} == numbers
    assert {name: row[name] for name in numbers} == numbers


@pytest.mark.parametrize("schedule", ["ring", "multi-ring", "library-ring-all-reduce"])
def test_a_collective_has_the_same_numbers_whoever_asks(schedule: str) -> None:
    (predicted,) = tasp_lab.predict("mi300x-8", schedule, SHARD_BYTES, samples=2)
    asked = tasp_lab.answer(tasp_lab.Question("mi300x-8", schedule, SHARD_BYTES, sampling=Sampling(2)))
    assert fields_of(predicted, "collective") == fields_of(asked, "collective")


QUESTIONS = (
    tasp_lab.Question("h100-8", "tasp", LAYER, AttentionOptions("both")),
    tasp_lab.Question("h100-8", "ulysses", tasp_lab.Workload(8192, heads=3, mask="full")),
    tasp_lab.Question("mi300x-8", "multi-ring", SHARD_BYTES, sampling=Sampling(2)),
    tasp_lab.Question("no-such-machine", "ring", SHARD_BYTES),
    tasp_lab.Question(load_machine("full-mesh:3"), "ring", SHARD_BYTES),
)


def contents(answers: Sequence[tasp_lab.Answer]) -> list[tuple[object, ...]]:
    return [
        (found.question, found.status, found.reason, fields_of(found, view_of(found)) if found.applies else None)
        for found in answers
    ]


@pytest.mark.parametrize("detail", ["times", "bottleneck"])
def test_one_worker_and_two_give_equal_answers_in_order(detail: str) -> None:
    alone, shared = (
        list(tasp_lab.answers(QUESTIONS, detail, workers=workers))  # type: ignore[arg-type]
        for workers in (1, 2)
    )
    assert [found.question for found in alone] == list(QUESTIONS)
    assert contents(shared) == contents(alone)
    for one, other in zip(alone, shared, strict=True):
        assert not one.applies or one.timeline == other.timeline


def test_a_schedule_that_does_not_apply_is_an_answer_with_its_reason() -> None:
    found = list(tasp_lab.answers(QUESTIONS))
    assert [one.status for one in found] == ["ok", "does not apply", "ok", "does not apply", "ok"]
    assert "3 heads for 8 ranks" in found[1].reason
    assert "no-such-machine" in found[3].reason
    assert found[1].time_s == float("inf")


def test_answers_are_computed_when_they_are_asked_for() -> None:
    asked = []

    def questions() -> Iterator[tasp_lab.Question]:
        for question in QUESTIONS:
            asked.append(question)
            yield question

    found = tasp_lab.answers(questions())
    assert asked == []
    next(found)
    assert asked == list(QUESTIONS[:1])


def test_less_than_one_worker_is_refused() -> None:
    with pytest.raises(QuantityError, match="workers: 0, expected 1 or more"):
        tasp_lab.answers([], workers=0)


@pytest.mark.parametrize("run", [as_they_end, in_order])
def test_a_worker_that_ends_early_is_an_error(run: object) -> None:
    with pytest.raises(RunError, match="a worker ended before its work"), processes(2) as executor:
        list(run(os._exit, [1], executor, 2))  # type: ignore[operator]


def test_results_on_workers_come_in_the_order_of_the_items() -> None:
    items = list(range(20, 0, -1))
    with processes(2) as executor:
        assert list(in_order(partial(pow, 2), items, executor, 2)) == [2**item for item in items]
        assert sorted(as_they_end(partial(pow, 2), items, executor, 2)) == sorted((item, 2**item) for item in items)


OPEN = ("tasp", "zigzag-ring-attention", "kv-and-q-rings", "staged-ulysses", "usp:4x2", "usp:2x4", "grid:2x4",
        "double-ring:4x2")  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("machine", ["h100-2x4", "full-mesh:8"])
def test_options_that_are_left_open_are_the_fastest(name: str, machine: str) -> None:
    """No other value of an open option is faster, and asking for the chosen values builds the same schedules."""
    layer, both = Workload(4096, heads=8, kv_heads=8, mask="causal"), AttentionOptions("both")
    found = tasp_lab.answer(tasp_lab.Question(machine, name, layer, both))
    names = [each for each in options_of(name) if OPTIONS[each].open]
    asked = [replace(both, **dict(zip(names, each, strict=True)))  # type: ignore[arg-type]
             for each in product(*(OPTIONS[each].open for each in names))]  # fmt: skip
    alone = {each: tasp_lab.answer(tasp_lab.Question(machine, name, layer, each)) for each in asked}
    times_s = {each: float(one.time_s) for each, one in alone.items() if one.applies}
    assert float(found.time_s) == min(times_s.values()) == times_s[found.options]
    built = build_schedules(name, load_machine(machine).topology, layer, None, found.options)
    if not uses_rings(name):  # which a machine chooses
        assert [each.digest for each in built] == [each.schedule.digest for each in found.passes]
    assert found.had_choice
