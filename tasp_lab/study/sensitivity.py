"""Sensitivity: which parameters of a machine change a result of a study, or its ranking, within their intervals::

    find_sensitivity(study.points(), {"at": "h100-8x8,128Ki", "of": "time"})

A factor is one uncertain parameter: how far it may be from its value, and which measurement would identify it. All
compute rates and kernel parameters are one factor, `COMPUTE`, as in samples (`tasp_lab.machines.sampling`).
One factor at a time takes both of its ends. Rings stay those that are fastest with all parameters unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import StudyError, first_line, unknown
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import View
from tasp_lab.core.tables import Formats, Part, Table, cells_of
from tasp_lab.core.units import format_flops, format_time
from tasp_lab.machines.change import COMPUTE, change
from tasp_lab.machines.compute import COMPUTE_RATES
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.intervals import default_width, dimension, log_ends, source_kind
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.machines.overrides import overridden_layer
from tasp_lab.machines.parameters import Change
from tasp_lab.machines.sampling import rate_ends
from tasp_lab.prediction.evaluate import answer
from tasp_lab.prediction.inputs import with_host
from tasp_lab.prediction.passes import PassAnswer
from tasp_lab.prediction.question import prepared
from tasp_lab.study.axis import parse_share
from tasp_lab.study.lookup import fields_of, one_point_at
from tasp_lab.study.point import Point, passes_of
from tasp_lab.workload.layer import Workload

SETTLES_COMPUTE = "a table of kernel times: calibrate --kernels"

BY_SOURCE = "source interval"
_BY = re.compile(rf"{BY_SOURCE}(?:, else (?P<width>[0-9.]+%))?|(?P<all>[0-9.]+%)")

MAX_SOURCE = 80
"""Characters of a source in the table; ``--json`` has all of it."""

# -------------------------------------------------------------------------------------- uncertain constants as factors

Factor = dict[str, Any]
"""An uncertain constant as ``--json`` has it: ``constant``, its name; ``range``, its interval for people;
``factor_low`` and ``factor_high``, its 5 and 95 % points over its value; ``source``; ``assumed``; ``settled_by``, the
measurement that identifies it, None where none is known."""


@dataclass(frozen=True)
class Width:
    """Which intervals constants have: those that their files state or their sources give, or one width.

    `otherwise` is the relative width of constants whose file states no interval, None for that of the kind of their
    source; with `all` it is that of all uncertain ones.

    >>> Width.parse("source interval, else 20%"), Width.parse("20%").all
    (Width(otherwise=0.2, all=False), True)
    """

    otherwise: float | None = None
    all: bool = False

    @staticmethod
    def parse(text: str) -> Width:
        """The width of a text. Raises `StudyError`."""
        found = _BY.fullmatch(" ".join(text.split()))
        if found is None:
            raise StudyError(f"by {text!r}: expected {BY_SOURCE!r}, '{BY_SOURCE}, else 20%', or a width like 20%")
        share = found["width"] or found["all"]
        return Width(None if share is None else parse_share("by", share), found["all"] is not None)

    def ends(self, own: tuple[float, float], stated: bool) -> tuple[float, float]:
        """The logarithms of both ends of a constant that has these by its source, over its value."""
        if self.otherwise is None or (stated and not self.all):
            return own
        return -math.log1p(self.otherwise), math.log1p(self.otherwise)


def factors_of(machine: Machine, layer: Workload, passes: Pass, width: Width = Width()) -> list[Factor]:
    """The uncertain constants on which a machine depends, as its recipe makes it, and its compute rate.

    A constant that leaves topology and library as they are is left out: the machine does not use it.
    """
    found = list[Factor]()

    def add(name: str, ends: tuple[float, float], text: Callable[[float], str], source: str, **rest: object) -> None:
        low, high = map(math.exp, ends)
        texts = {"constant": name, "range": f"{text(low)} to {text(high)}"}
        found.append({**texts, "factor_low": low, "factor_high": high, "source": source, **rest})

    def matters(name: str, ends: tuple[float, float]) -> bool:
        there = (changed(machine, {name: math.exp(end)}) for end in ends)
        return any(end.topology != machine.topology or end.comm_library != machine.comm_library for end in there)

    for constant in () if machine.system is None else machine.parameters.values():
        if constant.name in COMPUTE_RATES or constant.name not in machine.parameters.numbers:
            continue
        spec, ends = CONSTANTS[constant.name], log_ends(constant)
        kind = dimension(spec)
        # a source may leave a constant uncertain whose file states that it is exact
        by_kind = kind is not None and default_width(kind, constant.source) > 0 and width.otherwise is not None
        if ends != (0.0, 0.0) or by_kind:
            ends = width.ends(ends, constant.low is not None)
        if ends != (0.0, 0.0) and matters(constant.name, ends):
            number, written = constant.number, spec.format
            assumed = source_kind(constant.source) == "assumed"
            add(constant.name, ends, lambda factor: written(number * factor, 4), constant.source,  # noqa: B023
                assumed=assumed, settled_by=spec.identified_by or None)  # fmt: skip

    rates = {passing: machine.rate_of(layer, passing) for passing in passes_of(passes)}
    every = [
        width.ends(rate_ends(machine, rate, layer.dtype, passing), _is_stated(machine, rate))
        for passing, rate in rates.items()
        if rate.flops_per_s is not None
    ]
    # the rates of both passes move together, by the wider interval
    widest = min((low for low, _ in every), default=0.0), max((high for _, high in every), default=0.0)
    if widest != (0.0, 0.0):
        rate_of, *_ = (float(rate.flops_per_s or math.inf) for rate in rates.values())
        sources = "; ".join(dict.fromkeys(rate.source for rate in rates.values()))
        assumed = any(rate.assumed for rate in rates.values())
        add(COMPUTE, widest, lambda factor: format_flops(rate_of * factor), sources, assumed=assumed,
            settled_by=SETTLES_COMPUTE)  # fmt: skip
    return found


def changed(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The machine with constants times factors."""
    return change(machine, {name: Change(factor) for name, factor in factors.items() if factor != 1})


def _is_stated(machine: Machine, rate: ComputeRate) -> bool:
    """Whether a file states the interval of a rate: that of its kernel, or that of the machine's constant."""
    return rate.interval is not None or any(
        constant.low is not None and constant.source == rate.source for constant in machine.parameters.values()
    )


# -------------------------------------------------------------------------------------------------- effects of factors

Times = Mapping[str, float]
"""The times of schedules in seconds, by name."""


def fastest(times_s: Times) -> str:
    """The fastest schedule, the first of equal ones."""
    return min(times_s, key=lambda name: times_s[name])


def answer_of(times_s: Times, schedules: Sequence[str]) -> float:
    """The time of one schedule, or the speed-up of the first over the second."""
    return times_s[schedules[0]] if len(schedules) < 2 else times_s[schedules[1]] / times_s[schedules[0]]


def one_at_a_time(
    factors: Sequence[Factor],
    times_of: Callable[[Mapping[str, float]], Times],
    base: Times,
    schedules: Sequence[str],
) -> list[dict[str, Any]]:
    """What each factor does at both ends, all others as they are, the largest effect first; 2 evaluations each.

    `times_of` takes factors by the names of constants; `base` are the times without any. ``effect`` is the largest
    logarithm of the change of the answer of `schedules`, without a sign.
    """
    records = list[dict[str, Any]]()
    for factor in factors:
        low, high = (times_of({factor["constant"]: factor[end]}) for end in ("factor_low", "factor_high"))
        values, winners = [answer_of(end, schedules) for end in (low, high)], [fastest(low), fastest(high)]
        effects = {
            "value_at_low": values[0],
            "value_at_high": values[1],
            "effect": max(abs(math.log(value / answer_of(base, schedules))) for value in values),
            "fastest_at_low": winners[0],
            "fastest_at_high": winners[1],
            "changes_fastest": any(winner != fastest(base) for winner in winners),
        }
        records.append(factor | effects)
    return sorted(records, key=lambda record: -record["effect"])


# ---------------------------------------------------------------------------------------------------------- the answer

OF = ("speedup", "time")

FIELDS: Mapping[str, object] = {"of": "speedup", "by": BY_SOURCE, "top": 5, "at": "", "between": ()}
"""Fields of the section ``[find] sensitivity`` of a study, and what they are where they are not given."""


def find_sensitivity(
    points: Iterable[Point],
    find: Mapping[str, object],
    baseline: str | None = None,
    progress: ProgressCallback = no_progress,
) -> View:
    """Which constants move an answer: a row per constant, the largest effect first.

    Parameters
    ----------
    points : of a study.
    find : fields, see `FIELDS`: the answer ``of`` which, the ``time`` of a schedule or the ``speedup`` of the first of
        the schedules ``between`` which over the second, by default of the first schedule of the study over its
        `baseline`; ``at`` which point (`tasp_lab.study.lookup.one_point_at`); ``by`` which intervals of constants
        (`Width`); and how many constants the ``top`` of the table has.

    Raises `StudyError` for an unknown field and an impossible value, and for a schedule that is not among the points or
    does not apply, with its reason; and `TaspLabError` for a machine or a layer that does not exist.
    """
    fields = fields_of("sensitivity", FIELDS, find)
    pair, of, top = fields["between"], fields["of"], fields["top"]
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) not in (0, 1, 2):
        raise StudyError(f"between {pair!r}: expected one schedule, or two")
    if len(pair) == 2 and pair[0] == pair[1]:
        raise StudyError(f"between {pair[0]!r} and itself, expected two schedules")
    if of not in OF:
        raise StudyError(unknown("of", str(of), OF))
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise StudyError(f"top: {top!r}, expected 1 or more")
    width = Width.parse(str(fields["by"]))
    points = one_point_at(points, str(fields["at"]))
    names, point = _schedules(points, tuple(map(str, pair)), of, baseline), points[0]
    layer = overridden_layer(point.layer, point.overrides)
    machine = prepared(point).machine_for(layer)
    passes, refused = dict[str, tuple[PassAnswer, ...]](), dict[str, str]()
    for each in points:
        if pair and each.schedule not in names:
            continue
        answered = answer(each)
        if answered.applies:
            passes[each.name] = answered.passes  # with the rings that are fastest there
        elif answered.error is not None:
            refused[each.name] = first_line(answered.error)
    for name in names:
        if name in refused:
            raise StudyError(f"schedule {name!r} does not apply at {where_of(point)}: {refused[name]}")

    def times_of(factors: Mapping[str, float]) -> Times:
        """The times of all schedules with these factors."""
        now = changed(machine, factors)

        # A schedule may run on another host model than the machine's; factors are those of the machine.
        def time_s(one: PassAnswer) -> float:
            on = now if one.machine.host == machine.host else with_host(now, one.machine.host)
            return float(one.on(on).time_s)

        return {name: sum(map(time_s, answers)) for name, answers in passes.items()}

    def shown(value: float) -> str:
        return format_time(value) if len(names) == 1 else f"{value:.3g}x"

    factors, base = factors_of(machine, layer, point.options.passes, width), times_of({})
    value, what = answer_of(base, names), "time" if len(names) == 1 else "speed-up"
    title = f"{what} of {' over '.join(names)} is {shown(value)} at {where_of(point)}, fastest: {fastest(base)}"
    progress(f"constants at both ends: {len(factors)}, in {2 * len(factors) * len(passes)} predictions")
    records = one_at_a_time(factors, times_of, base, names)

    def winners(record: Mapping[str, Any]) -> str:
        ends = dict.fromkeys((record["fastest_at_low"], record["fastest_at_high"]))
        return " .. ".join(ends) if record["changes_fastest"] else "the same"

    def origin(record: Mapping[str, Any]) -> str:
        text = ("ASSUMED: " if record["assumed"] else "") + re.sub(r"^assum\w*:? ", "", record["source"])
        return shorten(text, MAX_SOURCE, placeholder=" ...")

    columns: Formats = {
        "constant": "{constant}",
        "range": "{range}",
        f"{what} becomes": lambda row: f"{shown(row['value_at_low'])} .. {shown(row['value_at_high'])}",
        "fastest": winners,
        "source": origin,
        "would settle it": "{settled_by}",
    }
    document = {
        "at": dict(point.labels) | {"machine": point.machine, "seq": point.layer.sequence},
        "of": of,
        "schedules": list(names),
        "value": value,
        "times_s": dict(base),
        "fastest": fastest(base),
        "constants": records,
        "refused": refused,
    }
    parts: list[Part] = [
        Table(title, tuple(columns), [cells_of(record, columns) for record in records[:top]], range(6))
    ]
    if (rest := len(records) - top) > 0:
        parts.append(f"{rest} more constants have smaller effects; --top {rest + top} lists all")
    if not records:
        parts.append("no constant on which the machine depends has an interval")
    parts += [f"{name} does not apply: {reason}" for name, reason in refused.items()]
    return View(document, records, parts)


def _schedules(points: Sequence[Point], between: tuple[str, ...], of: str, baseline: str | None) -> tuple[str, ...]:
    """The schedule, and for a speed-up the one that it is over."""
    known = list(dict.fromkeys(point.schedule for point in points))
    others = [name for name in known if name != baseline]
    given = between or tuple(others[:1] or known[:1])
    if len(given) < 2 and of == "speedup":
        given += (baseline,) if baseline else tuple(others[1:2])
    for name in given:
        if name not in known:
            raise StudyError(f"{unknown('schedule', name, known)} at this point")
    if of == "time":
        return given[:1]
    if len(given) < 2 or given[0] == given[1]:
        expected = "a baseline of the study, --between A --between B, or --of time"
        raise StudyError(f"a speed-up needs two schedules, expected {expected}")
    return given


def where_of(point: Point) -> str:
    """The axes of a point but its schedule, on one line."""
    labels = [f"{name} {value}" for name, value in point.labels if name not in ("schedule", "variant")]
    return ", ".join(labels) or f"{point.machine}, seq {point.layer.sequence}"
