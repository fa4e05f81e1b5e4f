"""Attention while a collective of another group runs on the same ranks, as FSDP and tensor parallelism do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from runtime import attention

HEADS, HEAD_DIM, POSITIONS = 4, 64, 128
ELEMENTS = 2**20
"""Elements of the collective: so many that it still runs when attention begins."""


def is_right_beside_a_collective(device: torch.device, rounds: int) -> bool:
    """Whether both passes of attention, and the collectives that run meanwhile, have the results that they have alone.

    The collectives are of a second communicator. Ranks that begin the kernels of both in different orders, where not
    all of them fit on the GPU at once, wait for each other for ever.
    """
    other, world_size = dist.new_group(), dist.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drawn = torch.Generator().manual_seed(dist.get_rank())
    q, k, v = (torch.randn(1, POSITIONS, HEADS, HEAD_DIM, generator=drawn).to(device, dtype) for _ in range(3))
    alone, is_right = _gradients(q, k, v), torch.tensor(True, device=device)
    for _ in range(rounds):
        ones = torch.ones(ELEMENTS, device=device)
        work = dist.all_reduce(ones, group=other, async_op=True)
        beside = _gradients(q, k, v)
        assert work is not None, "this rank is in the group"
        work.wait()
        is_right &= (ones == world_size).all()
        for found, expected in zip(beside, alone, strict=True):
            is_right &= torch.isclose(found, expected, rtol=2e-2, atol=2e-2).all()
    dist.destroy_process_group(other)
    return bool(is_right)


def _gradients(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The result of attention, and the gradients of its tensors for a loss of ones."""
    leaves = [each.detach().requires_grad_() for each in tensors]
    out = attention(*leaves, schedule="tasp", causal=True)  # type: ignore[misc]
    return (out.detach(), *torch.autograd.grad(out.sum(), leaves))
