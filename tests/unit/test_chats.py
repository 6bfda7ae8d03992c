from __future__ import annotations

import gzip
import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from hf_dflash.chats import chat_of, read_chats

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": HELLO},
        {"conversations": HELLO},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
        {"prompt": "Hi", "response": "Hello!"},
        {"prompt": "Hi", "completion": "Hello!"},
        {"prompt": HELLO[:1], "completion": HELLO[1:]},
        # Parquet fills the fields of other layouts with None.
        {"messages": HELLO, "text": None, "tools": None, "answer_ids": None},
    ],
)
def test_every_layout_gives_the_same_chat(record):
    chat = chat_of(record)
    assert chat.messages == HELLO
    assert (chat.text, chat.tools, chat.answer_ids, chat.labels) == (None, None, None, {})
    assert chat.finished


def test_a_prompt_alone_has_no_answer():
    assert chat_of({"prompt": "Hi"}).messages == HELLO[:1]


def test_a_plain_text_is_kept():
    chat = chat_of({"text": "Once upon a time", "lang": "en"})
    assert (chat.text, chat.messages, chat.labels) == ("Once upon a time", [], {"lang": "en"})


def test_what_a_record_carries_is_kept():
    calls = [{"type": "function", "function": {"name": "now", "arguments": {}}}]
    record = {
        "messages": [HELLO[0], {"role": "assistant", "content": None, "tool_calls": calls}],
        "tools": '[{"type": "function"}]',
        "chat_template_kwargs": {"enable_thinking": False},
        "answer_ids": [5, 6],
        "finished": False,
        "kind": "tools",
        "score": 0.5,
        "id": "1",
        "nested": {"not": "a label"},
    }
    chat = chat_of(record)
    assert chat.messages[1] == {"role": "assistant", "tool_calls": calls}
    assert chat.tools == [{"type": "function"}]
    assert chat.template_options == {"enable_thinking": False}
    assert (chat.answer_ids, chat.finished) == ([5, 6], False)
    assert chat.labels == {"kind": "tools", "score": 0.5}


def test_the_system_field_of_sharegpt_is_the_first_turn():
    system = {"role": "system", "content": "Be a pirate."}
    record = {"conversations": HELLO, "system": "Be a pirate.", "kind": "a"}
    chat = chat_of(record)
    assert chat.messages == [system, *HELLO]
    assert chat.labels == {"kind": "a"}
    said_twice = {**record, "conversations": [system, *HELLO]}
    assert chat_of(said_twice).messages == [system, *HELLO]
    for nothing in ("", None):
        chat = chat_of({**record, "system": nothing})
        assert (chat.messages, chat.labels) == (HELLO, {"kind": "a"})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversations": HELLO, "system": 3}, "`system` must be text, got 3"),
        (
            {"conversations": [{"from": "system", "value": "a"}, *HELLO], "system": "b"},
            "`system` must be what the first turn says, .* got 'b' and 'a'. Remove one of them",
        ),
        (["Hi"], "a record must be an object, got list"),
        ({"question": "Hi"}, r"needs one of messages, .* got the fields \['question'\]"),
        ({"messages": []}, "`messages` must be a list of turns, got"),
        ({"messages": "Hi"}, "`messages` must be a list of turns, got 'Hi'"),
        ({"messages": ["Hi"]}, "turn 0: a turn must be an object, got str"),
        ({"messages": [{"content": "Hi"}]}, "turn 0: a turn needs `role` or `from`"),
        ({"messages": [HELLO[0], {"role": "assistant"}]}, "turn 1: `content` must be text, got"),
        ({"conversations": [{"from": "bing", "value": "Hi"}]}, "`from` must be one of .*'bing'"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "turn 0, `value` must be text, got 3"),
        ({"prompt": 3}, "`prompt` must be text, got 3"),
        ({"prompt": []}, "`prompt` must not be an empty list"),
        ({"prompt": "Hi", "response": {}}, "`response` must be text, got"),
        ({"text": ["Hi"]}, "`text` must be text, got"),
        ({"messages": HELLO, "tools": {}}, "`tools` must be a list or its JSON text, got"),
        ({"messages": HELLO, "tools": "[{"}, "`tools` must be a list or its JSON text, got"),
        ({"messages": HELLO, "answer_ids": []}, "`answer_ids` must be token ids, got"),
        ({"messages": HELLO, "answer_ids": [1, "2"]}, "`answer_ids` must be token ids, got"),
        ({"messages": HELLO, "answer_ids": [-1]}, "`answer_ids` must be token ids, got"),
        ({"messages": HELLO[:1], "answer_ids": [1]}, "`answer_ids` are the last message's"),
    ],
)
def test_a_broken_record_is_refused(record, message):
    with pytest.raises(ValueError, match=message):
        chat_of(record)


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.jsonl.gz"])
def test_json_lines_are_read_and_numbered(tmp_path, name):
    text = json.dumps({"messages": HELLO}) + "\n\n" + json.dumps({"prompt": "é"}) + "\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    read = list(read_chats(path))
    assert [chat.messages for chat in read] == [HELLO, [{"role": "user", "content": "é"}]]
    assert read[1].source == f"{path}, line 3"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"messages": [', r"chats\.jsonl, line 2: not JSON \(.*Mend or remove it"),
        (b"\xff\xfe", r"chats\.jsonl, line 2: not JSON"),
        (b'{"messages": 1}', r"chats\.jsonl, line 2: `messages` must be a list"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(json.dumps({"messages": HELLO}).encode() + b"\n" + line + b"\n")
    chats = read_chats(path)
    assert next(chats).messages == HELLO
    with pytest.raises(ValueError, match=message):
        next(chats)


@pytest.mark.parametrize("spoil", [lambda whole: whole[:-9], lambda whole: b"{}" + whole])
def test_a_gzip_file_that_was_cut_off_is_named(tmp_path, spoil):
    path = tmp_path / "chats.jsonl.gz"
    path.write_bytes(spoil(gzip.compress(b'{"prompt": "a"}\n' * 99)))
    with pytest.raises(ValueError, match=r"chats.jsonl.gz: not a whole gzip file .* Fetch it agai"):
        list(read_chats(path))


def test_a_path_that_is_not_there_is_no_dataset(tmp_path):
    with pytest.raises(ValueError, match=r"`source` .*gone\.jsonl is not there"):
        read_chats(tmp_path / "gone.jsonl")


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "chats.csv"
    path.write_text("a,b")
    with pytest.raises(ValueError, match=r"must be a \.jsonl, \.jsonl\.gz or \.parquet file"):
        read_chats(path)


def test_parquet_is_read(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "chats.parquet"
    rows = [{"messages": HELLO, "kind": "a"}, {"messages": HELLO[:1], "kind": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    chats = list(read_chats(path))
    assert [chat.messages for chat in chats] == [HELLO, HELLO[:1]]
    assert [chat.labels for chat in chats] == [{"kind": "a"}, {}]
    assert chats[1].source == f"{path}, row 1"


def call(**arguments):
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


# As arrow gives them: each object has the fields of all others in its column.
FILLED = [
    {
        "messages": [
            {"role": "user", "content": "a", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call(city="X", day=None)]},
        ],
        "chat_template_kwargs": {"enable_thinking": None, "x": 1},
        "tools": [{"name": "f", "parameters": {"city": "s", "day": None, "of": ["a", None]}}],
    },
    {
        "messages": [
            {"role": "user", "content": "b", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call(city=None, day="Mo")]},
        ],
        "chat_template_kwargs": {"enable_thinking": True, "x": None},
        "tools": None,
    },
]


def assert_without_fill(chats):
    calls = [chat.messages[1] for chat in chats]
    assert calls == [
        {"role": "assistant", "tool_calls": [call(city="X")]},
        {"role": "assistant", "tool_calls": [call(day="Mo")]},
    ]
    assert [chat.template_options for chat in chats] == [{"x": 1}, {"enable_thinking": True}]
    tools = [{"name": "f", "parameters": {"city": "s", "of": ["a", None]}}]
    assert [chat.tools for chat in chats] == [tools, None]


def test_what_arrow_fills_in_is_left_out(monkeypatch, tmp_path):
    def load_dataset(*_, **__):
        return iter(FILLED)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert_without_fill(list(read_chats("org/chats")))
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.Table.from_pylist(FILLED), tmp_path / "chats.parquet")
    assert_without_fill(list(read_chats(tmp_path / "chats.parquet")))


def test_a_null_of_json_lines_is_meant_but_for_a_template_option(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(FILLED[0]))
    (chat,) = read_chats(path)
    assert chat.messages[1]["tool_calls"] == [call(city="X", day=None)]
    assert chat.tools[0]["parameters"]["day"] is None
    assert chat.template_options == {"x": 1}


def test_parquet_is_read_in_parts(monkeypatch, tmp_path):
    path = tmp_path / "chats.parquet"
    path.write_bytes(b"")

    class Part(list):
        to_pylist = list.copy

    @contextmanager
    def open_parts(opened):
        assert opened == path
        parts = [Part([{"messages": HELLO}]), Part([{"prompt": "Hi"}, {"prompt": 3}])]
        yield SimpleNamespace(iter_batches=lambda batch_size: iter(parts) if batch_size else None)

    stand_in = SimpleNamespace(ParquetFile=open_parts)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=stand_in))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", stand_in)
    chats = read_chats(path)
    assert [next(chats).messages, next(chats).messages] == [HELLO, HELLO[:1]]
    with pytest.raises(ValueError, match=r"chats\.parquet, row 2, `prompt` must be text, got 3"):
        next(chats)


def test_a_dataset_of_the_hub_is_streamed(monkeypatch):
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        return iter([{"messages": HELLO}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    (chat,) = read_chats("org/chats", split="test")
    assert chat.source == "org/chats, test, row 0"
    (chat,) = read_chats("org/chats", config="all")
    assert chat.source == "org/chats, all, train, row 0"
    assert asked == [("org/chats", None, "test", True), ("org/chats", "all", "train", True)]


def test_a_file_has_no_configs(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"`config` is for a dataset on the Hub, but .*got 'all'"):
        read_chats(path, config="all")


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RuntimeError, match="needs `datasets`: pip install"):
        next(read_chats("org/chats"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = tmp_path / "chats.parquet"
    path.write_bytes(b"")
    with pytest.raises(RuntimeError, match="needs `pyarrow`: pip install"):
        next(read_chats(path))
