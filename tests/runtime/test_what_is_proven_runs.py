"""What the proof accepts, the executor runs: changed schedules that are still valid, by threads and on real numbers."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import pytest

from tests.support.mutations import mutants, valid
from tests.support.one_device import run_in_process
from tests.support.selection import IS_FULL
from tests.support.world import World
from tests.support.worlds import SCHEDULES

MAX_PER_KIND = 2 if IS_FULL else 1
"""Changed schedules of each kind of change that are executed."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_valid_changes_of_schedules_are_executed(name: str) -> None:
    """Their results are right, whatever was changed: other pools, lanes, steps and orders, bound or not."""
    by_kind: dict[str, list[Callable[[], World]]] = defaultdict(list)
    for kind, change in mutants(World.of(SCHEDULES[name]())):
        by_kind[kind].append(change)
    executed = 0
    for number, (kind, changes) in enumerate(by_kind.items()):
        accepted = 0
        for change in random.Random(kind).sample(changes, min(len(changes), 8 * MAX_PER_KIND)):
            world = valid(change)
            if world is None:
                continue
            try:
                run_in_process(world.schedule(), whole_steps=bool((number + accepted) % 2))
            except Exception as error:
                raise AssertionError(f"{kind}: {error}") from error
            accepted += 1
            if accepted == MAX_PER_KIND:
                break
        executed += accepted
    assert executed > 5 * MAX_PER_KIND
