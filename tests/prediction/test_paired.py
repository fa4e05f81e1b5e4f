"""Errors of ratios: probabilities and expected regrets follow from the errors that two schedules do not share."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy import stats

import experiments.accuracy
from experiments.accuracy.paired import Rows, expected_losses, fit, fit_layout, fit_scale, fit_shape, left_out, spreads
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.compute import with_kernel
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.inputs import with_compute
from tasp_lab.prediction.paired import (
    FREEDOM,
    PairedErrors,
    Rival,
    Setting,
    below_t,
    is_measured,
    paired_errors,
    quantile_t,
    setting_of,
)

ERRORS = PairedErrors(own=0.06, family=0.05, exposed=0.3, steps=0.05, links_alone=4.0, pairs=0, sources=0)
SETTINGS: tuple[Setting, ...] = ("exact", "library", "links alone")
settings = st.sampled_from(SETTINGS)
names = st.sampled_from(["zigzag-ring-attention", "tasp", "ulysses", "usp:2x4", "usp:4x2"])
rivals = st.builds(Rival, names, st.floats(1e-6, 10), st.floats(0, 1), st.integers(1, 64))


@given(st.floats(-30, 30))
def test_students_t_is_that_of_scipy(value: float) -> None:
    assert below_t(value) == pytest.approx(stats.t.cdf(value, FREEDOM), abs=1e-12)


@given(st.floats(0.001, 0.999))
def test_the_quantile_is_the_inverse(share: float) -> None:
    assert below_t(quantile_t(share)) == pytest.approx(share, abs=1e-9)


@given(rivals, rivals, settings)
def test_the_probabilities_of_both_orders_add_up_to_one(one: Rival, two: Rival, setting: Setting) -> None:
    assert ERRORS.first_is_faster(one, two, setting) + ERRORS.first_is_faster(two, one, setting) == pytest.approx(1)


@given(rivals, st.floats(1.0, 3.0), st.floats(1.0, 3.0), settings)
def test_a_larger_lead_is_surer(one: Rival, lead: float, more: float, setting: Setting) -> None:
    near, far = (one._replace(time_s=one.time_s * factor) for factor in (lead, lead * more))
    assert ERRORS.first_is_faster(one, near, setting) <= ERRORS.first_is_faster(one, far, setting) + 1e-12


@given(rivals, rivals)
def test_the_network_matters_only_where_exposed_shares_differ(one: Rival, two: Rival) -> None:
    same = two._replace(exposed_share=one.exposed_share)
    without = replace(ERRORS, exposed=0.0)
    assert ERRORS.spread(one, same, "library") == pytest.approx(without.spread(one, same, "library"))


@given(st.floats(0.5, 2), st.floats(0, 1))
def test_members_of_one_family_err_alike(time_s: float, share: float) -> None:
    member, other, stranger = (Rival(name, time_s, share) for name in ("usp:2x4", "usp:4x2", "ulysses"))
    assert ERRORS.spread(member, other, "library") == pytest.approx(ERRORS.own)
    assert ERRORS.spread(member, stranger, "library") == pytest.approx(math.hypot(ERRORS.own, ERRORS.family))
    assert ERRORS.spread(member, member, "library") == 0
    # a tie within a family has less to lose than one between families, and a schedule ties with itself
    within, between, alone = (
        ERRORS.expected_regrets([member, each], "library")[0] for each in (other, stranger, member)
    )
    assert alone == 0 < within < between


@given(st.lists(rivals, min_size=1, max_size=8), settings)
def test_someone_is_the_fastest_in_each_sample(found: list[Rival], setting: Setting) -> None:
    relative = ERRORS.relative_times(found, setting)
    assert relative.min(axis=1) == pytest.approx(1.0)
    assert (ERRORS.expected_regrets(found, setting) >= -1e-12).all()


@given(st.lists(rivals, min_size=1, max_size=8))
def test_exact_times_have_their_own_regret(found: list[Rival]) -> None:
    least = min(each.time_s for each in found)
    expected = [each.time_s / least - 1 for each in found]
    assert ERRORS.expected_regrets(found, "exact") == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.lists(rivals, min_size=1, max_size=8), st.floats(0.01, 100), settings)
def test_units_of_time_change_nothing(found: list[Rival], factor: float, setting: Setting) -> None:
    scaled = [each._replace(time_s=each.time_s * factor) for each in found]
    assert ERRORS.expected_regrets(scaled, setting) == pytest.approx(
        ERRORS.expected_regrets(found, setting), rel=1e-6, abs=1e-9
    )


def test_the_samples_agree_with_the_closed_form() -> None:
    one, two = Rival("tasp", 1.0, 0.1, 8), Rival("ulysses", 1.05, 0.3, 2)
    logs = np.log(ERRORS.relative_times([one, two], "library"))
    assert (logs[:, 0] == 0).mean() == pytest.approx(ERRORS.first_is_faster(one, two, "library"), abs=0.02)


def test_the_interval_of_a_ratio_holds_its_share() -> None:
    one, two = Rival("tasp", 1.0, 0.0), Rival("ulysses", 1.3, 0.2)
    low, high = ERRORS.ratio(one, two, "library")
    assert math.sqrt(low * high) == pytest.approx(1 / 1.3)
    logs = np.log(ERRORS.relative_times([one, two], "library"))
    ratios = np.exp(logs[:, 0] - logs[:, 1])
    assert ((ratios > low) & (ratios < high)).mean() == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(
    ("machine", "setting"),
    [("full-mesh:4", "exact"), ("h100-8", "library"), ("h100-2x8", "library"), ("l20-8-pcie", "links alone")],
)
def test_the_setting_is_that_of_the_machine(machine: str, setting: Setting) -> None:
    assert setting_of(load_machine(machine)) == setting


def test_an_unknown_source_leaves_out_nothing() -> None:
    assert paired_errors("of nobody") == paired_errors()


def _rows(predicted: np.ndarray, source: np.ndarray, **columns: np.ndarray) -> Rows:
    """Pairs of one family that are predicted exactly, but for some columns; each source has a stack of its own."""
    zero = np.zeros(len(source))
    stacks, layouts = np.stack([source, source], axis=1), np.char.add(source, " kernel usp forward")
    rows = Rows(
        predicted, predicted, zero + 1, zero, zero, zero, np.repeat("library", len(source)), source, stacks, layouts
    )
    return rows._replace(**columns)


def test_a_fit_finds_errors_that_were_planted() -> None:
    generator, sources = np.random.default_rng(1), np.repeat(np.array(["a", "b", "c", "d"]), 400)
    predicted, exposed = generator.normal(0, 0.3, len(sources)), generator.normal(0, 0.1, len(sources))
    steps, families = generator.normal(0, 1, len(sources)), generator.integers(0, 2, len(sources))
    rows = _rows(predicted, sources, families=families, exposed=exposed, steps=steps)
    noise = spreads(ERRORS, rows) * generator.standard_t(FREEDOM, len(sources))
    measured = rows._replace(measured=predicted + noise)
    shape = fit_shape(measured)
    assert shape.own == pytest.approx(ERRORS.own, rel=0.2)
    assert shape.family == pytest.approx(ERRORS.family, rel=0.3)
    assert shape.exposed == pytest.approx(ERRORS.exposed, rel=0.3)
    assert shape.steps == pytest.approx(ERRORS.steps, rel=0.2)
    found, parts = fit(measured), left_out(measured)
    assert (found.pairs, found.sources) == (len(sources), 4)
    assert found.own == pytest.approx(fit_scale(parts) * shape.own, rel=1e-3)
    # the errors are the same in all sources, so what is expected of a new one is neither more nor less
    assert fit_scale(parts) == pytest.approx(1, abs=0.15)
    assert fit_layout(parts, 1.0) == pytest.approx(ERRORS.family, rel=0.3)
    assert found.has_measured(["a kernel usp forward"])
    assert found.has_measured(["kernel usp forward"])
    assert not found.has_measured(["kernel usp forward", "kernel usp backward"])


def test_the_error_of_stacks_that_were_left_out_is_found_where_each_has_its_own() -> None:
    """Families of a stack are off together in all of its pairs; the error of a ratio is what stacks differ by."""
    generator, sources = np.random.default_rng(3), np.repeat(np.array([f"s{number}" for number in range(40)]), 10)
    predicted, families = generator.normal(0, 0.1, len(sources)), np.ones(len(sources))
    of_stack = np.repeat(0.12 * generator.standard_t(FREEDOM, 40), 10)
    rows = _rows(predicted, sources, families=families, measured=predicted + of_stack)
    small = replace(ERRORS, own=1e-3)
    parts = [part._replace(shape=small) for part in left_out(rows)]
    assert fit_layout(parts, 1.0) == pytest.approx(0.12, rel=0.25)


def test_losses_that_are_expected_are_those_of_samples() -> None:
    samples = 0.1 * np.random.default_rng(4).standard_t(FREEDOM, 400_000)
    leads = np.array([0.0, 0.05, 0.3])
    found = expected_losses(leads, np.full(3, 0.1))
    assert found == pytest.approx([np.maximum(samples - lead, 0).mean() for lead in leads], rel=0.03)


def test_a_source_is_left_out_with_its_stacks() -> None:
    """The second source measured stacks of the first one, too: none of these pairs may tell about it."""
    sources = np.array(["a", "b", "b", "c"])
    stacks = np.array([["x", "x"], ["x", "y"], ["z", "z"], ["w", "w"]])
    rows = _rows(np.zeros(4), sources, stacks=stacks)
    assert rows.without("a").stacks.tolist() == [["z", "z"], ["w", "w"]]
    assert rows.without("b").source.tolist() == ["c"]


def test_a_scale_that_breaks_its_promise_is_not_taken() -> None:
    generator, sources = np.random.default_rng(2), np.repeat(np.array(["a", "b", "c"]), 300)
    predicted = generator.normal(0, 0.1, len(sources))
    # in one source the order is drawn, so every call of it is right half of the time
    measured = np.where(sources == "c", generator.normal(0, 0.1, len(sources)), predicted)
    exact = _rows(predicted, sources, measured=predicted * 1.001)
    assert fit_scale(left_out(_rows(predicted, sources, measured=measured))) > fit_scale(left_out(exact))


def test_a_schedule_that_nobody_measured_has_a_larger_error() -> None:
    errors = replace(ERRORS, layout=0.2)
    known, other = Rival("ulysses", 1.0, 0.0), Rival("tasp", 1.0, 0.0)
    new, relative = other._replace(measured=False), Rival("zigzag-ring-attention", 1.0, 0.0, measured=False)
    # half of the variance of a ratio is that of each schedule
    mixed = math.sqrt(errors.own**2 + (errors.family**2 + errors.layout**2) / 2)
    assert errors.spread(known, other, "library") == pytest.approx(math.hypot(errors.own, errors.family))
    assert errors.spread(known, new, "library") == pytest.approx(mixed)
    # what a family does is the same for its members
    assert errors.spread(new, relative, "library") == pytest.approx(errors.own)
    assert errors.expected_regrets([known, new], "library")[0] > errors.expected_regrets([known, other], "library")[0]
    assert errors.margin("library") > ERRORS.margin("library")


def test_samples_of_unmeasured_schedules_agree_with_the_closed_form() -> None:
    errors = replace(ERRORS, layout=0.2)
    one, two = Rival("tasp", 1.0, 0.1, 8), Rival("ulysses", 1.1, 0.3, 2, measured=False)
    logs = np.log(errors.relative_times([one, two], "library"))
    assert (logs[:, 0] == 0).mean() == pytest.approx(errors.first_is_faster(one, two, "library"), abs=0.02)


def test_layers_of_a_stack_with_another_kernel_were_not_measured() -> None:
    """MagiAttention's baselines were measured with FlashAttention-3 on H100, not with cuDNN; Megatron not at all."""
    h100 = load_machine("h100-8")
    measured = {
        (kernel, stack): is_measured("ulysses", replace_kernel(h100, kernel, stack), "both")
        for kernel in ("flash-attention-3", "cudnn")
        for stack in ("", "magi-baselines", "megatron")
    }
    assert [named for named, is_one in measured.items() if is_one] == [
        ("flash-attention-3", ""), ("flash-attention-3", "magi-baselines"),
    ]  # fmt: skip


def replace_kernel(machine: Machine, kernel: str, stack: str) -> Machine:
    return dataclasses.replace(with_kernel(with_compute(machine), kernel), stack=stack)


def test_stacks_that_were_left_out_keep_the_promises() -> None:
    """The committed page, whose errors are fitted without all stacks of a source."""
    lines = (Path(experiments.accuracy.__path__[0]) / "decisions.md").read_text().splitlines()
    titles, _, *rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")
    ]
    found = {(row[0], row[1]): dict(zip(titles, row, strict=True)) for row in rows}
    modelled = found["all", "library"]
    assert 0.5 <= float(modelled["expected over actual"]) <= 2
    for (_, links), row in found.items():
        if links == "library":
            called = round(float(row["pairs"]) * float(row["called at 95 %"].rstrip("%")) / 100)
            right = round(called * float(row["of these right"].rstrip("%")) / 100)
            assert right >= 0.93 * called - 1  # of 12 calls one wrong one is 92 %
