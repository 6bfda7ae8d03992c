"""The sentence on the drafter against the faster of two plain decodings."""

from __future__ import annotations

from hf_dflash.best_plain import best_plain_sentence
from hf_dflash.measurement import Run, Seconds
from measurements import measurement, pair_of_runs, run, two_block_sizes


def other_plain(seconds: float, method: str = "plain_bfloat16") -> Run:
    return run(method=method, seconds=Seconds(0.0, 0.0, seconds))


def test_the_faster_dtype_is_named_and_the_drafter_compared_with_it() -> None:
    sentence = best_plain_sentence(measurement([*pair_of_runs(2.0), other_plain(1.8)]))
    assert sentence == (
        "Plain decoding is faster in bfloat16 (median 6.7 tokens per second) than in float32 "
        "(5.0). Compared with the faster one, the drafter in float32 is 1.50 times as fast with "
        "7 drafts a cycle (over all seconds 1.50)."
    )


def test_where_the_own_dtype_is_the_faster_one_the_speedup_stays() -> None:
    sentence = best_plain_sentence(measurement([*two_block_sizes(), other_plain(4.8)]))
    assert sentence == (
        "Plain decoding is faster in float32 (median 10.0 tokens per second) than in bfloat16 "
        "(2.5). Compared with the faster one, the drafter in float32 is 0.80 times as fast with "
        "7 drafts a cycle (over all seconds 0.80) and 1.60 times as fast with 2 drafts a cycle "
        "(over all seconds 1.60)."
    )


def test_without_a_second_plain_decoding_there_is_nothing_to_say() -> None:
    assert best_plain_sentence(measurement(pair_of_runs())) is None
    assert best_plain_sentence(measurement([other_plain(1.0)])) is None


def test_without_a_drafter_the_dtypes_are_told_still() -> None:
    plain, _ = pair_of_runs(2.0)
    sentence = best_plain_sentence(measurement([plain, other_plain(1.2)]))
    assert sentence == (
        "Plain decoding is faster in bfloat16 (median 10.0 tokens per second) than in float32 "
        "(5.0)."
    )
