"""Rules of one engine each: how it reads taps, mask token, windows, causality, names.

Source: the engines' own code, vLLM 0.33, SGLang 0.5.23, speculators 0.9, transformers 5.24; for
llama.cpp its converter's description.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .doctor_facts import FAULT, WARNING, Facts, Finding
from .doctor_rules import found
from .geometry_dflash import default_target_layer_ids
from .speculators_format import is_list_of_ids

SLIDING, FULL = "sliding_attention", "full_attention"
VLLM_ARCHITECTURES = (
    "DFlashDraftModel",
    "MuseGlimmerAssistantModel",
    "DFlashMuseGlimmerAssistantModel",
    "DFlashSpeculator",
)
SGLANG_ARCHITECTURES = ("DFlashDraftModel", "MuseGlimmerAssistantModel")
_SERVERS = ("vllm", "sglang")
RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)


def engine_findings(facts: Facts) -> Iterator[Finding]:
    """What each engine will stumble over by its own way of reading."""
    for rule in (
        _architectures,
        _dflare,
        _taps,
        _mask,
        _layer_types,
        _windows,
        _causality,
        _anchor,
        _scales,
        _activation,
        _sglang_sizes,
        _vllm_speculators,
        _speculators,
        _native,
        _remote_code,
    ):
        yield from rule(facts)


def _architectures(facts: Facts) -> Iterator[Finding]:
    names = list(facts.raw.get("architectures") or ())
    remedy = 'Write ["DFlashDraftModel"], with "model_type": "qwen3".'
    if not set(names) & set(VLLM_ARCHITECTURES) and facts.kind != "speculators":
        reason = f"`architectures` {names} is not registered; only names that start with DFlash are"
        yield from found(["vllm"], FAULT, "architectures", reason, remedy)
    if not set(names) & set(SGLANG_ARCHITECTURES):
        reason = f"`architectures` {names} is not one of its draft models"
        yield from found(["sglang"], FAULT, "architectures", reason, remedy)
    if names[:1] != ["DFlashDraftModel"]:
        reason = f"`architectures` {names}: the converter knows DFlashDraftModel"
        yield from found(["llama.cpp"], FAULT, "architectures", reason, remedy)
    known = ("qwen3", "gpt_oss", "muse_glimmer_assistant")
    if facts.kind != "speculators" and facts.raw.get("model_type") not in known:
        reason = f"`model_type` {facts.raw.get('model_type')!r} is no config class they have"
        yield from found(["vllm", "sglang", "llama.cpp"], FAULT, "model_type", reason, remedy)


def _dflare(facts: Facts) -> Iterator[Finding]:
    """Tensors of a DFlare drafter under DFlash's name, which servers believe."""
    if facts.kind != "dflare" or "DFlashDraftModel" not in (facts.raw.get("architectures") or ()):
        return
    names = sorted(n for n in facts.headers if "layer_fusion" in n or "_proj_target." in n)
    remedy = 'Write ["QwenDFlareDraftModel"], and serve it with this package.'
    reason = f"{len(names)} tensors are DFlare's: SGLang drops them without a word"
    yield from found(["sglang"], FAULT, "architectures", reason, remedy)
    reason = f"{len(names)} tensors are DFlare's, of which it has none ({', '.join(names[:2])}...)"
    yield from found(["vllm", "llama.cpp"], FAULT, "architectures", reason, remedy)


def _taps(facts: Facts) -> Iterator[Finding]:
    if facts.kind == "speculators":
        return
    taps, aux = facts.lookup("target_layer_ids"), facts.raw.get("eagle_aux_hidden_state_layer_ids")
    remedy = "Write `target_layer_ids`, the 0-based layers the drafter was trained with."
    for name, value in (("target_layer_ids", taps), ("eagle_aux_hidden_state_layer_ids", aux)):
        if value and not is_list_of_ids(value):
            reason = f"`{name}` must be a list of layers, got {value!r}"
            yield from found(["vllm", "sglang", "llama.cpp"], FAULT, name, reason, remedy)
            return
    if not taps and not aux:
        reason = "no taps are written: vLLM takes EAGLE-3's three, and `fc` does not fit"
        yield from found(["vllm"], FAULT, "target_layer_ids", reason, remedy)
        yield from found(
            ["sglang"], FAULT, "target_layer_ids", f"no taps: SGLang takes {_spread(facts)}", remedy
        )
        yield from found(["llama.cpp"], FAULT, "target_layer_ids", "no taps are written", remedy)
        return
    if taps and aux and [index + 1 for index in taps] != list(aux):
        reason = f"vLLM reads `eagle_aux_hidden_state_layer_ids` {aux}, not {taps} + 1"
        yield from found(["vllm"], FAULT, "eagle_aux_hidden_state_layer_ids", reason, remedy)
    n_layers = facts.lookup("num_target_layers")
    if taps and isinstance(n_layers, int) and not all(0 <= index < n_layers for index in taps):
        reason = f"taps {taps} must lie in 0..{n_layers - 1} (`num_target_layers` {n_layers})"
        yield from found(["sglang"], FAULT, "target_layer_ids", reason, remedy)
    if not facts.nested and facts.kind != "native":
        reason = "taps and mask token stand at the top level, which its older runner does not read"
        nested = "Write them into `dflash_config`: `hf-dflash convert PATH OUT --to zlab`."
        yield from found(["vllm"], WARNING, "dflash_config", reason, nested)


def _spread(facts: Facts) -> str:
    n_target, n_draft = facts.lookup("num_target_layers"), facts.raw.get("num_hidden_layers")
    if isinstance(n_target, int) and isinstance(n_draft, int) and n_draft <= n_target:
        return f"the default spread {default_target_layer_ids(n_target, n_draft)}"
    return "the default spread"


def _mask(facts: Facts) -> Iterator[Finding]:
    if facts.kind == "speculators":
        return
    mask, vocab = facts.lookup("mask_token_id"), facts.raw.get("vocab_size")
    remedy = "Write `mask_token_id`, the row of the target's embeddings it was trained with."
    if mask is None:
        reason = "no mask token is written"
        yield from found(["vllm", "llama.cpp"], FAULT, "mask_token_id", reason, remedy)
        reason += ": SGLang adds <|MASK|> to the tokenizer, an untrained row"
        yield from found(["sglang"], FAULT, "mask_token_id", reason, remedy)
    elif isinstance(mask, int) and isinstance(vocab, int) and not 0 <= mask < vocab:
        reason = f"`mask_token_id` {mask} is no row of a vocabulary of {vocab}"
        yield from found(["vllm", "sglang", "llama.cpp"], FAULT, "mask_token_id", reason, remedy)


def _layer_types(facts: Facts) -> Iterator[Finding]:
    types, n_layers = facts.layer_types, facts.decoder.get("num_hidden_layers")
    if types and len(types) != n_layers:
        reason = f"`layer_types` has {len(types)} entries for {n_layers} layers"
        yield from found(["vllm", "sglang"], FAULT, "layer_types", reason, "One for each layer.")
    unknown = [kind for kind in types if kind not in (FULL, SLIDING)]
    if unknown:
        reason = f"`layer_types` has {unknown}: there are {FULL} and {SLIDING} only"
        remedy = "Write the names in full."
        yield from found(["vllm", "sglang"], FAULT, "layer_types", reason, remedy)


def _windows(facts: Facts) -> Iterator[Finding]:
    types, decoder = facts.layer_types, facts.decoder
    if facts.nested.get("use_swa") and SLIDING not in types:
        reason = "`use_swa` is ignored: SGLang runs every layer with full attention"
        remedy = "Write the windows as `layer_types`: `hf-dflash convert PATH OUT --to zlab`."
        yield from found(["sglang"], FAULT, "use_swa", reason, remedy)
    if SLIDING not in types:
        return
    # Qwen3's config class, which servers load, discards the window unless this is set.
    dropped = facts.kind != "native" and not decoder.get("use_sliding_window")
    window = None if dropped else decoder.get("sliding_window")
    why = "`use_sliding_window` is not true, so the config class discards the window"
    if not dropped:
        why = "`sliding_window` is missing"
    remedy = "Write `sliding_window` and `use_sliding_window`: true."
    if window is None:
        yield from found(["sglang"], FAULT, "sliding_window", f"sliding layers, but {why}", remedy)
        if facts.nested.get("swa_window_size") is None:
            yield from found(
                ["vllm"], FAULT, "sliding_window", f"sliding layers, but {why}", remedy
            )
    other = facts.nested.get("swa_window_size")
    if None not in (window, other) and window != other:
        reason = f"SGLang takes `sliding_window` ({window}), not `swa_window_size` ({other})"
        same = "Write the window the drafter was trained with in both places."
        yield from found(["sglang"], FAULT, "sliding_window", reason, same)
    if FULL in types:
        reason = "sliding and full layers: only the V2 model runner takes both"
        remedy = "It is the default; do not set VLLM_USE_V2_MODEL_RUNNER=0."
        yield from found(["vllm"], WARNING, "layer_types", reason, remedy)


def _causality(facts: Facts) -> Iterator[Finding]:
    own, nested = facts.raw.get("is_causal"), facts.nested.get("causal")
    remedy = "Write `is_causal` and `dflash_config.causal` with the same value, or neither."
    if own is not None and nested is not None and own != nested:
        reason = f"`is_causal` ({own}) and `dflash_config.causal` ({nested}) differ"
        yield from found(["vllm", "sglang"], FAULT, "is_causal", reason, remedy)
    defaults = {kind == SLIDING for kind in facts.layer_types} or {False}
    if own is None and nested is not None and defaults != {bool(nested)}:
        reason = f"SGLang ignores `dflash_config.causal` ({nested}) and goes by `layer_types`"
        yield from found(["sglang"], FAULT, "is_causal", reason, remedy)


def _anchor(facts: Facts) -> Iterator[Finding]:
    if facts.kind != "speculators" and facts.lookup("sample_from_anchor"):
        reason = "`sample_from_anchor` is true: vLLM stops, as the anchor's slot would predict too"
        remedy = "Use a drafter trained without it."
        yield from found(["vllm"], FAULT, "sample_from_anchor", reason, remedy)


def _scales(facts: Facts) -> Iterator[Finding]:
    scale = facts.lookup("input_embedding_scale")
    if scale not in (None, 1, 1.0):
        reason = f"`input_embedding_scale` {scale} is ignored: blocks start from unscaled rows"
        remedy = "Serve it with an engine that scales them; vLLM does for Gemma 4 from #41703 on."
        yield from found(["vllm", "llama.cpp"], FAULT, "input_embedding_scale", reason, remedy)
        reason = f"`input_embedding_scale` {scale}: SGLang uses the target class's own scale"
        yield from found(["sglang"], WARNING, "input_embedding_scale", reason, remedy)
    for name in ("output_multiplier", "final_logit_softcapping"):
        value = facts.lookup(name)
        if value not in (None, 1, 1.0):
            reason = f"`{name}` {value} is ignored: sampled drafts have another temperature"
            remedy = "Greedy drafts are the same; draft greedily."
            yield from found(["vllm", "sglang"], WARNING, name, reason, remedy)


def _activation(facts: Facts) -> Iterator[Finding]:
    act = facts.decoder.get("hidden_act", "silu")
    if act != "silu":
        reason = f"`hidden_act` {act!r}: its draft layers have silu only"
        remedy = "Serve it with this package."
        yield from found(["vllm"], FAULT, "hidden_act", reason, remedy)
        if act != "swigluoai":
            yield from found(["sglang"], FAULT, "hidden_act", reason, remedy)


def _sglang_sizes(facts: Facts) -> Iterator[Finding]:
    width, hidden = facts.raw.get("target_hidden_size"), facts.decoder.get("hidden_size")
    if width not in (None, hidden):
        reason = f"`target_hidden_size` {width} is not read: `fc` is built for taps of {hidden}"
        remedy = "Serve it with vLLM, or train with the target's width."
        yield from found(["sglang", "speculators"], FAULT, "target_hidden_size", reason, remedy)


def _vllm_speculators(facts: Facts) -> Iterator[Finding]:
    if facts.kind != "speculators":
        return
    non_causal = facts.raw.get("sliding_window_non_causal")
    if non_causal is None and SLIDING in facts.layer_types:
        reason = "`sliding_window_non_causal` is missing: vLLM lets windows look both ways then"
        remedy = "Windows are causal in this format unless it says so; write false, or true."
        yield from found(["vllm"], FAULT, "sliding_window_non_causal", reason, remedy)
    if non_causal is False and FULL in facts.layer_types:
        reason = "`sliding_window_non_causal` false makes every layer causal, the full ones too"
        remedy = "vLLM 0.33's fault (#56692). Convert to zlab, or delete the key if none slides."
        yield from found(["vllm"], FAULT, "sliding_window_non_causal", reason, remedy)
    proposal, verifier = _speculators_section(facts)
    tokens, block_size = proposal.get("speculative_tokens"), facts.raw.get("block_size")
    if not isinstance(tokens, int) or verifier.get("name_or_path") is None:
        reason = "`speculators_config` must name `speculative_tokens` and `verifier.name_or_path`"
        remedy = "Convert anew: `hf-dflash convert PATH OUT --to speculators --target TARGET`."
        yield from found(["vllm", "speculators"], FAULT, "speculators_config", reason, remedy)
    elif isinstance(block_size, int) and tokens != block_size - 1:
        severity = FAULT if tokens >= block_size else WARNING
        reason = (
            f"`speculative_tokens` is {tokens}; a block of {block_size} drafts {block_size - 1}"
        )
        remedy = f"Write {block_size - 1}."
        yield from found(["vllm"], severity, "speculative_tokens", reason, remedy)


def _speculators_section(facts: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first proposal and the verifier, empty where the config has none."""
    section = _object(facts.raw.get("speculators_config"))
    methods = section.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    return _object(first), _object(section.get("verifier"))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _speculators(facts: Facts) -> Iterator[Finding]:
    if facts.kind != "speculators":
        return
    if facts.config_problem is not None:
        yield from found(
            ["speculators", "vllm"], FAULT, "config.json", facts.config_problem, "Correct it so."
        )
        return
    size, vocab = facts.raw.get("draft_vocab_size"), facts.decoder.get("vocab_size")
    if size == vocab:
        return
    for name, rows in (("lm_head.weight", size), ("d2t", size), ("t2d", vocab)):
        shape = facts.shape(name)
        if shape is None or shape[0] != rows:
            reason = f"`draft_vocab_size` {size} needs `{name}` of {rows} rows, got {shape}"
            remedy = "Get the weights anew, or write the whole vocabulary's size."
            engines = ["speculators"] if name == "t2d" else ["speculators", "vllm"]
            yield from found(engines, FAULT, name, reason, remedy)


def _native(facts: Facts) -> Iterator[Finding]:
    if facts.kind != "native":
        return
    if facts.raw.get("model_type") != "muse_glimmer_assistant":
        reason = f"`model_type` {facts.raw.get('model_type')!r}: AutoModel builds another class"
        remedy = 'Write "muse_glimmer_assistant".'
        yield from found(["transformers"], FAULT, "model_type", reason, remedy)
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        if facts.raw.get(key) is None:
            reason = f"`{key}` is not at the top level: the class takes its own default"
            remedy = "Convert anew: `hf-dflash convert PATH OUT --to native`."
            yield from found(["transformers"], FAULT, key, reason, remedy)
    if facts.headers and "encoder.fc.weight" not in facts.headers:
        reason = "`fc` and `hidden_norm` lie under `encoder.` in this class; it starts at random"
        remedy = "Convert anew: `hf-dflash convert PATH OUT --to native`."
        yield from found(["transformers"], FAULT, "encoder.fc.weight", reason, remedy)
    if facts.raw.get("is_causal"):
        reason = "`is_causal` is ignored: every layer of this class looks both ways"
        remedy = "Use another format: `hf-dflash convert PATH OUT --to hf-dflash`."
        yield from found(["transformers"], FAULT, "is_causal", reason, remedy)
    if SLIDING in facts.layer_types:
        reason = "windows reach one token further on each side than in the field's other engines"
        remedy = "Nothing to do: drafts differ only where the text is longer than the window."
        yield from found(["transformers"], WARNING, "sliding_window", reason, remedy)


def _remote_code(facts: Facts) -> Iterator[Finding]:
    modules = _modules(facts)
    for module in sorted(modules):
        if f"{module}.py" not in facts.files:
            reason = f"`auto_map` points to {module}.py, which is not in the folder"
            remedy = (
                "Add the code, or delete `auto_map`: `hf-dflash convert PATH OUT --to hf-dflash`."
            )
            yield from found(["trust_remote_code"], FAULT, "auto_map", reason, remedy)
    if modules & {"modeling_dflash", "configuration_dflash"}:
        yield from _missing_imports(facts)
        return
    for key in ("num_target_layers", "block_size"):
        if modules and facts.raw.get(key) is None:
            reason = f"`{key}` is not at the top level, the only place where z-lab's code reads it"
            yield from found(["trust_remote_code"], FAULT, key, reason, "Write it there.")
    if modules and SLIDING in facts.layer_types:
        reason = "z-lab's code applies windows with flash attention only"
        remedy = "Load the drafter with this package."
        yield from found(["trust_remote_code"], WARNING, "layer_types", reason, remedy)


def _modules(facts: Facts) -> set[str]:
    """The modules of the folder that `auto_map` names; "org/name--x" is code of a repository."""
    names = [str(name) for name in _object(facts.raw.get("auto_map")).values() if name]
    return {name.partition(".")[0] for name in names if "--" not in name}


def _missing_imports(facts: Facts) -> Iterator[Finding]:
    for name in sorted(file for file in facts.files if file.endswith("_dflash.py")):
        code = (facts.path / name).read_text(encoding="utf-8")
        for module in sorted(set(RELATIVE_IMPORT.findall(code))):
            if f"{module}.py" not in facts.files:
                reason = f"{name} imports {module}.py, which is not in the folder"
                remedy = "Save the drafter again; all of its code is copied."
                yield from found(["trust_remote_code"], FAULT, f"{module}.py", reason, remedy)
