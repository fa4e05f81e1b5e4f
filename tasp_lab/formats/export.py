"""A schedule of a machine in a format of another engine: the files, by what follows the name of the output."""

from __future__ import annotations

from tasp_lab.core.choices import ExportFormat
from tasp_lab.core.errors import ScheduleError
from tasp_lab.formats import chakra, msccl_xml, mscclpp, nccl
from tasp_lab.machines.machine import Machine
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.workload.layer import Work


def export(
    machine: Machine,
    schedule: str,
    work: Work,
    format: ExportFormat,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> dict[str, bytes]:
    """The files of a schedule; the one of a format that has one file follows nothing.

    Parameters are those of `tasp_lab.schedules.build.build_schedules`.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> files = export(Machine(full_mesh(4)), "ring", 2**20, "chakra")
    >>> list(files)
    ['.0.et', '.1.et', '.2.et', '.3.et']

    Raises `ScheduleError` for both passes of a layer, and for what the format cannot have.
    """
    found = build_schedules(schedule, machine.topology, work, decomposition, options)
    if len(found) > 1:
        raise ScheduleError(f"schedule {schedule!r} has {len(found)} passes, expected one: --pass forward or backward")
    if format == "chakra":
        return {f".{rank}.et": trace for rank, trace in enumerate(chakra.write(found[0]))}
    if format == "msccl-xml":
        return {"": msccl_xml.write(found[0]).encode()}
    if format == "msccl++":
        return {"": mscclpp.write(found[0]).encode()}
    if format == "nccl-graph":
        return {"": nccl.graph(found[0], machine.topology).encode()}
    return {"": nccl.tuner_rules(found[0], machine).encode()}
