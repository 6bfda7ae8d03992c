"""What a training step will take of the memory, and how many rows of logits fit.

Letters: N rows, S tokens a row, A anchor slots a row, B block size, H draft hidden size, V
vocabulary, L draft layers, T taps, Ht target hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import psutil  # type: ignore[import-untyped]  # comes with accelerate
import torch

from .training_checks import is_compiled, longest_row

_MIB = 2**20
#: A chunk of so many rows keeps any device busy; more only costs memory.
_MOST_ROWS, _FEWEST_ROWS = 512, 64
# Gradient and two Adam moments, each in float32, besides the weight itself.
_BYTES_PER_TRAINED_PARAMETER = 16
# Measured with a head in half precision (tests/unit/test_planner.py): its output, and in float32
# the logits, what the loss makes of them (and of the target's), and their gradient.
_BYTES_PER_LOGIT = {"cross_entropy": 14, "total_variation": 22, "forward_kl": 26}
_BYTES_PER_SAMPLED_LOGIT = 18  # and raised ones


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Estimated bytes of each part of a step, and what follows."""

    drafter: int  # weights, gradients and optimiser states
    target: int  # weights
    taps: int
    mask: int
    activations: int  # of the draft layers, kept for the backward
    logits: int  # of one chunk
    available: int  # before the run; the weights already loaded are not part of it
    logits_chunk_size: int  # rows

    @property
    def needed(self) -> int:
        """Bytes that the run takes beyond the weights that are already there."""
        return self.drafter + self.taps + self.mask + self.activations + self.logits

    @property
    def fits(self) -> bool:
        """Whether that is available."""
        return self.needed <= self.available

    def summary(self) -> str:
        """One line for the log."""
        sizes = ", ".join(
            f"{field.name} {getattr(self, field.name) / _MIB:,.0f} MiB"
            for field in fields(self)
            if field.name != "logits_chunk_size"
        )
        return f"Memory plan: {sizes}; logits of {self.logits_chunk_size} rows at once."


def plan_memory(
    config: Any,
    *,
    n_trained: int,
    target_bytes: int,
    n_rows: int,
    n_tokens: int,
    n_anchors: int,
    available: int,
    dense_mask: bool = True,
    logits_chunk_size: int | None = None,
    loss_type: str = "cross_entropy",
    n_sampled_tokens: int | None = None,
) -> MemoryPlan:
    """Estimate a step's memory and choose how many rows of logits exist at once.

    Args:
        config: The drafter's.
        n_trained: Trained parameters.
        target_bytes: Of the target's weights.
        n_rows: N of one device's batch.
        n_tokens: S.
        n_anchors: A.
        available: Bytes free on the device that trains.
        dense_mask: Whether the attention mask is a table, as for SDPA and eager.
        logits_chunk_size: A choice already made.
        loss_type: See `DFlashTrainingArguments`; those on the target's distribution keep its last
            hidden states, and its logits of a chunk.
        n_sampled_tokens: See there. The chunk is chosen for evaluations, which take all tokens.
    """
    n_block = n_rows * n_anchors * config.block_size
    n_context = n_rows * n_tokens
    kv = 2 * config.num_key_value_heads * config.head_dim
    q = config.num_attention_heads * config.head_dim
    # Float32: normed input, queries, keys and values, output, residual; gate, up and product.
    block_floats = 6 * config.hidden_size + 3 * q + 2 * kv + 3 * config.intermediate_size
    activations = 4 * config.num_hidden_layers * (n_block * block_floats + n_context * 2 * kv)
    n_slots = n_rows * n_anchors * (config.block_size - 1)
    n_states = len(config.target_layer_ids) + (loss_type != "cross_entropy")
    n_keys = n_tokens + n_anchors * config.block_size
    parts = {
        "drafter": _BYTES_PER_TRAINED_PARAMETER * n_trained,
        "target": target_bytes,
        "taps": 4 * n_context * n_states * config.target_hidden_size,
        "mask": n_block * n_keys if dense_mask else 0,
        "activations": activations,
    }
    row_bytes = _BYTES_PER_LOGIT[loss_type] * config.vocab_size
    if logits_chunk_size is None:
        spent = sum(size for name, size in parts.items() if name != "target")
        room = max(0, available - spent) // 2  # an estimate; and allocators waste some
        most = min(_MOST_ROWS, n_slots)
        fewest = min(max(_FEWEST_ROWS, config.block_size - 1), most)
        logits_chunk_size = max(fewest, min(most, room // row_bytes))
    logits = row_bytes * logits_chunk_size
    if n_sampled_tokens is not None:
        n_candidates = min(config.vocab_size, n_slots + n_sampled_tokens)
        head = 4 * n_candidates * config.target_hidden_size  # its rows are copied
        logits = head + _BYTES_PER_SAMPLED_LOGIT * n_candidates * logits_chunk_size
    return MemoryPlan(
        **parts,
        logits=logits,
        available=available,
        logits_chunk_size=logits_chunk_size,
    )


def plan_step(config: Any, args: Any, model: Any, target: Any, rows: Any) -> MemoryPlan:
    """Estimate the memory of a trainer's step on its device.

    Args:
        config: The drafter's.
        args: `DFlashTrainingArguments`.
        model: What is trained.
        target: The target.
        rows: The training set, or `None`.
    """
    return plan_memory(
        config,
        n_trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        target_bytes=sum(p.numel() * p.element_size() for p in target.parameters()),
        n_rows=args.per_device_train_batch_size,
        n_tokens=longest_row(rows),
        n_anchors=args.n_anchors,
        available=available_bytes(args.device),
        dense_mask=not is_compiled(config),
        logits_chunk_size=args.logits_chunk_size,
        loss_type=args.loss_type,
        n_sampled_tokens=args.n_sampled_tokens,
    )


def available_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
