"""The public interface: lazy names, text for machines and sizes, and one result for Python and ``--json``."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tasp_lab
from sim.simulate import simulate
from tasp_lab.cli.process import main
from tasp_lab.core.errors import (
    MissingPackageError,
    ModelError,
    NoDecompositionError,
    OverrideError,
    ProfileError,
    QuantityError,
    ScheduleError,
    StudyError,
    TaspLabError,
    TopologyError,
    WorkloadError,
)
from tasp_lab.core.report import Report
from tasp_lab.machines.machine import IDEAL, Machine
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.topology.builders import full_mesh
from tests.conftest import ROOT
from tests.support.links import with_links, without_links

LAYER = tasp_lab.Workload(sequence=1024, heads=4, mask="causal")
SENDRECV = "# profile: h100-8\n# collective: sendrecv\n# ranks: 8\n# source: a test\nsize_B,time_us\n1024,22\n"


def in_a_child(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def without_date(document: object) -> object:
    """The document as `--json` prints it, without the date of its provenance."""
    plain = json.loads(json.dumps(document, allow_nan=False))
    del plain["provenance"]["date"]
    return plain


def test_importing_tasp_lab_imports_the_standard_library_only() -> None:
    before = "import sys; before = set(sys.modules); import tasp_lab; "
    loaded = in_a_child(before + "print(*(set(sys.modules) - before))").split()
    assert "tasp_lab" in loaded
    assert [name for name in loaded if name.partition(".")[0] not in {"tasp_lab", *sys.stdlib_module_names}] == []
    assert {name for name in loaded if name.startswith("tasp_lab.")} == {"tasp_lab.core", "tasp_lab.core.lazy"}


def test_every_public_name_is_found_when_it_is_asked_for() -> None:
    program = "import tasp_lab as t; print(*(n for n in t.__all__ if n in dir(t) and getattr(t, n) is getattr(t, n)))"
    assert in_a_child(program).split() == tasp_lab.__all__


def test_names_can_be_imported_and_others_are_refused() -> None:
    assert in_a_child("from tasp_lab import *; print(predict.__name__, len(Topology.__name__))") == "predict 8\n"
    with pytest.raises(AttributeError, match="no attribute 'predikt'"):
        _ = tasp_lab.predikt


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == tasp_lab.__version__


def test_a_name_a_machine_and_a_topology_are_accepted() -> None:
    by_name, by_machine, by_topology = (
        tasp_lab.predict(given, "ring", 2**20)
        for given in ("full-mesh:4", tasp_lab.load_machine("full-mesh:4"), full_mesh(4))
    )
    assert without_date(by_name.to_dict()) == without_date(by_machine.to_dict()) == without_date(by_topology.to_dict())
    assert tasp_lab.decompose("full-mesh:4").rings.tolist() == tasp_lab.decompose(full_mesh(4)).rings.tolist()
    assert tasp_lab.predict(tasp_lab.load_machine("h100-8").topology, "ring", 64).library == "ideal"


@pytest.mark.parametrize(("text", "size"), [("64MiB", 64 * 2**20), ("1MB", 10**6), ("7", 7)])
def test_sizes_are_accepted_as_text(text: str, size: int) -> None:
    as_text, as_number = (tasp_lab.predict("switch:4", ["ring"], work) for work in (text, size))
    assert without_date(as_text.to_dict()) == without_date(as_number.to_dict())


def test_a_model_and_a_length_are_accepted_as_text() -> None:
    """As on the command line: the layer of Llama 3 8B has 32 heads, 8 of keys and values, and a causal mask."""
    layer = tasp_lab.Workload("16Ki", heads=32, kv_heads=8, mask="causal")
    assert layer == tasp_lab.Workload(16384, heads=32, kv_heads=8, mask="causal")
    (found,) = tasp_lab.predict("full-mesh:2", "ulysses", "llama-3-8b", sequence="16Ki")
    assert found.question.work == layer
    with pytest.raises(QuantityError, match="model 'llama-3-8b' without a sequence"):
        tasp_lab.predict("full-mesh:2", "ulysses", "llama-3-8b")
    with pytest.raises(QuantityError, match="expected the name of a model as the work"):
        tasp_lab.predict("full-mesh:2", "ulysses", layer, sequence=64)
    with pytest.raises(WorkloadError, match="bytes of a collective, expected an attention layer"):
        tasp_lab.compare("full-mesh:2", "1MiB")


def test_a_model_that_needs_more_memory_than_a_gpu_has_is_named() -> None:
    """Adam in mixed precision has 16 bytes per parameter: 70.6e9 over 8 GPUs need 131 GiB, over 64 they need 16."""
    small, large = (
        tasp_lab.compare(machine, "llama-3-70b", ["ulysses"], sequence="8Ki", passes="both")
        for machine in ("h100-8", "h100-8x8")
    )
    assert str(small.to_dict()["model_does_not_fit"]).startswith("llama-3-70b does not fit: a training step")
    assert "llama-3-70b does not fit" in str(small)
    assert large.to_dict()["model_does_not_fit"] is None


def test_options_are_accepted_as_fields_and_as_an_object() -> None:
    options = AttentionOptions("both", trim=False, dataflow="rotate-kv")
    fields = tasp_lab.predict("full-mesh:4", "tasp", LAYER, passes="both", trim=False, dataflow="rotate-kv")
    assert without_date(fields.to_dict()) == without_date(
        tasp_lab.predict("full-mesh:4", "tasp", LAYER, options=options).to_dict()
    )


def test_links_are_changed_as_their_functions_change_them() -> None:
    found = tasp_lab.predict("full-mesh:4", "multi-ring", 2**20, without=["link.0-3"], overrides=["link.0-1=10GB/s"])
    edited = without_links(with_links(full_mesh(4), ["0-1=10GB/s"]), ["0-3"])
    assert found.machine.topology == edited
    assert tasp_lab.decompose("full-mesh:4", without=["link.0-3"]).topology == without_links(full_mesh(4), ["0-3"])


PREDICT: Callable[..., object] = tasp_lab.predict


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda: PREDICT("nothing", "ring", 1), TaspLabError, "machine 'nothing' is unknown"),
        (lambda: PREDICT("full-mesh:2", "rng", 1), TaspLabError, "did you mean 'ring'"),
        (lambda: PREDICT("full-mesh:2", "ring", "much"), QuantityError, "much"),
        (lambda: PREDICT("full-mesh:2", "ring", 1, compute=1e9), QuantityError, "attention layers only"),
        (lambda: PREDICT("full-mesh:2", "tasp", LAYER, compute="real"), QuantityError, "a prediction has no kernels"),
        (lambda: PREDICT("full-mesh:2", "tasp", LAYER, compute="2"), QuantityError, "expected timed:RATE"),
        (lambda: PREDICT("full-mesh:2", "ring", 1, lanes=1), NoDecompositionError, "apply to multi-ring"),
        (lambda: PREDICT(Machine(full_mesh(2)), "ring", 1, library="nccl"), ProfileError, "with the library 'ideal'"),
        (lambda: tasp_lab.decompose("full-mesh:4", 1), NoDecompositionError, "at most 2 of the 3"),
        (lambda: tasp_lab.calibrate(), QuantityError, "nothing to calibrate from"),
        (lambda: tasp_lab.calibrate(full_mesh(2)), QuantityError, "Topology: expected files"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    ask: Callable[[], object], error: type[TaspLabError], message: str
) -> None:
    with pytest.raises(error, match=message) as refused:
        ask()
    assert "\n" not in str(refused.value)


COMPARE: Callable[..., object] = tasp_lab.compare
DECOMPOSE: Callable[..., object] = tasp_lab.decompose
STEP: Callable[..., object] = tasp_lab.predict_step
STUDY: Callable[..., object] = tasp_lab.load_study
SIMULATE: Callable[..., object] = simulate
STEP_OF: Callable[..., object] = Step.of
RING = ring_all_gather(full_mesh(4), 64)
OWN = np.eye(2, dtype=bool)


def schedule(**changed: object) -> Schedule:
    """A schedule of two ranks that keep a block each, but for what is changed."""
    fields = {"name": "x", "world_size": 2, "lanes": 1, "blocks": Blocks.of_data(np.full(2, 8)), "initial": OWN,
              "final": OWN, "steps": []}  # fmt: skip
    return Schedule(**(fields | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda: PREDICT(5, "ring", 64), TopologyError, "machine: 5 of type int, expected a machine, a topology"),
        (lambda: PREDICT("full-mesh:4", "ring", 64.0), QuantityError, "work: 64.0 of type float"),
        (lambda: PREDICT("full-mesh:4", "ring", True), QuantityError, "work: True of type bool"),
        (lambda: PREDICT("full-mesh:4", "tasp", LAYER, bufers=2), ScheduleError, "'bufers', did you mean 'buffers'"),
        (lambda: PREDICT("full-mesh:4", "tasp", LAYER, buffers=2.5), ScheduleError, "buffers: 2.5 of type float"),
        (lambda: PREDICT("full-mesh:4", "tasp", LAYER, options=None), ScheduleError, "options: None"),
        (lambda: PREDICT("full-mesh:4", "ring", 64, overrides=[5]), OverrideError, "overrides: 5 of type int"),
        (lambda: PREDICT("full-mesh:4", "ring", 64, without="link.0-1"), TopologyError, "expected a list of texts"),
        (lambda: PREDICT("full-mesh:4", "multi-ring", 64, decomposition=[1]), NoDecompositionError, "1 of type int"),
        (lambda: PREDICT("full-mesh:4", "multi-ring", 64, lanes="2"), QuantityError, "lanes: '2' of type str"),
        (lambda: PREDICT("h100-8", "tasp", LAYER, kernel=5), ProfileError, "kernel: 5 of type int"),
        (lambda: PREDICT("h100-8", "tasp", LAYER, stack=5), ProfileError, "stack: 5 of type int"),
        (lambda: PREDICT("h100-8", "tasp", LAYER, contention="on"), QuantityError, "expected True, False or None"),
        (lambda: COMPARE("full-mesh:4", 64), WorkloadError, "work: 64 of type int, expected an attention layer"),
        (lambda: DECOMPOSE(None), TopologyError, "topology: None of type NoneType"),
        (lambda: DECOMPOSE("full-mesh:4", 1.5), QuantityError, "fold: 1.5 of type float"),
        (lambda: STEP("full-mesh:4", "llama-3-8b", 8.5, "ulysses"), WorkloadError, "sequence: 8.5 of type float"),
        (lambda: STEP("full-mesh:4", 5, 8192, "ulysses"), ModelError, "model: 5 of type int"),
        (lambda: STEP("h100-8", "llama-3-8b", 8192, "ulysses", layout="tp"), ScheduleError, "layout: 'tp' of type str"),
        (lambda: COMPARE("full-mesh:4", LAYER, "tasp", tune="no"), QuantityError, "tune: 'no' of type str"),
        (lambda: Machine(5), TopologyError, "topology of a machine: 5 of type int"),  # type: ignore[arg-type]
        (lambda: STUDY({5: {}}), StudyError, "unknown section 5"),
        (lambda: STUDY(5), StudyError, "study: 5 of type int, expected the name of a TOML file"),
        (lambda: tasp_lab.Workload(4096.5, mask="full"), WorkloadError, "sequence: 4096.5 of type float"),  # type: ignore[arg-type]
        (lambda: SIMULATE(RING, full_mesh(4)), TopologyError, r"expected a Machine, such as Machine\(topology\)"),
        (lambda: SIMULATE("ring", Machine(full_mesh(4))), ScheduleError, "tasp_lab.predict takes schedules by name"),
        (lambda: STEP_OF([(0, 1, 0, 0), (0, 5, 0)]), ScheduleError, r"transfer 1: \(0, 5, 0\).*\(source, destination"),
        (lambda: STEP_OF([(0, 1, 0, 1.5)]), ScheduleError, r"transfer 0: \(0, 1, 0, 1.5\)"),
        (lambda: STEP_OF([(0, 1, 0, 2**70)]), ScheduleError, "transfer 0: .*expected whole numbers"),
        (lambda: schedule(blocks=Blocks.of_data(np.full(2, 8.5))), ScheduleError, "sizes of blocks is of float64"),
        (lambda: schedule(world_size=True), ScheduleError, "world_size: True of type bool"),
        (lambda: STEP_OF([(0, 1, 0, 0, True, 7)]), ScheduleError, "transfer 0"),
        (lambda: schedule(steps=[Step.of([]), (0, 1, 0, 0)]), ScheduleError, r"step 1: \(0, 1, 0, 0\).*a Step"),
        (lambda: schedule(steps="abc"), ScheduleError, "steps: 'abc' of type str, expected a list of Step"),
        (lambda: schedule(initial=[[True]]), ScheduleError, "initial: .* expected an array of shape"),
        (lambda: schedule(blocks=[8, 8]), ScheduleError, "expected Blocks, such as Blocks.of_data"),
        (lambda: schedule(task=5), ScheduleError, "task: 5 of type int, expected a tasp_lab.schedule.calls.Task"),
    ],
)  # fmt: skip
def test_arguments_of_a_wrong_type_are_refused_in_one_line(
    ask: Callable[[], object], error: type[TaspLabError], message: str
) -> None:
    with pytest.raises(error, match=message) as refused:
        ask()
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300 or "did you mean" in str(refused.value)


def test_given_rings_leave_nothing_to_choose() -> None:
    rings = tasp_lab.decompose("full-mesh:5")
    assert tasp_lab.predict("full-mesh:5", "multi-ring", 64, decomposition=rings)[0].time_s > 0
    with pytest.raises(NoDecompositionError, match="no effect on given rings"):
        tasp_lab.predict("full-mesh:5", "multi-ring", 64, decomposition=rings, lanes=2)


def test_an_object_keeps_its_library() -> None:
    machine = tasp_lab.load_machine("h100-8")
    assert tasp_lab.predict(machine, "ring", 64, library="nccl").library == "nccl"
    assert tasp_lab.predict("h100-8", "ring", 64, library="ideal").machine.comm_library == IDEAL


WORK = ("--schedule", "ring", "--schedule", "multi-ring", "--shard-bytes", "1MiB")
SEQ = ("--schedule", "tasp", "--seq", "1024", "--heads", "4", "--mask", "causal")


@pytest.mark.parametrize(
    ("arguments", "ask"),
    [
        (("predict", "h100-2x2", *WORK), lambda: tasp_lab.predict("h100-2x2", ["ring", "multi-ring"], "1MiB")),
        (("predict", "h100-2x2", *WORK, "--explain", "--engine", "array", "--lanes", "1", "--library", "gloo"),
         lambda: tasp_lab.predict("h100-2x2", ["ring", "multi-ring"], "1MiB", explain=True, engine="array", lanes=1,
                                  library="gloo")),
        (("predict", "dgx-1v", *SEQ, "--pass", "both", "--compute", "timed:1TFLOP/s", "--set", "link.0-3=1GB/s"),
         lambda: tasp_lab.predict("dgx-1v", "tasp", LAYER, passes="both", compute="timed:1TFLOP/s",
                                  overrides=["link.0-3=1GB/s"])),
        (("predict", "full-mesh:4", *SEQ), lambda: tasp_lab.predict("full-mesh:4", "tasp", LAYER)),
        (("decompose", "full-mesh:5", "--without", "link.0-3"),
         lambda: tasp_lab.decompose("full-mesh:5", without=["link.0-3"])),
        (("decompose", "torus:3x3", "--lanes", "2"), lambda: tasp_lab.decompose("torus:3x3", lanes=2)),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_to_dict_is_what_json_prints_and_str_the_table(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], ask: Callable[[], Report]
) -> None:
    found = ask()
    assert without_date(found.to_dict()) == without_date(json_of(capsys, *arguments))
    main([*arguments])
    assert str(found) == "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())


def test_accuracy_and_calibration_are_those_of_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "sendrecv.csv"
    path.write_text(SENDRECV + "1024,21.9\n2048,22.0\n4096,22.1\n8192,22.2\n16384,22.4\n32768,22.9\n")
    report = tasp_lab.accuracy(path)
    assert without_date(report.to_dict()) == without_date(json_of(capsys, "accuracy", str(path)))
    assert len(report) == len(report.to_pandas()) == 1
    profile = tmp_path / "my.toml"
    found = tasp_lab.calibrate(str(path), fit=["message_launch"])
    printed = json_of(capsys, "calibrate", str(path), "--fit", "message_launch", "--output", str(profile))
    assert printed.pop("output") == str(profile)
    assert without_date(found.to_dict()) == without_date(printed)
    found.save(tmp_path / "again.toml")
    assert profile.read_bytes() == (tmp_path / "again.toml").read_bytes()
    assert "message_launch" in set(found.to_pandas()["name"])


def test_data_frames_have_a_row_per_schedule_and_pass() -> None:
    found = tasp_lab.predict("full-mesh:4", ["zigzag-ring-attention", "tasp"], LAYER, passes="both", explain=True)
    frame = found.to_pandas()
    assert list(zip(frame["schedule"], frame["pass"], strict=True)) == [
        (name, each) for name in ("zigzag-ring-attention", "tasp") for each in ("forward", "backward", "both")
    ]
    assert frame["time_s"].tolist() == [float(each.time_s) for each in found]
    assert len(found) == 6
    assert [each.schedule for each in found[:2]] == ["zigzag-ring-attention"] * 2
    rings = tasp_lab.decompose("full-mesh:5").to_pandas()
    assert rings["share"].tolist() == [0.25] * 4
    assert sorted(rings["ranks"][0]) == [0, 1, 2, 3, 4]


def test_without_pandas_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError, match="pip install pandas"):
        tasp_lab.predict("full-mesh:2", "ring", 1).to_pandas()


def test_a_notebook_shows_a_table_with_text_escaped() -> None:
    found = tasp_lab.predict("full-mesh:2", ["ring", "multi-ring"], 1)
    page = found._repr_html_()
    assert page.count("<tr>") == 3
    assert "<td" in page
    assert page.count("<table>") == page.count("</table>") == 1
    assert "\n" not in repr(found)


def test_a_name_may_be_that_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mesh.json"
    path.write_text(json.dumps(json_of(capsys, "topologies", "full-mesh:4")))
    assert tasp_lab.load_machine(str(path)).topology == full_mesh(4)
    assert tasp_lab.predict(str(path), "ring", 64)[0].time_s == tasp_lab.predict("full-mesh:4", "ring", 64)[0].time_s


def test_validate_takes_names_and_states_where_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything up to the ranks, which other tests start."""
    from tasp_lab.validation import validate as module

    class StoppedError(Exception):
        pass

    def start(fabric: str, topology: tasp_lab.Topology, backend: str, machine: tasp_lab.Machine) -> None:
        assert (fabric, topology, backend) == ("local", full_mesh(3), "auto")
        assert not machine.has_accelerators
        raise StoppedError

    monkeypatch.setattr(module, "start_ranks", start)
    with pytest.raises(StoppedError):
        tasp_lab.validate("full-mesh:3", "ring", "1KiB", fabric="local")
