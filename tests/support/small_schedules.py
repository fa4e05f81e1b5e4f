"""`SCHEDULES`: schedules of `tasp_lab` on a few ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tasp_lab.core.choices import Dataflow
from tasp_lab.schedule.composition.groups import over_groups, replicated
from tasp_lab.schedule.composition.layers import in_chunks, stacked
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import attention_passes
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh
from tests.support.attention_worlds import small
from tests.support.systems import lasp2, token_ring, token_ring_passes, ulysses_passes, usp

GROUPED = small(4, "causal", heads=4, kv_heads=2)


def _outer(name: str) -> Schedule:
    return attention(name, full_mesh(2), GROUPED)


def _backward(name: str, n: int, dataflow: Dataflow) -> Schedule:
    return attention_passes(name, full_mesh(n), small(n, "causal"), dataflow=dataflow).backward


def _layers() -> Schedule:
    topology, layer = full_mesh(3), small(3, "causal")
    full = token_ring(topology, small(3))
    return stacked([full, lasp2(topology, layer, 0.8), attention("ring-attention", topology, layer)])


def _training_step() -> Schedule:
    topology, layer = full_mesh(2), small(2)
    first = attention_passes("ring-attention", topology, layer, dataflow="rotate-kv")
    second = attention_passes("ring-attention", topology, layer, dataflow="rotate-q")
    return stacked([first.forward, second.forward, second.backward, first.backward])


def _collective(name: str, n: int, shard_bytes: int = 64) -> Schedule:
    return collective(name, full_mesh(n), shard_bytes)


SCHEDULES: Mapping[str, Callable[[], Schedule]] = {
    "zigzag-ring-attention": lambda: attention("zigzag-ring-attention", full_mesh(3), small(3, "causal")),
    "tasp": lambda: attention("tasp", full_mesh(3), small(3)),
    "rotate-kv": lambda: _backward("zigzag-ring-attention", 3, "rotate-kv"),
    "rotate-kv-back": lambda: _backward("ring-attention", 4, "rotate-kv-back"),
    "rotate-q": lambda: _backward("tasp", 3, "rotate-q"),
    "token-ring backward": lambda: token_ring_passes(full_mesh(3), small(3, "causal")).backward,
    "ulysses backward": lambda: ulysses_passes(full_mesh(4), GROUPED).backward,
    "usp": lambda: usp(full_mesh(4), _outer("zigzag-ring-attention"), 2),
    "usp backward": lambda: usp(full_mesh(4), token_ring_passes(full_mesh(2), GROUPED).backward, 2),
    "lasp2": lambda: lasp2(full_mesh(4), small(4, "causal"), 0.8),
    "three layers": _layers,
    "training step": _training_step,
    "lasp2 in chunks": lambda: in_chunks(lasp2(full_mesh(3), small(3, "causal", kv_heads=2), 0.8), 2),
    "token-ring backward in chunks": lambda: in_chunks(token_ring_passes(full_mesh(2), GROUPED).backward, 2),
    "two groups": lambda: replicated(attention("ring-attention", full_mesh(2), small(2)), np.array([[0, 2], [1, 3]])),
    "ring": lambda: _collective("ring", 4),
    "trees": lambda: _collective("trees", 4),
    "all-to-all": lambda: _collective("all-to-all", 3),
    "multi-ring-all-reduce": lambda: _collective("multi-ring-all-reduce", 3),
    "ring-all-reduce in chunks": lambda: in_chunks(_collective("ring-all-reduce", 3), 2),
    "all-reduce on two levels": lambda: over_groups(
        _collective("ring-all-reduce", 2), _collective("ring-all-reduce", 2, 128)
    ),
    "reduce-scatter on two levels": lambda: over_groups(
        _collective("ring-reduce-scatter", 2), _collective("ring-reduce-scatter", 2, 128), inner_first=True
    ),
}
