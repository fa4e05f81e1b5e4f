"""Linear attention on real processes: outputs and all gradients against the recurrence in float64, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from runtime import attention, linear_attention
from runtime.executor.views import DTYPES
from runtime.sequence_parallel.sharding import shard
from tasp_lab.core.errors import RunError
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import linear_schedules
from tasp_lab.schedules.registry import LINEAR, state_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import contiguous
from tests.support.linear_recurrence import recurrence
from tests.support.ranks import on_ranks, succeeded
from tests.support.refusals import check_refusals
from tests.support.sent_bytes import SentBytes

pytestmark = pytest.mark.distributed

Tensor = torch.Tensor

DECAYS = (0.75, 0.96875)
"""Constant decays of two KV heads."""

DOCUMENTS = (13, 0, 1, 30, 15)
"""One longer than a shard on three ranks or more, an empty one, and some that start and end within a shard."""


def layer(sequence: int = 61, **fields: Any) -> Workload:
    usual: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 5, "dtype": "fp32", "mask": "causal"}
    return Workload(sequence, **(usual | fields), kind="linear")


LAYERS = [
    *(layer(batch=2, decay=decay) for decay in ("none", "head", "scalar", "channel")),
    *(layer(sum(DOCUMENTS), documents=DOCUMENTS, decay=decay) for decay in ("none", "head", "scalar", "channel")),
    layer(mask="full"),
    layer(5, decay="scalar"),
    layer(3, decay="none"),
]
"""Every decay with uneven lengths and with packed documents, a full mask, and layers that leave some ranks nothing."""


def takes(name: str, work: Workload) -> bool:
    """Whether a schedule applies: rings of keys do not without data-dependent decay, chains of states need an order."""
    if name.startswith("ring-linear-attention"):
        return work.decay in ("none", "head")
    return work.mask == "causal" or name not in ("lasp", "all-scan")


def cases() -> list[tuple[Workload, str]]:
    return [(work, name) for work in LAYERS for name in LINEAR if takes(name, work)]


class Inputs(NamedTuple):
    """Of a whole layer, the same in every process; the gates are None unless decays depend on the data."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor | None
    dout: Tensor


def inputs_of(work: Workload) -> Inputs:
    random = torch.Generator().manual_seed(3)
    positions = work.batch, work.sequence

    def normal(*shape: int) -> Tensor:
        return torch.randn(*positions, *shape, generator=random).to(DTYPES[work.dtype])

    q, dout = (normal(work.heads, work.head_dim) for _ in range(2))
    k, v = (normal(work.kv_head_count, work.head_dim) for _ in range(2))
    per = {"scalar": (work.kv_head_count,), "channel": (work.kv_head_count, work.head_dim)}
    gates = -0.3 * normal(*per[work.decay]).abs().float() if work.decay in per else None
    return Inputs(q, k, v, gates, dout)


@cache
def exact(work: Workload) -> Sequence[Tensor]:
    """The outputs and the gradients of q, k, v and the gates if there are any."""
    *given, dout = inputs_of(work)
    leaves = [each.double().requires_grad_() for each in given if each is not None]
    q, k, v, *gates = leaves
    if work.mask == "full":
        users = work.heads // work.kv_head_count
        out = torch.einsum("bihd,bjhd,bjhe->bihe", q, *(each.repeat_interleave(users, 2) for each in (k, v)))
    else:
        starts = frozenset(accumulate(work.documents or (), initial=0))
        out, _ = recurrence(q, k, v, *gates, decays=DECAYS if work.decay == "head" else None, starts=starts)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]


Run = tuple[list[tuple[float, float]], int]
"""Of each output the squares of its error and of what was expected; and the bytes that a rank sent."""


def run_on_rank(given: list[tuple[Workload, str]], options: AttentionOptions) -> list[Run]:
    """On a rank: both passes of every layer by every schedule."""
    sent = SentBytes()
    found = []
    for work, name in given:
        sent.count = 0
        here = contiguous(work.sequence, dist.get_world_size())
        *leaves, dout = (None if x is None else shard(x, here, dist.get_rank()) for x in inputs_of(work))
        wanted = [each.requires_grad_() for each in leaves if each is not None]
        out = run(work, name, leaves, options)
        ours = [out.detach(), *torch.autograd.grad(out, wanted, dout)]
        assert [each.dtype for each in ours] == [out.dtype, *(each.dtype for each in wanted)]
        squares = []
        for each, whole in zip(ours, exact(work), strict=True):
            expected = shard(whole, here, dist.get_rank())
            squares.append((float((each.double() - expected).square().sum()), float(expected.square().sum())))
        found.append((squares, sent.count))
    return found


def run(work: Workload, name: str, leaves: Sequence[Tensor | None], options: AttentionOptions) -> Tensor:
    q, k, v, gates = leaves
    assert q is not None, "there are queries"
    assert k is not None, "there are keys"
    assert v is not None, "there are values"
    return linear_attention(
        q,
        k,
        v,
        decay=DECAYS if work.decay == "head" else None,
        gates=gates,
        schedule=name,
        causal=work.mask == "causal",
        cu_seqlens=None if work.documents is None else list(accumulate(work.documents, initial=0)),
        options=options,
    )


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_outputs_and_gradients_are_those_of_the_recurrence(world_size: int) -> None:
    """And the bytes that go to the transport are those of the ledger."""
    given, options = cases(), AttentionOptions("both")
    assert {name for _, name in given} == set(LINEAR)
    parts = succeeded(on_ranks(run_on_rank, world_size, given, options))
    for (work, name), *of_ranks in zip(given, *parts, strict=True):
        for each in zip(*(squares for squares, _ in of_ranks), strict=True):
            error = (sum(x for x, _ in each) / sum(y for _, y in each)) ** 0.5
            assert error < 1e-5, (work, name, of_ranks)
        decays = DECAYS if work.decay == "head" else ()
        passes = linear_schedules(name, full_mesh(world_size), work, None, options, decays)
        ledger = sum(each.bytes_sent().sum(axis=(0, 2)) for each in passes)
        assert [sent for _, sent in of_ranks] == list(ledger), (work, name)


@pytest.mark.parametrize("sequence", [12, 120])
def test_ranks_send_states_whose_size_is_that_of_the_heads(sequence: int) -> None:
    """4 x batch x KV heads x head_dim^2 bytes: n - 1 by LASP-2 as published, one by a chain but from its end."""
    n, state, work = 4, 4 * 2 * 2 * 5 * 5, layer(sequence, batch=2)
    chain = [state, 2 * state, 2 * state, state]  # forward none from the last rank, backward none from the first
    gather = [2 * (n - 1) * state] * n
    for names, options, expected in (
        (("lasp", "all-scan"), AttentionOptions("both"), chain),
        (("lasp-2",), AttentionOptions("both", trim=False), gather),
    ):
        ranks = succeeded(on_ranks(run_on_rank, n, [(work, name) for name in names], options))
        for name, *of_ranks in zip(names, *ranks, strict=True):
            assert [sent for _, sent in of_ranks] == expected, name


def test_half_precision_and_options() -> None:
    """All internal numbers are float32: the outputs and gradients are rounded once."""
    work = layer(64, dtype="bf16", decay="scalar", heads=8, head_dim=16)
    for name, options in (
        ("all-scan", AttentionOptions("both", pieces=2)),
        ("lasp-2", AttentionOptions("both", trim=False)),
    ):
        (*parts,) = succeeded(on_ranks(run_on_rank, 3, [(work, name)], options))
        for each in zip(*(squares for ((squares, _),) in parts), strict=True):
            assert (sum(x for x, _ in each) / sum(y for _, y in each)) ** 0.5 < 2**-8


CHANGES = {
    "decay": ("rank 1: decays is 0.5 to 0.75",) * 2,
    "gates": ("rank 1: decay is channel, on rank 0 it is scalar",) * 2,
    "schedule": ("rank 1: schedule is lasp, on rank 0 it is lasp-2",) * 2,
    "mask": ("rank 1: mask is full, on rank 0 it is causal",) * 2,
    "pieces": ("rank 1: pieces is 2, on rank 0 it is None",) * 2,
    "softmax": ("rank 1: kind is softmax, on rank 0 it is linear",) * 2,
    "lengths": ("rank 0 has 8 of 14 positions, the contiguous layout of lasp-2 assigns 7 to it",) * 2,
    "decay above 1": ("rank 1: decay of KV head 1: 1.5, expected a number", "decay of KV head 1: 1.5, expected a"),
    "decay of one head": ("decay: 1 given, expected 2 numbers, one per KV head",) * 2,
    "decay and gates": ("decay and gates are both given, expected one of them",) * 2,
    "nan": ("rank 1: gates: nan, expected finite numbers of at most 0", "gates: nan, expected finite numbers"),
    "positive gates": ("gates: 0.25, expected finite numbers of at most 0, the logarithms of decays",) * 2,
    "shape of gates": ("gates are [1, 8, 3], k is [1, 8, 2, 5], expected the shape of k with or without its last",) * 2,
    "dtype of gates": ("gates are torch.float64 on cpu, expected torch.float32 on cpu",) * 2,
    "dv": ("v is [1, 8, 2, 3], expected equal batch, positions and head_dim",) * 2,
    "full mask with decay": ("decay 'scalar' with a full mask has no agreed meaning",) * 2,
    "chain with full mask": ("schedule 'lasp' passes states from chunk to chunk, expected a causal mask",) * 2,
    "ring with gates": ("decay 'scalar' depends on the data of all chunks in between",) * 2,
    "softmax schedule": ("schedule 'tasp' is for softmax attention, expected one for linear attention: lasp",) * 2,
    "options of another": ("schedule 'lasp-2': buffers 4 does not apply to it, expected 3",) * 2,
    "backward alone": ("passes is backward, expected both, or forward where no gradients are wanted",) * 2,
    "linear schedule of softmax": ("schedule 'lasp' is for linear attention, expected one for softmax attention",) * 2,
    "topology": ("the topology has 3 ranks, the group 2",) * 2,
    "decay 0": ("decay of KV head 0: 0.0, expected a number above 0 and at most 1",) * 2,
    "decay nan": ("decay of KV head 0: nan, expected a number above 0 and at most 1",) * 2,
    "decay for all heads": ("decay: 0.5, expected 2 numbers, one per KV head",) * 2,
    "decay per channel": ("decay: [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]], expected 2 numbers",) * 2,
    "decay of words": ("decay: ['fast', 'slow'], expected 2 numbers",) * 2,
    "gradients of another dtype": ("schedule 'lasp-2': gradient dtype 'input' does not apply to it",) * 2,
    "unknown kernel": ("unknown kernel of linear attention 'flash', expected auto, fla, torch",) * 2,
    "kernel of gpus": ("the linear attention kernel fla cannot run on cpu: it runs on cuda, not cpu",) * 2,
    "state in bf16": ("initial_state is torch.bfloat16, expected torch.float32: a sum over many positions loses",) * 2,
    "shape of state": ("initial_state is [2, 5, 5], expected [1, 2, 5, 5]: batch, kv_heads, head_dim of k and",) * 2,
    "state on rank 1": ("initial_state is given on rank 1, expected rank 0 alone, which has the first position",) * 2,
    "state on all ranks": ("initial_state is given on rank 0, 1, expected rank 0 alone",) * 2,
    "state with documents": ("initial_state with cu_seqlens: every document begins with a state of its own",) * 2,
    "state with full mask": ("initial_state with causal=False: every query sees all keys, expected a causal mask",) * 2,
    "state of keys": ("schedule 'ring-linear-attention': initial_state does not apply to it, as it moves keys",) * 2,
    "last state of one rank": ("rank 1: final_state is True, on rank 0 it is False",) * 2,
    "last state with documents": ("return_final_state with cu_seqlens: every document begins with",) * 2,
    "state of no positions": ("initial_state with 0 positions, expected at least 1",) * 2,
}
"""What is wrong, and what rank 0 and rank 1 are told."""


def refusal(change: str) -> None:
    """On a rank: linear attention where rank 1, or every rank, does something that cannot work."""
    odd = dist.get_rank() == 1
    q, k, v, gates, _ = inputs_of(layer(8, decay="scalar"))
    assert gates is not None, "the decay depends on the data"
    keywords: dict[str, Any] = {"schedule": "lasp-2"}
    if change in ("decay", "decay above 1"):
        wrong = [0.5, 1.5] if change == "decay above 1" else [0.5, 0.75]
        keywords["decay"] = wrong if odd else DECAYS
    elif change in ("gates", "nan", "lengths"):
        keywords["gates"] = gates
    elif change == "full mask with decay":
        keywords |= {"gates": gates, "causal": False}
    if change == "gates" and odd:
        keywords["gates"] = -torch.rand(k.shape)
    elif change == "nan" and odd:
        keywords["gates"] = gates * float("nan")
    elif change == "positive gates":
        keywords["gates"] = gates * 0 + 0.25
    elif change == "shape of gates":
        keywords["gates"] = -torch.rand(1, 8, 3)
    elif change == "dtype of gates":
        keywords["gates"] = gates.double()
    elif change == "decay of one head":
        keywords["decay"] = [0.5]
    elif change == "decay and gates":
        keywords |= {"decay": DECAYS, "gates": gates}
    elif change == "schedule" and odd:
        keywords["schedule"] = "lasp"
    elif change == "mask" and odd:
        keywords["causal"] = False
    elif change == "pieces" and odd:
        keywords["options"] = AttentionOptions("both", pieces=2)
    elif change == "options of another":
        keywords["options"] = AttentionOptions("both", buffers=4)
    elif change == "backward alone":
        keywords["options"] = AttentionOptions("backward")
    elif change == "lengths" and odd:
        q, k, v, keywords["gates"] = q[:, 2:], k[:, 2:], v[:, 2:], gates[:, 2:]
    elif change == "gradients of another dtype":
        q = q.requires_grad_()  # the option applies to backward passes only
    elif change == "state of no positions":
        q, k, v = q[:, :0], k[:, :0], v[:, :0]
    elif change == "dv":
        v = v[..., :3]
    elif change == "chain with full mask":
        keywords |= {"schedule": "lasp", "causal": False}
    elif change == "ring with gates":
        keywords |= {"schedule": "ring-linear-attention", "gates": gates}
    elif change == "softmax schedule":
        keywords["schedule"] = "tasp"
    elif change == "linear schedule of softmax" or (change == "softmax" and odd):
        attention(q, k, v, schedule="lasp" if change != "softmax" else "lasp-2", causal=True)
        return
    elif change == "topology":
        keywords |= {"schedule": "direct-lasp-2", "topology": full_mesh(3)}
    linear_attention(q, k, v, **(keywords | KEYWORDS.get(change, lambda _: {})(dist.get_rank())))


def state(*shape: int) -> Tensor:
    return torch.zeros(*(shape or (1, 2, 5, 5)))


KEYWORDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "decay 0": lambda _: {"decay": [0.0, 0.5]},
    "decay nan": lambda _: {"decay": [float("nan"), 0.5]},
    "decay for all heads": lambda _: {"decay": 0.5},
    "decay per channel": lambda _: {"decay": torch.full((2, 3), 0.5)},
    "decay of words": lambda _: {"decay": ["fast", "slow"]},
    "gradients of another dtype": lambda _: {"options": AttentionOptions("both", gradient_dtype="input")},
    "unknown kernel": lambda _: {"kernel": "flash"},
    "kernel of gpus": lambda _: {"kernel": "fla"},
    "state in bf16": lambda rank: {"initial_state": None if rank else state().bfloat16()},
    "shape of state": lambda rank: {"initial_state": None if rank else state(2, 5, 5)},
    "state on rank 1": lambda rank: {"initial_state": state() if rank else None},
    "state on all ranks": lambda _: {"initial_state": state()},
    "state with documents": lambda rank: {"initial_state": None if rank else state(), "cu_seqlens": [0, 16]},
    "state with full mask": lambda rank: {"initial_state": None if rank else state(), "causal": False},
    "state of keys": lambda rank: {"initial_state": None if rank else state(), "schedule": "ring-linear-attention"},
    "last state of one rank": lambda rank: {"return_final_state": bool(rank)},
    "last state with documents": lambda _: {"return_final_state": True, "cu_seqlens": [0, 16]},
    "state of no positions": lambda rank: {"initial_state": None if rank else state()},
}
"""What a rank passes besides."""


def test_what_cannot_work_is_refused_in_one_line_before_data_moves() -> None:
    """So the group can still be used afterwards."""
    check_refusals(refusal, CHANGES)


PREFIX, REST = 23, 14
"""Positions before and behind the cut of a sequence."""


def continued_on_rank(given: list[tuple[Workload, str]]) -> list[list[tuple[float, float]]]:
    """On a rank: both parts of every layer, the second from the state that the first one leaves."""
    return [continued(work, name) for work, name in given]


def continued(work: Workload, name: str) -> list[tuple[float, float]]:
    rank, n = dist.get_rank(), dist.get_world_size()
    *whole, dout = inputs_of(work)
    layouts = contiguous(PREFIX, n), contiguous(REST, n)

    def parts(x: Tensor) -> list[Tensor]:
        return [shard(each, here, rank) for each, here in zip((x[:, :PREFIX], x[:, PREFIX:]), layouts, strict=True)]

    leaves = [None if x is None else [each.clone().requires_grad_() for each in parts(x)] for x in whole]
    of_part = [[None if each is None else each[at] for each in leaves] for at in range(2)]
    options: dict[str, Any] = {"schedule": name, "decay": DECAYS if work.decay == "head" else None}
    q, k, v, gates = of_part[0]
    first, after = linear_attention(q, k, v, gates=gates, return_final_state=True, **options)
    before = moved(after, work, n - 1, 0)
    q, k, v, gates = of_part[1]
    if before is not None:
        before.requires_grad_()
    second = linear_attention(q, k, v, gates=gates, initial_state=before, **options)
    second.backward(parts(dout)[1])
    dafter = moved(None if before is None else before.grad, work, 0, n - 1)
    ends = [first] if after is None else [first, after]
    torch.autograd.backward(ends, [parts(dout)[0], dafter][: len(ends)])
    found = [(first, second), *((x[0].grad, x[1].grad) for x in leaves if x is not None)]
    squares = []
    for pair, expected in zip(found, exact(work), strict=True):
        errors = [(ours.double() - theirs).square().sum() for ours, theirs in zip(pair, parts(expected), strict=True)]
        squares.append((float(sum(errors)), float(sum(each.square().sum() for each in parts(expected)))))
    return squares


def moved(state: Tensor | None, work: Workload, source: int, destination: int) -> Tensor | None:
    """A state of one rank on another; None on all others."""
    found = torch.empty(work.batch, work.kv_head_count, work.head_dim, work.head_dim)
    if dist.get_rank() == source:
        assert state is not None, "the rank has the state"
        dist.send(state.detach().contiguous(), destination)
    if dist.get_rank() == destination:
        dist.recv(found, source)
        return found
    return None


@pytest.mark.parametrize("world_size", [2, 8])
def test_a_sequence_goes_on_from_the_state_of_its_prefix(world_size: int) -> None:
    """Outputs and gradients of both parts are those of the whole sequence."""
    decays = ("none", "head", "scalar", "channel")
    given = [(layer(PREFIX + REST, decay=decay), name) for decay in decays for name in state_schedules()]
    of_ranks = succeeded(on_ranks(continued_on_rank, world_size, given))
    for case, *squares in zip(given, *of_ranks, strict=True):
        for each in zip(*squares, strict=True):
            assert (sum(x for x, _ in each) / sum(y for _, y in each)) ** 0.5 < 1e-5, case


def lost_on_rank() -> str:
    """On a rank: what it is told when rank 1 does not take part."""
    q, k, v, *_ = inputs_of(layer(8))
    dist.barrier()  # rank 1 must not leave while rank 0 is still joining it
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(RunError) as lost:
        linear_attention(q, k, v, timeout_s=2.0)
    return str(lost.value)


def test_a_rank_that_does_not_come_is_reported() -> None:
    answers = on_ranks(lost_on_rank, 2)
    assert "rank 0: lost rank 1 before the start" in str(answers[0])
