"""Batches for training: padded rows, and the anchors drawn for this example in this epoch.

Letters: N rows, S tokens a row, A anchor slots a row, B block size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .blocks import block_targets, draw_anchors, fixed_anchors, valid_anchors

# Odd constants of SplitMix64: epochs and rows that differ by one get unrelated seeds.
_EPOCH_STRIDE, _ROW_STRIDE = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


@dataclass
class DFlashCollator:
    """Pads rows and draws their anchors by a seed of (run, epoch, example).

    So a batch is the same on every backend, with any number of workers, and after a resume. The
    slots that predict are counted here, before the forward.

    Args:
        block_size: B.
        n_anchors: A slots a row; rows with fewer valid anchors leave slots empty.
        seed: Of the run.
        pad_token_id: Any token; padding is never seen nor supervised.
        random: Draw anchors; else divide the answers into blocks that follow one another (the
            paper's ablation baseline).
    """

    block_size: int
    n_anchors: int = 512
    seed: int = 42
    pad_token_id: int = 0
    random: bool = True
    # Shared memory, so that worker processes see the epoch that the trainer sets.
    epoch: Tensor = field(
        default_factory=lambda: torch.zeros(1, dtype=torch.long).share_memory_(), repr=False
    )

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Build one batch.

        Args:
            rows: Each with ``input_ids`` and ``loss_mask`` of one length, ``row_id`` (its place in
                the data set), and, if packed, ``document_ids`` and ``position_ids``.

        Returns:
            ``input_ids``, ``position_ids``, ``document_ids`` (N, S) int64, ``anchors`` (N, A)
            int64, ``labels`` (N, A, B) int64 and ``predicts`` (N, A, B) bool.
        """
        n_tokens = max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": _padded(rows, "input_ids", n_tokens, self.pad_token_id),
            "position_ids": _padded(rows, "position_ids", n_tokens, 0),
            "document_ids": _padded(rows, "document_ids", n_tokens, -1),
        }
        loss_mask = _padded(rows, "loss_mask", n_tokens, 0).bool()
        anchors = torch.stack(
            [
                self._anchors(valid_anchors(mask, documents), int(row["row_id"]))
                for mask, documents, row in zip(loss_mask, batch["document_ids"], rows, strict=True)
            ]
        )
        targets = block_targets(
            batch["input_ids"], loss_mask, batch["document_ids"], anchors, self.block_size
        )
        return batch | {"anchors": anchors, "labels": targets.labels, "predicts": targets.predicts}

    def _anchors(self, valid: Tensor, row_id: int) -> Tensor:
        if not self.random:
            return fixed_anchors(valid, self.n_anchors, self.block_size)
        mixed = self.seed + _EPOCH_STRIDE * (int(self.epoch) + 1) + _ROW_STRIDE * (row_id + 1)
        generator = torch.Generator().manual_seed(mixed % 2**63)
        return draw_anchors(valid, self.n_anchors, generator)


def _padded(rows: Sequence[Mapping[str, Any]], name: str, length: int, fill: int) -> Tensor:
    """Column ``name`` of all rows, filled up at the right; (N, length) int64."""
    column = torch.full((len(rows), length), fill, dtype=torch.long)
    for place, row in zip(column, rows, strict=True):
        n_tokens = len(row["input_ids"])
        if name == "position_ids" and name not in row:
            place[:n_tokens] = torch.arange(n_tokens)
        elif name == "document_ids" and name not in row:
            place[:n_tokens] = 0
        else:
            place[:n_tokens] = torch.as_tensor(row[name], dtype=torch.long)
    return column
