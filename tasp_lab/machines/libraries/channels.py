"""Cost model of NCCL and RCCL, which move messages through channels.

A *channel* is a pair of thread blocks, one per GPU, that copy a message in chunks through a small buffer. One channel
does not fill a link, so the number of channels limits the rate of a message. The model has:

- *launch*, once per step, since the messages of a step form one group; the hop latency of the *protocol*; and, by
  Simple, the time in which the receiver copies the last chunk out of the buffer;
- *protocols*: LL for short messages (4 bytes of flag per 4 bytes of payload, hence half the rate), else Simple;
- the *channel rule*: a message starts with the number of channels that all peers can have at once, which doubles while
  the part per channel exceeds a limit, up to a maximum per peer;
- across nodes, that maximum is the *minimum over all peers*: the channels that fill a NIC, halved until all groups of
  peers served by one channel fit. It also holds inside nodes;
- *payload*: protocols use part of a link's line rate, and more of it if a rank sends to several peers at one step.

A *fused* schedule is one collective of the library: the protocol's base latency once, a hop latency per step, and the
rate of all channels together. The protocol (LL, LL128 or Simple) is the fastest by the library's own estimate, which is
that of `tasp_lab.machines.libraries.nccl_tuning` for NCCL. Inside one domain, where it was measured (`InsideCalls`):

- *LL* runs on a channel more for every 4 KiB per rank, so that small calls use few and take as long as one such piece;
- *Simple* forwards the first half of a message while the second is under way, which hides that much of a hop's latency;
- a rank also copies what is its own: its shard to the output, the last chunk out of the buffer;
- *NVLS* lets the switch add and multicast. The schedule sends each shard to its owner and the sum from there to all;
  the switch merges these messages, so a link carries (n + 1) / n of the message instead of 2 (n - 1) / n, and a channel
  pays a latency per chunk, whose size follows that of the message.

The numbers are constants of a profile, each with its source (`tasp_lab.machines.constants`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, get_args

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError, TopologyError
from tasp_lab.core.units import Number
from tasp_lab.machines.libraries.library import CallFacts, CommLibrary, Message
from tasp_lab.machines.libraries.nccl_tuning import MAX_HEADS, Algorithm, Choice, Collective, Tuner, chunk_bytes
from tasp_lab.machines.libraries.nccl_tuning import ProtocolName as ProtocolName

INTRA_DOMAIN, INTER_DOMAIN = 0, 1
"""Places of messages: inside a domain of GPUs with peer access to each other's memory, and between domains."""


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

    >>> channel_rule(8, 32, 32), channel_rule(80, 16, 1)
    (ChannelRule(least=4, most=32), ChannelRule(least=1, most=1))
    """
    most = min(channels, max_per_peer)
    return ChannelRule(halved(most, ranks, channels), most)


def halved(most: int, groups: int, channels: int) -> int:
    """`most` channels of each group, halved until those of all groups fit into `channels`; at least 1.

    >>> halved(4, 2, 16), halved(4, 10, 16)
    (4, 1)
    """
    while most > 1 and most * groups > channels:
        most //= 2
    return most


def power_of_two(value: int) -> int:
    """The least power of two that is not less.

    >>> [power_of_two(value) for value in (1, 4, 24, 36)]
    [1, 4, 32, 64]
    """
    return 1 << max(value - 1, 0).bit_length()


class Ring(NamedTuple):
    """A fused call; or several at once, with an array of a number of each call in place of the number.

    Attributes
    ----------
    name : its algorithm and protocol.
    base_s : latency of the call.
    hop_s : latency of a hop inside a domain and between domains, in addition to the wire's.
    bytes_per_s : the rate of one of its lanes inside a domain and between domains.
    overhead : bytes on a link per byte that it carries, inside a domain and between domains.
    byte_share : bytes that it carries per byte of the schedule's messages: less than 1 where the switch merges
        messages, more with the flags of LL and LL128.
    hidden : which part of a message's time hides the latency of its hop inside a domain.
    """

    name: str
    base_s: Any
    hop_s: tuple[Any, Any]
    bytes_per_s: tuple[Any, Any]
    overhead: tuple[Any, Any]
    byte_share: tuple[Any, Any] = (1, 1)
    hidden: Any = 0

    def message(self, place: int, size_bytes: Any, *, first: bool) -> Message:
        """A message of the call; no kernel calls run beside it, so nobody counts its channels."""
        rate, overhead, hop_s = self.bytes_per_s[place], self.overhead[place], self.hop_s[place]
        if place == INTRA_DOMAIN:
            left_s = hop_s - self.hidden * size_bytes / rate
            hop_s = (left_s + abs(left_s)) / 2  # max(left_s, 0), of numbers and arrays alike
        wire_bytes = size_bytes * overhead * self.byte_share[place]
        return Message(self.base_s if first else 0, hop_s, wire_bytes, rate * overhead, self.name)


LL_PIECE_BYTES = 4096
"""NCCL adds a channel to a call by LL for so many bytes per rank: 512 threads of 8 bytes, src/enqueue.cc and
src/include/comm.h, NCCL_LL_THREAD_THRESHOLD."""


_HIDDEN = Fraction(1, 2)
"""What part of a message by Simple hides the latency of its hop: a chunk has two slices, and the second follows while
the next rank forwards the first (NVIDIA/nccl, src/include/device.h, chunk and slice steps)."""

MAX_COPY_BYTES = 2**28
"""Copies inside a GPU take no longer for more bytes: calls of up to 256 MiB per rank show them, calls of 2 GiB per rank
hardly (all_gather of 16 GiB on 8 H100 and 8 GB200). That is not explained."""


@dataclass(frozen=True)
class InsideCalls:
    """Measured numbers of ring calls inside one domain.

    Parameters
    ----------
    channels : channels of a collective.
    ll_channel_bytes_per_s : what a channel moves by LL.
    copy_bytes_per_s : what all channels copy inside a GPU.
    """

    channels: int
    ll_channel_bytes_per_s: Number
    copy_bytes_per_s: Number

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise TopologyError(f"calls inside a domain: {name} is {value}, expected more than 0")


@dataclass(frozen=True)
class Nvls:
    """Measured numbers of calls that the switch adds up and multicasts.

    Parameters
    ----------
    base_s : latency of a call.
    chunk_s : latency of a chunk of a channel.
    channels : thread blocks.
    """

    base_s: Number
    chunk_s: Number
    channels: int

    def chunk_bytes(self, size_bytes: Number, ranks: int) -> int:
        """The size of chunks, which is smaller for short messages.

        >>> [Nvls(0, 0, 16).chunk_bytes(size, 8) >> 10 for size in (2**22, 2**24, 2**27, 2**31)]
        [16, 32, 64, 128]
        """
        limits = (64, 65536), (8, 32768), (2, 16384)
        return chunk_bytes(131072, size_bytes, self.channels * min(ranks, MAX_HEADS), limits)


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
    short_bytes : largest LL message, per channel.
    short_by_most : whether that is per channel of `rule.most`, or per channel of the message.
    own_copy_bytes_per_s : how fast an all-to-all copies a rank's own part; None where that is not known.
    tuner : what chooses algorithm and protocol; None for the fastest by the numbers here.
    inside : numbers of ring calls inside one domain; None where they are not known or there are several.
    nvls : numbers of calls in the switch; None where it cannot add.
    ring : of a library that is bound to a fused call: that call.
    own_s : of a library that is bound to an all-to-all: the time of the copy of a rank's own part.
    wire_s : latencies of the wires inside a domain and between domains, which the latencies of hops include.
    sizes : the number of ranks of each domain, where they differ; empty where all have `domain_ranks`.
    """

    serial_launch: ClassVar[bool] = False
    is_of_links: ClassVar[bool] = False

    domain_ranks: int
    media: tuple[Medium, ...]
    protocols: Mapping[ProtocolName, Protocol]
    rule: ChannelRule
    ring_bytes_per_s: Number
    short_bytes: int
    short_by_most: bool = True
    own_copy_bytes_per_s: Number | None = None
    tuner: Tuner | None = None
    inside: InsideCalls | None = None
    nvls: Nvls | None = None
    ring: Ring | None = None
    own_s: Number = 0
    wire_s: tuple[float, ...] = (0.0,)
    sizes: tuple[int, ...] = ()

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
        if call.fused and call.steps:
            return replace(self, ring=self.ring_of(call))
        if call.own_bytes and self.own_copy_bytes_per_s is not None:
            return replace(self, own_s=min(call.own_bytes, MAX_COPY_BYTES) / self.own_copy_bytes_per_s)
        return self

    def algorithm(self, collective: Collective, size_bytes: float) -> Choice | None:
        """What the library takes for a collective of a whole message of `size_bytes`; None where that is not known."""
        if self.tuner is None:
            return None
        known: list[Algorithm] = ["ring", "tree", "nvls-tree"] if self.tuner.domains > 1 else ["ring"]
        if self.nvls is not None:
            known.append("nvls")
        return self.tuner.choose(collective, size_bytes, known)

    def ring_of(self, call: CallFacts) -> Ring:
        """The numbers of a fused call."""
        inner, outer = self.media[0], self.media[-1]
        overhead = (
            inner.line_bytes_per_s / inner.payload_bytes_per_s,
            outer.line_bytes_per_s / outer.payload_bytes_per_s,
        )
        if call.algorithm == "nvls":
            return self._in_switch(call, overhead)
        if call.algorithm in ("tree", "nvls-tree"):
            return self._tree(call, overhead)
        protocol, shard_bytes = self._protocol(call), call.total_bytes / call.world_size
        rate, base_s, inside = self.ring_bytes_per_s, protocol.base_s, self.inside
        hidden = _HIDDEN if protocol.name == "Simple" and inside is not None else Fraction(0)
        if inside is None or len(self.media) > 1:
            rate = protocol.ring_bytes_per_s(rate)
        elif protocol.name == "LL":
            least_bytes = min(call.total_bytes, LL_PIECE_BYTES * call.world_size)
            channel_bytes = max(least_bytes, call.total_bytes / inside.channels)
            piece_s = channel_bytes / call.world_size / inside.ll_channel_bytes_per_s
            rate, base_s = shard_bytes / piece_s, base_s + piece_s
        elif protocol.name == "LL128":
            rate = rate * protocol.ring_share
            base_s = base_s + shard_bytes / rate
        else:
            # an AllReduce copies its last chunk; the others also their own shard, as their output is another buffer
            copies = 1 if call.collective == "all_reduce" else 2
            base_s = base_s + copies * min(shard_bytes, MAX_COPY_BYTES) / inside.copy_bytes_per_s
        rates = (rate / call.lanes,) * 2
        return Ring(f"ring, {protocol.name}", base_s, protocol.ring_hop_s, rates, overhead, hidden=hidden)

    def _in_switch(self, call: CallFacts, overhead: tuple[Number, Number]) -> Ring:
        """The numbers of an AllReduce in two steps, to the owner of a shard and from there, that the switch merges."""
        if self.nvls is None or len(self.media) > 1:
            raise ScheduleError(f"library {self.name!r} does not add up in one switch on this machine")
        n = call.world_size
        chunks = call.total_bytes / (self.nvls.channels * self.nvls.chunk_bytes(call.total_bytes, n))
        chunks_s = chunks * self.nvls.chunk_s / call.steps
        rates = (self.media[INTRA_DOMAIN].payload_bytes_per_s,) * 2
        return Ring(
            "nvls, Simple", self.nvls.base_s, (chunks_s, 0), rates, overhead, (Fraction(n + 1, 2 * (n - 1)),) * 2
        )

    def _tree(self, call: CallFacts, overhead: tuple[Number, Number]) -> Ring:
        """The numbers of an AllReduce along trees over several domains, with the latencies that NCCL counts on."""
        if self.tuner is None:
            raise ScheduleError(f"library {self.name!r}: its trees are not modelled on this machine")
        if call.algorithm == "nvls-tree" and (not self.tuner.has_nvls or self.tuner.domains == 1):
            raise ScheduleError(f"library {self.name!r} does not add up in several switches on this machine")
        choice = self.tuner.choose("all_reduce", call.total_bytes, (call.algorithm,))
        base_s, inside_s, between_s = self.tuner.tree_latencies_s(choice)
        protocol, rate = self.protocols[choice.protocol], self.media[INTRA_DOMAIN].payload_bytes_per_s
        flags = 1 / Fraction(protocol.ring_share).limit_denominator(1000)
        merged, of_lane = flags, rate
        if choice.algorithm == "nvls-tree":
            merged = self._merged_share(call.total_bytes)
            # some warps of a thread block send up, others down, and none helps others that wait; both trees have a lane
            # to each other rank
            of_lane = rate / 2 / (2 * (self.domain_ranks - 1))
        hops_s = (max(inside_s - self.wire_s[0], 0.0), max(between_s - self.wire_s[-1], 0.0))
        return Ring(f"{choice[0]}, {choice[1]}", base_s, hops_s, (of_lane, rate), overhead, (merged, flags))

    def _merged_share(self, size_bytes: Number) -> Fraction:
        """Bytes on a link inside a domain per byte of messages that its switch merges, in the calls along trees.

        A channel pays a latency for each chunk, in which its links move nothing: it counts as bytes. The rate inside a
        domain is then that of a call in the switch of one domain with such chunks.
        """
        assert self.tuner is not None, "it chose the algorithm"
        n, idle = self.domain_ranks, Fraction(0)
        if self.nvls is not None:
            chunks = size_bytes / self.tuner.nvls_tree_chunk_bytes(float(size_bytes))
            links_s = size_bytes * (n + 1) / n / self.media[INTRA_DOMAIN].payload_bytes_per_s
            idle = Fraction(chunks * self.nvls.chunk_s / links_s).limit_denominator(1000)
        return Fraction(n + 1, 2 * (n - 1)) * (1 + idle)

    def _protocol(self, call: CallFacts) -> Protocol:
        """The protocol of a ring: the fastest one by the library's own estimate.

        Without a tuner that is base latency, consecutive hops, and bytes over the ring rate.
        """
        if self.tuner is not None and call.collective:
            return self.protocols[self.tuner.choose(call.collective, call.total_bytes, ("ring",)).protocol]
        ranks, hops = call.world_size, call.steps
        domains = len(self.sizes) or -(-ranks // self.domain_ranks)
        between = hops * (domains - 1) // max(ranks - 1, 1)
        sent_bytes = call.total_bytes * hops / ranks

        def estimate_s(protocol: Protocol) -> Number:
            hops_s = (hops - between) * protocol.ring_hop_s[INTRA_DOMAIN] + between * protocol.ring_hop_s[-1]
            return protocol.base_s + hops_s + sent_bytes / protocol.ring_bytes_per_s(self.ring_bytes_per_s)

        return min(self.protocols.values(), key=estimate_s)

    def places(self, source: IntArray, destination: IntArray) -> IntArray:
        if self.sizes:
            domain = np.repeat(np.arange(len(self.sizes)), self.sizes)
            away: IntArray = (domain[source] != domain[destination]).astype(int)
        else:
            away = (source // self.domain_ranks != destination // self.domain_ranks).astype(int)
        return away

    @property
    def payload_shares(self) -> tuple[Fraction, ...]:
        return tuple(Fraction(m.many_payload_bytes_per_s) / Fraction(m.line_bytes_per_s) for m in self.media)

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        if self.ring is not None:
            return self.ring.message(place, size_bytes, first=first)
        medium = self.media[place]
        channels = self.rule.channels(size_bytes, medium.min_bytes_per_channel, medium.bytes_per_channel)
        short_bytes = self.short_bytes * (self.rule.most if self.short_by_most else channels)
        protocol = self.protocols["LL" if size_bytes <= short_bytes else "Simple"]
        payload = medium.payload_bytes_per_s if peers == 1 else medium.many_payload_bytes_per_s
        overhead = medium.line_bytes_per_s / payload / protocol.payload_share
        # LL has no chunks: a line of 8 bytes is used as soon as its flag is there
        last_chunk_bytes = 0 if protocol.name == "LL" else min(medium.chunk_bytes, size_bytes / channels)
        channel_bytes_per_s = medium.channel_bytes_per_s * protocol.payload_share
        return Message(
            launch_s=medium.launch_s,
            latency_s=protocol.hop_s[place] + last_chunk_bytes / channel_bytes_per_s + self.own_s,
            wire_bytes=size_bytes * overhead,
            max_bytes_per_s=channels * channel_bytes_per_s * overhead,
            rule=f"{channels} channel{'s' * (channels > 1)}, {protocol.name}",
            channels=channels,
        )
