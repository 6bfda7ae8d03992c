"""Start a DFlare drafter from a trained DFlash drafter of the same target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .warm_start import CHOSEN_TAP

_SIZES = (
    *("hidden_size", "target_hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "target_layer_ids", "attention_bias"),
)


@torch.no_grad()
def init_from_dflash(drafter: Any, source: Any, context_hidden_states: Tensor) -> dict[str, float]:
    """Copy what both architectures have, and fit DFlare's own projections to DFlash's context.

    DFlash projects all taps once and gives every layer the result; DFlare mixes them for each layer
    and projects the mix. Keys and values of the context are therefore fitted by least squares,
    for each layer on the mix of taps that fits best.

    Args:
        drafter: A new DFlare drafter.
        source: A trained DFlash drafter of the same sizes and taps.
        context_hidden_states: (1, S, T * Ht) raw taps of some text; S is to be several times Ht.

    Returns:
        For each layer ("layers.0", ...) the part of the variance of keys and values that is lost,
        0 to 1.

    Raises:
        ValueError: The two do not fit, or the text is too short to fit anything to.
    """
    _check(drafter, source, context_hidden_states)
    own = dict(drafter.named_parameters())
    for name, parameter in source.named_parameters():
        if name in own:
            own[name].copy_(parameter)
    drafter.hidden_norm.weight.fill_(1.0)  # the projections behind it are fitted
    wanted = source.fuse_context(context_hidden_states.to(source.fc.weight.dtype))[0]
    lost: dict[str, float] = {}
    for i, (layer, taught) in enumerate(zip(drafter.layers, source.layers, strict=True)):
        projections = [taught.self_attn.k_proj, taught.self_attn.v_proj]
        states = wanted[0] @ torch.cat([p.weight for p in projections]).T  # biases are kept apart
        lost[f"layers.{i}"] = _fit(drafter, i, context_hidden_states, states.double())
        for name, projection in zip(("k", "v"), projections, strict=True):
            if projection.bias is not None:
                getattr(layer.self_attn, f"{name}_proj_target").bias.copy_(projection.bias)
    return lost


def _fit(drafter: Any, i: int, context_hidden_states: Tensor, states: Tensor) -> float:
    """Set the mix and the projections of one layer; returns the part of the variance lost."""
    attention = drafter.layers[i].self_attn
    spread = (states - states.mean(dim=0)).square().sum()
    best: tuple[float, Tensor, Tensor] | None = None
    for logits in (CHOSEN_TAP * torch.eye(drafter.layer_fusion_weights.shape[1])).unbind():
        drafter.layer_fusion_weights[i] = logits
        features = drafter.fuse_context(context_hidden_states.to(attention.k_proj.weight.dtype))[i]
        features = features[0].double()
        weights = torch.linalg.lstsq(features, states).solution
        lost = float((features @ weights - states).square().sum() / spread)
        if best is None or lost < best[0]:
            best = lost, logits, weights
    assert best is not None
    lost, drafter.layer_fusion_weights[i], weights = best
    keys, values = weights.T.chunk(2)
    attention.k_proj_target.weight.copy_(keys)
    attention.v_proj_target.weight.copy_(values)
    return lost


def _check(drafter: Any, source: Any, context_hidden_states: Tensor) -> None:
    kinds = (drafter.config.architecture, source.config.architecture)
    if kinds != ("dflare", "dflash"):
        raise ValueError(
            f'`drafter` and `source` must be of the architectures "dflare" and "dflash", got '
            f"{kinds}. A drafter of the same architecture needs no fitting: load it."
        )
    for name in _SIZES:
        ours, theirs = getattr(drafter.config, name), getattr(source.config, name)
        if ours != theirs:
            raise ValueError(
                f"`drafter` must have the source's `{name}` {theirs}, got {ours}. Build its config "
                "with the source's sizes."
            )
    n_tokens, least = context_hidden_states.shape[1], 2 * drafter.config.hidden_size
    if n_tokens < least:
        raise ValueError(
            f"`context_hidden_states` must be of at least {least} tokens to fit "
            f"{drafter.config.hidden_size} columns to, got {n_tokens}. Give more text."
        )
