"""Titles of pictures: the work, the machine and the communication library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasp_lab.core.choices import AttentionKind
from tasp_lab.machines.machine import Machine
from tasp_lab.schedules.collectives.kinds import describe
from tasp_lab.schedules.registry import kind_of
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Work, Workload


def caption(work: Work, schedules: Sequence[str], topology: Topology, library: str = "") -> str:
    """The title of a picture: the work, the machine and the communication library.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> caption(2**20, ["ring", "multi-ring"], full_mesh(8), "ideal")
    'AllGather of 1 MiB per rank on full-mesh:8, library: ideal'
    >>> caption(Workload(8192, heads=32, kv_heads=8, mask="causal"), ["tasp"], full_mesh(8), "nccl")
    'Attention over 8,192 positions, 32 heads (8 KV heads) of 128, causal, bf16 on full-mesh:8, library: nccl'
    """
    if isinstance(work, Workload):
        done = describe_layer(work)
    else:
        done = describe(kind_of(schedules), topology.world_size, work)
    return f"{done} on {topology.name}" + (f", library: {library}" if library else "")


def software(machine: Machine) -> str:
    """The communication library and the runtime of a machine, as the end of a title.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> software(load_machine("h100-8")), software(load_machine("full-mesh:8"))
    (', nccl', '')
    """
    names = [machine.comm_library.name] if machine.comm_library.name != "ideal" else []
    names += [f"runtime {machine.runtime.name}"] if not machine.runtime.is_instant else []
    return "".join(f", {name}" for name in names)


_KINDS: Mapping[AttentionKind, str] = {"softmax": "Attention", "linear": "Linear attention", "hybrid": "Hybrid "}


def describe_layer(layer: Workload) -> str:
    """An attention layer, or a hybrid, in words.

    >>> describe_layer(Workload(8, batch=2, documents=(3, 5), dtype="fp32", heads=1))
    'Attention over 8 positions in 2 documents, batch 2, 1 head (1 KV head) of 128, full mask, fp32'
    >>> describe_layer(Workload(8192, cached_keys=6144, mask="causal"))
    'Attention over 8,192 positions, 6,144 of them cached, 32 heads (32 KV heads) of 128, causal, bf16'
    >>> describe_layer(Workload(8192, mask="causal", kind="hybrid", layers="2xLLS", decay="scalar"))
    'Hybrid LLSLLS over 8,192 positions, 32 heads (32 KV heads) of 128, causal, decay per position, bf16'
    """
    parts = [
        f"{_KINDS[layer.kind]}{layer.layers} over {layer.sequence:,} positions"
        + (f" in {len(layer.documents)} documents" if layer.documents else ""),
        f"{layer.cached_keys:,} of them cached" if layer.cached_keys else "",
        f"batch {layer.batch}" if layer.batch > 1 else "",
        f"{_count(layer.heads, 'head')} ({_count(layer.kv_head_count, 'KV head')}) of {layer.head_dim}",
        layer.visible.caption,
        f"decay per {layer.decay}" if layer.decay in ("head", "channel") else "",
        "decay per position" if layer.decay == "scalar" else "",
        f"window {layer.window}" if layer.window else "",
        layer.dtype,
    ]
    return ", ".join(part for part in parts if part)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"
