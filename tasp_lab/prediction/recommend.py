"""Which schedule to take: a decision from a ranking, how sure it is, and what it costs to be wrong.

    found = compare("h100-8", Workload(65536, heads=32, mask="causal"))
    found.recommendation.schedule, found.recommendation.expected_regret

Of the schedules whose expected regret (`tasp_lab.prediction.rank`) is within `TIE` of the least, the recommendation is

1. the one with the fewest buffers,
2. of these one that a library ships,
3. of these that with the least bytes on the busiest link;

`prefer` puts one of these criteria, or the time, first. A question is *decided* if the expected regret of the
recommendation is at most `DECIDED`: one schedule is clearly faster, or several are equally fast. Else it is a *tie* if
only schedules within `NEAR` of the fastest may be faster, or *open*; the recommendation then names what to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import Any, Literal, NamedTuple

from sim.bounds.schedules import busiest_rank_s
from tasp_lab.core.choices import Preference
from tasp_lab.core.units import format_count, format_regret, format_size_about, format_speed, format_time
from tasp_lab.core.workers import deal
from tasp_lab.machines.compute import KernelCompute, with_kernel
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.stack import OWN_STACK, Shipped, Stack, kernels_run, shipping
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.evaluate import Built, answer, build
from tasp_lab.prediction.inputs import with_pairs
from tasp_lab.prediction.interval import DECIDED
from tasp_lab.prediction.kept import keep_of_copy, number_once
from tasp_lab.prediction.paired import Setting, paired_errors, setting_of
from tasp_lab.prediction.question import PreparedMachine
from tasp_lab.prediction.rank import NEAR, CostsOf, Odds, choose
from tasp_lab.schedules.registry import ATTENTION, baselines

SLOWER = (1 / 2, 1 / 4, 1 / 8)
"""Speeds of the network, as shares of the real one, at which the recommendation is checked."""

SHORTER = (1 / 16, 1 / 4)
"""Sequence lengths, as shares of the real one, at which the recommendation is checked, until it holds."""

CHECKED = 3
"""As many rivals are simulated on slower networks, and with other software."""

MOST_TRANSFERS = 40_000
"""Larger schedules are not simulated again on slower networks or for shorter sequences."""

TASP_ACROSS_NODES = (
    "Measure it first: on two nodes of 8 H100 TASP's published gain over Ring Attention is 1.20 to 1.43 on average "
    "(arXiv 2509.26541), 1.90 is predicted, and nothing that is known of its code explains that."
)
"""What is said beside a recommendation of TASP over several nodes."""

RINGS = tuple(name for name in baselines() if name in ATTENTION)
"""The single rings of softmax attention."""

NAMED = 0.02
"""A ring is compared if more channels make it faster by more than this share."""

Verdict = Literal["decided", "tie", "open"]
"""How sure a recommendation is."""


class Otherwise(NamedTuple):
    """The recommendation and the fastest schedule under another condition than the one asked for; times in seconds."""

    condition: str
    time_s: float
    schedule: str
    fastest_s: float

    @property
    def regret(self) -> float:
        """How much longer than the fastest the recommendation takes, as a share."""
        return 0.0 if self.time_s == self.fastest_s else self.time_s / self.fastest_s - 1


@dataclass(frozen=True, eq=False)
class Recommendation:
    """A decision between answers to one question.

    Parameters
    ----------
    answers : those that apply, the fastest first.
    prefer : what decides between schedules that are expected to be equally fast.
    on : the machine of the question, where it is at hand.
    settled : answers that are too far behind by their bounds to be recommended here.
    """

    answers: tuple[Answer, ...]
    prefer: Preference = "memory"
    on: PreparedMachine | None = None
    settled: tuple[Answer, ...] = ()

    @cached_property
    def setting(self) -> Setting:
        """Where the schedules are compared."""
        return setting_of(self.answers[0].on)

    @cached_property
    def odds(self) -> Odds:
        """The order of all schedules. Those that send the same in the same time share all errors.

        With one stage, for example, staged-ulysses is ulysses.
        """
        every = (*self.answers, *self.settled)
        return Odds([each.rival for each in every], self.setting, list(map(_sent, every)), len(self.settled))

    @property
    def expected_regrets(self) -> list[float]:
        """The expected regret of each answer."""
        return self.odds.expected_regrets

    @cached_property
    def number(self) -> int:
        """The place of the recommended answer among the answers."""

        def costs_of(number: int) -> CostsOf:
            one = self.answers[number]
            shipped = bool(self.shipped(one))
            return CostsOf(one.buffer_bytes, one.link_bytes, shipped, float(one.time_s), one.schedule)

        return choose(self.expected_regrets, costs_of, self.prefer)

    @property
    def answer(self) -> Answer:
        """The recommended answer."""
        return self.answers[self.number]

    @property
    def schedule(self) -> str:
        """The recommended schedule."""
        return self.answer.schedule

    @property
    def expected_regret(self) -> float:
        """How much longer than the fastest it is expected to take, as a share."""
        return self.expected_regrets[self.number]

    @property
    def margin(self) -> float:
        """Its predicted time over the shortest one, less one."""
        return float(self.answer.time_s / self.answers[0].time_s) - 1

    @property
    def near(self) -> list[Answer]:
        """The answers whose predicted time is within `NEAR` of the shortest."""
        return [each for each in self.answers if each.time_s <= (1 + NEAR) * self.answers[0].time_s]

    @property
    def regret_beyond_near(self) -> float:
        """The expected regret where none of `near` is faster."""
        return self.odds.regret_beyond(len(self.near), self.number)

    @property
    def overturned(self) -> list[Otherwise]:
        """Where the recommendation loses more than `DECIDED` under what was not asked for."""
        return [each for each in self.otherwise if each.regret > DECIDED]

    @property
    def is_decided(self) -> bool:
        """Whether its expected regret, and the loss under other kernels and hosts (`otherwise`), are small enough."""
        return self.expected_regret <= DECIDED and not self.overturned

    @property
    def verdict(self) -> Verdict:
        """``decided``; else ``tie`` if only schedules near the fastest may be faster, or ``open``."""
        if self.is_decided:
            return "decided"
        ties = self.answer in self.near and self.regret_beyond_near <= DECIDED and not self.overturned
        return "tie" if ties else "open"

    @cached_property
    def to_measure(self) -> tuple[str, float]:
        """The one measurement that would lower the expected regret most, and the expected regret after it.

        Of an open question either a rival beside the recommendation at this size, or the bandwidth of the network.
        """
        found = []
        for after, number in self.odds.measured(self.number):
            rival = "" if number is None else f"{self.schedule} and {self.answers[number].schedule} at this size"
            found.append((after, rival or "the bandwidth that messages between ranks reach"))
        after, best = min(found, default=(self.expected_regret, ""))
        return best, after

    def shipped(self, answer: Answer) -> list[tuple[Stack, Shipped]]:
        """The stacks that ship the schedule of an answer, and how each turns it on; of a named stack that one alone."""
        if not isinstance(answer.question.schedule, str):
            return []
        on, asked = answer.on, answer.options
        found = shipping(answer.schedule, answer.layer, answer.world_size, asked.passes, on.accelerator, asked.groups)
        return [(stack, how) for stack, how in found if on.stack in ("", stack.name)]

    # Robustness: the same question under other conditions, asked about the few schedules that may be faster there.

    def _under(self, condition: str, rivals: Iterable[Answer], time_s: Callable[[Answer, float], float]) -> Otherwise:
        """The recommendation beside rivals, by their times under a condition.

        A time that exceeds the least one so far, the second argument of `time_s`, may be a bound.
        """
        times_s = {self.schedule: time_s(self.answer, inf)}
        for rival in rivals:
            if rival.schedule not in times_s:
                times_s[rival.schedule] = time_s(rival, min(times_s.values()))
        fastest = min(times_s, key=times_s.__getitem__)
        return Otherwise(condition, times_s[self.schedule], fastest, times_s[fastest])

    @cached_property
    def slower(self) -> tuple[float | None, str]:
        """The speed of the network, as a share, down to which the recommendation stays within `DECIDED` of the best.

        And what is faster below it; the share is None where it was not simulated, and 0 where nothing was found down
        to the last of `SLOWER`.
        """
        sends_less = [each for each in (*self.answers, *self.settled) if each.link_bytes < self.answer.link_bytes]
        rivals = sorted(sends_less, key=lambda each: each.rank_s)[:CHECKED]
        if not _are_small(self.answer, *rivals):
            return None, ""
        holds = 1.0
        for share in SLOWER if rivals else ():

            def time_s(one: Answer, _: float, share: float = share) -> float:
                # a network is slower beside its kernels if these are faster
                return _on_s(one, lambda on: replace(on, compute=on.compute.scaled(1 / share))) / share

            found = self._under("", rivals, time_s)
            if found.regret > DECIDED:
                return holds, found.schedule
            holds = share
        return 0.0, ""

    @cached_property
    def shorter(self) -> tuple[int | None, int, str]:
        """The length down to which the recommendation stays within `DECIDED` of its rivals, the next one, and what is
        faster there.

        The rivals are the schedules with the fewest steps and with the fewest bytes on the busiest link: where
        sequences are short, launches and messages decide. The length is None where nothing was simulated, as for
        hybrids, documents and ranges; the last two are 0 and empty where nothing was found to be faster.
        """
        layer = self.answer.layer
        others = [each for each in (*self.answers, *self.settled) if each is not self.answer]
        if not others or layer.kind == "hybrid" or layer.documents or layer.ranges:
            return None, 0, ""
        fewest = min(others, key=lambda each: (each.steps, each.rank_s))
        rivals = fewest, min(others, key=lambda each: each.link_bytes)
        named = all(isinstance(each.question.schedule, str) for each in (self.answer, *rivals))
        if not named or not _are_small(self.answer, *rivals):  # an object is of one length
            return None, 0, ""
        below, faster = 0, ""
        for share in SHORTER:
            length = max(1, int(layer.sequence * share))

            def time_s(one: Answer, _: float, length: int = length) -> float:
                question = replace(one.question, work=one.layer.resized(length))
                return float(answer(question, on=self.on).time_s)  # infinite where it does not apply

            found = self._under("", rivals, time_s)
            if found.regret <= DECIDED:
                return length, below, faster
            below, faster = length, found.schedule
        return layer.sequence, below, faster

    @cached_property
    def otherwise(self) -> tuple[Otherwise, ...]:
        """The recommendation beside what may be faster under what was not asked for, but assumed.

        That is the kernel, unless it or the stack was named: each other one that a stack runs here. And a host model
        that is assumed: a host that takes no time instead.
        """
        built: dict[str, Built] = {}
        return tuple(self._changed(name, change, built) for name, change in self._changes)

    @property
    def _changes(self) -> list[tuple[str, Callable[[Machine], Machine]]]:
        """What was not asked for, but assumed: its name, and the change to something else."""
        machine, layer = self.answer.on, self.answer.layer
        changes: list[tuple[str, Callable[[Machine], Machine]]] = []
        if not _are_small(self.answer) or not isinstance(machine.compute, KernelCompute) or layer.kind != "softmax":
            return changes
        if machine.compute.by_stack and not machine.stack:
            others = [*kernels_run(machine.accelerator, layer)]
            own = machine.compute.kernel.file.kernel
            changes += [(f"--kernel {name}", partial(with_kernel, name=name)) for name in others if name != own]
        if any(source.startswith("assum") for _, source in machine.host.sources):
            changes.append(("a host that takes no time", lambda on: replace(on, host=on.host.with_instant_host())))
        return changes

    def _changed(self, condition: str, change: Callable[[Machine], Machine], built: dict[str, Built]) -> Otherwise:
        """What a change does to the recommendation, and to the few that can be faster then.

        Options that were left open are chosen again, so of rivals that are alike one with a choice is enough. No
        schedule is faster than its busiest rank computes, and few messages become hidden that are exposed now. `built`
        has the schedules of earlier changes.
        """

        machines: dict[int, Machine] = {}  # answers share a few

        def busiest_s(one: Answer) -> float:
            total_s = 0.0
            for each in one.passes:
                at = id(each.machine)
                on = machines[at] = machines[at] if at in machines else change(each.machine)
                busiest = partial(busiest_rank_s, each.schedule, on)
                total_s += number_once("busiest", each.schedule, on, busiest)
            return total_s

        def time_s(one: Answer, below_s: float) -> float:
            if not one.had_choice:
                return _on_s(one, change)
            if one.schedule not in built:
                built[one.schedule] = build(one.question, self.on)
            changed = built[one.schedule].on_changed(change)
            return float(changed.answer().time_s) if changed.least_s < below_s else changed.least_s

        own_s = time_s(self.answer, inf)
        least_s = {each.schedule: busiest_s(each) for each in self.answers}
        rivals = [each for each in self.answers if each is not self.answer and least_s[each.schedule] < own_s]
        rivals.sort(key=lambda each: (least_s[each.schedule] + float(each.exposed_s), not each.had_choice))
        # of those that send the same in the same time, the first stands for all
        alike = {_sent(each): each for each in reversed(rivals)}
        rivals = [each for each in rivals if each is alike[_sent(each)]][:CHECKED]
        rivals = [each for each in rivals if each.passes[0].schedule.transfers <= MOST_TRANSFERS]
        return self._under(
            condition, rivals, lambda one, below_s: own_s if one is self.answer else time_s(one, below_s)
        )

    @cached_property
    def tuned_ring(self) -> TunedRing | None:
        """The recommendation beside a ring with more of NCCL's channels; None where that changes no compared ring."""
        named = [each for each in self.answers if each.question.schedule in RINGS]
        return tuned_ring(self.answer, named) if _are_small(self.answer, *named) else None

    def look_further(self, jobs: int) -> None:
        """Find at once, in this process and copies of it, what changes the recommendation: all of *Robustness*."""
        built: dict[str, Built] = {}
        tasks: list[Callable[[], Any]] = [partial(getattr, self, name) for name in ("shorter", "slower", "tuned_ring")]
        tasks += [partial(self._changed, *each, built) for each in self._changes]
        shared = [self.on, *self.answers, *(each.machine for answer in self.answers for each in answer.passes)]
        shorter, slower, ring, *otherwise = deal(lambda task: task(), tasks, jobs, shared, end=keep_of_copy())
        found = {"otherwise": tuple(otherwise), "shorter": shorter, "slower": slower, "tuned_ring": ring}
        self.__dict__.update(found)  # a cached property of a frozen class

    # In words.

    @property
    def warning(self) -> str | None:
        """What was published against the prediction of the recommended schedule; None for nothing."""
        over_nodes = len({*self.answer.on.topology.node_of_rank}) > 1
        return TASP_ACROSS_NODES if self.schedule == "tasp" and over_nodes else None

    @cached_property
    def why(self) -> str:
        """The reason, in a sentence."""
        chosen, count = self.answer, len(self.near)
        if len(self.answers) == 1:
            return "it is the only one that applies"
        if count == 1:
            ratio = float(self.answers[1].time_s / self.answers[0].time_s)
            return f"it is {format_speed(ratio, f'the next, {self.answers[1].schedule}')}"
        largest = max(self.near, key=lambda each: each.buffer_bytes)
        ahead = "is the fastest" if self.number == 0 else f"is within {max(self.margin, 0.001):.1%} of the fastest"
        tied = f" ({count} schedules are within {NEAR:.0%})" if chosen in self.near else ""
        words = f"it {ahead}{tied}, and needs {format_size_about(chosen.buffer_bytes)} of buffers"
        if largest.buffer_bytes > 1.1 * chosen.buffer_bytes:
            words += f" ({largest.schedule}: {format_size_about(largest.buffer_bytes)})"
        return words

    def lines(self) -> list[str]:
        """The recommendation as lines: what to use and why, how sure that is, what changes it, how to switch it on."""
        found = [f"Use {self.schedule}: {self.why}.", self._sureness()]
        found += [self.warning] if self.warning is not None else []
        for each in self.overturned:
            times = f"{format_time(each.fastest_s)} instead of {format_time(each.time_s)}"
            found.append(f"With {each.condition} use {each.schedule}: {times}.")
        share, rival = self.slower if len(self.answers) > 1 else (None, "")
        if rival and share is not None:
            at = "as it is" if share == 1 else f"at least {share:g} times as fast"
            found.append(f"It holds while the network is {at}; below that {rival} is faster.")
        elif share == 0.0:
            found.append(f"It also holds on a network {1 / SLOWER[-1]:g} times slower.")
        length, below, rival = self.shorter
        if length is not None and rival:
            same = length == self.answer.layer.sequence
            at = "at this length" if same else f"down to {format_count(length)} positions"
            found.append(f"It holds {at}; at {format_count(below)} {rival} is faster.")
        elif length is not None and length > 1:
            found.append(f"It holds down to {format_count(length)} positions.")
        if holds := [each for each in self.otherwise if each not in self.overturned]:
            named = ", ".join(f"{each.condition} ({format_time(each.time_s)})" for each in holds)
            found.append(f"It also holds with {named}.")
        found += [] if self.tuned_ring is None else [self.tuned_ring.line]
        shipped = self.shipped(self.answer)
        found += [f"{stack.library}: {how.text}" for stack, how in shipped]
        asked = self.answer.on.stack
        by_name = isinstance(self.answer.question.schedule, str)
        if by_name and asked in ("", OWN_STACK) and not self.answer.layer.decode:  # which runs in trials alone
            ships = "" if shipped or asked else "No library that is known here ships it. "
            options = self.answer.options
            how = f", options={options.expression}" if options.arguments else ""
            found.append(f'{ships}tasp-lab: runtime.attention(q, k, v, schedule="{self.schedule}"{how})')
        return found

    def _sureness(self) -> str:
        if self.setting == "exact":
            return "Links are ideal, so predicted times are exact."
        regret = format_regret(self.expected_regret)
        if self.verdict == "decided":
            return f"Decided: expected regret {regret}."
        if self.expected_regret <= DECIDED:
            return f"Open: expected regret {regret}, but other software changes the answer."
        what, after = self.to_measure
        if self.verdict == "tie":
            beyond = format_regret(self.regret_beyond_near)
            return (
                f"Tie: which of the {len(self.near)} schedules within {NEAR:.0%} is the fastest is not known. If none "
                f"of them is faster, expected regret {beyond}. Measure {what} to choose."
            )
        errors, own = paired_errors(), self.answer.rival
        others = [each.rival for each in self.answers if each is not self.answer]
        rival = max(others, key=lambda other: errors.first_is_faster(other, own, self.setting))
        low, high = errors.ratio(own, rival, self.setting)
        return (
            f"Open: expected regret {regret}. {self.schedule} takes {low:.2f} to {high:.2f} times as long as "
            f"{rival.schedule}. Measure {what} to lower it to {after:.1%}."
        )

    @property
    def record(self) -> dict[str, object]:
        """The field `recommendation` of ``--json``."""
        share, rival = self.slower
        length, below, faster = self.shorter
        what, after = ("", 0.0) if self.is_decided else self.to_measure
        switches = [
            {"stack": stack.name, "library": stack.library, "version": stack.version}
            | {"text": how.text, "source": how.source}
            for stack, how in self.shipped(self.answer)
        ]
        own = ("why", "prefer", "expected_regret", "margin", "is_decided", "verdict", "warning")
        return {
            "recommended": self.schedule,
            **{name: getattr(self, name) for name in own},
            "near": [each.schedule for each in self.near],
            "network_share": share,
            "below_network_share": rival or None,
            "down_to_sequence": length,
            "shorter_sequence": below or None,
            "faster_at_shorter_sequence": faster or None,
            "otherwise": [each._asdict() for each in self.otherwise],
            "tuned_ring": None if self.tuned_ring is None else self.tuned_ring.record,
            "to_measure": what or None,
            "expected_regret_then": after if what else None,
            "switches": switches,
        }


def _sent(answer: Answer) -> tuple[object, ...]:
    """A key that schedules share which send the same in the same time."""
    return f"{answer.rank_s:.9g}", answer.steps, answer.bytes_sent, answer.link_bytes


def _are_small(*answers: Answer) -> bool:
    """Whether schedules are small enough to be simulated again."""
    return all(each.schedule.transfers <= MOST_TRANSFERS for answer in answers for each in answer.passes)


def _on_s(found: Answer, change: Callable[[Machine], Machine]) -> float:
    """The time of the schedules of an answer on a changed machine."""
    return sum(float(each.on(change(each.machine)).time_s) for each in found.passes)


# A fair ring: what remains of a gain over a ring that has more of NCCL's channels.
#
# In a communicator of all ranks NCCL gives messages to one peer a few of its channels, until they are long
# (`tasp_lab.machines.libraries.channels`). A ring has one peer, so part of what other schedules gain over it may be
# what the library withholds from it. In a communicator per pair of ranks, which isend and irecv of PyTorch use outside
# of a batch, a message has half of all channels at once. Both schedules have it here, and of each the faster time
# counts.


class TunedRing(NamedTuple):
    """A schedule beside the fastest single ring, without and with a communicator per pair of ranks.

    The names are equal if the schedule is that ring. Times are those as the library runs them, tuned ones those with
    pairs where that is faster; a gain is negative if the ring is faster.
    """

    schedule: str
    ring: str
    time_s: float
    ring_s: float
    tuned_time_s: float
    tuned_ring_s: float

    @property
    def gain(self) -> float:
        """How much longer the ring takes than the schedule, as a share."""
        return self.ring_s / self.time_s - 1

    @property
    def remaining(self) -> float:
        """The gain that is left if the ring and the schedule each have a communicator per pair of ranks."""
        return self.tuned_ring_s / self.tuned_time_s - 1

    @property
    def line(self) -> str:
        """In a sentence."""
        changed = f"{self.ring} would take {format_time(self.tuned_ring_s)} instead of {format_time(self.ring_s)}"
        remaining, gain = format_speed(1 + self.remaining, "it"), format_speed(1 + self.gain)
        gains = f": {self.schedule} would be {remaining}, not {gain}"
        return f"With a communicator per pair of ranks {changed}{'' if self.schedule == self.ring else gains}."

    @property
    def record(self) -> dict[str, object]:
        """The object `tuned_ring` of ``--json``."""
        return self._asdict() | {"gain": self.gain, "remaining_gain": self.remaining}


def has_few_channels(machine: Machine) -> bool:
    """Whether the library gives short messages to one peer fewer channels than long ones."""
    library = machine.comm_library
    return machine.system is not None and isinstance(library, ChannelLibrary) and library.rule.least < library.rule.most


def tuned_ring(found: Answer, rings: Sequence[Answer]) -> TunedRing | None:
    """An answer beside the fastest of `rings`; None where more channels change its time by less than `NAMED`."""
    if not rings or not has_few_channels(found.on):
        return None
    ring = min(rings, key=lambda each: each.time_s)
    time_s, ring_s, tuned_s = float(found.time_s), float(ring.time_s), _on_s(ring, with_pairs)
    if ring_s <= (1 + NAMED) * tuned_s:
        return None
    own_s = tuned_s if found.schedule == ring.schedule else min(time_s, _on_s(found, with_pairs))
    return TunedRing(found.schedule, ring.schedule, time_s, ring_s, own_s, tuned_s)
