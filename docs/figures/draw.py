"""Draw the figures of the pages: python docs/figures/draw.py [FOLDER].

Needs matplotlib (extra ``plot``). Those of docs/how-it-works.md show no measurement: they are drawn
from the package's own mask rule and loss weights, and from the definition of the speed-up. Those of
docs/training.md are what `benchmarks/training_runs.py` and the shipped drafter's training wrote.
The same code makes the same files; a test holds the committed ones to that. White paper, so that
they can be read on dark pages too; 5 inches wide, so that letters keep their size on a phone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from hf_dflash.blocks import BlockMaskRule
from hf_dflash.losses import decay_weights, progressive_gamma
from hf_dflash.training_arguments import PUBLISHED_GAMMA
from hf_dflash.training_comparison import TRAINING_COMPARISON_NAME, read_training_comparison
from hf_dflash.training_log import TRAINING_LOG_NAME, read_training_log

WIDTH_IN = 5.0
THREE_SEEDS = "architecture, three seeds"
INK, FAINT, PALE = "#1c2024", "#6b737c", "#eceff2"
CONTEXT, BLOCK, BONUS, WRONG = "#0b6bcb", "#c77700", "#1f8a4c", "#b3261e"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#c3c8ce",
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": "#dde1e5",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "hf-dflash",
}


def canvas(height: float) -> tuple[Figure, Axes]:
    """A sheet whose units are inches, origin at the bottom left."""
    figure = Figure(figsize=(WIDTH_IN, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH_IN), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes, x: float, y: float, text: str, *, width: float = 0.44, colour: str = FAINT
) -> None:
    """A rounded box of one colour, its left edge at x and its middle at y, with text in it."""
    shape = FancyBboxPatch(
        (x, y - 0.14),
        width,
        0.28,
        boxstyle="round,pad=0,rounding_size=0.05",
        facecolor=mpl.colors.to_rgba(colour, 0.12),
        edgecolor=colour,
        linewidth=1.1,
    )
    axes.add_patch(shape)
    axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=9.5)


def row(axes: Axes, columns: Sequence[float], y: float, texts: str, colours: str) -> None:
    """Boxes side by side; a letter a box says its colour, a dot leaves the place empty."""
    names = {"f": FAINT, "c": CONTEXT, "b": BLOCK, "g": BONUS, "r": WRONG}
    for x, text, letter in zip(columns, texts.split(), colours, strict=True):
        if letter != ".":
            box(axes, x, y, text, colour=names[letter])


def arrow(axes: Axes, x: float, top: float, bottom: float, colour: str) -> None:
    """An arrow downwards."""
    style = {"arrowstyle": "-|>", "color": colour, "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (x, bottom), (x, top), arrowprops=style)


def draw_cycle() -> Figure:
    """One cycle: draft, verify, accept."""
    figure, axes = canvas(6.15)
    at = [0.12 + 0.5 * i for i in range(3)] + [1.86 + 0.5 * i for i in range(6)]

    def title(y: float, text: str) -> None:
        axes.text(0.12, y, text, weight="bold", va="center")

    def note(x: float, y: float, text: str, colour: str = FAINT) -> None:
        axes.text(x, y, text, fontsize=9, color=colour, va="center")

    title(5.97, "1  Draft: one pass of the drafter")
    note(0.12, 5.68, "context", CONTEXT)
    note(1.86, 5.68, "block: anchor and mask tokens", BLOCK)
    row(axes, at, 5.42, "t39 t40 t41 t42 ? ? ? ? ?", "cccbbbbbb")
    for x in at:
        arrow(axes, x + 0.22, 5.26, 4.9, CONTEXT if x < 1.8 else BLOCK)
    note(0.12, 4.76, "hidden states of", CONTEXT)
    note(0.12, 4.59, "the target's taps", CONTEXT)
    note(1.86, 4.76, "rows of the target's embedding", BLOCK)
    arrow(axes, 0.84, 4.47, 4.18, CONTEXT)
    note(0.93, 4.33, "fusion, norm", CONTEXT)
    arrow(axes, 3.33, 4.62, 4.18, BLOCK)
    box(axes, 0.12, 4.0, "keys, values", width=1.44, colour=CONTEXT)
    box(axes, 1.86, 4.0, "queries, keys, values", width=2.94, colour=BLOCK)
    note(0.12, 3.7, "In every draft layer the block sees the context and all of itself.")
    for x in at[4:]:
        arrow(axes, x + 0.22, 3.58, 3.32, BLOCK)
    row(axes, at, 3.15, "- - - - d43 d44 d45 d46 d47", "....bbbbb")
    note(0.12, 3.15, "drafts, by the target's head")

    title(2.72, "2  Verify: one pass of the target")
    row(axes, at, 2.38, "- - - t42 d43 d44 d45 d46 d47", "...bbbbbb")
    note(0.12, 2.38, "its input")
    row(axes, at, 1.98, "- - - - t43 t44 t45 t46 t47", "....fffff")
    note(0.12, 1.98, "its own choices")
    for x, sign, colour in zip(at[4:], "==≠", (BONUS, BONUS, WRONG), strict=False):
        axes.text(x + 0.22, 1.71, sign, ha="center", va="center", color=colour, weight="bold")
    note(at[7], 1.71, "not looked at")

    title(1.36, "3  Accept: the agreed prefix and a bonus")
    row(axes, at, 1.02, "- - - - d43 d44 t45 d46 d47", "....bbg..")
    note(0.12, 1.02, "emitted: 2 + 1 tokens")
    note(at[7], 1.02, "dropped", WRONG)
    note(0.12, 0.62, "Next cycle: t45 is the anchor. t42, d43 and d44 join the context,")
    note(0.12, 0.44, "with the hidden states of this verification. t45 has none yet:")
    note(0.12, 0.26, "the context always ends before the anchor.")
    return figure


#: Two packed documents of 6 and 4 tokens, two blocks of 4 in the first and one in the second.
DOCUMENTS, ANCHORS, BLOCK_SIZE = [1] * 6 + [2] * 4, [2, 4, 7], 4


def visible_keys(causal: bool, window: int | None) -> torch.Tensor:
    """Who sees what in the example, asked of the package: (A * B, S + A * B) bool."""
    rule = BlockMaskRule(torch.tensor([ANCHORS]), torch.tensor([DOCUMENTS]), BLOCK_SIZE)
    n_queries = len(ANCHORS) * BLOCK_SIZE
    queries = torch.arange(n_queries)[:, None]
    keys = torch.arange(len(DOCUMENTS) + n_queries)[None]
    zero = torch.zeros((), dtype=torch.long)
    return rule.visible(causal, window)(zero, zero, queries, keys)


def draw_mask() -> Figure:
    """The mask of three training blocks, for both kinds of draft layers."""
    figure = Figure(figsize=(WIDTH_IN, 6.5))
    panels = [
        ("Full layers", visible_keys(False, None)),
        ("Sliding layers (window 4), causal in the block", visible_keys(True, 4)),
    ]
    for i, (title, visible) in enumerate(panels):
        axes = figure.add_axes((0.14, 0.55 - 0.48 * i, 0.84, 0.35))
        _mask_panel(axes, visible)
        axes.set_title(title, pad=33, x=-0.13)
    figure.text(0.01, 0.035, "Rows: queries.  Columns: keys.", fontsize=9.5, color=FAINT)
    figure.text(0.01, 0.008, "Blue: context seen.", fontsize=9.5, color=CONTEXT)
    figure.text(0.30, 0.008, "Orange: own block seen.", fontsize=9.5, color=BLOCK)
    return figure


def _mask_panel(axes: Axes, visible: torch.Tensor) -> None:
    n_context, (n_queries, n_keys) = len(DOCUMENTS), visible.shape
    kind = visible.long()
    kind[:, n_context:] *= 2
    edges = [[i - 0.5 for i in range(n + 1)] for n in (n_keys, n_queries)]
    colours = ListedColormap([PALE, CONTEXT, BLOCK])
    options = {"vmin": 0, "vmax": 2, "edgecolors": "white", "linewidth": 1.2}
    axes.pcolormesh(*edges, kind.tolist(), cmap=colours, **options)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    tokens = [f"{i}" for i in range(n_context)]
    slots = [f"{anchor}" if k == 0 else "?" for anchor in ANCHORS for k in range(BLOCK_SIZE)]
    axes.set_xticks(range(n_keys), tokens + slots, fontsize=8)
    axes.set_yticks(range(n_queries), slots, fontsize=8)
    axes.xaxis.tick_top()
    cuts = [5.5, n_context - 0.5, *(n_context + BLOCK_SIZE * i - 0.5 for i in (1, 2))]
    for x in cuts:
        axes.axvline(x, color=INK, linewidth=0.9)
    for y in (BLOCK_SIZE - 0.5, 2 * BLOCK_SIZE - 0.5):
        axes.axhline(y, color=INK, linewidth=0.9)
    heads = [(2.5, "document 1"), (7.5, "doc. 2"), (11.5, "A"), (15.5, "B"), (19.5, "C")]
    for x, text in heads:
        axes.text(x, -2.0, text, ha="center", va="center", fontsize=9)
    for i, name in enumerate("ABC"):
        axes.text(-2.4, BLOCK_SIZE * i + 1.5, name, ha="center", va="center", fontsize=9)


def draw_weights() -> Figure:
    """Weights of the draft slots: DFlash's by block size, DFlare's as training goes on."""
    figure = Figure(figsize=(WIDTH_IN, 5.3))
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(left=0.11, right=0.97, top=0.94, bottom=0.1, hspace=0.3)
    colours = (CONTEXT, BLOCK, BONUS)
    for (size, gamma), colour in zip(PUBLISHED_GAMMA.items(), colours, strict=True):
        label = f"blocks of {size}: gamma {gamma:g}"
        _weight_curve(upper, size - 1, gamma, colour, label)
    upper.set_title("DFlash: w = exp(-(k - 1) / gamma)")
    shades = mpl.colormaps["viridis"](torch.linspace(0.75, 0.0, 3).tolist())
    for share, shade in zip((0, 50, 100), shades, strict=True):
        gamma = progressive_gamma(share, 101, 4.5, 7.0)
        label = f"{share} % of the steps: gamma {gamma:g}"
        _weight_curve(lower, 15, gamma, shade, label)
    lower.set_title("DFlare: gamma rises (here from 4.5 to 7)")
    lower.set_xlabel("k, slot in the block (1: the first draft)")
    lower.set_xticks(range(1, 16, 2))
    for axes in (upper, lower):
        axes.set(ylim=(0, 1.05), yticks=[0, 0.5, 1])
        axes.grid(axis="y")
        axes.legend(loc="upper right", fontsize=9.5, handlelength=1.4)
    return figure


def _weight_curve(axes: Axes, n_drafts: int, gamma: float, colour: Any, label: str) -> None:
    weights = decay_weights(n_drafts, gamma).tolist()
    slots = range(1, n_drafts + 1)
    axes.plot(slots, weights, marker="o", ms=3.5, lw=1.6, color=colour, label=label)


def expected_speedup(acceptance_length: float, cycle_cost: float) -> float:
    """Tokens of a cycle over its cost in plain steps. Source: DFlash, Eq. 1-3."""
    return acceptance_length / cycle_cost


def draw_speedup() -> Figure:
    """What a cycle gives by how much is accepted, for cycles of several costs."""
    figure = Figure(figsize=(WIDTH_IN, 3.9))
    axes = figure.add_axes((0.11, 0.135, 0.68, 0.8))
    lengths = (1.0, 8.0)
    costs = (1.1, 1.5, 2.0, 3.0, 5.0)
    shades = mpl.colormaps["viridis"](torch.linspace(0.0, 0.8, len(costs)).tolist())
    for cost, shade in zip(costs, shades, strict=True):
        ends = [expected_speedup(length, cost) for length in lengths]
        axes.plot(lengths, ends, color=shade, lw=1.8)
        axes.plot(cost, 1, marker="o", ms=4, color=shade)
        axes.text(8.1, ends[1], f"{cost:g} steps", va="center", fontsize=9.5)
    axes.axhspan(0, 1, color=WRONG, alpha=0.09, lw=0)
    axes.axhline(1, color=WRONG, lw=0.9)
    axes.text(7.95, 0.5, "slower than plain decoding", ha="right", va="center", fontsize=9.5)
    axes.set(xlim=lengths, ylim=(0, 7.6), xticks=range(1, 9), yticks=range(8))
    axes.set_xlabel("acceptance length (tokens a cycle)")
    axes.set_title("speed-up")
    axes.grid(axis="y")
    axes.text(8.1, 7.8, "a cycle costs", fontsize=9, color=FAINT, va="center")
    return figure


def shipped(architecture: str) -> Path:
    """The folder of a drafter of this repository."""
    return Path(__file__).parents[2] / "model_cards" / f"smollm2-135m-instruct-{architecture}"


def training_runs(architecture: str) -> dict[str, list[list[float]]]:
    """Steps, then acceptance lengths of each seed, by run; compared in that drafter's card."""
    comparison = read_training_comparison(shipped(architecture) / TRAINING_COMPARISON_NAME)
    steps = [float(step) for step in comparison.steps()]
    return {name: [steps, *seeds] for name, seeds in comparison.lengths().items()}


def draw_runs() -> Figure:
    """Acceptance length by training step: one chart for each thing that was varied."""
    curves = {**training_runs("dflash"), **training_runs("dflare")}
    whole = "dflash"  # with three layers, from the target's own, on all answers
    charts: dict[str, dict[str, str]] = {
        "data": {"all 4581 answers": whole, "1200": "1200 answers", "300": "300 answers"},
        "size": {"5 layers": "5 layers", "3 layers": whole, "2 layers": "2 layers"},
        "start": {"target's layers": whole, "random": "random start"},
        THREE_SEEDS: {"DFlash": whole, "DFlare": "dflare"},
    }
    figure = Figure(figsize=(WIDTH_IN, 5.0))
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    figure.subplots_adjust(left=0.13, right=0.97, top=0.94, bottom=0.1, hspace=0.25, wspace=0.1)
    for axes, (title, lines) in zip(grid.flat, charts.items(), strict=True):
        n_seeds = 3 if title == THREE_SEEDS else 1
        for colour, (label, name) in zip((CONTEXT, BLOCK, BONUS), lines.items(), strict=False):
            steps, *seeds = curves[name]
            for i, lengths in enumerate(seeds[:n_seeds]):
                axes.plot(steps, lengths, marker="o", ms=3.5, lw=1.6, color=colour)
                axes.lines[-1].set_label(label if i == 0 else "_")
        axes.set_title(title)
        axes.grid(axis="y")
        axes.legend(loc="upper left", fontsize=9, handlelength=1.2)
    for axes in grid[1]:
        axes.set_xlabel("training step")
    for axes in grid[:, 0]:
        axes.set_ylabel("acceptance length")
    return figure


def draw_training() -> Figure:
    """What the shipped drafter knew of held-out rows as its training went on."""
    log = read_training_log(shipped("dflash") / TRAINING_LOG_NAME).log
    evaluations = [entry for entry in log if "eval_acceptance_length" in entry]
    steps = [entry["step"] for entry in evaluations]
    figure = Figure(figsize=(WIDTH_IN, 5.3))
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(left=0.11, right=0.94, top=0.94, bottom=0.1, hspace=0.3)
    lengths = [entry["eval_acceptance_length"] for entry in evaluations]
    upper.plot(steps, lengths, marker="o", ms=3.5, lw=1.6, color=CONTEXT)
    upper.set_title("acceptance length")
    upper.set_ylim(bottom=1)
    slots = (1, 3, 5, 7)
    shades = mpl.colormaps["viridis"](torch.linspace(0.0, 0.8, len(slots)).tolist())
    for k, shade in zip(slots, shades, strict=True):
        shares = [entry[f"eval_accuracy_{k}"] for entry in evaluations]
        lower.plot(steps, shares, marker="o", ms=3.5, lw=1.6, color=shade, label=f"draft {k}")
    lower.set(ylim=(0, 1), yticks=[0, 0.5, 1])
    lower.set_title("share of right drafts, by slot")
    lower.legend(loc="upper left", fontsize=9, handlelength=1.2, ncols=len(slots))
    lower.set_xticks(range(0, 12001, 4000))
    lower.set_xlabel("training step")
    for axes in (upper, lower):
        axes.grid(axis="y")
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "cycle": draw_cycle,
    "mask": draw_mask,
    "weights": draw_weights,
    "speedup": draw_speedup,
    "runs": draw_runs,
    "training": draw_training,
}


def main(folder: Path) -> None:
    """Write every figure as SVG."""
    with mpl.rc_context(STYLE):
        for name, draw in FIGURES.items():
            metadata = {"Date": None, "Creator": None}
            draw().savefig(folder / f"{name}.svg", metadata=metadata)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
