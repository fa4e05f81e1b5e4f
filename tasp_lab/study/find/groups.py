"""Groups of a study's points that differ in one axis and in the schedule only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from tasp_lab.core.errors import StudyError, TaspLabError, unknown
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.study.find.moved import apart_from, value_of
from tasp_lab.study.point import Point, Value

SCHEDULE = "schedule"


@dataclass(frozen=True)
class Group:
    """Points that differ in an axis and in the schedule.

    Parameters
    ----------
    point : one of them.
    values : those of the axis, ascending.
    labels : the axes of the study that tell the group from others, with its values.
    multiple : what values of the axis are multiples of: lengths of twice the ranks, heads of the KV heads.
    """

    point: Point
    values: tuple[float, ...]
    labels: tuple[tuple[str, Value], ...]
    multiple: int = 1

    @property
    def text(self) -> str:
        """The labels on one line."""
        return ", ".join(str(value) for _, value in self.labels) or self.point.machine


def groups_along(points: Iterable[Point], axis: str, schedules: Sequence[str]) -> list[Group]:
    """The groups of these schedules along an axis, in the order of the points."""
    by_key: dict[str, list[Point]] = {}
    for point in points:
        if any(point.schedule == filled(each, point) for each in schedules):
            by_key.setdefault(apart_from(point, axis), []).append(point)
    telling = varying_labels(list(by_key.values()), (axis, SCHEDULE))
    return [_group(members, axis, telling) for members in by_key.values()]


def filled(schedule: str, point: Point) -> str:
    """The name of a schedule with the values of a point's axes in place of their names in braces.

    >>> from tasp_lab.workload.layer import Workload
    >>> filled("usp:8x{nodes}", Point("h100-2x8", "tasp", Workload(8192), labels=(("nodes", 2),)))
    'usp:8x2'
    """
    labels = {name: str(value) for name, value in point.labels}
    return re.sub(r"\{(\w+)\}", lambda found: labels.get(found[1], found[0]), schedule)


def check_schedules(points: Sequence[Point], schedules: Sequence[str]) -> None:
    """Raise `StudyError` for a schedule that no point has."""
    known = list(dict.fromkeys(each.schedule for each in points))
    for name in schedules:
        if not any(each.schedule == filled(name, each) for each in points):
            raise StudyError(f"{unknown('schedule', name, known)} of the study")


def _group(members: Sequence[Point], axis: str, telling: Sequence[str]) -> Group:
    first = members[0]
    found = {value for each in members if (value := value_of(each, axis)) is not None}
    labels = tuple((name, first.label(name)) for name in telling)
    return Group(first, tuple(sorted(found)), labels, _multiple(first, axis))


def _multiple(point: Point, axis: str) -> int:
    if axis == "heads" and point.layer.kv_head_count < point.layer.heads:
        return point.layer.kv_head_count
    return 2 * world_size(point.machine) if axis == "seq" else 1


def varying_labels(groups: Sequence[Sequence[Point]], without: Sequence[str]) -> list[str]:
    """The labels that have different values in different groups; ``machine`` where there are none at all."""
    firsts = [members[0] for members in groups]
    names = dict.fromkeys(name for each in firsts for name, _ in each.labels if name not in without)
    return [name for name in names if len({each.label(name) for each in firsts}) > 1]


@cache
def world_size(machine: str) -> int:
    """The number of ranks of a machine by its name; 1 for one that does not exist."""
    try:
        return load_machine(machine, library="ideal").topology.world_size
    except TaspLabError:  # its points fail, and say why
        return 1
