"""What a measurement says: figures over runs, overall and by slice. Every one is recomputed.

A cycle is one draft and one verification; its length is its accepted drafts + 1. Drafts that a
stop cut off do not count as accepted.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .acceptance_counts import count_acceptance
from .measurement_runs import Run, Variant

#: Into how many parts of equal length the longest output is cut.
N_POSITIONS = 16
#: By what runs are sliced.
SLICES: dict[str, Callable[[Run], str]] = {
    "dataset": lambda run: run.dataset,
    "language": lambda run: run.language,
    "thinking": lambda run: "on" if run.thinking else "off",
    "turn": lambda run: str(run.turn + 1),
}
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and the quartiles around it."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    n: int


@dataclass(frozen=True, slots=True)
class PositionAcceptance:
    """The cycles that began within a part of the output."""

    start: int  # among the new tokens
    stop: int
    n_cycles: int
    acceptance_length: float


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How many drafts were accepted."""

    macro: float  # mean over outputs of the mean over the cycles of one: tau of the papers
    micro: float  # mean over all cycles
    n_cycles: int
    histogram: list[int]  # cycles by accepted drafts: 0, 1, ...
    by_slot: list[float]  # of the cycles that drafted slot k = 1, 2, ...: share that accepted it
    by_position: list[PositionAcceptance]


@dataclass(frozen=True, slots=True)
class Difference:
    """An output that is not the one of plain decoding."""

    dataset: str
    prompt_index: int
    turn: int
    repeat: int
    first_difference: int
    top2_gap: float | None
    is_near_tie: bool | None = None  # None: not measured


@dataclass(frozen=True, slots=True)
class Identity:
    """How many outputs are those of plain decoding."""

    n_compared: int
    n_identical: int
    differences: list[Difference]


@dataclass(frozen=True, slots=True)
class Quality:
    """How many answers are right, by the data sets' own metrics."""

    n_judged: int
    n_correct: int


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Where the wall clock went, over all runs; shares of 1."""

    prefill: float
    first_draft: float
    decode: float
    draft: float | None  # of it all, within `decode`; None where not measured
    verify: float | None


@dataclass(frozen=True, slots=True)
class MethodSummary:
    """The figures of one method over some runs.

    ``n_turns`` counts each turn of a conversation, which is one of ``n_prompts``. Where prompts are
    compared, as below, each turn is compared for itself.

    ``speedup`` is the median over prompts of the ratio to plain decoding of the same prompt in
    the same repeat (repeats of a prompt count once, by their median), so what else the machine
    did then hits both. ``speedup_decode`` leaves the prompt and the first draft out, as the papers
    do, and outputs of one token, which need no decoding. ``speedup_total`` is all tokens over all
    seconds, divided by the same of plain decoding. ``speedup_best`` and ``speedup_best_total`` are
    both over whichever plain decoding made its tokens in fewer seconds, where the target decoded
    plainly in several dtypes. ``repeat_noise`` is the median over prompts of (largest - smallest) /
    median ratio of the repeats of a prompt. None where there is nothing to compare.
    """

    method: str
    mode: str
    block_size: int | None
    n_prompts: int
    n_turns: int
    n_runs: int
    n_tokens: int
    tokens_per_s: Spread
    decode_tokens_per_s: Spread | None
    speedup: Spread | None
    speedup_decode: Spread | None
    speedup_total: float | None
    speedup_best: Spread | None
    speedup_best_total: float | None
    repeat_noise: float | None
    acceptance: Acceptance | None
    identity: Identity | None
    quality: Quality | None
    time: TimeShares

    @property
    def variant(self) -> Variant:
        """The method with what distinguishes it."""
        return Variant(self.method, self.mode, self.block_size)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures of a measurement."""

    overall: list[MethodSummary]
    slices: dict[str, dict[str, list[MethodSummary]]]  # {"dataset": {"gsm8k": [...]}, ...}


def summarise(runs: Sequence[Run]) -> Summary:
    """Compute all figures, overall and by data set, language, thinking and turn."""
    longest = max((len(run.token_ids) for run in runs), default=1)
    slices = {
        name: {
            value: summarise_methods(part, longest)
            for value, part in sorted(_grouped(runs, of).items())
        }
        for name, of in SLICES.items()
    }
    return Summary(summarise_methods(runs, longest), slices)


def summarise_methods(runs: Sequence[Run], longest: int) -> list[MethodSummary]:
    """One summary a method, in the order in which they first appear.

    Args:
        runs: Of one slice.
        longest: Tokens of the longest output of the whole measurement.
    """
    by_variant = _grouped(runs, lambda run: run.variant)
    plain = by_variant.get(Variant("plain"), [])
    plains = [part for variant, part in by_variant.items() if variant.is_plain]
    best = max(plains, key=_rate_of_all) if plain and len(plains) > 1 else []
    return [
        _summarise_method(variant, part, plain, best, longest)
        for variant, part in by_variant.items()
    ]


def _summarise_method(
    variant: Variant, runs: Sequence[Run], plain: Sequence[Run], best: Sequence[Run], longest: int
) -> MethodSummary:
    pairs = _pairs(runs, plain)
    best_pairs = [] if variant.is_plain else _pairs(runs, best)
    ratios = _by_prompt(pairs, lambda run: run.tokens_per_s)
    decode_ratios = _by_prompt(pairs, lambda run: run.decode_tokens_per_s)
    decode_rates = [rate for run in runs if (rate := run.decode_tokens_per_s) is not None]
    return MethodSummary(
        variant.method,
        variant.mode,
        variant.block_size,
        n_prompts=len({(run.dataset, run.prompt_index) for run in runs}),
        n_turns=len({run.prompt_key for run in runs}),
        n_runs=len(runs),
        n_tokens=sum(len(run.token_ids) for run in runs),
        tokens_per_s=spread([run.tokens_per_s for run in runs]),
        decode_tokens_per_s=spread(decode_rates) if decode_rates else None,
        speedup=_spread_of_medians(ratios),
        speedup_decode=_spread_of_medians(decode_ratios),
        speedup_total=_ratio_of_totals(pairs),
        speedup_best=_spread_of_medians(_by_prompt(best_pairs, lambda run: run.tokens_per_s)),
        speedup_best_total=_ratio_of_totals(best_pairs),
        repeat_noise=_repeat_noise(ratios),
        acceptance=acceptance(runs, longest),
        identity=_identity(runs),
        quality=_quality(runs),
        time=_time_shares(runs),
    )


def _pairs(runs: Iterable[Run], others: Iterable[Run]) -> list[tuple[Run, Run]]:
    """Each run with the other method's of the same prompt and repeat."""
    found = {(run.prompt_key, run.repeat): run for run in others}
    return [
        (run, found[key])
        for run in runs
        if (key := (run.prompt_key, run.repeat)) in found and found[key].variant != run.variant
    ]


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles.

    >>> spread([1.0, 2.0, 3.0])
    Spread(median=2.0, low=1.5, high=2.5, n=3)
    """
    median = statistics.median(values)
    if len(values) < 2:
        return Spread(median, median, median, len(values))
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def acceptance(runs: Iterable[Run], longest: int | None = None) -> Acceptance | None:
    """Summarise the cycles of runs; None if there is none.

    Args:
        runs: Those without a cycle are passed over.
        longest: Tokens that are cut into `N_POSITIONS` parts; the longest output if left out.
    """
    drafted = [run for run in runs if run.n_accepted]
    by_run = [run.n_accepted or [] for run in drafted]
    counts = count_acceptance(by_run, [run.n_drafted or [] for run in drafted])
    if counts is None:
        return None
    if longest is None:
        longest = max(len(run.token_ids) for run in drafted)
    return Acceptance(
        macro=counts.macro,
        micro=counts.micro,
        n_cycles=counts.n_cycles,
        histogram=counts.histogram,
        by_slot=counts.by_slot,
        by_position=_by_position(by_run, longest),
    )


def _by_position(by_run: Iterable[Sequence[int]], longest: int) -> list[PositionAcceptance]:
    width = max(1, -(-longest // N_POSITIONS))
    parts: dict[int, list[int]] = defaultdict(list)
    for accepted in by_run:
        position = 1  # the first new token comes from the prompt's forward
        for n in accepted:
            parts[position // width].append(n + 1)
            position += n + 1
    return [
        PositionAcceptance(part * width, (part + 1) * width, len(n), statistics.mean(n))
        for part, n in sorted(parts.items())
    ]


def _by_prompt(
    pairs: Iterable[tuple[Run, Run]], rate: Callable[[Run], float | None]
) -> dict[tuple[str, int, int], list[float]]:
    """Ratios to plain decoding of the same prompt and repeat, by prompt; where both have a rate."""
    ratios: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for run, plain in pairs:
        own, other = rate(run), rate(plain)
        if own is not None and other is not None:
            ratios[run.prompt_key].append(own / other)
    return ratios


def _spread_of_medians(ratios: dict[tuple[str, int, int], list[float]]) -> Spread | None:
    return spread([statistics.median(of_one) for of_one in ratios.values()]) if ratios else None


def _repeat_noise(ratios: dict[tuple[str, int, int], list[float]]) -> float | None:
    noise = [(max(r) - min(r)) / statistics.median(r) for r in ratios.values() if len(r) > 1]
    return statistics.median(noise) if noise else None


def _ratio_of_totals(pairs: Sequence[tuple[Run, Run]]) -> float | None:
    if not pairs:
        return None
    own, plain = ([pair[i] for pair in pairs] for i in (0, 1))
    return _rate_of_all(own) / _rate_of_all(plain)


def _rate_of_all(runs: Sequence[Run]) -> float:
    return sum(len(run.token_ids) for run in runs) / sum(run.seconds.total for run in runs)


def _identity(runs: Iterable[Run]) -> Identity | None:
    compared = [run for run in runs if run.identical is not None]
    if not compared:
        return None
    differences = [
        Difference(
            *run.prompt_key,
            run.repeat,
            run.first_difference or 0,
            run.top2_gap,
            run.is_near_tie,
        )
        for run in compared
        if not run.identical
    ]
    return Identity(len(compared), len(compared) - len(differences), differences)


def _quality(runs: Iterable[Run]) -> Quality | None:
    judged = [run.correct for run in runs if run.correct is not None]
    return Quality(len(judged), sum(judged)) if judged else None


def _time_shares(runs: Sequence[Run]) -> TimeShares:
    total = sum(run.seconds.total for run in runs)
    measured = [run for run in runs if run.cycle_seconds is not None]
    own_total = sum(run.seconds.total for run in measured)
    draft, verify = (
        sum(getattr(run.cycle_seconds, name) for run in measured) / own_total if measured else None
        for name in ("draft", "verify")
    )
    return TimeShares(
        prefill=sum(run.seconds.prefill for run in runs) / total,
        first_draft=sum(run.seconds.first_draft for run in runs) / total,
        decode=sum(run.seconds.decode for run in runs) / total,
        draft=draft,
        verify=verify,
    )


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)
