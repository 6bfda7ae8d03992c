"""docs/publishing.md: its commands run, but for those that are marked as needing the Hub."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_dflash import cli
from hf_dflash.measurement import DrafterInfo, write_measurement
from hf_dflash.provenance import sha256_of_weights
from measurements import measurement, provenance
from pairs import random_drafter, tiny_target

DOCS = (Path(__file__).parents[2] / "docs" / "publishing.md").read_text(encoding="utf-8")
NOT_RUN = ("needs the Hub", "minutes")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCS, re.DOTALL | re.MULTILINE)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a drafter and a measurement of it, as the page supposes."""
    random_drafter(tiny_target()).save_pretrained(tmp_path / "my-drafter")
    sha256 = sha256_of_weights(str(tmp_path / "my-drafter"))
    of_this = provenance(drafter=DrafterInfo("my-drafter", sha256, "dflash", 8, 2, 1000))
    write_measurement(measurement(provenance=of_this), tmp_path / "results.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_of_the_page_run_one_after_the_other(place: Path) -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) == 5
    for line in lines:
        command, _, comment = line.partition("#")
        program, *arguments = shlex.split(command)
        assert program == "hf-dflash"
        if any(words in comment for words in NOT_RUN):
            continue
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 0, result.output
    assert (place / "report.html").is_file()
    assert (place / "my-drafter" / "README.md").is_file()


def test_every_option_of_the_page_exists() -> None:
    options = set(re.findall(r"(?<!-)--[a-z][a-z-]+", DOCS))
    texts = [
        CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "200"}).output
        for command in ("bench", "report", "card", "push")
    ]
    assert {option for option in options if not any(option in text for text in texts)} == set()


def test_the_python_of_the_page_runs(place: Path) -> None:
    measured, published = blocks("python")
    exec(measured, {})
    assert (place / "pictures" / "speedup.png").is_file()
    for line in published.splitlines():
        assert "push" not in line or "needs the Hub" in line or "import" in line
    compile(published, "published", "exec")
