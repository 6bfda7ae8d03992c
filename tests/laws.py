"""The exact law of a sampled output, a drafter close to that law, and the test of samples.

A tiny vocabulary and a few new tokens make every output countable: the target runs on every
prefix, transformers' own processors are applied to its scores, and the probabilities multiply.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from hf_dflash import DFlashDraftModel
from pairs import drafter_config, tiny_target

Tokens = tuple[int, ...]
_SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
PROMPT = torch.tensor([[1, 3, 2, 3]])


def law_target(vocab_size: int = 5, seed: int = 0) -> Any:
    """A random target whose outputs can be enumerated."""
    return tiny_target(
        seed, vocab_size=vocab_size, hidden_size=16, num_hidden_layers=2, head_dim=8, **_SMALL
    )


@torch.no_grad()
def prefix_logits(target: Any, n_new: int) -> dict[Tokens, Tensor]:
    """The target's logits (V,) after the prompt and each of the prefixes shorter than ``n_new``."""
    logits: dict[Tokens, Tensor] = {}
    for length in range(n_new):
        prefixes = list(itertools.product(range(target.config.vocab_size), repeat=length))
        new = torch.tensor(prefixes, dtype=torch.long).reshape(len(prefixes), length)
        ids = torch.cat([PROMPT.expand(len(prefixes), -1), new], dim=1)
        logits.update(zip(prefixes, target(ids).logits[:, -1].float(), strict=True))
    return logits


def call_processors(target: Any, call: dict[str, Any]) -> list[Any]:
    """The processors that `generate` builds for a call, in its order."""
    built: list[Any] = []
    original = target._get_logits_processor

    def record(*args: Any, **kwargs: Any) -> Any:
        built.append(original(*args, **kwargs))
        return built[-1]

    target._get_logits_processor = record
    try:
        target.generate(PROMPT, **call)
    finally:
        del target._get_logits_processor
    return built[-1]


def next_law(processors: Sequence[Any], prefix: Tokens, logits: Tensor) -> Tensor:
    """P(next token | prefix) as (V,) float64, after the processors."""
    ids = torch.cat([PROMPT, torch.tensor([prefix], dtype=torch.long).reshape(1, -1)], dim=1)
    scores = logits[None].clone()
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0].double().softmax(dim=-1)


def output_law(
    logits: dict[Tokens, Tensor], processors: Sequence[Any], n_new: int, stops: Sequence[int] = ()
) -> dict[Tokens, float]:
    """The probability of each output of at most ``n_new`` tokens, which ends after a stop."""
    law: dict[Tokens, float] = {}
    open_prefixes: dict[Tokens, float] = {(): 1.0}
    while open_prefixes:
        prefix, probability = open_prefixes.popitem()
        for token, p in enumerate(next_law(processors, prefix, logits[prefix]).tolist()):
            longer = (*prefix, token)
            if p > 0:
                done = token in stops or len(longer) == n_new
                (law if done else open_prefixes)[longer] = probability * p
    return law


def p_value(outputs: Iterable[Tokens], law: dict[Tokens, float]) -> float:
    """Chi-square p-value of outputs under a law; cells of expectation below 5 are merged.

    Raises:
        AssertionError: An output that the law does not allow.
    """
    counts = dict.fromkeys(sorted(law, key=lambda output: (law[output], output)), 0)
    for output in outputs:
        assert output in counts, f"{output} has probability 0"
        counts[output] += 1
    n = sum(counts.values())
    observed, expected = [0.0], [0.0]
    for output, count in counts.items():  # from the least likely output on
        if expected[-1] >= 5:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += count
        expected[-1] += n * law[output]
    if expected[-1] < 5:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    assert len(expected) > 1, "too few cells to tell anything"
    scale = n / sum(expected)  # the law sums to 1 up to rounding
    return float(chisquare(observed, [cell * scale for cell in expected]).pvalue)


class NearTarget(DFlashDraftModel):
    """A drafter whose logits are the target's own on one likely path, plus fixed noise.

    Drafts then are often accepted and often rejected, and the residual is not trivial.

    Args:
        target: The target; its head must be able to make any logits (H >= V).
        logits: Of `prefix_logits`.
        noise: Standard deviation of what is added to the logits.
        block_size: B.
        seed: Of the noise.
    """

    def __init__(
        self,
        target: Any,
        logits: dict[Tokens, Tensor],
        noise: float,
        block_size: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(drafter_config(target, block_size, num_hidden_layers=1, **_SMALL))
        self.eval()
        self._table = target.get_input_embeddings().weight.detach()
        to_hidden = torch.linalg.pinv(target.get_output_embeddings().weight.detach()).T  # (V, H)
        generator = torch.Generator().manual_seed(seed)
        self._rows: dict[tuple[int, int], Tensor] = {}
        for prefix in _likeliest_prefixes(logits):
            path = _continuation(prefix, logits, block_size - 1)
            path = path + noise * torch.randn(path.shape, generator=generator)
            slots = torch.cat([path.new_zeros(1, path.shape[1]), path])  # the anchor's says nothing
            position = PROMPT.shape[1] + len(prefix) - 1
            self._rows[position, prefix[-1]] = slots @ to_hidden

    def forward(self, noise_embeds: Tensor, position_ids: Tensor, **kwargs: Any) -> BaseModelOutput:
        super().forward(noise_embeds, position_ids=position_ids, **kwargs)  # keeps its cache true
        n_block = noise_embeds.shape[1]
        anchor = int((self._table - noise_embeds[0, 0]).square().sum(dim=1).argmin())
        rows = self._rows[int(position_ids[0, -n_block]), anchor]
        return BaseModelOutput(last_hidden_state=rows[None, :n_block])


def _likeliest_prefixes(logits: dict[Tokens, Tensor]) -> list[Tokens]:
    """For each length and each last token the likeliest prefix: the drafter sees no more of it."""
    best: dict[tuple[int, int], tuple[float, Tokens]] = {}
    weights: dict[Tokens, float] = {(): 0.0}
    for prefix in sorted(logits, key=len)[1:]:
        step = logits[prefix[:-1]].log_softmax(dim=-1)[prefix[-1]]
        weights[prefix] = weights[prefix[:-1]] + float(step)
        place = len(prefix), prefix[-1]
        best[place] = max(best.get(place, (-float("inf"), prefix)), (weights[prefix], prefix))
    return [prefix for _, prefix in best.values()]


def _continuation(prefix: Tokens, logits: dict[Tokens, Tensor], n_slots: int) -> Tensor:
    """Logits (n_slots, V) of the target's greedy path after ``prefix``; 0 where not enumerated."""
    rows = []
    for _ in range(n_slots):
        row = logits.get(prefix)
        rows.append(torch.zeros_like(logits[()]) if row is None else row)
        prefix = (*prefix, int(rows[-1].argmax()))
    return torch.stack(rows)
