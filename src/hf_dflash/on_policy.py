"""On-policy training: what the target says behind the drafter's own drafts.

The text's keys and values are computed once; then drafts of many blocks run behind them in one
forward, and a mask keeps the blocks apart. Nothing here has a gradient.

Letters: N rows, S tokens a row, A anchor slots a row, B block size, R slots that predict, r rows of
one chunk, Q drafts of a row in one forward, Ht target hidden size, H draft hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from .outputs_dflash import CACHE_NAME
from .target import input_device, roll_back, text_config

#: Drafts of a row in one forward: each has keys for all of them, mostly of other blocks.
PART_DRAFTS = 512
_FULL, _SLIDING = "full_attention", "sliding_attention"
#: Kinds of rotary embeddings whose angles depend on how long the whole text is.
_LENGTH_ROPES = ("dynamic", "longrope")
# Of a trial, the relative difference that rounding explains; a wrong mask makes it about 1.
_CLOSE, _CLOSE_IN_HALF = 1e-3, 0.1
_SHORT = 8  # tokens of a text in which each one matters


@dataclass(frozen=True, slots=True)
class DraftScores:
    """What the target makes of the drafts in slots that predict."""

    states: Tensor  # (R, Ht), last hidden states: of the token of a slot, behind the drafts before
    reached: Tensor  # (R,) bool, whether no draft before ends the text; else states mean nothing


def text_cache() -> DynamicCache:
    """A cache for the rows of one batch, whose windowed layers keep the whole text too."""
    return DynamicCache()


def slot_draws(batch: Mapping[str, Tensor], seed: int) -> Tensor:
    """One uniform number for each slot that predicts, (R,) float32.

    They follow from each row alone, so rows may be divided otherwise between processes, batches
    and accumulation, and a resumed run draws them again.

    Args:
        batch: From `DFlashCollator`.
        seed: Of the run.
    """
    counts = batch["predicts"].flatten(1).sum(dim=1).tolist()
    labels = batch["labels"].flatten(1).sum(dim=1).tolist()
    anchors = batch["anchors"].clamp(min=0).sum(dim=1).tolist()  # empty slots are -1
    draws = [torch.zeros(0)]
    # A generator for each row: only so can a row's numbers not depend on the rows beside it.
    for n_slots, of_labels, of_anchors in zip(counts, labels, anchors, strict=True):
        generator = torch.Generator().manual_seed(of_labels * 1_000_003 + of_anchors + seed)
        draws.append(torch.rand(n_slots, generator=generator))
    return torch.cat(draws)


@torch.no_grad()
def draft_ids(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    chunks: Sequence[slice],
    temperature: float,
    draws: Tensor,
) -> Tensor:
    """Draft the token of each slot, as decoding does: the best one, or a draw.

    Args:
        hidden: (R, H), the drafter's outputs.
        head: (r, H) -> (r, V) logits.
        chunks: Of the rows.
        temperature: 0 takes the best token.
        draws: (R,) uniform numbers below 1, of `slot_draws`.

    Returns:
        (R,) int64.
    """
    ids = [torch.zeros(0, dtype=torch.long, device=hidden.device)]
    for rows in chunks:
        logits = head(hidden[rows]).float()
        if temperature == 0:
            chosen = logits.argmax(dim=-1)
        else:
            reached = (logits / temperature).softmax(dim=-1).cumsum(dim=-1)
            drawn = draws[rows, None].to(reached.device) * reached[:, -1:]
            chosen = torch.searchsorted(reached, drawn, right=True)[:, 0]
            chosen.clamp_(max=logits.shape[-1] - 1)  # where logits are not finite, which is told
        ids.append(chosen.to(hidden.device))
    return torch.cat(ids)


@torch.no_grad()
def score_drafts(
    target: Any,
    cache: DynamicCache,
    last_hidden_states: Tensor,
    batch: Mapping[str, Tensor],
    drafts: Tensor,
) -> DraftScores:
    """Run the target on the drafts of all blocks, each behind its own text and drafts only.

    Drafts whose law no slot needs are not run: the last of a block, and what stands behind a draft
    that ends the text, since decoding would end there.

    Args:
        target: The target model.
        cache: Keys and values of the rows' texts; unchanged in the end.
        last_hidden_states: (N, S, Ht) of the texts.
        batch: ``anchors`` (N, A) and ``predicts`` (N, A, B) of one text a row.
        drafts: (R,) int64, from `draft_ids`.

    Raises:
        NotImplementedError: A text is longer than a window that cannot be masked.
    """
    anchors, predicts = batch["anchors"], batch["predicts"]
    row, slot, _ = predicts.nonzero(as_tuple=True)
    # Right for the first slot: its law stands at the anchor. The others' are put in.
    states = last_hidden_states[row, anchors[row, slot]]
    table = drafts.new_zeros(predicts.shape)
    table[predicts] = drafts
    ends = torch.isin(table, stop_ids(target).to(table.device)) & predicts
    reached = predicts & (ends.cumsum(dim=-1) - ends.long() == 0)
    place = torch.zeros_like(table)
    place[predicts] = torch.arange(len(drafts), device=table.device)
    n_each = max(1, predicts.shape[-1] - 2)
    for first in range(0, anchors.shape[1], max(1, PART_DRAFTS // n_each)):
        blocks = slice(first, first + max(1, PART_DRAFTS // n_each))
        part = _part(anchors[:, blocks], reached[:, blocks], table[:, blocks])
        if part is not None:
            found = _forward(target, cache, part)[part.is_real].to(states)
            rows = part.is_real.nonzero()[:, 0]
            where = place[:, blocks][rows, part.block[part.is_real], part.slot[part.is_real]]
            states[where] = found
    return DraftScores(states, reached[predicts])


@dataclass(frozen=True, slots=True)
class _Part:
    """Drafts that run together; rows with fewer are filled up with what nobody reads."""

    ids: Tensor  # (N, Q) int64, the draft before the slot that it is run for
    anchor: Tensor  # (N, Q) int64, of its block
    block: Tensor  # (N, Q) int64, -1 where filled up
    slot: Tensor  # (N, Q) int64, at least 2: the one whose law follows

    @property
    def is_real(self) -> Tensor:
        """(N, Q) bool."""
        return self.block >= 0


def _part(anchors: Tensor, wanted: Tensor, table: Tensor) -> _Part | None:
    """Put the drafts to run of some blocks side by side; `None` if there are none.

    Args:
        anchors: (N, a) int64.
        wanted: (N, a, B) bool, slots whose law is wanted.
        table: (N, a, B) int64, drafts by slot.
    """
    n_each = wanted.shape[-1] - 2
    flat = wanted[..., 2:].flatten(1)
    n_drafts = int(flat.sum(dim=1).max()) if flat.numel() else 0
    if n_drafts == 0:
        return None
    order = flat.byte().argsort(dim=1, descending=True, stable=True)[:, :n_drafts]
    is_real = flat.gather(1, order)
    block, slot = order // n_each, 2 + order % n_each
    rows = torch.arange(len(anchors), device=anchors.device)[:, None]
    ids = table[rows, block, slot - 1]
    anchor = torch.where(is_real, anchors[rows, block], 0)
    return _Part(ids, anchor, torch.where(is_real, block, -1), slot)


def _forward(target: Any, cache: DynamicCache, part: _Part) -> Tensor:
    """Last hidden states (N, Q, Ht) of a part's drafts; the cache is as before."""
    device = input_device(target.get_input_embeddings(), part.ids.device)
    n_drafts = part.ids.shape[1]
    output = target.get_decoder()(
        input_ids=part.ids.to(device),
        position_ids=(part.anchor + part.slot - 1).to(device),
        attention_mask=_masks(target, part, cache.get_seq_length(), device),
        **{CACHE_NAME: cache, "use_cache": True},
    )
    roll_back(cache, n_drafts)
    states: Tensor = output.last_hidden_state
    return states.to(part.ids.device)


def _masks(target: Any, part: _Part, n_text: int, device: torch.device) -> Any:
    """The mask (N, 1, Q, S + Q) of a part; one for each kind of layer if some have windows."""
    config = text_config(target)
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [_FULL])
    if window is not None and _SLIDING in kinds:
        windows = {_FULL: None, _SLIDING: window}
        return {
            kind: _mask(target, part, n_text, w, device)
            for kind, w in windows.items()
            if kind in kinds
        }
    if window is not None and n_text >= window and not getattr(config, "layer_types", None):
        raise NotImplementedError(
            f"`on_policy` cannot mask the window of {window} tokens of `{type(target).__name__}`, "
            f"got texts of {n_text}. Use shorter rows, or leave it out."
        )
    return _mask(target, part, n_text, None, device)


def _mask(
    target: Any, part: _Part, n_text: int, window: int | None, device: torch.device
) -> Tensor:
    """Each draft sees the text up to its anchor, and the drafts of its block up to itself."""
    key = torch.arange(n_text, device=part.ids.device)
    text = key <= part.anchor[..., None]  # (N, Q, S)
    distance = part.slot[:, :, None] - part.slot[:, None, :]
    own = (part.block[:, :, None] == part.block[:, None, :]) & (distance >= 0)
    if window is not None:
        text &= (part.anchor + part.slot - 1)[..., None] - key < window
        own &= distance < window
    visible = torch.cat([text, own], dim=-1)[:, None].to(device)
    if text_config(target)._attn_implementation == "sdpa":
        return visible
    lowest = torch.finfo(target.dtype).min
    return torch.zeros(visible.shape, dtype=target.dtype, device=visible.device).masked_fill(
        ~visible, lowest
    )


def stop_ids(target: Any) -> Tensor:
    """Tokens (n,) int64 at which the target's `generate` ends."""
    found = getattr(getattr(target, "generation_config", None), "eos_token_id", None)
    if found is None:
        return torch.zeros(0, dtype=torch.long)
    return torch.as_tensor(found, dtype=torch.long).flatten()


def check_on_policy(target: Any, n_text: int, n_drafts: int) -> None:
    """Refuse a target that cannot score the drafts of many blocks in one forward.

    What its config tells is asked first. Then it scores drafts, and must say what it says of each
    block alone: behind a few tokens, where a draft that is seen too much or too little matters
    most, and behind as many as it will meet, where windows and tables of positions show.

    Args:
        target: Where it will run.
        n_text: Tokens of the longest row.
        n_drafts: Most drafts of a row in one forward.

    Raises:
        NotImplementedError: Its attention takes no such mask, it is recurrent, or sharded.
    """
    config = text_config(target)
    kernel = config._attn_implementation
    kinds = set(getattr(config, "layer_types", None) or [_FULL])
    ropes = ", ".join(sorted(_rope_types(config) & set(_LENGTH_ROPES)))
    sharded = any(hasattr(p, "device_mesh") for p in target.parameters())
    refused = [
        (kernel not in ("sdpa", "eager"), f"`attn_implementation`={kernel!r}, which takes no mask"),
        (
            getattr(target, "_is_stateful", False) or not kinds <= {_FULL, _SLIDING},
            "layers that keep a state or see chunks",
        ),
        (
            bool(ropes),
            f"rotary embeddings ({ropes}) that depend on the length of the text",
        ),
        (sharded, "weights spread by `shard_target`, which all processes must run equally often"),
    ]
    for applies, what in refused:
        if applies:
            raise NotImplementedError(_refusal(target, f"it has {what}"))
    for sizes in ((_SHORT, 6), (max(_SHORT, n_text), max(6, n_drafts))):
        _check_trial(target, *sizes)


def _rope_types(config: Any) -> set[str]:
    """Kinds of rotary embeddings, of all kinds of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    return {part["rope_type"] for part in [rope, *nested] if part.get("rope_type")}


def _check_trial(target: Any, n_text: int, n_drafts: int) -> None:
    try:
        differences = _trial(target, n_text, n_drafts).sort().values
    except NotImplementedError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        reason = f"its forward on {n_drafts} drafts behind {n_text} tokens fails: {error}"
        raise NotImplementedError(_refusal(target, reason)) from error
    # In half precision rounding may choose another expert for one token: the second largest tells.
    is_half = target.dtype.itemsize <= 2
    difference = float(differences[-2 if is_half else -1])
    if not difference <= (_CLOSE_IN_HALF if is_half else _CLOSE):
        reason = (
            f"its states differ by {difference:.1%} from those of each block alone, with "
            f"{n_drafts} drafts behind {n_text} tokens"
        )
        raise NotImplementedError(_refusal(target, reason))


def _refusal(target: Any, reason: str) -> str:
    return (
        "`on_policy` needs a target that scores many blocks in one forward with a mask, got "
        f'`{type(target).__name__}`: {reason}. Load it with attn_implementation="sdpa", if that '
        "is what is missing, or leave `on_policy` out."
    )


@torch.no_grad()
def _trial(target: Any, n_text: int, n_drafts: int) -> Tensor:
    """Relative differences (6,) between states of drafts together and of their blocks alone.

    Of the first, the middle and the last of blocks of 4, in slots whose law the drafts' forward
    makes: 2 and 3. No block reaches beyond the text, as in training.
    """
    generator = torch.Generator().manual_seed(0)
    most = min(target.get_input_embeddings().weight.shape[0], text_config(target).vocab_size)
    tokens = torch.arange(most)
    tokens = tokens[~torch.isin(tokens, stop_ids(target))]  # behind these no draft would be run
    n_blocks = -(-n_drafts // 2)
    drawn = torch.randint(len(tokens), (n_text + 3 * n_blocks,), generator=generator)
    ids = tokens[drawn].to(input_device(target.get_input_embeddings(), drawn.device))
    text, drafts = ids[:n_text], ids[n_text:]
    decoder, cache = target.get_decoder(), text_cache()
    last = decoder(input_ids=text[None], **{CACHE_NAME: cache, "use_cache": True}).last_hidden_state
    anchors = torch.linspace(1, n_text - 4, n_blocks).long().to(text.device)
    predicts = torch.ones(1, n_blocks, 4, dtype=torch.bool, device=text.device)
    predicts[..., 0] = False
    batch = {"anchors": anchors[None], "predicts": predicts}
    states = score_drafts(target, cache, last.to(text.device), batch, drafts).states
    found, expected = [], []
    for block in (0, n_blocks // 2, n_blocks - 1):
        behind = text[: int(anchors[block]) + 1]
        row = torch.cat([behind, drafts.unflatten(0, (-1, 3))[block, :2]])
        alone = decoder(input_ids=row[None], use_cache=False).last_hidden_state[0, -2:]
        expected.append(alone.to(states.device).double())
        found.append(states.unflatten(0, (-1, 3))[block, 1:].double())
    wanted = torch.cat(expected)
    return (torch.cat(found) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
