"""Chunked losses against the same losses made at once, and weights against plain loops."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from hf_dflash import losses

HIDDEN, VOCAB = 6, 11
KINDS = ("cross_entropy", "forward_kl", "total_variation", "lk_alpha", "lk_lambda")
ETA = 1.7  # not the default


def heads(dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    linear = nn.Linear(HIDDEN, VOCAB, dtype=dtype).requires_grad_(False)
    return {"plain": linear, "soft cap": lambda rows: torch.tanh(linear(rows) / 2.0) * 2.0}


def row_losses(kind: str, logits: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
    """The definitions, on all rows at once."""
    q, p = logits.softmax(dim=-1), teacher.softmax(dim=-1)
    if kind == "cross_entropy":
        return -q[torch.arange(len(q)), labels].log()
    kl = (p * (p.log() - q.log())).sum(dim=-1)
    variation = (p - q).abs().sum(dim=-1) / 2
    accepted = torch.minimum(p, q).sum(dim=-1)
    share = torch.exp(-ETA * accepted.detach())
    return {
        "forward_kl": kl,
        "total_variation": variation,
        "lk_alpha": -accepted.log(),
        "lk_lambda": share * kl + (1 - share) * variation,
    }[kind]


def make_row_loss(kind: str, labels: Tensor, teacher: Tensor) -> Any:
    if kind == "cross_entropy":
        return losses.cross_entropy(labels)
    options = {"eta": ETA} if kind == "lk_lambda" else {}
    return getattr(losses, kind)(lambda rows: teacher[rows], **options)


@settings(max_examples=40)
@given(
    n_rows=st.integers(1, 9),
    chunk=st.integers(1, 10),
    kind=st.sampled_from(KINDS),
    head_name=st.sampled_from(["plain", "soft cap"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 50),
)
def test_chunks_change_neither_loss_nor_gradient(
    n_rows: int, chunk: int, kind: str, head_name: str, dtype: torch.dtype, seed: int
) -> None:
    head = heads(dtype)[head_name]
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n_rows, HIDDEN, generator=generator, dtype=dtype)
    teacher = torch.randn(n_rows, VOCAB, generator=generator, dtype=dtype)
    labels = torch.randint(VOCAB, (n_rows,), generator=generator)
    weights = torch.rand(n_rows, generator=generator, dtype=dtype)
    total = weights.sum() * 1.7

    whole = hidden.clone().requires_grad_()
    expected = (row_losses(kind, head(whole), labels, teacher) * weights).sum() / total
    (expected * 3).backward()

    pieces = hidden.clone().requires_grad_()
    n_seen = []

    def counting_head(rows: Tensor) -> Tensor:
        n_seen.append(len(rows))
        return head(rows)

    got = losses.chunked_loss(
        pieces,
        counting_head,
        make_row_loss(kind, labels, teacher),
        losses.fixed_weights(weights),
        total,
        losses.row_chunks(n_rows, chunk),
    )
    (got.loss * 3).backward()
    assert abs(float((got.loss - expected).detach())) < 1e-6
    torch.testing.assert_close(pieces.grad, whole.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        got.row_losses.to(dtype), row_losses(kind, head(hidden), labels, teacher), atol=1e-6, rtol=0
    )
    assert got.predicted_ids.tolist() == head(hidden).argmax(dim=-1).tolist()
    assert max(n_seen) <= chunk
    assert sum(n_seen) == n_rows  # no row twice


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.integers(5, 14),
    st.integers(0, 9),
    st.sampled_from([0.1, 0.5, 1.0]),
)
def test_dpace_in_chunks_of_whole_blocks(
    rows_per_block: list[int], most: int, seed: int, alpha: float
) -> None:
    counts = torch.tensor(rows_per_block)
    predicts = torch.arange(5)[None] < counts[:, None]
    generator = torch.Generator().manual_seed(seed)
    row_losses_ = torch.rand(int(counts.sum()), generator=generator) * 3
    chunks = losses.block_chunks(counts, most)
    assert [i for rows in chunks for i in range(rows.start, rows.stop)] == list(
        range(len(row_losses_))
    )
    assert all(rows.stop - rows.start <= most for rows in chunks)

    weigh = losses.dpace_row_weights(predicts, alpha)
    got = [w for rows in chunks for w in weigh(row_losses_[rows], rows).tolist()]
    start, expected = 0, []
    for count in rows_per_block:  # the definition, block by block
        q = [
            (1 - alpha) * math.exp(-float(loss)) + alpha
            for loss in row_losses_[start : start + count]
        ]
        expected += [sum(math.prod(q[: m + 1]) for m in range(j, count)) for j in range(count)]
        start += count
    assert got == pytest.approx(expected, rel=1e-5)


@given(st.integers(1, 20), st.floats(0.5, 20))
def test_decay(n_drafts: int, gamma: float) -> None:
    expected = [math.exp(-(k - 1) / gamma) for k in range(1, n_drafts + 1)]
    assert losses.decay_weights(n_drafts, gamma).tolist() == pytest.approx(expected, rel=1e-5)


@given(st.integers(1, 50), st.floats(1, 9), st.floats(1, 9))
def test_gamma_is_a_line_from_first_to_last(n_steps: int, first: float, last: float) -> None:
    gammas = [losses.progressive_gamma(i, n_steps, first, last) for i in range(n_steps)]
    assert gammas[0] == first
    if n_steps > 1:
        assert gammas[-1] == pytest.approx(last)
    slopes = [b - a for a, b in pairwise(gammas)]
    assert slopes == pytest.approx([(last - first) / max(1, n_steps - 1)] * len(slopes), abs=1e-9)
    assert losses.progressive_gamma(n_steps + 5, n_steps, first, last) == pytest.approx(last)


@settings(max_examples=40)
@given(
    head_name=st.sampled_from(["plain", "soft cap"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    has_offsets=st.booleans(),
    weighting=st.sampled_from(["fixed", "dpace"]),
    chunk=st.integers(3, 9),
    seed=st.integers(0, 50),
)
def test_the_closed_gradient_is_that_of_autograd(
    head_name: str, dtype: torch.dtype, has_offsets: bool, weighting: str, chunk: int, seed: int
) -> None:
    head = heads(dtype)[head_name]
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor([3, 1, 2, 3])
    predicts = torch.arange(3)[None] < counts[:, None]
    hidden = (3 * torch.randn(9, HIDDEN, generator=generator)).to(dtype)
    labels = torch.randint(VOCAB, (9,), generator=generator)
    offsets = torch.randn(VOCAB, generator=generator) if has_offsets else None
    closed = losses.CrossEntropy(labels, offsets)
    weights = losses.fixed_weights(torch.rand(9, generator=generator))
    if weighting == "dpace":
        weights = losses.dpace_row_weights(predicts, 0.5)
    results, gradients = [], []
    for row_loss in (closed, lambda logits, rows: closed(logits, rows)):
        pieces = hidden.clone().requires_grad_()
        chunks = losses.block_chunks(counts, chunk)
        result = losses.chunked_loss(pieces, head, row_loss, weights, torch.tensor(1.7), chunks)
        (gradient,) = torch.autograd.grad(result.loss, pieces)
        results.append(result)
        gradients.append(gradient)
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype.itemsize > 2 else {"atol": 1e-3, "rtol": 2e-2}
    torch.testing.assert_close(gradients[0], gradients[1], **close)
    torch.testing.assert_close(results[0].row_losses, results[1].row_losses, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(results[0].loss, results[1].loss, atol=1e-6, rtol=1e-5)
    assert gradients[0].abs().max() > 1e-4


def test_large_logits_cost_the_closed_loss_no_digits() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)) + 5000
    labels = torch.arange(5)
    got, _, _ = losses.CrossEntropy(labels).with_slopes(
        logits, slice(0, 5), losses.fixed_weights(torch.ones(5))
    )
    exact = F.cross_entropy(logits.double(), labels, reduction="none")
    torch.testing.assert_close(got.double(), exact, atol=1e-6, rtol=0)


def test_no_rows_give_zero_and_a_graph() -> None:
    hidden = torch.randn(0, HIDDEN, requires_grad=True)
    result = losses.chunked_loss(
        hidden,
        heads(torch.float32)["plain"],
        losses.cross_entropy(torch.zeros(0, dtype=torch.long)),
        losses.fixed_weights(torch.zeros(0)),
        torch.tensor(0.0),
        losses.row_chunks(0, 4),
    )
    result.loss.backward()
    assert float(result.loss.detach()) == 0.0
    assert hidden.grad is not None


def test_the_loss_of_a_bf16_head_is_taken_in_float32() -> None:
    head = heads(torch.bfloat16)["plain"]
    hidden = torch.randn(4, HIDDEN, requires_grad=True)
    labels = torch.tensor([1, 2, 3, 4])
    result = losses.chunked_loss(
        hidden,
        lambda rows: head(rows.to(torch.bfloat16)),
        losses.cross_entropy(labels),
        losses.fixed_weights(torch.ones(4)),
        torch.tensor(4.0),
        losses.row_chunks(4, 2),
    )
    expected = F.cross_entropy(head(hidden.to(torch.bfloat16)).float(), labels)
    assert result.row_losses.dtype == torch.float32
    torch.testing.assert_close(result.loss, expected, atol=1e-6, rtol=0)
