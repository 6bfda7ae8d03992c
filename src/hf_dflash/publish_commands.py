"""What the commands that publish do: write the card, list the files, push."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from huggingface_hub import ModelCard
from rich.console import Console
from rich.markdown import Markdown
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from .adapter_card import ADAPTER_CONFIG_NAME, is_adapter, write_adapter_card
from .hub import FolderContents, check_folder, push_folder
from .model_card import CARD_NAME, CardOptions, write_card


def run_card(
    folder: Path,
    benches: Sequence[Path],
    training_log: Path | None,
    notes_file: Path | None,
    options: CardOptions,
) -> None:
    """Write the card of a drafter or adapter, and say what is in it."""
    _check_drafter_folder(folder)
    if notes_file is not None:
        notes = notes_file.read_text(encoding="utf-8")
        options = replace(options, notes=notes)
    if is_adapter(folder):
        _check_no_figures(benches, training_log)
        path = write_adapter_card(folder, options)
    else:
        path = write_card(folder, benches=benches, training_log=training_log, options=options)
    # A command that is broken into two lines cannot be copied.
    console = Console(soft_wrap=True)
    push = f"hf-dflash push {folder} {options.name or 'REPO_ID'}"
    console.print(Text(f"Wrote {path}. Look at it, then: {push}"))
    if ModelCard.load(path).data.base_model is not None:
        return
    if is_adapter(folder):
        console.print(
            "The card names no repository of the drafter that the adapter belongs to: set "
            "`base_model_name_or_path` in adapter_config.json to it, and write the card again."
        )
    else:
        console.print(
            "The card names no repository of the target, so readers cannot load it: write the card "
            "again with --target, such as --target HuggingFaceTB/SmolLM2-135M-Instruct."
        )


def run_push(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None,
    revision: str | None,
    create_pr: bool,
    commit_message: str | None,
    dry_run: bool,
    code: bool,
) -> None:
    """Push a drafter to the Hub, or show what would be pushed."""
    _check_drafter_folder(folder)
    console = Console()
    if dry_run:
        show_contents(console, check_folder(folder, code=code), repo_id)
        show_card(console, folder / CARD_NAME)
        return
    url = push_folder(
        folder,
        repo_id,
        private=private,
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message,
        code=code,
    )
    console.print(Text(f"Published at {url}"))


def show_contents(console: Console, contents: FolderContents, repo_id: str) -> None:
    """List the files that a push sends, and what stays here."""
    table = Table(title=Text(f"A push would send to {repo_id}"), title_justify="left")
    table.add_column("file")
    table.add_column("size", justify="right")
    for file in contents.files:
        table.add_row(Text(file.name), size_text(file.size_bytes))
    table.add_section()
    table.add_row(f"{len(contents.files)} files", size_text(contents.size_bytes))
    console.print(table)
    if contents.adds_code:
        console.print(
            "The code for trust_remote_code=True is added, and `auto_map` to config.json; the "
            "folder here is not changed. --no-code leaves it out."
        )
    if contents.left_out:
        console.print(Text(f"Stays here: {', '.join(contents.left_out)}"))
    console.print(
        "If an earlier drafter or adapter is there, the push deletes those of its weights, "
        "configs, training records and measurements that are not in this list."
    )
    is_whole = all(file.name != ADAPTER_CONFIG_NAME for file in contents.files)
    checked = "The drafter loads strictly" if is_whole else "The adapter can be read"
    console.print(f"Nothing was sent. {checked}, and its card was checked.")


def show_card(console: Console, path: Path) -> None:
    """Show a card as a reader of the Hub sees it, after its metadata."""
    card = ModelCard.load(path)
    console.print(Rule(f"{CARD_NAME}: metadata"))
    console.print(Syntax(card.data.to_yaml(), "yaml", background_color="default", word_wrap=True))
    console.print(Rule(CARD_NAME))
    console.print(Markdown(card.text))


def size_text(n_bytes: int) -> str:
    """A size for people, in powers of 1000 as the Hub writes it.

    >>> size_text(999), size_text(1_070_000_000)
    ('999 B', '1.07 GB')
    """
    size, units = float(n_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{n_bytes} B" if units[0] == "B" else f"{size:.3g} {units[0]}"


def _check_no_figures(benches: Sequence[Path], training_log: Path | None) -> None:
    if benches or training_log is not None:
        raise ValueError(
            "`--bench` and `--training-log` are of a whole drafter, but this folder holds an "
            "adapter of one, whose card tells of the log beside it. Merge it first (its card says "
            "how), and write the card of the merged drafter."
        )


def _check_drafter_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"`folder` must be the folder of a drafter, but there is no folder {folder}."
        )
