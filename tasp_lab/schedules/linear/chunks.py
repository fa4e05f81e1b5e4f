"""The blocks of a layer of linear attention: its chunks, the parts of their sums, and the fields of each tensor.

Each span of the layout, consecutive positions, is a **chunk**; chunks are numbered by position, and ranks without
positions have none. Under a causal mask chunk r **follows** chunk j if the document at the first position of r begins
in j or before; with a full mask all chunks follow each other. Only then does j contribute to the outputs of r, so
nothing is ever sent across a document boundary.

| block of chunk r | parts, one for each |
|---|---|
| results, query gradients | chunk that r follows, and r |
| prefix state: the state before r, with a full mask of all other chunks; backward data | chunk that r follows |
| key gradients | chunk that follows r, and r |
| suffix gradient: the gradient of the state at the end of r, with a full mask of all others | chunk that follows r |
| gate gradients | own: of the outputs of r; suffix: of those of later chunks |

States and their gradients are in float32, ``head_dim x value_dim`` elements per KV head: their size does not depend on
the sequence. They may be cut into **pieces**, equal groups of KV heads.

A schedule may also name **segments**, two or more consecutive chunks, whose states it combines from those of their
halves. Chunk r is segment r; further ones are numbered behind the chunks, and their blocks are the last ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Field, Kind, Pool
from tasp_lab.schedule.calls import ranges
from tasp_lab.schedule.proof import no_copies
from tasp_lab.schedules.attention.layer_blocks import KEY_GRADIENTS as KEY_GRADIENTS
from tasp_lab.schedules.attention.layer_blocks import KEYS as KEYS
from tasp_lab.schedules.attention.layer_blocks import QUERIES as QUERIES
from tasp_lab.schedules.attention.layer_blocks import QUERY_GRADIENTS as QUERY_GRADIENTS
from tasp_lab.schedules.attention.layer_blocks import RESULTS as RESULTS
from tasp_lab.schedules.attention.layer_blocks import TENSORS as SOFTMAX_TENSORS
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, Span

CHUNK_STATES, PREFIX_STATES, GATES, GATE_GRADIENTS, CHUNK_GRADIENTS, SUFFIX_GRADIENTS = range(5, 11)
"""Further tensors of blocks, besides those of softmax attention.

States of single chunks and of all chunks before one; gates, the logarithms of decays that depend on the data; the
gradients of gates, and of states: what a chunk adds to that before it, and the sum over all chunks behind one.
"""

TENSORS = (
    *SOFTMAX_TENSORS[:CHUNK_STATES],
    "chunk states",
    "prefix states",
    "gates",
    "gate gradients",
    "chunk gradients",
    "suffix gradients",
)
"""Names of kinds."""

STATES = (CHUNK_STATES, PREFIX_STATES, CHUNK_GRADIENTS, SUFFIX_GRADIENTS)
"""Tensors that are cut into pieces; their size does not depend on the sequence."""


def retention_decays(kv_heads: int) -> tuple[float, ...]:
    """The decay per position of each KV head of a retentive network: 1 - 2 ** (-5 - head) (arXiv:2307.08621, eq. 8).

    >>> retention_decays(2)
    (0.96875, 0.984375)
    """
    return tuple(1 - 2.0 ** (-5 - head) for head in range(kv_heads))


@dataclass(frozen=True)
class LinearBlocks:
    """The blocks of a layer of linear attention.

    Parameters
    ----------
    workload, layout : the layer, and the distribution of its positions over ranks.
    decays : with decay ``head`` the decay per position of each KV head, more than 0 and at most 1; by default those of
        `retention_decays`. Else 1.
    gradient_dtype : dtype of the gradients of keys and queries on the wire; at home they are float32. None forward.
    pieces : states are cut into so many equal groups of KV heads.
    head_groups : every block is of one of so many equal groups of heads.
    segments : the first chunk of each further segment and that behind its last, of a causal layer.

    Raises `ScheduleError` for a layer of softmax attention, for packed documents with a full mask, for other decays,
    for pieces of unequal size, for segments that are none, and unless the spans are consecutive positions.
    """

    workload: Workload
    layout: SequenceLayout
    decays: tuple[float, ...] = ()
    gradient_dtype: str | None = None
    pieces: int = 1
    head_groups: int = 1
    segments: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        layer, heads = self.workload, self.workload.kv_head_count
        if layer.kind != "linear":
            raise ScheduleError(f"a layer of {layer.kind} attention, expected one of linear attention")
        if self.is_full and len(layer.document_starts) > 1:
            raise ScheduleError("linear attention with a full mask has one state, expected no packed documents")
        if not self.decays:
            object.__setattr__(self, "decays", retention_decays(heads) if layer.decay == "head" else (1.0,) * heads)
        if len(self.decays) != heads or not all(0 < each <= 1 for each in self.decays):
            raise ScheduleError(f"decays {self.decays}, expected {heads} numbers above 0 and up to 1, one per KV head")
        if layer.decay != "head" and any(each != 1 for each in self.decays):
            raise ScheduleError(f"decays {self.decays} of a layer with decay {layer.decay!r}, expected 'head'")
        if self.head_groups < 1 or self.pieces < 1 or heads % (self.head_groups * self.pieces):
            groups = self.head_groups * self.pieces
            raise ScheduleError(f"{heads} KV heads in {groups} groups, expected groups of equal size")
        if self.head_groups > 1 and self.pieces > 1:
            raise ScheduleError(f"states in {self.pieces} pieces are already cut by heads, expected 1 piece")
        if self.layout.sequence != layer.sequence or self.layout.stride != 1:
            raise ScheduleError(
                f"layout {self.layout.name!r} of {self.layout.sequence} positions, expected spans of consecutive "
                f"positions, {layer.sequence} in all"
            )
        for first, end in self.segments:
            if self.is_full or not 0 <= first < end - 1 < len(self.owner):
                raise ScheduleError(f"the segment of chunks {first} to {end - 1}, expected two or more of "
                                    f"{len(self.owner)} chunks of a causal layer")  # fmt: skip
        if len(set(self.segments)) < len(self.segments):
            raise ScheduleError("a segment is listed twice, expected each once")

    @property
    def result_layout(self) -> SequenceLayout:
        """Where results and gradients lie: at the owners of their chunks."""
        return self.layout

    @property
    def is_backward(self) -> bool:
        return self.gradient_dtype is not None

    @property
    def is_full(self) -> bool:
        """Whether every query attends to all keys."""
        return self.workload.visible.is_full

    @property
    def has_gates(self) -> bool:
        """Whether decays depend on the data."""
        return self.workload.decay in ("scalar", "channel")

    # -- chunks -------------------------------------------------------------------------------------------------------
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

    def resets(self, chunk: int) -> IntArray:
        """The offsets within a chunk at which documents start, ascending."""
        starts = self.workload.document_starts - self.start[chunk]
        found: IntArray = starts[(starts >= 0) & (starts < self.count[chunk])]
        return found

    @cached_property
    def runs(self) -> tuple[IntArray, IntArray]:
        """The runs of positions of one chunk and document, in order: the chunk and the length of each."""
        edges = np.union1d(self.start, self.workload.document_starts)
        return np.searchsorted(self.start, edges, side="right") - 1, np.diff(np.append(edges, self.workload.sequence))

    @cached_property
    def first(self) -> IntArray:
        """The first of the chunks that each chunk follows, itself if it follows none; int array (chunks,)."""
        if self.is_full:
            return np.zeros_like(self.owner)
        starts = self.workload.document_starts
        begins = starts[np.searchsorted(starts, self.start, side="right") - 1]
        return np.searchsorted(self.start, begins, side="right") - 1

    @cached_property
    def last(self) -> IntArray:
        """The last of the chunks that follow each chunk, itself if none does; int array (chunks,)."""
        chunks = len(self.owner)
        if self.is_full:
            return np.full(chunks, chunks - 1)
        return np.searchsorted(self.first, np.arange(chunks), side="right") - 1

    @property
    def has_prefix(self) -> BoolArray:
        """Whether each chunk follows another: it has a prefix state."""
        follows = self.first < np.arange(len(self.owner))
        return follows | (self.last > 0) if self.is_full else follows

    @property
    def has_suffix(self) -> BoolArray:
        """Whether another chunk follows each chunk: it has a suffix gradient."""
        return self.has_prefix if self.is_full else self.last > np.arange(len(self.owner))

    # -- segments -----------------------------------------------------------------------------------------------------
    @cached_property
    def segment_range(self) -> tuple[IntArray, IntArray]:
        """The first chunk of each segment, and that behind its last."""
        chunks, more = np.arange(len(self.owner)), np.array(self.segments, dtype=np.int64).reshape(-1, 2)
        return np.append(chunks, more[:, 0]), np.append(chunks + 1, more[:, 1])

    @cached_property
    def segment_of(self) -> Mapping[tuple[int, int], int]:
        """The number of each segment, by its first chunk and that behind its last."""
        return {each: number for number, each in enumerate(zip(*(x.tolist() for x in self.segment_range), strict=True))}

    def chunks_of(self, block: int) -> range:
        """The chunks of the segment of a block."""
        return range(*(int(each[self.segment[block]]) for each in self.segment_range))

    # -- blocks -------------------------------------------------------------------------------------------------------
    @cached_property
    def _columns(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Tensor, segment and piece of the blocks of one group of heads; and the table of their numbers by these."""
        chunks, number = np.arange(len(self.owner)), 0
        numbers = np.full((len(TENSORS), len(chunks) + len(self.segments), self.pieces), -1)
        columns = []
        further = CHUNK_GRADIENTS if self.is_backward else CHUNK_STATES
        rows = {PREFIX_STATES: np.flatnonzero(self.has_prefix), SUFFIX_GRADIENTS: np.flatnonzero(self.has_suffix)}
        listed = [(tensor, rows.get(tensor, chunks)) for tensor in self._tensors]
        for tensor, which in [*listed, (further, len(chunks) + np.arange(len(self.segments)))]:
            pieces = self.pieces if tensor in STATES else 1
            numbers[tensor, which, :pieces] = number + np.arange(len(which) * pieces).reshape(-1, pieces)
            number += len(which) * pieces
            columns.append(np.stack([np.full(len(which) * pieces, tensor), which.repeat(pieces),
                                     np.tile(np.arange(pieces), len(which))]))  # fmt: skip
        tensors, segment, piece = np.concatenate(columns, axis=1)
        return tensors, segment, piece, numbers

    @property
    def _tensors(self) -> tuple[int, ...]:
        """The tensors of the pass."""
        gates = (GATES,) if self.has_gates else ()
        if not self.is_backward:
            return KEYS, QUERIES, *gates, RESULTS, CHUNK_STATES, PREFIX_STATES
        gradients = (GATE_GRADIENTS,) if self.has_gates else ()
        return (
            *(KEYS, QUERIES, *gates, PREFIX_STATES),
            *(KEY_GRADIENTS, QUERY_GRADIENTS, *gradients, CHUNK_GRADIENTS, SUFFIX_GRADIENTS),
        )

    @cached_property
    def tensor(self) -> IntArray:
        """The tensor of each block."""
        return np.tile(self._columns[0], self.head_groups)

    @cached_property
    def segment(self) -> IntArray:
        """The segment of each block, that of a chunk except for states of further segments."""
        return np.tile(self._columns[1], self.head_groups)

    @cached_property
    def chunk(self) -> IntArray:
        """The chunk of each block, of a state the first one of its segment."""
        found: IntArray = self.segment_range[0][self.segment]
        return found

    @cached_property
    def piece(self) -> IntArray:
        """The piece of each block of states, else 0."""
        return np.tile(self._columns[2], self.head_groups)

    @cached_property
    def group(self) -> IntArray:
        """The group of heads of each block."""
        return np.arange(self.head_groups).repeat(len(self._columns[0]))

    def block(
        self, tensor: int | IntArray, chunk: IntArray, piece: IntArray | int = 0, group: IntArray | int = 0
    ) -> IntArray:
        """The block of a tensor of each of these chunks, or segments, pieces and groups of heads."""
        found: IntArray = self._columns[3][tensor, chunk, piece] + group * len(self._columns[0])
        return found

    def in_head_groups(self, groups: int) -> tuple[Self, IntArray]:
        """The blocks with their heads cut into equal groups; also their numbers, an array (blocks, groups).

        Raises `ScheduleError` unless the groups have equally many KV heads, and for states in pieces.
        """
        size = len(self._columns[0])
        group = self.group[:, None] * groups + np.arange(groups)
        number = group * size + (np.arange(len(self.group)) % size)[:, None]
        return replace(self, head_groups=self.head_groups * groups), number

    def heads_of(self, block: int, tensor: int) -> tuple[int, int]:
        """The first of the heads that a tensor has in the group of a block, and their end: KV heads but of queries."""
        of_queries = tensor in (QUERIES, RESULTS, QUERY_GRADIENTS)
        heads = self.workload.heads if of_queries else self.workload.kv_head_count
        width = heads // self.head_groups
        return int(self.group[block]) * width, int(self.group[block] + 1) * width

    # -- parts --------------------------------------------------------------------------------------------------------
    @cached_property
    def first_part(self) -> IntArray:
        """The chunk of part 0 of each sum but the gradients of gates: int array (tensors, chunks)."""
        found, chunks = np.zeros((len(TENSORS), len(self.owner)), dtype=np.int64), np.arange(len(self.owner))
        if not self.is_full:
            found[[RESULTS, QUERY_GRADIENTS, PREFIX_STATES]] = self.first
            found[KEY_GRADIENTS], found[SUFFIX_GRADIENTS] = chunks, chunks + 1
        return found

    @cached_property
    def parts(self) -> IntArray:
        """The number of parts of each block, those that do not exist included: with a full mask one per chunk."""
        chunks = np.arange(len(self.owner))
        count = np.full((len(TENSORS), len(chunks)), len(chunks))
        if not self.is_full:
            count[[RESULTS, QUERY_GRADIENTS]], count[PREFIX_STATES] = chunks + 1 - self.first, chunks - self.first
            count[KEY_GRADIENTS], count[SUFFIX_GRADIENTS] = self.last + 1 - chunks, self.last - chunks
        count[GATE_GRADIENTS] = 1 + self.has_suffix
        count[[each for each in range(len(TENSORS)) if each not in self._sums]] = 1
        found: IntArray = count[self.tensor, self.chunk]
        return found

    @property
    def _sums(self) -> tuple[int, ...]:
        """The tensors with several parts; backward, prefix states are there from the start."""
        states = (SUFFIX_GRADIENTS,) if self.is_backward else (PREFIX_STATES,)
        return RESULTS, KEY_GRADIENTS, QUERY_GRADIENTS, GATE_GRADIENTS, *states

    def others(self, chunks: IntArray, *, back: bool) -> tuple[IntArray, IntArray]:
        """The chunks that each chunk follows, or `back` those that follow it: their place in `chunks`, and each."""
        if self.is_full:
            call, other = ranges(self.first[chunks], self.last[chunks] + 1)
            return call[other != chunks[call]], other[other != chunks[call]]
        return ranges(chunks + 1, self.last[chunks] + 1) if back else ranges(self.first[chunks], chunks)

    def existing_parts(self, blocks: IntArray) -> BoolArray:
        """Which parts of these blocks exist: all that are counted, but the chunk's own one of a state of others."""
        parts = self.parts[blocks]
        numbers = np.arange(parts.max(initial=1))
        found: BoolArray = numbers < parts[:, None]
        if self.is_full:
            of_others = np.isin(self.tensor[blocks], list({PREFIX_STATES, SUFFIX_GRADIENTS} & set(self._sums)))
            found &= ~of_others[:, None] | (numbers != self.chunk[blocks][:, None])
        return found

    # -- fields -------------------------------------------------------------------------------------------------------
    def blocks(self, pools: Mapping[int, Pool | None] | None = None, bound: Collection[int] | None = None) -> Blocks:
        """The blocks of a schedule; `pools` by tensor. Resident copies of `bound` are the caller's: all but states."""
        pools, present = pools or {}, np.unique(self.tensor).tolist()
        bound = set(present) - set(STATES) if bound is None else bound
        kinds = [
            Kind(TENSORS[each], "add" if each in self._sums else "", pools.get(each), self.fields_of(each),
                 each in bound)
            for each in present
        ]  # fmt: skip
        return Blocks(kinds, np.searchsorted(present, self.tensor), self.block_bytes, self.parts)

    @cached_property
    def block_bytes(self) -> IntArray:
        """The size of each block, int array (blocks,)."""
        sizes = np.zeros(len(self.tensor), dtype=np.int64)
        for tensor in np.unique(self.tensor).tolist():
            own = self.tensor == tensor
            for each in self.fields_of(tensor):
                sizes[own] += each.size_bytes * (self.count[self.chunk[own]] if each.per_position else 1)
        return sizes

    def fields_of(self, tensor: int) -> tuple[Field, ...]:
        """The tensors of a block."""
        layer, kv_heads = self.workload, self.workload.kv_head_count // self.head_groups
        of_keys, of_queries = (layer.batch, kv_heads), (layer.batch, layer.heads // self.head_groups)
        keys, values = (*of_keys, layer.head_dim), (*of_keys, layer.value_size)
        queries, results = (*of_queries, layer.head_dim), (*of_queries, layer.value_size)
        if tensor in STATES:
            return self._state_fields(tensor, kv_heads // self.pieces)
        if tensor in (GATES, GATE_GRADIENTS):
            return (Field("gates", "fp32", keys if layer.decay == "channel" else keys[:2]),)
        if tensor in (KEY_GRADIENTS, QUERY_GRADIENTS):
            dtype = self.gradient_dtype or "fp32"
            home = None if dtype == "fp32" else "fp32"
            shapes = {"k": keys, "v": values} if tensor == KEY_GRADIENTS else {"q": queries}
            return tuple(Field(name, dtype, shape, home_dtype=home) for name, shape in shapes.items())
        return {
            KEYS: (Field("k", layer.dtype, keys), Field("v", layer.dtype, values)),
            QUERIES: (Field("q", layer.dtype, queries), Field("dout", layer.dtype, results))[: 1 + self.is_backward],
            RESULTS: (Field("out", "fp32", results),),
        }[tensor]

    def _state_fields(self, tensor: int, kv_heads: int) -> tuple[Field, ...]:
        """A state; with that of a single chunk its total decay, if there is any."""
        batch, size = self.workload.batch, self.workload.head_dim
        state = Field("state", "fp32", (batch, kv_heads, size, self.workload.value_size), per_position=False)
        totals: dict[str, tuple[int, ...]] = {
            "head": (kv_heads,),
            "scalar": (batch, kv_heads),
            "channel": (batch, kv_heads, size),
        }
        total = totals.get(self.workload.decay)
        if total is None or tensor in (PREFIX_STATES, SUFFIX_GRADIENTS):
            return (state,)
        return state, Field("decay", "fp32", total, per_position=False)

    def owned(self, *tensors: int) -> BoolArray:
        """Bool array (world_size, blocks): the owner of each block of these tensors."""
        held = no_copies(self.layout.world_size, len(self.tensor))
        blocks = np.flatnonzero(np.isin(self.tensor, tensors))
        held[self.owner[self.chunk[blocks]], blocks] = True
        return held
