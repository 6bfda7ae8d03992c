"""The report: what it says, that it is one whole page, and in Chromium that it reads on a phone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench_examples import example_measurement
from hf_dflash import cli
from hf_dflash.measurement import Settings, write_measurement
from hf_dflash.plots import slot_curve
from hf_dflash.report import picture_files, report_html, write_report
from hf_dflash.report_tokens import MOST_SHOWN, shown_runs, tokens_of
from measurements import measurement, one_token_runs, pair_of_runs, provenance, run, two_block_sizes

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
VOID = {"meta", "link", "br", "path", "use", "rect"}


class Page(HTMLParser):
    """Collects a page's elements, and fails where tags do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag
        self.text += " " if tag in ("td", "th", "p", "div", "h2") else ""

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data

    def of_class(self, name: str) -> list[dict[str, str]]:
        return [a for _, a in self.elements if name in a.get("class", "").split()]


@pytest.fixture(scope="module")
def html() -> str:
    return report_html(example_measurement())


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time."""
    monkeypatch.setattr("hf_dflash.report._drawn", lambda _: [])


# ---- what it says ----


@pytest.mark.usefixtures("without_pictures")
def test_the_hash_of_the_code_is_told_where_it_is_known() -> None:
    made = measurement(provenance=provenance(code_sha256="a1b2c3d4e5f6"))
    assert "source files sha256 begins with a1b2c3d4e5f6 " in words_of(Page(report_html(made)))
    assert "source files" not in words_of(Page(report_html(measurement())))


def words_of(page: Page) -> str:
    return " ".join(page.text.split())


def test_the_top_says_how_much_faster_on_what_and_whether_the_text_is_the_same(page: Page) -> None:
    top = words_of(page).split("Every method")[0]
    assert re.search(r"SmolLM2-135M-Instruct writes 2\.\d\d times as fast as without it", top)
    assert "with the 15 drafts of its trained block (" in top
    assert "Median of 12 prompts, the middle half of them between" in top
    assert "The text is unchanged: all 12 outputs are token for token" in top
    assert "Intel(R) Xeon(R) Processor @ 2.60GHz (AVX512), 2 threads, in float32" in top
    assert "greedy, up to 90 new tokens; prompts: tables (4), arithmetic (4) and chat (4)" in top
    assert re.search(r"Faster than plain decoding on: .* tables \(.*; slower than it on: chat", top)
    assert "with the target HuggingFaceTB/SmolLM2-135M-Instruct at 12fd25f77366fa6b" in top
    assert "the mean over outputs (macro)" in top


@pytest.mark.usefixtures("without_pictures")
def test_the_top_has_the_fastest_number_of_drafts_too() -> None:
    top = words_of(Page(report_html(measurement(two_block_sizes())))).split("Every method")[0]
    assert "1.60 times as fast (over all seconds 1.60): use num_assistant_tokens=2." in top
    assert "1.60xthe speed of plain decoding, with 2 drafts a cycle, the fastest measured" in top
    assert "10.0 → 16.0tokens a second with 2 drafts a cycle, one prompt at a time" in top
    top = words_of(Page(report_html(measurement()))).split("Every method")[0]
    assert "5.0 → 10.0tokens a second with 7 drafts a cycle, one prompt at a time" in top


def test_both_means_of_the_acceptance_length_are_explained(page: Page) -> None:
    text = words_of(page)
    assert "mean over outputs (macro, the papers' acceptance length), so each output" in text
    assert "the mean over all cycles (micro): outputs that take many cycles count more" in text


def test_names_of_data_sets_do_not_lie_upon_one_another() -> None:
    runs = [r for name in ("gsm8k", "humaneval", "mt-bench") for r in pair_of_runs(dataset=name)]
    figure = slot_curve(measurement(runs)).figure
    figure.draw_without_rendering()
    [axes], [legend] = figure.axes, figure.legends
    assert [text.get_text() for text in axes.texts] == []
    names = legend.get_texts()
    assert [name.get_text() for name in names] == ["gsm8k", "humaneval", "mt-bench", "all prompts"]
    boxes = [text.get_window_extent() for text in (*names, axes.xaxis.label)]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    styles = [(line.get_color(), line.get_linestyle()) for line in axes.lines]
    assert len(set(styles)) == 4


def test_the_baselines_that_were_measured_are_explained(page: Page) -> None:
    methods = {run.method for run in example_measurement().runs}
    assert "prompt_lookup" in methods
    assert "prompt lookup: drafts copied from the prompt" in words_of(page)
    told = "assistant model: a small model" in words_of(page)
    assert told == ("assistant_model" in methods)


@pytest.mark.usefixtures("without_pictures")
def test_differences_are_said_first_and_listed() -> None:
    page = Page(report_html(example_measurement(differing=True)))
    text = words_of(page)
    assert "The text is not always the same: 11 of 12 outputs are token for token" in text
    assert "one differs from some token on, where the target's two best logits are at most" in text
    assert "Where outputs part" in text
    assert "chat 1 88 “ one” “ of” 0.125" in text
    assert page.of_class("bad")


@pytest.mark.usefixtures("without_pictures")
def test_differences_with_the_drafts_that_are_advised_are_listed_too() -> None:
    plain, of_three, drafted = two_block_sizes()
    differs = {"identical": False, "top2_gap": 3.0}
    of_three = dataclasses.replace(of_three, first_difference=1, **differs)
    page = Page(report_html(measurement([plain, of_three, drafted])))
    text = words_of(page)
    assert page.of_class("bad")
    assert "0/1outputs token for token as without the drafter, with 2 drafts" in text
    assert "Where outputs part, with 2 drafts" in text
    assert "Where outputs part, with 7 drafts" not in text
    drafted = dataclasses.replace(drafted, first_difference=2, **differs)
    text = words_of(Page(report_html(measurement([plain, of_three, drafted]))))
    of_7, of_2 = (text.split(f"Where outputs part, with {n} drafts")[1] for n in (7, 2))
    assert "gsm8k 1 3 “[2]” “[2]” 3" in of_7
    assert "gsm8k 1 2 “[1]” “[1]” 3" in of_2


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    ("judged", "said"),
    [
        ({}, "at most 2.5 apart."),
        ({"distance": 2.5, "rounding": 1.5}, "at most 2.5 apart: near ties, which rounding"),
        ({"distance": 2.5, "rounding": 1.0}, "apart; 1 of these places are no near ties, but an"),
    ],
)
def test_a_near_tie_is_what_was_measured_to_be_one(judged: dict[str, float], said: str) -> None:
    runs = pair_of_runs(identical=False, first_difference=3, top2_gap=2.5, **judged)
    plain = {"identical": None, "first_difference": None, "top2_gap": None}
    runs[0] = dataclasses.replace(runs[0], **plain, distance=None, rounding=None)
    text = words_of(Page(report_html(measurement(runs))))
    assert said in text
    assert ("near tie" in text) == bool(judged)


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    ("runs", "temperature", "said"),
    [
        (pair_of_runs(0.8), 0.0, "writes 0.80 times as fast as without it, which is slower, with"),
        ([run()], 0.0, "writes 10.0 tokens per second; plain decoding was not measured"),
        (pair_of_runs()[:1], 0.0, "The drafter was not measured."),
        ([run(identical=None)], 0.7, "Sampled texts differ from run to run"),
        ([run(identical=None)], 0.0, "Whether the text is unchanged was not measured."),
        ([run(n_accepted=[], n_drafted=[], token_ids=[1])], 0.0, "1 token in 0 cycles."),
    ],
)
def test_what_was_not_measured_is_not_said(runs: Any, temperature: float, said: str) -> None:
    whole = measurement(runs, settings=Settings(12, temperature, {"gsm8k": 3}, 1))
    text = words_of(Page(report_html(whole)))
    assert said in text
    assert "nan" not in text.split("What was measured")[0].lower()


def test_everything_that_decided_the_figures_is_listed(page: Page) -> None:
    facts = words_of(page).split("What was measured, and how")[1]
    for fact in ("hf-dflash bench --target", "ab" * 32, "torch 2.13.0", "seed 0", "12,345,678"):
        assert fact in facts


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("rows", [[2, 3, 8], [], None])
def test_products_made_the_other_way_round_are_told(rows: list[int] | None) -> None:
    page = Page(report_html(measurement(provenance=provenance(few_rows=rows))))
    told = "products of 2, 3, 8 rows made the other way round" in words_of(page)
    assert told == bool(rows)


@pytest.mark.usefixtures("without_pictures")
def test_a_data_set_named_like_markup_is_shown_as_it_is() -> None:
    whole = measurement(pair_of_runs(dataset="<script>x</script>"))
    assert "<script>x" not in report_html(whole)
    assert "<script>x</script>" in Page(report_html(whole)).text


# ---- one whole page ----


def test_a_page_asks_for_nothing_outside_itself(html: str, page: Page) -> None:
    fetched = ("src", "srcset", "action", "data", "poster")
    for tag, attributes in page.elements:
        assert not set(fetched) & set(attributes), tag
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#")[0] == "#" or attributes[name] == "data:,"
    assert "@import" not in html
    assert re.findall(r"url\((?!#)", html) == []


def test_ids_are_there_once(html: str, page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = [a["aria-labelledby"] for _, a in page.elements if "aria-labelledby" in a]
    assert len(labels) == 6
    assert set(labels) <= set(ids)
    used = re.findall(r'(?:href="|url\()#([^")]+)', html)
    assert set(used) <= set(ids)


def test_every_cell_has_a_label_for_narrow_pages(page: Page) -> None:
    cells = [a for tag, a in page.elements if tag == "td" and "data-label" in a]
    assert {"tokens/s", "speed-up", "identical"} <= {a["data-label"] for a in cells}


# ---- tokens ----


def test_every_token_of_a_run_has_its_origin() -> None:
    example = run(rejected_ids=[[], [50, 51, 52, 53, 54, 55, 56], []])
    tokens = tokens_of(example)
    assert [token.token_id for token in tokens] == example.token_ids
    origins = "".join(token.origin[0] for token in tokens)
    assert origins == "f" + "aaaaaaab" + "b" + "ab"
    assert [i for i, token in enumerate(tokens) if token.starts_cycle] == [1, 9, 10]
    assert tokens[9].rejected_ids == (50, 51, 52, 53, 54, 55, 56)
    assert tokens[8].rejected_ids == ()


def test_a_cycle_that_a_stop_cut_has_no_bonus_token() -> None:
    tokens = tokens_of(run(token_ids=[1, 2, 3], n_accepted=[2], n_drafted=[7]))
    assert [token.origin for token in tokens] == ["first", "accepted", "accepted"]


def test_tokens_say_how_they_came(page: Page) -> None:
    said = [
        attributes["data-said"] for attributes in page.of_class("t") if "data-said" in attributes
    ]
    assert any(re.match(r"“.+”: a draft that the target accepted, cycle 1\.$", s) for s in said)
    assert any("bonus) token, cycle 2. The drafter had proposed “" in s for s in said)
    assert len(page.of_class("first")) == 1 + len(shown_runs(example_measurement()))
    assert all("tabindex" in a for a in page.of_class("instead") if "data-said" in a)


@pytest.mark.usefixtures("without_pictures")
def test_without_spellings_tokens_are_numbers_and_without_drafts_it_is_said() -> None:
    whole = measurement()
    text = words_of(Page(report_html(whole)))
    assert "[0][1][2]" in text
    assert "The drafts that were rejected were not recorded." in text


def test_shown_are_the_fastest_the_median_and_the_slowest_of_each_data_set() -> None:
    whole = example_measurement(n_prompts=7)
    shown = shown_runs(whole)
    assert len(shown) == 9 <= MOST_SHOWN
    for name in ("tables", "arithmetic", "chat"):
        ratios = [ratio for shown_run, ratio in shown if shown_run.dataset == name]
        assert ratios == sorted(ratios, reverse=True)
        assert len(ratios) == 3


def test_of_many_data_sets_one_output_each_is_shown_of_the_first_ones() -> None:
    whole = measurement([r for i in range(20) for r in pair_of_runs(dataset=f"set{i}")])
    assert len({shown_run.dataset for shown_run, _ in shown_runs(whole)}) == MOST_SHOWN
    assert len(shown_runs(whole)) == MOST_SHOWN


# ---- files and the command ----


NOT_A_FIGURE = re.compile(r"\b(nan|inf|infinity)\b", re.IGNORECASE)


def test_outputs_of_one_token_have_no_cycle_and_no_figure_of_one() -> None:
    page = Page(report_html(measurement(one_token_runs())))
    assert not NOT_A_FIGURE.search(page.text)
    assert "1.00 times as fast" in page.text
    assert "no cycle" in page.text
    assert "tokens a cycle, of" not in page.text


def test_a_data_set_without_a_draft_is_left_out_of_the_curve_of_places() -> None:
    runs = pair_of_runs() + pair_of_runs(dataset="a")
    runs.append(run(dataset="b", n_accepted=[0], n_drafted=[0], token_ids=[1, 2]))
    assert "Acceptance by place in the block" in report_html(measurement(runs))


def test_pictures_are_written_as_files(tmp_path: Path) -> None:
    names = {path.name for path in picture_files(example_measurement(), tmp_path / "pictures")}
    pictures = {"speedup", "histogram", "slots", "positions", "block-size", "time"}
    assert names == {f"{name}.{ending}" for name in pictures for ending in ("svg", "png")}
    assert (tmp_path / "pictures" / "speedup.png").read_bytes()[1:4] == b"PNG"


def test_the_same_measurement_gives_the_same_page(html: str) -> None:
    assert report_html(example_measurement()) == html


def test_the_command_writes_a_page_and_pictures(tmp_path: Path) -> None:
    write_measurement(example_measurement(), tmp_path / "bench.json")
    arguments = ["report", str(tmp_path / "bench.json"), "-o", str(tmp_path / "report.html")]
    arguments += ["--pictures", str(tmp_path / "pictures")]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    assert "times as fast as without it" in result.stdout
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert len(list((tmp_path / "pictures").iterdir())) == 12


@pytest.mark.parametrize("place", ["no/such/folder/report.html", "."])
def test_a_place_that_cannot_be_written_is_refused_first(tmp_path: Path, place: str) -> None:
    arguments = ["report", str(tmp_path / "bench.json"), "-o", str(tmp_path / place)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert "Error: `out` must be a file in an existing folder" in result.stderr


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "hf_dflash.plots", None)
    with pytest.raises(RuntimeError, match=r"need matplotlib.*pip install 'hf-dflash\[plot\]'"):
        write_report(measurement(), tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


# ---- in a browser ----

#: Runs in the page: what sticks out to the right, and what pointing at a token shows.
PROBE = """
const doc = document.querySelector("iframe").contentDocument;
for (const details of doc.querySelectorAll("details")) details.open = true;
const width = doc.documentElement.clientWidth;
const out = [...doc.querySelectorAll("body *")].filter(
  (e) => e.getBoundingClientRect().right > width + 1 && !e.closest("svg"));
const texts = [...doc.querySelectorAll("svg text")].map((e) => e.getBoundingClientRect().height);
const token = doc.querySelector(".instead[data-said]");
token.dispatchEvent(new doc.defaultView.MouseEvent("mouseover", {bubbles: true}));
document.title = "";
document.body.textContent = JSON.stringify({
  width: width,
  scroll: doc.documentElement.scrollWidth,
  out: out.map((e) => e.tagName + "." + e.className),
  smallest: Math.min(...texts),
  said: token.closest(".view").querySelector(".said").textContent,
  wanted: token.dataset.said,
  lead: parseFloat(doc.defaultView.getComputedStyle(doc.querySelector(".lead")).fontSize),
  headShown: doc.querySelector("thead").getBoundingClientRect().height > 0,
});
"""


@pytest.fixture
def rendered(html: str, tmp_path: Path) -> Callable[[int], Any]:
    """Measures the page in headless Chromium at a width, in a frame as wide as a phone."""

    def measure(width: int) -> Any:
        frame = f'<iframe style="border:0" width="{width}" height="900" srcdoc="{escape(html)}">'
        script = f"<script>document.querySelector('iframe').onload = () => {{{PROBE}}};</script>"
        wrapper = tmp_path / "wrapper.html"
        wrapper.write_text(f"<!doctype html><body>{frame}</iframe>{script}", encoding="utf-8")
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
        command += ["--no-first-run", "--disable-background-networking", "--disable-sync"]
        command += ["--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}"]
        command += [f"--window-size={max(width, 600)},900", "--virtual-time-budget=5000"]
        result = subprocess.run(
            [*command, "--dump-dom", str(wrapper)], capture_output=True, text=True, check=True
        )
        return json.loads(re.search(r"\{.*\}", result.stdout)[0].replace("&amp;", "&"))

    return measure


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_whole_at_any_width(rendered: Any, width: int) -> None:
    seen = rendered(width)
    assert seen["width"] in range(width - 20, width + 1)  # but for the scroll bar
    assert seen["out"] == []
    assert seen["scroll"] <= seen["width"]
    assert seen["smallest"] >= 10, "text in pictures must be readable"
    assert seen["said"] == seen["wanted"]
    assert seen["lead"] >= 20
    assert seen["headShown"] == (width > 700), "tables are lists on a phone"
