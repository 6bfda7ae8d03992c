"""What a decoding call returns besides tokens: records of every step, and statistics.

Letters: N batch (1), S rows of one forward, V vocabulary, Ht hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

_FIELDS = {f.name for f in dataclasses.fields(GenerateDecoderOnlyOutput)}
#: Name of the target's cache in model inputs and outputs: it changed in transformers 5.24.
CACHE_NAME = "cache" if "cache" in _FIELDS else "past_key_values"


@dataclass
class DecodingStatistics:
    """How one call of `generate` went.

    The first token comes from the prompt's forward and belongs to no cycle. The last cycle may
    have been cut short by a stop: only drafts that were emitted count as accepted. So
    ``sum(n_accepted) + n_cycles + 1`` is the number of new tokens, or one more than that where
    an accepted draft was the last of them and no bonus token followed.
    """

    n_accepted: list[int] = field(default_factory=list)  # accepted drafts of each cycle
    n_drafted: list[int] = field(default_factory=list)  # drafts proposed in each cycle
    target_forwards: int = 0  # the prompt's forward (one, however it is chunked) and verifications
    draft_forwards: int = 0

    @property
    def n_cycles(self) -> int:
        """Cycles of one draft and one verification."""
        return len(self.n_accepted)

    @property
    def acceptance_length(self) -> float:
        """Tau: mean of accepted drafts + 1 over cycles, in [1, B]; NaN without a cycle.

        Source: DFlash (arXiv:2602.06036), Eq. 1-3.
        """
        if not self.n_accepted:
            return float("nan")
        return sum(self.n_accepted) / len(self.n_accepted) + 1


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` of plain `generate`, and the decoding statistics."""

    statistics: DecodingStatistics | None = None


class StepRecords:
    """Collects what `return_dict_in_generate` asks for, one entry a token as plain decoding does.

    Args:
        generation_config: Of the call.
        layer_types: Of the target's layers, as in its config. Layers that share another's keys
            have no cache of their own: they show what the last layer of their type shows.
    """

    def __init__(self, generation_config: Any, layer_types: Sequence[str] | None = None) -> None:
        self._layer_types = layer_types
        wanted = bool(generation_config.return_dict_in_generate)
        self.returns_dict = wanted
        self._scores: list[Tensor] | None = (
            [] if wanted and generation_config.output_scores else None
        )
        self._logits: list[Tensor] | None = (
            [] if wanted and generation_config.output_logits else None
        )
        self._attentions: list[Any] | None = (
            [] if wanted and generation_config.output_attentions else None
        )
        self._hidden_states: list[Any] | None = (
            [] if wanted and generation_config.output_hidden_states else None
        )

    @property
    def wants_rows(self) -> bool:
        """Whether scores or logits of every token are asked for."""
        return self._scores is not None or self._logits is not None

    @property
    def scores(self) -> tuple[Tensor, ...] | None:
        """Processed scores so far, each (1, V); `None` if not asked for."""
        return None if self._scores is None else tuple(self._scores)

    def add_row(self, logits: Tensor, scores: Tensor) -> None:
        """Record the logits and processed scores (1, V) that a token was chosen from."""
        if self._scores is not None:
            self._scores.append(scores)
        if self._logits is not None:
            self._logits.append(logits)

    def add_prompt(self, outputs: Any) -> None:
        """Record attentions and hidden states of the prompt's forward, whole."""
        if self._attentions is not None:
            self._attentions.append(outputs.attentions)
        if self._hidden_states is not None:
            self._hidden_states.append(outputs.hidden_states)

    def add_block(self, outputs: Any, n_emitted: int, cache: Any) -> None:
        """Record the rows of a verification that plain decoding would have run one by one.

        Args:
            outputs: Of a forward over S tokens; row ``i`` led to the ``i``-th token emitted.
            n_emitted: How many of the rows count.
            cache: The target's cache, not yet rolled back; tells each layer's window.
        """
        attentions = outputs.attentions if self._attentions is not None else None
        kept = [] if attentions is None else self._cache_layers(cache, len(attentions))
        for i in range(n_emitted):
            if self._hidden_states is not None:
                # Copies: views would keep the rows of rejected drafts alive.
                rows = tuple(layer[:, i : i + 1].clone() for layer in outputs.hidden_states)
                self._hidden_states.append(rows)
            if self._attentions is not None:
                # Attention that never returns weights (sdpa) leaves nothing to be cut.
                self._attentions.append(
                    attentions
                    if not attentions or attentions[0] is None
                    else tuple(map(_row_of_attention, attentions, repeat(i), kept))
                )

    def _cache_layers(self, cache: Any, n_layers: int) -> list[Any]:
        types = self._layer_types or [""] * n_layers
        kept: list[Any] = []
        last_of: dict[str, Any] = {}
        for i, kind in enumerate(types[:n_layers]):
            layer = cache.layers[i] if i < len(cache.layers) else None
            if hasattr(layer, "get_seq_length"):  # a placeholder has no length
                last_of[kind] = layer
            kept.append(last_of.get(kind, layer))
        return kept

    def output(self, sequences: Tensor, cache: Any, statistics: DecodingStatistics) -> Any:
        """The whole as `generate` returns it."""
        records: dict[str, Any] = {
            "sequences": sequences,
            "statistics": statistics,
            "scores": self.scores,
            "logits": None if self._logits is None else tuple(self._logits),
            "attentions": None if self._attentions is None else tuple(self._attentions),
            "hidden_states": None if self._hidden_states is None else tuple(self._hidden_states),
            CACHE_NAME: cache,
        }
        return DFlashGenerateOutput(**records)


def _row_of_attention(weights: Tensor, row: int, layer: Any) -> Tensor:
    """The attention weights that a forward of this one row alone would have returned.

    Args:
        weights: (1, heads, S, keys) of a block of S rows, which are the last S keys.
        row: Which row.
        layer: That layer's cache: a static one always shows all its slots, a window shows
            at most its length.
    """
    if getattr(layer, "max_cache_len", None) is not None:
        return weights[:, :, row : row + 1].clone()
    last = weights.shape[-1] - weights.shape[-2] + row + 1
    window = getattr(layer, "sliding_window", None)
    first = 0 if window is None else max(0, last - window)
    return weights[:, :, row : row + 1, first:last].clone()
