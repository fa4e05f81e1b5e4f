"""Attention of a decode step: one query per sequence, whose heads are spread over ranks, after a cache of keys.

Tensor parallelism gives each rank its heads of every query. What differs is where keys are:

- ``decode-heads``: plain tensor parallelism. A rank has all keys of its heads, so nothing is sent. Where there are
  fewer KV heads than ranks, several have the same keys: with the one latent head of MLA all ranks have all.
- ``decode-reduce-scatter``: each rank has some positions of all KV heads. It gathers the queries of all heads, attends
  to its keys, gathers the log-sum-exps of all ranks, scales its results by them, and gives these to the owners of their
  heads, which add them up: two AllGathers and a ReduceScatter (vLLM: decode context parallelism, backend ``ag_rs``).
- ``decode-all-to-all``: the same, but results go with their log-sum-exps to the owners of their heads, which merge
  them: an AllGather and an AllToAll (vLLM: backend ``a2a``; Helix, arXiv:2507.07120).
- ``decode-tree``: queries go down a binomial tree from each rank, results are merged on its way back (tree attention,
  arXiv:2408.04093).

With b sequences, H heads of d elements and values of v elements, on n ranks, in a dtype of e bytes, all ranks send
together (n - 1) b H d e bytes of queries in the last three, and back (n - 1) b H v e; the log-sum-exps are another
4 (n - 1) b H bytes, with ``decode-reduce-scatter`` n times as many. ``decode-tree`` sends results in float32.

A collective is one step, in which each rank sends to all that need a block: small collectives inside a node take about
as long as such a step (direct AllGather against the library's on h100-8: 15.0 and 13.6 us for 64 KiB per rank).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.proof import no_copies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import owner_schedule
from tasp_lab.schedules.attention.task import ATTEND, KEYS, QUERIES, RESULTS, AttentionTask
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, contiguous


def _layout(workload: Workload, world_size: int) -> SequenceLayout:
    """Keys in equal chunks. Engines deal them out in turn, which gives every rank as many."""
    return contiguous(workload.sequence, world_size)


@schedule(
    "decode-heads",
    "softmax",
    follows="ranks",
    moves="nothing: each rank has all keys of its heads, as plain tensor parallelism does",
    layout=_layout,
    decode=True,
)
def decode_heads(name: str, topology: Topology, workload: Workload, options: AttentionOptions) -> tuple[Schedule, ...]:
    """The pass of ``decode-heads``. Raises `ScheduleError` for heads that ranks do not divide."""
    task = _task(name, topology, workload, workload.dtype, keys_by_heads=True)
    n, keys, queries = topology.world_size, task.blocks_of(KEYS), task.blocks_of(QUERIES)
    mine = keys[np.arange(n) * len(keys) // n]
    copies = no_copies(n, len(task.tensor))
    copies[np.arange(n), mine] = True
    calls = [(rank, [[queries[rank]], [mine[rank]]], _unmasked(workload.sequence, 1)) for rank in range(n)]
    steps = [Step.of((), [Calls.of(ATTEND, calls)])]
    return (owner_schedule(name, topology, task, steps, lanes=1, circulating={}, copies=copies, kept=copies),)


@schedule(
    "decode-all-to-all",
    "softmax",
    follows="ranks",
    moves="an AllGather of queries; each rank attends to its keys; an AllToAll of results, merged by their owners",
    layout=_layout,
    options=("result_dtype",),
    decode=True,
)
@schedule(
    "decode-tree",
    "softmax",
    follows="ranks",
    moves="queries down binomial trees, results merged on the way back",
    layout=_layout,
    options=("result_dtype",),
    decode=True,
)
def decode(name: str, topology: Topology, workload: Workload, options: AttentionOptions) -> tuple[Schedule, ...]:
    """The pass of a schedule with keys spread over ranks.

    Raises `ScheduleError` for heads that ranks do not divide, and for fewer keys than ranks.
    """
    n, is_tree = topology.world_size, name == "decode-tree"
    if workload.sequence < n:
        raise ScheduleError(f"schedule {name!r}: {workload.sequence} cached keys for {n} ranks, expected {n} or more")
    dtype = options.wire_dtype(workload.dtype, backward=False, sums=is_tree)
    task = replace(_task(name, topology, workload, dtype), home_dtype="fp32")
    queries, keys, results = (task.blocks_of(each) for each in (QUERIES, KEYS, RESULTS))
    calls = [(rank, [queries.tolist(), [keys[rank]]], _unmasked(int(task.count[keys[rank]]), n)) for rank in range(n)]
    attend = Step.of((), [Calls.of(ATTEND, calls)])
    kept = no_copies(n, len(task.tensor))
    kept[:, queries] = True
    out, back = _trees(queries, results) if is_tree else ([_to_all(queries)], [_home(results)])
    return (
        owner_schedule(
            name, topology, task, [*out, attend, *back], lanes=max(n - 1, 1),
            circulating=dict.fromkeys((QUERIES, RESULTS)), kept=kept & ~task.owned(QUERIES),
        ),
    )  # fmt: skip


def _task(
    name: str, topology: Topology, workload: Workload, dtype: str, *, keys_by_heads: bool = False
) -> AttentionTask:
    """The blocks of a layer: per rank its heads of all queries and results, and its keys.

    These are of its positions and all KV heads, or `keys_by_heads` of all positions and the KV heads that it is the
    first to use.
    """
    n, kv_heads = topology.world_size, workload.kv_head_count
    if not workload.decode:
        raise ScheduleError(f"schedule {name!r} is for decode layers, expected decode (--decode)")
    if workload.heads % n or (kv_heads % n and n % kv_heads):
        what = "heads" if workload.heads % n else "KV heads"
        raise ScheduleError(f"schedule {name!r}: {workload.heads} heads ({kv_heads} KV heads) on {n} ranks, expected "
                            f"{what} that ranks divide")  # fmt: skip
    layout, ranks = _layout(workload, n), np.arange(n)
    last, heads = np.full(n, workload.sequence - 1), np.full(n, workload.heads // n)
    lengths = np.array([layout.length(rank) for rank in range(n)])
    keys = [ranks, np.cumsum(lengths) - lengths, lengths, np.zeros(n), np.full(n, kv_heads)]
    if keys_by_heads:
        group = np.arange(min(n, kv_heads))
        heads_of_group = np.full(len(group), kv_heads // len(group))
        keys = [group * n // len(group), 0 * group, 0 * group + workload.sequence, group * heads_of_group,
                heads_of_group]  # fmt: skip
    of_queries = [ranks, last, np.ones(n), ranks * heads, heads]
    tensor = np.repeat([KEYS, QUERIES, RESULTS], [len(keys[0]), n, n])
    columns = np.concatenate([np.stack(keys), *[np.stack(of_queries)] * 2], axis=1).astype(np.int64)
    return AttentionTask(workload, layout, tensor, *columns, result_dtype=dtype, keys_by_heads=keys_by_heads)


def _unmasked(keys: int, queries: int) -> tuple[int, int]:
    """The band in which every one of some rows of queries sees all of some keys."""
    return 1 - keys, queries - 1


def _pairs(n: int) -> tuple[IntArray, IntArray, IntArray]:
    """Source, destination and lane of a message from each rank to each other one."""
    source, destination = np.nonzero(~np.eye(n, dtype=np.bool_))
    return source, destination, (destination - source - 1) % n


def _to_all(blocks: IntArray) -> Step:
    """An AllGather: block r goes from rank r to all others."""
    source, destination, lane = _pairs(len(blocks))
    return Step(source, destination, lane, blocks[source])


def _home(blocks: IntArray) -> Step:
    """Each rank gives what it has of block r to rank r: an AllToAll, or a ReduceScatter."""
    source, destination, lane = _pairs(len(blocks))
    return Step(source, destination, lane, blocks[destination], np.ones(len(source), dtype=np.bool_))


def _trees(queries: IntArray, results: IntArray) -> tuple[list[Step], list[Step]]:
    """Queries down a binomial tree from each rank, to ranks 1, 2, 4, ... further on; and results up it in reverse."""
    n, down, up = len(queries), list[Step](), list[Step]()
    for far in (1 << level for level in range((n - 1).bit_length())):
        root, above = np.divmod(np.arange(n * min(far, n - far)), min(far, n - far))
        source, lane, gives = (root + above) % n, np.zeros_like(root), np.ones(len(root), dtype=np.bool_)
        down.append(Step(source, (source + far) % n, lane, queries[root]))
        up.append(Step((source + far) % n, source, lane, results[root], gives))
    return down, up[::-1]
