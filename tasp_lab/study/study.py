"""A study: axes of machines, layers, schedules and what-if variants; every combination of their values is a point."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Literal

from tasp_lab.core.errors import StudyError
from tasp_lab.core.files import file_sha256
from tasp_lab.core.tables import brief
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.sampling import Sampling
from tasp_lab.prediction.question import NO_SAMPLES, Value
from tasp_lab.study.point import AS_IS, Point, cells_of_layer, job_of, layer_of, options_of, settings_of
from tasp_lab.study.where import NO_FILTER, Where
from tasp_lab.workload.layer import Workload

Section = Literal["machine", "layer", "plan", "schedule"]

_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Axis:
    """An axis: its name, the section of the file that it is in, and its values."""

    name: str
    section: Section
    values: tuple[Value, ...]


@dataclass(frozen=True, repr=False)
class Study:
    """What is asked.

    Parameters
    ----------
    name : of the study.
    axes : those of machines, then of layers, of plans and of schedules; machines and schedules may be templates with
        the values of other axes, ``h100-{nodes}x8``.
    sampling : of the constants per point; no samples for intervals by residuals alone.
    zipped : groups of axes that move together.
    variants : names of what-if variants with their overrides; `AS_IS`, which changes nothing, is the first.
    where : filters.
    baseline : the schedule that speed-ups are over, None without one.
    find : what is to be found among the points.
    document : the study as it was given.
    """

    name: str
    axes: tuple[Axis, ...]
    sampling: Sampling = NO_SAMPLES
    zipped: tuple[tuple[str, ...], ...] = ()
    variants: tuple[tuple[str, tuple[str, ...]], ...] = ((AS_IS, ()),)
    where: Where = NO_FILTER
    baseline: str | None = None
    find: Mapping[str, Any] = field(default_factory=dict)
    document: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __repr__(self) -> str:
        axes = [f"{each.name} ({len(each.values)})" for each in self.axes]
        return brief(self, self.name, f"axes: {', '.join(axes)}")

    @property
    def count(self) -> int:
        """The number of combinations, before filters."""
        return prod(len(unit[0].values) for unit in _units(self.axes, self.zipped)) * len(self.variants)

    def points(self) -> Iterator[Point]:
        """The points that the filters keep, in order: by machine, variant, layer, schedule. Equal ones may repeat.

        Raises `StudyError` where a machine or a layer does not exist.
        """
        # Machines come first: what takes long once per machine (its rings, samples of its constants) is found once.
        units = _units(self.axes, self.zipped)
        machines = [unit for unit in units if unit[0].section == "machine"]
        others = [unit for unit in units if unit[0].section != "machine"]
        for machine_values in _products(machines, {}):
            for variant, overrides in self.variants:
                for values in _products(others, machine_values):
                    if (point := self._point({**values, "variant": variant}, overrides)) is not None:
                        yield point

    def _point(self, labels: Mapping[str, Value], overrides: tuple[str, ...]) -> Point | None:
        """The point of these values, None if a filter skips it."""
        machine, schedule = (fill(labels[name], labels) for name in ("machine", "schedule"))
        labels = {**labels, "machine": machine, "schedule": schedule}
        # an edited file is another model, so its hash is part of the question to the cache
        layer = _layer(tuple(labels.items()), file_sha256(str(labels.get("model"))))
        ranks = ranks_of(machine, str(labels.get("library", "auto")))
        settings = settings_of(labels)
        ranks -= sum(part.startswith("gpu.") for part in settings.get("without", ()))
        if not self.where.keeps({"ranks": ranks, **cells_of_layer(layer), **labels}):
            return None
        return Point(
            machine,
            schedule,
            layer,
            options_of(labels),
            overrides=overrides,
            sampling=self.sampling,
            labels=tuple(labels.items()),
            job=job_of(labels),
            **settings,
        )


FILTERED = ("ranks", *cells_of_layer(Workload(1)), "variant")
"""Names that filters may use beside those of the axes."""


def ranks_of(machine: str, library: str) -> int:
    """The number of ranks of a machine by name. Raises `TaspLabError` where there is none."""
    return _ranks_of(machine, library, file_sha256(machine))


@lru_cache(maxsize=1024)
def _ranks_of(machine: str, library: str, file: str) -> int:
    """`file` is the hash of the file that `machine` names: an edited file is another machine."""
    return load_machine(machine, library=library).topology.world_size


@lru_cache(maxsize=1024)
def _layer(labels: tuple[tuple[str, Value], ...], model_file: str) -> Workload:
    """The layer of these values, asked for by its schedules one after the other; `model_file` is the hash of a file."""
    return layer_of(dict(labels))


def fill(template: Value, labels: Mapping[str, Value]) -> str:
    """A name with the values of axes in its places; a place that no axis has stays.

    >>> fill("h100-{nodes}x8", {"nodes": 2})
    'h100-2x8'
    """
    return _PLACE.sub(lambda place: str(labels.get(place[1], place[0])), str(template))


def places(template: Value) -> set[str]:
    """The names of axes in a template."""
    return set(_PLACE.findall(str(template)))


def _units(axes: tuple[Axis, ...], zipped: tuple[tuple[str, ...], ...]) -> list[tuple[Axis, ...]]:
    """The axes in groups that move together; a group stands where its first axis does."""
    of_name = {axis.name: axis for axis in axes}
    together = {name: group for group in zipped for name in group}
    units = dict.fromkeys(together.get(axis.name, (axis.name,)) for axis in axes)
    return [tuple(of_name[name] for name in unit) for unit in units]


def _products(units: Iterable[tuple[Axis, ...]], fixed: Mapping[str, Value]) -> Iterator[dict[str, Value]]:
    """Every combination of the values of these units, beside fixed values."""
    rows = [
        [dict(zip((axis.name for axis in unit), row, strict=True)) for row in zip(
            *(axis.values for axis in unit), strict=True)]
        for unit in units
    ]  # fmt: skip
    for chosen in itertools.product(*rows):
        found = dict(fixed)
        for part in chosen:
            found |= part
        yield found


def check_zipped(axes: tuple[Axis, ...], zipped: tuple[tuple[str, ...], ...]) -> None:
    """Raise `StudyError` unless axes that move together exist, once each, and have equally many values, and no value,
    or combination of those that move together, is there twice.
    """
    of_name = {each.name: each for each in axes}
    seen: set[str] = set()
    for group in zipped:
        for name in group:
            if name not in of_name:
                raise StudyError(f"zip: no axis {name!r}, expected one of {', '.join(of_name)}")
            if name in seen:
                raise StudyError(f"zip: axis {name!r} twice, expected it once")
            seen.add(name)
        if len({len(of_name[name].values) for name in group}) > 1:
            lengths = ", ".join(f"{name} {len(of_name[name].values)}" for name in group)
            raise StudyError(f"zip: axes of different lengths ({lengths}), expected equally many values")
    for unit in _units(axes, zipped):
        rows = Counter(map(repr, zip(*(each.values for each in unit), strict=True)))  # 1 and True are two values
        (row, count), *_ = rows.most_common(1)
        if count > 1:
            value = row.strip("(),") if len(unit) == 1 else row
            raise StudyError(f"axis {', '.join(each.name for each in unit)!r} has the value {value} twice, "
                             "expected it once")  # fmt: skip
