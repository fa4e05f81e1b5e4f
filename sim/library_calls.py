"""The schedule by which a machine's library carries out a collective: the algorithm is the library's own choice."""

from __future__ import annotations

from tasp_lab.core.arrays import IntArray
from tasp_lab.machines.libraries.channels import ChannelLibrary
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
    library = machine.comm_library
    choice = None
    if collective == "all_reduce" and not algorithm and isinstance(library, ChannelLibrary):
        choice = library.algorithm(collective, size_bytes)
    algorithm = algorithm or ("ring" if choice is None else choice.algorithm)
    return library_schedule(collective, machine.topology, size_bytes, rings, algorithm=algorithm)
