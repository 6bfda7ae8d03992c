"""What is kept of a card that is written again, and which cards may be replaced."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard

from .card_blocks import blocks_of
from .card_figures import figure_without_source

_ANY_GENERATED = "<!-- written by hf-dflash card"  # whatever the version
#: By it a card of this generator is known.
GENERATED = f"{_ANY_GENERATED}; figures stand between marks and are checked -->"
_NOTES = "## Notes\n\n"


def old_card(path: Path, *, overwrite: bool) -> ModelCard | None:
    """The card that is there, if there is one.

    Args:
        path: Of the card.
        overwrite: Whether it may be replaced without this generator's mark.

    Raises:
        ValueError: It has no such mark.
    """
    if not path.is_file():
        return None
    card: ModelCard = ModelCard.load(path)
    if GENERATED not in card.content and not overwrite:
        was_generated = _ANY_GENERATED in card.content or any(blocks_of(card.content))
        writer = (
            "was made by another version of `hf-dflash card`, and may have been edited since"
            if was_generated
            else "was not written by `hf-dflash card`: it is yours, or another tool's"
        )
        raise ValueError(
            f"{path} {writer}. Give `overwrite` (--overwrite) to replace it; text of your own can "
            "go into `notes` (--notes FILE)."
        )
    return card


def known_notes(old: ModelCard | None) -> str | None:
    """The text of one's own in a card that was generated; the rest of it is made anew."""
    if old is None or GENERATED not in old.content:
        return None
    return old.content.partition(_NOTES)[2].strip() or None


def of_old(old: ModelCard | None, name: str) -> str | None:
    """A text of an old card's metadata."""
    value = None if old is None else getattr(old.data, name, None)
    return value if isinstance(value, str) else None


def notes_section(notes: str | None) -> list[str]:
    """The section of notes; nothing if there are none."""
    return [f"{_NOTES}{notes.strip()}\n"] if notes else []


def check_notes(notes: str | None) -> None:
    """Refuse figures in a text of one's own.

    Raises:
        ValueError: There is one.
    """
    figure = figure_without_source(notes or "")
    if figure is not None:
        raise ValueError(
            f"`notes` must not hold figures, which come from measurements, got in line {figure[0]}"
            f": {figure[1]!r}."
        )
