"""Kernels of accelerators in predictions: laws of times by shape, names, and what the output says of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.bounds.least import least_s
from sim.simulate import simulate
from tasp_lab.core.errors import ProfileError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.compute import KernelCompute, compute_on, with_kernel
from tasp_lab.machines.kernel_model import attention_kernel, catalogue, kernel_names
from tasp_lab.machines.kernel_model.constants import KernelFile, data_folder, read_kernel_file
from tasp_lab.machines.machine import ComputeRate, ComputeRates, Machine
from tasp_lab.machines.machine_file import topology_document
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.predict import predict
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.kernel_shapes import KernelShape, clip_band, pairs_in_band
from tasp_lab.workload.layer import Workload
from tests.conftest import Tell
from tests.support.systems import names_for

GPUS = ("a100", "h100", "b200", "mi300x")
PASSES: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
LAYER = ("--schedule", "zigzag-ring-attention", "--seq", "8Ki", "--heads", "8", "--mask", "causal")


@st.composite
def kernel_computes(draw: st.DrawFn) -> KernelCompute:
    """Any kernel of some GPUs, slowed as on an emulated fabric or not; all else at a rate."""
    gpu = draw(st.sampled_from(GPUS))
    kernel = attention_kernel(gpu, draw(st.sampled_from(kernel_names(gpu))))
    return KernelCompute(kernel, ComputeRate(draw(st.floats(1e12, 1e15)))).scaled(draw(st.sampled_from([1.0, 1e-3])))


@st.composite
def shapes(draw: st.DrawFn) -> KernelShape:
    queries, keys = draw(st.integers(1, 20_000)), draw(st.integers(1, 20_000))
    low, high = (int(each) for each in clip_band(draw(st.integers(-keys, 0)), queries, queries, keys))
    kv_heads, group, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.sampled_from([64, 128]))
    passing = draw(st.sampled_from(PASSES))
    flops = int(pairs_in_band(low, high, queries, keys)) * kv_heads * group * head_dim
    flops *= {"forward": 4, "backward": 10}[passing]
    heads = (kv_heads * group, kv_heads, head_dim)
    return KernelShape("attend", "softmax", passing, "bf16", 1, *heads, queries, keys, low, high, flops)


@st.composite
def layers(draw: st.DrawFn) -> Workload:
    mask: Literal["full", "causal"] = draw(st.sampled_from(["full", "causal"]))
    sequence, heads = draw(st.integers(4, 30_000)), draw(st.sampled_from([4, 8]))
    return Workload(sequence, heads=heads, kv_heads=4, head_dim=draw(st.sampled_from([64, 128])), mask=mask)


@given(kernel_computes(), shapes())
def test_parts_add_up_to_the_time_and_no_call_exceeds_the_rate(compute: KernelCompute, shape: KernelShape) -> None:
    parts, time_s = compute.parts(shape), float(compute.time_s(shape))
    assert math.fsum(seconds for _, seconds in parts) == pytest.approx(time_s, rel=1e-12)
    assert all(seconds > 0 for _, seconds in parts)
    rate = compute.rate("bf16", shape.passing, "softmax", shape.head_dim)
    assert time_s >= rate.flops_time_s(shape.flops) * (1 - 1e-12)
    assert rate.kernel == compute.kernel.name


@given(kernel_computes(), shapes(), st.floats(1e-4, 1e4))
def test_scaled_kernels_keep_their_ratios(compute: KernelCompute, shape: KernelShape, factor: float) -> None:
    """On an emulated fabric all calls are slower by one factor, those without a kernel too."""
    for each in (shape, shape._replace(dtype="fp32"), shape._replace(kind="linear")):
        assert compute.scaled(factor).time_s(each) == pytest.approx(float(compute.time_s(each)) / factor)


@settings(max_examples=30)
@given(st.data(), kernel_computes(), layers(), st.sampled_from(PASSES), st.sampled_from([1e7, 1e10, 1e13]))
def test_engines_agree_and_nothing_beats_the_bound(
    data: st.DataObject,
    compute: KernelCompute,
    layer: Workload,
    passing: Literal["forward", "backward"],
    bandwidth: float,
) -> None:
    """Whatever bounds a layer: kernels by shape, links, or launches of small calls."""
    mesh = full_mesh(4, bandwidth, 1e-6)
    machine = Machine(mesh, compute=compute)
    name = data.draw(names_for(layer, 4))
    (schedule,) = build_schedules(name, mesh, layer, None, AttentionOptions(passing))
    first, second = (simulate(schedule, machine, engine) for engine in ("simpy", "array"))
    assert float(first.time_s) == pytest.approx(float(second.time_s), rel=1e-9)
    assert 0 < least_s(schedule, machine) <= float(first.time_s) * (1 + 1e-12)


@settings(max_examples=10)
@given(kernel_computes(), st.sampled_from(PASSES), st.sampled_from(["lasp-2+ring-attention", "all-scan+tasp"]))
def test_no_hybrid_beats_its_bound(compute: KernelCompute, passing: Literal["forward", "backward"], name: str) -> None:
    layer = Workload(4096, heads=4, head_dim=64, mask="causal", kind="hybrid", layers="LS", decay="scalar")
    mesh = full_mesh(4, 1e11, 1e-6)
    machine = Machine(mesh, compute=compute)
    (schedule,) = build_schedules(name, mesh, layer, None, AttentionOptions(passing))
    first, second = (float(simulate(schedule, machine, engine).time_s) for engine in ("simpy", "array"))
    assert first == pytest.approx(second, rel=1e-9)
    assert 0 < least_s(schedule, machine) <= first * (1 + 1e-12)


def test_one_rank_takes_the_time_of_its_call_in_both_engines() -> None:
    """Nothing but one call: the prediction is that of the kernel, and the rate what it reaches."""
    machine = replace(load_machine("h100-8"), topology=full_mesh(1))
    layer = Workload(8192, heads=16, head_dim=128, mask="causal")
    shape = KernelShape("attend", "softmax", "forward", "bf16", 1, 16, 16, 128, 8192, 8192, 0, 8191, 0)
    (p,) = predict(machine, ["ring-attention"], layer)
    assert isinstance(p, Answer)
    assert p.time_s == p.compute_s == attention_kernel("h100", "cudnn").time_s(shape)
    assert p.compute_flops_per_s == p.flops / p.compute_s


# Names and files


def test_float32_and_linear_layers_have_rates() -> None:
    compute = load_machine("h100-8").compute
    assert isinstance(compute, KernelCompute)
    assert compute.rate("fp32", "forward") == compute.rest.rate("fp32", "forward")
    assert compute.rate("bf16", "forward", "linear") == compute.rest.rate("bf16", "forward")
    assert not compute.rate("bf16", "forward", "linear").kernel


def test_a_machine_file_that_states_a_rate_has_that_rate(tmp_path: Path) -> None:
    text = 'name = "mine"\naccelerator = "h100"\nexpression = "full-mesh:2"\nconstants = [\n' + "".join(
        f'    {{ name = "{name}", value = "{value}", source = "here" }},\n'
        for name, value in (("link_bandwidth", "50GB/s"), ("link_latency", "1us"))
    )
    (tmp_path / "kernel.toml").write_text(text + "]\n")
    stated = '    { name = "compute_rate", value = "1TFLOP/s", source = "here" },\n'
    (tmp_path / "rate.toml").write_text(text + stated + "]\n")
    kernel, rate = (load_machine(str(tmp_path / f"{each}.toml")) for each in ("kernel", "rate"))
    assert kernel.compute == load_machine("h100-8").compute
    assert isinstance(rate.compute, ComputeRates)
    assert isinstance(with_kernel(rate, "flash-attention-3").compute, KernelCompute)
    for machine in (kernel, rate):
        (tmp_path / "copy.json").write_text(json.dumps(topology_document(machine)))
        assert load_machine(str(tmp_path / "copy.json")).compute == machine.compute


# Output


def document(tell: Tell, *arguments: str) -> dict[str, Any]:
    code, out, err = tell(*arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_json_has_the_kernel_and_its_constants_with_their_sources(tell: Tell) -> None:
    two, three = (
        document(tell, "predict", "h100-8", *LAYER, "--kernel", kernel)
        for kernel in ("flash-attention-2", "flash-attention-3")
    )
    assert document(tell, "predict", "h100-8", *LAYER)["compute"]["forward"]["kernel"] == "cudnn"
    assert three["compute"]["forward"]["kernel"] == "flash-attention-3"
    assert three["predictions"][0]["compute_s"] < two["predictions"][0]["compute_s"]
    assert two["provenance"]["inputs_sha256"] != three["provenance"]["inputs_sha256"]
    constants = {each["name"]: each for each in three["provenance"]["constants"]}
    for name in ("h100 sms", "flash-attention-3 forward rate", "flash-attention-3 forward launch_s"):
        assert constants[name]["source"]
    assert constants["h100 sms"]["value"] == "132"


def test_compare_takes_a_kernel(tell: Tell) -> None:
    found = document(
        tell, "compare", "h100-8", "--seq", "8Ki", "--heads", "8", "--schedule", "ulysses", "--kernel", "cudnn"
    )
    names = [each["name"] for each in found["provenance"]["constants"]]
    assert "cudnn forward rate" in names


def test_an_explanation_splits_calls_into_their_parts(tell: Tell) -> None:
    found = document(tell, "predict", "h100-8", *LAYER, "--explain")
    path = {each["kind"]: each["seconds"] for each in found["predictions"][0]["explanation"]}
    assert {"compute", "tiles and waves", "kernel launch"} <= set(path)
    assert math.fsum(path.values()) == pytest.approx(found["predictions"][0]["time_s"])


def test_the_profile_lists_kernels_with_their_constants(tell: Tell) -> None:
    found = document(tell, "profile", "show", "h100-8")["kernels"]
    assert {each["name"] for each in found} == set(kernel_names("h100"))
    assert {each["name"] for each in found if each["default"]} == {"cudnn"}
    assert all(constant["source"] for each in found for constant in each["constants"])
    code, out, _ = tell("profile", "show", "h100-8")
    assert code == 0
    assert "flash-attention-3" in out


def test_a_machine_reads_the_file_of_its_own_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 has ten kernels; a prediction by the default one reads one file, also where that is named."""
    read = []

    def count(path: Path) -> KernelFile:
        read.append(path.stem)
        return read_kernel_file(path)

    monkeypatch.setattr(catalogue, "read_kernel_file", count)
    catalogue._kernel.cache_clear()
    parameters = load_machine("h100-8").parameters
    one, two = compute_on(parameters, "h100"), attention_kernel("h100", "cudnn")
    assert isinstance(one, KernelCompute)
    assert one.kernel is two
    assert read == ["cudnn"]


def test_a_constant_whose_source_is_not_in_the_file_is_refused(tmp_path: Path) -> None:
    text = (data_folder() / "h100" / "triton.toml").read_text()
    (tmp_path / "kernel.toml").write_text(text.replace('"s2"]', '"paper"]'))
    with pytest.raises(ProfileError, match=r"kernel.toml: no kernel file: unknown source 'paper', .*one of s1, s2"):
        read_kernel_file(tmp_path / "kernel.toml")
