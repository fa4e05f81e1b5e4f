"""NCCL and RCCL: libraries that move messages through channels.

A *channel* is a thread block on each of two GPUs that copies a message in chunks, through a buffer of a few of them.
One channel does not fill a link, so how many channels a message gets decides how fast it is. What is modelled:

- a message costs its *launch* (a step's messages are one group and launched together), the hop latency of its
  *protocol*, and the time in which the receiver copies the last chunk out of the buffer;
- *protocols*: LL for short messages (every 4 bytes travel with 4 bytes of flag: half the rate), else Simple;
- the *channel rule*: a message gets few channels at first, as many as let all peers have theirs at once, and twice as
  many again and again while a channel's part is larger than a limit, up to the most per peer;
- across nodes the most per peer is the *minimum over all peers*, which the network decides: as many channels as fill a
  NIC, halved while the groups of peers that a channel serves at once do not fit; it holds inside nodes as well;
- *payload*: of a link's line rate protocols leave a part; a step in which a rank sends to several peers leaves less.

A *fused* schedule is one call of the library, its own ring collectives: the protocol's base latency once, the ring rate
that the library's search gives its channels together, a hop latency per step, and of LL, LL128 and Simple the one that
takes the least time by the library's own estimate.

The numbers are constants of a profile, each with its source (`tasp_lab.profiles`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from tasp_lab.arrays import IntArray
from tasp_lab.quantities import Number
from tasp_lab.transport import Message, Transport

if TYPE_CHECKING:
    from tasp_lab.schedule import Schedule

INSIDE, BETWEEN = 0, 1
"""Places of messages: inside a domain of GPUs that see each other's memory, and between two of them."""

ProtocolName = Literal["LL", "LL128", "Simple"]


@dataclass(frozen=True)
class Protocol:
    """A protocol.

    Parameters
    ----------
    base_s : latency of a call.
    hop_s : of a hop inside a domain and between domains, beside that of the wire.
    ring_hop_s : the same in a ring collective.
    payload_share : what part of its bytes is payload.
    ring_share : what part of a ring collective's rate it reaches.
    most_bytes_per_s : what it reaches of that at most; None for no limit.
    """

    name: ProtocolName
    base_s: Number
    hop_s: tuple[Number, Number]
    ring_hop_s: tuple[Number, Number]
    payload_share: Number = 1
    ring_share: Number = 1
    most_bytes_per_s: Number | None = None

    def ring_bytes_per_s(self, ring_bytes_per_s: Number) -> Number:
        """What a ring reaches with this protocol."""
        reached = ring_bytes_per_s * self.ring_share
        return reached if self.most_bytes_per_s is None else min(reached, self.most_bytes_per_s)


@dataclass(frozen=True)
class Medium:
    """What carries messages at one place: a GPU's links inside a domain, or its NIC.

    Parameters
    ----------
    launch_s : of a group of messages.
    line_bytes_per_s : the rate of the topology's links there.
    payload_bytes_per_s : what is left of it for one peer.
    many_payload_bytes_per_s : what is left of it when a rank sends to several peers at one step.
    channel_bytes_per_s : what one channel reaches.
    chunk_bytes : a channel's chunks.
    part_bytes : channels double while a channel's part of a message is larger.
    least_part_bytes : a channel's part is no smaller; short messages get fewer channels.
    """

    launch_s: Number
    line_bytes_per_s: Number
    payload_bytes_per_s: Number
    many_payload_bytes_per_s: Number
    channel_bytes_per_s: Number
    chunk_bytes: int
    part_bytes: int
    least_part_bytes: int


@dataclass(frozen=True)
class ChannelRule:
    """How many channels a message gets: from `least` on, twice as many while parts are too large, up to `most`.

    A message that is too short for `least` parts gets fewer.
    """

    least: int
    most: int

    def channels(self, size_bytes: int, least_part_bytes: int, part_bytes: int) -> int:
        """The channels of a message.

        >>> [ChannelRule(4, 32).channels(size, 2**16, 2**24) for size in (2**16, 2**20, 2**27, 2**34)]
        [1, 4, 8, 32]
        """
        channels = min(self.least, max(1, -(-size_bytes // least_part_bytes)))
        while 2 * channels <= self.most and size_bytes > channels * part_bytes:
            channels *= 2
        return channels


def channel_rule(ranks: int, channels: int, most_per_peer: int) -> ChannelRule:
    """The rule where `channels` serve a group of `ranks` peers and one peer may have `most_per_peer`.

    The fewest for a peer are halved from the most until all peers together fit.

    >>> channel_rule(8, 32, 32), channel_rule(80, 16, 1)
    (ChannelRule(least=4, most=32), ChannelRule(least=1, most=1))
    """
    most = least = min(channels, most_per_peer)
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


@dataclass(frozen=True)
class ChannelLibrary(Transport):
    """A transport with channels.

    Parameters
    ----------
    domain_ranks : how many ranks, one after the other, share a domain.
    media : of the places `INSIDE` and, where there are several domains, `BETWEEN`.
    protocols : by name.
    rule : how many channels a message gets.
    ring_bytes_per_s : payload of all rings of a collective together, out of each rank.
    short_bytes : messages up to so many bytes per channel of `rule.most` go by LL.
    ring : of a fused schedule, once it is known: its protocol, and how many lanes share the ring rate.
    """

    serial_launch: ClassVar[bool] = False

    domain_ranks: int = 1
    media: tuple[Medium, ...] = ()
    protocols: Mapping[str, Protocol] = ()  # type: ignore[assignment]
    rule: ChannelRule = ChannelRule(1, 1)
    ring_bytes_per_s: Number = 0
    short_bytes: int = 0
    ring: tuple[Protocol, int] | None = None

    def bind(self, schedule: Schedule) -> Self:
        """The transport for one schedule: for a fused one, with the protocol that the library would choose."""
        if not schedule.fused or not len(schedule.steps):
            return self
        return replace(self, ring=(self.protocol_for(schedule), schedule.lanes))

    def protocol_for(self, schedule: Schedule) -> Protocol:
        """The protocol by which a ring takes least: base, hops one after the other, and bytes over the ring's rate."""
        ranks, hops = schedule.world_size, len(schedule.steps)
        domains = -(-ranks // self.domain_ranks)
        between = hops * (domains - 1) // max(ranks - 1, 1)
        sent_bytes = int(schedule.block_bytes.sum()) * hops / ranks

        def time_s(protocol: Protocol) -> Number:
            hops_s = (hops - between) * protocol.ring_hop_s[INSIDE] + between * protocol.ring_hop_s[-1]
            return protocol.base_s + hops_s + sent_bytes / protocol.ring_bytes_per_s(self.ring_bytes_per_s)

        return min(self.protocols.values(), key=time_s)

    def places(self, source: IntArray, destination: IntArray) -> IntArray:
        """`INSIDE` or `BETWEEN` for each pair."""
        away: IntArray = (source // self.domain_ranks != destination // self.domain_ranks).astype(int)
        return away

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        """See `Transport.message`."""
        if self.ring is not None:
            return self._ring_message(place, size_bytes, first, *self.ring)
        medium = self.media[place]
        protocol = self.protocols["LL" if size_bytes <= self.short_bytes * self.rule.most else "Simple"]
        channels = self.rule.channels(size_bytes, medium.least_part_bytes, medium.part_bytes)
        payload = medium.payload_bytes_per_s if peers == 1 else medium.many_payload_bytes_per_s
        overhead = medium.line_bytes_per_s / payload / protocol.payload_share
        last_chunk_bytes = min(medium.chunk_bytes, size_bytes / channels)
        channel_bytes_per_s = medium.channel_bytes_per_s * protocol.payload_share
        return Message(
            launch_s=medium.launch_s,
            latency_s=protocol.hop_s[place] + last_chunk_bytes / channel_bytes_per_s,
            wire_bytes=size_bytes * overhead,
            most_bytes_per_s=channels * channel_bytes_per_s * overhead,
            rule=f"{channels} channel{'s' * (channels > 1)}, {protocol.name}",
        )

    def _ring_message(self, place: int, size_bytes: int, first: bool, protocol: Protocol, lanes: int) -> Message:
        medium = self.media[place]
        overhead = medium.line_bytes_per_s / medium.payload_bytes_per_s
        return Message(
            launch_s=protocol.base_s if first else 0,
            latency_s=protocol.ring_hop_s[place],
            wire_bytes=size_bytes * overhead,
            most_bytes_per_s=protocol.ring_bytes_per_s(self.ring_bytes_per_s) / lanes * overhead,
            rule=f"ring, {protocol.name}",
        )
