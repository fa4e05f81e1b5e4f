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


class Row(NamedTuple):
    """The words after the name of a row, and the number of its line, counted from 1."""

    line: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """A table: the names of its columns, the GPUs among them, and the rows of GPUs and other devices by name.

    `last_line` is the number of the line in which the table ends.
    """

    columns: Sequence[str]
    gpus: Sequence[str]
    rows: Mapping[str, Row]
    last_line: int

    def cells(self) -> Iterator[tuple[str, str, str, int]]:
        """Each GPU with each column, the cell there and the number of its line."""
        for gpu in self.gpus:
            row = self.rows[gpu]
            for column, cell in zip(self.columns, row.words, strict=False):
                yield gpu, column, cell, row.line

    def symmetric_cells(self, diagonal: str) -> dict[tuple[int, int], str]:
        """The cell of each two GPUs. Raises if one is another the other way round, or if the diagonal differs."""
        for gpu, column, cell, line in self.cells():
            if gpu == column and cell != diagonal:
                raise TopologyError(f"line {line}: {gpu} to itself is {shown(cell)}, expected {diagonal}")
        place_of = {column: place for place, column in enumerate(self.columns)}
        for gpu, column, there, line in self.cells():
            back = self.rows.get(column)  # that of a NIC may be missing or short
            if back is not None and there != (*back.words[place_of[gpu] :], there)[0]:
                raise TopologyError(
                    f"line {line}: {gpu} to {shown(column)[1:-1]} is {shown(there)}, but "
                    f"{shown(back.words[place_of[gpu]])} the other way round in line {back.line}"
                )
        ranks = combinations(range(len(self.gpus)), 2)
        return {(a, b): self.rows[self.gpus[a]].words[place_of[self.gpus[b]]] for a, b in ranks}

    def at(self, a: int, b: int) -> tuple[str, str]:
        """Where the cell of two GPUs is, for a message: its line, and their names."""
        return f"line {self.rows[self.gpus[a]].line}", f"{self.gpus[a]} to {self.gpus[b]}"


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
    return Matrix(columns, gpus, rows, header + 1 + len(rows))


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


def _begins_with_gpu(line: str) -> bool:
    return GPU.fullmatch(next(iter(line.split()), "")) is not None


def _is_cell(word: str) -> bool:
    return word in LEVELS or _NVLINK.fullmatch(word) is not None


def is_nvidia_smi(lines: Sequence[str]) -> bool:
    """Whether a line begins with the name of a GPU, as the header and the rows of the matrix do.

    >>> is_nvidia_smi(["", "        GPU0    GPU1    CPU Affinity"]), is_nvidia_smi(["GPU 0: NVIDIA H100"])
    (True, False)
    """
    return any(map(_begins_with_gpu, lines))


def read_nvidia_smi(lines: Sequence[str], options: Given) -> Survey:
    """What the matrix says. Raises `TopologyError` that names the line where it is no such matrix."""
    matrix, first_line = _nvidia_matrix(lines)
    cells = matrix.symmetric_cells("X")
    links = {pair: int(match[1]) for pair, cell in cells.items() if (match := _NVLINK.fullmatch(cell))}
    cables: dict[tuple[int, int], int] = {}
    switches: list[dict[int, int]] = []
    why = f"nvswitch={options.nvswitch} was given to the import"
    for members in groups(range(len(matrix.gpus)), links):  # GPUs that NVLinks do not join have no switch in common
        inside = {pair: links[pair] for pair in combinations(members, 2) if pair in links}
        used: Counter[int] = Counter()
        for pair, count in inside.items():
            used.update(dict.fromkeys(pair, count))
        if not inside or not (max(used.values()) > MAX_LINKS if options.nvswitch is None else options.nvswitch):
            cables |= inside
            continue
        if options.nvswitch is None:
            why = f"a row adds up to more than the {MAX_LINKS} NVLinks that a GPU has at most, so they end in NVSwitch"
        # how many links each has into the switch that joins them all: between two, the smaller number shows
        ports = {rank: max(count for pair, count in inside.items() if rank in pair) for rank in members}
        for a, b in combinations(members, 2):
            if inside.get((a, b)) != (expected := min(ports[a], ports[b])):
                line, gpus = matrix.at(a, b)
                raise TopologyError(f"{line}: {gpus} is {cells[a, b]}, expected NV{expected} behind a switch ({why})")
        switches.append(ports)
    if options.nvswitch is None and not switches:
        why = f"cables, as no row adds up to more than the {MAX_LINKS} NVLinks that a GPU has at most"
    numa_nodes = _numa_nodes(matrix, cells)
    node_of = {device: index for index, node in enumerate(numa_nodes) for device in node}
    nics = [column for column in matrix.columns if column not in matrix.gpus]
    levels: dict[str, list[int]] = {gpu: [] for gpu in matrix.gpus}
    for gpu, column, cell, _ in matrix.cells():
        if column not in levels:  # in one NUMA node nothing is as far as SYS
            levels[gpu].append(min(LEVELS.get(cell, SYS), NODE if node_of[gpu] == node_of[column] else SYS))
    return Survey(
        tool="nvidia-smi topo -m",
        lines=f"lines {first_line} to {matrix.last_line}",
        fabric="NVLink",
        gpu_count=len(matrix.gpus),
        cables=cables,
        switches=switches,
        wiring_source=why if links else "no cell NV#",
        link_bandwidth=options.constant(NVLINK_BANDWIDTH) if links else None,
        pcie=lambda: _nvidia_pcie(matrix, numa_nodes, options.constant(PCIE_BANDWIDTH)),
        nic_count=len(nics),
        nics=nics_of(nics, list(levels.values()), [None] * len(nics)),
    )


def _nvidia_matrix(lines: Sequence[str]) -> tuple[Matrix, int]:
    """The matrix and the number of its first line."""
    begins = [index for index, line in enumerate(lines) if _begins_with_gpu(line)]
    # The line below the header begins with a name in it; a sentence above may begin with the name of a GPU as well.
    below = [next(iter(line.split()), "") for line in (*lines[1:], "")]
    header = next((index for index in begins if below[index] in lines[index].split()), begins[0])
    words = lines[header].split()
    # what follows the devices is about CPUs
    columns = words[: next((index for index, word in enumerate(words) if word in ("CPU", "NUMA")), None)]
    if "X" in columns:
        raise TopologyError(
            f"line {header + 1}: this is a row of the matrix, expected the header with the names of the GPUs"
        )
    matrix = read_matrix(lines, header, columns)
    for line, text in enumerate(lines[matrix.last_line :], matrix.last_line + 1):
        if _begins_with_gpu(text):
            raise TopologyError(f"line {line}: a row below the matrix, which ends in line {matrix.last_line}")
    for gpu, column, word, line in matrix.cells():
        if column != gpu and not _is_cell(word):
            expected = "expected NV#, PIX, PXB, PHB, NODE or SYS"
            raise TopologyError(f"line {line}: {gpu} to {shown(column)} is {shown(word)}, {expected}")
    for gpu in matrix.gpus:
        count = sum(_is_cell(word) or word == "X" for word in matrix.rows[gpu].words)
        if count > len(columns):
            raise TopologyError(f"line {matrix.rows[gpu].line}: {gpu} has {count} cells, expected {len(columns)}")
    return matrix, header + 1


def _pairs_within(matrix: Matrix, level: int) -> list[tuple[str, str]]:
    return [(gpu, column) for gpu, column, cell, _ in matrix.cells() if LEVELS.get(cell, SYS) <= level]


def _affinities(matrix: Matrix) -> list[tuple[re.Match[str] | None, re.Match[str] | None]]:
    """The CPU and the NUMA affinity of each GPU, the words after its cells; None for other words, as ``N/A``."""
    words = [(*matrix.rows[gpu].words[len(matrix.columns) :], "", "") for gpu in matrix.gpus]
    return [(_AFFINITY.fullmatch(cpus), _AFFINITY.fullmatch(numa)) for cpus, numa, *_ in words]


def _numa_nodes(matrix: Matrix, cells: Mapping[tuple[int, int], str]) -> list[list[str]]:
    """The devices by NUMA node, as cells and affinities tell."""
    sys_tells = any(LEVELS.get(cell) in (PHB, NODE) for cell in cells.values())
    affinities = [[match and match[0] for match in pair] for pair in _affinities(matrix)]
    same = []
    for (a, b), cell in cells.items():
        (cpus, numa), (other_cpus, other_numa) = affinities[a], affinities[b]
        is_same = numa == other_numa if numa and other_numa else cpus and cpus == other_cpus
        if is_same and not (cell in LEVELS and sys_tells):
            same.append((matrix.gpus[a], matrix.gpus[b]))
    return groups(matrix.columns, [*_pairs_within(matrix, NODE), *same])


def _nvidia_pcie(matrix: Matrix, numa_nodes: Sequence[Sequence[str]], constant: Constant) -> PcieSurvey:
    """The tree, with the bandwidth of the constant on all its links.

    Raises `TopologyError` if cells contradict each other, so that there is no tree.
    """
    parts = {level: groups(matrix.columns, _pairs_within(matrix, level)) for level in (PIX, PXB, NODE)}
    place = {
        level: {device: index for index, part in enumerate(parts_there) for device in part}
        for level, parts_there in parts.items()
    }
    rank_of = {gpu: rank for rank, gpu in enumerate(matrix.gpus)}
    node_of = {device: index for index, node in enumerate(numa_nodes) for device in node}
    source = "by cells and affinities"
    for gpu, column, cell, line in matrix.cells():
        closer = place.get(_CLOSER.get(LEVELS.get(cell, PIX), -1))
        if closer is not None and closer[gpu] == closer[column]:
            raise TopologyError(
                f"line {line}: {gpu} to {shown(column)} is {cell}, but other cells put them nearer to each other, "
                "expected a tree"
            )
        if LEVELS.get(cell) == SYS and column in rank_of and node_of[gpu] == node_of[column]:
            source = "assumption: by affinity, though cells are SYS"
    bandwidth_bytes_per_s = parse_bandwidth_bytes_per_s(constant.value)

    def below(devices: Sequence[str], levels: Sequence[int]) -> tuple[Branch, ...]:
        """The GPUs among the devices, under the switches of these levels, from the top down."""
        if not levels:
            return tuple(Branch("gpu", (), bandwidth_bytes_per_s, rank_of[each]) for each in devices if each in rank_of)
        inside = [part for part in parts[levels[0]] if part[0] in devices]
        return tuple(Branch("pcie", below(part, levels[1:]), bandwidth_bytes_per_s) for part in inside)

    numbers = _numa_numbers(matrix)
    branches = [
        Branch("cpu", below(node, (PXB, PIX)), number=next((numbers[each] for each in node if each in numbers), None))
        for node in numa_nodes
    ]
    return PcieSurvey(branches, source, (constant,))


def _numa_numbers(matrix: Matrix) -> dict[str, int]:
    """The number of the NUMA node of each GPU; of equal parts of the CPUs, where only the CPU affinity tells.

    CPUs 16-31 are those of the second part, of 16 CPUs each: Linux counts the cores node by node.
    """
    affinities = dict(zip(matrix.gpus, _affinities(matrix), strict=True))
    if all(numa for _, numa in affinities.values()):
        return {gpu: int(numa[1]) for gpu, (_, numa) in affinities.items() if numa}
    if not all(cpus for cpus, _ in affinities.values()):
        return {}
    ends = {gpu: (int(cpus[1]), int(cpus[2] or cpus[1])) for gpu, (cpus, _) in affinities.items() if cpus}
    return {gpu: first // max(last - first + 1, 1) for gpu, (first, last) in ends.items()}


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
_NUMBER = re.compile("[0-9]{1,6}")
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
    cables = dict.fromkeys(_xgmi_pairs(types, weights, tool), 1)
    stated = None
    bandwidths = _bandwidths(lines, tool, first.gpus)
    if known := {pair: bandwidths[pair] for pair in cables if pair in bandwidths}:
        of_one = min(least for least, _ in known.values())
        cables |= {pair: max(most // of_one, 1) for pair, (_, most) in known.items()}
        stated = Constant("link_bandwidth", f"{of_one / 1000:g}GB/s", _STATED)
    wiring = f"pairs of type XGMI and weight {_WEIGHT_OF_LINK}"
    if weights is None:
        wiring = "assumption: each pair of type XGMI is a link, as there is no table of weights"
    if stated is None:
        wiring += "; assumption: one link per pair, as the tool does not print how many"
    tables = [table for table in (types, weights) if table is not None]
    return Survey(
        tool=tool.name,
        lines=" and ".join(f"lines {table.rows[table.gpus[0]].line} to {table.last_line}" for table in tables),
        fabric="xGMI",
        gpu_count=len(first.gpus),
        cables=cables,
        switches=(),
        wiring_source=wiring,
        link_bandwidth=options.constant(stated or XGMI_BANDWIDTH) if cables else None,
        pcie=lambda: _amd_pcie(lines, tool, first.gpus, options.constant(PCIE_BANDWIDTH)),
    )


_STATED = (
    "assumption: what the driver counts for one link, the first number in the NUMA BW TABLE; drivers may count the "
    "25 GT/s x 16 lanes of an MI200 for any GPU, so 50GB/s for an MI300X that has 64GB/s (Linux, "
    "drivers/gpu/drm/amd/amdgpu/amdgpu_amdkfd.c, amdgpu_amdkfd_get_xgmi_bandwidth_mbytes); --link-bandwidth and "
    "--profile of the import change it"
)


def _table(lines: Sequence[str], title: str, tool: AmdTool) -> Matrix | None:
    """The table below a title; None if it is not there."""
    titles = [index for index, line in enumerate(lines) if title in line]
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
    for gpu, row in matrix.rows.items():
        if len(row.words) > len(columns):
            raise TopologyError(f"line {row.line}: {gpu} has {len(row.words)} cells, expected {len(columns)}")
    return matrix


def _xgmi_pairs(types: Matrix | None, weights: Matrix | None, tool: AmdTool) -> Iterator[tuple[int, int]]:
    """The pairs with a link."""
    weight_of = weights.symmetric_cells("0") if weights else {}
    kinds = types.symmetric_cells(tool.itself) if types else dict.fromkeys(weight_of, "")
    for pair, kind in kinds.items():
        if types and kind not in ("XGMI", "PCIE"):
            line, gpus = types.at(*pair)
            raise TopologyError(f"{line}: {gpus} is {shown(kind)}, expected XGMI or PCIE")
        weight = weight_of.get(pair, str(_WEIGHT_OF_LINK))
        is_number = _NUMBER.fullmatch(weight) is not None
        whole = is_number and int(weight) > 0 and int(weight) % _WEIGHT_OF_LINK == 0
        if weights and not (whole if kind == "XGMI" else is_number):
            line, gpus = weights.at(*pair)
            raise TopologyError(
                f"{line}: the weight of {gpus}, {kind}, is {shown(weight)}, expected a number, and {_WEIGHT_OF_LINK} "
                "for each link where it is XGMI"
            )
        if kind != "PCIE" and int(weight) == _WEIGHT_OF_LINK:
            yield pair


def _bandwidths(lines: Sequence[str], tool: AmdTool, gpus: Sequence[str]) -> dict[tuple[int, int], tuple[int, int]]:
    """The least and the most bandwidth of pairs in MB/s, as far as the table states them: it may be cut off."""
    starts = [index for index, line in enumerate(lines) if tool.bandwidths and tool.bandwidths in line]
    found: dict[tuple[int, int], tuple[int, int]] = {}
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


def _amd_pcie(lines: Sequence[str], tool: AmdTool, gpus: Sequence[str], constant: Constant) -> PcieSurvey:
    """The NUMA nodes, by the lines of rocm-smi or by the hops and weights of amd-smi."""
    pairs = combinations(range(len(gpus)), 2)
    if tool is _ROCM_SMI:
        number_of = {f"GPU{match[1]}": int(match[2]) for line in lines if (match := _NUMA_NODE.fullmatch(line))}
        if missing := [gpu for gpu in gpus if gpu not in number_of]:
            raise TopologyError(
                f"{missing[0]} has no line '(Topology) Numa Node', expected one as rocm-smi --showtopo prints: "
                "PCIe is needed where xGMI does not join all GPUs"
            )
        near = [(a, b) for a, b in pairs if number_of[gpus[a]] == number_of[gpus[b]]]
        source = "by the lines '(Topology) Numa Node'"
    else:
        number_of = {}
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
        near = [pair for pair in pairs if _NUMBER.fullmatch(cells[pair]) and int(cells[pair]) <= most]
        source = f"assumption: up to {most} in the {title} is inside one"
    bandwidth_bytes_per_s = parse_bandwidth_bytes_per_s(constant.value)
    nodes = []
    for ranks in groups(range(len(gpus)), near):
        number = number_of.get(gpus[ranks[0]], -1)  # Linux has -1 where it knows none
        below = tuple(Branch("gpu", (), bandwidth_bytes_per_s, rank) for rank in ranks)
        nodes.append(Branch("cpu", below, number=number if number >= 0 else None))
    return PcieSurvey(nodes, source, (constant,))
