"""Samples of a kernel: the constants of its passes varied together within their intervals."""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec
import numpy as np

from tasp_lab.machines.kernel_model.constants import KernelConstant, Variant
from tasp_lab.machines.kernel_model.kernel import AttentionKernel
from tasp_lab.machines.sampling import Sampling, log_normal


@lru_cache(64)
def kernel_samples(kernel: AttentionKernel, sampling: Sampling) -> tuple[AttentionKernel, ...]:
    """The kernel with each sample of its constants; those of the GPU, which are counts and peaks, stay.

    Equal seeds give equal samples.
    """
    drawn = [_sampled(each, sampling) for each in kernel.file.variants]
    files = (msgspec.structs.replace(kernel.file, variants=variants) for variants in zip(*drawn, strict=True))
    return tuple(AttentionKernel(kernel.gpu, file, kernel.note) for file in files)


def _sampled(variant: Variant, sampling: Sampling) -> list[Variant]:
    """A variant with each sample: one column of normal values for each constant, the same in all passes."""
    names = [name for name in variant.__struct_fields__ if isinstance(getattr(variant, name), KernelConstant)]
    columns = {name: _values(getattr(variant, name), name, sampling) for name in names}
    return [
        msgspec.structs.replace(variant, **{name: column[index] for name, column in columns.items()})
        for index in range(sampling.samples)
    ]


def _values(constant: KernelConstant, name: str, sampling: Sampling) -> list[KernelConstant]:
    """Log-normal where its ends allow it; else, as for a cost that may be 0, normal between them."""
    value, low, high = constant.value, constant.low, constant.high
    if low == high:
        return [constant] * sampling.samples
    normals = sampling.normals(f"kernel {name}")
    if low > 0:
        found = value * np.exp(log_normal(normals, math.log(low / value), math.log(high / value)))
    else:
        found = np.maximum(value + log_normal(normals, low - value, high - value), 0.0)
    return [KernelConstant(float(each), float(each), float(each), constant.source) for each in found]
