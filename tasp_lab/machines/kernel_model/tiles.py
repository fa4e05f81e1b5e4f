"""The tiles of a call: how many columns of scores each of them goes through.

Forward, a tile is `rows` queries of a head and goes through the blocks of keys that its band touches; backward, it is
`rows` keys and goes through blocks of queries (Dao, FlashAttention-2, arXiv:2307.08691, sections 3.1 and 3.2).
"""

from __future__ import annotations

import math

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.workload.kernel_shapes import KernelShape


def tile_columns(shape: KernelShape, rows: float, columns: int, splits: int = 1) -> FloatArray:
    """Columns of each tile of one head, in order of dispatch; 0 for a tile outside the band.

    A tile processes whole blocks of `columns`. With `splits`, the blocks of all columns are cut into so many parts of
    the same size, and a tile exists per part and `rows`.

    >>> from tasp_lab.workload.kernel_shapes import KernelShape
    >>> causal = KernelShape("attend", "softmax", "forward", "bf16", 1, 1, 1, 128, 512, 512, 0, 511, 0)
    >>> tile_columns(causal, 128, 64).tolist()
    [128.0, 256.0, 384.0, 512.0]
    """
    if shape.passing == "forward":
        along, across, low, high = shape.queries, shape.keys, -shape.high, -shape.low
    else:
        along, across, low, high = shape.keys, shape.queries, shape.low, shape.high
    first = np.arange(0.0, along, rows)
    last = np.minimum(first + rows, along) - 1
    begin = np.clip(first + low, 0, across) // columns
    end = -(-np.clip(last + high + 1, 0, across) // columns)
    if splits == 1:
        return np.asarray(np.maximum(end - begin, 0) * columns, float)
    part = math.ceil(math.ceil(across / columns) / splits)
    starts = part * np.arange(float(splits))[:, None]
    inside = np.minimum(end, starts + part) - np.maximum(begin, starts)
    return np.asarray(np.maximum(inside, 0) * columns, float).ravel()
