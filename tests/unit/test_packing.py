from __future__ import annotations

import pytest

from hf_dflash.loss_mask import EncodedRow
from hf_dflash.packing import pack_rows


def test_a_packed_row_is_what_a_collator_takes():
    rows = [EncodedRow([5, 6], [0, 1]), EncodedRow([7, 8, 9], [0, 1, 1]), EncodedRow([4], [1])]
    packed = pack_rows(rows, 5, pad_id=0)
    assert packed.members == [[1, 0], [2]]
    first = packed[0]
    assert first["input_ids"].tolist() == [7, 8, 9, 5, 6]
    assert first["loss_mask"].tolist() == [0, 1, 1, 0, 1]
    assert first["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert first["document_ids"].tolist() == [0, 0, 0, 1, 1]
    assert packed[-1]["document_ids"].tolist() == [0, -1, -1, -1, -1]
    assert (len(packed), first["row_id"], packed[-1]["row_id"]) == (2, 0, 1)
    with pytest.raises(IndexError):
        packed[2]


@pytest.mark.parametrize("n_tokens", [0, 6])
def test_a_row_that_does_not_fit_is_refused(n_tokens):
    rows = [EncodedRow([1], [1]), EncodedRow([1] * n_tokens, [1] * n_tokens)]
    with pytest.raises(ValueError, match=rf"lie in 1\.\.5, got {n_tokens} at 1\. Cut the"):
        pack_rows(rows, 5, pad_id=0)
