"""Laws of all programs that a search may come to: constructions, and those that any changes lead to."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.bounds.least import least_s
from sim.simulate import simulate
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.program import Known, Plan, Program, Tree, build, load, offsets, save
from tasp_lab.schedules.attention.task import KEYS, AttentionTask
from tasp_lab.schedules.build import attention_schedules
from tasp_lab.synthesis.explain import explained
from tasp_lab.synthesis.moves import balanced_tree, neighbour, starts
from tasp_lab.topology.builders import full_mesh, nodes, torus
from tasp_lab.topology.derived import between_groups
from tasp_lab.workload.layer import Workload
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.simulations import assert_agree
from tests.support.strategies import attention_layers
from tests.support.world import World

BOTH = AttentionOptions("both")
SHAPES = [(2,), (3,), (4,), (5,), (2, 2), (2, 3), (3, 2)]
LAYER = Workload(48, heads=4, kv_heads=2, head_dim=2, mask="causal")


@st.composite
def plans(draw: st.DrawFn, shape: tuple[int, ...], backward: bool, kept: bool) -> Plan:
    """A construction on two nodes or on a mesh, and some changes."""
    n = int(np.prod(shape))
    topology = nodes(*shape) if len(shape) == 2 else full_mesh(n)
    plan = draw(st.sampled_from(starts(topology, shape, backward=backward, kept=kept)))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    for _ in range(draw(st.integers(0, 12))):
        plan = neighbour(plan, shape, random, backward=backward, kept=kept)
    if any(any(tree.via) for tree in plan.trees):  # what is sent on later than it has a buffer is refused
        plan = msgspec.structs.replace(plan, buffers=0)
    return msgspec.structs.replace(plan, heads=1)  # how many depends on the layer


@st.composite
def programs(draw: st.DrawFn) -> Program:
    shape = draw(st.sampled_from(SHAPES))
    layout = draw(st.sampled_from(["contiguous", "zigzag", "striped"]))
    keep = draw(st.booleans())
    forward, backward = (draw(plans(shape, each, keep)) for each in (False, True))
    return Program(layout, shape, 1, keep, forward, backward)


@example(
    Program("striped", (5,), 1, False, Plan((Tree((0,) * 5, (0,) * 5),)),
            Plan((Tree((0, 0, 1, 2, 3), (0, 0, 1, 2, 3)), Tree((0, 0, 1, 2, 3), (1, 1, 2, 3, 5)),
                  Tree((0, 0, 1, 2, 3), (2, 2, 3, 4, 5))), queries=(2,), home="tree", lanes="order", own=5)),
    Workload(9, heads=12, kv_heads=1, head_dim=1, mask="causal", documents=(3, 6)),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
@given(programs(), attention_layers(max_positions=14))
def test_a_program_computes_the_whole_layer_in_float64(program: Program, layer: Workload) -> None:
    """Whatever the changes: they never lead to a schedule that the proof refuses."""
    for schedule in build(program, "found", full_mesh(program.ranks), layer, BOTH):
        world = World.of(schedule)
        assert is_right_in_orders(world, numbers_of(world), 2)
        for rank in range(program.ranks):
            rank_part(schedule, rank)  # operands of its calls lie side by side


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("members", "heads", "keep"), [(4, 1, False), (4, 2, True), (2, 1, True), (2, 2, True),
                                                        (2, 4, False), (1, 2, True)])  # fmt: skip
def test_heads_are_shared_out_and_follow_each_other(members: int, heads: int, keep: bool, kv_heads: int) -> None:
    """Groups of ranks and of heads, keys that stay, and as many KV heads as there are, or fewer."""
    layer = replace(LAYER, heads=8, kv_heads=kv_heads, sequence=24)
    groups = 4 // members
    star = Tree((0,) * groups, (0,) * groups)
    program = Program("zigzag", (groups,), members, keep, Plan((star,), heads=heads), Plan((star,), heads=heads))
    schedules = build(program, "found", full_mesh(4), layer, BOTH)
    for schedule in schedules:
        world = World.of(schedule)
        assert is_right_in_orders(world, numbers_of(world), 2)
    if keep:  # what the forward pass leaves is what the backward pass begins with, in blocks that are alike
        forward, backward = schedules
        assert isinstance(backward.task, AttentionTask)
        assert isinstance(forward.task, AttentionTask)
        own, same = backward.task.saved(forward.task)
        left = forward.initial if forward.kept is None else forward.initial | forward.kept
        assert (backward.initial[:, own] <= left[:, same]).all()
        keys = [int((np.isin(step.block, each.task.blocks_of(KEYS))).sum())
                for each in (backward,) for step in each.steps]  # fmt: skip
        assert not any(keys)


def test_with_one_group_a_program_is_ulysses() -> None:
    layer = replace(LAYER, heads=8, kv_heads=4)
    plan = Plan((Tree((0,), (0,)),))
    machine = Machine(full_mesh(4, Fraction(10**9), Fraction(1, 10**6)), compute=ComputeRate(Fraction(10**13)))
    named = attention_schedules("ulysses", machine.topology, layer, None, BOTH)
    program = Program("contiguous", (1,), 4, True, plan, plan)
    for found, ulysses in zip(build(program, "found", machine.topology, layer, BOTH), named, strict=True):
        assert found.bytes_sent().sum() == ulysses.bytes_sent().sum()
        assert simulate(found, machine).time_s == simulate(ulysses, machine).time_s


@settings(max_examples=6, deadline=None)
@given(programs(), attention_layers(max_positions=20), st.fractions(1, 100, max_denominator=7))
def test_both_engines_agree_and_no_bound_is_beaten(program: Program, layer: Workload, rate: Fraction) -> None:
    machine = Machine(full_mesh(program.ranks, rate, Fraction(1, 3)), compute=ComputeRate(1000 * rate))
    for schedule in build(program, "found", machine.topology, layer, BOTH):
        assert_agree(schedule, machine)
        assert simulate(schedule, machine).time_s >= least_s(schedule, machine)


@settings(max_examples=15, deadline=None)
@given(programs(), st.sampled_from([None, (5, 20, 8)]))
def test_the_executor_runs_any_program(program: Program, documents: tuple[int, ...] | None) -> None:
    """Ranks are threads; results and gradients are compared with the reference on one process."""
    from tests.support.one_device import run_in_process

    layer = Workload(33, heads=4, kv_heads=2, head_dim=8, dtype="fp32", mask="causal", documents=documents)
    for schedule in build(program, "found", full_mesh(program.ranks), layer, BOTH):
        run_in_process(schedule)


@pytest.mark.parametrize("members", [2, 4])
def test_groups_may_share_out_the_heads(members: int) -> None:
    """As USP does with the same exchange between groups: equal bytes, equal FLOPs, right numbers."""
    groups, layer = 8 // members, replace(LAYER, sequence=96)
    star = Plan((Tree((0,) * groups, (0,) * groups),))
    program = Program("zigzag", (groups,), members, False, star, star)
    found = build(program, "found", full_mesh(8), layer, BOTH)
    usp = attention_schedules(f"usp:{members}x{groups}", full_mesh(8), layer, None, BOTH)
    assert [each.flops().sum() for each in found] == [each.flops().sum() for each in usp]
    assert found[0].bytes_sent().sum() == usp[0].bytes_sent().sum()
    for schedule in found:
        world = World.of(schedule)
        assert is_right_in_orders(world, numbers_of(world), 2)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_stars_in_pieces_take_as_long_as_direct_attention(stages: int, mask: str) -> None:
    """The record of a published schedule is that schedule."""
    layer = Workload(4096, heads=4, mask=mask)
    trees = tuple(Tree((0,) * 4, (piece,) * 4) for piece in range(stages))
    star = Plan(trees, buffers=3 if stages > 3 else 0)  # direct attention keeps everything if it fits into its buffers
    program = Program("zigzag" if mask == "causal" else "contiguous", (4,), 1, False, star, star)
    machine = Machine(full_mesh(4, Fraction(10**9), Fraction(1, 10**6)), compute=ComputeRate(Fraction(10**13)))
    options = AttentionOptions("both", stages=stages, buffers=3)
    named = attention_schedules("direct-attention", machine.topology, layer, None, options)
    for found, direct in zip(build(program, "found", machine.topology, layer, BOTH), named, strict=True):
        assert found.bytes_sent().sum() == direct.bytes_sent().sum()
        assert simulate(found, machine).time_s == simulate(direct, machine).time_s


def test_once_to_a_node_sends_each_shard_over_one_nic_once() -> None:
    """Full mask, two nodes of three: every key enters the other node once, where straight it enters three times."""
    topology, layer = nodes(2, 3), replace(LAYER, mask="full")
    spread = starts(topology, (2, 3), backward=False)[0]
    star = Plan((Tree((0,) * 6, (0,) * 6),))
    crossing = []
    for plan in (spread, star):
        (schedule,) = build(Program("contiguous", (2, 3), 1, False, plan), "found", topology, layer, AttentionOptions())
        steps = [step for step in schedule.steps if len(step)]
        remote = [step.source // 3 != step.destination // 3 for step in steps]
        crossing.append(sum(int(schedule.block_bytes[step.block[way]].sum())
                            for step, way in zip(steps, remote, strict=True)))  # fmt: skip
    keys_bytes = layer.sequence * layer.kv_bytes_per_position
    assert crossing == [keys_bytes, 3 * keys_bytes]


@pytest.mark.parametrize("topology", [torus((3, 3)), nodes(2, 4), full_mesh(5)], ids=lambda each: each.name)
def test_balanced_trees_reach_all_ranks_by_routes_that_exist(topology: object) -> None:
    assert hasattr(topology, "world_size")
    n = topology.world_size
    tree = balanced_tree(topology)  # type: ignore[arg-type]
    shape = (n,)
    program = Program("contiguous", shape, 1, False, Plan((tree,)), Plan((tree,), home="tree"))
    for schedule in build(program, "found", topology, replace(LAYER, mask="full"), BOTH):  # type: ignore[arg-type]
        assert schedule.transfers >= n * (n - 1)


def test_words_tell_rings_from_trees() -> None:
    """Trees by rank: around both rings of four ranks, and straight from each owner."""
    n, rank = 4, np.arange(4)
    onward, back = (tuple(np.tile((rank + step) % n, n).tolist()) for step in (-1, 1))
    hops = tuple(np.maximum((rank - rank[:, None]) % n - 1, 0).ravel().tolist())
    hops_back = tuple(np.maximum((rank[:, None] - rank) % n - 1, 0).ravel().tolist())
    star = Tree(tuple(np.repeat(rank, n).tolist()), (0,) * n * n)
    for trees, words in (
        (
            (Tree(onward, hops), Tree(back, hops_back), Tree(onward, hops)),
            "keys travel in 3 pieces to all ranks, around 2 rings",
        ),
        ((star,), "keys travel to all ranks, by a tree of their own for each rank, 12 of 12 straight"),
    ):
        program = Program("zigzag", (n,), forward=Plan(trees))
        build(program, "found", full_mesh(n), LAYER, AttentionOptions("forward"))
        assert f"forward: {words}" in explained(program)


def test_between_groups_a_program_has_the_topology_of_the_groups() -> None:
    assert {len(each.trees[0].via) for each in starts(between_groups(nodes(2, 4), 4), (2,), backward=True)} == {2}


def test_offsets_are_those_of_a_group() -> None:
    """Each row and column has every offset once, and the way back is the inverse."""
    table = offsets((2, 3))
    assert all(sorted(row) == list(range(6)) for row in [*table.tolist(), *table.T.tolist()])
    assert (table[0] == np.arange(6)).all()
    assert table[1, 3] == table[0, offsets((2, 3))[1, 3]]


@given(programs())
@settings(max_examples=30, deadline=None)
def test_a_file_keeps_every_decision(program: Program) -> None:
    assert msgspec.json.decode(msgspec.json.encode(program), type=Program) == program
    assert len(explained(program)) >= 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "Expected `object`"),
        ("{", "truncated"),
        ("{}", "no shape and plan"),
        ('{"colour": 1}', "colour"),
        ('{"shape": [2], "forward": {"trees": [{"via": ["0", 0], "arrival": [0, 0]}]}}', "Expected `int`"),
        ('{"shape": [0], "forward": {"trees": []}}', "expected 1 or more"),
        ('{"shape": [4], "forward": {"trees": []}}', "expected 1 or more"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "f.json"
    file.write_text(content)
    with pytest.raises(ScheduleError, match=words) as error:
        load(str(file))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(file))


STAR = Tree((0,) * 4, (0,) * 4)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program("zigzag", (2, 4), 1, False, Plan((STAR,))), "for 8 ranks, expected 4"),
        (Program("zag", (4,), 1, False, Plan((STAR,))), "unknown layout 'zag', did you mean 'zigzag'"),
        (Program("zigzag", (4,), 1, False, Plan((Tree((0,) * 3, (0,) * 3),))), "3 and 3 entries, expected 4"),
        (Program("zigzag", (4,), 1, False, Plan((Tree((0, 0, 9, 0), (0,) * 4),))), "comes from 9, expected 0 to 3"),
        (Program("zigzag", (4,), 1, False, Plan((Tree((0,) * 4, (0, -1, 0, 0)),))), "arrivals below 0"),
        (Program("zigzag", (4,), 1, False, Plan((Tree((0, 2, 1, 0), (0, 1, 1, 0)),))), "rank"),
        (Program("zigzag", (4,), 1, False, Plan((STAR,), queries=(4,))), "queries over offset 4, expected 1 to 3"),
        (Program("zigzag", (4,), 1, False, None, Plan((STAR,))), "without a forward pass, expected pass backward"),
        (Program(known=Known("rng-attention")), "unknown schedule 'rng-attention'"),
        (Program(known=Known("tasp", {"buffer": 4})), "unknown option 'buffer', did you mean 'buffers'"),
    ],
)
def test_wrong_decisions_are_refused_in_one_line(program: Program, words: str) -> None:
    """Also a circle of ranks that wait for each other."""
    with pytest.raises(ScheduleError, match=words) as error:
        build(program, "found", full_mesh(4), LAYER, AttentionOptions())
    assert "\n" not in str(error.value)


def test_known_schedules_have_their_options(tmp_path: Path) -> None:
    save(Program(known=Known("direct-attention", {"stages": 2})), tmp_path / "f.json")
    program = load(str(tmp_path / "f.json"))
    options = AttentionOptions("both", stages=2)
    direct = attention_schedules("direct-attention", full_mesh(4), LAYER, None, options)
    found = build(program, "direct-attention", full_mesh(4), LAYER, BOTH)
    assert [each.digest for each in found] == [each.digest for each in direct]
