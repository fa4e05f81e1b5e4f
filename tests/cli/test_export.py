"""``tasp-lab export``: each format from the command line, read by the interpreters of its specification."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.formats import msccl_interpreter
from tests.formats.chakra_reader import execute, nodes
from tests.formats.test_mscclpp import check

RING = "export full-mesh:4 --schedule ring"


def written(command: Command, line: str) -> str:
    """The one file of an export, which is what it prints without ``--output``."""
    done = command(f"{line} --output plan")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines()[-1].endswith(": plan")
    text = (command.folder / "plan").read_text()
    assert command(line).stdout == text
    assert json.loads(command(f"{line} --json").stdout)["text"] == text
    return text


def test_msccl_xml(command: Command) -> None:
    text = written(command, f"{RING} --format msccl-xml")
    (command.folder / "plan.xml").write_text(text)
    shown = command("predict full-mesh:4 --schedule plan.xml --schedule ring --shard-bytes 1MiB --json")
    theirs, ours = json.loads(shown.stdout)["predictions"]
    assert theirs["time_s"] == pytest.approx(ours["time_s"], rel=1e-9)
    memory, (head, _) = msccl_interpreter.run(text, 1, None), msccl_interpreter.parse(text)
    for rank in range(4):
        buffer, first, values = msccl_interpreter.expected(head, rank)
        assert memory[rank][buffer][first : first + len(values)] == values


def test_mscclpp(command: Command) -> None:
    plan = json.loads(written(command, f"{RING} --format msccl++"))
    assert (plan["collective"], len(plan["gpus"])) == ("allgather", 4)
    check(plan)


def test_the_data_of_a_layer(command: Command) -> None:
    plan = json.loads(written(command, "export full-mesh:4 --schedule ulysses --seq 4Ki --heads 8 --format msccl++"))
    assert plan["collective"] == "alltoall"
    check(plan)


def test_nccl_graph(command: Command) -> None:
    graph = ET.fromstring(written(command, "export full-mesh:5 --schedule multi-ring --format nccl-graph"))
    channels = [[int(gpu.attrib["rank"]) for gpu in channel] for channel in graph.iter("channel")]
    assert [sorted(each) for each in channels] == 4 * [[0, 1, 2, 3, 4]]
    arcs = {pair for each in channels for pair in zip(each, [*each[1:], each[0]], strict=True)}
    assert len(arcs) == 20  # every link once


def test_nccl_tuner(command: Command) -> None:
    text = written(command, "export h100-8 --schedule library-tree-all-reduce --format nccl-tuner")
    rows = [row for row in csv.reader(text.splitlines()) if not row[0].startswith("#")]
    assert [row[3] for row in rows if row[0] == "allreduce"] == ["tree"]


def test_chakra_writes_a_file_per_rank(command: Command) -> None:
    line = f"{RING} --format chakra --shard-bytes 1MiB --output traces --json"
    files = json.loads(command(line).stdout)["files"]
    assert list(files) == [f"traces.{rank}.et" for rank in range(4)]
    assert {(command.folder / name).stat().st_size for name in files} == set(files.values())
    traces = [nodes((command.folder / name).read_bytes()) for name in files]
    assert sum(size_bytes for _, _, size_bytes in execute(traces, 0)) == 4 * 3 * 2**20


def test_an_existing_file_is_replaced_whole(command: Command) -> None:
    (command.folder / "plan").write_text("x" * 10**6)
    assert json.loads(written(command, f"{RING} --format msccl++"))


def test_a_refused_export_leaves_an_existing_file(command: Command) -> None:
    (command.folder / "plan").write_text("before")
    command.refused(*["export", "full-mesh:4", "--schedule", "direct", "--format", "nccl-graph", "--output", "plan"])
    assert (command.folder / "plan").read_text() == "before"
    assert [each.name for each in Path(command.folder).iterdir()] == ["plan"]
