"""Read a drafter's folder as it is, in any format, without building the model.

Bit for bit: tensors keep the dtype they have in the file, whatever the config says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file

from .checkpoint_dflash import (
    KEY_MAPPING,
    check_folder_exists,
    check_loading_info,
    read_generation_config,
    strict_loading_options,
    tensor_headers_of,
    validate_generation_config,
    weight_files,
)
from .configuration_dflash import DFlashConfig
from .formats_dflash import TRAINING_RESIDUE, detect_format
from .modeling_dflash import DFlashDraftModel
from .speculators_format import CARRIED, RECORD_NAME, read_speculators_config
from .wire_formats import name_format

#: Files that change what a drafter computes, which this package does not read.
FOREIGN_FILES = {
    "mask_embedding.pt": "an embedding of its own for the mask token",
    "hf_quant_config.json": "quantised weights",
}


@dataclass(frozen=True, slots=True)
class DrafterFiles:
    """A drafter as its folder has it, under this package's names."""

    config: DFlashConfig
    tensors: dict[str, Tensor]
    carried: dict[str, Tensor]  # of speculators: embeddings, head, vocabulary maps
    record: dict[str, Any]  # what only speculators' format says
    policy: GenerationConfig
    format: str  # one of `wire_formats.FORMATS`
    ignored_keys: tuple[str, ...]  # of its config: they say nothing about the drafter


def read_drafter(source: str | Path) -> DrafterFiles:
    """Read all of a drafter's folder or repository, strictly.

    Args:
        source: Folder or Hub repository, in any format of `wire_formats.FORMATS`.

    Raises:
        ValueError: If it is in another format, incomplete, quantised, or has what no format here
            can hold.
        FileNotFoundError: If there is no such folder.
    """
    check_folder_exists(source, "path", {})
    paths = weight_files(source, {})
    names = [name for path in paths for name in tensor_headers_of(path)]
    raw, _ = PreTrainedConfig.get_config_dict(source)
    kind = detect_format(raw, names)
    if kind == "speculators":
        config, record = read_speculators_config(raw)
    else:
        strict_loading_options(source, {})  # refuses what is no drafter of ours, by name
        given = {"architecture": "dflare"} if kind == "dflare" else {}
        config, record = DFlashConfig.from_dict({**raw, **given}), _read_record(source)
    _refuse_foreign(source, raw)
    tensors = our_names(_load(paths))
    carried = {name: tensors.pop(name) for name in CARRIED if name in tensors}
    if kind != "speculators" and carried:
        raise ValueError(
            f"{source} holds {sorted(carried)}, which only speculators' format may. Delete them "
            "if they are the target's own, or get the drafter's own repository."
        )
    check_tensors(config, {name: tuple(t.shape) for name, t in tensors.items()}, source)
    policy = read_generation_config(source, {})
    validate_generation_config(policy, config.block_size)
    config.dtype = next(iter(tensors.values())).dtype  # what is there, not what was written
    return DrafterFiles(
        config=config,
        tensors=tensors,
        carried=carried,
        record=record,
        policy=policy,
        format=name_format(raw, kind),
        ignored_keys=tuple(sorted(TRAINING_RESIDUE & raw.keys())) + _foreign_code(raw),
    )


def our_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Give tensors the names this package saves them under.

    Raises:
        ValueError: If two of them would get the same one.
    """
    renamed: dict[str, Any] = {}
    for name, tensor in tensors.items():
        ours = our_name(name)
        if ours in renamed:
            raise ValueError(
                f"Two tensors of the checkpoint are `{ours}` under different names ({name} is the "
                "second). Keep the one that was trained."
            )
        renamed[ours] = tensor
    return renamed


def our_name(name: str) -> str:
    """The name under which this package saves a tensor.

    >>> our_name("encoder.output_norm_enc.weight")
    'hidden_norm.weight'
    """
    for pattern, ours in KEY_MAPPING.items():
        name = re.sub(pattern, ours, name)
    return name


def expected_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a config asks for."""
    with torch.device("meta"):
        model = DFlashDraftModel(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def check_tensors(
    config: DFlashConfig, found: Mapping[str, tuple[int, ...]], source: str | Path
) -> None:
    """Raise unless the tensors are exactly those the config asks for.

    Raises:
        ValueError: Naming every missing, unexpected and wrongly shaped tensor.
    """
    wanted = expected_shapes(config)
    mismatched = [
        (name, shape, wanted[name])
        for name, shape in found.items()
        if name in wanted and shape != wanted[name]
    ]
    info = {
        "missing_keys": wanted.keys() - found.keys(),
        "unexpected_keys": found.keys() - wanted.keys(),
        "mismatched_keys": mismatched,
    }
    check_loading_info(info, source)


def _load(paths: Iterable[Path]) -> dict[str, Tensor]:
    tensors = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                tensors[name] = file.get_tensor(name)
    return tensors


def find_file(source: str | Path, name: str) -> Path | None:
    """Find a file of a folder or Hub repository; None if it has none of that name."""
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _read_record(source: str | Path) -> dict[str, Any]:
    path = find_file(source, RECORD_NAME)
    if path is None:
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Delete it, or convert anew.") from (
            error
        )
    if not isinstance(record, dict):
        raise ValueError(f"{path} must hold a JSON object, got {record!r:.80}. Convert anew.")
    return record


def _refuse_foreign(source: str | Path, raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config") is not None:
        raise ValueError(
            f"{source} is quantised (`quantization_config`): its tensors are packed for one "
            "engine. Convert the drafter it was made from."
        )
    for name, meaning in FOREIGN_FILES.items():
        if find_file(source, name) is not None:
            raise ValueError(
                f"{source} has `{name}` ({meaning}), which no format but its own engine's holds. "
                "Use a plain DFlash drafter of the same target."
            )


def _foreign_code(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Whether the config points to code other than this package's, which is not copied."""
    names = set((raw.get("auto_map") or {}).values())
    ours = {"configuration_dflash.DFlashConfig", "modeling_dflash.DFlashDraftModel"}
    return ("auto_map",) if names - ours else ()
