"""Arguments of the public functions: machines, schedules and sizes, as objects or as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

from tasp_lab.core.arguments import Argument, Option, arguments_of, check_arguments
from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import (
    OverrideError,
    ProfileError,
    QuantityError,
    ScheduleError,
    TopologyError,
    WorkloadError,
    of_type,
    unknown,
)
from tasp_lab.core.units import parse_flops_per_s, parse_size_bytes
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.compute import ASSUMED_COMPUTE, KernelCompute, with_kernel
from tasp_lab.machines.contention import NONE
from tasp_lab.machines.host import HostModel
from tasp_lab.machines.machine import INSTANT, ComputeRate, Machine
from tasp_lab.machines.stack import load_stack, stack_of
from tasp_lab.prediction.settings import AS_IS, MachineSettings
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import AnySchedule, GivenSchedule, as_schedule, built_in, names_in
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.routing import CHOICES
from tasp_lab.workload.layer import Work, Workload
from tasp_lab.workload.models.catalogue import load_model, model_names

MachineLike = Annotated[
    Machine | Topology | str, Option(expected="a machine, a topology, or the name of one", error=TopologyError)
]
"""A machine, a topology (links without a communication library), or the name, file or expression of a machine."""

WorkLike = Annotated[
    Workload | int | str,
    Option(
        expected="an attention layer (a Workload), bytes such as 2**20 or '1MiB', or with a sequence the name of a "
        "model"
    ),
]
"""An attention layer; the name of a model, beside a `sequence`; or the bytes per rank of a collective, a number or text
such as ``"64MiB"``."""

LayerLike = Annotated[
    Workload | str, Option(expected="an attention layer (a Workload), or the name of a model", error=WorkloadError)
]
"""An attention layer; or the name of a model, beside a `sequence`."""

SequenceLike = Annotated[int | str, Option(expected="a whole number, or a text such as '128Ki'", error=WorkloadError)]
"""A number of positions."""

ScheduleNames = str | Callable[..., Any] | Sequence[str | Callable[..., Any]]
"""The name of a schedule or its registered builder, or several."""

Schedules = GivenSchedule | Sequence[GivenSchedule]
"""A schedule, or several: by name, a registered builder, or built for the ranks and the work at hand."""

ComputeLike = Annotated[float | str, Option(expected="a rate in FLOP/s, or a text such as 'timed:300TFLOP/s'")]
"""A compute rate in FLOP/s, as a number or as ``"timed:RATE"``; ``"real"`` where kernels are executed."""

Overrides = Annotated[Sequence[str], Option(expected="a list of texts", error=OverrideError)]
Parts = Annotated[Sequence[str], Option(expected="a list of texts", error=TopologyError)]


def check_call(
    function: Callable[..., object], given: Mapping[str, Any], settings: Mapping[str, Argument] = MappingProxyType({})
) -> None:
    """Check the arguments of a call, ``locals()`` at the start of the function, by its annotations.

    Its own argument `settings`, further keywords, has names and types of the `settings` given here; other names raise
    `ScheduleError`.
    """
    own, others = arguments_of(function), given.get("settings", {})
    check_arguments(given, own)
    for name in others:
        if name not in settings:
            known = [*settings, *(each for each in own if each != "settings")]
            raise ScheduleError(unknown("argument", name, known))
    check_arguments(others, settings)


def as_machine(machine: MachineLike, library: str = "auto") -> Machine:
    """The machine of a text, or one that is given.

    >>> as_machine("h100-8").comm_library.name, as_machine("h100-8", "ideal").comm_library.name
    ('nccl', 'ideal')

    Raises `ProfileError` for a library that contradicts the one of a `Machine`, and what `load_machine` raises.
    """
    if isinstance(machine, str):
        return load_machine(machine, library=library)
    found = Machine(machine) if isinstance(machine, Topology) else machine
    if library not in ("auto", found.comm_library.name):
        raise ProfileError(
            f"library {library!r}: {found.topology.name} was given as an object with the library "
            f"{found.comm_library.name!r}; expected auto, or a machine of load_machine(name, library={library!r})"
        )
    return found


def changed_machine(machine: Machine, overrides: Sequence[str] = (), without: Sequence[str] = ()) -> Machine:
    """The machine with overrides (`tasp_lab.machines.overrides`), without parts of it (`tasp_lab.topology.missing`).

    >>> changed_machine(as_machine("full-mesh:4"), ["link.0-3=10GB/s"], ["gpu.1"]).topology.name
    'full-mesh:4 with link.0-3=10GB/s without gpu.1'
    """
    if overrides:
        from tasp_lab.machines.overrides import overridden

        machine = overridden(machine, overrides)
    return machine.without(without)


def wires(machine: MachineLike) -> Machine:
    """The machine to run on a fabric, which has a library of its own: one given by name has none.

    >>> wires("h100-8").comm_library.name
    'ideal'
    """
    return as_machine(machine, "ideal") if isinstance(machine, str) else as_machine(machine)


def as_work(work: WorkLike, sequence: SequenceLike | None = None) -> Work:
    """The layer, that of a model with a sequence, or the bytes of a collective.

    Raises `QuantityError` for a text that is no size, and for a sequence beside other work than the name of a model;
    `ModelError` for an unknown model.

    >>> as_work("1MiB"), as_work("llama-3-8b", "64Ki").kv_heads
    (1048576, 8)
    """
    if sequence is None:
        if isinstance(work, str) and work in model_names():
            raise QuantityError(f"model {work!r} without a sequence, expected one beside it, such as sequence='128Ki'")
        return parse_size_bytes(work) if isinstance(work, str) else work
    if not isinstance(work, str):
        raise QuantityError(f"sequence {sequence!r} beside {work!r}, expected the name of a model as the work")
    return load_model(work).layer(sequence)


def as_names(schedules: ScheduleNames) -> tuple[str, ...]:
    """The names of schedules; one name may stand alone. Raises `ScheduleError` for anything else.

    >>> as_names("ring"), as_names(["ring", "multi-ring"])
    (('ring',), ('ring', 'multi-ring'))
    """
    found = as_schedules(schedules)
    for schedule in built_in(found):
        raise ScheduleError(f"schedule {schedule.name!r} was given as an object, expected the name of a schedule")
    return tuple(names_in(found))


def as_schedules(schedules: Schedules) -> tuple[AnySchedule, ...]:
    """Schedules by name or built, and registered builders by their names; one may stand alone.

    Raises `ScheduleError` for anything else, and for none.

    >>> as_schedules("ring"), as_schedules(["ring", "multi-ring"])
    (('ring',), ('ring', 'multi-ring'))
    """
    expected = "names of schedules, registered builders, or objects of tasp_lab.schedule.schedule.Schedule"
    if isinstance(schedules, str | Schedule) or callable(schedules):
        return (as_schedule(schedules),)
    if not isinstance(schedules, Iterable):
        raise ScheduleError(of_type("schedules", schedules, expected))
    found = tuple(map(as_schedule, schedules))
    for each in found:
        if not isinstance(each, str | Schedule):
            raise ScheduleError(of_type("schedules", each, expected))
    if not found:
        raise ScheduleError(f"schedules: none, expected {expected}")
    return found


_LIKE = "like timed:300TFLOP/s"


def parse_compute(compute: ComputeLike | None) -> float | Literal["real"] | None:
    """A rate in FLOP/s, ``real``, or None for the default. Raises `QuantityError`.

    >>> parse_compute("timed:2TFLOP/s"), parse_compute(1e12), parse_compute("real"), parse_compute(None)
    (2000000000000.0, 1000000000000.0, 'real', None)
    """
    if compute is None or compute == "real":
        return None if compute is None else "real"
    if not isinstance(compute, str):
        return float(compute)
    kind, _, rate = compute.partition(":")
    if kind != "timed":
        hint = f" did you mean timed:{compute}?" if compute[:1].isdigit() else ""
        raise QuantityError(f"compute {compute!r}:{hint} expected timed:RATE, {_LIKE}, or real")
    return parse_flops_per_s(rate)


def run_by_stack(
    machine: Machine, layer: Workload, schedule: str = "", passes: Pass = "forward", ranks: int | None = None
) -> Machine:
    """The machine as its stack runs a schedule of a layer: with the kernel, and with the host model of the schedule.

    Without a schedule it has the kernel alone, and without a stack that of `stack_of`. `ranks` share the sequence,
    by default all. Raises `ScheduleError` where the stack does not run the schedule, and `ProfileError` where none of
    its kernels is known.
    """
    stack, compute = stack_of(machine.stack, layer), machine.compute
    schedule = schedule if machine.stack else ""
    if schedule and (why := stack.refusal(schedule, layer, ranks or machine.topology.world_size, passes)):
        raise ScheduleError(why)
    if isinstance(compute, KernelCompute) and compute.by_stack:
        kernel = stack.kernel(machine.accelerator, layer)
        if kernel is None and machine.stack:
            where = f"no kernel on {machine.accelerator} is known for {layer.mask} masks and heads of {layer.widths}"
            raise ProfileError(f"stack {machine.stack!r}: {where}, expected a kernel by name beside it")
        if kernel is not None and kernel != compute.kernel:
            machine = replace(machine, compute=replace(compute, kernel=kernel))
    return with_host(machine, stack.host(schedule)) if schedule else machine


def with_host(machine: Machine, host: HostModel) -> Machine:
    """The machine with a host model.

    Ranks that compute at a rate have no memory bandwidth, so passes of the host model take time beside kernels only.
    """
    compute = machine.compute
    compute = replace(compute, passes=host.passes) if isinstance(compute, KernelCompute) else compute
    machine = with_pairs(machine) if host.communicators == "pairs" else machine
    return replace(machine, host=host, compute=compute)


def with_pairs(machine: Machine) -> Machine:
    """The machine whose library has a communicator per pair of ranks, if it has a library with channels."""
    if machine.system is None:
        return machine
    return replace(machine, system=replace(machine.system, in_pairs=True)).rebuilt(machine.parameters)


def chosen_machine(machine: MachineLike, settings: MachineSettings = AS_IS, *, assumes: bool = True) -> Machine:
    """The machine with all that `settings` change, in this order: rate or kernel, overrides, missing parts.

    `assumes` is whether it has `ASSUMED_COMPUTE` where it has no compute rate of its own.

    Raises `QuantityError` for a rate beside a kernel, either of them beside an override by another rate, real kernels,
    and contention of a machine that has no constants of it; `ProfileError` for an unknown stack.
    """
    compute, kernel, overrides = settings.compute, settings.kernel, settings.overrides
    found, rate = as_machine(machine, settings.library), parse_compute(compute)
    if compute is not None and kernel is not None:
        raise QuantityError(f"compute {compute!r} and kernel {kernel!r}, expected one of them")
    if rate == "real":
        raise QuantityError(f"compute 'real': a prediction has no kernels, expected timed:RATE, {_LIKE}")
    found = with_kernel(found if rate is None else replace(found, compute=ComputeRate(rate)), kernel)
    if overrides:
        from tasp_lab.machines.change import COMPUTE
        from tasp_lab.machines.overrides import parse_overrides

        rates = [each for each in parse_overrides(overrides) if each.name == COMPUTE and not each.times]
        if rates and (compute is not None or kernel is not None):
            other = f"compute {compute!r}" if kernel is None else f"kernel {kernel!r}"
            raise QuantityError(f"override {rates[0]} and {other}, expected one of them, or a factor like x0.9")
    found = changed_machine(found, overrides, settings.without)
    if settings.routes is not None:
        found = found.edited(partial(replace, forwarding=CHOICES[settings.routes]))
    found = with_compute(found) if assumes else found
    if settings.contention and not found.contention.slows:
        raise QuantityError(
            f"contention: {found.topology.name} with the library {found.comm_library.name} has no constants of it, "
            "expected a machine of a profile with sms and sms_per_channel, and its own library"
        )
    found = replace(found, contention=NONE) if settings.contention is False else found
    return found if settings.stack is None else replace(found, stack=load_stack(settings.stack).name)


def with_compute(machine: Machine) -> Machine:
    """The machine with `ASSUMED_COMPUTE` where it has no compute rate of its own."""
    return replace(machine, compute=ASSUMED_COMPUTE) if machine.compute == INSTANT else machine


def with_assumptions(machine: Machine, work: Workload) -> Machine:
    """The machine with its compute rates marked as assumed for linear layers, whose kernels have none of their own."""
    if work.kind == "softmax" or (work.kind == "hybrid" and "L" not in work.layers):
        return machine
    what = f"assumed{'' if work.kind == 'linear' else ' of linear layers'}: as softmax attention"
    return replace(machine, compute=machine.compute.as_assumed(what))
