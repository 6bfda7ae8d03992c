"""What is wrong with a training run is said before its first step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Subset

from .collator import DFlashCollator, EpochRows, read_row
from .data import ChatRows
from .on_policy import PART_DRAFTS, check_on_policy
from .row_file import RowFile
from .sampled_vocabulary import check_plain_head
from .taps_cache import CachedTaps, check_taps
from .target import check_pair
from .target_states import document_spans

#: Rows whose tokens are all looked at before training; others may be made when they are asked for.
READ_AT_ONCE = (list, tuple, ChatRows, RowFile)
#: Keys that flex attention looks at together or leaves out together: its own tile.
_FLEX_TILE = 128
#: Rows whose length is looked at before the first step.
_MOST_ROWS = 4096


def base_drafter(model: Any) -> Any:
    """The drafter itself, also below adapters of PEFT."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_compiled(config: Any) -> bool:
    """Whether the drafter's attention is compiled: it wants constant shapes, and no dense mask."""
    return config._attn_implementation == "flex_attention"


def collator_for(config: Any, args: Any, target: Any = None) -> DFlashCollator:
    """The collator of a run.

    Args:
        config: The drafter's.
        args: `DFlashTrainingArguments`.
        target: The target; `None`: only the drafter limits how long a text is.
    """
    configs = [config] if target is None else [config, target.config.get_text_config(decoder=True)]
    limits = [limit for limit in map(_known_positions, configs) if limit is not None]
    return DFlashCollator(
        config.block_size,
        args.n_anchors,
        seed=args.seed,
        random=args.random_anchors,
        mask_token_id=config.mask_token_id,
        vocab_size=config.vocab_size,
        max_positions=min(limits, default=None),
        keeps_slots=is_compiled(config),
        pad_to_multiple_of=args.pad_to_multiple_of or (_FLEX_TILE if is_compiled(config) else 1),
    )


def _known_positions(config: Any) -> int | None:
    """Longest text of a model: as stated, or as far as YaRN reaches, which some leave unstated."""
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:  # XLNet has -1 for no limit, others nothing
        return None
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "yarn":
        return most
    original = rope.get("original_max_position_embeddings") or most
    return max(most, int(original * (rope.get("factor") or 1)))


def check_training(model: Any, target: Any) -> None:
    """Refuse a pair that cannot be trained.

    Raises:
        ValueError: The drafter is another target's, has nothing to train, or would be trained in
            half precision.
    """
    check_pair(target, base_drafter(model).config)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("`model` must have parameters that require gradients, got none.")
    half = [name for name, p in trained.items() if p.dtype != torch.float32]
    if half:
        raise ValueError(
            f"`model` must be trained in float32, got {trained[half[0]].dtype} for {half[0]} and "
            f"{len(half) - 1} more: small updates would be rounded away. Load it with "
            "dtype=torch.float32, and pass bf16=True for mixed precision."
        )


def check_device(config: Any, args: Any, *, shards: bool) -> None:
    """Refuse what would be ignored, or fail later, on the device that trains.

    Args:
        config: The drafter's.
        args: `DFlashTrainingArguments`.
        shards: Whether parameters are really sharded.

    Raises:
        NotImplementedError: Flex attention or FSDP on CPUs, or a moving average with FSDP.
        ValueError: FSDP has left the target's weights out of all processes but the first.
    """
    if is_compiled(config) and args.device.type == "cpu":
        raise NotImplementedError(
            '`attn_implementation`="flex_attention" cannot be trained on CPUs (torch has no '
            'backward for it there). Load the drafter with "sdpa": it computes the same.'
        )
    loads_once = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower()
    if shards and loads_once in ("true", "1"):
        raise ValueError(
            "`fsdp_cpu_ram_efficient_loading` must be false, got true: with it, models are loaded "
            "by one process, and the others get the weights of the drafter but not of the target. "
            "Set it in the FSDP config (examples/accelerate/fsdp2.yaml)."
        )
    if args.fsdp and not shards:
        raise NotImplementedError(
            "`fsdp` shards nothing here: accelerate does so on accelerators only. Leave it out."
        )
    if args.ema_decay is not None and shards:
        raise NotImplementedError(
            "`ema_decay` is not supported with FSDP, whose parameters are sharded. Leave it "
            "out, or use DDP."
        )


def check_options(target: Any, args: Any, *data: Any) -> None:
    """Refuse a target or rows that an option cannot work with.

    Args:
        target: Where it will run.
        args: `DFlashTrainingArguments`.
        *data: The training set and that of evaluations; each may be several by name, or `None`.

    Raises:
        NotImplementedError: See `check_plain_head` and `check_on_policy`; or the rows for
            ``on_policy`` are cached, packed, padded at the left, or empty.
        ValueError: Cached taps are another target's.
    """
    if args.n_sampled_tokens is not None:
        check_plain_head(target)
    n_text = 1
    for part, name in zip(data, ("train_dataset", "eval_dataset"), strict=False):
        named = part if isinstance(part, Mapping) else {None: part}
        for key, rows in named.items():
            where = name if key is None else f"{name}[{key!r}]"
            cached = cached_taps(rows)
            if cached is not None and not getattr(target, "has_dropped_layers", False):
                check_taps(target, cached)
            if args.on_policy:
                n_text = max(n_text, _longest_single_text(rows, where))
    if args.on_policy:
        check_on_policy(target, n_text, min(PART_DRAFTS, args.n_anchors * n_text))


def _longest_single_text(rows: Any, name: str) -> int:
    """Tokens of the longest row (all, or many where reading is slow), each one text; 1 if none."""
    if cached_taps(rows) is not None:
        raise NotImplementedError(
            "`on_policy` needs the target itself to score drafts, got cached taps. Train on plain "
            "rows."
        )
    n_rows = 0 if rows is None else len(rows)
    columns = token_columns(rows)
    n_read = n_rows if isinstance(columns, READ_AT_ONCE) else min(n_rows, _MOST_ROWS)
    longest = 1
    for k in range(n_read):
        i = k * (n_rows - 1) // max(1, n_read - 1)
        row = columns[i]
        longest = max(longest, len(row["input_ids"]))
        is_plain = not row.keys() & {"document_ids", "attention_mask"}
        documents = torch.ones(len(row["input_ids"])) if is_plain else read_row(row)["document_ids"]
        spans = document_spans(documents[None])
        if [span.start for span in spans] != [0]:
            got = "packed ones" if len(spans) > 1 else "padding at the left" if spans else "none"
            raise NotImplementedError(
                f"{_place(columns, i, name)}: `on_policy` needs rows of one text each, from the "
                f"first token on, got {got}. Prepare them without `--pack`, and leave out empty "
                "ones."
            )
    return longest


def placed(target: Any, device: torch.device) -> Any:
    """The target on the device that trains, unless it has been placed already."""
    is_placed = hasattr(target, "hf_device_map") or getattr(target, "is_quantized", False)
    return target if is_placed else target.to(device)


def check_losses(trainer: Any, losses: Sequence[Tensor], batches: Sequence[Any]) -> None:
    """Refuse an update whose loss is not finite, on all processes at once.

    Args:
        trainer: A `DFlashTrainer`.
        losses: Of this process' batches.
        batches: As many, of `DFlashCollator`; they are run again to tell whose fault it is.

    Raises:
        FloatingPointError: A loss of any process is infinite or not a number.
    """
    gather = trainer.accelerator.gather
    if bool(gather(torch.stack(list(losses)).sum()[None]).isfinite().all()):
        return
    are_finite = [bool(_taps_of(trainer, batch).isfinite().all()) for batch in batches]
    if bool(gather(torch.tensor([all(are_finite)], device=losses[0].device)).all()):
        raise FloatingPointError(
            f"The drafter's loss must be finite, but is not at step {trainer.state.global_step}; "
            "the target's states are. Lower `learning_rate`, and use bf16=True rather than "
            "fp16=True."
        )
    raise FloatingPointError(
        f"The hidden states of `target` ({trainer.target.dtype}) must be finite, but are not at "
        f"step {trainer.state.global_step}. A float16 target may overflow: load it in bfloat16 or "
        "float32, and write cached taps anew. Otherwise its weights are broken."
    )


def check_weights(trainer: Any) -> None:
    """Refuse weights that are not finite, on all processes at once, before they are saved.

    Raises:
        FloatingPointError: A gradient was not finite, though the loss was.
    """
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in trainer.model.parameters()]
    are_finite = torch.stack([part.detach().isfinite().all() for part in parts]).all()
    if not bool(trainer.accelerator.gather(are_finite[None]).all()):
        raise FloatingPointError(
            f"The drafter's weights must be finite, but are not at step "
            f"{trainer.state.global_step}: a gradient was not. No checkpoint of it is written. Go "
            "on from the one before, with a lower `learning_rate`, and with bf16=True rather than "
            "fp16=True."
        )


def _taps_of(trainer: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        taps: Tensor = trainer.step.target_states(trainer._prepare_inputs(batch)).taps
    return taps


def _check_tokens(rows: Any, i: int, name: str, collator: DFlashCollator) -> None:
    row = rows[i]
    try:
        # numpy reads lists several times faster than torch.
        ids = row["input_ids"] if "input_ids" in row else read_row(row)["input_ids"]
        array = ids if isinstance(ids, torch.Tensor) else np.asarray(ids)
        collator.check_ids(torch.as_tensor(array).long())
    except ValueError as error:
        raise ValueError(f"{_place(rows, i, name)}: {error}") from error


def _place(rows: Any, i: int, name: str) -> str:
    """Where row ``i`` stands, for a reader of an error."""
    return f"{rows.path}, line {i + 1}" if isinstance(rows, RowFile) else f"{name}[{i}]"


def check_rows(rows: EpochRows, name: str, collator: Any) -> None:
    """Look at the tokens of all rows, and for the first row that a block can be drawn from.

    Raises:
        ValueError: A row holds tokens that cannot be trained on, or there is no such row.
    """
    if not isinstance(collator, DFlashCollator):
        return
    columns = token_columns(rows)
    if isinstance(columns, READ_AT_ONCE):
        for i in range(len(columns)):
            _check_tokens(columns, i, name, collator)
    for i in range(len(rows)):
        if bool(collator([rows[i]])["predicts"].any()):
            return
    raise ValueError(
        f"`{name}` must have a row with two supervised tokens next to each other, but none of its "
        f"{len(rows)} rows does. Check the roles of the chats and the chat template, or that "
        "answers are not cut away."
    )


def check_lengths(rows: EpochRows, collator: Any) -> None:
    """Look for texts that are too long, in rows spread evenly; batches are looked at one by one.

    Raises:
        ValueError: There is one.
    """
    most = getattr(collator, "max_positions", None)
    if most is None:
        return
    columns = token_columns(rows)
    n_read = min(len(rows), _MOST_ROWS)
    for i in range(n_read):
        row = columns[i * (len(rows) - 1) // max(1, n_read - 1)]
        if len(row["input_ids"]) > most:
            collator.check_positions(read_row(row))


def numbered(rows: Any, name: str, collator: Any) -> Any:
    """`EpochRows` of a data set or of each of several, checked; `None` stays."""
    if rows is None or isinstance(rows, EpochRows):
        return rows
    if isinstance(rows, Mapping):
        return {key: numbered(part, f"{name}[{key!r}]", collator) for key, part in rows.items()}
    checked = EpochRows(rows)
    check_rows(checked, name, collator)
    check_lengths(checked, collator)
    return checked


def token_columns(rows: Any) -> Any:
    """The rows without what is read beside them: taps from a cache are large, and not asked for."""
    if type(rows) is Subset:
        return Subset(token_columns(rows.dataset), rows.indices)
    return token_columns(rows.rows) if isinstance(rows, EpochRows | CachedTaps) else rows


def cached_taps(rows: Any) -> CachedTaps | None:
    """The cache that rows, or some of them, read their taps from; `None`: the target is run."""
    if isinstance(rows, CachedTaps):
        return rows
    inner = rows.dataset if type(rows) is Subset else getattr(rows, "rows", None)
    return None if inner is None else cached_taps(inner)


def longest_row(rows: Any, most: int = 512) -> int:
    """Tokens of the longest of the first ``most`` rows."""
    if rows is None:
        return 1
    columns = token_columns(rows)
    return max(1, *(len(columns[i]["input_ids"]) for i in range(min(most, len(rows)))))
