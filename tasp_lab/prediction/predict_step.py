"""Whole steps predicted: the phases of a step simulated, and what stands around them added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from tasp_lab.core.arguments import arguments_of
from tasp_lab.core.arrays import FloatArray, IntArray
from tasp_lab.core.choices import MatrixDtype, Pass
from tasp_lab.core.errors import ModelError, OverrideError, QuantityError, ScheduleError, of_type
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.units import count_of, format_bandwidth, format_flops, format_size
from tasp_lab.machines.libraries.groups import GroupLibrary
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.stack import DEFAULT_STACK, load_stack
from tasp_lab.prediction.compare import compare
from tasp_lab.prediction.evaluate import answer
from tasp_lab.prediction.inputs import (
    ComputeLike,
    MachineLike,
    SequenceLike,
    as_names,
    check_call,
    chosen_machine,
    parse_compute,
    run_by_stack,
    with_assumptions,
)
from tasp_lab.prediction.passes import PassAnswer
from tasp_lab.prediction.provenance import (
    Provenance,
    UsedConstant,
    compute_constants,
    machine_constants,
    machine_inputs,
    overrides_inputs,
)
from tasp_lab.prediction.question import Question
from tasp_lab.prediction.rank import TIE
from tasp_lab.prediction.recommend import Recommendation
from tasp_lab.prediction.settings import MachineSettings
from tasp_lab.prediction.step_results import RankedStep, StepPrediction, StepTimes, plan_inputs
from tasp_lab.prediction.training_step.costs import (
    BACKWARD,
    ELEMENT_BYTES,
    LOSS_LAUNCHES,
    moved_parameters,
    output_matrix,
    stored_parameters,
)
from tasp_lab.prediction.training_step.layout import (
    DEFAULT_LAYOUT,
    Layout,
    StepPlan,
    context_groups,
    expert_groups,
    stage_of,
    state_groups,
    tensor_groups,
)
from tasp_lab.prediction.training_step.memory import attention_buffers, memory_use, stage_parameters
from tasp_lab.prediction.training_step.messages import all_reduce, gather, reduce_scatter, send
from tasp_lab.prediction.training_step.phases import GRADIENT_BYTES, PARAMETER_BYTES, Phases, Run, in_groups, runs_of
from tasp_lab.prediction.training_step.pipeline import makespan_s, one_forward_one_backward
from tasp_lab.prediction.training_step.rates import (
    HOST_BYTES_PER_S,
    HOST_LINK_BYTES_PER_S,
    HOST_LINK_SOURCE,
    HOST_SOURCE,
    RESERVED_BYTES,
    RESERVED_SOURCE,
    SPREAD,
    SPREAD_SOURCE,
    StepRates,
    compute_of_step,
    of_machine,
    step_rates,
    with_memory,
)
from tasp_lab.schedule.calls import Passing
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.collectives.kinds import NcclTestsName
from tasp_lab.schedules.collectives.library_rings import library_schedule
from tasp_lab.schedules.registry import check_names, names_of, options_of
from tasp_lab.topology.derived import equal_parts
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.models.catalogue import load_model
from tasp_lab.workload.models.model import Model
from tasp_lab.workload.models.parameters import active_parameters, embedding_parameters

UPDATE_BYTES = 30
"""What an update of Adam reads and writes per parameter: gradient, parameter and two moments, all in float32; the last
three and a 16-bit parameter."""

NORM_BYTES = 12
"""What the norm of gradients and their scaling by it read and write per parameter, in float32."""

MANY_TRANSFERS = 120_000
"""Layers of a run are simulated up to about this many transfers."""

MOST_LAYERS = 8
"""Layers of a run that are simulated, or two units of more layers: the ends of a stack are unlike its middle."""


TENSOR_COLLECTIVES: tuple[NcclTestsName, NcclTestsName] = ("all_gather", "reduce_scatter")
"""The messages of tensor groups."""

LEADERS = 3
"""Schedules whose whole steps are ranked: the recommended one, and those with the fastest layer."""


STEP_SETTINGS = {name: each for name, each in arguments_of(MachineSettings).items() if "links" not in name}
"""What `predict_step` and `plan` take by keyword."""


def machine_settings(given: Mapping[str, Any]) -> MachineSettings:
    """The settings of a machine that are given as `STEP_SETTINGS`."""
    return MachineSettings(**{**given, "overrides": tuple(given.get("overrides", ()))})


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
    (schedule,) = [""] if schedule is None else as_names(schedule)
    check_call(predict_step, locals(), STEP_SETTINGS)
    sequence = count_of(sequence, "sequence")
    model = load_model(model) if isinstance(model, str) else model
    if schedule:
        check_names([schedule], model.layer(sequence, batch))
    of_question = machine_settings(settings)
    overrides, compute = of_question.overrides, of_question.compute
    for each in overrides:
        if each.strip().startswith("layer."):
            raise OverrideError(f"override {each}: the layer of a step is that of its model, expected a model file")
    machine = chosen_machine(machine, replace(of_question, overrides=of_machine(overrides)))
    layout = layout.on(machine.topology.world_size)
    software = load_stack(machine.stack or DEFAULT_STACK).step
    software = software if fused is None else msgspec.structs.replace(software, fused=fused)
    if layout.overlap is None:
        layout = replace(layout, overlap=software.overlaps)
    plan = StepPlan(model, sequence, schedule, layout, batch, replace(options, passes=passes), matrix_dtype, software)

    def step_of(name: str) -> StepPrediction:
        own = replace(plan, schedule=name, options=_best_options(machine, plan, name))
        on = run_by_stack(machine, own.windowed_layer, name, passes, layout.cp)
        on = with_assumptions(on, own.layer) if compute is None else on
        beside = with_memory(rates or step_rates(on, matrix_dtype, _rate(matrix_rate)), overrides)
        kernels = compute_of_step(on, beside)
        step = _Step(replace(on, compute=kernels), own, kernels.rates, layers, progress)
        buffers = attention_buffers(step.phases.passes.values())
        return StepPrediction(
            own,
            on,
            beside,
            step.times(),
            step.model_flops(),
            memory_use(own, buffers, step.phases.most_tokens),
            buffers,
            tuple((len(run.unit) * few, len(run.unit) * run.times) for run, few in step.fewest.items()),
            _provenance(on, own, beside, overrides),
        )

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


def context_machine(machine: Machine, layout: Layout) -> Machine:
    """The machine of a context group, see `group_machine`."""
    return group_machine(machine, context_groups(layout.ranks(machine.topology.world_size)))


def group_machine(machine: Machine, groups: IntArray) -> Machine:
    """The machine of a group of ranks, an int array (groups, ranks), with a communicator of its ranks.

    Groups are equal, so the first stands for all. Raises `TopologyError` for groups that are not.
    """
    if len(groups) == 1:
        return machine
    topology, library = equal_parts(machine.topology, groups), machine.comm_library
    if machine.system is not None:
        kinds = [(np.arange(topology.world_size)[None], False)]
        library = machine.system.group_library(machine.parameters.numbers, np.array(topology.node_of_rank), kinds)
        if isinstance(library, GroupLibrary) and library.world is None:
            library = library.kinds[0].library
    return replace(machine, topology=topology, comm_library=library, system=None)


def with_groups(machine: Machine, topology: Topology, places: IntArray) -> Machine:
    """The machine with the topology of a stage, or of all stages, and a communicator for each group of its ranks.

    Parameters and gradients are collective calls; attention schedules and pipelines send and receive. A program with
    context groups alone has the communicator of all ranks.
    """
    context, system = context_groups(places), machine.system
    if topology is not machine.topology:  # a stage stands for all, which are equal
        speeds = machine.rank_speeds[: topology.world_size]
        machine = replace(machine, topology=topology, rank_speeds=speeds, system=None)
    kinds = [(context, False), (state_groups(places), True), (places.reshape(len(places), -1).T, False)]
    kinds = [each for each in kinds if each[0].shape[1] > 1]
    if system is None or len(context) == 1 or not kinds:
        return machine
    library = system.group_library(machine.parameters.numbers, np.array(topology.node_of_rank), kinds)
    return replace(machine, comm_library=library, system=None)


_NOTHING: FloatArray = np.zeros(2)
"""The time of a phase, and that of the kernel calls of its busiest rank."""


class _Step:
    """Simulates the phases of a step, and adds up its parts.

    `fewest` is how many units of each run of layers were simulated, in the phase with fewer of them.
    """

    def __init__(
        self, machine: Machine, plan: StepPlan, rates: StepRates, layers: int, progress: ProgressCallback
    ) -> None:
        self._machine, self.plan, self._rates, self._progress = machine, plan, rates, progress
        self._layers = layers
        topology, places = stage_of(machine.topology, plan.layout)
        self._stage = with_groups(machine, topology, places)
        self.phases = Phases(plan, topology, places)
        self.fewest: dict[Run, int] = {}
        self._built: dict[tuple[object, int], Schedule] = {}
        self._simulated: dict[tuple[object, int], FloatArray] = {}

    def times(self) -> StepTimes:
        """The parts of a step."""
        plan, layout = self.plan, self.plan.layout
        count = layout.microbatches
        stages = [range(stage, layout.chunks, layout.pp) for stage in range(layout.pp)]
        forward = [self._microbatches(self._forward, chunk, layout.zero == 3) for chunk in range(layout.chunks)]
        backward = [
            self._microbatches(self._backward, chunk, layout.zero >= 2, last=True)
            if plan.trains
            else [_NOTHING] * count
            for chunk in range(layout.chunks)
        ]
        sums = [
            [sum((time for chunk in stage for time in works[chunk]), _NOTHING) for works in (forward, backward)]
            for stage in stages
        ]
        first, second = max(sums, key=lambda both: float(both[0][0] + both[1][0]))
        (forward_s, busy_forward_s), (backward_s, busy_backward_s) = first.tolist(), second.tolist()
        pipeline_s = 0.0
        if layout.pp > 1:
            orders = one_forward_one_backward(layout.pp, layout.interleave, count)
            if not plan.trains:
                orders = [[work for work in order if not work.is_backward] for order in orders]
            whole_s = makespan_s(
                orders,
                lambda work: (backward if work.is_backward else forward)[work.chunk][work.microbatch].tolist()[0],
                self._send_s(),
            )
            pipeline_s = float(whole_s) - forward_s - backward_s
        embedding_s = self._embedding_s() * (count if layout.zero == 3 else 1)
        busy_s = busy_forward_s + busy_backward_s
        return StepTimes(forward_s, backward_s, pipeline_s, embedding_s, self._optimizer_s(), busy_s)

    def _microbatches(
        self, phase: Callable[[int, bool], FloatArray], chunk: int, always: bool, *, last: bool = False
    ) -> list[FloatArray]:
        """A phase of each micro-batch: messages of states are in all of them, or only in the first or the last one."""
        count = self.plan.layout.microbatches
        one = phase(chunk, True)
        if always or count == 1:
            return [one] * count
        others = [phase(chunk, False)] * (count - 1)
        return [*others, one] if last else [one, *others]

    def _forward(self, chunk: int, gathers: bool) -> FloatArray:
        """The forward phase of a part of the model, its runs one after another; nothing overlaps between runs."""
        runs = runs_of(self.plan.parts[chunk])
        return sum((self._of_run(run, "forward", gathers=gathers) for run in runs), _NOTHING) + self._output(chunk, 1)

    def _backward(self, chunk: int, reduces: bool) -> FloatArray:
        """The backward phase of a part of the model."""
        runs, gathers = runs_of(self.plan.parts[chunk]), self.plan.layout.zero == 3
        phases = (self._of_run(run, "backward", reduces=reduces, gathers=gathers) for run in runs)
        return sum(phases, _NOTHING) + self._output(chunk, BACKWARD)

    def _output(self, chunk: int, times: int) -> FloatArray:
        """The output matrix and the loss of a micro-batch, forward or `BACKWARD`, behind the last part of the model."""
        plan, phases = self.plan, self.phases
        if chunk < plan.layout.chunks - 1 or not plan.model.vocabulary:
            return _NOTHING
        tokens, tp = phases.most_tokens, plan.layout.tp
        cost = output_matrix(plan.model)
        cost = cost.backward("inputs", phases.sums) if times == BACKWARD else cost
        products = [each.product(tokens, tp) for each in cost.matrices]
        found = float(self._rates.products_s(products, round(tokens / tp * cost.flops), output=True))
        if plan.trains:
            moved_bytes = tokens / tp * plan.model.vocabulary * plan.software.loss_bytes[times == BACKWARD]
            found += float(self._rates.moved_s(moved_bytes, LOSS_LAUNCHES))
        found = float(max(self._stage.call_s(found, rank) for rank in range(self._stage.topology.world_size)))
        return np.array([found, found])

    @cached_property
    def _tensor_s(self) -> tuple[float, float]:
        """The gather and the sum of hidden states in a tensor group, as collectives of the library."""
        layout, topology = self.plan.layout, self._machine.topology
        if layout.tp == 1:
            return 0.0, 0.0
        machine = group_machine(self._machine, tensor_groups(layout.ranks(topology.world_size)))
        size = ELEMENT_BYTES * self.phases.most_tokens * self.plan.model.hidden_size
        gather_s, sum_s = (
            self._alone_s(machine, library_schedule(name, machine.topology, max(size, layout.tp)))
            for name in TENSOR_COLLECTIVES
        )
        return gather_s, sum_s

    def _tensors(self, layers: int, phase: Passing) -> FloatArray:
        """The messages of tensor groups of so many layers, which nothing hides.

        Around attention and around the MLP hidden states are gathered and summed; backward so are gradients, and inputs
        are gathered again (arXiv:2205.05198, section 4.2.2). The last is done beside matrix products, as are sums of
        gradients, which hides nothing: kernels that stay on all multiprocessors wait for those of the library, and take
        twice as long (pytorch/pytorch issue 143988, NVIDIA/cutlass issue 2471).
        """
        gather_s, sum_s = self._tensor_s
        forward_s = 2 * (gather_s + sum_s)
        found_s = forward_s if phase == "forward" else forward_s * (1 + self.plan.layout.repeated) + 2 * gather_s
        return np.array([layers * found_s, 0.0])

    @cached_property
    def _exchange_s(self) -> float:
        """An all-to-all of the tokens of a rank to their experts, or back; 0 if each rank has a part of all experts."""
        plan, layout, experts = self.plan, self.plan.layout, self.plan.model.experts
        if layout.ep == 1 or experts is None:
            return 0.0
        ranks = layout.ranks(self._machine.topology.world_size)
        machine = group_machine(self._machine, expert_groups(ranks, layout.ep))
        size = ELEMENT_BYTES * self.phases.most_tokens * experts.active * plan.model.hidden_size // layout.tp
        return self._alone_s(machine, library_schedule("alltoall", machine.topology, max(size, layout.ep)))

    def _exchanges(self, layers: int, phase: Passing) -> FloatArray:
        """The exchanges of so many layers with experts: there and back, each way once forward and once backward."""
        times = 1.0 if phase == "forward" else 1.0 + self.plan.layout.repeated
        return np.array([2 * layers * times * self._exchange_s, 0.0])

    def _of_run(self, run: Run, phase: Passing, **how: bool) -> FloatArray:
        """The time of a run, no less than inputs of its layers take to the host or back, beside computing."""
        plan = self.plan
        found = self._simulated_run(run, phase, **how)
        if plan.layout.checkpointing != "offload":
            return found
        size = ELEMENT_BYTES * self.phases.most_tokens * plan.model.hidden_size / plan.layout.tp
        moved_s = run.times * len(run.unit) * size / HOST_LINK_BYTES_PER_S
        return np.array([max(found[0], moved_s), found[1]])

    def _simulated_run(self, run: Run, phase: Passing, **how: bool) -> FloatArray:
        """The time of a run of equal units: that of some, and the others as long as the second half of these."""
        build = getattr(self.phases, phase)
        key = (run.unit, phase, tuple(how.items()))
        if (key, 1) not in self._built:
            self._built[key, 1] = build(run.unit, 1, **how)
        one = self._built[key, 1]
        most = max(2, min(self._layers // len(run.unit), MANY_TRANSFERS // max(one.transfers, 1)))
        few = min(run.times, most)
        self.fewest[run] = min(few, self.fewest.get(run, few))

        def of(count: int) -> FloatArray:
            if (key, count) not in self._simulated:
                if count == few:
                    self._progress(f"simulating {few} of {run.times} x {len(run.unit)} layers {phase}")
                self._simulated[key, count] = self._times_of(one if count == 1 else build(run.unit, count, **how))
            return self._simulated[key, count]

        experts = sum(kind.experts is not None for kind in run.unit)
        last, exposed = of(few), self._tensors(len(run.unit) * run.times, phase)
        exposed = exposed + self._exchanges(experts * run.times, phase)
        if few == run.times:
            return last + exposed
        half = few // 2
        first, more = of(half), run.times - few
        return last + more * (last - first) / (few - half) + exposed

    def _times_of(self, schedule: Schedule) -> FloatArray:
        found = PassAnswer(self._stage, schedule, self.plan.layer, self.plan.options)
        return np.array([float(found.time_s), float(found.compute_s)])

    def _alone_s(self, machine: Machine, schedule: Schedule) -> float:
        """The time of exposed messages, which no kernel call hides."""
        return float(PassAnswer(machine, schedule, self.plan.layer, self.plan.options).time_s)

    def _send_s(self) -> float:
        """The time of hidden states from each stage to the next one, all at once."""
        size = ELEMENT_BYTES * self.phases.most_tokens * self.plan.model.hidden_size
        topology = self._machine.topology
        places = self.plan.layout.ranks(topology.world_size)
        machine = with_groups(self._machine, topology, places)
        return self._alone_s(machine, send(topology, places, -(-size // self.plan.layout.tp)))

    def _embedding_s(self) -> float:
        """Embedding and output gathered, and their gradients reduced; of a pipeline, those of one end.

        So are all parameters and gradients that do not move beside layers.
        """
        plan, phases, layout = self.plan, self.phases, self.plan.layout
        size = (
            embedding_parameters(plan.model).stored
            if layout.pp == 1
            else plan.model.vocabulary * plan.model.hidden_size
        )
        size = -(-size // layout.tp)
        if not phases.overlaps:
            size = max(map(self._moved_parameters, range(layout.pp)))
        if phases.states.shape[1] == 1 or not size:
            return 0.0

        def alone_s(messages: Callable[[Topology, int], Schedule], size_bytes: int) -> float:
            return self._alone_s(self._stage, in_groups(messages(phases.states_part, size_bytes), phases.states))

        if layout.zero == 0:
            return alone_s(all_reduce, GRADIENT_BYTES * size) if plan.trains else 0.0
        gathered_s = alone_s(gather, PARAMETER_BYTES * size)
        return gathered_s + (alone_s(reduce_scatter, GRADIENT_BYTES * size) if plan.trains else 0.0)

    def _moved_parameters(self, stage: int) -> int:
        """The parameters of a stage as if all of them were gathered by the ranks with the same ones."""
        plan, layout, ranks = self.plan, self.plan.layout, self.phases.states.shape[1]
        kinds = [kind for part in plan.parts[stage :: layout.pp] for kind in part]
        less = sum(
            stored_parameters(plan.model, kind, layout.ep) - moved_parameters(plan.model, kind, layout.ep, ranks)
            for kind in kinds
        )
        return stage_parameters(plan, stage, layout.ep) - less // layout.tp

    def _optimizer_s(self) -> float:
        """The update of the states of a rank, at the bandwidth of its memory; no time where that is unknown.

        With offload gradients go to the host and 16-bit parameters come back, and the ranks of a node share its memory.
        """
        plan, bandwidth = self.plan, self._rates.memory_bytes_per_s
        if not plan.trains:
            return 0.0
        shards, ep = self.phases.states.shape[1] if plan.layout.zero else 1, plan.layout.ep
        held = max(stage_parameters(plan, stage, ep) for stage in range(plan.layout.pp))
        parameters = max(stage_parameters(plan, stage) for stage in range(plan.layout.pp)) / shards
        parameters = parameters if plan.layout.zero else held
        if plan.layout.offload:
            most = max(Counter(self._machine.topology.node_of_rank).values())
            moved_s = (GRADIENT_BYTES + PARAMETER_BYTES) * parameters / HOST_LINK_BYTES_PER_S
            return moved_s + UPDATE_BYTES * parameters * most / HOST_BYTES_PER_S
        gradients = held if plan.layout.zero == 1 else parameters
        moved_bytes = (UPDATE_BYTES + NORM_BYTES) * parameters + GRADIENT_BYTES * gradients  # the last to zero them
        return 0.0 if bandwidth is None else moved_bytes / float(bandwidth)

    def model_flops(self) -> int:
        """FLOPs of a step by the convention of MFU, over all ranks."""
        plan, layout, passes = self.plan, self.plan.layout, self.phases.passes
        tokens = plan.sequence * plan.batch * (layout.dp or 1)
        attention = sum(passes[letter, "forward"].flops for letter in plan.model.pattern) // len(self.phases.places)
        forward = 2 * tokens * active_parameters(plan.model) + attention
        return forward * (3 if plan.trains else 1) * layout.microbatches


def _rate(given: ComputeLike | None) -> float | None:
    """A given rate of matrices. Raises `QuantityError` for real kernels."""
    rate = parse_compute(given)
    if rate == "real":
        raise QuantityError("matrix rate 'real': a prediction has no kernels, expected a rate like timed:600TFLOP/s")
    return rate


def _provenance(machine: Machine, plan: StepPlan, rates: StepRates, overrides: Sequence[str]) -> Provenance:
    inputs = {
        "machine": machine_inputs(machine, compute=True),
        **overrides_inputs(overrides),
        "step": plan_inputs(plan),
    }
    passes = ("forward", "backward") if plan.trains else ("forward",)
    of_passes = {passing: machine.rate_of(plan.layer, passing) for passing in passes}  # type: ignore[arg-type]
    constants = machine_constants(machine.parameters.values()) + compute_constants(plan.layer.dtype, of_passes)
    return Provenance(inputs, constants + tuple(step_constants(rates, plan.matrix_dtype, plan.layout)), ("auto",))


def step_constants(rates: StepRates, matrix_dtype: MatrixDtype, layout: Layout) -> list[UsedConstant]:
    """The constants of what is no attention: rates of matrices and memory, and those of hosts that a layout uses."""
    matrices = rates.matrices
    value = format_flops(float(matrices.flops_per_s or 0))
    found = [UsedConstant(f"matrix_rate_{matrix_dtype}", value, matrices.source)]
    found.append(UsedConstant("spread_of_gpus", f"{SPREAD:.2%}", SPREAD_SOURCE))
    if rates.memory_bytes_per_s is not None:
        found.append(UsedConstant("memory_bandwidth", format_bandwidth(rates.memory_bytes_per_s), rates.memory_source))
    if rates.capacity_bytes is not None:
        found.append(UsedConstant("memory", format_size(rates.capacity_bytes), rates.capacity_source))
        found.append(UsedConstant("memory_reserved", format_size(RESERVED_BYTES), RESERVED_SOURCE))
    if layout.offload or layout.checkpointing == "offload":
        found.append(UsedConstant("host_link", format_bandwidth(HOST_LINK_BYTES_PER_S), HOST_LINK_SOURCE))
    if layout.offload:
        found.append(UsedConstant("host_memory", format_bandwidth(HOST_BYTES_PER_S), HOST_SOURCE))
    return found
