"""Backward passes in the simulator: a second implementation agrees on every time, and closed forms hold. Exact."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.event.engine import simulate
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import INSTANT, ComputeRate, Machine
from tasp_lab.schedules.attention.backward import DATAFLOWS, Dataflow, attention_passes
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.timeline.events import DIFFERENTIATE, SEND
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.schedules import time_s

dataflows = st.sampled_from(DATAFLOWS)
names = st.sampled_from(sorted({*CIRCULATIONS} - {"half-each-way"}))
seconds = st.fractions(Fraction(1, 20), Fraction(20), max_denominator=20)


# --------------------------------------------------------------------------------------- the second implementation


# ---------------------------------------------------------------------------------------------------- closed forms


class Equal:
    """Attention with the full mask on n ranks of a full mesh, in equal shards and equal chunks of them, one per ring.

    What travels, and its gradient, take `move_s` and `gradient_s` per hop, a rank's calls at one step `call_s`.
    """

    def __init__(self, n: int, name: str, dataflow: Dataflow, gradient_dtype: str = "fp32") -> None:
        self.n = n
        rings = 1 if n == 1 or name != "tasp" else {4: 3, 6: 5}.get(n, n - 1)
        self.layer = Workload(n * rings, heads=2, kv_heads=1, head_dim=4, mask="full")
        self.name, self.dataflow, self.gradient_dtype = name, dataflow, gradient_dtype
        gradient_size = 4 if gradient_dtype == "fp32" else 2
        self.move_bytes = 2 * 2 * 8 + 2 * 2 * 4 if dataflow == "rotate-q" else 2 * 4 * 2
        self.gradient_bytes = gradient_size * (8 if dataflow == "rotate-q" else 2 * 4)
        self.call_flops = Fraction(5, 2) * self.layer.flops_per_pair * rings**2

    def time_s(self, bandwidth: Fraction, compute: ComputeRate) -> Number:
        mesh = full_mesh(self.n, bandwidth, Fraction(0))
        passes = attention_passes(
            self.name, mesh, self.layer, dataflow=self.dataflow, gradient_dtype=self.gradient_dtype, buffers=2
        )
        return time_s(passes.backward, mesh, compute)

    def bytes_at(self, step: int) -> int:
        """What each rank sends on each lane at a step."""
        n, back = self.n, self.dataflow == "rotate-kv-back"
        moves = range(n - 2) if back else range(n - 1)
        gradients = range(1, n) if back else range(2, n + 1)
        return self.move_bytes * (step in moves) + self.gradient_bytes * (step in gradients)


worlds = st.sampled_from([1, 2, 3, 5])
"""Where the rings of a full mesh carry equal chunks over all links."""

layers = st.builds(
    Equal, worlds, st.sampled_from(["ring-attention", "tasp"]), dataflows, st.sampled_from(["fp32", "input"])
)


@given(layers, seconds)
def test_without_compute_every_lane_sends_all_the_time(case: Equal, bandwidth: Fraction) -> None:
    """The sum over steps of what a lane sends, over its bandwidth: n - 2 or n - 1 moves, n - 1 gradients."""
    total = sum(case.bytes_at(step) for step in range(case.n + 1))
    moves = max(case.n - 2, 0) if case.dataflow == "rotate-kv-back" else case.n - 1
    assert total == moves * case.move_bytes + (case.n - 1) * case.gradient_bytes
    assert case.time_s(bandwidth, INSTANT) == total / bandwidth


@given(layers, seconds, st.fractions(Fraction(1, 9), 1))
def test_compute_hides_all_but_the_last_gradient_of_blocks_that_go_onward(
    case: Equal, call_s: Fraction, share: Fraction
) -> None:
    """If a hop of both takes no longer than a call: n calls, and unless reversed, one hop of a gradient after them."""
    bandwidth = (case.move_bytes + case.gradient_bytes) / (share * call_s)
    exposed_s = 0 if case.dataflow == "rotate-kv-back" or case.n == 1 else case.gradient_bytes / bandwidth
    assert case.time_s(bandwidth, ComputeRate(case.call_flops / call_s)) == case.n * call_s + exposed_s


@given(st.integers(1, 5), dataflows, seconds)
def test_with_one_rank_or_instant_links_time_is_compute(n: int, dataflow: Dataflow, call_s: Fraction) -> None:
    """Backward takes five halves of the time of the forward pass: n calls without anything to wait for."""
    case = Equal(n, "ring-attention", dataflow)
    mesh = full_mesh(n, Fraction(10**15), Fraction(0))
    compute = ComputeRate(case.call_flops / call_s)
    forward_s = time_s(attention("ring-attention", mesh, case.layer), mesh, compute)
    found = case.time_s(Fraction(10**15), compute)
    assert forward_s == n * call_s * Fraction(2, 5)
    assert 0 <= found - n * call_s <= case.gradient_bytes / Fraction(10**15)


# ------------------------------------------------------------------------------------------------ what is explained


@pytest.mark.parametrize(("dataflow", "steps"), [("rotate-kv-back", 3), ("rotate-kv", 4)])
def test_what_waits_for_what(dataflow: Dataflow, steps: int) -> None:
    """Three ranks, calls of 10 s, hops of 1 s (keys) and 2 s (their gradients in float32)."""
    case = Equal(3, "ring-attention", dataflow)
    mesh = full_mesh(3, Fraction(case.move_bytes), Fraction(0))
    schedule = attention_passes("ring-attention", mesh, case.layer, dataflow=dataflow, buffers=2).backward
    events = simulate(schedule, Machine(mesh, compute=ComputeRate(case.call_flops / 10))).events
    found = {(e.kind, e.step, e.start_s, e.end_s, e.waited_for) for e in events}
    calls = {(DIFFERENTIATE, step, 10 * step, 10 * step + 10, "compute" if step else "") for step in range(3)}
    moves = {(SEND, 0, 0, 1, "")} | ({(SEND, 1, 1, 2, "block")} if dataflow == "rotate-kv" else set())
    gradients = {(SEND, step, 10 * step, 10 * step + 2, "block") for step in range(steps - 2, steps)}
    assert found == calls | moves | gradients
    assert len(events) == 3 * len(found)
