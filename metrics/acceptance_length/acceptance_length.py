"""Acceptance length of speculative decoding, as a metric of the package ``evaluate``.

It can be loaded from the Hub where hf-dflash is not installed: the arithmetic, which hf-dflash's
benchmark and trainer call, too, lies beside it in acceptance_counts.py. That file is a copy of
src/hf_dflash/acceptance_counts.py, byte for byte; change it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from .acceptance_counts import count_acceptance

_DESCRIPTION = """\
Tokens gained per cycle of speculative decoding: accepted drafts plus the one token that the target
adds itself. 1 is plain decoding; a drafter that proposes blocks of B tokens, the anchor included,
reaches at most B.
"""

_KWARGS_DESCRIPTION = """\
Args:
    predictions: For each output, the number of accepted drafts of each cycle.
    references: For each output, the number of drafts of each cycle.

Returns:
    acceptance_length: Mean over outputs of the mean over the cycles of each (tau of the papers).
    acceptance_length_micro: Mean over all cycles.
    acceptance_length_expected: 1 + the sum of `accepted_by_slot`: the mean if every cycle had
        drafted as many as the longest; what hf-dflash's trainer calls acceptance length.
    n_outputs, n_cycles: How many there are; outputs without a cycle do not count.
    histogram: Cycles by number of accepted drafts, 0 first.
    accepted: Share of drafts that were accepted.
    accepted_by_slot: Of the cycles that drafted slot 1, 2, ...: the share that accepted it.

Examples:
    >>> metric = evaluate.load("metrics/acceptance_length")
    >>> found = metric.compute(predictions=[[3, 1], [0]], references=[[3, 3], [3]])
    >>> found["acceptance_length"], round(found["acceptance_length_micro"], 3)
    (2.0, 2.333)
"""

_CITATION = """\
@article{dflash2026,
    title={DFlash: Block Diffusion for Flash Speculative Decoding},
    journal={arXiv preprint arXiv:2602.06036},
    year={2026}
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class AcceptanceLength(evaluate.Metric):
    """Acceptance length, per output and per cycle."""

    def _info(self) -> evaluate.MetricInfo:
        cycles = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": cycles, "references": cycles}),
            reference_urls=["https://arxiv.org/abs/2602.06036"],
        )

    def _compute(
        self, predictions: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        _check(predictions, references)
        counts = count_acceptance(predictions, references)
        if counts is None:
            raise ValueError("`predictions` must hold at least one cycle, got none.")
        return {
            "acceptance_length": counts.macro,
            "acceptance_length_micro": counts.micro,
            "acceptance_length_expected": counts.expected,
            "n_outputs": counts.n_outputs,
            "n_cycles": counts.n_cycles,
            "histogram": counts.histogram,
            "accepted": counts.accepted,
            "accepted_by_slot": counts.by_slot,
        }


def _check(predictions: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> None:
    """Refuse drafts that are not those of the accepted ones."""
    for accepted, drafted in zip(predictions, references, strict=True):
        n_accepted, n_drafted = list(accepted), list(drafted)
        fits = len(n_accepted) == len(n_drafted)
        if not fits or any(not 0 <= a <= d for a, d in zip(n_accepted, n_drafted, strict=True)):
            raise ValueError(
                "`references` must hold the drafts of each cycle in `predictions`, at least as "
                f"many as were accepted, got {n_drafted} for {n_accepted}."
            )
