"""Whatever order the dependencies allow, executing a schedule with real numbers yields what it promises."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import pytest

from sim.event.engine import simulate
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.schedule.blocks import Blocks, Kind, Pool
from tasp_lab.schedule.dependencies import Edges
from tasp_lab.topology.graph import Link, Topology
from tests.support.dependency_order import edges_of, is_right_whenever
from tests.support.mutations import mutants, valid
from tests.support.numeric_tasks import numbers_of
from tests.support.reference import reference_times
from tests.support.world import World
from tests.support.worlds import WORLDS, doubling_all_reduce


def _received_into_buffers() -> World:
    """Each rank sends its partial sum at a step at which it receives one into one of two buffers."""
    unbounded = doubling_all_reduce(8)
    old = unbounded.blocks
    blocks = Blocks([Kind("sum", "add", Pool("arrivals", 2))], old.kind, old.bytes, old.parts)
    return replace(unbounded, blocks=blocks)


CASES: dict[str, Callable[[], World]] = {**WORLDS, "received into buffers": _received_into_buffers}


def _orders_that_are_right(world: World, edges: Edges, orders: int) -> list[bool]:
    numbers = numbers_of(world)
    return [is_right_whenever(world, numbers, edges, random.Random(seed)) for seed in range(orders)]


@pytest.mark.parametrize("name", CASES)
def test_every_order_is_right(name: str) -> None:
    world = CASES[name]()
    assert all(_orders_that_are_right(world, edges_of(world), 10))


@pytest.mark.parametrize("name", CASES)
def test_every_order_of_a_valid_change_is_right(name: str) -> None:
    """Changes that the proof accepts, such as transfers at other steps, other buffers, or copies in place of gives."""
    changed = random.Random(name).sample([change for _, change in mutants(CASES[name]())], 30)
    for world in map(valid, changed):
        if world is not None:
            assert all(_orders_that_are_right(world, edges_of(world), 3))


def test_a_buffer_waits_for_what_keeps_its_sum_from_joining() -> None:
    """A sum lies in its buffer until the copy that it joins has been sent; the next one must not overwrite it.

    Rank 0 sends slowly at step 0. What rank 4 sends it at step 2 comes into the buffer in which a sum of step 0 lies.
    """
    world = _received_into_buffers()
    assert all(_orders_that_are_right(world, edges_of(world), 100))
    fast, slow, none = Fraction(100), Fraction(1), Fraction(0)
    links = tuple(Link(a, b, slow if (a, b) == (0, 1) else fast, none) for a, b in permutations(range(8), 2))
    topology = Topology("one slow link", 8, links)
    timeline = simulate(world.schedule(), Machine(topology, CommLibrary("none", none)))
    events = timeline.events
    times = {(each.step, each.rank, each.peer, each.lane, each.blocks): (each.start_s, each.end_s) for each in events}
    assert times[2, 4, 0, 0, (0,)][0] == times[0, 0, 1, 0, (0,)][1] == 8
    assert (times, {}) == reference_times(world.schedule(), topology, none)
