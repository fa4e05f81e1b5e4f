"""Imports of what machines print: expectations derived by hand from the samples, laws, and texts that are broken."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import QuantityError, TopologyError
from tasp_lab.core.units import parse_bandwidth_bytes_per_s, parse_time_s
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.importers import import_topology
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.machine_file import topology_document
from tasp_lab.topology.graph import Link, Topology

FOLDER = Path(__file__).parent / "samples"
SAMPLES = {path.name: path.read_text() for path in sorted(FOLDER.iterdir())}
DGX, H100, ROCM, XML = "dgx-1v.nvidia-smi.txt", "h100-8.nvidia-smi.txt", "mi300x-8.rocm-smi.txt", "v100-4.nccl.xml"
A10 = "a10-4.nccl.xml"


def imported(sample: str, **options: Any) -> Machine:
    return import_topology(SAMPLES[sample], "imported", **options)


def way(topology: Topology, source: int, destination: int) -> list[str]:
    return [topology.links[link].name for link in topology.route(source, destination).links]


def out_of(topology: Topology, rank: int) -> list[Link]:
    return [link for link in topology.links if link.source == rank]


def cable_bandwidths(topology: Topology) -> dict[tuple[int, int], float]:
    return {
        (link.source, link.destination): float(link.bandwidth_bytes_per_s)
        for link in topology.links
        if isinstance(link.source, int) and isinstance(link.destination, int)
    }


# NVSwitch


@pytest.mark.parametrize("sample", ["h100-8.nvidia-smi.txt", "h100-8.nccl.xml", "h100-8-vm.nccl.xml"])
def test_h100_is_eight_ports_of_18_links_as_in_the_catalogue(sample: str) -> None:
    topology = imported(sample).topology
    ports = [(rank, "nvswitch") for rank in range(8)]
    assert set(topology.links) == {
        Link(a, b, 450e9, 0.3e-6) for port in ports for a, b in (port, port[::-1])
    }  # 18 x 25 GB/s
    numbers = {(link.bandwidth_bytes_per_s, link.latency_s) for link in load_machine("h100-8").topology.links}
    assert {(link.bandwidth_bytes_per_s, link.latency_s) for link in topology.links} == numbers


def test_a_link_bandwidth_that_is_given_replaces_the_usual_one() -> None:
    for sample in ("h100-8.nvidia-smi.txt", "h100-8.nccl.xml"):
        machine = imported(sample, link_bandwidth=" 50  GB/s\n")
        assert {link.bandwidth_bytes_per_s for link in machine.topology.links} == {900e9}
        assert [(c.text, c.source) for c in machine.parameters.values() if c.name == "link_bandwidth"] == [
            ("50 GB/s", "given to the import")
        ]


# Cables


def test_dgx_1v_has_six_links_per_gpu_to_four_others() -> None:
    topology = imported(DGX).topology
    assert len(topology.links) == 32
    for rank in range(8):
        assert sorted(link.bandwidth_bytes_per_s / 25e9 for link in out_of(topology, rank)) == [1, 1, 2, 2]
    assert {link.latency_s for link in topology.links} == {0.6e-6}
    assert not topology.linked_pairs[0, 5]  # SYS in the matrix: over PCIe only, which is left out
    assert cable_bandwidths(topology)[0, 3] == cable_bandwidths(topology)[3, 0] == 50e9


def test_dgx_1v_with_pcie_reaches_the_other_socket_over_it() -> None:
    """The matrix hides that 0 and 1 share a PCIe switch; that both are PIX from one NIC tells."""
    topology = imported(DGX, pcie=True).topology
    assert way(topology, 0, 1) == ["0->1"]
    assert way(topology, 0, 5) == ["0->pcie0", "pcie0->cpu0", "cpu0->cpu1", "cpu1->pcie2", "pcie2->5"]
    assert {link.source for link in topology.links if link.destination == "pcie0"} == {0, 1, "cpu0"}
    assert topology.route(0, 5).latency_s == 1e-6


def test_four_v100_have_the_cables_of_the_xml() -> None:
    topology = imported(XML).topology
    twice = {(0, 3), (1, 2), (2, 3)}
    expected = {(a, b): 50e9 if (min(a, b), max(a, b)) in twice else 25e9 for a in range(4) for b in range(4) if a != b}
    assert cable_bandwidths(topology) == expected
    assert len(topology.links) == 12


@pytest.mark.parametrize("sample", ["mi300x-8.rocm-smi.txt", "mi300x-8.rccl.xml"])
def test_mi300x_is_the_full_mesh_of_the_catalogue(sample: str) -> None:
    topology = imported(sample).topology
    assert len(topology.links) == 56
    assert set(topology.links) == set(load_machine("mi300x-8").topology.links)


def test_mi250x_has_cables_only_where_the_weight_is_that_of_one_link() -> None:
    topology = imported("mi250x-8.rocm-smi.txt", link_bandwidth="50GB/s").topology
    assert {link.destination for link in out_of(topology, 0)} == {1, 2, 6}  # 15 15 30 30 30 15 30
    assert Counter(link.source for link in topology.links) == dict.fromkeys(range(8), 3)
    assert {link.bandwidth_bytes_per_s for link in topology.links} == {50e9}


def table(cells: dict[tuple[int, int], str], count: int, *affinities: str) -> str:
    """A matrix of nvidia-smi with these cells between pairs; SYS elsewhere. Affinities are of equal parts of GPUs."""
    affinities = affinities or ("N/A",)
    lines = ["\t".join(["", *(f"GPU{rank}" for rank in range(count)), "CPU Affinity"])]
    for a in range(count):
        words = [" X " if a == b else cells.get((min(a, b), max(a, b)), "SYS") for b in range(count)]
        lines.append("\t".join([f"GPU{a}", *words, affinities[a * len(affinities) // count]]))
    return "\n".join(lines) + "\n"


def all_pairs(count: int, cell: str) -> dict[tuple[int, int], str]:
    return {(a, b): cell for a in range(count) for b in range(a + 1, count)}


def test_few_gpus_of_a_larger_machine_have_a_switch_if_the_user_says_so() -> None:
    text = table(all_pairs(4, "NV6"), 4)  # four cabled H100, or four of the sixteen V100 of a DGX-2
    assert cable_bandwidths(import_topology(text, "four").topology) == {
        (a, b): 150e9 for a in range(4) for b in range(4) if a != b
    }
    links = import_topology(text, "four", nvswitch=True).topology.links
    assert Counter((link.bandwidth_bytes_per_s, "nvswitch" in link.name) for link in links) == {(150e9, True): 8}
    eight = import_topology(table(all_pairs(8, "NV18"), 8), "eight", nvswitch=False).topology
    assert set(cable_bandwidths(eight).values()) == {450e9}


def test_a_port_with_a_broken_link_shows_in_its_row_only() -> None:
    cells = all_pairs(4, "NV18") | {(a, b): "NV17" for a, b in all_pairs(4, "") if 2 in (a, b)}
    topology = import_topology(table(cells, 4), "broken").topology
    assert {link.source: link.bandwidth_bytes_per_s / 25e9 for link in topology.links if link.source != "nvswitch"} == {
        0: 18, 1: 18, 2: 17, 3: 18
    }  # fmt: skip


def test_two_islands_of_nvlink_have_a_switch_each_and_pcie_between() -> None:
    cells = {pair: "NV12" for pair in all_pairs(8, "") if (pair[0] < 4) == (pair[1] < 4)}
    topology = import_topology(table(cells, 8, "0-31", "32-63"), "islands").topology
    assert way(topology, 0, 3) == ["0->nvswitch0", "nvswitch0->3"]
    assert way(topology, 4, 5) == ["4->nvswitch1", "nvswitch1->5"]
    assert way(topology, 0, 4) == ["0->cpu0", "cpu0->cpu1", "cpu1->4"]


def test_one_gpu_is_a_machine_without_links() -> None:
    topology = import_topology("\tGPU0\tNIC0\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nNIC0\tPHB\t X \t\n", "one").topology
    assert (topology.world_size, topology.links) == (1, ())


# PCIe


def test_a10_behind_two_pcie_switches_share_the_way_between_them() -> None:
    for sample in ("a10-4.nvidia-smi.txt", "a10-4.nccl.xml"):
        topology = imported(sample).topology
        assert len(topology.links) == 12
        assert way(topology, 0, 1) == ["0->pcie1", "pcie1->1"]
        assert way(topology, 0, 2) == ["0->pcie1", "pcie1->pcie0", "pcie0->pcie2", "pcie2->2"]
        assert topology.route(0, 1).latency_s == topology.route(0, 2).latency_s == 1e-6


def test_pcie_bandwidths_of_the_xml_follow_from_speed_and_width() -> None:
    topology = imported(A10).topology
    bandwidths = {link.name: link.bandwidth_bytes_per_s for link in topology.links}
    assert bandwidths["0->pcie1"] == pytest.approx(16e9 * 16 * 128 / 130 / 8, rel=1e-3)
    assert bandwidths["pcie1->pcie0"] == pytest.approx(16e9 * 8 * 128 / 130 / 8, rel=1e-3)
    same = imported(A10, pcie_bandwidth="12GB/s").topology
    assert {link.bandwidth_bytes_per_s for link in same.links} == {12e9}


@pytest.mark.parametrize(
    ("speed", "width", "expected"),
    [
        ("8 GT/s", "16", 15.75e9),
        ("5.0 GT/s PCIe", "8", 4e9),
        ("64.0 GT/s PCIe", "16", 121e9),
        ("", "16", 31.5e9),
        ("Unknown", "16", 31.5e9),
        ("16.0 GT/s PCIe", "0", 31.5e9),
    ],
)
def test_a_pcie_link_has_the_bandwidth_of_its_generation_or_the_usual_one(
    speed: str, width: str, expected: float
) -> None:
    text = re.sub(r'link_speed="[^"]*" link_width="[^"]*"', f'link_speed="{speed}" link_width="{width}"', SAMPLES[A10])
    (bandwidth,) = {link.bandwidth_bytes_per_s for link in import_topology(text, "x").topology.links}
    assert bandwidth == pytest.approx(expected, rel=1e-3)


def test_phb_and_node_meet_in_the_numa_node_and_sys_between_two() -> None:
    topology = imported("l40s-4.nvidia-smi.txt", cpu_bandwidth="40GB/s").topology
    assert way(topology, 0, 1) == ["0->cpu0", "cpu0->1"]
    assert way(topology, 2, 3) == ["2->cpu1", "cpu1->3"]
    assert way(topology, 1, 2) == ["1->cpu0", "cpu0->cpu1", "cpu1->2"]
    assert {link.bandwidth_bytes_per_s for link in topology.links if "cpu0->cpu1" in link.name} == {40e9}


def test_pcie_is_there_where_nvlink_leaves_gpus_apart() -> None:
    topology = imported("a100-4-bridges.nvidia-smi.txt").topology
    assert cable_bandwidths(topology) == dict.fromkeys([(0, 1), (1, 0), (2, 3), (3, 2)], 300e9)  # 12 x 25 GB/s
    assert way(topology, 0, 1) == ["0->1"]
    assert way(topology, 0, 2) == ["0->cpu0", "cpu0->cpu1", "cpu1->2"]


def test_hives_of_rocm_smi_are_joined_by_numa_node() -> None:
    topology = imported("mi210-8-hives.rocm-smi.txt").topology
    assert len(cable_bandwidths(topology)) == 2 * 4 * 3
    assert way(topology, 0, 7) == ["0->cpu0", "cpu0->cpu1", "cpu1->7"]


def test_pcie_can_be_left_out_only_if_the_rest_holds_together() -> None:
    assert imported(H100, pcie=False) == imported(H100)
    with pytest.raises(TopologyError, match="not connected"):
        imported("a100-4-bridges.nvidia-smi.txt", pcie=False)


# What a machine says of itself


@pytest.mark.parametrize("pcie", [None, True])
@pytest.mark.parametrize("sample", SAMPLES)
def test_every_number_is_a_constant_or_a_multiple_of_one(sample: str, pcie: bool | None) -> None:
    machine = imported(sample, pcie=pcie)
    bandwidths = {parse_bandwidth_bytes_per_s(c.text) for c in machine.parameters.values() if "bandwidth" in c.name}
    latencies = {parse_time_s(c.text) for c in machine.parameters.values() if c.name.endswith("latency")}
    for link in machine.topology.links:
        assert any((link.bandwidth_bytes_per_s / bandwidth) % 1 == 0 for bandwidth in bandwidths)
        assert link.latency_s in latencies | {latency / 2 for latency in latencies} | {0}
    assert all(constant.source.strip() for constant in machine.parameters.values())
    assert re.search(r"lines \d+ to \d+", next(iter(machine.parameters.values())).source)
    assert "NICs" in machine.summary
    assert "PCIe" in machine.summary


@pytest.mark.parametrize("pcie", [None, True])
@pytest.mark.parametrize("sample", SAMPLES)
def test_the_document_of_an_import_is_a_file_of_the_same_machine(
    tmp_path: Path, sample: str, pcie: bool | None
) -> None:
    machine = imported(sample, pcie=pcie)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(topology_document(machine)))
    assert load_machine(str(path)) == machine


def test_an_assumption_is_called_one() -> None:
    for sample in ("h100-8.nvidia-smi.txt", "mi300x-8.rocm-smi.txt"):
        constant = imported(sample).parameters["link_bandwidth"]
        assert constant.source.startswith("assumption")
    constant = imported("h100-8.nccl.xml").parameters["link_bandwidth"]
    assert constant.source.startswith("sm 90 in line 10")
    assert 'sm="90"' in SAMPLES["h100-8.nccl.xml"].splitlines()[9]


def test_ranks_are_those_of_the_xml_where_it_has_them() -> None:
    """Ranks 3, 2, 1, 0 instead of 0, 1, 2, 3; those of a second node begin with 4."""
    text = SAMPLES[XML]
    turned = re.sub(r'rank="(\d)"', lambda match: f'rank="{7 - int(match[1])}"', text)
    expected = {
        (3 - a, 3 - b): value for (a, b), value in cable_bandwidths(import_topology(text, "x").topology).items()
    }
    assert cable_bandwidths(import_topology(turned, "x").topology) == expected
    without = re.sub(r' rank="\d"', "", turned)
    assert import_topology(without, "x").topology == import_topology(text, "x").topology


def test_text_as_people_paste_it_means_the_same() -> None:
    """Spaces for tabs, no underlining, a prompt above, other line ends, a byte order mark."""
    text = SAMPLES[H100]
    pasted = "\ufeff$ nvidia-smi topo -m\r\n" + text.replace("\x1b[4m", "").replace("\x1b[0m", "").expandtabs(9)
    assert import_topology(pasted.replace("\n", "\r\n"), "imported").topology == imported(H100).topology


# Laws


@settings(max_examples=60)
@given(st.data())
def test_cables_of_any_matrix_are_found(data: st.DataObject) -> None:
    """Every row adds up to 18 links or fewer: each cell is a cable with so many links."""
    count = data.draw(st.integers(2, 6))
    pairs = list(all_pairs(count, ""))
    counts = {pair: data.draw(st.integers(0, 18 // (count - 1))) for pair in pairs}
    cells = {pair: f"NV{links}" for pair, links in counts.items() if links}
    topology = import_topology(table(cells, count), "any").topology
    bandwidths = cable_bandwidths(topology)
    assert bandwidths == {p: links * 25e9 for (a, b), links in counts.items() if links for p in ((a, b), (b, a))}


@settings(max_examples=60)
@given(st.lists(st.integers(10, 18), min_size=3, max_size=8))
def test_ports_of_any_switch_are_found(ports: list[int]) -> None:
    """Between two GPUs the smaller port shows; the largest port shows only if there are two of its size."""
    cells = {(a, b): f"NV{min(ports[a], ports[b])}" for a, b in all_pairs(len(ports), "")}
    topology = import_topology(table(cells, len(ports)), "any").topology
    second = sorted(ports)[-2]
    found = {link.source: link.bandwidth_bytes_per_s for link in topology.links if isinstance(link.source, int)}
    assert found == {rank: min(port, second) * 25e9 for rank, port in enumerate(ports)}


def xml_tree(places: list[tuple[int, int, int]]) -> str:
    """The XML of GPUs at these places; a switch is there for each place in use."""

    def devices(prefix: tuple[int, ...]) -> str:
        if len(prefix) == 3:
            ranks = [rank for rank, place in enumerate(places) if place == prefix]
            return "".join(f'<pci busid="{rank}"><gpu rank="{rank}" sm="80"/></pci>' for rank in ranks)
        inner = sorted({place[: len(prefix) + 1] for place in places if place[: len(prefix)] == prefix})
        tag = "pci" if prefix else "cpu"
        return "".join(f"<{tag}>{devices(part)}</{tag}>" for part in inner)

    return f'<system version="1">{devices(())}</system>'


addresses = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 1))
"""The NUMA node of a GPU, the upper PCIe switch, the lower one."""


@settings(max_examples=80)
@given(st.lists(addresses, min_size=2, max_size=8))
def test_pcie_of_any_matrix_is_a_tree_with_the_levels_of_its_cells(places: list[tuple[int, int, int]]) -> None:
    level = {3: "PIX", 2: "PXB", 1: "NODE", 0: "SYS"}
    cells = {}
    for a, b in all_pairs(len(places), ""):
        shared = next((length for length in (3, 2, 1) if places[a][:length] == places[b][:length]), 0)
        cells[a, b] = level[shared]
    sockets = len({place[0] for place in places})  # each NUMA node is one
    topology = import_topology(table(cells, len(places)), "tree", sockets=sockets).topology
    from_xml = import_topology(xml_tree(places), "tree", sockets=sockets).topology
    for (a, b), cell in cells.items():
        assert len(way(from_xml, a, b)) == len(way(topology, a, b))
        passed = way(topology, a, b)
        switches = [name.split("->")[0] for name in passed[1:]]
        assert (len([name for name in switches if name.startswith("cpu")]) == 2) == (cell == "SYS")
        assert (len(switches) == 1) or cell != "PIX"
        if cell in ("PIX", "PXB"):
            assert not any(name.startswith("cpu") for name in switches)
        assert topology.route(a, b).latency_s == 1e-6


# Refusals


def refusal(text: str, **options: Any) -> str:
    """The message with which a text is refused, which must be one line."""
    with pytest.raises(TopologyError) as caught:
        import_topology(text, "imported", **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def edited(sample: str, *edits: tuple[str, str]) -> str:
    """A sample with the first of each text replaced."""
    text = SAMPLES[sample]
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    return text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty"]),
        (" \n\t\n", ["empty"]),
        ("GPU 0: NVIDIA H100 (UUID: GPU-1)\n", ["format is unknown", "nvidia-smi", "rocm-smi", "NCCL_TOPO_DUMP_FILE"]),
        ('{"name": "x"}', ["format is unknown"]),
        ("\x7fELF\x02\x01\x01\x00", ["line 1", r"'\x7f'", "no text"]),
        ("GPU0\tGPU1\n\x00", ["line 2", r"'\x00'"]),
        ("GPU0 \ud800", ["line 1", r"'\ud800'"]),
        (edited(DGX, ("\nGPU3\tNV2", "\nGPU9\tNV2")), ["line 5", "'GPU9' has a row but no column in line 1"]),
        ("\n".join(SAMPLES[DGX].splitlines()[:8]), ["line 1", "GPU7 has a column but no row"]),
        ("\n".join(SAMPLES[DGX].splitlines()[1:]), ["line 1", "expected the header"]),
        (edited(DGX, ("GPU1\t", "GPU0\t")), ["line 1", "twice"]),
        (edited(DGX, ("\nGPU1\t", "\nGPU0\t")), ["line 3", "'GPU0' has another row in line 2"]),
        (edited(DGX, ("SYS\tSYS\tSYS\tPIX\tPHB\tSYS\tSYS\t0-19,40-59", "SYS")), ["line 2", "GPU0 has 6 cells"]),
        (edited(DGX, ("NV1", "OK")), ["line 2", "GPU0 to 'GPU1' is 'OK'", "expected NV#, PIX"]),
        (edited(DGX, ("NV1", "NV0")), ["line 2", "'NV0'"]),
        (edited(DGX, ("NV1", "NV" + "9" * 5000)), ["line 2", "'NV9999"]),
        (edited(DGX, ("NV1", "NV2")), ["line 2", "GPU0 to GPU1 is 'NV2'", "'NV1' the other way round in line 3"]),
        (edited(DGX, (" X ", "NV1")), ["line 2", "GPU0 to itself is 'NV1', expected X"]),
        (edited(DGX, ("NV1", " X ")), ["line 2", "GPU0 to 'GPU1' is 'X'"]),
        (edited(DGX, ("\nGPU4", "\n\nGPU4")), ["line 1", "GPU4 has a column but no row"]),
        (SAMPLES[DGX] * 2, ["a row below the matrix, which ends in line 13"]),
        (edited(H100, ("NV18", "SYS"), ("GPU1\tNV18", "GPU1\tSYS")), ["line 2", "GPU0 to GPU1 is SYS, expected NV18"]),
        (edited(ROCM, ("GPU2   XGMI", "GPU2   XXXX")), ["line 28", "'XGMI'", "'XXXX' the other way round in line 30"]),
        (edited(ROCM, ("Link Type between", "Access between")), ["0 tables 'Link Type between two GPUs'"]),
        (edited(ROCM, ("Weight between", "Access between")), ["0 tables 'Weight between two GPUs'"]),
        (SAMPLES[ROCM] * 2, ["2 tables"]),
        (SAMPLES[ROCM].replace("XGMI", "YGMI"), ["line 28", "GPU0 to GPU1 is 'YGMI', expected XGMI or PCIE"]),
        (SAMPLES[ROCM].replace("  15  ", "  17  "), ["line 6", "is '17'", "15 for each link"]),
        (edited("mi210-8-hives.rocm-smi.txt", ("GPU[3]\t\t: (Topology) Numa Node: 0\n", "")), ["GPU3", "Numa Node"]),
        (SAMPLES[ROCM][: SAMPLES[ROCM].index("Link Type between two GPUs") + 40], ["expected the names of the GPUs"]),
    ],
)  # fmt: skip
def test_a_broken_text_is_refused_with_the_place_and_the_reason(text: str, words: list[str]) -> None:
    message = refusal(text)
    for word in words:
        assert word in message


def test_cells_that_are_no_tree_are_refused_where_pcie_is_needed() -> None:
    cells = {(0, 1): "PIX", (1, 2): "PIX", (0, 2): "SYS"}
    assert "line 2: GPU0 to 'GPU2' is SYS, but other cells put them nearer" in refusal(table(cells, 3))
    cells = {(0, 1): "NV2", (1, 2): "NV2", (0, 2): "SYS"}
    assert import_topology(table(cells, 3), "three").topology.world_size == 3


BOMB = """<?xml version="1.0"?>
<!DOCTYPE system [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>
<system version="1">&b;</system>"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, ["line 2", "document type"]),
        ('<!DOCTYPE system SYSTEM "file:///etc/passwd">\n<system version="1"/>', ["line 1", "document type"]),
        ("<system version='1'>&lol;</system>", ["line 1", "not well-formed", "undefined entity"]),
        (SAMPLES[XML][:600], ["not well-formed"]),
        ("<", ["line 1", "not well-formed"]),
        ("<system version='1'/><system/>", ["not well-formed", "junk"]),
        ("<html></html>", ["line 1", "<html> is the root", "expected <system>"]),
        ("<system/>", ["line 1", "has no version"]),
        ("<system version='9'/>", ["line 1", "has version '9', expected version 1 (NCCL) or 2 (RCCL)"]),
        ("<system version='1'/>", ["no <gpu>"]),
        ("<system version='1'>" + "<pci>" * 100, ["nested too deep"]),
        (edited(XML, ("<cpu ", "<disk "), ("</cpu", "</disk")), ["line 2", "<disk> is in <system>, expected <cpu>"]),
        (edited(XML, ("<nvlink ", "<rope ")), ["line 6", "<rope> is in <gpu>"]),
        (edited(XML, ('target="0000:07:00.0"', 'target="0000:99:00.0"')), ["line 6", "'0000:99:00.0'", "no GPU of"]),
        (edited(XML, ('target="0000:07:00.0"', 'target="0000:06:00.0"')), ["line 6", "a link to itself"]),
        (edited(XML, ('target="0000:07:00.0" ', "")), ["line 6", "has no target"]),
        (edited(XML, ('count="1"', 'count="2"')), ["line 5", "2 links to '0000:07:00.0' and 1 back"]),
        (edited(XML, ('count="1"', 'count="0"')), ["line 6", "count '0'", "1 or more"]),
        (edited(XML, ('count="1"', 'count="-1"')), ["line 6", "count '-1'"]),
        (edited(XML, ('count="1" ', "")), ["line 6", "has no count"]),
        (edited(XML, ('rank="1"', 'rank="0"')), ["line 12", "has rank 0 as that of line 5"]),
        (edited(XML, ('rank="1"', 'rank="one"')), ["line 12", "rank 'one'"]),
        (edited(XML, ("0000:07:00.0", "0000:06:00.0")), ["expected links to another GPU"]),
        (SAMPLES[XML].replace('busid="0000:07:00.0"', 'busid="0000:06:00.0"'), ["same busid"]),
        (SAMPLES[XML].replace('busid="0000:07:00.0"', ""), ["line 11", "has no busid"]),
        (SAMPLES[XML].replace('sm="70"', 'sm="110"'), ["line 5", "sm '110'", "link_bandwidth given to the import"]),
        (edited(XML, ('sm="70"', 'sm="100"')), ["GPUs with sm 100 and 70"]),
        (edited(XML, ("<nvlink", "<xgmi")), ["<nvlink> and <xgmi>"]),
        (SAMPLES[XML].replace("</gpu>", "</gpu><pci/>"), ["line 4", "both a GPU and other PCI devices"]),
        (SAMPLES["h100-8-vm.nccl.xml"].replace("0x068000", "0x068001"), ["leads to a CPU"]),
    ],
)  # fmt: skip
def test_a_broken_xml_is_refused_with_the_place_and_the_reason(text: str, words: list[str]) -> None:
    message = refusal(text)
    for word in words:
        assert word in message


def test_gpus_of_several_hosts_are_joined_by_nvlink_only() -> None:
    """Two hosts in one NVLink domain, with the same PCI bus ids; without NVLink nothing in the file joins them."""
    text = re.sub(r' rank="\d"', "", SAMPLES["h100-8.nccl.xml"])
    again = re.findall(r"(?s)  <cpu .*</cpu>\n", text.replace("0x9a1c55d07b2e4f63", "0x1"))[0]
    both = text.replace("</system>", again + "</system>")
    topology = import_topology(both, "two").topology
    assert (topology.world_size, len(topology.links)) == (16, 32)
    assert "several hosts" in refusal(re.sub(r" *<nvlink .*\n", "", both))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pcie_bandwidth": "10GB/s"}, ["pcie_bandwidth was given"]),
        ({"cpu_bandwidth": "10GB/s"}, ["cpu_bandwidth was given"]),
        ({"link_bandwidth": "1e30GB/s"}, ["bandwidth_bytes_per_s"]),
    ],
)
def test_what_is_given_must_have_a_use(options: dict[str, str], words: list[str]) -> None:
    message = refusal(SAMPLES[H100], **options)
    for word in words:
        assert word in message
    assert "link_bandwidth was given" in refusal(SAMPLES["l40s-4.nvidia-smi.txt"], link_bandwidth="25GB/s")
    assert "nvswitch was given" in refusal(SAMPLES[ROCM], nvswitch=True)


def test_a_name_and_a_bandwidth_must_be_ones() -> None:
    with pytest.raises(QuantityError, match="expected a number and a unit"):
        imported(H100, link_bandwidth="fast")
    for name in ("", " ", "a\nb", "a\u202eb"):
        with pytest.raises(TopologyError, match="no name"):
            import_topology(SAMPLES[H100], name)


PIECES = st.sampled_from(
    ["NV1", "NV18", "PIX", "PXB", "NODE", "SYS", " X ", "N/A", "GPU0", "GPU1", "GPU77", "NIC0", "XGMI", "PCIE", "15",
     "30", "0", "-1", "9" * 30, "\t", "\n", " ", "\x1b[4m", "Link Type between two GPUs", "<", ">", "/>", "&amp;", '"',
     "<gpu/>", "</pci>", "<pci>", "<cpu>", "0x068000", "0000:06:00.0", 'count="3"', 'sm="60"']
)  # fmt: skip


@st.composite
def mutations(draw: st.DrawFn) -> str:
    """A sample in which some pieces are cut, copied elsewhere, or replaced."""
    text = draw(st.sampled_from(sorted(SAMPLES.values())))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = start + draw(st.integers(0, 12) | st.integers(0, 2000))
        cut = text[start:end]
        new = draw(st.sampled_from(["", cut + cut, cut[::-1]]) | PIECES | st.text(max_size=5))
        text = text[:start] + new + text[end:]
    return text


@st.composite
def shuffled_lines(draw: st.DrawFn) -> str:
    """A sample in which a few lines are swapped or missing."""
    lines = draw(st.sampled_from(sorted(SAMPLES.values()))).splitlines()
    for _ in range(draw(st.integers(1, 3))):
        a, b = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        lines[a], lines[b] = lines[b], lines[a]
        del lines[b : b + draw(st.integers(0, 2))]
    return "\n".join(lines)


OPTIONS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "pcie": st.none() | st.booleans(),
        "nvswitch": st.sampled_from([None, None, None, True, False]),
        "link_bandwidth": st.sampled_from([None, None, "20GB/s"]),
    }
)


def import_or_message(text: str, options: dict[str, Any]) -> Machine | str:
    """The machine, or the message of its refusal. Any other error is a bug."""
    try:
        return import_topology(text, "fuzz", **options)
    except TopologyError as error:
        return str(error)


def check_import(text: str, options: dict[str, Any], folder: Path) -> None:
    found = import_or_message(text, options)
    if isinstance(found, str):
        assert len(found.splitlines()) == 1
        assert found.isprintable()
    else:
        path = folder / "fuzz.json"
        path.write_text(json.dumps(topology_document(found)))
        assert load_machine(str(path)) == found


TEXTS = st.text() | st.text("GPU01 X\nNV\t<>/&!") | st.text("<>/'=ab \n").map("<system version='1'>".__add__)


@pytest.mark.parametrize("texts", [mutations(), shuffled_lines(), TEXTS], ids=["mutated", "shuffled", "any"])
@settings(max_examples=200)
@given(data=st.data(), options=OPTIONS)
def test_any_text_is_a_machine_or_refused_in_one_line(
    texts: st.SearchStrategy[str],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    options: dict[str, Any],
) -> None:
    check_import(data.draw(texts), options, tmp_path_factory.getbasetemp())
