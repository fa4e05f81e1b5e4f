"""Measure the points of a study that are nearest to a crossover on the emulated fabric::

    measure_points(nearest(crossovers(points, question, evaluate), 5), question.along, folder)

Both schedules are compared with their predictions.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasp_lab.core.errors import StudyError
from tasp_lab.core.files import check_writable, write_whole
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.tables import Table
from tasp_lab.core.units import format_time
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.prediction.question import Value
from tasp_lab.study.axis import axis_text
from tasp_lab.study.crossover import Crossover
from tasp_lab.study.point import Point
from tasp_lab.study.table import View
from tasp_lab.validation.fabrics import default_scale, expected_fabric_s
from tasp_lab.validation.validate import Run, validate

CSV, JSON = "validated.csv", "validated.json"

NOTE = (
    "the fabric has the links of the machine, scaled, and no latency and communication library: its own prediction is "
    "that of a calibration of the fabric"
)


@dataclass(frozen=True)
class NearPoint:
    """Two schedules at one value of the axis.

    Parameters
    ----------
    points : of the first and of the second schedule.
    labels : of their group.
    value : of the axis.
    times_s : the predicted times of both.
    distance : the logarithm of how far the value is from the nearest crossing; infinite where nothing crosses.
    """

    points: tuple[Point, Point]
    labels: tuple[tuple[str, Value], ...]
    value: float
    times_s: tuple[float, float]
    distance: float

    @property
    def speedup(self) -> float:
        """The second time over the first."""
        return self.times_s[1] / self.times_s[0]


def nearest(results: Iterable[Crossover], count: int) -> list[NearPoint]:
    """As many points, those nearest to a crossing first; of equally near ones those whose times are closest.

    Where nothing crosses, points are ranked by the closeness of their times alone.
    """
    near = []
    for result in results:
        compared = result.comparison
        first, second = compared.schedules
        for index in result.scan:
            if (times_s := compared.times_s(index)) is None:
                continue
            value = compared.values[index]
            distances = (abs(math.log(value / crossing.value)) for crossing in result.crossings)
            points = compared.at(first, index), compared.at(second, index)
            near.append(NearPoint(points, result.labels, value, times_s, min(distances, default=math.inf)))
    return sorted(near, key=lambda point: (point.distance, abs(math.log(point.speedup))))[:count]


@dataclass(frozen=True)
class Measured:
    """A point and its two runs on the fabric, of the first and of the second schedule."""

    near: NearPoint
    runs: tuple[Run, Run]
    scale: float

    @property
    def speedups(self) -> tuple[float, float]:
        """The second time over the first on the fabric: predicted and measured."""
        first, second = self.runs
        predicted = float(second.prediction.time_s) / float(first.prediction.time_s)
        return predicted, second.measured_s / first.measured_s


def check_validation(folder: Path, top: int, repeats: int) -> None:
    """Raise `StudyError` unless there is something to do, and `OutputError` for a folder that cannot be written."""
    for name, value in (("top", top), ("repeat", repeats)):
        if value < 1:
            raise StudyError(f"{name}: {value}, expected 1 or more")
    for name in (CSV, JSON) if folder.is_dir() else ():
        check_writable(folder / name)


def measure_points(
    near: Sequence[NearPoint],
    along: str,
    folder: Path,
    repeats: int = 5,
    progress: ProgressCallback = no_progress,
) -> View:
    """Measure points on the emulated fabric, and write `CSV` and `JSON` into a folder after each of them.

    The view has a row per point and schedule. Raises `StudyError` without any point, and what
    `tasp_lab.validation.validate.validate` raises.
    """
    if not near:
        raise StudyError("no point at which both schedules apply, so nothing can be measured")
    topologies = [load_machine(point.points[0].machine, library="ideal").topology for point in near]
    busy_s = [(repeats + 1) * sum(point.times_s) for point in near]
    scales = [default_scale(topology, seconds) for topology, seconds in zip(topologies, busy_s, strict=True)]
    fabrics_s = zip(topologies, scales, busy_s, strict=True)
    total_s = sum(expected_fabric_s(topology.scaled(scale), seconds / scale) for topology, scale, seconds in fabrics_s)
    progress(f"measuring {len(near)} points on the emulated fabric takes about {total_s:.0f} s")
    measured: list[Measured] = []
    for point, scale in zip(near, scales, strict=True):
        first, second = point.points
        comparison = validate(
            first.machine,
            [first.schedule, second.schedule],
            first.layer,
            overrides=first.overrides,
            kernel=first.kernel,
            options=first.options,
            scale=scale,
            repeats=repeats,
            progress=progress,
        )
        runs = [run for run in comparison.runs if run.prediction.is_all]
        measured.append(Measured(point, (runs[0], runs[1]), comparison.scale))
        view = _view(measured, along, folder)
        _write(view, folder)
    return view


def _view(measured: Sequence[Measured], along: str, folder: Path) -> View:
    rows = [row for each in measured for row in _rows(each, along)]
    names = list(dict.fromkeys(name for each in measured for name, _ in each.near.labels))
    columns = (*names, along, "schedule", "study", "predicted", "measured", "error",
               "speed-up: study", "predicted", "measured")  # fmt: skip
    cells = [_cells(each, number, along, names) for each in measured for number in (0, 1)]
    reasons = dict.fromkeys(run.not_comparable for each in measured for run in each.runs if run.not_comparable)
    return View(
        {"along": along, "folder": str(folder), "points": rows, "note": NOTE},
        rows,
        [
            Table("measured on the emulated fabric", columns, cells, (*range(len(names)), len(names) + 1)),
            NOTE,
            *(f"not a prediction: {reason}" for reason in reasons),
        ],
    )


def _rows(each: Measured, along: str) -> Iterator[dict[str, object]]:
    predicted, measured = each.speedups
    for point, study_s, run in zip(each.near.points, each.near.times_s, each.runs, strict=True):
        yield {
            **dict(each.near.labels),
            "machine": point.machine,
            along: each.near.value,
            "schedule": point.schedule,
            "time_s": study_s,
            "predicted_s": float(run.prediction.time_s),
            "measured_s": run.measured_s,
            "error": run.relative_error,
            "comparable": run.not_comparable is None,
            "scale": each.scale,
            "study_speedup": each.near.speedup,
            "predicted_speedup": predicted,
            "measured_speedup": measured,
        }


def _cells(each: Measured, number: int, along: str, names: Sequence[str]) -> list[str]:
    labels, run = dict(each.near.labels), each.runs[number]
    speedups = (each.near.speedup, *each.speedups)
    return [
        *(str(labels.get(name, "")) for name in names),
        axis_text(along, each.near.value),
        each.near.points[number].schedule,
        format_time(each.near.times_s[number]),
        format_time(run.prediction.time_s),
        format_time(run.measured_s),
        f"{run.relative_error:+.1%}" if run.not_comparable is None else "not a prediction",
        *(f"{ratio:.2f}x" if number == 0 else "" for ratio in speedups),
    ]


def _write(view: View, folder: Path) -> None:
    """Both files, whole."""
    names = list(dict.fromkeys(name for row in view.rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(view.rows)
    write_whole(folder / CSV, text.getvalue().encode())
    write_whole(folder / JSON, (json.dumps(view.to_dict(), indent=1) + "\n").encode())
