"""The proof against real numbers: what is wrong after a change of a valid schedule must be refused, without exception.

An executor of numbers, which shares no code with the proof, judges every changed schedule. Harmless changes may be
accepted or refused. A sample of each kind of change is judged, by ``make test-all`` every single change.
``pytest -s`` prints the counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import IS_FULL
from tests.support.mutations import Findings, campaign, is_accepted, is_right_in_orders, mutants, valid
from tests.support.numeric_tasks import numbers_of
from tests.support.reductions import Case, reductions
from tests.support.world import World
from tests.support.worlds import WORLDS

MAX_PER_KIND, DOUBLE = (None, 100) if IS_FULL else (2, 20)
"""Single changes of each kind, and double changes, that are judged per world."""

MIN_WRONG = 25
"""Wrong changes that are tried per world, so that no world passes because nothing happened."""


@pytest.fixture(scope="module")
def total() -> Iterator[Findings]:
    """The verdicts on all worlds, printed by kind of change in the end."""
    found = Findings()
    yield found
    print()
    for kind in [*found.kinds, None]:
        print(f"{kind or 'all':40}{found.verdicts(kind)}")


@pytest.mark.parametrize("name", WORLDS)
def test_no_wrong_change_is_accepted(name: str, total: Findings) -> None:
    unchanged = WORLDS[name]()
    assert is_right_in_orders(unchanged, numbers_of(unchanged), 5)
    assert is_accepted(unchanged)
    large = sum(len(row.transfers) for row in unchanged.rows) > 100
    found = campaign(unchanged, *((1, 0) if large else (MAX_PER_KIND, DOUBLE)))
    total.count += found.count
    print(f"\n{name}: {found.verdicts()}")
    assert not found.survivors
    assert found.of(right=False) >= MIN_WRONG


@settings(max_examples=100)
@given(reductions(), st.randoms(use_true_random=False))
def test_no_wrong_change_of_a_drawn_reduction_is_accepted(case: Case, choose: random.Random) -> None:
    world = World.of(case.schedule())
    numbers = numbers_of(world)
    # without a task nothing contradicts ranks that say what they have at the start, and how parts are joined
    stated = "promises are initial copies", "kind joined by"
    changes = [change for what, change in mutants(world) if not what.startswith(stated)]
    for change in choose.sample(changes, 5):
        mutant = valid(change)
        assert mutant is None or is_right_in_orders(mutant, numbers, 1, world)
