"""Checks of logs: verdicts of public logs, causes that are planted, and the laws of likelihoods."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasp_lab
from tasp_lab.core.errors import TableError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.measure.check import check
from tasp_lab.measure.check.causes import effects, effects_on
from tasp_lab.measure.check.diagnosis import diagnosis_of
from tasp_lab.measure.check.errors import Errors
from tasp_lab.measure.check.pairs import pairs_beside
from tasp_lab.measure.check.predictions import Predictions
from tasp_lab.measure.check.report import busbw
from tasp_lab.measure.profiles import machine_named
from tasp_lab.measure.readers import PairTable
from tasp_lab.prediction.predict import predict
from tasp_lab.prediction.residuals import Regime, residual_of
from tests.conftest import ROOT, Tell

LOGS = ROOT / "experiments" / "logs"
SIZES = tuple(2**power for power in range(16, 34, 2))
HEAD = """\
# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid  1 on node1 device  0 [0000:18:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  2 on node1 device  1 [0000:19:00] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
"""
ROW = "  {}  {}  float  sum  -1  {}  1.0  1.0  {}  {}  1.0  1.0  0\n"
END = "# Avg bus bandwidth    : 1\n"


@cache
def predictions(name: str, *collectives: str) -> Predictions:
    """The predictions of some collectives on a machine, with all of its effects."""
    return Predictions(machine_named(name), [(each, size) for each in collectives for size in SIZES])  # type: ignore[misc]


def public_logs() -> list[tuple[str, str, str]]:
    """Public logs of machines that have a name, with their verdict; the larger ones take seconds."""
    with (LOGS / "verdicts.csv").open() as file:
        rows = [(row["file"], row["machine"], row["verdict"]) for row in csv.DictReader(file)]
    chosen = ("05_", "06_", "11_", "12_", "21_", "23_", "24_", "25_", "31_", "33_", "37_", "50_", "51_")
    return [row for row in rows if row[0].startswith(chosen)]


@pytest.mark.parametrize(("file", "machine", "verdict"), public_logs())
def test_public_logs_have_the_verdict_of_their_threads(file: str, machine: str, verdict: str) -> None:
    assert check(LOGS / file, machine=machine).verdict == verdict


@pytest.mark.parametrize(("file", "cause"), [("37_a100_4_ar_p2p_off.log", "P2P is off"),
                                             ("33_h100_2x8_a2a_2409_acs.log", "ACS or the IOMMU"),
                                             ("51_h100_3x8_ar_1453_rack.log", "fabric between racks")])  # fmt: skip
def test_causes_that_maintainers_found_come_first(file: str, cause: str) -> None:
    found = check(LOGS / file)
    assert found.diagnosis is not None
    assert cause in found.diagnosis.findings[0].cause.name
    assert cause in found.to_dict()["text"][1]  # type: ignore[index]


@pytest.mark.parametrize("name", ["h100-8", "h100-2x8", "mi300x-8", "mi300x-2x8", "l20-8-pcie"])
def test_a_machine_as_predicted_is_healthy_and_probabilities_add_up(name: str) -> None:
    own = predictions(name, "all_gather")
    found = diagnosis_of(own, own.expected_s.tolist())
    assert not found.is_slow
    assert found.healthy > 0.5
    assert found.healthy + sum(each.probability for each in found.findings) == pytest.approx(1)
    assert (found.low_s < found.expected_s).all()
    assert (found.expected_s < found.high_s).all()


@pytest.mark.parametrize("name", ["h100-8", "h100-2x8", "mi300x-2x8"])
def test_each_effect_is_found_where_it_is_as_severe_as_it_may_be(name: str) -> None:
    own = predictions(name, "all_gather", "all_reduce", "alltoall")
    for effect in effects_on(own.machine):
        variants = [each for each in own.variants if each.effect is effect]
        worst = max(variants, key=lambda each: float(np.log(each.times_s / own.healthy_s).sum()), default=None)
        if worst is not None and float((worst.times_s / own.healthy_s).max()) > 3:
            found = diagnosis_of(own, (worst.times_s * own.middle).tolist())
            named = list(dict.fromkeys(each.effect.name for each in found.findings))[:2]
            assert found.is_slow, effect.name
            assert effect.name in named, (effect.name, named)


def test_every_effect_has_a_remedy_a_source_and_a_place_for_its_severity() -> None:
    names = [each.name for each in effects()]
    assert len(set(names)) == len(names)
    for effect in effects():
        assert effect.causes
        assert effect.separate
        assert bool(effect.severities) == any("{}" in text for text in effect.set)
        for cause in effect.causes:
            assert cause.remedy
            assert cause.source
            assert not effect.severities or any(cause.may_be(each) for each in effect.severities), cause.name


@given(st.sampled_from(["h100-2x8", "mi300x-2x8"]), st.sampled_from(["slow NICs", "sockets", "slow launches"]))
@settings(max_examples=10)
def test_what_takes_longer_never_makes_calls_faster(name: str, effect: str) -> None:
    own = predictions(name, "all_gather")
    for variant in own.variants:
        if variant.effect.name == effect:
            assert (variant.times_s >= own.healthy_s * (1 - 1e-9)).all(), variant.severity


@given(st.floats(1.0, 8.0), st.floats(1.01, 2.0))
@settings(max_examples=20)
def test_the_slower_all_calls_are_the_less_likely_is_health(factor: float, more: float) -> None:
    own = predictions("h100-8", "all_gather", "all_reduce", "alltoall")
    one, other = (diagnosis_of(own, (own.expected_s * each).tolist()) for each in (factor, factor * more))
    assert other.healthy <= one.healthy + 1e-9


@given(st.permutations(range(len(SIZES))))
@settings(max_examples=10)
def test_the_order_of_rows_does_not_matter(order: Sequence[int]) -> None:
    calls = [("all_gather", size) for size in SIZES]
    one = predictions("h100-8", "all_gather")
    other = Predictions(one.machine, [calls[place] for place in order])  # type: ignore[misc]
    times_s = one.expected_s * np.linspace(1, 3, len(SIZES))
    first, second = diagnosis_of(one, times_s.tolist()), diagnosis_of(other, times_s[list(order)].tolist())
    assert second.healthy == pytest.approx(first.healthy)
    assert [each.cause.name for each in second.findings[:3]] == [each.cause.name for each in first.findings[:3]]


@given(
    st.lists(st.integers(10, 34), min_size=1, max_size=24, unique=True),
    st.lists(st.sampled_from(["small", "middle", "large"]), min_size=24, max_size=24),
    st.sampled_from(["documented", "cloud"]),
)
def test_errors_have_a_distribution_for_any_sizes_and_classes(
    powers: list[int], classes: list[str], network: str
) -> None:
    residuals = [residual_of(Regime("collective", "inter", size, network, "modelled")) for size in classes]  # type: ignore[arg-type]
    errors = Errors(
        ["all_reduce"] * len(powers),
        [2**power for power in powers],
        np.full(len(powers), 1e-4),
        residuals[: len(powers)],
    )
    assert np.isfinite(errors.log_density(np.zeros(len(powers))))
    assert errors.draw(np.random.default_rng(1), 3).shape == (3, len(powers))


def test_a_step_is_less_likely_than_a_factor() -> None:
    own = predictions("h100-2x8", "all_gather")
    large = len(own.chosen) // 2
    errors = np.zeros(len(own.chosen))
    errors[large:] = 0.3
    assert own.errors.log_density(errors) < own.errors.log_density(np.full(len(errors), 0.3))


def test_expected_times_are_predictions_times_the_middle_of_their_class() -> None:
    (row,) = tasp_lab.expected("h100-8", collectives=["all_gather"], sizes=[2**28]).rows
    (answer,) = predict("h100-8", "library-ring", 2**25)
    own = predictions("h100-8", "all_gather")
    middle = own.middle[own.calls.index(("all_gather", 2**28))]
    assert row["expected_s"] == pytest.approx(float(answer.time_s) * middle)
    assert row["busbw_bytes_per_s"] == pytest.approx(busbw("all_gather", 8, 2**28, row["expected_s"]))


def test_pairs_name_the_gpu_that_slow_ones_share() -> None:
    machine = load_machine("h100-8")
    rates = np.full((8, 8), 370e9)
    assert not pairs_beside(machine, PairTable("t", "unidirectional", rates)).text
    rates[5, :] = rates[:, 5] = 180e9
    assert "all pairs with GPU 5 are slow" in pairs_beside(machine, PairTable("t", "unidirectional", rates)).text
    found = pairs_beside(machine, PairTable("t", "unidirectional", np.full((8, 8), 20e9)))
    assert found.effect is not None
    assert found.effect.name == "host memory"


def test_a_matrix_of_pairs_is_checked_by_the_command(tell: Tell, tmp_path: Path) -> None:
    for slow, code, words in ((376.5, 0, "Healthy: on h100-8 pairs reach 102%"), (120.0, 1, "1 of 56 pairs is slow")):
        rates = np.full((8, 8), 376.5)
        rates[2, 5] = slow
        rows = [f"{number:6d} " + " ".join(f"{rate:.2f}" for rate in row) for number, row in enumerate(rates)]
        head = "Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)\n   D\\D 0 1 2 3 4 5 6 7\n"
        (tmp_path / "p2p.log").write_text(head + "\n".join(rows) + "\n")
        found = tell("check", str(tmp_path / "p2p.log"), "--machine", "h100", "--plot", str(tmp_path / "p2p.png"))
        assert found[0] == code, found[2]
        assert words in found[1]
        assert (tmp_path / "p2p.png").stat().st_size > 1000
    code, _, error = tell("check", str(tmp_path / "p2p.log"))
    assert (code, "does not name its machine, expected --machine" in error) == (2, True)


def write(path: Path, rows: str) -> Path:
    """A log of two H100."""
    path.write_text(HEAD + rows + END)
    return path


def test_the_lesser_of_both_columns_counts(tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", ROW.format(2**20, 2**18, 900.0, 0, 30.0))
    found = check(log)
    assert found.diagnosis is not None
    assert found.diagnosis.rows[0].time_s == pytest.approx(30e-6)


BAD = [
    (ROW.format(2**20, 2**18, 900.0, 7, 30.0), "7 wrong results"),
    (ROW.format(2**20, 2**18, "0.00", 0, 30.0), "time '0.00', expected more than 0"),
    (ROW.format("1.0GB", 2**28, 900.0, 0, 30.0), "KiB counts in 1024, KB in 1000"),
]


@pytest.mark.parametrize(("rows", "message"), BAD)
def test_logs_that_measure_nothing_are_refused(rows: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=message):
        check(write(tmp_path / "a.log", rows))


def test_two_machines_and_calls_that_are_not_modelled_are_refused(tmp_path: Path) -> None:
    one, other = LOGS / "24_h100_8_ar_nvls_on.log", LOGS / "08_a100_2x8_ar_oke.log"
    with pytest.raises(TableError, match=r"several machines: h100-8 .* and a100-2x8"):
        check(one, other)
    log = write(tmp_path / "a.log", ROW.format(2**20, 2**18, 50.0, 0, 30.0))
    log.write_text(log.read_text().replace("all_reduce_perf", "broadcast_perf"))
    with pytest.raises(TableError, match="the collective 'broadcast' is none of"):
        check(log)
    with pytest.raises(TableError, match="build nccl-tests with make clean; make MPI=1"):
        check(LOGS / "36_h100_1x1_ar_294_nompi.log")


def test_a_rate_that_falls_is_slow_whatever_the_call() -> None:
    found = check(LOGS / "44_2x1_gather_350_gdr.log")
    assert found.verdict == "slow"
    assert "from 6 GiB on" in str(found.to_dict()["text"])


def test_a_cut_line_is_left_out_and_one_size_is_enough(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(HEAD + ROW.format(2**20, 2**18, 40.0, 0, 30.0) + ROW.format(2**21, 2**19, 40.0, 0, 30.0)[:24])
    found = check(log)
    assert found.diagnosis is not None
    assert [row.size_bytes for row in found.diagnosis.rows] == [2**20]


def test_an_unknown_machine_is_compared_with_the_nearest_one() -> None:
    document = check(LOGS / "20_a40_2_nvlink_ar.log").to_dict()
    assert document["is_nearest"]
    assert "no machine of tasp-lab is known to have 2 NVIDIA A40" in str(document["notes"])


def test_the_version_of_nccl_in_a_log_is_that_of_its_machine(tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", ROW.format(2**24, 2**22, 100.0, 0, 90.0))
    line = "# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22809\n"
    log.write_text(line + log.read_text())
    assert "NCCL 2.28.9, as the log says" in check(log).to_dict()["notes"]  # type: ignore[operator]


def test_the_exit_code_is_the_verdict(tell: Tell) -> None:
    code, out, _ = tell("check", str(LOGS / "33_h100_2x8_a2a_2409_acs.log"), "--json")
    document = json.loads(out)
    assert (code, document["verdict"]) == (1, "slow")
    code, out, _ = tell("check", str(LOGS / "25_h100_8_ag.log"))
    assert code == 0
    assert out.startswith("Healthy: all_gather on h100-8")


def test_rows_of_one_collective_err_alike_and_those_of_others_less() -> None:
    residuals = [residual_of(Regime("collective", "inter", "large", "documented", "modelled"))] * 2
    sizes, apart = [2**28, 2**29], np.array([0.1, -0.1])
    alike, others = (
        Errors(names, sizes, np.ones(2), residuals) for names in (["all_gather"] * 2, ["all_gather", "alltoall"])
    )
    assert alike.log_density(apart) < others.log_density(apart)


def test_severities_tell_causes_of_one_effect_apart() -> None:
    own = predictions("h100-2x8", "all_gather", "alltoall")
    for severity, first, last in ((0.125, "one NIC serves", "half of the NICs"),
                                  (0.5, "half of the NICs", "one NIC serves")):  # fmt: skip
        (variant,) = (each for each in own.variants if each.effect.name == "slow NICs" and each.severity == severity)
        found = diagnosis_of(own, (variant.times_s * own.middle).tolist())
        chances = {each.cause.name: each.probability for each in found.findings}
        one, other = (next(chances[name] for name in chances if part in name) for part in (first, last))
        assert one > 3 * other, severity


def test_calls_below_the_size_at_which_an_effect_begins_are_as_fast_as_ever() -> None:
    own = predictions("h100-2x8", "all_gather")
    sizes = np.array([size for _, size in own.calls])
    later = [each for each in own.variants if each.effect.from_bytes]
    assert later
    for each in later:
        slower = each.times_s > own.healthy_s * 1.001
        assert not slower[sizes < min(each.effect.from_bytes) / 4].any()
