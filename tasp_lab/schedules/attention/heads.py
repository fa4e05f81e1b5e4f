"""The heads of a layer in groups, one for each of the ranks that share them: 14 heads of 4 ranks are 4, 4, 3 and 3.

    pieces = head_pieces(workload, 4)

A kernel call takes query heads that use whole KV heads, or a part of one. Where such cuts let no rank have more than
ceil(heads / ranks) heads, each rank has one such **piece**: 6 heads with 2 KV heads are 2, 1, 2 and 1 on 4 ranks. Else
all ranks have equally many heads, up to one, and some a piece for each KV head that they share with others, as ranks
1 and 2 of 4 that share 12 heads with 3 KV heads. A KV head goes to every rank whose query heads use it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.workload.layer import Workload


class HeadPieces(NamedTuple):
    """Query heads in pieces, in their order, and KV heads in pieces; those of one group use different KV pieces.

    `group`, `first` head, number of `heads` and `kv`, the KV piece, are int arrays (query pieces,); the first KV head
    `first_kv` and their number `kv_heads` are int arrays (KV pieces,).
    """

    group: IntArray
    first: IntArray
    heads: IntArray
    kv: IntArray
    first_kv: IntArray
    kv_heads: IntArray


def head_pieces(workload: Workload, groups: int) -> HeadPieces:
    """The heads of a layer in groups whose largest is as small as possible; `groups` is at most the number of heads.

    >>> head_pieces(Workload(64, heads=14), 4).heads, head_pieces(Workload(64, heads=14, kv_heads=2), 4).heads
    (array([4, 4, 3, 3]), array([4, 3, 4, 3]))
    >>> pieces = head_pieces(Workload(64, heads=12, kv_heads=3), 4)
    >>> pieces.group, pieces.heads, pieces.kv
    (array([0, 1, 1, 2, 2, 3]), array([3, 1, 2, 2, 1, 3]), array([0, 0, 1, 1, 2, 2]))
    """
    heads, kv_heads = workload.heads, workload.kv_head_count
    ratio, bounds = heads // kv_heads, head_cuts(heads, kv_heads, groups)
    if np.diff(bounds).max() > -(-heads // groups):
        bounds = _cuts(heads, groups)
    shared = bounds[bounds % ratio > 0] // ratio  # KV heads that several groups use
    cuts = np.unique(np.concatenate([bounds, shared * ratio, (shared + 1) * ratio]))
    kv_cuts, first = cuts[cuts % ratio == 0] // ratio, cuts[:-1]
    group = np.searchsorted(bounds, first, side="right") - 1
    kv = np.searchsorted(kv_cuts, first // ratio, side="right") - 1
    return HeadPieces(group, first, np.diff(cuts), kv, kv_cuts[:-1], np.diff(kv_cuts))


def head_cuts(heads: int, kv_heads: int, groups: int) -> IntArray:
    """Where groups of heads begin that use whole KV heads each, or a part of one; and the end of the last one.

    >>> head_cuts(8, 4, 2), head_cuts(8, 2, 3)
    (array([0, 4, 8]), array([0, 2, 4, 8]))
    """
    ratio = heads // kv_heads
    if groups <= kv_heads:
        return ratio * _cuts(kv_heads, groups)
    of_kv_head = np.diff(_cuts(groups, kv_heads)).tolist()
    first = [kv_head * ratio + _cuts(ratio, count)[:-1] for kv_head, count in enumerate(of_kv_head)]
    return np.append(np.concatenate(first), heads)


def _cuts(total: int, parts: int) -> IntArray:
    """Where parts of a number begin that differ by 1 at most, the first ones the larger; and its end."""
    part = np.arange(parts + 1)
    return total // parts * part + np.minimum(part, total % parts)


def check_heads(name: str, workload: Workload, ranks: int, world_size: int) -> None:
    """Raise `ScheduleError` for a schedule in which more ranks share the heads than there are."""
    if ranks > workload.heads:
        most = max(each for each in range(1, workload.heads + 1) if world_size % each == 0)
        raise ScheduleError(f"schedule {name!r}: {workload.heads} heads for {ranks} ranks, expected as many heads or "
                            f"more, as for usp:{most}x{world_size // most}")  # fmt: skip


def padded(workload: Workload, ranks: int) -> Workload:
    """The layer with heads of zeros beside its own, so that all ranks that share the heads have equally many.

    There are as many KV heads as ranks, a multiple or a divisor of them, and all are used by equally many heads.

    >>> layer = padded(Workload(64, heads=14), 4), padded(Workload(64, heads=14, kv_heads=2), 4)
    >>> [(each.heads, each.kv_heads) for each in layer]
    [(16, 16), (16, 2)]
    """
    own = workload.kv_head_count
    kv_heads = next(each for each in range(own, own + ranks) if 0 in (each % ranks, ranks % each))
    ratio, users = workload.heads // own, max(ranks // kv_heads, 1)
    return replace(workload, heads=kv_heads * (ratio + -ratio % users), kv_heads=kv_heads)
