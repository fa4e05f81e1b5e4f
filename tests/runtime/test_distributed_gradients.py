"""Gradients of attention on real processes, against formulas in float64 on one."""

from __future__ import annotations

import gc
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from runtime import attention
from runtime.executor.views import DTYPES, Views
from runtime.kernels.registry import choose_kernel
from runtime.sequence_parallel.layer import AttentionLayer
from runtime.sequence_parallel.sharding import shard
from tasp_lab.core.errors import RunError, TaspLabError, WorkloadError
from tasp_lab.schedule.dependencies import RESIDENT
from tasp_lab.schedule.rank_part import CallRow, rank_part
from tasp_lab.schedules.attention.backward import DATAFLOWS, Dataflow, Passes, attention_passes
from tasp_lab.schedules.attention.forward import CIRCULATIONS
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.build import attention_layout
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.runtime.test_distributed_attention import Allocations, layer_of
from tests.support.ranks import on_ranks, succeeded
from tests.support.sent_bytes import SentBytes

pytestmark = pytest.mark.distributed

Tensor = torch.Tensor

DOCUMENTS = (0, 3, 40, 1, 0, 17, 9, 0)
"""Empty ones, some shorter than a world, and one longer than a shard."""

LAYERS = [
    Workload(67, batch=2, heads=4, kv_heads=2, head_dim=16, dtype="fp32", mask="causal"),
    Workload(53, heads=3, kv_heads=3, head_dim=8, dtype="fp32"),
    Workload(61, heads=4, kv_heads=1, head_dim=8, dtype="fp32", mask="causal", window=13),
    Workload(70, heads=4, kv_heads=2, head_dim=8, dtype="fp32", documents=DOCUMENTS),
    Workload(70, batch=2, heads=2, kv_heads=2, head_dim=8, dtype="fp32", mask="causal", documents=DOCUMENTS),
    Workload(70, heads=3, kv_heads=1, head_dim=8, dtype="fp32", mask="causal", window=6, documents=DOCUMENTS),
]

HALF_LAYERS = [
    Workload(192, heads=8, kv_heads=8, head_dim=32, dtype="fp16"),
    Workload(192, batch=2, heads=8, kv_heads=4, head_dim=32, dtype="bf16", mask="causal"),
]
"""Large enough for rounding errors to average out."""


class Errors(NamedTuple):
    """Of the tensors of a `Pass`."""

    out: float
    dq: float
    dk: float
    dv: float


class Pass(NamedTuple):
    """The result, and the gradients of queries, keys and values."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def dout_of(workload: Workload) -> Tensor:
    """The gradient of the result, in its dtype, the same in every process."""
    shape = workload.batch, workload.sequence, workload.heads, workload.head_dim
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return drawn.to(DTYPES[workload.dtype])


def seen_by(workload: Workload) -> Tensor:
    """Which query row sees which key row."""
    n = workload.sequence
    distance = torch.arange(n)[:, None] - torch.arange(n)
    document = torch.arange(len(workload.documents or (n,))).repeat_interleave(torch.tensor(workload.documents or (n,)))
    most = n if workload.window is None else workload.window
    in_band = (distance >= 0) & (distance < most) if workload.mask == "causal" else distance == distance
    return in_band & (document[:, None] == document)


def by_formula(workload: Workload, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Pass:
    """Softmax attention and its derivatives in float64.

    P = softmax(scale Q K'), O = P V, dV = P' dO, dS = P (dO V' - rowsum(dO O)), dQ = scale dS K, dK = scale dS' Q.
    """
    group, scale = workload.heads // workload.kv_head_count, workload.head_dim**-0.5
    q, dout, k, v = (x.double().transpose(1, 2) for x in (q, dout, k, v))
    every_k, every_v = (x.repeat_interleave(group, 1) for x in (k, v))
    p = (scale * q @ every_k.mT).masked_fill(~seen_by(workload), -torch.inf).softmax(-1)
    out = p @ every_v
    ds = p * (dout @ every_v.mT - (dout * out).sum(-1, keepdim=True))
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (scale * ds.mT @ q, p.mT @ dout))
    return Pass(*(x.transpose(1, 2) for x in (out, scale * ds @ every_k, dk, dv)))


@cache
def exact(workload: Workload) -> Pass:
    return by_formula(workload, *layer_of(workload), dout_of(workload))


def alone(workload: Workload) -> Pass:
    """What one process gets in the dtype of the layer, from the kernel that ranks use."""
    q, k, v = layer_of(workload)
    n, scale, dout = workload.sequence, workload.head_dim**-0.5, dout_of(workload)
    limits = (0 if workload.mask == "causal" else 1 - n), n - 1
    kernel = choose_kernel("auto", q.dtype, q.device, workload.head_dim)
    out, lse = kernel.attend(q, k, v, scale=scale, low=limits[0], high=limits[1])
    found = kernel.backward(dout, q, k, v, out, lse, scale=scale, low=limits[0], high=limits[1])
    return Pass(*(x.to(q.dtype) for x in (out, *found)))


def options_of(workload: Workload) -> dict[str, Any]:
    packed = None if workload.documents is None else list(accumulate(workload.documents, initial=0))
    return {"causal": workload.mask == "causal", "window": workload.window, "cu_seqlens": packed}


def along(dataflow: Dataflow) -> AttentionOptions:
    """Both passes, the backward pass with this dataflow."""
    return AttentionOptions("both", dataflow=dataflow)


class Shard:
    """A rank's part of a layer that wants gradients."""

    def __init__(
        self, workload: Workload, schedule: str, group: Any = None, options: AttentionOptions = DEFAULT_OPTIONS
    ) -> None:
        self.workload, self.schedule, self.group = workload, schedule, group
        self.layout = attention_layout(schedule, workload, dist.get_world_size(group), options)
        self.rank = dist.get_rank(group)
        self.q, self.k, self.v, self.dout = map(self.of, (*layer_of(workload), dout_of(workload)))
        for x in self.inputs:
            x.requires_grad_()

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def of(self, x: Tensor) -> Tensor:
        """Of a tensor with all positions those that are here."""
        return shard(x, self.layout, self.rank)

    def attend(self, **options: Any) -> Tensor:
        asked = {"schedule": self.schedule, "group": self.group, **options_of(self.workload), **options}
        return attention(*self.inputs, **asked)

    def run(self, **options: Any) -> Pass:
        """Both passes; the gradients are those of this run alone."""
        out = self.attend(**options)
        return Pass(out.detach(), *torch.autograd.grad(out, self.inputs, self.dout))

    def expected(self) -> Pass:
        return Pass(*map(self.of, exact(self.workload)))


Squares = list[tuple[float, float]]
"""Of each tensor of a pass on a rank the squares of its error and of what was expected."""


def squares(found: Pass, expected: Pass) -> Squares:
    return [
        (float((x.double() - wanted).square().sum()), float(wanted.square().sum()))
        for x, wanted in zip(found, expected, strict=True)
    ]


def relative_errors(of_ranks: Sequence[Squares]) -> Errors:
    """The relative error in norm of each tensor of a pass, over all ranks."""
    return Errors(*((sum(x for x, _ in each) / sum(y for _, y in each)) ** 0.5 for each in zip(*of_ranks, strict=True)))


class Case(NamedTuple):
    """A layer and how it is computed; its passes are built before the ranks start, which takes most of the time."""

    workload: Workload
    schedule: str
    dataflow: Dataflow
    gradient_dtype: str
    passes: Passes

    def __repr__(self) -> str:
        return f"{self.workload} {self.schedule} {self.dataflow} {self.gradient_dtype}"


def cases(
    world_size: int, layers: Iterable[Workload], schedules: Iterable[str], gradient_dtypes: Iterable[str] = ("fp32",)
) -> list[Case]:
    mesh = full_mesh(world_size)
    return [
        Case(*each, attention_passes(each[1], mesh, each[0], dataflow=each[2], gradient_dtype=each[3]))
        for each in product(layers, schedules, DATAFLOWS, gradient_dtypes)
    ]


def errors_of_rank(each: list[Case]) -> list[Squares]:
    """On a rank: the errors of its part of every case."""
    found = []
    for case in each:
        here = Shard(case.workload, case.schedule)
        result = here.run(schedule=case.passes)
        assert [(x.shape, x.dtype) for x in result[1:]] == [(x.shape, x.dtype) for x in here.inputs]
        found.append(squares(result, here.expected()))
    return found


def errors(each: list[Case], world_size: int) -> Iterator[tuple[Case, Errors]]:
    for case, *parts in zip(each, *succeeded(on_ranks(errors_of_rank, world_size, each)), strict=True):
        yield case, relative_errors(parts)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_gradients_are_those_of_one_process(world_size: int) -> None:
    """Every schedule, way, mask and ratio of heads, uneven shards and packed documents: below 1e-5 in float32.

    On five and on eight ranks, which take longest, one half of the layers each.
    """
    layers = {5: LAYERS[::2], 8: LAYERS[1::2]}.get(world_size, LAYERS)
    for case, found in errors(cases(world_size, layers, CIRCULATIONS), world_size):
        assert max(found) < 1e-5, (case, found)


@pytest.mark.parametrize("world_size", [2, 5, 8])
def test_what_half_precision_costs(world_size: int) -> None:
    """Kernels round each part, and the sum is rounded in the end: twice the squared error of one process, which rounds
    once, however many ranks there are. Gradients that travel in 16 bits, here with the h-th of n parts on board, are
    rounded at each hop h > 1 to 2**-9 (fp16: 2**-12) of about sqrt(h / n) of their sum: squared errors grow with n.
    """
    n = world_size
    growing = (1 + sum(hop / n for hop in range(2, n + 1))) ** 0.5
    for case, found in errors(cases(n, HALF_LAYERS, ["tasp"], ["fp32", "input"]), n):
        single = relative_errors([squares(alone(case.workload), exact(case.workload))])
        travel = {"dq"} if case.dataflow == "rotate-q" else {"dk", "dv"}
        for name in Errors._fields:
            grows = case.gradient_dtype == "input" and name in travel
            most = 1.2 * max(growing, 2**0.5) if grows else 1.5
            assert getattr(found, name) <= most * getattr(single, name), (case, name, found, single)


LAYER = Workload(67, heads=4, kv_heads=2, head_dim=16, dtype="fp32", mask="causal")


def close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(x.double(), wanted.double(), 1e-4, 1e-5) for x, wanted in zip(found, expected, strict=True)
    )


def by_name_on_rank() -> None:
    """On a rank: schedules by name, the way found by itself or not."""
    for schedule, dataflow in product(CIRCULATIONS, ("auto", *DATAFLOWS)):
        here = Shard(LAYER, schedule)
        assert close(here.run(options=along(dataflow)), here.expected())


def wanted_in_part_on_rank() -> None:
    """On a rank: gradients of some inputs only, not the same ones on every rank."""
    here = Shard(LAYER, "tasp")
    whole = here.run()
    for wanted in product((False, True), repeat=3):
        if dist.get_rank() == 0:
            wanted = wanted[::-1]
        if not any(wanted):
            continue
        for x, each in zip(here.inputs, wanted, strict=True):
            x.grad = None
            x.requires_grad_(each)
        out = here.attend()
        out.backward(here.dout)
        assert torch.equal(out, whole.out)
        for x, each, expected in zip(here.inputs, wanted, whole[1:], strict=True):
            assert close([x.grad], [expected]) if each else x.grad is None  # type: ignore[list-item]
    with torch.no_grad():
        assert torch.equal(here.attend(), whole.out)


def of_any_strides_on_rank() -> None:
    """On a rank: a gradient of the result that is not contiguous, one that is a scalar, one that is 0."""
    here = Shard(LAYER, "tasp")
    expected = here.expected()
    strided = here.dout.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert close(torch.autograd.grad(here.attend(), here.inputs, strided), expected[1:])
    flipped = here.dout.flip(1).flip(3)
    for dataflow in DATAFLOWS:
        found = torch.autograd.grad(here.attend(options=along(dataflow)).flip(1).flip(3), here.inputs, flipped)
        assert close(found, expected[1:])
        of_sum = torch.autograd.grad(here.attend(options=along(dataflow)).sum(), here.inputs)
        ones = torch.ones_like(dout_of(LAYER))
        assert close(of_sum, [here.of(x) for x in by_formula(LAYER, *layer_of(LAYER), ones)[1:]])
        assert not any(
            x.any() for x in torch.autograd.grad(here.attend(options=along(dataflow)) * 0, here.inputs, here.dout)
        )


def twice_on_rank() -> None:
    """On a rank: the same graph again, which must be asked for, and graphs in another order than they were made."""
    here = Shard(LAYER, "tasp")
    for dataflow in DATAFLOWS:
        out = here.attend(options=along(dataflow))
        first = torch.autograd.grad(out, here.inputs, here.dout, retain_graph=True)
        assert close(first, here.expected()[1:])
        assert close(torch.autograd.grad(out, here.inputs, here.dout), first)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            out.backward(here.dout)
        kept = here.attend(options=along(dataflow))
        later = here.attend(options=along(dataflow), causal=False)
        torch.autograd.grad(later, here.inputs, here.dout)
        assert close(torch.autograd.grad(kept, here.inputs, here.dout), first)
    here.dout.requires_grad_()
    dq = torch.autograd.grad(here.attend(), here.q, here.dout, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def in_layers(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three layers of attention, each of what the layer before gave, with something between them."""
    for _ in range(3):
        out = attend(q, k, v)
        q, k, v = q + out.tanh(), k * out[:, :, : k.shape[2]].sigmoid(), v - out[:, :, : v.shape[2]]
    return q


def whole_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Differentiated by torch."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * LAYER.head_dim**-0.5
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen_by(LAYER), -torch.inf).softmax(-1), v)


def layers_on_rank() -> None:
    """On a rank: layers in sequence, computed once, or again in the backward pass."""
    whole = [x.double().requires_grad_() for x in layer_of(LAYER)]
    expected = torch.autograd.grad(in_layers(whole_attention, *whole), whole, dout_of(LAYER).double())
    for schedule, dataflow in ("tasp", "auto"), ("tasp", "rotate-q"), ("zigzag-ring-attention", "rotate-kv"):
        here = Shard(LAYER, schedule)

        def attend(q: Tensor, k: Tensor, v: Tensor, schedule: str = schedule, dataflow: Any = dataflow) -> Tensor:
            return attention(q, k, v, causal=True, schedule=schedule, options=along(dataflow))

        def again(*inputs: Tensor, attend: Any = attend, reentrant: bool) -> Tensor:
            return checkpoint(attend, *inputs, use_reentrant=reentrant)  # type: ignore[no-any-return]

        plain = torch.autograd.grad(in_layers(attend, *here.inputs), here.inputs, here.dout)
        assert close(plain, [here.of(x) for x in expected])
        for reentrant in (False, True):
            for x in here.inputs:
                x.grad = None
            in_layers(partial(again, reentrant=reentrant), *here.inputs).backward(here.dout)
            assert close([x.grad for x in here.inputs], plain)


def given_schedules_on_rank() -> str:
    """On a rank: passes as an object; what is said to one that only goes forward."""
    here = Shard(LAYER, "tasp")
    passes = attention_passes("tasp", full_mesh(dist.get_world_size()), LAYER)
    assert close(here.run(schedule=passes), here.expected())
    with torch.no_grad():
        assert close([here.attend(schedule=passes.forward)], here.expected()[:1])
    with pytest.raises(WorkloadError) as refused:
        here.attend(schedule=passes.forward)
    return str(refused.value)


def in_groups_on_rank() -> None:
    """On a rank: two groups of two, each with a layer of its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    here = Shard(LAYERS[mine], "tasp", groups[mine])
    for dataflow in DATAFLOWS:
        assert close(here.run(options=along(dataflow)), here.expected())


def one_after_another() -> str:
    by_name_on_rank()
    wanted_in_part_on_rank()
    of_any_strides_on_rank()
    twice_on_rank()
    layers_on_rank()
    return given_schedules_on_rank()


def test_what_autograd_may_ask_for() -> None:
    """All that its graphs can be used for, on one start of three ranks."""
    for refused in succeeded(on_ranks(one_after_another, 3)):
        assert refused == "gradients are required, but the schedule has no backward pass; expected attention_passes"


def test_groups_of_ranks_differentiate_by_themselves() -> None:
    assert succeeded(on_ranks(in_groups_on_rank, 4)) == [None] * 4


def repeated_on_rank(delayed: Sequence[Case]) -> None:
    """On a rank: the same again, while kernel calls take their time at random."""
    plain, drawn = AttentionLayer.compute, random.Random(dist.get_rank())

    def late(self: AttentionLayer, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        time.sleep(drawn.choice([0, 0, 0.005]))
        return plain(self, row, operands)

    AttentionLayer.compute = late  # type: ignore[method-assign]
    for case, transport in product(delayed, ("p2p", "batched", "all-to-all")):
        here = Shard(case.workload, case.schedule)
        first, *others = (here.run(schedule=case.passes, transport=transport) for _ in range(3))
        assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_of_what_comes_in_any_order_there_are_two(world_size: int) -> None:
    """All else is added in the order of steps: at home a gradient meets what its own rank adds to it, once each."""
    for case in cases(world_size, [LAYER, LAYERS[4]], CIRCULATIONS):
        for rank in range(world_size):
            part = rank_part(case.passes.backward, rank)
            terms = Counter(join.place.block for join in part.joins if join.place.since == RESIDENT)
            terms.update(place.block for row in part.calls for place in row.adds if place.block in terms)
            assert max(terms.values(), default=0) <= 2, (case, rank)


def test_gradients_are_the_same_bit_by_bit_every_time() -> None:
    """On CPUs; kernels on GPUs may add up in an order of their own."""
    delayed = cases(3, [LAYER, replace(LAYER, dtype="bf16")], ["zigzag-ring-attention", "tasp"], ["input"])
    assert succeeded(on_ranks(repeated_on_rank, 3, delayed)) == [None] * 3


def bytes_of_rank(each: list[Case]) -> list[tuple[int, int]]:
    """On a rank: the bytes that went to the transport in the backward pass, and those of the ledger."""
    sent = SentBytes()
    found = []
    for case in each:
        here = Shard(case.workload, case.schedule)
        out = here.attend(schedule=case.passes)
        sent.count = 0
        out.backward(here.dout)
        found.append((sent.count, int(case.passes.backward.bytes_sent()[:, here.rank].sum())))
    return found


def test_bytes_sent_backward_are_those_of_the_ledger() -> None:
    each = cases(4, LAYERS[::2], ["striped-ring-attention", "tasp"], ["fp32", "input"])
    for of_rank in succeeded(on_ranks(bytes_of_rank, 4, each)):
        assert all(sent == ledger for sent, ledger in of_rank), of_rank
        assert sum(sent for sent, _ in of_rank) > 0


def memory_of_rank(each: list[Case]) -> list[tuple[int, int]]:
    """On a rank: the peak of allocated bytes in the backward pass, and the memory of its schedule."""
    found = []
    for case in each:
        here = Shard(case.workload, case.schedule)
        here.run(schedule=case.passes, transport="batched")  # the first time fills caches
        out = here.attend(schedule=case.passes, transport="batched")
        with Allocations(here.dout, *out.grad_fn.saved_tensors) as allocations:
            torch.autograd.grad(out, here.inputs, here.dout)
        found.append((allocations.peak, rank_part(case.passes.backward, here.rank).memory_bytes))
    return found


def test_memory_backward_is_the_buffer_and_what_does_not_grow_with_the_world() -> None:
    """Per way, beside the memory as many shards with 96 positions per rank on 2 ranks as on 5."""
    rest: dict[Dataflow, set[int]] = defaultdict(set)
    for n in (2, 5):
        whole = Workload(96 * n, heads=4, head_dim=64, dtype="fp32")
        each = cases(n, [whole, replace(whole, mask="causal")], ["zigzag-ring-attention", "tasp"])
        for of_rank in succeeded(on_ranks(memory_of_rank, n, each)):
            for case, (peak, memory) in zip(each, of_rank, strict=True):
                rest[case.dataflow].add(peak - memory)
    shard_bytes = 96 * 4 * 64 * 4
    for dataflow, left in rest.items():
        assert max(left) - min(left) < 0.1 * shard_bytes, (dataflow, left)
        assert max(left) < (9.2 if dataflow == "rotate-q" else 7.2) * shard_bytes, (dataflow, left)


def left_on_rank(each: list[Case]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """On a rank without a cycle collector: bytes that are still allocated after each pass, and its memory."""
    gc.disable()
    found = []
    for case in each:
        here = Shard(case.workload, case.schedule)
        here.run(schedule=case.passes)  # the first time fills caches
        with Allocations(here.dout, *here.inputs) as forward:
            out = here.attend(schedule=case.passes)
        kept = forward.now
        with Allocations(here.dout, *out.grad_fn.saved_tensors) as backward:
            out.backward(here.dout)
        buffers = [rank_part(each, here.rank).memory_bytes for each in case.passes]
        found.append(((kept, buffers[0]), (backward.now, buffers[1])))
    return found


def test_buffers_are_freed_when_a_pass_ends() -> None:
    """Not when Python next looks for cycles, which no lack of memory on a GPU makes it do."""
    each = cases(2, [Workload(192, heads=4, head_dim=64, dtype="bf16")], ["ring-attention", "tasp"])
    for of_rank in succeeded(on_ranks(left_on_rank, 2, each)):
        for case, passes in zip(each, of_rank, strict=True):
            assert all(left < 0.7 * memory for left, memory in passes), (case, passes)


def with_a_death(when: str) -> tuple[str, float] | None:
    """On a rank: rank 2 dies between the passes, or at its first kernel call of the backward pass."""
    here = Shard(Workload(80, heads=2, head_dim=64, dtype="fp32"), "tasp")
    out = here.attend(options=AttentionOptions("both", buffers=2))
    began_s = time.monotonic()
    if here.rank == 2 and when == "between":
        os._exit(9)
    if here.rank == 2:
        AttentionLayer.compute = lambda *_: os._exit(9)  # type: ignore[method-assign]
    try:
        out.backward(here.dout)
    except RunError as error:
        return str(error), time.monotonic() - began_s
    return None


@pytest.mark.parametrize("when", ["between", "inside"])
def test_a_rank_that_dies_is_named_within_seconds(when: str) -> None:
    answers: Any = on_ranks(with_a_death, 5, when)
    assert answers.pop(2) == 9
    assert any("lost rank 2" in message for message, _ in answers), answers
    for message, seconds in answers:
        assert "lost rank" in message
        assert "in the backward pass of call 1 of 1 (tasp, 80 positions" in message
        assert "\n" not in message
        assert seconds < 20


def refusals(changes: list[str]) -> list[str]:
    """On a rank: what it is told at one disagreement after the other, and that the group still works at last."""
    found = []
    for change in changes:
        try:
            disagree(change, dist.get_rank() == 1)
        except TaspLabError as error:
            found.append(str(error))
    disagree("nothing", False)
    return found


def disagree(change: str, odd: bool) -> None:
    """Both passes; the odd rank does something else than the others."""
    here = Shard(Workload(32, heads=4, kv_heads=2, head_dim=8, dtype="fp32"), "tasp")
    options: dict[str, Any] = {}
    if change == "gradients":
        for x in here.inputs:
            x.requires_grad_(odd)
    elif change == "all but it":
        for x in here.inputs:
            x.requires_grad_(not odd)
    elif change == "dataflow":
        options["options"] = along("rotate-kv" if odd else "rotate-q")
    elif change == "gradient_dtype":
        options["options"] = AttentionOptions("both", gradient_dtype="input" if odd else "fp32")
    elif change == "dtype" and odd:
        here.q, here.k, here.v, here.dout = (x.detach().half().requires_grad_() for x in (*here.inputs, here.dout))
    elif change == "dtype of v" and odd:
        here.v = here.v.detach().half().requires_grad_()
    elif change == "documents":
        options["cu_seqlens"] = [0, 20, 30] if odd else [0, 20, 32]
    elif change == "documents of all":
        options["cu_seqlens"] = [0, 20, 30]
    elif change == "documents or none":
        options["cu_seqlens"] = [0, 20, 32] if odd else None
    elif change == "forward alone":
        options["options"] = AttentionOptions("forward")
    here.run(**options)


REFUSALS = {
    "gradients": ("rank 1: gradients is True, on rank 0 it is False",) * 2,
    "all but it": ("rank 1: gradients is False, on rank 0 it is True",) * 2,
    "dataflow": ("rank 1: dataflow is rotate-kv, on rank 0 it is rotate-q",) * 2,
    "gradient_dtype": ("rank 1: gradient_dtype is input, on rank 0 it is fp32",) * 2,
    "dtype": ("rank 1: dtype is fp16, on rank 0 it is fp32",) * 2,
    "dtype of v": ("rank 1: v is torch.float16 on cpu, q is torch.float32 on cpu", "v is torch.float16 on cpu"),
    "documents": ("rank 1: documents is 2 documents of 30 positions",) * 2,
    "documents of all": ("documents: 30 positions together, expected 32",) * 2,
    "documents or none": ("rank 1: documents is 2 documents of 32 positions",) * 2,
    "forward alone": ("options: passes is forward, expected both, for gradients are wanted",) * 2,
}


def test_ranks_that_disagree_are_told_before_data_moves() -> None:
    for rank, found in enumerate(succeeded(on_ranks(refusals, 2, list(REFUSALS)))):
        for message, expected in zip(found, REFUSALS.values(), strict=True):
            assert message.startswith(expected[rank])
            assert "\n" not in message
