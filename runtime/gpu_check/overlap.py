"""How much of communication a layer hides behind its kernels, with and without priority for messages.

The share that is hidden is ``(a + b - c) / min(a, b)`` for kernels alone, messages alone and both together: 1 if the
shorter one costs nothing, 0 if they run one after the other.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist

from runtime.executor.messages import Group
from runtime.executor.streams import streams_for
from runtime.executor.transports import make_transport
from runtime.gpu_check.group import CheckedGroup
from runtime.protocol.records import duration_s
from runtime.ranks.torchrun import HIGH_PRIORITY
from runtime.trials.workloads import Trial, compute_alone, draw_operands, make_trial
from tasp_lab.schedule.schedule import Schedule

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Overlap:
    """Times in seconds, of kernels the slowest rank's; `priority` is that of NCCL's stream, ``host`` without one."""

    priority: str
    compute_s: float
    communication_s: float
    together_s: float

    @property
    def hidden_share(self) -> float:
        """The share of the shorter one that is hidden.

        >>> Overlap("high", 3.0, 2.0, 4.0).hidden_share
        0.5
        """
        shorter = min(self.compute_s, self.communication_s)
        return (self.compute_s + self.communication_s - self.together_s) / shorter if shorter else 0.0

    def to_dict(self) -> dict[str, object]:
        return vars(self) | {"hidden_share": self.hidden_share}


def measure_overlap(group: CheckedGroup, layer: Schedule, messages: Schedule, repeats: int) -> Iterator[Overlap]:
    """Measure a layer of attention, and `messages`, a schedule of the same messages without kernel calls.

    Raises `RunError` if a result is wrong.
    """
    for priority, process_group in groups_by_priority(group):
        alone = _median(group, messages, process_group, repeats)
        together = _median(group, layer, process_group, repeats)
        compute = _compute_s(group, layer, process_group, repeats)
        yield Overlap(priority, compute, alone, together)


def groups_by_priority(group: CheckedGroup) -> Iterator[tuple[str, Group]]:
    """Groups of all ranks whose messages have normal and high priority; on a host the default group.

    torch reads the variable for every new group: also for those of further channels.
    """
    if not group.on_gpu:
        yield "host", None
        return
    before = os.environ.get(HIGH_PRIORITY)
    for priority, value in (("normal", "0"), ("high", "1")):
        os.environ[HIGH_PRIORITY] = value
        yield priority, _group_with(priority)
    os.environ.pop(HIGH_PRIORITY)
    if before is not None:
        os.environ[HIGH_PRIORITY] = before


@cache
def _group_with(priority: str) -> Group:
    """One group of all ranks: each has communicators with buffers on the GPU."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority == "high")
    made: Group = dist.new_group(backend="nccl", pg_options=options)
    return made


def _median(group: CheckedGroup, schedule: Schedule, process_group: Group, repeats: int) -> float:
    """The median of the times of a run, after one that is checked."""
    trial = _trial(group, schedule, process_group)
    times = []
    for run in range(repeats + 1):
        trial.set_up(checked=not run)
        trial.executor.prepare(streams_for(group.device, timed=True), timed=True)
        group.barrier()
        time_s = duration_s(group.gather(trial.executor.run_timed()))
        if run:
            times.append(time_s)
        else:
            trial.check()
    return statistics.median(times)


def _compute_s(group: CheckedGroup, schedule: Schedule, process_group: Group, repeats: int) -> float:
    trial = _trial(group, schedule, process_group)
    draw_operands(trial.executor)
    times = []
    for _ in range(repeats + 1):
        trial.set_up(checked=False)
        group.barrier()
        times.append(group.slowest(compute_alone(trial.executor).time_s))
    return statistics.median(times[1:])


def _trial(group: CheckedGroup, schedule: Schedule, process_group: Group) -> Trial:
    transport = make_transport("auto", _TIMEOUT_S, process_group)
    return make_trial(schedule, group.rank, transport, None, str(group.device))
