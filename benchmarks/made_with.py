"""What the JSON file of every benchmark here says of how it was made."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import torch

from hf_dflash import provenance

#: What a benchmark runs; results, which lie beside it, are no code.
CODE = ("src", "benchmarks/*.py")


def made_with(device: torch.device | None = None) -> dict[str, Any]:
    """Command, commit, date, versions, device and threads of this process.

    Args:
        device: That computes; the CPU if left out.
    """
    command = provenance.published_command("python", sys.argv)
    return asdict(provenance.made_with(command, device or torch.device("cpu"), CODE))


def usual_device() -> torch.device:
    """A GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
