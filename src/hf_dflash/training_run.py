"""One run of `hf-dflash train`: load, build the trainer, train, save."""

import gc
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers.trainer_utils import get_last_checkpoint

from .callbacks import DecodingCallback, prompts_of
from .collator import EpochRows
from .configuration_dflash import DFlashConfig
from .loading import load_model, load_tokenizer
from .modeling_dflash import DFlashDraftModel
from .row_file import open_rows
from .run_arguments import RunArguments, parse_run
from .sharding import check_one_forward_a_batch, shard_target
from .taps_cache import CachedTaps, check_taps, drop_layers
from .trainer import DFlashTrainer
from .training_arguments import DFlashTrainingArguments
from .training_log import TRAINING_LOG_NAME, read_data_record, read_training_log
from .warm_start import init_from_target, merge_adapter

logger = logging.getLogger(__name__)

#: Of the first row: enough to see how large queries and keys are.
_TEXT_TOKENS = 512


def build_run(words: Sequence[str]) -> tuple[RunArguments, DFlashTrainer]:
    """Read the command line and build the trainer, so that what is wrong is said before step 1.

    Args:
        words: See `hf_dflash.run_arguments.parse_run`.

    Raises:
        ValueError: Arguments contradict each other, or do not fit the data or the models.
        RuntimeError: A package or several processes are missing.
        NotImplementedError: What is asked for does not go together.
    """
    run, args = parse_run(words)
    _check_output(args)
    args.dataloader_pin_memory &= args.device.type == "cuda"  # torch warns of it elsewhere
    rows: Any = open_rows(Path(run.data))
    slices = _slices(run.eval_data or [])
    torch.manual_seed(args.seed)  # a new drafter's weights are part of the run
    tokenizer = load_tokenizer(run.target)
    target = load_model(run.target, run.target_dtype, run.target_device_map)
    drafter = _drafter(run, args, target, tokenizer, rows)
    if run.taps is not None:
        rows = CachedTaps(rows, Path(run.taps), drafter.config)
        if not slices and not run.shard_target:  # else the trainer checks: its layers are run
            check_taps(target, rows)
            drop_layers(target)
            logger.info("The target's layers are not loaded onto the device: taps are cached.")
    if run.shard_target:
        for name, part in {"data": rows, **slices}.items():
            check_one_forward_a_batch(part, name)
        shard_target(target, args.device)
    model = drafter if run.lora_rank is None else _adapted(drafter, run)
    # One alone needs no name of its own.
    evaluation: Any = next(iter(slices.values())) if len(slices) == 1 else slices or None
    trainer = DFlashTrainer(model, target, args, rows, evaluation)
    trainer.data_record = read_data_record(Path(run.data))
    if run.decoding_prompts:
        prompts = [p for part in slices.values() for p in prompts_of(part, run.decoding_prompts)]
        n_new = run.decoding_max_new_tokens
        trainer.add_callback(DecodingCallback(trainer, prompts, max_new_tokens=n_new))
    return run, trainer


def finish_run(run: RunArguments, trainer: DFlashTrainer) -> None:
    """Train, evaluate, and write the drafter to ``output_dir``; it is pushed if that was asked for.

    A finished run that is resumed leaves everything as it is.

    Raises:
        ValueError: The checkpoint to resume was written by another configuration.
    """
    result = trainer.train(resume_from_checkpoint=_resumed(trainer.args))
    step = trainer.state.global_step
    if not result.metrics and _is_written(trainer.args, step):
        logger.info("The drafter in %s is that of step %d already.", trainer.args.output_dir, step)
        return
    last = [name for log in trainer.state.log_history if log["step"] == step for name in log]
    if run.eval_data is not None and not any(name.startswith("eval_") for name in last):
        trainer.evaluate()
    if run.lora_rank is not None and run.lora_merge:
        with trainer.averaged():
            trainer.model = merge_adapter(trainer.model)
        trainer.ema = None  # merged already
    trainer.save_model()
    if trainer.is_world_process_zero():
        logger.info("The drafter is in %s.", trainer.args.output_dir)
    trainer.accelerator.wait_for_everyone()  # processes leave together


def leave_processes() -> None:
    """Leave the other processes of a finished run; nothing of it may be held any more.

    The group's threads end with its last holder, and DDP is one. A thread of gloo's that still
    lives while the interpreter shuts down aborts the process now and then
    (https://github.com/pytorch/pytorch/pull/179291): a finished run would look like a failed one,
    and torch's launchers on the other nodes would wait for this one for five minutes.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    gc.collect()
    for thing in gc.get_objects():
        if type(thing) is DeviceMesh:  # kept for ever by what torch remembers of sharded operations
            getattr(thing, "_pg_registry", {}).clear()
    torch.distributed.destroy_process_group()


def _slices(paths: Sequence[str]) -> dict[str, Any]:
    """Held-out rows by the names of their files."""
    slices = {Path(path).name.split(".")[0]: open_rows(Path(path)) for path in paths}
    if len(slices) < len(paths):
        raise ValueError(
            f"`eval_data` must be files of different names, by which metrics are told apart, got "
            f"{list(paths)}. Rename one."
        )
    return slices


def _check_output(args: DFlashTrainingArguments) -> None:
    """Refuse to train over another run's checkpoints, and to resume what is not there."""
    folder = Path(str(args.output_dir))
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    wanted = _resumed(args)
    if last is not None and not wanted:
        raise ValueError(
            f"`output_dir` {folder} has checkpoints of an earlier run ({Path(last).name}). Go on "
            "with --resume_from_checkpoint true, or give another folder."
        )
    missing = last is None if wanted is True else wanted and not Path(str(wanted)).is_dir()
    if missing:
        raise ValueError(
            f"`resume_from_checkpoint` needs a checkpoint, but there is none in "
            f"{folder if wanted is True else wanted}. Leave it out to start."
        )


def _is_written(args: DFlashTrainingArguments, step: int) -> bool:
    """Whether the drafter of a step is in ``output_dir``; its log is what is written last."""
    path = Path(str(args.output_dir)) / TRAINING_LOG_NAME
    return path.is_file() and read_training_log(path).n_steps == step


def _resumed(args: DFlashTrainingArguments) -> str | bool:
    given = args.resume_from_checkpoint or "false"
    return {"true": True, "false": False}.get(given.lower(), given)


def _drafter(
    run: RunArguments, args: DFlashTrainingArguments, target: Any, tokenizer: Any, rows: Any
) -> Any:
    kernel = run.drafter_attention
    if kernel is None:
        kernel = "flex_attention" if args.device.type == "cuda" else "sdpa"
    if run.drafter is not None:
        options: dict[str, Any] = {"dtype": torch.float32}  # what is trained must not be rounded
        if run.block_size is not None:  # no weight depends on it
            options["config"] = DFlashConfig.from_pretrained(run.drafter)
            options["config"].block_size = run.block_size
        return DFlashDraftModel.from_pretrained(run.drafter, attn_implementation=kernel, **options)
    config = DFlashConfig.for_target(
        target.config, tokenizer=tokenizer, **run.new_drafter_options()
    )
    config._attn_implementation = kernel
    drafter = DFlashDraftModel(config)
    if run.init_from_target:
        text = torch.as_tensor(EpochRows(rows)[0]["input_ids"])[None, :_TEXT_TOKENS]
        copied = init_from_target(drafter, target, input_ids=text)
        logger.info("Set %d of the drafter's parameters by the target's.", len(copied))
    return drafter


def _adapted(drafter: Any, run: RunArguments) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise RuntimeError("`lora_rank` needs `peft`: pip install 'hf-dflash[train]'.") from error
    config = LoraConfig(
        r=run.lora_rank or 1,
        lora_alpha=run.lora_alpha or run.lora_rank or 1,
        target_modules="all-linear",
    )
    with warnings.catch_warnings():
        # PEFT asks transformers for an attribute that has another name by now.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is dep", FutureWarning)
        return get_peft_model(drafter, config)
