"""A prediction costs no more than its simulation: what is counted is objects, never seconds."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest

from sim.array import engine as array_engine
from tasp_lab.cli.process import main
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.predict import predict
from tasp_lab.schedules.build import collective
from tasp_lab.topology import graph as topology
from tasp_lab.topology import links
from tasp_lab.topology.builders import full_mesh

FEW = 4
"""A prediction on a mesh looks at so many links per rank at most, however large the mesh is: a ring uses one each."""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many links and constraints are constructed. More than `FEW` of a kind for 4096 ranks fail at once."""
    counts: Counter[str] = Counter()

    def counting(make: type) -> Any:
        def made(*arguments: Any, **named: Any) -> Any:
            counts[make.__name__] += 1
            assert counts[make.__name__] <= FEW * 4096, f"too many objects of {make.__name__}"
            return make(*arguments, **named)

        return made

    monkeypatch.setattr(links, "Link", counting(links.Link))
    monkeypatch.setattr(topology, "Constraint", counting(topology.Constraint))
    return counts


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ranks", [16, 256, 4096])
def test_a_prediction_on_a_mesh_looks_at_few_links(ranks: int, built: Counter[str]) -> None:
    [found] = predict(Machine(full_mesh(ranks)), ["ring"], 2**20)
    assert found.time_s > found.bound_s > 0
    assert 0 < built["Link"] <= FEW * ranks
    assert built["Constraint"] <= FEW * ranks


def test_the_command_looks_at_few_links(built: Counter[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "full-mesh:4096", "--schedule", "ring", "--shard-bytes", "1MiB", "--json"])
    [found] = json.loads(capsys.readouterr().out)["predictions"]
    assert found["time_s"] > found["bound_s"] > 0
    assert built["Link"] > 0


@pytest.mark.usefixtures("traced")
def test_a_prediction_needs_no_more_memory_than_its_schedule_and_its_simulation() -> None:
    mesh = full_mesh(1024)
    tracemalloc.reset_peak()
    run = array_engine.run(collective("ring", mesh, 2**20), Machine(mesh))
    time_s, simulated_bytes = run.time_s, tracemalloc.get_traced_memory()[1]
    del run
    tracemalloc.reset_peak()
    [found] = predict(Machine(full_mesh(1024)), ["ring"], 2**20)
    assert found.time_s == time_s
    assert tracemalloc.get_traced_memory()[1] < 2 * simulated_bytes


def test_a_cache_that_is_keyed_by_a_topology_builds_no_link_when_it_is_hit(built: Counter[str]) -> None:
    asked = []

    @lru_cache
    def cached(mesh: topology.Topology) -> int:
        asked.append(mesh)
        return mesh.world_size

    mesh = full_mesh(512)
    cached(mesh)
    before = built["Link"]
    assert cached(mesh) == cached(mesh) == 512
    assert built["Link"] == before
    assert cached(full_mesh(512)) == 512
    assert len(asked) == 1
