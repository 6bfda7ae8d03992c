"""The installed command on the real model and the drafter of the repository."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dflash.smollm2 import target_folder
from pairs import random_drafter, tiny_target

DRAFTER = Path(__file__).parents[2] / "model_cards" / "smollm2-135m-instruct-dflash"


def hf_dflash(*args):
    command = [sys.executable, "-m", "hf_dflash.cli", *map(str, args)]
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_demo_in_float32_is_identical_and_needs_fewer_target_forwards(tmp_path):
    figures = tmp_path / "figures.json"
    result = hf_dflash("demo", "--dtype", "float32", "--max-new-tokens", 48, "--json", figures)
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    report = json.loads(figures.read_text())
    assert all(prompt["identical"] for prompt in report["prompts"])
    overall = report["overall"]
    assert overall["target_forwards"] < overall["n_tokens"] / 1.3
    assert 1.5 < overall["acceptance_length"] < 16, "some drafts accepted, some rejected"
    assert result.stdout.count("identical to plain decoding") == len(report["prompts"]) == 6


@pytest.mark.slow
def test_every_difference_in_bfloat16_is_shown_with_its_gap(tmp_path):
    figures, prompts = tmp_path / "figures.json", tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"Write a short story about {it}."}) for it in ("a fox", "snow")]
    prompts.write_text("\n".join(lines))
    options = ["--dtype", "bfloat16", "--prompts", prompts, "--json", figures]
    result = hf_dflash("demo", *options)
    assert result.returncode == 0, result.stderr
    report = json.loads(figures.read_text())
    assert report["dtype"] == "bfloat16"
    assert 0 < report["overall"]["speedup_vs_best_plain"] <= report["overall"]["speedup"]
    for prompt in report["prompts"]:
        assert prompt["identical"] == (prompt["difference"] is None)
        if not prompt["identical"]:
            gap = prompt["difference"]["top2_gap"]
            assert f"differ by {gap:.4f}" in " ".join(result.stdout.split())
            # Two kernel shapes were seen to round a logit up to 0.9 apart in bfloat16.
            assert 0 <= gap < 1


@pytest.mark.slow
def test_generate_takes_any_pair_and_auto_times_both_dtypes(tmp_path):
    figures = tmp_path / "figures.json"
    pair = ["--target", target_folder(), "--drafter", DRAFTER]
    options = ["--prompt", "List the even numbers from 2 to 20.", "--max-new-tokens", 24]
    result = hf_dflash("generate", *pair, *options, "--json", figures)
    assert result.returncode == 0, result.stderr
    report = json.loads(figures.read_text())
    assert {timing["dtype"] for timing in report["timings"]} == {"float32", "bfloat16"}
    assert 0 < report["overall"]["speedup_vs_best_plain"] <= report["overall"]["speedup"]


@pytest.mark.slow
def test_a_drafter_of_another_target_is_one_line(tmp_path):
    random_drafter(tiny_target()).save_pretrained(tmp_path)
    pair = ["--target", target_folder(), "--drafter", tmp_path]
    result = hf_dflash("generate", *pair, "--prompt", "p", "--dtype", "float32")
    assert result.returncode == 2
    assert result.stderr.startswith("Error: The drafter was made for another target: its ")
    assert result.stderr.count("\n") == 1


def test_a_folder_without_a_drafter_is_one_line(tmp_path):
    pair = ["--target", tmp_path, "--drafter", tmp_path]
    result = hf_dflash("generate", *pair, "--prompt", "p")
    assert result.returncode == 2
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
