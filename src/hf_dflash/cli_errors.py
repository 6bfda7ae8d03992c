"""Bad input to a command is one line and exit code 2, not a traceback."""

import sys
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
        message = " ".join(_told(error).split())
        from tqdm import tqdm

        tqdm.write(f"Error: {message}", file=sys.stderr)  # not into a progress bar that is open
        raise typer.Exit(2) from None


def _told(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"there is no file {error.filename}. Check the path."
    return str(error)


@contextmanager
def own_errors_are_one_line() -> Iterator[None]:
    """Say in one line what this package raised, and keep the traceback of anything else.

    Hours into a run, an error of torch or of the network is understood by where it came from.
    """
    try:
        yield
    except BAD_INPUT as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
        if not place.startswith(f"{__package__}."):
            raise
        with bad_input_is_one_line():
            raise
