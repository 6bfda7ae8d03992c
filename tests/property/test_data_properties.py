"""The loss mask is compared with what serving shows and what the assistant said, read as text."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_tokenizers import (
    BARE_TAGGED,
    CHATML,
    DROPS_REASONING,
    LLAMA3,
    OPENS_THINKING,
    TAGGED,
    TAGGED_WIDE,
    byte_tokenizer,
    with_template,
)
from hf_dflash.chats import Chat
from hf_dflash.loss_mask import EncodedRow, UnusableTurnError, encode_chat
from hf_dflash.packing import first_fit_decreasing, pack_rows

# Words that the tokenizers merge with roles, line breaks and one another, and signs of many bytes.
PIECES = st.sampled_from(
    [
        "Hello",
        "yes",
        "the answer",
        " ",
        "\n",
        "\n\n",
        ":",
        "assistant",
        "1 + 1",
        ".",
        "é",
        "語",
        "🙂",
    ]
)
CONTENT = st.lists(PIECES, max_size=6).map("".join)
THOUGHT = st.lists(PIECES, min_size=1, max_size=3).map("".join)


@st.composite
def chats(draw, contents=CONTENT):
    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(CONTENT)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(CONTENT)})
        messages.append({"role": "assistant", "content": draw(contents)})
    return Chat(messages)


def answers(chat):
    return [m["content"] for m in chat.messages if m["role"] == "assistant"]


def turns(chat):
    return [i for i, m in enumerate(chat.messages) if m["role"] == "assistant"]


def supervised_runs(rows):
    """For every run of supervised tokens: the tokens before it, and its own."""
    for row in rows:
        assert len(row.input_ids) == len(row.loss_mask)
        places = range(len(row.input_ids))
        for supervised, run in groupby(places, key=lambda i: row.loss_mask[i]):
            run = list(run)
            if supervised:
                yield row.input_ids[: run[0]], row.input_ids[run[0] : run[-1] + 1]


def check(tokenizer, chat, expected, **options):
    """Every answer is supervised once, whole, after exactly what serving shows before it."""
    chat = Chat(chat.messages, template_options=options)
    for merge_turns in (True, False):
        rows = encode_chat(tokenizer, chat, merge_turns=merge_turns)
        runs = list(supervised_runs(rows))
        assert [tokenizer.decode(ids) for _, ids in runs] == expected
        for turn, (before, _) in zip(turns(chat), runs, strict=True):
            served = tokenizer.apply_chat_template(
                chat.messages[:turn], add_generation_prompt=True, return_dict=False, **options
            )
            assert before == served
        assert all(row.loss_mask[-1] == 1 for row in rows)  # nothing follows the turn's end
        if not merge_turns:
            assert len(rows) == len(expected)
    return rows


@pytest.mark.parametrize("split_words", [True, False])
@pytest.mark.parametrize("template", [CHATML, TAGGED_WIDE])
@given(chat=chats())
def test_every_answer_is_supervised_exactly(template, split_words, chat):
    tokenizer = with_template(byte_tokenizer(split_words=split_words), template)
    check(tokenizer, chat, [answer + "<|im_end|>" for answer in answers(chat)])


@pytest.mark.parametrize("split_words", [True, False])
@given(chat=chats(CONTENT.filter(bool)))
def test_a_tag_that_closes_early_still_supervises_the_end_of_the_turn(split_words, chat):
    tokenizer = with_template(byte_tokenizer(split_words=split_words), TAGGED)
    check(tokenizer, chat, [answer + "<|im_end|>" for answer in answers(chat)])


@pytest.mark.parametrize("split_words", [True, False])
@given(chat=chats())
def test_a_template_that_trims(split_words, chat):
    tokenizer = with_template(byte_tokenizer(split_words=split_words), LLAMA3)
    check(tokenizer, chat, [answer.strip() + "<|eot|>" for answer in answers(chat)])


@given(chat=chats(CONTENT.filter(bool)))
def test_merges_across_the_border_of_an_answer(chat):
    tokenizer = with_template(byte_tokenizer(split_words=False), BARE_TAGGED)
    check(tokenizer, chat, [answer + "</s>" for answer in answers(chat)])


@given(
    chat=chats(st.tuples(THOUGHT, CONTENT).map("<think>\n{0[0]}</think>{0[1]}".format)),
    thinking=st.booleans(),
)
def test_a_template_that_drops_earlier_reasoning(chat, thinking):
    tokenizer = with_template(byte_tokenizer(), DROPS_REASONING)
    if thinking:
        rows = check(tokenizer, chat, [answer + "<|im_end|>" for answer in answers(chat)])
        assert len(rows) == len(turns(chat))
    else:
        # The prompt of serving has an empty thought, which these answers contradict.
        contradicted = Chat(chat.messages, template_options={"enable_thinking": False})
        with pytest.raises(UnusableTurnError, match="rewrites the answer"):
            encode_chat(tokenizer, contradicted)


@given(
    chat=chats(
        st.tuples(THOUGHT, st.sampled_from(["yes", "no.", "a\nb"])).map(
            "<think>\n{0[0]}</think>\n\n{0[1]}".format
        )
    )
)
def test_a_template_whose_prompt_opens_the_thinking(chat):
    tokenizer = with_template(byte_tokenizer(), OPENS_THINKING)
    expected = [a.removeprefix("<think>").lstrip() + "<|im_end|>" for a in answers(chat)]
    check(tokenizer, chat, expected)


@given(
    lengths=st.lists(st.integers(1, 20), max_size=40),
    capacity=st.integers(20, 40),
)
def test_packing_is_first_fit_decreasing(lengths, capacity):
    expected: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for members in expected:
            if sum(lengths[i] for i in members) + lengths[item] <= capacity:
                members.append(item)
                break
        else:
            expected.append([item])
    assert first_fit_decreasing(lengths, capacity) == expected


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=12))
def test_packed_rows_hold_every_row_whole(masks):
    rows = [EncodedRow([100 * i + j for j in range(len(m))], m) for i, m in enumerate(masks)]
    bins = first_fit_decreasing([len(m) for m in masks], 12)
    for packed, members in zip(pack_rows(rows, 12), bins, strict=True):
        documents = packed.document_ids
        assert max(documents) == len(members)
        for number, member in enumerate(members, start=1):
            here = [i for i, document in enumerate(documents) if document == number]
            assert here == list(range(here[0], here[0] + len(masks[member])))
            assert [packed.input_ids[i] for i in here] == rows[member].input_ids
            assert [packed.loss_mask[i] for i in here] == rows[member].loss_mask
    assert sorted(i for members in bins for i in members) == list(range(len(rows)))
