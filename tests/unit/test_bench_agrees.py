"""The comparison with a stopwatch: what it compares, and when it fails."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import bench_agrees
from bench_pairs import saved_models
from measurements import measurement, pair_of_runs


def document(*speedups: float) -> dict[str, Any]:
    runs = [
        run
        for i, of_prompt in enumerate([speedups, [2.0]])
        for repeat, speedup in enumerate(of_prompt)
        for run in pair_of_runs(speedup, prompt_index=i, repeat=repeat)
    ]
    runs += pair_of_runs(99.0, turn=1)  # later turns are not timed by hand
    return json.loads(json.dumps(asdict(measurement(runs))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("by_hand", "status"), [(2.0, 0), (2.09, 0), (1.85, 1), (2.2, 1)])
def test_it_fails_where_the_speedups_differ(
    capsys: pytest.CaptureFixture[str], by_hand: float, status: int
) -> None:
    assert bench_agrees.judge(document(1.0, 2.0, 9.0), by_hand, 15.0 / 4.0 * 14 / 15) == status
    said = capsys.readouterr().out
    assert f"median over prompts: bench 2.000, by hand {by_hand:.3f}" in said
    assert "all seconds: bench 3.500, by hand 3.500, difference 0.0%" in said


def test_it_times_every_prompt_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = saved_models(tmp_path)
    result = tmp_path / "b.json"
    result.write_text(json.dumps(document(2.0)))
    calls: list[bool] = []

    def seconds(_target: Any, _inputs: Any, assistant: Any, _n: int) -> float:
        calls.append(assistant is not None)
        return 1.0 if assistant is not None else 2.0

    monkeypatch.setattr(bench_agrees, "seconds", seconds)
    options = ["--target", pair["target"], "--drafter", pair["drafter"], "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["bench_agrees.py", str(result), *options])
    assert bench_agrees.main() == 0
    assert calls[:2] == [False, True], "warmed up"
    assert calls[2:6] in ([False, True, True, False], [True, False, False, True])
    assert len(calls) == 2 + 3 * 4
    assert "difference 0.0%" in capsys.readouterr().out
