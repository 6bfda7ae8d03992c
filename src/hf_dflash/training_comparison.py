"""Short training runs that differ in one thing each, written beside a drafter: what limits it.

`benchmarks/training_runs.py` writes the file; a model card tells its figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from .measurement import MadeWith, read_record

TRAINING_COMPARISON_NAME = "training_runs.json"


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run of one seed.

    Attributes:
        run: What is different in it; runs of several seeds share the name.
        seed: Of weights, order of rows and anchors.
        options: Of the training script.
        curve: Evaluations: ``step``, ``acceptance_length`` and others, in order.
        made_with: If it was recorded.
    """

    run: str
    seed: int
    options: str
    curve: list[dict[str, float]]
    made_with: MadeWith | None = None


@dataclass(frozen=True, slots=True)
class TrainingComparison(MadeWith):
    """Runs at equal steps, and what they were compared with."""

    runs: list[ComparedRun]

    def steps(self) -> list[int]:
        """Steps at which every run was evaluated."""
        evaluated = [{int(point["step"]) for point in run.curve} for run in self.runs]
        return sorted(set.intersection(*evaluated)) if evaluated else []

    def lengths(self) -> dict[str, list[list[float]]]:
        """Acceptance lengths by run: of each seed, at `steps`."""
        steps, found = self.steps(), dict[str, list[list[float]]]()
        for run in self.runs:
            at = {int(point["step"]): point["acceptance_length"] for point in run.curve}
            found.setdefault(run.run, []).append([at[step] for step in steps])
        return found


def read_training_comparison(path: Path) -> TrainingComparison:
    """Read a comparison.

    Raises:
        ValueError: The file is not one; the message says where.
        OSError: It cannot be read.
    """
    return read_record(TrainingComparison, path, "of compared training runs")


def seeds_text(values: Sequence[float]) -> str:
    """The figure of one seed; of several the mean, the lowest and the highest.

    >>> seeds_text([1.5, 1.25, 1.0])
    '1.25 (1.00-1.50)'
    """
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"
