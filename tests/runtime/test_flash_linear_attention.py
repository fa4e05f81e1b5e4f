"""The kernel fla with a stand-in for flash-linear-attention that has its operators' signatures and checks."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from runtime.kernels import linear_attention
from runtime.kernels.linear_registry import LINEAR_KERNELS, choose_linear_kernel
from tasp_lab.core.errors import RunError
from tests.support.linear_recurrence import recurrence

Tensor = torch.Tensor

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class Operators:
    """Stand-ins of ``chunk_simple_gla`` and ``chunk_gla`` of release 0.6: same parameters, layouts and defaults."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lengths: list[Tensor | None] = []

    def chunk_simple_gla(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
        scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
        state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert g is None or g_gamma is None, "one of both"
        assert g is None or (g.shape == q.shape[:3] and g.dtype == torch.float32)
        assert g_gamma is None or (g_gamma.shape == q.shape[2:3] and g_gamma.dtype == torch.float32)
        self.calls.append("constant" if g_gamma is not None else "none" if g is None else "scalar")
        gates = g if g_gamma is None else g_gamma.expand(q.shape[:3])
        return self._computed(q, k, v, gates, scale, cu_seqlens), None

    def chunk_gla(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False, state_v_first: bool = False,
        cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert q.shape == k.shape == g.shape, "q, k, g must have the same shape."
        self.calls.append("channel")
        return self._computed(q, k, v, g, scale, cu_seqlens), None

    def _computed(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, scale: float | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        assert q.shape == k.shape, "as many heads of keys as of queries"
        assert q.dtype == k.dtype == v.dtype, "one dtype"
        self.lengths.append(cu_seqlens)
        assert all(each.is_contiguous() for each in (q, k, v))
        starts = frozenset() if cu_seqlens is None else frozenset(cu_seqlens.tolist())
        assert cu_seqlens is None or (q.shape[0] == 1 and max(starts) == q.shape[1] and not min(starts))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out, _ = recurrence(q.double() * scale, k.double(), v.double(), gates, starts=starts)
        return out.to(v.dtype)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Operators:
    found = Operators()
    for name, contents in {
        "fla": {}, "fla.ops": {}, "fla.ops.simple_gla": {"chunk_simple_gla": found.chunk_simple_gla},
        "fla.ops.gla": {"chunk_gla": found.chunk_gla},
    }.items():  # fmt: skip
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return found


def random_chunk(decay: str, positions: int = 21) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    shapes: dict[str, tuple[int, ...]] = {
        "head": (1, 1, 2, 1), "scalar": (positions, 2, 2, 1), "channel": (positions, 2, 2, 4),
    }  # fmt: skip
    gates = -0.3 * normal(*shapes[decay]).abs() if decay in shapes else None
    return normal(positions, 2, 4, 4), normal(positions, 2, 2, 4), normal(positions, 2, 2, 4), gates


@pytest.mark.parametrize("starts", [(), (0,), (0, 5, 20), (7,)])
@pytest.mark.parametrize(("decay", "called"), [("none",) * 2, ("head", "constant"), ("scalar",) * 2, ("channel",) * 2])
def test_outputs_and_gradients_are_those_of_the_torch_kernel(
    operators: Operators, decay: str, called: str, starts: tuple[int, ...]
) -> None:
    """GQA, batches, documents: the operators get one head of keys per query head, and scale 1."""
    q, k, v, gates = random_chunk(decay)
    found: list[list[Tensor]] = []
    for attend in (linear_attention.attend, LINEAR_KERNELS["fla"].attend(torch.float32)):
        leaves: list[Any] = [each.clone().requires_grad_() for each in (q, k, v)]
        given = None if gates is None else gates.clone().requires_grad_(decay != "head")
        wanted = leaves if given is None or decay == "head" else [*leaves, given]
        out = attend(*leaves, given, starts)
        assert out.dtype == torch.float32
        found.append([out.detach(), *torch.autograd.grad(out, wanted, torch.cos(out.detach()))])
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert float((ours - theirs).norm()) < 1e-5 * float(ours.norm())
    assert operators.calls == [called]


def test_inputs_are_rounded_to_their_own_dtype_and_nothing_is_called_without_positions(operators: Operators) -> None:
    """A backward pass differentiates with respect to float32 copies of inputs in half precision."""
    attend = LINEAR_KERNELS["fla"].attend(torch.bfloat16)
    q, k, v, gates = random_chunk("scalar")
    out = attend(q, k, v, gates)
    assert torch.equal(out, out.bfloat16().float())
    expected = linear_attention.attend(q, k, v, gates)
    assert float((out - expected).norm()) < 2**-7 * float(expected.norm())
    calls = len(operators.calls)
    assert attend(q[:0], k[:0], v[:0]).shape == (0, 2, 4, 4)
    assert len(operators.calls) == calls


def test_it_is_chosen_on_gpus_where_it_is_installed(operators: Operators) -> None:
    assert choose_linear_kernel("auto", torch.bfloat16, GPU).name == "fla"
    for dtype, device in ((torch.float32, GPU), (torch.float16, CPU)):
        assert choose_linear_kernel("auto", dtype, device).name == "torch"
    with pytest.raises(RunError, match=r"fla cannot run on cuda: it supports torch.float16 and torch.bfloat16, not"):
        choose_linear_kernel("fla", torch.float32, GPU)


def test_without_it_the_torch_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.ops.simple_gla", None)
    assert choose_linear_kernel("auto", torch.bfloat16, GPU).name == "torch"
    with pytest.raises(RunError, match="fla cannot run on cuda: flash-linear-attention does not import: "):
        choose_linear_kernel("fla", torch.bfloat16, GPU)


def test_where_documents_begin_is_copied_to_a_gpu_once(operators: Operators) -> None:
    """A copy in each pass would make the host wait for the GPU."""
    attend = LINEAR_KERNELS["fla"].attend(torch.float32)
    x = torch.randn(8, 1, 2, 4)
    for _ in range(2):
        attend(x, x, x, None, (0, 3))
    first, second = operators.lengths
    assert first is not None
    assert first is second
