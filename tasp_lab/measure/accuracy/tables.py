"""The tables that the command line shows: a part per kind of table, and what is not compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tasp_lab.core.tables import Part, Table
from tasp_lab.measure.accuracy.judged import Kind, TableAccuracy, summary

COLLECTIVE_COLUMNS = (
    "table", "profile", "collective", "ranks", "sizes", "mean error", "worst", "bias", "inside", "mostly",
)  # fmt: skip
WORK_COLUMNS = (
    "table",
    "profile",
    "rows",
    "of",
    "median error",
    "90 %",
    "worst",
    "bias",
    "in 5 %",
    "in 15 %",
    "inside",
    "ranking",
)


def parts_of(tables: Sequence[TableAccuracy]) -> list[Part]:
    """The report: tables in scope by kind, those that are not, rows that are not, and a line of summary per kind."""
    parts: list[Part] = []
    for kind, title in (("collective", ""), ("layer", "layers: "), ("kernel", "kernels: ")):
        if compared := [each for each in tables if each.kind == kind and each.in_scope]:
            cells = [_collective(each) if kind == "collective" else _work(each) for each in compared]
            columns, texts = (COLLECTIVE_COLUMNS, (0, 1, 2, 9)) if kind == "collective" else (WORK_COLUMNS, (0, 1, 11))
            parts.append(Table(f"{title}predicted over measured", columns, cells, texts))
    if regimes := [row for each in tables for row in _regimes(each)]:
        parts.append(Table("layers by regime", ("table", "regime", "rows", "median error", "in 15 %"), regimes, (0, 1)))
    if others := [(_name(each), each.reason) for each in tables if not each.in_scope]:
        parts.append(Table("not compared", ("table", "reason"), others, (0, 1)))
    if rows := [(_name(each), str(n), why) for each in tables if each.in_scope for why, n in each.left_out.items()]:
        parts.append(Table("rows not compared", ("table", "rows", "reason"), rows, (0, 2)))
    lines = [_line(tables, kind) for kind in ("collective", "layer", "kernel")]
    return [*parts, *[line for line in lines if line]] if any(lines) else [*parts, "no table to compare"]


def _name(each: TableAccuracy) -> str:
    return Path(each.table.name).name


def _collective(each: TableAccuracy) -> tuple[str, ...]:
    errors = each.errors
    return (
        _name(each), str(each.profile), each.what, str(getattr(each.table, "ranks", "")), str(len(errors)),
        f"{abs(errors).mean():.1%}", f"{abs(errors).max():.1%}", f"{errors.mean():+.1%}",
        "-" if each.inside is None else f"{each.inside:.0%}", each.dominant_rule,
    )  # fmt: skip


def _work(each: TableAccuracy) -> tuple[str, ...]:
    found, errors = summary(each.errors), each.errors
    ranked = "" if each.ranking_right is None else f"{each.ranking_right:.0%} of {each.ranking_groups}"
    return (
        _name(each), str(each.profile or ""), str(len(errors)), str(len(each.rows)),
        *(f"{found[name]:.1%}" for name in ("median_relative_error", "p90_relative_error", "worst_relative_error")),
        f"{found['bias']:+.1%}", f"{found['within_5']:.0%}", f"{found['within_15']:.0%}",
        "-" if each.inside is None else f"{each.inside:.0%}", ranked,
    )  # fmt: skip


def _regimes(each: TableAccuracy) -> list[tuple[str, ...]]:
    """The regimes of a table that has several."""
    found = each.by_regime()
    if len(found) < 2:
        return []
    rows: list[tuple[str, ...]] = []
    for name, errors in found.items():
        of = summary(errors)
        rows.append(
            (_name(each), name, str(len(errors)), f"{of['median_relative_error']:.1%}", f"{of['within_15']:.0%}")
        )
    return rows


def _line(tables: Sequence[TableAccuracy], kind: Kind) -> str:
    means = [float(abs(each.errors).mean()) for each in tables if each.kind == kind and each.in_scope]
    if not means:
        return ""
    what = "" if kind == "collective" else f" of {kind}s"
    return f"median of the mean errors of {len(means)} tables{what}: {median(means):.1%}"
