"""Masks by their definition, pair by pair; and ranges, drawn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tasp_lab.core.arrays import BoolArray
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.mask import MASKS
from tasp_lab.workload.ranges import RANGE_KINDS, MaskRange

ONE_OF_EACH = (
    MaskRange((0, 20), (0, 20), "causal"),  # a prefix that all others see
    MaskRange((20, 33), (0, 20)),
    MaskRange((20, 33), (20, 33), "causal"),
    MaskRange((33, 41), (0, 20)),
    MaskRange((33, 41), (33, 60), "bi-causal"),
    MaskRange((41, 60), (5, 30), "inverse-causal"),
    MaskRange((41, 60), (30, 60), "causal"),
    MaskRange((60, 70), (0, 70)),
)
"""Of 70 positions; queries in up to two ranges, and keys in up to six."""


def seen_in(ranges: Iterable[tuple[tuple[int, int], tuple[int, int], str]], n: int) -> BoolArray:
    """Which query sees which key, (n, n): from the last of a range, or from its first, back or forth together."""
    seen = np.zeros((n, n), dtype=np.bool_)
    for (first, end), (first_key, end_key), kind in ranges:
        for query in range(first, end):
            for key in range(first_key, end_key):
                is_behind = end_key - key < end - query
                is_before = key - first_key < query - first
                hidden = (is_behind and kind in ("causal", "bi-causal"),
                          is_before and kind in ("inverse-causal", "bi-causal"))  # fmt: skip
                seen[query, key] |= not any(hidden)
    return seen


def pairs_seen(layer: Workload) -> BoolArray:
    """Which query position sees which key position, (positions, positions)."""
    if layer.ranges is not None:
        return seen_in(layer.ranges, layer.sequence)  # type: ignore[arg-type]
    position, lengths = np.arange(layer.sequence), layer.documents or (layer.sequence,)
    document, ahead = np.repeat(np.arange(len(lengths)), lengths), position[:, None] - position
    seen: BoolArray = document[:, None] == document
    if layer.mask == "causal":
        seen &= ahead >= 0
    elif layer.mask != "full":  # one that a test has added
        mask = MASKS[layer.mask]
        assert mask.low is not None
        assert mask.high is not None
        seen &= (mask.low <= ahead) & (ahead <= mask.high)
    return seen & in_window(layer, ahead)


def in_window(layer: Workload, ahead: Any) -> Any:
    """Whether the window of a layer lets a query see a key that it is so many positions ahead of; also of arrays."""
    n, window = layer.sequence, layer.window
    before, after = (window - 1, n) if isinstance(window, int) else window or (n, n)
    before, after = (n if side is None else side for side in (before, after))
    return (-after <= ahead) & (ahead <= before)


@st.composite
def range_masks(draw: st.DrawFn, n: int) -> tuple[MaskRange, ...]:
    """Ranges without common pairs; queries that are left see one key each."""
    found, seen = list[MaskRange](), np.zeros((n, n), dtype=np.bool_)
    ends = st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted).filter(lambda each: each[0] < each[1])
    for queries, keys, kind in draw(st.lists(st.tuples(ends, ends, st.sampled_from(RANGE_KINDS)), max_size=6)):
        each = MaskRange((queries[0], queries[1]), (keys[0], keys[1]), kind)
        own = seen_in([each], n)
        if own.any() and not (own & seen).any():
            found.append(each)
            seen |= own
    for query in np.flatnonzero(~seen.any(axis=1)).tolist():
        key = draw(st.integers(0, n - 1))
        found.append(MaskRange((query, query + 1), (key, key + 1), draw(st.sampled_from(RANGE_KINDS))))
    return tuple(draw(st.permutations(found)))
