"""Schedules by name, whatever they do: AllGather of so many bytes per rank, or an attention layer.

The *work* says which of the two: a number of bytes, or a `tasp_lab.workload.Workload`. Each kind of work has schedules
of its own, and a name of the other kind is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from tasp_lab.all_gather import ALL_GATHER, all_gather
from tasp_lab.attention import ATTENTION, USUAL_ROOMS, attention
from tasp_lab.decomposition import Decomposition
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule import Schedule
from tasp_lab.topology import Topology
from tasp_lab.workload import Workload

Work = int | Workload
"""An AllGather, by the bytes that each rank contributes, or an attention layer."""

USES_RINGS = ("multi-ring", "tasp")
"""The schedules that a decomposition can be given to."""


def build_schedule(
    name: str,
    topology: Topology,
    work: Work,
    decomposition: Decomposition | None = None,
    trim: bool = True,
    rooms: int = USUAL_ROOMS,
) -> Schedule:
    """The schedule of that name.

    Parameters
    ----------
    name : a name in `ALL_GATHER` for bytes, in `ATTENTION` for a layer.
    topology : its ranks; transfers run between ranks that it joins.
    work : what is to be done.
    decomposition : the rings of ``multi-ring`` and ``tasp``, if not the topology's own.
    trim, rooms : of a layer, see `tasp_lab.attention.attention`.

    Raises `ScheduleError` for an unknown name, one of the other kind and more than can be proved.

    >>> from tasp_lab.builders import full_mesh
    >>> build_schedule("ring", full_mesh(4), 64).transfers
    12
    >>> build_schedule("ring-attention", full_mesh(4), Workload(sequence=64, mask="causal")).transfers
    6
    """
    check_names([name], work)
    if not isinstance(work, Workload):
        return all_gather(name, topology, work, decomposition)
    return attention(name, topology, work, decomposition, trim=trim, rooms=rooms)


def check_names(names: Iterable[str], work: Work) -> None:
    """Raise `ScheduleError` for the first name that is not one of a schedule for this work.

    >>> check_names(["ring"], Workload(sequence=64))
    Traceback (most recent call last):
    tasp_lab.errors.ScheduleError: schedule 'ring' is an AllGather, expected one for attention: ring-attention, \
zigzag-ring-attention, striped-ring-attention, tasp
    """
    is_layer = isinstance(work, Workload)
    right, wrong = (ATTENTION, ALL_GATHER) if is_layer else (ALL_GATHER, ATTENTION)
    for name in names:
        if name in wrong:
            kinds = ("an AllGather", "one for attention") if is_layer else ("for attention", "an AllGather")
            raise ScheduleError(f"schedule {name!r} is {kinds[0]}, expected {kinds[1]}: {', '.join(right)}")
        if name not in right:
            raise ScheduleError(f"unknown schedule {name!r}, expected one of {', '.join(right)}")
