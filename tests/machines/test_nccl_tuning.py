"""NCCL's choice of algorithm and protocol: laws of the estimate, and the cliffs that measured tables show."""

from __future__ import annotations

from collections import defaultdict
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sim.bounds.collectives import collective_bound_s
from sim.library_calls import library_call
from sim.simulate import simulate
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.libraries.nccl_tuning import Collective, Tuner, parse_version, search
from tasp_lab.measure.accuracy.report import own_tables
from tasp_lab.measure.readers import MeasuredTable, find_tables

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
LINKS = {"ampere": 240e9, "hopper": 370.8e9, "blackwell": 721.8e9}


def tuner(generation: str, version: str = "2.29.2", domains: int = 1, ranks: int = 8) -> Tuner:
    between = (48e9, 1e-6) if domains > 1 else ()
    return Tuner(generation, parse_version(version), domains, ranks, LINKS[generation], True, *between)  # type: ignore[arg-type]


@given(
    generation=st.sampled_from(sorted(LINKS)),
    collective=st.sampled_from(COLLECTIVES),
    ranks=st.integers(2, 8),
    domains=st.integers(1, 9),
    size=st.integers(1, 2**34),
)
def test_the_choice_is_the_least_estimate_which_grows_with_the_message(
    generation: str, collective: Collective, ranks: int, domains: int, size: int
) -> None:
    of = tuner(generation, domains=domains, ranks=ranks)
    chosen = of.choose(collective, size)
    assert chosen.estimate_s == min(each.estimate_s for each in of.estimates(collective, size))
    rings = [of.choose(collective, each, ("ring",)).estimate_s for each in (size, 2 * size)]
    assert 0 < rings[0] <= rings[1]


@given(generation=st.sampled_from(sorted(LINKS)), link=st.floats(20e9, 2e12))
def test_the_search_fits_whole_channels_into_the_link(generation: str, link: float) -> None:
    count, rate = search(generation, link)  # type: ignore[arg-type]
    assert count >= 1
    assert link / 2 <= count * rate * (1 + 1e-9)
    assert count * rate <= link * (1 + 1e-6)


def _tables(system: str) -> dict[tuple[str, int], dict[str, MeasuredTable]]:
    """Measured tables of a system by collective and ranks, then by version."""
    found: dict[tuple[str, int], dict[str, MeasuredTable]] = defaultdict(dict)
    for table in find_tables([own_tables() / "aiconfigurator_one_node.csv"]):
        version = table.headers["library"].removeprefix("nccl==")
        if table.headers["system"] == system and table.headers["folder"] == version:
            assert table.collective
            assert table.ranks
            found[table.collective, table.ranks][version] = table
    return found


def test_measured_times_of_two_versions_differ_where_their_choices_do() -> None:
    """Of B200: 15 % or more where protocols differ, less than that where they agree."""
    differ = 0
    for (collective, ranks), tables in _tables("b200_sxm").items():
        if collective == "alltoall":
            continue
        for old, new in zip(tables["2.28.9"].rows, tables["2.29.2"].rows, strict=True):
            names = [
                tuner("blackwell", version, ranks=ranks).choose(collective, old.size_bytes)[:2]  # type: ignore[arg-type]
                for version in ("2.28.9", "2.29.2")
            ]
            if old.size_bytes >= 2**20:  # below, single calls of these tables are up to half slower
                assert (abs(new.time_s / old.time_s - 1) >= 0.15) == (names[0] != names[1]), (collective, ranks, old)
            differ += names[0] != names[1]
    assert differ == 6  # 16 and 32 MiB on 8 ranks twice, 8 and 16 MiB of an all_reduce on 4


def test_a_call_in_the_switch_moves_its_message_once_and_a_share() -> None:
    """Latency of the call and of both wires, (n + 1) / n of the message over the payload rate, a latency per chunk."""
    machine, size, n = load_machine("h100-8"), 2**30, 8
    of = machine.parameters.numbers
    schedule = library_call("all_reduce", machine, size)
    chunks = size / (of["nvls_channels"] * 131072)
    expected_s = of["nvls_base"] + chunks * of["nvls_chunk"] + 2 * of["link_latency"]
    expected_s += size * (n + 1) / n / of["link_payload"]
    assert schedule.algorithm == "nvls"
    assert float(simulate(schedule, machine).time_s) == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("name", "size"), [("h100-4", 2**28), ("a100-8", 2**16), ("b200-8", 2**25)])
def test_a_ring_call_inside_a_domain_is_its_closed_form(collective: Collective, name: str, size: int) -> None:
    machine = load_machine(name)
    of, n = machine.parameters.numbers, machine.topology.world_size
    hops = (2 if collective == "all_reduce" else 1) * (n - 1)
    library, shard = machine.comm_library, size / n
    protocol = library.algorithm(collective, size).protocol  # type: ignore[attr-defined]
    if protocol == "LL":
        piece_s = max(min(size, 4096 * n), size / of["channels"]) / n / of["ll_channel_rate"]
        expected_s = of["base_ll"] + piece_s + hops * (of["link_hop_ll"] + piece_s)
    else:
        copies = 1 if collective == "all_reduce" else 2
        transfer_s = shard / of["ring_rate"]
        hop_s = max(of["link_hop_simple"] - transfer_s / 2, of["link_latency"]) + transfer_s
        expected_s = of["base_simple"] + copies * shard / of["copy_rate"] + hops * hop_s
    schedule = library_call(collective, machine, size)
    if schedule.algorithm == "ring":
        assert float(simulate(schedule, machine).time_s) == pytest.approx(expected_s, rel=1e-9)


@given(power=st.integers(12, 36), name=st.sampled_from(["h100-8", "h100-4", "b200-8", "gb300-4"]))
@example(power=36, name="h100-8")
def test_a_switch_that_adds_may_beat_the_bound_of_rings_but_not_its_own(power: int, name: str) -> None:
    machine, size = load_machine(name), 2**power
    schedule = library_call("all_reduce", machine, size, algorithm="nvls")
    time_s = float(simulate(schedule, machine).time_s)
    shard = size // machine.topology.world_size
    assert time_s >= float(collective_bound_s("AllReduce", machine.topology, shard, in_switch=True))
    if (power, name) == (36, "h100-8"):  # faster than any ring can be
        assert time_s < float(collective_bound_s("AllReduce", machine.topology, shard))
