from __future__ import annotations

from pathlib import Path

import pytest

from hf_dflash.training_log import (
    TrainingLog,
    as_scalars,
    read_data_record,
    read_training_log,
    write_data_record,
    write_training_log,
)

LOG = TrainingLog(
    target=None,
    date="2026-01-02T03:04:05+00:00",
    versions={"torch": "2.13.0"},
    device="cpu",
    n_processes=1,
    n_steps=3,
    settings={"seed": 0, "ema_decay": None, "bf16": False},
    data={},
    log=[
        {"eval_loss": 9.0, "step": 1},
        {"eval_loss": 2.5, "eval_samples_per_second": 7.0, "eval_n_blocks": 3, "step": 3},
        {"eval_decoding_speedup": 1.25, "step": 3},
        {"train_loss": 3.0, "step": 3},
    ],
)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write_training_log(LOG, tmp_path)
    assert read_training_log(tmp_path / "training_log.json") == LOG


def test_the_last_evaluation_is_that_of_the_last_step_and_without_times() -> None:
    assert LOG.last_evaluation() == {"eval_loss": 2.5, "eval_decoding_speedup": 1.25}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"training_log\.json must be JSON written by DFlashTrainer"),
        ("[]", r"written by DFlashTrainer with `schema` 1, got None"),
        ('{"schema": 2}', "with `schema` 1, got 2"),
        ('{"schema": 1, "date": "now"}', r"must have the fields of TrainingLog; missing \['data'"),
    ],
)
def test_what_is_no_log_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "training_log.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_training_log(path)


def test_lists_become_text() -> None:
    assert as_scalars({"ids": [1, 8], "none": None, "path": Path("x")}) == {
        "ids": "1, 8",
        "none": None,
        "path": "x",
    }


def test_rows_tell_where_they_are_from_or_their_name(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    assert read_data_record(rows) == {"rows": "rows.jsonl"}
    write_data_record(rows, {"thinking": "off", "rows": 3})
    assert read_data_record(rows) == {"thinking": "off", "rows": 3}


@pytest.mark.parametrize("content", ["{", '{"rows": [1]}'])
def test_a_spoilt_record_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.jsonl.about.json").write_text(content)
    with pytest.raises(ValueError, match=r"rows\.jsonl\.about\.json.*must be"):
        read_data_record(tmp_path / "rows.jsonl")
