from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizers import CHATML, byte_tokenizer, with_template
from hf_dflash.answer_file import Answer, AnswerFile
from hf_dflash.chats import Chat, read_chats
from hf_dflash.data import encode_chats
from hf_dflash.regenerate import RegenerationReport, distinct, prompt_id, record
from hf_dflash.regenerate_turns import regenerate_turns

OPTIONS = {"enable_thinking": False}


class Echo:
    """A target that answers with the number of turns before it, and writes what it was asked."""

    def __init__(
        self,
        path: Path,
        cut: str | None = None,
        left_out: str | None = None,
        ids: list[int] | None = None,
    ) -> None:
        self.path = path
        self.cut, self.left_out, self.ids = cut, left_out, ids
        self.asked: list[list[list[str]]] = []

    def __call__(self, prompts: list[Chat]) -> RegenerationReport:
        self.asked.append([contents(prompt) for prompt in prompts])
        wanted = distinct(prompts, OPTIONS)
        usable = [p for p in wanted if self.left_out not in contents(p)]
        with AnswerFile(self.path, {}) as file:
            new = [p for p in usable if prompt_id(p) not in file.done]
            file.append(record(p, self.answer(p)) for p in new)
        return RegenerationReport(len(new), len(usable) - len(new), len(wanted) - len(usable))

    def answer(self, prompt: Chat) -> Answer:
        text = f"answer {len(prompt.messages)}"
        return Answer(
            {"role": "assistant", "content": text}, self.ids, self.cut not in contents(prompt)
        )


def contents(chat: Chat) -> list[str]:
    return [message["content"] for message in chat.messages]


def chat(*turns: str, **more: Any) -> Chat:
    """Turns named after who says them: "u1" the user, "a1" the assistant, "t1" a tool."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return Chat([{"role": roles[turn[0]], "content": turn} for turn in turns], **more)


def test_each_turn_stands_behind_the_targets_own_answers(tmp_path: Path) -> None:
    target = Echo(tmp_path / "answers.jsonl")
    chats = [chat("s", "u1", "a1", "u2", "a2", "u3", labels={"kind": "x"}), chat("u1", "a1")]
    report = regenerate_turns(chats, target.path, OPTIONS, target)
    said = ["s", "u1", "answer 2", "u2", "answer 4", "u3"]
    assert target.asked == [[said[:2], ["u1"]], [said[:4]], [said]]
    assert report == RegenerationReport(4, 0)
    records = [json.loads(line) for line in target.path.read_text().splitlines()]
    assert [r["messages"][-1]["content"] for r in records] == [f"answer {n}" for n in (2, 1, 4, 6)]
    assert [r.get("kind") for r in records] == ["x", None, "x", "x"]
    again = Echo(target.path)
    assert regenerate_turns(chats, target.path, OPTIONS, again) == RegenerationReport(0, 4)


def test_of_a_regenerated_answer_the_last_turn_alone_is_learned(tmp_path: Path) -> None:
    target = Echo(tmp_path / "answers.jsonl")
    regenerate_turns([chat("u1", "a1", "u2", "a2")], target.path, OPTIONS, target)
    tokenizer = with_template(byte_tokenizer(), CHATML)
    rows = encode_chats(tokenizer, read_chats(target.path)).rows
    learned = [
        tokenizer.decode([i for i, m in zip(r.input_ids, r.loss_mask, strict=True) if m])
        for r in rows
    ]
    assert learned == ["answer 1<|im_end|>", "answer 3<|im_end|>"]


@pytest.mark.parametrize("how", ["cut", "left_out"])
def test_a_chat_ends_where_it_cannot_go_on(tmp_path: Path, how: str) -> None:
    target = Echo(tmp_path / "answers.jsonl", **{how: "u2"})
    chats = [chat("u1", "a1", "u2", "a2", "u3"), chat("u5", "a5", "u6")]
    report = regenerate_turns(chats, target.path, OPTIONS, target)
    assert [len(prompts) for prompts in target.asked] == [2, 2]
    assert report.n_left_out == (how == "left_out")


@pytest.mark.parametrize(
    ("ids", "goes_on"),
    [
        ([5, 6, 1], True),
        ([5, 6, 2, 1], True),  # two end tokens
        ([5, 2, 6, 1], False),
        ([2, 5, 6, 1], False),
    ],
)
def test_an_answer_that_its_text_does_not_tell_ends_the_chat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ids: list[int], goes_on: bool
) -> None:
    target = Echo(tmp_path / "answers.jsonl", ids=ids)
    chats = [chat("u1", "a1", "u2", source="line 1"), chat("u3", "a3"), chat("u4", "a4", "t4")]
    report = regenerate_turns(chats, target.path, OPTIONS, target, special_ids={1, 2})
    # A given call stands in the place of an answer, so its text is not needed.
    second = [["u1", "answer 1", "u2"], ["u4", "a4", "t4"]]
    assert target.asked == [[["u1"], ["u3"], ["u4"]], second if goes_on else second[1:]]
    assert report == RegenerationReport(4 + goes_on, 0, int(not goes_on))
    assert ("Ended 1 chats" in caplog.text and "first line 1." in caplog.text) != goes_on


def test_a_call_is_kept_before_its_results(tmp_path: Path) -> None:
    target = Echo(tmp_path / "answers.jsonl")
    regenerate_turns([chat("u1", "a1", "t1", "a2", "u2")], target.path, OPTIONS, target)
    assert target.asked == [
        [["u1"]],
        [["u1", "a1", "t1"]],
        [["u1", "a1", "t1", "answer 3", "u2"]],
    ]


def test_a_greeting_is_given(tmp_path: Path) -> None:
    target = Echo(tmp_path / "answers.jsonl")
    regenerate_turns([chat("a0", "u1", "a1"), chat("a0")], target.path, OPTIONS, target)
    assert target.asked == [[["a0", "u1"]]]


def test_a_plain_text_is_no_chat(tmp_path: Path) -> None:
    text = Chat(text="Once", source="book, row 1")
    with pytest.raises(ValueError, match="book, row 1: a plain text has no turn to answer"):
        regenerate_turns([text], tmp_path / "a", OPTIONS, Echo(tmp_path / "a"))
