"""What a measurement says of the target's dtype: the drafter against the faster plain decoding."""

from .findings import join_words, n_drafts, plural, told_summaries
from .measurement import Measurement, MethodSummary


def best_plain_sentence(measurement: Measurement) -> str | None:
    """Speed-up over the faster plain decoding; None where plain decoding has one dtype only."""
    overall = measurement.summary.overall
    own = next((s for s in overall if s.method == "plain"), None)
    other = next((s for s in overall if s.variant.is_plain and s.method != "plain"), None)
    if own is None or other is None or other.speedup_total is None:
        return None
    dtypes = measurement.provenance.dtype, other.method.removeprefix("plain_")
    told = list(zip(dtypes, (own, other), strict=True))
    (fast, faster), (slow, slower) = told[::-1] if other.speedup_total > 1 else told
    drafted = [
        f"{s.speedup_best.median:.2f} times as fast with "
        f"{plural(n_drafts(measurement, s.variant), 'draft')} a cycle "
        f"(over all seconds {s.speedup_best_total:.2f})"
        for s in told_summaries(measurement)
        if s.speedup_best is not None
    ]
    sentence = (
        f"Plain decoding is faster in {fast} (median {_rate(faster)} tokens per second) than in "
        f"{slow} ({_rate(slower)})."
    )
    if not drafted:
        return sentence
    return (
        f"{sentence} Compared with the faster one, the drafter in {dtypes[0]} is "
        f"{join_words(drafted)}."
    )


def _rate(summary: MethodSummary) -> str:
    return f"{summary.tokens_per_s.median:.1f}"
