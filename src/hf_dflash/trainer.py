"""`DFlashTrainer`: train a drafter on its target's hidden states, with transformers' Trainer.

Letters: N rows, S tokens a row, A anchor slots a row, B block size, K = B - 1 drafts, R slots that
predict, T taps, Ht target hidden size, H draft hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalPrediction

from .blocks import BlockMaskRule, block_noise_ids, block_positions
from .collator import DFlashCollator
from .losses import chunked_loss, cross_entropy, decay_weights, progressive_gamma
from .metrics import acceptance_metrics
from .target import TargetTaps, check_pair, draft_logits, noise_embeddings

#: Gamma of DFlash for the block sizes it was published with (arXiv:2602.06036, A.1).
PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    """Transformers' training arguments with the papers' defaults, and the drafter's own.

    Args:
        n_anchors: Most blocks a row and epoch (DFlash A.1: 512).
        random_anchors: Draw them anew each epoch; `False` is the paper's ablation baseline.
        loss_decay_gamma: In slots; `None`: 7, 5, 4 for blocks of 16, 10, 8 (DFlash A.1), half the
            drafts otherwise.
        loss_decay_gamma_last: Gamma at the last step, reached linearly (DFlare); `None`: constant.
        logits_chunk_size: Most rows of logits that exist at once.
    """

    learning_rate: float = field(default=6e-4)
    lr_scheduler_type: str = field(default="cosine")
    warmup_steps: float = field(default=0.04)
    max_grad_norm: float = field(default=1.0)
    remove_unused_columns: bool | None = field(default=False)
    n_anchors: int = field(default=512, metadata={"help": "Most blocks a row and epoch."})
    random_anchors: bool = field(default=True, metadata={"help": "Draw anchors anew each epoch."})
    loss_decay_gamma: float | None = field(
        default=None, metadata={"help": "Decay of the loss over the block, in slots."}
    )
    loss_decay_gamma_last: float | None = field(
        default=None, metadata={"help": "Gamma at the last step; rises linearly (DFlare)."}
    )
    logits_chunk_size: int = field(
        default=2048, metadata={"help": "Most rows of logits that exist at once."}
    )


class _NumberedRows(Dataset[dict[str, Any]]):
    """A data set whose rows know their place, by which anchors are drawn."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self._rows[index], "row_id": index}


class DFlashTrainer(Trainer):
    """Trains a drafter. The target is frozen and run for its taps only.

    Args:
        model: The drafter, in float32 (mixed precision comes from ``args.bf16``).
        target: The target: any dtype, quantised, adapted, on one device or several.
        args: `DFlashTrainingArguments`.
        train_dataset: Rows with ``input_ids`` and ``loss_mask``.
        eval_dataset: Rows of the same kind.
        **kwargs: The other arguments of transformers' Trainer.

    Raises:
        ValueError: The drafter was made for another target.
    """

    args: DFlashTrainingArguments

    def __init__(
        self,
        model: Any,
        target: Any,
        args: DFlashTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        check_pair(target, model.config)
        self.target = target.eval().requires_grad_(False)
        self.drafter_config = model.config
        self.block_size = model.config.block_size
        kwargs.setdefault(
            "data_collator",
            DFlashCollator(
                self.block_size, args.n_anchors, seed=args.seed, random=args.random_anchors
            ),
        )
        kwargs.setdefault("compute_metrics", _evaluation_metrics)
        super().__init__(
            model=model,
            args=args,
            train_dataset=None if train_dataset is None else _NumberedRows(train_dataset),
            eval_dataset=None if eval_dataset is None else _NumberedRows(eval_dataset),
            **kwargs,
        )
        # The loss is divided by the weight of the whole update, not by a mean over its parts.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True

    def slot_weights(self) -> Tensor:
        """Weight of each slot of a block at this step: (B,) float32, 0 for the anchor."""
        args, n_drafts = self.args, self.block_size - 1
        gamma = args.loss_decay_gamma or PUBLISHED_GAMMA.get(self.block_size, n_drafts / 2)
        if args.loss_decay_gamma_last is not None:
            step, last = self.state.global_step, args.loss_decay_gamma_last
            gamma = progressive_gamma(step, max(self.state.max_steps, 1), gamma, last)
        return torch.cat([torch.zeros(1), decay_weights(n_drafts, gamma)])

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """Draw the batches of one update and sum their weights, over accumulation and ranks."""
        if isinstance(self.data_collator, DFlashCollator):
            self.data_collator.epoch.fill_(int(self.state.epoch or 0))
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        weights = self.slot_weights()
        total = sum(((b["predicts"].cpu() * weights).sum() for b in batches), torch.zeros(()))
        total = self.accelerator.gather(total.to(device)[None]).sum()
        return batches, total

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Weighted cross-entropy of the slots that predict; also their choices if asked for."""
        hidden = self.draft_hidden_states(model, inputs)
        predicts = inputs["predicts"]
        weights = (predicts * self.slot_weights().to(predicts.device))[predicts]
        total = weights.sum() if num_items_in_batch is None else num_items_in_batch
        result = chunked_loss(
            hidden.flatten(0, 1)[predicts.flatten()],
            lambda rows: draft_logits(self.target, rows, self.drafter_config),
            cross_entropy(inputs["labels"][predicts]),
            weights,
            # Gradients are averaged over ranks, so each rank's share counts that much more.
            (total if num_items_in_batch is None else total / self.accelerator.num_processes),
            self.args.logits_chunk_size,
        )
        return (result.loss, result) if return_outputs else result.loss

    def draft_hidden_states(self, model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run target and drafter on a batch from the collator; returns (N, A * B, H)."""
        config, anchors = self.drafter_config, inputs["anchors"]
        noise_ids = block_noise_ids(
            inputs["input_ids"], anchors, self.block_size, config.mask_token_id
        )
        positions = block_positions(inputs["position_ids"], anchors, self.block_size)
        with torch.no_grad():
            taps = self.target_taps(inputs)
            noise = noise_embeddings(self.target, noise_ids, config.input_embedding_scale)
        dtype = next(model.parameters()).dtype
        return model(
            noise_embeds=noise.to(anchors.device, dtype),
            context_hidden_states=taps.to(anchors.device, dtype),
            position_ids=torch.cat([inputs["position_ids"], positions], dim=1),
            attention_mask=BlockMaskRule(anchors, inputs["document_ids"], self.block_size),
        ).last_hidden_state

    def target_taps(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Raw taps of every token: (N, S, T * Ht). Packed documents do not see one another."""
        layer_ids = self.drafter_config.target_layer_ids
        with TargetTaps(self.target, layer_ids) as taps, taps.recording():
            self.target.get_decoder()(
                input_ids=inputs["input_ids"].to(self.target.device),
                position_ids=inputs["position_ids"].to(self.target.device),
                use_cache=False,
            )
            return torch.cat(taps.take(), dim=-1)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Sequence[str] | None = None,  # noqa: ARG002  # Trainer's signature
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss, and for each slot whether its choice is right (-1 where nothing is predicted)."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, result = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only:
            return loss, None, None
        predicts, labels = inputs["predicts"], inputs["labels"]
        right = torch.full(predicts.shape, -1, dtype=torch.long, device=predicts.device)
        right[predicts] = (result.predicted_ids == labels[predicts]).long()
        right = right[..., 1:].flatten(0, 1)  # (N * A, K)
        return loss, right, torch.zeros_like(right[:, 0])


def _evaluation_metrics(prediction: EvalPrediction) -> dict[str, float]:
    return acceptance_metrics(torch.as_tensor(prediction.predictions))
