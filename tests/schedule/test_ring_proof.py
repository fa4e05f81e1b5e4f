from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import NoDecompositionError, ScheduleError
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.problem import RingProblem
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.blocks import Blocks, Kind, Pool
from tasp_lab.schedule.model import ScheduleModel
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.theorems import all_blocks, own_blocks, rings_prove
from tasp_lab.schedules.collectives.all_gather import (
    RingSteps,
    direct_all_gather,
    multi_ring_all_gather,
    ring_all_gather,
)
from tasp_lab.schedules.collectives.ring_reductions import RingSumSteps
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch
from tests.support.routes import direct


@st.composite
def rings_and_chunks(draw: st.DrawFn) -> tuple[IntArray, int]:
    """Rings through up to five ranks, in any order and the same ones twice or not, and how many chunks."""
    orders = st.permutations(range(draw(st.integers(1, 5))))
    return np.array(draw(st.lists(orders, min_size=1, max_size=3)), dtype=np.int64), draw(st.integers(1, 3))


def around(rings: IntArray, chunks: int, **changes: Any) -> Schedule:
    """An AllGather around rings, whatever they are, with some of its data changed."""
    count, n = rings.shape
    blocks = n * count * chunks
    data: dict[str, Any] = {
        "blocks": Blocks.of_data(np.arange(1, blocks + 1)),
        "initial": own_blocks(n, count * chunks).copy(),
        "final": all_blocks(n, blocks).copy(),
        "steps": RingSteps(rings, chunks),
        "lanes": count,
    }
    return Schedule(name="rings", world_size=n, **(data | changes))


def replayed(schedule: Schedule) -> Schedule:
    """The same with steps that say nothing of where they come from."""
    return replace(schedule, steps=list(schedule.steps))


@given(rings_and_chunks())
def test_what_is_proved_is_what_a_replay_finds(case: tuple[IntArray, int]) -> None:
    schedule = around(*case)
    assert rings_prove(*case, schedule)
    again = replayed(schedule)
    assert not isinstance(again.steps, RingSteps)
    assert schedule.transfers == again.transfers
    assert schedule.digest == again.digest


@given(rings_and_chunks())
def test_a_step_sends_what_the_hop_before_brought_so_many_steps_earlier(case: tuple[IntArray, int]) -> None:
    """The lag: at step s a hop sends what came at step s - lag, and before that what its rank owns."""
    steps = RingSteps(*case)
    shards = steps.rings.shape[0] * steps.chunks
    for index, step in enumerate(steps):
        assert sorted(step.lane.tolist()) == sorted(np.repeat(range(len(steps.rings)), steps.rings.shape[1]).tolist())
        sent = {(source, lane): block for source, _, lane, block in step.rows()}
        if index < steps.lag:
            assert all(block // shards == source for (source, _), block in sent.items())
        else:
            earlier = steps[index - steps.lag].rows()
            assert sent == {(destination, lane): block for _, destination, lane, block in earlier}


def accepted(build: Callable[[], Schedule]) -> bool:
    try:
        build()
    except ScheduleError:
        return False
    return True


@given(rings_and_chunks(), st.data())
def test_the_proof_accepts_what_the_replay_accepts(case: tuple[IntArray, int], data: st.DataObject) -> None:
    """Whatever is spoilt: the rings, what ranks hold, lanes, buffers. Both agree on what is left to be valid."""
    rings, chunks = case[0].copy(), case[1]
    count, n = rings.shape
    whole = around(case[0], chunks)
    changes: dict[str, Any] = {}
    for what in data.draw(st.lists(st.sampled_from(["rings", "initial", "final", "part", "lanes", "buffers"]))):
        if what == "rings":
            at = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, n - 1))
            rings[at] = data.draw(st.integers(-1, n))
        elif what in ("initial", "final"):
            values = getattr(whole, what).copy()
            values[data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, values.shape[1] - 1))] ^= True
            changes[what] = values
        elif what == "part":
            changes["initial_part"] = np.full((n, 1), data.draw(st.integers(-1, 1)))
        elif what == "buffers":
            changes["blocks"] = replace(whole.blocks, kinds=[Kind("data", pool=Pool("arrivals", 2))])
        else:
            changes[what] = data.draw(st.integers(count - 1, count + 1))
    structural: list[bool] = []

    class Noted(RingSteps, trusted=True):
        def prove(self, schedule: ScheduleModel) -> None:
            structural.append(rings_prove(self.rings, self.chunks, schedule))

    by_replay = accepted(lambda: around(rings, chunks, **changes, steps=Noted(rings, chunks)))
    assert accepted(lambda: around(rings, chunks, **changes)) == by_replay
    assert not structural[0] or by_replay
    if n > 1 and set(changes) <= {"initial", "lanes"}:
        assert structural[0] == by_replay


def sums_around(rings: IntArray, chunks: int, copies: bool, **changes: Any) -> Schedule:
    """A ReduceScatter, or with `copies` an AllReduce, around rings, with some of its data changed."""
    count, n = rings.shape
    blocks, own = n * count * chunks, own_blocks(n, count * chunks)
    data: dict[str, Any] = {
        "blocks": Blocks.of_sums(np.arange(1, blocks + 1), n),
        "initial": all_blocks(n, blocks).copy(),
        "final": all_blocks(n, blocks).copy() if copies else own.copy(),
        "initial_part": np.arange(n)[:, None],
        "steps": RingSumSteps(rings, chunks, copies),
        "lanes": count,
    }
    return Schedule(name="sums", world_size=n, **(data | changes))


@given(rings_and_chunks(), st.booleans())
def test_what_is_proved_of_sums_is_what_a_replay_finds(case: tuple[IntArray, int], copies: bool) -> None:
    schedule = sums_around(*case, copies)
    again = replayed(schedule)
    assert schedule.transfers == again.transfers == sum(len(step) for step in again.steps)
    assert schedule.digest == again.digest


@given(rings_and_chunks(), st.booleans(), st.data())
def test_the_proof_of_sums_accepts_only_what_the_replay_accepts(
    case: tuple[IntArray, int], copies: bool, data: st.DataObject
) -> None:
    rings, chunks = case[0].copy(), case[1]
    whole, n = sums_around(case[0], chunks, copies), case[0].shape[1]
    changes: dict[str, Any] = {}
    for what in data.draw(st.lists(st.sampled_from(["rings", "initial", "final", "parts", "initial_part", "lanes"]))):
        if what == "rings":
            at = data.draw(st.integers(0, len(rings) - 1)), data.draw(st.integers(0, n - 1))
            rings[at] = data.draw(st.integers(-1, n))
        elif what == "lanes":
            changes[what] = data.draw(st.integers(whole.lanes - 1, whole.lanes + 1))
        elif what == "parts":
            changes["blocks"] = Blocks.of_sums(whole.block_bytes, n + data.draw(st.integers(0, 1)))
        else:
            values: npt.NDArray[Any] = getattr(whole, what).copy()
            at = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, values.shape[1] - 1))
            values[at] = data.draw(st.integers(-1, n) if what == "initial_part" else st.booleans())
            changes[what] = values
    by_theorem = accepted(lambda: sums_around(rings, chunks, copies, **changes))
    steps = list(RingSumSteps(rings, chunks, copies))
    assert by_theorem == accepted(lambda: sums_around(rings, chunks, copies, **changes, steps=steps))


def test_a_shape_that_does_not_fit_is_refused() -> None:
    rings = np.array([[0, 1, 2]])
    for spoilt in (
        {"initial": own_blocks(3, 2)},
        {"final": all_blocks(3, 4)},
        {"blocks": Blocks.of_data(np.ones(4, dtype=np.int64))},
    ):
        with pytest.raises(ScheduleError, match=r"schedule 'rings': (initial|final) has the shape"):
            around(rings, 1, **spoilt)


def test_rings_of_other_ranks_are_replayed_and_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 0 never received block 3"):
        around(np.array([[0, 1, 2, 3]]), 1, steps=RingSteps(np.array([[0, 1, 2]])))


def test_what_a_step_broke_is_named_as_ever() -> None:
    with pytest.raises(ScheduleError, match=r"step 0: rank 1 sends block 1 to rank 1 on lane 0: .* sends to itself"):
        around(np.array([[0, 1, 1]]), 1)


def test_proven_rings_cannot_be_changed() -> None:
    steps = multi_ring_all_gather(full_mesh(4), 8).steps
    assert isinstance(steps, RingSteps)
    with pytest.raises(ValueError, match="read-only"):
        steps.rings[0, 0] = 1


@given(st.integers(1, 6), st.integers(1, 4))
def test_views_of_what_ranks_hold_are_what_they_stand_for(world_size: int, per_rank: int) -> None:
    own = own_blocks(world_size, per_rank)
    assert (own == np.repeat(np.eye(world_size, dtype=bool), per_rank, axis=1)).all()
    assert all_blocks(world_size, per_rank).all()
    for values in (own, all_blocks(world_size, per_rank)):
        assert not values.flags.writeable


@given(st.integers(2, 6), st.integers(1, 30), st.integers(1, 30))
def test_shards_are_cut_in_pieces_of_about_equal_size(world_size: int, shard: int, chunks: int) -> None:
    topology = full_mesh(world_size)
    if chunks > shard:
        with pytest.raises(ScheduleError, match=f"{chunks} chunks, expected 1 to {shard}"):
            ring_all_gather(topology, shard, chunks=chunks)
        return
    sizes = ring_all_gather(topology, shard, chunks=chunks).block_bytes.reshape(world_size, chunks)
    assert (sizes.sum(axis=1) == shard).all()
    assert sizes.max() - sizes.min() <= 1


def test_one_piece_is_the_schedule_without_pieces() -> None:
    topology = nodes(2, 4)
    for build in (ring_all_gather, multi_ring_all_gather):
        assert build(topology, 40).digest == build(topology, 40, chunks=1).digest


@pytest.mark.parametrize("chunks", [1, 3])
def test_large_worlds_are_proved_in_little_memory(chunks: int) -> None:
    """2 million transfers and more among 1,024 ranks; all that they hold would be 8 million pairs per chunk."""
    topology = nodes(128, 8)
    rings = decompose(topology)
    topology.routes(rings.rings[0, :-1], rings.rings[0, 1:])
    tracemalloc.start()
    schedule = multi_ring_all_gather(topology, 2**20, rings, chunks=chunks)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert schedule.transfers == 1023 * 1024 * 8 * chunks
    assert peak_bytes < 2**23


def test_a_ring_without_routes_is_refused() -> None:
    """Hops are those of every step, so only the first step is looked at."""
    schedule = around(np.array([[0, 1, 3, 2]]), 2)
    with pytest.raises(ScheduleError, match="step 0: rank 1 sends to rank 3, but ring:4 has no such link"):
        schedule.check_routes(direct(ring(4)))


def test_steps_of_too_many_transfers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasp_lab.schedules.collectives.all_gather.MAX_TRANSFERS_AT_ONCE", 11)
    with pytest.raises(ScheduleError, match="'multi-ring': 12 transfers in each step, expected at most 11"):
        multi_ring_all_gather(switch(4), 12, rings_of_four())
    with pytest.raises(ScheduleError, match="'direct': 12 transfers in one step, expected at most 11"):
        direct_all_gather(full_mesh(4), 8)


def rings_of_four() -> Decomposition:
    return Decomposition(switch(4), np.array([[0, 1, 2, 3], [0, 2, 3, 1], [0, 3, 1, 2]], dtype=np.int32), 2, "three")


def test_rings_that_are_too_many_or_too_hard_to_find_are_refused_at_once() -> None:
    with pytest.raises(NoDecompositionError, match=r"the 4096 rings of K\*_4097 are too many"):
        decompose(full_mesh(4097))
    with pytest.raises(NoDecompositionError, match="a search is limited to 1047552 pairs of ranks"):
        RingProblem.of(switch(1025))


def test_nodes_of_many_ranks_keep_the_rings_that_are_known() -> None:
    """Behind switches the rings of nodes may not be the best, but there is no searching for better ones."""
    found = decompose(nodes(513, 8, "switch"))
    assert found.rings.shape == (8, 4104)
    assert not found.proved_optimal
    assert "not proved optimal" in found.reason
