"""Models from a ``config.json`` of Hugging Face's transformers, of dense architectures with softmax attention::

    model_of_config(json.loads(path.read_bytes()), "my-llama").attention.heads

Fields that are no sizes are ignored. Names, and the values of missing fields, are those of the configuration classes
of transformers (``src/transformers/models/*/configuration_*.py``).
"""

from __future__ import annotations

from typing import Any

import msgspec

from tasp_lab.core.errors import ModelError
from tasp_lab.core.records import Count, converted
from tasp_lab.workload.models.model import MLP, Attention, Model

DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""The values of ``model_type`` that are read (gated MLPs, one kind of layer), and what their missing fields mean."""


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
    if not isinstance(architecture, str) or architecture not in DEFAULTS:
        what = "no model_type" if architecture is None else f"model_type {architecture!r}"
        raise ModelError(f"{what}, expected one of {', '.join(DEFAULTS)}; others as a .toml file (docs/whole_steps.md)")
    sizes = converted(DEFAULTS[architecture] | config, _Config)
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
