"""Schedules written step by step, as papers describe them.

    writer = LayerWriter(name, topology, task, {KEYS: Pool("keys", options.buffers)})
    for hop in range(n):
        with writer.step():
            for rank in range(n):
                guests = writer.keys((rank - hop) % n)
                writer.attend(rank, writer.queries(rank), guests)
                if hop < n - 1:
                    writer.send(guests, rank, to=(rank + 1) % n)
    return writer.schedule()

The steps are the arrays of `tasp_lab.schedule.model.Step`, and the proof is the same; an error of it has the line that
wrote the transfer. Large worlds need `tasp_lab.schedule.model.LazySteps`: here every transfer is a Python object.
Calls are arrays, as a pass has many more of them: on n ranks n^2 tiles or more.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Pool
from tasp_lab.schedule.calls import BlockLists, Calls
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.proof import no_copies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.span_blocks import owner_schedule
from tasp_lab.schedules.attention.task import KEYS, QUERIES, AttentionTask, tiles
from tasp_lab.schedules.collectives.kinds import CollectiveKind
from tasp_lab.schedules.linear.task import CHAIN_LANE, LinearTask, chunk_layout, layer_schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

Written = tuple[int, int, int, int, bool]
"""A transfer: source, destination, lane, block, and whether it is given."""


class Writer:
    """The steps of a schedule on a topology, in the order in which they are written."""

    def __init__(self, name: str, topology: Topology) -> None:
        self.name, self.topology, self.world_size = name, topology, topology.world_size
        self._kept: list[tuple[int, int]] = []  # ranks and blocks
        self._steps: list[tuple[list[Written], dict[tuple[str, int], list[Calls]]]] = []
        self._lines: list[list[tuple[int, int, int]]] = []  # source, block and line of the transfers of each step
        self._is_open = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is sent and computed in this block uses what ranks have when the step begins."""
        if self._is_open:
            raise ScheduleError(f"schedule {self.name!r}: a step within step {len(self._steps) - 1}")
        self._steps.append(([], {}))
        self._lines.append([])
        self._is_open = True
        yield
        self._is_open = False

    def send(self, blocks: int | Iterable[int], source: int, *, to: int, lane: int = 0, keep: bool = False) -> None:
        """Copy blocks from rank `source` to rank `to`; with `keep` they stay there."""
        self._transfer(blocks, source, to, lane, False)
        if keep:
            self._kept += [(to, block) for block in _listed(blocks)]

    def kept(self, block_count: int) -> BoolArray:
        """Copies that stay where they arrive, beside those at the start and at the end: bool array (ranks, blocks)."""
        found = no_copies(self.world_size, block_count)
        for rank, block in self._kept:
            found[rank, block] = True
        return found

    def give(self, blocks: int | Iterable[int], source: int, *, to: int, lane: int = 0) -> None:
        """Send what rank `source` has of blocks, which then has nothing of them."""
        self._transfer(blocks, source, to, lane, True)

    def _transfer(self, blocks: int | Iterable[int], source: int, to: int, lane: int, gives: bool) -> None:
        self._check_open()
        transfers, _ = self._steps[-1]
        line = sys._getframe(2).f_lineno
        for block in _listed(blocks):
            transfers.append((source, to, lane, block, gives))
            self._lines[-1].append((source, block, line))

    def call(self, kernel: str, rank: int, *operands: Iterable[int], params: Sequence[int] = (), lane: int = 0) -> None:
        """Call a kernel of the task on blocks, one list per operand, on a compute lane."""
        self._call(Calls.of(kernel, [(rank, [[*each] for each in operands], tuple(params))], lane))

    def _call(self, calls: Calls) -> None:
        self._check_open()
        self._steps[-1][1].setdefault((calls.kernel, calls.lane), []).append(calls)

    def _check_open(self) -> None:
        if not self._is_open:
            raise ScheduleError(f"schedule {self.name!r}: a transfer or call outside of a step, expected with .step():")

    @property
    def steps(self) -> list[Step]:
        """The steps; one in which nothing happens is left out."""
        return [
            Step.of(transfers, map(Calls.joined, calls.values()))
            for transfers, calls in self._steps if transfers or calls
        ]  # fmt: skip

    @property
    def lanes(self) -> int:
        """The lanes that are used, 1 or more."""
        return 1 + max((lane for transfers, _ in self._steps for _, _, lane, _, _ in transfers), default=0)

    @contextmanager
    def _with_lines(self) -> Iterator[None]:
        """Errors of a proof have the line of the transfer that they are about."""
        try:
            yield
        except ScheduleError as error:
            found = re.search(r"step (\d+): rank (\d+)(?: sends block (\d+))?", str(error))
            if found is not None:
                shown = [lines for lines, (transfers, calls) in zip(self._lines, self._steps, strict=True)
                         if transfers or calls]  # fmt: skip
                step, rank, block = (None if each is None else int(each) for each in found.groups())
                lines = [line for source, number, line in shown[step or 0]
                         if source == rank and block in (None, number)]  # fmt: skip
                error.line = lines[0] if lines else None
            raise


class CollectiveWriter(Writer):
    """An AllGather, a ReduceScatter or an AllReduce: block r is the shard of rank r, or the sum of all ranks of it.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> writer = CollectiveWriter("swap", "AllGather", full_mesh(2), 64)
    >>> with writer.step():
    ...     writer.send(0, 0, to=1)
    ...     writer.send(1, 1, to=0)
    >>> writer.schedule().transfers
    2
    """

    def __init__(self, name: str, kind: CollectiveKind, topology: Topology, shard_bytes: int) -> None:
        n = topology.world_size
        super().__init__(name, topology)
        own, everything = np.eye(n, dtype=bool), np.ones((n, n), dtype=bool)
        starts_and_ends = {
            "AllGather": (own, everything), "ReduceScatter": (everything, own), "AllReduce": (everything, everything),
        }  # fmt: skip
        if kind not in starts_and_ends:
            known = ", ".join(starts_and_ends)
            raise ScheduleError(f"schedule {name!r} is {kind}, expected one of {known}; blocks of others are arrays")
        self._initial, self._final = starts_and_ends[kind]
        self._sizes, self._sums = np.full(n, shard_bytes), kind != "AllGather"

    def schedule(self) -> Schedule:
        """The schedule, proved. Raises `ScheduleError` and `NoLinkError`."""
        n = self.world_size
        blocks = Blocks.of_sums(self._sizes, n) if self._sums else Blocks.of_data(self._sizes)
        part = np.arange(n)[:, None] if self._sums else None
        with self._with_lines():
            found = Schedule(self.name, n, self.lanes, blocks, self._initial, self._final, self.steps,
                             initial_part=part)  # fmt: skip
            found.check_routes(self.topology)
        return found


class LayerWriter(Writer):
    """A pass of softmax attention whose blocks are those of `tasp_lab.schedules.attention.span_blocks.span_task`.

    Parameters
    ----------
    circulating : the pools that blocks of a tensor are received into; None for tensors whose copies stay.
    """

    def __init__(
        self, name: str, topology: Topology, task: AttentionTask, circulating: Mapping[int, Pool | None]
    ) -> None:
        super().__init__(name, topology)
        self.task, self._circulating = task, circulating
        self._parts: BoolArray = no_copies(self.world_size, len(task.tensor))
        self._attending: list[tuple[int, Sequence[int], Sequence[int]]] = []  # ranks, queries and keys
        self._leaving: list[tuple[int, list[int]]] = []
        self._arriving: list[tuple[int | IntArray, IntArray | list[int]]] = []  # ranks and blocks

    def keys(self, rank: int) -> list[int]:
        """The blocks of keys and values that a rank owns."""
        return self._owned(KEYS, rank)

    def queries(self, rank: int) -> list[int]:
        """The blocks of queries that a rank owns."""
        return self._owned(QUERIES, rank)

    def _owned(self, tensor: int, rank: int) -> list[int]:
        return [*self._blocks_of_ranks[tensor][rank]]

    @cached_property
    def _blocks_of_ranks(self) -> Mapping[int, list[list[int]]]:
        """The blocks of keys and of queries that each rank owns."""
        found: dict[int, list[list[int]]] = {each: [[] for _ in range(self.world_size)] for each in (KEYS, QUERIES)}
        for tensor, of_ranks in found.items():
            blocks = self.task.blocks_of(tensor)
            for block, rank in zip(blocks.tolist(), self.task.owner[blocks].tolist(), strict=True):
                of_ranks[rank].append(block)
        return found

    def attend(self, rank: int, queries: Sequence[int], keys: Sequence[int]) -> None:
        """Attend with queries to keys, or backward add to the gradients of both; without pairs that the mask hides."""
        self._check_open()
        self._attending.append((rank, queries, keys))

    def call(self, kernel: str, rank: int, *operands: Iterable[int], params: Sequence[int] = (), lane: int = 0) -> None:
        """As that of `Writer`."""
        self._attend()  # calls of a kernel stay in the order in which they are written
        super().call(kernel, rank, *operands, params=params, lane=lane)

    def _attend(self) -> None:
        """Make calls of what the step attends to: of all ranks at once, as each look at the mask takes a while."""
        if not self._attending:
            return
        ranks, queries, keys = zip(*self._attending, strict=True)
        self._attending.clear()
        operands = BlockLists.of(queries), BlockLists.of(keys)
        which, query, key = tiles(*operands)
        rank, query, key = np.array(ranks)[which], operands[0].block[query], operands[1].block[key]
        low, high = self.task.tile_bands(query, key)
        seen = np.flatnonzero(low <= high)
        if not len(seen):
            return
        rank, query, key, single = rank[seen], query[seen], key[seen], np.ones(len(seen), dtype=np.int64)
        pairs = BlockLists.of_sizes(single, query), BlockLists.of_sizes(single, key)
        self._call(Calls(self.task.kernel, rank, pairs, np.stack([low[seen], high[seen]], axis=1)))
        for blocks in (query, key) if self.task.is_backward else (query,):
            self._arriving.append((rank, self.task.output_of[blocks]))

    def sums(self, rank: int, blocks: Iterable[int]) -> list[int]:
        """The results or gradients of blocks, those of which the rank has parts when the step begins."""
        sums: Iterable[int] = (int(self.task.output_of[block]) for block in blocks)
        return [each for each in sums if each >= 0 and self._parts[rank, each]]

    def give(self, blocks: int | Iterable[int], source: int, *, to: int, lane: int = 0) -> None:
        """Send what rank `source` has of blocks, which then has nothing of them."""
        blocks = [*_listed(blocks)]
        self._transfer(blocks, source, to, lane, True)
        self._leaving.append((source, blocks))
        self._arriving.append((to, blocks))

    @contextmanager
    def step(self) -> Iterator[None]:
        """As that of `Writer`."""
        with super().step():
            yield
            self._attend()
        for changed, are_there in ((self._leaving, False), (self._arriving, True)):
            for rank, blocks in changed:
                self._parts[rank, blocks] = are_there
            changed.clear()

    def schedule(self) -> Schedule:
        """The pass, proved. Raises `ScheduleError` and `NoLinkError`."""
        with self._with_lines():
            return owner_schedule(self.name, self.topology, self.task, self.steps, lanes=self.lanes,
                                  circulating=self._circulating, kept=self.kept(len(self.task.tensor)))  # fmt: skip


class LinearWriter(Writer):
    """A pass of linear attention under a causal mask, whose states are combined from those of neighbouring segments.

    Chunks are counted in the order of the pass, backward from the last one on, so that one text writes both passes:
    the states of the forward pass are the gradients of states backward. Copies of states stay where they arrive.

    `chunks` is the number of chunks; `begin` has for each the first of those whose states it needs, itself for none.

    Raises `ScheduleError` for what is no causal layer of linear attention.
    """

    def __init__(
        self, name: str, topology: Topology, workload: Workload, decays: tuple[float, ...] = (), *, backward: bool
    ) -> None:
        super().__init__(name, topology)
        if not workload.visible.is_causal:
            raise ScheduleError(f"schedule {name!r} combines states in their order, expected a causal mask")
        layout = chunk_layout(workload, self.world_size)
        self.task = LinearTask(workload, layout, decays, "fp32" if backward else None)
        self.chunks, self._states = len(self.task.owner), self.task.states
        self._blocks, self._segments = len(self.task.tensor), dict[tuple[int, int], int]()
        last = self.chunks - 1
        self.begin: list[int] = (last - self.task.last[::-1] if backward else self.task.first).tolist()

    def rank(self, chunk: int) -> int:
        """The rank of a chunk."""
        return int(self.task.owner[self._chunk(chunk)])

    def state(self, first: int, last: int) -> int:
        """The block of the state of the chunks from `first` to `last`."""
        low, high = sorted((self._chunk(first), self._chunk(last)))
        if low == high:
            return int(self.task.block(self._states.chunk, np.array(low)))
        return self._blocks + self._segments.setdefault((low, high + 1), len(self._segments))

    def pass_on(self, first: int, last: int, *, to: int) -> None:
        """Send the state of chunks from the rank of the last of them to that of another chunk."""
        self.send(self.state(first, last), self.rank(last), to=self.rank(to), keep=True)

    def make_state(self, chunk: int) -> None:
        """Make the state of a chunk, where another one needs it."""
        if chunk + 1 < self.chunks and self.begin[chunk + 1] <= chunk:
            self._call_on(self._states.make, chunk)
            self._kept.append((self.rank(chunk), self.state(chunk, chunk)))

    def attend(self, chunk: int) -> None:
        """Attend within a chunk."""
        self._call_on(self._states.within, chunk)

    def combine(self, first: int, middle: int, last: int, *, at: int) -> None:
        """At the rank of chunk `at`: the state of chunks `first` to `last` from those up to `middle` and behind it."""
        rank, halves = self.rank(at), (self.state(first, middle), self.state(middle + 1, last))
        self.call(self._states.combine, rank, *([half] for half in halves), lane=CHAIN_LANE)
        self._kept.append((rank, self.state(first, last)))

    def fold(self, chunk: int) -> None:
        """The state before a chunk, from that of all chunks that it needs, if any."""
        if self.begin[chunk] < chunk:
            whole = self.state(self.begin[chunk], chunk - 1)
            self.call(self._states.fold, self.rank(chunk), [whole], params=[self._chunk(chunk)])

    def apply(self, chunk: int) -> None:
        """Apply the state before a chunk, if it has any."""
        if self.begin[chunk] < chunk:
            self._call_on(self._states.apply, chunk)

    def _chunk(self, place: int) -> int:
        return self.chunks - 1 - place if self.task.is_backward else place

    def _call_on(self, kernel: str, chunk: int) -> None:
        for rank, operands, params in self.task.calls(kernel, np.array([self._chunk(chunk)])).rows():
            self.call(kernel, rank, *operands, params=params)

    def schedule(self) -> Schedule:
        """The pass, proved. Raises `ScheduleError` and `NoLinkError`."""
        task = replace(self.task, segments=tuple(self._segments))
        with self._with_lines():
            return layer_schedule(self.name, self.topology, task, self.steps, lanes=self.lanes,
                                  kept=self.kept(len(task.tensor)))  # fmt: skip


def _listed(blocks: int | Iterable[int]) -> Iterator[int]:
    return iter([int(blocks)] if isinstance(blocks, int | np.integer) else map(int, blocks))
