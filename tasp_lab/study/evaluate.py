"""Points become rows: pure functions of the point, the constants of its machine and the version of tasp-lab."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby

from tasp_lab.analysis.layer_times import LayerTimes, PreparedMachine
from tasp_lab.attention.options import AttentionOptions
from tasp_lab.errors import StudyError, TaspLabError, first_line
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import Sampling
from tasp_lab.overrides import overridden, overridden_layer
from tasp_lab.study.point import Point, Value
from tasp_lab.study.rows import COLUMNS, Row, Status
from tasp_lab.training_step.rates import step_rates
from tasp_lab.version import VERSION
from tasp_lab.workload.layer import Workload

ENGINE = "array"


def evaluate(point: Point) -> Row:
    """The row of a point; of one that is refused with the reason.

    >>> from tasp_lab.workload.layer import Workload
    >>> row = evaluate(Point("full-mesh:4", "ulysses", Workload(4096, heads=4)))
    >>> row["status"], row["ranks"], row["time_s"] > row["compute_s"]
    ('done', 4, True)
    """
    return labelled(answers([point])[0], point)


def answers(points: Sequence[Point], screen: bool = False, version: str = VERSION) -> list[Row]:
    """The rows of points with one machine and one layer, without labels.

    With `screen`, a schedule whose bound is above the time of another with the same options is settled without a
    simulation; the first point is always simulated. Raises `StudyError` where another version of tasp-lab asks.
    """
    if version != VERSION:
        raise StudyError(f"a worker has tasp-lab {VERSION}, the study was started by {version}: expected one version")
    best_s: dict[AttentionOptions, float] = {}
    rows = []
    for point in points:
        row = _answer(point, best_s.get(point.options) if screen else None)
        if row["status"] == "done":
            best_s[point.options] = min(best_s.get(point.options, math.inf), float(row["time_s"] or 0))
        rows.append(row)
    return rows


def labelled(answer: Row, point: Point) -> Row:
    """The row of an answer at a point of a study: with the values of its axes, in the order of the columns.

    Columns that are no axis have the values of the answer, which overrides may have changed.
    """
    axes = {name: value for name, value in point.labels if name != "pass" and answer.get(name) is None}
    return {**answer, **axes}


def groups(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Points in groups that differ in their schedules and options only, in order."""

    def question(point: Point) -> tuple[object, ...]:
        rest = point.library, point.kernel, point.runtime, point.contention, point.sampling
        return point.machine, point.overrides, point.layer, rest

    for _, group in groupby(points, key=question):
        yield list(group)


def constants_of(point: Point) -> str:
    """The hash of the constants of the machine of a point; empty for a machine that is refused."""
    try:
        return prepared(point).constants_sha256
    except TaspLabError:
        return ""


def key_of(point: Point) -> str:
    """The key of a point with today's constants and version."""
    return point.key(constants_of(point), VERSION)


@lru_cache(maxsize=64)
def _prepared(
    machine: str,
    library: str,
    overrides: tuple[str, ...],
    kernel: str | None,
    contention: bool | None,
    runtime: str | None,
    sampling: Sampling,
) -> PreparedMachine:
    found: Machine = overridden(load_machine(machine, library=library), overrides)
    return PreparedMachine(found, kernel, contention, runtime, sampling)


def prepared(point: Point) -> PreparedMachine:
    """The machine of a point, prepared once per process. Raises `TaspLabError`."""
    return _prepared(
        point.machine, point.library, point.overrides, point.kernel, point.contention, point.runtime, point.sampling
    )


def _answer(point: Point, best_s: float | None) -> Row:
    cells: dict[str, Value] = dict.fromkeys(COLUMNS)
    cells |= {"machine": point.machine, "schedule": point.schedule, "passes": point.options.passes}
    cells |= {"overrides": ", ".join(point.overrides), "version": VERSION, "library": point.library}
    constants = constants_of(point)
    cells |= {"key": point.key(constants, VERSION), "constants": constants}
    cells |= {"inputs": json.dumps(point.inputs(), sort_keys=True)}
    cells |= _of_layer(point.layer)
    status: Status = "done"
    try:
        layer = overridden_layer(point.layer, point.overrides)
        cells |= _of_layer(layer)
        status, found = _answered(point, layer, best_s)
        cells |= found
    except TaspLabError as error:
        status, cells["error"] = "failed", first_line(error)
    return {**cells, "status": status}


def _of_layer(layer: Workload) -> dict[str, Value]:
    names = ("batch", "heads", "head_dim", "dtype", "mask", "kind")
    return {"seq": layer.sequence, "kv_heads": layer.kv_head_count, **{name: getattr(layer, name) for name in names}}


def _answered(point: Point, layer: Workload, best_s: float | None) -> tuple[Status, dict[str, Value]]:
    """The cells of the answer: settled by a bound if that is above `best_s`, else simulated."""
    machine = prepared(point)
    topology = machine.machine.topology
    cells: dict[str, Value] = {
        "ranks": topology.world_size,
        "nodes": len(set(topology.node_of_rank)),
        "library": machine.machine.comm_library.name,
    }
    candidates = machine.candidates(point.schedule, layer, point.options)
    if best_s is not None:
        least_s = min(each.least_s for each in candidates)
        if least_s > best_s:
            return "settled", {**cells, "bound_s": least_s, "settled_by": "bound"}
    found = machine.fastest(candidates)
    return "done", {**cells, **_of_times(found), **_memory(found, layer, point, machine.machine)}


def _of_times(found: LayerTimes) -> dict[str, Value]:
    interval = found.interval
    return {
        "time_s": found.time_s,
        "time_low_s": None if interval is None else interval.low_s,
        "time_high_s": None if interval is None else interval.high_s,
        "order_spread": None if interval is None else interval.residual.own,
        "compute_s": found.compute_s,
        "communication_s": found.communication_s,
        "exposed_s": found.time_s - found.compute_s,
        "bound_s": found.bound_s,
        "binds": found.binds,
        "bytes_per_rank": found.bytes_per_rank,
        "buffer_bytes": found.buffer_bytes,
        "engine": ENGINE,
        "settled_by": "simulation",
        "search_complete": found.search_complete,
    }


def _memory(found: LayerTimes, layer: Workload, point: Point, machine: Machine) -> dict[str, Value]:
    """Bytes of the tensors of the layer on the rank with the most positions and of buffers; whether a GPU has them."""
    positions = -(-layer.sequence // machine.topology.world_size)
    tensors = 2 * layer.query_bytes_per_position + layer.kv_bytes_per_position  # queries, results, keys and values
    sums = 4 * layer.batch * layer.heads  # log-sum-exp in float32
    passes = 1 if point.options.passes == "forward" else 2  # gradients of all four
    memory_bytes = positions * (passes * tensors + sums) + found.buffer_bytes
    return {"memory_bytes": memory_bytes, "fits": step_rates(machine).holds(memory_bytes)}
