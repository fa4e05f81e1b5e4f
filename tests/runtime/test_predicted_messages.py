"""Both engines simulate the messages that the executor posts: steps, ends, lanes, blocks in order, and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.simulate import simulate
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules, collective
from tasp_lab.schedules.registry import COLLECTIVES, LINEAR, attention_names_on
from tasp_lab.timeline.events import SEND, Event
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.schedule.test_messages import either
from tests.support.one_device import run_in_process
from tests.support.selection import covering
from tests.support.simulations import gossips

RANKS = 4
NO_TIME = ComputeRate(1e15)


@st.composite
def star_trails(draw: st.DrawFn) -> Schedule:
    members = draw(st.sampled_from([1, 2]))
    n = draw(st.sampled_from([2, 3] if members == 1 else [4, 8]))
    mask: str = draw(st.sampled_from(["full", "causal"]))
    options = AttentionOptions(draw(st.sampled_from(["forward", "backward"])))
    layer = Workload(draw(st.integers(2 * n, 40)), heads=1, head_dim=8, mask=mask)
    return build_schedules(f"startrail:{members}x{n // members}", full_mesh(n), layer, options=options)[0]


@settings(max_examples=100, deadline=None)
@given(either | star_trails() | gossips(full_mesh(4)), st.booleans())
def test_drawn_schedules(schedule: Schedule, whole_steps: bool) -> None:
    check(schedule, whole_steps)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name: str) -> None:
    check(collective(name, full_mesh(RANKS), 97))


@pytest.mark.parametrize(
    ("name", "mask"), covering(product(attention_names_on(RANKS, variants=True), ["full", "causal"]))
)
def test_attention(name: str, mask: str) -> None:
    for schedule in passes(name, Workload(48, heads=4, head_dim=8, mask=mask)):
        check(schedule)


@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention(name: str) -> None:
    for schedule in passes(name, Workload(48, heads=4, head_dim=8, mask="causal", kind="linear")):
        check(schedule)


def passes(name: str, layer: Workload) -> Sequence[Schedule]:
    """Both passes of a schedule."""
    return build_schedules(name, full_mesh(RANKS), layer, None, AttentionOptions("both"))


def check(schedule: Schedule, whole_steps: bool = False) -> None:
    posted = messages_in(run_in_process(schedule, 2, whole_steps, NO_TIME).events)
    machine = Machine(full_mesh(schedule.world_size), compute=NO_TIME)
    for engine in ("simpy", "array"):
        assert messages_in(simulate(schedule, machine, engine).events) == posted  # type: ignore[arg-type]
    assert posted.total() <= schedule.transfers


def messages_in(events: Iterable[Event]) -> Counter[Sequence[object]]:
    """The messages among some events, one event each."""
    return Counter((e.step, e.rank, e.peer, e.lane, e.blocks, e.bytes) for e in events if e.kind == SEND)


def test_which_blocks_a_star_trail_sends_together() -> None:
    """In teams of two a rank shares two queries and two keys, then passes on those of its mate apart from its own.

    Four keys that came together leave together; results are ready one after another.
    """
    (schedule,) = build_schedules("startrail:2x4", full_mesh(8), Workload(64, heads=1, head_dim=8, mask="full"))
    posted = messages_in(run_in_process(schedule).events)
    sent = Counter((step, len(blocks)) for step, _, _, _, blocks, _ in posted)  # type: ignore[arg-type, misc]
    assert sent == {(0, 2): 16, (1, 2): 8, (2, 2): 8, (2, 4): 4, (4, 1): 16}
