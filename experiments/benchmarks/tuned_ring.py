"""What remains of TASP's gain over a ring that has all of NCCL's channels.

In a communicator of all ranks NCCL gives messages to one peer a few of its channels, until a part of a message exceeds
some size (`tasp_lab.machines.libraries.channels`). A ring has one peer, TASP seven, so some of TASP's gain may be what
the library withholds from a ring. A *tuned* ring has more of them, in either of two ways:

- ``pairs``: each pair of ranks has a communicator of its own, as isend and irecv of PyTorch have outside of a batch;
- ``channels``: twice the channels for all peers together, as many as NCCL has at most (``NCCL_MIN_P2P_NCHANNELS=64``),
  and so twice as many for each at first (NVIDIA/nccl 2.30.7, src/graph/paths.cc and src/enqueue.cc).

TASP is given the same ways, and the fastest one counts: the comparison is of best with best. Attention is
FlashAttention-2, as in the paper, where its times are known.

``python -m experiments.benchmarks.tuned_ring`` writes ``experiments/benchmarks/results/tuned_ring.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common import markdown_table
from tasp_lab.core.files import write_whole
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.kernel_model import kernel_names
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden
from tasp_lab.prediction.inputs import with_pairs
from tasp_lab.prediction.predict import predict
from tasp_lab.prediction.recommend import RINGS, has_few_channels
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.workload.layer import Workload

RESULT = Path(__file__).parent / "results" / "tuned_ring.md"
MACHINES = ("h100-8", "h200-8", "b200-8", "mi300x-8")
SEQUENCES = (8192, 16384, 65536, 262144)
KV_HEADS = (8, 32)
MASKS = ("causal", "full")
CHANNELS = 64
"""NCCL has no more (MAXCHANNELS)."""


def ways_of(machine: Machine) -> Mapping[str, Machine]:
    """The machine as it is, and as it is tuned; a library without channels cannot be."""
    if not has_few_channels(machine):
        return {"default": machine}
    return {"default": machine, "pairs": with_pairs(machine), "channels": overridden(machine, [f"channels={CHANNELS}"])}


@dataclass(frozen=True)
class Gain:
    """Times of both passes in seconds, by way, of the fastest single ring and of TASP."""

    machine: str
    layer: Workload
    ring_s: Mapping[str, float]
    tasp_s: Mapping[str, float]

    @property
    def by_default(self) -> float:
        """How much faster TASP is than the ring without tuning: 0.25 if the ring takes 1.25 times as long."""
        return self.ring_s["default"] / self.tasp_s["default"] - 1

    @property
    def remaining(self) -> float:
        """How much faster than the ring, where both have what is fastest for them."""
        return min(self.ring_s.values()) / min(self.tasp_s.values()) - 1

    def row(self) -> tuple[str, ...]:
        tuned = min(self.ring_s, key=lambda way: self.ring_s[way])
        return (
            self.machine, f"{self.layer.mask}, {self.layer.sequence >> 10}Ki, {self.layer.kv_heads} KV",
            f"{1e3 * self.ring_s['default']:.3g}", f"{1e3 * self.ring_s[tuned]:.3g} ({tuned})",
            f"{1e3 * self.tasp_s['default']:.3g}", f"{1e3 * min(self.tasp_s.values()):.3g}",
            f"{self.by_default:+.1%}", f"{self.remaining:+.1%}",
        )  # fmt: skip


def gain(name: str, layer: Workload) -> Gain:
    """Predict the rings and TASP in every way."""
    times = {way: _times_s(machine, layer) for way, machine in ways_of(load_machine(name)).items()}
    return Gain(
        name, layer, {way: each[0] for way, each in times.items()}, {way: each[1] for way, each in times.items()}
    )


def _times_s(machine: Machine, layer: Workload) -> tuple[float, float]:
    kernel = "flash-attention-2" if "flash-attention-2" in kernel_names(str(machine.accelerator)) else None
    found = predict(machine, [*RINGS, "tasp"], layer, options=AttentionOptions("both"), kernel=kernel)
    times = {each.schedule: float(each.time_s) for each in found if each.is_all}
    return min(time_s for name, time_s in times.items() if name != "tasp"), times["tasp"]


def gains() -> Iterator[Gain]:
    for name in MACHINES:
        for mask in MASKS:
            for sequence in SEQUENCES:
                for kv_heads in KV_HEADS:
                    yield gain(name, Workload(sequence, heads=32, kv_heads=kv_heads, head_dim=128, mask=mask))


HEADERS = ("machine", "layer", "ring, ms", "tuned ring, ms", "TASP, ms", "TASP at best, ms", "gain", "of it remains")


def text(found: Sequence[Gain]) -> str:
    """The page."""
    return f"""# TASP against a tuned ring

Made by `python -m experiments.benchmarks.tuned_ring`, predicted.

Both passes of a layer of 32 heads of 128 on 8 GPUs, bf16. The ring is the fastest single ring. It is *tuned* by a
communicator per pair of ranks (`pairs`), or by twice the channels (`channels`,
`NCCL_MIN_P2P_NCHANNELS=64`). The gain is the ring's time over TASP's, less 1; what remains is that with the best way of
each; a negative one means that the ring is faster. RCCL has no such rule in our model (8 channels per peer always), so
nothing changes on MI300X. No tuned ring has been measured by us.

{markdown_table(HEADERS, [each.row() for each in found])}
"""


def main() -> None:
    """Write the table."""
    write_whole(RESULT, text(list(gains())).encode())


if __name__ == "__main__":
    main()
