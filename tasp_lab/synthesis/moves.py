"""Plans to begin with, and small changes of plans.

    plans = starts(topology, (2, 8), backward=False)
    other = neighbour(plans[0], (2, 8), numpy.random.default_rng(0), backward=False)

The first ones are constructions of the published schedules (straight transfers in stages, rings, once per node and then
within it, dimension by dimension), and trees that load the links of an irregular topology evenly. Changes keep what
every plan needs: a piece arrives at a rank later than at the one from which it comes. Keys that are kept (`kept`) are
there, so in a backward pass ranks may compute with them in any order: those of the furthest ranks first, whose
gradients then travel while nearer ones are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import NoDecompositionError
from tasp_lab.rings.decompose import decompose
from tasp_lab.schedules.attention.program import Plan, Tree, offsets, routes_of
from tasp_lab.topology.graph import Topology

MOST_PIECES = 8
"""Pieces of keys: each adds a message for every pair of ranks, and calls that are smaller."""

HEAD_GROUPS = (1, 2, 4, 8)
"""Groups of heads that follow each other."""

MOST_RANKS_OF_TREES = 32
"""Trees by rank are built for at most so many ranks: each of their n rounds looks at all triples of ranks."""


def starts(topology: Topology, shape: Sequence[int], *, backward: bool, kept: bool = False) -> list[Plan]:
    """The plans to begin with, the most promising first."""
    if int(np.prod(shape)) == 1:  # one group of ranks shares out the heads
        return [Plan(_star(1, 1), heads=each) for each in HEAD_GROUPS]
    found: list[Plan] = []
    for trees in _forests(topology, tuple(shape)):
        plain = Plan(trees)
        is_star = not any(any(tree.via) for tree in trees) and len(trees[0].via) == int(np.prod(shape))
        found.append(plain)
        if backward and not is_star:
            if kept:
                found.append(_with(plain, trees=_furthest_first(trees), home="tree"))
            found.append(_with(plain, home="tree"))
    n = int(np.prod(shape))
    if backward and kept and not topology.is_complete and n > 2:
        found += [Plan(trees, home="tree") for trees in _rings(topology, onward=True)]
    for queries in (range(1, n // 2 + 1), range(1, n), range(n // 2 + 1, n)):
        if len(queries) and topology.is_complete and not kept:
            found += [Plan(_star(n, pieces), queries=tuple(queries)) for pieces in (1, 2)]
    if backward:  # own keys last: gradients of others go home meanwhile
        last = [max(map(max, (tree.arrival for tree in each.trees))) for each in found]
        found = [_with(each, own=2 + end) for each, end in zip(found, last, strict=True)] + found
    if topology.world_size > 1 and len(set(topology.node_of_rank)) > 1:
        found += [_with(each, lanes="order") for each in found[:8]]
    found = [each for each in dict.fromkeys(found) if has_routes(topology, each, shape, backward=backward, kept=kept)]
    in_groups = [_with(each, heads=heads) for each in found[:2] for heads in HEAD_GROUPS[1:3]]
    return [*found[:2], *in_groups, *found[2:]]


def has_routes(topology: Topology, plan: Plan, shape: Sequence[int], *, backward: bool, kept: bool) -> bool:
    """Whether the topology has a route for every transfer of a pass."""
    if topology.is_complete:
        return True
    if plan.queries or (backward and plan.home == "straight"):
        return False
    via = routes_of(plan, shape).via
    rank = np.broadcast_to(np.arange(via.shape[-1]), via.shape)
    moves = rank != np.arange(via.shape[-1])[:, None]
    there, home = topology.have_routes(via[moves], rank[moves]), topology.have_routes(rank[moves], via[moves])
    return bool((there.all() or (kept and backward)) and (home.all() or not backward))


def _furthest_first(trees: Sequence[Tree]) -> tuple[Tree, ...]:
    """The steps of all trees in reverse."""
    last = max(max(tree.arrival) for tree in trees)
    return tuple(Tree(tree.via, tuple(last - each for each in tree.arrival)) for tree in trees)


def _star(n: int, pieces: int) -> tuple[Tree, ...]:
    return tuple(Tree((0,) * n, (piece,) * n) for piece in range(pieces))


def _forests(topology: Topology, shape: tuple[int, ...]) -> Iterator[tuple[Tree, ...]]:
    n = int(np.prod(shape))
    if len(shape) == 2 and min(shape) > 1:
        for pieces in (1, 2, 4):
            yield tuple(_spread(shape, piece) for piece in range(pieces))
        yield (_spread(shape, 0, chain=True),)
        across, along = _by_dimension(shape, 0), _by_dimension(shape, 1)
        yield (across,)
        yield (along,)
        yield across, along
        yield across, along, _mirrored(across, shape), _mirrored(along, shape)
    for pieces in (1, 2, 4):
        yield _star(n, pieces)
    if n > 2:
        ring = Tree((0, *range(n - 1)), (0, *range(n - 1)))
        yield (ring,)
        yield ring, _mirrored(ring, shape if len(shape) == 1 else (n,))
        half = n // 2
        via = [0, *(d - 1 if d <= half else (d + 1) % n for d in range(1, n))]
        both_ways = Tree(tuple(via), tuple(max(min(d, n - d) - 1, 0) for d in range(n)))
        yield (both_ways,)
        # Of an even number the furthest rank is reached one way or the other: each for half of the pieces.
        for halves in (1, 2):
            yield _interleaved((both_ways, _mirrored(both_ways, (n,))) * halves)
        yield (Tree((0,) * n, (0, *range(n - 1))),)  # one owner after the other
        yield (Tree((0,) * n, (0, *(((d - 1) // 2) for d in range(1, n)))),)
    if 2 < n <= MOST_RANKS_OF_TREES:
        if not topology.is_complete:
            yield from _rings(topology)
        yield (balanced_tree(topology),)
        yield tuple(_later(balanced_tree(topology, first), 0) for first in range(2))


def _rings(topology: Topology, *, onward: bool = False) -> Iterator[tuple[Tree, ...]]:
    """Around all rings of the topology at once, equal parts around each; gradients back, or `onward` to their owner."""
    try:
        rings = decompose(topology).rings[:MOST_PIECES].astype(np.int64)
    except NoDecompositionError:
        return
    n = topology.world_size
    place = np.argsort(rings, axis=1)  # of each rank
    hops = (place[:, None, :] - place[:, :, None]) % n  # [ring, owner, rank]
    before = np.take_along_axis(rings, (place + (1 if onward else -1)) % n, axis=1)
    yield tuple(_tree(np.tile(before[each], (n, 1)), np.maximum(hops[each] - 1, 0)) for each in range(len(rings)))


def _spread(shape: tuple[int, ...], first: int, *, chain: bool = False) -> Tree:
    """Once to each other node, straight or from node to node, then from the rank that has it to the others there."""
    nodes, gpus = shape
    via, arrival = [], []
    for node in range(nodes):
        for gpu in range(gpus):
            remote = node if chain else min(node, 1)  # the transfers before it is in the node
            if gpu:
                via.append(node * gpus)
                arrival.append(first + remote)
            else:
                via.append((node - 1) * gpus if chain and node else 0)
                arrival.append(first + max(remote - 1, 0))
    return Tree(tuple(via), tuple(arrival))


def _by_dimension(shape: tuple[int, ...], first: int) -> Tree:
    """Along one dimension of the grid, then from each rank there along the other, both ways at once."""
    other = 1 - first

    def back(at: int, size: int) -> tuple[int, int]:
        """The place before, on the shorter way from 0, and the number of transfers so far."""
        return (at - 1, at) if at <= size // 2 else ((at + 1) % size, size - at)

    via, arrival = [], []
    for place in np.ndindex(shape):
        depth = [back(at, size)[1] if at else 0 for at, size in zip(place, shape, strict=True)]
        before = list(place)
        moved = other if place[other] else first
        before[moved] = back(place[moved], shape[moved])[0] if place[moved] else 0
        via.append(int(np.ravel_multi_index(tuple(before), shape)))
        arrival.append(max(sum(depth) - 1, 0))
    return Tree(tuple(via), tuple(arrival))


def _mirrored(tree: Tree, shape: tuple[int, ...]) -> Tree:
    """The tree with all offsets the other way."""
    back = offsets(shape)[:, 0]  # the offset of each rank's way to rank 0
    via, arrival = [0] * len(back), [0] * len(back)
    for offset, other in enumerate(back.tolist()):
        via[other], arrival[other] = int(back[tree.via[offset]]), tree.arrival[offset]
    return Tree(tuple(via), tuple(arrival))


def balanced_tree(topology: Topology, turn: int = 0) -> Tree:
    """A tree for each owner, by rank, so that the busiest link of all trees together is as little busy as is easy.

    In each round every tree grows by the transfer that adds least to the busiest link on its way. `turn` rotates the
    order of owners, which gives another forest.
    """
    n = topology.world_size
    source, destination = np.nonzero(~np.eye(n, dtype=bool))
    linked = topology.have_routes(source, destination)
    source, destination = source[linked], destination[linked]
    constraints, latency_s = topology.routes(source, destination)
    rates = np.array([*(float(each.bandwidth_bytes_per_s) for each in topology.constraints), np.inf])
    constraints = np.where(constraints < 0, len(rates) - 1, constraints).T  # (most links of a route, pairs)
    smallest = 1e-3 * (1 / rates[:-1]).min() / max(float(np.max(latency_s)), 1e-12)
    busy_s = np.zeros(len(rates))
    via, depth = np.tile(np.arange(n)[:, None], n), np.zeros((n, n), dtype=np.int64)
    there = np.eye(n, dtype=bool)
    for _ in range(n - 1):
        for owner in np.roll(np.arange(n), turn):
            open_ = there[owner, source] & ~there[owner, destination]
            if not open_.any():
                continue
            cost = (busy_s[constraints] + 1 / rates[constraints]).max(axis=0) + smallest * np.asarray(latency_s, float)
            cost = np.where(open_, cost, np.inf) * (1 + 1e-6 * depth[owner, source])
            best = int(np.argmin(cost))
            start, end = source[best], destination[best]
            busy_s[constraints[:, best]] += 1 / rates[constraints[:, best]]
            busy_s[-1] = 0
            there[owner, end], via[owner, end], depth[owner, end] = True, start, depth[owner, start] + 1
    return Tree(tuple(via.ravel().tolist()), tuple(np.maximum(depth - 1, 0).ravel().tolist()))


def _interleaved(trees: Sequence[Tree]) -> tuple[Tree, ...]:
    """The pieces one after another in each step: while ranks compute with one, the next one comes."""
    count = len(trees)
    return tuple(
        Tree(tree.via, tuple(count * each + piece for each in tree.arrival)) for piece, tree in enumerate(trees)
    )


def _later(tree: Tree, steps: int) -> Tree:
    return Tree(tree.via, tuple(each + steps for each in tree.arrival))


# -- changes ----------------------------------------------------------------------------------------------------------
KINDS = ("via", "arrival", "arrival", "swap", "merge", "pieces", "queries", "home", "lanes", "buffers", "own", "heads")
"""What a change is of; arrivals are changed most often."""


def neighbour(
    plan: Plan, shape: Sequence[int], random: np.random.Generator, *, backward: bool, kept: bool = False
) -> Plan:
    """A plan that differs in one decision, or in a few."""
    for _ in range(1 + int(random.random() < 0.25)):
        plan = _changed(plan, tuple(shape), random, backward, kept)
    return plan


def _changed(plan: Plan, shape: tuple[int, ...], random: np.random.Generator, backward: bool, kept: bool) -> Plan:
    n = int(np.prod(shape))
    kinds = [each for each in KINDS if not (kept and each in ("queries", "buffers"))] if n > 1 else ["heads"]
    kind = str(random.choice(kinds))
    if kind == "heads":
        return _with(plan, heads=int(random.choice(HEAD_GROUPS)))
    if kind == "pieces":
        if len(plan.trees) < MOST_PIECES and random.random() < 0.6:
            return _with(plan, trees=(*plan.trees, _later(plan.trees[-1], 1)))
        return _with(plan, trees=plan.trees[:-1]) if len(plan.trees) > 1 else plan
    if kind == "queries":
        chosen = set(plan.queries) ^ set(_offsets_alike(shape, random))
        return _with(plan, queries=tuple(sorted(chosen - {0})))
    if kind == "buffers":
        return _with(plan, buffers=int(random.choice([0, 2, 3, 4, 6])))
    if kind == "own":
        last = max(max(tree.arrival) for tree in plan.trees)
        return _with(plan, own=int(random.integers(0, last + 3)))
    if kind == "home" and backward:
        return _with(plan, home="straight" if plan.home == "tree" else "tree")
    if kind in ("lanes", "home"):
        return _with(plan, lanes="peer" if plan.lanes == "order" else "order")
    # Trees change alone or all alike; of a tree by rank the rows of some owners do.
    number = int(random.integers(len(plan.trees)))
    together = random.random() < 0.5
    alike, other = _offsets_alike(shape, random), int(random.integers(n))
    row = int(random.integers(n))
    delta = int(random.choice([-2, -1, 1, 1, 2]))
    any_order = kept and backward
    trees = []
    for index, tree in enumerate(plan.trees):
        if index != number and not together:
            trees.append(tree)
            continue
        by_rank = len(tree.via) > n
        via, arrival = (np.array(each).reshape(-1, n) for each in (tree.via, tree.arrival))
        one, root = (row, row) if by_rank else (0, 0)
        trees.append(_tree(*_edited(via, arrival, one, root, kind, alike, other, delta, any_order)))
    return _with(plan, trees=_from_zero(trees))


def _edited(
    via: IntArray, arrival: IntArray, row: int, root: int, kind: str, alike: Sequence[int], other: int, delta: int,
    any_order: bool,
) -> tuple[IntArray, IntArray]:  # fmt: skip
    via, arrival = via.copy(), arrival.copy()
    mine, when = via[row], arrival[row]
    places = [each for each in alike if each != root]
    if kind == "via":
        for each in places:
            earlier = each != other and (other == root or when[other] < when[each])
            if each not in _way(mine, other, root) if any_order else earlier:
                mine[each] = other
    elif kind == "arrival":
        when[places] = np.maximum(when[places] + delta, 0)
    elif kind == "swap" and places and other != root:
        when[places[0]], when[other] = when[other], when[places[0]]
    else:  # what arrives from some step on arrives a step earlier, joined with what is there; or later
        arrival[arrival >= when[other]] += 1 if delta > 0 else -1
        arrival[:] = np.maximum(arrival, 0)
    if not any_order:
        for number in range(len(via)):  # of all rows, as steps that move are those of all owners
            _repair(via[number], arrival[number], number if len(via) > 1 else root)
    return via, arrival


def _way(via: IntArray, end: int, root: int) -> list[int]:
    """The places from one back to the root of its tree."""
    way = [end]
    while way[-1] != root and len(way) <= len(via):
        way.append(int(via[way[-1]]))
    return way


def _repair(via: IntArray, arrival: IntArray, root: int) -> None:
    """Delay what arrives before the rank from which it comes has it; what would come in a circle comes straight."""
    for _ in range(len(via)):
        late = (via != root) & (np.arange(len(via)) != root) & (arrival <= arrival[via])
        if not late.any():
            return
        arrival[late] = arrival[via[late]] + 1
    via[:] = root


def _tree(via: IntArray, arrival: IntArray) -> Tree:
    return Tree(tuple(via.ravel().tolist()), tuple(arrival.ravel().tolist()))


def _from_zero(trees: Sequence[Tree]) -> tuple[Tree, ...]:
    """The trees without steps in which nothing arrives: equal plans are equal records."""
    used = np.unique(np.concatenate([tree.arrival for tree in trees]))
    return tuple(Tree(tree.via, tuple(np.searchsorted(used, tree.arrival).tolist())) for tree in trees)


def _offsets_alike(shape: tuple[int, ...], random: np.random.Generator) -> list[int]:
    """One offset; or all to one node, or to the GPUs of one number."""
    n = int(np.prod(shape))
    places, chosen = np.stack(np.unravel_index(np.arange(n), shape)), int(random.integers(1, n)) if n > 1 else 0
    if len(shape) > 1 and random.random() < 0.6:
        axis = int(random.integers(len(shape)))
        return [int(each) for each in np.flatnonzero(places[axis] == places[axis, chosen])]
    return [chosen]


def _with(plan: Plan, **changes: object) -> Plan:
    return msgspec.structs.replace(plan, **changes)
