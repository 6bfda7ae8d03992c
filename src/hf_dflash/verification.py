"""Accept a prefix of the drafts: the pure steps, for greedy decoding and for sampling.

Letters: K drafts, M tokens a draft was chosen from, V vocabulary. p is the target's law, q the
drafter's (arXiv:2211.17192).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verification:
    """What one cycle emits: the accepted drafts, then the bonus token unless a stop came first."""

    emitted_ids: Tensor  # (n_emitted,) int64
    n_accepted: int  # emitted drafts, 0..K
    stopped: bool  # the last emitted token is a stop token


def argmax_rows(logits: Tensor) -> Tensor:
    """Index of each row's first maximum: `logits.argmax(-1)`, quicker on a CPU.

    There, torch looks at one element after another to find an index, but at many for a maximum.
    So the maximum is found first, by pieces, then its place in the one piece that holds it.

    Args:
        logits: (S, V), any float type.

    Returns:
        (S,) int64.
    """
    n_rows, n_columns = logits.shape
    size = math.gcd(n_columns, 512)
    if logits.device.type != "cpu" or size < 64:
        return logits.max(dim=-1).indices
    pieces = logits.unflatten(1, (-1, size))
    best = pieces.amax(dim=-1).max(dim=-1).indices
    indices: Tensor = best * size + pieces[torch.arange(n_rows), best].max(dim=-1).indices
    return indices


def verify_greedy(
    draft_ids: Tensor, target_ids: Tensor, stop_ids: Tensor | None = None
) -> Verification:
    """Accept the longest prefix of ``draft_ids`` that the target chose too, up to a stop token.

    >>> verify_greedy(torch.tensor([5, 6, 7]), torch.tensor([5, 6, 9, 8])).emitted_ids.tolist()
    [5, 6, 9]

    Args:
        draft_ids: (K,) int64, the proposal.
        target_ids: (K + 1,) int64, the target's own choices; row ``i`` follows the anchor and
            the first ``i`` drafts. Only they are emitted.
        stop_ids: (n,) int64, tokens that end the output; the first one emitted is kept.

    Raises:
        ValueError: ``target_ids`` has not one row more than ``draft_ids``.
    """
    n_drafts = draft_ids.shape[0]
    if tuple(target_ids.shape) != (n_drafts + 1,):
        raise ValueError(
            f"`target_ids` needs one row more than `draft_ids`: {(n_drafts + 1,)}, "
            f"got {tuple(target_ids.shape)}."
        )
    n_matches = (draft_ids == target_ids[:-1]).cumprod(dim=0).sum()
    if stop_ids is None:
        n_accepted = int(n_matches)
        return Verification(target_ids[: n_accepted + 1], n_accepted, False)
    before_stop = (~torch.isin(target_ids, stop_ids)).cumprod(dim=0).sum()
    # One read for both numbers: each is a wait for the device.
    n_accepted, n_before_stop = torch.stack([n_matches, before_stop]).tolist()
    if n_before_stop > n_accepted:
        return Verification(target_ids[: n_accepted + 1], n_accepted, False)
    emitted = target_ids[: n_before_stop + 1]
    return Verification(emitted, min(n_accepted, n_before_stop + 1), True)


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """The laws q that the drafts were drawn from, on the tokens they could be.

    A row says nothing of tokens that it does not list: their q is 0.
    """

    token_ids: Tensor | None  # (K, M) int64, or None for the whole vocabulary in order (M = V)
    probs: Tensor  # (K, M) float32, rows sum to 1
    draft_probs: Tensor  # (K,) float32, q of each draft

    def dense(self, row: int, vocab_size: int) -> Tensor:
        """Row ``row`` as (V,) float32."""
        if self.token_ids is None:
            return self.probs[row]
        law = self.probs.new_zeros(vocab_size)
        return law.scatter_(0, self.token_ids[row], self.probs[row])


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """The law of the token that replaces a rejected draft: max(p - q, 0), not normalised.

    Where p and q are equal to rounding nothing is left over; a draft is then rejected with
    probability 0 up to that rounding, and p itself is the right law.

    Args:
        target_probs: (V,) float32, p.
        draft_probs: (V,) float32, q.
    """
    left_over = (target_probs - draft_probs).clamp_(min=0)
    return left_over if bool(left_over.sum() > 0) else target_probs


def sample_or_accept(
    target_probs: Tensor,
    draft_id: int | None,
    law: DraftLaw | None,
    row: int,
    generator: torch.Generator | None = None,
) -> tuple[int, bool]:
    """Choose one token of law p, keeping the draft as often as that allows.

    The draft x is kept with probability min(1, p(x) / q(x)); else the token is drawn from the
    residual. Source: arXiv:2211.17192, Algorithm 1.

    Args:
        target_probs: (V,) float32, p after every processor.
        draft_id: The draft x, `None` where there is none: then the token is drawn from p.
        law: Where the draft was drawn from; `None` if it was the drafter's argmax, q(x) = 1.
        row: Which row of ``law``.
        generator: Source of randomness; the device's default if `None`.

    Returns:
        The token, and whether it is the draft.
    """
    if draft_id is None:
        return _draw(target_probs, generator), False
    draft_prob = 1.0 if law is None else float(law.draft_probs[row])
    chance = torch.rand((), device=target_probs.device, generator=generator)
    if bool(chance * draft_prob < target_probs[draft_id]):
        return draft_id, True
    if law is None:
        draft_law = torch.zeros_like(target_probs)
        draft_law[draft_id] = 1
    else:
        draft_law = law.dense(row, target_probs.shape[0])
    return _draw(residual(target_probs, draft_law), generator), False


def _draw(weights: Tensor, generator: torch.Generator | None) -> int:
    return int(torch.multinomial(weights, 1, generator=generator))
