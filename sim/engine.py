"""The SimPy engine: how long a schedule takes on a machine, and why.

Each lane of each rank is a SimPy process that walks the schedule's steps. It begins a transfer as soon as the
transfer before it on the same lane has left, the block to send has arrived, and what lies where it is to go is used
no more; there is no barrier between steps. The network shares its capacity among all transfers under way
(`sim.network`).

Each rank that computes has one more process. It begins a kernel call as soon as the call before it has ended and all
blocks that the call reads have arrived; going backward, when the room of what it adds to is free, too. A gradient block
is there when it has arrived and all calls that add to it at that step have ended.

The engine is generic in its number type: with bandwidths, latencies, launch costs and compute rates
given as `fractions.Fraction`, every time it returns is exact.
"""

from __future__ import annotations

from collections.abc import Generator

import simpy

from sim.fairness import OWN_LIMIT
from sim.garbage import without_garbage_collection
from sim.host import Host
from sim.messages import Messages
from sim.network import Flow, Network
from sim.work import Computation, Transfer, Work
from tasp_lab.errors import ScheduleError
from tasp_lab.machine import Machine
from tasp_lab.quantities import Number
from tasp_lab.schedule import Schedule
from tasp_lab.timeline import COMPUTE_LANE, SEND, Event, Timeline

MOST_TRANSFERS = 10_000_000
"""A timeline of as many events takes about 4 GB; simulating them takes minutes."""


def simulate(schedule: Schedule, machine: Machine, explain: bool = False) -> Timeline:
    """Predict what happens when the machine executes the schedule; `explain`: each event says what took how long.

    Raises `ScheduleError` when the machine has not the schedule's ranks or lacks a link that it uses, and when there
    are more than `MOST_TRANSFERS` transfers and kernel calls.

    Two ranks swap 4 bytes over links of 2 bytes/s with a latency of 1 s:

    >>> from fractions import Fraction
    >>> from tasp_lab.all_gather import ring_all_gather
    >>> from tasp_lab.builders import full_mesh
    >>> pair = full_mesh(2, Fraction(2), Fraction(1))
    >>> simulate(ring_all_gather(pair, 4), Machine(pair)).time_s
    Fraction(3, 1)
    """
    schedule.check_routes(machine.topology)
    calls = 0 if schedule.task is None else sum(len(step.calls) for step in schedule.steps)
    if schedule.transfers + calls > MOST_TRANSFERS:
        work = f"{schedule.transfers:,} transfers" + (f" and {calls:,} kernel calls" if calls else "")
        raise ScheduleError(
            f"schedule {schedule.name!r} has {work}; this engine keeps a timeline of at most {MOST_TRANSFERS:,}"
        )
    with without_garbage_collection():
        timeline = _Run(schedule, machine, explain).run()
    assert len(timeline.events) == schedule.transfers + calls, "every transfer and every kernel call ended"
    return timeline


class _Run:
    """One simulation."""

    def __init__(self, schedule: Schedule, machine: Machine, explain: bool) -> None:
        self._schedule = schedule
        self._topology = machine.topology
        self._compute = machine.compute
        self._transport = machine.transport
        self._explain = explain
        self._env = simpy.Environment()
        self._network = Network(self._env, machine.topology, self._deliver)
        self._hosts = [Host(self._env) for _ in range(schedule.world_size)]
        self._work = Work(self._env, schedule, Messages(schedule, machine.transport))
        self._sizes = schedule.block_bytes.tolist()
        self._events: list[Event] = []

    def run(self) -> Timeline:
        for rank in range(self._schedule.world_size):
            for lane in range(self._schedule.lanes):
                self._env.process(self._send_all(rank, lane))
            if self._schedule.task is not None:
                self._env.process(self._compute_all(rank))
        self._env.run()
        events = sorted(self._events, key=lambda event: (event.end_s, event.start_s, event.rank, event.lane))
        name = self._schedule.name
        return Timeline("predicted", name, self._topology.name, self._schedule.world_size, tuple(events))

    def _send_all(self, rank: int, lane: int) -> Generator[simpy.Event, None, None]:
        """The process of one lane of one rank."""
        env, route = self._env, self._topology.route
        waited_for = ""
        for step in range(len(self._schedule.steps)):
            for transfer in self._work.transfers(step, rank, lane):
                block, source, overwritten = transfer.block, transfer.source, transfer.overwritten
                free_s = arrived_s = env.now
                if not source.has(block):
                    waited_for = "block"
                    yield source.arrival(block)
                    arrived_s = env.now
                if overwritten is not None and overwritten.users:
                    waited_for = "room"
                    yield overwritten.freed()
                transfer.start_s = transfer.launched_s = env.now
                transfer.waited_for = waited_for
                transfer.waited_s = (arrived_s - free_s, transfer.start_s - arrived_s)
                message = transfer.message
                if message.launch_s:
                    yield self._launch(rank, lane, message.launch_s)
                    transfer.launched_s = env.now
                yield self._network.send(route(rank, transfer.peer), message, transfer)
                source.end_use()
                waited_for = "lane"

    def _launch(self, rank: int, lane: int, launch_s: Number) -> simpy.Event:
        if self._transport.serial_launch:
            return self._hosts[rank].launch(lane, launch_s)
        return self._env.timeout(launch_s)  # type: ignore[arg-type]

    def _compute_all(self, rank: int) -> Generator[simpy.Event, None, None]:
        """The process of one rank's kernel calls."""
        waited_for = ""
        for step in range(len(self._schedule.steps)):
            for computation in self._work.computations(step, rank):
                overwritten, target = computation.overwritten, computation.target
                free_s = arrived_s = self._env.now
                for block, room in computation.reads.items():
                    if not room.has(block):
                        waited_for = "block"
                        yield room.arrival(block)
                        arrived_s = self._env.now
                if overwritten is not None and overwritten.users:
                    waited_for = "room"
                    yield overwritten.freed()
                start_s, flops = self._env.now, self._schedule.call_flops(computation.call)
                if time_s := self._compute.time_s(flops):
                    yield self._env.timeout(time_s)  # type: ignore[arg-type]
                for room in computation.rooms:
                    room.end_use()
                for block in computation.adds:
                    assert target is not None, "what is added to lies in a room"
                    target.take_in(block)
                waited_s = (arrived_s - free_s, start_s - arrived_s)
                self._note_call(computation, start_s, flops, waited_for, waited_s)
                waited_for = "compute"

    def _note_call(
        self, computation: Computation, start_s: Number, flops: int, waited_for: str, waited_s: tuple[Number, Number]
    ) -> None:
        call = computation.call
        spent = (*_waiting(waited_s), ("compute", self._env.now - start_s)) if self._explain else ()
        self._events.append(
            Event(
                rank=call.rank,
                lane=COMPUTE_LANE,
                step=computation.step,
                kind=self._schedule.call_kind,
                peer=call.rank,
                block=next(iter(computation.reads)),
                bytes=0,
                start_s=start_s,
                end_s=self._env.now,
                bound_by="compute",
                waited_for=waited_for,
                flops=flops,
                spent=spent,
            )
        )

    def _deliver(self, flow: Flow) -> None:
        transfer: Transfer = flow.tag  # type: ignore[assignment]
        transfer.target.take_in(transfer.block)
        self._events.append(
            Event(
                rank=transfer.rank,
                lane=transfer.lane,
                step=transfer.step,
                kind=SEND,
                peer=transfer.peer,
                block=transfer.block,
                bytes=self._sizes[transfer.block],
                start_s=transfer.start_s,
                end_s=self._env.now,
                bound_by=self._name_bound(transfer, flow),
                waited_for=transfer.waited_for,
                spent=self._spent(transfer, flow) if self._explain else (),
            )
        )

    def _name_bound(self, transfer: Transfer, flow: Flow) -> str:
        """What took most of the transfer's time; ties go to the first constraint in topology order."""
        seconds = flow.bottlenecks()
        longest = next(iter(seconds)) if len(seconds) == 1 else min(seconds, key=lambda c: (-seconds[c], c))
        bound, bound_s = self._name(longest, transfer), seconds[longest]
        if flow.latency_s > bound_s:
            bound, bound_s = "latency", flow.latency_s
        return "launch" if transfer.launched_s - transfer.start_s > bound_s else bound

    def _name(self, constraint: int, transfer: Transfer) -> str:
        return transfer.message.rule if constraint == OWN_LIMIT else self._topology.constraints[constraint].name

    def _spent(self, transfer: Transfer, flow: Flow) -> tuple[tuple[str, Number], ...]:
        """What all of the transfer's time went to, from when its lane was free."""
        wires = [(self._name(constraint, transfer), seconds) for constraint, seconds in flow.bottlenecks().items()]
        rest = [("launch", transfer.launched_s - transfer.start_s), *wires, ("latency", flow.latency_s)]
        return (*_waiting(transfer.waited_s), *((what, seconds) for what, seconds in rest if seconds))


def _waiting(waited_s: tuple[Number, Number]) -> tuple[tuple[str, Number], ...]:
    what = ("waiting for block", "waiting for room")
    return tuple((kind, seconds) for kind, seconds in zip(what, waited_s, strict=True) if seconds)
