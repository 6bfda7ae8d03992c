"""The table of the README is what `hf-dflash bench` measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_dflash.measurement import MethodSummary, read_measurement

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "model_cards" / "smollm2-135m-instruct-dflash" / "evaluation"
ROWS = {
    "held-out": ("held-out", "held_out"),
    "GSM8K": ("gsm8k-pypi", "offline_sets"),
    "HumanEval": ("humaneval-pypi", "offline_sets"),
    "MT-Bench": ("mt-bench-pypi", "offline_sets"),
}
FEW, WHOLE = ("dflash", 4), ("dflash", 8)


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
    n_prompts, few, whole, stock, lookup, identical = table()[name]
    ways = (FEW, WHOLE, ("stock_dflash", 4), ("prompt_lookup", None))
    found = [summary(file, data_set, *way) for way in ways]
    assert [few.replace("**", ""), whole.replace("**", "")] == [figure(s) for s in found[:2]]
    for told, baseline in zip((stock, lookup), found[2:], strict=True):
        assert baseline.speedup is not None
        assert told.replace("**", "") == f"{baseline.speedup.median:.2f}x"
    measured = read_measurement(MEASURED / f"{file}.json")
    assert int(n_prompts) == measured.settings.n_prompts[data_set]
    for drafted in found[:2]:
        assert drafted.identity is not None
        assert drafted.identity.n_identical == drafted.identity.n_compared
    assert identical == "all"


def test_every_row_is_checked() -> None:
    assert set(table()) == set(ROWS)


def test_the_text_below_is_what_was_measured() -> None:
    below = measured_section().split("In brackets")[1].split("Xeon")[0]
    ways = (FEW, WHOLE, ("stock_dflash", 8))
    few, whole, stock = (summary("held_out", "held-out", *way) for way in ways)
    assert f"{few.speedup_total:.2f} and {whole.speedup_total:.2f} times as fast" in below
    assert f"whole block {stock.speedup_total:.2f} times" in below
    plain = [summary(file, "held-out") for file in ("held_out", "held_out_bfloat16")]
    rates = [f"{found.tokens_per_s.median:.1f}" for found in (*plain, few)]
    assert "makes {} tokens/s in float32 and {} in bfloat16".format(*rates) in below
    assert f"with 3 drafts makes {rates[2]}" in below


def test_what_is_said_of_bfloat16_was_measured() -> None:
    below = measured_section().split("In bfloat16 it costs")[1].split("Xeon")[0]
    two, whole = (summary("held_out_bfloat16", "held-out", "dflash", size) for size in (3, 8))
    for found in (two, whole):
        assert found.speedup is not None
        assert f"{found.speedup.median:.2f}x" in below
        assert found.identity is not None
        assert found.identity.n_identical == two.identity.n_identical
        assert all(d.is_near_tie for d in found.identity.differences)
    assert f"{two.identity.n_identical} of {two.identity.n_compared} outputs" in below


def test_what_is_said_of_quality_was_measured() -> None:
    below = measured_section().split("In brackets")[1]
    for name, data_set in (("GSM8K", "gsm8k-pypi"), ("HumanEval", "humaneval-pypi")):
        few = summary("quality", data_set, *FEW)
        assert few.speedup is not None
        assert f"{name} {few.speedup.median:.2f}x" in below
        for found in (few, summary("quality", data_set)):
            assert found.quality is not None
            assert (found.quality.n_correct, found.quality.n_judged) == (0, 10)


def test_the_text_of_the_other_machine_is_what_was_measured() -> None:
    below = measured_section().split("Xeon")[1]
    figures = [
        summary("held_out_xeon", "held-out", "dflash", 3),
        summary("held_out_xeon", "held-out", *WHOLE),
        summary("held_out_xeon_bfloat16", "held-out", *WHOLE),
    ]
    for found in figures:
        assert figure(found) in below
    identity = figures[2].identity
    assert identity is not None
    assert f"{identity.n_identical}/{identity.n_compared} identical" in below


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
    few = summary("held_out", "held-out", *FEW)
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
