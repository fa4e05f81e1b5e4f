"""Leave-one-out test of a calibration: predict each collective by a fit to all others."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import FitError, QuantityError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import flat
from tasp_lab.core.tables import Part, Table
from tasp_lab.machines.parameters import Parameters
from tasp_lab.measure.calibrate import Measurements, read_measurements
from tasp_lab.measure.fit.acceptance import Fitted
from tasp_lab.measure.fit.cases import Case, Simulated, measured
from tasp_lab.measure.fit.fit_profile import calibrate as fit_profile
from tasp_lab.measure.fit.fit_profile import candidates, checked_names
from tasp_lab.schedules.collectives.kinds import NcclTestsName


@dataclass(frozen=True)
class LeftOutCollective:
    """One collective that was left out.

    Parameters
    ----------
    collective, rows : what was predicted, and how many rows that is.
    fitted_from : the collectives that were fitted to.
    constants : those that they identified; none if `reason` says why there is no fit.
    median_relative_error_before, worst_relative_error_before : of predicted times by the profile as it was, absolute.
    median_relative_error, worst_relative_error : by the fitted one; None without a fit.
    """

    collective: NcclTestsName
    rows: int
    fitted_from: tuple[NcclTestsName, ...]
    constants: tuple[str, ...]
    median_relative_error_before: float
    worst_relative_error_before: float
    median_relative_error: float | None = None
    worst_relative_error: float | None = None
    reason: str | None = None


def _median_and_worst(predicted_s: FloatArray, measured_s: FloatArray) -> tuple[float, float]:
    found = np.abs(predicted_s / measured_s - 1)
    return float(np.median(found)), float(found.max())


def leave_one_out(
    *measurements: Path | str,
    profile: str | None = None,
    fit: Sequence[str] = (),
    algorithm: str | None = None,
    in_place: bool = False,
    progress: ProgressCallback = no_progress,
) -> Fitted[tuple[LeftOutCollective, ...]]:
    """Predict each collective by a profile that was fitted to all others.

    Parameters
    ----------
    measurements : folders and files of one family of machines; tables of pairs help with every fit.
    fit : constants to fit, of each fit those that its collectives may identify.
    profile, algorithm, in_place, progress : see `tasp_lab.measure.calibrate.calibrate`.

    Raises `TableError`, `ProfileError`, and `FitError` for fewer than two collectives or if there is no fit.
    """
    if not measurements:
        raise QuantityError("no tables: expected a folder with tables of two collectives or more")
    paths = [Path(each) for each in dict.fromkeys(map(str, measurements))]
    read = read_measurements(paths, profile, fit, by_rings=algorithm == "ring", in_place=in_place)
    collectives = list(dict.fromkeys(case.collective for case in read.cases))
    if len(collectives) < 2:
        others = f" ({'; '.join(read.left_out)})" if read.left_out else ""
        raise FitError(
            f"{', '.join(map(str, paths))}: {', '.join(collectives) or 'no collective'} to predict, "
            f"expected tables of two collectives or more{others}"
        )
    names = checked_names(fit, read.start, read.cases)
    for line in read.left_out:
        progress(line)
    runs = [Simulated(read.profile, [case]) for case in read.cases]
    found = []
    for number, collective in enumerate(collectives, 1):
        progress(f"{number} of {len(collectives)}: {collective} is left out")
        found.append(_predicted(read, runs, collective, names, progress))
    if all(each.median_relative_error is None for each in found):
        raise FitError("; ".join(f"without {each.collective}: {each.reason}" for each in found))
    rows = list(map(asdict, found))
    document = {
        "profile": read.profile.name,
        "library": read.profile.library,
        "collectives": rows,
        "notes": list(read.left_out),
        "provenance": read.provenance.to_dict(),
    }
    columns = {
        "left out": "{collective}", "fitted from": "{fitted_from}", "constants fitted": "{constants}",
        "rows": "{rows}", "median error before": "{median_relative_error_before:.1%}",
        "median error after": "{median_relative_error:.1%}", "worst before": "{worst_relative_error_before:.1%}",
        "worst after": "{worst_relative_error:.1%}",
    }  # fmt: skip
    title = f"{read.profile.name}: each collective predicted by a fit to the others"
    reasons = [f"{each.collective}: {each.reason}" for each in found if each.reason]
    parts: list[Part] = [*Table.of(title, rows, columns, (0, 1, 2)), *reasons]
    return Fitted(document, [flat(row) for row in rows], parts, tuple(found), notes=read.left_out)


def _predicted(
    read: Measurements, runs: Sequence[Simulated], left_out: NcclTestsName, names: Sequence[str],
    progress: ProgressCallback,
) -> LeftOutCollective:  # fmt: skip
    kept, chosen = _apart(read.cases, runs, left_out, inside=False)
    aside, judging = _apart(read.cases, runs, left_out, inside=True)
    fitted_from = tuple(dict.fromkeys(case.collective for case in kept))
    measured_s = measured(aside)
    before = _median_and_worst(_all(judging, read.profile.parameters), measured_s)
    known = candidates(read.start, fitted_from)
    asked = [name for name in names if name in known]
    try:
        if names and not asked:
            raise FitError(f"{', '.join(fitted_from)} cannot identify {', '.join(names)}")
        today = datetime.date.today().isoformat()
        found = fit_profile(read.start, kept, lambda tried: _all(chosen, tried), asked, date=today, progress=progress)
    except FitError as error:
        return LeftOutCollective(left_out, len(measured_s), fitted_from, (), *before, reason=str(error))
    constants = [*(each.name for each in read.of_pairs), *(each.name for each in found.findings if each.identifiable)]
    after = _median_and_worst(_all(judging, found.profile.parameters), measured_s)
    return LeftOutCollective(left_out, len(measured_s), fitted_from, tuple(dict.fromkeys(constants)), *before, *after)


def _apart(
    cases: Sequence[Case], runs: Sequence[Simulated], collective: NcclTestsName, *, inside: bool
) -> tuple[list[Case], list[Simulated]]:
    """The cases of a collective, or all others, with what predicts them."""
    found = [(case, run) for case, run in zip(cases, runs, strict=True) if (case.collective == collective) is inside]
    return [case for case, _ in found], [run for _, run in found]


def _all(runs: Sequence[Simulated], parameters: Parameters) -> FloatArray:
    """The predicted seconds of all rows."""
    return np.concatenate([run(parameters) for run in runs])
