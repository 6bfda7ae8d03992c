"""Published trainers' own modules, fed with the weights, batches and anchors of `training_step.py`.

Both run on CPUs when their attention is set to SDPA; their default, flex attention, has no backward
there ("FlexAttention does not support backward on CPU", torch 2.13). What differs from hf-dflash:

SpecForge 0.2.0 (`OnlineDFlashModel`): nothing in the loss. It draws anchors inside the forward;
here it is handed ours. Logits are taken of all slots, anchors included, in chunks of
`--chunk-blocks` anchors a row (128 is its default), and again in the backward.

speculators 0.9.0 (`DFlashDraftModel`): one packed row. Labels are the argmax of the target's
logits, which it computes for every slot of every block itself; for greedy answers these are the
tokens. Its Triton losses need a GPU, so its eager cross-entropy is used. It divides by the number
of slots, not by their weights: a constant, taken out here. It draws anchors inside the forward,
not from the last block of a row; here it is handed ours. Full logits, without chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from training_worker import Batch, Inputs


def qwen3_config(inputs: Inputs, **fields: Any) -> Qwen3Config:
    """The drafter's sizes as both packages want them."""
    drafter = inputs.sizes["drafter"]
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_parameters",
        "max_position_embeddings",
    )
    return Qwen3Config(**{name: drafter[name] for name in names}, **fields)


class SpecForge:
    """SpecForge's `OnlineDFlashModel`."""

    def __init__(self, inputs: Inputs) -> None:
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel

        drafter, sizes = inputs.sizes["drafter"], inputs.sizes
        config = qwen3_config(
            inputs,
            attn_implementation="sdpa",
            block_size=drafter["block_size"],
            num_target_layers=drafter["num_target_layers"],
            dflash_config={
                "target_layer_ids": drafter["target_layer_ids"],
                "mask_token_id": drafter["mask_token_id"],
            },
        )
        self.drafter = DFlashDraftModel(config).train()
        self.drafter.load_state_dict(inputs.drafter)
        head = inputs.target["head"]
        lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
        lm_head.weight = nn.Parameter(head, requires_grad=False)
        self._model = OnlineDFlashModel(
            draft_model=self.drafter,
            target_lm_head=lm_head,
            target_embed_tokens=nn.Embedding.from_pretrained(inputs.target["embedding"]),
            mask_token_id=drafter["mask_token_id"],
            block_size=drafter["block_size"],
            attention_backend="sdpa",
            loss_decay_gamma=sizes["gamma"],
            objective_chunk_blocks=sizes["chunk_blocks"],
        )

    def loss(self, batch: Batch) -> Tensor:
        """Loss of one batch."""
        anchors = batch["anchors"]
        drawn = (anchors.clamp(min=0), anchors >= 0)
        self._model._sample_anchor_positions = lambda *_: drawn
        loss, _accuracy, _metrics = self._model(
            batch["input_ids"], batch["taps"], batch["loss_mask"].float()
        )
        return loss


class Speculators:
    """speculators' `DFlashDraftModel`, whose forward returns the loss."""

    def __init__(self, inputs: Inputs) -> None:
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core

        drafter = inputs.sizes["drafter"]
        layers = qwen3_config(inputs)
        layers._attn_implementation = "sdpa"
        config = DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=drafter["vocab_size"],
            block_size=drafter["block_size"],
            aux_hidden_state_layer_ids=drafter["target_layer_ids"],
            mask_token_id=drafter["mask_token_id"],
        )
        self._core, self._gamma = core, inputs.sizes["gamma"]
        self._loss_config = resolve_loss_config("ce", "eager")
        self.drafter = DFlashDraftModel(config).train()
        ends, head = inputs.target, inputs.target["head"]
        frozen = {"embed_tokens": ends["embedding"], "lm_head": head, "verifier_lm_head": head}
        frozen["verifier_norm"] = ends["norm"]
        for name, weight in frozen.items():
            setattr(getattr(self.drafter, name), "weight", nn.Parameter(weight, False))  # noqa: B010
        result = self.drafter.load_state_dict(inputs.drafter, strict=False)
        if result.unexpected_keys or {k.split(".")[0] for k in result.missing_keys} != set(frozen):
            raise ValueError(f"The drafter's tensors do not fit speculators' module: {result}.")

    def loss(self, batch: Batch) -> Tensor:
        """Loss of one batch, by the sum of weights instead of the number of slots."""
        block_size = self.drafter.block_size
        packed, anchors = pack(batch, block_size)
        drawn = (anchors, torch.ones_like(anchors, dtype=torch.bool))
        self._core.select_anchors = lambda *_: drawn
        _, loss, _metrics = self.drafter(
            **packed, loss_config=self._loss_config, gamma=self._gamma, max_anchors=len(anchors)
        )
        predicts = batch["predicts"]
        weights = predicts * torch.exp((1 - torch.arange(block_size)) / self._gamma)
        return loss * ((predicts.sum() + 1e-5) / weights.sum())


def pack(batch: Batch, block_size: int) -> tuple[dict[str, Tensor], Tensor]:
    """All rows one after the other, with room for the last block; and their anchors in it."""
    is_real = batch["document_ids"] > 0
    lengths = is_real.sum(dim=1)
    starts = lengths.cumsum(dim=0) - lengths
    room = (0, block_size)

    def packed(name: str) -> Tensor:
        columns = batch[name][is_real]
        room = columns.new_zeros(block_size, *columns.shape[1:])
        return torch.cat([columns, room])[None]

    documents = torch.arange(len(lengths)).repeat_interleave(lengths)
    is_drawn = batch["anchors"] >= 0
    return {
        "hidden_states": packed("taps"),
        "input_ids": packed("input_ids"),
        "loss_mask": packed("loss_mask"),
        "verifier_last_hidden_states": packed("last_hidden_states"),
        "document_ids": nn.functional.pad(documents, room, value=-1)[None],
        "position_ids": packed("position_ids"),
    }, (batch["anchors"] + starts[:, None])[is_drawn]
