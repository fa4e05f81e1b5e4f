"""What fits return, and their acceptance: to predict better than before, also rows that they were not fitted to.

`folds` splits rows into parts, each of which a fit to all others predicts. `Acceptance` compares the errors of rows::

    Acceptance.of(measured_s, before_s, after_s, held_out_s).accepted

The error of a row is that which reports show: predicted over measured, less one. Noise that all rows happen to share
also makes a fit better on held-out rows: of tables with no other difference, one in five. So their errors must be
smaller by more than chance explains, by Wilcoxon's signed-rank test, which takes `LEAST_ROWS` rows.

Source: F. Wilcoxon, Individual Comparisons by Ranking Methods, Biometrics Bulletin 1(6), 1945.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from scipy.stats import wilcoxon

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import FitError, RejectedFitError
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import ProgressCallback
from tasp_lab.core.report import View

FEW_ROWS = 12
"""Each fit leaves out a fifth of up to so many rows, and a third of more, as a fit to very few rows is not the fit to
all of them (assumption)."""


def folds(count: int) -> list[list[int]]:
    """The rows that each fit leaves out, every third or fifth one, so that each part spans all sizes.

    >>> folds(3)
    [[0], [1], [2]]
    >>> [len(part) for part in folds(20)]
    [7, 7, 6]
    """
    parts = min(count, 5 if count <= FEW_ROWS else 3)
    return [list(range(first, count, parts)) for first in range(parts)]


def held_out(
    order: Sequence[int],
    without: Callable[[Sequence[int], Sequence[int]], FloatArray],
    progress: ProgressCallback,
    what: str = "",
) -> tuple[FloatArray | None, str]:
    """The seconds of each row by a fit without it; None, with the reason, if there is no such fit.

    Parameters
    ----------
    order : the places of the rows, in the order of their sizes.
    without : from the places of rows that are kept and of those aside to the predicted seconds of the latter, by a fit
        to the former. Raises `FitError` if they are too few.
    progress : called with a line for each fit; `what` is the part of the fit that it is about.
    """
    predicted_s, begin = np.zeros(len(order)), f"{what}: " if what else ""
    for number, part in enumerate(parts := folds(len(order)), 1):
        aside = [order[place] for place in part]
        kept = sorted(set(order) - set(aside))
        progress(f"{begin}fit {number} of {len(parts)} without {len(aside)} of {len(order)} rows, which are held out")
        try:
            predicted_s[aside] = without(kept, aside)
        except FitError as error:
            return None, str(error)
    return predicted_s, ""


CHANCE = 0.05
"""The largest probability of an improvement by chance with which a fit is accepted: the custom of statistics."""

LEAST_ROWS = 5
"""Fewer rows cannot show an improvement: if all are better, that has a chance of 1 in 2 ** rows."""

WORST = 0.5
"""A fit whose held-out rows miss by more, on average, describes something else (assumption)."""


@dataclass(frozen=True)
class Acceptance:
    """Whether a fit is better than what it replaces.

    Parameters
    ----------
    rows : how many rows were measured; all are held out once, unless `held_out` is None.
    before : mean error of the constants before the fit; None if there were none.
    after : mean error of the fit, of the rows it was fitted to.
    held_out : mean error of rows that a fit to the others predicts; None if there are too few rows, see `why`.
    chance : the probability of so many smaller errors of held-out rows if there is no difference; None without them.
    why : why no row was held out.
    what : the part of the fit that this is about, such as a pass of a kernel; empty for all of it.
    """

    rows: int
    before: float | None
    after: float
    held_out: float | None
    chance: float | None = None
    why: str = ""
    what: str = ""

    @classmethod
    def of(
        cls, measured_s: FloatArray, before_s: FloatArray | None, after_s: FloatArray, held_out_s: FloatArray | None,
        why: str = "", what: str = "",
    ) -> Acceptance:  # fmt: skip
        """The acceptance by the measured and predicted seconds of all rows."""
        known = (before_s, after_s, held_out_s)
        errors = [None if each is None else np.abs(each / measured_s - 1) for each in known]
        before, after, held_out = (None if each is None else float(each.mean()) for each in errors)
        assert after is not None, "a fit predicts the rows that it was fitted to"
        chance = None
        if errors[0] is not None and errors[2] is not None:
            changed = errors[0] - errors[2]
            changed = changed[changed != 0]
            chance = float(wilcoxon(changed, alternative="greater").pvalue) if len(changed) else 1.0
        return cls(len(measured_s), before, after, held_out, chance, why, what)

    @property
    def accepted(self) -> bool:
        """Whether rows were held out, and the fit is better on all rows and, by more than chance, on held-out ones."""
        return not self.refusal()

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
        decision = f"{self._begin}{'accepted' if self.accepted else 'not accepted'}"
        return f"{decision}: mean error of {self.rows} rows {before}, {self.after:.1%} after the fit, {held_out}"

    @property
    def _begin(self) -> str:
        return f"{self.what}: " if self.what else ""

    def refusal(self) -> str:
        """Why the fit is not accepted; empty if it is."""
        why = self._refusal()
        return f"{self._begin}{why}" if why else ""

    def _refusal(self) -> str:
        if self.held_out is None:
            return f"the fit cannot be checked on rows it was not fitted to: {self.why}"
        worst = max(self.after, self.held_out)
        if self.before is not None and worst >= self.before:
            return (
                f"the fit is no better on rows it was not fitted to: mean error {self.before:.1%} before, "
                f"{worst:.1%} after"
            )
        if worst > WORST:
            return f"rows that the fit was not fitted to miss it by {worst:.0%}, expected {WORST:.0%} at most"
        if self.chance is None or self.chance <= CHANCE:
            return ""
        few = f"; it takes {LEAST_ROWS} rows or more" if self.rows < LEAST_ROWS else ""
        return (
            f"{self.rows} row{'s' * (self.rows > 1)} that improve by chance with a probability of "
            f"{self.chance:.0%} do not show that the fit is better, expected {CHANCE:.0%} or less{few}"
        )


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
