"""A small model, and steps of it on exact machines."""

from __future__ import annotations

from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.prediction.training_step.layout import Layout, StepPlan, stage_of
from tasp_lab.prediction.training_step.phases import Phases
from tasp_lab.prediction.training_step.rates import StepCompute, StepRates
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.models.model import MLP, Attention, Experts, Linear, Model

MATRIX_RATE, ATTENTION_RATE = Fraction(1000), Fraction(700)
"""FLOP/s of matrices and of attention."""


def small_model(layers: int | str = 3, **changes: Any) -> Model:
    """A dense model of a few thousand parameters."""
    fields: dict[str, Any] = {
        "summary": "small",
        "source": "a test",
        "layers": layers,
        "hidden_size": 12,
        "vocabulary": 50,
        "attention": Attention(heads=4, head_dim=8, kv_heads=2),
        "mlp": MLP(width=40),
        "name": "small",
    }
    return Model(**fields | changes)


def small_experts(layers: int = 3) -> Model:
    """One dense layer, then layers of experts."""
    return small_model(layers, experts=Experts(count=6, active=2, width=8, shared=1, dense_layers=1))


def small_hybrid() -> Model:
    """Two periods of a linear and a softmax layer."""
    return small_model("2xLS", linear=Linear(decay="head", gate=True))


LAYOUT = [field.name for field in fields(Layout)]


def plan_of(
    model: Model, sequence: int = 64, schedule: str = "zigzag-ring-attention", ranks: int = 2, **changes: Any
) -> StepPlan:
    """A training step of so many ranks; fields of its layout are keywords, too."""
    layout = Layout(**{name: changes.pop(name) for name in LAYOUT if name in changes}).on(ranks)
    return StepPlan(model, sequence, schedule, layout, **{"options": AttentionOptions("both")} | changes)


def exact_machine(ranks: int, bandwidth: Fraction | None = None) -> Machine:
    """A full mesh without latency, whose numbers are fractions."""
    mesh = full_mesh(ranks, bandwidth or Fraction(10**6), Fraction(0))
    rates = StepRates(ComputeRate(MATRIX_RATE), ComputeRate(MATRIX_RATE))
    return Machine(mesh, compute=StepCompute(ComputeRate(ATTENTION_RATE), rates))


def phases_of(plan: StepPlan, machine: Machine) -> Phases:
    """The phases of a step on a machine."""
    return Phases(plan, *stage_of(machine.topology, plan.layout))


def instant(machine: Machine) -> Machine:
    """The machine whose kernels take no time."""
    return replace(machine, compute=ComputeRate())
