"""Write training rows as they are encoded: a data set of any size in no memory."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .chats import Chat
from .data import DataReport, RowStream, line_of, whole_file
from .loss_mask import EncodedRow
from .packing import packed_rows
from .row_file import RowFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class WrittenRows:
    """How many rows were written, packed or not, and what became of the chats."""

    n_rows: int
    report: DataReport


def write_rows(
    tokenizer: "PreTrainedTokenizerBase",
    chats: Iterable[Chat],
    path: Path,
    *,
    max_length: int | None = None,
    merge_turns: bool = True,
    pack_length: int | None = None,
) -> WrittenRows:
    """Encode chats and write their rows, all of them or none.

    To be packed, rows are written apart first; only their lengths are kept.

    Args:
        tokenizer: See :func:`hf_dflash.data.encode_chats`, as for the other arguments.
        chats: Read by :func:`hf_dflash.chats.read_chats`.
        path: A ``.jsonl`` or ``.jsonl.gz`` file.
        max_length: Tokens at which a row is cut; None cuts none.
        merge_turns: See :class:`hf_dflash.loss_mask.ChatEncoder`.
        pack_length: Tokens to pack rows into; None packs none.

    Raises:
        ValueError: If no row is left, or a length is too short for any.
    """
    stream = RowStream(tokenizer, chats, max_length=max_length, merge_turns=merge_turns)
    if pack_length is None:
        with whole_file(path) as file:
            n_rows = _write(stream, file)
            report = stream.report()
        return WrittenRows(n_rows, report)
    apart = path.with_name(path.name + ".unpacked")
    try:
        lengths = array("Q")
        with apart.open("wb") as file:
            for row in stream:
                lengths.append(len(row.input_ids))
                file.write(line_of(row))
        report = stream.report()
        packed = packed_rows(RowFile(apart).row, lengths, pack_length)
        with whole_file(path) as file:
            return WrittenRows(_write(packed, file), report)
    finally:
        apart.unlink(missing_ok=True)


def _write(rows: Iterable[EncodedRow], file: BinaryIO) -> int:
    n_rows = 0
    for row in rows:
        file.write(line_of(row))
        n_rows += 1
    return n_rows
