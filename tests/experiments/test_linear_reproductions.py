"""Published figures of linear attention: arithmetic of intervals, records, and what is claimed of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.reproductions.lasp2 import result as lasp2
from experiments.reproductions.report import FOLDER
from experiments.reproductions.reproduction import Range, figure_of, numbers_of
from experiments.reproductions.zeco import result as zeco
from tasp_lab.core.errors import TableError
from tasp_lab.measure.accuracy import own_tables
from tasp_lab.measure.readers import read_table
from tasp_lab.prediction.residuals import KERNELS, residual_of

NUMBERS = st.integers(1, 1000)
RANGES = st.builds(lambda *ends: Range.of(*ends), NUMBERS, NUMBERS)


@given(RANGES, RANGES, st.data())
def test_differences_and_quotients_hold_those_of_all_members(a: Range, b: Range, data: st.DataObject) -> None:
    x = data.draw(st.integers(int(a.low), int(a.high)))
    y = data.draw(st.integers(int(b.low), int(b.high)))
    for found, value in ((a - b, x - y), (a / b, x / y)):
        assert found.low <= value <= found.high


@given(RANGES, st.integers(1, 1000))
def test_a_figure_of_a_range_holds_all_of_it(possible: Range, published: int) -> None:
    """A residual only adds to it; the prediction is its middle."""
    found = figure_of("a gain", "%", published, possible, residual_of(KERNELS))
    assert found.low <= possible.low <= found.predicted * (1 + 1e-12)
    assert found.predicted * (1 - 1e-12) <= possible.high <= found.high
    assert found.inside or not possible.low <= published <= possible.high


@pytest.mark.parametrize("path", [*FOLDER.glob("lasp2/*.csv"), *FOLDER.glob("zeco/*.csv")], ids=lambda path: path.stem)
def test_every_record_has_rows(path: Path) -> None:
    assert numbers_of(path)


def test_a_record_of_other_fields_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.csv").write_text("gpus,time\n8\n")
    with pytest.raises(TableError, match=r"short.csv, line 2: 1 cells, expected 2"):
        numbers_of(tmp_path / "short.csv")
    (tmp_path / "words.csv").write_text("gpus,time\n8,long\n")
    with pytest.raises(TableError, match=r"words.csv, line 2: time 'long', expected a number"):
        numbers_of(tmp_path / "words.csv")


@pytest.mark.parametrize("nics", [1, 8])
def test_nodes_of_a100_have_so_much_bandwidth_between_them(nics: int) -> None:
    """All eight ranks of a node send to the next node at once: 25 GB/s per NIC, less what NCCL does not use of it."""
    topology = lasp2.a100_nodes(nics, 16).topology
    routes = [topology.route(rank, rank + 8) for rank in range(8)]
    limits = [min(topology.constraints[each].bandwidth_bytes_per_s for each in route.constraints) for route in routes]
    assert limits == [25e9] * 8
    common = set.intersection(*(set(route.constraints) for route in routes))
    assert sum(topology.constraints[each].bandwidth_bytes_per_s for each in common) == (0 if nics == 8 else 2 * 25e9)


def test_an_iteration_is_positions_over_throughput_and_between_others_where_there_is_none() -> None:
    assert lasp2.iteration_s(524288).low == pytest.approx(524288 / 245353)
    found = lasp2.iteration_s(2097152)
    assert (found.low, found.high) == pytest.approx((1048576 / 486183, 2097152 / 442221))
    assert lasp2.gap_ms(524288, "over_lasp1_percent").high == pytest.approx(73 * 524.288 / 245.353)


@pytest.mark.parametrize(("sequence", "flops_per_s"), [(524288, 391e12), (2097152, 2433e12)])
def test_rings_that_are_left_out_of_scores_are_beyond_the_peak(sequence: int, flops_per_s: float) -> None:
    """The reasons of ``published.toml``, from published numbers alone, and 2016 gathers in 0.111 ms."""
    per_gpu = 16 * 7 * 2048 * sequence**2 / 64
    longest_s = lasp2.iteration_s(sequence).high + lasp2.gap_ms(sequence, "over_ring_percent").high / 1e3
    assert per_gpu / longest_s == pytest.approx(flops_per_s, rel=2e-3)
    assert flops_per_s > lasp2.PEAK_FLOPS_PER_S


def measured_ms(table: str, size_bytes: int) -> float:
    """The measured time of the size that comes closest."""
    rows = read_table(own_tables() / f"{table}.csv").rows
    return 1e3 * min(rows, key=lambda row: abs(row.size_bytes - size_bytes)).time_s


def test_gathers_of_zeco_that_are_left_out_have_a_sixth_of_a_measured_rate() -> None:
    """GB/s into a GPU: 39 to 63 published, 238 of nccl-tests in one node of 8 H100 for 32 MiB."""
    rates = [2**21 * (gpus - 1) / time_ms / 1e6 for gpus, time_ms in zeco.published("allgather_ms").items()]
    assert (min(rates), max(rates)) == pytest.approx((39, 63), rel=0.01)
    assert 7 / 8 * 2**25 / measured_ms("h100_xxrjun_1x8_all_gather", 2**25) / 1e6 == pytest.approx(238, rel=0.01)


def test_the_gap_to_lasp_lies_between_a_chain_beside_kernels_and_one_with_all_kernels_between_hops() -> None:
    for sequence in lasp2.HEADLINES:
        gap, chain = lasp2.gap_ms(sequence, "over_lasp1_percent"), lasp2.chain_ms(sequence)
        assert chain.high < 0.6 * gap.low
        assert lasp2.blocked_chain_ms(sequence).low > gap.high


def test_gathers_of_zeco_are_slower_than_measured_elsewhere() -> None:
    """Of 16 MiB on 8 GPUs, and of 128 MiB on 64: beside 32 MiB on 8 and 128 MiB on 80."""
    times = zeco.published("allgather_ms")
    assert times[8] > 3 * measured_ms("h100_xxrjun_1x8_all_gather", 2**25)
    assert times[64] > 3 * measured_ms("h100_xxrjun_10x8_all_gather", 2**27)
    assert times[8] > 3 * zeco.library_gather_ms(8)


def test_the_scan_takes_longer_than_its_messages_on_one_node() -> None:
    (wires, _), (messages, _) = zeco.best_scan_ms(8, "ideal"), zeco.best_scan_ms(8)
    assert wires < messages < zeco.published("allscan_ms")[8]
