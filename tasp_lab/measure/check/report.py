"""Whether the bandwidth in a log is normal, and if not, what most likely slows it down.

::

    found = tasp_lab.check("all_reduce.log")
    found.verdict, found.diagnosis.findings[0].cause.remedy
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tasp_lab.core.errors import TableError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import View
from tasp_lab.core.tables import Formats, Part, Table
from tasp_lab.core.units import format_bandwidth, format_size, format_time
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden
from tasp_lab.measure.check.causes import Cause, Effect, effects
from tasp_lab.measure.check.diagnosis import Diagnosis, Observation, diagnose
from tasp_lab.measure.check.nearest import nearest_machine
from tasp_lab.measure.check.pairs import pairs_beside, shares
from tasp_lab.measure.inputs import table_inputs
from tasp_lab.measure.profiles import machine_named, machine_of, sized, suggested_profile
from tasp_lab.measure.readers import MeasuredTable, PairTable, read_files
from tasp_lab.prediction.provenance import Provenance, machine_constants, machine_inputs, sha256
from tasp_lab.schedules.collectives.kinds import BY_NCCL_TESTS, NcclTestsName, busbw_bytes_per_s

Verdict = Literal["healthy", "slow", "unclear"]

UNCLEAR = 0.4
"""A machine that is slow with at least this probability, but not called slow, is not called healthy either."""

NAMED_TOGETHER = 0.25
"""A cause of the same effect that is at least this likely beside the most likely one is named with it."""

SHOWN = 5
"""Causes in the table; the others are in the dictionary."""


class MachineOfLog(NamedTuple):
    """The machine of a log and how it is known."""

    machine: Machine
    name: str
    notes: tuple[str, ...] = ()
    is_nearest: bool = False


@dataclass(frozen=True, repr=False)
class CheckReport(View):
    """A log beside what is expected of its machine: the verdict, the causes, and a row per size.

    `diagnosis` is None for bandwidths of pairs of GPUs.
    """

    verdict: Verdict = "healthy"
    diagnosis: Diagnosis | None = None


def check(
    *paths: Path | str,
    machine: str | None = None,
    overrides: Sequence[str] = (),
    progress: ProgressCallback = no_progress,
) -> CheckReport:
    """Say whether the times in logs of one machine are normal, and what slows it down if they are not.

    Parameters
    ----------
    paths : logs of nccl-tests or rccl-tests, CSV tables of collectives, logs of p2pBandwidthLatencyTest or
        TransferBench. Of a log the lesser of the out-of-place and in-place times counts: first use shows in either.
    machine : its name, like ``h100-2x8``, or that of its family; without it the GPUs in the logs name it.
    overrides : what is known to be different, such as ``nic.bandwidth=25GB/s``.

    Raises `TableError` for files without a measurement that can be checked, and for logs of several machines;
    `ProfileError` for an unknown machine, `OverrideError` for an override that it cannot have.
    """
    tables, pairs = _read([Path(path) for path in paths])
    if pairs and tables:
        raise TableError(
            f"{pairs[0].name} has bandwidths of pairs, {tables[0].name} calls: expected one kind at a time"
        )
    if pairs:
        return _of_pairs(pairs, machine, overrides)
    for table in tables:
        for warning in table.warnings:
            progress(warning)
    if (fallen := _fallen(tables[0])) is not None:
        return fallen
    _check_readable(tables)
    rows = [
        Observation(table.collective, row.size_bytes, row.time_s)
        for table in tables
        for row in table.rows
        if table.collective is not None
        and row.size_bytes >= (1 if table.collective == "sendrecv" else table.ranks or 1)
    ]
    if not rows:
        raise TableError(f"{tables[0].name}: no row of a byte per rank or more, nothing to check")
    known = _machine_of(tables, rows, machine, overrides)
    order = list(dict.fromkeys(row.collective for row in rows))
    rows.sort(key=lambda row: (order.index(row.collective), row.size_bytes))
    return _report(tables, known, diagnose(known.machine, rows))


def _read(paths: Sequence[Path]) -> tuple[list[MeasuredTable], list[PairTable]]:
    """The tables of collectives, and those of pairs. Raises `TableError` for all other tables."""
    tables, pairs = list[MeasuredTable](), list[PairTable]()
    for each in read_files(paths, in_place=None):
        if isinstance(each, PairTable):
            pairs.append(each)
        elif isinstance(each, MeasuredTable):
            tables.append(each)
        else:
            raise TableError(f"{each.name}: a table of layers or kernels, expected calls of a library; see accuracy")
    if not tables and not pairs:
        raise TableError("no file: expected a log of nccl-tests, or --expected with a machine")
    return tables, pairs


def _check_readable(tables: Sequence[MeasuredTable]) -> None:
    """Raise `TableError` for a table that states no call of a library whose ranks are known."""
    for table in tables:
        if table.reasons:
            alone = "; build nccl-tests with make clean; make MPI=1" * ("one rank alone" in table.reason)
            raise TableError(f"{table.name}: cannot be checked: {', '.join(table.reasons)}{alone}")


FALL = 0.7
"""Where a collective is not modelled, a rate that falls to this share of its own at smaller sizes is no healthy one:
that of no measured table of tasp-lab falls so far from 1 MiB on."""


def _fallen(table: MeasuredTable) -> CheckReport | None:
    """The report of calls that are not modelled, if their rate falls by itself; else None."""
    rows = [row for row in table.rows if row.size_bytes >= 2**20]
    if table.collective is not None or len(rows) < 3:
        return None
    rates = [row.size_bytes / row.time_s for row in rows]
    first = next((n for n in range(1, len(rows)) if max(rates[n:]) <= FALL * max(rates[:n])), None)
    if first is None:
        return None
    effect = next(each for each in effects() if each.from_bytes)
    share, size = max(rates[first:]) / max(rates[:first]), format_size(rows[first].size_bytes)
    lines = [
        f"Slow: from {size} on its rate falls to {share:.0%} of that of smaller sizes "
        f"({format_bandwidth(max(rates[first:]))} of {format_bandwidth(max(rates[:first]))}).",
        f"Nothing else is known: {', '.join(table.reasons)}.",
        f"It may be: {'; '.join(f'{each.name} ({each.remedy})' for each in effect.causes)}.",
        f"This tells: {effect.separate}.",
    ]
    causes = [_cause(effect, each) for each in effect.causes]
    document = [{"size_bytes": row.size_bytes, "measured_s": row.time_s, "mark": "slow" * (place >= first)}
                for place, row in enumerate(rows)]  # fmt: skip
    provenance = Provenance({"tables": [table_inputs(table)]}, (), ())
    whole = {"verdict": "slow", "text": lines, "causes": causes, "rows": document,
             "provenance": provenance.to_dict()}  # fmt: skip
    return CheckReport(whole, document, lines, "slow")


def _machine_of(
    tables: Sequence[MeasuredTable], rows: Sequence[Observation], name: str | None, overrides: Sequence[str]
) -> MachineOfLog:
    """The machine of some tables: as named, by their headers, by the GPUs that they list, or the nearest one."""
    names = {_named(table, name): table.name for table in tables}
    if len(names) > 1:
        what = " and ".join(f"{each or 'an unknown machine'} ({where})" for each, where in names.items())
        raise TableError(f"logs of several machines: {what}; expected one, or --machine")
    (found,), first = names, tables[0]
    if not found:
        nearest = nearest_machine(first, rows)
        gpu = first.headers.get("gpu") or "GPUs without a name"
        note = (
            f"no machine of tasp-lab is known to have {first.size} {gpu}; compared with the nearest one by its times, "
            f"{nearest.topology.name}. --machine names another, and --set what differs: --machine h100-2x1 --set "
            "nic.bandwidth=25GB/s"
        )
        return MachineOfLog(overridden(nearest, overrides), nearest.topology.name, (note,), is_nearest=True)
    notes, table = list[str](), first.on(found)
    if name is None and first.profile is None:
        gpu, beside = first.headers["gpu"], ", NICs as in most such machines" if first.headers["nodes"] != "1" else ""
        notes.append(f"taken as {found}: the log lists {first.ranks} {gpu}{beside}; --machine names another")
    machine = machine_of(table)
    library, version = machine.comm_library, first.headers.get("nccl", "")
    if version and "library" not in first.headers and isinstance(library, ChannelLibrary) and library.tuner is not None:
        machine = machine_of(table, f"nccl=={version}")
        notes.append(f"NCCL {version}, as the log says")
    machine = overridden(machine, overrides) if overrides else machine
    if machine.topology.world_size != first.ranks:
        raise TableError(f"{first.name}: {first.ranks} ranks, but {found} has {machine.topology.world_size}")
    return MachineOfLog(machine, found, tuple(notes))


def _named(table: MeasuredTable, name: str | None) -> str:
    """The machine of a table by name; empty if it is not known."""
    return sized(name, table.size) if name is not None else table.machine or suggested_profile(table)


# ------------------------------------------------------------------------------------------------------- in words


def _report(tables: Sequence[MeasuredTable], known: MachineOfLog, found: Diagnosis) -> CheckReport:
    verdict: Verdict = "slow" if found.is_slow else "unclear" if found.healthy < 1 - UNCLEAR else "healthy"
    rows, world = [_row(found, place) for place in range(len(found.rows))], known.machine.topology.world_size
    lines = [_headline(verdict, known, found)]
    if verdict != "healthy":
        lines += _causes_in_words(found)
    several, marked = len({row.collective for row in found.rows}) > 1, any(row["mark"] for row in rows)
    columns = {
        title: each for title, each in COLUMNS.items()
        if (several or title != "collective") and (marked or title != "outside")
    }  # fmt: skip
    causes = [
        _cause(each.effect, each.cause) | {"probability": each.probability, "severity": each.severity}
        for each in found.findings
    ]
    shown: list[Part] = [*lines, *Table.of("measured beside expected times", rows, columns)]
    if verdict != "healthy":
        shown += Table.of(
            "what it may be", [each for each in causes if each["probability"] >= LEAST][:SHOWN], CAUSE_COLUMNS, (1, 2)
        )
    notes = list(known.notes)
    if 2 * sum(row["mark"] == "fast" for row in rows) > len(rows):
        notes.append(f"most sizes are faster than {known.name} should be: --machine may name a faster one")
    shown += notes
    library = known.machine.comm_library.name
    document: dict[str, Any] = {
        "verdict": verdict, "machine": known.name, "is_nearest": known.is_nearest, "ranks": world, "library": library,
        "healthy": found.healthy, "text": lines, "causes": causes, "rows": rows, "notes": notes,
        "provenance": _provenance(tables, known).to_dict(),
    }  # fmt: skip
    return CheckReport(document, rows, shown, verdict, found)


def _row(found: Diagnosis, place: int) -> dict[str, Any]:
    row, n = found.rows[place], found.machine.topology.world_size
    low_s, high_s = float(found.low_s[place]), float(found.high_s[place])
    mark = "slow" if row.time_s > high_s else "fast" if row.time_s < low_s else ""
    return {
        "collective": row.collective, "size_bytes": row.size_bytes, "measured_s": row.time_s,
        "expected_s": float(found.expected_s[place]), "expected_low_s": low_s, "expected_high_s": high_s,
        "measured_busbw_bytes_per_s": busbw(row.collective, n, row.size_bytes, row.time_s),
        "expected_busbw_bytes_per_s": busbw(row.collective, n, row.size_bytes, float(found.expected_s[place])),
        "share": float(found.share[place]), "mark": mark,
    }  # fmt: skip


def busbw(collective: NcclTestsName, ranks: int, size_bytes: int, time_s: float) -> float:
    """The bus bandwidth of a call by its size in nccl-tests, bytes/s.

    >>> busbw("all_reduce", 4, 100, 1.0), busbw("sendrecv", 4, 100, 1.0)
    (150.0, 100.0)
    """
    shard_bytes = size_bytes if collective == "sendrecv" else size_bytes / ranks
    return busbw_bytes_per_s(ranks, shard_bytes, time_s, BY_NCCL_TESTS[collective])


COLUMNS: Formats = {
    "collective": "{collective}", "size": "{size_bytes:size}", "measured": "{measured_s:time}",
    "expected": "{expected_s:time}",
    "5 to 95 %": lambda row: f"{format_time(row['expected_low_s'])} to {format_time(row['expected_high_s'])}",
    "busbw": "{measured_busbw_bytes_per_s:bandwidth}", "expected busbw": "{expected_busbw_bytes_per_s:bandwidth}",
    "share": "{share:.0%}", "outside": "{mark}",
}  # fmt: skip
CAUSE_COLUMNS: Formats = {"likely": "{probability:.0%}", "cause": "{cause}", "remedy": "{remedy}"}


def _headline(verdict: Verdict, known: MachineOfLog, found: Diagnosis) -> str:
    """The verdict: what part of what is expected is reached, and where."""
    places = found.slow_rows if verdict == "slow" else list(range(len(found.rows)))
    where = f"{'the nearest known machine, ' if known.is_nearest else ''}{known.name}"
    what = " and ".join(dict.fromkeys(found.rows[place].collective for place in places))
    share = float(np.median(found.share[places]))
    last = max(places, key=lambda place: found.rows[place].size_bytes)
    row, n = found.rows[last], found.machine.topology.world_size
    rates = [busbw(row.collective, n, row.size_bytes, each) for each in (row.time_s, float(found.expected_s[last]))]
    at = f"{format_bandwidth(rates[0])} of {format_bandwidth(rates[1])} at {format_size(row.size_bytes)}"
    verb = "reach" if " and " in what else "reaches"
    reaches = f"{what} on {where} {verb} {share:.0%} of what is expected"
    if verdict == "slow":
        return f"Slow: {reaches}{_sizes(found, places)} ({at})."
    if verdict == "unclear":
        return f"Not clear: {reaches} ({at}); a healthy machine does so with a probability of {found.healthy:.0%}."
    return f"Healthy: {reaches} ({at})."


def _sizes(found: Diagnosis, places: Sequence[int]) -> str:
    """Which sizes are slow, in words; empty if all are."""
    own = {found.rows[place].collective for place in places}
    every = sorted(row.size_bytes for row in found.rows if row.collective in own)
    low, high = (each(found.rows[place].size_bytes for place in places) for each in (min, max))
    if low == every[0] and high == every[-1]:
        return ""
    if high == every[-1]:
        return f" from {format_size(low)} on"
    return f" up to {format_size(high)}" if low == every[0] else f" from {format_size(low)} to {format_size(high)}"


def _causes_in_words(found: Diagnosis) -> list[str]:
    """The most likely cause with its remedy, those that sizes cannot tell from it, and the next effect."""
    if not found.findings:
        return []
    first, others = found.findings[0], found.findings[1:]
    together = [
        each for each in others
        if each.effect == first.effect and each.probability >= NAMED_TOGETHER * first.probability
    ]  # fmt: skip
    last = max(range(len(found.rows)), key=lambda place: found.rows[place].size_bytes)
    then = f"then {format_size(found.rows[last].size_bytes)} should take {format_time(float(found.expected_s[last]))}"
    total = first.probability + sum(each.probability for each in together)
    effect = f"{first.effect.name} ({total:.0%}), first of all because " if together else ""
    lines = [f"Most likely {effect}{first.cause.name} ({first.probability:.0%}): {first.cause.remedy}; {then}."]
    if together:
        lines.append(
            f"Sizes do not tell this cause from {len(together)} others below; this does: {first.effect.separate}."
        )
    rest = next((each for each in others if each.effect != first.effect), None)
    if rest is not None and rest.probability >= LEAST:
        lines.append(f"Next: {rest.cause.name} ({rest.probability:.0%}).")
    return lines


LEAST = 0.02
"""Causes that are less likely are not named."""


def _cause(effect: Effect, cause: Cause) -> dict[str, Any]:
    return {
        "cause": cause.name, "effect": effect.name, "remedy": cause.remedy, "separate": effect.separate,
        "source": cause.source,
    }  # fmt: skip


SLOWEST = 8
"""Pairs in the table; all of them are in the dictionary."""

PAIR_COLUMNS: Formats = {
    "from": "{source}", "to": "{destination}", "measured": "{measured_bytes_per_s:bandwidth}",
    "expected": "{expected_bytes_per_s:bandwidth}", "share": "{share:.0%}",
}  # fmt: skip


def _of_pairs(tables: Sequence[PairTable], name: str | None, overrides: Sequence[str]) -> CheckReport:
    """The report of bandwidths of pairs; of several matrices the first one way, which other pairs do not disturb."""
    table = next((each for each in tables if each.kind == "unidirectional"), tables[0])
    if name is None:
        raise TableError(f"{table.name}: a matrix of pairs does not name its machine, expected --machine, like h100-8")
    gpus = len(table.bandwidth_bytes_per_s)
    name = sized(name, str(gpus))
    machine = overridden(machine_named(name), overrides)
    found = pairs_beside(machine, table)
    share = f"pairs reach {shares(found.rows):.0%} of what is expected (median)"
    lines = [f"Slow: on {name} {found.text}." if found.text else f"Healthy: on {name} {share}."]
    causes = []
    if found.effect is not None:
        first = found.effect.causes[0]
        lines.append(f"Most likely {first.name}: {first.remedy}.")
        causes = [_cause(found.effect, each) for each in found.effect.causes]
    rows = found.rows
    shown: list[Part] = [
        *lines,
        *Table.of("the slowest pairs", sorted(rows, key=lambda row: row["share"])[:SLOWEST], PAIR_COLUMNS, ()),
    ]
    verdict: Verdict = "slow" if found.text else "healthy"
    inputs = {"tables": [{"file": Path(table.name).name, "sha256": sha256(table.bandwidth_bytes_per_s.tolist())}],
              "machines": {name: machine_inputs(machine, compute=False)}}  # fmt: skip
    provenance = Provenance(inputs, tuple(machine_constants(machine.parameters.values())), ())
    document = {"verdict": verdict, "machine": name, "text": lines, "causes": causes, "rows": rows,
                "provenance": provenance.to_dict()}  # fmt: skip
    return CheckReport(document, rows, shown, verdict)


def _provenance(tables: Iterable[MeasuredTable], known: MachineOfLog) -> Provenance:
    inputs = {
        "tables": [table_inputs(each) for each in tables],
        "machines": {known.name: machine_inputs(known.machine, compute=False)},
    }
    return Provenance(inputs, tuple(machine_constants(known.machine.parameters.values())), ("array",))
