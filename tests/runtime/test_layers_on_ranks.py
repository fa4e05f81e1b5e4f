"""Every layer by every schedule on real processes: results, gradients and bytes, against float64 on one process.

The trials of `validate` are the second harness: ranks of the launcher, which check themselves against float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from runtime import attention, attention_with_lse
from runtime.kernels.registry import KERNELS, choose_kernel
from runtime.protocol.jobs import RunSchedule
from runtime.protocol.records import RankRecord, merge_records
from runtime.ranks.launcher import LaunchedRanks
from runtime.sequence_parallel.sharding import shard
from tasp_lab.core.errors import WorkloadError
from tasp_lab.schedule.composition import in_chunks, over_groups
from tasp_lab.schedule.dependencies import channels
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS, attention_passes
from tasp_lab.schedules.attention.forward import CIRCULATIONS
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout, collective
from tasp_lab.schedules.registry import LINEAR
from tasp_lab.timeline.events import SEND
from tasp_lab.topology.builders import full_mesh, nodes
from tasp_lab.topology.derived import renumbered
from tasp_lab.workload.layer import Workload
from tests.support.home_dtype import with_home_dtype
from tests.support.masks import ONE_OF_EACH
from tests.support.rank_layers import (
    BOTH,
    Case,
    Shard,
    Squares,
    built_once,
    check,
    dout_of,
    errors_of,
    exact,
    layer_of,
    relative_errors,
    squares,
)
from tests.support.ranks import on_ranks, succeeded
from tests.support.schedules import assert_every_transfer_once
from tests.support.selection import covering
from tests.support.systems import lasp2, schedules_for, token_ring_passes, ulysses_passes

pytestmark = pytest.mark.distributed

HEADS = 24
"""A multiple of every world size but 5 and 7, on which ranks have different numbers of heads."""

DOCUMENTS = (13, 0, 1, 40, 16)
"""An empty one, one of a single position, and one longer than a shard."""

SOFTMAX = [
    Workload(67, batch=2, heads=HEADS, kv_heads=12, head_dim=8, dtype="fp32", mask="causal", value_dim=5),
    Workload(53, heads=HEADS, head_dim=8, dtype="fp32", mask="full", value_dim=12),
    Workload(61, heads=HEADS, kv_heads=2, head_dim=8, dtype="fp32", mask="causal", window=13, value_dim=16),
    Workload(70, heads=HEADS, kv_heads=1, head_dim=8, dtype="fp32", documents=DOCUMENTS, mask="full", value_dim=7),
    Workload(70, heads=HEADS, kv_heads=8, head_dim=8, dtype="fp32", mask="causal", documents=DOCUMENTS, value_dim=3),
    Workload(70, heads=HEADS, kv_heads=4, head_dim=8, dtype="fp32", ranges=ONE_OF_EACH),
]
"""Lengths that no world size divides, every mask, packed documents, ranges, 1 KV head to as many as heads, and values
that are narrower or wider than keys."""

CIRCULATED = [
    Workload(67, batch=2, heads=4, kv_heads=2, head_dim=16, dtype="fp32", mask="causal", value_dim=8),
    Workload(53, heads=3, kv_heads=3, head_dim=8, dtype="fp32", mask="full", value_dim=9),
    Workload(61, heads=4, kv_heads=1, head_dim=8, dtype="fp32", mask="causal", window=13, value_dim=5),
    Workload(70, heads=4, kv_heads=2, head_dim=8, dtype="fp32", documents=(0, 3, 40, 1, 0, 17, 9, 0), mask="full"),
    Workload(
        70, batch=2, heads=2, kv_heads=2, head_dim=8, dtype="fp32", mask="causal", documents=DOCUMENTS, value_dim=4
    ),
    Workload(
        70, heads=3, kv_heads=1, head_dim=8, dtype="fp32", mask="causal", window=6, documents=DOCUMENTS, value_dim=8
    ),
    Workload(70, heads=4, kv_heads=2, head_dim=8, dtype="fp32", ranges=ONE_OF_EACH),
]


def linear(sequence: int = 61, **fields: Any) -> Workload:
    usual: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 5, "dtype": "fp32", "mask": "causal"}
    return Workload(sequence, **(usual | fields), kind="linear")


LINEAR_LAYERS = [
    *(linear(batch=2, decay=decay, value_dim=3) for decay in ("none", "head", "scalar", "channel")),
    *(
        linear(70, documents=DOCUMENTS, decay=decay, value_dim=size)
        for decay, size in (("none", 7), ("head", None), ("scalar", 7), ("channel", 2))
    ),
    linear(mask="full", value_dim=7),
    linear(5, decay="scalar"),
    linear(3, decay="none"),
]
"""Every decay with uneven lengths and with packed documents, a full mask, and layers that leave some ranks nothing."""


def applies(name: str, work: Workload) -> bool:
    """Rings of keys do not with data-dependent decay, chains of states need an order."""
    if name.startswith("ring-linear-attention"):
        return work.decay in ("none", "head")
    return work.mask == "causal" or name not in ("lasp", "all-scan")


def names_of(work: Workload, world_size: int, variants: bool = False) -> list[str]:
    """The variants of families, or all else but circulations. Of USP all run on four ranks and one on more."""
    names = [name for name in schedules_for(work, world_size, variants=variants) if name not in CIRCULATIONS]
    return [
        name for name in names
        if (name.count(":") == 2) == variants
        and not (variants and world_size > 4 and name.startswith("usp:") and not name.endswith(":tasp"))
    ]  # fmt: skip


SOFTMAX_ON = {2: SOFTMAX[1::2], 3: SOFTMAX[::2], 4: SOFTMAX, 5: SOFTMAX[1::2], 8: [*SOFTMAX[2:4], SOFTMAX[5]]}
"""All layers on four ranks, on others some each."""


@cache
def softmax_by_name() -> list[tuple[int, Workload, str]]:
    """Numbers of ranks, layers and names."""
    every = [(n, work, name) for n, layers in SOFTMAX_ON.items() for work in layers for name in names_of(work, n)]
    for n in SOFTMAX_ON:
        names = {name for ranks, _, name in every if ranks == n}
        assert {"token-ring", "zigzag-token-ring", "ulysses"} <= names
    return covering(every)


@pytest.mark.parametrize("world_size", SOFTMAX_ON)
def test_softmax_layers_by_name(world_size: int) -> None:
    """On few ranks by name."""
    cases = [Case(work, name) for n, work, name in softmax_by_name() if n == world_size]
    check(cases if world_size < 4 else built_once(cases, world_size), world_size)


@pytest.mark.parametrize("world_size", [4, 6, 8])
def test_variants_of_families(world_size: int) -> None:
    layers = {4: SOFTMAX[::2], 6: SOFTMAX[:1], 8: SOFTMAX[4:]}[world_size]
    every = ((work, name) for work in layers for name in names_of(work, world_size, variants=True))
    cases = [Case(*case) for case in covering(every)]
    splits = {4: ["2x2"], 6: ["2x3", "3x2"], 8: ["2x4", "4x2"]}[world_size]
    assert {f"double-ring:{split}:tasp" for split in splits} <= {case.schedule for case in cases}
    check(built_once(cases, world_size), world_size)


def circulations(
    world_size: int, layers: Sequence[Workload], names: Sequence[str], gradient_dtypes: Sequence[str] = ("fp32",),
    together: int = 1,
) -> list[Case]:  # fmt: skip
    """Both dataflows of the backward pass; schedules are built once, which takes most of the time."""
    mesh, cases = full_mesh(world_size), []
    for work, name, dataflow, dtype in covering(product(layers, names, DATAFLOWS, gradient_dtypes), together):
        options: Any = {"dataflow": dataflow, "gradient_dtype": dtype}
        passes = attention_passes(name, mesh, work, **options)
        cases.append(Case(work, name, AttentionOptions("both", **options), passes=passes))
    return cases


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_circulations_along_every_dataflow(world_size: int) -> None:
    """Uneven shards and packed documents. All layers on three ranks, on others some each."""
    layers = {2: CIRCULATED[::2], 3: CIRCULATED, 5: CIRCULATED[1::2], 8: CIRCULATED[::3]}[world_size]
    check(circulations(world_size, layers, list(CIRCULATIONS)), world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_linear_layers(world_size: int) -> None:
    layers = {2: LINEAR_LAYERS[1::2], 3: LINEAR_LAYERS, 4: LINEAR_LAYERS[::2], 8: LINEAR_LAYERS[::4]}[world_size]
    every = ((work, name) for work in layers for name in LINEAR if applies(name, work))
    cases = [Case(*case) for case in covering(every)]
    assert {case.schedule for case in cases} == set(LINEAR)
    check(cases, world_size)


ON_BOTH_SIDES = [
    Workload(67, batch=2, heads=12, kv_heads=6, head_dim=8, dtype="fp32", mask="full", window=(9, 20)),
    Workload(53, heads=12, head_dim=8, dtype="fp32", mask="full", window=(0, 30), value_dim=5),
    Workload(70, heads=12, kv_heads=2, head_dim=8, dtype="fp32", mask="full", documents=DOCUMENTS, window=(6, 4)),
    Workload(61, heads=12, kv_heads=1, head_dim=8, dtype="fp32", mask="full", window=(None, 3)),
]


@pytest.mark.parametrize("world_size", [3, 4, 8])
def test_windows_on_both_sides(world_size: int) -> None:
    """The first of each schedule, and of circulations one more, whose rings block by block have other bands."""
    names = [name for name in names_of(ON_BOTH_SIDES[0], world_size) if world_size < 8 or "ulysses" not in name]
    cases = [Case(ON_BOTH_SIDES[at % 4], name) for at, name in enumerate([*names, *CIRCULATIONS, *CIRCULATIONS])]
    check(built_once(cases, world_size), world_size)


UNEVEN = {
    3: [("ulysses", 5, 5), ("staged-ulysses", 14, 7)],
    4: [("ulysses", 14, 14), ("staged-ulysses", 14, 14), ("ulysses", 14, 2), ("ulysses", 13, 1), ("ulysses", 6, 2),
        ("ulysses", 6, 3), ("ulysses", 12, 3), ("ulysses", 20, 5), ("usp:2x2", 3, 3), ("usp:2x2:tasp", 9, 3),
        ("usp:2x2:token-ring", 5, 1), ("usp:2x2:kv-all-gather", 14, 14), ("usp:2x2:direct-kv-all-gather", 3, 1)],
}  # fmt: skip
"""By number of ranks: schedules, heads and KV heads that the ranks which share them do not divide."""


@pytest.mark.parametrize("world_size", UNEVEN)
def test_heads_that_ranks_do_not_divide(world_size: int) -> None:
    """As they are, and padded: one of both with packed documents."""
    cases = []
    for number, ((name, heads, kv_heads), is_padded) in enumerate(product(UNEVEN[world_size], (False, True))):
        documents = DOCUMENTS if (number // 2 + number) % 2 else None
        layer = Workload(
            70, heads=heads, kv_heads=kv_heads, head_dim=8, dtype="fp32", mask="causal", documents=documents
        )
        cases.append(Case(layer, name, AttentionOptions("both", padded_heads=is_padded)))
    check(cases, world_size)


# Half precision


def alone(work: Workload) -> list[torch.Tensor]:
    """What one process gets in the dtype of the layer, from the kernel that ranks use."""
    q, k, v = layer_of(work)
    n, scale, dout = work.sequence, work.head_dim**-0.5, dout_of(work)
    limits = {"low": 0 if work.mask == "causal" else 1 - n, "high": n - 1}
    kernel = choose_kernel("auto", q.dtype, q.device, work.head_dim, work.value_size)
    out, lse = kernel.attend(q, k, v, scale=scale, **limits)
    return [x.to(q.dtype) for x in (out, *kernel.backward(dout, q, k, v, out, lse, scale=scale, **limits))]


HALF = [
    Workload(192, heads=8, kv_heads=8, head_dim=32, dtype="fp16", mask="full"),
    Workload(192, batch=2, heads=8, kv_heads=4, head_dim=32, dtype="bf16", mask="causal"),
]
"""Large enough for rounding errors to average out."""


@pytest.mark.parametrize("world_size", [2, 5, 8])
def test_what_half_precision_costs_circulations(world_size: int) -> None:
    """Kernels round each part, and the sum is rounded in the end: twice the squared error of one process, which rounds
    once, however many ranks there are. Gradients that travel in 16 bits, here with the h-th of n parts on board, are
    rounded at each hop h > 1 to 2**-9 (fp16: 2**-12) of about sqrt(h / n) of their sum: squared errors grow with n.
    """
    n = world_size
    growing = (1 + sum(hop / n for hop in range(2, n + 1))) ** 0.5
    for case, errors in errors_of(circulations(n, HALF, ["tasp"], ["fp32", "input"], together=2), n):
        single = relative_errors([squares(alone(case.work), exact(case.work))])
        travel = {1} if case.options.dataflow == "rotate-q" else {2, 3}  # dq, or dk and dv
        for tensor, (error, of_one) in enumerate(zip(errors, single, strict=True)):
            grows = case.options.gradient_dtype == "input" and tensor in travel
            assert error <= (1.2 * max(growing, 2**0.5) if grows else 1.5) * of_one, (case, errors, single)


def test_what_half_precision_costs_other_schedules() -> None:
    """At most half as much again as on one process, which rounds once: sums of several ranks are sent in float32."""
    work = Workload(64, heads=8, head_dim=32, dtype="bf16", mask="causal")
    single = relative_errors([squares(alone(work), exact(work))])
    dtypes: list[Any] = ["auto", "fp32"]
    options = {dtype: AttentionOptions("both", gradient_dtype=dtype) for dtype in dtypes}
    every = covering(product(names_of(work, 4), dtypes))
    for case, errors in errors_of([Case(work, name, options[dtype]) for name, dtype in every], 4):
        assert all(error <= 1.5 * of_one for error, of_one in zip(errors, single, strict=True)), (case, errors, single)


def test_linear_layers_round_once() -> None:
    """All internal numbers are float32: the outputs and gradients are rounded once."""
    work = linear(64, dtype="bf16", decay="scalar", heads=8, head_dim=16)
    options = {"all-scan": AttentionOptions("both", pieces=2), "lasp-2": AttentionOptions("both", trim=False)}
    check([Case(work, name, each) for name, each in options.items()], 3, limit=2**-8)


@pytest.mark.parametrize("sequence", [12, 120])
def test_ranks_send_states_whose_size_is_that_of_the_heads(sequence: int) -> None:
    """4 x batch x KV heads x head_dim^2 bytes: n - 1 by LASP-2 as published, one by a chain but from its end."""
    n, state, work = 4, 4 * 2 * 2 * 5 * 5, linear(sequence, batch=2)
    chain = [state, 2 * state, 2 * state, state]  # forward none from the last rank, backward none from the first
    gather = [2 * (n - 1) * state] * n
    for name, options, expected in (
        ("lasp", BOTH, chain), ("all-scan", BOTH, chain), ("lasp-2", AttentionOptions("both", trim=False), gather),
    ):  # fmt: skip
        case = Case(work, name, options)
        check([case], n)  # what is sent is what the schedules say
        assert sum(each.bytes_sent().sum(axis=(0, 2)) for each in case.built(n)).tolist() == expected, name


# Forward passes alone, and their log-sum-exp

FORWARD = [
    Workload(67, batch=2, heads=4, kv_heads=2, head_dim=64, dtype="fp32", mask="causal"),
    Workload(64, batch=1, heads=4, kv_heads=1, head_dim=128, dtype="bf16", mask="causal"),
    Workload(96, batch=1, heads=2, kv_heads=2, head_dim=64, dtype="bf16", mask="full"),
    Workload(51, batch=1, heads=6, kv_heads=2, head_dim=96, dtype="fp32", mask="full"),
    Workload(80, batch=1, heads=2, kv_heads=1, head_dim=256, dtype="fp16", mask="causal"),
    Workload(75, batch=1, heads=2, kv_heads=1, head_dim=64, dtype="fp32", mask="causal", window=20),
]


@cache
def by_kernel(work: Workload, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = layer_of(work)
    n = work.sequence
    chosen = KERNELS["reference"] if kernel == "reference" else choose_kernel(kernel, q.dtype, q.device, q.shape[3])
    low, high = 0 if work.mask == "causal" else 1 - n, n - 1 if work.window is None else work.window - 1
    out, lse = chosen.attend(q, k, v, scale=work.head_dim**-0.5, low=low, high=high)
    return out, lse.transpose(1, 2)


def forward_on_rank(cases: Sequence[tuple[Workload, str]], transport: str) -> list[Squares]:
    """On a rank: the errors of its part of the result and of the log-sum-exp."""
    found = []
    for work, name in cases:
        layout, rank = attention_layout(name, work, dist.get_world_size()), dist.get_rank()
        q, k, v = (shard(x, layout, rank) for x in layer_of(work))
        out, lse = attention_with_lse(
            q, k, v, schedule=name, causal=work.mask == "causal", window=work.window, transport=transport
        )
        assert (out.dtype, out.shape, lse.dtype) == (q.dtype, q.shape, torch.float32)
        exact_out, exact_lse = by_kernel(work, "reference")
        found.append(squares([out, lse], [shard(exact_out, layout, rank), shard(exact_lse, layout, rank, dim=2)]))
    return found


@pytest.mark.parametrize(("world_size", "transport"), [(3, "all-to-all"), (5, "batched"), (7, "p2p")])
def test_forward_passes_alone(world_size: int, transport: str) -> None:
    """float32: relative error below 1e-5; half precision: at most 1.5 times that of one process in the same dtype."""
    layers = {3: FORWARD, 5: FORWARD[::2], 7: FORWARD[1::3]}[world_size]
    cases = covering((work, name) for work in layers for name in schedules_for(work, world_size))
    for case, *of_ranks in zip(cases, *succeeded(on_ranks(forward_on_rank, world_size, cases, transport)), strict=True):
        single = relative_errors([squares(by_kernel(case[0], "auto"), by_kernel(case[0], "reference"))])
        for error, of_one in zip(relative_errors(of_ranks), single, strict=True):
            assert error < (1e-5 if case[0].dtype == "fp32" else max(1.5 * of_one, 1e-5)), case


# Groups

INTERLEAVED = renumbered(nodes(2, 2), np.array([0, 2, 1, 3]))
"""Ranks 0 and 2 are one node, ranks 1 and 3 the other one."""

GROUPS = [("usp:2x2", "strided"), ("double-ring:2x2", "3,1|0,2"), ("grid:2x2", "0,3|2,1")]


def in_groups_of_other_ranks() -> tuple[list[Squares], str]:
    """On a rank: the squared errors with groups of other ranks, and why groups by the topology are refused."""
    found = []
    for name, groups in GROUPS:
        options = AttentionOptions("both", groups=groups)
        here = Shard(SOFTMAX[0], name, options=options)
        found.append(squares(here.run(options=options, topology=INTERLEAVED), here.expected()))
    here = Shard(SOFTMAX[0], "usp:2x2")
    with pytest.raises(WorkloadError) as refused:
        here.run(topology=INTERLEAVED)
    consecutive = AttentionOptions("both", groups="consecutive")
    found.append(squares(here.run(topology=INTERLEAVED, options=consecutive), here.expected()))
    return found, str(refused.value)


def test_groups_of_other_ranks_compute_the_same() -> None:
    """A topology whose nodes are other groups than those by which shards were cut is refused, not misread."""
    answers = succeeded(on_ranks(in_groups_of_other_ranks, 4))
    for case, *of_ranks in zip([*GROUPS, "consecutive"], *(found for found, _ in answers), strict=True):
        assert max(relative_errors(of_ranks)) < 1e-5, case
    for _, refused in answers:
        assert "groups of schedule 'usp:2x2' on nodes:2x2 are 0,2|1,3" in refused


def on_one_rank() -> list[float]:
    """On the only rank: the largest difference of each schedule's result from that of the first."""
    results = []
    for name in schedules_for(SOFTMAX[0], 1):
        here = Shard(SOFTMAX[0], name)
        results.append(attention(here.q, here.k, here.v, schedule=name, causal=True).detach())
    return [float((each - results[0]).abs().max()) for each in results]


def test_one_rank_needs_no_other() -> None:
    (found,) = succeeded(on_ranks(on_one_rank, 1))
    assert max(found) < 1e-6


# The trials of `validate`: schedules that no name has, on ranks of the launcher

WORLD_SIZE = 4


def assert_runs(ranks: LaunchedRanks, schedule: Schedule, transport: str) -> None:
    """The ranks compare their results with float64; the events are the transfers and calls of the schedule."""
    results = ranks.perform(RunSchedule(schedule, transport, repeats=1, warm_ups=0), longest_silence_s=60)
    records = [of_rank[0] for of_rank in results if isinstance(of_rank, list)]
    assert len(records) == WORLD_SIZE
    assert all(isinstance(record, RankRecord) for record in records), records
    events = merge_records(records, schedule, "local").events
    ledger = np.zeros_like(schedule.bytes_sent())
    for event in events:
        if event.kind == SEND:
            ledger[event.step, event.rank, event.lane] += event.bytes
    assert np.array_equal(ledger, schedule.bytes_sent())
    calls = sum(len(each) for step in schedule.steps for each in step.calls)
    assert_every_transfer_once(events, schedule)
    assert sum(event.kind != SEND for event in events) == calls


def layer(mask: Any, kv_heads: int) -> Workload:
    """A length that no number of ranks divides."""
    return Workload(43, batch=2, heads=8, kv_heads=kv_heads, head_dim=64, dtype="fp32", mask=mask)


def trials() -> Iterator[tuple[str, Schedule]]:
    """Both passes of systems, with few KV heads and as many as heads, sums wider at home, and layers in chunks."""
    mesh = full_mesh(WORLD_SIZE)
    for system, mask, kv_heads in product((token_ring_passes, ulysses_passes), ("full", "causal"), (2, 8)):
        yield from ((f"{system.__name__} {mask} {kv_heads}", each) for each in system(mesh, layer(mask, kv_heads)))
    narrow = replace(layer("causal", 2), dtype="bf16")
    for each in token_ring_passes(mesh, narrow, result_dtype="input", gradient_dtype="input"):
        yield "sums wider at home", with_home_dtype(each)
    for trim in (True, False):
        yield f"lasp-2, trim {trim}", lasp2(mesh, layer("causal", 2), (0.99, 0.5), trim=trim)
    passes = *token_ring_passes(mesh, layer("causal", 2)), *ulysses_passes(mesh, layer("full", 8))
    for each in (*passes, lasp2(mesh, layer("causal", 2), (0.99, 0.5))):
        yield "in chunks", in_chunks(each, 2)


@pytest.mark.parametrize("transport", ["p2p", "batched"])
def test_trials_of_systems(ranks: LaunchedRanks, transport: str) -> None:
    for name, schedule in trials():
        try:
            assert_runs(ranks, schedule, transport)
        except BaseException as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize("transport", ["p2p", "batched", "all-to-all"])
@pytest.mark.parametrize("name", ["ring", "ring-reduce-scatter"])
def test_rings_of_rings(ranks: LaunchedRanks, name: str, transport: str) -> None:
    """Two channels: batches of both have process groups of their own."""
    pair = full_mesh(2)
    schedule = over_groups(collective(name, pair, 2000), collective(name, pair, 2000))
    assert set(channels(schedule)) == {0, 1}
    for _ in range(2):  # the second time the group of the second channel is there
        assert_runs(ranks, schedule, transport)
