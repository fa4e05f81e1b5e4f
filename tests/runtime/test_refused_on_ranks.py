"""Calls that cannot work are refused on all ranks, in one line, before data moves; the group can still be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from runtime import attention
from tasp_lab.schedules.attention.forward import attention as forward_schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.runtime.test_layers_on_ranks import linear
from tests.support.rank_layers import BOTH, DECAYS, Shard
from tests.support.refusals import check_refusals

pytestmark = pytest.mark.distributed

LAYER = Workload(32, heads=4, kv_heads=2, head_dim=64, dtype="fp32", mask="full")
LINEAR_LAYER = linear(16)

Keywords = dict[str, Any]


class Refused(NamedTuple):
    """What both ranks are told, or rank 0 and rank 1; and what a call has that cannot work, by whether a rank is odd.

    `keywords` are those of the call, `change` may exchange tensors; rank 1 is odd.
    """

    told: str | tuple[str, str]
    keywords: Callable[[bool], Keywords] = lambda odd: {}
    change: Callable[[Shard, bool], object] = lambda here, odd: None
    gradients: bool = False

    @property
    def expected(self) -> tuple[str, str]:
        return (self.told, self.told) if isinstance(self.told, str) else self.told


def of_odd(**keywords: Any) -> Callable[[bool], Keywords]:
    """Keywords of the odd rank alone."""
    return lambda odd: keywords if odd else {}


def of_all(**keywords: Any) -> Callable[[bool], Keywords]:
    return lambda odd: keywords


def options(odd: Keywords, even: Keywords | None = None) -> Callable[[bool], Keywords]:
    """`AttentionOptions` of both passes with some fields, on the odd rank and on the other one."""
    return lambda is_odd: {"options": replace(BOTH, **(odd if is_odd else even or {}))}


def tensors(function: Callable[[torch.Tensor], torch.Tensor], names: str = "qkv", all_ranks: bool = False) -> Any:
    """Change tensors on the odd rank, or on all."""

    def change(here: Shard, odd: bool) -> None:
        for name in names if odd or all_ranks else "":
            setattr(here, name, function(getattr(here, name).detach()))

    return change


ANOTHER: Keywords = {
    "passes": "forward", "trim": False, "buffers": 4, "dataflow": "rotate-q", "gradient_dtype": "input",
    "result_dtype": "input", "tail_chunks": 2, "stages": 2, "groups": "strided", "padded_heads": True,
    "travels": "keys", "pieces": 2, "direction": "descending",
}  # fmt: skip
"""For each option a value that is not its default where both passes are asked for."""


def given_schedule(odd: bool) -> Keywords:
    return {"schedule": forward_schedule("tasp", full_mesh(2), LAYER, **({"buffers": 4} if odd else {}))}


def wants(here: Shard, is_wanted: bool) -> None:
    here.q, here.k, here.v, here.dout = (x.detach().requires_grad_(is_wanted) for x in (*here.inputs, here.dout))


def halved(names: str) -> Callable[[Shard, bool], None]:
    """Tensors of the odd rank in float16, with gradients."""

    def change(here: Shard, odd: bool) -> None:
        for name in names.split() if odd else ():
            setattr(here, name, getattr(here, name).detach().half().requires_grad_(name != "dout"))

    return change


SOFTMAX = {
    "schedules": Refused("rank 1: schedule is zigzag-ring-attention, on rank 0 it is tasp",
                         of_odd(schedule="zigzag-ring-attention")),
    "schedule objects": Refused("rank 1: schedule is tasp ", given_schedule),
    "rings": Refused("rank 1: buffers is 4, on rank 0 it is 2", lambda odd: {
        "topology": full_mesh(2), "options": AttentionOptions(buffers=4 if odd else 2)}),
    "batch": Refused("rank 1: batch is 2, on rank 0 it is 1", change=tensors(lambda x: torch.cat([x, x]))),
    "lengths": Refused("rank 0 has 16 of 30 positions, the contiguous layout of tasp assigns 15 to it",
                       change=tensors(lambda x: x[:, 2:])),
    "heads": Refused(
        ("rank 1: 3 heads are not a multiple of 2 KV heads", "3 heads are not a multiple of 2 KV heads"),
        change=tensors(lambda x: x[:, :, :3], "q")),
    "dtype": Refused("q is torch.float64, which is not supported, expected one of torch.",
                     change=tensors(torch.Tensor.double, all_ranks=True)),
    "dtypes": Refused("rank 1: dtype is bf16, on rank 0 it is fp32", change=tensors(torch.Tensor.bfloat16)),
    "dtypes of k": Refused(
        ("rank 1: k is torch.bfloat16 on cpu, q is torch.float32 on cpu", "k is torch.bfloat16 on cpu"),
        change=tensors(torch.Tensor.bfloat16, "k")),
    "kernel": Refused(("rank 1: ", "flash-attn"), of_odd(kernel="flash-attn")),
    "name": Refused("schedule 'ring' is an AllGather, expected one for softmax attention: ",
                    of_all(schedule="ring")),
    "dimensions": Refused("q is [16, 4, 64], expected [batch, positions, heads, head_dim]",
                          change=tensors(lambda x: x[0], "q", all_ranks=True)),
    "masks": Refused("rank 1: mask is causal, on rank 0 it is full", of_odd(causal=True)),
    "window": Refused("window: 5 with the mask full, expected a causal mask", of_all(window=5)),
    "gradients of a rank": Refused("rank 1: gradients is True, on rank 0 it is False",
                                   change=lambda here, odd: here.v.requires_grad_(odd)),
    "scale": Refused("scale: nan, expected a finite number", of_all(scale=float("nan"))),
    "backward alone": Refused("passes is backward, expected both, or forward where no gradients are wanted",
                              of_all(options=AttentionOptions("backward"))),
    **{
        each.name: Refused(f"rank 1: {each.name} is {ANOTHER[each.name]}, on rank 0 it is {getattr(BOTH, each.name)}",
                           options({each.name: ANOTHER[each.name]}))
        for each in fields(AttentionOptions)
    },
    # where gradients are wanted
    "all but one": Refused("rank 1: gradients is False, on rank 0 it is True",
                           change=lambda here, odd: wants(here, not odd), gradients=True),
    "both dataflows": Refused("rank 1: dataflow is rotate-kv, on rank 0 it is rotate-q",
                              options({"dataflow": "rotate-kv"}, {"dataflow": "rotate-q"}), gradients=True),
    "dtype of gradients": Refused("rank 1: gradient_dtype is input, on rank 0 it is fp32",
                                  options({"gradient_dtype": "input"}, {"gradient_dtype": "fp32"}), gradients=True),
    "half of a rank": Refused("rank 1: dtype is fp16, on rank 0 it is fp32", change=halved("q k v dout"),
                              gradients=True),
    "dtype of v": Refused(
        ("rank 1: v is torch.float16 on cpu, q is torch.float32 on cpu", "v is torch.float16 on cpu"),
        change=halved("v"), gradients=True),
    "documents": Refused("rank 1: documents is 2 documents of 30 positions",
                         lambda odd: {"cu_seqlens": [0, 20, 30] if odd else [0, 20, 32]}, gradients=True),
    "documents of all": Refused("documents: 30 positions together, expected 32", of_all(cu_seqlens=[0, 20, 30]),
                                gradients=True),
    "documents or none": Refused("rank 1: documents is 2 documents of 32 positions", of_odd(cu_seqlens=[0, 20, 32]),
                                 gradients=True),
    "forward alone": Refused("options: passes is forward, expected both, for gradients are wanted",
                             of_all(options=AttentionOptions("forward")), gradients=True),
}  # fmt: skip


def state(*shape: int) -> torch.Tensor:
    return torch.zeros(*(shape or (1, 2, 5, 5)))


def first_state(**keywords: Any) -> Callable[[bool], Keywords]:
    """A state on rank 0, where it belongs."""
    return lambda odd: {"initial_state": None if odd else state(), **keywords}


def gates(shape: tuple[int, ...] = (1, 8, 2)) -> torch.Tensor:
    return torch.full(shape, -0.5)


def softmax_on_the_odd_rank(here: Shard, odd: bool) -> None:
    if odd:
        attention(here.q, here.k, here.v, schedule="lasp-2", causal=True)


def softmax_on_all_ranks(here: Shard, odd: bool) -> None:
    attention(here.q, here.k, here.v, schedule="lasp", causal=True)


LINEAR = {
    "decay": Refused("rank 1: decays is 0.5 to 0.75", lambda odd: {"decay": [0.5, 0.75] if odd else DECAYS}),
    "gates": Refused("rank 1: decay is channel, on rank 0 it is scalar",
                     lambda odd: {"gates": gates((1, 8, 2, 5) if odd else (1, 8, 2))}),
    "schedule": Refused("rank 1: schedule is lasp, on rank 0 it is lasp-2", of_odd(schedule="lasp")),
    "mask": Refused("rank 1: mask is full, on rank 0 it is causal", of_odd(causal=False)),
    "pieces": Refused("rank 1: pieces is 2, on rank 0 it is None", options({"pieces": 2})),
    "softmax": Refused("rank 1: kind is softmax, on rank 0 it is linear", change=softmax_on_the_odd_rank),
    "lengths": Refused("rank 0 has 8 of 14 positions, the contiguous layout of lasp-2 assigns 7 to it",
                       change=tensors(lambda x: x[:, 2:])),
    "decay above 1": Refused(
        ("rank 1: decay of KV head 1: 1.5, expected a number", "decay of KV head 1: 1.5, expected a"),
        lambda odd: {"decay": [0.5, 1.5] if odd else DECAYS}),
    "decay of one head": Refused("decay: 1 given, expected 2 numbers, one per KV head", of_all(decay=[0.5])),
    "decay and gates": Refused("decay and gates are both given, expected one of them",
                               of_all(decay=DECAYS, gates=gates())),
    "nan": Refused(("rank 1: gates: nan, expected finite numbers of at most 0", "gates: nan, expected finite numbers"),
                   lambda odd: {"gates": gates() * (float("nan") if odd else 1)}),
    "positive gates": Refused("gates: 0.25, expected finite numbers of at most 0, the logarithms of decays",
                              of_all(gates=gates() * -0.5)),
    "shape of gates": Refused(
        "gates are [1, 8, 3], k is [1, 8, 2, 5], expected the shape of k with or without its last",
        of_all(gates=gates((1, 8, 3)))),
    "dtype of gates": Refused("gates are torch.float64 on cpu, expected torch.float32 on cpu",
                              of_all(gates=gates().double())),
    "width of v": Refused("rank 1: value_dim is 3, on rank 0 it is 5", change=tensors(lambda x: x[..., :3], "v")),
    "width 0 of v": Refused("value dim: 0, expected 1 or more",
                            change=tensors(lambda x: x[..., :0], "v", all_ranks=True)),
    "heads of v": Refused("v is [1, 8, 1, 5], expected equal batch, positions and head_dim, and equal shapes of",
                          change=tensors(lambda x: x[:, :, :1], "v", all_ranks=True)),
    "full mask with decay": Refused("decay 'scalar' with a full mask has no agreed meaning",
                                    of_all(gates=gates(), causal=False)),
    "chain with full mask": Refused("schedule 'lasp' passes states from chunk to chunk, expected a causal mask",
                                    of_all(schedule="lasp", causal=False)),
    "ring with gates": Refused("decay 'scalar' depends on the data of all chunks in between",
                               of_all(schedule="ring-linear-attention", gates=gates())),
    "softmax schedule": Refused("schedule 'tasp' is for softmax attention, expected one for linear attention: lasp",
                                of_all(schedule="tasp")),
    "options of another": Refused("schedule 'lasp-2': buffers 4 does not apply to it, expected 3",
                                  of_all(options=AttentionOptions("both", buffers=4))),
    "backward alone": Refused("passes is backward, expected both, or forward where no gradients are wanted",
                              of_all(options=AttentionOptions("backward"))),
    "linear schedule of softmax": Refused(
        "schedule 'lasp' is for linear attention, expected one for softmax attention", change=softmax_on_all_ranks),
    "topology": Refused("the topology has 3 ranks, the group 2",
                        of_all(schedule="direct-lasp-2", topology=full_mesh(3))),
    "decay 0": Refused("decay of KV head 0: 0.0, expected a number above 0 and at most 1", of_all(decay=[0.0, 0.5])),
    "decay nan": Refused("decay of KV head 0: nan, expected a number above 0 and at most 1",
                         of_all(decay=[float("nan"), 0.5])),
    "decay for all heads": Refused("decay: 0.5, expected 2 numbers, one per KV head", of_all(decay=0.5)),
    "decay per channel": Refused("decay: [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]], expected 2 numbers",
                                 of_all(decay=torch.full((2, 3), 0.5))),
    "decay of words": Refused("decay: ['fast', 'slow'], expected 2 numbers", of_all(decay=["fast", "slow"])),
    "gradients of another dtype": Refused("schedule 'lasp-2': gradient dtype 'input' does not apply to it",
                                          options({"gradient_dtype": "input"}, {"gradient_dtype": "input"}),
                                          gradients=True),
    "unknown kernel": Refused("unknown linear attention kernel 'flash', expected auto, fla, torch",
                              of_all(kernel="flash")),
    "kernel of gpus": Refused("the linear attention kernel fla cannot run on cpu: it runs on cuda, not cpu",
                              of_all(kernel="fla")),
    "state in bf16": Refused("initial_state is torch.bfloat16, expected torch.float32: a sum over many positions loses",
                             lambda odd: {"initial_state": None if odd else state().bfloat16()}),
    "shape of state": Refused("initial_state is [2, 5, 5], expected [1, 2, 5, 5]: batch, kv_heads, head_dim of k and",
                              lambda odd: {"initial_state": None if odd else state(2, 5, 5)}),
    "state on rank 1": Refused(
        "initial_state is given on rank 1, expected rank 0 alone, which has the first position",
        lambda odd: {"initial_state": state() if odd else None}),
    "state on all ranks": Refused("initial_state is given on rank 0, 1, expected rank 0 alone",
                                  of_all(initial_state=state())),
    "state with documents": Refused("initial_state with cu_seqlens: every document begins with a state of its own",
                                    first_state(cu_seqlens=[0, 16])),
    "state with full mask": Refused("initial_state with causal=False: every query sees all keys, expected a causal",
                                    first_state(causal=False)),
    "state of keys": Refused("schedule 'ring-linear-attention': initial_state does not apply to it, as it moves keys",
                             first_state(schedule="ring-linear-attention")),
    "last state of one rank": Refused("rank 1: final_state is True, on rank 0 it is False",
                                      lambda odd: {"return_final_state": odd}),
    "last state with documents": Refused("return_final_state with cu_seqlens: every document begins with",
                                         of_all(return_final_state=True, cu_seqlens=[0, 16])),
    "state of no positions": Refused("initial_state with 0 positions, expected at least 1", first_state(),
                                     tensors(lambda x: x[:, :0], all_ranks=True)),
}  # fmt: skip


def refuse(case: Refused, work: Workload, schedule: str) -> None:
    """On a rank: a call that cannot work."""
    here, odd = Shard(work, schedule), dist.get_rank() == 1
    wants(here, case.gradients)
    case.change(here, odd)
    out = here.attend(**case.keywords(odd))
    if case.gradients:
        torch.autograd.grad(out, here.inputs, here.dout)


NOTHING = Refused("")


def softmax_on_rank(change: str) -> None:
    refuse(SOFTMAX.get(change, NOTHING), LAYER, "tasp")


def linear_on_rank(change: str) -> None:
    refuse(LINEAR.get(change, NOTHING), LINEAR_LAYER, "lasp-2")


def test_softmax_attention() -> None:
    check_refusals(softmax_on_rank, {name: case.expected for name, case in SOFTMAX.items()})


def test_linear_attention() -> None:
    check_refusals(linear_on_rank, {name: case.expected for name, case in LINEAR.items()})
