"""Why one schedule takes longer than another: their times in parts that add up, pass by pass.

    compare("mi300x-8", layer, passes="both").explain("tasp")

The calls of the busiest rank are the mean work of all ranks at the full speed of the kernel, what that rank has above
the mean, what its calls lose beside full speed, and its merges. What is left of the time is host times and contention,
found by simulating without them, and exposed messages. Parts are subtracted in this order: contention, then the host,
then messages. Waiting for other ranks counts as exposed messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from sim.bounds.schedules import busiest_link_bytes, least_of_messages_s
from tasp_lab.core.choices import Pass
from tasp_lab.core.lazy import from_above
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part, Table
from tasp_lab.core.units import format_size_about, format_time
from tasp_lab.machines.compute import MERGE, PARTS
from tasp_lab.machines.contention import NONE
from tasp_lab.machines.machine import INSTANT
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.captions import TILES_AND_WAVES
from tasp_lab.prediction.passes import PassAnswer
from tasp_lab.schedule.dependencies import shapes_by_rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORK, WAVES = PARTS["rate_s"], PARTS["waves_s"]

LEAST_SHARE = 0.01
"""Smaller parts of a difference are added up as others."""

SAME = 0.001
"""Times that differ by a smaller share are the same: there is nothing to explain."""

ROUNDING = 1e-9
"""Smaller shares of a time are 0: a timeline adds up floats in another order."""


class TimeOfPass(NamedTuple):
    """The parts of the time of a pass in seconds.

    `work_s` is the mean of the ranks at the full speed of the kernel, `imbalance_s` what the busiest rank has above it,
    `calls_s` what its calls lose: launches, tiles and waves, power, memory, and small kernels of the library's kernel.
    """

    work_s: float
    imbalance_s: float
    calls_s: float
    merges_s: float
    messages_s: float
    contention_s: float
    host_s: float


TITLES = TimeOfPass._make([
    "work at full speed", "imbalance of ranks", "lost in calls", "merges and casts", "exposed messages", "contention",
    "host",
])  # fmt: skip


@dataclass(frozen=True, eq=False)
class PassExplanation:
    """Where the time of one pass goes. Seconds and bytes; `calls`, `queries` and `keys` are of the busiest rank.

    Parameters
    ----------
    schedule, passing, time_s, parts : the parts add up to the time.
    compute_s : all calls of the busiest rank: its first four parts.
    work_share : the work of the busiest rank over the mean.
    lost_s : `calls_s` by cause.
    calls, queries, keys : how many kernel calls, and their mean queries and keys.
    communication_s, bandwidth_s : the messages without calls, contention and host times; and what their bytes take at
        least on the busiest link or lane.
    steps, bytes_per_rank, link_bytes : of the pass, of the busiest rank, and of the busiest link.
    """

    schedule: str
    passing: Pass
    time_s: float
    parts: TimeOfPass
    compute_s: float
    work_share: float
    lost_s: dict[str, float]
    calls: int
    queries: int
    keys: int
    communication_s: float
    bandwidth_s: float
    steps: int
    bytes_per_rank: int
    link_bytes: int

    @classmethod
    def of(cls, schedule: str, found: PassAnswer) -> PassExplanation:
        machine, time_s, busy_s = found.machine, float(found.time_s), found.busy_s
        busiest, ranks = max(range(len(busy_s)), key=lambda rank: busy_s[rank]), shapes_by_rank(found.schedule)
        shapes = dict.fromkeys(shape for rank in ranks for shape in rank)
        of_call = {shape: dict(machine.compute.parts(shape)) for shape in shapes}

        def rank_s(rank: int, part: str) -> float:
            seconds = sum(count * of_call[shape].get(part, 0) for shape, count in ranks[rank].items())
            return float(machine.call_s(seconds, rank))

        own_s = rank_s(busiest, WORK)
        work_s = sum(rank_s(rank, WORK) for rank in range(len(ranks))) / len(ranks)
        lost_s = {part: lost for part in PARTS.values() if part != WORK and (lost := rank_s(busiest, part))}
        compute_s, merges_s = float(busy_s[busiest]), rank_s(busiest, MERGE)
        free_s = time_s - float(found.contention_s or 0)
        quiet = replace(machine, contention=NONE, host=machine.host.with_instant_host())
        quiet_s = free_s if machine.host.is_instant else float(found.on(quiet).time_s)
        parts = (work_s, own_s - work_s, sum(lost_s.values()), merges_s, quiet_s - compute_s, time_s - free_s,
                 free_s - quiet_s)  # fmt: skip
        # equal ranks differ by rounding
        parts = TimeOfPass._make(each if abs(each) > ROUNDING * time_s else 0.0 for each in parts)
        # matrix products between layers of a hybrid have no queries
        calls = {shape: count for shape, count in ranks[busiest].items() if shape.kind != "dense"}
        number = sum(calls.values())
        return cls(
            schedule, found.passing, time_s, parts, compute_s, own_s / work_s if work_s else 1.0, lost_s, number,
            round(sum(count * shape.queries for shape, count in calls.items()) / max(number, 1)),
            round(sum(count * shape.keys for shape, count in calls.items()) / max(number, 1)),
            float(found.on(replace(quiet, compute=INSTANT)).time_s),
            least_of_messages_s(found.schedule, machine), len(found.schedule.steps), int(found.bytes_sent.max()),
            busiest_link_bytes([found.link_bytes], machine.topology),
        )  # fmt: skip

    @property
    def shapes(self) -> str:
        """The calls of the busiest rank, such as ``64 of 1024 x 512``."""
        return f"{self.calls} of {self.queries} x {self.keys}"

    @property
    def record(self) -> dict[str, object]:
        """The object of ``--json``."""
        return {**asdict(self), "parts": self.parts._asdict()}


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Report):
    """A schedule beside the recommended one; that beside the fastest of the others, or alone if no other applies."""

    recommended: Answer
    other: Answer | None
    schedule: str
    """The one that was asked for."""

    @cached_property
    def passes(self) -> tuple[tuple[PassExplanation, ...], ...]:
        """For each pass the recommended schedule, and the other one."""
        sides = [self.recommended] if self.other is None else [self.recommended, self.other]
        parts = [[PassExplanation.of(side.schedule, found) for found in side.passes] for side in sides]
        return tuple(zip(*parts, strict=True))

    @property
    def difference_s(self) -> float:
        """The time of the other schedule less that of the recommended one."""
        return 0.0 if self.other is None else float(self.other.time_s - self.recommended.time_s)

    def lines(self) -> list[str]:
        """Which is slower, by how much, and the parts of the difference in words, the largest first."""
        first = self.recommended.schedule
        if self.other is None:
            return [f"{first} is the recommended schedule, and the only one that applies."]
        found = []
        if self.schedule == first:
            found.append(f"{first} is the recommended schedule; the fastest of the others is {self.other.schedule}.")
        total_s = abs(self.difference_s)
        if total_s <= SAME * float(self.recommended.time_s):
            time = format_time(self.recommended.time_s)
            return [*found, f"{first} takes {time}, {self.other.schedule} the same within {SAME:.1%}."]
        pairs = self.passes if self.difference_s > 0 else tuple(pair[::-1] for pair in self.passes)  # the faster first
        (fast, slow), *_ = pairs
        of_passes = " and ".join(f"{_signed(b.time_s - a.time_s)} {b.passing}" for a, b in pairs)
        times = [format_time(sum(pair[side].time_s for pair in pairs)) for side in (1, 0)]
        found.append(f"{slow.schedule} takes {times[0]}, {format_time(total_s)} more than {fast.schedule} ({times[1]})"
                     f"{f': {of_passes}' if len(pairs) > 1 else ''}.")  # fmt: skip
        parts = [(b.parts[kind] - a.parts[kind], kind, a, b) for a, b in pairs for kind in range(len(TITLES))]
        (seconds, kind, *sides), *rest = sorted(parts, key=lambda part: -part[0])
        share = seconds / total_s
        most = "Most of it" if 0.5 < share <= 1 else "The largest part"
        found.append(f"{most}, {format_time(seconds)} ({share:.0%}): {_in_words(kind, *sides)}.")
        large = [part for part in rest if abs(part[0]) >= LEAST_SHARE * total_s]
        others_s = total_s - seconds - sum(part[0] for part in large)
        named = [f"{_signed(part[0])} {TITLES[part[1]]}{f' {part[3].passing}' if len(pairs) > 1 else ''}"
                 for part in sorted(large, key=lambda part: -abs(part[0]))]  # fmt: skip
        named += [f"{_signed(others_s)} others"] if abs(others_s) >= LEAST_SHARE * total_s else []
        return [*found, f"The rest: {'; '.join(named)}."] if named else found

    def parts(self) -> list[Part]:
        found: list[Part] = [*self.lines(), *map(_table, self.passes)]
        if any(WAVES in each.lost_s for pair in self.passes for each in pair):
            found.append(TILES_AND_WAVES)
        return [*found, "The rows under a time add up to it. Exposed messages are what is left, so waiting for other "
                        "ranks counts there."]  # fmt: skip

    def records(self) -> list[dict[str, object]]:
        """A row per pass and schedule."""
        return [each.record for pair in self.passes for each in pair]

    def to_dict(self) -> dict[str, object]:
        """The field `explained` of ``--json``."""
        return {
            "schedule": self.schedule,
            "recommended": self.recommended.schedule,
            "beside": None if self.other is None else self.other.schedule,
            "difference_s": self.difference_s,
            "lines": self.lines(),
            "passes": self.records(),
        }

    def plot(self) -> Figure:
        """The timelines of the two schedules, one above the other, on one time axis; passes one after the other."""
        shown = [self.recommended] if self.other is None else [self.recommended, self.other]
        # a ranking keeps times alone
        detailed = [
            replace(each, passes=tuple(replace(one, detail="events") for one in each.passes)).timeline for each in shown
        ]
        title = f"{' and '.join(each.schedule for each in shown)} on {self.recommended.topology}"
        figure: Figure = from_above("draw timelines")(detailed, title, one_axis=True)
        return figure


def _in_words(kind: int, fast: PassExplanation, slow: PassExplanation) -> str:
    """Why one part of the slower schedule takes longer."""
    part, a, b = TimeOfPass._fields[kind], fast.parts[kind], slow.parts[kind]
    if part == "work_s":
        times = f"takes {format_time(b)}, that of {fast.schedule} {format_time(a)}"
        return f"the {slow.passing} work of {slow.schedule} at full speed {times}"
    if part == "imbalance_s":
        return (
            f"in the {slow.passing} pass the busiest rank of {slow.schedule} has {slow.work_share - 1:.0%} more work "
            f"than the mean of the ranks, that of {fast.schedule} {fast.work_share - 1:.0%}"
        )
    if part == "calls_s":
        lost = max(slow.lost_s, key=lambda cause: slow.lost_s[cause] - fast.lost_s.get(cause, 0))
        more_s = slow.lost_s[lost] - fast.lost_s.get(lost, 0)
        like = "short" if slow.calls > fast.calls else "less efficient"
        return (
            f"{slow.passing} calls of {slow.schedule} are {like}: {slow.shapes} (queries x keys) take "
            f"{format_time(slow.compute_s)} where {fast.shapes} take {format_time(fast.compute_s)}; "
            f"{format_time(more_s)} more are {lost}"
        )
    if part == "messages_s":
        return _messages_in_words(fast, slow)
    subject, verb = {
        "merges_s": ("merges and casts of", "take"),
        "contention_s": ("messages in flight slow the calls of", "by"),
        "host_s": ("waiting for the hosts of", "takes"),
    }[part]
    costs = f"{subject} {slow.schedule} {verb} {format_time(b)}, those of {fast.schedule} {format_time(a)}"
    return f"in the {slow.passing} pass {costs}"


def _messages_in_words(fast: PassExplanation, slow: PassExplanation) -> str:
    """Why more time of messages is exposed: more bytes, more steps, or fewer calls beside them."""
    exposed_s = slow.parts.messages_s - fast.parts.messages_s
    longer_s = slow.communication_s - fast.communication_s
    alone = [format_time(each.communication_s) for each in (slow, fast)]
    subject = f"{slow.passing} messages of {slow.schedule}"
    if longer_s < exposed_s / 2:
        shares = [f"{each.parts.messages_s / each.communication_s if each.communication_s else 0:.0%}"
                  for each in (slow, fast)]  # fmt: skip
        return (
            f"{subject} hide less behind calls: {shares[0]} of the {alone[0]} that they take alone are exposed, of "
            f"{fast.schedule} {shares[1]} of {alone[1]}"
        )
    if slow.bandwidth_s - fast.bandwidth_s >= longer_s / 2:
        sizes = [format_size_about(each.link_bytes) for each in (slow, fast)]
        return (
            f"{subject} have more bytes for one link or lane: they take {format_time(slow.bandwidth_s)} there "
            f"({sizes[0]} on the busiest link) where {fast.schedule} takes {format_time(fast.bandwidth_s)} ({sizes[1]})"
        )
    return (
        f"{subject} wait for each other: alone they take {alone[0]} in {slow.steps} steps where {fast.schedule} takes "
        f"{alone[1]} in {fast.steps}"
    )


def _table(sides: Sequence[PassExplanation]) -> Table:
    """The numbers of a pass, a column for each schedule, and one for the difference of times."""

    def of_times(title: str, times_s: Sequence[float]) -> tuple[str, ...]:
        change = (_signed(times_s[1] - times_s[0], 3),) if len(sides) > 1 else ()
        return (title, *(format_time(each) if each else "-" for each in times_s), *change)

    def of_texts(title: str, texts: Sequence[object]) -> tuple[str, ...]:
        return (title, *map(str, texts), *([""] if len(sides) > 1 else []))

    rows = [of_times("time", [each.time_s for each in sides])]
    for kind, title in enumerate(TITLES):
        if any(times_s := [each.parts[kind] for each in sides]):
            rows.append(of_times(f"  {title}", times_s))
    rows.append(of_times("calls of busiest rank", [each.compute_s for each in sides]))
    rows.append(of_texts("  number", [each.calls for each in sides]))
    rows.append(of_texts("  mean queries x keys", [f"{each.queries} x {each.keys}" for each in sides]))
    for cause in dict.fromkeys(cause for each in sides for cause in each.lost_s):
        rows.append(of_times(f"  {cause}", [each.lost_s.get(cause, 0.0) for each in sides]))
    rows += [
        of_times("messages alone", [each.communication_s for each in sides]),
        of_times("  their bytes, at least", [each.bandwidth_s for each in sides]),
        of_texts("  steps", [each.steps for each in sides]),
        of_texts("  sent by busiest rank", [format_size_about(each.bytes_per_rank) for each in sides]),
        of_texts("  busiest link", [format_size_about(each.link_bytes) for each in sides]),
    ]
    columns = ("", *(each.schedule for each in sides), *(["difference"] if len(sides) > 1 else []))
    # where names are long, the last column stands in a wide table alone
    return Table(f"where the time of the {sides[0].passing} pass goes", columns, rows, order=range(len(columns)))


def _signed(seconds: float, digits: int = 4) -> str:
    """A time with its sign; femtoseconds are rounding.

    >>> _signed(-0.25), _signed(1e-19)
    ('-250 ms', '0 s')
    """
    rounded_s = round(seconds, 15)
    return f"{'+' if rounded_s > 0 else ''}{format_time(rounded_s, digits)}"
