from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dflash import DFlashTrainer, DFlashTrainingArguments
from hf_dflash.losses import SlotLosses, chunked_loss, cross_entropy, fixed_weights, row_chunks
from hf_dflash.sampled_vocabulary import SampledVocabulary, check_plain_head
from training_pairs import batch_of, generated_rows, step_of, training_drafter, training_target

WIDTH, N_TOKENS = 6, 40
CONFIG = SimpleNamespace(output_multiplier=0.5, final_logit_softcapping=4.0)


class Target(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(WIDTH, N_TOKENS, bias=bias)
        self.dtype = torch.float32

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def rows_and_labels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(7, WIDTH, generator=generator)
    return rows, torch.tensor([3, 9, 3, 0, 39, 9, 20])


def sampled(target: Any, labels: Tensor, n_sampled: int, seed: int = 0) -> SampledVocabulary:
    generator = torch.Generator().manual_seed(seed)
    return SampledVocabulary(target, CONFIG, labels, n_sampled, generator)


def whole(target: Any, rows: Tensor) -> Tensor:
    return torch.tanh(target.lm_head(rows) * 0.5 / 4.0) * 4.0


def loss_of(head: Any, row_loss: Any, rows: Tensor) -> SlotLosses:
    weights = fixed_weights(torch.linspace(1.0, 0.4, len(rows)))
    return chunked_loss(rows, head, row_loss, weights, torch.tensor(3.0), row_chunks(len(rows), 2))


@pytest.mark.parametrize("bias", [False, True])
def test_with_every_token_it_is_the_whole_cross_entropy(bias: bool) -> None:
    target = Target(bias)
    rows, labels = rows_and_labels()
    one, other = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    part = sampled(target, labels, N_TOKENS)
    result = loss_of(part.head, part.row_loss, one)
    wanted = loss_of(lambda r: whole(target, r), cross_entropy(labels), other)
    result.loss.backward()
    wanted.loss.backward()
    torch.testing.assert_close(result.row_losses, wanted.row_losses)
    torch.testing.assert_close(one.grad, other.grad)
    assert one.grad.abs().max() > 1e-3
    assert torch.equal(part.ids[result.predicted_ids], wanted.predicted_ids)


def test_the_sum_under_the_softmax_is_estimated_without_bias() -> None:
    target = Target()
    rows, labels = rows_and_labels()
    logits = whole(target, rows)
    exact = logits.exp().sum(dim=-1)
    sums = []
    for seed in range(2000):
        part = sampled(target, labels, 5, seed)
        losses = part.row_loss(part.head(rows), slice(0, len(rows)))
        label_logits = logits.gather(1, labels[:, None])[:, 0]
        sums.append((losses + label_logits).exp())
    drawn = torch.stack(sums)
    error = drawn.std(dim=0) / math.sqrt(len(drawn))
    assert ((drawn.mean(dim=0) - exact).abs() < 4 * error).all()
    assert (error < 0.01 * exact).all()


def test_the_labels_stand_first_and_nothing_stands_twice() -> None:
    _, labels = rows_and_labels()
    part = sampled(Target(), labels, 10)
    assert part.ids[:5].tolist() == [0, 3, 9, 20, 39]
    assert len(part.ids) == len(part.ids.unique()) == 15
    assert not torch.equal(part.ids, sampled(Target(), labels, 10, seed=1).ids)


def test_every_token_may_be_a_label() -> None:
    labels = torch.arange(N_TOKENS)
    part = sampled(Target(), labels, 5)
    logits = part.head(torch.randn(N_TOKENS, WIDTH))
    losses = part.row_loss(logits, slice(0, N_TOKENS))
    torch.testing.assert_close(
        losses, nn.functional.cross_entropy(logits, labels, reduction="none")
    )


@pytest.mark.parametrize(
    "head",
    [nn.Sequential(nn.Linear(WIDTH, N_TOKENS)), nn.Linear(WIDTH, N_TOKENS, device="meta")],
)
def test_a_head_that_is_not_plain_is_refused(head: nn.Module) -> None:
    target = Target()
    target.lm_head = head  # type: ignore[assignment]
    with pytest.raises(NotImplementedError, match="`n_sampled_tokens` needs a target whose head"):
        check_plain_head(target)


def test_training_takes_part_of_the_vocabulary_and_evaluation_all_of_it() -> None:
    target = training_target()
    drafter = training_drafter(target)
    batch = batch_of(generated_rows(target, 3))
    total = torch.tensor(5.0)
    plain = step_of(target, drafter).losses(drafter, batch, total, 4.0, 64)
    step = step_of(target, drafter, n_sampled_tokens=8)
    result = step.losses(drafter, batch, total, 4.0, 64)
    assert not torch.equal(result.row_losses, plain.row_losses)
    seen = set(batch["labels"][batch["predicts"]].tolist())
    assert len(set(result.predicted_ids.tolist()) | seen) <= len(seen) + 8
    again = step.losses(drafter, batch, total, 4.0, 64)
    assert torch.equal(result.row_losses, again.row_losses)  # a resumed run draws the same
    with torch.no_grad():
        evaluated = step.losses(drafter, batch, total, 4.0, 64)
    torch.testing.assert_close(evaluated.row_losses, plain.row_losses)
    assert torch.equal(evaluated.predicted_ids, plain.predicted_ids)


def test_what_is_drawn_does_not_depend_on_empty_slots() -> None:
    """Compiled attention keeps all slots: it must train on the tokens that any other kind does."""
    target = training_target()
    drafter = training_drafter(target)
    long, short = generated_rows(target, 2)
    rows = [long, {name: column[:9] for name, column in short.items()}]
    few, many = (batch_of(rows, keeps_slots=keeps_slots) for keeps_slots in (False, True))
    assert few["anchors"].shape[1] < many["anchors"].shape[1]
    assert bool((few["anchors"] < 0).any())
    step = step_of(target, drafter, n_sampled_tokens=8)
    one, other = (
        step.losses(drafter, batch, torch.tensor(5.0), 4.0, 64).row_losses for batch in (few, many)
    )
    torch.testing.assert_close(one, other)


def test_the_trainer_refuses_such_a_head_before_it_trains(tmp_path: Path) -> None:
    target = training_target()
    drafter = training_drafter(target)
    target.lm_head = nn.Sequential(target.lm_head)
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], n_sampled_tokens=8
    )
    with pytest.raises(NotImplementedError, match="got Sequential"):
        DFlashTrainer(drafter, target, args, train_dataset=generated_rows(training_target(), 2))
