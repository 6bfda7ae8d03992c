from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import training_runs
from checks import check_made_with
from hf_dflash.training_comparison import (
    TRAINING_COMPARISON_NAME,
    read_training_comparison,
    seeds_text,
)

HISTORY = [
    {"step": 1, "loss": 9.0},
    {"step": 2, "eval_acceptance_length": 1.5, "eval_accuracy_1": 0.4, "eval_loss": 5.0},
    {"step": 4, "eval_acceptance_length": 2.0, "eval_accuracy_1": 0.6, "eval_loss": 4.0},
]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands instead of runs; each leaves the state of a trainer."""
    commands: list[list[str]] = []

    run = subprocess.run

    def pretend(command: list[str], *, check: bool, **options: Any) -> Any:
        assert check
        if command[0] == "git":
            return run(command, check=check, **options)
        commands.append(command)
        steps = command[command.index("--max-steps") + 1]
        folder = Path(command[2]) / f"checkpoint-{steps}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": HISTORY}))
        return None

    monkeypatch.setattr(subprocess, "run", pretend)
    return commands


def main(monkeypatch: pytest.MonkeyPatch, *options: Any) -> None:
    monkeypatch.setattr("sys.argv", ["training_runs.py", *map(str, options)])
    training_runs.main()


def test_variants_differ_in_what_they_say_only(
    started: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = tmp_path / "runs.json"
    names = ["dflash", "random start", "2 layers"]
    runs = ["--runs", *names, "--seeds", 0, 1, "--steps", 4]
    main(monkeypatch, tmp_path / "work", *runs, "--json", result)
    document = json.loads(result.read_text())
    check_made_with(document, tmp_path)
    written = document["runs"]
    for run in written:
        check_made_with(run["made_with"], tmp_path)
    assert [(run["run"], run["seed"]) for run in written] == [
        (name, seed) for seed in (0, 1) for name in names
    ]
    assert [point["acceptance_length"] for point in written[0]["curve"]] == [1.5, 2.0]
    options = [run["options"].split() for run in written[:3]]
    assert options[0] == [*options[1], "--from-target"]
    assert options[2] == [*options[0], "--layers", "2"]
    assert "dflash                     2.000 (2.000..2.000, 2 seeds)" in capsys.readouterr().out
    first = written[0]["made_with"]
    monkeypatch.setattr(training_runs, "made_with", lambda _: {**document, "commit": "other code"})
    main(monkeypatch, tmp_path / "work", *runs, "--json", result)
    assert len(started) == 6  # what is there is not repeated
    again = json.loads(result.read_text())
    assert (again["commit"], again["runs"][0]["made_with"]) == ("other code", first)


def test_a_variant_is_a_call_the_example_understands(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(monkeypatch, tmp_path, "--steps", 4)
    help_text = training_runs.SCRIPT.read_text(encoding="utf-8")
    flags = {word for command in started for word in command if word.startswith("--")}
    assert len(started) == len(training_runs.VARIANTS)
    assert all(f'"{flag}"' in help_text for flag in flags)


CARDS = training_runs.SCRIPT.parents[1] / "model_cards"
#: Rows of the table in docs/training.md, in its order.
ROWS = {
    "three layers, from the target's own, 4581 answers": "dflash",
    "1200 answers": "1200 answers",
    "300 answers": "300 answers",
    "two layers": "2 layers",
    "five layers": "5 layers",
    "new weights": "random start",
    "DFlare": "dflare",
}


def test_the_table_of_the_page_is_what_was_measured() -> None:
    page = CARDS.parent / "docs" / "training.md"
    section = page.read_text("utf-8").split("## 9.")[1]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    table = {name.strip(): cells for name, *cells in (line.strip("|").split("|") for line in lines)}
    found = {}
    for architecture in ("dflash", "dflare"):
        folder = CARDS / f"smollm2-135m-instruct-{architecture}"
        comparison = read_training_comparison(folder / TRAINING_COMPARISON_NAME)
        assert comparison.steps() == [200, 400, 600]
        found |= comparison.lengths()
    assert list(table) == list(ROWS)
    for name, run in ROWS.items():
        at_steps = zip(*found[run], strict=True)
        assert [c.strip() for c in table[name]] == [seeds_text(lengths) for lengths in at_steps]
