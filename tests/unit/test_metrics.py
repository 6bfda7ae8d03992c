from __future__ import annotations

import pytest
import torch

from hf_dflash.metrics import acceptance_metrics


def test_a_right_draft_behind_a_wrong_one_does_not_count() -> None:
    right = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 1]])
    metrics = acceptance_metrics(right)
    assert metrics["acceptance_length"] == pytest.approx((3 + 1 + 2 + 4) / 4)
    assert [metrics[f"accuracy_{k}"] for k in (1, 2, 3)] == [0.75, 0.75, 0.75]
    # Errors go together, so the product of the marginals says something else.
    assert metrics["acceptance_length"] != pytest.approx(1 + 0.75 + 0.75**2 + 0.75**3)


def test_blocks_that_an_answer_ends_in_count_for_the_slots_they_have() -> None:
    right = torch.tensor([[1, 1, 1], [1, -1, -1], [0, -1, -1], [-1, -1, -1]])
    metrics = acceptance_metrics(right)
    assert metrics["n_blocks"] == 3
    assert metrics["acceptance_length"] == pytest.approx(1 + 2 / 3 + 1 + 1)


def test_padding_of_gathered_batches_predicts_nothing() -> None:
    assert acceptance_metrics(torch.tensor([[-100, -100], [1, 0]]))["n_blocks"] == 1


def test_slots_that_nothing_predicts_are_left_out_and_never_nan() -> None:
    assert acceptance_metrics(torch.full((3, 2), -1)) == {"n_blocks": 0.0}
    assert acceptance_metrics(torch.zeros(0, 2, dtype=torch.long)) == {"n_blocks": 0.0}
    metrics = acceptance_metrics(torch.tensor([[1, -1]]))
    assert metrics == {"n_blocks": 1.0, "accuracy_1": 1.0, "acceptance_length": 2.0}
