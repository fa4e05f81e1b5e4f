"""Models that contain attention, under torch.compile: the same numbers, and one graph break per call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime import attention
from tasp_lab.workload.layer import Workload
from tests.support.rank_layers import Shard
from tests.support.ranks import on_ranks, succeeded

pytestmark = pytest.mark.distributed

LAYER = Workload(19, heads=4, kv_heads=2, head_dim=16, dtype="fp32", mask="causal")


class Model(torch.nn.Module):
    """Two layers of attention, with something to compile before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.project = torch.nn.Linear(16, 16)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first = attention(self.project(q) * 2, k.sin(), v, causal=True)
        second = attention(first.cos(), self.project(k), v, causal=True)
        return second.tanh() + q


def compiled(function: Callable[..., Any], fullgraph: bool = False) -> tuple[Callable[..., Any], list[int]]:
    """The function by a compiler that only counts the graphs it is given; the backward pass is torch's own."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(len(inputs))
        return graph.forward

    return torch.compile(function, backend=backend, fullgraph=fullgraph), graphs


def compiled_on_rank() -> tuple[int, str]:
    """On a rank: how many graphs a model makes, and what torch says where it must not break."""
    here, model = Shard(LAYER, "tasp"), Model()
    wanted = [*here.inputs, *model.parameters()]
    expected = [model(*here.inputs)]
    expected += torch.autograd.grad(expected[0], wanted, here.dout)
    again, graphs = compiled(model)
    for _ in range(2):  # the second time nothing is compiled anew
        found = [again(*here.inputs)]
        found += torch.autograd.grad(found[0], wanted, here.dout)
        torch.testing.assert_close(found, expected)
    with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
        compiled(model, fullgraph=True)[0](*here.inputs)
    return len(graphs), str(refused.value)


def test_a_compiled_model_gives_the_same_result_and_gradients() -> None:
    """Three graphs, around two calls of attention; with fullgraph torch names the function that it would not enter."""
    for graphs, refused in succeeded(on_ranks(compiled_on_rank, 2)):
        assert graphs == 3
        assert "torch.compiler.disable" in refused
        assert "function attention" in refused


def step_on_rank() -> int:
    """On a rank: how many graphs a training step makes, forward and backward in one function."""
    here, model = Shard(LAYER, "tasp"), Model()

    def step() -> None:
        (model(*here.inputs) * here.dout).sum().backward()

    wanted = [*here.inputs, *model.parameters()]
    expected = torch.autograd.grad(model(*here.inputs), wanted, here.dout)
    whole, graphs = compiled(step)
    whole()
    torch.testing.assert_close([x.grad for x in wanted], list(expected))
    return len(graphs)


def test_a_backward_pass_is_not_compiled_either() -> None:
    """The step breaks at both calls of attention and where it calls backward: at most four graphs."""
    assert max(succeeded(on_ranks(step_on_rank, 2))) <= 4
