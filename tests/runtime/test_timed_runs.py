"""What a measured run times: from one clock, without the host's own work, and nothing that is not the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from runtime.executor import executor as executor_module
from runtime.executor.executor import Executor
from runtime.executor.streams import CudaStreams, Mark, Streams
from runtime.executor.views import Views
from runtime.protocol.jobs import MeasureCompute, RunSchedule
from runtime.protocol.records import Computed, Moved, RankRecord, duration_s, merge_records
from runtime.ranks import run_job
from runtime.sequence_parallel.layer import AttentionLayer
from runtime.trials.patterns import PatternTrial, PatternWork
from tasp_lab.schedule.rank_part import CallRow
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules, collective
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.loopback import Board, Loopback


@pytest.fixture
def fake_group() -> Iterator[None]:
    """Rank 1 of a group of eight, whose other ranks do not exist: calls end at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    yield
    dist.destroy_process_group()


def record(rank: int, clock: str, began_s: float, time_s: float, **rows: object) -> RankRecord:
    return RankRecord(rank, clock, began_s, time_s, 0.0, (), ())._replace(**rows)  # type: ignore[arg-type]


def test_a_run_lasts_from_the_last_start_to_the_last_end() -> None:
    """Rank 0 leaves the barrier 3 s before rank 1 and waits for it: that is no time of the run."""
    assert duration_s([record(0, "a", 100.0, 5.0), record(1, "a", 103.0, 1.5)]) == 2.0
    assert duration_s([record(0, "a", 100.0, 5.0), record(1, "a", 103.0, 2.5)]) == 2.5


def test_hosts_have_clocks_of_their_own() -> None:
    """Those of another host say nothing here; its last rank counts as starting with ours."""
    here = [record(0, "a", 100.0, 5.0), record(1, "a", 103.0, 1.5)]
    there = [record(2, "b", 7.0, 4.0), record(3, "b", 6.0, 1.0)]
    assert duration_s(here + there) == 4.0
    assert duration_s(here + [each._replace(began_s=each.began_s + 1e6) for each in there]) == 4.0


def test_timelines_are_shifted_by_each_ranks_start() -> None:
    mesh = full_mesh(2)
    schedule = collective("ring", mesh, 8)
    (row,) = [row for row in schedule.steps[0].rows() if row[0] == 0]
    (back,) = [row for row in schedule.steps[0].rows() if row[0] == 1]
    first = record(
        0, "a", 10.0, 4.0, sent=(Moved(0, row[2], 1, row[3:], 0.25),),
        received=(Moved(0, back[2], 1, back[3:], 4.0),),
        computed=(Computed(0, "k", 0, 1, 1.0, 2.0),),
    )  # fmt: skip
    second = record(
        1, "a", 13.0, 1.0, sent=(Moved(0, back[2], 0, back[3:], 0.5),), received=(Moved(0, row[2], 0, row[3:], 0.75),)
    )
    times = {(e.rank, e.kind): (e.start_s, e.end_s) for e in merge_records([first, second], schedule, "m").events}
    assert times[0, "send"] == (0.25, 3.75)
    assert times[1, "send"] == (3.5, 4.0)
    assert times[0, "k"] == (1.0, 2.0)
    assert duration_s([first, second]) == 1.0


def test_nothing_of_the_host_is_between_barrier_and_start(fake_group: None) -> None:
    """The load of the host is read before the barrier and after the end; a file of /proc takes longer than a step."""
    done: list[str] = []

    class Busy:
        def __init__(self) -> None:
            done.append("load")

        def so_far(self) -> float:
            done.append("load")
            return 0.0

    class Marked(Streams):
        def begin(self) -> None:
            done.append("begin")
            super().begin()

        def mark(self) -> Mark:
            done.append("mark")
            return super().mark()

    schedule = collective("direct", full_mesh(8), 16)
    barrier = run_job.barrier
    with (
        patch.object(executor_module, "BusyShare", Busy),
        patch.object(run_job, "streams_for", lambda device, timed: Marked()),
        patch.object(run_job, "barrier", lambda progress: (barrier(progress), done.append("barrier"))),
        patch.object(PatternTrial, "check", lambda self: done.append("check")),
    ):
        run_job.perform(RunSchedule(schedule, "batched", repeats=2, warm_ups=1), 10.0, lambda _: None)
    runs = " ".join(done).split("load barrier begin ")[1:]
    assert len(runs) == 3
    assert [run.replace("mark ", "").replace("mark", "") .split() for run in runs] == [
        ["load", "check"], ["load"], ["load", "check"],
    ]  # fmt: skip


def test_the_end_is_marked_before_the_host_waits() -> None:
    """On a GPU: an event in the stream, then the host waits for it, and for nothing else."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self, stream: object) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("host waits")

        def elapsed_time(self, other: object) -> float:
            return 2.0

    class Stream:
        def synchronize(self) -> None:
            done.append("host waits")

    with (
        patch.object(torch.cuda, "Event", Event),
        patch.object(torch.cuda, "current_stream", lambda device=None: Stream()),
    ):
        executor = Executor(collective("ring", full_mesh(1), 8), 0, Loopback(Board(), 0))
        executor.prepare(CudaStreams(timed=True), timed=True)
        assert executor.run_timed().time_s == 2e-3
    assert done == ["record", "record", "host waits"]


def test_contents_are_made_once_for_all_repeats(fake_group: None) -> None:
    """Repeats follow each other: patterns are drawn by the host, which takes long."""
    schedule = collective("ring", full_mesh(8), 1000)
    with (
        patch.object(PatternWork, "complete", autospec=True, side_effect=PatternWork.complete) as made,
        patch.object(PatternTrial, "check"),
    ):
        run_job.perform(RunSchedule(schedule, "batched", repeats=5, warm_ups=1), 10.0, lambda _: None)
    assert made.call_count == int(schedule.initial[1].sum())


@pytest.mark.parametrize("name", ["ring-attention", "tasp", "token-ring", "kv-all-gather"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kernels_are_timed_on_random_numbers(fake_group: None, name: str, dtype: str) -> None:
    """Also what other ranks would have sent: zeros draw less power."""
    layer = Workload(sequence=8 * 16, heads=2, kv_heads=2, head_dim=8, dtype=dtype, mask="full")
    compute = AttentionLayer.compute
    for schedule in attention_schedules(name, full_mesh(8), layer, options=AttentionOptions("both")):
        read: list[torch.Tensor] = []

        def look(layer: AttentionLayer, row: CallRow, operands: Sequence[Views], read: Any = read) -> Sequence[Views]:
            read += [field.clone() for operand in operands for field in operand]
            return compute(layer, row, operands)

        with patch.object(AttentionLayer, "compute", look):
            run_job.perform(MeasureCompute(schedule, repeats=1), 10.0, lambda _: None)
        assert read
        for field in read:
            assert bool(field.isfinite().all())
            assert float((field != 0).float().mean()) > 0.9
