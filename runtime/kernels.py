"""Attention kernels behind one name each: some query rows against some key rows, with the log-sum-exp of the scores.

A `Partial` is what a set of queries learns from a set of keys. Partials over disjoint keys are merged exactly by
their log-sum-exp (`runtime.merging`), which is what lets ranks attend to blocks in any order.

Shapes: q is [batch, queries, heads, head_dim], k and v are [batch, keys, kv_heads, head_dim]; query head h uses KV
head h // (heads // kv_heads). Strides are free. The mask is a band: query row i sees key row j iff
``low <= i - j <= high``. `trim` cuts it to the rows and keys that matter, after which most masks are none at all or
plainly causal, and the rest have a diagonal in every row and every column.

A row depends on the keys it sees and on nothing else: neither a NaN nor an infinity in another key reaches it. Where
it sees a NaN, or a score of +inf, the row is NaN, as softmax makes it. A row that sees no key, or only scores of
-inf, has lse -inf and out 0, so that it weighs nothing in a merge.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from tasp_lab.errors import RunError, first_line

Tensor = torch.Tensor

ROWS_AT_ONCE = 512
"""How many query rows share one mask or one matrix of scores: few enough that a band is not computed as a square."""


class Partial(NamedTuple):
    """What queries learn from some keys.

    `out` is [batch, queries, heads, head_dim] in the kernel's dtype: the mean of the values, weighed by the softmax.
    `lse` is [batch, queries, heads], float32 (float64 for float64): the natural logarithm of the sum of
    exp(scale * q.k) over the keys that the row sees.
    """

    out: Tensor
    lse: Tensor


class Kernel(Protocol):
    """One implementation of attention."""

    name: str

    def supports(self, dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
        """None, or in one line why it cannot."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, low: int, high: int) -> Partial:
        """Query row i sees key row j iff ``low <= i - j <= high``; shapes as in the module."""


class Band(NamedTuple):
    """A mask cut to the queries that see a key and the keys that are seen, and the limits of i - j among them.

    The limits are no wider than the rectangle: ``low >= 1 - keys`` and ``high <= queries - 1``.
    """

    first_query: int
    queries: int
    first_key: int
    keys: int
    low: int
    high: int

    @property
    def unmasked(self) -> bool:
        """Whether every row sees every key."""
        return self.low <= 1 - self.keys and self.high >= self.queries - 1

    @property
    def causal(self) -> bool:
        """Whether row i sees the keys 0 .. i, counted from the first of each, and that is a mask."""
        return self.low == 0 and self.high >= self.queries - 1 and not self.unmasked


NOTHING = Band(0, 0, 0, 0, 0, 0)


def trim(queries: int, keys: int, low: int, high: int) -> Band:
    """Drop the rows that see no key and the keys that no row sees; both are at the ends, for the mask is a band.

    A striped block, whose row i sees the keys before i, is plainly causal without its first row and last key:

    >>> band = trim(4, 4, low=1, high=3)
    >>> band, band.causal
    (Band(first_query=1, queries=3, first_key=0, keys=3, low=0, high=2), True)
    >>> trim(4, 4, low=-9, high=9).unmasked, trim(4, 4, low=4, high=9) == NOTHING
    (True, True)
    """
    first_query, end_query = max(0, low), min(queries, keys + high)
    first_key, end_key = max(0, -high), min(keys, queries - low)
    queries, keys, shift = end_query - first_query, end_key - first_key, first_query - first_key
    if low > high or queries <= 0 or keys <= 0:
        return NOTHING
    return Band(first_query, queries, first_key, keys, max(low - shift, 1 - keys), min(high - shift, queries - 1))


def window(band: Band) -> tuple[int, int]:
    """The band as flash-attn counts it, from the bottom right: how far left and right row i sees; -1: no limit.

    The last row stands at the last key. In a trimmed band it sees that key, so neither limit is ever negative.

    >>> window(trim(2, 5, low=-3, high=1)), window(trim(4, 4, low=0, high=2))
    ((-1, 0), (2, 0))
    """
    offset = band.keys - band.queries
    left = -1 if band.high >= band.queries - 1 else band.high + offset
    right = -1 if band.low <= 1 - band.keys else -band.low - offset
    return left, right


Compute = Callable[[Tensor, Tensor, Tensor, float, Band], Partial]
"""Attention over a band that is not empty; all three tensors are cut to it."""


def _over_band(compute: Compute, q: Tensor, k: Tensor, v: Tensor, scale: float, low: int, high: int) -> Partial:
    """Compute the part that the mask leaves, and add the rows that see nothing."""
    band = trim(q.shape[1], k.shape[1], low, high)
    if band == NOTHING or not q.numel():  # the CPU operator crashes on no keys and on no heads
        return Partial(torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf, dtype=_lse_dtype(q.dtype)))
    q_seeing = q.narrow(1, band.first_query, band.queries)
    k_seen, v_seen = (x.narrow(1, band.first_key, band.keys) for x in (k, v))
    out, lse = compute(q_seeing, k_seen, v_seen, scale, band)
    before, after = band.first_query, q.shape[1] - band.first_query - band.queries
    if before or after:
        pad = torch.nn.functional.pad
        out, lse = pad(out, (0, 0, 0, 0, before, after)), pad(lse, (0, 0, before, after), value=-math.inf)
    return Partial(out, lse)


def _by_rows(rows: int, compute: Compute, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """Compute so many query rows at a time, each with the keys that they see."""
    parts = [
        _over_band(compute, q[:, first : first + rows], k, v, scale, band.low - first, band.high - first)
        for first in range(0, band.queries, rows)
    ]
    outs, lses = zip(*parts, strict=True)
    return parts[0] if len(parts) == 1 else Partial(torch.cat(outs, 1), torch.cat(lses, 1))


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Reference:
    """Softmax attention as the formula says, in float64 on any device."""

    name = "reference"

    def supports(self, dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
        return None if dtype.is_floating_point else f"it takes floating point, not {dtype}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, low: int, high: int) -> Partial:
        return _over_band(_exactly, q.double(), k.double(), v.double(), scale, low, high)


def _exactly(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """Softmax attention in the dtype of the inputs.

    A weight of 0 does not stop a value that is not finite, so with such values each row is computed by itself.
    """
    rows = ROWS_AT_ONCE if band.unmasked or v.isfinite().all() else 1
    return _by_rows(rows, _softmax, q, k, v, scale, band)


def _softmax(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = torch.einsum("bikgd,bjkd->bikgj", grouped, k) * scale
    if not band.unmasked:
        seen = torch.ones(band.queries, band.keys, dtype=torch.bool, device=q.device)
        seen = seen.tril_(-band.low).triu_(-band.high)
        scores.masked_fill_(~seen[:, None, None], -math.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bikgj,bjkd->bikgd", scores.softmax(-1), v)
    return Partial(out.masked_fill_(lse[..., None] == -math.inf, 0).flatten(2, 3), lse.flatten(2, 3))


class ScaledDotProduct:
    """The fused operators behind torch's scaled_dot_product_attention, which also give the log-sum-exp.

    On a GPU a value that is not finite can reach rows that do not see it, where they share a tile of a mask with rows
    that do: finding out would stall the stream.
    """

    name = "sdpa"

    def supports(self, dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
        dtypes = [torch.float32, torch.bfloat16, torch.float16] + [torch.float64] * (device.type == "cpu")
        if device.type not in ("cpu", "cuda"):
            return f"it runs on cpu and cuda, not {device.type}"
        if dtype not in dtypes:
            return f"on {device.type} it takes {', '.join(map(str, dtypes))}, not {dtype}"
        return _gpu_head_dim(head_dim) if device.type == "cuda" else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, low: int, high: int) -> Partial:
        q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
        return _over_band(_on_gpu if q.is_cuda else _on_cpu, q, k, v, scale, low, high)


def _gpu_head_dim(head_dim: int) -> str | None:
    fits = head_dim % 8 == 0 and 0 < head_dim <= 256
    return None if fits else f"on cuda it takes a head_dim that is a multiple of 8 up to 256, not {head_dim}"


def _rows_contiguous(x: Tensor) -> Tensor:
    """Fused operators read each row as adjacent numbers, whatever its stride says."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[batch, rows, heads, ...] as [batch, heads, rows, ...] and back."""
    return [x.transpose(1, 2) for x in tensors]


def _additive_mask(band: Band, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[queries, keys], 0 where seen and -inf elsewhere; rows start at multiples of 8, as GPU operators want them."""
    columns = -(-band.keys // 8) * 8
    seen = torch.ones(band.queries, columns, dtype=dtype, device=device).tril_(-band.low).triu_(-band.high)
    return seen.log_()[:, : band.keys]


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    if band.unmasked or band.causal:
        return _cpu_operator(q, k, v, scale, band)
    return _by_rows(ROWS_AT_ONCE, _cpu_operator, q, k, v, scale, band)


def _cpu_operator(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of torch's private CPU operator; it counts causal from the top left and groups heads itself."""
    mask = None if band.unmasked or band.causal else _additive_mask(band, q.dtype, q.device)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found = operator(*_heads_first(q, k, v), is_causal=band.causal, attn_mask=mask, scale=scale)
    return _repaired(Partial(*_heads_first(*found)), q, k, v, scale, band)


def _repaired(found: Partial, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The rows that the CPU operator may have got wrong, computed again.

    Whatever is not finite spreads to rows that do not see it, a score of +inf can end as out 0, and a row without
    weight gets lse 0. All of these show as out or lse not finite or as lse 0, which is rare otherwise.
    """
    out, lse = found
    if out.sum(dtype=lse.dtype).isfinite() and lse.sum().isfinite() and lse.all():
        return found
    suspect = ~lse.isfinite() | (lse == 0) | ~out.isfinite().all(-1)
    q, k, v = q.to(lse.dtype), k.to(lse.dtype), v.to(lse.dtype)
    for row in suspect.any(2).any(0).nonzero().flatten().tolist():
        exact = _over_band(_softmax, q.narrow(1, row, 1), k, v, scale, band.low - row, band.high - row)
        out.narrow(1, row, 1).copy_(exact.out)
        lse.narrow(1, row, 1).copy_(exact.lse)
    return found


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    square = band.unmasked or (band.causal and band.queries == band.keys)
    operator = _gpu_flash if square and _gpu_flash_runs(q, k, v, band.causal) else _gpu_efficient
    return _weightless(operator(q, k, v, scale, band))


def _gpu_flash_runs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether torch's flash operator takes these tensors on this GPU."""
    query, key, value = _heads_first(q, k, v)
    grouped = q.shape[2] != k.shape[2]
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, grouped)
    return torch.backends.cuda.can_use_flash_attention(parameters)


def _gpu_flash(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of torch's private flash operator; it groups heads itself."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = operator(*_heads_first(q, k, v), 0.0, band.causal, scale=scale)
    return Partial(*_heads_first(out, lse))


def _gpu_efficient(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of torch's private memory-efficient operator.

    It wants as many KV heads as heads, so it is called once for each head of a group and no key is copied. Its lse
    is padded to whole tiles.
    """
    group = q.shape[2] // k.shape[2]
    square_causal = band.causal and band.queries == band.keys
    mask = None
    if not band.unmasked and not square_causal:
        mask = _additive_mask(band, q.dtype, q.device).expand(q.shape[0], k.shape[2], -1, -1)
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse = torch.empty_like(q), torch.empty_like(q[..., 0], dtype=torch.float32)
    for head in range(group):
        heads = _heads_first(q[:, :, head::group], k, v)
        one_out, one_lse, *_ = operator(*heads, mask, True, 0.0, square_causal, scale=scale)
        out[:, :, head::group] = one_out.transpose(1, 2)
        lse[:, :, head::group] = one_lse[..., : band.queries].transpose(1, 2)
    return Partial(out, lse)


def _weightless(found: Partial) -> Partial:
    """Flash kernels give a row of no weight the lse +inf; it differs from a row of NaN in that out is 0."""
    out, lse = found
    return Partial(out, lse.masked_fill((lse == math.inf) & (out[..., 0] == 0), -math.inf))


class FlashAttention:
    """The flash-attn package, for CUDA and ROCm. Values that are not finite: as in `ScaledDotProduct` on a GPU."""

    name = "flash-attn"

    def supports(self, dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it runs on cuda, not {device.type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it takes torch.float16 and torch.bfloat16, not {dtype}"
        return _gpu_head_dim(head_dim) or _why_no_flash_attn()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, low: int, high: int) -> Partial:
        q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
        return _over_band(_flash_attn, q, k, v, scale, low, high)


def _why_no_flash_attn() -> str | None:
    """The package can be installed without its compiled module, so that is what must import."""
    try:
        importlib.import_module("flash_attn_2_cuda")
        importlib.import_module("flash_attn.flash_attn_interface")
    except (ImportError, OSError) as error:
        return f"its compiled module flash_attn_2_cuda does not import: {first_line(error)}"
    return None


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of flash-attn; it groups heads itself.

    Releases 2.5 to 2.8 differ in names and results: the window is a pair or two numbers, softcap came later, and
    the first and the last three of the results are the same.
    """
    forward = importlib.import_module("flash_attn.flash_attn_interface")._flash_attn_forward
    left, right = window(band)
    options: dict[str, Any] = {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": (left, right) == (-1, 0),
        "window_size": (left, right),
        "window_size_left": left,
        "window_size_right": right,
        "softcap": 0.0,
        "alibi_slopes": None,
        "return_softmax": False,
    }
    found = forward(q, k, v, **{name: options[name] for name in _option_names(forward) & options.keys()})
    out, lse = found[0], found[-3]
    return _weightless(Partial(out, lse[..., : band.queries].transpose(1, 2)))


@cache
def _option_names(forward: Callable[..., Any]) -> frozenset[str]:
    """What a function can be called with; torch hides the signature of an operator behind its first definition."""
    return frozenset(inspect.signature(getattr(forward, "_init_fn", forward)).parameters)


KERNELS: Mapping[str, Kernel] = {kernel.name: kernel for kernel in (FlashAttention(), ScaledDotProduct(), Reference())}
"""Kernels by name, the fastest first."""


def choose_kernel(name: str, dtype: torch.dtype, device: torch.device, head_dim: int) -> Kernel:
    """A kernel by name; ``auto`` is flash-attn where it runs, else sdpa, and never the reference.

    Raises `RunError` for a name there is none of, and for what the kernel cannot compute.

    >>> choose_kernel("auto", torch.bfloat16, torch.device("cpu"), 64).name
    'sdpa'
    """
    if name == "auto":
        return _fastest(dtype, device, head_dim)
    if name not in KERNELS:
        raise RunError(f"there is no attention kernel {name!r}, expected auto, {', '.join(KERNELS)}")
    if why := KERNELS[name].supports(dtype, device, head_dim):
        raise RunError(f"the attention kernel {name} cannot run here: {why}")
    return KERNELS[name]


def _fastest(dtype: torch.dtype, device: torch.device, head_dim: int) -> Kernel:
    for name in ("flash-attn", "sdpa"):
        if (why := KERNELS[name].supports(dtype, device, head_dim)) is None:
            return KERNELS[name]
    raise RunError(f"no fast attention kernel can run here, name the reference to have it; sdpa: {why}")
