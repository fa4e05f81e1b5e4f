"""Messages wait until calls have been handed out, and calls for sends; blocks of two tensors as two messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.simulate import simulate
from tasp_lab.core.units import Number
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.contention import NONE
from tasp_lab.machines.host import HostModel
from tasp_lab.machines.libraries.groups import GroupLibrary
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.machines.stack import load_stack
from tasp_lab.prediction.evaluate import answer
from tasp_lab.prediction.inputs import with_host
from tasp_lab.prediction.question import Question
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules, collective
from tasp_lab.timeline.events import SEND, Event
from tasp_lab.topology.builders import ring
from tasp_lab.workload.layer import Workload
from tests.support.simulations import Simulation, Waves, registered_cases, simulations, waiting_hosts

seconds = st.fractions(Fraction(1, 8), Fraction(3), max_denominator=8)
shares = st.fractions(Fraction(0), Fraction(1), max_denominator=4)


@settings(max_examples=60, deadline=None)
@given(simulations(registered_cases(), hosts=waiting_hosts, lanes=1))
def test_calls_follow_what_their_rank_has_sent(case: Simulation) -> None:
    schedule, machine = case
    waiting = replace(
        machine, host=replace(machine.host, waits_for_sends=True), comm_library=CommLibrary("posts", Fraction(0))
    )
    events = simulate(schedule, waiting, "simpy").events
    is_sum = [bool(kind.join) for kind in schedule.blocks.kinds]
    sent: dict[tuple[int, int], Number] = {}
    for event in events:
        if event.kind == SEND and not is_sum[int(schedule.blocks.kind[event.block])]:
            left_s = event.end_s - machine.topology.route(event.rank, event.peer).latency_s
            sent[event.rank, event.step] = max(sent.get((event.rank, event.step), 0), left_s)
    for event in events:
        assert event.kind == SEND or event.start_s >= sent.get((event.rank, event.step - 1), 0)


@given(st.integers(1, 6), shares, seconds, seconds, st.booleans())
def test_a_ring_overlaps_what_is_left_of_a_call_once_a_share_is_over(
    n: int, share: Fraction, call_s: Fraction, hop_s: Fraction, of_stack: bool
) -> None:
    """T = K + (n-1) max(K, s K + C): the message begins after a share s of the call, the next call after both.

    The share is what a call has handed out where a stack does not overlap, else that of the machine's messages.
    """
    topology = ring(n, 4 / hop_s, Fraction(0))
    schedule = attention_schedules("ring-attention", topology, Workload(n, head_dim=1, heads=1, mask="full"))[0]
    machine = Machine(topology, compute=Waves(4 / call_s, share=share if of_stack else 1))
    if of_stack:
        machine = replace(machine, host=HostModel("one stream", overlaps=False))
    else:
        machine = replace(machine, contention=replace(NONE, waits=share))
    step_s = max(call_s, share * call_s + hop_s)
    for engine in ("simpy", "array"):
        found = simulate(schedule, machine, engine).time_s  # type: ignore[arg-type]
        assert float(found) == pytest.approx(float(call_s + (n - 1) * step_s))


def test_sums_do_not_wait_for_a_call_that_needs_their_memory() -> None:
    """With two buffers a rank makes its next results where the last ones lie until they have left."""
    options = AttentionOptions("forward", buffers=2, tail_chunks=4)
    question = Question("mi300x-4", "zigzag-token-ring", Workload(8192, heads=8, mask="causal"), options)
    exact, array = (answer(replace(question, engine=engine)).time_s for engine in ("simpy", "array"))
    assert float(exact) == pytest.approx(float(array), rel=1e-9)


def test_messages_of_rccl_wait_unless_that_is_changed() -> None:
    """With copy engines 28 % of an ideal overlap are lost, without contention nothing."""
    layer = Workload(16384, heads=16, mask="full")
    changes: list[dict[str, Any]] = [{}, {"overrides": ("messages_wait=0.28",)}, {"contention": False}]
    questions = [Question("mi300x-8", "ring-attention", layer, **each) for each in changes]
    times_s = [float(answer(each).time_s) for each in questions]
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[1] < 0.95 * times_s[0]


def backward_ring(n: int, host: HostModel, call_s: Fraction, hop_s: Fraction) -> Sequence[Event]:
    """The backward pass of a ring of one head, whose keys take `hop_s` per hop and whose gradients as long."""
    topology = ring(n, 4 / hop_s, Fraction(0))
    options = AttentionOptions(
        "backward", trim=False, dataflow="rotate-kv", gradient_dtype="input", direction="ascending"
    )
    schedule = attention_schedules(
        "ring-attention", topology, Workload(n, head_dim=1, heads=1, mask="full"), None, options
    )[0]
    machine = Machine(topology, compute=Waves(10 / call_s, share=1), host=host)
    return simulate(schedule, machine, "simpy").events


@given(st.integers(3, 6), seconds, seconds)
def test_the_second_gradient_waits_for_the_next_call(n: int, call_s: Fraction, hop_s: Fraction) -> None:
    host = HostModel("two messages", overlaps=False, separate=("backward",))
    events = backward_ring(n, host, call_s, hop_s)
    ends = {(event.rank, event.step): event.end_s for event in events if event.kind != SEND}
    sent = [event for event in events if event.kind == SEND]
    cells = {(each.rank, each.step, each.block) for each in sent}
    for cell in cells:
        first, second = sorted(
            (each for each in sent if (each.rank, each.step, each.block) == cell), key=lambda e: e.start_s
        )
        assert first.bytes == second.bytes
        assert second.start_s >= first.end_s
        if cell[2] >= 2 * n:  # gradients come after keys and queries
            assert second.start_s >= ends.get((cell[0], cell[1] + 1), 0)


def test_a_message_of_its_own_for_each_tensor_takes_no_longer_to_send() -> None:
    """With a launch of nothing, two halves take as long as the whole."""
    one, two = (
        backward_ring(4, HostModel("test", overlaps=True, separate=separate), Fraction(1), Fraction(2))
        for separate in ((), ("backward",))
    )
    assert max(each.end_s for each in one) == max(each.end_s for each in two)
    assert sum(each.kind == SEND for each in two) == 2 * sum(each.kind == SEND for each in one)


def test_pairs_have_all_channels_where_a_world_has_few() -> None:
    machine = load_machine("h800-2x8")
    pairs = with_host(machine, load_stack("ultraattn").host("ring-attention")).comm_library
    assert isinstance(pairs, GroupLibrary)
    inside, between = pairs.places(np.array([0, 0]), np.array([1, 8])).tolist()
    few, many = (each.message(inside, 2**23, 1, first=False) for each in (machine.comm_library, pairs))
    assert many.channels > few.channels
    assert pairs.message(between, 2**23, 1, first=False).channels <= many.channels
    two = load_machine("h800-2").comm_library
    assert pairs.message(inside, 2**23, 1, first=False) == two.message(0, 2**23, 1, first=False)


@pytest.mark.parametrize("name", ["ring", "multi-ring", "library-ring", "all-to-all"])
def test_communication_alone_knows_no_host(name: str) -> None:
    for world in ("h800-8", "a800-2x8"):
        machine = load_machine(world)
        schedule = collective(name, machine.topology, 2**20)
        eager = with_host(machine, load_stack("ultraattn").host("striped-ring-attention"))
        plain, run = (simulate(schedule, each).time_s for each in (machine, eager))
        assert plain == run
