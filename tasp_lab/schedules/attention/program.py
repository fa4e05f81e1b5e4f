"""A schedule of softmax attention as a short record of decisions, and the builder that makes it a proved schedule.

    program = Program(layout="zigzag", shape=(2, 8), forward=plan)
    forward, backward = build(program, "found", topology, workload, AttentionOptions("both"))

Ranks form a grid, `Program.shape`: nodes by GPUs, or a single row. The *offset* of a rank from another one is the
vector that leads there, modulo the grid, as one number. A `Plan` of a pass has the decisions:

- *What travels.* The keys of rank o are used at the rank at offset d from it; or, for the offsets in `queries`, the
  queries of that rank travel to o, and what they yield returns to it.
- *By which route.* Keys are cut into pieces of equal size. Each piece has a `Tree`: for each offset the offset from
  which it comes. ``0, 0, 0, 0`` is straight from the owner, ``0, 0, 1, 2`` a ring. A tree with an entry for each owner
  and rank is for machines that do not look alike from every rank.
- *In which order.* `arrival` is the step of each transfer; what arrives in one step is used by joined kernel calls.
- *How results go home.* Gradients of keys go straight to their owner, or back along the tree, adding up on the way.
- *Lanes.* A lane for each peer, so that all transfers of a step run at once; or one lane for all peers of other nodes,
  so that what comes through a NIC arrives one after another.

- *In how many groups of heads*, each a step behind the one before: while ranks compute with one, the next one comes and
  the results of the last one leave.

With `members` above 1 groups of so many ranks share out the heads as in `tasp_lab.schedules.attention.usp`, and all of
this is between groups; with one group it is Ulysses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import ScheduleError, TopologyError, unknown
from tasp_lab.core.files import write_whole
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.composition.layers import in_chunks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.circulation import Circulation, Side
from tasp_lab.schedules.attention.direct_attention import in_stages
from tasp_lab.schedules.attention.options import AttentionOptions, check_options
from tasp_lab.schedules.attention.span_blocks import owner_schedule, span_task
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask
from tasp_lab.schedules.attention.travel import (
    NO_GIFTS,
    Gifts,
    PeerLanes,
    Route,
    Travel,
    TravelSteps,
    straight_home,
)
from tasp_lab.schedules.attention.usp import in_groups, members_layout
from tasp_lab.schedules.build import attention_layout, attention_schedules
from tasp_lab.schedules.registry import ScheduleSpec, options_for
from tasp_lab.topology.derived import between_groups
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import LAYOUTS, SequenceLayout, layout_named

MAX_FILE_BYTES = 64 * 2**20

APPLYING = ("gradient_dtype", "result_dtype")
"""The options that apply to a program; the others are decided by it."""

SUM_BUFFERS = 3
"""Buffers for parts of results or gradients that go straight home: one fills, one is sent, one is received."""


class Tree(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one piece of the keys of each owner travels.

    `via` and `arrival` have an entry per offset; or one per owner and rank, row by row. `via` is the offset (or rank)
    from which a piece comes, `arrival` the step of the transfer; entries of the owner itself are ignored.
    """

    via: tuple[int, ...]
    arrival: tuple[int, ...]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decisions of one pass.

    `queries` are the offsets over which queries travel instead of keys. `buffers` are those of a rank for what arrives,
    each for one step; 0 for memory for all of it. `own` is the step in which ranks compute with what they own.
    `heads` is the number of groups of heads that follow each other.
    """

    trees: tuple[Tree, ...]
    queries: tuple[int, ...] = ()
    home: Literal["straight", "tree"] = "straight"
    lanes: Literal["peer", "order"] = "peer"
    buffers: int = 0
    own: int = 0
    heads: int = 1


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schedule that has a name, with the options that are not the defaults."""

    schedule: str
    options: dict[str, bool | int | str] = {}


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The decisions of all passes; or the name of a schedule, where nothing better was found.

    With `keep` the forward pass leaves all keys where they were used, and the backward pass sends none: the trees of
    its plan are the order of its calls, any order, and the ways of gradients.
    `question` says what it was found for. It can be used for any layer on as many ranks.
    """

    layout: str = "contiguous"
    shape: tuple[int, ...] = ()
    members: int = 1
    keep: bool = False
    forward: Plan | None = None
    backward: Plan | None = None
    known: Known | None = None
    question: dict[str, str] = {}

    @property
    def ranks(self) -> int:
        """The number of ranks; 0 if it is for any number."""
        return int(np.prod(self.shape)) * self.members if self.shape else 0


def offsets(shape: Sequence[int]) -> IntArray:
    """The offset of each rank from each other one on a grid: int array (from, to).

    >>> offsets((2, 2)).tolist()
    [[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]
    """
    places = np.stack(np.unravel_index(np.arange(int(np.prod(shape))), shape))
    between = (places[:, None, :] - places[:, :, None]) % np.array(shape)[:, None, None]
    numbers: IntArray = np.ravel_multi_index(tuple(between), tuple(shape)).astype(np.int64)
    return numbers


class Routes(NamedTuple):
    """Where each piece comes from and when, int arrays (pieces, owner, rank)."""

    via: IntArray
    arrival: IntArray


def routes_of(plan: Plan, shape: Sequence[int], where: str = "plan") -> Routes:
    """The ways of all pieces of a plan. Raises `ScheduleError` for numbers that are none of ranks."""
    n, offset = int(np.prod(shape)), offsets(shape)
    for each in plan.queries:
        if not 0 < each < n:
            raise ScheduleError(f"{where}: queries over offset {each}, expected 1 to {n - 1}")
    at = np.argsort(offset, axis=1)  # [rank, offset]: the rank there
    via, arrival = [], []
    for number, tree in enumerate(plan.trees):
        tables = np.array(tree.via, dtype=np.int64), np.array(tree.arrival, dtype=np.int64)
        if {len(each) for each in tables} == {n}:
            tables = at[np.arange(n)[:, None], _checked(where, number, tables[0], n)[offset]], tables[1][offset]
        elif {len(each) for each in tables} == {n * n}:
            tables = _checked(where, number, tables[0], n).reshape(n, n), tables[1].reshape(n, n)
        else:
            sizes = " and ".join(str(len(each)) for each in tables)
            raise ScheduleError(f"{where}: tree {number} has {sizes} entries, expected {n}, one per offset, or {n * n}")
        if tables[1].min() < 0 or tables[1].max() > n * n * len(plan.trees):
            raise ScheduleError(f"{where}: tree {number} has arrivals below 0 or above {n * n * len(plan.trees)}")
        via.append(tables[0])
        arrival.append(tables[1])
    return Routes(np.stack(via), np.stack(arrival))


def _checked(where: str, number: int, via: IntArray, n: int) -> IntArray:
    if ((via < 0) | (via >= n)).any():
        raise ScheduleError(
            f"{where}: tree {number} comes from {via[(via < 0) | (via >= n)][0]}, expected 0 to {n - 1}"
        )
    return via


def layout_of(program: Program, workload: Workload, world_size: int) -> SequenceLayout:
    """The sequence layout. Raises `ScheduleError` for another number of ranks."""
    if program.known is not None:
        return attention_layout(program.known.schedule, workload, world_size, _options(program.known, "forward"))
    if program.ranks != world_size:
        raise ScheduleError(f"a schedule that was found for {program.ranks} ranks, expected {world_size}")
    if program.layout not in LAYOUTS:
        raise ScheduleError(unknown("layout", program.layout, LAYOUTS))
    outer = _outer_layout(program, workload, world_size)
    return outer if program.members == 1 else members_layout(outer, program.members)


def _outer_layout(program: Program, workload: Workload, world_size: int) -> SequenceLayout:
    """The layout between groups."""
    groups = world_size // program.members
    return layout_named(program.layout, workload, groups)


def _options(known: Known, passes: str, given: AttentionOptions | None = None) -> AttentionOptions:
    check_options(known.options)
    options = AttentionOptions("both" if passes == "both" else passes, **known.options)  # type: ignore[arg-type]
    if given is not None:  # dtypes belong to the question
        options = replace(options, gradient_dtype=given.gradient_dtype, result_dtype=given.result_dtype)
    return options_for(known.schedule, options.forward_only if passes == "forward" else options)


def build(
    program: Program, name: str, topology: Topology, workload: Workload, options: AttentionOptions
) -> tuple[Schedule, ...]:
    """The schedules of the requested passes, proved. Raises `ScheduleError`, and `NoLinkError` without a route."""
    if program.known is not None:
        own = _options(program.known, options.passes, options)
        found = attention_schedules(program.known.schedule, topology, workload, None, own)
        return tuple(each.renamed(name) for each in found)
    layout_of(program, workload, topology.world_size)  # refuses another number of ranks
    return options.build(partial(build_pass, program, name, topology, workload, options))


def built(found: Any, *given: Any) -> Any:
    """What the builder of a user returned for arguments of `build`; its schedules if that is a program."""
    return build(found, *given) if isinstance(found, Program) else found


def build_pass(
    program: Program, name: str, topology: Topology, workload: Workload, options: AttentionOptions, backward: bool
) -> Schedule:
    """One pass."""
    plan = program.backward if backward else program.forward
    passing = "backward" if backward else "forward"
    if plan is None:
        raise ScheduleError(f"schedule {name!r} was found without a {passing} pass, expected pass "
                            f"{'forward' if backward else 'backward'}")  # fmt: skip
    members = program.members
    try:
        outer = topology if members == 1 else between_groups(topology, members)
    except TopologyError as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None
    layout = _outer_layout(program, workload, topology.world_size)
    if program.keep and any(each and (each.queries or each.buffers) for each in (program.forward, program.backward)):
        raise ScheduleError(f"schedule {name!r}: keys are kept, expected no queries or buffers")
    found = _between_groups(name, outer, workload, layout, plan, program, options, backward)
    if members > 1:
        wire = options.wire_dtype(workload.dtype, backward=False, sums=False)
        found = in_groups(name, topology, found, members, wire, has_keys=program.keep and backward)
    return in_chunks(found, plan.heads)


def _between_groups(
    name: str, topology: Topology, workload: Workload, layout: SequenceLayout, plan: Plan,
    program: Program, options: AttentionOptions, backward: bool,
) -> Schedule:  # fmt: skip
    """One pass between groups, each of which is a rank here."""
    n, offset, starts_with_keys = topology.world_size, offsets(program.shape), program.keep and backward
    routes = routes_of(plan, program.shape, f"schedule {name!r}")
    wire = options.wire_dtype(workload.dtype, backward=backward, sums=plan.home == "tree")
    task, stage = in_stages(replace(span_task(workload, layout, wire, backward=backward), home_dtype="fp32"),
                            len(plan.trees))  # fmt: skip
    lanes = _lanes(topology, plan)
    # Keys go from owner to user, [owner, user]; queries from their owner to that of the keys.
    by_queries = np.isin(offset, plan.queries) & (offset > 0)
    keys = _circulation(task, "keys", ~by_queries)
    owner, hop = task.owner[keys.blocks][:, None], np.arange(n)  # hops are distances: a row of hops for each block
    via = (routes.via[stage[:, None], owner, (owner + hop) % n] - owner) % n
    arrival = routes.arrival[stage[:, None], owner, (owner + hop) % n]
    gifts = NO_GIFTS
    if backward:
        far = _depth(name, via, owner) if starts_with_keys else arrival
        gifts = straight_home(arrival) if plan.home == "straight" else _along(via, arrival, far, keys.used)
    came = np.broadcast_to(hop, via.shape) if starts_with_keys else via
    travels = [Travel(keys, Route(came, arrival, gifts), lanes, np.arange(len(via)))]
    if by_queries.any():
        queries = _circulation(task, "queries", by_queries.T)
        owner = task.owner[queries.blocks][:, None]
        arrival = routes.arrival[0][(owner + hop) % n, owner]
        route = Route(np.zeros_like(arrival), arrival, straight_home(arrival))
        travels.append(Travel(queries, route, lanes, np.arange(len(arrival))))
    steps, lane_count = _compressed([step for step in TravelSteps(*travels, own=plan.own) if len(step) or step.calls])
    kept: BoolArray = np.logical_or.reduce([each.places() for each in travels])
    data = Pool("data", plan.buffers) if plan.buffers else None
    return owner_schedule(
        name, topology, task, steps, lanes=lane_count, circulating=_pools(program, plan, workload, data, task),
        copies=kept if starts_with_keys else None,
        kept=kept if data is None and not starts_with_keys else None,
    )  # fmt: skip


def _pools(
    program: Program, plan: Plan, workload: Workload, data: Pool | None, task: AttentionTask
) -> dict[int, Pool | None]:
    """The pools of what travels.

    What goes home straight leaves a step after the call. Sums that grow on their way wait for those behind them.
    Gradients that several groups of heads add to stay for all of them.
    """
    kv_heads = workload.kv_head_count // min(program.members, workload.kv_head_count)  # of a member
    straight = Pool("sums", SUM_BUFFERS)
    pooled = plan.home == "straight" and kv_heads % plan.heads == 0
    pools: dict[int, Pool | None] = {KEYS: data, KEY_GRADIENTS: straight if pooled else None}
    if plan.queries:
        pools |= {QUERIES: data, RESULTS: straight, QUERY_GRADIENTS: straight}
    return {tensor: pool for tensor, pool in pools.items() if tensor in task.tensor}


def _circulation(task: AttentionTask, side: Side, travels: BoolArray) -> Circulation:
    """One side around a ring of ascending ranks, on which hops are distances."""
    span_of = None
    if side == "queries":  # pieces of one span of keys are read together
        keys = task.blocks_of(KEYS)
        apart = (np.diff(task.owner[keys]) != 0) | (
            task.start[keys][1:] != (task.start + task.layout.stride * task.count)[keys][:-1]
        )
        span_of = np.concatenate([[0], np.cumsum(apart)])
    moving = task.blocks_of(KEYS if side == "keys" else QUERIES)
    ring = np.arange(task.layout.world_size)[None]
    return Circulation(task, ring, np.zeros(len(moving), dtype=np.int64), side, span_of, travels)


def _along(via: IntArray, arrival: IntArray, far: IntArray, used: BoolArray) -> Gifts:
    """Sums that go back along trees: each leaves a hop a step after its call and all that comes from further away.

    `via`, `arrival` and `far`, by which what is further along a tree comes first, are int arrays (blocks, hops).
    """
    blocks, hops = via.shape
    there, late, leaves = used.T.copy(), np.zeros((blocks, hops), dtype=np.int64), np.zeros_like(arrival)
    for distance in np.unique(far)[::-1].tolist():
        block, hop = np.nonzero(there & (far == distance) & (np.arange(hops) > 0))
        before = np.where(used[hop, block], arrival[block, hop] + 1, 0)
        leaves[block, hop] = step = np.maximum(late[block, hop], before) + 1
        there[block, via[block, hop]] = True
        np.maximum.at(late, (block, via[block, hop]), step)
    return Gifts.of(np.arange(1, hops), via[:, 1:], leaves[:, 1:], 0, hops)


def _depth(name: str, via: IntArray, owner: IntArray) -> IntArray:
    """The transfers from the owner of each block to each hop along its tree, int array (blocks, hops)."""
    depth, at = np.zeros_like(via), np.broadcast_to(np.arange(via.shape[1]), via.shape)
    for _ in range(via.shape[1]):
        depth += at > 0
        at = np.where(at > 0, np.take_along_axis(via, at, axis=1), 0)
    if at.any():
        block, hop = np.argwhere(at > 0)[0].tolist()
        own = int(owner[block, 0])
        raise ScheduleError(f"schedule {name!r}: no way of keys from rank {own} to rank {(own + hop) % via.shape[1]}")
    return depth


def _lanes(topology: Topology, plan: Plan) -> PeerLanes:
    """A lane per distance, or one for all ranks of other nodes; those of gifts are others."""
    n, node = topology.world_size, np.array(topology.node_of_rank)
    distance = (np.arange(n) - np.arange(n)[:, None]) % n
    lane = distance if plan.lanes == "peer" else np.where(node[:, None] == node, distance, 0)
    return PeerLanes(3 * n, lane, lane + 2 * n)


def _compressed(steps: Sequence[Step]) -> tuple[list[Step], int]:
    """The steps with lanes numbered without gaps, and their number."""
    used = np.unique(np.concatenate([step.lane for step in steps])) if steps else np.zeros(0, dtype=np.int64)
    found = [
        Step(step.source, step.destination, np.searchsorted(used, step.lane), step.block, step.gives, step.calls)
        for step in steps
    ]
    return found, max(len(used), 1)


# -- files ------------------------------------------------------------------------------------------------------------
def load(name: str) -> Program:
    """The program of a file. Raises `ScheduleError`."""
    path = Path(name)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ScheduleError(f"{name}: {path.stat().st_size:,} bytes, expected at most {MAX_FILE_BYTES:,}")
        found = msgspec.json.decode(path.read_bytes(), type=Program)
    except OSError as error:
        raise ScheduleError(f"{name}: {error.strerror or error}, expected a schedule of tasp-lab search") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{name}: {error}, expected a schedule of tasp-lab search") from None
    if found.known is None and ((found.forward is None and found.backward is None) or not found.shape):
        raise ScheduleError(f"{name}: no shape and plan of a pass, expected a schedule of tasp-lab search")
    empty = [plan for plan in (found.forward, found.backward) if plan is not None and not plan.trees]
    if empty:
        raise ScheduleError(f"{name}: a plan without trees, expected 1 or more")
    if found.known is None and (found.members < 1 or min(found.shape) < 1):
        raise ScheduleError(f"{name}: shape {found.shape} and members {found.members}, expected 1 or more each")
    fewest = min((plan.heads for plan in (found.forward, found.backward) if plan is not None), default=1)
    if fewest < 1:
        raise ScheduleError(f"{name}: {fewest} groups of heads, expected 1 or more")
    return found


def save(program: Program, path: Path) -> None:
    """Write the program to a file of JSON. Raises `OutputError`; no partial file remains."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(program), indent=1) + b"\n")


def spec(name: str) -> ScheduleSpec:
    """The program of a file as a schedule of the registry. Raises `ScheduleError` as `load` does."""
    program = load(name)

    def builder(name: str, topology: Topology, workload: Workload, options: AttentionOptions) -> tuple[Schedule, ...]:
        return build(program, name, topology, workload, options)

    def layout(workload: Workload, world_size: int) -> SequenceLayout:
        return layout_of(program, workload, world_size)

    return ScheduleSpec("softmax", builder, "as found by tasp-lab search", layout, APPLYING)
