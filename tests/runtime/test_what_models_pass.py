"""What models hand to a layer beside plain tensors: meshes of devices, and inputs under autocast."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from runtime import attention, linear_attention, relayout
from tasp_lab.core.errors import RunError
from tasp_lab.workload.sequence_layout import contiguous


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 8, heads, 16, requires_grad=True) for heads in (4, 2, 2)]


def test_a_mesh_of_one_dimension_is_its_group() -> None:
    expected = attention(*tensors(), schedule="ring-attention")
    assert torch.equal(attention(*tensors(), schedule="ring-attention", group=init_device_mesh("cpu", (1,))), expected)


def test_linear_attention_and_a_change_of_layout_take_meshes() -> None:
    mesh, (q, k, v), layout = init_device_mesh("cpu", (1,)), tensors(), contiguous(8, 1)
    assert torch.equal(linear_attention(q, k, v, group=mesh), linear_attention(q, k, v))
    assert torch.equal(relayout(q, layout, layout, mesh), q)
    two = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    for call in (lambda: linear_attention(q, k, v, group=two), lambda: relayout(q, layout, layout, two)):
        with pytest.raises(RunError, match="a mesh of 2 dimensions, expected one of them"):
            call()


def test_a_mesh_of_two_dimensions_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    with pytest.raises(RunError, match="a mesh of 2 dimensions, expected one of them"):
        attention(*tensors(), schedule="ring-attention", group=mesh)
    assert attention(*tensors(), schedule="ring-attention", group=mesh["cp"]).shape == (1, 8, 4, 16)


def test_inputs_are_cast_under_autocast_as_torchs_attention_casts_them() -> None:
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(q, k, v, schedule="ring-attention")
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert (found - expected.transpose(1, 2)).abs().max() < 2e-2
    found.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_linear_attention_casts_its_inputs_under_autocast_and_a_change_of_layout_does_not() -> None:
    q, k, v = tensors()
    layout = contiguous(8, 1)
    with torch.autocast("cpu", torch.bfloat16):
        found, moved = linear_attention(q, k, v), relayout(q, layout, layout)
    lower = [each.detach().bfloat16() for each in (q, k, v)]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, linear_attention(*lower))
    assert torch.equal(moved, q)
    found.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
