"""One attention kernel on one GPU: the time of a call.

    time = launch + throttled(max(arithmetic, memory)) + passes beside the kernel

The arithmetic is the makespan of the call's tiles (`tasp_lab.machines.kernel_model.tiles`); memory is every operand
read or written once. Kernels before and after the main one move memory, too (`Design.query_bytes`).

Where values are not as wide as keys, a pair takes the time of heads as wide as both on average over the products of the
pass (`mean_width`): forward 160 elements for 192/128. Nobody measured such kernels in a public table.

**Decode.** Calls of one query run other tiles: the heads of a KV head side by side, and keys in equal shares over all
SMs (Flash-Decoding; the scheduler of FlashMLA, csrc/sm90/decode of deepseek-ai/FlashMLA), whose parts are merged. So
most are bound by memory: FlashMLA reads up to 3,000 GB/s on an H800 (its README); the bandwidth here is that of
BabelStream, 2,950 GB/s on an H100.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from tasp_lab.machines.kernel_model.constants import Design, Gpu, KernelConstant, KernelFile, Passing, Variant
from tasp_lab.machines.kernel_model.designs import GRADIENT_BYTES, OUTPUT_GRADIENT_BYTES, computed_dims
from tasp_lab.machines.kernel_model.tiles import Tiles, splits, tile_columns
from tasp_lab.workload.kernel_shapes import KernelShape
from tasp_lab.workload.layer import pair_flops

_ELEMENT_BYTES = 2.0

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


DECODE_SHARE = 660 / 989.4
"""The most of a GPU's dense peak that decode kernels compute at: FlashMLA's up to 660 TFLOP/s on an H800 (README of
deepseek-ai/FlashMLA, kernel of April 2025) over the peak of its data sheet."""

DECODE_ROWS, DECODE_COLUMNS = 64, 64
"""The tile of decode kernels: the rows of one instruction of Hopper's tensor cores (PTX ISA, wgmma) and the keys of a
page, as in FlashMLA (BLOCK_SIZE_M and PAGE_BLOCK_SIZE); heads of a KV head that are fewer are padded."""


class TimeParts(NamedTuple):
    """Where the seconds of a call go. They add up to its time.

    `rate_s` is the work at full speed of all SMs, `waves_s` what idle SMs and part-filled tiles add, `power_s` what
    the power limit adds, `memory_s` what waits for memory beyond that, `passes_s` kernels beside the main one.
    """

    launch_s: float
    rate_s: float
    waves_s: float
    power_s: float
    memory_s: float
    passes_s: float

    @property
    def time_s(self) -> float:
        return math.fsum(self)


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel by name on a GPU. `file` has its constants; `note` states what is assumed, empty if nothing is."""

    gpu: Gpu
    file: KernelFile
    note: str = ""

    @property
    def name(self) -> str:
        return self.file.kernel

    def time_s(self, shape: KernelShape) -> float:
        """The time of one call in seconds, alone on the GPU."""
        return self.parts(shape).time_s

    def parts(self, shape: KernelShape) -> TimeParts:
        """The time of one call, by cause."""
        if shape.dtype == "fp32":
            return TimeParts(0.0, shape.flops / self.gpu.vector_flops.value, 0.0, 0.0, 0.0, 0.0)
        return call_parts(self.gpu, *self._computed(shape))

    def in_long_use(self) -> AttentionKernel:
        """The kernel on a GPU whose clocks have settled to what its power allows."""
        at_once = KernelConstant(0.0, 0.0, 0.0, "long use: clocks have settled")
        settled = tuple(msgspec.structs.replace(each, settle_s=at_once) for each in self.file.variants)
        return replace(self, file=msgspec.structs.replace(self.file, variants=settled))

    def handed_out_s(self, shape: KernelShape) -> float:
        """The seconds from the begin of a call until its last tile has begun: until then its tiles take all SMs."""
        if shape.dtype == "fp32":
            return self.time_s(shape)
        return _handed_out_s(self.gpu, *self._computed(shape))

    def _computed(self, shape: KernelShape) -> tuple[Variant, KernelShape]:
        """The constants of a call, and what the kernel computes for it: padded heads where it takes no others."""
        dims = shape.head_dim, shape.value_size
        if dims[0] != dims[1]:
            dims = computed_dims(self.name, shape.passing, *dims)
            shape = shape._replace(head_dim=dims[0], value_dim=dims[1])
        return _variant(self.file, shape.passing, mean_width(shape.passing, *dims)), _plain(shape)

    def _widths(self, passing: Passing, head_dim: int, value_dim: int | None) -> tuple[float, float]:
        """The `mean_width` of heads, and of those that the kernel computes."""
        dims = head_dim, value_dim or head_dim
        return mean_width(passing, *dims), mean_width(passing, *computed_dims(self.name, passing, *dims))

    def variant(self, passing: Passing, head_dim: int, value_dim: int | None = None) -> Variant:
        """The constants for a pass and head dimension: those of the nearest head dimension where it has none.

        Values have `value_dim` elements per head, as many as keys if None; so in the other methods.
        """
        return _variant(self.file, passing, self._widths(passing, head_dim, value_dim)[1])

    def peak_rate(self, passing: Passing, head_dim: int, value_dim: int | None = None) -> float:
        """FLOP/s that no call exceeds; those of padding are not counted."""
        own, computed = self._widths(passing, head_dim, value_dim)
        variant = _variant(self.file, passing, computed)
        long_use = 1.0 if variant.settle_s.value else variant.sustained.value
        return rate_at(variant, computed) * long_use * (own / computed)

    def assumption(self, passing: Passing, head_dim: int, value_dim: int | None = None) -> str:
        """What is assumed for this pass and head dimension; empty where it was measured."""
        found = self.variant(passing, head_dim, value_dim)
        notes = [self.note] if self.note else []
        if value_dim not in (None, head_dim):
            own, computed = self._widths(passing, head_dim, value_dim)
            padded = f", padded to {computed:g}," if own != computed else ""
            heads = f"{head_dim}/{value_dim}{padded}"
            notes.append(f"assumed: the rate of head dimensions {heads} follows from that of {found.head_dim}")
        elif found.head_dim != head_dim:
            notes.append(f"assumed: the rate of head dimension {head_dim} follows from that of {found.head_dim}")
        if found.rate.assumed:
            notes.append(found.rate.source)
        return "; ".join(notes)


@lru_cache(maxsize=256)  # each call asks
def _variant(file: KernelFile, passing: Passing, head_dim: float) -> Variant:
    return nearest_variant(file.variants, passing, head_dim)


def nearest_variant(variants: tuple[Variant, ...], passing: Passing, head_dim: float) -> Variant:
    """The variant of this pass with the nearest head dimension."""
    of_pass = [each for each in variants if each.passing == passing]
    return min(of_pass, key=lambda each: abs(math.log(each.head_dim / head_dim)))


@lru_cache(maxsize=256)
def mean_width(passing: Passing, head_dim: int, value_dim: int) -> float:
    """Elements per head on average over the matrix products of a pass.

    >>> mean_width("forward", 192, 128), mean_width("backward", 192, 128), mean_width("backward", 64, 64)
    (160.0, 166.4, 64.0)
    """
    return pair_flops(passing, head_dim, value_dim) / pair_flops(passing, 1, 1)


def rate_at(variant: Variant, head_dim: float) -> float:
    """The rate at a head dimension: a score costs so many FLOPs per element, and its exponential."""
    own, exponential = variant.head_dim, variant.exponentials.value
    return variant.rate.value * (own + exponential) / own * head_dim / (head_dim + exponential)


def _plain(shape: KernelShape) -> KernelShape:
    return shape._replace(kernel="", kind="softmax", dtype="bf16", flops=0)


@lru_cache(1 << 16)
def call_parts(gpu: Gpu, variant: Variant, shape: KernelShape) -> TimeParts:
    """The parts of a call of 16-bit operands."""
    pairs = shape.pairs * shape.batch * shape.heads
    if pairs == 0:
        return TimeParts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    width = mean_width(shape.passing, shape.head_dim, shape.value_size)
    rate = rate_at(variant, width)
    if is_decode(shape):
        rate = min(rate, DECODE_SHARE * gpu.peak_flops.value)
    per_pair = pair_flops(shape.passing, shape.head_dim, shape.value_size) / rate
    rate_s = pairs * per_pair
    design, sms = variant.design, round(gpu.sms.value)
    if is_decode(shape):
        columns, parts = _busiest_decoding(variant.tile_columns.value, sms, shape)
        arithmetic_s = max(columns * DECODE_ROWS * per_pair * sms, rate_s)
    else:
        columns, parts = _busiest(design, variant.tile_columns.value, variant.alone.value, sms, shape)
        full_s = columns * design.rows * per_pair * (sms // design.group)
        arithmetic_s = max(full_s / _speed(variant, shape, parts), rate_s)
    power_s = throttled(arithmetic_s, variant.sustained.value, variant.settle_s.value) - arithmetic_s
    elements = elements_of(shape)
    # Q, K, V and O are read or written once, backward their gradients, too
    moved_bytes = _ELEMENT_BYTES * sum(elements) * (1 if shape.passing == "forward" else 2)
    memory_s = moved_bytes / gpu.memory_bytes_per_s.value - arithmetic_s - power_s
    passes_s = 0.0 if is_decode(shape) else _beside_s(gpu, design, shape)  # an engine writes one key to its pages
    if parts > 1:
        passes_s += bound_s(gpu, 2 * 4 * parts * elements[-1] * (1 + 1 / shape.value_size))
    waves_s = arithmetic_s - rate_s
    return TimeParts(variant.launch_s.value, rate_s, waves_s, power_s, max(memory_s, 0.0), passes_s)


def busy_share(gpu: Gpu, design: Design, shape: KernelShape) -> float:
    """The part of all SMs' time that goes into (query, key) pairs, if starts and ends of tiles took none.

    It follows from the tiles alone: full waves without a mask give 1.
    """
    pairs = shape.pairs * shape.batch * shape.heads
    sms = round(gpu.sms.value)
    columns, _ = _busiest(design, 0.0, 1.0, sms, _plain(shape))
    return min(pairs / (columns * design.rows * (sms // design.group)), 1.0)


_SHARE_BEFORE: dict[str, float] = {"forward": 1.0, "backward": 8 / 14}
"""The part of the kernels beside the main one that comes before it: forward all, backward what is read or cleared."""


def is_decode(shape: KernelShape) -> bool:
    """Whether libraries run a call of attention by a kernel for one query, as flash-attn does (csrc/flash_attn/
    flash_api.cpp: seqlenq_ngroups_swapped)."""
    return shape.queries == 1 and shape.passing == "forward" and not shape.packed and not _is_masked(shape)


def _busiest_decoding(tile_columns_cost: float, sms: int, shape: KernelShape) -> tuple[float, int]:
    """Keys that the busiest SM goes through with a tile of `DECODE_ROWS`, and the parts of the keys of a tile."""
    tiles = shape.batch * shape.kv_heads * math.ceil(shape.heads // shape.kv_heads / DECODE_ROWS)
    blocks = math.ceil(shape.keys / DECODE_COLUMNS)
    return math.ceil(tiles * blocks / sms) * DECODE_COLUMNS + tile_columns_cost, min(math.ceil(sms / tiles), blocks)


@lru_cache(1 << 16)
def _handed_out_s(gpu: Gpu, variant: Variant, shape: KernelShape) -> float:
    """The main kernel hands out its tiles in the same part of its time as undisturbed waves do."""
    parts = call_parts(gpu, variant, shape)
    if not parts.time_s or is_decode(shape):
        return parts.time_s
    tiles, _, _ = _tiles(variant.design, variant.tile_columns.value, round(gpu.sms.value), shape)
    share = tiles.last_begins() / tiles.makespan(variant.alone.value)
    before_s = _SHARE_BEFORE[shape.passing] * _beside_s(gpu, variant.design, shape)
    return parts.launch_s + before_s + share * (parts.rate_s + parts.waves_s + parts.power_s + parts.memory_s)


@lru_cache(1 << 16)  # a fit tries many rates with the same tiles
def _busiest(design: Design, tile_columns_cost: float, alone: float, sms: int, shape: KernelShape) -> tuple[float, int]:
    """Columns that the busiest SM goes through, as if its slots were full, and the parts of split-KV."""
    tiles, height, parts = _tiles(design, tile_columns_cost, sms, shape)
    return height * tiles.makespan(alone), parts


def _tiles(design: Design, tile_columns_cost: float, sms: int, shape: KernelShape) -> tuple[Tiles, float, int]:
    """The tiles of a call in the order of dispatch, with costs in columns; their height, and the parts of split-KV.

    Those of packed documents are in one grid, document by document. Rows are queries, backward keys.
    """
    rows, heads, group = float(design.rows), shape.batch * shape.heads, shape.heads // shape.kv_heads
    if design.packs_heads and shape.passing == "forward" and design.rows % group == 0:
        rows, heads = design.rows / group, shape.batch * shape.kv_heads
    parts, height = 1, 1.0
    may_split = shape.passing == "forward" and not (design.split in ("fill", "cudnn") and _is_masked(shape))
    if may_split and not shape.packed:
        # cuDNN counts thread blocks, of which an SM holds one: it computes all slots
        of_split = rows * design.slots / design.group if design.split == "cudnn" else rows
        parts = splits(design.split, heads, shape.queries, shape.keys, shape.head_dim, sms, of_split, shape.batch)
    if parts > 1 and design.split == "flash-attention-2":
        rows, height = rows / 2, 0.5
    if design.split == "flash-attention-3" and not shape.packed:  # parts of the keys that a tile sees, not of all keys
        blocks = tile_columns(shape, rows, design.columns) / design.columns
        of_sequences = [np.tile(np.ceil(blocks / parts) * design.columns, parts)]
    else:
        of_sequences = [tile_columns(each, rows, design.columns, parts) for each in _sequences(shape)]
    costs = np.concatenate([each[::-1] if design.order == "reversed" else each for each in of_sequences])
    costs[costs > 0] += tile_columns_cost
    tiles = Tiles(costs, heads, sms // design.group, design.slots, design.order == "longest-first")
    return tiles, height, parts


def _sequences(shape: KernelShape) -> list[KernelShape]:
    """The sequences of a call, each as a call of its own; more than one of packed documents."""
    return [shape._replace(packed=(), **each._asdict()) for each in shape.segments]


def _is_masked(shape: KernelShape) -> bool:
    return shape.low > 1 - shape.keys or shape.high < shape.queries - 1


def _speed(variant: Variant, shape: KernelShape, parts: int) -> float:
    """The speed with this mask and so many parts of the keys, as a share of that without."""
    if shape.packed:  # each document takes its share of the time
        return shape.pairs / sum(each.pairs / _speed(variant, each, parts) for each in _sequences(shape) if each.pairs)
    speed = variant.split.value if parts > 1 else 1.0
    if not _is_masked(shape):
        return speed
    from_corner = shape.low == 0 or shape.high == 0
    return speed * variant.masked.value * (1.0 if from_corner else variant.offset.value)


def throttled(time_s: float, sustained: float, settle_s: float) -> float:
    """The time of work that takes `time_s` at full clocks, when clocks settle to a share of `sustained`.

    Speed falls as sustained + (1 - sustained) exp(-t / settle_s); Newton's method inverts its integral.

    >>> throttled(1.0, 0.5, 0.0)
    2.0
    """
    if sustained >= 1 or time_s <= 0:
        return time_s
    if settle_s <= 0:
        return time_s / sustained
    found = time_s
    for _ in range(6):
        decay = math.exp(-found / settle_s)
        done = sustained * found + (1 - sustained) * settle_s * (1 - decay)
        found += (time_s - done) / (sustained + (1 - sustained) * decay)
    return found


def elements_of(shape: KernelShape) -> tuple[float, float, float, float]:
    """The elements of Q, K, V and O; of V none that are a part of K."""
    rows, columns = (float(shape.batch * each) for each in (shape.heads * shape.queries, shape.kv_heads * shape.keys))
    size = shape.value_size
    values = 0.0 if shape.values_in_keys else columns * size
    return rows * shape.head_dim, columns * shape.head_dim, values, rows * size


def _beside_s(gpu: Gpu, design: Design, shape: KernelShape) -> float:
    """The time of the kernels beside the main one, which move memory; merges of split keys apart."""
    q, k, v, o = elements_of(shape)
    if shape.passing == "backward":  # some of the bytes per element of Q are those of O
        q = (q * (GRADIENT_BYTES - OUTPUT_GRADIENT_BYTES) + o * OUTPUT_GRADIENT_BYTES) / GRADIENT_BYTES
    moved = design.query_bytes * q
    if shape.passing == "forward" or shape.kv_heads < shape.heads:
        moved += (design.key_bytes + design.repeated_key_bytes * shape.heads / shape.kv_heads) * (k + v) / 2
    return moved / gpu.memory_bytes_per_s.value
