"""The event loop: runs a program and records the times of each class.

An instant comprises all events at one time up to rounding: those due within a relative tolerance of `SAME` of the
first, including those that they cause. At its end, hosts launch and the rates of the network are updated.

Large programs run as machine code, small ones as Python (`tasp_lab.core.compiled`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sim.array.event_queue import EventQueue, first_due, pop, put
from sim.array.flows import LOGGED, Flows, begin, end, end_due, settle
from sim.array.gpus import Gpus, begin_call, end_call, occupy, settle_gpus
from sim.array.max_min import SAME, Sharing
from sim.array.quotient import Plan, Program
from sim.array.timeline import Bounds, times_table
from sim.array.timeline import Record as Record
from tasp_lab.core.arrays import Int32Array, IntArray, Table
from tasp_lab.core.compiled import call, table
from tasp_lab.core.progress import ShareCallback, no_share
from tasp_lab.schedule.dependencies import BLOCK, LANE

FEW = 500
"""So many operations of all runs of a process take Python no longer than loading machine code."""

STAGES = 20
"""How many parts of a simulation are reported as progress."""

_ARRIVED, _LAUNCHED, _SENT = range(3)
"""Kinds of events, in processing order within an instant."""


class State(NamedTuple):
    """The progress of a run.

    Attributes
    ----------
    operations : a table: the kind of the next `event` of an operation; the `slot` of its flow; the `next_request` of
        its host, or -1; and the columns of `EventQueue`.
    waits : int array (operations,), how many edges an operation waits for: apart, as most of them are visited often.
    events : the operations by the time of their next event, in seconds.
    instant : the events of this instant, by kind, then by number.
    requests : the launches that were requested at this instant: by lane, then by number.
    hosts : a table: whether each `is_busy`, and its first and last waiting request, -1 for none.
    ready : the operations that wait for nothing, in order; `sizes` are how many have begun and how many there are.
    flows : the flows in progress.
    gpus : the calls in progress where messages slow them.
    times : a table, see `times_table`; empty if these are not recorded.
    """

    operations: Table
    waits: Int32Array
    events: EventQueue
    instant: EventQueue
    requests: EventQueue
    hosts: Table
    ready: Int32Array
    sizes: IntArray
    flows: Flows
    gpus: Gpus
    times: Table

    @classmethod
    def of(cls, program: Program, keep: bool) -> State:
        """The state before the first event; `keep`: times and bottlenecks are recorded."""
        plan, size = program.plan, program.plan.size
        rows = np.minimum(np.arange(program.operations.repeats), len(program.waits) - 1)
        operations = table(size, due="f8", place="i4", slot="i4", next_request="i4", event="i4")
        operations["place"], operations["next_request"] = -1, -1
        waits = program.waits[rows].astype(np.int32).ravel()
        first = np.flatnonzero(waits == 0)
        ready = np.zeros(size, dtype=np.int32)
        ready[: len(first)] = first
        hosts = table(int(plan.rows["host"].max(initial=-1)) + 1, is_busy="i4", first="i4", last="i4")
        hosts["first"] = hosts["last"] = -1
        slots, capacity = min(program.lanes, size), program.capacity_bytes_per_s
        users = np.minimum(np.bincount(plan.passes["constraint"], minlength=len(capacity)), slots)
        width = int(np.diff(plan.rows["first_pass"]).max(initial=1))
        return cls(
            operations=operations,
            waits=waits,
            events=EventQueue.of(operations),
            instant=EventQueue.of(operations),
            requests=EventQueue.of(operations),
            hosts=hosts,
            ready=ready,
            sizes=np.array([0, len(first)]),
            flows=Flows.of(Sharing.of(slots, width, users, capacity), 4 * slots + 2 * size if keep else 0),
            gpus=Gpus.of(program.gpus, size, program.operations.contention),
            times=times_table(size if keep else 0),
        )


def run_events(plan: Plan, state: State, until: int) -> float:
    """Run all events, or until so many operations have begun or the log is full; returns the last time in seconds."""
    now_s = 0.0
    _begin_ready(plan, state, now_s)
    _settle(plan, state, now_s)
    room = len(state.flows.log) - 2 * len(state.flows.progress)  # for the rows of one more instant
    while (
        state.events.size[0]
        and state.sizes[0] < until
        and (state.flows.sizes[LOGGED] <= room or not len(state.flows.log))
    ):
        now_s = first_due(state.events)
        while state.events.size[0] and first_due(state.events) <= now_s * (1 + SAME):
            _take_due(plan, state, now_s)
        _settle(plan, state, now_s)
    return now_s


def _take_due(plan: Plan, state: State, now_s: float) -> None:
    """Process the events that are due now, and start the operations that they release."""
    while state.events.size[0] and first_due(state.events) <= now_s * (1 + SAME):
        number = pop(state.events)
        # By kind, then by number: times that differ in rounding would give another order on another machine.
        put(state.instant, number, state.operations[number].event * plan.size + number)
        if state.operations[number].event == _SENT:
            # Of the flows of a group only the earliest is in the queue. Others may end with it.
            end_due(state.flows, state.operations[number].slot, state.instant, _SENT * plan.size, now_s)
    while state.instant.size[0]:
        number = pop(state.instant)
        operation = state.operations[number]
        if operation.event == _ARRIVED:
            occupy(state.gpus, plan.rows[number % plan.classes], -plan.costs[_cost(plan, number)].channels)
            _arrive(plan, state, number, now_s)
        elif operation.event == _LAUNCHED:
            _launched(plan, state, number, now_s)
        else:
            end(state.flows, operation.slot, now_s)
            _follow(plan, state, number, True, now_s)
            operation.event = _ARRIVED
            put(state.events, number, now_s + plan.costs[_cost(plan, number)].latency_s)
    _begin_ready(plan, state, now_s)


def _settle(plan: Plan, state: State, now_s: float) -> None:
    """End an instant: hosts launch one request at a time, and flows get their shares."""
    while state.requests.size[0]:
        number = pop(state.requests)
        host = state.hosts[plan.rows[number % plan.classes].host]
        # Requests come here lane by lane. Those that find the host busy line up behind it, over instants: lanes 2 and 1
        # that ask at 1 s and at 2 s while it is busy are served in this order.
        if not host.is_busy:
            host.is_busy = True
            _launch(plan, state, number, now_s)
        elif host.first < 0:
            host.first = host.last = number
        else:
            state.operations[host.last].next_request = number
            host.last = number
    settle(state.flows, state.events, now_s)
    settle_gpus(state.gpus, state.events, now_s)


def _begin_ready(plan: Plan, state: State, now_s: float) -> None:
    """Start operations that wait for nothing; those that take no time complete at once."""
    while state.sizes[0] < state.sizes[1]:
        number = state.ready[state.sizes[0]]
        state.sizes[0] += 1
        if len(state.times):
            state.times[number].start_s = now_s
        at = plan.rows[number % plan.classes]
        if not plan.costs[_cost(plan, number)].launch_s:
            _launched(plan, state, number, now_s)
        elif at.host < 0:
            _launch(plan, state, number, now_s)
        else:
            put(state.requests, number, float(at.lane) * plan.size + number)


def _launch(plan: Plan, state: State, number: int, now_s: float) -> None:
    state.operations[number].event = _LAUNCHED
    time_s, gpu = plan.costs[_cost(plan, number)].launch_s, plan.rows[number % plan.classes].computes_on
    if gpu < 0:
        put(state.events, number, now_s + time_s)
    else:
        begin_call(state.gpus, number, gpu, time_s, state.events, now_s)


def _launched(plan: Plan, state: State, number: int, now_s: float) -> None:
    if len(state.times):
        state.times[number].launched_s = now_s
    at, cost = number % plan.classes, plan.costs[_cost(plan, number)]
    if cost.launch_s and plan.rows[at].host >= 0:
        _serve_next(state, plan.rows[at].host)
    if cost.wire_bytes:
        occupy(state.gpus, plan.rows[at], cost.channels)
        state.operations[number].event = _SENT
        first_pass, end_pass = plan.rows[at].first_pass, plan.rows[at + 1].first_pass
        state.operations[number].slot = begin(
            state.flows, number, plan.passes, first_pass, end_pass, cost.limit, cost.wire_bytes, now_s
        )
    else:
        if plan.rows[at].computes_on >= 0:
            end_call(state.gpus, number, plan.rows[at].computes_on)
        _follow(plan, state, number, True, now_s)
        _arrive(plan, state, number, now_s)


def _serve_next(state: State, host_number: int) -> None:
    """A host has launched: its first waiting request comes before those of this instant."""
    host = state.hosts[host_number]
    host.is_busy = False
    if host.first >= 0:
        number = host.first
        host.first = state.operations[number].next_request
        put(state.requests, number, -1.0)


def _arrive(plan: Plan, state: State, number: int, now_s: float) -> None:
    if len(state.times):
        state.times[number].end_s = now_s
    _follow(plan, state, number, False, now_s)


def _follow(plan: Plan, state: State, number: int, is_sent: bool, now_s: float) -> None:
    """Release one dependency of each follower of an operation that was sent, or that has arrived."""
    at = number % plan.classes
    first, middle, last = plan.rows[at].if_sent, plan.rows[at].if_arrived, plan.rows[at + 1].if_sent
    for one in range(first if is_sent else middle, middle if is_sent else last):
        follower = number + plan.after[one].offset
        if follower < plan.size:
            if len(state.times):
                _note(state.times[follower], plan.after[one].cause, now_s)
            state.waits[follower] -= 1
            if not state.waits[follower]:
                state.ready[state.sizes[1]] = follower
                state.sizes[1] += 1


def _note(times: Any, cause: int, now_s: float) -> None:
    """Record the end of a wait. A buffer that is freed no later than it is needed does not count as a wait."""
    if cause == LANE:
        times.free_s = now_s
    elif cause == BLOCK:
        times.there_s = now_s
    elif now_s <= max(times.free_s, times.there_s):
        return
    times.waited_for = cause


def _cost(plan: Plan, number: int) -> int:
    """The row in the costs of an operation; see `Operations.variant`."""
    repeat = number // plan.classes
    if repeat >= plan.variants:
        repeat = (repeat - 1) % (plan.variants - 1) + 1
    cost: int = plan.cost[repeat * plan.classes + number % plan.classes]
    return cost


class Run:
    """One simulation of a program; `progress` is called with the share of `STAGES` that is done."""

    _in_python = 0
    """Operations of all runs of this process that ran as Python."""

    def __init__(self, program: Program, progress: ShareCallback = no_share) -> None:
        self._program, self._progress = program, progress

    def run(self) -> Record:
        """Run the program to its end, and keep all times."""
        state = self._run(State.of(self._program, keep=True))[1]
        log = state.flows.log[: state.flows.sizes[LOGGED]]
        return Record(state.times, Bounds.of_log(self._program.plan, log))

    def end_s(self) -> float:
        """The end of the last operation, in seconds."""
        return self._run(State.of(self._program, keep=False))[0]

    def _run(self, state: State) -> tuple[float, State]:
        """Run the program to its end; returns the time in seconds, and the state."""
        plan = self._program.plan
        until = stage = plan.size + 1 if self._progress is no_share else plan.size // STAGES + 1
        fast = Run._in_python + plan.size > FEW
        Run._in_python += 0 if fast else plan.size
        while True:
            now_s = call(run_events, plan, state, until, fast=fast)
            if not state.events.size[0]:
                break
            if state.sizes[0] >= until:
                self._progress(until / plan.size)
                until += stage
            else:
                longer = np.concatenate([state.flows.log, state.flows.log])
                state = state._replace(flows=state.flows._replace(log=longer))
        assert not state.waits.any(), "every operation began"
        return now_s, state
