"""Passes over partial results and gradients beside kernel calls."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.compute import MERGE, KernelCompute, with_kernel
from tasp_lab.machines.host import INSTANT_HOST, HostModel, Passes
from tasp_lab.machines.kernel_model.kernel import ELEMENTWISE_LAUNCH
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.machines.stack import load_stack, stack_names
from tasp_lab.prediction.inputs import with_host
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.kernel_shapes import KernelShape, Passing

LAUNCH_S = ELEMENTWISE_LAUNCH.value
RECORDS = {f"{stack}/{name}": each for stack in stack_names() for name, each in load_stack(stack).hosts.items()}
HOSTS = [INSTANT_HOST, *(each.model(name, "") for name, each in RECORDS.items())]


def shape(passing: Passing, queries: int, keys: int, heads: int = 8, kv_heads: int = 4) -> KernelShape:
    numbers = (1, heads, kv_heads, 128, queries, keys, -keys, queries, 4 * queries * keys * heads * 128)
    return KernelShape("attend", "softmax", passing, "bf16", *numbers)


def extra_s(passes: Passes, call: KernelShape) -> float:
    """How much longer a call takes with the passes."""
    plain = load_machine("h100-8")
    passing = with_host(plain, HostModel("test", passes=passes))
    return float(passing.compute.time_s(call)) - float(plain.compute.time_s(call))


def test_passes_over_values_of_another_width_than_keys() -> None:
    """Passes over the output take bytes of the width of values, those over query gradients of the width of keys."""
    forward, backward = (shape(each, 512, 4096)._replace(value_dim=64) for each in ("forward", "backward"))
    found = extra_s(Passes(slice_bytes=8), forward), extra_s(Passes(query_gradient_bytes=8), backward)
    assert found[0] == pytest.approx(8 * 512 * 8 * 64 / 2.95e12 + LAUNCH_S, rel=1e-6)
    assert found[1] == pytest.approx(8 * 512 * 8 * 128 / 2.95e12 + LAUNCH_S, rel=1e-6)
    for passes, call in ((Passes(key_bytes=8), forward), (Passes(key_gradient_bytes=8), backward)):
        moved = 4096 * 4 * (8 / 2 * 128 + 8 / 2 * 64)  # per element of K: a half for each of both
        assert extra_s(passes, call) == pytest.approx(moved / 2.95e12 + 2 * LAUNCH_S, rel=1e-6)


sizes = st.sampled_from([128, 512, 4096])


@given(sizes, sizes, st.floats(1, 40), st.floats(1, 40))
def test_passes_take_their_bytes_over_the_memory_bandwidth(queries: int, keys: int, merged: float, cut: float) -> None:
    """H100 reaches 2.95 TB/s (BabelStream)."""
    moved = (cut if queries < keys else merged) * queries * 8 * 128
    found = extra_s(Passes(output_bytes=merged, slice_bytes=cut), shape("forward", queries, keys))
    assert found == pytest.approx(moved / 2.95e12 + LAUNCH_S, rel=1e-6)


@given(sizes, sizes, st.floats(1, 40))
def test_forward_keys_and_values_are_joined_one_after_the_other(queries: int, keys: int, per_key: float) -> None:
    passes = Passes(key_bytes=per_key)
    found = extra_s(passes, shape("forward", queries, keys))
    assert found == pytest.approx(per_key * keys * 4 * 128 / 2.95e12 + 2 * LAUNCH_S, rel=1e-6)
    assert extra_s(passes, shape("backward", queries, keys)) == 0


@given(sizes, sizes, st.floats(1, 40), st.floats(1, 40))
def test_backward_the_three_gradients_are_added(queries: int, keys: int, per_query: float, per_key: float) -> None:
    moved = per_query * queries * 8 * 128 + per_key * keys * 4 * 128
    passes = Passes(query_gradient_bytes=per_query, key_gradient_bytes=per_key)
    found = extra_s(passes, shape("backward", queries, keys))
    assert found == pytest.approx(moved / 2.95e12 + 3 * LAUNCH_S, rel=1e-6)
    assert extra_s(passes, shape("forward", queries, keys)) == 0


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
@pytest.mark.parametrize("passing", ["forward", "backward"])
def test_parts_add_up_and_name_the_merge(host: HostModel, passing: Passing) -> None:
    compute = with_host(with_kernel(load_machine("a100-8"), "flash-attention-2"), host).compute
    call = shape(passing, 4096, 8192)
    parts = dict(compute.parts(call))
    assert math.fsum(float(each) for each in parts.values()) == pytest.approx(float(compute.time_s(call)))
    assert (MERGE in parts) == bool(host.passes)
    doubled = compute.scaled(2.0)
    assert float(doubled.time_s(call)) == pytest.approx(float(compute.time_s(call)) / 2)


def test_without_a_host_model_and_at_a_rate_there_are_none() -> None:
    compute = load_machine("h100-8").compute
    assert isinstance(compute, KernelCompute)
    assert not compute.passes
    rated = Machine(full_mesh(4, 1e9, 1e-6), compute=ComputeRate(1e12))
    assert with_host(rated, load_stack("yunchang").host("usp:2x2")).compute == rated.compute


def test_passes_state_their_source() -> None:
    found = [host.passes for host in HOSTS]
    assert any(found)
    assert all("/" in each.source for each in found if each)
