"""The collectives, independent of schedules: semantics and bus bandwidth. Their bounds are in `sim.bounds.collectives`.

Sizes are given as `shard_bytes`:

============== ============================================ ========================================
collective     what happens                                 `shard_bytes`
============== ============================================ ========================================
AllGather      every rank receives all shards               a rank's shard
ReduceScatter  sums of all messages are spread over ranks   the shard that a rank ends with
AllReduce      every rank receives the sum of all messages  a message over the number of ranks
AllToAll       every rank has a chunk for every rank        a chunk
SendRecv       rank i sends a message to rank i + 1         a message
============== ============================================ ========================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tasp_lab.core.units import Number, format_size

CollectiveKind = Literal["AllGather", "ReduceScatter", "AllReduce", "AllToAll", "SendRecv"]

NcclTestsName = Literal["all_gather", "alltoall", "sendrecv", "reduce_scatter", "all_reduce"]
"""The collectives by the names of nccl-tests and rccl-tests."""


BY_NCCL_TESTS: Mapping[NcclTestsName, CollectiveKind] = {
    "all_gather": "AllGather", "alltoall": "AllToAll", "sendrecv": "SendRecv", "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
}  # fmt: skip


@dataclass(frozen=True)
class KindSpec:
    """The properties of a collective.

    Parameters
    ----------
    busbw_shards : the shards per rank that its bus bandwidth counts, by the number of ranks, as nccl-tests defines it.
    shard : the meaning of `shard_bytes`, as display text.
    text : a description; may use ``{size}``, that of the shard, and ``{whole}``, that of all shards.
    """

    busbw_shards: Callable[[int], int]
    shard: str
    text: str


KINDS: Mapping[CollectiveKind, KindSpec] = {
    "AllGather": KindSpec(
        busbw_shards=lambda n: n - 1,
        shard="a rank's shard",
        text="AllGather of {size} per rank",
    ),
    "ReduceScatter": KindSpec(
        busbw_shards=lambda n: n - 1,
        shard="the shard that a rank ends with",
        text="ReduceScatter of {size} per rank",
    ),
    "AllReduce": KindSpec(
        busbw_shards=lambda n: 2 * (n - 1),
        shard="a message over the number of ranks",
        text="AllReduce of {whole}, {size} per rank",
    ),
    "AllToAll": KindSpec(
        busbw_shards=lambda n: n - 1,
        shard="what goes from each rank to each",
        text="AllToAll of {size} from each rank to each",
    ),
    "SendRecv": KindSpec(
        busbw_shards=lambda n: min(1, n - 1),
        shard="a message",
        text="SendRecv of {size} from each rank to the next",
    ),
}
"""All collectives."""


def busbw_bytes_per_s(world_size: int, shard_bytes: float, time_s: Number, kind: CollectiveKind = "AllGather") -> float:
    """The bus bandwidth as nccl-tests defines it, with `shard_bytes` as in this module's table; 0 for no time.

    The bytes that each rank would receive over a single ring, divided by the time.

    >>> busbw_bytes_per_s(8, 100, 2.0), busbw_bytes_per_s(8, 100, 2.0, "AllReduce")
    (350.0, 700.0)
    """
    return float(KINDS[kind].busbw_shards(world_size) * shard_bytes / time_s) if time_s else 0.0


def with_article(kind: CollectiveKind) -> str:
    """The name of the collective with its indefinite article.

    >>> with_article("AllReduce"), with_article("SendRecv")
    ('an AllReduce', 'a SendRecv')
    """
    return f"{'an' if kind.startswith('A') else 'a'} {kind}"


def describe(kind: CollectiveKind, world_size: int, shard_bytes: int) -> str:
    """A description of the collective with its sizes.

    >>> describe("AllGather", 8, 2**20), describe("AllReduce", 8, 2**20)
    ('AllGather of 1 MiB per rank', 'AllReduce of 8 MiB, 1 MiB per rank')
    >>> describe("AllToAll", 8, 2**20), describe("SendRecv", 8, 2**20)
    ('AllToAll of 1 MiB from each rank to each', 'SendRecv of 1 MiB from each rank to the next')
    """
    return KINDS[kind].text.format(size=format_size(shard_bytes), whole=format_size(world_size * shard_bytes))


def shard_help() -> str:
    """The meaning of the bytes per rank, by collective.

    >>> shard_help()[:25]
    "AllGather: a rank's shard"
    """
    return "; ".join(f"{kind}: {spec.shard}" for kind, spec in KINDS.items())
