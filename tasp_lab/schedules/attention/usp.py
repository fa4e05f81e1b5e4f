"""USP (arXiv:2405.07719): Ulysses within groups of ranks, any other schedule of attention between the groups.

The ranks of a group share out the heads. An all-to-all within each group gives rank ``group * members + g`` the queries
and keys of head group g, of all positions of its group. Then the ranks with equal heads run the outer schedule, in
which a group is a rank, and results or gradients return to the owners of their positions. The outer schedule
may be a ring, TASP, TokenRing, ``kv-and-q-rings``, Burst or gathered keys; its layout says which positions a group has.
Head groups are those of `tasp_lab.schedules.attention.heads`.

``usp:UxR`` is groups of U consecutive ranks and a ring over R groups, zigzag under a causal mask; ``usp:UxR:NAME`` has
the schedule of that name between the groups. With one group it is Ulysses, with groups of one rank the outer schedule.

The rings of an outer schedule such as TASP are those of the topology as it is between groups
(`tasp_lab.topology.derived`). Behind a switch these are the rings of a switch with fewer ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.choices import Dataflow
from tasp_lab.core.errors import NoLinkError, ScheduleError, TopologyError
from tasp_lab.schedule.calls import BlockLists, Calls, ranges
from tasp_lab.schedule.composition.sequence import joined
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.proof import check_holdings, no_copies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import CIRCULATIONS
from tasp_lab.schedules.attention.heads import check_heads, head_pieces, padded
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask
from tasp_lab.schedules.attention.ulysses import ulysses
from tasp_lab.schedules.build import attention_layout, attention_schedules
from tasp_lab.schedules.registry import ATTENTION, balanced_ring, schedule
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.derived import between_groups
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, Span


def usp_layout(workload: Workload, world_size: int, *, split: tuple[int, int], variant: str = "") -> SequenceLayout:
    """The layout of ``usp:UxR:NAME``: that of the outer schedule, shared out to the ranks of each group."""
    members, groups = split
    if groups == 1:
        return attention_layout("ulysses", workload, world_size)
    outer = attention_layout(variant or balanced_ring(workload), workload, groups)
    return outer if members == 1 else members_layout(outer, members)


def _same_as(split: tuple[int, int], variant: str) -> str:
    """What USP amounts to: Ulysses with one group, with groups of one rank the outer schedule."""
    return "ulysses" if split[1] == 1 else variant if split[0] == 1 else ""


@schedule(
    "usp:UxR",
    "softmax",
    follows="ranks",
    moves="Ulysses in groups of U ranks, a ring between the R groups, or any schedule that follows a colon",
    layout=usp_layout,
    options=("trim", "buffers", "dataflow", "gradient_dtype", "result_dtype", "groups", "padded_heads", "direction"),
    variants=(
        "ring-attention",
        "zigzag-ring-attention",
        "striped-ring-attention",
        "tasp",
        "token-ring",
        "zigzag-token-ring",
        "token-multi-ring",
        "kv-and-q-rings",
        "burst",
        "kv-all-gather",
        "multi-ring-kv-all-gather",
        "direct-kv-all-gather",
    ),
    of_variant=("trim", "buffers", "dataflow", "direction"),
    same_as=_same_as,
)
def usp(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions,
    *,
    split: tuple[int, int],
    variant: str,
) -> tuple[Schedule, ...]:
    """The passes of ``usp:UxR:NAME``, `split` being U and R, `variant` the name or "" for the balanced ring.

    Raises `ScheduleError` for fewer heads than U, for the dataflow ``rotate-kv-back``, and where members of a group or
    of different groups have no link.
    """
    members, groups = split
    if groups == 1:
        return ulysses(name, topology, workload, options)
    outer = variant or balanced_ring(workload)
    has_results = "result_dtype" in ATTENTION[outer].options
    plain = options if has_results else replace(options, result_dtype="auto")
    if members == 1:
        return tuple(schedule.renamed(name) for schedule in attention_schedules(outer, topology, workload, None, plain))
    if options.dataflow == "rotate-kv-back":
        raise ScheduleError(
            f"schedule {name!r}: dataflow 'rotate-kv-back' does not apply to it, expected auto, rotate-kv or rotate-q"
        )
    check_heads(name, workload, members, topology.world_size)
    workload = padded(workload, members) if options.padded_heads else workload
    between = _between(name, topology, members, uses_rings=ATTENTION[outer].uses_rings)
    wire = options.wire_dtype(workload.dtype, backward=False, sums=False)

    def one_pass(backward: bool) -> Schedule:
        asked = _dataflows(outer, plain) if backward else [plain.forward_only]
        try:
            found: list[Schedule] = [ATTENTION[outer].builder(outer, between, workload, each)[0] for each in asked]
        except NoLinkError as error:
            ends = (group * members + np.arange(members) for group in (error.source, error.destination))
            _check_links(f"schedule {name!r}, between groups", topology, *ends)
            raise
        fewest = min(found, key=lambda schedule: int(schedule.bytes_by_rank().sum()))
        return in_groups(name, topology, fewest, members, wire, has_keys=backward and outer.endswith("kv-all-gather"))

    return options.build(one_pass)


def _dataflows(outer: str, options: AttentionOptions) -> list[AttentionOptions]:
    """The options of backward passes that start with the shards alone.

    The dataflow is also that of the circulations among which ``kv-and-q-rings`` chooses; others have none.
    """
    flows: tuple[Dataflow, ...] = (options.dataflow,)
    if options.dataflow == "auto":
        flows = ("rotate-kv", "rotate-q") if outer in CIRCULATIONS else ("rotate-kv",)
    return [replace(options, passes="backward", dataflow=each) for each in flows]


def _between(name: str, topology: Topology, members: int, *, uses_rings: bool) -> Topology:
    """The topology on which the outer schedule is built. Raises `NoLinkError` if members or groups are not linked.

    A schedule that does not use rings of a decomposition depends only on which groups have links.
    """
    ranks = np.arange(topology.world_size).reshape(-1, members)
    _check_links(f"schedule {name!r}, step 0", topology, ranks[:, :, None], ranks[:, None, :])
    if topology.is_complete and not uses_rings:
        return full_mesh(len(ranks))
    try:
        return between_groups(topology, members)
    except TopologyError:
        _check_links(f"schedule {name!r}, between groups", topology, ranks[:, None], ranks)
        raise


def _check_links(where: str, topology: Topology, source: IntArray, destination: IntArray) -> None:
    """Raise `NoLinkError` for two ranks without a route, of arrays that broadcast together."""
    source, destination = np.broadcast_arrays(source, destination)
    missing = (source != destination) & ~topology.have_routes(source, destination)
    if missing.any():
        first = tuple(np.argwhere(missing)[0])
        raise NoLinkError(where, int(source[first]), int(destination[first]), topology.name, topology.forwarding.limit)


def in_groups(
    name: str, topology: Topology, outer: Schedule, members: int, result_dtype: str = "fp32", *, has_keys: bool = False
) -> Schedule:
    """The schedule of groups of `members` ranks, each of which acts as one rank of `outer`.

    Results have `result_dtype` on the wire. Sums are accumulated in float32. With `has_keys` each member starts with
    the keys of its heads that `outer` starts with: those that a forward pass has left there.

    Raises `ScheduleError` for other world sizes, for fewer heads than members, and for an outer schedule that is no
    attention with all heads in each block, or that starts with copies of other ranks.

    >>> from tasp_lab.schedules.attention.forward import attention
    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.workload.layer import Workload
    >>> ring = attention("zigzag-ring-attention", full_mesh(4), Workload(sequence=64, heads=4, mask="causal"))
    >>> len(ring.steps), len(in_groups("usp:2x4", full_mesh(8), ring, 2).steps)
    (4, 6)
    """
    task = outer.task
    others = isinstance(task, AttentionTask) and outer.initial & ~(has_keys & (task.tensor == KEYS))
    if not isinstance(task, AttentionTask) or (others & ~task.owned(KEYS, QUERIES)).any():
        raise ScheduleError(
            f"schedule {name!r}: expected attention that starts with the queries and keys of each rank only"
        )
    heads = {QUERIES: task.workload.heads, KEYS: task.workload.kv_head_count}
    if any(count != heads.get(tensor, count) for tensor, count in task.kinds[0]):
        raise ScheduleError(f"schedule {name!r}: expected an outer schedule with all heads in each block")
    if topology.world_size != outer.world_size * members:
        raise ScheduleError(
            f"schedule {name!r}: {outer.world_size} groups of {members} ranks, "
            f"{topology.name} has {topology.world_size}"
        )
    groups = HeadGroups(name, task, members, result_dtype)
    there = groups.exchange(
        np.flatnonzero(np.isin(task.tensor, (QUERIES,) if has_keys else (KEYS, QUERIES))), home=False
    )
    outputs = np.isin(task.tensor, (RESULTS, KEY_GRADIENTS, QUERY_GRADIENTS))
    home = groups.exchange(np.flatnonzero(outputs), home=True)
    tensors = np.unique(task.tensor).tolist()
    pools = {each: kind.pool for each, kind in zip(tensors, outer.blocks.kinds, strict=True) if kind.pool is not None}
    return Schedule(
        name=name,
        world_size=topology.world_size,
        lanes=outer.lanes + members - 1,
        blocks=groups.task.blocks(pools, bound=()),
        initial=groups.task.owned(KEYS, QUERIES) | (groups.copies(outer.initial & (task.tensor == KEYS)) & has_keys),
        final=groups.task.owned(RESULTS, KEY_GRADIENTS, QUERY_GRADIENTS),
        steps=_with_parts([there, *(groups.step(step, members - 1) for step in outer.steps), home], groups.task),
        task=groups.task,
        kept=groups.copies(outer.initial | outer.left),
    ).on(topology)


class HeadGroups:
    """The blocks of members: of each outer block, one for each member's positions and each piece of heads."""

    def __init__(self, name: str, outer: AttentionTask, members: int, result_dtype: str) -> None:
        layer = outer.workload
        check_heads(name, layer, members, outer.layout.world_size * members)
        self.pieces = pieces = head_pieces(layer, members)
        self.members = members
        cells = np.array(list(_cells(outer, members)), dtype=np.int64)
        block, self._of_keys = cells[:, 0], np.isin(outer.tensor[cells[:, 0]], (KEYS, KEY_GRADIENTS))
        count = np.where(self._of_keys, len(pieces.first_kv), len(pieces.first))
        check_holdings(outer.layout.world_size * members, int(count.sum()))
        self._first_cell = np.searchsorted(block, np.arange(len(outer.tensor) + 1))
        cell, piece = ranges(np.zeros_like(count), count)
        self._first_block = np.cumsum(count) - count
        first, heads = np.concatenate([[pieces.first_kv, pieces.kv_heads], [pieces.first, pieces.heads]], axis=1)
        place = piece + np.where(self._of_keys, 0, len(pieces.first_kv))[cell]
        self._outer_owner = outer.owner
        self.task = AttentionTask(
            layer,
            members_layout(outer.layout, members),
            outer.tensor[block][cell],
            (outer.owner[block] * members + cells[:, 1])[cell],
            cells[cell, 2],
            cells[cell, 3],
            first[place],
            heads[place],
            outer.gradient_dtype,
            result_dtype,
            home_dtype="fp32",
        )

    def of_piece(self, blocks: IntArray, piece: int) -> tuple[IntArray, IntArray]:
        """The blocks with the heads of a piece, of keys those that it uses.

        For each one the index in `blocks` of its outer block, and itself.
        """
        entry, cell = ranges(self._first_cell[blocks], self._first_cell[blocks + 1])
        return entry, self._first_block[cell] + np.where(self._of_keys[cell], self.pieces.kv[piece], piece)

    def exchange(self, blocks: IntArray, *, home: bool) -> Step:
        """The all-to-all of outer blocks in each group: from owners to the members with their heads, or given back."""
        found = []
        for piece, member in enumerate(self.pieces.group.tolist()):
            entry, block = self.of_piece(blocks, piece)
            user, owner = self._outer_owner[blocks[entry]] * self.members + member, self.task.owner[block]
            away = user != owner
            source, destination = (user[away], owner[away]) if home else (owner[away], user[away])
            lane = (destination - source) % self.members - 1
            found.append(Step(source, destination, lane, block[away], np.full(len(lane), home)))
        return joined(found)

    def copies(self, outer: BoolArray) -> BoolArray:
        """The copies of the members, from those of the outer ranks: bool arrays (world_size, blocks)."""
        found = no_copies(len(outer) * self.members, len(self.task.tensor))
        rank, blocks = np.nonzero(outer)
        for piece, member in enumerate(self.pieces.group.tolist()):
            entry, block = self.of_piece(blocks, piece)
            found[rank[entry] * self.members + member, block] = True
        return found

    def step(self, step: Step, first_lane: int) -> Step:
        """What an outer step is for all members."""
        return joined([self._step(step, piece, first_lane) for piece in range(len(self.pieces.group))])

    def _step(self, step: Step, piece: int, first_lane: int) -> Step:
        (entry, block), member = self.of_piece(step.block, piece), int(self.pieces.group[piece])
        source, destination = (each[entry] * self.members + member for each in (step.source, step.destination))
        calls = [
            Calls(
                each.kernel,
                each.rank * self.members + member,
                tuple(self._lists(lists, piece) for lists in each.operands),
                each.params,
                each.lane,
            )
            for each in step.calls
        ]
        return Step(source, destination, step.lane[entry] + first_lane, block, step.gives[entry], tuple(calls))

    def _lists(self, lists: BlockLists, piece: int) -> BlockLists:
        entry, block = self.of_piece(lists.block, piece)
        return BlockLists.of_sizes(np.bincount(lists.owner[entry], minlength=len(lists)), block)


def _with_parts(steps: Sequence[Step], task: AttentionTask) -> list[Step]:
    """The steps without transfers of which the source has no part: a member may have fewer than an outer rank."""
    has = no_copies(task.layout.world_size, len(task.tensor))
    has[:, np.isin(task.tensor, (KEYS, QUERIES))] = True
    found = []
    for step in steps:
        some = has[step.source, step.block]
        source, destination, block = (each[some] for each in (step.source, step.destination, step.block))
        found.append(Step(source, destination, step.lane[some], block, step.gives[some], step.calls))
        has[step.source[step.gives], step.block[step.gives]] = False
        for calls in step.calls:
            for _, batch in calls.batches():
                effects = task.effects(batch)
                has[batch.rank[effects.call], effects.block] = True
        has[destination, block] = True
    return found


def _parts(span: Span, members: int) -> Iterator[Span]:
    """A span cut for the members; sizes differ by at most one position."""
    ends = [span.count * member // members for member in range(members + 1)]
    return (span.part(first, end - first) for first, end in pairwise(ends))


def members_layout(layout: SequenceLayout, members: int) -> SequenceLayout:
    """The layout in which the positions of each rank are shared out to members."""
    cut = [[list(_parts(span, members)) for span in each] for each in layout.spans]
    shards = (tuple(span[m] for span in spans if span[m].count) for spans in cut for m in range(members))
    return SequenceLayout(f"{layout.name} for {members}", layout.sequence, tuple(shards), layout.pieces)


def _cells(outer: AttentionTask, members: int) -> Iterator[tuple[int, int, int, int]]:
    """Block, member, start and count of what each member has of each outer block."""
    stride, starts = outer.layout.stride, [[span.start for span in each] for each in outer.layout.spans]
    columns = (outer.owner.tolist(), outer.start.tolist(), outer.count.tolist())
    for block, (owner, start, count) in enumerate(zip(*columns, strict=True)):
        span = outer.layout.spans[owner][bisect_right(starts[owner], start) - 1]
        for member, part in enumerate(_parts(span, members)):
            first, end = max(start, part.start), min(start + stride * count, part.start + stride * part.count)
            if first < end:
                yield block, member, first, (end - first) // stride
