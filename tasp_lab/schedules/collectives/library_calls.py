"""Collectives as the communication libraries run them, by the names and sizes of nccl-tests.

AllGather, ReduceScatter and AllReduce are one fused call around rings (`tasp_lab.schedules.collectives.library_rings`),
AllToAll and SendRecv are a group of messages.
"""

from __future__ import annotations

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.kinds import NcclTestsName
from tasp_lab.schedules.collectives.library_rings import around_library_rings
from tasp_lab.schedules.collectives.point_to_point import all_to_all, send_recv
from tasp_lab.topology.graph import Topology


def library_schedule(
    collective: NcclTestsName, topology: Topology, size_bytes: int, rings: IntArray | None = None, chunks: int = 1
) -> Schedule:
    """The schedule by which a library implements a collective.

    Parameters
    ----------
    collective : its nccl-tests name.
    topology : the topology of the machine.
    size_bytes : the nccl-tests size: the total for all_gather and reduce_scatter, the bytes that each rank sends for
        alltoall, one message for sendrecv and all_reduce.
    rings, chunks : see `tasp_lab.schedules.collectives.library_rings.around_library_rings`.

    >>> from tasp_lab.topology.builders import switch
    >>> schedule = library_schedule("all_gather", switch(8), 2**25)
    >>> schedule.fused, schedule.transfers, int(schedule.block_bytes[0])
    (True, 56, 4194304)

    Raises `ScheduleError` for a single rank and for fewer bytes than ranks.
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
    return around_library_rings(collective, topology, size_bytes // n, rings, chunks)
