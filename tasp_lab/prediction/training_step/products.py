"""How long matrix products take, by shape: tiles over multiprocessors, in waves, or the bytes that they move.

A product is cut into tiles of its result, and each multiprocessor computes one at a time. A tile costs its FLOPs, those
of some more elements of the inner dimension to begin and end it (`Form.depth`), and the smaller it is the more operands
it loads per FLOP (`Form.loads`). The last wave of tiles takes as long as a full one. A library may also cut the inner
dimension, and add up the parts. Of all these ways it takes the fastest.

The form comes from shapes that were timed (``python -m experiments.tables.matrix_fits``); the rate of large matrices is
that of the accelerator. Steps draw as much power as a GPU may, for longer than benchmarks of small shapes, which run at
higher clocks: in a step none does.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib.resources import files
from itertools import product as pairs
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tasp_lab.core.records import Record, Text
from tasp_lab.machines.kernel_model.constants import Gpu
from tasp_lab.workload.kernel_shapes import Product, ProductKind

TILES = ((256, 256), (256, 128), (128, 256), (128, 128))
"""Rows and columns of the tiles that are tried."""

PARTS = (1, 2, 4, 8)
"""Parts of the inner dimension that are tried."""

_STEP = 64
"""Elements of the inner dimension that a tile goes through at once."""

LARGE = 8192
"""Rows, inner dimension and columns of the product whose rate is that of an accelerator."""

Numbers = npt.NDArray[np.float64]


class Form(Record, frozen=True, forbid_unknown_fields=True):
    """How the time of a product depends on its shape; a fit, with its source.

    Parameters
    ----------
    kinds : the rate of each kind of product over that of results, of full waves of large tiles.
    depth : elements of the inner dimension that a tile costs beside its own.
    loads : by how much tiles of half the rows or columns are slower per FLOP.
    launch_s : the fixed part of a call.
    together : whether tiles of all products of one call share waves, as if they were one product; else products follow
        each other, each with its own launch.
    sustained, settle_s : the share of full clocks that power allows in long use, and when clocks of a benchmark have
        settled to it, as those of attention kernels (`tasp_lab.machines.kernel_model.kernel.throttled`).
    """

    source: Text
    kinds: dict[ProductKind, float]
    depth: float
    loads: float
    launch_s: float
    sustained: float = 1.0
    settle_s: float = 0.0
    together: bool = True


@cache
def forms() -> dict[str, Form]:
    """The forms of GPUs whose products were timed, by GPU."""
    data = (files("tasp_lab.prediction.training_step") / "products.toml").read_bytes()
    return msgspec.toml.decode(data, type=dict[str, Form])


class Shapes(NamedTuple):
    """How the time of a product follows from its shape: the form of the GPU `of`, on `gpu`."""

    gpu: Gpu
    of: str

    def time_s(self, rate: float, product: Product) -> float:
        """The seconds of a product in a step, where results of a `LARGE` product have so many FLOP/s."""
        return _time_s(self, rate, product)

    def highest(self, rate: float) -> float:
        """FLOP/s that no product reaches."""
        form = forms()[self.of]
        return max(form.kinds.values()) * _full_rate(self, rate)


def shapes_of(gpu: Gpu) -> Shapes:
    """Those of a GPU: with its own form, that of the first GPU with one that it is like, or that of the B200.

    >>> from tasp_lab.machines.kernel_model.constants import gpus
    >>> [shapes_of(gpus()[name]).of for name in ("b200", "a800", "h100")]
    ['b200', 'a100-pcie', 'b200']
    """
    return Shapes(gpu, next((each for each in (gpu.name, *gpu.like) if each in forms()), "b200"))


@lru_cache(1 << 14)
def _time_s(shapes: Shapes, rate: float, product: Product) -> float:
    return call_s(forms()[shapes.of], shapes.gpu, _full_rate(shapes, rate), product)


def call_s(form: Form, gpu: Gpu, rate: float, product: Product) -> float:
    """The seconds of a call at settled clocks; `rate` is that of results of full waves of tiles without ends."""
    rows, inner, columns = (np.array([float(each)]) for each in product[:3])
    kind_rate = form.kinds[product.kind] * rate
    adds, copies = product.kind == "sums", product.copies
    at_once = copies if form.together else 1
    busy_s, moved_s = parts_s(form, gpu, kind_rate, rows, inner, columns, adds, at_once)
    return (form.launch_s + float(np.maximum(busy_s, moved_s)[0])) * (copies // at_once)


@lru_cache(1 << 8)
def _full_rate(shapes: Shapes, rate: float) -> float:
    """FLOP/s of results of full waves of tiles without ends, at which a `LARGE` product has this rate."""
    form, large = forms()[shapes.of], np.array([float(LARGE)])
    needed_s, found = 2 * LARGE**3 / rate - form.launch_s, rate
    for _ in range(30):  # busy time is nearly in inverse proportion
        busy_s, _ = parts_s(form, shapes.gpu, found, large, large, large, False)
        found *= float(busy_s[0]) / needed_s
    return found


def parts_s(
    form: Form, gpu: Gpu, rate: float | Numbers, rows: Numbers, inner: Numbers, columns: Numbers,
    adds: bool | npt.NDArray[np.bool_], copies: int = 1,
) -> tuple[Numbers, Numbers]:  # fmt: skip
    """The seconds of multiprocessors and of memory, arrays (products,).

    `adds` : whether results are added to sums in 32 bits. `copies` : products of one call.
    """
    sms, bandwidth = gpu.sms.value, gpu.memory_bytes_per_s.value
    fastest = np.full(rows.shape, np.inf)
    for (high, wide), parts in pairs(TILES, PARTS):
        tiles = copies * parts * np.ceil(rows / high) * np.ceil(columns / wide)
        depth = _STEP * np.ceil(inner / parts / _STEP) + form.depth
        slower = 1 + form.loads * (128 / high + 128 / wide - 1)
        busy_s = np.ceil(tiles / sms) * sms * 2 * high * wide * depth * slower / rate
        if parts > 1:  # written by each part and read again, in 32 bits
            busy_s = busy_s + 8 * parts * copies * rows * columns / bandwidth
        fastest = np.minimum(fastest, busy_s)
    moved = 2 * inner * (rows + columns) + np.where(adds, 8, 2) * rows * columns
    return fastest, copies * moved / bandwidth
