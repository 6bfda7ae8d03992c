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
    "held-out": ("held-out", "held_out_avx512"),
    "GSM8K": ("gsm8k-pypi", "offline_sets_avx512"),
    "HumanEval": ("humaneval-pypi", "offline_sets_avx512"),
    "MT-Bench": ("mt-bench-pypi", "offline_sets_avx512"),
}
FEW, WHOLE = ("dflash", 4), ("dflash", 8)
KINDS = ("median over prompts", "all seconds")
SINGLE, HALF, QUALITY = "held_out_avx512", "held_out_avx512_bfloat16", "quality_amx_bfloat16"


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
    n_prompts, few, whole, over_best, stock, lookup, identical = table()[name]
    assert [few, whole] == [figure(summary(file, data_set, *way)) for way in (FEW, WHOLE)]
    found = summary(file, data_set, *FEW)
    assert found.speedup_best is not None
    assert over_best == f"{found.speedup_best.median:.2f}x"
    measured = read_measurement(MEASURED / f"{file}.json")
    ways = (("stock_dflash", 8), ("prompt_lookup", None))
    for told, way in zip((stock, lookup), ways, strict=True):
        if way[0] in measured.settings.methods:
            baseline = summary(file, data_set, *way)
            assert baseline.speedup is not None
            assert told == f"{baseline.speedup.median:.2f}x"
        else:
            assert told == "-"
    assert int(n_prompts) == measured.settings.n_prompts[data_set]
    assert found.identity is not None
    assert identical == f"{found.identity.n_identical} of {found.identity.n_compared}"


def test_every_row_is_checked() -> None:
    assert set(table()) == set(ROWS)


def test_every_output_in_float32_is_identical() -> None:
    for file in {file for _, file in ROWS.values()}:
        measured = read_measurement(MEASURED / f"{file}.json")
        assert measured.provenance.dtype == "float32"
        compared = [run for run in measured.runs if not run.variant.is_plain]
        assert all(run.identical for run in compared)
    assert "Every output in float32 is identical" in measured_section()


def test_the_speed_over_the_faster_plain_decoding_was_measured() -> None:
    ways = (("plain",), ("plain_bfloat16",), FEW)
    plain, half, few = (summary(SINGLE, "held-out", *way) for way in ways)
    rates = [f"{found.tokens_per_s.median:.1f}" for found in (plain, half, few)]
    told = "makes {} tokens/s in float32 and {} in bfloat16, with 3 drafts a cycle float32 makes {}"
    assert told.format(*rates) in measured_section()
    assert few.speedup_best is not None
    times = f"{few.speedup_best.median:.2f} times as fast as the faster of the two"
    assert f"{times}, over all seconds {few.speedup_best_total:.2f}" in measured_section()


def test_what_is_said_of_half_precision_was_measured() -> None:
    found = summary(HALF, "held-out", *WHOLE)
    assert found.speedup is not None
    assert found.identity is not None
    assert found.speedup_best == found.speedup, "plain bfloat16 is the faster one"
    assert all(difference.is_near_tie for difference in found.identity.differences)
    told = f"the whole block reaches {figure(found)}, over all seconds {found.speedup_total:.2f}"
    assert told in measured_section()
    assert f"{found.identity.n_identical} of {found.identity.n_compared} outputs are the same" in (
        measured_section()
    )
    stock = summary(HALF, "held-out", "stock_dflash", 8).speedup
    assert stock is not None
    assert f"which costs as much a cycle there, {stock.median:.2f}x)" in measured_section()


def test_what_is_said_of_quality_was_measured() -> None:
    [data_set] = read_measurement(MEASURED / f"{QUALITY}.json").settings.n_prompts
    plain, drafted = (summary(QUALITY, data_set, *way) for way in (("plain",), ("dflash", 6)))
    assert plain.quality is not None
    assert drafted.quality is not None
    n_right = f"{plain.quality.n_correct} right without the drafter"
    told = f"the target gets {n_right} and {drafted.quality.n_correct} with it"
    assert f"of {plain.quality.n_judged} small functions (on the Xeon) {told}" in measured_section()


def test_what_is_said_of_other_machines_was_measured() -> None:
    xeon, epyc = measured_section().split("two cores of a Xeon")[1].split("EPYC")
    assert f"bfloat16 {figure(summary('held_out_amx_bfloat16', 'held-out', *WHOLE))}" in xeon
    two = summary("held_out_amx", "held-out", "dflash", 3)
    assert f"float32 with 2 drafts {figure(two)}" in xeon
    few = summary("held_out", "held-out", *FEW)
    assert f"float32 with 3 drafts {figure(few)}" in epyc
    half = [
        summary("held_out_bfloat16", "held-out", *way) for way in (("dflash", 3), ("dflash", 8))
    ]
    assert "bfloat16 {:.2f}x and {:.2f}x".format(*(s.speedup.median for s in half)) in epyc


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
    if not by_turns:
        measured = read_measurement(MEASURED / "offline_sets_avx512.json")
        assert found["bench"]["date"] == measured.provenance.date


def test_what_few_rows_take_was_measured() -> None:
    page = (ROOT / "docs" / "decoding.md").read_text("utf-8")
    rows = {figures["rows"]: figures for figures in result("few_rows")["rows"]}
    for n in (4, 8):
        ours, torchs = (f"{rows[n][name]:.0f}" for name in ("ours_ms", "torch_ms"))
        assert f"of {n} rows {ours} ms ({torchs} ms with torch's own way)" in page
    assert f"of 1 row takes {rows[1]['torch_ms']:.0f} ms" in page


def test_three_data_sets_are_measured_within_a_quarter_of_an_hour() -> None:
    measured = read_measurement(MEASURED / "offline_sets_avx512.json")
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
