"""Intervals: the same seed gives the same one, they hold the prediction, wider constants never make a narrower one."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.simulate import simulate
from tasp_lab import Workload, compare, predict
from tasp_lab.core.errors import QuantityError
from tasp_lab.core.units import format_time
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.compute import ASSUMED_COMPUTE, KernelCompute
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.parameters import Parameters
from tasp_lab.machines.sampling import Sampling, kernel_samples, machine_samples
from tasp_lab.measure.inputs import left_out_with
from tasp_lab.measure.readers.table import parse_table
from tasp_lab.prediction.columns import fields_of, view_of
from tasp_lab.prediction.interval import Interval, quantile
from tasp_lab.prediction.residuals import Regime, groups, residual_of
from tasp_lab.prediction.uncertainty import Uncertainty
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.collectives.point_to_point import send_recv
from tasp_lab.topology.builders import full_mesh

INSIDE = Regime("collective", "intra", "large", "documented", "modelled")


@given(seed=st.integers(0, 2**32 - 1), samples=st.integers(1, 40))
@settings(max_examples=10, deadline=None)
def test_equal_seeds_give_equal_intervals_that_hold_the_prediction(seed: int, samples: int) -> None:
    one, two = (
        predict("h100-8", ["ring", "direct"], "8MiB", samples=samples, seed=seed).to_dict()["predictions"] for _ in "ab"
    )
    assert one == two
    for each in one:  # type: ignore[attr-defined]
        assert 0 < each["time_low_s"] <= each["time_s"] <= each["time_high_s"]


def test_another_seed_gives_another_interval() -> None:
    ends = [predict("h100-8", "direct", "8MiB", seed=seed)[0].time_high_s for seed in (0, 1)]
    assert ends[0] != ends[1]


def test_no_samples_no_interval() -> None:
    found = predict("h100-8", "ring", "8MiB", samples=0)[0]
    assert (found.time_low_s, found.time_high_s, found.interval) == (None, None, None)


def test_samples_leave_exact_times_exact() -> None:
    mesh = full_mesh(4, Fraction(50 * 10**9), Fraction(1, 10**6))
    times = [predict(mesh, "ring", "1MiB", samples=samples)[0].time_s for samples in (0, 32)]
    assert times[0] == times[1] == 3 * (Fraction(1, 10**6) + Fraction(2**20, 50 * 10**9))
    assert isinstance(times[1], Fraction)


@given(width=st.floats(0.01, 0.4), wider=st.floats(1.0, 2.0))
@settings(max_examples=15, deadline=None)
def test_a_wider_constant_never_makes_the_interval_of_one_message_narrower(width: float, wider: float) -> None:
    """One message on a quiet machine: launch + hop + bytes / rate, monotone in each constant."""
    found = []
    for share in (width, width * wider):
        machine = _with_interval(load_machine("h100-2"), "message_launch", share)
        samples = machine_samples(machine, Sampling(32)).machines
        times = Uncertainty(machine, Sampling(32)).samples_s([send_recv(machine.topology, 8)])[0]
        assert len(samples) == len(times) == 32
        found.append(float(np.quantile(times, 0.95) - np.quantile(times, 0.05)))
    assert found[1] >= found[0] * (1 - 1e-9)


def _with_interval(machine: Machine, name: str, share: float) -> Machine:
    """The machine with one uncertain constant."""
    changed = []
    for each in machine.parameters.values():
        width = share if each.name == name else 0.0
        changed.append(replace(each, low=each.number * (1 - width), high=each.number * (1 + width)))
    return replace(machine, parameters=Parameters(changed))


def test_constants_that_depend_on_another_follow_it() -> None:
    """With a line rate of a stated interval, payloads and ring rates keep their share of it."""
    machine = load_machine("h100-8")
    exact = {each.name: replace(each, low=each.number, high=each.number) for each in machine.parameters.values()}
    exact["link_bandwidth"] = replace(exact["link_bandwidth"], low=400e9, high=500e9)
    uncertain = replace(machine, parameters=Parameters(exact.values()))
    for sample in machine_samples(uncertain, Sampling(8)).machines:
        line = float(sample.topology.listed_links()[0].bandwidth_bytes_per_s)
        medium = sample.comm_library.media[0]  # type: ignore[attr-defined]
        assert medium.line_bytes_per_s == pytest.approx(line)
        assert medium.payload_bytes_per_s / line == pytest.approx(370.8 / 450)
        assert line != 450e9


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=9), st.floats(0.01, 2), st.floats(0.02, 0.98))
def test_the_quantile_of_a_mixture_has_that_share_below_it(centres: list[float], spread: float, share: float) -> None:
    value = quantile(centres, spread, share)
    below = np.mean([math.erfc((centre - value) / spread / math.sqrt(2)) / 2 for centre in centres])
    assert below == pytest.approx(share, abs=1e-6)


def test_what_two_schedules_share_cancels() -> None:
    """One time is twice another one sample by sample: their ratio is sure, however wide they are."""
    residual = residual_of(INSIDE)
    wide = np.exp(np.linspace(-1, 1, 9))
    one = Interval(1.0, wide, residual)
    low, middle, high = one.over(Interval(0.5, wide / 2, residual))
    assert low < middle < high
    assert middle == pytest.approx(2)
    assert high / low < one.high_s / one.low_s


def test_residuals_without_a_source_have_none_of_its_rows() -> None:
    key = max({each.key for each in groups()}, key=lambda key: sum(each.rows for each in groups() if each.key == key))
    everything = {regime: residual_of(regime).rows for regime in {each.regime for each in groups()}}
    for regime, rows in everything.items():
        left = sum(each.rows for each in groups() if each.regime == regime and each.key != key)
        assert residual_of(regime, key).rows == left or left == 0
        assert rows == sum(each.rows for each in groups() if each.regime == regime)


def test_a_cloud_is_known_to_be_less_certain() -> None:
    """The same nodes with a documented network and with that of a cloud."""
    machine = load_machine("h100-2x8")
    schedule = send_recv(machine.topology, 2**30)
    time_s = float(simulate(schedule, machine).time_s)
    widths = []
    for network in ("documented", "cloud"):
        found = Uncertainty(replace(machine, network=network), Sampling()).interval(schedule, time_s)  # type: ignore[arg-type]
        assert found is not None
        widths.append(found.high_s / found.low_s)
    assert widths[1] > 1.25 * widths[0]
    assert load_machine("b200-2x8").network == "cloud"


def test_a_comparison_has_the_chance_of_the_first() -> None:
    found = compare(
        "h100-8", Workload(65536, heads=64, kv_heads=8, mask="causal"), ["tasp", "ulysses", "ring-attention"]
    )
    rows = found.to_dict()["results"]
    assert rows[0]["first_is_faster"] is None  # type: ignore[index]
    chances = [each.first_is_faster for each in found.candidates[1:]]
    assert all(chance is not None and 0.5 <= chance <= 1 for chance in chances)
    assert chances[0] <= chances[1]  # type: ignore[operator]


@pytest.mark.parametrize(("samples", "seed"), [(-1, 0), (1.5, 0), (True, 0), (8, -1), (8, 2**32), (8, "x"), (10**6, 0)])
def test_samples_and_seeds_are_whole_numbers(samples: object, seed: object) -> None:
    with pytest.raises(QuantityError, match="expected a whole number"):
        Sampling(samples, seed)  # type: ignore[arg-type]


def test_a_table_is_judged_without_its_provider_or_source() -> None:
    head = "# profile: b200-2x8\n# collective: all_gather\n# ranks: 16\n# source: https://a.org/b/c/d @ 1 e.md\n"
    assert left_out_with(parse_table(f"{head}size_B,time_us\n1024,1\n", "t")) == "a.org/b/c"
    assert left_out_with(parse_table(f"# provider: P\n{head}size_B,time_us\n1024,1\n", "t")) == "P"


def _with_rate_interval(machine: Machine, share: float) -> Machine:
    """The machine with a kernel whose rates have this interval."""
    found = machine.compute
    assert isinstance(found, KernelCompute)
    changed = tuple(
        msgspec.structs.replace(
            each,
            rate=msgspec.structs.replace(
                each.rate, low=each.rate.value / (1 + share), high=each.rate.value * (1 + share)
            ),
        )
        for each in found.kernel.file.variants
    )
    file = msgspec.structs.replace(found.kernel.file, variants=changed)
    return replace(machine, compute=replace(found, kernel=replace(found.kernel, file=file)))


@settings(max_examples=5, deadline=None)
@given(st.floats(0.01, 0.5), st.floats(0.01, 0.4))
def test_a_wider_rate_of_a_kernel_never_makes_the_interval_of_a_layer_narrower(share: float, wider: float) -> None:
    """Of a layer that computing bounds; equal seeds give equal samples."""
    machine, layer = load_machine("h100-2"), Workload(65536, heads=16, mask="full")
    (schedule,) = build_schedules("ring-attention", machine.topology, layer, None, AttentionOptions())
    one, same, two = (
        Uncertainty(_with_rate_interval(machine, each), Sampling(8)).samples_s([schedule])[0]
        for each in (share, share, share + wider)
    )
    assert (one == same).all()
    assert np.ptp(one) > 0
    assert np.ptp(np.log(two)) > np.ptp(np.log(one))


def test_samples_of_a_kernel_follow_the_seed() -> None:
    found = load_machine("h100-2").compute
    assert isinstance(found, KernelCompute)
    rates = [
        [each.peak_rate("forward", 128) for each in kernel_samples(found.kernel, Sampling(8, seed))]
        for seed in (0, 0, 1)
    ]
    assert len(set(rates[0])) == 8
    assert rates[0] == rates[1] != rates[2]


def test_a_machine_without_kernel_and_rate_says_what_is_assumed_and_is_less_certain() -> None:
    known = load_machine("h100-2")
    unknown = replace(known, compute=ASSUMED_COMPUTE, parameters=Parameters())
    widths = [
        np.ptp(
            np.log(machine_samples(each, Sampling(8)).of_rate(each.compute.rate("bf16", "forward"), "bf16", "forward"))
        )
        for each in (known, unknown)
    ]
    assert unknown.compute.rate("bf16", "forward").source.startswith("assumed")
    assert widths[1] > 2 * widths[0]


IDEAL = ("torus:4x4", "full-mesh:4", "switch:6", "nodes:2x2")


@pytest.mark.parametrize("machine", IDEAL)
def test_ideal_links_are_exact(machine: str) -> None:
    """No machine was measured beside links that are only stated: an interval could not be of anything."""
    for found in (
        predict(machine, "ring", "8MiB")[0],
        predict(machine, "ring-attention", Workload(4096 * 24, mask="full"))[0],
        predict(machine, "ring-attention", Workload(4096 * 24, mask="full"), compute="timed:300TFLOP/s")[0],
    ):
        assert found.time_low_s == found.time_high_s == float(found.time_s)
        document = fields_of(found, view_of(found))["interval"]
        assert document == {
            "median_s": float(found.time_s), "regime": "ideal links: exact", "rows": 0, "machines": 0, "borrowed": None,
            "samples": 0,
        }  # fmt: skip
    text = str(predict(machine, "ring", "8MiB"))
    assert "interval" not in text
    assert text.count("ideal links: exact") == 1


@given(st.floats(1e-6, 10), st.lists(st.floats(0.5, 2.0), max_size=8), st.floats(0.5, 3.0), st.floats(0.0, 1.0))
def test_a_median_is_inside_and_half_of_the_runs_are_below(
    time_s: float, factors: list[float], middle: float, spread: float
) -> None:
    """A log-normal error without samples has its middle as median; with samples that of their mixture."""
    residual = replace(residual_of(INSIDE), middle=middle, spread=spread, constants=0.0)
    found = Interval(time_s, time_s * np.array(factors), residual)
    assert found.low_s <= found.median_s * (1 + 1e-9) <= found.high_s * (1 + 2e-9)
    if not factors:
        assert found.median_s == pytest.approx(time_s * middle)
        assert found.text.startswith(format_time(found.median_s, 3).partition(" ")[0])


def test_machines_keep_their_intervals() -> None:
    """A profile, a library over stated links, and a described machine with its accelerator stand for hardware."""
    for machine, library in (("h100-8", "auto"), ("torus:4x4", "gloo"), ("l20-8-pcie", "auto"), ("h100-8", "ideal")):
        found = predict(machine, "ring", "8MiB", library=library)[0]
        assert found.time_low_s is not None
        assert found.time_low_s < float(found.time_s) or float(found.time_s) < (found.time_high_s or 0.0)


def test_the_order_on_ideal_links_follows_from_exact_times() -> None:
    """A slower schedule is slower for sure, an equally fast one is as fast."""
    found = compare("torus:4x4", Workload(16 * 1024, mask="full")).candidates
    best = found[0].time_s
    for each in found[1:]:
        if each.applies:
            assert each.first_is_faster == (0.5 if each.time_s < best * (1 + 1e-9) else 1.0)


def test_kernel_rates_stay_uncertain_on_ideal_links() -> None:
    """Samples of the rate, or where a schedule is too large for them the errors of kernels; a given rate is exact."""
    links = full_mesh(4, Fraction(400 * 10**9), Fraction(1, 10**6))
    schedule = build_schedules("ring-attention", links, Workload(32768, mask="full"), None, AttentionOptions())[0]
    kernel = load_machine("h100-8").compute
    machine = Machine(links, compute=kernel)
    assert machine.has_ideal_links
    time_s = float(simulate(schedule, machine).time_s)
    sampled = Uncertainty(machine, Sampling(16)).interval(schedule, time_s)
    large = Uncertainty(machine, Sampling(16)).interval(schedule, time_s, transfers=10**9)
    assert sampled is not None
    assert large is not None
    assert len(sampled.samples_s) == 16
    assert sampled.residual.is_exact
    assert sampled.low_s < time_s < sampled.high_s
    assert not len(large.samples_s)
    assert large.residual.regime.work == "kernel"
