"""Runs of cases on real ranks, both passes, and their comparison with float64 on one process.

    verdicts = list(verdicts_of(drawn(case) for case in cases() if case.needs <= known()))

Schedule, number of ranks and their order are drawn for each case, but for ways of communication that a test names. The
exact result follows from the mask as an array of True and False. A case passes if no error in norm exceeds `FACTOR`
times that of PyTorch's attention on one process in that dtype, with the same mask (of linear attention: that of the
exact result, rounded), or `FP32_LIMIT` where that is larger, and if log-sum-exps are within `LSE_LIMIT`. On that one
process keys and values are padded to one width: for two PyTorch computes in float32 and rounds once. Gradients of
sinks have a limit of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid, pad, scaled_dot_product_attention

from experiments.ported_cases.cases import Case
from runtime import attention_with_lse, linear_attention, shard, unshard
from runtime.executor.views import DTYPES
from tasp_lab.core.errors import TaspLabError, first_line
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.registry import LINEAR, attention_names_on, state_schedules
from tasp_lab.workload.sequence_layout import SequenceLayout, contiguous
from tests.support.linear_recurrence import recurrence
from tests.support.ranks import on_ranks
from tests.support.systems import has_heads

FACTOR, FP32_LIMIT, LSE_LIMIT = 1.6, 1e-5, 1e-4
RANKS = range(3, 9)
AT_ONCE = 16
"""Runs in one start of ranks, which may take as long as `tests.support.ranks` waits."""

Tensor = torch.Tensor
Tensors = dict[str, Tensor]


class Run(NamedTuple):
    """A case, the schedule, and the order in which the processes are ranks of the group, or of the groups."""

    case: Case
    schedule: str
    order: tuple[int, ...]


def drawn(case: Case) -> Run:
    """The run of a case, by the name of the case."""
    draw = Random(f"{case.project} {case.name}")
    sizes = [case.ranks] if case.ranks else [n for n in RANKS if case.way != "a2a+p2p" or n % 2 == 0]
    while True:
        n = draw.choice(sizes)
        schedule = draw.choice([name for name in _schedules(case, n) if name.startswith(tuple(_OF_WAY[case.way]))])
        if case.kind == "linear" or has_heads(schedule, n, *case.heads):
            return Run(case, schedule, tuple(draw.sample(range(n), n)))


def _schedules(case: Case, ranks: int) -> list[str]:
    if case.kind == "softmax":
        return attention_names_on(ranks, variants=True)
    states_only = case.states or case.decay in ("scalar", "channel")  # the others take no gates
    return state_schedules() if states_only else list(LINEAR)


_OF_WAY: Mapping[str, Sequence[str]] = {
    "": ("",),
    "p2p": ("zigzag-ring-attention", "ring-attention", "tasp", "half-each-way"),
    "all_gather": ("kv-all-gather", "multi-ring-kv-all-gather", "direct-kv-all-gather"),
    "a2a": ("ulysses", "staged-ulysses"),
    "a2a+p2p": ("usp:",),
}
"""The beginnings of names of schedules that move what Transformer Engine's `cp_comm_type` says."""


def verdicts_of(runs: Iterable[Run]) -> Iterator[Verdict]:
    """Start ranks and run; the runs on the same number of ranks one after another."""
    by_ranks = dict[int, list[Run]]()
    for run in runs:
        by_ranks.setdefault(len(run.order), []).append(run)
    for ranks, own in sorted(by_ranks.items()):
        for first in range(0, len(own), AT_ONCE):
            found, *_ = on_ranks(run_on_rank, ranks, own[first : first + AT_ONCE])
            if not isinstance(found, list):
                raise RuntimeError(f"{ranks} ranks from {own[first].case.name} on: {found}")
            yield from found


# On a rank


def run_on_rank(runs: Sequence[Run]) -> list[Verdict]:
    """On each process: both passes of all runs; process 0 has the verdicts."""
    rank, made, verdicts = dist.get_rank(), dict[tuple[int, ...], Any](), list[Verdict]()
    for run in runs:
        size = len(run.order) // run.case.groups
        members = [run.order[first : first + size] for first in range(0, len(run.order), size)]
        for each in members:
            if each not in made:
                made[each] = dist.new_group(list(each), sort_ranks=False)
        own = next(number for number, each in enumerate(members) if rank in each)
        place = members[own].index(rank)
        found: Tensors | str
        try:
            found = _shard_of_results(run, own, place, made[members[own]])
        except TaspLabError as error:
            found = f"rank {rank}: {first_line(error)}"
        everyone: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(found, everyone)
        if everyone is not None:
            by_group = [[everyone[process] for process in group] for group in members]
            verdicts.append(_judged(run, by_group))
    return verdicts


def _layout(run: Run) -> SequenceLayout:
    ranks = len(run.order) // run.case.groups
    if run.case.kind == "linear":
        return contiguous(run.case.length, ranks)
    return attention_layout(run.schedule, run.case.workload, ranks)


def _shard_of_results(run: Run, group_number: int, place: int, group: Any) -> Tensors:
    """What a rank gets: outputs, log-sum-exps and gradients of its shard."""
    case, layout = run.case, _layout(run)
    rows = slice(*(number * case.batch // case.groups for number in (group_number, group_number + 1)))
    given = {name: x[rows] if name not in ("sinks", "decay") else x for name, x in inputs(case).items()}
    here = {
        name: x if name in ("sinks", "decay", "state", "dstate") else shard(x, layout, place)
        for name, x in given.items()
    }
    keywords = case.keywords | {"schedule": run.schedule, "group": group}
    if case.kind == "linear":
        return _linear(case, here, keywords, place == 0, place == layout.world_size - 1)
    leaves = {name: here[name].requires_grad_() for name in ("q", "k", "v", "sinks") if name in here}
    if case.sinks:
        keywords["sinks"] = leaves["sinks"].float().logsumexp(0)
    out, lse = attention_with_lse(leaves["q"], leaves["k"], leaves["v"], **keywords)
    gradients = torch.autograd.grad(out, list(leaves.values()), here["dout"])
    return {"out": out.detach(), "lse": lse.detach(), **_named(leaves, gradients)}


def _linear(case: Case, here: Tensors, keywords: dict[str, Any], is_first: bool, is_last: bool) -> Tensors:
    names = [each for each in ("q", "k", "v", "gates") if each in here] + ["state"] * (case.states and is_first)
    leaves = {name: here[name].requires_grad_() for name in names}
    keywords |= {"gates": leaves.get("gates"), "decay": here.get("decay"), "initial_state": leaves.get("state")}
    found: Any = linear_attention(leaves["q"], leaves["k"], leaves["v"], **keywords)
    out, state = found if case.states else (found, None)
    outputs, gradients = [out], [here["dout"]]
    if case.normalize:
        sums = linear_attention(leaves["q"], leaves["k"], torch.ones_like(leaves["v"][..., :1]), **keywords)
        outputs = [out / sums]
    if state is not None and is_last:
        outputs, gradients = [*outputs, state], [*gradients, here["dstate"]]
    found = _named(leaves, torch.autograd.grad(outputs, list(leaves.values()), gradients))
    return {"out": outputs[0].detach(), **({} if state is None else {"state": state.detach()}), **found}


def _named(leaves: Iterable[str], gradients: Iterable[Tensor]) -> Tensors:
    return {f"d{name}": each for name, each in zip(leaves, gradients, strict=True)}


def inputs(case: Case) -> Tensors:
    """The whole tensors of a case, the same in every process. Sinks are [sinks, heads]."""
    draw = torch.Generator().manual_seed(crc32(case.name.encode()))
    (heads, kv_heads), b, n, d, e = case.heads, case.batch, case.length, case.head_dim, case.value_size

    def normal(*shape: int, dtype: str = case.dtype) -> Tensor:
        return torch.randn(*shape, generator=draw).to(DTYPES[dtype])

    found = {"q": normal(b, n, heads, d), "k": normal(b, n, kv_heads, d), "v": normal(b, n, kv_heads, e)}
    found["dout"] = normal(b, n, heads, e)
    if case.sinks:
        found["sinks"] = torch.zeros(1, heads) if case.off_by_one else normal(case.sinks, heads, dtype="fp32")
    if case.kind == "softmax":
        return found
    if case.normalize:  # as feature maps make them: else denominators are near 0
        found |= {name: found[name].abs() + 0.01 for name in "qk"}
    found["q"] = found["q"] * (d**-0.5 if case.scale is None else case.scale)
    if case.decay in ("scalar", "channel"):
        per = (b, n, kv_heads, d) if case.decay == "channel" else (b, n, kv_heads)
        logits = normal(*per, dtype="fp32")
        found["gates"] = logsigmoid(logits) / case.gate_normalizer
    elif case.decay != "none":
        found["decay"] = _constant_decays(case)
    if case.states:
        found["state"], found["dstate"] = (normal(b, kv_heads, d, e, dtype="fp32") for _ in range(2))
    return found


def _constant_decays(case: Case) -> Tensor:
    """Those of RetNet, 1 - 2^(-5 - h); or exp(-s) of ALiBi's slopes s: powers of 2^(-8 / n), of the next power of 2 if
    the number of heads n is none, and then of twice as many heads, every other one."""
    heads = case.heads[1]
    if case.decay == "retention":
        return 1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64))

    def slopes(n: int) -> list[float]:
        return [2 ** (-8 * (head + 1) / n) for head in range(n)]

    whole = 1 << (heads.bit_length() - 1)
    both = slopes(whole) + slopes(2 * whole)[::2][: heads - whole]
    return torch.tensor([-each for each in both], dtype=torch.float64).exp()


# What is expected


def exact(case: Case, given: Tensors) -> Tensors:
    """The results in float64, on one process."""
    names = [name for name in ("q", "k", "v", "gates", "state", "sinks") if name in given]
    leaves: Tensors = {name: given[name].double().requires_grad_() for name in names}
    if case.kind == "softmax":
        return _exact_softmax(case, leaves, given["dout"].double())
    decay = given["decay"].tolist() if "decay" in given else None
    q, k, v = (leaves[name] for name in "qkv")
    out, state = recurrence(q, k, v, leaves.get("gates"), decay, state=leaves.get("state"))
    if case.normalize:
        out = out / recurrence(q, k, torch.ones_like(v[..., :1]), leaves.get("gates"), decay)[0]
    outputs, gradients = ([out, state], [given["dout"], given["dstate"]]) if case.states else ([out], [given["dout"]])
    found = torch.autograd.grad(outputs, list(leaves.values()), [each.double() for each in gradients])
    return {"out": out.detach(), **({"state": state.detach()} if case.states else {}), **_named(leaves, found)}


def _exact_softmax(case: Case, leaves: Tensors, dout: Tensor) -> Tensors:
    users, scale = case.heads[0] // case.heads[1], case.head_dim**-0.5 if case.scale is None else case.scale
    q, k, v = leaves["q"], *(leaves[name].repeat_interleave(users, 2) for name in "kv")
    scores = torch.einsum("bihd,bjhd->bhij", q * scale, k).masked_fill(~case.seen, -torch.inf)
    lse = scores.logsumexp(-1)
    if case.sinks:
        lse = torch.logaddexp(lse, leaves["sinks"].logsumexp(0)[:, None])
    out = torch.einsum("bhij,bjhe->bihe", (scores - lse[..., None]).exp(), v)
    found = _named(leaves, torch.autograd.grad(out, list(leaves.values()), dout))
    return {"out": out.detach(), "lse": lse.detach(), **found}


def on_one_process(case: Case, given: Tensors, wanted: Tensors) -> Tensors:
    """The results in the dtype of the case, those of linear attention rounded once."""
    dtype = DTYPES[case.dtype]
    if case.kind == "linear":
        return {name: x.to(torch.float32 if name in ("state", "dstate", "dgates") else dtype)
                for name, x in wanted.items()}  # fmt: skip
    leaves = {name: given[name].detach().clone().requires_grad_() for name in "qkv"}
    width, scale = max(case.head_dim, case.value_size), case.head_dim**-0.5 if case.scale is None else case.scale
    q, k, v = (pad(x.transpose(1, 2), (0, width - x.shape[3])) for x in leaves.values())
    seen: Tensor = case.seen
    if case.sinks:  # one key more, which is 0, with the sinks as its bias, and a value of 0
        k, v = (pad(each, (0, 0, 0, 1)) for each in (k, v))
        sinks = given["sinks"].logsumexp(0).to(dtype)[:, None, None].expand(-1, case.length, 1)
        bias = torch.zeros(case.length, case.length, dtype=dtype).masked_fill(~seen, -torch.inf)
        seen = torch.cat([bias.expand(case.heads[0], -1, -1), sinks], 2)[None]
    out = scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
    out = out.transpose(1, 2)[..., : case.value_size]
    return {"out": out.detach(), **_named(leaves, torch.autograd.grad(out, list(leaves.values()), given["dout"]))}


# Verdicts


class Verdict(NamedTuple):
    """What became of a run. `worst` is the largest error of a tensor over its limit, `tensor` the name of that."""

    run: Run
    worst: float
    tensor: str
    error: str = ""

    @property
    def has_passed(self) -> bool:
        return not self.error and self.worst <= 1


def _judged(run: Run, by_group: Sequence[Sequence[Tensors | str]]) -> Verdict:
    error = next((each for group in by_group for each in group if isinstance(each, str)), "")
    if error:
        return Verdict(run, torch.inf, "", error)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # the other processes wait
    case, given = run.case, inputs(run.case)
    wanted = exact(case, given)
    found = _whole(run, by_group)  # type: ignore[arg-type]
    single = on_one_process(case, given, wanted)
    torch.set_num_threads(threads)
    over = dict[str, float]()
    for name, x in wanted.items():
        assert found[name].shape == x.shape, (run, name, found[name].shape, x.shape)
        if name == "lse":
            over[name] = float((found[name] - x).abs().max()) / LSE_LIMIT
        else:
            limit = _limit_of_sinks(given, wanted, single) if name == "dsinks" else FACTOR * _error(single[name], x)
            over[name] = _error(found[name], x) / max(limit, FP32_LIMIT)
    worst = max(over, key=lambda name: over[name] if over[name] == over[name] else torch.inf)
    return Verdict(run, over[worst], worst)


def _limit_of_sinks(given: Tensors, wanted: Tensors, single: Tensors) -> float:
    """Three standard deviations of their gradient, relative in norm, if errors of one process' results are random.

    A head has a number that sums over all queries, each result's inner product with its gradient, times its sink's
    part of the softmax; so few errors of another process are no measure.
    """
    sinks = given["sinks"].double()
    part = (sinks.logsumexp(0)[:, None] - wanted["lse"]).exp().transpose(1, 2)
    of_rows = part * (given["dout"].double() * (single["out"].double() - wanted["out"])).sum(3)
    of_heads = of_rows.square().sum((0, 1)).sqrt()
    return float(3 * (sinks.softmax(0) * of_heads).norm() / wanted["dsinks"].norm())


def _error(x: Tensor, wanted: Tensor) -> float:
    return float((x.double() - wanted).norm() / wanted.norm())


def _whole(run: Run, by_group: Sequence[Sequence[Tensors]]) -> Tensors:
    """The results of all positions and the whole batch, from shards by group and rank of it."""
    layout, of_groups = _layout(run), list[Tensors]()
    for shards in by_group:
        names = dict.fromkeys(name for each in shards for name in each)
        parts = {name: [each[name] for each in shards if name in each] for name in names}
        of_groups.append({name: _joined(name, each, layout) for name, each in parts.items()})
    return {name: torch.cat([each[name] for each in of_groups]) for name in of_groups[0]}


def _joined(name: str, parts: Sequence[Tensor], layout: SequenceLayout) -> Tensor:
    if name in ("state", "dstate"):
        (only,) = parts
        return only
    if name == "dsinks":  # of the queries of each rank
        return torch.stack(list(parts)).sum(0)
    return unshard(parts, layout, 2 if name == "lse" else 1)
