"""`generate(assistant_model=drafter)`: the way in and the checks.

The only file that reaches into transformers. Two methods of `GenerationMixin` are wrapped when
the first drafter is built; calls without a drafter of ours go to the originals untouched.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria

from .chain_decoding import ChainDecoding
from .checkpoint_dflash import validate_generation_config
from .drafting import DraftingPolicy
from .outputs_dflash import CACHE_NAME
from .target import check_pair

#: Version of the dispatch. A copy that travelled with a checkpoint and the installed package may
#: meet in one process: the newer one serves both.
DISPATCH_VERSION = 1
#: Options of the drafting policy that transformers lets a call set.
_CALL_OPTIONS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)
_MARK = "_hf_dflash_dispatch_version"
_PLAIN = "plain generate()"
# Options of transformers' other kinds of assistants.
_OTHER_ASSISTANTS = (
    "assistant_tokenizer",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "assistant_lookbehind",
    "target_lookbehind",
    "use_mtp",
    "dola_layers",
)


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
        while hasattr(method, _MARK):  # a wrapper around ours carries our mark too
            method = method.__wrapped__
        setattr(GenerationMixin, name, method)


def _wrap_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _assisted_decoding(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = dict(inspect.signature(original).bind(self, input_ids, *args, **kwargs).arguments)
        model_kwargs = call.pop("model_kwargs", {})
        assistant = call.get("assistant_model")
        if not _is_ours(assistant, call["generation_config"]):
            if getattr(assistant, "is_dflash_drafter", False):
                _refuse_for_stock_loop(model_kwargs.get(CACHE_NAME), call["stopping_criteria"])
            return original(self, input_ids, *args, **kwargs)
        return _decode(self, input_ids, call=call, model_kwargs=model_kwargs)

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
            if getattr(assistant, "is_dflash_drafter", False):
                check_pair(self, assistant.config)
                _refuse_policy(assistant, generation_config)
            original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _refuse_policy(drafter: Any, config: GenerationConfig) -> None:
    """Refuse what transformers' own block loop would pass over."""
    policy = drafting_policy(drafter, config)
    if policy != DraftingPolicy(drafter.config.block_size - 1, None, None):
        raise ValueError(
            "`speculation_type`='dflash' asks for transformers' own block loop, which always "
            f"drafts a whole block at the call's temperature; the drafting policy is {policy}. "
            "Leave `speculation_type` out, or the policy."
        )


def _refuse_for_stock_loop(cache: Any, criteria: Iterable[Any]) -> None:
    """Refuse what makes transformers' own block loop (5.24) emit other tokens than plain decoding.

    It drafts at wrong positions behind a cache of an earlier call, and asks the criteria once a
    cycle, so what a block holds behind a stop string stays in the output.
    """
    wrong = []
    if cache is not None and cache.get_seq_length() > 0:
        wrong.append("a cache of an earlier call")
    if any(isinstance(criterion, StopStringCriteria) for criterion in criteria):
        wrong.append("`stop_strings`")
    if wrong:
        raise NotImplementedError(
            "`speculation_type`='dflash' asks for transformers' own block loop, whose tokens are "
            f"not those of plain decoding with {' and '.join(wrong)}. Leave `speculation_type` out."
        )


def _is_ours(assistant: Any, generation_config: GenerationConfig) -> bool:
    # speculation_type asks for transformers' own block loop by name: it gets it.
    return (
        getattr(assistant, "is_dflash_drafter", False)
        and getattr(generation_config, "speculation_type", None) != "dflash"
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
            f"`assistant_model` must be a drafter of this package, got {type(assistant).__name__} "
            "from a DFlash drafter's folder. AutoModel alone makes a Qwen3 model with random "
            "weights of it. Load it with DFlashDraftModel.from_pretrained(...), or, if the folder "
            "holds its code, with AutoModel.from_pretrained(..., trust_remote_code=True)."
        )


def _check_call(target: Any, mode: Any, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    """Refuse what cannot be honoured, before any work."""
    _refuse_unsupported(target, mode, config, kwargs)
    if not config.use_cache:
        raise ValueError("`use_cache` must be True to decode with a drafter, got False.")
    if config.assistant_ensemble_weight is not None:
        raise ValueError(
            "`assistant_ensemble_weight` changes what is generated, and a DFlash drafter never "
            "does. Leave it out."
        )
    speculation_type = getattr(config, "speculation_type", None)
    if speculation_type is not None:
        raise ValueError(
            "`speculation_type` must be left out, or 'dflash' for transformers' own block loop, "
            f"got '{speculation_type}'."
        )
    defaults = GenerationConfig._get_default_generation_params()
    for name in _OTHER_ASSISTANTS:
        value = getattr(config, name, None)
        if kwargs.get(name) is not None or (value and value != defaults.get(name)):
            raise ValueError(f"`{name}` has no meaning for a DFlash drafter. Leave it out.")
    drafter = kwargs["assistant_model"]
    drafter.config.validate_drafter()
    check_pair(target, drafter.config)
    drafting_policy(drafter, config)


def refuse_target(target: Any) -> None:
    """Refuse a target that cannot decode with any drafter, before any work.

    Raises:
        NotImplementedError: It is an encoder-decoder, or keeps a state that cannot be rolled back.
    """
    name = type(target).__name__
    _refuse(
        (target.config.is_encoder_decoder, f"{name}, an encoder-decoder target,", _PLAIN),
        (
            getattr(target, "_is_stateful", False),
            f"{name}, whose recurrent state cannot be rolled back,",
            _PLAIN,
        ),
    )


def _refuse_unsupported(
    target: Any, mode: Any, config: GenerationConfig, kwargs: dict[str, Any]
) -> None:
    refuse_target(target)
    name = type(target).__name__
    n_sequences = config.num_return_sequences
    _refuse(
        (
            _learns_prompt(target),
            "a PEFT adapter of virtual tokens, which feeds one token a forward,",
            f"an adapter of weights (LoRA), or {_PLAIN}",
        ),
        (config.num_beams > 1, f"`num_beams`={config.num_beams}", "num_beams=1"),
        (n_sequences > 1, f"`num_return_sequences`={n_sequences}", "one call a sequence"),
        (mode != GenerationMode.ASSISTED_GENERATION, f"generation mode '{mode.value}'", _PLAIN),
        (kwargs.get("synced_gpus"), "`synced_gpus`", "a target not sharded by ZeRO-3 or FSDP"),
    )
    modes = getattr(target, "_supported_generation_modes", None)
    if modes is not None and mode not in modes:
        raise ValueError(f"`{name}` supports only {modes}, got '{mode}'.")


def _refuse(*unsupported: tuple[Any, str, str]) -> None:
    """Refuse what applies: whether it does, what it is, what to use in its place."""
    for applies, what, instead in unsupported:
        if applies:
            raise NotImplementedError(
                f"Decoding with a DFlash drafter does not support {what} yet. Use {instead}."
            )


def _learns_prompt(target: Any) -> bool:
    # PEFT puts its own method in the target's place for the time of a call.
    adapter = getattr(target.prepare_inputs_for_generation, "__self__", None)
    config = getattr(adapter, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))


def _decode(
    target: Any, input_ids: Tensor, *, call: dict[str, Any], model_kwargs: dict[str, Any]
) -> Any:
    """Check what only the prepared inputs show, then decode."""
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
        call=call,
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
        ValueError: An option is unknown or out of range.
        NotImplementedError: A schedule other than "constant", or a tree.
    """
    defaults = GenerationConfig._get_default_generation_params()
    policy = copy.copy(drafter.generation_config)
    for name in _CALL_OPTIONS:
        value = getattr(call_config, name, None)
        if value not in (None, defaults.get(name)):
            setattr(policy, name, value)
    block_size = drafter.config.block_size
    validate_generation_config(policy, block_size)
    return DraftingPolicy(
        policy.num_assistant_tokens or block_size - 1,
        policy.assistant_confidence_threshold,
        policy.temperature,
    )
