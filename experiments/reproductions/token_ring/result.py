"""TokenRing beside Ring Attention on four A10: the times in the pictures of its repository."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from experiments.reproductions.reproduction import Figure, Found, Trial, interval_of, predicted, rows_of, without
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
