"""What a prediction consists of. Without the simulator, so that what prints it needs none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasp_lab.attention_backward import Way
from tasp_lab.bound import busbw_bytes_per_s
from tasp_lab.collectives import CollectiveKind
from tasp_lab.quantities import Number
from tasp_lab.schedule import Schedule
from tasp_lab.schedules import AttentionOptions, Pass
from tasp_lab.timeline import Event, Timeline
from tasp_lab.workload import Workload

PASS_NAMES: dict[Pass, str] = {"forward": "forward", "backward": "backward", "both": "forward and backward"}


@dataclass(frozen=True)
class Prediction:
    """A schedule on a machine: times in seconds, `timeline` for the details."""

    schedule: str
    topology: str
    world_size: int
    time_s: Number
    bound_s: Number
    timeline: Timeline

    @property
    def is_all(self) -> bool:
        """Whether it is all that was asked for, not one pass of two."""
        return True

    @property
    def is_sum(self) -> bool:
        """Whether it stands for two others, one after the other."""
        return False


@dataclass(frozen=True)
class CollectivePrediction(Prediction):
    """A collective of which each rank owns `shard_bytes`."""

    collective: CollectiveKind
    shard_bytes: int

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bus bandwidth as nccl-tests defines it."""
        return busbw_bytes_per_s(self.world_size, self.shard_bytes, self.time_s, self.collective)


@dataclass(frozen=True)
class LayerPrediction(Prediction):
    """A pass of an attention layer, or both, one after the other (see `together`).

    `options` are what was asked for, `passing` is which pass this is, and `way` how its backward pass goes, if it has
    one. `compute_s` is all compute of the busiest rank, `communication_s` the time of the same schedule when computing
    takes none. `bytes_sent` and `flops` are of all ranks; `buffer_bytes` is the largest buffer that a rank needs for
    what travels. `compute_flops_per_s` is None when computing takes no time.
    """

    layer: Workload
    options: AttentionOptions
    passing: Pass
    way: Way | None
    compute_flops_per_s: Number | None
    compute_s: Number
    communication_s: Number
    bytes_sent: int
    buffer_bytes: int
    flops: int

    @property
    def is_all(self) -> bool:
        return self.passing == self.options.passes

    @property
    def is_sum(self) -> bool:
        return self.passing == "both"

    @property
    def gradient_dtype(self) -> str | None:
        """Of the gradients that travel; None in a forward pass."""
        if self.way is None:
            return None
        return self.layer.dtype if self.options.gradient_dtype == "input" else self.options.gradient_dtype

    @property
    def ccr(self) -> float | None:
        """Compute time over communication time; None when there is no communication."""
        return float(self.compute_s / self.communication_s) if self.communication_s else None


def pass_of(schedule: Schedule) -> Pass:
    """Which pass of a layer a schedule computes."""
    return "backward" if schedule.task is not None and schedule.task.is_backward else "forward"


def label(schedule: Schedule, options: AttentionOptions) -> str:
    """The name of a schedule, and its pass unless only that of a forward pass can be meant."""
    return schedule.name if options.passes == "forward" else f"{schedule.name} {PASS_NAMES[pass_of(schedule)]}"


def together(forward: Prediction, backward: Prediction) -> LayerPrediction:
    """Both passes of a schedule, one after the other, for the layers behind lie between them.

    All is summed but the buffer, which is the larger one, and the rate, at which both take as long as they do.
    """
    assert isinstance(forward, LayerPrediction), "only layers have passes"
    assert isinstance(backward, LayerPrediction), "only layers have passes"
    return replace(
        backward,
        passing="both",
        time_s=forward.time_s + backward.time_s,
        bound_s=forward.bound_s + backward.bound_s,
        timeline=one_after_the_other(forward.timeline, backward.timeline, f"{forward.schedule} {PASS_NAMES['both']}"),
        compute_flops_per_s=_common_rate_flops_per_s(forward, backward),
        compute_s=forward.compute_s + backward.compute_s,
        communication_s=forward.communication_s + backward.communication_s,
        bytes_sent=forward.bytes_sent + backward.bytes_sent,
        buffer_bytes=max(forward.buffer_bytes, backward.buffer_bytes),
        flops=forward.flops + backward.flops,
    )


def _common_rate_flops_per_s(forward: LayerPrediction, backward: LayerPrediction) -> Number | None:
    rates = forward.compute_flops_per_s, backward.compute_flops_per_s
    if rates[0] == rates[1] or rates[0] is None or rates[1] is None:
        return rates[0]
    return (forward.flops + backward.flops) / (forward.flops / rates[0] + backward.flops / rates[1])


def one_after_the_other(first: Timeline, second: Timeline, schedule: str) -> Timeline:
    """Two timelines as one, of a schedule of that name. The steps of the second follow on those of the first.

    >>> from tasp_lab.timeline import SEND
    >>> one = Timeline("predicted", "a", "pair", 2, (Event(0, 0, 0, SEND, 1, 0, 8, 1.0, 3.0, "0->1", ""),))
    >>> [(event.step, event.start_s, event.end_s) for event in one_after_the_other(one, one, "twice").events]
    [(0, 1.0, 3.0), (1, 4.0, 6.0)]
    """
    steps = 1 + max((event.step for event in first.events), default=-1)
    later = tuple(_later(event, first.time_s, steps) for event in second.events)
    return replace(first, schedule=schedule, events=first.events + later)


def _later(event: Event, time_s: Number, steps: int) -> Event:
    return event._replace(step=event.step + steps, start_s=event.start_s + time_s, end_s=event.end_s + time_s)


def ratio(a: Number, b: Number) -> float:
    """a / b for times; 1 when b is nothing."""
    return float(a) / float(b) if float(b) else 1.0
