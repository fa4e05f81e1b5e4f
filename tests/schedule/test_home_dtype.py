"""Sums that are wider at home than on the wire: bytes, memory, and the numbers that ranks end with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Field, Kind
from tasp_lab.schedule.buffer_layout import OUTSIDE, memory_bytes
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import attention_passes
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, QUERY_GRADIENTS, RESULTS, AttentionTask
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.home_dtype import with_home_dtype
from tests.support.systems import token_ring, token_ring_passes, ulysses, ulysses_passes, usp

SYSTEMS: dict[str, Callable[[Topology, Workload], Schedule]] = {
    "token-ring": lambda mesh, layer: token_ring(mesh, layer, result_dtype="input"),
    "token-ring backward": lambda mesh, layer: token_ring_passes(mesh, layer, gradient_dtype="input").backward,
    "ulysses": lambda mesh, layer: ulysses(mesh, layer, result_dtype="input"),
    "ulysses backward": lambda mesh, layer: ulysses_passes(mesh, layer, gradient_dtype="input").backward,
    "rotate-kv": lambda mesh, layer: (
        attention_passes("tasp", mesh, layer, dataflow="rotate-kv", gradient_dtype="input").backward
    ),
    "rotate-q": lambda mesh, layer: (
        attention_passes("zigzag-ring-attention", mesh, layer, dataflow="rotate-q", gradient_dtype="input").backward
    ),
    "usp": lambda mesh, layer: usp(full_mesh(2 * mesh.world_size), token_ring(mesh, layer, result_dtype="input"), 2),
}


@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=10)
@given(st.integers(1, 3), st.integers(1, 20), st.sampled_from(["full", "causal"]))
def test_bytes_are_those_on_the_wire_and_memory_has_room_for_home(name: str, n: int, more: int, mask: str) -> None:
    """A rank's memory grows by what its own sums are wider, unless they are the caller's, and by staging places."""
    layer = Workload(2 * n + more, heads=12, head_dim=2, mask=mask)  # type: ignore[arg-type]
    narrow = with_home_dtype(SYSTEMS[name](full_mesh(n), layer), None)
    wide = with_home_dtype(narrow)
    assert (wide.bytes_sent() == narrow.bytes_sent()).all()
    assert (wide.blocks.bytes == narrow.blocks.bytes).all()
    assert wide.digest != narrow.digest
    task = wide.task
    assert isinstance(task, AttentionTask)
    sums = np.isin(task.tensor, (RESULTS, KEY_GRADIENTS, QUERY_GRADIENTS))
    assert ((wide.blocks.home_bytes > wide.blocks.bytes) == sums).all()
    sizes = memory_bytes(wide)
    for rank in range(wide.world_size):
        part, before = rank_part(wide, rank), rank_part(narrow, rank)
        assert part.memory_bytes == sizes[rank]
        wider = sum(int((wide.blocks.home_bytes - wide.blocks.bytes)[block]) for block in part.resident)
        staged = [row.offset for row in part.receives if sums[row.block]]
        in_place = [row for row in before.receives if row.offset == before.resident.get(row.block, OUTSIDE)]
        staging = sum(int(wide.blocks.bytes[row.block]) for row in in_place if sums[row.block])
        assert part.memory_bytes == before.memory_bytes + wider + staging
        ends = {int(offset + wide.blocks.home_bytes[block]) for block, offset in part.resident.items()}
        assert not staged or min(staged) >= max(ends, default=0)


def test_own_results_of_token_ring_take_four_bytes_at_home_and_two_on_the_wire() -> None:
    layer, mesh = Workload(64, heads=4, head_dim=8, mask="full"), full_mesh(4)
    narrow = with_home_dtype(token_ring(mesh, layer, result_dtype="input"), None)
    schedule, own_elements = with_home_dtype(narrow), 16 * 4 * 8
    assert (memory_bytes(schedule) - memory_bytes(narrow) == 2 * own_elements).all()
    assert (schedule.bytes_sent() == narrow.bytes_sent()).all()
    float32 = token_ring(mesh, layer, result_dtype="fp32")
    assert (memory_bytes(with_home_dtype(float32)) == memory_bytes(float32)).all()


def test_a_kind_with_a_home_dtype_that_makes_no_sense_is_refused() -> None:
    for message, make in (
        ("field 'x' of sums: unknown dtype 'fp7', expected one of",
         lambda: Kind("sums", "add", fields=(Field("x", "bf16", (1,), home_dtype="fp7"),))),
        ("field 'x' of sums is bf16 at home and fp32 on the wire, expected a wider dtype at home",
         lambda: Kind("sums", "add", fields=(Field("x", "fp32", (1,), home_dtype="bf16"),))),
        ("field 'x' of sums is fp16 at home and bf16 on the wire, expected a wider dtype at home",
         lambda: Kind("sums", "add", fields=(Field("x", "bf16", (1,), home_dtype="fp16"),))),
        ("keys are data that are wider at home than on the wire, expected sums",
         lambda: Kind("keys", fields=(Field("x", "bf16", (1,), home_dtype="fp32"),))),
        ("block 1 of sums is no multiple of 4 bytes",
         lambda: Blocks([Kind("sums", "add", fields=(Field("x", "bf16", (2,), home_dtype="fp32"),))],
                        np.zeros(2, dtype=np.int64), np.array([8, 9]), np.ones(2, dtype=np.int64))),
        ("field 'out' of results is bf16 at home and fp32 on the wire, expected a wider dtype",
         lambda: with_home_dtype(token_ring(full_mesh(2), Workload(8, mask="full"), result_dtype="fp32"), "bf16")),
        ("schedule 'ring' has no results or gradients of attention",
         lambda: with_home_dtype(ring_all_gather(full_mesh(2), 8))),
    ):  # fmt: skip
        with pytest.raises(ScheduleError, match=message):
            make()
