"""Ulysses: its bytes, its FLOPs and its calls; uneven heads are in `test_heads`."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from sim.simulate import simulate
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.topology.builders import full_mesh, switch
from tasp_lab.workload.layer import Workload
from tests.support.systems import passes_of, ulysses, ulysses_passes


@pytest.mark.parametrize("kv_heads", [12, 24])
@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_each_rank_sends_all_but_one_nth_of_its_queries_keys_and_results(kv_heads: int, n: int) -> None:
    layer = Workload(sequence=6 * n, batch=2, heads=24, kv_heads=kv_heads, head_dim=4, mask="full")
    forward, backward = ulysses_passes(full_mesh(n), layer)
    positions, share = layer.sequence // n, Fraction(n - 1, n)
    queries, keys = layer.query_bytes_per_position * positions, layer.kv_bytes_per_position * positions
    row_sums = 4 * layer.batch * layer.heads * positions
    sent = share * (queries + keys), 0, share * (queries + row_sums)
    assert (forward.bytes_sent().sum(axis=2) == np.array(sent)[:, None]).all()
    sent = share * (2 * queries + 2 * row_sums), 0, share * (queries + keys)
    assert (backward.bytes_sent().sum(axis=2) == np.array(sent)[:, None]).all()
    forward, backward = ulysses_passes(full_mesh(n), layer, result_dtype="fp32", gradient_dtype="fp32")
    assert (forward.bytes_sent()[2].sum(axis=1) == share * (2 * queries + row_sums)).all()
    assert (backward.bytes_sent()[2].sum(axis=1) == share * (2 * queries + 2 * keys)).all()


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_fewer_kv_heads_than_ranks_are_sent_to_every_rank_that_uses_them(kv_heads: int) -> None:
    n, layer = 6, Workload(sequence=12, heads=6, kv_heads=kv_heads, head_dim=4, mask="full")
    positions = layer.sequence // n
    queries, keys = layer.query_bytes_per_position * positions, layer.kv_bytes_per_position * positions
    forward, backward = ulysses_passes(full_mesh(n), layer)
    copies = Fraction(n - 1, kv_heads)
    assert (forward.bytes_sent()[0].sum(axis=1) == Fraction(n - 1, n) * queries + copies * keys).all()
    assert (backward.bytes_sent()[2].sum(axis=1) == Fraction(n - 1, n) * queries + copies * keys).all()


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_all_ranks_compute_the_same_in_one_call_for_all_documents(mask: str) -> None:
    documents = (7, 0, 1, 15)
    layer = Workload(sequence=23, heads=8, head_dim=4, mask=mask, documents=documents)
    forward, backward = ulysses_passes(full_mesh(4), layer)
    pairs = sum(each * (each + 1) // 2 if mask == "causal" else each**2 for each in documents)
    assert (forward.flops().sum(axis=0) == pairs * layer.flops_per_pair // 4).all()
    assert (backward.flops().sum(axis=0) == pairs * layer.flops_per_pair // 4 * Fraction(5, 2)).all()
    for schedule in (forward, backward):
        assert [len(calls) for step in schedule.steps for calls in step.calls] == [4]
        assert [len(step) > 0 for step in schedule.steps] == [True, False, True]


@pytest.mark.parametrize("make", [full_mesh, switch])
@pytest.mark.parametrize(("stages", "kv_heads"), [(1, 16), (2, 16), (4, 16), (4, 8), (4, 4), (4, 1)])
def test_stages_leave_a_part_of_each_all_to_all_exposed(make: Any, stages: int, kv_heads: int) -> None:
    """Calls that are the longest begin after the first stage has come, and end before the last one leaves.

    Four ranks, without latencies: exactly. Keys of fewer heads than ranks times stages come with the first stage that
    uses them, and their gradients leave with the last one: here all in one stage, of 4 KV heads or fewer.
    """
    n, layer = 4, Workload(sequence=64, heads=16, kv_heads=kv_heads, head_dim=4, mask="full")
    topology = make(n, Fraction(10**6), Fraction(0))
    both = ulysses_passes(topology, layer), passes_of("staged-ulysses", topology, layer, stages=stages)
    for whole, staged in zip(*both, strict=True):
        calls_s = Fraction(1)
        machine = Machine(topology, compute=ComputeRate(Fraction(int(whole.flops().sum()), n) / calls_s))
        sent = [Fraction(int(each.sum()), n) for each in staged.bytes_sent()]
        pairs = 1 if make is switch else n - 1  # links of a rank, each with an equal part
        first_s, last_s = (each / pairs / 10**6 for each in (sent[0], sent[-1]))
        assert first_s + last_s < calls_s / stages
        assert simulate(staged, machine).time_s == first_s + calls_s + last_s
        assert staged.bytes_sent().sum() == whole.bytes_sent().sum()


def test_there_are_as_many_stages_as_the_heads_of_a_rank_allow() -> None:
    """At most as many as asked for; with one head per rank it is Ulysses."""
    for heads, kv_heads, asked, expected in ((4, 4, 4, 1), (8, 4, 4, 2), (12, 12, 4, 3), (24, 8, 4, 2), (24, 8, 6, 6)):
        layer = Workload(sequence=16, heads=heads, kv_heads=kv_heads, head_dim=4, mask="full")
        staged = passes_of("staged-ulysses", full_mesh(4), layer, stages=asked).forward
        assert len(staged.steps) == len(ulysses(full_mesh(4), layer).steps) + expected - 1
