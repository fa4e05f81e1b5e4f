"""A fair ring: what remains of a gain over a ring that has more of NCCL's channels.

In a communicator of all ranks NCCL gives messages to one peer a few of its channels, until they are long
(`tasp_lab.machines.libraries.channels`). A ring has one peer, so part of what other schedules gain over it may be what
the library withholds from it. In a communicator per pair of ranks, which isend and irecv of PyTorch use outside of a
batch, a message has half of all channels at once. Both schedules have it here, and of each the faster time counts::

    found = tuned_ring(answer(tasp), answer(zigzag))
    found.gain, found.remaining
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.simulate import engine_of, simulate
from tasp_lab.core.units import format_time
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.inputs import with_pairs
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.registry import baselines, is_attention

NAMED = 0.02
"""A ring is compared if more channels make it faster by more than this share."""

RINGS = tuple(filter(is_attention, baselines()))
"""The single rings of softmax attention."""


@dataclass(frozen=True)
class TunedRing:
    """A schedule beside the fastest single ring, without and with a communicator per pair of ranks.

    Parameters
    ----------
    schedule, ring : their names, which are equal if the schedule is that ring.
    time_s, ring_s : their times as the library runs them.
    tuned_time_s, tuned_ring_s : with pairs where that is faster.
    """

    schedule: str
    ring: str
    time_s: float
    ring_s: float
    tuned_time_s: float
    tuned_ring_s: float

    @property
    def gain(self) -> float:
        """How much longer the ring takes than the schedule, as a share; negative if the ring is faster."""
        return self.ring_s / self.time_s - 1

    @property
    def remaining(self) -> float:
        """The gain that is left if the ring and the schedule each have a communicator per pair of ranks."""
        return self.tuned_ring_s / self.tuned_time_s - 1

    @property
    def line(self) -> str:
        """In a sentence."""
        changed = f"{self.ring} would take {format_time(self.tuned_ring_s)} instead of {format_time(self.ring_s)}"
        gains = f": {self.schedule} would be {_faster(self.remaining)} than it, not {_faster(self.gain)}"
        return f"With a communicator per pair of ranks {changed}{'' if self.schedule == self.ring else gains}."

    def to_dict(self) -> dict[str, object]:
        """The object `tuned_ring` of ``--json``."""
        return {**vars(self), "gain": self.gain, "remaining_gain": self.remaining}


def _faster(gain: float) -> str:
    """A gain in words.

    >>> _faster(0.25), _faster(-0.2)
    ('25.0% faster', '25.0% slower')
    """
    return f"{gain:.1%} faster" if gain >= 0 else f"{1 / (1 + gain) - 1:.1%} slower"


def has_few_channels(machine: Machine) -> bool:
    """Whether the library gives short messages to one peer fewer channels than long ones."""
    library = machine.comm_library
    return machine.system is not None and isinstance(library, ChannelLibrary) and library.rule.least < library.rule.most


def tuned_ring(found: Answer, rings: Sequence[Answer]) -> TunedRing | None:
    """An answer beside the fastest of `rings`; None where more channels change its time by less than `NAMED`."""
    rings = [each for each in rings if each.applies]
    if not rings or not has_few_channels(found.passes[0].machine):
        return None
    ring = min(rings, key=lambda each: each.time_s)
    time_s, ring_s, tuned_s = float(found.time_s), float(ring.time_s), _in_pairs_s(ring)
    if ring_s <= (1 + NAMED) * tuned_s:
        return None
    own_s = tuned_s if found.schedule == ring.schedule else min(time_s, _in_pairs_s(found))
    return TunedRing(found.schedule, ring.schedule, time_s, ring_s, own_s, tuned_s)


def _in_pairs_s(found: Answer) -> float:
    """The time of the same schedules with a communicator per pair of ranks."""
    return sum(simulated_s(found, each.schedule, with_pairs(each.machine)) for each in found.passes)


def simulated_s(found: Answer, schedule: Schedule, machine: Machine) -> float:
    """The time of a schedule of an answer on another machine, by the engine of its question."""
    engine = engine_of(schedule, machine, found.question.engine)
    return float(simulate(schedule, machine, engine, events=False).time_s)
