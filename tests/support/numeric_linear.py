"""Contents of blocks and kernels of `tasp_lab.schedules.linear.task` in float64, position by position.

Everything follows from the recurrence ``S_i = diag(a_i) S_(i-1) + k_i v_i^T, o_i = q_i^T S_i`` (`run`) and its
vector-Jacobian product (`differentiate`); with a full mask every S_i is the last one. Arrays are (positions, heads,
elements), states (KV heads, elements, elements); the total decay of a chunk is a further column of its state.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.schedules.linear import task as linear
from tests.support.numeric_executor import CannotExecuteError, Kernel, Sums, part_of
from tests.support.numeric_softmax import Inputs
from tests.support.world import KernelCall

Column = tuple[int, int, int]
"""Tensor, chunk and piece of a block."""


class Gradients(NamedTuple):
    """Of queries, keys, values, decays, and the state before the first position."""

    q: FloatArray
    k: FloatArray
    v: FloatArray
    a: FloatArray
    state: FloatArray


def run(a: FloatArray, k: FloatArray, v: FloatArray, state: FloatArray) -> FloatArray:
    """The states at all positions, (positions, KV heads, elements, elements), from that before them."""
    states = []
    for i in range(len(a)):
        state = a[i][:, :, None] * state + np.einsum("hd,he->hde", k[i], v[i])
        states.append(state)
    return np.array(states)


def outputs(q: FloatArray, states: FloatArray) -> FloatArray:
    """The output of each query from the state at its position."""
    users = q.shape[1] // states.shape[1]
    return np.einsum("ihd,ihde->ihe", q, np.repeat(states, users, axis=1))


def outer(q: FloatArray, dout: FloatArray, kv_heads: int) -> FloatArray:
    """What each position adds to the gradient of its state: a sum over the query heads of a KV head."""
    grouped = (x.reshape(len(x), kv_heads, -1, x.shape[2]) for x in (q, dout))
    return np.einsum("ihud,ihue->ihde", *grouped)


def differentiate(
    a: FloatArray, q: FloatArray, k: FloatArray, v: FloatArray, state: FloatArray, dout: FloatArray, behind: FloatArray
) -> Gradients:
    """The vector-Jacobian product of `run` and `outputs`; `behind` is the gradient of the last state from elsewhere."""
    states, added = run(a, k, v, state), outer(q, dout, a.shape[1])
    users = q.shape[1] // a.shape[1]
    dq = np.einsum("ihde,ihe->ihd", np.repeat(states, users, axis=1), dout)
    dk, dv, da = np.zeros_like(k), np.zeros_like(v), np.zeros_like(a)
    for i in reversed(range(len(a))):
        gradient = behind + added[i]
        dk[i], dv[i] = np.einsum("hde,he->hd", gradient, v[i]), np.einsum("hde,hd->he", gradient, k[i])
        da[i] = (gradient * (states[i - 1] if i else state)).sum(axis=2)
        behind = a[i][:, :, None] * gradient
    return Gradients(dq, dk, dv, da, behind)


def differentiate_full(
    q: FloatArray, k: FloatArray, v: FloatArray, state: FloatArray, dout: FloatArray, gradient: FloatArray
) -> Gradients:
    """The same with a full mask, where all positions have one state: these, and those of `state` and `gradient`."""
    users = q.shape[1] // k.shape[1]
    whole, own = state + np.einsum("ihd,ihe->hde", k, v), outer(q, dout, k.shape[1]).sum(axis=0)
    dq = np.einsum("hde,ihe->ihd", np.repeat(whole, users, axis=0), dout)
    total = gradient + own
    dk, dv = np.einsum("hde,ihe->ihd", total, v), np.einsum("hde,ihd->ihe", total, k)
    return Gradients(dq, dk, dv, np.zeros_like(k), own)


class LinearNumbers(Sums):
    """The numbers of a layer; queries, keys and values, and the gradient of the output, are drawn unless given."""

    def __init__(
        self, task: linear.LinearTask, seed: int = 0, inputs: Inputs | None = None, dout: FloatArray | None = None
    ) -> None:
        layer, self.task = task.workload, task
        random, self.size, self.kv_heads = np.random.default_rng(seed), layer.head_dim, layer.kv_head_count
        of_queries, of_keys = (layer.sequence, layer.heads), (layer.sequence, self.kv_heads)
        shapes = [(*of_queries, self.size), (*of_keys, self.size), (*of_keys, layer.value_size)]
        self.q, self.k, self.v = inputs or (random.normal(size=shape) for shape in shapes)
        drawn = random.normal(size=(*of_queries, layer.value_size))
        self.dout = drawn if dout is None else dout
        width = self.size if layer.decay == "channel" else 1
        self.gates = np.log(random.uniform(0.3, 1.0, size=(layer.sequence, self.kv_heads, width)))
        self.a = self._decays(0, layer.sequence, self.gates if task.has_gates else None, slice(None))
        nothing = np.zeros((self.kv_heads, self.size, layer.value_size))
        if task.is_full:
            state = np.einsum("ihd,ihe->hde", self.k, self.v)
            self.out = outputs(self.q, np.repeat(state[None], layer.sequence, axis=0))
            found = differentiate_full(self.q, self.k, self.v, nothing, self.dout, nothing)
        else:
            self.out = outputs(self.q, run(self.a, self.k, self.v, nothing))
            found = differentiate(self.a, self.q, self.k, self.v, nothing, self.dout, nothing)
        backward = task.is_backward
        self.gradients: Inputs = (found.q, found.k, found.v)
        self.contents = {
            linear.QUERIES: np.concatenate([self.q, self.dout], axis=2) if backward else self.q,
            linear.KEYS: np.concatenate([self.k, self.v], axis=2),
            linear.GATES: self.gates,
            linear.RESULTS: self.out,
            linear.QUERY_GRADIENTS: found.q,
            linear.KEY_GRADIENTS: np.concatenate([found.k, found.v], axis=2),
            linear.GATE_GRADIENTS: self._of_gates(self.a * found.a),
        }
        self.columns: list[Column] = list(
            zip(task.tensor.tolist(), task.segment.tolist(), task.piece.tolist(), strict=True)
        )
        self.group = task.group.tolist()
        columns = zip(self.columns, self.group, strict=True)
        self.block = {(*column, group): block for block, (column, group) in enumerate(columns)}

    def may_be_saved(self, block: int) -> bool:
        saved = linear.KEYS, linear.GATES, linear.PREFIX_STATES
        return self.task.is_backward and self.columns[block][0] in saved

    def _decays(self, start: int, end: int, gates: FloatArray | None, heads: slice) -> FloatArray:
        """Of positions from start to end, (positions, KV heads, elements): 0 where a document starts."""
        given = np.array(self.task.decays)[heads][:, None] if gates is None else np.exp(gates)
        found = np.broadcast_to(given, (end - start, np.shape(given)[-2], self.size)).copy()
        starts = self.task.workload.document_starts
        found[starts[(starts >= start) & (starts < end)] - start] = 0.0
        return found

    def _of_gates(self, gradient: FloatArray) -> FloatArray:
        return gradient if self.task.workload.decay == "channel" else gradient.sum(axis=2, keepdims=True)

    def _positions(self, chunk: int) -> tuple[int, int]:
        """The first position of a chunk or segment, and the one after its last."""
        chunks = len(self.task.owner)
        first, end = (chunk, chunk + 1) if chunk < chunks else self.task.segments[chunk - chunks]
        return int(self.task.start[first]), int(self.task.start[end - 1] + self.task.count[end - 1])

    # -- contents -----------------------------------------------------------------------------------------------------
    def where(self, block: int) -> tuple[int, tuple[slice, slice]]:
        tensor, chunk, _ = self.columns[block]
        if tensor not in self.contents:
            raise CannotExecuteError(f"block {block} has no positions")
        width = self.contents[tensor].shape[1] // self.task.head_groups
        return tensor, (slice(*self._positions(chunk)), self._slice(self.group[block], width))

    @staticmethod
    def _slice(group: int, width: int) -> slice:
        return slice(group * width, (group + 1) * width)

    def _kv_heads(self, group: int, piece: int | None = None) -> slice:
        """The KV heads of a group, or of a piece of all heads."""
        if piece is None:
            return self._slice(group, self.kv_heads // self.task.head_groups)
        return self._slice(group + piece, self.kv_heads // self.task.head_groups // self.task.pieces)

    def outputs(self, result: FloatArray) -> FloatArray:
        return result

    def content(self, block: int, part: int = -1) -> FloatArray:
        tensor, chunk, piece = self.columns[block]
        if tensor in self.contents:
            whole = self.contents[tensor][self.where(block)[1]]
            return whole if part < 0 else part_of(whole[None], part)
        heads = self._kv_heads(self.group[block], piece)
        if tensor in (linear.CHUNK_STATES, linear.CHUNK_GRADIENTS):
            start, end = self._positions(chunk)
            back = tensor == linear.CHUNK_GRADIENTS
            state = self._state(chunk, start if back else end, back=back)
            whole = self._with_total(state, self.a[start:end].prod(axis=0))[heads]
            return whole if part < 0 else part_of(whole[None], part)
        parts = np.array([each[heads] for each in self._parts(tensor, chunk)])
        if tensor == linear.PREFIX_STATES and self.task.is_backward:
            parts = parts.sum(axis=0)[None]
        return part_of(parts, part)

    def _parts(self, tensor: int, chunk: int) -> list[FloatArray]:
        """What each chunk adds to a state of other chunks."""
        back, chunks = tensor == linear.SUFFIX_GRADIENTS, range(len(self.task.owner))
        at = self._positions(chunk)[back]
        if self.task.is_full:
            return [self._state(each, at, back=back) * (each != chunk) for each in chunks]
        starts, start = self.task.workload.document_starts, self.task.start
        document = np.searchsorted(starts, at, side="right")  # of the first position that the state is for, or comes to
        same = [np.searchsorted(starts, start[each], side="right") == document for each in chunks]
        ends = [np.searchsorted(starts, start[each] + self.task.count[each] - 1, side="right") == document
                for each in chunks]  # fmt: skip
        which = [each for each in chunks if (each > chunk and same[each] if back else each < chunk and ends[each])]
        return [self._state(each, at, back=back) for each in which]

    def _state(self, chunk: int, at: int, *, back: bool) -> FloatArray:
        """What a chunk adds to the state before position `at`, or to the gradient of that state."""
        start, end = self._positions(chunk)
        added = outer(self.q, self.dout, self.kv_heads) if back else np.einsum("ihd,ihe->ihde", self.k, self.v)
        if self.task.is_full:
            return added[start:end].sum(axis=0)
        found = np.zeros_like(added[0])
        for i in reversed(range(at, end)) if back else range(start, at):
            own = added[i] * (start <= i < end)
            found = self.a[i][:, :, None] * (found + own) if back else self.a[i][:, :, None] * found + own
        return found

    def _with_total(self, state: FloatArray, total: FloatArray) -> FloatArray:
        if self.task.workload.decay == "none":
            return state
        return np.concatenate([state, total[:, :, None]], axis=2)

    # -- kernels ------------------------------------------------------------------------------------------------------
    def kernel(self, call: KernelCall) -> tuple[list[int], Kernel]:
        operands = [[self.columns[block] for block in each] for each in call.operands]
        groups = {self.group[block] for each in call.operands for block in each}
        if len(groups) != 1:
            raise CannotExecuteError(f"{call.kernel} of heads of groups {groups}")
        (group,) = groups
        found = _Kernels(self, group, call).find(operands)
        if found is None or any((*target, group) not in self.block for target in found[0]):
            raise CannotExecuteError(f"no kernel {call.kernel} of {operands} with {call.params}")
        return [self.block[(*target, group)] for target in found[0]], found[1]


Found = tuple[list[Column], Kernel] | None
"""What a kernel adds to, and what it computes; None if there is no such kernel."""


class _Kernels:
    """The kernels of one call, of one group of heads."""

    def __init__(self, numbers: LinearNumbers, group: int, call: KernelCall) -> None:
        self._numbers, self._task, self._call = numbers, numbers.task, call
        self._heads, self._group = numbers._kv_heads(group), group
        self._pieces = range(numbers.task.pieces)
        self._width = numbers.kv_heads // numbers.task.head_groups

    def find(self, operands: list[list[Column]]) -> Found:
        """The kernel of operands of these columns, whatever else a call of this name says."""
        name = self._call.kernel
        if name in ("fold", "fold_back", "advance", "retreat"):
            return self._of_states(name, operands)
        if name in ("combine", "combine_back"):
            return self._combine(name == "combine_back", operands)
        expected = {
            "make_state": ["k", "g"], "attend": ["q", "k", "g"], "attend_by_state": ["q", "k"],
            "apply_state": ["q", "S", "g"], "make_gradient_state": ["q", "g"], "differentiate": ["q", "k", "S", "g"],
            "differentiate_tile": ["q", "k"], "differentiate_by_state": ["q", "k"],
            "apply_gradient_state": ["k", "T", "S", "g"] if self._task.has_gates else ["k", "T"],
        }.get(name)  # fmt: skip
        backward = name.startswith("diff") or "gradient" in name
        if expected is None or backward != self._task.is_backward:
            return None
        expected = [each for each in expected if each != "g" or self._task.has_gates]
        if [self._letter(each) for each in operands] != expected and not self._fits(operands, expected):
            return None
        chunk = operands[0][0][1]
        if name in ("attend", "attend_by_state", "differentiate_tile", "differentiate_by_state"):
            return self._of_tile(name, chunk, operands[1][0][1])
        if self._call.params or any(at != chunk for each in operands for _, at, _ in each):
            return None
        return self._of_chunk(name, chunk)

    def _letter(self, columns: list[Column]) -> str:
        """The tensor of an operand that is one block, or all pieces of a state; empty for anything else."""
        letters = {linear.KEYS: "k", linear.QUERIES: "q", linear.GATES: "g", linear.PREFIX_STATES: "S",
                   linear.SUFFIX_GRADIENTS: "T"}  # fmt: skip
        if not columns or columns[0][0] not in letters:
            return ""
        tensor, chunk, _ = columns[0]
        pieces = self._pieces if letters[tensor] in "ST" else range(1)
        return letters[tensor] if columns == [(tensor, chunk, piece) for piece in pieces] else ""

    def _fits(self, operands: list[list[Column]], expected: list[str]) -> bool:
        """Whether operands are as expected, but for prefix states that are not there."""
        if len(operands) != len(expected):
            return False
        return all(
            self._letter(each) == letter or (letter == "S" and not each)
            for each, letter in zip(operands, expected, strict=True)
        )

    def _all_pieces(self, tensor: int, chunk: int) -> list[Column]:
        return [(tensor, chunk, piece) for piece in self._pieces]

    def _cut(self, state: FloatArray) -> list[FloatArray]:
        return np.split(state, len(self._pieces), axis=0)

    def _whole(self, pieces: list[FloatArray]) -> FloatArray:
        """A state from its pieces, zeros if there are none."""
        layer = self._task.workload
        return np.concatenate(pieces) if pieces else np.zeros((self._width, layer.head_dim, layer.value_size))

    def _split(self, both: FloatArray) -> list[FloatArray]:
        """Keys and values, or queries and the gradients of results, that lie side by side."""
        return np.split(both, [self._task.workload.head_dim], axis=2)

    def _no_values(self, keys: FloatArray) -> FloatArray:
        """Values, or gradients of results, of 0 beside these keys, or queries."""
        return np.zeros((*keys.shape[:2], self._task.workload.value_size))

    def _a(self, chunk: int, x: list[list[FloatArray]]) -> FloatArray:
        """The decays of a chunk, from its gates, the last operand, if it has any."""
        start, end = self._numbers._positions(chunk)
        return self._numbers._decays(start, end, x[-1][0] if self._task.has_gates else None, self._heads)

    # -- of one chunk -------------------------------------------------------------------------------------------------
    def _of_chunk(self, name: str, chunk: int) -> Found:
        task, full, numbers = self._task, self._task.is_full, self._numbers

        def make_state(x: list[list[FloatArray]]) -> list[FloatArray]:
            (k, v), a = self._split(x[0][0]), self._a(chunk, x)
            state = np.einsum("ihd,ihe->hde", k, v) if full else run(a, k, v, self._whole([]))[-1]
            return self._cut(numbers._with_total(state, a.prod(axis=0)))

        def apply_state(x: list[list[FloatArray]]) -> list[FloatArray]:
            a, state = self._a(chunk, x), self._whole(x[1])
            none = np.zeros_like(a), self._no_values(a)
            states = np.repeat(state[None], len(a), axis=0) if full else run(a, *none, state)
            return [outputs(x[0][0], states)]

        def make_gradient_state(x: list[list[FloatArray]]) -> list[FloatArray]:
            (q, dout), a = self._split(x[0][0]), self._a(chunk, x)
            none = self._whole([])
            found = differentiate(a, q, np.zeros_like(a), self._no_values(a), none, dout, none).state
            if full:
                found = outer(q, dout, self._width).sum(axis=0)
            return self._cut(numbers._with_total(found, a.prod(axis=0)))

        def both(x: list[list[FloatArray]]) -> list[FloatArray]:
            (q, dout), (k, v) = (self._split(x[at][0]) for at in (0, 1))
            state, none, a = self._whole(x[2]), self._whole([]), self._a(chunk, x)
            if full:
                found = differentiate_full(q, k, v, state, dout, none)
            else:
                found = differentiate(a, q, k, v, state, dout, none)
            gates = [numbers._of_gates(a * found.a)] if task.has_gates else []
            return [found.q, np.concatenate([found.k, found.v], axis=2), *gates]

        def apply_gradient_state(x: list[list[FloatArray]]) -> list[FloatArray]:
            (k, v), gradient, a = self._split(x[0][0]), self._whole(x[1]), self._a(chunk, x)
            state = self._whole(x[2] if task.has_gates else [])
            no_queries = np.zeros((len(k), self._width, k.shape[2]))
            if full:
                found = differentiate_full(no_queries, k, v, state, self._no_values(k), gradient)
            else:
                found = differentiate(a, no_queries, k, v, state, self._no_values(k), gradient)
            gates = [numbers._of_gates(a * found.a)] if task.has_gates else []
            return [np.concatenate([found.k, found.v], axis=2), *gates]

        gates = [(linear.GATE_GRADIENTS, chunk, 0)] if task.has_gates else []
        dq, dk = (linear.QUERY_GRADIENTS, chunk, 0), (linear.KEY_GRADIENTS, chunk, 0)
        kernels: dict[str, tuple[list[Column], Kernel]] = {
            "make_state": (self._all_pieces(linear.CHUNK_STATES, chunk), make_state),
            "apply_state": ([(linear.RESULTS, chunk, 0)], apply_state),
            "make_gradient_state": (self._all_pieces(linear.CHUNK_GRADIENTS, chunk), make_gradient_state),
            "differentiate": ([dq, dk, *gates], both),
            "apply_gradient_state": ([dk, *gates], apply_gradient_state),
        }
        return kernels[name]

    # -- of the queries of one chunk and the keys of one --------------------------------------------------------------
    def _of_tile(self, name: str, query: int, key: int) -> Found:
        if len(self._call.params) != 1 or (name.endswith("by_state") and query == key and not self._task.is_full):
            return None
        distance, full = self._call.params[0], self._task.is_full
        count = int(self._task.count[key])
        if self._task.has_gates and self._call.operands[2] != (
            self._numbers.block[linear.GATES, query, 0, self._group],
        ):
            return None
        if query != key and (self._task.has_gates or (not full and distance < count)):
            return None
        gap = np.array(self._task.decays)[self._heads][:, None] ** max(distance - count, 0)

        def tile(x: list[list[FloatArray]]) -> list[FloatArray]:
            q, (k, v) = x[0][0], self._split(x[1][0])
            q, dout = self._split(q) if self._task.is_backward else (q, self._no_values(q))
            none = self._whole([])
            if full:
                found = differentiate_full(q, k, v, none, dout, none)
                out = outputs(q, np.repeat(np.einsum("ihd,ihe->hde", k, v)[None], len(q), axis=0))
            elif query == key:
                a = self._a(query, x)
                found, out = differentiate(a, q, k, v, none, dout, none), outputs(q, run(a, k, v, none))
            else:
                a, zeros = self._a(query, x), np.zeros((len(q), *k.shape[1:]))
                zero_values = self._no_values(zeros)
                state = gap[:, :, None] * run(self._a(key, x), k, v, none)[-1]
                out = outputs(q, run(a, zeros, zero_values, state))
                found = differentiate(a, q, zeros, zero_values, state, dout, none)
                no_queries = np.zeros_like(k)
                behind = gap[:, :, None] * found.state
                keys = differentiate(self._a(key, x), no_queries, k, v, none, self._no_values(k), behind)
                found = found._replace(k=keys.k, v=keys.v)
            if not self._task.is_backward:
                return [out]
            return [found.q, np.concatenate([found.k, found.v], axis=2)]

        if not self._task.is_backward:
            return [(linear.RESULTS, query, 0)], tile
        return [(linear.QUERY_GRADIENTS, query, 0), (linear.KEY_GRADIENTS, key, 0)], tile

    # -- of states ----------------------------------------------------------------------------------------------------
    def _of_states(self, name: str, operands: list[list[Column]]) -> Found:
        back = name in ("fold_back", "retreat")
        own, summed = (
            (linear.CHUNK_GRADIENTS, linear.SUFFIX_GRADIENTS) if back else (linear.CHUNK_STATES, linear.PREFIX_STATES)
        )
        if back != self._task.is_backward:
            return None
        if name in ("fold", "fold_back"):
            return self._fold(operands, own, summed, back)
        if len(operands) != 2 or self._call.params or len(operands[1]) != 1 or operands[1][0][0] != own:
            return None
        _, chunk, piece = operands[1][0]
        if operands[0] not in ([], [(summed, chunk, piece)]):
            return None

        def chain(x: list[list[FloatArray]]) -> list[FloatArray]:
            state, total = self._parted(x[1][0])
            return [total * x[0][0] + state if x[0] else state]

        return [(summed, chunk + (-1 if back else 1), piece)], chain

    def _fold(self, operands: list[list[Column]], own: int, summed: int, back: bool) -> Found:
        count, pieces = len(self._call.params), len(self._pieces)
        if count != 1 or len(operands) != 1 or not operands[0] or len(operands[0]) % pieces:
            return None
        chunks = [chunk for _, chunk, _ in operands[0][::pieces]]
        if operands[0] != [each for chunk in chunks for each in self._all_pieces(own, chunk)]:
            return None

        def fold(x: list[list[FloatArray]]) -> list[FloatArray]:
            found, weight = np.zeros(1), np.ones(1)
            rows = [self._parted(np.concatenate(x[0][at : at + pieces])) for at in range(0, len(x[0]), pieces)]
            for state, total in rows if back else reversed(rows):
                found, weight = found + weight * state, weight * total
            return self._cut(found)

        return self._all_pieces(summed, self._call.params[0]), fold

    def _combine(self, back: bool, operands: list[list[Column]]) -> Found:
        """The state of a segment, and its total decay, from two parts of it in the order of the pass."""
        own = linear.CHUNK_GRADIENTS if back else linear.CHUNK_STATES
        if back != self._task.is_backward or len(operands) != 2 or self._call.params or not all(operands):
            return None
        first, second = (each[0][1] for each in operands)
        if operands != [self._all_pieces(own, each) for each in (first, second)]:
            return None
        chunks = len(self._task.owner)
        ranges = [(each, each + 1) if each < chunks else self._task.segments[each - chunks] for each in (first, second)]
        left, right = reversed(ranges) if back else ranges
        if left[1] != right[0] or (left[0], right[1]) not in self._task.segments:
            return None

        def combine(x: list[list[FloatArray]]) -> list[FloatArray]:
            (before, so_far), (state, total) = (self._parted(np.concatenate(each)) for each in x)
            found = state + total * before
            return self._cut(found if self._task.workload.decay == "none" else
                             np.concatenate([found, total * so_far], axis=2))  # fmt: skip

        return self._all_pieces(own, chunks + self._task.segments.index((left[0], right[1]))), combine

    def _parted(self, record: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The state of a chunk and its total decay."""
        if self._task.workload.decay == "none":
            return record, np.ones(1)
        return record[:, :, :-1], record[:, :, -1:]
