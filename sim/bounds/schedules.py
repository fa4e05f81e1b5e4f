"""The least time of one schedule on a machine: its busiest rank, link or lane takes as long, whatever waits for what.

    time_s = least_of_schedule_s(schedule, machine)     # no simulation of this schedule takes less

- A rank takes at least the time of its kernel calls.
- A link, port or NIC takes at least the bytes that pass it, with the overhead of the library's protocol.
- A lane has one message at a time. No message is faster than the longest that the schedule could send to such a place:
  all bytes of a lane at a step, since a library gives no fewer channels to a longer message.

`tasp_lab.prediction.compare` does not simulate a schedule that is too slow by this bound already.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sim.array.max_min import MANY, NEARLY
from sim.host import busy_s
from sim.messages import call_facts
from tasp_lab.core.arrays import FloatArray, IntArray, distinct
from tasp_lab.machines.libraries.library import Message
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.model import LazySteps
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.graph import Topology


def least_of_schedule_s(schedule: Schedule, machine: Machine) -> float:
    """A time in seconds that this schedule does not fall below on this machine.

    >>> from sim.simulate import simulate
    >>> from tasp_lab.schedules.build import collective
    >>> from tasp_lab.topology.builders import full_mesh
    >>> machine = Machine(full_mesh(4, 1e9, 1e-6))
    >>> ring = collective("ring", machine.topology, 4000)
    >>> [round(each * 1e6, 6) for each in (least_of_schedule_s(ring, machine), simulate(ring, machine).time_s)]
    [12.0, 15.0]
    """
    return max(busiest_rank_s(schedule, machine), least_of_messages_s(schedule, machine))


def busiest_rank_s(schedule: Schedule, machine: Machine) -> float:
    """The time of all kernel calls of the rank that takes longest, in seconds."""
    return max(map(float, busy_s(schedule, machine.compute, machine.rank_speeds)))


def least_of_messages_s(schedule: Schedule, machine: Machine) -> float:
    """The time of the bytes on the busiest link or lane, in seconds, without latency."""
    source, destination, lane, size_bytes, most_bytes = schedule.traffic
    if not size_bytes.any():
        return 0.0
    library, topology = machine.comm_library.bind(call_facts(schedule)), machine.topology
    place, wire_bytes, sending_s = library.places(source, destination), np.zeros(len(lane)), np.zeros(len(lane))
    for number in distinct(place[size_bytes > 0]).tolist():
        there = place == number
        longest = int(most_bytes[there].max())
        messages = [library.message(number, longest, peers, first=False) for peers in (1, 2)]
        wire_bytes[there] = size_bytes[there] * (min(float(each.wire_bytes) for each in messages) / longest)
        sending_s[there] = size_bytes[there] * (min(map(_sending_s, messages)) / longest)
    of_lanes_s = np.bincount(source * schedule.lanes + lane, sending_s)
    of_links_s = _passing(source, destination, wire_bytes, topology) / link_rates(topology)
    return float(max(of_lanes_s.max(), of_links_s.max(initial=0.0)))


def _sending_s(message: Message) -> float:
    """The time of the bytes of a message on links that nothing else passes; 0 where only links limit its rate."""
    return 0.0 if message.max_bytes_per_s is None else float(message.wire_bytes) / float(message.max_bytes_per_s)


def rates_within(schedule: Schedule, machine: Machine) -> float:
    """By what share of a capacity simulated rates of messages may miss their fair ones; 0 where few share a link.

    So it is where `sim.array.max_min.MANY` lanes of ranks or more pass a link, port or NIC: a lane has one message at a
    time.

    >>> from tasp_lab.schedules.build import collective
    >>> from tasp_lab.topology.builders import switch
    >>> few, many = switch(8), switch(128)
    >>> [rates_within(collective("direct", each, 4000), Machine(each)) for each in (few, many)]
    [0.0, 0.001]
    """
    ranks, topology, steps = schedule.world_size, machine.topology, schedule.steps
    if topology.is_exact or ranks * schedule.lanes < MANY or not schedule.transfers:
        return 0.0
    repeat = isinstance(steps, LazySteps) and steps.hops_repeat
    sent = steps[0] if repeat else schedule.traffic  # rings of thousands of ranks have as many equal steps
    source, destination, lane = sent.source, sent.destination, sent.lane
    pairs, which = np.unique(source * ranks + destination, return_inverse=True)
    routes = topology.routes(*np.divmod(pairs, ranks))[0][which]
    row, column = np.nonzero(routes >= 0)
    passes = distinct(routes[row, column] * (ranks * schedule.lanes) + (source * schedule.lanes + lane)[row])
    _, lanes = np.unique(passes // (ranks * schedule.lanes), return_counts=True)  # a mesh has millions of links
    return NEARLY if lanes.max(initial=0) >= MANY else 0.0


def link_bytes(schedule: Schedule, topology: Topology) -> FloatArray:
    """The bytes of blocks on each constraint of the topology: float array (constraints,) of whole numbers."""
    traffic = schedule.traffic
    return _passing(traffic.source, traffic.destination, traffic.bytes, topology)


def link_rates(topology: Topology) -> FloatArray:
    """The line rate of each constraint in bytes/s: float array (constraints,)."""
    return np.array([float(each.bandwidth_bytes_per_s) for each in topology.constraints])


def busiest_link_bytes(load_bytes: Iterable[FloatArray], topology: Topology) -> int:
    """Of all `link_bytes` together those on the link that they occupy longest."""
    load = np.sum(list(load_bytes), axis=0)
    return int(load[np.argmax(load / link_rates(topology))]) if len(load) else 0


def _passing(
    source: IntArray, destination: IntArray, size_bytes: IntArray | FloatArray, topology: Topology
) -> FloatArray:
    """The sum of sizes on each constraint, of all that goes between these ranks."""
    pairs, which = np.unique(source * topology.world_size + destination, return_inverse=True)
    between = np.bincount(which, size_bytes, len(pairs))
    routes, _ = topology.routes(*np.divmod(pairs, topology.world_size))
    pair, column = np.nonzero(routes >= 0)
    load: FloatArray = np.bincount(routes[pair, column], between[pair], len(topology.constraints)).astype(float)
    return load
