"""Rules for every engine: files, tensors against config, dtypes, the pair, what the card says.

Each yields findings for the engines it concerns; `doctor` keeps those that the folder is meant for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from .doctor_facts import ENGINES, FAULT, WARNING, Facts, Finding
from .drafter_files import FOREIGN_FILES, expected_shapes, our_names
from .speculators_format import CARRIED

ROTARY_BUFFER = re.compile(r"rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")
FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def found(
    engines: Sequence[str], severity: str, subject: str, reason: str, remedy: str
) -> Iterator[Finding]:
    """The same finding for several engines."""
    for engine in engines:
        yield Finding(engine, severity, subject, reason, remedy)


def ours(facts: Facts) -> tuple[str, ...]:
    """The engines that use this package's reader: itself, and its code in the folder."""
    return ("hf-dflash", "trust_remote_code") if facts.format == "hf-dflash" else ("hf-dflash",)


def but(*engines: str) -> tuple[str, ...]:
    """All engines except some."""
    return tuple(engine for engine in ENGINES if engine not in engines)


def shared_findings(facts: Facts) -> Iterator[Finding]:
    """Everything that does not depend on how one engine reads its config."""
    if facts.weights_problem is not None:
        yield from found(
            ENGINES, FAULT, "weights", facts.weights_problem, "Save or download them again."
        )
    for rule in (
        _unreadable,
        _tensors_and_config,
        _names,
        _dtypes,
        _block_size,
        _foreign_files,
        _policy,
        _card,
        _pair,
    ):
        yield from rule(facts)


def _unreadable(facts: Facts) -> Iterator[Finding]:
    """A config that nothing can be held against: no engine may be said to load the folder."""
    problem, remedy = facts.config_problem, "Correct config.json as it says."
    if problem is None:
        return
    yield from found(ours(facts), FAULT, "config.json", problem, remedy)
    if facts.kind != "speculators":  # whose own engines are told by their own rule
        reason = f"tensors and pair could not be compared: {problem}"
        yield from found(but(*ours(facts)), FAULT, "config.json", reason, remedy)


def _tensors_and_config(facts: Facts) -> Iterator[Finding]:
    if facts.config is None or not facts.headers:
        return
    try:
        headers = our_names(facts.headers)
    except ValueError as error:
        yield from found(ENGINES, FAULT, "weights", str(error), "Delete one of them.")
        return
    wanted = expected_shapes(facts.config)
    yield from _fc_width(facts, headers, wanted)
    for name in sorted(wanted.keys() - headers.keys()):
        reason = f"the config asks for {name} {wanted[name]}, which is missing"
        remedy = "Check `attention_bias`, `num_hidden_layers` and the architecture, or the weights."
        yield from found(but("sglang"), FAULT, name, reason, remedy)
        yield from found(["sglang"], FAULT, name, f"{reason}; SGLang does not notice", remedy)
    for name in sorted(wanted.keys() & headers.keys() - {"fc.weight"}):
        shape = tuple(headers[name]["shape"])
        if shape != wanted[name]:
            reason = f"{name} is {shape}, the config asks for {wanted[name]}"
            remedy = "Correct the sizes in config.json, or get the weights that belong to it."
            yield from found(ENGINES, FAULT, name, reason, remedy)
    yield from _unexpected(facts, sorted(headers.keys() - wanted.keys()))


def _fc_width(facts: Facts, headers: dict[str, Any], wanted: dict[str, Any]) -> Iterator[Finding]:
    if facts.config is None or not {"fc.weight"} <= headers.keys() & wanted.keys():
        return
    shape = tuple(headers["fc.weight"]["shape"])
    if shape != wanted["fc.weight"]:
        taps, width = facts.config.target_layer_ids, facts.config.target_hidden_size
        reason = (
            f"fc.weight is {shape}, but {len(taps)} taps of width {width} need "
            f"{wanted['fc.weight']}"
        )
        remedy = "Write the taps the drafter was trained with, all of them, in their order."
        yield from found(ENGINES, FAULT, "target_layer_ids", reason, remedy)


def _unexpected(facts: Facts, names: Sequence[str]) -> Iterator[Finding]:
    for name in names:
        if facts.kind == "speculators" and name in CARRIED:
            continue
        remedy = "Delete it if it is the target's own or a buffer; else use its own engine."
        refused = f"{name} belongs to no DFlash drafter and is refused"
        yield from found((*ours(facts), "speculators"), FAULT, name, refused, remedy)
        is_buffer = ROTARY_BUFFER.search(name) is not None
        unmapped = f"the converter cannot map {name}"
        yield from found(["llama.cpp"], FAULT, name, unmapped, remedy)
        if is_buffer:
            continue
        if name not in CARRIED:
            yield from found(["vllm"], FAULT, name, f"vLLM has no parameter for {name}", remedy)
        severity = WARNING if name in ("embed_tokens.weight", "lm_head.weight") else FAULT
        dropped = f"SGLang drops {name} without a word and drafts without it"
        yield from found(["sglang"], severity, name, dropped, remedy)


def _names(facts: Facts) -> Iterator[Finding]:
    prefixed = [name for name in facts.headers if name.startswith("model.")]
    if prefixed:
        reason = f"{len(prefixed)} tensors start with `model.`, which is prepended once more"
        remedy = "Save them without prefix: `hf-dflash convert PATH OUT --to zlab`."
        yield from found(["vllm", "llama.cpp"], FAULT, prefixed[0], reason, remedy)


def _dtypes(facts: Facts) -> Iterator[Finding]:
    dtypes = {header["dtype"] for name, header in facts.headers.items() if name not in CARRIED}
    packed = sorted(dtypes - FLOATS.keys())
    if packed or facts.decoder.get("quantization_config") is not None:
        reason = f"the weights are quantised ({', '.join(packed) or 'quantization_config'})"
        remedy = "Use the drafter it was made from; only the engine it was packed for reads this."
        yield from found(but("vllm", "sglang"), FAULT, "quantization_config", reason, remedy)
    if "F16" in dtypes:
        reason = "float16 weights: hidden states of large targets overflow, and nothing is accepted"
        remedy = "Save the drafter in bfloat16, and serve its target in it."
        yield from found(ENGINES, WARNING, "dtype", reason, remedy)
    old, new = (facts.decoder.get(key) for key in ("torch_dtype", "dtype"))
    if old is not None and new is not None and old != new:
        reason = f"`dtype` ({new}) and `torch_dtype` ({old}) differ; each release reads one of them"
        yield from found(ENGINES, FAULT, "dtype", reason, "Write the same in both.")
    said = str(new or old or "").rpartition(".")[2]
    real = {FLOATS.get(dtype, dtype) for dtype in dtypes}
    if said and not packed and real and real != {said}:
        reason = f"config.json says {said}, the tensors are {', '.join(sorted(real))}"
        remedy = "Write the dtype of the tensors; who loads with it casts them."
        yield from found(ENGINES, WARNING, "dtype", reason, remedy)


def _block_size(facts: Facts) -> Iterator[Finding]:
    nested, top = facts.nested.get("block_size"), facts.raw.get("block_size")
    if nested is not None and top is not None and nested != top:
        reason = f"`block_size` is {top} at the top level and {nested} in `dflash_config`"
        remedy = "Write the one the drafter was trained with in both places."
        yield from found(but("vllm"), FAULT, "block_size", reason, remedy)
    if nested is None and top is None:
        reason = "`block_size` is missing; some engines take 16, others stop"
        remedy = "Write it, at the top level and in `dflash_config`."
        yield from found(but("vllm", "llama.cpp"), WARNING, "block_size", reason, remedy)
        yield from found(["llama.cpp"], FAULT, "block_size", reason, remedy)


def _foreign_files(facts: Facts) -> Iterator[Finding]:
    for name, meaning in FOREIGN_FILES.items():
        if name in facts.files:
            reason = f"{name} ({meaning}) is not read"
            remedy = "Serve the drafter with vLLM, which reads it, or use a plain drafter."
            yield from found(but("vllm", "sglang"), FAULT, name, reason, remedy)
    if "mask_embedding.pt" in facts.files:
        reason = "SGLang reads mask_embedding.pt from a local folder only, not from a repository"
        remedy = "Download the repository and pass the folder."
        yield from found(["sglang"], WARNING, "mask_embedding.pt", reason, remedy)


def _policy(facts: Facts) -> Iterator[Finding]:
    block_size, drafts = facts.block_size, facts.policy.get("num_assistant_tokens")
    if isinstance(drafts, int) and block_size is not None and drafts >= block_size:
        reason = f"{drafts} drafts a cycle, but a block of {block_size} has {block_size - 1}"
        remedy = f"Write at most {block_size - 1} in generation_config.json, or leave it out."
        yield from found(ours(facts), FAULT, "num_assistant_tokens", reason, remedy)


def _card(facts: Facts) -> Iterator[Finding]:
    """The serve lines of a card are copied as they are: vLLM counts drafts, SGLang the block."""
    block_size = facts.block_size
    if block_size is None:
        return
    for engine, pattern, right in (
        ("vllm", r"num_speculative_tokens\W+(\d+)", block_size - 1),
        ("sglang", r"speculative-num-draft-tokens\W+(\d+)", block_size),
    ):
        wrong = {int(n) for n in re.findall(pattern, facts.card)} - {right}
        if wrong:
            counted = "B - 1 drafts" if engine == "vllm" else "B, the anchor included"
            reason = f"README.md says {sorted(wrong)} where a block of {block_size} is {counted}"
            yield from found([engine], FAULT, "README.md", reason, f"Write {right} there.")


def _pair(facts: Facts) -> Iterator[Finding]:
    """Rules that hold between drafter and target; without a target, only its recorded depth."""
    config, target = facts.config, facts.target
    if config is None:
        return
    n_layers = config.num_target_layers if target is None else target.num_layers
    if n_layers is not None and n_layers - 1 in config.target_layer_ids:
        reason = f"tap {n_layers - 1} is the last layer: some engines read it after the final norm"
        remedy = "Train with taps up to the last but one layer."
        yield from found(ENGINES, WARNING, "target_layer_ids", reason, remedy)
    if target is None:
        return
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ):
        if ours is not None and ours != theirs:
            reason = f"`{name}` is {ours}, the target's is {theirs}: a drafter of another target"
            remedy = "Use the target it was trained for; sizes of a config cannot be edited."
            yield from found(ENGINES, FAULT, name, reason, remedy)
    if max(config.target_layer_ids) >= target.num_layers:
        reason = f"taps {config.target_layer_ids}, but the target has {target.num_layers} layers"
        remedy = "Ids are 0-based; those of speculators and llama.cpp are one more."
        yield from found(ENGINES, FAULT, "target_layer_ids", reason, remedy)
    yield from _mask_token(facts)


def _mask_token(facts: Facts) -> Iterator[Finding]:
    config, target = facts.config, facts.target
    if config is None or target is None:
        return
    mask = config.mask_token_id
    for name, index in target.special_ids.items():
        if index == mask:
            reason = f"`mask_token_id` {mask} is the target's {name} token, which texts hold"
            remedy = "Right only if it was trained so; new drafters take an unused token."
            yield from found(ENGINES, WARNING, "mask_token_id", reason, remedy)
    text = facts.lookup("mask_token") or "<|MASK|>"
    index = target.added_tokens.get(text, mask)
    if index != mask:
        reason = f"`mask_token_id` is {mask}, but the target's tokenizer has {text} at {index}"
        remedy = "Write the id the drafter was trained with, and its text as `mask_token`."
        yield from found(["sglang"], FAULT, "mask_token_id", reason, remedy)
