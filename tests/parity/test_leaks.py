"""A block sees nothing that decoding would not have: by perturbation, to the bit; by gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dflash import attention_masks
from training_pairs import (
    BLOCK,
    DRAFTERS,
    UNCOMPILED_WARNING,
    batch_of,
    block_logits,
    leave_flex_uncompiled,
    random_ids,
    row_of,
    step_of,
    training_drafter,
    training_target,
)

# Two documents and padding in the first row; one document in the second.
PACKED = {
    "input_ids": random_ids(10, 1) + random_ids(9, 2) + [0],
    "loss_mask": [0, 0] + [1] * 8 + [0] + [1] * 8 + [0],
    "document_ids": [1] * 10 + [2] * 9 + [0],
}
ATTENTION = ["sdpa", "eager", "flex_attention"]
ROWS = [PACKED, row_of(random_ids(20, 3))]


pytestmark = pytest.mark.filterwarnings(UNCOMPILED_WARNING)


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks attend together, so that tiny batches are cut into parts as large ones are."""
    monkeypatch.setattr(attention_masks, "_PART_QUERIES", 3 * BLOCK)


@pytest.fixture(scope="module")
def target() -> Any:
    return training_target()


def logits_of(target: Any, drafter: Any, batch: dict[str, Tensor], taps: Tensor) -> Tensor:
    """(N, A, B, V)."""
    step = step_of(target, drafter)
    return step.head(step.hidden_states(drafter, batch, taps)).unflatten(1, (-1, BLOCK))


def real_blocks(batch: dict[str, Tensor]) -> list[tuple[int, int, int]]:
    """Row, slot and anchor of every block."""
    rows, slots = (batch["anchors"] >= 0).nonzero(as_tuple=True)
    blocks = zip(rows.tolist(), slots.tolist(), strict=True)
    return [(n, i, int(batch["anchors"][n, i])) for n, i in blocks]


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_hidden_states_at_or_behind_the_anchor(
    target: Any, kind: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_flex_uncompiled(monkeypatch)
    drafter = training_drafter(target, kind, attn_implementation=attention)
    batch = batch_of(ROWS)
    taps = step_of(target, drafter).target_states(batch).taps
    before = logits_of(target, drafter, batch, taps)
    n_blocks = 0
    for anchor in sorted({a for _, _, a in real_blocks(batch)}):
        changed = taps.clone()
        changed[:, anchor:] += torch.randn_like(changed[:, anchor:])
        after = logits_of(target, drafter, batch, changed)
        seen = batch["anchors"] == anchor
        assert torch.equal(after[seen], before[seen])
        later = batch["anchors"] > anchor
        # Blocks behind it do read what was changed, unless it is another document's.
        later[0] &= batch["document_ids"][0][batch["anchors"][0].clamp(min=0)] == int(
            batch["document_ids"][0, anchor]
        )
        near = later & (batch["anchors"] - anchor < 2)
        for n, i in near.nonzero().tolist():
            assert not torch.equal(after[n, i], before[n, i])
        n_blocks += int(seen.sum())
    assert n_blocks == len(real_blocks(batch))


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_tokens_of_other_blocks(
    target: Any, kind: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_flex_uncompiled(monkeypatch)
    drafter = training_drafter(target, kind, attn_implementation=attention)
    batch = batch_of(ROWS)
    taps = step_of(target, drafter).target_states(batch).taps
    before = logits_of(target, drafter, batch, taps)
    for n, i, anchor in real_blocks(batch):
        ids = (batch["input_ids"] + 7) % 90
        ids[n, anchor] = batch["input_ids"][n, anchor]
        after = logits_of(target, drafter, batch | {"input_ids": ids}, taps)
        assert torch.equal(after[n, i], before[n, i])
        others = torch.ones_like(batch["anchors"], dtype=torch.bool)
        others[n, i] = False
        assert not torch.equal(after[others], before[others])


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_tokens_of_other_documents_and_padding(
    target: Any, kind: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_flex_uncompiled(monkeypatch)
    drafter = training_drafter(target, kind, attn_implementation=attention)
    batch = batch_of(ROWS)
    before = block_logits(target, drafter, batch)
    home = batch["document_ids"][0][batch["anchors"][0].clamp(min=0)]
    for number in (1, 2):
        ids = batch["input_ids"].clone()
        foreign = batch["document_ids"] != number
        foreign[1] = True
        ids[foreign] = (ids[foreign] + 11) % 90
        after = block_logits(target, drafter, batch | {"input_ids": ids})
        own = (home == number) & (batch["anchors"][0] >= 0)
        assert bool(own.any())
        assert torch.equal(after[0, own], before[0, own])
        assert not torch.equal(after[1], before[1])


@torch.no_grad()
def test_tokens_that_come_later(target: Any) -> None:
    """Through target and drafter together: the future of a prefix does not reach its block."""
    drafter = training_drafter(target)
    batch = batch_of([row_of(random_ids(20, 3))])
    before = block_logits(target, drafter, batch)
    for n, i, anchor in real_blocks(batch):
        ids = batch["input_ids"].clone()
        ids[n, anchor + 1 :] = (ids[n, anchor + 1 :] + 13) % 90
        after = block_logits(target, drafter, batch | {"input_ids": ids})
        assert torch.equal(after[n, i], before[n, i])


@pytest.mark.parametrize("kind", ["dflash", "dflare", "sliding", "mixed"])
def test_gradients_reach_the_context_before_the_anchor_only(target: Any, kind: str) -> None:
    drafter = training_drafter(target, kind)
    batch = batch_of(ROWS)
    taps = step_of(target, drafter).target_states(batch).taps.clone().requires_grad_()
    logits = logits_of(target, drafter, batch, taps)
    # Each layer reaches its window back, and a full layer everything.
    reach = 4 if kind == "sliding" else 99
    for n, i, anchor in real_blocks(batch):
        (gradient,) = torch.autograd.grad(logits[n, i, 1:].square().sum(), taps, retain_graph=True)
        touched = gradient.abs().sum(dim=-1) > 0
        documents = batch["document_ids"]
        allowed = torch.zeros_like(touched)
        places = torch.arange(touched.shape[1])
        allowed[n] = (
            (places < anchor) & (places >= anchor - reach) & (documents[n] == documents[n, anchor])
        )
        assert torch.equal(touched, allowed), (n, i, anchor)
