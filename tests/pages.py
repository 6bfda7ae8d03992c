"""The pages of the documentation, as tests read them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def text_of(page: str) -> str:
    """A page of docs/."""
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """What stands in a page's fences of one language."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, text_of(page), flags=re.DOTALL | re.MULTILINE)
