"""What a benchmark shows on a terminal: how far it is, and its table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .best_plain import best_plain_sentence
from .findings import (
    decoding_words,
    identical_text,
    length_text,
    policy_words,
    prompts_text,
    right_text,
)
from .measurement import Difference, Measurement, MethodSummary, Spread, Variant

COLUMNS = (
    "data set",
    "method",
    "tokens/s",
    "speed-up",
    "quartiles",
    "decode",
    "tau",
    "same",
    "right",
)
SHORT_NAMES = {"stock_dflash": "stock", "prompt_lookup": "lookup", "assistant_model": "assistant"}
#: Differing outputs that are shown one by one.
MOST_DIFFERENCES = 10


@contextmanager
def progress(console: Console, n_prompts: int, n_done: int) -> Iterator[Callable[[str], None]]:
    """A progress bar over prompts; call what it gives with a data set after each prompt."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("measuring", total=n_prompts, completed=n_done)

        def advance(dataset: str) -> None:
            bar.update(task, description=dataset, advance=1)

        yield advance


def show(measurement: Measurement, console: Console) -> None:
    """Print the table, and each output that differs from plain decoding."""
    provenance, settings = measurement.provenance, measurement.settings
    summary = measurement.summary
    table = Table(
        title=f"{provenance.target.name} + {provenance.drafter.name}\n{provenance.dtype}, "
        f"{decoding_words(settings.temperature)}, up to {settings.max_new_tokens} tokens, "
        f"{provenance.device}",
        caption="speed-up: median over prompts of the ratio to plain decoding of the same prompt, "
        "with quartiles. decode: the same without the prompt and the first draft. tau: tokens a "
        "cycle, mean over outputs. same: outputs equal to plain decoding's. stock: transformers' "
        "own block loop." + _prompts(measurement) + _wall_time(measurement),
        box=SIMPLE,
        padding=0,  # the box parts columns by a blank, so that the table fits 80 of them
    )
    for name in COLUMNS:
        is_text = name in ("data set", "method")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    by_dataset = summary.slices["dataset"]
    parts = [*by_dataset.items()] + ([("all", summary.overall)] if len(by_dataset) > 1 else [])
    for dataset, methods in parts:
        for i, method in enumerate(methods):
            table.add_row(
                *_row(dataset if i == 0 else "", measurement, method),
                end_section=method is methods[-1],
            )
    console.print(table)
    if (over_best := best_plain_sentence(measurement)) is not None:
        console.print(over_best)
    for method in summary.overall:
        _show_differences(method, provenance.dtype, console)


def duration(seconds: float) -> str:
    """As people say it, to the minute if it is one or more.

    >>> duration(7.6), duration(61), duration(7300)
    ('8 s', '1 min', '2 h 2 min')
    """
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _wall_time(measurement: Measurement) -> str:
    seconds = measurement.wall_s
    return "" if seconds is None else f" All of it took {duration(seconds)}."


def _prompts(measurement: Measurement) -> str:
    by_dataset = measurement.summary.slices["dataset"]
    told = [f"{name} {prompts_text(methods[0])}" for name, methods in by_dataset.items()]
    return f" Prompts: {', '.join(told)}." if told else ""


def _row(dataset: str, measurement: Measurement, method: MethodSummary) -> tuple[str, ...]:
    return (
        dataset,
        ", ".join([_label(method.variant), *policy_words(measurement, method.variant)]),
        f"{method.tokens_per_s.median:.1f}",
        *_ratio(method.speedup),
        _ratio(method.speedup_decode)[0],
        length_text(method),
        identical_text(method),
        right_text(method),
    )


def _label(variant: Variant) -> str:
    block = "" if variant.block_size is None else f" B{variant.block_size}"
    return SHORT_NAMES.get(variant.method, variant.method) + block


def _ratio(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "", ""
    return f"{spread.median:.2f}", f"{spread.low:.2f}-{spread.high:.2f}"


def is_error(difference: Difference, dtype: str) -> bool:
    """Whether a difference shows that a decode loop is wrong; what was not measured does not."""
    return dtype == "float32" or difference.is_near_tie is False


def _show_differences(method: MethodSummary, dtype: str, console: Console) -> None:
    """Errors first."""
    differences = [] if method.identity is None else method.identity.differences
    if not differences:
        return
    console.print(
        f"{method.variant.label}: {len(differences)} outputs differ from plain decoding, each from "
        "a token on where the target's two best logits differ by"
    )
    differences = sorted(differences, key=lambda d: not is_error(d, dtype))
    for d in differences[:MOST_DIFFERENCES]:
        gap = "unknown" if d.top2_gap is None else f"{d.top2_gap:.4f}"
        tie = {None: "", True: ", a near tie", False: ", NO near tie"}[d.is_near_tie]
        console.print(
            f"  {d.dataset} prompt {d.prompt_index + 1}, turn {d.turn + 1}, token "
            f"{d.first_difference + 1}: {gap}{tie}"
        )
    if len(differences) > MOST_DIFFERENCES:
        console.print(f"  and {len(differences) - MOST_DIFFERENCES} more, in the file")
