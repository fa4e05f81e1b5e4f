"""A step of a schedule, its transfers as arrays and its kernel calls; lazily generated sequences of steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, overload

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.workload.kernel_calls import Call

if TYPE_CHECKING:
    from tasp_lab.schedule.schedule import Schedule


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One step: its transfers as four int arrays (transfers,), and its kernel calls, each rank's in execution order.

    A rank's arrivals are placed into its buffer in the order of these arrays.

    >>> print(Step.of([(0, 1, 0, 5)]))
    0->1 lane 0 block 5
    """

    source: IntArray
    destination: IntArray
    lane: IntArray
    block: IntArray
    calls: tuple[Call, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.source), len(self.destination), len(self.lane), len(self.block)}
        if len(lengths) != 1:
            raise ScheduleError(f"a step's arrays have lengths {sorted(lengths)}, expected one length")
        for values in (self.source, self.destination, self.lane, self.block):
            values.flags.writeable = False

    @classmethod
    def of(cls, transfers: Iterable[tuple[int, int, int, int]]) -> Step:
        """A step from (source, destination, lane, block) rows."""
        rows = np.array(list(transfers), dtype=np.int64).reshape(-1, 4)
        return cls(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3])

    def __len__(self) -> int:
        return len(self.source)

    def rows(self) -> list[tuple[int, int, int, int]]:
        """The transfers as (source, destination, lane, block) rows."""
        columns = (self.source.tolist(), self.destination.tolist(), self.lane.tolist(), self.block.tolist())
        return list(zip(*columns, strict=True))

    def __str__(self) -> str:
        return "\n".join(f"{s}->{d} lane {lane} block {block}" for s, d, lane, block in self.rows())


class LazySteps(Sequence[Step]):
    """Steps generated on access. A subclass implements `__len__` and `step`."""

    hops_repeat: ClassVar[bool] = False
    """Whether every step has the same sources and destinations as the first one."""

    @abstractmethod
    def step(self, index: int) -> Step:
        """Step `index`, which is in range."""

    def prove(self, schedule: Schedule) -> int | None:
        """The number of transfers, if the form of the steps proves the schedule valid; else None: it is replayed."""
        return None

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | Sequence[Step]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"step {index} of {len(self)}")
        return self.step(index % len(self))
