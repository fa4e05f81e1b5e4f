"""Predicted exchanges and layers of LASP-2's model on 64 A100.

The model is Linear-Llama3-1B: 16 layers of linear attention with 16 heads of 128, batch 1. The paper does not say how
its nodes are joined, so predictions are ranges from one NIC of 200 Gbit/s per node to eight.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from experiments.reproductions.ranges import Range
from tasp_lab import Workload, predict
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.libraries.channels import ChannelLibrary, channel_rule, channels_per_net_peer
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.answer import Answer
from tasp_lab.topology.graph import SharedCapacity

LAYERS, HEADS, HEAD_DIM, GPUS = 16, 16, 128, 64
STATE_BYTES = 4 * HEADS * HEAD_DIM**2
FABRICS = {"1 x 200 Gbit/s": 1, "8 x 200 Gbit/s": 8}
"""NICs per node, assumed."""

PEAK_FLOPS_PER_S = 312e12
"""An A100's dense peak in bf16 (NVIDIA A100 Tensor Core GPU data sheet), an upper limit of any kernel."""

NIC_BYTES_PER_S, NIC_RING_BYTES_PER_S = 25e9, 24e9
"""200 Gbit/s, and what NCCL counts on of it for its rings (``nic_ring_rate`` of the profile)."""

HEADLINES = (524288, 2097152)
SCHEDULES = ("lasp", "all-scan", "lasp-2", "multi-ring-lasp-2", "direct-lasp-2", "ring-linear-attention-right",
             "ring-linear-attention")  # fmt: skip


def a100_nodes(nics: int, gpus: int = GPUS) -> Machine:
    """Nodes of eight A100 with one NIC per GPU, as in the catalogue, or one for all eight."""
    machine = load_machine(f"a100-{gpus // 8}x8")
    library, topology = machine.comm_library, machine.topology
    assert isinstance(library, ChannelLibrary)
    if nics == 8:
        return machine
    assert nics == 1, "one NIC per GPU or per node"
    shared = [
        SharedCapacity(f"NIC {way} node {node}", NIC_BYTES_PER_S, names)
        for node in range(gpus // 8)
        for way, names in (
            ("of", tuple(f"{rank}->network" for rank in range(8 * node, 8 * node + 8))),
            ("into", tuple(f"network->{rank}" for rank in range(8 * node, 8 * node + 8))),
        )
    ]
    channels = 2  # NCCL's channels_per_nic
    rule = channel_rule(gpus, channels, channels_per_net_peer(gpus, channels, 2, 8))
    library = replace(library, ring_bytes_per_s=NIC_RING_BYTES_PER_S, rule=rule)
    topology = replace(topology, name=f"{topology.name}, one NIC per node", shared=tuple(shared))
    return replace(machine, topology=topology, comm_library=library)


def layer(sequence: int) -> Workload:
    """One layer of attention of the model."""
    return Workload(sequence, 1, HEADS, HEADS, HEAD_DIM, "bf16", "causal", kind="linear")


@cache
def both_passes(fabric: str, schedule: str, sequence: int) -> Answer:
    """Both passes of a layer by a schedule, as published: nothing trimmed, gradients of keys in 16 bits."""
    options: dict[str, object] = {} if schedule in ("lasp", "all-scan") else {"trim": False}
    if schedule.startswith("ring"):
        options["gradient_dtype"] = "input"
    found = predict(
        a100_nodes(FABRICS[fabric]), schedule, layer(sequence), passes="both", events=False, samples=0, **options,  # type: ignore[arg-type]
    )[-1]  # fmt: skip
    assert isinstance(found, Answer)
    return found


@cache
def gather_s(fabric: str, size_bytes: int = STATE_BYTES, gpus: int = GPUS) -> float:
    """NCCL's AllGather of so many bytes per rank."""
    return float(predict(a100_nodes(FABRICS[fabric], gpus), "library-ring", size_bytes, samples=0)[-1].time_s)


def as_released_s(fabric: str, sequence: int) -> float:
    """Both passes of LASP-2 as in its released code: NCCL's AllGather, which blocks, and the kernels after it."""
    return 2 * gather_s(fabric) + float(both_passes(fabric, "lasp", sequence).compute_s)


def of_layers_ms(values_s: list[float]) -> Range:
    """A time of one layer in seconds on each fabric, for all layers, in ms."""
    return Range.of(*(1e3 * LAYERS * each for each in values_s))


def layer_table() -> list[list[str]]:
    """Both passes of a layer, by schedule, on each fabric: cells of a table."""
    cells = [
        [f"{name}, {sequence}"]
        + [f"{1e3 * float(x):.3g}" for f in FABRICS for p in [both_passes(f, name, sequence)]
           for x in (p.time_s, p.communication_s)]
        for sequence in HEADLINES for name in SCHEDULES
    ]  # fmt: skip
    released = [
        [f"lasp-2 as released, {sequence}"]
        + [f"{1e3 * x:.3g}" for f in FABRICS for x in (as_released_s(f, sequence), 2 * gather_s(f))]
        for sequence in HEADLINES
    ]
    return [*cells, *released]
