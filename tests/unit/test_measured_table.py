"""The table of the README is what `hf-dflash bench` measured."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from hf_dflash.measurement import Measurement, MethodSummary, read_measurement

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "model_cards" / "smollm2-135m-instruct-dflash" / "evaluation"
ROWS = {
    "held-out": ("held-out", "held_out_amx_bfloat16"),
    "GSM8K": ("gsm8k-pypi", "offline_sets_amx_bfloat16"),
    "HumanEval": ("humaneval-pypi", "offline_sets_amx_bfloat16"),
    "MT-Bench": ("mt-bench-pypi", "offline_sets_amx_bfloat16"),
}
FEW, WHOLE = ("dflash", 6), ("dflash", 8)
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
    n_prompts, whole, few, stock, lookup, identical = table()[name]
    assert [whole, few] == [figure(summary(file, data_set, *way)) for way in (WHOLE, FEW)]
    ways = (("stock_dflash", 8), ("prompt_lookup", None))
    for told, way in zip((stock, lookup), ways, strict=True):
        baseline = summary(file, data_set, *way)
        assert baseline.speedup is not None
        assert told == f"{baseline.speedup.median:.2f}x"
    measured = read_measurement(MEASURED / f"{file}.json")
    assert int(n_prompts) == measured.settings.n_prompts[data_set]
    found = summary(file, data_set, *WHOLE).identity
    assert found is not None
    assert all(difference.is_near_tie for difference in found.differences)
    assert identical == f"{found.n_identical} of {found.n_compared}"


def test_every_row_is_checked() -> None:
    assert set(table()) == set(ROWS)


def test_the_text_below_is_what_was_measured() -> None:
    below = measured_section().split("In brackets")[1].split("EPYC")[0]
    in_half, plain = (summary(file, "held-out") for file in (HALF, SINGLE))
    whole = summary(HALF, "held-out", *WHOLE)
    rates = [f"{found.tokens_per_s.median:.1f}" for found in (plain, in_half, whole)]
    assert "makes {} tokens/s in float32 and {} in bfloat16".format(*rates) in below
    assert f"the whole block in bfloat16 {rates[2]}" in below
    for size in (3, 8):
        found = summary(SINGLE, "held-out", "dflash", size)
        assert figure(found) in below
        assert found.identity is not None
        assert found.identity.n_identical == found.identity.n_compared


def test_the_speed_over_the_faster_plain_decoding_was_measured() -> None:
    single, half = (read_measurement(MEASURED / f"{file}.json") for file in (SINGLE, HALF))
    assert single.provenance.device == half.provenance.device
    plain, drafted = rates_by_prompt(single, "plain", None), rates_by_prompt(half, *WHOLE)
    common = [prompt for prompt in plain if prompt in drafted]
    ratios = [drafted[prompt][0] / plain[prompt][0] for prompt in common]
    by_seconds = [
        sum(rates[p][1] for p in common) / sum(rates[p][1] / rates[p][0] for p in common)
        for rates in (drafted, plain)
    ]
    told = f"{median(ratios):.2f} times, over all seconds {by_seconds[0] / by_seconds[1]:.2f} times"
    assert f"On the {len(common)} prompts that were decoded in both it is {told}" in (
        measured_section()
    )


def rates_by_prompt(
    measured: Measurement, method: str, block_size: int | None
) -> dict[str, tuple[float, int]]:
    """Tokens a second, and tokens, by the text of the prompt."""
    texts = measured.prompts["held-out"]
    return {
        str(texts[run.prompt_index]): (run.tokens_per_s, len(run.token_ids))
        for run in measured.runs
        if (run.method, run.block_size) == (method, block_size)
    }


def test_what_is_said_of_quality_was_measured() -> None:
    below = measured_section().split("In brackets")[1]
    [data_set] = read_measurement(MEASURED / f"{QUALITY}.json").settings.n_prompts
    plain, drafted = (summary(QUALITY, data_set, *way) for way in (("plain",), FEW))
    assert plain.quality is not None
    assert drafted.quality is not None
    n_right = f"{plain.quality.n_correct} right without the drafter"
    told = f"the target gets {n_right} and {drafted.quality.n_correct} with it"
    assert f"of {plain.quality.n_judged} small functions {told}" in below


def test_what_is_said_of_the_other_machine_was_measured() -> None:
    below = measured_section().split("EPYC")[1]
    found = [
        summary("held_out", "held-out", *way) for way in (("dflash", 4), ("dflash", 8), ("plain",))
    ]
    half = [
        summary("held_out_bfloat16", "held-out", *way)
        for way in (("dflash", 3), ("dflash", 8), ("plain",))
    ]
    for drafted in found[:2]:
        assert figure(drafted) in below
        assert drafted.identity is not None
        assert drafted.identity.n_identical == drafted.identity.n_compared == 26
    assert "in bfloat16 {:.2f}x and {:.2f}x".format(*(s.speedup.median for s in half[:2])) in below
    rates = [f"{s.tokens_per_s.median:.1f}" for s in (found[2], half[2], found[0])]
    assert "makes {} tokens/s in float32 and {} in bfloat16".format(*rates) in below
    assert f"with 3 drafts makes {rates[2]}" in below


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def test_what_is_said_of_the_stopwatch_was_measured() -> None:
    page = (ROOT / "docs" / "measuring.md").read_text("utf-8").split("Is the stopwatch right?")[1]
    agreeing, in_half = result("bench_agrees"), result("bench_agrees_bfloat16")
    assert agreeing["agrees"]
    [block] = agreeing["block_sizes"]
    for kind in ("median over prompts", "all seconds"):
        found = block[kind]
        assert f"{found['bench']:.3f}" in page
        assert f"{found['by_hand']:.3f}" in page
        assert f"{100 * found['difference']:.1f} % apart" in page
    few = summary("held_out", "held-out", "dflash", 4)
    assert few.speedup is not None
    assert block["median over prompts"]["bench"] == pytest.approx(few.speedup.median)
    assert block["all seconds"]["bench"] == pytest.approx(few.speedup_total)
    assert not in_half["agrees"]
    assert "do **not** agree" in page


def test_what_few_rows_take_was_measured() -> None:
    page = (ROOT / "docs" / "decoding.md").read_text("utf-8")
    rows = {figures["rows"]: figures for figures in result("few_rows")["rows"]}
    one, four = rows[1]["torch_ms"], rows[4]
    assert f"of 1 row takes {one:.0f} ms, of 4 rows {four['ours_ms']:.0f} ms, and " in page
    assert f"{four['torch_ms']:.0f} ms with torch's own way" in page


def test_three_data_sets_are_measured_within_a_quarter_of_an_hour() -> None:
    measured = read_measurement(MEASURED / "offline_sets.json")
    assert len(measured.settings.n_prompts) == 3
    assert measured.wall_s is not None
    assert measured.wall_s < 15 * 60
