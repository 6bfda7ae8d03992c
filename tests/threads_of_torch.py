"""The threads by which processes that train together talk to each other."""

from __future__ import annotations

from pathlib import Path

import pytest


def refuse_threads_of_gloo() -> None:
    """Fail if one still lives: should it, the interpreter may abort when it shuts down."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    left = [name for name in names if "gloo" in name]
    if left:
        pytest.fail(f"The process group is still held: {left}.")
