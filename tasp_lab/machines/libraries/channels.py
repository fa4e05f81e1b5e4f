"""Cost model of NCCL and RCCL, which move messages through channels.

A *channel* is a pair of thread blocks, one per GPU, that copy a message in chunks through a small buffer. One channel
does not fill a link, so the number of channels limits the rate of a message. The model has:

- *launch*, once per step, since the messages of a step form one group; the hop latency of the *protocol*; and the time
  in which the receiver copies the last chunk out of the buffer;
- *protocols*: LL for short messages (4 bytes of flag per 4 bytes of payload, hence half the rate), else Simple;
- the *channel rule*: a message starts with the number of channels that all peers can have at once, which doubles while
  the part per channel exceeds a limit, up to a maximum per peer;
- across nodes, that maximum is the *minimum over all peers*: the channels that fill a NIC, halved until all groups of
  peers served by one channel fit. It also holds inside nodes;
- *payload*: protocols use part of a link's line rate, and more of it if a rank sends to several peers at one step.

A *fused* schedule is one ring collective of the library: the protocol's base latency once, a hop latency per step, and
the ring rate of all channels together. The protocol (LL, LL128 or Simple) is the fastest by the library's own estimate.

The numbers are constants of a profile, each with its source (`tasp_lab.machines.constants`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from tasp_lab.core.arrays import FloatArray, IntArray
from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import Number
from tasp_lab.machines.libraries.library import CallFacts, CommLibrary, Message

INTRA_DOMAIN, INTER_DOMAIN = 0, 1
"""Places of messages: inside a domain of GPUs with peer access to each other's memory, and between domains."""

ProtocolName = Literal["LL", "LL128", "Simple"]


@dataclass(frozen=True)
class Protocol:
    """A protocol.

    Parameters
    ----------
    base_s : latency of a call.
    hop_s : latency of a hop inside a domain and between domains, in addition to the wire's.
    ring_hop_s : the same in a ring collective.
    payload_share : payload's share of its bytes.
    ring_share : its share of a ring collective's rate.
    max_bytes_per_s : limit of its ring rate; None for no limit.
    """

    name: ProtocolName
    base_s: Number
    hop_s: tuple[Number, Number]
    ring_hop_s: tuple[Number, Number]
    payload_share: Number = 1
    ring_share: Number = 1
    max_bytes_per_s: Number | None = None

    def ring_bytes_per_s(self, ring_bytes_per_s: Number) -> Number:
        """The rate of a ring with this protocol."""
        reached = ring_bytes_per_s * self.ring_share
        return reached if self.max_bytes_per_s is None else min(reached, self.max_bytes_per_s)


@dataclass(frozen=True)
class Medium:
    """Medium of messages at one place: a GPU's links inside a domain, or its NIC.

    Parameters
    ----------
    launch_s : launch time of a group of messages.
    line_bytes_per_s : rate of the topology's links.
    payload_bytes_per_s : payload rate to one peer.
    many_payload_bytes_per_s : payload rate to several peers at one step.
    channel_bytes_per_s : rate of one channel.
    chunk_bytes : size of a channel's chunks.
    bytes_per_channel : channels double while a channel's part of a message is larger.
    min_bytes_per_channel : smallest part of a channel; short messages get fewer channels.
    """

    launch_s: Number
    line_bytes_per_s: Number
    payload_bytes_per_s: Number
    many_payload_bytes_per_s: Number
    channel_bytes_per_s: Number
    chunk_bytes: int
    bytes_per_channel: int
    min_bytes_per_channel: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value >= 0 if name == "launch_s" else value > 0):
                raise TopologyError(f"medium: {name} is {value}, expected {'0 or ' if name == 'launch_s' else ''}more")


@dataclass(frozen=True)
class ChannelRule:
    """Number of channels of a message: `least`, doubled while parts are too large, up to `most`.

    A message too short for `least` parts gets fewer.
    """

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise TopologyError(f"channel rule: from {self.least} to {self.most} channels, expected 1 or more")

    def channels(self, size_bytes: int, min_bytes_per_channel: int, bytes_per_channel: int) -> int:
        """The channels of a message.

        >>> [ChannelRule(4, 32).channels(size, 2**16, 2**24) for size in (2**16, 2**20, 2**27, 2**34)]
        [1, 4, 8, 32]
        """
        channels = min(self.least, max(1, -(-size_bytes // min_bytes_per_channel)))
        while 2 * channels <= self.most and size_bytes > channels * bytes_per_channel:
            channels *= 2
        return channels


def channel_rule(ranks: int, channels: int, max_per_peer: int) -> ChannelRule:
    """The rule where `channels` serve a group of `ranks` peers and one peer may have `max_per_peer`.

    The fewest for a peer are halved from the most until all peers together fit.

    >>> channel_rule(8, 32, 32), channel_rule(80, 16, 1)
    (ChannelRule(least=4, most=32), ChannelRule(least=1, most=1))
    """
    most = least = min(channels, max_per_peer)
    while least > 1 and least * ranks > channels:
        least //= 2
    return ChannelRule(least, most)


def channels_per_net_peer(ranks: int, channels: int, to_fill_a_nic: int, peers_at_once: int) -> int:
    """The most channels per peer where some peers are behind the network: as many as fill a NIC, but all must fit.

    `peers_at_once` is how many peers one channel serves together.

    >>> channels_per_net_peer(16, 16, 4, 8), channels_per_net_peer(80, 16, 4, 8)
    (4, 1)
    """
    groups = -(-ranks // peers_at_once)
    most = power_of_two(to_fill_a_nic)
    while most > 1 and most * groups > channels:
        most //= 2
    return most


def power_of_two(value: int) -> int:
    """The least power of two that is not less.

    >>> [power_of_two(value) for value in (1, 4, 24, 36)]
    [1, 4, 32, 64]
    """
    return 1 << max(value - 1, 0).bit_length()


RingNumbers = tuple[Any, Any, Any, Any]
"""Launch time, latency, bytes on the wire and limit of messages, as `Message` has them: numbers, or arrays of them."""


class Ring(NamedTuple):
    """A ring collective; or several at once, whose numbers are arrays with one element per ring.

    Attributes
    ----------
    base_s : latency of the call.
    hop_s : latency of a hop inside a domain and between domains, in addition to the wire's.
    bytes_per_s : the rate of one of its lanes.
    protocol : its name; empty for several rings.
    """

    base_s: Any
    hop_s: tuple[Any, Any]
    bytes_per_s: Any
    protocol: str = ""


@dataclass(frozen=True, kw_only=True)
class ChannelLibrary(CommLibrary):
    """A communication library with channels.

    Parameters
    ----------
    domain_ranks : number of consecutive ranks that share a domain.
    media : media of the places `INTRA_DOMAIN` and, with several domains, `INTER_DOMAIN`.
    protocols : protocols by name.
    rule : number of channels of a message.
    ring_bytes_per_s : payload rate of all rings of a collective together, out of each rank.
    short_bytes : largest LL message, per channel of `rule.most`.
    ring : of a library that is bound to a fused call: its ring.
    """

    serial_launch: ClassVar[bool] = False

    domain_ranks: int
    media: tuple[Medium, ...]
    protocols: Mapping[ProtocolName, Protocol]
    rule: ChannelRule
    ring_bytes_per_s: Number
    short_bytes: int
    ring: Ring | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        where = f"library {self.name!r}"
        if missing := set(get_args(ProtocolName)) - set(self.protocols):
            raise TopologyError(f"{where}: protocols lack {', '.join(sorted(missing))}")
        if self.domain_ranks < 1:
            raise TopologyError(f"{where}: {self.domain_ranks} ranks per domain, expected 1 or more")
        if len(self.media) not in (1, 2):
            raise TopologyError(f"{where}: {len(self.media)} media, expected 1 or 2")
        if not self.ring_bytes_per_s > 0 or self.short_bytes < 0:
            raise TopologyError(f"{where}: a ring rate of {self.ring_bytes_per_s} bytes/s, expected more than 0")

    def bind(self, call: CallFacts) -> ChannelLibrary:
        """The library for one call; of a fused one, with the protocol that the library would choose."""
        if not call.fused or not call.steps:
            return self
        ((protocol, rate),) = self._protocols_for([call])
        return replace(self, ring=Ring(protocol.base_s, protocol.ring_hop_s, rate / call.lanes, protocol.name))

    def ring_messages(
        self, calls: Sequence[CallFacts], kinds: Sequence[tuple[int, FloatArray, bool]]
    ) -> list[RingNumbers]:
        """The messages of several fused calls at once: a fit to many sizes then costs little more than to one.

        Parameters
        ----------
        calls : the calls; each has one message of each kind.
        kinds : the place of the messages of a kind, the bytes of each, and whether they belong to step 0.
        """
        chosen = zip(self._protocols_for(calls), calls, strict=True)
        rings = [(protocol.base_s, *protocol.ring_hop_s, rate / call.lanes) for (protocol, rate), call in chosen]
        base_s, inside_s, between_s, bytes_per_s = np.array(rings, dtype=float).T
        together = Ring(base_s, (inside_s, between_s), bytes_per_s)
        return [self._ring_numbers(place, size_bytes, first, together) for place, size_bytes, first in kinds]

    def _protocols_for(self, calls: Sequence[CallFacts]) -> list[tuple[Protocol, Number]]:
        """The protocol of each fused call and its ring rate: the fastest one by the library's own estimate.

        That is base latency, consecutive hops, and bytes over the ring rate.
        """
        rated = [(each, each.ring_bytes_per_s(self.ring_bytes_per_s)) for each in self.protocols.values()]
        chosen = []
        for call in calls:
            ranks, hops = call.world_size, call.steps
            domains = -(-ranks // self.domain_ranks)
            between = hops * (domains - 1) // max(ranks - 1, 1)
            sent_bytes = call.total_bytes * hops / ranks
            best, least_s = rated[0], None
            for protocol, rate in rated:
                hops_s = (hops - between) * protocol.ring_hop_s[INTRA_DOMAIN] + between * protocol.ring_hop_s[-1]
                time_s = protocol.base_s + hops_s + sent_bytes / rate
                if least_s is None or time_s < least_s:
                    best, least_s = (protocol, rate), time_s
            chosen.append(best)
        return chosen

    def places(self, source: IntArray, destination: IntArray) -> IntArray:
        """`INTRA_DOMAIN` or `INTER_DOMAIN` for each pair."""
        away: IntArray = (source // self.domain_ranks != destination // self.domain_ranks).astype(int)
        return away

    @property
    def payload_shares(self) -> tuple[Fraction, ...]:
        """See `CommLibrary.payload_shares`."""
        return tuple(Fraction(m.many_payload_bytes_per_s) / Fraction(m.line_bytes_per_s) for m in self.media)

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        """See `CommLibrary.message`."""
        if self.ring is not None:
            # it has no kernel calls beside it, so nobody counts its channels
            launch_s, latency_s, wire_bytes, limit = self._ring_numbers(place, size_bytes, first, self.ring)
            return Message(launch_s, latency_s, wire_bytes, limit, f"ring, {self.ring.protocol}")
        medium = self.media[place]
        protocol = self.protocols["LL" if size_bytes <= self.short_bytes * self.rule.most else "Simple"]
        channels = self.rule.channels(size_bytes, medium.min_bytes_per_channel, medium.bytes_per_channel)
        payload = medium.payload_bytes_per_s if peers == 1 else medium.many_payload_bytes_per_s
        overhead = medium.line_bytes_per_s / payload / protocol.payload_share
        last_chunk_bytes = min(medium.chunk_bytes, size_bytes / channels)
        channel_bytes_per_s = medium.channel_bytes_per_s * protocol.payload_share
        return Message(
            launch_s=medium.launch_s,
            latency_s=protocol.hop_s[place] + last_chunk_bytes / channel_bytes_per_s,
            wire_bytes=size_bytes * overhead,
            max_bytes_per_s=channels * channel_bytes_per_s * overhead,
            rule=f"{channels} channel{'s' * (channels > 1)}, {protocol.name}",
            channels=channels,
        )

    def _ring_numbers(self, place: int, size_bytes: Any, first: bool, ring: Ring) -> RingNumbers:
        """A message of a fused call; of several calls at once, where `size_bytes` and `ring` are of several."""
        medium = self.media[place]
        overhead = medium.line_bytes_per_s / medium.payload_bytes_per_s
        return ring.base_s if first else 0, ring.hop_s[place], size_bytes * overhead, ring.bytes_per_s * overhead


@dataclass(frozen=True, kw_only=True)
class PairLibrary(CommLibrary):
    """A library with channels whose point-to-point messages have a communicator of two ranks per pair.

    isend and irecv of PyTorch are like this outside a batch. How many channels a message gets depends on the ranks of
    its communicator: in one of all ranks each peer has few at first, in one of two ranks all. Nor does a pair inside a
    domain have a network, so its chunks are those of one domain.

    Parameters
    ----------
    world : the library with one communicator of all ranks, which collectives keep.
    inside : that of two ranks of a domain; None if domains have one rank.
    between : that of two ranks of different domains; None with one domain.
    """

    serial_launch: ClassVar[bool] = False

    world: ChannelLibrary
    inside: ChannelLibrary | None
    between: ChannelLibrary | None

    def bind(self, call: CallFacts) -> CommLibrary:
        """See `CommLibrary.bind`."""
        return self if call.computes else self.world.bind(call)

    def places(self, source: IntArray, destination: IntArray) -> IntArray:
        """See `CommLibrary.places`."""
        return self.world.places(source, destination)

    @property
    def payload_shares(self) -> tuple[Fraction, ...]:
        """See `CommLibrary.payload_shares`."""
        return self.world.payload_shares

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        """See `CommLibrary.message`."""
        library = self.inside if place == INTRA_DOMAIN else self.between
        assert library is not None, "a place has pairs"
        return library.message(place, size_bytes, peers, first=first)
