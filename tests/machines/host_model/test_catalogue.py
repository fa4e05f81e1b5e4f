"""Runtimes by name, and what is refused."""

from __future__ import annotations

import math

import pytest

from tasp_lab import compare, predict
from tasp_lab.core.errors import ProfileError, QuantityError
from tasp_lab.machines.host_model.runtime import NO_RUNTIME, Runtime, load_runtime, runtime_names
from tasp_lab.workload.layer import Workload


@pytest.mark.parametrize("name", runtime_names())
def test_every_number_has_a_source(name: str) -> None:
    runtime = load_runtime(name)
    assert runtime.name == name
    assert runtime.is_instant == (runtime == NO_RUNTIME)
    assert {field for field, _ in runtime.sources} == (
        {"call_s", "backward_call_s", "batch_s"} if name != "none" else set()
    )
    assert all(source.startswith("assum") or "/" in source or "the same" in source for _, source in runtime.sources)


@pytest.mark.parametrize("name", [each for each in runtime_names() if each != "none"])
def test_hosts_take_between_a_microsecond_and_a_millisecond_per_call(name: str) -> None:
    """A launch from C takes some microseconds (NVIDIA's documents), and Python no milliseconds for a few of them."""
    runtime = load_runtime(name)
    for seconds in (runtime.call_s, runtime.backward_call_s, runtime.batch_s):
        assert 5e-6 <= seconds <= 1e-3


@pytest.mark.parametrize(("field", "value"), [("call_s", -1), ("batch_s", math.nan), ("backward_call_s", math.inf)])
def test_times_that_are_none_are_refused(field: str, value: float) -> None:
    with pytest.raises(QuantityError, match=f"runtime 'x': {field} is"):
        Runtime("x", **{field: value})  # type: ignore[arg-type]


def test_an_unknown_runtime_is_one_line_with_a_hint() -> None:
    with pytest.raises(ProfileError, match="unknown runtime 'yunchng', did you mean 'yunchang'"):
        predict("h100-8", "ring-attention", Workload(8192), runtime="yunchng")


def test_collectives_have_none() -> None:
    with pytest.raises(QuantityError, match="applies to attention layers only"):
        predict("h100-8", "ring", "1MiB", runtime="yunchang")


def test_predictions_name_their_runtime_and_its_sources() -> None:
    found = predict("h800-8", "zigzag-ring-attention", Workload(2048, heads=1, mask="causal"), runtime="yunchang")
    assert found.to_dict()["runtime"] == "yunchang"
    named = {each.name: each for each in found.provenance.constants if each.name.startswith("yunchang")}
    assert named["yunchang batch_s"].assumed
    assert found.provenance.inputs["machine"]["runtime"]["name"] == "yunchang"  # type: ignore[index]
    assert "runtime yunchang" in str(found)
    plain = predict("h800-8", "zigzag-ring-attention", Workload(2048, heads=1, mask="causal"))
    assert plain.to_dict()["runtime"] == "none"
    assert "runtime" not in plain.provenance.inputs["machine"]  # type: ignore[operator]


def test_compare_takes_one_too() -> None:
    layer = Workload(2048, heads=8, mask="causal")
    ranked = compare("h800-8", layer, ["ulysses", "zigzag-ring-attention"], runtime="yunchang")
    alone = compare("h800-8", layer, ["ulysses", "zigzag-ring-attention"])
    assert all(a.time_s > b.time_s for a, b in zip(ranked.candidates, alone.candidates, strict=True))
    assert ranked.to_dict()["runtime"] == "yunchang"
