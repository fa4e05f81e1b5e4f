"""USP: any schedule of attention between groups of ranks that share out the heads."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import Dataflow, attention_passes
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout, attention_schedules
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.schedules.registry import ATTENTION
from tasp_lab.topology.builders import full_mesh, ring, torus
from tasp_lab.topology.graph import Topology, both_ways
from tasp_lab.workload.layer import Workload
from tests.support.links import with_links
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.routes import direct
from tests.support.strategies import attention_layers
from tests.support.systems import passes_of, token_ring_passes, ulysses, ulysses_passes, usp
from tests.support.world import World


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, int]:
    """A pass of any schedule between groups, and a number of members that share out its heads."""
    groups, members = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    layer = draw(attention_layers(max_positions=12))
    kv_heads = draw(st.sampled_from([1, members, 2 * members]))
    layer = replace(layer, heads=2 * members, kv_heads=kv_heads)
    name = draw(st.sampled_from([*sorted({*CIRCULATIONS} - {"half-each-way"}), "token-ring"]))
    if name == "token-ring":
        passes = token_ring_passes(full_mesh(groups), layer)
    else:
        dataflow: Dataflow = draw(st.sampled_from(["rotate-kv", "rotate-q"]))
        passes = attention_passes(name, full_mesh(groups), layer, dataflow=dataflow)
    return draw(st.sampled_from(passes)), members


@settings(max_examples=40)
@given(cases())
def test_the_numbers_and_flops_are_those_of_the_layer(case: tuple[Schedule, int]) -> None:
    outer, members = case
    schedule = usp(full_mesh(outer.world_size * members), outer, members)
    assert schedule.flops().sum() == outer.flops().sum()
    world = World.of(schedule)
    assert is_right_in_orders(world, numbers_of(world), 1)


@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("members", [1, 2, 4])
def test_heads_are_exchanged_within_groups_and_keys_move_between_them(kv_heads: int, members: int) -> None:
    groups = 3
    layer = Workload(sequence=2 * groups * members * 5, heads=8, kv_heads=kv_heads, head_dim=4, mask="full")
    outer = attention("ring-attention", full_mesh(groups), layer)
    schedule = usp(full_mesh(groups * members), outer, members)
    there, *between, home = schedule.bytes_sent().sum(axis=2)
    positions, share = layer.sequence // (groups * members), Fraction(members - 1, members)
    queries, keys = layer.query_bytes_per_position * positions, layer.kv_bytes_per_position * positions
    assert (there == share * (queries + keys)).all()
    assert (home == share * (2 * queries + 4 * layer.heads * positions)).all()
    assert (sum(between) == (groups - 1) * keys).all()
    assert (schedule.flops() == schedule.flops()[:, :1]).all()
    for step in schedule.steps[1:-1]:
        assert (step.source % members == step.destination % members).all()


def test_one_member_is_the_outer_schedule_and_one_group_is_ulysses() -> None:
    layer = Workload(sequence=24, heads=4, head_dim=2, mask="causal")
    outer = attention("zigzag-ring-attention", full_mesh(4), layer)
    alone = usp(full_mesh(4), outer, 1)
    assert [step.rows() for step in alone.steps[1:-1]] == [step.rows() for step in outer.steps]
    together = usp(full_mesh(4), attention("ring-attention", full_mesh(1), layer), 4)
    expected = ulysses(full_mesh(4), layer, result_dtype="fp32")
    assert (together.bytes_sent().sum(axis=2) == expected.bytes_sent().sum(axis=2)).all()
    assert (together.flops() == expected.flops()).all()


def test_kv_heads_that_are_fewer_than_members_move_once_per_member() -> None:
    layer = Workload(sequence=24, heads=4, kv_heads=1, head_dim=2, mask="full")
    outer = attention("ring-attention", full_mesh(2), layer)
    schedule = usp(full_mesh(8), outer, 4)
    assert np.array_equal(schedule.bytes_sent()[1:-1].sum(axis=(1, 2)), 4 * outer.bytes_sent().sum(axis=(1, 2)))


def test_what_is_no_outer_schedule_is_refused() -> None:
    layer = Workload(sequence=24, heads=6, head_dim=2, mask="full")
    outer = attention("ring-attention", full_mesh(2), layer)
    with pytest.raises(ScheduleError, match="schedule 'usp-3 ring-attention': 2 groups of 3 ranks, full-mesh:8 has 8"):
        usp(full_mesh(8), outer, 3)
    with pytest.raises(ScheduleError, match="schedule 'usp-7 ring-attention': 6 heads for 7 ranks, expected as many"):
        usp(full_mesh(14), outer, 7)
    with pytest.raises(ScheduleError, match="'usp-2 ring': expected attention that starts with the queries and keys"):
        usp(full_mesh(4), ring_all_gather(full_mesh(2), 8), 2)
    back = attention_passes("ring-attention", full_mesh(2), layer, dataflow="rotate-kv-back").backward
    with pytest.raises(ScheduleError, match="expected attention that starts with the queries and keys of each rank"):
        usp(full_mesh(4), back, 2)
    with pytest.raises(ScheduleError, match="'usp-2 ulysses': expected an outer schedule with all heads in each block"):
        usp(full_mesh(4), ulysses(full_mesh(2), replace(layer, kv_heads=1)), 2)


VARIANTS = ATTENTION["usp"].variants
OWN = {"trim": False, "buffers": 4, "gradient_dtype": "input", "result_dtype": "input", "dataflow": "rotate-q"}
"""For each option of a schedule between groups a value that is not its default."""


def options_of(variant: str) -> dict[str, Any]:
    return {name: value for name, value in OWN.items() if name in ATTENTION[variant].options}


@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_groups_of_one_rank_are_the_variant_and_one_group_is_ulysses(variant: str, options: bool) -> None:
    layer = Workload(sequence=50, heads=8, kv_heads=4, head_dim=2, mask="causal", documents=(21, 29))
    own = options_of(variant) if options else {}
    alone = passes_of(f"usp:1x4:{variant}", full_mesh(4), layer, **own)
    for schedule, expected in zip(alone, passes_of(variant, full_mesh(4), layer, **own), strict=True):
        assert schedule.name == f"usp:1x4:{variant}"
        assert replace(schedule, name=variant).digest == expected.digest
    together = passes_of(f"usp:4x1:{variant}", full_mesh(4), layer)
    for schedule, expected in zip(together, ulysses_passes(full_mesh(4), layer), strict=True):
        assert replace(schedule, name="ulysses").digest == replace(expected, name="ulysses").digest


def test_without_a_variant_the_balanced_ring_is_between_groups() -> None:
    layer = Workload(sequence=50, heads=8, head_dim=2, mask="causal")
    plain = passes_of("usp:2x4", full_mesh(8), layer)
    for schedule, expected in zip(passes_of("usp:2x4:zigzag-ring-attention", full_mesh(8), layer), plain, strict=True):
        assert replace(schedule, name="usp:2x4").digest == expected.digest


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_members_send_their_share_of_what_a_rank_of_the_variant_sends(variant: str, kv_heads: int) -> None:
    """Forward, with results in 16 bit; keys of fewer KV heads than members go once per member."""
    members, groups = 2, 4
    layer = Workload(sequence=2 * groups * members * 12, heads=8, kv_heads=kv_heads, head_dim=4, mask="causal")
    found = passes_of(f"usp:2x4:{variant}", full_mesh(8), layer, result_dtype="input").forward
    own: dict[str, Any] = {"result_dtype": "input"} if "result_dtype" in ATTENTION[variant].options else {}
    (outer,) = attention_schedules(variant, full_mesh(groups), layer, None, AttentionOptions(**own))
    _, *between, _ = found.bytes_sent().sum(axis=2)
    by_kind = np.zeros((2, groups))
    for step in outer.steps:
        is_keys = np.array([outer.blocks.kind_of(block).name == "keys" for block in step.block.tolist()], dtype=bool)
        for row, chosen in enumerate((is_keys, ~is_keys)):
            np.add.at(by_kind[row], step.source[chosen], outer.block_bytes[step.block[chosen]])
    shares = Fraction(max(members // kv_heads, 1), members), Fraction(1, members)
    expected = np.repeat(by_kind[0] * float(shares[0]) + by_kind[1] * float(shares[1]), members)
    assert np.array_equal(sum(between), expected)
    assert np.array_equal(found.flops().sum(axis=0) * members, np.repeat(outer.flops().sum(axis=0), members))


@pytest.mark.parametrize(("members", "groups"), [(2, 3), (2, 4), (2, 5), (4, 3)])
def test_tasp_sends_over_all_links_between_groups_what_a_ring_sends_over_one(members: int, groups: int) -> None:
    """R - 1 hops of a shard's keys over one link of a rank, or cut over R - 1 links: one shard each."""
    layer = Workload(sequence=members * groups * 24, heads=4, head_dim=2, mask="full")
    keys, n = layer.kv_bytes_per_position * 24, members * groups
    for variant, links, each in (("ring-attention", 1, (groups - 1) * keys), ("tasp", groups - 1, keys)):
        forward = passes_of(f"usp:{members}x{groups}:{variant}", full_mesh(n), layer, dataflow="rotate-kv").forward
        sent = np.zeros((n, n), dtype=np.int64)
        for step in forward.steps[1:-1]:
            np.add.at(sent, (step.source, step.destination), forward.block_bytes[step.block])
        assert (np.count_nonzero(sent, axis=1) == links).all()
        assert (sent[sent > 0] == each).all()


def test_rings_between_groups_are_rings_of_the_machine() -> None:
    """Groups are the rows of a torus, so they have links to the next rows only, and there are two directed rings."""
    layer = Workload(sequence=64, heads=4, head_dim=2, mask="full")
    topology = with_links(torus((4, 2)), ["0-1=1GB/s"])
    forward = passes_of("usp:2x4:tasp", topology, layer).forward
    hops = [(source, destination) for step in forward.steps[1:-1] for source, destination, *_ in step.rows()]
    assert {(b - a) % 8 for a, b in hops} == {2, 6}
    assert all(topology.linked_pairs[hop] for hop in hops)


def test_twice_the_bytes_go_over_links_of_twice_the_rate() -> None:
    """Between two rings of groups, shares follow the rates of the links that all members have."""
    layer = Workload(sequence=96, heads=4, head_dim=2, mask="full")
    upward = {(a, (a + 2) % 8) for a in range(8)}
    links = tuple(
        replace(link, bandwidth_bytes_per_s=2e9 if (link.source, link.destination) in upward else 1e9)
        for link in torus((4, 2)).listed_links()
    )
    forward = passes_of("usp:2x4:tasp", Topology("uneven torus", 8, links), layer).forward
    up, down = 0, 0
    for step in forward.steps[1:-1]:
        is_up = (step.destination - step.source) % 8 == 2
        up, down = (
            up + forward.block_bytes[step.block[is_up]].sum(),
            down + forward.block_bytes[step.block[~is_up]].sum(),
        )
    assert up == 2 * down > 0


@pytest.mark.parametrize("variant", ["tasp", "token-ring"])
def test_groups_without_links_are_named(variant: str) -> None:
    layer = Workload(sequence=64, heads=4, mask="full")
    with pytest.raises(ScheduleError, match="step 0: rank 0 sends to rank 2, but ring:8 has no such link"):
        passes_of(f"usp:4x2:{variant}", direct(ring(8)), layer)
    with pytest.raises(ScheduleError, match=r"between groups: rank (0|4) sends to rank (4|0), but torus:4x2 has no"):
        passes_of("usp:2x4:token-ring", direct(torus((4, 2))), layer)
    line = Topology("four pairs", 8, tuple(x for a, b in [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
                                           for x in both_ways(a, b, 1e9, 0)))  # fmt: skip
    with pytest.raises(ScheduleError, match="between groups: rank 0 sends to rank 2, but four pairs has no such link"):
        passes_of(f"usp:2x4:{variant}", direct(line), layer)


@pytest.mark.parametrize(
    ("name", "options", "wrong"),
    [
        ("usp:2x2:ulysses", {}, "schedule 'usp:2x2:ulysses': unknown variant 'ulysses'"),
        ("usp:2x2:token-ring", {"dataflow": "rotate-q"}, "'usp:2x2:token-ring': dataflow 'rotate-q' does not apply"),
        ("usp:2x2:token-ring", {"trim": False}, "'usp:2x2:token-ring': trim False does not apply"),
        ("usp:2x2:burst", {"dataflow": "rotate-kv"}, "'usp:2x2:burst': dataflow 'rotate-kv' does not apply"),
        (
            "usp:2x2:tasp",
            {"dataflow": "rotate-kv-back"},
            "schedule 'usp:2x2:tasp': dataflow 'rotate-kv-back' does not apply to it",
        ),
    ],
)
def test_what_does_not_apply_to_a_variant_is_refused(name: str, options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ScheduleError, match=wrong):
        passes_of(name, full_mesh(4), Workload(sequence=24, heads=4, mask="full"), **options)


@pytest.mark.parametrize("name", ["usp:2x2:", "usp:2x2:bogus"])
def test_a_variant_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"schedule '{name}': unknown variant"):
        attention_layout(name, Workload(sequence=16, heads=4, mask="full"), 4)
