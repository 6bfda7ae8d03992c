"""Keep what a benchmark has measured so far: an interrupted one goes on, nothing is mixed in.

A journal is a file of JSON lines beside the result, one line a prompt; the first says how the runs
were made. The result itself is written once, at the end.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .measurement import Measurement, Run, from_plain

#: What may differ between two parts of one measurement.
#: `few_rows` is found out by the clock: where both ways take about as long, it may go either way.
FREE = ("command", "date", "few_rows")


@dataclass(frozen=True, slots=True)
class Entry:
    """A line: one prompt."""

    runs: list[Run]
    wall_s: float  # since the prompt before it, or since the start
    few_rows: list[int] | None = None  # as `Provenance` has it, of the process that measured


class Journal:
    """Prompts that have been measured, on disk.

    Args:
        path: Continued if it holds a run.
        plan: The measurement without runs.
        start_s: When the command began, by ``time.perf_counter``.

    Attributes:
        plan: The same; of a measurement that goes on, as it began: its command and its date.
        done: Runs by data set and prompt.
        wall_s: Seconds that all of them took, in every sitting, loading and warming up included.
        few_rows: What `Provenance.few_rows` was for each of them.

    Raises:
        ValueError: ``path`` holds runs of another measurement, or a broken line.
    """

    def __init__(self, path: Path, plan: Measurement, *, start_s: float) -> None:
        self.path, self.plan = path, plan
        self.wall_s, self._last_s = 0.0, start_s
        self.done: dict[tuple[str, int], list[Run]] = {}
        self.few_rows: list[list[int] | None] = []
        self._few_rows_now = plan.provenance.few_rows
        header = json.dumps(asdict(replace(plan, runs=[])), ensure_ascii=False)
        lines = self._whole_lines()
        if len(lines) > 1:
            kept = from_plain(Measurement, _parsed(lines[0], f"{path}, line 1"), f"{path}, line 1")
            refuse_other(kept, plan, path)
            self.plan = kept
            for number, line in enumerate(lines[1:], start=2):
                self._read(line, f"{path}, line {number}")
        else:  # a run that measured nothing binds no later one
            self.remove()
            self._append(header)

    def append(self, runs: Sequence[Run]) -> None:
        """Write all runs of one prompt, and have them on disk.

        Raises:
            OSError: They cannot be written; what was there before stays.
        """
        now = time.perf_counter()
        entry = Entry(list(runs), now - self._last_s, self._few_rows_now)
        self._append(json.dumps(asdict(entry), ensure_ascii=False, allow_nan=False))
        self._last_s = now
        self._add(entry)

    def remove(self) -> None:
        """Delete the file: its runs stand elsewhere."""
        self.path.unlink(missing_ok=True)

    def _append(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())  # a full disk may say so only here

    def _whole_lines(self) -> list[bytes]:
        """Cut off a line that an interruption has left half."""
        content = self.path.read_bytes() if self.path.exists() else b""
        n_whole_bytes = content.rfind(b"\n") + 1
        if n_whole_bytes < len(content):
            with self.path.open("r+b") as file:
                file.truncate(n_whole_bytes)
        return content[:n_whole_bytes].splitlines()

    def _read(self, line: bytes, where: str) -> None:
        entry: Entry = from_plain(Entry, _parsed(line, where), where)
        if entry.runs:
            self._add(entry)

    def _add(self, entry: Entry) -> None:
        self.done[entry.runs[0].dataset, entry.runs[0].prompt_index] = entry.runs
        self.wall_s += entry.wall_s
        self.few_rows.append(entry.few_rows)


def refuse_other(kept: Measurement, wanted: Measurement, path: Path) -> None:
    """Refuse to go on with what was made otherwise.

    Raises:
        ValueError: The message says what differs.
    """
    there, now = (_fingerprint(measurement) for measurement in (kept, wanted))
    if there["code_sha256"] and now["code_sha256"]:  # a commit may change the documents alone
        del there["commit"], now["commit"]
    differ = [
        f"{name}: {str(there.get(name))[:80]} there, {str(now.get(name))[:80]} now"
        for name in sorted(there.keys() | now.keys())
        if there.get(name) != now.get(name)
    ]
    if differ:
        raise ValueError(
            f"`json` {path} holds another measurement ({'; '.join(differ)}). Use the same options, "
            "name another file, or delete that one."
        )


def _fingerprint(measurement: Measurement) -> dict[str, Any]:
    """All that a measurement depends on, by name."""
    provenance = {f: v for f, v in asdict(measurement.provenance).items() if f not in FREE}
    for model in ("target", "drafter"):  # a difference is told by its own name
        told = provenance.pop(model)
        provenance |= {f"{model}'s {field}": value for field, value in told.items()}
    # Through JSON, as the kept one went.
    plain: dict[str, Any] = json.loads(
        json.dumps(
            provenance
            | asdict(measurement.settings)
            | {"prompts": measurement.prompts, "prompt_options": measurement.prompt_options}
        )
    )
    return plain


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:  # neither UTF-8 nor JSON
        raise ValueError(f"{where}: not JSON ({error}). Delete the file to begin anew.") from error
