"""Points become rows: pure functions of the point, its machine, its schedules, and the version of the models."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

from tasp_lab.core.errors import ScheduleError, StudyError, TaspLabError, first_line
from tasp_lab.core.version import MODEL_VERSION, VERSION
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden_layer
from tasp_lab.planning.changes import Job
from tasp_lab.planning.plan import ANY, plan, plan_fields
from tasp_lab.prediction.columns import fields_of
from tasp_lab.prediction.evaluate import build, refusal
from tasp_lab.prediction.paired import setting_of
from tasp_lab.prediction.question import Question, Value, constants_of, key_of
from tasp_lab.prediction.training_step.layout import describe
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.registry import check_names, is_own
from tasp_lab.study.point import COLUMNS, OF_PLANS, SETTINGS, Point, Row, cells_of_layer
from tasp_lab.workload.layer import Workload

CODE = f"{VERSION} with models {MODEL_VERSION}"
"""What workers need to have in common with who started the study."""


def evaluate(point: Point) -> Row:
    """The row of a point; of one without an answer with the reason.

    >>> from tasp_lab.workload.layer import Workload
    >>> row = evaluate(Point("full-mesh:4", "ulysses", Workload(4096, heads=4)))
    >>> row["status"], row["ranks"], row["time_s"] > row["compute_s"]
    ('ok', 4, True)
    """
    (row,) = group_rows([point])
    assert not isinstance(row, str), "no key is known"
    return labelled(row, point)


def group_rows(
    points: Sequence[Point], screen: bool = False, known: Collection[str] = (), code: str = CODE
) -> list[Row | str]:
    """The rows of points, without labels; only the key of those whose key is `known`.

    The schedules of each point are built, since its key follows from them; those of a known key are not simulated.
    With `screen`, a schedule whose bound is above the time of another with the same machine, layer and options is
    settled without a simulation; the first of these points is always simulated. Raises `StudyError` where another
    version of tasp-lab asks.
    """
    if code != CODE:
        raise StudyError(f"a worker has tasp-lab {CODE}, the study was started by {code}: expected one version")
    best_s: dict[Question, float] = {}
    rows = list[Row | str]()
    for point in points:
        # A point without its schedule stands for the question that schedules compete for.
        rivals = replace(point, schedule="")
        row = _answer(point, best_s.get(rivals) if screen else None, known)
        if not isinstance(row, str) and row["status"] == "ok":
            best_s[rivals] = min(best_s.get(rivals, math.inf), float(row["time_s"] or 0))
        rows.append(row)
    return rows


def labelled(answer: Row, point: Point) -> Row:
    """The row of an answer at a point of a study: with the values of its axes, in the order of the columns.

    Columns that are no axis have the values of the answer, which overrides may have changed.
    """
    axes = {name: value for name, value in point.labels if name != "pass" and answer.get(name) is None}
    return {**answer, **axes}


BATCH = 128
"""The points that a worker answers at a time, at most, unless one machine and layer have more."""


def batches(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Points in batches of one layer, with all schedules of a machine, so that they can be screened.

    In a batch, those of one schedule follow each other: on machines that differ in numbers only, schedules are often
    equal, and what follows from them is found once.
    """
    of_layer: dict[Workload, list[list[Point]]] = {}
    for (_, layer), rivals in groupby(points, key=lambda point: (point.on, point.layer)):
        of_layer.setdefault(layer, []).append(list(rivals))
    for same in of_layer.values():
        batch: list[Point] = []
        for group in [*same, []]:  # the last one ends the batch
            if group and group[0].job is not None:  # a plan takes as long as a batch of layers
                yield from ([point] for point in group)
                continue
            if batch and (not group or len(batch) + len(group) > BATCH):
                place = {name: number for number, name in enumerate(dict.fromkeys(point.schedule for point in batch))}
                yield sorted(batch, key=lambda point: place[point.schedule])
                batch = []
            batch += group


def sources_of(schedules: Iterable[str]) -> dict[str, str]:
    """The digest of the sources of each of these schedules, empty for one that tasp-lab does not build itself.

    As long as it stays the same, so do the schedules of a point, and its key is known without building them, which
    would take a third of the time of a simulation. It covers all files of tasp_lab, so that no import is missed, and
    the packages that searches for rings use. A schedule that was registered from elsewhere may follow from anything
    (other modules, a closure, the environment), so it has no such digest and is always built.
    """
    own = own_sources()
    return {name: own if name == ANY or is_own(name) else "" for name in schedules}


def own_sources() -> str:
    """The digest of all that tasp-lab builds schedules from. Not cached: a notebook may load edited modules again."""
    digest, package = hashlib.sha256(), Path(__file__).resolve().parents[1]
    for path in sorted(each for each in package.rglob("*") if each.is_file() and each.parent.name != "__pycache__"):
        content = path.read_bytes()  # names and lengths are in the digest, so that no byte can move to the next file
        digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    for name in ("numpy", "scipy", "networkx", "ortools"):
        try:
            digest.update(f"{name} {metadata.version(name)}\n".encode())
        except metadata.PackageNotFoundError:
            continue
    return digest.hexdigest()[:32]


def _answer(point: Point, best_s: float | None, known: Collection[str]) -> Row | str:
    constants = constants_of(point)
    question = point.key(constants)
    cells: dict[str, Value] = dict.fromkeys(COLUMNS)
    cells |= {
        "machine": point.machine,
        "schedule": point.name,
        "passes": point.options.passes,
        "overrides": ", ".join(point.overrides),
        "library": point.library,
        **cells_of_layer(point.layer),
        "version": VERSION,
        "models": MODEL_VERSION,
        "constants": constants,
        "inputs": json.dumps(point.inputs(), sort_keys=True),
    }
    if point.job is not None:
        return _planned(point, point.job, question, cells, known)
    try:
        try:
            check_names([point.name], overridden_layer(point.layer, point.overrides))
        except ScheduleError as error:  # unknown here, but another process may know it: ask again
            raise StudyError(first_line(error)) from error
        built = build(point)
    except TaspLabError as error:
        refused = refusal(point, error)
        key = key_of(question, first_line(error))
        return key if key in known else {**cells, "key": key, "status": refused.status, "error": first_line(error)}
    candidates = (replace(each, passes=tuple(map(_known_or, each.passes))) for each in built.candidates)
    built = replace(built, candidates=tuple(candidates))
    key = key_of(question, built.digest)
    cells |= {**cells_of_layer(overridden_layer(point.layer, point.overrides)), "digest": built.digest, "key": key}
    if key in known:  # the schedules are those of a stored row, so the simulation would give its numbers again
        return key
    of_machine = _of_machine(built.on.machine)
    try:
        if best_s is not None and built.least_s > best_s:
            return {**cells, **of_machine, "bound_s": built.least_s, "settled_by": "bound", "status": "settled"}
        return {**cells, **of_machine, **fields_of(built.answer(), "study"), "status": "ok"}  # type: ignore[dict-item]
    except TaspLabError as error:
        return {**cells, "error": first_line(error), "status": "failed"}


def _planned(point: Point, job: Job, question: str, cells: dict[str, Value], known: Collection[str]) -> Row | str:
    """The row of the layout that `plan` recommends; its schedule is that layout in words."""
    # Which schedules a plan builds is not known before it is made, so all sources stand for them.
    key = key_of(question, own_sources())
    if key in known:
        return key
    cells |= {"passes": "both", "attention": point.schedule}
    schedules = None if point.schedule == ANY else point.schedule
    settings: dict[str, Any] = {name: getattr(point, name) for name in (*SETTINGS, "overrides")}
    try:
        found = plan(
            point.machine, sequence=point.layer.sequence, schedules=schedules, changes=False, **vars(job), **settings
        )
    except TaspLabError as error:
        return {**cells, "key": key, "status": refusal(point, error).status, "error": first_line(error)}
    machine, numbers = found.setting.machine, plan_fields(found)
    cells |= {"key": key, **_of_machine(machine), **dict.fromkeys(OF_PLANS)}
    if not found.fits:
        return {**cells, **numbers, "status": "does not apply", "error": found.nothing_fits}
    step, interval = found.best, found.best.interval
    return {
        **cells,
        **numbers,
        "status": "ok",
        "schedule": describe(step.plan),
        "time_s": step.time_s,
        "time_low_s": interval.low_s,
        "time_high_s": interval.high_s,
        "setting": setting_of(machine),
        "compute_s": step.times.compute_s,
        "exposed_s": step.times.exposed_s,
        "bottleneck": max(found.shares, key=lambda name: found.shares[name]),
        "buffer_bytes": step.memory.attention_buffers,
        "memory_bytes": step.memory.total,
        "fits": step.fits,
        "settled_by": "simulation",
    }


RECENT = 8
"""Schedules that are kept, so that points with equal ones have the same."""

_recent: dict[str, Schedule] = {}


def _known_or(schedule: Schedule) -> Schedule:
    """The schedule of an earlier point in place of an equal one: what follows from it is known."""
    found = _recent.pop(schedule.digest, schedule)
    _recent[schedule.digest] = found  # the last one used is the last one
    if len(_recent) > RECENT:
        del _recent[next(iter(_recent))]
    return found


def _of_machine(machine: Machine) -> dict[str, Value]:
    """The cells of a machine: its size and its library."""
    topology = machine.topology
    nodes = len(set(topology.node_of_rank))
    return {"ranks": topology.world_size, "nodes": nodes, "library": machine.comm_library.name}
