"""Calibration: fit of a profile's constants to one's own measurements.

A *case* is a measured table on a member of the profile's family. Its collective and sizes decide which constants it
can identify. The identifiable ones are fitted together to all cases (`tasp_lab.measure.fit.robust_fit`). The others
keep their values, as do those whose 95 % interval spans more than a factor of 4; the report names the measurement that
would identify them.

The predicting function is an argument: this module does not import the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import FitError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.machines.constants import CONSTANTS, Traffic
from tasp_lab.machines.parameters import Change, Parameters, changed
from tasp_lab.machines.profile import Profile
from tasp_lab.measure.fit.acceptance import LEAST_ROWS
from tasp_lab.measure.fit.cases import Case, measured
from tasp_lab.measure.fit.robust_fit import NO_EFFECT, Estimate, effects_at, fit, not_identifiable
from tasp_lab.schedules.collectives.kinds import NcclTestsName


@dataclass(frozen=True)
class Finding:
    """Result for one constant, in SI units.

    `low` and `high` are the ends of its 95 % interval. If it is not `identifiable`, `why` is the reason and the profile
    keeps the value `before`. `origin` names the measurements.
    """

    name: str
    before: float
    value: float
    low: float
    high: float
    why: str = ""
    origin: str = ""

    @property
    def identifiable(self) -> bool:
        """Whether the measurements tell it."""
        return not self.why

    @property
    def needs(self) -> str:
        """The measurement that would identify it."""
        return CONSTANTS[self.name].identified_by

    @property
    def width(self) -> float:
        """The ratio of the ends of its interval."""
        return self.high / self.low if self.low else math.inf


def with_findings(parameters: Parameters, findings: Iterable[Finding], date: str) -> Parameters:
    """The parameters with the identifiable ones of these. Their sources name the measurements and the date."""
    found = parameters
    for finding in (each for each in findings if each.identifiable and each.name in parameters):
        spec = CONSTANTS[finding.name]
        possible = changed(found, {finding.name: finding.value}).numbers[finding.name]
        # as a file of the profile states them
        value, low, high = spec.rounded(possible, 6), spec.rounded(finding.low, 4), spec.rounded(finding.high, 4)
        found = changed(found, {finding.name: value}, clamp=False)
        source = f"fitted to {finding.origin}, 95 % {spec.format(finding.low, 4)} to {spec.format(finding.high, 4)}"
        new = replace(found[finding.name], source=f"{source}, on {date}")
        found = found.with_parameters([replace(new, low=low, high=high) if low <= value <= high else new])
    return found


_MULTIPLES = (0.5, 0.7, 1.4, 2.0)
_MULTIPLES_TOGETHER = (0.25, 0.5, 0.7, 1.4, 2.0, 4.0, 8.0)

Group = tuple[str, ...]
"""Constants that are fitted by one factor; most are alone."""

Predict = Callable[[Parameters], FloatArray]
"""From parameters of a family to the predicted seconds of all rows of all cases, in their order."""


@dataclass(frozen=True, eq=False)
class Calibrated:
    """The fitted profile, and the predicted seconds of all rows of the cases.

    `before_s` and `after_s` are those before and after the fit. `held_out_s` are those of each row by a fit without it,
    empty if there are too few rows.
    """

    profile: Profile
    findings: tuple[Finding, ...]
    cases: tuple[Case, ...] = ()
    before_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    after_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    held_out_s: FloatArray = field(default_factory=lambda: np.zeros(0))

    def errors(self, predicted_s: FloatArray) -> list[FloatArray]:
        """Relative errors of predicted times, one array per case."""
        measured_s = measured(self.cases)
        ends = np.cumsum([len(case.rows) for case in self.cases])[:-1]
        return np.split(predicted_s / measured_s - 1, ends) if self.cases else []


def candidates(profile: Profile, collectives: Iterable[NcclTestsName]) -> tuple[str, ...]:
    """The constants that tables of these collectives may identify, those with the largest effect first.

    >>> from tasp_lab.machines.profile import load_profile
    >>> candidates(load_profile("h100"), ["sendrecv"])[:3]
    ('link_payload', 'link_many_payload', 'nic_payload')
    """
    traffic: set[Traffic] = {
        "tcp" if profile.library == "gloo" else "messages" if collective in ("sendrecv", "alltoall") else "rings"
        for collective in collectives
    }
    return tuple(
        spec.name for spec in CONSTANTS.values() if spec.fitted_to & traffic and spec.name in profile.parameters
    )


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
    predict : maps parameters of the profile to the predicted times of their rows.
    asked : the constants to fit; by default all that the tables identify, fewer than they have rows.
    date : today's date, for the sources.
    progress : called with progress messages.

    Raises `FitError` if there are not more rows than constants that are asked for, for a constant that the tables'
    collectives cannot identify, and if they identify none.
    """
    if profile.library == "ideal":
        raise FitError(f"profile {profile.name!r}: the library 'ideal' has no constants to fit")
    collectives = list(dict.fromkeys(case.collective for case in cases))
    known = candidates(profile, collectives)
    for name in asked:
        if name not in known:
            expected = ", ".join(known) or "none"
            raise FitError(f"constant {name!r}: {', '.join(collectives)} on {profile.name} may identify {expected}")
    names = tuple(dict.fromkeys(asked)) or known
    start, times_s = profile.parameters, measured(cases)
    before_s = predict(start)
    values = np.array([start.numbers[name] for name in names])

    def log_times(logarithms: FloatArray) -> FloatArray:
        tried = dict(zip(names, (values * np.exp(logarithms)).tolist(), strict=True))
        return np.asarray(np.log(predict(changed(start, tried))))

    effects = effects_at(log_times, np.zeros(len(names)))
    whys = not_identifiable(names, effects)
    chosen = [name for name in names if name not in whys]
    if not asked:  # as many as the rows can determine, those with the largest effect first
        rows, most = len(times_s), len(times_s) - 1
        why = (
            f"{rows} rows determine at most {most}" if most else f"1 row determines none, expected {LEAST_ROWS} or more"
        )
        whys |= dict.fromkeys(chosen[most:], why)
        chosen = chosen[:most]
    unknown = {name: Finding(name, start.numbers[name], start.numbers[name], 0.0, math.inf, why)
               for name, why in whys.items()}  # fmt: skip

    def distance(tried: Parameters) -> float:
        """The mean distance of predicted from measured times, as a logarithm."""
        return float(np.abs(np.log(predict(tried) / times_s)).mean())

    fits = []
    for begin, groups in _starts(start, chosen, distance):
        # Far from the solution, a step of the fit may reach a region where the library uses another protocol and not
        # return. So each constant in turn is first brought to the best of a few multiples.
        for name in chosen:
            begin = min([begin, *_multiplied(begin, [name], _MULTIPLES)], key=distance)
        found = _findings(start, begin, groups, predict, times_s, progress)
        for name, finding in found.items():
            found[name] = replace(finding, origin=_origin(cases, effects[:, names.index(name)]) + finding.origin)
        fits.append((with_findings(start, found.values(), date), found))
    written, found = min(fits, key=lambda each: distance(each[0]))
    findings = tuple((unknown | found)[name] for name in names)
    if not any(finding.identifiable for finding in findings):
        reasons: dict[str, list[str]] = {}
        for finding in findings:
            reasons.setdefault(finding.why, []).append(finding.name)
        text = "; ".join(f"{', '.join(group)}: {why}" for why, group in reasons.items())
        raise FitError(f"these measurements identify no constant: {text}")
    return Calibrated(profile.with_parameters(written), findings, tuple(cases), before_s, predict(written))


def _starts(
    start: Parameters, names: Sequence[str], distance: Callable[[Parameters], float]
) -> list[tuple[Parameters, list[Group]]]:
    """Where fits begin, and what each fits: parameters on their own, or the latencies of calls by one factor."""
    latencies = tuple(name for name in names if CONSTANTS[name].unit == "s" and not CONSTANTS[name].min_constant)
    single: list[Group] = [(name,) for name in names]
    if len(latencies) < 2:
        return [(start, single)]
    # A library takes the protocol that it expects to be the fastest. If every protocol is slower on the measured
    # machine, a higher latency of one alone makes the library take another one, and nothing is gained. A local fit
    # ends there, and a rate that all protocols share takes the error. So another fit begins with all of them higher.
    together = min([start, *_multiplied(start, latencies, _MULTIPLES_TOGETHER)], key=distance)
    # The same happens where rows do not identify the latency of one protocol: it keeps its value, which makes the
    # library take this protocol. So in a third fit the latencies of all protocols have one factor.
    grouped = [group for group in single if group[0] not in latencies]
    return [(start, single), (together, single), (together, [*grouped, latencies])]


def _multiplied(parameters: Parameters, names: Sequence[str], factors: Sequence[float]) -> list[Parameters]:
    """The parameters with some of them times each of the factors."""
    return [changed(parameters, {name: Change(factor) for name in names}) for factor in factors]


def _findings(
    start: Parameters, begin: Parameters, groups: Sequence[Group], predict: Predict, times_s: FloatArray,
    progress: ProgressCallback,
) -> dict[str, Finding]:  # fmt: skip
    """The findings of a fit that begins at `begin`. What is not identifiable keeps its value in `start`.

    The first parameter of each group is fitted; the others keep their ratio to it in `start`.
    """
    chosen, findings = list(groups), dict[str, Finding]()
    ratios = {name: start.numbers[name] / start.numbers[group[0]] for group in groups for name in group}

    def fitted(chosen: Sequence[Group], begin: Parameters) -> dict[str, Estimate]:
        def predict_with(values: FloatArray) -> FloatArray:
            of_groups = dict(zip(chosen, values.tolist(), strict=True))
            tried = {name: value * ratios[name] for group, value in of_groups.items() for name in group}
            return predict(changed(begin, tried))

        # a little above the smallest possible value, at which a parameter has no effect
        least = {name: 1.05 * begin.numbers.get(CONSTANTS[name].min_constant, 0.0) for name, *_ in chosen}
        return fit(predict_with, times_s, {name: max(begin.numbers[name], least[name]) for name in least}, progress)

    while chosen:
        if len(times_s) > len(chosen):
            progress(f"fitting {', '.join(' with '.join(group) for group in chosen)} to {len(times_s)} rows")
        estimates = fitted(chosen, begin)
        for group in chosen:
            value, low, high, why = estimates[group[0]]
            origin = f", one factor for {', '.join(group)}" if len(group) > 1 else ""
            for name in group:
                scaled = value * ratios[name], low * ratios[name], high * ratios[name]
                findings[name] = Finding(name, start.numbers[name], *scaled, why, origin)
        unsure = [group for group in chosen if not findings[group[0]].identifiable]
        if not unsure:
            break
        # without the one that is least sure, others may be identifiable; of equal ones the last is left out
        chosen.remove(max(reversed(unsure), key=lambda group: findings[group[0]].width))
        begin = changed(start, {name: findings[name].value for group in chosen for name in group})
    return findings


def _origin(cases: Sequence[Case], effect: FloatArray) -> str:
    """The tables whose predicted times depend on a constant."""
    ends = np.cumsum([len(case.rows) for case in cases])
    parts = zip(cases, np.split(np.abs(effect), ends[:-1]), strict=True)
    return ", ".join(
        f"{Path(case.table.name).name} ({len(case.rows)} row{'s' * (len(case.rows) > 1)}, {case.collective})"
        for case, part in parts
        if part.max() >= NO_EFFECT
    )
