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
        "Over all seconds plain decoding is 1.33 times as fast in bfloat16 as in float32. Compared "
        "with plain bfloat16, the drafter in float32 is 1.50 times as fast with 7 drafts a cycle "
        "(over all seconds 1.50)."
    )


def test_where_the_own_dtype_is_the_faster_one_the_speedup_stays() -> None:
    sentence = best_plain_sentence(measurement([*two_block_sizes(), other_plain(4.8)]))
    assert sentence == (
        "Over all seconds plain decoding is 4.00 times as fast in float32 as in bfloat16. Compared "
        "with plain float32, the drafter in float32 is 0.80 times as fast with 7 drafts a cycle "
        "(over all seconds 0.80) and 1.60 times as fast with 2 drafts a cycle (over all seconds "
        "1.60)."
    )


def test_without_a_second_plain_decoding_there_is_nothing_to_say() -> None:
    assert best_plain_sentence(measurement(pair_of_runs())) is None
    assert best_plain_sentence(measurement([other_plain(1.0)])) is None


def test_without_a_drafter_the_dtypes_are_told_still() -> None:
    plain, _ = pair_of_runs(2.0)
    sentence = best_plain_sentence(measurement([plain, other_plain(1.2)]))
    assert sentence == (
        "Over all seconds plain decoding is 2.00 times as fast in bfloat16 as in float32."
    )


def test_what_is_faster_over_all_seconds_is_said_of_all_seconds() -> None:
    runs = []
    for i, (own, other) in enumerate([(1.0, 1.2), (1.0, 1.2), (12.0, 6.0)]):
        runs += [
            run(method="plain", prompt_index=i, seconds=Seconds(0.0, 0.0, own)),
            run(prompt_index=i, seconds=Seconds(0.0, 0.0, own / 2)),
            run(method="plain_bfloat16", prompt_index=i, seconds=Seconds(0.0, 0.0, other)),
        ]
    assert best_plain_sentence(measurement(runs)) == (
        "Over all seconds plain decoding is 1.67 times as fast in bfloat16 as in float32. Compared "
        "with plain bfloat16, the drafter in float32 is 2.40 times as fast with 7 drafts a cycle "
        "(over all seconds 1.20)."
    )
