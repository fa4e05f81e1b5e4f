"""Components of graphs, against networkx."""

from __future__ import annotations

import networkx as nx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.topology.components import components, strong_components

ends_and_sizes = st.integers(1, 9).flatmap(
    lambda size: st.tuples(st.lists(st.tuples(*[st.integers(0, size - 1)] * 2), max_size=14), st.just(size))
)


@given(ends_and_sizes, st.booleans())
def test_components_are_those_of_networkx(case: tuple[list[tuple[int, int]], int], both_ways: bool) -> None:
    links, size = case
    links = links + [(b, a) for a, b in links] if both_ways else links
    graph = nx.DiGraph(links)
    graph.add_nodes_from(range(size))
    ends = np.array(links, dtype=np.int64).reshape(-1, 2)
    for numbers, expected in (
        (components(ends, size), nx.weakly_connected_components(graph)),
        (strong_components(ends, size), nx.strongly_connected_components(graph)),
    ):
        found = {frozenset(np.flatnonzero(numbers == number).tolist()) for number in set(numbers.tolist())}
        assert found == {frozenset(part) for part in expected}
        firsts = [numbers.tolist().index(number) for number in range(len(found))]
        assert firsts == sorted(firsts), "numbered in the order of first vertices"


def test_a_long_chain_takes_few_rounds() -> None:
    chain = np.stack([np.arange(9_999), np.arange(1, 10_000)], axis=1)
    assert not components(chain, 10_000).any()
