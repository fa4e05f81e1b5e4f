"""The ranking of all schedules of attention for a layer on a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

from tasp_lab.core.choices import AttentionKind
from tasp_lab.core.report import Report, flat
from tasp_lab.core.tables import Part, brief
from tasp_lab.core.units import format_size_about, format_time
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.captions import software
from tasp_lab.prediction.interval import TIE
from tasp_lab.prediction.provenance import Provenance
from tasp_lab.prediction.results import LayerPrediction, interval_line, ratio, refused_table, rows_table
from tasp_lab.prediction.stack_choice import StackChoice
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.registry import baselines, options_of
from tasp_lab.validation.validate import Comparison

SINGLE_RINGS = tuple(baselines())
"""The schedules over one ring; speed-ups are over the fastest of them, of hybrids over LASP-2H."""

COMPUTES: Mapping[AttentionKind, str] = {
    "softmax": "softmax attention",
    "linear": "linear attention",
    "hybrid": "hybrid",
}
"""What the schedules of a ranking compute."""


MAX_TIES = 6
"""As many schedules are named that are too close to call."""


@dataclass(frozen=True, repr=False)
class Candidate:
    """A schedule that was compared: its prediction, over all requested passes, or why there is none.

    `sent_bytes` is the largest number of bytes that a rank sends, `link_bytes` those on the link that they occupy
    longest. `bound_by` is what most of the time of the critical path was spent on. `measured_s` is the median time on
    the fabric, and `measured_prediction_s` what was predicted for it there; None unless it was run. `not_comparable` is
    why these two cannot be compared, if so. `untuned_s` is the predicted time with the options as they were given, None
    unless they were tuned. `first_is_faster` is the probability that the first schedule of the ranking is faster than
    this one on a real machine, on the same samples of constants; None of the first, and without intervals. `is_object`
    is whether the schedule was given as an object: then its name says nothing about it, and no options apply to it.
    """

    schedule: str
    computes: AttentionKind
    options: AttentionOptions
    prediction: LayerPrediction | None = None
    reason: str = ""
    sent_bytes: int = 0
    link_bytes: int = 0
    bound_by: str = ""
    untuned_s: float | None = None
    measured_s: float | None = None
    measured_prediction_s: float | None = None
    not_comparable: str | None = None
    first_is_faster: float | None = None
    is_object: bool = False

    def __repr__(self) -> str:
        p = self.prediction
        return brief(self, self.schedule, f"does not apply: {self.reason}" if p is None else format_time(p.time_s))

    @property
    def is_close(self) -> bool:
        """Whether the order of this schedule and the first one is too close to call."""
        return self.first_is_faster is not None and self.first_is_faster < TIE

    @property
    def time_s(self) -> float:
        """The predicted time in seconds; infinite for a schedule that does not apply."""
        return float("inf") if self.prediction is None else float(self.prediction.time_s)

    def to_dict(self) -> dict[str, object]:
        p = self.prediction
        return {
            "schedule": self.schedule,
            "options": {
                name: getattr(self.options, name) for name in (() if self.is_object else options_of(self.schedule))
            },
            "computes": self.computes,
            "applies": p is not None,
            "reason": self.reason or None,
            "time_s": None if p is None else float(p.time_s),
            "time_low_s": None if p is None else p.time_low_s,
            "time_high_s": None if p is None else p.time_high_s,
            "first_is_faster": self.first_is_faster,
            "too_close_to_call": self.is_close,
            "untuned_time_s": self.untuned_s,
            "bound_s": None if p is None else float(p.bound_s),
            "sent_bytes": None if p is None else self.sent_bytes,
            **({"relayout_bytes": None if p is None else p.relayout_bytes} if self.computes == "hybrid" else {}),
            "link_bytes": None if p is None else self.link_bytes,
            "peak_bytes": None if p is None else p.memory_bytes,
            "contention_s": None if p is None or p.contention_s is None else float(p.contention_s),
            "ccr": None if p is None else p.ccr,
            "bound_by": self.bound_by or None,
            "measured_s": self.measured_s,
            "measured_prediction_s": self.measured_prediction_s,
        }


def beside_first(each: Candidate, first: Candidate) -> Candidate:
    """The candidate with the probability that the first one is faster."""
    if each is first or each.prediction is None or first.prediction is None:
        return each
    own, best = each.prediction.interval, first.prediction.interval
    return each if own is None or best is None else replace(each, first_is_faster=best.first_is_faster(own))


@dataclass(frozen=True, repr=False)
class Ranking(Report):
    """All candidates, the fastest first; those that do not apply last.

    `fabric` are the comparisons of the schedules that were run, one for each set of options. All candidates compute
    layers of one `kind`. Of a hybrid `choice` says which stacks are compared, None if they were given.
    """

    candidates: tuple[Candidate, ...]
    machine: Machine
    provenance: Provenance
    fabric: tuple[Comparison, ...] = ()
    kind: AttentionKind = "softmax"
    choice: StackChoice | None = None

    @property
    def is_reporter(self) -> bool:
        """False on the ranks of a torchrun group that leave the output to rank 0."""
        return all(each.is_reporter for each in self.fabric)

    @property
    def best(self) -> Candidate:
        """The fastest schedule."""
        return self.candidates[0]

    @property
    def single_ring_s(self) -> float | None:
        """The time of the fastest schedule over one ring; None if none applies."""
        rings = (each.time_s for each in self._applying if each.schedule in SINGLE_RINGS and not each.is_object)
        return next(rings, None)

    @property
    def _applying(self) -> list[Candidate]:
        return [each for each in self.candidates if each.prediction is not None]

    def to_dict(self) -> dict[str, object]:
        return {
            "computes": COMPUTES[self.kind],
            "library": self.machine.comm_library.name,
            "runtime": self.machine.runtime.name,
            "changes": list(self.machine.changes),
            **({} if self.choice is None else {"layer_schedules": self.choice.to_dict()}),
            "results": [each.to_dict() for each in self.candidates],
            "fabric": [each.to_dict() for each in self.fabric],
            "provenance": self.provenance.to_dict(),
        }

    def records(self) -> list[dict[str, object]]:
        return [flat(each.to_dict()) | {"options": each.options.arguments} for each in self.candidates]

    def parts(self) -> list[Part]:
        found: list[Part] = []
        first = self.best.prediction
        if first is not None:
            where = f"{first.topology}, {first.ranks}{software(self.machine)}"
            found += [rows_table(first.title(where), [self._row(each) for each in self._applying])]
            found += self.machine.changes
            found += [] if self.choice is None else [str(self.choice)]
            found += first.assumptions()
            found += [] if first.interval is None else [interval_line(first.interval)]
            found += self._ties()
        refused = [each for each in self.candidates if each.prediction is None]
        if refused:
            found.append(refused_table((each.schedule, each.reason) for each in refused))
        return found

    def _ties(self) -> list[str]:
        """The schedules that may be faster than the first, on one line; none without any."""
        close = [f"{each.schedule} ({each.first_is_faster:.0%})" for each in self._applying if each.is_close]
        named = ", ".join(close[:MAX_TIES]) + (f" and {len(close) - MAX_TIES} more" if len(close) > MAX_TIES else "")
        line = f"too close to call: {self.best.schedule} is faster only with the probability given: {named}"
        first = self.best.prediction
        if close and first is not None and first.interval is not None and first.interval.is_exact:
            line = f"as fast as {self.best.schedule}: {named.replace(' (50%)', '')}"
        return [line] if close else []

    def _row(self, each: Candidate) -> dict[str, str]:
        p = each.prediction
        assert p is not None, "the schedule applies"
        ring_s = self.single_ring_s
        row = {
            "schedule": each.schedule,
            "time": format_time(p.time_s),
            **p.interval_cell(),
            **({} if each.untuned_s is None else {"untuned": format_time(each.untuned_s)}),
            "speed-up": "-" if ring_s is None else f"{ratio(ring_s, p.time_s):.2f}x",
            "sent by a rank": format_size_about(each.sent_bytes),
            "busiest link": format_size_about(each.link_bytes),
            "memory": format_size_about(p.memory_bytes),
            "CCR": "-" if p.ccr is None else f"{p.ccr:.3g}",
            "share of bound": f"{ratio(p.bound_s, p.time_s):.1%}",
            "bound by": each.bound_by,
        }
        if self.fabric:
            row |= {"on the fabric": "", "error": ""}
            if each.measured_s is not None and each.measured_prediction_s is not None:
                row["on the fabric"] = format_time(each.measured_s)
                error = f"{ratio(each.measured_prediction_s, each.measured_s) - 1:+.1%}"
                row["error"] = error if each.not_comparable is None else "not a prediction"
        return row if each.untuned_s is None else row | {"options": each.options.arguments}


@dataclass(frozen=True, repr=False)
class Rankings(Report, Sequence[Ranking]):
    """A ranking for each kind of attention."""

    items: tuple[Ranking, ...]

    @overload
    def __getitem__(self, index: int) -> Ranking: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Ranking, ...]: ...
    def __getitem__(self, index: int | slice) -> Ranking | tuple[Ranking, ...]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def is_reporter(self) -> bool:
        """False on the ranks of a torchrun group that leave the output to rank 0."""
        return all(each.is_reporter for each in self.items)

    def to_dict(self) -> dict[str, object]:
        return {"parts": [each.to_dict() for each in self.items]}

    def records(self) -> list[dict[str, object]]:
        return [row for each in self.items for row in each.records()]

    def parts(self) -> list[Part]:
        return [part for each in self.items for part in each.parts()]
