"""Tell a rounding difference from an error where drafted and plain decoding part.

In bfloat16 a forward over one token and a forward over a block round differently, so a token can
change where the target's two best logits are nearly equal. It may change nowhere else. This module
measures both numbers at the position in question, with forwards that do not involve the decode
loop: how far the logits are from a tie, and how far the two shapes are from each other.

Letters: n prefix length, B rows of a block, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from hf_dflash.measurement_runs import is_near_tie
from hf_dflash.near_tie import doubt
from hf_dflash.outputs_dflash import CACHE_NAME


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two decodings of one prompt part, and how sure the target is there."""

    token_index: int  # among the new tokens
    plain_id: int
    drafted_id: int
    top2_gap_one_row: float  # best minus second best logit, forward shaped as in plain decoding
    top2_gap_block: float  # the same, forward shaped as in drafted decoding
    top2_gap_float32: float  # the same weights in float32
    distance: float  # how much the best logit exceeds the worse of the two tokens, worst shape
    rounding: float  # largest change of a contender's logit between both, see `hf_dflash.near_tie`

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it: each of the two logits may move by ``rounding``."""
        return is_near_tie(self.distance, self.rounding)


class CycleRecorder(BaseStreamer):
    """Keeps the tokens of every cycle as drafted decoding emits them."""

    def __init__(self) -> None:
        self.cycles: list[list[int]] = []  # the first is the one token of the prompt's forward

    def put(self, value: Tensor) -> None:
        """Take the prompt; cycles come through `put_cycle`."""

    def put_cycle(self, token_ids: Tensor, n_accepted: int) -> None:
        """Take one cycle."""
        del n_accepted
        self.cycles.append(token_ids.tolist())

    def end(self) -> None:
        """Nothing is left over."""


def first_difference(plain: list[int], drafted: list[int]) -> int | None:
    """Index of the first token that differs, `None` if there is none.

    Raises:
        RuntimeError: One is a prefix of the other: then rounding is not to blame.
    """
    for index, (a, b) in enumerate(zip(plain, drafted, strict=False)):
        if a != b:
            return index
    if len(plain) != len(drafted):
        raise RuntimeError(
            f"Plain decoding made {len(plain)} tokens and drafted decoding {len(drafted)} of the "
            "same tokens: a stop was missed. That is an error of the decode loop."
        )
    return None


def examine(
    target: Any,
    exact_target: Any,
    prompt_ids: Tensor,
    plain: list[int],
    *,
    cycles: list[list[int]],
    n_drafted: list[int],
) -> Difference | None:
    """Find the first difference and measure the target there.

    Args:
        target: The target, in the dtype that was decoded in.
        exact_target: The same weights in float32.
        prompt_ids: (1, n) int64.
        plain: New tokens of plain decoding.
        cycles: New tokens of drafted decoding by cycle, from `CycleRecorder`.
        n_drafted: Drafts of each cycle, from the decoding statistics.

    Returns:
        `None` if the tokens are the same.

    Raises:
        RuntimeError: The first token differs, although both come from the same forward.
    """
    drafted = [token for cycle in cycles for token in cycle]
    index = first_difference(plain, drafted)
    if index is None:
        return None
    if index == 0:
        raise RuntimeError("The first token differs, but one and the same forward chooses it.")
    start, n_rows = cycle_of(index, cycles, n_drafted)
    one_row = logits_at(target, prompt_ids, plain, index, start=index, n_rows=1)
    block = logits_at(target, prompt_ids, plain, index, start=start, n_rows=n_rows)
    exact = logits_at(exact_target, prompt_ids, plain, index, start=index, n_rows=1)
    chosen = doubt([one_row, block], [plain[index], drafted[index]], target.dtype)
    return Difference(
        token_index=index,
        plain_id=plain[index],
        drafted_id=drafted[index],
        top2_gap_one_row=_top2_gap(one_row),
        top2_gap_block=_top2_gap(block),
        top2_gap_float32=_top2_gap(exact),
        distance=chosen.distance,
        rounding=chosen.rounding,
    )


def cycle_of(index: int, cycles: list[list[int]], n_drafted: list[int]) -> tuple[int, int]:
    """First token of the cycle that holds token ``index``, and the rows of its forward."""
    start = len(cycles[0])
    for cycle, n_drafts in zip(cycles[1:], n_drafted, strict=True):
        if index < start + len(cycle):
            return start, n_drafts + 1
        start += len(cycle)
    raise IndexError(f"`index` {index} is in no cycle; {start} tokens were emitted.")


@torch.inference_mode()
def logits_at(
    target: Any, prompt_ids: Tensor, new: list[int], index: int, *, start: int, n_rows: int
) -> Tensor:
    """Logits that new token ``index`` is chosen from, by a forward over ``n_rows`` tokens.

    Everything before is put into a cache by one forward. Rows after the one in question do not
    change it, so the continuation in ``new`` stands for drafts that were rejected.

    Args:
        target: The target model.
        prompt_ids: (1, n) int64.
        new: New tokens; only those before ``index`` matter.
        index: Which new token.
        start: The first new token that the forward decides.
        n_rows: B; the first row is the token before ``start``.

    Returns:
        (V,) float32.
    """
    filler = [new[-1]] * n_rows
    ids = torch.cat([prompt_ids, torch.tensor([new + filler])], dim=1)
    first = prompt_ids.shape[1] + start - 1
    cache = DynamicCache(config=target.config)
    target(ids[:, :first], use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
    block = ids[:, first : first + n_rows]
    logits = target(block, use_cache=True, **{CACHE_NAME: cache}).logits
    return logits[0, index - start].float()


def _top2_gap(logits: Tensor) -> float:
    best, second = logits.topk(2).values.tolist()
    return best - second
