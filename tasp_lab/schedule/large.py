"""Loops over the parts and the readers of copies in large schedules, as machine code.

`tasp_lab.schedule.dependencies.Copies` derives the same for small schedules by sorting and searching arrays:
`sorted_parts` is what its constructor finds, `edge_numbers` are the edges of `Copies.edges` without those of sums that
are read where they stay. Here a table with an entry per copy takes the place of each search.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import Int32Array, IntArray


class Ends(NamedTuple):
    """For each step, where its entries end among transfers, parts that calls add, and blocks that calls read."""

    transfers: IntArray
    adds: IntArray
    reads: IntArray


class Sorted(NamedTuple):
    """The parts by copy and step: their `order`; of each reader, the positions `first` to `end` that it waits for.

    `of_parts` and `of_reads` are the columns `first` of `tasp_lab.schedule.dependencies.Uses`.
    """

    order: IntArray
    first: IntArray
    end: IntArray
    of_parts: IntArray
    of_reads: IntArray

    @classmethod
    def empty(cls, parts: int, reads: int) -> Sorted:
        """Tables to fill in, of a small type: there are millions."""
        return cls(*(np.zeros(count, dtype="i4") for count in (parts, reads, reads, parts, reads)))


class CopyTable(NamedTuple):
    """For each copy, positions in the order of parts: its first part, the first of the last step, and the end."""

    start: Int32Array
    last: Int32Array
    end: Int32Array

    @classmethod
    def of(cls, copies: int) -> CopyTable:
        return cls(*(np.zeros(copies, dtype=np.int32) for _ in range(3)))


def sorted_parts(
    part_copy: IntArray, read_copy: IntArray, read_stays: IntArray, ends: Ends, copies: CopyTable, found: Sorted
) -> int:
    """Sort parts by copy and step, in the order in which they come. Fills in `found`.

    The copy of each part and reader is a number; transfers come before calls, each in the order of steps.
    """
    for part in range(len(part_copy)):
        copies.end[part_copy[part]] += 1
    position = 0
    for copy in range(len(copies.end)):
        count = copies.end[copy]
        copies.start[copy] = copies.last[copy] = copies.end[copy] = position
        position += count
    steps, transfers = len(ends.transfers), ends.transfers[-1]
    transfer, add, read = 0, transfers, transfers
    for step in range(steps):
        for kind in range(2):
            begin, stop = (transfer, ends.transfers[step]) if kind == 0 else (read, transfers + ends.reads[step])
            for reader in range(begin, stop):
                copy = read_copy[reader]
                end = copies.end[copy]
                found.end[reader] = end
                if end == copies.start[copy]:
                    found.first[reader], found.of_reads[reader] = end, -1
                else:
                    found.first[reader] = copies.start[copy] if read_stays[reader] else copies.last[copy]
                    found.of_reads[reader] = found.order[copies.last[copy]]
        for kind in range(2):
            begin, stop = (transfer, ends.transfers[step]) if kind == 0 else (add, transfers + ends.adds[step])
            for part in range(begin, stop):
                copy = part_copy[part]
                end = copies.end[copy]
                if end > copies.start[copy]:
                    before = found.order[copies.last[copy]]
                    if before < transfer or transfers <= before < add:  # it came at an earlier step
                        copies.last[copy] = end
                found.order[end], copies.end[copy] = part, end + 1
                found.of_parts[part] = found.order[copies.last[copy]]
        transfer, add, read = ends.transfers[step], transfers + ends.adds[step], transfers + ends.reads[step]
    return position


class Releases(NamedTuple):
    """Of each part, the buffer that it fills and the one that must be free, of each reader the one that it reads.

    Numbers of operations, -1 for none.
    """

    fills: IntArray
    takes: IntArray
    reads: IntArray


def edge_numbers(
    found: Sorted, part: IntArray, reader: IntArray, releases: Releases, width: int, codes: IntArray, edges: IntArray
) -> int:
    """The edges as numbers ``((before << width) + after << bits) + code``, into `edges`; returns how many.

    `part` and `reader` are the operations of parts and readers; `codes` are the number of bits, and the codes of edges
    for a block that arrives, for a buffer that arrives and for one that is sent.
    """
    bits, count = codes[0], 0
    for each in range(len(reader)):
        after = reader[each]
        for position in range(found.first[each], found.end[each]):
            edges[count] = ((part[found.order[position]] << width) + after << bits) + codes[1]
            count += 1
        if releases.reads[each] >= 0:
            edges[count] = ((after << width) + releases.reads[each] << bits) + codes[3]
            count += 1
    for each in range(len(part)):
        if releases.fills[each] >= 0:
            edges[count] = ((part[each] << width) + releases.fills[each] << bits) + codes[2]
            count += 1
        if releases.takes[each] >= 0:
            edges[count] = ((releases.takes[each] << width) + part[each] << bits) + codes[2]
            count += 1
    return count
