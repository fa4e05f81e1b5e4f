"""A ring AllGather or ring attention in SimGrid's Python: the program of ``rings.cpp``, with its input and output.

It runs in the Python interpreter for which SimGrid is installed.
"""

from __future__ import annotations

import json
import sys
import time

import simgrid

SETTINGS = (
    "network/model:CM02",
    "network/crosstraffic:0",
    "network/TCP-gamma:1e30",
    "network/weight-S:0",
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
)


def main() -> None:
    """Read the rings, simulate, and print the times."""
    head, *rings = [line.split() for line in sys.stdin]
    ranks, block_bytes, call_s = int(head[0]), int(head[2]), float(head[5])
    engine = simgrid.Engine(["rings", "--log=root.thresh:error", *(f"--cfg={setting}" for setting in SETTINGS)])
    began = time.process_time()
    zone = simgrid.NetZone.create_full_zone("all")
    hosts = [zone.create_host(f"rank {rank}", 1) for rank in range(ranks)]
    for index, ring in enumerate(rings):
        for rank, following in zip(map(int, ring), map(int, ring[1:] + ring[:1]), strict=True):
            link = zone.create_link(f"{rank}->{following}", float(head[3])).set_latency(float(head[4])).seal()
            ends = hosts[rank].netpoint, hosts[following].netpoint
            zone.add_route(*ends, None, None, [simgrid.LinkInRoute(link)], False)
            boxes = [simgrid.Mailbox.by_name(f"{index} {end}") for end in (rank, following)]
            simgrid.Actor.create("hop", hosts[rank], pass_on, *boxes, ranks - 1, block_bytes, call_s)
    zone.seal()
    prepared_s, began = time.process_time() - began, time.process_time()
    engine.run()
    simulated_s = time.process_time() - began
    clock_s = simgrid.Engine.clock
    found = {"prepared_s": prepared_s, "simulated_s": simulated_s, "time_s": clock_s}
    json.dump(found, sys.stdout)


def pass_on(before: simgrid.Mailbox, after: simgrid.Mailbox, steps: int, block_bytes: int, call_s: float) -> None:
    """One rank on one ring: forward a block, compute on it, then receive the next."""
    for _ in range(steps):
        got, _ = before.get_async()
        sent = after.put_async("block", block_bytes)
        if call_s:
            simgrid.this_actor.sleep_for(call_s)
        got.wait()
        sent.wait()
    if call_s:
        simgrid.this_actor.sleep_for(call_s)


if __name__ == "__main__":
    main()
