"""Imported nodes with the library and the NICs of a family: machines of the catalogue, where both are one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tasp_lab
from tasp_lab.core.errors import ProfileError, TaspLabError, TopologyError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.importers import import_topology, read_topology
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.machine_file import machine_file, topology_document
from tests.conftest import Command
from tests.machines.test_importers import FOLDER, SAMPLES

ONE_NODE = (
    "h100-8.nvidia-smi.txt",
    "h100-8.nccl.xml",
    "h100-8-vm.nccl.xml",
    "mi300x-8.rocm-smi.txt",
    "mi300x-8.rccl.xml",
)


def written(folder: Path, sample: str, text: str = "", **options: Any) -> str:
    """The file of an imported machine of the sample's family."""
    machine = import_topology(text or SAMPLES[sample], "imported", profile=sample.partition("-")[0], **options)
    path = folder / "machine.json"
    path.write_bytes(machine_file(machine, ".json"))
    return str(path)


def times(machine: Machine | str, **options: Any) -> list[float]:
    """Predictions of messages, in several sizes, and the ends of their intervals."""
    found: list[float] = []
    for size in ("64KiB", "64MiB"):
        for each in tasp_lab.predict(machine, ["ring", "direct"], size, **options):
            assert each.interval is not None
            found += [float(each.time_s), each.interval.low_s, each.interval.high_s]
    return found


@pytest.mark.parametrize("sample", ONE_NODE)
def test_a_node_of_the_catalogue_has_its_times(tmp_path: Path, sample: str) -> None:
    path, family = written(tmp_path, sample), sample.partition("-")[0]
    assert times(path) == times(f"{family}-8")
    assert load_machine(path).comm_library == load_machine(f"{family}-8").comm_library
    assert load_machine(path).compute == load_machine(f"{family}-8").compute


@pytest.mark.parametrize(("rails", "name"), [(False, "h100-2x8"), (True, "h100-2x8-rails")])
def test_nodes_are_joined_by_the_nics_of_the_file(tmp_path: Path, rails: bool, name: str) -> None:
    path = written(tmp_path, "h100-8.nccl.xml", nodes=2, rails=rails)
    assert times(path) == times(name)
    for override in ("link.bandwidth=x0.5", "nic.bandwidth=x2", "nic.latency=+10us"):
        here, catalogue = (
            tasp_lab.predict(each, ["direct"], "64MiB", overrides=[override], samples=0)[0].time_s
            for each in (path, name)
        )
        assert here == pytest.approx(catalogue, rel=1e-12)


@pytest.mark.parametrize("sample", ["h100-8.nvidia-smi.txt", "h100-8.nccl.xml", "mi300x-8.rccl.xml"])
def test_each_gpu_has_the_nic_that_is_nearest_to_it(tmp_path: Path, sample: str) -> None:
    """GPU i and NIC i share a PCIe switch in all of them; the two other NICs of the first are near none."""
    machine = load_machine(written(tmp_path, sample))
    nics = [link for link in machine.topology.links if "rail" in str(link.destination)]
    assert [(link.source, link.destination, link.bandwidth_bytes_per_s) for link in nics] == [
        (rank, f"rail{rank}", 50e9) for rank in range(8)
    ]
    (stated,) = (each for each in machine.parameters.values() if each.name == "nics")
    name = "NIC" if "nvidia-smi" in sample else "mlx5_"
    assert stated.value == "; ".join(f"{name}{rank}: {rank}" for rank in range(8))


def test_a_speed_in_the_file_replaces_that_of_the_family(tmp_path: Path) -> None:
    text = SAMPLES["h100-8.nccl.xml"].replace('speed="400000"', 'speed="200000"')
    slow = written(tmp_path, "h100-8.nccl.xml", text, nodes=2)
    expected = times("h100-2x8", overrides=["nic.bandwidth=200Gbit/s"])
    assert times(slow)[::3] == pytest.approx(expected[::3], rel=1e-12)


def with_four_nics() -> str:
    """The matrix of eight GPUs, of which two each share a NIC."""
    lines = SAMPLES["h100-8.nvidia-smi.txt"].splitlines()
    rows = ["\t".join(["", *(f"GPU{gpu}" for gpu in range(8)), *(f"NIC{nic}" for nic in range(4)), "CPU Affinity"])]
    for gpu in range(8):
        row = lines[gpu + 1].split()
        rows.append("\t".join([*row[:9], *("PXB" if gpu // 2 == nic else "SYS" for nic in range(4)), "0-55"]))
    return "\n".join(rows)


@pytest.mark.parametrize("rails", [False, True])
def test_gpus_share_the_bandwidth_of_their_nic(tmp_path: Path, rails: bool) -> None:
    """Bytes out of a node go through four NICs instead of eight, so the least time of a large AllGather is twice."""
    path = written(tmp_path, "h100-8.nvidia-smi.txt", with_four_nics(), nodes=2, rails=rails)
    topology = load_machine(path).topology
    assert len(topology.shared) == 2 * 2 * 4
    assert {each.bandwidth_bytes_per_s for each in topology.shared} == {50e9}
    assert all(len(each.links) == 2 for each in topology.shared)
    (shared,) = tasp_lab.predict(path, ["direct"], "1GiB", library="ideal")
    (alone,) = tasp_lab.predict("h100-2x8", ["direct"], "1GiB", library="ideal")
    assert shared.time_s == pytest.approx(2 * alone.time_s, rel=1e-3)
    (faster,) = tasp_lab.predict(path, ["direct"], "1GiB", library="ideal", overrides=["nic.bandwidth=x2"])
    assert faster.time_s == pytest.approx(alone.time_s, rel=1e-3)


def test_links_of_the_file_count(tmp_path: Path) -> None:
    """A GPU whose port was halved by hand."""
    path = Path(written(tmp_path, "h100-8.nccl.xml"))
    document = json.loads(path.read_text())
    for link in document["links"]:
        if link["source"] == 0 and link["destination"] == "switch":
            link["bandwidth_bytes_per_s"] /= 2
    path.write_text(json.dumps(document))
    (slow,) = tasp_lab.predict(str(path), ["direct"], "1GiB")
    (whole,) = tasp_lab.predict("h100-8", ["direct"], "1GiB")
    assert slow.time_s == pytest.approx(2 * whole.time_s, rel=0.02)


def test_a_file_is_what_is_written_of_its_machine(tmp_path: Path) -> None:
    path = written(tmp_path, "h100-8.nccl.xml", nodes=2)
    assert topology_document(load_machine(path)) == json.loads(Path(path).read_text())
    assert topology_document(load_machine(path, library="ideal"))["profile"] == "h100"


def test_libraries_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "h100-8.nccl.xml")
    names = {name: load_machine(path, library=name).comm_library.name for name in ("auto", "nccl", "gloo", "ideal")}
    assert names == {"auto": "nccl", "nccl": "nccl", "gloo": "gloo", "ideal": "ideal"}
    with pytest.raises(ProfileError, match="is of nccl; expected auto, ideal or gloo there"):
        load_machine(path, library="rccl")


@pytest.mark.parametrize(
    ("sample", "options", "said"),
    [
        ("dgx-1v.nvidia-smi.txt", {"profile": "h100"}, "its machines have one switch with as many links of each GPU"),
        ("l40s-4.nvidia-smi.txt", {"profile": "h100"}, "nvidia-smi topo -m shows other wiring"),
        ("h100-8.nccl.xml", {"profile": "mi300x"}, "its machines have as many links between any two GPUs"),
        ("h100-8.nccl.xml", {"profile": "gb200"}, "gb200"),
        ("h100-8.nccl.xml", {"profile": "h10"}, "unknown profile 'h10'"),
        ("h100-8.nccl.xml", {"profile": "h100", "nodes": 0}, "0 nodes, expected 1 or more"),
        ("h100-8.nccl.xml", {"nodes": 2}, "nodes and rails need a profile"),
        ("h100-8.nccl.xml", {"rails": True}, "nodes and rails need a profile"),
    ],
)
def test_what_is_no_machine_of_the_family(sample: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TaspLabError, match=said) as error:
        import_topology(SAMPLES[sample], "imported", **options)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"profile": "h10"}, "unknown profile 'h10'"),
        ({"nodes": [0, 0, 0, 1, 1, 1, 1, 1]}, "nodes of 3, 5 ranks, expected equal ones"),
        ({"accelerator": "a100"}, "the profile 'h100' has 'h100'"),
        ({"constants": [{"name": "ring_rate", "value": "3 apples", "source": "x"}]}, r"\$\.constants\[0\]"),
    ],
)
def test_files_that_contradict_their_profile(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = Path(written(tmp_path, "h100-8.nccl.xml"))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((TopologyError, ProfileError), match=said) as error:
        load_machine(str(path))
    assert "machine.json" in str(error.value)


def test_compare_and_decompose_take_the_file(command: Command) -> None:
    sample = str(FOLDER / "h100-8.nvidia-smi.txt")
    done = command("topologies", "import", sample, "--profile", "h100", "--json")
    (command.folder / "machine.json").write_text(done.stdout)
    for line in (
        ("predict", "machine.json", "--library", "nccl", "--schedule", "multi-ring", "--shard-bytes", "1MiB"),
        ("compare", "machine.json", "--seq", "1024", "--heads", "8", "--mask", "full", "--samples", "0"),
        ("decompose", "machine.json"),
    ):
        here = command(*line, "--json")
        catalogue = command(*("h100-8" if word == "machine.json" else word for word in line), "--json")
        assert (here.returncode, catalogue.returncode) == (0, 0), here.stderr
        mine, other = (
            json.loads(each.stdout.replace("h100-8.nvidia-smi", "h100-8")) | {"provenance": None, "links_total": None}
            for each in (here, catalogue)
        )
        assert mine == other


LINKS = "source,destination,bandwidth,latency,both_ways\n" + "".join(
    f"{rank},leaf,450GB/s,300ns,yes\n" for rank in range(4)
)


def test_a_list_of_links_joins_a_family(tmp_path: Path) -> None:
    """It has the links of the list, and the library, kernels and constants of the family."""
    path = tmp_path / "links.csv"
    path.write_text(LINKS)
    machine, alone, family = read_topology(path, profile="h100"), load_machine(str(path)), load_machine("h100-4")
    assert replace(machine.topology, forwarding=alone.topology.forwarding) == alone.topology  # NCCL forwards once
    assert machine.comm_library == family.comm_library
    assert machine.compute == family.compute
    for options in ({}, {"profile": "h100", "nodes": 2}, {"profile": "h100", "rails": True}):
        with pytest.raises(TopologyError, match="expected a profile and no other option"):
            read_topology(path, **options)
