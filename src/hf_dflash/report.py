"""A measurement as one HTML page that asks for nothing outside itself."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .best_plain import best_plain_sentence
from .findings import (
    ARCHITECTURES,
    SLICES,
    compared_summaries,
    datasets_sentence,
    decoding_words,
    identical_text,
    is_lossless,
    length_text,
    main_summary,
    method_label,
    n_drafts,
    place_sentence,
    plural,
    processes_words,
    prompts_text,
    right_sentence,
    right_text,
    short_name,
    speed_sentence,
    speedup_text,
    spread_sentence,
    target_words,
    text_sentence,
    times,
    told_summaries,
)
from .measurement import Difference, Measurement, MethodSummary, Variant, write_whole
from .report_style import CSS, SCRIPT
from .report_tokens import quoted, token_section

if TYPE_CHECKING:
    from .plots import Picture

_HEADINGS = (
    "prompts",
    "tokens/s",
    "speed-up",
    "tokens a cycle",
    "identical",
    "right answers",
)
#: What a reader cannot know of the names in the table.
_BASELINES = {
    "stock dflash": "transformers' own block loop with the same drafter",
    "prompt lookup": "drafts copied from the prompt, without a drafter",
    "assistant model": "a small model of the same vocabulary drafts",
}


def write_report(measurement: Measurement, path: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        RuntimeError: matplotlib is not installed.
        OSError: It cannot be written.
    """
    write_whole(path, report_html(measurement))


def report_html(measurement: Measurement) -> str:
    """The page.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    target = short_name(measurement.provenance.target.name)
    kind = ARCHITECTURES.get(measurement.provenance.drafter.architecture, "block")
    title = f"{target} with a {kind} drafter"
    sections = [
        _head(measurement, title),
        _section("Every method", _methods(measurement)),
        *_slices(measurement),
        _section("Pictures", _pictures(measurement)),
        _section("How every token came", token_section(measurement)),
        *_differences(measurement),
        _section("What was measured, and how", _facts(measurement)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + f"\n</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


# ---- the top ----


def _head(measurement: Measurement, title: str) -> str:
    lossless = is_lossless(measurement)
    mark = {True: "good", False: "bad", None: "soft"}[lossless]
    sentences = (spread_sentence, best_plain_sentence, datasets_sentence)
    told = [text for sentence in sentences if (text := sentence(measurement))]
    return (
        f"<header>\n<h1>{escape(title)}</h1>\n"
        f'<p class="lead">{escape(speed_sentence(measurement))}</p>\n'
        + "".join(f"<p>{escape(text)}</p>\n" for text in told)
        + f'<p class="{mark}"><b>{escape(text_sentence(measurement))}</b></p>\n'
        f'<p class="soft">{escape(place_sentence(measurement))}</p>\n'
        f'<div class="tiles">{"".join(_tiles(measurement))}</div>\n</header>'
    )


def _tiles(measurement: Measurement) -> list[str]:
    main = main_summary(measurement)
    if main is None:
        return []
    plain = next((s for s in measurement.summary.overall if s.method == "plain"), None)
    tiles = []
    for summary in told_summaries(measurement):
        if summary.speedup is not None:
            drafts = _drafts(measurement, summary)
            rank = "" if summary == main else ", the fastest measured"
            meaning = f"the speed of plain decoding, with {drafts} a cycle{rank}"
            tiles.append((times(summary.speedup.median), meaning))
    before = "" if plain is None else f"{plain.tokens_per_s.median:.1f} → "
    fastest = told_summaries(measurement)[-1]
    drafts = _drafts(measurement, fastest)
    meaning = f"tokens a second with {drafts} a cycle, one prompt at a time"
    tiles.append((f"{before}{fastest.tokens_per_s.median:.1f}", meaning))
    if main.acceptance is not None:
        most = main.block_size or len(main.acceptance.by_slot) + 1
        meaning = f"tokens a cycle, of {most} at most: the mean over outputs (macro)"
        tiles.append((length_text(main), meaning))
    for worst, _ in compared_summaries(measurement)[:1]:
        drafts = "" if worst == main else f", with {_drafts(measurement, worst)}"
        meaning = f"outputs token for token as without the drafter{drafts}"
        tiles.append((identical_text(worst), meaning))
    return [
        f'<div class="tile"><b>{escape(figure)}</b><span>{escape(meaning)}</span></div>'
        for figure, meaning in tiles
    ]


def _drafts(measurement: Measurement, summary: MethodSummary) -> str:
    return plural(n_drafts(measurement, summary.variant), "draft")


# ---- tables ----


def _told_methods(measurement: Measurement) -> list[str]:
    """What the names of the baselines mean, of those that were measured."""
    measured = {str(s.method) for s in measurement.summary.overall}
    return [
        f" {name}: {what}."
        for name, what in _BASELINES.items()
        if name.replace(" ", "_") in measured
    ]


def _methods(measurement: Measurement) -> str:
    main = main_summary(measurement)
    rows = [
        (
            method_label(measurement, s.variant),
            _cells(s),
            main is not None and s.variant == main.variant,
        )
        for s in measurement.summary.overall
    ]
    judged = right_sentence(measurement)
    right = "" if judged is None else f" {escape(judged)}"
    note = (
        '<p class="soft">Tokens a second and speed-up count the whole call, the prompt included; '
        "the speed-up is the median over prompts of the ratio to plain decoding of the same "
        "prompt. Tokens a cycle: accepted drafts and the target's own token, mean over outputs "
        "(macro, the papers' acceptance length), so each output counts alike."
        f"{''.join(_told_methods(measurement))}{right}</p>"
    )
    return _table("method", rows) + note


def _slices(measurement: Measurement) -> list[str]:
    main = main_summary(measurement)
    if main is None:
        return []
    sections = []
    for name, title in SLICES.items():
        parts = measurement.summary.slices[name]
        if len(parts) < 2:
            continue
        rows = [
            (value, _cells(summary), False)
            for value, summaries in parts.items()
            for summary in summaries
            if summary.variant == main.variant
        ]
        sections.append(
            _section(f"{method_label(measurement, main.variant)}, by {title}", _table(title, rows))
        )
    return sections


def _cells(summary: MethodSummary) -> list[str]:
    return [
        prompts_text(summary),
        f"{summary.tokens_per_s.median:.1f}",
        speedup_text(summary.speedup),
        length_text(summary),
        identical_text(summary),
        right_text(summary),
    ]


def _table(title: str, rows: Sequence[tuple[str, list[str], bool]]) -> str:
    # A column that no row fills says nothing.
    shown = [i for i in range(len(_HEADINGS)) if any(cells[i] for _, cells, _ in rows)]
    head = "".join(f"<th>{escape(_HEADINGS[i])}</th>" for i in shown)
    body = "\n".join(
        f"<tr{' class=main' if is_main else ''}><td>{escape(name)}</td>"
        + "".join(_cell(_HEADINGS[i], cells[i]) for i in shown)
        + "</tr>"
        for name, cells, is_main in rows
    )
    return (
        f'<table class="wide">\n<thead><tr><th>{escape(title)}</th>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table>\n"
    )


def _cell(heading: str, text: str) -> str:
    kind = "" if text else ' class="empty"'
    return f'<td{kind} data-label="{escape(heading)}">{escape(text or "-")}</td>'


# ---- pictures, differences, facts ----


def _pictures(measurement: Measurement) -> str:
    figures = [
        f"<figure>\n<h3>{escape(picture.title)}</h3>\n{svg}\n"
        f'<figcaption id="{picture.name}-caption">{escape(picture.caption)}</figcaption>\n</figure>'
        for picture, svg in _drawn(measurement)
    ]
    return f'<div class="pictures">\n{"".join(figures)}\n</div>'


def _drawn(measurement: Measurement) -> list[tuple[Picture, str]]:
    plots = _plots()
    return [(picture, plots.svg_of(picture)) for picture in plots.pictures(measurement)]


def picture_files(measurement: Measurement, folder: Path) -> list[Path]:
    """Write every picture as SVG and PNG.

    Raises:
        RuntimeError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    paths: list[Path] = _plots().save_pictures(measurement, folder)
    return paths


def _plots() -> Any:
    """The module of pictures, whose matplotlib takes long to import and may not be there."""
    try:
        return import_module(f"{__package__}.plots")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"Pictures need matplotlib, which is not installed ({error}). Install the extra: "
            "pip install 'hf-dflash[plot]'."
        ) from error


def _differences(measurement: Measurement) -> list[str]:
    several = len(told_summaries(measurement)) > 1
    return [
        _section(
            f"Where outputs part{f', with {_drafts(measurement, s)}' if several else ''}",
            _differences_table(measurement, s, identity.differences),
        )
        for s, identity in compared_summaries(measurement)
        if identity.differences
    ]


def _differences_table(
    measurement: Measurement, summary: MethodSummary, differences: Sequence[Difference]
) -> str:
    shown = differences[:MOST_DIFFERENCES]
    rows = "\n".join(_difference(measurement, summary, difference) for difference in shown)
    more = len(differences) - len(shown)
    note = f"<p>And {more} more.</p>" if more else ""
    head = "".join(f"<th>{cell}</th>" for cell in ("prompt", *_DIFFERENCE))
    return (
        f'<table class="wide">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n'
        f"</table>\n{note}"
    )


_DIFFERENCE = ("from token", "plain", "with the drafter", "gap of the two best logits")
MOST_DIFFERENCES = 40


def _difference(measurement: Measurement, summary: MethodSummary, difference: Difference) -> str:
    key = (difference.dataset, difference.prompt_index, difference.turn)
    tokens = [
        _token_at(measurement, method, key, difference)
        for method in (Variant("plain"), summary.variant)
    ]
    gap = "not known" if difference.top2_gap is None else f"{difference.top2_gap:.3g}"
    cells = [str(difference.first_difference + 1), *tokens, gap]
    return (
        f"<tr><td>{escape(difference.dataset)} {difference.prompt_index + 1}</td>"
        + "".join(_cell(heading, cell) for heading, cell in zip(_DIFFERENCE, cells, strict=True))
        + "</tr>"
    )


def _token_at(
    measurement: Measurement,
    variant: Variant,
    prompt_key: tuple[str, int, int],
    difference: Difference,
) -> str:
    for run in measurement.runs:
        if (run.prompt_key, run.variant, run.repeat) == (prompt_key, variant, difference.repeat):
            rest = run.token_ids[difference.first_difference :]
            return quoted(measurement, rest[:1]) if rest else "the end"
    return "not recorded"


def _facts(measurement: Measurement) -> str:
    p, settings = measurement.provenance, measurement.settings
    options, policy = (
        ", ".join(f"{name} {value}" for name, value in told.items())
        for told in (settings.template_options, p.drafter.policy)
    )
    n_own = sum(bool(own) for of_set in measurement.prompt_options.values() for own in of_set)
    if n_own:
        options = f"{options or 'none'}; {plural(n_own, 'prompt')} with others"
    facts = {
        "command": p.command,
        "target": target_words(p.target),
        "drafter": f"{p.drafter.name}: {p.drafter.architecture}, block {p.drafter.block_size}, "
        f"{plural(p.drafter.n_draft_layers, 'layer')}, {p.drafter.n_parameters:,} parameters",
        "weights (sha256)": p.drafter.sha256,
        "drafting policy": policy or "the default: whole blocks",
        "device": f"{p.device}; {plural(p.threads, 'thread')}, {processes_words(measurement)}",
        "dtype": p.dtype,
        "decoding": f"{decoding_words(settings.temperature)}, seed {p.seed}, up to "
        f"{settings.max_new_tokens} new tokens",
        "template options": options or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in p.versions.items()),
        "commit": p.commit or "not known",
        **({"source files": f"sha256 begins with {p.code_sha256}"} if p.code_sha256 else {}),
        "date": p.date,
        "data sets": ", ".join(
            f"{name} ({plural(n, 'prompt')})" for name, n in settings.n_prompts.items()
        ),
    }
    rows = "\n".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts.items()
    )
    return f'<table class="facts"><tbody>\n{rows}\n</tbody></table>'
