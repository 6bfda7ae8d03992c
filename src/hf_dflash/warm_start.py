"""Start a drafter from what is there: the target's own layers, or a drafter and its adapter."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .target import decoder_layers, input_device, text_config

logger = logging.getLogger(__name__)

#: DFlare's projections of the context, which the target's layer has under another name.
_ALIASES = {"k_proj_target": "k_proj", "v_proj_target": "v_proj"}
#: The halves of a layer, copied whole or not at all, and the norm before each.
_HALVES = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}

#: DFlare's mix of taps starts with this much more weight (a logit) on the tap that is chosen.
CHOSEN_TAP = 3.0


@torch.no_grad()
def init_from_target(
    drafter: Any,
    target: Any,
    layer_ids: Sequence[int] | None = None,
    *,
    input_ids: Tensor | None = None,
) -> list[str]:
    """Copy layers of the target into the draft layers: their attention, their MLP, or both.

    The context features become one tap, normed as the target's next layer norms it: the draft
    layers then find keys and values such as they know. Joint projections (Phi-3, GLM-4) are taken
    apart; queries and keys that turn pairs of neighbours (Cohere) are put in the drafter's order.
    Attention or MLP that the target has otherwise (another width of heads, heads that are turned
    in part, experts, quantised weights) stays as it was, whole, and that is logged.

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
        NotImplementedError: A layer is offloaded.
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
    if any(p.is_meta for layer_id in layer_ids for p in layers[layer_id].parameters()):
        raise NotImplementedError(
            f"The layers {list(layer_ids)} of `target` must be in memory to be copied, but some are"
            " offloaded. Load it without `device_map`, or with one that leaves them there."
        )
    copied = []
    for i, layer_id in enumerate(layer_ids):
        source = _layer_weights(layers[layer_id], text_config(target))
        copied += _copy_layer(drafter.layers[i], source, f"layers.{i}.")
    final_norm = getattr(target.get_decoder(), "norm", None)
    if final_norm is not None:
        copied += _copy(drafter.norm, _effective_weights(final_norm), "norm.")
    if not any(name.startswith("layers.") and "_proj." in name for name in copied):
        raise ValueError(
            f"No matrix of `{type(target).__name__}`'s layers fits the drafter's. Give the drafter "
            "the target's sizes, or let it start from random weights."
        )
    _say_what_is_left(drafter, copied)
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
        drafter.layer_fusion_weights[:, taps.index(tap)] = CHOSEN_TAP
        set_.append("layer_fusion_weights")
    elif drafter.config.target_hidden_size == drafter.config.hidden_size:
        width = drafter.config.hidden_size
        drafter.fc.weight.zero_()
        place = taps.index(tap) * width
        drafter.fc.weight[:, place : place + width].fill_diagonal_(1.0)
        set_.append("fc.weight")
    norm = getattr(layers[min(tap + 1, len(layers) - 1)], "input_layernorm", None)
    if set_ and norm is not None:
        set_ += _copy(drafter.hidden_norm, _effective_weights(norm), "hidden_norm.")
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
            norm = getattr(layer.self_attn, f"{kind}_norm", None)
            if norm is not None:  # of all heads together (OLMo 2)
                hooks.append(norm.register_forward_hook(_keep(outputs, name)))
                continue
            projection, part = getattr(layer.self_attn, f"{kind}_proj", None), slice(None)
            if projection is None:
                projection = layer.self_attn.qkv_proj
                part = _parts_of_qkv(text_config(target))[kind]
            has_bias = projected.replace("weight", "bias") in copied
            # One that the drafter lacks (Qwen2) is in all keys, and nothing to attend by.
            bias = None if has_bias or projection.bias is None else projection.bias[part]
            hooks.append(projection.register_forward_hook(_keep(outputs, name, bias, part)))
    device = input_device(target.get_input_embeddings(), input_ids.device)
    try:
        target.get_decoder()(input_ids=input_ids.to(device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    parameters = dict(drafter.named_parameters())
    for name, output in outputs.items():
        # The first token's states are the sink of attention, far from all others.
        heads = output[:, 1:].float().unflatten(-1, (-1, drafter.config.head_dim))
        parameters[name].fill_(heads.square().mean(dim=-1).sqrt().mean())
    return list(outputs)


def _keep(
    outputs: dict[str, Tensor], name: str, bias: Tensor | None = None, part: slice = slice(None)
) -> Any:
    def keep(_module: Any, _inputs: Any, output: Tensor) -> None:
        output = output[..., part]
        outputs[name] = output if bias is None else output - bias

    return keep


def _copy(module: Any, source: Mapping[str, Tensor], prefix: str) -> list[str]:
    """Fill the parameters that the source has in the same shape; returns their names."""
    copied = []
    for name, parameter in module.named_parameters():
        found = source.get(_name_in_target(name))
        if found is not None and _fits(found, parameter):
            parameter.copy_(found.to(parameter))
            copied.append(prefix + name)
    return copied


def _copy_layer(layer: Any, source: Mapping[str, Tensor], prefix: str) -> list[str]:
    """Fill attention and MLP, each if all its matrices are there."""
    copied = []
    for half, norm in _HALVES.items():
        own = {name.removeprefix(f"{half}."): t for name, t in source.items() if half in name}
        module = getattr(layer, half)
        matrices = {name: p for name, p in module.named_parameters() if p.ndim == 2}
        if all(_fits(own.get(_name_in_target(name)), p) for name, p in matrices.items()):
            copied += _copy(module, own, f"{prefix}{half}.")
            weights = {"weight": source[f"{norm}.weight"]} if f"{norm}.weight" in source else {}
            copied += _copy(getattr(layer, norm), weights, f"{prefix}{norm}.")
    return copied


def _name_in_target(name: str) -> str:
    return ".".join(_ALIASES.get(part, part) for part in name.split("."))


def _fits(found: Tensor | None, parameter: Tensor) -> bool:
    # Numbers of a byte each are quantised, and their scale is elsewhere.
    return (
        found is not None
        and found.shape == parameter.shape
        and found.is_floating_point()
        and found.itemsize > 1
    )


def _say_what_is_left(drafter: Any, copied: Sequence[str]) -> None:
    for half in _HALVES:
        left = [
            i
            for i in range(len(drafter.layers))
            if not any(name.startswith(f"layers.{i}.{half}.") for name in copied)
        ]
        if left:
            logger.warning(
                "The %s of draft layers %s stays as it was: the target has it otherwise.",
                {"self_attn": "attention", "mlp": "MLP"}[half],
                left,
            )


def _parts_of_qkv(config: Any) -> dict[str, slice]:
    """Rows of a joint projection of queries, keys and values."""
    n_heads, hidden = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // n_heads
    n_kv = getattr(config, "num_key_value_heads", None) or n_heads
    q, k = n_heads * size, n_kv * size
    return {"q": slice(0, q), "k": slice(q, q + k), "v": slice(q + k, q + 2 * k)}


def _layer_weights(layer: Any, config: Any) -> dict[str, Tensor]:
    """Weights of a target's layer by the names, and in the order, that a draft layer has them."""
    weights = _effective_weights(layer)
    for kind in ("weight", "bias"):
        joint = weights.pop(f"self_attn.qkv_proj.{kind}", None)
        if joint is not None:
            for name, part in _parts_of_qkv(config).items():
                weights[f"self_attn.{name}_proj.{kind}"] = joint[part]
        joint = weights.pop(f"mlp.gate_up_proj.{kind}", None)
        if joint is not None:
            gate, up = joint.chunk(2)
            weights |= {f"mlp.gate_proj.{kind}": gate, f"mlp.up_proj.{kind}": up}
    if hasattr(layer, "mlp") and "post_attention_layernorm" not in dict(layer.named_children()):
        # Attention and MLP side by side (Cohere): one norm is before both.
        weights["post_attention_layernorm.weight"] = weights["input_layernorm.weight"]
    if _turned_share(config) < 1:
        return {name: t for name, t in weights.items() if "self_attn" not in name}
    if _turns_neighbours(layer):
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for name, tensor in weights.items():
            if name.split(".")[-2] in ("q_proj", "k_proj", "q_norm", "k_norm"):
                pairs = tensor.unflatten(0, (-1, size // 2, 2))
                weights[name] = pairs.transpose(1, 2).reshape(tensor.shape)
    return weights


def _turned_share(config: Any) -> float:
    """How much of a head the rotary embedding turns."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, Mapping)] or [rope]
    otherwise = getattr(config, "partial_rotary_factor", None) or 1.0
    return min(float(kind.get("partial_rotary_factor") or otherwise) for kind in kinds)


def _turns_neighbours(layer: Any) -> bool:
    """Whether elements 0 and 1 of a head are turned together, not 0 and the one half way."""
    attention = getattr(layer, "self_attn", None)
    rotate = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
    return rotate is not None and rotate(torch.arange(4.0)).tolist() == [-1.0, 0.0, -3.0, 2.0]


def _effective_weights(module: Any) -> dict[str, Tensor]:
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

    In float32, whatever the drafter's dtype: half precision would round the adapter's small
    changes away. Save it in that with `export_dtype`, or ``.to(torch.bfloat16)``.

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
    return copy.deepcopy(model).float().merge_and_unload()
