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

from accelerate.state import AcceleratorState, DistributedType, PartialState
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from hf_dflash.training_run import leave_processes
from threads_of_torch import refuse_threads_of_gloo
from training_pairs import generated_rows, training_drafter, training_target


def rows_for(target: Any) -> list[Any]:
    """Eleven rows of unequal lengths, one without an answer: no number of ranks divides them."""
    rows = generated_rows(target, 11, n_new=20)
    rows[3]["loss_mask"] = [0] * 24
    return [{name: column[: 24 - i] for name, column in row.items()} for i, row in enumerate(rows)]


def shard_on_cpus() -> None:
    """Have accelerate honour FSDP on CPUs.

    FSDP2 itself runs on CPUs, over gloo; but `AcceleratorState` takes it up for kinds of
    accelerators only, and otherwise drops it without a word (accelerate 1.15).
    """
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def trainer_for(folder: Path, rows_per_update: int, sharded: bool) -> DFlashTrainer:
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
        save_steps=10,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        fsdp=sharded,
        fsdp_config={"transformer_layer_cls_to_wrap": ["DFlashDecoderLayer"]} if sharded else None,
    )
    target = training_target()
    rows = rows_for(target)
    return DFlashTrainer(training_drafter(target), target, args, rows, rows[:5])


def train(folder: Path, rows_per_update: int, sharded: bool) -> None:
    """Train twenty steps, then the last ten again from the checkpoint before them."""
    trainer = trainer_for(folder, rows_per_update, sharded)
    trainer.train()
    is_sharded = all(isinstance(p, DTensor) for p in trainer.model.parameters())
    assert is_sharded == sharded, "FSDP was asked for and did nothing, or the other way round"
    write_result(trainer, folder)
    resumed = trainer_for(folder, rows_per_update, sharded)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-10"))
    write_result(resumed, folder / "resumed")


def write_result(trainer: DFlashTrainer, folder: Path) -> None:
    metrics = trainer.evaluate()
    state = trainer.accelerator.get_state_dict(trainer.model)
    trainer.save_model(str(folder / "exported"))
    if trainer.is_world_process_zero():
        save_file({k: v.contiguous() for k, v in state.items()}, folder / "weights.safetensors")
        log = {"metrics": metrics, "history": trainer.state.log_history}
        (folder / "log.json").write_text(json.dumps(log))


def main() -> None:
    folder, sharded = Path(sys.argv[1]), sys.argv[3] == "sharded"
    if sharded:
        shard_on_cpus()
    train(folder, int(sys.argv[2]), sharded)
    PartialState().wait_for_everyone()
    leave_processes()
    refuse_threads_of_gloo()


if __name__ == "__main__":
    main()
