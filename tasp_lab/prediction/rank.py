"""Who wins: simulate the candidates that no bound excludes, say how sure their order is, take one of those that tie.

    found = rank(questions, answer, margin=1.2)                # what has to be simulated
    odds = Odds([each.rival for each in found.answers], "library")
    found.answers[choose(odds.expected_regrets, costs_of)]     # what to take, and `odds` is what being wrong costs

`compare` ranks schedules, `plan` layouts, `search` what it found, and a study its rows in this way; each of them has
only its candidates and its report.

The *expected regret* of a candidate is how much longer than the fastest it is expected to take, over common samples of
the errors of all candidates (`tasp_lab.prediction.paired`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from ctypes import c_double
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.choices import Preference
from tasp_lab.prediction.paired import Rival, Setting, paired_errors

TIE = 0.01
"""Candidates whose expected regret is within this of the least are taken to be equally fast."""

NEAR = 0.02
"""Candidates whose predicted time is within this of the shortest are counted as near it."""

Candidate = TypeVar("Candidate")
Answer = TypeVar("Answer")

# ------------------------------------------------------------------------------------------- what has to be simulated


class Bar:
    """The time that a lower bound must not exceed: `margin` times the least one so far.

    Forked copies of this process share it. If two of them lower it at once, one time may be lost: a candidate is then
    simulated in vain, and excluded by `rank` at the end.
    """

    def __init__(self, margin: float = inf, least_s: float = inf, shared: bool = False) -> None:
        self.margin, self._least = margin, c_double(least_s)
        if shared:
            from multiprocessing.sharedctypes import RawValue  # most rankings have one process

            self._least = RawValue("d", least_s)

    def excludes(self, bound_s: float) -> bool:
        """Whether a candidate with this bound cannot win."""
        return bound_s > self.margin * self._least.value

    @property
    def is_open(self) -> bool:
        """Whether it excludes nothing yet."""
        return self.margin * self._least.value == inf

    def lower(self, time_s: float) -> None:
        """Take the time of another candidate into account."""
        self._least.value = min(self._least.value, time_s)


class Outcome(NamedTuple, Generic[Answer]):
    """What became of a candidate.

    Attributes
    ----------
    answer : what it is.
    time_s : what others are compared with; infinite if they are not, as of a candidate that does not fit.
    bound_s : the lower bound of its time, if that may still exclude it.
    excluded : what it is if so.
    """

    answer: Answer
    time_s: float = inf
    bound_s: float = 0.0
    excluded: Answer | None = None


class Ranked(NamedTuple, Generic[Candidate, Answer]):
    """The answers, those that their bounds exclude, and the candidates without an answer.

    `beyond` are the candidates that a bound excluded before they had an answer, `left` those that were too many. Where
    outcomes have bounds, and all candidates are answered, the order in which they were does not matter.
    """

    answers: list[Answer]
    excluded: list[Answer]
    beyond: list[Candidate]
    left: list[Candidate]


def rank(
    candidates: Iterable[Candidate],
    answer: Callable[[Sequence[Candidate], Bar], Iterable[Outcome[Answer]]],
    *,
    margin: float = inf,
    bound: Callable[[Candidate], float] = lambda _: 0.0,
    order: Callable[[Candidate], Any] | None = None,
    size: int | None = None,
    most: int | None = None,
    least_s: float = inf,
    shared: bool = False,
) -> Ranked[Candidate, Answer]:
    """Answer candidates round by round, as long as bounds leave any.

    Parameters
    ----------
    answer : of the candidates of a round, which it may answer on several processes; with the `Bar` that bounds are
        compared with, for those that are known in a round only.
    margin : a candidate is excluded whose bound is more than this times the least time.
    bound : what is known before a round, in seconds.
    order : a key; the candidates with the least ones are answered first. It is asked again before each round.
    size, most : candidates of a round, and the most that are answered; all by default.
    least_s : the least time that is known already.
    shared : whether `answer` forks.

    >>> def answer(round, bar):
    ...     return [Outcome(name, time_s, bound_s) for name, bound_s, time_s in round]
    >>> rank([("a", 1, 4), ("b", 2, 3), ("c", 4, 5)], answer, margin=1.2).answers
    ['a', 'b']
    """
    bar, outcomes, beyond = Bar(margin, least_s, shared), list[Outcome[Answer]](), list[Candidate]()
    queue = list(candidates)
    while True:
        if not bar.is_open:  # a bound takes time where schedules are large
            beyond += [each for each in queue if bar.excludes(bound(each))]
            queue = [each for each in queue if not bar.excludes(bound(each))]
        count = len(queue) if most is None else most - len(outcomes)
        if not queue or count < 1:
            break
        if order is not None:
            queue.sort(key=order)
        chosen, queue = queue[: min(count, size or count)], queue[min(count, size or count) :]
        for outcome in answer(chosen, bar):
            outcomes.append(outcome)
            bar.lower(outcome.time_s)
    # a bound that came before the least time let a candidate pass that it excludes now
    late = [bar.excludes(each.bound_s) for each in outcomes]
    return Ranked(
        [each.answer for each, excluded in zip(outcomes, late, strict=True) if not excluded],
        [each.excluded or each.answer for each, excluded in zip(outcomes, late, strict=True) if excluded],
        beyond,
        queue,
    )


# ------------------------------------------------------------------------------------------------ how sure the order is


@dataclass(frozen=True, eq=False)
class Odds:
    """What errors of predictions leave open about the order of some rivals.

    Parameters
    ----------
    rivals : the times, the fastest first; behind them `bounds` rivals of which a bound is known alone.
    setting : where they are compared.
    alike : a key of each; rivals with equal ones share all errors. By default none do.
    """

    rivals: Sequence[Rival]
    setting: Setting
    alike: Sequence[Hashable] = ()
    bounds: int = 0

    @cached_property
    def relative(self) -> FloatArray:
        """Times over the least one in each common sample, less one, a float array (draws, rivals)."""
        keys = self.alike or range(len(self.rivals))
        first = {key: number for number, key in reversed([*enumerate(keys)])}
        numbers = sorted(first.values())
        sampled = paired_errors().relative_times([self.rivals[number] for number in numbers], self.setting) - 1
        return sampled[:, [numbers.index(first[key]) for key in keys]]

    @property
    def _count(self) -> int:
        return len(self.rivals) - self.bounds

    @cached_property
    def expected_regrets(self) -> list[float]:
        """The expected regret of each rival that has a time."""
        return [float(regret) for regret in self.relative.mean(axis=0)[: self._count]]

    @cached_property
    def tied(self) -> list[bool]:
        """Whether each of those is in a tie with another one."""
        found = [self.setting != "exact" and tie for tie in ties(self.expected_regrets)]
        return found if sum(found) > 1 else [False] * len(found)

    def regret_beyond(self, near: int, chosen: int) -> float:
        """The expected regret of a rival where none of the first `near` ones is faster."""
        least = self.relative[:, near:].min(axis=1, initial=inf)
        return float(np.maximum((1 + self.relative[:, chosen]) / (1 + least) - 1, 0).mean())

    def measured(self, chosen: int) -> list[tuple[float, int | None]]:
        """The expected regret behind one measurement: of a rival beside the chosen one, or of the network (None)."""
        here = self.relative[:, chosen]
        found: list[tuple[float, int | None]] = [
            (float(np.minimum(here, self.relative[:, number]).mean()), number)
            for number in range(self._count) if number != chosen
        ]  # fmt: skip
        if self.setting != "exact":
            network = paired_errors().network_samples(len(self.rivals))
            groups = np.array_split(np.argsort(network), 16)
            found.append((float(np.mean([self.relative[group].mean(axis=0).min() for group in groups])), None))
        return found


# -------------------------------------------------------------------------------------------------------- what to take


class CostsOf(NamedTuple):
    """What decides between candidates that are expected to be equally fast."""

    buffer_bytes: float
    link_bytes: float
    is_shipped: bool
    time_s: float
    schedule: str


def ties(regrets: Sequence[float]) -> list[bool]:
    """Which regrets are within `TIE` of the least.

    >>> ties([0.002, 0.05, 0.011])
    [True, False, True]
    """
    most = min(regrets) + TIE
    return [regret <= most for regret in regrets]


def choose(regrets: Sequence[float], costs_of: Callable[[int], CostsOf], prefer: Preference = "memory") -> int:
    """The place of the recommended candidate: of those that tie, the preferred one.

    `costs_of` is asked for those alone.

    >>> found = [CostsOf(3, 1, True, 1.0, "a"), CostsOf(2, 2, False, 1.0, "b"), CostsOf(1, 1, True, 2.0, "c")]
    >>> choose([0.0, 0.005, 1.0], found.__getitem__), choose([0.0, 0.005, 1.0], found.__getitem__, "library")
    (1, 0)
    """
    tied = (number for number, tie in enumerate(ties(regrets)) if tie)
    return min(tied, key=lambda number: by_costs(costs_of(number), prefer))


def by_costs(costs: CostsOf, prefer: Preference = "memory") -> tuple[object, ...]:
    """The order in which candidates that tie are preferred, as a key of sorting."""
    keys = {"memory": costs.buffer_bytes, "library": not costs.is_shipped, "bytes": costs.link_bytes}
    first = keys.pop(prefer, costs.time_s)
    return (first, *keys.values(), costs.schedule)
