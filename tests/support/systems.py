"""Systems for tests of any layer: TokenRing with zigzag shards under a causal mask, USP of any outer schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import strategies as st

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import Passes
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.attention.usp import in_groups
from tasp_lab.schedules.build import attention_schedules, linear_schedules
from tasp_lab.schedules.registry import attention_names_on
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload


def passes_of(name: str, topology: Topology, layer: Workload, **options: Any) -> Passes:
    return Passes(*attention_schedules(name, topology, layer, None, AttentionOptions("both", **options)))


def token_ring_passes(topology: Topology, layer: Workload, **options: Any) -> Passes:
    return passes_of("token-ring" if layer.mask == "full" else "zigzag-token-ring", topology, layer, **options)


def token_ring(topology: Topology, layer: Workload, **options: Any) -> Schedule:
    return token_ring_passes(topology, layer, **options).forward


def ulysses_passes(topology: Topology, layer: Workload, **options: Any) -> Passes:
    return passes_of("ulysses", topology, layer, **options)


def ulysses(topology: Topology, layer: Workload, **options: Any) -> Schedule:
    return ulysses_passes(topology, layer, **options).forward


def usp(topology: Topology, outer: Schedule, members: int) -> Schedule:
    dtype = outer.task.result_dtype if isinstance(outer.task, AttentionTask) else "fp32"
    return in_groups(f"usp-{members} {outer.name}", topology, outer, members, dtype)


def schedules_for(layer: Workload, world_size: int, *, variants: bool = False) -> list[str]:
    """The names of all schedules that apply to a layer on a full mesh, with or without variants of families."""
    names = attention_names_on(world_size, variants=variants)
    return [name for name in names if has_heads(name, world_size, layer.heads, layer.kv_head_count)]


def names_for(layer: Workload, world_size: int) -> st.SearchStrategy[str]:
    """One of these names."""
    names = st.sampled_from(attention_names_on(world_size))
    return names.filter(lambda name: has_heads(name, world_size, layer.heads, layer.kv_head_count))


@cache
def has_heads(name: str, world_size: int, heads: int, kv_heads: int) -> bool:
    """Whether a schedule has a head for each rank that shares them: the only reason that a layer does not fit."""
    layer = Workload(world_size, heads=heads, kv_heads=kv_heads, head_dim=1, mask="full")
    try:
        attention_schedules(name, full_mesh(world_size), layer)
    except ScheduleError as error:
        if "expected as many heads or more" in str(error):
            return False
        raise
    return True


def lasp2(
    topology: Topology, layer: Workload, decay: float | tuple[float, ...] = 1.0, *, trim: bool = True
) -> Schedule:
    """The forward pass of LASP-2 of a layer of any kind, with a constant decay, one number or one per KV head."""
    decays = decay if isinstance(decay, tuple) else (decay,) * layer.kv_head_count
    linear = replace(layer, kind="linear", mask="causal", decay="head")
    (schedule,) = linear_schedules("lasp-2", topology, linear, None, AttentionOptions(trim=trim), decays)
    return schedule
