"""The table of errors of layers: its float64 reference, some of its cases, and that it has all schedules."""

from __future__ import annotations

import pytest
import torch

from experiments.common import RESULTS
from experiments.tables.layer_errors import LAYERS, LIMITS, Result, cases_on, draw, errors_on_rank, exact, table
from tasp_lab.schedules.registry import attention_names_on
from tests.support.rank_layers import seen_by
from tests.support.ranks import on_ranks, succeeded


@pytest.mark.parametrize("name", LAYERS)
def test_the_reference_is_what_autograd_finds(name: str) -> None:
    layer = LAYERS[name]
    *inputs, dout = draw(layer)
    q, k, v = leaves = [x.double().requires_grad_() for x in inputs]
    every = [x.repeat_interleave(layer.heads // x.shape[2], 2) for x in (k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", q, every[0]) * layer.head_dim**-0.5
    scores = scores.masked_fill(~seen_by(layer), -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), every[1])
    expected = (out, scores.logsumexp(-1).transpose(1, 2), *torch.autograd.grad(out, leaves, dout.double()))
    for found, wanted in zip(exact(layer, *inputs, dout), expected, strict=True):
        torch.testing.assert_close(found, wanted.detach())


@pytest.mark.distributed
def test_cases_of_two_ranks() -> None:
    layers = ["window", "causal, bf16"]
    cases = cases_on(2, layers)
    assert {case.layer for case in cases} == set(layers)
    for case, *errors in zip(cases, *succeeded(on_ranks(errors_on_rank, 2, cases)), strict=True):
        for error in errors:
            assert isinstance(error, float), (case.name, error)
            assert 0 < error < LIMITS[LAYERS[case.layer].dtype]


def test_what_raises_or_is_wrong_fails() -> None:
    small, wrong = Result(4, "full", "tasp", 1e-7), Result(4, "full", "tasp", float("nan"))
    raised = Result(4, "full", "usp:2x2", "RunError: lost")
    assert [each.failed for each in (small, wrong, raised)] == [False, True, True]
    assert "| tasp | 1 | 1e-07 |" in table([small])
    assert "| usp | 1 | failed |" in table([raised])


def test_the_committed_table_has_all_schedules_and_none_fails() -> None:
    page = (RESULTS / "layer_errors.md").read_text()
    names = {line.split(" | ")[0][2:] for line in page.splitlines()}
    assert {name.split(":")[0] for name in attention_names_on(8)} <= names
    assert "None fails." in page
    assert "failed" not in page
