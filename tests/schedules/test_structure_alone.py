"""Schedules that do not follow rates are built once for all machines of a structure, or size, that links all pairs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import TaspLabError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.overrides import overridden
from tasp_lab.prediction import kept as evaluator
from tasp_lab.prediction.compare import compare
from tasp_lab.prediction.kept import build_once
from tasp_lab.prediction.predict_step import predict_step
from tasp_lab.prediction.training_step import phases
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.travel import TravelSteps
from tasp_lab.schedules.build import build_schedules, followed
from tasp_lab.schedules.registry import ATTENTION, follows, uses_rings
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

NAMES = [name for name, spec in ATTENTION.items() if follows(name) != "rates" and not spec.split and not spec.decode]
OF_RANKS = [name for name in NAMES if follows(name) == "ranks"]
EXPRESSIONS = ("full-mesh:4", "switch:4", "full-mesh:6", "nodes:2x4", "nodes:3x2")
OF_ONE_SIZE = ("full-mesh:8", "switch:8", "nodes:2x4", "nodes:4x2")
LAYER = Workload(2048, heads=8, head_dim=16, kv_heads=4, mask="causal")
BOTH = AttentionOptions("both")


def with_rates(topology: Topology, seed: int, same: bool) -> Topology:
    """The topology with drawn bandwidths and latencies; with `same` all links have one bandwidth."""
    random = np.random.default_rng(seed)
    rates, latencies_s = random.integers(1, 1000, len(topology.links)), random.integers(0, 1000, len(topology.links))
    links = tuple(
        replace(link, bandwidth_bytes_per_s=1e9 * float(rates[0 if same else number]), latency_s=1e-6 * float(latency))
        for number, (link, latency) in enumerate(zip(topology.links, latencies_s, strict=True))
    )
    shared = tuple(
        replace(each, bandwidth_bytes_per_s=1e9 * float(random.integers(1, 1000))) for each in topology.shared
    )
    return replace(topology, name=f"drawn {seed}", links=links, shared=shared)


def on(topology: Topology, rings: Decomposition | None) -> Decomposition | None:
    """The same rings, on another topology that has the same links with other rates."""
    return rings and Decomposition(topology, rings.rings, rings.fold, rings.reason, rings.shares)


def digests(name: str, topology: Topology, layer: Workload, rings: Decomposition | None) -> list[str] | str:
    """The schedules of both passes; or why there are none, without the name of the topology."""
    try:
        return [each.digest for each in build_schedules(name, topology, layer, rings, BOTH)]
    except TaspLabError as error:
        return str(error).replace(topology.name, "")


@pytest.mark.parametrize("name", NAMES)
@given(
    st.sampled_from(EXPRESSIONS), st.lists(st.integers(0, 10**6), min_size=2, max_size=2), st.booleans(),
    st.sampled_from(["full", "causal"]),
)  # fmt: skip
@settings(max_examples=8)
def test_a_schedule_follows_from_the_structure(
    name: str, expression: str, seeds: list[int], same: bool, mask: str
) -> None:
    topology = load_machine(expression).topology
    first, second = (with_rates(topology, seed, same) for seed in seeds)
    if first.structure != second.structure:  # by chance, all links of one of them are equally fast
        return
    layer = replace(LAYER, mask=mask)
    rings = decompose(topology) if uses_rings(name) else None
    assert digests(name, first, layer, on(first, rings)) == digests(name, second, layer, on(second, rings))


FAMILIES = (
    "usp:2x4", "usp:4x2:token-ring", "usp:2x4:burst", "usp:8x1", "usp:1x8", "grid:2x4", "grid:4x2", "double-ring:2x4",
    "double-ring:4x2", "double-ring:1x8", "startrail:2x4",
)  # fmt: skip


@pytest.mark.parametrize("name", [*OF_RANKS, *FAMILIES])
@given(
    st.lists(st.tuples(st.sampled_from(OF_ONE_SIZE), st.integers(0, 10**6)), min_size=2, max_size=2),
    st.sampled_from(["full", "causal"]),
    st.sampled_from(["auto", "strided", "consecutive"]),
)
@settings(max_examples=8)
def test_a_schedule_follows_from_ranks_groups_and_rings(
    name: str, drawn: list[tuple[str, int]], mask: str, groups: str
) -> None:
    options = replace(BOTH, groups=groups) if name in FAMILIES else BOTH
    layer, around = replace(LAYER, mask=mask), decompose(load_machine("full-mesh:8").topology)
    found: dict[object, set[tuple[str, ...]]] = {}
    for expression, seed in drawn:
        topology = with_rates(load_machine(expression).topology, seed, same=False)
        rings = on(topology, around) if uses_rings(name) else None
        schedules = build_schedules(name, topology, layer, rings, options)
        found.setdefault(followed(name, topology, options), set()).add(tuple(each.digest for each in schedules))
    assert all(len(digests) == 1 for digests in found.values())
    assert len(found) == 1 or groups == "auto"


def test_structure_is_links_nodes_and_whether_they_are_equally_fast() -> None:
    topologies = [load_machine(each).topology for each in (*EXPRESSIONS, "full-mesh:5", "nodes:4x2", "hypercube:2")]
    assert len({each.structure for each in topologies}) == len(topologies)
    switch = load_machine("switch:4").topology
    assert with_rates(switch, 1, same=True).structure == switch.structure
    assert with_rates(switch, 1, same=False).structure != switch.structure


def test_equal_topologies_share_schedules_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "_kept", {})
    one, other = (with_rates(load_machine("switch:4").topology, seed, same=True) for seed in (1, 2))
    mesh = load_machine("full-mesh:4").topology
    assert build_once("ulysses", one, LAYER, None, BOTH) is build_once("ulysses", other, LAYER, None, BOTH)
    assert build_once("usp:2x2", one, LAYER, None, BOTH) is build_once("usp:2x2", other, LAYER, None, BOTH)
    strided = replace(BOTH, groups="strided")
    assert build_once("usp:2x2", one, LAYER, None, BOTH) is not build_once("usp:2x2", one, LAYER, None, strided)
    assert build_once("usp:2x2", one, LAYER, None, BOTH) is build_once("usp:2x2", mesh, LAYER, None, BOTH)
    assert build_once("usp:2x2:tasp", one, LAYER, None, BOTH) is not build_once(
        "usp:2x2:tasp", other, LAYER, None, BOTH
    )
    assert build_once("ulysses", one, LAYER, None, BOTH) is build_once("ulysses", mesh, LAYER, None, BOTH)
    assert build_once("ulysses", one, LAYER, None, BOTH) is not build_once(
        "ulysses", load_machine("full-mesh:8").topology, LAYER, None, BOTH
    )
    ring = load_machine("ring:4").topology  # not all pairs are linked, so that a search chooses its rings by rates
    others = with_rates(ring, 1, same=True), with_rates(ring, 2, same=True)
    assert len({id(build_once("ring-attention", each, LAYER, None, BOTH)) for each in others}) == 2
    longer = replace(LAYER, sequence=4096)
    assert build_once("ulysses", one, LAYER, None, BOTH) is not build_once("ulysses", one, longer, None, BOTH)
    rings = decompose(mesh)
    reverse = Decomposition(mesh, rings.rings[:, ::-1], rings.fold, "reversed")
    assert build_once("tasp", mesh, LAYER, rings, BOTH) is build_once("tasp", mesh, LAYER, on(mesh, rings), BOTH)
    assert build_once("tasp", mesh, LAYER, rings, BOTH) is not build_once("tasp", mesh, LAYER, reverse, BOTH)
    assert len(evaluator._kept) <= evaluator.MOST_KEPT


def test_a_what_if_of_bandwidths_builds_no_schedule_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither candidates of a comparison, but those that follow rates, nor phases of a step."""
    built = Counter[str]()
    construct = Schedule.__post_init__

    def counted(schedule: Schedule) -> None:
        built[schedule.name] += 1
        construct(schedule)

    monkeypatch.setattr(Schedule, "__post_init__", counted)
    monkeypatch.setattr(evaluator, "_kept", {})
    monkeypatch.setattr(phases, "_kept", {})
    machine = load_machine("h100-8")
    slower = overridden(machine, ["link.bandwidth=x0.5"])
    first = compare(machine, LAYER, passes="both", screen=True)
    assert len(built) > 20
    built.clear()
    again = compare(slower, LAYER, passes="both", screen=True)
    assert {follows(name) for name in built} <= {"rates"}
    assert first.best.time_s < again.best.time_s
    steps = []
    for each in (machine, slower):
        built.clear()
        steps.append(predict_step(each, "llama-3-8b", 16384, "ulysses"))
    assert not {"forward", "backward"} & set(built)
    assert steps[0].time_s < steps[1].time_s


def test_steps_of_a_large_schedule_are_kept_until_the_next_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is too large they are made whenever they are needed."""
    made = Counter[int]()
    make = TravelSteps.step

    def counted(steps: TravelSteps, index: int) -> Step:
        made[id(steps)] += 1
        return make(steps, index)

    def walked_twice(name: str) -> list[float]:
        """How often each step of both passes was made for two walks through all."""
        passes = build_once(name, load_machine("full-mesh:4").topology, LAYER, None, BOTH)
        built.append(passes)
        made.clear()
        for each in passes * 2:
            assert len(list(each.steps)) == len(each.steps)
        return [made[id(each.steps)] / len(each.steps) for each in passes]

    built: list[tuple[Schedule, ...]] = []  # else the number of one may be given to another
    monkeypatch.setattr(evaluator, "_kept", {})
    monkeypatch.setattr(TravelSteps, "step", counted)
    monkeypatch.setattr(evaluator, "MANY_KEPT", 5)
    assert walked_twice("zigzag-ring-attention") == [1, 1]
    assert walked_twice("zigzag-ring-attention") == [0, 0]
    assert walked_twice("ring-attention") == [1, 1]
    assert walked_twice("zigzag-ring-attention") == [2, 2]
    monkeypatch.setattr(evaluator, "MOST_KEPT_AT_ONCE", 10)
    assert walked_twice("striped-ring-attention") == [2, 2]
    assert walked_twice("ring-attention") == [2, 2]
