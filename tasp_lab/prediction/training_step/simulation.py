"""The phases of a step simulated, and what stands around them added.

    StepSimulation(machine, plan, rates).times().total_s

Runs of equal layers are simulated up to a few layers; the others take as long as the last of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np

from tasp_lab.core.arrays import FloatArray, IntArray
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.machines.libraries.groups import GroupLibrary
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.passes import PassAnswer
from tasp_lab.prediction.step_results import StepTimes
from tasp_lab.prediction.training_step import costs, layout, messages
from tasp_lab.prediction.training_step.costs import ELEMENT_BYTES
from tasp_lab.prediction.training_step.layout import Layout, StepPlan
from tasp_lab.prediction.training_step.memory import stage_parameters
from tasp_lab.prediction.training_step.phases import GRADIENT_BYTES, PARAMETER_BYTES, Phases, Run, in_groups, runs_of
from tasp_lab.prediction.training_step.pipeline import makespan_s, one_forward_one_backward
from tasp_lab.prediction.training_step.rates import HOST_BYTES_PER_S, HOST_LINK_BYTES_PER_S, StepRates
from tasp_lab.schedule.calls import Passing
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.library_rings import library_schedule
from tasp_lab.topology.derived import equal_parts
from tasp_lab.topology.graph import Topology
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


def context_machine(machine: Machine, degrees: Layout) -> Machine:
    """The machine of a context group, see `group_machine`."""
    return group_machine(machine, layout.context_groups(degrees.ranks(machine.topology.world_size)))


def group_machine(machine: Machine, groups: IntArray) -> Machine:
    """The machine of a group of ranks, an int array (groups, ranks), with a communicator of its ranks.

    Groups are equal, so the first stands for all. Raises `TopologyError` for groups that are not.
    """
    if len(groups) == 1:  # all ranks, whose communicator the machine has
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
    context, system = layout.context_groups(places), machine.system
    if topology is not machine.topology:  # a stage stands for all, which are equal
        speeds = machine.rank_speeds[: topology.world_size]
        machine = replace(machine, topology=topology, rank_speeds=speeds, system=None)
    kinds = [(context, False), (layout.state_groups(places), True), (places.reshape(len(places), -1).T, False)]
    kinds = [each for each in kinds if each[0].shape[1] > 1]
    if system is None or len(context) == 1 or not kinds:
        return machine
    library = system.group_library(machine.parameters.numbers, np.array(topology.node_of_rank), kinds)
    return replace(machine, comm_library=library, system=None)


_NOTHING: FloatArray = np.zeros(2)
"""The time of a phase, and that of the kernel calls of its busiest rank."""


class StepSimulation:
    """Simulates the phases of a step, and adds up its parts.

    `fewest` is how many units of each run of layers were simulated, in the phase with fewer of them.
    """

    def __init__(
        self, machine: Machine, plan: StepPlan, rates: StepRates, layers: int = MOST_LAYERS,
        progress: ProgressCallback = no_progress,
    ) -> None:  # fmt: skip
        self._machine, self.plan, self._rates, self._progress = machine, plan, rates, progress
        self._layers, self._ranks = layers, plan.layout.ranks(machine.topology.world_size)
        topology, places = layout.stage_of(machine.topology, plan.layout)
        self._stage = with_groups(machine, topology, places)
        self.phases = Phases.once(plan, topology, places)
        self._hidden_bytes = ELEMENT_BYTES * self.phases.most_tokens * plan.model.hidden_size
        self.fewest: dict[Run, int] = {}
        self._simulated: dict[tuple[object, int], FloatArray] = {}

    def times(self) -> StepTimes:
        """The parts of a step."""
        degrees, trains = self.plan.layout, self.plan.trains
        count, chunks = degrees.microbatches, range(degrees.chunks)
        # of each part of the model, the times of each micro-batch
        forward = [self._microbatches("forward", chunk, always=degrees.zero == 3) for chunk in chunks]
        backward = [[_NOTHING] * count for _ in chunks]
        if trains:
            # gradients of a step are reduced with the last micro-batch
            backward = [self._microbatches("backward", chunk, always=degrees.zero >= 2)[::-1] for chunk in chunks]
        stages = [chunks[stage :: degrees.pp] for stage in range(degrees.pp)]
        sums = [
            [sum((time for chunk in stage for time in works[chunk]), _NOTHING) for works in (forward, backward)]
            for stage in stages
        ]
        # a pipeline waits for its busiest stage
        busiest = max(sums, key=lambda both: float(both[0][0] + both[1][0]))
        (forward_s, busy_forward_s), (backward_s, busy_backward_s) = (each.tolist() for each in busiest)
        pipeline_s = 0.0
        if degrees.pp > 1:
            orders = one_forward_one_backward(degrees.pp, degrees.interleave, count)
            if not trains:
                orders = [[work for work in order if not work.is_backward] for order in orders]
            whole_s = makespan_s(
                orders,
                lambda work: (backward if work.is_backward else forward)[work.chunk][work.microbatch].tolist()[0],
                self._send_s(),
            )
            pipeline_s = float(whole_s) - forward_s - backward_s
        embedding_s = self._embedding_s() * (count if degrees.zero == 3 else 1)
        busy_s = busy_forward_s + busy_backward_s
        return StepTimes(forward_s, backward_s, pipeline_s, embedding_s, self._optimizer_s(), busy_s)

    def _microbatches(self, phase: Passing, chunk: int, *, always: bool) -> list[FloatArray]:
        """A phase of each micro-batch; only the first, unless `always`, moves parameters or gradients beside layers."""
        count = self.plan.layout.microbatches
        one = self._phase(phase, chunk, True)
        return [one, *[one if always else self._phase(phase, chunk, False)] * (count - 1)] if count > 1 else [one]

    def _phase(self, phase: Passing, chunk: int, moves: bool) -> FloatArray:
        """A phase of a part of the model, its runs one after another; nothing overlaps between runs."""
        how = {"gathers": moves}
        if phase == "backward":
            how = {"reduces": moves, "gathers": self.plan.layout.zero == 3}
        runs = runs_of(self.plan.parts[chunk])
        return sum((self._of_run(run, phase, **how) for run in runs), _NOTHING) + self._output(chunk, phase)

    def _output(self, chunk: int, phase: Passing) -> FloatArray:
        """The output matrix and the loss of a micro-batch, behind the last part of the model."""
        plan, phases = self.plan, self.phases
        if chunk < plan.layout.chunks - 1 or not plan.model.vocabulary:
            return _NOTHING
        tokens, tp, is_backward = phases.most_tokens, plan.layout.tp, phase == "backward"
        cost = costs.output_matrix(plan.model)
        cost = cost.backward("inputs", phases.sums) if is_backward else cost
        products = [each.product(tokens, tp) for each in cost.matrices]
        found = float(self._rates.products_s(products, round(tokens / tp * cost.flops), output=True))
        if plan.trains:
            moved_bytes = tokens / tp * plan.model.vocabulary * plan.software.loss_bytes[is_backward]
            found += float(self._rates.moved_s(moved_bytes, costs.LOSS_LAUNCHES))
        found = float(max(self._stage.call_s(found, rank) for rank in range(self._stage.topology.world_size)))
        return np.array([found, found])

    # Messages that nothing hides.

    @cached_property
    def _tensor_s(self) -> tuple[float, float]:
        """The gather and the sum of hidden states in a tensor group, as collectives of the library."""
        tp = self.plan.layout.tp
        if tp == 1:
            return 0.0, 0.0
        machine = group_machine(self._machine, layout.tensor_groups(self._ranks))
        gather, add = (library_schedule(name, machine.topology, max(self._hidden_bytes, tp))
                       for name in ("all_gather", "reduce_scatter"))  # fmt: skip
        return self._alone_s(machine, gather), self._alone_s(machine, add)

    @cached_property
    def _exchange_s(self) -> float:
        """An all-to-all of the tokens of a rank to their experts, or back; 0 if each rank has a part of all experts."""
        degrees, experts = self.plan.layout, self.plan.model.experts
        if degrees.ep == 1 or experts is None:
            return 0.0
        machine = group_machine(self._machine, layout.expert_groups(self._ranks, degrees.ep))
        size = self._hidden_bytes * experts.active // degrees.tp
        return self._alone_s(machine, library_schedule("alltoall", machine.topology, max(size, degrees.ep)))

    def _exposed_s(self, run: Run, phase: Passing) -> float:
        """The messages of tensor groups, and exchanges of experts, of a run.

        Around attention and around the MLP hidden states are gathered and summed; backward so are gradients, and inputs
        are gathered again (arXiv:2205.05198, section 4.2.2). The last is done beside matrix products, as are sums of
        gradients, which hides nothing: kernels that stay on all multiprocessors wait for those of the library, and take
        twice as long (pytorch/pytorch issue 143988, NVIDIA/cutlass issue 2471).

        Tokens go to their experts and back, once forward and once backward.
        """
        gather_s, sum_s = self._tensor_s
        experts = sum(kind.experts is not None for kind in run.unit)
        repeated = 1 if phase == "forward" else 1 + self.plan.layout.repeated
        tensor_s = 2 * (gather_s + sum_s) * repeated + (0.0 if phase == "forward" else 2 * gather_s)
        return run.times * (len(run.unit) * tensor_s + 2 * experts * repeated * self._exchange_s)

    def _send_s(self) -> float:
        """The time of hidden states from each stage to the next one, all at once."""
        topology = self._machine.topology
        machine = with_groups(self._machine, topology, self._ranks)
        size_bytes = -(-self._hidden_bytes // self.plan.layout.tp)
        return self._alone_s(machine, messages.send(topology, self._ranks, size_bytes))

    def _embedding_s(self) -> float:
        """Embedding and output gathered, and their gradients reduced; of a pipeline, those of one end.

        So are all parameters and gradients that do not move beside layers.
        """
        plan, phases, degrees = self.plan, self.phases, self.plan.layout
        size = plan.model.vocabulary * plan.model.hidden_size
        size = -(-(embedding_parameters(plan.model).stored if degrees.pp == 1 else size) // degrees.tp)
        if not phases.overlaps:
            size = max(map(self._moved_parameters, range(degrees.pp)))
        if phases.states.shape[1] == 1 or not size:
            return 0.0

        def alone_s(collective: Callable[[Topology, int], Schedule], size_bytes: int) -> float:
            return self._alone_s(self._stage, in_groups(collective(phases.states_part, size_bytes), phases.states))

        if degrees.zero == 0:
            return alone_s(messages.all_reduce, GRADIENT_BYTES * size) if plan.trains else 0.0
        gathered_s = alone_s(messages.gather, PARAMETER_BYTES * size)
        return gathered_s + (alone_s(messages.reduce_scatter, GRADIENT_BYTES * size) if plan.trains else 0.0)

    def _moved_parameters(self, stage: int) -> int:
        """The parameters of a stage as if all of them were gathered by the ranks with the same ones."""
        plan, degrees, ranks = self.plan, self.plan.layout, self.phases.states.shape[1]
        less = 0
        for kind in (kind for part in plan.parts[stage :: degrees.pp] for kind in part):
            less += costs.stored_parameters(plan.model, kind, degrees.ep)
            less -= costs.moved_parameters(plan.model, kind, degrees.ep, ranks)
        return stage_parameters(plan, stage, degrees.ep) - less // degrees.tp

    def _alone_s(self, machine: Machine, schedule: Schedule) -> float:
        """The time of exposed messages, which no kernel call hides."""
        return float(PassAnswer(machine, schedule, self.plan.layer, self.plan.options).time_s)

    # Layers.

    def _of_run(self, run: Run, phase: Passing, **how: bool) -> FloatArray:
        """The time of a run of equal units: that of some, and the others as long as the second half of these.

        No less than inputs of its layers take to the host or back, where they move beside computing.
        """
        key = (run.unit, phase, tuple(how.items()))
        one = self.phases.chain(phase, run.unit, 1, **how)  # it also says how many transfers more of them have
        most = max(2, min(self._layers // len(run.unit), MANY_TRANSFERS // max(one.transfers, 1)))
        few = min(run.times, most)
        self.fewest[run] = min(few, self.fewest.get(run, few))

        def of(count: int) -> FloatArray:
            if (key, count) not in self._simulated:
                if count == few:
                    self._progress(f"simulating {few} of {run.times} x {len(run.unit)} layers {phase}")
                schedule = self.phases.chain(phase, run.unit, count, **how)
                found = PassAnswer(self._stage, schedule, self.plan.layer, self.plan.options)
                self._simulated[key, count] = np.array([float(found.time_s), float(found.compute_s)])
            return self._simulated[key, count]

        found: FloatArray = of(few)
        if few < run.times:
            # the ends of a stack are unlike its middle, so one more layer costs what the second half of these does
            half = few // 2
            found = found + (run.times - few) * (found - of(half)) / (few - half)
        found = found + np.array([self._exposed_s(run, phase), 0.0])
        if self.plan.layout.checkpointing != "offload":
            return found
        moved_bytes = run.times * len(run.unit) * self._hidden_bytes / self.plan.layout.tp
        return np.array([max(found[0], moved_bytes / HOST_LINK_BYTES_PER_S), found[1]])

    def _optimizer_s(self) -> float:
        """The update of the states of a rank, at the bandwidth of its memory; no time where that is unknown.

        With offload gradients go to the host and 16-bit parameters come back, and the ranks of a node share its memory.
        """
        plan, degrees, bandwidth = self.plan, self.plan.layout, self._rates.memory_bytes_per_s
        if not plan.trains:
            return 0.0
        held = max(stage_parameters(plan, stage, degrees.ep) for stage in range(degrees.pp))
        parameters: float = held
        if degrees.zero:
            every = max(stage_parameters(plan, stage) for stage in range(degrees.pp))
            parameters = every / self.phases.states.shape[1]
        if degrees.offload:
            most = max(Counter(self._machine.topology.node_of_rank).values())
            moved_s = (GRADIENT_BYTES + PARAMETER_BYTES) * parameters / HOST_LINK_BYTES_PER_S
            return moved_s + UPDATE_BYTES * parameters * most / HOST_BYTES_PER_S
        gradients = held if degrees.zero == 1 else parameters
        moved_bytes = (UPDATE_BYTES + NORM_BYTES) * parameters + GRADIENT_BYTES * gradients  # the last to zero them
        return 0.0 if bandwidth is None else moved_bytes / float(bandwidth)

    def model_flops(self) -> int:
        """FLOPs of a step by the convention of MFU, over all ranks."""
        plan, degrees, passes = self.plan, self.plan.layout, self.phases.passes
        tokens = plan.sequence * plan.batch * (degrees.dp or 1)
        attention = sum(passes[letter, "forward"].flops for letter in plan.model.pattern) // len(self.phases.places)
        forward = 2 * tokens * active_parameters(plan.model) + attention
        return forward * (3 if plan.trains else 1) * degrees.microbatches
