"""The PCIe tree behind the matrix of ``nvidia-smi topo -m``.

Devices, GPUs and NICs alike, that a chain of cells ``PIX`` joins are below one PCIe switch; with ``PXB`` as well, their
switches are below another one; with ``PHB`` and ``NODE`` as well, they are in one NUMA node. NUMA nodes are ``SYS``
from each other.

A cell ``NV#`` hides what PCIe does between two GPUs. There the NICs often tell; and two GPUs with the same CPU affinity
are in one NUMA node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import parse_bandwidth_bytes_per_s
from tasp_lab.machines.importers.matrix import Matrix
from tasp_lab.machines.importers.pcie import Branch, Leaf, PcieSurvey
from tasp_lab.machines.importers.survey import Pair, groups, shown
from tasp_lab.machines.parameters import Constant

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
