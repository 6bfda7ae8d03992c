"""The token view of a report: every token coloured by how it came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from .findings import main_summary, plural, times
from .measurement import Measurement, Run

Origin = Literal["first", "accepted", "bonus"]
#: Most outputs that are shown; a page of all of them would be too heavy for a phone.
MOST_SHOWN = 12

_ORIGINS = {
    "first": "from the pass over the prompt",
    "accepted": "a draft that the target accepted",
    "bonus": "the target's own (bonus) token",
}


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an output."""

    token_id: int
    origin: Origin
    cycle: int | None  # None for the first token, which belongs to none
    starts_cycle: bool
    rejected_ids: tuple[int, ...] = ()  # what was drafted from here on instead


def tokens_of(run: Run) -> list[Token]:
    """Say of every token of a run how it came.

    The first one comes from the prompt's pass. Then each cycle gives its accepted drafts and,
    unless a stop cut it, the bonus token.
    """
    tokens = [Token(run.token_ids[0], "first", None, False)]
    rejected = run.rejected_ids or [[]] * len(run.n_accepted or [])
    for cycle, (n_accepted, instead) in enumerate(zip(run.n_accepted or [], rejected, strict=True)):
        emitted = run.token_ids[len(tokens) : len(tokens) + n_accepted + 1]
        for i, token_id in enumerate(emitted):
            is_bonus = i == n_accepted
            tokens.append(
                Token(
                    token_id,
                    "bonus" if is_bonus else "accepted",
                    cycle,
                    i == 0,
                    tuple(instead) if is_bonus else (),
                )
            )
    return tokens


def shown_runs(measurement: Measurement) -> list[tuple[Run, float | None]]:
    """Of each data set the prompts with the least, the median and the greatest speed-up.

    Returns:
        Runs of the drafter, first repeat, each with its speed-up over plain decoding.
    """
    main = main_summary(measurement)
    if main is None:
        return []
    plain = {(r.prompt_key, r.repeat): r for r in measurement.runs if r.method == "plain"}
    by_dataset: dict[str, list[tuple[Run, float | None]]] = {}
    first = min(run.repeat for run in measurement.runs)
    for run in measurement.runs:
        if run.variant == main.variant and run.repeat == first and run.n_accepted is not None:
            beside = plain.get((run.prompt_key, run.repeat))
            ratio = None if beside is None else run.tokens_per_s / beside.tokens_per_s
            by_dataset.setdefault(run.dataset, []).append((run, ratio))
    each = min(3, max(1, MOST_SHOWN // max(1, len(by_dataset))))
    shown = [pair for pairs in by_dataset.values() for pair in _spread_out(pairs, each)]
    return shown[:MOST_SHOWN]


def _spread_out(
    pairs: Sequence[tuple[Run, float | None]], n: int
) -> list[tuple[Run, float | None]]:
    """The middle one, and the ends if there is room, from the fastest on."""
    ordered = sorted(pairs, key=lambda pair: -(pair[1] or 0.0))
    last = len(ordered) - 1
    wanted = {1: [last // 2], 2: [0, last]}.get(n, [0, last // 2, last])
    return [ordered[i] for i in dict.fromkeys(wanted)]


def token_section(measurement: Measurement) -> str:
    """The section, or a sentence that there is nothing to show."""
    runs = shown_runs(measurement)
    if not runs:
        return "<p>No output of the drafter was recorded.</p>"
    views = "\n".join(
        _view(measurement, run, ratio, is_open=i == 0) for i, (run, ratio) in enumerate(runs)
    )
    without = all(run.rejected_ids is None for run, _ in runs)
    note = " The drafts that were rejected were not recorded." if without else ""
    return (
        "<p>Of each data set the prompts with the greatest, the median and the least speed-up. "
        "A bar marks where a cycle begins: one pass of the drafter, one of the target. Point at a "
        f"token, or tap it, to see how it came and what had been drafted in its place.{note}</p>\n"
        '<p class="legend"><span class="t accepted">accepted draft</span>'
        '<span class="t bonus">the target\'s own token</span>'
        '<span class="t bonus instead">instead of a rejected draft</span>'
        '<span class="t first">from the prompt\'s pass</span></p>\n'
        f"{views}"
    )


def _view(measurement: Measurement, run: Run, ratio: float | None, *, is_open: bool) -> str:
    cycles = run.n_accepted or []
    length = (sum(cycles) + len(cycles)) / len(cycles) if cycles else None
    figures = "no cycle" if length is None else f"{length:.2f} tokens a cycle"
    figures += "" if ratio is None else f", {times(ratio)}"
    prompt = measurement.prompt_of(run)
    spans = "".join(_spans(measurement, tokens_of(run)))
    usual = f"{plural(len(run.token_ids), 'token')} in {plural(len(cycles), 'cycle')}. Point at one"
    return (
        f"<details{' open' if is_open else ''}><summary><b>{escape(run.dataset)} "
        f'{run.prompt_index + 1}</b> <span class="soft">{escape(_short(prompt))} · {figures}'
        f'</span></summary>\n<div class="view"><p class="prompt">{escape(prompt)}</p>\n'
        f'<div class="tokens">{spans}</div>\n'
        f'<div class="said" aria-live="polite">{usual}, or tap it.</div></div></details>'
    )


def _short(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most].rstrip()}..."


def _spans(measurement: Measurement, tokens: Sequence[Token]) -> Iterator[str]:
    for token in tokens:
        said = _said(measurement, token)
        classes = ["t", token.origin]
        if token.starts_cycle:
            classes.append("start")
        if token.rejected_ids:
            classes.append("instead")
        text = _visible(_text(measurement, token.token_id))
        focus = ' tabindex="0"' if token.rejected_ids else ""
        yield f'<span class="{" ".join(classes)}"{focus} data-said="{escape(said)}">{text}</span>'


def _said(measurement: Measurement, token: Token) -> str:
    own = quoted(measurement, [token.token_id])
    cycle = "" if token.cycle is None else f", cycle {token.cycle + 1}"
    instead = (
        f". The drafter had proposed {quoted(measurement, token.rejected_ids)}"
        if token.rejected_ids
        else ""
    )
    return f"{own}: {_ORIGINS[token.origin]}{cycle}{instead}."


def quoted(measurement: Measurement, token_ids: Sequence[int]) -> str:
    """Tokens as text in quotes, on one line."""
    text = "".join(_text(measurement, token_id) for token_id in token_ids)
    return "“" + text.replace("\n", "↵") + "”"


def _text(measurement: Measurement, token_id: int) -> str:
    return measurement.token_texts.get(str(token_id), f"[{token_id}]")


def _visible(text: str) -> str:
    """HTML of a token, with a sign where a line ends."""
    return escape(text).replace("\n", '<span class="newline">↵</span>\n')
