"""What a measurement found, in plain sentences: how much faster, on what, is the text unchanged.

Reports and model cards say it in the same words, and only with figures of the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence

from .measurement import Identity, Measurement, MethodSummary, Spread, TargetInfo, Variant

#: Ways to part a measurement, and what readers call them.
SLICES = {"dataset": "data set", "language": "language", "thinking": "thinking", "turn": "turn"}

#: Names of the papers' methods.
ARCHITECTURES = {"dflash": "DFlash", "dflare": "DFlare"}


def main_summary(measurement: Measurement) -> MethodSummary | None:
    """The drafter at the block size it was made for; else its first one; None if not measured."""
    own = [s for s in measurement.summary.overall if s.method == "dflash"]
    full = [s for s in own if s.block_size == measurement.provenance.drafter.block_size]
    return next(iter(full or own), None)


def told_summaries(measurement: Measurement) -> list[MethodSummary]:
    """What sentences tell of: `main_summary`, and the fastest number of drafts if it is another.

    The fastest has the greatest median speed-up.
    """
    main = main_summary(measurement)
    if main is None:
        return []
    own = [s for s in measurement.summary.overall if s.method == "dflash"]
    ranked = [(s.speedup.median, s) for s in own if s.speedup is not None]
    _, fastest = max(ranked, key=lambda pair: pair[0], default=(0.0, main))
    counts = [n_drafts(measurement, s.variant) for s in (main, fastest)]
    return [main] if counts[0] == counts[1] else [main, fastest]


def datasets_summary(
    measurement: Measurement, variant: Variant | None = None
) -> dict[str, MethodSummary]:
    """Figures for each data set: of ``variant``, or of the one of `main_summary`."""
    main = main_summary(measurement)
    wanted = variant or (None if main is None else main.variant)
    return {
        name: summary
        for name, summaries in measurement.summary.slices["dataset"].items()
        for summary in summaries
        if summary.variant == wanted
    }


def n_drafts(measurement: Measurement, variant: Variant) -> int:
    """Most drafts that the drafter makes in a cycle: ``num_assistant_tokens`` of decoding."""
    drafter = measurement.provenance.drafter
    whole = (variant.block_size or drafter.block_size) - 1
    limit = drafter.policy.get("num_assistant_tokens")
    # Other block sizes are measured whole.
    return whole if limit is None or variant.block_size != drafter.block_size else int(limit)


def method_label(measurement: Measurement, variant: Variant) -> str:
    """A method as tables and pictures name it, with what the drafter's policy changes of it."""
    return ", ".join([variant.label, *policy_words(measurement, variant)])


def policy_words(measurement: Measurement, variant: Variant) -> list[str]:
    """The drafter's own policy, where it is not the default and applies to a method."""
    if variant.method != "dflash":
        return []
    policy = measurement.provenance.drafter.policy
    n = n_drafts(measurement, variant)
    limited = variant.block_size is not None and n != variant.block_size - 1
    told = [plural(n, "draft")] if limited else []
    for name, word in _POLICY_WORDS.items():
        told += [f"{word} {policy[name]:g}"] if name in policy else []
    return told


_POLICY_WORDS = {
    "assistant_confidence_threshold": "confidence",
    "temperature": "draft temperature",
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


def prompts_text(summary: MethodSummary) -> str:
    """Prompts, and their turns where some have several."""
    turns = "" if summary.n_turns == summary.n_prompts else f" ({summary.n_turns} turns)"
    return f"{summary.n_prompts}{turns}"


# ---- sentences ----


def speed_sentence(measurement: Measurement) -> str:
    """How much faster than plain decoding: with the trained block, and with the best of drafts."""
    main = main_summary(measurement)
    if main is None:
        return "The drafter was not measured."
    target = short_name(measurement.provenance.target.name)
    if main.speedup is None:
        return (
            f"With the drafter, {target} writes {main.tokens_per_s.median:.1f} tokens per second; "
            "plain decoding was not measured beside it."
        )
    slower = ", which is slower," if _is_slower(main) else ""
    return (
        f"With the drafter, {target} writes {_median(main)} times as fast as without it"
        f"{slower} {_at(measurement, main)}{_fastest(measurement)}."
    )


def _at(measurement: Measurement, main: MethodSummary) -> str:
    """With how many drafts, and what comes of them."""
    n, size = n_drafts(measurement, main.variant), measurement.provenance.drafter.block_size
    drafts = plural(n, "draft")
    drafts = f"the {drafts} of its trained block" if n == size - 1 else f"{drafts} a cycle"
    figures = [] if main.acceptance is None else [f"{length_text(main)} tokens a cycle"]
    return f"with {drafts} ({'; '.join([*figures, _over_all(main)])})"


def _fastest(measurement: Measurement) -> str:
    """With how many drafts it is fastest, if several numbers were measured."""
    others = told_summaries(measurement)[1:]
    if not others:
        several = sum(s.method == "dflash" for s in measurement.summary.overall) > 1
        return "; no other number of drafts that was measured is faster" if several else ""
    [fastest] = others
    n = n_drafts(measurement, fastest.variant)
    is_option = _is_option(measurement, n)
    setting = f"num_assistant_tokens={n}" if is_option else f"block_size={n + 1} in its config"
    use = f", slower too ({setting})" if _is_slower(fastest) else f": use {setting}"
    return (
        f"; with {plural(n, 'draft')} a cycle, the fastest measured, "
        f"{_median(fastest)} times as fast ({_over_all(fastest)}){use}"
    )


def advised_drafts(measurement: Measurement) -> int | None:
    """The ``num_assistant_tokens`` that `speed_sentence` says to use; None if it names none."""
    for fastest in told_summaries(measurement)[1:]:
        n = n_drafts(measurement, fastest.variant)
        if _is_option(measurement, n) and not _is_slower(fastest):
            return n
    return None


def _is_option(measurement: Measurement, n: int) -> bool:
    """Whether ``n`` drafts can be asked for: more than the block has places for need a config."""
    return n < measurement.provenance.drafter.block_size


def _median(summary: MethodSummary) -> str:
    return "" if summary.speedup is None else f"{summary.speedup.median:.2f}"


def _over_all(summary: MethodSummary) -> str:
    return "" if summary.speedup_total is None else f"over all seconds {summary.speedup_total:.2f}"


def _is_slower(summary: MethodSummary) -> bool:
    return summary.speedup is not None and summary.speedup.median < 1


def spread_sentence(measurement: Measurement) -> str | None:
    """How far prompts differ in their speed-up; None without plain decoding."""
    told = told_summaries(measurement)
    sentences = [
        f"{_with_drafts(measurement, summary, told)}{_range(summary, summary.speedup)}."
        for summary in told
        if summary.speedup is not None
    ]
    return _as_text(sentences)


def _range(summary: MethodSummary, speedup: Spread) -> str:
    if speedup.n == 1:
        return "one prompt"
    several = summary.n_turns > summary.n_prompts
    turns = f"{speedup.n} turns of {plural(summary.n_prompts, 'prompt')}"
    return (
        f"median of {turns if several else f'{speedup.n} prompts'}, the middle half of them "
        f"between {speedup.low:.2f} and {speedup.high:.2f}"
    )


def datasets_sentence(measurement: Measurement) -> str | None:
    """On which data sets it is faster than plain decoding and on which not; None if not known."""
    told = told_summaries(measurement)
    sentences = [
        f"{_with_drafts(measurement, summary, told)}{words}."
        for summary in told
        if (words := _faster_and_slower(datasets_summary(measurement, summary.variant)))
    ]
    return _as_text(sentences)


def _with_drafts(
    measurement: Measurement, summary: MethodSummary, told: Sequence[MethodSummary]
) -> str:
    """Which of several a sentence is about."""
    n = n_drafts(measurement, summary.variant)
    return f"with {plural(n, 'draft')}, " if len(told) > 1 else ""


def _as_text(sentences: Sequence[str]) -> str | None:
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences) or None


def _faster_and_slower(by_dataset: dict[str, MethodSummary]) -> str:
    """Data sets by what their table says: a speed-up of 1.00x is neither."""
    groups: dict[str, list[str]] = {"faster than": [], "as fast as": [], "slower than": []}
    for name, summary in by_dataset.items():
        if summary.speedup is not None:
            ratio = round(summary.speedup.median, 2)
            kind = "faster than" if ratio > 1 else "slower than" if ratio < 1 else "as fast as"
            groups[kind].append(f"{name} ({times(ratio)})")
    found = [(kind, names) for kind, names in groups.items() if names]
    return "; ".join(
        f"{kind}{' plain decoding' if i == 0 else ' it'} on: {join_words(names)}"
        for i, (kind, names) in enumerate(found)
    )


def target_words(target: TargetInfo) -> str:
    """The target as it was loaded: a repository, at which commit, or a folder's copy.

    >>> target_words(TargetInfo("my-copy"))
    'my-copy (a local copy, which may differ from the model as published)'
    """
    if target.revision is not None:
        return f"{target.name} at {target.revision}"
    is_copy = "/" not in target.name  # a folder is told by its name alone
    note = "a local copy, which may differ from the model as published"
    return f"{target.name} ({note if is_copy else 'commit not known'})"


def right_sentence(measurement: Measurement) -> str | None:
    """What judged the answers; None if none was."""
    if all(summary.quality is None for summary in measurement.summary.overall):
        return None
    by = join_words(measurement.settings.metrics) or "the data set's own metric"
    return f"Right answers, of those that have one to compare with, are judged by {by}."


def place_sentence(measurement: Measurement) -> str:
    """On what it was measured."""
    provenance, settings = measurement.provenance, measurement.settings
    names = join_words([f"{name} ({n})" for name, n in settings.n_prompts.items()])
    threads = (
        "" if provenance.device.startswith("cuda") else f", {plural(provenance.threads, 'thread')}"
    )
    repeats = f", {settings.repeats} times each" if settings.repeats > 1 else ""
    return (
        f"Measured on {provenance.device}{threads}, in {provenance.dtype}, with the target "
        f"{target_words(provenance.target)}, one prompt at a time, "
        f"{decoding_words(settings.temperature)}, up to {settings.max_new_tokens} new tokens; "
        f"prompts: {names}{repeats}; {provenance.date[:10]}."
    )


def processes_words(measurement: Measurement) -> str:
    """How many processes measured, and which products they made in another way than torch's."""
    p = measurement.provenance
    rows, n = p.few_rows, plural(p.n_processes, "process", "processes")
    which = ", ".join(map(str, rows or []))
    return n + (f", products of {which} rows made the other way round" if rows else "")


def decoding_words(temperature: float) -> str:
    """Greedy, or sampled how.

    >>> decoding_words(0.0), decoding_words(0.7)
    ('greedy', 'sampled at temperature 0.7')
    """
    return "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"


def compared_summaries(measurement: Measurement) -> list[tuple[MethodSummary, Identity]]:
    """Those of `told_summaries` whose outputs were compared; where most differ, first."""
    told = told_summaries(measurement)
    compared = [(s, s.identity) for s in told if s.identity is not None]
    return sorted(compared, key=lambda pair: pair[1].n_identical / pair[1].n_compared)


def text_sentence(measurement: Measurement) -> str:
    """Whether the text is that of plain decoding, with every number of drafts that is told of."""
    compared = compared_summaries(measurement)
    if not compared:
        if measurement.settings.temperature > 0:
            return (
                "Sampled texts differ from run to run, so they were not compared; by construction "
                "they follow the target's own distribution."
            )
        return "Whether the text is unchanged was not measured."
    said = {_identity_words(identity): summary for summary, identity in compared}
    if is_lossless(measurement):
        return f"The text is unchanged: {next(iter(said))}."
    told = list(said.values())  # one, where the same is said of all
    first, *others = (f"{_with_drafts(measurement, s, told)}{words}." for words, s in said.items())
    return " ".join(filter(None, (f"The text is not always the same: {first}", _as_text(others))))


def _all_of(n: int) -> str:
    return "the one output is" if n == 1 else f"all {n} outputs are"


def _identity_words(identity: Identity) -> str:
    n_different = identity.n_compared - identity.n_identical
    if n_different == 0:
        whole = _all_of(identity.n_compared)
        return f"{whole} token for token what the target writes without the drafter"
    gaps = [d.top2_gap for d in identity.differences if d.top2_gap is not None]
    where = ""
    if len(gaps) == n_different:
        where = f", where the target's two best logits are at most {max(gaps):.3g} apart"
        judged = [d.is_near_tie for d in identity.differences]
        if all(judged):
            where += ": near ties, which rounding decides"
        elif False in judged:
            where += f"; {judged.count(False)} of these places are no near ties, but an error"
    differ = "one differs" if n_different == 1 else f"{n_different} differ"
    return (
        f"{identity.n_identical} of {identity.n_compared} outputs are token for token what the "
        f"target writes without the drafter; {differ} from some token on{where}"
    )


def is_lossless(measurement: Measurement) -> bool | None:
    """Whether every compared output is that of plain decoding; None if none was compared.

    Counts the outputs with every number of drafts that is told of: readers use any of them.
    """
    compared = compared_summaries(measurement)
    return all(i.n_identical == i.n_compared for _, i in compared) if compared else None


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
