"""A small model trained on all ranks and, for comparison, by this rank alone.

The model is an embedding, attention blocks with a residual connection, and a projection to the vocabulary. Only
attention combines positions, so on a shard the loss of a position is that of the whole sequence. Weights are float32;
attention is computed in the dtype that is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from runtime.executor.views import DTYPES
from runtime.sequence_parallel.api import attention
from runtime.sequence_parallel.sharding import shard
from tasp_lab.schedules.build import attention_layout
from tasp_lab.workload.layer import Workload

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

VOCABULARY = 64
LEARNING_RATE = 0.1
SEED = 0


@dataclass(frozen=True)
class Recipe:
    """What is trained; `sequence` is that of all ranks together."""

    sequence: int
    heads: int
    head_dim: int
    layers: int = 2
    steps: int = 20
    schedule: str = "tasp"


@dataclass(frozen=True)
class Trained:
    """The loss of every step, and the GPU memory that was reserved after each.

    `learnt` is by how much the weights before attention have changed: only gradients through attention change them.
    """

    losses: tuple[float, ...]
    reserved_bytes: tuple[int, ...]
    learnt: Tensor


class SmallModel(nn.Module):
    """Logits [batch, positions, vocabulary] of tokens [batch, positions]."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype, attend: Attend) -> None:
        super().__init__()
        width = recipe.heads * recipe.head_dim
        self._attend, self._dtype, self._head_dim = attend, dtype, recipe.head_dim
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.inputs = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(recipe.layers))
        self.results = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(recipe.layers))
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for inputs, result in zip(self.inputs, self.results, strict=True):
            heads = inputs(x).to(self._dtype).unflatten(-1, (3, -1, self._head_dim))
            out = self._attend(*heads.unbind(2))
            x = x + result(out.flatten(-2).to(x.dtype))
        logits: Tensor = self.output(x)
        return logits


def train_together(recipe: Recipe, dtype: str, device: torch.device) -> Trained:
    """Train with the sequence spread over all ranks of the default group; a collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layer = Workload(recipe.sequence, heads=recipe.heads, head_dim=recipe.head_dim, dtype=dtype, mask="causal")
    layout = attention_layout(recipe.schedule, layer, world_size)

    def share(model: nn.Module, loss: Tensor) -> Tensor:
        for each in (*(parameter.grad for parameter in model.parameters()), loss):
            dist.all_reduce(each)
        return loss

    attend = partial(attention, schedule=recipe.schedule, causal=True)
    return _train(recipe, dtype, device, attend, lambda tokens: shard(tokens, layout, rank), share)


def train_alone(recipe: Recipe, dtype: str, device: torch.device) -> Trained:
    """Train with torch's own attention on the whole sequence, without communication."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return _train(recipe, dtype, device, attend, lambda tokens: tokens, lambda _, loss: loss)


def _train(
    recipe: Recipe,
    dtype: str,
    device: torch.device,
    attend: Attend,
    own: Callable[[Tensor], Tensor],
    share: Callable[[nn.Module, Tensor], Tensor],
) -> Trained:
    """Train on `own` part of each batch; `share` adds gradients and the loss over ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = SmallModel(recipe, DTYPES[dtype], attend)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    drawn = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (1, recipe.sequence + 1), generator=drawn).to(device)
    losses, reserved, first = [], [], _before_attention(model)
    for _ in range(recipe.steps):
        optimizer.zero_grad(set_to_none=False)
        logits = model(own(tokens[:, :-1]))
        loss = cross_entropy(logits.flatten(0, 1), own(tokens[:, 1:]).flatten(), reduction="sum") / recipe.sequence
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(share(model, loss.detach())))
        optimizer.step()
        reserved.append(torch.cuda.memory_reserved(device) if device.type == "cuda" else 0)
    return Trained(tuple(losses), tuple(reserved), _before_attention(model) - first)


def _before_attention(model: SmallModel) -> Tensor:
    """The weights that make queries, keys and values, as one copy."""
    return torch.cat([each.detach().flatten() for each in model.inputs.parameters()])


def difference_of_losses(found: Trained, expected: Trained) -> float:
    """The largest relative difference of losses.

    >>> none = torch.zeros(0)
    >>> difference_of_losses(Trained((1.0, 3.0), (), none), Trained((1.0, 2.0), (), none))
    0.5
    """
    ours, theirs = torch.tensor(found.losses), torch.tensor(expected.losses)
    return float(((ours - theirs) / theirs).abs().max())  # NaN if any loss is


def difference_learnt(found: Trained, expected: Trained) -> float:
    """The difference of what both have learnt, relative in norm.

    >>> difference_learnt(Trained((), (), torch.tensor([0.0, 3.0])), Trained((), (), torch.tensor([0.0, 2.0])))
    0.5
    """
    return float((found.learnt - expected.learnt).norm() / expected.learnt.norm())


def grows_after(reserved_bytes: tuple[int, ...], step: int) -> int:
    """By how many bytes the reserved memory grew after a step, the first of which is 1.

    >>> grows_after((1, 5, 7, 7, 8), 3), grows_after((1, 5, 7, 7, 7), 3)
    (1, 0)
    """
    return max(reserved_bytes[step - 1 :]) - reserved_bytes[step - 1]
