"""Decode layers executed against float64: by threads and in turns for drawn layers, and on processes over gloo."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.kernels.partials import Kernel, Partial
from runtime.trials.layers import AttentionTrial
from tasp_lab.core.errors import RunError
from tasp_lab.validation.validate import validate
from tasp_lab.workload.layer import Workload
from tests.schedules.attention.test_decode import NAMES, built, decode_layers
from tests.support.one_device import run_in_process

GROUPED = Workload(decode=True, cached_keys=101, batch=3, heads=24, kv_heads=12, head_dim=16, dtype="fp32")
SHARED = Workload(decode=True, cached_keys=50, batch=2, heads=24, kv_heads=2, head_dim=24, value_dim=16, dtype="bf16")
LATENT = Workload(decode=True, cached_keys=67, batch=2, heads=24, kv_heads=1, head_dim=36, value_dim=32, dtype="fp32",
                  values_in_keys=True)  # fmt: skip


@settings(max_examples=60)
@given(decode_layers(), st.sampled_from(NAMES), st.integers(0, 5), st.booleans())
def test_every_schedule_computes_exact_attention(
    drawn: tuple[int, Workload], name: str, receives_ahead: int, whole_steps: bool
) -> None:
    """On up to 8 ranks, whose actions come in a drawn order."""
    n, layer = drawn
    run_in_process(built(name, n, layer), receives_ahead, whole_steps)


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_is_left_out_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Kernel.attend

    def without_the_first(
        self: Kernel, q: Tensor, k: Tensor, v: Tensor, *, scale: float, low: int, high: int
    ) -> Partial:
        return attend(self, q, k[:, 1:], v[:, 1:], scale=scale, low=low, high=high)

    schedule = built(name, 3, GROUPED)
    monkeypatch.setattr(Kernel, "attend", without_the_first)
    monkeypatch.setattr(AttentionTrial, "_exact_row", lambda trial, _: exact_row(trial))
    with pytest.raises(RunError, match="differs from single-process attention"):
        run_in_process(schedule)


def exact_row(trial: AttentionTrial) -> tuple[Tensor, Tensor]:
    """The result of the query of a decode layer by the definition of attention, and its log-sum-exp."""
    q, k, v, _ = (each.double() for each in trial._whole)
    k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], 2) for each in (k, v))
    scores = torch.einsum("bhd,bjhd->bhj", q[:, -1], k) * trial._scale
    return torch.einsum("bhj,bjhd->bhd", scores.softmax(-1), v)[:, None], scores.logsumexp(-1)[:, None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "layer"), [(3, GROUPED), (4, SHARED), (8, LATENT)])
def test_results_are_those_of_the_definition(
    name: str, n: int, layer: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a reference of its own, for grouped heads, heads that ranks share, and one latent head."""
    monkeypatch.setattr(AttentionTrial, "_exact_row", lambda trial, _: exact_row(trial))
    run_in_process(built(name, n, layer))


@pytest.mark.distributed
@pytest.mark.parametrize(("n", "layer"), [(3, GROUPED), (4, SHARED), (8, LATENT)])
def test_processes_compute_exact_attention(n: int, layer: Workload) -> None:
    """Over gloo; every rank checks its results against float64."""
    found = validate(f"full-mesh:{n}", NAMES, layer, fabric="local", compute="real", repeats=1)
    assert [run.prediction.schedule for run in found.runs] == NAMES
