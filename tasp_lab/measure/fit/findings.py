"""Findings: what a calibration determines of each constant, and the profile that follows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.machine import Constant
from tasp_lab.machines.profile import Profile
from tasp_lab.measure.fit.robust_fit import Parameter


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
    identifiable: bool = True
    why: str = ""
    origin: str = ""

    @property
    def needs(self) -> str:
        """The measurement that would identify it."""
        return CONSTANTS[self.name].identified_by

    @property
    def width(self) -> float:
        """The ratio of the ends of its interval."""
        return self.high / self.low if self.low else math.inf


def fitted(profile: Profile, name: str, found: Parameter, origin: str) -> Finding:
    """The finding of a fitted constant."""
    before = profile.number(name)
    return Finding(name, before, found.value, found.low, found.high, found.identifiable, found.why, origin)


def not_fitted(profile: Profile, name: str, why: str) -> Finding:
    """The finding of a constant that keeps its value."""
    before = profile.number(name)
    return Finding(name, before, before, 0.0, math.inf, identifiable=False, why=why)


def reasons(findings: Iterable[Finding]) -> str:
    """Why constants are not identifiable, each reason once."""
    names: dict[str, list[str]] = {}
    for finding in findings:
        names.setdefault(finding.why, []).append(finding.name)
    return "; ".join(f"{', '.join(group)}: {why}" for why, group in names.items())


def with_numbers(profile: Profile, values: Iterable[tuple[str, float]]) -> Profile:
    """The profile with other values of constants, clamped to what is possible (`Profile.clamped`)."""
    texts = {name: CONSTANTS[name].format(profile.clamped(name, float(value)), 17) for name, value in values}
    return replace(
        profile,
        constants=tuple(
            profile.restated(constant, texts[constant.name], constant.source) if constant.name in texts else constant
            for constant in profile.constants
        ),
    )


def with_findings(profile: Profile, findings: Iterable[Finding], date: str) -> Profile:
    """The profile with the identifiable ones of these constants. Their sources name the measurements and the date."""
    new = {finding.name: finding for finding in findings if finding.identifiable}

    def constant(old: Constant) -> Constant:
        if old.name not in new:
            return old
        spec, found = CONSTANTS[old.name], new[old.name]
        value = spec.format(profile.clamped(old.name, found.value))
        low, high = (spec.format(end, 4) for end in (found.low, found.high))
        new_one = profile.restated(old, value, f"fitted to {found.origin}, 95 % {low} to {high}, on {date}")
        holds = spec.parse(low) <= spec.parse(value) <= spec.parse(high)
        return replace(new_one, low=low, high=high) if holds else new_one

    return replace(profile, constants=tuple(constant(old) for old in profile.constants))
