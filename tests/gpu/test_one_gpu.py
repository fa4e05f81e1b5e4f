"""Attention, graphs and streams of a single process on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from runtime import attention_with_lse, prepare
from runtime.executor.streams import CudaStreams
from runtime.kernels.registry import KERNELS
from runtime.sequence_parallel.layer import AttentionLayer
from tasp_lab.schedules.attention.forward import CIRCULATIONS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this rank alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ALLOWED = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}


def test_attention_in_a_world_of_one_agrees_with_float64(alone: None) -> None:
    """A pass of a single rank is wrong on this GPU. A fault of tasp-lab; send the record."""
    for name, dtype, causal in product(sorted(CIRCULATIONS), ALLOWED, (False, True)):
        q, k, v = (torch.randn(2, 300, heads, 64, device="cuda").to(dtype) for heads in (8, 2, 2))
        out, lse = attention_with_lse(q, k, v, schedule=name, causal=causal)
        expected = KERNELS["reference"].attend(q, k, v, scale=0.125, low=0 if causal else -299, high=299)
        case = f"{name}, {dtype}, causal: {causal}"
        assert (out.double() - expected.out).norm() <= ALLOWED[dtype] * expected.out.norm(), case
        assert (lse.transpose(1, 2).double() - expected.lse).norm() <= ALLOWED[dtype] * expected.lse.norm(), case


def test_a_graph_of_a_prepared_layer_has_the_bits_of_its_calls(alone: None) -> None:
    """Both passes are captured after a call of each, and replayed with other inputs. A fault of tasp-lab."""
    for name in ("zigzag-ring-attention", "tasp"):
        check_graph(name)


def check_graph(name: str) -> None:
    inputs = [torch.randn(1, 512, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
    leaves, dout = [each.requires_grad_() for each in inputs], torch.randn_like(inputs[0])
    layer = prepare(*leaves, schedule=name, causal=True)

    def both_passes() -> list[torch.Tensor]:
        out = layer(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both_passes()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_passes()
    for _ in range(3):
        with torch.no_grad():
            for each in leaves:
                each.copy_(torch.randn_like(each))
        graph.replay()
        replayed = [each.clone() for each in captured]
        assert all(map(torch.equal, replayed, both_passes()))


def test_streams_order_what_they_are_told_to() -> None:
    """A copy on the communication stream waits for a kernel, and a kernel for the copy, without the host. A fault of
    tasp-lab.
    """
    streams = CudaStreams(timed=True)
    source, target = torch.zeros(2**26, device="cuda"), torch.zeros(2**26, device="cuda")
    streams.begin()
    for value in range(1, 20):
        source.fill_(value)
        filled = streams.mark()
        with streams.communicating():
            streams.wait(filled)
            target.copy_(source)
            copied = streams.mark()
        streams.wait(copied)
        target.add_(1)
        source.copy_(target)
    streams.finish()
    assert bool((target == 20).all())


def test_a_copy_runs_beside_attention() -> None:
    """Kernel and copy between host and GPU on their streams take as long as one after the other. The GPU is shared."""
    q = torch.randn(1, 16384, 16, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2**28, dtype=torch.uint8, device="cuda")

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)

    def seconds(compute: bool, copy: bool) -> float:
        torch.cuda.synchronize()
        streams = CudaStreams(timed=True)
        streams.begin()
        for _ in range(8):
            if copy:
                with streams.communicating():
                    device.copy_(host, non_blocking=True)
            if compute:
                attend()
        streams.finish()
        return streams.mark()()

    seconds(True, True)
    alone = seconds(True, False), seconds(False, True)
    assert seconds(True, True) < 0.9 * sum(alone)


def one_of_two(rank: int, folder: str) -> None:
    """A rank on a GPU of its own: rank 1 fails in a pass and stays alive, rank 0 waits for its GPU."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    q, k, v = (torch.randn(1, 512, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attention_with_lse(q, k, v, schedule="ring-attention")
    torch.cuda.synchronize()
    ended = Path(folder, "ended")
    if rank == 1:
        with (
            patch.object(AttentionLayer, "compute", side_effect=torch.OutOfMemoryError("planted")),
            pytest.raises(torch.OutOfMemoryError, match="planted"),
        ):
            attention_with_lse(q, k, v, schedule="ring-attention")
        while not ended.exists():
            time.sleep(0.1)
        return
    attention_with_lse(q, k, v, schedule="ring-attention")
    torch.cuda.synchronize()
    raise AssertionError("the messages of rank 1 have arrived")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.timeout(300)
def test_a_rank_that_waits_on_its_gpu_ends_when_the_other_one_fails(tmp_path: Path) -> None:
    """A failing job would hang. A fault of tasp-lab; send the record."""
    context = get_context("spawn")
    waiting, failing = ranks = [context.Process(target=one_of_two, args=(rank, str(tmp_path))) for rank in range(2)]
    for each in ranks:
        each.start()
    waiting.join()
    (tmp_path / "ended").touch()
    failing.join()
    assert (waiting.exitcode, failing.exitcode) == (1, 0)
