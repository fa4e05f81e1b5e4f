"""Constants of chunk kernels of linear attention from tables of eager calls.

The host's share and the bytes are fitted per kernel, forward from rows of that pass, backward from those of both. The
launch on the GPU and the time of a chunk are measured by others and not fitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from tasp_lab.core.arrays import FloatArray
from tasp_lab.machines.kernel_model.constants import Gpu, KernelConstant, Passing
from tasp_lab.machines.kernel_model.linear import LinearKernel
from tasp_lab.measure.readers.kernel_table import KernelRow

_GRAPH = (
    "fla-org/flash-linear-attention pull 1243: simple_gla of 256 positions in a CUDA graph, 8.2 us forward, 27.2 both"
)
_CHAIN = (
    "tile-ai/TileOPs pull 534: chunk_gla of 8 heads of 64 on one H200, both passes, 0.113 ms per 16 chunks from 2048 "
    "to 16384 positions; one chain forward, two backward"
)
LAUNCH: dict[Passing, KernelConstant] = {
    "forward": KernelConstant(8.2e-6, 6e-6, 12e-6, _GRAPH),
    "backward": KernelConstant(19e-6, 14e-6, 28e-6, _GRAPH),
}
CHUNK_S: dict[Passing, KernelConstant] = {
    "forward": KernelConstant(2.4e-6, 1.2e-6, 3.5e-6, _CHAIN),
    "backward": KernelConstant(4.7e-6, 3.5e-6, 6e-6, _CHAIN),
}
_START = (300e-6, 40.0, 10.0)


def fit_linear_kernel(name: str, gpu: Gpu, rows: Sequence[KernelRow], source: str) -> tuple[LinearKernel, LinearKernel]:
    """Forward and backward of one kernel; `rows` are of forward alone and of both passes."""
    alone = [row for row in rows if len(row.shapes) == 1]
    forward = _fit(name, "forward", gpu, alone, [0.0] * len(alone), source)
    both = [row for row in rows if len(row.shapes) == 2]
    before = [forward.time_s(gpu, row.shapes[0]._replace(flops=0)) + forward.host_s.value for row in both]
    return forward, _fit(name, "backward", gpu, both, before, source)


def _fit(
    name: str, passing: Passing, gpu: Gpu, rows: Sequence[KernelRow], before_s: Sequence[float], source: str
) -> LinearKernel:
    """`before_s` are the seconds of each row that another kernel takes."""
    measured = np.array([row.measured_s for row in rows])

    def made(at: FloatArray, source: str) -> LinearKernel:
        host, element, state = (float(f"{start * np.exp(each):.3g}") for start, each in zip(_START, at, strict=True))
        found = [KernelConstant(each, each / 1.5, each * 1.5, source) for each in (host, element, state)]
        return LinearKernel(name, passing, LAUNCH[passing], found[0], found[1], found[2], CHUNK_S[passing])

    def residuals(at: FloatArray) -> FloatArray:
        host, element, state = np.array(_START) * np.exp(at)
        shapes = [row.shapes[-1] for row in rows]
        elements = np.array([shape.batch * shape.heads * shape.queries * shape.head_dim for shape in shapes])
        heads = np.array([shape.head_dim for shape in shapes])
        gpu_s = elements * (element + state * heads / 64) / gpu.memory_bytes_per_s.value
        chain_s = np.array([shape.queries / 64 for shape in shapes]) * CHUNK_S[passing].value
        times = LAUNCH[passing].value + host + np.maximum(gpu_s, chain_s) + np.array(before_s)
        return np.concatenate([np.log(times / measured), 0.02 * at])

    found = least_squares(residuals, np.zeros(3), loss="soft_l1", f_scale=0.1)
    error = float(np.abs(np.expm1(found.fun[: len(rows)])).mean())
    return made(found.x, f"fit: {len(rows)} rows of {source}; mean error {error:.0%} of them")
