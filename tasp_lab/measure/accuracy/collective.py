"""Tables of collectives beside their predictions."""

from __future__ import annotations

from collections import defaultdict

from sim.array import engine as array_engine
from sim.array.path import critical_parts
from sim.bounds.least import check_time
from sim.library_calls import library_call
from sim.simulate import times_on
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import NO_SAMPLES, Sampling
from tasp_lab.measure.accuracy.table_accuracy import (
    MeasuredRow,
    TableAccuracy,
    constants_without,
    machine_of,
    no_profile,
)
from tasp_lab.measure.inputs import left_out_with
from tasp_lab.measure.readers import MeasuredTable
from tasp_lab.prediction.interval import Interval
from tasp_lab.prediction.uncertainty import Uncertainty
from tasp_lab.schedules.collectives.library_rings import AROUND_RINGS, library_rings
from tasp_lab.timeline.critical_path import kind_of

RCCL_RING_BYTES = (2**26, 2**29)
"""From so many bytes on RCCL's AllReduce is a ring by Simple, in one node and over several. Below it is LL or trees, by
tables that its versions change (ROCm/rccl 0cbce2a7, src/graph/tuning.cc, the tuning model of MI300X)."""


def evaluate_collective(table: MeasuredTable, sampling: Sampling = NO_SAMPLES, library: str = "auto") -> TableAccuracy:
    """A table beside its prediction by a library, if there is one."""
    machine, unknown = machine_of(table, library, left_out=True)
    reason = table.reason or unknown or _mismatch(table, machine) or _out_of_scope(table, machine)
    if reason:
        return TableAccuracy(table, reason, ())
    assert machine is not None, "a table in scope has a machine"
    assert table.collective is not None, "a table in scope has a collective"
    rings = library_rings(machine.topology) if table.collective in AROUND_RINGS else None
    algorithm = table.headers.get("algorithm", "").casefold() if table.collective == "all_reduce" else ""
    uncertainty = Uncertainty(machine, sampling, left_out_with(table))
    own, _ = machine_of(table, library)
    least = machine.topology.world_size if table.collective != "sendrecv" else 0
    measured = [row for row in table.rows if row.size_bytes >= least]
    from_bytes = max(table.from_size_bytes, _modelled_from_bytes(table, machine))
    schedules = [library_call(table.collective, machine, row.size_bytes, rings, algorithm) for row in measured]
    times_s: list[float] = []
    rules: defaultdict[str, float] = defaultdict(float)
    for row, schedule in zip(measured, schedules, strict=True):
        counts = row.size_bytes >= from_bytes
        run = array_engine.run(schedule, machine)
        parts = critical_parts(run) if counts else []
        times_s.append(run.time_s)
        check_time(schedule, machine, run.time_s)
        whole_s = sum(seconds for _, seconds in parts)
        for what, seconds in parts:
            rules[kind_of(what, machine.topology)] += seconds / whole_s
    intervals = uncertainty.intervals(schedules, times_s)
    in_sample_s: list[float | None] = [None] * len(measured)
    if own is not None and constants_without(table.headers.get("system", "")):
        in_sample_s = times_on([own], schedules)[0].tolist()
    rows = [
        size_row(*row, time_s, interval, own_s, counts=row.size_bytes >= from_bytes)
        for row, time_s, interval, own_s in zip(measured, times_s, intervals, in_sample_s, strict=True)
    ]
    if not rules:
        return TableAccuracy(table, "no size that counts", tuple(rows))
    dominant = max(rules, key=lambda rule: rules[rule])
    return TableAccuracy(table, "", tuple(rows), dominant)


def size_row(
    size_bytes: int,
    measured_s: float,
    predicted_s: float,
    interval: Interval | None = None,
    in_sample_s: float | None = None,
    counts: bool = True,
) -> MeasuredRow:
    """A size of a collective."""
    reason = "" if counts else "smaller than the sizes that count"
    return MeasuredRow(
        measured_s, predicted_s, reason, shape={"size_bytes": size_bytes}, interval=interval, size_bytes=size_bytes,
        in_sample_s=in_sample_s,
    )  # fmt: skip


def _mismatch(table: MeasuredTable, machine: Machine | None) -> str:
    """The reason why a complete table has no prediction; empty if it has one."""
    if machine is None:
        return no_profile(table)
    if table.ranks != machine.topology.world_size:
        return f"{table.profile} has {machine.topology.world_size} ranks, the table {table.ranks}"
    if table.ranks == 1:
        return "one rank sends nothing"
    return ""


def _out_of_scope(table: MeasuredTable, machine: Machine | None) -> str:
    """The reason why a table is out of scope: its own header, or an AllReduce that may not be a ring."""
    if stated := table.headers.get("out_of_scope"):
        return stated
    if table.collective == "all_reduce" and not _is_modelled(table, machine):
        made = table.headers.get("algorithm", "an algorithm that the table does not name")
        return f"all-reduce by {made}; that is not modelled"
    return ""


def _is_modelled(table: MeasuredTable, machine: Machine | None) -> bool:
    """Whether the algorithms of an AllReduce are: rings by the table, or what NCCL or RCCL chooses."""
    stated = table.headers.get("algorithm", "").casefold()
    library = None if machine is None else machine.comm_library
    if stated == "ring" or not isinstance(library, ChannelLibrary):
        return stated == "ring"
    return stated == "" or (stated == "nvls" and library.nvls is not None)


def _modelled_from_bytes(table: MeasuredTable, machine: Machine) -> int:
    """The size from which on an AllReduce of a library whose choice is not modelled is a ring; 0 of others."""
    library = machine.comm_library
    stated = table.collective != "all_reduce" or "algorithm" in table.headers
    if stated or not isinstance(library, ChannelLibrary) or library.tuner is not None:
        return 0
    return RCCL_RING_BYTES[machine.topology.world_size > library.domain_ranks]
