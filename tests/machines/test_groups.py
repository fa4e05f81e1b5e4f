"""Communicators of groups: messages depend on the ranks of their group, not on those of the machine."""

from __future__ import annotations

import numpy as np
import pytest

from sim.simulate import simulate
from tasp_lab.core.arrays import IntArray
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.libraries.groups import GroupLibrary
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.training_step.layout import Layout, state_groups, tensor_groups
from tasp_lab.prediction.training_step.messages import gather
from tasp_lab.prediction.training_step.phases import in_groups, part_of
from tasp_lab.prediction.training_step.simulation import group_machine, with_groups
from tasp_lab.schedules.collectives.library_rings import library_schedule


def grouped(name: str, layout: Layout) -> tuple[Machine, IntArray]:
    machine = load_machine(name)
    places = layout.ranks(machine.topology.world_size)
    return with_groups(machine, machine.topology, places), places


def sums_s(name: str, tp: int) -> float:
    """The time of a sum in a tensor group."""
    machine = load_machine(name)
    group = group_machine(machine, tensor_groups(Layout(tp=tp, cp=1).ranks(machine.topology.world_size)))
    return float(simulate(library_schedule("reduce_scatter", group.topology, 2**28), group, events=False).time_s)


@pytest.mark.parametrize("family", ["h100", "b200", "mi300x"])
def test_sums_of_a_node_take_as_long_however_many_nodes_there_are(family: str) -> None:
    assert sums_s(f"{family}-16x8", 8) == pytest.approx(sums_s(f"{family}-2x8", 8), rel=1e-9)


def test_gathers_between_nodes_fill_their_nics() -> None:
    """Eight groups, each with a rank and a NIC per node: as long as bytes over the rate of a NIC, and hops beside."""
    machine, places = grouped("h100-32x8", Layout(tp=8, cp=1))
    groups, size = state_groups(places), 2**28
    found = simulate(in_groups(gather(part_of(machine.topology, groups), size), groups), machine, events=False)
    assert size * 31 / 32 / 50e9 < float(found.time_s) < 1.15 * size * 31 / 32 / 48e9


def test_a_message_belongs_to_the_smallest_group_with_both_ends() -> None:
    machine, _ = grouped("h100-4x8", Layout(tp=2, cp=4, dp=4))
    library = machine.comm_library
    assert isinstance(library, GroupLibrary)
    pairs = {(0, 2): 0, (0, 8): 3}  # context, states between nodes
    found = library.places(*np.array(list(pairs)).T)
    assert found.tolist() == list(pairs.values())
    assert [kind.channels is None for kind in library.kinds] == [True, False]


def test_context_groups_alone_have_the_communicator_of_all_ranks() -> None:
    machine, _ = grouped("h100-4x8", Layout())
    assert isinstance(machine.comm_library, ChannelLibrary)
