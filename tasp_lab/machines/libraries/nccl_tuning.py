"""What NCCL chooses: the algorithm and the protocol of a collective, by NCCL's own estimates, version by version.

::

    tuner = Tuner("hopper", parse_version("2.29.2"), domains=1, ranks=8, link_bytes_per_s=370.8e9, in_switch=True)
    tuner.choose("all_reduce", 2**21)          # Choice('nvls', 'Simple', ...)

NCCL estimates each algorithm with each protocol as a latency plus bytes over a rate, and takes the least. The numbers
are those of its code, src/graph/tuning.cc and src/graph/search.cc of NVIDIA/nccl, tags v2.23.4-1 to v2.30.7-1, and no
fit changes them: NCCL chooses by them even where they are wrong. How long a call really takes has constants of its own
(`tasp_lab.machines.libraries.channels`). A size or version where the choice changes is a *cliff*.

Not modelled: PAT (one GPU per node), CollNet and SHARP, symmetric kernels (buffers of registered windows), tuner
plug-ins, and the counts by which the search of a PCIe tree ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, NamedTuple, TypeVar, get_args

from tasp_lab.core.errors import ProfileError
from tasp_lab.core.units import Number

Generation = Literal["volta", "ampere", "hopper", "blackwell"]
"""Of GPUs, as NCCL tells them apart: compute capability 7.0, 8.0, 9.0 and 10.0 or more."""

Algorithm = Literal["ring", "tree", "nvls", "nvls-tree"]
ProtocolName = Literal["LL", "LL128", "Simple"]
Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]
"""By the names of nccl-tests."""

Version = tuple[int, ...]
"""Like ``(2, 29, 2)``; ``(2, 29)`` is the first release of 2.29."""

DEFAULT_VERSION = "2.29.2"
"""The version where none is given: that of most of the tables that give NCCL its constants."""

OLDEST, NEWEST = (2, 23), (2, 30)
"""The versions whose code was read."""

CHANGES: Sequence[Version] = ((2, 23), (2, 28), (2, 29, 2), (2, 29, 7))
"""Versions where a number of these tables changes first."""

_T = TypeVar("_T")

_GB = 1e9
_US = 1e-6
_PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)

_BASE_US = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
_LINK_HOP_US = {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)}
_NET_HOP_US = {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)}
"""Latencies of LL, LL128 and Simple: of a call, and of a hop by NVLink and through the network."""

_NVLS_US = 25.0
_NVLS_TREE_NET_US = 20.9
_OLD_NVLS_TREE_NET_US = 14.0
"""NVLS: latency inside a domain, and of a hop of its tree through the network; the older one before 2.28."""

_LL_MAX = {"volta": (39.0,), "ampere": (87.7,), "hopper": (141.0,), "blackwell": (282.0,)}
_LL_MAX_BETWEEN = (39.0, 20.4)
"""What LL reaches at most, in GB/s: inside a domain by generation; over two domains and over more on Intel CPUs."""

_LL128_RING = {"volta": 20.0, "ampere": 20.0, "hopper": 36.7}
_LL128_RING_BLACKWELL: Sequence[tuple[Version, float]] = (((2, 23), 73.4), ((2, 29), 34.5), ((2, 29, 7), 40.0))
"""What LL128 counts on per channel of a ring, in GB/s; of Blackwell since a version. The cause of the cliff of 2.29.2:
there LL128 loses to Simple at 16 MiB of eight GPUs, and Simple takes twice as long as it estimates."""

_TREE = {"volta": (26.5, 18.5, 10.0), "ampere": (24.0, 23.6, 17.8), "hopper": (38.7, 41.4, 36.0)}
_LL128_TREE = {"volta": (20.0, 20.0, 20.0), "ampere": (20.0, 20.0, 20.0), "hopper": (36.7, 36.7, 29.0)}
_TREE_BLACKWELL: Sequence[tuple[Version, tuple[float, ...]]] = (
    ((2, 23), (77.4, 82.8, 72.0)), ((2, 28), (70.0, 42.8, 24.0)),
)  # fmt: skip
_LL128_TREE_BLACKWELL: Sequence[tuple[Version, tuple[float, ...]]] = (
    ((2, 23), (73.4, 73.4, 58.0)), ((2, 28), (55.6, 31.67, 20.0)),
)  # fmt: skip
"""What a tree counts on per channel over one, two and more domains, in GB/s."""

_NVLS_TREE = {"hopper": (0.0, 57.7, 45.5), "blackwell": (0.0, 96.0, 43.8)}
_NVLS_EFFICIENCY = {"hopper": 0.85, "blackwell": 0.74}

_CORRECTION = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9,
        0.9,
    ),
}  # fmt: skip
"""What NCCL multiplies the rate of trees by: from 64 bytes on, one number per doubling."""

_SPEEDS = {
    "volta": (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0),
    "hopper": (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
    "blackwell": (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0),
}
"""Speeds of a channel inside a domain that the search tries, in GB/s; Ampere has those of Volta."""


MAX_HEADS = 32
"""No more GPUs of a domain add up for the others (NVIDIA/nccl, src/include/device.h, NCCL_MAX_NVLS_ARITY)."""


def chunk_bytes(most: int, size_bytes: Number, channels: int, limits: Iterable[tuple[int, int]]) -> int:
    """The chunks of NVLS, at most so large: the next of `limits` while a message has fewer of them than `times` it.

    `limits` are pairs of times and bytes, `channels` those of all heads (NVIDIA/nccl, src/enqueue.cc,
    calcCollChunking).
    """
    for times, limit in limits:
        if size_bytes < times * channels * most and most > limit:
            most = limit
    return most


class Choice(NamedTuple):
    """What NCCL takes for a call, and its own estimate, in seconds."""

    algorithm: Algorithm
    protocol: ProtocolName
    estimate_s: float


def parse_version(text: str) -> Version:
    """The version of a text like ``2.28`` or ``2.29.2``.

    >>> parse_version("2.29.2")
    (2, 29, 2)

    Raises `ProfileError` for other texts and for a version whose code was not read.
    """
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3}){1,2}", text):
        raise ProfileError(f"version {text!r} of nccl: expected one like 2.28 or 2.29.2")
    version = tuple(int(number) for number in text.split("."))
    if not OLDEST <= version[:2] <= NEWEST:
        near = OLDEST if version < OLDEST else NEWEST
        raise ProfileError(
            f"version {text} of nccl is unknown: expected {version_text(OLDEST)} to {version_text(NEWEST)}, "
            f"the nearest is {version_text(near)}"
        )
    return version


def version_text(version: Version) -> str:
    """The text of a version, such as ``2.29.2``."""
    return ".".join(map(str, version))


@cache
def search(generation: Generation, link_bytes_per_s: float) -> tuple[int, float]:
    """How many channels of which rate NCCL's search finds for rings inside a domain.

    The search tries slower and slower speeds of its array, down to half of the best one so far, for whole channels that
    carry more together. Then it doubles few and fast channels.

    >>> search("hopper", 370.8e9), search("blackwell", 721.8e9), search("ampere", 240e9)
    ((12, 30000000000.0), (16, 45000000000.0), (12, 20000000000.0))
    >>> search("hopper", 1e9)
    (1, 1000000000.0)
    """
    speeds = _SPEEDS.get(generation, _SPEEDS["volta"])
    total = link_bytes_per_s / _GB
    count, speed = 0, 0.0
    for slower in speeds:
        if count and slower / speed <= 0.49:
            break
        fitting = int(total / slower + 1e-9)
        if fitting * slower > count * speed:
            count, speed = fitting, slower
    if not count:  # slower than all of its speeds: a fit may try such links
        return 1, link_bytes_per_s
    few = generation in ("volta", "ampere") or speed >= 50 or count <= 4
    if speed >= 25 and few:
        count, speed = 2 * count, speed / 2
    return count, speed * _GB


@dataclass(frozen=True)
class Tuner:
    """NCCL's choice in one communicator.

    Parameters
    ----------
    generation : of its GPUs.
    version : of NCCL.
    domains, ranks : so many domains of so many ranks each: the mean, rounded down, where they differ.
    link_bytes_per_s : payload of all NVLinks of a GPU, as NCCL counts it.
    in_switch : whether a switch joins the GPUs of a domain, which can add and multicast (NVLS, since Hopper).
    nic_bytes_per_s : what a ring reaches through a NIC, one per rank.
    net_overhead_s : what a hop inside one of several domains takes at least.
    protocols : those that NCCL may take, as the variable NCCL_PROTO says.
    more : ranks beyond these, where domains differ.
    """

    generation: Generation
    version: Version
    domains: int
    ranks: int
    link_bytes_per_s: float
    in_switch: bool = False
    nic_bytes_per_s: float = float("inf")
    net_overhead_s: float = 1e-6
    protocols: tuple[ProtocolName, ...] = get_args(ProtocolName)
    more: int = 0

    def choose(
        self, collective: Collective, size_bytes: float, algorithms: Sequence[Algorithm] = get_args(Algorithm)
    ) -> Choice:
        """What NCCL takes; `size_bytes` is the whole message, the gathered bytes of an AllGather.

        >>> b200 = [Tuner("blackwell", version, 1, 8, 721.8e9, True) for version in ((2, 28, 9), (2, 29, 2))]
        >>> [each.choose("all_gather", 2**24).protocol for each in b200]
        ['LL128', 'Simple']
        """
        return _choose(self, collective, size_bytes, tuple(algorithms))

    def estimates(self, collective: Collective, size_bytes: float) -> Iterator[Choice]:
        """NCCL's estimate of each algorithm and protocol that it may take."""
        yield from self._rings(collective, size_bytes)
        if collective == "all_reduce":
            yield from self._trees(size_bytes)
        if self.has_nvls:
            if self.domains == 1:
                yield self._nvls(collective, size_bytes)
            elif collective == "all_reduce":
                yield self._nvls_tree(size_bytes)

    @property
    def has_nvls(self) -> bool:
        """Whether the switch of a domain adds and multicasts, and NCCL uses it."""
        return self.in_switch and self.generation in _NVLS_EFFICIENCY and self.ranks > 2

    @property
    def _heads(self) -> int:
        """The GPUs of a domain that add up for the others."""
        return min(self.ranks, MAX_HEADS)

    @property
    def _place(self) -> int:
        """One, two or more domains."""
        return min(self.domains, 3) - 1

    def ring_bytes_per_s(self) -> float:
        """What NCCL counts on for all rings together, out of each rank."""
        count, rate = self._channels()
        return count * rate * _GB

    def _channels(self) -> tuple[int, float]:
        """Channels of rings and trees, and their rate in GB/s; over several domains one per NIC, few are doubled."""
        inside, rate = search(self.generation, self.link_bytes_per_s) if self.ranks > 1 else (1, float("inf"))
        if self.domains == 1:
            return inside, rate / _GB
        count = self.ranks * (2 if self.ranks < 8 and self.generation in ("hopper", "blackwell") else 1)
        return count, min(self.ranks * self.nic_bytes_per_s, inside * rate) / count / _GB

    def _of(self, older: Mapping[str, _T], blackwell: Sequence[tuple[Version, _T]]) -> _T:
        """What NCCL has for the generation: of Blackwell, since the latest version that is not newer than this one."""
        known = (value for since, value in reversed(blackwell) if since <= self.version)
        return older.get(self.generation) or next(known, blackwell[0][1])

    @property
    def _nvls_tree_hop_us(self) -> float:
        return _OLD_NVLS_TREE_NET_US if self.version < (2, 28) else _NVLS_TREE_NET_US

    def _hops_s(self, algorithm: Literal["ring", "tree"], protocol: int) -> tuple[float, float]:
        """Estimated latency of a hop inside and between domains."""
        inside, between = _LINK_HOP_US[algorithm][protocol] * _US, _NET_HOP_US[algorithm][protocol] * _US
        if self.ranks == 1:
            between = _NET_HOP_US["tree"][protocol] * _US
        if algorithm == "ring" and self.domains > 1:
            inside = max(inside, self.net_overhead_s * (3 if protocol == 2 else 1))
        return inside, between

    def _rings(self, collective: Collective, size_bytes: float) -> Iterator[Choice]:
        world = self.domains * self.ranks + self.more
        times = 2 if collective == "all_reduce" else 1
        steps, between = times * (world - 1), times * (self.domains - 1)
        count, rate = self._channels()
        ll_max = (*_LL_MAX[self.generation], *_LL_MAX_BETWEEN)[self._place]
        per_channel = self._of(_LL128_RING, _LL128_RING_BLACKWELL)
        total = count * rate
        rates = (min(ll_max, total / 2), min(0.92 * total, count * per_channel), total)
        for number, protocol in enumerate(_PROTOCOLS):
            inside_s, between_s = self._hops_s("ring", number)
            latency_s = _BASE_US["ring"][number] * _US + (steps - between) * inside_s + between * between_s
            chunk_bytes = size_bytes / (2 * count * world)
            if protocol == "Simple" and self.domains > 1 and times == 2 and chunk_bytes >= 64:
                latency_s *= 1.4 if self.generation != "volta" else 1.9  # NCCL's "plateau effect of ring"
            yield Choice("ring", protocol, latency_s + size_bytes * steps / world / (rates[number] * _GB))

    def _trees(self, size_bytes: float) -> Iterator[Choice]:
        count, rate = self._channels()
        rate *= 2 if self.domains == 2 else 1  # each NIC carries half of a tree of two nodes one way
        per_channel = self._of(_TREE, _TREE_BLACKWELL)[self._place]
        ll128 = self._of(_LL128_TREE, _LL128_TREE_BLACKWELL)[self._place]
        ll_max = (*_LL_MAX[self.generation], *_LL_MAX_BETWEEN)[self._place]
        total = min(0.92 * count * rate, count * per_channel)
        share = 7 / 9 if self.domains == 1 else 120 / 128
        rates = (min(total / 3.8, ll_max), min(total * share, count * ll128), total)
        depth = self.domains.bit_length() - 1  # log2, rounded down
        for number, protocol in enumerate(_PROTOCOLS):
            inside_s, between_s = self._hops_s("tree", number)
            latency_s = _BASE_US["tree"][number] * _US + 2 * ((self.ranks - 1) * inside_s + depth * between_s)
            factors, doublings = _CORRECTION[protocol], (int(size_bytes) >> 6).bit_length() - 1
            rate = rates[number] / 2 * (factors[doublings] if 0 <= doublings < len(factors) else 1.0)
            yield Choice("tree", protocol, latency_s + size_bytes / (rate * _GB))

    def tree_latencies_s(self, choice: Choice) -> tuple[float, float, float]:
        """What NCCL counts on for a call along trees, and for a hop inside a domain and between domains."""
        if choice.algorithm == "nvls-tree":
            return _NVLS_US * _US, 0.0, self._nvls_tree_hop_us * _US
        number = _PROTOCOLS.index(choice.protocol)
        return _BASE_US["tree"][number] * _US, *self._hops_s("tree", number)

    def nvls_tree_chunk_bytes(self, size_bytes: float) -> int:
        """What all channels of a head move at once of a call along trees of which a switch merges a part.

        NVIDIA/nccl 5067397c, src/transport/nvls.cc (ncclNvlsTuning) and src/enqueue.cc (calcCollChunking), for GPUs and
        NICs behind one PCIe switch.

        >>> [Tuner("hopper", (2, 29), nodes, 8, 360e9).nvls_tree_chunk_bytes(2**33) >> 20 for nodes in (2, 4)]
        [2, 1]
        """
        channels, chunk, nic = 16, 2**17, self.nic_bytes_per_s / _GB
        if self.domains >= 4:
            chunk = 2**16
        if self.generation == "blackwell":
            channels, few = 32, self.ranks <= 8
            if nic >= 96 and self.domains > 2:
                channels, chunk = (24, 2**18) if few else (32, 2**17 if self.ranks < 32 else 2**16)
            elif nic >= 48 and self.domains > 2:
                channels, chunk = 24, 2**16
            elif nic >= 48:
                narrow = self.ranks >= 16 or nic < 96
                chunk = 2**18 if self.ranks <= 4 else 2**16 if narrow else 2**17
        limits = (32, 2**18), (16, 2**17), (4, 2**16), (1, 2**15)
        return channels * chunk_bytes(chunk, size_bytes, channels * self._heads, limits)

    def nvls_channel_bytes_per_s(self) -> tuple[float, float]:
        """The rates of a channel of NVLS inside a domain and to the network that the search finds, one per rank."""
        speeds = _SPEEDS[self.generation]
        heads, total = self._heads, self.link_bytes_per_s / _GB
        at = next((place for place, speed in enumerate(speeds) if speed * heads <= total), len(speeds) - 1)
        inside, beyond = speeds[at], at
        while beyond > 0 and speeds[beyond] < 2 * inside:  # it is raised while it is less than twice as much
            beyond -= 1
        return inside * _GB, speeds[beyond] * _GB

    def _nvls(self, collective: Collective, size_bytes: float) -> Choice:
        heads, n = self._heads, self.ranks
        inside, beyond = self.nvls_channel_bytes_per_s()
        reduces = collective == "all_reduce"
        if self.version < (2, 28):
            rate = min(inside, beyond) * 5 / 6 if reduces else min(inside * (n - 1) / n, 0.9 * beyond)
        else:
            rate = inside * _NVLS_EFFICIENCY[self.generation] * (heads - 1) / heads
            rate = min(rate * (2 if reduces else (n - 1) / n), beyond) * (n / (2 * (n - 1)) if reduces else 1)
        return Choice("nvls", "Simple", _NVLS_US * _US + size_bytes / (heads * rate))

    def _nvls_tree(self, size_bytes: float) -> Choice:
        heads, world = self._heads, self.ranks * self.domains + self.more
        inside, _ = self.nvls_channel_bytes_per_s()
        nic = self.nic_bytes_per_s
        if self.version < (2, 28):
            rate = min(inside, nic if self.domains <= 2 else nic / 2) * 5 / 6
        else:
            inside *= _NVLS_EFFICIENCY[self.generation] * (heads - 1) / heads * 2
            cap = _NVLS_TREE[self.generation][self._place]
            if self.version >= (2, 30) and self.generation == "blackwell" and self.domains > 2:
                cap = 80.0
            rate = min(inside, nic * (2 if self.domains <= 2 else 1), cap * _GB) * world / (2 * (world - 1))
        depth = self.domains.bit_length() - 1
        latency_s = (_NVLS_US + 2 * depth * self._nvls_tree_hop_us) * _US
        return Choice("nvls-tree", "Simple", latency_s + size_bytes / (heads * rate))


@lru_cache(maxsize=4096)
def _choose(tuner: Tuner, collective: Collective, size_bytes: float, algorithms: tuple[Algorithm, ...]) -> Choice:
    """`Tuner.choose`: fits and searches ask for the same sizes again and again."""
    found = [each for each in tuner.estimates(collective, size_bytes) if each.algorithm in algorithms]
    # NVLS is by Simple alone: a forced protocol leaves it out
    allowed = [each for each in found if each.protocol in tuner.protocols]
    return min(allowed or found, key=lambda each: each.estimate_s)
