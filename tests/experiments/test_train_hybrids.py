"""Training stacks of linear and softmax attention on real processes: the losses are those of formulas on one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import runtime
from experiments.train_gpt.options import Recipe, RunOptions
from tests.experiments.test_train_gpt import LARGEST_ERROR, losses, refusals
from tests.support.ranks import on_ranks
from tests.support.selection import covering

pytestmark = pytest.mark.distributed

Tensor = torch.Tensor

IMPORTED_BY_RANKS = ("torch._dynamo",)

STEPS = 8

LLS = Recipe("LLS", heads=4, kv_heads=2, head_dim=8, seq=61, batch=2, seed=3)
"""61 positions: no number of ranks divides them."""

CASES = [
    (LLS, [("lasp-2", "kv-all-gather"), ("ring-linear-attention", "ring-attention"), ("all-scan", "ulysses")]),
    (replace(LLS, decay="scalar"), [("all-scan", "tasp")]),
    (replace(LLS, layers="SLS", decay="head"), [("lasp", "zigzag-ring-attention"), ("direct-lasp-2", "burst")]),
    (replace(LLS, layers="LS", decay="channel", kv_heads=4), [("multi-ring-lasp-2", "striped-ring-attention")]),
    (replace(LLS, layers="2xL", decay="scalar"), [("trees-lasp-2", "tasp")]),
]
"""Stacks, and schedules of linear and softmax attention; most pairs have different layouts. The last has one kind."""


def of_case(number: int, steps: int = STEPS, **options: Any) -> list[tuple[Recipe, RunOptions]]:
    """The runs of a case."""
    recipe, names = CASES[number]
    return [(recipe, RunOptions(steps, softmax, linear, **options)) for linear, softmax in names]


def on(world_size: int, runs: list[tuple[Recipe, RunOptions]]) -> list[list[float]]:
    """The losses of runs on so many ranks; every rank has the same."""
    found: Any = on_ranks(losses, world_size, runs)
    assert all(isinstance(each, list) for each in found), found
    assert all(each == found[0] for each in found)
    return found[0]  # type: ignore[no-any-return]


def softmax(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """By torch's own attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def linear(q: Tensor, k: Tensor, v: Tensor, decay: Any, gates: Tensor | None, **_: Any) -> Tensor:
    """o_i = sum over j <= i of (q_i exp(G_i - G_j) k_j) v_j, with the cumulated logarithms G of decays."""
    k_heads = k.shape[2]
    logarithms = torch.zeros(1, 1, k_heads, 1) if decay is None else torch.tensor(decay).log().view(1, 1, -1, 1)
    if gates is not None:
        logarithms = gates.view(*k.shape[:3], -1)
    total = logarithms.expand(*k.shape[:3], -1).cumsum(1)
    causal = torch.ones(k.shape[1], k.shape[1]).tril()[None, :, :, None, None]
    weights = torch.exp((total[:, :, None] - total[:, None]) * causal) * causal
    q_of = q.unflatten(2, (k_heads, -1))
    scores = torch.einsum("bihgd,bijhd,bjhd->bijhg", q_of, weights.expand(*weights.shape[:4], k.shape[3]), k)
    return torch.einsum("bijhg,bjhe->bihge", scores, v).flatten(2, 3)


def losses_by_formulas(recipes: list[Recipe], saved: Path) -> list[list[float]]:
    """On the only rank: the losses without this project's attention; the first run is saved."""
    runtime.attention, runtime.linear_attention = softmax, linear  # type: ignore[assignment]
    runs = [(recipe, RunOptions(STEPS, save=saved if not number else None)) for number, recipe in enumerate(recipes)]
    return losses(runs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for a checkpoint of the first stack."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def alone(saved: Path) -> list[list[float]]:
    """The losses of one process without schedules, of each stack."""
    (found,) = on_ranks(losses_by_formulas, 1, [recipe for recipe, _ in CASES], saved)
    assert isinstance(found, list), found
    return found


def test_stacks_learn(alone: list[list[float]]) -> None:
    assert len({tuple(each) for each in alone}) == len(alone)
    for each in alone:
        assert each[0] == pytest.approx(torch.tensor(256.0).log().item(), abs=0.2)
        assert each[-1] < each[0] - 0.1


WORLD_SIZES = [1, 2, 4]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_losses_are_those_of_one_process_by_formulas(world_size: int, alone: list[list[float]]) -> None:
    numbers = [
        number for on_ranks, number in covering(product(WORLD_SIZES, range(len(CASES)))) if on_ranks == world_size
    ]
    runs = [run for number in numbers for run in of_case(number)]
    expected = [alone[number] for number in numbers for _ in of_case(number)]
    for run, found, wanted in zip(runs, on(world_size, runs), expected, strict=True):
        assert found == pytest.approx(wanted, rel=LARGEST_ERROR), run


def test_groups_of_ranks_and_activations_computed_again(alone: list[list[float]]) -> None:
    two_by_two = of_case(1, sequence_parallel=2)
    again = of_case(1, 3, sequence_parallel=2, checkpoint_activations=True)
    kept, computed_again = on(4, [*two_by_two, *again])
    assert kept == pytest.approx(alone[1], rel=LARGEST_ERROR)
    assert computed_again == kept[:3]


def test_a_checkpoint_continues_with_other_ranks_and_schedules(tmp_path: Path, alone: list[list[float]]) -> None:
    folder = tmp_path / "saved"
    (first,) = on(2, of_case(0, 3, save=folder)[:1])
    (then,) = on(3, of_case(0, resume=folder)[1:2])
    assert first + then == pytest.approx(alone[0], rel=LARGEST_ERROR)


def test_bf16_learns_the_same_within_its_precision(alone: list[list[float]]) -> None:
    recipe = replace(CASES[1][0], dtype="bf16")
    (found,) = on(2, [(recipe, RunOptions(5, "zigzag-ring-attention", "lasp-2"))])
    assert found == pytest.approx(alone[1][:5], rel=2**-8)


def test_what_cannot_work_is_refused_by_all_ranks(alone: list[list[float]], saved: Path) -> None:
    ring = RunOptions(linear_schedule="ring-linear-attention")
    cases = [
        (LLS, RunOptions(linear_schedule="tasp"), "schedule 'tasp' is for softmax attention"),
        (LLS, RunOptions(schedule="lasp-2"), "schedule 'lasp-2' is for linear attention, expected one for softmax"),
        (LLS, RunOptions(linear_schedule="lasp-3"), "unknown schedule 'lasp-3'"),
        (replace(LLS, decay="scalar"), ring, "decay 'scalar' depends on the data of all chunks in between"),
        (replace(LLS, decay="head"), RunOptions(resume=saved), "decay is none, here it is head"),
        (replace(LLS, layers="LSL"), RunOptions(resume=saved), "layers is LLS, here it is LSL"),
    ]
    differ = LLS, RunOptions(), RunOptions(linear_schedule="lasp")
    found: Any = on_ranks(refusals, 2, [*((recipe, run, run) for recipe, run, _ in cases), differ])
    for rank in range(2):
        assert found[rank].pop() == "rank 1: linear_schedule is lasp, on rank 0 it is lasp-2"
        for told, (_, _, expected) in zip(found[rank], cases, strict=True):
            assert expected in told
            assert "\n" not in told


def test_the_gates_take_part_in_learning() -> None:
    """Their parameters get gradients, and a step changes them."""
    (found,) = on_ranks(gates_changed, 1)
    assert found is True


def gates_changed() -> bool:
    from experiments.train_gpt.train import Trainer

    trainer = Trainer(replace(LLS, decay="channel"), RunOptions(2))
    gates = [each for name, each in trainer.model.named_parameters() if ".gate.0." in name]
    before = [each.detach().clone() for each in gates]
    trainer.step()
    return len(gates) == 4 and all(not torch.equal(*each) for each in zip(before, gates, strict=True))
