from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_dflash.losses import (
    block_chunks,
    decay_weights,
    dpace_weights,
    lk_alpha,
    lk_lambda,
    total_variation,
)


def laws(seed: int, n_rows: int = 6, vocabulary: int = 13) -> tuple[Tensor, Tensor]:
    """Logits of a drafter and of a target, far from each other, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (n_rows, vocabulary)
    return tuple(3 * torch.randn(shape, generator=generator).double() for _ in range(2))  # type: ignore[return-value]


def plain_lk(p: list[float], q: list[float], eta: float) -> tuple[float, float]:
    """Both losses of one position, token by token."""
    accepted = sum(min(a, b) for a, b in zip(p, q, strict=True))
    kl = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
    variation = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    share = math.exp(-eta * accepted)
    return -math.log(accepted), share * kl + (1 - share) * variation


@pytest.mark.parametrize("eta", [0.0, 0.5, 3.0])
def test_lk_losses_are_their_definition(eta: float) -> None:
    drafter, target = laws(0)
    rows = slice(0, len(drafter))
    expected = [
        plain_lk(p, q, eta)
        for p, q in zip(target.softmax(-1).tolist(), drafter.softmax(-1).tolist(), strict=True)
    ]
    for i, loss in enumerate((lk_alpha(lambda _: target), lk_lambda(lambda _: target, eta))):
        assert loss(drafter, rows).tolist() == pytest.approx([e[i] for e in expected], abs=1e-12)


def test_the_gradient_of_lk_alpha_is_that_of_total_variation_over_alpha() -> None:
    """Since TV = 1 - alpha."""
    drafter, target = laws(1)
    gradients = []
    for kind in (lk_alpha, total_variation):
        logits = drafter.clone().requires_grad_()
        losses = kind(lambda _: target)(logits, slice(0, 6))
        gradients.append(torch.autograd.grad(losses.sum(), logits)[0])
    alpha = 1 - losses.detach()
    torch.testing.assert_close(gradients[0], gradients[1] / alpha[:, None], atol=1e-12, rtol=1e-10)


def test_lk_lambda_takes_no_gradient_of_its_share() -> None:
    drafter, target = laws(2)
    logits = drafter.clone().requires_grad_()
    p, q = target.softmax(-1), logits.softmax(-1)
    kl, variation = (p * (p / q).log()).sum(-1), (p - q).abs().sum(-1) / 2
    share = torch.exp(-2.0 * (1 - variation)).detach()
    (expected,) = torch.autograd.grad((share * kl + (1 - share) * variation).sum(), logits)
    got = lk_lambda(lambda _: target, 2.0)(logits, slice(0, 6))
    torch.testing.assert_close(torch.autograd.grad(got.sum(), logits)[0], expected)


def test_lk_losses_of_laws_without_overlap_are_finite() -> None:
    """In float32 the sum of minima underflows here; a loss of 200 has a gradient all the same."""
    drafter = torch.tensor([[200.0, 0.0]], requires_grad=True)
    target = torch.tensor([[0.0, 200.0]])
    # Either token is half of the overlap, and raising one of them is all that helps.
    for loss, slope in ((lk_alpha(lambda _: target), 0.5), (lk_lambda(lambda _: target, 3.0), 1.0)):
        value = loss(drafter, slice(0, 1))
        (gradient,) = torch.autograd.grad(value.sum(), drafter)
        assert float(value.detach()) == pytest.approx(200.0, abs=1.0)
        assert gradient[0].tolist() == pytest.approx([slope, -slope], abs=1e-5)


def test_lk_losses_of_the_same_law_are_nothing() -> None:
    _, target = laws(3)
    for loss in (lk_alpha(lambda _: target), lk_lambda(lambda _: target, 3.0)):
        assert loss(target, slice(0, 6)).tolist() == pytest.approx([0.0] * 6, abs=1e-12)


def test_the_papers_weights() -> None:
    printed = [1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368, 0.319, 0.276]
    assert decay_weights(10, 7.0).tolist() == pytest.approx(printed, abs=6e-4)
    assert decay_weights(3, None).tolist() == [1, 1, 1]


def test_dpace_of_a_sure_drafter_counts_the_slots_that_are_left() -> None:
    predicts = torch.tensor([[True, True, True], [True, True, False]])
    weights = dpace_weights(torch.zeros(2, 3), predicts, alpha=0.5)
    assert weights.tolist() == [[3, 2, 1], [2, 1, 0]]


def test_dpace_has_no_gradient() -> None:
    losses = torch.ones(1, 3, requires_grad=True)
    assert not dpace_weights(losses, torch.ones(1, 3, dtype=torch.bool), 0.5).requires_grad


def test_a_chunk_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`logits_chunk_size` must hold a whole block \(4 rows\)"):
        block_chunks(torch.tensor([1, 4]), 3)
