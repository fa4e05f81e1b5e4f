"""Schedules on disk: answers with them are those without them, whatever has become of the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim.array import repeated
from tasp_lab.core.cache import LIMIT
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.prediction import evaluate, kept
from tasp_lab.prediction.compare import compare
from tasp_lab.prediction.kept import SHELF, build_once, keep_on_disk
from tasp_lab.prediction.predict import predict
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules import registry
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.workload.layer import Workload

BOTH = AttentionOptions("both")
LAYER = Workload(2048, heads=8, kv_heads=4, mask="causal")
LAYERS = (LAYER, Workload(2048, heads=8, kind="linear"), Workload(2048, heads=8, kind="hybrid", layers="LS"))
HALF = ["link.bandwidth=x0.5"]
STACKS = ("lasp-2+ring-attention", "lasp-2+kv-all-gather", "lasp+tasp")
FEW = ("ring-attention", "tasp", "ulysses", "usp:2x2", "kv-and-q-rings", "trees-kv-all-gather")


@pytest.fixture(autouse=True)
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of schedules that are built from now on; at the beginning none is kept anywhere."""
    names: list[str] = []

    def noted(name: str, *given: Any) -> tuple[Schedule, ...]:
        passes = build_schedules(name, *given)  # some raise an error, each time
        names.append(name)
        return passes

    monkeypatch.setattr(kept, "build_schedules", noted)
    monkeypatch.setenv("TASP_LAB_CACHE", str(tmp_path))
    monkeypatch.setenv(LIMIT, "100MiB")
    monkeypatch.setattr(kept, "_kept", {})
    monkeypatch.setattr(kept, "_to_shelve", {})
    monkeypatch.setattr(kept, "_numbers", {})
    return names


def end_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the next question finds is on disk."""
    keep_on_disk()
    monkeypatch.setattr(kept, "_kept", {})


def ranking(layer: Workload, schedules: Sequence[str] | None = FEW, **settings: Any) -> dict[str, Any]:
    """All numbers of a comparison, and its text."""
    found = compare("full-mesh:4", layer, schedules, passes="both", screen=True, **settings)
    document = found.to_dict()
    del document["provenance"]
    return document | {"text": str(found)}


@pytest.mark.parametrize(
    ("layer", "names"), [*zip(LAYERS, (None, None, STACKS), strict=True)], ids=lambda each: getattr(each, "kind", "")
)
def test_answers_are_those_without_a_folder(
    layer: Workload, names: Sequence[str] | None, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setenv(LIMIT, "0")
        expected, changed = ranking(layer, names), ranking(layer, names, overrides=HALF)
        end_process(monkeypatch)
        assert not SHELF.files()
    first = ranking(layer, names)
    assert not SHELF.files()
    end_process(monkeypatch)
    assert SHELF.files()
    most = len(built)
    built.clear()
    again = ranking(layer, names)
    assert not built
    end_process(monkeypatch)
    what_if = ranking(layer, names, overrides=HALF)
    assert len(built) < most / 2
    assert first == again == expected
    assert what_if == changed


def test_the_same_question_prepares_and_simulates_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ranking(LAYER)
    end_process(monkeypatch)

    def refused(*_: object) -> None:
        raise AssertionError("known from the first time")

    monkeypatch.setattr(repeated, "operations_of", refused)
    monkeypatch.setattr(repeated, "time_s", refused)  # of schedules of any size
    monkeypatch.setattr(evaluate, "least_of_schedule_s", refused)
    assert ranking(LAYER) == first


CHANGES: Sequence[dict[str, Any]] = [
    *({"overrides": [each]} for each in ("nic.bandwidth=x0.5", "nic.latency=x2", "message_launch=x3",
                                         "link.bandwidth=x0.9", "rank.1.compute=x0.5")),
    {"without": ["nic.1"]}, {"kernel": "flash-attention-2"}, {"library": "gloo"},
]  # fmt: skip


def test_numbers_are_those_of_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever differs between two machines, neither gets the numbers of the other."""

    def times() -> list[list[object]]:
        asked = [{}, *CHANGES]
        return [
            [
                [row.get("time_s"), row.get("bound_s"), row.get("reason")]
                for row in compare("h100-2x2", LAYER, FEW[:3], passes="both", **each).to_dict()["results"]
            ]
            for each in asked
        ]

    with monkeypatch.context() as without:
        without.setenv(LIMIT, "0")
        expected = times()
    assert len({str(each) for each in expected}) == len(expected), "each change changes a number"
    assert times() == expected
    end_process(monkeypatch)
    assert times() == expected


def test_processes_add_the_numbers_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that begin without any, one after the other, as each reads what the other has written before it writes."""
    predict("full-mesh:4", "tasp", LAYER, passes="both", events=False)
    other, kept._numbers = kept._numbers, {}
    predict("full-mesh:4", "ulysses", LAYER, passes="both", events=False)
    end_process(monkeypatch)
    kept._numbers = other
    end_process(monkeypatch)

    def refused(*_: object) -> None:
        raise AssertionError("known from the first time")

    monkeypatch.setattr(repeated, "time_s", refused)
    for name in ("tasp", "ulysses"):
        predict("full-mesh:4", name, LAYER, passes="both", events=False)


def test_schedules_that_are_read_are_those_that_were_built(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = load_machine("h100-2x2").topology
    names = registry.layer_names_on(4, LAYER)
    assert len(names) > 20
    written = {}
    for name in names:
        try:
            passes = build_once(name, topology, LAYER, None, BOTH)
        except registry.NOT_APPLICABLE:
            continue
        written[name] = [(each.digest, each.transfers, list(each.traffic.bytes)) for each in passes]
    end_process(monkeypatch)
    for name, content in written.items():
        passes = build_once(name, topology, LAYER, None, BOTH)
        assert [(each.digest, each.transfers, list(each.traffic.bytes)) for each in passes] == content
        for each in passes:  # what was proved still holds
            assert each.digest == Schedule(**{field: getattr(each, field) for field in FIELDS}).digest
            for values in (each.initial, each.final, each.steps[0].source, each.blocks.bytes):
                with pytest.raises(ValueError, match="WRITEABLE"):
                    values.flags.writeable = True


FIELDS = [name for name, each in Schedule.__dataclass_fields__.items() if each.init]


def test_what_is_found_later_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = load_machine("full-mesh:4").topology
    build_once("tasp", topology, LAYER, None, BOTH)
    end_process(monkeypatch)
    bare = sum(size for _, size, _ in SHELF.files())
    predict("full-mesh:4", "tasp", LAYER, passes="both")
    end_process(monkeypatch)
    known = {path: path.stat().st_ino for _, _, path in SHELF.files()}
    assert sum(size for _, size, _ in SHELF.files()) > 1.2 * bare
    predict("full-mesh:4", "tasp", LAYER, passes="both")
    end_process(monkeypatch)
    assert {path: path.stat().st_ino for _, _, path in SHELF.files()} == known, "nothing is written again"


@pytest.mark.parametrize("break_it", [
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(b"another program's"),
    lambda path: path.write_bytes(b""),
    lambda path: (path.unlink(), path.mkdir()),
    lambda path: path.unlink(),
])  # fmt: skip
def test_broken_files_are_built_again(
    break_it: Callable[[Path], object], built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ranking(LAYER)
    names = sorted(built)
    end_process(monkeypatch)
    for _, _, path in SHELF.files():
        break_it(path)
    built.clear()
    assert ranking(LAYER) == first
    assert sorted(built) == names
    end_process(monkeypatch)


def test_without_a_folder_there_are_answers_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ranking(LAYER)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TASP_LAB_CACHE", str(tmp_path / "file"))
    end_process(monkeypatch)
    assert ranking(LAYER) == first


def test_another_source_is_another_schedule(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    predict("full-mesh:4", "tasp", LAYER)
    end_process(monkeypatch)
    built.clear()
    predict("full-mesh:4", "tasp", LAYER)
    assert built == []
    end_process(monkeypatch)
    monkeypatch.setattr(kept, "digest_of_sources", lambda *_: "of changed sources")
    predict("full-mesh:4", "tasp", LAYER)
    assert built == ["tasp"]


def test_each_thing_that_schedules_follow_from_is_part_of_the_name() -> None:
    mesh, ring = (load_machine(each).topology for each in ("full-mesh:4", "ring:4"))
    slow = replace(ring, links=(replace(ring.links[0], bandwidth_bytes_per_s=1e9), *ring.links[1:]))
    rings = decompose(mesh)
    reverse = Decomposition(mesh, rings.rings[:, ::-1], rings.fold, "reversed")
    layers = LAYER, LAYER.resized(4096), replace(LAYER, mask="full")
    questions = [
        *(("tasp", mesh, layer, rings, BOTH) for layer in layers),
        ("ring-attention", mesh, LAYER, rings, BOTH),
        ("tasp", mesh, LAYER, reverse, BOTH),
        ("tasp", mesh, LAYER, rings, AttentionOptions("both", buffers=4)),
        ("tasp", mesh, LAYER, rings, AttentionOptions("forward")),
        ("ulysses", mesh, LAYER, None, BOTH),
        ("ulysses", load_machine("full-mesh:2").topology, LAYER, None, BOTH),
        ("ring-attention", ring, LAYER, None, BOTH),  # a search chooses its rings by rates
        ("ring-attention", slow, LAYER, None, BOTH),
    ]
    for question in questions:
        build_once(*question)
    keep_on_disk()
    assert len(SHELF.files()) == len(questions)


def test_schedules_of_a_users_own_function_are_built_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    @registry.schedule("mine-each-time", "softmax", moves="as ring-attention does")
    def mine(name: str, *given: Any) -> tuple[Schedule, ...]:
        calls.append(name)
        return build_schedules("ring-attention", given[0], given[1], None, given[2])

    calls: list[str] = []
    try:
        for _ in range(2):
            predict("full-mesh:4", "mine-each-time", LAYER)
            end_process(monkeypatch)
    finally:
        registry.SCHEDULES.pop("mine-each-time", None)
    assert calls == ["mine-each-time"] * 2
    assert not SHELF.files()


def test_schedules_go_within_the_limit_and_are_built_again(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = ranking(LAYER)
    monkeypatch.setenv(LIMIT, "300kB")
    end_process(monkeypatch)
    assert 0 < sum(size for _, size, _ in SHELF.files()) <= 300_000
    built.clear()
    assert ranking(LAYER) == first
    assert built
    end_process(monkeypatch)
    assert 0 < sum(size for _, size, _ in SHELF.files()) <= 300_000


def test_what_memory_lets_go_of_is_on_disk(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = ranking(LAYER)
    most = len(built)
    monkeypatch.setattr(kept, "_kept", {})
    monkeypatch.setattr(kept, "_to_shelve", {})
    monkeypatch.setattr(kept, "MOST_KEPT", 2)
    assert ranking(LAYER) == first
    assert SHELF.files()
    built.clear()
    assert ranking(LAYER) == first
    assert len(built) < most / 4, "the last ones alone are not there yet"


def test_large_schedules_are_kept_without_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = predict("full-mesh:4", "tasp", LAYER, passes="both")[2].time_s
    monkeypatch.setattr(kept, "_kept", {})
    monkeypatch.setattr(kept, "MANY_KEPT", 5)
    (forward, _) = build_once("tasp", load_machine("full-mesh:4").topology, LAYER, None, BOTH)
    list(forward.steps)
    assert predict("full-mesh:4", "tasp", LAYER, passes="both")[2].time_s == expected
    end_process(monkeypatch)
    assert len(list(forward.steps)) == len(forward.steps), "those in memory are as before"
    assert predict("full-mesh:4", "tasp", LAYER, passes="both")[2].time_s == expected


def _compare(limit: str = "100MiB") -> subprocess.Popen[bytes]:
    """A whole command, of two processes where there are two cores."""
    layer = ["--seq", "2Ki", "--heads", "8", "--kv-heads", "4", "--mask", "causal", "--pass", "both"]
    line = [sys.executable, "-m", "tasp_lab.cli", "compare", "full-mesh:4", *layer, "--json"]
    chosen = [word for each in FEW for word in ("--schedule", each)]
    environment = {**os.environ, LIMIT: limit}
    return subprocess.Popen([*line, *chosen], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)


def test_commands_at_once_and_the_next_one_have_one_answer() -> None:
    documents = []
    for limits in ["0"], ["100MiB", "100MiB"], ["100MiB"]:
        for process in [_compare(limit) for limit in limits]:
            document = json.loads(process.communicate()[0])
            del document["provenance"]
            documents.append(document)
        assert bool(SHELF.files()) == (limits != ["0"])
    assert all(each == documents[0] for each in documents)
