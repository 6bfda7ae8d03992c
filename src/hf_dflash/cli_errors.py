"""Bad input to a command is one line and exit code 2, not a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

BAD_INPUT = (ValueError, TypeError, OSError, NotImplementedError, RuntimeError)


@contextmanager
def bad_input_is_one_line() -> Iterator[None]:
    """Say what is wrong in one line and leave with exit code 2."""
    try:
        yield
    except BAD_INPUT as error:
        message = " ".join(str(error).split())
        typer.echo(f"Error: {message}", err=True)
        raise typer.Exit(2) from None
