"""What tables and pictures of a study state beside their cells, so that they can be read alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tasp_lab.study.columns import plain, text_of, title_of
from tasp_lab.study.folder import questions
from tasp_lab.study.rows import STATUSES

if TYPE_CHECKING:
    import pandas as pd


def held_constant(rows: pd.DataFrame, shown: Iterable[str] = ()) -> dict[str, object]:
    """The columns that say which point a row is and have one value in all rows, without those `shown`."""
    columns = [each for each in questions(rows) if each not in set(shown)]
    single = {each: plain(rows[each].iloc[0]) for each in columns if rows[each].nunique(dropna=False) == 1}
    return {name: value for name, value in single.items() if value not in (None, "")}


def held_text(held: dict[str, object]) -> str:
    """What is held constant, on one line.

    >>> held_text({"seq": 65536, "mask": "causal"})
    'length 64Ki, mask causal'
    """
    return ", ".join(f"{title_of(name)} {text_of(name, value)}" for name, value in held.items())


def counts(*rows: pd.DataFrame) -> dict[str, int]:
    """How many rows have each status."""
    found = Counter(status for each in rows for status in each["status"])
    return {status: found[status] for status in STATUSES}


SAID = {"ok": "simulated", "settled": "settled by a bound", "failed": "failed"}
"""What statuses are called in texts."""


def counts_text(found: Mapping[str, int], what: str = "rows") -> str:
    """Numbers of rows by status on one line; statuses that no row has are left out.

    >>> counts_text({"ok": 10, "settled": 2, "does not apply": 1, "failed": 0})
    '13 rows: 10 simulated, 2 settled by a bound, 1 does not apply'
    """
    return f"{sum(found.values()):,} {what}: {statuses_text(found)}"


def statuses_text(found: Mapping[str, int]) -> str:
    """Numbers by status, without their sum.

    >>> statuses_text({"ok": 10, "does not apply": 2})
    '10 simulated, 2 do not apply'
    """

    def said(status: str, count: int) -> str:
        return SAID.get(status, "does not apply" if count == 1 else "do not apply")

    return ", ".join(f"{count:,} {said(status, count)}" for status, count in found.items() if count)


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names on one line, at most so many.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
