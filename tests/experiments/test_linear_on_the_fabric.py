"""The table of linear attention on the fabric: its theory against the simulator, crossovers, and what calls hide."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tables import linear_on_the_fabric as table
from experiments.tables.linear_on_the_fabric import (
    LAYER,
    MESH,
    NODES,
    SWITCH,
    all_scan,
    state_bytes,
    state_s,
)
from experiments.tables.on_the_fabric import Part, Variant, passes_of, replace_part
from sim.simulate import simulate
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.timeline.events import ATTEND, COMPUTE_LANE, DIFFERENTIATE, SEND, Event, Timeline
from tasp_lab.topology.graph import Topology

NO_DECAY = replace(LAYER, decay="none", sequence=8)
N = 8


def exact(topology: Topology) -> Topology:
    """Links of a state per second, without latency; slower ones in proportion."""
    slow = [Fraction(each.bandwidth_bytes_per_s) for each in topology.links]
    unit = Fraction(state_bytes(NO_DECAY)) / slow[0]
    return topology.map_links(lambda at, link: replace(link, bandwidth_bytes_per_s=slow[at] * unit, latency_s=0))


def states(variant: Variant, topology: Topology) -> list[Fraction]:
    """The times of the passes without compute, in times of a state on a link."""
    links = exact(topology)
    return [Fraction(simulate(each, Machine(links)).time_s) for each in passes_of(variant, links, NO_DECAY)]


@pytest.mark.parametrize("where", [MESH, SWITCH, NODES])
@pytest.mark.parametrize("pieces", table.PIECES)
def test_a_chain_of_states_takes_n_minus_2_plus_k_hops_of_a_piece(where: str, pieces: int) -> None:
    """Both passes, wherever the links are: tau + (n - 2) tau / K."""
    assert states(all_scan(pieces), Part(where, NO_DECAY).links) == [1 + Fraction(N - 2, pieces)] * 2


@pytest.mark.parametrize(
    ("where", "name", "rings", "expected"),
    [
        (MESH, "lasp-2", None, N - 1),
        (MESH, "multi-ring-lasp-2", None, 1),
        (MESH, "multi-ring-lasp-2", 2, Fraction(N - 1, 2)),
        (MESH, "multi-ring-lasp-2", 4, Fraction(N - 1, 4)),
        (MESH, "direct-lasp-2", None, 1),
        (MESH, "trees-lasp-2", None, 1),
        (SWITCH, "lasp-2", None, N - 1),
        (SWITCH, "direct-lasp-2", None, N - 1),
        (NODES, "lasp-2", None, N - 1),
        (NODES, "multi-ring-lasp-2", None, Fraction(N - 1, 4)),
        (NODES, "direct-lasp-2", None, 4),
    ],
)
def test_gathers_take_the_states_of_their_busiest_link(
    where: str, name: str, rings: int | None, expected: Fraction | int
) -> None:
    variant = Variant(name, AttentionOptions("both"), rings)
    assert states(variant, Part(where, NO_DECAY).links) == [expected] * 2


@pytest.mark.parametrize("ratio", [Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4)])
def test_a_chain_crosses_to_the_other_node_once_and_a_gather_four_times(ratio: Fraction) -> None:
    """Six hops within nodes and one of a NIC, or four states through each NIC: equal where NICs are half as fast."""
    links = Part(NODES, NO_DECAY, nics_slower_by=float(ratio)).links
    assert states(all_scan(1, "forward"), links) == [6 + ratio]
    assert states(Variant("direct-lasp-2", AttentionOptions()), links) == [4 * ratio]
    assert (6 + ratio == 4 * ratio) == (ratio == 2)


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.2, 5))
def test_curves_cross_where_their_formulas_do(scale: float, level: float, power: float) -> None:
    """One falls as a power of x, the other is level; the logarithm is linear, so interpolation is exact."""
    x = [0.5**at for at in range(12, -12, -1)]
    expected = (scale / level) ** (1 / power)
    found = table.crossing(x, [scale * each**-power for each in x], [level] * len(x))
    if x[0] < expected < x[-1]:
        assert found == pytest.approx(expected)
    assert math.isnan(table.crossing(x, [level * 2] * len(x), [level] * len(x)))


def event(kind: str, start_s: float, end_s: float, rank: int = 0, peer: int = 0) -> Event:
    lane = 0 if kind == SEND else COMPUTE_LANE
    return Event(rank, lane, 0, kind, peer, 0, 0, start_s, end_s, "", "")


def share(*events: Event) -> float:
    return table.hidden_share(Timeline("measured", "lasp-2", "full-mesh:2", 2, events))


def test_transfers_are_hidden_while_a_rank_at_either_end_attends() -> None:
    both = [event(SEND, 1, 3, 0, 1), event(SEND, 2, 5, 0, 1)]
    assert share(*both) == 0
    assert share(*both, event(ATTEND, 0, 4, 0)) == pytest.approx(3 / 8)
    assert share(*both, event(DIFFERENTIATE, 0, 4, 0), event(ATTEND, 0, 9, 1, 1)) == pytest.approx(7 / 8)
    assert share(*both, event("make_state", 0, 9, 0), event("apply_state", 0, 9, 1, 1)) == 0
    assert share(event(ATTEND, 0, 1)) == 0


def test_lines_of_chains_are_those_of_the_theory() -> None:
    """Times of tau + (n - 2) tau / K give 1 and n - 2; what all take less is per hop."""
    tau, saved_s = 0.5, 0.007
    rows = [
        {"state_bytes": 1, "state_s": tau, "pass": "forward", "schedule": all_scan(pieces).label,
         "predicted_s": tau * (1 + 6 / pieces) + saved_s, "measured_s": tau * (1 + 6 / pieces)}
        for pieces in table.PIECES
    ]  # fmt: skip
    part = {"topology": MESH, "rows": [*rows, rows[0] | {"schedule": "lasp-2", "measured_s": 100.0}]}
    ((_, _, start, slope),) = table.chain_fits(part)
    assert (start, slope) == (pytest.approx(1), pytest.approx(6))
    assert table.saved_per_hop_s(part) == pytest.approx(saved_s / 7)


def test_the_time_of_attention_is_the_ratio_that_was_asked_for() -> None:
    """Over n - 1 hops of a state, at the fabric's speed."""
    for each in table.OVERLAPS.values():
        for ratio in each.ratios:
            part, rate = each.part, table.rate_of(each.part, ratio)
            schedule: Schedule = passes_of(all_scan(1, "forward"), part.links, part.layer)[0]
            calls = [call for step in schedule.steps for call in step.calls if call.kernel == ATTEND]
            assert schedule.task is not None
            longest_s = max(int(schedule.task.flops(call).max()) for call in calls) / rate
            assert longest_s == pytest.approx(ratio * 7 * state_s(part))


@pytest.mark.fabric
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.full  # starts eight emulated fabrics, which takes a minute
def test_small_parts_run_on_the_fabric_and_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = replace(LAYER, sequence=3 * 64)
    found = table.measure_hops(Part("full-mesh:3", layer), 1, (16,))
    gathers = {"lasp-2": 2, "multi-ring-lasp-2": 1, "direct-lasp-2": 1, "trees-lasp-2": 1}
    expected = {**{all_scan(pieces).label: 1 + 1 / pieces for pieces in table.PIECES}, **gathers}
    for row in found["rows"]:
        assert row["nominal_s"] / row["state_s"] == pytest.approx(expected[row["schedule"]], rel=0.02)
        assert row["measured_s"] > 0
    assert len(found["rows"]) == 2 * len(expected)
    monkeypatch.setattr(table, "MESH", "full-mesh:3")
    hidden = table.measure_overlap(table.Overlap(Part("full-mesh:3", layer), (1.5,)), 1, tmp_path)
    assert all(0 <= row["hidden_measured"] <= 1 for row in hidden["rows"])
    assert json.loads((tmp_path / f"{table.NAME}.trace.json").read_text())["traceEvents"]
    for key, part in (("mesh", found), ("overlap", hidden)):
        replace_part(tmp_path / f"{table.NAME}.json", key, part)
    table.publish(tmp_path)
    text = (tmp_path / f"{table.NAME}.md").read_text()
    assert "lasp-2, forward" in text
    assert f"of {len(found['rows']) + len(hidden['rows'])} runs are within" in text


@pytest.mark.parametrize("key", table.SWEEPS)
def test_predicted_crossovers_of_a_sweep_are_found(key: str) -> None:
    """From the simulator alone: All-Scan passes r rings where 1 + 6 / K is 7 / r, and LASP a gather at slow NICs."""
    sweep, rows = table.SWEEPS[key], []
    for value in sweep.values:
        part = sweep.at(value)
        is_first = value == sweep.values[0]
        for variant in (*sweep.swept(value), *(sweep.fixed if is_first else ())):
            links = part.links.scaled(part.scale).map_links(lambda _, link: replace(link, latency_s=0.0))
            (schedule,) = passes_of(variant, links, part.layer)
            time_s = float(simulate(schedule, Machine(links)).time_s)
            rows.append({"value": value, "schedule": variant.label, "is_fixed": variant in sweep.fixed,
                         "predicted_s": time_s, "measured_s": time_s, "measured_repeats_s": [time_s]})  # fmt: skip
    expected = [2.4, 8] if key == "pieces" else [2, 8 / 7]
    for pair, where in zip(sweep.pairs, expected, strict=True):
        found = table.crossover(rows, pair)
        assert found.predicted == found.measured == found.low == found.high
        assert found.predicted == pytest.approx(where, rel=0.05)
