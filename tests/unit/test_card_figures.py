"""Planted figures are found, and other numbers are left alone."""

from __future__ import annotations

import pytest

from hf_dflash.card_figures import figure_without_source, number_out_of_place


@pytest.mark.parametrize(
    "text",
    [
        "Speed-up: 2.5x over plain decoding.",
        "It runs 3x faster.",
        "Acceptance length 4.1 on MT-Bench.",
        "41.5 tokens/s on an H200",
        "About 40 % of the drafts are accepted.",
        "| data set | speed-up |\n|---|---|\n| gsm8k | 2.4 |",
        "tau = 6.5",
        "On an H200 it is about 3 times as fast.",
        "Decoding is twice as fast as without it.",
        "It writes 40 tokens per second,",
        "Of ten drafts, seven are accepted.",
        "24 of 24 outputs are identical.",
        "Its median speed-up over\nplain decoding is\n2 on code.",
        "* Speed on one GPU, against plain\n  decoding: 3",
        "### Speed\n\nOn GSM8K, 2.4.\n",
        "```\nspeed-up 2\n```",
        "Cuts decoding time by 40 % on an H200.",
        "40% reduction of runtime",
        "Forty percent of the run-time is gone.",
        "Halves the waiting time.",
        "Doubles the pace.",
        "Saves a third, or 30 of 90 seconds.",
        "A wait of 5 seconds becomes one of 2.",
        "2.5 tokens each step.",
        "It writes 3 tokens a pass.",
        "Text is there 4 seconds sooner.",
    ],
)
def test_a_claim_with_a_number_is_found(text: str) -> None:
    found = figure_without_source(f"# A drafter\n\n{text}\n")
    assert found is not None
    number, line = found
    assert text.split("\n")[number - 3].strip() == line


@pytest.mark.parametrize(
    "text",
    [
        "Needs transformers 5.18 and torch 2.6.",
        "Trained for 2.5 hours on 1.2 M tokens.",
        "| version | date |\n|---|---|\n| 0.1 | 2026.1 |",
        "Accepted drafts are those that the target would have written.",
        "Made for Qwen3-4B, and faster than the one before.",
        "Its speed is told in arxiv:2602.06036 and at https://example.org/2026/speed.",
        "1. It is faster on code.\n2. It was trained on 2148 answers.",
        "It was trained for 3 epochs.\nIt is meant to be faster.",
        "In half precision it is as fast.",
        "Trained three times with 2148 answers, cut at 512 tokens, on a reduced set of 13 kinds.",
        "1900 steps at a constant rate, 8 rows each.",
        "It proposes 7 tokens in one pass.",
        "## Speed\n\nMeasure it.\n\n## Data\n\n2148 answers.",
    ],
)
def test_other_numbers_are_not_taken_for_figures(text: str) -> None:
    assert figure_without_source(text) is None


def test_lines_that_a_file_gives_are_known() -> None:
    text = "Accepted drafts: 3.\n\nAccepted drafts: 4."
    assert figure_without_source(text, {"Accepted drafts: 3."}) == (3, "Accepted drafts: 4.")
    assert figure_without_source(text, {"Accepted drafts: 3.", "Accepted drafts: 4."}) is None


def test_numbers_of_ones_own_have_a_place() -> None:
    card = "# It\n\n## Details\n\n8 layers\n\n## Mine\n\n800 prompts\n\n## Use\n\n9 drafts\n"
    titles = ("Details", "Use")
    assert number_out_of_place(card, titles, {"8 layers", "9 drafts"}) is None
    assert number_out_of_place(card, titles, {"8 layers"}) == (13, "9 drafts")
    assert number_out_of_place("# It\n\n3 layers\n", titles, {"# It"}) == (3, "3 layers")


def test_the_line_of_a_figure_is_counted_from_the_top_of_the_file() -> None:
    header = "---\nspeed: 9x\n---\n"
    block = "<!-- measured: evaluation/a.json -->\n4x as fast\n<!-- end -->\n"
    assert figure_without_source(f"{header}# It\n{block}2.5x faster\n") == (8, "2.5x faster")
    assert figure_without_source(f"{header}# It\n{block}") is None


def test_the_hand_written_card_of_the_prototype_would_be_refused() -> None:
    rows = "| prompts | acceptance length |\n|---|---|\n| tables | 1.86 |"
    assert figure_without_source(rows) == (3, "| tables | 1.86 |")
