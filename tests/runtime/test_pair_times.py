"""Calibration on GPUs, under a model of the clocks of NCCL (`tests.support.timed_nccl`)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from runtime.calibration import MAX_MESSAGE_BYTES, Calibration, ClassFit, RouteClass, fit
from runtime.protocol.jobs import MeasurePair, PairTimes
from runtime.ranks import run_job as pair_times
from runtime.ranks.run_job import measure_pair
from tasp_lab.core.errors import RunError
from tasp_lab.machines.machine import Machine
from tasp_lab.topology.builders import full_mesh
from tasp_lab.validation.validate import Comparison
from tests.support.timed_nccl import TimedNccl, installed

SIZES = tuple(MAX_MESSAGE_BYTES // fraction for fraction in (8, 4, 2, 1))
CLASS = RouteClass(((0, 1), (1, 0)), 1, 450e9)
H100, MI300X = 380e9, 48e9


def measured(nccl: TimedNccl, measure: Callable[[MeasurePair], PairTimes | None]) -> ClassFit:
    """The fit to both directions."""
    times = []
    with installed(nccl, pair_times):
        for source in range(2):
            job = MeasurePair(source, 1 - source, SIZES, repeats=3, tiny=4)
            times.append(nccl.run(lambda job=job: measure(job))[source])  # type: ignore[misc]
    return fit(CLASS, times)


def by_device(job: MeasurePair) -> PairTimes | None:
    return measure_pair(job, 10.0, lambda _: None)


def by_polled_host(job: MeasurePair) -> PairTimes | None:
    """Round trips on the host's clock, each wait with a timeout: how calibration was done before."""
    dist: Any = pair_times.dist
    clock: Any = pair_times.time
    peer, data = 1 - dist.get_rank(), pair_times.torch.zeros(MAX_MESSAGE_BYTES, dtype=pair_times.torch.uint8)
    asks, answered = dist.get_rank() == job.source, []
    for size in [size for size in job.sizes_bytes for _ in range(job.repeats)] + [1] * job.tiny:
        began_s = clock.perf_counter()
        for sends, count in ((asks, size), (not asks, 1)):
            dist.batch_isend_irecv(
                [dist.P2POp(dist.isend if sends else dist.irecv, data[:count], group_peer=peer)]
            )[0].wait(timedelta(seconds=10))  # fmt: skip
        answered.append((size, clock.perf_counter() - began_s))
    tiny = tuple(seconds for _, seconds in answered[-job.tiny :])
    return PairTimes(tuple(answered[: -job.tiny]), tiny, (1e-5,) * job.tiny) if asks else None


@pytest.mark.parametrize("bandwidth", [H100, MI300X])
def test_times_of_the_device_give_the_link(bandwidth: float) -> None:
    nccl = TimedNccl(bandwidth)
    found = measured(nccl, by_device)
    assert found.bandwidth_bytes_per_s.value == pytest.approx(bandwidth, rel=1e-6)
    assert found.launch_s.value == pytest.approx(nccl.message_s, rel=1e-4)
    assert found.latency_s.value == pytest.approx(nccl.batch_s, rel=1e-3)
    assert found.posting is not None
    assert found.posting.batch_s.value == pytest.approx(nccl.post_batch_s, rel=1e-6)
    assert found.posting.message_s.value == pytest.approx(nccl.post_message_s, rel=1e-6)
    document = Comparison("torchrun", 1.0, Calibration((found,), Machine(full_mesh(2))), ()).to_dict()["calibration"]
    assert isinstance(document, list)
    assert document[0]["posting"]["batch_s"]["value"] == found.posting.batch_s.value


@pytest.mark.parametrize("bandwidth", [H100, MI300X])
def test_polled_waits_give_no_link(bandwidth: float) -> None:
    """All sizes take a pause or two; the model is the one under which the device's times give the link."""
    with pytest.raises(RunError, match="larger messages did not take longer"):
        measured(TimedNccl(bandwidth), by_polled_host)


@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
@given(st.floats(1e10, 9e11), st.floats(1e-6, 5e-5), st.floats(0, 1e-5), st.floats(1e-6, 2e-4), st.floats(1e-6, 5e-5))
def test_any_link_is_recovered(
    bandwidth: float, batch_s: float, message_s: float, post_batch_s: float, post_message_s: float
) -> None:
    """However slow the hosts are: they queue all while the devices sleep."""
    nccl = TimedNccl(bandwidth, batch_s, message_s, post_batch_s, post_message_s)
    found = measured(nccl, by_device)
    assert found.bandwidth_bytes_per_s.value == pytest.approx(bandwidth, rel=1e-5)
    assert found.launch_s.value == pytest.approx(message_s, rel=1e-5, abs=2 / bandwidth)
    assert found.latency_s.value == pytest.approx(batch_s, rel=1e-3)


def test_the_communicator_is_that_of_schedules() -> None:
    """A message outside of a batch goes over a communicator of two ranks, where it is sixteen times as fast."""
    nccl = TimedNccl(MI300X, pair_bandwidth_bytes_per_s=16 * MI300X)
    assert measured(nccl, by_device).bandwidth_bytes_per_s.value == pytest.approx(MI300X, rel=1e-6)


def test_the_model_without_polling_is_exact() -> None:
    """A fault of the model itself would show here: one round trip on the host's clock, waited for by the stream."""
    nccl = TimedNccl(H100)

    def round_trip() -> float:
        dist: Any = pair_times.dist
        data = pair_times.torch.zeros(2**20, dtype=pair_times.torch.uint8)
        for sends in (nccl.rank == 0, nccl.rank == 1):
            operation = dist.P2POp(dist.isend if sends else dist.irecv, data, group_peer=1 - nccl.rank)
            dist.batch_isend_irecv([operation])[0].wait()
        pair_times.torch.cuda.synchronize()
        return nccl.host_s[nccl.rank]

    with installed(nccl, pair_times):
        seconds = nccl.run(round_trip)
    post_s, take_s = nccl.post_batch_s + nccl.post_message_s, nccl.batch_s + nccl.message_s + 2**20 / H100
    assert seconds == pytest.approx([max(2 * post_s, post_s + take_s) + take_s] * 2)
