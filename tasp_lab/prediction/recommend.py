"""Which schedule to take: a decision from a ranking, how sure it is, and what it costs to be wrong.

The *expected regret* of a schedule is how much longer than the fastest it is expected to take, over common samples of
the errors of all schedules (`tasp_lab.prediction.paired`). Of the schedules whose expected regret is within `TIE` of
the least, the recommendation is

1. the one with the fewest buffers,
2. of these one that a library ships,
3. of these that with the least bytes on the busiest link;

`prefer` puts one of these criteria, or the time, first. A question is *decided* if the expected regret of the
recommendation is at most `DECIDED`: one schedule is clearly faster, or several are equally fast. Else it is a *tie* if
only schedules within `NEAR` of the fastest may be faster, or *open*; the recommendation then names what to measure::

    found = compare("h100-8", Workload(65536, heads=32, mask="causal"))
    found.recommendation.schedule, found.recommendation.expected_regret
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from sim.host import busy_s
from sim.simulate import engine_of, simulate
from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.choices import Preference
from tasp_lab.core.units import format_count, format_regret, format_size_about, format_speed, format_time
from tasp_lab.core.workers import deal
from tasp_lab.machines.compute import KernelCompute, with_kernel
from tasp_lab.machines.libraries.channels import ChannelLibrary
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.stack import OWN_STACK, Shipped, Stack, kernels_run, shipping
from tasp_lab.prediction.answer import Answer, Built, answer, build
from tasp_lab.prediction.inputs import with_pairs
from tasp_lab.prediction.interval import DECIDED
from tasp_lab.prediction.paired import PairedErrors, Rival, Setting, paired_errors, setting_of
from tasp_lab.prediction.question import PreparedMachine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.registry import ATTENTION, baselines

TIE = 0.01
"""Schedules whose expected regret is within this of the least are taken to be equally fast."""

NEAR = 0.02
"""Schedules whose predicted time is within this of the shortest are counted as near it."""

SLOWER = (1 / 2, 1 / 4, 1 / 8)
"""Speeds of the network, as shares of the real one, at which the recommendation is checked."""

CHECKED = 3
"""As many rivals are simulated on slower networks: those that send least."""

MOST_TRANSFERS = 40_000
"""Larger schedules are not simulated again on slower networks or for shorter sequences."""

SHORTER = (1 / 16, 1 / 4)
"""Sequence lengths, as shares of the real one, at which the recommendation is checked, until it holds."""


TASP_ACROSS_NODES = (
    "Measure it first: on two nodes of 8 H100 TASP's published gain over Ring Attention is 1.20 to 1.43 on average "
    "(arXiv 2509.26541), 1.90 is predicted, and nothing that is known of its code explains that."
)
"""What is said beside a recommendation of TASP over several nodes."""

Verdict = Literal["decided", "tie", "open"]
"""How sure a recommendation is."""


class CostsOf(NamedTuple):
    """What decides between schedules that are expected to be equally fast."""

    buffer_bytes: float
    link_bytes: float
    is_shipped: bool
    time_s: float
    schedule: str


def choose(expected_regrets: Sequence[float], costs_of: Callable[[int], CostsOf], prefer: Preference = "memory") -> int:
    """The place of the recommended schedule: of those within `TIE` of the least expected regret, the preferred one.

    `costs_of` is asked for those alone.

    >>> found = [CostsOf(3, 1, True, 1.0, "a"), CostsOf(2, 2, False, 1.0, "b"), CostsOf(1, 1, True, 2.0, "c")]
    >>> choose([0.0, 0.005, 1.0], found.__getitem__), choose([0.0, 0.005, 1.0], found.__getitem__, "library")
    (1, 0)
    """
    least = min(expected_regrets)
    tied = (number for number, regret in enumerate(expected_regrets) if regret <= least + TIE)
    return min(tied, key=lambda number: by_costs(costs_of(number), prefer))


def by_costs(costs: CostsOf, prefer: Preference = "memory") -> tuple[object, ...]:
    """The order in which tied schedules are preferred, as a key of sorting."""
    keys = {"memory": costs.buffer_bytes, "library": not costs.is_shipped, "bytes": costs.link_bytes}
    first = keys.pop(prefer, costs.time_s)
    return (first, *keys.values(), costs.schedule)


class Otherwise(NamedTuple):
    """The recommendation and the fastest schedule under another kernel, or another host; times in seconds."""

    condition: str
    time_s: float
    schedule: str
    fastest_s: float

    @property
    def regret(self) -> float:
        """How much longer than the fastest the recommendation takes, as a share."""
        return self.time_s / self.fastest_s - 1


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
        return setting_of(self.answers[0].passes[0].machine)

    @cached_property
    def _errors(self) -> PairedErrors:
        return paired_errors()

    @cached_property
    def _relative(self) -> FloatArray:
        """Times over the least one in each common sample, less one, a float array (draws, answers).

        Schedules that send the same in the same time share all errors: with one stage, staged-ulysses is ulysses.
        """
        answers = (*self.answers, *self.settled)
        sent = [_sent(each) for each in answers]
        first = list(dict.fromkeys(sent))
        rivals = [self._rivals[sent.index(key)] for key in first]
        relative = self._errors.relative_times(rivals, self.setting) - 1
        return relative[:, [first.index(key) for key in sent]]

    @cached_property
    def _rivals(self) -> list[Rival]:
        return [each.rival for each in (*self.answers, *self.settled)]

    @cached_property
    def expected_regrets(self) -> list[float]:
        """The expected regret of each answer."""
        return [float(each) for each in self._relative.mean(axis=0)[: len(self.answers)]]

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
    def is_decided(self) -> bool:
        """Whether that is at most `DECIDED`, and the loss under other kernels and hosts, too (`otherwise`)."""
        return self.expected_regret <= DECIDED and not self.overturned

    @property
    def overturned(self) -> list[Otherwise]:
        """Where the recommendation loses more than `DECIDED` under what was not asked for."""
        return [each for each in self.otherwise if each.regret > DECIDED]

    @cached_property
    def verdict(self) -> Verdict:
        """``decided``; else ``tie`` if only schedules near the fastest may be faster, or ``open``."""
        if self.is_decided:
            return "decided"
        ties = self.answer in self.near and self.regret_beyond_near <= DECIDED and not self.overturned
        return "tie" if ties else "open"

    @cached_property
    def regret_beyond_near(self) -> float:
        """The expected regret where none of `near` is faster."""
        beyond = np.delete(self._relative, range(len(self.near)), axis=1)
        least = beyond.min(axis=1, initial=np.inf)
        return float(np.maximum((1 + self._relative[:, self.number]) / (1 + least) - 1, 0).mean())

    @cached_property
    def tied(self) -> list[bool]:
        """Whether each answer is in a tie with another: their expected regrets are within `TIE` of the least."""
        most = min(self.expected_regrets) + TIE
        found = [regret <= most and self.setting != "exact" for regret in self.expected_regrets]
        return found if sum(found) > 1 else [False] * len(found)

    @property
    def margin(self) -> float:
        """Its predicted time over the shortest one, less one."""
        return float(self.answer.time_s / self.answers[0].time_s) - 1

    @property
    def near(self) -> list[Answer]:
        """The answers whose predicted time is within `NEAR` of the shortest."""
        return [each for each in self.answers if each.time_s <= (1 + NEAR) * self.answers[0].time_s]

    def shipped(self, answer: Answer) -> list[tuple[Stack, Shipped]]:
        """The stacks that ship the schedule of an answer, and how each turns it on; of a named stack that one alone."""
        if not isinstance(answer.question.schedule, str):
            return []
        on, asked = answer.passes[0].machine, answer.options
        found = shipping(answer.schedule, answer.layer, answer.world_size, asked.passes, on.accelerator, asked.groups)
        return [(stack, how) for stack, how in found if on.stack in ("", stack.name)]

    # Robustness.

    @cached_property
    def slower(self) -> tuple[float | None, str]:
        """The speed of the network, as a share, down to which the recommendation stays within `DECIDED` of the best.

        And what is faster below it; the share is None where it was not simulated, and 0 where nothing was found down
        to the last of `SLOWER`. Slowing the network is simulated as speeding up the kernels.
        """
        sends_less = [each for each in (*self.answers, *self.settled) if each.link_bytes < self.answer.link_bytes]
        rivals = sorted(sends_less, key=lambda each: each.rank_s)[:CHECKED]
        passes = [each for answer in (self.answer, *rivals) for each in answer.passes]
        if any(each.schedule.transfers > MOST_TRANSFERS for each in passes):
            return None, ""
        holds = 1.0
        for share in SLOWER:
            own_s = _time_s(self.answer, share)
            times = {each.schedule: _time_s(each, share) for each in rivals}
            fastest = min(times, key=lambda name: times[name], default="")
            if fastest and own_s > (1 + DECIDED) * times[fastest]:
                return holds, fastest
            holds = share
        return 0.0, ""

    @cached_property
    def shorter(self) -> tuple[int | None, int, str]:
        """The length down to which the recommendation stays within `DECIDED` of its rivals, the next one, and what is
        faster there.

        The rivals are the schedules with the fewest steps and with the fewest bytes on the busiest link: where
        sequences are short, launches and messages decide. The length is None where nothing was simulated, as for
        hybrids and documents; the last two are 0 and empty where nothing was found to be faster.
        """
        layer = self.answer.layer
        others = [each for each in (*self.answers, *self.settled) if each is not self.answer]
        if not others or layer.kind == "hybrid" or layer.documents is not None:
            return None, 0, ""
        fewest = min(others, key=lambda each: (each.steps, each.rank_s))
        compared = {
            each.schedule: each for each in (self.answer, fewest, min(others, key=lambda each: each.link_bytes))
        }
        for each in compared.values():
            too_large = any(passed.schedule.transfers > MOST_TRANSFERS for passed in each.passes)
            if too_large or not isinstance(each.question.schedule, str):  # an object is of one length
                return None, 0, ""
        below, faster = 0, ""
        for share in SHORTER:
            length = max(1, int(layer.sequence * share))
            times_s = {name: self._time_s_at(each, length) for name, each in compared.items()}
            fastest = min(times_s, key=lambda name: times_s[name])
            if times_s[self.schedule] <= (1 + DECIDED) * times_s[fastest]:
                return length, below, faster
            below, faster = length, fastest
        return layer.sequence, below, faster

    def _time_s_at(self, known: Answer, sequence: int) -> float:
        """The time of a schedule for another sequence length; infinite where it does not apply."""
        shorter = replace(known.question, work=replace(known.layer, sequence=sequence))
        return float(answer(shorter, on=self.on).time_s)

    @cached_property
    def otherwise(self) -> tuple[Otherwise, ...]:
        """The recommendation beside what may be faster under what was not asked for, but assumed.

        That is the kernel, unless it or the stack was named: each other one that a stack runs here. And a host model
        that is assumed: a host that takes no time instead.
        """
        built: dict[str, Built] = {}
        return tuple(self._under(name, change, built) for name, change in self._changes)

    @property
    def _changes(self) -> list[tuple[str, Callable[[Machine], Machine]]]:
        """What was not asked for, but assumed: its name, and the change to something else."""
        machine, layer = self.answer.passes[0].machine, self.answer.layer
        changes: list[tuple[str, Callable[[Machine], Machine]]] = []
        large = any(each.schedule.transfers > MOST_TRANSFERS for each in self.answer.passes)
        if large or not isinstance(machine.compute, KernelCompute) or layer.kind != "softmax":
            return changes
        if machine.compute.by_stack and not machine.stack:
            for name in kernels_run(machine.accelerator, layer):
                if name != machine.compute.kernel.file.kernel:
                    changes.append((f"--kernel {name}", partial(with_kernel, name=name)))
        if any(source.startswith("assum") for _, source in machine.host.sources):
            changes.append(("a host that takes no time", _with_instant_host))
        return changes

    def look_further(self, jobs: int) -> None:
        """Find at once, in this process and copies of it, what changes the recommendation: all of *Robustness*."""
        built: dict[str, Built] = {}
        tasks: list[Callable[[], Any]] = [partial(getattr, self, name) for name in ("shorter", "slower", "tuned_ring")]
        tasks += [partial(self._under, *each, built) for each in self._changes]
        shared = [self.on, *self.answers, *(each.machine for answer in self.answers for each in answer.passes)]
        shorter, slower, ring, *otherwise = deal(lambda task: task(), tasks, jobs, shared)
        found = {"otherwise": tuple(otherwise), "shorter": shorter, "slower": slower, "tuned_ring": ring}
        self.__dict__.update(found)  # a cached property of a frozen class

    def _under(self, condition: str, change: Callable[[Machine], Machine], built: dict[str, Built]) -> Otherwise:
        """What a change does to the recommendation, and to the few that can be faster then.

        Options that were left open are chosen again, so of rivals that are alike one with a choice is enough. No
        schedule is faster than its busiest rank computes, and few messages become hidden that are exposed now. `built`
        has the schedules of earlier changes.
        """

        def busiest_s(found: Answer) -> float:
            calls = (
                busy_s(each.schedule, change(each.machine).compute, each.machine.rank_speeds) for each in found.passes
            )
            return sum(float(max(times_s)) for times_s in calls)

        def time_s(found: Answer, below_s: float = float("inf")) -> float:
            """The time; a bound where that is not below `below_s`."""
            if not found.had_choice:
                return sum(simulated_s(found, each.schedule, change(each.machine)) for each in found.passes)
            if found.schedule not in built:
                built[found.schedule] = build(found.question, self.on)
            changed = built[found.schedule].on_changed(change)
            return float(changed.answer().time_s) if changed.least_s < below_s else changed.least_s

        least_s = {each.schedule: busiest_s(each) for each in self.answers}
        own_s = time_s(self.answer)
        rivals = [each for each in self.answers if each is not self.answer and least_s[each.schedule] < own_s]
        rivals.sort(key=lambda each: (least_s[each.schedule] + float(each.exposed_s), not each.had_choice))
        alike = {_sent(each): each for each in reversed(rivals)}
        times_s = {self.schedule: own_s}
        for each in [each for each in rivals if each is alike[_sent(each)]][:CHECKED]:
            if each.passes[0].schedule.transfers <= MOST_TRANSFERS:
                times_s[each.schedule] = time_s(each, min(times_s.values()))
        fastest = min(times_s, key=lambda name: times_s[name])
        return Otherwise(condition, own_s, fastest, times_s[fastest])

    @cached_property
    def tuned_ring(self) -> TunedRing | None:
        """The recommendation beside a ring with more of NCCL's channels; None where that changes no compared ring."""
        named = [each for each in self.answers if each.question.schedule in RINGS]
        small = all(
            passed.schedule.transfers <= MOST_TRANSFERS for each in (self.answer, *named) for passed in each.passes
        )
        return tuned_ring(self.answer, named) if small else None

    # What to measure.

    @cached_property
    def to_measure(self) -> tuple[str, float]:
        """The one measurement that would lower the expected regret most, and the expected regret after it.

        Of an open question either a rival beside the recommendation at this size, or the bandwidth of the network.
        """
        relative, here = self._relative, self.number
        options: list[tuple[float, str]] = []
        for number, other in enumerate(self.answers):
            if number != here:
                after = float(np.minimum(relative[:, here], relative[:, number]).mean())
                options.append((after, f"{self.schedule} and {other.schedule} at this size"))
        if self.setting != "exact":
            network = self._errors.network_samples(len(self._rivals))
            groups = np.array_split(np.argsort(network), 16)
            after = float(np.mean([relative[group].mean(axis=0).min() for group in groups]))
            options.append((after, "the bandwidth that messages between ranks reach"))
        if not options:
            return "", self.expected_regret
        after, what = min(options)
        return what, after

    # In words.

    @property
    def warning(self) -> str | None:
        """What was published against the prediction of the recommended schedule; None for nothing."""
        over_nodes = len({*self.answer.passes[0].machine.topology.node_of_rank}) > 1
        return TASP_ACROSS_NODES if self.schedule == "tasp" and over_nodes else None

    @cached_property
    def why(self) -> str:
        """The reason, in a sentence."""
        chosen, count = self.answer, len(self.near)
        if len(self.answers) == 1:
            return "it is the only one that applies"
        if count == 1:
            second = self.answers[1]
            ratio = float(second.time_s / self.answers[0].time_s)
            return f"it is {format_speed(ratio, f'the next, {second.schedule}')}"
        largest = max(self.near, key=lambda each: each.buffer_bytes)
        ahead = "is the fastest" if self.number == 0 else f"is within {max(self.margin, 0.001):.1%} of the fastest"
        tied = f" ({count} schedules are within {NEAR:.0%})" if chosen in self.near else ""
        words = f"it {ahead}{tied}, and needs {format_size_about(chosen.buffer_bytes)} of buffers"
        if largest.buffer_bytes > 1.1 * chosen.buffer_bytes:
            words += f" ({largest.schedule}: {format_size_about(largest.buffer_bytes)})"
        return words

    def lines(self) -> list[str]:
        """The recommendation as lines: what to use and why, how sure that is, what changes it, how to switch it on."""
        found = [f"Use {self.schedule}: {self.why}."]
        found.append(self._sureness())
        if self.warning is not None:
            found.append(self.warning)
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
            at = (
                "at this length"
                if length == self.answer.layer.sequence
                else f"down to {format_count(length)} positions"
            )
            found.append(f"It holds {at}; at {format_count(below)} {rival} is faster.")
        elif length is not None and length > 1:
            found.append(f"It holds down to {format_count(length)} positions.")
        if holds := [each for each in self.otherwise if each not in self.overturned]:
            named = ", ".join(f"{each.condition} ({format_time(each.time_s)})" for each in holds)
            found.append(f"It also holds with {named}.")
        found += [] if self.tuned_ring is None else [self.tuned_ring.line]
        shipped = self.shipped(self.answer)
        found += [f"{stack.library}: {how.text}" for stack, how in shipped]
        asked = self.answer.passes[0].machine.stack
        if isinstance(self.answer.question.schedule, str) and asked in ("", OWN_STACK):
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
        rival = max((each for each in self.answers if each is not self.answer), key=self._chance)
        low, high = self._errors.ratio(self.answer.rival, rival.rival, self.setting)
        return (
            f"Open: expected regret {regret}. {self.schedule} takes {low:.2f} to {high:.2f} times as long as "
            f"{rival.schedule}. Measure {what} to lower it to {after:.1%}."
        )

    def _chance(self, rival: Answer) -> float:
        return self._errors.first_is_faster(rival.rival, self.answer.rival, self.setting)

    def to_dict(self) -> dict[str, object]:
        """The field `recommendation` of ``--json``."""
        share, rival = self.slower
        length, below, faster = self.shorter
        what, after = self.to_measure
        return {
            "recommended": self.schedule,
            "why": self.why,
            "prefer": self.prefer,
            "expected_regret": self.expected_regret,
            "margin": self.margin,
            "is_decided": self.is_decided,
            "verdict": self.verdict,
            "warning": self.warning,
            "near": [each.schedule for each in self.near],
            "network_share": share,
            "below_network_share": rival or None,
            "down_to_sequence": length,
            "shorter_sequence": below or None,
            "faster_at_shorter_sequence": faster or None,
            "otherwise": [each._asdict() for each in self.otherwise],
            "tuned_ring": None if self.tuned_ring is None else self.tuned_ring.to_dict(),
            "to_measure": None if self.is_decided or not what else what,
            "expected_regret_then": None if self.is_decided or not what else after,
            "switches": [
                {"stack": stack.name, "library": stack.library, "version": stack.version}
                | {"text": how.text, "source": how.source}
                for stack, how in self.shipped(self.answer)
            ],
        }


def _sent(answer: Answer) -> tuple[object, ...]:
    """A key that schedules share which send the same in the same time."""
    return f"{answer.rank_s:.9g}", answer.steps, answer.bytes_sent, answer.link_bytes


def _with_instant_host(machine: Machine) -> Machine:
    return replace(machine, host=machine.host.with_instant_host())


def _time_s(answer: Answer, share: float) -> float:
    """The time on a network that is `share` times as fast: as of kernels sped up instead, over `share`."""
    total_s = 0.0
    for each in answer.passes:
        machine = replace(each.machine, compute=each.machine.compute.scaled(1 / share))
        total_s += simulated_s(answer, each.schedule, machine) / share
    return total_s


NAMED = 0.02
"""A ring is compared if more channels make it faster by more than this share."""

RINGS = tuple(name for name in baselines() if name in ATTENTION)
"""The single rings of softmax attention."""


# A fair ring: what remains of a gain over a ring that has more of NCCL's channels.
#
# In a communicator of all ranks NCCL gives messages to one peer a few of its channels, until they are long
# (`tasp_lab.machines.libraries.channels`). A ring has one peer, so part of what other schedules gain over it may be
# what the library withholds from it. In a communicator per pair of ranks, which isend and irecv of PyTorch use outside
# of a batch, a message has half of all channels at once. Both schedules have it here, and of each the faster time
# counts.


@dataclass(frozen=True)
class TunedRing:
    """A schedule beside the fastest single ring, without and with a communicator per pair of ranks.

    Parameters
    ----------
    schedule, ring : their names, which are equal if the schedule is that ring.
    time_s, ring_s : their times as the library runs them.
    tuned_time_s, tuned_ring_s : with pairs where that is faster.
    """

    schedule: str
    ring: str
    time_s: float
    ring_s: float
    tuned_time_s: float
    tuned_ring_s: float

    @property
    def gain(self) -> float:
        """How much longer the ring takes than the schedule, as a share; negative if the ring is faster."""
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

    def to_dict(self) -> dict[str, object]:
        """The object `tuned_ring` of ``--json``."""
        return {**vars(self), "gain": self.gain, "remaining_gain": self.remaining}


def has_few_channels(machine: Machine) -> bool:
    """Whether the library gives short messages to one peer fewer channels than long ones."""
    library = machine.comm_library
    return machine.system is not None and isinstance(library, ChannelLibrary) and library.rule.least < library.rule.most


def tuned_ring(found: Answer, rings: Sequence[Answer]) -> TunedRing | None:
    """An answer beside the fastest of `rings`; None where more channels change its time by less than `NAMED`."""
    rings = [each for each in rings if each.applies]
    if not rings or not has_few_channels(found.passes[0].machine):
        return None
    ring = min(rings, key=lambda each: each.time_s)
    time_s, ring_s, tuned_s = float(found.time_s), float(ring.time_s), _in_pairs_s(ring)
    if ring_s <= (1 + NAMED) * tuned_s:
        return None
    own_s = tuned_s if found.schedule == ring.schedule else min(time_s, _in_pairs_s(found))
    return TunedRing(found.schedule, ring.schedule, time_s, ring_s, own_s, tuned_s)


def _in_pairs_s(found: Answer) -> float:
    """The time of the same schedules with a communicator per pair of ranks."""
    return sum(simulated_s(found, each.schedule, with_pairs(each.machine)) for each in found.passes)


def simulated_s(found: Answer, schedule: Schedule, machine: Machine) -> float:
    """The time of a schedule of an answer on another machine, by the engine of its question."""
    engine = engine_of(schedule, machine, found.question.engine)
    return float(simulate(schedule, machine, engine, events=False).time_s)
