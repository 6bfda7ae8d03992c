"""Acceptance length of speculative decoding, as a metric of the package ``evaluate``.

Stands alone, so that it can be loaded from the Hub where hf-dflash is not installed. A test of
hf-dflash holds it to the package's own figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

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
        outputs = [list(accepted) for accepted in predictions if len(accepted)]
        if not outputs:
            raise ValueError("`predictions` must hold at least one cycle, got none.")
        cycles = _cycles(predictions, references)
        n_accepted = [accepted for accepted, _ in cycles]
        most = max(drafted for _, drafted in cycles)
        return {
            "acceptance_length": _mean([_mean(accepted) + 1 for accepted in outputs]),
            "acceptance_length_micro": _mean(n_accepted) + 1,
            "n_outputs": len(outputs),
            "n_cycles": len(cycles),
            "histogram": [n_accepted.count(n) for n in range(most + 1)],
            "accepted": sum(n_accepted) / max(sum(drafted for _, drafted in cycles), 1),
            "accepted_by_slot": [
                _mean([accepted >= slot for accepted, drafted in cycles if drafted >= slot])
                for slot in range(1, most + 1)
            ],
        }


def _cycles(
    predictions: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Accepted drafts and drafts of every cycle."""
    cycles: list[tuple[int, int]] = []
    for accepted, drafted in zip(predictions, references, strict=True):
        n_accepted, n_drafted = list(accepted), list(drafted)
        fits = len(n_accepted) == len(n_drafted)
        if not fits or any(a > d for a, d in zip(n_accepted, n_drafted, strict=True)):
            raise ValueError(
                "`references` must hold the drafts of each cycle in `predictions`, at least as "
                f"many as were accepted, got {n_drafted} for {n_accepted}."
            )
        cycles += zip(n_accepted, n_drafted, strict=True)
    return cycles


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values))
