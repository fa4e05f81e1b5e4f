"""How fast ranks compute attention: by machine, dtype and pass, and where each rate comes from."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.simulate import simulate
from tasp_lab.core.choices import WHAT_IF_DTYPE
from tasp_lab.core.errors import TaspLabError
from tasp_lab.core.units import format_flops
from tasp_lab.machines.catalogue import catalogue_names, load_machine
from tasp_lab.machines.compute import COMPUTE_RATES, accelerator_names, accelerator_parameters, compute_of
from tasp_lab.machines.machine import INSTANT, Compute, ComputeRate, ComputeRates, Machine
from tasp_lab.machines.machine_file import topology_document
from tasp_lab.machines.parameters import Parameter
from tasp_lab.machines.profile import load_profile, profile_names
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.inputs import with_compute
from tasp_lab.prediction.predict import predict
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.kernel_shapes import Passing
from tasp_lab.workload.layer import ELEMENT_BYTES, Workload
from tests.conftest import Command, Tell

DTYPES = ("bf16", "fp16", "fp32")
PASSES: tuple[Passing, ...] = ("forward", "backward")
LAYER = ("--schedule", "zigzag-ring-attention", "--seq", "1Ki", "--heads", "8", "--mask", "causal", "--samples", "0")


TENSOR_PEAKS = {
    "a10-4-pcie": 125e12,
    "a100": 312e12,
    "a100-8": 312e12,
    "a100_100g": 312e12,
    "a100_100g-2x8": 312e12,
    "a800": 312e12,
    "a800-8": 312e12,
    "ascend-910b-8": None,
    "ascend-910c-384": 752e12,
    "ascend-910c-8": 752e12,
    "b200": 2250e12,
    "b200-8": 2250e12,
    "b200_p6": 2250e12,
    "b200_p6-2x8": 2250e12,
    "b300": 2500e12,
    "b300-8": 2500e12,
    "dgx-1v": 125e12,
    "gaudi2-8": 432e12,
    "gaudi3-2x8": 1835e12,
    "gaudi3-4x8": 1835e12,
    "gaudi3-8": 1835e12,
    "gb200": 2500e12,
    "gb200-nvl72": 2500e12,
    "gb300": 2500e12,
    "gb300-2x1x4": 2500e12,
    "gb300-4x1x4": 2500e12,
    "gb300-nvl72": 2500e12,
    "gh200": 990e12,
    "h100": 989.4e12,
    "h100-2x8": 989.4e12,
    "h100-2x8-rails": 989.4e12,
    "h100-4x8": 989.4e12,
    "h100-8": 989.4e12,
    "h100_a3mega": 989.4e12,
    "h100_a3mega-2x8": 989.4e12,
    "h100_p5": 989.4e12,
    "h100_p5-2x8": 989.4e12,
    "h20": 148e12,
    "h20-8": 148e12,
    "h800": 989.4e12,
    "h800-8": 989.4e12,
    "h200": 989.4e12,
    "h200-8": 989.4e12,
    "mi300x": 1307.4e12,
    "mi300x-2x8": 1307.4e12,
    "mi300x-4x8": 1307.4e12,
    "mi300x-8": 1307.4e12,
    "mi325x": 1307.4e12,
    "mi325x-8": 1307.4e12,
    "mi355x": 2516.6e12,
    "mi355x-8": 2516.6e12,
    "l20-8-pcie": 119.5e12,
    "l20-8-pcie-switch": 119.5e12,
    "l40s-8-pcie": 362.05e12,
    "rtx-pro-6000-8-pcie": 503.8e12,
    "rtx4090-4-pcie": 165.2e12,
    "rtx4090d-8-pcie": 147.1e12,
    "tpu-v5p:4x4": 459e12,
    "tpu-v5p:4x4x4": 459e12,
    "tpu-v6e:4x4": 918e12,
    "trn2-16": 667e12,
    "trn2-64": 667e12,
}
"""Dense bf16 (A10, V100: fp16), as the makers' data sheets print it; None where none was found."""

MACHINES = sorted({*catalogue_names(), *profile_names()})


def machine_of(name: str) -> Machine:
    return load_machine(name) if name in catalogue_names() else load_profile(name).machine("1x2")


def rates_of(name: str) -> Compute:
    """The rates of a machine, which its kernels replace in 16 bit."""
    return compute_of(load_machine(name).parameters.values())


def document(tell: Tell, *arguments: str) -> dict[str, Any]:
    code, out, err = tell("predict", *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


# Data


def test_every_dtype_of_a_layer_is_looked_at() -> None:
    """fp8, whose rates are those of bf16, has tests of its own."""
    assert {*DTYPES, WHAT_IF_DTYPE} == set(ELEMENT_BYTES)


def test_every_machine_has_a_published_peak() -> None:
    assert set(TENSOR_PEAKS) == set(MACHINES)


@pytest.mark.parametrize(("name", "dtype", "passing"), list(product(MACHINES, DTYPES, PASSES)))
def test_a_rate_has_a_source_or_is_called_assumed(name: str, dtype: str, passing: str) -> None:
    rate = with_compute(machine_of(name)).compute.rate(dtype, passing)
    assert rate.flops_per_s is not None
    assert rate.source.strip()
    assert rate.assumed == rate.source.startswith("assumed")


@pytest.mark.parametrize(("name", "passing"), list(product(MACHINES, PASSES)))
def test_float32_is_no_faster_than_16_bits_and_both_are_below_the_peak(name: str, passing: str) -> None:
    compute, peak = with_compute(machine_of(name)).compute, TENSOR_PEAKS[name]
    fp32, fp16, bf16 = (compute.rate(dtype, passing).flops_per_s for dtype in ("fp32", "fp16", "bf16"))
    assert fp32 is not None
    assert bf16 is not None
    assert fp32 <= bf16 == fp16
    if peak is not None:
        assert peak / 10 < bf16 < peak


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("passing", PASSES)
def test_a_b200_is_no_slower_than_an_h100(dtype: str, passing: str) -> None:
    b200, h100 = (load_machine(name).compute.rate(dtype, passing).flops_per_s for name in ("b200-8", "h100-8"))
    assert b200 is not None
    assert h100 is not None
    assert b200 >= h100


@pytest.mark.parametrize(("name", "tflops"), [("h100-8", 327.9), ("h100-4x8", 327.9), ("mi300x-8", 328.6)])
def test_forward_rates_that_tables_were_made_with(name: str, tflops: float) -> None:
    rate = rates_of(name).rate("bf16", "forward")
    assert (rate.flops_per_s, rate.assumed) == (pytest.approx(tflops * 1e12, rel=1e-12), False)


@pytest.mark.parametrize(
    ("name", "flops", "seconds"),
    [
        # FlashAttention-2, batch 2, 16 heads of 128, 8192 positions, full mask: 9.460 ms (flash-attention pull 1791)
        ("h100-8", 10 * 2 * 16 * 8192**2 * 128, 9.460e-3),
        # one sequence of 8192, 32 heads of 128, causal: both passes less the forward one (ring-flash-attention README)
        ("a100-8", 10 * 32 * 8192**2 * 128 / 2, 10559.7e-6 - 2678.1e-6),
        # five calls, 326 heads of 128 in all, batch 2, 8192 positions, window of 4096: with the gradient 115.8 ms,
        # forward 24.0 ms (apple/axlearn, tpu_attention_benchmark.py)
        ("tpu-v5p:4x4", 10 * 2 * 326 * 128 * (4097 * 8192 - 4096 * 4097 // 2), 115.8e-3 - 24.0e-3),
    ],
)
def test_a_backward_rate_counts_flops_as_a_backward_pass_does(name: str, flops: float, seconds: float) -> None:
    """5/2 of the forward pass's 4 FLOPs per pair and element, as `AttentionTask.flops_per_pair`."""
    rate = rates_of(name).rate("bf16", "backward")
    assert rate.flops_per_s == pytest.approx(flops / seconds, rel=1e-3)


@pytest.mark.parametrize("name", sorted(accelerator_names()))
def test_an_accelerator_has_constants_of_compute_rates_and_multiprocessors_only(name: str) -> None:
    constants = accelerator_parameters(name)
    assert {constant.name for constant in constants} <= {*COMPUTE_RATES, "sms"}
    assert "compute_rate" in {constant.name for constant in constants}
    assert isinstance(compute_of(constants), ComputeRates)


def test_a_machine_and_its_family_compute_alike() -> None:
    for name in ("h100-8", "mi300x-8", "b200-8", "a100-8", "h200-8", "mi355x-8", "gb200-nvl72"):
        assert machine_of(name).compute == load_profile(name.partition("-")[0]).machine("1x2").compute


# What is missing


def constant(name: str, text: str) -> Parameter:
    return Parameter.parse(name, text, "a measurement")


def test_no_constant_no_rate() -> None:
    assert compute_of(()) == INSTANT


def test_what_a_file_does_not_say_is_that_of_the_nearest_kind_and_assumed() -> None:
    compute = compute_of((constant("compute_rate", "4e9"), constant("compute_rate_fp32", "1e9")))
    found = {(d, p): compute.rate(d, p) for d, p in product(DTYPES, PASSES)}
    assert {kind: rate.flops_per_s for kind, rate in found.items()} == {
        ("bf16", "forward"): 4e9, ("fp16", "forward"): 4e9, ("fp32", "forward"): 1e9,
        ("bf16", "backward"): 4e9, ("fp16", "backward"): 4e9, ("fp32", "backward"): 1e9,
    }  # fmt: skip
    assert {kind for kind, rate in found.items() if rate.assumed} == set(product(DTYPES, ["backward"]))
    assert all(rate.source.startswith("assumed") for rate in found.values() if rate.assumed)


def test_a_rate_of_every_kind_is_known_by_its_own_constant() -> None:
    values = dict(zip(COMPUTE_RATES, ("4e9", "3e9", "2e9", "1e9"), strict=True))
    compute = compute_of(tuple(constant(name, value) for name, value in values.items()))
    for name, (dtype, passing) in COMPUTE_RATES.items():
        rate = compute.rate(dtype, passing)
        assert (rate.flops_per_s, rate.source, rate.assumed) == (float(values[name]), "a measurement", False)


def test_a_machine_file_names_its_accelerator_and_may_state_a_rate_anew(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\naccelerator = "h100"\nexpression = "full-mesh:2"\nconstants = [\n'
        '    { name = "link_bandwidth", value = "50GB/s", source = "here" },\n'
        '    { name = "link_latency", value = "1us", source = "here" },\n'
        '    { name = "compute_rate", value = "1TFLOP/s", source = "here" },\n]\n'
    )
    machine = load_machine(str(path))
    assert machine.compute.rate("bf16", "forward") == ComputeRate(1e12, "here")
    assert machine.compute.rate("bf16", "backward") == rates_of("h100-8").rate("bf16", "backward")
    copy = tmp_path / "copy.json"
    copy.write_text(json.dumps(topology_document(machine)))
    assert load_machine(str(copy)).compute == machine.compute


def test_an_unknown_accelerator_is_answered_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\naccelerator = "h999"\nworld_size = 1\nlinks = []\n')
    with pytest.raises(TaspLabError, match=r"accelerator 'h999' is unknown: expected one of .*h100") as raised:
        load_machine(str(path))
    assert "\n" not in str(raised.value)


# Use


@given(st.fractions(1, 100, max_denominator=4), st.fractions(1, 100, max_denominator=4))
def test_each_pass_is_computed_at_its_own_rate(forward: Fraction, backward: Fraction) -> None:
    """With one rank there is nothing but computing, so a pass takes its FLOPs over its rate; a bound likewise."""
    rates = {("bf16", "forward"): ComputeRate(forward, "a"), ("bf16", "backward"): ComputeRate(backward, "b")}
    machine, layer = (
        Machine(full_mesh(1), compute=ComputeRates(rates)),
        Workload(sequence=6, head_dim=1, heads=1, mask="full"),
    )
    options = AttentionOptions(passes="both")
    found = predict(machine, ["ring-attention"], layer, options=options)
    one_way, back, both = (p for p in found if isinstance(p, Answer))
    pairs = 4 * 6**2
    assert (one_way.time_s, back.time_s) == (pairs / forward, pairs * Fraction(5, 2) / backward)
    assert (one_way.bound_s, back.bound_s) == (one_way.time_s, back.time_s)
    assert both.time_s == both.flops / Fraction(both.compute_flops_per_s or 0)
    for schedule, p in zip(
        build_schedules("ring-attention", machine.topology, layer, None, options), found, strict=False
    ):
        assert simulate(schedule, machine, "array").time_s == pytest.approx(float(p.time_s))


@given(st.fractions(1, 100), st.fractions(Fraction(1, 100), 1))
def test_scaled_rates_keep_their_ratios_and_what_is_assumed(rate: Fraction, scale: Fraction) -> None:
    both = ComputeRates(
        {("bf16", "forward"): ComputeRate(rate, "a"), ("bf16", "backward"): ComputeRate(3 * rate, "b", True)}
    )
    found = both.scaled(float(scale))
    for passing, times, assumed in (("forward", 1, False), ("backward", 3, True)):
        each = found.rate("bf16", passing)
        assert each.flops_per_s == pytest.approx(float(times * rate * scale))
        assert each.assumed is assumed
    assert INSTANT.scaled(float(scale)) == INSTANT


@pytest.mark.fabric
def test_an_emulated_machine_computes_each_pass_at_its_own_rate_times_the_scale(command: Command) -> None:
    layer = ("--schedule", "ring-attention", "--seq", "64", "--heads", "1", "--head-dim", "8", "--pass", "both")
    machine = load_machine("a10-4-pcie")
    done = command("validate", "a10-4-pcie", *layer, "--scale", "1e-4", "--repeat", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for passing in PASSES:
        rate = machine.compute.rate("bf16", passing, "softmax", 8)
        assert found["compute"][passing]["flops_per_s"] == pytest.approx(float(rate.flops_per_s or 0) * 1e-4)
        assert found["compute"][passing]["assumed"] is rate.assumed


@pytest.mark.parametrize("dtype", DTYPES)
def test_json_has_the_rate_of_each_pass_and_its_source(tell: Tell, dtype: str) -> None:
    found = document(tell, "h100-8", *LAYER, "--dtype", dtype, "--pass", "both")
    compute = load_machine("h100-8").compute
    assert found["compute"] == {"dtype": dtype} | {
        passing: {"flops_per_s": rate.flops_per_s, "source": rate.source, "assumed": rate.assumed}
        | ({"kernel": "cudnn"} if dtype != "fp32" else {})
        for passing in PASSES
        for rate in [compute.rate(dtype, passing)]
    }
    rows = {row["pass"]: row["compute_flops_per_s"] for row in found["predictions"]}
    for passing in PASSES:
        highest = found["compute"][passing]["flops_per_s"]
        assert rows[passing] == highest if dtype == "fp32" else 0 < rows[passing] < highest


def test_json_has_the_passes_that_were_asked_for(tell: Tell) -> None:
    assert set(document(tell, "h100-8", *LAYER)["compute"]) == {"dtype", "forward"}
    assert set(document(tell, "h100-8", *LAYER, "--pass", "backward")["compute"]) == {"dtype", "backward"}
    assert document(tell, "h100-8", "--schedule", "ring", "--shard-bytes", "1MiB")["compute"] is None


@pytest.mark.parametrize("name", ["h100-8", "b200-8", "a10-4-pcie", "gaudi3-8", "ascend-910b-8", "switch:8"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_table_says_what_is_assumed_and_only_that(tell: Tell, name: str, dtype: str) -> None:
    ranks = load_machine(name).topology.world_size
    layer = ("--schedule", "ring-attention", "--seq", str(ranks), "--heads", "1", "--dtype", dtype, "--pass", "both")
    code, out, err = tell("predict", name, *layer)
    assert code == 0, err
    rates = document(tell, name, *layer)["compute"]
    lines = [line for line in out.splitlines() if line.startswith("compute:")]
    assert len(lines) == len({(rates[p]["source"], rates[p]["flops_per_s"]) for p in PASSES if rates[p]["assumed"]})
    assert all("assumed" in line and dtype in line and "--compute timed:RATE" in line for line in lines)
    for passing in PASSES:
        if rates[passing]["assumed"]:
            assert any(passing in line and rates[passing]["source"] in line for line in lines)


def test_the_title_has_the_rate_of_each_pass(tell: Tell) -> None:
    out = " ".join(tell("predict", "h100-8", *LAYER, "--pass", "both", "--dtype", "fp32")[1].split())
    assert "8 ranks at 67 TFLOP/s" in out
    rates = [format_flops(load_machine("h100-8").compute.rate("bf16", each).flops_per_s or 0) for each in PASSES]
    out = " ".join(tell("predict", "h100-8", *LAYER, "--pass", "both")[1].split())
    assert f"8 ranks with cudnn, up to {rates[0]} forward and {rates[1]} backward" in out
    out = " ".join(tell("predict", "h100-8", *LAYER, "--pass", "both", "--compute", "timed:1TFLOP/s")[1].split())
    assert "8 ranks at 1 TFLOP/s" in out
    assert "backward at" not in out


@pytest.mark.parametrize("name", ["h100-8", "gaudi3-8", "switch:8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_given_rate_is_that_of_all_passes_and_is_not_assumed(tell: Tell, name: str, dtype: str) -> None:
    given_ = ("--dtype", dtype, "--pass", "both", "--compute", "timed:5TFLOP/s")
    found = document(tell, name, *LAYER, *given_)
    rate = {"flops_per_s": 5e12, "source": "given", "assumed": False}
    assert found["compute"] == {"dtype": dtype, "forward": rate, "backward": rate}
    assert "assumed" not in tell("predict", name, *LAYER, *given_)[1]


@pytest.mark.parametrize(
    "wrong", ["timed:", "timed:0", "timed:-1", "timed:300TFLOPS", "300TFLOP/s", "fast", "real", ""]
)
def test_a_wrong_compute_rate_is_answered_in_one_line(tell: Tell, wrong: str) -> None:
    code, out, err = tell("predict", "h100-8", *LAYER, "--compute", wrong)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert "compute" in err
