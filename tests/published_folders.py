"""Drafters' folders as other projects publish them, written by hand from their description.

Not by this package's own writers: what they write must be read as what these mean.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pairs import random_drafter, tiny_target

SLIDING, FULL = "sliding_attention", "full_attention"
GEOMETRY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
}
VOCAB = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
THETA = {"rope_theta": 1e6, "rope_scaling": None}
PARAMETERS = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
FULL_LAYERS = {
    "layer_types": [FULL, FULL],
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
}
NESTED = {"mask_token_id": 95, "target_layer_ids": [0, 2]}


def body(architecture: str = "dflash", dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The tensors of a tiny drafter, all random, under this package's names."""
    model = random_drafter(tiny_target(), architecture=architecture)
    generator = torch.Generator().manual_seed(3)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def zlab(folder: Path, **changes: Any) -> Path:
    """1.A, as transformers 4.57 wrote it."""
    config = {
        **GEOMETRY,
        **VOCAB,
        **THETA,
        **FULL_LAYERS,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "num_target_layers": 4,
        "dflash_config": NESTED,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
    }
    return write_folder(folder, config | changes, body())


def flat(folder: Path, **changes: Any) -> Path:
    """1.B: every key at the top level."""
    config = {
        **GEOMETRY,
        **VOCAB,
        **PARAMETERS,
        **FULL_LAYERS,
        **NESTED,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "num_target_layers": 4,
        "dtype": "bfloat16",
    }
    return write_folder(folder, config | changes, body())


def modelopt(folder: Path, **changes: Any) -> Path:
    """1.D with a window, which only `dflash_config` tells."""
    config = {
        **GEOMETRY,
        **VOCAB,
        **THETA,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "num_target_layers": 4,
        "layer_types": [FULL, FULL],
        "sliding_window": 16,
        "dflash_config": {**NESTED, "use_swa": True, "swa_window_size": 16, "causal": False},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return write_folder(folder, config | changes, body())


def angelslim(folder: Path, architecture: str = "dflash", **changes: Any) -> Path:
    """1.F, with what its training leaves behind."""
    config = {
        **GEOMETRY,
        **VOCAB,
        **PARAMETERS,
        **FULL_LAYERS,
        "architectures": [
            {"dflash": "QwenDFlashDraftModel"}.get(architecture, "QwenDFlareDraftModel")
        ],
        "model_type": "qwen3",
        "block_size": 8,
        "num_target_layers": 4,
        "dflash_config": NESTED,
        "num_anchors": 512,
        "loss_decay_gamma": 7.0,
        "attention_backend": "flex_attention",
        "dtype": "bfloat16",
    }
    return write_folder(folder, config | changes, body(architecture))


def native(folder: Path, **changes: Any) -> Path:
    """1.L, as transformers writes its own block drafter."""
    tensors = body()
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    geometry = {k: v for k, v in GEOMETRY.items() if k not in ("attention_bias", "use_cache")}
    config = {
        **geometry,
        **PARAMETERS,
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "block_size": 8,
        "mask_token_id": 95,
        "target_layer_ids": [0, 2],
        "layer_types": [SLIDING, SLIDING],
        "sliding_window": 16,
        "vocab_size": 96,
        "dtype": "bfloat16",
    }
    return write_folder(folder, config | changes, tensors)


def speculators(
    folder: Path, target: Any, target_name: str, token_ids: list[int] | None = None, **changes: Any
) -> Path:
    """1.C, with embeddings and head, and with a reduced vocabulary if tokens are given."""
    tensors = body()
    tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.bfloat16().clone()
    head = target.get_output_embeddings().weight.bfloat16()
    tensors["lm_head.weight"] = head.clone()
    n_draft_tokens = 96
    if token_ids is not None:
        n_draft_tokens = len(token_ids)
        tensors["lm_head.weight"] = head[token_ids].clone()
        tensors["d2t"] = torch.tensor([token - row for row, token in enumerate(token_ids)])
        tensors["t2d"] = torch.tensor([token in token_ids for token in range(96)])
    decoder = {**GEOMETRY, **VOCAB, **PARAMETERS, **FULL_LAYERS, "model_type": "qwen3"}
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "transformer_layer_config": decoder,
        "draft_vocab_size": n_draft_tokens,
        "block_size": 8,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 95,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 7,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    return write_folder(folder, config | changes, tensors)


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of a folder's config; a key is deleted with "DELETE"."""
    config = {**config_of(folder), **changes}
    kept = {key: value for key, value in config.items() if value != "DELETE"}
    (folder / "config.json").write_text(json.dumps(kept))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return tensors


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Let ``change`` alter the tensors of a folder in place."""
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def same_tensors(one: Path, other: Path) -> bool:
    """Names, dtypes, shapes and every bit."""
    a, b = tensors_of(one), tensors_of(other)
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(_bits(a[n]), _bits(b[n])) for n in a
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def fingerprint(folder: Path) -> dict[str, str]:
    """Of every file of a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
