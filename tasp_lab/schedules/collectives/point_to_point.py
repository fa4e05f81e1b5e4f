"""AllToAll and SendRecv: direct messages from source to destination, in one step."""

from __future__ import annotations

import numpy as np

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.proof import MAX_HOLDINGS
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology


@schedule("all-to-all", "AllToAll")
def all_to_all(topology: Topology, chunk_bytes: int) -> Schedule:
    """Every rank sends every other rank a chunk of `chunk_bytes` of its own, all at once in one step.

    Block ``source * world_size + destination`` is the chunk that goes from rank `source` to rank `destination`.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> print(all_to_all(full_mesh(2), 64).steps[0])
    0->1 lane 0 block 1
    1->0 lane 0 block 2

    Raises `ScheduleError` for empty chunks, for too many chunks to verify, and for ranks without a route.
    """
    n = topology.world_size
    _check_bytes("all-to-all", "chunk", chunk_bytes)
    if n**3 > MAX_HOLDINGS:
        raise ScheduleError(
            f"schedule 'all-to-all': {n} ranks with {n * n} chunks are too many to prove, "
            f"expected at most {round(MAX_HOLDINGS ** (1 / 3))} ranks"
        )
    rank = np.arange(n, dtype=np.int64)
    source, chunk = np.repeat(rank, n), np.tile(rank, n)
    offset = np.repeat(rank[1:], n)
    sender = np.tile(rank, n - 1)
    receiver = (sender + offset) % n
    owned, received = source == rank[:, None], chunk == rank[:, None]
    return Schedule(
        name="all-to-all",
        world_size=n,
        lanes=max(n - 1, 1),
        blocks=Blocks.of_data(np.full(n * n, chunk_bytes, dtype=np.int64)),
        initial=owned,
        final=owned | received,
        steps=[Step(sender, receiver, offset - 1, sender * n + receiver)] if n > 1 else [],
        own_bytes=chunk_bytes,
    ).on(topology)


@schedule("send-recv", "SendRecv")
def send_recv(topology: Topology, message_bytes: int) -> Schedule:
    """Every rank i sends a message of `message_bytes` to rank i + 1, the last one to rank 0, as nccl-tests' sendrecv.

    >>> from tasp_lab.topology.builders import ring
    >>> print(send_recv(ring(3), 64).steps[0])
    0->1 lane 0 block 0
    1->2 lane 0 block 1
    2->0 lane 0 block 2

    Raises `ScheduleError` for empty messages, and for ranks without a route to the next one.
    """
    n = topology.world_size
    _check_bytes("send-recv", "message", message_bytes)
    rank, own = np.arange(n, dtype=np.int64), np.eye(n, dtype=bool)
    return Schedule(
        name="send-recv",
        world_size=n,
        lanes=1,
        blocks=Blocks.of_data(np.full(n, message_bytes, dtype=np.int64)),
        initial=own,
        final=own | np.roll(own, 1, axis=0),
        steps=[Step(rank, np.roll(rank, -1), np.zeros_like(rank), rank)] if n > 1 else [],
    ).on(topology)


def _check_bytes(name: str, what: str, size_bytes: int) -> None:
    if size_bytes < 1:
        raise ScheduleError(f"schedule {name!r}: {what} size is {size_bytes} bytes, expected 1 or more")
