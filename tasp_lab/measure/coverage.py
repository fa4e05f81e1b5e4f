"""Intervals judged: how many measured times they hold, regime by regime.

A table is judged by residuals without its own source, and one of a cloud without all of its provider.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tasp_lab.core.tables import Part, Table
from tasp_lab.measure.accuracy.judged import TableAccuracy, is_inside


@dataclass(frozen=True)
class Coverage:
    """A regime: its rows, how many of them are inside their intervals, and the mean ratio of high to low ends."""

    regime: str
    rows: int
    inside: int
    width: float

    @property
    def share(self) -> float:
        """The share of rows inside; of intervals of 90 % about 0.9."""
        return self.inside / self.rows

    def to_dict(self) -> dict[str, object]:
        return {"regime": self.regime, "rows": self.rows, "inside": self.share, "high_over_low": self.width}


def coverage_of(tables: Iterable[TableAccuracy]) -> tuple[Coverage, ...]:
    """The coverage of the rows that count, by regime, and of all together where there are several regimes."""
    found: defaultdict[str, list[tuple[bool, float]]] = defaultdict(list)
    for row in (row for table in tables for row in table.rows if row.in_scope):
        if row.interval is not None:
            inside = bool(is_inside(row))
            found[str(row.interval.residual.asked)].append((inside, row.interval.high_s / row.interval.low_s))
    regimes = [_coverage(regime, rows) for regime, rows in sorted(found.items())]
    everything = [each for rows in found.values() for each in rows]
    return tuple([*regimes, _coverage("all", everything)] if len(regimes) > 1 else regimes)


def _coverage(regime: str, rows: list[tuple[bool, float]]) -> Coverage:
    return Coverage(regime, len(rows), sum(inside for inside, _ in rows), sum(width for _, width in rows) / len(rows))


def coverage_parts(found: Iterable[Coverage]) -> list[Part]:
    """A table of coverage; nothing without intervals."""
    rows = [(each.regime, str(each.rows), f"{each.share:.0%}", f"{each.width:.2f}") for each in found]
    title = "measured times inside intervals of 90 %"
    return [Table(title, ("regime", "rows", "inside", "high over low"), rows, (0,))] if rows else []
