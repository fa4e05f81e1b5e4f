"""Several groups of ranks that run a layer at once and share NICs: each has its part of their bandwidth."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Literal, get_args

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.simulate import simulate
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.machines.overrides import overridden
from tasp_lab.rings.decompose import decompose
from tasp_lab.schedule.composition import replicated
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.topology.builders import nodes
from tasp_lab.topology.graph import SharedCapacity, Topology
from tasp_lab.workload.layer import Workload

Passes = Literal["forward", "backward", "both"]
Mask = Literal["full", "causal"]

NIC = Fraction(12)
NETWORK = "network"
"""The switch that all NICs connect to."""


def small(node_count: int, ranks: int) -> Topology:
    """Nodes with a NIC per rank, of exact numbers."""
    found = nodes(
        node_count, ranks,
        link_bandwidth_bytes_per_s=Fraction(50), link_latency_s=Fraction(1, 7),
        nic_bandwidth_bytes_per_s=NIC, nic_latency_s=Fraction(1, 3),
    )  # fmt: skip
    return replace(found, name=f"nodes:{node_count}x{ranks}")


def with_shared_nics(node_count: int, groups: int, ranks: int) -> Topology:
    """Nodes of `groups` times `ranks` ranks: rank ``g * ranks + l`` of a node sends through its NIC ``l``."""
    topology, per_node = small(node_count, groups * ranks), groups * ranks
    shared = []
    for node in range(node_count):
        for local in range(ranks):
            members = [node * per_node + group * ranks + local for group in range(groups)]
            out = tuple(each.name for each in topology.links if each.source in members and each.destination == NETWORK)
            back = tuple(each.name for each in topology.links if each.source == NETWORK and each.destination in members)
            shared += [SharedCapacity(f"nic {local} of node {node}, {names[0]}", NIC, names) for names in (out, back)]
    return replace(topology, shared=tuple(shared))


@settings(max_examples=30)
@given(
    st.sampled_from(["ring-attention", "zigzag-ring-attention", "tasp", "ulysses", "kv-all-gather", "token-ring"]),
    st.sampled_from([(2, 2), (2, 1), (3, 2), (2, 4)]),
    st.sampled_from([2, 3]),
    st.sampled_from(get_args(Passes)),
    st.sampled_from(get_args(Mask)),
)
def test_groups_that_share_nics_have_a_part_of_them_each(
    name: str, shape: tuple[int, int], groups: int, passes: Passes, mask: str
) -> None:
    """A layer in each of G groups takes exactly as long as one group alone with ``nic.bandwidth=x1/G``."""
    node_count, ranks = shape
    layer = Workload(64 * node_count * ranks, heads=4 * node_count * ranks, head_dim=4, mask=mask)
    one = overridden(Machine(small(node_count, ranks)), [f"nic.bandwidth=x1/{groups}"]).topology
    members = np.arange(node_count * groups * ranks).reshape(node_count, groups, ranks)
    of_groups = members.transpose(1, 0, 2).reshape(groups, -1)
    rate = ComputeRate(Fraction(10**5))
    many = Machine(with_shared_nics(node_count, groups, ranks), compute=rate)
    for schedule in build_schedules(name, one, layer, decompose(one), AttentionOptions(passes)):
        alone_s = simulate(schedule, Machine(one, compute=rate)).time_s
        assert simulate(replicated(schedule, of_groups), many).time_s == alone_s
        full_s = simulate(schedule, Machine(small(node_count, ranks), compute=rate)).time_s
        assert alone_s >= full_s
