"""Losses on the slots that predict, in chunks: the logits of a whole batch never exist at once.

Letters: R rows (slots that predict, block after block), r rows of one chunk, M blocks, K = B - 1
drafts, H draft hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

Head = Callable[[Tensor], Tensor]
#: From logits (r, V) float32 and their place among the rows to losses (r,).
RowLoss = Callable[[Tensor, slice], Tensor]
#: From detached losses (r,) and their place among the rows to weights (r,).
RowWeights = Callable[[Tensor, slice], Tensor]


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
    """Gamma rising linearly from ``first`` (step 0) to ``last`` (step ``n_steps`` - 1 and later).

    Source: DFlare (arXiv:2606.02091), progressive position-weighted loss.
    """
    done = 1.0 if step >= n_steps else step / max(1, n_steps - 1)
    return first + (last - first) * done


def dpace_weights(losses: Tensor, predicts: Tensor, alpha: float) -> Tensor:
    """Weight slots by what they do for the length of the accepted prefix, as the drafter is now.

    With q_i = exp(-loss_i) smoothed to (1 - alpha) q_i + alpha, slot j weighs
    sum over m >= j of the product of q_1..q_m: the chance that it is reached, times what is still
    to be won from there. Source: D-PACE (arXiv:2605.18810), Eq. 7 and 8.

    Args:
        losses: (M, K) cross-entropies.
        predicts: (M, K) bool; a block's predicting slots stand first.
        alpha: In (0, 1]; 1 counts the slots from j on.

    Returns:
        (M, K) weights without gradient, 0 where nothing is predicted.
    """
    smoothed = (1 - alpha) * torch.exp(-losses.detach().float()) + alpha
    reached = torch.where(predicts, smoothed, 0.0).cumprod(dim=1)
    return reached.flip(1).cumsum(dim=1).flip(1)


def row_chunks(n_rows: int, most: int) -> list[slice]:
    """Cut rows into pieces of at most ``most``."""
    return [slice(i, min(i + most, n_rows)) for i in range(0, n_rows, most)]


def block_chunks(rows_per_block: Tensor, most: int) -> list[slice]:
    """Cut rows into pieces of at most ``most`` that hold whole blocks.

    Args:
        rows_per_block: (M,) int64.
        most: At least the rows of the largest block.

    Raises:
        ValueError: A block has more rows than that.
    """
    largest = int(rows_per_block.max()) if len(rows_per_block) else 0
    if largest > most:
        raise ValueError(
            f"`logits_chunk_size` must hold a whole block ({largest} rows) for this loss, got "
            f"{most}. Raise it."
        )
    ends = rows_per_block.cumsum(dim=0).tolist()
    cuts, n_rows = [0], ends[-1] if ends else 0
    for end, following in pairwise([*ends, n_rows + most + 1]):
        if following - cuts[-1] > most and end > cuts[-1]:
            cuts.append(end)
    return [slice(first, last) for first, last in pairwise(cuts)]


@dataclass(frozen=True, slots=True)
class SlotLosses:
    """Result of one batch."""

    loss: Tensor  # scalar: sum of weight * row loss / total weight
    row_losses: Tensor  # (R,) float32, without weight, detached
    predicted_ids: Tensor  # (R,) int64, the drafter's choices


def _gradient(output: Tensor, piece: Tensor, slopes: Tensor | None = None) -> Tensor:
    """Gradient with respect to ``piece``, through the head."""
    gradient = None
    if output.requires_grad:
        (gradient,) = torch.autograd.grad(output, piece, slopes, allow_unused=True)
    if gradient is None:
        raise NotImplementedError(
            "The head of `target` must have a backward, because the drafter is trained through "
            "it, got one without. Leave the head out when you quantise the target."
        )
    return gradient


class _ChunkedLoss(torch.autograd.Function):
    """Take each chunk's gradient while its logits exist, and keep only that."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        row_loss: RowLoss,
        row_weights: RowWeights,
        chunks: Sequence[slice],
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_grad = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(hidden) if needs_grad else None
        total = hidden.new_zeros((), dtype=torch.float32)
        losses, choices = [], []
        for rows in chunks:
            with torch.set_grad_enabled(needs_grad):
                piece = hidden[rows].detach().requires_grad_(needs_grad)
                raw = head(piece)
                logits = raw if raw.dtype == torch.float64 else raw.float()
                if isinstance(row_loss, CrossEntropy) and gradient is not None:
                    loss, weights, slopes = row_loss.with_slopes(logits.detach(), rows, row_weights)
                    gradient[rows] = _gradient(raw, piece, slopes.to(raw.dtype))
                    share = (loss * weights).sum()
                else:
                    loss = row_loss(logits, rows)
                    share = (loss * row_weights(loss.detach(), rows).to(loss)).sum()
                    if gradient is not None:
                        gradient[rows] = _gradient(share, piece)
            total = total + share.detach().to(total.device)
            losses.append(loss.detach().to(hidden.device))
            choices.append(logits.detach().argmax(dim=-1).to(hidden.device))
        ctx.gradient = gradient
        row_losses, predicted = torch.cat(losses), torch.cat(choices)
        ctx.mark_non_differentiable(row_losses, predicted)
        return total, row_losses, predicted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> Any:
        return ctx.gradient * grad_total.to(ctx.gradient.dtype), None, None, None, None


def chunked_loss(
    hidden: Tensor,
    head: Head,
    row_loss: RowLoss,
    row_weights: RowWeights,
    total_weight: Tensor,
    chunks: Sequence[slice],
) -> SlotLosses:
    """Weighted mean of a loss on logits, without holding more than one chunk of them.

    The gradient with respect to ``hidden`` is taken chunk by chunk in the forward, so nothing is
    computed twice. The head is frozen: it gets no gradient. What is summed is divided by the total
    only at the end: small numbers would vanish in the head's half precision.

    Args:
        hidden: (R, H), the drafter's outputs at slots that predict.
        head: (r, H) -> (r, V) logits.
        row_loss: See `RowLoss`.
        row_weights: See `RowWeights`.
        total_weight: Scalar to divide by: the sum of weights over everything in one update.
        chunks: From `row_chunks` or `block_chunks`.

    Raises:
        NotImplementedError: The head has no backward.
    """
    if len(hidden) == 0:  # keeps the graph: every rank must run its backward
        nothing = hidden.new_zeros(0, dtype=torch.float32)
        return SlotLosses(hidden.sum() * 0.0, nothing, nothing.long())
    total, row_losses, predicted = _ChunkedLoss.apply(hidden, head, row_loss, row_weights, chunks)
    return SlotLosses(total / total_weight, row_losses, predicted)


def fixed_weights(weights: Tensor) -> RowWeights:
    """Weights (R,) that are known before the forward."""
    return lambda _losses, rows: weights[rows]


def dpace_row_weights(predicts: Tensor, alpha: float) -> RowWeights:
    """`dpace_weights` of rows, in chunks of whole blocks.

    Args:
        predicts: (M, K) bool; rows are its true entries in order.
        alpha: See `dpace_weights`.
    """
    blocks = predicts.nonzero()[:, 0]  # (R,)

    def weights(losses: Tensor, rows: slice) -> Tensor:
        held = predicts[blocks[rows][0] : blocks[rows][-1] + 1].to(losses.device)
        table = losses.new_zeros(held.shape)
        table[held] = losses
        return dpace_weights(table, held, alpha)[held]

    return weights


class CrossEntropy:
    """Row losses against the target's tokens, with their gradient in closed form.

    What autograd does in several passes over tables of the logits' size is done in one such table.

    Args:
        labels: (R,) int64.
        offsets: (V,) to add to logits before the softmax.
    """

    def __init__(self, labels: Tensor, offsets: Tensor | None = None) -> None:
        self._labels = labels
        self._offsets = offsets

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        """Losses (r,) of logits (r, V)."""
        logits = logits if self._offsets is None else logits + self._offsets
        return F.cross_entropy(logits, self._labels[rows].to(logits.device), reduction="none")

    def with_slopes(
        self, logits: Tensor, rows: slice, row_weights: RowWeights
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses (r,), weights (r,), and the weighted losses' gradient (r, V) by the logits."""
        labels = self._labels[rows].to(logits.device)[:, None]
        logits = logits if self._offsets is None else logits + self._offsets
        top = logits.amax(dim=-1, keepdim=True)
        of_label = logits.gather(1, labels)
        table = (logits - top).exp_()
        total = table.sum(dim=-1, keepdim=True)
        losses = (total.log() + (top - of_label))[:, 0]  # small differences first
        weights = row_weights(losses, rows).to(losses)
        table *= weights[:, None] / total
        table.scatter_add_(1, labels, -weights[:, None])
        return losses, weights, table


def cross_entropy(labels: Tensor) -> CrossEntropy:
    """Row losses against the target's tokens (R,)."""
    return CrossEntropy(labels)


def forward_kl(teacher_logits: Callable[[slice], Tensor]) -> RowLoss:
    """KL(p || q) of the drafter's law q from the target's p.

    Args:
        teacher_logits: The target's logits (r, V) of the same tokens, made chunk by chunk.
    """

    def row_loss(logits: Tensor, rows: slice) -> Tensor:
        with torch.no_grad():
            teacher = teacher_logits(rows).to(logits).log_softmax(dim=-1)
        return F.kl_div(logits.log_softmax(dim=-1), teacher, reduction="none", log_target=True).sum(
            dim=-1
        )

    return row_loss


def total_variation(teacher_logits: Callable[[slice], Tensor]) -> RowLoss:
    """Half the sum of abs(p - q): the chance that a draft drawn from q is rejected.

    Source: speculative sampling (arXiv:2211.17192), corollary 3.6.

    Args:
        teacher_logits: The target's logits (r, V) of the same tokens, made chunk by chunk.
    """

    def row_loss(logits: Tensor, rows: slice) -> Tensor:
        with torch.no_grad():
            teacher = teacher_logits(rows).to(logits).softmax(dim=-1)
        return (logits.softmax(dim=-1) - teacher).abs().sum(dim=-1) / 2

    return row_loss


def lk_alpha(teacher_logits: Callable[[slice], Tensor]) -> RowLoss:
    """Minus the log of alpha = sum of min(p, q): the chance that a draft drawn from q is accepted.

    Total variation is 1 - alpha; here its gradient is divided by alpha, so that it does not vanish
    where the laws hardly overlap. Source: LK losses (arXiv:2602.23881).

    Args:
        teacher_logits: The target's logits (r, V) of the same tokens, made chunk by chunk.
    """

    def row_loss(logits: Tensor, rows: slice) -> Tensor:
        with torch.no_grad():
            teacher = teacher_logits(rows).to(logits).log_softmax(dim=-1)
        # Of logs, since the minima may all be too small for float32.
        return -torch.minimum(logits.log_softmax(dim=-1), teacher).logsumexp(dim=-1)

    return row_loss


def lk_lambda(teacher_logits: Callable[[slice], Tensor], eta: float) -> RowLoss:
    """KL(p || q) as long as drafts are rejected, total variation when they are accepted.

    lambda KL + (1 - lambda) TV with lambda = exp(-eta alpha), alpha as in `lk_alpha` and without
    gradient. Alpha is that of the row itself, not a mean over a batch, so that neither chunks nor
    batches change the loss. Source: LK losses (arXiv:2602.23881).

    Args:
        teacher_logits: The target's logits (r, V) of the same tokens, made chunk by chunk.
        eta: At least 0, which is KL alone.
    """

    def row_loss(logits: Tensor, rows: slice) -> Tensor:
        with torch.no_grad():
            teacher = teacher_logits(rows).to(logits).log_softmax(dim=-1)
        drafted = logits.log_softmax(dim=-1)
        kl = F.kl_div(drafted, teacher, reduction="none", log_target=True).sum(dim=-1)
        variation = (drafted.exp() - teacher.exp()).abs().sum(dim=-1) / 2
        share = torch.exp(-eta * (1 - variation.detach()))
        return share * kl + (1 - share) * variation

    return row_loss
