"""Errors of every schedule of softmax attention on real processes: results, log-sum-exp and gradients against float64.

``python -m experiments.tables.layer_errors`` runs both passes of `LAYERS` by all schedules on 2, 3, 4 and 8 processes
over gloo and writes ``experiments/results/layer_errors.md``; a case that fails is in the table with its error.
The float64 reference is the formula of the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from experiments.common import RESULTS, machine_record, markdown_table, write_page
from runtime import attention_with_lse, shard
from tasp_lab.schedules.attention.backward import Passes
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout, attention_schedules
from tasp_lab.schedules.registry import NOT_APPLICABLE, attention_names_on
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.rank_layers import by_formula, seen_by

WORLD_SIZES = (2, 3, 4, 8)
DOCUMENTS = (13, 0, 1, 40, 16)
"""An empty one, one of a single position, and one longer than a shard."""

LAYERS: Mapping[str, Workload] = {
    "full": Workload(67, batch=2, heads=24, head_dim=8, dtype="fp32", mask="full"),
    "causal": Workload(67, batch=2, heads=24, kv_heads=12, head_dim=8, dtype="fp32", mask="causal"),
    "window": Workload(61, heads=24, kv_heads=2, head_dim=8, dtype="fp32", mask="causal", window=13),
    "documents": Workload(70, heads=24, kv_heads=1, head_dim=8, dtype="fp32", documents=DOCUMENTS, mask="full"),
    "causal documents": Workload(
        70, heads=24, kv_heads=8, head_dim=8, dtype="fp32", mask="causal", documents=DOCUMENTS
    ),
    "causal, bf16": Workload(67, heads=24, kv_heads=8, head_dim=16, dtype="bf16", mask="causal"),
    "full, fp16": Workload(67, heads=24, kv_heads=8, head_dim=16, dtype="fp16", mask="full"),
}
"""Lengths that no world size divides, every mask, and from 1 KV head to as many as heads."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LIMITS = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}
"""Larger errors of a tensor, over its largest value, are failures."""

Tensors = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    """A layer by a schedule, which is built before ranks start."""

    layer: str
    name: str
    passes: Passes


# The reference


def draw(layer: Workload) -> Tensors:
    """q, k, v and dout of the whole layer, [batch, positions, heads, head_dim]."""
    drawn = torch.Generator().manual_seed(0)
    counts = (layer.heads, layer.kv_head_count, layer.kv_head_count, layer.heads)
    shapes = ((layer.batch, layer.sequence, heads, layer.head_dim) for heads in counts)
    return tuple(torch.randn(shape, generator=drawn).to(DTYPES[layer.dtype]) for shape in shapes)


def exact(layer: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Tensors:
    """out, the log-sum-exp [batch, positions, heads], dq, dk and dv in float64 (`tests.support.rank_layers`)."""
    out, *gradients = by_formula(layer, q, k, v, dout)
    keys = k.double().repeat_interleave(layer.heads // layer.kv_head_count, 2)
    scores = layer.head_dim**-0.5 * torch.einsum("bihd,bjhd->bhij", q.double(), keys)
    lse = scores.masked_fill(~seen_by(layer), -torch.inf).logsumexp(-1).transpose(1, 2)
    return out, lse, *gradients


@cache
def whole(layer: str) -> tuple[Tensors, Tensors]:
    """The inputs of a layer, and what is expected of it."""
    inputs = draw(LAYERS[layer])
    return inputs, exact(LAYERS[layer], *inputs)


# On ranks


def on_ranks(function: Callable[..., object], ranks: int, *arguments: object) -> list[Any]:
    """What each of several processes over gloo returns, by rank."""
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        task = (ranks, f"file://{folder}/store", function, answers, *arguments)
        processes = [fork.Process(target=_rank, args=(rank, *task)) for rank in range(ranks)]
        for process in processes:
            process.start()
        found = dict(answers.get() for _ in processes)
        for process in processes:
            process.join()
    return [found[rank] for rank in range(ranks)]


def _rank(rank: int, ranks: int, store: str, function: Any, answers: Any, *arguments: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, timedelta(seconds=600), ranks, rank)
    answers.put((rank, function(*arguments)))
    dist.destroy_process_group()


def errors_on_rank(cases: Sequence[Case]) -> list[float | str]:
    """The largest error of each case on this rank, over the largest expected value of the tensor; or what was raised.

    A case that raises on one rank raises on all.
    """
    found: list[float | str] = []
    for case in cases:
        try:
            found.append(_error(case))
        except Exception as error:  # of any kind: it is the result
            found.append(f"{type(error).__name__}: {error}")
    return found


def _error(case: Case) -> float:
    layer, rank, n = LAYERS[case.layer], dist.get_rank(), dist.get_world_size()
    layout = attention_layout(case.name, layer, n, AttentionOptions("both"))
    inputs, expected = whole(case.layer)
    *leaves, dout = (shard(x, layout, rank) for x in inputs)
    for x in leaves:
        x.requires_grad_()
    ends = None if layer.documents is None else list(accumulate(layer.documents, initial=0))
    out, lse = attention_with_lse(*leaves, schedule=case.passes, causal=layer.mask == "causal",
                                  window=layer.window, cu_seqlens=ends)  # fmt: skip
    grads = torch.autograd.grad(out, leaves, dout)
    pairs = zip((out.detach(), lse.transpose(1, 2), *grads), expected, strict=True)
    return max(float((x.double() - shard(y, layout, rank)).abs().amax() / y.abs().amax()) for x, y in pairs)


def cases_on(ranks: int, layers: Sequence[str] = tuple(LAYERS)) -> list[Case]:
    """All schedules that apply, each split of families."""
    found = []
    for layer in layers:
        for name in attention_names_on(ranks):
            try:
                passes = attention_schedules(name, full_mesh(ranks), LAYERS[layer], options=AttentionOptions("both"))
            except NOT_APPLICABLE:
                continue
            found.append(Case(layer, name, Passes(*passes)))
    return found


class Result(NamedTuple):
    """A case on a number of ranks: its largest error, or what was raised."""

    ranks: int
    layer: str
    name: str
    error: float | str

    @property
    def failed(self) -> bool:
        return isinstance(self.error, str) or not self.error <= LIMITS[LAYERS[self.layer].dtype]


def results() -> Iterator[Result]:
    """All cases."""
    for layer in LAYERS:
        whole(layer)  # once, before ranks are forked
    for ranks in WORLD_SIZES:
        cases = cases_on(ranks)
        for case, *errors in zip(cases, *on_ranks(errors_on_rank, ranks, cases), strict=True):
            texts = [each for each in errors if isinstance(each, str)]
            yield Result(ranks, case.layer, case.name, texts[0] if texts else max(map(float, errors)))


def table(found: Sequence[Result]) -> str:
    """A row per schedule, families together; the largest error of each layer."""
    names = dict.fromkeys(each.name.split(":")[0] for each in found)
    rows = []
    for name in names:
        own = [each for each in found if each.name.split(":")[0] == name]
        cells = []
        for layer in LAYERS:
            errors = [each.error for each in own if each.layer == layer]
            numbers = [each for each in errors if not isinstance(each, str)]
            cells.append("failed" if len(numbers) < len(errors) else f"{max(numbers):.0e}" if numbers else "-")
        rows.append([name, str(len(own)), *cells])
    return markdown_table(("schedule", "cases", *LAYERS), rows)


def main() -> None:
    """Run all cases and write the table."""
    torch.set_num_threads(1)
    found = list(results())
    made = machine_record()
    failed = [f"- {each.name}, {each.layer}, {each.ranks} ranks: {each.error}" for each in found if each.failed]
    summary = f"{len(failed)} fail:" if failed else "None fails."
    write_page(RESULTS / "layer_errors.md", f"""# Errors of layers

{len(found)} cases of both passes on {", ".join(map(str, WORLD_SIZES))} processes over gloo by the kernel sdpa, made by
`python -m experiments.tables.layer_errors` ({made["date"]}, torch {torch.__version__.split("+")[0]}): the largest
absolute error of the result, the log-sum-exp, dq, dk or dv against float64, over the largest value of that tensor.
Layers have 24 heads, no length divides by the ranks; packed documents have {", ".join(map(str, DOCUMENTS))} positions.
A case fails if it raises, or above {", ".join(f"{each:.0e} in {name}" for name, each in LIMITS.items())}. {summary}

{table(found)}
{chr(10).join(["", *failed]) if failed else ""}
""")  # fmt: skip


if __name__ == "__main__":
    main()
