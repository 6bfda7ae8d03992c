"""Pictures of a measurement (matplotlib, extra ``plot``), as files and as SVG within a page.

Each takes the figures from the measurement's summary and says on the picture what it shows. Sizes
are such that text is readable on a phone's width and larger.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .findings import datasets_summary, main_summary, method_label, times
from .measurement import Acceptance, Measurement, MethodSummary, TimeShares

WIDTH_IN = 5.0
#: Colours by what they stand for; a page may give each its own for light and dark (see `svg_of`).
INK, GRID = "#1c2024", "#c3c8ce"
COLOURS = {
    "plain": "#7d858e",
    "dflash": "#0b6bcb",
    "stock_dflash": "#3f9fb5",
    "prompt_lookup": "#c77700",
    "assistant_model": "#a8479a",
    "plain_float32": "#9aa1a9",
    "plain_bfloat16": "#9aa1a9",
    "plain_float16": "#9aa1a9",
}
PARTS = {
    "prefill": ("prompt", "#7d858e"),
    "first_draft": ("first draft", "#c77700"),
    "draft": ("drafting", "#0b6bcb"),
    "verify": ("verifying", "#3f9fb5"),
    "rest": ("all else", "#a8479a"),
    "decode": ("decoding, not split", "#b9a44c"),
}
#: Lines that can be told apart, also without colours.
_LINES = (("#c77700", "#3f9fb5", "#a8479a", "#7d858e"), ("--", ":", "-."))
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "hf-dflash",  # the same picture is the same file
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.axisbelow": True,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure, and what it shows in a sentence."""

    name: str
    title: str
    caption: str
    figure: Figure


def pictures(measurement: Measurement) -> list[Picture]:
    """All pictures that the measurement has figures for."""
    drawn = (draw(measurement) for draw in _DRAW)
    return [picture for picture in drawn if picture is not None]


def save_pictures(measurement: Measurement, folder: Path) -> list[Path]:
    """Write every picture as SVG and PNG.

    Returns:
        Paths of the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in pictures(measurement):
        for ending, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 200})):
            path = folder / f"{picture.name}.{ending}"
            with matplotlib.rc_context(_STYLE):
                picture.figure.savefig(path, facecolor="white", **options)
            paths.append(path)
    return paths


def svg_of(picture: Picture) -> str:
    """A picture as an SVG element for a page that may be light or dark.

    Colours become CSS variables of the page with the colour itself to fall back on, text takes the
    page's font, and ids are made the picture's own, so that several fit into one page.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        picture.figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-labelledby="{picture.name}-caption"', 1)
    svg = re.sub(r'\bid="', f'id="{picture.name}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{picture.name}-", svg)
    svg = re.sub(r"font: ([^'\";]*?)'[^;\"]*", r"font: \1inherit", svg)
    for colour in {INK, GRID, *COLOURS.values(), *(colour for _, colour in PARTS.values())}:
        svg = svg.replace(colour, f"var(--c{colour[1:]}, {colour})")
    return svg.strip()


# ---- the pictures ----


def speedup_bars(measurement: Measurement) -> Picture | None:
    """Speed-up over plain decoding of every method, by data set, with quartiles."""
    overall = [s for s in measurement.summary.overall if s.speedup is not None]
    if not overall:
        return None
    by_dataset = measurement.summary.slices["dataset"]
    groups = {"all": overall} if len(by_dataset) > 1 else {}
    for name, summaries in by_dataset.items():
        groups[name] = [s for s in summaries if s.speedup is not None]
    n_bars = sum(len(summaries) + 1 for summaries in groups.values())
    axes = _axes(height_in=0.9 + 0.26 * n_bars)
    place, ticks = 0.0, []
    seen: set[str] = set()
    for summaries in groups.values():
        ticks.append(place + (len(summaries) - 1) / 2)
        for summary in summaries:
            _speedup_bar(
                axes, place, summary, _once(method_label(measurement, summary.variant), seen)
            )
            place += 1
        place += 0.8
    axes.set_yticks(ticks, list(groups))
    axes.invert_yaxis()
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_xlabel("times as fast as plain decoding")
    axes.grid(axis="x")
    _legend_below(axes, n_columns=2)
    return Picture(
        "speedup",
        "Speed-up",
        "Times as fast as plain decoding of the same prompt: median over prompts, and the middle "
        "half of them as a line. Left of 1 it is slower.",
        axes.figure,  # type: ignore[arg-type]
    )


def _speedup_bar(axes: Axes, place: float, summary: MethodSummary, label: str | None) -> None:
    speedup = summary.speedup
    if speedup is None:
        return
    shade = 1.0 if summary.block_size is None else _shade(summary.block_size)
    axes.barh(
        place,
        speedup.median,
        height=0.86,
        color=COLOURS[summary.method],
        alpha=shade,
        label=label,
    )
    axes.plot([speedup.low, speedup.high], [place, place], color=INK, linewidth=1.4)
    axes.annotate(
        times(speedup.median),
        (max(speedup.median, speedup.high), place),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        color=INK,
    )
    axes.margins(x=0.16)


def _shade(block_size: int) -> float:
    """Smaller blocks of one method are paler."""
    return min(1.0, 0.35 + 0.65 * block_size / 16)


def acceptance_histogram(measurement: Measurement) -> Picture | None:
    """How often a cycle accepted how many drafts."""
    accepted = _main_acceptance(measurement)
    if accepted is None:
        return None
    shares = [n / accepted.n_cycles for n in accepted.histogram]
    axes = _axes(height_in=3.0)
    axes.bar(range(len(shares)), shares, color=COLOURS["dflash"], width=0.8)
    axes.set_xlabel("accepted drafts in a cycle")
    axes.set_xticks(range(0, len(shares), 1 if len(shares) <= 10 else 3))
    _percent(axes)
    return Picture(
        "histogram",
        "Accepted drafts",
        f"Share of {accepted.n_cycles:,} cycles that accepted so many drafts. Each cycle adds one "
        f"token of the target's own: {accepted.micro:.2f} tokens a cycle, the mean over all cycles "
        "(micro): outputs that take many cycles count more in it than in the mean over outputs "
        f"(macro, {accepted.macro:.2f}).",
        axes.figure,  # type: ignore[arg-type]
    )


def slot_curve(measurement: Measurement) -> Picture | None:
    """Share of cycles that accepted the draft of each place in the block."""
    accepted = _main_acceptance(measurement)
    if accepted is None or len(accepted.by_slot) < 2:
        return None
    by_dataset = _acceptance_by_dataset(measurement)
    axes = _axes(height_in=3.0 + 0.15 * len(by_dataset))
    # Curves may run through one another, so a legend tells them apart, and no label beside them.
    styles = zip(*map(cycle, _LINES), strict=False)
    for (name, of_one), (colour, dashes) in zip(by_dataset.items(), styles, strict=False):
        places = range(1, len(of_one.by_slot) + 1)
        axes.plot(places, of_one.by_slot, dashes, color=colour, label=name, linewidth=1.4)
    axes.plot(
        range(1, len(accepted.by_slot) + 1),
        accepted.by_slot,
        marker="o",
        markersize=4,
        color=COLOURS["dflash"],
        linewidth=2,
        label="all prompts",
    )
    axes.set_xlabel("place in the block")
    axes.set_xticks(range(1, len(accepted.by_slot) + 1, 1 if len(accepted.by_slot) <= 8 else 2))
    axes.set_ylim(0, None)
    _percent(axes)
    if by_dataset:
        _legend_below(axes, n_columns=2)
    return Picture(
        "slots",
        "Acceptance by place in the block",
        "Share of cycles in which the draft at this place, and all before it, were accepted.",
        axes.figure,  # type: ignore[arg-type]
    )


def position_curve(measurement: Measurement) -> Picture | None:
    """Acceptance length along the output."""
    accepted = _main_acceptance(measurement)
    if accepted is None or len(accepted.by_position) < 2:
        return None
    axes = _axes(height_in=3.0)
    middles = [(part.start + part.stop) / 2 for part in accepted.by_position]
    lengths = [part.acceptance_length for part in accepted.by_position]
    axes.plot(middles, lengths, marker="o", markersize=4, color=COLOURS["dflash"], linewidth=2)
    axes.axhline(accepted.micro, color=GRID, linewidth=1)
    axes.set_xlabel("place in the output (tokens)")
    axes.set_ylabel("tokens a cycle")
    axes.set_ylim(1, None)
    axes.grid(axis="y")
    return Picture(
        "positions",
        "Acceptance along the output",
        "Tokens a cycle (accepted drafts and the bonus token), by where in the output the cycle "
        "began. Thin line: the mean over all cycles (micro).",
        axes.figure,  # type: ignore[arg-type]
    )


def block_size_curve(measurement: Measurement) -> Picture | None:
    """Speed-up and acceptance length against the block size, if several were measured."""
    sizes = {
        s.block_size: s
        for s in measurement.summary.overall
        if s.method == "dflash" and s.speedup is not None and s.acceptance is not None
    }
    if len(sizes) < 2:
        return None
    axes = _axes(height_in=3.0)
    places = sorted(size for size in sizes if size is not None)
    speedups = [sizes[size].speedup.median for size in places]  # type: ignore[union-attr]
    lengths = [sizes[size].acceptance.macro for size in places]  # type: ignore[union-attr]
    style: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 2}
    axes.plot(places, speedups, color=COLOURS["dflash"], label="speed-up", **style)
    axes.plot(places, lengths, color=COLOURS["prompt_lookup"], label="tokens a cycle", **style)
    axes.set_xticks(places)
    axes.set_xlabel("block size (the anchor and the drafts)")
    axes.set_ylim(0, None)
    axes.grid(axis="y")
    _legend_below(axes, n_columns=2)
    return Picture(
        "block-size",
        "Speed-up against block size",
        "Longer blocks have more drafts accepted, and cost more to verify.",
        axes.figure,  # type: ignore[arg-type]
    )


def time_breakdown(measurement: Measurement) -> Picture | None:
    """Where the wall clock went, by method."""
    summaries = measurement.summary.overall
    if not summaries:
        return None
    axes = _axes(height_in=1.5 + 0.4 * len(summaries))
    labelled: set[str] = set()
    for place, summary in enumerate(summaries):
        left = 0.0
        for part, share in time_parts(summary.time).items():
            label, colour = PARTS[part]
            axes.barh(place, share, left=left, color=colour, label=_once(label, labelled))
            left += share
    axes.set_yticks(
        range(len(summaries)), [method_label(measurement, s.variant) for s in summaries]
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("share of the wall clock")
    _legend_below(axes, n_columns=3)
    return Picture(
        "time",
        "Where the time goes",
        "The prompt's pass, the first draft (its own pass over the prompt included), drafting, "
        "verifying by the target, and all else; shares of all runs of a method.",
        axes.figure,  # type: ignore[arg-type]
    )


def time_parts(time: TimeShares) -> dict[str, float]:
    """Shares by the names of `PARTS`, those of nothing left out."""
    parts = {"prefill": time.prefill, "first_draft": time.first_draft}
    if time.draft is None or time.verify is None:
        parts["decode"] = time.decode
    else:
        parts |= {"draft": time.draft, "verify": time.verify}
        parts["rest"] = max(0.0, time.decode - time.draft - time.verify)
    return {name: share for name, share in parts.items() if share > 0}


_DRAW: Sequence[Callable[[Measurement], Picture | None]] = (
    speedup_bars,
    acceptance_histogram,
    slot_curve,
    position_curve,
    block_size_curve,
    time_breakdown,
)


# ---- what they share ----


def _axes(*, height_in: float) -> Axes:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        return figure.add_subplot()


def _percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(axis="y")


def _legend_below(axes: Axes, *, n_columns: int) -> None:
    figure: Any = axes.figure
    handles, labels = axes.get_legend_handles_labels()
    with matplotlib.rc_context(_STYLE):
        figure.legend(handles, labels, loc="outside lower left", ncols=n_columns)


def _once(label: str, seen: set[str]) -> str | None:
    if label in seen:
        return None
    seen.add(label)
    return label


def _main_acceptance(measurement: Measurement) -> Acceptance | None:
    main = main_summary(measurement)
    return None if main is None else main.acceptance


def _acceptance_by_dataset(measurement: Measurement) -> dict[str, Acceptance]:
    found = {name: s.acceptance for name, s in datasets_summary(measurement).items()}
    known = {name: accepted for name, accepted in found.items() if accepted and accepted.by_slot}
    return known if len(known) > 1 else {}
