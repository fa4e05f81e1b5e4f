"""`WORLDS`: systems on a few ranks each; here are those without attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import KEYS, QUERIES
from tasp_lab.schedules.collectives.kinds import CollectiveKind
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import striped, zigzag
from tests.support.attention_worlds import (
    Layer,
    backward,
    gathered_keys_backward,
    mixed,
    ring,
    small,
    token_ring,
    ulysses,
    usp,
)  # fmt: skip
from tests.support.linear_worlds import lasp2, lasp2_backward, scan
from tests.support.small_schedules import SCHEDULES
from tests.support.world import Transfer, World, world


def _sums(name: str, n: int, count: int, steps: list[list[Transfer]]) -> World:
    """Rank r has part r of every block at the start, all ranks all of it at the end."""
    everything = np.ones((n, count), dtype=np.bool_)
    own = np.arange(n)[:, None] * np.ones((1, count), dtype=np.int64)
    blocks = Blocks.of_sums(np.full(count, 8), n)
    rows = [(moves, ()) for moves in steps]
    return _collective(world(name, blocks, everything, everything.copy(), rows, initial_part=own))


def ring_all_reduce(n: int) -> World:
    """Partial sums are given along the ring, then copied."""
    steps = [[Transfer(r, (r + 1) % n, 0, (r - s) % n, s < n - 1) for r in range(n)] for s in range(2 * (n - 1))]
    return _sums("ring-all-reduce", n, n, steps)


def doubling_all_reduce(n: int) -> World:
    """Partial sums are copied to and fro between ranks at doubling distances."""
    return _sums(
        "doubling-all-reduce", n, 1, [[Transfer(r, r ^ d, 0, 0) for r in range(n)] for d in (1, 2, 4) if d < n]
    )


def _documents() -> World:
    """A packed batch in zigzag layout: a shard is several spans, a tile of two documents is empty."""
    layer = Workload(17, heads=2, kv_heads=1, head_dim=2, dtype="fp32", mask="causal", documents=(7, 10))
    return ring(Layer.of(3, layer, layout=zigzag))


def _window() -> World:
    """Every query sees its own position and the four before; positions of a rank are strided."""
    return ring(Layer.of(3, small(3, "causal", window=5), layout=striped))


def _many_keys() -> World:
    """A result has 66 parts, more than a machine word has bits."""
    layer = Workload(66, heads=1, head_dim=2, dtype="fp32", mask="full")
    return ring(Layer.of(2, layer, key_pieces=33), one_call=True)


def _heads(n: int, mask: str, groups: int) -> Layer:
    return Layer.of(n, small(n, mask, heads=2 * groups, kv_heads=groups), groups=groups)


def _of_product(build: Callable[[], Schedule]) -> World:
    found = World.of(build())
    return found if found.task is not None else _collective(found)


def _collective(found: World) -> World:
    """A world without a task, as the collective that its name says."""
    kinds: Mapping[str, CollectiveKind] = {
        "reduce-scatter": "ReduceScatter", "all-reduce": "AllReduce", "all-to-all": "AllToAll", "": "AllGather"
    }  # fmt: skip
    kind = next(kind for word, kind in kinds.items() if word in found.name)
    total = int(found.blocks.bytes.sum())
    shards = found.world_size**2 if kind == "AllToAll" else found.world_size
    return replace(found, collective=(kind, total // shards))


WORLDS: Mapping[str, Callable[[], World]] = {
    "ring": lambda: ring(Layer.of(4, small(4))),
    "ring causal": lambda: ring(Layer.of(4, small(4, "causal"))),
    "ring zigzag documents": _documents,
    "ring striped window": _window,
    "ring many keys": _many_keys,
    "token-ring": lambda: token_ring(Layer.of(4, small(4))),
    "token-ring causal": lambda: token_ring(Layer.of(4, small(4, "causal"))),
    "token-ring zigzag": lambda: token_ring(Layer.of(3, small(3, "causal"), layout=zigzag)),
    "burst backward": lambda: backward(Layer.of(4, small(4), backward=True), QUERIES, straight=False),
    "burst backward causal": lambda: backward(Layer.of(4, small(4, "causal"), backward=True), QUERIES, straight=False),
    "token backward": lambda: backward(Layer.of(4, small(4), backward=True), QUERIES, straight=True),
    "token backward causal": lambda: backward(Layer.of(4, small(4, "causal"), backward=True), QUERIES, straight=True),
    "ring backward causal": lambda: backward(Layer.of(4, small(4, "causal"), backward=True), KEYS, straight=False),
    "ulysses": lambda: ulysses(_heads(3, "full", 3)),
    "ulysses causal": lambda: ulysses(_heads(3, "causal", 3)),
    "usp": lambda: usp(_heads(4, "full", 2), 2),
    "usp causal": lambda: usp(_heads(4, "causal", 2), 2),
    "mixed": lambda: mixed(Layer.of(4, small(4), key_pieces=2)),
    "gathered keys backward": lambda: gathered_keys_backward(Layer.of(3, small(3), backward=True)),
    "lasp1": lambda: scan(4, 1),
    "all-scan": lambda: scan(4, 2),
    "lasp2": lambda: lasp2(4),
    "lasp2 backward": lambda: lasp2_backward(4),
    "ring all-reduce": lambda: ring_all_reduce(4),
    "doubling all-reduce": lambda: doubling_all_reduce(4),
    **{f"tasp_lab: {name}": partial(_of_product, build) for name, build in SCHEDULES.items()},
}
"""All worlds, by name: those that are written here, and the schedules of `tasp_lab`."""
