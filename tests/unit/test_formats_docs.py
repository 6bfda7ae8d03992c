"""docs/formats.md and docs/serving.md do what they say, in their order."""

import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import published_folders as folders
from hf_dflash import cli
from hf_dflash.doctor_facts import ENGINES
from hf_dflash.serving import sglang_command, vllm_command
from hf_dflash.wire_formats import FORMATS
from pages import blocks, commands, text_of, to_run
from pairs import drafter_config, random_drafter, tiny_target


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = tiny_target()
    target.save_pretrained("my-target")
    drafter = random_drafter(target, num_target_layers=4)
    drafter.to(torch.bfloat16).save_pretrained("my-drafter")
    Path("ids.json").write_text("[1, 2, 40]")
    return tmp_path


def test_the_commands_and_the_python_of_the_formats_page_run(folder):
    lines = to_run("formats.md")
    assert len(lines) == 10
    for program, *arguments in lines:
        result = CliRunner().invoke(cli.app, arguments)
        assert (program, result.exit_code) == ("hf-dflash", 0), f"{arguments}: {result.output}"
    assert folders.same_tensors(folder / "my-drafter", folder / "back")
    assert folders.config_of(folder / "my-drafter") == folders.config_of(folder / "back")
    names = {"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}
    exec("\n".join(blocks("formats.md", "python")), names)


@pytest.mark.usefixtures("folder")
def test_the_commands_of_the_serving_page_run_or_are_marked():
    lines = to_run("serving.md")
    assert len(lines) == 1
    for program, *arguments in lines:
        result = CliRunner().invoke(cli.app, arguments)
        assert (program, result.exit_code) == ("hf-dflash", 0), f"{arguments}: {result.output}"


def test_the_serving_page_counts_as_the_commands_do():
    config = drafter_config(tiny_target(), block_size=16)
    vllm, sglang = (c for c in commands("serving.md") if c.in_block and c.mark == "needs a GPU")
    for shown, command in ((vllm, vllm_command), (sglang, sglang_command)):
        ours = command(config, "Qwen/Qwen3-8B", "me/my-drafter").replace("\\\n", "")
        assert set(shlex.split(ours)) <= set(shown.words)


def test_the_formats_page_names_every_format_and_engine():
    text = text_of("formats.md")
    assert all(f"`{name}`" in text for name in FORMATS)
    spoken = {"vllm": "vLLM", "sglang": "SGLang", "hf-dflash": "this package"}
    assert all(spoken.get(engine, engine) in text for engine in ENGINES)
