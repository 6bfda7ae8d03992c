"""The comparison with a stopwatch: what it compares, and when it fails."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bench_agrees
from bench_pairs import saved_models
from chat_tokenizers import DROPS_REASONING, byte_tokenizer, with_template
from checks import check_made_with
from hf_dflash import cli
from hf_dflash.measurement import Seconds
from measurements import measurement, pair_of_runs

OPTION = "enable_thinking"


def document(*speedups: float) -> dict[str, Any]:
    runs = [
        run
        for i, of_prompt in enumerate([speedups, [2.0]])
        for repeat, speedup in enumerate(of_prompt)
        for run in pair_of_runs(speedup, prompt_index=i, repeat=repeat)
    ]
    runs += pair_of_runs(99.0, turn=1)  # later turns are not timed by hand
    return json.loads(json.dumps(asdict(measurement(runs))))  # type: ignore[no-any-return]


def compared(by_hand: float) -> dict[str, Any]:
    found: dict[str, Any] = bench_agrees.judge(document(1.0, 2.0, 9.0), 8, by_hand, 3.5)
    return found


@pytest.mark.parametrize(
    ("by_hand", "agrees"), [(2.0, True), (2.09, True), (1.85, False), (2.2, False)]
)
def test_it_fails_where_the_speedups_differ(
    capsys: pytest.CaptureFixture[str], by_hand: float, agrees: bool
) -> None:
    found = compared(by_hand)
    assert found["agrees"] is agrees
    assert found["median over prompts"]["bench"] == pytest.approx(2.0)
    assert found["median over prompts"]["difference"] == pytest.approx(abs(2.0 / by_hand - 1))
    said = capsys.readouterr().out
    assert f"block 8, median over prompts: bench 2.000, by hand {by_hand:.3f}" in said
    assert "block 8, all seconds: bench 3.500, by hand 3.500, difference 0.0%" in said


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Options that name a pair on disk."""
    folders = saved_models(tmp_path)
    return ["--target", folders["target"], "--drafter", folders["drafter"]]


def agrees(monkeypatch: pytest.MonkeyPatch, *options: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_agrees.py", *map(str, options)])
    return bench_agrees.main()


def test_it_times_every_prompt_both_ways(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pair: list[str],
) -> None:
    result = tmp_path / "b.json"
    result.write_text(json.dumps(document(2.0)))
    calls: list[tuple[bool, int]] = []

    def seconds(_target: Any, _inputs: Any, assistant: Any, n: int) -> float:
        calls.append((assistant is not None, n))
        return 1.0 if assistant is not None else 2.0

    monkeypatch.setattr(bench_agrees, "seconds", seconds)
    assert agrees(monkeypatch, result, *pair, "--repeats", "2") == 0
    assert sorted(calls[:2]) == [(False, 16), (True, 16)], "warmed up"
    drafted = [is_drafted for is_drafted, n in calls if n == 12]
    assert drafted[:4] in ([False, True, True, False], [True, False, False, True])
    assert len(drafted) == len(calls) - 2 == 3 * 4
    assert "difference 0.0%" in capsys.readouterr().out


def test_prompts_are_encoded_as_the_benchmark_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: list[str]
) -> None:
    with_template(byte_tokenizer(), DROPS_REASONING).save_pretrained(pair[1])
    data, result = tmp_path / "d.jsonl", tmp_path / "b.json"
    rows = [{"prompt": "Hello"}, {"prompt": "yes", "chat_template_kwargs": {OPTION: True}}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = ["--dataset", str(data), "--json", str(result), "--max-new-tokens", "4", *pair]
    made = CliRunner().invoke(cli.app, ["bench", *wanted, "--template-option", f"{OPTION}=false"])
    assert made.exit_code == 0, made.output
    encoded: set[int] = set()

    def seconds(_target: Any, inputs: Any, _assistant: Any, _n: int) -> float:
        encoded.add(inputs.input_ids.shape[1])
        return 1.0

    monkeypatch.setattr(bench_agrees, "seconds", seconds)
    agrees(monkeypatch, result, *pair, "--repeats", "1")
    runs = json.loads(result.read_text())["runs"]
    assert encoded == {run["n_prompt_tokens"] for run in runs}
    assert {run["thinking"] for run in runs} == {True, False}


def test_it_decodes_with_each_block_size_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: list[str]
) -> None:
    data, result, record = tmp_path / "d.jsonl", tmp_path / "b.json", tmp_path / "agrees.json"
    data.write_text('{"prompt": "Hello"}\n{"prompt": "yes"}\n')
    sizes = ["--block-size", "3", "--block-size", "4"]
    wanted = ["--dataset", str(data), "--json", str(result), "--max-new-tokens", "8", *sizes]
    made = CliRunner().invoke(cli.app, ["bench", *wanted, *pair, "--no-stock", "--lookup", "0"])
    assert made.exit_code == 0, made.output
    drafts: list[int] = []
    seconds = bench_agrees.seconds

    def watched(target: Any, inputs: Any, assistant: Any, n: int) -> float:
        drafts.append(0 if assistant is None else assistant.config.block_size)
        return seconds(target, inputs, assistant, n)

    monkeypatch.setattr(bench_agrees, "seconds", watched)
    options = ["--block-size", "3", "4", "--repeats", "1", "--json", record]
    # Whether they agree is a question for a quiet machine.
    status = agrees(monkeypatch, result, *pair, *options)
    found = json.loads(record.read_text())
    assert status == (not found["agrees"])
    assert sorted(drafts) == [0, 0, 0, 3, 3, 3, 4, 4, 4]
    assert [of_size["block_size"] for of_size in found["block_sizes"]] == [3, 4]
    for of_size in found["block_sizes"]:
        for name in ("median over prompts", "all seconds"):
            ours, by_hand = of_size[name]["bench"], of_size[name]["by_hand"]
            assert of_size[name]["difference"] == pytest.approx(abs(ours / by_hand - 1))
    assert (found["n_prompts"], found["repeats"]) == (2, 1)
    check_made_with(found, tmp_path)
    assert found["bench"]["commit"] == json.loads(result.read_text())["provenance"]["commit"]


def test_a_block_size_that_was_not_measured_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "b.json"
    result.write_text(json.dumps(document(2.0)))
    with pytest.raises(SystemExit, match=r"`block-size` must be one that .*, \[8\], got 5"):
        agrees(monkeypatch, result, "--block-size", "5")


def test_again_compares_with_runs_made_beside_the_stopwatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: list[str]
) -> None:
    result, record = tmp_path / "b.json", tmp_path / "agrees.json"
    result.write_text(json.dumps(document(2.0)))  # 12 tokens each, figures of another day
    order: list[str] = []

    def seconds(_target: Any, _inputs: Any, assistant: Any, n_tokens: int) -> float:
        order.append("hand" if n_tokens > 16 or n_tokens == 12 else "warm")
        return 1.0 if assistant is not None else 3.0

    run_prompt = bench_agrees.Benchmark.run_prompt

    def five_times_as_fast(self: Any, *place: Any) -> Any:
        order.append("bench")
        runs = run_prompt(self, *place)
        times = {"plain": 5.0, "dflash": 1.0}
        return [replace(r, seconds=Seconds(0.0, 0.0, times[r.method])) for r in runs]

    monkeypatch.setattr(bench_agrees, "seconds", seconds)
    monkeypatch.setattr(bench_agrees.Benchmark, "run_prompt", five_times_as_fast)
    options = [result, *pair, "--repeats", "2", "--block-size", "8", "--again", "--json", record]
    assert agrees(monkeypatch, *options) == 1
    found = json.loads(record.read_text())
    assert found["again"] is True
    [of_size] = found["block_sizes"]
    for name in ("median over prompts", "all seconds"):
        assert (of_size[name]["bench"], of_size[name]["by_hand"]) == pytest.approx((5.0, 3.0))
    by_round = [who for who in order if who != "warm"]
    benchs, hands = ["bench", "hand", "hand"], ["hand", "hand", "bench"]
    assert by_round == [*benchs, *hands, *hands, *benchs, *benchs, *hands]
