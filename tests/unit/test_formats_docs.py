"""docs/formats.md and docs/serving.md do what they say, in their order."""

import re
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
from pairs import drafter_config, random_drafter, tiny_target

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page, language):
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def commands(page):
    """Those that need no GPU."""
    own = [block for block in blocks(page, "bash") if "# needs a GPU" not in block]
    return [line.partition("  #")[0] for block in own for line in block.splitlines()]


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
    lines = commands("formats.md")
    assert len(lines) == 10
    for line in lines:
        program, *arguments = shlex.split(line)
        result = CliRunner().invoke(cli.app, arguments)
        assert (program, result.exit_code) == ("hf-dflash", 0), f"{line}: {result.output}"
    assert folders.same_tensors(folder / "my-drafter", folder / "back")
    assert folders.config_of(folder / "my-drafter") == folders.config_of(folder / "back")
    names = {"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}
    exec("\n".join(blocks("formats.md", "python")), names)


@pytest.mark.usefixtures("folder")
def test_the_commands_of_the_serving_page_run_or_are_marked():
    for line in commands("serving.md"):
        result = CliRunner().invoke(cli.app, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}: {result.output}"
    servers = [block for block in blocks("serving.md", "bash") if "# needs a GPU" in block]
    assert len(servers) == 2


def test_the_serving_page_counts_as_the_commands_do():
    config = drafter_config(tiny_target(), block_size=16)
    vllm, sglang = (block for block in blocks("serving.md", "bash") if "# needs a GPU" in block)
    for block, command in ((vllm, vllm_command), (sglang, sglang_command)):
        ours = command(config, "Qwen/Qwen3-8B", "me/my-drafter")
        assert set(shlex.split(ours)) <= set(shlex.split(block.replace("# needs a GPU", "")))


def test_the_formats_page_names_every_format_and_engine():
    text = (DOCS / "formats.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in FORMATS)
    spoken = {"vllm": "vLLM", "sglang": "SGLang", "hf-dflash": "this package"}
    assert all(spoken.get(engine, engine) in text for engine in ENGINES)
