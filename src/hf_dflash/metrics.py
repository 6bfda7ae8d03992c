"""How good drafts are, from which of them are right. Letters: M blocks, K = B - 1 drafts."""

from __future__ import annotations

from torch import Tensor


def acceptance_metrics(right: Tensor) -> dict[str, float]:
    """Expected acceptance length of greedy decoding, and accuracy of each draft slot.

    The length is strict: a draft counts only if all before it are right, block by block. (The
    product of the slots' accuracies is another number: errors within a block go together.) A
    block that the end of an answer cuts short counts for the slots that it has.

    >>> from torch import tensor
    >>> right = tensor([[1, 1], [1, 0], [0, 1], [1, -1]])
    >>> round(acceptance_metrics(right)["acceptance_length"], 3)  # 1 + 3/4 + 1/3
    2.083

    Args:
        right: (M, K) int64; 1 right, 0 wrong, negative where the block predicts nothing (behind
            the end of the answer, or an empty block).

    Returns:
        ``acceptance_length``: 1 (the bonus token) + for each k the share of blocks whose first k
        drafts are all right, among those that predict k; ``accuracy_k``: share of right choices of
        slot k = 1..K; ``n_blocks``. Lengths and shares of nothing are left out.
    """
    predicted = right >= 0
    n_blocks = int(predicted.any(dim=1).sum())
    metrics = {"n_blocks": float(n_blocks)}
    if n_blocks == 0:
        return metrics
    prefix = right.clamp(min=0).cumprod(dim=1)
    length = 1.0
    for k in range(right.shape[1]):
        n_predicted = int(predicted[:, k].sum())
        if n_predicted:
            length += int(prefix[predicted[:, k], k].sum()) / n_predicted
            metrics[f"accuracy_{k + 1}"] = int(right[predicted[:, k], k].sum()) / n_predicted
    return metrics | {"acceptance_length": length}
