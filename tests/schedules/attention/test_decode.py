"""Decode layers: bytes and caches by closed forms, both engines, the bound, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.bounds.least import least_s
from sim.simulate import simulate
from tasp_lab.core.errors import ScheduleError, WorkloadError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.prediction.predict import predict
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import KEYS, SCALE, SCALES, AttentionTask
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import ATTENTION, layer_names_on
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import ELEMENT_BYTES, Workload

NAMES = [name for name, spec in ATTENTION.items() if spec.decode]
SPREAD = ["decode-all-to-all", "decode-reduce-scatter", "decode-tree"]
MLA = Workload(decode=True, cached_keys=4096, batch=4, heads=128, kv_heads=1, head_dim=576, value_dim=512,
               values_in_keys=True)  # fmt: skip


@st.composite
def decode_layers(draw: st.DrawFn, max_ranks: int = 8) -> tuple[int, Workload]:
    """Ranks, and a layer whose heads they divide: grouped heads, values of another width, keys that do not divide."""
    n = draw(st.integers(1, max_ranks))
    kv_heads = draw(st.sampled_from([each for each in range(1, 2 * n + 1) if n % each == 0 or each % n == 0]))
    ratio = draw(st.integers(1, 3)) * max(n // kv_heads, 1)
    value_dim = draw(st.integers(1, 8))
    is_part = draw(st.booleans())
    head_dim = value_dim + draw(st.integers(0, 3)) if is_part else draw(st.integers(1, 8))
    return n, Workload(
        decode=True, cached_keys=draw(st.integers(n, 40)), batch=draw(st.integers(1, 3)), heads=kv_heads * ratio,
        kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, values_in_keys=is_part,
        dtype=draw(st.sampled_from(["fp32", "bf16"])), mask=draw(st.sampled_from(["full", "causal"])),
    )  # fmt: skip


def built(name: str, n: int, layer: Workload) -> Schedule:
    (schedule,) = build_schedules(name, full_mesh(n), layer)
    return schedule


def task_of(schedule: Schedule) -> AttentionTask:
    assert isinstance(schedule.task, AttentionTask)
    return schedule.task


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(decode_layers())
def test_every_rank_sends_the_bytes_of_the_closed_form(name: str, drawn: tuple[int, Workload]) -> None:
    """With b sequences, H heads of d and v elements of e bytes, n ranks: (n - 1)/n of all queries, and of all results.

    Log-sum-exps have 4 bytes: (n - 1)/n of them, but all of them n - 1 times where they are gathered.
    """
    n, layer = drawn
    e, rows, others = ELEMENT_BYTES[layer.dtype], Fraction(layer.batch * layer.heads), Fraction(n - 1, n)
    queries, results = rows * layer.head_dim * e, rows * layer.value_size * e
    expected = {
        "decode-heads": Fraction(0),
        "decode-all-to-all": others * (queries + results + 4 * rows),
        "decode-reduce-scatter": others * (queries + results) + (n - 1) * 4 * rows,
        "decode-tree": others * (queries + 4 * rows * layer.value_size + 4 * rows),
    }
    sent = built(name, n, layer).bytes_sent().sum(axis=(0, 2))
    assert [Fraction(int(each)) for each in sent] == [expected[name]] * n


@settings(max_examples=40)
@given(decode_layers(), st.sampled_from(NAMES))
def test_every_rank_makes_one_call_and_all_pairs_are_computed(drawn: tuple[int, Workload], name: str) -> None:
    """FLOPs of all ranks: 2 (d + v) per query head and key, as often as there are sequences."""
    n, layer = drawn
    schedule = built(name, n, layer)
    calls = [each for step in schedule.steps for each in step.calls if each.kernel != SCALE]
    assert [rank for each in calls for rank in each.rank.tolist()] == list(range(n))
    flops = sum(int(task_of(schedule).flops(each).sum()) for each in calls)
    assert flops == 2 * (layer.head_dim + layer.value_size) * layer.batch * layer.heads * layer.sequence
    (rows,) = (task_of(schedule).shapes(each) for each in calls)
    heads = layer.heads // n if name == "decode-heads" else layer.heads
    assert (set(rows.heads.tolist()), set(rows.queries.tolist())) == ({heads}, {1})


@settings(max_examples=40)
@given(decode_layers(), st.sampled_from(NAMES))
def test_both_engines_agree_and_take_no_less_than_the_bound(drawn: tuple[int, Workload], name: str) -> None:
    n, layer = drawn
    machine = Machine(full_mesh(n, Fraction(10**6), Fraction(1, 10**6)), compute=ComputeRate(Fraction(10**7)))
    schedule = built(name, n, layer)
    exact = simulate(schedule, machine, "simpy").time_s
    for events in (True, False):
        found = simulate(schedule, machine, "array", events=events).time_s
        assert float(found) == pytest.approx(float(exact), rel=1e-9)
    assert exact >= least_s(schedule, machine)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 8), (64, 16), (64, 4), (64, 1)])
def test_a_cache_is_whole_on_every_rank_only_where_heads_share_it(name: str, heads: int, kv_heads: int) -> None:
    """Plain tensor parallelism on n ranks: 1/n of the cache, but at least one KV head. Spread: 1/n always."""
    layer = Workload(decode=True, cached_keys=4096, batch=2, heads=heads, kv_heads=kv_heads, head_dim=32)
    (answer,) = predict("full-mesh:8", [name], layer, samples=0, compute="timed:1e12")
    whole = Fraction(layer.kv_bytes_per_position * layer.sequence)
    assert answer.cache_bytes == (whole * max(Fraction(1, 8), Fraction(1, kv_heads)) if name == "decode-heads"
                                  else whole / 8)  # fmt: skip


@pytest.mark.parametrize("kv_heads", [16, 8, 1])
def test_the_memory_of_plain_tensor_parallelism_is_its_cache_and_its_heads(kv_heads: int) -> None:
    """Once, on the rank that owns a KV head and on those that share it; a rank has 1/n of queries and results."""
    layer = Workload(decode=True, cached_keys=4096, batch=2, heads=64, kv_heads=kv_heads, head_dim=32)
    (answer,) = predict("full-mesh:8", ["decode-heads"], layer, samples=0, compute="timed:1e12")
    assert answer.memory_bytes == answer.cache_bytes + 2 * 2 * 64 * 32 * 2 // 8


def test_values_in_keys_are_counted_once() -> None:
    """A latent head of 576 elements, of which 512 are the values: 576 elements per position instead of 1,088."""
    apart = replace(MLA, values_in_keys=False)
    assert Fraction(MLA.kv_bytes_per_position, apart.kv_bytes_per_position) == Fraction(576, 1088)
    for name in NAMES:
        one, two = (built(name, 8, layer) for layer in (MLA, apart))
        keys = task_of(one).tensor == KEYS
        assert (one.block_bytes[keys] * 1088 == two.block_bytes[keys] * 576).all()
        assert np.array_equal(one.block_bytes[~keys], two.block_bytes[~keys])
        assert np.array_equal(one.bytes_sent(), two.bytes_sent())


def test_a_memory_bound_call_takes_the_bytes_of_its_keys_over_the_bandwidth() -> None:
    """Twice as many keys: as much longer as these take to read, at the bandwidth of the GPU's data file."""
    for machine, bytes_per_s in (("h100-8", 2.95e12), ("h200-8", 4.1e12), ("b200-8", 6.5e12)):
        times_s = []
        for batch in (64, 128):
            layer = Workload(decode=True, cached_keys="32Ki", batch=batch, heads=64, kv_heads=8)
            (answer,) = predict(machine, ["decode-heads"], layer, samples=0)
            times_s.append(float(answer.compute_s))
        kv_bytes = 64 * 32768 * 2 * 128 * 2
        assert times_s[1] - times_s[0] == pytest.approx(kv_bytes / bytes_per_s, rel=0.01)
        assert times_s[0] > kv_bytes / bytes_per_s


def test_absorbed_mla_of_all_heads_is_bound_by_arithmetic_on_hopper() -> None:
    """128 heads on one latent head take 278,528 FLOPs for 1,152 bytes: more than 660 TFLOP/s, the most that FlashMLA
    reaches, does while an H100 reads them; 16 heads do not.
    """
    for name, share in (("decode-all-to-all", 1), ("decode-heads", 1 / 8)):
        large = replace(MLA, cached_keys=2**18, sequence=2**18, batch=128)
        (answer,) = predict("h100-8", [name], large, samples=0)
        keys = 128 * 2**18 * (1 / 8 if name == "decode-all-to-all" else 1)
        arithmetic_s, memory_s = keys * 278528 * share / 660e12, keys * 1152 / 2.95e12
        assert float(answer.compute_s) == pytest.approx(max(arithmetic_s, memory_s), rel=0.03)


def test_compare_lists_exactly_the_schedules_of_decode_layers() -> None:
    assert layer_names_on(8, MLA) == NAMES == ["decode-heads", "decode-reduce-scatter", "decode-all-to-all",
                                               "decode-tree"]  # fmt: skip
    assert not set(NAMES) & set(layer_names_on(8, Workload(64)))


@pytest.mark.parametrize(
    ("name", "n", "layer", "words"),
    [
        ("tasp", 4, MLA, "'tasp' is not for decode layers, expected one of decode-heads"),
        ("decode-tree", 4, Workload(64), "is for decode layers alone"),
        ("decode-tree", 3, MLA, "128 heads \\(1 KV heads\\) on 3 ranks, expected heads that ranks divide"),
        ("decode-heads", 4, Workload(decode=True, cached_keys=9, heads=12, kv_heads=3), "expected KV heads that ranks"),
        ("decode-all-to-all", 4, Workload(decode=True, cached_keys=3, heads=8), "3 cached keys for 4 ranks"),
    ],
)
def test_what_does_not_apply_is_refused_by_name(name: str, n: int, layer: Workload, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        built(name, n, layer)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"documents": (8, 8), "cached_keys": 16}, "decode with documents"),
        ({"cached_keys": 16, "window": 4}, "decode with a window"),
        ({"sequence": 17, "cached_keys": 16}, "17 of a decode layer with 16 cached keys"),
        ({"cached_keys": 16, "kind": "linear"}, "decode of linear attention"),
        ({}, "sequence: 0, expected 1 or more"),
        ({"cached_keys": 16, "batch": 0}, "batch: 0, expected 1 or more"),
        ({"cached_keys": 16, "values_in_keys": True, "value_dim": 256}, "256 elements of values, expected at most"),
    ],
)
def test_a_layer_that_is_no_decode_step_is_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        Workload(**{"decode": True} | values)  # type: ignore[arg-type]


def test_keys_are_given_once() -> None:
    """The key of the new token is one of the cached ones, so positions and cached keys are one number."""
    one, two = Workload(decode=True, cached_keys="4Ki"), Workload("4Ki", decode=True)
    assert one == two == one.resized(8192).resized(4096)
    assert (one.sequence, one.cached_keys, one.queries) == (4096, 4096, 1)


def test_results_are_scaled_by_the_log_sum_exps_of_all_ranks_or_refused() -> None:
    """Without the AllGather of log-sum-exps, ranks scale by what they do not have."""
    schedule = built("decode-reduce-scatter", 4, replace(MLA, batch=1))
    task = task_of(schedule)
    gathers = [len(each.block) and bool((task.tensor[each.block] == SCALES).all()) for each in schedule.steps]
    assert sum(gathers) == 1
    with pytest.raises(ScheduleError, match="rank 0 computes with block 13 "):
        replace(schedule, steps=[each for each, gather in zip(schedule.steps, gathers, strict=True) if not gather])


def test_a_rank_that_scales_without_all_log_sum_exps_is_refused() -> None:
    schedule = built("decode-reduce-scatter", 2, replace(MLA, batch=1))
    task = task_of(schedule)
    (calls,) = (each for step in schedule.steps for each in step.calls if each.kernel == SCALE)
    queries, scales = calls.operands
    fewer = replace(calls, operands=(queries, type(scales).of([each[:1] for each in scales.lists()])))
    with pytest.raises(ScheduleError, match="rank 0 scales: expected all queries, and all log-sum-exps"):
        task.effects(fewer)


def test_a_result_that_is_not_given_home_is_missed() -> None:
    schedule = built("decode-all-to-all", 4, replace(MLA, batch=1))
    *before, home = schedule.steps
    rest = Step(*(getattr(home, name)[1:] for name in ("source", "destination", "lane", "block", "gives")))
    with pytest.raises(ScheduleError, match="results"):
        replace(schedule, steps=[*before, rest])


def test_spreading_keys_pays_for_one_latent_head_and_not_for_a_kv_head_per_rank() -> None:
    """With a KV head per rank, both read as many bytes; with one for all, plain tensor parallelism reads it 8 times."""
    machine = load_machine("h100-8")
    for kv_heads, pays in ((1, True), (8, False)):
        layer = Workload(decode=True, cached_keys="128Ki", batch=32, heads=64, kv_heads=kv_heads)
        alone, *spread = predict(machine, ["decode-heads", *SPREAD], layer, samples=0)
        assert (min(each.time_s for each in spread) < alone.time_s) == pays
