"""Rank the schedules of collectives on a machine by predicted time: `compare` of sizes instead of layers.

Schedules of others, such as files in MSCCL XML, are ranked as those of their collective that are given beside them::

    compare_collectives("torus:4x4", "4MiB", ["taccl.xml", "multi-ring"])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasp_lab.core.errors import ScheduleError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part
from tasp_lab.prediction.inputs import MachineLike, Schedules
from tasp_lab.prediction.predict import Predictions, predict
from tasp_lab.prediction.recommend import NEAR
from tasp_lab.schedules.registry import COLLECTIVES, NOT_APPLICABLE


@dataclass(frozen=True, repr=False)
class CollectiveRankings(Report):
    """The predictions of each collective, the fastest first."""

    items: tuple[Predictions, ...]

    def to_dict(self) -> dict[str, object]:
        parts = [
            {"collective": each[0].collective, "fastest": each[0].schedule} | each.to_dict() for each in self.items
        ]
        return {"parts": parts}

    def records(self) -> list[dict[str, object]]:
        return [row for each in self.items for row in each.records()]

    def parts(self) -> list[Part]:
        return [part for each in self.items for part in (_line(each), *each.parts())]


def _line(found: Predictions) -> str:
    """Which schedule is the fastest, and by how much."""
    first, *others = found
    near = sum(each.time_s <= (1 + NEAR) * first.time_s for each in found)
    if near > 1:
        return f"{first.collective}: {first.schedule} is the fastest ({near} schedules are within {NEAR:.0%})."
    if not others:
        return f"{first.collective}: {first.schedule} is the only one that applies."
    faster = float(others[0].time_s / first.time_s) - 1
    return f"{first.collective}: {first.schedule} is {faster:.1%} faster than the next, {others[0].schedule}."


def compare_collectives(
    machine: MachineLike,
    size: int | str,
    schedules: Schedules | None = None,
    *,
    progress: ProgressCallback = no_progress,
    **settings: Any,
) -> CollectiveRankings:
    """Predict collectives of one size per rank by all their schedules, or by some of one collective.

    Parameters
    ----------
    machine, settings : see `tasp_lab.prediction.predict.predict`.
    size : bytes per rank, a number or text such as ``"64MiB"``.
    schedules : by default all of each collective with several that apply, those of the library among them.
    progress : called with lines of progress.

    Raises what `predict` raises for schedules that are given, and `ScheduleError` if nothing applies.

    >>> found = compare_collectives("full-mesh:4", "1MiB", ["ring", "multi-ring"])
    >>> [each.schedule for each in found.items[0]]
    ['multi-ring', 'ring']
    """
    if schedules is not None:
        return CollectiveRankings((_ranked(predict(machine, schedules, size, progress=progress, **settings)),))
    by_kind: dict[str, list[str]] = {}
    for name, spec in COLLECTIVES.items():
        by_kind.setdefault(str(spec.kind), []).append(name)
    rankings, reasons = [], []
    for names in by_kind.values():
        if len(names) == 1:  # nothing to compare with
            continue
        try:
            rankings.append(_ranked(predict(machine, names, size, progress=progress, **settings)))
        except NOT_APPLICABLE as error:
            reasons.append(str(error))
    if not rankings:
        raise ScheduleError(reasons[0])
    return CollectiveRankings(tuple(rankings))


def _ranked(found: Predictions) -> Predictions:
    items: Sequence[Any] = sorted(found, key=lambda each: each.time_s)
    return replace(found, items=tuple(items))
