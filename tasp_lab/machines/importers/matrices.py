"""Matrices of GPUs in text: what ``nvidia-smi topo -m`` and ``rocm-smi --showtopo`` print.

**Matrices** are square tables in text: a header with names, and below it one row per name with a cell for each column.
Both nvidia-smi and rocm-smi print such tables of GPUs; nvidia-smi adds columns for NICs and, after the cells, words
about CPUs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import parse_bandwidth_bytes_per_s
from tasp_lab.machines.importers.survey import (
    PCIE_BANDWIDTH,
    Branch,
    Given,
    Leaf,
    Nic,
    Pair,
    PcieSurvey,
    Survey,
    groups,
    nics_of,
    shown,
)
from tasp_lab.machines.parameters import Constant

GPU = re.compile(r"GPU[0-9]+")
"""The name of a GPU as both tools write it."""


@dataclass(frozen=True)
class Row:
    """The words after the name of a row, and the number of its line, counted from 1."""

    line: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """A table: the names of its columns, and the rows of the GPUs among them, in the order of the columns.

    `last_line` is the number of the line in which the table ends.
    """

    columns: tuple[str, ...]
    gpus: tuple[str, ...]
    rows: tuple[Row, ...]
    last_line: int

    def cells(self) -> Iterator[tuple[str, Row, str, str]]:
        """Each GPU with its row, and for each column the cell in it."""
        for gpu, row in zip(self.gpus, self.rows, strict=True):
            for column, cell in zip(self.columns, row.words, strict=False):
                yield gpu, row, column, cell

    def symmetric_cells(self, diagonal: str) -> dict[Pair, str]:
        """The cell of each two GPUs. Raises if it is another the other way round, or if the diagonal differs."""
        for gpu, row, column, cell in self.cells():
            if gpu == column and cell != diagonal:
                raise TopologyError(f"line {row.line}: {gpu} to itself is {shown(cell)}, expected {diagonal}")
        place_of = {column: place for place, column in enumerate(self.columns)}
        places = [place_of[gpu] for gpu in self.gpus]
        cells = {}
        for a, b in combinations(range(len(self.gpus)), 2):
            there, back = self.rows[a].words[places[b]], self.rows[b].words[places[a]]
            if there != back:
                raise TopologyError(
                    f"line {self.rows[a].line}: {self.gpus[a]} to {self.gpus[b]} is {shown(there)}, but "
                    f"{shown(back)} the other way round in line {self.rows[b].line}"
                )
            cells[a, b] = there
        return cells


def read_matrix(lines: Sequence[str], header: int, columns: Sequence[str]) -> Matrix:
    """The table below the line with index `header`, which names the columns; it ends before a line that is no row.

    Raises `TopologyError` if a GPU has no row or more than one, if a row has no column, or has too few cells.
    """
    gpus = [column for column in columns if GPU.fullmatch(column)]
    if len(set(columns)) < len(columns):
        raise TopologyError(f"line {header + 1}: a column is there twice, expected each GPU once")
    rows: dict[str, Row] = {}
    for line, text in enumerate(lines[header + 1 :], header + 2):
        name, *words = text.split() or [""]
        if name not in columns and not GPU.fullmatch(name):
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
    return Matrix(tuple(columns), tuple(gpus), tuple(rows[gpu] for gpu in gpus), header + 1 + len(rows))


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
# well, their switches are below another one; with ``PHB`` and ``NODE`` as well, they are in one NUMA node. NUMA nodes
# are ``SYS`` from each other.
#
# A cell ``NV#`` hides what PCIe does between two GPUs. There the NICs often tell; and two GPUs with the same CPU
# affinity are in one NUMA node.

_PIX, _PXB, _NODE, _SYS = range(4)

LEVELS = {"PIX": _PIX, "PXB": _PXB, "PHB": _NODE, "NODE": _NODE, "SYS": _SYS, "SOC": _SYS}
"""For each cell that means PCIe how much there is between the devices; ``SOC`` is what old drivers print for SYS."""

NEARNESS = tuple(LEVELS)
"""The cells that mean PCIe, the nearest first."""


def survey_pcie(matrix: Matrix, cells: Mapping[Pair, str], constant: Constant) -> PcieSurvey:
    """The tree, with the bandwidth of the constant on all its links; `cells` are those of pairs of GPUs.

    Raises `TopologyError` if cells contradict each other, so that there is no tree.
    """
    known = [(gpu, column, LEVELS[cell]) for gpu, _, column, cell in matrix.cells() if cell in LEVELS]
    known += _same_affinity(matrix, cells)
    parts = [
        groups(matrix.columns, [(a, b) for a, b, level in known if level <= highest]) for highest in (_PIX, _PXB, _NODE)
    ]
    _check_tree(matrix, parts)
    leaves = {gpu: Leaf(rank, parse_bandwidth_bytes_per_s(constant.value)) for rank, gpu in enumerate(matrix.gpus)}
    numa_nodes = tuple(Branch("numa", _below(node, [parts[_PXB], parts[_PIX]], leaves)) for node in parts[_NODE])
    return PcieSurvey(numa_nodes, (constant,))


def _same_affinity(matrix: Matrix, cells: Mapping[Pair, str]) -> Iterator[tuple[str, str, int]]:
    """Pairs of GPUs whose cell does not tell, but which the same CPUs are near to: the word after the cells."""
    count = len(matrix.columns)
    affinity = [next(iter(row.words[count:]), "N/A") for row in matrix.rows]
    for (a, b), cell in cells.items():
        if cell not in LEVELS and affinity[a] == affinity[b] != "N/A":
            yield matrix.gpus[a], matrix.gpus[b], _NODE


def _check_tree(matrix: Matrix, parts: Sequence[list[list[str]]]) -> None:
    """No two devices may be nearer over others than their own cell says."""
    place = [{device: index for index, part in enumerate(level) for device in part} for level in parts]
    for gpu, row, column, cell in matrix.cells():
        level = LEVELS.get(cell, _PIX)
        if level > _PIX and place[level - 1][gpu] == place[level - 1][column]:
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
    "25GB/s",
    "assumption, as nvidia-smi topo -m does not name the generation: one NVLink 2, 3 or 4 (V100, A100, H100), each "
    "way; NVLink 1 has 20GB/s, NVLink 5 has 50GB/s (NVIDIA Tesla P100, Tesla V100, A100 and H100 white papers; for "
    "Blackwell the NVIDIA NVLink page: 18 links, 1.8 TB/s both ways)",
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
    header = next(index for index, line in enumerate(lines) if _begins_with_gpu(line))
    matrix = read_matrix(lines, header, _columns(lines[header], header + 1))
    for line, text in enumerate(lines[matrix.last_line :], matrix.last_line + 1):
        if _begins_with_gpu(text):
            raise TopologyError(f"line {line}: a row below the matrix, which ends in line {matrix.last_line}")
    for gpu, row, column, word in matrix.cells():
        if column != gpu and word not in LEVELS and not _NVLINK.fullmatch(word):
            expected = "expected NV#, PIX, PXB, PHB, NODE or SYS"
            raise TopologyError(f"line {row.line}: {gpu} to {shown(column)} is {shown(word)}, {expected}")
    cells = matrix.symmetric_cells("X")
    links = {pair: int(match[1]) for pair, cell in cells.items() if (match := _NVLINK.fullmatch(cell))}
    cables, switches = _wiring(matrix, cells, links, options.nvswitch)
    return Survey(
        tool="nvidia-smi topo -m",
        lines=f"lines {header + 1} to {matrix.last_line}",
        fabric="NVLink",
        gpu_count=len(matrix.gpus),
        cables=cables,
        switches=switches,
        wiring_source=_reason(bool(switches), options.nvswitch) if links else "no cell NV#",
        link_bandwidth=options.constant(NVLINK_BANDWIDTH) if links else None,
        pcie=lambda: survey_pcie(matrix, cells, options.constant(PCIE_BANDWIDTH)),
        nic_count=len(matrix.columns) - len(matrix.gpus),
        nics=_nics(matrix),
    )


def _nics(matrix: Matrix) -> tuple[Nic, ...]:
    """The NICs that GPUs use: the nearest by PCIe. The matrix does not tell their bandwidth."""
    names = [column for column in matrix.columns if column not in matrix.gpus]
    places = [matrix.columns.index(name) for name in names]

    def distance(rank: int, nic: int) -> int:
        return NEARNESS.index(matrix.rows[rank].words[places[nic]])

    return nics_of(len(matrix.gpus), names, distance, [None] * len(names))


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


# ------------------------------------------------------------------------------------------------ rocm-smi --showtopo
#
# ``Link Type between two GPUs`` is ``XGMI`` or ``PCIE``, but the former also for GPUs that reach each other over a
# third one, and ``Hops`` is then still 1. The *weight* differs: it is 15 for each xGMI link on the way
# (ROCm/rocm-systems#5763 and #7372; an MI250X with weights of 15 and 30 in openmm/openmm#3940). So a cable is where the
# type is ``XGMI`` and the weight is 15. How many links are in parallel is not printed: one is assumed, and an MI250X
# has up to four.
#
# PCIe is known by NUMA node only: GPUs of one node meet in it, each with its own PCIe link.

XGMI_BANDWIDTH = Constant(
    "link_bandwidth",
    "64GB/s",
    "assumption, as rocm-smi --showtopo does not name the GPU: raw rate of one xGMI link of MI300X, each way "
    "(Kolla, Alizadeh, Lee, 'Understanding RCCL Bandwidth and xGMI Performance on AMD Instinct MI300X', 2025-03-02, "
    "https://rocm.blogs.amd.com/software-tools-optimization/mi300x-rccl-xgmi/README.html)",
)

_TYPES = "Link Type between two GPUs"
_WEIGHTS = "Weight between two GPUs"
_WEIGHT_OF_LINK = 15
_NUMA_NODE = re.compile(r"\s*GPU ?\[?([0-9]+)\]?\s*:\s*\(Topology\) Numa Node:\s*(-?[0-9]+)\s*")


def is_rocm_smi(lines: Sequence[str]) -> bool:
    """Whether a line is the title of one of the tables.

    >>> is_rocm_smi(["=========== Link Type between two GPUs ==========="])
    True
    """
    return any(title in line for line in lines for title in (_TYPES, _WEIGHTS))


def read_rocm_smi(lines: Sequence[str], options: Given) -> Survey:
    """What the tables say. Raises `TopologyError` that names the line where they are no such tables."""
    types, weights = _table(lines, _TYPES), _table(lines, _WEIGHTS)
    if types.gpus != weights.gpus:
        raise TopologyError(f"the tables {_TYPES!r} and {_WEIGHTS!r} have other GPUs, expected the same in both")
    cables = _cables(types, weights)
    return Survey(
        tool="rocm-smi --showtopo",
        lines=f"lines {types.rows[0].line} to {types.last_line} and {weights.rows[0].line} to {weights.last_line}",
        fabric="xGMI",
        gpu_count=len(types.gpus),
        cables=cables,
        switches=(),
        wiring_source=f"pairs of type XGMI and weight {_WEIGHT_OF_LINK}; assumption: one link per pair, as the tool "
        "does not print how many",
        link_bandwidth=options.constant(XGMI_BANDWIDTH) if cables else None,
        pcie=lambda: _numa_nodes(lines, types.gpus, options.constant(PCIE_BANDWIDTH)),
    )


def _table(lines: Sequence[str], title: str) -> Matrix:
    titles = [index for index, line in enumerate(lines) if title in line]
    if len(titles) != 1:
        raise TopologyError(f"{len(titles)} tables {title!r}, expected one of each that rocm-smi --showtopo prints")
    header = titles[0] + 1
    columns = lines[header].split() if header < len(lines) else []
    if not columns or not all(GPU.fullmatch(column) for column in columns):
        raise TopologyError(
            f"line {header + 1}: expected the names of the GPUs, as GPU0 GPU1, below the title {title!r}"
        )
    matrix = read_matrix(lines, header, columns)
    for gpu, row in zip(matrix.gpus, matrix.rows, strict=True):
        if len(row.words) > len(columns):
            raise TopologyError(f"line {row.line}: {gpu} has {len(row.words)} cells, expected {len(columns)}")
    return matrix


def _cables(types: Matrix, weights: Matrix) -> dict[Pair, int]:
    cables = {}
    weight_of = weights.symmetric_cells("0")
    for pair, kind in types.symmetric_cells("0").items():
        a, b = pair
        if kind not in ("XGMI", "PCIE"):
            raise TopologyError(
                f"line {types.rows[a].line}: {types.gpus[a]} to {types.gpus[b]} is {shown(kind)}, expected XGMI or PCIE"
            )
        weight = weight_of[pair]
        if not re.fullmatch("[0-9]{1,6}", weight) or (
            kind == "XGMI" and (int(weight) % _WEIGHT_OF_LINK or not int(weight))
        ):
            raise TopologyError(
                f"line {weights.rows[a].line}: the weight of {types.gpus[a]} to {types.gpus[b]}, {kind}, is "
                f"{shown(weight)}, expected a number, and {_WEIGHT_OF_LINK} for each link where it is XGMI"
            )
        if kind == "XGMI" and int(weight) == _WEIGHT_OF_LINK:
            cables[pair] = 1
    return cables


def _numa_nodes(lines: Sequence[str], gpus: Sequence[str], constant: Constant) -> PcieSurvey:
    node_of = {f"GPU{match[1]}": match[2] for line in lines if (match := _NUMA_NODE.fullmatch(line))}
    if missing := [gpu for gpu in gpus if gpu not in node_of]:
        raise TopologyError(
            f"{missing[0]} has no line '(Topology) Numa Node', expected one as rocm-smi --showtopo prints: "
            "PCIe is needed where xGMI does not join all GPUs"
        )
    bandwidth_bytes_per_s = parse_bandwidth_bytes_per_s(constant.value)
    members: dict[str, list[Leaf]] = {}
    for rank, gpu in enumerate(gpus):
        members.setdefault(node_of[gpu], []).append(Leaf(rank, bandwidth_bytes_per_s))
    return PcieSurvey(tuple(Branch("numa", tuple(leaves)) for leaves in members.values()), (constant,))
