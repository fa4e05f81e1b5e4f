"""Kernels against float64: every kernel, dtype, mask and pass that this device supports.

Errors are relative in norm. Those of lse are errors relative to the sum of exponentials. Limits are those of the trials
of whole layers, twice as large for gradients, which round the results of a forward pass a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from runtime.executor.views import DTYPES
from runtime.kernels import linear_attention as linear
from runtime.kernels.partials import Partial, lse_for_gradients
from runtime.kernels.registry import KERNELS, Kernel
from runtime.trials.layers import TOLERANCE
from tasp_lab.core.errors import RunError

Tensor = torch.Tensor

EXACT = KERNELS["reference"]
GRADIENT_FACTOR = 2.0


class Mask(NamedTuple):
    """A band of a rectangle: query row i attends to key row j iff ``low <= i - j <= high``."""

    name: str
    queries: int
    keys: int
    low: int
    high: int


def masks(rows: int) -> tuple[Mask, ...]:
    """The kinds of masks that schedules make, on blocks of up to `rows` positions; some rows attend to no key.

    >>> [mask.name for mask in masks(300)]
    ['full', 'causal', 'strictly causal', 'window', 'half', 'odd', 'ahead', 'behind', 'row']
    """
    half, odd = rows // 2, rows - 1
    return (
        Mask("full", rows, rows, -rows, rows),
        Mask("causal", rows, rows, 0, rows),
        Mask("strictly causal", rows, rows, 1, rows),
        Mask("window", rows, rows, 0, rows // 3),
        Mask("half", half, rows, -rows, half),
        Mask("odd", odd, rows, -(rows // 5), odd // 2),
        Mask("ahead", rows, odd, -(2 * rows // 3), -(rows // 3)),
        Mask("behind", odd, rows, rows // 5, rows // 4),
        Mask("row", 1, rows // 7, -1, rows),
    )


class Checked(NamedTuple):
    """The largest errors of a kernel with a dtype over all masks, and the limits; or why it does not run here."""

    kernel: str
    dtype: str
    cases: int = 0
    forward_error: float = 0.0
    backward_error: float = 0.0
    limit: float = 0.0
    unsupported: str = ""


def check_kernels(device: torch.device, rows: int, head_dims: Sequence[tuple[int, int]]) -> Iterator[Checked]:
    """Check all kernels of attention, with heads of so many elements of keys and of values.

    Raises `RunError` for the first one that differs from float64.
    """
    for name, kernel in KERNELS.items():
        if kernel is EXACT:
            continue
        for dtype_name, dtype in DTYPES.items():
            why = [kernel.supports(dtype, device, *each) for each in head_dims]
            if any(why):
                yield Checked(name, dtype_name, unsupported=next(each for each in why if each))
                continue
            yield _check(kernel, dtype_name, dtype, device, rows, head_dims)


def _check(
    kernel: Kernel, name: str, dtype: torch.dtype, device: torch.device, rows: int,
    head_dims: Sequence[tuple[int, int]],
) -> Checked:  # fmt: skip
    limit, cases, worst = TOLERANCE[dtype], 0, (0.0, 0.0)
    for head_dim, value_dim in head_dims:
        for kv_heads in (4, 1):
            for mask in masks(rows):
                errors = _errors(kernel, mask, 4, kv_heads, (head_dim, value_dim), dtype, device)
                widths = f"head_dim {head_dim}, value_dim {value_dim}"
                what = f"kernel {kernel.name}, {name}, {widths}, {kv_heads} KV heads, mask {mask.name}"
                _require(f"{what}, forward", errors[0], limit)
                _require(f"{what}, backward", errors[1], GRADIENT_FACTOR * limit)
                worst, cases = (max(worst[0], errors[0]), max(worst[1], errors[1])), cases + 1
    return Checked(kernel.name, name, cases, *worst, limit)


def _require(what: str, error: float, limit: float) -> None:
    if not error <= limit:
        raise RunError(f"{what}: error {error:.2g} relative to float64, expected at most {limit:.2g}")


def _errors(
    kernel: Kernel, mask: Mask, heads: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype,
    device: torch.device,
) -> tuple[float, float]:  # fmt: skip
    """The larger error of out and lse, and the largest of the gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, heads: int, size: int) -> Tensor:
        return torch.randn(2, rows, heads, size, generator=generator).to(dtype).to(device)

    q, dout = (normal(mask.queries, heads, size) for size in dims)
    k, v = (normal(mask.keys, kv_heads, size) for size in dims)
    band = {"scale": dims[0] ** -0.5, "low": mask.low, "high": mask.high}
    found, exact = kernel.attend(q, k, v, **band), EXACT.attend(q, k, v, **band)
    gradients = kernel.backward(dout, q, k, v, found.out, lse_for_gradients(found.lse), **band)
    expected = EXACT.backward(dout, q, k, v, exact.out, lse_for_gradients(exact.lse), **band)
    forward = _largest([_error(found.out, exact.out), _lse_error(found, exact)])
    return forward, _largest([_error(*each) for each in zip(gradients, expected, strict=True)])


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))


def _largest(errors: Sequence[float]) -> float:
    """The largest error; NaN if any is, which Python's max may hide."""
    return float(torch.tensor(errors).max())


def _lse_error(found: Partial, exact: Partial) -> float:
    """Rows without keys have lse -inf in both, or the error is infinite."""
    seen = exact.lse.isfinite()
    if not torch.equal(found.lse.isfinite(), seen):
        return float("inf")
    return float((found.lse[seen].double() - exact.lse[seen]).abs().max()) if bool(seen.any()) else 0.0


LINEAR_LIMIT = 1e-5
"""Linear attention is computed in float32."""

DECAYS = ("none", "head", "scalar", "channel")


def check_linear_kernels(device: torch.device, positions: int) -> list[dict[str, object]]:
    """Check the kernels of linear attention, both passes, for each kind of decay. Raises `RunError`."""
    found: list[dict[str, object]] = []
    for decay in DECAYS:
        forward, backward = _linear_errors(decay, positions, device)
        _require(f"linear attention, decay {decay}, forward", forward, LINEAR_LIMIT)
        _require(f"linear attention, decay {decay}, backward", backward, GRADIENT_FACTOR * LINEAR_LIMIT)
        found.append({"decay": decay, "forward_error": forward, "backward_error": backward, "limit": LINEAR_LIMIT})
    return found


def _linear_errors(decay: str, positions: int, device: torch.device) -> tuple[float, float]:
    """Errors of outputs and state, and of all gradients, relative to the recurrence in float64."""
    inputs = _linear_inputs(decay, positions)
    generator = torch.Generator().manual_seed(1)
    ours = [each.float().to(device).requires_grad_() for each in inputs]
    exact = [each.float().double().requires_grad_() for each in inputs]
    found, expected = _by_kernels(*ours), _by_recurrence(*exact)
    douts = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in expected]
    gradients = torch.autograd.grad(found, ours, [each.float().to(device) for each in douts])
    exact_gradients = torch.autograd.grad(expected, exact, [each.float().double() for each in douts])
    pairs = zip(found, expected, strict=True), zip(gradients, exact_gradients, strict=True)
    forward, backward = (_largest([_error(a.detach().cpu(), b.detach()) for a, b in each]) for each in pairs)
    return forward, backward


def _linear_inputs(decay: str, positions: int) -> list[Tensor]:
    """Queries, keys, values, the state before the chunk and, with a decay, gates."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, kv_heads, channels = 2, 4, 2, 16

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = (normal(positions, batch, each, channels) for each in (heads, kv_heads, kv_heads))
    state = normal(batch, kv_heads, channels, channels)
    shapes = {"head": (1, 1, kv_heads, 1), "scalar": (positions, batch, kv_heads, 1)}
    gates = [] if decay == "none" else [-0.1 * normal(*shapes.get(decay, k.shape)).abs()]
    return [q, k, v, state, *gates]


def _by_kernels(q: Tensor, k: Tensor, v: Tensor, state: Tensor, gates: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs of a chunk behind a state, and the state behind the chunk."""
    out = linear.attend(q, k, v, gates) + linear.apply_state(q, state, gates)
    total = None if gates is None else linear.total_decay(gates, len(q))
    return out, linear.advance(state, linear.make_state(k, v, gates), total)


def _by_recurrence(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, gates: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same one position after the other: ``S_i = a_i S_(i-1) + k_i v_i`` and ``o_i = q_i S_i``."""
    outputs, group = [], q.shape[2] // k.shape[2]
    for at in range(len(q)):
        if gates is not None:
            state = state * torch.exp(gates[min(at, len(gates) - 1)])[..., None]
        state = state + torch.einsum("bhd,bhe->bhde", k[at], v[at])
        outputs.append(torch.einsum("bhd,bhde->bhe", q[at], state.repeat_interleave(group, 1)))
    return torch.stack(outputs), state
