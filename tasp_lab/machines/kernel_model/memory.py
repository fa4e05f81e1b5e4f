"""What is bound by memory: merges, sums of gradients, and chunk kernels of linear attention.

Merges of the partial outputs of ring steps and sums of gradients take a launch, and bytes over the bandwidth.
The chunk kernels of linear attention (flash-linear-attention) are bound by memory or by the chain of chunks:

    time = launch + max(elements * (bytes + state_bytes * head_dim / 64) / bandwidth, chunks * chunk)

Every element of Q is read and written several times, as are K, V, O and gates beside it; a state of head_dim**2 numbers
is kept per chunk of 64 positions, which is head_dim / 64 numbers per element. Chunks of a head follow each other, so a
call with few heads takes a time per chunk whatever its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import msgspec

from tasp_lab.core.errors import ProfileError, unknown
from tasp_lab.machines.kernel_model.constants import Gpu, KernelConstant, Passing, data_folder
from tasp_lab.workload.kernel_shapes import KernelShape

ELEMENTWISE_LAUNCH = KernelConstant(
    2.3e-6,
    1.5e-6,
    4e-6,
    "norms of 8192 x 128 bf16 take 3 us on H200, GB200 and GB300 (NVIDIA/cudnn-frontend benchmark/norms 3929da2e), "
    "less their bytes over the bandwidth",
)
"""The fixed part of an element-wise kernel."""


def bound_s(gpu: Gpu, moved_bytes: float) -> float:
    """The time of one kernel that moves so many bytes and computes next to nothing."""
    return ELEMENTWISE_LAUNCH.value + moved_bytes / gpu.memory_bytes_per_s.value


CHUNK = 64
"""Positions of a chunk (``chunk_size`` of flash-linear-attention)."""


class LinearKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel of linear attention for one pass, on any GPU.

    Attributes
    ----------
    launch_s : the fixed part of a call on the GPU.
    host_s : what an eager call costs the host besides; not part of `time_s`.
    element_bytes, state_bytes : bytes moved per element of Q, and per number of a state.
    chunk_s : the time of one chunk after another.
    """

    name: str
    passing: Passing
    launch_s: KernelConstant
    host_s: KernelConstant
    element_bytes: KernelConstant
    state_bytes: KernelConstant
    chunk_s: KernelConstant

    def time_s(self, gpu: Gpu, shape: KernelShape) -> float:
        """The time of one call on a GPU, in seconds; never below its FLOPs at the dense peak."""
        positions = max(shape.queries, shape.keys)
        elements = shape.batch * shape.heads * positions * shape.head_dim
        moved = elements * (self.element_bytes.value + self.state_bytes.value * shape.head_dim / CHUNK)
        chain_s = math.ceil(positions / CHUNK) * self.chunk_s.value
        bound_s = max(moved / gpu.memory_bytes_per_s.value, chain_s, shape.flops / gpu.peak_flops.value)
        return self.launch_s.value + bound_s


class _LinearKernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kernels: tuple[LinearKernel, ...]


@cache
def _kernels() -> Mapping[tuple[str, Passing], LinearKernel]:
    found = msgspec.toml.decode((data_folder() / "linear.toml").read_bytes(), type=_LinearKernels)
    return {(kernel.name, kernel.passing): kernel for kernel in found.kernels}


def linear_kernel(name: str, passing: Passing) -> LinearKernel:
    """A kernel by name, like ``chunk-gla``. Raises `ProfileError` for an unknown one."""
    if (name, passing) not in _kernels():
        raise ProfileError(unknown("kernel of linear attention", name, sorted({each for each, _ in _kernels()})))
    return _kernels()[name, passing]


def linear_document(kernels: tuple[LinearKernel, ...]) -> bytes:
    """The text of the file of kernels."""
    return msgspec.toml.encode(_LinearKernels(kernels))
