from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from families.zoo import TEXT_TARGETS
from hf_dflash import DFlashConfig, DFlashDraftModel
from hf_dflash.collator import DFlashCollator
from hf_dflash.losses import (
    chunked_loss,
    cross_entropy,
    fixed_weights,
    forward_kl,
    lk_alpha,
    lk_lambda,
    row_chunks,
    total_variation,
)
from hf_dflash.planner import ScoreSizes, available_bytes, plan_memory
from hf_dflash.sampled_vocabulary import SampledVocabulary
from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import LOSSES, DFlashTrainingArguments
from pairs import tiny_target

GIB = 2**30
MEMORY = "[memory]"
SMALL: dict[str, Any] = {
    "n_trained": 1,
    "target_bytes": 1,
    "n_rows": 1,
    "n_tokens": 40,
    "n_anchors": 32,
    "available": GIB,
}
# The drafter of Qwen3-8B.
CONFIG = SimpleNamespace(
    architecture="dflash",
    block_size=16,
    hidden_size=4096,
    target_hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    num_hidden_layers=5,
    target_layer_ids=[1, 9, 17, 25, 33],
    vocab_size=151936,
)


def plan(available: int, **options: Any) -> Any:
    sizes = {"n_trained": 1_050_000_000, "target_bytes": 16 * GIB, "n_rows": 1, "n_tokens": 3072}
    return plan_memory(CONFIG, **sizes, n_anchors=512, available=available, **options)


def test_the_parts_of_the_published_recipe() -> None:
    memory = plan(200 * GIB)
    assert memory.drafter == 16 * 1_050_000_000
    assert memory.taps == 4 * 3072 * 5 * 4096
    assert memory.mask == 8192 * (3072 + 256)  # in parts of 16 blocks
    assert memory.logits == 512 * 151936 * 14
    assert memory.logits_chunk_size == 512
    assert memory.fits
    assert "logits of 512 rows at once" in memory.summary()


def test_less_memory_gives_smaller_chunks_down_to_a_few_rows() -> None:
    needed = plan(0).needed
    middle = plan(needed + GIB)
    assert 64 < middle.logits_chunk_size < 512
    assert middle.fits
    tiny = plan(0)
    assert tiny.logits_chunk_size == 64
    assert not tiny.fits


def test_a_choice_is_kept_and_no_more_rows_than_there_are_are_planned() -> None:
    assert plan(200 * GIB, logits_chunk_size=7).logits_chunk_size == 7
    small = plan_memory(
        CONFIG, n_trained=1, target_bytes=1, n_rows=1, n_tokens=9, n_anchors=2, available=GIB
    )
    assert small.logits_chunk_size == 30


def test_what_else_is_kept() -> None:
    sdpa, eager = plan(GIB), plan(GIB, attention="eager")
    flex = plan(GIB, attention="flex_attention")
    assert flex.mask == 0
    assert eager.mask == 4 * sdpa.mask
    assert flex.activations < sdpa.activations < eager.activations
    averaged = plan(GIB, keeps_average=True)
    assert averaged.drafter - sdpa.drafter == 8 * 1_050_000_000


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes that were allocated at once, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.name() == MEMORY]
    return max(accumulate(sizes))


@pytest.mark.parametrize("loss_type", LOSSES)
def test_logits_take_what_is_planned(loss_type: str) -> None:
    """Three chunks of a loss with its gradient, and a head in half precision."""
    n_rows, chunk = 96, 32
    config = SimpleNamespace(**{**vars(CONFIG), "vocab_size": 4096})
    plan = plan_memory(config, **SMALL, logits_chunk_size=chunk, loss_type=loss_type)
    weight = torch.randn(config.vocab_size, 8, dtype=torch.bfloat16)
    hidden, teacher = torch.randn(n_rows, 8, requires_grad=True), torch.randn(n_rows, 8)

    def head(rows: torch.Tensor) -> torch.Tensor:
        return rows.to(weight) @ weight.T

    row_loss = {
        "cross_entropy": cross_entropy(torch.arange(n_rows)),
        "total_variation": total_variation(lambda rows: head(teacher[rows])),
        "forward_kl": forward_kl(lambda rows: head(teacher[rows])),
        "lk_alpha": lk_alpha(lambda rows: head(teacher[rows])),
        "lk_lambda": lk_lambda(lambda rows: head(teacher[rows]), 3.0),
    }[loss_type]
    weights, total = fixed_weights(torch.ones(n_rows)), torch.tensor(96.0)
    chunks = row_chunks(n_rows, chunk)
    peak = peak_bytes(lambda: chunked_loss(hidden, head, row_loss, weights, total, chunks))
    assert peak == pytest.approx(plan.logits, rel=0.03)


ON_POLICY = {"loss_type": "lk_alpha", "on_policy": True}


def rows_of(n_rows: int) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 500, (n_rows, 512), generator=generator).tolist()
    return [{"input_ids": row, "loss_mask": [0] * 50 + [1] * 462} for row in ids]


def trainer_of(
    folder: Path,
    architecture: str = "dflash",
    attention: str = "sdpa",
    of_target: str = "sdpa",
    eval_rows: Any = None,
    **options: Any,
) -> DFlashTrainer:
    """A trainer on two rows of 512 tokens."""
    target = tiny_target(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=6)
    target.set_attn_implementation(of_target)
    config = DFlashConfig.for_target(
        target.config,
        architecture=architecture,
        num_draft_layers=3,
        num_taps=3,
        block_size=16,
        mask_token_id=511,
    )
    config._attn_implementation = attention
    defaults = {"per_device_train_batch_size": 2, "logits_chunk_size": 64}
    args = DFlashTrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], **{**defaults, **options}
    )
    return DFlashTrainer(DFlashDraftModel(config), target, args, rows_of(2), eval_rows)


def planned_and_peak(*parts: Any, **options: Any) -> tuple[int, int]:
    """Bytes of a step of the trainer."""
    trainer = trainer_of(*parts, **options)
    n_anchors = trainer.args.n_anchors
    batch = DFlashCollator(16, n_anchors)([trainer.train_dataset[i] for i in range(2)])
    assert batch["anchors"].shape == (2, n_anchors)
    plan = trainer.planned()
    # Before the first step of the optimiser: of the drafter's 16 bytes its gradients, 4, are new.
    planned = plan.needed - plan.drafter * 12 // 16
    peak = peak_bytes(lambda: trainer.compute_loss(trainer.model, batch).backward())
    return planned, peak


@pytest.mark.parametrize("n_anchors", [8, 64])
@pytest.mark.parametrize(
    ("architecture", "attention", "options"),
    [
        ("dflash", "sdpa", {}),
        ("dflash", "eager", {}),
        ("dflare", "sdpa", {}),
        ("dflash", "sdpa", ON_POLICY),
    ],
    ids=str,
)
def test_a_step_takes_no_more_than_is_planned(
    architecture: str, attention: str, options: Any, n_anchors: int, tmp_path: Path
) -> None:
    options = {**options, "n_anchors": n_anchors}
    planned, peak = planned_and_peak(tmp_path, architecture, attention, "sdpa", **options)
    assert peak <= planned <= 1.5 * peak


def test_a_target_with_eager_attention_takes_no_more_to_score_drafts(tmp_path: Path) -> None:
    """So many drafts that their scores take more than those of the text, which are not planned."""
    planned, peak = planned_and_peak(tmp_path, "dflash", "sdpa", "eager", n_anchors=64, **ON_POLICY)
    assert peak <= planned <= 1.5 * peak


@pytest.mark.parametrize(
    ("architecture", "attention", "options"),
    [
        ("dflash", "sdpa", {"n_anchors": 8}),
        ("dflash", "sdpa", {"n_anchors": 64}),
        ("dflash", "eager", {"n_anchors": 64}),
        ("dflare", "sdpa", {"n_anchors": 64}),
        ("dflash", "sdpa", {"n_anchors": 64, **ON_POLICY}),
        ("dflash", "sdpa", {"n_anchors": 64, "n_sampled_tokens": 20}),
    ],
    ids=str,
)
def test_a_batch_of_an_evaluation_takes_no_more_than_is_planned(
    architecture: str, attention: str, options: Any, tmp_path: Path
) -> None:
    options = {**options, "per_device_train_batch_size": 1}
    trainer = trainer_of(tmp_path, architecture, attention, eval_rows=rows_of(8), **options)
    plan = trainer.planned()
    assert plan.batch_option == "per_device_eval_batch_size"
    batch = next(iter(trainer.get_eval_dataloader()))
    assert len(batch["anchors"]) == 8
    trainer.model.eval()
    peak = peak_bytes(lambda: trainer.prediction_step(trainer.model, batch, False))
    # Looser than of a step: what one layer makes is not all there at once.
    assert peak <= plan.needed - plan.drafter <= 3 * peak


def warned(folder: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    """The option that each warning of a plan tells to lower."""
    caplog.clear()
    trainer = trainer_of(folder, n_anchors=16, per_device_train_batch_size=1, **options)
    trainer.planned()
    return re.findall(r"may not fit into memory: lower `(\w+)`", caplog.text)


def test_the_batch_that_is_too_large_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Evaluations have 8 rows a batch if nothing is said."""
    one_row = trainer_of(tmp_path, n_anchors=16, per_device_train_batch_size=1).planned().needed
    free = int(1.1 * one_row)
    monkeypatch.setattr("hf_dflash.planner.available_bytes", lambda _: free)
    assert warned(tmp_path, caplog) == []
    assert warned(tmp_path, caplog, eval_rows=rows_of(1)) == []
    assert warned(tmp_path, caplog, eval_rows=rows_of(8), per_device_eval_batch_size=1) == []
    too_large = ["per_device_eval_batch_size"]
    assert warned(tmp_path, caplog, eval_rows=rows_of(8)) == too_large
    slices = {"few": rows_of(1), "many": rows_of(8)}
    assert warned(tmp_path, caplog, eval_rows=slices) == too_large
    free = one_row // 2
    assert warned(tmp_path, caplog, eval_rows=rows_of(1)) == ["per_device_train_batch_size"]


def test_chunks_are_small_enough_for_training_and_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"n_anchors": 64, "per_device_train_batch_size": 1, "logits_chunk_size": None}
    alone = trainer_of(tmp_path, **options)
    free = alone.planned().needed + 512 * 512 * 14  # twice as much as its logits
    monkeypatch.setattr("hf_dflash.planner.available_bytes", lambda _: free)
    chunks = [
        trainer_of(tmp_path, eval_rows=rows, **options).planned().logits_chunk_size
        for rows in (None, rows_of(1), rows_of(8))
    ]
    assert chunks == [512, 512, 64]


def test_part_of_the_vocabulary_takes_what_is_planned() -> None:
    sizes = {"block_size": 4, "vocab_size": 8192, "target_hidden_size": 64}
    scales = {"output_multiplier": 1.0, "final_logit_softcapping": None}
    config = SimpleNamespace(**{**vars(CONFIG), **sizes, **scales})
    options = {"logits_chunk_size": 32, "n_sampled_tokens": 2000}
    plan = plan_memory(config, **SMALL, **options)
    whole = plan_memory(config, **SMALL, logits_chunk_size=32)
    labels = torch.arange(96)
    n_slots = SMALL["n_anchors"] * 3
    assert n_slots == len(labels)
    head = torch.nn.Linear(64, 8192, bias=False, dtype=torch.bfloat16)
    target = SimpleNamespace(get_output_embeddings=lambda: head)
    hidden = torch.randn(96, 64, requires_grad=True)

    def run() -> None:
        sampled = SampledVocabulary(target, config, labels, 2000, torch.Generator())
        weights, total = fixed_weights(torch.ones(96)), torch.tensor(96.0)
        chunked_loss(hidden, sampled.head, sampled.row_loss, weights, total, row_chunks(96, 32))

    assert 0.75 * plan.logits < peak_bytes(run) < 1.1 * plan.logits
    assert plan.logits < whole.logits


def test_distillation_keeps_the_last_hidden_states() -> None:
    plain, distilled = plan(200 * GIB), plan(200 * GIB, loss_type="forward_kl")
    assert distilled.taps - plain.taps == 4 * 3072 * 4096
    assert distilled.logits == 512 * 151936 * 26


def test_scores_of_drafts_take_the_targets_sizes() -> None:
    scores = ScoreSizes.of(TEXT_TARGETS["gpt2"]())  # whose config names no key-value heads
    assert scores == ScoreSizes(cache=2 * 4 * 32 * 4, width=32, inner=128, queries=32, tables=0)
    plain, scored = plan(GIB), plan(GIB, scores=scores)
    assert scored.taps - plain.taps == scores.n_bytes(1, 3072, 512 * 15)
    assert scores.n_bytes(1, 3072, 512 * 15) > scores.cache * 3072 + 4 * 512 * 15 * 32


def test_the_free_memory_of_this_machine() -> None:
    assert available_bytes(torch.device("cpu")) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_free_memory_of_a_gpu() -> None:
    assert available_bytes(torch.device("cuda")) > 0
