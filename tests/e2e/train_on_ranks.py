"""Train a tiny pair on as many processes as torchrun starts; run by `test_training.py`.

Usage: train_on_ranks.py FOLDER ROWS_PER_UPDATE PARALLELISM
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["ACCELERATE_USE_CPU"] = "true"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from training_pairs import batch_of, generated_rows, step_of, training_drafter, training_target


def rows_for(target: Any) -> list[Any]:
    """Eleven rows of unequal lengths, one without an answer: no number of ranks divides them."""
    rows = generated_rows(target, 11, n_new=20)
    rows[3]["loss_mask"] = [0] * 24
    return [{name: column[: 24 - i] for name, column in row.items()} for i, row in enumerate(rows)]


def train(folder: Path, rows_per_update: int) -> DFlashTrainer:
    n_ranks = int(os.environ["WORLD_SIZE"])
    args = DFlashTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=rows_per_update // n_ranks,
        max_steps=20,
        n_anchors=6,
        learning_rate=1e-3,
        logits_chunk_size=16,
        save_strategy="steps",
        save_steps=20,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    target = training_target()
    rows = rows_for(target)
    trainer = DFlashTrainer(training_drafter(target), target, args, rows, rows[:5])
    trainer.train()
    return trainer


def train_sharded(folder: Path) -> None:
    """A loop of our own, as accelerate shards nothing on CPUs: two rows and one update a step."""
    torch.distributed.init_process_group("gloo")
    rank, n_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    target = training_target().requires_grad_(False)
    drafter = training_drafter(target).train()
    if n_ranks > 1:
        mesh = init_device_mesh("cpu", (n_ranks,))
        for layer in drafter.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(drafter, mesh=mesh)
        assert all(isinstance(p, DTensor) for p in drafter.parameters())
    step, rows = step_of(target, drafter), rows_for(target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
    for i in range(5):
        pair = [batch_of([rows[2 * i + k]]) for k in range(2)]
        total = sum(step.total_weight(batch["predicts"], 2.0) for batch in pair) / n_ranks
        for batch in pair[rank::n_ranks]:
            step.losses(drafter, batch, torch.as_tensor(total), 2.0, 16).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {
        name: p.full_tensor() if isinstance(p, DTensor) else p
        for name, p in drafter.state_dict().items()
    }
    if rank == 0:
        save_file(state, folder / "weights.safetensors")


def train_replicated(folder: Path, rows_per_update: int) -> None:
    trainer = train(folder, rows_per_update)
    metrics = trainer.evaluate()
    state = trainer.accelerator.get_state_dict(trainer.model)
    trainer.save_model(str(folder / "exported"))
    if trainer.is_world_process_zero():
        save_file({k: v.contiguous() for k, v in state.items()}, folder / "weights.safetensors")
        log = {"metrics": metrics, "history": trainer.state.log_history}
        (folder / "log.json").write_text(json.dumps(log))


def main() -> None:
    folder = Path(sys.argv[1])
    if sys.argv[3] == "sharded":
        train_sharded(folder)
    else:
        train_replicated(folder, int(sys.argv[2]))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    # All is written. Now and then a thread of torch's still runs when the interpreter shuts down,
    # and C++ then aborts the process ("terminate called without an active exception").
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
