from __future__ import annotations

import copy
import json
import logging
from collections import Counter

import pytest
import torch

from chat_tokenizers import CHATML, STRICT_ROLES, byte_tokenizer, with_template
from hf_dflash import regenerate
from hf_dflash.answer_file import settings_path
from hf_dflash.chats import Chat, read_chats
from hf_dflash.data import encode_chats
from hf_dflash.regenerate import regenerate_answers
from pairs import tiny_target

N_NEW = 20


def ask(text, **more):
    return Chat([{"role": "user", "content": text}], **more)


# Out of order, so that sorting by length matters.
LENGTHS = (7, 1, 11, 4, 9, 2, 10, 5, 3, 8, 6)
PROMPTS = [ask("yes" * i, labels={"kind": "odd" if i % 2 else "even"}) for i in LENGTHS]


@pytest.fixture(scope="module")
def tokenizer():
    return with_template(byte_tokenizer(), CHATML)


def plain_answers(target, tokenizer):
    """What each prompt gives alone: no padding, no batch, no segments."""
    answers = []
    for prompt in PROMPTS:
        inputs = tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = target.generate(**inputs, max_new_tokens=N_NEW, do_sample=False)
        answers.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


@pytest.fixture(scope="module")
def target(tokenizer):
    """A target that ends some answers early, some late and some not at all."""
    target = tiny_target(vocab_size=len(tokenizer))
    counts = Counter(token for ids in plain_answers(target, tokenizer) for token in set(ids[3:]))
    # Two end tokens, as many chat models have.
    target.generation_config.eos_token_id = [token for token, _ in counts.most_common(2)]
    return target


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(regenerate, "SEGMENT_TOKENS", 6)
    monkeypatch.setattr(regenerate, "BATCHES_PER_STRETCH", 2)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(target, tokenizer, path, prompts=PROMPTS, **options):
    options = {"batch_size": 3, "max_new_tokens": N_NEW, **options}
    return regenerate_answers(target, tokenizer, prompts, path, **options)


def test_answers_in_batches_are_those_that_each_prompt_gives_alone(target, tokenizer, tmp_path):
    path = tmp_path / "new" / "answers.jsonl"
    report = run(target, tokenizer, path)
    assert (report.n_answered, report.n_found, report.n_left_out) == (11, 0, 0)
    made = {record["messages"][0]["content"]: record for record in lines(path)}
    ends = target.generation_config.eos_token_id
    for prompt, expected in zip(PROMPTS, plain_answers(target, tokenizer), strict=True):
        record = made[prompt.messages[0]["content"]]
        assert record["answer_ids"] == expected
        assert record["finished"] == (expected[-1] in ends)
        assert record["kind"] == prompt.labels["kind"]
        text = tokenizer.decode(
            expected[:-1] if record["finished"] else expected, skip_special_tokens=True
        )
        assert record["messages"][1:] == [{"role": "assistant", "content": text}]
    lengths = {len(record["answer_ids"]) for record in made.values() if record["finished"]}
    assert min(lengths) <= 6 < max(lengths)  # ended within the first segment, and later
    assert {record["finished"] for record in made.values()} == {True, False}


def test_the_bar_moves_with_every_answer(target, tokenizer, tmp_path, monkeypatch):
    moves = []
    update = regenerate.tqdm.update
    monkeypatch.setattr(
        regenerate.tqdm, "update", lambda bar, n=1: (moves.append(n), update(bar, n))
    )
    run(target, tokenizer, tmp_path / "a.jsonl", batch_size=len(PROMPTS))
    ended = [n for n in moves if n]
    assert sum(ended) == len(PROMPTS)
    assert len(ended) > 2, "one batch, and it moved as answers ended"


def test_a_target_without_a_padding_token_answers_the_same(target, tokenizer, tmp_path):
    bare = copy.deepcopy(target)
    bare.generation_config.pad_token_id = None
    unpadded = with_template(tokenizer, CHATML)
    unpadded.pad_token = None
    run(target, tokenizer, tmp_path / "padded")
    run(bare, tokenizer, tmp_path / "tokenizers")
    run(bare, unpadded, tmp_path / "none")
    expected = (tmp_path / "padded").read_bytes()
    assert (tmp_path / "tokenizers").read_bytes() == expected
    assert (tmp_path / "none").read_bytes() == expected


def test_answers_are_trained_on_as_they_were_made(target, tokenizer, tmp_path):
    path = tmp_path / "answers.jsonl"
    run(target, tokenizer, path)
    data = encode_chats(tokenizer, read_chats(path))
    for row, record in zip(data.rows, lines(path), strict=True):
        n_answer = len(record["answer_ids"])
        assert row.input_ids[-n_answer:] == record["answer_ids"]
        assert sum(row.loss_mask) == n_answer


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_interrupted_run_ends_like_an_unbroken_one(target, tokenizer, tmp_path, temperature):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    run(target, tokenizer, whole, temperature=temperature)
    run(target, tokenizer, broken, temperature=temperature)
    content = broken.read_text(encoding="utf-8").splitlines(keepends=True)
    # Killed while it wrote the first line of the second batch.
    broken.write_text("".join(content[:3]) + content[3][:20], encoding="utf-8")
    report = run(target, tokenizer, broken, temperature=temperature)
    assert (report.n_answered, report.n_found) == (8, 3)
    assert broken.read_bytes() == whole.read_bytes()
    report = run(target, tokenizer, broken, temperature=temperature)
    assert (report.n_answered, report.n_found) == (0, 11)
    assert broken.read_bytes() == whole.read_bytes()


def test_sampling_follows_its_seed_and_leaves_the_callers_alone(target, tokenizer, tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(target, tokenizer, tmp_path / name, temperature=1.0, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c
    kept = json.loads(settings_path(tmp_path / "a").read_text())
    assert (kept["temperature"], kept["seed"]) == (1.0, 1)
    assert (kept["top_k"], kept["top_p"]) == (0, 1.0)


def test_the_targets_own_cut_of_the_law_stays_in_force(target, tokenizer, tmp_path):
    narrow = copy.deepcopy(target)
    narrow.generation_config.top_k = 1
    run(target, tokenizer, tmp_path / "greedy")
    run(narrow, tokenizer, tmp_path / "narrow", temperature=1.0)
    assert lines(tmp_path / "greedy") == lines(tmp_path / "narrow")
    assert json.loads(settings_path(tmp_path / "narrow").read_text())["top_k"] == 1


def test_a_low_temperature_samples_what_greedy_search_finds(target, tokenizer, tmp_path):
    run(target, tokenizer, tmp_path / "greedy")
    run(target, tokenizer, tmp_path / "cold", temperature=1e-4)
    assert lines(tmp_path / "greedy") == lines(tmp_path / "cold")


def test_the_same_prompt_is_answered_once(target, tokenizer, tmp_path):
    path = tmp_path / "answers.jsonl"
    assert run(target, tokenizer, path, [*PROMPTS[:2], ask("yes")]).n_answered == 2
    report = run(target, tokenizer, path, PROMPTS[:3])
    assert (report.n_answered, report.n_found) == (1, 2)
    assert len(lines(path)) == 3


def test_template_options_are_part_of_a_prompt_and_are_kept(target, tokenizer, tmp_path):
    path = tmp_path / "answers.jsonl"
    prompts = [ask("yes"), ask("yes", template_options={"enable_thinking": True})]
    report = run(target, tokenizer, path, prompts, template_options={"enable_thinking": False})
    assert report.n_answered == 2
    kept = [chat.template_options for chat in read_chats(path)]
    assert sorted(options["enable_thinking"] for options in kept) == [False, True]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": 0.5}, r"\(.*temperature: 0\.0 there, 0\.5 now"),
        ({"max_new_tokens": 5}, r"\(max_new_tokens: 20 there, 5 now\)"),
        ({"template_options": {"a": 1}}, r"\(template_options: \{\} there, \{'a': 1\} now\)"),
    ],
)
def test_other_settings_are_refused(target, tokenizer, tmp_path, changed, message):
    path = tmp_path / "answers.jsonl"
    run(target, tokenizer, path, PROMPTS[:2])
    content = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        run(target, tokenizer, path, **changed)
    assert path.read_bytes() == content


def test_another_template_is_refused(target, tokenizer, tmp_path):
    path = tmp_path / "answers.jsonl"
    run(target, tokenizer, path, PROMPTS[:2])
    with pytest.raises(ValueError, match=r"chat_template: .* Use the same settings"):
        run(target, with_template(tokenizer, STRICT_ROLES), path)


def test_answers_of_unknown_making_are_refused(target, tokenizer, tmp_path):
    path = tmp_path / "answers.jsonl"
    run(target, tokenizer, path, PROMPTS[:2])
    settings_path(path).unlink()
    with pytest.raises(ValueError, match=r"`out_path` .* has no answers\.jsonl\.settings\.json"):
        run(target, tokenizer, path)


@pytest.mark.parametrize("line", ["{", "[1]", '{"messages": []}', '"id"'])
def test_a_broken_answer_is_named(target, tokenizer, tmp_path, line):
    path = tmp_path / "answers.jsonl"
    run(target, tokenizer, path, PROMPTS[:2])
    path.write_text(line + "\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: not an answer"):
        run(target, tokenizer, path)


def test_what_cannot_be_answered_is_left_out_and_counted(target, tokenizer, tmp_path, caplog):
    strict = with_template(tokenizer, STRICT_ROLES)
    target_with_room = 512 - N_NEW
    long = ask("1 + 1" * target_with_room, source="chats.jsonl, line 3")
    refused = Chat([{"role": "system", "content": "a"}])
    with caplog.at_level(logging.WARNING, logger="hf_dflash.regenerate"):
        report = run(target, strict, tmp_path / "a", [long, refused, PROMPTS[0]])
    assert (report.n_answered, report.n_left_out) == (1, 2)
    assert "Left out 2 prompts; first chats.jsonl, line 3: " in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1, got 0"),
        (
            {"max_new_tokens": 512},
            "`max_new_tokens` must be less than the target's 512 positions, .* got 512. Give less",
        ),
        ({"temperature": -1.0}, r"`temperature` must be 0 \(greedy\) or more, got -1.0"),
        ({"temperature": float("nan")}, "`temperature` must be 0"),
    ],
)
def test_options_out_of_range_are_refused(target, tokenizer, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(target, tokenizer, tmp_path / "answers.jsonl", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_never_ends_is_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"`target` needs `generation_config\.eos_token_id`"):
        run(tiny_target(vocab_size=len(tokenizer)), tokenizer, tmp_path / "answers.jsonl")
