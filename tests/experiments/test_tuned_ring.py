"""The table of TASP against a tuned ring: laws of its rows, and that the committed ones are predicted."""

from __future__ import annotations

import pytest

from experiments.benchmarks.tuned_ring import RESULT, gain, ways_of
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.workload.layer import Workload


@pytest.mark.parametrize(("machine", "remains"), [("h100-8", False), ("mi300x-8", True)])
def test_the_table_is_what_is_predicted(machine: str, remains: bool) -> None:
    """Behind a switch the gain over an untuned ring goes; in a full mesh one peer is one link, however tuned."""
    found = gain(machine, Workload(8192, heads=32, kv_heads=32, head_dim=128, mask="causal"))
    assert "| " + " | ".join(found.row()) + " |" in RESULT.read_text()
    assert min(found.ring_s.values()) <= found.ring_s["default"]
    assert found.by_default > 0.5
    assert (found.remaining > 0.5) == remains


def test_a_library_without_channels_cannot_be_tuned() -> None:
    assert list(ways_of(load_machine("full-mesh:4"))) == ["default"]
