"""Ranks of one process over a loopback: every schedule in orders that are drawn, and faults that are planted."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.executor.executor import Executor
from runtime.executor.messages import Message
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules, collective
from tasp_lab.schedules.registry import COLLECTIVES, LINEAR, attention_names_on
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.device_faults import FAULTS, NO_PLACE, report
from tests.support.loopback import GARBAGE, Board, Loopback
from tests.support.one_device import QueuedStreams, run_on_one_device, run_together
from tests.support.selection import covering

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "mask"), covering(product(attention_names_on(4), ["full", "causal"])))
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32))
def test_every_layer_is_exact_in_every_order_of_ranks(name: str, mask: str, seed: int) -> None:
    """Both passes, whose results the trials compare with float64."""
    layer = Workload(4 * 9 + 4, heads=4, kv_heads=4, head_dim=8, dtype="fp32", mask=mask)  # type: ignore[arg-type]
    for schedule in build_schedules(name, full_mesh(4), layer, options=AttentionOptions("both")):
        run_on_one_device(schedule, CPU, seed)


@pytest.mark.parametrize("name", LINEAR)
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32))
def test_every_linear_layer_is_exact_in_every_order_of_ranks(name: str, seed: int) -> None:
    layer = Workload(40, heads=4, kv_heads=4, head_dim=8, dtype="fp32", mask="causal", kind="linear")
    for schedule in build_schedules(name, full_mesh(4), layer, options=AttentionOptions("both")):
        run_on_one_device(schedule, CPU, seed)


@pytest.mark.parametrize("name", COLLECTIVES)
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 300))
def test_every_collective_delivers_every_bit_in_every_order(name: str, seed: int, size: int) -> None:
    run_on_one_device(collective(name, full_mesh(4), size), CPU, seed)


# planted faults


def layer_of(name: str, passes: str = "forward", buffers: int = 3) -> Schedule:
    layer = Workload(72, heads=2, head_dim=8, dtype="fp32", mask="full")
    options = AttentionOptions(passes, buffers=buffers)  # type: ignore[arg-type]
    (schedule,) = build_schedules(name, full_mesh(6), layer, options=options)
    return schedule


@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize("name", ["ring-attention", "tasp", "token-multi-ring", "kv-and-q-rings"])
def test_a_lost_message_is_reported_as_the_chain_that_waits_for_it(name: str, passes: str) -> None:
    told = report("lost send", layer_of(name, passes), CPU)
    assert told is not None
    assert told.startswith("deadlock: rank ")
    assert told.endswith(" from rank 1, which has passed that step without it")


@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize("name", ["tasp", "token-multi-ring"])
def test_messages_in_the_wrong_order_are_named(name: str, passes: str) -> None:
    told = report("swapped order", layer_of(name, passes), CPU)
    assert told is not None
    assert told.startswith("rank 1 sends block")
    assert "which meets the receive of block" in told


def test_memory_that_is_used_too_early_is_named_by_its_message() -> None:
    told = report("early reuse of a buffer", layer_of("ring-attention", buffers=2), CPU)
    assert told is not None
    assert told.startswith("rank 1 comes to the receive of block")
    assert "before a call of step" in told
    told = report("call before its message", layer_of("tasp"), CPU)
    assert told is not None
    assert told.startswith("rank 1 comes to a call of step 1 before the receive of block")


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_that_has_a_place_is_missed(fault: str) -> None:
    found = [
        report(fault, layer_of(name, passes), CPU) for name in ("tasp", "burst") for passes in ("forward", "backward")
    ]
    placed = [told for told in found if told != NO_PLACE]
    assert placed
    assert None not in placed[:1]


def test_memory_of_a_run_that_fails_is_free() -> None:
    assert report("lack of memory", layer_of("tasp"), CPU) == "rank 1, step 0: a planted lack of memory"


# rules of the board


def pair(sends: list[int], receives: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor], Board]:
    """Messages of these sizes between ranks 0 and 1 on one channel, in one batch each, and waits for all of them."""
    board = Board(0.01)
    sent = [torch.full((size,), at, dtype=torch.uint8) for at, size in enumerate(sends, 1)]
    received = [torch.zeros(size, dtype=torch.uint8) for size in receives]
    here, there = Loopback(board, 0), Loopback(board, 1)
    here.receive([])
    waits = here.send([Message(1, 0, each) for each in sent])
    waits += there.receive([Message(0, 0, each) for each in received])
    assert all(int(each[0]) == 0 for each in received)
    there.send([])
    assert all(int(each[0]) == GARBAGE for each in received)
    for wait in waits:
        wait()
    return sent, received, board


def test_the_first_send_meets_the_first_receive() -> None:
    sent, received, _ = pair([3, 3, 3], [3, 3, 3])
    assert [each.tolist() for each in received] == [each.tolist() for each in sent]


def test_ends_of_different_sizes_are_refused() -> None:
    with pytest.raises(
        RunError, match=r"which meets the receive of a message with tag 0 from rank 0 \(3 and 4 bytes\)"
    ):
        pair([3], [4])


def test_batches_of_a_channel_run_one_after_another() -> None:
    """Rank 0's second batch does not begin before the first, which rank 2 does not answer, has ended."""
    board, data = Board(0.01), torch.zeros(1, dtype=torch.uint8)
    here, there = Loopback(board, 0), Loopback(board, 1)
    here.send([Message(2, 0, data)])
    (second,) = here.send([Message(1, 0, data)])
    (received,) = there.receive([Message(0, 0, data.clone())])
    there.send([])
    assert not received.is_over  # type: ignore[attr-defined]
    (other,) = here.send([Message(1, 0, data.clone(), channel=1)])
    (beside,) = there.receive([Message(0, 0, data.clone(), channel=1)])
    there.send([])
    assert beside.is_over  # type: ignore[attr-defined]
    assert other.is_over  # type: ignore[attr-defined]
    Loopback(board, 2).receive([Message(0, 0, data.clone())])
    answering = Loopback(board, 2)
    answering.receive([Message(0, 0, data.clone())])
    answering.send([])
    assert received.is_over  # type: ignore[attr-defined]
    assert second.is_over  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sends", "told"), [(True, "what rank 0 sends, .*, has changed"), (False, "where rank 1 .*wrote")]
)
def test_memory_of_a_message_must_not_change_before_the_wait(sends: bool, told: str) -> None:
    board, data, place = Board(0.01), torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    here, there = Loopback(board, 0), Loopback(board, 1)
    (sent,) = here.send([Message(1, 0, data)])
    (received,) = there.receive([Message(0, 0, place)])
    there.send([])
    (data if sends else place)[2] = 7
    with pytest.raises(RunError, match=told):
        (sent if sends else received)()


def test_ranks_that_wait_for_each_other_are_a_cycle() -> None:
    """Each rank's first batch waits for the other's second one, as with sends and receives in groups of their own."""
    schedule = collective("ring", full_mesh(2), 8)
    board = Board()
    executors = [Executor(schedule, rank, Loopback(board, rank)) for rank in range(2)]
    for executor in executors:
        executor.prepare(QueuedStreams())
        strategy = executor.strategy
        ((stream, ((kind, batch), *rest)),) = strategy.plan.runs  # type: ignore[attr-defined]
        n = len(batch.receives)
        halves = [batch._replace(sends=(), nodes=batch.nodes[:n]), batch._replace(receives=(), nodes=batch.nodes[n:])]
        strategy.plan = strategy.plan._replace(  # type: ignore[attr-defined]
            runs=((stream, (*((kind, half) for half in halves), *rest)),)
        )
    with pytest.raises(RunError) as error:
        run_together(executors, board)
    assert str(error.value) == (
        "deadlock: rank 0 waits for block 1 of step 0 from rank 1; rank 1 waits for block 0 of step 0 from rank 0"
    )
