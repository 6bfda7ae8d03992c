"""What `hf-dflash report` does."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from .findings import speed_sentence, text_sentence
from .measurement import read_measurement
from .report import picture_files, write_report


def run_report(bench: Path, out: Path, pictures: Path | None) -> None:
    """Write a measurement as a page, and its pictures as files if asked to."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ValueError(f"`out` must be a file in an existing folder, got {out}.")
    measurement = read_measurement(bench)
    write_report(measurement, out)
    console = Console()
    console.print(Text(f"{speed_sentence(measurement)} {text_sentence(measurement)}"))
    console.print(Text(f"Wrote {out}"))
    if pictures is not None:
        for path in picture_files(measurement, pictures):
            console.print(Text(f"Wrote {path}"))
