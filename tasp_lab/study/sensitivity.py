"""Sensitivity: which parameters of a machine change a result of a study, or its ranking, within their intervals::

    find_sensitivity(one_point_at(study.points(), "h100-8x8,128Ki"), SensitivityQuestion(of="time"))

A factor is one uncertain parameter: how far it may be from its value, and which measurement would identify it. All
compute rates and kernel parameters are one factor, `COMPUTE`, as in samples (`tasp_lab.machines.sampling`).
Either one factor at a time takes both of its ends, or all vary together by a Sobol design. Rings stay those that are
fastest with all parameters unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import StudyError, first_line, unknown
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.tables import Part, Table
from tasp_lab.core.units import format_flops, format_time
from tasp_lab.machines.compute import COMPUTE_RATES
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.intervals import default_width, dimension, log_ends, source_kind
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.machines.overrides import overridden_layer
from tasp_lab.machines.parameters import Parameter
from tasp_lab.machines.sampling import Sampling, log_normal, rate_ends, varied
from tasp_lab.prediction.answer import PassAnswer, answer
from tasp_lab.prediction.question import prepared
from tasp_lab.study.axis import parse_share
from tasp_lab.study.frames import needed
from tasp_lab.study.point import Point
from tasp_lab.study.table import View
from tasp_lab.workload.kernel_shapes import Passing
from tasp_lab.workload.layer import Workload

# -------------------------------------------------------------------------------------- uncertain constants as factors

COMPUTE = "compute.rate"
SETTLES_COMPUTE = "a table of kernel times: calibrate --kernels"

BY_SOURCE = "source interval"
_BY = re.compile(rf"{BY_SOURCE}(?:, else (?P<width>[0-9.]+%))?|(?P<all>[0-9.]+%)")

MAX_SOURCE = 80
"""Characters of a source in the table; ``--json`` has all of it."""

PASSES: Mapping[Pass, tuple[Passing, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "both": ("forward", "backward"),
}


@dataclass(frozen=True)
class Factor:
    """One constant.

    Parameters
    ----------
    name : of the constant.
    low, high : the logarithms of factors at its 5 and 95 % points, at most 0 and at least 0.
    text : its interval for people.
    source : where its value comes from.
    assumed : whether that is an assumption.
    settled_by : the measurement that identifies it; empty where none is known.
    """

    name: str
    low: float
    high: float
    text: str
    source: str
    assumed: bool
    settled_by: str = ""

    def to_dict(self) -> dict[str, object]:
        """The factor in JSON."""
        return {
            "constant": self.name,
            "range": self.text,
            "factor_low": math.exp(self.low),
            "factor_high": math.exp(self.high),
            "source": self.source,
            "assumed": self.assumed,
            "settled_by": self.settled_by or None,
        }

    @property
    def origin(self) -> tuple[str, str]:
        """For people: the source, and the measurement that would settle the constant."""
        text = ("ASSUMED: " if self.assumed else "") + re.sub(r"^assum\w*:? ", "", self.source)
        return shorten(text, MAX_SOURCE, placeholder=" ..."), self.settled_by or "-"


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
        """The ends of a constant that has these by its source."""
        if self.otherwise is None or (stated and not self.all):
            return own
        return -math.log1p(self.otherwise), math.log1p(self.otherwise)


OWN_WIDTHS = Width()
"""Each constant has the interval that its file states or its source gives."""


def factors_of(machine: Machine, layer: Workload, passes: Pass, width: Width = OWN_WIDTHS) -> list[Factor]:
    """The uncertain constants on which a machine depends, as its recipe makes it, and its compute rate.

    A constant that leaves topology and library as they are is left out: the machine does not use it.
    """
    return [*_of_constants(machine, width), *_of_compute(machine, layer, passes, width)]


def changed(machine: Machine, logs: Mapping[str, float]) -> Machine:
    """The machine with constants times factors, which are given as logarithms."""
    constants = {name: math.exp(log) for name, log in logs.items() if name != COMPUTE and log}
    found = varied(machine, constants) if constants else machine
    rate = logs.get(COMPUTE, 0.0)
    return replace(found, compute=found.compute.scaled(math.exp(rate))) if rate else found


def _of_constants(machine: Machine, width: Width) -> Iterator[Factor]:
    if machine.system is None:
        return
    for constant in machine.parameters.values():
        if constant.name in COMPUTE_RATES or constant.name not in CONSTANTS:
            continue
        own = log_ends(constant)
        uncertain = own != (0.0, 0.0) or (_has_width(constant) and width.otherwise is not None)
        low, high = width.ends(own, constant.low is not None) if uncertain else own
        if (low, high) != (0.0, 0.0) and _matters(machine, constant, low, high):
            yield _of_constant(constant, low, high)


def _has_width(constant: Parameter) -> bool:
    """Whether a constant is uncertain by what it is and by its source, though it may state no interval."""
    found = dimension(CONSTANTS[constant.name])
    return found is not None and default_width(found, constant.source) > 0


def _matters(machine: Machine, constant: Parameter, low: float, high: float) -> bool:
    ends = (changed(machine, {constant.name: end}) for end in (low, high))
    return any(end.topology != machine.topology or end.comm_library != machine.comm_library for end in ends)


def _of_constant(constant: Parameter, low: float, high: float) -> Factor:
    spec, value = CONSTANTS[constant.name], constant.number
    ends = [spec.format(value * math.exp(end), 4) for end in (low, high)]
    assumed = source_kind(constant.source) == "assumed"
    return Factor(constant.name, low, high, " to ".join(ends), constant.source, assumed, spec.identified_by)


def _of_compute(machine: Machine, layer: Workload, passes: Pass, width: Width) -> Iterator[Factor]:
    """The widest interval of the rates of the passes, which move together."""
    rates = {passing: machine.rate_of(layer, passing) for passing in PASSES[passes]}
    ends = [
        width.ends(rate_ends(machine, rate, layer.dtype, passing), _is_stated(machine, rate))
        for passing, rate in rates.items()
        if rate.flops_per_s is not None
    ]
    low, high = min((end for end, _ in ends), default=0.0), max((end for _, end in ends), default=0.0)
    if (low, high) != (0.0, 0.0):
        sources = "; ".join(dict.fromkeys(rate.source for rate in rates.values()))
        assumed = any(rate.assumed for rate in rates.values())
        yield Factor(
            COMPUTE, low, high, _rate_text(next(iter(rates.values())), low, high), sources, assumed, SETTLES_COMPUTE
        )


def _is_stated(machine: Machine, rate: ComputeRate) -> bool:
    """Whether a file states the interval of a rate: that of its kernel, or that of the machine's constant."""
    return rate.interval is not None or any(
        each.low is not None and each.source == rate.source for each in machine.parameters.values()
    )


def _rate_text(rate: ComputeRate, low: float, high: float) -> str:
    """The interval of the first rate."""
    assert rate.flops_per_s is not None, "it has an interval"
    value = float(rate.flops_per_s)
    return " to ".join(format_flops(value * math.exp(end)) for end in (low, high))


# -------------------------------------------------------------------------------------------------- effects of factors

Logs = Mapping[str, float]
"""Logarithms of factors by name; factors that are not named are as they are."""

Times = Mapping[str, float]
"""The times of schedules in seconds, by name."""

NEAREST_END = 1e-6
"""Quantiles of a design are no nearer to 0 and 1 than this."""


def fastest(times_s: Times) -> str:
    """The fastest schedule, the first of equal ones."""
    return min(times_s, key=lambda name: times_s[name])


def answer_of(times_s: Times, schedules: Sequence[str]) -> float:
    """The time of one schedule, or the speed-up of the first over the second."""
    return times_s[schedules[0]] if len(schedules) < 2 else times_s[schedules[1]] / times_s[schedules[0]]


class Effect(NamedTuple):
    """A factor and the times at its two ends, all others as they are."""

    factor: Factor
    at_low: Times
    at_high: Times

    def size(self, base: Times, schedules: Sequence[str]) -> float:
        """The largest logarithm of the change of the answer, without a sign."""
        answer = answer_of(base, schedules)
        return max(abs(math.log(answer_of(end, schedules) / answer)) for end in (self.at_low, self.at_high))

    def changes_fastest(self, base: Times) -> bool:
        """Whether another schedule is the fastest at one of the ends."""
        return any(fastest(end) != fastest(base) for end in (self.at_low, self.at_high))


def one_at_a_time(factors: Sequence[Factor], times_of: Callable[[Logs], Times]) -> list[Effect]:
    """Every factor at both ends: 2 evaluations each."""
    return [Effect(factor, *(times_of({factor.name: end}) for end in (factor.low, factor.high))) for factor in factors]


class SobolIndex(NamedTuple):
    """The share of the variance of an answer that a factor has alone, and with all that it takes part in.

    `first_conf` and `total_conf` are the half widths of their 95 % intervals.
    """

    factor: Factor
    first: float
    first_conf: float
    total: float
    total_conf: float


def check_samples(samples: int) -> None:
    """Raise `StudyError` unless a design of Sobol can have as many samples."""
    if samples < 2 or samples & (samples - 1):
        raise StudyError(f"samples: {samples}, expected a power of two, such as 64")


def sobol(
    factors: Sequence[Factor], answer: Callable[[Logs], float], samples: int, seed: int
) -> tuple[list[SobolIndex], FloatArray]:
    """Sobol indices of factors by a design of Saltelli, and the answers of the design.

    It takes `samples` (k + 2) answers, k being the number of factors. Logarithms of factors are normal with the 5 and
    95 % points of their intervals, each half apart, as in `tasp_lab.machines.sampling`.

    References
    ----------
    A. Saltelli et al., Variance based sensitivity analysis of model output, Computer Physics Communications 181 (2010).

    Raises `StudyError` unless `samples` is a power of two, and `MissingPackageError` without SALib.
    """
    check_samples(samples)
    if not factors:
        return [], np.zeros(0)
    names = [factor.name for factor in factors]
    problem = {"num_vars": len(names), "names": names, "bounds": [[0.0, 1.0]] * len(names)}
    what = "sensitivity by the method sobol"
    design = needed("SALib.sample.sobol", what).sample(problem, samples, calc_second_order=False, seed=seed)
    from scipy.special import ndtri

    normals = ndtri(np.clip(design, NEAREST_END, 1 - NEAREST_END))
    logs = [log_normal(normals[:, place], factor.low, factor.high) for place, factor in enumerate(factors)]
    answers = np.array([answer(dict(zip(names, row.tolist(), strict=True))) for row in np.stack(logs, axis=1)])
    if np.ptp(answers) <= 1e-12 * abs(answers).max():
        return [SobolIndex(factor, 0.0, 0.0, 0.0, 0.0) for factor in factors], answers
    analyze = needed("SALib.analyze.sobol", what).analyze
    # Not the number itself, since SALib takes the seed 0 for none.
    seeds = np.random.SeedSequence(seed)
    found = analyze(problem, answers, calc_second_order=False, seed=seeds, print_to_console=False)
    columns = (found[name] for name in ("S1", "S1_conf", "ST", "ST_conf"))
    return [SobolIndex(factor, *map(float, row)) for factor, *row in zip(factors, *columns, strict=True)], answers


# -------------------------------------------------------------------------------------------------------- the question

Of = Literal["speedup", "time"]
Method = Literal["one-at-a-time", "sobol"]
OFS: tuple[Of, ...] = get_args(Of)
METHODS: tuple[Method, ...] = get_args(Method)

_Text = TypeVar("_Text", bound=str)

FIELDS = ("of", "by", "top", "at", "between", "method", "samples")


@dataclass(frozen=True)
class SensitivityQuestion:
    """Which constants move an answer.

    Parameters
    ----------
    of : the speed-up of the first schedule of `between` over the second, or its time.
    between : these two schedules; empty for the first schedule of the study and its baseline.
    at : the question, see `tasp_lab.study.lookup.one_point_at`.
    width : of the intervals of constants.
    top : as many constants are listed.
    method, samples, seed : the design, see `sobol`.
    """

    of: Of = "speedup"
    between: tuple[str, ...] = ()
    at: str = ""
    width: Width = OWN_WIDTHS
    top: int = 5
    method: Method = "one-at-a-time"
    samples: int = 64
    seed: int = 0


def sensitivity_question(
    find: Mapping[str, object],
    *,
    of: str | None = None,
    between: Sequence[str] = (),
    at: str | None = None,
    by: str | None = None,
    top: int | None = None,
    method: str | None = None,
    samples: int | None = None,
    seed: int = 0,
) -> SensitivityQuestion:
    """The question of a section of a study, with what is given in place of it.

    >>> found = sensitivity_question({"of": "speedup", "by": "source interval, else 20%"}, at="seq=8Ki", top=3)
    >>> found.width.otherwise, found.at, found.top
    (0.2, 'seq=8Ki', 3)

    Raises `StudyError` for an unknown field and an impossible value, `QuantityError` for an impossible seed.
    """
    for name in find:
        if name not in FIELDS:
            raise StudyError(f"find.sensitivity: {unknown('field', name, FIELDS)}")
    pair = between or find.get("between") or ()
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) not in (0, 1, 2):
        raise StudyError(f"between {pair!r}: expected one schedule, or two")
    if len(pair) == 2 and pair[0] == pair[1]:
        raise StudyError(f"between {pair[0]!r} and itself, expected two schedules")
    Sampling(seed=seed)
    chosen = _one_of("method", method or find.get("method", "one-at-a-time"), METHODS)
    count = _count("samples", find.get("samples", 64) if samples is None else samples)
    if chosen == "sobol":
        check_samples(count)
    return SensitivityQuestion(
        _one_of("of", of or find.get("of", "speedup"), OFS),
        tuple(map(str, pair)),
        str(find.get("at", "") if at is None else at),
        Width.parse(str(by or find.get("by", BY_SOURCE))),
        _count("top", find.get("top", 5) if top is None else top),
        chosen,
        count,
        seed,
    )


def _one_of(what: str, given: object, known: Sequence[_Text]) -> _Text:
    for each in known:
        if each == given:
            return each
    raise StudyError(unknown(what, str(given), known))


def _count(what: str, given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise StudyError(f"{what}: {given!r}, expected 1 or more")
    return given


# ---------------------------------------------------------------------------------------------------------- the answer


@dataclass(frozen=True)
class Rivals:
    """Schedules at points that differ in their schedule only, on a machine whose constants are varied.

    Parameters
    ----------
    machine : of the points, with its kernel, runtime, contention and overrides.
    layer : of the points, with their overrides.
    passes : of each schedule that applies, by its name, with the rings that are fastest there.
    refused : why others do not.
    """

    machine: Machine
    layer: Workload
    passes: dict[str, tuple[PassAnswer, ...]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(points: Sequence[Point]) -> Rivals:
        """The schedules of points. Raises `TaspLabError` for a machine or a layer that does not exist."""
        first = points[0]
        layer = overridden_layer(first.layer, first.overrides)
        rivals = Rivals(prepared(first).machine_for(layer), layer)
        for point in points:
            answered = answer(point)
            if answered.applies:
                rivals.passes[point.name] = answered.passes
            elif answered.error is not None:
                rivals.refused[point.name] = first_line(answered.error)
        return rivals

    def times_s(self, logs: Logs, schedules: Sequence[str] = ()) -> Times:
        """The times of schedules with these factors, of all unless some are given."""
        machine = changed(self.machine, logs)
        return {
            name: sum(float(each.on(machine).time_s) for each in self.passes[name]) for name in schedules or self.passes
        }


def find_sensitivity(
    points: Sequence[Point],
    question: SensitivityQuestion,
    baseline: str | None = None,
    progress: ProgressCallback = no_progress,
) -> View:
    """The sensitivity at points that differ in the schedule only: a row per constant, the largest effect first.

    Raises `StudyError` for a schedule that is not among them or does not apply, with its reason.
    """
    names, point = _schedules(points, question, baseline), points[0]
    rivals = Rivals.of([each for each in points if not question.between or each.schedule in names])
    for name in names:
        if name in rivals.refused:
            raise StudyError(f"schedule {name!r} does not apply at {where_of(point)}: {rivals.refused[name]}")
    factors = factors_of(rivals.machine, rivals.layer, point.options.passes, question.width)
    base = rivals.times_s({})
    what = f"time of {names[0]}" if len(names) == 1 else f"speed-up of {names[0]} over {names[1]}"
    title = f"{what} is {_shown(answer_of(base, names), names)} at {where_of(point)}, fastest: {fastest(base)}"
    extra: dict[str, object] = {}
    if question.method == "sobol":  # only the schedules of the answer are predicted
        samples = question.samples
        count = samples * (len(factors) + 2) * len(names)
        progress(f"constants in a design of Sobol: {len(factors)}, in {count} predictions")
        indices, answers = sobol(
            factors, lambda logs: answer_of(rivals.times_s(logs, names), names), samples, question.seed
        )
        indices.sort(key=lambda index: -index.total)
        extra |= {"samples": samples, "seed": question.seed} if indices else {}
        if len(answers):
            low, high = (float(np.quantile(answers, share)) for share in (0.05, 0.95))
            extra |= {"value_low": low, "value_high": high}
            title += f", {_shown(low, names)} .. {_shown(high, names)} (5 to 95 %)"
        records = [_of_index(index) for index in indices]
        table = _index_table(title, indices[: question.top])
    else:
        count = 2 * len(factors) * len(rivals.passes)
        progress(f"constants at both ends: {len(factors)}, in {count} predictions")
        effects = one_at_a_time(factors, rivals.times_s)
        effects.sort(key=lambda effect: -effect.size(base, names))
        records = [_of_effect(effect, base, names) for effect in effects]
        table = _effect_table(title, effects[: question.top], base, names)
    document = {
        "at": dict(point.labels) | {"machine": point.machine, "seq": point.layer.sequence},
        "of": question.of,
        "schedules": list(names),
        "value": answer_of(base, names),
        "times_s": dict(base),
        "fastest": fastest(base),
        "method": question.method,
        **extra,
        "constants": records,
        "refused": rivals.refused,
    }
    parts: list[Part] = [table]
    if (rest := len(records) - question.top) > 0:
        parts.append(f"{rest} more constants have smaller effects; --top {rest + question.top} lists all")
    if not records:
        parts.append("no constant on which the machine depends has an interval")
    parts += [f"{name} does not apply: {reason}" for name, reason in rivals.refused.items()]
    return View(document, records, parts)


def _schedules(points: Sequence[Point], question: SensitivityQuestion, baseline: str | None) -> tuple[str, ...]:
    """The schedule, and for a speed-up the one that it is over."""
    known = list(dict.fromkeys(point.schedule for point in points))
    others = [name for name in known if name != baseline]
    given = question.between or tuple(others[:1] or known[:1])
    if len(given) < 2 and question.of == "speedup":
        given += (baseline,) if baseline else tuple(others[1:2])
    for name in given:
        if name not in known:
            raise StudyError(f"{unknown('schedule', name, known)} at this point")
    if question.of == "time":
        return given[:1]
    if len(given) < 2 or given[0] == given[1]:
        expected = "a baseline of the study, --between A --between B, or --of time"
        raise StudyError(f"a speed-up needs two schedules, expected {expected}")
    return given


def where_of(point: Point) -> str:
    """The axes of a point but its schedule, on one line."""
    labels = [f"{name} {value}" for name, value in point.labels if name not in ("schedule", "variant")]
    return ", ".join(labels) or f"{point.machine}, seq {point.layer.sequence}"


def _shown(value: float, schedules: Sequence[str]) -> str:
    return format_time(value) if len(schedules) == 1 else f"{value:.3g}x"


def _of_effect(effect: Effect, base: Times, schedules: Sequence[str]) -> dict[str, object]:
    return effect.factor.to_dict() | {
        "value_at_low": answer_of(effect.at_low, schedules),
        "value_at_high": answer_of(effect.at_high, schedules),
        "effect": effect.size(base, schedules),
        "fastest_at_low": fastest(effect.at_low),
        "fastest_at_high": fastest(effect.at_high),
        "changes_fastest": effect.changes_fastest(base),
    }


def _effect_table(title: str, effects: Sequence[Effect], base: Times, schedules: Sequence[str]) -> Table:
    what = "time" if len(schedules) == 1 else "speed-up"
    rows = []
    for effect in effects:
        ends = effect.at_low, effect.at_high
        becomes = " .. ".join(_shown(answer_of(end, schedules), schedules) for end in ends)
        winners = " .. ".join(dict.fromkeys(map(fastest, ends))) if effect.changes_fastest(base) else "the same"
        rows.append((effect.factor.name, effect.factor.text, becomes, winners, *effect.factor.origin))
    columns = ("constant", "range", f"{what} becomes", "fastest", "source", "would settle it")
    return Table(title, columns, rows, (0, 1, 2, 3, 4, 5))


def _of_index(index: SobolIndex) -> dict[str, object]:
    return index.factor.to_dict() | {name: getattr(index, name) for name in SobolIndex._fields[1:]}


def _index_table(title: str, indices: Sequence[SobolIndex]) -> Table:
    rows = [
        (
            index.factor.name,
            index.factor.text,
            f"{index.first:.0%} ± {index.first_conf:.0%}",
            f"{index.total:.0%} ± {index.total_conf:.0%}",
            *index.factor.origin,
        )
        for index in indices
    ]
    columns = ("constant", "range", "alone", "with others", "source", "would settle it")
    return Table(f"{title}; shares of its variance", columns, rows, (0, 1, 4, 5))
