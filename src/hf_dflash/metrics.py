"""How good drafts are, from which of them are right. Letters: M blocks, K = B - 1 drafts."""

from __future__ import annotations

from torch import Tensor


def acceptance_metrics(right: Tensor) -> dict[str, float]:
    """Expected acceptance length of greedy decoding, and accuracy of each draft slot.

    The length is strict: a draft counts only if all before it are right, block by block. (The
    product of the slots' accuracies is another number: errors within a block go together.)

    Args:
        right: (M, K) int64; 1 right, 0 wrong, -1 where the block predicts nothing (behind the end
            of the answer, or an empty block).

    Returns:
        ``acceptance_length``: mean over blocks of right drafts in a row + 1 (the bonus token), of
        blocks that predict all K; ``accuracy_k``: share of right choices of slot k = 1..K.
    """
    whole = right[(right >= 0).all(dim=1)]
    lengths = whole.cumprod(dim=1).sum(dim=1) + 1
    metrics = {"acceptance_length": lengths.float().mean().item() if len(whole) else float("nan")}
    for k in range(right.shape[1]):
        predicted = right[:, k] >= 0
        if predicted.any():
            metrics[f"accuracy_{k + 1}"] = right[predicted, k].float().mean().item()
    return metrics | {"n_blocks": float(len(whole))}
