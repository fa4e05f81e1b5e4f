"""Tables of collectives beside their predictions."""

from __future__ import annotations

from collections import Counter, defaultdict

from sim.library_calls import library_call
from sim.messages import LibraryMessages
from sim.simulate import simulate
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import NO_SAMPLES, Sampling
from tasp_lab.measure.accuracy.table_accuracy import CollectiveAccuracy, SizeRow, machine_of, no_profile
from tasp_lab.measure.inputs import left_out_with
from tasp_lab.measure.readers import MeasuredTable
from tasp_lab.prediction.uncertainty import Uncertainty
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.library_rings import AROUND_RINGS, library_rings
from tasp_lab.timeline.critical_path import critical_path, kind_of

MAX_EXPLAINED = 20_000
"""With more transfers the longest of the first messages stands for all, as if its sender were alone."""


def evaluate_collective(
    table: MeasuredTable, sampling: Sampling = NO_SAMPLES, library: str = "auto"
) -> CollectiveAccuracy:
    """A table beside its prediction by a library, if there is one."""
    machine, unknown = machine_of(table, library)
    reason = table.reason or unknown or _mismatch(table, machine) or _out_of_scope(table, machine)
    if reason:
        return CollectiveAccuracy(table, reason, ())
    assert machine is not None, "a table in scope has a machine"
    assert table.collective is not None, "a table in scope has a collective"
    rings = library_rings(machine.topology) if table.collective in AROUND_RINGS else None
    algorithm = table.headers.get("algorithm", "").casefold() if table.collective == "all_reduce" else ""
    uncertainty = Uncertainty(machine, sampling, left_out_with(table))
    rows: list[SizeRow] = []
    rules: defaultdict[str, float] = defaultdict(float)
    for size_bytes, measured_s in table.rows:
        if size_bytes < machine.topology.world_size and table.collective != "sendrecv":
            continue
        schedule = library_call(table.collective, machine, size_bytes, rings, algorithm)
        few = schedule.transfers <= MAX_EXPLAINED
        timeline = simulate(schedule, machine, explain=few, events=few)
        counts = size_bytes >= table.from_size_bytes
        predicted_s = float(timeline.time_s)
        interval = uncertainty.interval(schedule, predicted_s)
        rows.append(SizeRow.of(size_bytes, measured_s, predicted_s, counts, interval))
        if not counts:
            continue
        parts = critical_path(timeline) if few else message_parts(schedule, machine)
        whole_s = sum(float(seconds) for _, seconds in parts)
        for what, seconds in parts:
            rules[kind_of(what, machine.topology)] += float(seconds) / whole_s
    if not rules:
        return CollectiveAccuracy(table, "no size that counts", tuple(rows))
    return CollectiveAccuracy(table, "", tuple(rows), max(rules, key=lambda rule: rules[rule]))


def message_parts(schedule: Schedule, machine: Machine) -> list[tuple[str, float]]:
    """The parts of the time of the longest of the first messages, in seconds, beside those of its sender alone."""
    step, topology = schedule.steps[0], machine.topology
    capacity = [float(constraint.bandwidth_bytes_per_s) for constraint in topology.constraints]
    longest: list[tuple[str, float]] = []
    library, size_bytes = LibraryMessages(schedule, machine.comm_library), schedule.block_bytes[step.block]
    messages, kinds = library.kinds(0, step.source, step.destination, size_bytes)
    for kind, message in enumerate(messages):
        at = int((kinds == kind).argmax())
        source = int(step.source[at])
        route = topology.route(source, int(step.destination[at]))
        sent = step.destination[step.source == source].tolist()
        users = Counter(each for peer in sent for each in topology.route(source, peer).constraints)
        share = {each: capacity[each] / users[each] for each in route.constraints}
        narrowest = min(share, key=lambda constraint: (share[constraint], constraint))
        most = message.max_bytes_per_s
        limited = most is not None and most < share[narrowest]
        rate = float(most) if most is not None and limited else share[narrowest]
        what = message.rule if limited else topology.constraints[narrowest].name
        parts = [
            ("launch", float(message.launch_s)),
            (what, float(message.wire_bytes) / rate),
            ("latency", float(message.latency_s + route.latency_s)),
        ]
        longest = max(longest, parts, key=lambda each: sum(seconds for _, seconds in each))
    return longest


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
    """Whether the algorithms of an AllReduce are: rings by the table, or what NCCL chooses inside a domain."""
    stated = table.headers.get("algorithm", "").casefold()
    library = None if machine is None else machine.comm_library
    if stated == "ring" or not isinstance(library, ChannelLibrary) or library.tuner is None:
        return stated == "ring"
    return library.tuner.domains == 1 and stated in ("", "nvls")
