"""A layer of attention, softmax or linear, on real ranks and in float64 on one: inputs, shards, results and errors.

A test module lists `Case`s and calls `check`, which starts the ranks, runs both passes of every case and compares each
output and gradient, and the bytes that were sent, with what one process computes and with the schedule::

    check([Case(layer, "tasp"), Case(layer, "lasp-2")], world_size=4)
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from runtime import attention, linear_attention
from runtime.executor.views import DTYPES
from runtime.sequence_parallel.sharding import shard
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import Passes
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.build import attention_layout, attention_schedules, linear_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import contiguous
from tests.support.linear_recurrence import recurrence
from tests.support.masks import pairs_seen
from tests.support.ranks import on_ranks, succeeded
from tests.support.sent_bytes import SentBytes

Tensor = torch.Tensor

BOTH = AttentionOptions("both")

DECAYS = (0.75, 0.96875)
"""Constant decays of two KV heads."""


# A whole layer, the same in every process


def layer_of(work: Workload) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    drawn = torch.Generator().manual_seed(1)
    shapes = (work.heads, work.head_dim), (work.kv_head_count, work.head_dim), (work.kv_head_count, work.value_size)
    q, k, v = (torch.randn(work.batch, work.sequence, *shape, generator=drawn) for shape in shapes)
    dtype = DTYPES[work.dtype]
    return q.to(dtype), k.to(dtype), v.to(dtype)


def dout_of(work: Workload) -> Tensor:
    """The gradient of the result, in its dtype."""
    shape = work.batch, work.sequence, work.heads, work.value_size
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DTYPES[work.dtype])


def gates_of(work: Workload) -> Tensor | None:
    """The logarithms of the decays of linear attention, None unless they depend on the data."""
    per = {"scalar": (work.kv_head_count,), "channel": (work.kv_head_count, work.head_dim)}
    if work.decay not in per:
        return None
    drawn = torch.Generator().manual_seed(3)
    return -0.3 * torch.randn(work.batch, work.sequence, *per[work.decay], generator=drawn).abs()


def seen_by(work: Workload) -> Tensor:
    """Which query row sees which key row."""
    return torch.from_numpy(pairs_seen(work))


def by_formula(work: Workload, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Softmax attention and its derivatives in float64.

    P = softmax(scale Q K'), O = P V, dV = P' dO, dS = P (dO V' - rowsum(dO O)), dQ = scale dS K, dK = scale dS' Q.
    """
    group, scale = work.heads // work.kv_head_count, work.head_dim**-0.5
    q, dout, k, v = (x.double().transpose(1, 2) for x in (q, dout, k, v))
    every_k, every_v = (x.repeat_interleave(group, 1) for x in (k, v))
    p = (scale * q @ every_k.mT).masked_fill(~seen_by(work), -torch.inf).softmax(-1)
    out = p @ every_v
    ds = p * (dout @ every_v.mT - (dout * out).sum(-1, keepdim=True))
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (scale * ds.mT @ q, p.mT @ dout))
    return [x.transpose(1, 2) for x in (out, scale * ds @ every_k, dk, dv)]


@cache
def exact(work: Workload) -> list[Tensor]:
    """The result and the gradients of queries, keys, values and, if there are any, gates, in float64."""
    if work.kind == "softmax":
        return by_formula(work, *layer_of(work), dout_of(work))
    gates = gates_of(work)
    given = [*layer_of(work), *([] if gates is None else [gates])]
    q, k, v, *decays = leaves = [x.double().requires_grad_() for x in given]
    if work.mask == "full":
        users = work.heads // work.kv_head_count
        out = torch.einsum("bihd,bjhd,bjhe->bihe", q, *(x.repeat_interleave(users, 2) for x in (k, v)))
    else:
        starts = frozenset(accumulate(work.documents or (), initial=0))
        out, _ = recurrence(q, k, v, *decays, decays=DECAYS if work.decay == "head" else None, starts=starts)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout_of(work).double())]


# A rank's part of it


class Shard:
    """A rank's part of a layer that wants gradients."""

    def __init__(
        self, work: Workload, schedule: str, group: Any = None, options: AttentionOptions = DEFAULT_OPTIONS
    ) -> None:
        self.work, self.schedule, self.group = work, schedule, group
        self.rank, n = dist.get_rank(group), dist.get_world_size(group)
        is_softmax = work.kind == "softmax"
        self.layout = attention_layout(schedule, work, n, options) if is_softmax else contiguous(work.sequence, n)
        self.q, self.k, self.v, self.dout = map(self.of, (*layer_of(work), dout_of(work)))
        gates = gates_of(work)
        self.gates = None if gates is None else self.of(gates)
        for x in self.inputs:
            x.requires_grad_()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.q, self.k, self.v) if self.gates is None else (self.q, self.k, self.v, self.gates)

    def of(self, x: Tensor) -> Tensor:
        """Of a tensor with all positions those that are here."""
        return shard(x, self.layout, self.rank)

    def attend(self, **keywords: Any) -> Tensor:
        work = self.work
        packed = None if work.documents is None else list(accumulate(work.documents, initial=0))
        keywords = {"schedule": self.schedule, "group": self.group, "causal": work.mask == "causal",
                    "cu_seqlens": packed, **keywords}  # fmt: skip
        if work.kind == "softmax":
            return attention(self.q, self.k, self.v, **{"window": work.window, "ranges": work.ranges, **keywords})
        decay = DECAYS if work.decay == "head" else None
        return linear_attention(self.q, self.k, self.v, **{"decay": decay, "gates": self.gates, **keywords})

    def run(self, **keywords: Any) -> list[Tensor]:
        """Both passes: the result, and the gradients of this run alone."""
        out = self.attend(**keywords)
        return [out.detach(), *torch.autograd.grad(out, self.inputs, self.dout)]

    def expected(self) -> list[Tensor]:
        return list(map(self.of, exact(self.work)))


Squares = list[tuple[float, float]]
"""Of each tensor of both passes on a rank the squares of its error and of what was expected."""


def squares(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Squares:
    return [
        (float((x.double() - wanted).square().sum()), float(wanted.square().sum()))
        for x, wanted in zip(found, expected, strict=True)
    ]


def relative_errors(of_ranks: Sequence[Squares]) -> list[float]:
    """The relative error in norm of each tensor, over all ranks."""
    return [(sum(x for x, _ in each) / sum(y for _, y in each)) ** 0.5 for each in zip(*of_ranks, strict=True)]


# Cases on all ranks


class Case(NamedTuple):
    """A layer and how it is computed. `passes` are built before the ranks start, or by each rank from the name."""

    work: Workload
    schedule: str
    options: AttentionOptions = BOTH
    transport: str = "auto"
    passes: Passes | None = None

    def __repr__(self) -> str:
        return f"{self.work} {self.schedule} {self.options} {self.transport}"

    def built(self, world_size: int) -> Sequence[Schedule]:
        if self.passes is not None:
            return self.passes
        mesh, work = full_mesh(world_size), self.work
        if work.kind == "softmax":
            return attention_schedules(self.schedule, mesh, work, options=self.options)
        return linear_schedules(
            self.schedule, mesh, work, None, self.options, DECAYS if work.decay == "head" else ()
        )  # fmt: skip


def built_once(cases: Sequence[Case], world_size: int) -> list[Case]:
    """Cases of softmax attention whose schedules this process builds; else every rank builds them, which takes long."""
    return [case._replace(passes=Passes(*case.built(world_size))) for case in cases]


Run = tuple[Squares, int, int]
"""The errors of a case on a rank, and the bytes that it sent in the forward and in the backward pass."""


def run_cases(cases: Sequence[Case]) -> list[Run]:
    """On a rank: both passes of every case."""
    sent, found = SentBytes(), []
    for case in cases:
        here = Shard(case.work, case.schedule, options=case.options)
        keywords: dict[str, Any] = {"options": case.options} if case.passes is None else {"schedule": case.passes}
        sent.count = 0
        out = here.attend(transport=case.transport, **keywords)
        forward, sent.count = sent.count, 0
        gradients = torch.autograd.grad(out, here.inputs, here.dout)
        expected = [(x.shape, x.dtype) for x in (here.dout, *here.inputs)]
        assert [(x.shape, x.dtype) for x in (out, *gradients)] == expected
        found.append((squares([out.detach(), *gradients], here.expected()), forward, sent.count))
    return found


def check(cases: Sequence[Case], world_size: int, limit: float = 1e-5) -> None:
    """Run cases on ranks: errors relative to float64 are below a limit, bytes sent one by one are the ledger's."""
    for case, *of_ranks in zip(cases, *succeeded(on_ranks(run_cases, world_size, cases)), strict=True):
        errors = relative_errors([each for each, _, _ in of_ranks])
        assert max(errors) < limit, (case, errors)
        if case.transport in ("auto", "p2p"):
            for passing, schedule in enumerate(case.built(world_size), 1):
                expected = schedule.bytes_sent().sum(axis=(0, 2)).tolist()
                assert [each[passing] for each in of_ranks] == expected, (case, passing)


def errors_of(cases: Sequence[Case], world_size: int) -> list[tuple[Case, list[float]]]:
    """The relative errors of each case on ranks."""
    parts = succeeded(on_ranks(run_cases, world_size, cases))
    return [(case, relative_errors([each for each, _, _ in of])) for case, *of in zip(cases, *parts, strict=True)]


# What a call allocates


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors made in this thread that are alive, but not those of existing ones."""

    def __init__(self, *existing: Tensor | None) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._existing = [each.untyped_storage() for each in existing if each is not None]
        self._known: set[int] = {each._cdata for each in self._existing}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        tree_map_only(Tensor, self._note, result)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
