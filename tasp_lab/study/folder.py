"""The folder of a study that was run, or is running: its rows, and where its numbers come from::

    StudyFolder("longctx").rows()

========================  =====================================================================================
file                      contents
========================  =====================================================================================
``study.toml``            the study as it was asked; of it ``[study]``, ``[schedule] baseline`` and ``[find]`` are read
``results.sqlite``        the rows while the study runs, `tasp_lab.study.store`; the files below are written at its end
``points.parquet``        every row; columns of `tasp_lab.study.point` and one per further axis
``points.csv``            the same for other programs
``unanswered.csv``        the rows without a time or a bound, for people: `status` and `error` are why
``provenance.json``       `format`, `study`, `seed`, `version`, `command`, `constants`, `assumptions`
========================  =====================================================================================

A cell that has no value is missing (None in Python). Columns beyond `tasp_lab.study.point.COLUMNS` are axes.
The baseline is always simulated, never settled by a bound, since speed-ups are over its time.
"""

from __future__ import annotations

import io
import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from tasp_lab.core.errors import OutputError, StudyError, TaspLabError, first_line
from tasp_lab.core.files import check_writable, write_whole
from tasp_lab.core.tables import csv_text
from tasp_lab.core.version import VERSION
from tasp_lab.machines.intervals import interval_ends
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.prediction.predict_step import step_constants
from tasp_lab.prediction.provenance import UsedConstant, compute_constants, host_constants, machine_constants
from tasp_lab.prediction.question import prepared
from tasp_lab.prediction.training_step.layout import Layout
from tasp_lab.prediction.training_step.rates import step_rates
from tasp_lab.study.evaluate import labelled
from tasp_lab.study.file import load_study
from tasp_lab.study.frames import needed, varying
from tasp_lab.study.point import COLUMNS, PREDICTED, Point, Row
from tasp_lab.study.store import RESULTS, Store
from tasp_lab.study.study import Study
from tasp_lab.workload.kernel_shapes import Passing

if TYPE_CHECKING:
    import pandas as pd

STUDY, POINTS, POINTS_CSV, UNANSWERED = "study.toml", "points.parquet", "points.csv", "unanswered.csv"
PROVENANCE, REPORT, PLOTS = "provenance.json", "report.html", "plots"

FORMAT = 2
"""Of the files of a folder; a folder of another format is refused."""

Provenance = Mapping[str, Any]
"""``format``: `FORMAT`; ``study``: its name; ``seed``, ``version``; ``command``: what repeats it; ``constants``: a list
of ``machine``, ``name``, ``value``, ``low``, ``high``, ``source``, ``assumed``; ``assumptions``: a list of texts."""


# ------------------------------------------------------------------------------------------------ read a folder


@dataclass(frozen=True)
class Outline:
    """What a study asks.

    `baseline` is the schedule that speed-ups are over, None without one; `axes` are the columns with more than one
    value, in the order of the row; `find` is the section of that name.
    """

    name: str
    seed: int
    baseline: str | None
    axes: tuple[str, ...]
    find: Mapping[str, Any]


class StudyFolder:
    """A study that was run. Raises `StudyError` unless there is one at `path`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise StudyError(f"{path}: no such folder")
        if not self.path.is_dir():
            raise StudyError(f"{path}: expected the folder of a study, not a file")
        if not (self.path / STUDY).exists() and not (self.path / PROVENANCE).exists():
            raise StudyError(
                f"{path}: no study there, expected {STUDY}, as tasp-lab study run FILE --output {path} writes"
            )

    def rows(self) -> pd.DataFrame:
        """All rows with a time or a bound, by column; further axes of the study have columns of their own."""
        found = self._points
        return found[found["status"].isin(PREDICTED)].reset_index(drop=True)

    def unanswered(self) -> pd.DataFrame:
        """The rows without either: those that do not apply, and those that failed; `error` is the reason."""
        found = self._points
        return found[~found["status"].isin(PREDICTED)].reset_index(drop=True)

    @property
    def so_far(self) -> int:
        """How many points have a row."""
        return len(self._points)

    @cached_property
    def expected(self) -> int:
        """How many points the study has: more than there are rows while it runs, or where it was interrupted."""
        return len(self._points) if self._is_complete else len(self._so_far[0])

    def provenance(self) -> Provenance:
        """What the numbers follow from. Raises `StudyError` for a folder of another format."""
        return self._provenance

    @cached_property
    def study(self) -> Outline:
        """What the study asks."""
        asked, told = self._asked, self.provenance()
        baseline = asked.get("schedule", {}).get("baseline")
        name, seed = str(told.get("study") or self.path.resolve().name), int(told.get("seed") or 0)
        return Outline(name, seed, baseline, varying(self._points), asked.get("find", {}))

    @cached_property
    def _points(self) -> pd.DataFrame:
        self.provenance()
        if not self._is_complete:
            return self._with_columns(needed("pandas", "a study").DataFrame(self._so_far[1]))
        try:
            found = needed("pandas", "a study").read_parquet(self._file(POINTS), engine="pyarrow")
        except ImportError:
            needed("pyarrow", "a study")
            raise
        except (OSError, ValueError) as error:
            raise StudyError(f"{self.path / POINTS}: cannot be read: {first_line(error)}") from error
        missing = [each for each in ("machine", "schedule", "status", "time_s") if each not in found]
        if missing:
            raise StudyError(f"{self.path / POINTS}: no column {missing[0]!r}, expected the rows of a study")
        return self._with_columns(found)

    def _with_columns(self, found: pd.DataFrame) -> pd.DataFrame:
        if found.empty:
            raise self._nothing()
        return found.reindex(columns=[*found.columns, *(each for each in COLUMNS if each not in found)])

    @cached_property
    def _provenance(self) -> Provenance:
        if not self._is_complete:
            study = load_study(self.path / STUDY)
            return provenance(study, self._so_far[0], "")
        path = self._file(PROVENANCE)
        try:
            found: Provenance = json.loads(path.read_text())
            written = found.get("format")
        except (OSError, ValueError, AttributeError) as error:
            raise StudyError(f"{path}: cannot be read: {first_line(error)}") from error
        if written != FORMAT:
            raise StudyError(f"{self.path}: was written in format {written}, expected format {FORMAT} of this version")
        return found

    @cached_property
    def _asked(self) -> Mapping[str, Any]:
        path = self.path / STUDY
        try:
            return tomllib.loads(path.read_text()) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise StudyError(f"{path}: cannot be read: {first_line(error)}") from error

    @property
    def _is_complete(self) -> bool:
        """Whether a run ended: it removes these files when it begins."""
        return (self.path / PROVENANCE).exists() or (self.path / POINTS).exists()

    @cached_property
    def _so_far(self) -> tuple[Sequence[Point], Sequence[Row]]:
        """The points of a study that is running or was interrupted, and the rows of those that have one.

        Nothing is built or simulated.
        """
        if not (self.path / RESULTS).exists():
            raise self._nothing()
        points = list(load_study(self.path / STUDY).points())
        questions = [point.key() for point in points]
        with Store(self.path) as store:
            last = store.last()
            stored = store.rows(last[question].key for question in questions if question in last)
        keys = [last[question].key if question in last else "" for question in questions]
        rows = [labelled(stored[key], point) for key, point in zip(keys, points, strict=True) if key in stored]
        return points, rows

    def _file(self, name: str) -> Path:
        """A file of the folder that a run writes."""
        path = self.path / name
        if not path.exists():
            raise self._nothing()
        return path

    def _nothing(self) -> StudyError:
        return StudyError(
            f"{self.path}: nothing was run yet, expected {POINTS} or {RESULTS}, as tasp-lab study run writes them"
        )


# ----------------------------------------------------------------------------------------------- write a folder


def begin_folder(folder: Path, study: Study) -> None:
    """Make the folder and write the study into it. Raises `StudyError` for a folder of another study."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}") from error
    check_writable(folder / STUDY)
    there = name_of(folder)
    if there not in (None, study.name):
        raise StudyError(f"{folder}: has the study {there!r}, expected {study.name!r} or an empty folder")
    document = {**study.document, "study": {**study.document.get("study", {}), "name": study.name}}
    write_whole(folder / STUDY, tomli_w.dumps(document).encode())


def name_of(folder: Path) -> str | None:
    """The name of the study in a folder, None without one."""
    try:
        return str(tomllib.loads((folder / STUDY).read_text())["study"]["name"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise StudyError(f"{folder / STUDY}: cannot be read: {error}") from error


def export(folder: Path, study: Study, points: Sequence[Point], rows: Sequence[Row], command: str) -> None:
    """Write the rows and their provenance, each file whole or not at all."""
    write_whole(folder / POINTS_CSV, csv_text(rows, COLUMNS).encode())
    unanswered = [row for row in rows if row["status"] not in PREDICTED]
    write_whole(folder / UNANSWERED, csv_text(unanswered, COLUMNS).encode())
    if find_spec("pyarrow") and find_spec("pandas"):
        write_whole(folder / POINTS, _parquet(rows))
    write_whole(folder / PROVENANCE, json.dumps(provenance(study, points, command), indent=1).encode())


def remove_exports(folder: Path) -> None:
    """Remove what an earlier run wrote of its rows: until this run ends, the store alone has the rows of the study."""
    for name in (POINTS, POINTS_CSV, UNANSWERED, PROVENANCE):
        with suppress(FileNotFoundError):
            (folder / name).unlink()


def _parquet(rows: Sequence[Row]) -> bytes:
    pandas, stream = needed("pandas", "a study"), io.BytesIO()
    columns = dict.fromkeys([*COLUMNS, *(name for row in rows for name in row)])
    frame = pandas.DataFrame(rows, columns=list(columns))
    for name in frame.columns:  # a column of texts and numbers is one of texts
        kinds = {type(each) for each in frame[name] if each is not None and each == each}
        if len(kinds - {int, float}) and len(kinds) > 1:
            frame[name] = [None if each is None else str(each) for each in frame[name]]
    frame.to_parquet(stream, engine="pyarrow", index=False)
    return stream.getvalue()


def provenance(study: Study, points: Sequence[Point], command: str) -> dict[str, Any]:
    """Where the numbers of a study come from: see `Provenance`."""
    constants: dict[tuple[object, ...], Mapping[str, object]] = {}
    assumptions: dict[tuple[str, str, str], dict[str, None]] = {}  # machines by what is assumed, whatever the variant
    for point in points:
        name = " with ".join([point.machine, *point.overrides])
        step = point.job and (point.job.matrix_dtype, point.job.offload)
        software = point.kernel, point.stack, point.schedule if point.stack else ""
        if (asked := (name, point.layer.dtype, *software, step)) in constants:
            continue
        constants[asked] = {}
        for each, ends in _constants(point):
            constants.setdefault((name, each.name, each.value), _plain(name, each, ends))
            if each.assumed:
                assumptions.setdefault((each.name, each.value, each.source), {})[point.machine] = None
    return {
        "format": FORMAT,
        "study": study.name,
        "seed": study.seed,
        "version": VERSION,
        "command": command,
        "constants": [each for each in constants.values() if each],
        "assumptions": [
            f"{', '.join(machines)}: {name} = {value}: {source}"
            for (name, value, source), machines in assumptions.items()
        ],
    }


Ends = tuple[str, str] | tuple[None, None]
"""Of an interval, as texts; of an exact constant none."""

NO_ENDS: Ends = (None, None)


def _constants(point: Point) -> Sequence[tuple[UsedConstant, Ends]]:
    """The constants of the machine of a point with their intervals, and of its kernels; none if it is refused."""
    asked, job = point.options.passes, point.job
    try:
        machine: Machine = prepared(point).machine_for(point.layer, point.schedule if point.stack else "", asked)
    except TaspLabError:
        return ()
    passes: tuple[Passing, ...] = ("forward", "backward") if asked == "both" or job is not None else (asked,)
    rates: dict[str, ComputeRate] = {each: machine.rate_of(point.layer, each) for each in passes}
    others = [*host_constants(machine.host), *compute_constants(point.layer.dtype, rates)]
    if job is not None:
        others += step_constants(step_rates(machine, job.matrix_dtype), job.matrix_dtype, Layout(offload=job.offload))
    own = [
        (used, interval_ends(each) or NO_ENDS)
        for each in machine.parameters.values()
        for used in machine_constants([each])
    ]
    return (*own, *((each, NO_ENDS) for each in others))


def _plain(machine: str, constant: UsedConstant, ends: Ends) -> Mapping[str, object]:
    return {
        "machine": machine,
        "name": constant.name,
        "value": constant.value,
        "low": ends[0],
        "high": ends[1],
        "source": constant.source,
        "assumed": constant.assumed,
    }
