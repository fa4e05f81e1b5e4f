"""What each change buys: the time on another machine, or with other parameters or another layer, over the time as is.

``compare`` asks the same question with each change, and takes its recommendation there::

    found = compare("h100-4x8", layer, versus=["nic.bandwidth=x0.5", "gb200-8x4"])
    [(each.change, each.ratio, each.low, each.high) for each in found.versus]

The interval of a ratio, 5 to 95 %, has two parts. The samples of parameters are common: equal names have equal draws
on both sides. Beside them, where both sides have the same accelerator and library, errors of the kernel and the network
are shared, and only what `tasp_lab.prediction.paired` counts is left: with one schedule the different shares of time in
messages. Otherwise the errors of two machines are independent (`tasp_lab.prediction.residuals`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tasp_lab.core.tables import Table
from tasp_lab.core.units import format_factor, format_time
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import FEW_SAMPLES
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.evaluate import answer
from tasp_lab.prediction.inputs import MachineLike
from tasp_lab.prediction.interval import DECIDED, Interval, quantile
from tasp_lab.prediction.paired import paired_errors, setting_of
from tasp_lab.prediction.recommend import Recommendation

UNCHANGED = 0.005
"""A time that changes by less than this share is named with its bottleneck instead."""

WITHOUT = "without "
"""How a change begins that removes a part of the machine, as in ``without nic.3``."""

TIMES = 2.0
"""A change is shown in percent if its interval is within this factor, else as a factor."""


@dataclass(frozen=True)
class Versus:
    """One change: its recommended schedule beside that as is.

    Parameters
    ----------
    change : as it was given.
    base, answer : the recommended answers as is and with the change; None if no schedule applies with it.
    ratio, low, high : the time with the change over the time as is, and its interval.
    reason : why no schedule applies.
    """

    change: str
    base: Answer
    answer: Answer | None
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str = ""

    @classmethod
    def of(cls, change: str, base: Recommendation, other: Recommendation | None, reason: str = "") -> Versus:
        """A change beside the question as is; `other` is None, for a `reason`, if no schedule applies with it.

        The schedule stays if its expected regret with the change is within `DECIDED` of the least.
        """
        if other is None:
            return cls(change, base.answer, None, reason=reason)
        most = min(other.expected_regrets) + DECIDED
        regrets = zip(other.answers, other.expected_regrets, strict=True)
        same = [each for each, regret in regrets if each.schedule == base.schedule and regret <= most]
        changed = same[0] if same else other.answer
        return cls(change, base.answer, changed, *ratio_of(changed, base.answer))

    @property
    def bottleneck(self) -> str:
        """What the time with the change is mostly spent on; empty if no schedule applies."""
        return "" if self.answer is None else self.answer.bottleneck

    @property
    def text(self) -> str:
        """What the change does to the time, like ``+12% (8 to 17)`` or ``1.9x as fast (1.5x to 2.4x)``."""
        if self.answer is None:
            return "does not apply"
        if abs(self.ratio - 1) < UNCHANGED:
            return f"nothing: bound by {self.bottleneck}"
        if self.low > 1 / TIMES and self.high < TIMES:
            shares = [100 * (each - 1) for each in (self.ratio, self.low, self.high)]
            digits = 0 if max(map(abs, shares)) >= 10 else 1
            change, low, high = (f"{each:.{digits}f}" for each in shares)
            return f"{'+' if self.ratio > 1 else ''}{change}% ({low} to {high})"
        if self.ratio > 1:
            return f"{format_factor(self.ratio)} slower ({format_factor(self.low)} to {format_factor(self.high)})"
        ratio, low, high = (format_factor(1 / each) for each in (self.ratio, self.high, self.low))
        return f"{ratio} as fast ({low} to {high})"

    @property
    def record(self) -> dict[str, object]:
        """An object of the field `versus` of ``--json``; numbers are null if no schedule applies."""
        found = self.answer
        applies = found is not None
        return {
            "change": self.change,
            "topology": found.topology if found else None,
            "schedule": found.schedule if found else None,
            "time_s": float(found.time_s) if found else None,
            "ratio": self.ratio if applies else None,
            "ratio_low": self.low if applies else None,
            "ratio_high": self.high if applies else None,
            "bottleneck": self.bottleneck or None,
            "text": self.text,
            "reason": self.reason or None,
        }


def change_name(change: MachineLike) -> str:
    """A change in words: overrides and missing parts as they are, a machine by its name."""
    if isinstance(change, str):
        return change
    return (change.topology if isinstance(change, Machine) else change).name


def is_change(text: str) -> bool:
    """Whether a text changes the machine or the layer, rather than naming another machine."""
    return "=" in text or text.startswith(WITHOUT)


def changed_question(
    change: MachineLike, machine: MachineLike, overrides: Sequence[str], without: Sequence[str] = ()
) -> tuple[MachineLike, dict[str, tuple[str, ...]]]:
    """The machine, the overrides and the missing parts of a question with a change.

    >>> changed_question("nic.bandwidth=x2, without nic.3", "h100-2x8", ("layer.kv_heads=4",))[1]
    {'overrides': ('layer.kv_heads=4', 'nic.bandwidth=x2'), 'without': ('nic.3',)}
    >>> changed_question("b200-2x8", "h100-2x8", ("nic.bandwidth=x2", "layer.kv_heads=4"))
    ('b200-2x8', {'overrides': ('layer.kv_heads=4',), 'without': ()})
    """
    if isinstance(change, str) and is_change(change):
        texts = [each.strip() for each in change.split(",")]
        parts = [each.removeprefix(WITHOUT).strip() for each in texts if each.startswith(WITHOUT)]
        added = [each for each in texts if not each.startswith(WITHOUT)]
        return machine, {"overrides": (*overrides, *added), "without": (*without, *parts)}
    return change, {"overrides": tuple(each for each in overrides if each.startswith("layer.")), "without": ()}


def ratio_of(changed: Answer, base: Answer) -> tuple[float, float, float]:
    """The time of an answer over that of another one, and the 5 and 95 % points of the ratio."""
    ratio = float(changed.time_s / base.time_s)
    machines = [each.on for each in (changed, base)]
    settings = [setting_of(each) for each in machines]
    if (changed.schedule == base.schedule and ratio == 1.0) or settings == ["exact", "exact"]:
        return ratio, ratio, ratio
    intervals = [_interval(each) for each in (changed, base)]
    samples_s = [np.zeros(0) if each is None else each.samples_s for each in intervals]
    are_sampled = 0 < len(samples_s[0]) == len(samples_s[1])
    centres = np.array([math.log(ratio)])
    if are_sampled:  # common samples, around the ratio that is predicted
        logs = np.log(samples_s[0] / samples_s[1])
        centres = logs - np.median(logs) + math.log(ratio)
    kernels_and_network = [(each.accelerator, each.comm_library.name) for each in machines]
    if kernels_and_network[0] == kernels_and_network[1]:  # their errors are shared
        one, two = changed.rival, base.rival
        if changed.schedule == base.schedule:  # and the own error of a schedule is in both times
            one = one._replace(time_s=two.time_s)
        spread = max(paired_errors().spread(one, two, setting) for setting in settings)
    else:
        residuals = [each.residual for each in intervals if each is not None]
        spread = math.hypot(*(each.beside if are_sampled else each.spread for each in residuals))
    low, high = (math.exp(quantile(centres, spread, share)) for share in (0.05, 0.95))
    return ratio, min(low, ratio), max(high, ratio)


def _interval(found: Answer) -> Interval | None:
    """The interval of an answer with samples of the parameters; None on ideal links."""
    if found.interval is None or not len(found.interval.samples_s):
        found = answer(replace(found.question, sampling=FEW_SAMPLES))
    return found.interval


def versus_table(found: Sequence[Versus]) -> Table:
    """The table of changes."""
    rows = []
    for each in found:
        named = ("-", "-") if each.answer is None else (each.answer.schedule, format_time(float(each.answer.time_s)))
        rows.append((each.change, *named, each.text, each.reason or each.bottleneck))
    base = found[0].base
    title = f"what each change buys, over {base.schedule} as is, {format_time(float(base.time_s))}"
    return Table(title, ("change", "schedule", "time", "change of the time", "bottleneck"), rows, (0, 1, 3, 4))
