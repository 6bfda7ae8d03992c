from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hf_dflash.collator import DFlashCollator, EpochRows


def row(n_tokens: int, first: int = 2, **columns: Any) -> dict[str, Any]:
    mask = [0] * first + [1] * (n_tokens - first)
    return {"input_ids": list(range(1, n_tokens + 1)), "loss_mask": mask, **columns}


def collate(*rows: dict[str, Any], epoch: int = 0, **options: Any) -> dict[str, torch.Tensor]:
    numbered = EpochRows(list(rows))
    numbered.epoch.fill_(epoch)
    options = {"block_size": 4, "n_anchors": 3, **options}
    return DFlashCollator(**options)([numbered[i] for i in range(len(rows))])


def test_rows_are_padded_at_the_right_and_padding_is_no_document() -> None:
    batch = collate(row(6), row(4), pad_token_id=77)
    assert batch["input_ids"][1].tolist() == [1, 2, 3, 4, 77, 77]
    assert batch["document_ids"].tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 0]]
    assert batch["anchors"].shape == (2, 3)
    assert batch["labels"].shape == batch["predicts"].shape == (2, 3, 4)


def test_padding_at_the_left_does_not_shift_positions() -> None:
    batch = collate(row(6, attention_mask=[0, 0, 1, 1, 1, 1]))
    assert batch["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3]]
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1, 1, 1]]


def test_positions_restart_with_every_document() -> None:
    batch = collate(row(6, document_ids=[1, 1, 1, 2, 2, 0]))
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    # A document that is given the number of an earlier one is still another document.
    batch = collate(row(5, document_ids=[4, 4, 2, 4, 4]))
    assert batch["document_ids"].tolist() == [[1, 1, 2, 3, 3]]


def test_anchors_depend_on_run_epoch_and_example_and_on_nothing_else() -> None:
    rows = [row(60) for _ in range(4)]
    alone = collate(*rows)["anchors"]
    torch.manual_seed(123)
    again = collate(*rows)["anchors"]
    assert torch.equal(alone, again)
    assert len({tuple(anchors) for anchors in alone.tolist()}) == 4
    assert not torch.equal(alone, collate(*rows, epoch=1)["anchors"])
    assert not torch.equal(alone, collate(*rows, seed=43)["anchors"])
    numbered = EpochRows(rows)
    moved = DFlashCollator(4, 3)([numbered[3], numbered[1]])["anchors"]
    assert torch.equal(moved, alone[[3, 1]])


@pytest.mark.parametrize("ids", [["train-0", "train-1"], [7, 7]])
def test_a_data_set_may_have_numbers_of_its_own(ids: list[Any]) -> None:
    plain = [row(60), row(60)]
    named = [{**plain[i], "example_id": ids[i], "epoch": "first"} for i in range(2)]
    assert torch.equal(collate(*named)["anchors"], collate(*plain)["anchors"])


@pytest.mark.parametrize("n_workers", [0, 2])
def test_workers_see_the_epoch(n_workers: int) -> None:
    rows = EpochRows([row(60) for _ in range(4)])
    loader = DataLoader(
        rows,
        batch_size=2,
        collate_fn=DFlashCollator(4, 3),
        num_workers=n_workers,
        persistent_workers=n_workers > 0,
    )
    for epoch in (0, 1):
        rows.epoch.fill_(epoch)
        got = torch.cat([batch["anchors"] for batch in loader])
        assert torch.equal(got, collate(*rows.rows, epoch=epoch)["anchors"])


def test_slots_are_constant_or_as_many_as_the_batch_needs() -> None:
    assert collate(row(5), row(4), n_anchors=9)["anchors"].shape == (2, 9)
    trimmed = collate(row(5), row(4), n_anchors=9, keeps_slots=False)
    assert trimmed["anchors"].tolist() == [[2, 3], [2, -1]]
    assert trimmed["labels"].shape == (2, 2, 4)


def test_a_batch_without_a_supervised_token_has_one_empty_slot() -> None:
    batch = collate(row(5, first=5), row(0, first=0), keeps_slots=False)
    assert batch["anchors"].tolist() == [[-1], [-1]]
    assert not batch["predicts"].any()


def test_answers_can_be_divided_into_blocks_instead() -> None:
    batch = collate(row(13), n_anchors=5, random=False)
    assert batch["anchors"].tolist() == [[2, 6, 10, -1, -1]]


def test_taps_are_padded_along() -> None:
    taps = torch.ones(4, 3)
    batch = collate(row(6, taps=torch.ones(6, 3)), row(4, taps=taps))
    assert batch["taps"].shape == (2, 6, 3)
    assert batch["taps"][1, 4:].abs().sum() == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"loss_mask": None}, r"must have `loss_mask`, got the columns"),
        ({"input_ids": None}, r"must have `input_ids`, got the columns"),
        ({"loss_mask": [1, 1]}, r"must be of one length, got {'input_ids': 5, 'loss_mask': 2}"),
        ({"position_ids": [3, 4, 5, 6, 7]}, r"`position_ids` must count from 0 in every document"),
    ],
)
def test_bad_rows_are_refused(columns: dict[str, Any], message: str) -> None:
    bad = {name: value for name, value in {**row(5), **columns}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        collate(bad)


def test_a_stream_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must have a length and rows that can be indexed, got ge"):
        EpochRows(row(3) for _ in range(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token_id": 3}, r"`input_ids` must not hold the drafter's mask token 3"),
        ({"vocab_size": 5}, r"`input_ids` must be tokens of the target \(0..4\), got 5"),
    ],
)
def test_tokens_that_are_not_text_of_the_target_are_refused(
    options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        collate(row(5), **options)
