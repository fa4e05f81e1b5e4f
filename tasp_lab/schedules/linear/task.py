"""Linear attention as a task: what kernel calls read and yield.

Per KV head, position i has the state ``S_i = diag(a_i) S_(i-1) + k_i v_i^T`` and the output ``o_i = q_i^T S_i``. The
decays a_i are 1, constant, or depend on the data: ``exp`` of *gates*. At the start of a document a_i is 0. With a full
mask, without decay, S_i is the sum over all positions. Chunks, parts and pieces: `tasp_lab.schedules.linear.chunks`.

Results of chunk r are computed within the chunk (``attend``), and from the prefix state (``apply_state``), which is
made of the states of other chunks (``make_state``): all at once (``fold``), or from chunk to chunk (``advance``).
``combine`` makes the state of a segment from those of two that lie side by side, ``S = S_2 + D_2 S_1`` with its total
decay ``D = D_1 D_2``; a fold takes segments as it takes chunks. So a prefix state is made of each chunk exactly once.
Backward, ``differentiate`` is the vector-Jacobian product of both; the gradients of states take the same ways in
reverse (``make_gradient_state``, ``fold_back``, ``retreat``, ``combine_back``) up to the keys
(``apply_gradient_state``). This is local: with weights ``exp(G_i - G_j)`` of the cumulated gates G, even the gradient
of a gate needs, besides its chunk, only the prefix state and the suffix gradient.

Without gates the parts of results may also be computed from the keys of other chunks, by two products of positions
(``attend``, ``differentiate_tile``) or through their state (``attend_by_state``, ``differentiate_by_state``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray, first_true
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Pool
from tasp_lab.schedule.calls import BlockLists, Calls, Contract, Effects, Passing, Task, check_blocks, ranges
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.linear.chunks import CHUNK_GRADIENTS as CHUNK_GRADIENTS
from tasp_lab.schedules.linear.chunks import CHUNK_STATES as CHUNK_STATES
from tasp_lab.schedules.linear.chunks import GATE_GRADIENTS as GATE_GRADIENTS
from tasp_lab.schedules.linear.chunks import GATES as GATES
from tasp_lab.schedules.linear.chunks import KEY_GRADIENTS as KEY_GRADIENTS
from tasp_lab.schedules.linear.chunks import KEYS as KEYS
from tasp_lab.schedules.linear.chunks import PREFIX_STATES as PREFIX_STATES
from tasp_lab.schedules.linear.chunks import QUERIES as QUERIES
from tasp_lab.schedules.linear.chunks import QUERY_GRADIENTS as QUERY_GRADIENTS
from tasp_lab.schedules.linear.chunks import RESULTS as RESULTS
from tasp_lab.schedules.linear.chunks import STATES as STATES
from tasp_lab.schedules.linear.chunks import SUFFIX_GRADIENTS as SUFFIX_GRADIENTS
from tasp_lab.schedules.linear.chunks import TENSORS as TENSORS
from tasp_lab.schedules.linear.chunks import LinearBlocks
from tasp_lab.schedules.linear.flops import FlopCounts
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.kernel_shapes import ShapeRows
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, contiguous

MAKE_STATE, ATTEND, ATTEND_BY_STATE = "make_state", "attend", "attend_by_state"
FOLD, ADVANCE, APPLY_STATE = "fold", "advance", "apply_state"
MAKE_GRADIENT_STATE, DIFFERENTIATE = "make_gradient_state", "differentiate"
DIFFERENTIATE_TILE, DIFFERENTIATE_BY_STATE = "differentiate_tile", "differentiate_by_state"
FOLD_BACK, RETREAT, APPLY_GRADIENT_STATE = "fold_back", "retreat", "apply_gradient_state"
COMBINE, COMBINE_BACK = "combine", "combine_back"
"""Names of kernels."""

CHAIN_LANE = 1
"""The compute lane of chains and of ``combine``, small calls that do not wait for the attention within chunks."""

_OPERANDS: Mapping[Passing, Mapping[str, tuple[int, ...]]] = {
    "forward": {
        MAKE_STATE: (KEYS, GATES),
        ATTEND: (QUERIES, KEYS, GATES),
        ATTEND_BY_STATE: (QUERIES, KEYS),
        FOLD: (CHUNK_STATES,),
        ADVANCE: (PREFIX_STATES, CHUNK_STATES),
        COMBINE: (CHUNK_STATES, CHUNK_STATES),
        APPLY_STATE: (QUERIES, PREFIX_STATES, GATES),
    },
    "backward": {
        MAKE_GRADIENT_STATE: (QUERIES, GATES),
        DIFFERENTIATE: (QUERIES, KEYS, PREFIX_STATES, GATES),
        DIFFERENTIATE_TILE: (QUERIES, KEYS),
        DIFFERENTIATE_BY_STATE: (QUERIES, KEYS),
        FOLD_BACK: (CHUNK_GRADIENTS,),
        RETREAT: (SUFFIX_GRADIENTS, CHUNK_GRADIENTS),
        COMBINE_BACK: (CHUNK_GRADIENTS, CHUNK_GRADIENTS),
        APPLY_GRADIENT_STATE: (KEYS, SUFFIX_GRADIENTS, PREFIX_STATES, GATES),
    },
}
"""The tensors that kernels read; gates only if there are any, and for them ``apply_gradient_state`` prefix states."""

BACKWARD = tuple(_OPERANDS["backward"])
"""The kernels of backward passes."""

_TILES = (ATTEND, ATTEND_BY_STATE, DIFFERENTIATE_TILE, DIFFERENTIATE_BY_STATE)
_BY_STATE = (ATTEND_BY_STATE, DIFFERENTIATE_BY_STATE)


class States(NamedTuple):
    """The tensors and kernels of the states of a pass: forward from the first chunk on, backward from the last one.

    A chain goes `ahead` by so many chunks.
    """

    chunk: int
    summed: int
    make: str
    within: str
    fold: str
    chain: str
    combine: str
    apply: str
    ahead: int


_STATES = {
    "forward": States(CHUNK_STATES, PREFIX_STATES, MAKE_STATE, ATTEND, FOLD, ADVANCE, COMBINE, APPLY_STATE, 1),
    "backward": States(CHUNK_GRADIENTS, SUFFIX_GRADIENTS, MAKE_GRADIENT_STATE, DIFFERENTIATE, FOLD_BACK, RETREAT,
                       COMBINE_BACK, APPLY_GRADIENT_STATE, -1),
}  # fmt: skip


@dataclass(frozen=True)
class LinearTask(LinearBlocks):
    """What the calls of a layer compute; parameters are those of `LinearBlocks`."""

    # -- states -------------------------------------------------------------------------------------------------------
    @property
    def states(self) -> States:
        """The tensors and kernels of the states of the pass."""
        return _STATES[self.passing]

    @property
    def receives(self) -> BoolArray:
        """Whether a sum of states of others is applied to each chunk."""
        return self.has_suffix if self.is_backward else self.has_prefix

    @property
    def receivers(self) -> IntArray:
        """The chunks that need the state of another one, in ascending order."""
        return np.flatnonzero(self.receives)

    @property
    def makers(self) -> IntArray:
        """The chunks whose states others need, ascending."""
        return np.flatnonzero(self.has_prefix if self.is_backward else self.has_suffix)

    # -- calls --------------------------------------------------------------------------------------------------------
    def operands(self, kernel: str) -> tuple[int, ...]:
        """The tensors of the operands of a kernel. Raises `ScheduleError` for an unknown one."""
        if kernel not in self.kernels:
            raise ScheduleError(f"unknown kernel {kernel!r}, expected one of {', '.join(self.kernels)}")
        unread = () if self.has_gates else (GATES, *([PREFIX_STATES] if kernel == APPLY_GRADIENT_STATE else []))
        return tuple(each for each in _OPERANDS[self.passing][kernel] if each not in unread)

    def calls(self, kernel: str, chunks: IntArray) -> Calls:
        """A call for each of these chunks, at its owner: ``attend`` within it, folds of all others.

        For those of chains see `chain`. Blocks must have all heads.
        """
        assert self.head_groups == 1, "calls of groups of heads are made from those of all heads"
        if kernel == self.states.fold:
            call, other = self.others(chunks, back=self.is_backward)
            lists = self._pieces(self.states.chunk, call, other, np.zeros_like(call), len(chunks))
            return Calls(kernel, self.owner[chunks], (lists,), chunks[:, None])
        if kernel in _TILES:
            return self.tiles(kernel, chunks, chunks, self.owner[chunks])
        operands = self._of_chunk(kernel, chunks, np.zeros_like(chunks))
        return Calls(kernel, self.owner[chunks], operands, np.zeros((len(chunks), 0), dtype=np.int64))

    def tiles(self, kernel: str, query: IntArray, key: IntArray, rank: IntArray) -> Calls:
        """A call for the queries and keys of each pair of chunks, at a rank."""
        operands = self._of_tile(kernel, query, key, np.zeros_like(query))
        return Calls(kernel, rank, operands, (self.start[query] - self.start[key])[:, None])

    def chain(self, kernel: str, chunk: IntArray, piece: IntArray) -> Calls:
        """``advance`` or ``retreat`` of a piece of each of these chunks, at its owner."""
        operands = self._of_chain(kernel, chunk, piece, np.zeros_like(chunk))
        return Calls(kernel, self.owner[chunk], operands, np.zeros((len(chunk), 0), dtype=np.int64), CHAIN_LANE)

    def _one(self, tensor: int, chunk: IntArray, group: IntArray) -> BlockLists:
        return BlockLists.of_sizes(np.ones_like(chunk), self.block(tensor, chunk, 0, group))

    def _pieces(self, tensor: int, call: IntArray, chunk: IntArray, group: IntArray, count: int) -> BlockLists:
        """All pieces of chunks or segments, for each of `count` calls those that belong to it; `call` is ascending."""
        sizes = np.bincount(call, minlength=count) * self.pieces
        blocks = self.block(tensor, chunk[:, None], np.arange(self.pieces), group[:, None])
        return BlockLists.of_sizes(sizes, blocks.ravel())

    def _of_chunk(self, kernel: str, chunk: IntArray, group: IntArray) -> tuple[BlockLists, ...]:
        """The operands of calls of one chunk each: states in all pieces, none that the chunk does not have."""
        found = []
        for tensor in self.operands(kernel):
            if tensor in (PREFIX_STATES, SUFFIX_GRADIENTS):
                has = (self.has_prefix if tensor == PREFIX_STATES else self.has_suffix)[chunk]
                call = np.flatnonzero(has)
                found.append(self._pieces(tensor, call, chunk[call], group[call], len(chunk)))
            else:
                found.append(self._one(tensor, chunk, group))
        return tuple(found)

    def _of_tile(self, kernel: str, query: IntArray, key: IntArray, group: IntArray) -> tuple[BlockLists, ...]:
        return tuple(self._one(tensor, key if tensor == KEYS else query, group) for tensor in self.operands(kernel))

    def _of_chain(self, kernel: str, chunk: IntArray, piece: IntArray, group: IntArray) -> tuple[BlockLists, ...]:
        """The piece of the sum that the chunk has, if it goes on through the chunk, and that of the chunk itself."""
        summed, own = self.operands(kernel)
        goes_on = self._goes_through[chunk]
        call = np.flatnonzero(goes_on)
        return (
            BlockLists.of_sizes(goes_on.astype(np.int64), self.block(summed, chunk[call], piece[call], group[call])),
            BlockLists.of_sizes(np.ones_like(chunk), self.block(own, chunk, piece, group)),
        )

    @property
    def _goes_through(self) -> BoolArray:
        """Whether the document before each chunk goes on behind it."""
        beyond: IntArray = np.minimum(np.arange(len(self.owner)) + 1, len(self.owner) - 1)
        found: BoolArray = self.has_suffix & (self.first[beyond] < np.arange(len(self.owner)))
        return found

    # -- the task -----------------------------------------------------------------------------------------------------
    @property
    def dtype(self) -> str:
        return self.workload.dtype

    @property
    def passing(self) -> Passing:
        return "backward" if self.is_backward else "forward"

    @property
    def kernels(self) -> Mapping[str, Passing]:
        """The kernels of the pass."""
        return dict.fromkeys(_OPERANDS[self.passing], self.passing)

    @property
    def content(self) -> tuple[object, ...]:
        cut = self.pieces, self.head_groups, self.segments
        return "linear", self.workload, self.layout, self.decays, self.gradient_dtype, *cut

    @cached_property
    def contract(self) -> Contract:
        """Ranks start with queries, keys and gates of their chunks, and end with what these yield.

        A forward pass leaves keys, gates and prefix states. Sums of states start empty.
        """
        saved = np.isin(self.tensor, (KEYS, GATES, PREFIX_STATES)) & self.is_backward
        inputs = np.isin(self.tensor, (KEYS, QUERIES, GATES)) | saved
        outputs = np.isin(self.tensor, (RESULTS, KEY_GRADIENTS, QUERY_GRADIENTS, GATE_GRADIENTS))
        found = Contract.of(self.owner[self.chunk], inputs, outputs, saved)
        return found._replace(owner=np.where(np.isin(self.tensor, STATES), -1, found.owner))  # no tensors of the caller

    def saved(self, forward: Task) -> tuple[IntArray, IntArray]:
        """The blocks that a backward pass has from its forward pass, keys, gates and states; and these blocks there."""
        none = np.zeros(0, dtype=np.int64)
        if not self.is_backward or not isinstance(forward, LinearTask):
            return none, none
        same = (self.workload, self.layout, self.decays, self.head_groups)
        if same != (forward.workload, forward.layout, forward.decays, forward.head_groups):
            return none, none
        alike = (KEYS, GATES, PREFIX_STATES) if self.pieces == forward.pieces else (KEYS, GATES)
        own = np.flatnonzero(np.isin(self.tensor, alike))
        return own, forward.block(self.tensor[own], self.chunk[own], self.piece[own], self.group[own])

    def check(self, blocks: Blocks) -> None:
        """Raise `ScheduleError` unless these are the blocks of the task, up to their pools."""
        check_blocks(blocks, self.blocks(), bound=True)

    @cached_property
    def _counts(self) -> FlopCounts:
        return FlopCounts(self)

    def flops(self, calls: Calls) -> IntArray:
        """The FLOPs of each call, see `tasp_lab.schedules.linear.flops`."""
        if calls.kernel in (self.states.fold, self.states.chain, self.states.combine):
            states = np.sum([each.sizes for each in calls.operands], axis=0)
            return self._counts.of_states(states)
        chunks = [self.chunk[each.first] for each in calls.operands[:2]]
        if calls.kernel in _TILES:
            return self._counts.of_tiles(calls.kernel, chunks[0], chunks[1])
        return self._counts.of_chunks(calls.kernel, chunks[0])

    def shapes(self, calls: Calls) -> ShapeRows:
        """The shape of each call, of a group of heads; a call on states has pieces of them and no positions."""
        layer, groups = self.workload, self.head_groups * (self.pieces if calls.kernel == self.states.chain else 1)
        queries, keys, is_causal = self._positions(calls)
        return ShapeRows.of(
            "linear",
            self.flops(calls),
            batch=layer.batch,
            heads=layer.heads // groups,
            kv_heads=layer.kv_head_count // groups,
            head_dim=layer.head_dim,
            value_dim=layer.value_dim or 0,
            queries=queries,
            keys=keys,
            low=np.where(is_causal, 0, np.minimum(1 - keys, 0)),
            high=np.maximum(queries - 1, 0),
        )

    def _positions(self, calls: Calls) -> tuple[IntArray, IntArray, BoolArray]:
        """The positions of the queries and of the keys of each call, and whether later keys are masked."""
        firsts = {tensor: each.first for tensor, each in zip(self.operands(calls.kernel), calls.operands, strict=True)}
        query, key = (self.chunk[firsts[each]] if each in firsts else None for each in (QUERIES, KEYS))
        nothing = np.zeros(len(calls), dtype=np.int64)
        queries = nothing if query is None else self._counts.leading[query]
        keys = nothing if key is None else self._counts.trailing[key]
        if query is None or key is None:
            return queries, keys, nothing > 0
        own = query == key
        return (
            np.where(own, self.count[query], queries),
            np.where(own, self.count[key], keys),
            own & (not self.is_full),
        )

    # -- effects ------------------------------------------------------------------------------------------------------
    def effects(self, calls: Calls) -> Effects:
        """The parts that calls yield. Raises `ScheduleError` for what the layer does not require."""
        kernel, states = calls.kernel, self.states
        tensors, params = self.operands(kernel), int(kernel in _TILES or kernel == states.fold)
        if len(calls.operands) != len(tensors) or calls.params.shape[1] != params:
            names = " and ".join(TENSORS[each] for each in tensors)
            raise ScheduleError(f"{kernel} takes {names}, and {params} parameters")
        main = len(tensors) - 1 if kernel == states.chain else 0
        first = calls.operands[main].first
        self._refuse(calls, (first < 0) | (self.tensor[first] != tensors[main]), f"without {TENSORS[tensors[main]]}")
        chunk, group = self.chunk[first], self.group[first]
        if kernel == states.fold:
            return self._folded(calls, group)
        if kernel == states.combine:
            return self._combined(calls, group)
        if kernel == states.chain:
            return self._chained(calls, chunk, self.piece[first], group)
        if kernel in _TILES:
            return self._tiled(calls, chunk, group)
        return self._of_one_chunk(calls, chunk, group)

    def _of_one_chunk(self, calls: Calls, chunk: IntArray, group: IntArray) -> Effects:
        kernel, states = calls.kernel, self.states
        if kernel == states.apply:
            self._refuse(calls, ~self.receives[chunk], "of a chunk that has no such state")
        self._check_operands(calls, self._of_chunk(kernel, chunk, group))
        if kernel == states.make:
            return self._made(states.chunk, chunk, group)
        other = self.others(chunk, back=kernel == APPLY_GRADIENT_STATE)
        if kernel == APPLY_STATE:
            return self._parts(RESULTS, chunk, group, *other)
        if kernel == APPLY_GRADIENT_STATE:
            return _all([self._parts(KEY_GRADIENTS, chunk, group, *other), *self._of_gates(chunk, group, 1)])
        own = np.arange(len(chunk)), chunk
        queries = (self._parts(QUERY_GRADIENTS, chunk, group, *each) for each in (other, own))
        return _all([*queries, self._parts(KEY_GRADIENTS, chunk, group, *own), *self._of_gates(chunk, group, 0)])

    def _tiled(self, calls: Calls, query: IntArray, group: IntArray) -> Effects:
        keys = calls.operands[1].first
        self._refuse(calls, (keys < 0) | (self.tensor[keys] != KEYS), f"without {TENSORS[KEYS]}")
        key = self.chunk[keys]
        self._check_operands(calls, self._of_tile(calls.kernel, query, key, group))
        unseen = (key < self.first[query]) | ((key > query) & (not self.is_full))
        self._refuse(calls, unseen, "of keys that it does not attend to")
        inside = query == key
        if self.has_gates:
            self._refuse(calls, ~inside, "over gates of other chunks")
        if calls.kernel in _BY_STATE and not self.is_full:
            self._refuse(calls, inside, "within a chunk, under a causal mask")
        distance = self.start[query] - self.start[key]
        self._refuse(calls, calls.params[:, 0] != distance, "over a distance that is not that of the blocks")
        call = np.arange(len(calls))
        if not self.is_backward:
            return self._parts(RESULTS, query, group, call, key)
        keys_of = self._parts(KEY_GRADIENTS, key, group, call, query)
        return _all([self._parts(QUERY_GRADIENTS, query, group, call, key), keys_of])

    def _folded(self, calls: Calls, group: IntArray) -> Effects:
        """The effects of a fold of all pieces of segments next to its target; with a full mask of any other chunks."""
        (states,), target, back = calls.operands, calls.params[:, 0], self.is_backward
        unknown = (target < 0) | (target >= len(self.owner))
        unknown[~unknown] = ~self.receives[target[~unknown]]
        self._refuse(calls, unknown, "to a chunk that has no such state")
        listed = states.block[:: self.pieces] if not (states.sizes % self.pieces).any() else states.block[:0]
        of_segment = states.owner[:: self.pieces][: len(listed)]
        segment = self.segment[listed]
        expected = self._pieces(self.states.chunk, of_segment, segment, group[of_segment], len(calls))
        self._check_operands(calls, (expected,))
        place, chunk = ranges(*(each[segment] for each in self.segment_range))
        call = of_segment[place]
        known, other = self.others(target, back=back)
        pairs = call * len(self.owner) + chunk
        wrong = ~np.isin(pairs, known * len(self.owner) + other)
        again = (call[1:] == call[:-1]) & (chunk[1:] <= chunk[:-1])
        wrong[1:] |= again
        if not self.is_full:
            wrong[1:] |= (call[1:] == call[:-1]) & (chunk[1:] != chunk[:-1] + 1)
            every = np.arange(len(calls))
            at = np.searchsorted(call, every) if back else np.searchsorted(call, every, side="right") - 1
            wrong[at] |= chunk[at] != target + (1 if back else -1)
        self._refuse(calls, np.bincount(call, wrong, len(calls)) > 0, "of chunks with others in between")
        return self._parts(self.states.summed, target, group, call, chunk)

    def _combined(self, calls: Calls, group: IntArray) -> Effects:
        """The whole state of a segment, from those of two; that which the pass comes to first is the first operand."""
        second, tensor = calls.operands[1].first, self.states.chunk
        self._refuse(calls, (second < 0) | (self.tensor[second] != tensor), f"without two {TENSORS[tensor]}")
        both = [self.segment[each.first] for each in calls.operands]
        every = np.arange(len(calls))
        self._check_operands(calls, tuple(self._pieces(tensor, every, each, group, len(calls)) for each in both))
        left, right = reversed(both) if self.is_backward else both
        first, end = self.segment_range
        apart = end[left] != first[right]
        whole = np.array([self.segment_of.get(each, -1) for each in zip(first[left].tolist(), end[right].tolist(),
                                                                         strict=True)])  # fmt: skip
        self._refuse(calls, apart | (whole < 0), "that are not the halves of a segment")
        return self._made(tensor, whole, group)

    def _chained(self, calls: Calls, chunk: IntArray, piece: IntArray, group: IntArray) -> Effects:
        kernel, target = calls.kernel, chunk + self.states.ahead
        if self.is_full:
            raise ScheduleError(f"{kernel} with a full mask, expected a causal mask")
        self._refuse(calls, ~np.isin(chunk, self.makers), "to a chunk that has no such state")
        self._check_operands(calls, self._of_chain(kernel, chunk, piece, group))
        call, other = self.others(target, back=self.is_backward)
        return self._parts(self.states.summed, target, group, call, other, piece)

    def _check_operands(self, calls: Calls, expected: tuple[BlockLists, ...]) -> None:
        for operand, wanted in zip(calls.operands, expected, strict=True):
            wrong = operand.sizes != wanted.sizes
            if not wrong.any():
                wrong = np.bincount(operand.owner, operand.block != wanted.block, len(calls)) > 0
            self._refuse(
                calls, wrong, f"where {[each[int(wrong.argmax())].tolist() for each in expected]} are expected"
            )

    def _made(self, tensor: int, segment: IntArray, group: IntArray) -> Effects:
        """All pieces of a state of each segment, which have one part."""
        call = np.arange(len(segment)).repeat(self.pieces)
        pieces = np.tile(np.arange(self.pieces), len(segment))
        return Effects(call, self.block(tensor, segment[call], pieces, group[call]), np.zeros_like(call))

    def _of_gates(self, chunk: IntArray, group: IntArray, part: int) -> list[Effects]:
        if not self.has_gates:
            return []
        return [Effects(np.arange(len(chunk)), self.block(GATE_GRADIENTS, chunk, 0, group), np.full_like(chunk, part))]

    def _parts(
        self,
        tensor: int,
        chunk: IntArray,
        group: IntArray,
        call: IntArray,
        other: IntArray,
        piece: IntArray | None = None,
    ) -> Effects:
        """Parts of other chunks of the sum of each call's chunk: of a state in its piece, or in all pieces."""
        part = other - self.first_part[tensor, chunk[call]]
        if tensor not in (PREFIX_STATES, SUFFIX_GRADIENTS):
            return Effects(call, self.block(tensor, chunk[call], 0, group[call]), part)
        if piece is not None:
            return Effects(call, self.block(tensor, chunk[call], piece[call], group[call]), part)
        blocks = self.block(tensor, chunk[call][:, None], np.arange(self.pieces), group[call][:, None])
        return Effects(call.repeat(self.pieces), blocks.ravel(), part.repeat(self.pieces))

    def _refuse(self, calls: Calls, wrong: BoolArray, what: str) -> None:
        if (at := first_true(wrong)) is not None:
            blocks = [each[at].tolist() for each in calls.operands]
            raise ScheduleError(f"rank {calls.rank[at]}: {calls.kernel} of blocks {blocks} {what}")


def _all(effects: list[Effects]) -> Effects:
    return Effects(*(np.concatenate(column) for column in zip(*effects, strict=True)))


# What the schedules of linear attention share: their layout, and how their states end at their owners.


def chunk_layout(workload: Workload, world_size: int) -> SequenceLayout:
    """One chunk per rank, also of packed documents: those are told apart by the kernels."""
    return contiguous(workload.sequence, world_size)


def layer_schedule(
    name: str,
    topology: Topology,
    task: LinearTask,
    steps: Sequence[Step],
    *,
    lanes: int = 1,
    pools: Mapping[int, Pool] | None = None,
    kept: BoolArray | None = None,
    has_states: bool = True,
) -> Schedule:
    """The schedule in which each rank starts with its queries, keys and gates and ends with what they yield.

    Parameters
    ----------
    pools : by tensor, what circulates.
    kept : bool array (world_size, blocks), copies that are left in the end.
    has_states : whether sums of states are left at their owners, and backward prefix states are there from the start.

    Raises `ScheduleError` if a transfer has no route.
    """
    initial = task.owned(KEYS, QUERIES, GATES)
    left = np.zeros_like(initial) if kept is None else kept
    if has_states:
        left = left | task.owned(task.states.summed)
        initial |= task.owned(PREFIX_STATES) & task.is_backward
    return Schedule(
        name=name,
        world_size=topology.world_size,
        lanes=lanes,
        blocks=task.blocks(pools),
        initial=initial,
        final=task.owned(RESULTS, KEY_GRADIENTS, QUERY_GRADIENTS, GATE_GRADIENTS),
        steps=steps,
        task=task,
        kept=left,
    ).on(topology)
