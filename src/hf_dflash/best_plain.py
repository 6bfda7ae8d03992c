"""What a measurement says of the target's dtype: the drafter against the faster plain decoding."""

from .findings import join_words, n_drafts, plural, told_summaries
from .measurement import Measurement


def best_plain_sentence(measurement: Measurement) -> str | None:
    """Speed-up over the faster plain decoding; None where plain decoding has one dtype only."""
    overall = measurement.summary.overall
    own = next((s for s in overall if s.method == "plain"), None)
    other = next((s for s in overall if s.variant.is_plain and s.method != "plain"), None)
    if own is None or other is None or other.speedup_total is None:
        return None
    dtypes = measurement.provenance.dtype, other.method.removeprefix("plain_")
    fast, slow = dtypes[::-1] if other.speedup_total > 1 else dtypes
    ratio = max(other.speedup_total, 1 / other.speedup_total)
    drafted = [
        f"{s.speedup_best.median:.2f} times as fast with "
        f"{plural(n_drafts(measurement, s.variant), 'draft')} a cycle "
        f"(over all seconds {s.speedup_best_total:.2f})"
        for s in told_summaries(measurement)
        if s.speedup_best is not None
    ]
    sentence = (
        f"Over all seconds plain decoding is {ratio:.2f} times as fast in {fast} as in {slow}."
    )
    if not drafted:
        return sentence
    return (
        f"{sentence} Compared with plain {fast}, the drafter in {dtypes[0]} is "
        f"{join_words(drafted)}."
    )
