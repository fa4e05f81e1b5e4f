"""How fast what is no attention is, and the memory of a GPU: data by accelerator, each number with its source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from statistics import NormalDist

import msgspec

from tasp_lab.core.choices import MatrixDtype
from tasp_lab.core.errors import OverrideError, QuantityError
from tasp_lab.core.records import Record
from tasp_lab.core.units import Number, format_flops, format_size, parse_flops_per_s, parse_size_bytes
from tasp_lab.machines.compute import in_long_use
from tasp_lab.machines.constants import Quantity
from tasp_lab.machines.kernel_model import gpu_names
from tasp_lab.machines.kernel_model.catalogue import gpu_alias
from tasp_lab.machines.kernel_model.constants import gpus
from tasp_lab.machines.kernel_model.kernel import ELEMENTWISE_LAUNCH
from tasp_lab.machines.machine import Compute, ComputeRate, Machine
from tasp_lab.machines.overrides import parse_overrides
from tasp_lab.machines.parameters import Stated
from tasp_lab.prediction.training_step.products import Shapes, shapes_of
from tasp_lab.schedule.calls import Passing
from tasp_lab.workload.kernel_shapes import KernelShape, Product, ShapeKind

ASSUMED_MATRIX_RATE = ComputeRate(720e12, "assumed: no accelerator is known; as large matrices on one H100", True)
"""Where the machine names no accelerator."""


RESERVED_BYTES = 2 * 2**30
"""What the context and the communication library take of a GPU's memory; `RESERVED_SOURCE` says where from."""

RESERVED_SOURCE = (
    "assumed: 0.5 GiB that CUDA does not hand out (79.11 of the 79.65 GiB of an H100, vllm-project/vllm issue 27508), "
    "0.5 GiB of context (484 MiB, NVIDIA/nccl pull 2366), 1 GiB of communicators (0.7 GiB for four A100, NVIDIA/nccl "
    "issue 964; all-to-all may take 3 GiB more, issue 1685)"
)


GPU_MEMORY = "gpu.memory"
"""The override of a GPU's memory, such as ``gpu.memory=40GiB``."""

HOST_LINK_BYTES_PER_S = 25e9
HOST_LINK_SOURCE = "assumed: PCIe 4.0 x16, 32 GB/s each way, at 0.8 of it"
"""Between a GPU and its host, where that has optimizer states or inputs of layers."""

HOST_BYTES_PER_S = 300e9
HOST_SOURCE = "assumed: memory of two sockets with 8 channels of DDR4-3200 each, 410 GB/s, at 0.73 of it"
"""The memory of a host, which updates the states of all GPUs of a node."""


SPREAD = 0.08 / 5.4
"""Standard deviation of the speed of GPUs of one model, relative to their mean; `SPREAD_SOURCE` says where from."""

SPREAD_SOURCE = (
    "assumed: 8 % between GPUs of one model, on average over five clusters and several programs (arXiv:2208.11035), "
    "are the whiskers of box plots of a normal distribution, 5.4 standard deviations"
)


def slowest_speed(ranks: int) -> float:
    """The expected speed of the slowest of so many GPUs, for which the others of a step wait; 1 on average.

    By Blom's approximation of normal order statistics.

    >>> slowest_speed(1), round(slowest_speed(8), 3), round(slowest_speed(512), 3)
    (1.0, 0.979, 0.955)
    """
    return 1 - SPREAD * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


class _Accelerator(Record, frozen=True, forbid_unknown_fields=True):
    bf16: Stated
    memory: Stated
    fp8: Stated | None = None


@cache
def _accelerators() -> dict[str, _Accelerator]:
    data = (files("tasp_lab.prediction.training_step") / "accelerators.toml").read_bytes()
    return msgspec.toml.decode(data, type=dict[str, _Accelerator])


@dataclass(frozen=True)
class StepRates:
    """What a step needs of an accelerator besides attention.

    Parameters
    ----------
    matrices : the rate of large multiplications with parameters of layers, or of all if `shapes` is None.
    output : that of the output matrix, which is in 16 bits.
    shapes : how other shapes of matrices follow from large ones.
    memory_bytes_per_s : that element-wise work reaches; it takes no time if None.
    memory_source : where that comes from.
    capacity_bytes, capacity_source : the memory of a GPU as its driver reports it; None if it is unknown.
    peak_flops_per_s : the dense peak of the data sheet, in the dtype of the matrices; None if it is unknown.
    """

    matrices: ComputeRate
    output: ComputeRate
    memory_bytes_per_s: Number | None = None
    memory_source: str = ""
    capacity_bytes: int | None = None
    capacity_source: str = ""
    peak_flops_per_s: float | None = None
    shapes: Shapes | None = None

    def products_s(self, products: Sequence[Product], flops: int, *, output: bool = False) -> Number:
        """The time of products one after another, `flops` in all; of the output matrix, at its rate."""
        rate = self.output if output else self.matrices
        if self.shapes is None or not products:
            return rate.flops_time_s(flops)
        return sum(self.shapes.time_s(float(rate.flops_per_s or math.inf), each) for each in products)

    def moved_s(self, moved_bytes: float, launches: int) -> Number:
        """The time of so many element-wise kernels that move so many bytes; none if the bandwidth is unknown."""
        if self.memory_bytes_per_s is None:
            return 0
        return launches * ELEMENTWISE_LAUNCH.value + moved_bytes / self.memory_bytes_per_s

    @property
    def highest_flops_per_s(self) -> float:
        """A rate that no product with parameters exceeds."""
        rate = float(self.matrices.flops_per_s or math.inf)
        return rate if self.shapes is None else self.shapes.highest(rate)

    @property
    def usable_bytes(self) -> int | None:
        """The memory less `RESERVED_BYTES`; None if it is unknown."""
        return None if self.capacity_bytes is None else self.capacity_bytes - RESERVED_BYTES

    def holds(self, memory_bytes: int) -> bool | None:
        """Whether a GPU has so much memory to use; None if it is unknown."""
        return None if self.usable_bytes is None else memory_bytes <= self.usable_bytes


def step_rates(machine: Machine, dtype: MatrixDtype = "bf16", given: Number | None = None) -> StepRates:
    """The rates of the accelerator of a machine; `given` is the rate of matrices instead of the one of the data file.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> step_rates(load_machine("h100-8")).matrices.flops_per_s
    720000000000000.0

    Raises `QuantityError` for a dtype without a rate, and for a rate above the peak.
    """
    found = _accelerators().get(machine.accelerator)
    alias = gpu_alias(machine.accelerator)
    gpu = gpus()[alias] if alias in gpu_names() else None
    peak = None if gpu is None else gpu.peak_flops.value * (2 if dtype == "fp8" else 1)
    matrices, output = (_matrix_rate(machine, found, each, given) for each in (dtype, "bf16"))
    rates = StepRates(matrices, output, peak_flops_per_s=peak)
    if peak is not None and float(rates.matrices.flops_per_s or 0) > peak:
        raise QuantityError(
            f"matrices at {format_flops(float(rates.matrices.flops_per_s or 0))} on {machine.topology.name}, expected "
            f"at most its peak of {format_flops(peak)}"
        )
    if gpu is not None:
        bandwidth = gpu.memory_bytes_per_s
        rates = replace(rates, memory_bytes_per_s=bandwidth.value, memory_source=bandwidth.source)
        if given is None:
            rates = replace(rates, shapes=shapes_of(gpu))
    if found is None:
        return rates
    capacity = parse_size_bytes(found.memory.value)
    return replace(rates, capacity_bytes=capacity, capacity_source=found.memory.source)


def of_machine(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides without those of `GPU_MEMORY`, which no machine has among its numbers."""
    return tuple(str(each) for each in parse_overrides(overrides) if each.name != GPU_MEMORY)


def with_memory(rates: StepRates, overrides: Sequence[str]) -> StepRates:
    """The rates with those overrides that are of `GPU_MEMORY`.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> with_memory(step_rates(load_machine("h100-8")), ["gpu.memory=40GiB"]).capacity_bytes == 40 * 2**30
    True

    Raises `OverrideError` for a change of a memory that is unknown.
    """
    for override in (each for each in parse_overrides(overrides) if each.name == GPU_MEMORY):
        if rates.capacity_bytes is None and override.times:
            raise OverrideError(f"override {override}: the memory of a GPU is unknown, expected a size like 80GiB")
        old = rates.capacity_bytes or 0
        source = override.source(format_size(old), rates.capacity_source or "unknown")
        new = int(override.new(old, Quantity("bytes", parse_size_bytes)))
        rates = replace(rates, capacity_bytes=new, capacity_source=source)
    return rates


def _matrix_rate(machine: Machine, found: _Accelerator | None, dtype: MatrixDtype, given: Number | None) -> ComputeRate:
    if given is not None:
        return ComputeRate(given)
    if found is None and dtype == "bf16":
        return ASSUMED_MATRIX_RATE
    number = None if found is None else getattr(found, dtype)
    if number is None:
        raise QuantityError(f"matrices in {dtype} on {machine.topology.name}, whose rate is unknown; expected bf16, or "
                            "a given rate")  # fmt: skip
    return ComputeRate(parse_flops_per_s(number.value), number.source, number.source.startswith("assum"))


@dataclass(frozen=True)
class StepCompute:
    """The compute of a rank in a step: `attention` has the kernels of layers, `rates` what stands between them."""

    attention: Compute
    rates: StepRates

    def time_s(self, shape: KernelShape) -> Number:
        """The time of a call; of a ``dense`` one that of its matrices, then that of its element-wise work."""
        return sum(seconds for _, seconds in self.parts(shape))

    def handed_out_s(self, shape: KernelShape) -> Number:
        """The time until a call leaves multiprocessors to others: all of its time for a ``dense`` one."""
        return self.time_s(shape) if shape.kind == "dense" else self.attention.handed_out_s(shape)

    def parts(self, shape: KernelShape) -> Sequence[tuple[str, Number]]:
        """What the time of a call is spent on."""
        if shape.kind != "dense":
            return self.attention.parts(shape)
        found = [("matrices", self.rates.products_s(shape.products, shape.flops))]
        if self.rates.memory_bytes_per_s is not None and shape.moved_bytes:
            found.append(("element-wise", self.rates.moved_s(shape.moved_bytes, shape.launches)))
        return found

    def rate(self, dtype: str, passing: Passing, kind: ShapeKind = "softmax", head_dim: int = 128,
             value_dim: int | None = None) -> ComputeRate:  # fmt: skip
        """A rate that no call exceeds."""
        return (
            self.rates.matrices if kind == "dense" else self.attention.rate(dtype, passing, kind, head_dim, value_dim)
        )

    def scaled(self, factor: float) -> StepCompute:
        """All rates times a factor."""
        bandwidth = self.rates.memory_bytes_per_s
        rates = replace(
            self.rates,
            matrices=self.rates.matrices.scaled(factor),
            output=self.rates.output.scaled(factor),
            memory_bytes_per_s=None if bandwidth is None else bandwidth * factor,
        )
        return StepCompute(self.attention.scaled(factor), rates)

    def as_assumed(self, what: str) -> StepCompute:
        """The same, with rates of attention marked as an assumption."""
        return replace(self, attention=self.attention.as_assumed(what))


def compute_of_step(machine: Machine, rates: StepRates) -> StepCompute:
    """What a rank of a machine computes with in a step: at the clocks of long use, as fast as the slowest GPU."""
    return StepCompute(in_long_use(machine.compute), rates).scaled(slowest_speed(machine.topology.world_size))
