"""Rows of tables of layers: the layer, its measured time, and what it is predicted as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tasp_lab.core.choices import WHAT_IF_DTYPE, Pass
from tasp_lab.core.errors import ScheduleError, WorkloadError
from tasp_lab.machines.kernel_compute import with_kernel
from tasp_lab.machines.machine import Machine
from tasp_lab.measure.accuracy.machines import machine_for
from tasp_lab.measure.readers import LayerRow, LayerTable
from tasp_lab.measure.readers.flop_counts import attention_flops, pairs_of
from tasp_lab.measure.readers.layer_table import PASSES
from tasp_lab.measure.readers.systems import library_run
from tasp_lab.prediction.inputs import with_runtime
from tasp_lab.prediction.predict import with_compute
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.mask import MASKS

OUR_PASSES: Mapping[str, Pass] = {"forward": "forward", "backward": "backward", "forward+backward": "both"}
"""The passes of tables as options."""

WHOLE_MODEL = ("training", "step", "inference", "prefill", "ttft", "decode")
"""Words of passes in which more than one attention call was timed."""

_NEEDED = {"gpus": "gpus", "nodes": "nodes", "sequence": "seq_total", "heads": "heads", "head_dim": "head_dim"}


@dataclass(frozen=True)
class RowRun:
    """What a row is predicted as.

    Parameters
    ----------
    machine : with the kernel and the runtime of the library.
    schedule : the name of the schedule.
    options : how the library runs it.
    layers : the layer; of packed documents one for each packing, which are averaged.
    runtime, kernel : their names, None for none.
    """

    machine: Machine
    schedule: str
    options: AttentionOptions
    layers: tuple[Workload, ...]
    runtime: str | None
    kernel: str | None

    def passes(self, layer: Workload) -> tuple[Schedule, ...]:
        """The schedules of the passes of a layer."""
        return build_schedules(self.schedule, self.machine.topology, layer, None, self.options)

    def key(self, layer: Workload) -> tuple[object, ...]:
        """What the time of a layer depends on."""
        named = (self.machine.topology.name, self.schedule, self.options, layer, self.kernel)
        return (*named, self.machine.runtime)

    def with_instant_host(self) -> RowRun:
        """The same, issued in no time."""
        return replace(self, machine=replace(self.machine, runtime=self.machine.runtime.with_instant_host()))


def row_run(table: LayerTable, row: LayerRow, layers: tuple[Workload, ...]) -> RowRun:
    """What a checked row is predicted as. Raises `TaspLabError` for an unknown machine, system or kernel."""
    assert row.gpus is not None, "a checked row has GPUs"
    source = table.headers.get("source", "")
    run = library_run(row.system, row.variant, causal=layers[0].visible.is_causal, ranks=row.gpus, source=source)
    if run.reason:
        raise ScheduleError(run.reason)
    profile = table.profile or row.gpu.casefold()
    machine = with_compute(machine_for(profile, row.gpus, row.nodes or 1, Path(table.name).parent))
    kernel = table.kernel or run.kernel(machine.accelerator)
    machine = with_kernel(machine, kernel) if machine.accelerator else machine
    machine = with_runtime(machine, run.runtime)
    options = run.options(OUR_PASSES[PASSES[row.passing]])
    return RowRun(machine, run.schedule, options, layers, run.runtime or None, kernel)


def check_row(table: LayerTable, row: LayerRow) -> tuple[Workload, ...]:
    """The layer of a row; of packed documents one for each packing.

    Raises `WorkloadError` for what is missing or unknown, and for layers that are none.
    """
    if is_whole_model(row):
        raise WorkloadError(f"pass {row.passing!r}: a whole model, not one attention layer")
    if row.passing not in PASSES:
        raise WorkloadError(f"unknown pass {row.passing!r}, expected forward, backward or forward+backward")
    for name, column in _NEEDED.items():
        if getattr(row, name) is None:
            raise WorkloadError(f"no {column} in the row")
    assert row.gpus is not None
    assert row.nodes is not None
    if row.gpus % row.nodes:
        raise WorkloadError(f"{row.gpus} GPUs on {row.nodes} nodes, expected a multiple of the nodes")
    if table.profile is None and not row.gpu:
        raise WorkloadError("no header 'profile' and no column 'gpu', so the machine is unknown")
    return _layers(table, row)


def _layers(table: LayerTable, row: LayerRow) -> tuple[Workload, ...]:
    packed, mask = row.mask.startswith("varlen"), row.mask.removeprefix("varlen").strip()
    if mask not in MASKS:
        raise WorkloadError(f"unknown mask {row.mask!r}, expected {' or '.join(MASKS)}")
    assert row.sequence is not None
    assert row.heads is not None
    assert row.head_dim is not None
    if row.dtype == WHAT_IF_DTYPE:
        raise WorkloadError(f"dtype {row.dtype!r}: no kernel has constants of it")
    layer = Workload(row.sequence, row.batch or 1, row.heads, row.kv_heads, row.head_dim, row.dtype, mask)
    if not packed:
        return (layer,)
    if not table.documents:
        raise WorkloadError("packed documents whose lengths no header 'documents' states")
    return tuple(replace(layer, documents=_scaled(lengths, row.sequence)) for lengths in table.documents)


def _scaled(lengths: tuple[int, ...], sequence: int) -> tuple[int, ...]:
    """Lengths of documents as shares of a sequence."""
    total = sum(lengths)
    if sequence % total:
        raise WorkloadError(f"documents of {total} positions together, expected a divisor of {sequence}")
    return tuple(length * (sequence // total) for length in lengths)


def measured_time_s(table: LayerTable, row: LayerRow, layer: Workload) -> float:
    """The time of a row, from its rate if it has none. Raises `WorkloadError` where that is not known."""
    if row.time_s:
        return row.time_s
    if row.time_s == 0:
        raise WorkloadError("a time of 0")
    if not row.flops_per_s:
        raise WorkloadError("neither a time nor a rate of the attention")
    if table.counted is None and not layer.visible.is_full:
        raise WorkloadError("a rate without its convention: no header 'flops', expected causal halved or causal full")
    if layer.documents is not None:
        raise WorkloadError("a rate of packed documents, expected a time")
    pairs = pairs_of(layer.sequence, layer.sequence, causal=layer.visible.is_causal, counted=table.counted or "masked")
    flops = attention_flops(pairs, layer.batch, layer.heads, layer.head_dim, PASSES[row.passing])
    return flops / (row.flops_per_s * (row.gpus or 1))


def is_whole_model(row: LayerRow) -> bool:
    """Whether more than one attention call was timed."""
    return row.passing not in PASSES and any(word in row.passing.casefold() for word in WHOLE_MODEL)


def shape_of(table: LayerTable, row: LayerRow) -> dict[str, object]:
    """The columns of a row for a report, and room for what it is predicted as."""
    named = {"passing": "pass", "sequence": "seq_total"}
    left_out = ("time_s", "flops_per_s", "gpu")
    shape = {named.get(name, name): value for name, value in asdict(row).items() if name not in left_out}
    return {"profile": table.profile or row.gpu or None, **shape, "schedule": None, "runtime": None, "kernel": None}
