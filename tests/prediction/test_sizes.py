"""Worlds that are too large are refused, or announced, before they take memory: counts, never seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest

import tasp_lab
from tasp_lab.core.errors import NoDecompositionError, ScheduleError
from tasp_lab.prediction import evaluate as evaluator
from tasp_lab.schedule import calls, proof
from tasp_lab.schedule.buffer_layout import memory_bytes
from tasp_lab.schedule.calls import Calls, Effects
from tasp_lab.schedule.dependencies import dependencies
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.build import build_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

TOO_LARGE = [("ulysses", 1024), ("ulysses", 16384), ("usp:128x128", 16384)]


@pytest.mark.parametrize(("name", "ranks"), TOO_LARGE)
def test_too_many_blocks_are_refused_before_they_are_made(name: str, ranks: int) -> None:
    topology, layer = full_mesh(ranks), Workload(sequence=16 * ranks, heads=ranks, mask="full")
    tracemalloc.start()
    try:
        with pytest.raises(ScheduleError, match=f"^schedule '{name}': {ranks} ranks and [0-9]+ blocks are too many"):
            build_schedules(name, topology, layer)
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()


def test_a_refusal_on_the_command_line_needs_less_than_two_gibibytes() -> None:
    command = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31));"
        "from tasp_lab.cli.process import main; main()"
    )
    arguments = ["predict", "full-mesh:16384", "--schedule", "ulysses", "--seq", "16384", "--heads", "16384"]
    single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments], capture_output=True, text=True, env=os.environ | single
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "building ulysses for 16,384 ranks; this may take a while",
        "tasp-lab: schedule 'ulysses': 16384 ranks and 805306368 blocks are too many to replay, expected at most "
        "1073741824 pairs of them",
    ]


def test_a_full_mesh_takes_no_memory_for_each_of_its_links() -> None:
    tasp_lab.predict("full-mesh:4", "ring", "1MiB", engine="array", samples=0)  # imports
    tracemalloc.start()
    try:
        (found,) = tasp_lab.predict("full-mesh:4096", "ring", "1MiB", engine="array", samples=0)
        with pytest.raises(NoDecompositionError, match=r"the 8191 rings of K\*_8192 are too many"):
            tasp_lab.decompose("full-mesh:8192")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.time_s == pytest.approx(4095 * (2**20 / 50e9 + 1e-6))
    assert most < 4096 * 4095 * 8


def test_a_search_over_many_ranks_is_announced_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("tasp_lab.rings.decompose.MANY_RANKS", 12)
    found = tasp_lab.decompose("torus:3x4", progress=lines.append)
    assert found.proved_optimal
    assert lines[0] == "bounding the rate of rings of 12 ranks; this may take a while"


def test_large_worlds_are_announced_before_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def refuse(*_: object) -> Sequence[Schedule]:
        raise ScheduleError(lines[-1])

    monkeypatch.setattr(evaluator, "build_schedules", refuse)
    with pytest.raises(ScheduleError, match=r"^building ring for 256 ranks; this may take a while$"):
        tasp_lab.predict("full-mesh:256", "ring", "1MiB", progress=lines.append)


LAYERS = [
    ("ulysses", Workload(sequence=96, heads=8, mask="causal")),
    ("grid:2x4", Workload(sequence=96, heads=4, mask="causal")),
    ("usp:2x4", Workload(sequence=96, heads=4, mask="causal")),
    ("kv-all-gather", Workload(sequence=96, heads=4, mask="causal")),
]


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_effects_in_batches_are_the_same_effects(name: str, layer: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def built() -> list[list[np.ndarray]]:
        found = []
        for schedule in build_schedules(name, full_mesh(8), layer, options=AttentionOptions("both")):
            derived = dependencies(schedule)
            adds = derived.calls.adds
            found.append([adds.offset, adds.block, *derived.edges, memory_bytes(schedule)])
        return found

    at_once = built()
    tiles_of: list[list[int]] = []
    effects = AttentionTask.effects

    def counted(task: AttentionTask, some: Calls) -> Effects:
        tiles_of.append(np.prod([each.sizes for each in some.operands], axis=0).tolist())
        return effects(task, some)

    monkeypatch.setattr(calls, "TILES_AT_ONCE", 20)
    monkeypatch.setattr(proof, "TILES_AT_ONCE", 20)
    monkeypatch.setattr(AttentionTask, "effects", counted)
    for one, other in zip(at_once, built(), strict=True):
        assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))
    assert max(map(sum, tiles_of)) <= 20 + max(map(max, tiles_of))
    assert len(tiles_of) > 3 * 2, "each of three readers of effects took several batches"


def test_a_part_that_calls_of_two_batches_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (schedule,) = build_schedules("ulysses", full_mesh(4), Workload(sequence=64, heads=4, mask="full"))
    (own,) = schedule.steps[1].calls
    twice = own.select(np.array([0, 1, 2, 3, 2]))
    steps = [schedule.steps[0], Step.of((), [twice]), schedule.steps[2]]
    messages = []
    for tiles in (calls.TILES_AT_ONCE, 1):
        monkeypatch.setattr(calls, "TILES_AT_ONCE", tiles)
        monkeypatch.setattr(proof, "TILES_AT_ONCE", tiles)
        with pytest.raises(
            ScheduleError, match=r"step 1: rank 2 computes part 0 of block .* twice in this step"
        ) as error:
            Schedule("twice", 4, 3, schedule.blocks, schedule.initial, schedule.final, steps, schedule.task)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
