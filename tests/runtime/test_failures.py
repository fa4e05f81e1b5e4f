"""A rank whose pass fails while others wait on their GPUs: they end, and name it. Hosts that wait stand in for GPUs."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime import attention
from runtime.executor import transports
from runtime.sequence_parallel import failures
from runtime.sequence_parallel.layer import AttentionLayer
from tasp_lab.core.errors import RunError
from tests.support.ranks import on_ranks

IMPORTED_BY_RANKS = ("runtime.sequence_parallel.api",)


def with_a_failure(folder: str, passing: str) -> str:
    """On a rank: rank 2 fails in a pass and stays alive. The others have 1,000 s to wait for its messages."""
    rank, n = dist.get_rank(), dist.get_world_size()
    waited = property(lambda self: dist.group.WORLD, lambda self, value: None)
    transports.Batched.waited_on_gpu = waited  # type: ignore[assignment]
    failures.print_line = lambda line, stream: Path(folder, f"{rank}").write_text(line)  # type: ignore[assignment]

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    q, k, v = (torch.randn(1, 16, 2, 8, requires_grad=True) for _ in range(3))
    compute = AttentionLayer.compute
    if rank == 2 and passing == "forward":
        AttentionLayer.compute = fail  # type: ignore[assignment, method-assign]
    try:
        out = attention(q, k, v, transport="batched", schedule="ring-attention", timeout_s=1000.0)
        if rank == 2:
            AttentionLayer.compute = fail  # type: ignore[assignment, method-assign]
        out.sum().backward()
    except torch.OutOfMemoryError as error:
        AttentionLayer.compute = compute  # type: ignore[method-assign]
        while len(list(Path(folder).iterdir())) < n - 1:
            time.sleep(0.1)
        return str(error)
    except RunError:  # a host notices that a peer has ended; a GPU does not
        threading.Event().wait()
    return "no error"


@pytest.mark.distributed
@pytest.mark.parametrize("passing", ["forward", "backward"])
def test_ranks_end_when_another_one_fails_and_name_it(tmp_path: Path, passing: str) -> None:
    answers: Any = on_ranks(with_a_failure, 4, str(tmp_path), passing)
    assert answers == [1, 1, "CUDA out of memory\nand more", 1]  # exit codes, and the error of the rank itself
    for rank in (0, 1, 3):
        line = (tmp_path / str(rank)).read_text()
        assert line.startswith(f"rank {rank}: ends, as rank 2 raised OutOfMemoryError in the {passing} pass of call 1")
        assert line.endswith("): CUDA out of memory")


def test_the_first_failure_is_the_one_that_is_told() -> None:
    """A rank that misses messages of the failed one fails, too."""
    store, first, later = dist.HashStore(), failures._End(3, "wrong", True), failures._End(1, "lost rank 3", True)
    assert [failures._first_end(store, each) for each in (first, later)] == [first, first]


def test_the_watch_of_a_group_that_is_over_ends() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer")

    failures._watch(lambda number: Gone(), 0, 0)  # type: ignore[arg-type, return-value]
