"""Tables of whole layers beside their predictions.

A row is predicted as its system runs it (`tasp_lab.measure.readers.systems`) on the machine of its header. Rows that
cannot be predicted, or should not count, are kept with the reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import mean

from sim.simulate import Engine, simulate
from tasp_lab.core.errors import TaspLabError
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import NO_SAMPLES, Sampling
from tasp_lab.measure.accuracy.judged import Regime, TableAccuracy, WorkRow
from tasp_lab.measure.accuracy.layer_rows import (
    RowRun,
    check_row,
    is_whole_model,
    measured_time_s,
    row_run,
    shape_of,
)
from tasp_lab.measure.accuracy.machines import reason_of
from tasp_lab.measure.accuracy.ranking import ranking
from tasp_lab.measure.inputs import left_out_with
from tasp_lab.measure.readers import LayerRow, LayerTable
from tasp_lab.prediction.interval import residual_interval
from tasp_lab.prediction.residuals import layer_regime
from tasp_lab.schedules.registry import one_name
from tasp_lab.workload.layer import Workload

HOST_SHARE = 0.1
"""A row is host-bound if the host times of its runtime make its predicted time longer by more than this share."""

FEW_RANKS = 8
"""With more ranks schedules are simulated by the array engine."""


@dataclass
class LayerJudge:
    """Judges tables of layers; what several rows have in common is simulated once."""

    sampling: Sampling = NO_SAMPLES
    known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def judge(self, table: LayerTable) -> TableAccuracy:
        """A table beside its prediction; rows without one keep the reason."""
        if table.reason:
            return TableAccuracy(table, table.reason, ())
        rows = tuple(self._row(table, row) for row in table.rows)
        right, groups = ranking(rows)
        return TableAccuracy(table, _reason(rows), rows, ranking_right=right, ranking_groups=groups)

    def _row(self, table: LayerTable, row: LayerRow) -> WorkRow:
        """A row with its prediction, or with as much as is known."""
        shape, given = shape_of(table, row), table.headers.get("out_of_scope", "")
        regime: Regime | None = "whole-model" if is_whole_model(row) else None
        measured_s = row.time_s or None
        try:
            layers = check_row(table, row)
            measured_s = measured_time_s(table, row, layers[0])
            if given:
                return WorkRow(measured_s, None, given, regime, shape)
            run = row_run(table, row, layers)
            predicted_s, device_s = self.time_s(run), self.time_s(run.with_instant_host())
        except TaspLabError as error:
            return WorkRow(measured_s, None, given or reason_of(error), regime, shape)
        reason, regime = _regime(table, row, predicted_s / device_s - 1)
        shape |= {"schedule": run.schedule, "runtime": run.runtime, "kernel": run.kernel}
        counts = bool(self.sampling.samples) and regime == "gpu-bound"
        within = layer_regime(run.machine, predicted_s)
        interval = residual_interval(predicted_s, within, left_out_with(table)) if counts else None
        work = (run.machine.topology.name, run.options.passes, *layers)
        return WorkRow(measured_s, predicted_s, reason, regime, shape, work, one_name(run.schedule), interval)

    def time_s(self, run: RowRun) -> float:
        """The predicted time of all passes, the mean of all packings."""
        return mean(self._time_s(run, layer) for layer in run.layers)

    def _time_s(self, run: RowRun, layer: Workload) -> float:
        key = run.key(layer)
        if key not in self.known:
            engine = engine_for(run.machine)
            timelines = (simulate(each, run.machine, engine, events=False) for each in run.passes(layer))
            self.known[key] = sum(float(timeline.time_s) for timeline in timelines)
        return self.known[key]


def engine_for(machine: Machine) -> Engine:
    """The faster engine; the times are the same."""
    return "simpy" if machine.topology.world_size <= FEW_RANKS else "array"


def _regime(table: LayerTable, row: LayerRow, host_share: float) -> tuple[str, Regime]:
    """Why a predicted row does not count, empty if it does, and its regime.

    `host_share` is how much longer its predicted time is with the host times of its runtime.
    """
    if (row.sequence or 0) < table.from_sequence:
        return f"shorter than {table.from_sequence} positions, from which on the table counts", "gpu-bound"
    work = (row.batch or 1) * (row.sequence or 0) * (row.heads or 1) // (row.gpus or 1)
    if work < table.host_bound_below:
        return f"host-bound: fewer than {table.host_bound_below} positions x heads per GPU, by its header", "host-bound"
    if row.heads == 1 and (row.sequence or 0) <= table.fits_runtime_up_to:
        return "gave the host times of its runtime", "host-bound"
    if host_share > HOST_SHARE:
        return f"host-bound: predicted {host_share:.0%} longer than with a host that takes no time", "host-bound"
    return "", "gpu-bound"


def _reason(rows: tuple[WorkRow, ...]) -> str:
    """Why no row counts: the most frequent reason; empty if one does."""
    if any(row.in_scope for row in rows):
        return ""
    reason, _ = Counter(row.reason for row in rows).most_common(1)[0]
    return reason
