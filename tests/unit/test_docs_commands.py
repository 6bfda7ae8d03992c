"""Every command of the README and of docs/ is run by a test, read by its program, or marked."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from hf_dflash import cli
from hf_dflash.run_arguments import _Parser, parse_run
from pages import DOCS, PROGRAMS, ROOT, RUN_BY, Command, blocks, commands, text_of, to_run

README = "../README.md"
PAGES = [README, *sorted(path.name for path in DOCS.glob("*.md"))]
COMMANDS = [command for page in PAGES for command in commands(page)]
#: Scripts without options, and which tests run them.
SCRIPTS_RUN_BY = {
    "docs/write_api.py": "tests/unit/test_docs.py",
    "docs/figures/draw.py": "tests/unit/test_docs.py",
    "examples/stream.py": "tests/e2e/test_examples.py",
}


class ReadingStoppedError(Exception):
    """A script has read its arguments."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the one file that a parser opens."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("\n".join(blocks("training.md", "yaml")))
    return tmp_path


def read_by_app(words: list[str]) -> None:
    """Have the subcommand read its arguments; its name alone is only looked up."""
    app: Any = typer.main.get_command(cli.app)
    command = app.commands[words[0]]
    if words[1:]:
        command.make_context(command.name, words[1:])


def read_by_script(script: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        parse(parser, *arguments)
        raise ReadingStoppedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(ReadingStoppedError):
        runpy.run_path(str(script), run_name="__main__")


def read(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a command read by the very parser that would read it."""
    words = command.words[1:]
    if command.program == "hf-dflash":
        if words[0] == "train" and words[1:]:
            parse_run([*words[1:], "--use_cpu=true"])
        else:
            read_by_app(words)
    elif command.program == "hf":
        run = [sys.executable, "-m", "huggingface_hub.cli.hf", *words, "--help"]
        assert subprocess.run(run, capture_output=True, check=False).returncode == 0
    elif command.program == "pip":
        check_extras(words)
    elif words[0] == "-c":
        compile(words[1], "command", "exec")  # run below
    elif words[0] == "-m":
        assert find_spec(words[1])
    elif words[0] in SCRIPTS_RUN_BY:
        assert len(words) == 1
        assert Path(words[0]).name in (ROOT / SCRIPTS_RUN_BY[words[0]]).read_text("utf-8")
    else:
        read_by_script(ROOT / words[0], words[1:], monkeypatch)


def check_extras(words: list[str]) -> None:
    """Of this package, which is all that the pages install."""
    assert words[0] == "install"
    (asked,) = re.findall(r"\[([a-z,]+)\]", " ".join(words))
    section = (ROOT / "pyproject.toml").read_text("utf-8").split("[project.optional-dependencies]")
    assert {*asked.split(",")} <= {*re.findall(r"^(\w+) = \[", section[1], re.MULTILINE)}
    assert words[-1] == f".[{asked}]", "it is on no index yet"
    assert "-e" in words


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_read_by_its_program_or_marked(
    command: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del place
    assert command.program in PROGRAMS
    is_ours = command.program in ("hf-dflash", "hf", "pip", "python", "python3")
    if command.mark is None or (is_ours and "-m" not in command.words):
        read(command, monkeypatch)


def test_the_commands_are_found() -> None:
    """A page that is written otherwise must not hide its commands."""
    for page in PAGES:
        n_named = len(re.findall(r"^(?:\$ )?(?:\S+/)?hf-dflash \w", text_of(page), re.MULTILINE))
        assert n_named <= sum(command.in_block for command in commands(page)), page
    assert sum(not command.in_block for command in COMMANDS) > 40
    assert {c.program for c in COMMANDS} == {*PROGRAMS}


@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page) and page != README])
def test_the_blocks_of_a_page_are_run(page: str) -> None:
    """The README's are CI's: tests/e2e/test_readme.py."""
    assert f'to_run("{page}")' in (ROOT / RUN_BY[page]).read_text("utf-8")


def test_the_python_in_a_line_prints_the_folder_of_the_target() -> None:
    programs = {command.words[2] for command in COMMANDS if command.words[1:2] == ["-c"]}
    (program,) = programs  # the same on all pages
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    assert (Path(printed.getvalue().strip()) / "config.json").is_file()


@pytest.mark.parametrize("page", [page for page in PAGES if page != "serving.md"])
def test_every_option_named_in_the_text_exists(page: str) -> None:
    """The options on the page on serving are the servers' own."""
    app: Any = typer.main.get_command(cli.app)
    known = {
        o for c in app.commands.values() for p in c.params for o in (*p.opts, *p.secondary_opts)
    }
    known |= {option for action in _Parser()._actions for option in action.option_strings}
    spans = re.findall(r"`(--[^`]+)`", text_of(page))
    named = {option for span in spans for option in re.findall(r"(?<!\S)--[a-z][\w-]*", span)}
    assert named - known == set()
