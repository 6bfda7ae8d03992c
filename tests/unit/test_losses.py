from __future__ import annotations

import pytest
import torch

from hf_dflash.losses import block_chunks, decay_weights, dpace_weights


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
