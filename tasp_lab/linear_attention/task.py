"""Causal linear attention with one decay per head as a task, in chunks of consecutive positions.

The output of position i is the sum over positions j <= i of ``decay ** (i - j) * (q_i . k_j) * v_j``. Each span of the
layout is a **chunk**; chunks are numbered by position. What chunk j contributes to the output of chunk r is part j of
these results. There are two ways to compute it:

- ``attend``: from the queries of chunk r and the keys and values of chunk j, parameter: the number of positions from
  the first key to the first query.
- From states. ``make_state`` makes the state of chunk j, the sum of ``decay ** (last - i) * k_i v_i``, and the chunk's
  total decay. ``fold`` reads the states of chunks j to r - 1, parameter r, and adds parts j to r - 1 to the prefix
  state of chunk r, each decayed by the chunks behind it. ``apply_state`` reads the queries and the prefix state of
  chunk r and adds parts 0 to r - 1.

States are in float32, ``head_dim x head_dim`` elements per KV head: their size does not depend on the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Field, Join, Kind, Pool
from tasp_lab.schedule.calls import BlockLists, Calls, Effects, Passing, Task, check_blocks, ranges
from tasp_lab.workload.kernel_calls import pairs_in_band
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, Span

KEYS, QUERIES, RESULTS, CHUNK_STATES, PREFIX_STATES = range(5)
"""Tensors of blocks: keys with values, queries, results, states of single chunks, and of all chunks before one."""

TENSORS = ("keys", "queries", "results", "chunk states", "prefix states")
"""Names of kinds."""

MAKE_STATE, ATTEND, FOLD, APPLY_STATE = "make_state", "attend", "fold", "apply_state"
"""Names of kernels."""

_OPERANDS = {
    MAKE_STATE: (KEYS,),
    ATTEND: (QUERIES, KEYS),
    FOLD: (CHUNK_STATES,),
    APPLY_STATE: (QUERIES, PREFIX_STATES),
}
_PARAMS = {MAKE_STATE: 0, ATTEND: 1, FOLD: 1, APPLY_STATE: 0}


@dataclass(frozen=True)
class LinearTask:
    """The blocks of a layer of linear attention.

    Parameters
    ----------
    workload, layout : the layer, and the distribution of its positions over ranks.
    decay : the decay per position of each KV head, more than 0 and at most 1.
    head_groups : every block is of one of so many equal groups of heads.

    Raises `ScheduleError` unless the layer is causal, without window and documents, and the spans are consecutive
    positions.
    """

    workload: Workload
    layout: SequenceLayout
    decay: tuple[float, ...]
    head_groups: int = 1

    def __post_init__(self) -> None:
        layer, heads = self.workload, self.workload.kv_head_count
        if layer.mask != "causal" or layer.keys_seen is not None or len(layer.document_starts) > 1:
            raise ScheduleError("linear attention has a causal mask, without a window and without packed documents")
        if len(self.decay) != heads or not all(0 < each <= 1 for each in self.decay):
            raise ScheduleError(f"decay {self.decay}, expected {heads} numbers above 0 and up to 1, one per KV head")
        if self.head_groups < 1 or heads % self.head_groups:
            raise ScheduleError(f"{heads} KV heads in {self.head_groups} groups, expected groups of equal size")
        if self.layout.sequence != layer.sequence or self.layout.stride != 1:
            raise ScheduleError(
                f"layout {self.layout.name!r} of {self.layout.sequence} positions, expected spans of consecutive "
                f"positions, {layer.sequence} in all"
            )

    @cached_property
    def _chunks(self) -> tuple[IntArray, IntArray, IntArray]:
        spans: list[tuple[Span, int]] = [(span, rank) for rank, each in enumerate(self.layout.spans) for span in each]
        rows = np.array([(rank, span.start, span.count) for span, rank in sorted(spans)], dtype=np.int64)
        return rows[:, 0], rows[:, 1], rows[:, 2]

    @property
    def owner(self) -> IntArray:
        """The rank of each chunk, int array (chunks,)."""
        return self._chunks[0]

    @property
    def start(self) -> IntArray:
        """The first position of each chunk."""
        return self._chunks[1]

    @property
    def count(self) -> IntArray:
        """The number of positions of each chunk."""
        return self._chunks[2]

    def block(self, tensor: int, chunk: IntArray, group: IntArray | int = 0) -> IntArray:
        """The block of a tensor of each of these chunks and groups of heads. Chunk 0 has no prefix state."""
        return group * self._group_blocks + tensor * len(self.owner) + chunk - (tensor == PREFIX_STATES)

    @property
    def _group_blocks(self) -> int:
        """The number of blocks of each group of heads."""
        return len(TENSORS) * len(self.owner) - 1

    @cached_property
    def tensor(self) -> IntArray:
        """The tensor of each block."""
        chunks = len(self.owner)
        tensors = np.repeat(np.arange(len(TENSORS)), [chunks] * PREFIX_STATES + [chunks - 1])
        return np.tile(tensors, self.head_groups)

    @cached_property
    def chunk(self) -> IntArray:
        """The chunk of each block."""
        chunks = np.arange(len(self.owner))
        return np.tile(np.concatenate([*[chunks] * PREFIX_STATES, chunks[1:]]), self.head_groups)

    @cached_property
    def group(self) -> IntArray:
        """The group of heads of each block."""
        return np.arange(self.head_groups).repeat(self._group_blocks)

    def in_head_groups(self, groups: int) -> tuple[LinearTask, IntArray]:
        """The task with the heads of each block cut into equal groups; also their blocks, an array (blocks, groups).

        Raises `ScheduleError` unless the groups have equally many KV heads.
        """
        group = self.group[:, None] * groups + np.arange(groups)
        number = group * self._group_blocks + (np.arange(len(self.group)) % self._group_blocks)[:, None]
        return replace(self, head_groups=self.head_groups * groups), number

    def heads_of(self, block: int, tensor: int) -> tuple[int, int]:
        """The first of the heads that a tensor has in the group of a block, and their end: KV heads but of queries."""
        heads = self.workload.heads if tensor in (QUERIES, RESULTS) else self.workload.kv_head_count
        width = heads // self.head_groups
        return int(self.group[block]) * width, int(self.group[block] + 1) * width

    @property
    def parts(self) -> IntArray:
        """The number of parts of each block: r + 1 of the results of chunk r, r of its prefix state, else 1."""
        return np.select([self.tensor == RESULTS, self.tensor == PREFIX_STATES], [self.chunk + 1, self.chunk], 1)

    def existing_parts(self, blocks: IntArray) -> BoolArray:
        """Which parts of these blocks exist: all that are counted."""
        parts = self.parts[blocks]
        found: BoolArray = np.arange(parts.max(initial=1)) < parts[:, None]
        return found

    def blocks(self, pools: Mapping[int, Pool]) -> Blocks:
        """The blocks of a schedule of this task; `pools` by tensor."""
        joins: Mapping[int, Join] = {RESULTS: "add", PREFIX_STATES: "add"}
        kinds = [
            Kind(name, joins.get(each, ""), pools.get(each), self.fields_of(each), each in (KEYS, QUERIES, RESULTS))
            for each, name in enumerate(TENSORS)
        ]
        return Blocks(kinds, self.tensor.copy(), self.block_bytes, self.parts)

    @cached_property
    def block_bytes(self) -> IntArray:
        """The size of each block, int array (blocks,)."""
        sizes = np.zeros(len(self.tensor), dtype=np.int64)
        for tensor in range(len(TENSORS)):
            own = self.tensor == tensor
            for each in self.fields_of(tensor):
                positions = self.count[self.chunk[own]] if each.per_position else 1
                sizes[own] += each.size_bytes * positions
        return sizes

    def check(self, sizes_bytes: IntArray, parts: IntArray) -> None:
        """Raise `ScheduleError` unless blocks have these sizes and numbers of parts."""
        check_blocks(sizes_bytes, parts, self.block_bytes, self.parts)

    def fields_of(self, tensor: int) -> tuple[Field, ...]:
        """The tensors of a block."""
        layer, kv_heads = self.workload, self.workload.kv_head_count // self.head_groups
        heads = layer.heads // self.head_groups
        keys, queries = ((layer.batch, each, layer.head_dim) for each in (kv_heads, heads))
        state = Field("state", "fp32", (layer.batch, kv_heads, layer.head_dim, layer.head_dim), per_position=False)
        return {
            KEYS: (Field("k", layer.dtype, keys), Field("v", layer.dtype, keys)),
            QUERIES: (Field("q", layer.dtype, queries),),
            RESULTS: (Field("out", "fp32", queries),),
            CHUNK_STATES: (state, Field("decay", "fp32", (kv_heads,), per_position=False)),
            PREFIX_STATES: (state,),
        }[tensor]

    def owned(self, *tensors: int) -> BoolArray:
        """Bool array (world_size, blocks): the owner of each block of these tensors."""
        held = np.zeros((self.layout.world_size, len(self.tensor)), dtype=np.bool_)
        blocks = np.flatnonzero(np.isin(self.tensor, tensors))
        held[self.owner[self.chunk[blocks]], blocks] = True
        return held

    def calls(self, kernel: str, chunks: IntArray) -> Calls:
        """A call for each of these chunks at its owner: ``attend`` within it, ``fold`` of all chunks before it.

        Blocks must have all heads.
        """
        assert self.head_groups == 1, "calls of groups of heads are made from those of all heads"
        if kernel == FOLD:
            call, before = ranges(np.zeros_like(chunks), chunks)
            operands = [BlockLists.of_sizes(np.bincount(call, minlength=len(chunks)), self.block(CHUNK_STATES, before))]
        else:
            ones = np.ones_like(chunks)
            operands = [BlockLists.of_sizes(ones, self.block(tensor, chunks)) for tensor in _OPERANDS[kernel]]
        params = chunks[:, None] if kernel == FOLD else np.zeros((len(chunks), _PARAMS[kernel]), dtype=np.int64)
        return Calls(kernel, self.owner[chunks], tuple(operands), params)

    @property
    def dtype(self) -> str:
        return self.workload.dtype

    @property
    def passing(self) -> Passing:
        return "forward"

    @property
    def kernels(self) -> Mapping[str, Passing]:
        """All kernels."""
        return dict.fromkeys(_OPERANDS, self.passing)

    def inputs(self) -> BoolArray:
        """What each rank makes of the layer before, its keys and queries: bool array (world_size, blocks)."""
        return self.owned(KEYS, QUERIES)

    def saved(self, forward: Task) -> tuple[IntArray, IntArray]:
        """The blocks that a pass has from its forward pass, and these blocks there: none, as it is forward."""
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)

    @property
    def content(self) -> tuple[object, ...]:
        return "linear", self.workload, self.layout, self.decay, self.head_groups

    def effects(self, calls: Calls) -> Effects:
        """The parts that calls yield, see the module. Raises `ScheduleError` for what the layer does not require."""
        operands = self._operands(calls)
        chunks, group = [self.chunk[each.first] for each in operands], self.group[operands[0].first]
        call = np.arange(len(calls))
        if calls.kernel == MAKE_STATE:
            return Effects(call, self.block(CHUNK_STATES, chunks[0], group), np.zeros_like(call))
        if calls.kernel == ATTEND:
            query, key = chunks
            self._refuse(calls, query < key, "to keys behind the queries")
            ahead = self.start[query] - self.start[key]
            self._refuse(calls, calls.params[:, 0] != ahead, "over a distance that is not that of the blocks")
            return Effects(call, self.block(RESULTS, query, group), key)
        if calls.kernel == FOLD:
            return self._folded(calls, group)
        query, state = chunks
        self._refuse(calls, query != state, "of another chunk")
        call, part = ranges(np.zeros_like(query), query)
        return Effects(call, self.block(RESULTS, query, group)[call], part)

    def _folded(self, calls: Calls, group: IntArray) -> Effects:
        """The effects of ``fold``: its states are those of consecutive chunks, the last one just before the target."""
        (states,), target = calls.operands, calls.params[:, 0]
        call, chunk = states.owner, self.chunk[states.block]
        self._refuse(calls, (target < 1) | (target >= len(self.owner)), "to a chunk that has no prefix state")
        expected = target[call] - (states.offset[1:][call] - np.arange(len(call)))
        self._refuse(calls, np.bincount(call, chunk != expected, len(calls)) > 0, "of chunks with others in between")
        return Effects(call, self.block(PREFIX_STATES, target[call], group[call]), chunk)

    def _operands(self, calls: Calls) -> tuple[BlockLists, ...]:
        """The operands of calls, of the right tensors and, except for ``fold``, of one block each."""
        if calls.kernel not in _OPERANDS:
            raise ScheduleError(f"unknown kernel {calls.kernel!r}, expected one of {', '.join(_OPERANDS)}")
        tensors, params = _OPERANDS[calls.kernel], _PARAMS[calls.kernel]
        if len(calls.operands) != len(tensors) or calls.params.shape[1] != params:
            names = " and ".join(TENSORS[each] for each in tensors)
            raise ScheduleError(f"{calls.kernel} takes {names}, and {params} parameters")
        for operand, tensor in zip(calls.operands, tensors, strict=True):
            count = operand.sizes < 1 if calls.kernel == FOLD else operand.sizes != 1
            self._refuse(calls, count, f"with {'no' if calls.kernel == FOLD else 'not one'} block of {TENSORS[tensor]}")
            wrong = np.bincount(operand.owner, self.tensor[operand.block] != tensor, len(calls)) > 0
            self._refuse(calls, wrong, f"with other blocks than {TENSORS[tensor]}")
            group = self.group[calls.operands[0].first]
            wrong = np.bincount(operand.owner, self.group[operand.block] != group[operand.owner], len(calls)) > 0
            self._refuse(calls, wrong, "with blocks of different heads")
        return calls.operands

    def _refuse(self, calls: Calls, wrong: BoolArray, what: str) -> None:
        if wrong.any():
            at = int(wrong.argmax())
            blocks = [each[at].tolist() for each in calls.operands]
            raise ScheduleError(f"rank {calls.rank[at]}: {calls.kernel} of blocks {blocks} {what}")

    def flops(self, calls: Calls) -> IntArray:
        """The FLOPs of each call, two per multiplication and addition."""
        layer, chunks = self.workload, [self.chunk[each.first] for each in calls.operands]
        per_state = 2 * layer.batch * layer.head_dim**2
        heads, kv_heads = layer.heads // self.head_groups, layer.kv_head_count // self.head_groups
        if calls.kernel == ATTEND:
            rows, columns = (self.count[each] for each in chunks)
            low = np.where(calls.params[:, 0] == 0, 0, 1 - columns)
            return pairs_in_band(low, rows - 1, rows, columns) * (layer.flops_per_pair // self.head_groups)
        if calls.kernel == FOLD:
            return calls.operands[0].sizes * per_state * kv_heads
        return self.count[chunks[0]] * per_state * (kv_heads if calls.kernel == MAKE_STATE else heads)
