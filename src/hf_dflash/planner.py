"""What training will take of the memory at most, and how many rows of logits fit.

An upper estimate: all in float32, no activation checkpointing, nothing sharded by FSDP, rows no
longer than the longest of the first 512. Of a step, or of a batch of an evaluation if that takes
more: it keeps no layer for a backward, but may have more rows. What the target's forward takes
besides the taps is over before the draft layers run, and not counted.

Letters: N rows, S tokens a row, A anchor slots a row, B block size, H draft hidden size, V
vocabulary, L draft layers, T taps, Ht target hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import psutil  # type: ignore[import-untyped]  # comes with accelerate
import torch

from .attention_masks import part_queries
from .on_policy import PART_DRAFTS
from .target import text_config
from .training_checks import collator_for, longest_row

logger = logging.getLogger(__name__)

TRAIN_BATCH, EVAL_BATCH = "per_device_train_batch_size", "per_device_eval_batch_size"
_MIB = 2**20
#: A chunk of so many rows keeps any device busy; more only costs memory.
_MOST_ROWS, _FEWEST_ROWS = 512, 64
# Gradient and two Adam moments, each in float32, besides the weight itself.
_BYTES_PER_TRAINED_PARAMETER = 16
# The moving average, and at evaluation the weights that it stands in for.
_BYTES_PER_AVERAGED_PARAMETER = 8
# Measured with a head in half precision (tests/unit/test_planner.py): its output, and in float32
# the logits, what the loss makes of them (and of the target's), and their gradient.
_BYTES_PER_LOGIT = {
    "cross_entropy": 14,
    "total_variation": 22,
    "forward_kl": 26,
    "lk_alpha": 30,
    "lk_lambda": 30,
}
_BYTES_PER_SAMPLED_LOGIT = 18  # and raised ones


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Estimated bytes of each part of a step or an evaluation's batch, and what follows."""

    drafter: int  # weights, gradients, optimiser states, moving average
    target: int  # weights
    taps: int  # and what else is kept of the target
    mask: int
    activations: int  # of the draft layers, kept for the backward
    logits: int  # of one chunk
    available: int  # before the run; the weights already loaded are not part of it
    logits_chunk_size: int  # rows
    batch_option: str  # which sets the number of rows

    @property
    def needed(self) -> int:
        """Bytes that the run takes beyond the weights that are already there."""
        return self.drafter + self.taps + self.mask + self.activations + self.logits

    @property
    def fits(self) -> bool:
        """Whether that is available."""
        return self.needed <= self.available

    def tell(self) -> None:
        """Log it, and what to lower if it does not fit."""
        logger.info(self.summary())
        if not self.fits:
            logger.warning(
                "This may not fit into memory: lower `%s`, `n_anchors` or the length of rows. %s",
                self.batch_option,
                self.summary(),
            )

    def summary(self) -> str:
        """One line for the log."""
        sizes = ", ".join(
            f"{field.name} {getattr(self, field.name) / _MIB:,.0f} MiB"
            for field in fields(self)
            if field.name not in ("logits_chunk_size", "batch_option")
        )
        return (
            f"Memory plan: {sizes}; logits of {self.logits_chunk_size} rows at once "
            f"(`{self.batch_option}` takes most)."
        )


@dataclass(frozen=True, slots=True)
class ScoreSizes:
    """Of a target that scores drafts, while the draft layers' activations are kept."""

    cache: int  # bytes a token of its keys and values
    width: int  # Ht
    inner: int  # of its feed-forward layers
    queries: int  # heads times their size
    tables: int  # bytes a query and key of eager attention's scores of all heads; else 0

    @classmethod
    def of(cls, target: Any) -> ScoreSizes:
        """Read the config of a target."""
        text = text_config(target)
        n_heads = text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // n_heads
        n_kv = getattr(text, "num_key_value_heads", None) or n_heads
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        cache = 2 * text.num_hidden_layers * n_kv * size * target.dtype.itemsize
        # Scores, in half precision also in float32, and their softmax, which is taken in float32.
        scores = 8 + (target.dtype.itemsize if target.dtype.itemsize < 4 else 0)
        tables = n_heads * scores if text._attn_implementation == "eager" else 0
        return cls(cache, text.hidden_size, inner, n_heads * size, tables)

    def n_bytes(self, n_rows: int, n_tokens: int, n_slots: int) -> int:
        """Cache, states of all slots, and what one layer takes of a part of the drafts.

        Args:
            n_rows: N.
            n_tokens: S.
            n_slots: Slots that predict, of all rows.
        """
        drafts = n_rows * min(PART_DRAFTS, n_slots // n_rows)
        keys = n_rows * n_tokens + drafts
        cache, states = self.cache * keys, 4 * n_slots * self.width
        layer = 4 * drafts * (4 * self.width + 3 * self.inner + 2 * self.queries)
        # Keys and values for each query head, put behind those before; the mask, also as floats.
        attention = 4 * 4 * keys * self.queries + (5 + self.tables) * drafts * (keys // n_rows)
        return cache + states + layer + attention


def plan_memory(
    config: Any,
    *,
    n_trained: int,
    target_bytes: int,
    n_rows: int,
    n_tokens: int,
    n_anchors: int,
    available: int,
    attention: str = "sdpa",
    keeps_average: bool = False,
    logits_chunk_size: int | None = None,
    loss_type: str = "cross_entropy",
    n_sampled_tokens: int | None = None,
    scores: ScoreSizes | None = None,
    is_evaluation: bool = False,
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
        attention: The drafter's ``attn_implementation``.
        keeps_average: Whether there is a moving average of the weights.
        logits_chunk_size: A choice already made.
        loss_type: See `DFlashTrainingArguments`; those on the target's distribution keep its last
            hidden states, and its logits of a chunk.
        n_sampled_tokens: See there. The chunk is chosen for evaluations, which take all tokens.
        scores: Sizes of the target, if it scores drafts.
        is_evaluation: Whether nothing is kept for a backward, and all tokens are taken.
    """
    n_context = n_rows * n_tokens
    n_slots = n_rows * n_anchors * (config.block_size - 1)
    n_states = len(config.target_layer_ids) + (loss_type != "cross_entropy")
    average = _BYTES_PER_AVERAGED_PARAMETER if keeps_average else 0
    table = _table_entries(config, n_rows, n_tokens, n_anchors, attention)
    parts = {
        "drafter": (_BYTES_PER_TRAINED_PARAMETER + average) * n_trained,
        "target": target_bytes,
        "taps": 4 * n_context * n_states * config.target_hidden_size
        + (0 if scores is None else scores.n_bytes(n_rows, n_tokens, n_slots)),
        "mask": table * (4 if attention == "eager" else 1),  # eager adds it, others look it up
        "activations": _activation_bytes(
            config,
            n_rows,
            n_tokens,
            n_anchors,
            attention,
            keeps_all=not is_evaluation,
        ),
    }
    row_bytes = _BYTES_PER_LOGIT[loss_type] * config.vocab_size
    if logits_chunk_size is None:
        spent = sum(size for name, size in parts.items() if name != "target")
        room = max(0, available - spent) // 2  # an estimate; and allocators waste some
        most = min(_MOST_ROWS, n_slots)
        fewest = min(max(_FEWEST_ROWS, config.block_size - 1), most)
        logits_chunk_size = max(fewest, min(most, room // row_bytes))
    logits = row_bytes * logits_chunk_size
    if n_sampled_tokens is not None and not is_evaluation:
        n_candidates = min(config.vocab_size, n_slots + n_sampled_tokens)
        head = 4 * n_candidates * config.target_hidden_size  # its rows are copied
        logits = head + _BYTES_PER_SAMPLED_LOGIT * n_candidates * logits_chunk_size
    return MemoryPlan(
        **parts,
        logits=logits,
        available=available,
        logits_chunk_size=logits_chunk_size,
        batch_option=EVAL_BATCH if is_evaluation else TRAIN_BATCH,
    )


def _table_entries(config: Any, n_rows: int, n_tokens: int, n_anchors: int, attention: str) -> int:
    """Queries times keys of all parts that attend together; none for flex attention."""
    if attention == "flex_attention":
        return 0
    n_queries = n_anchors * config.block_size
    return n_rows * n_queries * (n_tokens + min(part_queries(config.block_size), n_queries))


def _activation_bytes(
    config: Any, n_rows: int, n_tokens: int, n_anchors: int, attention: str, *, keeps_all: bool
) -> int:
    """Float32 tensors that all draft layers keep for the backward; else those of one, part by part.

    What one layer makes besides attention is counted as if all of it were there at once.
    """
    hidden, intermediate = config.hidden_size, config.intermediate_size
    kv = 2 * config.num_key_value_heads * config.head_dim
    q = config.num_attention_heads * config.head_dim
    n_context, n_queries = n_rows * n_tokens, n_anchors * config.block_size
    n_block = n_rows * n_queries
    n_all = n_context + n_block
    # Of each norm input, normed and output; projected, normed and rotated queries, the output of
    # attention by parts and whole; gate, its silu, up, and their product.
    layer = n_block * (6 * hidden + 5 * q + 4 * intermediate)
    # Keys projected, normed and rotated; values.
    layer += n_all * 2 * kv
    if config.architecture == "dflare":
        # Taps laid out for the mix; of the layer's own norm input, normed and output.
        layer += n_context * (len(config.target_layer_ids) * config.target_hidden_size + 3 * hidden)
        shared = 0
    else:
        layer += n_all * hidden  # context and block, joined
        shared = n_context * 3 * hidden  # of the norm after `fc`
    if attention != "flex_attention":
        # Each part has its own keys and values, one for each query head; any may reach the end of
        # the rows. SDPA keeps the mask as floats, eager the probabilities of each head; and while
        # it computes a part, two more tables of those.
        n_parts = -(-n_queries // part_queries(config.block_size))
        n_kept = n_parts if keeps_all else 1
        layer += n_rows * (n_kept * n_tokens + n_queries) * 2 * q
        table = _table_entries(config, n_rows, n_tokens, n_anchors, attention)
        if attention == "eager":
            table *= config.num_attention_heads
            shared += 2 * table // n_parts
        layer += table * n_kept // n_parts
    # Embeddings; of the last norm input, normed and output; the rows for the head, their gradient.
    shared += n_block * 6 * hidden
    return 4 * ((config.num_hidden_layers if keeps_all else 1) * layer + shared)


def plan_step(
    config: Any, args: Any, model: Any, target: Any, rows: Any, eval_rows: Any = None
) -> MemoryPlan:
    """Estimate the memory of a trainer on its device: of what takes most.

    Args:
        config: The drafter's.
        args: `DFlashTrainingArguments`.
        model: What is trained.
        target: The target.
        rows: The training set, or `None`.
        eval_rows: What is evaluated, one data set or several by name, or `None`.
    """
    multiple = collator_for(config, args).pad_to_multiple_of
    plan = partial(
        plan_memory,
        config,
        n_trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        target_bytes=sum(p.numel() * p.element_size() for p in target.parameters()),
        n_anchors=args.n_anchors,
        available=available_bytes(args.device),
        attention=config._attn_implementation,
        keeps_average=args.ema_decay is not None,
        loss_type=args.loss_type,
        n_sampled_tokens=args.n_sampled_tokens,
        scores=ScoreSizes.of(target) if args.on_policy else None,
    )
    sets = eval_rows.values() if isinstance(eval_rows, Mapping) else [eval_rows]
    batches = [(args.per_device_train_batch_size, longest_row(rows), False)]
    for part in sets:
        if part is not None:
            n_rows = max(1, min(args.per_device_eval_batch_size, len(part)))
            batches.append((n_rows, longest_row(part), True))

    def plans(chunk: int | None) -> list[MemoryPlan]:
        return [
            plan(
                n_rows=n_rows,
                n_tokens=-(-n_tokens // multiple) * multiple,
                logits_chunk_size=chunk,
                is_evaluation=is_evaluation,
            )
            for n_rows, n_tokens, is_evaluation in batches
        ]

    chunk = args.logits_chunk_size
    if chunk is None:  # one for all
        chunk = min(made.logits_chunk_size for made in plans(None))
    return max(plans(chunk), key=lambda made: made.needed)


def available_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
