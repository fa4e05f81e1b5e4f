"""What autograd may ask of a layer on real ranks, and what both passes allocate, keep, and say when a rank dies."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from experiments import attention_example
from runtime import attention, attention_with_lse, linear_attention
from runtime.executor.kept import release_memory
from runtime.executor.views import Views
from runtime.kernels.registry import KERNELS
from runtime.sequence_parallel.layer import AttentionLayer
from runtime.sequence_parallel.sharding import shard
from tasp_lab.core.errors import RunError, WorkloadError
from tasp_lab.schedule.dependencies import RESIDENT
from tasp_lab.schedule.rank_part import CallRow, rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS, Dataflow, Passes, attention_passes
from tasp_lab.schedules.attention.forward import CIRCULATIONS
from tasp_lab.schedules.attention.forward import attention as forward_schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.registry import state_schedules
from tasp_lab.topology.builders import full_mesh, nodes
from tasp_lab.topology.graph import Link
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import contiguous
from tests.runtime.test_layers_on_ranks import CIRCULATED, by_kernel, circulations, linear
from tests.support.rank_layers import (
    DECAYS,
    Allocations,
    Case,
    Shard,
    by_formula,
    dout_of,
    exact,
    gates_of,
    layer_of,
    relative_errors,
    seen_by,
)
from tests.support.ranks import as_if_by_torchrun, on_ranks, succeeded
from tests.support.schedules import task_of

pytestmark = pytest.mark.distributed

Tensor = torch.Tensor

LAYER = Workload(67, heads=4, kv_heads=2, head_dim=16, dtype="fp32", mask="causal")


def passes_of(case: Case) -> Passes:
    assert case.passes is not None, "they are built before the ranks start"
    return case.passes


def along(dataflow: Dataflow) -> AttentionOptions:
    """Both passes, the backward pass with this dataflow."""
    return AttentionOptions("both", dataflow=dataflow)


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
        assert torch.equal(out, whole[0])
        for x, each, expected in zip(here.inputs, wanted, whole[1:], strict=True):
            assert close([x.grad], [expected]) if each else x.grad is None  # type: ignore[list-item]
    with torch.no_grad():
        assert torch.equal(here.attend(), whole[0])


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
    dq = torch.autograd.grad(here.attend().sum(), here.q, create_graph=True)[0]
    with pytest.raises(WorkloadError, match="second derivatives of a layer are not computed"):
        (here.q.sum() + dq.square().sum()).backward()


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
    here = Shard(CIRCULATED[mine], "tasp", groups[mine])
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
        here = Shard(case.work, case.schedule)
        first, *others = (here.run(schedule=case.passes, transport=transport) for _ in range(3))
        assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_of_what_comes_in_any_order_there_are_two(world_size: int) -> None:
    """All else is added in the order of steps: at home a gradient meets what its own rank adds to it, once each."""
    for case in circulations(world_size, [LAYER, CIRCULATED[4]], list(CIRCULATIONS)):
        for rank in range(world_size):
            part = rank_part(passes_of(case).backward, rank)
            terms = Counter(join.place.block for join in part.joins if join.place.since == RESIDENT)
            terms.update(place.block for row in part.calls for place in row.adds if place.block in terms)
            assert max(terms.values(), default=0) <= 2, (case, rank)


def test_gradients_are_the_same_bit_by_bit_every_time() -> None:
    """On CPUs; kernels on GPUs may add up in an order of their own."""
    delayed = circulations(3, [LAYER, replace(LAYER, dtype="bf16")], ["zigzag-ring-attention", "tasp"], ["input"])
    assert succeeded(on_ranks(repeated_on_rank, 3, delayed)) == [None] * 3


def backward_memory_of_rank(each: list[Case]) -> list[tuple[int, int]]:
    """On a rank: the peak of allocated bytes in the backward pass, and the memory of its schedule."""
    found = []
    for case in each:
        here = Shard(case.work, case.schedule)
        here.run(schedule=case.passes, transport="batched")  # the first time fills caches
        out = here.attend(schedule=case.passes, transport="batched")
        with Allocations(here.dout, *out.grad_fn.saved_tensors) as allocations:
            torch.autograd.grad(out, here.inputs, here.dout)
        found.append((allocations.peak, rank_part(passes_of(case).backward, here.rank).memory_bytes))
    return found


def test_memory_backward_is_the_buffer_and_what_does_not_grow_with_the_world() -> None:
    """Per way, beside the memory as many shards with 96 positions per rank on 2 ranks as on 5."""
    rest: dict[Dataflow, set[int]] = defaultdict(set)
    for n in (2, 5):
        whole = Workload(96 * n, heads=4, head_dim=64, dtype="fp32", mask="full")
        each = circulations(n, [whole, replace(whole, mask="causal")], ["zigzag-ring-attention", "tasp"])
        for of_rank in succeeded(on_ranks(backward_memory_of_rank, n, each)):
            for case, (peak, memory) in zip(each, of_rank, strict=True):
                rest[case.options.dataflow].add(peak - memory)
    shard_bytes = 96 * 4 * 64 * 4
    for dataflow, left in rest.items():
        assert max(left) - min(left) < 0.1 * shard_bytes, (dataflow, left)
        assert max(left) < (9.2 if dataflow == "rotate-q" else 7.2) * shard_bytes, (dataflow, left)


def left_on_rank(each: list[Case]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """On a rank without a cycle collector: bytes that are still allocated after each pass, and its memory."""
    gc.disable()
    found = []
    for case in each:
        here = Shard(case.work, case.schedule)
        here.run(schedule=case.passes)  # the first time fills caches
        release_memory()
        with Allocations(here.dout, *here.inputs) as forward:
            out = here.attend(schedule=case.passes)
            release_memory()
        kept = forward.now
        with Allocations(here.dout, *out.grad_fn.saved_tensors) as backward:
            out.backward(here.dout)
            release_memory()
        buffers = [rank_part(each, here.rank).memory_bytes for each in passes_of(case)]
        found.append(((kept, buffers[0]), (backward.now, buffers[1])))
    return found


def test_buffers_are_freed_when_they_are_released() -> None:
    """Not when Python next looks for cycles, which no lack of memory on a GPU makes it do."""
    each = circulations(2, [Workload(192, heads=4, head_dim=64, dtype="bf16", mask="full")], ["ring-attention", "tasp"])
    for of_rank in succeeded(on_ranks(left_on_rank, 2, each)):
        for case, passes in zip(each, of_rank, strict=True):
            assert all(left < 0.7 * memory for left, memory in passes), (case, passes)


def memory_of_rank(per_rank: int, mask: Any) -> dict[str, tuple[int, int]]:
    """On a rank: the peak of allocated bytes, and the memory of the schedule, for every schedule."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    workload = Workload(per_rank * world_size, heads=4, kv_heads=4, head_dim=64, dtype="fp32", mask=mask)
    found = {}
    for name in CIRCULATIONS:
        schedule = forward_schedule(name, full_mesh(world_size), workload)
        q, k, v = (shard(x, task_of(schedule).layout, rank) for x in layer_of(workload))
        for _ in range(2):  # the first time fills caches
            with Allocations(q, k, v) as allocations:
                attention_with_lse(q, k, v, schedule=schedule, causal=mask == "causal", transport="batched")
        found[name] = allocations.peak, rank_part(schedule, rank).memory_bytes
    return found


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_memory_is_the_buffers_and_what_does_not_grow_with_the_world(mask: str) -> None:
    """With 168 positions per rank on 2 and on 8 ranks; TASP needs no more than 1.2 times what Ring does."""
    rest: dict[str, set[int]] = {name: set() for name in CIRCULATIONS}
    ring = "ring-attention" if mask == "full" else "zigzag-ring-attention"
    for world_size in (2, 8):
        found = succeeded(on_ranks(memory_of_rank, world_size, 168, mask))
        for name in CIRCULATIONS:
            rest[name] |= {of_rank[name][0] - of_rank[name][1] for of_rank in found}
        for measure in (0, 1):  # on the rank that needs most
            assert max(each["tasp"][measure] for each in found) <= 1.2 * max(each[ring][measure] for each in found)
    shard_bytes = 168 * 4 * 64 * 4
    for name, left in rest.items():
        padded = (
            name == "striped-ring-attention" and mask == "causal"
        )  # a row that sees nothing makes a copy of a result
        said = 2**14  # what ranks tell each other before the start
        most = (3.1 if padded else 2.1) * shard_bytes + said  # results in float32 and one temporary
        assert max(left) <= most, (name, left)
        assert padded or max(left) - min(left) < said, (name, left)


def count(counts: Counter[str], owner: type, method: str) -> None:
    """Count from now on the calls of a method of all objects of a class."""
    original: Callable[..., object] = getattr(owner, method)

    def counted(*arguments: object) -> object:
        counts[f"{owner.__name__}.{method}"] += 1
        return original(*arguments)

    setattr(owner, method, counted)


def counts_of_calls(gradients: bool) -> list[list[Counter[str]]]:
    """On a rank: what each of three equal calls builds and looks at, on a mesh by default and on a topology."""
    counts: Counter[str] = Counter()
    count(counts, Schedule, "__post_init__")
    count(counts, Link, "__hash__")
    count(counts, Link, "__eq__")
    found = []
    for topology in (None, nodes(2, 2)):
        workload = Workload(33, heads=4, kv_heads=2, head_dim=16, dtype="fp32", mask="causal")
        layout = attention_layout("tasp", workload, dist.get_world_size())
        q, k, v = (shard(x, layout, dist.get_rank()).requires_grad_(gradients) for x in layer_of(workload))
        of_calls = []
        for _ in range(3):
            counts.clear()
            attention_with_lse(q, k, v, schedule="tasp", causal=True, topology=topology)
            of_calls.append(Counter(counts))
        found.append(of_calls)
    return found


@pytest.mark.parametrize("gradients", [False, True])
def test_what_was_built_for_a_call_serves_the_next(gradients: bool) -> None:
    """The second call for the same inputs builds no schedule and looks at no link of the topology."""
    for of_rank in succeeded(on_ranks(counts_of_calls, 4, gradients)):
        for first, *later in of_rank:
            assert first["Schedule.__post_init__"] == (2 if gradients else 1)
            assert later == [Counter(), Counter()]


def with_a_death(when: str) -> tuple[str, float] | None:
    """On a rank: rank 2 dies at its first kernel call of a pass, or between the passes.

    It has two buffers, so it cannot have taken in what it would have to pass on at the last of four steps.
    """
    here = Shard(Workload(80, heads=2, head_dim=64, dtype="fp32", mask="full"), "tasp")

    def die(*_: object) -> None:
        if here.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    began_s, compute = time.monotonic(), AttentionLayer.compute
    try:
        if here.rank == 2 and when == "forward":
            AttentionLayer.compute = die  # type: ignore[method-assign, assignment]
        out = here.attend(options=AttentionOptions("both", buffers=2))
        if when == "between":
            die()
        if here.rank == 2:
            AttentionLayer.compute = die  # type: ignore[method-assign, assignment]
        began_s = time.monotonic()
        out.backward(here.dout)
    except RunError as error:
        return str(error), time.monotonic() - began_s
    finally:
        AttentionLayer.compute = compute  # type: ignore[method-assign]
    return None


@pytest.mark.parametrize("when", ["forward", "between", "backward"])
def test_a_rank_that_ends_is_named_within_seconds(when: str) -> None:
    answers: Any = on_ranks(with_a_death, 5, when)
    assert answers.pop(2) == -signal.SIGKILL
    assert any("lost rank 2" in message for message, _ in answers), answers
    for message, seconds in answers:
        assert "lost rank" in message
        assert ("in the backward pass of call 1 of 1 (tasp, 80 positions" in message) == (when != "forward")
        assert "\n" not in message
        assert seconds < 20


def lost_on_rank() -> str:
    """On a rank: what it is told when rank 1 does not take part."""
    here = Shard(linear(8), "lasp-2")
    dist.barrier()  # rank 1 must not leave while rank 0 is still joining it
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(RunError) as lost:
        here.attend(timeout_s=2.0)
    return str(lost.value)


def test_a_rank_that_does_not_come_is_reported() -> None:
    answers = on_ranks(lost_on_rank, 2)
    assert "rank 0: lost rank 1 before the start" in str(answers[0])


def odd_tensors() -> Any:
    """On a rank: tensors that are not contiguous, NaN and infinite values, no positions at all, a group of its own."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    workload = Workload(21, heads=4, kv_heads=2, head_dim=64, dtype="fp32", mask="causal")
    layout = attention_layout("tasp", workload, world_size)
    q, k, v = layer_of(workload)
    k[0, 9, 1, 3], v[0, 15, 0, 7], k[0, 12, 0, 0] = torch.nan, torch.inf, torch.inf
    low, high = 0, workload.sequence - 1
    alone = KERNELS["reference"].attend(q, k, v, scale=0.125, low=low, high=high)
    parts = [shard(x, layout, rank) for x in (q, k, v)]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    out, _ = attention_with_lse(*strided, causal=True)
    expected = shard(alone.out, layout, rank)
    torch.testing.assert_close(out.double(), expected, equal_nan=True, rtol=1e-4, atol=1e-5)
    group = [dist.new_group([each]) for each in range(world_size)][rank]
    few = Workload(2, heads=4, kv_heads=2, head_dim=64, dtype="fp32", mask="full")
    own = layer_of(few)
    in_group, _ = attention_with_lse(*own, group=group)
    torch.testing.assert_close(in_group.double(), by_kernel(few, "reference")[0], rtol=1e-4, atol=1e-5)
    placed = [shard(x, attention_layout("tasp", few, world_size), rank) for x in own]
    out, _ = attention_with_lse(*placed)
    assert out.shape[1] == placed[0].shape[1]
    torch.testing.assert_close(out, shard(in_group, attention_layout("tasp", few, world_size), rank))
    return True


def test_odd_tensors_and_groups() -> None:
    assert succeeded(on_ranks(odd_tensors, 3)) == [True] * 3
    assert succeeded(on_ranks(odd_tensors, 1)) == [True]


def example_on_rank() -> str:
    """On a rank: what the example prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        attention_example.main()
    return printed.getvalue()


def test_the_example_runs_under_torchrun() -> None:
    found = [str(line).split() for line in succeeded(as_if_by_torchrun(example_on_rank, 3))]
    assert [line[:2] for line in found] == [["rank", f"{rank}:"] for rank in range(3)]
    assert sum(int(line[2]) for line in found) == 1000
    assert all(float(line[-1]) < 1e-6 for line in found)


PREFIX, REST = 23, 14
"""Positions before and behind the cut of a sequence."""


def continued_on_rank(given: list[tuple[Workload, str]]) -> list[list[tuple[float, float]]]:
    """On a rank: both parts of every layer, the second from the state that the first one leaves."""
    return [continued(work, name) for work, name in given]


def continued(work: Workload, name: str) -> list[tuple[float, float]]:
    rank, n = dist.get_rank(), dist.get_world_size()
    whole, dout = (*layer_of(work), gates_of(work)), dout_of(work)
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


def test_a_sequence_goes_on_from_the_state_of_its_prefix() -> None:
    """Outputs and gradients of both parts are those of the whole sequence, whose chunks are uneven."""
    world_size = 3
    decays = ("none", "head", "scalar", "channel")
    given = [(linear(PREFIX + REST, decay=decay), name) for decay in decays for name in state_schedules()]
    of_ranks = succeeded(on_ranks(continued_on_rank, world_size, given))
    for case, *squares in zip(given, *of_ranks, strict=True):
        assert max(relative_errors(squares)) < 1e-5, case
