from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback

from hf_dflash import DFlashDraftModel, planner
from hf_dflash import trainer as trainer_module
from hf_dflash.checkpointing import check_complete
from hf_dflash.losses import decay_weights
from hf_dflash.model_card import check_card
from hf_dflash.resuming import SETTINGS_NAME, target_digest
from hf_dflash.target_states import run_target
from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from hf_dflash.training_checks import check_device
from training_pairs import generated_rows, row_of, training_drafter, training_target

# Trainer's loops warn of what a test does on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

_FIELDS = {field.name for field in dataclasses.fields(DFlashTrainingArguments)}
#: Renamed in transformers 5.24.
CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in _FIELDS
    else "gradient_checkpointing"
)


@pytest.fixture(scope="module")
def target() -> Any:
    return training_target()


@pytest.fixture(scope="module")
def rows(target: Any) -> list[Any]:
    """Rows of unequal lengths, so that batches are padded."""
    whole = generated_rows(target, 10, n_new=20)
    return [{name: column[: 24 - i] for name, column in row.items()} for i, row in enumerate(whole)]


def arguments(folder: Path, **options: Any) -> DFlashTrainingArguments:
    defaults = {
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "n_anchors": 6,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return DFlashTrainingArguments(output_dir=str(folder), **{**defaults, **options})


def trainer_of(
    target: Any,
    rows: Any,
    folder: Path,
    *,
    kind: str = "dflash",
    trainer: Any = None,
    **options: Any,
) -> DFlashTrainer:
    drafter = options.pop("drafter", None) or training_drafter(target, kind)
    evaluation = options.pop("eval_dataset", None)
    callbacks = options.pop("callbacks", None)
    return (trainer or DFlashTrainer)(
        drafter, target, arguments(folder, **options), rows, evaluation, callbacks=callbacks
    )


def weights_of(trainer: DFlashTrainer) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}


def assert_equal_weights(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [name for name in got if not torch.equal(got[name], expected[name])]
    assert different == []


# ---- the loss and its normalisation ----


def plain_loss(target: Any, drafter: Any, batch: Any, gamma: float) -> tuple[Tensor, float]:
    """Sum of weighted losses by the definition, all logits at once, and the sum of weights."""
    from training_pairs import BLOCK, step_of

    step = step_of(target, drafter)
    hidden = step.hidden_states(drafter, batch, step.target_states(batch).taps)
    logits = target.lm_head(hidden).unflatten(1, (-1, BLOCK))
    weights = batch["predicts"] * torch.cat([torch.zeros(1), decay_weights(BLOCK - 1, gamma)])
    chosen = logits.log_softmax(dim=-1).gather(-1, batch["labels"][..., None])[..., 0]
    return -(chosen * weights).sum(), float(weights.sum())


def test_an_update_is_divided_by_the_weight_of_all_its_batches(
    target: Any, rows: Any, tmp_path: Path
) -> None:
    """Also the last update of an epoch, which has fewer batches and a shorter one."""
    options = {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "max_steps": -1}
    options |= {"learning_rate": 0.0, "max_grad_norm": 0.0, "logits_chunk_size": 5}
    gradients: list[Tensor] = []
    seen: list[Any] = []

    class Recording(DFlashTrainer):
        def get_batch_samples(self, *args: Any) -> Any:
            batches, total = super().get_batch_samples(*args)
            seen.append(batches)
            return batches, total

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            gradients.append(model.norm.weight.grad.clone())

    trainer = trainer_of(
        target, rows[:9], tmp_path, trainer=Recording, callbacks=[Gradients()], **options
    )
    trainer.train()
    assert [len(batches) for batches in seen] == [2, 2, 1]
    assert len(seen[-1][0]["input_ids"]) == 1
    drafter = trainer.model
    logs = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    for batches, gradient, logged in zip(seen, gradients, logs, strict=True):
        drafter.zero_grad()
        sums = [plain_loss(target, drafter, batch, 1.5) for batch in batches]
        loss = sum(s for s, _ in sums) / sum(w for _, w in sums)
        loss.backward()
        torch.testing.assert_close(gradient, drafter.norm.weight.grad, rtol=1e-4, atol=1e-6)
        assert float(logged) == pytest.approx(float(loss.detach()), rel=1e-5)


def test_short_answers_are_trained_on_and_rows_without_any_are_passed_over(
    target: Any, tmp_path: Path
) -> None:
    short = row_of([5, 6, 7, 8, 9], n_prompt=3)  # two supervised tokens, blocks of four
    silent = row_of([5, 6, 7], n_prompt=3)
    trainer = trainer_of(target, [silent, silent, short, silent], tmp_path, max_steps=8)
    before = weights_of(trainer)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert all(math.isfinite(float(loss)) for loss in losses)
    assert 0.0 in [float(loss) for loss in losses]  # an update without a supervised token
    silent_rows = [log["rows_without_block"] for log in trainer.state.log_history if "loss" in log]
    assert silent_rows[-1] == 12  # three rows of four, two rows a step
    assert all(bool(t.isfinite().all()) for t in weights_of(trainer).values())
    assert not torch.equal(before["norm.weight"], weights_of(trainer)["norm.weight"])


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "forward_kl"},
        {"loss_type": "total_variation"},
        {"loss_type": "lk_alpha"},
        {"loss_type": "lk_lambda", "lk_eta": 1.0},
        {"loss_type": "forward_kl", "on_policy": True},
        {"loss_type": "lk_lambda", "on_policy": True, "on_policy_temperature": 0.0},
        {"loss_weighting": "dpace"},
        {"loss_decay_gamma": 1.0, "loss_decay_gamma_last": 3.0},
        {"random_anchors": False},
        {"n_sampled_tokens": 8},
        {"bf16": True},
        {CHECKPOINTING: True},
    ],
    ids=str,
)
def test_every_option_trains(target: Any, rows: Any, tmp_path: Path, options: Any) -> None:
    trainer = trainer_of(
        target, rows, tmp_path, max_steps=25, per_device_train_batch_size=5, **options
    )
    trainer.train()
    losses = [float(log["loss"]) for log in trainer.state.log_history if "loss" in log]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


def test_distillation_reaches_zero_where_the_drafter_is_the_target(
    target: Any, rows: Any, tmp_path: Path
) -> None:
    """Soft labels stand at anchor + k - 1: with the target's own states the distance is nothing."""
    for kind in ("forward_kl", "total_variation", "lk_alpha", "lk_lambda"):
        trainer = trainer_of(target, rows, tmp_path, loss_type=kind)
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
        places = (batch["anchors"][..., None] + torch.arange(4) - 1).clamp(0, 23).flatten(1)
        states = trainer.step.target_states(batch).last_hidden_states
        assert states is not None
        own = states[torch.arange(4)[:, None], places]
        trainer.step.hidden_states = lambda *_, own=own: own  # type: ignore[method-assign]
        assert abs(float(trainer.compute_loss(trainer.model, batch))) < 1e-6
        trainer.step.hidden_states = lambda *_, own=own: own.roll(1, 1)  # type: ignore[method-assign]
        assert float(trainer.compute_loss(trainer.model, batch)) > 0.1


def test_gamma_rises_to_its_last_value_at_the_last_step(
    target: Any, rows: Any, tmp_path: Path
) -> None:
    gammas: list[float] = []

    class Recording(DFlashTrainer):
        def get_batch_samples(self, *args: Any) -> Any:
            gammas.append(self.gamma_at(self.state.global_step))
            return super().get_batch_samples(*args)

    options = {"loss_decay_gamma": 1.0, "loss_decay_gamma_last": 4.0, "max_steps": 4}
    trainer_of(target, rows, tmp_path, trainer=Recording, **options).train()
    assert gammas == [1.0, 2.0, 3.0, 4.0]


def test_an_evaluation_before_training_is_with_the_last_gamma_too(
    target: Any, rows: Any, tmp_path: Path
) -> None:
    last = {"loss_decay_gamma": 1.0, "loss_decay_gamma_last": 4.0}
    losses = [
        trainer_of(target, rows, tmp_path, eval_dataset=rows, **gamma).evaluate()["eval_loss"]
        for gamma in (last, {"loss_decay_gamma": 4.0}, {"loss_decay_gamma": 1.0})
    ]
    assert losses[0] == losses[1] != losses[2]


def test_anchors_are_drawn_anew_every_epoch(target: Any, rows: Any, tmp_path: Path) -> None:
    drawn: list[Any] = []

    class Recording(DFlashTrainer):
        def get_batch_samples(self, *args: Any) -> Any:
            batches, total = super().get_batch_samples(*args)
            drawn.extend((int(self.state.epoch or 0), batch["anchors"]) for batch in batches)
            return batches, total

    options = {"per_device_train_batch_size": 10, "max_steps": 3}
    trainer = trainer_of(target, rows, tmp_path, trainer=Recording, **options)
    trainer.train()
    assert [epoch for epoch, _ in drawn] == [0, 1, 2]
    for epoch, anchors in drawn:  # rows come in another order, and the same ones every epoch
        numbered = [{**row, "example_id": i, "epoch": epoch} for i, row in enumerate(rows)]
        expected = trainer.data_collator(numbered)["anchors"]
        assert sorted(anchors.tolist()) == sorted(expected.tolist())
    assert sorted(drawn[0][1].tolist()) != sorted(drawn[1][1].tolist())


# ---- resuming ----

RESUMED = {
    "in the middle of an epoch": {},
    "with workers": {"dataloader_num_workers": 2},
    "with accumulation, average and a rising gamma": {
        "gradient_accumulation_steps": 2,
        "ema_decay": 0.9,
        "loss_decay_gamma_last": 4.0,
    },
    "with part of the vocabulary": {"n_sampled_tokens": 8},
    "with its own drafts": {"on_policy": True, "loss_type": "lk_alpha"},
    "at the end of an epoch": {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 1},
}


@pytest.mark.parametrize("name", RESUMED)
def test_five_steps_a_stop_and_five_steps_are_ten_steps(
    target: Any, rows: Any, tmp_path: Path, name: str
) -> None:
    options = {**RESUMED[name], "max_steps": 10, "save_strategy": "steps", "save_steps": 5}
    at_end_of_epoch = name == "at the end of an epoch"
    if at_end_of_epoch:
        options |= {"save_steps": 4}
    n_saved = options["save_steps"]
    anchors: list[Any] = []

    class Recording(DFlashTrainer):
        def get_batch_samples(self, *args: Any) -> Any:
            batches, total = super().get_batch_samples(*args)
            anchors.append([batch["anchors"].tolist() for batch in batches])
            return batches, total

    whole = trainer_of(target, rows, tmp_path / "whole", trainer=Recording, **options)
    whole.train()
    expected, anchors[:] = list(anchors), []
    assert expected[:5] != expected[5:]

    class Stop(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step == n_saved
            return control

    first = trainer_of(
        target, rows, tmp_path / "parts", trainer=Recording, callbacks=[Stop()], **options
    )
    first.train()
    torch.manual_seed(999)  # whatever the process has drawn before
    second = trainer_of(target, rows, tmp_path / "parts", trainer=Recording, **options)
    second.train(resume_from_checkpoint=True)
    assert anchors == expected
    assert second.state.global_step == 10
    assert_equal_weights(weights_of(second), weights_of(whole))
    one, other = (t.optimizer.state_dict()["state"] for t in (whole, second))
    for i, state in one.items():
        for key, value in state.items():
            assert torch.equal(value, other[i][key]), (i, key)
    assert second.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
    if whole.ema is not None and second.ema is not None:
        assert_equal_weights(second.ema._average, whole.ema._average)
        assert second.ema.n_updates == whole.ema.n_updates


@pytest.fixture
def checkpoint(target: Any, rows: Any, tmp_path: Path) -> Path:
    trainer = trainer_of(target, rows, tmp_path / "run", max_steps=2, save_strategy="steps")
    trainer.args.save_steps = trainer.state.save_steps = 2
    trainer.train()
    return tmp_path / "run" / "checkpoint-2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_anchors": 5}, "`n_anchors` was 6, is 5"),
        ({"seed": 7}, "`seed` was 42, is 7"),
        ({"loss_decay_gamma": 3.0}, "`loss_decay_gamma` was 1.5, is 3.0"),
        ({"gradient_accumulation_steps": 3}, "`rows_per_update` was 2, is 6"),
        ({"ema_decay": 0.5}, "`ema_decay` was None, is 0.5"),
        ({"lk_eta": 1.0}, r"`lk_eta` was 3\.0, is 1\.0"),
        ({"on_policy": True, "loss_type": "lk_alpha"}, "`on_policy` was False, is True"),
        ({"on_policy_temperature": 0.0}, r"`on_policy_temperature` was 1\.0, is 0\.0"),
        ({"n_sampled_tokens": 9}, "`n_sampled_tokens` was None, is 9"),
        ({"weight_decay": 0.1}, r"`weight_decay` was 0\.0, is 0\.1"),
        ({"optim": "sgd"}, "`optim` was 'adamw_torch_fused', is 'sgd'"),
        ({"adam_beta2": 0.95}, r"`adam_beta2` was 0\.999, is 0\.95"),
        ({"adam_epsilon": 1e-6}, "`adam_epsilon` was 1e-08, is 1e-06"),
        ({"max_grad_norm": 0.5}, r"`max_grad_norm` was 1\.0, is 0\.5"),
        ({"lr_scheduler_type": "linear"}, "`lr_scheduler_type` was 'cosine', is 'linear'"),
        ({"warmup_steps": 3}, r"`warmup_steps` was 0\.04, is 3"),
        ({"bf16": True}, "`bf16` was False, is True"),
        ({"dataloader_drop_last": True}, "`dataloader_drop_last` was False, is True"),
        ({"train_sampling_strategy": "sequential"}, "`train_sampling_strategy` was 'random', is"),
    ],
)
def test_another_configuration_is_not_resumed(
    target: Any, rows: Any, tmp_path: Path, checkpoint: Path, options: Any, message: str
) -> None:
    trainer = trainer_of(target, rows, tmp_path / "again", **options)
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_a_resumed_run_keeps_its_chunks_of_logits(
    target: Any, rows: Any, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = json.loads((checkpoint / "dflash_run.json").read_text("utf-8"))["logits_chunk_size"]

    def plans_less(config: Any, args: Any, *others: Any) -> Any:
        plan = planner.plan_step(config, args, *others)
        chunk = args.logits_chunk_size or first - 1
        return dataclasses.replace(plan, logits_chunk_size=chunk)

    monkeypatch.setattr(trainer_module, "plan_step", plans_less)
    for given, used in ((None, first), (first - 2, first - 2)):
        resumed = trainer_of(target, rows, tmp_path / "again", logits_chunk_size=given)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert resumed.planned().logits_chunk_size == used


def test_weights_that_are_not_finite_are_not_saved(target: Any, rows: Any, tmp_path: Path) -> None:
    class Breaks(TrainerCallback):
        def on_pre_optimizer_step(self, _args: Any, state: Any, _: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                next(kwargs["model"].parameters()).grad.fill_(float("nan"))

    trainer = trainer_of(target, rows, tmp_path, save_strategy="steps", callbacks=[Breaks()])
    trainer.args.save_steps = trainer.state.save_steps = 1
    with pytest.raises(FloatingPointError, match="weights must be finite, but are not at step 2"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1"]


def rates_of(trainer: DFlashTrainer) -> dict[int, float]:
    return {
        entry["step"]: entry["learning_rate"]
        for entry in trainer.state.log_history
        if "learning_rate" in entry
    }


@pytest.mark.parametrize(("options"), [{"max_steps": 6}, {"max_steps": 6, "learning_rate": 1e-4}])
def test_a_prolonged_run_goes_on_in_its_own_schedule(
    target: Any, rows: Any, tmp_path: Path, checkpoint: Path, options: dict[str, Any]
) -> None:
    whole = trainer_of(target, rows, tmp_path / "whole", **options)
    whole.train()
    resumed = trainer_of(target, rows, tmp_path / "again", **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))  # the last of two steps, at rate 0
    expected, got = rates_of(whole), rates_of(resumed)
    assert [got[step] for step in (3, 4, 5, 6)] == [expected[step] for step in (3, 4, 5, 6)]
    assert all(got[step] > 0 for step in (3, 4, 5))


def test_a_target_of_another_dtype_is_not_resumed(
    rows: Any, tmp_path: Path, checkpoint: Path
) -> None:
    half = training_target(dtype=torch.bfloat16)
    drafter = training_drafter(half).float()
    trainer = trainer_of(half, rows, tmp_path / "again", drafter=drafter)
    with pytest.raises(ValueError, match="`target_dtype` was 'float32', is 'bfloat16'"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def changed_rows(rows: Any, change: str) -> list[Any]:
    ids, mask = (list(rows[-1][name]) for name in ("input_ids", "loss_mask"))
    if change == "another token":
        ids[-1] += 1
    elif change == "another mask":
        mask[-1] = 0
    last: dict[str, Any] = {"input_ids": ids, "loss_mask": mask}
    if change == "packed":
        last["document_ids"] = [1] * 5 + [2] * (len(ids) - 5)
    return [rows[1], rows[0], *rows[2:]] if change == "order" else [*rows[:-1], last]


@pytest.mark.parametrize("change", ["another token", "another mask", "packed", "order"])
def test_other_rows_are_not_resumed(
    target: Any, rows: Any, tmp_path: Path, checkpoint: Path, change: str
) -> None:
    trainer = trainer_of(target, changed_rows(rows, change), tmp_path / "again")
    with pytest.raises(ValueError, match=r"`rows_sha256` was '.{64}', is '"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_an_update_may_be_divided_otherwise(
    target: Any, rows: Any, tmp_path: Path, checkpoint: Path
) -> None:
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 3}
    trainer = trainer_of(target, rows, tmp_path / "again", **options)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("length", [{"max_steps": 2}, {"max_steps": -1, "num_train_epochs": 0.4}])
def test_a_finished_run_is_not_trained_further(
    target: Any,
    rows: Any,
    tmp_path: Path,
    checkpoint: Path,
    length: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ten rows, two a step: five steps an epoch, of which two are made."""
    trainer = trainer_of(target, rows, tmp_path / "again", **length)
    with caplog.at_level(logging.INFO, logger="hf_dflash.trainer"):
        result = trainer.train(resume_from_checkpoint=str(checkpoint))
    assert result.global_step == trainer.state.global_step == 2
    assert "Nothing is left to train" in caplog.text
    assert_equal_weights(weights_of(trainer), load_file(checkpoint / "model.safetensors"))
    assert not list((tmp_path / "again").iterdir())


def test_what_an_older_record_does_not_tell_is_passed_over(
    target: Any, rows: Any, tmp_path: Path, checkpoint: Path
) -> None:
    path = checkpoint / SETTINGS_NAME
    recorded = json.loads(path.read_text())
    del recorded["n_sampled_tokens"]
    path.write_text(json.dumps(recorded))
    trainer = trainer_of(target, rows, tmp_path / "again", n_sampled_tokens=9, max_steps=3)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 3


def test_another_drafter_is_not_resumed(
    target: Any, rows: Any, tmp_path: Path, checkpoint: Path
) -> None:
    drafter = training_drafter(target, target_layer_ids=[1, 3], block_size=5)
    trainer = trainer_of(target, rows, tmp_path / "again", drafter=drafter)
    message = (
        r"`block_size` was 4, is 5; `loss_decay_gamma` was 1\.5, is 2\.0; "
        r"`target_layer_ids` was \[0, 2\], is \[1, 3\]"
    )
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attention_dropout": 0.5}, r"`attention_dropout` was 0\.0, is 0\.5"),
        ({"intermediate_size": 96}, r"`intermediate_size` was \d+, is 96\."),
        ({"attention_bias": True}, "`attention_bias` was False, is True"),
    ],
)
def test_a_drafter_of_another_size_or_dropout_is_not_resumed(
    target: Any, rows: Any, tmp_path: Path, checkpoint: Path, overrides: Any, message: str
) -> None:
    drafter = training_drafter(target, **overrides)
    trainer = trainer_of(target, rows, tmp_path / "again", drafter=drafter)
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_another_target_is_not_resumed_where_its_weights_are_at_hand(
    rows: Any, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = training_target(seed=1)
    trainer = trainer_of(other, rows, tmp_path / "again", max_steps=3)
    with pytest.raises(ValueError, match=r"configuration: `target_sha256` was '.{64}', is '"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    monkeypatch.setattr(other, "is_quantized", True, raising=False)
    assert target_digest(other) is None
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 3


def test_the_digest_of_a_target_follows_its_weights_and_needs_them(target: Any) -> None:
    assert target_digest(target) == target_digest(training_target())
    changed = training_target()
    changed.model.norm.weight.data[0] += 1e-3
    assert target_digest(changed) != target_digest(target)
    assert target_digest(changed.to("meta")) is None


# peft 0.21 asks by a name that transformers 5.24 has deprecated.
@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_alpha": 64}, r"'lora_alpha': 2.* is .*'lora_alpha': 64"),
        ({"lora_dropout": 0.5}, r"'lora_dropout': 0\.0.* is .*'lora_dropout': 0\.5"),
        ({"r": 4}, r"'r': 2.* is .*'r': 4"),
        ({"target_modules": ["q_proj"]}, r"is .*'target_modules': \['q_proj'\]"),
    ],
)
def test_other_adapters_are_not_resumed(
    target: Any, rows: Any, tmp_path: Path, options: Any, message: str
) -> None:
    first = {"r": 2, "lora_alpha": 2, "target_modules": ["v_proj", "q_proj"]}
    saves = {"save_strategy": "steps", "save_steps": 2}
    for step, settings in ((2, first), (3, first), (4, first | options)):
        drafter = get_peft_model(training_drafter(target), LoraConfig(**settings))
        trainer = trainer_of(target, rows, tmp_path, drafter=drafter, max_steps=step, **saves)
        if step < 4:
            trainer.train(resume_from_checkpoint=step == 3)
    with pytest.raises(ValueError, match=f"`adapters` was .*{message}"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_checkpoint_of_something_else_is_not_resumed(
    target: Any, rows: Any, tmp_path: Path, checkpoint: Path
) -> None:
    (checkpoint / SETTINGS_NAME).unlink()
    trainer = trainer_of(target, rows, tmp_path / "again")
    with pytest.raises(ValueError, match="must be a checkpoint of DFlashTrainer, but"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_without_the_runs_state_is_not_resumed(
    target: Any, rows: Any, tmp_path: Path, checkpoint: Path, name: str
) -> None:
    (checkpoint / name).unlink()
    trainer = trainer_of(target, rows, tmp_path / "again")
    with pytest.raises(
        ValueError, match=rf"must hold the whole state of the run, but .*{name[:9]}"
    ):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_weights_alone_are_not_resumed_but_may_be_a_finished_run(
    target: Any, rows: Any, tmp_path: Path
) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    trainer_of(target, rows, tmp_path, **options).train()
    trainer = trainer_of(target, rows, tmp_path, **options)
    with pytest.raises(ValueError, match=r"no optimizer.pt, scheduler.pt, rng_state\*.pth \(was"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.train(resume_from_checkpoint=True).global_step == 4


def test_sharded_state_has_names_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "rng_state_1.pth").touch()
    check_complete(tmp_path, shards=True)
    with pytest.raises(ValueError, match=r"has no optimizer.pt, scheduler.pt \(was it written"):
        check_complete(tmp_path, shards=False)


def test_a_run_that_dies_while_saving_leaves_no_checkpoint(
    target: Any, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(target, rows, tmp_path, **options)
    saves = []

    def fails_the_second_time(*args: Any, **kwargs: Any) -> None:
        saves.append(args)
        if len(saves) == 2:
            raise OSError("No space left on device")
        torch_save(*args, **kwargs)

    torch_save = trainer._save_rng_state
    monkeypatch.setattr(trainer, "_save_rng_state", fails_the_second_time)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert (tmp_path / "_part" / "checkpoint-4" / "model.safetensors").exists()
    again = trainer_of(target, rows, tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_old_checkpoints_go_and_the_best_stays(target: Any, rows: Any, tmp_path: Path) -> None:
    worse = iter([1.0, 2.0, 3.0])

    class Worse(DFlashTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            return {**super().evaluate(*args, **kwargs), "eval_loss": next(worse)}

    trainer = trainer_of(
        target,
        rows,
        tmp_path,
        trainer=Worse,
        eval_dataset=rows[:2],
        max_steps=6,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=False,
        ema_decay=0.5,
    )
    trainer.train()
    best = tmp_path / "checkpoint-2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-6"]
    assert trainer.state.best_model_checkpoint == str(best)
    recorded = json.loads((best / "trainer_state.json").read_text())
    assert recorded["best_model_checkpoint"] == str(best)
    assert_equal_weights(weights_of(trainer), load_file(best / "model.safetensors"))
    assert trainer.ema is not None
    assert trainer.ema.n_updates == 2


# ---- evaluation ----


def test_evaluation_is_exact_over_batches_and_the_same_at_every_epoch(
    target: Any, rows: Any, tmp_path: Path
) -> None:
    metrics = []
    for batch_size in (1, 3, 10):
        trainer = trainer_of(target, rows, tmp_path, per_device_eval_batch_size=batch_size)
        trainer.train_dataset.epoch.fill_(batch_size)
        metrics.append(trainer.evaluate(rows))
    names = ["eval_loss", "eval_acceptance_length", "eval_n_blocks", "eval_accuracy_1"]
    for other in metrics[1:]:
        assert [other[name] for name in names] == pytest.approx(
            [metrics[0][name] for name in names], rel=1e-5
        )
    batch = trainer.data_collator(
        [{**row, "example_id": i, "epoch": 0} for i, row in enumerate(rows)]
    )
    loss, weight = plain_loss(target, trainer.model, batch, 1.5)
    assert metrics[0]["eval_loss"] == pytest.approx(float(loss.detach()) / weight, rel=1e-5)
    assert metrics[0]["eval_n_blocks"] == int((batch["anchors"] >= 0).sum())


def test_the_loss_alone_can_be_asked_for(target: Any, rows: Any, tmp_path: Path) -> None:
    trainer = trainer_of(target, rows, tmp_path, prediction_loss_only=True)
    assert trainer.evaluate(rows[:2])["eval_loss"] > 0


def test_dpace_is_evaluated_as_it_is_trained(target: Any, rows: Any, tmp_path: Path) -> None:
    trainer = trainer_of(target, rows, tmp_path, loss_weighting="dpace")
    batch = trainer.data_collator(
        [{**row, "example_id": i, "epoch": 0} for i, row in enumerate(rows)]
    )
    with torch.no_grad():
        expected = float(trainer.compute_loss(trainer.model, batch))
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_slices_are_evaluated_by_name(target: Any, rows: Any, tmp_path: Path) -> None:
    slices = {"short": rows[5:], "long": rows[:5]}
    trainer = trainer_of(target, rows, tmp_path, eval_dataset=slices)
    metrics = trainer.evaluate()
    assert {"eval_short_acceptance_length", "eval_long_acceptance_length"} <= metrics.keys()
    assert trainer.predict(rows[:2]).metrics["test_n_blocks"] == 12


# ---- the average of the weights ----


def test_the_average_is_evaluated_saved_and_left_out_of_training(
    target: Any, rows: Any, tmp_path: Path
) -> None:
    averages: list[dict[str, Tensor]] = []
    seen: list[Tensor] = []

    class Watching(DFlashTrainer):
        def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(model.norm.weight.detach().clone())
            return super().prediction_step(model, *args, **kwargs)

    trainer = trainer_of(target, rows, tmp_path, trainer=Watching, ema_decay=0.9, max_steps=3)
    start = weights_of(trainer)

    class Follow(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            averages.append(weights_of(trainer))

    trainer.add_callback(Follow())
    trainer.train()
    expected = start["norm.weight"]
    for n, weights in enumerate(averages, start=1):
        decay = min(0.9, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * weights["norm.weight"]
    trainer.evaluate(rows[:2])
    torch.testing.assert_close(seen[0], expected)
    trainer.save_model(str(tmp_path / "out"))
    torch.testing.assert_close(
        load_file(tmp_path / "out/model.safetensors")["norm.weight"], expected
    )
    assert_equal_weights(weights_of(trainer), averages[-1])


def test_an_average_of_other_parameters_is_refused(target: Any, rows: Any, tmp_path: Path) -> None:
    trainer = trainer_of(target, rows, tmp_path, ema_decay=0.9)
    other = trainer_of(target, rows, tmp_path, ema_decay=0.9, kind="dflare")
    assert trainer.ema is not None
    assert other.ema is not None
    other.ema.save(tmp_path)
    with pytest.raises(ValueError, match="must hold the average of the 25 trained parameters"):
        trainer.ema.load(tmp_path)


# ---- what is saved ----


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_saved_drafter_loads_strictly_and_holds_nothing_of_the_target(
    target: Any, rows: Any, tmp_path: Path, dtype: str | None
) -> None:
    trainer = trainer_of(target, rows, tmp_path, export_dtype=dtype, max_steps=1)
    trainer.model.generation_config.num_assistant_tokens = 2
    trainer.train()
    before = {name: p.clone() for name, p in target.named_parameters()}
    trainer.save_model()
    trainer.create_model_card(model_name="org/name")
    loaded = DFlashDraftModel.from_pretrained(tmp_path, dtype="auto")
    wanted = torch.bfloat16 if dtype else torch.float32
    assert loaded.dtype == wanted
    assert loaded.generation_config.num_assistant_tokens == 2
    assert_equal_weights(
        dict(loaded.state_dict()), {k: v.to(wanted) for k, v in weights_of(trainer).items()}
    )
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(trainer.model.state_dict())
    assert all(p.grad is None and not p.requires_grad for p in target.parameters())
    assert_equal_weights(before, dict(target.named_parameters()))
    assert not list(tmp_path.glob("_part*"))
    assert not (tmp_path / "training_args.bin").exists()
    card = (tmp_path / "README.md").read_text()
    assert "# name\n" in card
    assert 'from_pretrained("org/name"' in card
    assert "| block size | 4 |" in card
    check_card(tmp_path)


def test_what_is_pushed_is_what_is_exported(
    target: Any, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else of the folder; the push itself is tested with a stand-in for the Hub."""
    trainer = trainer_of(
        target, rows, tmp_path, export_dtype="bfloat16", max_steps=1, save_strategy="steps"
    )
    trainer.train()
    trainer.hub_model_id = "org/drafter"
    commits: list[Any] = []

    def commit(_: Any, repo_id: str, operations: Any, **options: Any) -> Any:
        commits.append((repo_id, {op.path_in_repo for op in operations}, options))
        return SimpleNamespace(pr_url=None)

    created = SimpleNamespace(repo_id="org/drafter")
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *_, **__: created)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_tree", lambda *_, **__: [])
    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", commit)
    trainer.push_to_hub("Trained")
    [(repo_id, names, options)] = commits
    assert (repo_id, options["commit_message"]) == ("org/drafter", "Trained")
    assert names >= {"config.json", "model.safetensors", "README.md", "training_log.json"}
    assert not {name for name in names if "checkpoint-" in name or "optimizer" in name}
    assert (tmp_path / "checkpoint-1").is_dir()
    assert DFlashDraftModel.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    assert trainer.push_to_hub(blocking=False).result() is not None
    assert len(commits) == 2


def test_the_card_tells_how_it_was_trained_and_the_last_evaluation(
    target: Any, rows: Any, tmp_path: Path
) -> None:
    trainer = trainer_of(target, rows, tmp_path, eval_dataset=rows[:2])
    trainer.data_record = {"answers": "the target's own, greedy", "thinking": "off"}
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "| acceptance length | " in card
    assert "| answers | the target's own, greedy |" in card
    assert "| learning rate | 0.01 |" in card
    assert "sha256" not in card
    assert "rope" not in card
    assert "4 steps, 1 process on cpu" in card
    assert "# DFlash drafter\n" in card
    check_card(tmp_path)


def test_a_card_needs_a_saved_drafter(target: Any, rows: Any, tmp_path: Path) -> None:
    trainer = trainer_of(target, rows, tmp_path)
    with pytest.raises(RuntimeError, match=r"Call `save_model\(\)` first"):
        trainer.create_model_card()


# ---- bad input ----


@pytest.mark.parametrize("name", ["train", "eval"])
def test_data_without_a_supervised_token_are_refused(
    target: Any, rows: Any, tmp_path: Path, name: str
) -> None:
    silent = [row_of([1, 2, 3], n_prompt=3), row_of([1, 2, 3], n_prompt=2)]
    data = (silent, None) if name == "train" else (rows, {"part": silent})
    with pytest.raises(ValueError, match=rf"`{name}_dataset.*` must have a row with two superv"):
        trainer_of(target, data[0], tmp_path, eval_dataset=data[1])


def test_a_drafter_in_half_precision_is_refused(target: Any, rows: Any, tmp_path: Path) -> None:
    drafter = training_drafter(target).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"`model` must be trained in float32, got torch.bfloat16"):
        trainer_of(target, rows, tmp_path, drafter=drafter)


def test_a_drafter_with_nothing_to_train_is_refused(target: Any, rows: Any, tmp_path: Path) -> None:
    drafter = training_drafter(target).requires_grad_(False)
    with pytest.raises(ValueError, match="must have parameters that require gradients, got none"):
        trainer_of(target, rows, tmp_path, drafter=drafter)


def test_another_targets_drafter_is_refused(target: Any, rows: Any, tmp_path: Path) -> None:
    drafter = training_drafter(target, target_hidden_size=48)
    with pytest.raises(ValueError, match="made for another target"):
        trainer_of(target, rows, tmp_path, drafter=drafter)


def test_flex_attention_is_not_trained_on_cpus(target: Any, rows: Any, tmp_path: Path) -> None:
    drafter = training_drafter(target, attn_implementation="flex_attention")
    with pytest.raises(NotImplementedError, match="cannot be trained on CPUs"):
        trainer_of(target, rows, tmp_path, drafter=drafter)


def test_sharding_is_not_ignored_on_cpus(target: Any, tmp_path: Path) -> None:
    drafter = training_drafter(target)
    args = arguments(tmp_path)
    args.fsdp = True
    with pytest.raises(NotImplementedError, match="`fsdp` shards nothing here"):
        check_device(drafter.config, args, shards=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "mse"}, r"`loss_type` must be one of \['cross_entropy'.*got 'mse'"),
        ({"loss_weighting": "flat"}, "`loss_weighting` must be one of .*got 'flat'"),
        ({"export_dtype": "int8"}, "`export_dtype` must be one of .*got 'int8'"),
        ({"n_anchors": 0}, "`n_anchors` must be at least 1, got 0"),
        ({"logits_chunk_size": 0}, "`logits_chunk_size` must be at least 1, got 0"),
        ({"n_sampled_tokens": 0}, "`n_sampled_tokens` must be at least 1, got 0"),
        (
            {"n_sampled_tokens": 9, "loss_type": "forward_kl"},
            "`n_sampled_tokens` needs `loss_type`=\"cross_entropy\".*'forward_kl'",
        ),
        (
            {"n_sampled_tokens": 9, "loss_weighting": "dpace"},
            "`n_sampled_tokens` needs .*'cross_entropy' and 'dpace'",
        ),
        ({"lk_eta": -0.5}, "`lk_eta` must be at least 0, got -0.5"),
        ({"ema_decay": 1.0}, "`ema_decay` must be at least 0 and at most 0.99999, got 1.0"),
        ({"loss_decay_gamma": -1.0}, "`loss_decay_gamma` must be at least 0.001, got -1.0"),
        ({"dpace_alpha": 1.5, "loss_weighting": "dpace"}, "`dpace_alpha` must be at least"),
        *(
            (
                {"loss_weighting": "dpace", "loss_type": kind},
                '"dpace" needs `loss_type`="cross_entropy"',
            )
            for kind in ("forward_kl", "lk_lambda")
        ),
        (
            {"loss_weighting": "dpace", "loss_decay_gamma": 2.0},
            "`loss_decay_gamma` has no meaning with",
        ),
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor` must be 0.0, got 0.1: the los"),
        ({"push_to_hub": True, "hub_strategy": "every_save"}, "`hub_strategy` must be 'end', got"),
        ({"neftune_noise_alpha": 5.0}, "`neftune_noise_alpha` must be None, got 5.0: a drafter"),
        ({"batch_eval_metrics": True}, "`batch_eval_metrics` must be False, got True"),
        ({"eval_do_concat_batches": False}, "`eval_do_concat_batches` must be True, got False"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)


@pytest.mark.parametrize(("size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (5, 2.0), (2, 1.0)])
def test_the_papers_defaults(tmp_path: Path, size: int, gamma: float) -> None:
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    assert args.gamma_for(size) == gamma
    assert (args.learning_rate, args.warmup_steps, args.max_grad_norm) == (6e-4, 0.04, 1.0)
    assert (args.n_anchors, args.lr_scheduler_type) == (512, "cosine")


def test_a_plan_that_does_not_fit_is_said(
    target: Any,
    rows: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("hf_dflash.planner.available_bytes", lambda _: 1000)
    trainer = trainer_of(target, rows, tmp_path)
    with caplog.at_level(logging.INFO, logger="hf_dflash.trainer"):
        trainer.train()
    assert "This may not fit into memory: lower `per_device_train_batch_size`" in caplog.text
    assert "logits of 36 rows at once" in caplog.text
    shutil.rmtree(tmp_path)


# ---- quantised targets ----

#: Torch's own int8 is deprecated; but it needs no other package.
_IGNORED = (
    "torch.ao.quantization is deprecated:DeprecationWarning",
    "torch.quantize_per_tensor:UserWarning",
    "quantized..linear_dynamic. an autograd kernel was not registered:UserWarning",
)
QUANTISING = pytest.mark.filterwarnings(*(f"ignore:{message}" for message in _IGNORED))


def quantised(target: Any) -> Any:
    """A copy whose linear layers, its head too, are in int8 and have no backward."""
    linear = {torch.nn.Linear}
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(target), linear, dtype=torch.qint8)


@QUANTISING
def test_a_quantised_target_trains_and_stays_as_it_is(
    target: Any, rows: Any, tmp_path: Path
) -> None:
    low = quantised(target)
    low.lm_head = target.lm_head
    ids = torch.tensor([rows[0]["input_ids"]])
    one = torch.ones_like(ids)  # document
    before = run_target(low, [0, 2], ids, one).taps
    assert bool(before.isfinite().all())
    assert not torch.equal(before, run_target(target, [0, 2], ids, one).taps)
    trainer = trainer_of(low, rows, tmp_path, max_steps=2)
    start = weights_of(trainer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert not torch.equal(weights_of(trainer)["norm.weight"], start["norm.weight"])
    assert torch.equal(run_target(low, [0, 2], ids, one).taps, before)


@QUANTISING
@pytest.mark.parametrize("loss_type", ["cross_entropy", "total_variation"])
def test_a_head_without_a_backward_is_refused(
    target: Any, rows: Any, tmp_path: Path, loss_type: str
) -> None:
    trainer = trainer_of(quantised(target), rows, tmp_path, loss_type=loss_type)
    with pytest.raises(NotImplementedError, match="The head of `target` must have a backward"):
        trainer.train()
