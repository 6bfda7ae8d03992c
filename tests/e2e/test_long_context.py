"""examples/long_context.py: a trained drafter goes on with few long rows."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dflash import DFlashDraftModel
from hf_dflash.data import ChatRows, save_rows
from hf_dflash.loss_mask import EncodedRow
from training_pairs import generated_rows, training_drafter, training_target

SCRIPT = Path(__file__).parents[2] / "examples" / "long_context.py"


def adapt(monkeypatch: pytest.MonkeyPatch, folder: Path, rows: list[Any], *options: str) -> None:
    encoded = [EncodedRow(row["input_ids"], row["loss_mask"]) for row in rows]
    save_rows(ChatRows(encoded), folder / "rows.jsonl")
    words = ["target", "drafter", "rows.jsonl", "out"]
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *(str(folder / w) for w in words), *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture
def target(tmp_path: Path) -> Any:
    target = training_target()
    target.save_pretrained(tmp_path / "target")
    training_drafter(target).save_pretrained(tmp_path / "drafter")
    return target


def test_long_rows_are_learned(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rows = generated_rows(target, 4, n_prompt=200, n_new=16)
    options = ["--rows-per-update", "2", "--anchors", "16", "--learning-rate", "1e-2"]
    adapt(monkeypatch, tmp_path, rows, *options)
    shown = capsys.readouterr().out
    assert shown.count("'grad_norm'") == 6  # two updates in each of three epochs
    before, after = (DFlashDraftModel.from_pretrained(tmp_path / f) for f in ("drafter", "out"))
    assert not torch.equal(before.fc.weight, after.fc.weight)


@pytest.mark.usefixtures("target")
def test_rows_beyond_the_known_positions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"input_ids": [1] * 513, "loss_mask": [1] * 513}]
    with pytest.raises(
        ValueError, match=r"`input_ids` must be texts of at most 512 tokens, .* got one of 513"
    ):
        adapt(monkeypatch, tmp_path, rows)
