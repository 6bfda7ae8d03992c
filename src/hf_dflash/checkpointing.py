"""Files and checkpoints that others read: whole or not there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

#: Where files are written until they are complete. The Hub is not sent names with an underscore.
PART_FOLDER = "_part"


def check_complete(folder: Path, *, shards: bool) -> None:
    """Refuse a checkpoint that lacks what a run needs to go on exactly.

    Args:
        folder: Of the checkpoint.
        shards: Whether the run that goes on has sharded parameters (FSDP, DeepSpeed), whose
            optimizer and scheduler have names of their own.

    Raises:
        ValueError: The state of the optimizer, scheduler or random numbers is not there.
    """
    needed = ["rng_state*.pth"] if shards else ["optimizer.pt", "scheduler.pt", "rng_state*.pth"]
    missing = [name for name in needed if not any(folder.glob(name))]
    if missing:
        raise ValueError(
            f"`resume_from_checkpoint` must hold the whole state of the run, but {folder} has no "
            f"{', '.join(missing)} (was it written with `save_only_model`, or sharded?). Resume "
            "from a complete checkpoint, or start a new run from its weights."
        )


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

    The config, of a drafter or an adapter, goes last: who finds it finds the weights that belong
    to it.
    """
    final.mkdir(parents=True, exist_ok=True)
    for path in sorted(part.iterdir(), key=lambda p: p.name.endswith("config.json")):
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
