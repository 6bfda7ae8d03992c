from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_dflash.exporting import _ARGUMENTS, write_run_log
from hf_dflash.training_log import read_training_log
from pairs import tiny_target


def test_the_log_of_a_run_names_no_place_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    monkeypatch.chdir(tmp_path)
    target = tiny_target()
    target.config._name_or_path = str(tmp_path / "models" / "target")
    trainer = SimpleNamespace(
        args=SimpleNamespace(**dict.fromkeys(_ARGUMENTS), device=torch.device("cpu"), world_size=1),
        target=target,
        state=SimpleNamespace(global_step=3, log_history=[{"loss": 1.0, "step": 3}]),
        data_record={"rows": str(tmp_path / "rows.jsonl"), "answers": "the target's own / greedy"},
    )
    written = tmp_path / "run"
    written.mkdir()
    settings = {"taps": str(tmp_path / "home" / "me" / "taps"), "teacher": "/srv/x/teacher"}
    write_run_log(trainer, settings, written)
    log = read_training_log(written / "training_log.json")
    assert log.target == "target"
    assert log.data == {"rows": "rows.jsonl", "answers": "the target's own / greedy"}
    assert (log.settings["taps"], log.settings["teacher"]) == ("~/taps", "teacher")
    text = (written / "training_log.json").read_text()
    assert str(tmp_path) not in text
