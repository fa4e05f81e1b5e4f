"""Overrides of how fast ranks compute: ``compute.rate`` for all kernel calls, and the constants of compute rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tasp_lab.core.errors import OverrideError
from tasp_lab.machines.compute_rates import ASSUMED_COMPUTE, COMPUTE_RATES, compute_of
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.kernel_compute import KernelCompute
from tasp_lab.machines.machine import INSTANT, ComputeRate, ComputeRates, Constant, Machine
from tasp_lab.machines.overrides.names import COMPUTE
from tasp_lab.machines.overrides.override import Override

_QUANTITY = CONSTANTS["compute_rate"].quantity


def rate_constants(machine: Machine) -> list[str]:
    """The constants of compute rates that a machine has and uses; a kernel has constants of its own for 16 bit."""
    names = [each.name for each in machine.constants if each.name in COMPUTE_RATES]
    if isinstance(machine.compute, KernelCompute):
        return [name for name in names if COMPUTE_RATES[name][0] == "fp32"]
    return names if isinstance(machine.compute, ComputeRates) else []


def with_rate_constants(machine: Machine, overrides: Mapping[str, Override]) -> Machine:
    """The machine with overrides of constants of compute rates, by name."""
    constants = tuple(
        _rate_constant(each, overrides[each.name]) if each.name in overrides else each for each in machine.constants
    )
    rates = compute_of(constants)
    kernel = machine.compute
    compute = replace(kernel, rest=rates) if isinstance(kernel, KernelCompute) else rates
    return replace(machine, constants=constants, compute=compute)


def _rate_constant(old: Constant, override: Override) -> Constant:
    spec = CONSTANTS[old.name]
    before = spec.parse(old.value)
    text = override.text(before, spec.quantity)
    source = override.source(old.value, old.source)
    return replace(old, value=old.value if spec.parse(text) == before else text, source=source, low="", high="")


def with_compute(machine: Machine, override: Override) -> Machine:
    """The machine whose kernel calls all have another rate, or times divided by a factor.

    Raises `OverrideError` for an amount that is added: calls of different shapes have different rates.
    """
    change, compute = override.change, ASSUMED_COMPUTE if machine.compute == INSTANT else machine.compute
    if change.kind == "plus":
        raise OverrideError(f"override {override}: expected a factor like x0.9, or a rate like 300TFLOP/s")
    if change.kind == "to":
        rate = override.of(0.0, _QUANTITY)
        return replace(machine, compute=ComputeRate(rate, f"given: {override}"))
    changed = compute if change.factor == 1 else compute.scaled(float(change.factor))
    source = "kernel calls of all shapes, dtypes and passes; their times are divided by the factor"
    constant = Constant(COMPUTE, change.text, f"given: {override.name} {change.text} ({source})")
    return replace(machine, compute=changed, constants=(*machine.constants, constant))
