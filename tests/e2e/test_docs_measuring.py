"""Every command of docs/measuring.md that needs neither a GPU nor the Hub is run, made short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_dflash import benchmark_command, cli
from hf_dflash.benchmark_command import BenchOptions
from hf_dflash.benchmark_data import HELD_OUT, SOURCES
from hf_dflash.measurement import read_measurement
from pages import ROOT, blocks, commands, text_of, to_run

PAGE = "measuring.md"
BENCH = [c.words for c in commands(PAGE) if c.in_block and "bench" in c.words]
SHORT = ["--n-prompts", "1", "--max-new-tokens", "8"]


def arguments(command: list[str]) -> list[str]:
    return command[command.index("bench") :]


@pytest.mark.parametrize("command", BENCH, ids=lambda command: command[0] + command[-1])
def test_options_are_those_of_the_command(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[BenchOptions] = []
    monkeypatch.setattr(benchmark_command, "run_bench", lambda options: asked.append(options) or 0)
    shown = CliRunner().invoke(cli.app, arguments(command))
    assert shown.exit_code == 0, shown.output
    assert {*asked[0].datasets} <= {*SOURCES, HELD_OUT}


def test_every_data_set_is_listed() -> None:
    assert all(f"`{name}`" in text_of(PAGE) for name in (*SOURCES, HELD_OUT))


@pytest.mark.slow
def test_the_offline_commands_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bench, agrees = to_run("measuring.md")
    made = CliRunner().invoke(cli.app, [*arguments(bench), *SHORT])
    assert made.exit_code == 0, made.output
    measurement = read_measurement(tmp_path / "bench.json")
    assert [*measurement.prompts] == ["held-out", "gsm8k-pypi", "humaneval-pypi"]
    script = str(ROOT / agrees[1])
    run = [sys.executable, script, *agrees[2:], "--repeats", "1"]
    # Whether they agree is a question for a quiet machine: here only that it compares.
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert "median over prompts: bench" in result.stdout, result.stderr


def test_the_metric_example_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("evaluate")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (code,) = blocks(PAGE, "python")
    monkeypatch.chdir(ROOT)
    scope: dict[str, object] = {}
    exec(code, scope)
    assert scope["found"]["acceptance_length"] == 2.0  # type: ignore[index]
