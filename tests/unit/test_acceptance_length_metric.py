"""The metric for `evaluate` says what the package says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dflash.measurement_summary import acceptance
from hf_dflash.metrics import acceptance_metrics
from measurements import run

evaluate = pytest.importorskip("evaluate")
FOLDER = Path(__file__).parents[2] / "metrics" / "acceptance_length"
BLOCK_DRAFTS = 7


@pytest.fixture
def metric(tmp_path: Path) -> Any:
    # Its cache and the copy of the code that `evaluate` imports.
    return evaluate.load(str(FOLDER), cache_dir=str(tmp_path))


def outputs(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    rng = random.Random(seed)
    drafted = [[rng.randint(0, BLOCK_DRAFTS) for _ in range(rng.randint(1, 9))] for _ in range(5)]
    return [[rng.randint(0, n) for n in cycles] for cycles in drafted], drafted


@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_the_benchmark(metric: Any, seed: int) -> None:
    accepted, drafted = outputs(seed)
    found = metric.compute(predictions=accepted, references=drafted)
    ours = acceptance(
        [run(n_accepted=a, n_drafted=d) for a, d in zip(accepted, drafted, strict=True)]
    )
    assert found["acceptance_length"] == pytest.approx(ours.macro)
    assert found["acceptance_length_micro"] == pytest.approx(ours.micro)
    assert found["histogram"] == ours.histogram
    assert found["accepted_by_slot"] == pytest.approx(ours.by_slot)
    assert found["n_cycles"] == ours.n_cycles


def test_it_agrees_with_the_trainers_evaluation(metric: Any) -> None:
    """Whole blocks: the expected length of the trainer is the mean over them."""
    right = torch.randint(0, 2, (40, BLOCK_DRAFTS), generator=torch.Generator().manual_seed(0))
    accepted = right.cumprod(dim=1).sum(dim=1).tolist()
    found = metric.compute(predictions=[accepted], references=[[BLOCK_DRAFTS] * 40])
    expected = acceptance_metrics(right)["acceptance_length"]
    assert found["acceptance_length_micro"] == pytest.approx(expected)


def test_outputs_come_in_batches_and_may_have_no_cycle(metric: Any) -> None:
    metric.add_batch(predictions=[[3, 1], []], references=[[3, 3], []])
    metric.add(prediction=[0], reference=[3])
    found = metric.compute()
    assert found["acceptance_length"] == pytest.approx(2.0)
    assert found["accepted"] == pytest.approx(4 / 9)
    assert found["n_outputs"] == 2


def test_no_cycle_at_all_is_an_error(metric: Any) -> None:
    with pytest.raises(ValueError, match="`predictions` must hold at least one cycle"):
        metric.compute(predictions=[[], []], references=[[], []])


@pytest.mark.parametrize("drafted", [[[3]], [[3, 0]]])
def test_drafts_that_do_not_fit_are_refused(metric: Any, drafted: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"`references` must hold the drafts .*for \[3, 1\]"):
        metric.compute(predictions=[[3, 1]], references=drafted)


def test_the_folder_is_one_of_the_hub() -> None:
    front = (FOLDER / "README.md").read_text().split("---")[1]
    assert "sdk: gradio" in front
    assert "- evaluate" in front
    assert {p.name for p in FOLDER.iterdir() if p.is_file()} == {
        "README.md",
        "acceptance_length.py",
        "app.py",
        "requirements.txt",
    }
