"""Which keys a block may attend to, as each attention implementation wants to be told.

Letters: N batch, S context length, B block size; in training B counts the slots of all blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Queries of one part in training. Fewer cost more calls, more waste more on foreign blocks
# (measured on CPUs: 256 is best or near it for 230 to 1024 tokens and 24 to 512 anchors).
_PART_QUERIES = 256


def part_queries(block_size: int) -> int:
    """Queries of one part in training: whole blocks."""
    return max(1, _PART_QUERIES // block_size) * block_size


@dataclass(frozen=True, slots=True)
class Part:
    """Queries that attend together: to the first ``n_context`` keys, and to their own."""

    queries: slice
    n_context: int
    own_keys: slice
    mask: Any

    def of_keys(self, states: Tensor) -> Tensor:
        """Their rows of keys or values (N, heads, S + B, hd)."""
        if self.own_keys.start == self.n_context:
            return states[:, :, : self.own_keys.stop]
        return torch.cat([states[:, :, : self.n_context], states[:, :, self.own_keys]], dim=2)


class BlockMasks:
    """Attention masks of one forward, built at most once for each kind of layer.

    Args:
        config: The drafter's config.
        block: (N, B, H) input of the draft layers, for sizes, dtype and device.
        mask: `None`; (N, S + B) with 0 for padding; or an object whose ``visible(causal, window)``
            is a mask function of batch, head, query and key indices, with the ``anchors`` (N, A)
            of its blocks (`BlockMaskRule`).

    Raises:
        NotImplementedError: A mask function with flash attention, which would not apply it.
    """

    def __init__(self, config: Any, block: Tensor, mask: Any | None) -> None:
        self._implementation = config._attn_implementation
        self._block = block
        self._rule = mask if hasattr(mask, "visible") else None
        padding = mask if self._rule is None else None
        self._padding = None if padding is None or bool(padding.all()) else padding.bool()
        self._made: dict[tuple[bool, int | None, int], list[Part]] = {}
        if self._rule is not None and "flash" in self._implementation:
            raise NotImplementedError(
                f"`attn_implementation`={self._implementation!r} cannot train several blocks in "
                'one pass: it takes no such mask. Use "flex_attention", "sdpa" or "eager".'
            )

    def for_layer(self, attention: Any, n_keys: int) -> list[Part]:
        """How a layer attends whose last B keys are the block's own.

        All at once; but many blocks in parts, because no block sees another, and a dense table
        would mostly be computed for nothing. Flex attention leaves out what is masked itself.

        Source: the field's rule (z-lab, SGLang): a window W reaches distance W - 1; layers that
        are not causal look ahead as far inside the block.
        """
        kind = (attention.is_causal, attention.window, n_keys)
        if kind not in self._made:
            self._made[kind] = self._parts(*kind)
        return self._made[kind]

    def _parts(self, causal: bool, window: int | None, n_keys: int) -> list[Part]:
        n_block = self._block.shape[1]
        n_context = n_keys - n_block
        anchors = getattr(self._rule, "anchors", None)
        if self._rule is None or anchors is None or self._implementation == "flex_attention":
            mask = self._whole(causal, window, n_keys)
            return [Part(slice(0, n_block), n_context, slice(n_context, n_keys), mask)]
        size = n_block // anchors.shape[1]
        step = part_queries(size)
        # A block sees the context before its anchor only: the last anchor of a part is its reach.
        reach = anchors.amax(dim=0).clamp(min=0).tolist()
        parts = []
        for first in range(0, n_block, step):
            last = min(first + step, n_block)
            n_seen = max(reach[first // size : last // size])
            visible = _moved(self._rule.visible(causal, window), n_seen, n_context + first)
            mask = self._make(visible, last - first, n_seen + last - first, first)
            own = slice(n_context + first, n_context + last)
            parts.append(Part(slice(first, last), n_seen, own, mask))
        return parts

    def _whole(self, causal: bool, window: int | None, n_keys: int) -> Any:
        n_block = self._block.shape[1]
        if self._rule is not None:
            return self._make(self._rule.visible(causal, window), n_block, n_keys, 0)
        window = None if window is None or n_keys <= window else window
        if self._padding is None and window is None and not causal:
            return None
        return self._make(_visible(causal, window), n_block, n_keys, n_keys - n_block)

    def _make(self, visible: MaskFunction, n_queries: int, n_keys: int, offset: int) -> Any:
        make = ALL_MASK_ATTENTION_FUNCTIONS[self._implementation]
        return make(
            batch_size=self._block.shape[0],
            q_length=n_queries,
            kv_length=n_keys,
            q_offset=offset,
            kv_offset=0,
            mask_function=visible,
            attention_mask=None if self._padding is None else self._padding[:, -n_keys:],
            allow_is_causal_skip=False,
            dtype=self._block.dtype,
            device=self._block.device,
        )


def _moved(visible: MaskFunction, n_seen: int, own_start: int) -> MaskFunction:
    """The rule for keys of which those from ``n_seen`` to ``own_start`` were left out."""

    def moved(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = torch.where(key < n_seen, key, key - n_seen + own_start)
        return visible(row, head, query, place)

    return moved


def _visible(causal: bool, window: int | None) -> MaskFunction:
    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = key <= query if causal else key >= 0
        if window is not None:
            allowed = allowed & (query - key < window) & (key - query < window)
        return allowed

    return visible
