"""Columns of rows: what each is called, and how people read its cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tasp_lab.core.errors import StudyError, unknown
from tasp_lab.core.units import format_size_about, format_time
from tasp_lab.study.rows import COLUMNS

if TYPE_CHECKING:
    import pandas as pd

COUNTS = ("seq", "heads", "kv_heads", "head_dim", "batch", "nodes", "ranks")
"""Columns of whole numbers, shown with a binary prefix where it divides them."""

SPEEDUPS = ("speedup", "speedup_low", "speedup_high")
SHARES = {"exposed_share": "exposed_s", "bound_share": "bound_s"}
"""Shares of the time of a row, by the column they are made of."""

DERIVED = (*SPEEDUPS, *SHARES)
"""Columns that follow from the others: speed-ups over the baseline with 5 and 95 %, and `SHARES`."""

OF_WINNERS = ("schedules", "second", "margin", "too_close", "recommended", "expected_regret")
"""Columns that winners have beside those of their row, see `tasp_lab.study.frames.winners`."""

NO_VALUE = "-"

TITLES = {
    "seq": "length", "passes": "pass", "kv_heads": "KV heads", "head_dim": "head dim", "time_s": "time",
    "time_low_s": "5 %", "time_high_s": "95 %", "bound_s": "bound", "speedup": "speed-up", "bottleneck": "bottleneck",
    "speedup_low": "speed-up, 5 %", "speedup_high": "speed-up, 95 %", "settled_by": "decided by",
    "exposed_share": "exposed share", "bound_share": "share of bound", "too_close": "ties with",
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
    if value is None:
        return NO_VALUE
    if isinstance(value, (str, bool)):
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
    return _number(column)(value)


def _number(column: str) -> Callable[[float], str]:
    """How the numbers of a column are written."""
    if column in SPEEDUPS:
        return "{:.2f}x".format
    if column in SHARES or column == "expected_regret":
        return "{:.1%}".format
    if column in COUNTS:
        return count_text
    if column.endswith("_bytes") or column == "bytes_per_rank":
        return lambda size: format_size_about(round(size))
    return format_time if column.endswith("_s") and "_per_" not in column else "{:.6g}".format


def count_text(count: float) -> str:
    """A count, with a binary prefix if one divides it.

    >>> count_text(131072), count_text(96), count_text(1024**2), count_text(1.5)
    ('128Ki', '96', '1Mi', '1.5')
    """
    for prefix, factor in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if count >= factor and count % factor == 0:
            return f"{count / factor:.0f}{prefix}"
    return f"{count:.10g}"


def plain(value: Any) -> Any:
    """A cell as Python has it, ready for JSON: numpy scalars are unpacked; None for what is missing or not finite."""
    value = value.item() if hasattr(value, "item") else value
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value if isinstance(value, (str, bool, int, float)) else None if value != value else str(value)


def records_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as mappings of plain values; a list stays one."""
    columns = [[value if isinstance(value, (list, tuple)) else plain(value) for value in table[name].tolist()]
               for name in table.columns]  # fmt: skip
    return [dict(zip(table.columns, cells, strict=True)) for cells in zip(*columns, strict=True)]


def is_text(table: pd.DataFrame, column: str) -> bool:
    """Whether a column has texts, which are aligned to the left."""
    return bool(table[column].map(lambda value: isinstance(value, str)).any())


def check_columns(names: Iterable[str], rows: pd.DataFrame, extra: Iterable[str] = ()) -> None:
    """Raise `StudyError` for a name that is no column; the nearest one is named."""
    known = [*dict.fromkeys((*rows.columns, *extra))]
    for name in names:
        if name not in known:
            axes = [each for each in known if each not in COLUMNS]
            raise StudyError(unknown("column", name, [*axes, *(each for each in known if each in COLUMNS)]))
