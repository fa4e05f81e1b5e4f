"""Whole steps predicted: the phases of a step simulated, and what stands around them added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from tasp_lab.core.choices import Checkpointing, MatrixDtype, Pass
from tasp_lab.core.errors import ModelError, OverrideError, QuantityError, ScheduleError, of_type
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.units import format_bandwidth, format_flops, format_size
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.answer import PassAnswer
from tasp_lab.prediction.compare import compare
from tasp_lab.prediction.inputs import (
    ComputeLike,
    MachineLike,
    as_names,
    check_arguments,
    chosen_machine,
    parse_compute,
    with_assumptions,
    with_compute,
    with_contention,
)
from tasp_lab.prediction.provenance import (
    Provenance,
    UsedConstant,
    compute_constants,
    machine_constants,
    machine_inputs,
    overrides_inputs,
)
from tasp_lab.prediction.recommend import Recommendation
from tasp_lab.prediction.step_results import StepPrediction, StepTimes, plan_inputs
from tasp_lab.prediction.training_step.attention_passes import groups_of
from tasp_lab.prediction.training_step.memory import memory_use
from tasp_lab.prediction.training_step.messages import all_reduce, gather, reduce_scatter
from tasp_lab.prediction.training_step.phases import GRADIENT_BYTES, PARAMETER_BYTES, Phases, Run, runs_of
from tasp_lab.prediction.training_step.plan import StepPlan
from tasp_lab.prediction.training_step.rates import RESERVED_BYTES, RESERVED_SOURCE, StepCompute, StepRates, step_rates
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.registry import check_names
from tasp_lab.topology.derived import equal_parts
from tasp_lab.workload.models.catalogue import load_model
from tasp_lab.workload.models.model import Model
from tasp_lab.workload.models.parameters import active_parameters, embedding_parameters, parameter_count

UPDATE_BYTES = 30
"""What an update of Adam reads and writes per parameter: gradient, parameter and two moments, all in float32; the last
three and a 16-bit parameter."""

MANY_TRANSFERS = 120_000
"""Layers of a run are simulated up to about this many transfers."""

MOST_LAYERS = 8
"""Layers of a run that are simulated, or two units of more layers: the ends of a stack are unlike its middle."""


def predict_step(
    machine: MachineLike,
    model: Model | str,
    sequence: int,
    schedule: str | Callable[..., Any] | None = None,
    *,
    batch: int = 1,
    group: int | None = None,
    passes: Pass = "both",
    fsdp: bool = True,
    checkpointing: Checkpointing = "full",
    accumulate: int = 1,
    matrix_dtype: MatrixDtype = "bf16",
    matrix_rate: ComputeLike | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
    library: str = "auto",
    compute: ComputeLike | None = None,
    kernel: str | None = None,
    contention: bool | None = None,
    overrides: Sequence[str] = (),
    progress: ProgressCallback = no_progress,
) -> StepPrediction:
    """Predict a whole step of a model: all layers, forward and backward, with their messages.

    Parameters
    ----------
    machine : a machine, or its name.
    model : a model, or the name of one, see `tasp_lab.workload.models.catalogue.load_model`.
    sequence, batch : positions per sequence, and sequences that each group has at once.
    schedule : of the attention of a layer by name or registered builder, see `tasp_lab.schedules.registry`; of a hybrid
        one of each kind. If None, that which `compare` recommends for the layer, alone on the ranks of a group.
    group : the ranks that share a sequence; all if None. Groups have different sequences: data parallelism.
    passes : ``both`` for training, ``forward`` without.
    fsdp, checkpointing, accumulate, matrix_dtype : see `tasp_lab.prediction.training_step.plan.StepPlan`.
    matrix_rate : of multiplications with parameters in FLOP/s; that of the accelerator if None.
    options : of the schedule, besides the passes.
    library, compute, kernel, contention : see `tasp_lab.prediction.predict.predict`.
    overrides : of the machine, such as ``"nic.bandwidth=x2"``, see `tasp_lab.machines.overrides`; the layer is the
        model's.
    progress : called with what is simulated.

    Raises `TaspLabError` for unknown names, for groups that do not divide the ranks, and for what a schedule refuses.

    >>> step = predict_step("full-mesh:2", "llama-3-8b", 4096, "ulysses")
    >>> step.tokens, step.memory.states == 8 * 8_030_261_248
    (4096, True)
    """
    if not isinstance(model, Model | str):
        raise ModelError(of_type("model", model, "a model or the name of one"))
    (schedule,) = [""] if schedule is None else as_names(schedule)
    check_arguments(locals())
    model = load_model(model) if isinstance(model, str) else model
    plan = StepPlan(model, sequence, schedule, batch, group, replace(options, passes=passes), fsdp, checkpointing,
                    matrix_dtype, accumulate)  # fmt: skip
    if schedule:
        check_names([schedule], plan.layer)
    _check_overrides(overrides)
    machine = chosen_machine(machine, library, compute, kernel, overrides, (), ())
    machine = with_contention(with_compute(machine), contention)
    recommendation = None if schedule else _recommended(machine, plan, progress)
    if recommendation is not None:
        plan = replace(plan, schedule=recommendation.schedule)
    machine = with_assumptions(machine, plan.layer) if compute is None else machine
    rates = step_rates(machine, matrix_dtype, _rate(matrix_rate))
    stepping = replace(machine, compute=StepCompute(machine.compute, rates))
    phases = Phases(plan, machine.topology)
    found = _Simulated(stepping, phases, progress)
    runs = runs_of(plan)
    return StepPrediction(
        plan,
        machine,
        rates,
        _times(found, runs, rates),
        _model_flops(phases),
        memory_use(plan, phases.passes, machine.topology.world_size, _most_tokens(phases)),
        tuple((len(run.unit) * found.fewest[run], len(run.unit) * run.times) for run in runs),
        _provenance(machine, plan, rates, overrides),
        recommendation,
    )


def _recommended(machine: Machine, plan: StepPlan, progress: ProgressCallback) -> Recommendation:
    """The recommendation for the attention of a layer on the ranks of a group. Raises `ScheduleError` if none applies.

    Groups are equal, so the first one stands for all. Raises `TopologyError` for groups that are not.
    """
    groups = groups_of(plan, machine.topology)
    if len(groups) > 1:
        machine = replace(machine, topology=equal_parts(machine.topology, groups), system=None)
    ranking = compare(machine, plan.layer, passes=plan.options.passes, progress=progress)
    if ranking.recommendation is None:
        raise ScheduleError(f"no schedule applies: {ranking.best.reason}")
    return ranking.recommendation


class _PhaseTimes(NamedTuple):
    """The time of a phase, and that of the kernel calls of its busiest rank."""

    time_s: float
    busy_s: float

    def plus(self, other: _PhaseTimes) -> _PhaseTimes:
        return _PhaseTimes(self.time_s + other.time_s, self.busy_s + other.busy_s)


_NOTHING = _PhaseTimes(0.0, 0.0)


class _Simulated:
    """Simulates phases; `fewest` is how many units of each run were simulated, in the phase with fewer of them."""

    def __init__(self, machine: Machine, phases: Phases, progress: ProgressCallback) -> None:
        self._machine, self._progress = machine, progress
        self.phases = phases
        self.fewest: dict[Run, int] = {}

    def forward(self, runs: list[Run]) -> _PhaseTimes:
        """The forward phase of all runs, one after another; nothing overlaps between runs."""
        found = _NOTHING
        for number, run in enumerate(runs):
            ends = number == len(runs) - 1
            found = found.plus(self._of_run(run, partial(self.phases.forward, run.unit, ends=ends), "forward"))
        return found

    def backward(self, runs: list[Run], *, reduces: bool) -> _PhaseTimes:
        """The backward phase of all runs."""
        found = _NOTHING
        for number, run in enumerate(runs):
            build = partial(self.phases.backward, run.unit, begins=number == len(runs) - 1, reduces=reduces)
            found = found.plus(self._of_run(run, build, "backward"))
        return found

    def alone_s(self, schedule: Schedule) -> float:
        """The time of exposed messages, which no kernel call hides."""
        return float(PassAnswer(self._machine, schedule, self.phases.plan.layer, self.phases.plan.options).time_s)

    def _of_run(self, run: Run, build: Callable[[int], Schedule], what: str) -> _PhaseTimes:
        """The time of a run of equal units: that of some, and the others as long as the second half of these."""
        one = build(1)
        most = max(2, min(MOST_LAYERS // len(run.unit), MANY_TRANSFERS // max(one.transfers, 1)))
        few = min(run.times, most)
        self._progress(f"simulating {few} of {run.times} x {len(run.unit)} layers {what}")
        last = self._simulated(one if few == 1 else build(few))
        self.fewest[run] = min(few, self.fewest.get(run, few))
        if few == run.times:
            return last
        half = few // 2
        first, more = self._simulated(one if half == 1 else build(half)), run.times - few
        return _PhaseTimes(*(b + more * (b - a) / (few - half) for a, b in zip(first, last, strict=True)))

    def _simulated(self, schedule: Schedule) -> _PhaseTimes:
        found = PassAnswer(self._machine, schedule, self.phases.plan.layer, self.phases.plan.options)
        return _PhaseTimes(float(found.time_s), float(found.compute_s))


def _times(found: _Simulated, runs: list[Run], rates: StepRates) -> StepTimes:
    """The parts of a step. With FSDP each micro-batch gathers and reduces, else only the last one reduces."""
    plan = found.phases.plan
    forward, backward, count = found.forward(runs), _NOTHING, plan.accumulate
    whole = forward.busy_s * count
    backward_s = 0.0
    if plan.trains:
        backward = found.backward(runs, reduces=True)
        backward_s, whole = backward.time_s * count, whole + backward.busy_s * count
        if not plan.fsdp and count > 1:
            backward_s = backward.time_s + (count - 1) * found.backward(runs, reduces=False).time_s
    embedding_s = _embedding_s(found) * (count if plan.fsdp else 1)
    optimizer_s = _optimizer_s(found.phases, rates) if plan.trains else 0.0
    return StepTimes(forward.time_s * count, backward_s, embedding_s, optimizer_s, whole)


def _embedding_s(found: _Simulated) -> float:
    """Embedding and output gathered, and their gradients reduced."""
    plan, topology = found.phases.plan, found.phases.topology
    size = embedding_parameters(plan.model).stored
    if topology.world_size == 1 or not size:
        return 0.0
    if not plan.fsdp:
        return found.alone_s(all_reduce(topology, GRADIENT_BYTES * size)) if plan.trains else 0.0
    gathered_s = found.alone_s(gather(topology, PARAMETER_BYTES * size))
    return gathered_s + (found.alone_s(reduce_scatter(topology, GRADIENT_BYTES * size)) if plan.trains else 0.0)


def _optimizer_s(phases: Phases, rates: StepRates) -> float:
    """The update of the states of a rank, at the bandwidth of its memory; no time where that is unknown."""
    if rates.memory_bytes_per_s is None:
        return 0.0
    shards = phases.topology.world_size if phases.plan.fsdp else 1
    return UPDATE_BYTES * parameter_count(phases.plan.model) / shards / float(rates.memory_bytes_per_s)


def _model_flops(phases: Phases) -> int:
    """FLOPs of a step by the convention of MFU, over all ranks."""
    plan, passes = phases.plan, phases.passes
    tokens = plan.sequence * plan.batch * len(passes.groups)
    attention = sum(passes.layers[letter].forward.flops for letter in plan.model.pattern)
    forward = 2 * tokens * active_parameters(plan.model) + attention
    return forward * (3 if plan.trains else 1) * plan.accumulate


def _most_tokens(phases: Phases) -> int:
    return max(int(phases.tokens(letter).max()) for letter in set(phases.plan.model.pattern))


def _rate(given: ComputeLike | None) -> float | None:
    """A given rate of matrices. Raises `QuantityError` for real kernels."""
    rate = parse_compute(given)
    if rate == "real":
        raise QuantityError("matrix rate 'real': a prediction has no kernels, expected a rate like timed:600TFLOP/s")
    return rate


def _check_overrides(overrides: Sequence[str]) -> None:
    """Raise `OverrideError` for overrides of the layer."""
    for each in overrides:
        if each.strip().startswith("layer."):
            raise OverrideError(f"override {each}: the layer of a step is that of its model, expected a model file")


def _provenance(machine: Machine, plan: StepPlan, rates: StepRates, overrides: Sequence[str]) -> Provenance:
    inputs = {
        "machine": machine_inputs(machine, compute=True),
        **overrides_inputs(overrides),
        "step": plan_inputs(plan),
    }
    passes = ("forward", "backward") if plan.trains else ("forward",)
    of_passes = {passing: machine.rate_of(plan.layer, passing) for passing in passes}  # type: ignore[arg-type]
    constants = machine_constants(machine.parameters.values()) + compute_constants(plan.layer.dtype, of_passes)
    return Provenance(inputs, constants + tuple(_used(rates, plan.matrix_dtype)), ("auto",))


def _used(rates: StepRates, dtype: str) -> list[UsedConstant]:
    matrices = rates.matrices
    value = format_flops(float(matrices.flops_per_s or 0))
    found = [UsedConstant(f"matrix_rate_{dtype}", value, matrices.source, matrices.assumed)]
    if rates.memory_bytes_per_s is not None:
        bandwidth = format_bandwidth(rates.memory_bytes_per_s)
        assumed = rates.memory_source.startswith("assum")
        found.append(UsedConstant("memory_bandwidth", bandwidth, rates.memory_source, assumed))
    if rates.capacity_bytes is not None:
        assumed = rates.capacity_source.startswith("assum")
        found.append(UsedConstant("memory", format_size(rates.capacity_bytes), rates.capacity_source, assumed))
        found.append(UsedConstant("memory_reserved", format_size(RESERVED_BYTES), RESERVED_SOURCE, assumed=True))
    return found
