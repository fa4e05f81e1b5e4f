"""The forward and the backward phase of a step: chains of so many layers, each one schedule.

    Phases(plan, topology, places).forward([kind], 4)

A chain has attention passes with everything beside them. Before each pass every rank makes its inputs in one
call: all that stands between this pass and the one before, at the cost of its FLOPs and bytes. So passes follow each
other, and nothing else holds them together.

**Slots.** A layer is a slot of equally many steps. One call of it *opens* the layer: it reads the parameters of the
layer, which are gathered from all ranks a slot earlier, on lanes of their own. There are buffers for two layers, so
parameters of a layer are gathered while the one before is computed, and not earlier than those of the layer before that
have been read. Gradients of the parameters of a layer are made, a part at each rank, by the call that opens the next
slot, or by the last call; they are then reduced to their owners, also on lanes of their own.

Nothing is assumed to overlap: messages of states share links, and multiprocessors, with those of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, permutations
from typing import Any, NamedTuple, get_args

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.prediction.training_step import costs
from tasp_lab.prediction.training_step.costs import NO_COST, Cost, LayerKind
from tasp_lab.prediction.training_step.layout import StepPlan, context_groups, state_groups
from tasp_lab.prediction.training_step.messages import StatesTask, all_reduce, gather, reduce_scatter
from tasp_lab.schedule.blocks import Blocks, Kind, Pool
from tasp_lab.schedule.calls import BlockLists, Calls, Passing, Task
from tasp_lab.schedule.composition import replicated
from tasp_lab.schedule.composition.layers import LayerTask
from tasp_lab.schedule.composition.sequence import ShiftedSteps, check_size, tables_joined
from tasp_lab.schedule.model import LazySteps, Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.stacked_task import DENSE, DENSE_BACKWARD, Dense, StackedTask
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.build import attention_schedules, followed, linear_schedules
from tasp_lab.schedules.hybrid.relayout import relayout
from tasp_lab.schedules.hybrid.stack import layouts_differ
from tasp_lab.schedules.linear.flops import least_flops
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.schedules.registry import is_hybrid, is_own, names_of, options_for_layer, uses_rings
from tasp_lab.topology.derived import equal_parts
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.kernel_shapes import Product, ProductKind
from tasp_lab.workload.sequence_layout import SequenceLayout

PARAMETER_BYTES, GRADIENT_BYTES = 2, 4
"""On the wire, per parameter: bf16 for parameters, float32 for gradients, as FSDP of PyTorch with mixed precision."""

FSDP_COPY_BYTES = (4, 10)
"""What FSDP's copies move per parameter, forward and backward: gathered parameters out of the buffer (2 read, 2
written), and gradients into it, in float32 (2, 4); PyTorch's ``split_with_sizes_copy`` and ``chunk_cat``."""


class Run(NamedTuple):
    """Layers that follow each other: a unit of one or more kinds, so many times."""

    unit: tuple[LayerKind, ...]
    times: int


def runs_of(layers: Sequence[LayerKind]) -> list[Run]:
    """Consecutive layers as runs: a period many times, then what is left of it. First layers with an MLP are a run of
    their own; layers that do not repeat are one unit.

    >>> from tasp_lab.prediction.training_step.costs import kinds_of
    >>> from tasp_lab.workload.models.catalogue import load_model
    >>> [run.times for run in runs_of(kinds_of(load_model("deepseek-v3")))]
    [3, 58]
    """
    kinds, count = tuple(layers), len(layers)
    # No hidden states move between runs, as they may between linear and softmax attention: a hybrid is whole periods.
    may_leave = all(kind.letter != "L" for kind in kinds)
    for size in range(1, count // 2 + 1):
        left = count % size
        if kinds[size:] == kinds[:-size] and (may_leave or not left):
            return [Run(kinds[:size], count // size), *runs_of(kinds[count - left :])]
    dense = next((number for number, kind in enumerate(kinds) if kind.experts is not None), 0)
    if dense and all(kind.experts is not None for kind in kinds[dense:]):
        return [*runs_of(kinds[:dense]), *runs_of(kinds[dense:])]
    return [Run(kinds, 1)] if kinds else []


@dataclass(frozen=True, eq=False)
class AttentionPass:
    """A pass of a layer, or a re-layout, by all ranks.

    Parameters
    ----------
    schedule : of all groups together.
    made : bool array (world_size, blocks), what the call before it makes at each rank.
    flops : the FLOPs of the pass over all ranks that no schedule can do without; 0 of a re-layout.
    layout : the positions of the ranks of a context group.
    """

    schedule: Schedule
    made: BoolArray
    flops: int
    layout: SequenceLayout


class Work(NamedTuple):
    """What a call of every rank does: FLOPs and bytes are int arrays (world_size,), `launches` kernels of element-wise
    work, and `products` the matrix products of each rank.
    """

    flops: IntArray
    moved_bytes: IntArray
    launches: int
    products: Sequence[tuple[Product, ...]]


class Phases:
    """Builds the phases of a stage.

    `places` are the ranks of `topology` by place, an int array (stages, dp, cp, tp): of one stage that shares no links
    with others, or of all stages, each of which computes the same layers at once.
    """

    def __init__(self, plan: StepPlan, topology: Topology, places: IntArray) -> None:
        self.plan, self.topology, self.places = plan, topology, places
        self._chains: dict[tuple[object, ...], Schedule] = {}
        self.groups, self.states = context_groups(places), state_groups(places)
        self.passes: dict[tuple[str, Passing], AttentionPass] = {}
        self.between: dict[tuple[str, str, Passing], AttentionPass] = {}
        part = part_of(topology, self.groups)
        letters = sorted(set(plan.model.pattern))
        for letter in letters:
            name, options = plan.schedule, plan.options
            if is_hybrid(name):
                name, options = names_of(name).of(letter), options_for_layer(name, letter, options)
            build = linear_schedules if letter == "L" else attention_schedules
            self._add(self.passes, (letter,), build(name, part, plan.layer_of(letter), None, options))
        for before, after in permutations(letters, 2):
            ends = self.layout_of(before), self.layout_of(after)
            if layouts_differ(*ends):
                self._add(self.between, (before, after), relayout(part, plan.layer, *ends, "both"))

    @classmethod
    def once(cls, plan: StepPlan, topology: Topology, places: IntArray) -> Phases:
        """The phases, with all that was built of them: equal steps on machines that differ in rates have the same."""
        name, part = plan.schedule, part_of(topology, context_groups(places))
        if not is_own(name):  # what builds a schedule of a user may change between two steps
            return cls(plan, topology, places)
        differs = is_hybrid(name) or uses_rings(name) or not topology.is_complete
        seen = topology if differs else (topology.structure, followed(name, part, plan.options))
        key = plan, seen, places.tobytes()
        _kept[key] = found = _kept.pop(key, None) or cls(plan, topology, places)
        if len(_kept) > MOST_KEPT:
            del _kept[next(iter(_kept))]
        return found

    def chain(self, phase: Passing, unit: tuple[LayerKind, ...], count: int, **how: bool) -> Schedule:
        """The `forward` or `backward` phase, built once."""
        key = phase, unit, count, *how.items()
        if key not in self._chains:
            self._chains[key] = getattr(self, phase)(unit, count, **how)
        return self._chains[key]

    def _add(self, passes: dict[Any, AttentionPass], key: tuple[str, ...], schedules: Sequence[Schedule]) -> None:
        """Add the forward schedule, and the backward one if there is one, in all groups."""
        for passing, schedule in zip(get_args(Passing), schedules, strict=False):
            passes[*key, passing] = _in_all(schedule, self.groups)

    def layout_of(self, letter: str) -> SequenceLayout:
        """The positions of the ranks of a context group in a layer."""
        return self.passes[letter, "forward"].layout

    @cached_property
    def states_part(self) -> Topology:
        """The topology of the ranks that have the same parameters."""
        return part_of(self.topology, self.states)

    def tokens(self, letter: str) -> IntArray:
        """The positions of each rank in a layer, over its sequences, an int array (world_size,).

        The ranks of a tensor group have the same positions, each with a part of their heads.
        """
        layout = self.layout_of(letter)
        found = np.zeros(self.groups.size, dtype=np.int64)
        found[self.groups] = [layout.length(rank) for rank in range(self.groups.shape[1])]
        return found * self.plan.batch

    @property
    def most_tokens(self) -> int:
        """The positions of the rank with most of them."""
        return max(int(self.tokens(letter).max()) for letter in set(self.plan.model.pattern))

    def forward(self, unit: Sequence[LayerKind], count: int, *, gathers: bool = True) -> Schedule:
        """The forward phase of so many units of layers; `gathers` if parameters of layers are gathered first."""
        model, kinds = self.plan.model, list(unit) * count
        chain = _Chain(self, "forward", self._gathers(kinds, gathers), [], reduces=False)
        for number, kind in enumerate(kinds):
            chain.begin(kind, self.between.get((kinds[number - 1].letter, kind.letter, "forward")) if number else None)
            before = costs.before_attention(model, kind, self.plan.element_wise)
            chain.add(before, self.passes[kind.letter, "forward"])
            chain.add(self._behind(kind))
        return chain.schedule()

    def backward(self, unit: Sequence[LayerKind], count: int, *, reduces: bool, gathers: bool = True) -> Schedule:
        """The backward phase of so many units; `reduces` if their gradients are reduced."""
        model, layout, work = self.plan.model, self.plan.layout, self.plan.element_wise
        kinds = list(reversed(list(unit) * count))
        reductions = self._of_states(reduce_scatter if layout.zero else all_reduce, GRADIENT_BYTES, kinds)
        chain = _Chain(self, "backward", self._gathers(kinds, gathers), reductions, reduces=reduces)
        for number, kind in enumerate(kinds):
            chain.begin(kind, self.between.get((kind.letter, kinds[number - 1].letter, "backward")) if number else None)
            before = costs.before_attention(model, kind, work)
            if layout.repeats_layers:
                chain.add(before, self.passes[kind.letter, "forward"])
                chain.add(self._behind(kind))
            elif layout.checkpointing == "selective":
                chain.add(costs.repeated_selectively(model, kind, work))
            behind = costs.behind_projection(model, kind, work).plus(costs.output_projection(model))
            chain.add(behind.backward("inputs", self.sums), self.passes[kind.letter, "backward"])
            chain.add(before.backward("inputs", self.sums))
        return chain.schedule()

    @property
    def overlaps(self) -> bool:
        """Whether states move beside layers."""
        return self.states.shape[1] > 1 and (self.plan.layout.zero == 3 or self.plan.layout.overlap is not False)

    @property
    def sums(self) -> ProductKind:
        """What products with gradients of weights make: with FSDP gradients that are then reduced, else sums of all
        micro-batches in 32 bits.
        """
        return "weights" if self.plan.layout.zero == 3 else "sums"

    def _behind(self, kind: LayerKind) -> Cost:
        model = self.plan.model
        return costs.output_projection(model).plus(costs.behind_projection(model, kind, self.plan.element_wise))

    def work(self, cost: Cost, kind: LayerKind) -> Work:
        """The work of a call at each rank, an equal part of that of its tensor group."""
        tokens, tp, ep = self.tokens(kind.letter), self.plan.layout.tp, self.plan.layout.ep
        cast_bytes = costs.CAST_BYTES * cost.inputs if self.plan.matrix_dtype == "fp8" else 0
        products = {
            each: tuple(matrix.product(each, tp, ep) for matrix in cost.matrices) for each in {*tokens.tolist()}
        }
        return Work(
            -(-tokens * cost.flops // tp), -(-tokens * (cost.moved_bytes + cast_bytes) // tp), cost.launches,
            [products[each] for each in tokens.tolist()],
        )  # fmt: skip

    def copied_bytes(self, kind: LayerKind, *, is_backward: bool) -> int:
        """What a rank moves to copy the parameters and gradients of a layer out of and into FSDP's buffers."""
        layout = self.plan.layout
        if layout.zero < 3 or self.states.shape[1] == 1:
            return 0
        return FSDP_COPY_BYTES[is_backward] * costs.stored_parameters(self.plan.model, kind, layout.ep) // layout.tp

    def _gathers(self, kinds: Sequence[LayerKind], gathers: bool) -> list[Schedule]:
        return self._of_states(gather, PARAMETER_BYTES, kinds) if gathers and self.plan.layout.zero else []

    def _of_states(
        self, messages: Callable[[Topology, int], Schedule], size_bytes: int, kinds: Sequence[LayerKind]
    ) -> list[Schedule]:
        """Messages of so many bytes per parameter of a rank, for each layer; none if they do not move beside layers."""
        if not self.overlaps:
            return []
        model, layout, ranks = self.plan.model, self.plan.layout, self.states.shape[1]
        found = dict[LayerKind, Schedule]()
        for kind in set(kinds):
            parameters = -(-costs.moved_parameters(model, kind, layout.ep, ranks) // layout.tp)
            found[kind] = in_groups(messages(self.states_part, size_bytes * parameters), self.states)
        return [found[kind] for kind in kinds]


MOST_KEPT = 4
"""Phases that are kept for the next steps."""

_kept: dict[object, Phases] = {}
"""By all that they follow from; those that were used last are the last ones."""


class _Link(NamedTuple):
    """A call of every rank, and the pass behind it.

    Attributes
    ----------
    behind : None for the last call of a chain.
    opens, reads : whether it opens its layer, and whether it reads the parameters of the layer that is open.
    ends : whether it makes the last part of the gradients of a layer: that before the one that it opens.
    """

    work: Work
    behind: AttentionPass | None = None
    opens: bool = False
    reads: bool = False
    ends: bool = False

    @property
    def steps(self) -> int:
        """The steps of the call and the pass."""
        return 1 + (0 if self.behind is None else len(self.behind.schedule.steps))


class _Part(NamedTuple):
    """A table of blocks of the chain, the first of which has a number, with what happens to it from a step on."""

    first: int
    blocks: Blocks
    task: Task
    initial: BoolArray
    final: BoolArray
    kept: BoolArray
    steps: Sequence[Step]
    begin: int


class _Chain:
    """Builds a chain: collects its calls, whose costs add up until a pass needs them; then places calls and passes at
    steps, and blocks in tables.

    `gathers` are how the parameters of each layer are gathered, alike but for their bytes; none if each rank has them.
    `reductions` are how its gradients are reduced, likewise, with `reduces` in this chain.
    """

    def __init__(
        self, phases: Phases, name: Passing, gathers: Sequence[Schedule], reductions: Sequence[Schedule], *,
        reduces: bool,
    ) -> None:  # fmt: skip
        self._phases, self._name, self._is_backward, self._reduces = phases, name, name == "backward", reduces
        self._ranks, self._cost = phases.groups.size, NO_COST
        self._gathers, self._reductions = gathers, reductions
        self._gather, self._reduction = (each[0] if each else None for each in (gathers, reductions))
        self._slots: list[list[_Link]] = []
        self._parts: list[_Part] = []

    def begin(self, kind: LayerKind, moving: AttentionPass | None) -> None:
        """Begin a layer, with a re-layout if there is one; its next call opens it."""
        self._kind, self._opens = kind, True
        self._slots.append([] if moving is None else [_Link(self._phases.work(NO_COST, kind), moving)])

    def add(self, cost: Cost, behind: AttentionPass | None = None) -> None:
        """Add to the next call; behind it, if there is a pass, comes this one."""
        self._cost = self._cost.plus(cost)
        if behind is None:
            return
        work, opens = self._phases.work(self._cost, self._kind), self._opens
        if opens:
            copied = self._phases.copied_bytes(self._kind, is_backward=self._is_backward)
            work = work._replace(moved_bytes=work.moved_bytes + copied, launches=work.launches + 2 * (copied > 0))
        ends = opens and self._reduces and len(self._slots) > 1  # gradients of the layer before
        self._slots[-1].append(_Link(work, behind, opens, reads=True, ends=ends))
        self._cost, self._opens = NO_COST, False

    def schedule(self) -> Schedule:
        """The schedule, proven. Raises `ScheduleError` if there are too many blocks."""
        last = _Link(self._phases.work(self._cost, self._kind), ends=self._reduces)
        links = [*(link for slot in self._slots for link in slot), last]
        own = [link.behind.schedule for link in links if link.behind is not None]
        lanes = max(each.lanes for each in own)
        dtype = next(each.task.dtype for each in own if each.task is not None)
        steps_of_calls, slot = self._placed()
        tokens = self._add_tokens(dtype)
        states = self._add_states(links, steps_of_calls, slot, lanes, dtype)
        passes = self._add_passes(links, steps_of_calls)
        check_size(self._name, self._ranks, sum(len(part.blocks) for part in self._parts))
        dense, calls = self._calls(links, steps_of_calls, tokens, states, passes)
        firsts = [part.first for part in self._parts]
        steps = ShiftedSteps([each.steps for each in self._parts], [each.begin for each in self._parts], firsts, calls)
        steps.keep()  # the proof, the dependencies and the shapes of calls go through them in turn
        initial, final, kept = (
            np.concatenate([getattr(part, name) for part in self._parts], axis=1)
            for name in ("initial", "final", "kept")
        )
        return Schedule(
            name=self._name,
            world_size=self._ranks,
            lanes=lanes + sum(each.lanes for each in (self._gather, self._reduction) if each is not None),
            blocks=tables_joined([part.blocks for part in self._parts]),
            initial=initial,
            final=final,
            steps=steps,
            task=StackedTask([part.task for part in self._parts], [len(part.blocks) for part in self._parts], dense),
            kept=kept,
        )

    def _placed(self) -> tuple[list[int], int]:
        """The step of each call, and the steps of a slot, which calls that open layers are apart."""
        opening = [[link.opens for link in slot].index(True) for slot in self._slots]
        before = [sum(link.steps for link in slot[:at]) for slot, at in zip(self._slots, opening, strict=True)]
        behind = [sum(link.steps for link in slot[at:]) for slot, at in zip(self._slots, opening, strict=True)]
        size = max(max(before) + max(behind), 0 if self._gather is None else len(self._gather.steps))
        found: list[int] = []
        for number, (slot, ahead) in enumerate(zip(self._slots, before, strict=True)):
            begin = (number + 1) * size - ahead
            found += [begin + steps for steps in accumulate((link.steps for link in slot[:-1]), initial=0)]
        return [*found, (len(self._slots) + 1) * size - max(before)], size

    # Tables of blocks: what moves along the chain, states beside it, and the passes.

    def _part(
        self, blocks: Blocks, task: Task, initial: BoolArray, final: BoolArray, kept: BoolArray,
        steps: Sequence[Step] = (), begin: int = 0,
    ) -> _Part:  # fmt: skip
        """A further table, behind those that are there."""
        first = self._parts[-1].first + len(self._parts[-1].blocks) if self._parts else 0
        self._parts.append(_Part(first, blocks, task, initial, final, kept, steps, begin))
        return self._parts[-1]

    def _add_tokens(self, dtype: str) -> _Part:
        """A block per rank that is there at the start, and one that the last call makes."""
        blocks = Blocks.of_data(np.ones(2 * self._ranks, dtype=np.int64))
        own, none = np.eye(self._ranks, dtype=np.bool_), np.zeros((self._ranks, self._ranks), dtype=np.bool_)
        initial, final = np.concatenate([own, none], axis=1), np.concatenate([none, own], axis=1)
        return self._part(blocks, StatesTask.of(blocks, dtype, initial, final), initial, final, final)

    def _add_states(
        self, links: Sequence[_Link], at: Sequence[int], slot: int, lanes: int, dtype: str
    ) -> dict[tuple[str, int], _Part]:
        """Gathers by the link that opens a layer, reductions by the link that makes gradients."""
        found, opened = {}, -1
        for number, (link, step) in enumerate(zip(links, at, strict=True)):
            before, opened = opened, opened + link.opens
            if link.opens and self._gather is not None:
                initial, nothing = self._gather.initial, np.zeros_like(self._gather.initial)
                # buffers for two layers: this one's parameters arrive while the layer before is computed
                kind = Kind("parameters", pool=Pool("parameters", 2 * slot))
                blocks = replace(self._gathers[opened].blocks, kinds=(kind,))
                task = StatesTask.of(blocks, dtype, initial, nothing)
                steps = _on_lanes(self._gather.steps, lanes)
                found["gather", number] = self._part(blocks, task, initial, nothing, nothing, steps, step - slot)
            if link.ends and self._reduction is not None:
                blocks, final = self._reductions[before].blocks, self._reduction.final
                nothing = np.zeros_like(final)
                steps = _on_lanes(self._reduction.steps, lanes + (0 if self._gather is None else self._gather.lanes))
                task = StatesTask.of(blocks, dtype, nothing, final)
                found["reduce", number] = self._part(
                    blocks, task, nothing, final, self._reduction.left, steps, step + 1
                )
        return found

    def _add_passes(self, links: Sequence[_Link], at: Sequence[int]) -> list[_Part]:
        found = []
        for link, step in zip(links, at, strict=True):
            if link.behind is not None:
                own = link.behind.schedule
                assert own.task is not None, "a pass of a layer has a task"
                initial, nothing = own.initial & ~link.behind.made, np.zeros_like(own.final)
                kept = own.initial | own.left
                found.append(self._part(own.blocks, own.task, initial, nothing, kept, own.steps, step + 1))
        return found

    # Calls.

    def _calls(
        self, links: Sequence[_Link], at: Sequence[int], tokens: _Part, states: dict[tuple[str, int], _Part],
        passes: Sequence[_Part],
    ) -> tuple[Dense, dict[int, Step]]:  # fmt: skip
        """All calls, with what each reads and makes, and their steps."""
        sources, targets, parts, steps = list[IntArray](), list[IntArray](), list[IntArray](), dict[int, Step]()
        kernel, opened = DENSE_BACKWARD if self._is_backward else DENSE, 0
        gradient_part = None if self._reduction is None else _initial_part(self._reduction)
        for number, (link, step) in enumerate(zip(links, at, strict=True)):
            opened = number if link.opens else opened
            # results of the pass before, and the parameters of the layer that is open
            before = links[number - 1].behind if number else None
            read = [(tokens, tokens.initial) if before is None else (passes[number - 1], before.schedule.final)]
            gathered = states.get(("gather", opened))
            if gathered is not None and self._gather is not None and link.reads:
                read.append((gathered, self._gather.final))
            made = (tokens, tokens.final) if link.behind is None else (passes[number], link.behind.made)
            sums = None if link.behind is None else _initial_part(link.behind.schedule)
            reduced = states.get(("reduce", number))
            own = [_blocks_at(read, rank) for rank in range(self._ranks)]
            params = number * self._ranks + np.arange(self._ranks)[:, None]
            steps[step] = Step.of((), [Calls(kernel, np.arange(self._ranks), (BlockLists.of(own),), params)])
            sources += own
            for rank in range(self._ranks):
                results = _blocks_at([made], rank)
                own_part = np.zeros_like(results) if sums is None else sums[rank, results - made[0].first]
                if reduced is not None and self._reduction is not None and gradient_part is not None:
                    gradients = np.flatnonzero(self._reduction.initial[rank])
                    own_part = np.concatenate([own_part, gradient_part[rank, gradients]])
                    results = np.concatenate([results, reduced.first + gradients])
                targets.append(results)
                parts.append(own_part)
        works, count = [link.work for link in links], len(links) * self._ranks
        flops, moved = (np.concatenate([getattr(each, name) for each in works]) for name in ("flops", "moved_bytes"))
        launches = np.repeat([each.launches for each in works], self._ranks)
        table: dict[tuple[Product, ...], int] = {}
        product = np.array([table.setdefault(rank, len(table)) for each in works for rank in each.products])
        dense = Dense(BlockLists.of(sources), BlockLists.of(targets), flops, np.full(count, self._is_backward), moved,
                      np.concatenate(parts), launches, product, tuple(table))  # fmt: skip
        return dense, steps


def _blocks_at(tables: Sequence[tuple[_Part, BoolArray]], rank: int) -> IntArray:
    """The numbers of blocks that a rank reads or makes, ascending."""
    return np.sort(np.concatenate([np.flatnonzero(table[rank]) + part.first for part, table in tables]))


def _initial_part(schedule: Schedule) -> IntArray | None:
    """The part of each block that each rank starts with, an int array (world_size, blocks); None of data."""
    part = schedule.initial_part
    return None if part is None else np.broadcast_to(part, schedule.initial.shape)


def _on_lanes(steps: Sequence[Step], lane: int) -> list[Step]:
    """Steps whose lanes begin with this one."""
    return [replace(step, lane=step.lane + lane) for step in steps]


def part_of(topology: Topology, groups: IntArray) -> Topology:
    """The topology of each of these groups of ranks. Raises `TopologyError` unless it is the same for all."""
    return topology if np.array_equal(groups, [range(topology.world_size)]) else equal_parts(topology, groups)


def in_groups(schedule: Schedule, groups: IntArray) -> Schedule:
    """The schedule of one group, in all groups at once."""
    if np.array_equal(groups, [range(groups.size)]):
        return schedule
    found = replicated(schedule, groups)
    if isinstance(found.steps, LazySteps):
        found.steps.keep()  # every layer of a phase goes through them
    return found


def _in_all(one: Schedule, groups: IntArray) -> AttentionPass:
    """A pass of one group, in all of them."""
    task, schedule = one.task, in_groups(one, groups)
    assert isinstance(task, LayerTask), "a pass of a layer has a task"
    assert schedule.task is not None, "a pass of a layer has a task"
    flops = 0
    if isinstance(task, AttentionTask | LinearTask):
        flops = task.total_flops if isinstance(task, AttentionTask) else least_flops(task)
    made = schedule.task.contract.inputs(schedule.world_size)
    return AttentionPass(schedule, made, len(groups) * flops, task.layout)
