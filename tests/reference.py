"""A second implementation of what the simulator computes: naive, global, exact.

At every instant everything is looked at anew: who has sent, arrived, been launched, may begin; then all rates are
computed from scratch and time moves on to whatever comes first. Nothing is shared with `sim`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from tasp_lab.quantities import Number
from tasp_lab.schedule import Schedule
from tasp_lab.topology import Topology

Key = tuple[int, int, int, int, int]
"""Step, rank, peer, lane and block of a transfer."""


@dataclass(eq=False)
class Transfer:
    """One transfer and how far it is: each time is None until it is known."""

    key: Key
    under: tuple[int, ...]
    latency_s: Fraction
    bytes_left: Fraction
    start_s: Fraction | None = None
    launched_s: Fraction | None = None
    end_s: Fraction | None = None

    @property
    def lane_of_rank(self) -> tuple[int, int]:
        return self.key[1], self.key[3]

    def streams(self, now: Fraction) -> bool:
        return self.launched_s is not None and self.launched_s <= now and self.bytes_left > 0


def reference_times(schedule: Schedule, topology: Topology, launch_s: Number) -> dict[Key, tuple[Fraction, Fraction]]:
    """When every transfer starts and ends, in seconds."""
    capacity = [Fraction(constraint.bandwidth_bytes_per_s) for constraint in topology.constraints]
    transfers = list(_transfers(schedule, topology))
    now = Fraction(0)
    while any(transfer.end_s is None for transfer in transfers):
        _note_last_bytes(transfers, now)
        _begin(schedule, transfers, now)
        _launch(transfers, Fraction(launch_s), now)
        streaming = [transfer for transfer in transfers if transfer.streams(now)]
        rates = max_min([transfer.under for transfer in streaming], capacity)
        ends = [now + transfer.bytes_left / rate for transfer, rate in zip(streaming, rates, strict=True)]
        known = [time for t in transfers for time in (t.launched_s, t.end_s) if time is not None and time > now]
        if not ends and not known:
            break
        later = min(ends + known)
        for transfer, rate in zip(streaming, rates, strict=True):
            transfer.bytes_left -= rate * (later - now)
        now = later
    return {t.key: (t.start_s, t.end_s) for t in transfers if t.start_s is not None and t.end_s is not None}


def _transfers(schedule: Schedule, topology: Topology) -> Iterator[Transfer]:
    for index, step in enumerate(schedule.steps):
        for rank, peer, lane, block in step.rows():
            route = topology.route(rank, peer)
            size = Fraction(int(schedule.block_bytes[block]))
            yield Transfer((index, rank, peer, lane, block), route.constraints, Fraction(route.latency_s), size)


def _note_last_bytes(transfers: list[Transfer], now: Fraction) -> None:
    for transfer in transfers:
        if transfer.bytes_left == 0 and transfer.end_s is None:
            transfer.end_s = now + transfer.latency_s


def _begin(schedule: Schedule, transfers: list[Transfer], now: Fraction) -> None:
    """The first transfer of each lane that still has bytes to send begins, if its block is there."""
    arrived = {(t.key[2], t.key[4]) for t in transfers if t.end_s is not None and t.end_s <= now}
    heads: dict[tuple[int, int], Transfer] = {}
    for transfer in transfers:
        if transfer.bytes_left > 0:
            heads.setdefault(transfer.lane_of_rank, transfer)
    for transfer in heads.values():
        holder, block = transfer.key[1], transfer.key[4]
        if transfer.start_s is None and (schedule.initial[holder, block] or (holder, block) in arrived):
            transfer.start_s = now


def _launch(transfers: list[Transfer], launch_s: Fraction, now: Fraction) -> None:
    """Every host that is free takes what began first, of those that began together the one on the lowest lane."""
    queues: dict[int, list[tuple[Fraction, int, Transfer]]] = defaultdict(list)
    for t in transfers:
        if t.start_s is not None and t.launched_s is None:
            queues[t.key[1]].append((t.start_s, t.key[3], t))
    for rank, queue in queues.items():
        for _, _, transfer in sorted(queue, key=lambda entry: entry[:2]):
            if all(t.launched_s is None or t.launched_s <= now for t in transfers if t.key[1] == rank):
                transfer.launched_s = now + launch_s


def max_min(flows: list[tuple[int, ...]], capacity: list[Fraction]) -> list[Fraction]:
    """Max-min fair rates: again and again the constraint that has the least left per flow fixes its flows."""
    rates = [Fraction(0)] * len(flows)
    left = list(capacity)
    loose = set(range(len(flows)))
    while loose:
        count = [sum(constraint in flows[flow] for flow in loose) for constraint in range(len(capacity))]
        share, tightest = min((left[c] / n, c) for c, n in enumerate(count) if n)
        for flow in [flow for flow in loose if tightest in flows[flow]]:
            rates[flow] = share
            loose.remove(flow)
            for constraint in flows[flow]:
                left[constraint] -= share
    return rates
