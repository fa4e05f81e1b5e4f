"""The SimPy engine: predicts the timeline of a schedule on a machine.

Each lane of each rank is a SimPy process that sends the schedule's messages (`tasp_lab.schedule.messages`). It starts a
message as soon as the previous one on the same lane has left, its blocks are available, and the destination buffer is
free; there is no barrier between steps. The network shares its capacity among all messages in progress
(`sim.event.network`).

Each rank that computes has one more process. It starts a kernel call as soon as the previous call has ended and all
blocks that it reads are available; in a backward pass also the buffer of the gradients that it adds to must be free. A
gradient block is available once it has arrived and all calls that add to it at that step have ended.

The engine is generic in its number type: if bandwidths, latencies, launch costs and compute rates are
`fractions.Fraction`, all times are exact.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import simpy

from sim.event.network import Flow, Network
from sim.event.rank import Gpu, Host
from sim.host import issue_times, messages_under
from sim.max_min import OWN_LIMIT
from sim.messages import LibraryMessages
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.core.process import without_garbage_collection
from tasp_lab.core.units import Number
from tasp_lab.machines.libraries.library import Message
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.dependencies import ARRIVED, BLOCK, BUFFER, HANDED_OUT, LANE, SENT
from tasp_lab.schedule.messages import MessageDependencies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import COMPUTE_LANE, CONTENTION, MAX_TRANSFERS, SEND, Event, Timeline, lasting


def simulate(schedule: Schedule, machine: Machine, explain: bool = False) -> Timeline:
    """Predict the timeline of a schedule on a machine; `explain`: each event records what its time was spent on.

    Raises `ScheduleError` if the machine lacks ranks or links of the schedule, and for more than `MAX_TRANSFERS`
    transfers and kernel calls.

    Two ranks swap 4 bytes over links of 2 bytes/s with a latency of 1 s:

    >>> from fractions import Fraction
    >>> from tasp_lab.schedules.collectives.all_gather import ring_all_gather
    >>> from tasp_lab.topology.builders import full_mesh
    >>> pair = full_mesh(2, Fraction(2), Fraction(1))
    >>> simulate(ring_all_gather(pair, 4), Machine(pair)).time_s
    Fraction(3, 1)
    """
    schedule.check_routes(machine.topology)
    _check_fits(schedule, schedule.transfers)
    derived = messages_under(schedule, machine)
    _check_fits(schedule, derived.first_call, len(derived.calls.step))
    with without_garbage_collection():
        timeline = _Run(schedule, machine, derived, explain).run()
    assert len(timeline.events) == derived.first_buffer, "every message and every kernel call ended"
    return timeline


def _check_fits(schedule: Schedule, transfers: int, calls: int = 0) -> None:
    """Raise `ScheduleError` for more than `MAX_TRANSFERS` transfers and calls."""
    if transfers + calls > MAX_TRANSFERS:
        work = f"{transfers:,} transfers" + (f" and {calls:,} kernel calls" if calls else "")
        raise ScheduleError(
            f"schedule {schedule.name!r} has {work}; this engine keeps a timeline of at most {MAX_TRANSFERS:,}"
        )


@dataclass(slots=True, eq=False)
class _Transfer:
    """A message in progress: operation `number`; when it started and was launched, and what it waited for.

    `waited_s` are the seconds it waited for its blocks, then for the buffer.
    """

    number: int
    step: int
    rank: int
    peer: int
    lane: int
    size_bytes: int
    blocks: Sequence[int]
    message: Message
    start_s: Number = 0
    launched_s: Number = 0
    waited_for: str = ""
    waited_s: tuple[Number, Number] = (0, 0)


class _Run:
    """One simulation."""

    def __init__(self, schedule: Schedule, machine: Machine, derived: MessageDependencies, explain: bool) -> None:
        self._schedule, self._derived, self._explain = schedule, derived, explain
        self._topology, self._machine = machine.topology, machine
        self._call_s = [machine.compute.time_s(shape) for shape in derived.calls.shapes]
        self._parts = [machine.compute.parts(shape) for shape in derived.calls.shapes] if explain else []
        self._comm_library = machine.comm_library
        self._env = simpy.Environment()
        self._network = Network(self._env, machine.topology, self._deliver)
        self._hosts = [Host(self._env) for _ in range(schedule.world_size)]
        self._gpus = [Gpu(self._env, machine.contention) for _ in self._hosts] if machine.contention.slows else []
        self._progress = Progress(self._env, derived)
        self._issued = issue_times(schedule, derived, machine.host)
        self._events: list[Event] = []

    def run(self) -> Timeline:
        for transfers in self._transfers_by_lane().values():
            self._env.process(self._send_all(transfers))
        for calls in self._calls_by_lane().values():
            self._env.process(self._compute_all(calls))
        self._env.run()
        events = sorted(self._events, key=lambda event: (event.end_s, event.start_s, event.rank, event.lane))
        name = self._schedule.name
        return Timeline("predicted", name, self._topology.name, self._schedule.world_size, tuple(events))

    def _transfers_by_lane(self) -> Mapping[tuple[int, int], list[_Transfer]]:
        """The messages of each lane of each rank, in the order of ranks, lanes and steps."""
        transfers: dict[tuple[int, int], list[_Transfer]] = {}
        messages, library = self._derived.messages, LibraryMessages(self._schedule, self._comm_library)
        kinds, kind = library.kinds(messages.step, messages.source, messages.destination, messages.bytes)
        for number, (row, which) in enumerate(zip(messages.rows(), kind.tolist(), strict=True)):
            transfers.setdefault((row[1], row[3]), []).append(_Transfer(number, *row, kinds[which]))
        return dict(sorted(transfers.items()))

    def _calls_by_lane(self) -> Mapping[tuple[int, int], list[int]]:
        """The numbers of the calls of each compute lane of each rank, in the order of ranks, lanes and steps."""
        by_lane: dict[tuple[int, int], list[int]] = {}
        calls = self._derived.calls
        for number, key in enumerate(zip(calls.rank.tolist(), calls.lane.tolist(), strict=True)):
            by_lane.setdefault(key, []).append(number)
        return dict(sorted(by_lane.items()))

    def _send_all(self, transfers: Sequence[_Transfer]) -> Generator[simpy.Event, None, None]:
        """The process of one lane of one rank."""
        env, route, waited_for = self._env, self._topology.route, ""
        for transfer in transfers:
            waited_for, transfer.waited_s = yield from self._wait(transfer.number, waited_for)
            transfer.start_s = transfer.launched_s = env.now
            transfer.waited_for = waited_for
            message = transfer.message
            if message.launch_s:
                yield self._launch(transfer.rank, transfer.lane, message.launch_s)
                transfer.launched_s = env.now
            self._occupy(transfer, transfer.message.channels)
            yield self._network.send(route(transfer.rank, transfer.peer), message, transfer)
            self._progress.record(transfer.number, SENT)
            waited_for = "lane"

    def _wait(self, operation: int, waited_for: str) -> Generator[simpy.Event, None, tuple[str, tuple[Number, Number]]]:
        """Wait for all conditions of an operation, and until its host has issued it.

        Returns what it waited for last, and the seconds for blocks, then for buffers and the host.
        """
        progress, env = self._progress, self._env
        waited_s: list[Number] = []
        for cause, name in ((BLOCK, "block"), (BUFFER, "buffer")):
            began_s = env.now
            for condition in progress.conditions(operation, cause):
                if not progress.has(condition):
                    waited_for = name
                    yield progress.wait(condition)
            waited_s.append(env.now - began_s)
        if self._issued and (more_s := self._issued.of(operation) - env.now) > 0:
            yield env.timeout(more_s)
            waited_for, waited_s[1] = "host", waited_s[1] + more_s
        return waited_for, (waited_s[0], waited_s[1])

    def _launch(self, rank: int, lane: int, launch_s: Number) -> simpy.Event:
        if self._comm_library.serial_launch:
            return self._hosts[rank].launch(lane, launch_s)
        return self._env.timeout(launch_s)  # type: ignore[arg-type]

    def _occupy(self, transfer: _Transfer, channels: Number) -> None:
        """Let a transfer take channels at both ends, or give them back if the number is negative."""
        if channels and self._gpus:
            self._gpus[transfer.rank].send(channels)
            self._gpus[transfer.peer].receive(channels)

    def _compute_all(self, numbers: Sequence[int]) -> Generator[simpy.Event, Number | None, None]:
        """The process of one compute lane of one rank."""
        calls, waited_for = self._derived.calls, ""
        for number in numbers:
            operation = self._derived.first_call + number
            waited_for, waited_s = yield from self._wait(operation, waited_for)
            start_s, flops = self._env.now, int(calls.flops[number])
            lost_s: Number = 0
            if operation in self._progress.handed_out:
                self._env.process(self._hand_out(operation, number))
            if time_s := self._call_s[int(calls.shape[number])]:
                lost_s = (yield self._compute(int(calls.rank[number]), time_s)) or 0
            self._progress.record(operation, SENT)
            self._progress.record(operation, ARRIVED)
            self._record_call(number, start_s, flops, waited_for, waited_s, lost_s)
            waited_for = "compute"

    def _hand_out(self, operation: int, number: int) -> Generator[simpy.Event, Number | None, None]:
        """The process of a call in progress whose thread blocks others wait for."""
        calls = self._derived.calls
        if time_s := self._machine.handed_out_s(calls.shapes[int(calls.shape[number])]):
            yield self._compute(int(calls.rank[number]), time_s)
        self._progress.record(operation, HANDED_OUT)

    def _compute(self, rank: int, time_s: Number) -> simpy.Event:
        """A kernel call, whose time is that at full speed; the value of its event is what it loses to messages."""
        own_s = self._machine.call_s(time_s, rank)
        return self._gpus[rank].run(own_s) if self._gpus else self._env.timeout(own_s)  # type: ignore[arg-type]

    def _record_call(
        self, number: int, start_s: Number, flops: int, waited_for: str, waited_s: tuple[Number, Number], lost_s: Number
    ) -> None:
        calls = self._derived.calls
        rank = int(calls.rank[number])
        lost = [(CONTENTION, lost_s)]
        of_shape = self._parts[int(calls.shape[number])] if self._explain else ()
        parts = [(what, self._machine.call_s(seconds, rank)) for what, seconds in of_shape]
        spent = lasting([*_waiting(waited_s, waited_for), *parts, *lost]) if self._explain else ()
        self._events.append(
            Event(
                rank=rank,
                lane=COMPUTE_LANE,
                step=int(calls.step[number]),
                kind=calls.kernels[int(calls.kernel[number])],
                peer=rank,
                block=int(calls.block[number]),
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
        transfer: _Transfer = flow.tag  # type: ignore[assignment]
        self._occupy(transfer, -transfer.message.channels)
        self._progress.record(transfer.number, ARRIVED)
        self._events.append(
            Event(
                rank=transfer.rank,
                lane=transfer.lane,
                step=transfer.step,
                kind=SEND,
                peer=transfer.peer,
                block=transfer.blocks[0],
                others=tuple(transfer.blocks[1:]),
                bytes=transfer.size_bytes,
                start_s=transfer.start_s,
                end_s=self._env.now,
                bound_by=self._name_bound(transfer, flow),
                waited_for=transfer.waited_for,
                spent=self._spent(transfer, flow) if self._explain else (),
            )
        )

    def _name_bound(self, transfer: _Transfer, flow: Flow) -> str:
        """The dominant share of the transfer's time; ties go to the first constraint in topology order."""
        seconds = flow.bottlenecks()
        longest = next(iter(seconds)) if len(seconds) == 1 else min(seconds, key=lambda c: (-seconds[c], c))
        bound, bound_s = self._name(longest, transfer), seconds[longest]
        if flow.latency_s > bound_s:
            bound, bound_s = "latency", flow.latency_s
        return "launch" if transfer.launched_s - transfer.start_s > bound_s else bound

    def _name(self, constraint: int, transfer: _Transfer) -> str:
        return transfer.message.rule if constraint == OWN_LIMIT else self._topology.constraints[constraint].name

    def _spent(self, transfer: _Transfer, flow: Flow) -> tuple[tuple[str, Number], ...]:
        """What the transfer's time was spent on, from when its lane was free."""
        wires = [(self._name(constraint, transfer), seconds) for constraint, seconds in flow.bottlenecks().items()]
        rest = [("launch", transfer.launched_s - transfer.start_s), *wires, ("latency", flow.latency_s)]
        return lasting([*_waiting(transfer.waited_s, transfer.waited_for), *rest])


def _waiting(waited_s: tuple[Number, Number], waited_for: str) -> tuple[tuple[str, Number], ...]:
    what = ("waiting for block", f"waiting for {'host' if waited_for == 'host' else 'buffer'}")
    return tuple(zip(what, waited_s, strict=True))


Condition = tuple[int, int]
"""An operation and its event."""


class Progress:
    """The state of all operations (`tasp_lab.schedule.messages`); buffers are released as their uses end.

    `handed_out` are the calls that others wait for until they have been handed out.
    """

    def __init__(self, env: simpy.Environment, derived: MessageDependencies) -> None:
        self._env = env
        self._happened = tuple(bytearray(len(derived)) for _ in (SENT, ARRIVED, HANDED_OUT))
        self._awaited: dict[Condition, simpy.Event] = {}
        self.handed_out = frozenset(derived.edges.before[derived.edges.event == HANDED_OUT].tolist())
        edges, releases = derived.edges, derived.edges.after >= derived.first_buffer
        self._conditions: dict[int, dict[int, list[Condition]]] = {BLOCK: {}, BUFFER: {}}
        waits = ~releases & (edges.cause != LANE)
        for before, after, event, cause in _rows(*(column[waits] for column in edges)):
            self._conditions[cause].setdefault(after, []).append((before, event))
        self._pending_uses: dict[int, int] = {}
        self._used: dict[Condition, list[int]] = {}
        for before, buffer, event, _ in _rows(*(column[releases] for column in edges)):
            self._pending_uses[buffer] = self._pending_uses.get(buffer, 0) + 1
            self._used.setdefault((before, event), []).append(buffer)

    def conditions(self, operation: int, cause: int) -> list[Condition]:
        """What an operation waits for, by cause: for blocks, or for memory."""
        return self._conditions[cause].get(operation, [])

    def has(self, condition: Condition) -> bool:
        operation, event = condition
        return bool(self._happened[event][operation])

    def wait(self, condition: Condition) -> simpy.Event:
        """The event that fires when a condition that does not hold yet does."""
        if condition not in self._awaited:
            self._awaited[condition] = simpy.Event(self._env)
        return self._awaited[condition]

    def record(self, operation: int, event: int) -> None:
        """Record an event of an operation."""
        self._happened[event][operation] = True
        if (awaited := self._awaited.pop((operation, event), None)) is not None:
            awaited.succeed()
        for buffer in self._used.pop((operation, event), ()):
            self._pending_uses[buffer] -= 1
            if not self._pending_uses[buffer]:
                self.record(buffer, SENT)
                self.record(buffer, ARRIVED)


def _rows(*columns: IntArray) -> zip[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)
