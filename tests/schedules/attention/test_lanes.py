"""A law of all attention schedules but those along trees: what a rank sends on a lane has one destination.

Transfers of a lane of a rank follow one another in the model, while a library may run those to several ranks at once.
On the lane of a tree a rank sends to all its children.
"""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS, Dataflow
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules
from tasp_lab.schedules.registry import attention_names_on, options_for
from tasp_lab.topology.builders import full_mesh, nodes, switch
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.strategies import attention_layers

complete = st.builds(full_mesh, st.integers(2, 6)) | st.builds(switch, st.integers(2, 6)) | st.just(nodes(2, 3))
dataflows: st.SearchStrategy[Dataflow] = st.sampled_from(["auto", *DATAFLOWS])


def with_several_destinations(schedule: Schedule) -> list[tuple[int, int]]:
    """The rank and the lane of each such pair."""
    rows = np.concatenate([np.stack([step.source, step.lane, step.destination], axis=1) for step in schedule.steps])
    pairs, count = np.unique(np.unique(rows, axis=0)[:, :2], axis=0, return_counts=True)
    return [(rank, lane) for rank, lane in pairs[count > 1].tolist()]


@settings(max_examples=100)
@given(complete, attention_layers(), dataflows, st.data())
def test_the_transfers_of_a_lane_of_a_rank_have_one_destination(
    topology: Topology, layer: Workload, dataflow: Dataflow, data: st.DataObject
) -> None:
    names = [name for name in attention_names_on(topology.world_size, variants=True) if "trees" not in name]
    name, trim = data.draw(st.sampled_from(names)), data.draw(st.booleans())
    options = options_for(name, AttentionOptions("both", trim=trim, dataflow=dataflow))
    try:
        passes = attention_schedules(name, topology, layer, None, options)
    except ScheduleError as error:
        assume(not any(reason in str(error) for reason in ("heads", "dataflow", "other links among them")))
        raise
    assert [with_several_destinations(each) for each in passes] == [[], []]
