"""Layouts: groups of ranks, bytes of each parallelism by its formula, pipelines against closed forms."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.simulate import simulate
from tasp_lab import Layout, predict_step
from tasp_lab.core.choices import Checkpointing
from tasp_lab.core.errors import ScheduleError, WorkloadError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.prediction.step_results import StepPrediction
from tasp_lab.prediction.training_step.costs import Matrix, kinds_of, moved_parameters, stored_parameters
from tasp_lab.prediction.training_step.layout import context_groups, stage_of, state_groups, tensor_groups
from tasp_lab.prediction.training_step.memory import stage_memory
from tasp_lab.prediction.training_step.messages import send
from tasp_lab.prediction.training_step.phases import GRADIENT_BYTES, PARAMETER_BYTES, runs_of
from tasp_lab.prediction.training_step.pipeline import (
    Work,
    makespan_s,
    most_under_way,
    one_forward_one_backward,
    order_of,
)
from tasp_lab.prediction.training_step.simulation import group_machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.library_rings import library_schedule
from tasp_lab.topology.builders import bidirectional_ring, full_mesh, nodes
from tasp_lab.workload.models.catalogue import load_model
from tasp_lab.workload.models.model import Attention, Experts
from tasp_lab.workload.models.parameters import parameter_count
from tests.support.routes import direct
from tests.support.steps import exact_machine, phases_of, plan_of, small_experts, small_model

sizes = st.sampled_from([1, 2, 3, 4])
layouts = st.builds(
    lambda tp, cp, pp, dp, order: Layout(tp, cp, pp, dp, order="-".join(order)),
    st.sampled_from([1, 2, 4]), sizes, sizes, sizes, st.permutations(["tp", "cp", "dp", "pp"]),
)  # fmt: skip


small_layouts = st.builds(
    lambda tp, cp, dp, zero: Layout(tp, cp, 1, min(dp, 8 // (tp * cp)), zero),
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([0, 1, 3]),
)  # fmt: skip
"""Layouts of at most 8 ranks without pipelines."""

staged_layouts = st.builds(
    lambda tp, cp, pp, dp, zero, rounds, checkpointing: Layout(
        tp, cp, pp, min(dp, 8 // (tp * cp * pp)), zero, microbatches=pp * rounds, checkpointing=checkpointing
    ),
    st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2]),
    st.sampled_from([0, 1, 2, 3]), st.integers(1, 2), st.sampled_from(["none", "selective", "full"]),
)  # fmt: skip


def world(layout: Layout) -> int:
    return layout.tp * (layout.cp or 1) * layout.pp * (layout.dp or 1)


@given(layouts)
def test_each_kind_of_groups_has_each_rank_once(layout: Layout) -> None:
    places = layout.ranks(world(layout))
    for groups in (tensor_groups(places), context_groups(places), state_groups(places)):
        assert sorted(groups.ravel().tolist()) == list(range(world(layout)))
    innermost = layout.order.split("-")[0]
    axis = ("pp", "dp", "cp", "tp").index(innermost)
    neighbours = np.moveaxis(places, axis, -1).reshape(-1, places.shape[axis])
    assert (np.diff(neighbours, axis=1) == 1).all()


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 30))
def test_parts_of_a_model_are_consecutive_and_equal_but_for_one_layer(pp: int, interleave: int, more: int) -> None:
    layout = Layout(pp=pp, interleave=interleave if pp > 1 else 1, microbatches=pp)
    layers = list(range(layout.chunks + more))
    parts = layout.split(layers)
    assert [layer for part in parts for layer in part] == layers
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts[0]) == min(map(len, parts)) or len(layers) % layout.chunks == layout.chunks - 1


@given(small_layouts, st.sampled_from(["none", "selective", "full"]))
@settings(max_examples=15)
def test_bytes_of_a_layer_are_those_of_each_parallelism(layout: Layout, checkpointing: Checkpointing) -> None:
    """The keys and values of a ring move c - 1 times. Parameters and gradients of a layer move (d c - 1) / (d c) of
    their bytes to or from each rank. Full checkpointing repeats those of the ring.
    """
    tp, cp, dp, zero = layout.tp, layout.cp or 1, layout.dp or 1, layout.zero
    ranks, layers, sequence = tp * cp * dp, 2, 64
    model = small_model(layers, attention=Attention(heads=4, head_dim=8, kv_heads=4), mask="full")
    plan = plan_of(
        model, sequence, "ring-attention", ranks, tp=tp, cp=cp, dp=dp, zero=zero, checkpointing=checkpointing
    )
    phases = phases_of(plan, exact_machine(ranks))
    (run,) = runs_of(kinds_of(model))
    context = layers * (cp - 1) * (2 * 2 * (sequence // cp) * (4 // tp) * 8) * ranks
    shards, parameters = cp * dp, -(-stored_parameters(model, run.unit[0]) // tp)

    def moved(size_bytes: int) -> int:
        return layers * (shards - 1) * -(-size_bytes // shards) * ranks

    def sent(schedule: Schedule) -> int:
        return int(schedule.bytes_sent().sum())

    gathered = moved(PARAMETER_BYTES * parameters) if zero else 0
    assert sent(phases.forward(run.unit, layers)) == context + gathered
    assert sent(phases.forward(run.unit, layers, gathers=False)) == context
    reducing, silent = (
        sent(phases.backward(run.unit, layers, reduces=reduces, gathers=False)) for reduces in (True, False)
    )
    assert reducing - silent == moved(GRADIENT_BYTES * parameters) * (1 if zero else 2)
    alone = replace(plan, layout=replace(plan.layout, checkpointing="none"))
    repeated = silent - sent(
        phases_of(alone, exact_machine(ranks)).backward(run.unit, layers, reduces=False, gathers=False)
    )
    assert repeated == {"none": 0, "selective": 0, "full": context}[checkpointing]


@pytest.mark.parametrize(("checkpointing", "gathers", "sums"), [("none", 6, 4), ("selective", 7, 5), ("full", 8, 6)])
def test_tensor_groups_gather_and_sum_hidden_states(checkpointing: Checkpointing, gathers: int, sums: int) -> None:
    """Twice forward, around attention and MLP (arXiv:2205.05198, section 4.2.2), and twice backward, where inputs of
    both are gathered again, too. Full checkpointing repeats those of the forward pass, selective half of them.
    """
    model, tokens = small_model(3), 64
    step = predict_step(
        "b200-8", model, tokens, "ulysses", layout=Layout(tp=4, cp=1, dp=2, zero=0, checkpointing=checkpointing)
    )
    group = group_machine(load_machine("b200-8"), np.arange(8).reshape(2, 4))
    size = 2 * tokens * model.hidden_size
    gather_s, sum_s = (
        float(simulate(library_schedule(name, group.topology, size), group).time_s)  # type: ignore[arg-type]
        for name in ("all_gather", "reduce_scatter")
    )
    without = predict_step("b200-8", model, tokens, "ulysses", layout=replace(step.layout, tp=1, dp=8))
    of_tensors = step.times.exposed_s - step.times.embedding_s - 3 * (gathers * gather_s + sums * sum_s)
    assert 0 <= of_tensors < without.times.exposed_s


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 1, 2, 3]), st.sampled_from([1, 2]))
@settings(max_examples=20)
def test_experts_that_ranks_share_are_stored_once_in_a_group(ep: int, zero: int, tp: int) -> None:
    """Of 8 experts a rank holds 8 / ep; what ZeRO shards is an equal part of all in any case."""
    experts = Experts(count=8, active=2, width=8, shared=1, dense_layers=1)
    plan = plan_of(small_model(3, experts=experts), ranks=8 * tp, cp=2, dp=4, tp=tp, zero=zero, ep=ep)
    all_parameters, every = parameter_count(plan.model), 2 * 8 * 3 * 12 * 8  # of two layers of experts
    held = all_parameters - every + every // ep
    memory = stage_memory(plan, 0, 64, 0)
    expected = {
        "parameters": 4 * all_parameters / 8 if zero == 3 else 2 * held,
        "gradients": 4 * all_parameters / 8 if zero >= 2 else 4 * held,
        "optimizer": (8 if zero == 3 else 12) * (all_parameters / 8 if zero else held),
    }
    for name, size in expected.items():
        assert getattr(memory, name) == pytest.approx(size / tp, abs=16)
    (layer,) = {kind for kind in kinds_of(plan.model) if kind.experts is not None}
    own, moved = stored_parameters(plan.model, layer, ep), moved_parameters(plan.model, layer, ep, 8)
    of_experts, fewer = 8 * 3 * 12 * 8 // ep, 8 // ep
    assert (own - moved) * 7 / 8 == pytest.approx(of_experts * (7 / 8 - (fewer - 1) / fewer), abs=1)


@given(st.sampled_from([1, 2, 4]), st.integers(1, 40))
def test_experts_compute_as_many_tokens_wherever_they_are(ep: int, tokens: int) -> None:
    matrix = Matrix(12, 8, "outputs", "results", 8, 2)
    product = matrix.product(4 * tokens, 1, ep)
    assert product.flops == 4 * tokens * matrix.flops
    assert (product.copies, product.rows) == (8 // ep, tokens * ep)


@pytest.mark.parametrize(("checkpointing", "exchanges"), [("none", 4), ("selective", 5), ("full", 6)])
def test_tokens_travel_to_their_experts_and_back(checkpointing: Checkpointing, exchanges: int) -> None:
    """Two all-to-alls forward and two backward of each layer with experts; what is computed again repeats them."""
    model = small_model(3, experts=Experts(count=8, active=2, width=8, dense_layers=1))
    steps = [
        predict_step(
            "b200-8", model, 64, "ulysses", layout=Layout(cp=1, dp=8, zero=1, checkpointing=checkpointing, ep=ep)
        )
        for ep in (1, 8)
    ]
    machine = load_machine("b200-8")
    once_s = float(simulate(library_schedule("alltoall", machine.topology, 2 * 64 * 2 * 12), machine).time_s)
    more_s = steps[1].times.exposed_s - steps[0].times.exposed_s
    assert more_s == pytest.approx(2 * exchanges * once_s, rel=0.2)
    assert [each.to_dict()["ep"] for each in steps] == [1, 8]
    assert ", ep 8, " in str(steps[1])


def test_expert_parallelism_that_does_not_divide_is_refused() -> None:
    for model, ep, words in ((small_model(), 2, "no experts"), (small_experts(), 4, "6 experts and 8 ranks")):
        with pytest.raises(ScheduleError, match=f"ep {ep} with {words}"):
            predict_step("b200-8", model, 64, "ulysses", layout=Layout(cp=1, dp=8, ep=ep))


@pytest.mark.parametrize(("tp", "cp", "dp"), [(2, 1, 1), (2, 2, 1), (4, 1, 2)])
def test_tensor_groups_share_the_work_of_one_rank(tp: int, cp: int, dp: int) -> None:
    """With instant links and equal parts a layer takes 1 / (t c) of its time on one rank."""
    model = small_model(2, attention=Attention(heads=4, head_dim=8, kv_heads=4))
    times = []
    for ranks, layout in ((1, {}), (tp * cp * dp, {"tp": tp, "cp": cp, "dp": dp})):
        plan = plan_of(model, 64, "zigzag-ring-attention", ranks, **layout)
        machine = exact_machine(ranks, Fraction(10**18))
        (run,) = runs_of(kinds_of(model))
        times.append(simulate(phases_of(plan, machine).backward(run.unit, 2, reduces=True), machine, "simpy").time_s)
    one, shared = times
    assert one <= shared * tp * cp < one * Fraction(1001, 1000)


works = st.fractions(Fraction(1, 10), 10)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), works, works)
def test_a_pipeline_of_equal_stages_takes_its_closed_form(
    stages: int, chunks: int, rounds: int, forward_s: Fraction, backward_s: Fraction
) -> None:
    """(m v + p - 1) (f + b) with m micro-batches and v chunks of f + b on p stages (arXiv:2104.04473, section 2.2)."""
    microbatches = rounds * stages
    orders = one_forward_one_backward(stages, chunks, microbatches)
    for stage, order in enumerate(orders):
        assert len(set(order)) == len(order) == 2 * chunks * microbatches
        assert {work.chunk % stages for work in order} == {stage}
    whole_s = makespan_s(orders, lambda work: backward_s if work.is_backward else forward_s, Fraction(0))
    assert whole_s == (microbatches * chunks + stages - 1) * (forward_s + backward_s)
    if chunks == 1:
        most = [most_under_way(order, lambda chunk: 1) for order in orders]
        assert most == [min(stages - stage, microbatches) for stage in range(stages)]


@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(1, 99), min_size=24, max_size=24))
def test_more_micro_batches_than_a_pipeline_begins_with_do_not_add_to_those_under_way(
    stages: int, chunks: int, more: int, sizes: list[int]
) -> None:
    """What `stage_memory` relies on, for parts of any size."""
    counts = [(chunks + 2 + rounds) * stages for rounds in (0, more)]
    for stage in range(stages):
        one, other = (most_under_way(order_of(stage, stages, chunks, count), sizes.__getitem__) for count in counts)
        assert one == other


@given(st.integers(2, 5), st.integers(1, 3), st.lists(works, min_size=1, max_size=4), works)
def test_no_pipeline_is_shorter_than_its_busiest_stage_or_than_one_micro_batch(
    stages: int, chunks: int, costs: list[Fraction], send_s: Fraction
) -> None:
    orders = one_forward_one_backward(stages, chunks, stages)

    def work_s(work: Work) -> Fraction:
        return costs[(3 * work.chunk + work.is_backward) % len(costs)]

    whole_s = makespan_s(orders, work_s, send_s)
    through = sum(work_s(Work(chunk, 0, each)) for chunk in range(stages * chunks) for each in (False, True))
    assert whole_s >= through + 2 * (stages * chunks - 1) * send_s
    assert whole_s >= max(sum(map(work_s, order)) for order in orders)
    assert whole_s >= makespan_s(orders, work_s, Fraction(0))


def test_stages_send_all_they_have_to_the_next_one_at_once() -> None:
    machine, layout = exact_machine(12, Fraction(1)), Layout(tp=2, dp=2, cp=1, pp=3)
    schedule = send(machine.topology, layout.ranks(12), 7)
    assert int(schedule.bytes_sent().sum()) == 7 * 8
    assert simulate(schedule, machine).time_s == 7


def test_stages_in_nodes_of_their_own_stand_for_each_other() -> None:
    topology = nodes(4, 4, "switch")
    part, places = stage_of(topology, Layout(tp=2, cp=2, pp=4, dp=1))
    assert (part.world_size, places.shape) == (4, (1, 1, 2, 2))
    part, places = stage_of(topology, Layout(tp=2, cp=1, pp=8, dp=1))
    assert (part.world_size, places.shape) == (16, (8, 1, 1, 2))
    assert stage_of(topology, Layout(tp=2, pp=1).on(16))[0] is topology


def small_step(layout: Layout, bandwidth: float = 1e6) -> StepPrediction:
    return predict_step(full_mesh(world(layout), bandwidth, 1e-6), small_model(4), 64, "ulysses", layout=layout)


@given(staged_layouts, st.permutations(["tp", "cp", "dp", "pp"]))
@settings(max_examples=10)
def test_the_same_groups_in_other_ranks_tie(layout: Layout, order: list[str]) -> None:
    """On a full mesh all ranks are alike, so their order makes no difference."""
    one, other = small_step(layout), small_step(replace(layout, order="-".join(order)))
    assert other.time_s == pytest.approx(one.time_s)
    assert other.memory == one.memory


@given(staged_layouts, st.floats(1e4, 1e8), st.floats(1, 1e3))
@settings(max_examples=10)
def test_a_faster_link_never_makes_a_step_slower(layout: Layout, bandwidth: float, factor: float) -> None:
    steps = [small_step(layout, each) for each in (bandwidth, bandwidth * factor)]
    assert steps[1].time_s <= steps[0].time_s * (1 + 1e-9)
    assert steps[0].memory == steps[1].memory
    assert steps[0].memory.total == sum(steps[0].memory._asdict().values())
    parts = steps[0].times
    whole_s = parts.forward_s + parts.backward_s + parts.pipeline_s + parts.embedding_s + parts.optimizer_s
    assert steps[0].time_s == whole_s


@given(st.sampled_from([0, 1, 2, 3]), st.integers(1, 3), st.sampled_from(["none", "selective", "full"]))
@settings(max_examples=10)
def test_a_step_of_one_rank_is_its_work_alone(zero: int, microbatches: int, checkpointing: Checkpointing) -> None:
    """tp = cp = pp = dp = 1 is one GPU: neither messages nor waiting, so ZeRO makes no difference."""
    layout = Layout(1, 1, 1, 1, zero, microbatches=microbatches, checkpointing=checkpointing)
    found = predict_step(full_mesh(1), small_model(), 64, "ulysses", layout=layout)
    assert found.times.pipeline_s == found.times.embedding_s == 0
    assert found.times.exposed_s < 1e-12 * found.time_s
    one = predict_step(full_mesh(1), small_model(), 64, "ulysses", layout=replace(layout, zero=0, microbatches=1))
    assert found.times.compute_s == pytest.approx(microbatches * one.times.compute_s)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=3), "4 heads on tp 3, expected a divisor of 4"),
        (Layout(pp=4), "3 layers on 4 stages, expected at most 3 in all"),
        (Layout(pp=2, interleave=2, microbatches=2), "3 layers on 2 stages of 2 parts, expected at most 3 in all"),
        (Layout(tp=5, cp=5), "layout tp 5 x cp 5 x pp 1 on 12 ranks, expected a divisor of 12"),
        (Layout(2, 2, 2, 2), "layout tp 2 x cp 2 x dp 2 x pp 2 on 12 ranks, expected a product of 12"),
    ],
)
def test_layouts_that_are_refused(layout: Layout, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        predict_step(full_mesh(12), small_model(), 64, "ulysses", layout=layout)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 0}, "tp: 0, expected 1 or more"),
        ({"cp": 1.5}, "cp: 1.5, expected 1 or more"),
        ({"zero": 4}, "zero: 4, expected one of 0, 1, 2, 3"),
        ({"order": "tp-cp"}, "order: 'tp-cp', expected tp, cp, dp and pp in some order"),
        ({"interleave": 2}, "interleave 2 with 1 stages and 1 micro-batches"),
        ({"interleave": 2, "pp": 4, "microbatches": 6}, "interleave 2 with 4 stages and 6 micro-batches"),
    ],
)
def test_values_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        Layout(**changes)


def test_linear_attention_has_no_tensor_groups() -> None:
    with pytest.raises(ScheduleError, match="has linear attention, expected tp 1"):
        plan_of(load_model("minimax-text-01"), 1024, "lasp-2+ulysses", 8, tp=2)


def test_messages_of_a_step_need_routes() -> None:
    places, around = np.array([[0, 1], [2, 3]]), bidirectional_ring(4)
    assert send(around, places, 64).transfers == 2
    with pytest.raises(ScheduleError, match=r"go straight from .* has no link 0->2, .*--routes all.*--no-fsdp"):
        send(direct(around), places, 64)
