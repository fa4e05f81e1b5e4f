"""Commands as a user types them."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

import runtime.ranks.run_job
from tasp_lab.cli.process import main
from tasp_lab.machines.catalogue import catalogue_names, load_machine
from tests.conftest import ROOT, Command, assert_gone
from tests.support.ranks import as_if_by_torchrun
from tests.support.selection import covering

AGAINST = ("--schedule", "ring", "--schedule", "multi-ring")


def test_predict(command: Command) -> None:
    done = command.process("predict", "full-mesh:8", *AGAINST, "--shard-bytes", "64MiB", "--json")
    assert done.returncode == 0, done.stderr
    ring, multi_ring = json.loads(done.stdout)["predictions"]
    shard, bandwidth, latency = 64 * 2**20, 50e9, 1e-6
    largest_of_seven = math.ceil(shard / 4096 / 7) * 4096  # shards are cut in pages
    assert ring["time_s"] == pytest.approx(7 * (latency + shard / bandwidth))
    assert multi_ring["time_s"] == pytest.approx(7 * (latency + largest_of_seven / bandwidth))
    assert ring["bound_s"] == multi_ring["bound_s"] == pytest.approx(latency + shard / bandwidth)
    assert ring["busbw_bytes_per_s"] == pytest.approx(7 * shard / ring["time_s"])
    assert {key: ring[key] for key in ("schedule", "topology", "world_size", "shard_bytes")} == {
        "schedule": "ring", "topology": "full-mesh:8", "world_size": 8, "shard_bytes": shard,
    }  # fmt: skip


def test_a_library_is_that_of_the_machine_or_the_one_asked_for(command: Command) -> None:
    ring = ("predict", "h100-8", "--schedule", "ring", "--shard-bytes", "32MiB", "--json")
    found = {name: json.loads(command(*ring, "--library", name).stdout) for name in ("auto", "nccl", "ideal", "gloo")}
    assert {name: each["library"] for name, each in found.items()} == {
        "auto": "nccl", "nccl": "nccl", "ideal": "ideal", "gloo": "gloo",
    }  # fmt: skip
    times = {name: each["predictions"][0]["time_s"] for name, each in found.items()}
    assert times["auto"] == times["nccl"] > 5 * times["ideal"]
    refused = command(*ring, "--library", "rccl")
    assert refused.returncode == 2
    assert "the profile of h100-8 is of nccl" in refused.stderr
    assert "the profile of h100-8 is of nccl" in json.loads(refused.stdout)["error"]


def test_engines_say_the_same(command: Command) -> None:
    ring = ("predict", "nodes:2x4", *AGAINST, "--shard-bytes", "1MiB", "--json")
    found = [json.loads(command(*ring, "--engine", name).stdout) for name in ("auto", "simpy", "array")]
    for other in found[1:]:
        for mine, its in zip(found[0]["predictions"], other["predictions"], strict=True):
            assert mine["time_s"] == pytest.approx(its["time_s"], rel=1e-9)


def test_a_profile_is_shown_with_every_source(command: Command) -> None:
    found = command.json("profile", "show", "h100-10x8")
    assert (found["ranks"], found["library"]) == (80, "nccl")
    assert all(constant["source"] for constant in found["constants"])
    link = next(constant for constant in found["constants"] if constant["name"] == "link_bandwidth")
    assert (link["value"], link["unit"], link["text"]) == (450e9, "bytes/s", "450GB/s")
    shown = command("profile", "show", "h100-8").stdout
    assert "link_channel_rate = 20.6GB/s" in shown
    assert {"sms", "sms_per_channel"} <= {constant["name"] for constant in found["constants"]}
    assert found["kernels"]
    assert all(constant["source"] for kernel in found["kernels"] for constant in kernel["constants"])
    (line,) = [line for line in shown.splitlines() if "    forward, head dimension 128" in line][:1]
    assert re.search(r"up to [\d.]+ TFLOP/s \([\d.]+ TFLOP/s to [\d.]+ TFLOP/s\), tiles of", line)
    assert {each["name"] for each in command.json("profile", "list")["profiles"]} >= {"h100"}
    refused = command("profile", "show", "h100-8x9")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)


def test_options_set_the_numbers_of_an_expression(command: Command) -> None:
    options = ("--link-bandwidth", "1GB/s", "--link-latency", "1ms", "--json")
    done = command("predict", "switch:4", "--schedule", "direct", "--shard-bytes", "1MB", *options)
    assert json.loads(done.stdout)["predictions"][0]["time_s"] == pytest.approx(1e-3 + 3e-3)


@pytest.mark.parametrize("topology", ["nodes:2x8", "nodes:2x8:switch", "nodes:2x8:rails", "ring:8", "full-mesh:4"])
def test_predict_on_everything_that_can_be_written(command: Command, topology: str) -> None:
    ring, multi_ring = command.json("predict", topology, *AGAINST, "--shard-bytes", "1000003")["predictions"]
    assert 0 < multi_ring["bound_s"] <= multi_ring["time_s"]
    assert ring["time_s"] > 0


@pytest.mark.parametrize("name", catalogue_names())
def test_predict_on_every_machine(command: Command, name: str) -> None:
    schedules = AGAINST if load_machine(name).topology.world_size <= 32 else AGAINST[:2]
    assert {
        row["topology"] for row in command.json("predict", name, *schedules, "--shard-bytes", "1MiB")["predictions"]
    } == {name}


@pytest.mark.parametrize("world_size", [1, 2])
def test_small_worlds(command: Command, world_size: int) -> None:
    times = {
        row["time_s"]
        for row in command.json(
            "predict", f"full-mesh:{world_size}", *AGAINST, "--schedule", "direct", "--shard-bytes", "7"
        )["predictions"]
    }
    assert times == ({0.0} if world_size == 1 else {1e-6 + 7 / 50e9})


def test_explain_says_what_bound_each_transfer(command: Command) -> None:
    done = command("predict", "switch:4", "--schedule", "ring", "--shard-bytes", "1MiB", "--explain", "--json")
    transfers = json.loads(done.stdout)["predictions"][0]["transfers"]
    assert len(transfers) == 12
    assert {row["bound_by"] for row in transfers} <= {f"{r}->switch" for r in range(4)} | {
        f"switch->{r}" for r in range(4)
    }


def test_trace_and_picture(command: Command) -> None:
    done = command(
        "predict", "full-mesh:4", *AGAINST, "--shard-bytes", "1MiB", "--trace", "trace.json", "--plot", "lanes.png"
    )
    assert done.returncode == 0, done.stderr
    assert "full-mesh:4" in done.stdout
    assert (command.folder / "lanes.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((command.folder / "trace.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == 3 * 4 + 3 * 4 * 6


def test_the_ending_of_a_picture_may_be_in_capitals(command: Command) -> None:
    assert command(*PREDICT, "--plot", "LANES.PNG").returncode == 0
    assert (command.folder / "LANES.PNG").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("topology", "rings", "fold", "links"),
    [
        ("full-mesh:8", 7, 1, 56),
        ("full-mesh:4", 6, 2, 12),
        ("full-mesh:6", 10, 2, 30),
        ("nodes:2x4", 4, 1, 40),
        ("nodes:3x3", 6, 2, 36),
        ("torus:3x3", 4, 1, 36),
        ("hypercube:3", 6, 2, 24),
        ("switch:8", 7, 1, 16),
    ],
)
def test_decompose(command: Command, topology: str, rings: int, fold: int, links: int) -> None:
    document = command.json("decompose", topology)
    assert (len(document["rings"]), document["fold"]) == (rings, fold)
    assert document["links_used"] == document["links_total"] == links
    assert document["topology"] == topology
    assert document["reason"]
    spoken = command("decompose", topology).stdout
    assert f"{rings} rings of fold {fold}, {links} of {links} links used" in spoken
    assert document["share_of_bound"] == 1.0
    assert document["rate_bytes_per_s"] == document["bound_bytes_per_s"] == document["ring_limit_bytes_per_s"]
    assert document["proved_optimal"] is True
    assert document["search_complete"] is True
    assert document["shares"] == [pytest.approx(1 / rings)] * rings


def test_decompose_with_changed_links_and_lanes(command: Command) -> None:
    broken = command.json("decompose", "full-mesh:5", "--without", "link.0-3")
    assert (len(broken["rings"]), broken["links_total"], broken["share_of_bound"]) == (3, 18, 1.0)
    slow = command.json("decompose", "full-mesh:8", "--set", "link.0-3=13GB/s")
    assert slow["rate_bytes_per_s"] == pytest.approx(313e9)
    assert sum(slow["shares"]) == pytest.approx(1)
    few = command.json("decompose", "full-mesh:8", "--lanes", "4")
    assert (len(few["rings"]), few["rate_bytes_per_s"], few["proved_optimal"]) == (4, 200e9, True)
    h100 = command.json("decompose", "h100-2x8")
    assert (h100["share_of_bound"], h100["proved_optimal"], h100["beyond_rings"]) == (0.8, True, True)


def test_decompose_draws_the_rings(command: Command) -> None:
    assert command("decompose", "torus:3x3", "--plot", "rings.png").returncode == 0
    assert (command.folder / "rings.png").read_bytes().startswith(b"\x89PNG")


def test_a_mesh_of_2048_ranks_is_decomposed(command: Command) -> None:
    document = command.json("decompose", "full-mesh:2048")
    assert (len(document["rings"]), len(document["rings"][0]), document["links_used"]) == (2047, 2048, 2047 * 2048)


def test_lanes_and_changed_links_reach_the_prediction(command: Command) -> None:
    options = ("--schedule", "multi-ring", "--shard-bytes", "40MB", "--link-latency", "0s", "--json")
    few = command("predict", "full-mesh:8", "--lanes", "4", *options)
    assert json.loads(few.stdout)["predictions"][0]["time_s"] == pytest.approx(7 * 10e6 / 50e9)
    broken = command("predict", "full-mesh:5", "--without", "link.0-3", *options)
    assert json.loads(broken.stdout)["predictions"][0]["time_s"] == pytest.approx(4 * (40e6 / 3) / 50e9, rel=1e-6)


def test_topologies_import_what_a_machine_prints(command: Command) -> None:
    sample = str(ROOT / "tests/machines/samples/dgx-1v.nvidia-smi.txt")
    (command.folder / "dgx.json").write_text(command("topologies", "import", sample, "--json").stdout)
    document = command.json("decompose", "dgx.json")
    assert (document["links_used"], document["rate_bytes_per_s"]) == (32, 150e9)


def test_what_topologies_prints_is_a_topology_file(command: Command) -> None:
    for name in ("a10-4-pcie", "dgx-1v", "h100-2x8-rails"):
        (command.folder / "machine.json").write_text(command("topologies", name, "--json").stdout)
        again = command("predict", "machine.json", "--schedule", "ring", "--shard-bytes", "1MiB", "--json")
        wires = ("--library", "ideal")
        first = command("predict", name, "--schedule", "ring", "--shard-bytes", "1MiB", *wires, "--json")
        documents = [json.loads(done.stdout) for done in (again, first)]
        for document in documents:
            del document["provenance"]["date"]
        assert documents[0] == documents[1]


def test_topologies_lists_the_catalogue_and_its_sources(command: Command) -> None:
    listed = command.json("topologies")["topologies"]
    assert {"h100-8", "mi300x-8", "h100-2x8", "a10-4-pcie"} <= {entry["name"] for entry in listed}
    assert "nccl" in command("topologies", "h100-8").stdout.lower()


def test_doctor(command: Command) -> None:
    document = command.json("doctor")
    assert document["simulator"] == "works"
    assert {Path(folder).parent for folder in document["packages"].values()} == {ROOT}
    assert "emulated_fabric" in command("doctor").stdout


@pytest.mark.parametrize("name", ["topologies", "decompose", "predict", "validate", "doctor"])
def test_every_command_shows_an_example(command: Command, name: str) -> None:
    done = command(name, "--help")
    assert done.returncode == 0
    assert f"Example: tasp-lab {name}" in " ".join(done.stdout.split())


PREDICT = ("predict", "full-mesh:4", "--schedule", "ring", "--shard-bytes", "1MiB")


def topology_file(command: Command, text: str, name: str = "machine.json") -> str:
    (command.folder / name).write_text(text)
    return name


PAIR = {
    "name": "pair",
    "world_size": 2,
    "links": [
        {"source": 0, "destination": 1, "bandwidth_bytes_per_s": 1e9, "latency_s": 0},
        {"source": 1, "destination": 0, "bandwidth_bytes_per_s": 1e9, "latency_s": 0},
    ],
}


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
@pytest.mark.parametrize("name", ["a [/b] c", "[red]x", ":warning:", "\\[x", "$\\frac$", "größer 漢"])
def test_names_are_printed_as_they_are(command: Command, name: str) -> None:
    file = topology_file(command, json.dumps(PAIR | {"name": name, "summary": name}))
    for arguments in (("topologies", file), ("decompose", file), ("predict", file, *PREDICT[2:], "--explain")):
        done = command(*arguments, "--plot", "x.svg") if arguments[0] == "predict" else command(*arguments)
        assert done.returncode == 0, done.stderr
        assert name in done.stdout


def test_a_file_name_that_is_no_text(command: Command) -> None:
    file = topology_file(command, json.dumps(PAIR), os.fsdecode(b"a\xff\nb.json"))
    done = command("predict", file, *PREDICT[2:], "--plot", "x.svg", "--trace", os.fsdecode(b"\xff\n.trace"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "trace: \\udcff .trace\npicture: x.svg\n"


def test_an_output_that_would_replace_the_topology_file_is_refused(command: Command) -> None:
    file = topology_file(command, json.dumps(PAIR))
    told = command.refused("predict", file, *PREDICT[2:], "--trace", f"./{file}")
    assert "--trace would replace the topology" in told
    assert json.loads((command.folder / file).read_text()) == PAIR


@pytest.mark.parametrize(("bandwidth", "latency"), [(1e-9, 1e9), (1e18, 1e9), (1e18, 0), (1e-9, 0)])
@pytest.mark.parametrize("size", [1, 2**50])
def test_the_slowest_and_the_fastest_links_have_finite_results(
    command: Command, bandwidth: float, latency: float, size: int
) -> None:
    numbers = {"bandwidth_bytes_per_s": bandwidth, "latency_s": latency}
    links = [{"source": a, "destination": 1 - a} | numbers for a in (0, 1)]
    file = topology_file(command, json.dumps(PAIR | {"links": links}))
    outputs = ("--json", "--explain", "--trace", "trace.json", "--plot", "lanes.svg")
    done = command("predict", file, *AGAINST, "--shard-bytes", str(size), *outputs)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["predictions"][0]["time_s"] == pytest.approx(latency + size / bandwidth)


def run_with(command: Command, redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in a shell with one of its streams led elsewhere."""
    line = f'"$@" {redirection}'
    return subprocess.run(
        ["bash", "-c", line, "bash", *command.line(*arguments)], cwd=command.folder, env=command.environment,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [(*PREDICT, "--json"), PREDICT, ("doctor",), ("--help",), ("topologies",), ("--version",)], ids=str
)
def test_a_full_disk_behind_stdout_is_answered_in_one_line(command: Command, arguments: tuple[str, ...]) -> None:
    told = run_with(command, "> /dev/full", *arguments)
    assert (told.returncode, told.stderr) == (2, "tasp-lab: No space left on device\n")


def test_streams_that_are_closed_or_full(command: Command) -> None:
    closed = run_with(command, ">&-", *PREDICT)
    told = "tasp-lab: standard output: is closed, expected a place for the output\n"
    assert (closed.returncode, closed.stderr) == (2, told)
    assert json.loads(run_with(command, "2>&-", *PREDICT, "--json", "--trace", "t").stdout)
    assert run_with(command, "2>&-", "predict", "nothing").stdout == ""
    for redirection in ("2>&-", "2>/dev/full"):
        assert run_with(command, redirection, "predict", "nothing").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "reader"),
    covering(
        product(
            [("decompose", "full-mesh:128"), ("decompose", "full-mesh:128", "--json"), ("predict", "--help"),
             ("--version",), ("topologies",), ("doctor", "--json")],
            ["| true", "2>&1 | true"],
        )
    ),
    ids=str,
)  # fmt: skip
def test_a_reader_that_leaves_is_no_error(command: Command, arguments: tuple[str, ...], reader: str) -> None:
    """The code is that of a program which SIGPIPE ends: 128 + 13."""
    done = run_with(command, f"{reader}; exit ${{PIPESTATUS[0]}}", *arguments)
    assert (done.returncode, done.stderr) == (128 + 13, "")


def test_a_broken_pipe_to_another_process_is_an_error(command: Command) -> None:
    program = """
from importlib import import_module
def load(*_, **__): raise BrokenPipeError(32, "Broken pipe")
import_module("tasp_lab.machines.catalogue").load_machine = load
import_module("tasp_lab.cli").main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *PREDICT], env=command.environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "tasp-lab: Broken pipe\n")


def test_a_terminal_without_unicode_gets_replacements(command: Command) -> None:
    command.environment |= {"PYTHONIOENCODING": "ascii"}
    file = topology_file(command, json.dumps(PAIR | {"name": "größer"}))
    done = command.process("predict", file, *PREDICT[2:])
    assert done.returncode == 0, done.stderr
    assert "gr?" in done.stdout or "gr\\xf6" in done.stdout


@pytest.mark.parametrize(
    ("error", "telling"),
    [
        ("MemoryError()", "not enough memory: this takes more than 8GiB; set TASP_LAB_MEMORY to allow more, such as "
         "TASP_LAB_MEMORY=32GiB"),
        ("OSError(24, 'Too many open files', '/proc/stat')", "/proc/stat: Too many open files"),
        ("OSError('something\\nelse')", "something else"),
    ],
)  # fmt: skip
def test_what_the_system_refuses_is_answered_in_one_line(command: Command, error: str, telling: str) -> None:
    program = f"""
from importlib import import_module
catalogue = import_module("tasp_lab.machines.catalogue")
def refuse(*_, **__): raise {error}
catalogue.load_machine = refuse
import_module("tasp_lab.cli").main()
"""
    told = subprocess.run(
        [sys.executable, "-c", program, *PREDICT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stdout, told.stderr) == (2, "", f"tasp-lab: {telling}\n")


def test_doctor_reports_what_is_broken(command: Command) -> None:
    """With every library there but none working, each finding says so."""
    for name in ("torch", "pyroute2", "simpy"):
        (command.folder / f"{name}.py").write_text("raise OSError('libcudart.so.13: cannot\\nopen')\n")
    command.environment["PYTHONPATH"] = f"{command.folder}:{command.environment['PYTHONPATH']}"
    done = command.process("doctor", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    for finding in ("gpus", "simulator"):
        assert document[finding] == "does not work here: OSError: libcudart.so.13: cannot open"
    assert document["emulated_fabric"].startswith("does not work here: ")
    assert "does not work here" in command.process("doctor").stdout


def test_the_core_and_the_simulator_need_no_torch() -> None:
    """With torch and pyroute2 hidden, everything but running works, and running says what is missing."""
    program = (
        "import sys\n"
        "class Without:\n"
        "    def __init__(self, finder):\n"
        "        self.finder = finder\n"
        "    def __getattr__(self, name):\n"
        "        return getattr(self.finder, name)\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        hidden = name.split('.')[0] in ('torch', 'pyroute2')\n"
        "        return None if hidden else self.finder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]\n"
        "from tasp_lab.cli import main\n"
        "main()\n"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-c", program, *arguments]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)

    for arguments in (("doctor",), ("topologies",), ("decompose", "switch:8"), (*PREDICT, "--json")):
        assert run(*arguments).returncode == 0
    told = run("validate", "full-mesh:2", "--schedule", "ring", "--shard-bytes", "1")
    assert told.returncode == 2
    assert "torch, which is not installed: pip install 'tasp-lab[runtime]'" in told.stderr
    assert len(told.stderr.splitlines()) == 1


@pytest.mark.distributed
def test_validate_on_local_processes(command: Command) -> None:
    document = command.json(
        "validate", "full-mesh:4", *AGAINST, "--shard-bytes", "1MiB", "--fabric", "local", "--repeat", "3"
    )
    assert document["scale"] == 1.0
    assert [run["schedule"] for run in document["runs"]] == ["ring", "multi-ring"]
    for run in document["runs"]:
        assert run["predicted_s"] == run["time_s"] > 0
        assert run["measured_s"] > 0
        assert run["relative_error"] == pytest.approx(run["predicted_s"] / run["measured_s"] - 1)
        assert len(run["measured_repeats_s"]) == 3


@pytest.mark.alone
@pytest.mark.fabric
def test_validate_on_the_emulated_fabric(command: Command) -> None:
    done = command(
        "validate", "full-mesh:3", *AGAINST, "--shard-bytes", "200kB", "--repeat", "3", "--scale", "1e-4", "--json",
        "--trace", "both.json", "--plot", "both.svg",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert 0 < document["scale"] < 1
    assert document["calibration"][0]["bandwidth_bytes_per_s"]["value"] > 0
    ring, multi_ring = document["runs"]
    # On a mesh of three, two rings halve the time. Wide limits: the table in experiments/ has the accuracy.
    assert 1.5 < ring["measured_s"] / multi_ring["measured_s"] < 2.5
    for run in document["runs"]:
        assert abs(run["relative_error"]) < 0.3
        assert run["bound_s"] <= run["nominal_s"]
    assert "this takes about" in done.stderr
    assert "latencies are not emulated" in done.stderr
    names = {
        e["args"]["name"]
        for e in json.loads((command.folder / "both.json").read_text())["traceEvents"]
        if e["name"] == "process_name"
    }
    assert {name.split()[0] for name in names} == {"predicted", "measured"}
    assert (command.folder / "both.svg").read_text().startswith("<?xml")


@pytest.mark.fabric
def test_two_runs_at_once_do_not_disturb_each_other(command: Command) -> None:
    arguments = (
        "validate",
        "full-mesh:2",
        "--schedule",
        "ring",
        "--shard-bytes",
        "100kB",
        "--repeat",
        "2",
        "--scale",
        "1e-4",
        "--json",
    )
    both = [command.start(*arguments) for _ in range(2)]
    for process in both:
        out, told = process.communicate(timeout=100)
        assert process.returncode == 0, told
        assert json.loads(out)["runs"][0]["world_size"] == 2


@pytest.mark.fabric
def test_a_world_of_one_has_nothing_to_do(command: Command) -> None:
    assert [
        run["predicted_s"]
        for run in command.json("validate", "full-mesh:1", *AGAINST, "--shard-bytes", "100", "--repeat", "2")["runs"]
    ] == [0.0, 0.0]


@pytest.mark.fabric
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kill_leave_nothing_behind(command: Command, signal_number: int) -> None:
    process = command.start("validate", "full-mesh:4", *AGAINST, "--shard-bytes", "4MiB")
    assert process.stderr is not None
    for line in process.stderr:
        if "calibrating" in line:
            break
    group = descendants(process.pid)
    assert len(group) >= 5
    os.killpg(process.pid, signal_number)
    _, said = process.communicate(timeout=10)
    assert process.returncode == (130 if signal_number == signal.SIGINT else -signal.SIGKILL)
    assert signal_number != signal.SIGINT or said.splitlines()[-1] == "tasp-lab: interrupted"
    assert_gone(group)


def descendants(process: int) -> list[int]:
    """All processes below one."""
    children = [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [each for child in children for each in (child, *descendants(child))]


@pytest.mark.distributed
def test_validate_under_torchrun() -> None:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ("--shard-bytes", "100kB", "--fabric", "torchrun", "--repeat", "2", "--json")
    done = subprocess.run(
        [*line, "-m", "tasp_lab.cli", "validate", "full-mesh:2", *AGAINST, *arguments], cwd=ROOT, capture_output=True,
        text=True, check=False, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [run["world_size"] for run in found["runs"]] == [2, 2]
    environment = found["provenance"]["environment"]
    assert (environment["backend"], environment["device"]) == ("gloo", "cpu")
    assert environment["variables"]["GLOO_SOCKET_IFNAME"] == "lo"


def validated_on_rank(topology: str, odd_code: int | None = None, stderr: str = "") -> tuple[int, str]:
    """On a rank: the exit code of a validation and what it wrote to stderr; rank 1 may leave in the middle.

    A rank that loses another one leaves at once: what it says is in a file.
    """
    if odd_code is not None:
        if os.environ["RANK"] == "1":
            runtime.ranks.run_job._HostPair.answer = lambda _: os._exit(odd_code)  # type: ignore[method-assign]
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
        main(["validate", topology, *AGAINST, "--shard-bytes", "100kB", "--fabric", "torchrun"])
    done = Command(Path())("validate", topology, *AGAINST, "--shard-bytes", "100kB", "--fabric", "torchrun")
    return done.returncode, done.stderr


@pytest.mark.distributed
def test_a_dead_rank_under_torchrun_is_named(tmp_path: Path) -> None:
    """Rank 1 leaves after the group has formed; rank 0 says whom it lost, and both are gone within seconds."""
    assert as_if_by_torchrun(validated_on_rank, 2, "full-mesh:2", 7, str(tmp_path / "stderr")) == [2, 7]
    assert "tasp-lab: rank 0: lost rank 1 while measuring" in (tmp_path / "stderr").read_text()


@pytest.mark.distributed
def test_the_wrong_number_of_ranks_is_told_once_per_rank() -> None:
    told = (2, "tasp-lab: full-mesh:3 has 3 ranks, but 2 were started\n")
    assert as_if_by_torchrun(validated_on_rank, 2, "full-mesh:3") == [told, told]


@pytest.mark.distributed
def test_a_port_in_use_is_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        told = command("validate", "full-mesh:2", *AGAINST, "--shard-bytes", "1", "--fabric", "torchrun")
    assert told.returncode == 2
    assert f"rank 0: cannot join the process group at 127.0.0.1:{port}" in told.stderr
    assert "already in use" in told.stderr.lower() or "EADDRINUSE" in told.stderr


def test_an_explanation_has_the_critical_path(command: Command) -> None:
    """Compute hides all transfers here, so it is the whole path."""
    layer = ("--schedule", "ring-attention", "--seq", "64Ki", "--compute", "timed:1e14")
    spoken = command("predict", "full-mesh:4", *layer, "--explain")
    _, path = spoken.stdout.split("where the time")
    assert "critical path" in path
    assert "share of time" in path
    assert any("compute" in line and "100.0%" in line for line in path.splitlines())
