"""Directed links, one by one or all those of a full mesh at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

from tasp_lab.arrays import IntArray
from tasp_lab.quantities import Number

_Ranks = TypeVar("_Ranks", int, IntArray)

Vertex = int | str
"""A rank (int) or a switch (str)."""


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


@dataclass(frozen=True, eq=False)
class MeshLinks(Sequence[Link]):
    """The links from every rank to every other, all alike: those out of rank 0 in order, then those out of rank 1, ...

    They are made when asked for, since a mesh of 4096 ranks has 16.8 million.

    >>> MeshLinks(3, 50e9, 0.0)[3].name
    '1->2'
    """

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

    def between(self, source: _Ranks, destination: _Ranks) -> _Ranks:
        """The index of the link from a rank to another one, or of those from each rank to another one.

        >>> MeshLinks(3, 50e9, 0.0).between(1, 2)
        3
        """
        return source * (self.world_size - 1) + destination - (destination > source)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MeshLinks):
            return (self.world_size, *self._numbers) == (other.world_size, *other._numbers)
        return isinstance(other, tuple) and len(other) == len(self) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    @property
    def _numbers(self) -> tuple[Number, Number]:
        return (self.bandwidth_bytes_per_s, self.latency_s) if len(self) else (0, 0)
