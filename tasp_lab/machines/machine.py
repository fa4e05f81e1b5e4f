"""A machine: a topology, its communication library and how fast its ranks compute."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from tasp_lab.core.errors import ProfileError, QuantityError, TopologyError, of_type
from tasp_lab.core.tables import brief
from tasp_lab.core.units import Number
from tasp_lab.machines.constants import WIRES, Kind
from tasp_lab.machines.contention import NONE, Contention
from tasp_lab.machines.host import INSTANT_HOST, HostModel
from tasp_lab.machines.libraries.library import IDEAL as IDEAL
from tasp_lab.machines.libraries.library import CommLibrary as CommLibrary
from tasp_lab.machines.parameters import NO_PARAMETERS, Parameter, Parameters
from tasp_lab.machines.system import Edit, System
from tasp_lab.machines.system import NetworkKind as NetworkKind
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.missing import notes, without
from tasp_lab.workload.kernel_shapes import KernelShape, Passing, ShapeKind
from tasp_lab.workload.layer import Workload


class Compute(Protocol):
    """How long the kernel calls of a rank take; by default of calls of which only FLOPs are known, not how they run."""

    def rate(self, dtype: str, passing: Passing, kind: ShapeKind = "softmax", head_dim: int = 128,
             value_dim: int | None = None) -> ComputeRate:  # fmt: skip
        """A rate that no call of a dtype, a pass, a kind and such heads exceeds, for bounds and reports."""

    def time_s(self, shape: KernelShape) -> Number:
        """The time of one call, alone on its GPU."""
        return self.rate(shape.dtype, shape.passing).flops_time_s(shape.flops)

    def handed_out_s(self, shape: KernelShape) -> Number:
        """The time from the begin of a call until it leaves multiprocessors to other kernels."""
        return self.time_s(shape)

    def parts(self, shape: KernelShape) -> Sequence[tuple[str, Number]]:
        """What the time of a call is spent on: names and seconds, which add up to it."""
        return [("compute", self.time_s(shape))]

    def scaled(self, factor: float) -> Compute:
        """All rates times a factor."""

    def as_assumed(self, what: str) -> Compute:
        """The same, marked as an assumption; `what` begins the sources."""


@dataclass(frozen=True)
class ComputeRate(Compute):
    """A compute rate in FLOP/s, independent of shapes; None if computing takes no time.

    `source` is the origin of the rate, and `assumed` whether it is an assumption. `kernel` names the kernel that has
    this rate at most, and `parameters` are those that tell the time of its calls. `interval`: how far
    the 5 and 95 % points of a kernel's rate are from it, as logarithms; None where only its source tells.
    """

    flops_per_s: Number | None = None
    source: str = "given"
    assumed: bool = False
    kernel: str = ""
    parameters: tuple[Parameter, ...] = ()
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.flops_per_s is not None and not (math.isfinite(self.flops_per_s) and self.flops_per_s > 0):
            raise QuantityError(f"compute rate: {self.flops_per_s} FLOP/s, expected more than 0")

    def flops_time_s(self, flops: int) -> Number:
        """The time of `flops` FLOPs."""
        return 0 if self.flops_per_s is None else flops / self.flops_per_s

    def rate(self, dtype: str, passing: Passing, kind: ShapeKind = "softmax", head_dim: int = 128,
             value_dim: int | None = None) -> ComputeRate:  # fmt: skip
        return self

    def scaled(self, factor: float) -> ComputeRate:
        if self.flops_per_s is None:
            return self
        return replace(self, flops_per_s=self.flops_per_s * factor, source=f"{self.source}, times {factor:.3g}")

    def as_assumed(self, what: str) -> ComputeRate:
        """The rate as an assumption, whose interval is that of its source."""
        source = self.source if self.source.startswith(what) else f"{what} ({self.source})"
        return replace(self, source=source, assumed=True, interval=None)


@dataclass(frozen=True)
class ComputeRates(Compute):
    """Compute rates by dtype and pass, as `tasp_lab.machines.compute` makes them from parameters."""

    rates: Mapping[Kind, ComputeRate]

    def rate(self, dtype: str, passing: Passing, kind: ShapeKind = "softmax", head_dim: int = 128,
             value_dim: int | None = None) -> ComputeRate:  # fmt: skip
        return self.rates[dtype, passing]

    def scaled(self, factor: float) -> ComputeRates:
        return ComputeRates({kind: rate.scaled(factor) for kind, rate in self.rates.items()})

    def as_assumed(self, what: str) -> ComputeRates:
        return ComputeRates({kind: rate.as_assumed(what) for kind, rate in self.rates.items()})


INSTANT = ComputeRate()
"""Computing takes no time, so predictions are those of communication."""


@dataclass(frozen=True, repr=False)
class Machine:
    """A topology, its communication library, how fast its ranks compute, and its parameters with their sources.

    `accelerator` is the name of its GPUs or other accelerators, empty if they are unknown. `contention` is what
    messages take from the kernel calls of a rank, and `host` what layers take on its host. `stack` is the name of the
    software that runs layers (`tasp_lab.machines.stack`), empty if none is named. `network` says whether
    the network between and inside its nodes is documented, or that of a cloud. `system` builds topology and library
    from other numbers; None where they are fixed. `made` are the library and the contention that it made of the
    parameters, of which those of the machine are others where they were put in their place. `rank_speeds` are how many
    times as fast as `compute` each rank computes, empty if all ranks are equal. `changes` are lines about the numbers
    that overrides changed.
    """

    topology: Topology
    comm_library: CommLibrary = IDEAL
    compute: Compute = INSTANT
    summary: str = ""
    parameters: Parameters = NO_PARAMETERS
    accelerator: str = ""
    contention: Contention = NONE
    host: HostModel = INSTANT_HOST
    stack: str = ""
    network: NetworkKind = "documented"
    rank_speeds: tuple[Number, ...] = ()
    system: System | None = field(default=None, compare=False, repr=False)
    made: tuple[CommLibrary, Contention] | None = field(default=None, compare=False, repr=False)
    changes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.topology, Topology):
            raise TopologyError(of_type("topology of a machine", self.topology, "a Topology"))

    def __repr__(self) -> str:
        library = f"library {self.comm_library.name}"
        return brief(self, self.topology.name, f"{self.topology.world_size} ranks", library)

    @property
    def has_accelerators(self) -> bool:
        """Whether its ranks are known GPUs or other accelerators: those of a profile or of a machine file."""
        return not isinstance(self.compute, ComputeRate)

    @property
    def has_ideal_links(self) -> bool:
        """Whether its links are all that is stated: an expression, or a file without library, accelerator and
        constants. No machine was measured beside them, so they are exact.
        """
        stated = self.accelerator or self.parameters or self.system is not None
        return self.comm_library.name == IDEAL.name and not stated

    @property
    def overlaps(self) -> bool:
        """Whether messages run beside kernel calls that become ready at the same time (`HostModel.overlaps`)."""
        return self.host.overlaps and not self.contention.waits

    def handed_out_s(self, shape: KernelShape) -> Number:
        """The time from the begin of a call at the speed of `compute` until it leaves multiprocessors to messages."""
        waits = self.contention.waits
        return waits * self.compute.time_s(shape) if waits else self.compute.handed_out_s(shape)

    def rebuilt(self, parameters: Parameters) -> Machine:
        """The machine that its system makes of these parameters; its ranks compute as before.

        A library, a contention and links that were put in place of those of the system stay, links in proportion to
        their wires. Raises `ProfileError` for a machine without a system, whose parameters are fixed.
        """
        if self.system is None or self.made is None:
            raise ProfileError(f"{self.topology.name}: its constants are fixed, expected a machine of a profile")
        system, before, numbers = self.system, self.parameters.numbers, parameters.numbers
        topology, made = self.topology, (system.comm_library(numbers), system.contention(numbers))
        # a topology is the dearest part; samples by the hundred share the one whose wires they have
        if any(numbers.get(name) != before.get(name) for name in WIRES):
            if replace(system.topology(before), name=topology.name) != topology:
                system = replace(system, links=topology, at=before, edits=())
            topology = replace(system.topology(numbers), name=topology.name)
        return replace(
            self,
            topology=topology,
            comm_library=made[0] if self.comm_library is self.made[0] else self.comm_library,
            parameters=parameters,
            contention=made[1] if self.contention is self.made[1] else self.contention,
            made=made,
        )

    def edited(self, edit: Edit) -> Machine:
        """The machine with an edited topology, so is that of its samples; the library is one for what is left of it."""
        old, topology = self.topology, edit(self.topology)
        if topology.world_size < old.world_size and self.rank_speeds:
            speeds = dict(zip(old.rank_names, self.rank_speeds, strict=True))
            self = replace(self, rank_speeds=tuple(speeds[name] for name in topology.rank_names))
        if self.system is None:
            return replace(self, topology=topology)
        system = replace(self.system, edits=(*self.system.edits, edit))
        if len(topology.links) == len(old.links) and topology.shared == old.shared:
            return replace(self, topology=topology, system=system)
        reshaped = system.reshaped(old, topology)
        found = replace(self, topology=topology, system=reshaped)
        return found if reshaped is system else found.rebuilt(self.parameters)

    def without(self, parts: Sequence[str]) -> Machine:
        """The machine without some of its parts, such as ``nic.3``; see `tasp_lab.topology.missing`.

        Raises `TopologyError` for parts that it does not have, and if ranks become unreachable.
        """
        if not parts:
            return self
        found = self.edited(partial(without, parts=tuple(parts)))
        lines = (f"without {', '.join(parts)}: {line}" for line in notes(self.topology, found.topology))
        return replace(found, changes=(*self.changes, *lines))

    def call_s(self, time_s: Number, rank: int) -> Number:
        """The time of a kernel call of a rank that takes `time_s` at the speed of `compute`."""
        return time_s / self.rank_speeds[rank] if self.rank_speeds else time_s

    def least_compute_s(self, rate: ComputeRate, flops: int) -> Number:
        """The least time in which all ranks together compute so many FLOPs at a rate.

        >>> from fractions import Fraction
        >>> from tasp_lab.topology.builders import full_mesh
        >>> slow = Machine(full_mesh(2), rank_speeds=(Fraction(1), Fraction(1, 2)))
        >>> slow.least_compute_s(ComputeRate(Fraction(10)), 30)
        Fraction(2, 1)
        """
        if not self.rank_speeds:
            return rate.flops_time_s(-(-flops // self.topology.world_size))
        return rate.flops_time_s(flops) / sum(self.rank_speeds)

    def rate_of(self, layer: Workload, passing: Passing) -> ComputeRate:
        """A rate that no call of a pass of a layer exceeds; of a hybrid the fastest of its kinds."""
        kinds: Mapping[str, ShapeKind] = {"L": "linear", "S": "softmax"}
        found: list[ShapeKind] = ["dense"] if layer.kind == "hybrid" else [layer.kind]
        found += [kinds[letter] for letter in layer.layers]
        heads = layer.head_dim, layer.value_dim
        rates = [self.compute.rate(layer.dtype, passing, kind, *heads) for kind in dict.fromkeys(found)]
        most = fastest(rates)  # assumed if one of the others is
        assumed = dict.fromkeys(rate.source for rate in rates if rate.assumed and rate.source != most.source)
        return replace(most, source="; ".join([*assumed, most.source]), assumed=True) if assumed else most


def fastest(rates: Iterable[ComputeRate]) -> ComputeRate:
    """The fastest of some rates, the first of equal ones."""
    return max(rates, key=lambda rate: math.inf if rate.flops_per_s is None else rate.flops_per_s)
