"""When SimGrid says that transfers arrive. Run by the Python that SimGrid is installed for; needs nothing else.

Standard input has a JSON list of scenarios, standard output the arrival times of each one's transfers in seconds. A
scenario has

- ``ranks``: how many there are;
- ``bandwidths``: of each constraint, in bytes/s;
- ``routes``: rows (source, destination, constraints, seconds of latency in the network);
- ``transfers``: rows (source, destination, bytes, bytes/s at most or null, seconds from its last byte's leaving
  to its being there);
- ``lanes``: lists of numbers of transfers that go one after the other: each begins when the one before it has left;
- ``waits``: for each transfer the numbers of those that have to arrive before it begins.

The network is SimGrid's CM02 without what it adds for TCP: bytes flow through all links of a route at once, at max-min
fair rates. It waits for a route's latency before it lets bytes flow, and weighs flows by their latencies: so these are
to be equal. See P. Velho et al., "On the validity of flow-level TCP network models for grid and cloud simulations",
ACM TOMACS 23(4), 2013.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

SETTINGS = {
    "network/model": "CM02",
    "network/crosstraffic": "0",
    "network/TCP-gamma": "1e30",  # a window that limits nothing; 0 would drop the limits of messages, too
    "network/weight-S": "0",
    "network/bandwidth-factor": "1",
    "network/latency-factor": "1",
    "maxmin/precision": "1e-9",
    "surf/precision": "1e-12",
}


def main() -> None:
    """Simulate every scenario in a process of its own: SimGrid can be started only once in each."""
    found = []
    for scenario in json.load(sys.stdin):
        with ProcessPoolExecutor(1) as process:
            found.append(process.submit(arrivals, scenario).result())
    json.dump(found, sys.stdout)


def arrivals(scenario: dict[str, Any]) -> list[float]:
    """The arrival times in seconds of a scenario's transfers; -1 of those that never do."""
    import simgrid  # here, for nothing else in this file needs it

    engine = simgrid.Engine(["arrivals", "--log=root.thresh:error", *(f"--cfg={k}:{v}" for k, v in SETTINGS.items())])
    zone = simgrid.NetZone.create_full_zone("all")
    hosts = [zone.create_host(f"rank {rank}", 1) for rank in range(scenario["ranks"])]
    links = [zone.create_link(f"link {i}", float(rate)) for i, rate in enumerate(scenario["bandwidths"])]
    for source, destination, constraints, latency_s in scenario["routes"]:
        wait = zone.create_link(f"latency {source} {destination}", 1e30).set_latency(latency_s)
        way = [wait.set_sharing_policy(simgrid.Link.SharingPolicy.FATPIPE, None), *(links[i] for i in constraints)]
        ends = hosts[source].netpoint, hosts[destination].netpoint
        zone.add_route(*ends, None, None, [simgrid.LinkInRoute(link) for link in way], False)
    zone.seal()

    transfers, waits = scenario["transfers"], scenario["waits"]
    is_there = [simgrid.Semaphore(0) for _ in transfers]
    arrived = [-1.0] * len(transfers)

    def send_all(lane: list[int]) -> None:
        for transfer in lane:
            for other in waits[transfer]:
                is_there[other].acquire()
                is_there[other].release()
            send(transfer)

    def send(transfer: int) -> None:
        _, destination, size_bytes, max_bytes_per_s, _ = transfers[transfer]
        simgrid.Actor.create("arrival", hosts[destination], take_in, transfer)
        sent = simgrid.Mailbox.by_name(str(transfer)).put_init("block", size_bytes)
        if max_bytes_per_s is not None:
            sent.set_rate(max_bytes_per_s)
        sent.wait()

    def take_in(transfer: int) -> None:
        simgrid.Mailbox.by_name(str(transfer)).get()
        simgrid.this_actor.sleep_for(transfers[transfer][-1])
        arrived[transfer] = simgrid.Engine.clock
        is_there[transfer].release()

    for lane in scenario["lanes"]:
        simgrid.Actor.create("lane", hosts[transfers[lane[0]][0]], send_all, lane)
    engine.run()
    return arrived


if __name__ == "__main__":
    main()
