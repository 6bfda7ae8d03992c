"""Small drafters of every kind of layer, with random weights and inputs, for comparing forwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_dflash import DFlashDraftModel
from pairs import drafter_config

HIDDEN, TARGET_HIDDEN, BLOCK = 16, 24, 6


class _Target:
    """As much of a target as a drafter's config asks for."""

    def __init__(self, hidden_size: int = TARGET_HIDDEN) -> None:
        self.config = self
        self.vocab_size, self.hidden_size, self.num_hidden_layers = 64, hidden_size, 6
        self.weight = torch.empty(64, HIDDEN)

    def get_text_config(self, **_: Any) -> _Target:
        return self

    def get_input_embeddings(self) -> _Target:
        return self


def make_drafter(attention: str = "eager", seed: int = 0, **overrides: Any) -> Any:
    """Three draft layers whose every weight, norms and biases included, is random."""
    is_dflare = overrides.get("architecture") == "dflare"
    config = drafter_config(
        _Target(HIDDEN if is_dflare else TARGET_HIDDEN),
        BLOCK,
        **{
            "num_hidden_layers": 3,
            "intermediate_size": 20,
            "target_layer_ids": [4, 0, 2],  # the order of the list is the order of the taps
            "attn_implementation": attention,
            **overrides,
        },
    )
    model = DFlashDraftModel(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        spread = 0.3 * torch.randn(parameter.shape, generator=generator)
        parameter.data = spread + (1.0 if parameter.ndim == 1 else 0.0)
    return model


def inputs_for(model: Any, n_context: int, n_block: int = BLOCK, seed: int = 1) -> tuple[Any, ...]:
    """Noise embeddings, raw taps and positions of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    width = len(model.config.target_layer_ids) * model.config.target_hidden_size
    noise = torch.randn(1, n_block, HIDDEN, generator=generator)
    taps = torch.randn(1, n_context, width, generator=generator)
    return noise, taps, torch.arange(n_context + n_block)[None]


def whole(model: Any, noise: Tensor, taps: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(noise, taps, positions, **kwargs).last_hidden_state


FULL, SLIDING = "full_attention", "sliding_attention"
VARIANTS = {
    "full": {},
    "bias": {"attention_bias": True},
    "sliding": {"layer_types": [SLIDING] * 3, "sliding_window": 4},
    "mixed": {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 5},
    "mixed-wide": {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 64},
    "window-of-the-block": {"layer_types": [SLIDING] * 3, "sliding_window": BLOCK},
    "window-of-one": {"layer_types": [SLIDING] * 3, "sliding_window": 1},
    "dflare": {"architecture": "dflare"},
    "dflare-mixed-bias": {
        "architecture": "dflare",
        "attention_bias": True,
        "layer_types": [FULL, SLIDING, SLIDING],
        "sliding_window": 4,
    },
}
