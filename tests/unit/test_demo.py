"""The demo's measuring functions, on a tiny pair whose accepted drafts are known."""

import json
import math
from dataclasses import asdict, fields, replace

import pytest
import torch

from hf_dflash import demo
from hf_dflash.commands import read_prompts
from hf_dflash.demo import Comparison, Decoding, Difference, Measures, Pair, Timing
from pairs import random_drafter, scripted, tiny_target

N_NEW = 20
JSON_KEYS = [
    "identical",
    "acceptance_length",
    "tokens_per_s_plain",
    "tokens_per_s_drafted",
    "speedup",
    "speedup_vs_best_plain",
    "target_forwards",
    "n_tokens",
]


class LetterTokenizer:
    """Token 7 is chr(7 + 33); no chat template."""

    chat_template = None

    def __call__(self, text, return_tensors):
        assert return_tensors == "pt"
        return {"input_ids": torch.tensor([[ord(letter) - 33 for letter in text]])}

    def decode(self, token_ids, **_):
        return "".join(chr(i + 33) for i in token_ids)


class RecordingView:
    """Keeps what a run tells."""

    def __init__(self):
        self.events = []

    def __getattr__(self, name):
        return lambda *args: self.events.append((name, args))


@pytest.fixture
def pair():
    target, tokenizer = tiny_target(), LetterTokenizer()
    input_ids = tokenizer("HELLO", "pt")["input_ids"]
    drafter, _ = scripted(target, input_ids, N_NEW, lambda cycle: cycle % 3)
    return Pair(target, tokenizer, drafter, "float32")


def test_decode_streams_cycles_and_counts_them(pair):
    input_ids = demo.encode(pair, "HELLO")
    streamed = []
    decoding = demo.decode(
        pair, input_ids, N_NEW, lambda ids, n: streamed.append((list(ids), n)), drafted=True
    )
    assert [i for ids, _ in streamed for i in ids] == list(decoding.token_ids)
    assert [n for _, n in streamed[1:]] == list(decoding.n_accepted)
    assert {0, 1, 2} <= set(decoding.n_accepted)
    assert decoding.target_forwards == len(streamed) < N_NEW == len(decoding.token_ids)


def test_plain_decoding_streams_token_by_token(pair):
    streamed = []
    decoding = demo.decode(
        pair,
        demo.encode(pair, "HELLO"),
        N_NEW,
        lambda ids, n: streamed.append((*ids, n)),
        drafted=False,
    )
    assert streamed == [(i, 0) for i in decoding.token_ids]
    assert (decoding.target_forwards, decoding.n_accepted) == (N_NEW, ())
    assert decoding.tokens_per_s == N_NEW / decoding.time_s


def test_a_run_tells_everything_in_order(pair):
    view = RecordingView()
    report = demo.run(
        lambda _: pair,
        ["HELLO"],
        dtype="float32",
        max_new_tokens=N_NEW,
        view=view,
        time_both=False,
    )
    names = [name for name, _ in view.events]
    kinds = [name for i, name in enumerate(names) if name != "tokens" or names[i - 1] != "tokens"]
    assert kinds == [
        "loading",
        "start_prompt",
        "start_decoding",
        "tokens",
        "start_decoding",
        "tokens",
        "end_prompt",
    ]
    assert [args[0] for name, args in view.events if name == "start_decoding"] == [False, True]
    assert report.overall.identical
    assert report.overall.speedup_vs_best_plain is None
    assert report.timings == ()
    assert report.num_assistant_tokens == 7, "the block less its anchor"


def test_a_dtype_that_is_asked_for_is_used_and_compared_with_the_other(pair, monkeypatch):
    speeds = {"float32": Timing("float32", 30.0, 20.0), "bfloat16": Timing("bfloat16", 20.0, 28.0)}
    monkeypatch.setattr(demo, "time_pairs", lambda pairs, _: tuple(speeds[p.dtype] for p in pairs))
    report = demo.run(
        lambda name: Pair(pair.target, pair.tokenizer, pair.drafter, name),
        ["HELLO"],
        dtype="float32",
        max_new_tokens=N_NEW,
        view=RecordingView(),
    )
    assert report.dtype == "float32"
    assert report.overall.speedup_vs_best_plain == pytest.approx(report.overall.speedup)


def test_auto_uses_the_dtype_in_which_drafting_is_fastest(pair, monkeypatch):
    speeds = {"float32": Timing("float32", 30.0, 20.0), "bfloat16": Timing("bfloat16", 20.0, 28.0)}
    monkeypatch.setattr(demo, "time_pairs", lambda pairs, _: tuple(speeds[p.dtype] for p in pairs))
    view = RecordingView()
    report = demo.run(
        lambda name: Pair(pair.target, pair.tokenizer, pair.drafter, name),
        ["HELLO"],
        dtype="auto",
        max_new_tokens=4,
        view=view,
    )
    assert report.dtype == "bfloat16"
    assert report.overall.speedup_vs_best_plain == pytest.approx(report.overall.speedup / 1.5)
    assert ("timed", (tuple(speeds.values()), "bfloat16")) in view.events


def test_time_pairs_times_every_pair_both_ways(pair):
    other = Pair(pair.target, pair.tokenizer, random_drafter(pair.target), "bfloat16")
    timings = demo.time_pairs([pair, other], "HELLO")
    assert [timing.dtype for timing in timings] == ["float32", "bfloat16"]
    assert all(t.tokens_per_s_plain > 0 and t.tokens_per_s_drafted > 0 for t in timings)


def decode_at(speeds, asked):
    """A `decode` whose speed is told by (drafted, most drafts a cycle)."""

    def decode(pair, _input_ids, max_new_tokens, *, drafted):
        asked.append((max_new_tokens, drafted, pair.n_drafts))
        return Decoding((1,), 1 / speeds.get((drafted, pair.n_drafts), 1.0), 1, ())

    return decode


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({(False, None): 2.0, (True, None): 4.0, (True, 3): 5.0}, Timing("float32", 2.0, 5.0, 3)),
        ({(False, None): 2.0, (True, None): 4.0, (True, 3): 3.0}, Timing("float32", 2.0, 4.0)),
    ],
)
def test_few_drafts_are_used_where_they_are_faster(pair, monkeypatch, speeds, expected):
    monkeypatch.setattr(demo, "decode", decode_at(speeds, []))
    assert demo.time_pairs([pair], "HELLO") == (expected,)


def test_the_number_of_a_policy_is_kept(pair, monkeypatch):
    asked = []
    monkeypatch.setattr(demo, "decode", decode_at({(True, 3): 9.0}, asked))
    monkeypatch.setattr(pair.drafter.generation_config, "num_assistant_tokens", 5)
    assert demo.time_pairs([pair], "HELLO")[0].n_drafts is None
    assert {n_drafts for _, _, n_drafts in asked} == {None}
    assert pair.most_drafts == 5


def test_the_fastest_number_of_drafts_is_what_is_run(monkeypatch):
    target, tokenizer = tiny_target(), LetterTokenizer()
    input_ids = tokenizer("HELLO", "pt")["input_ids"]
    drafter, _ = scripted(target, input_ids, N_NEW, lambda _: 7)
    pair = Pair(target, tokenizer, drafter, "float32")
    timing = Timing("float32", 2.0, 5.0, 3)
    monkeypatch.setattr(demo, "time_pairs", lambda *_: (timing, Timing("bfloat16", 2.0, 4.0)))
    report = demo.run(
        lambda _: pair, ["HELLO"], dtype="auto", max_new_tokens=N_NEW, view=RecordingView()
    )
    accepted = report.comparisons[0].drafted.n_accepted
    assert max(accepted) == 3 == report.num_assistant_tokens


@pytest.mark.parametrize(("limit_s", "n_rounds"), [(1e9, demo.TIMING_ROUNDS), (0.0, 1)])
def test_a_busy_machine_gets_fewer_rounds(pair, monkeypatch, limit_s, n_rounds):
    asked = []
    monkeypatch.setattr(demo, "TIMING_LIMIT_S", limit_s)
    monkeypatch.setattr(demo, "decode", decode_at({}, asked))
    demo.time_pairs([pair], "HELLO")
    assert asked.count((demo.TIMING_TOKENS, True, None)) == n_rounds


@pytest.mark.parametrize(
    ("plain", "drafted", "expected"),
    [
        ((5, 6, 7), (5, 9, 7), (1, 6, 9)),
        ((5, 6), (5, 6, 7), (2, None, 7)),
        ((5,), (), (0, 5, None)),
    ],
)
def test_find_difference_measures_the_gap_after_the_common_part(pair, plain, drafted, expected):
    input_ids = demo.encode(pair, "HELLO")
    difference = demo.find_difference(pair, input_ids, plain, drafted)
    index = expected[0]
    prefix = torch.cat([input_ids, torch.tensor([plain[:index]], dtype=torch.long)], dim=1)
    with torch.no_grad():
        logits = sorted(pair.target(prefix).logits[0, -1].tolist())
    assert (difference.token_index, difference.plain_id, difference.drafted_id) == expected
    assert difference.top2_gap == pytest.approx(logits[-1] - logits[-2])


def test_no_difference_in_equal_decodings(pair):
    assert demo.find_difference(pair, torch.zeros(1, 1), (1, 2), (1, 2)) is None


def _comparison(plain, drafted, difference=None):
    return Comparison("p", plain, drafted, difference)


def test_measures_are_tokens_over_seconds_and_a_mean_over_cycles():
    fast = _comparison(Decoding((1,) * 10, 2.0, 10, ()), Decoding((1,) * 10, 1.0, 4, (2, 2, 2)))
    slow = _comparison(
        Decoding((1,) * 10, 2.0, 10, ()),
        Decoding((2,) * 10, 3.0, 10, (0,) * 9),
        Difference(0, 1, 2, 0.25),
    )
    both = demo.measure([fast, slow], 1.25)
    assert both == Measures(False, 18 / 12, 5.0, 5.0, 1.0, 0.8, 14, 20)
    assert demo.measure([fast], None) == Measures(True, 3.0, 5.0, 10.0, 2.0, None, 4, 10)


def test_without_a_cycle_there_is_no_acceptance_length():
    one = _comparison(Decoding((1,), 1.0, 1, ()), Decoding((1,), 1.0, 1, ()))
    assert demo.measure([one], None).acceptance_length is None


def test_best_plain_factor_compares_with_the_fastest_dtype():
    timings = (Timing("float32", 30.0, 1.0), Timing("bfloat16", 20.0, 1.0))
    assert demo.best_plain_factor(timings, "bfloat16") == 1.5
    assert demo.best_plain_factor(timings, "float32") == 1.0
    assert demo.best_plain_factor((), "float32") is None


def test_json_has_the_promised_keys():
    assert [field.name for field in fields(Measures)] == JSON_KEYS
    same = Decoding((1, 2), 1.0, 2, (0,))
    differing = _comparison(same, Decoding((1, 3), 1.0, 2, (0,)), Difference(1, 2, 3, 0.5))
    report = demo.Report("float32", 3, (), (_comparison(same, same), differing))
    document = json.loads(demo.as_json(report))
    assert document["timings"] == []
    assert document["overall"]["speedup_vs_best_plain"] is None, "one dtype: null, not left out"
    assert document["overall"] == asdict(report.overall)
    first, second = document["prompts"]
    setting = ["dtype", "num_assistant_tokens"]
    assert [*document] == [*setting, "timings", "prompts", "overall"]
    assert [*first] == ["prompt", *setting, *JSON_KEYS, "difference"]
    for told in (document, first, second):
        assert (told["dtype"], told["num_assistant_tokens"]) == ("float32", 3)
    assert first["difference"] is None
    assert second["difference"]["top2_gap"] == 0.5
    assert not document["overall"]["identical"]
    assert math.isclose(document["overall"]["tokens_per_s_plain"], 2.0)


def test_prompts_are_read_line_by_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one\\u2028"}\n\n{"prompt": "zwei ß", "id": 2}\n', encoding="utf-8")
    assert read_prompts(path) == ["one\u2028", "zwei ß"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', r"prompts.jsonl:2: not valid JSON \(Expecting value"),
        (b'\n{"text": "a"}', r'prompts.jsonl:2: needs an object like \{"prompt": "text"\}, got'),
        (b'{"prompt": 3}', "prompts.jsonl:1: needs an object"),
        (b'{"prompt": " "}', "prompts.jsonl:1: needs an object"),
        (b'["prompt"]', "prompts.jsonl:1: needs an object"),
        (b"\n\n", "`prompts` must hold at least one object with `prompt`, got none"),
        (b"\xff\xfe", "`prompts` must be a UTF-8 text file"),
    ],
)
def test_bad_prompt_files_are_refused_with_the_line(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_a_prompt_of_no_tokens_is_refused_with_the_tokenizer(pair):
    class Mute(LetterTokenizer):
        name_or_path = "some/folder"

        def __call__(self, _text, return_tensors):
            return super().__call__("", return_tensors)

    message = r"^The tokenizer Mute of some/folder must .* got none for 'HELLO'\. Check [^\n]*$"
    with pytest.raises(ValueError, match=message):
        demo.encode(replace(pair, tokenizer=Mute()), "HELLO")
    with pytest.raises(ValueError, match="The tokenizer LetterTokenizer of the target must make"):
        demo.encode(pair, "")
