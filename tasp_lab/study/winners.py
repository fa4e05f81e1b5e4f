"""Which schedule answers a question fastest, by how much, and whether that is too close to call.

Two rows belong to one question if they differ in their schedule alone. Machines differ from predictions by more than
schedules on one machine do, so an order depends on `order_spread` alone (decision 26). Without it, two rows are too
close to call where their intervals overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasp_lab.core.errors import StudyError, unknown
from tasp_lab.machines.sampling import NORMAL_95
from tasp_lab.prediction.interval import EQUAL, TIE
from tasp_lab.study.columns import OF_WINNERS, SHARES, SPEEDUPS, records_of
from tasp_lab.study.folder import varying

if TYPE_CHECKING:
    import pandas as pd

Cells = Mapping[str, Any]


def first_is_faster(first: Cells, other: Cells) -> float:
    """The probability that the first of two rows of one machine is faster, 0 to 1.

    >>> row = {"time_s": 1.0, "order_spread": 0.1}
    >>> round(first_is_faster(row, row | {"time_s": 1.2}), 2), first_is_faster(row, row)
    (0.9, 0.5)
    """
    spread = math.hypot(_number(first, "order_spread"), _number(other, "order_spread"))
    if math.isnan(spread):
        return _by_intervals(first, other)
    ratio = math.log(other["time_s"] / first["time_s"])
    if not spread:
        return 0.5 if abs(ratio) < EQUAL else float(ratio > 0)
    return math.erfc(-ratio / spread / math.sqrt(2)) / 2


def _by_intervals(first: Cells, other: Cells) -> float:
    """1, 0 or, where intervals overlap, 1/2. A row without an interval has its time for both ends."""
    low, high = _number(first, "time_low_s"), _number(first, "time_high_s")
    other_low, other_high = _number(other, "time_low_s"), _number(other, "time_high_s")
    low, high = (first["time_s"], first["time_s"]) if math.isnan(low + high) else (low, high)
    if math.isnan(other_low + other_high):
        other_low = other_high = other["time_s"]
    return 1.0 if high < other_low else 0.0 if other_high < low else 0.5


def _number(row: Cells, column: str) -> float:
    value = row.get(column)
    return math.nan if value is None else float(value)


def with_derived(rows: pd.DataFrame, baseline: str | None) -> pd.DataFrame:
    """The rows with the columns `tasp_lab.study.columns.DERIVED`.

    A speed-up is the time of the baseline for the same question over that of the row; of a row that a bound settled it
    is at most that of its bound. Raises `StudyError` for a baseline that no row has.
    """
    import numpy as np

    found = rows.copy()
    least_s = least_times(found)
    for share, of in SHARES.items():
        found[share] = found[of].astype(float) / found["time_s"].astype(float)
    found[list(SPEEDUPS)] = np.nan
    if baseline is None:
        return found
    if baseline not in set(rows["schedule"]):
        raise StudyError(unknown("baseline", baseline, sorted(set(rows["schedule"]))))
    own, base = _over(found, baseline)
    found["speedup"] = own / least_s
    width = np.exp(NORMAL_95 * np.hypot(base, found["order_spread"].astype(float)))
    width = width.where(found["schedule"] != baseline, 1.0)
    found["speedup_low"], found["speedup_high"] = found["speedup"] / width, found["speedup"] * width
    return found


def least_times(rows: pd.DataFrame) -> pd.Series[float]:
    """The time of each row in seconds; of one without a time its bound, which no time is less than."""
    return rows["time_s"].astype(float).fillna(rows["bound_s"].astype(float))


def _over(rows: pd.DataFrame, baseline: str) -> tuple[pd.Series[float], pd.Series[float]]:
    """Time and spread of the baseline, for each row that of its question."""
    group = group_columns(rows)
    cells = ["time_s", "order_spread"]
    base = rows.loc[rows["schedule"] == baseline, [*group, *cells]].drop_duplicates(group)
    found = rows[group].merge(base, how="left", on=group)
    found.index = rows.index
    return found["time_s"].astype(float), found["order_spread"].astype(float)


def group_columns(rows: pd.DataFrame) -> list[str]:
    """The columns in which rows of one question agree: those that vary, without the schedule."""
    return [each for each in varying(rows) if each != "schedule"] or ["machine"]


def winners(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per question: that of its fastest schedule which fits into memory, with more columns.

    ``schedules``: how many have a time or a bound; ``second``: the next fastest, ``margin``: its time over the
    winner's; ``too_close``: the schedules whose order with the winner is too close to call, among them those whose
    bound alone does not say that they are slower. Questions without a time are left out. Equal times are in the order
    of the names.
    """
    import pandas as pd

    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    group = group_columns(rows)
    for row in records_of(rows):
        if row["fits"] is not False and (row["time_s"] or row["bound_s"]) is not None:
            found.setdefault(tuple(row[each] for each in group), []).append(row)
    made = [_winner(each) for each in found.values() if any(row["time_s"] is not None for row in each)]
    return pd.DataFrame(made, columns=[*rows.columns, *OF_WINNERS])


def _winner(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest of the rows of one question, beside the others."""
    timed = sorted((row for row in rows if row["time_s"] is not None), key=lambda row: (row["time_s"], row["schedule"]))
    first, second = timed[0], next(iter(timed[1:]), None)
    bounds = [_at_its_bound(row, first) for row in rows if row["time_s"] is None]
    return {
        **first,
        "schedules": len(rows),
        "second": None if second is None else second["schedule"],
        "margin": None if second is None else second["time_s"] / first["time_s"],
        "too_close": [each["schedule"] for each in (*timed[1:], *bounds) if first_is_faster(first, each) < TIE],
    }


def _at_its_bound(row: Cells, beside: Cells) -> dict[str, Any]:
    """A row that a bound settled as if it took no longer; with the spread of a row of the same machine."""
    return {"schedule": row["schedule"], "time_s": row["bound_s"], "order_spread": beside["order_spread"]}
