"""docs/publishing.md: its commands run, but for those that are marked as needing the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_dflash import cli
from hf_dflash.measurement import DrafterInfo, write_measurement
from hf_dflash.provenance import sha256_of_weights
from measurements import measurement, provenance
from pages import blocks, to_run
from pairs import random_drafter, tiny_target

PAGE = "publishing.md"


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
    lines = to_run("publishing.md")
    assert len(lines) == 3
    for program, *arguments in lines:
        result = CliRunner().invoke(cli.app, arguments)
        assert (program, result.exit_code) == ("hf-dflash", 0), result.output
    assert (place / "report.html").is_file()
    assert (place / "my-drafter" / "README.md").is_file()


def test_the_python_of_the_page_runs(place: Path) -> None:
    measured, published = blocks(PAGE, "python")
    exec(measured, {})
    assert (place / "pictures" / "speedup.png").is_file()
    for line in published.splitlines():
        assert "push" not in line or "needs the Hub" in line or "import" in line
    compile(published, "published", "exec")
