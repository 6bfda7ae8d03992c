"""The table of the README is what `hf-dflash bench` measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_dflash.measurement import MethodSummary, read_measurement

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "model_cards" / "smollm2-135m-instruct-dflash" / "evaluation"
ROWS = {
    "held-out": ("held-out", "_held_out"),
    "GSM8K": ("gsm8k-pypi", ""),
    "HumanEval": ("humaneval-pypi", ""),
    "MT-Bench": ("mt-bench-pypi", ""),
}


def table() -> dict[str, list[str]]:
    """Cells by the first word of their row."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.split("## Measured")[1].split("## ")[0].splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if "x (" in line
    ]
    return {cells[0].replace(",", ":").split(":")[0]: cells[1:] for cells in rows}


def summary(dtype: str, file: str, data_set: str, block_size: int | None) -> MethodSummary:
    measurement = read_measurement(MEASURED / f"bench_{dtype}{file}.json")
    method = "plain" if block_size is None else "dflash"
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
    n_prompts, *figures, identical = table()[name]
    found = [
        summary("float32", file, data_set, 3),
        summary("float32", file, data_set, 8),
        summary("bfloat16", file, data_set, 8),
    ]
    assert [text.replace("**", "") for text in figures] == [figure(s) for s in found]
    measured = read_measurement(MEASURED / f"bench_float32{file}.json")
    assert int(n_prompts) == measured.settings.n_prompts[data_set]
    counts = [(s.identity.n_identical, s.identity.n_compared) for s in found if s.identity]
    assert counts[0][0] == counts[0][1]
    assert counts[1][0] == counts[1][1]
    assert identical == f"all, {counts[2][0]}/{counts[2][1]}"


def test_every_row_is_checked() -> None:
    assert set(table()) == set(ROWS)


def test_the_text_below_is_what_was_measured() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Measured")[1]
    below = text.split("## ")[0].split("In brackets")[1]
    settings = [("float32", 3), ("float32", 8), ("bfloat16", 8)]
    held_out = [summary(dtype, "_held_out", "held-out", size) for dtype, size in settings]
    plain = summary("float32", "_held_out", "held-out", None)
    totals = "{:.2f}x, {:.2f}x and {:.2f}x".format(*(s.speedup_total for s in held_out))
    assert totals in below
    for measured in (plain, held_out[0], held_out[2]):
        assert f"{measured.tokens_per_s.median:.1f}" in below
    measurement = read_measurement(MEASURED / "bench_float32.json")
    for name in ("HumanEval", "MT-Bench"):
        of_set = measurement.summary.slices["dataset"][ROWS[name][0]]
        [lookup] = [s for s in of_set if s.method == "prompt_lookup"]
        assert lookup.speedup is not None
        assert f"{lookup.speedup.median:.2f}x on {name}" in below
    gaps = [
        d.top2_gap
        for file in ("", "_held_out")
        for s in read_measurement(MEASURED / f"bench_bfloat16{file}.json").summary.overall
        if s.method == "dflash" and s.identity
        for d in s.identity.differences
    ]
    assert f"at most {max(gap for gap in gaps if gap is not None):.1f} apart" in below
