"""Forward passes of attention: what is trimmed and sent, computed at each step, and refused.

That each pair meets once is checked by the replay of both passes in `tests.schedules.attention.test_backward`, that
wrong changes are refused by the campaign (`tests.schedule.test_mutations`) and by `tests.schedules.test_laws`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.bounds.layers import attention_bound_s
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import Machine
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.rank_part import SCATTERED, rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.attention.task import KEYS, QUERIES, RESULTS
from tasp_lab.schedules.build import attention_layout
from tasp_lab.topology.builders import bidirectional_ring, full_mesh, nodes, ring, switch, torus
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.kernel_calls import Call, as_arrays, calls_of, with_buffers
from tests.support.links import with_links
from tests.support.routes import direct
from tests.support.schedules import task_of

names = st.sampled_from(sorted({*CIRCULATIONS} - {"half-each-way"}))  # which one-way rings have no links for

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
        return Workload(sequence, heads=1, mask="full")
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


def dataflows(schedule: Schedule) -> dict[int, list[int]]:
    """The ranks at which each key block arrives, in the order of steps."""
    found: dict[int, list[int]] = {block: [] for block in task_of(schedule).blocks_of(KEYS).tolist()}
    for step in schedule.steps:
        for _, destination, _, block in step.rows():
            found[block].append(destination)
    return found


# What every schedule does


@given(cases)
def test_a_block_weighs_what_its_positions_do(case: Case) -> None:
    """Results, which do not travel here, are in float32, each with its log-sum-exp."""
    schedule, layer = case.schedule, case.workload
    results_bytes = 4 * layer.batch * layer.heads * (layer.head_dim + 1)
    weights = {KEYS: layer.kv_bytes_per_position, QUERIES: layer.query_bytes_per_position, RESULTS: results_bytes}
    for block, (tokens, size_bytes) in enumerate(zip(tokens_of(schedule), schedule.block_bytes.tolist(), strict=True)):
        assert size_bytes == len(tokens) * weights[int(task_of(schedule).tensor[block])]


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


@settings(max_examples=80)
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
    counts = [Counter(call.rank for call in calls_of(step)) for step in schedule.steps]
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


@given(cases)
def test_in_a_window_two_spans_of_a_rank_make_one_call_however_many_rings_cut_them(case: Case) -> None:
    assume(case.workload.window is not None)
    spans = max(map(len, task_of(case.schedule).layout.spans))
    assert max(calls_per_step(case.schedule)[0]) <= spans * (spans + 1) // 2


# What the user can get wrong


def test_an_unknown_name_lists_the_known() -> None:
    told = (
        "unknown schedule 'king', expected one of ring-attention, zigzag-ring-attention, "
        "striped-ring-attention, half-each-way, tasp"
    )
    with pytest.raises(ScheduleError, match=told):
        attention("king", full_mesh(4), Workload(8, heads=1, mask="full"))


@pytest.mark.parametrize("buffers", [-1, 0, 1])
def test_double_buffering_is_the_least(buffers: int) -> None:
    with pytest.raises(ScheduleError, match=f"{buffers} buffers, expected 2 or more"):
        attention("tasp", full_mesh(3), Workload(8, heads=1, mask="full"), buffers=buffers)


def test_too_many_blocks_to_prove_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks, two stretches per shard, a block per stretch and ring, and as many of queries: 8 x 16 x 8."""
    layer, needed = Workload(2 * 8 * 7, mask="causal", heads=1), 8 * 16 * 8
    monkeypatch.setattr("tasp_lab.schedules.attention.forward.MAX_HOLDINGS", needed)
    attention("tasp", full_mesh(8), layer)
    monkeypatch.setattr("tasp_lab.schedules.attention.forward.MAX_HOLDINGS", needed - 1)
    with pytest.raises(ScheduleError, match="8 ranks and 128 blocks are too many to prove, expected at most 1023"):
        attention("tasp", full_mesh(8), layer)


def test_rings_over_links_that_are_not_there_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"step 0: rank . sends to rank ., but ring:4 has no such link"):
        attention("tasp", direct(ring(4)), Workload(64, heads=1, mask="full"), decompose(full_mesh(4)))


# The proof cannot be fooled

BASES = [
    ("tasp", "full-mesh:5", Workload(40, mask="causal", heads=1), 2),
    ("tasp", "rings of unequal shares", Workload(70, mask="causal", heads=1), 3),
    ("tasp", "torus:3x3", Workload(77, heads=1, mask="full"), 2),
    ("tasp", "nodes:2x2", Workload(16, mask="causal", window=5, heads=1), 3),
    ("zigzag-ring-attention", "switch:4", Workload(37, mask="causal", window=9, heads=1), 2),
    ("ring-attention", "ring:5", Workload(23, mask="causal", heads=1), 2),
    ("striped-ring-attention", "full-mesh:4", Workload(22, mask="causal", heads=1), 3),
]
bases = st.sampled_from(BASES).map(lambda base: build(*base[:3], True, base[3]))


def changed(schedule: Schedule, calls: dict[int, list[Call]]) -> Schedule:
    """The schedule, proved again, with other calls at some steps."""
    steps = [
        replace(step, calls=as_arrays(task_of(schedule), calls[index])) if index in calls else step
        for index, step in enumerate(schedule.steps)
    ]
    return replace(schedule, steps=steps)


@few
@given(bases, st.data())
def test_a_result_that_is_left_where_its_queries_came_to_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    """Queries may be attended to elsewhere, but what that yields is part of a sum at their owner."""
    task = task_of(schedule)
    query, key = (data.draw(st.sampled_from(task.blocks_of(each).tolist())) for each in (QUERIES, KEYS))
    owner, thief = int(task.owner[query]), int(task.owner[key])
    low, high = (int(limit) for limit in task.tile_bands(np.array(query), np.array(key)))
    assume(thief != owner and low <= high)
    again = [
        Step.of([(owner, thief, 0, query)]),
        Step.of([], as_arrays(task, [Call(thief, [query], [key], low, high)])),
    ]
    kept = schedule.initial | (np.arange(len(schedule.blocks)) == query)
    result = task.output_of[query]
    told = rf"after the last step: rank {thief} has 1 of the \d+ parts of block {result} \(results\), expected none"
    if task.existing_parts(task.output_of[[query]]).sum() > 1:
        with pytest.raises(ScheduleError, match=told):
            replace(schedule, steps=[*schedule.steps, *again], kept=kept)
    home = Step.of([(thief, owner, 0, int(result))])
    with pytest.raises(ScheduleError, match=rf"rank {owner} already has part \d+ of it"):
        replace(schedule, steps=[*schedule.steps, *again, home], kept=kept)


@pytest.mark.parametrize("home", [True, False])
def test_queries_may_be_attended_to_elsewhere_if_results_come_home(home: bool) -> None:
    """Rank 0's queries meet rank 1's keys at rank 1, not the other way round."""
    schedule = build("ring-attention", "full-mesh:2", Workload(16, heads=1, mask="full"))
    task = task_of(schedule)
    query, result = (int(task.blocks_of(each)[task.owner[task.blocks_of(each)] == 0][0]) for each in (QUERIES, RESULTS))
    key = int(task.blocks_of(KEYS)[task.owner[task.blocks_of(KEYS)] == 1][0])
    first, second = ([each for each in step.rows() if each[3] != key] for step in schedule.steps)
    calls = [calls_of(step) for step in schedule.steps]
    calls[1] = [call for call in calls[1] if call.rank != 0]
    calls[1].append(Call(1, [query], [key], -7, 7))
    steps = [Step.of([*first, (0, 1, 0, query)], as_arrays(task, calls[0])), Step.of(second, as_arrays(task, calls[1]))]
    steps += [Step.of([(1, 0, 0, result, True)])] * home
    kept = schedule.initial | (np.arange(len(schedule.blocks)) == query)
    if home:
        assert replace(schedule, steps=steps, kept=kept).flops().sum() == schedule.flops().sum()
        return
    with pytest.raises(ScheduleError, match=rf"after the last step: rank 0 has 1 of the 2 parts of block {result}"):
        replace(schedule, steps=steps, kept=kept)


@few
@given(bases)
def test_a_task_without_calls_is_not_done(schedule: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"after the last step: rank 0 has 0 of the \d+ parts of block"):
        changed(schedule, {index: [] for index in range(len(schedule.steps))})


def test_calls_need_a_task() -> None:
    with pytest.raises(ScheduleError, match="step 0: rank 0 computes, but there is no task"):
        replace(build("tasp", "full-mesh:5", Workload(40, heads=1, mask="full")), task=None)


@few
@given(bases, st.integers(-1, 1))
def test_fewer_buffers_than_two_are_refused(schedule: Schedule, buffers: int) -> None:
    with pytest.raises(ScheduleError, match=f"{buffers} buffers, expected 2 or more"):
        with_buffers(schedule, buffers)


@few
@given(bases, st.data())
def test_keys_that_do_not_lie_in_the_order_of_a_call_are_gathered(schedule: Schedule, data: st.DataObject) -> None:
    """Where all keys are seen the mask cannot tell their order, but the rank's memory can.

    A rank's own keys lie in the order of their first call, what comes in the order of its step.
    """
    calls = [calls_of(step) for step in schedule.steps]
    of_several = [(index, at) for index, step in enumerate(calls) if index
                  for at, call in enumerate(step) if call.low < 0 and len(call.keys) > 1]  # fmt: skip
    assume(of_several)
    index, at = data.draw(st.sampled_from(of_several))
    call = calls[index][at]
    calls[index][at] = call._replace(keys=call.keys[::-1])
    (row,) = (row for row in rank_part(changed(schedule, {index: calls[index]}), call.rank).calls
              if list(row.operands[1].blocks) == call.keys[::-1])  # fmt: skip
    assert row.operands[1].offset == SCATTERED


def test_queries_that_do_not_lie_in_the_order_of_a_call_are_gathered() -> None:
    """They are the caller's, in the order of its shard."""
    schedule = build("zigzag-ring-attention", "full-mesh:2", Workload(16, heads=1, mask="full"))
    task, (last, *others) = task_of(schedule), calls_of(schedule.steps[1])
    swapped = as_arrays(task, [last._replace(queries=last.queries[::-1]), *others])
    changed = replace(schedule, steps=[schedule.steps[0], replace(schedule.steps[1], calls=swapped)])
    row = rank_part(changed, last.rank).calls[-1]
    assert [piece.blocks for piece in row.operands[0].pieces] == [(block,) for block in last.queries[::-1]]


@pytest.mark.parametrize("lost", ["a query", "a key", "a result", "a position"])
def test_a_task_that_leaves_out_a_position_is_refused(lost: str) -> None:
    """Otherwise calls could compute less than the mask."""
    task = task_of(build("ring-attention", "full-mesh:2", Workload(16, heads=1, mask="full")))
    columns = ("tensor", "owner", "start", "count", "first_head", "heads")
    queries, results = task.blocks_of(QUERIES), task.blocks_of(RESULTS)
    gone = {"a query": [queries[-1], results[-1]], "a key": [0], "a result": [results[-1]], "a position": []}[lost]
    changes: dict[str, Any] = {name: np.delete(getattr(task, name), np.array(gone, dtype=np.int64)) for name in columns}
    if lost == "a position":
        changes["count"] = task.count - 1
    with pytest.raises(ScheduleError, match=r"the blocks of (keys|queries|results) are not "):
        replace(task, **changes)


def test_no_schedule_starts_with_keys_of_other_ranks() -> None:
    """With them nothing would have to be sent, and the bound would be 0."""
    schedule = build("ring-attention", "full-mesh:2", Workload(16, heads=1, mask="full"))
    task, held = task_of(schedule), schedule.initial | (task_of(schedule).tensor == KEYS)
    steps = [Step.of([], step.calls) for step in schedule.steps]
    with pytest.raises(ScheduleError, match="step 1: rank 0 "):
        replace(schedule, steps=steps)
    with pytest.raises(ScheduleError, match=r"rank 0 starts with block \d+ \(keys\), which only rank 1 has then"):
        replace(schedule, initial=held, steps=steps)
    pair = Machine(TOPOLOGIES["full-mesh:2"])
    assert attention_bound_s(pair, task, held) == 0
    assert attention_bound_s(pair, task, schedule.initial) > 0


def test_what_was_proven_cannot_be_changed() -> None:
    schedule = build("tasp", "full-mesh:5", Workload(40, heads=1, mask="full"))
    step, (calls,) = schedule.steps[1], schedule.steps[1].calls
    operands = [each.block for each in calls.operands]
    for values in (schedule.block_bytes, schedule.initial, step.block, step.gives, calls.rank, calls.params, *operands):
        with pytest.raises(ValueError, match="read-only"):
            values[:] = 0


@pytest.mark.parametrize("name", ["tensor", "owner", "start", "count", "first_head", "heads"])
def test_what_was_to_be_proven_cannot_be_changed_either(name: str) -> None:
    layer = Workload(10, heads=1, mask="full")  # of its own: this one may break
    values = getattr(task_of(attention("ring-attention", full_mesh(2), layer)), name)
    with pytest.raises(ValueError, match="read-only"):
        values[:] = 0


def test_a_schedule_with_one_more_step_has_another_digest() -> None:
    schedule = build("tasp", "full-mesh:5", Workload(40, heads=1, mask="full"))
    assert replace(schedule, steps=[*schedule.steps]).digest == schedule.digest
    assert replace(schedule, steps=[*schedule.steps, Step.of([])]).digest != schedule.digest


# Large worlds


def test_sixty_four_ranks_attend_to_a_million_positions() -> None:
    """A million tiles are proved, in seconds; the closed forms hold there as well."""
    layer = divisible(64, 2**13, "causal")
    schedule = attention("tasp", full_mesh(64), layer)
    assert layer.sequence == 2**20
    length, n = 2**14, schedule.world_size
    pairs = schedule.flops() // layer.flops_per_pair
    assert pairs.tolist() == [[length * (length + 1) // 2] * n, *[[length**2 // 2] * n] * (n - 1)]


@pytest.mark.parametrize(("column", "what"), [("bytes", "bytes"), ("parts", "parts")])
def test_blocks_that_contradict_the_task_are_refused(column: str, what: str) -> None:
    """Else the ledger would count other bytes than the layer has."""
    schedule = build("ring-attention", "full-mesh:2", Workload(16, heads=1, mask="full"))
    blocks = schedule.blocks
    columns = {"bytes": blocks.bytes.copy(), "parts": blocks.parts.copy()}
    columns[column][-1] += 1
    wrong = Blocks(blocks.kinds, blocks.kind, columns["bytes"], columns["parts"])
    expected = getattr(blocks, column)[-1]
    with pytest.raises(
        ScheduleError, match=f"schedule 'ring-attention': block 5 has {expected + 1} {what}, expected {expected} for"
    ):
        replace(schedule, blocks=wrong, steps=list(schedule.steps))


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("topology", [bidirectional_ring(5), full_mesh(4), nodes(2, 2)])
def test_half_each_way_is_tasp_around_a_ring_and_its_reverse(
    topology: Topology, mask: Literal["full", "causal"]
) -> None:
    layer, up = Workload(80, heads=2, mask=mask), list(range(topology.world_size))
    both_ways = Decomposition(topology, np.array([up, up[::-1]], dtype=np.int32), 1, "given")
    ours, theirs = attention("half-each-way", topology, layer), attention("tasp", topology, layer, both_ways)
    assert [step.rows() for step in ours.steps] == [step.rows() for step in theirs.steps]
    with pytest.raises(ScheduleError, match="'half-each-way': ring:4 has a ring in one direction only"):
        attention("half-each-way", direct(ring(4)), layer)
