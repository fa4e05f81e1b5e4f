"""Schedules of users: from a file, a notebook or an installed package, in commands, functions, studies and workers."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tasp_lab
from tasp_lab.core.errors import RunError, ScheduleError
from tasp_lab.prediction.question import Question
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules import files, registry
from tasp_lab.schedules.registry import ATTENTION, COLLECTIVES, schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.validation.validate import _agreed
from tests.conftest import Tell

DOUBLING = """
import numpy as np
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.registry import schedule

def steps(n):
    for width in (1 << power for power in range(n.bit_length() - 1)):
        yield Step.of([(r, r ^ width, 0, r // width * width + i) for r in range(n) for i in range(width)])

@schedule("doubling", "AllGather")
def doubling(topology, shard_bytes):
    n = topology.world_size
    own = np.eye(n, dtype=bool)
    return Schedule("any name", n, 1, Blocks.of_data(np.full(n, shard_bytes)), own, own | True, list(steps(n)))
"""
ATTENTION_FILE = """
from tasp_lab.schedules.attention.double_ring import double_ring
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS
from tasp_lab.schedules.registry import schedule

@schedule("two:WxR", "softmax", options=("buffers", "gradient_dtype"))
def two(name, topology, workload, options=DEFAULT_OPTIONS, split=(1, 1)):
    return double_ring("double-ring:2x2", topology, workload, options, split=split, variant="")
"""
LAYER = tasp_lab.Workload(1024, heads=4, mask="causal")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(DOUBLING)
    (tmp_path / "layer.py").write_text(ATTENTION_FILE)
    return tmp_path


def test_a_schedule_of_a_file_stands_beside_those_of_the_package(tell: Tell) -> None:
    """At 1 B/s, without latency and launches, doubling among four sends 30 B, then 60 B."""
    code, out, _ = tell("predict", "full-mesh:4", "--schedule", "mine.py:doubling", "--schedule", "ring",
                        "--shard-bytes=30", "--link-bandwidth=1B/s", "--link-latency=0us", "--json")  # fmt: skip
    doubling, ring = json.loads(out)["predictions"]
    assert (code, doubling["schedule"], doubling["time_s"], ring["time_s"]) == (0, "mine.py:doubling", 90, 90)


@pytest.mark.parametrize("command", ["predict", "compare"])
def test_a_family_of_a_file_has_a_split_options_and_both_passes(tell: Tell, command: str) -> None:
    named = ("--schedule", "layer.py:two:2x2", "--schedule", "double-ring:2x2")
    code, out, err = tell(command, "full-mesh:4", *named, "--seq", "1024", "--heads", "4", "--pass", "both", "--json")
    assert code == 0, err
    document = json.loads(out)
    rows = document["predictions" if command == "predict" else "results"]
    times = {name: [row["time_s"] for row in rows if row["schedule"] == name] for name in named[1::2]}
    assert times["layer.py:two:2x2"] == times["double-ring:2x2"] != []


def test_functions_take_names_builders_and_objects_alike() -> None:
    @schedule("mine", "AllGather")
    def mine(topology: Topology, shard_bytes: int) -> Schedule:
        n = topology.world_size
        swap = Step.of([(a, b, 0, a) for a in range(n) for b in range(n) if a != b])
        own = np.eye(n, dtype=bool)
        return Schedule("swap", n, 1, Blocks.of_data(np.full(n, shard_bytes)), own, own | True, [swap])

    try:
        built = mine(tasp_lab.load_machine("full-mesh:4").topology, 64)
        by_builder, by_name, by_object = tasp_lab.predict("full-mesh:4", [mine, "mine", built], 64)
        assert [each.schedule for each in (by_builder, by_name, by_object)] == ["mine", "mine", "swap"]
        assert by_builder.time_s == by_name.time_s == by_object.time_s
        assert tasp_lab.answer(Question("full-mesh:4", mine, 64)).time_s == by_name.time_s  # type: ignore[arg-type]
    finally:
        del registry.SCHEDULES["mine"]
    with pytest.raises(ScheduleError, match="builder folder is not registered, expected a function below @schedule"):
        tasp_lab.predict("full-mesh:4", folder, 64)


def test_own_names_are_not_taken() -> None:
    with pytest.raises(ScheduleError, match="'ring' is one of tasp-lab's own, expected another name"):
        schedule("ring", "AllGather")(lambda topology, shard_bytes: None)
    with pytest.raises(ScheduleError, match="unknown kind of schedule 'AllGathr', did you mean 'AllGather'"):
        schedule("mine", "AllGathr")(lambda topology, shard_bytes: None)  # type: ignore[arg-type]
    assert "mine.py:doubling" not in list(COLLECTIVES)  # what a process has looked up does not change what is listed


def test_an_installed_package_offers_schedules(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "offered.py").write_text(DOUBLING.replace('"doubling"', '"offered"'))
    monkeypatch.syspath_prepend(folder)
    point = importlib.metadata.EntryPoint("offered", "offered:doubling", files.ENTRY_POINTS)
    monkeypatch.setattr(files, "_entry_points", lambda: {"offered": point})
    try:
        found = tasp_lab.predict("full-mesh:4", ["offered", "mine.py:doubling"], 64, samples=0)
        assert found[0].time_s == found[1].time_s
    finally:
        registry.SCHEDULES.pop("offered", None)


def test_files_of_one_name_are_different_and_an_edited_file_is_another(folder: Path) -> None:
    other = folder / "other/mine.py"
    other.parent.mkdir()
    other.write_text(DOUBLING.replace("list(steps(n))", "[*steps(n), Step.of([])]"))
    found = tasp_lab.predict("full-mesh:4", ["mine.py:doubling", "other/mine.py:doubling"], 64)
    assert [each.schedule for each in found] == ["mine.py:doubling", "other/mine.py:doubling"]
    assert [each.steps for each in found] == [2, 3]
    question, elsewhere = (Question("full-mesh:4", f"{each}mine.py:doubling", 64) for each in ("", "other/"))
    before = question.key()
    assert before != elsewhere.key()
    (folder / "mine.py").write_text(other.read_text())
    assert question.key() == elsewhere.key() != before  # a folder may move
    assert tasp_lab.predict("full-mesh:4", "mine.py:doubling", 64)[0].steps == 3


def test_a_study_names_files_beside_itself_and_workers_find_them(folder: Path) -> None:
    studies = folder / "studies"
    studies.mkdir()
    (folder / "layer.py").rename(studies / "layer.py")
    text = """
    study = { name = "mine" }
    machine = { name = "full-mesh:4" }
    layer = { seq = ["1Ki", "2Ki"], heads = 4 }
    schedule = { name = ["layer.py:two:2x2", "double-ring:2x2"], baseline = "layer.py:two:2x2" }
    """
    (studies / "study.toml").write_text(text)
    study = tasp_lab.load_study(studies / "study.toml")
    first = _rows(tasp_lab.run_study(study, "out", jobs=2))
    assert len(first) == 4
    for seq in (1024, 2048):
        assert first["studies/layer.py:two:2x2", seq]["time_s"] == first["double-ring:2x2", seq]["time_s"]
    assert _rows(tasp_lab.run_study(tasp_lab.load_study("out/study.toml"))) == first  # the study as the folder has it
    (studies / "layer.py").write_text(ATTENTION_FILE + "# edited")
    edited = _rows(tasp_lab.run_study(study, "out"))
    changed = {name for (name, seq), row in edited.items() if row["key"] != first[name, seq]["key"]}
    assert changed == {"studies/layer.py:two:2x2"}


def _rows(result: Any) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["schedule"], row["seq"]): row for row in result.rows}


HEAD = "from tasp_lab.schedules.registry import schedule\n"
BUILDER = HEAD + '@schedule("x", "AllGather")\ndef x(topology, shard_bytes):\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_this_name", "bad.py, line 1: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("\n1 / 0", "bad.py, line 2: ZeroDivisionError: division by zero"),
        ("x = 3\ndef f(:", "bad.py, line 2: SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)", "bad.py, line 2: exits Python, expected schedules"),
        ("x = 3", 'bad.py registers no schedule, expected @schedule("NAME", "KIND")'),
        (BUILDER + "    return None", "schedule 'bad.py:x': the builder returned NoneType, expected a Schedule"),
        (BUILDER + "    return [][0]", "schedule 'bad.py:x', line 4: IndexError: list index out of range"),
        (BUILDER.replace('"x"', '"y"') + "    return 1", "bad.py: unknown schedule 'x', expected one of y"),
        (BUILDER + "    while True: pass", "schedule 'bad.py:x': still running after 0.3 s of processor time"),
        ("while True: pass", "bad.py: still running after 0.3 s of processor time or 10 times as long"),
        (BUILDER + "    import time; time.sleep(60)", "still running after 0.3 s of processor time"),
        (2 * (BUILDER + "    pass\n"), "bad.py, line 6: schedule 'x' is registered twice, expected one"),
        (HEAD + '@schedule("x", "AllGather", colour=1)\ndef x(): ...', "unknown setting of a schedule 'colour'"),
        (DOUBLING.replace('"doubling"', '"x"').replace("= topology.world_size", "= 8"),
         "schedule 'bad.py:x' is for 8 ranks, full-mesh:4 has 4"),
        (DOUBLING.replace('"doubling"', '"x"').replace("shard_bytes))", "2 * shard_bytes))"),
         "schedule 'bad.py:x' is not an AllGather of 64 B, but an AllGather of 128 B, by its start"),
        (DOUBLING.replace('"doubling"', '"x"').replace("width + i)", "width + i ^ 1)"),
         "schedule 'bad.py:x', line 16: step 0: rank 0 sends block 1 to rank 1 on lane 0: rank 0 does not hold"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_in_one_line(
    folder: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setenv(files.LIMIT, "0.3")
    (folder / "bad.py").write_text(text)
    code, out, err = tell("predict", "full-mesh:4", "--schedule", "bad.py:x", "--shard-bytes", "64")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_plus_in_a_folder_is_no_hybrid(folder: Path, tell: Tell) -> None:
    """It joins two schedules only where no file of the whole name is there."""
    (folder / "c++").mkdir()
    (folder / "c++" / "mine.py").write_text(DOUBLING)
    (folder / "c++" / "layer.py").write_text(ATTENTION_FILE)
    name = "c++/mine.py:doubling"
    assert files.names_in(name) == [name]
    assert files.names_in("c++/other.py:x") == ["c", "", "/other.py:x"]
    code, out, err = tell("predict", "full-mesh:4", "--schedule", name, "--shard-bytes", "64", "--json")
    assert (code, err) == (0, "")
    assert [row["schedule"] for row in json.loads(out)["predictions"]] == [name]
    assert registry.names_of("lasp-2+c++/layer.py:two:2x2") == ("lasp-2", "c++/layer.py:two:2x2")
    assert files.content_name(name).startswith("mine.py:doubling ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.py:x", "no.py: No such file or directory, expected a Python file that registers schedules"),
        ("mine.py", "schedule 'mine.py': expected the name of a schedule behind a colon: mine.py:doubling"),
        ("mine.py:", "schedule 'mine.py:': expected the name of a schedule behind a colon: mine.py:doubling"),
        ("mine.py:dubling", "mine.py: unknown schedule 'dubling', did you mean 'doubling'?"),
        ("layer.py:two:2x2", "'layer.py:two:2x2' is for softmax attention, expected a collective"),
    ],
)
def test_a_bad_name_is_refused_in_one_line(tell: Tell, name: str, message: str) -> None:
    code, out, err = tell("predict", "full-mesh:4", "--schedule", name, "--shard-bytes", "64")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_what_a_file_prints_is_no_result(folder: Path, tell: Tell) -> None:
    (folder / "mine.py").write_text(
        DOUBLING.replace("    n = ", "    print('building')\n    n = ") + "\nprint('loaded')"
    )
    code, out, err = tell("predict", "full-mesh:4", "--schedule", "mine.py:doubling", "--shard-bytes", "64", "--json")
    assert (code, json.loads(out)["predictions"][0]["schedule"]) == (0, "mine.py:doubling")
    assert err.splitlines()[0] == "loaded"
    assert "building" in err


def test_one_bad_schedule_does_not_stop_the_others(folder: Path) -> None:
    (folder / "bad.py").write_text(BUILDER + "    return [][0]")
    found = tasp_lab.predict("full-mesh:4", ["ring", "bad.py:x"], 64)
    assert [each.schedule for each in found] == ["ring"]
    assert found.refused[0].reason == "line 4: IndexError: list index out of range"


def test_a_layer_of_another_pass_is_refused(folder: Path) -> None:
    text = ATTENTION_FILE.replace("options, split", "options.forward_only, split")
    (folder / "layer.py").write_text(text)
    message = r"'layer.py:two:2x2': the builder returned 1 schedules, expected 2 \(forward and backward\)"
    predict: Callable[..., Any] = tasp_lab.predict
    with pytest.raises(ScheduleError, match=message):
        predict("full-mesh:4", "layer.py:two:2x2", LAYER, passes="both")
    assert "layer.py:two" in ATTENTION


def test_a_builder_that_differs_between_ranks_is_refused() -> None:
    """Rank 0 has built a schedule with a step more than this process, which is another rank."""
    found = tasp_lab.predict("full-mesh:4", ["mine.py:doubling", "ring"], 64)
    own, of_first = (each.passes[0].schedule for each in found)

    class FirstRank:
        def agree(self, value: object) -> object:
            return [of_first]

    with pytest.raises(RunError, match=r"'mine.py:doubling': its builder gives another schedule here than on rank 0"):
        _agreed(FirstRank(), [own])  # type: ignore[arg-type]
    _agreed(FirstRank(), [of_first])  # type: ignore[arg-type]


def test_a_schedule_of_another_layer_is_refused(folder: Path) -> None:
    text = ATTENTION_FILE.replace(
        "topology, workload, options, split", "topology, replace(workload, heads=8), options, split"
    )
    (folder / "layer.py").write_text("from dataclasses import replace" + text)
    with pytest.raises(ScheduleError, match=r"'layer.py:two:2x2' is for a layer with heads 8, expected 4"):
        tasp_lab.predict("full-mesh:4", "layer.py:two:2x2", LAYER)
