"""What a run refuses before its first step, and in the middle of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from hf_dflash.training_checks import collator_for, numbered
from training_pairs import random_ids, row_of, training_drafter, training_target

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


@pytest.fixture
def rows() -> list[Any]:
    return [row_of(random_ids(20, seed)) for seed in range(6)]


def trainer_of(target: Any, rows: Any, folder: Path, **options: Any) -> DFlashTrainer:
    defaults = {"max_steps": 3, "n_anchors": 6, "save_strategy": "no", "logging_steps": 1}
    args = DFlashTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=1,
        **{**defaults, **options},
    )
    return DFlashTrainer(training_drafter(target), target, args, rows)


# ---- losses and weights that are not finite ----


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_states_that_are_not_finite_end_the_run_before_an_update(
    rows: Any, tmp_path: Path, value: float
) -> None:
    """Only token 94 has them: the first of the two batches of the second update."""
    target = training_target()
    target.model.embed_tokens.weight.data[94] = value
    rows[2]["input_ids"][1] = 94
    options = {"gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"}
    trainer = trainer_of(target, rows, tmp_path, **options)
    message = r"hidden states of `target` \(torch.float32\) must be finite, but are not at step 1"
    with pytest.raises(FloatingPointError, match=message):
        trainer.train()
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


def test_a_loss_that_is_not_finite_is_the_drafters_where_the_states_are(
    rows: Any, tmp_path: Path
) -> None:
    trainer = trainer_of(training_target(), rows, tmp_path)
    trainer.model.norm.weight.data[0] = float("nan")
    message = r"The drafter's loss must be finite, but is not at step 0.*Lower `learning_rate`"
    with pytest.raises(FloatingPointError, match=message):
        trainer.train()
    message = "weights must be finite to be exported in their own dtype, but norm.weight and 0 more"
    with pytest.raises(ValueError, match=message):
        trainer.save_model()
    assert not (tmp_path / "model.safetensors").exists()


def test_an_export_that_overflows_is_refused(rows: Any, tmp_path: Path) -> None:
    trainer = trainer_of(training_target(), rows, tmp_path, export_dtype="float16")
    trainer.model.norm.weight.data[0] = 1e6
    with pytest.raises(ValueError, match="must be finite to be exported in float16, but norm"):
        trainer.save_model()


def test_a_loss_is_logged_as_it_is(tmp_path: Path) -> None:
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert not args.logging_nan_inf_filter


# ---- texts beyond the positions that are known ----

TOO_LONG = "`input_ids` must be texts of at most 16 tokens, .* got one of 20.*--max-length 16"


@pytest.mark.parametrize("limited", ["target", "drafter"])
def test_rows_beyond_the_known_positions_are_refused(
    rows: Any, tmp_path: Path, limited: str
) -> None:
    target = training_target()
    drafter = training_drafter(target)
    model = target if limited == "target" else drafter
    model.config.max_position_embeddings = 16
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    short = [row_of(random_ids(16, seed)) for seed in range(3)]
    for data in ((rows, None), (short, rows), (short, {"part": [*short, rows[0]]})):
        with pytest.raises(ValueError, match=TOO_LONG):
            DFlashTrainer(drafter, target, args, *data)
    trainer = DFlashTrainer(drafter, target, args, short)
    with pytest.raises(ValueError, match=TOO_LONG):  # also a row that nobody has looked at before
        trainer.data_collator([{**rows[0], "example_id": 0, "epoch": 0}])


def test_what_counts_is_a_text_and_not_the_row_and_where_rotations_reach(rows: Any) -> None:
    target = training_target()
    target.config.max_position_embeddings = 16
    config = training_drafter(target).config
    args = SimpleNamespace(n_anchors=4, seed=0, random_anchors=True, pad_to_multiple_of=None)
    packed = {**rows[0], "document_ids": [1] * 12 + [2] * 8}
    padded = {**rows[0], "attention_mask": [1] * 16 + [0] * 4}
    checked = numbered([packed, padded], "train_dataset", collator_for(config, args, target))
    assert len(checked) == 2
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    target.config.rope_parameters = {**target.config.rope_parameters, **yarn}
    assert collator_for(config, args, target).max_positions == 64
    target.config.max_position_embeddings = -1  # no limit
    assert collator_for(config, args, target).max_positions == config.max_position_embeddings
