from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hf_dflash.chats import read_chats

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "smollm2_prompts.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    subprocess.run([sys.executable, str(SCRIPT), str(path)], check=True)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_mix(made):
    module = runpy.run_path(str(SCRIPT))
    counts = Counter((prompt["kind"], prompt["split"]) for prompt in made)
    for kind, (_, first, second) in module["KINDS"].items():
        assert counts[kind, "held_out"] == 5
        if kind not in module["OPEN_KINDS"]:
            assert counts[kind, "train"] == first + second
    n_open = sum(counts[kind, "train"] for kind in module["OPEN_KINDS"])
    assert 0.2 < n_open / sum(n for (_, split), n in counts.items() if split == "train") < 0.3
    assert len({prompt["id"] for prompt in made}) == len(made) >= 6600
    assert len({prompt["prompt"] for prompt in made}) == len(made)


def test_held_out_fillers_are_never_trained_on(made):
    fillers = {"train": set(), "held_out": set()}
    for prompt in made:
        fillers[prompt["split"]].add(prompt["filler"])
    assert not fillers["train"] & fillers["held_out"]


def test_any_first_part_is_a_fair_sample_of_the_structured_kinds(made):
    module = runpy.run_path(str(SCRIPT))
    open_kinds, n_second = (
        module["OPEN_KINDS"],
        sum(second for *_, second in module["KINDS"].values()),
    )
    first = [p for p in made[:-n_second] if p["split"] == "train"]
    train = [p["kind"] for p in first if p["kind"] not in open_kinds]
    whole, part = Counter(train), Counter(train[:600])
    for kind, count in whole.items():
        expected = count * 600 / len(train)
        assert 0.5 * expected < part[kind] < 1.6 * expected


def test_no_prompt_of_a_benchmark_is_trained_on(made):
    def words(text):
        return frozenset(re.findall(r"\w+", text.casefold()))

    files = sorted((ROOT / "benchmarks").glob("prompts*.jsonl"))
    assert files
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    asked = {words(json.loads(line)["prompt"]) for line in lines}
    near = [
        (prompt["prompt"], sorted(other))
        for prompt in made
        for other in asked
        if len(words(prompt["prompt"]) & other) >= 0.8 * len(words(prompt["prompt"]) | other)
    ]
    assert near == []


@pytest.mark.parametrize(("name", "split"), [("answers", "train"), ("held_out", "held_out")])
def test_the_shipped_answers_are_to_prompts_of_one_split(made, name, split):
    trained = {prompt["prompt"]: prompt for prompt in made if prompt["split"] == split}
    answered = list(read_chats(ROOT / "examples" / "data" / f"smollm2_{name}.jsonl.gz"))
    asked = [chat.messages[0]["content"] for chat in answered]
    assert len(set(asked)) == len(asked) > 0
    for chat, question in zip(answered, asked, strict=True):
        assert [message["role"] for message in chat.messages] == ["user", "assistant"]
        assert chat.labels == {
            name: trained[question][name] for name in ("kind", "filler", "split")
        }
        n_answer = len(chat.answer_ids)
        assert n_answer <= 192
        assert chat.finished == (chat.answer_ids[-1] == 2)  # <|im_end|>
        assert chat.finished or n_answer == 192


def test_splits_can_be_written_alone(tmp_path):
    path = tmp_path / "held_out.jsonl"
    subprocess.run([sys.executable, str(SCRIPT), str(path), "--split", "held_out"], check=True)
    kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {prompt["split"] for prompt in kept} == {"held_out"}


def test_the_trained_prompts_to_compare_with_were_answered(made):
    lines = (ROOT / "benchmarks" / "trained_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    answers = ROOT / "examples" / "data" / "smollm2_answers.jsonl.gz"
    answered = {chat.messages[0]["content"] for chat in read_chats(answers)}
    assert {row["prompt"] for row in rows} <= answered
    assert len({row["prompt"] for row in rows}) == len(rows)
    of_kind = {prompt["prompt"]: prompt["kind"] for prompt in made if prompt["split"] == "train"}
    assert all(of_kind[row["prompt"]] == row["kind"] for row in rows)
    held_out = Counter(prompt["kind"] for prompt in made if prompt["split"] == "held_out")
    assert Counter(row["kind"] for row in rows) == held_out
