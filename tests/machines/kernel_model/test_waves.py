"""Tiles over SMs: closed forms, bounds, and laws of list scheduling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.machines.kernel_model.tiles import Tiles

COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=40).map(lambda each: np.array(each, float))
SLOTS = st.sampled_from([1, 2, 3])


def test_waves_of_equal_tiles() -> None:
    """132 SMs, 133 tiles: two waves. With two slots per SM, 264 tiles fill one wave of twice the length."""
    tiles = np.full(133, 7.0)
    assert Tiles(tiles, 1, 132).makespan() == 14.0
    assert Tiles(tiles[:132], 2, 132, slots=2).makespan(0.6) == 14.0


def test_a_tile_alone_on_its_sm_runs_slower_than_its_share_says() -> None:
    """Two slots, alone at 0.8: 2 SMs, tiles of 4, 4, 2. SM 0 has 4 and 2: shared until 4 (2 of each done), the other 2
    at 0.8 take 2.5, so 6.5; SM 1 takes 4 / 0.8 = 5."""
    assert Tiles(np.array([4.0, 4.0, 2.0]), 1, 2, slots=2).makespan(0.8) == pytest.approx(6.5)


def test_the_longest_tiles_last_leave_the_longest_tail() -> None:
    """Tiles 1, 1, 1, 3 on two SMs: 1 + 3 as listed; longest first 3 and 1 + 1 + 1."""
    tiles = np.array([1.0, 1.0, 1.0, 3.0])
    assert Tiles(tiles, 1, 2).makespan() == 4.0
    assert Tiles(tiles, 1, 2, longest_first=True).makespan() == 3.0


def test_empty_tiles_cost_nothing() -> None:
    assert Tiles(np.zeros(3), 5, 4).makespan() == 0.0
    assert Tiles(np.array([0.0, 2.0]), 1, 4).makespan() == 2.0


@given(COSTS, st.integers(1, 30), st.integers(1, 20), SLOTS, st.floats(0.4, 1.0), st.booleans())
def test_never_faster_than_all_sms_nor_than_the_longest_tile(
    costs: np.ndarray, heads: int, sms: int, slots: int, alone: float, longest_first: bool
) -> None:
    found = Tiles(costs, heads, sms, slots, longest_first).makespan(alone)
    longest = costs.max() / (alone if slots > 1 else 1)
    assert found >= max(costs.sum() * heads / sms, costs.max()) * (1 - 1e-9)
    # Graham: a list schedule is at most the mean load and the longest tile of each slot behind the best.
    assert found <= costs.sum() * heads / sms / min(alone, 1) + slots * longest * (1 + 1e-9)


@given(COSTS, st.integers(1, 30), st.integers(1, 20), st.booleans())
def test_more_sms_are_never_slower(costs: np.ndarray, heads: int, sms: int, longest_first: bool) -> None:
    """Tiles are independent, so a tile of a list schedule starts no later on more SMs."""
    fewer = Tiles(costs, heads, sms, longest_first=longest_first).makespan()
    more = Tiles(costs, heads, sms + 1, longest_first=longest_first).makespan()
    assert more <= fewer + 0.5 * costs.max()


@given(COSTS, st.integers(1, 20), st.integers(1, 20), SLOTS)
def test_one_more_head_is_never_faster(costs: np.ndarray, heads: int, sms: int, slots: int) -> None:
    assert (
        Tiles(costs, heads + 1, sms, slots).makespan(0.7)
        >= Tiles(costs, heads, sms, slots).makespan(0.7) - 0.5 * costs.max()
    )


@given(COSTS, st.integers(1, 30), st.integers(1, 20), SLOTS, st.booleans())
def test_the_last_tile_begins_before_the_end_and_at_once_if_all_fit(
    costs: np.ndarray, heads: int, sms: int, slots: int, longest_first: bool
) -> None:
    tiles = Tiles(costs, heads, sms, slots, longest_first)
    begins = tiles.last_begins()
    if len(costs) * heads <= slots * sms:
        assert begins == 0.0
        return
    # All slots are taken until then, so no more than the other tiles can have been done, and no less but for a wave.
    work = costs.sum() * heads
    assert begins * sms <= work - costs.min() + 1e-6
    assert begins * sms >= work - costs.max() * slots * sms - 1e-6
    assert begins <= tiles.makespan() + 1e-6
