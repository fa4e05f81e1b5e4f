"""Offsets and sizes of messages and of what kernels read and write are multiples of 16 bytes at documented sizes.

NCCL and RCCL copy 16 bytes at a time only where both ends of a message are so aligned
(`tasp_lab.rings.rings`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tasp_lab.core.choices import Decay
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.rings.rings import LOAD_BYTES
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.rank_part import RankPart, rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules, collective, linear_schedules
from tasp_lab.schedules.registry import COLLECTIVES, LINEAR, attention_names_on, state_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

MIB = 2**20
DOCUMENTED_BYTES = (1 * MIB, 8 * MIB, 64 * MIB, 512 * MIB, 7 * MIB, 56 * MIB, 448 * MIB)
DECAYS: tuple[Decay, ...] = ("none", "head", "scalar", "channel")
MACHINES = ("full-mesh:8", "h100-8", "mi300x-8", "h100-2x8")


def topology_of(name: str) -> Topology:
    return full_mesh(8) if name == "full-mesh:8" else load_machine(name).topology


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_messages_of_collectives(name: str, machine: str) -> None:
    topology = topology_of(machine)
    for shard_bytes in DOCUMENTED_BYTES:
        assert unaligned(collective(name, topology, shard_bytes)) == []


def unaligned(schedule: Schedule) -> list[str]:
    """The messages and places of all ranks that are not aligned."""
    sizes = schedule.block_bytes.tolist()
    return [each for rank in range(schedule.world_size) for each in _unaligned(rank_part(schedule, rank), sizes)]


def _unaligned(part: RankPart, sizes: list[int]) -> Iterator[str]:
    places = [("message of block", row.block, row.offset, sizes[row.block]) for row in (*part.sends, *part.receives)]
    places += [("copy of block", block, offset, sizes[block]) for block, offset in part.resident.items()]
    for call in part.calls:
        operands = [each for each in call.operands if each.blocks]
        places += [("operand from block", each.blocks[0], each.offset, each.size_bytes) for each in operands]
        places += [("result, block", each.block, each.offset, sizes[each.block]) for each in call.adds]
    for what, block, offset, size in places:
        if (offset != OUTSIDE and offset % LOAD_BYTES) or size % LOAD_BYTES:
            yield f"rank {part.rank}: {what} {block} at byte {offset}, {size} bytes"


@pytest.mark.parametrize("name", attention_names_on(8))
def test_operands_and_messages_of_attention(name: str) -> None:
    """The layers of the documents for GPUs, both passes."""
    for seq, kv_heads, mask in ((16384, 8, "causal"), (8192, 32, "full")):
        layer = Workload(sequence=seq, heads=32, kv_heads=kv_heads, head_dim=128, mask=mask)  # type: ignore[arg-type]
        for schedule in build_schedules(name, full_mesh(8), layer, None, AttentionOptions("both")):
            assert unaligned(schedule) == []


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", LINEAR)
def test_messages_of_linear_attention(name: str, head_dim: int) -> None:
    """Both passes of states in one piece and cut into groups of heads, with every kind of decay, and of keys."""
    for decay in DECAYS:
        if name not in state_schedules() and decay in ("scalar", "channel"):
            continue  # keys travel only without decay, or with a constant one
        if name == "multi-ring-lasp-2" and decay in ("head", "scalar"):
            continue  # the test below
        for pieces in (1, 2, 16) if name == "all-scan" else (None,):
            options = AttentionOptions("both", pieces=pieces)
            for schedule in linear_schedules(name, full_mesh(8), gated(head_dim, decay), None, options):
                assert unaligned_messages(schedule) == []


def test_pieces_of_one_head_with_its_decay_are_not_aligned() -> None:
    """A known fault: a state has 4 bytes more per head, and NCCL copies such messages byte by byte (docs/gpus.md)."""
    (forward,) = linear_schedules("multi-ring-lasp-2", full_mesh(8), gated(128, "head"))
    assert any("65540 bytes" in each for each in unaligned_messages(forward))


def gated(head_dim: int, decay: Decay) -> Workload:
    """A layer of linear attention with 16 heads."""
    return Workload(8192, heads=16, kv_heads=16, head_dim=head_dim, mask="causal", kind="linear", decay=decay)


def unaligned_messages(schedule: Schedule) -> list[str]:
    return [each for each in unaligned(schedule) if "message" in each]


def test_what_was_cut_at_bytes_is_seen() -> None:
    """A shard in seven equal parts of bytes, as it was cut before."""
    schedule = collective("multi-ring", full_mesh(8), MIB + 1)
    assert len(unaligned(schedule)) > 0
