"""Targets placed by `device_map`, layers on disk among them: training sees no difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_dflash.callbacks import DecodingCallback, prompts_of
from hf_dflash.taps_cache import CachedTaps, check_taps, write_taps
from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from hf_dflash.warm_start import init_from_target
from training_pairs import (
    batch_of,
    generated_rows,
    random_ids,
    row_of,
    step_of,
    training_drafter,
    training_target,
)

N_LAYERS = 4
PARTS = ["embed_tokens", "norm", "rotary_emb", *(f"layers.{i}" for i in range(N_LAYERS))]
EVERYTHING = {**{f"model.{part}": "cpu" for part in PARTS}, "lm_head": "cpu"}
MAPS: dict[str, Any] = {
    "one device": {"": "cpu"},
    "layers on disk": {**EVERYTHING, "model.layers.1": "disk", "model.layers.2": "disk"},
    "embeddings, head and a tapped layer on disk": {
        **EVERYTHING,
        "model.embed_tokens": "disk",
        "model.layers.0": "disk",
        "lm_head": "disk",
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    training_target().save_pretrained(folder)
    return folder


def placed_target(saved: Path, folder: Path, name: str) -> Any:
    target = AutoModelForCausalLM.from_pretrained(
        saved, device_map=MAPS[name], offload_folder=str(folder / "offloaded")
    )
    on_disk = [n for n, p in target.named_parameters() if p.device.type == "meta"]
    assert bool(on_disk) == (name != "one device")
    # transformers needs no hooks, and keeps no map, where all is on one device.
    assert getattr(target, "hf_device_map", MAPS[name]) == MAPS[name]
    return target


def states_and_gradients(target: Any) -> dict[str, Tensor]:
    """Taps, loss and the drafter's gradients of one batch of rows of two lengths."""
    drafter = training_drafter(training_target())
    batch = batch_of([row_of(random_ids(14, 1)), row_of(random_ids(9, 2))])
    step = step_of(target, drafter)
    losses = step.losses(drafter, batch, step.total_weight(batch["predicts"], 2.0), 2.0, 7)
    losses.loss.backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    return {"taps": step.target_states(batch).taps, "loss": losses.loss.detach(), **gradients}


@pytest.mark.parametrize("name", MAPS)
def test_taps_loss_and_gradients_are_those_of_a_target_in_memory(
    saved: Path, tmp_path: Path, name: str
) -> None:
    expected = states_and_gradients(AutoModelForCausalLM.from_pretrained(saved))
    got = states_and_gradients(placed_target(saved, tmp_path, name))
    assert len(got) > 20
    assert bool(got["fc.weight"].any())
    different = [key for key in expected if not torch.equal(got[key], expected[key])]
    assert different == []


def trained(target: Any, folder: Path) -> dict[str, Tensor]:
    args = DFlashTrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        learning_rate=0.01,
        per_device_train_batch_size=2,
        n_anchors=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = generated_rows(training_target(), 4, n_new=12)
    trainer = DFlashTrainer(training_drafter(training_target()), target, args, rows, rows[:2])
    trainer.train()
    metrics = trainer.evaluate()
    weights = {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}
    return {**weights, "eval_loss": torch.tensor(metrics["eval_loss"])}


@pytest.mark.parametrize("name", MAPS)
def test_training_ends_at_the_same_drafter(saved: Path, tmp_path: Path, name: str) -> None:
    expected = trained(AutoModelForCausalLM.from_pretrained(saved), tmp_path / "plain")
    target = placed_target(saved, tmp_path, name)
    on_disk = [n for n, p in target.named_parameters() if p.device.type == "meta"]
    got = trained(target, tmp_path / "placed")
    assert [key for key in expected if not torch.equal(got[key], expected[key])] == []
    now_on_disk = [n for n, p in target.named_parameters() if p.device.type == "meta"]
    assert now_on_disk == on_disk, "the trainer leaves it where it was"


@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")  # before 5.24
def test_it_decodes_in_training(saved: Path, tmp_path: Path) -> None:
    target = placed_target(saved, tmp_path, "embeddings, head and a tapped layer on disk")
    rows = generated_rows(training_target(), 2, n_new=8)
    args = DFlashTrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    trainer = DFlashTrainer(training_drafter(training_target()), target, args, rows, rows)
    trainer.add_callback(DecodingCallback(trainer, prompts_of(rows, 2), max_new_tokens=8))
    assert trainer.evaluate()["eval_decoding_mismatches"] == 0


def test_a_cache_of_its_taps_is_compared_with_it(saved: Path, tmp_path: Path) -> None:
    target = placed_target(saved, tmp_path, "embeddings, head and a tapped layer on disk")
    rows = generated_rows(training_target(), 2, n_new=8)
    drafter = training_drafter(training_target())
    write_taps(training_target(), drafter.config, rows, tmp_path / "taps", dtype="float32")
    check_taps(target, CachedTaps(rows, tmp_path / "taps", drafter.config))


def test_layers_on_disk_are_not_copied(saved: Path, tmp_path: Path) -> None:
    target = placed_target(saved, tmp_path, "layers on disk")
    drafter = training_drafter(training_target())
    with pytest.raises(NotImplementedError, match=r"layers \[2, 3\] of `target` must be in memory"):
        init_from_target(drafter, target, layer_ids=[2, 3])
    other = placed_target(saved, tmp_path, "embeddings, head and a tapped layer on disk")
    init_from_target(drafter, other, layer_ids=[2, 3], input_ids=torch.tensor([[3, 4, 5]]))
    expected = training_drafter(training_target())
    plain = training_target()
    init_from_target(expected, plain, layer_ids=[2, 3], input_ids=torch.tensor([[3, 4, 5]]))
    for key, parameter in expected.state_dict().items():
        assert torch.equal(drafter.state_dict()[key], parameter), key
