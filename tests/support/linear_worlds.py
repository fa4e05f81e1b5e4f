"""Causal linear attention in chunks: a small task of its own, and LASP, All-Scan and LASP-2 as worlds.

Chunk r has queries q (backward: with the gradient of its output), keys k (with values), a result o, a local state L
and the state S that its queries read; backward M and T, the same from behind, and the gradients dq and dk. States are
cut into pieces. Part j of S is what chunk j adds, part j * pieces + p of o what it adds through piece p.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Kind, Pool
from tasp_lab.schedule.calls import Calls, Contract, Effects, Passing
from tasp_lab.workload.kernel_shapes import ShapeRows
from tests.support.world import KernelCall, Transfer, World, table, world

Key = tuple[str, int, int]
"""Tensor, chunk and piece of a block."""

SUMS = ("o", "S", "T", "dq", "dk")


@dataclass(frozen=True, eq=False)
class ChunkTask:
    """The task; `keys` are the blocks in order."""

    chunks: int
    pieces: int
    keys: tuple[Key, ...]

    dtype = "fp32"

    @property
    def passing(self) -> Passing:
        return "backward" if ("dq", 0, 0) in self.number else "forward"

    @property
    def kernels(self) -> Mapping[str, Passing]:
        forward = "make_state", "attend", "advance", "fold", "apply_state"
        backward = "make_dstate", "differentiate", "fold_back", "dq_of_state", "dk_of_state"
        return dict.fromkeys((*forward, *backward), self.passing)

    @property
    def content(self) -> tuple[object, ...]:
        return self.chunks, self.pieces, self.keys

    @cached_property
    def number(self) -> Mapping[Key, int]:
        """The block of each key."""
        return {key: block for block, key in enumerate(self.keys)}

    def parts_of(self, key: Key) -> list[int]:
        """The parts that exist."""
        tensor, r, _ = key
        if tensor == "o":
            return list(range((r + 1) * self.pieces))
        chunks = {"S": range(r), "T": range(r + 1, self.chunks), "dq": range(r + 1), "dk": range(r, self.chunks)}
        return list(chunks.get(tensor, range(1)))

    @property
    def contract(self) -> Contract:
        """Chunk r is at rank r; a forward pass leaves its keys and states."""
        tensors, chunk = zip(*((tensor, r) for tensor, r, _ in self.keys), strict=True)
        tensor, backward = np.array(tensors), self.passing == "backward"
        saved = np.isin(tensor, ("k", "S")) & backward
        inputs, outputs = np.isin(tensor, ("q", "k")) | saved, np.isin(tensor, ("o", "dq", "dk"))
        return Contract.of(np.array(chunk), inputs, outputs, saved)

    def check(self, blocks: Blocks) -> None:
        """Raise `ScheduleError` unless sums, and no others, are added up."""
        for block, (tensor, r, _) in enumerate(self.keys):
            join = blocks.kind_of(block).join
            if (join == "add") != (tensor in SUMS):
                raise ScheduleError(f"block {block}, {tensor} of chunk {r}, is joined by {join!r}")

    def existing_parts(self, blocks: IntArray) -> BoolArray:
        parts = [self.parts_of(self.keys[block]) for block in blocks.tolist()]
        found = np.zeros((len(parts), max((each[-1] + 1 for each in parts), default=1)), dtype=np.bool_)
        for row, each in enumerate(parts):
            found[row, each] = True
        return found

    def flops(self, calls: Calls) -> IntArray:
        return np.ones(len(calls), dtype=np.int64)

    def shapes(self, calls: Calls) -> ShapeRows:
        return ShapeRows.of("dense", self.flops(calls))

    def effects(self, calls: Calls) -> Effects:
        found = []
        for call, (rank, operands, params) in enumerate(calls.rows()):
            added = self._added(calls.kernel, [[self.keys[b] for b in each] for each in operands], params)
            if any(key not in self.number for key, _ in added):
                raise ScheduleError(f"rank {rank}: {calls.kernel} adds to a block that does not exist")
            found += [(call, self.number[key], part) for key, part in added]
        return Effects(*np.array(found, dtype=np.int64).reshape(-1, 3).T)

    def _added(self, kernel: str, operands: list[list[Key]], params: list[int]) -> list[tuple[Key, int]]:
        match kernel, operands, params:
            case "make_state", [[("k", j, _)]], [p]:
                return [(("L", j, p), 0)]
            case "make_dstate", [[("q", r, _)]], []:
                return [(("M", r, 0), 0)]
            case "attend", [[("q", r, _)], [("k", j, _)]], [] if j <= r:
                return [(("o", r, 0), j * self.pieces + p) for p in range(self.pieces)]
            case "differentiate", [[("q", r, _)], [("k", j, _)]], [] if j <= r:
                return [(("dq", r, 0), j), (("dk", j, 0), r)]
            case "advance", [[], [("L", 0, p)]], []:
                return [(("S", 1, p), 0)]
            case "advance", [[("S", r, p)], [("L", own, q)]], [] if (r, p) == (own, q):
                return [(("S", r + 1, p), j) for j in range(r + 1)]
            case "fold", [[("L", _, p), *_] as states], [r] if all(
                s[0] == "L" and s[1] < r and s[2] == p for s in states
            ):
                return [(("S", r, p), j) for _, j, _ in states]
            case "fold_back", [[_, *_] as states], [r] if all(s[0] == "M" and s[1] > r for s in states):
                return [(("T", r, 0), j) for _, j, _ in states]
            case "apply_state", [[("q", r, _)], [("S", own, p)]], [] if r == own:
                return [(("o", r, 0), j * self.pieces + p) for j in range(r)]
            case "dq_of_state", [[("q", r, _)], [("S", own, _)]], [] if r == own:
                return [(("dq", r, 0), j) for j in range(r)]
            case "dk_of_state", [[("k", r, _)], [("T", own, _)]], [] if r == own:
                return [(("dk", r, 0), j) for j in range(r + 1, self.chunks)]
        raise ScheduleError(f"{kernel} of {operands} with {params} is nothing that the layer requires")


def _task(n: int, tensors: str, pieces: int = 1) -> ChunkTask:
    cut = dict.fromkeys(("L", "S"), pieces)
    keys = [(t, r, p) for r in range(n) for t in tensors.split() for p in range(cut.get(t, 1))]
    return ChunkTask(n, pieces, tuple(k for k in keys if k[:2] not in (("S", 0), ("T", n - 1))))


def _world(
    name: str,
    task: ChunkTask,
    initial: str,
    final: str,
    pools: Mapping[str, Pool],
    steps: Iterable[tuple[Sequence[Transfer], Sequence[KernelCall]]],
) -> World:
    """Blocks of chunk r lie at rank r at the start and at the end."""
    names = list(dict.fromkeys(key[0] for key in task.keys))
    kinds = [Kind(each, "add" if each in SUMS else "", pools.get(each)) for each in names]
    kind = np.array([names.index(key[0]) for key in task.keys])
    parts = np.array([task.parts_of(key)[-1] + 1 for key in task.keys])
    held, promised = (
        table(task.chunks, len(kind), [(r, b) for (t, r, _), b in task.number.items() if t in which.split()])
        for which in (initial, final)
    )
    return world(name, Blocks(kinds, kind, np.full_like(kind, 64), parts), held, promised, steps, task)


def _call(task: ChunkTask, kernel: str, rank: int, *operands: list[Key], params: tuple[int, ...] = ()) -> KernelCall:
    return KernelCall(kernel, rank, tuple(tuple(task.number[key] for key in each) for each in operands), params)


def _around(task: ChunkTask, tensor: str, step: int) -> list[Transfer]:
    """A step of a ring all-gather."""
    n = task.chunks
    return [Transfer(r, (r + 1) % n, 0, task.number[tensor, (r - step) % n, 0]) for r in range(n)]


def lasp2(n: int) -> World:
    """An all-gather of local states beside the intra part; then each rank folds those before it."""
    task = _task(n, "q k o L S")
    intra = [_call(task, "attend", r, [("q", r, 0)], [("k", r, 0)]) for r in range(n)]
    steps: list[tuple[list[Transfer], list[KernelCall]]] = [
        ([], [_call(task, "make_state", r, [("k", r, 0)], params=(0,)) for r in range(n)]),
        *((_around(task, "L", s), intra if s == 0 else []) for s in range(n - 1)),
        ([], [_call(task, "fold", r, [("L", j, 0) for j in range(r)], params=(r,)) for r in range(1, n)]),
        ([], [_call(task, "apply_state", r, [("q", r, 0)], [("S", r, 0)]) for r in range(1, n)]),
    ]
    return _world("lasp2", task, "q k", "o", {"S": Pool("states", 2)}, steps)


def lasp2_backward(n: int) -> World:
    """States are kept from the forward pass; their gradients are gathered and folded from behind."""
    task = _task(n, "q k S M T dq dk")
    beside = [
        [_call(task, "differentiate", r, [("q", r, 0)], [("k", r, 0)]) for r in range(n)],
        [_call(task, "dq_of_state", r, [("q", r, 0)], [("S", r, 0)]) for r in range(1, n)],
    ]
    steps: list[tuple[list[Transfer], list[KernelCall]]] = [
        ([], [_call(task, "make_dstate", r, [("q", r, 0)]) for r in range(n)]),
        *((_around(task, "M", s), beside[s] if s < len(beside) else []) for s in range(n - 1)),
        ([], [_call(task, "fold_back", r, [("M", j, 0) for j in range(r + 1, n)], params=(r,)) for r in range(n - 1)]),
        ([], [_call(task, "dk_of_state", r, [("k", r, 0)], [("T", r, 0)]) for r in range(n - 1)]),
    ]
    return _world("lasp2-backward", task, "q k S", "dq dk", {"T": Pool("states", 2)}, steps)


def scan(n: int, pieces: int) -> World:
    """The chain of states, in pieces that follow each other: LASP with one piece, All-Scan with several."""
    task = _task(n, "q k o L S", pieces)
    steps: list[tuple[list[Transfer], list[KernelCall]]] = [([], []) for _ in range(2 * n + pieces - 1)]
    for r in range(n):
        steps[0][1].extend(_call(task, "make_state", r, [("k", r, 0)], params=(p,)) for p in range(pieces))
        steps[1][1].append(_call(task, "attend", r, [("q", r, 0)], [("k", r, 0)]))
        for p in range(pieces):
            now = 1 + p + 2 * r  # rank r has piece p of its state
            if r:
                steps[now][1].append(_call(task, "apply_state", r, [("q", r, 0)], [("S", r, p)]))
            if r < n - 1:
                state = [("S", r, p)] if r else []
                steps[now][1].append(_call(task, "advance", r, state, [("L", r, p)]))
                steps[now + 1][0].append(Transfer(r, r + 1, 0, task.number["S", r + 1, p]))
    name = "lasp1" if pieces == 1 else "all-scan"
    return _world(name, task, "q k", "o", {"S": Pool("states", 3)}, steps)
