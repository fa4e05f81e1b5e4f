"""One rank alone on its device, its peers are ghosts: what they would send is there, or is copied on the device.

What a pass costs without a network is measured so, on the only GPU that there is::

    run = GhostRun(schedule, rank=3, device=torch.device("cuda"), peers="nothing")
    run.time_s()

`merge_errors` are those of the merge of partial results; `GhostRun.operations` counts what a pass queues.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.executor.messages import Message, Transport, Wait, no_wait
from runtime.executor.streams import Streams, streams_for
from runtime.kernels import fused
from runtime.kernels.timing import batch_s
from runtime.trials.workloads import draw_operands, make_trial
from tasp_lab.schedule.schedule import Schedule

Peers = Literal["nothing", "copies", "nccl"]
"""Messages take no time; are copies on the device; or are NCCL's, from this rank to itself."""


@contextlib.contextmanager
def with_peers() -> Iterator[list[Peers]]:
    """The kinds of peers that there are; for NCCL, a process group of this rank alone lasts as long as the context."""
    if not dist.is_nccl_available() or dist.is_initialized():
        yield ["nothing", "copies"]
        return
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield ["nothing", "copies", "nccl"]
    finally:
        dist.destroy_process_group()


class Ghosts(Transport):
    """The transport of a rank whose peers are not there. With ``nccl`` a process group of this rank alone is needed."""

    channels = True

    def __init__(self, peers: Peers, device: torch.device, most_bytes: int) -> None:
        self._peers = peers
        self._sent = torch.zeros(most_bytes, dtype=torch.uint8, device=device)
        self._received = self._sent.clone()
        self._receives: list[Message] = []

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        self._receives = list(messages)
        return [no_wait] * len(messages)

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        """Post a batch: each receive has a send of the same size, and each send a receive."""
        pairs = [(self._sent[: each.data.numel()], each.data) for each in self._receives]
        pairs += [(each.data, self._received[: each.data.numel()]) for each in messages]
        if self._peers == "copies":
            for source, destination in pairs:
                destination.copy_(source)
        elif self._peers == "nccl" and pairs:
            ends = [dist.P2POp(dist.irecv, destination, 0) for _, destination in pairs]
            ends += [dist.P2POp(dist.isend, source, 0) for source, _ in pairs]
            for work in dist.batch_isend_irecv(ends):
                work.wait()
        return [no_wait] * len(messages)


class GhostRun:
    """Runs of one rank of a schedule of attention, on random numbers. What it computes is not checked."""

    def __init__(self, schedule: Schedule, rank: int, device: torch.device, peers: Peers = "nothing") -> None:
        most = int(schedule.block_bytes.sum())
        self.device = device
        self.trial = make_trial(schedule, rank, Ghosts(peers, device, most), None, str(device))
        self.trial.set_up(checked=False)
        draw_operands(self.trial.executor)

    def run(self, timed: bool = False) -> Streams:
        """One run, which on a GPU is only queued."""
        streams = streams_for(self.device, timed)
        self.trial.executor.prepare(streams)
        self.trial.executor.run()
        return streams

    def time_s(self, repeats: int = 5) -> float:
        """The median time of a run in seconds, after one that warms up."""
        self.run()
        return statistics.median(self.run(timed=True).mark()() for _ in range(repeats))

    def operations(self) -> Mapping[str, int]:
        """How many operations that are no views a run queues, by name."""
        counted = Operations()
        with counted:
            self.run()
        return counted.count

    def replays_equal(self, replays: int) -> bool:
        """Whether a run can be captured in a CUDA graph whose replays leave the same bits in the memory."""
        executor, start = self.trial.executor, self.trial.executor.memory.clone()
        self.run()
        eager = executor.memory.clone()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        executor.memory.copy_(start)
        with torch.cuda.graph(graph):
            self.run()
        for _ in range(replays):
            executor.memory.copy_(start)
            graph.replay()
        return torch.equal(executor.memory, eager)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the operations of torch, without views and new tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach", "_unsafe_view")):
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def merge_errors(device: torch.device, rows: int, seed: int) -> dict[str, float]:
    """The largest errors of out and lse of merged parts, relative to float64; some rows of parts have no keys.

    Raises nothing; a row without keys whose out is NaN must have no weight, else an error is NaN.
    """
    drawn = torch.Generator().manual_seed(seed)
    total, total_lse = torch.zeros(1, rows, 4, 16, device=device), torch.zeros(1, rows, 4, device=device)
    outs, lses = [], []
    for number in range(4):
        out = torch.randn(1, rows, 4, 16, generator=drawn)
        lse = 5 * torch.randn(1, rows, 4, generator=drawn)
        empty = torch.rand(1, rows, 4, generator=drawn) < 0.2
        lse[empty] = -math.inf
        part = out.masked_fill(empty[..., None], math.nan).to(device)
        fused.merge(total, total_lse, part, lse.to(device), empty=not number)
        outs.append(out.double())
        lses.append(lse.double())
    exact_lse = torch.stack(lses).logsumexp(0)
    weights = torch.stack(lses).softmax(0).nan_to_num(0)
    exact = (weights[..., None] * torch.stack(outs)).sum(0)
    out, lse = (each.double().cpu() for each in (total, total_lse))
    seen = exact_lse.isfinite()
    if not torch.equal(lse.isfinite(), seen):
        return {"out": math.nan, "lse": math.nan}
    return {"out": float((out - exact).abs().max()), "lse": float((lse - exact_lse)[seen].abs().max())}


def merge_bytes_per_s(device: torch.device, rows: int) -> tuple[float, float]:
    """On a GPU, the bytes per second that a merge of `rows` rows of 32 heads must move, and those that a copy moves."""
    part = torch.randn(1, rows, 32, 128, dtype=torch.bfloat16, device=device)
    lse, total_lse = torch.zeros(1, rows, 32, device=device), torch.zeros(1, rows, 32, device=device)
    total, other = part.float(), part.float()
    moved = part.numel() * (2 + 4 + 4), 2 * other.numel() * 4
    calls: tuple[Callable[[], object], ...] = (
        lambda: fused.merge(total, total_lse, part, lse), lambda: other.copy_(total),
    )  # fmt: skip
    for call in calls:
        call()
    merged, copied = (size * 10 / batch_s(call, 10, device) for size, call in zip(moved, calls, strict=True))
    return merged, copied
