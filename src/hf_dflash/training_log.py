"""How a drafter was trained, written beside it: what a model card tells of the training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .measurement import read_record, write_whole

TRAINING_LOG_NAME = "training_log.json"
SCHEMA = 1
Scalar = str | int | float | bool | None
_TIMES = ("_runtime", "_per_second")


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """A finished or interrupted run of `DFlashTrainer`.

    Attributes:
        target: Name of the target.
        date: ISO 8601, when it was written.
        versions: Of the packages.
        device: That trained.
        n_processes: That trained.
        n_steps: Updates made.
        settings: What decides a step, as in a checkpoint's `dflash_run.json`, and the optimiser's.
        data: Where the training data are from, in the words of who trained; may be empty.
        log: What the trainer logged, in order.
    """

    target: str | None
    date: str
    versions: dict[str, str]
    device: str
    n_processes: int
    n_steps: int
    settings: dict[str, Scalar]
    data: dict[str, Scalar]
    log: list[dict[str, Scalar]]

    def last_evaluation(self) -> dict[str, float]:
        """Figures of the last evaluated step, its times aside; empty without an evaluation."""
        evaluations = [entry for entry in self.log if any(k.startswith("eval_") for k in entry)]
        last_step = evaluations[-1].get("step") if evaluations else None
        return {
            key: float(value)
            for entry in evaluations
            if entry.get("step") == last_step
            for key, value in entry.items()
            if key.startswith("eval_") and isinstance(value, float) and not key.endswith(_TIMES)
        }


def write_training_log(log: TrainingLog, folder: Path) -> None:
    """Write the log into a drafter's folder, whole or not at all."""
    document = {"schema": SCHEMA, **asdict(log)}
    write_whole(folder / TRAINING_LOG_NAME, json.dumps(document, indent=1) + "\n")


def read_training_log(path: Path) -> TrainingLog:
    """Read a training log.

    Raises:
        ValueError: The file is not one; the message says where.
        OSError: It cannot be read.
    """
    return read_record(TrainingLog, path, "written by DFlashTrainer", schema=SCHEMA)


def write_data_record(rows: Path, record: Mapping[str, Any]) -> None:
    """Say beside prepared rows where they are from; a training run puts it into its log."""
    write_whole(_data_record(rows), json.dumps(as_scalars(record), indent=1) + "\n")


def read_data_record(rows: Path) -> dict[str, Scalar]:
    """What `write_data_record` has said about rows; of others, their name.

    Raises:
        ValueError: The record was spoilt.
    """
    path = _data_record(rows)
    if not path.is_file():
        return {"rows": rows.name}
    told = "that `hf-dflash prepare` wrote beside the rows (prepare them again, or delete it)"
    return read_record(dict[str, Scalar], path, told)


def _data_record(rows: Path) -> Path:
    return rows.with_name(f"{rows.name}.about.json")


def as_scalars(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Values as a log holds them: simple ones, and lists of them as text.

    >>> as_scalars({"block_size": 16, "target_layer_ids": [1, 8]})
    {'block_size': 16, 'target_layer_ids': '1, 8'}
    """
    return {
        name: value
        if value is None or isinstance(value, str | int | float | bool)
        else _text(value)
        for name, value in values.items()
    }


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
