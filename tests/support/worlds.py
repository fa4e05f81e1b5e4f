"""`SCHEDULES`: schedules of `tasp_lab` on a few ranks, of every structure; `WORLDS`: the same as rows to be changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tasp_lab.core.choices import Dataflow, Pass
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.composition.groups import over_groups, replicated
from tasp_lab.schedule.composition.layers import in_chunks, stacked
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import attention_passes
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules, collective, linear_schedules
from tasp_lab.schedules.collectives.kinds import CollectiveKind
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.systems import lasp2, token_ring, token_ring_passes, ulysses_passes, usp
from tests.support.world import Transfer, World, world


def small(n: int, mask: str = "full", **options: Any) -> Workload:
    """A layer of three or four positions per rank."""
    values = {"heads": 2, "kv_heads": 1, "head_dim": 2, "dtype": "fp32", "mask": mask} | options
    return Workload(3 * n + 1, **values)


GROUPED = small(4, "causal", heads=4, kv_heads=2)


def _outer(name: str) -> Schedule:
    return attention(name, full_mesh(2), GROUPED)


def _one_pass(name: str, n: int, which: Pass, mask: str = "full", **options: Any) -> Schedule:
    """A pass of a small layer, by a schedule whose heads all ranks can share."""
    layer = small(n, mask, heads=n, kv_heads=n) if "ulysses" in name else small(n, mask)
    (schedule,) = attention_schedules(name, full_mesh(n), layer, None, AttentionOptions(which, **options))
    return schedule


def _linear(name: str, n: int, which: Pass) -> Schedule:
    layer = replace(small(n, "causal"), kind="linear", decay="head")
    (schedule,) = linear_schedules(name, full_mesh(n), layer, None, AttentionOptions(which), (0.8,))
    return schedule


def _documents() -> Schedule:
    """A packed batch in zigzag layout: a shard is several spans, a tile of two documents is empty."""
    layer = Workload(17, heads=2, kv_heads=1, head_dim=2, dtype="fp32", mask="causal", documents=(7, 10))
    return attention("zigzag-ring-attention", full_mesh(3), layer)


def _many_parts() -> Schedule:
    """A result has 72 parts, more than a machine word has bits."""
    return attention("tasp", full_mesh(9), Workload(72, heads=1, head_dim=1, dtype="fp32", mask="full"))


def _layers() -> Schedule:
    topology, layer = full_mesh(3), small(3, "causal")
    full = token_ring(topology, small(3))
    return stacked([full, lasp2(topology, layer, 0.8), attention("ring-attention", topology, layer)])


def _training_step() -> Schedule:
    topology, layer = full_mesh(2), small(2)
    first = attention_passes("ring-attention", topology, layer, dataflow="rotate-kv")
    second = attention_passes("ring-attention", topology, layer, dataflow="rotate-q")
    return stacked([first.forward, second.forward, second.backward, first.backward])


def _backward(name: str, n: int, dataflow: Dataflow) -> Schedule:
    return attention_passes(name, full_mesh(n), small(n, "causal"), dataflow=dataflow).backward


def _collective(name: str, n: int, shard_bytes: int = 64) -> Schedule:
    return collective(name, full_mesh(n), shard_bytes)


SCHEDULES: Mapping[str, Callable[[], Schedule]] = {
    "ring-attention": lambda: _one_pass("ring-attention", 4, "forward"),
    "ring-attention causal": lambda: _one_pass("ring-attention", 4, "forward", "causal"),
    "striped window": lambda: attention("striped-ring-attention", full_mesh(3), small(3, "causal", window=5)),
    "zigzag documents": _documents,
    "many parts": _many_parts,
    "zigzag-ring-attention": lambda: attention("zigzag-ring-attention", full_mesh(3), small(3, "causal")),
    "tasp": lambda: attention("tasp", full_mesh(3), small(3)),
    "token-ring": lambda: _one_pass("token-ring", 4, "forward"),
    "token-ring causal": lambda: _one_pass("token-ring", 4, "forward", "causal"),
    "ulysses": lambda: _one_pass("ulysses", 3, "forward", "causal"),
    "kv-and-q-rings": lambda: _one_pass("kv-and-q-rings", 4, "forward"),
    "rotate-kv": lambda: _backward("zigzag-ring-attention", 3, "rotate-kv"),
    "rotate-kv-back": lambda: _backward("ring-attention", 4, "rotate-kv-back"),
    "rotate-q": lambda: _backward("tasp", 3, "rotate-q"),
    "burst backward": lambda: _one_pass("burst", 4, "backward"),
    "kv-all-gather backward": lambda: _one_pass("kv-all-gather", 3, "backward"),
    "token-ring backward": lambda: token_ring_passes(full_mesh(3), small(3, "causal")).backward,
    "ulysses backward": lambda: ulysses_passes(full_mesh(4), GROUPED).backward,
    "usp": lambda: usp(full_mesh(4), _outer("zigzag-ring-attention"), 2),
    "usp backward": lambda: usp(full_mesh(4), token_ring_passes(full_mesh(2), GROUPED).backward, 2),
    "lasp": lambda: _linear("lasp", 4, "forward"),
    "all-scan": lambda: _linear("all-scan", 3, "forward"),
    "lasp2": lambda: lasp2(full_mesh(4), small(4, "causal"), 0.8),
    "lasp2 backward": lambda: _linear("lasp-2", 4, "backward"),
    "three layers": _layers,
    "training step": _training_step,
    "lasp2 in chunks": lambda: in_chunks(lasp2(full_mesh(3), small(3, "causal", kv_heads=2), 0.8), 2),
    "token-ring backward in chunks": lambda: in_chunks(token_ring_passes(full_mesh(2), GROUPED).backward, 2),
    "two groups": lambda: replicated(attention("ring-attention", full_mesh(2), small(2)), np.array([[0, 2], [1, 3]])),
    "ring": lambda: _collective("ring", 4),
    "trees": lambda: _collective("trees", 4),
    "all-to-all": lambda: _collective("all-to-all", 3),
    "ring-all-reduce": lambda: _collective("ring-all-reduce", 4),
    "multi-ring-all-reduce": lambda: _collective("multi-ring-all-reduce", 3),
    "ring-all-reduce in chunks": lambda: in_chunks(_collective("ring-all-reduce", 3), 2),
    "all-reduce on two levels": lambda: over_groups(
        _collective("ring-all-reduce", 2), _collective("ring-all-reduce", 2, 128)
    ),
    "reduce-scatter on two levels": lambda: over_groups(
        _collective("ring-reduce-scatter", 2), _collective("ring-reduce-scatter", 2, 128), inner_first=True
    ),
}


def doubling_all_reduce(n: int) -> World:
    """Partial sums are copied to and fro between ranks at doubling distances."""
    everything = np.ones((n, 1), dtype=np.bool_)
    rows = [([Transfer(r, r ^ d, 0, 0) for r in range(n)], ()) for d in (1, 2, 4) if d < n]
    blocks, own = Blocks.of_sums(np.array([8]), n), np.arange(n)[:, None]
    return _checked(world("doubling-all-reduce", blocks, everything, everything.copy(), rows, initial_part=own))


def _checked(found: World) -> World:
    """The world; if it has no task, as the collective that its name says."""
    if found.task is not None:
        return found
    kinds: Mapping[str, CollectiveKind] = {
        "reduce-scatter": "ReduceScatter", "all-reduce": "AllReduce", "all-to-all": "AllToAll", "": "AllGather"
    }  # fmt: skip
    kind = next(kind for word, kind in kinds.items() if word in found.name)
    total = int(found.blocks.bytes.sum())
    shards = found.world_size**2 if kind == "AllToAll" else found.world_size
    return replace(found, collective=(kind, total // shards))


def _of_schedule(build: Callable[[], Schedule]) -> World:
    return _checked(World.of(build()))


WORLDS: Mapping[str, Callable[[], World]] = {
    "doubling all-reduce": partial(doubling_all_reduce, 4),
    **{name: partial(_of_schedule, build) for name, build in SCHEDULES.items()},
}
