from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest

from hf_dflash.data import ChatRows, save_rows
from hf_dflash.loss_mask import EncodedRow
from hf_dflash.row_file import RowFile, open_rows

ROWS = ChatRows(
    [
        EncodedRow([1, 2, 3], [0, 1, 1]),
        EncodedRow([40, 5], [1, 1], [1, 2]),
        EncodedRow([600, 7, 8], [1, 1, 0]),
    ]
)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_saved_rows_are_opened(tmp_path: Path, name: str) -> None:
    save_rows(ROWS, tmp_path / name)
    rows = open_rows(tmp_path / name)
    assert isinstance(rows, RowFile) == name.endswith(".jsonl")
    assert [rows[i] for i in range(len(rows))] == [ROWS[i] for i in range(3)]
    assert rows[-1] == ROWS[2]
    with pytest.raises(IndexError):
        rows[3]


def test_a_row_file_travels_to_worker_processes(tmp_path: Path) -> None:
    save_rows(ROWS, tmp_path / "rows.jsonl")
    copied = pickle.loads(pickle.dumps(open_rows(tmp_path / "rows.jsonl")))
    assert copied[1] == ROWS[1]


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    save_rows(ROWS, tmp_path / "rows.jsonl")
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"input_ids": [1')
    rows = open_rows(tmp_path / "rows.jsonl")
    assert rows[0] == ROWS[0]
    with pytest.raises(ValueError, match=r"rows.jsonl, line 4: not a prepared row"):
        rows[3]


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no prepared rows at .*/x. Make them with `hf-dflash pre"
    ):
        open_rows(tmp_path / "x")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_file_without_a_row_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"") if path.suffix == ".gz" else b"")
    with pytest.raises(ValueError, match=rf"{name} is empty. Make rows of chats with"):
        open_rows(path)
