"""Masks: which keys a query attends to, as a band of differences of positions.

    CAUSAL.within(4)                       # a sliding window: the query's own key and the three before it
    MASKS["local"] = Mask("local", -8, 8)  # a new mask, accepted wherever a mask is named

Query i attends to key j of its document if ``low <= i - j <= high``; a limit of None is no limit. All else follows
from the band: the mask of a kernel call, the pairs of a layer, the keys that a rank needs. This module imports nothing
heavy, since the command line lists the names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from tasp_lab.core.errors import WorkloadError, unknown

if TYPE_CHECKING:
    from tasp_lab.core.arrays import IntArray

Window = int | tuple[int | None, int | None]
"""The most keys of a query, its own and those before; or how many keys before and after its own, None: no limit."""

Positions = TypeVar("Positions", int, "IntArray")
"""One run of positions, or many."""


@dataclass(frozen=True)
class Mask:
    """A band.

    Parameters
    ----------
    name : as in options, files and JSON.
    low, high : the limits of the position of a query minus that of a key that it attends to; None: no limit.
    balanced_layout : the layout of `tasp_lab.workload.sequence_layout.LAYOUTS` that gives all ranks equal work.
    """

    name: str
    low: int | None = None
    high: int | None = None
    balanced_layout: str = "contiguous"

    def __post_init__(self) -> None:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise WorkloadError(f"mask {self.name!r}: limits {self.low} and {self.high}, expected the lower one first")

    @property
    def is_full(self) -> bool:
        """Whether every query attends to all keys of its document."""
        return self.low is None and self.high is None

    @property
    def is_causal(self) -> bool:
        """Whether the last key of a query is that of its own position."""
        return self.low == 0

    @property
    def is_of_order(self) -> bool:
        """Whether only the order of a query and a key decides, not how far apart they are.

        Between ascending positions such a mask is the same as between their indices, whatever lies between them.
        """
        return self.high is None and self.low in (None, 0)

    @property
    def caption(self) -> str:
        """As in descriptions of layers.

        >>> FULL.caption, CAUSAL.caption
        ('full mask', 'causal')
        """
        return self.name if self.is_causal else f"{self.name} mask"

    def within(self, window: Window | None) -> Mask:
        """The mask that also limits the keys of a query to a sliding window; None: to all.

        >>> CAUSAL.within(3)
        Mask(name='causal', low=0, high=2, balanced_layout='zigzag')
        >>> FULL.within((3, 1))
        Mask(name='full', low=-1, high=3, balanced_layout='contiguous')
        """
        if window is None:
            return self
        before, after = window if isinstance(window, tuple) else (window - 1, None)
        return replace(self, low=self.low if after is None else -after, high=before)

    def band(
        self, ahead: Positions, queries: Positions, keys: Positions, stride: int = 1
    ) -> tuple[Positions, Positions]:
        """The mask between runs of positions, as limits of the index of a query minus that of a key. Not clipped.

        Parameters
        ----------
        ahead : by how much the first query is ahead of the first key.
        queries, keys : the numbers of queries and keys; they matter only where there is no limit.
        stride : the distance between neighbours of both runs.

        >>> CAUSAL.within(3).band(4, 2, 2)         # queries 4 and 5, keys 0 and 1: none is seen
        (-4, -2)
        """
        # The positions differ by ahead + stride * (i - j), so the limits are divided and rounded inwards.
        low = 1 - keys if self.low is None else -((ahead - self.low) // stride)
        high = queries - 1 if self.high is None else (self.high - ahead) // stride
        return low, high


FULL = Mask("full")
CAUSAL = Mask("causal", low=0, balanced_layout="zigzag")
RANGES = Mask("ranges")
"""That of `tasp_lab.workload.ranges`, without limits: what queries see is up to the ranges alone."""

MASKS: dict[str, Mask] = {mask.name: mask for mask in (FULL, CAUSAL, RANGES)}
"""All masks by name; a new one is entered here and nowhere else."""


def mask_named(name: str) -> Mask:
    """The mask of a name.

    >>> mask_named("causal").low
    0

    Raises `WorkloadError` for an unknown name.
    """
    mask = MASKS.get(name) if isinstance(name, str) else None
    if mask is None:
        raise WorkloadError(unknown("mask", name, MASKS))
    return mask
