"""Masks as ranges: rectangles of queries and keys, each with a mask of its own, as in block-sparse kernels.

    parse_ranges("0:4/0:4/causal, 4:8/0:8")      # a block that sees itself causally, then one that sees everything

Positions are those of the sequence, and the ends of ranges are exclusive. A causal mask ends at the last query and the
last key of its range, an inverse causal one begins at the first of both: as MagiAttention (arXiv:2505.13211, section
3.1) and, for causal ones, flash-attn align them. Documents and windows are ranges, too, so what is counted is counted
here: an array of *slices*, int (slices, 6), with the first query and the end of queries, the same of keys, and the
limits of the position of a query minus that of a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

from tasp_lab.core.arguments import is_whole
from tasp_lab.core.errors import WorkloadError, unknown
from tasp_lab.core.units import parse_count

if TYPE_CHECKING:
    from tasp_lab.core.arrays import BoolArray, IntArray

RangeKind = Literal["full", "causal", "inverse-causal", "bi-causal"]
"""The mask of a range: none, no key after a query, no key before it, or neither."""

RANGE_KINDS = get_args(RangeKind)

MAX_RANGES = 4096
"""As many ranges as can be compared with one another in a second."""

EXPECTED = "QUERIES/KEYS or QUERIES/KEYS/KIND with ranges such as 0:4Ki, or ((0, 4), (0, 8), 'causal')"


class MaskRange(NamedTuple):
    """Queries that attend to keys: ranges of positions, ends exclusive.

    >>> MaskRange((4, 8), (0, 8), "causal").slice      # query 7 sees all keys, query 4 those up to 4
    (4, 8, 0, 8, 0, 7)
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    kind: RangeKind = "full"

    @property
    def slice(self) -> tuple[int, int, int, int, int, int]:
        """A row of slices."""
        (first, end), (first_key, end_key) = self.queries, self.keys
        low = end - end_key if self.kind in ("causal", "bi-causal") else first - (end_key - 1)
        high = first - first_key if self.kind in ("inverse-causal", "bi-causal") else end - 1 - first_key
        return first, end, first_key, end_key, low, high

    def __str__(self) -> str:
        return "/".join([f"{first}:{end}" for first, end in (self.queries, self.keys)] + [self.kind])


def parse_ranges(text: str) -> tuple[MaskRange, ...]:
    """The ranges of a text, see `EXPECTED`; the kind is full unless given.

    >>> parse_ranges("0:2Ki/0:2Ki/causal")
    (MaskRange(queries=(0, 2048), keys=(0, 2048), kind='causal'),)

    Raises `WorkloadError` for another text.
    """
    found = []
    for number, part in enumerate(text.split(",")):
        match = re.fullmatch(r"\s*([^:/]+):([^:/]+)/([^:/]+):([^:/]+)(?:/([^:/]+))?\s*", part)
        if match is None:
            raise WorkloadError(f"range {number}: {part.strip()[:40]!r}, expected {EXPECTED}")
        *ends, kind = match.groups()
        first, end, first_key, end_key = (
            parse_count(each.strip(), f"position of range {number}", least=0) for each in ends
        )
        found.append(MaskRange((first, end), (first_key, end_key), cast("RangeKind", (kind or "full").strip())))
    return tuple(found)


def ranges_of(given: str | Iterable[object]) -> tuple[MaskRange, ...]:
    """The ranges of a text, or of tuples, each by itself as it should be. Raises `WorkloadError`."""
    rows: Sequence[object] = parse_ranges(given) if isinstance(given, str) else tuple(given)
    if not 1 <= len(rows) <= MAX_RANGES:
        raise WorkloadError(f"{len(rows)} ranges, expected 1 to {MAX_RANGES}")
    return tuple(_range(number, row) for number, row in enumerate(rows))


def check_ranges(given: str | Iterable[object], sequence: int) -> tuple[MaskRange, ...]:
    """The ranges of a sequence of that many positions, see `ranges_of`.

    Raises `WorkloadError` for ranges outside of the sequence, for two that have a pair of a query and a key in common,
    and if a query attends to no key.
    """
    import numpy as np

    ranges = ranges_of(given)
    for number, each in enumerate(ranges):
        if max(each.queries[1], each.keys[1]) > sequence:
            raise WorkloadError(f"range {number}: {each}, expected positions within 0:{sequence}, the sequence")
    slices = np.array([each.slice for each in ranges], dtype=np.int64)
    for number, one in enumerate(slices):
        both = _common(one, slices[number + 1 :])
        if both.any():
            other = number + 1 + int(both.argmax())
            raise WorkloadError(
                f"ranges {number} and {other}: {ranges[number]} and {ranges[other]} have pairs of queries and keys in "
                "common, expected each pair in one range"
            )
    first, end, first_key, end_key, low, high = slices.T
    seen = np.stack([np.maximum(first, first_key + low), np.minimum(end, end_key + high)])  # of each: queries with keys
    seen = seen[:, seen[0] < seen[1]]
    seen = seen[:, np.argsort(seen[0])]
    ends = np.maximum.accumulate(np.append(0, seen[1]))
    gaps = np.append(seen[0], sequence) > ends
    if gaps.any():
        raise WorkloadError(
            f"ranges: query {int(ends[gaps.argmax()])} attends to no key, expected one or more for each of the "
            f"{sequence} positions"
        )
    return ranges


def _range(number: int, given: object) -> MaskRange:
    if not isinstance(given, Sequence) or isinstance(given, str) or not 2 <= len(given) <= 3:
        raise WorkloadError(f"range {number}: {str(given)[:60]}, expected {EXPECTED}")
    kind, sides = (given[2] if len(given) == 3 else "full"), []
    for side, ends in zip(("queries", "keys"), given, strict=False):
        if not isinstance(ends, Sequence) or isinstance(ends, str) or len(ends) != 2 or not all(map(is_whole, ends)):
            raise WorkloadError(f"range {number}: {side} {str(ends)[:40]}, expected two whole numbers")
        first, end = map(int, ends)
        if not 0 <= first < end:
            raise WorkloadError(f"range {number}: {side} {first}:{end}, expected a start of 0 or more and a later end")
        sides.append((first, end))
    if kind not in RANGE_KINDS:
        raise WorkloadError(f"range {number}: {unknown('kind', str(kind), RANGE_KINDS)}")
    return MaskRange(sides[0], sides[1], cast("RangeKind", kind))


def _common(one: IntArray, others: IntArray) -> BoolArray:
    """Whether a slice has a pair in common with each of others."""
    import numpy as np

    first, first_key = (np.maximum(one[at], others[:, at]) for at in (0, 2))
    end, end_key = (np.minimum(one[at], others[:, at]) for at in (1, 3))
    low = np.maximum(np.maximum(one[4], others[:, 4]), first - (end_key - 1))
    high = np.minimum(np.minimum(one[5], others[:, 5]), end - 1 - first_key)
    found: BoolArray = (first < end) & (first_key < end_key) & (low <= high)
    return found


def pairs_of_runs(
    slices: IntArray, queries: tuple[IntArray, IntArray], keys: tuple[IntArray, IntArray], stride: int = 1
) -> IntArray:
    """The pairs in slices between runs of positions, an int array (runs of queries, runs of keys).

    A run is its first position and its count, two int arrays; `stride` is the distance of its neighbours.

    >>> import numpy as np
    >>> causal = np.array([MaskRange((0, 4), (0, 4), "causal").slice])
    >>> runs = np.array([0, 2]), np.array([2, 2])
    >>> pairs_of_runs(causal, runs, runs).tolist()
    [[3, 0], [4, 3]]
    """
    import numpy as np

    from tasp_lab.workload.kernel_shapes import pairs_in_band

    found = np.zeros((len(queries[0]), len(keys[0])), dtype=np.int64)
    for first, end, first_key, end_key, low, high in slices.tolist():
        row, begin, count = _runs_within(*queries, first, end, stride)
        column, begin_key, count_key = _runs_within(*keys, first_key, end_key, stride)
        ahead = begin[:, None] - begin_key
        limits = -((ahead - low) // stride), (high - ahead) // stride
        found[np.ix_(row, column)] += pairs_in_band(*limits, count[:, None], count_key)
    return found


def _runs_within(
    start: IntArray, count: IntArray, first: int, end: int, stride: int
) -> tuple[IntArray, IntArray, IntArray]:
    """The numbers of runs that have positions from `first` to `end`; the first of these positions, and their count."""
    import numpy as np

    begin, stop = (np.clip(-((start - limit) // stride), 0, count) for limit in (first, end))
    run = np.flatnonzero(begin < stop)
    return run, (start + begin * stride)[run], (stop - begin)[run]
