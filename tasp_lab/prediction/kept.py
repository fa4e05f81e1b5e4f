"""Schedules that are built once for many questions: those that differ in numbers of the machine alone share them.

passes = build_once("tasp", machine.topology, layer, rings, options)
"""

from __future__ import annotations

from dataclasses import replace

from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.model import LazySteps
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules, followed, order_of_names
from tasp_lab.schedules.registry import uses_rings
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Work, Workload

MOST_KEPT, MOST_TRANSFERS = 256, 2_000_000
"""Schedules that are kept for the next questions, and their transfers: what-ifs and comparisons with other machines
return to all schedules of a comparison."""

MANY_KEPT, MOST_KEPT_AT_ONCE = 200_000, 4_000_000
"""Steps of a schedule with more transfers are kept only until the next such one is built, as they take some 60 bytes
per transfer; if all passes have more than the second number, steps are made anew each time they are needed."""

_kept: dict[object, tuple[Schedule, ...]] = {}
"""By all that they follow from; the last one that was used is the last one."""

_large: list[LazySteps] = []
"""The steps of the last large schedule."""


def build_once(
    name: str, topology: Topology, work: Work, rings: Decomposition | None, options: AttentionOptions
) -> tuple[Schedule, ...]:
    """The passes of a schedule, see `tasp_lab.schedules.build.build_schedules`."""
    searched = rings is None and uses_rings(name)
    around = None if rings is None else (rings.rings.tobytes(), rings.shares, rings.fold)
    key = name, topology if searched else followed(name, topology, options), work, around, options
    # popped and put back: a dictionary is in the order of insertion, so the oldest is the first one
    _kept[key] = passes = _kept.pop(key, None) or _of_parts(name, topology, work, rings, options)
    while len(_kept) > 1 and (len(_kept) > MOST_KEPT or sum(map(_kept_transfers, _kept.values())) > MOST_TRANSFERS):
        del _kept[next(iter(_kept))]
    return passes


def _kept_transfers(passes: tuple[Schedule, ...]) -> int:
    """The transfers of passes whose steps stay as long as they do."""
    return sum(each.transfers for each in passes if each.transfers <= MANY_KEPT)


def _of_parts(
    name: str, topology: Topology, work: Work, rings: Decomposition | None, options: AttentionOptions
) -> tuple[Schedule, ...]:
    """The passes of a schedule, of parts that it shares with other values of its options."""
    if isinstance(work, Workload) and work.kind == "softmax":
        if options.passes == "both" and options.dataflow in ("rotate-kv", "rotate-q"):  # two have one forward pass
            backward = build_once(name, topology, work, rings, replace(options, passes="backward"))
            return build_once(name, topology, work, rings, options.forward_only) + backward
        # groups of other ranks are other names of ranks, where nothing but their number matters
        order = None if options.groups == "consecutive" else order_of_names(name, topology, options)
        if order is not None:
            from tasp_lab.schedules.attention.rank_order import on_ranks  # families alone have groups

            consecutive = build_once(name, topology, work, rings, replace(options, groups="consecutive"))
            return keep_steps(tuple(on_ranks(each, order) for each in consecutive))
    return keep_steps(build_schedules(name, topology, work, rings, options))


def keep_steps(passes: tuple[Schedule, ...]) -> tuple[Schedule, ...]:
    """The passes, whose steps are kept unless there are too many: several numbers follow from them."""
    transfers = sum(each.transfers for each in passes)
    if transfers > MANY_KEPT:
        while _large:
            _large.pop().forget()
    for each in passes:
        if isinstance(each.steps, LazySteps) and (each.transfers <= MANY_KEPT or transfers <= MOST_KEPT_AT_ONCE):
            each.steps.keep()
            if each.transfers > MANY_KEPT:
                _large.append(each.steps)
    return passes
