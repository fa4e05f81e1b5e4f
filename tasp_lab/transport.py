"""A transport: what the communication library makes of a schedule's transfers before they reach the links.

A schedule says who sends which block to whom. A library sends it as a *message*: it takes time to launch, it has a
protocol with overhead in bytes and in latency, and it is moved by a number of channels, each of which reaches only so
many bytes per second. `Transport.message` says so for each transfer; the engines know no more of a library than that.

The base class is a library that costs what it takes to post a message, one at a time; `IDEAL` is one that costs
nothing. `tasp_lab.channel_library` has NCCL and RCCL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.errors import TopologyError
from tasp_lab.quantities import Number

if TYPE_CHECKING:
    from tasp_lab.schedule import Schedule


class Message(NamedTuple):
    """One transfer as the library sends it.

    Attributes
    ----------
    launch_s : from when it is posted until its bytes flow.
    latency_s : from when its last byte was sent until it is usable, beside the route's own latency.
    wire_bytes : what passes the links; more than the payload where a protocol has overhead.
    most_bytes_per_s : of these bytes, no more than so many per second, however free the links are; None for no limit.
    rule : the name of that limit.
    """

    launch_s: Number
    latency_s: Number
    wire_bytes: Number
    most_bytes_per_s: Number | None = None
    rule: str = ""


@dataclass(frozen=True)
class Transport:
    """A library that takes `launch_s` to post a message and adds nothing else.

    With `serial_launch` a rank posts its messages one after the other, so launches of one rank never overlap; else they
    do not wait for each other.
    """

    serial_launch: ClassVar[bool] = True

    name: str
    launch_s: Number = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.launch_s) or self.launch_s < 0:
            raise TopologyError(f"transport {self.name!r}: launch_s is {self.launch_s}, expected 0 or more")

    def bind(self, schedule: Schedule) -> Self:
        """The transport for one schedule: what a library decides once for a whole collective is decided."""
        return self

    def places(self, source: IntArray, destination: IntArray) -> IntArray:
        """Where messages go, as far as `message` has to know: a small number for each pair, an array of their shape."""
        return np.zeros(np.broadcast(source, destination).shape, dtype=np.int64)

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        """What the library makes of one transfer.

        Parameters
        ----------
        place : where it goes, of `places`.
        size_bytes : the block's size.
        peers : to how many ranks its sender sends at this step.
        first : whether it is of step 0.
        """
        return Message(self.launch_s, 0, size_bytes)


@dataclass(frozen=True)
class TcpLibrary(Transport):
    """gloo over TCP: messages are posted one at a time, and of a link's bytes `payload_share` is payload."""

    payload_share: Number = 1

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        """See `Transport.message`."""
        return Message(self.launch_s, 0, size_bytes / self.payload_share)


IDEAL = Transport("ideal")
"""Messages cost nothing to post, and links carry them at their full rate."""
