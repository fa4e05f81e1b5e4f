"""Attention in whole spans: one block per span of the layout, tensor and group of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.proof import check_holdings
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.heads import HeadPieces, head_pieces
from tasp_lab.schedules.attention.layer_blocks import query_spans
from tasp_lab.schedules.attention.task import (
    KEY_GRADIENTS,
    KEYS,
    QUERIES,
    QUERY_GRADIENTS,
    RESULTS,
    TENSORS,
    AttentionTask,
)
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, Span


def span_task(
    workload: Workload,
    layout: SequenceLayout,
    dtype: str,
    *,
    backward: bool = False,
    pieces: HeadPieces | None = None,
) -> AttentionTask:
    """The task whose blocks are the spans of a layout, for each piece of heads; all heads are one if None.

    `dtype` is that of results or gradients. Blocks are numbered by tensor, piece, rank and span. Raises
    `TooManyBlocksError`.
    """
    pieces = head_pieces(workload, 1) if pieces is None else pieces
    spans_of = {KEYS: _table(layout.spans), QUERIES: _table(query_spans(workload, layout))}
    of_keys, of_queries = len(pieces.first_kv) * spans_of[KEYS].shape[1], len(pieces.first) * spans_of[QUERIES].shape[1]
    check_holdings(layout.world_size, (1 + backward) * of_keys + 2 * of_queries)
    columns = []
    for tensor in (KEYS, QUERIES, KEY_GRADIENTS, QUERY_GRADIENTS) if backward else (KEYS, QUERIES, RESULTS):
        is_key = tensor in (KEYS, KEY_GRADIENTS)
        heads = np.stack((pieces.first_kv, pieces.kv_heads) if is_key else (pieces.first, pieces.heads))
        spans = spans_of[KEYS if is_key else QUERIES]
        kind = np.full(heads.shape[1] * spans.shape[1], tensor)
        columns.append(np.stack([*np.tile(spans, heads.shape[1]), kind, *np.repeat(heads, spans.shape[1], axis=1)]))
    owner, start, count, kinds, first_heads, widths = np.concatenate(columns, axis=1)
    return AttentionTask(
        workload,
        layout,
        kinds,
        owner,
        start,
        count,
        first_heads,
        widths,
        gradient_dtype=dtype if backward else None,
        result_dtype="fp32" if backward else dtype,
    )


def _table(spans: Sequence[Sequence[Span]]) -> IntArray:
    """Rank, start and count of spans, an int array (3, spans)."""
    return np.array([(rank, span.start, span.count) for rank, each in enumerate(spans) for span in each]).T


def owner_schedule(
    name: str,
    topology: Topology,
    task: AttentionTask,
    steps: Sequence[Step],
    *,
    lanes: int,
    circulating: Mapping[int, Pool | None] | None = None,
    copies: BoolArray | None = None,
    kept: BoolArray | None = None,
) -> Schedule:
    """The schedule in which each rank starts with its keys and queries and ends with what they yield.

    Parameters
    ----------
    circulating : the pools of tensors that circulate, None where copies stay until they are given; the tensors of the
        other side are the caller's. If None, blocks of both sides are sent, and all copies stay until they are given.
    copies, kept : bool arrays (world_size, blocks): further copies at the start, and copies that are left in the end.

    Raises `ScheduleError` if a transfer has no route.
    """
    pools = {} if circulating is None else circulating
    bound = set() if circulating is None else set(range(len(TENSORS))) - set(pools)
    initial = task.owned(KEYS, QUERIES)
    return Schedule(
        name=name,
        world_size=topology.world_size,
        lanes=lanes,
        blocks=task.blocks(pools, bound),
        initial=initial if copies is None else initial | copies,
        final=task.owned(RESULTS, KEY_GRADIENTS, QUERY_GRADIENTS),
        steps=steps,
        task=task,
        kept=kept,
    ).on(topology)
