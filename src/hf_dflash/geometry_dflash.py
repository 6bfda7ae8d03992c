"""The shape of a new drafter, derived from its target: sizes, rotary embedding, taps, mask token.

Letters: N layers of the target, T taps, H hidden size.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from .rope_dflash import ROPE_KEYS

#: Draft layers and taps of the published drafters. Source: DFlash, and DFlare's Table 1.
DEFAULT_DRAFT_LAYERS = {"dflash": 5, "dflare": 7}
DEFAULT_TAPS = {"dflash": 5, "dflare": 9}

#: Names of tokens that no training text holds, so that one may stand for "not known yet".
SPARE_TOKEN = re.compile(
    r"[<\[].*(reserved|unused|placeholder|dummy|empty|extra_id).*[>\]]", re.IGNORECASE
)


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """Spread taps evenly over the target's layers, away from its first and last ones.

    The published formula, from layer 1 to layer N - 3. Where the target is too small for that,
    the taps are spread over all of its layers but the last, and over that too if need be.

    Args:
        num_target_layers: N.
        num_taps: T.

    Returns:
        T distinct layer ids, ascending.

    Raises:
        ValueError: If the target has fewer layers than taps.

    Example:
        >>> default_target_layer_ids(36, 5)
        [1, 9, 17, 25, 33]
        >>> default_target_layer_ids(3, 2)
        [0, 1]
    """
    if not 1 <= num_taps <= num_target_layers:
        raise ValueError(
            f"`num_taps` must lie in 1..{num_target_layers} (the target's layers), got {num_taps}. "
            "Pass a smaller `num_taps`."
        )
    if num_taps == 1:
        return [num_target_layers // 2]
    if num_target_layers - 4 >= num_taps - 1:
        return [round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps)]
    # Engines disagree about the last layer (before or after the final norm): only if need be.
    last = num_target_layers - (1 if num_taps == num_target_layers else 2)
    return [round(i * last / (num_taps - 1)) for i in range(num_taps)]


def choose_draft_layers(architecture: str, num_draft_layers: int | None) -> int:
    """Return L: what was asked for, or the paper's number."""
    if num_draft_layers is None:
        return DEFAULT_DRAFT_LAYERS[architecture]
    if not _is_positive_int(num_draft_layers):
        raise ValueError(
            f"`num_draft_layers` must be an integer of at least 1, got {num_draft_layers!r}. Leave "
            f"it out for {DEFAULT_DRAFT_LAYERS[architecture]}, as in the paper."
        )
    return num_draft_layers


def choose_target_layer_ids(
    architecture: str, num_target_layers: int, num_taps: int | None, given: Any
) -> Any:
    """Return the taps: those given, or ``num_taps`` (by default the paper's number) spread evenly.

    Raises:
        ValueError: If ``num_taps`` is not the number of those given, or none of the target's.
    """
    if given is None:
        if num_taps is None:
            num_taps = min(DEFAULT_TAPS[architecture], max(num_target_layers - 1, 1))
        return default_target_layer_ids(num_target_layers, num_taps)
    if num_taps is not None and isinstance(given, list | tuple) and len(given) != num_taps:
        raise ValueError(
            f"`num_taps` ({num_taps}) and `target_layer_ids` ({list(given)}, {len(given)} taps) "
            "must agree. Leave one of them out."
        )
    return given


def choose_mask_token_id(vocab_size: int, tokenizer: Any | None) -> int:
    """Find a token that can stand for "not drafted yet": a row of the embedding no text uses.

    In this order: the tokenizer's mask token; the first row of the embedding beyond the
    tokenizer's tokens (Qwen3's 151669); a token named as reserved or unused (gpt-oss's 200000).

    Args:
        vocab_size: Rows of the target's embedding.
        tokenizer: The target's tokenizer or processor.

    Raises:
        ValueError: If nothing suits. A padding, end or begin token is never taken: the drafter
            would learn to predict behind it.
    """
    if tokenizer is None:
        raise ValueError(
            "`mask_token_id` cannot be chosen without the target's tokenizer. Pass `tokenizer=` or "
            "`mask_token_id=` (a row of the target's embedding that no text uses)."
        )
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor holds one
    names = ("bos", "eos", "pad", "unk", "sep", "cls")
    taken = {getattr(tokenizer, f"{name}_token_id", None) for name in names}
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    spare = sorted(index for token, index in vocabulary.items() if SPARE_TOKEN.fullmatch(token))
    candidates = [getattr(tokenizer, "mask_token_id", None), max(vocabulary.values()) + 1, *spare]
    for candidate in candidates:
        if candidate is not None and candidate < vocab_size and candidate not in taken:
            return int(candidate)
    raise ValueError(
        "`mask_token_id` must be given: the tokenizer has no mask token, no reserved or unused "
        f"token, and its {len(vocabulary)} tokens fill the embedding ({vocab_size} rows). Pass "
        "the id of a token that the drafter's texts never hold; not the padding, end or begin "
        "token."
    )


def decoder_config(target_config: Any) -> Any:
    """Return the config of the target's language model, also if it is nested (vision, audio)."""
    text = target_config.get_text_config(decoder=True)
    if getattr(text, "is_encoder_decoder", False):
        raise ValueError(
            f"`target_config` must be of a decoder-only model, got {text.model_type!r}, an "
            "encoder-decoder."
        )
    if getattr(text, "is_heterogeneous", False):
        # Gemma 4's global layers have wider heads: what differs is read from one layer.
        return text.per_layer_config[_global_layer(text)]
    return text


def _global_layer(text: Any) -> int:
    """The first layer that attends to everything, or as good as that (dots3: indexed)."""
    kinds = list(getattr(text, "layer_types", None) or ())
    if "full_attention" in kinds:
        return kinds.index("full_attention")
    return next((index for index, kind in enumerate(kinds) if "sliding" not in kind), 0)


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _required(text: Any, name: str, overrides: Mapping[str, Any]) -> Any:
    value = overrides.get(name)
    if value is None:
        value = getattr(text, name, None)
    if value is None:
        raise ValueError(
            f"`target_config` must be of a language model with attention, but {type(text).__name__}"
            f" has no `{name}`. Targets without attention heads (Mamba, RWKV, xLSTM) are not "
            "supported: their recurrent state cannot be rolled back to the accepted tokens. Of a "
            "larger model, pass the config of its language model."
        )
    return value


def target_fields(target_config: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `DFlashConfig` that follow from the target.

    Args:
        target_config: Config of the target.
        overrides: Fields given for the drafter, from which others follow (heads, head size).

    Raises:
        ValueError: If the target is no decoder with attention heads, or its embeddings are
            narrower than its hidden states.
    """
    text = decoder_config(target_config)
    hidden_size = _required(text, "hidden_size", {})
    heads = _required(text, "num_attention_heads", overrides)
    if not _is_positive_int(heads):
        raise ValueError(f"`num_attention_heads` must be an integer of at least 1, got {heads!r}.")
    head_dim = getattr(text, "head_dim", None) or hidden_size // heads
    head_dim = overrides.get("head_dim", head_dim + head_dim % 2)  # rotation is by pairs
    embedding_size = getattr(text, "word_embed_proj_dim", hidden_size)
    if embedding_size != hidden_size:
        raise ValueError(
            f"`target_config` must have embeddings as wide as its hidden states ({hidden_size}), "
            f"got `word_embed_proj_dim` {embedding_size}: the drafter reads both."
        )
    eps = (
        getattr(text, name, None)
        for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    )
    return {
        "vocab_size": _required(text, "vocab_size", overrides),
        "hidden_size": hidden_size,
        "intermediate_size": _intermediate_size(text),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "rms_norm_eps": next((value for value in eps if value is not None), 1e-6),
        "initializer_range": getattr(text, "initializer_range", 0.02),
        "max_position_embeddings": _max_positions(text),
        "attention_bias": bool(getattr(text, "attention_bias", False)),
        "rope_parameters": _rope(text, head_dim),
        "num_target_layers": _required(text, "num_hidden_layers", {}),
        "bos_token_id": getattr(text, "bos_token_id", None),
        "eos_token_id": getattr(text, "eos_token_id", None),
        "pad_token_id": getattr(text, "pad_token_id", None),
        "input_embedding_scale": _embedding_scale(text),
        "output_multiplier": _output_multiplier(text),
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
    }


def _intermediate_size(text: Any) -> int:
    """The target's MLP width; 8/3 H for experts, whose own width says nothing (gpt-oss: 7680)."""
    hidden_size = text.hidden_size
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if any((getattr(text, name, None) or 0) > 1 for name in names):
        return max(round(hidden_size * 8 / 3 / 64) * 64, 64)
    for name in ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"):
        size = getattr(text, name, None)
        if size is not None:
            return max(size) if isinstance(size, list | tuple) else size
    return 4 * hidden_size


def _max_positions(text: Any) -> int:
    """The target's longest text; XLNet has -1 for no limit, others nothing."""
    length = getattr(text, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else 32768


def _rope(text: Any, head_dim: int) -> dict[str, Any]:
    """The rotary embedding of the target's full-attention layers, as whole heads and one axis.

    A drafter turns whole heads and has one position per token, so what belongs to partial or
    multi-axis rotation is left out, and so is what only the target's own attention reads
    (Ministral 3 scales its queries). A target without rotary embedding gets the default one.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    nested = {kind: value for kind, value in rope.items() if isinstance(value, Mapping)}
    if nested:
        kinds = getattr(text, "layer_types", None) or ["full_attention"]
        rope = nested.get(kinds[_global_layer(text)]) or next(iter(nested.values()))
    theta = rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0
    kind = rope.get("rope_type", "default")
    # longrope has one factor per turned pair, so it fits heads of one size only.
    if kind not in ROPE_KEYS or (
        kind == "longrope" and 2 * len(rope.get("short_factor") or ()) != head_dim
    ):
        kind = "default"
    honoured = ROPE_KEYS[kind][0] | ROPE_KEYS[kind][1]
    kept = {key: value for key, value in rope.items() if key in honoured}
    return kept | {"rope_type": kind, "rope_theta": theta}


def _embedding_scale(text: Any) -> float:
    """What the target multiplies its embedding rows with before its first layer."""
    if "gemma" in text.model_type:  # VaultGemma, RecurrentGemma and DiffusionGemma too
        return math.sqrt(text.hidden_size)
    if getattr(text, "scale_embedding", False):
        return math.sqrt(text.hidden_size)
    for name in ("embedding_multiplier", "scale_emb"):  # Granite and Falcon-H1; MiniCPM
        if getattr(text, name, None) is not None:
            return float(getattr(text, name))
    return 1.0


def _output_multiplier(text: Any) -> float:
    """What the target multiplies its head's output with."""
    if getattr(text, "logits_scaling", None):  # Granite divides
        return 1.0 / text.logits_scaling
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere; Falcon-H1
        if getattr(text, name, None) is not None:
            return float(getattr(text, name))
    return 1.0
