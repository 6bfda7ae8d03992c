"""Two implementations of one loss: hf-dflash's, and the plainest that autograd allows.

Letters: N rows, S tokens a row, A anchors a row, B block size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from hf_dflash import DFlashConfig, DFlashDraftModel, DFlashTrainingArguments
from hf_dflash.training_step import TrainingStep
from training_worker import Batch, Inputs


class TargetEnds(nn.Module):
    """A target's embedding and head: all that a step needs of it once its taps are there."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        embedding, head = inputs.target["embedding"], inputs.target["head"]
        self.embed_tokens = nn.Embedding.from_pretrained(embedding)
        self.lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(head, requires_grad=False)
        self.dtype = head.dtype

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head


def drafter_of(inputs: Inputs) -> DFlashDraftModel:
    """hf-dflash's drafter with the weights that all methods start from."""
    drafter = DFlashDraftModel(DFlashConfig(**inputs.sizes["drafter"]))
    drafter.load_state_dict(inputs.drafter)
    return drafter.train()


class Ours:
    """`TrainingStep` as `DFlashTrainer` calls it, on cached taps."""

    def __init__(self, inputs: Inputs) -> None:
        self.drafter = drafter_of(inputs)
        self._gamma, self._chunk = inputs.sizes["gamma"], inputs.sizes["chunk"]
        args = DFlashTrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
        self._step = TrainingStep(TargetEnds(inputs), self.drafter.config, args)

    def loss(self, batch: Batch) -> Tensor:
        """Loss of one batch."""
        total = self._step.total_weight(batch["predicts"], self._gamma)
        return self._step.losses(self.drafter, batch, total, self._gamma, self._chunk).loss


class Plain:
    """The loss as it is defined: a table of who sees whom, logits of all slots, autograd."""

    def __init__(self, inputs: Inputs) -> None:
        self.drafter = drafter_of(inputs)
        self._ends = TargetEnds(inputs)
        self._gamma = inputs.sizes["gamma"]

    def loss(self, batch: Batch) -> Tensor:
        """Loss of one batch."""
        anchors, config = batch["anchors"], self.drafter.config
        rows = torch.arange(len(anchors))[:, None]
        slots = torch.arange(config.block_size)
        ids = torch.full((*anchors.shape, len(slots)), config.mask_token_id)
        ids[..., 0] = batch["input_ids"][rows, anchors.clamp(min=0)]
        start = batch["position_ids"][rows, anchors.clamp(min=0)]
        positions = (start[..., None] + slots).flatten(1)
        hidden = self.drafter(
            noise_embeds=self._ends.embed_tokens(ids.flatten(1)),
            context_hidden_states=batch["taps"],
            position_ids=torch.cat([batch["position_ids"], positions], dim=1),
            attention_mask=Table(who_sees_whom(batch, len(slots))),
        ).last_hidden_state
        logits = self._ends.lm_head(hidden)  # (N, A * B, V)
        losses = F.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="none"
        ).view_as(batch["labels"])
        weights = batch["predicts"] * torch.exp((1 - slots) / self._gamma)
        return (losses * weights).sum() / weights.sum()


def who_sees_whom(batch: Batch, block_size: int) -> Tensor:
    """The training mask, written out: (N, A * B, S + A * B) bool."""
    anchors, documents = batch["anchors"], batch["document_ids"]
    n_tokens = documents.shape[1]
    home = documents.gather(1, anchors.clamp(min=0))
    context = torch.arange(n_tokens) < anchors[..., None]
    context &= documents[:, None] == home[..., None]
    block = torch.arange(anchors.shape[1] * block_size) // block_size
    own = (block[:, None] == block).expand(len(anchors), -1, -1)
    return torch.cat([context.repeat_interleave(block_size, dim=1), own], dim=2)


class Table:
    """A mask rule, as the drafter takes it, that looks up in a table."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def visible(self, _causal: bool, _window: int | None) -> Callable[..., Any]:
        """The rule as a function of batch, head, query and key indices."""
        return lambda row, _head, query, key: self._table[row, query, key]
