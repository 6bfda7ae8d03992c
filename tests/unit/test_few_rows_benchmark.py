"""The benchmark of few rows runs on any target and writes what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from checks import check_made_with
from hf_dflash.few_rows import FEW_ROWS
from pairs import tiny_target

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "few_rows.py"


def test_every_number_of_rows_is_timed_both_ways(tmp_path):
    tiny_target().save_pretrained(tmp_path / "target")
    result = tmp_path / "few_rows.json"
    command = [sys.executable, SCRIPT, "--target", tmp_path / "target", "--rows", "1", "4"]
    options = ["--rounds", "3", "--prompt-tokens", "9", "--json", result]
    subprocess.run([str(word) for word in (*command, *options)], check=True)
    report = json.loads(result.read_text(encoding="utf-8"))
    assert [figures["rows"] for figures in report["rows"]] == [1, 4]
    for figures in report["rows"]:
        assert min(figures["torch_ms"], figures["ours_ms"], figures["speed_up"]) > 0
    check_made_with(report, tmp_path)
    assert set(report["other_way"]) <= set(FEW_ROWS)
