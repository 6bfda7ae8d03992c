"""`ContextCache` against lists that say what each layer must see, for random sequences of calls."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_dflash.context_cache import ContextCache

WINDOWS = (None, 1, 2, 5, 40, 300)
# (rows written, how many of them are context, tokens forgotten afterwards)
STEPS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90), st.integers(0, 60)), max_size=14)


class NaiveLayer:
    """Row numbers that the next query can see."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.rows: list[int] = []

    def commit(self, rows: list[int]) -> None:
        self.rows += rows
        if self.window is not None:
            self.rows = self.rows[len(self.rows) - min(len(self.rows), self.window - 1) :]

    def drop(self, n_rows: int) -> None:
        self.rows = self.rows[: max(len(self.rows) - n_rows, 0)]


def numbered(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (1, 1, rows, 1) that carry their row's number."""
    keys = torch.tensor(rows, dtype=torch.float32).reshape(1, 1, -1, 1)
    return keys, -keys


@given(windows=st.lists(st.sampled_from(WINDOWS), min_size=1, max_size=3), steps=STEPS)
def test_every_view_is_the_visible_context_and_then_the_new_rows(windows, steps):
    cache = ContextCache(windows)
    naive = [NaiveLayer(window) for window in windows]
    n_written = n_context = 0
    for n_rows, n_kept, n_forgotten in steps:
        n_kept = min(n_kept, n_rows)
        rows = list(range(n_written, n_written + n_rows))
        n_written += n_rows
        for i, layer in enumerate(naive):
            keys, values = cache.update(*numbered(rows), i)
            assert keys.flatten().tolist() == layer.rows + rows
            assert torch.equal(values, -keys)
        cache.commit(n_kept)
        n_context += n_kept
        for layer in naive:
            layer.commit(rows[:n_kept])
        cache.drop(n_forgotten)
        n_context = max(n_context - n_forgotten, 0)
        for layer in naive:
            layer.drop(n_forgotten)
        assert cache.n_context == n_context
    for i, layer in enumerate(naive):
        keys, _ = cache.update(*numbered([]), i)
        assert keys.flatten().tolist() == layer.rows


@given(
    window=st.integers(1, 200),
    chunks=st.lists(st.integers(1, 64), min_size=40, max_size=60),
    n_block=st.integers(1, 16),
)
def test_a_windows_buffer_is_bounded_by_what_is_written_at_once(window, chunks, n_block):
    cache = ContextCache([window])
    most = window - 1 + max(chunks) + n_block
    for n_new in chunks * 4:
        cache.update(*numbered([0] * (n_new + n_block)), 0)
        cache.commit(n_new)
        n_slots = cache.n_bytes() // (2 * 4)  # keys and values of one float each
        assert n_slots <= max(256, 2 * most)
    assert cache.n_context == 4 * sum(chunks)


@given(chunks=st.lists(st.integers(0, 64), max_size=60), n_block=st.integers(1, 16))
def test_a_full_layers_buffer_is_at_most_twice_its_rows(chunks, n_block):
    cache = ContextCache([None])
    for n_new in chunks:
        cache.update(*numbered([0] * (n_new + n_block)), 0)
        cache.commit(n_new)
    n_slots = cache.n_bytes() // (2 * 4)
    assert n_slots <= max(256, 2 * (sum(chunks) + n_block))
