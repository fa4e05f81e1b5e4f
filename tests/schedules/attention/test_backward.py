"""Backward passes of attention against a replay of their positions that shares no code with the proof."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tasp_lab.core.arrays import BoolArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS, Dataflow, Passes, attention_passes, dataflow_of
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask
from tasp_lab.schedules.build import attention_layout
from tasp_lab.topology.builders import bidirectional_ring, full_mesh, hypercube, nodes, ring, switch, torus
from tasp_lab.workload.layer import Workload
from tests.support.kernel_calls import INPUTS, OUTPUTS, Call, as_arrays, calls_of, circulates
from tests.support.links import with_links
from tests.support.routes import direct
from tests.support.schedules import task_of

TOPOLOGIES = {
    topology.name: topology
    for topology in [
        *map(full_mesh, range(1, 7)),
        *map(switch, (2, 3, 5)),
        *map(bidirectional_ring, (4, 5)),
        direct(ring(3)),
        torus((2, 3)),
        hypercube(2),
        nodes(2, 2),
        nodes(2, 3),
        replace(with_links(full_mesh(4), ["0-1=30GB/s"]), name="rings of unequal shares"),
    ]
}

Row = tuple[int, int, int, int, bool]
"""Source, destination, lane and block of a transfer, and whether the source gives."""

Place = tuple[int, int]
"""A rank and a block."""

Pair = tuple[int, int]
"""A query position and a key position."""


@cache
def rings_of(topology: str) -> Decomposition:
    return decompose(TOPOLOGIES[topology])


@dataclass(frozen=True)
class Case:
    name: str
    topology: str
    workload: Workload
    dataflow: Dataflow = "auto"
    gradient_dtype: str = "fp32"
    trim: bool = True
    buffers: int = 2

    @property
    def world_size(self) -> int:
        return TOPOLOGIES[self.topology].world_size

    @property
    def dataflows(self) -> tuple[Dataflow, ...]:
        """Those that the topology has links for, and auto."""
        return (
            "auto",
            *(dataflow for dataflow in DATAFLOWS if dataflow != "rotate-kv-back" or self.topology != "ring:3"),
        )

    @property
    def passes(self) -> Passes:
        return build(self)

    @property
    def backward(self) -> Schedule:
        return build(self).backward


@cache
def build(case: Case) -> Passes:
    rings = rings_of(case.topology) if case.name == "tasp" else None
    return attention_passes(
        case.name, TOPOLOGIES[case.topology], case.workload, rings,
        dataflow=case.dataflow, gradient_dtype=case.gradient_dtype, trim=case.trim, buffers=case.buffers,
    )  # fmt: skip


@st.composite
def workloads(draw: st.DrawFn, max_positions: int = 30) -> Workload:
    """Uneven shards, some of them empty; packed sequences, some of whose documents are."""
    sequence = draw(st.integers(1, max_positions))
    mask = draw(st.sampled_from(["full", "causal", "window"]))
    cuts = draw(st.lists(st.integers(0, sequence), max_size=4).map(sorted))
    kv_heads = draw(st.integers(1, 2))
    return Workload(
        sequence,
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 2)),
        dtype=draw(st.sampled_from(["bf16", "fp32"])),
        mask="full" if mask == "full" else "causal",
        window=draw(st.integers(1, sequence + 2)) if mask == "window" else None,
        documents=tuple(np.diff([0, *cuts, sequence]).tolist()) if cuts else None,
    )


names = st.sampled_from(sorted({*CIRCULATIONS} - {"half-each-way"}))  # which one-way rings have no links for
topologies = st.sampled_from(sorted(TOPOLOGIES))
dtypes = st.sampled_from(["fp32", "input"])


def cases_of(dataflows: st.SearchStrategy[Dataflow], max_positions: int = 30) -> st.SearchStrategy[Case]:
    """On links one way only, what came along a ring cannot go back."""
    drawn = st.builds(
        Case, names, topologies, workloads(max_positions), dataflows, dtypes, st.booleans(), st.integers(2, 4)
    )
    return drawn.filter(lambda case: case.dataflow in case.dataflows)


cases = cases_of(st.sampled_from(DATAFLOWS))


def sees(layer: Workload, query: int, key: int) -> bool:
    """The mask, as it is defined."""
    ends = np.cumsum(layer.documents or (layer.sequence,)).tolist()
    if any(min(query, key) < end <= max(query, key) for end in ends):
        return False
    return layer.mask == "full" or (key <= query and (layer.window is None or query - key < layer.window))


def pairs_of(layer: Workload) -> set[Pair]:
    positions = range(layer.sequence)
    return {(query, key) for query in positions for key in positions if sees(layer, query, key)}


# ------------------------------------------------------------------------------------------------ the naive replay


class WrongError(Exception):
    """What the docs of a schedule say is not so."""


def require(true: bool, what: str) -> None:
    if not true:
        raise WrongError(what)


class Plan(NamedTuple):
    """What a schedule says, be it right or wrong. `initial` and `final` are places."""

    task: AttentionTask
    buffers: list[int]
    initial: set[Place]
    final: set[Place]
    steps: list[tuple[list[Row], list[Call]]]


def places(rows: BoolArray) -> set[Place]:
    return {(rank, block) for rank, block in np.argwhere(rows).tolist()}


def rows_of(step: Step) -> list[Row]:
    return [(*row, gives) for row, gives in zip(step.rows(), step.gives.tolist(), strict=True)]


def plan_of(schedule: Schedule) -> Plan:
    steps = [(rows_of(step), calls_of(step)) for step in schedule.steps]
    buffers = schedule.blocks.buffers.tolist()
    return Plan(task_of(schedule), buffers, places(schedule.initial), places(schedule.final), steps)


class Replay:
    """Queries and keys as positions, results and gradients as bags of the pairs that were added to them, by rank.

    `run` raises `WrongError` if what a rank needs is not there, or what is promised is not what the layer asks for.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.task = plan, plan.task
        task, self.tensor = plan.task, plan.task.tensor.tolist()
        blocks = zip(task.start.tolist(), task.count.tolist(), strict=True)
        stride, at = task.layout.stride, task.layout.positions_at
        self.tokens = [at(start + stride * np.arange(count)).tolist() for start, count in blocks]
        shards = map(task.layout.positions, range(task.layout.world_size))
        owner = {position: rank for rank, shard in enumerate(shards) for position in shard.tolist()}
        self.owner = [owner[tokens[0]] for tokens in self.tokens]
        self.outputs = {block for block, tensor in enumerate(self.tensor) if tensor in OUTPUTS}
        pairs = pairs_of(task.workload)
        self.wanted = {
            block: Counter(pair for pair in pairs if pair[tensor == KEY_GRADIENTS] in set(self.tokens[block]))
            for block, tensor in enumerate(self.tensor)
            if block in self.outputs
        }
        self.output_at = {(self.tensor[block], token): block for block in self.outputs for token in self.tokens[block]}
        self.data = {at for at in plan.initial if at[1] not in self.outputs}
        self.sums = {at: self.wanted[at[1]].copy() for at in plan.initial if at[1] in self.outputs}
        self.came: dict[Place, int] = {}
        self.met: Counter[Pair] = Counter()
        self.left: list[tuple[set[Place], set[Place]]] = []
        """At every step: the sums that were away from home when it began, and those that were given."""

    def is_resident(self, at: Place) -> bool:
        return not self.plan.buffers[at[1]] or at in self.plan.initial or at in self.plan.final

    def run(self) -> None:
        for index, (rows, calls) in enumerate(self.plan.steps):
            for at in [at for at, step in self.came.items() if step == index - self.plan.buffers[at[1]]]:
                self._remove(at)
            away = {(rank, block) for rank, block in self.sums if rank != self.owner[block]}
            self.left.append((away, {(source, block) for source, _, _, block, gives in rows if gives}))
            brought = [self._taken(index, *row[:4]) for row in rows]
            brought += [part for call in calls for part in self._parts_of(call)]
            for source, _, _, block, gives in rows:
                if gives:
                    self._remove((source, block))
            for at, parts in brought:
                self._bring(index, at, parts)
        for at in self.plan.final:
            require(self.sums.get(at, Counter()) == self.wanted[at[1]], f"in the end {at} is not what it should be")

    def _remove(self, at: Place) -> None:
        self.came.pop(at, None)
        self.sums.pop(at, None)
        self.data.discard(at)

    def _taken(self, index: int, source: int, destination: int, lane: int, block: int) -> tuple[Place, Counter[Pair]]:
        require(0 <= block < len(self.tensor) and source != destination, f"step {index}: no such transfer")
        held = self.sums if block in self.outputs else self.data
        require((source, block) in held, f"step {index}: {source} has not {block}")
        return (destination, block), self.sums.get((source, block), Counter()).copy()

    def _bring(self, index: int, at: Place, parts: Counter[Pair]) -> None:
        require(self.came.get(at, index) == index, f"step {index}: {at} lies in another buffer")
        if not self.is_resident(at):
            self.came[at] = index
        if at[1] in self.outputs:
            self.sums.setdefault(at, Counter()).update(parts)
        else:
            require(at not in self.data, f"step {index}: {at} is there already")
            self.data.add(at)

    def _parts_of(self, call: Call) -> Iterator[tuple[Place, Counter[Pair]]]:
        """The pairs that a call computes, by the sums that they are a part of: of documents, those that see each other.

        Without documents all pairs in its band, be they masked or not.
        """
        layer = self.task.workload
        require(bool(call.queries and call.keys), "a call without blocks")
        for blocks, tensor in ((call.queries, QUERIES), (call.keys, KEYS)):
            require(all(0 <= block < len(self.tensor) and self.tensor[block] == tensor for block in blocks), "no such")
            require(all((call.rank, block) in self.data for block in blocks), f"rank {call.rank} has not {blocks}")
        queries, keys = (
            [token for block in each for token in self.tokens[block]] for each in (call.queries, call.keys)
        )
        of_queries, of_keys = (
            [block for block in each for _ in self.tokens[block]] for each in (call.queries, call.keys)
        )
        for i, query in enumerate(queries):
            for j, key in enumerate(keys):
                if call.low <= i - j <= call.high and self.share_documents(of_queries[i], of_keys[j]):
                    found = Counter([(query, key)] if layer.documents is None or sees(layer, query, key) else ())
                    self.met.update(found)
                    for tensor, position in ((RESULTS, query), (QUERY_GRADIENTS, query), (KEY_GRADIENTS, key)):
                        if (tensor, position) in self.output_at:
                            yield (call.rank, self.output_at[tensor, position]), found

    def share_documents(self, queries: int, keys: int) -> bool:
        """Whether the documents of two blocks overlap, from first to last; the part of such a tile may be empty."""
        ends = np.cumsum(self.task.workload.documents or (self.task.workload.sequence,))
        first, last = (
            [np.searchsorted(ends, end(self.tokens[block]), "right") for block in (queries, keys)] for end in (min, max)
        )
        return bool(first[0] <= last[1] and first[1] <= last[0])


def own(replay: Replay, *tensors: int) -> set[Place]:
    """The blocks of some tensors at their owners."""
    return {(rank, block) for block, rank in enumerate(replay.owner) if replay.tensor[block] in tensors}


# ------------------------------------------------------------------------------------------- what every schedule does


@settings(max_examples=120)
@given(cases_of(st.sampled_from(["auto", *DATAFLOWS])))
def test_every_pair_meets_once_and_all_parts_get_home_one_step_behind(case: Case) -> None:
    for schedule in case.passes:
        replay = Replay(plan_of(schedule))
        replay.run()
        assert replay.met == Counter(pairs_of(case.workload)), "a pair meets never, twice, or although it is masked"
        assert all(away == given for away, given in replay.left), "a sum that is away from home does not leave at once"
        assert all(rank == replay.owner[block] for rank, block in replay.sums), "a sum is left away from home"
        stays = KEYS if circulates(schedule, QUERIES) else QUERIES
        for call in [call for _, calls in replay.plan.steps for call in calls]:
            fixed = [block for block in call.queries + call.keys if replay.tensor[block] == stays]
            assert all(replay.owner[block] == call.rank for block in fixed), "a rank computes for another"


@given(cases)
def test_ranks_start_with_their_shards_and_copies_of_what_circulates_and_end_with_what_is_theirs(case: Case) -> None:
    for schedule in case.passes:
        replay = Replay(plan_of(schedule))
        mine = own(replay, *INPUTS)
        assert mine <= replay.plan.initial
        assert replay.plan.final == own(replay, *OUTPUTS)
        layout = attention_layout(case.name, case.workload, case.world_size)
        for rank, tensor in product(range(case.world_size), set(replay.tensor)):
            held = [token for at, block in sorted(own(replay, tensor)) if at == rank for token in replay.tokens[block]]
            assert sorted(held) == sorted(layout.positions(rank).tolist())
        copied = {replay.tensor[block] for _, block in replay.plan.initial - mine}
        assert copied <= ({KEYS} if schedule is case.backward and case.dataflow == "rotate-kv-back" else set())


@given(cases)
def test_the_way_is_the_one_asked_for(case: Case) -> None:
    """Where nothing travels, all ways are the same but for the side that would."""
    queries, keys = (circulates(case.backward, tensor) for tensor in (QUERIES, KEYS))
    assert queries != keys
    assert queries == (case.dataflow == "rotate-q")
    if case.dataflow != "rotate-kv-back" or (case.backward.initial != task_of(case.backward).owned(*INPUTS)).any():
        assert dataflow_of(case.backward) == case.dataflow


@given(cases)
def test_both_passes_place_positions_alike(case: Case) -> None:
    layout = attention_layout(case.name, case.workload, case.world_size)
    assert all(task_of(schedule).layout == layout for schedule in case.passes)


@given(cases)
def test_a_reversed_pass_starts_with_what_the_forward_pass_ends_with(case: Case) -> None:
    """Copies are what arrived last of each block, and it still lies in a buffer; the other ways start with none."""
    forward, backward = case.passes
    replay = Replay(plan_of(forward))
    replay.run()
    lying = set(replay.came)
    last = {row[3]: row[1] for step in forward.steps for row in step.rows()}
    copies = places(backward.initial & ~task_of(backward).owned(*INPUTS))
    assert copies <= lying
    assert copies == ({(rank, block) for block, rank in last.items()} if case.dataflow == "rotate-kv-back" else set())


@given(cases)
def test_steps(case: Case) -> None:
    """n for a reversed pass. One more for the others, where the last gradient travels alone; trimmed, at most."""
    n, steps = case.world_size, len(case.backward.steps)
    everybody_sees_all = case.workload.mask == "full" and case.workload.documents is None
    if case.dataflow == "rotate-kv-back":
        assert steps == n
    elif n > 1 and case.workload.sequence >= n and everybody_sees_all:
        assert steps == n + 1
    else:
        assert steps <= n + 1


@given(cases)
def test_transfers_run_where_the_topology_has_a_way(case: Case) -> None:
    for step in (step for schedule in case.passes for step in schedule.steps):
        assert all(TOPOLOGIES[case.topology].has_route(source, peer) for source, peer, _, _ in step.rows())


@given(cases)
def test_all_ways_compute_as_much(case: Case) -> None:
    """Five products where a forward pass has two; of the side that stays, so each rank as forward if queries do."""
    forward, backward = (schedule.flops().sum(axis=0) for schedule in case.passes)
    assert 2 * backward.sum() == 5 * forward.sum()
    if case.dataflow != "rotate-q":
        assert (2 * backward == 5 * forward).all()


# ---------------------------------------------------------------------------------------------------------- bytes


def bytes_per_position(case: Case, kind: str) -> int:
    """K and V; q, dout and, in float32, lse and delta; gradients of what travels."""
    layer = case.workload
    size = 4 if layer.dtype == "fp32" else 2
    queries, kv_heads = layer.batch * layer.heads, layer.batch * layer.kv_head_count
    gradient_size = 4 if case.gradient_dtype == "fp32" else size
    return {
        "keys": 2 * kv_heads * layer.head_dim * size,
        "queries": 2 * queries * layer.head_dim * size + 2 * queries * 4,
        "gradient": gradient_size * layer.head_dim * (queries if case.dataflow == "rotate-q" else 2 * kv_heads),
    }[kind]


@given(cases)
def test_the_ledger_is_the_sum_of_what_is_sent(case: Case) -> None:
    replay = Replay(plan_of(case.backward))
    expected = np.zeros((len(case.backward.steps), case.world_size, case.backward.lanes), dtype=np.int64)
    for index, (rows, _) in enumerate(replay.plan.steps):
        for source, _, lane, block, _ in rows:
            kind = "gradient" if block in replay.outputs else "queries" if case.dataflow == "rotate-q" else "keys"
            expected[index, source, lane] += len(replay.tokens[block]) * bytes_per_position(case, kind)
    assert (case.backward.bytes_sent() == expected).all()


@settings(max_examples=60)
@given(names, topologies, st.sampled_from(["full", "causal"]), st.integers(1, 3), st.sampled_from(DATAFLOWS), dtypes,
       st.integers(1, 3))  # fmt: skip
def test_hops_of_equal_shards(
    name: str, topology: str, mask: str, half: int, dataflow: Dataflow, gradient_dtype: str, group: int
) -> None:
    """Untrimmed. Keys: n - 2 hops reversed, for they start at the last rank and need not reach their owner; else n - 1.

    Gradients: n - 1, from the first other rank that meets the block to the owner, who adds its own part at home. Where
    nobody needs to see a block on the way (causal), its gradient has less of a way.
    """
    n = TOPOLOGIES[topology].world_size
    layer = Workload(
        2 * half * n, heads=2 * group, kv_heads=2, head_dim=2, mask="causal" if mask == "causal" else "full"
    )
    case = Case(name, topology, layer, dataflow, gradient_dtype, trim=False)
    assume(dataflow in case.dataflows)
    gradients, moves = hops_by_kind(case)
    kind, hops = (
        ("queries" if dataflow == "rotate-q" else "keys"),
        (max(n - 2, 0) if dataflow == "rotate-kv-back" else n - 1),
    )
    assert moves == hops * layer.sequence
    assert gradients == (n - 1) * layer.sequence if mask == "full" else gradients <= (n - 1) * layer.sequence
    total = gradients * bytes_per_position(case, "gradient") + moves * bytes_per_position(case, kind)
    assert case.backward.bytes_sent().sum() == total


def hops_by_kind(case: Case) -> tuple[int, int]:
    """How many positions of gradients, and of what they are of, are sent, each hop counted."""
    replay = Replay(plan_of(case.backward))
    gradients = moves = 0
    for rows, _ in replay.plan.steps:
        for _, _, _, block, _ in rows:
            if block in replay.outputs:
                gradients += len(replay.tokens[block])
            else:
                moves += len(replay.tokens[block])
    return gradients, moves


# ---------------------------------------------------------------------------------------------------- the choice


def bytes_that_count(case: Case) -> int:
    """Forward and backward, each on its busiest lane where there are several rings, else of all ranks."""
    is_single = case.name != "tasp" or len(rings_of(case.topology).rings) == 1
    sent = [schedule.bytes_sent().sum(axis=0) for schedule in case.passes]
    return sum(int(each.sum() if is_single else each.max(initial=0)) for each in sent)


@settings(max_examples=40)
@given(cases_of(st.just("auto")))
def test_auto_never_sends_more_than_a_way_that_is_named(case: Case) -> None:
    named = [bytes_that_count(replace(case, dataflow=dataflow)) for dataflow in case.dataflows if dataflow != "auto"]
    assert bytes_that_count(case) == min(named)


@pytest.mark.parametrize("n", range(2, 7))
def test_a_causal_zigzag_ring_is_trimmed_where_that_sends_less_than_the_way_back(n: int) -> None:
    """Few KV heads, so keys travel. Hops of half shards of KV, both passes together; those of dKV count twice.

    Onward, down the ranks: each front half makes n - 1 hops three times, rank r's back half r, four quarters each.
    Reversed, down the ranks too: forward n - 1 hops of each half. Back, n - 2 of each (none of rank 0's back half,
    which nobody else sees), and the gradients n - 1 hops home of a front half, r of rank r's back half.
    """
    layer = Workload(4 * n, heads=8, kv_heads=1, head_dim=4, mask="causal")
    case = Case("zigzag-ring-attention", f"full-mesh:{n}", layer)
    onward = sum(4 * (n - 1) + 4 * r for r in range(n))
    back = sum(2 * (n - 1) + (n - 2) + 2 * (n - 1) for r in range(n)) + sum((n - 2) + 2 * r for r in range(1, n))
    half_bytes = 2 * layer.kv_bytes_per_position
    assert bytes_that_count(replace(case, dataflow="rotate-kv")) == onward * half_bytes
    assert bytes_that_count(replace(case, dataflow="rotate-kv-back")) == back * half_bytes
    assert dataflow_of(case.backward) == ("rotate-kv" if onward < back else "rotate-kv-back")


def test_queries_travel_where_there_are_as_many_kv_heads() -> None:
    """q, dout, dq in float32: 2 + 2 + 4 bytes per element, against 2 + 2 + 4 + 4, and a little for lse and delta."""
    for name in CIRCULATIONS:
        chosen = [
            dataflow_of(Case(name, "full-mesh:5", Workload(40, heads=8, kv_heads=count, mask="full")).backward)
            for count in (8, 1)
        ]
        assert chosen == ["rotate-q", "rotate-kv-back"]


def test_what_came_over_links_one_way_cannot_go_back() -> None:
    """So ``auto`` takes another way where the way back would send fewest bytes."""
    case = Case("ring-attention", "ring:3", Workload(6, heads=8, kv_heads=1, head_dim=4, mask="full"))
    attention_passes(case.name, ring(3), case.workload, None, dataflow="rotate-kv-back")  # where ranks forward
    with pytest.raises(ScheduleError, match=r"step 0: rank \d sends to rank \d, but ring:3 has no such link"):
        build(replace(case, dataflow="rotate-kv-back"))
    assert dataflow_of(case.backward) == "rotate-kv"


@pytest.mark.parametrize("wrong", [{"dataflow": "sideways"}, {"gradient_dtype": "bf16"}, {"buffers": 1}])
def test_what_is_not_there_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError, match="expected"):
        attention_passes("tasp", full_mesh(3), Workload(6, heads=1, mask="full"), **wrong)


# ------------------------------------------------------------------------------------------- what means the same

BASES = [
    Case(name, topology, layer, dataflow, trim=trim, buffers=buffers)
    for dataflow in DATAFLOWS
    for name, topology, layer, trim, buffers in [
        ("tasp", "full-mesh:4", Workload(24, head_dim=1, mask="causal", heads=1), True, 2),
        ("tasp", "torus:2x3", Workload(13, head_dim=1, heads=1, mask="full"), True, 3),
        (
            "zigzag-ring-attention",
            "full-mesh:4",
            Workload(17, head_dim=1, mask="causal", documents=(9, 8), heads=1),
            True,
            2,
        ),
        ("ring-attention", "bidirectional-ring:5", Workload(15, head_dim=1, mask="causal", window=5, heads=1), True, 3),
        ("ring-attention", "ring:3", Workload(6, head_dim=1, heads=1, mask="full"), False, 2),
        ("striped-ring-attention", "full-mesh:3", Workload(10, head_dim=1, mask="causal", heads=1), False, 4),
    ]
    if (topology, dataflow) != ("ring:3", "rotate-kv-back")
]


class Draft:
    """A proven pass, open to change. Every draw is of what is there."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.schedule = data.draw(st.sampled_from(BASES).flatmap(lambda case: st.sampled_from(case.passes)))
        self.task = task_of(self.schedule)
        self.circulating = QUERIES if circulates(self.schedule, QUERIES) else KEYS
        self.rows = [rows_of(step) for step in self.schedule.steps]
        self.calls = [calls_of(step) for step in self.schedule.steps]
        self.initial = self.schedule.initial.copy()

    def step(self, first: int, last: int) -> int:
        return self.data.draw(st.integers(first, last))

    def call(self) -> tuple[int, int]:
        """The step and the place of a call."""
        return self.data.draw(
            st.sampled_from([(s, at) for s, step in enumerate(self.calls) for at in range(len(step))])
        )

    def add_step(self) -> None:
        self.rows.append([])
        self.calls.append([])

    @property
    def plan(self) -> Plan:
        steps = list(zip(self.rows, self.calls, strict=True))
        return plan_of(self.schedule)._replace(initial=places(self.initial), steps=steps)

    def built(self) -> Schedule:
        """Proves the steps as they are now."""
        steps = [Step.of(rows, as_arrays(self.task, calls)) for rows, calls in zip(self.rows, self.calls, strict=True)]
        return replace(self.schedule, steps=steps, initial=self.initial.copy())

    def moved(self, call: Call) -> list[int]:
        """The blocks of a call that circulate."""
        return call.queries if self.circulating == QUERIES else call.keys

    def with_moved(self, call: Call, blocks: list[int]) -> Call:
        return call._replace(queries=blocks) if self.circulating == QUERIES else call._replace(keys=blocks)


def call_split(draft: Draft) -> None:
    """By the blocks that travel; the band of the later part is counted from its own first pair."""
    index, at = draft.call()
    call = draft.calls[index][at]
    blocks = draft.moved(call)
    assume(len(blocks) > 1)
    cut = draft.data.draw(st.integers(1, len(blocks) - 1))
    ahead = int(draft.task.count[blocks[:cut]].sum()) * (1 if draft.circulating == KEYS else -1)
    later = draft.with_moved(call, blocks[cut:])._replace(low=call.low + ahead, high=call.high + ahead)
    draft.calls[index][at : at + 1] = [draft.with_moved(call, blocks[:cut]), later]


def order_changed(draft: Draft) -> None:
    draft.rows = [draft.data.draw(st.permutations(rows)) for rows in draft.rows]
    draft.calls = [draft.data.draw(st.permutations(calls)) for calls in draft.calls]


def own_call_at_another_step(draft: Draft) -> None:
    """Own blocks and their gradients are at home all the time."""
    draft.add_step()
    index, at = draft.call()
    call = draft.calls[index][at]
    assume((draft.task.owner[draft.moved(call)] == call.rank).all())
    draft.calls[draft.step(0, len(draft.calls) - 1)].append(draft.calls[index].pop(at))


def call_delayed(draft: Draft) -> None:
    """While the buffer lasts; the parts of a gradient would follow too late."""
    assume(not draft.task.is_backward)
    buffers = draft.schedule.blocks.buffers[draft.task.blocks_of(KEYS)[0]]
    for _ in range(buffers):
        draft.add_step()
    index, at = draft.call()
    last = len(draft.calls) - 1 if index == 0 else index + buffers - 2
    draft.calls[draft.step(index, last)].append(draft.calls[index].pop(at))


def limit_loosened(draft: Draft) -> None:
    """Beyond the last pair a limit means nothing."""
    index, at = draft.call()
    call, by = draft.calls[index][at], draft.step(1, 9)
    queries, keys = (int(draft.task.count[blocks].sum()) for blocks in (call.queries, call.keys))
    low = call.low - by if call.low == 1 - keys else call.low
    high = call.high + by if call.high == queries - 1 else call.high
    draft.calls[index][at] = call._replace(low=low, high=high)


def steps_added(draft: Draft) -> None:
    for _ in range(draft.step(0, 4)):
        draft.add_step()


SAME = [call_split, order_changed, own_call_at_another_step, call_delayed, limit_loosened, steps_added]


@pytest.mark.parametrize("change", SAME, ids=lambda change: change.__name__)
@settings(max_examples=20)
@given(data=st.data())
def test_what_means_the_same_is_accepted(change: Callable[[Draft], None], data: Any) -> None:
    draft = Draft(data)
    change(draft)
    Replay(draft.plan).run()
    assert (draft.built().flops().sum(axis=0) == draft.schedule.flops().sum(axis=0)).all()


@given(st.data())
def test_a_pass_that_starts_without_what_is_its_own_is_refused(data: st.DataObject) -> None:
    draft = Draft(data)
    rank, block = data.draw(st.sampled_from(np.argwhere(draft.task.owned(*INPUTS)).tolist()))
    draft.initial[rank, block] = False
    with pytest.raises(ScheduleError, match=rf"^step \d+: rank {rank} "):
        draft.built()


@given(st.data())
def test_gradients_start_empty(data: st.DataObject) -> None:
    draft = Draft(data)
    index, at = draft.call()
    call = draft.calls[index][at]
    outputs = [block for block in draft.task.output_of[call.queries + call.keys].tolist() if block >= 0]
    block = data.draw(st.sampled_from(outputs))
    draft.initial[call.rank, block] = True
    with pytest.raises(ScheduleError, match=rf"rank {call.rank} starts with block {block} .*is empty until"):
        draft.built()


@given(cases, st.data())
def test_a_forward_pass_starts_with_nothing_of_other_ranks(case: Case, data: st.DataObject) -> None:
    forward = attention(case.name, TOPOLOGIES[case.topology], case.workload, None)
    arrivals = [(rank, block) for step in forward.steps for _, rank, _, block in step.rows()]
    assume(arrivals)
    rank, block = data.draw(st.sampled_from(arrivals))
    initial = forward.initial.copy()
    initial[rank, block] = True
    with pytest.raises(ScheduleError, match=rf"rank {rank} starts with block {block} .*which only rank \d+ has then"):
        replace(forward, initial=initial)
