"""The target's embeddings and head, read from its files without building the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from .checkpoint_dflash import check_folder_exists, tensor_headers_of, weight_files
from .speculators_format import EMBEDDINGS, HEAD

#: How families end the names of the two.
EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
HEAD_NAMES = ("lm_head.weight", "embed_out.weight")


def target_architectures(target: str) -> list[str]:
    """The class names in the target's config."""
    check_folder_exists(target, "target", {})
    raw, _ = PreTrainedConfig.get_config_dict(target)
    return list(raw.get("architectures") or ())


def read_target_tensors(target: str, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Read the target's embeddings and head.

    Args:
        target: Folder or Hub repository.
        shape: (V, H) that both must have.

    Returns:
        `embed_tokens.weight` and `lm_head.weight`, the same tensor where the target ties them.

    Raises:
        ValueError: If one is not found, found twice, or has another shape.
    """
    check_folder_exists(target, "target", {})
    raw, _ = PreTrainedConfig.get_config_dict(target)
    homes = {name: path for path in weight_files(target, {}) for name in tensor_headers_of(path)}
    embeddings = _read_one(homes, EMBEDDING_NAMES, target)
    if embeddings is None:
        raise ValueError(
            f"`target` must have its embeddings under one name that ends in {EMBEDDING_NAMES}, but "
            f"{target} has none. Convert to a format that does not carry them."
        )
    head = _read_one(homes, HEAD_NAMES, target)
    if head is None:
        if not _is_tied(raw):
            raise ValueError(
                f"`target` must have a head ({HEAD_NAMES}) or tie it to its embeddings, but "
                f"{target} does neither. Convert to a format that does not carry it."
            )
        head = embeddings
    for name, tensor in ((EMBEDDINGS, embeddings), (HEAD, head)):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"`{name}` of {target} must be {shape} (`vocab_size`, `hidden_size` of the "
                f"drafter), got {tuple(tensor.shape)}. Is it the drafter's own target?"
            )
    return {EMBEDDINGS: embeddings, HEAD: head}


def _read_one(homes: Mapping[str, Path], endings: tuple[str, ...], target: str) -> Tensor | None:
    found = [name for name in homes if name.endswith(endings)]
    if len(found) > 1:
        raise ValueError(
            f"`target` must have one tensor that ends in {endings}, but {target} has {found}. Pass "
            "its language model alone."
        )
    if not found:
        return None
    with safe_open(homes[found[0]], framework="pt") as file:
        tensor: Tensor = file.get_tensor(found[0])
    return tensor


def _is_tied(raw: Mapping[str, Any]) -> bool:
    text = raw.get("text_config") or {}
    # transformers leaves the key out where it is true for the family.
    return bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", True)))
