"""Cost model of a communication library: turns the transfers of a schedule into messages on the links.

A schedule defines the sender, receiver and block of each transfer. The library sends it as a *message*, which has a
launch time, the overhead of a protocol in bytes and latency, and a rate limited by its channels.
`CommLibrary.message` returns these; the engines use nothing else of a library.

The base class posts one message at a time and adds only the launch time; `IDEAL` adds nothing.
`tasp_lab.machines.libraries.channels` models NCCL and RCCL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import Number
from tasp_lab.machines.libraries.nccl_tuning import Algorithm, Collective


class CallFacts(NamedTuple):
    """What a library can see of the call that it carries out.

    Attributes
    ----------
    world_size : the ranks of its communicator.
    steps : how many steps the schedule has; those of a ring collective are its hops.
    lanes : how many rings carry a ring collective at once.
    total_bytes : of all blocks together.
    fused : whether the call is one collective of the library, rather than sends and receives.
    computes : whether kernel calls run beside it.
    collective : what a fused call does, by the name of nccl-tests.
    algorithm : how a fused call does it: by a ring, a tree, or in the switch.
    own_bytes : what each rank copies to itself beside the messages.
    """

    world_size: int
    steps: int
    lanes: int
    total_bytes: int
    fused: bool = False
    computes: bool = False
    collective: Collective | Literal[""] = ""
    algorithm: Algorithm = "ring"
    own_bytes: int = 0


class Message(NamedTuple):
    """One transfer as the library sends it.

    Attributes
    ----------
    launch_s : time between posting the message and its first byte.
    latency_s : time between its last byte and its use by the receiver, in addition to the route's latency.
    wire_bytes : bytes on the links: the payload and the protocol's overhead.
    max_bytes_per_s : limit of the rate of these bytes; None for no limit.
    rule : name of that limit.
    channels : thread blocks that move it at each end, for `tasp_lab.machines.contention`; 0 where no kernel does.
    """

    launch_s: Number
    latency_s: Number
    wire_bytes: Number
    max_bytes_per_s: Number | None = None
    rule: str = ""
    channels: Number = 0


@dataclass(frozen=True)
class CommLibrary:
    """A library that takes `launch_s` to post a message and adds nothing else.

    With `serial_launch` a rank posts its messages one after the other, so its launches never overlap; otherwise they
    are independent.
    """

    serial_launch: ClassVar[bool] = True
    is_of_links: ClassVar[bool] = True
    """Whether messages take what links take, so that a prediction is as good as what is known of those."""

    name: str
    launch_s: Number = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.launch_s) or self.launch_s < 0:
            raise TopologyError(f"library {self.name!r}: launch_s is {self.launch_s}, expected 0 or more")

    def bind(self, call: CallFacts) -> CommLibrary:
        """The library for one call, with the choices that it makes once per collective."""
        return self

    def places(self, source: IntArray, destination: IntArray) -> IntArray:
        """The place of each pair, a small number that `message` takes; an array of the pairs' shape."""
        return np.zeros(np.broadcast(source, destination).shape, dtype=np.int64)

    @property
    def payload_shares(self) -> tuple[Fraction, ...]:
        """The payload's share of the line rate at each place, for long messages to several peers."""
        return (Fraction(1),)

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        """The message of one transfer.

        Parameters
        ----------
        place : its place, one of `places`.
        size_bytes : the size of its block.
        peers : the number of ranks its sender sends to at this step.
        first : whether it belongs to step 0.
        """
        return Message(self.launch_s, 0, size_bytes)


@dataclass(frozen=True)
class TcpLibrary(CommLibrary):
    """gloo over TCP: messages are posted one at a time, and the share `payload_share` of a link's bytes is payload."""

    is_of_links: ClassVar[bool] = False

    payload_share: Number = 1

    @property
    def payload_shares(self) -> tuple[Fraction, ...]:
        return (Fraction(self.payload_share),)

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        return Message(self.launch_s, 0, size_bytes / self.payload_share)


@dataclass(frozen=True)
class RootComplexLibrary(CommLibrary):
    """Writes to other GPUs through the root complexes of a node, which collapse where a GPU writes to several at once.

    To seven it writes at `write_share` of `write_bytes_per_s` in all, to fewer at a power of their number between
    that and 1 (assumption: no table has other numbers). What collapses is not documented; switches below the root
    complexes avoid it.
    """

    write_bytes_per_s: Number = math.inf
    write_share: Number = 1

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        if peers < 2:
            return Message(self.launch_s, 0, size_bytes)
        decline = math.log(self.write_share) / math.log(PEERS_OF_WRITE_SHARE)
        most = float(self.write_bytes_per_s) * peers ** (decline - 1)
        return Message(self.launch_s, 0, size_bytes, most, "writes to several GPUs")


PEERS_OF_WRITE_SHARE = 7
"""The GPUs that the constant ``peer_write_share`` is about: the others of a node of eight."""

IDEAL = CommLibrary("ideal")
"""Library without launch time or overhead: links carry messages at their full rate."""


def library_of(numbers: Mapping[str, float]) -> CommLibrary:
    """The library of a machine without a profile, whose numbers are constants of its file.

    ``launch`` is the time to post a message, as measured on running ranks; ``peer_write_bandwidth`` and
    ``peer_write_share`` are those of writes through root complexes. Without any of them it is `IDEAL`.

    >>> library_of({"launch": 5e-5})
    CommLibrary(name='measured', launch_s=5e-05)

    Raises `TopologyError` for one of the last two alone.
    """
    launch_s, rate, share = (numbers.get(name) for name in ("launch", "peer_write_bandwidth", "peer_write_share"))
    if rate is not None and share is not None:
        return RootComplexLibrary("pcie", launch_s or 0, rate, share)
    if rate is not None or share is not None:
        alone = "peer_write_share" if rate is None else "peer_write_bandwidth"
        raise TopologyError(f"the constant {alone} alone, expected peer_write_bandwidth and peer_write_share")
    return IDEAL if launch_s is None else CommLibrary("measured", launch_s)
