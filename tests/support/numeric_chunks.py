"""Contents of blocks and kernels of `tests.support.linear_worlds`, forward and backward, from the recurrence."""

from __future__ import annotations

from typing import Any

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tests.support.linear_worlds import ChunkTask
from tests.support.numeric_executor import CannotExecuteError, Kernel, Sums, part_of
from tests.support.world import KernelCall

POSITIONS, VALUES, CHANNELS = 3, 2, 2
"""Positions of a chunk, elements of a value, channels of a piece of a state."""


class ChunkNumbers(Sums):
    """Linear attention o_i = q_i S_i, S_i = diag(a) S_(i-1) + k_i v_i^T, with a decay a per channel."""

    def __init__(self, task: ChunkTask) -> None:
        self.task, random = task, np.random.default_rng(3)
        size, channels = task.chunks * POSITIONS, task.pieces * CHANNELS
        self.decay = np.linspace(0.5, 0.9, channels)
        q, k = random.normal(size=(2, size, channels))
        v, dout = random.normal(size=(2, size, VALUES))
        out, dq, dk, dv = np.zeros_like(v), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        state, behind = np.zeros((2, channels, VALUES))
        for i in range(size):
            state = self.decay[:, None] * state + np.outer(k[i], v[i])
            out[i], dq[i] = q[i] @ state, state @ dout[i]
        for i in reversed(range(size)):
            behind = self.decay[:, None] * behind + np.outer(q[i], dout[i])
            dk[i], dv[i] = behind @ v[i], k[i] @ behind
        self.q, self.k, self.v, self.dout = q, k, v, dout
        backward = task.passing == "backward"
        self.contents = {
            "q": np.concatenate([q, dout], axis=1) if backward else q,
            "k": np.concatenate([k, v], axis=1), "o": out, "dq": dq, "dk": np.concatenate([dk, dv], axis=1),
        }  # fmt: skip

    def content(self, block: int, part: int = -1) -> FloatArray:
        tensor, r, piece = self.task.keys[block]
        if tensor in self.contents:
            whole: FloatArray = self.contents[tensor][r * POSITIONS : (r + 1) * POSITIONS]
            return whole if part < 0 else part_of(whole[None], part)
        chunks = {"S": range(r), "T": range(r + 1, self.task.chunks)}.get(tensor, range(r, r + 1))
        return part_of(np.array([self._state(tensor, r, j)[self._channels(piece)] for j in chunks]), part)

    def _state(self, tensor: str, r: int, j: int) -> FloatArray:
        """What chunk j adds to a state of chunk r: S before its first position, L at its last, T and M mirrored."""
        own = np.arange(j * POSITIONS, (j + 1) * POSITIONS)
        if tensor in "LS":
            last = (r + (tensor == "L")) * POSITIONS - 1
            return np.einsum("id,iv->dv", self.k[own] * self.decay ** (last - own)[:, None], self.v[own])
        first = (r + (tensor == "T")) * POSITIONS - 1
        return np.einsum("id,iv->dv", self.q[own] * self.decay ** (own - first)[:, None], self.dout[own])

    @staticmethod
    def _channels(piece: int) -> slice:
        return slice(piece * CHANNELS, (piece + 1) * CHANNELS)

    def may_be_saved(self, block: int) -> bool:
        return self.task.passing == "backward" and self.task.keys[block][0] in ("k", "S")

    def kernel(self, call: KernelCall) -> tuple[list[int], Kernel]:
        operands = [[self.task.keys[block] for block in each] for each in call.operands]
        found = self._kernel(call.kernel, operands, call.params)
        missing = [key for key in found[0] if key not in self.task.number]
        if missing:
            raise CannotExecuteError(f"{call.kernel} adds to {missing}")
        return [self.task.number[key] for key in found[0]], found[1]

    def _kernel(self, kernel: str, operands: Any, params: tuple[int, ...]) -> tuple[list[tuple[str, int, int]], Kernel]:
        channels, i = len(self.decay), np.arange(POSITIONS)[:, None]
        whole = self.decay**POSITIONS

        def gaps(r: int, j: int) -> FloatArray:
            """Decays between queries of chunk r and keys of chunk j: (queries, keys, channels)."""
            gap = (r - j) * POSITIONS + i - i.T
            return np.where(gap[:, :, None] >= 0, self.decay ** np.maximum(gap, 0)[:, :, None], 0.0)

        match kernel, operands, params:
            case "make_state", [[("k", j, _)]], (p,):
                own = self._channels(p)
                decays = self.decay[own] ** (POSITIONS - 1 - i)
                return [("L", j, p)], lambda x: [(x[0][0][:, :channels][:, own] * decays).T @ x[0][0][:, channels:]]
            case "make_dstate", [[("q", r, _)]], ():
                decays = self.decay ** (i + 1)
                return [("M", r, 0)], lambda x: [(x[0][0][:, :channels] * decays).T @ x[0][0][:, channels:]]
            case "attend", [[("q", r, _)], [("k", j, _)]], ():
                return [("o", r, 0)], lambda x: [
                    np.einsum("id,jd,ijd,jv->iv", x[0][0], x[1][0][:, :channels], gaps(r, j), x[1][0][:, channels:])
                ]
            case "differentiate", [[("q", r, _)], [("k", j, _)]], ():

                def differentiate(x: list[list[FloatArray]]) -> list[FloatArray]:
                    (q, dout), (k, v) = (np.split(each[0], [channels], axis=1) for each in x)
                    dp = dout @ v.T
                    dq = np.einsum("ij,jd,ijd->id", dp, k, gaps(r, j))
                    dk = np.einsum("ij,id,ijd->jd", dp, q, gaps(r, j))
                    dv = np.einsum("id,jd,ijd,iv->jv", q, k, gaps(r, j), dout)
                    return [dq, np.concatenate([dk, dv], axis=1)]

                return [("dq", r, 0), ("dk", j, 0)], differentiate
            case "advance", [[], [("L", 0, p)]], ():
                return [("S", 1, p)], lambda x: [x[1][0]]
            case "advance", [[("S", _, _)], [("L", own, p)]], ():
                decays = whole[self._channels(p), None]
                return [("S", own + 1, p)], lambda x: [x[0][0] * decays + x[1][0]]
            case "fold" | "fold_back", [[(tensor, _, p), *_] as states], (r,) if tensor == (
                "L" if kernel == "fold" else "M"
            ):
                if any(each[0] != tensor for each in states):
                    raise CannotExecuteError(f"{kernel} of {states}")
                distances = [abs(r - j) - 1 for _, j, _ in states]
                scale = [whole[self._channels(p), None] ** distance for distance in distances]
                target = ("S" if tensor == "L" else "T", r, p)
                return [target], lambda x: [sum((each * y for each, y in zip(x[0], scale, strict=True)), np.zeros(1))]
            case "apply_state", [[("q", r, _)], [("S", _, p)]], ():
                own, decays = self._channels(p), self.decay[self._channels(p)] ** (i + 1)
                return [("o", r, 0)], lambda x: [(x[0][0][:, own] * decays) @ x[1][0]]
            case "dq_of_state", [[("q", r, _)], [("S", _, _)]], ():
                decays = self.decay ** (i + 1)
                return [("dq", r, 0)], lambda x: [(x[0][0][:, channels:] @ x[1][0].T) * decays]
            case "dk_of_state", [[("k", r, _)], [("T", _, _)]], ():
                decays = self.decay ** (POSITIONS - 1 - i)

                def dk_of_state(x: list[list[FloatArray]]) -> list[FloatArray]:
                    k, v = np.split(x[0][0], [channels], axis=1)
                    return [np.concatenate([(v @ x[1][0].T) * decays, (k * decays) @ x[1][0]], axis=1)]

                return [("dk", r, 0)], dk_of_state
        raise CannotExecuteError(f"no kernel {kernel} of {operands} with {params}")
