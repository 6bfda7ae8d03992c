"""`hf-dflash convert` and `hf-dflash doctor` on the command line."""

import json
import re

import pytest
from typer.testing import CliRunner

import published_folders as folders
from hf_dflash import cli
from hf_dflash.cli_formats import _ENGINES, _FORMATS
from hf_dflash.doctor_facts import ENGINES
from hf_dflash.wire_formats import FORMATS


@pytest.fixture
def invoke():
    return lambda *args: CliRunner().invoke(cli.app, [str(arg) for arg in args])


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("convert", ["--to", "--from", "--target", "--rope", "--draft-vocabulary"]),
        ("doctor", ["--target", "--engine", "--json"]),
    ],
)
def test_help_names_every_option_and_gives_an_example(invoke, command, options):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert all(option in result.stdout for option in options)
    assert f"hf-dflash {command} my-drafter" in result.stdout


def test_help_names_what_there_is():
    assert _FORMATS.split(", ") == list(FORMATS)
    assert _ENGINES.split(", ") == list(ENGINES)


def test_a_conversion_says_what_it_did_and_what_it_left_out(invoke, tmp_path):
    source = folders.angelslim(tmp_path / "d")
    result = invoke("convert", source, tmp_path / "out", "--to", "hf-dflash", "--from", "angelslim")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("angelslim -> hf-dflash: ")
    assert "Left out, not part of the drafter: config.json: attention_backend" in result.stdout
    again = invoke("convert", tmp_path / "out", tmp_path / "flat", "--to", "flat")
    assert again.stdout == f"hf-dflash -> flat: {tmp_path / 'flat'}\n"


def test_a_refused_conversion_is_one_line(invoke, tmp_path):
    source = folders.zlab(tmp_path / "d", attention_bias=True)
    result = invoke("convert", source, tmp_path / "out", "--to", "native")
    assert result.exit_code == 2
    assert re.match("Error: .*missing: .*q_proj.bias", result.stderr)
    assert result.stderr.count("\n") == 1


def test_doctor_s_exit_code_says_whether_the_folder_is_good(invoke, tmp_path):
    good = folders.zlab(tmp_path / "good")
    assert invoke("doctor", good).exit_code == 0
    bad = folders.zlab(tmp_path / "bad", mask_token_id=None, dflash_config={})
    assert invoke("doctor", bad).exit_code == 1
    assert invoke("doctor", good, "--engine", "speculators").exit_code == 1
    missing = invoke("doctor", tmp_path / "none")
    assert missing.exit_code == 2
    assert re.match("Error: `path` must be a folder", missing.stderr)


def test_doctor_prints_a_table_with_the_commands_or_json(invoke, tmp_path):
    source = folders.zlab(tmp_path / "d")
    table = invoke("doctor", source).stdout
    assert '"num_speculative_tokens": 7' in table
    assert all(engine in table for engine in ENGINES)
    content = json.loads(invoke("doctor", source, "--json").stdout)
    assert content["format"] == "zlab"
    assert content["exit_code"] == 0
    assert content["engines"]["vllm"]["state"] == "loads"
    assert content["engines"].keys() == set(ENGINES)
