"""Read chats from JSON lines, Parquet or a dataset of the Hub, in the layouts that are in use.

A record is one of: ``messages``; ``conversations`` (ShareGPT: ``from`` and ``value``, or ``role``
and ``content``, and beside them perhaps a text ``system``, the first turn); ``prompt`` with
``response`` or ``completion``; ``prompt`` alone, to be answered; ``text``. It may carry ``tools``,
``chat_template_kwargs`` (passed to the chat template, such as ``{"enable_thinking": false}``),
``answer_ids``, the very tokens of the last answer, and ``finished``, false if a limit cut that
answer.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .hub_errors import plain_dataset_errors

Message = dict[str, Any]
Record = dict[str, Any]

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
LAYOUTS = ("messages", "conversations", "prompt", "text")
ANSWER_FIELDS = ("response", "completion")
# None of them is a label; `id` names an answer by its prompt.
OWN_FIELDS = {*LAYOUTS, *ANSWER_FIELDS, "tools", "chat_template_kwargs", "answer_ids"}
OWN_FIELDS |= {"finished", "id"}


@dataclass(frozen=True)
class Chat:
    """One conversation, or one plain text.

    Attributes:
        messages: As chat templates take them; empty for a plain text.
        text: The plain text; None for a conversation.
        tools: JSON schemas of the tools that the template announces.
        template_options: Passed to the chat template.
        labels: The record's other fields that are text, numbers or truth values.
        answer_ids: The tokens of the last message as the target made them; else None.
        finished: False if a limit cut the last message, so that it does not end its turn.
        only_last: Whether the last message alone is to be learned: it was made anew, and what
            stands before it is said elsewhere, or by somebody else.
        source: Where the chat was read, for error messages.
    """

    messages: list[Message] = field(default_factory=list)
    text: str | None = None
    tools: list[Record] | None = None
    template_options: Record = field(default_factory=dict)
    labels: Record = field(default_factory=dict)
    answer_ids: list[int] | None = None
    finished: bool = True
    only_last: bool = False
    source: str = "chat"


def read_chats(
    source: str | Path, *, split: str = "train", config: str | None = None
) -> Iterator[Chat]:
    """Read chats one by one.

    Args:
        source: A file (``.jsonl``, ``.jsonl.gz`` or ``.parquet``), or the name of a dataset on
            the Hub, read as a stream with the package ``datasets``.
        split: Of a dataset on the Hub.
        config: Of a dataset on the Hub that has several.

    Raises:
        ValueError: If a record is broken; the message says where it stands. Or if ``source`` is
            neither a file of a known kind nor a dataset that the Hub has for you, or is a file
            and ``config`` is given.
        RuntimeError: If a package that is needed to read ``source`` is not installed, or the
            Hub is in trouble.
        PermissionError: If the dataset is gated, or the Hub does not accept the token.
        ConnectionError: If the Hub cannot be reached.
    """
    path = Path(source)
    if path.is_file():
        if config is not None:
            raise ValueError(
                f"`config` is for a dataset on the Hub, but `source` {source} is a file here, and "
                f"got {config!r}. Leave it out."
            )
        records = _records_of_file(path)
    elif path.suffix in {".jsonl", ".gz", ".parquet"} or str(source).count("/") > 1:
        raise ValueError(f"`source` {source} is not there. Check the path.")
    else:
        records = _records_of_hub(str(source), config, split)
    return (chat_of(record, where) for where, record in records)


def chat_of(record: object, where: str = "record") -> Chat:
    """Make a chat of one record, whatever its layout.

    >>> chat_of({"prompt": "Hi", "response": "Hello!"}).messages[1]
    {'role': 'assistant', 'content': 'Hello!'}

    Raises:
        ValueError: If the record has none of the layouts, or a field is not as it should be.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a record must be an object, got {type(record).__name__}.")
    layout = next((name for name in LAYOUTS if record.get(name) is not None), None)
    if layout is None:
        raise ValueError(
            f"{where}: a record needs one of {', '.join(LAYOUTS)}; got the fields "
            f"{sorted(map(str, record))}. Rename the column that holds the chat."
        )
    messages, text = [], None
    if layout == "text":
        text = _text(record["text"], f"{where}, `text`")
    else:
        messages = _messages(record, layout, where)
    return Chat(
        messages,
        text,
        tools=_optional(record, "tools", list, f"{where}: "),
        template_options={
            # Null means what leaving it out means; passed on, it would stand above a default.
            name: value
            for name, value in template_options_of(record, f"{where}: ").items()
            if value is not None
        },
        labels={
            name: value
            for name, value in record.items()
            if name not in OWN_FIELDS | ({"system"} if layout == "conversations" else set())
            and isinstance(value, str | int | float | bool)
        },
        answer_ids=_answer_ids(record, messages, where),
        finished=record.get("finished") is not False,
        only_last="finished" in record and ("id" in record or "answer_ids" in record),
        source=where,
    )


def _messages(record: Record, layout: str, where: str) -> list[Message]:
    if layout == "prompt":
        return _prompt_and_answer(record, where)
    turns = record[layout]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: `{layout}` must be a list of turns, got {turns!r:.80}.")
    messages = [_message(turn, f"{where}, turn {i}") for i, turn in enumerate(turns)]
    system = record.get("system") if layout == "conversations" else None
    return _with_system(system, messages, where) if system else messages


def _with_system(system: object, messages: list[Message], where: str) -> list[Message]:
    """Put ShareGPT's field of that name first, where serving has it."""
    first = {"role": "system", "content": _text(system, f"{where}, `system`")}
    if messages[0]["role"] != "system":
        return [first, *messages]
    if messages[0]["content"] != system:
        raise ValueError(
            f"{where}: `system` must be what the first turn says, which is a system turn, too; got "
            f"{system!r:.80} and {messages[0]['content']!r:.80}. Remove one of them."
        )
    return messages


def _prompt_and_answer(record: Record, where: str) -> list[Message]:
    """Prompt and answer may each be a text or a list of messages."""
    messages: list[Message] = []
    answer_field = next((name for name in ANSWER_FIELDS if record.get(name) is not None), None)
    for name, role in (("prompt", "user"), (answer_field, "assistant")):
        value = record[name] if name else []
        if isinstance(value, list):
            messages += [_message(turn, f"{where}, `{name}`") for turn in value]
        else:
            messages.append({"role": role, "content": _text(value, f"{where}, `{name}`")})
    if not messages:
        raise ValueError(f"{where}: `prompt` must not be an empty list.")
    return messages


def _message(turn: object, where: str) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"{where}: a turn must be an object, got {type(turn).__name__}.")
    if "from" in turn:
        role = SHAREGPT_ROLES.get(turn["from"])
        if role is None:
            known = ", ".join(SHAREGPT_ROLES)
            raise ValueError(f"{where}: `from` must be one of {known}; got {turn['from']!r}.")
        return {"role": role, "content": _text(turn.get("value"), f"{where}, `value`")}
    if not isinstance(turn.get("role"), str):
        raise ValueError(f"{where}: a turn needs `role` or `from`, got the fields {sorted(turn)}.")
    # Writers of JSON lines fill turns with None, too.
    message = {name: value for name, value in turn.items() if value is not None}
    if not message.get("tool_calls") and not isinstance(message.get("content"), str | list):
        raise ValueError(f"{where}: `content` must be text, got {turn.get('content')!r:.80}.")
    return message


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text, got {value!r:.80}.")
    return value


def template_options_of(record: Record, before: str = "") -> Record:
    """What a record wants passed to the chat template; empty if it says nothing.

    Raises:
        ValueError: If it is no object; the message begins with ``before``.
    """
    options: Record | None = _optional(record, "chat_template_kwargs", dict, before)
    return options or {}


def _optional(record: Record, name: str, kind: type, before: str) -> Any:
    value = record.get(name)
    # Parquet keeps nested objects of changing shape as JSON text.
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if value is not None and not isinstance(value, kind):
        raise ValueError(
            f"{before}`{name}` must be a {kind.__name__} or its JSON text, got {value!r:.80}."
        )
    return value


def _answer_ids(record: Record, messages: list[Message], where: str) -> list[int] | None:
    ids: list[int] | None = record.get("answer_ids")
    if ids is None:
        return None
    is_ids = isinstance(ids, list) and ids and all(type(token) is int for token in ids)
    if not is_ids or min(ids) < 0:
        raise ValueError(f"{where}: `answer_ids` must be token ids, got {ids!r:.80}.")
    if not messages or messages[-1]["role"] != "assistant":
        raise ValueError(
            f"{where}: `answer_ids` are the last message's, which must be the assistant's."
        )
    return ids


def _records_of_file(path: Path) -> Iterator[tuple[str, object]]:
    if path.suffix == ".parquet":
        return _records_of_parquet(path)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _records_of_json_lines(path)
    raise ValueError(
        f"`source` must be a .jsonl, .jsonl.gz or .parquet file, got {path}. Convert it, or name "
        "it after what it holds."
    )


def _records_of_json_lines(path: Path) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:  # neither UTF-8 nor JSON
            raise ValueError(f"{where}: not JSON ({error}). Mend or remove it.") from error
        yield where, record


def lines_of(path: Path) -> Iterator[bytes]:
    """Read the lines of a file, gzipped if its name ends in ``.gz``.

    Raises:
        ValueError: If it is not gzipped, or was cut off.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}). Fetch it again.") from error


def _records_of_parquet(path: Path) -> Iterator[tuple[str, object]]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise RuntimeError(
            f"Reading {path} needs `pyarrow`: pip install 'hf-dflash[train]'."
        ) from error
    with ParquetFile(path) as file:
        batches: Iterable[Any] = file.iter_batches(batch_size=1024)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{path}, row {number}", _without_fill(row)


def _records_of_hub(name: str, config: str | None, split: str) -> Iterator[tuple[str, object]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise RuntimeError(
            f"`source` {name} is no file here, and reading a dataset of the Hub needs `datasets`: "
            "pip install 'hf-dflash[train]'."
        ) from error
    instead = "Connect, or give a file (.jsonl, .jsonl.gz, .parquet)."
    with plain_dataset_errors(name, instead):
        rows = load_dataset(name, config, split=split, streaming=True)
        part = f"{name}, {split}" if config is None else f"{name}, {config}, {split}"
        for number, row in enumerate(rows):
            yield f"{part}, row {number}", _without_fill(row)


def _without_fill(row: Any) -> Any:
    """Leave out, at any depth, the fields of objects that are None.

    Arrow gives every object all fields that any object of its column has, so the arguments of
    one call would come with the names of all others'.
    """
    if isinstance(row, dict):
        return {name: _without_fill(value) for name, value in row.items() if value is not None}
    return [_without_fill(value) for value in row] if isinstance(row, list) else row
