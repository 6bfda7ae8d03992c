"""Tell rounding from an error where two greedy decodings of one prompt part.

In half precision a forward over one row and a forward over a block round differently, so a token
may change where the target's best logits are nearly tied, and nowhere else. Here both rows that the
tokens were chosen from are made again, by the target's forwards in the same shapes and without
either decode loop. What rounding does is how far these rows lie apart. If both loops are right,
each token is the best one of its row, and their logits cannot lie further apart than rounding has
moved both of them.

Letters: n prompt length, S rows of one forward, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .outputs_dflash import CACHE_NAME
from .target import roll_back

#: Rounding is measured on the tokens that could win; the far tail of the vocabulary moves more.
CONTENDERS = 10


@dataclass(frozen=True, slots=True)
class Doubt:
    """How sure the target is of one of two tokens."""

    distance: float  # how much the best logit exceeds the worse of both tokens', in the worse row
    rounding: float  # how far a contender's logit moves between both rows, see `shape_rounding`


def doubt(rows: Sequence[Tensor], tokens: Sequence[int], dtype: torch.dtype) -> Doubt:
    """Compare the rows that two tokens were chosen from.

    Args:
        rows: Two of (V,) float32.
        tokens: Those that were chosen.
        dtype: That the target computes in.
    """
    pair = torch.tensor(tokens, device=rows[0].device)
    farthest = max(float(row.max() - row[pair].min()) for row in rows)
    # A token that a processor forbids is infinitely far, which JSON does not know.
    distance = min(farthest, torch.finfo(torch.float32).max)
    return Doubt(distance, shape_rounding(rows[0], rows[1], pair, dtype))


def shape_rounding(one_row: Tensor, block: Tensor, pair: Tensor, dtype: torch.dtype) -> float:
    """How much a contender's logit differs between two rows; half a step of ``dtype`` at least.

    Args:
        one_row: (V,) float32, as one forward makes it.
        block: (V,) float32, as another one does.
        pair: (2,) int64, tokens that count among the contenders.
        dtype: Whose step at the best logit is the least that is given.
    """
    contenders = torch.cat([one_row.topk(min(CONTENDERS, len(one_row))).indices, pair])
    moved = (one_row - block)[contenders].nan_to_num(0.0).abs().max()  # -inf in both: not moved
    _, exponent = torch.frexp(one_row.abs().nan_to_num(posinf=0.0).max())
    step = torch.finfo(dtype).eps * 2.0 ** (int(exponent) - 1)
    return max(float(moved), step / 2)


def replayed_scores(
    target: Any, prompt_ids: Tensor, new: Sequence[int], forwards: Sequence[range], **options: Any
) -> Tensor:
    """Scores that the token after ``new`` is chosen from, when forwards of given shapes lead there.

    Rows after the one in question do not change it, so any token stands for drafts that were
    rejected.

    Args:
        target: The target model.
        prompt_ids: (1, n) int64.
        new: The tokens after the prompt, up to the one in question.
        forwards: The rows of each forward, counted from the prompt's first token. One that begins
            before the end of the one before it rejects the rows from there on.
        **options: Of ``generate``: the cache and the processors are those of such a call.

    Returns:
        (V,) float32.

    Raises:
        ValueError: The last forward does not hold the last token of ``new``.
    """
    last = prompt_ids.shape[1] + len(new) - 1
    if not forwards or last not in forwards[-1]:
        raise ValueError(f"`forwards` must end with one that holds row {last}, got {forwards}.")
    n_filled = max(rows.stop for rows in forwards) - last - 1
    ids = torch.cat([prompt_ids, prompt_ids.new_tensor([[*new, *[0] * n_filled]])], dim=1)

    def replay(_model: Any, _ids: Tensor, *, logits_processor: Any, **model_kwargs: Any) -> Tensor:
        logits = _last_logits(target, ids, prompt_ids.shape[1], forwards, model_kwargs[CACHE_NAME])
        row = logits[:, last - forwards[-1].stop].float()
        scores: Tensor = logits_processor(ids[:, : last + 1], row)[0]
        return scores

    scores: Tensor = target.generate(
        input_ids=prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=ids.shape[1] - prompt_ids.shape[1] + 1,
        custom_generate=replay,
        **options,
    )
    return scores


def _last_logits(
    target: Any, ids: Tensor, n_prompt: int, forwards: Sequence[range], cache: Any
) -> Tensor:
    """Logits (1, S, V) of the last forward; without those of the prompt before its last token."""
    drafts = any(len(rows) > 1 for rows in forwards[1:])
    n_cached = 0
    for rows in forwards:
        if n_cached and drafts:
            roll_back(cache, n_cached - rows.start)
        options = {CACHE_NAME: cache, "use_cache": True}
        if target._supports_logits_to_keep():
            options["logits_to_keep"] = min(len(rows), rows.stop - n_prompt + 1)
        logits: Tensor = target(ids[:, rows.start : rows.stop], **options).logits
        if not n_cached and drafts:  # only now: the prompt itself is never rolled back
            cache.activate_past_recording()
        n_cached = rows.stop
    return logits
