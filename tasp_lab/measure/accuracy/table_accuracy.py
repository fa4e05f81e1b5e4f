"""A measured table beside its answers: rows with errors, what they sum up to, and which schedules they rank.

Collectives, layers and kernels differ in the question that answers a row; this is what they have in common::

    found = evaluate(read_table(path))
    summary(found.errors)["median_relative_error"], found.ranking
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.measure.readers import AnyTable, KernelTable, LayerTable
from tasp_lab.measure.scores import Span
from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.paired import Setting

Kind = Literal["collective", "layer", "kernel"]
Regime = Literal["gpu-bound", "host-bound", "whole-model"]
"""What the time of a layer is spent on: the GPU and its links; the host, which launches; or more than attention."""

CLOSE = (0.05, 0.15)
"""Errors up to these count as close: `within_5` and `within_15`."""

TIE = 0.03
"""Measured times closer than this are a tie: what the same code takes twice differs by as much (USP's tables)."""


class Costs(NamedTuple):
    """What decisions need of a layer beside its time: of all passes, and the mean of all packings.

    Attributes
    ----------
    exposed_share : the share of the predicted time that computing does not hide.
    bytes_per_rank : the most that a rank sends.
    steps : of the schedules.
    link_bytes_per_s : the bandwidth of the slowest link.
    setting : where schedules are compared.
    rate_variance : of the logarithm of the time, by the interval of the kernel's rate; 0 for a rate from another GPU,
        whose width comes on top of the errors of layers.
    layouts : what it is a measurement of, with its stack (`tasp_lab.prediction.paired.layouts_of`).
    """

    exposed_share: float
    bytes_per_rank: float
    steps: float
    link_bytes_per_s: float
    setting: Setting
    rate_variance: float = 0.0
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeasuredRow:
    """A measured time beside its prediction, in seconds; None where there is none.

    `reason` is why it does not count, empty if it does. `shape` are its columns, and what it was predicted as. `work`
    is what rows share that do the same, and `schedule` how a row does it: rows of one `work` may be ranked. The
    residual of its `interval` is without the source of the table, or without its provider. Only layers have a `regime`
    and `costs`. Only rows of collectives have a `size_bytes`, and `in_sample_s`: collectives are predicted without
    constants from tables of the same system, and this is the prediction with them, if there are any.
    """

    measured_s: float | None
    predicted_s: float | None
    reason: str = ""
    regime: Regime | None = None
    shape: Mapping[str, object] = field(default_factory=dict)
    work: tuple[object, ...] = ()
    schedule: str = ""
    interval: Interval | None = None
    costs: Costs | None = None
    size_bytes: int = 0
    in_sample_s: float | None = None

    @property
    def in_scope(self) -> bool:
        """Whether its error counts."""
        return not self.reason and self.relative_error is not None

    @property
    def relative_error(self) -> float | None:
        """Predicted over measured, less one; None without either."""
        return self.predicted_s / self.measured_s - 1 if self.predicted_s is not None and self.measured_s else None

    @property
    def span(self) -> Span | None:
        """The interval and the measured time; None without either."""
        if self.interval is None or self.measured_s is None:
            return None
        return Span(self.interval.low_s, self.interval.high_s, self.measured_s)

    def known(self) -> tuple[float, float, Costs]:
        """The measured and the predicted seconds, and the costs, of a row that is known to have them."""
        assert self.measured_s is not None, "rows of questions are measured"
        assert self.predicted_s is not None, "rows of questions are predicted"
        assert self.costs is not None, "rows of questions have costs"
        return self.measured_s, self.predicted_s, self.costs

    def record(self) -> dict[str, object]:
        """The row for a script."""
        ends = self.interval
        return {
            **self.shape, "measured_s": self.measured_s, "predicted_s": self.predicted_s,
            "relative_error": self.relative_error, "time_median_s": ends and ends.median_s,
            "time_low_s": ends and ends.low_s, "time_high_s": ends and ends.high_s, "in_scope": self.in_scope,
            "reason": self.reason, "regime": self.regime,
        }  # fmt: skip


def errors_of(rows: Iterable[MeasuredRow]) -> FloatArray:
    """Relative errors of the rows that count, an array (rows,)."""
    return np.array([error for row in rows if row.in_scope and (error := row.relative_error) is not None])


def summary(errors: FloatArray) -> dict[str, float | None]:
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


@dataclass(frozen=True)
class TableAccuracy:
    """One table; `reason` it is out of scope, if it is, and the `dominant_rule`: the largest part of the time."""

    table: AnyTable
    reason: str
    rows: tuple[MeasuredRow, ...]
    dominant_rule: str = ""

    @classmethod
    def of(cls, table: AnyTable, rows: Iterable[MeasuredRow]) -> TableAccuracy:
        """The table with these rows; if none counts, its reason is their most frequent one."""
        rows = tuple(rows)
        reasons = Counter(row.reason for row in rows).most_common(1)
        return cls(table, "" if any(row.in_scope for row in rows) else reasons[0][0], rows)

    @property
    def kind(self) -> Kind:
        """Collective, layer or kernel."""
        if isinstance(self.table, LayerTable):
            return "layer"
        return "kernel" if isinstance(self.table, KernelTable) else "collective"

    @property
    def file(self) -> str:
        """The name of its file, without folders."""
        return Path(self.table.name).name

    @property
    def label(self) -> str:
        """The table in a picture."""
        return f"{self.file.replace('.csv', '')}: {self.what}" + f" on {self.profile}" * bool(self.profile)

    @property
    def profile(self) -> str | None:
        """The machine that the table names."""
        return self.table.profile

    @property
    def what(self) -> str:
        """What was measured, in a word or two."""
        return str(getattr(self.table, "collective", None) or f"{self.kind}s")

    @property
    def in_scope(self) -> bool:
        """Whether its errors count."""
        return not self.reason and any(row.in_scope for row in self.rows)

    @property
    def errors(self) -> FloatArray:
        """Relative errors of the rows that count, an array (rows,)."""
        return errors_of(self.rows)

    @property
    def inside(self) -> float | None:
        """The share of rows that count whose interval holds the measured time; None without intervals."""
        spans = [span for row in self.rows if row.in_scope and (span := row.span) is not None]
        return sum(span.is_inside for span in spans) / len(spans) if spans else None

    @property
    def left_out(self) -> Mapping[str, int]:
        """The reasons why rows do not count, and how many rows each has; most frequent first."""
        return dict(Counter(row.reason for row in self.rows if row.reason).most_common())

    @cached_property
    def ranking(self) -> tuple[float | None, int]:
        """`ranking` of its rows."""
        return ranking(self.rows)

    def by_regime(self) -> dict[Regime, FloatArray]:
        """The errors of each regime of layers, of all rows with a prediction, whether they count or not."""
        errors: defaultdict[Regime, list[float]] = defaultdict(list)
        for row in self.rows:
            if row.regime is not None and (error := row.relative_error) is not None:
                errors[row.regime].append(error)
        return {name: np.array(each) for name, each in errors.items()}

    def figures(self) -> dict[str, object]:
        """The table for a script, without its rows; errors are null where there is nothing to compare."""
        table, (right, groups) = self.table, self.ranking
        return {
            "file": table.name, "kind": self.kind, "profile": self.profile,
            "collective": getattr(table, "collective", None), "ranks": getattr(table, "ranks", None),
            "source": table.headers.get("source") or None, "in_scope": self.in_scope, "reason": self.reason,
            **summary(self.errors), "dominant_rule": self.dominant_rule or None, "inside": self.inside,
            "ranking_right": right, "ranking_groups": groups if self.kind == "layer" else None,
        }  # fmt: skip

    def to_dict(self) -> dict[str, object]:
        """`figures` with the figures of regimes, and rows."""
        headers, of_collective = self.table.headers, dict[str, object]()
        if self.kind == "collective":
            own = errors_of(replace(row, predicted_s=row.in_sample_s or row.predicted_s) for row in self.rows)
            in_sample = summary(own)["mean_relative_error"]
            of_collective = {name: headers.get(name) or None for name in ("system", "library")}
            of_collective["mean_relative_error_in_sample"] = in_sample
        regimes = {name: {"rows": len(errors), **summary(errors)} for name, errors in self.by_regime().items()}
        rows = [row.record() for row in self.rows]
        return {**self.figures(), "regimes": regimes, "rows": rows, **of_collective}


def by_work(rows: Iterable[MeasuredRow]) -> list[list[MeasuredRow]]:
    """The rows that count and do the same work."""
    works: defaultdict[tuple[object, ...], list[MeasuredRow]] = defaultdict(list)
    for row in rows:
        if row.in_scope and row.work:
            works[row.work].append(row)
    return list(works.values())


def ranking(rows: Iterable[MeasuredRow]) -> tuple[float | None, int]:
    """The share of works whose schedule that is predicted to be the fastest was, or was in a tie with it.

    None without any, and how many works there are: those that are no ties of all their schedules. A schedule that was
    measured several times counts with its least time.
    """
    right = []
    for same in by_work(rows):
        measured_s, predicted_s = dict[str, float](), dict[str, float]()
        for row in same:
            time_s = row.measured_s or 0.0
            measured_s[row.schedule] = min(measured_s.get(row.schedule, time_s), time_s)
            predicted_s[row.schedule] = row.predicted_s or 0.0
        limit_s = (1 + TIE) * min(measured_s.values())
        if max(measured_s.values()) > limit_s:  # else all are in a tie, and any pick is right
            right.append(measured_s[min(predicted_s, key=lambda name: predicted_s[name])] <= limit_s)
    return (sum(right) / len(right) if right else None), len(right)
