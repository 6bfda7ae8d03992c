"""Numbers in a card that no file gives: readers could not check them, so they are refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from .card_blocks import without_blocks

#: Words that make a number near them a claim about the drafter.
_CLAIM = re.compile(
    r"speed|\bfaster\b|\bfastest\b|\bas fast\b|\bquicker\b|\bslower\b|throughput|latency"
    r"|tok(en)?s?\s*(/|\bper\b|\b(a|each|every)\s+(second|cycle|step|pass|round)\b)"
    r"|\baccept(s|ed|ance)?\b|\brejected\b|\btau\b|τ|\bidentical\b|\bmismatch"
    r"|\d\s*[x\u00d7](?!\w)|\d\s*%|\bper ?cent\b|\b(run-?)?time\b|\bwait(s|ing)?\b|\bsooner\b"
    r"|\b(saves?|saving|cuts|reduces|reduction|halves|doubles|triples)\b",
    re.IGNORECASE,
)
_WORDS = (
    "two three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty fifty "
    "sixty seventy eighty ninety hundred thousand twice thrice double doubles triple triples "
    "quarter halves halved"
)
#: Digits that are no part of a name ("Qwen3-4B", "H200"), and words; "one" is too common.
_NUMBER = re.compile(
    rf"(?<![\w.\-])\d|\b({'|'.join(_WORDS.split())})(-?fold)?\b|\bhalf\b(?![ -]precision)",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"\w+://\S+|arxiv:\S+", re.IGNORECASE)
_ITEM = re.compile(r"\s*([*+-]|\d+[.)])\s+")
_HEADING = re.compile(r"#{1,6}\s")
_FENCE = re.compile(r"\s*```")

Line = tuple[int, str]


def figure_without_source(card: str, known: Collection[str] = ()) -> Line | None:
    r"""The first line that claims a speed or an acceptance outside the checked blocks.

    A number, in digits or in words, is a claim if a word of speed or acceptance stands in its line,
    its sentence, its table or the heading above.

    >>> figure_without_source("# A drafter\n\nIt is twice\nas fast.")
    (3, 'It is twice')

    Args:
        card: Whole text; its metadata are passed over, they are checked on their own.
        known: Lines that say what a file of the drafter says.
    """
    for lines, is_claim in _passages(_text_lines(card), known):
        for part in _parts(lines):
            if is_claim or any(_CLAIM.search(line) for _, line in part):
                for number, line in part:
                    if _NUMBER.search(line):
                        return number, lines[number - lines[0][0]][1].strip()
    return None


def _parts(lines: list[Line]) -> Iterator[list[Line]]:
    """What a word of speed in a passage may speak for: a table, a line, a sentence."""
    if lines and lines[0][1].lstrip().startswith("|"):
        yield lines
        return
    sentence: list[Line] = []
    for number, raw in lines:
        line = _ADDRESS.sub("", _ITEM.sub("", raw, count=1))
        yield [(number, line)]
        *ends, rest = re.split(r"(?<=[.!?])(?:\s+|$)", line)
        for end in ends:
            yield [*sentence, (number, end)]
            sentence = []
        sentence.append((number, rest))
    yield sentence


def number_out_of_place(card: str, titles: Collection[str], known: Collection[str]) -> Line | None:
    """The first line with a number that stands in a generated section and was not generated.

    Args:
        card: Whole text.
        titles: Of the generated sections; what comes before the first one is generated, too.
        known: Lines that are generated for this drafter.
    """
    in_generated = True
    for number, line in _text_lines(card):
        if line.startswith("## "):
            in_generated = line.removeprefix("## ").strip() in titles
        elif in_generated and re.search(r"\d", line) and line.strip() not in known:
            return number, line.strip()
    return None


def _text_lines(card: str) -> Iterator[Line]:
    """Lines without metadata and blocks, numbered as in the file."""
    header = re.match(r"---\n.*?\n---\n", card, re.DOTALL)
    n_skipped = 0 if header is None else header[0].count("\n")
    for number, line in enumerate(without_blocks(card).split("\n"), start=1):
        if number > n_skipped:
            yield number, line


def _passages(lines: Iterator[Line], known: Collection[str]) -> Iterator[tuple[list[Line], bool]]:
    """Lines that are read together, and whether their heading makes claims of their numbers."""
    passage: list[Line] = []
    claims = in_code = False
    for number, line in lines:
        is_fence = _FENCE.match(line) is not None
        is_heading = not in_code and _HEADING.match(line) is not None
        ends = not line.strip() or line.strip() in known
        if ends or is_heading or is_fence or in_code or _ITEM.match(line):
            yield passage, claims
            passage = []
        if is_heading:
            claims = line.strip() not in known and _CLAIM.search(line) is not None
        in_code ^= is_fence
        if not ends:
            passage.append((number, line))
    yield passage, claims
