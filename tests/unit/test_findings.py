"""Sentences of a measurement: each figure in them is worked out by hand."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from hf_dflash.benchmark_view import show
from hf_dflash.findings import (
    datasets_sentence,
    is_lossless,
    method_label,
    n_drafts,
    speed_sentence,
    spread_sentence,
    target_words,
    text_sentence,
    told_summaries,
)
from hf_dflash.measurement import DrafterInfo, Measurement, Seconds, TargetInfo, Variant
from hf_dflash.report import report_html
from measurements import measurement, pair_of_runs, provenance, run, two_block_sizes


def with_policy(runs: Any = None, block_size: int = 8, **policy: float) -> Measurement:
    drafter = DrafterInfo("d", "ab" * 32, "dflash", block_size, 2, 1000, [], policy)
    return measurement(runs, provenance=provenance(drafter=drafter))


def test_the_trained_block_and_the_fastest_drafts_are_told_in_one_sentence() -> None:
    assert speed_sentence(measurement(two_block_sizes())) == (
        "With the drafter, t writes 0.80 times as fast as without it, which is slower, with the 7 "
        "drafts of its trained block (3.67 tokens a cycle; over all seconds 0.80); with 2 drafts "
        "a cycle, the fastest measured, 1.60 times as fast (over all seconds 1.60): use "
        "num_assistant_tokens=2."
    )


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        (pair_of_runs(2.0), "; over all seconds 2.00)."),
        (two_block_sizes(2.0, 1.5), "2.00); no other number of drafts that was measured is fas"),
        (two_block_sizes(0.5, 0.75), "0.75 times as fast (over all seconds 0.75), slower too (num"),
    ],
)
def test_the_fastest_is_told_only_where_it_is_another(runs: Any, told: str) -> None:
    assert told in speed_sentence(measurement(runs))


def test_more_drafts_than_the_block_has_need_another_config() -> None:
    faster = run(block_size=16, seconds=Seconds(0.0, 0.0, 0.3))
    told = speed_sentence(measurement([*pair_of_runs(), faster]))
    assert "with 15 drafts a cycle, the fastest measured, 8.00 times as fast" in told
    assert told.endswith("use block_size=16 in its config.")


def test_seconds_together_are_not_the_median_over_prompts() -> None:
    long = {"prompt_index": 1, "token_ids": list(range(120))}
    runs = [*pair_of_runs(2.0), *pair_of_runs(3.0, prompt_index=2), *pair_of_runs(0.5, **long)]
    whole = measurement(runs)
    assert "writes 2.00 times as fast" in speed_sentence(whole)
    assert "over all seconds 1.83" in speed_sentence(whole)  # (2.4 + 3.6 + 0.6) / (3 * 1.2)
    assert spread_sentence(whole) == (
        "Median of 3 prompts, the middle half of them between 1.25 and 2.50."
    )


def with_a_conversation() -> Measurement:
    """Two prompts, of which one has two turns."""
    first = [r for turn in (0, 1) for r in pair_of_runs(turn=turn)]
    return measurement([*first, *pair_of_runs(prompt_index=1)])


def test_turns_are_not_taken_for_prompts() -> None:
    whole = with_a_conversation()
    assert spread_sentence(whole) == (
        "Median of 3 turns of 2 prompts, the middle half of them between 2.00 and 2.00."
    )
    console = Console(file=io.StringIO(), width=200)
    show(whole, console)
    said = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "Prompts: gsm8k 2 (3 turns)." in said
    html = report_html(whole)
    assert '<td data-label="prompts">2 (3 turns)</td>' in html
    assert '<td data-label="prompts">1</td>' in html, "of the second turn"


def test_data_sets_are_parted_by_what_their_table_says() -> None:
    speeds = {"a": 2.0, "b": 1.004, "c": 0.5, "d": 1.25, "e": 0.996}
    runs = [r for name, x in speeds.items() for r in pair_of_runs(x, dataset=name)]
    assert datasets_sentence(measurement(runs)) == (
        "Faster than plain decoding on: a (2.00x) and d (1.25x); as fast as it on: b (1.00x) and "
        "e (1.00x); slower than it on: c (0.50x)."
    )
    two = [r for name in "ab" for r in two_block_sizes(dataset=name)]
    assert datasets_sentence(measurement(two)) == (
        "With 7 drafts, slower than plain decoding on: a (0.80x) and b (0.80x). "
        "With 2 drafts, faster than plain decoding on: a (1.60x) and b (1.60x)."
    )
    assert datasets_sentence(measurement([run()])) is None


def test_a_policy_is_seen_in_every_name_of_a_method() -> None:
    policy = {"num_assistant_tokens": 2, "assistant_confidence_threshold": 0.4}
    whole = with_policy([*two_block_sizes(), run(method="stock_dflash")], **policy)
    labels = [method_label(whole, s.variant) for s in whole.summary.overall]
    assert labels == [
        "plain",
        "dflash, block 3, confidence 0.4",
        "dflash, block 8, 2 drafts, confidence 0.4",
        "stock dflash, block 8",
    ]
    page = report_html(whole)
    console = Console(file=io.StringIO(), width=140)
    show(whole, console)
    assert all(f"<td>{name}</td>" in page for name in labels)
    assert "dflash B8, 2 drafts, confidence 0.4 " in console.file.getvalue()  # type: ignore[attr-defined]
    assert "num_assistant_tokens 2, assistant_confidence_threshold 0.4" in page


def test_the_default_policy_is_not_told() -> None:
    whole = with_policy(pair_of_runs(), num_assistant_tokens=7)
    assert method_label(whole, Variant("dflash", block_size=8)) == "dflash, block 8"


def test_a_block_that_drafts_as_few_as_the_policy_is_no_other_number_of_drafts() -> None:
    whole = with_policy(two_block_sizes(), num_assistant_tokens=2)
    assert n_drafts(whole, Variant("dflash", block_size=8)) == 2
    assert [s.block_size for s in told_summaries(whole)] == [8]
    assert "with 2 drafts a cycle (3.67" in speed_sentence(whole)


def test_a_block_that_was_not_trained_is_not_called_so() -> None:
    sentence = speed_sentence(with_policy(pair_of_runs(), block_size=16))
    assert "with 7 drafts a cycle (3.67 tokens a cycle" in sentence


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (TargetInfo("org/m", "12ab"), "org/m at 12ab"),
        (TargetInfo("org/m"), "org/m (commit not known)"),
        (TargetInfo("m-q4"), "m-q4 (a local copy, which may differ from the model as published)"),
    ],
)
def test_a_target_is_told_as_it_was_loaded(target: TargetInfo, told: str) -> None:
    assert target_words(target) == told


WHOLE = "the one output is token for token what the target writes without the drafter"
PARTED = (
    "0 of 1 outputs are token for token what the target writes without the drafter; one differs "
    "from some token on, where the target's two best logits are at most 3 apart"
)


@pytest.mark.parametrize(
    ("parted", "said"),
    [
        ((), f"The text is unchanged: {WHOLE}."),
        (
            (3,),
            f"The text is not always the same: with 2 drafts, {PARTED}. With 7 drafts, {WHOLE}.",
        ),
        (
            (8,),
            f"The text is not always the same: with 7 drafts, {PARTED}. With 2 drafts, {WHOLE}.",
        ),
        ((3, 8), f"The text is not always the same: {PARTED}."),
    ],
)
def test_the_text_is_unchanged_only_if_it_is_with_the_drafts_that_are_advised(
    parted: tuple[int, ...], said: str
) -> None:
    differs = {"identical": False, "first_difference": 1, "top2_gap": 3.0}
    whole = measurement(
        [
            dataclasses.replace(r, **differs) if r.block_size in parted else r
            for r in two_block_sizes()
        ]
    )
    assert "use num_assistant_tokens=2" in speed_sentence(whole)
    assert text_sentence(whole) == said
    assert is_lossless(whole) == (not parted)
