"""The schedule by which a machine's library carries out a collective: the algorithm is the library's own choice.

A *cliff* is a size or a version of the library where that choice changes, and with it the time.
"""

from __future__ import annotations

from dataclasses import replace

from sim.simulate import simulate
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.units import format_size_about
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.libraries.nccl_tuning import CHANGES, Collective, version_text
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.kinds import NcclTestsName
from tasp_lab.schedules.collectives.library_rings import library_schedule


def library_call(
    collective: NcclTestsName,
    machine: Machine,
    size_bytes: int,
    rings: IntArray | None = None,
    algorithm: str = "",
) -> Schedule:
    """The schedule of one call of the library of a machine.

    Parameters
    ----------
    collective, size_bytes, rings : as of `library_schedule`.
    algorithm : of an all_reduce where it is known, such as ``ring`` or ``nvls``; else the library chooses.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> h100 = load_machine("h100-8")
    >>> [library_call("all_reduce", h100, size).algorithm for size in (2**20, 2**21)]
    ['ring', 'nvls']

    Raises `ScheduleError` as `library_schedule` does.
    """
    algorithm = algorithm or algorithm_of(collective, machine, size_bytes)
    return library_schedule(collective, machine.topology, size_bytes, rings, algorithm=algorithm)


def algorithm_of(collective: NcclTestsName, machine: Machine, size_bytes: int) -> str:
    """What the library of a machine takes for a call: a ring, but of an all_reduce whatever it chooses."""
    library, choice = machine.comm_library, None
    if collective == "all_reduce" and isinstance(library, ChannelLibrary):
        choice = library.algorithm(collective, size_bytes)
    return "ring" if choice is None else choice.algorithm


CLIFF = 1.2
"""Times that differ by less are no cliff: predictions are off by as much."""


def cliff_near(collective: Collective, machine: Machine, size_bytes: int) -> str:
    r"""A line about the cliff near a call, up to a factor of two in size or in another version; empty without one.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> print(cliff_near("all_gather", load_machine("b200-8"), 2**24).replace("; ", "\n"))
    near a cliff of nccl 2.29.2: ring, LL128 below 12.62 MiB takes 0.48 times as long
    with 2.23, 2.28, 2.29.7 it is ring, LL128, 0.52 times
    >>> cliff_near("all_gather", load_machine("b200-8"), 2**28)
    ''
    """
    library = machine.comm_library
    if not isinstance(library, ChannelLibrary) or library.tuner is None or size_bytes < 1:
        return ""
    own, tuner, n = library.algorithm(collective, size_bytes), library.tuner, machine.topology.world_size
    assert own is not None, "a library with a tuner chooses"
    found = []
    for other in (max(size_bytes // 2, n), 2 * size_bytes):
        if (library.algorithm(collective, other) or own)[:2] != own[:2]:
            near, far = size_bytes, other
            while abs(near - far) > max(n, size_bytes // 256):
                middle = (near + far) // 2
                same = (library.algorithm(collective, middle) or own)[:2] == own[:2]
                near, far = (middle, far) if same else (near, middle)
            ratio = _time_s(collective, machine, far) / _time_s(collective, machine, near)
            if max(ratio, 1 / ratio) >= CLIFF:
                side = "below" if other < size_bytes else "above"
                name = ", ".join((library.algorithm(collective, far) or own)[:2])
                found.append(f"{name} {side} {format_size_about(far)} takes {ratio:.2g} times as long")
    time_s = _time_s(collective, machine, size_bytes)
    versions: dict[str, list[str]] = {}
    for version in CHANGES:
        changed = replace(library, tuner=replace(tuner, version=version))
        choice = changed.algorithm(collective, size_bytes)
        if choice is not None and choice[:2] != own[:2]:
            ratio = _time_s(collective, replace(machine, comm_library=changed), size_bytes) / time_s
            if max(ratio, 1 / ratio) >= CLIFF:
                versions.setdefault(f"{', '.join(choice[:2])}, {ratio:.2g} times", []).append(version_text(version))
    found += [f"with {', '.join(those)} it is {what}" for what, those in versions.items()]
    return f"near a cliff of nccl {version_text(tuner.version)}: {'; '.join(found)}" if found else ""


def _time_s(collective: Collective, machine: Machine, size_bytes: int) -> float:
    return float(simulate(library_call(collective, machine, size_bytes), machine).time_s)
