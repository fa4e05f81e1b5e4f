"""The order of messages suffices: NCCL has no tags, so both ends of every pair of ranks must agree on the order.

The real per-step executor makes its calls without a network (`tests.support.recorded_calls`), for every rank of every
schedule, and a simulated NCCL pairs them. Modelled are group semantics: the operations of a communicator execute in
the order in which they were issued on a stream, those of one group progress together, a send ends when its receive is
posted, and collective calls pair by their order on each rank. `tests.support.simulated_nccl` names the source. What
NCCL delivers must be the transfers of the schedule, each block to its place and once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from runtime.executor.messages import Message, Post
from runtime.executor.transports import AllToAll, Batched
from tasp_lab.core.choices import Dataflow
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.schedule.composition.groups import over_groups
from tasp_lab.schedule.dependencies import channels
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import CIRCULATIONS
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules, collective
from tasp_lab.schedules.registry import COLLECTIVES, attention_names_on, options_for
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.recorded_calls import recorded_all_to_alls, recorded_communicators, recorded_groups
from tests.support.selection import covering
from tests.support.simulated_nccl import (
    AllToAllCall,
    Delivered,
    Group,
    NcclError,
    Operation,
    begun_side_by_side,
    make_communicators,
    run_all_to_alls,
    run_groups,
)

WORLD_SIZES = range(2, 9)


@pytest.mark.parametrize(("name", "world_size"), covering(product(COLLECTIVES, WORLD_SIZES)))
def test_messages_of_collectives(name: str, world_size: int) -> None:
    for shard_bytes in (1, 5, 1000):
        check(collective(name, full_mesh(world_size), shard_bytes))


@pytest.mark.parametrize(("name", "machine"), covering(product(COLLECTIVES, ["h100-8", "mi300x-8", "h100-2x8"])))
def test_messages_of_collectives_on_machines(name: str, machine: str) -> None:
    """Rings, trees and their lanes depend on the topology."""
    check(collective(name, load_machine(machine).topology, 2**12))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", CIRCULATIONS)
def test_messages_of_attention(name: str, world_size: int) -> None:
    for number, options in (case[2:] for case in attention_cases() if case[:2] == (name, world_size)):
        for schedule in build_schedules(name, full_mesh(world_size), layers(world_size)[number], options=options):
            check(schedule)


VARIANTS = [name for name in attention_names_on(8, variants=True) if name.count(":") == 2]


@pytest.mark.parametrize(("name", "number"), covering(product(VARIANTS, range(4))))
def test_messages_of_variants(name: str, number: int) -> None:
    """In float32, as at home: what is converted to be sent does not lie in the memory, where the check looks for it."""
    options = options_for(name, AttentionOptions("both", gradient_dtype="fp32", result_dtype="fp32"))
    for schedule in build_schedules(name, full_mesh(8), layers(8)[number], options=options):
        check(schedule)


@cache
def attention_cases() -> list[tuple[str, int, int, AttentionOptions]]:
    """Schedules, numbers of ranks, numbers of layers, and options: every pair of them."""
    every = product(CIRCULATIONS, WORLD_SIZES, range(len(layers(2))))
    return covering(((*case, options) for case in every for options in options_of(case[1])), together=2)


def layers(world_size: int) -> list[Workload]:
    """Full, causal, windowed and packed layers, of lengths that divide into blocks and that do not."""
    even, found = 16 * world_size, list[Workload]()
    for sequence in (even, even + 3):
        layer = Workload(sequence=sequence, heads=4, kv_heads=2, head_dim=8, mask="full")
        causal = replace(layer, mask="causal")
        found += layer, causal, replace(causal, window=9), replace(causal, documents=(10, sequence - 10))
    return found


def options_of(world_size: int) -> list[AttentionOptions]:
    """Both passes, with all dataflows on some numbers of ranks; on four, also untrimmed and with two buffers."""
    dataflows: list[Dataflow] = ["rotate-kv", "rotate-kv-back", "rotate-q"]  # of which auto is one
    if world_size == 4:
        variants = product(dataflows, ((True, 3), (True, 2), (False, 3)))
        return [AttentionOptions("both", trim, buffers, dataflow) for dataflow, (trim, buffers) in variants]
    return [AttentionOptions("both", dataflow=each) for each in (dataflows if world_size in (3, 8) else ["auto"])]


def check(schedule: Schedule) -> None:
    """Both transports deliver every transfer of a schedule, and nothing else."""
    schedule = replace(schedule, steps=list(schedule.steps))  # lazy steps are generated for every rank anew
    expected = transfers(schedule)
    for delivered in (run_groups(recorded_groups(schedule)), run_all_to_alls(recorded_all_to_alls(schedule))):
        assert Counter(one for each in delivered for one in by_block(each, schedule)) == expected


def transfers(schedule: Schedule) -> Counter[Delivered]:
    """The transfers of a schedule as messages."""
    return Counter(
        Delivered(source, destination, index * schedule.lanes + lane, (block,), int(schedule.block_bytes[block]))
        for index, step in enumerate(schedule.steps)
        for source, destination, lane, block in step.rows()
    )


def by_block(message: Delivered, schedule: Schedule) -> Iterator[Delivered]:
    """A message of several blocks as one of each."""
    sizes = [int(schedule.block_bytes[block]) for block in message.blocks]
    assert sum(sizes) == message.size_bytes
    for block, size in zip(message.blocks, sizes, strict=True):
        yield message._replace(blocks=(block,), size_bytes=size)


@pytest.mark.parametrize("inner_first", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(2, 2), (4, 3), (3, 4)])
def test_messages_of_rings_of_rings(inner: int, outer: int, inner_first: bool) -> None:
    """Inner and outer ring are two channels, so they have two communicators."""
    schedule = ring_of_rings(inner, outer, inner_first)
    check(schedule)
    communicators = {group.communicator for groups in recorded_groups(schedule) for group in groups}
    assert communicators == set(channels(schedule)) == {0, 1}


def ring_of_rings(inner: int, outer: int, inner_first: bool = False) -> Schedule:
    inside = collective("ring", full_mesh(inner), 24)
    return over_groups(inside, collective("ring", full_mesh(outer), 24 * inner), inner_first=inner_first)


@pytest.mark.parametrize(("name", "world_size", "number"), covering(product(CIRCULATIONS, WORLD_SIZES, range(4))))
def test_every_communicator_is_made_by_all_ranks(name: str, world_size: int, number: int) -> None:
    layer = layers(world_size)[number]
    for schedule in build_schedules(name, full_mesh(world_size), layer, options=AttentionOptions("both")):
        make_communicators(recorded_communicators(schedule))


def test_a_communicator_that_is_made_by_the_first_batch_waits_forever() -> None:
    """As torch makes them unless it is told to: a rank that sends no gradients in a step has no batch for them."""
    layer = Workload(sequence=64, heads=1, mask="causal")
    _, backward = build_schedules("ring-attention", full_mesh(4), layer, options=AttentionOptions("both"))
    make_communicators(recorded_communicators(backward))
    with pytest.raises(NcclError, match="deadlock: communicator 1 is made by all ranks"):
        make_communicators([[group.communicator for group in groups] for groups in recorded_groups(backward)])


# Planted faults


def test_two_messages_of_a_pair_in_the_other_order() -> None:
    """Rank 0 sends blocks 0 and 2 to rank 1 at steps 0 and 1, here in two groups the other way round."""
    groups = ring_groups()
    first, second = groups[0][:2]
    groups[0][:2] = [first._replace(sends=second.sends), second._replace(sends=first.sends)]
    with pytest.raises(NcclError, match=r"rank 0 sends blocks \(2,\) to rank 1, paired with a receive of \(0,\)"):
        run_groups(groups)


def test_two_messages_of_one_group_in_the_other_order() -> None:
    """All messages of the two lanes of a step go to the only other rank."""
    sends, receives = (
        (Operation(1, 0, (0,), 8), Operation(1, 1, (1,), 8)),
        (Operation(0, 0, (0,), 8), Operation(0, 1, (1,), 8)),
    )
    run_groups([[Group((), sends)], [Group(receives, ())]])
    with pytest.raises(NcclError, match=r"rank 0 sends blocks \(1,\) to rank 1, paired with a receive of \(0,\)"):
        run_groups([[Group((), sends[::-1])], [Group(receives, ())]])


def test_a_missing_receive() -> None:
    groups = ring_groups()
    groups[1][1] = groups[1][1]._replace(receives=())
    with pytest.raises(NcclError, match="1 receives missing of the messages from rank 0 to 1"):
        run_groups(groups)


def test_a_missing_send() -> None:
    groups = ring_groups()
    groups[2][0] = groups[2][0]._replace(sends=())
    with pytest.raises(NcclError, match=r"rank 2 sends blocks \(1,\) to rank 0, paired with a receive of \(2,\)"):
        run_groups(groups)


def test_a_wrong_size() -> None:
    groups = ring_groups()
    send = groups[1][0].sends[0]
    groups[1][0] = groups[1][0]._replace(sends=(send._replace(size_bytes=99),))
    with pytest.raises(NcclError, match="rank 1 sends size_bytes 99 to rank 2, paired with a receive of 100"):
        run_groups(groups)


def test_communicators_do_not_pair_with_each_other() -> None:
    send, receive = Operation(1, 0, (0,), 8), Operation(0, 0, (0,), 8)
    assert len(run_groups([[Group((), (send,), 1)], [Group((receive,), (), 1)]])) == 1
    with pytest.raises(NcclError, match=r"1 (sends|receives) missing of the messages from rank 0 to 1"):
        run_groups([[Group((), (send,), 1)], [Group((receive,), (), 0)]])


def test_a_wrong_order_of_communicators_is_found() -> None:
    """Rank 1 issues the groups of the two communicators the other way round: one after another, they never end."""
    first, second = Operation(1, 0, (0,), 8), Operation(1, 1, (1,), 8)
    groups = [
        [Group((), (first,), 0), Group((), (second,), 1)],
        [Group((first._replace(peer=0),), (), 0), Group((second._replace(peer=0),), (), 1)],
    ]
    assert len(run_groups(groups)) == 2
    groups[1].reverse()
    with pytest.raises(NcclError, match=r"deadlock: ranks \[0, 1\]"):
        run_groups(groups)


def test_batches_of_one_communicator_wait_for_each_other() -> None:
    """A message from rank 8 to rank 0, of the outer ring, takes forever. The inner ring goes on beside it.

    Rank 0 can then begin all batches before the next one of the outer ring.
    """
    groups = recorded_groups(ring_of_rings(4, 3))
    numbers = [group.communicator for group in groups[0]]
    second = numbers.index(1, numbers.index(1) + 1)
    assert begun_by_rank_0(groups) == second
    assert begun_by_rank_0([[group._replace(communicator=0) for group in each] for each in groups]) < second


def begun_by_rank_0(groups: Sequence[Sequence[Group]]) -> int:
    """How many groups rank 0 begins while its first message of the outer ring has not arrived."""
    return begun_side_by_side(groups, held=lambda source, receive: (source, receive.peer) == (8, 0))[0]


def test_groups_of_one_rank_in_another_order() -> None:
    """Rank 0 first exchanges with rank 1, rank 1 with rank 2, rank 2 with rank 0."""

    def exchange(peer: int, tag: int) -> Group:
        return Group((Operation(peer, tag, (0,), 8),), (Operation(peer, tag, (0,), 8),))

    in_order = [[exchange(1, 0), exchange(2, 1)], [exchange(0, 0), exchange(2, 2)], [exchange(0, 1), exchange(1, 2)]]
    assert len(run_groups(in_order)) == 6
    circular = [in_order[0], in_order[1][::-1], in_order[2]]
    with pytest.raises(NcclError, match=r"deadlock: ranks \[0, 1, 2\]"):
        run_groups(circular)


def test_a_rank_that_skips_a_collective() -> None:
    calls = ring_calls()
    del calls[1][1]
    with pytest.raises(NcclError, match=r"ranks make \[2, 1, 2\] all-to-all calls"):
        run_all_to_alls(calls)


def test_split_sizes_that_differ() -> None:
    calls = ring_calls()
    calls[1][0] = calls[1][0]._replace(receive_splits=(99, 0, 0))
    with pytest.raises(NcclError, match="call 0: rank 0 sends 100 bytes to rank 1, which expects 99"):
        run_all_to_alls(calls)


def test_collectives_in_another_order() -> None:
    """Their split sizes are the same, what they carry is not."""
    calls = ring_calls()
    calls[1].reverse()
    with pytest.raises(NcclError, match=r"rank 0 sends blocks \(0,\) to rank 1, paired with a receive of \(2,\)"):
        run_all_to_alls(calls)


def test_a_transport_that_skips_steps_without_messages() -> None:
    """An all-to-all is a call of all ranks, also of those with no message; in trimmed causal attention, some have none.

    Without an all-to-all, empty groups may be skipped.
    """
    layer = Workload(sequence=64, heads=1, mask="causal")
    (schedule,) = build_schedules("ring-attention", full_mesh(4), layer)
    assert any(0 < len(step) < 4 for step in schedule.steps)
    check(schedule)
    with pytest.raises(NcclError, match="all-to-all calls, expected the same number"):
        run_all_to_alls(recorded_all_to_alls(schedule, SkipsEmptySteps))


class SkipsEmptySteps(AllToAll):
    """A faulty all-to-all: ranks without a message do not call."""

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Post:
        return super().bind(receives, sends) if receives or sends else list


def test_a_transport_that_sends_before_it_receives() -> None:
    """Sends and receives must be posted in one group: here each rank waits until its send has ended."""
    with pytest.raises(NcclError, match=r"deadlock: ranks \[0, 1, 2\]"):
        run_groups(recorded_groups(collective("ring", full_mesh(3), 100), SendsFirst))


class SendsFirst(Batched):
    """A faulty batch: two groups per step."""

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Post:
        send, receive = super().bind([], sends), super().bind(receives, [])
        return lambda: [*send(), *receive()]


def test_data_from_another_place() -> None:
    """The block of a message is found by its data, not by what the executor claims to send."""
    with pytest.raises(NcclError, match="no block of a message with rank 1 lies at byte 1"):
        recorded_groups(collective("ring", full_mesh(3), 100), Shifted)


class Shifted(Batched):
    """A faulty transport: messages begin one byte late."""

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Post:
        late = [Message(each.peer, each.tag, each.data[1:], each.channel) for each in sends]
        return super().bind(receives, late)


def ring_groups() -> list[list[Group]]:
    """The groups of a ring AllGather of three ranks, 100 bytes each."""
    return recorded_groups(collective("ring", full_mesh(3), 100))


def ring_calls() -> list[list[AllToAllCall]]:
    """As `ring_groups`, as all-to-all calls."""
    return recorded_all_to_alls(collective("ring", full_mesh(3), 100))
