"""`DFlashTrainer`: train a drafter on its target's hidden states, with transformers' Trainer.

Letters: N rows, S tokens a row, A anchor slots a row, B block size, K = B - 1 drafts, M blocks.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    EvalPrediction,
    TrainOutput,
    get_last_checkpoint,
    rotate_checkpoints,
)

from .callbacks import Evaluations
from .checkpointing import PART_FOLDER, check_complete, publish
from .collator import EpochRows, silence_repeats
from .ema import EMACallback, MovingAverage
from .exporting import adapter_export, export_drafter, push_run, write_run_card, write_run_log
from .losses import progressive_gamma
from .planner import MemoryPlan, plan_step
from .resuming import (
    CHUNK,
    check_settings,
    continue_schedule,
    finished_state,
    kept_plan,
    run_settings,
    told_settings,
    write_settings,
)
from .training_arguments import DFlashTrainingArguments
from .training_checks import (
    base_drafter,
    check_device,
    check_losses,
    check_options,
    check_training,
    check_weights,
    collator_for,
    numbered,
    placed,
)
from .training_step import TrainingStep

logger = logging.getLogger(__name__)


class DFlashTrainer(Trainer):
    """Trains a drafter. The target is frozen and run for its hidden states only.

    Args:
        model: The drafter, in float32 (mixed precision comes from ``args.bf16``); or a drafter of
            any dtype with adapters of PEFT.
        target: The target: any dtype, quantised, adapted, on one device or several.
        args: `DFlashTrainingArguments`.
        train_dataset: Rows with ``input_ids`` and ``loss_mask``; see `DFlashCollator`.
        eval_dataset: Rows of the same kind, or several such data sets by name.
        **kwargs: The other arguments of transformers' Trainer.

    Raises:
        ValueError: The drafter was made for another target, would be trained in half precision,
            or the data have no supervised token, or texts beyond the known positions.
        TypeError: A data set has no length.
        NotImplementedError: What is asked for does not work on this device, or not when sharded.
    """

    args: DFlashTrainingArguments
    model: Any
    train_dataset: Any

    def __init__(
        self,
        model: Any,
        target: Any,
        args: DFlashTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        check_training(model, target)
        if args.n_gpu > 1:  # DataParallel would cut batches apart
            logger.warning("Training on one of %d GPUs; `accelerate launch` uses all.", args.n_gpu)
            args._n_gpu = 1
        config = base_drafter(model).config
        collator = kwargs.setdefault("data_collator", collator_for(config, args, target))
        kwargs.setdefault("compute_metrics", self._evaluation_metrics)
        super().__init__(
            model=model,
            args=args,
            train_dataset=numbered(train_dataset, "train_dataset", collator),
            eval_dataset=numbered(eval_dataset, "eval_dataset", collator),
            **kwargs,
        )
        check_device(config, args, shards=self.is_fsdp_enabled)
        # The loss is divided by the weight of the whole update, not by a mean over its parts.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.target = placed(target, args.device).eval().requires_grad_(False)
        check_options(self.target, args, self.train_dataset, self.eval_dataset)
        self.step = TrainingStep(self.target, config, args)
        self.plan: MemoryPlan | None = None
        self.evaluations = Evaluations()
        self.n_rows_without_block = 0  # of this process and call
        self._part: Path | None = None  # where a checkpoint is being written
        self._batches: list[dict[str, Tensor]] = []  # of this update, and their losses so far
        self._losses: list[Tensor] = []
        self.data_record: dict[str, Any] = {}  # for the log: where the rows are from
        self.ema: MovingAverage | None = None
        if args.ema_decay is not None:
            self.ema = MovingAverage(self.model, args.ema_decay)
            self.add_callback(EMACallback(self.ema))

    # ---- data and loss ----

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Number the rows, so that their anchors are the same at every evaluation."""
        if not isinstance(eval_dataset, str):
            eval_dataset = numbered(eval_dataset, "eval_dataset", self.data_collator)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Number the rows, as for evaluation."""
        rows = numbered(test_dataset, "test_dataset", self.data_collator)
        return super().get_test_dataloader(rows)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """Draw the batches of one update and sum their weights, over accumulation and ranks."""
        if isinstance(self.train_dataset, EpochRows):
            self.train_dataset.epoch.fill_(int(self.state.epoch or 0))
        batches = []
        for _ in range(num_batches):
            batch = next(epoch_iterator, None)
            if batch is None:
                break
            self.n_rows_without_block += int((~batch["predicts"].flatten(1).any(dim=1)).sum())
            if self.accelerator.num_processes > 1 and not self.args.dataloader_drop_last:
                silence_repeats(batch, len(self.train_dataset), self.accelerator)
            batches.append(batch)
        gamma = self.gamma_at(self.state.global_step)
        weights = [self.step.total_weight(batch["predicts"], gamma) for batch in batches]
        total = sum(weights, torch.zeros(())).to(device)
        self._batches, self._losses = batches, []
        return batches, self.accelerator.gather(total[None]).sum()

    def gamma_at(self, step: int) -> float:
        """Gamma of a step."""
        first = self.args.gamma_for(self.step.config.block_size)
        last = self.args.loss_decay_gamma_last
        return first if last is None else progressive_gamma(step, self.state.max_steps, first, last)

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Weighted loss of the slots that predict; also a `SlotLosses` if asked for.

        Args:
            model: The drafter, wrapped or not.
            inputs: A batch of `DFlashCollator`.
            return_outputs: Whether to return the losses of single slots too.
            num_items_in_batch: Total weight of the update, from `get_batch_samples`; `None`: that
                of this batch.
        """
        gamma = self.gamma_at(self.state.global_step)
        if num_items_in_batch is None:  # evaluations are to be compared, so all use the last gamma
            gamma = self.gamma_at(self.state.max_steps)
            total = self.step.total_weight(inputs["predicts"], gamma)
        else:  # gradients are averaged over ranks, so each rank's share counts that much more
            total = torch.as_tensor(num_items_in_batch) / self.accelerator.num_processes
        result = self.step.losses(model, inputs, total, gamma, self.planned().logits_chunk_size)
        return (result.loss, result) if return_outputs else result.loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Of one batch; the last of an update refuses losses that are not finite."""
        loss: Tensor = super().training_step(*args, **kwargs)
        self._losses.append(loss)
        if len(self._losses) == len(self._batches):
            check_losses(self, self._losses, self._batches)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; training's logs also tell how many rows so far taught nothing, if any did."""
        if self.n_rows_without_block and "loss" in logs:
            logs["rows_without_block"] = float(self.n_rows_without_block)
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, inputs: Mapping[str, Tensor]) -> int:
        """Of the drafter's products: 6 a parameter and block token (arXiv:2001.08361)."""
        n_tokens = inputs["anchors"].numel() * self.step.config.block_size
        return 6 * n_tokens * sum(p.numel() for p in self.model.parameters())

    # ---- evaluation ----

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate; with the moving average of the weights, if there is one."""
        with self.evaluations.one(), self.averaged():
            return super().evaluate(*args, **kwargs)

    def averaged(self) -> AbstractContextManager[None]:
        """The moving average in the model's place, if there is one."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Sequence[str] | None = None,  # noqa: ARG002  # Trainer's signature
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Whether each slot's choice is right (negative: predicts nothing), and its loss.

        Returns:
            The loss, only if nothing else is wanted: the mean over batches is not that over slots;
            (N, A, K, 2); and zeros, without which Trainer would compute no metrics.
        """
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, result = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only:
            return loss, None, None
        predicts, labels = inputs["predicts"], inputs["labels"]
        table = torch.full((*predicts.shape, 2), -1.0, device=predicts.device)
        right = (result.predicted_ids == labels[predicts]).float()
        table[predicts] = torch.stack([right, result.row_losses.float()], dim=-1)
        return None, table[:, :, 1:], torch.zeros(len(predicts), device=predicts.device)

    def _evaluation_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        table = torch.as_tensor(prediction.predictions).flatten(0, 1)  # (M, K, 2)
        return self.step.metrics(table, self.gamma_at(self.state.max_steps))

    # ---- running ----

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train; a checkpoint is gone on with exactly, or refused.

        Raises:
            ValueError: The checkpoint is incomplete, or of a run with another configuration.
        """
        folder: Any = resume_from_checkpoint
        if folder is True and self._output_dir.is_dir():
            folder = get_last_checkpoint(str(self._output_dir))
        if isinstance(folder, str | Path):
            check_settings(Path(folder), self._settings())
            self.plan = kept_plan(Path(folder), self.planned(), self.args)
            if self.ema is not None:
                self.ema.load(Path(folder))
            if self._is_finished(Path(folder)):
                return TrainOutput(self.state.global_step, 0.0, {})
            check_complete(Path(folder), shards=self.is_fsdp_enabled or self.is_deepspeed_enabled)
        self.planned()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _is_finished(self, folder: Path) -> bool:
        """Whether a checkpoint has no step left; then weights and state are taken from it.

        Trainer itself would make one step more.
        """
        n_batches = 0 if self.args.max_steps > 0 else len(self.get_train_dataloader())
        state = finished_state(folder, self.args, n_batches)
        if state is None:
            return False
        logger.info("Nothing is left to train: %s is of step %d.", folder, state.global_step)
        self.state = state
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._load_best_model()
        else:
            self._load_from_checkpoint(str(folder))
        return True

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            # The config is written in the field's spelling, which is older than transformers'.
            warnings.filterwarnings("ignore", ".rope_scaling. is deprecated", FutureWarning)
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer: Any = self.optimizer
        base_rates = [group.get("initial_lr", 0.0) for group in optimizer.param_groups]
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and not self.is_deepspeed_enabled:
            continue_schedule(self.lr_scheduler, base_rates)

    def _settings(self) -> dict[str, Any]:
        parts = (self.step.config, self.args, self.train_dataset, self.target)
        chunk = self.planned().logits_chunk_size
        return {**run_settings(*parts, self.model), CHUNK: chunk}

    def planned(self) -> MemoryPlan:
        """What training or evaluation takes of the memory; estimated and logged once."""
        if self.plan is None:
            parts = (self.step.config, self.args, self.model, self.target)
            self.plan = plan_step(*parts, self.train_dataset, self.eval_dataset)
            self.plan.tell()
        return self.plan

    # ---- saving ----

    @property
    def _output_dir(self) -> Path:
        return Path(str(self.args.output_dir))

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._part is None else str(self._part)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint under another name, and give it its own when it is complete."""
        run = Path(super()._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        part = run / PART_FOLDER
        check_weights(self)
        if self.args.should_save:
            shutil.rmtree(part, ignore_errors=True)  # left by a run that was stopped
        self.accelerator.wait_for_everyone()
        self._part = part
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._part = None
        self.accelerator.wait_for_everyone()
        if self.state.best_model_checkpoint == str(part / name):
            self.state.best_model_checkpoint = str(run / name)
        if self.args.should_save:
            self.state.save_to_json(str(part / name / "trainer_state.json"))
            write_settings(part / name, self._settings())
            if self.ema is not None:
                self.ema.save(part / name)
            publish(part / name, run / name)
            shutil.rmtree(part)
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.ema is not None:
            self.ema.load(Path(str(self.state.best_model_checkpoint)))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the drafter as it is published, or its adapter; the average if there is one.

        Args:
            output_dir: Where to; ``args.output_dir`` by default.
            _internal_call: Trainer's own.
        """
        is_checkpoint = self._part is not None  # the weights as they are trained
        if is_checkpoint and not self.is_fsdp_enabled:  # whose class is not the drafter's
            super().save_model(output_dir, _internal_call=True)
            return
        folder = Path(output_dir) if output_dir else self._output_dir
        with self.averaged():
            if hasattr(self.model, "get_base_model"):
                with adapter_export(folder, publishes=self.args.should_save) as part:
                    super().save_model(str(part), _internal_call=True)
            else:
                state = self.accelerator.get_state_dict(self.model)
                if self.args.should_save:
                    dtype = None if is_checkpoint else self.args.export_dtype
                    export_drafter(self.accelerator.unwrap_model(self.model), state, folder, dtype)
        if self.args.should_save and not is_checkpoint:
            write_run_log(self, told_settings(self._settings()), folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def create_model_card(self, *_: Any, **kwargs: Any) -> None:
        """Write the card of the saved drafter or adapter: its ``model_name`` and ``license``."""
        if self.is_world_process_zero():
            write_run_card(self._output_dir, kwargs.get("model_name"), kwargs.get("license"))

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Publish the drafter, or its adapter, as `hf-dflash push` does."""
        self.save_model(_internal_call=True)
        return push_run(self, self._output_dir, *args, **kwargs)
