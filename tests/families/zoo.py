"""A tiny random target of every family that differs in what decoding needs of it.

All have 4 decoder layers, 96 tokens and widths of 32, so that one test body serves them all.
Weights are drawn wide: outputs then vary from token to token instead of repeating one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCAB_SIZE = 96
N_LAYERS = 4
IMAGE_TOKEN_ID = 90
VISION_START_TOKEN_ID = 89
WINDOW = 8  # shorter than a block of 16 and than the longer prompts

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MIXED_LAYERS = ["sliding_attention", "full_attention"] * (N_LAYERS // 2)


def _build(name: str, config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = getattr(transformers, name)._from_config(config).eval()
    for parameter in model.parameters():
        # Biases, Gemma 3's image projector: what is zero would make a family like another.
        if not bool(parameter.any()):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def _causal_lm(name: str, seed: int = 0, **overrides: Any) -> Callable[[], Any]:
    def make() -> Any:
        config_class = getattr(transformers, f"{name}Config")
        return _build(f"{name}ForCausalLM", config_class(**{**_COMMON, **overrides}), seed)

    return make


def _gemma3_text(**overrides: Any) -> dict[str, Any]:
    return {
        **_COMMON,
        "sliding_window": WINDOW,
        "layer_types": _MIXED_LAYERS,
        "query_pre_attn_scalar": 8,
        **overrides,
    }


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=N_LAYERS,
        n_head=4,
        n_positions=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return _build("GPT2LMHeadModel", config)


def _opt(embedding_size: int) -> Callable[[], Any]:
    def make() -> Any:
        config = transformers.OPTConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=N_LAYERS,
            num_attention_heads=4,
            max_position_embeddings=256,
            word_embed_proj_dim=embedding_size,
            init_std=0.3,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        return _build("OPTForCausalLM", config, seed=1)

    return make


def _falcon() -> Any:
    config = transformers.FalconConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return _build("FalconForCausalLM", config)


def _gemma3_vlm() -> Any:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        # As many as the language model has: the decoder's layers must not be taken for these.
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
    }
    config = transformers.Gemma3Config(
        text_config=_gemma3_text(),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_id=IMAGE_TOKEN_ID,
        boi_token_id=VISION_START_TOKEN_ID,
        eoi_token_id=88,
        eos_token_id=None,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    return _build("Gemma3ForConditionalGeneration", config)


def _llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        projection_dim=32,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**_COMMON),
        image_token_id=IMAGE_TOKEN_ID,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    return _build("LlavaForConditionalGeneration", config)


def _qwen2_5_vl() -> Any:
    vision = {
        "depth": N_LAYERS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1, 3],
        "initializer_range": 0.3,
    }
    text = {**_COMMON, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    text["rope_parameters"]["rope_theta"] = 10000.0
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_TOKEN_ID,
        video_token_id=91,
        vision_start_token_id=VISION_START_TOKEN_ID,
        vision_end_token_id=88,
        tie_word_embeddings=False,
    )
    return _build("Qwen2_5_VLForConditionalGeneration", config)


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

#: Text-only targets by family.
TEXT_TARGETS: dict[str, Callable[[], Any]] = {
    "qwen3": _causal_lm("Qwen3"),
    "llama": _causal_lm("Llama"),
    "llama-tied": _causal_lm("Llama", tie_word_embeddings=True),
    "mistral": _causal_lm("Mistral", sliding_window=WINDOW),
    "gemma2": _causal_lm(
        "Gemma2",
        sliding_window=WINDOW,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=8,
    ),
    "gemma3": lambda: _build("Gemma3ForCausalLM", transformers.Gemma3TextConfig(**_gemma3_text())),
    "gpt_oss": _causal_lm(
        "GptOss",
        sliding_window=WINDOW,
        layer_types=_MIXED_LAYERS,
        attention_bias=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen3_moe": _causal_lm("Qwen3Moe", **_EXPERTS, norm_topk_prob=True),
    "mixtral": _causal_lm("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "granite": _causal_lm("Granite", embedding_multiplier=3.0, logits_scaling=4.0),
    "gpt2": _gpt2,
    "opt": _opt(32),
    "opt-narrow-embedding": _opt(24),
    "falcon": _falcon,
    "phi": _causal_lm("Phi", seed=3),
    # Short convolutions whose state transformers can roll back, so no hybrid in its sense.
    "lfm2": _causal_lm(
        "Lfm2",
        layer_types=["conv", "full_attention"] * (N_LAYERS // 2),
        block_auto_adjust_ff_dim=False,
    ),
}

#: Targets that read images.
VISION_TARGETS: dict[str, Callable[[], Any]] = {
    "gemma3_vlm": _gemma3_vlm,
    "llava": _llava,
    "qwen2_5_vl": _qwen2_5_vl,
}


def prompt(n_tokens: int, seed: int = 7) -> torch.Tensor:
    """Random ids (1, n_tokens), none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 80, (1, n_tokens), generator=generator)


def image_inputs(family: str, n_text: int = 6) -> dict[str, torch.Tensor]:
    """Inputs with an image between two pieces of text, as the family's processor makes them."""
    generator = torch.Generator().manual_seed(3)
    text = prompt(n_text)
    half = n_text // 2
    image = torch.full((1, 4), IMAGE_TOKEN_ID)
    start = torch.full((1, 1), VISION_START_TOKEN_ID)
    ids = torch.cat([text[:, :half], start, image, text[:, half:]], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    is_image = (ids == IMAGE_TOKEN_ID).long()
    if family == "gemma3_vlm":
        inputs["token_type_ids"] = is_image
        inputs["pixel_values"] = torch.randn(1, 3, 16, 16, generator=generator)
    elif family == "llava":
        inputs["pixel_values"] = torch.randn(1, 3, 8, 8, generator=generator)
    else:
        # 4 x 4 patches of 4 x 4 pixels and 2 frames, merged 2 x 2 to 4 tokens.
        inputs["pixel_values"] = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        inputs["mm_token_type_ids"] = is_image
    return inputs
