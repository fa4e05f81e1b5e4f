"""TokenRing beside Ring Attention on four A10: the times in the pictures of its repository."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from experiments.reproductions.predictions import interval_of, predicted, rows_of, without
from experiments.reproductions.reproduction import Figure, Found, Reproduction, Trial
from tasp_lab import Workload
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.libraries.library import CommLibrary, Message
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.interval import Interval

LAYER = Workload(24000, 1, 32, 32, 128, "fp16", "causal")
RING, TOKEN_RING = "zigzag-ring-attention", "zigzag-token-ring"
STEP_MS, STEP_BYTES = 7.6, 24000 // 4 * 2 * 32 * 128 * 2
"""A step of the ring in its picture, and the keys and values that a rank sends in it."""

CONNECTION_BYTES_PER_S = STEP_BYTES / (STEP_MS * 1e-3)
REASON = (
    "a step of the ring carries 12.9 of the 31.5 GB/s of the lanes: one connection does not fill them, which wires "
    "alone do not have"
)


@dataclass(frozen=True)
class Connections(CommLibrary):
    """Messages that each carry at most `connection_bytes_per_s`."""

    connection_bytes_per_s: float = CONNECTION_BYTES_PER_S

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        """See `CommLibrary.message`."""
        return Message(self.launch_s, 0, size_bytes, self.connection_bytes_per_s, "one connection")


def find() -> Found:
    """Predict the trace on the lanes, and with connections that do not fill them."""
    machine = load_machine("a10-4-pcie")
    slow = replace(machine, comm_library=Connections("connections"))
    before, after = figures(machine), figures(slow)
    said = f"TokenRing is predicted to be {after[0].predicted:.2f} times as fast"
    return Found(
        before, (Trial("each connection carries 12.9 GB/s, as a step of the ring shows", before, after, said),)
    )


def figures(machine: Machine) -> tuple[Figure, ...]:
    """The speed-up, both times, and one step of the ring."""
    times = {row["schedule"]: float(row["time_ms"]) for row in rows_of(Path(__file__).parent / "a10.csv")}
    ring, token = predicted(machine, RING, LAYER), predicted(machine, TOKEN_RING, LAYER)
    one, other = own(ring), own(token)
    low, _, high = one.over(other)
    ratio = float(ring.time_s / token.time_s)
    step = Interval(float(ring.communication_s) / 3, one.samples_s[:0], one.residual)
    return (
        Figure("speed-up of attention", "x", times[RING] / times[TOKEN_RING], ratio, low, high, REASON),
        Figure.of("Ring Attention", times[RING], one, REASON),
        Figure.of("TokenRing", times[TOKEN_RING], other, REASON),
        Figure.of("messages of one step of Ring Attention", STEP_MS, step, REASON),
    )


def own(prediction: Answer) -> Interval:
    """The interval without residuals of these pictures."""
    return without("token_ring_a10", interval_of(prediction))


REPRODUCTION = Reproduction(
    "token_ring",
    "TokenRing on four A10",
    "Is TokenRing 1.56 times as fast as Ring Attention on four A10 behind PCIe switches?",
    "README of ACA-Lab-SJTU/token-ring 3fb15e4 (arXiv:2412.20501) and its profile pictures, read off to about 5 %",
    "24,000 positions, causal with zigzag shards (inferred from the FLOPs of its kernels), 32 heads of 128, fp16; "
    "lanes of PCIe 4.0 x16 after line coding, no library; the rate of kernels is that in the same pictures.",
    "speed-up of attention",
    "But only because an interval for PCIe without a model of its library is fifteenfold wide: lanes alone predict the "
    "ring to be faster, by 9 %. What they lack is that one connection carries 12.9 of 31.5 GB/s; with that, "
    "TokenRing, which has two connections at a time, is predicted to be 1.41 times as fast.",
    find,
)
