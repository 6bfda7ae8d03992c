"""`hf-dflash train` under torchrun and accelerate, with the configs of examples/accelerate."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from hf_dflash import DFlashDraftModel, cli
from saved_pairs import save_chats, save_target

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "accelerate"
CLI = ["-m", "hf_dflash.cli"]
OPTIONS = [
    "--num_draft_layers=2",
    "--num_taps=2",
    "--block_size=4",
    "--n_anchors=8",
    "--max_steps=4",
    "--save_steps=2",
    "--per_device_train_batch_size=1",
    "--logging_steps=1",
    "--disable_tqdm=true",
    "--use_cpu=true",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, rows, and what one process makes of them with two rows an update."""
    folder = tmp_path_factory.mktemp("place")
    save_target(folder / "target")
    save_chats(folder / "chats.jsonl", 5)  # no number of processes divides them
    target = ["--target", str(folder / "target")]
    files = [str(folder / "chats.jsonl"), str(folder / "rows.jsonl")]
    assert CliRunner().invoke(cli.app, ["prepare", *files, *target]).exit_code == 0
    one = [*words(folder, "one"), "--gradient_accumulation_steps=2"]
    result = CliRunner().invoke(cli.app, ["train", *one])
    assert result.exit_code == 0, result.output
    return folder


def words(place: Path, out: str) -> list[str]:
    data = ["--target", str(place / "target"), "--data", str(place / "rows.jsonl")]
    return [*data, "--output_dir", str(place / out), *OPTIONS]


def launch(*command: str) -> subprocess.Popen[str]:
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def accelerate(config: str, *options: str) -> list[str]:
    launcher = "accelerate.commands.accelerate_cli"
    file = str(CONFIGS / config)
    return [launcher, "launch", "--config_file", file, "--num_processes", "2", *options]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def assert_trained_alike(place: Path, out: str, runs: Sequence[subprocess.Popen[str]]) -> None:
    outputs = [run.communicate(timeout=300)[0] for run in runs]
    # A thread of torch's that still runs when the interpreter shuts down aborts the process now
    # and then, after everything is written; so the result is looked at, not the exit code.
    assert any(f"The drafter is in {place / out}." in output for output in outputs), outputs
    one, two = (load_file(place / name / "model.safetensors") for name in ("one", out))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=1e-6, rtol=0)
    for checkpoint in ("checkpoint-2", "checkpoint-4"):
        DFlashDraftModel.from_pretrained(place / out / checkpoint)
    assert not (place / out / "_part").exists()


def test_torchrun(place: Path) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert_trained_alike(place, "run", [launch(*launcher, *CLI, "train", *words(place, "run"))])


def test_accelerate_on_one_node(place: Path) -> None:
    run = launch(*accelerate("ddp.yaml"), *CLI, "train", *words(place, "ddp"))
    assert_trained_alike(place, "ddp", [run])


def test_accelerate_on_two_nodes(place: Path) -> None:
    """Two launchers, as on two machines that share a file system."""
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    runs = [
        launch(
            *accelerate("nodes.yaml", "--machine_rank", rank, *address),
            *CLI,
            "train",
            *words(place, "nodes"),
        )
        for rank in ("0", "1")
    ]
    assert_trained_alike(place, "nodes", runs)


@pytest.mark.parametrize("shards_target", [False, True])
def test_accelerate_with_fsdp2(place: Path, shards_target: bool) -> None:
    """Drafter sharded by accelerate, target whole or sharded."""
    out = f"fsdp-{shards_target}"
    script = str(ROOT / "tests" / "e2e" / "shards_on_cpus.py")
    options = [*words(place, out), f"--shard_target={shards_target}"]
    run = launch(*accelerate("fsdp2.yaml"), script, "train", *options)
    assert_trained_alike(place, out, [run])
