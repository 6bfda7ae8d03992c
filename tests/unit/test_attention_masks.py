"""Many blocks attend in parts; what comes out is what one dense table gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dflash import attention_masks, training_step
from hf_dflash.attention_masks import BlockMasks
from hf_dflash.blocks import BlockMaskRule
from training_pairs import (
    BLOCK,
    DRAFTERS,
    batch_of,
    random_ids,
    row_of,
    step_of,
    training_drafter,
    training_target,
)

# Two documents and padding; one document; a row that has no block, so its slots stay empty.
ROWS = [
    {
        "input_ids": random_ids(10, 1) + random_ids(9, 2) + [0],
        "loss_mask": [0, 0] + [1] * 8 + [0] + [1] * 8 + [0],
        "document_ids": [1] * 10 + [2] * 9 + [0],
    },
    row_of(random_ids(20, 3)),
    row_of(random_ids(5, 4), n_prompt=5),
]


class DenseRule:
    """The same rule without the anchors, by which it would be cut into parts."""

    def __init__(self, *arguments: Any) -> None:
        self.visible = BlockMaskRule(*arguments).visible


def outputs_and_gradients(target: Any, drafter: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    step = step_of(target, drafter)
    taps = step.target_states(batch).taps.clone().requires_grad_()
    hidden = step.hidden_states(drafter, batch, taps)
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(hidden.shape, generator=generator, dtype=hidden.dtype)
    gradients = torch.autograd.grad((hidden * weights).sum(), [taps, *drafter.parameters()])
    return [hidden.detach(), *gradients]


@pytest.mark.parametrize("n_queries", [1, 12, 256])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_parts_give_what_a_dense_table_gives(
    kind: str, attention: str, n_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = training_target(dtype=torch.float64)
    drafter = training_drafter(target, kind, attn_implementation=attention)
    batch = batch_of(ROWS)
    with monkeypatch.context() as dense:
        dense.setattr(training_step, "BlockMaskRule", DenseRule)
        expected = outputs_and_gradients(target, drafter, batch)
    monkeypatch.setattr(attention_masks, "_PART_QUERIES", n_queries)
    got = outputs_and_gradients(target, drafter, batch)
    for one, other in zip(got, expected, strict=True):
        # Eager's softmax is in float32, whatever the model's dtype.
        tolerance = 1e-5 if attention == "eager" else 1e-9
        assert float((one - other).norm()) <= tolerance * float(other.norm())


def test_a_part_reaches_as_far_as_its_last_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_masks, "_PART_QUERIES", 2 * BLOCK)
    drafter = training_drafter(training_target())
    anchors = torch.tensor([[3, 5, 9], [2, 7, -1]])
    rule = BlockMaskRule(anchors, torch.ones(2, 12, dtype=torch.long), BLOCK)
    masks = BlockMasks(drafter.config, torch.zeros(2, 3 * BLOCK, 32), rule)
    attention = drafter.layers[0].self_attn
    parts = masks.for_layer(attention, 12 + 3 * BLOCK)
    assert [(p.queries.start, p.queries.stop, p.n_context) for p in parts] == [
        (0, 8, 7),
        (8, 12, 9),
    ]
    keys = torch.arange(12 + 3 * BLOCK).view(1, 1, -1, 1)
    assert parts[1].of_keys(keys).flatten().tolist() == [*range(9), *range(20, 24)]
    assert parts[1].mask.shape[-2:] == (4, 13)
    assert masks.for_layer(attention, 12 + 3 * BLOCK) is parts
