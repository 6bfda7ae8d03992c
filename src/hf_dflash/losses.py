"""Losses on the slots that predict, in chunks: the logits of a whole batch never exist at once.

Letters: R rows (slots that predict), K = B - 1 drafts, H draft hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

Head = Callable[[Tensor], Tensor]
RowLoss = Callable[[Tensor, slice], Tensor]


def decay_weights(n_drafts: int, gamma: float | None) -> Tensor:
    """Weight of each draft slot: w_k = exp(-(k - 1) / gamma), k = 1 the first draft.

    An early mistake costs all drafts after it. Source: DFlash (arXiv:2602.06036), section 4.

    Args:
        n_drafts: K.
        gamma: In slots; `None` weighs all alike.

    Returns:
        (K,) float32.
    """
    distance = torch.arange(n_drafts, dtype=torch.float32)
    return torch.ones(n_drafts) if gamma is None else torch.exp(-distance / gamma)


def progressive_gamma(step: int, n_steps: int, first: float, last: float) -> float:
    """Gamma rising linearly from ``first`` to ``last`` over training.

    Source: DFlare (arXiv:2606.02091), progressive position-weighted loss.
    """
    return first + (last - first) * min(1.0, step / max(1, n_steps - 1))


@dataclass(frozen=True, slots=True)
class SlotLosses:
    """Result of one batch."""

    loss: Tensor  # scalar: sum of weight * row loss / total weight
    row_losses: Tensor  # (R,) float32, without weight, detached
    predicted_ids: Tensor  # (R,) int64, the drafter's choices


class _ChunkedLoss(torch.autograd.Function):
    """Take each chunk's gradient while its logits exist, and keep only that."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        head: Head,
        row_loss: RowLoss,
        scale: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_grad = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if needs_grad else None
        losses, choices = [], []
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            with torch.set_grad_enabled(needs_grad):
                piece = hidden[rows].detach().requires_grad_(needs_grad)
                logits = head(piece).float()
                loss = row_loss(logits, rows)
                share = (loss * scale[rows]).sum()
            if gradient is not None:
                (gradient[rows],) = torch.autograd.grad(share, piece)
            losses.append(loss.detach())
            choices.append(logits.detach().argmax(dim=-1))
        ctx.gradient = gradient
        row_losses = torch.cat(losses)
        total = (row_losses * scale).sum()
        predicted = torch.cat(choices)
        ctx.mark_non_differentiable(row_losses, predicted)
        return total, row_losses, predicted

    @staticmethod
    def backward(ctx, grad_total: Tensor, *_: Tensor):  # type: ignore[no-untyped-def, override]
        return ctx.gradient * grad_total.to(ctx.gradient.dtype), None, None, None, None


def chunked_loss(
    hidden: Tensor, head: Head, row_loss: RowLoss, weights: Tensor, total_weight: Tensor, chunk: int
) -> SlotLosses:
    """Weighted mean of a loss on logits, without holding more than ``chunk`` rows of them.

    The gradient with respect to ``hidden`` is taken chunk by chunk in the forward, so nothing is
    computed twice. The head is frozen: it gets no gradient.

    Args:
        hidden: (R, H), the drafter's outputs at slots that predict.
        head: (r, H) -> (r, V) logits.
        row_loss: From logits (r, V) float32 and their place among the rows to losses (r,).
        weights: (R,) float32.
        total_weight: Scalar to divide by: the sum of weights over everything in one update.
        chunk: Most rows whose logits exist at once.
    """
    if len(hidden) == 0:  # keeps the graph: every rank must run its backward
        return SlotLosses(hidden.sum() * 0.0, weights, weights.long())
    scale = weights / total_weight
    return SlotLosses(*_ChunkedLoss.apply(hidden, head, row_loss, scale, chunk))


def cross_entropy(labels: Tensor) -> RowLoss:
    """Row losses against the target's tokens (R,)."""

    def row_loss(logits: Tensor, rows: slice) -> Tensor:
        return F.cross_entropy(logits, labels[rows], reduction="none")

    return row_loss
