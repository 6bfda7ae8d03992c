"""A card tells short training runs that were compared, from the file beside it."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_dflash.card_blocks import blocks_of
from hf_dflash.hub import folder_contents
from hf_dflash.model_card import check_card, write_card
from hf_dflash.training_comparison import TRAINING_COMPARISON_NAME, read_training_comparison
from pairs import random_drafter, tiny_target


def run(name: str, seed: int, *lengths: float, steps: tuple[int, ...] = (20, 40)) -> dict[str, Any]:
    points = zip(steps, lengths, strict=True)
    curve = [{"step": step, "acceptance_length": length, "loss": 2.0} for step, length in points]
    return {"run": name, "seed": seed, "options": "--seed", "curve": curve, "made_with": None}


MADE_WITH = {
    "command": "python runs.py WORK",
    "commit": None,
    "date": "2026-01-02T03:04:05+00:00",
    "versions": {"torch": "2.13.0"},
    "device": "cpu: some",
    "threads": 1,
}
COMPARISON: dict[str, Any] = {
    **MADE_WITH,
    "runs": [
        run("one", 0, 1.25, 1.5),
        run("other", 0, 1.125, 1.75) | {"made_with": MADE_WITH},
        run("one", 1, 1.75, 2.0),
        run("third", 0, 1.5, 1.625, 1.875, steps=(10, 20, 40)),
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_drafter(tiny_target()).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def put(folder: Path, document: Any) -> Path:
    path = folder / TRAINING_COMPARISON_NAME
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_runs_are_compared_at_the_steps_that_all_have(tmp_path: Path) -> None:
    comparison = read_training_comparison(put(tmp_path, COMPARISON))
    assert comparison.steps() == [20, 40]
    assert comparison.lengths() == {
        "one": [[1.25, 1.5], [1.75, 2.0]],
        "other": [[1.125, 1.75]],
        "third": [[1.625, 1.875]],
    }


def test_a_card_tells_the_mean_and_the_range_of_seeds(folder: Path) -> None:
    put(folder, COMPARISON)
    write_card(folder)
    card = (folder / "README.md").read_text(encoding="utf-8")
    [block] = blocks_of(card)
    assert (block.kind, block.source) == ("compared", TRAINING_COMPARISON_NAME)
    assert "| one | 2 | 1.50 (1.25-1.75) | 1.75 (1.50-2.00) |" in block.text
    assert "| third | 1 | 1.62 | 1.88 |" in block.text
    assert "How it was trained is not recorded" not in card
    check_card(folder)


def test_a_card_of_other_runs_is_found(folder: Path) -> None:
    put(folder, COMPARISON)
    write_card(folder)
    put(folder, COMPARISON | {"runs": [run("one", 0, 1.0, 1.0)]})
    with pytest.raises(ValueError, match="says something else than training_runs"):
        check_card(folder)


def test_the_runs_are_pushed(folder: Path) -> None:
    put(folder, COMPARISON)
    write_card(folder)
    assert TRAINING_COMPARISON_NAME in [file.name for file in folder_contents(folder).files]


@pytest.mark.parametrize("text", ["{", '{"runs": []}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / TRAINING_COMPARISON_NAME
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=TRAINING_COMPARISON_NAME):
        read_training_comparison(path)
