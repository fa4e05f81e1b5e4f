"""Collectives as the communication libraries run them, by the names and sizes of nccl-tests.

AllGather, ReduceScatter and AllReduce go around rings in one fused call (`tasp_lab.library_rings`), AllToAll and
SendRecv are one group of messages.
"""

from __future__ import annotations

from tasp_lab.arrays import IntArray
from tasp_lab.collectives import all_to_all, send_recv
from tasp_lab.errors import ScheduleError
from tasp_lab.library_rings import around_library_rings
from tasp_lab.measurements.table import Collective
from tasp_lab.schedule import Schedule
from tasp_lab.topology import Topology


def library_schedule(
    collective: Collective, topology: Topology, size_bytes: int, rings: IntArray | None = None, pieces: int = 1
) -> Schedule:
    """The schedule by which a library does a collective.

    Parameters
    ----------
    collective : which one, by nccl-tests' name.
    topology : the machine's.
    size_bytes : nccl-tests' size: the whole for all_gather and reduce_scatter, all that a rank sends for alltoall, one
        message for sendrecv and all_reduce.
    rings, pieces : see `tasp_lab.library_rings.around_library_rings`.

    >>> from tasp_lab.builders import switch
    >>> schedule = library_schedule("all_gather", switch(8), 2**25)
    >>> schedule.fused, schedule.transfers, int(schedule.block_bytes[0])
    (True, 56, 4194304)

    Raises `ScheduleError` for one rank and for fewer bytes than ranks.
    """
    n = topology.world_size
    if n == 1:
        raise ScheduleError(f"{collective} of one rank sends nothing, expected two ranks or more")
    if size_bytes < n and collective != "sendrecv":
        raise ScheduleError(f"{collective} of {size_bytes} bytes, expected at least one per rank: {n}")
    if collective == "sendrecv":
        return send_recv(topology, size_bytes)
    if collective == "alltoall":
        return all_to_all(topology, size_bytes // n)
    return around_library_rings(collective, topology, size_bytes // n, rings, pieces)
