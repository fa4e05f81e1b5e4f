"""What every kind of table has in common once it is judged: rows with errors, and their summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from tasp_lab.measure.readers import AnyTable, KernelTable, LayerTable, MeasuredTable
from tasp_lab.prediction.interval import Interval

Kind = Literal["collective", "layer", "kernel"]
Regime = Literal["gpu-bound", "host-bound", "whole-model"]
"""What the time of a layer is spent on: the GPU and its links; the host, which launches; or more than attention."""

Errors = np.ndarray[tuple[int], np.dtype[np.float64]]

CLOSE = (0.05, 0.15)
"""Errors up to these count as close: `within_5` and `within_15`."""


class JudgedRow(Protocol):
    """A measured row and its prediction; `reason` is why it does not count, empty if it does."""

    @property
    def measured_s(self) -> float | None: ...
    @property
    def predicted_s(self) -> float | None: ...
    @property
    def relative_error(self) -> float | None: ...
    @property
    def in_scope(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def regime(self) -> Regime | None: ...
    @property
    def shape(self) -> Mapping[str, object]: ...
    @property
    def interval(self) -> Interval | None: ...


@dataclass(frozen=True)
class RowAccuracy:
    """The measured and the predicted time of one size of a collective, in seconds, and whether the row counts.

    The residual of its `interval` is without the source of the table, or without its provider.
    """

    size_bytes: int
    measured_s: float
    predicted_s: float
    in_scope: bool
    interval: Interval | None = None

    @property
    def relative_error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def reason(self) -> str:
        """Why the row does not count."""
        return "" if self.in_scope else "smaller than the sizes that count"

    @property
    def regime(self) -> Regime | None:
        """None: regimes are those of layers."""
        return None

    @property
    def shape(self) -> Mapping[str, object]:
        """The size, by column."""
        return {"size_bytes": self.size_bytes}


@dataclass(frozen=True)
class WorkRow:
    """The measured and the predicted time of a layer or kernel, in seconds; None where there is none.

    `shape` are its columns, and what it was predicted as. `work` is what rows share that do the same, and `schedule`
    how a row does it: rows of one `work` may be ranked. The residual of `interval` is without the source of the table.
    """

    measured_s: float | None
    predicted_s: float | None
    reason: str
    regime: Regime | None
    shape: Mapping[str, object]
    work: tuple[object, ...] = ()
    schedule: str = ""
    interval: Interval | None = None

    @property
    def in_scope(self) -> bool:
        """Whether its error counts."""
        return not self.reason and self.relative_error is not None

    @property
    def relative_error(self) -> float | None:
        """Predicted over measured, less one; None without either."""
        return self.predicted_s / self.measured_s - 1 if self.predicted_s is not None and self.measured_s else None


def errors_of(rows: Sequence[JudgedRow]) -> Errors:
    """Relative errors of the rows that count, an array (rows,)."""
    return np.array([error for row in rows if row.in_scope and (error := row.relative_error) is not None])


def is_inside(row: JudgedRow) -> bool | None:
    """Whether the measured time of a row is inside its interval; None without either."""
    if row.interval is None or row.measured_s is None:
        return None
    return row.interval.low_s <= row.measured_s <= row.interval.high_s


def kind_of_table(table: AnyTable) -> Kind:
    """The kind of a table."""
    if isinstance(table, LayerTable):
        return "layer"
    return "kernel" if isinstance(table, KernelTable) else "collective"


@dataclass(frozen=True)
class TableAccuracy:
    """One table; `reason` it is out of scope, if it is, and the `dominant_rule`: the largest part of the time.

    Of a table of layers, `ranking_right` is the share of its `ranking_groups`, measured groups of the same work, whose
    fastest schedule is predicted to be the fastest; see `tasp_lab.measure.accuracy.ranking`.
    """

    table: AnyTable
    reason: str
    rows: tuple[JudgedRow, ...]
    dominant_rule: str = ""
    ranking_right: float | None = None
    ranking_groups: int = 0

    @property
    def kind(self) -> Kind:
        """Collective, layer or kernel."""
        return kind_of_table(self.table)

    @property
    def label(self) -> str:
        """The table in a picture."""
        return f"{Path(self.table.name).stem}: {self.what}" + f" on {self.profile}" * bool(self.profile)

    @property
    def profile(self) -> str | None:
        """The machine that the table names."""
        return self.table.headers.get("profile") or None

    @property
    def what(self) -> str:
        """What was measured, in a word or two."""
        return str(getattr(self.table, "collective", None) or f"{self.kind}s")

    @property
    def in_scope(self) -> bool:
        """Whether its errors count."""
        return not self.reason and len(self.errors) > 0

    @property
    def errors(self) -> Errors:
        """Relative errors of the rows that count, an array (rows,)."""
        return errors_of(self.rows)

    @property
    def inside(self) -> float | None:
        """The share of rows that count whose interval holds the measured time; None without intervals."""
        found = [each for row in self.rows if row.in_scope and (each := is_inside(row)) is not None]
        return sum(found) / len(found) if found else None

    @property
    def left_out(self) -> Mapping[str, int]:
        """The reasons why rows do not count, and how many rows each has; most frequent first."""
        return dict(Counter(row.reason for row in self.rows if row.reason).most_common())

    def to_dict(self) -> dict[str, object]:
        """The table for a script; errors are null where there is nothing to compare."""
        table = self.table
        return {
            "file": table.name,
            "kind": self.kind,
            "profile": self.profile,
            "collective": getattr(table, "collective", None),
            "ranks": getattr(table, "ranks", None),
            "source": table.headers.get("source") or None,
            "in_scope": self.in_scope,
            "reason": self.reason,
            **summary(self.errors),
            "dominant_rule": self.dominant_rule or None,
            "inside": self.inside,
            "ranking_right": self.ranking_right,
            "ranking_groups": self.ranking_groups if self.kind == "layer" else None,
            "regimes": {name: {"rows": len(found), **summary(found)} for name, found in self.by_regime().items()},
            "rows": [row_dict(row) for row in self.rows],
        }

    def by_regime(self) -> dict[Regime, Errors]:
        """The errors of each regime of layers, of all rows with a prediction, whether they count or not."""
        found: dict[Regime, list[float]] = {}
        for row in self.rows:
            if row.regime is not None and (error := row.relative_error) is not None:
                found.setdefault(row.regime, []).append(error)
        return {name: np.array(errors) for name, errors in found.items()}


@dataclass(frozen=True)
class CollectiveAccuracy(TableAccuracy):
    """A table of a collective."""

    table: MeasuredTable
    rows: tuple[RowAccuracy, ...]


def row_dict(row: JudgedRow) -> dict[str, object]:
    """A row for a script."""
    return {
        **row.shape,
        "measured_s": row.measured_s,
        "predicted_s": row.predicted_s,
        "relative_error": row.relative_error,
        "time_low_s": None if row.interval is None else row.interval.low_s,
        "time_high_s": None if row.interval is None else row.interval.high_s,
        "in_scope": row.in_scope,
        "reason": row.reason,
        "regime": row.regime,
    }


def summary(errors: Errors) -> dict[str, float | None]:
    """Mean, median, 90th percentile and worst of absolute errors, their mean with signs, and the shares within `CLOSE`.

    >>> summary(np.array([0.01, -0.07]))["within_5"]
    0.5
    """
    if not len(errors):
        return dict.fromkeys(_SUMMARY)
    size = abs(errors)
    values = (size.mean(), np.median(size), np.quantile(size, 0.9), size.max(), errors.mean(),
              *((size <= limit).mean() for limit in CLOSE))  # fmt: skip
    return dict(zip(_SUMMARY, map(float, values), strict=True))


_SUMMARY = (
    "mean_relative_error", "median_relative_error", "p90_relative_error", "worst_relative_error", "bias",
    "within_5", "within_15",
)  # fmt: skip
