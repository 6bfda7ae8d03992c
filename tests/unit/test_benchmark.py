"""One prompt decoded by every method: what is recorded of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_pairs import BLOCK, bench_models
from chat_tokenizers import (
    CHATML,
    DROPS_REASONING,
    OPENS_THINKING,
    byte_tokenizer,
    with_template,
)
from checks import mixed
from hf_dflash.benchmark import Benchmark, Call, variants_of
from hf_dflash.benchmark_data import BenchmarkPrompt
from hf_dflash.benchmark_quality import Judge
from hf_dflash.measurement import Run, Seconds, Settings, check_run
from pairs import scripted, tiny_target

METHODS = ["plain", "dflash", "stock_dflash", "prompt_lookup", "assistant_model"]
PROMPT = BenchmarkPrompt(("Hello there",))
N_NEW = 24


def settings(**overrides: Any) -> Settings:
    return Settings(
        **{
            "max_new_tokens": N_NEW,
            "temperature": 0.0,
            "n_prompts": {"set": 1},
            "repeats": 1,
            "methods": METHODS,
            "block_sizes": [BLOCK],
            "n_lookup_tokens": 3,
            **overrides,
        }
    )


def benchmark(models: Any = None, prompts: Any = (PROMPT,), **overrides: Any) -> Benchmark:
    return Benchmark(models or bench_models(), settings(**overrides), seed=0, judge=Judge(prompts))


def by_method(runs: list[Run]) -> dict[str, Run]:
    return {run.method: run for run in runs}


def test_every_method_makes_the_tokens_of_plain_decoding() -> None:
    runs = by_method(benchmark().run_prompt("set", 0, PROMPT))
    assert list(runs) == METHODS
    for run in runs.values():
        check_run(run, run.method)
        assert run.token_ids == runs["plain"].token_ids
        assert len(run.token_ids) == N_NEW
        assert run.identical is (None if run.method == "plain" else True)
    for method in METHODS[1:]:
        drafted, accepted = sum(runs[method].n_drafted), sum(runs[method].n_accepted)
        assert 0 < accepted < drafted, f"{method}: some drafts accepted and some rejected"


def test_every_method_decodes_by_a_bare_generate() -> None:
    """Inference mode, which users do not ask for, makes drafted decoding the faster one."""
    models = bench_models()
    modes: list[bool] = []
    models.target.register_forward_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))
    benchmark(models).run_prompt("set", 0, PROMPT)
    assert modes
    assert not any(modes)


def test_cycles_tell_where_every_token_came_from() -> None:
    runs = by_method(benchmark().run_prompt("set", 0, PROMPT))
    for run in (runs["dflash"], runs["stock_dflash"]):
        emitted = 1 + sum(n + 1 for n in run.n_accepted)
        assert emitted - len(run.token_ids) in (0, 1)  # the last bonus token may be cut off
        position = 1
        for n, drafted, rejected in zip(
            run.n_accepted, run.n_drafted, run.rejected_ids, strict=True
        ):
            assert len(rejected) == drafted - n
            if rejected and position + n < len(run.token_ids):
                assert rejected[0] != run.token_ids[position + n]
            position += n + 1


def test_our_loop_and_the_stock_one_accept_alike() -> None:
    runs = by_method(benchmark().run_prompt("set", 0, PROMPT))
    ours, stock = runs["dflash"], runs["stock_dflash"]
    # But for the last cycle: the stock loop drafts beyond the end.
    assert ours.n_accepted[:-1] == stock.n_accepted[: len(ours.n_accepted) - 1]


def test_the_cycles_are_those_of_the_statistics() -> None:
    target = tiny_target(vocab_size=360)
    models = bench_models(target=target)
    bench = benchmark(models, methods=["plain", "dflash"])
    input_ids = bench._encode(PROMPT, [])
    drafter, _ = scripted(target, input_ids, N_NEW, mixed, block_size=BLOCK)
    bench.models = replace(models, drafter=drafter)
    run = bench.run_prompt("set", 0, PROMPT)[1]
    drafter.n_calls = 0
    statistics = target.generate(
        input_ids,
        assistant_model=drafter,
        max_new_tokens=N_NEW,
        do_sample=False,
        return_dict_in_generate=True,
    ).statistics
    assert run.n_accepted == statistics.n_accepted
    assert run.n_drafted == statistics.n_drafted
    assert {0, BLOCK - 1} < {*run.n_accepted}


def test_a_draft_that_ends_the_output_is_accepted_in_every_loop() -> None:
    target = tiny_target(vocab_size=360)
    models = bench_models(target=target)
    input_ids = benchmark(models)._encode(PROMPT, [])
    drafter, plain = scripted(target, input_ids, N_NEW, block_size=BLOCK)  # always right
    new = plain[0, input_ids.shape[1] :].tolist()
    stop = next(i for i in range(2, N_NEW) if i % BLOCK in (1, 2) and new[i] not in new[:i])
    target.generation_config.eos_token_id = new[stop]
    bench = benchmark(replace(models, drafter=drafter), methods=METHODS[:3])
    runs = by_method(bench.run_prompt("set", 0, PROMPT))
    for run in (runs["dflash"], runs["stock_dflash"]):
        assert run.token_ids == new[: stop + 1]
        full, rest = divmod(stop, BLOCK)
        assert run.n_accepted == [BLOCK - 1] * full + [rest]


def test_each_second_is_in_one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    for run in benchmark().run_prompt("set", 0, PROMPT):
        seconds = run.seconds
        assert seconds.prefill > 0
        assert seconds.decode > 0
        uses_model = run.method in ("dflash", "stock_dflash", "assistant_model")
        assert (seconds.first_draft > 0) == uses_model
        inside = run.cycle_seconds
        assert 0 < inside.verify < seconds.decode
        assert (inside.draft > 0) == uses_model
        assert inside.draft + inside.verify <= seconds.decode


def test_repeats_and_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benchmark(methods=["plain", "dflash", "prompt_lookup"], repeats=3)
    order: list[str] = []
    decode = bench._decode

    def recording(variant: Any, *args: Any) -> Any:
        order.append(variant.method)
        return decode(variant, *args)

    monkeypatch.setattr(bench, "_decode", recording)
    runs = bench.run_prompt("set", 0, PROMPT)
    assert [(r.repeat, r.method) for r in runs[:4]] == [
        (0, "plain"),
        (0, "dflash"),
        (0, "prompt_lookup"),
        (1, "plain"),
    ]
    assert [order[0], order[3], order[6]] == ["plain", "dflash", "prompt_lookup"]
    assert len({run.key for run in runs}) == 9


def test_block_sizes_are_measured_side_by_side_and_leave_the_drafter_as_it_was() -> None:
    models = bench_models()
    models.drafter.generation_config.num_assistant_tokens = 2
    bench = benchmark(models, methods=["plain", "dflash", "stock_dflash"], block_sizes=[2, 4, 6])
    runs = bench.run_prompt("set", 0, PROMPT)
    most = {run.variant.label: max(run.n_drafted) for run in runs if run.n_drafted}
    assert most == {
        "dflash, block 2": 1,
        "dflash, block 4": 2,  # its own size: its own policy
        "dflash, block 6": 5,
        "stock dflash, block 2": 1,
        "stock dflash, block 4": 3,
        "stock dflash, block 6": 5,
    }
    assert all(run.identical for run in runs if run.method != "plain")
    assert models.drafter.config.block_size == BLOCK
    assert models.drafter.generation_config.num_assistant_tokens == 2


def test_later_turns_follow_the_answer_of_plain_decoding() -> None:
    prompt = BenchmarkPrompt(("Hello", "yes"), language="de")
    bench = benchmark(methods=["plain", "dflash"], template_options={"enable_thinking": True})
    runs = bench.run_prompt("set", 5, prompt)
    assert [(run.turn, run.method) for run in runs] == [
        (0, "plain"),
        (0, "dflash"),
        (1, "plain"),
        (1, "dflash"),
    ]
    answer = bench.models.tokenizer.decode(runs[0].token_ids, skip_special_tokens=True)
    assert runs[2].n_prompt_tokens == bench._encode(prompt, [answer]).shape[1]
    assert runs[2].n_prompt_tokens > runs[0].n_prompt_tokens
    assert all(run.language == "de" and run.thinking and run.prompt_index == 5 for run in runs)


@pytest.mark.parametrize(
    ("template", "options", "thinks"),
    [
        (CHATML, {}, False),
        (CHATML, {"thinking": True}, True),
        (DROPS_REASONING, {}, True),  # it thinks unless told not to
        (DROPS_REASONING, {"enable_thinking": False}, False),
        (OPENS_THINKING, {}, True),
        (None, {}, False),
    ],
)
def test_a_template_that_thinks_unasked_is_known(
    template: str | None, options: dict[str, Any], thinks: bool
) -> None:
    tokenizer = byte_tokenizer()
    if template is not None:
        tokenizer = with_template(tokenizer, template)
    bench = benchmark(bench_models(tokenizer=tokenizer), template_options=options)
    assert bench.thinks(PROMPT) is thinks


def test_a_prompts_own_options_come_before_those_of_all() -> None:
    models = bench_models(tokenizer=with_template(byte_tokenizer(), DROPS_REASONING))
    bench = benchmark(
        models, methods=["plain", "dflash"], template_options={"enable_thinking": False}
    )
    thinking = replace(PROMPT, template_options={"enable_thinking": True})
    off, on = (bench.run_prompt("set", 0, prompt) for prompt in (PROMPT, thinking))
    assert [{run.thinking for run in runs} for runs in (off, on)] == [{False}, {True}]
    n_closed = len(models.tokenizer("<think>\n\n</think>\n\n").input_ids)
    for without, with_thinking in zip(off, on, strict=True):
        assert without.n_prompt_tokens == with_thinking.n_prompt_tokens + n_closed


def test_a_difference_is_recorded_with_its_place_and_gap() -> None:
    bench = benchmark(methods=["plain", "dflash"])
    plain = bench.run_prompt("set", 0, PROMPT)[0]
    prompt_ids = bench._encode(PROMPT, [])
    common = torch.cat([prompt_ids, torch.tensor([plain.token_ids[:7]])], dim=1)
    logits = bench.models.target(common).logits[0, -1].detach()
    first, second = logits.topk(2).values.tolist()
    decode = bench._decode

    def one_token_off(variant: Any, call: Any, n: int) -> Any:
        ids, clock = decode(variant, call, n)
        if variant.method == "dflash":
            ids[7] = int(logits.argmin())
        return ids, clock

    bench._decode = one_token_off  # type: ignore[method-assign]
    run = bench.run_prompt("set", 0, PROMPT)[1]
    assert (run.identical, run.first_difference) == (False, 7)
    assert run.top2_gap == pytest.approx(first - second)
    assert run.distance == pytest.approx(first - float(logits.min()))
    assert run.distance > 2 * run.rounding > 0
    assert run.is_near_tie is False


def test_an_output_that_goes_on_behind_the_end_is_no_near_tie() -> None:
    bench = benchmark(methods=["plain", "dflash"])
    decode = bench._decode

    def cut(variant: Any, call: Any, n: int) -> Any:
        ids, clock = decode(variant, call, n)
        return (ids[:9] if variant.method == "plain" else ids), clock

    bench._decode = cut  # type: ignore[method-assign]
    run = bench.run_prompt("set", 0, PROMPT)[1]
    assert (run.first_difference, run.distance, run.rounding) == (9, None, 0.0)
    assert run.is_near_tie is False


@pytest.mark.parametrize("penalty", [None, 1.3])
def test_rows_are_those_that_each_method_chose_from(penalty: float | None) -> None:
    models = bench_models()
    models.target.generation_config.repetition_penalty = penalty
    bench = benchmark(models)
    call = Call("set", 0, 0, 0, PROMPT, bench._encode(PROMPT, []))
    for variant in bench.variants:
        made = bench._run(variant, call)
        assert any(len(rows) > 1 for rows in made.target_rows[1:]) == (variant.method != "plain")
        for index in (0, 1, 9, N_NEW - 1):
            chosen = int(bench._row(made, call, index).argmax())
            assert chosen == made.run.token_ids[index], (variant.label, index)


def test_sampling_is_reproducible_and_not_compared() -> None:
    options = {"methods": ["plain", "dflash"], "temperature": 1.0, "repeats": 2}
    first, again = (benchmark(**options).run_prompt("set", 0, PROMPT) for _ in range(2))
    assert [run.token_ids for run in first] == [run.token_ids for run in again]
    assert first[0].token_ids != first[2].token_ids, "another repeat, another draw"
    assert all(run.identical is None for run in first)


def test_sampling_is_from_the_target_s_own_distribution() -> None:
    models = bench_models()
    bench = benchmark(models, methods=["plain", "dflash"], temperature=1.0)
    before = [run.token_ids for run in bench.run_prompt("set", 0, PROMPT)]
    asked = {"repetition_penalty": 1.8, "top_k": 1, "typical_p": 0.1, "min_p": 0.9}
    asked |= {"epsilon_cutoff": 0.5, "eta_cutoff": 0.5, "no_repeat_ngram_size": 1}
    for name, value in asked.items():
        setattr(models.target.generation_config, name, value)
    assert [run.token_ids for run in bench.run_prompt("set", 0, PROMPT)] == before


def test_without_stops_every_run_has_the_same_length() -> None:
    models = bench_models()
    models.target.generation_config.eos_token_id = [70, 80, 90, 0]
    short = benchmark(models).run_prompt("set", 0, PROMPT)
    assert {len(run.token_ids) for run in short} == {1}
    assert all(run.identical is not False for run in short)
    whole = benchmark(models, stops_at_eos=False).run_prompt("set", 0, PROMPT)
    assert {len(run.token_ids) for run in whole} == {N_NEW}


def test_warming_up_runs_every_method_once() -> None:
    bench = benchmark()
    calls: list[str] = []
    generate = bench.models.target.generate

    def counted(**options: Any) -> Any:
        calls.append(str(options["max_new_tokens"]))
        return generate(**options)

    bench.models.target.generate = counted
    expected_s = bench.warm_up(PROMPT)
    assert calls == ["16"] * len(METHODS)
    assert expected_s > 0


def test_the_expected_time_is_that_of_outputs_as_long_as_they_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = benchmark(methods=["plain", "dflash"], max_new_tokens=61)
    clock = SimpleNamespace(seconds=Seconds(prefill=1.0, first_draft=0.5, decode=2.0))
    monkeypatch.setattr(bench, "_decode", lambda *_: ([5] * 16, clock))
    assert bench.warm_up(PROMPT) == 2 * (1.0 + 0.5 + 2.0 * 60 / 15)
    monkeypatch.setattr(bench, "_decode", lambda *_: ([5], clock))  # ended at once
    assert bench.warm_up(PROMPT) == 2 * (1.0 + 0.5 + 2.0 * 60)


def test_the_assistants_schedule_begins_anew_in_every_call() -> None:
    models = bench_models()
    models.assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    runs = benchmark(models, methods=["plain", "assistant_model"], repeats=2)
    first, second = (r for r in runs.run_prompt("set", 0, PROMPT) if r.method != "plain")
    assert first.n_drafted == second.n_drafted


def test_only_the_last_turn_is_judged() -> None:
    prompt = BenchmarkPrompt(("one", "two"), answer="7")
    bench = benchmark(prompts=[prompt], methods=["plain", "dflash"])
    assert [run.correct for run in bench.run_prompt("set", 0, prompt)] == [None, None, False, False]


class PlainTokenizer:
    chat_template = None
    pad_token_id = None

    def __call__(self, text: str, return_tensors: str) -> Any:
        assert return_tensors == "pt"
        return {"input_ids": torch.tensor([[ord(c) for c in text]], dtype=torch.long)}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def test_without_a_chat_template_the_text_goes_on() -> None:
    bench = benchmark(bench_models(tokenizer=PlainTokenizer()))
    assert bench._encode(BenchmarkPrompt(("ab", "c")), ["x"]).tolist() == [
        [ord(c) for c in "ab\n\nx\n\nc"]
    ]


def test_a_prompt_without_a_token_is_refused() -> None:
    bench = benchmark(bench_models(tokenizer=PlainTokenizer()))
    with pytest.raises(ValueError, match=r"PlainTokenizer of the target must make .* ''"):
        bench.run_prompt("set", 0, BenchmarkPrompt(("",)))


def test_methods_without_blocks_come_once() -> None:
    labels = [v.label for v in variants_of(settings(block_sizes=[4, 8]))]
    assert labels == [
        "plain",
        "dflash, block 4",
        "dflash, block 8",
        "stock dflash, block 4",
        "stock dflash, block 8",
        "prompt lookup",
        "assistant model",
    ]
