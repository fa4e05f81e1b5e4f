"""The layouts that `plan` searches: all that divide ranks, model and batch; and bounds that no prediction is below."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tasp_lab.core.errors import WorkloadError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.planning.candidates import CHECKPOINTINGS, candidates, domain_of
from tasp_lab.planning.search import Search, Setting
from tasp_lab.prediction.training_step.layout import Layout
from tasp_lab.prediction.training_step.rates import step_rates
from tasp_lab.workload.models.model import MLP, Attention, Model
from tests.support.steps import small_model


@given(
    ranks=st.integers(1, 24),
    domain=st.sampled_from([1, 2, 4, 8]),
    heads=st.sampled_from([1, 2, 4, 6, 8]),
    layers=st.integers(1, 6),
    sequences=st.integers(1, 12),
)
def test_layouts_are_all_products_that_divide_the_model_and_the_batch(
    ranks: int, domain: int, heads: int, layers: int, sequences: int
) -> None:
    """Against every product of four factors, checked one rule after another."""
    model, sequence = small_model(layers, attention=Attention(heads, head_dim=8)), 96
    found = list(candidates(model, sequence, sequences * sequence, ranks, domain, checkpointings=["full"]))
    expected = set()
    for tp, cp, pp in product(range(1, ranks + 1), repeat=3):
        if ranks % (tp * cp * pp) or domain % tp or heads % tp or pp > layers or sequences % (ranks // (tp * cp * pp)):
            continue
        if sequence % (tp if cp == 1 else 2 * cp * tp) == 0:
            expected.add((tp, cp, pp, ranks // (tp * cp * pp)))
    assert {(each.layout.tp, each.layout.cp, each.layout.pp, each.layout.dp) for each in found} == expected
    assert len(set(found)) == len(found)
    for each in found:
        assert each.layout.on(ranks) == each.layout
        assert each.batch * each.layout.microbatches * (each.layout.dp or 0) == sequences


def test_all_kinds_of_checkpointing_and_states_are_among_them() -> None:
    found = list(candidates(small_model(4), 64, 512, 4, 4))
    assert {each.layout.checkpointing for each in found} == set(CHECKPOINTINGS)
    assert {each.layout.zero for each in found} == {0, 1, 3}
    assert {each.layout.interleave for each in found} == {1, 2}


@pytest.mark.parametrize("tokens", [0, 63, 65, -64])
def test_a_batch_of_broken_sequences_is_refused(tokens: int) -> None:
    with pytest.raises(WorkloadError, match=f"batch tokens: {tokens}, expected a multiple of the sequence of 64"):
        list(candidates(small_model(), 64, tokens, 2, 2))


LAYOUTS = [
    Layout(2, 2, 1, 2, 3, 1, 2, "full"),
    Layout(2, 1, 2, 2, 1, 2, 2, "none"),
    Layout(1, 4, 2, 1, 3, 1, 4, "selective"),
    Layout(4, 1, 1, 2, 1, 1, 1, "none"),
    Layout(1, 1, 4, 2, 1, 1, 3, "full"),
    Layout(1, 8, 1, 1, 1, 1, 1, "none"),
]


MODEL = small_model(5, hidden_size=256, attention=Attention(heads=8, head_dim=64, kv_heads=4), mlp=MLP(width=512))


WINDOWED = structs.replace(MODEL, layers="2xWS,W", attention=structs.replace(MODEL.attention, window=256))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("name", "model"), [("h100-8", MODEL), ("h100-2x4", MODEL), ("mi300x-8", MODEL), ("h100-8", WINDOWED)]
)
def test_no_prediction_is_below_its_bounds(layout: Layout, name: str, model: Model) -> None:
    """Neither the time, nor the memory."""
    machine = load_machine(name)
    search = Search(Setting(machine, step_rates(machine)))
    sequences = (layout.dp or 0) * layout.microbatches
    plans = candidates(model, 4096, 4096 * sequences, 8, domain_of(machine.topology))
    (candidate,), _ = search.candidates(
        each for each in plans if (each.layout, each.batch) == (replace(layout, overlap=True), 1)
    )
    (step,) = search.run([candidate.plan]).steps
    assert 0 < candidate.least_s <= candidate.expected_s
    assert candidate.least_s <= step.time_s
    assert candidate.memory.total <= step.memory.total
