"""How good drafts are, from which of them are right. Letters: M blocks, K = B - 1 drafts."""

from __future__ import annotations

from torch import Tensor

from .acceptance_counts import count_acceptance


def acceptance_metrics(right: Tensor) -> dict[str, float]:
    """Expected acceptance length of greedy decoding, and accuracy of each draft slot.

    Each block counts as a cycle that accepts its right drafts up to the first wrong one; the
    length is `AcceptanceCounts.expected` of these cycles. So a block that the end of an answer
    cuts short counts for the slots that it has. (1 + the sum of the products of the slots'
    accuracies is another number: errors within a block go together.)

    >>> from torch import tensor
    >>> right = tensor([[1, 1], [1, 0], [0, 1], [1, -1]])
    >>> round(acceptance_metrics(right)["acceptance_length"], 3)  # 1 + 3/4 + 1/3
    2.083

    Args:
        right: (M, K) int64; 1 right, 0 wrong, negative where the block predicts nothing: from the
            end of the answer on, or everywhere in an empty block.

    Returns:
        ``acceptance_length``: expected tokens of a cycle of a whole block, the bonus included;
        ``accuracy_k``: share of right choices of slot k = 1..K; ``n_blocks``. Lengths and shares
        of nothing are left out.
    """
    predicted = right >= 0
    right, predicted = right[predicted.any(dim=1)], predicted[predicted.any(dim=1)]
    metrics = {"n_blocks": float(len(right))}
    n_accepted = (right == 1).long().cumprod(dim=1).sum(dim=1).tolist()
    counts = count_acceptance([n_accepted], [predicted.sum(dim=1).tolist()])
    if counts is None:
        return metrics
    for k in range(right.shape[1]):
        if n_predicted := int(predicted[:, k].sum()):
            metrics[f"accuracy_{k + 1}"] = int(right[predicted[:, k], k].sum()) / n_predicted
    return metrics | {"acceptance_length": counts.expected}
