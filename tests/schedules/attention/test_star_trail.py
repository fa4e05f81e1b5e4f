"""StarTrail: what its ranks send and compute, with rings of several hops."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.strategies import attention_layers
from tests.support.world import World


@settings(max_examples=20, deadline=None)
@given(attention_layers(max_positions=30), st.sampled_from([(1, 3), (2, 4), (2, 6), (3, 3)]))
def test_rings_of_teams_compute_the_layer(layer: Workload, split: tuple[int, int]) -> None:
    c, teams = split
    for schedule in attention_schedules(
        f"startrail:{c}x{teams}", full_mesh(c * teams), layer, None, AttentionOptions("both")
    ):
        world = World.of(schedule)
        assert is_right_in_orders(world, numbers_of(world), 2)


@pytest.mark.parametrize(("c", "teams"), [(2, 2), (2, 4), (2, 8), (3, 6)])
def test_a_rank_sends_its_shard_within_the_team_and_a_team_around(c: int, teams: int) -> None:
    """Forward: C - 1 times queries, keys and results, and T/C - 1 hops of the keys of a team.

    The keys with which a rank begins come from another rank unless they are those of its own team.
    """
    n, positions = c * teams, 16
    layer = Workload(positions * n, heads=4, kv_heads=2, head_dim=8, mask="full")
    (schedule,) = attention_schedules(f"startrail:{c}x{teams}", full_mesh(n), layer)
    keys, queries = (2 * 2 * 2 * 8 * positions, 2 * 4 * 8 * positions)  # bf16; k and v of two heads
    results = queries + 4 * 4 * positions  # with a log-sum-exp per query and head
    begins = sum(rank // c**2 * c + rank % c != rank // c for rank in range(n))
    expected = n * ((c - 1) * (keys + queries + results) + (teams // c - 1) * c * keys) + begins * c * keys
    assert schedule.bytes_sent().sum() == expected


@pytest.mark.parametrize(("name", "n", "message"), [
    ("startrail:4x2", 8, "2 teams of 4 ranks, expected teams in multiples of 4"),
    ("startrail:2x256", 512, "512 ranks, expected at most 256"),
])  # fmt: skip
def test_other_teams_are_refused(name: str, n: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        attention_schedules(name, full_mesh(n), Workload(n, heads=1, mask="full"))
