"""What docs/training.md says of other trainers is no stronger than what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {"plain": "the plain one", "specforge": "SpecForge", "speculators": "speculators"}


@pytest.fixture(scope="module")
def over_ours() -> Any:
    path = ROOT / "benchmarks" / "results" / "training_step.json"
    return json.loads(path.read_text("utf-8"))["over_ours"]


@pytest.fixture(scope="module")
def paragraph() -> str:
    page = (ROOT / "docs" / "training.md").read_text("utf-8")
    return page.split("**Beside others.**")[1].split("\n\n")[0]


def test_the_quartiles_of_every_trainer_are_told(over_ours: Any, paragraph: str) -> None:
    assert over_ours.keys() == NAMES.keys()
    told = re.findall(r"(\d\.\d\d) to (\d\.\d\d) for ([\w ]+)", paragraph)
    assert {name: (low, high) for low, high, name in told} == {
        NAMES[key]: (f"{time['lower_quartile']:.2f}", f"{time['upper_quartile']:.2f}")
        for key, time in ((key, over["time"]) for key, over in over_ours.items())
    }


def test_no_time_is_said_to_be_saved_that_may_not_be(over_ours: Any, paragraph: str) -> None:
    unsure = {key for key, over in over_ours.items() if over["time"]["lower_quartile"] <= 1}
    told = f"So against {NAMES['plain']} only the memory is saved for certain"
    assert (told in paragraph) == (unsure == {"plain"})
    assert unsure <= {"plain"}


def test_every_other_trainer_takes_more_memory(over_ours: Any) -> None:
    assert all(over["memory"] > 1 for over in over_ours.values())
