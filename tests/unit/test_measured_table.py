"""The table of the README is what `hf-dflash bench` measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hf_dflash.measurement import MethodSummary, read_measurement
from hf_dflash.provenance import sha256_of_weights
from hf_dflash.training_log import read_training_log

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "model_cards" / "smollm2-135m-instruct-dflash" / "evaluation"
ROWS = {
    "held-out": ("held-out", "held_out_amx_bfloat16"),
    "GSM8K": ("gsm8k-pypi", "offline_sets_amx_bfloat16"),
    "HumanEval": ("humaneval-pypi", "offline_sets_amx_bfloat16"),
    "MT-Bench": ("mt-bench-pypi", "offline_sets_amx_bfloat16"),
}
FEW, WHOLE = ("dflash", 4), ("dflash", 8)
KINDS = ("median over prompts", "all seconds")
SINGLE, HALF, QUALITY = "held_out_amx", "held_out_amx_bfloat16", "quality_amx_bfloat16"


def measured_section() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split("## Measured")[1].split("## ")[0]


def table() -> dict[str, list[str]]:
    """Cells by the first word of their row."""
    lines = measured_section().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if "x (" in line
    ]
    return {cells[0].replace(",", ":").split(":")[0]: cells[1:] for cells in rows if len(cells) > 1}


def summary(
    file: str, data_set: str, method: str = "plain", block_size: int | None = None
) -> MethodSummary:
    measurement = read_measurement(MEASURED / f"{file}.json")
    [found] = [
        s
        for s in measurement.summary.slices["dataset"][data_set]
        if (s.method, s.block_size) == (method, block_size)
    ]
    return found


def figure(found: Any) -> str:
    return f"{found.speedup.median:.2f}x ({found.acceptance.macro:.2f})"


@pytest.mark.parametrize("name", list(ROWS))
def test_a_row_is_what_was_measured(name: str) -> None:
    data_set, file = ROWS[name]
    n_prompts, ours, over_best, *baselines, identical = table()[name]
    found = summary(file, data_set, *WHOLE)
    assert ours == figure(found)
    assert found.speedup_best is not None
    assert over_best == f"{found.speedup_best.median:.2f}x"
    plain_single = summary(file, data_set, "plain_float32").speedup_total
    assert plain_single is not None
    assert plain_single > 1, "the best plain decoding is float32's"
    speedups = [
        summary(file, data_set, *way).speedup
        for way in (("stock_dflash", 8), ("prompt_lookup", None))
    ]
    assert all(speedups)
    assert baselines == [f"{speedup.median:.2f}x" for speedup in speedups if speedup]
    measured = read_measurement(MEASURED / f"{file}.json")
    assert int(n_prompts) == measured.settings.n_prompts[data_set]
    assert found.identity is not None
    assert identical == f"{found.identity.n_identical} of {found.identity.n_compared}"


def test_every_row_is_checked() -> None:
    assert set(table()) == set(ROWS)


def test_all_of_it_is_of_the_shipped_drafter_on_one_device() -> None:
    files = [read_measurement(path) for path in MEASURED.glob("*.json")]
    assert {file.provenance.drafter.sha256 for file in files} == {
        sha256_of_weights(str(MEASURED.parent))
    }
    assert len({file.provenance.device for file in files}) == 1


def test_what_differs_in_half_precision_are_near_ties() -> None:
    for data_set, file in ROWS.values():
        found = summary(file, data_set, *WHOLE).identity
        assert found is not None
        assert all(difference.is_near_tie for difference in found.differences)
    assert "that are not identical part at near ties" in measured_section()


def test_the_speed_over_the_faster_plain_decoding_was_measured() -> None:
    ways = (("plain",), ("plain_float32",), WHOLE)
    plain, single, ours = (summary(HALF, "held-out", *way) for way in ways)
    rates = [f"{found.tokens_per_s.median:.1f}" for found in (plain, single, ours)]
    told = "makes {} tokens/s in bfloat16 and {} in float32, the drafter in bfloat16 {}"
    assert told.format(*rates) in measured_section()
    told = (
        f"over all seconds that is {ours.speedup_best_total:.2f} times the quicker plain decoding"
    )
    assert told in measured_section()


def test_what_is_said_of_float32_was_measured() -> None:
    few, whole = (summary(SINGLE, "held-out", *way) for way in (FEW, WHOLE))
    for found in (few, whole):
        assert found.identity is not None
        assert found.identity.n_identical == found.identity.n_compared
    assert few.identity is not None
    counts = f"{few.identity.n_identical} of {few.identity.n_compared}"
    assert f"In float32 {counts} held-out outputs are identical" in measured_section()
    assert f"3 drafts a cycle make {figure(few)}" in measured_section()
    assert f"the whole block {figure(whole)}" in measured_section()


def test_what_is_said_of_quality_was_measured() -> None:
    [data_set] = read_measurement(MEASURED / f"{QUALITY}.json").settings.n_prompts
    plain, drafted = (summary(QUALITY, data_set, *way) for way in (("plain",), WHOLE))
    assert plain.quality is not None
    assert drafted.quality is not None
    n_right = f"{plain.quality.n_correct} right without the drafter"
    told = f"the target gets {n_right} and {drafted.quality.n_correct} with it"
    assert f"of {plain.quality.n_judged} small functions {told}" in measured_section()


def test_what_is_said_of_the_limits_was_measured() -> None:
    page = (ROOT / "docs" / "training.md").read_text("utf-8")
    held_out, trained = (
        summary(file, data_set, *WHOLE).acceptance
        for file, data_set in ((HALF, "held-out"), ("trained_amx_bfloat16", "trained_prompts"))
    )
    assert held_out is not None
    assert trained is not None
    both = f"{trained.macro:.2f} on 26 prompts that it was trained on (`benchmarks/trained_prompts"
    assert both in page
    assert f"and {held_out.macro:.2f} on 26 held-out ones" in page
    log = read_training_log(MEASURED.parent / "training_log.json")
    evaluated = [entry for entry in log.log if "eval_loss" in entry]
    best = min(evaluated, key=lambda entry: float(entry["eval_loss"] or math.inf))
    last = evaluated[-1]
    assert f"is lowest after {best['epoch']:.0f} of the {last['epoch']:.0f} epochs" in page
    simulated = f"{last['eval_acceptance_length']:.2f} on held-out rows, {held_out.micro:.2f} over"
    assert f"{simulated} all cycles of decoding, {held_out.macro:.2f} as the mean" in page


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("record", "way", "by_turns", "agreeing"),
    [
        ("bench_agrees", FEW, True, {"median over prompts", "all seconds"}),
        ("bench_agrees_bfloat16", WHOLE, True, {"all seconds"}),
        ("bench_agrees_after", FEW, False, {"all seconds"}),
    ],
)
def test_what_is_said_of_the_stopwatch_was_measured(
    record: str, way: tuple[str, int], by_turns: bool, agreeing: set[str]
) -> None:
    page = (ROOT / "docs" / "measuring.md").read_text("utf-8").split("Is the stopwatch right?")[1]
    [told] = [line for line in page.splitlines() if f"`benchmarks/results/{record}.json`" in line]
    found = result(record)
    assert found["again"] == by_turns == told.startswith("* By turns")
    [block] = found["block_sizes"]
    assert block["block_size"] == way[1]
    assert f"{found['n_prompts']} " in told
    assert ("does **not**" in told) != found["agrees"]
    assert agreeing == {k for k in KINDS if block[k]["difference"] <= found["limit"]}
    for kind in KINDS:
        of_kind = block[kind]
        figures = f"{of_kind['bench']:.3f} by the benchmark and {of_kind['by_hand']:.3f} by hand"
        assert f"{figures}, {100 * of_kind['difference']:.1f} % apart" in told


def test_what_few_rows_take_was_measured() -> None:
    page = (ROOT / "docs" / "decoding.md").read_text("utf-8")
    rows = {figures["rows"]: figures for figures in result("few_rows")["rows"]}
    for n in (4, 8):
        ours, torchs = (f"{rows[n][name]:.0f}" for name in ("ours_ms", "torch_ms"))
        assert f"of {n} rows {ours} ms ({torchs} ms with torch's own way)" in page
    assert f"of 1 row takes {rows[1]['torch_ms']:.0f} ms" in page


def test_three_data_sets_are_measured_within_a_quarter_of_an_hour() -> None:
    measured = read_measurement(MEASURED / "offline_sets_amx_bfloat16.json")
    assert len(measured.settings.n_prompts) == 3
    assert measured.wall_s is not None
    assert measured.wall_s < 15 * 60


def test_what_is_said_of_other_trainers_was_measured() -> None:
    page = (ROOT / "docs" / "training.md").read_text("utf-8").split("**Beside others.**")[1]
    found = result("training_step")
    names = {"plain": "the plain one takes", "specforge": "SpecForge", "speculators": "speculators"}
    assert found["over_ours"].keys() == names.keys()
    for name, words in names.items():
        over = found["over_ours"][name]
        times = f"{over['time']['median']:.2f} times the time"
        assert f"{words} {times} and {over['memory']:.2f} times the memory" in page
    worst = max(check["gradient"] for check in found["checks"].values())
    assert worst < 1e-5
    assert f"gradients agree to {worst:.1e}" in page
