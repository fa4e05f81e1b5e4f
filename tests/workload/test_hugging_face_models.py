"""Models of a ``config.json``: as many parameters as transformers builds from it, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tasp_lab import load_model
from tasp_lab.core.errors import ModelError
from tasp_lab.workload.models.parameters import parameter_count

SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 32, "vocab_size": 1000,
    "rope_theta": 5e5, "a_field_of_tomorrow": {"nested": [1]},
}  # fmt: skip


def written(folder: Path, config: object) -> str:
    """The path of a file with this configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    "more",
    [
        {"quantization_config": None},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"head_dim": 24, "num_key_value_heads": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_model_is_that_of_transformers(tmp_path: Path, architecture: str, more: dict[str, Any]) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    if architecture == "qwen2":
        more = {name: value for name, value in more.items() if name != "head_dim"}  # it has no such field
    found = load_model(written(tmp_path, {"model_type": architecture} | SIZES | more))
    config = transformers.AutoConfig.for_model(architecture, **SIZES | more)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert parameter_count(found) == sum(each.numel() for each in theirs.parameters())
    window = config.sliding_window if architecture == "mistral" else None
    assert (found.attention.window, found.attention.kv_head_count) == (window, config.num_key_value_heads)
    assert found.name == tmp_path.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral', expected one of llama, mistral, qwen2, qwen3"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            "weights quantized by awq, expected those of 16 or",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": 128}},
            "by gptq.*of the original model",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "by fp8.*for attention alone --heads, --kv-heads"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantized by bitsandbytes"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantized by compressed-tensors"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "quantized by compressed-tensors"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "weights quantized, expected"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": None}, "no model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "512"}, "Expected `int`, got `str`.*hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 33}, "hidden_size 512 of 33 heads"),
        ({"num_key_value_heads": 5}, "32 heads are not a multiple of 5 KV heads"),
        ({"use_sliding_window": True}, "use_sliding_window: true, expected false"),
    ],
    ids=str,
)
def test_a_wrong_configuration_is_one_line_that_names_it(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = written(tmp_path, {"model_type": "llama"} | SIZES | change)
    with pytest.raises(ModelError, match=f"^file '{re.escape(path)}'.*{message}") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", list(SIZES)[:5])
def test_a_size_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    config = {"model_type": "llama"} | SIZES
    del config[name]
    with pytest.raises(ModelError, match=f"missing required field `{name}`"):
        load_model(written(tmp_path, config))


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "null"])
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(str(path))
