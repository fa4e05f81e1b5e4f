"""What fits return, and their acceptance: to predict better than before, also rows that they were not fitted to.

`folds` splits rows into parts, each of which a fit to all others predicts. `Acceptance` compares mean errors::

    Acceptance(rows=14, before=0.26, after=0.03, held_out=0.05).accepted  # True

The error of a row is that which reports show: predicted over measured, less one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import RejectedFitError
from tasp_lab.core.files import write_whole
from tasp_lab.core.report import View

FOLDS = 3


def folds(count: int) -> list[list[int]]:
    """The rows that each of `FOLDS` fits leaves out: every third one, so that each part spans all sizes.

    >>> folds(7)
    [[0, 3, 6], [1, 4], [2, 5]]
    """
    return [list(range(first, count, FOLDS)) for first in range(FOLDS)]


def mean_error(predicted_s: FloatArray, measured_s: FloatArray) -> float:
    """The mean of the absolute relative errors of predicted times."""
    return float(np.abs(predicted_s / measured_s - 1).mean())


@dataclass(frozen=True)
class Acceptance:
    """Whether a fit is better than what it replaces.

    Parameters
    ----------
    rows : how many rows were measured; all are held out once, unless `held_out` is None.
    before : mean error of the constants before the fit; None if there were none.
    after : mean error of the fit, of the rows it was fitted to.
    held_out : mean error of rows that a fit to the others predicts; None if there are too few rows, see `why`.
    why : why no row was held out.
    what : the part of the fit that this is about, such as a pass of a kernel; empty for all of it.
    """

    rows: int
    before: float | None
    after: float
    held_out: float | None
    why: str = ""
    what: str = ""

    @property
    def accepted(self) -> bool:
        """Whether the fit is better on all rows, and on held-out ones if there are any."""
        return self.before is None or max(self.after, self.held_out or 0.0) < self.before

    @property
    def held_out_rows(self) -> int:
        """How many rows were predicted by a fit to others."""
        return 0 if self.held_out is None else self.rows

    def to_dict(self) -> dict[str, object]:
        """The errors for a script, as shares."""
        return {
            "accepted": self.accepted,
            "rows": self.rows,
            "mean_relative_error_before": self.before,
            "mean_relative_error": self.after,
            "held_out_rows": self.held_out_rows,
            "mean_relative_error_held_out": self.held_out,
            "why_not_held_out": self.why or None,
        }

    def line(self) -> str:
        """The decision and its errors on one line."""
        before = "no constants before" if self.before is None else f"{self.before:.1%} before"
        held_out = f"no row held out, {self.why}" if self.held_out is None else f"{self.held_out:.1%} on held-out rows"
        begin = f"{self.what}: " if self.what else ""
        return (
            f"{begin}{'accepted' if self.accepted else 'not accepted'}: mean error of {self.rows} rows {before}, "
            f"{self.after:.1%} after the fit, {held_out}"
        )

    def refusal(self) -> str:
        """Why the fit is not accepted."""
        rows = "the rows it was fitted to" if self.held_out is None else "rows it was not fitted to"
        after = self.after if self.held_out is None else max(self.after, self.held_out)
        begin = f"{self.what}: " if self.what else ""
        return f"{begin}the fit is no better on {rows}: mean error {self.before:.1%} before, {after:.1%} after"


Result = TypeVar("Result")
"""What was fitted: a profile with its findings, a kernel, a measured machine, or collectives that were left out."""


@dataclass(frozen=True, repr=False)
class Fitted(View, Generic[Result]):
    """Constants that were fitted or measured, and the file that has them.

    Parameters
    ----------
    rows : a row per constant.
    result : what was fitted.
    content : the file by the ending of its name; None if there is none.
    acceptances : of each part of the fit, whether it is better than what it replaces.
    notes : what was assumed, or left out.
    is_reporter : False on the ranks of a torchrun group that leave the output to rank 0.
    """

    result: Result
    content: Callable[[str], bytes] | None = None
    acceptances: tuple[Acceptance, ...] = ()
    notes: tuple[str, ...] = ()
    is_reporter: bool = True

    @property
    def accepted(self) -> bool:
        """Whether every part predicts better than before; what was measured, not fitted, always does."""
        return all(each.accepted for each in self.acceptances)

    def save(self, path: Path | str, force: bool = False) -> None:
        """Write the file. Raises `RejectedFitError` if the fit is not accepted, and `OutputError`."""
        assert self.content is not None, "a leave-one-out test has no file"
        if not force and not self.accepted:
            why = "; ".join(each.refusal() for each in self.acceptances if not each.accepted)
            raise RejectedFitError(f"{path}: not written, {why}; --force writes it", self.to_dict() | {"output": None})
        write_whole(Path(path), self.content(Path(path).suffix.lower()))
