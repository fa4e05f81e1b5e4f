"""Points of a study measured on the emulated fabric, beside their predictions."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasp_lab.core.errors import StudyError
from tasp_lab.core.files import check_writable, write_whole
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part, Table
from tasp_lab.core.units import format_time
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.study.find.crossovers_report import axis_text
from tasp_lab.study.find.nearest import NearPoint
from tasp_lab.validation.fabrics import default_scale, expected_fabric_s
from tasp_lab.validation.validate import Run, validate

CSV, JSON = "validated.csv", "validated.json"

NOTE = (
    "the fabric has the links of the machine, scaled, and no latency and communication library: its own prediction is "
    "that of a calibration of the fabric"
)


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


@dataclass(frozen=True, repr=False)
class Validated(Report):
    """The points that were measured, those nearest to a crossover first; `folder` is where the files are."""

    along: str
    measured: tuple[Measured, ...]
    folder: Path

    def to_dict(self) -> dict[str, object]:
        return {"along": self.along, "folder": str(self.folder), "points": self.records(), "note": NOTE}

    def records(self) -> list[dict[str, object]]:
        """A row per point and schedule."""
        return [row for each in self.measured for row in self._rows(each)]

    def parts(self) -> list[Part]:
        names = list(dict.fromkeys(name for each in self.measured for name, _ in each.near.labels))
        columns = (*names, self.along, "schedule", "study", "predicted", "measured", "error",
                   "speed-up: study", "predicted", "measured")  # fmt: skip
        rows = [self._cells(each, number, names) for each in self.measured for number in (0, 1)]
        texts = (*range(len(names)), len(names) + 1)
        return [Table("measured on the emulated fabric", columns, rows, texts), NOTE, *self._reasons()]

    def _reasons(self) -> list[str]:
        reasons = dict.fromkeys(run.not_comparable for each in self.measured for run in each.runs if run.not_comparable)
        return [f"not a prediction: {reason}" for reason in reasons]

    def _rows(self, each: Measured) -> Iterator[dict[str, object]]:
        for point, study_s, run in zip(each.near.points, each.near.times_s, each.runs, strict=True):
            predicted, measured = each.speedups
            yield {
                **dict(each.near.labels),
                "machine": point.machine,
                self.along: each.near.value,
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

    def _cells(self, each: Measured, number: int, names: Sequence[str]) -> list[str]:
        labels, run = dict(each.near.labels), each.runs[number]
        speedups = (each.near.speedup, *each.speedups)
        return [
            *(str(labels.get(name, "")) for name in names),
            axis_text(self.along, each.near.value),
            each.near.points[number].schedule,
            format_time(each.near.times_s[number]),
            format_time(run.prediction.time_s),
            format_time(run.measured_s),
            f"{run.relative_error:+.1%}" if run.not_comparable is None else "not a prediction",
            *(f"{ratio:.2f}x" if number == 0 else "" for ratio in speedups),
        ]


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
) -> Validated:
    """Measure points on the emulated fabric, and write `CSV` and `JSON` into a folder after each of them.

    Raises `StudyError` without any point, and what `tasp_lab.validation.validate.validate` raises.
    """
    if not near:
        raise StudyError("no point at which both schedules apply, so nothing can be measured")
    scales = [_scale(each, repeats) for each in near]
    seconds = sum(_expected_s(each, scale, repeats) for each, scale in zip(near, scales, strict=True))
    progress(f"measuring {len(near)} points on the emulated fabric takes about {seconds:.0f} s")
    found = Validated(along, (), folder)
    for each, scale in zip(near, scales, strict=True):
        found = Validated(along, (*found.measured, _measure(each, scale, repeats, progress)), folder)
        _write(found)
    return found


def _scale(near: NearPoint, repeats: int) -> float:
    """The scale of the fabric for a point, see `tasp_lab.validation.fabrics.default_scale`."""
    topology = load_machine(near.points[0].machine, library="ideal").topology
    return default_scale(topology, (repeats + 1) * sum(near.times_s))


def _expected_s(near: NearPoint, scale: float, repeats: int) -> float:
    topology = load_machine(near.points[0].machine, library="ideal").topology
    return expected_fabric_s(topology.scaled(scale), (repeats + 1) * sum(near.times_s) / scale)


def _measure(near: NearPoint, scale: float, repeats: int, progress: ProgressCallback) -> Measured:
    first, second = near.points
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
    return Measured(near, (runs[0], runs[1]), comparison.scale)


def _write(found: Validated) -> None:
    """Both files, whole."""
    rows = found.records()
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    write_whole(found.folder / CSV, text.getvalue().encode())
    write_whole(found.folder / JSON, (json.dumps(found.to_dict(), indent=1) + "\n").encode())
