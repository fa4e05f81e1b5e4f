"""What tables and pictures of a study state beside their cells, so that they can be read alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tasp_lab.study.columns import plain, text_of, title_of
from tasp_lab.study.folder import questions

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


def counts(rows: pd.DataFrame, failures: pd.DataFrame) -> dict[str, int]:
    """How many rows were simulated, settled by a bound, and failed."""
    settled = int((rows["status"] == "settled").sum())
    return {"done": len(rows) - settled, "settled": settled, "failed": len(failures)}


def counts_text(found: dict[str, int]) -> str:
    """The same on one line.

    >>> counts_text({"done": 10, "settled": 2, "failed": 0})
    '12 rows: 10 simulated, 2 settled by a bound, 0 failed'
    """
    total = sum(found.values())
    return (
        f"{total:,} rows: {found['done']:,} simulated, {found['settled']:,} settled by a bound, "
        f"{found['failed']:,} failed"
    )


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names on one line, at most so many.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
