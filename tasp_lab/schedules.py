"""Schedules by name, whatever they do: a collective of so many bytes per rank, or the passes of an attention layer.

The *work* says which of the two: a number of bytes, or a `tasp_lab.workload.Workload`. Each kind of work has schedules
of its own, and a name of the other kind is refused; which collective it is, the names say. Which passes of a layer, and
how, `AttentionOptions` say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tasp_lab.attention import ATTENTION, USUAL_ROOMS, attention
from tasp_lab.attention_backward import Way, attention_passes
from tasp_lab.collectives import COLLECTIVES, OVER_DECOMPOSITIONS, collective, kind_of, with_article
from tasp_lab.decomposition import Decomposition
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule import Schedule
from tasp_lab.topology import Topology
from tasp_lab.workload import Workload

Work = int | Workload
"""A collective, by the bytes that a rank owns of the whole (`tasp_lab.collectives`), or an attention layer."""

Pass = Literal["forward", "backward", "both"]

USES_RINGS = (*OVER_DECOMPOSITIONS, "tasp")
"""The schedules that a decomposition can be given to."""


@dataclass(frozen=True)
class AttentionOptions:
    """Which passes of a layer are computed, and how.

    Parameters
    ----------
    passes : ``forward``, ``backward``, or ``both``, one after the other.
    trim, rooms : see `tasp_lab.attention.attention`.
    way, gradient_dtype : of the backward pass, see `tasp_lab.attention_backward.attention_passes`.

    Raises `ScheduleError` for passes that there are not, and for a way or dtype of gradients without a backward pass.
    """

    passes: Pass = "forward"
    trim: bool = True
    rooms: int = USUAL_ROOMS
    way: Way = "auto"
    gradient_dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.passes not in ("forward", "backward", "both"):
            raise ScheduleError(f"unknown pass {self.passes!r}, expected forward, backward or both")
        if self.passes == "forward" and (self.way, self.gradient_dtype) != ("auto", "fp32"):
            raise ScheduleError(
                f"way {self.way!r} and gradient dtype {self.gradient_dtype!r} without a backward pass, "
                "expected the pass backward or both"
            )


USUAL_OPTIONS = AttentionOptions()


def build_schedules(
    name: str,
    topology: Topology,
    work: Work,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = USUAL_OPTIONS,
) -> tuple[Schedule, ...]:
    """The schedules of that name, one for each pass that is asked for, in the order in which they run.

    Parameters
    ----------
    name : a name in `COLLECTIVES` for bytes, in `ATTENTION` for a layer.
    topology : its ranks; transfers run between ranks that it joins.
    work : what is to be done.
    decomposition : the rings of the schedules in `USES_RINGS`, if not the topology's own.
    options : of a layer. With the way ``reversed`` the forward pass of ``both`` is not trimmed.

    Raises `ScheduleError` for an unknown name, one of the other kind, options of a collective, and more than can be
    proved.

    >>> from tasp_lab.builders import full_mesh
    >>> [schedule.transfers for schedule in build_schedules("ring", full_mesh(4), 64)]
    [12]
    >>> layer, both = Workload(sequence=64, mask="causal"), AttentionOptions("both", way="onward")
    >>> [schedule.transfers for schedule in build_schedules("ring-attention", full_mesh(4), layer, options=both)]
    [6, 12]
    """
    check_names([name], work)
    if not isinstance(work, Workload):
        if options != USUAL_OPTIONS:
            kind = with_article(COLLECTIVES[name].kind)
            raise ScheduleError(f"schedule {name!r} is {kind}, expected no options of attention")
        return (collective(name, topology, work, decomposition),)
    if options.passes == "forward":
        return (attention(name, topology, work, decomposition, trim=options.trim, rooms=options.rooms),)
    passes = attention_passes(
        name,
        topology,
        work,
        decomposition,
        way=options.way,
        gradient_dtype=options.gradient_dtype,
        trim=options.trim,
        rooms=options.rooms,
    )
    return passes if options.passes == "both" else (passes.backward,)


def check_names(names: Iterable[str], work: Work) -> None:
    """Raise `ScheduleError` for the first name that is not one of a schedule for this work.

    Schedules of a collective are all of the same one.

    >>> check_names(["ring"], Workload(sequence=64))
    Traceback (most recent call last):
    tasp_lab.errors.ScheduleError: schedule 'ring' is an AllGather, expected one for attention: ring-attention, \
zigzag-ring-attention, striped-ring-attention, tasp
    """
    names, is_layer = list(names), isinstance(work, Workload)
    right: Sequence[str] = list(ATTENTION if is_layer else COLLECTIVES)
    for name in names:
        if is_layer and name in COLLECTIVES:
            kind = with_article(COLLECTIVES[name].kind)
            raise ScheduleError(f"schedule {name!r} is {kind}, expected one for attention: {', '.join(right)}")
        if not is_layer and name in ATTENTION:
            raise ScheduleError(f"schedule {name!r} is for attention, expected a collective: {', '.join(right)}")
        if name not in right:
            raise ScheduleError(f"unknown schedule {name!r}, expected one of {', '.join(right)}")
    if names and not is_layer:
        kind_of(names)
