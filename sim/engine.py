"""The SimPy engine: how long a schedule takes on a machine, and why.

Each lane of each rank is a SimPy process that walks the schedule's steps. It begins a transfer as soon as the
transfer before it on the same lane has left and the block to send has arrived; there is no barrier between steps.
The network shares its capacity among all transfers under way (`sim.network`).

The engine is generic in its number type: with bandwidths, latencies and launch costs given as
`fractions.Fraction`, every time it returns is exact.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import simpy

from sim.host import Host
from sim.network import Flow, Network
from tasp_lab.errors import ScheduleError
from tasp_lab.machine import Machine
from tasp_lab.quantities import Number
from tasp_lab.schedule import Schedule
from tasp_lab.timeline import Event, Timeline

MOST_TRANSFERS = 10_000_000
"""A timeline of as many events takes about 4 GB; simulating them takes minutes."""


def simulate(schedule: Schedule, machine: Machine) -> Timeline:
    """Predict what happens when the machine executes the schedule.

    Raises `ScheduleError` when the machine has not the schedule's ranks or lacks a link that it uses, and when there
    are more than `MOST_TRANSFERS` transfers.

    Two ranks swap 4 bytes over links of 2 bytes/s with a latency of 1 s:

    >>> from fractions import Fraction
    >>> from tasp_lab.all_gather import ring_all_gather
    >>> from tasp_lab.builders import full_mesh
    >>> pair = full_mesh(2, Fraction(2), Fraction(1))
    >>> simulate(ring_all_gather(pair, 4), Machine(pair)).time_s
    Fraction(3, 1)
    """
    schedule.check_routes(machine.topology)
    if schedule.transfers > MOST_TRANSFERS:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.transfers:,} transfers; this engine keeps a timeline of at most "
            f"{MOST_TRANSFERS:,}"
        )
    with _without_garbage_collection():
        return _Run(schedule, machine).run()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause cyclic garbage collection: scanning the millions of objects of a run, few in cycles, doubles its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Transfer:
    """One row of the timeline in the making."""

    __slots__ = ("block", "lane", "launched_s", "peer", "rank", "start_s", "step", "waited_for")

    def __init__(
        self, rank: int, lane: int, step: int, peer: int, block: int, start_s: Number, waited_for: str
    ) -> None:
        self.rank, self.lane, self.step, self.peer, self.block = rank, lane, step, peer, block
        self.start_s = self.launched_s = start_s
        self.waited_for = waited_for


class _Run:
    """One simulation."""

    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        self._schedule = schedule
        self._topology = machine.topology
        self._launch_s = machine.transport.launch_s
        self._env = simpy.Environment()
        self._network = Network(self._env, machine.topology, self._deliver)
        self._hosts = [Host(self._env, self._launch_s) for _ in range(schedule.world_size)]
        self._steps = _StepsByLane(schedule)
        self._sizes = schedule.block_bytes.tolist()
        self._held: list[set[int]] = [set(row.nonzero()[0].tolist()) for row in schedule.initial]
        self._awaited: dict[tuple[int, int], simpy.Event] = {}
        self._events: list[Event] = []

    def run(self) -> Timeline:
        for rank in range(self._schedule.world_size):
            for lane in range(self._schedule.lanes):
                self._env.process(self._walk(rank, lane))
        self._env.run()
        if len(self._events) != self._schedule.transfers:
            raise AssertionError(f"{len(self._events)} of {self._schedule.transfers} transfers ended")
        events = sorted(self._events, key=lambda event: (event.end_s, event.start_s, event.rank, event.lane))
        name = self._schedule.name
        return Timeline("predicted", name, self._topology.name, self._schedule.world_size, tuple(events))

    def _walk(self, rank: int, lane: int) -> Generator[simpy.Event, None, None]:
        """The process of one lane of one rank."""
        env, held, route = self._env, self._held[rank], self._topology.route
        waited_for = ""
        for step in range(len(self._schedule.steps)):
            for peer, block in self._steps.take(step, rank, lane):
                if block not in held:
                    waited_for = "block"
                    yield self._arrival(rank, block)
                transfer = _Transfer(rank, lane, step, peer, block, env.now, waited_for)
                if self._launch_s:
                    yield self._hosts[rank].launch(lane)
                    transfer.launched_s = env.now
                yield self._network.send(route(rank, peer), self._sizes[block], transfer)
                waited_for = "lane"

    def _arrival(self, rank: int, block: int) -> simpy.Event:
        """The event that fires when a block reaches a rank."""
        key = (rank, block)
        if key not in self._awaited:
            self._awaited[key] = simpy.Event(self._env)
        return self._awaited[key]

    def _deliver(self, flow: Flow) -> None:
        transfer: _Transfer = flow.tag  # type: ignore[assignment]
        self._held[transfer.peer].add(transfer.block)
        if (awaited := self._awaited.pop((transfer.peer, transfer.block), None)) is not None:
            awaited.succeed()
        self._events.append(
            Event(
                rank=transfer.rank,
                lane=transfer.lane,
                step=transfer.step,
                kind="send",
                peer=transfer.peer,
                block=transfer.block,
                bytes=self._sizes[transfer.block],
                start_s=transfer.start_s,
                end_s=self._env.now,
                bound_by=self._name_bound(transfer, flow),
                waited_for=transfer.waited_for,
            )
        )

    def _name_bound(self, transfer: _Transfer, flow: Flow) -> str:
        """What took most of the transfer's time; ties go to the first constraint in topology order."""
        seconds = flow.bottlenecks()
        longest = next(iter(seconds)) if len(seconds) == 1 else min(seconds, key=lambda c: (-seconds[c], c))
        bound, bound_s = self._topology.constraints[longest].name, seconds[longest]
        if flow.route.latency_s > bound_s:
            bound, bound_s = "latency", flow.route.latency_s
        return "launch" if transfer.launched_s - transfer.start_s > bound_s else bound


class _StepsByLane:
    """Hands each lane of each rank its transfers, keeping only the steps that some lane has still to take."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._open: dict[int, dict[int, list[tuple[int, int]]]] = {}
        self._takers: dict[int, int] = {}

    def take(self, step: int, rank: int, lane: int) -> list[tuple[int, int]]:
        """The (peer, block) pairs that this lane sends at this step. Each lane asks once per step."""
        if step not in self._open:
            self._open[step] = self._by_lane(step)
            self._takers[step] = self._schedule.world_size * self._schedule.lanes
        found = self._open[step].get(rank * self._schedule.lanes + lane, [])
        self._takers[step] -= 1
        if not self._takers[step]:
            del self._open[step], self._takers[step]
        return found

    def _by_lane(self, step: int) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for source, destination, lane, block in self._schedule.steps[step].rows():
            found[source * self._schedule.lanes + lane].append((destination, block))
        return found
