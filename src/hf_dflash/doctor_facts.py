"""What a drafter's folder says, read without judging: the ground for `doctor`'s rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from .checkpoint_dflash import check_folder_exists, tensor_headers_of, weight_files
from .configuration_dflash import DFlashConfig
from .formats_dflash import REFUSED_FORMATS, detect_format, nested_section
from .geometry_dflash import decoder_config
from .speculators_format import read_speculators_config
from .wire_formats import name_format

FAULT, WARNING = "fault", "warning"
ENGINES = (
    "hf-dflash",
    "transformers",
    "trust_remote_code",
    "vllm",
    "sglang",
    "speculators",
    "llama.cpp",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that an engine will stumble over, and what to do about it."""

    engine: str
    severity: str  # FAULT: it will not load, or draft badly; WARNING: it works, but look at it
    subject: str  # the key, tensor or file
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """As much of the target as a drafter depends on."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    special_ids: dict[str, int]  # its end, begin and padding tokens
    added_tokens: dict[str, int]  # of its tokenizer, by text


@dataclass(frozen=True, slots=True)
class Facts:
    """A drafter's folder, as it is."""

    path: Path
    raw: dict[str, Any]  # config.json
    nested: dict[str, Any]  # its `dflash_config`
    decoder: dict[str, Any]  # where the layers' fields are: nested in speculators' format
    kind: str  # from `formats_dflash.detect_format`
    format: str | None  # one of `wire_formats.FORMATS`; None if it is another method
    headers: dict[str, dict[str, Any]]  # dtype and shape of every tensor
    weights_problem: str | None
    config: DFlashConfig | None
    config_problem: str | None
    files: frozenset[str]
    card: str  # README.md
    policy: dict[str, Any]  # generation_config.json
    target: TargetFacts | None

    def lookup(self, key: str) -> Any:
        """A drafter's key, from `dflash_config` or else from the top level."""
        value = self.nested.get(key)
        return self.raw.get(key) if value is None else value

    @property
    def block_size(self) -> int | None:
        """B, if it is a number."""
        value = self.lookup("block_size")
        return value if isinstance(value, int) else None

    @property
    def layer_types(self) -> list[str]:
        """Empty if the config has no list."""
        types = self.decoder.get("layer_types")
        return list(types) if isinstance(types, list) else []

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, or None if there is none of that name."""
        return tuple(self.headers[name]["shape"]) if name in self.headers else None


def read_facts(path: str | Path, target: str | None) -> Facts:
    """Read a folder, and its target's config and tokenizer if there is one.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If it has no `config.json`, or one that is no JSON object.
    """
    check_folder_exists(path, "path", {})
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"`path` must be a local folder, got {path}. Download the repository first: "
            f"`hf download {path} --local-dir drafter`."
        )
    raw = read_json(folder / "config.json")
    headers, weights_problem = _read_headers(folder)
    nested = nested_section(raw)
    kind = detect_format(raw, headers)
    is_another = kind in REFUSED_FORMATS and kind != "speculators"
    config, config_problem = _read_config(raw, kind)
    card = folder / "README.md"
    policy = folder / "generation_config.json"
    decoder = raw.get("transformer_layer_config") if kind == "speculators" else raw
    return Facts(
        path=folder,
        raw=raw,
        nested=nested,
        decoder=decoder if isinstance(decoder, dict) else {},
        kind=kind,
        format=None if is_another else name_format(raw, kind),
        headers=headers,
        weights_problem=weights_problem,
        config=config,
        config_problem=config_problem,
        files=frozenset(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()),
        card=card.read_text(encoding="utf-8") if card.is_file() else "",
        policy=read_json(policy) if policy.is_file() else {},
        target=None if target is None else read_target(target),
    )


def read_target(target: str) -> TargetFacts:
    """Read a target's config, and the added tokens of its tokenizer.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If it is no language model.
    """
    check_folder_exists(target, "target", {})
    text = decoder_config(AutoConfig.from_pretrained(target))
    special = {name: getattr(text, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    return TargetFacts(
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        special_ids={name: index for name, index in special.items() if isinstance(index, int)},
        added_tokens=_added_tokens(Path(target) / "tokenizer.json"),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: If the file is missing or holds something else.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}. `path` must be a drafter's folder.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Get the file anew.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {content!r:.60}.")
    return content


def _added_tokens(path: Path) -> dict[str, int]:
    if not path.is_file():
        return {}
    tokens = read_json(path).get("added_tokens") or []
    return {token["content"]: token["id"] for token in tokens}


def _read_headers(folder: Path) -> tuple[dict[str, dict[str, Any]], str | None]:
    headers: dict[str, dict[str, Any]] = {}
    try:
        for path in weight_files(folder, {}):
            headers |= tensor_headers_of(path)
    except (ValueError, OSError) as error:
        return headers, str(error)
    return headers, None


def _read_config(raw: Mapping[str, Any], kind: str) -> tuple[DFlashConfig | None, str | None]:
    """The config as this package reads it, or why it does not."""
    try:
        if kind == "speculators":
            return read_speculators_config(raw)[0], None
        given = {"architecture": "dflare"} if kind == "dflare" else {}
        return DFlashConfig.from_dict({**raw, **given}), None
    except (ValueError, TypeError) as error:
        return None, str(error)
