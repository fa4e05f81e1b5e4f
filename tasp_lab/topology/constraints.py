"""Shared capacity: bandwidths that several transfers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from tasp_lab.core.units import Number
from tasp_lab.topology.links import Link


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
    """Lazily created constraints."""

    def __init__(self, links: Sequence[Link], shared: Sequence[SharedCapacity]) -> None:
        self._links, self._shared, self._made = links, shared, dict[int, Constraint]()

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
            self._made[at] = Constraint(part.name, part.bandwidth_bytes_per_s)
        return self._made[at]
