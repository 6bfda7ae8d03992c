"""Anchors, targets, positions and masks against plain loops written from their definition."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_dflash import blocks

MASK_ID = 99


@st.composite
def packed_rows(draw: Any, n_rows: int = 1, min_tokens: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, loss masks and documents of rows with padding at either end and in between."""
    n_tokens = draw(st.integers(min_tokens, 14))
    ids, masks, documents = [], [], []
    for _ in range(n_rows):
        runs = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=5))
        row = [document for document, length in runs for _ in range(length)]
        row = (row + [0] * n_tokens)[:n_tokens]
        documents.append(blocks.number_documents(torch.tensor(row)))
        supervised = draw(st.lists(st.booleans(), min_size=n_tokens, max_size=n_tokens))
        masks.append(torch.tensor(supervised) & (documents[-1] > 0))
        ids.append(torch.arange(n_tokens) + 1)
    return torch.stack(ids), torch.stack(masks), torch.stack(documents)


def loop_valid(mask: list[bool], documents: list[int]) -> list[bool]:
    valid = []
    for a in range(len(mask)):
        next_is_there = a + 1 < len(mask) and documents[a + 1] == documents[a]
        valid.append(bool(documents[a] > 0 and mask[a] and next_is_there and mask[a + 1]))
    return valid


@given(packed_rows())
def test_an_anchor_and_its_next_token_are_supervised_in_one_document(rows: Any) -> None:
    _, mask, documents = rows
    expected = loop_valid(mask[0].tolist(), documents[0].tolist())
    assert blocks.valid_anchors(mask[0], documents[0]).tolist() == expected


@given(packed_rows())
def test_documents_and_positions(rows: Any) -> None:
    documents = rows[2][0].tolist()
    seen, position, positions = 0, 0, []
    for i, document in enumerate(documents):
        is_new = document and (i == 0 or documents[i - 1] != document)
        position = 0 if is_new or not document else position + 1
        seen += bool(is_new)
        positions.append(position)
        assert document in (0, seen)
    assert blocks.document_positions(rows[2][0]).tolist() == positions


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 12), st.integers(0, 99))
def test_drawn_anchors_are_distinct_valid_sorted_and_as_many_as_fit(
    valid: list[bool], n_slots: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = blocks.draw_anchors(torch.tensor(valid), n_slots, generator).tolist()
    real = [a for a in drawn if a >= 0]
    assert len(drawn) == n_slots
    assert drawn == real + [-1] * (n_slots - len(real))
    assert len(real) == min(n_slots, sum(valid))
    assert real == sorted(set(real))
    assert all(valid[a] for a in real)


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(1, 12),
    st.integers(2, 6),
)
def test_fixed_anchors_divide_each_run(valid: list[bool], n_slots: int, size: int) -> None:
    expected, run = [], 0
    for place, is_valid in enumerate(valid):
        if is_valid and run % size == 0:
            expected.append(place)
        run = run + 1 if is_valid else 0
    expected = (expected + [-1] * n_slots)[:n_slots]
    assert blocks.fixed_anchors(torch.tensor(valid), n_slots, size).tolist() == expected


@given(packed_rows(n_rows=2), st.integers(2, 6), st.data())
def test_targets_stop_at_the_first_token_that_is_not_supervised(
    rows: Any, size: int, data: Any
) -> None:
    ids, mask, documents = rows
    anchors = _some_anchors(mask, documents, data)
    got = blocks.block_targets(ids, mask, documents, anchors, size)
    for n, row in enumerate(anchors.tolist()):
        for i, anchor in enumerate(row):
            alive = anchor >= 0
            for slot in range(size):
                place = anchor + slot
                alive = alive and place < ids.shape[1] and bool(mask[n, place])
                alive = alive and bool(documents[n, place] == documents[n, anchor])
                predicts = alive and slot > 0
                assert bool(got.predicts[n, i, slot]) == predicts
                assert int(got.labels[n, i, slot]) == (int(ids[n, place]) if predicts else 0)
    if bool((anchors >= 0).any()):
        assert bool(got.predicts.any())


@given(packed_rows(n_rows=2), st.integers(2, 6), st.data())
def test_noise_and_positions(rows: Any, size: int, data: Any) -> None:
    ids, mask, documents = rows
    anchors = _some_anchors(mask, documents, data)
    places = torch.stack([blocks.document_positions(row) for row in documents])
    noise = blocks.block_noise_ids(ids, anchors, size, MASK_ID).view(2, -1, size)
    positions = blocks.block_positions(places, anchors, size).view(2, -1, size)
    for n, row in enumerate(anchors.tolist()):
        for i, anchor in enumerate(row):
            if anchor < 0:
                continue
            assert noise[n, i].tolist() == [int(ids[n, anchor])] + [MASK_ID] * (size - 1)
            start = int(places[n, anchor])
            assert positions[n, i].tolist() == list(range(start, start + size))


@given(
    packed_rows(n_rows=2),
    st.integers(2, 5),
    st.booleans(),
    st.none() | st.integers(1, 9),
    st.data(),
)
def test_a_query_sees_its_document_before_its_anchor_and_its_block(
    rows: Any, size: int, causal: bool, window: int | None, data: Any
) -> None:
    _, mask, documents = rows
    anchors = _some_anchors(mask, documents, data)
    rule = blocks.BlockMaskRule(anchors, documents, size)
    n_context, n_block = mask.shape[1], anchors.shape[1] * size
    got = _dense(rule.visible(causal, window), 2, n_block, n_context + n_block)
    for n in range(2):
        for query in range(n_block):
            anchor, slot = int(anchors[n, query // size]), query % size
            for key in range(n_context + n_block):
                distance, expected = 0, False
                if key < n_context:
                    same = anchor >= 0 and documents[n, key] == documents[n, anchor]
                    expected = bool(same) and key < anchor
                    distance = anchor + slot - key
                elif (key - n_context) // size == query // size:
                    key_slot = (key - n_context) % size
                    expected = key_slot <= slot or not causal
                    distance = abs(slot - key_slot)
                expected = expected and (window is None or distance < window)
                assert bool(got[n, query, key]) == expected, (n, query, key)
    assert bool(got.any(dim=-1).all())  # a row that sees nothing would be NaN


def _dense(visible: Any, n_rows: int, n_queries: int, n_keys: int) -> Tensor:
    row = torch.arange(n_rows)[:, None, None]
    query = torch.arange(n_queries)[None, :, None]
    key = torch.arange(n_keys)[None, None, :]
    return visible(row, torch.zeros_like(row), query, key)


def _some_anchors(mask: Tensor, documents: Tensor, data: Any) -> Tensor:
    n_slots = data.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    return torch.stack(
        [
            blocks.draw_anchors(blocks.valid_anchors(m, d), n_slots, generator)
            for m, d in zip(mask, documents, strict=True)
        ]
    )
