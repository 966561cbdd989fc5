"""Tiny random models of every family."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 320
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
LINEAR = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
SHARED = {"shared_expert_intermediate_size": 40}
MROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
NEXT_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
LLLF = ["linear_attention"] * 3 + ["full_attention"]
LFLF = ["linear_attention", "full_attention"] * 2


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-moe": {"model_type": "qwen3_moe", **MOE, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    "qwen3-next-moe": {
        "model_type": "qwen3_next",
        **MOE,
        **LINEAR,
        **SHARED,
        "rope_parameters": NEXT_ROPE,
        "layer_types": LLLF,
    },
    "qwen3.6": {
        "model_type": "qwen3_5_text",
        **LINEAR,
        "linear_num_value_heads": 6,
        "rope_parameters": MROPE,
        "layer_types": LLLF,
    },
    "qwen3.6-moe": {
        "model_type": "qwen3_5_moe_text",
        **MOE,
        **LINEAR,
        **SHARED,
        "rope_parameters": MROPE,
        "layer_types": LFLF,
    },
}


def spread_weights(model: Any) -> None:
    """Weights wide enough that logits are not flat (bugs hide in flat ones)."""
    config = model.config
    is_hybrid = hasattr(config, "linear_num_key_heads")
    embedding_width = 0.4 if config.tie_word_embeddings else 1.0  # as a head, 1 is too sharp
    with torch.no_grad():
        for name, weight in model.named_parameters():
            wide = torch.randn_like(weight)
            if name.endswith("A_log"):
                weight.copy_(torch.empty_like(weight).uniform_(0.05, 4).log())
            elif name.endswith("dt_bias"):
                weight.copy_(wide)
            elif "norm" in name:
                is_centered = is_hybrid and "linear_attn" not in name
                weight.copy_((0.0 if is_centered else 1.0) + 0.2 * wide)
            else:
                weight.copy_(embedding_width * wide if "embed" in name else 0.2 * wide)


def build_model(seed: int, model_type: str = "qwen3", **settings: Any) -> Any:
    """A tiny model of a family."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**COMMON, **settings})
    experts = {"experts_implementation": "eager"} if hasattr(config, "num_experts") else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **experts)
    spread_weights(model)
    return model
