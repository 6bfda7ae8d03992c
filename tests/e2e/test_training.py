"""Training from end to end: what it learns, and that the number of processes does not matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_dflash import DFlashDraftModel
from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from pairs import random_drafter
from training_pairs import BLOCK, DRAFTERS, generated_rows, training_drafter, training_target

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "dflare"])
def test_thirty_two_sequences_are_learned_by_heart(kind: str, tmp_path: Path) -> None:
    target = training_target()
    rows = generated_rows(target, 32, n_prompt=4, n_new=24)
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=16,
        max_steps=250,
        n_anchors=32,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    fresh = random_drafter(target, BLOCK, **DRAFTERS[kind])
    trainer = DFlashTrainer(fresh, target, args, rows, rows)
    trainer.train()
    expected = trainer.evaluate()["eval_acceptance_length"]
    trainer.save_model()
    drafter = DFlashDraftModel.from_pretrained(tmp_path)
    n_accepted = n_drafted = 0
    for row in rows:
        output = target.generate(
            torch.tensor([row["input_ids"][:4]]),
            max_new_tokens=24,
            do_sample=False,
            assistant_model=drafter,
            return_dict_in_generate=True,
        )
        assert output.sequences[0].tolist() == row["input_ids"]
        n_accepted += sum(output.statistics.n_accepted)
        n_drafted += sum(output.statistics.n_drafted)
    assert n_accepted >= 0.95 * n_drafted
    assert expected > 0.95 * 4


def run_ranks(folder: Path, n_ranks: int, parallelism: str = "replicated") -> None:
    """Train with ``n_ranks`` processes and four rows an update."""
    folder.mkdir()
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    script = str(TESTS / "e2e" / "train_on_ranks.py")
    command = [sys.executable, *launcher, script, str(folder), "4", parallelism]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "one"
    run_ranks(folder, 1)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["replicated", "sharded"])
def test_two_processes_train_what_one_does(
    parallelism: str, one_process: Path, tmp_path: Path
) -> None:
    """Eleven rows, so the last update of an epoch is incomplete and the last batch filled up.

    Sharded is Trainer's own FSDP2, by accelerate. Each run is also gone on with from the middle of
    an epoch, which changes nothing.
    """
    folder = tmp_path / "two"
    run_ranks(folder, 2, parallelism)
    expected, got = (json.loads((f / "log.json").read_text()) for f in (one_process, folder))
    one, two = (load_file(f / "weights.safetensors") for f in (one_process, folder))
    start = training_drafter(training_target()).state_dict()
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=1e-6, rtol=0)
        assert not torch.equal(weight, start[name])
    for ours, theirs in zip(expected["history"], got["history"], strict=True):
        for key in ours.keys() & {"loss", "grad_norm", "eval_loss", "eval_acceptance_length"}:
            assert float(theirs[key]) == pytest.approx(float(ours[key]), rel=1e-4)
    assert got["metrics"]["eval_n_blocks"] == expected["metrics"]["eval_n_blocks"]
    for run in (one_process, folder):
        whole, resumed = (load_file(f / "weights.safetensors") for f in (run, run / "resumed"))
        for name, weight in whole.items():
            torch.testing.assert_close(resumed[name], weight, atol=0, rtol=0)
    for written in (folder / "exported", folder / "checkpoint-20"):
        for name, weight in DFlashDraftModel.from_pretrained(written).state_dict().items():
            torch.testing.assert_close(weight, two[name], atol=0, rtol=0)
        assert (written / "modeling_dflash.py").is_file()
