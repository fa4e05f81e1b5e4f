"""Calibration: the constants of a profile from one's own measurements.

A *case* is a measured table on a member of the profile's family. Which constants a table can tell depends on its
collective and on its sizes: a constant that changes no prediction of the table, or changes them only as others do, is
left as it is, and the report says which measurement would tell it. The others are fitted together to all cases
(`tasp_lab.fit`), and those that turn out to be uncertain by more than a factor of 4 are left as they are, too.

Predictions are made by a function that is passed in: this module knows no simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from tasp_lab.arrays import FloatArray
from tasp_lab.errors import FitError, TableError
from tasp_lab.fit import Fit, Parameter, fit
from tasp_lab.machine import Constant
from tasp_lab.measurements import Collective, MeasuredTable, Row
from tasp_lab.profile import MEANINGS, Profile, find_profile
from tasp_lab.quantities import parse_size_bytes
from tasp_lab.rings import Say, say_nothing

NO_EFFECT = 1e-4
"""A constant has none if doubling it changes no prediction by more than about this share."""

NO_DIRECTION = 1e-3
"""A constant has no effect of its own if others explain all but this share of it."""

_STEP = 1e-3
_MULTIPLES = (0.5, 0.7, 1.4, 2.0)
_HOPS = tuple(f"{where}_hop_{protocol}" for where in ("nic", "link") for protocol in ("simple", "ll", "ll128"))
_OF_RINGS = (
    "ring_rate", "nic_ring_rate", "nic_payload", "link_payload", "base_simple", "base_ll", "base_ll128", *_HOPS,
)  # fmt: skip
_OF_MESSAGES = (
    "link_payload", "link_many_payload", "nic_payload", "message_launch", "nic_message_launch", "link_channel_rate",
    "nic_channel_rate",
)  # fmt: skip
_OF_TCP = ("launch", "tcp_payload")

NEEDS: Mapping[str, str] = {
    "ring_rate": "all_gather of 256 MiB and more inside a domain",
    "nic_ring_rate": "all_gather of 256 MiB and more between domains, where nic_payload is more",
    "link_payload": "sendrecv of 1 GiB and more inside a domain, or a log of pairs",
    "link_many_payload": "alltoall of 256 MiB and more inside a domain",
    "nic_payload": "sendrecv of 256 MiB and more between domains",
    "message_launch": "sendrecv below 64 KiB inside a domain",
    "nic_message_launch": "sendrecv below 64 KiB between domains",
    "link_channel_rate": "sendrecv between 4 and 64 MiB inside a domain",
    "nic_channel_rate": "sendrecv between 4 and 64 MiB between domains, where a peer gets few channels",
    "base_ll": "all_gather of a few KiB",
    "base_ll128": "all_gather of some 100 KiB, where the library takes LL128",
    "base_simple": "all_gather of some MiB, where the library takes Simple",
    **{name: "the same small sizes of all_gather on two numbers of ranks" for name in _HOPS if name[:4] == "link"},
    **{name: "the same small sizes of all_gather on two numbers of nodes" for name in _HOPS if name[:3] == "nic"},
    "launch": "sendrecv below 1 KiB",
    "tcp_payload": "sendrecv of 64 MiB and more",
}
"""Which measurement tells a constant."""

Predict = Callable[[Profile], FloatArray]
"""From a profile to the predicted seconds of all rows of all cases, in their order."""


@dataclass(frozen=True)
class Case:
    """A measured table; `size` is that of the family's member, like ``2x8``, and `rows` are those that count."""

    table: MeasuredTable
    collective: Collective
    size: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Finding:
    """What is known of a constant now, in SI units.

    `low` and `high` are the ends of its 95 % interval. Where it is not `identifiable`, `why` says so, and the profile
    keeps the value that it had `before`. `origin` is what it was found from.
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
        """Which measurement would tell it."""
        return NEEDS.get(self.name, "")


@dataclass(frozen=True, eq=False)
class Calibrated:
    """The profile with what was found, and the predictions of all rows of the cases with it and without, in seconds."""

    profile: Profile
    findings: tuple[Finding, ...]
    cases: tuple[Case, ...] = ()
    before_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    after_s: FloatArray = field(default_factory=lambda: np.zeros(0))

    def errors(self, predicted_s: FloatArray) -> list[FloatArray]:
        """Predicted over measured, less one, of each case."""
        measured_s = measured(self.cases)
        ends = np.cumsum([len(case.rows) for case in self.cases])[:-1]
        return np.split(predicted_s / measured_s - 1, ends) if self.cases else []


class Choice(NamedTuple):
    """A profile that a text names, and the size of its member, empty if the text names none."""

    profile: Profile
    size: str


def choose(text: str) -> Choice:
    """The profile and the size that a text like ``h100``, ``h100-2x8`` or ``my.toml:2x8`` names.

    >>> choose("h100-2x8").size, choose("h100").size
    ('2x8', '')

    Raises `ProfileError`.
    """
    profile, _ = find_profile(text)
    path, _, size = text.rpartition(".toml")
    return Choice(profile, size.lstrip(":") if path else text.partition("-")[2])


def choose_for(tables: Sequence[MeasuredTable]) -> Choice:
    """The profile that the tables' own headers name. Raises `FitError` where one names none, and `ProfileError`."""
    unnamed = [table.name for table in tables if table.profile is None]
    if unnamed or not tables:
        what = f"{unnamed[0]} does" if unnamed else "tables of pairs do"
        raise FitError(f"{what} not say on which machine it was measured, expected --profile, like --profile h100-8")
    return Choice(choose(tables[0].profile or "").profile, "")


def cases_of(
    tables: Iterable[MeasuredTable], choice: Choice, *, by_rings: bool = False, say: Say = say_nothing
) -> tuple[Case, ...]:
    """The tables as cases of a family.

    Parameters
    ----------
    tables : a table's own header names its size, else the choice does, else what a log says of its nodes.
    by_rings : AllReduce went by rings; else only tables that say so are used.
    say : told of what is left out.

    Raises `TableError` for a table that is not complete, of another family or of another number of ranks, and
    `ProfileError` for a header that names no profile.
    """
    found = []
    for table in tables:
        for warning in table.warnings:
            say(warning)
        if reason := _left_out(table, by_rings):
            say(f"{table.name}: left out, {reason}")
            continue
        found.append(_case(table, choice))
    return tuple(found)


def _left_out(table: MeasuredTable, by_rings: bool) -> str:
    if reason := table.headers.get("out_of_scope"):
        return reason
    algorithm = table.headers.get("algorithm", "ring" if by_rings else "")
    if table.collective == "all_reduce" and algorithm.casefold() != "ring":
        return f"all-reduce by {algorithm or 'rings, trees, NVLS or SHARP'}; if it went by rings, say --algorithm ring"
    return ""


def _case(table: MeasuredTable, choice: Choice) -> Case:
    reasons = [reason for reason in table.reason.split(", ") if reason not in ("", "no header 'profile'")]
    if reasons:
        raise TableError(f"{table.name}: {', '.join(reasons)}")
    assert table.collective is not None
    size = _size(table, choice)
    member = choice.profile.member(size, "")
    if member is None:
        raise TableError(f"{table.name}: {choice.profile.name} has no size {size!r}, expected one like 8 or 2x8")
    ranks = member.topology.world_size
    if table.ranks != ranks:
        raise TableError(f"{table.name}: {table.ranks} ranks, but {choice.profile.name}-{size} has {ranks}")
    least = ranks if table.collective != "sendrecv" else 1
    first = max(least, parse_size_bytes(table.headers.get("from_size_b", "1")))
    rows = tuple(row for row in table.rows if row.size_bytes >= first)
    if not rows:
        raise TableError(f"{table.name}: no row of {first} bytes or more")
    return Case(table, table.collective, size, rows)


def _size(table: MeasuredTable, choice: Choice) -> str:
    """The member's size: of the table's header, of the choice, or of the nodes that a log lists."""
    if table.profile:
        named = choose(table.profile)
        if named.profile.name != choice.profile.name:
            raise TableError(
                f"{table.name}: profile {table.profile!r}, expected one of the family {choice.profile.name!r}"
            )
        return named.size or choice.size or str(choice.profile.ranks_per_node)
    if choice.size:
        return choice.size
    if "ranks_per_node" in table.headers:
        return f"{table.headers['nodes']}x{table.headers['ranks_per_node']}"
    return str(table.ranks)


def measured(cases: Iterable[Case]) -> FloatArray:
    """The measured seconds of all rows of all cases."""
    return np.array([row.time_s for case in cases for row in case.rows])


def candidates(profile: Profile, collectives: Iterable[Collective]) -> tuple[str, ...]:
    """The constants that tables of these collectives may tell, those that matter most first.

    >>> from tasp_lab.profile import load_profile
    >>> candidates(load_profile("h100"), ["sendrecv"])[:3]
    ('link_payload', 'link_many_payload', 'nic_payload')
    """
    names: dict[str, None] = {}
    for collective in collectives:
        of_library = _OF_MESSAGES if collective in ("sendrecv", "alltoall") else _OF_RINGS
        names |= dict.fromkeys(_OF_TCP if profile.library == "gloo" else of_library)
    return tuple(name for name in sorted(names, key=lambda name: name in _HOPS) if profile.has(name))


def calibrate(
    profile: Profile,
    cases: Sequence[Case],
    predict: Predict,
    asked: Sequence[str] = (),
    *,
    date: str,
    say: Say = say_nothing,
) -> Calibrated:
    """Fit the constants of a profile to measured tables.

    Parameters
    ----------
    profile : where the fit starts.
    cases : the tables, all rows of which count alike.
    predict : what the simulator says of their rows.
    asked : the constants to fit; without any all that the tables can tell.
    date : of today, for the sources.
    say : told of progress.

    Raises `FitError` where there are not more rows than constants to fit, for a constant that the collectives of the
    tables do not tell, and where they tell none.
    """
    if profile.library == "ideal":
        raise FitError(f"profile {profile.name!r}: the library 'ideal' has no constants to fit")
    names = _checked(asked, profile, cases) or candidates(profile, [case.collective for case in cases])
    times_s, before_s = measured(cases), predict(profile)
    effects = _effects(profile, names, predict)
    findings = {name: _unknown(profile, name, why) for name, why in _without_effect(names, effects).items()}
    chosen = [name for name in names if name not in findings]
    start = _nearer(profile, chosen, predict, times_s)
    while chosen:
        if len(times_s) > len(chosen):
            say(f"fitting {', '.join(chosen)} to {len(times_s)} rows")
        for name, found in _fit(start, chosen, predict, times_s).parameters.items():
            where = _origin(cases, effects[:, names.index(name)])
            findings[name] = _finding(profile, name, found, where)
        unsure = [name for name in chosen if not findings[name].identifiable]
        if not unsure:
            break
        chosen.remove(max(reversed(unsure), key=lambda name: _width(findings[name])))
        start = with_numbers(profile, [(name, findings[name].value) for name in chosen])
    if not chosen:
        raise FitError(f"these measurements tell no constant: {_reasons(findings.values())}")
    sure = [findings[name] for name in names]
    written = with_findings(profile, sure, date)
    return Calibrated(written, tuple(sure), tuple(cases), before_s, predict(written))


def _nearer(profile: Profile, names: Sequence[str], predict: Predict, times_s: FloatArray) -> Profile:
    """The profile with each constant in turn at the best of a few multiples.

    Far from the truth a step of the fit may leap to where the library takes another protocol, and be lost there.
    """

    def distance(candidate: Profile) -> float:
        return float(np.abs(np.log(predict(candidate) / times_s)).mean())

    for name in names:
        value = profile.number(name)
        tried = [with_numbers(profile, [(name, value * factor)]) for factor in _MULTIPLES]
        profile = min([profile, *tried], key=distance)
    return profile


def _fit(profile: Profile, names: Sequence[str], predict: Predict, times_s: FloatArray) -> Fit:
    def predict_with(values: FloatArray) -> FloatArray:
        return predict(with_numbers(profile, zip(names, values.tolist(), strict=True)))

    return fit(predict_with, times_s, {name: _start(profile, name) for name in names})


def _start(profile: Profile, name: str) -> float:
    """Where a fit begins: hops a little above the wire's latency, below which they change nothing."""
    value = profile.number(name)
    return max(value, 1.05 * _sensible(profile, name, 0.0)) if name in _HOPS else value


def _checked(asked: Sequence[str], profile: Profile, cases: Sequence[Case]) -> tuple[str, ...]:
    collectives = list(dict.fromkeys(case.collective for case in cases))
    known = candidates(profile, collectives)
    for name in asked:
        if name not in known:
            raise FitError(
                f"constant {name!r}: {', '.join(collectives)} on {profile.name} may tell {', '.join(known) or 'none'}"
            )
    return tuple(dict.fromkeys(asked))


def _effects(profile: Profile, names: Sequence[str], predict: Predict) -> FloatArray:
    """d log(time) / d log(constant) of all rows (first axis) and constants."""
    columns = []
    for name in names:
        value = profile.number(name)
        up, down = (predict(with_numbers(profile, [(name, value * factor)])) for factor in (1 + _STEP, 1 - _STEP))
        columns.append(np.log(up / down) / (2 * _STEP))
    return np.array(columns).T


def _without_effect(names: Sequence[str], effects: FloatArray) -> dict[str, str]:
    """The constants that change no prediction, or change them only as those before them do, and why."""
    reasons: dict[str, str] = {}
    kept: list[int] = []
    for index, name in enumerate(names):
        column = effects[:, index]
        if np.abs(column).max() < NO_EFFECT:
            reasons[name] = "no prediction of these rows depends on it"
            continue
        if kept:
            shares, *_ = np.linalg.lstsq(effects[:, kept], column, rcond=None)
            if np.linalg.norm(column - effects[:, kept] @ shares) < NO_DIRECTION * np.linalg.norm(column):
                partners = [names[other] for other, share in zip(kept, shares, strict=True) if abs(share) > 0.01]
                reasons[name] = f"only a combination of it with {' and '.join(partners)} changes a prediction"
                continue
        kept.append(index)
    return reasons


def _finding(profile: Profile, name: str, found: Parameter, origin: str) -> Finding:
    before = profile.number(name)
    return Finding(name, before, found.value, found.low, found.high, found.identifiable, found.why, origin)


def _unknown(profile: Profile, name: str, why: str) -> Finding:
    before = profile.number(name)
    return Finding(name, before, before, 0.0, math.inf, identifiable=False, why=why)


def _width(finding: Finding) -> float:
    return finding.high / finding.low if finding.low else math.inf


def _reasons(findings: Iterable[Finding]) -> str:
    """Why constants are not known, each reason once."""
    names: dict[str, list[str]] = {}
    for finding in findings:
        names.setdefault(finding.why, []).append(finding.name)
    return "; ".join(f"{', '.join(alike)}: {why}" for why, alike in names.items())


def _origin(cases: Sequence[Case], effect: FloatArray) -> str:
    """The tables whose predictions a constant changes."""
    ends = np.cumsum([len(case.rows) for case in cases])
    parts = zip(cases, np.split(np.abs(effect), ends[:-1]), strict=True)
    return ", ".join(
        f"{file_of(case.table.name)} ({len(case.rows)} row{'s' * (len(case.rows) > 1)}, {case.collective})"
        for case, part in parts
        if part.max() >= NO_EFFECT
    )


def file_of(name: str) -> str:
    """The file of a table's name, without its folders."""
    return name.rpartition("/")[2]


def with_numbers(profile: Profile, values: Iterable[tuple[str, float]]) -> Profile:
    """The profile with other values of constants, as far as they make sense: a share is at most 1, and a hop takes no
    less than the wire."""
    texts = {name: constant_text(name, _sensible(profile, name, float(value)), 17) for name, value in values}
    return replace(
        profile,
        constants=tuple(
            replace(constant, value=texts[constant.name]) if constant.name in texts else constant
            for constant in profile.constants
        ),
    )


def _sensible(profile: Profile, name: str, value: float) -> float:
    if MEANINGS[name].unit == "":
        return min(value, 1.0)
    if "_hop_" in name:
        return max(value, profile.number(f"{name.partition('_')[0]}_latency"))
    return value


def constant_text(name: str, value: float, digits: int = 6) -> str:
    """A value in SI units as the text that a profile has of it.

    >>> constant_text("link_payload", 3.708e11), constant_text("message_launch", 1.5e-5)
    ('370.8GB/s', '15us')
    """
    unit = MEANINGS[name].unit
    if unit == "bytes/s":
        return f"{value / 1e9:.{digits}g}GB/s"
    return f"{value * 1e6:.{digits}g}us" if unit == "s" else f"{value:.{digits}g}"


def with_findings(profile: Profile, findings: Iterable[Finding], date: str) -> Profile:
    """The profile with the identifiable ones of these constants; their sources say what they were fitted to."""
    new = {finding.name: finding for finding in findings if finding.identifiable}

    def constant(old: Constant) -> Constant:
        if old.name not in new:
            return old
        found = new[old.name]
        low, high = (constant_text(old.name, end, 4) for end in (found.low, found.high))
        value = constant_text(old.name, _sensible(profile, old.name, found.value))
        return Constant(old.name, value, f"fitted to {found.origin}, 95 % {low} to {high}, on {date}")

    return replace(profile, constants=tuple(constant(old) for old in profile.constants))
