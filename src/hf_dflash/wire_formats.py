"""The folders other engines publish: what each can hold, and how its `config.json` is written.

Reading all of them is `formats_dflash`'s and `speculators_format`'s. A format that has no place for
something a drafter says is refused by that field's name, since what is left out drafts badly and
says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .configuration_dflash import DFlashConfig
from .formats_dflash import (
    DFLARE_ARCHITECTURES,
    DFLASH_ARCHITECTURES,
    NATIVE_ARCHITECTURES,
)
from .speculators_format import write_speculators_config

#: Every format by the name the command takes, with the rotary embedding's spellings it may have;
#: the first is what it is written in by default.
FORMATS: dict[str, tuple[str, ...]] = {
    "hf-dflash": ("both",),
    "zlab": ("both", "theta", "parameters"),
    "flat": ("both", "theta", "parameters"),
    "speculators": ("parameters",),
    "modelopt": ("theta",),
    "angelslim": ("both", "theta", "parameters"),
    "native": ("parameters",),
}
ROPE_SPELLINGS = {
    "both": (),
    "theta": ("rope_parameters",),
    "parameters": ("rope_theta", "rope_scaling"),
}
#: Names of tensors that are not ours, by format.
RENAMED: dict[str, dict[str, str]] = {
    "native": {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
}
_SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}


def name_format(raw: Mapping[str, Any], kind: str) -> str:
    """Say which of `FORMATS` a readable checkpoint is most likely in.

    Args:
        raw: Its `config.json`.
        kind: From `formats_dflash.detect_format`.
    """
    if kind in ("speculators", "native"):
        return kind
    nested = raw.get("dflash_config") or raw.get("dflare_config") or {}
    auto_map = raw.get("auto_map") or {}
    # Before the code: a push adds it to a drafter of AngelSlim, too, whose name stays.
    if any(name.startswith("Qwen") for name in raw.get("architectures") or ()):
        return "angelslim"
    if "modeling_dflash.DFlashDraftModel" in str(auto_map.get("AutoModel")):
        return "hf-dflash"
    if kind == "dflare":
        return "angelslim"
    if not nested:
        return "flat"
    if {"use_swa", "swa_window_size", "causal"} & set(nested) and "is_causal" not in raw:
        return "modelopt"
    return "zlab"


def check_format_name(name: str, option: str) -> None:
    """Refuse a format that is not known.

    Raises:
        ValueError: Naming the option and the known formats.
    """
    if name not in FORMATS:
        raise ValueError(f"`{option}` must be one of {', '.join(FORMATS)}, got {name!r}.")


def choose_rope_spelling(rope: str | None, to: str) -> str:
    """Return the spelling of the rotary embedding to write.

    Raises:
        ValueError: If the format has no such spelling.
    """
    spellings = FORMATS[to]
    if rope is None:
        return spellings[0]
    if rope not in spellings:
        raise ValueError(
            f"`rope` must be {' or '.join(spellings)} for the format {to}, got {rope!r}. Leave it "
            "out for what the format's readers expect."
        )
    return rope


def check_can_hold(config: DFlashConfig, to: str) -> None:
    """Refuse a drafter that a format has no place for.

    Args:
        config: Of the drafter.
        to: One of `FORMATS`.

    Raises:
        ValueError: Naming each field, its value and why.
    """
    problems = [f"`{field}` = {value!r} ({why})" for field, value, why in _unheld(config, to)]
    if problems:
        raise ValueError(
            f"The format {to} cannot hold this drafter: {'; '.join(problems)}. Choose another "
            "format; hf-dflash holds everything."
        )


def _unheld(config: DFlashConfig, to: str) -> Iterator[tuple[str, Any, str]]:
    if config.architecture == "dflare" and to not in ("hf-dflash", "angelslim"):
        yield "architecture", "dflare", "it has DFlash drafters only"
    if to in ("speculators", "modelopt", "native"):
        for name, neutral in _SCALES.items():
            if getattr(config, name) != neutral:
                yield name, getattr(config, name), "its readers would ignore it"
    if to == "modelopt":
        yield from _unheld_by_modelopt(config)
    if to == "speculators" and config.is_causal:
        yield "is_causal", True, "it knows causal sliding layers and full layers that are not"
    if to == "native":
        yield from _unheld_by_native(config)


def _unheld_by_modelopt(config: DFlashConfig) -> Iterator[tuple[str, Any, str]]:
    if len(set(config.layer_types)) > 1:
        yield "layer_types", config.layer_types, "one kind of attention for all its layers"


def _unheld_by_native(config: DFlashConfig) -> Iterator[tuple[str, Any, str]]:
    if any(config.layer_is_causal(i) for i in range(config.num_hidden_layers)):
        why = "all its layers look both ways; a sliding one is causal unless this is false"
        yield "is_causal", config.is_causal, why
    if config.attention_bias:
        yield "attention_bias", True, "its projections have no bias"
    if config.target_hidden_size != config.hidden_size:
        yield "target_hidden_size", config.target_hidden_size, "it must equal `hidden_size`"


def write_config(
    config: DFlashConfig, to: str, rope: str, record: Mapping[str, Any]
) -> dict[str, Any]:
    """Lay a drafter's config out as a format has it. `hf-dflash` is `save_pretrained`'s own.

    Args:
        config: Of a drafter that the format can hold.
        to: One of `FORMATS`.
        rope: From `choose_rope_spelling`.
        record: What only speculators' format says.
    """
    if to == "speculators":
        return write_speculators_config(config, record)
    out = {key: value for key, value in config.to_diff_dict().items() if key != "auto_map"}
    for key in ROPE_SPELLINGS[rope]:
        del out[key]
    if to == "flat":
        _flatten(out)
    elif to == "modelopt":
        _as_modelopt(out)
    elif to == "angelslim":
        known = DFLARE_ARCHITECTURES if config.architecture == "dflare" else DFLASH_ARCHITECTURES
        out["architectures"] = [name for name in known if name.startswith("QwenDF")]
    elif to == "native":
        _flatten(out)
        _as_native(out)
    return out


def _flatten(out: dict[str, Any]) -> None:
    """Move the drafter's keys from `dflash_config` to the top level, their only place."""
    nested = out.pop("dflash_config")
    nested.pop("causal", None)  # `is_causal` says it
    out.update(nested)


def _as_modelopt(out: dict[str, Any]) -> None:
    """Say windows and causality in `dflash_config`, once."""
    nested = out["dflash_config"]
    del nested["block_size"]
    out.pop("is_causal", None)  # it stands there as `causal`
    out.pop("dtype", None)
    if out["use_sliding_window"]:
        nested |= {"use_swa": True, "swa_window_size": out["sliding_window"]}


def _as_native(out: dict[str, Any]) -> None:
    """Name the class; what it has no field for is left to readers that look for it.

    vLLM reads `vocab_size`, this package the rest. The class itself keeps them unread.
    """
    out |= {"architectures": list(NATIVE_ARCHITECTURES[:1]), "model_type": "muse_glimmer_assistant"}
    out.setdefault("is_causal", None)  # read as "false" if it were missing
    for key in ("attention_bias", "torch_dtype", "use_sliding_window"):
        out.pop(key, None)
    if out["sliding_window"] is None:  # the class takes integers only, and needs it for none
        del out["sliding_window"]
