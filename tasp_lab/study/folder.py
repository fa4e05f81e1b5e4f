"""The folder of a study that was run, or is running: its rows, and where its numbers come from::

    StudyFolder("longctx").rows()

========================  =====================================================================================
file                      contents
========================  =====================================================================================
``study.toml``            the study as it was asked; what is shown follows from it and from its rows
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
from tasp_lab.study.file import load_study, read_document
from tasp_lab.study.frames import needed, varying
from tasp_lab.study.point import COLUMNS, PREDICTED, Point, Row, passes_of
from tasp_lab.study.store import RESULTS, Store
from tasp_lab.study.study import Study

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


class StudyFolder:
    """A study that was run, or is running. Raises `StudyError` unless there is one at `path`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise StudyError(f"{path}: no such folder")
        if not self.path.is_dir():
            raise StudyError(f"{path}: expected the folder of a study, not a file")
        if not (self.path / STUDY).exists() and not (self.path / PROVENANCE).exists():
            raise no_study(self.path)

    def rows(self) -> pd.DataFrame:
        """All rows with a time or a bound, by column; further axes of the study have columns of their own."""
        return self._points[self._points["status"].isin(PREDICTED)].reset_index(drop=True)

    def unanswered(self) -> pd.DataFrame:
        """The rows without either: those that do not apply, and those that failed; `error` is the reason."""
        return self._points[~self._points["status"].isin(PREDICTED)].reset_index(drop=True)

    @property
    def name(self) -> str:
        """The name of the study."""
        return str(self.provenance.get("study") or self.path.resolve().name)

    @cached_property
    def baseline(self) -> str | None:
        """The schedule that speed-ups are over, None without one."""
        path = self.path / STUDY
        asked = read_document(path) if path.exists() else {}
        found: str | None = asked.get("schedule", {}).get("baseline")
        return found

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The columns with more than one value, in the order of the row."""
        return varying(self._points)

    @property
    def so_far(self) -> int:
        """How many points have a row."""
        return len(self._points)

    @cached_property
    def expected(self) -> int:
        """How many points the study has: more than there are rows while it runs, or where it was interrupted."""
        return len(self._points) if self._is_complete else len(self._so_far[0])

    @cached_property
    def provenance(self) -> Provenance:
        """What the numbers follow from. Raises `StudyError` for a folder of another format."""
        if not self._is_complete:
            return provenance(load_study(self.path / STUDY), self._so_far[0], "")
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
    def _points(self) -> pd.DataFrame:
        assert self.provenance, "a folder of another format is refused"
        pandas, path = needed("pandas", "a study"), self.path / POINTS
        if not self._is_complete:
            found = pandas.DataFrame(self._so_far[1])
        else:
            try:
                found = pandas.read_parquet(self._file(POINTS), engine="pyarrow")
            except ImportError:
                needed("pyarrow", "a study")
                raise
            except (OSError, ValueError) as error:
                raise StudyError(f"{path}: cannot be read: {first_line(error)}") from error
            for name in ("machine", "schedule", "status", "time_s"):
                if name not in found:
                    raise StudyError(f"{path}: no column {name!r}, expected the rows of a study")
        if found.empty:
            raise self._nothing()
        return found.reindex(columns=list(dict.fromkeys([*found.columns, *COLUMNS])))

    @property
    def _is_complete(self) -> bool:
        """Whether a run ended: it removes these files when it begins."""
        return (self.path / PROVENANCE).exists() or (self.path / POINTS).exists()

    @cached_property
    def _so_far(self) -> tuple[Sequence[Point], Sequence[Row]]:
        """The points of a study that is running or was interrupted, and the rows of those that have one.

        Nothing is built or simulated.
        """
        self._file(RESULTS)
        points = list(load_study(self.path / STUDY).points())
        with Store(self.path) as store:
            last = store.last()
            keys = [last[question].key if question in last else "" for question in (point.key() for point in points)]
            stored = store.rows(keys)
        rows = [labelled(stored[key], point) for key, point in zip(keys, points, strict=True) if key in stored]
        return points, rows

    def _file(self, name: str) -> Path:
        """A file of the folder that a run writes."""
        if not (self.path / name).exists():
            raise self._nothing()
        return self.path / name

    def _nothing(self) -> StudyError:
        expected = f"expected {POINTS} or {RESULTS}, as tasp-lab study run writes them"
        return StudyError(f"{self.path}: nothing was run yet, {expected}")


def no_study(path: Path) -> StudyError:
    """The error of a folder without a study."""
    return StudyError(f"{path}: no study there, expected {STUDY}, as tasp-lab study run FILE --output {path} writes")


# ----------------------------------------------------------------------------------------------- write a folder


def begin_folder(folder: Path, study: Study) -> None:
    """Make the folder and write the study into it. Raises `StudyError` for a folder of another study."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}") from error
    check_writable(folder / STUDY)
    if (folder / STUDY).exists():
        there = read_document(folder / STUDY).get("study", {}).get("name")
        if there != study.name:
            raise StudyError(f"{folder}: has the study {there!r}, expected {study.name!r} or an empty folder")
    document = {**study.document, "study": {**study.document.get("study", {}), "name": study.name}}
    write_whole(folder / STUDY, tomli_w.dumps(document).encode())


def export(folder: Path, study: Study, points: Sequence[Point], rows: Sequence[Row], command: str) -> None:
    """Write the rows and their provenance, each file whole or not at all."""
    write_whole(folder / POINTS_CSV, csv_text(rows, COLUMNS).encode())
    unanswered = [row for row in rows if row["status"] not in PREDICTED]
    write_whole(folder / UNANSWERED, csv_text(unanswered, COLUMNS).encode())
    if find_spec("pyarrow") and find_spec("pandas"):  # without them a study can be run, but not shown
        write_whole(folder / POINTS, _parquet(rows))
    # last, since a folder with it is complete
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
    seen = set[tuple[object, ...]]()
    constants: dict[tuple[str, str, str], Mapping[str, object]] = {}
    assumptions: dict[tuple[str, str, str], dict[str, None]] = {}  # machines by what is assumed, whatever the variant
    for point in points:
        name = " with ".join([point.machine, *point.overrides])
        step = point.job and (point.job.matrix_dtype, point.job.offload)
        software = point.kernel, point.stack, point.schedule if point.stack else ""
        if (asked := (name, point.layer.dtype, *software, step)) in seen:
            continue
        seen.add(asked)
        for used, (low, high) in _constants(point):
            ends = {"value": used.value, "low": low, "high": high}
            told = {"machine": name, "name": used.name, **ends, "source": used.source, "assumed": used.assumed}
            constants.setdefault((name, used.name, used.value), told)
            if used.assumed:
                assumptions.setdefault((used.name, used.value, used.source), {})[point.machine] = None
    return {
        "format": FORMAT,
        "study": study.name,
        "seed": study.sampling.seed,
        "version": VERSION,
        "command": command,
        "constants": list(constants.values()),
        "assumptions": [
            f"{', '.join(machines)}: {name} = {value}: {source}"
            for (name, value, source), machines in assumptions.items()
        ],
    }


def _constants(point: Point) -> Iterator[tuple[UsedConstant, tuple[str | None, str | None]]]:
    """The constants of a machine with the ends of their intervals, and of its kernels; none if it is refused."""
    asked, job = point.options.passes, point.job
    try:
        machine: Machine = prepared(point).machine_for(point.layer, point.schedule if point.stack else "", asked)
    except TaspLabError:
        return
    passes = passes_of("both" if job is not None else asked)
    rates: dict[str, ComputeRate] = {each: machine.rate_of(point.layer, each) for each in passes}
    others = [*host_constants(machine.host), *compute_constants(point.layer.dtype, rates)]
    if job is not None:
        others += step_constants(step_rates(machine, job.matrix_dtype), job.matrix_dtype, Layout(offload=job.offload))
    for parameter in machine.parameters.values():
        yield from ((used, interval_ends(parameter) or (None, None)) for used in machine_constants([parameter]))
    yield from ((used, (None, None)) for used in others)
