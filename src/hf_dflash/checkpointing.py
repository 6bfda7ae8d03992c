"""Training checkpoints: whole or not there, and resumed only by the run that wrote them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETTINGS_NAME = "dflash_run.json"
#: Where files are written until they are complete. The Hub is not sent names with an underscore.
PART_FOLDER = "_part"


def publish(part: Path, final: Path) -> None:
    """Give a completely written folder its name; one of that name is replaced.

    Args:
        part: On the same file system as ``final``.
        final: The name that others look for.
    """
    for path in part.rglob("*"):
        _flush(path)
    old = part.with_name(part.name + ".old")
    if final.exists():
        final.rename(old)
    part.rename(final)
    _flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def publish_files(part: Path, final: Path) -> None:
    """Move complete files into a folder that others may be reading, one after the other.

    The config goes last: who finds it finds the weights that belong to it.
    """
    final.mkdir(parents=True, exist_ok=True)
    for path in sorted(part.iterdir(), key=lambda p: p.name == "config.json"):
        _flush(path)
        path.replace(final / path.name)
    _flush(final)
    part.rmdir()


def _flush(path: Path) -> None:
    """Have the disk hold what was written: a rename may outlive a power cut, its data not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def run_settings(config: Any, args: Any, n_examples: int | None) -> dict[str, Any]:
    """All that decides what the next step does, but for the state in the checkpoint.

    How many epochs and the learning rate are left out: a run may be prolonged.

    Args:
        config: The drafter's.
        args: `DFlashTrainingArguments`.
        n_examples: Rows of the training set.
    """
    names = (
        "n_anchors",
        "random_anchors",
        "loss_type",
        "loss_weighting",
        "dpace_alpha",
        "n_sampled_tokens",
        "loss_decay_gamma_last",
        "seed",
        "data_seed",
        "ema_decay",
    )
    return {
        "architecture": config.architecture,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "loss_decay_gamma": args.gamma_for(config.block_size),
        "rows_per_update": args.per_device_train_batch_size
        * args.gradient_accumulation_steps
        * args.world_size,
        "n_examples": n_examples,
        **{name: getattr(args, name) for name in names},
    }


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Record the settings of the run with a checkpoint."""
    text = json.dumps(settings, indent=2, sort_keys=True)
    (folder / SETTINGS_NAME).write_text(text + "\n", encoding="utf-8")


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on with a checkpoint that another configuration wrote.

    Raises:
        ValueError: The checkpoint has no record, or a setting differs. What the record of an older
            release does not tell is taken to be the same.
    """
    path = folder / SETTINGS_NAME
    if not path.is_file():
        raise ValueError(
            f"`resume_from_checkpoint` must be a checkpoint of DFlashTrainer, but {folder} has no "
            f"{SETTINGS_NAME}. To start from a drafter's weights, load it with "
            "DFlashDraftModel.from_pretrained and train without resuming."
        )
    recorded = json.loads(path.read_text(encoding="utf-8"))
    changed = [
        f"`{name}` was {recorded[name]!r}, is {settings.get(name)!r}"
        for name in recorded
        if recorded[name] != settings.get(name)
    ]
    if changed:
        raise ValueError(
            f"The run that wrote {folder} had another configuration: {'; '.join(changed)}. Set it "
            "back, or start a new run from the drafter's weights."
        )
