"""How what comes to copies is joined to them: data are copied, sums added, attention results merged by log-sum-exp.

What arrives together, or is added by one kernel call, is joined together, in one kernel on a GPU. Its rows need not lie
side by side: a `Sum` has tables of rows then. Example: a call adds to 12 blocks, of which 7 and 5 lie side by side in
the buffer of the step. Their rows are 0 .. 11 times the rows of a block in what the call returns, and anywhere in the
memory, so one table says where each goes.

Sums are planned once and used in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from runtime.executor.views import DTYPES, Format, Views, store
from runtime.kernels import fused
from tasp_lab.schedule.blocks import Join as How
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.rank_part import Place


class Parts(NamedTuple):
    """What a kernel call adds to some blocks: their fields, the rows of each block after those of the one before."""

    blocks: Sequence[int]
    fields: Views


class Term(NamedTuple):
    """Rows that are joined to a copy of a block.

    `into` is where that lies in the memory, or `OUTSIDE`; `part` where the rows do: in the memory, in bytes, or in the
    output number `output` of the kernel call `call`, in rows. `is_first`: nothing is in the copy yet.
    """

    block: int
    into: int
    at_home: bool
    call: int | None
    output: int
    part: int
    is_first: bool


@dataclass(eq=False)
class Sum:
    """Terms that are joined in one go; `into` is None for the caller's tensors, `part` for what the call returns.

    Rows are those that `fused` takes. `unaligned`: a field of the memory can only be copied (`views`).
    """

    terms: Sequence[Term]
    how: How
    into: Views | None
    rows: torch.Tensor | None
    part: Views | None
    part_rows: torch.Tensor | range | None
    unaligned: bool
    by_emptiness: dict[tuple[bool, ...], list[Sum]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = self.terms[0]
        self.blocks = [term.block for term in self.terms]
        self.call, self.output, self.at_home, self.is_first = first.call, first.output, first.at_home, first.is_first


class Sums:
    """Plans and joins sums in one memory.

    Parameters
    ----------
    kind, sizes, home_sizes : by block.
    how : by kind.
    wire, home : the formats of kinds in buffers, and of resident copies.
    """

    def __init__(
        self, kind: Sequence[int], sizes: Sequence[int], how: Sequence[How], wire: Sequence[Format],
        home: Sequence[Format],
    ) -> None:  # fmt: skip
        self._kind, self._sizes, self._how, self._formats = kind, sizes, how, (wire, home)

    def rows(self, block: int) -> int:
        """How many rows a block has."""
        return self._sizes[block] // self._formats[False][self._kind[block]].row_bytes

    def of_call(self, places: Iterable[Place], call: int, found: Sequence[Parts], at_home: bool) -> list[Term]:
        """What a kernel call adds to places."""
        where = {
            block: (output, first)
            for output, parts in enumerate(found)
            for block, first in zip(
                parts.blocks, accumulate((self.rows(block) for block in parts.blocks), initial=0), strict=False
            )
        }
        return [Term(place.block, place.offset, at_home, call, *where[place.block], False) for place in places]

    def plan(self, terms: Sequence[Term]) -> list[Sum]:
        """Terms in their order, those that can be together in one sum. No two terms of a sum are of one block."""
        runs: list[list[Term]] = []
        blocks = set[int]()
        for term in terms:
            if runs and term.block not in blocks and self._fits(runs[-1][-1], term):
                runs[-1].append(term)
            else:
                runs.append([term])
                blocks = set()
            blocks.add(term.block)
        return [self._sum(run) for run in runs]

    def joiner(
        self, sum_: Sum, empty: bool, found: Sequence[Parts], bound: Callable[[Sequence[int]], Views]
    ) -> Callable[[Sequence[Parts]], None]:
        """As `join`, for what a call returns in every run, alike but for the numbers in it."""
        into, output, blocks = sum_.into, sum_.output, sum_.blocks
        if empty or not self._adds_plainly(sum_, found):
            return lambda found: self.join(sum_, empty, found, bound)

        def add(found: Sequence[Parts]) -> None:
            for total, new in zip(bound(blocks) if into is None else into, found[output].fields, strict=True):
                total.add_(new)

        return add

    def _adds_plainly(self, sum_: Sum, found: Sequence[Parts]) -> bool:
        """Whether a host adds all that a call returns, unrounded, to rows that lie side by side."""
        if sum_.how != "add" or sum_.unaligned or sum_.call is None or sum_.rows is not None:
            return False
        fields, rows = found[sum_.output].fields, sum_.part_rows
        home = [DTYPES[field.dtype].itemsize for field in self._format(sum_.terms[0]).fields] or [1]
        is_wider = sum_.at_home and any(new.dtype.itemsize > size for new, size in zip(fields, home, strict=True))
        return isinstance(rows, range) and fields[0].is_cpu and len(fields[0]) == len(rows) and not is_wider

    def join(self, sum_: Sum, empty: bool, found: Sequence[Parts], bound: Callable[[Sequence[int]], Views]) -> None:
        """Join a sum, whose copies are `empty` or not; `found` is what its call has returned.

        `bound` has the caller's tensors of blocks that lie side by side there.
        """
        part = found[sum_.output].fields if sum_.part is None else sum_.part
        part_rows = sum_.part_rows
        if isinstance(part_rows, range):
            if part[0].shape[0] != len(part_rows):
                part = [each.narrow(0, part_rows.start, len(part_rows)) for each in part]
            part_rows = None
        into = sum_.into
        if sum_.unaligned:
            first = sum_.terms[0]
            format_, size = self._format(first), self._bytes(first)
            if first.call is None:
                part = self._wire(first).views(first.part, self._sizes[first.block])[0]
            if first.into != OUTSIDE:
                into = format_.views(first.into, size)[0]
        if into is None:
            into = bound(sum_.blocks)
        if sum_.how == "merge":
            (out, lse), (part_out, part_lse) = into, part
            fused.merge(out, lse, part_out, part_lse, sum_.rows, part_rows, empty=empty)
        else:
            fused.add(into, part, sum_.rows, part_rows, empty=empty or sum_.how != "add", rounded=sum_.at_home)
        if sum_.unaligned and first.into != OUTSIDE:
            store(format_.memory[first.into : first.into + size], format_.fields, into)

    def resident(self, blocks: Sequence[int], offsets: Sequence[int]) -> tuple[Views, torch.Tensor | None] | None:
        """The rows of resident copies of one kind: themselves if they lie side by side, else all rows, and which.

        None if they cannot be numbered, as a field is unaligned, or as they do not lie at multiples of a row.
        """
        terms = [Term(block, at, True, 0, 0, 0, True) for block, at in zip(blocks, offsets, strict=True)]
        format_ = self._format(terms[0])
        if any(self._group(term) != self._group(terms[0]) or self._is_unaligned(term) for term in terms):
            return None
        return self._in_memory(format_, offsets, terms)

    def split(self, sum_: Sum, empty: Sequence[bool]) -> list[tuple[Sum, bool]]:
        """A sum in those whose copies are all empty, or all not."""
        if all(empty):
            return [(sum_, True)]
        key = tuple(empty)
        if key not in sum_.by_emptiness:
            runs = [list(run) for _, run in groupby(zip(empty, sum_.terms, strict=True), key=lambda each: each[0])]
            sum_.by_emptiness[key] = [self._sum([term for _, term in run]) for run in runs]
        return [(each, is_empty) for each, (is_empty, _) in zip(sum_.by_emptiness[key], groupby(empty), strict=True)]

    def _fits(self, before: Term, term: Term) -> bool:
        """Whether two terms can be in one sum: of one kind, format and source, in rows that can be numbered together.

        Blocks of the caller's tensors whose rows are one operand lie side by side in the order of numbers. Of bytes,
        only neighbours are together.
        """
        format_, wire = self._format(term), self._wire(term)
        if self._group(before) != self._group(term):
            return False
        if term.into == OUTSIDE and (term.call is None or term.block != before.block + 1):
            return False
        if format_.fields and not self._is_unaligned(term):
            return True
        return (
            (term.into == OUTSIDE or term.into == before.into + self._bytes(before))
            and term.part == before.part + (self._sizes[before.block] if term.call is None else self.rows(before.block))
            and not wire.fields
        )

    def _group(self, term: Term) -> tuple[object, ...]:
        into = -1 if term.into == OUTSIDE else term.into % self._format(term).row_bytes
        part = 0 if term.call is not None else term.part % self._wire(term).row_bytes
        return self._kind[term.block], term.at_home, into, term.call, term.output, part, term.is_first

    def _sum(self, terms: Sequence[Term]) -> Sum:
        first, total = terms[0], sum(self.rows(term.block) for term in terms)
        format_, wire, how = self._format(first), self._wire(first), self._how[self._kind[first.block]]
        if self._is_unaligned(first):
            part = range(first.part, first.part + total) if first.call is not None else None
            return Sum(terms, how, None, None, None if first.call is not None else (), part, True)
        into, rows = None, None
        if first.into != OUTSIDE:
            into, rows = self._in_memory(format_, [term.into for term in terms], terms)
        if first.call is None:
            part_views, part_rows = self._in_memory(wire, [term.part for term in terms], terms)
            return Sum(terms, how, into, rows, part_views, part_rows, False)
        starts = [term.part for term in terms]
        table = self._table(starts, terms, wire.memory.device)
        return Sum(terms, how, into, rows, None, range(starts[0], starts[0] + total) if table is None else table, False)

    def _in_memory(
        self, format_: Format, offsets: Sequence[int], terms: Sequence[Term]
    ) -> tuple[Views, torch.Tensor | None]:
        """The rows of terms in the memory: themselves if they lie side by side, else all rows, and which."""
        size, phase = format_.row_bytes, offsets[0] % format_.row_bytes
        table = self._table([offset // size for offset in offsets], terms, format_.memory.device)
        if table is None:
            return format_.views(offsets[0], sum(self.rows(term.block) for term in terms) * size)[0], None
        whole = (len(format_.memory) - phase) // size * size
        return format_.views(phase, whole)[0], table

    def _table(self, starts: Sequence[int], terms: Sequence[Term], device: torch.device) -> torch.Tensor | None:
        """The rows of terms that start at these rows; None if they follow one another."""
        counts = [self.rows(term.block) for term in terms]
        if all(start + count == after for start, count, after in zip(starts, counts, starts[1:], strict=False)):
            return None
        rows = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        return torch.cat(rows).to(device)

    def _is_unaligned(self, term: Term) -> bool:
        into, part = self._format(term), self._wire(term)
        return not (
            (term.into == OUTSIDE or into.views(term.into, self._bytes(term))[1])
            and (term.call is not None or part.views(term.part, self._sizes[term.block])[1])
        )

    def _bytes(self, term: Term) -> int:
        return self.rows(term.block) * self._format(term).row_bytes

    def _format(self, term: Term) -> Format:
        return self._formats[term.at_home][self._kind[term.block]]

    def _wire(self, term: Term) -> Format:
        return self._formats[False][self._kind[term.block]]
