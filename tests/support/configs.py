"""Configurations of Hugging Face of models that people have: their sizes, and the parameters that makers state."""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A configuration, and billions of parameters: all, and those that a token passes where that is stated."""

    config: dict[str, Any]
    billions: float
    active: float | None = None


def _config(model_type: str, layers: int, hidden: int, width: int, heads: int, kv_heads: int, vocab: int, **more: Any
            ) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    } | more


def _qwen3_moe(layers: int, hidden: int, heads: int, width: int) -> dict[str, Any]:
    return _config(
        "qwen3_moe", layers, hidden, 3 * hidden, heads, 4, 151936,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=width, decoder_sparse_step=1,
        mlp_only_layers=[], use_sliding_window=False, sliding_window=None,
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _config(
        "gpt_oss", layers, 2880, 2880, 64, 8, 201088,
        head_dim=64, num_local_experts=experts, num_experts_per_tok=4, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        quantization_config={"quant_method": "mxfp4"},
    )  # fmt: skip


def _llama4(experts: int, step: int) -> dict[str, Any]:
    text = _config(
        "llama4_text", 48, 5120, 8192, 40, 8, 202048,
        head_dim=128, intermediate_size_mlp=16384, num_local_experts=experts, num_experts_per_tok=1,
        interleave_moe_layer_step=step, attention_chunk_size=8192, no_rope_layers=[],
    )  # fmt: skip
    return {"model_type": "llama4", "text_config": text, "vision_config": {"hidden_size": 1408}}


def _gemma3(**text: Any) -> dict[str, Any]:
    return {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "sliding_window": 1024} | text}


PUBLISHED = {
    "mixtral-8x7b": Published(
        _config(
            "mixtral", 32, 4096, 14336, 32, 8, 32000,
            num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
        ), 46.7, 12.9,
    ),
    "qwen3-30b-a3b": Published(_qwen3_moe(48, 2048, 32, 768), 30.5, 3.3),
    "qwen3-235b-a22b": Published(_qwen3_moe(94, 4096, 64, 1536), 235, 22),
    "gpt-oss-20b": Published(_gpt_oss(24, 32), 20.9, 3.6),
    "gpt-oss-120b": Published(_gpt_oss(36, 128), 116.8, 5.1),
    "deepseek-v3": Published(
        _config(
            "deepseek_v3", 61, 7168, 18432, 128, 128, 129280,
            q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
            first_k_dense_replace=3, moe_layer_freq=1, num_nextn_predict_layers=1,
            quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        ), 671, 37,
    ),
    "gemma-3-27b": Published(
        _gemma3(
            num_hidden_layers=62, hidden_size=5376, intermediate_size=21504, num_attention_heads=32,
            num_key_value_heads=16, head_dim=128,
        ), 1.416 + 25.600,
    ),
    "gemma-3-12b": Published(
        _gemma3(
            num_hidden_layers=48, hidden_size=3840, intermediate_size=15360, num_attention_heads=16,
            num_key_value_heads=8,
        ), 1.012 + 10.759,
    ),
    "gemma-3-4b": Published(
        _gemma3(num_hidden_layers=34, hidden_size=2560, intermediate_size=10240), 0.675 + 3.209
    ),
    "gemma-3-1b": Published(
        _config(
            "gemma3_text", 26, 1152, 6912, 4, 1, 262144, head_dim=256, sliding_window=512, sliding_window_pattern=6,
        ), 0.302 + 0.698,
    ),
    "llama-4-scout": Published(_llama4(16, 1), 109, 17),
    "llama-4-maverick": Published(_llama4(128, 2), 400, 17),
}  # fmt: skip
"""Sizes of the ``config.json`` of each on Hugging Face. Parameters: model cards (Mixtral: arXiv:2401.04088; gpt-oss:
arXiv:2508.10925, table 1; DeepSeek-V3: arXiv:2412.19437; Gemma 3: arXiv:2503.19786, table 1, embedding and others
without the part for images; Llama 4 with it)."""
