"""The SimPy engine: predicts the timeline of a schedule on a machine.

Each lane of each rank is a SimPy process that executes the schedule's steps. It starts a transfer as soon as the
previous transfer on the same lane has left, the block to send is available, and the destination buffer is free; there
is no barrier between steps. The network shares its capacity among all transfers in progress (`sim.event.network`).

Each rank that computes has one more process. It starts a kernel call as soon as the previous call has ended and all
blocks that it reads are available; in a backward pass also the buffer of the gradients that it adds to must be free. A
gradient block is available once it has arrived and all calls that add to it at that step have ended.

The engine is generic in its number type: if bandwidths, latencies, launch costs and compute rates are
`fractions.Fraction`, all times are exact.
"""

from __future__ import annotations

from collections.abc import Generator

import simpy

from sim.event.dependencies import Computation, Transfer, Work
from sim.event.launch_queue import Host
from sim.event.network import Flow, Network
from sim.gc_pause import without_garbage_collection
from sim.max_min import OWN_LIMIT
from sim.messages import Messages
from tasp_lab.errors import ScheduleError
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import COMPUTE_LANE, SEND, Event, Timeline
from tasp_lab.units import Number

MAX_TRANSFERS = 10_000_000
"""Maximum events of a timeline: about 4 GB of memory and minutes of simulation."""


def simulate(schedule: Schedule, machine: Machine, explain: bool = False) -> Timeline:
    """Predict the timeline of a schedule on a machine; `explain`: each event records what its time was spent on.

    Raises `ScheduleError` if the machine lacks ranks or links of the schedule, and for more than `MAX_TRANSFERS`
    transfers and kernel calls.

    Two ranks swap 4 bytes over links of 2 bytes/s with a latency of 1 s:

    >>> from fractions import Fraction
    >>> from tasp_lab.collectives.all_gather import ring_all_gather
    >>> from tasp_lab.topology.builders import full_mesh
    >>> pair = full_mesh(2, Fraction(2), Fraction(1))
    >>> simulate(ring_all_gather(pair, 4), Machine(pair)).time_s
    Fraction(3, 1)
    """
    schedule.check_routes(machine.topology)
    calls = 0 if schedule.task is None else sum(len(step.calls) for step in schedule.steps)
    if schedule.transfers + calls > MAX_TRANSFERS:
        work = f"{schedule.transfers:,} transfers" + (f" and {calls:,} kernel calls" if calls else "")
        raise ScheduleError(
            f"schedule {schedule.name!r} has {work}; this engine keeps a timeline of at most {MAX_TRANSFERS:,}"
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
        self._compute = machine.rate_of(schedule.task)
        self._comm_library = machine.comm_library
        self._explain = explain
        self._env = simpy.Environment()
        self._network = Network(self._env, machine.topology, self._deliver)
        self._hosts = [Host(self._env) for _ in range(schedule.world_size)]
        self._work = Work(self._env, schedule, Messages(schedule, machine.comm_library))
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
                if overwritten is not None and overwritten.pending_uses:
                    waited_for = "buffer"
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
        if self._comm_library.serial_launch:
            return self._hosts[rank].launch(lane, launch_s)
        return self._env.timeout(launch_s)  # type: ignore[arg-type]

    def _compute_all(self, rank: int) -> Generator[simpy.Event, None, None]:
        """The process of one rank's kernel calls."""
        waited_for = ""
        for step in range(len(self._schedule.steps)):
            for computation in self._work.computations(step, rank):
                overwritten, target = computation.overwritten, computation.target
                free_s = arrived_s = self._env.now
                for block, buffer in computation.reads.items():
                    if not buffer.has(block):
                        waited_for = "block"
                        yield buffer.arrival(block)
                        arrived_s = self._env.now
                if overwritten is not None and overwritten.pending_uses:
                    waited_for = "buffer"
                    yield overwritten.freed()
                start_s, flops = self._env.now, self._schedule.call_flops(computation.call)
                if time_s := self._compute.time_s(flops):
                    yield self._env.timeout(time_s)  # type: ignore[arg-type]
                for buffer in computation.buffers:
                    buffer.end_use()
                for block in computation.adds:
                    assert target is not None, "gradients that a call adds to have a buffer"
                    target.deliver(block)
                waited_s = (arrived_s - free_s, start_s - arrived_s)
                self._record_call(computation, start_s, flops, waited_for, waited_s)
                waited_for = "compute"

    def _record_call(
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
        transfer.target.deliver(transfer.block)
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
        """The dominant share of the transfer's time; ties go to the first constraint in topology order."""
        seconds = flow.bottlenecks()
        longest = next(iter(seconds)) if len(seconds) == 1 else min(seconds, key=lambda c: (-seconds[c], c))
        bound, bound_s = self._name(longest, transfer), seconds[longest]
        if flow.latency_s > bound_s:
            bound, bound_s = "latency", flow.latency_s
        return "launch" if transfer.launched_s - transfer.start_s > bound_s else bound

    def _name(self, constraint: int, transfer: Transfer) -> str:
        return transfer.message.rule if constraint == OWN_LIMIT else self._topology.constraints[constraint].name

    def _spent(self, transfer: Transfer, flow: Flow) -> tuple[tuple[str, Number], ...]:
        """What the transfer's time was spent on, from when its lane was free."""
        wires = [(self._name(constraint, transfer), seconds) for constraint, seconds in flow.bottlenecks().items()]
        rest = [("launch", transfer.launched_s - transfer.start_s), *wires, ("latency", flow.latency_s)]
        return (*_waiting(transfer.waited_s), *((what, seconds) for what, seconds in rest if seconds))


def _waiting(waited_s: tuple[Number, Number]) -> tuple[tuple[str, Number], ...]:
    what = ("waiting for block", "waiting for buffer")
    return tuple((kind, seconds) for kind, seconds in zip(what, waited_s, strict=True) if seconds)
