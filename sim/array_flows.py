"""Flows of classes under way: who shares with whom, at which rate, until when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sim.array_sharing import Share, Traffic, fair_shares

Bound = tuple[tuple[int, ...], float]
"""Bottlenecks as in `Share`, and for how many seconds they were."""


_MOST_REMEMBERED = 64
"""More flows at once hardly ever meet again in just the same way."""


class Flow:
    """A class of transfers under way: each has `bytes_left` at time `since_s` and moves at the rate of its share.

    `kind` is a number that flows of equal traffic have in common.
    """

    __slots__ = ("bounds", "bytes_left", "finish_s", "kind", "number", "share", "since_s", "traffic")

    def __init__(self, number: int, traffic: Traffic, wire_bytes: float) -> None:
        self.number, self.traffic, self.bytes_left = number, traffic, wire_bytes
        self.kind = -1
        self.share: Share | None = None
        self.since_s = self.finish_s = 0.0
        self.bounds: list[Bound] = []

    def turn_to(self, share: Share, now_s: float) -> None:
        """Go on with another share from now on."""
        self._note(now_s)
        self.share, self.since_s = share, now_s
        self.finish_s = now_s + self.bytes_left / share.bytes_per_s

    def end(self, now_s: float) -> None:
        self._note(now_s)

    def _note(self, now_s: float) -> None:
        if self.share is not None:
            elapsed_s = now_s - self.since_s
            self.bytes_left -= self.share.bytes_per_s * elapsed_s
            self.bounds.append((self.share.bottlenecks, elapsed_s))


class Flows:
    """All flows under way. What begins and ends at an instant is noted first and settled then."""

    def __init__(self, capacity_bytes_per_s: list[float]) -> None:
        self._capacity = capacity_bytes_per_s
        self._users: dict[int, dict[Flow, None]] = {}
        self._begun: list[Flow] = []
        self._freed: dict[int, None] = {}
        self._kinds: dict[Traffic, int] = {}
        self._known: dict[tuple[int, ...], list[Share]] = {}

    def begin(self, flow: Flow) -> None:
        flow.kind = self._kinds.setdefault(flow.traffic, len(self._kinds))
        for constraint, _ in flow.traffic.way:
            self._users.setdefault(constraint, {})[flow] = None
        self._begun.append(flow)

    def end(self, flow: Flow) -> None:
        for constraint, _ in flow.traffic.way:
            del self._users[constraint][flow]
            if self._users[constraint]:
                self._freed[constraint] = None

    def settle(self, now_s: float) -> Iterator[Flow]:
        """Share anew what began or ended concerns; the flows whose rate changes by it."""
        seeds = self._begun
        if self._freed:
            seeds += [flow for constraint in self._freed for flow in self._users[constraint]]
            self._freed = {}
        self._begun = []
        for together in self._components(seeds):
            shares = self._shares(together)
            for flow, share in zip(together, shares, strict=True):
                if share != flow.share:
                    flow.turn_to(share, now_s)
                    yield flow

    def _components(self, seeds: Iterable[Flow]) -> Iterator[list[Flow]]:
        """The sets of flows that are tied together by shared constraints and contain a seed."""
        seen: set[Flow] = set()
        for seed in seeds:
            if seed not in seen:
                yield self._component(seed, seen)

    def _component(self, seed: Flow, seen: set[Flow]) -> list[Flow]:
        seen.add(seed)
        together = [seed]
        if all(len(self._users[constraint]) == 1 for constraint, _ in seed.traffic.way):
            return together
        constraints: set[int] = set()
        for flow in together:
            for constraint, _ in flow.traffic.way:
                if constraint not in constraints:
                    constraints.add(constraint)
                    others = [user for user in self._users[constraint] if user not in seen]
                    seen.update(others)
                    together += others
        return together

    def _shares(self, together: list[Flow]) -> list[Share]:
        """The fair shares of flows that make a component, in order of kinds; what was found of few is remembered."""
        together.sort(key=lambda flow: flow.kind)
        key = tuple([flow.kind for flow in together])
        if key in self._known:
            return self._known[key]
        found = fair_shares([flow.traffic for flow in together], self._capacity)
        if len(together) <= _MOST_REMEMBERED:
            self._known[key] = found
        return found
