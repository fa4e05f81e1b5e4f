"""Predictions beside measurements: the same schedule simulated and executed.

`validate` starts real ranks on a fabric, calibrates it point to point, predicts each schedule from the calibration,
executes the same schedule, and compares the times.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any, Literal

from runtime.calibration import Calibration
from runtime.fabric.emulated import check_directions
from runtime.linux import host_environment
from runtime.protocol.jobs import KernelTimes, MeasureCompute, Ranks, RunSchedule
from runtime.protocol.records import duration_s, merge_records
from sim.simulate import engine_of, simulate
from tasp_lab.core.choices import BackendKind, FabricKind
from tasp_lab.core.errors import NoDecompositionError, RunError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import Report, flat
from tasp_lab.core.tables import Part, brief
from tasp_lab.core.units import Number, format_bandwidth, format_flops, format_time
from tasp_lab.machines.machine import IDEAL, INSTANT, Compute, ComputeRate, Machine
from tasp_lab.prediction.answer import Answer, answer_schedule, one_after_the_other, together
from tasp_lab.prediction.captions import assumptions, compute_of_passes, kernels_text, layer_constants, title_of
from tasp_lab.prediction.columns import cells_of, fields_of, ratio, rows_table, view_of
from tasp_lab.prediction.inputs import (
    MachineLike,
    ScheduleNames,
    WorkLike,
    as_names,
    check_call,
    chosen_machine,
    parse_compute,
    wires,
    with_assumptions,
    with_compute,
)
from tasp_lab.prediction.passes import label
from tasp_lab.prediction.provenance import (
    Provenance,
    machine_constants,
    machine_inputs,
    overrides_inputs,
    plain,
    rings_inputs,
    schedules_inputs,
)
from tasp_lab.prediction.question import RUN_SETTINGS, are_sought, question_of
from tasp_lab.rings.options import RingOptions
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import check_names, is_own
from tasp_lab.timeline.events import Timeline
from tasp_lab.topology.graph import Topology
from tasp_lab.validation.fabrics import (
    calibrate_ranks,
    check_fabric,
    check_work,
    default_scale,
    expected_fabric_s,
    fit_document,
    is_real,
    measured_machine,
    start_ranks,
    why_not_comparable,
)
from tasp_lab.workload.layer import Work, Workload

ComputeKind = Literal["timed", "real"]

SLOWEST_KERNEL_FLOPS_PER_S = 5e8
"""A rank whose real kernel calls are slower than this on average is considered hung."""


@dataclass(frozen=True, repr=False)
class Run:
    """A schedule predicted and measured on one fabric; all times in seconds of the fabric's own clock.

    `prediction` follows from the calibration, its bound and `nominal_s` from the nominal machine (see `validate`);
    `measured` are the repeats. `cpu_busy_share` is the share of the time of all cores of the first rank's host that any
    process used while the repeats ran. `compute`: whether a layer's kernel calls were timed waits or real.
    `kernel_host_s`: on GPUs, the longest that a host takes to make the kernel calls of its rank; where that is the time
    of the calls, their rate is that of the host.
    `not_comparable`: why the measured time cannot be compared with the prediction, None if it can.
    """

    prediction: Answer
    nominal_s: Number
    measured: tuple[float, ...]
    measured_timeline: Timeline
    cpu_busy_share: float
    compute: ComputeKind = "timed"
    kernel_host_s: float | None = None
    not_comparable: str | None = None

    def __repr__(self) -> str:
        times = f"predicted {format_time(self.prediction.time_s)}, measured {format_time(self.measured_s)}"
        return brief(self, f"{self.prediction.schedule} on {self.prediction.topology}", times)

    @property
    def measured_s(self) -> float:
        """The median of the repeats."""
        return statistics.median(self.measured)

    @property
    def measured_spread_s(self) -> float:
        """The slowest repeat minus the fastest."""
        return max(self.measured) - min(self.measured)

    @property
    def relative_error(self) -> float:
        """Predicted / measured - 1."""
        return float(self.prediction.time_s) / self.measured_s - 1 if self.measured_s else 0.0

    def title(self, where: str) -> str:
        """The work and the fabric, on one line."""
        kernels = kernels_text(self.prediction, self.compute == "real")
        return title_of(self.prediction, ", ".join((self.prediction.topology, where, *kernels)))

    def to_dict(self) -> dict[str, object]:
        """The row of `--json`: the prediction and the measurement."""
        computed = {"compute": self.compute} if self.prediction.computes else {}
        measured = {
            "predicted_s": float(self.prediction.time_s),
            "nominal_s": float(self.nominal_s),
            "measured_s": self.measured_s,
            "measured_spread_s": self.measured_spread_s,
            "measured_repeats_s": list(self.measured),
            "relative_error": self.relative_error,
            "cpu_busy_share": self.cpu_busy_share,
            "comparable": self.not_comparable is None,
            "not_comparable": self.not_comparable,
        }
        return fields_of(self.prediction, view_of(self.prediction)) | computed | measured

    def row(self, first: Run) -> dict[str, str]:
        """Texts by column; speed-ups are over `first`."""
        prediction = self.prediction
        return (
            cells_of(prediction, "schedule", "pass")
            | {
                "predicted": format_time(prediction.time_s),
                "nominal": format_time(self.nominal_s),
                "measured": f"{format_time(self.measured_s)} ± {format_time(self.measured_spread_s / 2)}",
                "error": f"{self.relative_error:+.1%}" if self.not_comparable is None else "not a prediction",
                "speed-up predicted": f"{ratio(first.prediction.time_s, prediction.time_s):.2f}x",
                "speed-up measured": f"{ratio(first.measured_s, self.measured_s):.2f}x",
            }
            | (
                cells_of(prediction, "exposed")
                if prediction.computes
                else {"share of bound": f"{ratio(prediction.bound_s, self.measured_s):.1%}"}
            )
            | {"cores busy": f"{self.cpu_busy_share:.0%}"}
        )


@dataclass(frozen=True, repr=False)
class Comparison(Report):
    """All runs on one fabric, and how it was calibrated.

    `is_reporter` is False on the ranks of a torchrun group that leave the output to rank 0.
    `environment` is what all ran on.
    """

    fabric: FabricKind
    scale: float
    calibration: Calibration
    runs: tuple[Run, ...]
    is_reporter: bool = True
    provenance: Provenance | None = None
    environment: Mapping[str, object] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        rows, rates = [run.to_dict() for run in self.runs], list[dict[str, object]]()
        for run, row in zip(self.runs, rows, strict=True):
            if run.compute == "real" and not run.prediction.is_sum:
                rate = {key: row[key] for key in ("schedule", "pass", "compute_flops_per_s")}
                rates.append(rate if run.kernel_host_s is None else rate | {"host_s": run.kernel_host_s})
        return {
            "fabric": self.fabric,
            "scale": self.scale,
            "calibration": [*map(fit_document, self.calibration.fits), *rates],
            "compute": compute_of_passes(run.prediction for run in self.runs if run.compute == "timed"),
            "runs": rows,
            "provenance": None if self.provenance is None else self.provenance.to_dict(),
        }

    def records(self) -> list[dict[str, object]]:
        """A row per run."""
        return [flat(run.to_dict()) | {"fabric": self.fabric, "scale": self.scale} for run in self.runs]

    def parts(self) -> list[Part]:
        if not self.runs:
            return []
        scale = f", scale {self.scale:.3g}" if self.fabric == "emulated" else ""
        first = {run.prediction.compared_by: run for run in reversed(self.runs)}
        rows = [run.row(first[run.prediction.compared_by]) for run in self.runs]
        run = next((run for run in self.runs if run.prediction.is_all), self.runs[0])
        title = run.title(f"{self.fabric} fabric{scale}")
        reasons = dict.fromkeys(each.not_comparable for each in self.runs if each.not_comparable is not None)
        notes = [f"not a prediction: {reason}" for reason in reasons]
        return [rows_table(title, rows), *notes, *assumptions(run.prediction)]


def runs_together(forward: Run, backward: Run) -> Run:
    """Both passes of a schedule as one run, one after the other.

    Its repeats are the k-th fastest of both passes, added for each k, so medians and spreads add up too.
    """
    prediction = together(forward.prediction, backward.prediction)
    timelines = forward.measured_timeline, backward.measured_timeline
    measured_s = forward.measured_s + backward.measured_s
    busy_s = sum(run.cpu_busy_share * run.measured_s for run in (forward, backward))
    return Run(
        prediction,
        forward.nominal_s + backward.nominal_s,
        tuple(map(add, sorted(forward.measured), sorted(backward.measured))),
        one_after_the_other(*timelines, prediction.timeline.schedule),
        busy_s / measured_s if measured_s else 0.0,
        forward.compute,
        not_comparable=forward.not_comparable,
    )


def validate(
    machine: MachineLike,
    schedules: ScheduleNames,
    work: WorkLike,
    *,
    fabric: FabricKind = "emulated",
    scale: float | None = None,
    repeats: int = 5,
    transport: str = "auto",
    backend: BackendKind = "auto",
    progress: ProgressCallback = no_progress,
    **settings: Any,
) -> Comparison:
    """Run a collective or an attention layer on real processes and compare with its prediction.

    Both have the same messages (`tasp_lab.schedule.messages`): one for blocks that are sent together.

    Parameters
    ----------
    machine : a machine or its name; its bandwidths are scaled on the emulated fabric. The communication library is
        that of the fabric, whatever the machine's is.
    schedules : the name of a schedule, or several; speed-ups are over the first.
    work : the bytes per rank of a collective, a number or text such as ``"1MiB"``, or an attention layer.
    fabric : ``emulated`` (network namespaces), ``local`` (plain processes) or ``torchrun`` (this process is a rank).
    scale : bandwidth of the emulated fabric over that of the machine; chosen by `default_scale` when None.
    repeats : timed repetitions per schedule, after one to warm up.
    transport : how blocks are sent: ``auto``, ``p2p``, ``batched``, ``all-to-all`` or ``symmetric-memory``.
    backend : of torch under torchrun: ``nccl`` with a GPU per rank, ``gloo`` on CPUs; ``auto`` is gloo only where
        neither the host nor the machine has GPUs.
    progress : called with lines of progress.
    settings : of the links, the rings and the options of a layer, see `tasp_lab.prediction.question.RUN_SETTINGS`.
        Rings are sought on the links, for any library. Each pass is a run of its own; both together are one more, see
        `runs_together`.

        `compute` is a rate in FLOP/s (or ``"timed:RATE"``) for both passes, on the fabric's own clock: kernel calls are
        waits of the time that they take at this rate. ``"real"``: kernels are executed, and a rate for each schedule is
        calibrated from its kernel calls, alone and without communication. By default the emulated fabric has waits at
        the machine's rate times the scale, which keeps the ratio of compute to communication; the others are
        ``"real"``. A hybrid has waits only. `kernel` is, on the emulated fabric, the kernel of the machine's
        accelerator whose times the waits have.

    The *nominal* machine is the given one; on the emulated fabric it is scaled and has no latency. Local processes
    share one medium whatever the machine is, so there it is that medium without latency. Its ranks compute as fast as
    those of the prediction.

    Raises `RunError` (a rank failed), `FabricError` (no namespaces), `QuantityError`, and what `predict` raises.
    """
    check_call(validate, locals(), RUN_SETTINGS)
    names, question = as_names(schedules), question_of(machine, work, settings)
    work, options, kernel = question.work, question.options, question.kernel
    check_fabric(fabric, scale, backend, repeats)
    check_names(names, work)
    rate = parse_compute(question.compute)
    check_work(work, rate, fabric, kernel, question.overrides)
    asked = replace(question, compute=None if kernel is None else question.compute)
    machine = chosen_machine(wires(machine), asked, assumes=False)
    sought = are_sought(question.rings, names)
    given = question.rings if isinstance(question.rings, tuple) else ()
    if len(given) > 1:
        raise NoDecompositionError(f"decomposition: {len(given)} of them, expected one to run")
    decomposition = given[0] if given else None
    if isinstance(question.rings, RingOptions) and sought:
        decomposition = question.rings.find(machine.topology, progress)
    inputs = {
        "machine": machine_inputs(replace(machine, comm_library=IDEAL), compute=isinstance(work, Workload)),
        "schedules": schedules_inputs(names),
        "work": plain(work),
        "options": plain(options) if isinstance(work, Workload) else None,
        "rings": rings_inputs(given) if given else plain(question.rings) if sought else None,
        "compute": plain(rate),
        "fabric": fabric,
        "scale": plain(scale),
        "repeats": repeats,
        "transport": transport,
        **overrides_inputs(question.overrides),
    }
    built = [
        schedule for name in names for schedule in build_schedules(name, machine.topology, work, decomposition, options)
    ]
    topology, speeds = machine.topology, machine.rank_speeds
    real = is_real(work, rate, fabric)
    timed: Compute = ComputeRate(rate) if isinstance(rate, float) else INSTANT
    if fabric == "emulated":
        for schedule in built:
            check_directions(topology, schedule)
        own: Compute = INSTANT
        if rate is None:  # the machine's own compute rates, or those that are assumed
            rated = with_compute(machine)
            own = (with_assumptions(rated, work) if isinstance(work, Workload) else rated).compute
        at_full_speed_s = (repeats + 1) * _nominal_s(built, _nominal(topology, fabric, own, speeds))
        scale = default_scale(topology, at_full_speed_s) if scale is None else scale
        topology, runs_s = topology.scaled(scale), at_full_speed_s / scale
        if timed == INSTANT:
            timed = own.scaled(scale)
        else:
            runs_s = (repeats + 1) * _nominal_s(built, _nominal(topology, fabric, timed, speeds))
        _announce(progress, topology, scale, runs_s, real)
    engines = {engine_of(schedule, machine) for schedule in built}
    with start_ranks(fabric, topology, backend, machine) as ranks:
        if not ranks.is_reporter:
            progress = no_progress
        built = _agreed(ranks, built)
        calibration = calibrate_ranks(fabric, topology, ranks, progress)
        calibrated = replace(calibration.machine, rank_speeds=speeds)
        nominal = _nominal(calibrated.topology if fabric == "local" else topology, fabric, INSTANT, speeds)
        trials = Trials(
            ranks, work, options, timed, real, calibrated, nominal, repeats, transport, progress,
            why_not_comparable(fabric, topology.world_size, real, ranks.environment),
        )  # fmt: skip
        runs, reports = tuple(trials.run_all(built)), ranks.is_reporter
        environment = {**host_environment(), **ranks.environment}
    measured = measured_machine(calibration, f"on the {fabric} fabric")
    provenance = Provenance(
        inputs,
        (*layer_constants([run.prediction for run in runs]), *machine_constants(measured.parameters.values())),
        tuple(sorted(engines)),
        None if decomposition is None else decomposition.search_complete,
        environment | {"fabric": fabric, "scale": scale or 1.0},
    )
    return Comparison(fabric, scale or 1.0, calibration, runs, reports, provenance, environment)


def _agreed(ranks: Ranks, built: list[Schedule]) -> list[Schedule]:
    """The schedules of rank 0. Raises `RunError` on a rank whose user's builder has built others."""
    agreed = ranks.agree(built)
    for own, first in zip(built, agreed, strict=True):
        if not is_own(own.name) and own.digest != first.digest:
            raise RunError(f"schedule {own.name!r}: its builder gives another schedule here than on rank 0, expected "
                           "the same one in every process")  # fmt: skip
    return agreed


def _nominal(topology: Topology, fabric: FabricKind, compute: Compute, rank_speeds: tuple[Number, ...]) -> Machine:
    """The machine as it is described; without latency where the fabric has none of its own."""
    if fabric != "torchrun":
        topology = topology.map_links(lambda _, link: replace(link, latency_s=0.0))
    return Machine(topology, compute=compute, rank_speeds=rank_speeds)


def _nominal_s(schedules: Sequence[Schedule], machine: Machine) -> float:
    """The time of all schedules, each once, in seconds."""
    return sum(float(simulate(schedule, machine).time_s) for schedule in schedules)


def _announce(progress: ProgressCallback, topology: Topology, scale: float, runs_s: float, real: bool) -> None:
    """Report the emulated topology and the expected duration."""
    seconds = expected_fabric_s(topology, runs_s)
    slowest = min((link.bandwidth_bytes_per_s for link in topology.links), default=0.0)
    progress(
        f"emulating {topology.name} at scale {scale:.3g} (slowest link {format_bandwidth(slowest)}, "
        f"latencies are not emulated); this takes about {seconds:.0f} s"
        + (" and what real attention takes" if real else "")
    )


@dataclass(frozen=True)
class Trials:
    """Predicts and runs schedules; kernel calls are waits at the rate `timed`, or `real`."""

    ranks: Ranks
    work: Work
    options: AttentionOptions
    timed: Compute
    real: bool
    calibrated: Machine
    nominal: Machine
    repeats: int
    transport: str
    progress: ProgressCallback
    not_comparable: str | None = None

    def run_all(self, schedules: Sequence[Schedule]) -> Iterator[Run]:
        """The runs of all schedules; with both passes, each pair is followed by its sum."""
        if self.options.passes != "both":
            yield from map(self.run, schedules)
            return
        for forward, backward in zip(schedules[::2], schedules[1::2], strict=True):
            passes = self.run(forward), self.run(backward)
            yield from (*passes, runs_together(*passes))

    def run(self, schedule: Schedule) -> Run:
        """Predict a schedule, run it, and compare."""
        compute, host_s = self._compute_of(schedule)
        nominal = replace(self.nominal, compute=compute)
        calibrated = replace(self.calibrated, compute=compute)
        prediction = answer_schedule(calibrated, schedule, self.work, self.options, bound_machine=nominal)
        name = label(schedule, self.options)
        self.progress(f"running {name}: {self.repeats} times {float(prediction.time_s):.3g} s, and once to warm up")
        waits = None if self.real or compute == INSTANT else compute
        speeds = self.calibrated.rank_speeds
        job = RunSchedule(schedule, self.transport, self.repeats, 1, waits, speeds)
        results = self.ranks.perform(job, self._longest_silence_s(schedule, prediction))
        records = [of_rank for of_rank in results if isinstance(of_rank, list)]
        measured = [duration_s([of_rank[repeat] for of_rank in records]) for repeat in range(self.repeats)]
        typical = measured.index(statistics.median_low(measured))
        merged = merge_records([of_rank[typical] for of_rank in records], schedule, prediction.topology)
        timeline = replace(merged, schedule=name)
        busy = statistics.mean(record.busy_share for record in records[0])
        nominal_s = simulate(schedule, nominal).time_s
        kind: ComputeKind = "real" if self.real else "timed"
        run = Run(prediction, nominal_s, tuple(measured), timeline, busy, kind, host_s, self.not_comparable)
        predicted = "predicted" if self.not_comparable is None else "with a core for each rank"
        self.progress(f"{name}: {predicted} {float(prediction.time_s):.4g} s, measured {run.measured_s:.4g} s")
        return run

    def _compute_of(self, schedule: Schedule) -> tuple[Compute, float | None]:
        """How long a schedule's kernel calls take, and the longest that a host takes to make those of its rank.

        Real ones are measured per schedule, since they depend on the shapes of calls; the latter is None without GPUs.
        """
        if not self.real:
            return self.timed, None
        name = label(schedule, self.options)
        self.progress(f"calibrating the kernels of {name}")
        results = self.ranks.perform(MeasureCompute(schedule, _COMPUTE_REPEATS), _slow_compute_s(schedule))
        pairs = zip(_flops(schedule), results, strict=True)
        found = [(flops, times) for flops, times in pairs if flops and isinstance(times, KernelTimes)]
        rate = statistics.median(flops / times.time_s for flops, times in found)
        host_s = max((times.host_s for _, times in found if times.host_s is not None), default=None)
        beside = "" if host_s is None else f", which the host makes in {format_time(host_s)}"
        self.progress(f"kernels of {name}: {format_flops(rate)}{beside}")
        return ComputeRate(rate, "measured: its kernel calls, alone and without communication"), host_s

    def _longest_silence_s(self, schedule: Schedule, prediction: Answer) -> float:
        """The time without progress after which a rank is considered hung, in seconds.

        Far more than an event takes, and time to fill and check blocks, and to wait for the compute of other ranks.
        """
        longest = max((float(event.end_s - event.start_s) for event in prediction.timeline.events), default=0.0)
        computing = 2 * float(prediction.compute_s) if prediction.computes else 0.0
        return 5.0 + 5 * longest + _filling_s(schedule) + computing + (_slow_compute_s(schedule) if self.real else 0.0)


_COMPUTE_REPEATS = 3


def _flops(schedule: Schedule) -> list[int]:
    """The FLOPs of each rank."""
    found: list[int] = schedule.flops().sum(axis=0).tolist()
    return found


def _filling_s(schedule: Schedule) -> float:
    """The time to fill and check the initial blocks of all ranks, in seconds."""
    return int(schedule.initial.sum(axis=0) @ schedule.block_bytes) / 50e6


def _slow_compute_s(schedule: Schedule) -> float:
    """An upper bound of the time in which a rank draws a layer and computes or checks its part, in seconds."""
    return 30.0 + _filling_s(schedule) + 2 * max(_flops(schedule)) / SLOWEST_KERNEL_FLOPS_PER_S
