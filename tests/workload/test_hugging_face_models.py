"""Models of a ``config.json``: as many parameters as transformers builds from it, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tasp_lab import load_model
from tasp_lab.core.errors import ModelError
from tasp_lab.prediction.training_step.layout import Layout, StepPlan
from tasp_lab.workload.models.model import Model
from tasp_lab.workload.models.parameters import active_parameters, parameter_count
from tests.support.configs import PUBLISHED

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
        (
            {"model_type": "qwen3_mo"},
            "model_type 'qwen3_mo', did you mean 'qwen3_moe'. expected one of llama, mistral,",
        ),
        ({"model_type": "gemma3"}, "no text_config, expected the sizes"),
        ({"model_type": "llama4", "text_config": {"model_type": "llama"}}, "missing required field `hidden_size`"),
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


def published(folder: Path, name: str, **changes: Any) -> Model:
    """A published model, with changes of the sizes of its part for text."""
    config = PUBLISHED[name].config
    if "text_config" in config:
        return load_model(written(folder, config | {"text_config": config["text_config"] | changes}))
    return load_model(written(folder, config | changes))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_makers_state(tmp_path: Path, name: str) -> None:
    """To 0.4 %, Llama 4 without its part for images of 0.9 billion; active ones with the embedding or without."""
    model, (_, billions, active) = published(tmp_path, name), PUBLISHED[name]
    images = 0.9 if name == "llama-4-scout" else 0
    assert parameter_count(model) / 1e9 + images == pytest.approx(billions, rel=4e-3)
    embedding = model.vocabulary * model.hidden_size
    if active is not None:
        assert round(active_parameters(model) / 1e9, 1) - 0.1 <= active
        assert active <= round((active_parameters(model) + embedding) / 1e9, 1) + 0.1


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v3", "gemma-3-1b"])
def test_a_published_model_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    """Up to sinks, biases of experts and outputs, and two more norms of a layer."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = {key: value for key, value in PUBLISHED[name].config.items() if key != "quantization_config"}
    layers = {"num_hidden_layers": 6} | ({"layer_types": config["layer_types"][:6]} if "layer_types" in config else {})
    found = published(tmp_path, name, **layers)
    model_type = config.pop("model_type")
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(model_type, **config | layers)
        )
    assert parameter_count(found) == pytest.approx(sum(each.numel() for each in theirs.parameters()), rel=1e-3)


def test_latent_attention_is_a_layer_of_the_widths_of_its_expanded_heads(tmp_path: Path) -> None:
    """qk_nope_head_dim + qk_rope_head_dim elements of keys, v_head_dim of values, as many KV heads as heads."""
    layer = published(tmp_path, "deepseek-v3", qk_rope_head_dim=32, v_head_dim=96).layer(1024)
    assert (layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim) == (128, 128, 128 + 32, 96)
    assert published(tmp_path, "deepseek-v3", qk_rope_head_dim=32, v_head_dim=160).layer(1024).value_dim is None


def test_windows_follow_layers(tmp_path: Path) -> None:
    """A query at position p has min(p + 1, w) keys in the window: n w - w (w - 1) / 2 pairs in all."""
    n, patterns = 65536, {}
    for name, window in (("gemma-3-27b", 1024), ("gpt-oss-20b", 128), ("llama-4-scout", 4096)):
        plan = StepPlan(model := published(tmp_path, name), n, "ulysses", Layout().on(8))
        patterns[name] = model.pattern
        full, windowed = plan.layer_of("S"), plan.layer_of("W")
        assert (full.window, windowed.window) == (None, window) == (plan.layer.window, plan.windowed_layer.window)
    assert patterns["gemma-3-27b"] == "WWWWWS" * 10 + "WW"
    assert patterns["gpt-oss-20b"] == "WS" * 12
    assert patterns["llama-4-scout"] == "WWWS" * 12
    # chunks of 8192 have 8192 x 8193 / 2 pairs each: the window has as many to 4 %
    assert n * 4096 - 4096 * 4095 / 2 == pytest.approx(n / 8192 * 8192 * 8193 / 2, rel=0.04)


def test_layers_may_be_named(tmp_path: Path) -> None:
    text = {"no_rope_layers": [1, 0] * 24, "moe_layers": [*range(1, 48, 2)]}
    model = published(tmp_path, "llama-4-maverick", **text)
    assert model.pattern == "WS" * 24
    assert model.expert_layers == (False, True) * 24
    assert published(tmp_path, "gemma-3-1b", sliding_window_pattern=2).pattern == "WS" * 13
    same = published(tmp_path, "gemma-3-1b", layer_types=["sliding_attention"] * 26)
    assert (same.pattern, same.attention.window) == ("S" * 26, 512)
    none = published(tmp_path, "gemma-3-1b", layer_types=["full_attention"] * 26)
    assert (none.pattern, none.attention.window) == ("S" * 26, None)
    dense = published(tmp_path, "qwen3-30b-a3b", mlp_only_layers=[0], decoder_sparse_step=2)
    assert dense.expert_layers == (False, True) * 24


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer types: those of 1 layers, expected 24"),
        ("gemma-3-27b", {"layer_types": ["ful_attention"] * 62}, "'ful_attention', did you mean 'full_attention'"),
        ("gemma-3-27b", {"sliding_window": None}, "52 layers with a window, expected sliding_window or attention"),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention: true, expected false"),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "awq"}}, "quantized by awq"),
        ("mixtral-8x7b", {"quantization_config": {"quant_method": "fp8"}}, "quantized by fp8"),
        ("mixtral-8x7b", {"num_local_experts": None}, "num_local_experts"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "9 active experts of 8"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [4]}, r"mlp_only_layers: \[4\], expected the first layers"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 49}, "experts in every 49 of 48 layers"),
        ("qwen3-30b-a3b", {"use_sliding_window": True}, "use_sliding_window: true, expected false"),
        ("deepseek-v3", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("llama-4-scout", {"moe_layers": [0, 2]}, r"moe_layers: \[0, 2\], expected .* interleave_moe_layer_step 1"),
        ("llama-4-scout", {"no_rope_layers": [1]}, "layer types: those of 1 layers, expected 48"),
        ("llama-4-scout", {"num_hidden_layers": 2000}, "num_hidden_layers"),
    ],
    ids=str,
)
def test_what_contradicts_or_is_not_modelled_is_one_line(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        published(tmp_path, name, **change)
    assert "\n" not in str(caught.value)
