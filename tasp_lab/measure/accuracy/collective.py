"""Tables of collectives beside their predictions."""

from __future__ import annotations

from collections import defaultdict

from sim.array import engine as array_engine
from sim.array.path import critical_parts
from sim.bounds.least import check_time
from sim.library_calls import library_call
from sim.simulate import times_on
from tasp_lab.core.errors import TaspLabError, first_line
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import NO_SAMPLES, Sampling
from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, TableAccuracy
from tasp_lab.measure.inputs import left_out_with
from tasp_lab.measure.profiles import constants_without, machine_of
from tasp_lab.measure.readers import MeasuredTable
from tasp_lab.prediction.uncertainty import Uncertainty
from tasp_lab.schedules.collectives.library_rings import AROUND_RINGS, library_rings
from tasp_lab.timeline.critical_path import kind_of

RCCL_RING_BYTES = (2**26, 2**29)
"""From so many bytes on RCCL's AllReduce is a ring by Simple, in one node and over several. Below it is LL or trees, by
tables that its versions change (ROCm/rccl 0cbce2a7, src/graph/tuning.cc, the tuning model of MI300X)."""


def evaluate_collective(table: MeasuredTable, sampling: Sampling = NO_SAMPLES, library: str = "auto") -> TableAccuracy:
    """A table beside its prediction by a library, if there is one."""
    try:
        machine = machine_of(table, library, left_out=True)
    except TaspLabError as error:
        return TableAccuracy(table, table.reason or first_line(error), ())
    ranks, reason = machine.topology.world_size, table.reason
    if not reason and table.ranks != ranks:
        reason = f"{table.profile} has {ranks} ranks, the table {table.ranks}"
    reason = reason or ("one rank sends nothing" if ranks == 1 else _out_of_scope(table, machine))
    if reason:
        return TableAccuracy(table, reason, ())
    assert table.collective is not None, "a table in scope has a collective"
    rings = library_rings(machine.topology) if table.collective in AROUND_RINGS else None
    algorithm = table.headers.get("algorithm", "").casefold() if table.collective == "all_reduce" else ""
    least = ranks if table.collective != "sendrecv" else 0
    measured = [row for row in table.rows if row.size_bytes >= least]
    from_bytes = max(table.from_size_bytes, _modelled_from_bytes(table, machine))
    schedules = [library_call(table.collective, machine, row.size_bytes, rings, algorithm) for row in measured]
    times_s: list[float] = []
    rules: defaultdict[str, float] = defaultdict(float)
    for row, schedule in zip(measured, schedules, strict=True):
        run = array_engine.run(schedule, machine)
        times_s.append(run.time_s)
        check_time(schedule, machine, run.time_s)
        parts = critical_parts(run) if row.size_bytes >= from_bytes else []
        whole_s = sum(seconds for _, seconds in parts)
        for what, seconds in parts:
            rules[kind_of(what, machine.topology)] += seconds / whole_s
    intervals = Uncertainty(machine, sampling, left_out_with(table)).intervals(schedules, times_s)
    own_s: list[float | None] = [None] * len(measured)
    if constants_without(table.headers.get("system", "")):  # with the constants that its own tables gave, too
        own_s = times_on([machine_of(table, library)], schedules)[0].tolist()
    rows = tuple(
        MeasuredRow(
            row.time_s, time_s, "" if row.size_bytes >= from_bytes else "smaller than the sizes that count",
            shape={"size_bytes": row.size_bytes}, interval=interval, size_bytes=row.size_bytes, in_sample_s=in_sample_s,
        )
        for row, time_s, interval, in_sample_s in zip(measured, times_s, intervals, own_s, strict=True)
    )  # fmt: skip
    if not rules:
        return TableAccuracy(table, "no size that counts", rows)
    return TableAccuracy(table, "", rows, max(rules, key=lambda rule: rules[rule]))


def _out_of_scope(table: MeasuredTable, machine: Machine) -> str:
    """The reason why a table is out of scope: its own header, or an AllReduce that may not be a ring."""
    if (stated := table.headers.get("out_of_scope")) or table.collective != "all_reduce":
        return stated or ""
    library, algorithm = machine.comm_library, table.headers.get("algorithm", "").casefold()
    # of a library whose choice is modelled, an algorithm that the table does not name is what the library chooses
    by_choice = isinstance(library, ChannelLibrary) and (not algorithm or (algorithm == "nvls" and library.nvls))
    if algorithm == "ring" or by_choice:
        return ""
    made = table.headers.get("algorithm", "an algorithm that the table does not name")
    return f"all-reduce by {made}; that is not modelled"


def _modelled_from_bytes(table: MeasuredTable, machine: Machine) -> int:
    """The size from which on an AllReduce of a library whose choice is not modelled is a ring; 0 of others."""
    library = machine.comm_library
    stated = table.collective != "all_reduce" or "algorithm" in table.headers
    if stated or not isinstance(library, ChannelLibrary) or library.tuner is not None:
        return 0
    return RCCL_RING_BYTES[machine.topology.world_size > library.domain_ranks]
