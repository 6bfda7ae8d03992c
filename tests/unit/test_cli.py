"""The command line: help is quick, bad input is one line and exit code 2."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_dflash import cli, commands, smollm2
from hf_dflash.demo import Comparison, Decoding, Report

PAIR = ("--target", "t", "--drafter", "d")
SAME = Decoding((1, 2), 1.0, 2, (0,))


@pytest.fixture
def invoke():
    return lambda *args: CliRunner().invoke(cli.app, list(args))


@pytest.fixture
def calls(monkeypatch):
    """Runs that only record what they are asked for."""
    made = []

    def run(load_pair, prompts, **options):
        made.append((load_pair, list(prompts), options))
        return Report("float32", 7, (), tuple(Comparison(p, SAME, SAME, None) for p in prompts))

    monkeypatch.setattr(commands, "run", run)
    return made


def assert_one_line_error(result, pattern):
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert re.match(f"Error: .*{pattern}", result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("demo", ["--dtype", "--prompts", "--max-new-tokens", "--json"]),
        ("generate", ["--target", "--drafter", "--prompt", "--dtype", "--max-new-tokens"]),
    ],
)
def test_help_names_every_option(invoke, command, options):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert all(option in result.stdout for option in options)


def test_help_says_what_one_dtype_leaves_unknown(invoke):
    shown = " ".join(re.sub(r"[^\w\s,.-]", " ", invoke("generate", "--help").stdout).split())
    assert "so the speed-up over the fastest plain decoding stays unknown" in shown
    assert "stays unknown" not in invoke("demo", "--help").stdout, "the demo always times both"


def test_help_loads_neither_torch_nor_transformers():
    script = (
        "import sys; from typer.testing import CliRunner; from hf_dflash.cli import app; "
        "assert CliRunner().invoke(app, ['demo', '--help']).exit_code == 0; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("command", [["demo"], ["generate", *PAIR]])
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--dtype", "int8"], "`dtype` must be auto, float32 or bfloat16, got 'int8'"),
        (["--max-new-tokens", "-3"], "`max_new_tokens` must be at least 1, got -3"),
        (["--json", "/no/such/folder/f.json"], "`json` must be a file in an existing folder"),
        (["--json", str(Path(__file__).parent)], "`json` must be a file in an existing folder"),
    ],
)
def test_bad_options(invoke, command, options, pattern):
    prompt = ["--prompt", "p"] if command[0] == "generate" else []
    assert_one_line_error(invoke(*command, *prompt, *options), pattern)


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt(invoke, calls, prompt):
    result = invoke("generate", *PAIR, "--prompt", "fine", "--prompt", prompt)
    assert_one_line_error(result, "`prompt` must be a text that is not empty, got '")
    assert not calls


@pytest.mark.parametrize("argument", ["target", "drafter"])
def test_a_mistyped_folder(invoke, calls, argument):
    pair = {"target": "t", "drafter": "d", argument: "/no/where"}
    options = [word for name, value in pair.items() for word in (f"--{name}", value)]
    result = invoke("generate", *options, "--prompt", "p")
    assert_one_line_error(result, f"`{argument}` must be .*there is no folder /no/where")
    assert not calls


def test_a_prompt_file_that_is_missing(invoke, tmp_path):
    result = invoke("demo", "--prompts", str(tmp_path / "none.jsonl"))
    assert_one_line_error(result, "there is no file .*none.jsonl. Check the path")


def test_a_prompt_file_with_a_bad_line(invoke, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": "broken\n')
    assert_one_line_error(invoke("demo", "--prompts", str(path)), "prompts.jsonl:2: not valid JSON")


def test_a_demo_without_its_drafter(invoke, monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "__file__", str(tmp_path / "a" / "b" / "smollm2.py"))
    assert_one_line_error(invoke("demo"), "The demo needs its drafter in .*Run the demo from a")


def test_several_lines_of_an_error_become_one(invoke, monkeypatch):
    def fail(*_, **__):
        raise OSError("first\n  second")

    monkeypatch.setattr(commands, "run_pair", fail)
    result = invoke("generate", *PAIR, "--prompt", "p")
    assert_one_line_error(result, "first second\n")


def test_demo_passes_its_options_on(invoke, calls, tmp_path):
    prompts, figures = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    options = ["--prompts", str(prompts), "--json", str(figures), "--max-new-tokens", "7"]
    result = invoke("demo", *options, "--dtype", "float32")
    assert (result.exit_code, result.stderr) == (0, "")
    _, asked, options = calls[0]
    assert asked == ["one", "two"]
    assert (options["dtype"], options["max_new_tokens"]) == ("float32", 7)
    assert len(json.loads(figures.read_text())["prompts"]) == 2


def test_a_prompt_of_markup_is_shown_as_it_is(invoke, calls, tmp_path):
    prompts, figures = tmp_path / "prompts.jsonl", tmp_path / "[red]figures.json"
    prompts.write_text('{"prompt": "End [/b] :smile:"}\n')
    result = invoke("demo", "--prompts", str(prompts), "--json", str(figures))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "End [/b] :smile:" in result.stdout
    assert json.loads(figures.read_text())["prompts"][0]["prompt"] == calls[0][1][0]


def test_figures_are_written_before_they_are_shown(invoke, calls, monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("no terminal")

    monkeypatch.setattr(commands.TerminalView, "summary", fail)
    figures = tmp_path / "figures.json"
    assert_one_line_error(invoke("demo", "--json", str(figures)), "no terminal")
    assert len(json.loads(figures.read_text())["prompts"]) == len(calls[0][1])


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--dtype", "[/b]"], "got '[/b]'"),
        (["--prompts", "no/[/b].jsonl"], "no/[/b].jsonl"),
    ],
)
def test_markup_in_an_option_is_shown_as_it_is(invoke, options, shown):
    result = invoke("demo", *options)
    assert result.exit_code == 2
    assert shown in result.stderr


def test_demo_has_prompts_of_its_own(invoke, calls):
    assert invoke("demo").exit_code == 0
    assert calls[0][1] == list(commands.DEMO_PROMPTS)
    assert calls[0][2]["dtype"] == "auto"


def test_generate_takes_several_prompts(invoke, calls):
    result = invoke(
        "generate", *["--target", "t", "--drafter", "d", "--prompt", "one", "--prompt", "two"]
    )
    assert result.exit_code == 0
    assert calls[0][1] == ["one", "two"]
