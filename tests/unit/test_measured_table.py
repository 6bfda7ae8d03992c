"""The table of the README is what `hf-dflash bench` measured."""

from __future__ import annotations

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
    n_prompts, few, whole, lookup, identical = table()[name]
    found = [summary(file, data_set, *way) for way in (FEW, WHOLE, ("prompt_lookup", None))]
    assert [few.replace("**", ""), whole.replace("**", "")] == [figure(s) for s in found[:2]]
    assert found[2].speedup is not None
    assert lookup.replace("**", "") == f"{found[2].speedup.median:.2f}x"
    measured = read_measurement(MEASURED / f"{file}.json")
    assert int(n_prompts) == measured.settings.n_prompts[data_set]
    for drafted in found[:2]:
        assert drafted.identity is not None
        assert drafted.identity.n_identical == drafted.identity.n_compared
    assert identical == "all"


def test_every_row_is_checked() -> None:
    assert set(table()) == set(ROWS)


def test_the_text_below_is_what_was_measured() -> None:
    below = measured_section().split("In brackets")[1]
    few, whole = (summary("held_out", "held-out", *way) for way in (FEW, WHOLE))
    assert f"{few.speedup_total:.2f}x and {whole.speedup_total:.2f}x" in below
    for file in ("held_out", "held_out_bfloat16"):
        plain = summary(file, "held-out")
        assert f"{plain.tokens_per_s.median:.1f}" in below
    assert f"{few.tokens_per_s.median:.1f}" in below


def test_the_text_of_the_other_machine_is_what_was_measured() -> None:
    below = measured_section().split("Xeon")[1]
    figures = [
        summary("held_out_xeon", "held-out", "dflash", 3),
        summary("held_out_xeon", "held-out", *WHOLE),
        summary("held_out_xeon_bfloat16", "held-out", *WHOLE),
    ]
    for found in figures:
        assert figure(found) in below
