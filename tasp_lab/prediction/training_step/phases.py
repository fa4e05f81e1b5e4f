"""The forward and the backward phase of a step: chains of so many layers, each one schedule.

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
from tasp_lab.prediction.training_step.costs import (
    CAST_BYTES,
    NO_COST,
    Cost,
    LayerKind,
    before_attention,
    behind_projection,
    moved_parameters,
    output_projection,
    repeated_selectively,
    stored_parameters,
)
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
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.build import attention_schedules, linear_schedules
from tasp_lab.schedules.hybrid.relayout import relayout
from tasp_lab.schedules.hybrid.stack import layouts_differ
from tasp_lab.schedules.linear.flops import least_flops
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.schedules.registry import is_hybrid, names_of, options_for_layer
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


class Phases:
    """Builds the phases of a stage.

    `places` are the ranks of `topology` by place, an int array (stages, dp, cp, tp): of one stage that shares no links
    with others, or of all stages, each of which computes the same layers at once.
    """

    def __init__(self, plan: StepPlan, topology: Topology, places: IntArray) -> None:
        self.plan, self.topology, self.places = plan, topology, places
        self.groups, self.states = context_groups(places), state_groups(places)
        self.passes: dict[tuple[str, Passing], AttentionPass] = {}
        self.between: dict[tuple[str, str, Passing], AttentionPass] = {}
        part = part_of(topology, self.groups)
        letters = sorted(set(plan.model.pattern))
        for letter in letters:
            build = linear_schedules if letter == "L" else attention_schedules
            name, options = _of_letter(plan, letter)
            self._add(self.passes, (letter,), build(name, part, plan.layer_of(letter), None, options))
        for before, after in permutations(letters, 2):
            ends = self.layout_of(before), self.layout_of(after)
            if layouts_differ(*ends):
                self._add(self.between, (before, after), relayout(part, plan.layer, *ends, "both"))

    def _add(self, passes: dict[Any, AttentionPass], key: tuple[str, ...], schedules: Sequence[Schedule]) -> None:
        """Add the forward schedule, and the backward one if there is one, in all groups."""
        for passing, schedule in zip(get_args(Passing), schedules, strict=False):
            passes[*key, passing] = _in_groups(schedule, self.groups)

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
        links = _Links(self)
        for number, kind in enumerate(kinds):
            moving = self.between.get((kinds[number - 1].letter, kind.letter, "forward")) if number else None
            links.begin(kind, moving, reduces=False)
            links.add(before_attention(model, kind, self.plan.element_wise), self.passes[kind.letter, "forward"])
            self._behind(links, kind)
        return _Chain("forward", links.slots, links.last(reduces=False), self._gathers(kinds, gathers), []).schedule()

    def backward(self, unit: Sequence[LayerKind], count: int, *, reduces: bool, gathers: bool = True) -> Schedule:
        """The backward phase of so many units; `reduces` if their gradients are reduced."""
        model, layout = self.plan.model, self.plan.layout
        kinds = list(reversed(list(unit) * count))
        links = _Links(self, is_backward=True)
        for number, kind in enumerate(kinds):
            moving = self.between.get((kind.letter, kinds[number - 1].letter, "backward")) if number else None
            links.begin(kind, moving, reduces=reduces and number > 0)
            before = before_attention(model, kind, self.plan.element_wise)
            if layout.repeats_layers:
                links.add(before, self.passes[kind.letter, "forward"])
                self._behind(links, kind)
            elif layout.checkpointing == "selective":
                links.add(repeated_selectively(model, kind, self.plan.element_wise))
            behind = behind_projection(model, kind, self.plan.element_wise).plus(output_projection(model))
            links.add(behind.backward("inputs", self.sums), self.passes[kind.letter, "backward"])
            links.add(before.backward("inputs", self.sums))
        last = links.last(reduces=reduces)
        return _Chain("backward", links.slots, last, self._gathers(kinds, gathers), self._reductions(kinds)).schedule()

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

    def _behind(self, links: _Links, kind: LayerKind) -> None:
        """What is behind attention."""
        links.add(output_projection(self.plan.model))
        links.add(behind_projection(self.plan.model, kind, self.plan.element_wise))

    def work(self, cost: Cost, kind: LayerKind) -> Work:
        """The work of a call at each rank, an equal part of that of its tensor group."""
        tokens, tp, ep = self.tokens(kind.letter), self.plan.layout.tp, self.plan.layout.ep
        moved_bytes = cost.moved_bytes + (CAST_BYTES * cost.inputs if self.plan.matrix_dtype == "fp8" else 0)
        products = {
            each: tuple(matrix.product(each, tp, ep) for matrix in cost.matrices) for each in {*tokens.tolist()}
        }
        of_ranks = [products[each] for each in tokens.tolist()]
        return Work(-(-tokens * cost.flops // tp), -(-tokens * moved_bytes // tp), cost.launches, of_ranks)

    def copied_bytes(self, kind: LayerKind, *, is_backward: bool) -> int:
        """What a rank moves to copy the parameters and gradients of a layer out of and into FSDP's buffers."""
        if self.plan.layout.zero < 3 or self.states.shape[1] == 1:
            return 0
        layout = self.plan.layout
        return FSDP_COPY_BYTES[is_backward] * stored_parameters(self.plan.model, kind, layout.ep) // layout.tp

    def _gathers(self, kinds: Sequence[LayerKind], gathers: bool) -> list[Schedule]:
        return self._of_states(gather, PARAMETER_BYTES, kinds) if gathers and self.plan.layout.zero else []

    def _reductions(self, kinds: Sequence[LayerKind]) -> list[Schedule]:
        return self._of_states(reduce_scatter if self.plan.layout.zero else all_reduce, GRADIENT_BYTES, kinds)

    def _of_states(
        self, messages: Callable[[Topology, int], Schedule], size_bytes: int, kinds: Sequence[LayerKind]
    ) -> list[Schedule]:
        """Messages of so many bytes per parameter of a rank, for each layer; none if they do not move beside layers."""
        if not self.overlaps:
            return []
        model, layout, ranks = self.plan.model, self.plan.layout, self.states.shape[1]
        parameters = {kind: -(-moved_parameters(model, kind, layout.ep, ranks) // layout.tp) for kind in set(kinds)}
        found = {kind: in_groups(messages(self.states_part, size_bytes * count), self.states)
                 for kind, count in parameters.items()}  # fmt: skip
        return [found[kind] for kind in kinds]


class _Links:
    """Collects the calls of a phase: costs add up until a pass needs them."""

    def __init__(self, phases: Phases, is_backward: bool = False) -> None:
        self.slots: list[list[Link]] = []
        self._phases, self._is_backward, self._cost = phases, is_backward, NO_COST

    def begin(self, kind: LayerKind, moving: AttentionPass | None, *, reduces: bool) -> None:
        """Begin a layer, with a re-layout if there is one; its next call opens it."""
        self._kind, self._opens, self._reduces = kind, True, reduces
        self.slots.append([])
        if moving is not None:
            work = self._phases.work(NO_COST, kind)
            self.slots[-1].append(Link(work, moving, is_backward=self._is_backward))

    def add(self, cost: Cost, behind: AttentionPass | None = None) -> None:
        """Add to the next call; behind it, if there is a pass, comes this one."""
        self._cost = self._cost.plus(cost)
        if behind is None:
            return
        work = self._phases.work(self._cost, self._kind)
        if self._opens:
            copied = self._phases.copied_bytes(self._kind, is_backward=self._is_backward)
            work = work._replace(moved_bytes=work.moved_bytes + copied, launches=work.launches + 2 * (copied > 0))
        link = Link(work, behind, self._opens, not self._opens, self._opens and self._reduces, self._is_backward)
        self.slots[-1].append(link)
        self._cost, self._opens = NO_COST, False

    def last(self, *, reduces: bool) -> Link:
        """The call behind all passes."""
        return Link(self._phases.work(self._cost, self._kind), reduces=reduces, is_backward=self._is_backward)


class Work(NamedTuple):
    """What a call of every rank does.

    Parameters
    ----------
    flops, moved_bytes : int arrays (world_size,).
    launches : kernels of element-wise work.
    products : the matrix products of each rank.
    """

    flops: IntArray
    moved_bytes: IntArray
    launches: int
    products: Sequence[tuple[Product, ...]]


@dataclass(frozen=True, eq=False)
class Link:
    """A call of every rank, and the pass behind it.

    Parameters
    ----------
    work : of the call.
    behind : the pass; None for the last call of a chain.
    opens, reads : whether it opens its layer; whether it reads the parameters of the layer that is open.
    reduces : whether it makes the last part of the gradients of a layer.
    is_backward : whether it is of the backward pass.
    """

    work: Work
    behind: AttentionPass | None = None
    opens: bool = False
    reads: bool = False
    reduces: bool = False
    is_backward: bool = False

    @property
    def steps(self) -> int:
        """The steps of the call and the pass."""
        return 1 + (0 if self.behind is None else len(self.behind.schedule.steps))


Slot = Sequence[Link]
"""The calls of a layer with the passes behind them; one of them opens the layer."""


class _Part(NamedTuple):
    """A table of blocks of the chain, with what happens to it from a step on."""

    blocks: Blocks
    task: Task
    initial: BoolArray
    final: BoolArray
    kept: BoolArray
    steps: Sequence[Step]
    begin: int


class _Chain:
    """Builds a chain: places calls and passes at steps, and blocks in tables.

    Parameters
    ----------
    slots, last : the layers, in the order in which they are computed, and the call behind the last of them.
    gathers : how the parameters of each layer are gathered, alike but for their bytes; none if each rank has them.
    reductions : how the gradients of each layer are reduced, likewise; none if they are not.
    """

    def __init__(
        self, name: str, slots: Sequence[Slot], last: Link, gathers: Sequence[Schedule], reductions: Sequence[Schedule]
    ) -> None:
        self._name, self._last = name, last
        passes = [link.behind.schedule for slot in slots for link in slot if link.behind is not None]
        self._ranks, tasks = passes[0].world_size, [each.task for each in passes]
        self._dtype = next(task.dtype for task in tasks if task is not None)
        self._lanes = max(each.lanes for each in passes)
        self._gathers, self._reductions = gathers, reductions
        self._gather, self._reduction = (each[0] if each else None for each in (gathers, reductions))
        opening = [[link.opens for link in slot].index(True) for slot in slots]
        ahead = max(sum(link.steps for link in slot[:at]) for slot, at in zip(slots, opening, strict=True))
        behind = max(sum(link.steps for link in slot[at:]) for slot, at in zip(slots, opening, strict=True))
        self._slot = max(ahead + behind, 0 if self._gather is None else len(self._gather.steps))
        self._links = [*(link for slot in slots for link in slot), last]
        self._at = self._placed(slots, opening, ahead)

    def _placed(self, slots: Sequence[Slot], opening: Sequence[int], ahead: int) -> list[int]:
        """The step of each call; those that open layers are a slot apart."""
        found: list[int] = []
        for number, (slot, at) in enumerate(zip(slots, opening, strict=True)):
            opens = (number + 1) * self._slot
            begin = opens - sum(link.steps for link in slot[:at])
            found += [begin + before for before in accumulate((link.steps for link in slot[:-1]), initial=0)]
        return [*found, (len(slots) + 1) * self._slot - ahead]

    def schedule(self) -> Schedule:
        """The schedule, proven. Raises `ScheduleError` if there are too many blocks."""
        tokens, states, passes = self._tokens(), self._states(), self._passes()
        parts = [tokens, *states.values(), *passes]
        first = dict(zip(map(id, parts), np.cumsum([0, *(len(each.blocks) for each in parts)]).tolist(), strict=False))
        check_size(self._name, self._ranks, sum(len(each.blocks) for each in parts))
        dense, calls = self._calls(tokens, states, passes, first)
        steps = ShiftedSteps(
            [each.steps for each in parts],
            [each.begin for each in parts],
            [first[id(each)] for each in parts],
            calls,
        )
        steps.keep()  # the proof, the dependencies and the shapes of calls go through them in turn
        return Schedule(
            name=self._name,
            world_size=self._ranks,
            lanes=self._lanes + sum(each.lanes for each in (self._gather, self._reduction) if each is not None),
            blocks=tables_joined([each.blocks for each in parts]),
            initial=_side_by_side([each.initial for each in parts]),
            final=_side_by_side([each.final for each in parts]),
            steps=steps,
            task=StackedTask([each.task for each in parts], [len(each.blocks) for each in parts], dense),
            kept=_side_by_side([each.kept for each in parts]),
        )

    def _tokens(self) -> _Part:
        """A block per rank that is there at the start, and one that the last call makes."""
        blocks = Blocks.of_data(np.ones(2 * self._ranks, dtype=np.int64))
        own, none = np.eye(self._ranks, dtype=np.bool_), np.zeros((self._ranks, self._ranks), dtype=np.bool_)
        initial, final = _side_by_side([own, none]), _side_by_side([none, own])
        return _Part(blocks, self._moved(blocks, initial, final), initial, final, final, (), 0)

    def _states(self) -> dict[tuple[str, int], _Part]:
        """Gathers by the link that opens a layer, reductions by the link that makes gradients."""
        found, opened = {}, -1
        for number, (link, step) in enumerate(zip(self._links, self._at, strict=True)):
            before, opened = opened, opened + link.opens
            if link.opens and self._gather is not None:
                pool = Pool("parameters", 2 * self._slot)
                blocks = replace(self._gathers[opened].blocks, kinds=(Kind("parameters", pool=pool),))
                nothing = np.zeros_like(self._gather.initial)
                steps = _on_lanes(self._gather.steps, self._lanes)
                task = self._moved(blocks, self._gather.initial, nothing)
                found["gather", number] = _Part(
                    blocks, task, self._gather.initial, nothing, nothing, steps, step - self._slot
                )
            if link.reduces and self._reduction is not None:
                blocks, final = self._reductions[before].blocks, self._reduction.final
                lanes = self._lanes + (0 if self._gather is None else self._gather.lanes)
                steps, nothing = _on_lanes(self._reduction.steps, lanes), np.zeros_like(final)
                task = self._moved(blocks, nothing, final)
                found["reduce", number] = _Part(blocks, task, nothing, final, self._reduction.left, steps, step + 1)
        return found

    def _moved(self, blocks: Blocks, initial: BoolArray, final: BoolArray) -> StatesTask:
        return StatesTask.of(blocks, self._dtype, initial, final)

    def _passes(self) -> list[_Part]:
        found = []
        for link, step in zip(self._links, self._at, strict=True):
            if link.behind is None:
                continue
            own = link.behind.schedule
            kept = own.initial | own.left
            initial = own.initial & ~link.behind.made
            final = np.zeros_like(own.final)
            assert own.task is not None, "a pass of a layer has a task"
            found.append(_Part(own.blocks, own.task, initial, final, kept, own.steps, step + 1))
        return found

    def _calls(
        self,
        tokens: _Part,
        states: dict[tuple[str, int], _Part],
        passes: Sequence[_Part],
        first: dict[int, int],
    ) -> tuple[Dense, dict[int, Step]]:
        """All calls, with what each reads and makes, and their steps."""
        sources, targets, parts, steps = list[IntArray](), list[IntArray](), list[IntArray](), dict[int, Step]()
        for number, (link, step) in enumerate(zip(self._links, self._at, strict=True)):
            read = self._read(number, tokens, states, passes)
            made = [(tokens, tokens.final)] if link.behind is None else [(passes[number], link.behind.made)]
            own = [_blocks_at(read, rank, first) for rank in range(self._ranks)]
            kernel = DENSE_BACKWARD if link.is_backward else DENSE
            params = number * self._ranks + np.arange(self._ranks)[:, None]
            steps[step] = Step.of((), [Calls(kernel, np.arange(self._ranks), (BlockLists.of(own),), params)])
            sources += own
            sums = None if link.behind is None else _initial_part(link.behind.schedule)
            for rank in range(self._ranks):
                blocks, part = self._gradients(states.get(("reduce", number)), rank, first)
                results = _blocks_at(made, rank, first)
                own_part = np.zeros_like(results) if sums is None else sums[rank, results - first[id(made[0][0])]]
                targets.append(np.concatenate([results, blocks]))
                parts.append(np.concatenate([own_part, part]))
        backward = np.repeat([each.is_backward for each in self._links], self._ranks)
        works = [each.work for each in self._links]
        flops, moved = (np.concatenate([getattr(each, name) for each in works]) for name in ("flops", "moved_bytes"))
        lists = BlockLists.of(sources), BlockLists.of(targets)
        launches = np.repeat([each.launches for each in works], self._ranks)
        table: dict[tuple[Product, ...], int] = {}
        product = np.array([table.setdefault(rank, len(table)) for each in works for rank in each.products])
        dense = Dense(*lists, flops, backward, moved, np.concatenate(parts), launches, product, tuple(table))
        return dense, steps

    def _read(
        self, number: int, tokens: _Part, states: dict[tuple[str, int], _Part], passes: Sequence[_Part]
    ) -> list[tuple[_Part, BoolArray]]:
        """What a call reads: results of the pass before it, and the parameters of the layer that is open."""
        link = self._links[number]
        read = [(tokens, tokens.initial)]
        if number:
            before = self._links[number - 1].behind
            assert before is not None, "only the last call has no pass behind it"
            read = [(passes[number - 1], before.schedule.final)]
        opened = max((each for each in range(number + 1) if self._links[each].opens), default=0)
        gathered = states.get(("gather", opened))
        if gathered is not None and (link.opens or link.reads):
            assert self._gather is not None, "parameters are gathered"
            read.append((gathered, self._gather.final))
        return read

    def _gradients(self, reduced: _Part | None, rank: int, first: dict[int, int]) -> tuple[IntArray, IntArray]:
        """The gradients that a rank makes in a call, and its part of each; none where no layer ends."""
        if reduced is None or self._reduction is None:
            none = np.zeros(0, dtype=np.int64)
            return none, none
        own, part = np.flatnonzero(self._reduction.initial[rank]), _initial_part(self._reduction)
        assert part is not None, "gradients are sums"
        return first[id(reduced)] + own, part[rank, own]


def _blocks_at(tables: Sequence[tuple[_Part, BoolArray]], rank: int, first: dict[int, int]) -> IntArray:
    """The numbers of blocks that a rank reads or makes, ascending."""
    return np.sort(np.concatenate([np.flatnonzero(table[rank]) + first[id(part)] for part, table in tables]))


def _initial_part(schedule: Schedule) -> IntArray | None:
    """The part of each block that each rank starts with, an int array (world_size, blocks); None of data."""
    part = schedule.initial_part
    return None if part is None else np.broadcast_to(part, schedule.initial.shape)


def _on_lanes(steps: Sequence[Step], lane: int) -> list[Step]:
    """Steps whose lanes begin with this one."""
    return [replace(step, lane=step.lane + lane) for step in steps]


def _side_by_side(tables: Sequence[BoolArray]) -> BoolArray:
    return np.concatenate(tables, axis=1)


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


def _of_letter(plan: StepPlan, letter: str) -> tuple[str, AttentionOptions]:
    """The schedule and the options of the layers of a letter."""
    if not is_hybrid(plan.schedule):
        return plan.schedule, plan.options
    return names_of(plan.schedule).of(letter), options_for_layer(plan.schedule, letter, plan.options)


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


def _in_groups(one: Schedule, groups: IntArray) -> AttentionPass:
    """A pass of one group, in all of them."""
    task = one.task
    assert isinstance(task, LayerTask), "a pass of a layer has a task"
    schedule = in_groups(one, groups)
    assert schedule.task is not None, "a pass of a layer has a task"
    made = schedule.task.contract.inputs(schedule.world_size)
    return AttentionPass(schedule, made, len(groups) * _flops(task), task.layout)


def _flops(task: LayerTask) -> int:
    if isinstance(task, AttentionTask):
        return task.total_flops
    return least_flops(task) if isinstance(task, LinearTask) else 0
