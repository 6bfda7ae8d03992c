"""Show a demo run in a terminal while it decodes."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from .demo import (
    Comparison,
    Difference,
    Measures,
    Pair,
    Report,
    Timing,
    best_plain_factor,
    measure,
)

ACCEPTED = "bold green"
LABEL = "bold cyan"
#: Of the figures in the summary; two lines each, so that the table fits into 80 columns.
HEADINGS = ("identical", "plain\ntokens/s", "drafted\ntokens/s", "speed-up", "acceptance\nlength")


class IncrementalText:
    """Turns tokens into text piece by piece; the pieces add up to the text of all tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._n_shown = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` add, less an unfinished character at the end."""
        self._token_ids += token_ids
        text: str = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        complete = text.rstrip("\ufffd")
        piece = complete[self._n_shown :]
        self._n_shown = max(self._n_shown, len(complete))
        return piece


class TerminalView:
    """A :class:`hf_dflash.demo.View` that writes to a rich console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pair: Pair | None = None
        self._text = IncrementalText(None)

    def notify(self, line: str) -> None:
        """Show one line about a slow step."""
        self._console.print(Text(f"{line} ...", style="dim"))

    def loading(self, dtype: str) -> None:
        """Say that the models are being loaded, and timed if that is to come."""
        what = (
            "Loading, then timing float32 and bfloat16, few drafts and many"
            if dtype == "auto"
            else "Loading"
        )
        self.notify(what)

    def timed(self, timings: Sequence[Timing], chosen: str) -> None:
        """Show the brief timing of each dtype."""
        fastest = max(timings, key=lambda timing: timing.tokens_per_s_drafted)
        why = "  <- used" + (": drafted decoding is fastest" if fastest.dtype == chosen else "")
        for timing in timings:
            note = why if timing.dtype == chosen else ""
            few = "" if timing.n_drafts is None else f" ({timing.n_drafts} drafts a cycle)"
            self._console.print(
                Text.assemble(
                    (f"  {timing.dtype:<9}", "bold" if note else ""),
                    f" {timing.tokens_per_s_plain:5.1f} tokens/s plain,",
                    f" {timing.tokens_per_s_drafted:5.1f} drafted{few}{note}",
                )
            )

    def start_prompt(self, pair: Pair, index: int, n_prompts: int, prompt: str) -> None:
        """Show the prompt."""
        self._pair = pair
        self._console.print()
        self._console.print(Rule(Text(f"{index + 1}/{n_prompts}  {_setting(pair)}"), align="left"))
        self._console.print(Text(prompt, style="bold"))

    def start_decoding(self, drafted: bool) -> None:
        """Begin a paragraph for the tokens that follow."""
        if self._pair is not None:
            self._text = IncrementalText(self._pair.tokenizer)
        if drafted:
            legend = Text.assemble(("drafted", LABEL), "  (", ("accepted drafts", ACCEPTED), ")")
            self._console.print("\n", legend, sep="\n")
        else:
            self._console.print(Text("plain", style=LABEL))

    def tokens(self, token_ids: Sequence[int], n_accepted: int) -> None:
        """Write tokens at once, accepted drafts in colour."""
        pieces = ((token_ids[:n_accepted], ACCEPTED), (token_ids[n_accepted:], ""))
        for ids, style in pieces:
            if piece := self._text.push(ids):
                self._console.print(Text(piece, style=style), end="", soft_wrap=True)

    def end_prompt(self, comparison: Comparison, measures: Measures) -> None:
        """Show the figures of the prompt, and how near a tie is where the texts part."""
        self._console.print("\n")
        self._console.print(_identity(measures.identical))
        if comparison.difference is not None:
            self._console.print(self._explain(comparison.difference))
        accepted = measures.acceptance_length
        self._console.print(
            Text.assemble(
                f"{measures.tokens_per_s_plain:.1f} -> {measures.tokens_per_s_drafted:.1f}",
                " tokens/s, ",
                (_speedups(measures), "bold"),
                f"\nacceptance length {'-' if accepted is None else f'{accepted:.2f}'}, ",
                f"{measures.target_forwards} target forwards for {measures.n_tokens} tokens",
            )
        )

    def _explain(self, difference: Difference) -> Text:
        one, other = (self._word(i) for i in (difference.plain_id, difference.drafted_id))
        return Text(
            f"  they part at token {difference.token_index + 1} ({one} or {other}), where the "
            f"target's two largest logits differ by {difference.top2_gap:.4f}"
        )

    def _word(self, token_id: int | None) -> str:
        if token_id is None or self._pair is None:
            return "the end"
        return repr(self._pair.tokenizer.decode([token_id]))

    def summary(self, report: Report) -> None:
        """Show one row for each prompt and one for all."""
        factor = best_plain_factor(report.timings, report.dtype)
        table = Table(title=f"Greedy decoding in {report.dtype}", title_justify="left")
        # Where there is little room only the prompts are cut: figures need their headings.
        table.add_column("prompt", max_width=34)
        for heading in HEADINGS:
            table.add_column(heading, justify="right", no_wrap=True)
        for comparison in report.comparisons:
            # A prompt given as str would be read as markup, and "[/b]" in it as an error.
            prompt = Text(comparison.prompt, no_wrap=True, overflow="ellipsis")
            table.add_row(prompt, *_cells(measure([comparison], factor)))
        table.add_section()
        table.add_row(Text("all", style="bold"), *_cells(report.overall))
        self._console.print()
        self._console.print(table)
        best = report.overall.speedup_vs_best_plain
        known = f"not known, only {report.dtype} was run; --dtype auto times both"
        self._console.print(
            "Against the fastest plain decoding of both dtypes: "
            + (known if best is None else f"{best:.2f}x")
        )


def _setting(pair: Pair) -> str:
    if pair.n_drafts is None:
        return pair.dtype
    return f"{pair.dtype}, num_assistant_tokens={pair.n_drafts}"


def _identity(identical: bool) -> Text:
    if identical:
        return Text("identical to plain decoding", style=ACCEPTED)
    return Text("not identical to plain decoding", style="bold yellow")


def _speedups(measures: Measures) -> str:
    best = measures.speedup_vs_best_plain
    if best is None:
        return f"{measures.speedup:.2f}x"
    return f"{measures.speedup:.2f}x ({best:.2f}x against the fastest plain dtype)"


def _cells(measures: Measures) -> list[str]:
    accepted = measures.acceptance_length
    return [
        "yes" if measures.identical else "no",
        f"{measures.tokens_per_s_plain:.1f}",
        f"{measures.tokens_per_s_drafted:.1f}",
        f"{measures.speedup:.2f}x",
        "-" if accepted is None else f"{accepted:.2f}",
    ]
