"""Values of a `config.json` that are of the wrong kind: errors that name the key."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_OF_A_FIELD = re.compile(r"Validation error for field '(\w+)'")


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Check that a value is an integer within its bounds.

    Raises:
        ValueError: If it is out of them.
        TypeError: If it is no integer.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an integer, got {value!r}.")
    if value < low or (high is not None and value > high):
        hint = (
            f" It is a row of the target's embedding, so it stays below `vocab_size` ({high + 1})."
            if name == "mask_token_id" and high is not None
            else ""
        )
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"`{name}` must be {bound}, got {value}.{hint}")


def check_names(name: str, value: Any) -> None:
    """Check that a value is a list of names, or not given.

    Raises:
        TypeError: If it is something else.
    """
    if value is None:
        return
    if not isinstance(value, list | tuple) or any(not isinstance(part, str) for part in value):
        raise TypeError(f"`{name}` must be a list of names, got {value!r}.")


def check_dtype(name: str, value: Any) -> None:
    """Check that a value is a dtype of torch or the name of one, or not given.

    Raises:
        ValueError: If it is something else.
    """
    named = value if value is None else getattr(torch, str(value).rpartition(".")[2], None)
    if value is not None and not isinstance(named, torch.dtype):
        raise ValueError(f'`{name}` must be a dtype of torch such as "bfloat16", got {value!r}.')


@contextmanager
def plain_field_errors() -> Iterator[None]:
    """Name the key whose value transformers finds to be of the wrong kind.

    Its own error is of a class of huggingface_hub, and neither a TypeError nor a ValueError.

    Raises:
        TypeError: In place of that error.
    """
    try:
        yield
    except Exception as error:
        field = _OF_A_FIELD.match(str(error))
        if field is None or error.__cause__ is None:
            raise
        reason = str(error.__cause__).partition("\n")[0].removeprefix(f"Field '{field[1]}' ")
        raise TypeError(
            f"`{field[1]}` is of the wrong kind: {reason}. Correct it in config.json."
        ) from error
