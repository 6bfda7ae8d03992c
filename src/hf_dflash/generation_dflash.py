"""`generate(assistant_model=drafter)`: the way in and the checks.

The only file that reaches into transformers. Two methods of `GenerationMixin` are wrapped when
the first drafter is built; calls without a drafter of ours go to the originals untouched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode

from .chain_decoding import ChainDecoding
from .drafting import DraftingPolicy
from .outputs_dflash import CACHE_NAME
from .target import check_pair

#: Version of the dispatch. A copy that travelled with a checkpoint and the installed package may
#: meet in one process: the newer one serves both.
DISPATCH_VERSION = 1
_MARK = "_hf_dflash_dispatch_version"


def install_dispatch() -> None:
    """Let `generate` understand our drafters. Idempotent; `remove_dispatch` undoes it."""
    for name, wrap in (
        ("_assisted_decoding", _wrap_decoding),
        ("_validate_generation_mode", _wrap_validation),
    ):
        method = getattr(GenerationMixin, name)
        if getattr(method, _MARK, 0) < DISPATCH_VERSION:
            original = getattr(method, "__wrapped__", method) if hasattr(method, _MARK) else method
            wrapper = wrap(original)
            setattr(wrapper, _MARK, DISPATCH_VERSION)
            setattr(GenerationMixin, name, wrapper)


def remove_dispatch() -> None:
    """Put transformers' own methods back."""
    for name in ("_assisted_decoding", "_validate_generation_mode"):
        method = getattr(GenerationMixin, name)
        if hasattr(method, _MARK):
            setattr(GenerationMixin, name, method.__wrapped__)


def _wrap_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _assisted_decoding(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(self, input_ids, *args, **kwargs)
        call = {**bound.arguments, **bound.arguments.pop("model_kwargs", {})}
        if not _is_ours(call.get("assistant_model"), call["generation_config"]):
            return original(self, input_ids, *args, **kwargs)
        del call["self"], call["input_ids"]
        return _decode(self, input_ids, **call)

    return _assisted_decoding


def _wrap_validation(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any
    ) -> None:
        assistant = generation_mode_kwargs.get("assistant_model")
        _refuse_misloaded(assistant)
        if _is_ours(assistant, generation_config):
            _check_call(self, generation_mode, generation_config, generation_mode_kwargs)
        else:
            original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _is_ours(assistant: Any, generation_config: GenerationConfig) -> bool:
    # speculation_type asks for transformers' own block loop by name: it gets it.
    return (
        getattr(assistant, "is_dflash_drafter", False)
        and getattr(generation_config, "speculation_type", None) is None
    )


def _refuse_misloaded(assistant: Any) -> None:
    """Refuse the random Qwen3 model that AutoModel builds from a drafter's folder."""
    config = getattr(assistant, "config", None)
    is_drafter = getattr(assistant, "is_dflash_drafter", False)
    names_drafter = getattr(config, "dflash_config", None) is not None or any(
        "DFlash" in name or "DFlare" in name
        for name in getattr(config, "architectures", None) or ()
    )
    if assistant is not None and not is_drafter and names_drafter:
        raise TypeError(
            f"`assistant_model` is a {type(assistant).__name__} with random weights: the folder of "
            "a DFlash drafter was loaded without its own class. Load it with "
            "DFlashDraftModel.from_pretrained(...), or with AutoModel.from_pretrained(..., "
            "trust_remote_code=True)."
        )


def _check_call(target: Any, mode: Any, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    """Refuse what cannot be honoured, before any work."""
    unsupported = [
        (mode != GenerationMode.ASSISTED_GENERATION, f"generation mode '{mode}'", "num_beams=1"),
        (config.num_beams > 1, f"`num_beams`={config.num_beams}", "num_beams=1"),
        (
            config.num_return_sequences > 1,
            f"`num_return_sequences`={config.num_return_sequences}",
            "one call a sequence",
        ),
        (
            bool(kwargs.get("synced_gpus")),
            "`synced_gpus`",
            "a target that is not sharded by ZeRO-3",
        ),
        (target.config.is_encoder_decoder, "an encoder-decoder target", "plain generate()"),
        (
            getattr(target, "_is_stateful", False),
            f"{type(target).__name__}, whose recurrent state cannot be rolled back,",
            "plain generate()",
        ),
    ]
    for applies, what, instead in unsupported:
        if applies:
            raise NotImplementedError(
                f"Decoding with a DFlash drafter does not support {what} yet. Use {instead}."
            )
    modes = getattr(target, "_supported_generation_modes", None)
    if modes is not None and mode not in modes:
        raise ValueError(f"`{type(target).__name__}` supports only {modes}, got '{mode}'.")
    if not config.use_cache:
        raise ValueError("`use_cache` must be True to decode with a drafter, got False.")
    if config.assistant_ensemble_weight is not None:
        raise ValueError(
            "`assistant_ensemble_weight` changes what is generated, and a DFlash drafter never "
            "does. Leave it out."
        )
    for name in ("assistant_tokenizer", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if kwargs.get(name) is not None or getattr(config, name, None) is not None:
            raise ValueError(f"`{name}` has no meaning for a DFlash drafter. Leave it out.")
    drafter = kwargs["assistant_model"]
    check_pair(target, drafter.config)
    drafting_policy(drafter, config)


def _decode(target: Any, input_ids: Tensor, **call: Any) -> Any:
    """Check what only the prepared inputs show, then decode."""
    named = ("generation_config", "logits_processor", "stopping_criteria", "streamer")
    others = ("synced_gpus", "inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer")
    model_kwargs = {k: v for k, v in call.items() if k not in named + others}
    if input_ids.shape[0] != 1:
        raise NotImplementedError(
            f"Decoding with a DFlash drafter takes one sequence a call, got a batch of "
            f"{input_ids.shape[0]}. Call generate() once a prompt."
        )
    cache = model_kwargs.get(CACHE_NAME)
    if cache is None:
        raise NotImplementedError(
            f"`{type(target).__name__}` decodes without a cache object that can be rolled back. "
            "Use plain generate()."
        )
    _check_cache(cache)
    drafter = call["assistant_model"]
    return ChainDecoding(
        target,
        drafter,
        input_ids,
        policy=drafting_policy(drafter, call["generation_config"]),
        call={name: call.get(name) for name in named},
        model_kwargs=model_kwargs,
    ).run()


def _check_cache(cache: Any) -> None:
    for layer in cache.layers:
        is_static = getattr(layer, "max_cache_len", None) is not None
        # A static window overwrites what leaves it. Before 5.24 it could not even say how long it
        # is to become.
        lost = is_static and layer.is_sliding and not layer.is_croppable
        if lost or hasattr(layer, "_quantize"):
            raise NotImplementedError(
                f"A `{type(layer).__name__}` cannot be rolled back to the accepted tokens. Use "
                "the default (dynamic) cache."
            )


def drafting_policy(drafter: Any, call_config: GenerationConfig) -> DraftingPolicy:
    """Read how to draft: from the call where it says something, else from the drafter.

    Args:
        drafter: Its ``generation_config`` holds the policy.
        call_config: Of the call. A value equal to transformers' own default says nothing.

    Raises:
        ValueError: ``num_assistant_tokens`` is not in 1..B - 1, or the threshold not in [0, 1].
        NotImplementedError: A schedule other than "constant", or a tree.
    """
    defaults = GenerationConfig._get_default_generation_params()
    own = drafter.generation_config

    def option(name: str) -> Any:
        value = getattr(call_config, name, None)
        return getattr(own, name, None) if value in (None, defaults.get(name)) else value

    most = drafter.config.block_size - 1
    n_drafts = option("num_assistant_tokens")
    n_drafts = most if n_drafts is None else n_drafts
    if not 1 <= n_drafts <= most:
        raise ValueError(
            f"`num_assistant_tokens` must be in 1..{most} for a drafter with block size {most + 1}, "
            f"got {n_drafts}."
        )
    threshold = option("assistant_confidence_threshold")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"`assistant_confidence_threshold` must be in [0, 1], got {threshold}.")
    if option("num_assistant_tokens_schedule") not in (None, "constant"):
        raise NotImplementedError(
            "`num_assistant_tokens_schedule` must be 'constant', got "
            f"'{option('num_assistant_tokens_schedule')}'. Set it so in drafter.generation_config."
        )
    if getattr(own, "draft_tree_nodes", 0):
        raise NotImplementedError(
            f"`draft_tree_nodes` must be 0 (a chain), got {own.draft_tree_nodes}. Trees are not "
            "supported yet."
        )
    return DraftingPolicy(n_drafts, threshold, own.temperature)
