"""The emulated fabric: any topology as network namespaces, veth pairs and token buckets on one Linux machine.

Every rank and every switch is a network namespace; every pair of opposite links is a veth pair whose two ends are
shaped to the links' scaled bandwidths. Processes in the ranks' namespaces exchange real packets over links whose
bandwidth ratios are those of the topology. Latencies are not emulated.

The namespaces are unnamed. They exist only while this process holds their descriptors or ranks run inside, so they
disappear when the run ends, however it ends, and concurrent runs cannot interfere.

The following settings make the links behave as lossless; each has a measured effect:

- **reno**: BBR interacts badly with the token bucket; with it a pair of ranks behaves half-duplex.
- **No slow start**: routes begin with a large window, which is not reset when idle.
- **Deep queues**: a port with many senders must not drop packets.
- **Turns**: a connection has at most two packets in the queue of its rank, so connections that share a link take turns.
  Without this limit each queued about 1 ms of its pacing rate, which is some 100 kB with large windows, and the links
  of those further back in the queue stood idle for 20 to 80 ms. Where ranks forward, windows of two packets per link
  limit it: with larger ones a message of the rank that forwards had a fifth of a link, with these a third.
- **Large packets** (up to 9000 bytes): few enough for two cores to forward, small enough that a packet takes at most
  about 4 ms.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from multiprocessing.connection import Connection
from typing import Any

from runtime.protocol.jobs import RankLocation, our_module
from tasp_lab.core.arrays import first_true
from tasp_lab.core.errors import FabricError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology, Vertex

BUCKET_PACKETS = 2
"""Bucket size in packets: with one, late timers reduce the rate; each one lets a packet pass unshaped at the start."""

MIN_BYTES_PER_S, MAX_BYTES_PER_S = 1e3, 1e9
"""Below, a packet takes seconds; above, hosts cannot forward all packets (and tbf is limited to 2**32)."""

QUEUED_PACKETS = 2
"""Packets that a connection may have in the queue of its rank: with one, busy cores leave gaps between packets."""

_PACKET_S = 0.004
_MIN_PACKET_BYTES, _MAX_PACKET_BYTES = 1500, 9000
_ETHERNET_HEADER_BYTES = 14
_QUEUE_BYTES = 256 * 2**20
_WINDOW_PACKETS = 1000
MAIN_TABLE, FIRST_TABLE = 254, 1000
"""The kernel's table of routes, and that of rank 0 for packets whose routes differ from those of others."""

_SYSCTL = {
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
}


@contextlib.contextmanager
def emulate(topology: Topology) -> Iterator[tuple[RankLocation, ...]]:
    """Build the fabric of an (already scaled) topology: the namespaces of all ranks.

    Raises `FabricError` with the missing requirement.
    """
    if (reason := _missing_in_kernel()) is not None:
        raise FabricError(f"the emulated fabric does not work here: {reason}")
    for link in topology.links:
        if not MIN_BYTES_PER_S <= link.bandwidth_bytes_per_s <= MAX_BYTES_PER_S:
            raise FabricError(
                f"{topology.name}: link {link.name} has {float(link.bandwidth_bytes_per_s):.3g} bytes/s at this scale; "
                f"a token bucket shapes {MIN_BYTES_PER_S:.0g} to {MAX_BYTES_PER_S:.0g}"
            )
    if topology.shared:
        raise FabricError(f"{topology.name}: shared capacity {topology.shared[0].name!r} cannot be built from links")
    plan = _plan(topology, user_namespace=os.geteuid() != 0)
    try:
        descriptors = _build(plan)
    except FabricError as error:
        raise FabricError(f"the emulated fabric does not work here: {error}") from None
    try:
        user = descriptors[0] if plan["user_namespace"] else -1
        ranks = descriptors[1 : 1 + topology.world_size]
        yield tuple(RankLocation("rank", namespace, user) for namespace in ranks)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def check_directions(topology: Topology, schedule: Schedule) -> None:
    """Raise `FabricError` for a message to a rank with a link to its sender, but none back: see `_next_hops`."""
    linked = topology.linked_pairs
    for step in schedule.steps:
        against = linked[step.destination, step.source] & ~linked[step.source, step.destination]
        if (at := first_true(against)) is not None:
            source, destination = int(step.source[at]), int(step.destination[at])
            raise FabricError(
                f"{topology.name}: schedule {schedule.name!r} sends from rank {source} to {destination}, whose link is "
                f"one way, from {destination} to {source}; the emulated fabric needs links both ways for this"
            )


def missing_here() -> str | None:
    """The reason in one line why this machine cannot build a fabric, or None if it can.

    This is tested by building a fabric of two ranks.
    """
    if (reason := _missing_in_kernel()) is not None:
        return reason
    try:
        for descriptor in _build(_plan(full_mesh(2, 1e6, 0.0), user_namespace=os.geteuid() != 0)):
            os.close(descriptor)
    except FabricError as error:
        return str(error)
    return None


def _missing_in_kernel() -> str | None:
    if platform.system() != "Linux":
        return f"it needs Linux, this is {platform.system()}"
    if not os.path.exists("/proc/self/ns/net"):
        return "the kernel has no network namespaces"
    return None


def _build(plan: dict[str, Any]) -> list[int]:
    """Build a plan in the builder process; the descriptors of the user namespace and of each vertex."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = our_module("runtime.fabric.builder", str(theirs.fileno()))
            builder = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        messages: Connection = Connection(os.dup(ours.fileno()))
        try:
            messages.send(plan)
            answer: int | str = messages.recv()
        except (OSError, EOFError):
            lines = builder.communicate()[1].decode(errors="replace").strip().splitlines()
            raise FabricError(f"the builder ended early: {lines[-1] if lines else 'no output'}") from None
        descriptors: list[int] = []
        while isinstance(answer, int) and len(descriptors) < answer:
            descriptors += socket.recv_fds(ours, 1, 256)[1]
        builder.communicate()
        if isinstance(answer, str):
            advice = "it needs CAP_SYS_ADMIN and CAP_NET_ADMIN, veth and sch_tbf"
            if plan["user_namespace"]:
                settings = "user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns"
                advice = f"it needs root, or unprivileged user namespaces: see sysctl {settings}"
            raise FabricError(f"{answer} ({advice})")
    return descriptors


def _plan(topology: Topology, user_namespace: bool) -> dict[str, Any]:
    """The fabric as plain data for `runtime.fabric.builder`."""
    vertices = topology.vertices
    index = {vertex: position for position, vertex in enumerate(vertices)}
    addresses = [f"10.64.{position // 250}.{position % 250 + 1}" for position in range(len(vertices))]
    cables = _cables(topology, index)
    packet_bytes = max((cable["mtu"] for cable in cables), default=_MIN_PACKET_BYTES)
    ways = _ways(topology)
    routes: list[dict[str, Any]] = [
        {"at": index[at], "to": addresses[to], "via": addresses[index[next_hop]], "next": index[next_hop],
         "source": addresses[index[at]], "metrics": _metrics(ways.get((at, to), ()), packet_bytes),
         "table": MAIN_TABLE if source is None else FIRST_TABLE + index[source]}
        for (at, to, source), next_hop in _next_hops(ways).items()
    ]  # fmt: skip
    rules = sorted({(route["at"], route["table"]) for route in routes if route["table"] != MAIN_TABLE})
    return {
        "user_namespace": user_namespace,
        "vertices": [
            {"interface": "rank", "address": address, "sysctl": _sysctl(position, cables)}
            for position, address in enumerate(addresses)
        ],
        "cables": cables,
        "rules": [{"at": at, "source": addresses[table - FIRST_TABLE], "table": table} for at, table in rules],
        "routes": routes,
    }


def _sysctl(vertex: int, cables: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The settings of a vertex; its queue limit is that of its slowest cable, where a packet takes longest."""
    smallest = min((cable["mtu"] for cable in cables if vertex in (cable["a"], cable["b"])), default=_MIN_PACKET_BYTES)
    return _SYSCTL | {"ipv4/tcp_limit_output_bytes": str(QUEUED_PACKETS * smallest)}


def _cables(topology: Topology, index: dict[Vertex, int]) -> list[dict[str, Any]]:
    """A cable per pair of linked vertices; a direction without a link is unshaped, for acknowledgements."""
    cables: dict[tuple[int, int], dict[str, Any]] = {}
    for link in topology.links:
        ends = index[link.source], index[link.destination]
        a, b = min(ends), max(ends)
        cable = cables.setdefault((a, b), {"a": a, "b": b, "a_to_b": None, "b_to_a": None, "mtu": 0})
        cable["mtu"] = max(cable["mtu"], packet_size_bytes(float(link.bandwidth_bytes_per_s)))
        rate = max(int(link.bandwidth_bytes_per_s), 1)
        cable["a_to_b" if ends == (a, b) else "b_to_a"] = {"rate": rate, "limit": _QUEUE_BYTES}
    for cable in cables.values():
        for shape in filter(None, (cable["a_to_b"], cable["b_to_a"])):
            shape["burst"] = BUCKET_PACKETS * (cable["mtu"] + _ETHERNET_HEADER_BYTES)
    return list(cables.values())


def packet_size_bytes(bandwidth_bytes_per_s: float) -> int:
    """The maximum IP packet size of a link in bytes: about 4 ms of its bandwidth, between 1500 and 9000."""
    return min(max(int(bandwidth_bytes_per_s * _PACKET_S), _MIN_PACKET_BYTES), _MAX_PACKET_BYTES)


def _metrics(way: Sequence[Vertex], packet_bytes: int) -> dict[str, int]:
    """The windows of connections along a way; if ranks forward, `QUEUED_PACKETS` per link.

    The queue of the first rank does not limit how much waits at those that forward, whose own messages would starve.
    """
    window = {"initcwnd": _WINDOW_PACKETS, "initrwnd": _WINDOW_PACKETS}
    if any(isinstance(vertex, int) for vertex in way[1:-1]):
        window["window"] = QUEUED_PACKETS * (len(way) - 1) * packet_bytes
    return window


def _ways(topology: Topology) -> dict[tuple[Vertex, int], list[Vertex]]:
    """The vertices from each rank to each other, whatever software forwards: a process group connects all pairs.

    Ranks that are linked one way answer over the same cables, which are not shaped that way.
    """
    forwarding = replace(topology, forwarding=replace(topology.forwarding, most_ranks=None))
    ways: dict[tuple[Vertex, int], list[Vertex]] = {}
    for source, destination in permutations(range(topology.world_size), 2):
        answers = topology.linked_pairs[destination, source] and not topology.linked_pairs[source, destination]
        ends = (destination, source) if answers else (source, destination)
        links = [topology.links[index] for index in forwarding.route(*ends).links]
        way = [links[0].source, *(link.destination for link in links)]
        ways[source, destination] = way[::-1] if answers else way
    return ways


def _next_hops(ways: Mapping[tuple[Vertex, int], Sequence[Vertex]]) -> dict[tuple[Vertex, int, Vertex | None], Vertex]:
    """The next hop of each vertex for each destination rank: of packets from one source rank, or None for all others.

    A rank opens connections before it has a source address, so what it sends itself goes by destination alone.
    """
    hops: dict[tuple[Vertex, int, Vertex | None], Vertex] = {(*pair, None): way[1] for pair, way in ways.items()}
    for (source, destination), way in ways.items():
        for at, onward in pairwise(way[1:]):
            if hops.setdefault((at, destination, None), onward) != onward:
                hops[at, destination, source] = onward
    return hops
