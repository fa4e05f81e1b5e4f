"""Trials: what blocks hold while a schedule is measured, what stands for its kernels, and how the result is checked."""

from __future__ import annotations

import bisect
import time
from typing import Protocol

import torch

from runtime.executor import Executor, no_progress
from runtime.kernels import KERNELS, Kernel, choose_kernel
from runtime.layer import DTYPES, Layer, put_keys_home
from runtime.patterns import fill, part_of_gradient, verify, verify_gradients, verify_reads
from runtime.sharding import shard
from runtime.sums import Sums
from runtime.transport import Transport
from runtime.walks import Progress
from tasp_lab.errors import RunError
from tasp_lab.rooms import CallRow, Sum
from tasp_lab.schedule import Schedule

_CHECKED_ROWS = 64
"""So many query rows of each rank are checked against the float64 reference."""

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative errors in norm beyond which a result is wrong rather than rounded."""


class Trial(Protocol):
    """One rank's run of a schedule: `set_up`, then the executor runs, then `check`. Checks raise `RunError`."""

    executor: Executor

    def set_up(self, checked: bool) -> None:
        """Put the data in place; `checked` for runs whose time does not matter, so that more can be checked."""
        ...

    def check(self) -> None: ...


def make_trial(
    schedule: Schedule,
    rank: int,
    transport: Transport,
    flops_per_s: float | None,
    device: str = "cpu",
    progress: Progress = no_progress,
) -> Trial:
    """Test patterns, and timed waits for kernel calls where `flops_per_s` is given, else real attention.

    Raises `RunError` for timed waits on a GPU, where the host must not wait.
    """
    if flops_per_s is not None and schedule.task is not None and device != "cpu":
        raise RunError(f"rank {rank}: timed kernel calls are for gloo; on {device} they are real")
    if schedule.task is None or flops_per_s is not None:
        return PatternTrial(schedule, rank, transport, flops_per_s, device, progress)
    return LayerTrial(schedule, rank, transport, device, progress)


class PatternTrial:
    """Blocks hold test patterns, and a kernel call is a wait of as long as it would take."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        flops_per_s: float | None,
        device: str = "cpu",
        progress: Progress = no_progress,
    ) -> None:
        self.executor = Executor(schedule, rank, transport, self._call, self._join, device, progress)
        self._flops_per_s = flops_per_s or float("inf")
        self._checked = True

    def set_up(self, checked: bool) -> None:
        self._checked = checked
        self._sums = Sums(self.executor.part, lambda block, offset: [self.executor.block(block, offset)])
        fill(self.executor)

    def _call(self, row: CallRow) -> None:
        if self._checked:
            verify_reads(self.executor, row)
            for at, place in enumerate(row.adds):
                self._sums.add(place, [part_of_gradient(self.executor, row, at)])
        time.sleep(row.flops / self._flops_per_s)

    def _join(self, each: Sum) -> None:
        if self._checked:
            self._sums.join(each)

    def check(self) -> None:
        verify(self.executor)
        if self._checked:
            verify_gradients(self.executor)


class LayerTrial:
    """Real attention on drawn queries, keys and values, the same on every rank."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        device: str = "cpu",
        progress: Progress = no_progress,
    ) -> None:
        assert schedule.task is not None, "a schedule of attention has a task"
        self.executor = Executor(schedule, rank, transport, self._call, device=device, progress=progress)
        self._schedule, self._rank = schedule, rank
        self._workload = workload = schedule.task.workload
        self._placement = schedule.task.placement
        self._scale = workload.head_dim**-0.5
        dtype = DTYPES[workload.dtype]
        self._kernel: Kernel = choose_kernel("auto", dtype, torch.device(device), workload.head_dim)
        drawn = torch.Generator().manual_seed(0)
        shape = (workload.batch, workload.sequence)
        heads = (workload.heads, workload.kv_head_count, workload.kv_head_count)
        self._q, self._k, self._v = (
            torch.randn(*shape, count, workload.head_dim, generator=drawn).to(dtype).to(device) for count in heads
        )
        self._own = [shard(x, self._placement, rank) for x in (self._q, self._k, self._v)]
        self._checked = True
        self.set_up(checked=True)

    def set_up(self, checked: bool) -> None:
        self._checked = checked
        q, k, v = self._own
        put_keys_home(self.executor, self._workload, k, v)
        self._layer = Layer(self._schedule, self._rank, q, self._kernel, self._scale)

    def _call(self, row: CallRow) -> None:
        self._layer.call(row, self.executor.reads(row))

    def check(self) -> None:
        """Compare some rows with single-process attention in float64."""
        own = self._placement.positions(self._rank)
        if not self._checked or not len(own):
            return
        out, _ = self._layer.result()
        rows = torch.linspace(0, len(own) - 1, min(_CHECKED_ROWS, len(own))).long().tolist()
        errors, sizes = 0.0, 0.0
        for row in rows:
            position = int(own[row])
            high, low = self._limits(position)
            expected = KERNELS["reference"].attend(
                self._q[:, position : position + 1], self._k[:, low:high], self._v[:, low:high],
                scale=self._scale, low=1 - (high - low), high=0,
            ).out  # fmt: skip
            errors += float((out[:, row : row + 1].double() - expected).square().sum())
            sizes += float(expected.square().sum())
        if not errors <= _TOLERANCE[out.dtype] ** 2 * sizes:
            raise RunError(
                f"rank {self._rank}: the result differs from single-process attention by {(errors / sizes) ** 0.5:.2g}"
            )

    def _limits(self, position: int) -> tuple[int, int]:
        """The end and the start of the keys that a position sees."""
        workload = self._workload
        starts = [*workload.document_starts.tolist(), workload.sequence]
        document = bisect.bisect_right(starts, position)
        high = position + 1 if workload.mask == "causal" else starts[document]
        low = starts[document - 1]
        return high, low if workload.window is None else max(low, high - workload.window)

    def compute_alone(self) -> float:
        """Make all kernel calls of the rank on whatever its buffer holds; returns the seconds that takes."""
        device = self.executor.buffer.device
        began_s = _now(device)
        for row in self.executor.part.calls:
            self._call(row)
        return _now(device) - began_s


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
