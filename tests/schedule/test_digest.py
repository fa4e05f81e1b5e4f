"""A digest names a schedule: equal ones have it in common, whatever process builds them, and no others do."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import attention_passes
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

NAMES = ["ring-attention", "zigzag-ring-attention", "striped-ring-attention", "tasp"]


@st.composite
def layers(draw: st.DrawFn) -> Workload:
    sequence = draw(st.sampled_from([24, 48]))
    documents = draw(st.sampled_from([None, (sequence // 2,) * 2, (sequence - 8, 8)]))
    mask = draw(st.sampled_from(["full", "causal"]))
    window = draw(st.sampled_from([None, 5])) if mask == "causal" else None
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    return Workload(sequence, 1, 4, kv_heads, 8, mask=mask, window=window, documents=documents)


def same_name(name: str, layer: Workload) -> Schedule:
    return replace(attention(name, full_mesh(3), layer), name="same")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), layers(), st.sampled_from(NAMES), layers())
def test_schedules_of_one_name_share_a_digest_only_if_task_and_steps_are_the_same(
    first: str, layer: Workload, second: str, other: Workload
) -> None:
    equal = (first, layer) == (second, other)
    a, b = same_name(first, layer), same_name(second, other)
    assert a.task is not None
    assert b.task is not None
    if equal:
        assert a.digest == b.digest
    elif layer != other or a.task.layout != b.task.layout:
        assert a.digest != b.digest


def test_placements_of_one_mask_without_borders_differ() -> None:
    found = {name: same_name(name, Workload(24, heads=1, mask="full")).digest for name in NAMES[:3]}
    assert all(found[a] != found[b] for a, b in combinations(NAMES[:3], 2))


def test_passes_and_the_dtype_of_gradients_differ() -> None:
    mesh, layer = full_mesh(3), Workload(24, heads=1, mask="full")
    built = [
        attention_passes("tasp", mesh, layer, dataflow="rotate-kv", gradient_dtype=dtype) for dtype in ("fp32", "input")
    ]
    digests = {replace(each, name="same").digest for passes in built for each in passes}
    assert len(digests) == 3


def test_a_renamed_schedule_is_not_proven_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = attention("ring-attention", full_mesh(3), Workload(24, 1, 4, 4, 8, mask="full"))
    expected, before = replace(built, name="mine"), built.digest

    def prove(_: object) -> int:
        raise AssertionError("a renamed schedule is valid already")

    monkeypatch.setattr("tasp_lab.schedule.proof.prove", prove)
    renamed = built.renamed("mine")
    assert (renamed.name, renamed.digest, renamed.transfers) == ("mine", expected.digest, expected.transfers)
    assert (built.name, built.digest) == ("ring-attention", before) != (renamed.name, renamed.digest)
