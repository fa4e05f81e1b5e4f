"""Prediction: what the simulator says of named schedules on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.engine import simulate
from tasp_lab.all_gather import all_gather
from tasp_lab.bound import all_gather_bound_s, busbw_bytes_per_s
from tasp_lab.decomposition import Decomposition
from tasp_lab.machine import Machine
from tasp_lab.quantities import Number
from tasp_lab.rings import Say, say_nothing
from tasp_lab.schedule import Schedule
from tasp_lab.timeline import Timeline

MANY_TRANSFERS = 10_000
"""From how many transfers on a simulation may take more than a few seconds, and is announced."""


@dataclass(frozen=True)
class Prediction:
    """A schedule on a machine: times in seconds, `timeline` for the details."""

    schedule: str
    topology: str
    world_size: int
    shard_bytes: int
    time_s: Number
    bound_s: Number
    timeline: Timeline

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bus bandwidth as nccl-tests defines it."""
        return busbw_bytes_per_s(self.world_size, self.shard_bytes, self.time_s)


def predict(
    machine: Machine,
    schedules: Sequence[str],
    shard_bytes: int,
    *,
    decomposition: Decomposition | None = None,
    say: Say = say_nothing,
) -> list[Prediction]:
    """Predict AllGather of `shard_bytes` per rank by each of the named schedules; `say` is told of long ones.

    `decomposition` is that of ``multi-ring``, if not the topology's own.

    >>> from tasp_lab.catalogue import load_machine
    >>> [round(p.time_s * 1e6) for p in predict(load_machine("full-mesh:8"), ["ring", "multi-ring"], 2**20)]
    [154, 28]
    """
    predictions = []
    for name in schedules:
        schedule = all_gather(name, machine.topology, shard_bytes, decomposition)
        if schedule.transfers > MANY_TRANSFERS:
            say(f"simulating {schedule.transfers:,} transfers of {name}; this may take a while")
        predictions.append(predict_schedule(machine, schedule, shard_bytes))
    return predictions


def predict_schedule(machine: Machine, schedule: Schedule, shard_bytes: int) -> Prediction:
    """Predict one schedule that is already built."""
    topology, timeline = machine.topology, simulate(schedule, machine)
    bound_s = all_gather_bound_s(topology, shard_bytes)
    return Prediction(
        schedule.name, topology.name, topology.world_size, shard_bytes, timeline.time_s, bound_s, timeline
    )
