"""Schedules of one kind, built from their names: a collective, or the passes of a layer of attention.

    collective("ring", full_mesh(4), 64)                               # 64 bytes per rank
    attention_schedules("tasp", full_mesh(4), layer, options=AttentionOptions("both"))

Hybrids are stacks of such layers (`tasp_lab.schedules.hybrid.stack`), and `tasp_lab.schedules.for_work` builds for any
work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.collectives.conditions import check_collective
from tasp_lab.schedules.files import parts_of
from tasp_lab.schedules.registry import (
    ATTENTION,
    COLLECTIVES,
    follows,
    kind_of,
    known_attention,
    linear_spec,
    options_of,
)
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

if TYPE_CHECKING:
    from tasp_lab.workload.sequence_layout import SequenceLayout


def collective(name: str, topology: Topology, shard_bytes: int, decomposition: Decomposition | None = None) -> Schedule:
    """The schedule of a collective, by name; `decomposition` is ignored by schedules without rings.

    Raises `ScheduleError` for an unknown name, and for what is no schedule of the collective.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> collective("ring-all-reduce", full_mesh(8), 64).transfers
    112
    """
    kind = kind_of([name])
    rings = [decomposition] if COLLECTIVES[name].uses_rings else []
    schedule: Schedule = COLLECTIVES[name].builder(topology, shard_bytes, *rings)
    check_collective(schedule, kind, shard_bytes)
    return schedule


def attention_schedules(
    name: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[Schedule, ...]:
    """The attention schedules of a name, one per pass, in execution order.

    Parameters
    ----------
    name : a name of softmax attention, of a family with a split: ``usp:2x4``.
    topology : the ranks and links; transfers use its routes.
    workload : the layer.
    decomposition : the rings of schedules that use some; by default those of `decompose(topology)`. Others ignore
        it.
    options : which passes, and how.

    Raises `ScheduleError` for an unknown name, a split of another world size, a layer of linear attention, options that
    do not apply, and if there are too many blocks to verify.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> layer, options = Workload(sequence=64, mask="causal"), AttentionOptions("both", dataflow="rotate-kv")
    >>> [schedule.transfers for schedule in attention_schedules("ring-attention", full_mesh(4), layer, None, options)]
    [6, 12]
    """
    spec, family = known_attention(name, topology.world_size)
    if workload.kind != "softmax":
        raise ScheduleError(
            f"schedule {name!r}: a layer of {workload.kind} attention, expected one of softmax attention"
        )
    options.check_known(name, options_of(name))
    options.check_layer(workload)
    rings = {"decomposition": decomposition} if spec.uses_rings else {}
    if not spec.split:
        passes: tuple[Schedule, ...] = spec.builder(name, topology, workload, options, **rings)
        return passes

    from tasp_lab.schedules.attention.rank_order import in_order  # families alone have groups

    def build(renumbered: Topology) -> tuple[Schedule, ...]:
        asked = replace(options, groups="auto")
        passes: tuple[Schedule, ...] = spec.builder(name, renumbered, workload, asked, **rings, **family)
        return passes

    return in_order(build, topology, _order(name, topology, options))


def linear_schedules(
    name: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
    decays: tuple[float, ...] = (),
) -> tuple[Schedule, ...]:
    """The schedules of linear attention of a name, one per pass, in execution order.

    Parameters
    ----------
    name : a name of linear attention.
    topology : the ranks and links; transfers use its routes.
    workload : the layer, whose kind is ``linear``.
    decomposition : the rings of schedules that use some; by default those of `decompose(topology)`. Others ignore
        it.
    options : which passes, and how.
    decays : with decay ``head`` the decay per position of each KV head, see `tasp_lab.schedules.linear.chunks`.

    Raises `ScheduleError` for an unknown name, options that do not apply, and what the schedule cannot do.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> layer = Workload(sequence=64, mask="causal", kind="linear", decay="scalar")
    >>> found = linear_schedules("lasp", full_mesh(4), layer, None, AttentionOptions("both"))
    >>> [schedule.transfers for schedule in found]
    [3, 3]
    """
    spec = linear_spec(name)
    options.check_known(name, spec.options)
    rings = {"decomposition": decomposition} if spec.uses_rings else {}
    passes: tuple[Schedule, ...] = spec.builder(name, topology, workload, options, decays, **rings)
    return passes


def _members(name: str) -> int:
    """The number of ranks of each group of a family."""
    spec, family = known_attention(name, None)
    members: int = family["split"][spec.members]
    return members


def _order(name: str, ranks: int | Topology, options: AttentionOptions) -> IntArray:
    """The order of ranks in which the groups of a family are consecutive."""
    from tasp_lab.schedules.attention.rank_order import rank_order

    return rank_order(name, options.groups, _members(name), ranks)


def groups_on(name: str, ranks: int | Topology, options: AttentionOptions = DEFAULT_OPTIONS) -> str:
    """The groups of a family as lists of ranks, which are a value of the option `groups`. Raises `ScheduleError`.

    >>> groups_on("usp:2x2", 4, AttentionOptions(groups="strided"))
    '0,2|1,3'
    """
    from tasp_lab.schedules.attention.rank_order import listed

    return listed(_order(name, ranks, options), _members(name))


def followed(name: str, topology: Topology, options: AttentionOptions = DEFAULT_OPTIONS) -> object:
    """What the schedules of a name follow from on a topology: where it is equal, equal rings give equal schedules.

    Raises `ScheduleError` for an unknown name.

    >>> from tasp_lab.topology.builders import full_mesh, switch
    >>> [followed("ulysses", each) for each in (full_mesh(4), switch(4))]
    [4, 4]
    """
    what = follows(name)
    if what == "rates" or not topology.is_complete:  # rates decide which rings a search finds
        return topology
    seen = topology.world_size if what == "ranks" else topology.structure
    family, _ = parts_of(name)
    if family not in ATTENTION or not ATTENTION[family].split:
        return seen
    known_attention(name, topology.world_size)
    return seen, groups_on(name, topology, options)


def attention_layout(
    name: str, workload: Workload, ranks: int | Topology, options: AttentionOptions = DEFAULT_OPTIONS
) -> SequenceLayout:
    """The sequence layout of an attention schedule: that of `attention_schedules` with the same topology and options.

    Parameters
    ----------
    name, workload, options : as there; of the options only `groups` matters.
    ranks : the number of ranks; or the topology, which decides of which ranks groups are `auto`.

    Raises `ScheduleError` for an unknown name, a split of another world size and groups that are none of it.
    """
    world_size = ranks if isinstance(ranks, int) else ranks.world_size
    spec, family = known_attention(name, world_size)
    layout = spec.layout_on(workload, world_size, **family)
    return layout.on_ranks(_order(name, ranks, options)) if spec.split else layout
