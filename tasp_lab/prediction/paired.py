"""How sure the order of two predicted times on one machine is, and what it costs to take the wrong one.

Schedules on one machine share most of what a prediction is wrong about: the kernel, the clock, the links. Only the rest
decides which of them is faster. ``paired_errors.toml`` has how large that rest is, fitted to ratios of times that were
measured on one machine (`python -m experiments.accuracy.paired`)::

    variance of log(measured ratio / predicted ratio)
        = own**2 + the mean of both schedules' family**2, or layout**2, if the families differ
          + (exposed * difference of exposed shares)**2 + (steps * log ratio of steps)**2

- *own*: two schedules behave differently.
- *family*: those that one builder makes share most of what sets them apart from others: the kinds of messages and calls
  (`tasp_lab.schedules.registry.family_of`). So a tie of many members of few families has few independent errors.
- *layout*: takes the place of *family* for a schedule whose kernel calls or host nobody measured: no measured layer ran
  that family with that kernel, or none of that stack did (`layouts_of`). It is the error of a family of a stack that
  the fit has not seen.
- *exposed*: an error of the network is shared, but counts only in the share of the time that computing does not hide.
- *steps*: what each step costs beside its calls and messages is shared too; schedules have different numbers of them.

All but *layout* are multiplied by a factor where links alone are modelled, without a communication library: kernels and
hosts do not depend on links. Errors have the tails of Student's t. Where links are ideal, times are exact.

All comparisons of a ranking use common samples: `expected_regrets` draws the errors of all schedules together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.choices import Pass
from tasp_lab.machines.compute import KernelCompute
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.interval import EQUAL
from tasp_lab.schedules.registry import family_of

Setting = Literal["exact", "library", "links alone"]
"""How schedules are compared: on ideal links, with a model of the communication library, or by links alone.

The last is for machines without a library model, and for nodes on PCIe, which such rows were measured on.
"""

FREEDOM = 4
"""Degrees of freedom of the errors' Student's t: few sources were measured, and some of their rows are far off."""

SURE = 0.995
"""The probability that a schedule is slower than the fastest one, from which on it need not be simulated."""

DRAWS = 4096
"""Common samples of the errors of all schedules; the least expected regret is then known to about a tenth of itself."""


class Rival(NamedTuple):
    """What the comparison needs of a prediction.

    Attributes
    ----------
    schedule : its name.
    time_s : the predicted time.
    exposed_share : the share of it that computing does not hide.
    steps : of the schedules of all passes.
    measured : whether layers with its kernel calls and host were measured (`PairedErrors.has_measured`).
    """

    schedule: str
    time_s: float
    exposed_share: float
    steps: float = 1
    measured: bool = True

    @classmethod
    def of(cls, schedule: str, time_s: float, exposed_s: float, steps: float = 1, measured: bool = True) -> Rival:
        """The rival that takes `time_s`, of which computing does not hide `exposed_s`; both in seconds."""
        return cls(schedule, time_s, min(1.0, max(0.0, exposed_s / time_s)), max(steps, 1), measured)


class PairedErrors(msgspec.Struct, frozen=True):
    """The errors of ratios of predicted times, see the module.

    Attributes
    ----------
    own, family, layout, exposed, steps : standard deviations of logarithms.
    links_alone : the factor of all of them but `layout` without a model of the communication library.
    pairs, sources : how many they were fitted to.
    layouts : those that were measured, see `layouts_of`.
    """

    own: float
    family: float
    exposed: float
    steps: float
    links_alone: float
    pairs: int
    sources: int
    layout: float = 0.0
    layouts: tuple[str, ...] = ()

    def has_measured(self, layouts: Iterable[str]) -> bool:
        """Whether all these layouts were measured."""
        return set(layouts) <= set(self.layouts)

    def family_scale(self, measured: bool, setting: Setting) -> float:
        """The standard deviation of what a family does: times the square root of 2, as it counts in a ratio."""
        scale = self.factor(setting) * self.family
        return scale if measured or setting == "exact" else max(scale, self.layout)

    def factor(self, setting: Setting) -> float:
        """What the standard deviations are multiplied by; 0 where times are exact."""
        return {"exact": 0.0, "links alone": self.links_alone}.get(setting, 1.0)

    def spread(self, first: Rival, second: Rival, setting: Setting) -> float:
        """The scale of the error of the logarithm of a ratio of times."""
        # a schedule beside itself: the same schedule that takes the same time
        own = 0.0 if first[:2] == second[:2] else self.own
        # an error of each of two has half the variance of an error of their ratio
        one, two = (self.family_scale(each.measured, setting) for each in (first, second))
        alike = family_of(first.schedule) == family_of(second.schedule)
        family = (one - two if alike else math.hypot(one, two)) / math.sqrt(2)
        exposed = self.exposed * (first.exposed_share - second.exposed_share)
        steps = self.steps * math.log(first.steps / second.steps)
        return math.hypot(self.factor(setting) * math.hypot(own, exposed, steps), family)

    def first_is_faster(self, first: Rival, second: Rival, setting: Setting) -> float:
        """The probability that the first one takes less time, 0 to 1."""
        ahead, spread = math.log(second.time_s / first.time_s), self.spread(first, second, setting)
        if abs(ahead) < EQUAL:
            return 0.5
        return below_t(ahead / spread) if spread else float(ahead > 0)

    def ratio(self, first: Rival, second: Rival, setting: Setting, share: float = 0.95) -> tuple[float, float]:
        """The ends of the interval of first over second, 1 - `share` to `share`."""
        centre, reach = math.log(first.time_s / second.time_s), quantile_t(share) * self.spread(first, second, setting)
        return math.exp(centre - reach), math.exp(centre + reach)

    def margin(self, setting: Setting, measured: bool = False) -> float:
        """How many times as long a predicted time is that belongs to the slower schedule with probability `SURE`.

        Of two families, one of which hides all messages and the other one none: their errors differ most. Neither was
        measured, unless `measured`.
        """
        family = self.family_scale(measured, setting)
        return math.exp(
            quantile_t(SURE) * math.hypot(self.factor(setting) * math.hypot(self.own, self.exposed), family)
        )

    def expected_regrets(self, rivals: Sequence[Rival], setting: Setting) -> FloatArray:
        """How much longer than the fastest each one is expected to take, a float array (rivals,).

        >>> errors = PairedErrors(0.05, 0.05, 0.3, 0.1, 4.0, pairs=0, sources=0)
        >>> errors.expected_regrets([Rival("tasp", 1.0, 0.0), Rival("ulysses", 1.5, 0.0)], "exact").tolist()
        [0.0, 0.5]
        """
        regrets: FloatArray = self.relative_times(rivals, setting).mean(axis=0) - 1
        return regrets

    def relative_times(self, rivals: Sequence[Rival], setting: Setting) -> FloatArray:
        """The time of each one over the least time, in each common sample: a float array (draws, rivals)."""
        log_times, factor = np.log([each.time_s for each in rivals]), self.factor(setting)
        shares, steps = (np.array([each[place] for each in rivals]) for place in (2, 3))
        own_draws, family_draws, network, step = _normal(len(rivals))
        own = factor * self.own * own_draws[:, _places([each[:2] for each in rivals])]
        scales = np.array([self.family_scale(each.measured, setting) for each in rivals])
        family = scales * family_draws[:, _places([family_of(each.schedule) for each in rivals])]
        # an error of each of two has half the variance of an error of their ratio
        logs = log_times + (own + family) / math.sqrt(2)
        logs += factor * (self.exposed * network[:, None] * shares + self.steps * step[:, None] * np.log(steps))
        relative: FloatArray = np.exp(logs - logs.min(axis=1, keepdims=True))
        return relative

    def network_samples(self, rivals: int) -> FloatArray:
        """The error of the network in each common sample of so many rivals, a float array (draws,)."""
        return _normal(rivals)[2]


class _File(msgspec.Struct, frozen=True):
    """The data file: fitted to all sources, and without each of them."""

    all: PairedErrors
    without: dict[str, PairedErrors]


@cache
def _file() -> _File:
    data = (files("tasp_lab.prediction") / "paired_errors.toml").read_bytes()
    return msgspec.toml.decode(data, type=_File)


def paired_errors(without: str = "") -> PairedErrors:
    """The errors fitted to all sources but one; a source that is not among them leaves out nothing."""
    return _file().without.get(without, _file().all)


def paired_document(everything: PairedErrors, without: dict[str, PairedErrors]) -> bytes:
    """The text of the data file."""
    return msgspec.toml.encode(_File(everything, without))


def layouts_of(schedule: str, kernel: str, passes: Pass, stack: str = "") -> list[str]:
    """What the kernel calls and the host of a schedule are named by, for each pass; without a stack, any host.

    >>> layouts_of("usp:4x2", "flash-attention-3", "both", "megatron")
    ['megatron flash-attention-3 usp forward', 'megatron flash-attention-3 usp backward']
    """
    passing = ("forward", "backward") if passes == "both" else (passes,)
    return [" ".join(filter(None, (stack, kernel, family_of(schedule), each))) for each in passing]


def is_measured(schedule: str, machine: Machine, passes: Pass) -> bool:
    """Whether layers with the kernel calls and the host that a schedule has on a machine were measured."""
    kernel = machine.compute.kernel.name if isinstance(machine.compute, KernelCompute) else ""
    return paired_errors().has_measured(layouts_of(schedule, kernel, passes, machine.stack))


def setting_of(machine: Machine) -> Setting:
    """Where the schedules of a machine are compared."""
    if machine.has_ideal_links:
        return "exact"
    if machine.comm_library.is_of_links or "pcie" in machine.topology.switch_kinds.values():
        return "links alone"
    return "library"


def below_t(value: float) -> float:
    """The probability that Student's t with `FREEDOM` degrees is below a value.

    >>> round(below_t(2.132), 3), below_t(0.0)
    (0.95, 0.5)
    """
    # the closed form for four degrees of freedom: scipy takes longer to import than all comparisons take
    share = value / math.sqrt(value * value + 4)
    return 0.5 + 0.75 * share * (1 - share * share / 3)


def quantile_t(share: float) -> float:
    """The value below which Student's t with `FREEDOM` degrees is with a probability.

    >>> round(quantile_t(0.95), 3)
    2.132
    """
    alpha = 4 * share * (1 - share)
    root = math.sqrt(alpha)
    size = 2 * math.sqrt(max(math.cos(math.acos(root) / 3) / root - 1, 0.0))
    return math.copysign(size, share - 0.5)


@cache
def _normal(rivals: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Common samples with the tails of Student's t, float arrays.

    Of each rival and of each family, (draws, rivals); of the network and of steps, (draws,).
    """
    generator = np.random.default_rng(0)  # one seed: a ranking has the same regrets each time
    # cut at three standard deviations per unit: the mean of the exponential of Student's t is infinite
    tails = np.minimum(np.sqrt(FREEDOM / generator.chisquare(FREEDOM, DRAWS)), 3)
    network, step = generator.standard_normal((2, DRAWS)) * tails
    own, family = generator.standard_normal((2, DRAWS, rivals)) * tails[:, None]
    return own, family, network, step


def _places(keys: Sequence[object]) -> list[int]:
    """The number of each key, equal ones having the same: what they share is drawn once."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
