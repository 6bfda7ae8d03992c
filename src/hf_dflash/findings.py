"""What a measurement found, in plain sentences: how much faster, on what, is the text unchanged.

Reports and model cards say it in the same words, and only with figures of the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence

from .measurement import Identity, Measurement, MethodSummary, Spread

#: Ways to part a measurement, and what readers call them.
SLICES = {"dataset": "data set", "language": "language", "thinking": "thinking", "turn": "turn"}

#: Names of the papers' methods.
ARCHITECTURES = {"dflash": "DFlash", "dflare": "DFlare"}


def main_summary(measurement: Measurement) -> MethodSummary | None:
    """The drafter at the block size it was made for; else its first one; None if not measured."""
    own = [s for s in measurement.summary.overall if s.method == "dflash"]
    full = [s for s in own if s.block_size == measurement.provenance.drafter.block_size]
    return next(iter(full or own), None)


def datasets_summary(measurement: Measurement) -> dict[str, MethodSummary]:
    """The figures of `main_summary`'s method for each data set that it was measured on."""
    main = main_summary(measurement)
    by_dataset = measurement.summary.slices["dataset"]
    return {
        name: summary
        for name, summaries in by_dataset.items()
        for summary in summaries
        if main is not None and summary.variant == main.variant
    }


def times(ratio: float) -> str:
    """A speed-up as it is written in tables.

    >>> times(1.5249)
    '1.52x'
    """
    return f"{ratio:.2f}x"


# ---- figures of a method as tables have them, "" where there is none ----


def speedup_text(speedup: Spread | None) -> str:
    """The median, as `times` writes it."""
    return "" if speedup is None else times(speedup.median)


def length_text(summary: MethodSummary) -> str:
    """Acceptance length, mean over outputs."""
    return "" if summary.acceptance is None else f"{summary.acceptance.macro:.2f}"


def identical_text(summary: MethodSummary) -> str:
    """Outputs that are plain decoding's, of those that were compared."""
    identity = summary.identity
    return "" if identity is None else f"{identity.n_identical}/{identity.n_compared}"


def right_text(summary: MethodSummary) -> str:
    """Right answers, of those that were judged."""
    quality = summary.quality
    return "" if quality is None else f"{quality.n_correct}/{quality.n_judged}"


# ---- sentences ----


def speed_sentence(measurement: Measurement) -> str:
    """How much faster than plain decoding, over all prompts, and how far prompts differ."""
    main = main_summary(measurement)
    if main is None:
        return "The drafter was not measured."
    target = short_name(measurement.provenance.target.name)
    if main.speedup is None:
        return (
            f"With the drafter, {target} writes {main.tokens_per_s.median:.1f} tokens per second; "
            "plain decoding was not measured beside it."
        )
    slower = ", which is slower" if main.speedup.median < 1 else ""
    return (
        f"With the drafter, {target} writes {main.speedup.median:.2f} times as fast as without it"
        f"{slower} ({_range(main.speedup)})."
    )


def _range(speedup: Spread) -> str:
    if speedup.n == 1:
        return "one prompt"
    return (
        f"median of {speedup.n} prompts; the middle half of them between {speedup.low:.2f} and "
        f"{speedup.high:.2f}"
    )


def place_sentence(measurement: Measurement) -> str:
    """On what it was measured."""
    provenance, settings = measurement.provenance, measurement.settings
    names = join_words([f"{name} ({n})" for name, n in settings.n_prompts.items()])
    threads = (
        "" if provenance.device.startswith("cuda") else f", {plural(provenance.threads, 'thread')}"
    )
    repeats = f", {settings.repeats} times each" if settings.repeats > 1 else ""
    return (
        f"Measured on {provenance.device}{threads}, in {provenance.dtype}, one prompt at a time, "
        f"{decoding_words(settings.temperature)}, up to {settings.max_new_tokens} new tokens; "
        f"prompts: {names}{repeats}; {provenance.date[:10]}."
    )


def decoding_words(temperature: float) -> str:
    """Greedy, or sampled how.

    >>> decoding_words(0.0), decoding_words(0.7)
    ('greedy', 'sampled at temperature 0.7')
    """
    return "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"


def text_sentence(measurement: Measurement) -> str:
    """Whether the text is that of plain decoding."""
    main = main_summary(measurement)
    identity = None if main is None else main.identity
    if identity is None:
        if measurement.settings.temperature > 0:
            return (
                "Sampled texts differ from run to run, so they were not compared; by construction "
                "they follow the target's own distribution."
            )
        return "Whether the text is unchanged was not measured."
    if identity.n_identical == identity.n_compared:
        return (
            f"The text is unchanged: {_all_of(identity.n_compared)} token for token what the "
            "target writes without the drafter."
        )
    return _differences_sentence(identity)


def _all_of(n: int) -> str:
    return "the one output is" if n == 1 else f"all {n} outputs are"


def _differences_sentence(identity: Identity) -> str:
    n_different = identity.n_compared - identity.n_identical
    gaps = [d.top2_gap for d in identity.differences if d.top2_gap is not None]
    where = ""
    if len(gaps) == n_different:
        where = (
            ", where the target's two best tokens are at most "
            f"{max(gaps):.3g} apart (logits): a near tie is decided by rounding"
            if max(gaps) < NEAR_TIE
            else f", where the target's two best logits are up to {max(gaps):.3g} apart"
        )
    differ = "one differs" if n_different == 1 else f"{n_different} differ"
    return (
        f"The text is not always the same: {identity.n_identical} of {identity.n_compared} outputs "
        f"are token for token what the target writes without the drafter; {differ} from some token "
        f"on{where}."
    )


#: Logits closer than this are called a near tie. In bfloat16 between 32 and 64 it is two steps: two
#: passes can be off by one each.
NEAR_TIE = 0.5


def is_lossless(measurement: Measurement) -> bool | None:
    """Whether every compared output is that of plain decoding; None if none was compared."""
    main = main_summary(measurement)
    if main is None or main.identity is None:
        return None
    return main.identity.n_identical == main.identity.n_compared


def slow_sentence(measurement: Measurement) -> str | None:
    """The data sets on which the drafter costs more than it saves; None if there is none."""
    slow = [
        f"{name} ({times(summary.speedup.median)})"
        for name, summary in datasets_summary(measurement).items()
        if summary.speedup is not None and summary.speedup.median < 1
    ]
    return f"Slower than plain decoding on: {join_words(slow)}." if slow else None


def short_name(name: str) -> str:
    """Last part of a repository's or folder's name.

    >>> short_name("HuggingFaceTB/SmolLM2-135M-Instruct")
    'SmolLM2-135M-Instruct'
    """
    return name.rstrip("/").split("/")[-1] or name


def join_words(words: Sequence[str]) -> str:
    """Words as a list in a sentence.

    >>> join_words(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def plural(n: int, noun: str, many: str | None = None) -> str:
    """A number of things.

    >>> plural(1, "thread"), plural(2, "thread"), plural(2, "process", "processes")
    ('1 thread', '2 threads', '2 processes')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {many or noun + 's'}"
