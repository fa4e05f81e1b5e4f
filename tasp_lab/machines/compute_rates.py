"""ComputeRate rates of machines and accelerators.

A machine file or a profile names its `accelerator`, whose constants are in
``tasp_lab/machines/accelerators/NAME.toml``, each with its source. Machine files and profiles may override them.

A source that begins with ``assum`` marks an assumption. Rates are in FLOP/s of one accelerator: 4 FLOPs forward and 10
backward per (query, key) pair and element of a head. Masked pairs are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files

import msgspec

from tasp_lab.core.choices import WHAT_IF_DTYPE
from tasp_lab.core.errors import TopologyError
from tasp_lab.core.records import Record
from tasp_lab.machines.constants import CONSTANTS, Kind
from tasp_lab.machines.machine import INSTANT, ComputeRate, ComputeRates
from tasp_lab.machines.parameters import Constant, Parameter, parse_interval

COMPUTE_RATES: Mapping[str, Kind] = {name: spec.kind for name, spec in CONSTANTS.items() if spec.kind is not None}
"""Constants of compute rates, like ``328.6TFLOP/s``, to dtype and pass."""

ASSUMED_COMPUTE = ComputeRate(
    300e12, "assumed: no measured rate; about what FlashAttention-2 does forward on one H100 or MI300X", assumed=True
)
"""The attention rate of a machine without one. On H100 and MI300X, 327.9 and 328.6 TFLOP/s were measured
(Azure/AI-benchmarking-guide)."""

AS_16_BIT = "assumed: as bf16; fp8 kernels are faster where a GPU has them, so communication hides less"
"""Of rates in fp8. FlashAttention-3 forward on an H100: up to 740 TFLOP/s in fp16, close to 1,200 in fp8 (Shah et al.,
2024, arXiv:2407.08608, abstract); no table here has calls in fp8 from which constants could be fitted."""


class _AcceleratorFile(Record, frozen=True, forbid_unknown_fields=True):
    constants: tuple[Constant, ...]


def compute_of(parameters: Iterable[Parameter]) -> ComputeRate | ComputeRates:
    """The compute rates that these parameters define; `INSTANT` without any.

    A dtype and pass without a constant gets the rate of the nearest that has one, marked as an assumption: backward the
    rate of forward, fp32 that of bf16. So is fp8, which has no constants: `AS_16_BIT`.

    >>> found = compute_of([Parameter("compute_rate", 2e12, "a measurement")])
    >>> found.rate("bf16", "forward").source, found.rate("bf16", "backward").source
    ('a measurement', 'assumed: as bf16 forward (a measurement)')
    """
    known = {
        COMPUTE_RATES[each.name]: ComputeRate(each.number, each.source, each.assumed)
        for each in parameters
        if each.name in COMPUTE_RATES
    }
    if not known:
        return INSTANT
    kinds = [(dtype, passing) for dtype in ("bf16", "fp16", "fp32") for passing in ("forward", "backward")]
    rates = {kind: _nearest(known, *kind) for kind in kinds}
    in_fp8 = {(WHAT_IF_DTYPE, passing): _nearest(known, "bf16", passing).as_assumed(AS_16_BIT) for _, passing in kinds}
    return ComputeRates({**rates, **in_fp8})


def _nearest(known: Mapping[Kind, ComputeRate], dtype: str, passing: str) -> ComputeRate:
    wanted = ("fp32" if dtype == "fp32" else "bf16", passing)
    for kind in (wanted, (wanted[0], "forward"), ("bf16", passing), ("bf16", "forward")):
        if kind in known:
            rate = known[kind]
            if kind == wanted or rate.assumed:
                return rate
            return replace(rate, source=f"assumed: as {' '.join(kind)} ({rate.source})", assumed=True)
    return ASSUMED_COMPUTE


def accelerator_names() -> list[str]:
    """Names of the accelerators with a file of constants, in alphabetical order."""
    folder = files("tasp_lab.machines") / "accelerators"
    return sorted(entry.name[: -len(".toml")] for entry in folder.iterdir() if entry.name.endswith(".toml"))


@cache
def accelerator_parameters(name: str) -> tuple[Parameter, ...]:
    """The parameters of an accelerator. Raises `TopologyError` for an unknown name.

    >>> [parameter.text for parameter in accelerator_parameters("h100")]
    ['327.9TFLOP/s', '290.6TFLOP/s', '67TFLOP/s', '132']
    """
    if name not in accelerator_names():
        raise TopologyError(f"accelerator {name!r} is unknown: expected one of {', '.join(accelerator_names())}")
    data = (files("tasp_lab.machines") / "accelerators" / f"{name}.toml").read_bytes()
    records = msgspec.toml.decode(data, type=_AcceleratorFile).constants
    found = []
    for record in records:
        low, high = parse_interval(record, f"accelerator {name!r}")
        found.append(replace(Parameter.parse(record.name, record.value, record.source), low=low, high=high))
    return tuple(found)


def with_accelerator(parameters: tuple[Parameter, ...], accelerator: str | None) -> tuple[Parameter, ...]:
    """Parameters of a machine, with those of its accelerator that it does not override."""
    if accelerator is None:
        return parameters
    stated = {parameter.name for parameter in parameters}
    return parameters + tuple(each for each in accelerator_parameters(accelerator) if each.name not in stated)
