"""Calibration: fit of a profile's constants to one's own measurements.

A *case* is a measured table on a member of the profile's family. Its collective and sizes decide which constants it can
identify. The identifiable ones (`tasp_lab.calibration.identifiability`) are fitted together to all cases
(`tasp_lab.calibration.robust_fit`). The others keep their values, as do those whose 95 % interval spans more than a
factor of 4; the report names the measurement that would identify them.

The predicting function is an argument: this module does not import the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tasp_lab.arrays import FloatArray
from tasp_lab.calibration.cases import Case, file_of, measured
from tasp_lab.calibration.findings import Finding, fitted, not_fitted, reasons, with_findings, with_numbers
from tasp_lab.calibration.identifiability import NO_EFFECT, effects_at, not_identifiable
from tasp_lab.calibration.robust_fit import Fit, fit
from tasp_lab.collectives.kinds import NcclTestsName
from tasp_lab.errors import FitError
from tasp_lab.machines.constants import CONSTANTS, Traffic
from tasp_lab.machines.profile import Profile
from tasp_lab.progress import ProgressCallback, no_progress

_MULTIPLES = (0.5, 0.7, 1.4, 2.0)

Predict = Callable[[Profile], FloatArray]
"""From a profile to the predicted seconds of all rows of all cases, in their order."""


@dataclass(frozen=True, eq=False)
class Calibrated:
    """The fitted profile, and the predicted seconds of all rows of the cases before and after the fit."""

    profile: Profile
    findings: tuple[Finding, ...]
    cases: tuple[Case, ...] = ()
    before_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    after_s: FloatArray = field(default_factory=lambda: np.zeros(0))

    def errors(self, predicted_s: FloatArray) -> list[FloatArray]:
        """Relative errors of predicted times, one array per case."""
        measured_s = measured(self.cases)
        ends = np.cumsum([len(case.rows) for case in self.cases])[:-1]
        return np.split(predicted_s / measured_s - 1, ends) if self.cases else []


def candidates(profile: Profile, collectives: Iterable[NcclTestsName]) -> tuple[str, ...]:
    """The constants that tables of these collectives may identify, those with the largest effect first.

    >>> from tasp_lab.machines.profile_files import load_profile
    >>> candidates(load_profile("h100"), ["sendrecv"])[:3]
    ('link_payload', 'link_many_payload', 'nic_payload')
    """
    traffic = {_traffic(profile, collective) for collective in collectives}
    return tuple(spec.name for spec in CONSTANTS.values() if spec.fitted_to & traffic and profile.has(spec.name))


def _traffic(profile: Profile, collective: NcclTestsName) -> Traffic:
    if profile.library == "gloo":
        return "tcp"
    return "messages" if collective in ("sendrecv", "alltoall") else "rings"


def calibrate(
    profile: Profile,
    cases: Sequence[Case],
    predict: Predict,
    asked: Sequence[str] = (),
    *,
    date: str,
    progress: ProgressCallback = no_progress,
) -> Calibrated:
    """Fit the constants of a profile to measured tables.

    Parameters
    ----------
    profile : where the fit starts.
    cases : the tables; all rows have equal weight.
    predict : maps a profile to the predicted times of their rows.
    asked : the constants to fit; by default all that the tables identify.
    date : today's date, for the sources.
    progress : called with progress messages.

    Raises `FitError` if there are not more rows than constants to fit, for a constant that the tables' collectives
    cannot identify, and if they identify none.
    """
    if profile.library == "ideal":
        raise FitError(f"profile {profile.name!r}: the library 'ideal' has no constants to fit")
    names = checked_names(asked, profile, cases) or candidates(profile, [case.collective for case in cases])
    times_s, before_s = measured(cases), predict(profile)
    effects = _effects(profile, names, predict)
    findings = {name: not_fitted(profile, name, why) for name, why in not_identifiable(names, effects).items()}
    chosen = [name for name in names if name not in findings]
    start = _nearer(profile, chosen, predict, times_s)
    while chosen:
        if len(times_s) > len(chosen):
            progress(f"fitting {', '.join(chosen)} to {len(times_s)} rows")
        for name, found in _fit(start, chosen, predict, times_s, progress).parameters.items():
            where = _origin(cases, effects[:, names.index(name)])
            findings[name] = fitted(profile, name, found, where)
        unsure = [name for name in chosen if not findings[name].identifiable]
        if not unsure:
            break
        chosen.remove(max(reversed(unsure), key=lambda name: findings[name].width))
        start = with_numbers(profile, [(name, findings[name].value) for name in chosen])
    if not chosen:
        raise FitError(f"these measurements identify no constant: {reasons(findings.values())}")
    sure = [findings[name] for name in names]
    written = with_findings(profile, sure, date)
    return Calibrated(written, tuple(sure), tuple(cases), before_s, predict(written))


def _nearer(profile: Profile, names: Sequence[str], predict: Predict, times_s: FloatArray) -> Profile:
    """The profile with each constant in turn at the best of a few multiples.

    Far from the solution, a step of the fit may reach a region where the library uses another protocol and not return.
    """

    def distance(candidate: Profile) -> float:
        return float(np.abs(np.log(predict(candidate) / times_s)).mean())

    for name in names:
        value = profile.number(name)
        tried = [with_numbers(profile, [(name, value * factor)]) for factor in _MULTIPLES]
        profile = min([profile, *tried], key=distance)
    return profile


def _fit(
    profile: Profile, names: Sequence[str], predict: Predict, times_s: FloatArray, progress: ProgressCallback
) -> Fit:
    def predict_with(values: FloatArray) -> FloatArray:
        return predict(with_numbers(profile, zip(names, values.tolist(), strict=True)))

    return fit(predict_with, times_s, {name: _start(profile, name) for name in names}, progress)


def _start(profile: Profile, name: str) -> float:
    """The start of a fit: a little above the smallest possible value, at which a constant has no effect."""
    return max(profile.number(name), 1.05 * profile.clamped(name, 0.0))


def checked_names(asked: Sequence[str], profile: Profile, cases: Sequence[Case]) -> tuple[str, ...]:
    """The names, each once. Raises `FitError` for a constant that the cases' collectives cannot identify."""
    collectives = list(dict.fromkeys(case.collective for case in cases))
    known = candidates(profile, collectives)
    for name in asked:
        if name not in known:
            expected = ", ".join(known) or "none"
            raise FitError(f"constant {name!r}: {', '.join(collectives)} on {profile.name} may identify {expected}")
    return tuple(dict.fromkeys(asked))


def _effects(profile: Profile, names: Sequence[str], predict: Predict) -> FloatArray:
    """d log(time) / d log(constant) of all rows (first axis) and constants."""
    values = np.array([profile.number(name) for name in names])

    def log_times(logarithms: FloatArray) -> FloatArray:
        changed = zip(names, (values * np.exp(logarithms)).tolist(), strict=True)
        logarithms_s: FloatArray = np.log(predict(with_numbers(profile, changed)))
        return logarithms_s

    return effects_at(log_times, np.zeros(len(names)))


def _origin(cases: Sequence[Case], effect: FloatArray) -> str:
    """The tables whose predicted times depend on a constant."""
    ends = np.cumsum([len(case.rows) for case in cases])
    parts = zip(cases, np.split(np.abs(effect), ends[:-1]), strict=True)
    return ", ".join(
        f"{file_of(case.table.name)} ({len(case.rows)} row{'s' * (len(case.rows) > 1)}, {case.collective})"
        for case, part in parts
        if part.max() >= NO_EFFECT
    )
