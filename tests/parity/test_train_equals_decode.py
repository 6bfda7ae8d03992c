"""The logits of a block in training are those of the decode path for the same prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_dflash import attention_masks
from training_pairs import (
    BLOCK,
    DRAFTERS,
    TOLERANCE,
    UNCOMPILED_WARNING,
    assert_same_as_decoding,
    batch_of,
    block_logits,
    leave_flex_uncompiled,
    random_ids,
    row_of,
    training_drafter,
    training_target,
)

FLOAT32_TOLERANCE = 1e-5  # of the largest logit
LENGTHS = [5, 9, 17, 12, 8, 7, 20, 10, 14, 6, 9, 8, 11, 11, 5, 13, 7, 6, 10, 8]
DOCUMENTS = [random_ids(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks attend together, so that tiny batches are cut into parts as large ones are."""
    monkeypatch.setattr(attention_masks, "_PART_QUERIES", 3 * BLOCK)


@pytest.fixture(scope="module")
def target() -> Any:
    # In float64, what is left of differences is no rounding of long sums.
    return training_target(dtype=torch.float64)


def packed_rows() -> list[Any]:
    """The first seven documents in three rows, padded at the right."""
    rows = []
    for group in (DOCUMENTS[:3], DOCUMENTS[3:6], DOCUMENTS[6:7]):
        joined = [token for document in group for token in document]
        numbers = [i for i, document in enumerate(group, 1) for _ in document]
        mask = [int(place >= 3) for document in group for place in range(len(document))]
        padding = 60 - len(joined)
        rows.append(
            {
                "input_ids": joined + [0] * padding,
                "loss_mask": mask + [0] * padding,
                "document_ids": numbers + [0] * padding,
            }
        )
    return rows


def left_padded_rows() -> list[Any]:
    """The first six documents."""
    rows = []
    for document in DOCUMENTS[:6]:
        padding = 26 - len(document)
        row = row_of(document)
        rows.append(
            {
                "input_ids": [7] * padding + row["input_ids"],
                "loss_mask": [0] * padding + row["loss_mask"],
                "attention_mask": [0] * padding + [1] * len(document),
            }
        )
    return rows


LAYOUTS = {
    "padded at the right": [row_of(document) for document in DOCUMENTS[:6]],
    "padded at the left": left_padded_rows(),
    "packed": packed_rows(),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_anchor_of_twenty_sequences(target: Any, kind: str) -> None:
    drafter = training_drafter(target, kind)
    rows = [row_of(document) for document in DOCUMENTS]  # padded at the right to the longest
    assert_same_as_decoding(target, drafter, rows, DOCUMENTS)


@pytest.mark.parametrize("kind", ["dflash", "dflare, mixed", "sliding"])
@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings(UNCOMPILED_WARNING)
def test_other_attention_kernels(
    target: Any, kind: str, attention: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_flex_uncompiled(monkeypatch)
    drafter = training_drafter(target, kind, attn_implementation=attention)
    reference = training_drafter(target, kind)
    assert reference.config._attn_implementation == "sdpa"
    batch = batch_of(LAYOUTS[layout])
    expected = block_logits(target, reference, batch)
    real = batch["anchors"] >= 0
    got = block_logits(target, drafter, batch)
    torch.testing.assert_close(got[real], expected[real], atol=TOLERANCE, rtol=TOLERANCE)
    assert bool(got.isfinite().all())  # empty slots too


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash", "dflare, mixed", "sliding"])
def test_packed_documents(target: Any, kind: str) -> None:
    assert_same_as_decoding(target, training_drafter(target, kind), packed_rows(), DOCUMENTS[:7])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash", "dflare, mixed", "sliding"])
def test_padding_at_the_left(target: Any, kind: str) -> None:
    drafter = training_drafter(target, kind)
    assert_same_as_decoding(target, drafter, left_padded_rows(), DOCUMENTS[:6])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash", "dflare, mixed", "sliding"])
def test_in_float32(kind: str) -> None:
    """As models are trained; what differs is rounding, so it is measured by the logits' size."""
    target = training_target()
    drafter = training_drafter(target, kind)
    scale = float(block_logits(target, drafter, batch_of(packed_rows())).abs().max())
    tolerance = FLOAT32_TOLERANCE * scale
    assert_same_as_decoding(target, drafter, packed_rows(), DOCUMENTS[:7], tolerance)


@torch.no_grad()
def test_the_test_sees_a_break_of_it(target: Any) -> None:
    drafter = training_drafter(target)
    rows = [row_of(DOCUMENTS[1])]
    wrong = [[*DOCUMENTS[1][:2], 5, *DOCUMENTS[1][3:]]]  # another token in the context
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_same_as_decoding(target, drafter, rows, wrong)
