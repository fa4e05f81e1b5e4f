"""Whole steps of a model predicted: layers, forward and backward, with their messages, and what stands around them.

predict_step("h100-8", "llama-3-8b", "128Ki").tokens_per_s
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tasp_lab.core.arguments import arguments_of
from tasp_lab.core.choices import MatrixDtype, Pass
from tasp_lab.core.errors import ModelError, OverrideError, QuantityError, ScheduleError, of_type
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.units import count_of, format_bandwidth, format_flops, format_size
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.stack import DEFAULT_STACK, load_stack
from tasp_lab.prediction import inputs, provenance
from tasp_lab.prediction.compare import compare
from tasp_lab.prediction.evaluate import answer
from tasp_lab.prediction.inputs import ComputeLike, MachineLike, SequenceLike
from tasp_lab.prediction.provenance import UsedConstant
from tasp_lab.prediction.question import Question
from tasp_lab.prediction.rank import TIE
from tasp_lab.prediction.recommend import Recommendation
from tasp_lab.prediction.settings import MachineSettings
from tasp_lab.prediction.step_results import RankedStep, StepPrediction, plan_inputs
from tasp_lab.prediction.training_step import rates as numbers
from tasp_lab.prediction.training_step.layout import DEFAULT_LAYOUT, Layout, StepPlan
from tasp_lab.prediction.training_step.memory import attention_buffers, memory_use
from tasp_lab.prediction.training_step.rates import StepRates
from tasp_lab.prediction.training_step.simulation import MOST_LAYERS, StepSimulation, context_machine
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.registry import check_names, names_of, options_of
from tasp_lab.workload.models.catalogue import load_model
from tasp_lab.workload.models.model import Model

LEADERS = 3
"""Schedules whose whole steps are ranked: the recommended one, and those with the fastest layer."""


STEP_SETTINGS = arguments_of(MachineSettings)
"""What `predict_step` and `plan` take by keyword."""


def machine_settings(given: Mapping[str, Any]) -> MachineSettings:
    """The settings of a machine that are given as `STEP_SETTINGS`."""
    return MachineSettings(**{**given, **{name: tuple(given.get(name, ())) for name in ("overrides", "without")}})


def predict_step(
    machine: MachineLike,
    model: Model | str,
    sequence: SequenceLike,
    schedule: str | Callable[..., Any] | None = None,
    *,
    layout: Layout = DEFAULT_LAYOUT,
    batch: int = 1,
    passes: Pass = "both",
    matrix_dtype: MatrixDtype = "bf16",
    matrix_rate: ComputeLike | None = None,
    rates: StepRates | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
    fused: bool | None = None,
    layers: int = MOST_LAYERS,
    progress: ProgressCallback = no_progress,
    **settings: Any,
) -> StepPrediction:
    """Predict a whole step of a model: all layers, forward and backward, with their messages.

    Parameters
    ----------
    machine : a machine, or its name.
    model : a model, or the name of one, see `tasp_lab.workload.models.catalogue.load_model`.
    sequence : positions per sequence, a number or text such as ``"128Ki"``.
    schedule : of the attention of a layer by name or registered builder, see `tasp_lab.schedules.registry`; of a hybrid
        one of each kind. If None, the steps of the `LEADERS` that are fastest for one layer, alone on the ranks of a
        context group, are ranked, first those that fit; of those within `TIE` of the fastest, the one recommended for a
        layer is taken.
    layout : how ranks share the step: tensor, context, pipeline and data parallelism, ZeRO, micro-batches,
        checkpointing. By default all ranks share each sequence, with FSDP and full checkpointing.
    batch : sequences that each context group has in a micro-batch.
    passes : ``both`` for training, ``forward`` without.
    matrix_dtype : of multiplications with parameters.
    matrix_rate : of multiplications with parameters in FLOP/s; that of the accelerator if None.
    rates : of all that is no attention, such as those measured on your GPU, instead of `matrix_rate` and the rates of
        the accelerator.
    options : of the schedule, besides the passes.
    fused : whether element-wise work is fused, by a compiler or by kernels of a library, or eager. By default as with
        the stack, and without one fused.
    layers : the most layers of a run of equal ones that are simulated; the others take as long as the last of them.
    progress : called with what is simulated.
    settings : of the machine, see `tasp_lab.prediction.settings.MachineSettings`, without those of links. Overrides may
        also be of the memory of a GPU, ``"gpu.memory=40GiB"``; the layer is the model's.

    Raises `TaspLabError` for unknown names, for a layout that does not divide ranks or model, and for what a schedule
    refuses.

    >>> step = predict_step("full-mesh:2", "llama-3-8b", 4096, "ulysses")
    >>> step.tokens, step.memory.optimizer == 4 * 8_030_261_248
    (4096, True)
    """
    if not isinstance(model, Model | str):
        raise ModelError(of_type("model", model, "a model or the name of one"))
    if not isinstance(layout, Layout):
        raise ScheduleError(of_type("layout", layout, "a Layout, such as Layout(tp=2)"))
    (schedule,) = [""] if schedule is None else inputs.as_names(schedule)
    inputs.check_call(predict_step, locals(), STEP_SETTINGS)
    sequence = count_of(sequence, "sequence")
    model = load_model(model) if isinstance(model, str) else model
    if schedule:
        check_names([schedule], model.layer(sequence, batch))
    of_question = machine_settings(settings)
    overrides, compute = of_question.overrides, of_question.compute
    for each in overrides:
        if each.strip().startswith("layer."):
            raise OverrideError(f"override {each}: the layer of a step is that of its model, expected a model file")
    machine = inputs.chosen_machine(machine, replace(of_question, overrides=numbers.of_machine(overrides)))
    layout = layout.on(machine.topology.world_size)
    software = load_stack(machine.stack or DEFAULT_STACK).step
    software = software if fused is None else msgspec.structs.replace(software, fused=fused)
    if layout.overlap is None:
        layout = replace(layout, overlap=software.overlaps)
    plan = StepPlan(model, sequence, schedule, layout, batch, replace(options, passes=passes), matrix_dtype, software)

    def step_of(name: str) -> StepPrediction:
        own = replace(plan, schedule=name, options=_best_options(machine, plan, name))
        on = inputs.run_by_stack(machine, own.windowed_layer, name, passes, layout.cp)
        on = inputs.with_assumptions(on, own.layer) if compute is None else on
        beside = numbers.with_memory(rates or numbers.step_rates(on, matrix_dtype, _rate(matrix_rate)), overrides)
        kernels = numbers.compute_of_step(on, beside)
        step = StepSimulation(replace(on, compute=kernels), own, kernels.rates, layers, progress)
        buffers, times = attention_buffers(step.phases.passes.values()), step.times()
        return StepPrediction(
            own, on, beside, times, step.model_flops(), memory_use(own, buffers, step.phases.most_tokens), buffers,
            tuple((len(run.unit) * few, len(run.unit) * run.times) for run, few in step.fewest.items()),
            _provenance(on, own, beside, overrides),
        )  # fmt: skip

    if schedule:
        return step_of(schedule)
    recommendation, names = _leaders(machine, plan, progress)
    found = [step_of(name) for name in names]
    steps = sorted(found, key=lambda step: (step.fits is False, step.time_s))
    ranked = tuple(RankedStep(step.plan.schedule, step.time_s, step.memory.total, step.fits) for step in steps)
    fastest = steps[0]
    best = next(each for each in found if each.fits == fastest.fits and each.time_s <= (1 + TIE) * fastest.time_s)
    return replace(best, recommendation=recommendation, ranked=ranked)


def _leaders(machine: Machine, plan: StepPlan, progress: ProgressCallback) -> tuple[Recommendation, list[str]]:
    """The recommendation for the attention of a layer on the ranks of a context group, and the `LEADERS` there.

    Raises `ScheduleError` if no schedule applies, and `TopologyError` for groups that are not equal.
    """
    ranking = compare(context_machine(machine, plan.layout), plan.layer, passes=plan.options.passes, progress=progress)
    best = ranking.recommendation
    if best is None:
        raise ScheduleError(f"no schedule applies: {ranking.best.reason}")
    names = list(dict.fromkeys([best.schedule, *(each.schedule for each in ranking.candidates if each.applies)]))
    if machine.stack and plan.windowed_layer != plan.layer:
        stack, asked = load_stack(machine.stack), (plan.windowed_layer, plan.layout.cp or 1, plan.options.passes)
        refusals = {name: stack.refusal(name, *asked) for name in names}
        names = [name for name in names if not refusals[name]]
        if not names:
            raise ScheduleError(next(iter(refusals.values())))
    return best, names[:LEADERS]


def _best_options(machine: Machine, plan: StepPlan, schedule: str) -> AttentionOptions:
    """The options with which a layer, alone on a context group, is fastest; those of the plan where it does not apply.

    Then the step is refused for the same reason.
    """
    layer = plan.layer
    if layer.kind == "hybrid":  # the layers of linear attention leave nothing open
        schedule, layer = names_of(schedule).of("S"), layer.of("S")
    if plan.options.opened(options_of(schedule)) == [plan.options] and not machine.stack:
        return plan.options
    chosen = answer(Question(context_machine(machine, plan.layout), schedule, layer, plan.options)).options
    return replace(plan.options, **{name: getattr(chosen, name) for name in options_of(schedule)})


def _rate(given: ComputeLike | None) -> float | None:
    """A given rate of matrices. Raises `QuantityError` for real kernels."""
    rate = inputs.parse_compute(given)
    if rate == "real":
        raise QuantityError("matrix rate 'real': a prediction has no kernels, expected a rate like timed:600TFLOP/s")
    return rate


def _provenance(machine: Machine, plan: StepPlan, rates: StepRates, overrides: Sequence[str]) -> provenance.Provenance:
    asked = {
        "machine": provenance.machine_inputs(machine, compute=True),
        **provenance.overrides_inputs(overrides),
        "step": plan_inputs(plan),
    }
    of_passes = {str(passing): machine.rate_of(plan.layer, passing) for passing in plan.trained}
    constants = (
        *provenance.machine_constants(machine.parameters.values()),
        *provenance.compute_constants(plan.layer.dtype, of_passes),
        *step_constants(rates, plan.matrix_dtype, plan.layout),
    )
    return provenance.Provenance(asked, constants, ("auto",))


def step_constants(rates: StepRates, matrix_dtype: MatrixDtype, layout: Layout) -> list[UsedConstant]:
    """The constants of what is no attention: rates of matrices and memory, and those of hosts that a layout uses."""
    matrices, memory, capacity = rates.matrices, rates.memory_bytes_per_s, rates.capacity_bytes
    found = [
        (f"matrix_rate_{matrix_dtype}", format_flops(float(matrices.flops_per_s or 0)), matrices.source),
        ("spread_of_gpus", f"{numbers.SPREAD:.2%}", numbers.SPREAD_SOURCE),
    ]
    if memory is not None:
        found.append(("memory_bandwidth", format_bandwidth(memory), rates.memory_source))
    if capacity is not None:
        found.append(("memory", format_size(capacity), rates.capacity_source))
        found.append(("memory_reserved", format_size(numbers.RESERVED_BYTES), numbers.RESERVED_SOURCE))
    if layout.offload or layout.checkpointing == "offload":
        found.append(("host_link", format_bandwidth(numbers.HOST_LINK_BYTES_PER_S), numbers.HOST_LINK_SOURCE))
    if layout.offload:
        found.append(("host_memory", format_bandwidth(numbers.HOST_BYTES_PER_S), numbers.HOST_SOURCE))
    return [UsedConstant(*each) for each in found]
