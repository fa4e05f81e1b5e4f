"""Chakra execution traces, which ASTRA-sim runs as custom collectives or as whole workloads. Writing only.

    files = write(schedule)                # one trace a rank
    (folder / "ring.0.et").write_bytes(files[0])

A trace is a sequence of length-delimited protobuf messages: one GlobalMetadata, then a Node for each send, receive and
kernel call of the rank (et_def.proto of mlcommons/chakra at 21585d8). A message has its number as tag. A node waits for
what its data wait for, so kernel calls are nodes of no duration: they carry dependencies.

Not carried: buffers of the receiver, launch costs, and the order of messages of a lane to one peer, which the link has.
"""

from __future__ import annotations

from collections import defaultdict

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.dependencies import BLOCK, LANE
from tasp_lab.schedule.messages import message_dependencies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.conditions import collectives_of

MAX_TRANSFERS = 2**20
"""About as many nodes take 100 MB."""

_COMPUTE, _SEND, _RECEIVE, _COLLECTIVE = 4, 5, 6, 7
_COLLECTIVE_TYPES = {"AllReduce": 0, "AllGather": 2, "ReduceScatter": 7, "AllToAll": 6}
"""CollectiveCommType of et_def.proto."""


def write(schedule: Schedule) -> list[bytes]:
    """The trace of each rank.

    Raises `ScheduleError` for too many transfers.

    >>> from tasp_lab.schedules.collectives.all_gather import ring_all_gather
    >>> from tasp_lab.topology.builders import full_mesh
    >>> first, *others = write(ring_all_gather(full_mesh(3), 64))
    >>> len(others), first.count(b"send"), first.count(b"receive")
    (2, 2, 2)
    """
    if schedule.transfers > MAX_TRANSFERS:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.transfers:,} transfers, expected at most {MAX_TRANSFERS:,} "
            "in Chakra traces"
        )
    derived = message_dependencies(schedule)
    messages, first_call = derived.messages, derived.first_call
    rows = list(messages.rows())
    call_rank = derived.calls.rank.tolist()
    # Both ends of message m have the id 2m (send) and 2m + 1 (receive); a call follows them.
    waits: dict[int, set[int]] = defaultdict(set)
    edges = (derived.edges.before.tolist(), derived.edges.after.tolist(), derived.edges.cause.tolist())
    for before, after, cause in zip(*edges, strict=True):
        if after >= derived.first_buffer or before >= derived.first_buffer or cause not in (BLOCK, LANE):
            continue
        at = 2 * after if after < first_call else first_call + after
        rank = rows[after][1] if after < first_call else call_rank[after - first_call]
        if before >= first_call:
            waits[at].add(first_call + before)
        elif cause == LANE:
            if rows[before][2] != rows[after][2]:
                waits[at].add(2 * before)  # another link: the lane keeps the order
        elif rows[before][2] == rank:
            waits[at].add(2 * before + 1)
        else:
            waits[at].add(2 * before)  # what is overwritten has to leave first
    traces = [_delimited(_text(1, "0.0.4")) for _ in range(schedule.world_size)]
    for number, (step, source, destination, _, size_bytes, _) in enumerate(rows):
        ends = {"comm_src": source, "comm_dst": destination, "comm_size": size_bytes, "comm_tag": number}
        name = f"step {step} {source}->{destination}"
        traces[source] += _node(2 * number, f"send {name}", _SEND, waits[2 * number], ends)
        traces[destination] += _node(2 * number + 1, f"receive {name}", _RECEIVE, (), ends)
    for number, rank in enumerate(call_rank):
        at = 2 * first_call + number
        kernel = derived.calls.kernels[int(derived.calls.kernel[number])]
        traces[rank] += _node(at, kernel, _COMPUTE, waits[at], {})
    return [bytes(trace) for trace in traces]


def workload(schedule: Schedule) -> bytes:
    """The trace of any rank of a workload that is one collective, whose custom implementation `write` makes.

    Raises `ScheduleError` for what is none of ASTRA-sim's collectives.
    """
    found = [(kind, size) for kind, size in collectives_of(schedule).items() if kind in _COLLECTIVE_TYPES]
    if not found:
        raise ScheduleError(
            f"schedule {schedule.name!r} is no collective of ASTRA-sim, expected one of {', '.join(_COLLECTIVE_TYPES)}"
        )
    kind, shard_bytes = found[0]
    values = {"comm_type": _COLLECTIVE_TYPES[kind], "comm_size": shard_bytes * schedule.world_size}
    return _delimited(_text(1, "0.0.4")) + _node(0, kind, _COLLECTIVE, (), values)


def _node(number: int, name: str, kind: int, waits: set[int] | tuple[()], values: dict[str, int]) -> bytes:
    body = _whole(1, number) + _text(2, name) + _whole(3, kind)
    if waits:
        body += _field(5, b"".join(_varint(each) for each in sorted(waits)))
    for key, value in values.items():
        body += _field(10, _text(1, key) + _whole(13, value))
    body += _field(10, _text(1, "is_cpu_op") + _varint(27 << 3) + _varint(0))
    return _delimited(body)


def _varint(value: int) -> bytes:
    """A whole number in groups of 7 bits, the lowest first.

    >>> _varint(300)
    b'\\xac\\x02'
    """
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _whole(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _field(field, text.encode())


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message
