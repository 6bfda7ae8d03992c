"""Write the trained drafter as it is published: whole, strict to load, with a card."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from torch import Tensor

from . import __version__
from .adapter_card import is_adapter, write_adapter_card
from .checkpointing import PART_FOLDER, publish_files
from .hub import push_folder
from .model_card import CARD_NAME, CardOptions, write_card
from .provenance import device_name, published_name, published_path
from .training_log import Scalar, TrainingLog, as_scalars, write_training_log

#: Arguments of transformers that decide how a run goes, besides those in a checkpoint's settings.
_ARGUMENTS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "num_train_epochs",
    "max_steps",
    "max_grad_norm",
    "weight_decay",
    "optim",
    "bf16",
    "fp16",
)


def export_drafter(
    drafter: Any, state: Mapping[str, Tensor], folder: Path, dtype: str | None
) -> None:
    """Save weights as a published drafter, file by file complete.

    Args:
        drafter: Whose config and drafting policy to write.
        state: All its weights.
        folder: Where to.
        dtype: Of the file; `None`: as they are.

    Raises:
        ValueError: A weight is infinite or not a number.
    """
    kept = None if dtype is None else getattr(torch, dtype)
    with torch.device("meta"):  # neither memory nor random numbers are spent on what is replaced
        exported = type(drafter)(copy.deepcopy(drafter.config))
    weights = {name: t.detach().cpu().to(kept or t.dtype) for name, t in state.items()}
    broken = [name for name, t in weights.items() if not bool(t.isfinite().all())]
    if broken:
        raise ValueError(
            f"A drafter's weights must be finite to be exported in {dtype or 'their own dtype'}, "
            f"but {broken[0]} and {len(broken) - 1} more are not. Go back to a checkpoint before "
            "the run diverged; if its weights are finite, leave `export_dtype` out."
        )
    exported.load_state_dict(weights, strict=True, assign=True)
    exported.generation_config = drafter.generation_config
    part = folder / f"{PART_FOLDER}_export"
    shutil.rmtree(part, ignore_errors=True)
    exported.save_pretrained(part)
    publish_files(part, folder)


def write_run_log(trainer: Any, settings: Mapping[str, Any], folder: Path) -> None:
    """Write how the drafter was trained beside it; a card tells it from there.

    Args:
        trainer: A `DFlashTrainer`.
        settings: What decides its steps.
        folder: Of the drafter.
    """
    args, target = trainer.args, trainer.target
    target_name = getattr(target.config, "_name_or_path", None)
    arguments = {name: getattr(args, name) for name in _ARGUMENTS}
    packages = {"hf_dflash": __version__, "torch": torch.__version__}
    log = TrainingLog(
        target=published_name(target_name) if target_name else None,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={**packages, "transformers": transformers.__version__},
        device=device_name(args.device),
        n_processes=args.world_size,
        n_steps=trainer.state.global_step,
        settings=_published({**settings, **arguments, "target_dtype": str(target.dtype)}),
        data=_published(trainer.data_record),
        log=[as_scalars(entry) for entry in trainer.state.log_history],
    )
    write_training_log(log, folder)


def _published(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Values as a log holds them, without the places of this machine."""
    return {
        name: published_path(value) if isinstance(value, str) else value
        for name, value in as_scalars(values).items()
    }


@contextmanager
def adapter_export(folder: Path, *, publishes: bool) -> Iterator[Path]:
    """Where PEFT is to write an adapter; its files are moved into ``folder`` when all are whole.

    PEFT's form of a card is left out: the folder's own card stays.

    Args:
        folder: Of the run.
        publishes: Whether this process is the one that writes.
    """
    part = folder / f"{PART_FOLDER}_export"
    if publishes:
        shutil.rmtree(part, ignore_errors=True)
    yield part
    if publishes:
        (part / CARD_NAME).unlink(missing_ok=True)
        publish_files(part, folder)


def write_run_card(folder: Path, name: str | None, licence: str | None = None) -> None:
    """Write the card of the drafter that a run has saved, or of its adapter.

    Args:
        folder: Of the drafter or adapter.
        name: What it is loaded by.
        licence: As the Hub writes it; by default that of the card that is there.

    Raises:
        RuntimeError: It was not saved yet.
    """
    options = CardOptions(name=name, licence=licence)
    if is_adapter(folder):
        write_adapter_card(folder, options)
        return
    if not (folder / "config.json").is_file():
        raise RuntimeError(
            f"A card tells of a saved drafter, and {folder} holds none. Call `save_model()` first."
        )
    write_card(folder, options=options)


def push_run(
    trainer: Any,
    folder: Path,
    commit_message: str | None = None,
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    *,
    private: bool | None = None,
) -> Any:
    """Publish the drafter that a run has saved, or its adapter: its files and no checkpoints.

    Args:
        trainer: A `DFlashTrainer`; the repository is named by its arguments, or by the folder.
        folder: Of the drafter.
        commit_message: Of the commit.
        blocking: Whether to wait for the upload.
        token: Of the Hub; by default that of the arguments, or of `hf auth login`.
        revision: Branch.
        private: Whether a new repository is.

    Returns:
        Address of the repository, or a future of it; `None` on all ranks but the first.
    """
    if not trainer.is_world_process_zero():
        return None
    args = trainer.args
    name = trainer.hub_model_id or args.hub_model_id or folder.absolute().name
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    trainer.create_model_card(model_name=name)
    trainer._finish_current_push()
    push = partial(
        push_folder,
        folder,
        name,
        private=args.hub_private_repo if private is None else private,
        revision=revision or args.hub_revision,
        commit_message=commit_message,
        token=token or args.hub_token,
    )
    return push() if blocking else HfApi().run_as_future(push)
