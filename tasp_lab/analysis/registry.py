"""Schedules by name: of a collective, or of the passes of an attention layer.

The *work* is a number of bytes per rank, or a `tasp_lab.workload.layer.Workload`. Each kind of work has schedules of
its own, and a name of the other kind is refused. The name of a schedule determines the collective.
`tasp_lab.attention.options.AttentionOptions` select the passes of a layer and their dataflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tasp_lab.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.attention.registry import USES_RINGS as ATTENTION_OVER_RINGS
from tasp_lab.attention.registry import attention_names, attention_schedules, check_attention, is_attention
from tasp_lab.choices import Pass as Pass
from tasp_lab.collectives.kinds import with_article
from tasp_lab.collectives.registry import COLLECTIVES, collective, kind_of
from tasp_lab.decomposition.decompose import Decomposition
from tasp_lab.errors import ScheduleError, unknown
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

Work = int | Workload
"""The bytes that each rank owns of a collective (`tasp_lab.collectives.registry`), or an attention layer."""

USES_RINGS = (*(name for name, spec in COLLECTIVES.items() if spec.uses_rings), *ATTENTION_OVER_RINGS)
"""The schedules that accept a decomposition."""


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
    name : a name in `COLLECTIVES` for bytes, for a layer one of `tasp_lab.attention.registry`.
    topology : the ranks and links.
    work : bytes per rank, or the layer.
    decomposition : the rings of the schedules in `USES_RINGS`, if not the topology's own.
    options : of a layer, see `tasp_lab.attention.registry.attention_schedules`.

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
            kind = with_article(COLLECTIVES[name].kind)
            raise ScheduleError(f"schedule {name!r} is {kind}, expected no options of attention")
        return (collective(name, topology, work, decomposition),)
    return attention_schedules(name, topology, work, decomposition, options)


def check_names(names: Iterable[str], work: Work) -> None:
    """Raise `ScheduleError` for the first name that is no schedule for this work.

    All schedules of one call must implement the same collective.

    >>> check_names(["ring"], Workload(sequence=64, heads=1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    tasp_lab.errors.ScheduleError: schedule 'ring' is an AllGather, expected one for attention: ring-attention, ...
    """
    names, is_layer = list(names), isinstance(work, Workload)
    right: Sequence[str] = attention_names() if is_layer else list(COLLECTIVES)
    for name in names:
        if is_layer and name in COLLECTIVES:
            kind = with_article(COLLECTIVES[name].kind)
            raise ScheduleError(f"schedule {name!r} is {kind}, expected one for attention: {', '.join(right)}")
        if not is_layer and is_attention(name):
            raise ScheduleError(f"schedule {name!r} is for attention, expected a collective: {', '.join(right)}")
        if not is_layer and name not in right:
            raise ScheduleError(unknown("schedule", name, right))
    if is_layer:
        check_attention(names)
    elif names:
        kind_of(names)
