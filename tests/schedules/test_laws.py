"""Laws of all registered schedules, whatever their kind: a new schedule is checked here without a test of its own.

Layers are small and drawn; the oracle of numbers is a computation of the whole layer in float64.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.bounds.layers import Runs
from sim.bounds.least import least_s
from sim.simulate import simulate
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError, TaspLabError
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.rings.decompose import decompose
from tasp_lab.schedule.model import LazySteps, Step
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import check_fit
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import KEYS, QUERIES, AttentionTask
from tasp_lab.schedules.build import attention_layout, build_schedules, linear_schedules
from tasp_lab.schedules.registry import ATTENTION, COLLECTIVES, LINEAR, attention_names_on, options_of, uses_rings
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Work, Workload
from tests.support.masks import pairs_seen
from tests.support.mutations import is_right_in_orders, mutants
from tests.support.numeric_tasks import numbers_of
from tests.support.simulations import assert_agree
from tests.support.strategies import attention_layers, hybrid_layers, linear_layers
from tests.support.world import World

N = 4
SOFTMAX = attention_names_on(N)
VARIANTS = attention_names_on(N, variants=True)
HYBRIDS = (
    "lasp+ulysses", "lasp-2+zigzag-ring-attention", "all-scan+tasp", "direct-lasp-2+kv-all-gather",
    "ring-linear-attention+direct-attention", "lasp-2+striped-ring-attention", "all-scan+zigzag-token-ring",
)  # fmt: skip
LAYERS = [*SOFTMAX, *LINEAR, *HYBRIDS]
NAMES = [*COLLECTIVES, *LAYERS]
MASKS = ("full", "causal")
BOTH = AttentionOptions("both")

DECAYS = (0.5, 1.0, 0.8, 0.25)
"""Decay per position of the state of each KV head of a linear layer."""

few, more = settings(max_examples=5, deadline=None), settings(max_examples=10, deadline=None)
rates, launches = st.fractions(1, 100, max_denominator=7), st.fractions(0, 3, max_denominator=5)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Four ranks with links between all of them; numbers are exact."""
    rate, latency = draw(rates), draw(launches)
    topology = draw(st.sampled_from([
        full_mesh(N, rate, latency),
        switch(N, rate, latency),
        nodes(2, 2, link_bandwidth_bytes_per_s=rate, link_latency_s=latency,
              nic_bandwidth_bytes_per_s=draw(rates), nic_latency_s=latency),
    ]))  # fmt: skip
    return Machine(topology, compute=ComputeRate(draw(st.sampled_from([10, 1000, 10**4])) * draw(rates)))


def work_of(name: str, mask: str = "causal", sequence: int = 24) -> Work:
    """What a schedule computes on four ranks: 48 bytes per rank, or a layer."""
    if name in COLLECTIVES:
        return 48
    if "+" in name:
        return Workload(sequence, heads=4, kv_heads=4, head_dim=2, mask="causal", kind="hybrid", layers="LS")
    kind: Any = "linear" if name in LINEAR else "softmax"
    return Workload(sequence, heads=4, kv_heads=4, head_dim=2, mask=mask, kind=kind)


@st.composite
def works(draw: st.DrawFn, name: str, max_positions: int = 12) -> Work:
    """Any work of the kind of a schedule."""
    if name in COLLECTIVES:
        return draw(st.integers(1, 99))
    if "+" in name:
        return draw(hybrid_layers(max_positions, heads=6))
    return draw((linear_layers if name in LINEAR else attention_layers)(max_positions))


def build(name: str, topology: Topology, work: Work, options: AttentionOptions = BOTH) -> tuple[Schedule, ...]:
    if name in COLLECTIVES:
        options = AttentionOptions()
    if isinstance(work, Workload) and (work.kind, work.decay) == ("linear", "head"):
        return linear_schedules(name, topology, work, None, options, DECAYS[: work.kv_head_count])
    return build_schedules(name, topology, work, options=options)


OTHERS: dict[str, Any] = {
    "trim": False,
    "buffers": 5,
    "dataflow": "rotate-kv",
    "gradient_dtype": "fp32",
    "result_dtype": "fp32",
    "tail_chunks": 2,
    "stages": 2,
    "groups": "strided",
    "padded_heads": True,
    "travels": "keys",
    "pieces": 2,
    "direction": "ascending",
}
"""A value of each option that is not its default."""


@st.composite
def options_for(draw: st.DrawFn, name: str) -> AttentionOptions:
    """Each option that applies to a schedule, with its default or with another value that changes no refusal."""
    applying = [option for option in options_of(name) if option != "travels" and draw(st.booleans())]
    return AttentionOptions("both", **{option: OTHERS[option] for option in applying})


NOT_COMPUTED = ("expected as many heads or more", "expected a causal mask", "expected none or head",
                "expected groups of equal size")  # fmt: skip
"""Reasons not to compute a layer: fewer heads than ranks share, chains, keys that carry no gates, and KV heads that
pieces of states do not divide."""


def applies(name: str, layer: Work, n: int = N, options: AttentionOptions = BOTH) -> bool:
    """Whether a schedule computes such heads, masks and decays; what it refuses has a test of its own."""
    try:
        build(name, full_mesh(n), layer, options)
    except ScheduleError as error:
        if any(each in str(error) for each in NOT_COMPUTED):
            return False
        raise
    return True


# -- what is computed -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", VARIANTS)
@few
@given(attention_layers(max_positions=20), st.integers(1, 6), st.data())
def test_any_layer_is_computed_once(name: str, layer: Workload, ranks: int, data: st.DataObject) -> None:
    """The FLOPs are those of the pairs of the mask: of a product of length of keys and one of values, backward of three
    and two; without padded heads.
    """
    n, options = N if ":" in name else ranks, replace(data.draw(options_for(name)), padded_heads=False)
    if not applies(name, layer, n):
        return
    seen = pairs_seen(layer)
    forward, backward = build(name, full_mesh(n), layer, options)
    assert forward.flops().sum() == seen.sum() * layer.flops_per_pair
    products = 3 * layer.head_dim + 2 * layer.value_size
    assert backward.flops().sum() == seen.sum() * layer.heads * 2 * products
    for schedule, rank in product((forward, backward), range(n)):
        rank_part(schedule, rank)  # operands of its calls lie side by side


@pytest.mark.parametrize("name", [*COLLECTIVES, *VARIANTS, *LINEAR, *HYBRIDS])
@more
@given(st.integers(1, 5), st.data())
def test_the_numbers_are_those_of_the_whole_layer(name: str, ranks: int, data: st.DataObject) -> None:
    """Executed step by step, and in random orders that wait as the dependencies demand."""
    n, work = N if ":" in name else ranks, data.draw(works(name))
    options = BOTH if name in COLLECTIVES else data.draw(options_for(name))
    if not applies(name, work, n, options):
        return
    for schedule in build(name, full_mesh(n), work, options):
        world = World.of(schedule)
        assert is_right_in_orders(world, numbers_of(world), 2)
        for rank in range(n):
            rank_part(schedule, rank)  # operands of its calls lie side by side


@pytest.mark.parametrize("name", [*VARIANTS, *LINEAR, *HYBRIDS])
@more
@given(st.data())
def test_a_change_is_refused_in_one_line_or_the_numbers_stay_right(name: str, data: st.DataObject) -> None:
    """Of a transfer, a call, a step, a kind of blocks, an owner, the layout, or of what is where."""
    world = data.draw(st.sampled_from(_worlds(name)))
    of_kinds: dict[str, list[Callable[[], World]]] = {}
    for kind, change in mutants(world):
        of_kinds.setdefault(kind, []).append(change)
    kind = data.draw(st.sampled_from(sorted(of_kinds)))
    change = data.draw(st.sampled_from(of_kinds[kind]))
    refusal = ""
    try:
        changed = change()
        changed.schedule()
    except ScheduleError as error:
        refusal = str(error)
    if refusal:
        where = r"(after )?step \d+: |after the last step: " if kind.startswith(("transfer", "call")) else ""
        assert re.fullmatch(rf"({where})[^\n]+", refusal)
    else:
        assert is_right_in_orders(changed, numbers_of(world), 1, world)


@cache
def _worlds(name: str) -> list[World]:
    return [World.of(schedule) for schedule in build(name, full_mesh(N), work_of(name, sequence=8))]


@pytest.mark.parametrize("name", LINEAR)
@given(linear_layers(), st.integers(1, 5))
def test_linear_attention_refuses_no_causal_layer_whose_decay_is_known(name: str, layer: Workload, n: int) -> None:
    if layer.mask == "causal" and layer.decay in ("none", "head"):
        assert applies(name, layer, n)


@pytest.mark.parametrize(("name", "mask"), [*product([*SOFTMAX], MASKS)])
def test_balanced_layouts_give_all_ranks_equal_work(name: str, mask: str) -> None:
    """Schedules whose layout is that of the mask, and that do not choose per pair of ranks where to compute it."""
    if ATTENTION[name.partition(":")[0]].layout != "balanced" or "travels" in options_of(name):
        return
    for schedule in build(name, full_mesh(N), work_of(name, mask, 16 * N)):
        flops = schedule.flops().sum(axis=0)
        assert (flops == flops[0]).all()
        assert flops[0] > 0


@pytest.mark.parametrize(("name", "mask"), [*product(VARIANTS, MASKS)])
def test_the_backward_pass_starts_with_what_the_forward_pass_left(name: str, mask: str) -> None:
    forward, backward = build(name, full_mesh(N), work_of(name, mask, 22))
    check_fit(forward, backward)
    assert isinstance(backward.task, AttentionTask)
    assert backward.task.layout == attention_layout(name, backward.task.workload, full_mesh(N))


# -- bounds and engines -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SOFTMAX)
@few
@given(attention_layers(max_positions=20))
def test_what_enters_a_rank_is_no_less_than_any_schedule_must_send(name: str, layer: Workload) -> None:
    if not applies(name, layer):
        return
    for schedule in build(name, full_mesh(N), layer):
        task, received = schedule.task, np.zeros(N, dtype=np.int64)
        assert isinstance(task, AttentionTask)
        for step in schedule.steps:
            np.add.at(received, step.destination, schedule.block_bytes[step.block])
        held = schedule.initial | task.owned(KEYS, QUERIES)
        assert all(received[rank] >= Runs.of(task, held).entering_bytes([rank]) for rank in range(N))


@pytest.mark.parametrize("name", NAMES)
@few
@given(machines(), st.data())
def test_no_schedule_is_faster_than_its_bound_and_both_engines_agree(
    name: str, machine: Machine, data: st.DataObject
) -> None:
    """Machines on which work is mostly sending, or mostly computing."""
    work = data.draw(works(name, 24))
    if not applies(name, work):
        return
    for schedule in build(name, machine.topology, work):
        assert_agree(schedule, machine)
        assert simulate(schedule, machine).time_s >= least_s(schedule, machine) > 0


def _transfers(step: Step) -> IntArray:
    return np.stack([step.source, step.destination, step.lane, step.block])


@pytest.mark.parametrize("name", VARIANTS)
@few
@given(attention_layers(max_positions=20), st.data())
def test_the_bytes_of_a_rank_are_those_of_its_transfers(name: str, layer: Workload, data: st.DataObject) -> None:
    options = data.draw(options_for(name))
    for schedule in build(name, full_mesh(N), layer, options) if applies(name, layer, N, options) else ():
        sent = [np.bincount(step.source, schedule.block_bytes[step.block], N) for step in schedule.steps]
        assert schedule.bytes_by_rank().tolist() == np.sum(sent, axis=0).tolist()
        for index, step in enumerate(schedule.steps):
            if isinstance(schedule.steps, LazySteps):
                assert np.array_equal(_transfers(schedule.steps.sends(index)), _transfers(step))
                assert [*replace(step, calls=schedule.steps.calls(index)).content()] == [*step.content()]


@pytest.mark.parametrize("name", NAMES)
def test_ten_runs_are_identical_and_schedules_have_one_digest(name: str) -> None:
    machine = Machine(full_mesh(N, Fraction(7), Fraction(1, 3)), compute=ComputeRate(Fraction(1000)))
    passes = build(name, machine.topology, work_of(name))
    assert [each.digest for each in passes] == [each.digest for each in build(name, machine.topology, work_of(name))]
    assert len({each.digest for each in passes}) == len(passes)
    for schedule in passes:
        first, *others = (simulate(schedule, machine) for _ in range(10))
        assert all(each.events == first.events for each in others)


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_without_links_it_is_built_or_refused_in_one_line(name: str) -> None:
    """On a ring of links one way: what is built uses its links alone, what is not names the schedule or the ranks."""
    topology, passes, refusal = ring(N), (), ""
    try:
        passes = build(name, topology, work_of(name))
    except TaspLabError as error:
        refusal = str(error)
    assert passes or re.fullmatch(r"[^\n]*(rank|link|ring)[^\n]*", refusal)
    for schedule in passes:
        for step in schedule.steps:
            assert topology.have_routes(step.source, step.destination).all()


@pytest.mark.parametrize("name", [name for name in NAMES if uses_rings(name)])
def test_rings_of_other_ranks_are_refused_in_one_line(name: str) -> None:
    options = AttentionOptions()
    with pytest.raises(TaspLabError, match=r"^[^\n]*\b5\b[^\n]*$"):
        build_schedules(name, full_mesh(N), work_of(name), decompose(full_mesh(5)), options)


@pytest.mark.parametrize("name", [name for name in SOFTMAX if ":" in name])
def test_a_split_of_other_ranks_and_what_is_none_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(ScheduleError, match=rf"^schedule '{name}' is for {N} ranks, expected a split of 6$"):
        build(name, full_mesh(6), work_of(name))
    family = name.partition(":")[0]
    form = rf"{family}:{ATTENTION[family].split} with two numbers, like {family}:2x4"
    for wrong in (family, f"{family}:4", f"{family}:2x"):
        with pytest.raises(ScheduleError, match=rf"^schedule '{wrong}': expected {form}$"):
            build(wrong, full_mesh(N), work_of(name))
    wrong = f"{name}:bogus"
    with pytest.raises(ScheduleError, match=rf"^(schedule '{wrong}': unknown variant|unknown schedule '{wrong}')"):
        build(wrong, full_mesh(N), work_of(name))


def test_there_is_a_value_of_every_option() -> None:
    assert {"passes", *OTHERS} == {each.name for each in fields(AttentionOptions)}
    assert {option for name in LAYERS for option in options_of(name)} == set(OTHERS)


@pytest.mark.parametrize(("name", "option"), [*product(LAYERS, OTHERS)])
def test_options_that_do_not_apply_are_refused_and_the_others_accepted(name: str, option: str) -> None:
    options, topology = AttentionOptions("both", **{option: OTHERS[option]}), full_mesh(N)
    if option in options_of(name):
        assert len(build(name, topology, work_of(name), options)) == 2
        return
    what = option.replace("_", " ")
    with pytest.raises(ScheduleError, match=rf"^schedule '[^']*': {what} {OTHERS[option]!r} does not apply to it"):
        build(name, topology, work_of(name), options)


@pytest.mark.parametrize("option", [name for name, other in OTHERS.items() if type(other) is int])
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_of_options_are_positive(option: str, value: int) -> None:
    what = "buffers, expected 2 or more" if option == "buffers" else "expected 1 or more"
    with pytest.raises(ScheduleError, match=what):
        AttentionOptions(**{option: value})
