"""A minimal example of attention over a sequence that is sharded over processes.

``torchrun --nproc-per-node 4 -m experiments.attention_example`` computes causal attention with rotary embeddings by
TASP, each process on its own shard, and compares the result with a single process. Without GPUs it uses gloo.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from runtime import attention, positions, shard
from tasp_lab.core.progress import print_line
from tasp_lab.schedules.build import attention_layout
from tasp_lab.workload.layer import Workload


def main() -> None:
    """Run as one of the processes that torchrun started."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layer = Workload(sequence=1000, batch=1, heads=8, kv_heads=2, head_dim=64, dtype="fp32", mask="causal")
    torch.manual_seed(0)  # the same sequence on all processes; each keeps its shard
    q, k, v = (torch.randn(1, layer.sequence, heads, layer.head_dim) for heads in (8, 2, 2))

    layout = attention_layout("tasp", layer, dist.get_world_size())
    here = positions(layout, rank)
    own_q, own_k, own_v = (shard(x, layout, rank) for x in (q, k, v))
    out = attention(rotate(own_q, here), rotate(own_k, here), own_v, schedule="tasp", causal=True)

    everywhere = torch.arange(layer.sequence)
    whole_q, whole_k, whole_v = (x.transpose(1, 2) for x in (rotate(q, everywhere), rotate(k, everywhere), v))
    alone = torch.nn.functional.scaled_dot_product_attention(whole_q, whole_k, whole_v, is_causal=True, enable_gqa=True)
    alone = alone.transpose(1, 2)
    error = float((out - shard(alone, layout, rank)).norm() / alone.norm())
    print_line(f"rank {rank}: {len(here)} of {layer.sequence} positions, error {error:.0e}", sys.stdout)
    dist.destroy_process_group()


def rotate(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [batch, positions, heads, head_dim] at global positions."""
    half = x.shape[-1] // 2
    angles = at[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


if __name__ == "__main__":
    main()
