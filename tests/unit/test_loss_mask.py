from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_tokenizers import (
    BARE,
    BARE_TAGGED,
    CHATML,
    DROPS_REASONING,
    OPENS_THINKING,
    STRICT_ROLES,
    TAGGED,
    byte_tokenizer,
    spaced_tokenizer,
    with_template,
)
from hf_dflash.chats import Chat
from hf_dflash.loss_mask import ChatEncoder, EncodedRow, UnusableTurnError, encode_chat


def talk(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def supervised(tokenizer, row):
    return tokenizer.decode([t for t, m in zip(row.input_ids, row.loss_mask, strict=True) if m])


def test_turns_of_one_chat_share_a_row_if_nothing_is_rewritten():
    tokenizer = with_template(byte_tokenizer(), CHATML)
    (row,) = encode_chat(tokenizer, Chat(talk("a", "b", "c", "d")))
    assert supervised(tokenizer, row) == "b<|im_end|>d<|im_end|>"
    assert len(encode_chat(tokenizer, Chat(talk("a", "b", "c", "d")), merge_turns=False)) == 2


def test_the_hazard_is_real_and_is_met():
    # Tokenised together, the prompt's last sign and the answer's first are one token.
    tokenizer = with_template(byte_tokenizer(split_words=False), BARE_TAGGED)
    text = "user:a</s>assistant:yes</s>"
    spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    border = text.index("yes")
    assert any(start < border < end for start, end in spans)
    (row,) = encode_chat(tokenizer, Chat(talk("a", "yes")))
    assert supervised(tokenizer, row) == "yes</s>"


def test_recorded_tokens_are_used_as_they_are():
    tokenizer = with_template(byte_tokenizer(), CHATML)
    end_id = tokenizer.eos_token_id
    # Letter by letter, as the tokenizer would never split it.
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "Hello"]
    assert tokenizer.decode(letters) == "Hello"
    assert tokenizer("Hello")["input_ids"] != letters
    chat = Chat(talk("Hi", "Hello"), answer_ids=[*letters, end_id])
    (row,) = encode_chat(tokenizer, chat)
    assert row.input_ids[-6:] == [*letters, end_id]
    assert row.loss_mask == [0] * (len(row.input_ids) - 6) + [1] * 6


def test_an_answer_that_the_limit_cut_has_no_end():
    tokenizer = with_template(byte_tokenizer(), CHATML)
    ids = tokenizer("Hello")["input_ids"]
    (row,) = encode_chat(tokenizer, Chat(talk("Hi", "Hello"), answer_ids=ids))
    assert row.input_ids[-1] != tokenizer.eos_token_id
    assert sum(row.loss_mask) == len(ids)


def test_a_cut_answer_without_recorded_tokens_has_no_end_either():
    tokenizer = with_template(byte_tokenizer(), CHATML)
    chat = Chat(talk("a", "b", "Hi", "Hello"), finished=False)
    (row,) = encode_chat(tokenizer, chat)
    assert supervised(tokenizer, row) == "b<|im_end|>Hello"
    assert row.loss_mask[-1] == 1


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("</s><|im_end|>\n", "b</s><|im_end|>"),  # a call's end, then the turn's
        ("</s>\n<|im_end|>\n<|im_end|>", "b</s>\n<|im_end|>"),
        ("<|im_end|>\n</s>", "b<|im_end|>"),
        ("<|eot|></s>", "b<|eot|>"),  # none is the tokenizer's own
    ],
)
def test_of_several_end_tokens_the_tokenizers_own_ends_the_turn(end, expected):
    tokenizer = with_template(byte_tokenizer(), CHATML.replace("<|im_end|>\n", end))
    (row,) = encode_chat(tokenizer, Chat(talk("a", "b")))
    assert supervised(tokenizer, row) == expected
    if "\n" not in expected:
        (cut,) = encode_chat(tokenizer, Chat(talk("a", "b"), finished=False))
        assert supervised(tokenizer, cut) == "b"


def test_recorded_tokens_are_the_last_answers_only():
    tokenizer = with_template(byte_tokenizer(), CHATML)
    ids = [*tokenizer("d")["input_ids"], tokenizer.eos_token_id]
    (row,) = encode_chat(tokenizer, Chat(talk("a", "b", "c", "d"), answer_ids=ids))
    assert supervised(tokenizer, row) == "b<|im_end|>d<|im_end|>"


def test_a_template_without_special_tokens_supervises_the_answer_without_its_line_break():
    tokenizer = with_template(byte_tokenizer(), BARE)
    (row,) = encode_chat(tokenizer, Chat(talk("a", "yes", "b", "no")))
    assert supervised(tokenizer, row) == "yesno"


def test_thinking_off_is_the_prompts_and_thinking_on_is_the_answers():
    tokenizer = with_template(byte_tokenizer(), DROPS_REASONING)
    empty = "<think>\n\n</think>\n\n"
    messages = talk("a", empty + "b")
    (on,) = encode_chat(tokenizer, Chat(messages))
    (off,) = encode_chat(tokenizer, Chat(messages, template_options={"enable_thinking": False}))
    assert tokenizer.decode(on.input_ids) == tokenizer.decode(off.input_ids)
    assert supervised(tokenizer, on) == empty + "b<|im_end|>"
    assert supervised(tokenizer, off) == "b<|im_end|>"


def test_reasoning_in_a_field_of_its_own_goes_where_the_prompt_opens_it():
    tokenizer = with_template(byte_tokenizer(), OPENS_THINKING)
    messages = [*talk("a"), {"role": "assistant", "content": "b", "reasoning_content": "so"}]
    (row,) = encode_chat(tokenizer, Chat(messages))
    assert supervised(tokenizer, row) == "so\n</think>\n\nb<|im_end|>"


@pytest.mark.parametrize("content", ["no thought", "<think>\nonly a thought\n</think>", [{}]])
def test_an_answer_that_cannot_follow_the_prompt_is_refused(content):
    template = OPENS_THINKING.replace("m.content.split", "(m.content ~ '').split")
    tokenizer = with_template(byte_tokenizer(), template)
    messages = [*talk("a"), {"role": "assistant", "content": content}]
    with pytest.raises(UnusableTurnError, match="rewrites the answer"):
        encode_chat(tokenizer, Chat(messages))


def test_an_answer_that_cannot_be_tokenised_apart_is_refused():
    tokenizer = with_template(spaced_tokenizer(), BARE_TAGGED)
    with pytest.raises(UnusableTurnError, match="cannot be tokenised apart from its prompt"):
        encode_chat(tokenizer, Chat(talk("a", "yes")))


def test_an_answer_that_the_template_does_not_tag_is_not_supervised():
    tokenizer = with_template(byte_tokenizer(), TAGGED)
    (row,) = encode_chat(tokenizer, Chat(talk("a", "")))
    assert set(row.loss_mask) == {0}


def test_a_problem_of_one_turn_leaves_the_others():
    tokenizer = with_template(byte_tokenizer(), STRICT_ROLES)
    messages = [*talk("a", "b"), {"role": "assistant", "content": "again"}]
    encoded = ChatEncoder(tokenizer).encode(Chat(messages))
    assert [supervised(tokenizer, row) for row in encoded.rows] == ["b<|im_end|>"]
    (problem,) = encoded.problems
    assert problem.args == ("the chat template refuses the chat", "roles must alternate")
    with pytest.raises(UnusableTurnError, match="roles must alternate"):
        encode_chat(tokenizer, Chat(messages))


def test_a_greeting_that_nothing_asked_for_is_context():
    tokenizer = with_template(byte_tokenizer(), CHATML)
    messages = [{"role": "assistant", "content": "Hello"}, *talk("a", "b")]
    encoded = ChatEncoder(tokenizer).encode(Chat(messages))
    assert [supervised(tokenizer, row) for row in encoded.rows] == ["b<|im_end|>"]
    assert tokenizer.decode(encoded.rows[0].input_ids).startswith("<|im_start|>assistant\nHello")
    assert encoded.problems == []
    assert ChatEncoder(tokenizer).encode(Chat(messages[:1])).rows == []


def test_a_plain_text_is_supervised_whole_and_ends():
    tokenizer = byte_tokenizer()
    (row,) = encode_chat(tokenizer, Chat(text="the answer"))
    assert supervised(tokenizer, row) == "the answer<|im_end|>"
    assert set(row.loss_mask) == {1}


def test_the_first_token_of_a_plain_text_is_given():
    tokenizer = with_template(byte_tokenizer(), CHATML)
    tokenizer.bos_token = "<|im_start|>"
    (row,) = encode_chat(tokenizer, Chat(text="<|im_start|>the answer"))
    assert row.loss_mask[0] == 0
    assert supervised(tokenizer, row) == "the answer<|im_end|>"


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(ValueError, match="`tokenizer` must be a fast one, got SimpleNamespace"):
        ChatEncoder(SimpleNamespace(is_fast=False))


@given(st.lists(st.integers(0, 1), max_size=6))
def test_an_anchor_needs_two_supervised_tokens_in_a_row(mask):
    assert EncodedRow(mask, mask).has_anchor() == ("11" in "".join(map(str, mask)))
