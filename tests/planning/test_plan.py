"""Plans: pruning changes no recommendation, faster links never make one slower, and what fits nowhere is ordered."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab import plan, predict_step
from tasp_lab.core.errors import TaspLabError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.kernel_model.catalogue import kernel_names
from tasp_lab.planning.candidates import candidates
from tasp_lab.planning.changes import asked_plan
from tasp_lab.planning.plan import Plan
from tasp_lab.planning.search import Search, Setting
from tasp_lab.prediction.training_step.rates import RESERVED_BYTES, step_rates
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.workload.models.model import MLP, Attention, Model
from tests.support.steps import small_model

MODEL = small_model(4, hidden_size=512, attention=Attention(heads=4, head_dim=128, kv_heads=2), mlp=MLP(width=1024))


def planned(machine: str = "h100-4", model: Model | str = MODEL, tokens: int = 4 * 8192, **changes: Any) -> Plan:
    """A plan of all layouts that bounds do not exclude, with one attention schedule."""
    given = {"schedules": "ulysses", "simulations": None, "changes": False, "checkpointing": "none"}
    return plan(machine, model, 8192, tokens, **given | changes)


def chosen(found: Plan) -> dict[str, Any]:
    """What a plan recommends, and what that takes."""
    return {"layout": found.best.layout, "schedule": found.best.plan.schedule, "time_s": found.best.time_s}


@settings(max_examples=5, deadline=None)
@given(
    heads=st.sampled_from([(2, 1), (4, 2), (4, 4)]),
    layers=st.integers(1, 3),
    hidden=st.sampled_from([64, 1024]),
    machine=st.sampled_from(["h100-2", "full-mesh:2", "h100-2x2"]),
    sequences=st.sampled_from([1, 2]),
)
def test_pruning_changes_no_recommendation(
    heads: tuple[int, int], layers: int, hidden: int, machine: str, sequences: int
) -> None:
    attention = Attention(heads=heads[0], kv_heads=heads[1], head_dim=64)
    model = small_model(layers, hidden_size=hidden, attention=attention)
    found, every = (planned(machine, model, sequences * 8192, every=each) for each in (False, True))
    assert chosen(found) == chosen(every)
    assert every.found.bounded == 0
    assert len(found.steps) + found.found.bounded + len(found.found.refused) == len(every.steps) + len(
        every.found.refused
    )


def test_bounds_exclude_layouts() -> None:
    """Recomputing a model of large matrices takes a third longer than the fastest layout."""
    model = small_model(2, hidden_size=4096, attention=Attention(heads=8, head_dim=512), mlp=MLP(width=16384))
    found = planned("h100-2", model, 2 * 8192, checkpointing=None)
    assert found.found.bounded > 0
    assert found.best.layout.checkpointing == "none"
    assert found.found.left == ()


def test_an_answer_repeats_with_any_number_of_workers() -> None:
    answers = [planned("h100-2", tokens=8192, workers=each).to_dict() for each in (1, 1, 2)]
    for each in answers:
        each.pop("provenance")  # has the time of the run
    one, again, two = map(json.dumps, answers)
    assert one == again == two


@pytest.mark.parametrize(("machine", "override"), [("h100-2x2", "nic.bandwidth=x4"), ("h100-2", "link.bandwidth=x4")])
def test_a_faster_link_never_makes_the_fastest_plan_slower(machine: str, override: str) -> None:
    slow, fast = planned(machine, tokens=8192), planned(machine, tokens=8192, overrides=[override])
    assert fast.found.fastest.time_s <= slow.found.fastest.time_s


def test_more_memory_buys_layouts_that_do_not_fit_as_is() -> None:
    """A model that is computed again in part to fit: with twice the memory nothing need be."""
    found = plan("h100-4", "llama-3-8b", 65536, 4 * 65536, schedules="ulysses", simulations=2)
    (memory,) = (each for each in found.changes if each.change == "memory=x2")
    assert memory.step is not None
    assert found.best.fits
    assert found.best.layout.checkpointing != "none"
    assert memory.step.memory.total > (found.setting.rates.usable_bytes or 0)
    assert memory.share > 1


def test_a_change_for_the_better_is_tried_with_the_recommended_layout() -> None:
    """It is found again among all layouts, whatever options its schedule has, so no such change costs anything."""
    found = plan("h100-2x2", MODEL, 65536, 2 * 65536, schedules=["zigzag-ring-attention"], simulations=2)
    assert any(step.plan.options != AttentionOptions("both") for step in found.steps)
    asked = {replace(each, software=step.plan.software) for step in found.steps
             for each in candidates(MODEL, 65536, 2 * 65536, 4, 2)}  # fmt: skip
    assert set(map(asked_plan, found.steps)) <= asked
    better = [each for each in found.changes if each.change.startswith(("memory", "nic", "kernel"))]
    assert len(better) >= 2
    assert min(each.share for each in better) >= 1 - 1e-9, better


def test_the_kernel_of_a_change_is_that_with_which_the_step_takes_least() -> None:
    """Deterministic kernels have the same rate forward, but take longer backward."""
    found = plan(
        "gb200-4", "llama-3-8b", 8192, 4 * 8192, schedules="ulysses", simulations=1, kernel="flash-attention-2"
    )
    (kernel,) = [each.change.removeprefix("kernel ") for each in found.changes if each.change.startswith("kernel ")]
    best = found.best

    def time_s(name: str) -> float:
        step = predict_step(
            "gb200-4",
            "llama-3-8b",
            8192,
            best.plan.schedule,
            layout=best.plan.layout,
            batch=best.plan.batch,
            kernel=name,
        )
        return step.time_s

    assert kernel == min(kernel_names("gb200"), key=time_s)
    assert time_s(kernel) < best.time_s


def test_the_recommendation_is_within_a_percent_of_the_fastest_and_fits() -> None:
    found = planned(checkpointing=None, simulations=5)
    assert found.best.fits is True
    assert found.best.time_s <= 1.01 * found.found.fastest.time_s
    assert len(found.steps) <= 5
    assert sum(found.shares.values()) == pytest.approx(1)
    assert 0 <= found.expected_regret < 1
    sequences = found.best.tokens // 8192
    assert sequences == 4


def test_of_a_model_that_fits_nowhere_the_smallest_layouts_are_shown_in_order() -> None:
    found = plan("h100-8", "llama-3-405b", 131072, 131072)
    assert not found.fits
    with pytest.raises(TaspLabError, match="llama-3-405b with 128Ki positions fits nowhere on h100-8"):
        found.best  # noqa: B018
    sizes = [each.memory.total for each in found.found.too_large]
    assert sizes == sorted(sizes)
    assert min(sizes) > (found.setting.rates.usable_bytes or 0)
    shown = found.to_dict()["smallest"]
    assert isinstance(shown, list)
    assert 0 < len(shown) <= 5
    assert [each["memory_bytes"] for each in shown] == sorted(each["memory_bytes"] for each in shown)
    assert str(found).startswith("llama-3-405b with 128Ki positions fits nowhere")


def test_where_nothing_fits_layer_inputs_on_the_host_are_tried() -> None:
    found = plan("h100-8", "llama-3-70b", 2**20, 2**20, logit_chunks=64, offload=True)
    assert not found.fits
    assert found.would_fit[0]["change"].endswith("--checkpointing offload")
    assert "layer inputs on the host" in found.would_fit[0]["layout"]
    chosen = plan("h100-8", "llama-3-8b", 2**20, 2**20, checkpointing="offload", logit_chunks=64, changes=False,
                  simulations=1, overrides=["gpu.memory=70GiB"])  # fmt: skip
    assert chosen.best.layout.checkpointing == "offload"
    assert chosen.setting.rates.capacity_bytes == 70 * 2**30


def test_flags_have_the_degrees_of_the_layout() -> None:
    found = planned("h100-2x2", tokens=2 * 8192, simulations=2)
    layout = found.best.layout
    degrees = {"tensor-model": layout.tp, "context": layout.cp, "pipeline-model": layout.pp}
    megatron, nemo, titan = (each.text for each in found.flags)
    for name, value in degrees.items():
        assert (f"--{name}-parallel-size {value}" in megatron) == (value != 1)
        assert (f"{name.replace('-', '_')}_parallel_size={value}" in nemo) == (value != 1)
    for name in ("tensor", "context", "pipeline"):
        value = degrees[name if name == "context" else f"{name}-model"]
        assert (f"--parallelism.{name}_parallel_degree {value}" in titan) == (value != 1)
    assert "--global-batch-size 2" in megatron
    assert "num_tokens_per_train_step 16384" in titan


def test_layouts_that_buffers_exclude_do_not_use_up_the_simulations() -> None:
    """Less memory than the first layout needs with its attention buffers, but enough without: the next one is taken."""
    machine = load_machine("h100-4")
    rates = step_rates(machine)
    plans = list(candidates(MODEL, 8192, 8192, 4, 4, checkpointings=["none", "full"]))
    plans = [each for each in plans if each.layout.cp == 4]
    assert len(plans) > 1
    (first,) = Search(Setting(machine, rates, ("zigzag-ring-attention",)), simulations=1).run(plans).steps
    assert first.memory.attention_buffers > 0
    less = replace(rates, capacity_bytes=first.memory.total + RESERVED_BYTES - 1)
    found = Search(Setting(machine, less, ("zigzag-ring-attention",)), simulations=1).run(plans)
    assert first.plan.layout in [each.plan.layout for each in found.too_large]
    (step,) = found.steps
    assert step.fits
