"""Every record that this repository publishes is read, and would be written as it stands."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from hf_dflash.measurement import MadeWith, Provenance, from_plain, read_measurement
from hf_dflash.training_comparison import TrainingComparison, read_training_comparison
from hf_dflash.training_log import read_training_log

ROOT = Path(__file__).parents[2]
CARDS = ROOT / "model_cards"
FIELDS = [field.name for field in fields(MadeWith)]


def found(pattern: str) -> list[Any]:
    paths = sorted(CARDS.glob(pattern))
    assert paths
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def document_of(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", found("*/evaluation/*.json"))
def test_a_measurement_is_read_with_what_later_files_have_besides(path: Path) -> None:
    document, read = document_of(path), asdict(read_measurement(path))
    for part, kept in (("provenance", document["provenance"]), ("settings", document["settings"])):
        assert {name: read[part][name] for name in kept} == kept
    assert list(document["provenance"])[: len(FIELDS)] == FIELDS
    assert read["runs"][0]["token_ids"] == document["runs"][0]["token_ids"]


@pytest.mark.parametrize("path", found("*/training_log.json"))
def test_a_training_log_is_read_whole(path: Path) -> None:
    document = document_of(path)
    assert {"schema": 1, **asdict(read_training_log(path))} == document


@pytest.mark.parametrize("path", found("*/training_runs.json"))
def test_a_comparison_of_training_runs_is_read_whole(path: Path) -> None:
    document = document_of(path)
    read = asdict(read_training_comparison(path))
    assert (read, list(read)) == (document, list(document))


def test_results_of_benchmarks_say_what_they_were_made_with() -> None:
    """All of it since the record is what it is; older ones say less, by the same names."""
    whole = 0
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        document = document_of(path)
        told = {name: document[name] for name in FIELDS if name in document}
        assert told or "provenance" in document, path
        if len(told) == len(FIELDS):
            assert asdict(from_plain(MadeWith, told, str(path))) == told
            whole += 1
    assert whole


@pytest.mark.parametrize("record", [Provenance, TrainingComparison])
def test_there_is_one_record_of_code_and_machine(record: type[MadeWith]) -> None:
    assert issubclass(record, MadeWith)
    assert [field.name for field in fields(record)][: len(FIELDS)] == FIELDS
    assert FIELDS == ["command", "commit", "date", "versions", "device", "threads"]
