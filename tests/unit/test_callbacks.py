from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_dflash.callbacks import DecodingCallback, prompts_of
from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from hf_dflash.training_checks import check_device
from pairs import ScriptedDrafter
from training_pairs import generated_rows, row_of, training_drafter, training_target


@pytest.fixture(scope="module")
def target() -> Any:
    return training_target()


def trainer_of(target: Any, rows: Any, folder: Path, drafter: Any, **options: Any) -> DFlashTrainer:
    args = DFlashTrainingArguments(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        n_anchors=4,
        **{"save_strategy": "no", **options},
    )
    return DFlashTrainer(drafter, target, args, rows, rows)


def test_prompts_are_read_until_there_are_enough() -> None:
    class Rows(list[Any]):
        n_read = 0

        def __getitem__(self, index: Any) -> Any:
            self.n_read += 1
            return super().__getitem__(index)

    # A text that is supervised from its first token on has no prompt.
    rows = Rows([row_of([4, 5], 0), row_of([5, 6, 7], 2), row_of([7], 1), row_of([8, 9], 1)])
    assert prompts_of(rows, 2) == [[5, 6], [8]]
    assert prompts_of(rows, 9) == [[5, 6], [8]]
    rows.n_read = 0
    assert prompts_of(rows, 1) == [[5, 6]]
    assert rows.n_read == 2


def test_real_decoding_is_measured_and_logged(target: Any, tmp_path: Path) -> None:
    rows = generated_rows(target, 1, n_prompt=4, n_new=25)
    drafter = ScriptedDrafter(target, rows[0]["input_ids"], lambda _: 2, block_size=4)
    trainer = trainer_of(target, rows, tmp_path, drafter)
    logged: list[dict[str, float]] = []

    class Recording(TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            logged.append(logs)

    trainer.add_callback(Recording())
    callback = DecodingCallback(trainer, prompts_of(rows, 3), max_new_tokens=25)
    trainer.add_callback(callback)
    drafter.train()
    metrics = trainer.evaluate()
    # 24 tokens behind the first, three a cycle: two drafts and the bonus.
    assert metrics["eval_decoding_acceptance_length"] == pytest.approx(3.0, abs=0.15)
    assert 0.6 < metrics["eval_decoding_accepted"] < 0.75
    assert metrics["eval_decoding_speedup"] > 0
    assert metrics["eval_decoding_mismatches"] == 0
    assert any("eval_decoding_acceptance_length" in logs for logs in logged)


def test_the_best_checkpoint_is_chosen_by_decoding(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three: neither the first nor the last, nor that of the least loss."""
    trainer = trainer_of(
        target,
        generated_rows(target, 4, n_new=12),
        tmp_path,
        training_drafter(target),
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="decoding_acceptance_length",
        greater_is_better=True,
    )
    callback = DecodingCallback(trainer, [[3, 4, 5]], max_new_tokens=4)
    trainer.add_callback(callback)
    figures = [1.5, 3.0, 2.0]
    weights: list[dict[str, torch.Tensor]] = []  # that each figure was measured with

    def measure() -> dict[str, float]:
        state = trainer.model.state_dict().items()
        weights.append({name: tensor.clone() for name, tensor in state})
        return {"eval_decoding_acceptance_length": figures[len(weights) - 1]}

    monkeypatch.setattr(callback, "measure", measure)
    trainer.train()
    history = trainer.state.log_history
    name = "eval_decoding_acceptance_length"
    assert [(logs["step"], logs[name]) for logs in history if name in logs] == [
        *enumerate(figures, start=1)
    ]
    losses = [logs["eval_loss"] for logs in history if "eval_loss" in logs]
    assert losses.index(min(losses)) != 1
    assert trainer.state.best_metric == 3.0
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    final = trainer.model.state_dict()
    same = [all(torch.equal(final[name], kept[name]) for name in final) for kept in weights]
    assert same == [False, True, False]


def test_slices_are_decoded_once_an_evaluation(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every evaluation has the figures, though it be the second at a step, of whatever name."""
    rows = generated_rows(target, 2, n_new=12)
    trainer = trainer_of(target, rows, tmp_path, training_drafter(target))
    callback = DecodingCallback(trainer, [[3, 4, 5]], max_new_tokens=4)
    trainer.add_callback(callback)
    calls: list[int] = []

    def measure() -> dict[str, float]:
        calls.append(1)
        return {"eval_decoding_x": float(len(calls))}

    monkeypatch.setattr(callback, "measure", measure)
    slices = {"a": rows[:1], "b": rows[1:]}
    evaluations: list[dict[str, Any]] = [
        {"eval_dataset": slices},
        {"eval_dataset": slices},
        {"eval_dataset": rows},
        {},
        {"eval_dataset": rows, "metric_key_prefix": "test"},
    ]
    for n, options in enumerate(evaluations, start=1):
        assert trainer.evaluate(**options)["eval_decoding_x"] == n
        assert len(calls) == n


def test_an_evaluation_behind_one_that_failed_is_decoded(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = generated_rows(target, 2, n_new=12)
    trainer = trainer_of(target, rows, tmp_path, training_drafter(target))
    callback = DecodingCallback(trainer, [[3, 4, 5]], max_new_tokens=4)
    trainer.add_callback(callback)
    monkeypatch.setattr(callback, "measure", lambda: {"eval_decoding_x": 1.0})
    with pytest.raises(ValueError, match="must have `loss_mask`"):
        trainer.evaluate({"a": rows[:1], "b": [{"input_ids": [1, 2, 3]}]})
    assert trainer.evaluate()["eval_decoding_x"] == 1.0


def test_prompts_end_before_the_first_answer() -> None:
    rows = [row_of([5, 6, 7, 8], 2), row_of([5, 6], 2), row_of([5, 6], 0), row_of([9, 6], 1)]
    assert prompts_of(rows, 5) == [[5, 6], [9]]


def test_no_prompts_are_refused(target: Any, tmp_path: Path) -> None:
    trainer = trainer_of(target, [row_of([1, 2, 3, 4], 1)], tmp_path, training_drafter(target))
    with pytest.raises(ValueError, match="`prompts` must hold at least one prompt, got none"):
        DecodingCallback(trainer, [])
    trainer.is_fsdp_enabled = True
    with pytest.raises(NotImplementedError, match="cannot decode with a sharded drafter"):
        DecodingCallback(trainer, [[1]])
    arguments = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, ema_decay=0.9)
    with pytest.raises(NotImplementedError, match="`ema_decay` is not supported with FSDP"):
        check_device(trainer.model.config, arguments, shards=True)


def test_outputs_of_one_token_have_no_cycle_and_no_figure_but_plain_ones(
    target: Any, tmp_path: Path
) -> None:
    rows = generated_rows(target, 1, n_new=12)
    trainer = trainer_of(target, rows, tmp_path, training_drafter(target))
    metrics = DecodingCallback(trainer, [[3, 4, 5]], max_new_tokens=1).measure()
    assert metrics["eval_decoding_acceptance_length"] == 1.0
    assert metrics["eval_decoding_accepted"] == 0.0


def test_sampled_drafts_are_measured_too(target: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = generated_rows(target, 1, n_new=12)
    trainer = trainer_of(target, rows, tmp_path, training_drafter(target))
    callback = DecodingCallback(trainer, [[3, 4, 5]], max_new_tokens=6, do_sample=True)
    trainer.model.train()
    assert callback.measure()["eval_decoding_acceptance_length"] >= 1.0
    assert trainer.model.training  # as it was
