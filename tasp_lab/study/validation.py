"""Measure the points of a study that are nearest to a crossover on the emulated fabric::

    measure_points(nearest(crossovers(points, question, evaluate), 5), question.along, folder)

Both schedules are compared with their predictions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tasp_lab.core.errors import StudyError
from tasp_lab.core.files import check_writable, write_whole
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import View
from tasp_lab.core.tables import Formats, Table, csv_text
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.prediction.question import Value
from tasp_lab.study.axis import axis_text
from tasp_lab.study.crossover import Crossover
from tasp_lab.study.point import Point
from tasp_lab.validation.fabrics import default_scale, expected_fabric_s
from tasp_lab.validation.validate import Run, validate

CSV, JSON = "validated.csv", "validated.json"

NOTE = (
    "the fabric has the links of the machine, scaled, and no latency and communication library: its own prediction is "
    "that of a calibration of the fabric"
)


class NearPoint(NamedTuple):
    """Two schedules at one value of the axis.

    Attributes
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
    return sorted(near, key=lambda point: (point.distance, abs(math.log(point.times_s[1] / point.times_s[0]))))[:count]


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
    rows, reasons = list[dict[str, Any]](), dict[str, None]()
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
        rows += _rows(point, along, runs[:2], comparison.scale)
        reasons |= dict.fromkeys(run.not_comparable for run in runs if run.not_comparable)
        notes = [NOTE, *(f"not a prediction: {reason}" for reason in reasons)]
        document = {"along": along, "folder": str(folder), "points": list(rows), "note": NOTE}
        view = View(document, list(rows), [*_table(rows, along, point), *notes])
        write_whole(folder / CSV, csv_text(rows).encode())
        write_whole(folder / JSON, (json.dumps(document, indent=1) + "\n").encode())
    return view


def _rows(near: NearPoint, along: str, runs: Sequence[Run], scale: float) -> Iterator[dict[str, Any]]:
    """The rows of both schedules at a point; speed-ups are the second time over the first."""
    predicted, measured = [float(run.prediction.time_s) for run in runs], [run.measured_s for run in runs]
    for point, study_s, run in zip(near.points, near.times_s, runs, strict=True):
        yield {
            **dict(near.labels),
            "machine": point.machine,
            along: near.value,
            "schedule": point.schedule,
            "time_s": study_s,
            "predicted_s": float(run.prediction.time_s),
            "measured_s": run.measured_s,
            "error": run.relative_error,
            "comparable": run.not_comparable is None,
            "scale": scale,
            "study_speedup": near.times_s[1] / near.times_s[0],
            "predicted_speedup": predicted[1] / predicted[0],
            "measured_speedup": measured[1] / measured[0],
        }


def _table(rows: Sequence[Mapping[str, Any]], along: str, near: NearPoint) -> list[Table]:
    names = [name for name, _ in near.labels]
    columns: Formats = {
        **{name: f"{{{name}}}" for name in names},
        along: lambda row: axis_text(along, row[along]),
        "schedule": "{schedule}", "study": "{time_s:time}", "predicted": "{predicted_s:time}",
        "measured": "{measured_s:time}",
        "error": lambda row: f"{row['error']:+.1%}" if row["comparable"] else "not a prediction",
        "speed-up: study": "{study_speedup:.2f}x", "speed-up: predicted": "{predicted_speedup:.2f}x",
        "speed-up: measured": "{measured_speedup:.2f}x",
    }  # fmt: skip
    return Table.of("measured on the emulated fabric", rows, columns, (*range(len(names)), len(names) + 1))
