"""What a person sees: text in pieces, accepted drafts in colour, figures, where texts part."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from hf_dflash.demo import Comparison, Decoding, Difference, Pair, Report, Timing, measure
from hf_dflash.demo_view import IncrementalText, TerminalView


class ByteTokenizer:
    """One token for each byte, so that a character may take several."""

    def decode(self, token_ids, **_):
        return bytes(token_ids).decode("utf-8", errors="replace")


PAIR = Pair(None, ByteTokenizer(), None, "bfloat16")
PLAIN = Decoding(tuple(b"12"), 1.0, 2, ())
DRAFTED = Decoding(tuple(b"13"), 0.5, 2, (0,))


@pytest.fixture
def view():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=100)
    return TerminalView(console)


def written(view):
    return view._console.file.getvalue()


def test_pieces_add_up_and_characters_stay_whole():
    text = IncrementalText(ByteTokenizer())
    pieces = [text.push([byte]) for byte in "aß€!".encode()]
    assert pieces == ["a", "", "ß", "", "", "€", "!"]


def test_bytes_that_never_become_a_character_do_not_repeat_text():
    text = IncrementalText(ByteTokenizer())
    pieces = [text.push([byte]) for byte in b"a\xffb"]
    assert "".join(pieces) == "a\ufffdb"


def test_accepted_drafts_are_coloured(view):
    view.start_prompt(PAIR, 0, 1, "a prompt [bold]with brackets[/bold]")
    view.start_decoding(True)
    view.tokens(list(b"abc"), 2)
    assert "a prompt [bold]with brackets[/bold]" in written(view)
    assert "\x1b[1;32mab\x1b[0mc" in written(view)


MARKUP = "[/b] [red]x[/red] :smile:"


def test_nothing_of_a_run_is_read_as_markup():
    view = TerminalView(Console(file=io.StringIO(), width=200))
    ids = tuple(MARKUP.encode())
    plain, drafted = Decoding(ids, 1.0, len(ids), ()), Decoding(ids[:-1], 1.0, 2, (0,))
    shown = Comparison(MARKUP, plain, drafted, Difference(0, ord("["), ord("]"), 0.5))
    view.notify(f"notify {MARKUP}")
    view.start_prompt(PAIR, 0, 1, f"prompt {MARKUP}")
    view.start_decoding(True)
    view.tokens(ids, 1)
    view.end_prompt(shown, measure([shown], None))
    view.summary(Report("bfloat16", 7, (), (shown,)))
    assert written(view).count(MARKUP) == 4
    assert "('[' or ']')" in written(view)


def test_nothing_but_text_is_written_without_a_terminal():
    view = TerminalView(Console(file=io.StringIO(), width=100))
    view.start_prompt(PAIR, 0, 2, "prompt")
    for drafted in (False, True):
        view.start_decoding(drafted)
        view.tokens(list(b"x" * 150), 149)
    assert "\x1b" not in written(view)
    assert written(view).count("x" * 150) == 2, "long lines must not be broken"


def test_an_identical_prompt_shows_its_figures(view):
    view.start_prompt(PAIR, 0, 1, "prompt")
    same = Comparison("prompt", PLAIN, Decoding(PLAIN.token_ids, 0.5, 1, (1,)), None)
    view.end_prompt(same, measure([same], 1.25))
    text = " ".join(re.sub("\x1b\\[[0-9;]*m", "", written(view)).split())
    for shown in (
        "identical to plain decoding",
        "2.0 -> 4.0 tokens/s",
        "2.00x (1.60x against the fastest plain dtype)",
        "acceptance length 2.00",
        "1 target forwards for 2 tokens",
    ):
        assert shown in text


@pytest.mark.parametrize(
    ("difference", "shown"),
    [
        (Difference(1, ord("2"), ord("3"), 0.03125), "token 2 ('2' or '3'), where the"),
        (Difference(2, None, ord("\n"), 0.03125), "token 3 (the end or '\\n'), where the"),
    ],
)
def test_a_difference_shows_how_near_the_tie_was(view, difference, shown):
    view.start_prompt(PAIR, 0, 1, "prompt")
    differing = Comparison("prompt", PLAIN, DRAFTED, difference)
    view.end_prompt(differing, measure([differing], None))
    text = " ".join(written(view).split())
    assert "not identical to plain decoding" in text
    assert shown in text
    assert "differ by 0.0312" in text


def test_timings_mark_the_dtype_that_is_used(view):
    view.loading("auto")
    view.timed([Timing("float32", 30.0, 20.0), Timing("bfloat16", 20.0, 28.0)], "bfloat16")
    lines = written(view).splitlines()
    assert ["used: drafted decoding is fastest" in line for line in lines] == [False, False, True]


def test_a_dtype_that_was_asked_for_is_not_called_the_fastest(view):
    view.timed([Timing("float32", 30.0, 20.0), Timing("bfloat16", 20.0, 28.0)], "float32")
    lines = written(view).splitlines()
    assert ["<- used" in line for line in lines] == [True, False]
    assert "fastest" not in written(view)


def test_few_drafts_are_told_where_they_are_timed_and_used(view):
    view.timed([Timing("float32", 30.0, 20.0), Timing("bfloat16", 20.0, 28.0, 3)], "bfloat16")
    first, rest = written(view).split("bfloat16")
    assert "drafts a cycle" not in first
    assert "28.0 drafted (3 drafts a cycle)  <- used" in " ".join(rest.split(" "))


def test_the_heading_of_a_prompt_tells_the_number_of_drafts(view):
    view.start_prompt(replace(PAIR, n_drafts=3), 0, 1, "prompt")
    assert "bfloat16, num_assistant_tokens=3" in written(view)


def test_the_summary_of_one_dtype_says_what_is_not_known():
    view = TerminalView(Console(file=io.StringIO(), width=120))
    one = Comparison("first", PLAIN, DRAFTED, None)
    view.summary(Report("bfloat16", 7, (), (one,)))
    assert "of both dtypes: not known, only bfloat16 was run; --dtype auto" in written(view)


def test_the_summary_has_a_row_for_each_prompt_and_one_for_all(view):
    one = Comparison("first", PLAIN, Decoding((50,), 1.0, 1, ()), None)
    two = Comparison("second", PLAIN, DRAFTED, Difference(1, 50, 51, 0.1))
    timings = (Timing("float32", 3.0, 1.0), Timing("bfloat16", 2.0, 2.0))
    view.summary(Report("bfloat16", 7, timings, (one, two)))
    text = written(view)
    assert all(word in text for word in ("first", "second", "all", "yes", "no", "2.00x", " - "))
    assert "Against the fastest plain decoding of both dtypes: " in text
    assert "not known" not in text


def test_the_summary_keeps_its_headings_in_80_columns():
    view = TerminalView(Console(file=io.StringIO(), width=80))
    view.summary(
        Report("bfloat16", 7, (), (Comparison("Count from 1 " * 9, PLAIN, DRAFTED, None),))
    )
    text = written(view)
    headings = ("identical", "plain", "drafted", "tokens/s", "speed-up", "acceptance", "length")
    assert all(heading in text for heading in headings)
    assert text.count("Count from 1") == 1, "only prompts are cut, to one line"
