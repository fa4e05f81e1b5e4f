"""Schedules for any work, built from their names: of a collective, of the passes of a layer, or of a hybrid.

    build_schedules("ring", full_mesh(4), 64)                          # 64 bytes per rank
    build_schedules("tasp", full_mesh(4), layer, options=AttentionOptions("both"))

The *work* is a number of bytes per rank, or a `tasp_lab.workload.layer.Workload`. Each kind of work has schedules of
its own (`tasp_lab.schedules.registry`), and a name of another kind is refused. The name of a schedule determines the
collective. `tasp_lab.schedules.attention.options.AttentionOptions` select the passes of a layer and their dataflow.
"""

from __future__ import annotations

from tasp_lab.core.errors import ScheduleError, TooManyBlocksError
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.build import attention_schedules, collective, linear_schedules
from tasp_lab.schedules.collectives.kinds import with_article
from tasp_lab.schedules.registry import check_names, kind_of
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Work, Workload


def build_schedules(
    name: str,
    topology: Topology,
    work: Work,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[Schedule, ...]:
    """The schedules of a name, one for each requested pass, in the order of execution.

    Parameters
    ----------
    name : a name of `tasp_lab.schedules.registry`.
    topology : the ranks and links.
    work : bytes per rank, or the layer.
    decomposition : the rings of schedules that use some (`uses_rings`), if not the topology's own.
    options : of a layer, see `attention_schedules`.

    Raises `ScheduleError` for an unknown name, one of the other kind, options of a collective, and more than can be
    proved.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> [schedule.transfers for schedule in build_schedules("ring", full_mesh(4), 64)]
    [12]
    >>> layer, both = Workload(sequence=64, mask="causal", heads=1), AttentionOptions("both", dataflow="rotate-kv")
    >>> [schedule.transfers for schedule in build_schedules("ring-attention", full_mesh(4), layer, options=both)]
    [6, 12]
    """
    check_names([name], work)
    if not isinstance(work, Workload):
        if options != DEFAULT_OPTIONS:
            kind = with_article(kind_of([name]))
            raise ScheduleError(f"schedule {name!r} is {kind}, expected no options of attention")
        return (collective(name, topology, work, decomposition),)
    try:
        if work.kind == "hybrid":
            from tasp_lab.schedules.hybrid.stack import hybrid_schedules  # with the tasks of both kinds of layers

            return hybrid_schedules(name, topology, work, decomposition, options)
        build = attention_schedules if work.kind == "softmax" else linear_schedules
        return build(name, topology, work, decomposition, options)
    except TooManyBlocksError as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None
