"""Schedules that are built once for many questions: those that differ in numbers of the machine alone share them.

passes = build_once("tasp", machine.topology, layer, rings, options)

They are kept on disk, too (`SHELF`), with all that was found of them until the process ends or lets go of them, and
so are the times that simulations found and bounds (`number_once`).
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from sim.array import repeated
from sim.array.repeated import known_runs, use_runs
from tasp_lab.core.cache import Shelf, digest_of_sources
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.provenance import machine_inputs, plain, sha256, topology_inputs
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.model import LazySteps
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules, followed, order_of_names
from tasp_lab.schedules.registry import is_own, uses_rings
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

SHELF = Shelf("schedules")
"""Schedules with their facts, and what simulations of them need on any machine."""

_SOURCES = "core", "machines", "prediction", "rings", "schedule", "schedules", "topology", "workload"
"""Packages whose classes and functions make what is on the shelf, and the simulator beside them."""

_to_shelve: dict[str, tuple[tuple[Schedule, ...], int]] = {}
"""Schedules by their names on the shelf, and how much is known of them there, see `_known`."""

MOST_MACHINES, MOST_NUMBERS = 64, 10_000
"""Machines of which numbers are kept for the next process, and how many of each."""

_numbers: dict[str, _Numbers] = {}
"""By the name of a machine's file on the shelf; the last one that was used is the last one."""

_uses_numbers = Lock()  # both passes of a large layer are simulated at once


def build_once(
    name: str, topology: Topology, work: Work, rings: Decomposition | None, options: AttentionOptions
) -> tuple[Schedule, ...]:
    """The passes of a schedule, see `tasp_lab.schedules.build.build_schedules`."""
    searched = rings is None and uses_rings(name)
    around = None if rings is None else (rings.rings.tobytes().hex(), rings.shares, rings.fold)
    key = name, topology if searched else followed(name, topology, options), work, around, options
    # popped and put back: a dictionary is in the order of insertion, so the oldest is the first one
    _kept[key] = passes = _kept.pop(key, None) or _of_parts(key, topology, rings)
    while len(_kept) > 1 and (len(_kept) > MOST_KEPT or sum(map(_kept_transfers, _kept.values())) > MOST_TRANSFERS):
        keep_on_disk(_kept.pop(next(iter(_kept))))
    return passes


def _kept_transfers(passes: tuple[Schedule, ...]) -> int:
    """The transfers of passes whose steps stay as long as they do."""
    return sum(each.transfers for each in passes if each.transfers <= MANY_KEPT)


def _of_parts(key: tuple[Any, ...], topology: Topology, rings: Decomposition | None) -> tuple[Schedule, ...]:
    """The passes of a schedule, of parts that it shares with other values of its options."""
    name, _, work, _, options = key
    if isinstance(work, Workload) and work.kind == "softmax":
        if options.passes == "both" and options.dataflow in ("rotate-kv", "rotate-q"):  # two have one forward pass
            backward = build_once(name, topology, work, rings, replace(options, passes="backward"))
            return build_once(name, topology, work, rings, options.forward_only) + backward
        # groups of other ranks are other names of ranks, where nothing but their number matters
        order = None if options.groups == "consecutive" else order_of_names(name, topology, options)
        if order is not None:
            from tasp_lab.schedules.attention.rank_order import on_ranks  # families alone have groups

            consecutive = partial(build_once, name, topology, work, rings, replace(options, groups="consecutive"))
            if np.array_equal(order, np.arange(len(order))):
                return consecutive()
            return _read_or_made(key, lambda: tuple(on_ranks(each, order) for each in consecutive()))
    return _read_or_made(key, lambda: build_schedules(name, topology, work, rings, options))


def _read_or_made(key: tuple[Any, ...], make: Callable[[], tuple[Schedule, ...]]) -> tuple[Schedule, ...]:
    """Schedules of the shelf, or of a builder; only those of tasp-lab itself, whose sources are part of the name."""
    if not SHELF.limit_bytes or not is_own(key[0]):
        return keep_steps(make())
    read = SHELF.read(file := _name_on_shelf(key))
    passes = keep_steps(make() if read is None else tuple(schedule for schedule, _ in read))
    for number, schedule in enumerate(passes):
        schedule.facts[_PLACE] = f"{file[:32]} {number}"
    for schedule, runs in read or ():
        use_runs(schedule, runs)
    _to_shelve[file] = passes, -1 if read is None else _known(passes)
    return passes


@atexit.register
def keep_on_disk(among: tuple[Schedule, ...] | None = None) -> None:
    """Write schedules that were built here, or of which more was found than was read: all, or those `among` some.

    With all of them, also the numbers that were found.
    """
    names = [name for name, (passes, _) in _to_shelve.items() if among is None or passes[0] in among]
    done = [(name, *_to_shelve.pop(name)) for name in names]
    files: list[tuple[str, object]] = [
        (name, [(each, known_runs(each)) for each in passes])
        for name, passes, before in done
        if _known(passes) > before
    ]
    if among is None:
        files += [(name, each.with_others(SHELF.read(name))) for name, each in _numbers.items() if each.found]
        _numbers.clear()
    if files:
        SHELF.keep(files)


def keep_of_copy() -> Callable[[], None]:
    """What a copy of this process, made from now on, does at its end: it writes what it has found itself."""
    copied = list(_to_shelve)

    def keep() -> None:
        for name in copied:
            _to_shelve.pop(name, None)
        keep_on_disk()

    return keep


class _Numbers:
    """Numbers of schedules on one machine: those of earlier processes, and what was found here."""

    def __init__(self, known: dict[str, float] | None) -> None:
        self.known, self.found = known or {}, dict[str, float]()

    def with_others(self, known: dict[str, float] | None) -> dict[str, float]:
        """All of them, with those that other processes have written meanwhile; of too many the last ones."""
        numbers = {**(known or self.known), **self.found}
        return dict(list(numbers.items())[-MOST_NUMBERS:])


def number_once(what: str, schedule: Schedule, machine: Machine, find: Callable[[], float]) -> float:
    """A number of a schedule on a machine, such as its time in seconds, unless an earlier question found it.

    Like schedules, numbers of what a user builds are not kept.
    """
    if _PLACE not in schedule.facts or not SHELF.limit_bytes:
        return find()
    with _uses_numbers:
        name = _name_of_machine(machine)
        _numbers[name] = numbers = _numbers.pop(name, None) or _Numbers(SHELF.read(name))
        while len(_numbers) > MOST_MACHINES:
            _numbers.pop(next(iter(_numbers)))
    key = f"{what} {schedule.facts[_PLACE]}"
    if key in numbers.known:
        return numbers.known[key]
    if key not in numbers.found:
        numbers.found[key] = find()
    return numbers.found[key]


_PLACE = "place on the shelf"
"""The fact of a schedule by which its numbers are kept."""


def _known(passes: tuple[Schedule, ...]) -> int:
    """How many facts of schedules are known, and for how many forms of machines they are ready to be simulated."""
    return sum(len(vars(each)) + len(each.facts) + len(known_runs(each)) for each in passes)


def _name_on_shelf(key: tuple[Any, ...]) -> str:
    """The digest of all that schedules follow from."""
    packages = [Path(__file__).parents[1] / each for each in _SOURCES]
    sources = digest_of_sources(*packages, Path(repeated.__file__).parents[1])
    return sha256([sources, [_topology_content(each) if isinstance(each, Topology) else plain(each) for each in key]])


def _name_of_machine(machine: Machine) -> str:
    """The digest of all that times follow from; questions ask about the same objects."""
    if id(machine) not in _machine_names:
        content = machine_inputs(machine, compute=True) | {"links": _topology_content(machine.topology)}
        while len(_machine_names) >= MOST_MACHINES:
            _machine_names.pop(next(iter(_machine_names)))
        _machine_names[id(machine)] = machine, sha256(["numbers", content])
    return _machine_names[id(machine)][1]


_machine_names: dict[int, tuple[Machine, str]] = {}


@lru_cache(maxsize=4)
def _topology_content(topology: Topology) -> str:
    more = {"forwarding": plain(topology.forwarding), "grid": plain(topology.grid), "exact": topology.is_exact}
    return sha256(topology_inputs(topology) | more)


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
