"""What a resumed run must share with the run that wrote its checkpoint, and whether any is left."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState

from .planner import MemoryPlan
from .training_checks import cached_taps, token_columns

SETTINGS_NAME = "dflash_run.json"
TRAINER_STATE_NAME = "trainer_state.json"
CHUNK = "logits_chunk_size"
#: Of the drafter's config: what its weights do not tell. The first are worth telling, too.
_TOLD_CONFIG = ("architecture", "block_size", "mask_token_id", "target_layer_ids")
_CONFIG = (
    "layer_types",
    "sliding_window",
    "is_causal",
    "rms_norm_eps",
    "rope_parameters",
    "hidden_act",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "attention_dropout",
    "attention_bias",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
#: Of the training arguments; not how many epochs and the learning rate: a run may be prolonged,
#: and `continue_schedule` follows.
_ARGUMENTS = (
    "n_anchors",
    "random_anchors",
    "loss_type",
    "lk_eta",
    "on_policy",
    "on_policy_temperature",
    "loss_weighting",
    "dpace_alpha",
    "n_sampled_tokens",
    "loss_decay_gamma_last",
    "seed",
    "data_seed",
    "ema_decay",
    "optim",
    "optim_args",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "bf16",
    "fp16",
    "train_sampling_strategy",
    "dataloader_drop_last",
)
#: Of the adapters of PEFT, if a drafter has some: what their weights do not tell.
_ADAPTER = (
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "bias",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
)
#: What a reader of a log is not told: digests, and what is in the files beside it.
_UNTOLD = (*_CONFIG, "rows_sha256", "target_sha256", "adapters")
#: Rows that stand for all: enough to notice other answers, another template or another order.
_MOST_ROWS = 256
#: Elements of each parameter that stand for the target's weights.
_MOST_ELEMENTS = 256


def run_settings(
    config: Any, args: Any, rows: Any, target: Any, model: Any = None
) -> dict[str, Any]:
    """All that decides what the next step does, but for the state in the checkpoint.

    Rows may be divided otherwise between devices, their batches and accumulation: what counts is
    how many there are to an update.

    Args:
        config: The drafter's.
        args: `DFlashTrainingArguments`.
        rows: The training set, or `None`.
        target: The target.
        model: The drafter, if it may have adapters.
    """
    cached = cached_taps(rows)
    values = {
        **{name: getattr(config, name) for name in (*_TOLD_CONFIG, *_CONFIG)},
        **{name: getattr(args, name) for name in _ARGUMENTS},
        "loss_decay_gamma": args.gamma_for(config.block_size),
        "rows_per_update": args.per_device_train_batch_size
        * args.gradient_accumulation_steps
        * args.world_size,
        "n_examples": None if rows is None else len(rows),
        "rows_sha256": None if rows is None else rows_digest(rows),
        "taps_dtype": None if cached is None else cached.layout.dtype,
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "adapters": adapter_settings(model),
    }
    # Cached taps are compared with the target by `check_taps`; its layers may be left out then.
    digest = target_digest(target) if values["taps_dtype"] is None else None
    if digest is not None:
        values["target_sha256"] = digest
    settings: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return settings


def told_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a reader of the run's log wants: not digests, nor what the config tells."""
    return {k: v for k, v in settings.items() if k not in _UNTOLD}


def adapter_settings(model: Any) -> dict[str, Any] | None:
    """What decides how adapters of PEFT act, by their name; `None`: there are none."""
    if not hasattr(model, "get_base_model"):
        return None
    told = {}
    for name, config in model.peft_config.items():
        values = {key: getattr(config, key, None) for key in _ADAPTER}
        modules = values["target_modules"]
        if not isinstance(modules, str | None):  # a set has no order
            values["target_modules"] = sorted(modules)
        told[name] = values
    return told


def target_digest(target: Any) -> str | None:
    """SHA-256 of the shapes and first elements of all parameters: cheap, and training moves them.

    Returns:
        `None` where weights are not at hand as they are: quantised, offloaded or divided.
    """
    parameters = list(target.parameters())
    is_plain = all(type(p) is torch.nn.Parameter and not p.is_meta for p in parameters)
    if not parameters or not is_plain or getattr(target, "is_quantized", False):
        return None
    digest = hashlib.sha256(str(len(parameters)).encode())
    for parameter in parameters:
        part = parameter.detach().flatten()[:_MOST_ELEMENTS].cpu().contiguous()
        digest.update(str(tuple(parameter.shape)).encode())
        digest.update(part.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def rows_digest(rows: Any) -> str:
    """SHA-256 of the number of rows and the content of some, spread evenly from first to last."""
    n_rows = len(rows)
    columns = token_columns(rows)
    digest = hashlib.sha256(str(n_rows).encode())
    n_read = min(n_rows, _MOST_ROWS)
    for i in range(n_read):
        row = columns[i * (n_rows - 1) // max(1, n_read - 1)]
        for name in ("input_ids", "loss_mask", "document_ids", "attention_mask"):
            if name in row:
                ids = torch.as_tensor(row[name]).long().cpu()
                digest.update(f"{name} {len(ids)}".encode() + ids.numpy().tobytes())
    return digest.hexdigest()


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Record the settings of the run with a checkpoint."""
    text = json.dumps(settings, indent=2, sort_keys=True)
    (folder / SETTINGS_NAME).write_text(text + "\n", encoding="utf-8")


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on with a checkpoint that another configuration wrote.

    Raises:
        ValueError: The checkpoint has no record, or a setting differs. What the record of an older
            release does not tell is taken to be the same.
    """
    path = folder / SETTINGS_NAME
    if not path.is_file():
        raise ValueError(
            f"`resume_from_checkpoint` must be a checkpoint of DFlashTrainer, but {folder} has no "
            f"{SETTINGS_NAME}. To start from a drafter's weights, load it with "
            "DFlashDraftModel.from_pretrained and train without resuming."
        )
    recorded = json.loads(path.read_text(encoding="utf-8"))
    recorded.pop(CHUNK, None)  # may be lowered, if memory has run out
    changed = [
        f"`{name}` was {recorded[name]!r}, is {settings.get(name)!r}"
        for name in recorded
        if recorded[name] != settings.get(name)
        and (name != "target_sha256" or name in settings)  # not every target has one
    ]
    if changed:
        raise ValueError(
            f"The run that wrote {folder} had another configuration: {'; '.join(changed)}. Set it "
            "back, or start a new run from the drafter's weights."
        )


def kept_plan(folder: Path, plan: MemoryPlan, args: Any) -> MemoryPlan:
    """The plan with as many rows of logits at once as before: sums depend on it in the last digit.

    Args:
        folder: Of the checkpoint that is gone on with.
        plan: By what memory is free today.
        args: `DFlashTrainingArguments`; a ``logits_chunk_size`` given there counts more.
    """
    chunk = json.loads((folder / SETTINGS_NAME).read_text(encoding="utf-8")).get(CHUNK)
    is_free = args.logits_chunk_size is None and chunk is not None  # older releases wrote none
    return replace(plan, logits_chunk_size=chunk) if is_free else plan


def continue_schedule(scheduler: Any, base_rates: Sequence[float]) -> None:
    """Go on at the place that a checkpoint had reached in this run's own schedule.

    The loaded rates are those of the run that wrote it: of its learning rate, and at the end of its
    steps, which may be zero.

    Args:
        scheduler: After its state and the optimiser's were loaded.
        base_rates: Its own before that, one for each group of parameters.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it with FSDP
    if not isinstance(scheduler, LambdaLR):  # others compute a rate from the one before
        return
    scheduler.base_lrs = list(base_rates)
    rates: list[Any] = [
        base * share(scheduler.last_epoch)
        for base, share in zip(base_rates, scheduler.lr_lambdas, strict=True)
    ]
    groups = scheduler.optimizer.param_groups
    for group, base, rate in zip(groups, base_rates, rates, strict=True):
        group["initial_lr"], group["lr"] = base, rate
    scheduler._last_lr = rates


def finished_state(folder: Path, args: Any, n_batches: int) -> TrainerState | None:
    """The state of a checkpoint that has no step left, or `None`.

    Args:
        folder: Of the checkpoint.
        args: `DFlashTrainingArguments` of the run that is to go on with it.
        n_batches: Of one process in an epoch; of no account if ``max_steps`` is given.
    """
    path = folder / TRAINER_STATE_NAME
    if not path.is_file():
        return None
    state = TrainerState.load_from_json(str(path))
    n_steps = args.max_steps
    if n_steps <= 0:
        n_updates = max(1, math.ceil(n_batches / args.gradient_accumulation_steps))
        n_steps = math.ceil(args.num_train_epochs * n_updates)
    return state if state.global_step >= n_steps else None
