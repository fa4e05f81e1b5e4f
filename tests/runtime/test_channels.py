"""Channels: which lanes share a batch, and when a GPU may have several communicators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from runtime.executor.transports import LAUNCH_ORDER, Batched
from tasp_lab.schedule.composition.groups import over_groups
from tasp_lab.schedule.dependencies import channels
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules, collective
from tasp_lab.schedules.registry import COLLECTIVES
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_lanes_of_a_collective_are_one_channel(name: str, world_size: int) -> None:
    """What comes is passed on at the next step, or by nobody.

    In a star (two ranks in a tree, all in a switch) sums go up on some lanes, and down on others a step later.
    """
    schedule, others = collective(name, full_mesh(world_size), 64), world_size - 1
    is_star = name == "library-nvls-tree-all-reduce" or (name == "library-tree-all-reduce" and world_size == 2)
    up_and_down = (0,) * others + (1,) * others
    lanes = up_and_down * (schedule.lanes // (2 * others)) if is_star else (0,) * schedule.lanes
    assert channels(schedule) == lanes


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_rings_of_tasp_are_one_channel(mask: str) -> None:
    layer = Workload(256, heads=2, mask=mask)  # type: ignore[arg-type]
    for schedule in build_schedules("tasp", full_mesh(8), layer, None, AttentionOptions("both")):
        assert channels(schedule) == (0,) * schedule.lanes


def test_gradients_that_go_straight_home_are_a_channel_of_their_own() -> None:
    """Nothing waits for them but the end."""
    layer = Workload(64, heads=2, mask="causal")
    _, backward = build_schedules("ring-attention", full_mesh(4), layer, None, AttentionOptions("both"))
    assert (backward.lanes, channels(backward)) == (3, (0, 1, 1))  # home from one or two ranks further on


@pytest.mark.parametrize(("inner", "outer"), [(2, 2), (4, 2), (2, 4)])
def test_inner_and_outer_rings_are_two_channels(inner: int, outer: int) -> None:
    """What comes from another group is passed on when a ring of the inner ranks has ended."""
    size = 8 * inner
    schedule = over_groups(collective("ring", full_mesh(inner), 8), collective("ring", full_mesh(outer), size))
    assert sorted(channels(schedule)) == [0, 1]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this rank, whose calls end at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("order", "version", "hip", "expected"),
    [
        ("1", (2, 27, 3), None, True),
        ("1", (2, 25, 1), None, False),
        ("0", (2, 27, 3), None, False),
        (None, (2, 27, 3), None, False),
        ("1", (2, 27, 3), "7.0", False),
    ],
)
def test_several_communicators_need_an_order(
    monkeypatch: pytest.MonkeyPatch, order: str | None, version: tuple[int, ...], hip: str | None, expected: bool
) -> None:
    """NCCL's from 2.26 on, if it is asked for; no record shows that RCCL has one."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.delenv(LAUNCH_ORDER, raising=False)
    if order is not None:
        monkeypatch.setenv(LAUNCH_ORDER, order)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert Batched(1.0, None, torch.device("cuda:0")).channels is expected
    assert Batched(1.0, None, torch.device("cpu")).channels
