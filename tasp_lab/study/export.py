"""The files of a study's folder besides its store: `tasp_lab.study.folder` says which, and reads them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli_w

from tasp_lab.core.errors import OutputError, StudyError, TaspLabError
from tasp_lab.core.files import check_writable, write_whole
from tasp_lab.core.version import VERSION
from tasp_lab.machines.intervals import interval_ends
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.prediction.provenance import UsedConstant, compute_constants, machine_constants, runtime_constants
from tasp_lab.study.evaluate import prepared
from tasp_lab.study.folder import FORMAT, POINTS, POINTS_CSV, PROVENANCE, STUDY, UNANSWERED
from tasp_lab.study.needed import needed
from tasp_lab.study.point import Point
from tasp_lab.study.rows import COLUMNS, PREDICTED, Row
from tasp_lab.study.study import Study
from tasp_lab.workload.kernel_shapes import Passing


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
    import tomllib

    try:
        return str(tomllib.loads((folder / STUDY).read_text())["study"]["name"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise StudyError(f"{folder / STUDY}: cannot be read: {error}") from error


def export(folder: Path, study: Study, points: Sequence[Point], rows: Sequence[Row], command: str) -> None:
    """Write the rows and their provenance, each file whole or not at all."""
    write_whole(folder / POINTS_CSV, _csv(rows))
    write_whole(folder / UNANSWERED, _csv([row for row in rows if row["status"] not in PREDICTED]))
    if find_spec("pyarrow") and find_spec("pandas"):
        write_whole(folder / POINTS, _parquet(rows))
    write_whole(folder / PROVENANCE, json.dumps(provenance(study, points, command), indent=1).encode())


def remove_exports(folder: Path) -> None:
    """Remove what an earlier run wrote of its rows: until this run ends, the store alone has the rows of the study."""
    for name in (POINTS, POINTS_CSV, UNANSWERED, PROVENANCE):
        with suppress(FileNotFoundError):
            (folder / name).unlink()


def columns_of(rows: Iterable[Row]) -> list[str]:
    """The columns of rows: those of all studies, then further axes."""
    return list(dict.fromkeys([*COLUMNS, *(name for row in rows for name in row)]))


def _csv(rows: Sequence[Row]) -> bytes:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns_of(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def _parquet(rows: Sequence[Row]) -> bytes:
    pandas, stream = needed("pandas", "a study"), io.BytesIO()
    frame = pandas.DataFrame(rows, columns=columns_of(rows))
    for name in frame.columns:  # a column of texts and numbers is one of texts
        kinds = {type(each) for each in frame[name] if each is not None and each == each}
        if len(kinds - {int, float}) and len(kinds) > 1:
            frame[name] = [None if each is None else str(each) for each in frame[name]]
    frame.to_parquet(stream, engine="pyarrow", index=False)
    return stream.getvalue()


def provenance(study: Study, points: Sequence[Point], command: str) -> dict[str, Any]:
    """Where the numbers of a study come from: see `tasp_lab.study.folder.Provenance`."""
    constants: dict[tuple[object, ...], Mapping[str, object]] = {}
    assumptions: dict[str, None] = {}
    for point in points:
        name = " with ".join([point.machine, *point.overrides])
        if (name, point.layer.dtype, point.kernel, point.runtime) in constants:
            continue
        constants[name, point.layer.dtype, point.kernel, point.runtime] = {}
        for each, ends in _constants(point):
            constants.setdefault((name, each.name, each.value), _plain(name, each, ends))
            if each.assumed:
                assumptions.setdefault(f"{name}: {each.name} = {each.value}: {each.source}")
    return {
        "format": FORMAT,
        "study": study.name,
        "seed": study.seed,
        "version": VERSION,
        "command": command,
        "constants": [each for each in constants.values() if each],
        "assumptions": list(assumptions),
    }


Ends = tuple[str, str] | tuple[None, None]
"""Of an interval, as texts; of an exact constant none."""

NO_ENDS: Ends = (None, None)


def _constants(point: Point) -> Sequence[tuple[UsedConstant, Ends]]:
    """The constants of the machine of a point with their intervals, and of its kernels; none if it is refused."""
    try:
        machine: Machine = prepared(point).machine
    except TaspLabError:
        return ()
    asked = point.options.passes
    passes: tuple[Passing, ...] = ("forward", "backward") if asked == "both" else (asked,)
    rates: dict[str, ComputeRate] = {each: machine.rate_of(point.layer, each) for each in passes}
    others = (*runtime_constants(machine.runtime), *compute_constants(point.layer.dtype, rates))
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
