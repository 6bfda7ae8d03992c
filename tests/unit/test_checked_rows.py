"""What is looked at before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from hf_dflash.collator import DFlashCollator
from hf_dflash.data import ChatRows
from hf_dflash.loss_mask import EncodedRow
from hf_dflash.row_file import open_rows
from hf_dflash.training_checks import numbered
from training_pairs import row_of

MASK, N_TOKENS = 50, 60
COLLATOR = DFlashCollator(4, 6, mask_token_id=MASK, vocab_size=N_TOKENS)
ROWS = [row_of([5, 6, 7, 8, 9]) for _ in range(4)]


def rows_with(token: int) -> list[Any]:
    return [*ROWS, row_of([5, 6, token, 8, 9])]


class MadeWhenAsked(Dataset[Any]):
    """Rows that take time to make, as those of a tokenizer."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.rows[index]


def as_file(rows: list[Any], folder: Path) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return open_rows(path)


KINDS: dict[str, Any] = {
    "list": lambda rows, _: rows,
    "tensors": lambda rows, _: [{k: torch.tensor(v) for k, v in row.items()} for row in rows],
    "chats": lambda rows, _: ChatRows([EncodedRow(**row) for row in rows]),
    "file": as_file,
}


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (MASK, f"`input_ids` must not hold the drafter's mask token {MASK}"),
        (N_TOKENS, r"`input_ids` must be tokens of the target \(0..59\), got 60"),
        (-1, r"`input_ids` must be tokens of the target \(0..59\), got -1"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_bad_row_is_refused_before_training(
    tmp_path: Path, kind: str, token: int, message: str
) -> None:
    bad = KINDS[kind](rows_with(token), tmp_path)
    where = r"rows\.jsonl, line 5" if kind == "file" else r"train_dataset\[4\]"
    with pytest.raises(ValueError, match=f"{where}: {message}"):
        numbered(bad, "train_dataset", COLLATOR)


def test_a_bad_row_of_one_evaluation_of_several_is_named() -> None:
    slices = {"good": ROWS, "bad": rows_with(MASK)}
    with pytest.raises(ValueError, match=r"eval_dataset\['bad'\]\[4\]: `input_ids` must not hold"):
        numbered(slices, "eval_dataset", COLLATOR)


def test_a_row_without_tokens_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match=r"train_dataset\[4\]: Every row must have `input_ids`"):
        numbered([*ROWS, {"loss_mask": [1]}], "train_dataset", COLLATOR)


def test_rows_that_are_made_when_asked_are_not_all_made_first() -> None:
    rows = MadeWhenAsked(rows_with(MASK))
    checked = numbered(rows, "train_dataset", COLLATOR)
    assert set(rows.asked) == {0}
    with pytest.raises(ValueError, match="must not hold the drafter's mask token"):
        COLLATOR([checked[4]])
