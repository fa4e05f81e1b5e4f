"""Findings: what a calibration determines of each parameter, and the parameters that follow."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.parameters import Change, Parameters, changed
from tasp_lab.measure.fit.robust_fit import Estimate


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


def fitted(parameters: Parameters, name: str, found: Estimate, origin: str) -> Finding:
    """The finding of a fitted parameter."""
    before = parameters.numbers[name]
    return Finding(name, before, found.value, found.low, found.high, found.identifiable, found.why, origin)


def not_fitted(parameters: Parameters, name: str, why: str) -> Finding:
    """The finding of a parameter that keeps its value."""
    before = parameters.numbers[name]
    return Finding(name, before, before, 0.0, math.inf, identifiable=False, why=why)


def reasons(findings: Iterable[Finding]) -> str:
    """Why constants are not identifiable, each reason once."""
    names: dict[str, list[str]] = {}
    for finding in findings:
        names.setdefault(finding.why, []).append(finding.name)
    return "; ".join(f"{', '.join(group)}: {why}" for why, group in names.items())


def with_findings(parameters: Parameters, findings: Iterable[Finding], date: str) -> Parameters:
    """The parameters with the identifiable ones of these. Their sources name the measurements and the date."""
    found = parameters
    for finding in (each for each in findings if each.identifiable and each.name in parameters):
        spec = CONSTANTS[finding.name]
        possible = changed(found, {finding.name: Change(0, finding.value)}).numbers[finding.name]
        # as a file of the profile states them
        value, low, high = spec.rounded(possible, 6), spec.rounded(finding.low, 4), spec.rounded(finding.high, 4)
        found = changed(found, {finding.name: Change(0, value)}, clamp=False)
        source = f"fitted to {finding.origin}, 95 % {spec.format(finding.low, 4)} to {spec.format(finding.high, 4)}"
        new = replace(found[finding.name], source=f"{source}, on {date}")
        found = found.with_parameters([replace(new, low=low, high=high) if low <= value <= high else new])
    return found
