"""Directed links, listed or of a full mesh, and array queries over many links."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, Literal, TypeVar, overload

import numpy as np

from tasp_lab.core.arrays import BoolArray, FloatArray, IntArray
from tasp_lab.core.units import Number
from tasp_lab.topology.components import strong_components

_Ranks = TypeVar("_Ranks", int, IntArray)

Vertex = int | str
"""A rank (int) or a switch (str)."""


SwitchKind = Literal["node", "network", "pcie", "cpu"]
"""The kind of a switch: inside a node (NVSwitch), the network that NICs connect to, PCIe, or a CPU socket."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch and its kind."""

    name: str
    kind: SwitchKind


@dataclass(frozen=True, slots=True)
class Link:
    """One directed physical connection: bandwidth in bytes/s one way, latency in seconds."""

    source: Vertex
    destination: Vertex
    bandwidth_bytes_per_s: Number
    latency_s: Number

    @property
    def name(self) -> str:
        """The link as it appears in messages and explanations.

        >>> Link(0, "switch", 50e9, 0.0).name
        '0->switch'
        """
        return f"{self.source}->{self.destination}"

    def labelled(self, labels: Sequence[int]) -> str:
        """The name with those of its ranks.

        >>> Link(1, "switch", 50e9, 0.0).labelled([0, 2])
        '2->switch'
        """
        return "->".join(str(labels[end] if isinstance(end, int) else end) for end in (self.source, self.destination))


@dataclass(frozen=True, eq=False)
class MeshLinks(Sequence[Link]):
    """Identical links from every rank to every other: those of rank 0 in order, then those of rank 1, ...

    Each is made when it is accessed, since a mesh of 4096 ranks has 16.8 million. It is its own table, with the
    properties of `ListedLinks`.

    >>> MeshLinks(3, 50e9, 0.0)[3].name
    '1->2'
    """

    switches: ClassVar[tuple[str, ...]] = ()
    is_uniform = is_mesh = is_symmetric = True

    world_size: int
    bandwidth_bytes_per_s: Number
    latency_s: Number

    def __len__(self) -> int:
        return self.world_size * (self.world_size - 1)

    @overload
    def __getitem__(self, index: int) -> Link: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Link, ...]: ...
    def __getitem__(self, index: int | slice) -> Link | tuple[Link, ...]:
        if isinstance(index, slice):
            return tuple(self[position] for position in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"link {index} of {len(self)}")
        source, other = divmod(index % len(self), self.world_size - 1)
        return Link(source, other + (other >= source), self.bandwidth_bytes_per_s, self.latency_s)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MeshLinks):
            return (self.world_size, *self._numbers) == (other.world_size, *other._numbers)
        return (
            isinstance(other, tuple)
            and len(other) == len(self)
            and all(a == b for a, b in zip(self, other, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]  # that of the equal tuple would take all links

    @property
    def _numbers(self) -> tuple[Number, Number]:
        return (self.bandwidth_bytes_per_s, self.latency_s) if len(self) else (0, 0)

    @property
    def samples(self) -> Sequence[Link]:
        return self[:1]

    @property
    def ends(self) -> IntArray:
        return np.argwhere(self.joined)

    @property
    def bandwidths_bytes_per_s(self) -> FloatArray:
        return np.broadcast_to(np.float64(self.bandwidth_bytes_per_s), len(self))  # 268 million links of 16,384 ranks

    @property
    def distinct_bandwidths_bytes_per_s(self) -> FloatArray:
        return np.full(min(len(self), 1), float(self.bandwidth_bytes_per_s))

    @property
    def into_ranks_bytes_per_s(self) -> tuple[Fraction, ...]:
        return ((self.world_size - 1) * Fraction(self.bandwidth_bytes_per_s),) * self.world_size

    @property
    def latencies_into_ranks_s(self) -> tuple[Number, ...]:
        return (self.latency_s if len(self) else math.inf,) * self.world_size

    @property
    def components(self) -> IntArray:
        return np.zeros(self.world_size, dtype=np.int64)

    @property
    def joined(self) -> BoolArray:
        return ~np.eye(self.world_size, dtype=bool)

    def link(self, source: int, destination: int) -> int:
        return -1 if source == destination else self._numbered(source, destination)

    def between(self, sources: IntArray, destinations: IntArray) -> IntArray:
        return np.where(sources == destinations, -1, self._numbered(sources, destinations))

    def _numbered(self, source: _Ranks, destination: _Ranks) -> _Ranks:
        return source * (self.world_size - 1) + destination - (destination > source)

    def latencies_s(self, links: IntArray) -> FloatArray:
        return np.where(links < 0, 0.0, float(self.latency_s))


@dataclass(frozen=True, eq=False)
class ListedLinks:
    """Explicitly listed links between `world_size` ranks and any switches, as arrays.

    Links are numbered as they are listed, vertices with the ranks first. Only properties of all links take memory for
    all links.

    >>> ListedLinks((Link(0, "a", 1, 0), Link("a", 1, 1, 0)), 2).ends.tolist()
    [[0, 2], [2, 1]]
    """

    links: tuple[Link, ...]
    world_size: int

    @cached_property
    def switches(self) -> tuple[str, ...]:
        """The switches in order of first occurrence in the links; as vertices they follow the ranks."""
        ends = (end for link in self.links for end in (link.source, link.destination))
        return tuple(dict.fromkeys(end for end in ends if isinstance(end, str)))

    @property
    def samples(self) -> Sequence[Link]:
        """Links such that every other link is a copy of one of them, up to its ends."""
        return self.links

    @cached_property
    def ends(self) -> IntArray:
        """Source and destination vertex of each link, an int array (links, 2)."""
        position: Mapping[Vertex, int] = {name: at for at, name in enumerate(self.switches, start=self.world_size)}
        ends = [(position.get(a, a), position.get(b, b)) for a, b in ((x.source, x.destination) for x in self.links)]
        return np.array(ends, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def bandwidths_bytes_per_s(self) -> FloatArray:
        """The bandwidth of each link, a float array (links,); exact numbers are rounded."""
        return np.array([float(link.bandwidth_bytes_per_s) for link in self.links])

    @cached_property
    def distinct_bandwidths_bytes_per_s(self) -> FloatArray:
        """The distinct bandwidths in ascending order."""
        return np.unique(self.bandwidths_bytes_per_s)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all links have exactly the same bandwidth."""
        return len({link.bandwidth_bytes_per_s for link in self.links}) <= 1

    @property
    def is_mesh(self) -> bool:
        """Whether there is a link from every rank to every other, all of one bandwidth, and no switch."""
        return self.is_uniform and not self.switches and len(self.links) == self.world_size * (self.world_size - 1)

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether every link has an identical link in the opposite direction."""
        return {replace(link, source=link.destination, destination=link.source) for link in self.links} == {*self.links}

    @cached_property
    def into_ranks_bytes_per_s(self) -> tuple[Fraction, ...]:
        """The bandwidth of all links into each rank, exact."""
        exact = {number: Fraction(number) for number in {link.bandwidth_bytes_per_s for link in self.links}}
        into = [Fraction(0)] * self.world_size
        for link in self.links:
            if isinstance(link.destination, int):
                into[link.destination] += exact[link.bandwidth_bytes_per_s]
        return tuple(into)

    @cached_property
    def latencies_into_ranks_s(self) -> tuple[Number, ...]:
        """The lowest latency of a direct link into each rank, exact; infinite without such a link."""
        least: list[Number] = [math.inf] * self.world_size
        for link in (self.links[index] for index in self._direct.tolist()):
            assert isinstance(link.destination, int)
            least[link.destination] = min(least[link.destination], link.latency_s)
        return tuple(least)

    @cached_property
    def components(self) -> IntArray:
        """The strongly connected component of each vertex."""
        return strong_components(self.ends, self.world_size + len(self.switches))

    @property
    def joined(self) -> BoolArray:
        """Bool array (world_size, world_size): whether there is a link from rank `row` to rank `column`."""
        joined = np.zeros((self.world_size, self.world_size), dtype=bool)
        joined[tuple(self.ends[self._direct].T)] = True
        return joined

    @cached_property
    def _direct(self) -> IntArray:
        """The links from rank to rank."""
        return np.flatnonzero((self.ends < self.world_size).all(axis=1))

    @cached_property
    def _at(self) -> Mapping[tuple[Vertex, Vertex], int]:
        return {(link.source, link.destination): index for index, link in enumerate(self.links)}

    def link(self, source: int, destination: int) -> int:
        """The number of the link from one rank to another; -1: none."""
        return self._at.get((source, destination), -1)

    @cached_property
    def _sorted(self) -> tuple[IntArray, IntArray]:
        """Sorted keys of direct links, and their indices; a sentinel, -1, comes last."""
        n = self.world_size
        keys = self.ends[self._direct, 0] * n + self.ends[self._direct, 1]
        order = np.argsort(keys)
        return np.append(keys[order], n * n), np.append(self._direct[order], -1)

    def between(self, sources: IntArray, destinations: IntArray) -> IntArray:
        """The number of the link from each rank to the other one, of arrays of one shape; -1: none."""
        keys, links = self._sorted
        wanted = sources * self.world_size + destinations
        at = np.searchsorted(keys, wanted)
        return np.where(keys[at] == wanted, links[at], -1)

    @cached_property
    def _latencies_s(self) -> FloatArray:
        """The latency of each link, then 0 for no link."""
        return np.array([*(float(link.latency_s) for link in self.links), 0.0])

    def latencies_s(self, links: IntArray) -> FloatArray:
        """The latency of each link of an array of any shape; 0 for -1."""
        return self._latencies_s[links]


# Shared capacity: bandwidths that several transfers share.


@dataclass(frozen=True, slots=True)
class SharedCapacity:
    """A bandwidth in bytes/s shared by all transfers over any of the named links."""

    name: str
    bandwidth_bytes_per_s: Number
    links: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A named bandwidth in bytes/s shared by the transfers under it."""

    name: str
    bandwidth_bytes_per_s: Number


class Constraints(Sequence[Constraint]):
    """Lazily created constraints; `labels` are the names of ranks in those of links, if they are not their numbers."""

    def __init__(self, links: Sequence[Link], shared: Sequence[SharedCapacity], labels: Sequence[int] = ()) -> None:
        self._links, self._shared, self._labels, self._made = links, shared, labels, dict[int, Constraint]()

    def __len__(self) -> int:
        return len(self._links) + len(self._shared)

    @overload
    def __getitem__(self, index: int) -> Constraint: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Constraint]: ...
    def __getitem__(self, index: int | slice) -> Constraint | Sequence[Constraint]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        if at not in self._made:
            part = self._links[at] if at < len(self._links) else self._shared[at - len(self._links)]
            name = part.labelled(self._labels) if self._labels and isinstance(part, Link) else part.name
            self._made[at] = Constraint(name, part.bandwidth_bytes_per_s)
        return self._made[at]
