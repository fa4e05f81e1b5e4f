"""Small worlds of softmax attention: ring, TokenRing, both backward, Ulysses, USP, mixed rings, gathered keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import LayoutFunction, contiguous
from tests.support.world import KernelCall, Transfer, World, world

GRADIENT = {QUERIES: QUERY_GRADIENTS, KEYS: KEY_GRADIENTS}
DOUBLE, TRIPLE = 2, 3
"""Buffers of pools."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A small layer distributed over ranks, and the number of each of its blocks."""

    task: AttentionTask
    at: Mapping[tuple[int, int], tuple[int, ...]]
    """The blocks of a tensor and a rank: by span, piece, and head group."""

    @classmethod
    def of(
        cls,
        world_size: int,
        layer: Workload,
        *,
        layout: LayoutFunction = contiguous,
        backward: bool = False,
        groups: int = 1,
        key_pieces: int = 1,
    ) -> Layer:
        """Spans of keys are cut into pieces, the heads of all tensors into groups."""
        spans = layout(layer.sequence, world_size, layer.documents)
        tensors = (QUERIES, KEYS, QUERY_GRADIENTS, KEY_GRADIENTS) if backward else (QUERIES, KEYS, RESULTS)
        rows: list[tuple[int, int, int, int, int, int]] = []
        at = {}
        for tensor, rank in product(tensors, range(world_size)):
            of_keys = tensor in (KEYS, KEY_GRADIENTS)
            heads = (layer.kv_head_count if of_keys else layer.heads) // groups
            first = len(rows)
            pieces = key_pieces if of_keys else 1
            for span in spans.spans[rank]:
                cuts = [span.count * piece // pieces for piece in range(pieces + 1)]
                for (begin, end), group in product(pairwise(cuts), range(groups)):
                    start = span.start + begin * span.stride
                    rows.append((tensor, rank, start, end - begin, group * heads, heads))
            at[tensor, rank] = tuple(range(first, len(rows)))
        dtype = "fp32" if backward else None
        return cls(AttentionTask(layer, spans, *np.array(rows, dtype=np.int64).T, gradient_dtype=dtype), at)

    @property
    def world_size(self) -> int:
        return self.task.layout.world_size

    def tiles(self, rank: int, queries: Iterable[int], keys: Iterable[int]) -> list[KernelCall]:
        """A call per tile whose mask is not empty."""
        found = []
        for query, key in product(queries, keys):
            low, high = (int(each[0]) for each in self.task.tile_bands(np.array([query]), np.array([key])))
            if low <= high:
                found.append(KernelCall(self.task.kernel, rank, ((query,), (key,)), (low, high)))
        return found

    def one_call(self, rank: int, queries: Sequence[int], keys: Sequence[int]) -> list[KernelCall]:
        """One call without a mask."""
        low, high = 1 - int(self.task.count[list(keys)].sum()), int(self.task.count[list(queries)].sum()) - 1
        return [KernelCall(self.task.kernel, rank, (tuple(queries), tuple(keys)), (low, high))]

    def adds(self, queries: Iterable[int], keys: Iterable[int], tensor: int) -> list[int]:
        """The blocks that tiles of these add to, of the results or gradients of a tensor."""
        calls = self.tiles(0, queries, keys)
        sources = [call.operands[0 if tensor == QUERIES else 1][0] for call in calls]
        return [int(self.task.output_of[each]) for each in dict.fromkeys(sources)]

    def world(
        self, name: str, steps: Iterable[tuple[Sequence[Transfer], Sequence[KernelCall]]], pools: Mapping[int, Pool]
    ) -> World:
        """Queries and keys lie at their owners at the start, results or gradients at the end."""
        task = self.task
        held, promised = task.owned(QUERIES, KEYS), task.owned(RESULTS, QUERY_GRADIENTS, KEY_GRADIENTS)
        return world(name, task.blocks(pools, ()), held, promised, steps, task)


def small(n: int, mask: str = "full", **options: int) -> Workload:
    """A layer of three or four positions per rank."""
    values = {"heads": 2, "kv_heads": 1, "head_dim": 2} | options
    return Workload(3 * n + 1, mask="causal" if mask == "causal" else "full", dtype="fp32", **values)  # type: ignore[arg-type]


def ring(layer: Layer, one_call: bool = False) -> World:
    """Keys circulate. A rank attends tile by tile, or to all that it has just received with one call."""
    kernel_calls = layer.one_call if one_call else layer.tiles
    n, at, steps = layer.world_size, layer.at, []
    for s in range(n):
        moves = (
            [Transfer(r, (r + 1) % n, 0, key) for r in range(n) for key in at[KEYS, (r - s) % n]] if s < n - 1 else []
        )
        steps.append(
            (moves, [each for r in range(n) for each in kernel_calls(r, at[QUERIES, r], at[KEYS, (r - s) % n])])
        )
    return layer.world("ring", steps, {KEYS: Pool("keys", TRIPLE)})


def token_ring(layer: Layer) -> World:
    """Queries circulate, their results go home from every rank."""
    n, at, steps = layer.world_size, layer.at, []
    for s in range(n + 1):
        moves, calls = [], []
        for r in range(n):
            here, before = (r - s) % n, (r - s + 1) % n
            if s < n - 1:
                moves += [Transfer(r, (r + 1) % n, 0, query) for query in at[QUERIES, here]]
            if 2 <= s <= n:
                results = layer.adds(at[QUERIES, before], at[KEYS, r], QUERIES)
                moves += [Transfer(r, before, 1, result, True) for result in results]
            if s < n:
                calls += layer.tiles(r, at[QUERIES, here], at[KEYS, r])
        steps.append((moves, calls))
    return layer.world("token-ring", steps, {QUERIES: Pool("queries", TRIPLE), RESULTS: Pool("results", DOUBLE)})


def backward(layer: Layer, circulating: int, straight: bool) -> World:
    """Queries or keys circulate; their gradients follow a step later, or go straight home from every rank."""
    n, at, steps = layer.world_size, layer.at, []
    stationary = KEYS if circulating == QUERIES else QUERIES
    started: set[int] = set()

    def operands(circulates: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        mine, other = at[stationary, rank], at[circulating, circulates]
        return (other, mine) if circulating == QUERIES else (mine, other)

    for s in range(n + 1):
        moves, calls = [], []
        for r in range(n):
            here, before = (r - s) % n, (r - s + 1) % n
            if s < n - 1:
                moves += [Transfer(r, (r + 1) % n, 0, block) for block in at[circulating, here]]
            if 2 <= s <= n:
                added = layer.adds(*operands(before, r), circulating)
                started.update(added)
                leaving = added if straight else [g for g in at[GRADIENT[circulating], before] if g in started]
                moves += [Transfer(r, before if straight else (r + 1) % n, 1, block, True) for block in leaving]
            if s < n:
                calls += layer.tiles(r, *operands(here, r))
        steps.append((moves, calls))
    pool = Pool("circulating", TRIPLE)
    return layer.world("backward", steps, {circulating: pool, GRADIENT[circulating]: pool})


def ulysses(layer: Layer) -> World:
    """An all-to-all of head groups there and back; every rank attends with all positions."""
    n, at, layout = layer.world_size, layer.at, layer.task.layout
    others = [(r, g) for r in range(n) for g in range(n) if r != g]
    there = [Transfer(r, g, (g - r) % n - 1, at[t, r][g]) for t in (QUERIES, KEYS) for r, g in others]
    back = [Transfer(g, r, (r - g) % n - 1, at[RESULTS, r][g], True) for r, g in others]
    low = 0 if layer.task.workload.mask == "causal" else 1 - layout.sequence
    calls = [
        KernelCall("attend", g, (tuple(at[QUERIES, r][g] for r in range(n)), tuple(at[KEYS, r][g] for r in range(n))),
                   (low, layout.sequence - 1))
        for g in range(n)
    ]  # fmt: skip
    pools = {tensor: Pool("all-to-all", DOUBLE) for tensor in (QUERIES, KEYS, RESULTS)}
    return layer.world("ulysses", [(there, []), ([], calls), (back, [])], pools)


def usp(layer: Layer, inside: int) -> World:
    """Groups of `inside` ranks exchange heads; keys circulate across groups; results are kept where they grow."""
    n, at = layer.world_size, layer.at
    count = n // inside
    members = list(product(range(count), range(inside)))
    exchanges = [(x, i, g) for x, i in members for g in range(inside) if i != g]
    there = [
        Transfer(x * inside + i, x * inside + g, (g - i) % inside - 1, at[tensor, x * inside + i][g])
        for tensor in (QUERIES, KEYS) for x, i, g in exchanges
    ]  # fmt: skip
    steps: list[tuple[list[Transfer], list[KernelCall]]] = [(there, [])]
    for s in range(count):
        moves, calls = [], []
        for x, g in members:
            queries, keys = (
                [at[tensor, group * inside + i][g] for i in range(inside)]
                for tensor, group in ((QUERIES, x), (KEYS, (x - s) % count))
            )
            if s < count - 1:
                moves += [Transfer(x * inside + g, (x + 1) % count * inside + g, inside, key) for key in keys]
            calls += layer.tiles(x * inside + g, queries, keys)
        steps.append((moves, calls))
    back = [
        Transfer(x * inside + g, x * inside + i, (i - g) % inside - 1, at[RESULTS, x * inside + i][g], True)
        for x, i, g in exchanges
    ]
    return layer.world("usp", [*steps, (back, [])], {})


def mixed(layer: Layer) -> World:
    """One half of the keys circulates; queries circulate the other way, past the other half."""
    n, at, steps = layer.world_size, layer.at, []
    for s in range(n + 1):
        moves, calls = [], []
        for r in range(n):
            if s < n - 1:
                moves.append(Transfer(r, (r + 1) % n, 0, at[KEYS, (r - s) % n][0]))
                moves.append(Transfer(r, (r - 1) % n, 1, at[QUERIES, (r + s) % n][0]))
            if 2 <= s <= n:
                owner = (r + s - 1) % n
                moves.append(Transfer(r, owner, 2, at[RESULTS, owner][0], True))
            if s < n:
                calls += layer.tiles(r, at[QUERIES, r], at[KEYS, (r - s) % n][:1])
                calls += layer.tiles(r, at[QUERIES, (r + s) % n], at[KEYS, r][1:])
        steps.append((moves, calls))
    pools = {KEYS: Pool("keys", TRIPLE), QUERIES: Pool("queries", TRIPLE), RESULTS: Pool("results", DOUBLE)}
    return layer.world("mixed", steps, pools)


def gathered_keys_backward(layer: Layer) -> World:
    """All-gather of keys, gradients of everything at once, then a ring reduce-scatter of the gradients of keys."""
    n, at = layer.world_size, layer.at

    def along(tensor: int, shift: int, gives: bool) -> list[Transfer]:
        return [Transfer(r, (r + 1) % n, 0, b, gives) for r in range(n) for b in at[tensor, (r - shift) % n]]

    keys = [key for rank in range(n) for key in at[KEYS, rank]]
    calls = [each for r in range(n) for each in layer.tiles(r, at[QUERIES, r], keys)]
    gather = [(along(KEYS, s, False), []) for s in range(n - 1)]
    scatter = [(along(KEY_GRADIENTS, s + 1, True), []) for s in range(n - 1)]
    return layer.world("gathered-keys-backward", [*gather, ([], calls), *scatter], {})
