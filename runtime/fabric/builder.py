"""The builder process: creates network namespaces from a plan and passes them on as file descriptors.

`runtime.fabric.emulated` starts it as ``python -m runtime.fabric.builder FD`` where FD is a Unix socket. It reads one
plan, creates a namespace per vertex and a veth pair per cable, shapes each direction with a token bucket, sets the
routes, sends the descriptors of the namespaces, and exits. The namespaces are unnamed: they exist only while a process
holds their descriptor or runs inside, so no cleanup is needed.
"""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from runtime.linux import CLONE_NEWNET, enter_user_namespace, unshare

DESCRIPTORS_PER_MESSAGE = 200
"""The kernel passes at most 253 descriptors in one message."""


def main() -> None:
    """Read a plan from the channel, build it, and reply with the number of descriptors or an error message."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    messages: Connection = Connection(os.dup(channel.fileno()))
    try:
        descriptors = build(messages.recv())
    except (OSError, NetlinkError) as error:
        messages.send(str(error))
        return
    messages.send(len(descriptors))
    for start in range(0, len(descriptors), DESCRIPTORS_PER_MESSAGE):
        socket.send_fds(channel, [b"x"], descriptors[start : start + DESCRIPTORS_PER_MESSAGE])


def build(plan: dict[str, Any]) -> list[int]:
    """Build a plan; returns the descriptors of the user namespace and of each vertex."""
    if plan["user_namespace"]:
        enter_user_namespace()
    descriptors = [os.open("/proc/self/ns/user", os.O_RDONLY)]
    vertices: list[IPRoute] = []
    for vertex in plan["vertices"]:
        unshare(CLONE_NEWNET)
        descriptors.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        vertices.append(_add_vertex(vertex))
    for cable in plan["cables"]:
        _add_cable(cable, vertices, descriptors)
    for rule in plan["rules"]:
        vertices[rule["at"]].rule("add", src=rule["source"], src_len=32, table=rule["table"])
    for route in plan["routes"]:
        _add_route(route, vertices[route["at"]])
    return descriptors


def _add_vertex(vertex: dict[str, Any]) -> IPRoute:
    for key, value in vertex["sysctl"].items():
        with open(f"/proc/sys/net/{key}", "w") as stream:
            stream.write(value)
    netlink = IPRoute()
    netlink.link("set", index=1, state="up")
    own, peer = vertex["interface"], f"{vertex['interface']}p"
    netlink.link("add", ifname=own, kind="veth", peer={"ifname": peer})
    for name in (own, peer):
        netlink.link("set", index=netlink.link_lookup(ifname=name)[0], state="up")
    netlink.addr("add", index=netlink.link_lookup(ifname=own)[0], address=vertex["address"], prefixlen=32)
    return netlink


def _add_cable(cable: dict[str, Any], vertices: list[IPRoute], descriptors: list[int]) -> None:
    a, b = cable["a"], cable["b"]
    vertices[a].link(
        "add",
        ifname=f"to{b}",
        kind="veth",
        mtu=cable["mtu"],
        peer={"ifname": f"to{a}", "mtu": cable["mtu"], "net_ns_fd": descriptors[1 + b]},
    )
    for here, there, shape in ((a, b, cable["a_to_b"]), (b, a, cable["b_to_a"])):
        netlink = vertices[here]
        index = netlink.link_lookup(ifname=f"to{there}")[0]
        netlink.link("set", index=index, state="up", gso_max_size=cable["mtu"])
        if shape is not None:
            netlink.tc("add", "tbf", index, rate=shape["rate"], burst=shape["burst"], limit=shape["limit"])


def _add_route(route: dict[str, Any], netlink: IPRoute) -> None:
    netlink.route(
        "add",
        dst=f"{route['to']}/32",
        gateway=route["via"],
        oif=netlink.link_lookup(ifname=f"to{route['next']}")[0],
        table=route["table"],
        flags=["onlink"],
        prefsrc=route["source"],
        metrics=route["metrics"],
    )


if __name__ == "__main__":
    main()
