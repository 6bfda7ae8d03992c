"""The loss of one batch: target, drafter on all blocks at once, head on the slots that predict.

Letters: N rows, S tokens a row, A anchor slots a row, B block size, R slots that predict, T taps,
Ht target hidden size, H draft hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .blocks import BlockMaskRule, block_noise_ids, block_positions
from .losses import (
    RowLoss,
    RowWeights,
    SlotLosses,
    block_chunks,
    chunked_loss,
    cross_entropy,
    decay_weights,
    dpace_row_weights,
    dpace_weights,
    fixed_weights,
    forward_kl,
    lk_alpha,
    lk_lambda,
    row_chunks,
    total_variation,
)
from .metrics import acceptance_metrics
from .on_policy import draft_ids, score_drafts, slot_draws, text_cache
from .sampled_vocabulary import SampledVocabulary
from .target import draft_logits, noise_embeddings
from .target_states import TargetStates, run_target
from .training_arguments import DFlashTrainingArguments

Batch = Mapping[str, Tensor]


class TrainingStep:
    """Forward and loss of batches from `DFlashCollator`. It keeps nothing between calls.

    Args:
        target: The target model, frozen and in eval mode.
        config: The drafter's config.
        args: Kind and weighting of the loss.
    """

    def __init__(self, target: Any, config: Any, args: DFlashTrainingArguments) -> None:
        self.target = target
        self.config = config
        self.args = args

    def slot_weights(self, gamma: float) -> Tensor:
        """Weight of each slot of a block: (B,) float32, 0 for the anchor."""
        return torch.cat([torch.zeros(1), decay_weights(self.config.block_size - 1, gamma)])

    def total_weight(self, predicts: Tensor, gamma: float) -> Tensor:
        """What a batch adds to the denominator of the loss, known before the forward.

        The sum of the slots' weights; with D-PACE, whose weights follow the drafter, the number of
        blocks.

        Args:
            predicts: (N, A, B) bool.
            gamma: Of this step.
        """
        predicts = predicts.cpu()
        if self.args.loss_weighting == "dpace":
            return predicts.any(dim=-1).sum().float()
        return (predicts * self.slot_weights(gamma)).sum()

    def losses(
        self, model: Any, batch: Batch, total: Tensor, gamma: float, chunk: int
    ) -> SlotLosses:
        """Run the batch and weigh its losses.

        Args:
            model: The drafter, wrapped or not.
            batch: From `DFlashCollator`.
            total: Weight to divide by.
            gamma: Of this step.
            chunk: Most rows of logits at once.
        """
        cache = text_cache() if self.args.on_policy else None
        states = self.target_states(batch, cache)
        hidden = self.hidden_states(model, batch, states.taps)
        predicts = batch["predicts"]
        rows = hidden.flatten(0, 1)[predicts.flatten()]  # (R, H)
        weights: RowWeights
        if self.args.loss_weighting == "dpace":
            blocks = predicts[..., 1:].flatten(0, 1)
            weights = dpace_row_weights(blocks, self.args.dpace_alpha)
            chunks = block_chunks(blocks.sum(dim=1), chunk)
        else:
            weights = fixed_weights((predicts * self.slot_weights(gamma).to(rows.device))[predicts])
            chunks = row_chunks(len(rows), chunk)
        total = total.to(rows.device)
        if self.args.n_sampled_tokens is not None and rows.requires_grad:
            return self._sampled_loss(rows, batch, weights, total, chunks)
        last = states.last_hidden_states
        if cache is not None and last is not None:
            row_loss = self._loss_on_drafts(rows, batch, last, cache, chunks)
        else:
            row_loss = self._row_loss(batch, states)
        return chunked_loss(rows, self.head, row_loss, weights, total, chunks)

    def _sampled_loss(
        self,
        rows: Tensor,
        batch: Batch,
        weights: RowWeights,
        total: Tensor,
        chunks: Sequence[slice],
    ) -> SlotLosses:
        """The loss on part of the vocabulary; what is drawn follows from the batch alone."""
        labels = batch["labels"][batch["predicts"]]
        anchors = batch["anchors"].clamp(min=0)  # empty slots, of which flex has more, are -1
        seed = int(labels.sum()) * 1_000_003 + int(anchors.sum()) + self.args.seed
        generator = torch.Generator().manual_seed(seed)
        sampled = SampledVocabulary(
            self.target, self.config, labels, self.args.n_sampled_tokens or 0, generator
        )
        result = chunked_loss(rows, sampled.head, sampled.row_loss, weights, total, chunks)
        return replace(result, predicted_ids=sampled.ids[result.predicted_ids])

    def _loss_on_drafts(
        self,
        rows: Tensor,
        batch: Batch,
        last_hidden_states: Tensor,
        cache: Any,
        chunks: Sequence[slice],
    ) -> RowLoss:
        """The distance from the target's law behind the drafter's own drafts.

        It is 0 behind a draft that ends the text: decoding would not go on there. Weights and
        their sum stay those of the batch, known before the forward.
        """
        temperature = self.args.on_policy_temperature
        draws = slot_draws(batch, self.args.seed)
        ids = draft_ids(rows, self.head, chunks, temperature, draws)
        scores = score_drafts(self.target, cache, last_hidden_states, batch, ids)
        distance = self._distance(lambda piece: self.head(scores.states[piece]))

        def row_loss(logits: Tensor, piece: slice) -> Tensor:
            return distance(logits, piece) * scores.reached[piece].to(logits.device)

        return row_loss

    def head(self, rows: Tensor) -> Tensor:
        """Logits (R, V) of the target's own head."""
        return draft_logits(self.target, rows, self.config)

    def _row_loss(self, batch: Batch, states: TargetStates) -> RowLoss:
        predicts = batch["predicts"]
        if states.last_hidden_states is None:
            return cross_entropy(batch["labels"][predicts])
        # The target's law of the token at anchor + k stands at anchor + k - 1.
        row, slot, k = predicts.nonzero(as_tuple=True)
        teacher = states.last_hidden_states[row, batch["anchors"][row, slot] + k - 1]
        return self._distance(lambda rows: self.head(teacher[rows]))

    def _distance(self, teacher_logits: Callable[[slice], Tensor]) -> RowLoss:
        """The loss on the target's distribution that was chosen."""
        if self.args.loss_type == "lk_lambda":
            return lk_lambda(teacher_logits, self.args.lk_eta)
        kinds = {
            "forward_kl": forward_kl,
            "total_variation": total_variation,
            "lk_alpha": lk_alpha,
        }
        return kinds[self.args.loss_type](teacher_logits)

    def metrics(self, table: Tensor, gamma: float) -> dict[str, float]:
        """Acceptance and loss over the slots of an evaluation.

        Args:
            table: (M, K, 2): whether each slot's choice was right, negative if it predicts
                nothing; and its loss.
            gamma: Of the decay.
        """
        right, losses = table[..., 0].round().long(), table[..., 1]
        predicts = right >= 0
        metrics = acceptance_metrics(right)
        if self.args.loss_weighting == "dpace":
            weights = dpace_weights(losses, predicts, self.args.dpace_alpha)
            total = predicts.any(dim=1).sum()
        else:
            weights = predicts * self.slot_weights(gamma)[1:]
            total = weights.sum()
        return metrics | ({"loss": float((losses * weights).sum() / total)} if total > 0 else {})

    def hidden_states(self, model: Any, batch: Batch, taps: Tensor) -> Tensor:
        """Run the drafter on all blocks of a batch; returns (N, A * B, H).

        Args:
            model: The drafter, wrapped or not.
            batch: From `DFlashCollator`.
            taps: (N, S, T * Ht), raw.
        """
        config, anchors = self.config, batch["anchors"]
        size = config.block_size
        noise_ids = block_noise_ids(batch["input_ids"], anchors, size, config.mask_token_id)
        positions = block_positions(batch["position_ids"], anchors, size)
        with torch.no_grad():
            noise = noise_embeddings(self.target, noise_ids, config.input_embedding_scale)
        dtype = next(model.parameters()).dtype
        return model(
            noise_embeds=noise.to(anchors.device, dtype),
            context_hidden_states=taps.to(anchors.device, dtype),
            position_ids=torch.cat([batch["position_ids"], positions], dim=1),
            attention_mask=BlockMaskRule(anchors, batch["document_ids"], size),
        ).last_hidden_state

    def target_states(self, batch: Batch, cache: Any = None) -> TargetStates:
        """Raw taps of every token, run or read from the cache; and what distillation needs.

        Args:
            batch: From `DFlashCollator`.
            cache: Takes the target's keys and values, to score drafts with.

        Raises:
            NotImplementedError: Distillation from cached taps, which lack the last hidden states.
        """
        keeps_last = self.args.loss_type != "cross_entropy"
        if "taps" not in batch:
            return run_target(
                self.target,
                self.config.target_layer_ids,
                batch["input_ids"],
                batch["document_ids"],
                keeps_last=keeps_last,
                cache=cache,
            )
        if keeps_last:
            raise NotImplementedError(
                f'`loss_type`="{self.args.loss_type}" needs the target\'s last hidden states, '
                'which cached taps lack. Train on plain rows, or with "cross_entropy".'
            )
        return TargetStates(batch["taps"], None)
