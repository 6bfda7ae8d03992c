"""Small drafters' configs, as keyword arguments and as files have them."""

from hf_dflash import DFlashConfig

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
TIES = {"mask_token_id": 95, "target_layer_ids": [0, 2], "num_target_layers": 4}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}


def config(**overrides):
    return DFlashConfig(**{**SIZES, **TIES, **overrides})


def zlab(**overrides):
    """The reference format as transformers 4.57 writes it."""
    nested = {"mask_token_id": 95, "target_layer_ids": [0, 2]}
    return {
        **SIZES,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 8,
        "num_target_layers": 4,
        "dflash_config": {**nested, **overrides.pop("dflash_config", {})},
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 2,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "use_cache": True,
        **overrides,
    }
