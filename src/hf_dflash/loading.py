"""Load what commands work with, with errors that name the option."""

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .checkpoint_dflash import check_folder_exists


def load_tokenizer(target: str) -> Any:
    """The target's tokenizer, from a folder or the Hub."""
    check_folder_exists(target, "target", {})
    return AutoTokenizer.from_pretrained(target)


def load_model(target: str, dtype: str = "auto", device_map: str | None = None) -> Any:
    """The target itself, frozen and in eval mode.

    Args:
        target: Folder or Hub repository.
        dtype: Name of a torch dtype; "auto": as it was saved.
        device_map: Of transformers; `None`: all of it on the CPU, for the caller to place.

    Raises:
        ValueError: Several processes would each spread it over the same devices.
    """
    check_folder_exists(target, "target", {})
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if device_map is not None and n_processes > 1:
        raise ValueError(
            f"`target_device_map` spreads the target over the GPUs of one process, but there are "
            f"{n_processes} processes. Start one, or use `shard_target`."
        )
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=wanted, device_map=device_map)
    return model.eval().requires_grad_(False)
