"""Rows of a study as a data frame: how cells read, what tells points apart, which rows a filter leaves, what wins.

>>> import pandas as pd
>>> rows = pd.DataFrame({"machine": ["h100-8", "h100-8"], "seq": [8192, 16384], "status": ["ok", "ok"]})
>>> varying(rows), held_constant(rows)
(('seq',), {'machine': 'h100-8'})

Rows that differ in their schedule alone are compared with each other: the fastest one that fits into memory wins.
Machines differ from predictions by more than schedules on one machine do, so an order depends only on the errors that
two schedules do not share (`tasp_lab.prediction.paired`).
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tasp_lab.core.errors import MissingPackageError, StudyError, unknown
from tasp_lab.core.units import format_count, format_regret, format_size_about, format_time
from tasp_lab.machines.stack import shipping
from tasp_lab.prediction.interval import TIE
from tasp_lab.prediction.paired import Rival, paired_errors, quantile_t
from tasp_lab.prediction.rank import CostsOf, choose
from tasp_lab.study.point import COLUMNS, OF_PLANS, POINT_COLUMNS, PREDICTED, STATUSES
from tasp_lab.study.where import Expression
from tasp_lab.workload.layer import Workload

if TYPE_CHECKING:
    import pandas as pd


COUNTS = ("seq", "heads", "kv_heads", "head_dim", "value_dim", "batch", "batch_tokens", "nodes", "ranks")
"""Columns of whole numbers, shown with a binary prefix where it divides them."""

SPEEDUPS = ("speedup", "speedup_low", "speedup_high")
SHARES = {"exposed_share": "exposed_s", "bound_share": "bound_s"}
"""Shares of the time of a row, by the column they are made of."""

DERIVED = (*SPEEDUPS, *SHARES)
"""Columns that follow from the others: speed-ups over the baseline with 5 and 95 %, and `SHARES`."""

OF_WINNERS = ("schedules", "second", "margin", "too_close", "recommended", "expected_regret")
"""Columns that winners have beside those of their row, see `winners`."""

NO_VALUE = "-"

TITLES = {
    "seq": "length", "passes": "pass", "kv_heads": "KV heads", "head_dim": "head dim", "time_s": "time",
    "time_low_s": "5 %", "time_high_s": "95 %", "bound_s": "bound", "speedup": "speed-up", "bottleneck": "bottleneck",
    "speedup_low": "speed-up, 5 %", "speedup_high": "speed-up, 95 %", "settled_by": "decided by",
    "exposed_share": "exposed share", "bound_share": "share of bound", "too_close": "ties with",
    "mfu": "MFU", "tokens_per_s_per_gpu": "tokens/s per GPU",
}  # fmt: skip
"""What columns are called in tables; others by their own name, without unit and underscores."""

UNITS = ("_bytes_per_s", "_flops_per_s", "_bytes", "_s")


def title_of(column: str) -> str:
    """What a column is called in tables.

    >>> title_of("seq"), title_of("exposed_s"), title_of("memory_bytes"), title_of("nodes")
    ('length', 'exposed', 'memory', 'nodes')
    """
    name = next((column.removesuffix(unit) for unit in UNITS if column.endswith(unit)), column)
    return TITLES.get(column, name.replace("_", " "))


def text_of(column: str, value: Any) -> str:
    """A cell as people read it.

    >>> text_of("seq", 65536), text_of("time_s", 0.0125), text_of("fits", True), text_of("speedup", 1.8)
    ('64Ki', '12.5 ms', 'yes', '1.80x')
    >>> text_of("seq", None), text_of("memory_bytes", 3 * 2**29), text_of("bound_share", 0.931), text_of("loss", 0.25)
    ('-', '1.5 GiB', '93.1%', '0.25')
    """
    value = plain(value)
    if value is None or isinstance(value, bool):
        return {None: NO_VALUE, True: "yes", False: "no"}[value]
    if isinstance(value, str):
        return value
    if column == "expected_regret":
        return format_regret(value)
    if column in SPEEDUPS or column in (*SHARES, "mfu"):
        return f"{value:.2f}x" if column in SPEEDUPS else f"{value:.1%}"
    if column in COUNTS:
        return format_count(value)
    if column.endswith("_bytes") or column == "bytes_per_rank":
        return format_size_about(round(value))
    return format_time(value) if column.endswith("_s") and "_per_" not in column else f"{value:.6g}"


def plain(value: Any) -> Any:
    """A cell as Python has it, ready for JSON: numpy scalars are unpacked; None for what is missing or not finite."""
    value = value.item() if hasattr(value, "item") else value
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value if isinstance(value, (str, bool, int, float)) else None if value != value else str(value)


def is_number(value: object) -> bool:
    """Whether a cell is a number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def records_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as mappings of plain values; a list stays one."""
    columns = [[value if isinstance(value, (list, tuple)) else plain(value) for value in table[name].tolist()]
               for name in table.columns]  # fmt: skip
    return [dict(zip(table.columns, cells, strict=True)) for cells in zip(*columns, strict=True)]


def groups_of(rows: pd.DataFrame, columns: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """The rows by the values of some columns, in the order of the rows; all rows together without a column."""
    for key, group in rows.groupby(list(columns), dropna=False, sort=False) if columns else [((), rows)]:
        yield tuple(map(plain, key)), group


def check_columns(names: Iterable[str], rows: pd.DataFrame, extra: Iterable[str] = ()) -> None:
    """Raise `StudyError` for a name that is no column; the nearest one is named."""
    known = [*dict.fromkeys((*rows.columns, *extra))]
    for name in names:
        if name not in known:
            axes = [each for each in known if each not in COLUMNS]
            raise StudyError(unknown("column", name, [*axes, *(each for each in known if each in COLUMNS)]))


def needed(module: str, what: str) -> Any:
    """Import an optional module for `what`; without it `MissingPackageError` names the extra that has it.

    >>> needed("math", "this example").sqrt(4)
    2.0
    >>> needed("no_such_package", "a study")
    Traceback (most recent call last):
    ...
    tasp_lab.core.errors.MissingPackageError: a study needs no_such_package, expected: pip install 'tasp-lab[studies]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackageError(f"{what} needs {package}, expected: pip install 'tasp-lab[studies]'") from error


Cells = Mapping[str, Any]
"""A row: its cells by column."""

FOLLOWING = {
    "nodes": ("machine",), "ranks": ("machine",), "library": ("machine",),
    "heads": ("model",), "kv_heads": ("model",), "head_dim": ("model",), "value_dim": ("model",),
    "overrides": ("variant",),
}  # fmt: skip
"""Columns that are determined by another one, if that one is there."""


# ------------------------------------------------------------------------------------- what tells points apart


def are_plans(rows: pd.DataFrame) -> bool:
    """Whether these are rows of plans, whose `schedule` is an answer: the recommended layout."""
    return OF_PLANS[0] in rows


def point_columns(rows: pd.DataFrame) -> list[str]:
    """The columns that say which point a row is: `POINT_COLUMNS`, and further axes."""
    known = [column for column in POINT_COLUMNS if column in rows and (column != "schedule" or not are_plans(rows))]
    return known + [column for column in rows.columns if column not in (*COLUMNS, *OF_PLANS, *DERIVED, *OF_WINNERS)]


def varying(rows: pd.DataFrame) -> tuple[str, ...]:
    """The columns of `point_columns` with more than one value, without those that follow from another one of them.

    Only rows with an answer show what follows from what: a refused machine has no nodes.
    """
    answered = rows[rows["status"].isin(PREDICTED)]

    def follows(column: str, other: str) -> bool:
        """Whether a column has one value for each value of another one that varies, or one value altogether."""
        if answered[other].nunique(dropna=False) < 2:
            return not answered.empty and answered[column].nunique(dropna=False) == 1
        return bool((answered.groupby(other, dropna=False)[column].nunique(dropna=False) <= 1).all())

    several = [column for column in point_columns(rows) if rows[column].nunique(dropna=False) > 1]
    return tuple(column for column in several if not any(follows(column, of) for of in FOLLOWING.get(column, ())))


def compared_columns(rows: pd.DataFrame) -> list[str]:
    """The columns in which rows that are compared agree: those that vary, without the schedule."""
    return [column for column in varying(rows) if column != "schedule"] or ["machine"]


# -------------------------------------------------------------------------------------------------- captions


def held_constant(rows: pd.DataFrame, shown: Iterable[str] = ()) -> dict[str, object]:
    """The columns that say which point a row is and have one value in all rows, without those `shown`."""
    columns = [column for column in point_columns(rows) if column not in set(shown)]
    single = {each: plain(rows[each].iloc[0]) for each in columns if rows[each].nunique(dropna=False) == 1}
    return {name: value for name, value in single.items() if value not in (None, "")}


def counts(*rows: pd.DataFrame) -> dict[str, int]:
    """How many rows have each status."""
    number = Counter(status for each in rows for status in each["status"])
    return {status: number[status] for status in STATUSES}


def counts_text(by_status: Mapping[str, int], what: str = "rows") -> str:
    """Numbers of rows by status on one line; statuses that no row has are left out.

    >>> counts_text({"ok": 10, "settled": 2, "does not apply": 1, "failed": 0})
    '13 rows: 10 simulated, 2 pruned by a bound, 1 does not apply'
    """
    return f"{sum(by_status.values()):,} {what}: {statuses_text(by_status)}"


def statuses_text(by_status: Mapping[str, int]) -> str:
    """Numbers by status, without their sum.

    >>> statuses_text({"ok": 10, "does not apply": 2})
    '10 simulated, 2 do not apply'
    """
    names = {"ok": "simulated", "settled": "pruned by a bound", "failed": "failed"}
    return ", ".join(
        f"{count:,} {names.get(status) or ('does not apply' if count == 1 else 'do not apply')}"
        for status, count in by_status.items()
        if count
    )


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names on one line, at most so many.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# --------------------------------------------------------------------------------------------------- filters


def select(rows: pd.DataFrame, where: str | None, *, or_none: bool = False) -> pd.DataFrame:
    """The rows that a filter such as ``seq >= 64Ki and machine == "h100-8"`` leaves; all of them without one.

    The language is that of the section ``[where]`` of a study. A row that lacks a cell which the filter uses is left
    out. Raises `StudyError` for a filter that cannot be read, an unknown column, and where no row is left unless
    `or_none`.
    """
    if where is None:
        return rows
    expression = Expression.parse(where)
    names = sorted(expression.names)
    for name in names:
        if name not in rows:
            raise StudyError(f"where {where!r}: {unknown('column', name, rows.columns)}; texts stand in quotes")
    cells = [dict(zip(names, map(plain, row), strict=True)) for row in rows[names].itertuples(index=False, name=None)]
    # By `loc`, since an empty list in brackets would choose no columns where there are no rows.
    left = rows.loc[[None not in row.values() and bool(expression.value(row)) for row in cells]]
    if left.empty and not or_none:
        raise StudyError(f"where {where!r}: none of {len(rows)} rows is left{_hint(expression, rows)}")
    return left


def _hint(expression: Expression, rows: pd.DataFrame) -> str:
    """The first text that a filter compares a column with and that no row has, with the values that rows have."""
    for node in ast.walk(expression.tree):
        match node:
            case ast.Compare(left=ast.Name(id=name), comparators=[ast.Constant(value=str(text))]):
                values = [str(value) for value in rows[name].dropna().unique()]
                if text not in values:
                    return f": {unknown(name, text, values)}"
    return ""


# ------------------------------------------------------------------------------------------ orders and winners


def least_times(rows: pd.DataFrame) -> pd.Series[float]:
    """The time of each row in seconds; of one without a time its bound, which no time is less than."""
    return rows["time_s"].astype(float).fillna(rows["bound_s"].astype(float))


def with_derived(rows: pd.DataFrame, baseline: str | None) -> pd.DataFrame:
    """The rows with the columns `tasp_lab.study.frames.DERIVED`.

    A speed-up is the time of the baseline at the same point over that of the row; of a row that a bound settled it is
    at most that of its bound. A baseline is a schedule, or ``COLUMN=VALUE`` such as ``variant=as is`` or
    ``machine=h100-8``. Raises `StudyError` for a baseline that no row has.
    """
    import numpy as np

    derived = rows.copy()  # a folder keeps its rows for the next view
    for share, of in SHARES.items():
        derived[share] = derived[of].astype(float) / derived["time_s"].astype(float)
    derived[list(SPEEDUPS)] = np.nan
    if baseline is None:
        return derived
    column, _, text = baseline.rpartition("=") if "=" in baseline else ("schedule", "", baseline)
    if column not in point_columns(rows):
        raise StudyError(unknown("column of the baseline", column, point_columns(rows)))
    known = {str(plain(value)): value for value in rows[column].unique()}
    if text not in known:
        raise StudyError(unknown("baseline", text, sorted(known)))
    on = compared_columns(rows)
    if column != "schedule":  # and what follows from the column, such as the nodes of a machine, may differ, too
        last, values = "model" if are_plans(rows) else "schedule", rows.groupby(column, dropna=False)
        others = dict.fromkeys(each for each in (*varying(rows), last) if each != column)
        on = [each for each in others if values[each].nunique(dropna=False).max() > 1] or [last]
    times = ["time_s", "time_low_s", "time_high_s"]
    kept = [*times, "exposed_s", "setting", "measured", "steps", "schedule"]
    of_baseline = rows.loc[rows[column] == known[text], list(dict.fromkeys([*on, *kept]))].drop_duplicates(on)
    # one row of the baseline per place: a second one would multiply rows
    beside = rows[on].merge(of_baseline, how="left", on=on).set_index(rows.index)
    if column == "machine":  # errors of two machines are independent, and intervals are not symmetric
        (one_s, one_low, one_high), (two_s, two_low, two_high) = (
            np.log(frame[times].astype(float)).to_numpy().T for frame in (beside, rows)
        )
        down, up = np.hypot(one_s - one_low, two_high - two_s), np.hypot(one_high - one_s, two_s - two_low)
    else:  # only the errors count that two rows of one machine do not share
        spreads = list[float]()
        for base, row in zip(records_of(beside[kept]), records_of(rows), strict=True):
            one, two = rival_of(base), rival_of(row)
            spreads.append(paired_errors().spread(one, two, base["setting"]) if one and two else math.nan)
        down = up = quantile_t(0.95) * np.array(spreads)
    derived["speedup"] = beside["time_s"].astype(float) / least_times(rows)
    derived["speedup_low"], derived["speedup_high"] = (derived["speedup"] * np.exp(end) for end in (-down, up))
    return derived


def rival_of(row: Cells) -> Rival | None:
    """What comparisons need of a row; None without a time. Raises `StudyError` for a time without a setting."""
    if (time_s := row.get("time_s")) is None:
        return None
    if row.get("setting") is None:
        raise StudyError(
            f"a row of {row['schedule']} has no setting, expected rows of this version: run the study again"
        )
    steps, measured = row.get("steps"), row.get("measured") is not False
    exposed_s = float(row.get("exposed_s") or 0)
    return Rival.of(str(row["schedule"]), float(time_s), exposed_s, 1 if steps is None else float(steps), measured)


def first_is_faster(first: Cells, other: Cells) -> float:
    """The probability that the first of two rows of one machine with a time is faster, 0 to 1.

    >>> row = {"schedule": "tasp", "time_s": 1.0, "exposed_s": 0.1, "setting": "exact"}
    >>> first_is_faster(row, row | {"time_s": 1.2}), first_is_faster(row, row)
    (1.0, 0.5)
    """
    one, two = rival_of(first), rival_of(other)
    assert one is not None, "rows with a time are compared"
    assert two is not None, "rows with a time are compared"
    return paired_errors().first_is_faster(one, two, first["setting"])


def winners(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest of rows that differ in their schedule alone and fit into memory, with more columns.

    ``schedules``: how many have a time or a bound; ``second``: the next fastest, ``margin``: its time over the
    winner's; ``too_close``: the schedules in a tie with the winner, among them those whose
    bound alone does not say that they are slower; ``recommended``: the schedule to take, as `compare` chooses it, and
    its ``expected_regret`` (`tasp_lab.prediction.recommend`). Where no schedule has a time there is no winner. Of equal
    times the first name wins.
    """
    import pandas as pd

    made = [_winner(each) for each in questions_of(rows, compared_columns(rows)).values()]
    return pd.DataFrame(made, columns=list(dict.fromkeys([*rows.columns, *OF_WINNERS])))


def questions_of(rows: pd.DataFrame, axes: Sequence[str]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """The rows of each question that fit into memory and have a time or a bound, by the values of these columns.

    Questions without any time are left out.
    """
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in records_of(rows):
        if row["fits"] is not False and (row["time_s"] or row["bound_s"]) is not None:
            found.setdefault(tuple(row[column] for column in axes), []).append(row)
    return {key: each for key, each in found.items() if any(row["time_s"] is not None for row in each)}


def _winner(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    timed, bounds, regrets = with_regrets(rows)
    first, second = timed[0], timed[1] if len(timed) > 1 else None
    number = choose(regrets, lambda number: costs_of(timed[number]))
    return {
        **first,
        "schedules": len(rows),
        "second": None if second is None else second["schedule"],
        "margin": None if second is None else second["time_s"] / first["time_s"],
        "too_close": [other["schedule"] for other in (*timed[1:], *bounds) if first_is_faster(first, other) < TIE],
        "recommended": timed[number]["schedule"],
        # a plan has that over all layouts that it simulated, of which the row has one
        "expected_regret": first.get("expected_regret", regrets[number]),
    }


def with_regrets(
    rows: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[float]]:
    """Of rows that differ in their schedule alone: those with a time, the fastest first; the others, with their bound.

    And the expected regret of each one with a time among all. A row that a bound settled is taken as if it took no
    longer, and exposed as large a share as the fastest.
    """
    timed = sorted((row for row in rows if row["time_s"] is not None), key=lambda row: (row["time_s"], row["schedule"]))
    shares = {column: timed[0].get(column) for column in ("exposed_s", "setting", "measured", "steps")}
    bounds = [
        {"schedule": row["schedule"], **shares, "time_s": row["bound_s"]} for row in rows if row["time_s"] is None
    ]
    rivals = [rival for row in (*timed, *bounds) if (rival := rival_of(row)) is not None]
    regrets = paired_errors().expected_regrets(rivals, timed[0]["setting"])
    return timed, bounds, [float(regret) for regret in regrets[: len(timed)]]


def costs_of(row: Cells) -> CostsOf:
    """What decides between schedules that are expected to be equally fast."""
    seq, heads, kv_heads, ranks = (int(row.get(name) or 1) for name in ("seq", "heads", "kv_heads", "ranks"))
    layer = Workload(seq, heads=heads, kv_heads=kv_heads, mask=str(row["mask"]))
    shipped = any(shipping(row["schedule"], layer, ranks, row["passes"]))
    buffers, links = (
        math.nan if row.get(name) is None else float(row[name]) for name in ("buffer_bytes", "link_bytes")
    )
    return CostsOf(buffers, links, shipped, row["time_s"], row["schedule"])
