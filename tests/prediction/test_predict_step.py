"""Whole steps: parts that add up, tokens and MFU by their definitions, laws of bandwidth and of micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from msgspec import structs

from tasp_lab import Layout, compare, predict_step
from tasp_lab.core.choices import Checkpointing, Dataflow
from tasp_lab.core.errors import ScheduleError, TaspLabError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.prediction.step_results import StepPrediction, StepTimes
from tasp_lab.prediction.training_step.rates import HOST_BYTES_PER_S, HOST_LINK_BYTES_PER_S, step_rates
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.models.catalogue import load_model
from tasp_lab.workload.models.hugging_face import model_of_config
from tasp_lab.workload.models.model import Attention
from tasp_lab.workload.models.parameters import active_parameters, parameter_count
from tests.support.configs import PUBLISHED
from tests.support.schedules import bytes_between
from tests.support.steps import exact_machine, phases_of, plan_of, small_experts, small_hybrid, small_model


def test_parts_add_up_and_tokens_are_those_of_all_groups() -> None:
    found = predict_step("h100-8", "llama-3-8b", 4096, "ulysses", batch=2, layout=Layout(cp=4, microbatches=3))
    times = found.times
    assert found.time_s == times.forward_s + times.backward_s + times.pipeline_s + times.embedding_s + times.optimizer_s
    assert found.tokens == 4096 * 2 * 2 * 3
    assert found.tokens_per_s == found.tokens / found.time_s
    assert 0 < times.exposed_s < found.time_s


@pytest.mark.parametrize("stack", ["trl", "megatron"])
@pytest.mark.parametrize("dataflow", get_args(Dataflow))
def test_sums_that_the_next_layer_waits_for_do_not_wait_for_its_calls(stack: str, dataflow: Dataflow) -> None:
    options = AttentionOptions("both", dataflow=dataflow)
    found = predict_step("h100-8", "llama-3-8b", 4096, "zigzag-ring-attention", stack=stack, layers=2, options=options)
    assert found.times.exposed_s >= 0


def test_model_flops_are_6_per_parameter_and_3_times_attention() -> None:
    """Causal pairs of 32 layers, 32 heads of 128: two products of 2 FLOPs per pair and element, forward."""
    found = predict_step("h100-8", "llama-3-8b", 4096, "ulysses")
    attention = 32 * 32 * 4 * 128 * 4096 * 4097 // 2
    assert found.model_flops == 6 * 4096 * active_parameters(load_model("llama-3-8b")) + 3 * attention
    assert found.mfu == pytest.approx(found.model_flops / found.time_s / 8 / 989.4e12)


@pytest.mark.parametrize(
    ("machine", "model", "schedule", "options"),
    [
        ("h100-8", "qwen3-8b", "tasp", {}),
        ("h100-8", "llama-3-8b", "ulysses", {"matrix_dtype": "fp8", "layout": Layout(checkpointing="none")}),
        ("mi300x-8", "llama-3-8b", "zigzag-ring-attention", {"passes": "forward", "layout": Layout(zero=0)}),
        ("b200-8", "qwen3-30b-a3b", "kv-all-gather", {"layout": Layout(cp=2)}),
    ],
)
def test_mfu_is_at_most_1(machine: str, model: str, schedule: str, options: dict[str, object]) -> None:
    found = predict_step(machine, model, 8192, schedule, **options)  # type: ignore[arg-type]
    assert found.mfu is not None
    assert 0 < found.mfu < 1
    assert found.times.exposed_s >= 0


@pytest.mark.parametrize("model", [small_model(), small_experts(), small_hybrid()])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_more_bandwidth_is_never_slower(model: object, zero: int) -> None:
    schedule = "lasp-2+ulysses" if "L" in model.pattern else "ulysses"  # type: ignore[attr-defined]
    times = [
        predict_step(full_mesh(4, bandwidth, 1e-6), model, 4096, schedule, layout=Layout(zero=zero)).time_s  # type: ignore[arg-type]
        for bandwidth in (1e6, 1e7, 1e8, 1e9, 1e10)
    ]
    assert times == sorted(times, reverse=True)


def test_micro_batches_reduce_once_without_fsdp() -> None:
    def step(count: int, zero: int) -> StepPrediction:
        return predict_step(
            full_mesh(4, 1e7, 1e-6), small_model(), 512, "ulysses", layout=Layout(zero=zero, microbatches=count)
        )

    one, three = step(1, 3), step(3, 3)
    assert three.time_s == pytest.approx(3 * one.time_s)
    one, three = step(1, 0), step(3, 0)
    assert three.time_s < 3 * one.time_s
    assert three.times.embedding_s == one.times.embedding_s


def test_memory_of_more_ranks_is_less_until_it_fits() -> None:
    steps = [
        predict_step(f"h100-{size}", "llama-3-70b", 8192, "ulysses", layout=Layout(cp=8))
        for size in ("8", "2x8", "4x8")
    ]
    assert [each.fits for each in steps] == [False, False, True]
    assert steps[0].memory.optimizer == 4 * steps[2].memory.optimizer


def test_options_that_make_a_step_fit_are_named_with_its_memory() -> None:
    """With each it fits, and takes so much memory; with fewer options it does not."""
    plain = Layout(zero=1, checkpointing="none")
    found = predict_step("h100-8", "llama-3-8b", 131072, "ulysses", layout=plain)
    one = {
        "--fsdp": {"zero": 3},
        "--checkpointing full": {"checkpointing": "full"},
        "--checkpointing offload": {"checkpointing": "offload"},
        "--logit-chunks 8": {"logit_chunks": 8},
        "--offload": {"offload": True},
    }
    assert found.fits is False
    assert found.would_fit
    for names, size in found.would_fit.items():
        options = [changes for name, changes in one.items() if name in names]
        layout = plain
        for number, changes in enumerate(options):
            assert number == 0 or predict_step("h100-8", "llama-3-8b", 131072, "ulysses", layout=layout).fits is False
            layout = replace(layout, **changes)  # type: ignore[arg-type]
        step = predict_step("h100-8", "llama-3-8b", 131072, "ulysses", layout=layout)
        assert (step.fits, step.memory.total, step.would_fit) == (True, size, {})
    assert str(found).startswith("Does not fit: ")


def test_layer_inputs_on_the_host_cost_time_only_where_computing_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 32 layers send 16384 x 4096 numbers in 16 bits, and take them back, at 1 MB/s."""

    def step(checkpointing: Checkpointing) -> StepTimes:
        layout = Layout(checkpointing=checkpointing)
        return predict_step("h100-8", "llama-3-8b", 131072, "ulysses", layout=layout, layers=2).times

    full = step("full")
    assert step("offload") == full, "a layer is computed for longer than 128 MiB take over PCIe"
    monkeypatch.setattr("tasp_lab.prediction.training_step.simulation.HOST_LINK_BYTES_PER_S", 1e6)
    slow = step("offload")
    moved_s = 32 * 16384 * 4096 * 2 / 1e6
    assert moved_s < slow.forward_s < moved_s + full.forward_s, "the output matrix and the loss come on top"
    assert moved_s < slow.backward_s < moved_s + full.backward_s


def test_layer_inputs_on_the_host_make_a_million_positions_fit() -> None:
    """Qwen3 32B on 8 H100: measured peaks are 60.8 GB (huggingface/trl pull 6846, with MLPs in tiles)."""
    where = ("h100-8", "qwen3-32b", "1Mi", "zigzag-ring-attention")
    layout = Layout(offload=True, logit_chunks=64)
    full = predict_step(*where, layout=layout, stack="trl", layers=2)
    assert full.fits is False
    assert list(full.would_fit) == ["--checkpointing offload"]
    step = predict_step(*where, layout=replace(layout, checkpointing="offload"), stack="trl", layers=2)
    assert step.fits
    assert step.memory.total == full.would_fit["--checkpointing offload"]
    assert step.memory.total == pytest.approx(60.8e9, rel=0.05)


def test_overrides_change_the_machine() -> None:
    slow, fast = (
        predict_step(
            "h100-2x8", "llama-3-8b", 4096, "ulysses", layout=Layout(cp=8), overrides=(f"nic.bandwidth={factor}",)
        )
        for factor in ("x0.25", "x1")
    )
    assert slow.times.exposed_s > fast.times.exposed_s
    assert slow.provenance.inputs["overrides"] == ["nic.bandwidth=x0.25"]


def test_a_rate_above_all_others_makes_no_difference_but_time() -> None:
    slow, fast = (
        predict_step("h100-8", "llama-3-8b", 4096, "ulysses", matrix_rate=rate) for rate in (300e12, "timed:600TFLOP/s")
    )
    assert fast.time_s < slow.time_s
    assert fast.model_flops == slow.model_flops
    assert fast.memory == slow.memory


def test_rates_that_are_given_replace_those_of_the_accelerator() -> None:
    rates = step_rates(load_machine("h100-8"))
    slower = replace(rates, memory_bytes_per_s=2.2e12, memory_source="mine")
    own, same, slow = (
        predict_step("h100-8", "llama-3-8b", 4096, "ulysses", rates=each) for each in (None, rates, slower)
    )
    assert same.times == own.times
    assert slow.times.optimizer_s == pytest.approx(
        own.times.optimizer_s * float(rates.memory_bytes_per_s or 0) / 2.2e12
    )
    assert slow.time_s > own.time_s
    assert ("memory_bandwidth", "mine") in [(each.name, each.source) for each in slow.provenance.constants]


@pytest.mark.parametrize("tp", [1, 2])
def test_repeated_keys_travel_for_all_heads(tp: int) -> None:
    """Keys and values of 2 heads for 4 query heads are twice as many bytes then; parameters and FLOPs are the same."""
    attention = Attention(heads=4, head_dim=8, kv_heads=2)
    moved, flops = [], []
    for repeats in (False, True):
        model = small_model(attention=structs.replace(attention, repeats_kv=repeats))
        plan = plan_of(model, schedule="kv-all-gather", ranks=2 * tp, tp=tp, cp=2)
        passes = phases_of(plan, exact_machine(2 * tp)).passes
        moved.append(int(bytes_between(passes["S", "forward"].schedule).sum()))
        flops.append((passes["S", "forward"].flops, parameter_count(model), active_parameters(model)))
    assert moved[1] == 2 * moved[0] > 0
    assert flops[0] == flops[1]


def test_results_name_their_constants_and_are_marked() -> None:
    found = predict_step("h100-8", "llama-3-8b", 4096, "ulysses")
    row = found.to_dict()
    assert row["less_checked"] is True
    names = {each.name for each in found.provenance.constants}
    assert {"matrix_rate_bf16", "memory_bandwidth", "memory"} <= names
    assert "few published steps were compared" in str(found)
    assert found.records()[0]["memory_optimizer"] == found.memory.optimizer
    assert row["provenance"]["inputs"]["step"]["model"]["name"] == "llama-3-8b"  # type: ignore[index]


def test_offload_takes_states_from_the_gpu_and_time_for_the_host() -> None:
    """30 bytes per parameter of all ranks of the node by its memory; 6 of those of a rank over its link."""
    found = predict_step("h100-8", small_model(), 64, "ulysses", layout=Layout(tp=2, cp=2, offload=True))
    whole = parameter_count(small_model())
    expected_s = 30 * whole / HOST_BYTES_PER_S + 6 * whole / 8 / HOST_LINK_BYTES_PER_S
    assert found.times.optimizer_s == pytest.approx(expected_s)
    assert found.memory.optimizer == 0
    names = {each.name for each in found.provenance.constants if each.assumed}
    assert {"host_link", "host_memory"} <= names


def test_few_layers_are_all_simulated() -> None:
    found = predict_step("full-mesh:2", small_model(5), 64, "ulysses")
    assert found.simulated_layers == ((5, 5),)
    every = predict_step("full-mesh:2", small_experts(12), 64, "ulysses")
    assert every.simulated_layers == ((1, 1), (8, 11))


def test_an_unknown_schedule_or_one_of_another_kind_is_refused() -> None:
    machine = replace(load_machine("full-mesh:2"))
    for schedule in ("rng-attention", "lasp-2", "lasp-2+ulysses"):
        with pytest.raises(TaspLabError):
            predict_step(machine, small_model(), 64, schedule)
    with pytest.raises(TaspLabError, match="hybrid"):
        predict_step(machine, small_hybrid(), 64, "ulysses")


def test_the_phase_with_fewer_simulated_layers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes have fewer transfers, so more of them are simulated where transfers are limited."""
    monkeypatch.setattr("tasp_lab.prediction.training_step.simulation.MANY_TRANSFERS", 250)
    lines = list[str]()
    found = predict_step("full-mesh:4", small_model(12), 512, "ulysses", progress=lines.append)
    simulated = [int(line.split()[1]) for line in lines]
    assert simulated[0] > simulated[1]
    assert found.simulated_layers == ((simulated[1], 12),)


@pytest.mark.parametrize(("machine", "group"), [("h100-4", None), ("h100-2x4", 4)])
def test_without_a_schedule_whole_steps_are_ranked(machine: str, group: int | None) -> None:
    """Those that are fastest for a layer on the ranks of a group; given by name each makes the same step."""
    model = small_model()
    layout = Layout(cp=group)
    found = predict_step(machine, model, 8192, layout=layout)
    recommended = found.recommendation
    assert recommended is not None
    times = {each.schedule: each.time_s for each in found.ranked}
    tied = [name for name, time_s in times.items() if time_s <= 1.01 * found.ranked[0].time_s]
    assert found.plan.schedule in tied
    assert recommended.schedule in times
    assert recommended.schedule not in tied or found.plan.schedule == recommended.schedule
    assert [each.time_s for each in found.ranked] == sorted(each.time_s for each in found.ranked)
    assert recommended.schedule == compare("h100-4", model.layer(8192), passes="both").recommendation.schedule  # type: ignore[union-attr]
    for name, time_s, memory_bytes, fits in found.ranked:
        given = predict_step(machine, model, 8192, name, layout=layout)
        assert (given.time_s, given.memory.total, given.fits) == (time_s, memory_bytes, fits)
        assert (given.recommendation, given.ranked) == (None, ())
    assert found.to_dict().keys() - given.to_dict().keys() >= {"recommended", "why", "expected_regret"}
    assert str(found).startswith(f"Use {found.plan.schedule}: ")
    with pytest.raises(TaspLabError, match=r"cp 3 x pp 1 on . ranks, expected a divisor of"):
        predict_step(machine, model, 8192, layout=Layout(cp=3))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_steps(name: str) -> None:
    model, layout = model_of_config(PUBLISHED[name].config, name), Layout(cp=4 if name == "gemma-3-1b" else None)
    found = predict_step("h100-8", model, "32Ki", "ulysses", layout=layout, layers=2)
    assert found.mfu is not None
    assert 0 < found.mfu < 1


@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-20b", "llama-4-scout"])
def test_windows_in_some_layers_save_time(name: str) -> None:
    """Without FSDP: gathers of experts take longer than attention on so few ranks, and would hide it."""
    model, layout = model_of_config(PUBLISHED[name].config, name), Layout(zero=1)
    full = structs.replace(model, layers=len(model.pattern), attention=structs.replace(model.attention, window=None))
    some, none = (predict_step("h100-8", each, "32Ki", "ulysses", layout=layout) for each in (model, full))
    assert some.time_s < none.time_s
    assert some.model_flops < none.model_flops


def test_stacks_must_run_layers_with_a_window() -> None:
    """Megatron's ring takes none (`tasp_lab/machines/stacks/megatron.toml`), its all-to-all and gather do."""
    model = small_model("2xWS", attention=Attention(heads=8, head_dim=64, kv_heads=8, window=128))
    with pytest.raises(ScheduleError, match="the stack megatron runs zigzag-ring-attention without a window only"):
        predict_step("h100-8", model, 8192, "zigzag-ring-attention", stack="megatron")
    found = predict_step("h100-8", model, 8192, stack="megatron")
    names = {each.schedule for each in found.ranked}
    assert "ulysses" in names
    assert "zigzag-ring-attention" not in names
    assert str(found).startswith(f"Use {found.plan.schedule}: ")
