"""Matrices of GPUs in text: what ``nvidia-smi topo -m``, ``amd-smi topology`` and ``rocm-smi --showtopo`` print.

**Matrices** are square tables in text: a header with names, and below it one row per name with a cell for each column.
All these tools print such tables of GPUs; nvidia-smi adds columns for NICs and, after the cells, words about CPUs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import msgspec

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import parse_bandwidth_bytes_per_s
from tasp_lab.machines.importers.survey import (
    LINK_GENERATIONS,
    NODE,
    PCIE_BANDWIDTH,
    PHB,
    PIX,
    PXB,
    SYS,
    Branch,
    Given,
    Leaf,
    Nics,
    Pair,
    PcieSurvey,
    Survey,
    groups,
    nics_of,
    shown,
)
from tasp_lab.machines.parameters import Constant

GPU = re.compile(r"GPU[0-9]+")
"""The name of a GPU in the tables of nvidia-smi and rocm-smi."""

BUS_ID = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
"""Its name in those of amd-smi."""


@dataclass(frozen=True)
class Row:
    """The words after the name of a row, and the number of its line, counted from 1."""

    line: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """A table: the names of its columns, and the rows of the GPUs among them, in the order of the columns.

    `last_line` is the number of the line in which the table ends. `others` are the rows of other devices.
    """

    columns: tuple[str, ...]
    gpus: tuple[str, ...]
    rows: tuple[Row, ...]
    last_line: int
    others: Mapping[str, Row]

    def cells(self) -> Iterator[tuple[str, Row, str, str]]:
        """Each GPU with its row, and for each column the cell in it."""
        for gpu, row in zip(self.gpus, self.rows, strict=True):
            for column, cell in zip(self.columns, row.words, strict=False):
                yield gpu, row, column, cell

    def symmetric_cells(self, diagonal: str) -> dict[Pair, str]:
        """The cell of each two GPUs. Raises if one is another the other way round, or if the diagonal differs."""
        for gpu, row, column, cell in self.cells():
            if gpu == column and cell != diagonal:
                raise TopologyError(f"line {row.line}: {gpu} to itself is {shown(cell)}, expected {diagonal}")
        rows = dict(zip(self.gpus, self.rows, strict=True)) | dict(self.others)
        place_of = {column: place for place, column in enumerate(self.columns)}
        for gpu, row, column, there in self.cells():
            back = rows.get(column)  # that of a NIC may be missing or short
            if back is not None and there != (*back.words[place_of[gpu] :], there)[0]:
                raise TopologyError(
                    f"line {row.line}: {gpu} to {shown(column)[1:-1]} is {shown(there)}, but "
                    f"{shown(back.words[place_of[gpu]])} the other way round in line {back.line}"
                )
        places = [place_of[gpu] for gpu in self.gpus]
        return {(a, b): self.rows[a].words[places[b]] for a, b in combinations(range(len(self.gpus)), 2)}


def read_matrix(lines: Sequence[str], header: int, columns: Sequence[str], of_gpu: re.Pattern[str] = GPU) -> Matrix:
    """The table below the line with index `header`, which names the columns; it ends before a line that is no row.

    `of_gpu` matches the names of GPUs.

    Raises `TopologyError` if a GPU has no row or more than one, if a row has no column, or has too few cells.
    """
    gpus = [column for column in columns if of_gpu.fullmatch(column)]
    if len(set(columns)) < len(columns):
        raise TopologyError(f"line {header + 1}: a column is there twice, expected each GPU once")
    rows: dict[str, Row] = {}
    for line, text in enumerate(lines[header + 1 :], header + 2):
        name, *words = text.split() or [""]
        if name not in columns and not of_gpu.fullmatch(name):
            break
        if name not in columns:
            raise TopologyError(f"line {line}: {shown(name)} has a row but no column in line {header + 1}")
        if name in rows:
            raise TopologyError(f"line {line}: {shown(name)} has another row in line {rows[name].line}")
        if name in gpus and len(words) < len(columns):
            raise TopologyError(f"line {line}: {name} has {len(words)} cells, expected {len(columns)}, one per column")
        rows[name] = Row(line, tuple(words))
    if missing := [gpu for gpu in gpus if gpu not in rows]:
        raise TopologyError(f"line {header + 1}: {missing[0]} has a column but no row below")
    of_gpus = tuple(rows.pop(gpu) for gpu in gpus)
    return Matrix(tuple(columns), tuple(gpus), of_gpus, header + 1 + len(of_gpus) + len(rows), rows)


# ------------------------------------------------------------------------------------------------- nvidia-smi topo -m
#
# A cell shows how two devices reach each other: ``NV#`` over # NVLinks, else the nearest thing that they share on PCIe:
# ``PIX`` one PCIe switch, ``PXB`` several of them, ``PHB`` or ``NODE`` the NUMA node, ``SYS`` (once ``SOC``) the way
# between NUMA nodes.
#
# **NVLink.** Cables and switches look alike in the matrix: behind NVSwitch each cell shows all links of the GPU. So the
# links in a row are added up; where that is more than any GPU has (`MAX_LINKS`), they end in a switch, else they are
# cables. Both may be right for two GPUs (where it makes no difference) and for few that share a larger machine; then
# ``nvswitch`` decides.
#
# **PCIe.** Devices, GPUs and NICs alike, that a chain of cells ``PIX`` joins are below one PCIe switch; with ``PXB`` as
# well, their switches are below another one; with ``PHB`` and ``NODE`` as well, they are in one NUMA node.
#
# What a cell does not tell, the affinities tell: two GPUs with the same NUMA affinity (or the same CPU affinity, where
# that column is missing or empty) are in one NUMA node if the cell is ``NV#``, which hides PCIe. So they are if it is
# ``SYS``, where no GPUs are ``PHB`` or ``NODE``: some systems print ``SYS`` for all that share no PCIe switch.

LEVELS = {"PIX": PIX, "PXB": PXB, "PHB": PHB, "NODE": NODE, "SYS": SYS, "SOC": SYS}
"""For each cell that means PCIe how much there is between the devices; ``SOC`` is what old drivers print for SYS."""

_CLOSER = {PXB: PIX, PHB: PXB, NODE: PXB, SYS: NODE}
"""For each level the one at which two devices of that level are apart."""

_AFFINITY = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?(?:,[0-9]{1,6}(?:-[0-9]{1,6})?)*")
"""CPUs or NUMA nodes, like ``0-55,112-167``."""


def survey_pcie(matrix: Matrix, numa_nodes: Sequence[list[str]], constant: Constant) -> PcieSurvey:
    """The tree, with the bandwidth of the constant on all its links.

    Raises `TopologyError` if cells contradict each other, so that there is no tree.
    """
    parts = {level: groups(matrix.columns, _pairs_within(matrix, level)) for level in (PIX, PXB, NODE)}
    _check_tree(matrix, parts)
    leaves = {gpu: Leaf(rank, parse_bandwidth_bytes_per_s(constant.value)) for rank, gpu in enumerate(matrix.gpus)}
    numbers = _numbers(matrix)
    branches = tuple(
        Branch(
            "cpu",
            _below(node, [parts[PXB], parts[PIX]], leaves),
            number=next((numbers[gpu] for gpu in node if gpu in numbers), None),
        )
        for node in numa_nodes
    )
    node_of = {device: index for index, node in enumerate(numa_nodes) for device in node}
    overruled = any(
        LEVELS.get(cell) == SYS and column in leaves and node_of[gpu] == node_of[column]
        for gpu, _, column, cell in matrix.cells()
    )
    source = "assumption: by affinity, though cells are SYS" if overruled else "by cells and affinities"
    return PcieSurvey(branches, source, (constant,))


def _pairs_within(matrix: Matrix, level: int) -> list[tuple[str, str]]:
    return [(gpu, column) for gpu, _, column, cell in matrix.cells() if LEVELS.get(cell, SYS) <= level]


def _numa_nodes(matrix: Matrix) -> list[list[str]]:
    """The devices by NUMA node, as cells and affinities tell."""
    cells = matrix.symmetric_cells("X")
    sys_tells = any(LEVELS.get(cell) in (PHB, NODE) for cell in cells.values())
    affinities = [_affinities(matrix, row) for row in matrix.rows]
    same = []
    for (a, b), cell in cells.items():
        (cpus, numa), (other_cpus, other_numa) = affinities[a], affinities[b]
        is_same = numa == other_numa if numa and other_numa else cpus and cpus == other_cpus
        if is_same and not (cell in LEVELS and sys_tells):
            same.append((matrix.gpus[a], matrix.gpus[b]))
    return groups(matrix.columns, [*_pairs_within(matrix, NODE), *same])


def _affinities(matrix: Matrix, row: Row) -> tuple[str, str]:
    """The CPU and the NUMA affinity of a row: the words after the cells; empty where there is none, as for ``N/A``."""
    cpus, numa = (*row.words[len(matrix.columns) :], "", "")[:2]
    return cpus if _AFFINITY.fullmatch(cpus) else "", numa if _AFFINITY.fullmatch(numa) else ""


def _numbers(matrix: Matrix) -> dict[str, int]:
    """The number of the NUMA node of each GPU; of equal parts of the CPUs, where only the CPU affinity tells.

    CPUs 16-31 are those of the second part, of 16 CPUs each: Linux counts the cores node by node.
    """
    found = [_affinities(matrix, row) for row in matrix.rows]
    numa = [_AFFINITY.fullmatch(text) for _, text in found]
    cpus = [_AFFINITY.fullmatch(text) for text, _ in found]
    if all(numa):
        return {gpu: int(match[1]) for gpu, match in zip(matrix.gpus, numa, strict=True) if match}
    if not all(cpus):
        return {}
    ends = [(int(match[1]), int(match[2] or match[1])) for match in cpus if match]
    return {gpu: first // max(last - first + 1, 1) for gpu, (first, last) in zip(matrix.gpus, ends, strict=True)}


def _check_tree(matrix: Matrix, parts: Mapping[int, list[list[str]]]) -> None:
    """No two devices may be nearer over others than their own cell says."""
    place = {
        level: {device: index for index, part in enumerate(groups_at) for device in part}
        for level, groups_at in parts.items()
    }
    for gpu, row, column, cell in matrix.cells():
        closer = place.get(_CLOSER.get(LEVELS.get(cell, PIX), -1))
        if closer is not None and closer[gpu] == closer[column]:
            raise TopologyError(
                f"line {row.line}: {gpu} to {shown(column)} is {cell}, but other cells put them nearer to each other, "
                "expected a tree"
            )


def _below(
    devices: Sequence[str], parts: Sequence[list[list[str]]], leaves: Mapping[str, Leaf]
) -> tuple[Branch | Leaf, ...]:
    """The GPUs among the devices, under the switches that `parts` puts them, from the top down."""
    if not parts:
        return tuple(leaves[device] for device in devices if device in leaves)
    bandwidth_bytes_per_s = next(iter(leaves.values())).bandwidth_bytes_per_s
    here = set(devices)
    inside = [part for part in parts[0] if part[0] in here]
    return tuple(Branch("pcie", _below(part, parts[1:], leaves), bandwidth_bytes_per_s) for part in inside)


MAX_LINKS = 18
"""The most NVLinks of one GPU, Hopper and Blackwell (NVIDIA/nccl 081eafaf, src/graph/xml.cc, maxNvLinks)."""

NVLINK_BANDWIDTH = Constant(
    "link_bandwidth",
    LINK_GENERATIONS["sm 90"].bandwidth,
    "assumption, as nvidia-smi topo -m does not name the generation: one NVLink 2, 3 or 4 (V100, A100, H100), each "
    f"way; NVLink 1 has {LINK_GENERATIONS['sm 60'].bandwidth}, NVLink 5 {LINK_GENERATIONS['sm 100'].bandwidth}; "
    "--link-bandwidth and --profile of the import change it",
)

_NVLINK = re.compile(r"NV([1-9][0-9]?)")


def is_nvidia_smi(lines: Sequence[str]) -> bool:
    """Whether a line begins with the name of a GPU, as the header and the rows of the matrix do.

    >>> is_nvidia_smi(["", "        GPU0    GPU1    CPU Affinity"]), is_nvidia_smi(["GPU 0: NVIDIA H100"])
    (True, False)
    """
    return any(_begins_with_gpu(line) for line in lines)


def read_nvidia_smi(lines: Sequence[str], options: Given) -> Survey:
    """What the matrix says. Raises `TopologyError` that names the line where it is no such matrix."""
    begins = [index for index, line in enumerate(lines) if _begins_with_gpu(line)]
    # The line below the header begins with a name in it; a sentence above may begin with the name of a GPU as well.
    below = [next(iter(line.split()), "") for line in (*lines[1:], "")]
    header = next((index for index in begins if below[index] in lines[index].split()), begins[0])
    matrix = read_matrix(lines, header, _columns(lines[header], header + 1))
    for line, text in enumerate(lines[matrix.last_line :], matrix.last_line + 1):
        if _begins_with_gpu(text):
            raise TopologyError(f"line {line}: a row below the matrix, which ends in line {matrix.last_line}")
    for gpu, row, column, word in matrix.cells():
        if column != gpu and not _is_cell(word):
            expected = "expected NV#, PIX, PXB, PHB, NODE or SYS"
            raise TopologyError(f"line {row.line}: {gpu} to {shown(column)} is {shown(word)}, {expected}")
    for gpu, row in zip(matrix.gpus, matrix.rows, strict=True):
        count = sum(_is_cell(word) or word == "X" for word in row.words)
        if count > len(matrix.columns):
            raise TopologyError(f"line {row.line}: {gpu} has {count} cells, expected {len(matrix.columns)}")
    cells = matrix.symmetric_cells("X")
    links = {pair: int(match[1]) for pair, cell in cells.items() if (match := _NVLINK.fullmatch(cell))}
    cables, switches = _wiring(matrix, cells, links, options.nvswitch)
    numa_nodes = _numa_nodes(matrix)
    return Survey(
        tool="nvidia-smi topo -m",
        lines=f"lines {header + 1} to {matrix.last_line}",
        fabric="NVLink",
        gpu_count=len(matrix.gpus),
        cables=cables,
        switches=switches,
        wiring_source=_reason(bool(switches), options.nvswitch) if links else "no cell NV#",
        link_bandwidth=options.constant(NVLINK_BANDWIDTH) if links else None,
        pcie=lambda: survey_pcie(matrix, numa_nodes, options.constant(PCIE_BANDWIDTH)),
        nic_count=len(matrix.columns) - len(matrix.gpus),
        nics=_nics(matrix, numa_nodes),
    )


def _is_cell(word: str) -> bool:
    return word in LEVELS or _NVLINK.fullmatch(word) is not None


def _nics(matrix: Matrix, numa_nodes: Sequence[list[str]]) -> Nics:
    """The NICs that GPUs use, by cells; in one NUMA node nothing is as far as SYS. No bandwidth is in the matrix."""
    names = [column for column in matrix.columns if column not in matrix.gpus]
    node_of = {device: index for index, node in enumerate(numa_nodes) for device in node}
    levels: dict[str, list[int]] = {gpu: [] for gpu in matrix.gpus}
    for gpu, _, column, cell in matrix.cells():
        if column not in levels:
            levels[gpu].append(min(LEVELS.get(cell, SYS), NODE if node_of[gpu] == node_of[column] else SYS))
    return nics_of(names, list(levels.values()), [None] * len(names))


def _begins_with_gpu(line: str) -> bool:
    return GPU.fullmatch(next(iter(line.split()), "")) is not None


def _columns(header: str, line: int) -> list[str]:
    """The devices that the header names; what follows them is about CPUs."""
    words = header.split()
    columns = words[: next((index for index, word in enumerate(words) if word in ("CPU", "NUMA")), None)]
    if "X" in columns:
        raise TopologyError(f"line {line}: this is a row of the matrix, expected the header with the names of the GPUs")
    return columns


def _wiring(
    matrix: Matrix, cells: Mapping[Pair, str], links: Mapping[Pair, int], nvswitch: bool | None
) -> tuple[dict[Pair, int], tuple[dict[int, int], ...]]:
    """The NVLinks as cables and as links into switches; GPUs that NVLinks do not join have no switch in common."""
    cables: dict[Pair, int] = {}
    switches = []
    for members in groups(range(len(matrix.gpus)), links):
        inside = {pair: links[pair] for pair in combinations(members, 2) if pair in links}
        used: Counter[int] = Counter()
        for pair, count in inside.items():
            used.update(dict.fromkeys(pair, count))
        if inside and (max(used.values()) > MAX_LINKS if nvswitch is None else nvswitch):
            switches.append(_ports(matrix, cells, members, inside, _reason(True, nvswitch)))
        else:
            cables |= inside
    return cables, tuple(switches)


def _ports(
    matrix: Matrix, cells: Mapping[Pair, str], members: Sequence[int], links: Mapping[Pair, int], reason: str
) -> dict[int, int]:
    """How many links each member has into the switch that joins them all; between two, the smaller number shows."""
    ports = dict.fromkeys(members, 0)
    for pair, count in links.items():
        ports |= {rank: max(ports[rank], count) for rank in pair}
    for a, b in combinations(members, 2):
        expected = min(ports[a], ports[b])
        if links.get((a, b)) != expected:
            raise TopologyError(
                f"line {matrix.rows[a].line}: {matrix.gpus[a]} to {matrix.gpus[b]} is {cells[a, b]}, expected "
                f"NV{expected} behind a switch ({reason})"
            )
    return ports


def _reason(has_switch: bool, nvswitch: bool | None) -> str:
    if nvswitch is not None:
        return f"nvswitch={nvswitch} was given to the import"
    if has_switch:
        return f"a row adds up to more than the {MAX_LINKS} NVLinks that a GPU has at most, so they end in NVSwitch"
    return f"cables, as no row adds up to more than the {MAX_LINKS} NVLinks that a GPU has at most"


# -------------------------------------------------------------------------- amd-smi topology and rocm-smi --showtopo
#
# A *link type* is ``XGMI`` or ``PCIE``, but the former also for GPUs that reach each other over a third one, and the
# *hops* are then still 1. The *weight* differs: it is 15 for each xGMI link on the way (ROCm/rocm-systems#5763 and
# #7372; an MI250X with weights of 15 and 30 in openmm/openmm#3940). So a cable is where the type is ``XGMI`` and the
# weight is 15. amd-smi prints only the tables that it is asked for: either of the two is enough.
#
# How many links are in parallel follows from the *NUMA BW* of amd-smi: the bandwidth of one link and of all, in MB/s.
# Some drivers print ``0-0`` there, and rocm-smi has no such table: then one is assumed, and an MI250X has up to four.
#
# PCIe is known by NUMA node only: GPUs of one node meet in it, each with its own PCIe link. rocm-smi prints the node of
# each GPU. In amd-smi two *hops* lead over one node, three and more over several (ROCm/rocm_smi_lib, src/rocm_smi.cc,
# rsmi_topo_get_link_type), and the weight is 20 for each PCIe link on the way, so 40 over one node.

XGMI_BANDWIDTH = Constant(
    "link_bandwidth",
    LINK_GENERATIONS["gfx942"].bandwidth,
    f"assumption, as the tool does not name the GPU: {LINK_GENERATIONS['gfx942'].source}; --link-bandwidth and "
    "--profile of the import change it",
)

_WEIGHT_OF_LINK = 15
_NEAREST_HOPS, _NEAREST_WEIGHT = 2, 40
_NUMA_NODE = re.compile(r"\s*GPU ?\[?([0-9]+)\]?\s*:\s*\(Topology\) Numa Node:\s*(-?[0-9]{1,6})\s*")


class AmdTool(NamedTuple):
    """A tool: the form of the names of GPUs, the titles of its tables, and the type of the way of a GPU to itself."""

    name: str
    of_gpu: re.Pattern[str]
    types: str
    weights: str
    hops: str
    bandwidths: str
    itself: str


_ROCM_SMI = AmdTool(
    "rocm-smi --showtopo",
    GPU,
    "Link Type between two GPUs",
    "Weight between two GPUs",
    "Hops between two GPUs",
    "",
    "0",
)
_AMD_SMI = AmdTool("amd-smi topology", BUS_ID, "LINK TYPE TABLE", "WEIGHT TABLE", "HOPS TABLE", "NUMA BW TABLE", "SELF")


def amd_tool(lines: Sequence[str]) -> AmdTool | None:
    """The tool that has a table with the title in one of the lines; None if there is none.

    >>> amd_tool(["=========== Link Type between two GPUs ==========="]).name, amd_tool(["ACCESS TABLE:"]).name
    ('rocm-smi --showtopo', 'amd-smi topology')
    """
    if any(title in line for line in lines for title in (_ROCM_SMI.types, _ROCM_SMI.weights)):
        return _ROCM_SMI
    titles = ("ACCESS TABLE", _AMD_SMI.types, _AMD_SMI.weights, _AMD_SMI.hops, _AMD_SMI.bandwidths)
    return _AMD_SMI if any(line.strip().startswith(titles) for line in lines) else None


def read_amd(lines: Sequence[str], tool: AmdTool, options: Given) -> Survey:
    """What the tables say. Raises `TopologyError` that names the line where they are no such tables."""
    types, weights = (_table(lines, title, tool) for title in (tool.types, tool.weights))
    first = types or weights
    if first is None or (tool is _ROCM_SMI and not (types and weights)):
        missing = tool.weights if types else tool.types
        raise TopologyError(f"0 tables {missing!r}, expected one of each that {tool.name} prints")
    if weights is not None and weights.gpus != first.gpus:
        raise TopologyError(
            f"the tables {tool.types!r} and {tool.weights!r} have other GPUs, expected the same in both"
        )
    cables = _cables(types, weights, tool)
    stated = _stated_bandwidth(_bandwidths(lines, tool, first.gpus), cables)
    wiring = f"pairs of type XGMI and weight {_WEIGHT_OF_LINK}"
    if weights is None:
        wiring = "assumption: each pair of type XGMI is a link, as there is no table of weights"
    if stated is None:
        wiring += "; assumption: one link per pair, as the tool does not print how many"
    tables = [table for table in (types, weights) if table is not None]
    return Survey(
        tool=tool.name,
        lines=" and ".join(f"lines {table.rows[0].line} to {table.last_line}" for table in tables),
        fabric="xGMI",
        gpu_count=len(first.gpus),
        cables=cables,
        switches=(),
        wiring_source=wiring,
        link_bandwidth=options.constant(stated or XGMI_BANDWIDTH) if cables else None,
        pcie=lambda: _pcie_of_amd(lines, tool, first.gpus, options.constant(PCIE_BANDWIDTH)),
    )


def _table(lines: Sequence[str], title: str, tool: AmdTool) -> Matrix | None:
    """The table below a title; None if it is not there."""
    titles = [index for index, line in enumerate(lines) if title and title in line]
    if not titles:
        return None
    if len(titles) > 1:
        raise TopologyError(f"{len(titles)} tables {title!r}, expected one of each that {tool.name} prints")
    header = titles[0] + 1
    columns = lines[header].split() if header < len(lines) else []
    if not columns or not all(tool.of_gpu.fullmatch(column) for column in columns):
        example = "GPU0 GPU1" if tool is _ROCM_SMI else "0000:05:00.0 0000:26:00.0"
        raise TopologyError(
            f"line {header + 1}: expected the names of the GPUs, as {example}, below the title {title!r}"
        )
    matrix = read_matrix(lines, header, columns, tool.of_gpu)
    for gpu, row in zip(matrix.gpus, matrix.rows, strict=True):
        if len(row.words) > len(columns):
            raise TopologyError(f"line {row.line}: {gpu} has {len(row.words)} cells, expected {len(columns)}")
    return matrix


def _cables(types: Matrix | None, weights: Matrix | None, tool: AmdTool) -> dict[Pair, int]:
    """A link for each pair that has one."""
    weight_of = weights.symmetric_cells("0") if weights else {}
    kinds = types.symmetric_cells(tool.itself) if types else dict.fromkeys(weight_of, "")
    cables = {}
    for pair, kind in kinds.items():
        a, b = pair
        if types and kind not in ("XGMI", "PCIE"):
            raise TopologyError(
                f"line {types.rows[a].line}: {types.gpus[a]} to {types.gpus[b]} is {shown(kind)}, expected XGMI or PCIE"
            )
        weight = weight_of.get(pair, str(_WEIGHT_OF_LINK))
        if weights and (
            not re.fullmatch("[0-9]{1,6}", weight)
            or (kind == "XGMI" and (int(weight) % _WEIGHT_OF_LINK or not int(weight)))
        ):
            raise TopologyError(
                f"line {weights.rows[a].line}: the weight of {weights.gpus[a]} to {weights.gpus[b]}, {kind}, is "
                f"{shown(weight)}, expected a number, and {_WEIGHT_OF_LINK} for each link where it is XGMI"
            )
        if kind != "PCIE" and int(weight) == _WEIGHT_OF_LINK:
            cables[pair] = 1
    return cables


def _bandwidths(lines: Sequence[str], tool: AmdTool, gpus: Sequence[str]) -> dict[Pair, tuple[int, int]]:
    """The least and the most bandwidth of pairs in MB/s, as far as the table states them."""
    starts = [index for index, line in enumerate(lines) if tool.bandwidths and tool.bandwidths in line]
    found: dict[Pair, tuple[int, int]] = {}
    for start in starts:
        columns = (*lines[start + 1 : start + 2], "")[0].split()
        for line in lines[start + 2 :]:
            name, *cells = line.split() or [""]
            if name not in gpus:
                break
            for column, cell in zip(columns, cells, strict=False):
                match = re.fullmatch("([1-9][0-9]{0,8})-([1-9][0-9]{0,8})", cell)
                if match and column in gpus and column != name:
                    a, b = sorted((gpus.index(name), gpus.index(column)))
                    found[a, b] = int(match[1]), int(match[2])
    return found


def _stated_bandwidth(bandwidths: Mapping[Pair, tuple[int, int]], cables: dict[Pair, int]) -> Constant | None:
    """The bandwidth of a link, if it is stated; `cables` then gets the number of links of each pair."""
    ends = {pair: bandwidths[pair] for pair in cables if pair in bandwidths}
    if not ends:
        return None
    of_one = min(least for least, _ in ends.values())
    cables |= {pair: max(most // of_one, 1) for pair, (_, most) in ends.items()}
    return Constant(
        "link_bandwidth",
        f"{of_one / 1000:g}GB/s",
        "assumption: what the driver counts for one link, the first number in the NUMA BW TABLE; drivers may count the "
        "25 GT/s x 16 lanes of an MI200 for any GPU, so 50GB/s for an MI300X that has 64GB/s (Linux, "
        "drivers/gpu/drm/amd/amdgpu/amdgpu_amdkfd.c, amdgpu_amdkfd_get_xgmi_bandwidth_mbytes); --link-bandwidth and "
        "--profile of the import change it",
    )


def _pcie_of_amd(lines: Sequence[str], tool: AmdTool, gpus: Sequence[str], constant: Constant) -> PcieSurvey:
    """The NUMA nodes, by the lines of rocm-smi or by the hops and weights of amd-smi."""
    numbers: dict[int, int] = {}
    if tool is _ROCM_SMI:
        number_of = {f"GPU{match[1]}": int(match[2]) for line in lines if (match := _NUMA_NODE.fullmatch(line))}
        if missing := [gpu for gpu in gpus if gpu not in number_of]:
            raise TopologyError(
                f"{missing[0]} has no line '(Topology) Numa Node', expected one as rocm-smi --showtopo prints: "
                "PCIe is needed where xGMI does not join all GPUs"
            )
        numbers = {rank: number_of[gpu] for rank, gpu in enumerate(gpus)}
        near = [(a, b) for a, b in combinations(numbers, 2) if numbers[a] == numbers[b]]
        source = "by the lines '(Topology) Numa Node'"
    else:
        title, most = tool.hops, _NEAREST_HOPS
        table = _table(lines, title, tool)
        if table is None:
            title, most = tool.weights, _NEAREST_WEIGHT
            table = _table(lines, title, tool)
        if table is None or table.gpus != gpus:
            raise TopologyError(
                f"no table {tool.hops!r} of all GPUs, expected one: PCIe is needed where xGMI does not join them"
            )
        cells = table.symmetric_cells("0")
        near = [pair for pair, cell in cells.items() if re.fullmatch("[0-9]{1,6}", cell) and int(cell) <= most]
        source = f"assumption: up to {most} in the {title} is inside one"
    bandwidth_bytes_per_s = parse_bandwidth_bytes_per_s(constant.value)
    nodes = tuple(
        Branch(
            "cpu",
            tuple(Leaf(rank, bandwidth_bytes_per_s) for rank in ranks),
            number=numbers.get(ranks[0]) if numbers.get(ranks[0], -1) >= 0 else None,
        )
        for ranks in groups(range(len(gpus)), near)
    )
    return PcieSurvey(nodes, source, (constant,))


class _AmdLink(msgspec.Struct):
    """The way from one GPU to another in the JSON of amd-smi; it has the fields of the tables that were asked for."""

    bdf: str
    link_type: str = ""
    weight: int | str = ""
    num_hops: int | str = ""
    bandwidth: str = ""


class _AmdGpu(msgspec.Struct):
    bdf: str
    links: list[_AmdLink]


def lines_of_amd_json(text: str) -> list[str]:
    """The tables of ``amd-smi topology`` from what it prints with ``--json``. Raises `TopologyError` for other JSON.

    >>> lines_of_amd_json('[{"bdf": "0000:05:00.0", "links": [{"bdf": "0000:05:00.0", "weight": 0}]}]')
    ['WEIGHT TABLE:', '0000:05:00.0', '0000:05:00.0 0', '']
    """
    try:
        gpus = msgspec.json.decode(text, type=list[_AmdGpu])
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"the JSON is not what amd-smi topology --json prints: {error}") from error
    lines = []
    fields = {"link_type": _AMD_SMI.types, "weight": _AMD_SMI.weights, "num_hops": _AMD_SMI.hops}
    for field, title in (fields | {"bandwidth": _AMD_SMI.bandwidths}).items():
        cells = {gpu.bdf: {link.bdf: getattr(link, field) for link in gpu.links} for gpu in gpus}
        if any(cell != "" for row in cells.values() for cell in row.values()):
            rows = [" ".join([name, *(str(row.get(other, "?")) for other in cells)]) for name, row in cells.items()]
            lines += [f"{title}:", " ".join(cells), *rows, ""]
    return lines
