"""Flags and YAML of `hf-dflash train`: one definition, and nothing is passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_dflash.run_arguments import NEW_DRAFTER, RunArguments, parse_run

NEEDED = ["--target", "t", "--data", "d", "--output_dir", "out", "--use_cpu=true"]
YAML = """
target: t
data: d
output_dir: out
use_cpu: true
learning_rate: 1e-4  # a text for YAML
max_steps: -1
block_size: 8
target_layer_ids: [1, 2]
drafter_config: {layer_types: [full_attention]}
lr_scheduler_kwargs: {min_lr: 0.1}
eval_data: null
report_to: none
"""


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    return path


def test_a_file_and_flags_are_read_alike(yaml_file: Path) -> None:
    config = '{"layer_types": ["full_attention"]}'
    flags = ["--learning-rate", "1e-4", "--max_steps", "-1", "--block_size=8", "--target_layer_ids"]
    flags += ["1", "2", "--drafter_config", config, "--lr_scheduler_kwargs", '{"min_lr": 0.1}']
    (one, its_args), (other, other_args) = parse_run([str(yaml_file)]), parse_run(NEEDED + flags)
    assert one == other
    assert its_args.to_dict() == other_args.to_dict()
    assert (its_args.learning_rate, its_args.lr_scheduler_kwargs) == (1e-4, {"min_lr": 0.1})
    assert one.new_drafter_options() == {
        "block_size": 8,
        "target_layer_ids": [1, 2],
        "layer_types": ["full_attention"],
    }


def test_flags_win_over_the_file(yaml_file: Path) -> None:
    run, args = parse_run([str(yaml_file), "--block_size", "4", "--max_steps=9", "--bf16=false"])
    assert (run.block_size, args.max_steps, args.bf16) == (4, 9, False)
    assert args.learning_rate == 1e-4


def test_the_papers_defaults_hold() -> None:
    run, args = parse_run(NEEDED)
    assert (args.learning_rate, args.warmup_steps, args.n_anchors) == (6e-4, 0.04, 512)
    assert run.new_drafter_options() == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "learning_rates: 1",
            r"run.yaml holds what is no argument of a run: `learning_rates` \(me",
        ),
        ("model: {lr: 1}", r"no argument of a run: `model`"),
        ("max_steps: soon", r"argument --max_steps/--max-steps: invalid int value: 'soon'"),
        ("max_steps: [1, 2]", r"argument --max_steps/--max-steps: invalid int value"),
        ("bf16: maybe", r"Truthy value expected: got maybe"),
        ("architecture: eagle", r"argument --architecture: invalid choice: 'eagle'"),
        ("- target", r"run.yaml must hold names and values, `name: value`, got \['target'\]"),
        ("{", "run.yaml is not YAML: while parsing"),
        (
            "data: d",
            r"the following arguments are required: --target \(see `hf-dflash train --help",
        ),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises((ValueError, TypeError), match=message):
        parse_run([str(tmp_path / "run.yaml")])


@pytest.mark.parametrize("flag", ["--learning_rat=1", "--lear=1", "rows.jsonl"])
def test_a_flag_that_is_none_is_refused(flag: str) -> None:
    name = flag.lstrip("-").split("=")[0]
    with pytest.raises(ValueError, match=f"The command line holds what is no argument .*`{name}`"):
        parse_run([*NEEDED, flag])


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        parse_run([str(tmp_path / "run.yaml")])


def test_a_config_must_be_a_mapping() -> None:
    run = RunArguments("t", "d", drafter_config="[1]")
    with pytest.raises(ValueError, match="drafter_config must hold names and values"):
        run.new_drafter_options()


@pytest.mark.parametrize("name", [*sorted({*NEW_DRAFTER} - {"block_size"}), "init_from_target"])
def test_a_trained_drafter_has_its_options_already(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is for a new drafter, but `drafter` names"):
        RunArguments("t", "d", drafter="x", **{name: True})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": 4}, "`lora_rank` must be at least 1 and needs `drafter`, .* 4 and None"),
        ({"lora_rank": 0, "drafter": "x"}, "`lora_rank` must be at least 1"),
        ({"lora_alpha": 4}, "are of no account without `lora_rank`"),
        ({"lora_merge": False}, "are of no account without `lora_rank`"),
        (
            {"drafter": "x", "lora_rank": 4, "lora_merge": False, "block_size": 8},
            "`block_size` is kept by a whole drafter only, but `lora_merge` is false, got 8",
        ),
        ({"decoding_prompts": 4}, "`decoding_prompts` are the first of each `eval_data`"),
        ({"decoding_prompts": -1, "eval_data": ["e"]}, "of at least 0, got -1"),
        ({"decoding_max_new_tokens": 0}, "`decoding_max_new_tokens` must be at least 1, got 0"),
        ({"shard_target": True, "target_device_map": "auto"}, "both place the target"),
        (
            {"shard_target": True, "decoding_prompts": 1, "eval_data": ["e"]},
            "`decoding_prompts` are decoded by one process, but with `shard_target`",
        ),
    ],
)
def test_options_that_would_be_ignored_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunArguments("t", "d", **options)
