"""MSCCL++ execution plans (JSON), for the executor of microsoft/mscclpp. Writing only.

    write(schedule)                           # the plan of a collective, for any size

The grammar is that of src/core/executor/execution_plan.cc at 1f5f065. Data go by memory channels: a thread block puts
chunks into the memory of the peer and signals, the peer waits. A channel joins two ranks for one connection: data are
signalled one way, and *ready* the other way, before the first put and before each one into memory that was in use.

Thread blocks that would wait for each other become one, and one with more operations than the executor takes is cut:
its parts follow one another by semaphores.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, NamedTuple

import networkx

from tasp_lab.core.errors import ScheduleError
from tasp_lab.formats.programs import COLLECTIVES, Op, Place, Programs, communication, rank_programs
from tasp_lab.schedule.schedule import Schedule

MAX_OPS, MAX_CHANNELS, MAX_SEMAPHORES = 64, 16, 16
"""Of a thread block: operations and memory channels; semaphores of a rank (execution_common.hpp)."""

MAX_THREAD_BLOCKS = 64
"""More do not run at once beside other kernels; NCCL takes as many at most."""

Json = dict[str, Any]


class _Connection(NamedTuple):
    source: int
    destination: int
    channel: int


def write(schedule: Schedule) -> str:
    """The plan of a collective, or of the data that a layer moves.

    Raises `ScheduleError` for what is no collective, and for more operations, channels or semaphores than there are.

    >>> from tasp_lab.schedules.collectives.all_gather import ring_all_gather
    >>> from tasp_lab.topology.builders import full_mesh
    >>> plan = json.loads(write(ring_all_gather(full_mesh(2), 64)))
    >>> [op["name"] for op in plan["gpus"][0]["threadblocks"][0]["ops"]]
    ['rlxsignal', 'rlxwait', 'nop', 'put', 'nop', 'signal', 'wait', 'nop']
    """
    programs = rank_programs(communication(schedule), most_chunks=2**15)
    connections = sorted({each for rank in range(programs.world_size) for each in _sends(programs, rank)})
    total = programs.shard_chunks * programs.world_size
    in_place = programs.kind != "AllToAll"
    gpus = []
    for rank in range(programs.world_size):
        body = _Rank(programs, rank, connections).gpu()
        inputs = programs.shard_chunks if programs.kind == "AllGather" else total
        outputs = programs.shard_chunks if programs.kind == "ReduceScatter" else total
        sizes = {"input_chunks": inputs, "output_chunks": outputs, "scratch_chunks": programs.scratch[rank]}
        gpus.append({"id": rank} | sizes | body)
    plan = {
        "name": f"tasp-lab {programs.name}",
        "collective": COLLECTIVES[programs.kind],
        "protocol": "Simple",
        "inplace": in_place,
        "reuse_resources": False,
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 16,
        "min_message_size": 0,
        "max_message_size": 2**64 - 1,
        "gpus": gpus,
    }
    return json.dumps(plan, indent=1) + "\n"


def _sends(programs: Programs, rank: int) -> list[_Connection]:
    return [_Connection(rank, block.send, block.channel) for block in programs.ranks[rank] if block.send >= 0]


class _Rank:
    def __init__(self, programs: Programs, rank: int, connections: list[_Connection]) -> None:
        self.programs, self.rank = programs, rank
        self.where = f"schedule {programs.name!r}, rank {rank}"
        mine = [each for each in connections if rank in each[:2]]
        # The k-th channel to a peer is paired with the k-th of the peer to this rank, so both count in one order.
        self.channels = sorted(mine, key=lambda each: (self._peer(each), each))
        self.buffers: list[tuple[int, str]] = []

    def _peer(self, connection: _Connection) -> int:
        return connection.destination if connection.source == self.rank else connection.source

    def gpu(self) -> Json:
        room = MAX_OPS - 4  # of parts, with what joins them
        semaphores = 0
        threadblocks: list[Json] = []
        for ops in self._joined():
            size = room if len(ops) > MAX_OPS else MAX_OPS
            parts = [ops[first : first + size] for first in range(0, len(ops), size)]
            for number, part in enumerate(parts):
                if number:
                    part = [_op("sem_acquire", semaphore_ids=[semaphores - 1]), _op("nop"), *part]
                if number + 1 < len(parts):
                    part = [*part, _op("nop"), _op("sem_release", semaphore_ids=[semaphores])]
                    semaphores += 1
                threadblocks.append(self._thread_block(len(threadblocks), part))
        for what, count, most in (
            ("semaphores", semaphores, MAX_SEMAPHORES),
            ("thread blocks", len(threadblocks), MAX_THREAD_BLOCKS),
        ):
            if count > most:
                raise ScheduleError(f"{self.where}: {count} {what}, expected at most {most} in an MSCCL++ plan")
        return {
            "threadblocks": threadblocks,
            "channels": [{"channel_type": "memory", "connected_to": [self._peer(each) for each in self.channels]}],
            "remote_buffers": [
                {"rank": peer, "type": kind, "access_channel_types": ["memory"]} for peer, kind in self.buffers
            ],
            "semaphores": [{"init_value": 0}] * semaphores,
        }

    def _joined(self) -> list[list[Json]]:
        """The operations of thread blocks that wait for no other, with channels and remote buffers of the rank."""
        blocks = self.programs.ranks[self.rank]
        graph: networkx.Graph[int] = networkx.Graph()
        graph.add_nodes_from(range(len(blocks)))
        graph.add_edges_from(
            (number, other) for number, block in enumerate(blocks) for op in block.ops for other, _ in op.waits
        )
        together = list(networkx.connected_components(graph))
        part_of = {number: part for part, members in enumerate(together) for number in members}
        rows_of: list[list[tuple[float, list[Json]]]] = [[] for _ in together]
        uses = _uses(self.programs, self.rank)
        for number, block in enumerate(blocks):
            rows = rows_of[part_of[number]]
            out = _Connection(self.rank, block.send, block.channel)
            into = _Connection(block.receive, self.rank, block.channel)
            # It is ready for the first message at once, for others when what uses their place has ended.
            for later, position in enumerate(uses[into] if block.receive >= 0 else ()):
                if position is not None:
                    ready = self._signal("signal" if later else "rlxsignal", into)
                    rows.append((position, [*([] if position < 0 else [_op("nop")]), ready]))
            awaited = _uses(self.programs, block.send)[out] if block.send >= 0 else []
            sends = 0
            for op in block.ops:
                if op.kind == "send":
                    wait = [self._signal("wait" if sends else "rlxwait", out), _op("nop")]
                    ops = [*(wait if awaited[sends] is not None else []), *self._put(op, out)]
                    sends += 1
                elif op.kind == "receive":
                    ops = [self._signal("wait", into), _op("nop")]
                else:
                    name, more = ("re", [op.destination]) if op.kind == "add" else ("copy", [])
                    sources = [_buffer(each, op.chunks) for each in (*more, op.source)]
                    ops = [_op(name, src_buff=sources, dst_buff=[_buffer(op.destination, op.chunks)]), _op("nop")]
                rows.append((op.order, ops))
        return [_once([op for _, ops in sorted(rows, key=lambda row: row[0]) for op in ops]) for rows in rows_of]

    def _put(self, op: Op, out: _Connection) -> list[Json]:
        key = (op.peer, op.destination.buffer)
        if key not in self.buffers:
            self.buffers.append(key)
        remote = {"buffer_id": self.buffers.index(key), "index": op.destination.offset, "size": op.chunks}
        put = _op("put", src_buff=[_buffer(op.source, op.chunks)], dst_buff=[remote], channel_type="memory")
        return [put, _op("nop"), self._signal("signal", out)]

    def _signal(self, name: str, connection: _Connection) -> Json:
        return _op(name, channel_ids=[self.channels.index(connection)], channel_type="memory")

    def _thread_block(self, number: int, ops: list[Json]) -> Json:
        """The thread block: operations index its own lists of channels and of remote buffers."""
        channels = sorted({each for op in ops for each in op.get("channel_ids", ())})
        remote = sorted({each["buffer_id"] for op in ops for each in op.get("dst_buff", ()) if "buffer_id" in each})
        if len(channels) > MAX_CHANNELS:
            raise ScheduleError(
                f"{self.where}: a thread block with {len(channels)} channels, expected at most {MAX_CHANNELS} in an "
                "MSCCL++ plan"
            )
        own = []
        for op in map(dict, ops):
            if "channel_ids" in op:
                op["channel_ids"] = [channels.index(each) for each in op["channel_ids"]]
            op["dst_buff"] = [
                each | ({"buffer_id": remote.index(each["buffer_id"])} if "buffer_id" in each else {})
                for each in op.get("dst_buff", ())
            ]
            own.append(op if op["dst_buff"] else {key: value for key, value in op.items() if key != "dst_buff"})
        return {
            "id": number,
            "ops": own,
            "channels": [{"channel_type": "memory", "channel_ids": channels}] if channels else [],
            "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": remote}] if remote else [],
        }


def _uses(programs: Programs, rank: int) -> dict[_Connection, list[float | None]]:
    """Of each connection to a rank and each of its messages, after which operation the rank is ready for it.

    None where it is so from the message before on. Later messages are ready later, as signals are counted.
    """
    last: dict[Place, int] = {}
    found: dict[_Connection, list[float | None]] = defaultdict(list)
    latest: dict[_Connection, float] = {}
    rows = [(op, block) for block in programs.ranks[rank] for op in block.ops]
    for op, block in sorted(rows, key=lambda row: row[0].order):
        if op.kind == "receive":
            into = _Connection(block.receive, rank, block.channel)
            used = max((last[place] for place in op.writes if place in last), default=-1) + 0.5
            if into not in latest or used > 0:
                latest[into] = max(used, latest.get(into, used))
                found[into].append(latest[into])
            else:
                found[into].append(None)
        for place in (*op.reads, *op.writes):
            last[place] = op.order
    return found


def _op(name: str, **values: object) -> Json:
    return {"name": name, **values}


def _buffer(place: Place, chunks: int) -> Json:
    return {"type": place.buffer, "index": place.offset, "size": chunks}


def _once(ops: list[Json]) -> list[Json]:
    """Without barriers of the thread block that follow another, or that begin it."""
    kept: list[Json] = []
    for op in ops:
        if op["name"] != "nop" or (kept and kept[-1]["name"] != "nop"):
            kept.append(op)
    return kept
