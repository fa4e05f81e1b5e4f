"""What a prediction consists of. Without the simulator, so that what prints it needs none."""

from __future__ import annotations

from dataclasses import dataclass

from tasp_lab.bound import busbw_bytes_per_s
from tasp_lab.quantities import Number
from tasp_lab.timeline import Timeline
from tasp_lab.workload import Workload


@dataclass(frozen=True)
class Prediction:
    """A schedule on a machine: times in seconds, `timeline` for the details."""

    schedule: str
    topology: str
    world_size: int
    time_s: Number
    bound_s: Number
    timeline: Timeline


@dataclass(frozen=True)
class AllGatherPrediction(Prediction):
    """An AllGather of `shard_bytes` per rank."""

    shard_bytes: int

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bus bandwidth as nccl-tests defines it."""
        return busbw_bytes_per_s(self.world_size, self.shard_bytes, self.time_s)


@dataclass(frozen=True)
class LayerPrediction(Prediction):
    """An attention layer.

    `compute_s` is all compute of the busiest rank, `communication_s` the time of the same schedule when computing takes
    none. `bytes_sent` and `flops` are of all ranks; `buffer_bytes` is the largest buffer that a rank needs for keys and
    values. `compute_flops_per_s` is None when computing takes no time.
    """

    layer: Workload
    trim: bool
    rooms: int
    compute_flops_per_s: Number | None
    compute_s: Number
    communication_s: Number
    bytes_sent: int
    buffer_bytes: int
    flops: int

    @property
    def ccr(self) -> float | None:
        """Compute time over communication time; None when there is no communication."""
        return float(self.compute_s / self.communication_s) if self.communication_s else None


def ratio(a: Number, b: Number) -> float:
    """a / b for times; 1 when b is nothing."""
    return float(a) / float(b) if float(b) else 1.0
