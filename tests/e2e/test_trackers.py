"""`report_to`: what a tracker is handed, read back with the tracker's own reader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers.integrations.integration_utils import rewrite_logs

from hf_dflash.callbacks import DecodingCallback, prompts_of
from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from pages import text_of
from training_pairs import BLOCK, generated_rows, row_of, training_drafter, training_target


def documented_names() -> set[str]:
    """Those of the page's table of the log, with the slots of this block."""
    table = text_of("training.md").partition("## 7.")[2].partition("## 8.")[0]
    names = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    assert len(names) > 8
    slots = {f"eval_accuracy_{k}" for k in range(1, BLOCK)}
    return names - {"eval_accuracy_k"} | slots


def trained(folder: Path) -> DFlashTrainer:
    """Four steps with an evaluation after every other one, which decodes."""
    target = training_target()
    rows = generated_rows(target, 6, n_new=12)
    args = DFlashTrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        n_anchors=4,
        save_strategy="no",
        report_to=["tensorboard"],
        use_cpu=True,
        disable_tqdm=True,
    )
    silent = row_of([5, 6, 7], n_prompt=3)
    trainer = DFlashTrainer(training_drafter(target), target, args, [*rows, silent], rows[:2])
    trainer.add_callback(DecodingCallback(trainer, prompts_of(rows, 2), max_new_tokens=8))
    trainer.train()
    return trainer


def test_tensorboard_holds_every_documented_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = trained(tmp_path)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    tags = set(events.Tags()["scalars"])
    logged: dict[tuple[str, int], float] = {}
    for entry in trainer.state.log_history:
        figures = {name: value for name, value in entry.items() if name not in ("step", "epoch")}
        for tag, value in rewrite_logs(figures).items():
            logged[tag, int(entry["step"])] = value
    assert set(rewrite_logs(dict.fromkeys(documented_names(), 0.0))) <= tags
    assert {"train/loss", "train/learning_rate", "eval/accuracy_3"} <= tags
    assert {step for tag, step in logged if tag == "train/loss"} == {1, 2, 3, 4}
    assert {step for tag, step in logged if tag == "eval/decoding_acceptance_length"} == {2, 4}
    for (tag, step), value in logged.items():
        [kept] = [event.value for event in events.Scalars(tag) if event.step == step]
        assert kept == pytest.approx(value, rel=1e-6), tag
