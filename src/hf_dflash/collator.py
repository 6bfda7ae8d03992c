"""Batches for training: padded rows, and the anchors drawn for this example in this epoch.

Letters: N rows, S tokens a row, A anchor slots a row, B block size, T taps, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .blocks import (
    PADDING,
    block_targets,
    document_positions,
    draw_anchors,
    fixed_anchors,
    number_documents,
    valid_anchors,
)

# Odd constants of SplitMix64: epochs and rows that differ by one get unrelated seeds.
_EPOCH_STRIDE, _ROW_STRIDE = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


class EpochRows(Dataset[dict[str, Any]]):
    """A data set whose rows know their number and the epoch, by which anchors are drawn.

    Args:
        rows: Any data set with a length.

    Raises:
        TypeError: It has none.
    """

    def __init__(self, rows: Any) -> None:
        if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            raise TypeError(
                "`train_dataset` and `eval_dataset` must have a length and rows that can be "
                f"indexed, got {type(rows).__name__}. Streams cannot be resumed exactly: "
                "materialise it (for Hugging Face data sets: streaming=False)."
            )
        self.rows = rows
        # Shared memory, so that worker processes see the epoch that the trainer sets.
        self.epoch = torch.zeros(1, dtype=torch.long).share_memory_()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # A data set's own `example_id` may be a text, or not unique: ours wins.
        return {**self.rows[index], "example_id": index, "epoch": int(self.epoch)}


@dataclass
class DFlashCollator:
    """Pads rows and draws their anchors by a seed of (run, epoch, example).

    So a batch is the same on every backend, with any number of workers, and after a resume. The
    slots that predict are counted here, before the forward.

    Args:
        block_size: B.
        n_anchors: Most anchors a row.
        seed: Of the run.
        pad_token_id: Any token; padding is never seen nor supervised.
        random: Draw anchors; else divide the answers into blocks that follow one another (the
            paper's ablation baseline).
        mask_token_id: Of the drafter; text that holds it is refused.
        vocab_size: Of the target, to which token ids must belong.
        max_positions: Most tokens of a text; `None`: any.
        keeps_slots: Whether a batch has ``n_anchors`` slots even if no row needs them. Compiled
            attention wants constant shapes; any other kind would compute blocks of nothing.
        pad_to_multiple_of: Of which S is a multiple. Compiled attention is compiled for each S, or
            for any after the second, so few are wanted.
    """

    block_size: int
    n_anchors: int = 512
    seed: int = 42
    pad_token_id: int = 0
    random: bool = True
    mask_token_id: int | None = None
    vocab_size: int | None = None
    max_positions: int | None = None
    keeps_slots: bool = True
    pad_to_multiple_of: int = 1

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Build one batch.

        Args:
            rows: Each with ``input_ids`` and ``loss_mask`` of one length, ``example_id`` and
                ``epoch``; if packed, ``document_ids`` (0 is padding); if padded,
                ``attention_mask``; if cached, ``taps`` (tokens, T * Ht).

        Returns:
            ``input_ids``, ``position_ids``, ``document_ids`` (N, S) int64, ``anchors`` (N, A)
            int64, -1 where a slot is empty, ``labels`` (N, A, B) int64, ``predicts`` (N, A, B)
            bool, and ``taps`` (N, S, T * Ht) if the rows have them.

        Raises:
            ValueError: A row lacks a column, its columns do not fit one another, its tokens
            are not the target's, or hold the mask token, or it has a text that is too long.
        """
        columns = [read_row(row) for row in rows]
        for row in columns:
            self.check_ids(row["input_ids"])
            self.check_positions(row)
        n_tokens = max(1, *(len(row["input_ids"]) for row in columns))
        n_tokens += -n_tokens % self.pad_to_multiple_of
        batch = {
            name: _padded([row[name] for row in columns], n_tokens, fill)
            for name, fill in _fills(self.pad_token_id).items()
        }
        loss_mask = batch.pop("loss_mask").bool()
        anchors = torch.stack(
            [
                self._anchors(valid_anchors(mask, documents), row)
                for mask, documents, row in zip(loss_mask, batch["document_ids"], rows, strict=True)
            ]
        )
        if not self.keeps_slots:
            anchors = anchors[:, : max(1, int((anchors >= 0).sum(dim=1).max()))]
        targets = block_targets(
            batch["input_ids"], loss_mask, batch["document_ids"], anchors, self.block_size
        )
        if any("taps" in row for row in rows):
            batch["taps"] = _padded_taps([row["taps"] for row in rows], n_tokens)
        return batch | {"anchors": anchors, "labels": targets.labels, "predicts": targets.predicts}

    def check_ids(self, ids: Tensor) -> None:
        """Refuse tokens that are not the target's, or the mask token.

        Raises:
            ValueError: There is one.
        """
        if self.mask_token_id is not None and bool((ids == self.mask_token_id).any()):
            raise ValueError(
                f"`input_ids` must not hold the drafter's mask token {self.mask_token_id}: it "
                "stands for what is not drafted yet. Give the drafter another `mask_token_id`, one "
                "that no text uses."
            )
        if self.vocab_size is not None and len(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(
                    f"`input_ids` must be tokens of the target (0..{self.vocab_size - 1}), got "
                    f"{low if low < 0 else high}. Prepare the data with the target's tokenizer."
                )

    def check_positions(self, row: Mapping[str, Tensor]) -> None:
        """Refuse a row of `read_row` with a text beyond the positions that are known."""
        most = self.max_positions
        if most is None or len(row["input_ids"]) <= most:
            return
        longest = int((row["position_ids"] * (row["document_ids"] != PADDING)).max()) + 1
        if longest > most:
            raise ValueError(
                f"`input_ids` must be texts of at most {most} tokens, what target and drafter know "
                f"positions for, got one of {longest}. Cut them with `hf-dflash prepare "
                f"--max-length {most}`, or give a drafter that knows less than its target the "
                "target's `max_position_embeddings` in its config.json."
            )

    def _anchors(self, valid: Tensor, row: Mapping[str, Any]) -> Tensor:
        if not self.random:
            return fixed_anchors(valid, self.n_anchors, self.block_size)
        epoch, example = int(row["epoch"]), int(row["example_id"])
        mixed = self.seed + _EPOCH_STRIDE * (epoch + 1) + _ROW_STRIDE * (example + 1)
        generator = torch.Generator().manual_seed(mixed % 2**63)
        return draw_anchors(valid, self.n_anchors, generator)


def _fills(pad_token_id: int) -> dict[str, int]:
    return {
        "input_ids": pad_token_id,
        "loss_mask": 0,
        "document_ids": PADDING,
        "position_ids": 0,
    }


def read_row(row: Mapping[str, Any]) -> dict[str, Tensor]:
    """The columns of one row as int64, with its documents and positions made or checked."""
    for name in ("input_ids", "loss_mask"):
        if name not in row:
            raise ValueError(
                f"Every row must have `{name}`, got the columns {sorted(row)}. Make rows with "
                "`hf_dflash.data.encode_chats`."
            )
    names = ("input_ids", "loss_mask", "document_ids", "attention_mask", "position_ids")
    given = {name: torch.as_tensor(row[name]).long() for name in names if name in row}
    lengths = {name: len(column) for name, column in given.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"The columns of a row must be of one length, got {lengths}.")
    documents = given.get("document_ids", torch.ones_like(given["input_ids"]))
    if "attention_mask" in given:
        documents = torch.where(given["attention_mask"].bool(), documents, PADDING)
    documents = number_documents(documents)
    positions = document_positions(documents)
    wanted = given.get("position_ids", positions)
    if not torch.equal(wanted[documents != PADDING], positions[documents != PADDING]):
        raise ValueError(
            "`position_ids` must count from 0 in every document, as decoding does. Leave them "
            "out, or pass the `document_ids` that they belong to."
        )
    return {
        "input_ids": given["input_ids"],
        "loss_mask": given["loss_mask"],
        "document_ids": documents,
        "position_ids": positions,
    }


def _padded(columns: Sequence[Tensor], length: int, fill: int) -> Tensor:
    """Columns filled up at the right; (N, length) int64."""
    padded = torch.full((len(columns), length), fill, dtype=torch.long)
    for place, column in zip(padded, columns, strict=True):
        place[: len(column)] = column
    return padded


def _padded_taps(columns: Sequence[Tensor], length: int) -> Tensor:
    padded = columns[0].new_zeros(len(columns), length, columns[0].shape[-1])
    for place, column in zip(padded, columns, strict=True):
        place[: len(column)] = column
    return padded


def silence_repeats(batch: dict[str, Tensor], n_examples: int, accelerator: Any) -> None:
    """Take the weight from rows that only fill up the last batches of several processes.

    Accelerate's own remainder is wrong in an epoch that is gone on with.

    Args:
        batch: Of one process.
        n_examples: Of the whole data set.
        accelerator: Of accelerate, which has drawn the batch.
    """
    if not accelerator.gradient_state.end_of_dataloader:
        return
    n_rows = len(batch["predicts"])
    n_at_once = accelerator.num_processes * n_rows
    n_left = n_examples % n_at_once or n_at_once
    batch["predicts"][max(0, n_left - accelerator.process_index * n_rows) :] = False
