"""Overrides of the constants of a profile: the machine is made anew from the changed profile.

Constants that depend on another follow it. Those that are proportional to a line rate do so by `Profile.number`; the
latency of a hop has the wire's in it, so it grows and shrinks by as much as the wire's does. An override of a constant
that follows another is applied after it has followed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from tasp_lab.core.errors import OverrideError
from tasp_lab.machines.constants import CONSTANTS, ConstantSpec
from tasp_lab.machines.machine import Constant
from tasp_lab.machines.overrides.override import Override
from tasp_lab.machines.profile import Profile

_ROUNDING = 1e-9
"""A payload that is its whole line rate stays possible when both are multiplied."""


def overridden_profile(profile: Profile, overrides: Mapping[str, Override]) -> Profile:
    """The profile with overrides of constants that it has, by name. Raises `OverrideError` for impossible values."""
    changed = profile
    for name in (each for each in CONSTANTS if each in overrides):
        changed = _changed(changed, name, overrides[name])
    _check(changed, overrides)
    return changed


def _changed(profile: Profile, name: str, override: Override) -> Profile:
    old = profile.constant(name)
    assert old is not None, "overrides are of constants that the profile has"
    before_s = profile.number(name)
    changed = profile.with_constant(_constant(profile, old, before_s, override))
    for follower in _including(changed, name):
        moved_s = changed.number(name) + (changed.number(follower.name) - before_s)
        changed = changed.with_constant(_followed(changed, follower, moved_s, override))
    return changed


def _constant(profile: Profile, old: Constant, before: float, override: Override) -> Constant:
    """A constant with its new value; the text of the old one stays where the number does."""
    spec = CONSTANTS[old.name]
    text, source = override.text(before, spec.quantity), override.source(spec.format(before), old.source)
    if spec.parse(text) == before:
        return replace(old, source=source)
    new = profile.restated(old, text, source)
    return new if override.change.kind == "to" else _with_interval(new, old, spec)


def _with_interval(new: Constant, old: Constant, spec: ConstantSpec) -> Constant:
    """The new constant with the interval that the old one states, as wide as it was beside the value."""
    before, after = spec.parse(old.value), spec.parse(new.value)
    if not old.low or not before:
        return new
    low, high = (spec.format(spec.parse(end) * after / before, 15) for end in (old.low, old.high))
    return replace(new, low=low, high=high)


def _including(profile: Profile, name: str) -> list[Constant]:
    """The latencies of hops that have a wire's latency in them."""
    return [each for each in profile.constants if CONSTANTS[each.name].min_constant == name]


def _followed(profile: Profile, constant: Constant, number_s: float, override: Override) -> Constant:
    spec, was_s = CONSTANTS[constant.name], profile.number(constant.name)
    if number_s == was_s:
        return constant
    source = f"follows {override.name} {override.change.text}, was {spec.format(was_s)} ({constant.source})"
    assumed = "assumed: " if constant.source.startswith("assum") else ""
    moved = profile.restated(constant, spec.format(max(number_s, 0.0), 15), assumed + source)
    return _with_interval(moved, constant, spec)


def _check(profile: Profile, overrides: Mapping[str, Override]) -> None:
    """Raise `OverrideError` where an override lets a payload exceed its line rate, or a hop beat the wire."""
    for constant in profile.constants:
        value, spec = profile.number(constant.name), CONSTANTS[constant.name]
        possible = profile.clamped(constant.name, value)
        if math.isclose(possible, value, rel_tol=_ROUNDING, abs_tol=1e-15):
            continue
        other = spec.depends_on if value > possible else spec.min_constant
        why = ", ".join(str(overrides[name]) for name in (constant.name, other) if name in overrides)
        limit = f"expected at {'most' if value > possible else 'least'} {spec.format(possible)}, {other}"
        raise OverrideError(f"override {why}: {constant.name} would be {spec.format(value)}, {limit}")
