"""Drafter config spellings: which formats exist, how each is read, which one is written.

Pure functions from dict to dict, so that a format can be tested without a model. Everything a
drafter's `config.json` may say ends up in one flat dict; what this package does not implement is
refused by name, because a key that is read and dropped gives a drafter that runs and drafts badly.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import GenerationConfig, Qwen3Config

from .rope_dflash import read_rope
from .values_dflash import check_names

#: Class names that mean "DFlash body, nothing added" (z-lab, AngelSlim, NeMo Automodel).
DFLASH_ARCHITECTURES = ("DFlashDraftModel", "QwenDFlashDraftModel", "Qwen3DFlashDraftModel")
#: AngelSlim's name, and the one seen in community repositories.
DFLARE_ARCHITECTURES = ("QwenDFlareDraftModel", "DFlareDraftModel", "Qwen3DFlareDraftModel")
NATIVE_ARCHITECTURES = ("MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel")

#: Meta's tokenizer; the native config has no `vocab_size` and vLLM fills in the same number.
NATIVE_VOCAB_SIZE = 202048
NATIVE_ROPE_THETA = 500000.0

QWEN3_NUM_LAYERS = 32  # what Qwen3Config takes when the number is not given

#: Formats this package does not read, with what to do about each.
REFUSED_FORMATS = {
    "speculators": (
        "a vLLM speculators checkpoint (`speculators_model_type`): its layer ids are shifted by "
        "one and it may have a reduced vocabulary. Serve it with vLLM, or convert it: "
        "`hf-dflash convert PATH OUT --to hf-dflash --target TARGET`"
    ),
    "domino": "a Domino drafter (GRU head). Use a plain DFlash drafter of the same target",
    "dspark": (
        "a DSpark / DeepSpec drafter (the anchor slot already predicts, Markov or confidence "
        "head). Use a plain DFlash drafter of the same target"
    ),
    "dflash2": (
        "a DFlash 2 drafter (convolutions and a candidate selector). Use a DFlash or DFlare "
        "drafter of the same target"
    ),
    "dfly": "a DFly drafter (hidden correction). Use a DFlash or DFlare drafter of the same target",
    "laguna": (
        "a Laguna drafter (gated attention, one norm per tap). Use a plain DFlash drafter of the "
        "same target"
    ),
}

#: Keys that may stand at the top level or in `dflash_config`; the nested value wins, as in z-lab's
#: code and SGLang.
DRAFTER_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "target_hidden_size",
    "is_causal",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)
#: Left behind by training code; they say nothing about the forward pass.
TRAINING_RESIDUE = frozenset({"num_anchors", "loss_decay_gamma", "attention_backend", "mask_token"})
#: Keys whose listed values change nothing; any other value asks for something not implemented.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash"),
    "attention_mode": (None, "gqa", "mha"),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "use_aux_hidden_state": (None, True),
    "enable_hidden_correction": (None, False),
    "enable_confidence_head": (None, False),
    "markov_rank": (None, 0),
    "sample_from_anchor": (None, False),
    "shift_label": (None, False),
    "has_embed_tokens": (None, False),
    "has_lm_head": (None, False),
    "has_own_lm_head": (None, False),
    "use_gemma_norm": (None, False),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "logit_scale": (None, 1, 1.0),
}
#: Drafting policy: it has a file of its own, which transformers saves next to the config.
POLICY_KEYS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "draft_tree_nodes",
    "temperature",
)
#: Qwen3's and transformers' own fields, and what transformers takes besides.
PASSED_ON = frozenset(field.name for field in dataclasses.fields(Qwen3Config)) | {
    "torch_dtype",
    "num_labels",
    "name_or_path",
    "_name_or_path",
    "output_attentions",
    "attn_implementation",
    "experts_implementation",
    "auto_map",
    "quantization_config",
}
#: Without effect on a drafter: sampling options and what older releases of transformers wrote.
DROPPED = (frozenset(GenerationConfig().to_dict()) - PASSED_ON - frozenset(POLICY_KEYS)) | {
    "model_type",
    "tie_word_embeddings",
    "is_encoder_decoder",
    "use_bfloat16",
    "torchscript",
    "pruned_heads",
    "tf_legacy_loss",
    "_commit_hash",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "add_cross_attention",
    "tie_encoder_decoder",
    "cross_attention_hidden_size",
    "finetuning_task",
    "is_decoder",
    "prefix",
    "task_specific_params",
    "tokenizer_class",
    "sep_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "early_stopping",
    "num_beam_groups",
    "diversity_penalty",
    "pretraining_tp",
}


def detect_format(config: Mapping[str, Any], tensor_names: Iterable[str] = ()) -> str:
    """Say which format a checkpoint is in, from its config and, better, from its tensor names.

    Args:
        config: `config.json` as a dict.
        tensor_names: Names in the weights file; empty when only the config is at hand.

    Returns:
        "dflash", "dflare", "native", or a key of `REFUSED_FORMATS`.
    """
    names = list(tensor_names)
    nested = nested_section(config)
    check_names("architectures", config.get("architectures"))
    architectures = " ".join(config.get("architectures") or ())
    model_type = config.get("model_type")

    def has(*parts: str) -> bool:
        return any(part in name for name in names for part in parts)

    projector = nested.get("projector_type")
    if "speculators_model_type" in config:
        return "speculators"
    if projector == "domino" or has("prefix_gru") or "Domino" in architectures:
        return "domino"
    if projector == "dspark" or has("markov_", "confidence_head") or "DSpark" in architectures:
        return "dspark"
    if (
        "DFlash2" in architectures
        or "conv_kernel_size" in nested
        or has("candidate_selector", "attention_conv")
    ):
        return "dflash2"
    if (
        has("hidden_correction")
        or nested.get("enable_hidden_correction")
        or "DFly" in architectures
    ):
        return "dfly"
    if model_type == "laguna" or "Laguna" in architectures or has(".g_proj.", "aux_hidden_norms"):
        return "laguna"
    if (
        model_type == "muse_glimmer_assistant"
        or has("encoder.fc.")
        or "MuseGlimmerAssistant" in architectures
    ):
        return "native"
    if has("layer_fusion_weights") or "dflare_config" in config or "DFlare" in architectures:
        return "dflare"
    return "dflash"


def nested_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `dflash_config` (or the community's `dflare_config`), empty where there is none."""
    for key in ("dflash_config", "dflare_config"):
        section = config.get(key)
        if section is not None:
            if not isinstance(section, Mapping):
                raise TypeError(
                    f"`{key}` must be an object with the drafter's keys, got {section!r}."
                )
            return dict(section)
    return {}


def read_config_dict(config: Mapping[str, Any]) -> dict[str, Any]:
    """Turn any known spelling of a drafter's config into flat keyword arguments.

    Args:
        config: A `config.json` as a dict, or the keyword arguments of `DFlashConfig`.

    Returns:
        Qwen3's fields plus the drafter's own, each at most once; `rope_parameters` in one spelling.

    Raises:
        ValueError: If the format is not one this package reads, a key is unknown or asks for
            something not implemented, or two spellings of one thing disagree.
    """
    raw = {key: value for key, value in config.items() if key not in DROPPED}
    kind = _readable_format(config)
    nested = nested_section(raw)
    for key in ("dflash_config", "dflare_config"):
        raw.pop(key, None)
    fields: dict[str, Any] = {"architecture": raw.pop("architecture", None) or kind}
    if kind == "native":
        _fill_native_defaults(raw, nested)
        fields["architecture"] = "dflash"
    for key in DRAFTER_KEYS:
        outer, inner = raw.pop(key, None), nested.pop(key, None)
        if (outer if inner is None else inner) is not None:
            fields[key] = outer if inner is None else inner
    _read_causality(fields, nested)
    fields |= _read_attention(raw, nested)
    fields["rope_parameters"] = read_rope(raw)
    _refuse_reduced_vocabulary(raw)
    for section, where in ((nested, "dflash_config"), (raw, "the drafter's config")):
        _refuse_leftovers(section, where)
    fields |= {key: raw[key] for key in raw if key in PASSED_ON}
    return fields


def _readable_format(config: Mapping[str, Any]) -> str:
    kind = detect_format(config)
    if kind in REFUSED_FORMATS:
        raise ValueError(f"This checkpoint is {REFUSED_FORMATS[kind]}.")
    known = (*DFLASH_ARCHITECTURES, *DFLARE_ARCHITECTURES, *NATIVE_ARCHITECTURES)
    architectures = config.get("architectures") or []
    if architectures and not any(name in known for name in architectures):
        raise ValueError(
            f"`architectures` must be one of {list(known)} for a DFlash or DFlare drafter, got "
            f"{list(architectures)}. If this is the target, load it with AutoModelForCausalLM and "
            "pass the drafter's own repository here."
        )
    model_type = config.get("model_type", "qwen3")
    if model_type not in ("qwen3", "gpt_oss", "muse_glimmer_assistant"):
        raise ValueError(
            '`model_type` of a DFlash drafter is "qwen3" for every target family, got '
            f"{model_type!r}. "
            "If its layers are Qwen3 layers, set it to that in config.json."
        )
    return kind


def _fill_native_defaults(raw: dict[str, Any], nested: dict[str, Any]) -> None:
    """Say explicitly what the native class takes for granted.

    Its sliding layers look both ways, ours are causal unless told otherwise.
    """
    if "is_causal" not in raw and not {"is_causal", "causal"} & nested.keys():
        raw["is_causal"] = False
    if raw.get("layer_types") is None:
        n_layers = raw.get("num_hidden_layers", QWEN3_NUM_LAYERS)
        raw["layer_types"] = ["sliding_attention"] * n_layers
    raw.setdefault("vocab_size", NATIVE_VOCAB_SIZE)
    if raw.get("rope_parameters") is None and raw.get("rope_theta") is None:
        raw["rope_theta"] = NATIVE_ROPE_THETA


def _read_causality(fields: dict[str, Any], nested: dict[str, Any]) -> None:
    """Merge vLLM's `dflash_config.causal` with everybody else's `is_causal`."""
    causal = nested.pop("causal", None)
    if causal is None:
        return
    if fields.setdefault("is_causal", causal) != causal:
        raise ValueError(
            f"`is_causal` ({fields['is_causal']}) and `dflash_config.causal` ({causal}) must "
            "agree, since each engine reads only one of them. Delete the wrong one."
        )


def _read_attention(raw: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
    """Settle `layer_types` and `sliding_window` before Qwen3Config nulls the window.

    Qwen3Config drops `sliding_window` unless `use_sliding_window` is set, although the field's
    checkpoints decide by `layer_types` alone. ModelOpt marks its windows with `use_swa` instead.
    """
    num_layers = raw.get("num_hidden_layers", QWEN3_NUM_LAYERS)
    if not isinstance(num_layers, int):
        raise TypeError(f"`num_hidden_layers` must be an integer, got {num_layers!r}.")
    layer_types = raw.pop("layer_types", None)
    check_names("layer_types", layer_types)
    window = raw.pop("sliding_window", None)
    use_window = raw.pop("use_sliding_window", None)
    use_swa = nested.pop("use_swa", None)
    swa_window = nested.pop("swa_window_size", None)
    window = swa_window if swa_window is not None else window
    if layer_types is None:
        # Qwen3's rule for files that have no list yet.
        first_sliding = raw.get("max_window_layers", 28) if use_window else num_layers
        kinds = ("full_attention", "sliding_attention")
        layer_types = [kinds[index >= first_sliding] for index in range(num_layers)]
    is_sliding = "sliding_attention" in layer_types
    if use_swa is False and is_sliding:
        raise ValueError(
            "`dflash_config.use_swa` is false but `layer_types` lists sliding_attention layers. "
            "Delete `use_swa`, or make every layer full_attention."
        )
    if use_swa and not is_sliding:
        layer_types, is_sliding = ["sliding_attention"] * len(layer_types), True
    return {
        "layer_types": list(layer_types),
        "sliding_window": window if is_sliding else None,
        "use_sliding_window": is_sliding,
    }


def _refuse_reduced_vocabulary(raw: dict[str, Any]) -> None:
    size = raw.pop("draft_vocab_size", None)
    if size is not None and size != raw.get("vocab_size", size):
        raise ValueError(
            f"`draft_vocab_size` must equal `vocab_size` ({raw['vocab_size']}), got {size}: a "
            "reduced draft vocabulary is not supported. Use a drafter that shares the target's "
            "head."
        )


def _refuse_leftovers(section: dict[str, Any], where: str) -> None:
    """Raise for every key of ``section`` that this package does not honour."""
    unknown = []
    for key, value in section.items():
        if key in NEUTRAL_VALUES:
            if value not in NEUTRAL_VALUES[key]:
                raise ValueError(
                    f"`{key}` = {value!r} in {where} is not supported "
                    f"({NEUTRAL_VALUES[key][-1]!r} is). The drafter needs an engine that "
                    "implements it; use a plain DFlash drafter here."
                )
        elif key in POLICY_KEYS:
            raise ValueError(
                f"`{key}` belongs in the drafter's generation_config.json, got it in {where}. Set "
                f"`drafter.generation_config.{key}` and save the drafter."
            )
        elif key not in TRAINING_RESIDUE and (where == "dflash_config" or key not in PASSED_ON):
            unknown.append(key)
    if unknown:
        raise ValueError(
            f"Unknown keys {sorted(unknown)} in {where}. Correct the spelling, or delete a key "
            "that does not change the drafter's forward pass."
        )


def write_config_dict(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Lay flat fields out as the field's `config.json`, readable by every engine known.

    Both homes of `block_size` and both spellings of the rotary embedding are written, since each
    engine reads only one. What is at its default is left out where some engine takes the mere
    presence of the key as a request (`is_causal`, `target_hidden_size`).
    """
    out = dict(flat)
    # A DFlare file must not call itself DFlashDraftModel: SGLang drops unknown tensors silently and
    # would run it without its fusion weights. AngelSlim's name is refused by every other engine.
    is_dflare = out.pop("architecture") == "dflare"
    out["architectures"] = [DFLARE_ARCHITECTURES[0] if is_dflare else DFLASH_ARCHITECTURES[0]]
    out["model_type"] = "qwen3"
    nested = {key: out[key] for key in ("block_size", "mask_token_id", "target_layer_ids")}
    for key in ("mask_token_id", "target_layer_ids"):
        del out[key]
    for key, default in (
        ("input_embedding_scale", 1.0),
        ("output_multiplier", 1.0),
        ("final_logit_softcapping", None),
    ):
        if out[key] == default:
            del out[key]
        else:
            nested[key] = out[key]
    if out["is_causal"] is None:
        del out["is_causal"]
    else:
        nested["causal"] = out["is_causal"]
    out["dflash_config"] = nested
    if out["target_hidden_size"] == out["hidden_size"]:
        del out["target_hidden_size"]
    rope = dict(out["rope_parameters"])
    out["rope_theta"] = rope.pop("rope_theta")
    out["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    out["tie_word_embeddings"] = False
    if out.get("dtype") is None:
        out.pop("dtype", None)
    else:
        out["torch_dtype"] = out["dtype"]
    return out
