"""What Hypothesis draws from."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import get_args

from hypothesis import strategies as st

from tasp_lab.core.choices import Decay
from tasp_lab.schedules.registry import schedules_of
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.masks import range_masks

schedule_names = st.sampled_from(schedules_of("AllGather"))
exact_bandwidths = st.fractions(Fraction(1, 10), Fraction(1000), max_denominator=50)
exact_latencies = st.fractions(Fraction(0), Fraction(10), max_denominator=50)


@st.composite
def complete_topologies(draw: st.DrawFn, max_ranks: int = 9) -> Topology:
    """A mesh, a switch or nodes: topologies on which every schedule runs. All numbers are exact."""
    bandwidth, latency = draw(exact_bandwidths), draw(exact_latencies)
    kind = draw(st.sampled_from(["full-mesh", "switch", "nodes"]))
    if kind == "nodes":
        node_count, per_node = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (2, 4), (3, 3)]))
        return nodes(
            node_count,
            per_node,
            draw(st.sampled_from(["full-mesh", "switch"])),
            draw(st.sampled_from(["fabric", "rails"])),
            link_bandwidth_bytes_per_s=bandwidth,
            link_latency_s=latency,
            nic_bandwidth_bytes_per_s=draw(exact_bandwidths),
            nic_latency_s=draw(exact_latencies),
        )
    world_size = draw(st.integers(1, max_ranks))
    return (full_mesh if kind == "full-mesh" else switch)(world_size, bandwidth, latency)


@st.composite
def topologies_and_schedules(draw: st.DrawFn, max_ranks: int = 9) -> tuple[Topology, str]:
    """A topology and the name of a schedule that runs on it."""
    if draw(st.booleans()):
        topology = draw(complete_topologies(max_ranks))
        few = topology.world_size <= 4  # trees of more ranks are many blocks
        return topology, draw(schedule_names if few else schedule_names.filter(lambda name: name != "trees"))
    rings = st.builds(ring, st.integers(1, max_ranks), exact_bandwidths, exact_latencies)
    return draw(rings), draw(st.sampled_from(["ring", "multi-ring"]))


value_dims = st.none() | st.integers(1, 4)
"""Elements per head of values: as many as of keys, fewer or more."""


windows_on_both_sides = st.tuples(*[st.none() | st.integers(0, 12)] * 2)
"""How many keys before and after its own position a query sees, None: all."""


@st.composite
def attention_layers(draw: st.DrawFn, max_positions: int = 40, packed: bool = True) -> Workload:
    """Small layers: any length and values, grouped heads, both masks, windows; `packed`: also documents, some empty,
    and ranges in place of a mask."""
    sequence, mask = draw(st.integers(1, max_positions)), draw(st.sampled_from(["full", "causal"]))
    heads = draw(st.sampled_from([1, 4, 6, 12]))
    documents, kind = None, draw(st.sampled_from(["", "documents", "ranges"])) if packed else ""
    if kind == "documents":
        cuts = sorted(draw(st.lists(st.integers(0, sequence), min_size=1, max_size=3)))
        documents = tuple(end - start for start, end in pairwise([0, *cuts, sequence]))
    layer = Workload(
        sequence=sequence,
        heads=heads,
        kv_heads=draw(st.sampled_from([each for each in range(1, heads + 1) if heads % each == 0])),
        head_dim=draw(st.integers(1, 3)),
        value_dim=draw(value_dims),
        mask="causal" if mask == "causal" else "full",
        window=draw(st.none() | (st.integers(1, max_positions) if mask == "causal" else windows_on_both_sides)),
        documents=documents,
    )
    if kind != "ranges":
        return layer
    return replace(layer, mask="ranges", window=None, ranges=draw(range_masks(sequence)))


@st.composite
def cached_layers(draw: st.DrawFn, max_positions: int = 40) -> Workload:
    """Small layers of which some positions are cached, from one to all but one."""
    layer = draw(attention_layers(max_positions, packed=False).filter(lambda layer: layer.sequence > 1))
    return replace(layer, cached_keys=draw(st.integers(1, layer.sequence - 1)))


def documents(draw: st.DrawFn, sequence: int) -> tuple[int, ...] | None:
    """None, or documents of any lengths, some of them empty."""
    if draw(st.booleans()):
        return None
    cuts = sorted(draw(st.lists(st.integers(0, sequence), max_size=5)))
    return tuple(end - start for start, end in pairwise([0, *cuts, sequence]))


@st.composite
def linear_layers(draw: st.DrawFn, max_positions: int = 16) -> Workload:
    """Small layers of linear attention: every decay, packed documents, grouped heads; under the full mask no decay."""
    sequence, mask = draw(st.integers(1, max_positions)), draw(st.sampled_from(["full", "causal"]))
    return Workload(
        sequence,
        heads=4,
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(st.integers(1, 3)),
        value_dim=draw(value_dims),
        mask=mask,  # type: ignore[arg-type]
        documents=documents(draw, sequence) if mask == "causal" else None,
        kind="linear",
        decay=draw(st.sampled_from(get_args(Decay))) if mask == "causal" else "none",
    )


@st.composite
def hybrid_layers(draw: st.DrawFn, max_positions: int = 60, heads: int = 24) -> Workload:
    """Small hybrids of any pattern. Heads are a multiple of most numbers of ranks, as those of Ulysses are."""
    linear = draw(linear_layers(max_positions))
    return replace(
        linear,
        batch=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=None,
        head_dim=draw(st.integers(1, 2)),
        window=draw(st.sampled_from([None, 3])) if linear.mask == "causal" else None,
        kind="hybrid",
        layers=draw(st.text("LS", min_size=1, max_size=5)),
    )
