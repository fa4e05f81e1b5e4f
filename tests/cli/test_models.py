"""``--model``: what a layer gets from it, and what contradicts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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


def test_compare_takes_one(tell: Tell) -> None:
    code, out, err = tell("compare", "full-mesh:2", *SHORT, "--model", "qwen3-8b", "--schedule", "tasp")
    assert code == 0, err
    assert out.startswith("Causal attention, forward, 2048 positions, 32 heads (8 KV)")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama-3-8b", ("--heads", "64"), "heads: 64 with the model 'llama-3-8b', which has 32"),
        ("llama-3-8b", ("--kv-heads", "32"), "which has 8"),
        ("llama-3-8b", ("--mask", "full"), "which has causal"),
        ("llama-3-8b", ("--window", "8"), "which has none"),
        ("llama-3-8b", ("--kind", "linear"), "which has softmax"),
        ("llama-3-8b", ("--kind", "hybrid"), "which has softmax"),
        ("llama-3-8b", ("--layers", "LS"), "which has softmax"),
        ("minimax-text-01", ("--layers", "LS"), "which has LLLLLLLS"),
        ("minimax-text-01", ("--decay", "none"), "which has head"),
        ("minimax-text-01", ("--linear-kv-heads", "8"), "which has 64"),
        ("lama-3-8b", (), "did you mean 'llama-3-8b'"),
        ("none.toml", (), "cannot be read"),
    ],
)
def test_contradictions_and_unknown_models_are_one_line(
    tell: Tell, model: str, options: tuple[str, ...], message: str
) -> None:
    code, out, err = tell("predict", "full-mesh:4", *SHORT, "--schedule", "tasp", "--model", model, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_model_file_without_heads(tell: Tell, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('summary="x"\nsource="x"\nlayers=1\nhidden_size=8\n[attention]\nhead_dim=8\n[mlp]\nwidth=8\n')
    code, out, err = tell("predict", "full-mesh:4", *SHORT, "--schedule", "tasp", "--model", str(path))
    assert (code, out) == (2, "")
    assert "missing required field `heads`" in err


def test_all_kinds_and_collectives_have_no_model(tell: Tell) -> None:
    code, _, err = tell("compare", "full-mesh:2", *SHORT, "--model", "llama-3-8b", "--kind", "all")
    assert code == 2
    assert "kind: all with the model" in err
    code, _, err = tell("predict", "full-mesh:2", "--schedule", "ring", "--shard-bytes", "1", "--model", "llama-3-8b")
    assert code == 2
    assert "apply with --seq only" in err
