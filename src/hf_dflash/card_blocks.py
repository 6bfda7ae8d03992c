"""The parts of a model card that hold figures. Each names the file that its figures are of.

A block is made of its file alone, so it can be made again and compared: a card that was edited, or
whose file was replaced, is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .best_plain import best_plain_sentence
from .card_sections import cell, table
from .findings import (
    SLICES,
    datasets_sentence,
    decoding_words,
    identical_text,
    length_text,
    main_summary,
    method_label,
    place_sentence,
    plural,
    processes_words,
    prompts_text,
    right_sentence,
    right_text,
    speed_sentence,
    speedup_text,
    spread_sentence,
    target_words,
    text_sentence,
)
from .measurement import Acceptance, Measurement, MethodSummary, read_measurement
from .training_comparison import read_training_comparison, seeds_text
from .training_log import TrainingLog, read_training_log

_BLOCK = re.compile(
    r"^<!-- (?P<kind>measured|trained|compared): (?P<source>[^\n]+) -->\n"
    r"(?P<text>.*?)\n<!-- end -->$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a card with figures."""

    kind: str  # "measured", "trained" or "compared"
    source: str  # file in the drafter's folder
    text: str


def write_block(folder: Path, kind: str, source: str) -> str:
    """Make a block of the file ``source`` in ``folder``."""
    return f"<!-- {kind}: {source} -->\n{block_text(folder, kind, source)}\n<!-- end -->\n"


def block_text(folder: Path, kind: str, source: str) -> str:
    """What a block says, without its marks."""
    return _TEXT_OF[kind](folder / source).strip()


def blocks_of(card: str) -> Iterator[Block]:
    """The blocks of a card, in order."""
    for match in _BLOCK.finditer(card):
        yield Block(match["kind"], match["source"], match["text"])


def without_blocks(card: str) -> str:
    """A card with as many lines, but those of its blocks are empty."""
    return _BLOCK.sub(lambda match: "\n" * match[0].count("\n"), card)


# ---- what was measured ----


def _measured(path: Path) -> str:
    measurement = read_measurement(path)
    parts = [
        f"**{speed_sentence(measurement)} {text_sentence(measurement)}**",
        " ".join(
            told
            for sentence in (spread_sentence, best_plain_sentence, datasets_sentence)
            if (told := sentence(measurement))
        ),
        place_sentence(measurement),
        _methods_table(measurement),
        " ".join(filter(None, (_COLUMNS, right_sentence(measurement)))),
    ]
    main = main_summary(measurement)
    if main is not None and main.acceptance is not None and main.acceptance.by_slot:
        parts.append(_slots_sentence(main.acceptance))
    parts += [_slice_table(measurement, name) for name in SLICES if _varies(measurement, name)]
    parts.append(_provenance(measurement))
    return "\n\n".join(part.strip() for part in parts if part)


def _methods_table(measurement: Measurement) -> str:
    rows = [
        [method_label(measurement, s.variant), *_figures(s)] for s in measurement.summary.overall
    ]
    return _wide_table(["method", *_HEADINGS], rows)


def _slice_table(measurement: Measurement, name: str) -> str:
    main = main_summary(measurement)
    rows = [
        [value, prompts_text(summary), *_figures(summary)]
        for value, summaries in measurement.summary.slices[name].items()
        for summary in summaries
        if main is not None and summary.variant == main.variant
    ]
    return _wide_table([SLICES[name], "prompts", *_HEADINGS], rows)


_HEADINGS = (
    "tokens/s",
    "speed-up",
    "speed-up, decoding alone",
    "acceptance length, macro",
    "micro",
    "identical",
    "right answers",
)
_COLUMNS = (
    "Speed-up: median over prompts of the ratio to plain decoding of the same prompt. "
    "Acceptance length: tokens a cycle, the accepted drafts and the target's own. Macro is the "
    "mean over outputs, as in the papers: each output counts alike. Micro is the mean over all "
    "cycles: outputs that take many cycles count more."
)


def _figures(summary: MethodSummary) -> list[str]:
    accepted = summary.acceptance
    return [
        f"{summary.tokens_per_s.median:.1f}",
        speedup_text(summary.speedup),
        speedup_text(summary.speedup_decode),
        length_text(summary),
        "" if accepted is None else f"{accepted.micro:.2f}",
        identical_text(summary),
        right_text(summary),
    ]


def _varies(measurement: Measurement, name: str) -> bool:
    return len(measurement.summary.slices[name]) > 1 or name == "dataset"


def _slots_sentence(acceptance: Acceptance) -> str:
    shares = ", ".join(f"{share:.0%}" for share in acceptance.by_slot)
    return f"Accepted drafts by place in the block (1, 2, ...): {shares}."


def _provenance(measurement: Measurement) -> str:
    p = measurement.provenance
    versions = ", ".join(f"{name} {version}" for name, version in p.versions.items())
    code = f", commit `{p.commit}`" if p.commit else ""
    code += f", sha256 of the source files begins with `{p.code_sha256}`" if p.code_sha256 else ""
    rows = {
        "command": f"`{p.command}`",
        "drafter": f"sha256 of the weights `{p.drafter.sha256}`"
        + "".join(f", {name} {value}" for name, value in p.drafter.policy.items()),
        "target": target_words(p.target),
        "device": f"{p.device}, {plural(p.threads, 'thread')}, {processes_words(measurement)}",
        "dtype, decoding": f"{p.dtype}, {decoding_words(measurement.settings.temperature)}, "
        f"seed {p.seed}",
        "versions": versions + code,
        "date": p.date,
    }
    return table({"": ""}, rows)


# ---- how it was trained ----


def _trained(path: Path) -> str:
    log = read_training_log(path)
    parts = [_trained_sentence(log)]
    if log.data:
        parts.append(table({"data": ""}, {_words(k): cell(v) for k, v in log.data.items()}))
    parts.append(table({"setting": ""}, {_words(k): cell(v) for k, v in log.settings.items()}))
    evaluation = log.last_evaluation()
    if evaluation:
        rows = {_words(key.removeprefix("eval_")): f"{v:.4g}" for key, v in evaluation.items()}
        parts += [
            "Last evaluation on held-out rows, with the target's own tokens as context "
            '(entries with "decoding": by real decoding):',
            table({"figure": "value"}, rows),
        ]
    return "\n\n".join(part.strip() for part in parts)


def _trained_sentence(log: TrainingLog) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in log.versions.items())
    where = f"{plural(log.n_processes, 'process', 'processes')} on {log.device}"
    target = f" against {log.target}" if log.target else ""
    return f"{plural(log.n_steps, 'step')}{target}, {where} ({versions}; {log.date[:10]})."


def _compared(path: Path) -> str:
    comparison = read_training_comparison(path)
    steps = comparison.steps()
    rows = [
        [name, str(len(seeds)), *(seeds_text(at) for at in zip(*seeds, strict=True))]
        for name, seeds in comparison.lengths().items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in comparison.versions.items())
    commit = f", commit `{comparison.commit}`" if comparison.commit else ""
    return "\n\n".join(
        [
            "Short runs that differ in one thing each: acceptance length on held-out rows, with "
            "the target's own tokens as context, after as many steps. Of several seeds the mean, "
            "and the lowest and the highest.",
            _wide_table(["run", "seeds", *(f"{step} steps" for step in steps)], rows),
            f"`{comparison.command}` on {comparison.device} ({versions}{commit}; "
            f"{comparison.date[:10]}); every run's options are in `{path.name}`.",
        ]
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


def _wide_table(headings: list[str], rows: list[list[str]]) -> str:
    # A column that no row fills says nothing.
    filled = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    lines = [[headings[i] for i in filled], ["---"] * len(filled)]
    lines += [[cell(row[i]) or "-" for i in filled] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_TEXT_OF: dict[str, Callable[[Path], str]] = {
    "measured": _measured,
    "trained": _trained,
    "compared": _compared,
}
