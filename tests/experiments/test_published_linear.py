"""Published figures of linear attention: arithmetic of intervals, records, and what is claimed of them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tables import published_lasp2, published_rows, published_zeco
from experiments.tables.published_rows import RECORDS, Interval, Row, read_record
from tasp_lab.errors import TableError

NAMES = ("lasp2_headline", "lasp2_throughput", "lasp2_split", "zeco", "zeco_operator")
NUMBERS = st.integers(1, 1000)
INTERVALS = st.builds(lambda *ends: Interval.of(*ends), NUMBERS, NUMBERS)


@given(INTERVALS, INTERVALS, st.data())
def test_differences_and_quotients_hold_those_of_all_members(a: Interval, b: Interval, data: st.DataObject) -> None:
    x = data.draw(st.integers(int(a.low), int(a.high)))
    y = data.draw(st.integers(int(b.low), int(b.high)))
    for found, value in ((a - b, x - y), (a / b, x / y)):
        assert found.low <= value <= found.high
    row = Row("a layer", a, b, b, "")
    assert row.error.low <= Fraction(y, x) - 1 + Fraction(1, 10**12)
    assert row.overhead == a - b


def test_every_record_names_its_source_and_is_used() -> None:
    assert {path.stem for path in RECORDS.glob("*.csv")} == set(NAMES)
    for name in NAMES:
        assert (RECORDS / f"{name}.csv").read_text().startswith("# source: ")
        assert read_record(name)


def test_a_record_of_other_fields_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_rows, "RECORDS", tmp_path)
    (tmp_path / "short.csv").write_text("gpus,time\n8\n")
    with pytest.raises(TableError, match=r"short.csv: 8: 1 fields, expected 2"):
        read_record("short")
    (tmp_path / "words.csv").write_text("gpus,time\n8,long\n")
    with pytest.raises(TableError, match=r"words.csv: 'long', expected a number or nothing"):
        read_record("words")


@pytest.mark.parametrize("nics", [1, 8])
def test_nodes_of_a100_have_so_much_bandwidth_between_them(nics: int) -> None:
    """All eight ranks of a node send to the next node at once: 25 GB/s per NIC, less what NCCL does not use of it."""
    topology = published_lasp2.a100_nodes(nics, 16).topology
    routes = [topology.route(rank, rank + 8) for rank in range(8)]
    limits = [min(topology.constraints[each].bandwidth_bytes_per_s for each in route.constraints) for route in routes]
    assert limits == [25e9] * 8
    common = set.intersection(*(set(route.constraints) for route in routes))
    assert sum(topology.constraints[each].bandwidth_bytes_per_s for each in common) == (0 if nics == 8 else 2 * 25e9)


def test_an_iteration_is_positions_over_throughput_and_between_others_where_there_is_none() -> None:
    assert published_lasp2.iteration_s(524288).low == pytest.approx(524288 / 245353)
    found = published_lasp2.iteration_s(2097152)
    assert (found.low, found.high) == pytest.approx((1048576 / 486183, 2097152 / 442221))
    assert published_lasp2.gap_ms(524288, "over_lasp1_percent").high == pytest.approx(73 * 524.288 / 245.353)


def test_rings_as_described_take_longer_than_the_published_iterations() -> None:
    """By hand: 7 products of 2 x 2048 x S^2 / 2 FLOPs in each of 16 layers; keys of 4 x 2048 bytes per position."""
    sequence = 524288
    assert published_lasp2.all_pairs_s(sequence) == pytest.approx(16 * 7 * 2048 * sequence**2 / 64 / 312e12)
    assert published_lasp2.keys_into_a_node_s(sequence, 8) == pytest.approx(32 * 8192 * sequence * 7 / 8 / 200e9)
    for length in published_lasp2.HEADLINES:
        gap_s = published_lasp2.gap_ms(length, "over_ring_percent").high / 1e3
        assert published_lasp2.all_pairs_s(length) > published_lasp2.iteration_s(length).high + gap_s
        assert published_lasp2.keys_into_a_node_s(length, 8) > gap_s


def test_the_gap_to_lasp_lies_between_a_chain_beside_kernels_and_one_with_all_kernels_between_hops() -> None:
    for beside, between in ((rows[0], rows[1]) for rows in map(published_lasp2._over_lasp, published_lasp2.HEADLINES)):
        assert beside.predicted.high < beside.published.low
        assert between.predicted.low > between.published.high
        assert beside.communication.high / beside.published.low < 0.6


def test_gathers_of_zeco_are_slower_than_measured_elsewhere() -> None:
    """Of 16 MiB on 8 GPUs, and of 128 MiB on 64: beside 32 MiB on 8 and 128 MiB on 80."""
    times = published_zeco.published("allgather_ms")
    assert times[8] > 3 * published_zeco.measured_ms(published_zeco.ONE_NODE, 2**25)
    assert times[64] > 3 * published_zeco.measured_ms(published_zeco.TEN_NODES, 2**27)
    assert times[8] > 3 * published_zeco.library_gather_ms(8)


def test_equal_hops_have_the_pieces_that_they_were_made_with() -> None:
    for pieces in (1, 16, 23):
        times = {gpus: 0.008 * (gpus - 2 + pieces) for gpus in published_zeco.GPUS}
        assert published_zeco.fitted_pieces(times) == pytest.approx(pieces)


def test_exchanges_are_counted_from_the_growth_of_an_iteration() -> None:
    """An iteration that loses 10 ms and 50 exchanges against data parallelism."""
    exchange = published_zeco.published("allscan_ms")
    bound = published_zeco.published("data_parallel_bound")
    made = {n: 32768e3 / (32768e3 / bound[n] + 10 + 50 * exchange[n]) for n in bound}
    assert published_zeco.exchanges(made, bound, exchange) == pytest.approx([50, 50, 50])


def test_the_scan_lies_between_wires_and_messages_on_one_node() -> None:
    (wires, _), (messages, _) = published_zeco.best_scan_ms(8, "ideal"), published_zeco.best_scan_ms(8)
    assert wires < published_zeco.published("allscan_ms")[8] < messages
