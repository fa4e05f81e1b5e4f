"""Arguments of a wrong type are refused before a rank waits for another one, in one line, and nothing is cast before.

Each is given on both ranks, which raise the same error, and on the odd rank alone, of which the other one is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from runtime import attention, attention_with_lse, linear_attention, prepare, relayout
from runtime.sequence_parallel.api import SequenceParallelAttention
from tasp_lab.core.errors import RunError, TaspLabError, WorkloadError
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import contiguous
from tests.support.rank_layers import Shard, by_formula, dout_of, layer_of
from tests.support.ranks import on_ranks, succeeded

pytestmark = pytest.mark.distributed

Tensor = torch.Tensor

NAN = float("nan")
WHOLE = "a whole number, a pair of keys before and after a query, or None"


class Eight(IntEnum):
    """A whole number of another type."""

    KEYS = 8


def shard_of(length: int = 16, heads: tuple[int, int, int] = (4, 2, 2)) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    return [torch.randn(1, length, each, 8) for each in heads]


def attend(tensors: dict[str, Any] | None = None, **keywords: Any) -> object:
    """Softmax attention, some tensors changed."""
    q, k, v = ((tensors or {}).get(name, x) for name, x in zip("qkv", shard_of(), strict=True))
    return attention(q, k, v, **{"schedule": "tasp", "causal": True, "timeout_s": 20, **keywords})


def attend_linearly(tensors: dict[str, Any] | None = None, **keywords: Any) -> object:
    q, k, v = ((tensors or {}).get(name, x) for name, x in zip("qkv", shard_of(), strict=True))
    return linear_attention(q, k, v, **{"timeout_s": 20, **keywords})


def attend_prepared(tensors: dict[str, Any] | None = None, **keywords: Any) -> object:
    q, k, v = ((tensors or {}).get(name, x) for name, x in zip("qkv", shard_of(), strict=True))
    return prepare(q, k, v, **{"schedule": "tasp", "causal": True, "timeout_s": 20, **keywords})(q, k, v)


def move(tensors: dict[str, Any] | None = None, **keywords: Any) -> object:
    layouts = [contiguous(32, 2), contiguous(32, 2)]
    before, after = (keywords.pop(name, each) for name, each in zip(("before", "after"), layouts, strict=True))
    return relayout((tensors or {}).get("q", torch.zeros(1, 16, 4)), before, after, **{"timeout_s": 20, **keywords})


Call = Callable[..., object]

KEYWORDS: list[tuple[tuple[Call, ...], dict[str, Any], str]] = [
    *(
        ((attend, attend_prepared), {"window": value}, f"window: {shown}, expected {WHOLE}")
        for value, shown in [
            (8.7, "8.7 of type float"), ("8", "'8' of type str"), (True, "True of type bool"),
            (NAN, "nan of type float"), ({127}, "{127} of type set"),
            (np.float32(8), "np.float32(8.0) of type float32"), (torch.tensor(8), "tensor(8) of type Tensor"),
            (Fraction(8), "Fraction(8, 1) of type Fraction"),
        ]
    ),
    ((attend,), {"window": 0}, "window: 0, expected 1 or more"),
    *(
        ((attend,), {"window": pair}, f"window: {pair}, expected how many keys before and after a query, such as 1023,")
        for pair in [(1, 2, 3), [4], (-2, 0), (1.5, 0), (True, 0)]
    ),
    ((attend,), {"window": (7, 1)}, "window: 7,1 with the mask causal, expected 0 keys after a query, or a full mask"),
    ((attend,), {"window": -(10**30)}, "window: -1"),
    ((attend,), {"cached_keys": 12.9}, "cached keys: 12.9 of type float, expected a whole number"),
    ((attend,), {"cached_keys": True}, "cached keys: True of type bool"),
    ((attend,), {"cached_keys": None}, "cached keys: None of type NoneType"),
    ((attend, attend_linearly), {"causal": "no"}, "causal: 'no' of type str, expected True or False"),
    ((attend, attend_linearly), {"causal": 0}, "causal: 0 of type int, expected True or False"),
    ((attend, attend_linearly), {"causal": None}, "causal: None of type NoneType"),
    ((attend, attend_prepared), {"schedule": None}, "schedule: None of type NoneType, expected the name of a"),
    ((attend_linearly,), {"schedule": None}, "schedule: None of type NoneType, expected the name of a schedule"),
    ((attend, attend_linearly), {"schedule": ["tasp"]}, "schedule: ['tasp'] of type list"),
    ((attend, attend_linearly), {"options": "both"}, "options: 'both' of type str, expected AttentionOptions"),
    ((attend, attend_linearly), {"options": None}, "options: None of type NoneType, expected AttentionOptions"),
    ((attend,), {"scale": "x"}, "scale: 'x' of type str, expected a number or None"),
    ((attend,), {"scale": True}, "scale: True of type bool"),
    ((attend,), {"scale": 1j}, "scale: 1j of type complex"),
    ((attend,), {"scale": torch.ones(1, requires_grad=True)}, "scale: tensor([1.], requires_grad=True) of type Tensor"),
    ((attend,), {"scale": float("inf")}, "scale: inf, expected a finite number"),
    ((attend,), {"scale": -1e39}, "scale: -1e+39, expected a finite number of float32"),
    ((attend,), {"scale": 10**400}, "scale: 1000000000000000000000000000000000000000, expected a finite number"),
    ((attend, attend_linearly, move), {"timeout_s": NAN}, "timeout_s: nan of type float, expected a number of seconds"),
    ((attend, attend_linearly, move), {"timeout_s": -1}, "timeout_s: -1 of type int, expected a number of seconds"),
    ((attend,), {"timeout_s": 0}, "timeout_s: 0 of type int"),
    ((attend,), {"timeout_s": 1e-9}, "timeout_s: 1e-09 of type float"),
    ((attend,), {"timeout_s": float("inf")}, "timeout_s: inf of type float, expected a number of seconds, 0.001 to"),
    ((attend,), {"timeout_s": None}, "timeout_s: None of type NoneType"),
    ((attend,), {"timeout_s": "20"}, "timeout_s: '20' of type str"),
    ((attend,), {"timeout_s": True}, "timeout_s: True of type bool"),
    ((attend, attend_linearly, move), {"topology": "full-mesh:2"}, "topology: 'full-mesh:2' of type str, expected a"),
    ((attend, attend_linearly), {"kernel": None}, "kernel: None of type NoneType, expected the name of a kernel"),
    ((attend,), {"kernel": ["sdpa"]}, "kernel: ['sdpa'] of type list"),
    ((attend, attend_linearly, move), {"transport": None}, "transport: None of type NoneType, expected the name of a"),
    ((attend, attend_linearly), {"cu_seqlens": 32}, "cumulative lengths: int, expected a sequence of whole numbers"),
    ((attend, attend_linearly), {"cu_seqlens": "032"}, "cumulative length 0: a str, expected a whole number"),
    ((attend,), {"cu_seqlens": [0, 32.0]}, "cumulative length 1: a float, expected a whole number"),
    ((attend,), {"cu_seqlens": torch.tensor([0.0, 32.0])}, "cumulative length 0: a float, expected a whole number"),
    ((attend,), {"cu_seqlens": torch.tensor([False, True])}, "cumulative length 0: a bool, expected a whole number"),
    ((attend,), {"cu_seqlens": torch.tensor([[0, 32]])}, "cumulative length 0: a list, expected a whole number"),
    ((attend,), {"cu_seqlens": torch.tensor(32)}, "cumulative lengths: int, expected a sequence"),
    ((attend,), {"cu_seqlens": torch.zeros(2, device="meta")}, "cu_seqlens is on the device meta"),
    ((attend,), {"cu_seqlens": {0: 0, 32: 32}}, "cumulative lengths: dict, expected a sequence"),
    ((attend,), {"cu_seqlens": b"\0 "}, "cumulative lengths: bytes, expected a sequence"),
    ((attend_linearly,), {"decay": ["0.5", "0.5"]}, "decay: ['0.5', '0.5'], expected 2 numbers"),
    ((attend_linearly,), {"decay": "11"}, "decay: 11, expected 2 numbers"),
    ((attend_linearly,), {"decay": [True, True]}, "decay: [True, True], expected 2 numbers"),
    ((attend_linearly,), {"decay": {0.5, 0.75}}, "expected 2 numbers, one per KV head"),
    ((attend_linearly,), {"decay": torch.zeros(2, device="meta")}, "decay is on the device meta"),
    ((attend_linearly,), {"decay": [torch.tensor(0.5)] * 2}, "expected 2 numbers, one per KV head"),
    ((attend_linearly,), {"gates": np.zeros((1, 16, 2))}, "of type ndarray, expected a torch.Tensor"),
    ((attend_linearly,), {"initial_state": [0.0]}, "initial_state: [0.0] of type list, expected a torch.Tensor"),
    ((attend_linearly,), {"return_final_state": "no"}, "return final state: 'no' of type str, expected True or False"),
    ((move,), {"before": None}, "before: None of type NoneType, expected a SequenceLayout"),
    ((move,), {"after": "zigzag"}, "after: 'zigzag' of type str, expected a SequenceLayout"),
]  # fmt: skip


def fake(x: Tensor) -> Tensor:
    found: Tensor = FakeTensorMode().from_tensor(x)
    return found


TENSORS: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda x: None, "{}: None of type NoneType, expected a torch.Tensor"),
    (lambda x: [1.0], "{}: [1.0] of type list, expected a torch.Tensor"),
    (lambda x: x.numpy(), "of type ndarray, expected a torch.Tensor"),
    (lambda x: x.to("meta"), "{} is on the device meta, expected a plain tensor with data"),
    (lambda x: x.to_sparse(), "{} is of layout torch.sparse_coo, expected a plain tensor, as {}.to_dense() gives"),
    (fake, "{} is of type FakeTensor, expected a plain tensor"),
    (lambda x: DTensor.from_local(x, init_device_mesh("cpu", (2,))),
     "{} is of type DTensor, expected a plain tensor, as {}.to_local() gives"),
    (lambda x: torch.nested.nested_tensor([x[0], x[0]]), "{} is a nested tensor, expected a plain tensor; cu_seqlens"),
    (lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged), "{} is a nested tensor, expected"),
]  # fmt: skip
"""What becomes of a tensor, and what is said of it by its name."""

DTYPES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.long(),
    lambda x: x.bool(),
    lambda x: x.to(torch.complex64),
    lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    lambda x: x.to(torch.float8_e4m3fn),
]


def cases() -> list[tuple[Call, Callable[[], dict[str, Any]], str]]:
    """Calls, what they are given, and what they say."""
    found: list[tuple[Call, Callable[[], dict[str, Any]], str]] = []
    for calls, keywords, told in KEYWORDS:
        found += [(call, lambda keywords=keywords: keywords, told) for call in calls]  # type: ignore[misc]
    for call in (attend, attend_linearly, attend_prepared, move):
        name = "x" if call is move else "q"
        for change, told in TENSORS:
            given = partial(lambda change: {"tensors": {"q": change(shard_of()[0])}}, change)
            found.append((call, given, told.format(name, name)))
    for name, (change, told) in zip("kvkvkvkvk", TENSORS, strict=True):
        given = partial(lambda name, change: {"tensors": {name: change(shard_of()["qkv".index(name)])}}, name, change)
        found.append((attend, given, told.format(name, name)))
    for change_dtype in DTYPES:
        given = partial(lambda change: {"tensors": {"q": change(shard_of()[0])}}, change_dtype)
        found.append((attend, given, "q is torch."))
        found.append((attend_linearly, given, "q is torch."))
        found.append((move, given, "x is [1, 16, 4, 8] of torch."))
    return found


def refused_on_rank() -> list[tuple[str, Exception | None]]:
    """On a rank: what is told, and what was expected, of calls of all ranks and of rank 1 alone; at last one works."""
    odd, found = dist.get_rank() == 1, list[tuple[str, Exception | None]]()
    for call, given, told in cases():
        keywords = given()  # collectives of the mesh, too
        for keys in (keywords, keywords if odd else {}):
            try:
                call(**keys)
                found.append((told, None))
            except Exception as error:
                found.append((told, error))
    for call in (attend, attend_linearly, attend_prepared, move):
        call()
    return found


def test_arguments_of_a_wrong_type() -> None:
    for rank, answers in enumerate(succeeded(on_ranks(refused_on_rank, 2))):
        for number, (told, error) in enumerate(answers):
            where = "rank 1: " if number % 2 and rank == 0 else ""
            assert isinstance(error, TaspLabError), (told, error)
            assert str(error).startswith(where), (told, error)
            assert told in str(error), (told, error)
            assert "\n" not in str(error), (told, error)


def groups_on_rank() -> list[str]:
    """On a rank: what is said of groups that are none, which is known without the others."""
    found = []
    destroyed = dist.new_group([0, 1])
    dist.destroy_process_group(destroyed)
    with pytest.raises(RunError, match=r"^group: .*not registered"):
        attend(group=destroyed)
    for group in ("x", 5, [0, 1], dist):
        for call in (attend, attend_linearly, attend_prepared, move):
            with pytest.raises(WorkloadError) as refused:
                call(group=group)
            found.append(str(refused.value))
    return found


def test_groups_of_a_wrong_type() -> None:
    for said in succeeded(on_ranks(groups_on_rank, 2)):
        for each in said:
            assert each.startswith("group: ")
            assert each.endswith(", expected a process group, a DeviceMesh or None")


def accepted_on_rank() -> bool:
    """On a rank: numbers of other types than Python's own have the results of Python's."""
    expected = attend(window=8, scale=0.5)
    given = {"window": np.int32(8), "scale": np.float32(0.5), "causal": np.bool_(True), "timeout_s": np.int64(20)}
    same = [attend(**given), attend(window=Eight.KEYS, scale=Fraction(1, 2), timeout_s=10**9)]
    return all(torch.equal(expected, each) for each in same)  # type: ignore[arg-type]


def test_numbers_of_other_types_are_numbers() -> None:
    assert succeeded(on_ranks(accepted_on_rank, 2)) == [True, True]


def unexpected_on_rank() -> str:
    """On a rank: what is raised where what a rank gives fails in a way that no check knows."""
    bad = dist.get_rank() == 1

    def lengths() -> Iterator[int]:
        raise KeyError("no such document")
        yield 0

    with pytest.raises((KeyError, TaspLabError)) as raised:
        attend(cu_seqlens=lengths() if bad else [0, 32])
    attend()
    return f"{type(raised.value).__name__} {raised.value}"


def test_an_error_of_any_type_is_told_to_the_other_ranks() -> None:
    found = succeeded(on_ranks(unexpected_on_rank, 2))
    assert found == ["RunError rank 1: 'no such document'", "KeyError 'no such document'"]


# Transforms of torch


LAYER = Workload(24, heads=4, kv_heads=2, head_dim=8, dtype="fp32", mask="causal")


def close(found: Any, expected: Any) -> bool:
    return all(torch.allclose(x.double(), y.double(), 1e-4, 1e-5) for x, y in zip(found, expected, strict=True))


def transformed_on_rank() -> None:
    """On a rank: gradients by torch.func are those of float64, of one layer and of two, of every kind."""
    here = Shard(LAYER, "tasp")
    q, k, v = inputs = tuple(x.detach() for x in here.inputs)
    call = partial(attention, schedule="tasp", causal=True)
    expected = here.expected()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (call(q, k, v) * here.dout).sum()

    assert close(torch.func.grad(loss, (0, 1, 2))(*inputs), expected[1:])
    gradients, value = torch.func.grad_and_value(loss, (0, 1, 2))(*inputs)
    assert close([*gradients, value[None]], [*expected[1:], (expected[0] * here.dout).sum()[None]])
    out, back = torch.func.vjp(call, *inputs)
    assert close([out, *back(here.dout)], expected)
    assert close(torch.func.grad(lambda k: torch.func.grad_and_value(loss)(q, k, v)[1])(k)[None], expected[2][None])

    (out, lse), back = torch.func.vjp(partial(attention_with_lse, schedule="tasp", causal=True), *inputs)
    assert close(back((here.dout, torch.zeros_like(lse))), expected[1:])
    assert close(torch.func.vjp(lambda q: call(q, k, v).sum(), q)[1](torch.ones(()))[0], of_ones(here))

    module = SequenceParallelAttention(schedule="tasp", causal=True)
    assert close([torch.func.functional_call(module, {}, inputs)], expected[:1])
    weights = {"weight": torch.ones(()), "attention.nothing": torch.zeros(())}
    of_weight = torch.func.grad(lambda given: (torch.func.functional_call(Scaled(), given, inputs) * here.dout).sum())
    found = of_weight({"weight": weights["weight"]})["weight"]
    assert close([found[None]], [(expected[1] * q).sum()[None]])

    gates = -torch.rand(*k.shape[:3], generator=torch.Generator().manual_seed(here.rank))

    def linear_loss(q: Tensor, gates: Tensor) -> Tensor:
        return (linear_attention(q, k, v, gates=gates) * here.dout).sum()

    of_autograd = [x.clone().requires_grad_() for x in (q, gates)]
    assert close(torch.func.grad(linear_loss, (0, 1))(q, gates),
                 torch.autograd.grad(linear_loss(*of_autograd), of_autograd))  # fmt: skip
    layout = contiguous(24, 3)
    assert torch.equal(torch.func.vjp(lambda x: relayout(x, layout, here.layout), q)[1](here.dout)[0],
                       relayout(here.dout, here.layout, layout))  # fmt: skip
    prepared = prepare(*here.inputs, schedule="tasp", causal=True)
    assert close(torch.func.grad(lambda k: (prepared(q, k, v) * here.dout).sum())(k)[None], expected[2][None])


class Scaled(torch.nn.Module):
    """Attention of queries times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.attention = SequenceParallelAttention(schedule="tasp", causal=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = self.attention(q * self.weight, k, v)
        return found


def of_ones(here: Shard) -> Tensor:
    return here.of(by_formula(LAYER, *layer_of(LAYER), torch.ones_like(dout_of(LAYER)))[1])


def test_gradients_by_torch_func() -> None:
    assert succeeded(on_ranks(transformed_on_rank, 3)) == [None] * 3


VMAP = "a layer inside of torch.func.vmap (or jacrev, jacfwd, hessian, is_grads_batched), expected torch.func.grad, vjp"
JVP = "a layer inside of torch.func.jvp (or linearize, forward-mode differentiation), expected torch.func.grad, vjp"


def untransformed_on_rank() -> list[tuple[str, str]]:
    """On a rank: what is expected and said of transforms that no layer supports, of all ranks and of rank 1 alone."""
    q, k, v = shard_of()
    several, found = torch.stack([q, q]), list[tuple[str, str]]()
    wanted = [x.clone().requires_grad_() for x in (q, k, v)]
    basis = torch.eye(q.numel())[:2].view(2, *q.shape)

    def call(x: Tensor) -> Tensor:
        return attention(x, k, v, schedule="tasp", timeout_s=20)

    def of_dual(x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return call(forward_ad.make_dual(x, torch.ones_like(x)))

    def back(x: Tensor) -> Any:
        return torch.autograd.grad(
            attention(*wanted, schedule="tasp", timeout_s=20), wanted, basis, is_grads_batched=True
        )

    def jacobian(x: Tensor) -> Any:
        return torch.func.jacrev(call)(x)

    def plain_back(x: Tensor) -> Any:
        return torch.autograd.grad(attention(*wanted, schedule="tasp", timeout_s=20).sum(), wanted)

    forward: list[tuple[str, Callable[[Tensor], Any]]] = [
        (VMAP, lambda x: torch.func.vmap(call)(several)),
        (VMAP, lambda x: torch.func.vmap(lambda y: call(x) + y)(several)),
        (VMAP, lambda x: torch.func.vmap(torch.func.grad(lambda y: call(y).sum()))(several)),
        (VMAP, lambda x: torch.func.grad(lambda y: torch.func.vmap(call)(torch.stack([y, y])).sum())(x)),
        (VMAP, torch.func.jacfwd(call)),
        (VMAP, torch.func.hessian(lambda y: call(y).sum())),
        (JVP, lambda x: torch.func.jvp(call, (x,), (x,))),
        (JVP, lambda x: torch.func.jvp(torch.func.grad(lambda y: call(y).sum()), (x,), (x,))),
        (JVP, of_dual),
        ("a layer inside of torch.func.functionalize, expected torch.func.grad, vjp", torch.func.functionalize(call)),
        ("q is an inference tensor, expected q.clone() where gradients are wanted", of_inference),
    ]
    backward: list[tuple[str, Callable[[Tensor], Any]]] = [(VMAP, back), (VMAP, jacobian)]
    for told, transform in forward:
        for alone in (False, True):
            found.append((told, said_of(call if alone and dist.get_rank() == 0 else transform, q)))
    found += [(JVP, said_of(lambda x: torch.func.linearize(call, x), q))] * 2  # computes the layer once before
    for told, transform in backward:
        for alone in (False, True):
            found.append((told, said_of(plain_back if alone and dist.get_rank() == 0 else transform, q)))
    return found


def of_inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        inferred = x.clone()
    return attention(inferred, x, x.clone().requires_grad_(), schedule="tasp", timeout_s=20)


def said_of(transform: Callable[[Tensor], Any], q: Tensor) -> str:
    try:
        transform(q)
    except TaspLabError as error:
        return str(error)
    return "not refused"


def test_other_transforms_are_refused_by_name_on_all_ranks() -> None:
    for rank, answers in enumerate(succeeded(on_ranks(untransformed_on_rank, 2))):
        for number, (told, said) in enumerate(answers):
            assert told in said, (told, said)
            assert not said.startswith("rank") or (rank == 0 and number % 2), said


def second_derivatives_on_rank() -> list[str]:
    """On a rank: what is said of derivatives of gradients, by autograd and by torch.func."""
    here, found = Shard(LAYER, "tasp"), []
    call = partial(attention, schedule="tasp", causal=True)
    dq = torch.autograd.grad(call(*here.inputs).sum(), here.q, create_graph=True)[0]
    q, k, v = (x.detach() for x in here.inputs)

    def penalty(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: call(y, k, v).sum())(x).square().sum()

    for differentiate in (lambda: (here.q.sum() + dq.square().sum()).backward(), lambda: torch.func.grad(penalty)(q)):
        with pytest.raises(WorkloadError) as refused:
            differentiate()
        found.append(str(refused.value))
    return found


def test_second_derivatives_are_refused_by_name() -> None:
    expected = "second derivatives of a layer are not computed, expected a loss without gradients in it"
    assert succeeded(on_ranks(second_derivatives_on_rank, 2)) == [[expected] * 2] * 2
