"""Writes through root complexes: slower in all, the more GPUs one writes to at once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.simulate import simulate
from tasp_lab.core.errors import TopologyError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.libraries.library import PEERS_OF_WRITE_SHARE, RootComplexLibrary
from tasp_lab.machines.machine import IDEAL, Machine
from tasp_lab.prediction.predict import predict
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import switch
from tasp_lab.workload.layer import Workload

RATE = 26e9


@given(st.integers(1, 64), st.floats(0.01, 1), st.integers(1, 2**40))
def test_more_peers_are_never_faster_in_all(peers: int, share: float, size: int) -> None:
    library = RootComplexLibrary("pcie", 0, RATE, share)

    def in_all(count: int) -> float:
        most = library.message(0, size, count, first=False).max_bytes_per_s
        return RATE if most is None else count * float(most)

    assert in_all(1) == RATE
    assert in_all(PEERS_OF_WRITE_SHARE) == pytest.approx(share * RATE)
    assert in_all(peers + 1) <= in_all(peers) * (1 + 1e-12)
    assert library.message(0, size, peers, first=False).wire_bytes == size


@pytest.mark.parametrize("engine", ["simpy", "array"])
def test_an_all_to_all_takes_what_its_writes_take(engine: str) -> None:
    """Of 8 ranks: seven blocks at the share of the rate; around a ring each rank writes to one other."""
    topology = switch(8, RATE, 0.0)
    slow, ideal = (Machine(topology, each) for each in (RootComplexLibrary("pcie", 0, RATE, 0.05), IDEAL))
    direct, ring = (collective(name, topology, 7 * 2**20) for name in ("all-to-all", "ring"))
    written = int(direct.bytes_by_rank()[0])
    assert simulate(direct, slow, engine).time_s == pytest.approx(written / (0.05 * RATE))  # type: ignore[arg-type]
    assert simulate(ring, slow, engine).time_s == simulate(ring, ideal, engine).time_s  # type: ignore[arg-type]


def test_ulysses_suffers_and_rings_do_not() -> None:
    layer = Workload(32768, heads=32)
    times = {
        name: [
            float(predict("l20-8-pcie", name, layer, overrides=each)[0].time_s)
            for each in ((), ("peer_write_share=1",), ("peer_write_share=0.2",))
        ]
        for name in ("ulysses", "zigzag-ring-attention")
    }
    slow, whole, middle = times["ulysses"]
    assert slow > middle > whole
    assert len(set(times["zigzag-ring-attention"])) == 1
    assert float(predict("l20-8-pcie-switch", "ulysses", layer)[0].time_s) == whole


def test_numbers_of_the_library_are_overridden_and_checked() -> None:
    found = load_machine("l20-8-pcie")
    assert isinstance(found.comm_library, RootComplexLibrary)
    assert (found.comm_library.write_bytes_per_s, found.comm_library.write_share) == (RATE, 0.05)
    changed = predict(found, "ulysses", Workload(8192), overrides=("peer_write_bandwidth=x2",))[0]
    assert changed.machine is not None
    assert changed.machine.comm_library == replace(found.comm_library, write_bytes_per_s=2 * RATE)


def test_a_file_has_both_numbers(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    constant = '[[constants]]\nname = "peer_write_{}"\nvalue = "{}"\nsource = "test"\n'
    links = 'name = "pair"\nlinks = [{ source = 0, destination = 1, bandwidth = "1GB/s", latency = "1us", '
    both = [constant.format("share", "0.1"), constant.format("bandwidth", "1GB/s")]
    file.write_text(links + "both_ways = true }]\n" + "".join(both))
    assert load_machine(str(file)).comm_library == RootComplexLibrary("pcie", 0, 1e9, 0.1)
    for one in both:
        file.write_text(links + "both_ways = true }]\n" + one)
        with pytest.raises(TopologyError, match="alone, expected peer_write_bandwidth and peer_write_share"):
            load_machine(str(file))


def test_the_law_is_a_power() -> None:
    library = RootComplexLibrary("pcie", 0, 1.0, 0.05)
    logarithms = [
        math.log(peers * float(library.message(0, 1, peers, first=False).max_bytes_per_s or 0)) / math.log(peers)
        for peers in (2, 3, 7, 49)
    ]
    assert logarithms == pytest.approx([logarithms[0]] * 4)
