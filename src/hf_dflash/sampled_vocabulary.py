"""Sampled softmax: cross-entropy on a part of the vocabulary, where the whole head costs too much.

Letters: R rows (slots that predict), r rows of one chunk, H draft hidden size, V vocabulary, C
candidates.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from .losses import CrossEntropy
from .target import scaled_logits


class SampledVocabulary:
    """The labels of a batch, and some other tokens that stand for all the others.

    A sampled token's logit is raised by the log of how many tokens it stands for, so that the sum
    under the softmax estimates the whole without bias. Source: sampled softmax (arXiv:1412.2007),
    with a uniform proposal.

    Args:
        target: The target; its head must pass `check_plain_head`.
        config: The drafter's.
        labels: (R,) int64.
        n_sampled: How many tokens besides the labels.
        generator: Source of randomness, on the host.

    Attributes:
        ids: (C,) int64, the tokens behind the logits.
    """

    def __init__(
        self, target: Any, config: Any, labels: Tensor, n_sampled: int, generator: torch.Generator
    ) -> None:
        head = target.get_output_embeddings()
        own, self._labels = labels.unique(return_inverse=True)
        is_other = torch.ones(len(head.weight), dtype=torch.bool)
        is_other[own.cpu()] = False
        others = is_other.nonzero()[:, 0]
        drawn = others[torch.randperm(len(others), generator=generator)[:n_sampled]]
        self.ids = torch.cat([own, drawn.to(own.device)])
        ids = self.ids.to(head.weight.device)
        self._weight = head.weight.detach()[ids]
        self._bias = None if head.bias is None else head.bias.detach()[ids]
        self._config = config
        self._raised = torch.zeros(len(ids), device=ids.device)
        self._raised[len(own) :] = math.log(max(1, len(others)) / max(1, len(drawn)))

    def head(self, rows: Tensor) -> Tensor:
        """Logits (r, C) of the candidates, not yet raised."""
        logits = F.linear(rows.to(self._weight), self._weight, self._bias)
        return scaled_logits(logits, self._config)

    @property
    def row_loss(self) -> CrossEntropy:
        """Cross-entropy on raised logits."""
        return CrossEntropy(self._labels, self._raised)


def check_plain_head(target: Any) -> None:
    """Refuse a head whose rows cannot be taken one by one.

    Raises:
        NotImplementedError: It is quantised, adapted, sharded or no linear layer.
    """
    head = target.get_output_embeddings()
    is_plain = type(head) is torch.nn.Linear
    if not is_plain or not head.weight.is_floating_point() or head.weight.is_meta:
        raise NotImplementedError(
            "`n_sampled_tokens` needs a target whose head is a plain linear layer in memory, got "
            f"{type(head).__name__}. Leave it out: the loss is then taken over all tokens."
        )
