"""Rows filled up to a multiple: few lengths for compiled attention, and the same training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from families.zoo import TEXT_TARGETS
from hf_dflash import DFlashConfig
from hf_dflash.collator import DFlashCollator, EpochRows
from hf_dflash.target_states import run_target
from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from hf_dflash.training_checks import collator_for
from training_pairs import (
    BLOCK,
    UNCOMPILED_WARNING,
    generated_rows,
    leave_flex_uncompiled,
    random_ids,
    row_of,
    step_of,
    training_drafter,
    training_target,
)

LENGTHS = (9, 14, 23, 30, 41, 52, 77, 100, 111, 127)


def batch_of_length(n_tokens: int, multiple: int, **columns: Any) -> dict[str, Tensor]:
    rows = EpochRows([row_of(random_ids(n_tokens, n_tokens), **columns), row_of(random_ids(6, 1))])
    collator = DFlashCollator(BLOCK, 8, pad_to_multiple_of=multiple)
    return collator([rows[0], rows[1]])


def test_lengths_are_few_and_nothing_else_changes() -> None:
    lengths = set()
    for n_tokens in LENGTHS:
        plain, rounded = (batch_of_length(n_tokens, m) for m in (1, 64))
        lengths.add(rounded["input_ids"].shape[1])
        assert plain["input_ids"].shape[1] == n_tokens
        for name in ("anchors", "labels", "predicts"):
            assert torch.equal(rounded[name], plain[name]), name
        for name in ("input_ids", "document_ids", "position_ids"):
            assert torch.equal(rounded[name][:, :n_tokens], plain[name]), name
            assert not rounded[name][:, n_tokens:].any(), name
    assert lengths == {64, 128}


def losses_of(batch: dict[str, Tensor], attention: str, **options: Any) -> dict[str, Tensor]:
    """Of every slot, and the gradients where the attention has some on a CPU."""
    target = training_target()
    drafter = training_drafter(target, attn_implementation=attention)
    has_backward = attention != "flex_attention"
    drafter.requires_grad_(has_backward)
    step = step_of(target, drafter, **options)
    total = step.total_weight(batch["predicts"], 2.0)
    result = step.losses(drafter, batch, total, 2.0, 100)
    if has_backward:
        result.loss.backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    assert bool(gradients) == has_backward
    return {"loss": result.loss.detach(), "rows": result.row_losses, **gradients}


@pytest.mark.filterwarnings(UNCOMPILED_WARNING)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("kind", ["plain", "packed", "distilled"])
def test_loss_and_gradients_are_the_same(
    monkeypatch: pytest.MonkeyPatch, attention: str, kind: str
) -> None:
    leave_flex_uncompiled(monkeypatch)
    columns = {"document_ids": [1] * 9 + [2] * 14} if kind == "packed" else {}
    options = {"loss_type": "forward_kl"} if kind == "distilled" else {}
    batches = (batch_of_length(23, multiple, **columns) for multiple in (1, 64))
    plain, rounded = (losses_of(batch, attention, **options) for batch in batches)
    assert len(plain["rows"]) > 10
    for name in plain:
        torch.testing.assert_close(rounded[name], plain[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_the_target_is_not_run_over_what_rows_are_filled_up_with(family: str) -> None:
    """It would cost time, and lie beyond the positions that some targets know."""
    target = TEXT_TARGETS[family]()
    lengths: list[int] = []
    target.get_input_embeddings().register_forward_hook(
        lambda _module, given, _output: lengths.append(given[0].shape[1])
    )
    ids = torch.tensor([random_ids(9, 1), random_ids(9, 2)])
    ids[1, 5:] = 0
    documents = (ids > 0).long()
    plain = run_target(target, [0, 2], ids, documents, keeps_last=True)
    more = (0, 5000)
    longer = [torch.nn.functional.pad(t, more) for t in (ids, documents)]
    filled = run_target(target, [0, 2], *longer, keeps_last=True)
    assert lengths == [9, 9]
    for got, expected in (
        (filled.taps, plain.taps),
        (filled.last_hidden_states, plain.last_hidden_states),
    ):
        assert got is not None
        assert expected is not None
        assert got.shape[1] == 5009
        assert torch.equal(got[:, :9], expected)
        assert not got[:, 9:].any()


@pytest.mark.parametrize(
    ("attention", "given", "multiple"),
    [("flex_attention", None, 128), ("sdpa", None, 1), ("sdpa", 32, 32), ("flex_attention", 1, 1)],
)
def test_only_compiled_attention_has_its_rows_filled_up_unasked(
    tmp_path: Path, attention: str, given: int | None, multiple: int
) -> None:
    target = training_target()
    config = DFlashConfig.for_target(target.config, mask_token_id=95)
    config._attn_implementation = attention
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], pad_to_multiple_of=given
    )
    assert collator_for(config, args).pad_to_multiple_of == multiple


def test_a_multiple_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`pad_to_multiple_of` must be at least 1, got 0"):
        DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, pad_to_multiple_of=0)


def test_a_run_ends_at_the_same_drafter(tmp_path: Path) -> None:
    target = training_target()
    rows = [
        *generated_rows(target, 2, n_new=12),
        *generated_rows(target, 2, n_prompt=7, n_new=14),
    ]
    weights = []
    for multiple in (1, 64):
        args = DFlashTrainingArguments(
            output_dir=str(tmp_path / str(multiple)),
            max_steps=3,
            per_device_train_batch_size=2,
            n_anchors=4,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            pad_to_multiple_of=multiple,
        )
        trainer = DFlashTrainer(training_drafter(target), target, args, rows)
        trainer.train()
        weights.append(trainer.model.state_dict())
    for name, plain in weights[0].items():
        torch.testing.assert_close(weights[1][name], plain, atol=1e-6, rtol=1e-6)


@pytest.fixture
def n_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Flex attention as torch 2.6 compiles it for training, and the keys it was compiled for.

    Tracing is torch's own; what it traced is run as it is, since no compiler is asked about here.
    """
    compiled_for: list[int] = []

    def backend(module: Any, inputs: list[Tensor]) -> Any:
        compiled_for.append(max(t.shape[2] for t in inputs if t.ndim == 4))
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend=backend, dynamic=False)

    def attention(
        _module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> Any:
        output = compiled(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None

    leave_flex_uncompiled(monkeypatch)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flex_attention", attention)
    # Torch's own limit: it belongs to the process, and another test may have left it raised.
    with torch._dynamo.config.patch(recompile_limit=8):
        yield compiled_for
    torch._dynamo.reset()


@pytest.mark.filterwarnings(UNCOMPILED_WARNING)
@pytest.mark.parametrize("multiple", [64, 1])
def test_ten_lengths_are_compiled_for_twice(n_compiled: list[int], multiple: int) -> None:
    target = training_target()
    drafter = training_drafter(target, attn_implementation="flex_attention")
    step = step_of(target, drafter)
    for n_tokens in itertools.chain(LENGTHS, LENGTHS):
        batch = batch_of_length(n_tokens, multiple)
        with torch.no_grad():
            step.hidden_states(drafter, batch, step.target_states(batch).taps)
    assert len(set(n_compiled)) == len(n_compiled)
    if multiple > 1:
        assert len(n_compiled) == 2
    else:  # after so many torch gives up, and attends without compiling at all
        assert len(n_compiled) == torch._dynamo.config.recompile_limit < len(LENGTHS)


def test_memory_is_planned_for_rows_as_they_are_filled_up(tmp_path: Path) -> None:
    target = training_target()
    rows = generated_rows(target, 2, n_new=12)
    longest = max(len(row["input_ids"]) for row in rows)

    def planned_taps(multiple: int) -> int:
        args = DFlashTrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], pad_to_multiple_of=multiple
        )
        return DFlashTrainer(training_drafter(target), target, args, rows).planned().taps

    assert planned_taps(512) * longest == planned_taps(1) * 512
