"""Gradients of a chunk of linear attention: vector-Jacobian products of its forward kernels, by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


class Chunk(NamedTuple):
    """What outputs and states of a chunk depend on; queries are None where only states count."""

    q: Any
    k: Any
    v: Any
    gates: Tensor | None
    before: Tensor | None


Forward = Callable[[Chunk], Sequence[Tensor]]
"""Outputs and states of a chunk."""


def gradients_of(
    forward: Forward, chunk: Chunk, wanted: Sequence[bool], gradients: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The products of gradients with the Jacobians of a function, in float32, for the inputs that are wanted."""
    with torch.enable_grad():
        inputs = [None if each is None else _copy(each) for each in chunk]
        leaves = [x.requires_grad_() for x, each in zip(inputs, wanted, strict=True) if each and x is not None]
        out = forward(Chunk(*inputs))
        like = [gradient.to(each.dtype) for each, gradient in zip(out, gradients, strict=True)]
        found = iter(torch.autograd.grad(out, leaves, like, materialize_grads=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


def _copy(operand: Tensor) -> Tensor:
    """A float32 copy for automatic differentiation, which refuses tensors of a memory that changes anywhere."""
    return operand.detach().to(torch.float32, copy=True)
