"""The pages of the documentation, as tests read them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: Which tests run the Python of a page and the commands in its blocks, `to_run(page)`.
RUN_BY = {
    "decoding.md": "tests/e2e/test_decoding_docs.py",
    "formats.md": "tests/unit/test_formats_docs.py",
    "how-it-works.md": "tests/unit/test_docs.py",
    "measuring.md": "tests/e2e/test_docs_measuring.py",
    "publishing.md": "tests/unit/test_publishing_docs.py",
    "serving.md": "tests/unit/test_formats_docs.py",
    "training.md": "tests/e2e/test_training_docs.py",
}
#: What a command may begin with; another program in a block of commands is an error.
PROGRAMS = ("hf-dflash", "hf", "python", "python3", "pip", "accelerate", "torchrun", "vllm", "git")
PROGRAMS += ("llama-server", "convert_hf_to_gguf.py")
#: How a page says that a command cannot be run everywhere.
MARK = re.compile(r"needs? (?:an?|the|\d+) (?:GPUs?|nodes?|hour|Hub|server|build of llama\.cpp)\b")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Command:
    """A command line of a page."""

    page: str
    line: int  # 1-based
    text: str
    in_block: bool  # a block of commands; else within a sentence or a table
    mark: str | None  # what the page says that it needs

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def program(self) -> str:
        return self.words[0].rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def text_of(page: str) -> str:
    """A page of docs/, or the README of the repository as "../README.md"."""
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """What stands in a page's fences of one language."""
    return [content for found, content in _FENCE.findall(text_of(page)) if found == language]


def commands(page: str) -> list[Command]:
    """Every command of a page, in blocks and in the text."""
    return sorted([*_in_blocks(page), *_in_text(page)], key=lambda command: command.line)


def to_run(page: str) -> list[list[str]]:
    """The words of each command that the tests of a page have to run."""
    return [c.words for c in commands(page) if c.in_block and c.mark is None]


def _mark(text: str) -> str | None:
    found = MARK.search(" ".join(text.split()))
    return found[0] if found else None


def _in_blocks(page: str) -> Iterator[Command]:
    text = text_of(page)
    for block in _FENCE.finditer(text):
        if block[1] not in ("bash", "console", "sh", "shell"):
            continue
        of_block = None
        lines = re.finditer(r"(?:[^\n]*\\\n)*[^\n]+", block[2])  # a \ goes on
        for line in lines:
            if line[0].startswith("#"):
                of_block = _mark(line[0])
                continue
            number = text.count("\n", 0, block.start(2) + line.start()) + 1
            mark = _mark(line[0].partition(" #")[2]) or of_block
            for part in line[0].replace("\\\n", " ").split(" && "):
                yield Command(page, number, part, in_block=True, mark=mark)


def _in_text(page: str) -> Iterator[Command]:
    """Code between backticks that is a program with arguments; marked in its paragraph or row."""
    prose = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text_of(page))
    end_of_part = r"\n(?=\s*\n|\* |\|)"
    start = 0
    for part in re.split(end_of_part, prose):
        for code in _CODE.finditer(part):
            words = code[1].split()
            if len(words) > 1 and words[0].rpartition("/")[2] in PROGRAMS:
                line = prose.count("\n", 0, start + code.start()) + 1
                yield Command(page, line, " ".join(words), in_block=False, mark=_mark(part))
        start += len(part) + 1
