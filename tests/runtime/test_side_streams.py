"""Streams of a GPU beside the current one: how many are made. A fake `torch.cuda` stands in for a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from runtime.executor import streams
from runtime.executor.streams import streams_for
from runtime.ranks.torchrun import ON_GPUS
from tasp_lab.schedule.dependencies import channels
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import attention_names_on
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

HARDWARE_QUEUES = int(ON_GPUS["GPU_MAX_HW_QUEUES"])
"""HIP maps the streams of a priority to so many queues; those that share one run one after another."""


class FakeCuda:
    """The part of `torch.cuda` that streams use; keeps what was made."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self, stream: object) -> None:
            pass

    def __init__(self) -> None:
        self.made: list[tuple[object, int]] = []
        self._current: object = "current"

    def Stream(self, device: object, priority: int) -> FakeStream:  # noqa: N802
        self.made.append((device, priority))
        return FakeStream()

    def current_stream(self, device: object = None) -> object:
        return FakeStream()

    def current_device(self) -> int:
        return 0

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield


class FakeStream:
    def wait_event(self, event: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setattr(streams.torch, "cuda", fake)
    streams._side_stream.cache_clear()
    yield fake
    streams._side_stream.cache_clear()


def test_one_stream_per_device_channel_and_lane(cuda: FakeCuda) -> None:
    """However often it is asked for, and however the device is written."""
    for _ in range(100):
        for device in (torch.device("cuda:0"), torch.device("cuda")):
            used = streams_for(device)
            used.begin()
            for number in (0, 1):
                with used.communicating(number), used.computing(number):
                    pass
            used.finish()
    assert sorted(cuda.made, key=str) == sorted([(0, -1), (0, -1), (0, 0)], key=str)


def test_another_device_has_streams_of_its_own(cuda: FakeCuda) -> None:
    for number in (0, 1, 0, 1):
        used = streams_for(torch.device("cuda", number))
        used.begin()
        with used.communicating():
            pass
    assert cuda.made == [(0, -1), (1, -1)]


@pytest.mark.parametrize("name", attention_names_on(8))
def test_streams_fit_into_the_queues_of_a_priority(name: str) -> None:
    """Of high priority are one stream per channel and the library's own one for it; of normal priority the kernels'."""
    layer = Workload(512, heads=8, head_dim=16, mask="causal")
    for schedule in build_schedules(name, full_mesh(8), layer, None, AttentionOptions("both")):
        lanes = {call.lane for step in schedule.steps for call in step.calls}
        assert 2 * (max(channels(schedule), default=0) + 1) <= HARDWARE_QUEUES
        assert len(lanes) <= HARDWARE_QUEUES
