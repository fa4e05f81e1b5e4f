"""Layers in chunks by the executor, every rank a thread; the trial compares with a single process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.trials.in_process import run_in_process
from tasp_lab.schedule.composition import in_chunks
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS, attention_passes
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.schedules import assert_every_transfer_once
from tests.support.systems import lasp2, token_ring_passes, ulysses_passes

SYSTEMS: dict[str, Callable[[Topology, Workload], Sequence[Schedule]]] = {
    "token-ring": token_ring_passes,
    "ulysses": ulysses_passes,
    "lasp2": lambda mesh, layer: [lasp2(mesh, layer, 0.9)],
    **{
        f"tasp, {dataflow}": lambda mesh, layer, dataflow=dataflow: attention_passes(  # type: ignore[misc]
            "tasp", mesh, layer, dataflow=dataflow
        )
        for dataflow in DATAFLOWS
    },
}


@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=8)
@given(st.integers(1, 4), st.integers(2, 3), st.integers(1, 3), st.integers(1, 40), st.booleans())
def test_layers_in_chunks_compute_exact_attention(
    name: str, n: int, chunks: int, users: int, more: int, whole_steps: bool
) -> None:
    """Each chunk is a group of heads; all of them are sent, and make the result of the layer."""
    kv_heads = n * chunks
    layer = Workload(
        n + more, heads=kv_heads * users, kv_heads=kv_heads, head_dim=8, dtype="fp32", mask="causal", batch=2
    )
    for schedule in SYSTEMS[name](full_mesh(n), layer):
        chunked = in_chunks(schedule, chunks)
        timeline = run_in_process(chunked, 3, whole_steps)
        assert_every_transfer_once(timeline.events, chunked)
        assert chunked.transfers == chunks * schedule.transfers
        assert chunked.bytes_sent().sum() == schedule.bytes_sent().sum()
