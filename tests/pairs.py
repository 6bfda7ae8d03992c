"""Tiny targets and drafters for tests, among them drafters that are right exactly where told.

A random drafter is rejected almost always and so tests nothing but rejection. A `ScriptedDrafter`
knows the target's continuation and plays it back, with mistakes where the script says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_outputs import BaseModelOutput

from hf_dflash import DFlashConfig, DFlashDraftModel


def tiny_target(seed: int = 0, **overrides: Any) -> Any:
    """A random Qwen3 of 4 layers and 96 tokens whose greedy output is not constant."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,  # wide, so that outputs vary from token to token
            "eos_token_id": None,
            "pad_token_id": 0,
            **overrides,
        }
    )
    return Qwen3ForCausalLM(config).eval()


def drafter_config(target: Any, block_size: int = 8, **overrides: Any) -> DFlashConfig:
    """A 2-layer drafter's config for any target; the last token of the vocabulary is its mask."""
    text = target.config.get_text_config(decoder=True)
    width = target.get_input_embeddings().weight.shape[1]
    n_layers = text.num_hidden_layers
    return DFlashConfig(
        **{
            "vocab_size": text.vocab_size,
            "hidden_size": width,
            "target_hidden_size": text.hidden_size,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "block_size": block_size,
            "mask_token_id": text.vocab_size - 1,
            "target_layer_ids": sorted({0, n_layers - 2}),
            "num_target_layers": n_layers,
            **overrides,
        }
    )


def random_drafter(target: Any, block_size: int = 8, seed: int = 1, **overrides: Any) -> Any:
    """A drafter with random weights."""
    torch.manual_seed(seed)
    return DFlashDraftModel(drafter_config(target, block_size, **overrides)).eval()


class ScriptedDrafter(DFlashDraftModel):
    """Proposes the tokens of a script, found by the anchor's position.

    Args:
        target: The target whose head will turn hidden states into logits.
        script: Token for every position; position p is proposed by the slot of position p.
        n_right: Given the cycle (0, 1, ...), how many drafts are right; the next one is wrong.
            `None`: all are right.
        block_size: B.
        **overrides: Other fields of the drafter's config.
    """

    def __init__(
        self,
        target: Any,
        script: Sequence[int],
        n_right: Callable[[int], int] | None = None,
        block_size: int = 8,
        **overrides: Any,
    ) -> None:
        super().__init__(drafter_config(target, block_size, **overrides))
        self.script = list(script)
        self.n_right = n_right
        self.n_calls = 0
        self.eval()
        head = target.get_output_embeddings().weight.detach().float()
        # h = pinv(W) e_t has logits as close to one-hot at t as the head allows.
        self._rows = (torch.linalg.pinv(head) * 50).T  # (V, H)

    def forward(self, noise_embeds: Tensor, position_ids: Tensor, **kwargs: Any) -> BaseModelOutput:
        super().forward(noise_embeds, position_ids=position_ids, **kwargs)  # keeps its cache true
        n_block = noise_embeds.shape[1]
        vocab = self._rows.shape[0]
        right = n_block if self.n_right is None else self.n_right(self.n_calls)
        self.n_calls += 1
        tokens = []
        for slot, position in enumerate(position_ids[0, -n_block:].tolist()):
            token = self.script[position] if position < len(self.script) else 0
            tokens.append((token + 1) % vocab if slot == right + 1 else token)
        rows = self._rows[torch.tensor(tokens)].to(noise_embeds)
        return BaseModelOutput(last_hidden_state=rows[None])


def scripted(
    target: Any,
    input_ids: Tensor,
    n_new: int,
    n_right: Callable[[int], int] | None = None,
    **kwargs: Any,
) -> tuple[ScriptedDrafter, Tensor]:
    """A scripted drafter for one prompt, and the plain greedy output (1, n + n_new) it knows."""
    plain = target.generate(input_ids, max_new_tokens=n_new, do_sample=False)
    return ScriptedDrafter(target, plain[0].tolist(), n_right, **kwargs), plain
