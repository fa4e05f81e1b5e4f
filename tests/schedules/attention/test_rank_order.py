"""Groups of any ranks: the schedule of consecutive groups under other numbers, and the groups that a topology wants."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.event.engine import simulate
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import NoLinkError, ScheduleError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import INSTANT, Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import check_fit
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.rank_order import listed, rank_order
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.build import attention_layout, attention_schedules, groups_on
from tasp_lab.schedules.registry import ATTENTION
from tasp_lab.topology.builders import bidirectional_ring, full_mesh, multipartite, nodes, switch
from tasp_lab.topology.derived import renumbered
from tasp_lab.topology.graph import SharedCapacity, Topology, both_ways
from tasp_lab.workload.layer import Workload
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.routes import direct
from tests.support.strategies import attention_layers
from tests.support.systems import passes_of
from tests.support.world import World

FAMILIES = [name for name, spec in ATTENTION.items() if spec.split and spec.fits(4, 2)]
"""StarTrail has as many teams as a multiple of their ranks."""

INTERLEAVED = np.array([0, 2, 4, 6, 1, 3, 5, 7])


def sent_by_pair(schedule: Schedule) -> IntArray:
    """The bytes from each rank to each other one, (world_size, world_size)."""
    found = np.zeros((schedule.world_size, schedule.world_size), dtype=np.int64)
    for step in schedule.steps:
        np.add.at(found, (step.source, step.destination), schedule.block_bytes[step.block])
    return found


@st.composite
def orders(draw: st.DrawFn) -> tuple[str, list[int], int]:
    """A name of a family, an order of its ranks, and the ranks of each group."""
    family = draw(st.sampled_from(FAMILIES))
    split = draw(st.sampled_from([(2, 2), (2, 3), (3, 2), (4, 1), (1, 3)]))
    order = draw(st.permutations(range(split[0] * split[1])))
    return "{}:{}x{}".format(family, *split), order, split[ATTENTION[family].members]


@settings(max_examples=60, deadline=None)
@given(orders(), attention_layers(max_positions=14), st.booleans())
def test_lists_of_ranks_do_what_consecutive_ranks_do(
    case: tuple[str, list[int], int], layer: Workload, several: bool
) -> None:
    """On a topology whose ranks are numbered so that these are consecutive: the same bytes between the same ranks."""
    (name, order, members), place = case, np.argsort(case[1])
    layer = replace(layer, heads=12, kv_heads=12)
    topology = nodes(2, len(order) // 2) if several and len(order) % 2 == 0 else full_mesh(len(order))
    groups = listed(np.array(order), members)
    options = AttentionOptions("both", groups=groups)
    assert groups_on(name, topology, options) == groups
    found = passes_of(name, topology, layer, groups=groups)
    plain = passes_of(name, renumbered(topology, np.array(order)), layer, groups="consecutive")
    check_fit(*found)
    for schedule, expected in zip(found, plain, strict=True):
        assert (schedule.bytes_sent() == expected.bytes_sent()[:, place]).all()
        assert (sent_by_pair(schedule) == sent_by_pair(expected)[np.ix_(place, place)]).all()
        assert (schedule.flops() == expected.flops()[:, place]).all()
        assert isinstance(schedule.task, AttentionTask)
        assert schedule.task.layout == attention_layout(name, layer, topology, options)
        world = World.of(schedule)
        assert is_right_in_orders(world, numbers_of(world), 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("groups", ["auto", "consecutive", "strided", "0,3,5,6|7,1,2,4"])
def test_schedules_and_layouts_agree(family: str, groups: str) -> None:
    layer = Workload(sequence=50, heads=8, mask="causal", documents=(20, 30))
    name = f"{family}:2x4" if ATTENTION[family].members else f"{family}:4x2"
    for topology in (full_mesh(8), nodes(2, 4, "switch", "rails"), renumbered(nodes(2, 4), INTERLEAVED)):
        options = AttentionOptions("both", groups=groups)
        layout = attention_layout(name, layer, topology, options)
        for schedule in attention_schedules(name, topology, layer, None, options):
            assert isinstance(schedule.task, AttentionTask)
            assert schedule.task.layout == layout
        if groups != "auto":
            assert layout == attention_layout(name, layer, 8, options)


def test_the_first_rank_of_the_first_group_has_the_first_positions() -> None:
    layer = Workload(sequence=8, heads=4, mask="full")
    layout = attention_layout("usp:2x2", layer, 4, AttentionOptions(groups="3,1|0,2"))
    assert [layout.positions(rank).tolist() for rank in (3, 1, 0, 2)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_strided_groups_are_a_number_of_groups_apart() -> None:
    assert rank_order("usp:4x2", "strided", 4, 8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("members", [2, 4])
@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(8)))
def test_auto_finds_the_nodes_whatever_their_ranks(members: int, order: list[int]) -> None:
    """By the kind of their switch, by links of their own rate alone, and by a capacity that they share outside."""
    node_of = np.repeat([0, 1], 4)[order]
    fast = [link for a in range(8) for b in range(a) if a // 4 == b // 4 for link in both_ways(a, b, 9.0, 0)]
    slow = [link for a in range(4) for b in range(4, 8) for link in both_ways(a, b, 2.0, 0)]
    equal = [link for a in range(8) for b in range(a) for link in both_ways(a, b, 9.0, 0)]
    across = tuple(link.name for link in equal if int(link.source) // 4 != int(link.destination) // 4)
    for topology in (
        nodes(2, 4),
        nodes(2, 4, "switch", "rails"),
        Topology("slower across", 8, (*fast, *slow)),
        Topology("shared across", 8, tuple(equal), (SharedCapacity("cable", 5.0, across),)),
    ):
        found = rank_order("usp:4x2", "auto", members, renumbered(topology, np.array(order)))
        assert all(len({int(node_of[rank]) for rank in group}) == 1 for group in found.reshape(-1, members))


def test_interleaved_nodes_take_as_long_as_consecutive_ones() -> None:
    layer, topology = Workload(sequence=64, heads=4, mask="full"), nodes(2, 4, "switch")
    times = [
        simulate(passes_of("usp:4x2", each, layer, groups=groups).forward, Machine(each, compute=INSTANT)).time_s
        for each, groups in (
            (topology, "auto"),
            (renumbered(topology, INTERLEAVED), "auto"),
            (renumbered(topology, INTERLEAVED), "consecutive"),
        )
    ]
    assert times[0] == times[1] < times[2]


def test_groups_need_links_where_there_are_some() -> None:
    """Ranks of a part have no links: of 2 parts of 2 ranks, groups are of one rank of each part."""
    assert groups_on("usp:2x2", multipartite(2, 2)) == "0,2|1,3"


@pytest.mark.parametrize(
    "machine", ["h100-2x8", "h100-2x8-rails", "mi300x-2x8", "dgx-1v", "a10-4-pcie", "nodes:4x8:switch:rails"]
)
def test_auto_is_consecutive_where_the_ranks_of_nodes_are(machine: str) -> None:
    topology = load_machine(machine).topology
    n = topology.world_size
    for members in (each for each in range(1, n + 1) if n % each == 0):
        assert (rank_order("grid", "auto", members, topology) == np.arange(n)).all()


def test_a_rate_that_differs_by_rounding_decides_nothing() -> None:
    """Strided pairs have links that are faster by a rounding error."""
    pairs = [(a, b) for a in range(4) for b in range(a)]
    rates = {pair: 50e9 * (1 + 1e-15 * (pair[0] - pair[1] == 2)) for pair in pairs}
    assert len(set(rates.values())) == 2
    topology = Topology("mesh", 4, tuple(link for pair in pairs for link in both_ways(*pair, rates[pair], 1e-6)))
    assert groups_on("usp:2x2", topology) == "0,1|2,3"


@pytest.mark.parametrize(
    ("groups", "wrong"),
    [
        ("0,1|2,3", "groups '0,1|2,3', expected 4 lists of 2, each of the ranks 0 to 7 once"),
        ("0,1|2,3|4,5|6,6", "groups '0,1|2,3|4,5|6,6', expected equally long lists with each rank once, from 0 on"),
        ("0,1|2,3|4,5|6,8", "expected equally long lists with each rank once"),
        ("0,1,2,3|4,5,6,7", "expected 4 lists of 2"),
        ("0,1|2,3|4,5,6|7", "expected equally long lists"),
        ("near", "groups 'near', expected auto, consecutive, strided or lists of ranks like 0,2|1,3"),
        ("", "groups '', expected auto"),
        ("0;1", "groups '0;1', expected auto"),
        ("0,|1", "expected auto"),
        ("-1,0", "expected auto"),
    ],
)
def test_what_are_no_groups_is_refused(groups: str, wrong: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(wrong)):
        passes_of("usp:2x4", full_mesh(8), Workload(sequence=16, heads=2, mask="full"), groups=groups)
    with pytest.raises(ScheduleError, match=re.escape(wrong)):
        attention_layout("usp:2x4", Workload(sequence=16, heads=2, mask="full"), 8, AttentionOptions(groups=groups))


def test_groups_of_what_has_none_are_refused() -> None:
    with pytest.raises(ScheduleError, match="schedule 'tasp': groups 'strided' does not apply to it, expected 'auto'"):
        passes_of("tasp", full_mesh(4), Workload(sequence=16, heads=2, mask="full"), groups="strided")


def test_members_without_a_link_are_named() -> None:
    layer = Workload(sequence=16, heads=2, mask="full")
    with pytest.raises(NoLinkError, match="rank 1 sends to rank 5, but bidirectional-ring:8 has no such link"):
        passes_of("usp:2x4", direct(bidirectional_ring(8)), layer, groups="1,5|0,4|2,6|3,7")
    rails = renumbered(direct(nodes(2, 2, network="rails")), np.array([0, 2, 1, 3]))
    without_spine = replace(
        rails, links=tuple(link for link in rails.listed_links() if "spine" not in (link.source, link.destination)),
        switches=tuple(each for each in rails.switches if each.name != "spine"),
    )  # fmt: skip
    with pytest.raises(NoLinkError, match="rank 0 sends to rank 3"):
        passes_of("usp:2x2", without_spine, layer, groups="0,3|1,2")
    with pytest.raises(
        NoLinkError, match=r"rank (0 sends to rank 3|3 sends to rank 0|1 sends to rank 2|2 sends to rank 1)"
    ):
        passes_of("grid:2x2", without_spine, layer, groups="0,3|1,2")


def test_equal_links_behind_a_switch_leave_groups_consecutive() -> None:
    assert groups_on("usp:2x4", switch(8)) == "0,1|2,3|4,5|6,7"
