"""Classes of flows in progress: their shared constraints, rates and finish times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sim.array.max_min import FlowDemand, Share, fair_shares

Bound = tuple[tuple[int, ...], float]
"""Bottlenecks as in `Share`, and the seconds during which they applied."""


_MAX_CACHED = 64
"""Larger components rarely recur in the same composition."""


class Flow:
    """A class of transfers in progress: each has `bytes_left` at time `since_s`, at the rate of `share`.

    `kind` is a number shared by flows of equal traffic.
    """

    __slots__ = ("bounds", "bytes_left", "finish_s", "kind", "number", "share", "since_s", "traffic")

    def __init__(self, number: int, traffic: FlowDemand, wire_bytes: float) -> None:
        self.number, self.traffic, self.bytes_left = number, traffic, wire_bytes
        self.kind = -1
        self.share: Share | None = None
        self.since_s = self.finish_s = 0.0
        self.bounds: list[Bound] = []

    def set_share(self, share: Share, now_s: float) -> None:
        """Continue with a new share from now on."""
        self._advance(now_s)
        self.share, self.since_s = share, now_s
        self.finish_s = now_s + self.bytes_left / share.bytes_per_s

    def end(self, now_s: float) -> None:
        self._advance(now_s)

    def _advance(self, now_s: float) -> None:
        if self.share is not None:
            elapsed_s = now_s - self.since_s
            self.bytes_left -= self.share.bytes_per_s * elapsed_s
            self.bounds.append((self.share.bottlenecks, elapsed_s))


class Flows:
    """All flows in progress. Flows that begin or end are collected; `settle` then updates the rates."""

    def __init__(self, capacity_bytes_per_s: list[float]) -> None:
        self._capacity = capacity_bytes_per_s
        self._users: dict[int, dict[Flow, None]] = {}
        self._begun: list[Flow] = []
        self._freed: dict[int, None] = {}
        self._kinds: dict[FlowDemand, int] = {}
        self._known: dict[tuple[int, ...], list[Share]] = {}

    def begin(self, flow: Flow) -> None:
        flow.kind = self._kinds.setdefault(flow.traffic, len(self._kinds))
        for constraint, _ in flow.traffic.path:
            self._users.setdefault(constraint, {})[flow] = None
        self._begun.append(flow)

    def end(self, flow: Flow) -> None:
        for constraint, _ in flow.traffic.path:
            del self._users[constraint][flow]
            if self._users[constraint]:
                self._freed[constraint] = None

    def settle(self, now_s: float) -> Iterator[Flow]:
        """Update the shares affected by flows that began or ended; yields the flows whose share changed."""
        seeds = self._begun
        if self._freed:
            seeds += [flow for constraint in self._freed for flow in self._users[constraint]]
            self._freed = {}
        self._begun = []
        for component in self._components(seeds):
            shares = self._shares(component)
            for flow, share in zip(component, shares, strict=True):
                if share != flow.share:
                    flow.set_share(share, now_s)
                    yield flow

    def _components(self, seeds: Iterable[Flow]) -> Iterator[list[Flow]]:
        """The connected components of flows, by shared constraints, that contain a seed."""
        seen: set[Flow] = set()
        for seed in seeds:
            if seed not in seen:
                yield self._component(seed, seen)

    def _component(self, seed: Flow, seen: set[Flow]) -> list[Flow]:
        seen.add(seed)
        together = [seed]
        if all(len(self._users[constraint]) == 1 for constraint, _ in seed.traffic.path):
            return together
        constraints: set[int] = set()
        for flow in together:
            for constraint, _ in flow.traffic.path:
                if constraint not in constraints:
                    constraints.add(constraint)
                    others = [user for user in self._users[constraint] if user not in seen]
                    seen.update(others)
                    together += others
        return together

    def _shares(self, together: list[Flow]) -> list[Share]:
        """The fair shares of a component, in order of kinds; sorts it, and caches the shares of small ones."""
        together.sort(key=lambda flow: flow.kind)
        key = tuple([flow.kind for flow in together])
        if key in self._known:
            return self._known[key]
        found = fair_shares([flow.traffic for flow in together], self._capacity)
        if len(together) <= _MAX_CACHED:
            self._known[key] = found
        return found
