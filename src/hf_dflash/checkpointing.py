"""Files that others read: whole or not there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

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
