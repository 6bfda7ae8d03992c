from __future__ import annotations

import logging
import sys

import pytest

from chat_tokenizers import CHATML, STRICT_ROLES, byte_tokenizer, with_template
from hf_dflash.chats import Chat
from hf_dflash.data import ChatRows, coloured, encode_chats, load_rows, save_rows
from hf_dflash.loss_mask import EncodedRow


def talk(*contents):
    roles = ("user", "assistant")
    return Chat([{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)])


@pytest.fixture(scope="module")
def tokenizer():
    return with_template(byte_tokenizer(), CHATML)


def test_rows_and_their_figures(tokenizer):
    data = encode_chats(tokenizer, [talk("a", "b"), talk("a", "b", "c", "d"), talk("a")])
    assert len(data) == 2
    assert data[0]["input_ids"] == data.rows[0].input_ids
    assert data[0]["loss_mask"] == data.rows[0].loss_mask
    assert data[-1] == data[1]
    report = data.report
    assert (report.n_chats, report.n_truncated) == (3, 0)
    assert report.n_tokens == sum(len(row.input_ids) for row in data.rows)
    assert report.n_supervised == 2 + 4
    assert report.skipped == {"there is no assistant turn": 1}


def test_a_long_row_is_cut_and_counted(tokenizer, caplog):
    (whole,) = encode_chats(tokenizer, [talk("a", "the answer is yes")]).rows
    start = whole.loss_mask.index(1)
    chats = [talk("a", "the answer is yes"), talk("the answer " * 9, "b")]
    with caplog.at_level(logging.WARNING, logger="hf_dflash.data"):
        data = encode_chats(tokenizer, chats, max_length=start + 2)
    assert data.rows == [EncodedRow(whole.input_ids[: start + 2], [0] * start + [1, 1])]
    assert data.report.n_truncated == 1
    assert data.report.skipped == {"nothing supervised before `max_length`": 1}
    assert f"Cut 1 rows at `max_length` {start + 2}." in caplog.messages


def test_an_answer_shorter_than_a_block_is_kept_and_one_of_a_single_token_is_not(tokenizer):
    data = encode_chats(tokenizer, [talk("a", "b"), talk("a", "")])
    assert [sum(row.loss_mask) for row in data.rows] == [2]
    assert data.report.skipped == {"fewer than two supervised tokens in a row": 1}


def test_skips_are_logged_with_the_first_place(tokenizer, caplog):
    strict = with_template(tokenizer, STRICT_ROLES)
    question, answer = talk("a", "b").messages
    wrong = Chat([question, question, answer, answer], source="chats.jsonl, line 7")
    with caplog.at_level(logging.WARNING, logger="hf_dflash.data"):
        data = encode_chats(strict, [talk("a", "b"), wrong])
    assert len(data) == 1
    assert data.report.skipped == {"the chat template refuses the chat": 2}
    assert "first chats.jsonl, line 7 (" in caplog.text


@pytest.mark.parametrize(
    ("chats", "message"),
    [
        ([], "must hold at least one chat, got none. Is the file empty"),
        ([talk("a")], r"none of the 1 chats .*\(1 x there is no assistant turn\)"),
    ],
)
def test_data_without_a_supervised_token_is_refused(tokenizer, chats, message):
    with pytest.raises(ValueError, match=message):
        encode_chats(tokenizer, chats)


def test_a_max_length_that_no_block_fits_is_refused(tokenizer):
    with pytest.raises(ValueError, match="`max_length` must be at least 2, got 1"):
        encode_chats(tokenizer, [talk("a", "b")], max_length=1)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_saved_rows_come_back_and_the_file_is_reproducible(tmp_path, name):
    packed = EncodedRow([4, 5, 6, 7], [1, 1, 1, 1], [1, 1, 2, 2])
    data = ChatRows([EncodedRow([1, 2, 3], [0, 1, 1]), packed])
    save_rows(data, tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert load_rows(tmp_path / name).rows == data.rows
    save_rows(data, tmp_path / name)
    assert (tmp_path / name).read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not a prepared row"),
        ('{"input_ids": [1]}', "line 1: not a prepared row"),
        ('{"messages": []}', "line 1: not a prepared row .*Make rows of chats with `hf-dflash pre"),
        ('{"input_ids": "a", "loss_mask": [1]}', "`input_ids` must be a list of integers, got 'a'"),
        ('{"input_ids": [1], "loss_mask": [1], "document_ids": []}', "`document_ids` needs a val"),
        ('{"input_ids": [1], "loss_mask": []}', "`loss_mask` needs a value for each of the 1"),
    ],
)
def test_a_broken_row_is_named(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        load_rows(path)


def test_the_viewer_tells_supervised_tokens_apart(tokenizer):
    (row,) = encode_chats(tokenizer, [talk("a", "b\nc")]).rows
    shown = coloured(tokenizer, row)
    assert shown.plain == "<|im_start|>user↵\na<|im_end|>↵\n<|im_start|>assistant↵\nb↵\nc<|im_end|>"
    green = "".join(shown.plain[s.start : s.end] for s in shown.spans if "green" in str(s.style))
    assert green == "b↵\nc<|im_end|>"


def test_the_viewer_without_rich(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.text", None)
    with pytest.raises(RuntimeError, match="needs `rich`: pip install"):
        coloured(tokenizer, EncodedRow([1], [1]))
