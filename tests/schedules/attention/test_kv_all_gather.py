"""Keys gathered at every rank: bytes, FLOPs and calls, along every AllGather. Proven on construction."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.decompose import decompose
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, AttentionTask
from tasp_lab.schedules.build import attention_schedules
from tasp_lab.schedules.registry import ATTENTION, schedules_of
from tasp_lab.topology.builders import bidirectional_ring, full_mesh, nodes, ring
from tasp_lab.workload.layer import Workload
from tests.support.routes import direct
from tests.support.systems import passes_of

NAMES = [name for name in ATTENTION if name.endswith("kv-all-gather")]


def width_of_gradients(name: str) -> int:
    """Beside keys in 16 bit: gradients that add up on their way are in float32."""
    return 1 if name.startswith("direct") else 2


def test_there_is_one_for_every_all_gather() -> None:
    others = [f"{each}-kv-all-gather" for each in schedules_of("AllGather") if each != "ring"]
    assert ["kv-all-gather", *others] == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_keys_of_all_ranks_come_and_their_gradients_return(name: str, kv_heads: int, n: int) -> None:
    """4X(P - 1) bytes forward and, in 16 bit, as many backward, where keys are not gathered again."""
    layer = Workload(sequence=8 * n, batch=2, heads=8, kv_heads=kv_heads, head_dim=4, mask="full")
    forward, backward = passes_of(name, full_mesh(n), layer)
    keys = layer.kv_bytes_per_position * layer.sequence // n
    assert keys == 4 * layer.batch * layer.sequence // n * kv_heads * layer.head_dim
    assert forward.bytes_sent().sum() == n * (n - 1) * keys
    assert backward.bytes_sent().sum() == n * (n - 1) * width_of_gradients(name) * keys
    small = passes_of(name, full_mesh(n), layer, gradient_dtype="input").backward
    assert small.bytes_sent().sum() == n * (n - 1) * keys
    if name in ("kv-all-gather", "direct-kv-all-gather"):
        assert (forward.bytes_sent().sum(axis=(0, 2)) == (n - 1) * keys).all()


@pytest.mark.parametrize("name", ["kv-all-gather", "direct-kv-all-gather"])
@pytest.mark.parametrize("n", [2, 3, 6])
def test_only_lower_ranks_need_the_back_half_of_a_shard_under_a_causal_mask(name: str, n: int) -> None:
    layer = Workload(sequence=6 * n, heads=2, head_dim=4, mask="causal")
    keys = layer.kv_bytes_per_position * layer.sequence // n
    for schedule, size in zip(passes_of(name, full_mesh(n), layer), (1, width_of_gradients(name)), strict=True):
        assert schedule.bytes_sent().sum() == Fraction(3, 4) * n * (n - 1) * size * keys
    whole, back = passes_of(name, full_mesh(n), layer, trim=False)
    assert whole.bytes_sent().sum() == n * (n - 1) * keys
    assert back.bytes_sent().sum() == Fraction(3, 4) * n * (n - 1) * width_of_gradients(name) * keys


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_a_rank_calls_once_per_span_after_the_gathering_and_all_compute_the_same(name: str, mask: str) -> None:
    n, layer = 4, Workload(sequence=64, heads=2, head_dim=8, mask=mask)
    forward, backward = passes_of(name, full_mesh(n), layer)
    spans = 1 if mask == "full" else 2
    pairs = 64 * 65 // 2 if mask == "causal" else 64**2
    for schedule, factor, at in ((forward, 2, len(forward.steps) - 1), (backward, 5, 0)):
        assert [len(calls) for calls in schedule.steps[at].calls] == [n * spans]
        assert not len(schedule.steps[at])
        assert (schedule.flops()[at] == pairs * factor * 2 * layer.heads * layer.head_dim // n).all()
        assert schedule.flops().sum() == schedule.flops()[at].sum()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_take_the_paths_of_their_keys_back(name: str) -> None:
    layer = Workload(70, heads=4, kv_heads=2, head_dim=2, mask="causal", documents=(13, 0, 1, 40, 16))
    forward, backward = passes_of(name, nodes(2, 2), layer)
    task = _task(backward)
    gradients = task.tensor == KEY_GRADIENTS
    keys = np.full(len(task.tensor), -1)
    keys[task.output_of[task.blocks_of(KEYS)]] = task.blocks_of(KEYS)
    there = [step.rows() for step in forward.steps[:-1]]
    back = [[(d, s, lane, int(keys[block])) for s, d, lane, block in step.rows()] for step in backward.steps[:0:-1]]
    assert there == back
    assert all(gradients[step.block].all() and step.gives.all() for step in backward.steps[1:])


def test_rings_that_are_given_are_used() -> None:
    mesh, layer = full_mesh(5), Workload(sequence=40, heads=2, mask="full")
    one = decompose(mesh, lanes=1)
    (all_rings,), (single,) = (
        attention_schedules("multi-ring-kv-all-gather", mesh, layer, rings) for rings in (None, one)
    )
    assert (all_rings.lanes, single.lanes) == (4, 1)


def test_links_one_way_suffice_to_gather_but_not_to_return() -> None:
    layer, both = Workload(sequence=24, heads=2, mask="full"), AttentionOptions("both")
    for name in NAMES:
        if not name.startswith("direct"):
            attention_schedules(name, ring(4), layer)
            attention_schedules(name, bidirectional_ring(4), layer, None, both)
            with pytest.raises(ScheduleError, match=f"{name}', step 1: rank . sends to rank ., but ring:4 has no such"):
                attention_schedules(name, direct(ring(4)), layer, None, both)
    with pytest.raises(ScheduleError, match=r"'direct-kv-all-gather': .* rank \d sends to rank \d, but .* has no such"):
        attention_schedules("direct-kv-all-gather", direct(bidirectional_ring(4)), layer)


def _task(schedule: Schedule) -> AttentionTask:
    assert isinstance(schedule.task, AttentionTask)
    return schedule.task
