"""The tables of ``rocm-smi --showtopo``.

``Link Type between two GPUs`` is ``XGMI`` or ``PCIE``, but the former also for GPUs that reach each other over a third
one, and ``Hops`` is then still 1. The *weight* differs: it is 15 for each xGMI link on the way (ROCm/rocm-systems#5763
and #7372; an MI250X with weights of 15 and 30 in openmm/openmm#3940). So a cable is where the type is ``XGMI`` and
the weight is 15. How many links are in parallel is not printed: one is assumed, and an MI250X has up to four.

PCIe is known by NUMA node only: GPUs of one node meet in it, each with its own PCIe link.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import parse_bandwidth_bytes_per_s
from tasp_lab.machines.importers.survey import (
    GPU,
    PCIE_BANDWIDTH,
    Branch,
    Given,
    Leaf,
    Matrix,
    Pair,
    PcieSurvey,
    Survey,
    read_matrix,
    shown,
)
from tasp_lab.machines.parameters import Constant

LINK_BANDWIDTH = Constant(
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


def recognises(lines: Sequence[str]) -> bool:
    """Whether a line is the title of one of the tables.

    >>> recognises(["=========== Link Type between two GPUs ==========="])
    True
    """
    return any(title in line for line in lines for title in (_TYPES, _WEIGHTS))


def read(lines: Sequence[str], options: Given) -> Survey:
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
        link_bandwidth=options.constant(LINK_BANDWIDTH) if cables else None,
        pcie=lambda: _pcie(lines, types.gpus, options.constant(PCIE_BANDWIDTH)),
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


def _pcie(lines: Sequence[str], gpus: Sequence[str], constant: Constant) -> PcieSurvey:
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
