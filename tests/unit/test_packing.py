from __future__ import annotations

import pytest

from hf_dflash.collator import DFlashCollator, EpochRows
from hf_dflash.data import ChatRows
from hf_dflash.loss_mask import EncodedRow
from hf_dflash.packing import pack_rows


def test_packed_rows_are_what_a_collator_takes():
    rows = [EncodedRow([5, 6], [0, 1]), EncodedRow([7, 8, 9], [0, 1, 1]), EncodedRow([4], [1])]
    packed = pack_rows(rows, 5)
    assert packed[0] == EncodedRow([7, 8, 9, 5, 6], [0, 1, 1, 0, 1], [1, 1, 1, 2, 2])
    assert packed[1] == EncodedRow([4], [1], [1])
    numbered = EpochRows(ChatRows(packed))
    batch = DFlashCollator(block_size=4, n_anchors=3)([numbered[0], numbered[1]])
    assert batch["document_ids"].tolist() == [[1, 1, 1, 2, 2], [1, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0] * 5]
    assert batch["anchors"].tolist() == [[1, -1, -1], [-1] * 3]  # 6 ends its document


@pytest.mark.parametrize("n_tokens", [0, 6])
def test_a_row_that_does_not_fit_is_refused(n_tokens):
    rows = [EncodedRow([1], [1]), EncodedRow([1] * n_tokens, [1] * n_tokens)]
    with pytest.raises(ValueError, match=rf"lie in 1\.\.5, got {n_tokens} at 1\. Cut the"):
        pack_rows(rows, 5)
