"""docs/training.md: its commands run on a tiny target; those that need more are read, at least."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hf_dflash import DFlashDraftModel, cli
from hf_dflash.run_arguments import parse_run
from pages import ROOT, blocks, commands, text_of, to_run
from saved_pairs import save_chats, save_target

PAGE = "training.md"
#: What makes a run short; given last, so it wins.
SHORT_TRAIN = ["--use_cpu=true", "--n_anchors=4", "--per_device_train_batch_size=2"]
SHORT_TRAIN += [
    "--gradient_accumulation_steps=1",
    "--disable_tqdm=true",
    "--dataloader_pin_memory=false",
]
PEFT_WARNING = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the page's files are, under the page's names."""
    monkeypatch.chdir(tmp_path)
    save_target(tmp_path / "my-model", max_position_embeddings=4096)
    save_chats(tmp_path / "chats.jsonl")
    long = [{"prompt": "Hello " * 60 * i, "response": "yes"} for i in (1, 2)]
    save_chats(tmp_path / "long_chats.jsonl", 0, long)
    save_chats(tmp_path / "other_chats.jsonl", 3)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    words = ["prepare", "other_chats.jsonl", "held_out.jsonl", "--target", "my-model"]
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    (example,) = blocks(PAGE, "yaml")
    (tmp_path / "run.yaml").write_text(example)
    return tmp_path


def run(words: list[str], n_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] == "python":
        monkeypatch.setattr(sys, "argv", words[1:])
        runpy.run_path(words[1], run_name="__main__")
        return
    assert words[0] == "hf-dflash"
    words = words[1:]
    if words[0] == "train":
        words += [*SHORT_TRAIN, f"--max_steps={n_steps}"]
    elif "--regenerate" in words and "--max-new-tokens" not in words:
        words += ["--max-new-tokens", "16"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, (words, result.output, result.exception)


@pytest.mark.slow
@pytest.mark.filterwarnings(PEFT_WARNING)
def test_the_commands_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n_steps, words in enumerate(to_run("training.md"), start=1):
        run(words, n_steps, monkeypatch)
    outputs = [path.parent for path in place.glob("**/config.json") if "my-model" not in str(path)]
    drafters = [path for path in outputs if not path.name.startswith("checkpoint-")]
    assert len(drafters) == 9
    for folder in drafters:
        DFlashDraftModel.from_pretrained(folder)


def test_what_needs_more_machines_is_read(place: Path) -> None:
    n_read = 0
    for words in (c.words for c in commands(PAGE) if c.in_block and c.mark):
        for name in words:
            assert not name.startswith("examples/") or (place / name).is_file()
        if "train" in words:
            run_arguments, args = parse_run([*words[words.index("train") + 1 :], *SHORT_TRAIN])
            assert (run_arguments.target, args.num_train_epochs) == ("my-model", 6)
            n_read += 1
        elif words[0] == "hf-dflash":
            group: Any = typer.main.get_command(cli.app)
            group.commands[words[1]].make_context(words[1], words[2:])
            n_read += 1
    assert n_read == 6


def test_every_name_in_the_logs_is_told() -> None:
    table = text_of(PAGE).partition("## 7.")[2].partition("## 8.")[0]
    for name in ("loss", "rows_without_block", "eval_accuracy_k", "eval_n_blocks"):
        assert f"`{name}`" in table
    for name in ("acceptance_length", "accepted", "speedup", "mismatches"):
        assert f"`eval_decoding_{name}`" in table
