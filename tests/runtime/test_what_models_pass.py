"""What models hand to a layer beside plain tensors: meshes of devices, and inputs under autocast."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from runtime import attention
from tasp_lab.core.errors import RunError


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
