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

from functools import partial

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.proof import no_copies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import owner_schedule
from tasp_lab.schedules.attention.task import ATTEND, KEYS, QUERIES, RESULTS, SCALE, SCALES, AttentionTask
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import contiguous

_decoding = partial(schedule, kind="softmax", follows="ranks", layout="contiguous", decode=True)


@_decoding(
    "decode-heads",
    moves="nothing: each rank has all keys of its heads, as plain tensor parallelism does",
    is_baseline=True,
)
def decode_heads(name: str, topology: Topology, workload: Workload, options: AttentionOptions) -> tuple[Schedule, ...]:
    """The pass of ``decode-heads``. Raises `ScheduleError` for heads that ranks do not divide."""
    n, task = topology.world_size, _task(name, topology, workload, workload.dtype, keys_by_heads=True)
    keys, queries, copies = task.blocks_of(KEYS), task.blocks_of(QUERIES), no_copies(n, len(task.tensor))
    mine = keys[np.arange(n) * len(keys) // n]
    copies[np.arange(n), mine] = True
    calls = [(rank, [[queries[rank]], [mine[rank]]], (1 - workload.sequence, 0)) for rank in range(n)]
    steps = [Step.of((), [Calls.of(ATTEND, calls)])]
    return (owner_schedule(name, topology, task, steps, lanes=1, circulating={}, copies=copies, kept=copies),)


@_decoding(
    "decode-reduce-scatter",
    moves="an AllGather of queries; each rank attends to its keys; an AllGather of log-sum-exps; a ReduceScatter",
    options=("result_dtype",),
)
@_decoding(
    "decode-all-to-all",
    moves="an AllGather of queries; each rank attends to its keys; an AllToAll of results, merged by their owners",
    options=("result_dtype",),
)
@_decoding(
    "decode-tree",
    moves="queries down binomial trees, results merged on the way back",
    options=("result_dtype",),
)
def decode(name: str, topology: Topology, workload: Workload, options: AttentionOptions) -> tuple[Schedule, ...]:
    """The pass of a schedule with keys spread over ranks.

    Raises `ScheduleError` for heads that ranks do not divide, and for fewer keys than ranks.
    """
    n, is_tree = topology.world_size, name == "decode-tree"
    if workload.sequence < n:
        raise ScheduleError(f"schedule {name!r}: {workload.sequence} cached keys for {n} ranks, expected {n} or more")
    dtype = options.wire_dtype(workload.dtype, backward=False, sums=is_tree)
    task = _task(name, topology, workload, dtype, scaled=name == "decode-reduce-scatter")
    queries, keys, results, scales = (task.blocks_of(each) for each in (QUERIES, KEYS, RESULTS, SCALES))
    heads = queries.tolist()  # of all ranks, as rows that see all keys of a rank
    calls = [(rank, [heads, [key]], (1 - int(task.count[key]), n - 1)) for rank, key in enumerate(keys)]
    steps = [Step.of((), [Calls.of(ATTEND, calls)])]
    if len(scales):
        scale = Calls.of(SCALE, [(rank, [heads, scales.tolist()], ()) for rank in range(n)])
        steps += [_direct(scales), Step.of((), [scale])]
    out, back = _trees(queries, results) if is_tree else ([_direct(queries)], [_direct(results, home=True)])
    kept = no_copies(n, len(task.tensor))
    kept[:, [*queries, *scales]] = True
    pools = dict.fromkeys((QUERIES, RESULTS, SCALES))
    return (owner_schedule(name, topology, task, [*out, *steps, *back], lanes=max(n - 1, 1), circulating=pools,
                           kept=kept & ~task.owned(QUERIES)),)  # fmt: skip


def _task(
    name: str, topology: Topology, workload: Workload, dtype: str, *, keys_by_heads: bool = False, scaled: bool = False
) -> AttentionTask:
    """The blocks of a layer: per rank its heads of all queries and results, and its keys.

    These are of its positions and all KV heads, or `keys_by_heads` of all positions and the KV heads that it is the
    first to use. Positions are in chunks; engines deal them out in turn, which gives every rank as many.
    """
    n, keys, heads, kv_heads = topology.world_size, workload.sequence, workload.heads, workload.kv_head_count
    if not workload.decode:
        raise ScheduleError(f"schedule {name!r} is for decode layers, expected decode (--decode)")
    if heads % n or (kv_heads % n and n % kv_heads):
        raise ScheduleError(f"schedule {name!r}: {heads} heads ({kv_heads} KV heads) on {n} ranks, expected "
                            f"{'' if heads % n else 'KV '}heads that ranks divide")  # fmt: skip
    layout, groups = contiguous(keys, n), min(n, kv_heads)
    rows = [
        (KEYS, rank, span.start, span.count, 0, kv_heads) for rank, each in enumerate(layout.spans) for span in each
    ]
    if keys_by_heads:
        own = kv_heads // groups
        rows = [(KEYS, group * n // groups, 0, keys, group * own, own) for group in range(groups)]
    own = heads // n
    rows += [(each, rank, keys - 1, 1, rank * own, own) for each in (QUERIES, RESULTS) for rank in range(n)]
    rows += [(SCALES, rank, keys - 1, 1, 0, heads) for rank in range(n) if scaled]
    home = None if keys_by_heads else "fp32"  # where the results of several ranks are joined
    tensor, owner, start, count, first, width = np.array(rows).T
    return AttentionTask(workload, layout, tensor, owner, start, count, first, width, result_dtype=dtype,
                         home_dtype=home, keys_by_heads=keys_by_heads)  # fmt: skip


def _direct(blocks: IntArray, *, home: bool = False) -> Step:
    """An AllGather, in which block r goes from rank r to all others; or each rank gives what it has of it `home`."""
    n = len(blocks)
    source, destination = np.nonzero(~np.eye(n, dtype=np.bool_))
    block = blocks[destination if home else source]
    return Step(source, destination, (destination - source - 1) % n, block, np.full(len(source), home))


def _trees(queries: IntArray, results: IntArray) -> tuple[list[Step], list[Step]]:
    """Queries down a binomial tree from each rank, to ranks 1, 2, 4, ... further on; and results up it in reverse."""
    n, down, up = len(queries), list[Step](), list[Step]()
    for far in (1 << level for level in range((n - 1).bit_length())):
        root, above = np.divmod(np.arange(n * min(far, n - far)), min(far, n - far))
        near, lane, gives = (root + above) % n, np.zeros_like(root), np.ones(len(root), dtype=np.bool_)
        down.append(Step(near, (near + far) % n, lane, queries[root]))
        up.append(Step((near + far) % n, near, lane, results[root], gives))
    return down, up[::-1]
