"""Start a drafter from what is there: the target's own layers, or a drafter and its adapter."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .target import decoder_layers

#: DFlare's projections of the context, which the target's layer has under another name.
_ALIASES = {"k_proj_target": "k_proj", "v_proj_target": "v_proj"}


@torch.no_grad()
def init_from_target(
    drafter: Any, target: Any, layer_ids: Sequence[int] | None = None
) -> list[str]:
    """Copy layers of the target into the draft layers, wherever name and shape agree.

    What the target lacks or has otherwise (its width of heads or of the MLP, norms of queries and
    keys, quantised weights) stays as it was; so does what only a drafter has.

    Args:
        drafter: A new drafter.
        target: Its target.
        layer_ids: 0-based layer of the target for each draft layer; spread up to the last by
            default.

    Returns:
        Names of the drafter's parameters that were copied.

    Raises:
        ValueError: There are not as many layers as draft layers, one is not the target's, or
            nothing fits.
    """
    layers = decoder_layers(target)
    n_layers, n_draft = len(layers), len(drafter.layers)
    if layer_ids is None:
        layer_ids = [(i + 1) * n_layers // n_draft - 1 for i in range(n_draft)]
    if len(layer_ids) != n_draft or not all(0 <= i < n_layers for i in layer_ids):
        raise ValueError(
            f"`layer_ids` must name a layer of the target (0..{n_layers - 1}) for each of the "
            f"{n_draft} draft layers, got {list(layer_ids)}."
        )
    copied = []
    for i, layer_id in enumerate(layer_ids):
        source = dict(layers[layer_id].named_parameters())
        copied += _copy(drafter.layers[i], source, f"layers.{i}.")
    final_norm = getattr(target.get_decoder(), "norm", None)
    if final_norm is not None:
        copied += _copy(drafter.norm, dict(final_norm.named_parameters()), "norm.")
    if not any(name.startswith("layers.") for name in copied):
        raise ValueError(
            f"No weight of `{type(target).__name__}`'s layers fits the drafter's. Give the drafter "
            "the target's sizes, or let it start from random weights."
        )
    return copied


def _copy(module: Any, source: Mapping[str, Tensor], prefix: str) -> list[str]:
    copied = []
    for name, parameter in module.named_parameters():
        parts = [_ALIASES.get(part, part) for part in name.split(".")]
        found = source.get(".".join(parts))
        fits = found is not None and found.shape == parameter.shape
        if fits and found is not None and found.is_floating_point():
            parameter.copy_(found.to(parameter))
            copied.append(prefix + name)
    return copied


def merge_adapter(model: Any) -> Any:
    """A drafter with its PEFT adapter merged into its weights; ``model`` stays as it is.

    Args:
        model: A `PeftModel` of a drafter.

    Raises:
        TypeError: It has no adapter.
    """
    if not hasattr(model, "merge_and_unload"):
        raise TypeError(
            f"`model` must be a drafter with an adapter of PEFT, got {type(model).__name__}. "
            "Nothing is to be merged; save it as it is."
        )
    return copy.deepcopy(model).merge_and_unload()
