"""What a measurement was made with: code, versions, machine, weights."""

import datetime
import hashlib
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

from . import __version__
from .checkpoint_dflash import weight_files
from .measurement_runs import DrafterInfo, Provenance, TargetInfo


def provenance_of(
    target: Any, drafter: Any, *, command: str, seed: int, n_processes: int = 1
) -> Provenance:
    """Describe this run.

    Args:
        target: The loaded target.
        drafter: The loaded drafter, from a folder or the Hub.
        command: That began it.
        seed: Of draws and sampling.
        n_processes: That measure side by side.
    """
    config = drafter.config
    return Provenance(
        command=command,
        commit=commit_of_checkout(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions={
            "hf_dflash": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        device=device_name(target.device),
        threads=torch.get_num_threads(),
        dtype=str(target.dtype).removeprefix("torch."),
        seed=seed,
        target=TargetInfo(short_name(target.name_or_path), _revision(target)),
        drafter=DrafterInfo(
            short_name(drafter.name_or_path),
            sha256_of_weights(drafter.name_or_path),
            config.architecture,
            config.block_size,
            config.num_hidden_layers,
            sum(parameter.numel() for parameter in drafter.parameters()),
        ),
        n_processes=n_processes,
    )


def short_name(name_or_path: str) -> str:
    """A repository's name as it is, a folder's without the way to it, which says nothing to others.

    >>> short_name("Qwen/Qwen3-4B"), short_name("/home/me/models/mine/")
    ('Qwen/Qwen3-4B', 'mine')
    """
    path = Path(name_or_path)
    return path.name if path.is_absolute() or path.is_dir() else name_or_path


def commit_of_checkout() -> str | None:
    """The commit of the code, ending in "-dirty" if the code was changed; None without git."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    describe = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*"]
    status = ["git", "-C", str(folder), "status", "--porcelain", "--", "src"]
    try:
        commit, changes = (
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            for command in (describe, status)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if changes else commit


def device_name(device: torch.device) -> str:
    """What decodes, such as "cuda: NVIDIA H200" or "cpu: Intel(R) Xeon(R) ... (AVX512)"."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return str(device.type)
    return f"cpu: {_cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"


def _cpu_name() -> str:
    file = Path("/proc/cpuinfo")  # Linux; elsewhere Python knows
    found = re.search(r"^model name\s*: (.+)$", file.read_text(), re.M) if file.exists() else None
    return found.group(1) if found else platform.processor() or platform.machine()


def _revision(model: Any) -> str | None:
    return getattr(model.config, "_commit_hash", None)


def sha256_of_weights(name_or_path: str) -> str:
    """Hash the weight files that a checkpoint is loaded from, in the order of their names.

    Raises:
        ValueError: There is none.
    """
    digest = hashlib.sha256()
    for path in weight_files(name_or_path, {}):
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
