"""Kernel calls on packed documents: one of FlashAttention for all documents and each kind of mask, or one per document.

    call = PackedCall(task.segments(queries, keys), queries=96, keys=64, device=q.device)
    attend_packed(kernel, q, k, v, scale, call)

The rows of each segment (`tasp_lab.workload.packing`) are brought side by side, unless they are already.
FlashAttention then takes the cumulative lengths of all segments whose window is the same: all documents of a full mask,
or of a causal one. Documents with a limit to the left of their own length, and what sees only a part of its document,
may have other windows. Other kernels are called once per segment.

Where several segments share a query, as a mask of ranges has them, calls follow one another in rounds: in a round no
query occurs twice, and the results of rounds are merged by their log-sum-exp (`runtime.kernels.fused`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import torch

from runtime.kernels import fused
from runtime.kernels.partials import (
    Band,
    Flash,
    Gradients,
    Lengths,
    Partial,
    Rows,
    constant,
    lse_dtype,
    no_keys,
    rows_contiguous,
    trim,
    window,
)
from runtime.kernels.registry import Kernel
from tasp_lab.workload.packing import PackedSegment

Tensor = torch.Tensor


class Sequences(NamedTuple):
    """Segments with the same window, one after another among all: where their rows begin, with the end of the last."""

    band: Band
    query_starts: tuple[int, ...]
    key_starts: tuple[int, ...]


class PackedCall:
    """What a call computes, prepared once: the rows of its segments in order, and which of them go together.

    `queries` and `keys` are the rows of the operands. A query and a key may each be in several segments, both together
    in one at most, and each row of a segment is in its band. `rest` has the segments that share queries with others.
    """

    def __init__(self, segments: Sequence[PackedSegment], queries: int, keys: int, device: torch.device) -> None:
        self.queries, self.keys = queries, keys
        segments, others = _first_round(segments, queries)
        self.rest = PackedCall(others, queries, keys, device) if others else None
        bands = [trim(*each.shape) for each in segments]
        order = sorted(range(len(segments)), key=lambda at: window(bands[at]))
        self.bands = [bands[at] for at in order]
        self._query_rows, self.covers_queries = _rows([segments[at].queries for at in order], queries, device)
        self._key_rows, self._keys_once = _rows([segments[at].keys for at in order], keys, device)
        self.query_starts = tuple(accumulate((band.queries for band in self.bands), initial=0))
        self.key_starts = tuple(accumulate((band.keys for band in self.bands), initial=0))

    @property
    def rounds(self) -> Iterator[PackedCall]:
        """This call without its rest, then those of the rest."""
        call: PackedCall | None = self
        while call is not None:
            yield call
            call = call.rest

    @property
    def sequences(self) -> list[Sequences]:
        """The segments by their windows."""
        found = []
        for _, group in groupby(range(len(self.bands)), key=lambda at: window(self.bands[at])):
            first, *_ = members = list(group)
            ends = slice(first, members[-1] + 2)
            found.append(Sequences(self.bands[first], self.query_starts[ends], self.key_starts[ends]))
        return found

    def take_queries(self, x: Tensor) -> Tensor:
        """The rows of queries of all segments."""
        return x if self._query_rows is None else x.index_select(1, self._query_rows)

    def take_keys(self, x: Tensor) -> Tensor:
        """The rows of keys of all segments."""
        return x if self._key_rows is None else x.index_select(1, self._key_rows)

    def give_queries(self, found: Tensor, value: float = 0) -> Tensor:
        """The rows of all segments back in their places; `value` for queries in none."""
        if self._query_rows is None:
            return found
        empty = torch.empty if self.covers_queries else torch.zeros
        whole = empty(found.shape[0], self.queries, *found.shape[2:], dtype=found.dtype, device=found.device)
        if value and not self.covers_queries:
            whole.fill_(value)
        return whole.index_copy_(1, self._query_rows, found)

    def merge_queries(self, whole: Partial, found: Partial) -> None:
        """Merge the results of all segments into those of all queries, in place."""
        out, lse, part, part_lse = (x.transpose(0, 1) for x in (*whole, *found))
        fused.merge(out, lse, part, part_lse, self._query_rows)

    def give_keys(self, found: Tensor) -> Tensor:
        """The gradients of keys of all segments back in their places; those of keys in several are added."""
        if self._key_rows is None:
            return found
        dtype = found.dtype if self._keys_once else lse_dtype(found.dtype)
        whole = torch.zeros(found.shape[0], self.keys, *found.shape[2:], dtype=dtype, device=found.device)
        return whole.index_add_(1, self._key_rows, found.to(dtype))


def _first_round(
    segments: Sequence[PackedSegment], queries: int
) -> tuple[Sequence[PackedSegment], Sequence[PackedSegment]]:
    """Segments that share no query, and the others, both in the given order.

    Segments are taken by their first query, so there are as few rounds as possible if each has one range of queries,
    and then by their window, so that those of one window are in one round.
    """
    taken, used = set[int](), np.zeros(queries, dtype=bool)
    for at in sorted(range(len(segments)), key=lambda at: _first_and_window(segments[at])):
        rows = [slice(each.start, each.stop) for each in segments[at].queries]
        if not any(used[each].any() for each in rows):
            taken.add(at)
            for each in rows:
                used[each] = True
    numbered = list(enumerate(segments))
    return [each for at, each in numbered if at in taken], [each for at, each in numbered if at not in taken]


def _first_and_window(segment: PackedSegment) -> tuple[int, tuple[int, int]]:
    return segment.queries[0].start, window(trim(*segment.shape))


def _rows(ranges: Sequence[Sequence[range]], count: int, device: torch.device) -> tuple[Tensor | None, bool]:
    """The rows of all ranges, None if they are all rows in order; and whether they are all rows once."""
    rows = np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(r.start, r.stop) for each in ranges for r in each)])
    if np.array_equal(rows, np.arange(count)):
        return None, True
    times = np.bincount(rows, minlength=count)
    return torch.from_numpy(rows).to(device), bool((times == 1).all())


def attend_packed(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float, call: PackedCall) -> Partial:
    """As `Kernel.attend`, of the pairs of queries and keys in the segments of a call."""
    if not call.bands or not q.numel():
        return no_keys(q, v)
    found = _attend_round(kernel, q, k, v, scale, call)
    if call.rest is None:
        return Partial(call.give_queries(found.out), call.give_queries(found.lse, -math.inf))
    whole = Partial(*(each.to(lse_dtype(found.out.dtype)) for each in no_keys(q, v)))  # merged without rounding
    for each in call.rounds:
        each.merge_queries(whole, found if each is call else _attend_round(kernel, q, k, v, scale, each))
    return whole


def _attend_round(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float, call: PackedCall) -> Partial:
    """The results of the rows that `call.take_queries` gives."""
    operands = call.take_queries(q), call.take_keys(k), call.take_keys(v)
    if flash := kernel.flash_on(q.device):
        parts = [_flash_attend(flash, *operands, scale, each) for each in call.sequences]
    else:
        parts = []
        for number, band in enumerate(call.bands):
            of_queries, of_keys = _segment(call, number)
            q_rows, k_rows, v_rows = operands[0][:, of_queries], operands[1][:, of_keys], operands[2][:, of_keys]
            parts.append(kernel.attend(q_rows, k_rows, v_rows, scale=scale, low=band.low, high=band.high))
    return parts[0] if len(parts) == 1 else Partial(*(torch.cat(fields, 1) for fields in zip(*parts, strict=True)))


def gradients_packed(kernel: Kernel, rows: Rows, k: Tensor, v: Tensor, scale: float, call: PackedCall) -> Gradients:
    """As `Kernel.backward`, of the pairs of queries and keys in the segments of a call."""
    if not call.bands or not rows.q.numel():
        return Gradients(*map(torch.zeros_like, (rows.q, k, v)))
    taken, keys, values = Rows(*map(call.take_queries, rows)), call.take_keys(k), call.take_keys(v)
    if flash := kernel.flash_on(rows.q.device):
        parts = [_flash_gradients(flash, taken, keys, values, scale, each) for each in call.sequences]
    else:
        parts = []
        for number, band in enumerate(call.bands):
            of_queries, of_keys = _segment(call, number)
            dout, q, out, lse = (each[:, of_queries] for each in taken)
            operands = dout, q, keys[:, of_keys], values[:, of_keys], out, lse
            parts.append(kernel.backward(*operands, scale=scale, low=band.low, high=band.high))
    dq, dk, dv = (parts[0][at] if len(parts) == 1 else torch.cat([each[at] for each in parts], 1) for at in range(3))
    found = Gradients(call.give_queries(dq), call.give_keys(dk), call.give_keys(dv))
    if call.rest is None:
        return found
    more = gradients_packed(kernel, rows, k, v, scale, call.rest)
    return Gradients(*(one.to(lse_dtype(one.dtype)) + other for one, other in zip(found, more, strict=True)))


def _segment(call: PackedCall, number: int) -> tuple[slice, slice]:
    queries, keys = call.query_starts, call.key_starts
    return slice(queries[number], queries[number + 1]), slice(keys[number], keys[number + 1])


def _flash_attend(flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, sequences: Sequences) -> Partial:
    (q, k, v), lengths = _packed(sequences, (q,), (k, v))
    out, lse = flash.forward(*map(_joined_rows, (q, k, v)), scale, sequences.band, lengths)
    return Partial(out.view(*q.shape[:2], *out.shape[1:]), lse.view(-1, *q.shape[:2]).permute(1, 2, 0))


def _flash_gradients(flash: Flash, rows: Rows, k: Tensor, v: Tensor, scale: float, sequences: Sequences) -> Gradients:
    """Rows without keys have weight 0 at +inf."""
    (dout, q, out, lse, k, v), lengths = _packed(sequences, rows, (k, v))
    lse = lse.permute(2, 0, 1).flatten(1).contiguous()
    found = flash.backward(*map(_joined_rows, (dout, q, k, v, out)), lse, scale, sequences.band, lengths)
    return Gradients(*(x.view(like.shape) for x, like in zip(found, (q, k, v), strict=True)))


def _packed(
    sequences: Sequences, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> tuple[list[Tensor], Lengths]:
    """The rows of the sequences, and their lengths."""
    found, lengths, longest = list[Tensor](), list[Tensor](), list[int]()
    for tensors, starts in ((of_queries, sequences.query_starts), (of_keys, sequences.key_starts)):
        found += [each[:, starts[0] : starts[-1]] for each in tensors]
        batch, device = tensors[0].shape[0], tensors[0].device
        lengths.append(_cumulative_lengths(starts, batch, device))
        longest.append(int(np.diff(starts).max()))
    return found, Lengths(lengths[0], lengths[1], longest[0], longest[1])


def _cumulative_lengths(starts: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    """Where each sequence begins, those of one batch entry after those of another, and where the last one ends."""
    rows = starts[-1] - starts[0]
    firsts = [start - starts[0] + rows * entry for entry in range(batch) for start in starts[:-1]]
    return constant((*firsts, rows * batch), torch.int32, device)


def _joined_rows(x: Tensor) -> Tensor:
    """[batch, rows, heads, ...] as [batch * rows, heads, ...], with what fused operators require of rows."""
    return rows_contiguous(x.flatten(0, 1))
