"""What a study's crossovers print: a row per crossing, and a verdict where nothing crosses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part, Table
from tasp_lab.study.find.crossover import Crossing, Crossover
from tasp_lab.study.find.crossover_question import CrossoverQuestion
from tasp_lab.study.find.moved import WHOLE_AXES
from tasp_lab.study.point import Value


@dataclass(frozen=True)
class GroupCrossover:
    """What is found in one group; `labels` tell it from the others, `ends` are those of the axis."""

    labels: tuple[tuple[str, Value], ...]
    ends: tuple[float, float]
    found: Crossover


@dataclass(frozen=True, repr=False)
class Crossovers(Report):
    """The crossovers of a study."""

    question: CrossoverQuestion
    groups: tuple[GroupCrossover, ...]

    def to_dict(self) -> dict[str, object]:
        question = self.question
        return {
            "along": question.along,
            "between": list(question.between),
            "margin": question.margin,
            "samples": question.sampling.samples,
            "seed": question.sampling.seed,
            "groups": [self._group(each) for each in self.groups],
        }

    def records(self) -> list[dict[str, object]]:
        """A row per crossing; of a group without one its verdict."""
        return [
            dict(each.labels) | {"verdict": self._verdict(each)} | crossing
            for each in self.groups
            for crossing in ([self._crossing(one) for one in each.found.crossings] or [{}])
        ]

    def parts(self) -> list[Part]:
        question = self.question
        first, second = question.between
        names = list(dict.fromkeys(name for each in self.groups for name, _ in each.labels))
        columns = (
            *names,
            question.along,
            "95 %",
            "below",
            "above",
            "binds below",
            "binds above",
            "speed-up at the ends",
        )
        rows = [row for each in self.groups for row in self._rows(each, names)]
        margin = f", by more than {question.margin:.3g}" if question.margin else ""
        title = f"crossovers of {first} and {second} along {question.along}{margin}; binds: {first} / {second}"
        return [Table(title, columns, rows, tuple(range(len(names)))), *self._notes()]

    def _notes(self) -> list[str]:
        evaluated, sampled = (
            sum(getattr(each.found, name) for each in self.groups) for name in ("evaluated", "sampled")
        )
        samples = f", {sampled} pairs with {self.question.sampling.samples} samples of constants" if sampled else ""
        notes = [f"{evaluated} points{samples}"]
        if any(each.found.reason and each.found.verdict != "does not apply" for each in self.groups):
            notes.append("values at which a schedule does not apply are left out")
        nowhere = [each.found.reason for each in self.groups if each.found.verdict == "does not apply"]
        return notes + [f"does not apply: {reason}" for reason in dict.fromkeys(nowhere)]

    def _rows(self, each: GroupCrossover, names: Sequence[str]) -> list[list[str]]:
        labels = dict(each.labels)
        head = [_cell(labels.get(name)) for name in names]
        if not each.found.crossings:
            return [
                [
                    *head,
                    self._verdict(each).partition(":")[0],
                    "",
                    "",
                    "",
                    _binds(each.found.binds),
                    "",
                    self._speedups(each),
                ]
            ]
        return [[*head, *self._cells(crossing, each)] for crossing in each.found.crossings]

    def _cells(self, crossing: Crossing, each: GroupCrossover) -> list[str]:
        return [
            self._text(crossing.value),
            self._interval(crossing, each.ends),
            self._leader(crossing.before),
            self._leader(crossing.after),
            _binds(crossing.binds_below),
            _binds(crossing.binds_above),
            self._speedups(each),
        ]

    def _speedups(self, each: GroupCrossover) -> str:
        """The second time over the first at both ends."""
        return " .. ".join(f"{ratio:.3g}x" for ratio in each.found.speedups if ratio is not None)

    def _interval(self, crossing: Crossing, ends: tuple[float, float]) -> str:
        if not crossing.has_interval:
            return ""
        low = f"< {self._text(ends[0])}" if crossing.low is None else self._text(crossing.low)
        high = f"> {self._text(ends[1])}" if crossing.high is None else self._text(crossing.high)
        return f"{low} .. {high}" + (" too close to call" if crossing.low is crossing.high is None else "")

    def _leader(self, lead: str) -> str:
        return dict(zip(("first", "second"), self.question.between, strict=True)).get(lead, "neither")

    def _verdict(self, each: GroupCrossover) -> str:
        found = each.found
        if found.verdict == "does not apply":
            return f"does not apply: {found.reason}"
        if found.verdict == "neither":
            return f"within {self.question.margin:.3g} throughout" if self.question.margin else "equal throughout"
        if found.verdict in ("first", "second"):
            return f"always {self._leader(found.verdict)}"
        return "crosses" if found.crossings else f"too close to call throughout, {self._predicted(found)} by prediction"

    def _predicted(self, found: Crossover) -> str:
        """The schedule that is faster at all values."""
        return self._leader("first" if (found.speedups[0] or 1.0) > 1 else "second")

    def _text(self, value: float) -> str:
        return axis_text(self.question.along, value)

    def _group(self, each: GroupCrossover) -> dict[str, object]:
        found = each.found
        return {
            "labels": dict(each.labels),
            "from": each.ends[0],
            "to": each.ends[1],
            "verdict": self._verdict(each),
            "crossings": [self._crossing(one) for one in found.crossings],
            "speedup_from": found.speedups[0],
            "speedup_to": found.speedups[1],
            "refused": found.reason or None,
            "points": found.evaluated,
            "pairs_with_samples": found.sampled,
        }

    def _crossing(self, each: Crossing) -> dict[str, object]:
        return {
            "value": each.value,
            "last": each.last,
            "low": each.low,
            "high": each.high,
            "too_close_to_call": each.has_interval and each.low is each.high is None,
            "faster_below": self._faster(each.before),
            "faster_above": self._faster(each.after),
            "binds_below": dict(zip(self.question.between, each.binds_below, strict=True)),
            "binds_above": dict(zip(self.question.between, each.binds_above, strict=True)),
        }

    def _faster(self, lead: str) -> str | None:
        return None if lead == "neither" else self._leader(lead)


def axis_text(axis: str, value: float) -> str:
    """A value for people.

    >>> axis_text("seq", 24576), axis_text("heads", 12), axis_text("nic.bandwidth", 1.5)
    ('24Ki', '12', 'x1.5')
    >>> axis_text("seq", 4672), axis_text("seq", 800)
    ('4.562Ki', '800')
    """
    if axis not in WHOLE_AXES:
        return f"x{value:.4g}"
    whole = int(value)
    if axis not in ("seq", "window", "cached_keys"):
        return str(whole)
    for unit, factor in (("Mi", 2**20), ("Ki", 2**10)):
        if whole >= factor:
            return f"{whole / factor:.4g}{unit}"
    return str(whole)


def _cell(value: Value) -> str:
    return "" if value is None else str(value)


def _binds(found: tuple[str | None, str | None]) -> str:
    first, second = (each or "-" for each in found)
    return first if first == second else f"{first} / {second}"
