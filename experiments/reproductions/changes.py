"""What is changed in how a row of a table is run, to check a reason."""

from __future__ import annotations

from dataclasses import replace

from tasp_lab.machines.contention import NONE
from tasp_lab.machines.host_model.runtime import NO_PASSES
from tasp_lab.machines.machine import IDEAL
from tasp_lab.measure.accuracy.layer_rows import RowRun
from tasp_lab.measure.accuracy.machines import machine_for
from tasp_lab.prediction.inputs import with_runtime


def without_contention(run: RowRun) -> RowRun:
    """Messages take no multiprocessors from kernel calls."""
    return replace(run, machine=replace(run.machine, contention=NONE))


def links_alone(run: RowRun) -> RowRun:
    """No communication library: messages take their full share of the links."""
    return replace(run, machine=replace(run.machine, comm_library=IDEAL, contention=NONE))


def with_overlap(run: RowRun) -> RowRun:
    """Messages run beside the kernel calls on their block."""
    return replace(run, machine=replace(run.machine, runtime=replace(run.machine.runtime, overlaps=True)))


def with_full_mask(run: RowRun) -> RowRun:
    """The layer with a full mask."""
    return replace(run, layers=tuple(replace(layer, mask="full") for layer in run.layers))


def with_network_of(run: RowRun, profile: str, ranks_per_node: int = 8) -> RowRun:
    """The same on nodes of another profile."""
    gpus = run.machine.topology.world_size
    other = machine_for(profile, gpus, gpus // ranks_per_node)
    machine = replace(run.machine, topology=other.topology, comm_library=other.comm_library)
    return replace(run, machine=machine)


def without_merges(run: RowRun) -> RowRun:
    """Partial results are merged in no time."""
    machine = with_runtime(run.machine, replace(run.machine.runtime, passes=NO_PASSES))
    return replace(run, machine=machine)
