"""AllReduce along double binary trees, between nodes and inside them, as libraries run it over several nodes.

The message is cut into two halves per rank of a node, and each into chunks. Half t of rank l goes through the ranks
with number l of all nodes, its *heads*, along a binary tree. A node that has children in one tree is a leaf in the
other, so that both halves together use all NICs (P. Sanders, J. Speck, J. Traeff, Two-tree algorithms for full
bandwidth broadcast, reduction and scan, Parallel Computing 35, 2009). Inside a node the sums go along a chain to the
head, or all at once where a switch merges them. From the root complete sums go back the same way. Chunks follow each
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tasp_lab.core.arrays import IntArray, freeze
from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.rings import split_bytes
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import LazySteps, Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology

CHUNK_BYTES = 2**19
"""What a half sends at once, at least. With switches NCCL sends 64 KiB on each of eight channels of Hopper, and twice
that for long messages on fewer than four nodes (NVIDIA/nccl 5067397c, src/transport/nvls.cc)."""

MAX_CHUNKS, MAX_TRANSFERS = 64, 2**17
"""More chunks gain less than that part of the time of the deepest way. On many ranks there are fewer, so that the
proof of a schedule takes no longer."""


def binary_tree(nodes: int) -> IntArray:
    """The parent of each node in a binary tree in which nodes with odd numbers are leaves; -1 of the root.

    The parent of a node replaces its lowest bit that is set by the next one; where there is no such node, by none.

    >>> binary_tree(5).tolist()
    [-1, 2, 4, 2, 0]
    """
    node = np.arange(nodes, dtype=np.int64)
    bit = node & -node
    above = (node ^ bit) | (bit << 1)
    parent: IntArray = np.where(above < nodes, above, node ^ bit)
    parent[:1] = -1
    return parent


def double_binary_trees(nodes: int) -> tuple[IntArray, IntArray]:
    """Two binary trees: the second one is the first, shifted by a node, or mirrored for an even number of nodes.

    >>> [tree.tolist() for tree in double_binary_trees(4)]
    [[-1, 2, 0, 2], [1, 3, 1, -1]]
    """
    first = binary_tree(nodes)
    if nodes % 2:
        shifted = np.roll(first, 1)
        second = np.where(shifted < 0, -1, (shifted + 1) % nodes)
    else:
        mirrored = first[::-1]
        second = np.where(mirrored < 0, -1, nodes - 1 - mirrored)
    return first, second


@dataclass(frozen=True, eq=False)
class TreeSumSteps(LazySteps):
    """Hops as int arrays (hops,): at step ``level + c`` a hop sends block ``first + c``; `gives` where it adds up."""

    source: IntArray
    destination: IntArray
    lane: IntArray
    level: IntArray
    first: IntArray
    gives: IntArray
    chunks: int

    def __post_init__(self) -> None:
        columns = "source", "destination", "lane", "level", "first", "gives"
        freeze(self, columns, "hops of trees: ", np.int64, 1, "an int array of shape (hops,)")

    def __len__(self) -> int:
        return int(self.level.max(initial=-1)) + self.chunks if len(self.level) else 0

    def step(self, index: int) -> Step:
        chunk = index - self.level
        now = (chunk >= 0) & (chunk < self.chunks)
        return Step(
            self.source[now], self.destination[now], self.lane[now], (self.first + chunk)[now], self.gives[now] > 0
        )


@schedule("library-tree-all-reduce", "AllReduce", library_call="all_reduce")
def library_tree_all_reduce(topology: Topology, shard_bytes: int) -> Schedule:
    """AllReduce of a message of one shard of `shard_bytes` per rank along double binary trees, as one call.

    >>> from tasp_lab.topology.builders import nodes
    >>> found = library_tree_all_reduce(nodes(2, 2, "switch"), 64)
    >>> found.transfers, len(found.steps)
    (24, 4)

    Raises `ScheduleError` for nodes of different sizes and for empty shards.
    """
    return _tree_all_reduce("library-tree-all-reduce", topology, shard_bytes, in_switch=False)


@schedule("library-nvls-tree-all-reduce", "AllReduce", library_call="all_reduce")
def library_nvls_tree_all_reduce(topology: Topology, shard_bytes: int) -> Schedule:
    """The same, where a switch inside nodes merges: its ranks send to all heads, and receive from them, at once.

    >>> from tasp_lab.topology.builders import nodes
    >>> found = library_nvls_tree_all_reduce(nodes(2, 4, "switch"), 64)
    >>> found.transfers, len(found.steps)
    (112, 4)

    Raises `ScheduleError` as `library_tree_all_reduce` does.
    """
    return _tree_all_reduce("library-nvls-tree-all-reduce", topology, shard_bytes, in_switch=True)


def _tree_all_reduce(name: str, topology: Topology, shard_bytes: int, *, in_switch: bool) -> Schedule:
    """The schedule of either kind; `in_switch`: inside nodes along stars whose messages a switch merges, not chains."""
    n = topology.world_size
    node_count = len({*topology.node_of_rank}) or 1
    ranks = n // node_count
    if topology.node_of_rank and tuple(topology.node_of_rank) != tuple(rank // ranks for rank in range(n)):
        raise ScheduleError(f"schedule {name!r}: expected nodes of equal numbers of ranks in order")
    if shard_bytes < 1:
        raise ScheduleError(f"schedule {name!r}: shard size is {shard_bytes} bytes, expected 1 or more")
    halves = [part for part in split_bytes(n * shard_bytes, _equal(2 * ranks)) if part]
    is_large = in_switch and node_count < 4 and min(halves) >= 8 * CHUNK_BYTES
    chunk_bytes = 2 * CHUNK_BYTES if is_large else CHUNK_BYTES
    hops_of_all = len(halves) * 2 * max(n - 1, 1)
    chunks = max(1, min(MAX_CHUNKS, min(halves) // chunk_bytes, MAX_TRANSFERS // hops_of_all))
    sizes = [size for half in halves for size in split_bytes(half, _equal(chunks))]
    hops = [
        hop
        for number in range(len(halves))
        for hop in _hops(double_binary_trees(node_count)[number % 2], ranks, number // 2, number, in_switch)
    ]
    columns = np.array(hops, dtype=np.int64).reshape(-1, 6).T
    source, destination, lane, level, half, gives = columns
    used, lane = np.unique(lane, return_inverse=True)
    everything = np.ones((n, len(sizes)), dtype=bool)
    found = Schedule(
        name=name,
        world_size=n,
        lanes=max(len(used), 1),
        blocks=Blocks.of_sums(np.array(sizes, dtype=np.int64), n),
        initial=everything,
        final=everything.copy(),
        steps=TreeSumSteps(source, destination, lane, level, half * chunks, gives, chunks) if n > 1 else [],
        fused=True,
        initial_part=np.arange(n)[:, None],
        algorithm="nvls-tree" if in_switch else "tree",
    )
    found.check_routes(topology)
    return found


def _hops(
    parent: IntArray, ranks: int, head: int, number: int, in_switch: bool
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """The hops of one half: source, destination, lane, level, its number, and whether they give.

    A rank sends to all its children at once, each on a lane of its own.
    """
    depth = [_depth(parent, node) for node in range(len(parent))]
    height, inside = max(depth), (1 if in_switch else ranks - 1) if ranks > 1 else 0
    top = inside + height
    up = number * _lanes(ranks, in_switch)
    down = up + (ranks if in_switch else 1)
    between = down + (ranks if in_switch else 1)
    children = [0] * len(parent)
    for node, above in enumerate(parent.tolist()):
        chain = [node * ranks + (head + place) % ranks for place in range(ranks)]
        for place in range(1, ranks):
            before = 0 if in_switch else place - 1
            beside = place if in_switch else 0
            yield chain[place], chain[before], up + beside, 0 if in_switch else ranks - 1 - place, number, 1
            yield chain[before], chain[place], down + beside, top + height + (0 if in_switch else place - 1), number, 0
        if above >= 0:
            child, children[above] = children[above], children[above] + 1
            yield chain[0], above * ranks + head, up, inside + height - depth[node], number, 1
            yield above * ranks + head, chain[0], between + child, top + depth[node] - 1, number, 0


def _lanes(ranks: int, in_switch: bool) -> int:
    """The most lanes of one half: up, down inside a node, and down to two other nodes."""
    return 2 * (ranks if in_switch else 1) + 2


def _depth(parent: IntArray, node: int) -> int:
    depth = 0
    while parent[node] >= 0:
        node, depth = int(parent[node]), depth + 1
    return depth


def _equal(parts: int) -> list[Fraction]:
    return [Fraction(1, parts)] * parts
