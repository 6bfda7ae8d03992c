from __future__ import annotations

import torch

from hf_dflash.blocks import block_targets, draw_anchors, fixed_anchors, valid_anchors


def one_document(mask: list[int]) -> torch.Tensor:
    return torch.ones(len(mask), dtype=torch.long)


def test_the_first_token_of_an_answer_is_an_anchor_and_the_last_of_a_prompt_is_not() -> None:
    mask = torch.tensor([0, 0, 1, 1, 1])
    assert valid_anchors(mask, one_document([0] * 5)).tolist() == [0, 0, 1, 1, 0]


def test_an_answer_shorter_than_a_block_still_gives_anchors() -> None:
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1]])
    documents = one_document([0] * 4)[None]
    assert valid_anchors(mask[0], documents[0]).tolist() == [0, 0, 1, 0]
    targets = block_targets(ids, mask, documents, torch.tensor([[2]]), block_size=16)
    assert targets.predicts.sum() == 1
    assert targets.labels[0, 0, 1] == 8


def test_a_turn_end_is_predicted_and_nothing_behind_it() -> None:
    # Answer, turn end (9), then the next user's header, then another answer.
    ids = torch.tensor([[4, 5, 9, 1, 2, 6, 7]])
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1]])
    targets = block_targets(ids, mask, torch.ones_like(ids), torch.tensor([[0]]), block_size=7)
    assert targets.labels.tolist() == [[[0, 5, 9, 0, 0, 0, 0]]]


def test_no_supervised_token_gives_no_anchor() -> None:
    valid = torch.zeros(6, dtype=torch.bool)
    assert draw_anchors(valid, 3, torch.Generator()).tolist() == [-1, -1, -1]
    assert fixed_anchors(valid, 3, block_size=2).tolist() == [-1, -1, -1]


def test_every_valid_anchor_is_drawn_about_as_often() -> None:
    valid = torch.tensor([0, 1, 1, 0, 1, 1]).bool()
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(6)
    for _ in range(600):
        counts[draw_anchors(valid, 2, generator)] += 1
    assert counts[~valid].sum() == 0
    # 300 of each are expected, with a standard deviation of 12.
    assert ((counts[valid] - 300).abs() < 50).all()
