"""Messages with channels, and calls on several compute lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from hypothesis import strategies as st

from tasp_lab.core.arrays import IntArray
from tasp_lab.machines.contention import Contention
from tasp_lab.machines.libraries.library import CommLibrary, Message
from tasp_lab.schedule.schedule import Schedule


@dataclass(frozen=True)
class ChannelsByPair(CommLibrary):
    """A library whose messages have 1, 2 or 3 channels, whoever sends to whom; and a latency after the last byte."""

    latency_s: Fraction = Fraction(0)

    def places(self, source: IntArray, destination: IntArray) -> IntArray:
        return source * (destination + 1) % 3

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        return Message(self.launch_s, self.latency_s, size_bytes, channels=1 + place)


@dataclass(frozen=True)
class EqualChannels(CommLibrary):
    """A library whose messages all have as many channels."""

    channels: int = 1

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        return Message(self.launch_s, 0, size_bytes, channels=self.channels)


def channels(rank: int, peer: int) -> int:
    """Those of `ChannelsByPair`."""
    return 1 + rank * (peer + 1) % 3


def on_compute_lanes(schedule: Schedule, lanes: int) -> Schedule:
    """The schedule with the calls of its steps on so many compute lanes in turn: those of a rank may run at once."""
    steps = [
        replace(
            step, calls=tuple(replace(calls, lane=(at + number) % lanes) for number, calls in enumerate(step.calls))
        )
        for at, step in enumerate(schedule.steps)
    ]
    return replace(schedule, steps=steps)


def contentions(sms: Sequence[int] = (7, 12, 40)) -> st.SearchStrategy[Contention]:
    """Exact ones: few channels take much, or many take little; sometimes the cap is below what messages have."""
    return st.builds(
        Contention,
        st.sampled_from([Fraction(each) for each in sms]),
        st.sampled_from([1, Fraction(1, 2)]),
        st.integers(1, min(sms) - 1),
    )
