"""Steps 9 and 10: groups that lose a rank, and the table of predictions beside measurements."""

from __future__ import annotations

from dataclasses import replace

from runtime.gpu_check.failures import lose_rank
from tasp_lab.machines.machine import INSTANT, Machine
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.validation.gpu_check.steps import Context, Outcome
from tasp_lab.validation.gpu_check.times import timed_layer
from tasp_lab.validation.validate import Trials
from tasp_lab.workload.layer import Work, Workload

GATHERS = ("ring", "multi-ring", "direct")
LAYERS = ("ring-attention", "zigzag-ring-attention", "tasp")


def check_losses(context: Context) -> Outcome:
    """Step 9, on rank 0: a rank that raises and one that is killed, each in a group of its own on this host."""
    group, limit_s = context.group, context.sizes.loss_limit_s
    if group.rank:
        return Outcome({})
    rows, failures = [], []
    for how in ("raise", "kill"):
        found = lose_rank(how, group.backend, max(2, group.local_world_size), limit_s)
        rows.append(
            {
                "how": how,
                "ended_s": found.ended_s,
                "limit_s": limit_s,
                "exit_code": found.exit_code,
                "named": found.named,
                "orphans": len(found.orphans),
            }
        )
        if problem := found.problem(limit_s):
            failures.append(problem)
            rows[-1]["output"] = found.output[-2000:]
    return Outcome({"losses": rows}, failure="; ".join(failures))


def compare_schedules(context: Context) -> Outcome:
    """Step 10: what `validate` measures, on the calibration of step 5; no limit applies."""
    rows: list[dict[str, object]] = []
    for shard_bytes in context.sizes.table_bytes:
        rows += _rows(context, GATHERS, shard_bytes, AttentionOptions())
    for sequence in context.sizes.table_sequences:
        for mask in ("full", "causal"):
            layer = replace(timed_layer(context, sequence), mask=mask)
            names = [name for name in LAYERS if layer.visible.is_causal or name != "zigzag-ring-attention"]
            rows += _rows(context, names, layer, AttentionOptions("both"))
    return Outcome({"predicted_and_measured": rows})


def _rows(
    context: Context, names: tuple[str, ...] | list[str], work: Work, options: AttentionOptions
) -> list[dict[str, object]]:
    assert context.calibration is not None, "an earlier step calibrates"
    calibrated, group = context.calibration.machine, context.group
    nominal = Machine(context.machine.topology if group.on_gpu else calibrated.topology)
    schedules = [
        schedule
        for name in names
        for schedule in build_schedules(name, context.machine.topology, work, options=options)
    ]  # fmt: skip
    trials = Trials(
        ranks=group.ranks,
        work=work,
        options=options,
        timed=INSTANT,
        real=isinstance(work, Workload),
        calibrated=calibrated,
        nominal=nominal,
        repeats=context.sizes.repeats,
        transport="auto",
        progress=context.progress,
    )
    return [
        {
            "schedule": run.prediction.schedule,
            "work": f"{work} bytes" if isinstance(work, int) else f"{work.sequence} positions, {work.mask}",
            "pass": run.to_dict().get("pass", ""),
            "predicted_s": float(run.prediction.time_s),
            "measured_s": run.measured_s,
            "spread_s": run.measured_spread_s,
            "relative_error": run.relative_error,
        }
        for run in trials.run_all(schedules)
    ]
