"""The drafter's memory: keys and values of the context, one row a token, computed once.

Letters: N batch, L draft layers, heads = key/value heads, hd head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SMALLEST_CAPACITY = 256  # rows; a short chat then never reallocates


class _LayerBuffer:
    """Keys and values of one draft layer in a buffer with room to grow at its end."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.begin = 0  # first row that a later query may still see
        self.end = 0  # one past the last context row
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put rows after the context and return views of everything visible, new rows last."""
        held_keys, held_values = self._with_room(keys, values)
        stop = self.end + keys.shape[2]
        held_keys[:, :, self.end : stop] = keys
        held_values[:, :, self.end : stop] = values
        return held_keys[:, :, self.begin : stop], held_values[:, :, self.begin : stop]

    def commit(self, n_rows: int) -> None:
        """Make the first ``n_rows`` written rows context; the others are overwritten next time."""
        self.end += n_rows
        if self.window is not None:
            # The next query stands right after the context: it reaches window - 1 rows back.
            self.begin = max(self.begin, self.end - (self.window - 1))

    def drop(self, n_rows: int) -> None:
        self.end = max(self.end - n_rows, 0)
        self.begin = min(self.begin, self.end)

    def _with_room(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The two buffers, with room for new rows such as these behind the context."""
        n_new = keys.shape[2]
        capacity = 0 if self.keys is None else self.keys.shape[2]
        full = self.end + n_new > capacity
        if self.keys is None or self.values is None or full or not _takes(self.keys, keys):
            n_live = self.end - self.begin
            # Doubling makes the copies cost O(1) a row. A window's buffer stops growing: its live
            # rows are moved to the front instead.
            if 2 * (n_live + n_new) > capacity:
                capacity = max(2 * (n_live + n_new), _SMALLEST_CAPACITY)
            self.keys = self._moved(self.keys, keys, capacity)
            self.values = self._moved(self.values, values, capacity)
            self.begin, self.end = 0, n_live
        return self.keys, self.values

    def _moved(self, old: Tensor | None, like: Tensor, capacity: int) -> Tensor:
        batch, heads, _, size = like.shape
        new = like.new_empty(batch, heads, capacity, size)
        if old is not None:
            new[:, :, : self.end - self.begin] = old[:, :, self.begin : self.end]
        return new


def _takes(buffer: Tensor, rows: Tensor) -> bool:
    """Whether rows can be written to a buffer that may stem from an earlier turn of a chat.

    The drafter may have been moved or cast since. Inference mode's tensors are read-only outside.
    """
    writable = torch.is_inference_mode_enabled() or not buffer.is_inference()
    return writable and buffer.dtype == rows.dtype and buffer.device == rows.device


class ContextCache:
    """Context K/V of every draft layer. Block K/V pass through it and are never kept.

    A forward writes its new context rows and its block behind the context with `update`, reads
    both back as one view, and at its end `commit`s the context rows only. Full layers keep every
    row; a layer with window W keeps the W - 1 rows that the next block can reach, in a buffer
    that is a constant multiple of them.

    Args:
        windows: For each draft layer its window in tokens, `None` for full attention.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self._layers = [_LayerBuffer(window) for window in windows]
        self.n_context = 0  # tokens committed, those out of every window included
        self.end_slot = 0  # slots of the target's cache that are covered, padding included

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write rows of one layer behind its context, and read the whole back.

        Args:
            keys: (N, heads, S_new + B, hd), new context rows first, then the block.
            values: (N, heads, S_new + B, hd).
            layer_idx: Which draft layer.

        Returns:
            Keys and values, each (N, heads, visible context + S_new + B, hd), as views.
        """
        return self._layers[layer_idx].write(keys, values)

    def commit(self, n_rows: int) -> None:
        """Keep the first ``n_rows`` rows of the last `update` of every layer as context."""
        for layer in self._layers:
            layer.commit(n_rows)
        self.n_context += n_rows

    def drop(self, n_rows: int) -> None:
        """Forget the last ``n_rows`` tokens of the context.

        A windowed layer does not get back the rows that had left its window: after a long
        roll-back it sees a shorter context for a while. Drafts may get worse, outputs do not.
        """
        n_rows = min(n_rows, self.n_context)
        for layer in self._layers:
            layer.drop(n_rows)
        self.n_context -= n_rows

    def n_bytes(self) -> int:
        """Bytes that the buffers hold, room to grow included."""
        tensors = [t for layer in self._layers for t in (layer.keys, layer.values) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)
