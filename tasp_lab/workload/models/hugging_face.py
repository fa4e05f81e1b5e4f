"""Models of a ``config.json`` of Hugging Face's transformers: `model_of_config`.

Each architecture is a class with the fields of its configuration that are sizes. Names, and the values of missing
fields, are those of transformers (``src/transformers/models/*/configuration_*.py``); other fields are ignored.

Not counted, as they cost next to nothing: sinks, softcaps, norms of heads beyond their parameters, biases of output
projections and experts. Parts for images are ignored, as are layers that predict several tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tasp_lab.core.errors import ModelError, expected_one_of, unknown
from tasp_lab.core.records import Count, converted
from tasp_lab.workload.layer import MAX_LAYERS
from tasp_lab.workload.models.model import MLP, Attention, Experts, Latent, Model


class _Dense(msgspec.Struct, frozen=True, kw_only=True):
    """A dense architecture, whose layers are alike; others differ from it."""

    biases: ClassVar[bool] = False
    head_norms: ClassVar[bool] = False

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    num_attention_heads: Count
    vocab_size: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    sliding_window: Count | None = None
    use_sliding_window: bool = False
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    @property
    def mlp_width(self) -> int:
        return self.intermediate_size

    def attention(self) -> Attention:
        heads = self.num_attention_heads
        if self.use_sliding_window:
            raise ModelError("use_sliding_window: true, expected false: windows in some layers of Qwen are not read")
        if self.head_dim is None and self.hidden_size % heads:
            raise ModelError(f"hidden_size {self.hidden_size} of {heads} heads, expected a multiple, or head_dim")
        return Attention(
            heads,
            self.head_dim or self.hidden_size // heads,
            self.num_key_value_heads,
            biases=self.attention_bias or self.biases,
            head_norms=self.head_norms,
        )

    def windows(self) -> tuple[int | str, int | None]:
        """The layers of a `Model`, and its window."""
        return self.num_hidden_layers, None

    def experts(self) -> Experts | None:
        return None


class _Mistral(_Dense, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 8
    sliding_window: Count | None = 4096

    def windows(self) -> tuple[int | str, int | None]:
        return self.num_hidden_layers, self.sliding_window


class _Qwen2(_Dense, frozen=True, kw_only=True):
    biases: ClassVar[bool] = True
    num_key_value_heads: Count | None = 32


class _Qwen3(_Dense, frozen=True, kw_only=True):
    head_norms: ClassVar[bool] = True
    num_key_value_heads: Count | None = 32
    head_dim: Count | None = 128


class _Qwen3Moe(_Dense, frozen=True, kw_only=True):
    head_norms: ClassVar[bool] = True
    num_key_value_heads: Count | None = 4
    num_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None

    def experts(self) -> Experts:
        dense = sorted(self.mlp_only_layers or [])
        if dense != list(range(len(dense))):
            raise ModelError(f"mlp_only_layers: {dense}, expected the first layers, such as [0, 1], or none")
        return Experts(
            self.num_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            dense_layers=len(dense),
            every=self.decoder_sparse_step,
        )


class _Mixtral(_Mistral, frozen=True, kw_only=True):
    sliding_window: Count | None = None
    num_local_experts: Count
    num_experts_per_tok: Count

    def experts(self) -> Experts:
        return Experts(self.num_local_experts, self.num_experts_per_tok, self.intermediate_size)


class _DeepseekV3(_Dense, frozen=True, kw_only=True):
    q_lora_rank: Count
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    n_routed_experts: Count
    n_shared_experts: Annotated[int, msgspec.Meta(ge=0)]
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    first_k_dense_replace: Annotated[int, msgspec.Meta(ge=0)]
    moe_layer_freq: Literal[1] = 1

    def attention(self) -> Attention:
        return Attention(
            self.num_attention_heads,
            self.qk_nope_head_dim + self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            latent=Latent(self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim),
        )

    def experts(self) -> Experts:
        return Experts(
            self.n_routed_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            self.n_shared_experts,
            self.first_k_dense_replace,
            router_biases=True,
        )


class _GptOss(_Dense, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 64
    sliding_window: Count | None = 128
    layer_types: list[str] | None = None
    attention_bias: bool = True
    num_local_experts: Count
    num_experts_per_tok: Count

    def windows(self) -> tuple[int | str, int | None]:
        return _mixed(self, self.layer_types, 2, self.sliding_window)

    def experts(self) -> Experts:
        return Experts(self.num_local_experts, self.num_experts_per_tok, self.intermediate_size, router_biases=True)


class _Gemma3(_Dense, frozen=True, kw_only=True):
    """Published files leave out what is as in transformers, also numbers of heads."""

    head_norms: ClassVar[bool] = True
    vocab_size: Count = 262208
    num_attention_heads: Count = 8
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    sliding_window: Count | None = 4096
    sliding_window_pattern: Count = 6
    layer_types: list[str] | None = None
    tie_word_embeddings: bool = True
    use_bidirectional_attention: bool | None = False

    def windows(self) -> tuple[int | str, int | None]:
        if self.use_bidirectional_attention:
            raise ModelError("use_bidirectional_attention: true, expected false: windows are causal here")
        return _mixed(self, self.layer_types, self.sliding_window_pattern, self.sliding_window)


class _Llama4(_Dense, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    attention_chunk_size: Count | None = 8192
    layer_types: list[str] | None = None
    no_rope_layers: list[Literal[0, 1]] | None = None
    no_rope_layer_interval: Count = 4
    intermediate_size_mlp: Count
    num_local_experts: Count
    num_experts_per_tok: Count
    interleave_moe_layer_step: Count = 1
    moe_layers: list[int] | None = None

    @property
    def mlp_width(self) -> int:
        return self.intermediate_size_mlp

    def windows(self) -> tuple[int | str, int | None]:
        chunk = self.attention_chunk_size
        # A query sees the keys of its chunk before it, half a chunk on average: a window of so many keys has as many
        # pairs of queries and keys over many chunks. Documents would be exact, but ranks would hold other positions
        # than in layers without chunks.
        window = None if chunk is None else (chunk + 1) // 2
        by_rotary = ["chunked_attention" if each else "full_attention" for each in self.no_rope_layers or []]
        return _mixed(self, self.layer_types or by_rotary, self.no_rope_layer_interval, window)

    def experts(self) -> Experts:
        step, count = self.interleave_moe_layer_step, self.num_hidden_layers
        expected = list(range(step - 1, count, step))
        if self.moe_layers is not None and self.moe_layers != expected:
            raise ModelError(f"moe_layers: {self.moe_layers}, expected {expected} by interleave_moe_layer_step {step}")
        return Experts(self.num_local_experts, self.num_experts_per_tok, self.intermediate_size, shared=1, every=step)


_LETTERS = {"full_attention": "S", "sliding_attention": "W", "chunked_attention": "W"}


def _mixed(
    sizes: _Dense, layer_types: list[str] | None, full_every: int, window: int | None
) -> tuple[int | str, int | None]:
    """The layers of a `Model` and its window, by the type of each layer; by default every so many have no window."""
    count = sizes.num_hidden_layers
    layer_types = layer_types or [
        "sliding_attention" if number % full_every else "full_attention" for number in range(1, count + 1)
    ]
    if len(layer_types) != count:
        raise ModelError(f"layer types: those of {len(layer_types)} layers, expected {count}, num_hidden_layers")
    for each in layer_types:
        if each not in _LETTERS:
            raise ModelError(unknown("layer type", each, _LETTERS))
    letters = "".join(_LETTERS[each] for each in layer_types)
    if "W" not in letters:
        return count, None
    if window is None:
        raise ModelError(f"{letters.count('W')} layers with a window, expected sliding_window or attention_chunk_size")
    return letters if "S" in letters else count, window


_ARCHITECTURES: dict[str, type[_Dense]] = {
    "llama": _Dense,
    "mistral": _Mistral,
    "qwen2": _Qwen2,
    "qwen3": _Qwen3,
    "qwen3_moe": _Qwen3Moe,
    "mixtral": _Mixtral,
    "gpt_oss": _GptOss,
    "deepseek_v3": _DeepseekV3,
    "gemma3_text": _Gemma3,
    "llama4_text": _Llama4,
}
"""The values of ``model_type`` that are read."""

_WITH_TEXT = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
"""Architectures for images and text, and that of their ``text_config``."""

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
    sizes = converted(config, _ARCHITECTURES[architecture])
    experts, (layers, window) = sizes.experts(), sizes.windows()
    all_have_experts = experts is not None and experts.dense_layers == 0 and experts.every == 1
    return Model(
        f"{architecture} of {name}",
        "config.json",
        layers,
        sizes.hidden_size,
        msgspec.structs.replace(sizes.attention(), window=window),
        sizes.vocab_size,
        None if all_have_experts else MLP(sizes.mlp_width),
        experts,
        tied_embeddings=sizes.tie_word_embeddings,
        name=name,
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
