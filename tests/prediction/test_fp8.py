"""fp8 is a what-if of the forward pass: fewer bytes, the compute time of bf16 as a marked assumption, nothing runs."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.sequence_parallel.calls import workload_of_shard
from sim.simulate import simulate
from tasp_lab.core.choices import Dtype
from tasp_lab.core.errors import ScheduleError, WorkloadError
from tasp_lab.machines.compute import AS_16_BIT, compute_of
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.parameters import Parameter
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.captions import assumptions
from tasp_lab.prediction.predict import predict
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import attention_passes
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import attention_names_on
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.conftest import Tell

MESH = full_mesh(4, Fraction(10**9), Fraction(0))
SEND_KEYS = (
    "ring-attention", "zigzag-ring-attention", "striped-ring-attention", "tasp", "kv-all-gather", "burst",
    "multi-ring-kv-all-gather", "direct-kv-all-gather", "trees-kv-all-gather", "double-ring:2x2",
)  # fmt: skip
"""Schedules whose forward pass sends keys and values alone."""
LAYER = ("--seq", "4Ki", "--heads", "8", "--mask", "causal", "--samples", "0")


@st.composite
def layers(draw: st.DrawFn) -> Workload:
    mask: Literal["full", "causal"] = draw(st.sampled_from(["full", "causal"]))
    window = draw(st.none() | st.integers(1, 80)) if mask == "causal" else None
    kv_heads = draw(st.sampled_from([4, 8, 16]))
    return Workload(draw(st.integers(4, 80)), heads=16, kv_heads=kv_heads, head_dim=64, mask=mask, window=window)


def forward(name: str, layer: Workload, dtype: Dtype) -> Schedule:
    # What travels is chosen by bytes, in which log-sum-exps weigh more beside fp8; given, it is the same for all.
    options = AttentionOptions(travels="keys") if name == "kv-and-q-rings" else AttentionOptions()
    (found,) = build_schedules(name, MESH, replace(layer, dtype=dtype), None, options)
    return found


@settings(max_examples=5)
@given(layers())
@pytest.mark.parametrize("name", attention_names_on(4))
def test_elements_take_half_the_bytes_and_float32_scalars_as_many(name: str, layer: Workload) -> None:
    """Bytes are elements times their width, and those of log-sum-exps, which float32 and bf16 together tell."""
    fp8, bf16, fp32 = (int(forward(name, layer, dtype).bytes_sent().sum()) for dtype in ("fp8", "bf16", "fp32"))
    scalars = 2 * bf16 - fp32
    assert 2 * (fp8 - scalars) == bf16 - scalars
    assert 0 <= scalars < fp8 or fp8 == 0
    if name in SEND_KEYS:
        assert scalars == 0
        assert 2 * fp8 == bf16


@settings(max_examples=3)
@given(layers())
@pytest.mark.parametrize("name", SEND_KEYS)
def test_what_only_sends_takes_half_the_time(name: str, layer: Workload) -> None:
    """Without latency, kernels and a library the time is bytes over bandwidth, in exact fractions."""
    fp8, bf16 = (simulate(forward(name, layer, dtype), Machine(MESH), "simpy").time_s for dtype in ("fp8", "bf16"))
    assert isinstance(bf16, (Fraction, int))
    assert 2 * fp8 == bf16


# Compute time


def document(tell: Tell, *arguments: str) -> dict[str, Any]:
    code, out, err = tell("predict", *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("machine", ["h100-8", "mi300x-8", "a10-4-pcie"])
def test_calls_take_as_long_as_in_bf16_which_is_called_assumed(machine: str) -> None:
    (fp8,), (bf16,) = (
        predict(machine, ["ring-attention"], Workload(16384, dtype=each, mask="full")) for each in ("fp8", "bf16")
    )
    assert isinstance(fp8, Answer)
    assert isinstance(bf16, Answer)
    assert fp8.compute_s == bf16.compute_s
    assert fp8.time_s <= bf16.time_s
    (line,) = assumptions(fp8)
    assert f"in fp8, forward, {AS_16_BIT} (" in line


@pytest.mark.parametrize("question", [("--dtype", "fp8"), ("--set", "layer.dtype=fp8")])
def test_the_assumption_stands_beside_the_result(tell: Tell, question: tuple[str, str]) -> None:
    code, out, _ = tell("predict", "h100-8", *LAYER, "--schedule", "tasp", *question)
    assert code == 0
    assert AS_16_BIT in " ".join(out.split())
    found = document(tell, "h100-8", *LAYER, "--schedule", "tasp", *question)
    compute = found["compute"]
    assert compute["dtype"] == "fp8"
    assert compute["forward"]["assumed"]
    assert compute["forward"]["source"].startswith(AS_16_BIT)


def test_compare_says_so_too(tell: Tell) -> None:
    code, out, _ = tell("compare", "h100-8", *LAYER, "--schedule", "tasp", "--schedule", "ulysses", "--dtype", "fp8")
    assert code == 0
    assert AS_16_BIT in " ".join(out.split())


def test_a_given_rate_is_no_assumption(tell: Tell) -> None:
    _, out, _ = tell("predict", "h100-8", *LAYER, "--schedule", "tasp", "--dtype", "fp8", "--compute", "timed:1e15")
    assert "assumed" not in out


def test_rates_of_constants_are_those_of_bf16_and_assumed() -> None:
    compute = compute_of((Parameter("compute_rate", 2e12, "a measurement"),))
    fp8, bf16 = (compute.rate(each, "forward") for each in ("fp8", "bf16"))
    assert (fp8.flops_per_s, fp8.source, fp8.assumed) == (bf16.flops_per_s, f"{AS_16_BIT} (a measurement)", True)


# What is refused


@pytest.mark.parametrize("name", attention_names_on(4))
def test_there_is_no_backward_pass(name: str) -> None:
    with pytest.raises(ScheduleError, match=r"^pass 'backward' in fp8, whose backward pass is not established"):
        build_schedules(name, MESH, Workload(64, heads=4, dtype="fp8", mask="full"), None, AttentionOptions("backward"))


def test_passes_from_python_have_no_backward_pass() -> None:
    with pytest.raises(ScheduleError, match=r"^dtype 'fp8' of a backward pass, expected the pass forward$"):
        attention_passes("tasp", full_mesh(2), Workload(64, heads=4, dtype="fp8", mask="full"))


@pytest.mark.parametrize("fields", [{"kind": "linear"}, {"kind": "hybrid", "layers": "LS"}])
def test_linear_attention_has_no_fp8(fields: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match=f"^dtype 'fp8' of {fields['kind']} attention, expected softmax attention$"):
        Workload(64, heads=4, dtype="fp8", **fields)


def test_the_runtime_takes_no_tensors_of_8_bits() -> None:
    tensors = [torch.zeros(1, 8, 2, 16).to(torch.float8_e4m3fn) for _ in range(3)]
    with pytest.raises(WorkloadError, match=r"^q is torch.float8_e4m3fn, which is not supported, expected one of"):
        workload_of_shard(*tensors, "full", None, False)
