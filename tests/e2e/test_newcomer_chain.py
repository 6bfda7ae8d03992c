"""From prompts to a page of the Hub with nothing but the command line: each step reads the last."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from hf_dflash import DFlashDraftModel
from hf_dflash.benchmark_quality import final_answer
from hf_dflash.findings import speed_sentence
from hf_dflash.measurement import Measurement, read_measurement
from hf_dflash.training_log import read_training_log
from saved_pairs import save_target

ROOT = Path(__file__).parents[2]
PROMPTS = ("yes", "Hello", "think", "the answer")
SHORT = "--max-new-tokens 24"
#: Small enough for a slow CPU, and enough to know four answers by heart.
SMALL = (
    "--block_size 4 --num_draft_layers 1 --num_taps 2 --n_anchors 32 --max_steps 60 "
    "--per_device_train_batch_size 4 --learning_rate 1e-2 --logging_steps 20 --use_cpu true"
)

pytestmark = pytest.mark.slow


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Where a newcomer works."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def hf_dflash(tmp_path: Path, work: Path) -> Callable[[str], str]:
    """Runs a command there, with nothing kept at home and no Hub; what it said."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_", "HUGGING"))}
    environment = {
        **kept,
        **{name: str(tmp_path / "home") for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME")},
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), kept.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }

    def run(words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hf_dflash.cli", *words.split()],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"hf-dflash {words}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    return run


def write_lines(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def questions_of(answers: Path) -> list[dict[str, str]]:
    """The prompts, with the number that ends the target's own answer, where there is one."""
    chats = [json.loads(line)["messages"] for line in answers.read_text("utf-8").splitlines()]
    found = [(prompt["content"], final_answer(reply["content"])) for prompt, reply in chats]
    return [{"prompt": prompt, **({"answer": n} if n else {})} for prompt, n in found]


def assert_measured(measurement: Measurement, n_judged: int) -> None:
    """The drafter learned something, and changes nothing."""
    plain, *others = measurement.summary.overall
    for method in others:
        assert method.identity.n_identical == method.identity.n_compared == len(PROMPTS)
    for method in (plain, *others):
        assert method.quality.n_correct == method.quality.n_judged == n_judged
    assert 1.5 < others[0].acceptance.micro < 4


def assert_card_tells(card: Path, measurement: Measurement) -> None:
    """Its figures are those of the file that is published with it."""
    drafted = measurement.summary.overall[1]
    assert read_measurement(card.parent / "evaluation" / "results.json") == measurement
    (row,) = re.findall(r"^\| dflash, block 4 \|.*$", card.read_text("utf-8"), re.MULTILINE)
    judged, length = drafted.quality, drafted.acceptance
    told = [f"{length.macro:.2f}", f"{length.micro:.2f}", "4/4"]
    told.append(f"{judged.n_correct}/{judged.n_judged}")
    assert [cell.strip() for cell in row.split("|")][-5:-1] == told
    data = ModelCard.load(card).data
    values = {result.metric_type: result.metric_value for result in data.eval_results}
    assert values["acceptance_length"] == pytest.approx(length.macro, abs=0.005)
    assert (data.base_model, data.license) == ("me/my-model", "apache-2.0")


def assert_same_drafter(folder: Path, other: Path) -> None:
    one, two = (DFlashDraftModel.from_pretrained(f).state_dict() for f in (folder, other))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_from_prompts_to_what_would_be_pushed(hf_dflash: Callable[[str], str], work: Path) -> None:
    save_target(work / "my-model")
    write_lines(work / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])

    said = hf_dflash(f"prepare prompts.jsonl rows.jsonl --target my-model --regenerate {SHORT}")
    assert "Answers: 4 made now" in said
    said = hf_dflash(f"train --target my-model --data rows.jsonl --output_dir my-drafter {SMALL}")
    assert "The drafter is in my-drafter." in said
    log = read_training_log(work / "my-drafter" / "training_log.json")
    assert log.data["answers"] == "the target's own, temperature 0"

    questions = questions_of(work / "rows.jsonl.answers.jsonl")
    write_lines(work / "questions.jsonl", questions)
    bench = "bench --target my-model --drafter my-drafter --dataset questions.jsonl"
    assert "dflash B4" in hf_dflash(f"{bench} {SHORT} --json results.json")
    measurement = read_measurement(work / "results.json")
    n_judged = sum("answer" in question for question in questions)
    assert n_judged
    assert_measured(measurement, n_judged)

    said = " ".join(hf_dflash("report results.json -o report.html").split())
    assert speed_sentence(measurement) in said
    page = (work / "report.html").read_text("utf-8")
    assert "<svg" in page
    assert not re.findall(r"""\s(?:src|srcset|href|action|poster)=(?!"?(?:#|data:))""", page)
    assert not re.findall(r"url\((?!#)|@import", page)

    card = "card my-drafter --bench results.json --name me/my-drafter --license apache-2.0"
    said = hf_dflash(card)
    assert "hf-dflash push my-drafter me/my-drafter" in said
    assert "write the card again with --target" in said
    hf_dflash(f"{card} --target me/my-model")
    assert_card_tells(work / "my-drafter" / "README.md", measurement)

    said = hf_dflash("doctor my-drafter --target my-model")
    assert re.search(r"hf-dflash +│ loads", said)
    assert "hf-dflash convert my-drafter OUT --to native" in " ".join(re.sub("│", "", said).split())
    hf_dflash("convert my-drafter my-drafter-native --to native")
    assert_same_drafter(work / "my-drafter", work / "my-drafter-native")

    said = hf_dflash("push my-drafter me/my-drafter --dry-run")
    sent = {*re.findall(r"^│ (\S+) +│ +[\d.]+ k?B │$", said, re.MULTILINE)}
    assert sent > {"config.json", "model.safetensors", "modeling_dflash.py", "README.md"}
    assert sent > {"training_log.json", "evaluation/results.json"}
    assert "Stays here: checkpoint-60/" in said
