"""Which keys a block may attend to, as each attention implementation wants to be told.

Letters: N batch, S context length, B block size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS


class BlockMasks:
    """Attention masks of one forward, built at most once for each kind of layer.

    Args:
        config: The drafter's config.
        block: (N, B, H) input of the draft layers, for sizes, dtype and device.
        mask: `None`; (N, S + B) with 0 for padding; or an object whose ``visible(causal, window)``
            is a mask function of batch, head, query and key indices (`BlockMaskRule`).

    Raises:
        NotImplementedError: A mask function with flash attention, which would not apply it.
    """

    def __init__(self, config: Any, block: Tensor, mask: Any | None) -> None:
        self._implementation = config._attn_implementation
        self._block = block
        self._rule = mask if hasattr(mask, "visible") else None
        padding = mask if self._rule is None else None
        self._padding = None if padding is None or bool(padding.all()) else padding.bool()
        self._made: dict[tuple[bool, int | None, int], Any] = {}
        if self._rule is not None and "flash" in self._implementation:
            raise NotImplementedError(
                f"`attn_implementation`={self._implementation!r} cannot train several blocks in "
                'one pass: it takes no such mask. Use "flex_attention", "sdpa" or "eager".'
            )

    def for_layer(self, attention: Any, n_keys: int) -> Any:
        """The mask of a layer whose last B keys are the block's own.

        Source: the field's rule (z-lab, SGLang): a window W reaches distance W - 1; layers that
        are not causal look ahead as far inside the block.
        """
        kind = (attention.is_causal, attention.window, n_keys)
        if kind not in self._made:
            self._made[kind] = self._make(*kind)
        return self._made[kind]

    def _make(self, causal: bool, window: int | None, n_keys: int) -> Any:
        n_batch, n_block = self._block.shape[:2]
        if self._rule is not None:
            offset, visible = 0, self._rule.visible(causal, window)
        else:
            window = None if window is None or n_keys <= window else window
            if self._padding is None and window is None and not causal:
                return None
            offset, visible = n_keys - n_block, _visible(causal, window)
        make = ALL_MASK_ATTENTION_FUNCTIONS[self._implementation]
        return make(
            batch_size=n_batch,
            q_length=n_block,
            kv_length=n_keys,
            q_offset=offset,
            kv_offset=0,
            mask_function=visible,
            attention_mask=None if self._padding is None else self._padding[:, -n_keys:],
            allow_is_causal_skip=False,
            dtype=self._block.dtype,
            device=self._block.device,
        )


def _visible(
    causal: bool, window: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = key <= query if causal else key >= 0
        if window is not None:
            allowed = allowed & (query - key < window) & (key - query < window)
        return allowed

    return visible
