"""Flows in a network that shares its capacity max-min fairly, on SimPy.

A transfer is a *flow*: it streams through all links of its route at once (cut-through). Its rate changes whenever a
flow of the same connected component (flows that share constraints, directly or indirectly) begins or ends, and never
exceeds the rate limit of its message. The last byte arrives one route latency, plus any latency of the message, after
it was sent.

Rates are updated once per instant, after all its other events. A flow that shares no constraint has the rate of its
narrowest one; other rates are solved per connected component, so an update costs only what it affects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import simpy

from sim.max_min import OWN_LIMIT, max_min_rates
from tasp_lab.core.units import Number
from tasp_lab.machines.libraries.library import Message
from tasp_lab.topology.graph import Route, Topology

AFTER_EVERYTHING = 2
"""A SimPy priority lower than URGENT (0) and NORMAL (1)."""


def after_everything(env: simpy.Environment, callback: Callable[[simpy.Event], None]) -> None:
    """Schedule a callback at the current simulated time, after all other events of that time."""
    event = simpy.Event(env)
    event._ok, event._value = True, None
    event.callbacks = [callback]
    env.schedule(event, priority=AFTER_EVERYTHING)  # type: ignore[arg-type]


class Flow:
    """A transfer in progress: `bytes_left` at time `since_s`, at `rate` (bytes/s), sent completely at `finish_s`."""

    __slots__ = (
        "bottleneck", "bound_s", "bytes_left", "finish_s", "latency_s", "limit", "rate", "route", "sent", "since_s",
        "tag",
    )  # fmt: skip

    def __init__(self, route: Route, message: Message, tag: object, sent: simpy.Event) -> None:
        self.route = route
        self.bytes_left: Number = message.wire_bytes
        self.limit = message.max_bytes_per_s
        self.latency_s: Number = route.latency_s + message.latency_s
        self.tag = tag
        self.sent = sent
        self.rate: Number = 0
        self.since_s: Number = 0
        self.finish_s: Number | None = None
        self.bottleneck = -1
        self.bound_s: dict[int, Number] = {}

    def advance(self, now_s: Number) -> None:
        """Account for the bytes moved since the rate was set."""
        if self.bottleneck >= 0:
            elapsed = now_s - self.since_s
            self.bytes_left -= self.rate * elapsed
            self.bound_s[self.bottleneck] = self.bound_s.get(self.bottleneck, 0) + elapsed
        self.since_s = now_s

    def bottlenecks(self) -> dict[int, Number]:
        """The seconds during which each constraint was the bottleneck, until the flow finishes."""
        if self.finish_s is None:
            return self.bound_s
        last = self.finish_s - self.since_s
        if not self.bound_s:
            return {self.bottleneck: last}
        return self.bound_s | {self.bottleneck: self.bound_s.get(self.bottleneck, 0) + last}


class Network:
    """The links of a topology and the flows on them. Calls `delivered` with each flow when its last byte arrives."""

    def __init__(self, env: simpy.Environment, topology: Topology, delivered: Callable[[Flow], None]) -> None:
        self._env = env
        self._constraints = topology.constraints
        self._capacity: dict[int, Number] = {}
        self._users: dict[int, dict[Flow, None]] = {}
        self._delivered = delivered
        self._begun: list[Flow] = []
        self._freed: dict[int, None] = {}
        self._settle_is_due = False
        self._due: dict[Number, dict[Flow, None]] = {}

    def send(self, route: Route, message: Message, tag: object) -> simpy.Event:
        """Start a transfer; the returned event fires when the last byte has left the sender."""
        flow = Flow(route, message, tag, simpy.Event(self._env))
        for constraint in route.constraints:
            if constraint not in self._users:
                self._users[constraint] = {}
                self._capacity[constraint] = self._constraints[constraint].bandwidth_bytes_per_s
            self._users[constraint][flow] = None
        self._begun.append(flow)
        self._settle_soon()
        return flow.sent

    def _settle_soon(self) -> None:
        if not self._settle_is_due:
            self._settle_is_due = True
            after_everything(self._env, self._settle)

    def _settle(self, _: simpy.Event) -> None:
        """Update the rates of all flows affected by those that began or ended at this instant."""
        self._settle_is_due = False
        begun, freed = self._begun, self._freed
        self._begun, self._freed = [], {}
        crowded: list[Flow] = []
        for flow in begun:
            if all(len(self._users[constraint]) == 1 for constraint in flow.route.constraints):
                self._run_alone(flow)
            else:
                crowded.append(flow)
        for constraint in freed:
            crowded.extend(self._users[constraint])
        for component in self._components(crowded):
            self._share(component)

    def _run_alone(self, flow: Flow) -> None:
        narrowest = min(flow.route.constraints, key=lambda constraint: (self._capacity[constraint], constraint))
        if flow.limit is not None and flow.limit < self._capacity[narrowest]:
            self._set_rate(flow, flow.limit, OWN_LIMIT)
        else:
            self._set_rate(flow, self._capacity[narrowest], narrowest)

    def _components(self, seeds: Iterable[Flow]) -> Iterable[list[Flow]]:
        """The connected components of flows, by shared constraints, that contain a seed."""
        seen: set[Flow] = set()
        for seed in seeds:
            if seed in seen:
                continue
            seen.add(seed)
            component = [seed]
            constraints: set[int] = set()
            for flow in component:
                for constraint in flow.route.constraints:
                    if constraint not in constraints:
                        constraints.add(constraint)
                        others = [user for user in self._users[constraint] if user not in seen]
                        seen.update(others)
                        component.extend(others)
            yield component

    def _share(self, component: list[Flow]) -> None:
        limits = [flow.limit for flow in component]
        rates, bottlenecks = max_min_rates([flow.route.constraints for flow in component], self._capacity, limits)
        for flow, rate, bottleneck in zip(component, rates, bottlenecks, strict=True):
            if rate != flow.rate or bottleneck != flow.bottleneck:
                self._set_rate(flow, rate, bottleneck)

    def _set_rate(self, flow: Flow, rate: Number, bottleneck: int) -> None:
        now_s = self._env.now
        flow.advance(now_s)
        flow.rate, flow.bottleneck = rate, bottleneck
        flow.finish_s = now_s + flow.bytes_left / rate
        if flow.finish_s in self._due:
            self._due[flow.finish_s][flow] = None
        else:
            self._due[flow.finish_s] = {flow: None}
            wake = self._env.timeout(flow.finish_s - now_s, flow.finish_s)
            wake.callbacks.append(self._finish_due)

    def _finish_due(self, wake: simpy.Event) -> None:
        """End the flows that finish now; flows whose rate has changed since are due at another time."""
        due_s: Number = cast(Number, wake.value)
        arrivals: dict[Number, list[Flow]] = {}
        for flow in self._due.pop(due_s):
            if flow.finish_s == due_s:
                self._leave(flow)
                flow.sent.succeed()
                arrivals.setdefault(flow.latency_s, []).append(flow)
        for latency_s, flows in arrivals.items():
            arrival = self._env.timeout(latency_s, flows)  # type: ignore[arg-type]
            arrival.callbacks.append(self._arrive)

    def _leave(self, flow: Flow) -> None:
        shared = False
        for constraint in flow.route.constraints:
            del self._users[constraint][flow]
            if self._users[constraint]:
                shared = True
                self._freed[constraint] = None
        if shared:
            self._settle_soon()

    def _arrive(self, arrival: simpy.Event) -> None:
        for flow in cast(list[Flow], arrival.value):
            self._delivered(flow)
