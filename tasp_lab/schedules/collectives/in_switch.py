"""AllReduce that a switch adds up and multicasts (NVLink SHARP, which NCCL calls NVLS).

Each rank owns a shard of the message. In one step all ranks give their parts of every shard to its owner, in another
the owners send the complete sums to all. That is what memory holds before and after. A switch that can add merges the
parts on their way to an owner, and one that multicasts splits a sum on its way to all: a library with such a switch
counts (n + 1) / n of the message on each link and not 2 (n - 1) / n (`tasp_lab.machines.libraries.channels`).
"""

from __future__ import annotations

import numpy as np

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology


@schedule("library-switch-all-reduce", "AllReduce", library_call="all_reduce")
def library_switch_all_reduce(topology: Topology, shard_bytes: int) -> Schedule:
    """AllReduce of a message of one shard of `shard_bytes` per rank as one call of the library, in the switch.

    >>> from tasp_lab.topology.builders import switch
    >>> found = library_switch_all_reduce(switch(4), 64)
    >>> found.transfers, len(found.steps)
    (24, 2)

    Raises `ScheduleError` for empty shards and for ranks without a route.
    """
    n = topology.world_size
    if shard_bytes < 1:
        raise ScheduleError(
            f"schedule 'library-switch-all-reduce': shard size is {shard_bytes} bytes, expected 1 or more"
        )
    rank = np.arange(n, dtype=np.int64)
    offset = np.repeat(rank[1:], n)
    source = np.tile(rank, n - 1)
    peer = (source + offset) % n
    everything = np.ones((n, n), dtype=bool)
    adds = Step(source, peer, offset - 1, peer, np.ones(len(source), dtype=bool))
    copies = Step(source, peer, offset - 1, source)
    return Schedule(
        name="library-switch-all-reduce",
        world_size=n,
        lanes=max(n - 1, 1),
        blocks=Blocks.of_sums(np.full(n, shard_bytes, dtype=np.int64), n),
        initial=everything,
        final=everything.copy(),
        steps=[adds, copies] if n > 1 else [],
        fused=True,
        initial_part=rank[:, None],
        algorithm="nvls",
    ).on(topology)
