"""Keep regenerated answers on disk: JSON lines that an interrupted run can be continued from."""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """One answer of the target.

    ``ids`` are the very tokens that the target made, its end-of-turn token included: text that is
    tokenised again can come out otherwise. None if a server gave only text. ``finished`` says
    that the target ended the turn itself, False that the limit cut it.
    """

    message: dict[str, Any]
    ids: list[int] | None
    finished: bool


class AnswerFile:
    """Answers that are appended batch by batch; a context manager.

    Next to ``path`` stands ``path`` + ``.settings.json``: how the answers were made. Answers made
    otherwise are not mixed in silently.

    Args:
        path: The JSON lines; continued if it is there.
        settings: All that the law of the answers depends on.

    Raises:
        ValueError: If ``path`` holds answers that were made with other settings, or has a line
            that is no answer.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        self.done: set[str] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._check_settings(settings)
            self._drop_interrupted_line()
            self._read_done()
        else:
            text = json.dumps(settings, indent=2, ensure_ascii=False)
            settings_path(path).write_text(text + "\n", encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Write the records of one batch, in one piece, and flush them."""
        made = list(records)
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in made]
        self._file.write("".join(lines))
        self._file.flush()
        self.done.update(record["id"] for record in made)

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def _check_settings(self, settings: dict[str, Any]) -> None:
        kept_path = settings_path(self.path)
        if not kept_path.exists():
            raise ValueError(
                f"`out_path` {self.path} has no {kept_path.name} beside it, so how its answers "
                "were made is unknown. Give a new path, or put that file back."
            )
        kept = json.loads(kept_path.read_text(encoding="utf-8"))
        # Through JSON, as the kept ones went: tuples come back as lists.
        wanted = json.loads(json.dumps(settings))
        names = sorted(kept.keys() | wanted.keys())
        differ = [
            f"{name}: {kept.get(name)!r} there, {wanted.get(name)!r} now"
            for name in names
            if kept.get(name) != wanted.get(name)
        ]
        if differ:
            raise ValueError(
                f"`out_path` {self.path} holds answers made with other settings "
                f"({'; '.join(differ)}). Use the same settings, or give a new path."
            )

    def _drop_interrupted_line(self) -> None:
        content = self.path.read_bytes()
        whole_bytes = content.rfind(b"\n") + 1
        if whole_bytes < len(content):
            logger.warning("%s ended within a line, which is made again.", self.path)
            with self.path.open("r+b") as file:
                file.truncate(whole_bytes)

    def _read_done(self) -> None:
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    self.done.add(json.loads(line)["id"])
                except (ValueError, TypeError, KeyError) as error:
                    raise ValueError(
                        f"{self.path}, line {number}: not an answer ({error!r}). "
                        "Remove the line, or give another `out_path`."
                    ) from error


def settings_path(path: Path) -> Path:
    """Say where the settings of the answers in ``path`` are kept."""
    return path.with_name(path.name + ".settings.json")
