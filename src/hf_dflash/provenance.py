"""What a measurement was made with: code, versions, machine, weights."""

import datetime
import hashlib
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from . import __version__
from .checkpoint_dflash import weight_files
from .few_rows import rows_the_other_way
from .measurement_runs import DrafterInfo, MadeWith, Provenance, TargetInfo

_POLICY = ("num_assistant_tokens", "assistant_confidence_threshold", "temperature")


def made_with(command: str, device: torch.device, code: Sequence[str] = ("src",)) -> MadeWith:
    """Describe code, versions and machine of what begins now.

    Args:
        command: That began it.
        device: That computes.
        code: What of the checkout is run, as git names paths.
    """
    return MadeWith(
        command=command,
        commit=commit_of_checkout(code),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions={
            "hf_dflash": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        device=device_name(device),
        threads=torch.get_num_threads(),
    )


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
        **asdict(made_with(command, target.device)),
        dtype=str(target.dtype).removeprefix("torch."),
        seed=seed,
        target=TargetInfo(published_name(target.name_or_path), _revision(target)),
        drafter=DrafterInfo(
            published_name(drafter.name_or_path),
            sha256_of_weights(drafter.name_or_path),
            config.architecture,
            config.block_size,
            config.num_hidden_layers,
            sum(parameter.numel() for parameter in drafter.parameters()),
            list(config.target_layer_ids),
            drafting_policy(drafter.generation_config),
        ),
        n_processes=n_processes,
        few_rows=rows_the_other_way(target, drafter),
        code_sha256=hash_of_code(),
    )


def drafting_policy(generation_config: Any) -> dict[str, int | float]:
    """What a drafter's generation config sets of how many tokens are drafted and how."""
    values = {name: getattr(generation_config, name, None) for name in _POLICY}
    return {name: value for name, value in values.items() if value is not None}


def published_name(name_or_path: str) -> str:
    """A repository's name as it is, a folder's without the way to it, which says nothing to others.

    A folder of the Hub's cache has the name of its repository.

    >>> published_name("Qwen/Qwen3-4B"), published_name("/home/me/models/mine/")
    ('Qwen/Qwen3-4B', 'mine')
    >>> published_name("/home/me/.cache/hub/models--Qwen--Qwen3-4B/snapshots/1cfa9a72")
    'Qwen/Qwen3-4B'
    """
    path = Path(name_or_path)
    cached = path.parent.parent.name
    if path.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/", 1)
    return path.absolute().name if path.is_absolute() or path.is_dir() else name_or_path


def published_command(program: str, arguments: Iterable[str]) -> str:
    """A command line as it may be published: see `published_path`.

    >>> published_command("hf-dflash", ["bench", "--json=/srv/mine/a b.json", "--n-prompts", "8"])
    "hf-dflash bench --json 'a b.json' --n-prompts 8"
    """
    words = [program]
    for argument in arguments:
        option, equals, value = argument.partition("=")
        apart = option.startswith("-") and equals and Path(value).is_absolute()
        words += [option, value] if apart else [argument]
    return " ".join(_shell_word(published_path(word)) for word in words)


def published_path(text: str) -> str:
    """A path without what is nobody's business; other text as it is.

    Relative where it lies in the working directory, from ``~`` on where it lies in the home folder
    (of both, the one that is nearer), else its name alone.
    """
    path = Path(text)
    if not path.is_absolute():
        return text
    folders = [(Path.cwd(), ""), (Path.home(), "~")]
    for folder, sign in sorted(folders, key=lambda known: -len(known[0].parts)):
        if folder != Path(folder.anchor) and path.is_relative_to(folder):
            return (Path(sign) / path.relative_to(folder)).as_posix()
    return path.name or text


def _shell_word(text: str) -> str:
    """Quoted as a shell needs it, but for a ``~`` that it is to replace."""
    return f"~/{shlex.quote(text[2:])}" if text.startswith("~/") else shlex.quote(text)


def commit_of_checkout(code: Sequence[str] = ("src",)) -> str | None:
    """The commit of the checkout, ending in "-dirty" if ``code`` was changed; None without git."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    describe = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*"]
    status = ["git", "-C", str(folder), "status", "--porcelain", "--", *code]
    try:
        commit, changes = (
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            for command in (describe, status)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if changes else commit


def hash_of_code() -> str:
    """First 12 digits of the SHA-256 over names and content of the package's source files.

    A commit does not tell two changed checkouts apart, and an installed package has none.
    """
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


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
