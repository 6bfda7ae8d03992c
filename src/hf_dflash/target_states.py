"""What training reads of the target: tapped and last hidden states of every token of a batch.

Letters: N rows, S tokens a row, G documents run together, T taps, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .blocks import PADDING
from .outputs_dflash import CACHE_NAME
from .target import TargetTaps, input_device


@dataclass(frozen=True, slots=True)
class TargetStates:
    """Hidden states of a batch; rows of padding hold anything finite."""

    taps: Tensor  # (N, S, T * Ht), raw outputs of the tapped layers
    last_hidden_states: Tensor | None  # (N, S, Ht), what the head reads; None if not asked for


@dataclass(frozen=True, slots=True)
class Span:
    """Where a document stands."""

    row: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """In tokens."""
        return self.stop - self.start


def document_spans(document_ids: Tensor) -> list[Span]:
    """Find the documents of a batch.

    >>> document_spans(torch.tensor([[0, 1, 1, 2]]))
    [Span(row=0, start=1, stop=3), Span(row=0, start=3, stop=4)]

    Args:
        document_ids: (N, S) int64, 0 for padding.
    """
    ids = document_ids.cpu()
    edge = torch.full((len(ids), 1), -1)
    changes = torch.cat([edge, ids], dim=1) != torch.cat([ids, edge], dim=1)  # (N, S + 1)
    spans = []
    for row, places in enumerate(changes):
        cuts = places.nonzero()[:, 0].tolist()
        spans += [
            Span(row, start, stop) for start, stop in pairwise(cuts) if ids[row, start] != PADDING
        ]
    return spans


@torch.no_grad()
def run_target(
    target: Any,
    layer_ids: Sequence[int],
    input_ids: Tensor,
    document_ids: Tensor,
    *,
    keeps_last: bool = False,
    cache: Any | None = None,
) -> TargetStates:
    """Run the target over a batch, each document by itself.

    How a model keeps packed documents apart differs between families and attention kernels, and
    recurrent layers cannot. So documents are unpacked: padded at the right, similar lengths
    together, never more tokens at once than the batch has.

    Args:
        target: The target model, in eval mode.
        layer_ids: 0-based decoder layers to tap.
        input_ids: (N, S) int64.
        document_ids: (N, S) int64, 0 for padding.
        keeps_last: Whether the last hidden states are wanted too.
        cache: Takes the keys and values of rows that hold one text each.

    Raises:
        NotImplementedError: A cache, but several texts to a row.
    """
    n_rows, n_tokens = input_ids.shape
    spans = document_spans(document_ids)
    if [(s.row, s.start) for s in spans] == [(row, 0) for row in range(n_rows)]:
        lengths = [s.length for s in spans]
        ids = input_ids[:, : max(lengths)]
        return _filled_up(_run(target, layer_ids, ids, lengths, keeps_last, cache), n_tokens)
    if cache is not None:
        raise NotImplementedError(
            "`on_policy` needs rows of one text each, from the first token on, got packed ones or "
            "padding at the left. Prepare them without `--pack`."
        )
    taps: Tensor | None = None
    last: Tensor | None = None
    for group in _groups(spans, n_rows * n_tokens):
        ids = input_ids.new_zeros(len(group), group[0].length)
        for place, span in zip(ids, group, strict=True):
            place[: span.length] = input_ids[span.row, span.start : span.stop]
        states = _run(target, layer_ids, ids, [s.length for s in group], keeps_last)
        taps = _scatter(states.taps, group, input_ids.shape, taps)
        if states.last_hidden_states is not None:
            last = _scatter(states.last_hidden_states, group, input_ids.shape, last)
    if taps is None:  # nothing but padding: one token of it tells the sizes
        states = _run(target, layer_ids, input_ids[:, :1], [1] * n_rows, keeps_last)
        taps = states.taps.expand(-1, n_tokens, -1)
        kept = states.last_hidden_states
        last = None if kept is None else kept.expand(-1, n_tokens, -1)
    return TargetStates(taps, last)


def _groups(spans: Sequence[Span], most_tokens: int) -> Iterator[list[Span]]:
    """Documents to run together, longest first, at most ``most_tokens`` with padding."""
    group: list[Span] = []
    for span in sorted(spans, key=lambda s: -s.length):
        if group and group[0].length * (len(group) + 1) > most_tokens:
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _run(
    target: Any,
    layer_ids: Sequence[int],
    ids: Tensor,
    lengths: Sequence[int],
    keeps_last: bool,
    cache: Any | None = None,
) -> TargetStates:
    """One forward over rows (G, S) that are padded at the right."""
    device = ids.device
    runs_on = input_device(target.get_input_embeddings(), device)
    mask = None
    if min(lengths) < ids.shape[1]:
        mask = torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]
        mask = mask.long().to(runs_on)
    with TargetTaps(target, layer_ids) as taps, taps.recording():
        output = target.get_decoder()(
            input_ids=ids.to(runs_on),
            attention_mask=mask,
            **{CACHE_NAME: cache, "use_cache": cache is not None},
        )
        # Layers may lie on different devices.
        together = torch.cat([tap.to(device) for tap in taps.take()], dim=-1)
    return TargetStates(together, output.last_hidden_state.to(device) if keeps_last else None)


def _filled_up(states: TargetStates, n_tokens: int) -> TargetStates:
    """With zeros behind the longest text, where a batch is filled up further than it."""
    n_more = n_tokens - states.taps.shape[1]
    if n_more == 0:
        return states
    taps, last = states.taps, states.last_hidden_states
    return TargetStates(
        torch.nn.functional.pad(taps, (0, 0, 0, n_more)),
        None if last is None else torch.nn.functional.pad(last, (0, 0, 0, n_more)),
    )


def _scatter(states: Tensor, group: Sequence[Span], shape: torch.Size, into: Tensor | None) -> Any:
    """Put the rows of documents back to where they stand in the batch."""
    if into is None:
        into = states.new_zeros(*shape, states.shape[-1])
    for row, span in zip(states, group, strict=True):
        into[span.row, span.start : span.stop] = row[: span.length]
    return into
