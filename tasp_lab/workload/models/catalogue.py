"""Models by name: the data files ``tasp_lab/workload/models/data/*.toml``, each with its sources, and files of users.

A file of a user is such a ``.toml``, or a ``config.json`` of Hugging Face's transformers, of a dense architecture with
softmax attention. Its fields that are no sizes are ignored. Names, and the values of missing fields, are those of the
configuration classes of transformers (``src/transformers/models/*/configuration_*.py``).
"""

from __future__ import annotations

import os
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from tasp_lab.core.errors import ModelError, expected_one_of, of_type
from tasp_lab.core.records import Count, converted, data_names
from tasp_lab.workload.models.model import MLP, Attention, Model

_SUFFIX, _CONFIG = ".toml", ".json"


def model_names() -> list[str]:
    """The models of tasp-lab, in alphabetical order.

    >>> "llama-3-8b" in model_names()
    True
    """
    return data_names("tasp_lab.workload.models", "data")


def load_model(text: str) -> Model:
    """The model of a name, of a ``.toml`` file in the form of those of tasp-lab, or of a ``config.json``.

    >>> load_model("llama-3-70b").attention.heads
    64

    Raises `ModelError` for an unknown name, and for a file that cannot be read or does not describe a model.
    """
    if not isinstance(text, str):
        raise ModelError(of_type("model", text, "the name of a model"))
    if text in model_names():
        return _built_in(text)
    if not (text.lower().endswith((_SUFFIX, _CONFIG)) or os.path.exists(text)):
        name = text.rpartition("/")[2]  # Hugging Face has the maker before it
        raise ModelError(f"unknown model {text!r}, {expected_one_of(name, model_names())}, or a .toml or .json file")
    path = Path(text)
    try:
        is_config = path.suffix.lower() == _CONFIG
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return _read(f"file {text!r}", name, path.read_bytes(), is_config=is_config)
    except (OSError, ValueError) as error:
        raise ModelError(f"file {text!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error


@cache
def _built_in(name: str) -> Model:
    data = (files("tasp_lab.workload.models") / "data" / f"{name}{_SUFFIX}").read_bytes()
    return _read(f"model {name!r}", name, data)


def _read(where: str, name: str, data: bytes, *, is_config: bool = False) -> Model:
    if not data.strip():
        raise ModelError(f"{where} is empty, expected a model")
    try:
        if is_config:
            return model_of_config(msgspec.json.decode(data), name)
        return msgspec.structs.replace(converted(msgspec.toml.decode(data), Model), name=name)
    except UnicodeDecodeError as error:
        raise ModelError(f"{where}: expected UTF-8 text, byte {error.start} is something else") from error
    except (ValueError, ModelError) as error:
        raise ModelError(" ".join(f"{where}: {error}".split())) from error


_CONFIG_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""The values of ``model_type`` that are read (gated MLPs, one kind of layer), and what their missing fields mean."""


_QUANTIZED = ("quantization_config", "compression_config", "quantization")
"""Fields of quantized models: of Transformers (AWQ, GPTQ, FP8, bitsandbytes, compressed-tensors), an older one of
compressed-tensors, and of MLX. Memory and matrix rates of such weights are not modelled."""


class _Config(msgspec.Struct, frozen=True):
    """The fields of a configuration that are sizes."""

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    vocab_size: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    sliding_window: Count | None = None
    use_sliding_window: bool = False
    attention_bias: bool = False
    tie_word_embeddings: bool = False


def model_of_config(config: Any, name: str) -> Model:
    """The model of a configuration.

    Raises `ModelError` for other architectures, and `ValueError` for missing fields and for values of a wrong type.

    >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    >>> found = model_of_config({"model_type": "qwen3", "num_attention_heads": 32, "other": 0} | sizes, "tiny")
    >>> found.attention.head_dim, found.attention.head_norms, found.vocabulary
    (128, True, 128)
    """
    architecture = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(architecture, str) or architecture not in _CONFIG_DEFAULTS:
        what = "no model_type" if architecture is None else f"model_type {architecture!r}"
        raise ModelError(
            f"{what}, expected one of {', '.join(_CONFIG_DEFAULTS)}; others as a .toml file (docs/whole_steps.md)"
        )
    if quantized := next((config[key] for key in _QUANTIZED if config.get(key)), None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise ModelError(
            f"weights quantized{f' by {method}' if method else ''}, expected those of 16 or 32 bits: the config.json "
            "of the original model; for attention alone --heads, --kv-heads and --head-dim"
        )
    sizes = converted(_CONFIG_DEFAULTS[architecture] | config, _Config)
    heads = sizes.num_attention_heads
    if sizes.use_sliding_window:
        raise ModelError("use_sliding_window: true, expected false: windows in some layers are not read")
    if sizes.head_dim is None and sizes.hidden_size % heads:
        raise ModelError(f"hidden_size {sizes.hidden_size} of {heads} heads, expected a multiple, or head_dim")
    attention = Attention(
        heads,
        sizes.head_dim or sizes.hidden_size // heads,
        sizes.num_key_value_heads,
        window=sizes.sliding_window if architecture == "mistral" else None,
        biases=sizes.attention_bias or architecture == "qwen2",
        head_norms=architecture == "qwen3",
    )
    return Model(
        f"{architecture} of {name}",
        "config.json",
        sizes.num_hidden_layers,
        sizes.hidden_size,
        attention,
        sizes.vocab_size,
        MLP(sizes.intermediate_size),
        tied_embeddings=sizes.tie_word_embeddings,
        name=name,
    )
