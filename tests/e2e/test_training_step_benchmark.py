"""The benchmark of a training step runs, and its plain method has our losses and gradients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checks import check_made_with

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "training_step.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_a_tiny_pair_is_measured(tmp_path: Path) -> None:
    options = ["--rows", "2", "--row-tokens", "40", "--anchors", "6", "--steps", "3"]
    command = [sys.executable, str(BENCHMARK), "--tiny", *options, "--threads", "1"]
    command += ["--chunk", "32", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "figures.json").read_text())
    assert max(report["checks"]["plain"].values()) < 1e-5
    ours, plain = (report["methods"][name] for name in ("ours", "plain"))
    assert len(ours["losses"]) == 3
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert ours["losses"][0] != ours["losses"][1]
    assert ours["step_bytes"] > 0
    assert "tokens/s" in done.stdout
    check_made_with(report, tmp_path)
