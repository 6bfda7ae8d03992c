"""Into and out of speculators' format: what it carries of the target, and its draft vocabulary.

Letters: V vocabulary, Vd draft vocabulary, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .configuration_dflash import DFlashConfig
from .drafter_files import DrafterFiles
from .speculators_format import (
    EMBEDDINGS,
    HEAD,
    RECORD_NAME,
    new_record,
    vocabulary_maps,
    vocabulary_of,
)
from .target_tensors import read_target_tensors, target_architectures


def read_token_ids(path: Path) -> list[int]:
    """Read a draft vocabulary: a JSON list of token ids.

    Raises:
        ValueError: If the file holds anything else.
    """
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Give a list of ids.") from error
    if not isinstance(ids, list) or any(type(index) is not int for index in ids):
        raise ValueError(f"{path} must hold a JSON list of token ids, got {ids!r:.60}.")
    return ids


def into_speculators(
    drafter: DrafterFiles, target: str | None, token_ids: list[int] | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Make what speculators' format has beyond the drafter.

    Args:
        drafter: In any format.
        target: Folder or repository of the target.
        token_ids: (Vd,) of a reduced draft vocabulary; by default that of the drafter's record.

    Returns:
        Embeddings, head and vocabulary maps; and the record that names the target.

    Raises:
        ValueError: If the target is needed and not given, or does not fit.
    """
    record = dict(drafter.record)
    if drafter.format == "speculators":
        if token_ids is None:
            return drafter.carried, record
        # A head that was trained is found, not replaced by the target's.
        record = from_speculators(drafter, target, whole_vocabulary=True)
    kept = record.pop("carried", None)
    recorded_ids = record.pop("draft_vocabulary", None)
    token_ids = recorded_ids if token_ids is None else token_ids
    config = drafter.config
    if "speculators_config" not in record:
        if target is None:
            raise ValueError(
                "`target` is needed for the format speculators, which names it (`verifier`) and "
                "carries its embeddings and head. Pass the target's folder or repository."
            )
        record |= new_record(target, target_architectures(target), config.block_size)
    wanted = dict.fromkeys((EMBEDDINGS, HEAD), str(config.dtype)) if kept is None else kept
    carried = _of_target(wanted, target, config)
    if token_ids is not None:
        maps = vocabulary_maps(token_ids, config.vocab_size)
        if HEAD in carried:
            carried[HEAD] = carried[HEAD][maps["t2d"]].contiguous()
        carried |= maps
        record["draft_vocab_size"] = len(token_ids)
    return carried, record


def from_speculators(
    drafter: DrafterFiles, target: str | None, whole_vocabulary: bool
) -> dict[str, Any]:
    """Leave out what follows from the target, after seeing that it does.

    Args:
        drafter: In any format; only one in speculators' has anything to leave out.
        target: Folder or repository of the target.
        whole_vocabulary: Accept that a reduced draft vocabulary becomes the whole one.

    Returns:
        The record of what was left out, from which `into_speculators` makes it again.

    Raises:
        ValueError: If embeddings or head are not the target's, or the vocabulary is reduced.
    """
    record, carried, config = dict(drafter.record), drafter.carried, drafter.config
    if drafter.format != "speculators":
        return record
    size = record.pop("draft_vocab_size", None)
    if size is not None:
        if not whole_vocabulary:
            raise ValueError(
                f"`draft_vocab_size` = {size} (with `d2t`, `t2d`): only the format speculators "
                "has a reduced vocabulary. Pass --whole-vocabulary to draft from all "
                f"{config.vocab_size} tokens of the target's head; which they were is kept in "
                f"{RECORD_NAME}."
            )
        record["draft_vocabulary"] = vocabulary_of(carried, config, size)
    elif carried.keys() & {"d2t", "t2d"}:  # maps that name every token: nothing is reduced
        record["draft_vocabulary"] = vocabulary_of(carried, config, config.vocab_size)
    copies = {name: carried[name] for name in (EMBEDDINGS, HEAD) if name in carried}
    _check_copies(copies, record.get("draft_vocabulary"), target, config)
    record["carried"] = {name: str(tensor.dtype) for name, tensor in copies.items()}
    return record


def _check_copies(
    copies: Mapping[str, Tensor],
    token_ids: list[int] | None,
    target: str | None,
    config: DFlashConfig,
) -> None:
    own = _of_target({name: str(t.dtype) for name, t in copies.items()}, target, config)
    if token_ids is not None and HEAD in own:
        own[HEAD] = own[HEAD][torch.tensor(token_ids)]
    for name, tensor in copies.items():
        if not torch.equal(own[name], tensor):
            raise ValueError(
                f"`{name}` differs from the one of {target}: it was trained, or the target is "
                "another, and only the format speculators holds it. Serve the drafter with vLLM."
            )


def _of_target(
    dtypes: Mapping[str, str], target: str | None, config: DFlashConfig
) -> dict[str, Tensor]:
    """The target's embeddings and head, as many as are named, in the given dtypes."""
    if not dtypes:
        return {}
    if target is None:
        raise ValueError(
            f"`target` is needed: {sorted(dtypes)} of the format speculators are the target's. "
            "Pass its folder or repository."
        )
    found = read_target_tensors(target, (config.vocab_size, config.hidden_size))
    return {
        name: found[name].to(getattr(torch, dtype.rpartition(".")[2])).clone()
        for name, dtype in dtypes.items()
    }
