"""Prediction errors of the validation set: measured over predicted times of each machine, by error class.

``python -m experiments.accuracy.residuals`` writes ``residuals.toml`` from measured collectives
(`tasp_lab.measure.accuracy`), layers and held-out kernels; tables that were used to fit a prediction are left out.
`tasp_lab.prediction.residual_fit` fits distributions to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from tasp_lab.machines.machine import Machine, NetworkKind
from tasp_lab.schedule.schedule import Schedule

WorkKind = Literal["collective", "layer", "kernel", "eager call"]
Reach = Literal["intra", "inter"]
Size = Literal["small", "large", "short", "long", "any"]
Modelled = Literal["modelled", "ideal"]

LARGE_BYTES = 16 * 2**20
"""Messages below this size are small: their times depend on latencies and on how channels fill a link."""

SHORT_S = 0.02
"""Layers predicted to take less are short: launches, waits and last waves, which vary most, are much of their time."""


@dataclass(frozen=True)
class Regime:
    """What has errors of one kind: the work, whether domains are left, its size, network and library.

    The size is that of messages of collectives (`LARGE_BYTES`) and the duration of layers (`SHORT_S`).
    """

    work: WorkKind
    reach: Reach
    size: Size
    network: NetworkKind
    library: Modelled

    def __str__(self) -> str:
        if self.work in _CALLS:
            return _CALLS[self.work]
        where = "inside a domain" if self.reach == "intra" else "between domains"
        library = ", links alone" if self.library == "ideal" else ""
        return f"{self.work}s {where}{_SIZES[self.size]}, {self.network} network{library}"


_CALLS: dict[WorkKind, str] = {"kernel": "kernels", "eager call": "kernels, eager calls timed with their host"}
_SIZES: dict[Size, str] = {
    "any": "",
    "small": ", small messages",
    "large": ", large messages",
    "short": f", shorter than {1e3 * SHORT_S:.0f} ms",
    "long": f", {1e3 * SHORT_S:.0f} ms or longer",
}


class Group(msgspec.Struct, frozen=True):
    """The rows of one machine that one source measured, in one regime.

    `mean` and `variance` are of log(measured / predicted), `constants` is the mean variance of log(predicted) that the
    intervals of constants give. `key` names what is left out together: a source, or a provider of clouds.
    """

    regime: Regime
    key: str
    machine: str
    rows: int
    mean: float
    variance: float
    constants: float


class ResidualFile(msgspec.Struct, frozen=True):
    """The data file."""

    groups: tuple[Group, ...]


@cache
def groups() -> tuple[Group, ...]:
    """All groups of the data file."""
    data = (files("tasp_lab.prediction") / "residuals.toml").read_bytes()
    return msgspec.toml.decode(data, type=ResidualFile).groups


def regime_of(machine: Machine, schedule: Schedule, time_s: float) -> Regime:
    """The regime of a schedule on a machine that is predicted to take `time_s`; of a stack, that of its mean layer.

    >>> from tasp_lab.schedules.build import collective
    >>> from tasp_lab.machines.catalogue import load_machine
    >>> machine = load_machine("h100-2x8")
    >>> str(regime_of(machine, collective("ring", machine.topology, 2**20), 1e-3))
    'collectives between domains, small messages, documented network'
    """
    if schedule.task is not None:
        from tasp_lab.schedule.stacked_task import StackedTask  # collectives have none

        layers = len(schedule.task.layers) if isinstance(schedule.task, StackedTask) else 1
        return layer_regime(machine, time_s / layers)
    return _regime(machine, "collective", "large" if message_bytes(schedule) >= LARGE_BYTES else "small")


def layer_regime(machine: Machine, time_s: float) -> Regime:
    """The regime of a layer on a machine that is predicted to take `time_s`."""
    return _regime(machine, "layer", "short" if time_s < SHORT_S else "long")


def _regime(machine: Machine, work: WorkKind, size: Size) -> Regime:
    ideal = machine.comm_library.name in ("ideal", "measured")
    reach: Reach = "inter" if spans_domains(machine) else "intra"
    return Regime(work, reach, size, machine.network, "ideal" if ideal else "modelled")


KERNELS = Regime("kernel", "intra", "any", "documented", "modelled")
"""The regime of single kernel calls, timed on the GPU: no link matters."""

EAGER_CALLS = Regime("eager call", "intra", "any", "documented", "modelled")
"""The regime of single kernel calls whose measured times have the host's share in them."""


def message_bytes(schedule: Schedule) -> float:
    """The mean size of a message: of a collective of a library, that over all its channels."""
    lanes = schedule.lanes if schedule.fused else 1
    return float(schedule.bytes_sent().sum()) / max(schedule.transfers, 1) * lanes


def spans_domains(machine: Machine) -> bool:
    """Whether the ranks of a machine are in several domains, as its library or its nodes say."""
    domain_ranks = getattr(machine.comm_library, "domain_ranks", None)
    if domain_ranks is not None:
        return bool(domain_ranks < machine.topology.world_size)
    topology = machine.topology
    return "network" in topology.switch_kinds.values() or len(set(topology.node_of_rank)) > 1
