"""Tiny targets that keep a recurrent state, so that no draft can be taken back."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MambaConfig, MambaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM


def tiny_mamba(vocab_size: int = 96) -> Any:
    """Recurrent in every layer."""
    config = MambaConfig(vocab_size=vocab_size, hidden_size=32, num_hidden_layers=4)
    return MambaForCausalLM(config).eval()


def tiny_qwen3_next(vocab_size: int = 96) -> Any:
    """Recurrent in some layers."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3NextForCausalLM(config).eval()
