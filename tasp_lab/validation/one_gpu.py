"""``tasp-lab gpu-check --one``: what one GPU, or none, can show of the runtime.

All ranks run in this process on one device, with the schedules, plans, kernels and streams of a job of several GPUs,
over a loopback (`runtime.executor.loopback`). Steps that fail do not end the check: none needs another one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from runtime.checks import hardware, shared_gpu
from runtime.checks.one_device import (
    Device,
    GhostRun,
    merge_bytes_per_s,
    merge_errors,
    one_thread,
    reserved_bytes,
    the_device,
    with_peers,
)
from runtime.checks.planted import FAULTS, NO_PLACE, RANK, report
from runtime.checks.training import grows_after
from runtime.checks.watch import End
from runtime.executor.transports import gpu_libraries
from runtime.kernels.timing import measured_table
from runtime.linux import host_environment
from runtime.trials.in_process import run_on_one_device
from tasp_lab.core.errors import RunError, TaspLabError
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.inputs import MachineLike, wires
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import COLLECTIVES, LINEAR, attention_names_on, by_kind, reason_of
from tasp_lab.topology.builders import full_mesh
from tasp_lab.validation.gpu_check import Record, Session, Show, StepResult, check_folder, in_one_line, result_of
from tasp_lab.validation.gpu_steps import FULL, HOST, NEEDS_GPU, QUICK, STEPS, Outcome, Sizes, Step, add_to
from tasp_lab.validation.measurements import DEFAULT_MINUTES, MEASUREMENTS, Measurement, Tables, measure
from tasp_lab.workload.layer import Work, Workload

DEFAULT_RANKS = 4
TABLE_NAME = "kernel-times.csv"
BOTH = AttentionOptions("both")
MERGE_LIMIT, COPY_SHARE = 4e-6, 0.7
"""Largest error of a merge of four parts in float32, and the least share of a copy's bandwidth."""


@dataclass
class OneDevice:
    """What steps work with; none begins after `ends_s` of the monotonic clock."""

    device: Device
    machine: Machine
    names: tuple[str, ...]
    seed: int
    quick: bool
    folder: Path
    progress: ProgressCallback = no_progress
    ends_s: float = math.inf
    unapplied: list[dict[str, object]] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def sizes(self) -> Sizes:
        return (QUICK if self.quick else FULL) if self.on_gpu else HOST

    @property
    def ranks(self) -> int:
        return self.machine.topology.world_size

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.ends_s

    def layer(self, per_rank: int, **changes: Any) -> Workload:
        """A layer with heads for all ranks; on a GPU of sizes that its kernels have."""
        n, head_dim = self.ranks, 64 if self.on_gpu else 8
        dtype = "bf16" if self.on_gpu else "fp32"
        layer = Workload(n * per_rank + 4, heads=2 * n, kv_heads=n, head_dim=head_dim, dtype=dtype, mask="full")
        return replace(layer, **changes)

    def passes(self, name: str, layer: Workload) -> Sequence[Schedule]:
        return build_schedules(name, self.machine.topology, layer, options=BOTH)


ONE_STEPS: list[Step] = []
_step = add_to(ONE_STEPS)

KERNELS = STEPS[2]
"""The step that both checks have."""

_FAULT = "A fault of tasp-lab; send the record."


@_step("inventory", "what the check ran on", "The driver or torch cannot use the GPU; look at nvidia-smi or rocm-smi.")
def take_inventory(context: OneDevice) -> Outcome:
    """The device, and the versions and variables of its libraries."""
    found: dict[str, object] = {
        "device": asdict(hardware.inventory_of_rank(0, context.device, 1)),
        "environment": {**host_environment(), **gpu_libraries()},
    }
    if context.on_gpu:
        found["topology"] = hardware.topology_text() or "neither nvidia-smi, rocm-smi nor amd-smi is installed"
    return Outcome(found)


_step(KERNELS.name, KERNELS.proves, KERNELS.if_it_fails)(KERNELS.run)


@_step(
    "kernel times", "the times of kernels, for predictions of this GPU", "The GPU is shared or too hot.", on_gpu=True
)
def time_kernels(context: OneDevice) -> Outcome:
    """Write a table of kernel times, which ``calibrate --kernels`` reads."""
    table = measured_table(context.progress)
    write_whole(context.folder / TABLE_NAME, table.encode())
    return Outcome({"table": TABLE_NAME, "rows": table.count("\n") - table.count("#") - 1})


@_step(
    "schedules",
    "every schedule, pass and mask is exact in random orders of ranks and streams, and no memory is used too early",
    _FAULT,
)
def check_schedules(context: OneDevice) -> Outcome:
    """Run all schedules with all ranks on this device."""
    runs, names, seeds = 0, set[str](), 1 if context.quick else 2
    last = ""
    for label, schedule in _schedules(context):
        if context.is_over:
            last = label
            break
        names.add(label)
        for seed in range(context.seed, context.seed + seeds):
            try:
                run_on_one_device(schedule, context.device, seed)
            except RunError as error:
                raise RunError(f"{label}, seed {seed}: {error}") from None
            runs += 1
    unapplied = context.unapplied or "none"
    numbers = {"schedules": len(names), "runs": runs, "ranks": context.ranks, "do_not_apply": unapplied}
    return Outcome(numbers | ({"no_time_from": last} if last else {}))


def _schedules(context: OneDevice) -> Iterator[tuple[str, Schedule]]:
    """All schedules by name, pass and mask; those that do not apply are noted."""
    layer = context.layer(256 if context.on_gpu else 9)
    half, linear = layer.sequence // 2, replace(layer, mask="causal", kind="linear", decay="head")
    masks = {
        "full": layer, "causal": replace(layer, mask="causal"),
        "window": replace(layer, mask="causal", window=layer.sequence // 3),
        "documents": replace(layer, mask="causal", documents=(half - 3, layer.sequence - half + 3)),
    }  # fmt: skip
    for name in context.names:
        works: Mapping[str, Work] = {"bytes": 4099} if name in COLLECTIVES else {"causal": linear}
        for mask, work in (works if name in COLLECTIVES or name in LINEAR else masks).items():
            options = BOTH if isinstance(work, Workload) else AttentionOptions()
            try:
                built = build_schedules(name, context.machine.topology, work, options=options)
            except TaspLabError as error:
                context.unapplied.append({"schedule": name, "mask": mask, "reason": reason_of(error, name)})
                continue
            context.progress(f"{name}, {mask}")
            for number, schedule in enumerate(built):
                yield f"{name}, {mask}, {('forward', 'backward')[number]}", schedule


GHOST_SCHEDULES = ("ring-attention", "zigzag-ring-attention", "tasp")


@_step("ghosts", "what a pass of one rank takes without a network", "Kernels do not run as fast as alone.", on_gpu=True)
def run_ghosts(context: OneDevice) -> Outcome:
    """Time each pass of one rank with peers that send nothing, with copies, and by NCCL from this rank to itself."""
    rows = []
    with with_peers() as kinds:
        for name, schedule, which in _layers(context, 2048 if context.quick else 8192):
            times_s = {f"{peers}_s": GhostRun(schedule, RANK, context.device, peers).time_s() for peers in kinds}
            rows.append({"schedule": name, "pass": which, **times_s})
    return Outcome({"ghosts": rows})


def _layers(context: OneDevice, per_rank: int) -> Iterator[tuple[str, Schedule, str]]:
    layer = context.layer(per_rank, mask="causal", head_dim=128) if context.on_gpu else context.layer(16, mask="causal")
    for name in GHOST_SCHEDULES:
        yield from zip((name,) * 2, context.passes(name, layer), ("forward", "backward"), strict=True)


@_step("launches", "a pass queues as many operations each time", "Memory is not reused. " + _FAULT)
def count_launches(context: OneDevice) -> Outcome:
    """Count the operations of passes of one rank; a first run makes what later ones keep."""
    rows, failures = [], []
    for name, schedule, which in _layers(context, 512):
        run = GhostRun(schedule, RANK, context.device)
        run.run()
        first, second = run.operations(), run.operations()
        calls = len(run.trial.executor.part.calls)
        total = sum(first.values())
        rows.append({
            "schedule": name, "pass": which, "calls": calls, "operations": total,
            "per_call": round(total / max(1, calls), 2),
        })  # fmt: skip
        if first != second:
            failures.append(f"{name}, {which}: {total} operations, then {sum(second.values())}, expected as many")
    return Outcome({"launches": rows}, failure="; ".join(failures))


@_step("memory", "reserved memory does not grow from layer to layer", _FAULT, on_gpu=True)
def check_memory(context: OneDevice) -> Outcome:
    """Run both passes again and again, with all ranks on this device."""
    passes = context.passes("tasp", context.layer(1024, mask="causal"))
    reserved: list[int] = []
    for _ in range(8 if context.quick else 20):
        for schedule in passes:
            run_on_one_device(schedule, context.device)
        reserved.append(reserved_bytes(context.device))
    grown = grows_after(tuple(reserved), 3)
    return Outcome({"reserved_bytes": reserved}, failure=f"grew by {grown} bytes after round 3" if grown else "")


@_step("merge", "merged results agree with float64, also where parts have no keys", _FAULT)
def check_merge(context: OneDevice) -> Outcome:
    errors = [merge_errors(context.device, 257, context.seed + each) for each in range(5)]
    worst = {f"{name}_error": max((each[name] for each in errors), key=abs) for name in ("out", "lse")}
    failures = [f"{name} {error:.2g}, expected at most {MERGE_LIMIT:g}" for name, error in worst.items()
                if not all(each[name.removesuffix("_error")] <= MERGE_LIMIT for each in errors)]  # fmt: skip
    numbers: dict[str, object] = {**worst, "limit": MERGE_LIMIT}
    if context.on_gpu:
        merged, copied = merge_bytes_per_s(context.device, 8192)
        numbers |= {"merge_bytes_per_s": merged, "copy_bytes_per_s": copied, "least_share": COPY_SHARE}
        if not merged >= COPY_SHARE * copied:
            failures.append(
                f"a merge moves {merged / copied:.0%} of a copy's bytes/s, expected {COPY_SHARE:.0%} or more"
            )
    return Outcome(numbers, failure="; ".join(failures))


@_step("graph", "a pass can be captured as a CUDA graph, whose replays give the same bits", _FAULT, on_gpu=True)
def check_graph(context: OneDevice) -> Outcome:
    failures = [
        f"{name}, {which}: replays differ from the run"
        for name, schedule, which in _layers(context, 512)
        if not GhostRun(schedule, RANK, context.device).replays_equal(50)
    ]
    return Outcome({"replays": 50}, failure="; ".join(failures))


@_step(
    "shared GPU",
    "layers of two ranks on one GPU by NCCL are those of a single process",
    "NCCL or its use differs from what tests on hosts assume. " + _FAULT,
    on_gpu=True,
)
def share_gpu(context: OneDevice) -> Outcome:
    """Run layers with two processes beside this one, which leaves them the memory that it does not use."""
    if reason := shared_gpu.reason_against(context.device):
        return Outcome({}, skipped=reason)
    context.progress("two ranks on this GPU")
    shared = shared_gpu.share("nccl")
    return Outcome({"passed": list(shared.passed)}, failure=shared.failure, skipped=shared.refusal)


@_step("faults", "planted faults of messages, waits and memory are found", "What passed above proves little. " + _FAULT)
def plant_faults(context: OneDevice) -> Outcome:
    """Plant each fault in schedules that have a place for it."""
    context.progress("planted faults")
    layer, topology = Workload(72, heads=2, head_dim=8, dtype="fp32", mask="full"), full_mesh(6)
    rows, failures = [], []
    for fault in FAULTS:
        for name, options in (("tasp", AttentionOptions()), ("ring-attention", AttentionOptions(buffers=2))):
            (schedule,) = build_schedules(name, topology, layer, options=options)
            reported = report(fault, schedule, context.device)
            has_place = fault != "swapped order" or name == "tasp"
            if reported == NO_PLACE or not has_place:
                continue
            rows.append({"fault": fault, "schedule": name, "reported": reported or "not found"})
            if reported is None or "stay in use" in reported:
                failures.append(f"{fault} in {name}: {reported or 'not found'}")
    missing = set(FAULTS) - {str(row["fault"]) for row in rows}
    failures += [f"{fault}: no schedule has a place for it" for fault in sorted(missing)]
    return Outcome({"faults": rows}, failure="; ".join(failures))


def _measuring(tables: Tables, began_s: float, minutes: float) -> Iterator[Step]:
    """A step per measurement; what one does not need of its share of the time is left to the next."""
    shares = 0.0
    for number, each in enumerate(MEASUREMENTS, len(ONE_STEPS)):
        shares += each.minutes / DEFAULT_MINUTES
        run = partial(_measure, each, tables, began_s + 60 * minutes * shares)
        yield Step(number, each.name, each.question, "The libraries differ from those we read; send the record.", run)


def _measure(measurement: Measurement, tables: Tables, ends_s: float, context: OneDevice) -> Outcome:
    return measure(measurement, tables, ends_s, context.progress)


def gpu_check_one(
    machine: MachineLike | None = None,
    *,
    ranks: int | None = None,
    schedules: Sequence[str] = (),
    seed: int = 0,
    quick: bool = False,
    minutes: float | None = None,
    output: Path | str = "gpu-check",
    progress: ProgressCallback = no_progress,
    show: Show = lambda record: None,
    steps: Sequence[Step] = ONE_STEPS,
) -> Record:
    """Check the runtime with all ranks on one device, this process's GPU or else the processor; returns the record.

    Parameters
    ----------
    machine, ranks : a machine, or so many ranks that are a full mesh; by default 4.
    schedules : names of those to run; by default all.
    seed : of the orders of ranks; equal seeds give equal orders on a host.
    quick : whether to run less.
    minutes : measure, in this time, what one GPU settles of predictions (`tasp_lab.validation.measurements`), after the
        first step and before the others, of which none begins later; None measures nothing and has no limit.
    output : the folder of the record, made if it is not there.
    progress : called with lines of progress.
    show : called with the record when Ctrl-C ends the check.
    steps : what is checked; for tests.

    Raises `RunError` for fewer than 2 ranks, for another number than the machine has, for a negative seed, and for
    measurements without a GPU or without time;
    `ScheduleError` for an unknown schedule; `OutputError` for a folder that cannot be written; and what loading a
    machine raises. Failed steps are in the record.
    """
    if ranks is not None and not 2 <= ranks <= 64:
        raise RunError(f"--ranks: {ranks}, expected 2 to 64")
    if seed < 0:
        raise RunError(f"--seed: {seed}, expected 0 or more")
    device = the_device()
    if minutes is not None and not minutes > 0:
        raise RunError(f"--minutes: {minutes:g}, expected more than 0")
    if minutes is not None and device.type != "cuda":
        raise RunError(
            "--measure: needs a GPU, and torch sees none here; without it, --one checks the runtime on the CPU"
        )
    chosen = wires(f"full-mesh:{ranks or DEFAULT_RANKS}" if machine is None else machine)
    n = chosen.topology.world_size
    if ranks is not None and n != ranks:
        raise RunError(f"{chosen.topology.name} has {n} ranks, but --ranks is {ranks}: give one of them")
    if n < 2:
        raise RunError(f"{chosen.topology.name} has one rank, expected 2 or more")
    by_kind([name for name in schedules if name not in COLLECTIVES], ["softmax", "linear"])
    names = tuple(schedules) or (*COLLECTIVES, *attention_names_on(n), *LINEAR)
    folder = Path(output)
    check_folder(folder)
    context = OneDevice(device, chosen, names, seed, quick, folder, progress)
    if minutes is not None:
        began_s = time.monotonic()
        context.ends_s = began_s + 60 * minutes
        tables = Tables(folder, device, chosen.topology.name)
        steps = [*steps[:1], *_measuring(tables, began_s, minutes), *steps[1:]]
    session = Session(Record(chosen.topology.name, n, f"loopback, {device.type}", quick), folder, show, progress)
    for step in steps:
        session.begin(step)
        try:
            session.add(_run(step, context))
        except KeyboardInterrupt:
            session.report(End("interrupted", "interrupted"))
            raise
    return session.end()


def _run(step: Step, context: OneDevice) -> StepResult:
    began_s = time.perf_counter()
    try:
        skipped = NEEDS_GPU if step.on_gpu and not context.on_gpu else "no time was left" if context.is_over else ""
        with one_thread():
            outcome = Outcome({}, skipped=skipped) if skipped else step.run(context)
    except Exception as error:
        outcome = Outcome({}, failure=in_one_line(error))
    return result_of(step, outcome, time.perf_counter() - began_s)
