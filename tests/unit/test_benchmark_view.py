from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from hf_dflash.benchmark_view import progress, show
from hf_dflash.measurement import Measurement
from measurements import measurement, pair_of_runs, provenance, run


def shown(whole: Measurement, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(whole, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_row_for_each_method_with_its_figures() -> None:
    text = shown(measurement([*pair_of_runs(correct=True), run(block_size=4, repeat=0)]))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "data set method tokens/s speed-up quartiles decode tau same right" in rows
    assert "gsm8k plain 5.0 1/1" in rows
    assert "dflash B8 10.0 2.00 2.00-2.00 2.20 3.67 1/1 1/1" in rows
    assert "dflash B4 10.0 2.00 2.00-2.00 2.20 3.67 1/1" in rows
    assert "float32, greedy, up to 12 tokens, cpu" in text
    assert "Prompts: gsm8k 1." in " ".join(text.split())


def test_several_data_sets_have_a_part_for_all() -> None:
    rows = shown(measurement(pair_of_runs() + pair_of_runs(4.0, dataset="mt-bench")))
    starts = [line.split()[:2] for line in rows.splitlines() if " plain   " in line]
    assert starts == [["gsm8k", "plain"], ["mt-bench", "plain"], ["all", "plain"]]
    assert "3.00" in rows


def test_sampling_is_said() -> None:
    whole = measurement()
    settings = type(whole.settings)(12, 0.7, {"gsm8k": 3}, 1)
    assert "sampled at temperature 0.7" in shown(measurement(settings=settings))


@pytest.mark.parametrize(("wall_s", "said"), [(200.4, True), (None, False)])
def test_the_time_that_all_of_it_took_is_said(wall_s: float | None, said: bool) -> None:
    text = " ".join(shown(measurement(wall_s=wall_s)).split())
    assert ("All of it took 3 min." in text) == said
    assert ("All of it took" in text) == said


def test_each_difference_is_shown_with_its_gap_and_no_more_than_can_be_read() -> None:
    differing = [
        run(repeat=i, identical=False, first_difference=5, top2_gap=0.0 if i else None)
        for i in range(12)
    ]
    differing[11] = replace(differing[11], top2_gap=2.5, distance=2.5, rounding=0.1)
    whole = measurement([*pair_of_runs()[:1], *differing], provenance=provenance(dtype="bfloat16"))
    text = shown(whole)
    assert "dflash, block 8: 12 outputs differ from plain decoding" in text
    assert "gsm8k prompt 1, turn 1, token 6: unknown" in text
    assert "token 6: 2.5000, NO near tie\n" in text, "errors come first"
    assert text.count("token 6: 0.0000\n") == 8
    assert "and 2 more, in the file" in text


def test_the_table_fits_a_narrow_terminal() -> None:
    text = shown(measurement(pair_of_runs(dataset="humaneval-pypi", correct=True)), width=80)
    assert max(map(len, text.splitlines())) <= 80
    (row,) = [line for line in text.splitlines() if "dflash B8" in line]
    assert row.split()[-4:] == ["2.20", "3.67", "1/1", "1/1"]
    assert "humaneval-pypi plain" in text


def test_progress_counts_from_what_is_done() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with progress(console, 3, 2) as advance:
        advance("gsm8k")
    assert "3/3" in console.file.getvalue()  # type: ignore[attr-defined]
