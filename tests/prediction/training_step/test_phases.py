"""Phases of a step against closed forms: compute of one rank, messages alone, stacks of equal layers."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from sim.host import busy_s
from sim.simulate import simulate
from tasp_lab.core.choices import Checkpointing
from tasp_lab.core.errors import ScheduleError, WorkloadError
from tasp_lab.core.units import Number
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.prediction.training_step.costs import kinds_of, stored_parameters
from tasp_lab.prediction.training_step.layout import StepPlan
from tasp_lab.prediction.training_step.phases import GRADIENT_BYTES, PARAMETER_BYTES, runs_of
from tasp_lab.prediction.training_step.rates import StepCompute, step_rates
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.workload.models.catalogue import load_model
from tasp_lab.workload.models.model import Attention, Experts, Linear, Model
from tasp_lab.workload.models.parameters import active_parameters, embedding_parameters
from tests.support.steps import (
    ATTENTION_RATE,
    MATRIX_RATE,
    exact_machine,
    instant,
    phases_of,
    plan_of,
    small_experts,
    small_hybrid,
    small_model,
)

LAYER = 2 * 12 * 32 + 2 * 12 * 16 + 3 * 12 * 40
"""Parameters of matrices of a layer of the small model: queries and output, keys and values, the MLP."""

RECOMPUTED = {"none": (0, 0), "selective": (12 * 16 + 12 * 32 + 12 * 40, 0), "full": (LAYER, 1)}
"""What the backward pass computes forward again: parameters of a layer, by every other product from keys on, and
attention.
"""


def layer_matrices(model: Model) -> int:
    """Parameters of matrices that multiply a token, without the output."""
    return active_parameters(model) - embedding_parameters(model).matrices


def attention_flops(sequence: int, layers: int = 3) -> int:
    """Forward FLOPs of causal attention with 4 heads of 8: 4 per pair and element."""
    return layers * 4 * 8 * 4 * sequence * (sequence + 1) // 2


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_step_of_one_rank_is_the_sum_of_its_flops_over_rates(checkpointing: Checkpointing) -> None:
    """Per parameter and token 2 FLOPs forward, 4 backward; attention has 5/2 of its forward FLOPs backward."""
    plan, machine, tokens = plan_of(small_model(), ranks=1, checkpointing=checkpointing), exact_machine(1), 64
    phases = phases_of(plan, machine)
    (run,) = runs_of(kinds_of(plan.model))
    forward = simulate(phases.forward(run.unit, 3), machine, "simpy").time_s
    assert forward == 2 * tokens * 3 * LAYER / MATRIX_RATE + attention_flops(64) / ATTENTION_RATE
    again, attention_again = RECOMPUTED[checkpointing]
    backward = simulate(phases.backward(run.unit, 3, reduces=True), machine, "simpy").time_s
    of_matrices = 3 * (4 * LAYER + 2 * again) * tokens / MATRIX_RATE
    assert backward == of_matrices + (Fraction(5, 2) + attention_again) * attention_flops(64) / ATTENTION_RATE


def test_experts_cost_what_a_token_takes_of_them() -> None:
    plan, machine = plan_of(small_experts(), ranks=1), exact_machine(1)
    dense, experts = runs_of(kinds_of(plan.model))
    assert (len(dense.unit), dense.times, experts.times) == (1, 1, 2)
    phases = phases_of(plan, machine)
    times = [simulate(phases.forward(run.unit, run.times), machine, "simpy").time_s for run in (dense, experts)]
    assert sum(times) == 128 * layer_matrices(plan.model) / MATRIX_RATE + attention_flops(64) / ATTENTION_RATE


def attention(window: int | None) -> Attention:
    return Attention(heads=4, head_dim=8, kv_heads=4, window=window)


def test_layers_with_a_window_attend_to_fewer_keys() -> None:
    """Of 64 positions with windows of 16: 64 x 16 - 16 x 15 / 2 pairs instead of 64 x 65 / 2, in 2 of 3 layers."""
    plan, machine = plan_of(small_model("WSW", attention=attention(16)), ranks=1), exact_machine(1)
    pairs = 2 * (64 * 16 - 16 * 15 // 2) + 64 * 65 // 2
    (run,) = runs_of(kinds_of(plan.model))
    time_s = simulate(phases_of(plan, machine).forward(run.unit, 1), machine, "simpy").time_s
    layer = LAYER + 2 * 12 * 16  # four KV heads instead of two
    assert time_s == 2 * 64 * 3 * layer / MATRIX_RATE + Fraction(4 * 8 * 4 * pairs) / ATTENTION_RATE


@pytest.mark.parametrize("schedule", ["ulysses", "zigzag-ring-attention", "tasp", "kv-all-gather", "usp:2x2"])
def test_windows_send_no_more_and_move_no_hidden_states(schedule: str) -> None:
    plans = [plan_of(small_model(layers, attention=attention(window)), 64, schedule, 4, zero=0)
             for layers, window in (("2xWS", 16), (4, None))]  # fmt: skip
    sent = []
    for plan in plans:
        phases = phases_of(plan, exact_machine(4))
        (run,) = runs_of(kinds_of(plan.model))
        assert not phases.between
        sent.append([phases.forward(run.unit, run.times), phases.backward(run.unit, run.times, reduces=False)])
    for windowed, full in zip(*sent, strict=True):
        assert windowed.bytes_sent().sum() <= full.bytes_sent().sum()
        assert windowed.flops().sum() < full.flops().sum()


def test_periods_of_layers_are_one_run() -> None:
    def shape(layers: int | str, **changes: Any) -> list[tuple[int, int]]:
        model = small_model(layers, attention=attention(16 if "W" in str(layers) else None), **changes)
        return [(len(run.unit), run.times) for run in runs_of(kinds_of(model))]

    every_other = Experts(count=6, active=2, width=8, every=2)
    assert shape("10xWWWWWS,WW") == [(6, 10), (1, 2)]
    assert shape("12xWWWS", experts=every_other) == [(4, 12)]
    assert shape(61, experts=Experts(count=6, active=2, width=8, dense_layers=3)) == [(1, 3), (1, 58)]
    assert shape("2xLLS,LL", linear=Linear()) == [(8, 1)]  # hidden states move between S and L
    assert shape("WWS") == [(3, 1)]


def test_each_layer_gathers_its_own_parameters() -> None:
    """With experts in every other layer; there and back again over all pairs of four ranks."""
    plan = plan_of(small_model(4, experts=Experts(count=6, active=2, width=8, every=2)), ranks=4, cp=1)
    (run,) = runs_of(kinds_of(plan.model))
    phases = phases_of(plan, exact_machine(4))
    sizes = [stored_parameters(plan.model, kind) for kind in run.unit]
    assert len(set(sizes)) == 2

    def moved(size_bytes: int) -> int:
        return 2 * sum(12 * -(-size_bytes * size // 4) for size in sizes)

    assert phases.forward(run.unit, 2).bytes_sent().sum() == moved(PARAMETER_BYTES)
    backward = phases.backward(run.unit, 2, reduces=True).bytes_sent().sum()
    assert backward == moved(PARAMETER_BYTES) + moved(GRADIENT_BYTES)


def test_work_is_shared_by_the_ranks_of_a_group_and_repeated_in_every_group() -> None:
    plan = plan_of(small_model(), ranks=4, cp=2)
    machine = exact_machine(4)
    (run,) = runs_of(kinds_of(plan.model))
    schedule = phases_of(plan, machine).forward(run.unit, 3)
    total = 2 * (128 * layer_matrices(plan.model) + attention_flops(64))
    assert schedule.flops().sum() == total
    assert len(set(schedule.flops().sum(axis=0).tolist())) == 1


def gather_s(model: Model, ranks: int, bandwidth: Fraction, bytes_each: int) -> Number:
    """Each rank sends its shard of a layer to every other one, each over a link of its own."""
    largest = max(stored_parameters(model, kind) for kind in set(kinds_of(model)))
    return -(-bytes_each * largest // ranks) / bandwidth


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_parameters_alone_take_the_time_of_their_bytes(layers: int) -> None:
    """Without attention between ranks, and with instant kernels, gathers of layers follow each other."""
    plan, machine = plan_of(small_model(layers), ranks=4, cp=1), instant(exact_machine(4))
    (run,) = runs_of(kinds_of(plan.model))
    phases, bandwidth = phases_of(plan, machine), Fraction(10**6)
    gathered = layers * gather_s(plan.model, 4, bandwidth, PARAMETER_BYTES)
    assert simulate(phases.forward(run.unit, layers), machine).time_s == gathered
    reduced = gather_s(plan.model, 4, bandwidth, GRADIENT_BYTES)
    backward = simulate(phases.backward(run.unit, layers, reduces=True), machine).time_s
    assert backward >= gathered + reduced
    assert simulate(phases.backward(run.unit, layers, reduces=False), machine).time_s == gathered


def test_slow_parameters_are_gathered_while_layers_compute() -> None:
    """A layer longer than its gather hides it, but for the first one; a shorter one is as long as its gather."""
    plan, layers = plan_of(small_model(6), ranks=4, cp=1), 6
    (run,) = runs_of(kinds_of(plan.model))
    for bandwidth in (Fraction(10**6), Fraction(100), Fraction(10)):
        machine = exact_machine(4, bandwidth)
        schedule = phases_of(plan, machine).forward(run.unit, layers)
        time_s = simulate(schedule, machine).time_s
        busy, gathered = max(busy_s(schedule, machine.compute)), gather_s(plan.model, 4, bandwidth, PARAMETER_BYTES)
        assert max(busy, layers * gathered) <= time_s <= busy + layers * gathered
        if layers * gathered < busy / layers:
            assert time_s == busy + gathered


@pytest.mark.parametrize("schedule", ["tasp", "ulysses"])
def test_equal_layers_take_equally_long_on_an_exact_machine(schedule: str) -> None:
    plan, machine = plan_of(small_model(8), sequence=60, schedule=schedule), exact_machine(2, Fraction(100))
    (run,) = runs_of(kinds_of(plan.model))
    phases = phases_of(plan, machine)
    for build in (
        lambda count: phases.forward(run.unit, count),
        lambda count: phases.backward(run.unit, count, reduces=True),
    ):
        times = [simulate(build(count), machine, "simpy").time_s for count in (3, 4, 5, 8)]
        assert times[1] - times[0] == times[2] - times[1]
        assert times[3] - times[2] == 3 * (times[2] - times[1])


def test_a_stack_takes_as_long_as_a_quarter_of_it_says() -> None:
    """What `predict_step` relies on: 8 of 32 layers, with contention, give the time of all within 0.2 %."""
    found = load_machine("h100-8")
    machine = replace(found, compute=StepCompute(found.compute, step_rates(found)))
    phases = phases_of(plan_of(load_model("llama-3-8b"), 32768, "ulysses", 8), machine)
    (run,) = runs_of(kinds_of(phases.plan.model))
    for build in (
        lambda count: phases.forward(run.unit, count),
        lambda count: phases.backward(run.unit, count, reduces=True),
    ):
        four, eight, every = (float(simulate(build(count), machine, events=False).time_s) for count in (4, 8, 32))
        assert eight + 24 * (eight - four) / 4 == pytest.approx(every, rel=2e-3)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_of_states_are_conserved(zero: int) -> None:
    """Gathers and reductions each send every shard to all other ranks; without FSDP sums are copied back."""
    plan, machine = plan_of(small_model(), ranks=4, cp=1, zero=zero), exact_machine(4)
    (run,) = runs_of(kinds_of(plan.model))
    phases = phases_of(plan, machine)
    parameters = stored_parameters(plan.model, run.unit[0])
    shards = {each: -(-each * parameters // 4) for each in (PARAMETER_BYTES, GRADIENT_BYTES)}
    of_parameters = 3 * 12 * shards[PARAMETER_BYTES] if zero else 0
    of_gradients = 3 * 12 * shards[GRADIENT_BYTES] * (1 if zero else 2)

    def sent(schedule: Schedule) -> int:
        return int(schedule.bytes_sent().sum())

    for gathers in (True, False):
        expected = of_parameters if gathers else 0
        assert sent(phases.forward(run.unit, 3, gathers=gathers)) == expected
        for reduces in (True, False):
            backward = phases.backward(run.unit, 3, reduces=reduces, gathers=gathers)
            assert sent(backward) == expected + (of_gradients if reduces else 0)


def test_hybrids_move_hidden_states_between_layouts() -> None:
    plan, machine = plan_of(small_hybrid(), schedule="lasp-2+zigzag-ring-attention"), exact_machine(2)
    (run,) = runs_of(kinds_of(plan.model))
    assert (len(run.unit), run.times) == (2, 2)
    phases = phases_of(plan, machine)
    assert len(phases.between) == 4
    for schedule in (phases.forward(run.unit, 2), phases.backward(run.unit, 2, reduces=True)):
        assert simulate(schedule, machine).time_s > max(busy_s(schedule, machine.compute))


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 4), (3, 2)])
def test_several_nodes(nodes: int, ranks: int) -> None:
    machine = load_machine(f"nodes:{nodes}x{ranks}:switch")
    plan = plan_of(small_model(2), sequence=96, ranks=nodes * ranks, cp=ranks)
    (run,) = runs_of(kinds_of(plan.model))
    phases = phases_of(plan, machine)
    schedule = phases.backward(run.unit, 2, reduces=True)
    assert np.isfinite(float(simulate(schedule, machine).time_s))


def test_what_is_refused() -> None:
    with pytest.raises(ScheduleError, match="cp 3 x pp 1 on 4 ranks, expected a divisor of 4"):
        plan_of(small_model(), ranks=4, cp=3)
    for changes, message in (
        ({"batch": 0}, "batch: 0"),
        ({"cp": 0}, "cp: 0"),
        ({"microbatches": 0}, "microbatches: 0"),
        ({"checkpointing": "some"}, "checkpointing: 'some'"),
        ({"matrix_dtype": "fp4"}, "matrix dtype: 'fp4'"),
    ):
        with pytest.raises(WorkloadError, match=message):
            plan_of(small_model(), **changes)  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="pass 'backward' of a whole step"):
        StepPlan(small_model(), 64, "tasp", options=replace(plan_of(small_model()).options, passes="backward"))
