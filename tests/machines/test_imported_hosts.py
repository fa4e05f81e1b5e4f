"""Imports of hosts: CPU sockets, NICs, tables of amd-smi, generations of links, and text as people paste it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasp_lab
from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import parse_bandwidth_bytes_per_s
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.importers import import_topology
from tasp_lab.machines.importers.survey import LINK_GENERATIONS, NODE, PHB, PIX, SYS, Branch, in_sockets, nics_of
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.machine_file import machine_file
from tasp_lab.machines.profile import load_profile, profile_names
from tests.conftest import Command
from tests.machines.test_importers import FOLDER, SAMPLES, cable_bandwidths, imported, refusal, way

MIB = 2**20
PATH, LINK = 22e9, 31.5e9
"""The bandwidths of the path between two sockets and of a PCIe link that imports assume, in bytes/s."""


def matrix(
    gpus: int,
    cell: Callable[[int, int], str] = lambda a, b: "SYS",
    affinity: Callable[[int], str] = lambda rank: "N/A\tN/A",
    nics: Sequence[str] = (),
    nic_cell: Callable[[int, int], str] = lambda rank, nic: "SYS",
) -> str:
    """A matrix of nvidia-smi by functions of ranks and NICs, with CPU and NUMA affinities."""
    names = [*(f"GPU{rank}" for rank in range(gpus)), *nics]
    lines = ["\t".join(["", *names, "CPU Affinity", "NUMA Affinity"])]
    for a in range(gpus):
        row = [" X " if a == b else cell(min(a, b), max(a, b)) for b in range(gpus)]
        lines.append("\t".join([f"GPU{a}", *row, *(nic_cell(a, nic) for nic in range(len(nics))), affinity(a)]))
    return "\n".join(lines) + "\n"


def paths(machine: Machine) -> set[tuple[str, float]]:
    """The paths between sockets."""
    links = machine.topology.links
    return {
        (link.name, float(link.bandwidth_bytes_per_s))
        for link in links
        if str(link.source).startswith("cpu") and str(link.destination).startswith("cpu")
    }


ONE_PATH = {("cpu0->cpu1", PATH), ("cpu1->cpu0", PATH)}


def sockets(machine: Machine) -> str:
    return machine.parameters["sockets"].text


# Sockets


def test_one_machine_is_the_same_whichever_cells_its_system_prints() -> None:
    """Eight GPUs in two sockets: NODE and SYS between them, or SYS between all, with the same affinities."""
    plain, all_sys = imported("l20-8.nvidia-smi.txt"), imported("l20-8-all-sys.nvidia-smi.txt")
    assert plain.topology == all_sys.topology
    assert paths(all_sys) == ONE_PATH
    assert sockets(plain) == sockets(all_sys) == "0, 1, 2, 3; 4, 5, 6, 7"


@pytest.mark.parametrize("sample", ["l20-8.nvidia-smi.txt", "l20-8-all-sys.nvidia-smi.txt"])
def test_all_that_crosses_sockets_shares_the_path(sample: str) -> None:
    """Of an AllGather of S bytes per rank, direct sends 4 x 4 S each way over the path, and the ring 7 S."""
    size = 64 * MIB
    direct, ring = tasp_lab.predict(imported(sample), ["direct", "ring"], size, samples=0)
    assert direct.time_s == pytest.approx(16 * size / PATH, rel=1e-3)
    assert ring.time_s == pytest.approx(7 * size / PATH, rel=1e-3)


@pytest.mark.parametrize(
    ("affinity", "expected"),
    [
        pytest.param(
            lambda rank: f"{16 * NPS4[rank]}-{16 * NPS4[rank] + 15}\t{NPS4[rank]}",
            "0, 1, 2, 3; 4, 5, 6, 7",
            id="four NUMA nodes per socket",
        ),
        pytest.param(
            lambda rank: f"{16 * NPS4[rank]}-{16 * NPS4[rank] + 15},{128 + 16 * NPS4[rank]}-{143 + 16 * NPS4[rank]}",
            "0, 1, 2, 3; 4, 5, 6, 7",
            id="four NUMA nodes per socket, CPUs alone",
        ),
        pytest.param(lambda rank: f"{rank}\t{rank}", "0, 1, 2, 3; 4, 5, 6, 7", id="a NUMA node for each GPU"),
        pytest.param(lambda rank: f"0-31\t{(0, 2)[rank > 4]}", "0, 1, 2, 3, 4; 5, 6, 7", id="nodes without GPUs"),
        pytest.param(lambda rank: "N/A\tN/A", "0, 1, 2, 3; 4, 5, 6, 7", id="no affinities"),
        pytest.param(lambda rank: "", "0, 1, 2, 3; 4, 5, 6, 7", id="no columns"),
        pytest.param(lambda rank: ("0-3", "64-67")[rank // 4], "0, 1, 2, 3; 4, 5, 6, 7", id="a container's CPUs"),
        pytest.param(lambda rank: ("0,2,4", "1,3,5")[rank % 2], "0, 2, 4, 6; 1, 3, 5, 7", id="CPUs in turn"),
    ],
)
def test_gpus_that_are_all_sys_share_one_path_between_two_sockets(
    affinity: Callable[[int], str], expected: str
) -> None:
    machine = import_topology(matrix(8, affinity=affinity), "all-sys")
    assert paths(machine) == ONE_PATH
    assert sockets(machine) == expected
    assert machine.parameters["sockets"].assumed
    assert "--sockets of the import changes it" in machine.parameters["sockets"].source


NPS4 = (3, 1, 1, 3, 7, 5, 5, 7)
"""The NUMA nodes of eight GPUs, of which each of two sockets has four."""


def test_gpus_of_one_affinity_are_in_one_socket() -> None:
    machine = import_topology(matrix(4, affinity=lambda rank: "0-63\t0"), "one")
    assert way(machine.topology, 0, 3) == ["0->cpu0", "cpu0->3"]
    assert machine.parameters["sockets"].assumed
    assert "cells are SYS" in machine.parameters["sockets"].source
    divided = import_topology(matrix(4, affinity=lambda rank: "0-63\t0"), "one", sockets=2)
    assert (sockets(divided), paths(divided)) == ("0, 1; 2, 3", ONE_PATH)
    assert not divided.parameters["sockets"].assumed


def test_sys_counts_where_the_system_prints_node_as_well() -> None:
    """A container that shows the same CPUs for all GPUs."""
    text = matrix(8, lambda a, b: "NODE" if a // 4 == b // 4 else "SYS", lambda rank: "0-15\tN/A")
    assert paths(import_topology(text, "container")) == ONE_PATH


def test_the_number_of_sockets_is_an_option() -> None:
    """Four NUMA nodes are two sockets of two, unless the user tells."""
    text = matrix(8, lambda a, b: "NODE" if a // 2 == b // 2 else "SYS", lambda rank: f"0-7\t{rank // 2}")
    assert sockets(import_topology(text, "x")) == "0, 1, 2, 3; 4, 5, 6, 7"
    assert way(import_topology(text, "x", sockets=1).topology, 0, 7) == ["0->cpu0", "cpu0->7"]
    four = import_topology(text, "x", sockets=4, cpu_bandwidth="40GB/s")
    assert paths(four) == {(f"cpu{a}->cpu{b}", 40e9) for a in range(4) for b in range(4) if a != b}
    assert "any two sockets have one path" in four.parameters["sockets"].source
    for count in (0, -1, 5):
        assert f"sockets is {count}, expected 1 to 4" in refusal(text, sockets=count)
    assert "sockets was given" in refusal(SAMPLES["h100-8.nvidia-smi.txt"], sockets=2)


def test_numa_nodes_of_other_tools_are_in_sockets_too() -> None:
    rocm = imported("mi250x-8.rocm-smi.txt", pcie=True)  # nodes 3, 1, 0 and 2, two GPUs each
    assert (sockets(rocm), paths(rocm)) == ("0, 1, 6, 7; 2, 3, 4, 5", ONE_PATH)
    cpus = "".join(f'<cpu numaid="{n}"><pci busid="{n}"><gpu rank="{n}" sm="89"/></pci></cpu>' for n in range(8))
    xml = import_topology(f'<system version="1">{cpus}</system>', "nps4")
    assert (sockets(xml), paths(xml)) == ("0, 1, 2, 3; 4, 5, 6, 7", ONE_PATH)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=8), st.integers(1, 4))
def test_every_gpu_is_in_one_socket_and_those_of_a_numa_node_together(numbers: list[int], count: int) -> None:
    ranks = {number: [rank for rank, each in enumerate(numbers) if each == number] for number in dict.fromkeys(numbers)}
    nodes = [
        Branch("cpu", tuple(Branch("gpu", (), LINK, rank) for rank in ranks[number]), number=number) for number in ranks
    ]
    try:
        found = [socket.ranks() for socket in in_sockets(nodes, count)]
    except TopologyError:
        assert count > len(nodes)
        return
    assert sorted(rank for socket in found for rank in socket) == list(range(len(numbers)))
    assert len(found) <= count
    if len(nodes) > 1:
        for together in ranks.values():
            assert sum(bool(set(together) & set(socket)) for socket in found) == 1


# NICs


def rates_out(machine: Machine) -> list[float]:
    """The bandwidth of the NICs of each rank, out of it."""
    nics = [link for link in machine.topology.links if machine.topology.is_nic(link) and isinstance(link.source, int)]
    return [float(link.bandwidth_bytes_per_s) for link in sorted(nics, key=lambda link: str(link.source))]


def out_of_node(machine: Machine, gpus: int) -> float:
    """The bandwidth out of the first node in bytes/s: of what several ranks share, and of all others."""
    shared = [each for each in machine.topology.shared if each.name.startswith("node 0 from")]
    limited = {name for each in shared for name in each.links}
    links = [link for link in machine.topology.links if machine.topology.is_nic(link) and link.source in range(gpus)]
    alone = sum(float(link.bandwidth_bytes_per_s) for link in links if link.name not in limited)
    return alone + sum(float(each.bandwidth_bytes_per_s) for each in shared)


def test_nics_that_no_gpu_is_near_are_not_handed_out(tmp_path: Path) -> None:
    """Every other GPU has a NIC on its switch, two NICs are SYS from all: 4 x 50 GB/s leave a node, and not 6 x 50."""
    machine = imported("h100-8-four-nics.nvidia-smi.txt", profile="h100", nodes=2)
    nics = machine.parameters["nics"]
    assert nics.text == "NIC0: 0, 1; NIC1: 2, 3; NIC2: 4, 5; NIC3: 6, 7"
    assert "ranks 1, 3, 5, 7, near no NIC, use those of their neighbours" in nics.source
    assert "not used, as near no GPU: NIC4, NIC5" in nics.source
    assert "4 of 6 NICs used (assumption: ranks 1, 3, 5, 7, near no NIC" in machine.summary
    assert set(rates_out(machine)) == {50e9}
    assert out_of_node(machine, 8) == 200e9
    path = tmp_path / "machine.json"
    path.write_bytes(machine_file(machine, ".json"))
    (shared,) = tasp_lab.predict(str(path), ["direct"], "1GiB", library="ideal", samples=0)
    assert shared.time_s == pytest.approx(64 * 2**30 / 200e9, rel=1e-3)  # each of 8 blocks to each of 8 ranks


def test_nics_that_are_far_from_all_are_shared_equally_and_the_user_is_told(command: Command) -> None:
    """Six NICs of 50 GB/s, none near one of four GPUs: 75 GB/s each."""
    machine = imported("gb200-4.nvidia-smi.txt", profile="h100", nodes=2)
    assert rates_out(machine) == [75e9] * 8
    assert out_of_node(machine, 4) == 300e9
    line = ("topologies", "import", str(FOLDER / "gb200-4.nvidia-smi.txt"), "--profile", "h100", "--nodes", "2")
    told = "assumption: the file cannot tell which NICs are near ranks 0, 1, 2, 3"
    text, document = command(*line), command(*line, "--json")
    assert told in text.stdout
    assert told in document.stderr
    (nics,) = (each for each in json.loads(document.stdout)["constants"] if each["name"] == "nics")
    assert nics["source"].startswith(told)
    assert "NCCL_TOPO_DUMP_FILE" in nics["source"]


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        pytest.param([[PHB, PHB]] * 4, [(0, 2), (1, 3)], id="virtual machine"),
        pytest.param([[SYS] * 3] * 2, [(0, 1)] * 3, id="no equal numbers"),
        pytest.param([[PIX, NODE], [NODE, NODE]], [(0, 1), ()], id="a NIC for storage"),
        pytest.param([[PIX, SYS], [SYS, NODE]], [(0,), (1,)], id="only a far one in the node"),
        pytest.param([[PIX, SYS], [SYS, PIX], [SYS, SYS], [SYS, SYS]], [(0, 2), (1, 3)], id="two without"),
        pytest.param([[PIX, PIX, SYS, SYS], [SYS, SYS, PIX, PIX]], [(0,), (0,), (1,), (1,)], id="two each"),
    ],
)
def test_who_uses_which_nic(levels: list[list[int]], expected: list[tuple[int, ...]]) -> None:
    names = "abcd"[: len(levels[0])]
    used = {nic.name: nic.ranks for nic in nics_of(names, levels, [None] * len(names)).used}
    assert [used.get(name, ()) for name in names] == expected


@given(st.data())
def test_every_gpu_has_a_nic_and_no_nearer_one_is_passed_over(data: st.DataObject) -> None:
    ranks, count = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 6))
    row = st.lists(st.sampled_from([PIX, PHB, NODE, SYS]), min_size=count, max_size=count)
    levels = [data.draw(row) for _ in range(ranks)]
    used = nics_of("abcdef"[:count], levels, [None] * count).used
    near = {nic for row in levels for nic, level in enumerate(row) if level < NODE}
    for rank, levels_of_rank in enumerate(levels):
        own = {"abcdef".index(nic.name) for nic in used if rank in nic.ranks}
        nearest = {nic for nic, level in enumerate(levels_of_rank) if level == min(levels_of_rank)}
        assert own
        assert own <= (nearest & near or nearest)


@pytest.mark.parametrize("nics", [1, 2, 3, 5, 8])
def test_all_far_nics_leave_a_node_whole(nics: int) -> None:
    text = matrix(4, lambda a, b: "NV18", nics=[f"mlx5_{nic}" for nic in range(nics)])
    machine = import_topology(text, "far", profile="h100", nodes=2)
    assert out_of_node(machine, 4) == pytest.approx(nics * 50e9)
    assert set(rates_out(machine)) == {max(nics / 4, 1) * 50e9}


def test_without_nics_in_the_file_they_are_those_of_the_family() -> None:
    """Two GPUs of this family share a NIC."""
    machine = import_topology(matrix(8, lambda a, b: "NV12"), "no-nics", profile="a100_100g", nodes=2)
    assert machine.topology.shared == load_machine("a100_100g-2x8").topology.shared != ()


# Generations of links


def test_mi355x_is_read_as_in_the_catalogue() -> None:
    alone = imported("mi355x-8.rccl.xml")
    assert set(alone.topology.links) == set(load_machine("mi355x-8").topology.links)
    assert set(cable_bandwidths(alone.topology).values()) == {76.8e9}
    machine = imported("mi355x-8.rccl.xml", profile="mi355x", nodes=2)
    assert machine.parameters["link_bandwidth"].number == 76.8e9


@pytest.mark.parametrize(
    ("gcn", "expected"),
    [("gfx906", 50e9), ("906", 50e9), ("gfx90a:sramecc+:xnack-", 50e9), ("910", 50e9), ("gfx941", 64e9)],
)
def test_older_gpus_of_amd_are_known(gcn: str, expected: float) -> None:
    text = SAMPLES["mi355x-8.rccl.xml"].replace('gcn="gfx950"', f'gcn="{gcn}"')
    assert set(cable_bandwidths(import_topology(text, "amd").topology).values()) == {expected}


def test_every_family_has_links_of_its_generation() -> None:
    """A family of the catalogue is in the table, and a GPU has a whole number of its links."""
    rates = {
        accelerator: parse_bandwidth_bytes_per_s(generation.bandwidth)
        for generation in LINK_GENERATIONS.values()
        for accelerator in generation.accelerators.split()
    }
    for name in profile_names():
        profile = load_profile(name)
        links = profile.parameters.numbers["link_bandwidth"] / rates[profile.accelerator]
        assert 1 <= links <= 18, name
        assert links == pytest.approx(round(links)), name
    assert all(generation.source for generation in LINK_GENERATIONS.values())


@pytest.mark.parametrize("between", ["><", ">\n<"])
def test_nics_of_an_xml_are_near_by_its_tree_not_by_its_lines(between: str) -> None:
    """Two NICs are below the switch of the first GPU, one below that of the second."""
    net = '<pci busid="{0}"><nic><net name="{0}" speed="400000"/></nic></pci>'
    gpu = '<pci busid="{0}"><gpu rank="{0}" sm="90"><nvlink target="sw" count="18" tclass="0x068000"/></gpu></pci>'
    parts = (gpu.format(0) + net.format("a") + net.format("b"), gpu.format(1) + net.format("c"))
    switches = "".join(f'<pci busid="s{number}">{part}</pci>' for number, part in enumerate(parts))
    text = f'<system version="1"><cpu numaid="0">{switches}</cpu></system>'.replace("><", between)
    machine = import_topology(text, "pair", profile="h100")
    assert machine.parameters["nics"].text == "a: 0; b: 0; c: 1"


def test_a_link_to_itself_is_called_one() -> None:
    gpu = '<pci busid="{0}"><gpu rank="{1}" sm="80"><nvlink target="{0}" count="12" tclass="0x030200"/></gpu></pci>\n'
    gpus = gpu.format("0001:00:00.0", 0) + gpu.format("0002:00:00.0", 1)
    text = f'<system version="1"><cpu numaid="0">\n{gpus}</cpu></system>'
    assert "line 2: <nvlink> is a link to itself, '0001:00:00.0'" in refusal(text)


# amd-smi


def amd_smi(kinds: Callable[[int, int], tuple[str, int, int, str]], gpus: int = 4, only: Sequence[str] = ()) -> str:
    """The tables of amd-smi, by the type, weight, hops and bandwidth of each pair."""
    names = [f"0000:{5 + 32 * rank:02x}:00.0" for rank in range(gpus)]
    titles = ("LINK TYPE TABLE", "WEIGHT TABLE", "HOPS TABLE", "NUMA BW TABLE")
    lines = ["ACCESS TABLE:", " " * 13 + " ".join(names), *(f"{name} " + "ENABLED " * gpus for name in names), ""]
    for field, (title, own) in enumerate(zip(titles, ("SELF", "0", "0", "N/A"), strict=True)):
        if only and title not in only:
            continue
        lines += [f"{title}:", " " * 13 + " ".join(f"{name:12}" for name in names)]
        for a, name in enumerate(names):
            cells = (own if a == b else str(kinds(min(a, b), max(a, b))[field]) for b in range(gpus))
            lines.append(" ".join([f"{name:12}", *(f"{cell:12}" for cell in cells)]))
        lines.append("")
    return "\n".join([*lines, "Legend:", "  SELF = Current GPU", "  N/A = Not supported", ""])


def mesh(a: int, b: int) -> tuple[str, int, int, str]:
    return "XGMI", 15, 1, "50000-50000"


def pcie_pairs(a: int, b: int) -> tuple[str, int, int, str]:
    return ("PCIE", 40, 2, "N/A") if a // 2 == b // 2 else ("PCIE", 72, 3, "N/A")


def test_the_tables_of_amd_smi_are_read() -> None:
    """In the sample the last table is cut off after one row."""
    machine = imported("mi300-4.amd-smi.txt")
    assert cable_bandwidths(machine.topology) == {(a, b): 50e9 for a in range(4) for b in range(4) if a != b}
    assert machine.topology == import_topology(amd_smi(mesh), "imported").topology
    assert machine.parameters["link_bandwidth"].assumed
    family = imported("mi300-4.amd-smi.txt", profile="mi300x")
    assert family.topology.links == load_machine("mi300x-4").topology.links
    given_rate = imported("mi300-4.amd-smi.txt", link_bandwidth="64GB/s")
    assert set(cable_bandwidths(given_rate.topology).values()) == {64e9}


@pytest.mark.parametrize(
    "only",
    [("LINK TYPE TABLE",), ("WEIGHT TABLE",), ("LINK TYPE TABLE", "NUMA BW TABLE"), ("WEIGHT TABLE", "HOPS TABLE")],
)
def test_some_tables_of_amd_smi_are_enough(only: Sequence[str]) -> None:
    pairs = {(a, b) for a in range(4) for b in range(4) if a != b}
    assert set(cable_bandwidths(import_topology(amd_smi(mesh, only=only), "some").topology)) == pairs


def test_tables_of_amd_smi_without_links_are_refused() -> None:
    for only in (("HOPS TABLE",), ("NUMA BW TABLE",)):
        assert "0 tables 'LINK TYPE TABLE'" in refusal(amd_smi(mesh, only=only))
    assert "no table 'HOPS TABLE'" in refusal(amd_smi(pcie_pairs, only=("LINK TYPE TABLE",)))
    assert "'0000:25:00.0' is 'N/A', expected XGMI" in refusal(amd_smi(lambda a, b: ("N/A", 15, 1, "N/A"))).replace(
        "0000:05:00.0 to 0000:25:00.0", "'0000:25:00.0'"
    )


def test_parallel_links_and_links_over_a_third_gpu_of_amd_smi() -> None:
    """Two MI250X: four links inside each, one to the other on one side; the rest goes over a third GPU."""

    def mi250x(a: int, b: int) -> tuple[str, int, int, str]:
        if b - a == 1 and a % 2 == 0:
            return "XGMI", 15, 1, "50000-200000"
        return ("XGMI", 15, 1, "50000-50000") if (a, b) == (0, 2) else ("XGMI", 30, 1, "0-0")

    bandwidths = cable_bandwidths(import_topology(amd_smi(mi250x), "two").topology)
    assert {pair: rate for pair, rate in bandwidths.items() if pair[0] < pair[1]} == {
        (0, 1): 200e9, (2, 3): 200e9, (0, 2): 50e9
    }  # fmt: skip


def test_drivers_that_state_no_bandwidth_leave_it_assumed() -> None:
    machine = import_topology(amd_smi(lambda a, b: ("XGMI", 15, 1, "0-0")), "no-bandwidth")
    assert set(cable_bandwidths(machine.topology).values()) == {64e9}
    assert machine.parameters["link_bandwidth"].assumed


@pytest.mark.parametrize("only", [(), ("LINK TYPE TABLE", "WEIGHT TABLE")])
def test_pcie_of_amd_smi_is_by_hops_or_weights(only: Sequence[str]) -> None:
    machine = import_topology(amd_smi(pcie_pairs, only=only), "pcie")
    assert (sockets(machine), paths(machine)) == ("0, 1; 2, 3", ONE_PATH)


# Text as people paste it

PASTED: dict[str, Callable[[str], str]] = {
    "quoted": lambda text: re.sub("(?m)^", "> ", text),
    "quoted twice": lambda text: "GPU0 is slow.\nOn Monday someone wrote:\n" + re.sub("(?m)^", ">> ", text),
    "quoted with gaps": lambda text: re.sub("(?m)^", "> > ", text) + "\n\nThanks!\n",
    "quoted in HTML": lambda text: re.sub("(?m)^", "&gt; ", text),
    "code fence": lambda text: f"The output:\n\n```text\n{text}```\n\nAny idea?\n",
    "quoted fence": lambda text: re.sub("(?m)^", "> ", f"```\n{text}```\n"),
    "indented": lambda text: re.sub("(?m)^", "    ", text),
    "spaces": lambda text: text.expandtabs(9),
    "prompt": lambda text: f"user@host:~$ some-tool topo\n{text}user@host:~$ \n",
    "other line ends": lambda text: "\ufeff" + text.replace("\n", "\r\n"),
    "escapes": lambda text: "\x1b[4m" + text.replace("GPU0", "\x1b[1mGPU0\x1b[0m", 1),
    "escapes without their first character": lambda text: text.replace("GPU0", "[4mGPU0[0m", 1),
    "no-break spaces": lambda text: text.replace(" ", "\xa0"),
}


@pytest.mark.parametrize("pasted", PASTED)
@pytest.mark.parametrize(
    "sample", ["h100-8.nvidia-smi.txt", "l20-8.nvidia-smi.txt", "mi300x-8.rocm-smi.txt", "mi300-4.amd-smi.txt"]
)
def test_a_table_is_read_as_it_is_pasted(sample: str, pasted: str) -> None:
    assert import_topology(PASTED[pasted](SAMPLES[sample]), "imported").topology == imported(sample).topology


@pytest.mark.parametrize(
    "pasted", ["quoted", "quoted twice", "code fence", "quoted fence", "prompt", "other line ends"]
)
def test_xml_is_read_as_it_is_pasted(pasted: str) -> None:
    text = PASTED[pasted](SAMPLES["v100-4.nccl.xml"])
    assert import_topology(text, "imported").topology == imported("v100-4.nccl.xml").topology
    declared = PASTED[pasted]('<?xml version="1.0"?>\n' + SAMPLES["v100-4.nccl.xml"])
    assert import_topology(declared, "imported").topology == imported("v100-4.nccl.xml").topology


def test_a_quoted_sample_is_read() -> None:
    """PIX inside pairs, NODE inside a socket, SYS between two."""
    topology = imported("l40s-8-quoted.nvidia-smi.txt").topology
    assert way(topology, 0, 1) == ["0->pcie0", "pcie0->1"]
    assert way(topology, 0, 3) == ["0->pcie0", "pcie0->cpu0", "cpu0->pcie1", "pcie1->3"]
    assert way(topology, 0, 4) == ["0->pcie0", "pcie0->cpu0", "cpu0->cpu1", "cpu1->pcie2", "pcie2->4"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (matrix(4, affinity=lambda rank: "SYS\t0-3\t0"), ["line 2: GPU0 has 5 cells, expected 4"]),
        (matrix(4, lambda a, b: "X2"), ["line 2: GPU0 to 'GPU1' is 'X2', expected NV#"]),
        (matrix(4, lambda a, b: "DIS"), ["line 2: GPU0 to 'GPU1' is 'DIS', expected NV#"]),
        (
            matrix(2, nics=["NIC0"]) + "NIC0\tPIX\tSYS\t X \n",
            ["line 2: GPU0 to NIC0 is 'SYS', but 'PIX' the other way"],
        ),
        (re.sub("(?m)^", "> ", matrix(4)).replace("SYS", "XYZ", 1), ["line 2: GPU0 to 'GPU1' is 'XYZ'"]),
        ("said:\n> <system version='1'>\n> <disk/>\n> </system>", ["line 3: <disk> is in <system>"]),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, words: list[str]) -> None:
    message = refusal(text)
    for word in words:
        assert word in message


def test_rows_in_another_order_are_the_same_machine() -> None:
    lines = SAMPLES["h100-8.nvidia-smi.txt"].splitlines()
    turned = "\n".join([lines[0], *reversed(lines[1:19]), *lines[19:]])
    assert import_topology(turned, "imported").topology == imported("h100-8.nvidia-smi.txt").topology


# What is assumed


def test_what_is_assumed_is_on_standard_error_beside_the_file(command: Command) -> None:
    sample = str(FOLDER / "l20-8-all-sys.nvidia-smi.txt")
    done = command("topologies", "import", sample, "--json")
    assert (done.returncode, json.loads(done.stdout)["world_size"]) == (0, 8)
    assumed = {line.partition(" = ")[0] for line in done.stderr.splitlines()}
    assert assumed == {"pcie_bandwidth", "cpu_bandwidth", "sockets"}
    given_all = ("--pcie-bandwidth", "25GB/s", "--cpu-bandwidth", "40GB/s", "--sockets", "2")
    assert command("topologies", "import", sample, *given_all, "--json").stderr == ""
    refused = command("topologies", "import", sample, "--sockets", "9")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
