"""Where draft blocks stand in training sequences, what they predict, and what they may see.

Everything here is drawn and counted before the forward, so batches are reproducible and the loss's
denominator is known. Letters: N rows, S tokens a row, A anchor slots a row, B block size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: Document number of padding; documents count from 1. Anchor of a slot that stays empty.
PADDING, NO_ANCHOR = 0, -1


def number_documents(document_ids: Tensor) -> Tensor:
    """Number the runs of equal ids in a row 1, 2, ...; padding stays 0.

    >>> number_documents(torch.tensor([0, 7, 7, 3, 7, 0])).tolist()
    [0, 1, 1, 2, 3, 0]

    Args:
        document_ids: (S,) int64.
    """
    is_real = document_ids != PADDING
    starts = is_real.clone()
    starts[1:] &= document_ids[1:] != document_ids[:-1]
    return torch.where(is_real, starts.long().cumsum(dim=0), PADDING)


def document_positions(document_ids: Tensor) -> Tensor:
    """Position of every token in its document; 0 on padding, wherever that is.

    >>> document_positions(torch.tensor([0, 1, 1, 2, 2, 2])).tolist()
    [0, 0, 1, 0, 1, 2]

    Args:
        document_ids: (S,) int64, from `number_documents`.
    """
    index = torch.arange(len(document_ids))
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[1:] = document_ids[1:] != document_ids[:-1]
    run_start = torch.where(starts, index, 0).cummax(dim=0).values
    return torch.where(document_ids != PADDING, index - run_start, 0)


def valid_anchors(loss_mask: Tensor, document_ids: Tensor) -> Tensor:
    """Say which tokens may stand in slot 0 of a block.

    An anchor is a token that decoding has just emitted, so it must be supervised itself; and the
    next token must be, or the block would teach nothing. A block may overhang the end.

    Args:
        loss_mask: (S,) bool, supervised tokens.
        document_ids: (S,) int64, from `number_documents`.

    Returns:
        (S,) bool.
    """
    valid = torch.zeros_like(loss_mask, dtype=torch.bool)
    same_document = (document_ids[:-1] == document_ids[1:]) & (document_ids[:-1] != PADDING)
    valid[:-1] = loss_mask[:-1].bool() & loss_mask[1:].bool() & same_document
    return valid


def draw_anchors(valid: Tensor, n_slots: int, generator: torch.Generator) -> Tensor:
    """Draw anchors without replacement, uniformly over the valid positions.

    The number of slots is fixed, so shapes are too; slots that stay empty hold -1.

    Args:
        valid: (S,) bool, from `valid_anchors`.
        n_slots: A.
        generator: Source of randomness.

    Returns:
        (A,) int64, ascending, then -1.
    """
    positions = valid.nonzero()[:, 0]
    order = torch.randperm(len(positions), generator=generator)[:n_slots]
    return _filled_up(positions[order].sort().values, n_slots)


def fixed_anchors(valid: Tensor, n_slots: int, block_size: int) -> Tensor:
    """Divide each supervised run into blocks that follow one another.

    Source: the "standard" baseline of DFlash (arXiv:2602.06036), Table 13.

    Args:
        valid: (S,) bool, from `valid_anchors`.
        n_slots: A.
        block_size: B.

    Returns:
        (A,) int64, ascending, then -1. A run of more blocks than slots is cut.
    """
    index = torch.arange(len(valid))
    starts = valid & ~torch.cat([valid.new_zeros(1), valid[:-1]])
    run_start = torch.where(starts, index, 0).cummax(dim=0).values
    chosen = (valid & ((index - run_start) % block_size == 0)).nonzero()[:, 0]
    return _filled_up(chosen[:n_slots], n_slots)


def _filled_up(anchors: Tensor, n_slots: int) -> Tensor:
    filled = torch.full((n_slots,), NO_ANCHOR, dtype=torch.long)
    filled[: len(anchors)] = anchors
    return filled


@dataclass(frozen=True, slots=True)
class BlockTargets:
    """What the slots of every block predict."""

    labels: Tensor  # (N, A, B) int64, the token at anchor + slot; 0 where nothing is predicted
    predicts: Tensor  # (N, A, B) bool, never slot 0


def block_targets(
    input_ids: Tensor, loss_mask: Tensor, document_ids: Tensor, anchors: Tensor, block_size: int
) -> BlockTargets:
    """Label the slots of every block, up to the first token that is not supervised.

    A block stops at the end of its turn or document: decoding never goes on past it, and tokens
    behind a gap would teach continuations that cannot be.

    Args:
        input_ids: (N, S) int64.
        loss_mask: (N, S) bool.
        document_ids: (N, S) int64.
        anchors: (N, A) int64, -1 for an empty slot.
        block_size: B.
    """
    n_tokens = input_ids.shape[1]
    slots = torch.arange(block_size, device=anchors.device)
    places = anchors[..., None] + slots  # (N, A, B)
    inside = (places < n_tokens) & (anchors[..., None] >= 0)
    places = places.clamp(0, n_tokens - 1)
    rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    home = document_ids[rows, anchors.clamp(min=0)[..., None]]
    good = inside & loss_mask[rows, places].bool() & (document_ids[rows, places] == home)
    good = good.long().cumprod(dim=-1).bool() & (slots > 0)
    return BlockTargets(torch.where(good, input_ids[rows, places], 0), good)


def block_noise_ids(
    input_ids: Tensor, anchors: Tensor, block_size: int, mask_token_id: int
) -> Tensor:
    """Token ids of all blocks: the anchor, then mask tokens; (N, A * B)."""
    rows = torch.arange(len(anchors), device=anchors.device)[:, None]
    ids = input_ids.new_full((*anchors.shape, block_size), mask_token_id)
    ids[..., 0] = input_ids[rows, anchors.clamp(min=0)]
    return ids.flatten(1)


def block_positions(position_ids: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """Position ids of all blocks, going on from the anchor's; (N, A * B).

    Args:
        position_ids: (N, S) int64, restarting with every packed document.
        anchors: (N, A) int64.
        block_size: B.
    """
    rows = torch.arange(len(anchors), device=anchors.device)[:, None]
    start = position_ids[rows, anchors.clamp(min=0)]
    return (start[..., None] + torch.arange(block_size, device=anchors.device)).flatten(1)


@dataclass(frozen=True, slots=True)
class BlockMaskRule:
    """Which keys each query may attend to when A blocks a row train in one pass.

    Keys are ``[S context features | A * B block tokens]``, queries the block tokens. A query sees
    its own document strictly before its anchor (in decoding the target has not run on the anchor
    yet), and its own block. An empty slot's block sees itself only, so no row is fully masked.
    The same rule feeds flex attention, SDPA and eager. Source: DFlash (arXiv:2602.06036),
    training mask; windows and causal layers as in decoding.
    """

    anchors: Tensor  # (N, A) int64, -1 for an empty slot
    document_ids: Tensor  # (N, S) int64
    block_size: int

    def visible(self, causal: bool, window: int | None) -> MaskFunction:
        """The rule of one kind of layer, as a function of batch, head, query and key indices."""
        n_context, size = self.document_ids.shape[1], self.block_size

        def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block, slot = query // size, query % size
            anchor = self.anchors[row, block]
            key_slot = (key - n_context) % size
            place = key.clamp(max=n_context - 1)
            same_document = (
                self.document_ids[row, place] == self.document_ids[row, anchor.clamp(min=0)]
            )
            sees_context = (key < anchor) & same_document
            sees_block = (key >= n_context) & ((key - n_context) // size == block)
            if causal:
                sees_block = sees_block & (key_slot <= slot)
            if window is not None:
                sees_context = sees_context & (anchor + slot - key < window)
                sees_block = sees_block & ((slot - key_slot).abs() < window)
            return (key < n_context) & sees_context | sees_block

        return visible
