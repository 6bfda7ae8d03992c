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


#: DFlare's mix of taps starts with this much more weight (a logit) on the tap that is chosen.
_CHOSEN_TAP = 3.0


@torch.no_grad()
def init_from_target(
    drafter: Any,
    target: Any,
    layer_ids: Sequence[int] | None = None,
    *,
    input_ids: Tensor | None = None,
) -> list[str]:
    """Copy layers of the target into the draft layers, wherever name and shape agree.

    The context features become one tap, normed as the target's next layer norms it: the draft
    layers then find keys and values such as they know. What the target lacks or has otherwise (its
    width of heads or of the MLP, quantised weights) stays as it was.

    Args:
        drafter: A new drafter.
        target: Its target.
        layer_ids: 0-based layer of the target for each draft layer, ascending; by default spread
            from behind the last tap but one up to the last layer.
        input_ids: (1, S) some text, of two tokens at least. Where a drafter norms queries and
            keys and the target does not, or otherwise, the norms get the scale that the target's
            have on it.

    Returns:
        Names of the drafter's parameters that were set.

    Raises:
        ValueError: There are not as many layers as draft layers, one is not the target's, the
            text is too short, or no matrix fits.
    """
    if input_ids is not None and input_ids.shape[1] < 2:
        raise ValueError(
            f"`input_ids` must be a text of at least 2 tokens, got {tuple(input_ids.shape)}: the "
            "first is left out, as its states are like no other's."
        )
    layers = decoder_layers(target)
    n_layers, n_draft = len(layers), len(drafter.layers)
    if layer_ids is None:
        layer_ids = _spread(drafter.config.target_layer_ids, n_layers, n_draft)
    if len(layer_ids) != n_draft or not all(0 <= i < n_layers for i in layer_ids):
        raise ValueError(
            f"`layer_ids` must name a layer of the target (0..{n_layers - 1}) for each of the "
            f"{n_draft} draft layers, got {list(layer_ids)}."
        )
    copied = []
    for i, layer_id in enumerate(layer_ids):
        copied += _copy(drafter.layers[i], layers[layer_id], f"layers.{i}.")
    final_norm = getattr(target.get_decoder(), "norm", None)
    if final_norm is not None:
        copied += _copy(drafter.norm, final_norm, "norm.")
    if not any(name.startswith("layers.") and "_proj." in name for name in copied):
        raise ValueError(
            f"No matrix of `{type(target).__name__}`'s layers fits the drafter's. Give the drafter "
            "the target's sizes, or let it start from random weights."
        )
    copied += _choose_tap(drafter, layers, layer_ids[0])
    if input_ids is not None:
        copied += _scale_heads(drafter, target, [layers[i] for i in layer_ids], input_ids, copied)
    return copied


def _spread(taps: Sequence[int], n_layers: int, n_draft: int) -> list[int]:
    first, last = sorted(taps)[-2:][0] + 1, n_layers - 1
    first = min(first, last)
    return [
        last - (last - first) * (n_draft - 1 - i) // max(1, n_draft - 1) for i in range(n_draft)
    ]


def _choose_tap(drafter: Any, layers: Any, first_layer: int) -> list[str]:
    """Let the features be the highest tap below the first copied layer."""
    taps = list(drafter.config.target_layer_ids)
    below = [tap for tap in taps if tap < first_layer]
    tap = max(below) if below else min(taps)
    set_ = []
    if hasattr(drafter, "layer_fusion_weights"):
        drafter.layer_fusion_weights.zero_()
        drafter.layer_fusion_weights[:, taps.index(tap)] = _CHOSEN_TAP
        set_.append("layer_fusion_weights")
    elif drafter.config.target_hidden_size == drafter.config.hidden_size:
        width = drafter.config.hidden_size
        drafter.fc.weight.zero_()
        place = taps.index(tap) * width
        drafter.fc.weight[:, place : place + width].fill_diagonal_(1.0)
        set_.append("fc.weight")
    norm = getattr(layers[min(tap + 1, len(layers) - 1)], "input_layernorm", None)
    if set_ and norm is not None:
        set_ += _copy(drafter.hidden_norm, norm, "hidden_norm.")
    return set_


def _scale_heads(
    drafter: Any, target: Any, layers: Sequence[Any], input_ids: Tensor, copied: Sequence[str]
) -> list[str]:
    """Give norms of queries and keys the root mean square that the target's have on a text."""
    outputs: dict[str, Tensor] = {}
    hooks = []
    for i, layer in enumerate(layers):
        for kind in ("q", "k"):
            name = f"layers.{i}.self_attn.{kind}_norm.weight"
            projected = name.replace("_norm", "_proj")
            if projected not in copied or name in copied:
                continue
            projection = getattr(layer.self_attn, f"{kind}_proj")
            norm = getattr(layer.self_attn, f"{kind}_norm", None)
            if norm is not None:  # of all heads together (OLMo 2)
                hooks.append(norm.register_forward_hook(_keep(outputs, name)))
                continue
            has_bias = projected.replace("weight", "bias") in copied
            # One that the drafter lacks (Qwen2) is in all keys, and nothing to attend by.
            bias = None if has_bias else projection.bias
            hooks.append(projection.register_forward_hook(_keep(outputs, name, bias)))
    try:
        target.get_decoder()(input_ids=input_ids.to(target.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    parameters = dict(drafter.named_parameters())
    for name, output in outputs.items():
        # The first token's states are the sink of attention, far from all others.
        heads = output[:, 1:].float().unflatten(-1, (-1, drafter.config.head_dim))
        parameters[name].fill_(heads.square().mean(dim=-1).sqrt().mean())
    return list(outputs)


def _keep(outputs: dict[str, Tensor], name: str, bias: Tensor | None = None) -> Any:
    def keep(_module: Any, _inputs: Any, output: Tensor) -> None:
        outputs[name] = output if bias is None else output - bias

    return keep


def _copy(module: Any, source_module: Any, prefix: str) -> list[str]:
    source = _effective_weights(source_module)
    copied = []
    for name, parameter in module.named_parameters():
        parts = [_ALIASES.get(part, part) for part in name.split(".")]
        found = source.get(".".join(parts))
        fits = found is not None and found.shape == parameter.shape
        # Of a byte each they are quantised, and their scale is elsewhere.
        if fits and found is not None and found.is_floating_point() and found.itemsize > 1:
            parameter.copy_(found.to(parameter))
            copied.append(prefix + name)
    return copied


def _effective_weights(module: Any) -> Mapping[str, Tensor]:
    """Parameters by name; of RMS norms what they multiply by, which in Gemma is 1 + the weight."""
    weights: dict[str, Tensor] = dict(module.named_parameters())
    for name, part in module.named_modules():
        if "RMSNorm" in type(part).__name__ and hasattr(part, "weight"):
            # Far above the norm's epsilon, and a power of two: nothing is rounded.
            weights[f"{name}.weight".lstrip(".")] = part(torch.full_like(part.weight, 1024.0))
    if "post_feedforward_layernorm.weight" in weights:
        # Gemma, OLMo 2: "post attention" norms what attention gives; ours what the MLP reads.
        del weights["post_attention_layernorm.weight"]
        if "pre_feedforward_layernorm.weight" in weights:
            weights["post_attention_layernorm.weight"] = weights["pre_feedforward_layernorm.weight"]
    return weights


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
