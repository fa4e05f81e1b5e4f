"""Rings that are known without a search: of complete digraphs, of nodes with one NIC per rank, of single cycles."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.errors import NoDecompositionError
from tasp_lab.factors import rings_of
from tasp_lab.hamiltonian import hamiltonian_cycles, two_fold_hamiltonian_cycles
from tasp_lab.node_rings import is_rail_aligned, node_rings
from tasp_lab.rings import Rings
from tasp_lab.topology import Topology


def closed_forms(topology: Topology, fold: int | None, rail_aligned: bool | None) -> Iterator[Rings]:
    """What is known of a topology, the best first. `fold` and `rail_aligned` as in `decomposition.decompose`.

    Rings of a larger fold are given where, by a theorem, those that carry as much on these links have no smaller one.
    """
    groups = _nodes_of(topology)
    if groups is not None:
        yield _of_nodes(topology, groups, fold, rail_aligned)
    elif rail_aligned:
        raise NoDecompositionError(f"{topology.name} is no set of nodes with one NIC per rank, so it has no rails")
    links = topology.linked_pairs
    if links.sum() == links.shape[0] * (links.shape[0] - 1):
        own_links = len(topology.vertices) == topology.world_size and not topology.shared
        alike = own_links and len(set(topology.link_bandwidths_bytes_per_s.tolist())) < 2
        if fold != 1 or alike or topology.world_size not in (4, 6):
            yield _of_complete_digraph(topology.world_size, fold)
    if fold in (None, 1) and (links.sum(axis=0) == 1).all() and (links.sum(axis=1) == 1).all():
        yield Rings(rings_of(links.argmax(axis=1)[None]), 1, "the topology is one directed ring")


def _of_complete_digraph(n: int, fold: int | None) -> Rings:
    if n in (4, 6) and fold != 1:
        reason = (
            f"K*_{n} has no {n - 1} rings that share no pair of ranks (Tillson 1980); "
            "these two-fold rings use each pair of ranks twice"
        )
        return Rings(two_fold_hamiltonian_cycles(n).astype(np.int64), 2, reason)
    rings = hamiltonian_cycles(n).astype(np.int64)
    if fold == 2:
        return Rings(np.repeat(rings, 2, axis=0), 2, f"each ring of K*_{n} twice")
    return Rings(rings, 1, f"K*_{n} decomposes into {n - 1} rings that share no pair of ranks")


def _of_nodes(topology: Topology, groups: IntArray, fold: int | None, rail_aligned: bool | None) -> Rings:
    """(m-K_m-m)^u on ranks that are numbered node by node, then with the ranks that are there."""
    node_count, per_node = groups.shape
    by_node = node_rings(node_count, per_node, rail_aligned=rail_aligned)
    rings = groups.ravel()[by_node]
    found = 2 if per_node in (3, 5) else 1
    times = "once" if found == 1 else "twice"
    reason = (
        f"({per_node}-K_{per_node}-{per_node})^{node_count}: {len(rings)} rings of Hamiltonian paths inside the nodes "
        f"use every pair inside a node and every NIC {times}"
    )
    if found == 2:
        reason += f"; K*_{per_node} has no {per_node} Hamiltonian paths that share no pair of ranks"
    if is_rail_aligned(by_node, per_node):
        reason += "; every hop between nodes joins equal local ranks"
    if fold == 2 and found == 1:
        return Rings(np.repeat(rings, 2, axis=0), 2, f"{reason}; each ring twice")
    return Rings(rings, found, reason)


def _nodes_of(topology: Topology) -> IntArray | None:
    """The ranks of each node, an array (nodes, ranks per node), if the topology is nodes that one network joins.

    The network is what all ranks reach through switches; apart from it every rank must reach exactly those of its node,
    of which there are two or more. Ranks at the same position in their nodes are those with the shortest way between.
    """
    n = topology.world_size
    if len(topology.vertices) == n:
        return None
    inside = topology.link_between >= 0
    networks = 0
    for entries, exits in topology.crossings():
        if len(entries) == len(exits) == n:
            networks += 1
        else:
            inside[np.ix_(entries, exits)] = True
    np.fill_diagonal(inside, True)
    groups = np.unique(inside.argmax(axis=1))
    per_node = n // len(groups)
    same_size = (inside.sum(axis=1) == per_node).all() and (inside == inside.T).all()
    if networks != 1 or len(groups) < 2 or per_node < 2 or not same_size or (inside[groups].sum(axis=0) != 1).any():
        return None
    members = [np.flatnonzero(inside[group]) for group in groups]
    return np.array([members[0], *(_in_line(topology, members[0], each) for each in members[1:])])


def _in_line(topology: Topology, first: IntArray, others: IntArray) -> IntArray:
    """The ranks of another node in the order of their nearest in the first, where each has one; else as they are."""
    hops = np.array([[len(topology.route(a, b).links) for b in others.tolist()] for a in first.tolist()])
    nearest = hops.argmin(axis=1)
    return others[nearest] if len(np.unique(nearest)) == len(others) else others
