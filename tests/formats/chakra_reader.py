"""Reads and executes Chakra traces, from the protobuf wire format and et_def.proto; shares no code with the writer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: varints as numbers, the rest as bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
            yield key >> 3, value
        else:
            assert key & 7 == 2
            size, at = varint(data, at)
            yield key >> 3, data[at : at + size]
            at += size
    assert at == len(data)


def varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def nodes(trace: bytes) -> list[dict]:
    """The nodes of a trace, without its first message."""
    messages, at = [], 0
    while at < len(trace):
        size, at = varint(trace, at)
        messages.append(trace[at : at + size])
        at += size
    found = []
    for message in messages[1:]:
        node: dict = {"data_deps": []}
        for number, value in fields(message):
            if number in (1, 3):
                node["id" if number == 1 else "type"] = value
            elif number == 5:
                at = 0
                while at < len(value):
                    each, at = varint(value, at)
                    node["data_deps"].append(each)
            elif number == 10:
                (_, name), (_, attribute) = fields(value)
                node[name.decode()] = attribute
        found.append(node)
    return found


def execute(traces: list[list[dict]], seed: int) -> Iterator[tuple[int, int, int]]:
    """Run all ranks, in a drawn order; a receive ends once its message is there. Yields source, destination, bytes."""
    random, done, posted = Random(seed), [set() for _ in traces], Counter()
    left = [(rank, node) for rank, trace in enumerate(traces) for node in trace]
    while left:
        random.shuffle(left)
        waiting = []
        for rank, node in left:
            ready = set(node["data_deps"]) <= done[rank]
            key = tuple(node.get(name) for name in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
            if ready and node["type"] == 6:
                ready = posted[key] > 0
                posted[key] -= ready
            if not ready:
                waiting.append((rank, node))
                continue
            if node["type"] == 5:
                assert node["comm_src"] == rank != node["comm_dst"]
                posted[key] += 1
                yield node["comm_src"], node["comm_dst"], node["comm_size"]
            done[rank].add(node["id"])
        assert len(waiting) < len(left), "ranks wait for each other"
        left = waiting
    assert not +posted, "messages that nobody receives"
