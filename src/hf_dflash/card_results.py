"""Measurements as the Hub's metadata have them (``model-index``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import EvalResult

from .findings import (
    datasets_summary,
    decoding_words,
    main_summary,
    n_drafts,
    plural,
    told_summaries,
)
from .measurement import Measurement, MethodSummary


def eval_results(measurements: Mapping[str, Measurement]) -> list[EvalResult]:
    """What each data set gave: with the trained block, and with the fastest number of drafts.

    Args:
        measurements: By the file that holds them.
    """
    return [
        result
        for source, measurement in measurements.items()
        for told in told_summaries(measurement)
        for name, summary in datasets_summary(measurement, told.variant).items()
        for result in _results_of(source, measurement, name, summary)
    ]


def _results_of(
    source: str, measurement: Measurement, dataset: str, summary: MethodSummary
) -> list[EvalResult]:
    p, main = measurement.provenance, main_summary(measurement)
    n = n_drafts(measurement, summary.variant)
    conditions = {
        "device": p.device,
        "dtype": p.dtype,
        "decoding": decoding_words(measurement.settings.temperature),
        "block_size": summary.block_size,
        **p.drafter.policy,
        "num_assistant_tokens": n,
        "measured_in": source,
    }
    accepted, speedup = summary.acceptance, summary.speedup
    # Acceptance length is that of the block that the drafter was trained for.
    is_main = main is not None and summary.variant == main.variant
    values = {
        "acceptance_length": (
            "Acceptance length",
            accepted.macro if accepted and is_main else None,
        ),
        "speedup": ("Speed-up over plain decoding", speedup.median if speedup else None),
        "speedup_total": ("Speed-up, all seconds together", summary.speedup_total),
    }
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Speculative decoding",
            dataset_type=dataset,
            dataset_name=dataset,
            metric_type=metric,
            metric_name=f"{title}, {plural(n, 'draft')} ({source})",
            metric_value=round(value, 3),
            metric_args=conditions,
        )
        for metric, (title, value) in values.items()
        if value is not None
    ]


def plain_result(result: EvalResult) -> dict[str, Any]:
    """A result without what only the Hub adds."""
    return {k: v for k, v in vars(result).items() if v is not None and not k.startswith("verif")}
