"""Linear attention by the executor, every rank a thread: outputs and all gradients against float64 on one process."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.trials.in_process import run_in_process
from tasp_lab.core.choices import Decay
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import linear_schedules
from tasp_lab.schedules.registry import LINEAR
from tasp_lab.timeline.events import SEND
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload


@st.composite
def layers(draw: st.DrawFn, name: str) -> Workload:
    """Layers that a schedule takes: rings of keys no decay by the data, chains of states no full mask."""
    decay = draw(st.sampled_from(["none", "head"] if name.startswith("ring") else get_args(Decay)))
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    may_be_full = decay == "none" and len(lengths) == 1 and name not in ("lasp", "all-scan")
    return Workload(
        sum(lengths),
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 4])),
        dtype="fp32",
        mask="full" if may_be_full and draw(st.booleans()) else "causal",
        documents=tuple(lengths) if len(lengths) > 1 else None,
        kind="linear",
        decay=decay,
    )


@pytest.mark.parametrize("name", LINEAR)
@settings(max_examples=10)
@given(st.data())
def test_outputs_and_gradients_are_those_of_one_process(name: str, data: st.DataObject) -> None:
    layer, n, whole_steps = data.draw(layers(name)), data.draw(st.integers(1, 4)), data.draw(st.booleans())
    chosen: dict[str, Any] = {}
    if "trim" in LINEAR[name].options:
        chosen["trim"] = data.draw(st.booleans())
    if "pieces" in LINEAR[name].options:
        chosen["pieces"] = data.draw(st.sampled_from([None, 1, layer.kv_heads]))
    decays = tuple(0.9 ** (1 + head) for head in range(layer.kv_head_count)) if layer.decay == "head" else ()
    for schedule in linear_schedules(name, full_mesh(n), layer, None, AttentionOptions("both", **chosen), decays):
        timeline = run_in_process(schedule, 3, whole_steps)
        assert sum(event.bytes for event in timeline.events if event.kind == SEND) == schedule.bytes_sent().sum()
