"""What nccl-tests or rccl-tests should print for a machine: time and bus bandwidth by size, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tasp_lab.core.report import View
from tasp_lab.core.tables import Formats, Part, Table
from tasp_lab.core.units import format_time
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.libraries.nccl_tuning import CHANGES, version_text
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden
from tasp_lab.measure.check.predictions import Predictions
from tasp_lab.measure.check.report import busbw
from tasp_lab.measure.profiles import machine_named
from tasp_lab.measure.readers import COLLECTIVES
from tasp_lab.prediction.provenance import Provenance, machine_constants, machine_inputs
from tasp_lab.schedules.collectives.kinds import NcclTestsName

SIZES = (*(4**power for power in range(5, 17)), 2**33)
"""From 1 KiB to 8 GiB."""

MATTERS = 1.2
"""Another version of NCCL is named where its time differs by this factor: predictions are off by as much."""


def expected(
    machine: str | Machine,
    *,
    collectives: Sequence[NcclTestsName] = COLLECTIVES,
    sizes: Sequence[int] = SIZES,
    overrides: Sequence[str] = (),
) -> View:
    """The times that a machine should take, collective by collective, as nccl-tests prints them.

    Parameters
    ----------
    machine : by its name, like ``h100-8`` or ``mi300x-2x8``, or a machine.
    sizes : in bytes, as nccl-tests defines them.
    overrides : changed numbers, such as ``nic.bandwidth=25GB/s``.

    Raises `ProfileError` for an unknown machine, `OverrideError` for an override that it cannot have.
    """
    found = overridden(machine_named(machine) if isinstance(machine, str) else machine, overrides)
    name, n = machine if isinstance(machine, str) else found.topology.name, found.topology.world_size
    calls = [(each, size) for each in collectives for size in sizes if size >= n]
    made = Predictions(found, calls)
    expected_s, width, others = made.expected_s, made.width, _versions(made)
    rows = [
        {
            "collective": collective, "size_bytes": size_bytes, "expected_s": float(expected_s[place]),
            "expected_low_s": float(expected_s[place] / width[place]),
            "expected_high_s": float(expected_s[place] * width[place]),
            "busbw_bytes_per_s": busbw(collective, n, size_bytes, float(expected_s[place])),
            "versions": others[place],
        }
        for place, (collective, size_bytes) in enumerate(calls)
    ]  # fmt: skip
    library = found.comm_library
    version = f" {version_text(library.tuner.version)}" if isinstance(library, ChannelLibrary) and library.tuner else ""
    heads = f"expected of {name}, {library.name}{version}"
    shown: list[Part] = []
    for collective in collectives:
        own = [row for row in rows if row["collective"] == collective]
        named = any(row["versions"] for row in own)
        columns = {title: each for title, each in COLUMNS.items() if named or title != "other versions of NCCL"}
        shown += Table.of(f"{collective}, {heads}", own, columns, (4,))
    provenance = Provenance(
        {"machines": {name: machine_inputs(found, compute=False)}, "calls": [list(each) for each in calls]},
        tuple(machine_constants(found.parameters.values())), ("array",),
    )  # fmt: skip
    document = {"machine": name, "ranks": n, "library": f"{library.name}{version}", "rows": rows,
                "provenance": provenance.to_dict()}  # fmt: skip
    return View(document, rows, shown)


def _versions(made: Predictions) -> list[dict[str, float]]:
    """For each call the versions of NCCL that differ, and by what factor."""
    machine, library = made.machine, made.machine.comm_library
    found: list[dict[str, float]] = [{} for _ in made.calls]
    if not isinstance(library, ChannelLibrary) or library.tuner is None:
        return found
    tuner = library.tuner
    changed = [replace(machine, comm_library=replace(library, tuner=replace(tuner, version=each))) for each in CHANGES]
    for version, times_s in zip(CHANGES, made.times_s(changed), strict=True):
        for place, ratio in enumerate(times_s / made.healthy_s):
            if max(ratio, 1 / ratio) >= MATTERS and version != tuner.version:
                found[place][version_text(version)] = float(ratio)
    return found


def _other_versions(row: dict[str, Any]) -> str:
    by_ratio: dict[str, list[str]] = {}
    for version, ratio in row["versions"].items():
        by_ratio.setdefault(f"{ratio:.2g}", []).append(version)
    return "; ".join(f"{', '.join(those)}: x{ratio}" for ratio, those in by_ratio.items())


COLUMNS: Formats = {
    "size": "{size_bytes:size}", "time": "{expected_s:time}",
    "5 to 95 %": lambda row: f"{format_time(row['expected_low_s'])} to {format_time(row['expected_high_s'])}",
    "busbw": "{busbw_bytes_per_s:bandwidth}", "other versions of NCCL": _other_versions,
}  # fmt: skip
