"""The installed command: on several processes, and on the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench_pairs import saved_models
from hf_dflash import cli
from hf_dflash.measurement import Measurement, read_measurement

BENCH = ("-m", "hf_dflash.cli", "bench")
# Named for GPUs, it starts processes on CPUs as well; port 0: any that is free.
LAUNCH = ("-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
DIES = str(Path(__file__).with_name("bench_and_die.py"))
RANKS = (*LAUNCH, "--multi_gpu", "--main_process_port", "0")


def run(command: list[str]) -> Any:
    variables = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    variables["ACCELERATE_USE_CPU"] = "true"
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=variables
    )


def same_work(measurement: Measurement) -> list[Any]:
    """All that does not depend on the clock."""
    return [(r.key, r.token_ids, r.n_accepted, r.identical) for r in measurement.runs]


@pytest.mark.slow
def test_two_processes_share_the_prompts_and_write_one_result(tmp_path: Path) -> None:
    pair = saved_models(tmp_path)
    data = tmp_path / "mine.jsonl"
    rows = [{"prompt": "Hello"}, {"turns": ["yes", "think"]}, {"prompt": "the answer"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [part for name, path in pair.items() for part in (f"--{name}", path)]
    options += ["--dataset", str(data), "--max-new-tokens", "12"]
    results = {}
    for name, launcher in (("one", BENCH), ("two", (*RANKS, *BENCH))):
        folder = tmp_path / name
        folder.mkdir()
        path = folder / "bench.json"
        made = run([*launcher, *options, "--json", str(path)])
        assert made.returncode == 0, made.stderr
        assert made.stdout.count("dflash B4") == 1, "one process shows the table"
        assert [p.name for p in folder.iterdir()] == ["bench.json"]
        results[name] = read_measurement(path)
    assert same_work(results["one"]) == same_work(results["two"])
    assert [results[name].provenance.n_processes for name in ("one", "two")] == [1, 2]
    drafted = results["two"].summary.overall[1]
    assert 1 < drafted.acceptance.micro < 4
    assert drafted.identity.n_identical == 4


@pytest.mark.slow
@pytest.mark.parametrize("n_measured", [(2, 0), (0, 1)])
def test_two_processes_that_were_killed_go_on(tmp_path: Path, n_measured: tuple[int, int]) -> None:
    """Each from its own journal, also where one had measured nothing yet."""
    pair = saved_models(tmp_path)
    data, log, folder = tmp_path / "mine.jsonl", tmp_path / "measured", tmp_path / "out"
    rows = [{"prompt": text} for text in ("Hello", "yes", "the answer", "1 + 1", "think")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.mkdir()
    options = [part for name, path in pair.items() for part in (f"--{name}", path)]
    options += ["--dataset", str(data), "--max-new-tokens", "12"]
    path = folder / "bench.json"
    bench = [str(log), "bench", *options, "--json", str(path)]
    killed = run([*TORCHRUN, DIES, ",".join(map(str, n_measured)), *bench])
    assert killed.returncode != 0
    journals = [folder / f"{path.name}.rank{rank}.jsonl" for rank in (0, 1)]
    kept = [journal.read_bytes() for journal in journals]
    assert [len(content.splitlines()) - 1 for content in kept] == list(n_measured)
    assert not path.exists()
    went_on = run([*TORCHRUN, DIES, "", *bench])
    assert went_on.returncode == 0, went_on.stderr
    assert sorted(log.read_text().split("\n")[:-1]) == ["0 0", "0 2", "0 4", "1 1", "1 3"]
    assert [p.name for p in folder.iterdir()] == ["bench.json"]
    whole = read_measurement(path)
    began = min(header["provenance"]["date"] for header in headers(kept, n_measured))
    assert (whole.provenance.date, whole.provenance.n_processes) == (began, 2)
    other = tmp_path / "bench.json"
    made = CliRunner().invoke(cli.app, ["bench", *options, "--json", str(other)])
    assert made.exit_code == 0, made.output
    assert same_work(whole) == same_work(read_measurement(other))
    assert whole.summary.overall[1].n_prompts == len(rows)
    assert 1 < whole.summary.overall[1].acceptance.micro < 4


def headers(journals: list[bytes], n_measured: tuple[int, int]) -> list[Any]:
    """First lines of the journals that hold a prompt."""
    return [json.loads(j.splitlines()[0]) for j, n in zip(journals, n_measured, strict=True) if n]


@pytest.mark.slow
def test_the_shipped_pair_on_held_out_prompts(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    options = ["--dataset", "held-out", "--n-prompts", "2", "--max-new-tokens", "32"]
    made = run([*BENCH, *options, "--json", str(path)])
    assert made.returncode == 0, made.stderr
    summary = read_measurement(path).summary
    assert [m.method for m in summary.overall] == [
        "plain",
        "dflash",
        "stock_dflash",
        "prompt_lookup",
    ]
    for method in summary.overall[1:]:
        assert method.identity.n_identical == method.identity.n_compared == 2
    assert summary.overall[1].acceptance.micro > 1.2
