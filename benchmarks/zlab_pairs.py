"""Make the tiny pairs that the comparison with z-lab's package is recorded for.

    python benchmarks/zlab_pairs.py tests/parity/data/zlab

writes random targets of three families and, for each kind of draft layer, a drafter that has
learned a few of its target's continuations by heart: a random one would be rejected in nearly
every cycle, and then equal counts would mean nothing. `zlab_oracle.py record` runs on the result.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_dflash import DFlashConfig, DFlashDraftModel
from hf_dflash.target import draft_logits, noise_embeddings

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
TARGETS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 12,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 20.0,
        },
    ),
}
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Windows smaller and larger than the block, and small against prompts of up to 24 tokens.
DRAFTERS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "full": {"layer_types": [FULL, FULL]},
        "sliding": {"layer_types": [SLIDING, SLIDING], "sliding_window": 5},
        "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 11},
        "sliding_both_ways": {
            "layer_types": [SLIDING, SLIDING],
            "sliding_window": 5,
            "is_causal": False,
        },
        "full_causal": {"layer_types": [FULL, FULL], "is_causal": True},
    },
    "qwen3": {
        "bias_yarn": {"attention_bias": True, "rope_parameters": YARN, "block_size": 6},
        "mixed_window_1": {"layer_types": [FULL, SLIDING], "sliding_window": 1},
    },
    "gemma3": {
        "scaled_capped": {
            "input_embedding_scale": 4.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 15.0,
        },
    },
}
N_LEARNED = 4  # sequences learned by heart
N_NEW = 64
LEARNING_STEPS = 400


def main(folder: Path) -> None:
    """Write targets, drafters and prompts under ``folder``."""
    prompts = _prompts()
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt_ids": ids}) for ids in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    for name, variants in DRAFTERS.items():
        target = _target(name)
        _save(target, folder / name / "target", target.config.to_diff_dict())
        for variant, fields in variants.items():
            drafter = _learned(target, prompts[:N_LEARNED], fields)
            _save(drafter, folder / name / variant, drafter.config.to_diff_dict())


def _prompts() -> list[list[int]]:
    """Some shorter than a block, some longer than every window."""
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 24, 7, 16, 5, 20)
    return [torch.randint(62, (n,), generator=generator).tolist() for n in lengths]


def _target(name: str) -> Any:
    model_class, config_class, fields = TARGETS[name]
    torch.manual_seed(0)
    config = config_class(
        **SIZES, num_hidden_layers=3, initializer_range=0.4, tie_word_embeddings=False, **fields
    )
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    return _rounded(model_class(config).eval())


def _learned(target: Any, prompts: list[list[int]], fields: dict[str, Any]) -> DFlashDraftModel:
    """A drafter trained on the target's own continuations until it is often, not always, right."""
    torch.manual_seed(1)
    config = DFlashConfig(
        **SIZES
        | {
            "num_hidden_layers": 2,
            "block_size": 8,
            "mask_token_id": 63,
            # Not the last layer: z-lab's package reads it after the final norm, hf-dflash, as
            # serving engines do, before it.
            "target_layer_ids": [0, 1],
            "num_target_layers": 3,
            "initializer_range": 0.1,
        }
        | fields
    )
    drafter = DFlashDraftModel(config)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    data = [_continued(target, ids, config.target_layer_ids) for ids in prompts]
    generator = torch.Generator().manual_seed(2)
    for _ in range(LEARNING_STEPS):
        loss = sum(_loss(target, drafter, *sequence, generator) for sequence in data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return _rounded(drafter.eval())


def _continued(target: Any, prompt: list[int], taps: list[int]) -> tuple[Tensor, Tensor, int]:
    ids = target.generate(torch.tensor([prompt]), max_new_tokens=N_NEW, do_sample=False)
    with torch.no_grad():
        hidden_states = target(ids, output_hidden_states=True).hidden_states
    return ids, torch.cat([hidden_states[i + 1] for i in taps], dim=-1), len(prompt)


def _loss(
    target: Any,
    drafter: DFlashDraftModel,
    ids: Tensor,
    taps: Tensor,
    n_prompt: int,
    generator: torch.Generator,
) -> Tensor:
    """Cross-entropy of one block at a random anchor, context strictly before it."""
    config = drafter.config
    last = ids.shape[1] - config.block_size
    anchor = int(torch.randint(n_prompt, last, (), generator=generator))
    block = ids[:, anchor : anchor + config.block_size].clone()
    labels = block[0, 1:].clone()
    block[:, 1:] = config.mask_token_id
    hidden = drafter(
        noise_embeds=noise_embeddings(target, block, config.input_embedding_scale).detach(),
        context_hidden_states=taps[:, :anchor],
        position_ids=torch.arange(anchor + config.block_size)[None],
    ).last_hidden_state
    return F.cross_entropy(draft_logits(target, hidden[:, 1:], config)[0], labels)


def _rounded(model: Any) -> Any:
    """To what a bfloat16 file can hold."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def _save(model: Any, folder: Path, config: dict[str, Any]) -> None:
    """The two files that every engine reads, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in config.items() if k not in ("auto_map", "transformers_version")}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    weights = {k: v.bfloat16().contiguous() for k, v in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
