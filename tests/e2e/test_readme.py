"""The README does what it says: its commands are CI's, its Python runs, its lines are few."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_two_commands_do_all_the_set_up():
    demo, tests = (block.strip() for block in blocks("bash"))
    for command, extra in ((demo, "demo"), (tests, "test")):
        set_up = (
            f'python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ".[{extra}]" && '
        )
        assert command.startswith(set_up)
        assert "\n" not in command
    assert demo.endswith(".venv/bin/hf-dflash demo")


def test_ci_runs_the_very_test_command():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    extraction = re.search(r"grep --extended-regexp '(.*)' README.md", script)
    assert extraction, ".ci/run takes the command out of the README"
    found = [line for line in README.splitlines() if re.search(extraction[1], line)]
    assert found == [blocks("bash")[1].strip()]


def test_constraints_pin_every_version():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[^=*+]+", pin) for pin in pins)
    assert "torch==2.13.0" in pins


@pytest.mark.slow
def test_the_python_blocks_run_one_after_the_other(tmp_path):
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    program = "\n".join(blocks("python")) + (
        "\nassert statistics.target_forwards < 64 and 0 < max(statistics.n_accepted)"
        "\nassert output.shape[1] == inputs['input_ids'].shape[1] + 64"
        "\nplain = target.generate(**inputs, max_new_tokens=64)"
        "\nassert output.equal(plain)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert result.returncode == 0, result.stderr
    assert "The list of even numbers" in result.stdout
    assert (tmp_path / "my-drafter" / "model.safetensors").is_file()
