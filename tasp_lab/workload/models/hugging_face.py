"""Models of a ``config.json`` of Hugging Face's transformers: `model_of_config`.

A new architecture is an entry of `_ARCHITECTURES`: the fields of its configuration that are read. Names, and the values
of missing fields, are those of transformers (``src/transformers/models/*/configuration_*.py``).

Not counted, as they cost next to nothing: parameters of sinks, softcaps, norms of heads beyond their parameters, biases
of output projections and experts. Parts for images are ignored, as are layers that predict several tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from tasp_lab.core.errors import ModelError, expected_one_of, unknown
from tasp_lab.core.records import Count, converted
from tasp_lab.workload.layer import MAX_LAYERS
from tasp_lab.workload.models.model import MLP, Attention, Experts, Latent, Model

_NUMBER = Annotated[int, msgspec.Meta(ge=0)]

_TYPES: dict[str, Any] = {
    "num_hidden_layers": Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)],
    "num_key_value_heads": Count | None,
    "head_dim": Count | None,
    "sliding_window": Count | None,
    "attention_chunk_size": Count | None,
    "use_sliding_window": bool,
    "attention_bias": bool,
    "tie_word_embeddings": bool,
    "use_bidirectional_attention": bool | None,
    "layer_types": list[str] | None,
    "mlp_only_layers": list[int] | None,
    "moe_layers": list[int] | None,
    "no_rope_layers": list[Literal[0, 1]] | None,
    "n_shared_experts": _NUMBER,
    "first_k_dense_replace": _NUMBER,
    "moe_layer_freq": Literal[1],
}
"""The types of fields; all others are a `Count`."""

_COMMON: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"), ...
    ),
    "num_key_value_heads": None,
    "head_dim": None,
    "use_sliding_window": False,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
"""The fields of every architecture, with the value of one that is missing: ``...`` where it must not be."""

_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), ...),
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    "mixtral": {
        "num_key_value_heads": 8,
        "sliding_window": None,
        **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), ...),
    },
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": None,
        "attention_bias": True,
        **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), ...),
    },
    "deepseek_v3": {
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), ...),
        **dict.fromkeys(("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"), ...),
        "first_k_dense_replace": ...,
        "moe_layer_freq": 1,
    },
    "gemma3_text": {  # published files leave out what is as in transformers, also numbers of heads
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
    },
    "llama4_text": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        **dict.fromkeys(("intermediate_size_mlp", "num_local_experts", "num_experts_per_tok"), ...),
        "interleave_moe_layer_step": 1,
        "moe_layers": None,
    },
}
"""The further fields of each ``model_type`` that is read, or other values of missing ones."""

_BIASES, _HEAD_NORMS, _ROUTER_BIASES = {"qwen2"}, {"qwen3", "qwen3_moe", "gemma3_text"}, {"gpt_oss", "deepseek_v3"}
"""Architectures that always have these; no field is about them."""

_WITH_TEXT = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
"""Architectures for images and text, and that of their ``text_config``."""

_LETTERS = {"full_attention": "S", "sliding_attention": "W", "chunked_attention": "W"}

_QUANTIZED = ("quantization_config", "compression_config", "quantization")
"""Fields of quantized models: of Transformers (AWQ, GPTQ, FP8, bitsandbytes, compressed-tensors), an older one of
compressed-tensors, and of MLX. Memory and matrix rates of such weights are not modelled."""

_RELEASED = {"gpt_oss": "mxfp4", "deepseek_v3": "fp8"}
"""Architectures whose makers released quantized weights alone: there is no other ``config.json`` to ask for. A step
that trains has them in 16 bits, with master copies in 32."""


def model_of_config(config: Any, name: str) -> Model:
    """The model of a configuration.

    Raises `ModelError` for other architectures and for fields that contradict each other or are not modelled, and
    `ValueError` for missing fields and for values of a wrong type.

    >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    >>> found = model_of_config({"model_type": "qwen3", "num_attention_heads": 32, "other": 0} | sizes, "tiny")
    >>> found.attention.head_dim, found.attention.head_norms, found.vocabulary
    (128, True, 128)
    """
    architecture = config.get("model_type") if isinstance(config, dict) else None
    if isinstance(architecture, str) and architecture in _WITH_TEXT:
        _check_weights(architecture, config)
        architecture, config = _WITH_TEXT[architecture], config.get("text_config")
        if not isinstance(config, dict):
            raise ModelError("no text_config, expected the sizes of the part for text")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        known = [*_ARCHITECTURES, *_WITH_TEXT]
        what = "no model_type, expected one of " + ", ".join(known)
        if architecture is not None:
            what = f"model_type {architecture!r}, {expected_one_of(architecture, known)}"
        raise ModelError(f"{what}; others as a .toml file (docs/whole_steps.md)")
    _check_weights(architecture, config)
    sizes = msgspec.structs.asdict(converted(config, _record_of(architecture)))
    experts = _experts(architecture, sizes)
    layers, window = _layers(sizes)
    all_have_experts = experts is not None and experts.dense_layers == 0 and experts.every == 1
    return Model(
        f"{architecture} of {name}",
        "config.json",
        layers,
        sizes["hidden_size"],
        _attention(architecture, sizes, window),
        sizes["vocab_size"],
        None if all_have_experts else MLP(sizes.get("intermediate_size_mlp", sizes["intermediate_size"])),
        experts,
        tied_embeddings=sizes["tie_word_embeddings"],
        name=name,
    )


@cache
def _record_of(architecture: str) -> type[msgspec.Struct]:
    """A record with the fields of an architecture, which ignores all others."""
    fields = [
        (name, _TYPES.get(name, Count), msgspec.NODEFAULT if value is ... else value)
        for name, value in (_COMMON | _ARCHITECTURES[architecture]).items()
    ]
    return msgspec.defstruct(architecture, fields, kw_only=True)


def _attention(architecture: str, sizes: dict[str, Any], window: int | None) -> Attention:
    heads, hidden_size = sizes["num_attention_heads"], sizes["hidden_size"]
    if "kv_lora_rank" in sizes:
        return Attention(
            heads,
            sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"],
            value_dim=sizes["v_head_dim"],
            latent=Latent(sizes["q_lora_rank"], sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]),
        )
    if sizes["use_sliding_window"]:
        raise ModelError("use_sliding_window: true, expected false: windows in some layers of Qwen are not read")
    if sizes["head_dim"] is None and hidden_size % heads:
        raise ModelError(f"hidden_size {hidden_size} of {heads} heads, expected a multiple, or head_dim")
    return Attention(
        heads,
        sizes["head_dim"] or hidden_size // heads,
        sizes["num_key_value_heads"],
        window=window,
        biases=sizes["attention_bias"] or architecture in _BIASES,
        head_norms=architecture in _HEAD_NORMS,
        sinks=architecture == "gpt_oss",
    )


def _layers(sizes: dict[str, Any]) -> tuple[int | str, int | None]:
    """The layers of a `Model` and its window, by the type of each layer; by default every so many have no window."""
    count, window, types = sizes["num_hidden_layers"], sizes.get("sliding_window"), sizes.get("layer_types")
    if "layer_types" not in sizes:
        return count, window
    if sizes.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention: true, expected false: windows are causal here")
    if chunk := sizes.get("attention_chunk_size"):
        # A query sees the keys of its chunk before it, half a chunk on average: a window of so many keys has as many
        # pairs of queries and keys over many chunks. Documents would be exact, but ranks would hold other positions
        # than in layers without chunks.
        window = (chunk + 1) // 2
    if not types:
        full_every = sizes.get("sliding_window_pattern") or sizes.get("no_rope_layer_interval") or 2
        has_window = sizes.get("no_rope_layers") or [number % full_every for number in range(1, count + 1)]
        types = ["sliding_attention" if each else "full_attention" for each in has_window]
    if len(types) != count:
        raise ModelError(f"layer types: those of {len(types)} layers, expected {count}, num_hidden_layers")
    for each in types:
        if each not in _LETTERS:
            raise ModelError(unknown("layer type", each, _LETTERS))
    letters = "".join(_LETTERS[each] for each in types)
    if "W" not in letters:
        return count, None
    if window is None:
        raise ModelError(f"{letters.count('W')} layers with a window, expected sliding_window or attention_chunk_size")
    return letters if "S" in letters else count, window


def _experts(architecture: str, sizes: dict[str, Any]) -> Experts | None:
    count = next((sizes[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in sizes), 0)
    if not count:
        return None
    dense = sorted(sizes.get("mlp_only_layers") or range(sizes.get("first_k_dense_replace", 0)))
    if dense != list(range(len(dense))):
        raise ModelError(f"mlp_only_layers: {dense}, expected the first layers, such as [0, 1], or none")
    every = sizes.get("decoder_sparse_step") or sizes.get("interleave_moe_layer_step") or 1
    expected = list(range(every - 1, sizes["num_hidden_layers"], every))
    if (named := sizes.get("moe_layers")) not in (None, expected):
        raise ModelError(f"moe_layers: {named}, expected {expected} by interleave_moe_layer_step {every}")
    return Experts(
        count,
        sizes["num_experts_per_tok"],
        sizes.get("moe_intermediate_size", sizes["intermediate_size"]),
        sizes.get("n_shared_experts", int(architecture == "llama4_text")),
        len(dense),
        every,
        router_biases=architecture in _ROUTER_BIASES,
    )


def _check_weights(architecture: str, config: dict[str, Any]) -> None:
    """Raise `ModelError` for quantized weights, unless they are the only ones that were released."""
    quantized = next((config[key] for key in _QUANTIZED if config.get(key)), None)
    if quantized is None:
        return
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    if method is None or method != _RELEASED.get(architecture):
        raise ModelError(
            f"weights quantized{f' by {method}' if method else ''}, expected those of 16 or 32 bits: the config.json "
            "of the original model; for attention alone --heads, --kv-heads and --head-dim"
        )
