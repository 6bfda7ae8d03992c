"""Every example runs and shows what it is there to show."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name):
    result = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_decode():
    shown = run("decode.py")
    assert "10. 10" in shown
    assert float(re.search(r"acceptance length (\S+)", shown)[1]) > 2
    assert int(re.search(r"target forwards +(\d+)", shown)[1]) < 48


@pytest.mark.slow
def test_stream():
    shown = run("stream.py")
    assert re.search("\033\\[32m[^\033]", shown), "no accepted draft was shown"
    assert "2, 4, 6, 8" in re.sub("\033\\[[0-9]*m", "", shown)
