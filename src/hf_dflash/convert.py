"""Convert a drafter from one engine's format to another's, bit for bit or not at all.

The source is only read. The output appears complete, or not: it is written beside its final place
and renamed. What the new format has no place for is an error that names the field.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .checkpoint_dflash import save_generation_config
from .checkpointing import publish
from .drafter_files import DrafterFiles, find_file, read_drafter
from .loading import check_source
from .modeling_dflash import DFlashDraftModel
from .speculators_exchange import from_speculators, into_speculators, read_token_ids
from .speculators_format import RECORD_NAME
from .wire_formats import (
    FORMATS,
    RENAMED,
    check_can_hold,
    check_format_name,
    choose_rope_spelling,
    write_config,
)

#: Copied along, since they are about the weights in whatever format.
KEPT_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md")
#: Written by the conversion, or part of the source's own format.
_OWN_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    RECORD_NAME,
)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was done, and what was left behind because it says nothing about the drafter."""

    source_format: str
    format: str
    output: Path
    left_out: tuple[str, ...]


def convert(
    path: str | Path,
    output: str | Path,
    *,
    to: str,
    source_format: str | None = None,
    target: str | None = None,
    rope: str | None = None,
    draft_vocabulary: Path | None = None,
    whole_vocabulary: bool = False,
) -> Conversion:
    """Write a drafter in another format.

    Args:
        path: Folder or Hub repository of the drafter.
        output: Folder to be made; it must not exist, or be empty.
        to: One of `wire_formats.FORMATS`.
        source_format: What ``path`` must be in; found out if absent.
        target: Folder or Hub repository of the target. Needed where embeddings and head come into
            the file or are left out of it, and to name the target in speculators' format.
        rope: Spelling of the rotary embedding: "both", "theta" (`rope_theta`, `rope_scaling`) or
            "parameters" (`rope_parameters`). By default what the format's readers expect.
        draft_vocabulary: JSON list of the tokens that speculators' head shall cover.
        whole_vocabulary: Accept that a reduced draft vocabulary becomes the target's whole one.

    Raises:
        ValueError: If the source is not a drafter this package reads, the output has content, or
            the new format cannot hold all of the drafter.
    """
    for name, option in ((to, "to"), (source_format, "from")):
        if name is not None:
            check_format_name(name, option)
    spelling = choose_rope_spelling(rope, to)
    final = _checked_output(Path(output))
    check_source(str(path), "path")
    drafter = read_drafter(path)
    _check_source_format(drafter, source_format, path)
    check_can_hold(drafter.config, to)
    if to == "speculators":
        ids = None if draft_vocabulary is None else read_token_ids(draft_vocabulary)
        carried, record = into_speculators(drafter, target, ids)
    elif draft_vocabulary is not None:
        raise ValueError(
            f"`draft_vocabulary` must be left out for the format {to}: only speculators has one."
        )
    else:
        carried, record = {}, from_speculators(drafter, target, whole_vocabulary)
    part = final.with_name(f".{final.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a conversion that was cut short
    part.mkdir(parents=True)
    try:
        _write(drafter, part, to, spelling, carried, record)
        left_out = _copy_rest(path, part, drafter)
        publish(part, final)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return Conversion(drafter.format, to, final, left_out)


def _checked_output(output: Path) -> Path:
    output = output.absolute()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(
            f"`output` must be a folder that does not exist or is empty, got {output}. Choose "
            "another name, or delete what is there."
        )
    return output


def _check_source_format(drafter: DrafterFiles, wanted: str | None, path: str | Path) -> None:
    """Compare what was found with what was said; DFlash's plain formats overlap."""
    found, is_dflare = drafter.format, drafter.config.architecture == "dflare"
    overlapping = {"hf-dflash", "angelslim"} if is_dflare else set(FORMATS)
    overlapping -= {"speculators", "native"}
    possible = overlapping if found in overlapping else {found}
    if wanted is not None and wanted not in possible:
        raise ValueError(
            f"`from` says {wanted}, but {path} is in the format {found} "
            f"({drafter.config.architecture}). Leave `from` out to go by the files."
        )


def _write(
    drafter: DrafterFiles,
    part: Path,
    to: str,
    rope: str,
    carried: Mapping[str, Tensor],
    record: Mapping[str, Any],
) -> None:
    if to == "hf-dflash":
        with torch.device("meta"):
            model = DFlashDraftModel(drafter.config)
        model.load_state_dict(drafter.tensors, strict=True, assign=True)
        model.generation_config = drafter.policy
        model.save_pretrained(part)
    else:
        names = RENAMED.get(to, {})
        tensors = {names.get(name, name): t for name, t in drafter.tensors.items()}
        save_file({**tensors, **carried}, part / "model.safetensors", metadata={"format": "pt"})
        _write_json(part / "config.json", write_config(drafter.config, to, rope, record))
        if set(drafter.policy.to_diff_dict()) - {"transformers_version"}:
            save_generation_config(drafter.policy, part)
    if record and to != "speculators":
        _write_json(part / RECORD_NAME, record)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _copy_rest(source: str | Path, part: Path, drafter: DrafterFiles) -> tuple[str, ...]:
    """Copy what is about the weights; name what stays behind."""
    for name in KEPT_FILES:
        kept = find_file(source, name)
        if kept is not None:
            shutil.copyfile(kept, part / name)
    left = [f"config.json: {key}" for key in drafter.ignored_keys]
    folder = Path(source)
    others = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    known = {*KEPT_FILES, *_OWN_FILES}
    left += [n for n in others if not n.endswith((".safetensors", ".py")) and n not in known]
    return tuple(left)
