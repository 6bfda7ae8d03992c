from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizers import CHATML, byte_tokenizer, with_template
from hf_dflash.chats import Chat
from hf_dflash.data import encode_chats, load_rows
from hf_dflash.loss_mask import EncodedRow
from hf_dflash.packing import pack_rows
from hf_dflash.row_writing import write_rows

N_CHATS = 40


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return with_template(byte_tokenizer(), CHATML)


def talk(i: int) -> Chat:
    answer = {"role": "assistant", "content": "yes" * (i % 7)}
    return Chat([{"role": "user", "content": f"no {i}"}, answer])


@pytest.mark.parametrize("pack_length", [None, 100])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_what_is_written_is_what_is_encoded(
    tokenizer: Any, tmp_path: Path, name: str, pack_length: int | None
) -> None:
    chats = [talk(i) for i in range(N_CHATS)]
    whole = encode_chats(tokenizer, chats, max_length=17)
    expected = whole.rows if pack_length is None else pack_rows(whole.rows, pack_length)
    options: dict[str, Any] = {"max_length": 17, "pack_length": pack_length}
    written = write_rows(tokenizer, chats, tmp_path / name, **options)
    assert load_rows(tmp_path / name).rows == expected
    assert (written.n_rows, written.report) == (len(expected), whole.report)
    assert 0 < written.report.n_truncated < N_CHATS
    content = (tmp_path / name).read_bytes()
    write_rows(tokenizer, chats, tmp_path / name, **options)
    assert (tmp_path / name).read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("pack_length", [None, 100])
def test_few_rows_are_in_memory_at_once(
    tokenizer: Any, tmp_path: Path, pack_length: int | None
) -> None:
    held = []

    def chats() -> Iterator[Chat]:
        for i in range(N_CHATS):
            held.append(sum(type(thing) is EncodedRow for thing in gc.get_objects()))
            yield talk(i)

    write_rows(tokenizer, chats(), tmp_path / "rows.jsonl", pack_length=pack_length)
    assert len(held) == N_CHATS
    assert max(held) - held[0] <= 3


@pytest.mark.parametrize("pack_length", [None, 100])
def test_nothing_is_left_of_rows_that_fail(
    tokenizer: Any, tmp_path: Path, pack_length: int | None
) -> None:
    def fails() -> Iterator[Chat]:
        yield talk(3)
        raise OSError("cut off")

    out = tmp_path / "rows.jsonl"
    with pytest.raises(OSError, match="cut off"):
        write_rows(tokenizer, fails(), out, pack_length=pack_length)
    with pytest.raises(ValueError, match="`chats` must have a supervised token"):
        write_rows(tokenizer, [talk(0)], out, pack_length=pack_length)
    assert not list(tmp_path.iterdir())
