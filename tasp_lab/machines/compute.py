"""How fast ranks compute: by the kernels of their accelerator, or at rates.

Softmax attention takes the time of a named kernel by shape (`tasp_lab.machines.kernel_model`). What has no kernel there
(float32, linear attention, calls between layers) is computed at the rates of the accelerator.

A machine file or a profile names its `accelerator`, whose constants are in
``tasp_lab/machines/accelerators/NAME.toml``, each with its source. Machine files and profiles may override them. A
source that begins with ``assum`` marks an assumption. Rates are in FLOP/s of one accelerator: 4 FLOPs forward and 10
backward per (query, key) pair and element of a head, see `tasp_lab.workload.layer.pair_flops`. Masked pairs are not
counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files

import msgspec

from tasp_lab.core.choices import WHAT_IF_DTYPE
from tasp_lab.core.errors import ProfileError, TopologyError
from tasp_lab.core.records import data_names
from tasp_lab.core.units import Number, format_bandwidth, format_flops, format_time
from tasp_lab.machines.constants import CONSTANTS, Kind
from tasp_lab.machines.host import NO_PASSES, Passes
from tasp_lab.machines.kernel_model import AttentionKernel, attention_kernel, gpu_names, kernel_names
from tasp_lab.machines.kernel_model.catalogue import gpu_alias
from tasp_lab.machines.kernel_model.constants import Gpu, Passing, constants_in
from tasp_lab.machines.kernel_model.kernel import bound_s, elements_of
from tasp_lab.machines.machine import INSTANT, Compute, ComputeRate, ComputeRates, Machine
from tasp_lab.machines.parameters import Parameter, Parameters, read_constants
from tasp_lab.machines.stack import DEFAULT_STACK, load_stack
from tasp_lab.workload.kernel_shapes import KernelShape, ShapeKind

COMPUTE_RATES: Mapping[str, Kind] = {name: spec.kind for name, spec in CONSTANTS.items() if spec.kind is not None}
"""Constants of compute rates, like ``328.6TFLOP/s``, to dtype and pass."""

ASSUMED_COMPUTE = ComputeRate(
    300e12, "assumed: no measured rate; about what FlashAttention-2 does forward on one H100 or MI300X", assumed=True
)
"""The attention rate of a machine without one. On H100 and MI300X, 327.9 and 328.6 TFLOP/s were measured
(Azure/AI-benchmarking-guide)."""

_PASSES = ("forward", "backward")

AS_16_BIT = "assumed: as bf16; fp8 kernels are faster where a GPU has them, so communication hides less"
"""Of rates in fp8. FlashAttention-3 forward on an H100: up to 740 TFLOP/s in fp16, close to 1,200 in fp8 (Shah et al.,
2024, arXiv:2407.08608, abstract); no table here has calls in fp8 from which constants could be fitted."""


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

    def nearest(dtype: str, passing: str) -> ComputeRate:
        # all data sheets that list fp16 and bf16 give one number for the two
        wanted = ("fp32" if dtype == "fp32" else "bf16", passing)
        for kind in (wanted, (wanted[0], "forward"), ("bf16", passing), ("bf16", "forward")):
            if kind in known:
                rate = known[kind]
                if kind == wanted or rate.assumed:
                    return rate
                return replace(rate, source=f"assumed: as {' '.join(kind)} ({rate.source})", assumed=True)
        return ASSUMED_COMPUTE

    rates = {(dtype, each): nearest(dtype, each) for dtype in ("bf16", "fp16", "fp32") for each in _PASSES}
    return ComputeRates(rates | {(WHAT_IF_DTYPE, each): rates["bf16", each].as_assumed(AS_16_BIT) for each in _PASSES})


def accelerator_names() -> list[str]:
    """Names of the accelerators with a file of constants, in alphabetical order."""
    return data_names("tasp_lab.machines", "accelerators")


@cache
def accelerator_parameters(name: str) -> tuple[Parameter, ...]:
    """The parameters of an accelerator. Raises `TopologyError` for an unknown name.

    >>> [parameter.text for parameter in accelerator_parameters("h100")]
    ['327.9TFLOP/s', '290.6TFLOP/s', '67TFLOP/s', '132']
    """
    if name not in accelerator_names():
        raise TopologyError(f"accelerator {name!r} is unknown: expected one of {', '.join(accelerator_names())}")
    return read_constants((files("tasp_lab.machines") / "accelerators" / f"{name}.toml").read_bytes())


def with_accelerator(parameters: tuple[Parameter, ...], accelerator: str | None) -> tuple[Parameter, ...]:
    """Parameters of a machine, with those of its accelerator that it does not override."""
    if accelerator is None:
        return parameters
    stated = {parameter.name for parameter in parameters}
    return parameters + tuple(each for each in accelerator_parameters(accelerator) if each.name not in stated)


PARTS = {
    "launch_s": "kernel launch",
    "rate_s": "compute",
    "waves_s": "tiles and waves",
    "power_s": "power limit",
    "memory_s": "memory",
    "passes_s": "passes beside the kernel",
}
"""What the time of a call of a kernel is spent on, by the fields of `tasp_lab.machines.kernel_model.TimeParts`."""


MERGE = "merge"
"""What passes over partial results and gradients take beside the kernels."""


@dataclass(frozen=True)
class KernelCompute(Compute):
    """Calls of softmax attention in 16 bit take the time of a kernel, `rest` has the others.

    Calls in fp8 are assumed to take as long as those in 16 bit (`tasp_lab.machines.compute.AS_16_BIT`).

    `speed` is 1, the scale of an emulated fabric, or the factor of an override; another kernel keeps it. `passes` are
    those of a host model beside each call, on the same stream; without one there are none: ours merges where the
    kernel writes its result. `by_stack` is whether the stack of the machine may choose another kernel by the layer.
    """

    kernel: AttentionKernel
    rest: Compute
    speed: float = 1.0
    passes: Passes = NO_PASSES
    by_stack: bool = False

    def time_s(self, shape: KernelShape) -> Number:
        if not _has_kernel(shape.dtype, shape.kind):
            return self.rest.time_s(shape)
        return (self.kernel.time_s(shape) + passes_s(self.passes, self.kernel.gpu, shape)) / self.speed

    def handed_out_s(self, shape: KernelShape) -> Number:
        """The time until the last tile of a call has begun; its passes follow."""
        if not _has_kernel(shape.dtype, shape.kind):
            return self.rest.handed_out_s(shape)
        return self.kernel.handed_out_s(shape) / self.speed

    def parts(self, shape: KernelShape) -> Sequence[tuple[str, Number]]:
        if not _has_kernel(shape.dtype, shape.kind):
            return self.rest.parts(shape)
        spent = {PARTS[name]: seconds for name, seconds in self.kernel.parts(shape)._asdict().items()}
        spent[MERGE] = passes_s(self.passes, self.kernel.gpu, shape)
        return [(name, seconds / self.speed) for name, seconds in spent.items() if seconds]

    def rate(self, dtype: str, passing: Passing, kind: ShapeKind = "softmax", head_dim: int = 128,
             value_dim: int | None = None) -> ComputeRate:  # fmt: skip
        """The rate that no call exceeds: that of all SMs without launches, waves and memory."""
        if not _has_kernel(dtype, kind):
            return self.rest.rate(dtype, passing, kind, head_dim, value_dim)
        kernel, stated = self.kernel, self.kernel.variant(passing, head_dim, value_dim).rate
        assumed = kernel.assumption(passing, head_dim, value_dim)
        # one without an interval is as sure as its source tells
        exact = stated.low == stated.high or stated.low <= 0
        found = ComputeRate(
            kernel.peak_rate(passing, head_dim, value_dim) * self.speed,
            assumed or stated.source,
            bool(assumed),
            kernel.name,
            kernel_constants(kernel, passing, head_dim, value_dim),
            None if exact else (math.log(stated.low / stated.value), math.log(stated.high / stated.value)),
        )
        return found.as_assumed(AS_16_BIT) if dtype == WHAT_IF_DTYPE else found

    def scaled(self, factor: float) -> KernelCompute:
        return replace(self, rest=self.rest.scaled(factor), speed=self.speed * factor)

    def as_assumed(self, what: str) -> KernelCompute:
        return replace(self, rest=self.rest.as_assumed(what))

    def content(self) -> dict[str, object]:
        """All that distinguishes kernels, as plain values."""
        gpu, file = (msgspec.to_builtins(each) for each in (self.kernel.gpu, self.kernel.file))
        passes = {"passes": msgspec.to_builtins(self.passes)} if self.passes else {}
        return {"gpu": gpu, "kernel": file, "speed": self.speed, "by_stack": self.by_stack, **passes}


def passes_s(passes: Passes, gpu: Gpu, shape: KernelShape) -> float:
    """The time of the passes beside a call: bytes over the memory bandwidth, and one launch each."""
    if not passes:
        return 0.0
    q, k, v, o = elements_of(shape)
    if shape.passing == "forward":
        of_queries = (passes.slice_bytes if shape.queries < shape.keys else passes.output_bytes) * o
        key_bytes = passes.key_bytes
    else:
        of_queries, key_bytes = passes.query_gradient_bytes * q, passes.key_gradient_bytes
    return sum(bound_s(gpu, moved) for moved in (of_queries, key_bytes * k / 2, key_bytes * v / 2) if moved)


def _has_kernel(dtype: str, kind: ShapeKind) -> bool:
    return kind == "softmax" and dtype != "fp32"


@lru_cache(maxsize=256)  # each rate has them
def kernel_constants(
    kernel: AttentionKernel, passing: Passing, head_dim: int, value_dim: int | None = None
) -> tuple[Parameter, ...]:
    """The constants behind the time of a kernel: those of the GPU, and of the pass and head dimension."""
    gpu, variant = kernel.gpu, kernel.variant(passing, head_dim, value_dim)
    found = []
    for part, of in ((gpu, gpu.name), (variant, f"{kernel.name} {passing}")):
        for name, each in constants_in(part).items():
            value, low, high = (_text(name, number) for number in (each.value, each.low, each.high))
            written = value if low == high else f"{value} ({low} to {high})"
            stated = Parameter(f"{of} {name}", each.value, each.source, low=each.low, high=each.high, written=written)
            found.append(stated)
    design = variant.design
    tile = f"{design.rows} x {design.columns}, {design.slots} per SM, {design.order}, split keys: {design.split}"
    return (*found, Parameter(f"{kernel.name} {passing} tile", tile, design.source))


def _text(name: str, value: float) -> str:
    """A constant with the unit that its name says."""
    if name.endswith("bytes_per_s"):
        return format_bandwidth(value)
    if name.endswith("_s"):
        return format_time(value)
    return format_flops(value) if name.endswith("flops") or name == "rate" else f"{value:.4g}"


def compute_on(parameters: Parameters, accelerator: str) -> Compute:
    """How ranks compute that have these parameters: by the kernel that `DEFAULT_STACK` runs, if there are kernels.

    Rates for 16 bit that the machine states itself, unlike its accelerator, hold instead.
    """
    rates = compute_of(parameters.values())
    kernels = _kernels_of(accelerator)
    if not kernels:
        return rates
    own = [each for each in parameters.values() if each not in accelerator_parameters(accelerator)]
    if any(COMPUTE_RATES.get(each.name, ("fp32",))[0] != "fp32" for each in own):
        return rates
    return KernelCompute(attention_kernel(accelerator, kernels[0]), rates, by_stack=True)


def kernels_on(accelerator: str) -> list[AttentionKernel]:
    """The kernels of an accelerator, the default one first; none of an unknown one.

    >>> kernels_on("h100")[0].name, kernels_on("gaudi2")
    ('cudnn', [])
    """
    return [attention_kernel(gpu_alias(accelerator), name) for name in _kernels_of(accelerator)]


def _kernels_of(accelerator: str) -> list[str]:
    """The names of `kernels_on`, whose files are not read."""
    gpu = gpu_alias(accelerator)
    names = kernel_names(gpu) if gpu in gpu_names() else []
    return list(dict.fromkeys([*(rule.kernel for rule in load_stack(DEFAULT_STACK).rules(gpu)), *names]))


def in_long_use(compute: Compute) -> Compute:
    """Kernels on GPUs whose clocks have settled to what their power allows; rates stay."""
    if isinstance(compute, KernelCompute):
        return replace(compute, kernel=compute.kernel.in_long_use())
    return compute


def with_kernel(machine: Machine, name: str | None) -> Machine:
    """The machine with a kernel of its accelerator, if one is named.

    Raises `ProfileError` for a machine whose accelerator is unknown or has no kernels, and for an unknown kernel, with
    the names of those known.
    """
    if name is None:
        return machine
    if not machine.accelerator:
        raise ProfileError(
            f"kernel {name!r}: {machine.topology.name} names no accelerator, expected a machine of a profile, "
            "or one whose file names its accelerator"
        )
    known, kernel = machine.compute, attention_kernel(machine.accelerator, name)
    if isinstance(known, KernelCompute):
        return replace(machine, compute=replace(known, kernel=kernel, by_stack=False))
    return replace(machine, compute=KernelCompute(kernel, known))
