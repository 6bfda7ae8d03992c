from __future__ import annotations

from pathlib import Path

import pytest

from hf_dflash.measurement import (
    CycleSeconds,
    Run,
    Seconds,
    Summary,
    read_measurement,
    write_measurement,
)
from hf_dflash.measurement_summary import acceptance, summarise
from measurements import measurement, one_token_runs, pair_of_runs, run


def drafted(summary: Summary, block_size: int = 8) -> object:
    return next(m for m in summary.overall if m.block_size == block_size)


def test_macro_is_over_outputs_and_micro_over_cycles() -> None:
    runs = [
        run(n_accepted=[3], n_drafted=[7]),
        run(prompt_index=1, n_accepted=[0, 1, 0], n_drafted=[7, 7, 7]),
        run(prompt_index=2, n_accepted=[], n_drafted=[]),  # ended at its first token
        *pair_of_runs(repeat=1)[:1],
    ]
    found = acceptance(runs)
    assert found.macro == pytest.approx(((3 + 1) + (1 / 3 + 1)) / 2)
    assert found.micro == pytest.approx((4 + 1 + 2 + 1) / 4)
    assert found.n_cycles == 4
    assert found.histogram == [2, 1, 0, 1, 0, 0, 0, 0]
    assert found.by_slot == [0.5, 0.25, 0.25, 0, 0, 0, 0]


def test_a_slot_counts_where_it_was_drafted() -> None:
    found = acceptance([run(n_accepted=[2, 1], n_drafted=[2, 1])])
    assert found.histogram == [0, 1, 1]
    assert found.by_slot == [1.0, 1.0]


def test_nothing_drafted_is_no_acceptance() -> None:
    assert acceptance([run(method="plain")]) is None
    assert acceptance([run(n_accepted=[], n_drafted=[])]) is None
    assert acceptance([run(n_accepted=[0, 0], n_drafted=[0, 0])]).by_slot == []


def test_acceptance_along_the_output_counts_a_cycle_where_it_begins() -> None:
    # 33 tokens in parts of 3: cycles begin at 1, 3 and 9.
    found = acceptance([run(n_accepted=[1, 5, 2], n_drafted=[7, 7, 7])], longest=33)
    parts = [(p.start, p.stop, p.n_cycles, p.acceptance_length) for p in found.by_position]
    assert parts == [(0, 3, 1, 2), (3, 6, 1, 6), (9, 12, 1, 3)]


def test_ratios_are_taken_within_a_prompt() -> None:
    # The machine is ten times slower for the third prompt; within each the drafter helps.
    runs: list[Run] = []
    for i, (speedup, slow) in enumerate([(1.0, 1), (2.0, 1), (3.0, 10)]):
        pair = pair_of_runs(speedup, prompt_index=i)
        runs += [
            run(
                prompt_index=i,
                method=r.method,
                seconds=Seconds(*(slow * s for s in (0.1, 0.1, r.seconds.total - 0.2))),
            )
            for r in pair
        ]
    summary = drafted(summarise(runs))
    assert (summary.speedup.low, summary.speedup.median, summary.speedup.high) == (
        pytest.approx(1.5),
        pytest.approx(2.0),
        pytest.approx(2.5),
    )
    assert summary.speedup.n == 3
    assert summary.speedup_total == pytest.approx((1.2 + 2.4 + 36) / (1.2 + 1.2 + 12))
    assert summary.tokens_per_s.median == pytest.approx(10.0)


def test_speedup_of_decoding_leaves_prompt_and_first_draft_out() -> None:
    runs = [
        run(method="plain", seconds=Seconds(5.0, 0.0, 3.0)),
        run(seconds=Seconds(5.0, 2.0, 1.0)),
    ]
    summary = drafted(summarise(runs))
    assert summary.speedup.median == pytest.approx(1.0)
    assert summary.speedup_decode.median == pytest.approx(3.0)
    assert summary.decode_tokens_per_s.median == pytest.approx(12.0)


def test_repeats_of_a_prompt_count_once_and_show_the_noise() -> None:
    runs = [r for i, s in enumerate([1.0, 2.0, 9.0]) for r in pair_of_runs(s, repeat=i)]
    runs += pair_of_runs(4.0, prompt_index=1)
    summary = drafted(summarise(runs))
    assert summary.speedup.n == 2
    assert summary.speedup.median == pytest.approx(3.0)  # of 2 and 4
    assert summary.repeat_noise == pytest.approx((9 - 1) / 2)
    assert (summary.n_prompts, summary.n_runs) == (2, 4)


def test_outputs_of_one_token_have_no_rate_of_decoding(tmp_path: Path) -> None:
    """Their call takes time and counts; what a decode loop would add is next to nothing."""
    alone = summarise(one_token_runs())
    for summary in alone.overall:
        assert summary.decode_tokens_per_s is None
        assert summary.tokens_per_s.median == pytest.approx(10.0)
        assert summary.time.decode == 0.0
    assert drafted(alone).speedup.median == pytest.approx(1.0)
    assert drafted(alone).speedup_decode is None
    assert drafted(alone).acceptance is None
    among = drafted(summarise(pair_of_runs(3.0) + one_token_runs(prompt_index=1)))
    assert among.speedup.n == 2
    assert (among.speedup_decode.median, among.speedup_decode.n) == (pytest.approx(3.3), 1)
    assert among.decode_tokens_per_s.n == 1
    assert among.acceptance.n_cycles == 3
    # JSON has neither NaN nor infinity; the file would refuse them.
    write_measurement(measurement(one_token_runs()), tmp_path / "bench.json")
    assert read_measurement(tmp_path / "bench.json").runs == one_token_runs()


def test_one_of_a_pair_may_stop_at_the_first_token() -> None:
    plain, _ = pair_of_runs()
    _, short = one_token_runs()
    assert drafted(summarise([plain, short])).speedup_decode is None


def test_without_plain_decoding_there_is_no_ratio() -> None:
    summary = drafted(summarise([run()]))
    assert summary.speedup is None
    assert summary.speedup_total is None
    assert summary.repeat_noise is None


def test_another_number_of_tokens_is_counted() -> None:
    plain = run(method="plain", token_ids=list(range(6)))
    assert drafted(summarise([plain, run()])).speedup.median == pytest.approx(2.0)


def test_differences_from_plain_decoding_are_listed_with_their_gap() -> None:
    runs = [run(), run(prompt_index=1, identical=False, first_difference=4, top2_gap=0.03)]
    identity = drafted(summarise(runs)).identity
    assert (identity.n_compared, identity.n_identical) == (2, 1)
    (difference,) = identity.differences
    assert (difference.prompt_index, difference.first_difference) == (1, 4)
    assert difference.top2_gap == 0.03
    assert drafted(summarise([run(identical=None)])).identity is None


def test_answers_that_no_metric_judged_do_not_count() -> None:
    runs = [run(correct=True), run(repeat=1, correct=False), run(repeat=2)]
    quality = drafted(summarise(runs)).quality
    assert (quality.n_judged, quality.n_correct) == (2, 1)


def test_shares_of_time_add_up() -> None:
    time = drafted(summarise([run(), run(repeat=1, cycle_seconds=None)])).time
    assert time.prefill + time.first_draft + time.decode == pytest.approx(1.0)
    assert (time.draft, time.verify) == (pytest.approx(0.2 / 1.2), pytest.approx(0.5 / 1.2))
    assert drafted(summarise([run(cycle_seconds=None)])).time.draft is None
    assert drafted(summarise([run(cycle_seconds=CycleSeconds(0.0, 1.0))])).time.draft == 0.0


def test_turns_of_a_conversation_are_one_prompt() -> None:
    runs = [r for turn in (0, 1) for r in pair_of_runs(turn=turn)]
    runs += [*pair_of_runs(prompt_index=1), *pair_of_runs(prompt_index=1, dataset="mt_bench")]
    summary = drafted(summarise(runs))
    assert (summary.n_prompts, summary.n_turns, summary.n_runs) == (3, 4, 4)
    assert summary.speedup.n == 4, "each turn is compared for itself"


def test_slices_hold_the_methods_of_their_runs() -> None:
    runs = pair_of_runs() + pair_of_runs(3.0, dataset="mt_bench", language="de", turn=1)
    runs += [run(dataset="mt_bench", thinking=True, block_size=4)]
    slices = summarise(runs).slices
    assert sorted(slices) == ["dataset", "language", "thinking", "turn"]
    assert {k: [m.block_size for m in v] for k, v in slices["dataset"].items()} == {
        "gsm8k": [None, 8],
        "mt_bench": [None, 8, 4],
    }
    assert slices["language"]["de"][1].speedup.median == pytest.approx(3.0)
    assert [m.block_size for m in slices["thinking"]["on"]] == [4]
    assert sorted(slices["turn"]) == ["1", "2"]


def two_dtypes(other_s: float) -> list[Run]:
    """Two prompts, drafted in 1.2 s, decoded plainly in 2.4 s and in another dtype in two times."""
    runs: list[Run] = []
    for i, seconds in enumerate([other_s, other_s + 0.6]):
        runs += pair_of_runs(2.0, prompt_index=i)
        runs.append(
            run(method="plain_bfloat16", prompt_index=i, seconds=Seconds(0.0, 0.0, seconds))
        )
    return runs


def test_the_faster_plain_decoding_is_what_the_drafter_is_compared_with() -> None:
    drafter = drafted(summarise(two_dtypes(1.2)))
    assert (drafter.speedup.median, drafter.speedup_total) == pytest.approx((2.0, 2.0))
    assert drafter.speedup_best.median == pytest.approx((1.0 + 1.5) / 2)
    assert drafter.speedup_best_total == pytest.approx((1.2 + 1.8) / 2.4)
    drafter = drafted(summarise(two_dtypes(3.6)))
    assert (drafter.speedup_best.median, drafter.speedup_best_total) == pytest.approx((2.0, 2.0))


def test_plain_decoding_in_another_dtype_is_compared_with_the_other_and_drafts_nothing() -> None:
    plain, _, other = summarise(two_dtypes(1.2)).overall
    assert other.speedup.median == pytest.approx((2.4 / 1.2 + 2.4 / 1.8) / 2)
    assert (other.speedup_best, other.acceptance, other.identity) == (None, None, None)
    assert plain.speedup is None


def test_with_one_plain_decoding_there_is_no_better_one() -> None:
    assert drafted(summarise(pair_of_runs())).speedup_best is None
