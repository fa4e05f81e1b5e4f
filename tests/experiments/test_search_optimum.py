"""The model of the table of optima: CP-SAT's best is that of trying everything, and of the simulator on a full mesh."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from experiments.tables.search_optimum import Model, Transfer, optimum, plan_of, time_s, transfers_of

pytest.importorskip("ortools")

RING = ({1: 1.0},)
MESH = ({1: 1.0}, {2: 1.0})
SWITCH = ({1: 1.0, 2: 1.0},)


def every_way(model: Model) -> float:
    """The least time of three ranks, by all decisions in all orders, one piece."""
    keys = {1: [Transfer("keys", 0, 1, via) for via in (0, 2)], 2: [Transfer("keys", 0, 2, via) for via in (0, 1)]}
    choices = [[*keys[d], Transfer("queries", 0, d)] for d in (1, 2)]
    best = float("inf")
    for chosen in product(*choices):
        results = [each._replace(kind="results") for each in chosen if each.kind == "queries"]
        if any(model.step(each) not in model.latency_s for each in (*chosen, *results)):
            continue
        for order in permutations(chosen):
            there = {0} | set()
            possible = True
            for each in order:
                possible &= each.kind == "queries" or each.via in there
                there |= {each.offset} if each.kind == "keys" else set()
            if possible:
                best = min(best, time_s(model, list(order)))
    return best


@pytest.mark.parametrize("links", [RING, MESH, SWITCH])
@pytest.mark.parametrize(("keys", "queries"), [(3.0, 1.0), (2.0, 2.0), (1.0, 5.0)])
@pytest.mark.parametrize("tile_s", [1.0, 2.5])
def test_with_three_ranks_it_is_the_best_of_all_ways(
    links: tuple[dict[int, float], ...], keys: float, queries: float, tile_s: float
) -> None:
    """To the rounding of ticks."""
    latency = {step: 0.5 for link in links for step in link}
    sizes = {"keys": keys, "queries": queries, "results": queries}
    model = Model((3,), links, latency, tile_s, sizes, 1)
    found = optimum(model)
    assert found.time_s == pytest.approx(every_way(model), rel=1e-3)
    assert found.bound_s == pytest.approx(found.time_s, rel=1e-3)
    assert time_s(model, found.transfers) == pytest.approx(found.time_s, rel=1e-3)


def test_a_plan_has_the_transfers_from_which_it_was_made() -> None:
    sent = [Transfer("queries", 0, 3), Transfer("keys", 0, 1), Transfer("keys", 1, 1), Transfer("keys", 0, 2, 1),
            Transfer("keys", 1, 2)]  # fmt: skip
    assert transfers_of(plan_of(sent, 4, 2)) == sent
