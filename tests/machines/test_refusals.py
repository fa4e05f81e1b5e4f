"""What no machine, library, kernel, stack or override can be: each call is refused in one line with these words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tasp_lab import predict, validate
from tasp_lab.core.errors import TaspLabError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.contention import Contention
from tasp_lab.machines.host import HostModel, Passes
from tasp_lab.machines.kernel_model.catalogue import attention_kernel, borrowed_kernel
from tasp_lab.machines.libraries.channels import ChannelRule
from tasp_lab.machines.profile import find_profile, load_profile, member
from tasp_lab.workload.layer import Workload

Refusal = tuple[Callable[[], object], str]
LAYER = Workload(4096, heads=16, kv_heads=8, mask="causal")
FULL = Workload(8192, heads=16, mask="full")


def library(**changes: Any) -> Callable[[], object]:
    """A library of NCCL with changes."""
    return lambda: replace(load_machine("h100-8").comm_library, **changes)


def kernel(gpu: str, name: str) -> Callable[[], object]:
    return partial(attention_kernel, gpu, name)


def layer(machine: str = "h100-8", schedule: str = "ring-attention", **settings: Any) -> Callable[[], object]:
    return partial(predict, machine, [schedule], FULL, **settings)


def collective(**settings: Any) -> Callable[[], object]:
    return partial(predict, "h100-8", "ring", "1MiB", **settings)


def override(machine: str, *overrides: str) -> Callable[[], object]:
    return partial(predict, machine, ["ulysses"], LAYER, overrides=overrides)


def run(override: str, **settings: Any) -> Callable[[], object]:
    small = Workload(64, heads=1, mask="full")
    return lambda: validate("full-mesh:2", "ring-attention", small, overrides=[override], **settings)


LIBRARIES: list[Refusal] = [
    (library(protocols={}), "protocols lack LL, LL128, Simple"),
    (library(media=()), "0 media, expected 1 or 2"),
    (library(domain_ranks=0), "0 ranks per domain"),
    (library(ring_bytes_per_s=0), "a ring rate of 0 bytes/s"),
    (library(launch_s=-1.0), r"launch_s is -1\.0"),
    (lambda: replace(load_machine("h100-8").comm_library.media[0], channel_bytes_per_s=0), "channel_bytes_per_s is 0"),  # type: ignore[attr-defined]
    (lambda: ChannelRule(4, 2), "from 4 to 2 channels"),
    (partial(load_machine, "h100-8", library="mpi"), "'mpi' is unknown: expected auto, nccl, rccl, gloo, ideal"),
    (partial(load_machine, "h100-8", library="rccl"), "the profile of h100-8 is of nccl"),
    (partial(load_machine, "torus:3x3", library="nccl"), "torus:3x3 has no profile"),
    (partial(load_machine, "h100-8", library="nccl==2.40"),
     "version 2.40 of nccl is unknown: expected 2.23 to 2.30, the nearest is 2.30$"),
    (partial(load_machine, "h100-8", library="nccl==2.1.15"),
     "version 2.1.15 of nccl is unknown: .* the nearest is 2.23$"),
    (partial(load_machine, "h100-8", library="nccl==latest"),
     "version 'latest' of nccl: expected one like 2.28 or 2.29.2$"),
    (partial(load_machine, "h100-8", library="nccl==2"), "version '2' of nccl: expected one like 2.28 or 2.29.2$"),
    (partial(load_machine, "mi300x-8", library="rccl==2.22"), "only versions of nccl are modelled"),
]  # fmt: skip

SIZES: list[Refusal] = [
    (partial(load_machine, "gb200-2x19x4"), "domains of 19 nodes, expected at most 18"),
    (partial(load_machine, "h100-2x2x8"), "domains of 2 nodes, expected at most 1"),
    (partial(load_machine, "gb200-2x1x5"), "2 nodes of 5 ranks, expected at most 4 ranks per node"),
    (partial(load_machine, "gb200-2x1x2x4"), "machine 'gb200-2x1x2x4' is unknown"),
    (partial(load_machine, "gb200-0x1x4"), "machine 'gb200-0x1x4' is unknown"),
    (partial(member, "h100-2x9"), "at most 8 ranks per node"),
    (partial(member, "h100-9999x8"), "in all"),
    (partial(member, "gb200-19x4"), "19 nodes do not fill 2 domains equally"),
    *((partial(load, text), "unknown|cannot be read") for load in (load_profile, find_profile)
      for text in ("nothing", "h100x", "missing.toml")),
]  # fmt: skip

NUMBERS: list[Refusal] = [
    *((partial(Passes, output_bytes=value), "passes: output_bytes is") for value in (-1.0, math.inf, math.nan)),
    (partial(HostModel, "x", call_s=-1), "host model 'x': call_s is"),
    (partial(HostModel, "x", batch_s=math.nan), "host model 'x': batch_s is"),
    (partial(HostModel, "x", backward_call_s=math.inf), "host model 'x': backward_call_s is"),
    (partial(Contention, 0, 1, 0), "sms is 0, expected more than 0"),
    (partial(Contention, 132, -1, 8), "sms_per_channel is -1, expected 0 or more"),
    (partial(Contention, 132, 1, 8, 1.5), "messages wait for 1.5 of a call, expected a share from 0 to 1"),
    (partial(Contention, 132, 1, math.nan), "max_channels is nan"),
    (partial(Contention, 32, 1, 32), "32 channels take 32 of 32 multiprocessors, expected fewer than all"),
    (partial(Contention, 32, 2, 24), "24 channels take 48 of 32 multiprocessors"),
]

KERNELS: list[Refusal] = [
    (kernel("h1000", ""), r"unknown GPU 'h1000', did you mean 'h100'\?"),
    (kernel("h100", "flash-attention-9"), "unknown kernel of h100 'flash-attention-9', did you mean 'flash-attention-"),
    (kernel("h100", "flash_attention"), "unknown kernel of h100 'flash_attention', did you mean 'flash-attention-"),
    (kernel("h100", "trtllm_mha"), r"kernel 'trtllm_mha' \(sglang-trtllm-gen\) was not measured on h100 or a GPU like "
                                   "it: sglang-flash-attention-3 is the nearest there$"),
    (kernel("mi300x", "torch_flow"), r"'torch_flow' \(tensorrt-llm\) was not .*: expected one of aiter-asm-a16, "),
    (kernel("h100", "aiter-asm"), "kernel 'aiter-asm' was not measured on h100 or a GPU like it: expected one of"),
    (kernel("b200", "FlashMLA"), r"\(latent attention\) was not measured on b200 .*: sglang-trtllm-gen is the nearest"),
    (kernel("a100", "xformers"), "memory-efficient attention of CUTLASS.* flash-attention-2 is the nearest there$"),
    (partial(borrowed_kernel, "a100", "tensorrt-llm"), "kernel tensorrt-llm on a100: measured on no other GPU that is"),
    (layer(kernel="flash-atention-3"), r"did you mean 'flash-attention-3'\? expected one of .*cudnn"),
    (layer("full-mesh:8", kernel="cudnn"), "full-mesh:8 names no accelerator"),
    (layer("gaudi2-8", kernel="cudnn"), "unknown GPU 'gaudi2'.*h100"),
    (layer(kernel="cudnn", compute=1e12), "expected one of them"),
    (layer(kernel="flash-attention-3", overrides=["compute.rate=300TFLOP/s"]), "expected one of them, or a factor"),
    (layer(compute=1e14, overrides=["compute.rate=300TFLOP/s"]), "expected one of them, or a factor"),
    (collective(kernel="cudnn"), "attention layers only"),
]  # fmt: skip

STACKS: list[Refusal] = [
    (layer(stack="megatorn"), "unknown stack 'megatorn', did you mean 'megatron'"),
    (layer(stack="nowhere.toml"), r"nowhere\.toml' cannot be read"),
    (layer("mi300x-8", "ulysses", stack="trt-llm"), "stack 'trt-llm': no kernel on "),
    (layer("h100-8", "ulysses", stack="mindspeed"), "stack 'mindspeed': no kernel on "),
    (layer("l20-8-pcie", "direct-attention", stack="magi"), "stack 'magi': no kernel on "),
    (collective(stack="yunchang"), "applies to attention layers only"),
]

OVERRIDES: list[Refusal] = [
    (override("h100-2x4", "nic.bandwith=x2"),
     "unknown name 'nic.bandwith', did you mean 'nic.bandwidth', .* profile show h100-2x4 lists all"),
    (override("h100-2x4", "nic_chanel_rate=x2"), "did you mean 'nic_channel_rate'"),
    (override("h100-2x4", "nic.bandwidth=900"), "expected a number and a unit, like 50GB/s"),
    (override("h100-2x4", "nic.latency=+1"), "expected a number and a unit, like 1us"),
    (override("h100-2x4", "nic.bandwidth=x2", "nic_bandwidth=50GB/s"), "nic.bandwidth is given twice"),
    (override("h100-2x4", "link.0-node0=x2", "link.0>node0=x3"), "0->node0 has the override link.0-node0=x2, too"),
    *((override("h100-2x4", f"nic.bandwidth={factor}"), "expected x and a number more than 0")
      for factor in ("x0", "x-1", "x1/0")),
    (override("h100-2x4", "nic.bandwidth=-1TB/s"), "expected more than 0"),
    (override("h100-2x4", "nic.latency=-1s"), "expected 0 s or more"),
    (override("h100-2x4", "nic.bandwidth"), "expected NAME=VALUE"),
    (override("h100-2x4", "=x2"), "expected NAME=VALUE"),
    (override("h100-2x4", "nic_payload=60GB/s"),
     "nic_payload would be 60GB/s, expected at most 50GB/s, nic_bandwidth"),
    (override("h100-2x4", "nic_hop_ll=1us"), "nic_hop_ll would be 1us, expected at least 2.7us, nic_latency"),
    (override("h100-2x4", "channels_per_nic=x0.7"), "expected a whole number"),
    (override("h100-2x4", "ll_payload=x3"), "expected a number more than 0, at most 1"),
    (override("h100-2x4", "sms=10"), "expected fewer than all"),
    (override("h100-2x4", "link.0-9=x2"), "has no link '0-9'"),
    (override("h100-2x4", "compute_rate=x2"), "expected compute.rate="),
    (override("h100-2x4", "compute.rate=+1TFLOP/s"), "expected a factor like x0.9, or a rate like 300TFLOP/s"),
    (override("h100-2x4", "lone_hop_ll=x2"), "does not depend on lone_hop_ll"),
    (override("h100-8", "nic.bandwidth=x2"), "h100-8 has no NICs"),
    (override("mi300x-8", "port.latency=+1us"), "have no ports into a switch"),
    (override("full-mesh:4", "ring_rate=x2"), "does not depend on ring_rate"),
    (override("dgx-1v", "link.bandwidth=30GB/s"), "have 25GB/s and 50GB/s, expected a factor"),
    (override("h100-8", "spine.oversubscription=4"), "h100-8 has no NICs"),
    *((override("nodes:2x4", f"spine.oversubscription={ratio}"), "expected a number of 1 or more")
      for ratio in ("0.5", "x0.5", "+1", "nan")),
    (override("nodes:2x4", "node.2.nic.bandwidth=x2"), "nodes:2x4 has nodes 0 to 1"),
    (override("nodes:2x4", "rank.8.compute=x2"), "nodes:2x4 has ranks 0 to 7"),
    (override("nodes:2x4", "rank.1.compute=300TFLOP/s"), "expected a factor, like x0.5"),
    (override("nodes:2x4", "rank.1.nic.latency=-1s"), "expected 0 s or more"),
    (override("full-mesh:4", "node.0.nic.bandwidth=x2"), "node 0 of full-mesh:4 has no NICs"),
    (override("full-mesh:4", "rank.one.compute=x2"), "unknown name"),
    (override("l20-8-pcie", "peer_write_share=2"), "peer_write_share"),
    (override("h100-8", "layer.kv_head=1"), "did you mean 'layer.kv_heads'"),
    (override("h100-8", "layer.kv_heads=3"), "16 heads are not a multiple of 3 KV heads"),
    (override("h100-8", "layer.window=7,7"), "window: 7,7 with the mask causal, expected 0 keys after a query"),
    (override("h100-8", "layer.window=1,2,3"), "expected how many keys before and after a query"),
    (override("h100-8", "layer.sinks=1"), "unknown name 'layer.sinks'"),
    (override("h100-8", "layer.kv_heads=x0"), "expected x and a number more than 0"),
    (override("h100-8", "layer.kv_heads=0"), "kv heads: 0, expected 1 or more"),
    (override("h100-8", "layer.heads=x0.3"), "'4.8': expected a whole number"),
    (override("h100-8", "layer.seq=128k"), "is ambiguous"),
    (override("h100-8", "layer.seq=1", "layer.sequence=2"), "given twice"),
    (override("h100-8", "layer.window=x2"), "the layer has no window"),
    (override("h100-8", "layer.dtype=x2"), "expected a new value"),
    (override("h100-8", "layer.dtype=fp7"), "unknown dtype 'fp7'"),
    *((collective(overrides=[text]), "no kernel calls")
      for text in ("layer.kv_heads=1", "compute.rate=x2", "compute_rate_fp32=x2", "rank.3.compute=x2")),
    (collective(overrides="link.bandwidth=x2"), "expected a list of texts"),
    (run("link.bandwidth=x2", fabric="local"), "share one medium"),
    (run("rank.1.compute=x0.5", compute="real"), "do not compute at the machine's rate"),
    (run("compute.rate=x0.5", compute="timed:1TFLOP/s"), "do not compute at the machine's rate"),
    (run("nic_payload=x0.5"), "no NICs"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "words"),
    [*LIBRARIES, *SIZES, *NUMBERS, *KERNELS, *STACKS, *OVERRIDES],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be_is_refused_in_one_line(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TaspLabError) as refused:
        call()
    assert re.search(words, str(refused.value)), str(refused.value)
    assert "\n" not in str(refused.value)
