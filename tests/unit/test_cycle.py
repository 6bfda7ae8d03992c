"""The benchmark of a cycle runs on a random pair and says how it was made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import cycle
from checks import check_made_with


def test_every_method_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "cycle.json"
    options = ["--tiny", "--vocab-size", "64", "--dtype", "float32"]
    options += ["--rounds", "1", "--max-new-tokens", "8", "--json", str(result)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/cycle.py", *options])
    cycle.main()
    report = json.loads(result.read_text(encoding="utf-8"))
    check_made_with(report, tmp_path)
    [figures] = report["results"]
    assert [*figures["methods"]] == ["plain", "stock", "ours"]
    assert all(method["tokens_per_s"] > 0 for method in figures["methods"].values())
