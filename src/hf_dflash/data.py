"""Training data: chats become rows of token ids and loss masks that a trainer takes as they are."""

import gzip
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from .chats import Chat, lines_of
from .loss_mask import ChatEncoder, EncodedRow

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NO_ANSWER = "there is no assistant turn"
NO_ANCHOR = "fewer than two supervised tokens in a row"
CUT_AWAY = "nothing supervised before `max_length`"


@dataclass(frozen=True)
class DataReport:
    """What became of the chats.

    Attributes:
        n_chats: Chats that were read.
        n_tokens: Tokens in the rows.
        n_supervised: Of them, those trained on.
        n_truncated: Rows that were cut at ``max_length``.
        skipped: How many chats, turns or rows gave nothing, by reason.
    """

    n_chats: int = 0
    n_tokens: int = 0
    n_supervised: int = 0
    n_truncated: int = 0
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatRows:
    """Rows for a trainer; indexed, it gives what a collator takes."""

    rows: list[EncodedRow]
    report: DataReport = DataReport()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return columns_of(self.rows[index])


def encode_chats(
    tokenizer: "PreTrainedTokenizerBase",
    chats: Iterable[Chat],
    *,
    max_length: int | None = None,
    merge_turns: bool = True,
) -> ChatRows:
    """Encode chats for training; what cannot be used is counted and logged, never padded over.

    Args:
        tokenizer: A fast one, with the chat template that the target is served with.
        chats: Read by :func:`hf_dflash.chats.read_chats`.
        max_length: Tokens at which a row is cut; None cuts none.
        merge_turns: See :class:`hf_dflash.loss_mask.ChatEncoder`.

    Raises:
        ValueError: If no row is left, or ``max_length`` is too short for any.
    """
    stream = RowStream(tokenizer, chats, max_length=max_length, merge_turns=merge_turns)
    rows = list(stream)
    return ChatRows(rows, stream.report())


class RowStream:
    """The rows of chats, one by one; counts on the way what becomes of the chats.

    The arguments are those of `encode_chats`.

    Raises:
        ValueError: If ``max_length`` is too short for any row.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chats: Iterable[Chat],
        *,
        max_length: int | None = None,
        merge_turns: bool = True,
    ):
        if max_length is not None and max_length < 2:
            raise ValueError(f"`max_length` must be at least 2, got {max_length}.")
        self._encoder = ChatEncoder(tokenizer, merge_turns=merge_turns)
        self._chats = chats
        self._max_length = max_length
        self._counts: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def __iter__(self) -> Iterator[EncodedRow]:
        for chat in self._chats:
            for whole in self._rows_of(chat):
                row = self._cut(whole, chat)
                if row is not None:
                    self._counts["rows"] += 1
                    self._counts["tokens"] += len(row.input_ids)
                    self._counts["supervised"] += sum(row.loss_mask)
                    yield row

    def report(self) -> DataReport:
        """What became of the chats, at the end; what was skipped is logged.

        Raises:
            ValueError: If there was no row.
        """
        n_chats, n_truncated = self._counts["chats"], self._counts["truncated"]
        for reason, count in self._skipped.items():
            logger.warning("Skipped %d: %s; first %s.", count, reason, self._first[reason])
        if n_truncated:
            logger.warning("Cut %d rows at `max_length` %s.", n_truncated, self._max_length)
        if not n_chats:
            raise ValueError("`chats` must hold at least one chat, got none. Is the file empty?")
        if not self._counts["rows"]:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in self._skipped.items())
            raise ValueError(
                f"`chats` must have a supervised token: none of the {n_chats} chats gives a row to "
                f"train on ({reasons}). Regenerate the answers, or check the "
                "roles and the chat template."
            )
        return DataReport(
            n_chats=n_chats,
            n_tokens=self._counts["tokens"],
            n_supervised=self._counts["supervised"],
            n_truncated=n_truncated,
            skipped=dict(self._skipped),
        )

    def _skip(self, reason: str, where: str) -> None:
        self._skipped[reason] += 1
        self._first.setdefault(reason, where)

    def _rows_of(self, chat: Chat) -> list[EncodedRow]:
        self._counts["chats"] += 1
        encoded = self._encoder.encode(chat)
        for problem in encoded.problems:
            reason, detail = problem.args
            self._skip(reason, f"{chat.source} ({detail})")
        if not encoded.rows and not encoded.problems:
            self._skip(NO_ANSWER, chat.source)
        return encoded.rows

    def _cut(self, row: EncodedRow, chat: Chat) -> EncodedRow | None:
        most = self._max_length
        if not row.has_anchor():
            self._skip(NO_ANCHOR, chat.source)
            return None
        if most is None or len(row.input_ids) <= most:
            return row
        row = EncodedRow(row.input_ids[:most], row.loss_mask[:most])
        if not row.has_anchor():
            self._skip(CUT_AWAY, chat.source)
            return None
        self._counts["truncated"] += 1
        return row


def line_of(row: EncodedRow) -> bytes:
    """A row as prepared rows hold it."""
    return (json.dumps(columns_of(row)) + "\n").encode()


def save_rows(data: ChatRows, path: Path) -> None:
    """Write rows as JSON lines, gzipped if ``path`` ends in ``.gz``; all of them or none."""
    with whole_file(path) as file:
        file.writelines(map(line_of, data.rows))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file, gzipped if its name says so, that gets its name when it is complete."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            if path.suffix == ".gz":
                # The same rows give the same file: no time of writing, no name.
                with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as zipped:
                    yield cast("BinaryIO", zipped)
            else:
                yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_rows(path: Path) -> ChatRows:
    """Read what :func:`save_rows` wrote.

    Raises:
        ValueError: If a line is not such a row.
    """
    lines = enumerate(lines_of(path), start=1)
    return ChatRows([row_of(line, f"{path}, line {number}") for number, line in lines])


def columns_of(row: EncodedRow) -> dict[str, list[int]]:
    """What a collator takes of a row."""
    documents = {} if row.document_ids is None else {"document_ids": row.document_ids}
    return {"input_ids": row.input_ids, "loss_mask": row.loss_mask, **documents}


def row_of(line: bytes, where: str) -> EncodedRow:
    """Read one line of prepared rows; ``where`` it stands is for the message.

    Raises:
        ValueError: If it is not such a row.
    """
    try:
        row = EncodedRow(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{where}: not a prepared row ({error}). Make rows of chats with `hf-dflash prepare`."
        ) from error
    for name, column in columns_of(row).items():
        if not isinstance(column, list) or not all(type(value) is int for value in column):
            raise ValueError(f"{where}: `{name}` must be a list of integers, got {column!r:.60}.")
        if len(column) != len(row.input_ids):
            raise ValueError(
                f"{where}: `{name}` needs a value for each of the {len(row.input_ids)} "
                f"`input_ids`, got {len(column)}."
            )
    return row


def coloured(tokenizer: "PreTrainedTokenizerBase", row: EncodedRow) -> "Text":
    """Show a row for the eye: supervised tokens green, the others dim, in alternating shades.

    Line breaks are shown as an arrow, too, so that their colour can be seen.

    Raises:
        RuntimeError: If the package ``rich`` is not installed.
    """
    try:
        from rich.text import Text
    except ImportError as error:
        raise RuntimeError("Showing rows needs `rich`: pip install 'hf-dflash[demo]'.") from error
    shown = Text()
    for i, (token_id, mask) in enumerate(zip(row.input_ids, row.loss_mask, strict=True)):
        style = ("black on green", "black on bright_green") if mask else ("dim", "dim reverse")
        piece = str(tokenizer.decode([token_id])).replace("\n", "\u21b5\n")
        shown.append(piece, style=style[i % 2])
    return shown
