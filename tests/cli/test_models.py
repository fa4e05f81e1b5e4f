"""``--model``: what a layer gets from it, and what contradicts it."""

from __future__ import annotations

import json
from typing import Any

from tests.conftest import Tell

SHORT = ("--seq", "2048", "--samples", "0")


def row(tell: Tell, *arguments: str) -> dict[str, Any]:
    code, out, err = tell("predict", "full-mesh:4", *SHORT, *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)["predictions"][0]
    return found


def test_a_model_gives_the_layer(tell: Tell) -> None:
    with_model = row(tell, "--schedule", "tasp", "--model", "llama-3-70b")
    options = ("--heads", "64", "--kv-heads", "8", "--head-dim", "128", "--mask", "causal")
    assert with_model == row(tell, "--schedule", "tasp", *options)
    assert with_model == row(tell, "--schedule", "tasp", "--model", "llama-3-70b", *options)
    assert row(tell, "--schedule", "tasp", "--model", "mistral-7b")["window"] == 4096


def test_a_hybrid_gives_a_period_or_as_many_as_asked_for(tell: Tell) -> None:
    model = ("--schedule", "lasp-2+ulysses", "--model", "minimax-text-01")
    found = row(tell, *model)
    assert (found["layers"], found["kv_heads"], found["linear_kv_heads"]) == ("LLLLLLLS", 8, 64)
    assert row(tell, *model, "--layers", "2xLLLLLLLS")["layers"] == 2 * "LLLLLLLS"


def test_values_may_be_narrower_than_keys(tell: Tell) -> None:
    with_model = row(tell, "--schedule", "ulysses", "--model", "deepseek-v3")
    options = ("--heads", "128", "--head-dim", "192", "--value-dim", "128", "--mask", "causal")
    assert with_model == row(tell, "--schedule", "ulysses", *options)
    assert (with_model["head_dim"], with_model["value_dim"]) == (192, 128)
    model = ("--schedule", "tasp", "--model", "llama-3-8b")
    assert "value_dim" not in row(tell, *model)
    assert row(tell, *model, "--value-dim", "128") == row(tell, *model)


def test_sinks_and_windows_of_gpt_oss(tell: Tell) -> None:
    """A layer of both kinds; sinks change no number."""
    model, sizes = ("--schedule", "tasp", "--model", "gpt-oss-20b"), ("--heads", "64", "--kv-heads", "8")
    options = ("--schedule", "tasp", *sizes, "--head-dim", "64", "--mask", "causal")
    for window in ((), ("--window", "128")):
        found, plain = row(tell, *model, *window), row(tell, *options, *window)
        assert found.pop("sinks") is True
        assert "sinks" not in plain
        assert found == plain
        assert row(tell, *options, *window, "--sinks") == found | {"sinks": True}
    code, out, err = tell("predict", "full-mesh:4", *SHORT, *model, "--window", "128")
    assert code == 0, err
    assert "Causal attention in a window of 128 with sinks, forward, 2048 positions, 64 heads (8 KV) of 64" in out


def test_compare_takes_one(tell: Tell) -> None:
    code, out, err = tell("compare", "full-mesh:2", *SHORT, "--model", "qwen3-8b", "--schedule", "tasp")
    assert code == 0, err
    assert "\nCausal attention, forward, 2048 positions, 32 heads (8 KV)" in out
