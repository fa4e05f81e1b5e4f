"""The emulated fabric: any topology as network namespaces, veth pairs and token buckets on one Linux machine.

Every rank and every switch is a network namespace; every pair of links is a veth cable whose two ends are shaped to
the links' bandwidths times a scale. Real processes in the ranks' namespaces then exchange real packets over links
with the proportions of the model. Latencies are not emulated.

The namespaces have no names. They live as long as this process holds their descriptors and ranks run inside, so
they are gone when the run ends, however it ends, and two runs at once cannot meet.

What makes such a fabric behave like lossless links, and was measured to matter:

- **reno**: BBR fights the token bucket; with it a pair of ranks behaves half-duplex.
- **No slow start**: routes begin with a large window, and it is not reset when idle.
- **Deep queues**: a port where many senders meet must not drop packets.
- **Large packets** (up to 9000 bytes): few enough that two cores can forward all of them, small enough that a
  packet takes about 4 ms at most.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import networkx as nx

from runtime.setup import Placement, our_module
from tasp_lab.builders import full_mesh
from tasp_lab.errors import FabricError
from tasp_lab.topology import Topology, Vertex

BUCKET_PACKETS = 2
"""Packets that an idle link may pass at once: one is too few when a timer is late, each is a credit at the start."""

LEAST_BYTES_PER_S, MOST_BYTES_PER_S = 1e3, 1e9
"""Below, a packet takes seconds; above, no machine forwards what the links carry (and 2**32 is tbf's own limit)."""

_PACKET_S = 0.004
_LEAST_PACKET_BYTES, _LARGEST_PACKET_BYTES = 1500, 9000
_ETHERNET_HEADER_BYTES = 14
_QUEUE_BYTES = 256 * 2**20
_WINDOW_PACKETS = 1000
_SYSCTL = {
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    "ipv4/ip_forward": "1",
}


@dataclass(frozen=True)
class Fabric:
    """Namespaces in the proportions of `topology`, whose bandwidths are those of the fabric's own clock."""

    topology: Topology
    placements: tuple[Placement, ...]


@contextlib.contextmanager
def emulate(topology: Topology) -> Iterator[Fabric]:
    """Build the fabric of an (already scaled) topology. Raises `FabricError` that says what is missing."""
    if (reason := _missing_in_kernel()) is not None:
        raise FabricError(f"the emulated fabric does not work here: {reason}")
    for link in topology.links:
        if not LEAST_BYTES_PER_S <= link.bandwidth_bytes_per_s <= MOST_BYTES_PER_S:
            raise FabricError(
                f"{topology.name}: link {link.name} has {float(link.bandwidth_bytes_per_s):.3g} bytes/s at this scale; "
                f"a token bucket shapes {LEAST_BYTES_PER_S:.0g} to {MOST_BYTES_PER_S:.0g}"
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
        yield Fabric(topology, tuple(Placement("rank", namespace, user) for namespace in ranks))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def missing_here() -> str | None:
    """What keeps this machine from building a fabric, in one line; None when nothing does.

    Tried for real, by building the smallest fabric there is.
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
    """Have the builder process make what the plan says; the namespaces' descriptors, the user namespace's first."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = our_module("runtime.fabric_builder", str(theirs.fileno()))
            builder = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        messages: Connection = Connection(os.dup(ours.fileno()))
        try:
            messages.send(plan)
            answer: int | str = messages.recv()
        except (OSError, EOFError):
            lines = builder.communicate()[1].decode(errors="replace").strip().splitlines()
            raise FabricError(f"the builder ended early: {lines[-1] if lines else 'without a word'}") from None
        descriptors: list[int] = []
        while isinstance(answer, int) and len(descriptors) < answer:
            descriptors += socket.recv_fds(ours, 1, 256)[1]
        builder.communicate()
        if isinstance(answer, str):
            raise FabricError(f"{answer} ({_advice(plan)})")
    return descriptors


def _advice(plan: dict[str, Any]) -> str:
    if plan["user_namespace"]:
        settings = "user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns"
        return f"it needs root, or user namespaces for everyone: see sysctl {settings}"
    return "it needs CAP_SYS_ADMIN and CAP_NET_ADMIN, veth and sch_tbf"


def _plan(topology: Topology, user_namespace: bool) -> dict[str, Any]:
    """The fabric as plain data for `runtime.fabric_builder`."""
    vertices = topology.vertices
    index = {vertex: position for position, vertex in enumerate(vertices)}
    addresses = [f"10.64.{position // 250}.{position % 250 + 1}" for position in range(len(vertices))]
    routes = [
        {"at": index[at], "to": addresses[to], "via": addresses[index[onward]], "next": index[onward],
         "source": addresses[index[at]], "window": _WINDOW_PACKETS}
        for (at, to), onward in _next_hops(topology).items()
    ]  # fmt: skip
    return {
        "user_namespace": user_namespace,
        "sysctl": _SYSCTL,
        "vertices": [{"interface": "rank", "address": address} for address in addresses],
        "cables": _cables(topology, index),
        "routes": routes,
    }


def _cables(topology: Topology, index: dict[Vertex, int]) -> list[dict[str, Any]]:
    """A cable per joined pair of vertices; a direction without a link is not shaped, it carries acknowledgements."""
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
    """The largest packet (IP, bytes) of a link: about 4 ms of it, between 1500 and 9000 bytes."""
    return min(max(int(bandwidth_bytes_per_s * _PACKET_S), _LEAST_PACKET_BYTES), _LARGEST_PACKET_BYTES)


def _next_hops(topology: Topology) -> dict[tuple[Vertex, int], Vertex]:
    """Where each vertex hands on what is for a rank.

    Data follows the topology's routes. Ranks without a route still need a connection (a process group sets one up
    between all), so they reach each other over the shortest way there is, through ranks if need be.
    """
    hops: dict[tuple[Vertex, int], Vertex] = {}
    for source, destination in topology.rank_pairs():
        for link in (topology.links[index] for index in topology.route(source, destination).links):
            onward = hops.setdefault((link.source, destination), link.destination)
            if onward != link.destination:
                raise FabricError(f"{topology.name}: two routes to rank {destination} part at {link.source}")
    graph = nx.Graph((link.source, link.destination) for link in topology.links)
    graph.add_nodes_from(topology.vertices)
    for destination in range(topology.world_size):
        for vertex, path in nx.single_source_shortest_path(graph, destination).items():
            if len(path) > 1:
                hops.setdefault((vertex, destination), path[-2])
    return hops
