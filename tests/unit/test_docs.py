"""The documentation holds together: links, the page of pages, the reference, the figures."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

import hf_dflash
from hf_dflash.losses import decay_weights
from pages import DOCS, ROOT, RUN_BY, blocks, text_of

PAGES = sorted(path.name for path in DOCS.glob("*.md"))
LINKING = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
LINKING += [DOCS / page for page in PAGES]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors_of(path: Path) -> list[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(path.read_text("utf-8")), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def links_of(path: Path) -> list[str]:
    found = re.findall(r"\]\(([^()\s]+)\)", without_code(path.read_text("utf-8")))
    return [link for link in found if not link.startswith(("https://", "http://", "mailto:"))]


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in links_of(path):
        name, _, anchor = link.partition("#")
        goal = path if not name else (path.parent / name).resolve()
        assert goal.exists(), link
        assert goal.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors_of(goal), link


def test_the_page_of_pages_has_them_all() -> None:
    linked = {link for link in links_of(DOCS / "README.md") if "/" not in link}
    assert linked == {*PAGES} - {"README.md"}


@pytest.mark.parametrize("page", PAGES)
def test_what_can_be_run_is_run_by_a_test(page: str) -> None:
    languages = ("bash", "console", "python", "yaml")
    if any(f"```{language}\n" in text_of(page) for language in languages):
        assert page in (ROOT / RUN_BY[page]).read_text("utf-8")
    else:
        assert page not in RUN_BY


def test_the_reference_is_what_the_docstrings_say() -> None:
    written = runpy.run_path(str(DOCS / "write_api.py"))["page"]()
    assert text_of("api.md") == written, "run `python docs/write_api.py`"


def test_the_reference_has_all_that_the_package_exports() -> None:
    anchors = anchors_of(DOCS / "api.md")
    missing = {name for name in hf_dflash.__all__ if name.lower() not in anchors}
    assert missing == {"__version__"}
    assert max(Counter(anchors).values()) == 1, "a link would lead to another name"


def test_the_python_of_how_it_works_prints_what_it_says() -> None:
    (code,) = blocks("how-it-works.md", "python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().strip() == code.splitlines()[-1].removeprefix("# ")


def test_the_figures_are_what_their_script_draws(tmp_path: Path) -> None:
    script = runpy.run_path(str(DOCS / "figures" / "draw.py"))
    script["main"](tmp_path)
    drawn = sorted(tmp_path.iterdir())
    assert [path.name for path in drawn] == sorted(p.name for p in DOCS.glob("figures/*.svg"))
    for path in drawn:
        of_training = path.name in ("runs.svg", "training.svg")
        page = "training.md" if of_training else "how-it-works.md"
        assert f"figures/{path.name})" in text_of(page)
        drawing, places = drawing_and_places(path)
        committed, committed_places = drawing_and_places(DOCS / "figures" / path.name)
        assert drawing == committed, "run `python docs/figures/draw.py`"
        assert places == pytest.approx(committed_places, abs=0.01)


def drawing_and_places(path: Path) -> tuple[str, list[float]]:
    """A figure without its decimal numbers, and those: their last digit is the CPU's choice."""
    number = re.compile(r"-?\d+\.\d+")
    text = path.read_text("utf-8")
    return number.sub("_", text), [float(place) for place in number.findall(text)]


def test_the_figures_say_what_the_text_says() -> None:
    script = runpy.run_path(str(DOCS / "figures" / "draw.py"))
    full, sliding = script["visible_keys"](False, None), script["visible_keys"](True, 4)
    block_b = slice(4, 8)
    assert full[block_b, :10].sum() == 4 * 4  # positions 0..3 and not the anchor's
    assert full[block_b].nonzero()[:, 1].unique().tolist() == [0, 1, 2, 3, 14, 15, 16, 17]
    assert sliding[block_b, :10].sum(dim=1).tolist() == [3, 2, 1, 0]
    assert script["expected_speedup"](3.0, 1.5) == 2.0
    assert script["PUBLISHED_GAMMA"] == {16: 7.0, 10: 5.0, 8: 4.0}
    assert decay_weights(15, 7.0)[7] == pytest.approx(0.368, abs=1e-3)
