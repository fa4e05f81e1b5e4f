"""Prediction errors of the validation set: measured over predicted times of each machine, by error class.

``python -m experiments.accuracy.residuals`` writes ``residuals.json`` from measured collectives
(`tasp_lab.measure.accuracy`), layers, held-out kernels and published steps; tables that were used to fit a prediction
are left out.
`residual_of` is the distribution of a class.

Errors have two parts: between machines, and between rows of one machine. The first is estimated over a *family* of
classes, because few machines were measured in each: collectives inside domains, between them over documented networks,
over those of clouds, layers with exposed messages, layers without. A family with fewer than `ENOUGH_FREEDOM` degrees
of freedom borrows the missing ones, with their variance, from all machines of the same work and library: the variance
of a single pair of machines can have any value, and Student's t for one degree of freedom multiplies it to 6.3 standard
deviations. The spread is that of a machine that was not measured. Student's t widens the part between machines only,
because few machines do not contradict what many rows show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple

import msgspec

from tasp_lab.machines.machine import Machine, NetworkKind
from tasp_lab.machines.sampling import NORMAL_95
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import AttentionTask

WorkKind = Literal["collective", "layer", "kernel", "eager call", "step"]
Reach = Literal["intra", "inter"]
Size = Literal["small", "middle", "large", "hidden", "exposed", "decode", "any"]
Modelled = Literal["modelled", "ideal"]

SMALL_BYTES, LARGE_BYTES = 2**14, 2**24
"""Messages below the first are small: their times are latencies. Those from the second on are large: their times are
bytes over rates. Between the two, protocols change and channels fill a link by and by."""

HIDDEN_SHARE = 0.1
"""Computing hides the messages of a layer if they add at most this share of its time: it is as long as its kernels."""


@dataclass(frozen=True)
class Regime:
    """What has errors of one kind: the work, whether domains are left, its size, network and library.

    The size is that of messages of collectives (`SMALL_BYTES`, `LARGE_BYTES`); of layers, whether computing hides their
    messages (`HIDDEN_SHARE`), or that they decode, of which none was measured. Whether a network is documented does not
    matter inside a domain, where it is not used, and a layer whose messages are hidden is the same on all networks.
    """

    work: WorkKind
    reach: Reach
    size: Size
    network: NetworkKind
    library: Modelled

    def __str__(self) -> str:
        if self.work in _CALLS:
            return _CALLS[self.work]
        if self.size == "hidden":
            return "layers whose messages are hidden"
        inside = self.reach == "intra"
        where = "inside a domain" if inside else "between domains"
        library = ", links alone" if self.library == "ideal" else ""
        network = "" if inside else f", {self.network} network"
        return f"{self.work}s {where}{_SIZES[self.size]}{network}{library}"


_CALLS: dict[WorkKind, str] = {
    "kernel": "kernels",
    "eager call": "kernels, eager calls timed with their host",
    "step": "whole steps",
}
_SIZES: dict[Size, str] = {
    "any": "",
    "small": ", small messages",
    "middle": ", middle messages",
    "large": ", large messages",
    "hidden": "",
    "exposed": ", exposed messages",
    "decode": ", decoding",
}


class Group(msgspec.Struct, frozen=True):
    """The rows of one machine that one source measured, in one regime.

    `mean` and `variance` are of log(measured / predicted), `constants` is the mean variance of log(predicted) that the
    intervals of constants give, and `step` of collectives the mean square of what it changes by from a size to twice
    that size in one table. `key` names what is left out together: a source, or a provider of clouds.
    """

    regime: Regime
    key: str
    machine: str
    rows: int
    mean: float
    variance: float
    constants: float
    step: float = 0.0


class ResidualFile(msgspec.Struct, frozen=True):
    """The data file."""

    groups: tuple[Group, ...]


@cache
def groups() -> tuple[Group, ...]:
    """All groups of the data file."""
    data = (files("tasp_lab.prediction") / "residuals.json").read_bytes()  # TOML takes 10 ms
    return msgspec.json.decode(data, type=ResidualFile).groups


def regime_of(machine: Machine, schedule: Schedule, time_s: float) -> Regime:
    """The regime of a schedule on a machine that is predicted to take `time_s`.

    >>> from tasp_lab.schedules.build import collective
    >>> from tasp_lab.machines.catalogue import load_machine
    >>> machine = load_machine("h100-2x8")
    >>> str(regime_of(machine, collective("ring", machine.topology, 2**20), 1e-3))
    'collectives between domains, middle messages, documented network'
    """
    if isinstance(schedule.task, AttentionTask) and schedule.task.workload.decode:
        return _regime(machine, "layer", "decode")
    if schedule.task is not None:
        from sim.host import busy_s  # scores and studies need residuals without the simulator

        compute_s = float(max(busy_s(schedule, machine.compute, machine.rank_speeds)))
        return layer_regime(machine, 1 - compute_s / time_s)
    size_bytes = message_bytes(schedule)
    size: Size = "small" if size_bytes < SMALL_BYTES else "middle" if size_bytes < LARGE_BYTES else "large"
    return _regime(machine, "collective", size)


def layer_regime(machine: Machine, exposed_share: float) -> Regime:
    """The regime of a layer on a machine; computing does not hide `exposed_share` of its time."""
    return HIDDEN if exposed_share <= HIDDEN_SHARE else _regime(machine, "layer", "exposed")


def _regime(machine: Machine, work: WorkKind, size: Size) -> Regime:
    ideal = machine.comm_library.is_of_links
    reach: Reach = "inter" if spans_domains(machine) else "intra"
    network: NetworkKind = machine.network if reach == "inter" else "documented"
    return Regime(work, reach, size, network, "ideal" if ideal else "modelled")


HIDDEN = Regime("layer", "intra", "hidden", "documented", "modelled")
"""The regime of layers whose messages are hidden, on whatever links."""

KERNELS = Regime("kernel", "intra", "any", "documented", "modelled")
"""The regime of single kernel calls, timed on the GPU: no link matters."""

EAGER_CALLS = Regime("eager call", "intra", "any", "documented", "modelled")
"""The regime of single kernel calls whose measured times have the host's share in them."""


STEPS = Regime("step", "intra", "any", "documented", "modelled")
"""The regime of whole steps. All that a source published is a machine of theirs; other works lend them nothing."""


def message_bytes(schedule: Schedule) -> float:
    """The mean size of a message: of a collective of a library, of all that a rank sends at a step."""
    messages = schedule.world_size * len(schedule.steps) if schedule.fused else schedule.transfers
    return float(schedule.bytes_by_rank().sum()) / max(messages, 1)


def spans_domains(machine: Machine) -> bool:
    """Whether the ranks of a machine are in several domains, as its library or its nodes say."""
    domain_ranks = getattr(machine.comm_library, "domain_ranks", None)
    if domain_ranks is not None:
        return bool(domain_ranks < machine.topology.world_size)
    topology = machine.topology
    return "network" in topology.switch_kinds.values() or len(set(topology.node_of_rank)) > 1


T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746)
"""95 % points of Student's t by degrees of freedom from 1; with more that of the last."""

ENOUGH_FREEDOM = 4
"""With fewer degrees of freedom a variance is filled up with that of other regimes."""

ASSUMED_VARIANCE = math.log(1.3) ** 2
"""The variance between machines where no two of a kind were measured: an assumption."""


@dataclass(frozen=True)
class Residual:
    """The factor of a regime from predicted to measured times, log-normal.

    Parameters
    ----------
    regime, asked : the regime that was measured, the nearest one to what was asked.
    middle : its median, that of all rows, drawn towards 1 as far as few machines may have it by chance (`_drawn`).
    spread : standard deviation of its logarithm on a new machine, so that 1.645 of it lead to the 5 and 95 % points.
    constants : what of it the intervals of constants explain, a standard deviation.
    own : standard deviation within one machine: what schedules on it do not have in common.
    step : of collectives, by what it differs between a size and twice that size; a standard deviation.
    rows, machines : how many of the account.
    lender : the work and library from all of whose machines a part of the spread is borrowed; empty for none.
    """

    regime: Regime
    middle: float
    spread: float
    constants: float
    own: float
    rows: int
    machines: int
    asked: Regime
    lender: str = ""
    step: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether nothing was measured that it could be of: links that are stated, not machines."""
        return not self.machines

    @property
    def beside(self) -> float:
        """The spread beside samples of constants, which have their part of it."""
        return math.sqrt(max(self.spread**2 - self.constants**2, 0.0))

    @property
    def borrowed(self) -> str:
        """What of it was not measured in the regime that was asked for; empty if nothing."""
        parts = [] if self.regime == self.asked else [f"all of it from {self.regime}: {self.asked} were not measured"]
        parts += [f"a part of the width from all {self.lender}: too few machines like this one"] if self.lender else []
        return "; ".join(parts)


_STATED = Regime("layer", "intra", "exposed", "documented", "ideal")
EXACT = Residual(_STATED, middle=1.0, spread=0.0, constants=0.0, own=0.0, rows=0, machines=0, asked=_STATED)
"""The factor of machines whose links are ideal (`Machine.has_ideal_links`): none."""


class Variance(NamedTuple):
    """A variance and its degrees of freedom."""

    value: float
    freedom: int

    def filled(self, other: float) -> Variance:
        """With the degrees of freedom that it lacks at another variance."""
        lacks = max(ENOUGH_FREEDOM - self.freedom, 0)
        total = self.freedom + lacks
        return Variance((self.freedom * self.value + lacks * other) / total, total)

    @property
    def widening(self) -> float:
        """What Student's t makes of the 95 % point of a normal distribution."""
        return T_95[min(self.freedom, len(T_95)) - 1] / NORMAL_95


@cache
def residual_of(regime: Regime, without: str = "") -> Residual:
    """The residual of a regime, `without` the groups of a source or provider.

    For a regime that was not measured, that of the nearest one. No layers were measured on clouds: there it is the
    wider one of layers on documented networks and collectives on clouds.
    """
    steps = regime.work == "step"
    known = [each for each in groups() if each.key != without and (each.regime.work == "step") == steps]
    found = _nearest(known, regime)
    if regime.work == "layer" and regime.network == "cloud" and found.regime.network != "cloud":
        clouds = [each for each in known if each.regime.network == "cloud"]
        found = max(found, _nearest(clouds, regime), key=lambda each: each.spread)
    return replace(found, asked=regime)


def fit(known: Sequence[Group], regime: Regime) -> Residual:
    """The distribution in a regime that some of these groups are of."""
    own = [each for each in known if each.regime == regime]
    family = between([each for each in known if _family(each.regime) == _family(regime)])
    lent, lender = _lent(known, regime, between, ASSUMED_VARIANCE)
    machines, rows = family.filled(lent), within(own).filled(_lent(known, regime, within, 0.0)[0])
    variance = machines.widening**2 * machines.value * (1 + 1 / len(own)) + rows.value
    return Residual(
        regime,
        middle=math.exp(_drawn(own, machines.value)),
        spread=math.sqrt(variance),
        constants=math.sqrt(_mean([each.constants for each in own])),
        own=math.sqrt(rows.value),
        rows=sum(each.rows for each in own),
        machines=len(own),
        asked=regime,
        lender=lender if family.freedom < ENOUGH_FREEDOM else "",
        step=math.sqrt(sum(each.rows * each.step for each in own) / sum(each.rows for each in own)),
    )


def _drawn(own: Sequence[Group], between_machines: float) -> float:
    """The mean error of all rows, drawn towards 0 by its variance.

    The mean of rows of few machines is partly theirs, not that of the class. (Efron, Morris: Stein's paradox in
    statistics, Scientific American 236, 1977.)
    """
    rows = sum(each.rows for each in own)
    square = (mean := sum(each.rows * each.mean for each in own) / rows) ** 2
    variance = between_machines * sum(each.rows**2 for each in own) / rows**2
    return mean * square / (square + variance) if square else 0.0


def between(family: Sequence[Group]) -> Variance:
    """The variance of machines around the mean of their regime."""
    total, freedom = 0.0, 0
    for regime in dict.fromkeys(each.regime for each in family):
        means = [each.mean for each in family if each.regime == regime]
        total += sum((mean - _mean(means)) ** 2 for mean in means)
        freedom += len(means) - 1
    return Variance(total / max(freedom, 1), freedom)


def within(known: Sequence[Group]) -> Variance:
    """The variance of rows around the mean of their machine."""
    freedom = sum(each.rows - 1 for each in known)
    return Variance(sum(each.rows * each.variance for each in known) / max(freedom, 1), freedom)


def _lent(
    known: Sequence[Group], regime: Regime, variance: Callable[[Sequence[Group]], Variance], default: float
) -> tuple[float, str]:
    """What a regime borrows: the variance of all groups of its work and library, else of its library, else of all."""
    library = "" if regime.library == "modelled" else ", links alone"
    alike = [each for each in known if each.regime.library == regime.library]
    of_work = [each for each in alike if each.regime.work == regime.work]
    lenders = ((of_work, f"{regime.work}s{library}"), (alike, f"work{library}"), (known, "work"))
    for lender, name in lenders:
        if (found := variance(lender)).freedom:
            return found.value, name
    return default, "work"


def _family(regime: Regime) -> tuple[str, ...]:
    """The regimes that share the variance between machines."""
    if regime.work == "layer":
        return regime.work, f"{regime.network} {regime.size}", regime.library
    reach = regime.reach if regime.work == "collective" and regime.network == "documented" else ""
    return regime.work, f"{regime.network} {reach}", regime.library


def _nearest(known: Sequence[Group], regime: Regime) -> Residual:
    """The residual of the nearest regime; of several the widest one."""
    distances = {each: _distance(each, regime) for each in dict.fromkeys(each.regime for each in known)}
    least = min(distances.values())
    return max((fit(known, each) for each in distances if distances[each] == least), key=lambda found: found.spread)


def _distance(one: Regime, other: Regime) -> int:
    """How far two regimes are from each other: what matters most weighs most."""
    weights = {"work": 16, "network": 8, "library": 4, "reach": 2, "size": 1}
    return sum(weight for name, weight in weights.items() if getattr(one, name) != getattr(other, name))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
