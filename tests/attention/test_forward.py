"""Attention schedules against a replay of their tokens that shares no code with the proof."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tasp_lab.attention.forward import attention
from tasp_lab.attention.registry import ATTENTION, attention_layout
from tasp_lab.decomposition.decompose import Decomposition, decompose
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.buffer_layout import rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import Step
from tasp_lab.topology.builders import bidirectional_ring, full_mesh, nodes, ring, switch, torus
from tasp_lab.topology.edits import with_links
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.kernel_calls import Call
from tasp_lab.workload.layer import Workload
from tests.support.schedules import task_of

SINGLE = sorted(set(ATTENTION) - {"tasp"})
names = st.sampled_from(sorted(ATTENTION))

TOPOLOGIES = {
    topology.name: topology
    for topology in [
        *(full_mesh(ranks) for ranks in range(1, 10)),
        *(switch(ranks) for ranks in range(2, 10)),
        *(ring(ranks) for ranks in range(2, 10)),
        *(nodes(*shape) for shape in ((1, 3), (2, 2), (2, 3), (3, 2), (2, 4), (3, 3))),
        bidirectional_ring(5),
        torus((3, 3)),
        replace(with_links(full_mesh(4), ["0-1=30GB/s"]), name="rings of unequal shares"),
    ]
}


@cache
def rings_of(topology: str) -> Decomposition:
    return decompose(TOPOLOGIES[topology])


@cache
def build(name: str, topology: str, workload: Workload, trim: bool = True, buffers: int = 2) -> Schedule:
    rings = rings_of(topology) if name == "tasp" else None
    return attention(name, TOPOLOGIES[topology], workload, rings, trim=trim, buffers=buffers)


@dataclass(frozen=True)
class Case:
    name: str
    topology: str
    workload: Workload
    trim: bool
    buffers: int

    @property
    def schedule(self) -> Schedule:
        return build(self.name, self.topology, self.workload, self.trim, self.buffers)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    sequence = draw(st.one_of(st.integers(1, 40), st.integers(41, 90)))
    mask = draw(st.sampled_from(["full", "causal", "window"]))
    if mask == "full":
        return Workload(sequence, heads=1)
    window = draw(st.integers(1, sequence + 3)) if mask == "window" else None
    return Workload(sequence, heads=4, kv_heads=2, head_dim=3, mask="causal", window=window)


few = settings(max_examples=40)
"""Where the draws are from a few hundred."""

cases = st.builds(Case, names, st.sampled_from(sorted(TOPOLOGIES)), workloads(), st.booleans(), st.integers(2, 4))


def sees(workload: Workload, query: int, key: int) -> bool:
    """The mask, as it is defined."""
    if workload.mask == "full":
        return True
    return key <= query and (workload.window is None or query - key < workload.window)


def tokens_of(schedule: Schedule) -> list[list[int]]:
    """The positions of every block."""
    task = task_of(schedule)
    blocks = zip(task.start.tolist(), task.count.tolist(), strict=True)
    return [[start + index * task.layout.stride for index in range(count)] for start, count in blocks]


def meetings(schedule: Schedule) -> Counter[tuple[int, int, int]]:
    """How often (rank, query position, key position) meet; asserts that what moves and is used was there."""
    tokens, first_query, buffers = tokens_of(schedule), task_of(schedule).first_query, schedule.buffers
    assert buffers is not None
    home = [set(np.flatnonzero(row).tolist()) for row in schedule.initial]
    buffer: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    met: Counter[tuple[int, int, int]] = Counter()
    for index, step in enumerate(schedule.steps):
        for rank in range(schedule.world_size):
            buffer[rank, index % buffers] = set()
        held = [home[rank].union(*(buffer[rank, at] for at in range(buffers))) for rank in range(schedule.world_size)]
        rows = step.rows()
        assert all(block < first_query and block in held[source] for source, _, _, block in rows)
        assert len({(destination, block) for _, destination, _, block in rows}) == len(rows)
        for call in step.calls:
            blocks = call.queries.tolist(), call.keys.tolist()
            assert home[call.rank].issuperset(blocks[0])
            assert held[call.rank].issuperset(blocks[1])
            queries, keys = ([token for block in each for token in tokens[block]] for each in blocks)
            met.update(
                (call.rank, query, key)
                for i, query in enumerate(queries)
                for j, key in enumerate(keys)
                if call.low <= i - j <= call.high
            )
        for _, destination, _, block in rows:
            assert block not in held[destination]
            buffer[destination, index % buffers].add(block)
    return met


def dataflows(schedule: Schedule) -> dict[int, list[int]]:
    """The ranks at which each key block arrives, in the order of steps."""
    found: dict[int, list[int]] = {block: [] for block in range(task_of(schedule).first_query)}
    for step in schedule.steps:
        for _, destination, _, block in step.rows():
            found[block].append(destination)
    return found


# What every schedule does


@settings(max_examples=250)
@given(cases)
def test_every_query_meets_every_key_of_its_mask_once_at_its_own_rank(case: Case) -> None:
    layout = attention_layout(case.name, case.workload, case.schedule.world_size)
    assert meetings(case.schedule) == Counter(
        (rank, query, key)
        for rank in range(layout.world_size)
        for query in layout.positions(rank).tolist()
        for key in range(case.workload.sequence)
        if sees(case.workload, query, key)
    )


@given(cases)
def test_ranks_start_with_the_queries_and_keys_of_their_shard_and_end_with_them(case: Case) -> None:
    schedule, tokens = case.schedule, tokens_of(case.schedule)
    layout = attention_layout(case.name, case.workload, schedule.world_size)
    assert (schedule.initial == schedule.final).all()
    for rank, row in enumerate(schedule.initial):
        blocks = np.flatnonzero(row).tolist()
        shard = layout.positions(rank).tolist()
        for kind in (False, True):
            held = [block for block in blocks if (block < task_of(schedule).first_query) == kind]
            assert [token for block in held for token in tokens[block]] == shard


@given(cases)
def test_a_block_weighs_what_its_positions_do(case: Case) -> None:
    schedule, layer = case.schedule, case.workload
    for block, (tokens, size_bytes) in enumerate(zip(tokens_of(schedule), schedule.block_bytes.tolist(), strict=True)):
        is_key = block < task_of(schedule).first_query
        assert size_bytes == len(tokens) * (layer.kv_bytes_per_position if is_key else layer.query_bytes_per_position)


@given(cases)
def test_transfers_run_where_the_topology_has_a_way(case: Case) -> None:
    for step in case.schedule.steps:
        for source, destination, _, _ in step.rows():
            assert TOPOLOGIES[case.topology].has_route(source, destination)


@given(cases)
def test_a_lane_is_one_block_wide_per_span(case: Case) -> None:
    """On its lane a rank hears one peer, and at each step one owner: at most two spans of one shard."""
    owner = task_of(case.schedule).owner
    for step in case.schedule.steps:
        heard: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for source, destination, lane, block in step.rows():
            heard[destination, lane].append((source, int(owner[block])))
        assert all(len(each) <= 2 and len(set(each)) == 1 for each in heard.values())


# Trimming and the bytes


@settings(max_examples=150)
@given(cases)
def test_trimmed_blocks_stop_at_the_last_rank_that_needs_them(case: Case) -> None:
    trimmed = build(case.name, case.topology, case.workload, True, case.buffers)
    tokens = tokens_of(trimmed)
    layout = attention_layout(case.name, case.workload, trimmed.world_size)
    shards = [layout.positions(rank).tolist() for rank in range(trimmed.world_size)]
    for block, dataflow in dataflows(trimmed).items():
        needing = {
            rank
            for rank, shard in enumerate(shards)
            if any(sees(case.workload, query, key) for query in shard for key in tokens[block])
        }
        assert needing <= {int(task_of(trimmed).owner[block]), *dataflow}
        assert not dataflow or dataflow[-1] in needing


@given(cases)
def test_untrimmed_every_rank_receives_all_that_is_not_its_own(case: Case) -> None:
    schedule = build(case.name, case.topology, case.workload, False, case.buffers)
    layout, n = task_of(schedule).layout, schedule.world_size
    received = np.zeros(n, dtype=np.int64)
    for step in schedule.steps:
        np.add.at(received, step.destination, schedule.block_bytes[step.block])
    others = [case.workload.sequence - layout.length(rank) for rank in range(n)]
    assert received.tolist() == [length * case.workload.kv_bytes_per_position for length in others]
    assert all(len(dataflow) == n - 1 for dataflow in dataflows(schedule).values())


@few
@given(names, st.sampled_from(sorted(TOPOLOGIES)), st.integers(1, 3), st.sampled_from(["full", "causal"]))
def test_untrimmed_every_rank_sends_its_shard_once_per_other_rank(
    name: str, topology: str, half: int, mask: str
) -> None:
    n = TOPOLOGIES[topology].world_size
    layer = divisible(n, half, mask)
    sent = build(name, topology, layer, False).bytes_sent().sum(axis=(0, 2))
    assert sent.tolist() == [(n - 1) * 2 * half * layer.kv_bytes_per_position] * n


def divisible(world_size: int, half: int, mask: str) -> Workload:
    """A layer whose shards have 2 x `half` positions, `half` in each stretch of zigzag."""
    return Workload(2 * half * world_size, head_dim=2, mask="causal" if mask == "causal" else "full", heads=1)


def sent_share(name: str, topology: Topology, layer: Workload) -> Fraction:
    """The bytes that are sent, in shards: n(n - 1) without trimming."""
    shard = Fraction(layer.sequence, topology.world_size) * layer.kv_bytes_per_position
    return int(attention(name, topology, layer).bytes_sent().sum()) / shard


@pytest.mark.parametrize("n", range(1, 13))
def test_trimming_halves_contiguous_shards(n: int) -> None:
    """Rank r's shard goes up to rank n - 1: n - 1 - r hops, n(n - 1) / 2 in all."""
    for topology in (full_mesh(n), switch(n), ring(n)):
        assert sent_share("ring-attention", topology, divisible(n, 2, "causal")) == Fraction(n * (n - 1), 2)


@pytest.mark.parametrize("n", range(1, 13))
def test_trimming_leaves_three_quarters_of_zigzag_shards(n: int) -> None:
    """Down the ranks the front half of a shard makes n - 1 hops, the back half r, to rank 0: 3/4 of n(n - 1)."""
    for topology in (full_mesh(n), switch(n)):
        expected = Fraction(n * (n - 1), 2) + Fraction(n * (n - 1), 4)
        assert sent_share("zigzag-ring-attention", topology, divisible(n, 2, "causal")) == expected


@pytest.mark.parametrize("n", range(1, 13))
def test_up_the_ranks_trimming_saves_zigzag_one_half_shard_per_hop(n: int) -> None:
    """There rank r - 1 is the last but needs the back half, unless r = 0: it alone stays, (n - 1) / 2 shards saved."""
    expected = n * (n - 1) - Fraction(n - 1, 2)
    assert sent_share("zigzag-ring-attention", ring(n), divisible(n, 2, "causal")) == expected


@few
@given(names, st.integers(1, 9), st.integers(1, 3))
def test_trimming_saves_nothing_where_everybody_sees_everything(name: str, n: int, half: int) -> None:
    assert sent_share(name, full_mesh(n), divisible(n, half, "full")) == n * (n - 1)
    assert sent_share("striped-ring-attention", full_mesh(n), divisible(n, half, "causal")) == n * (n - 1)


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 60))
def test_a_window_sends_contiguous_shards_as_far_as_it_reaches(n: int, length: int, window: int) -> None:
    """The last key of a shard is seen window - 1 positions further on: ceil((window - 1) / length) hops."""
    layer = Workload(n * length, mask="causal", window=window, heads=1)
    hops = [min(n - 1 - rank, -(-(window - 1) // length)) for rank in range(n)]
    assert sent_share("ring-attention", ring(n), layer) == sum(hops)


@few
@given(names, st.sampled_from(sorted(TOPOLOGIES)), st.integers(1, 40), st.data())
def test_a_wider_window_never_sends_less(name: str, topology: str, sequence: int, data: st.DataObject) -> None:
    narrow, wide = sorted(data.draw(st.tuples(*[st.integers(1, sequence)] * 2)))
    windows: list[int | None] = [narrow, wide, None]
    layers = [Workload(sequence, mask="causal", window=window, heads=1) for window in windows]
    sent = [int(build(name, topology, layer).bytes_sent().sum()) for layer in layers]
    assert sent == sorted(sent)


# FLOPs and their balance


@given(cases)
def test_every_rank_computes_the_pairs_of_its_queries(case: Case) -> None:
    """And all together S^2 pairs, S(S + 1) / 2 of them under a causal mask."""
    layer, schedule = case.workload, case.schedule
    limit = layer.window or layer.sequence
    expected = [
        sum(layer.sequence if layer.mask == "full" else min(query + 1, limit) for query in shard.tolist())
        for shard in map(task_of(schedule).layout.positions, range(schedule.world_size))
    ]
    assert schedule.flops().sum(axis=0).tolist() == [pairs * layer.flops_per_pair for pairs in expected]
    if layer.window is None:
        square = layer.sequence**2 if layer.mask == "full" else layer.sequence * (layer.sequence + 1) // 2
        assert sum(expected) == square


def pairs_per_step(name: str, topology: str, layer: Workload) -> list[list[Fraction]]:
    flops = build(name, topology, layer).flops()
    return [[Fraction(value, layer.flops_per_pair) for value in row] for row in flops.tolist()]


topologies = st.sampled_from(sorted(TOPOLOGIES))
in_order = st.sampled_from(
    [name for name, topology in TOPOLOGIES.items() if name.startswith(("full", "switch", "ring:"))]
)
halves = st.integers(1, 4)


@few
@given(names, topologies, halves)
def test_the_full_mask_is_balanced_at_every_step(name: str, topology: str, half: int) -> None:
    n, length = TOPOLOGIES[topology].world_size, 2 * half
    assert pairs_per_step(name, topology, divisible(n, half, "full")) == [[length**2] * n] * n


@few
@given(st.sampled_from(["zigzag-ring-attention", "tasp"]), topologies, halves)
def test_zigzag_shards_are_balanced_at_every_step(name: str, topology: str, half: int) -> None:
    """First L(L + 1) / 2 pairs each; then half of L^2: the queries see half of the keys, or half of them all keys."""
    n, length = TOPOLOGIES[topology].world_size, 2 * half
    first, later = Fraction(length * (length + 1), 2), Fraction(length**2, 2)
    found = pairs_per_step(name, topology, divisible(n, half, "causal"))
    assert found == [[first] * n, *[[later] * n] * (n - 1)]


@few
@given(in_order, halves)
def test_striped_shards_are_balanced_within_a_row(topology: str, half: int) -> None:
    """With keys from a lower rank a query sees its own row, with those from a higher one it does not."""
    n, length = TOPOLOGIES[topology].world_size, 2 * half
    with_row, without = Fraction(length * (length + 1), 2), Fraction(length * (length - 1), 2)
    found = pairs_per_step("striped-ring-attention", topology, divisible(n, half, "causal"))
    assert found == [[with_row if rank >= step else without for rank in range(n)] for step in range(n)]


@few
@given(in_order, halves)
def test_contiguous_shards_are_as_unbalanced_as_can_be(topology: str, half: int) -> None:
    """Rank r sees the shards of lower ranks and half of its own: at every step the last rank does as much as any."""
    n, length = TOPOLOGIES[topology].world_size, 2 * half
    found = pairs_per_step("ring-attention", topology, divisible(n, half, "causal"))
    own = [Fraction(length * (length + 1), 2)] * n
    assert found == [own, *([length**2 if rank >= step else 0 for rank in range(n)] for step in range(1, n))]


# Kernel calls


def calls_per_step(schedule: Schedule) -> list[list[int]]:
    counts = [Counter(call.rank for call in step.calls) for step in schedule.steps]
    return [[count[rank] for rank in range(schedule.world_size)] for count in counts]


@few
@given(names, topologies, halves)
def test_the_full_mask_takes_one_call_per_step(name: str, topology: str, half: int) -> None:
    n = TOPOLOGIES[topology].world_size
    assert calls_per_step(build(name, topology, divisible(n, half, "full"))) == [[1] * n] * n


@few
@given(st.sampled_from(["zigzag-ring-attention", "striped-ring-attention"]), topologies, halves)
def test_balanced_rings_take_one_call_per_step(name: str, topology: str, half: int) -> None:
    n = TOPOLOGIES[topology].world_size
    assert calls_per_step(build(name, topology, divisible(n, half, "causal"))) == [[1] * n] * n


@few
@given(topologies, st.integers(1, 12), st.booleans())
def test_tasp_takes_two_calls_per_step(topology: str, half: int, trim: bool) -> None:
    """One to what both halves of a shard see, and one to what only the back half sees, from however many owners."""
    layer = divisible(TOPOLOGIES[topology].world_size, half, "causal")
    assert max(max(step) for step in calls_per_step(build("tasp", topology, layer, trim))) <= 2


@given(cases)
def test_uneven_shards_take_no_more_calls(case: Case) -> None:
    assume(case.workload.window is None)
    most = 2 if case.name == "tasp" and case.workload.mask == "causal" else 1
    assert max(max(step) for step in calls_per_step(case.schedule)) <= most


# What the user can get wrong


def test_an_unknown_name_lists_the_known() -> None:
    told = (
        "unknown schedule 'ring', expected one of ring-attention, zigzag-ring-attention, striped-ring-attention, tasp"
    )
    with pytest.raises(ScheduleError, match=told):
        attention("ring", full_mesh(4), Workload(8, heads=1))


@pytest.mark.parametrize("buffers", [-1, 0, 1])
def test_double_buffering_is_the_least(buffers: int) -> None:
    with pytest.raises(ScheduleError, match=f"{buffers} buffers, expected 2 or more"):
        attention("tasp", full_mesh(3), Workload(8, heads=1), buffers=buffers)


def test_too_many_blocks_to_prove_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks, two stretches per shard, a block per stretch and ring, and as many of queries: 8 x 16 x 8."""
    layer, needed = Workload(2 * 8 * 7, mask="causal", heads=1), 8 * 16 * 8
    monkeypatch.setattr("tasp_lab.attention.forward.MAX_HOLDINGS", needed)
    attention("tasp", full_mesh(8), layer)
    monkeypatch.setattr("tasp_lab.attention.forward.MAX_HOLDINGS", needed - 1)
    with pytest.raises(ScheduleError, match="8 ranks and 128 blocks are too many to prove, expected at most 1023"):
        attention("tasp", full_mesh(8), layer)


@pytest.mark.parametrize(
    "ranks",
    [
        3,
        5,
    ],
)
def test_rings_of_other_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(ScheduleError):
        attention("tasp", full_mesh(4), Workload(64, heads=1), decompose(full_mesh(ranks)))


def test_rings_over_links_that_are_not_there_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"step 0: rank . sends to rank ., but ring:4 has no such link"):
        attention("tasp", ring(4), Workload(64, heads=1), decompose(full_mesh(4)))


# The proof cannot be fooled

BASES = [
    ("tasp", "full-mesh:5", Workload(40, mask="causal", heads=1), 2),
    ("tasp", "rings of unequal shares", Workload(70, mask="causal", heads=1), 3),
    ("tasp", "torus:3x3", Workload(77, heads=1), 2),
    ("tasp", "nodes:2x2", Workload(16, mask="causal", window=5, heads=1), 3),
    ("zigzag-ring-attention", "switch:4", Workload(37, mask="causal", window=9, heads=1), 2),
    ("ring-attention", "ring:5", Workload(23, mask="causal", heads=1), 2),
    ("striped-ring-attention", "full-mesh:4", Workload(22, mask="causal", heads=1), 3),
]

Item = TypeVar("Item")


class Draft:
    """The steps of a proven schedule, open to change. Every draw is of what is there."""

    def __init__(self, data: st.DataObject) -> None:
        name, topology, layer, buffers = data.draw(st.sampled_from(BASES))
        self._data = data
        self.schedule = build(name, topology, layer, True, buffers)
        self.rows = [step.rows() for step in self.schedule.steps]
        self.calls = [list(step.calls) for step in self.schedule.steps]

    def integer(self, least: int, most: int) -> int:
        assume(least <= most)
        return self._data.draw(st.integers(least, most))

    def one_call(self, wanted: Callable[[Call], bool] = lambda _: True, first_step: int = 0) -> tuple[int, int]:
        """The step and the place of a call."""
        return self._one([[wanted(call) for call in step] for step in self.calls], first_step)

    def one_row(self, first_step: int = 0) -> tuple[int, int]:
        """The step and the place of a transfer."""
        return self._one([[True] * len(step) for step in self.rows], first_step)

    def _one(self, wanted: list[list[bool]], first_step: int) -> tuple[int, int]:
        found = [(s, at) for s, step in enumerate(wanted) if s >= first_step for at, fits in enumerate(step) if fits]
        assume(found)
        return self._data.draw(st.sampled_from(found))

    def shuffled(self, values: list[Item]) -> list[Item]:
        return self._data.draw(st.permutations(values))

    def add_steps(self, count: int) -> None:
        self.rows += [[] for _ in range(count)]
        self.calls += [[] for _ in range(count)]

    def built(self) -> Schedule:
        """Proves the steps as they are now."""
        steps = [replace(Step.of(rows), calls=tuple(calls)) for rows, calls in zip(self.rows, self.calls, strict=True)]
        return replace(self.schedule, steps=steps)

    def count(self, blocks: list[int]) -> int:
        """The positions of blocks."""
        return int(task_of(self.schedule).count[blocks].sum())


def changed(call: Call, **values: Any) -> Call:
    fields = {name: getattr(call, name) for name in ("rank", "queries", "keys", "low", "high")}
    return Call(**fields | {k: np.array(v, dtype=np.int64) if isinstance(v, list) else v for k, v in values.items()})


def call_dropped(draft: Draft) -> None:
    step, at = draft.one_call()
    del draft.calls[step][at]


def call_repeated(draft: Draft) -> None:
    step, at = draft.one_call()
    other = draft.integer(0, len(draft.calls) - 1)
    draft.calls[other].append(draft.calls[step][at])


def band_shifted(draft: Draft) -> None:
    step, at = draft.one_call()
    call, by = draft.calls[step][at], draft.integer(0, 1) * 2 - 1
    draft.calls[step][at] = changed(call, low=call.low + by, high=call.high + by)


def band_narrowed(draft: Draft) -> None:
    step, at = draft.one_call()
    call, which = draft.calls[step][at], draft.integer(0, 1)
    draft.calls[step][at] = changed(call, low=call.low + which, high=call.high - 1 + which)


def band_widened(draft: Draft) -> None:
    """Below or above, where there are pairs that it leaves out."""
    step, at = draft.one_call(lambda call: call.low > 1 - draft.count(call.keys.tolist()))
    call = draft.calls[step][at]
    draft.calls[step][at] = changed(call, low=call.low - 1)


def call_before_its_keys(draft: Draft) -> None:
    step, at = draft.one_call(first_step=1)
    draft.calls[draft.integer(0, step - 1)].append(draft.calls[step].pop(at))


def call_after_its_keys(draft: Draft) -> None:
    """What came at step s - 1 is overwritten from step s - 1 + buffers on."""
    assert draft.schedule.buffers is not None
    draft.add_steps(draft.schedule.buffers)
    step, at = draft.one_call(first_step=1)
    later = draft.integer(step - 1 + draft.schedule.buffers, len(draft.calls) - 1)
    draft.calls[later].append(draft.calls[step].pop(at))


def transfer_dropped(draft: Draft) -> None:
    step, at = draft.one_row()
    del draft.rows[step][at]


def transfer_repeated(draft: Draft) -> None:
    """In the step, or in a later one while the block still is where it came to."""
    assert draft.schedule.buffers is not None
    step, at = draft.one_row()
    last = min(step + draft.schedule.buffers, len(draft.rows)) - 1
    draft.rows[draft.integer(step, last)].append(draft.rows[step][at])


def transfer_before_its_block(draft: Draft) -> None:
    step, at = draft.one_row(first_step=1)
    draft.rows[draft.integer(0, step - 1)].append(draft.rows[step].pop(at))


def transfer_after_its_block(draft: Draft) -> None:
    assert draft.schedule.buffers is not None
    draft.add_steps(draft.schedule.buffers)
    step, at = draft.one_row(first_step=1)
    later = draft.integer(step - 1 + draft.schedule.buffers, len(draft.rows) - 1)
    draft.rows[later].append(draft.rows[step].pop(at))


def transfer_to_another(draft: Draft) -> None:
    step, at = draft.one_row()
    source, destination, lane, block = draft.rows[step][at]
    other = draft.integer(0, draft.schedule.world_size - 1)
    assume(other != destination)
    draft.rows[step][at] = (source, other, lane, block)


def key_named_twice(draft: Draft) -> None:
    """With a band that shows all of it both times, where one did before."""
    step, at = draft.one_call()
    call = draft.calls[step][at]
    key = int(call.keys[draft.integer(0, len(call.keys) - 1)])
    low = call.low - draft.count([key]) if call.low < 0 else call.low
    draft.calls[step][at] = changed(call, keys=[*call.keys, key], low=low)


def query_named_twice(draft: Draft) -> None:
    step, at = draft.one_call()
    call = draft.calls[step][at]
    query = int(call.queries[draft.integer(0, len(call.queries) - 1)])
    draft.calls[step][at] = changed(call, queries=[*call.queries, query], high=call.high + draft.count([query]))


def key_left_out(draft: Draft) -> None:
    step, at = draft.one_call(lambda call: len(call.keys) > 1)
    call, gone = draft.calls[step][at], draft.integer(0, len(draft.calls[step][at].keys) - 1)
    draft.calls[step][at] = changed(call, keys=[key for place, key in enumerate(call.keys) if place != gone])


def queries_of_another(draft: Draft) -> None:
    step, at = draft.one_call()
    call, task = draft.calls[step][at], task_of(draft.schedule)
    query = draft.integer(task.first_query, len(task.owner) - 1)
    assume(task.owner[query] != call.rank)
    draft.calls[step][at] = changed(call, queries=[query])


def rank_of_another(draft: Draft) -> None:
    step, at = draft.one_call()
    call, rank = draft.calls[step][at], draft.integer(-1, draft.schedule.world_size)
    assume(call.rank != rank)
    draft.calls[step][at] = changed(call, rank=rank)


def own_keys_swapped(draft: Draft) -> None:
    """Under a causal mask each block of the own shard stands at its own place of the diagonal."""
    assume(task_of(draft.schedule).workload.mask == "causal")
    step, at = draft.one_call(lambda call: call.low == 0 and len(call.keys) > 1)
    keys = draft.calls[step][at].keys.tolist()
    first = draft.integer(0, len(keys) - 2)
    keys[first], keys[first + 1] = keys[first + 1], keys[first]
    draft.calls[step][at] = changed(draft.calls[step][at], keys=keys)


def no_keys(draft: Draft) -> None:
    step, at = draft.one_call()
    draft.calls[step][at] = changed(draft.calls[step][at], keys=[])


def no_queries(draft: Draft) -> None:
    step, at = draft.one_call()
    draft.calls[step][at] = changed(draft.calls[step][at], queries=[])


def queries_as_keys(draft: Draft) -> None:
    step, at = draft.one_call()
    draft.calls[step][at] = changed(draft.calls[step][at], keys=draft.calls[step][at].queries.tolist())


def block_that_is_none(draft: Draft) -> None:
    step, at = draft.one_call()
    blocks = len(draft.schedule.block_bytes)
    wrong = draft.integer(0, 3)
    kind, number = ("keys", "queries")[wrong % 2], (-1, blocks)[wrong // 2]
    draft.calls[step][at] = changed(draft.calls[step][at], **{kind: [number]})


CORRUPTIONS = [
    call_dropped,
    call_repeated,
    band_shifted,
    band_narrowed,
    band_widened,
    call_before_its_keys,
    call_after_its_keys,
    transfer_dropped,
    transfer_repeated,
    transfer_before_its_block,
    transfer_after_its_block,
    transfer_to_another,
    key_named_twice,
    query_named_twice,
    key_left_out,
    queries_of_another,
    rank_of_another,
    own_keys_swapped,
    no_keys,
    no_queries,
    queries_as_keys,
    block_that_is_none,
]

NAMED = r"^(step \d+: .*rank -?\d+ |after step \d+: rank \d+ |after the last step: rank \d+ )"
"""Step and rank are named; what is missing is missing after the last step."""


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
@settings(max_examples=25)
@given(st.data())
def test_no_corruption_passes(corrupt: Callable[[Draft], None], data: st.DataObject) -> None:
    draft = Draft(data)
    corrupt(draft)
    with pytest.raises(ScheduleError, match=NAMED) as refused:
        draft.built()
    assert len(str(refused.value).splitlines()) == 1


@few
@given(st.data())
def test_queries_that_came_from_another_rank_are_not_attended_for(data: st.DataObject) -> None:
    """Even where they are held: results do not travel."""
    draft = Draft(data)
    task = task_of(draft.schedule)
    query = draft.integer(task.first_query, len(task.owner) - 1)
    owner = int(task.owner[query])
    thief = draft.integer(0, draft.schedule.world_size - 1)
    keys = np.flatnonzero(task.owner[: task.first_query] == thief)
    assume(thief != owner and len(keys) > 0)
    draft.add_steps(2)
    draft.rows[-2].append((owner, thief, 0, query))
    draft.calls[-1].append(Call(thief, np.array([query]), keys[:1].copy(), 0, 0))
    with pytest.raises(
        ScheduleError, match=rf"step \d+: rank {thief} attends for queries {query}, which it does not own"
    ):
        draft.built()


@few
@given(st.data())
def test_a_task_without_calls_is_not_done(data: st.DataObject) -> None:
    draft = Draft(data)
    draft.calls = [[] for _ in draft.calls]
    with pytest.raises(ScheduleError, match=r"after the last step: rank 0 .* never"):
        draft.built()


def test_calls_need_a_task() -> None:
    with pytest.raises(ScheduleError, match="step 0: rank 0 computes, but there is no task"):
        replace(build("tasp", "full-mesh:5", Workload(40, heads=1)), task=None)


@few
@given(st.sampled_from(BASES), st.integers(-1, 1))
def test_fewer_buffers_than_two_are_refused(base: tuple[str, str, Workload, int], buffers: int) -> None:
    with pytest.raises(ScheduleError, match=f"{buffers} buffers, expected 2 or more"):
        replace(build(*base[:3]), buffers=buffers)


@few
@given(st.data())
def test_keys_that_do_not_lie_in_the_order_of_a_call_are_found_in_memory(data: st.DataObject) -> None:
    """Where all keys are seen the mask cannot tell their order, but the rank's memory can."""
    draft = Draft(data)
    step, at = draft.one_call(lambda call: call.low < 0 and len(call.keys) > 1)
    call = draft.calls[step][at]
    draft.calls[step][at] = changed(call, keys=call.keys.tolist()[::-1])
    with pytest.raises(ScheduleError, match=rf"step {step}: rank {call.rank} .* is not contiguous with"):
        rank_part(draft.built(), call.rank)


def test_queries_that_do_not_lie_in_the_order_of_a_call_are_refused() -> None:
    """They lie in a rank's memory in the order of its shard, and a call takes them from its first one on."""
    schedule = build("zigzag-ring-attention", "full-mesh:2", Workload(16, heads=1))
    first, (last, *others) = schedule.steps[0], schedule.steps[1].calls
    swapped = changed(last, queries=last.queries.tolist()[::-1])
    with pytest.raises(ScheduleError, match=f"step 1: rank {last.rank} "):
        replace(schedule, steps=[first, replace(schedule.steps[1], calls=(swapped, *others))])


@pytest.mark.parametrize("lost", ["a query", "a key", "a position"])
def test_a_task_that_leaves_out_a_position_is_refused(lost: str) -> None:
    """Otherwise calls could compute less than the mask."""
    task = task_of(build("ring-attention", "full-mesh:2", Workload(16, heads=1)))
    blocks = {name: getattr(task, name) for name in ("owner", "start", "count")}
    changes: dict[str, Any] = {
        "a query": {name: values[:-1] for name, values in blocks.items()},
        "a key": {name: values[1:] for name, values in blocks.items()} | {"first_query": task.first_query - 1},
        "a position": {"count": task.count - 1},
    }[lost]
    with pytest.raises(ScheduleError):
        replace(task, **changes)


@pytest.mark.parametrize("wrong", ["block_bytes", "initial"])
def test_a_schedule_that_contradicts_its_task_is_refused(wrong: str) -> None:
    """Blocks that weigh less than their positions would make the ledger lie, keys held from the start save sending."""
    schedule = build("ring-attention", "full-mesh:2", Workload(16, heads=1))
    changes: dict[str, Any] = {"block_bytes": schedule.block_bytes // 2}
    if wrong == "initial":
        everything, nothing = np.ones_like(schedule.initial), np.zeros(0, dtype=np.int64)
        steps = [Step(nothing, nothing, nothing, nothing, step.calls) for step in schedule.steps]
        changes = {"initial": everything, "final": everything.copy(), "steps": steps}
    with pytest.raises(ScheduleError):
        replace(schedule, **changes)


def test_what_was_proven_cannot_be_changed() -> None:
    schedule = build("tasp", "full-mesh:5", Workload(40, heads=1))
    call = schedule.steps[1].calls[0]
    for values in (schedule.block_bytes, schedule.initial, schedule.steps[1].block, call.queries, call.keys):
        with pytest.raises(ValueError, match="read-only"):
            values[:] = 0


@pytest.mark.parametrize("name", ["owner", "start", "count"])
def test_what_was_to_be_proven_cannot_be_changed_either(name: str) -> None:
    layer = Workload(10, heads=1)  # of its own: this one may break
    values = getattr(task_of(attention("ring-attention", full_mesh(2), layer)), name)
    with pytest.raises(ValueError, match="read-only"):
        values[:] = 0


def test_a_schedule_with_one_more_step_has_another_digest() -> None:
    schedule = build("tasp", "full-mesh:5", Workload(40, heads=1))
    assert replace(schedule, steps=[*schedule.steps]).digest == schedule.digest
    assert replace(schedule, steps=[*schedule.steps, Step.of([])]).digest != schedule.digest


# What means the same is accepted


def call_split(draft: Draft) -> None:
    """In two, by its keys or by its queries; the band of the later part is counted from its own first pair."""
    step, at = draft.one_call(lambda call: len(call.keys) > 1 or len(call.queries) > 1)
    call = draft.calls[step][at]
    queries, keys = call.queries.tolist(), call.keys.tolist()
    if len(keys) > 1:
        cut = draft.integer(1, len(keys) - 1)
        ahead = draft.count(keys[:cut])
        parts = [changed(call, keys=keys[:cut]),
                 changed(call, keys=keys[cut:], low=call.low + ahead, high=call.high + ahead)]  # fmt: skip
    else:
        cut = draft.integer(1, len(queries) - 1)
        behind = draft.count(queries[:cut])
        parts = [changed(call, queries=queries[:cut]),
                 changed(call, queries=queries[cut:], low=call.low - behind, high=call.high - behind)]  # fmt: skip
    draft.calls[step][at : at + 1] = parts


def calls_reordered(draft: Draft) -> None:
    draft.calls = [draft.shuffled(step) for step in draft.calls]


def transfers_reordered(draft: Draft) -> None:
    draft.rows = [draft.shuffled(step) for step in draft.rows]


def limit_loosened(draft: Draft) -> None:
    """Beyond the last pair a limit means nothing."""
    step, at = draft.one_call()
    call, by = draft.calls[step][at], draft.integer(1, 9)
    low = call.low - by if call.low == 1 - draft.count(call.keys.tolist()) else call.low
    high = call.high + by if call.high == draft.count(call.queries.tolist()) - 1 else call.high
    draft.calls[step][at] = changed(call, low=low, high=high)


def call_delayed(draft: Draft) -> None:
    """While the buffer lasts; what a rank starts with stays."""
    assert draft.schedule.buffers is not None
    draft.add_steps(draft.schedule.buffers)
    step, at = draft.one_call()
    last = len(draft.calls) - 1 if step == 0 else step + draft.schedule.buffers - 2
    draft.calls[draft.integer(step, last)].append(draft.calls[step].pop(at))


def steps_added(draft: Draft) -> None:
    draft.add_steps(draft.integer(1, 4))


SAME = [call_split, calls_reordered, transfers_reordered, limit_loosened, call_delayed, steps_added]


@pytest.mark.parametrize("change", SAME, ids=lambda change: change.__name__)
@settings(max_examples=25)
@given(st.data())
def test_what_means_the_same_is_accepted(change: Callable[[Draft], None], data: st.DataObject) -> None:
    draft = Draft(data)
    change(draft)
    built = draft.built()
    assert built.flops().sum(axis=0).tolist() == draft.schedule.flops().sum(axis=0).tolist()
    assert meetings(built) == meetings(draft.schedule)


# Large worlds


def test_sixty_four_ranks_attend_to_a_million_positions() -> None:
    """A million tiles are proved, in seconds; the closed forms hold there as well."""
    layer = divisible(64, 2**13, "causal")
    schedule = attention("tasp", full_mesh(64), layer)
    assert layer.sequence == 2**20
    length, n = 2**14, schedule.world_size
    pairs = schedule.flops() // layer.flops_per_pair
    assert pairs.tolist() == [[length * (length + 1) // 2] * n, *[[length**2 // 2] * n] * (n - 1)]
