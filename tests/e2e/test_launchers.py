"""`hf-dflash train` under torchrun and accelerate, with the configs of examples/accelerate."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
LIMIT_S = 300.0
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


@dataclass(frozen=True)
class Launched:
    """A launcher that was started, and the file that it and its workers write to."""

    process: subprocess.Popen[bytes]
    log: Path

    def end(self) -> None:
        """End it, if it is still there; told to end, a launcher ends its workers."""
        self.process.terminate()
        try:
            self.process.wait(timeout=60)  # it gives them 30 s
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def launched(place: Path, *commands: Sequence[str]) -> Iterator[list[Launched]]:
    """Start launchers; whatever happens, none of their processes is there afterwards."""
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    runs: list[Launched] = []
    try:
        for i, command in enumerate(commands):
            path = place / f"launcher-{i}.log"
            with path.open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", *command],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            runs.append(Launched(process, path))
        yield runs
    finally:
        for run in runs:
            run.end()


def outputs_of(runs: Sequence[Launched]) -> str:
    """Wait for launchers and return what all of them wrote; one that fails or hangs is shown."""
    problem = ""
    end = time.monotonic() + LIMIT_S
    for i, run in enumerate(runs):
        try:
            code = run.process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            problem += f"Launcher {i} is still there after {LIMIT_S} s. "
        else:
            problem += f"Launcher {i} ended with {code}. " if code else ""
    texts = [run.log.read_text(errors="replace") for run in runs]
    if problem:
        shown = "\n".join(f"== launcher {i}\n{text[-5000:]}" for i, text in enumerate(texts))
        pytest.fail(f"{problem}\n{shown}")
    return "\n".join(texts)


def accelerate(config: str, *options: str) -> list[str]:
    launcher = "accelerate.commands.accelerate_cli"
    file = str(CONFIGS / config)
    return [launcher, "launch", "--config_file", file, "--num_processes", "2", *options]


def free_port() -> str:
    """A port below those that systems hand out: nobody gets it between here and its use."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("no port is free")


def assert_trained_alike(place: Path, out: str, *commands: Sequence[str]) -> None:
    with launched(place, *commands) as runs:
        output = outputs_of(runs)
    assert f"The drafter is in {place / out}." in output, output
    one, two = (load_file(place / name / "model.safetensors") for name in ("one", out))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=1e-6, rtol=0)
    for checkpoint in ("checkpoint-2", "checkpoint-4"):
        DFlashDraftModel.from_pretrained(place / out / checkpoint)
    assert not (place / out / "_part").exists()


def test_torchrun(place: Path) -> None:
    """No thread of the group is left: with one, a process aborts now and then after its run."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(ROOT / "tests" / "e2e" / "train_and_leave.py")
    assert_trained_alike(place, "run", [*launcher, script, "train", *words(place, "run")])


def test_accelerate_on_one_node(place: Path) -> None:
    command = [*accelerate("ddp.yaml"), *CLI, "train", *words(place, "ddp")]
    assert_trained_alike(place, "ddp", command)


def test_accelerate_on_two_nodes(place: Path) -> None:
    """Two launchers, as on two machines that share a file system."""
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    run = [*CLI, "train", *words(place, "nodes")]
    nodes = (accelerate("nodes.yaml", "--machine_rank", rank, *address) for rank in ("0", "1"))
    assert_trained_alike(place, "nodes", *([*node, *run] for node in nodes))


def test_a_launcher_that_hangs_is_shown_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LIMIT_S", 0.5)
    hangs = ["timeit", "-n", "1", "-r", "1", "-s", "import time", "time.sleep(600)"]
    with launched(tmp_path, hangs, ["platform"]) as runs:
        runs[1].process.wait()
        with pytest.raises(pytest.fail.Exception, match=r"(?s)Launcher 0 is still.*Linux"):
            outputs_of(runs)
    assert runs[0].process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("shards_target", [False, True])
def test_accelerate_with_fsdp2(place: Path, shards_target: bool) -> None:
    """Drafter sharded by accelerate, target whole or sharded."""
    out = f"fsdp-{shards_target}"
    script = str(ROOT / "tests" / "e2e" / "shards_on_cpus.py")
    options = [*words(place, out), f"--shard_target={shards_target}"]
    assert_trained_alike(place, out, [*accelerate("fsdp2.yaml"), script, "train", *options])
