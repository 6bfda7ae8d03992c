"""Decode prompts plainly and with a drafter, and measure both. Nothing here prints.

What a person sees is up to a :class:`View`; ``demo_view`` has one for terminals.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from .prompt_encoding import encode_prompt

DTYPES = ("float32", "bfloat16")

# Timing the dtypes: one prompt, this many tokens, best of so many rounds. About ten seconds on two
# idle cores, and enough to tell the dtypes apart (they differ by a third or more). A busy machine
# may take ten times as long for a round; then no other one is begun.
TIMING_TOKENS = 24
TIMING_ROUNDS = 3
TIMING_LIMIT_S = 10.0
# Timed besides the whole block: on a CPU the rows of a verification are dear.
FEW_DRAFTS = 3

OnTokens = Callable[[Sequence[int], int], None]


@dataclass(frozen=True, slots=True)
class Pair:
    """A target with its tokenizer, and a drafter, both in one dtype."""

    target: Any
    tokenizer: Any
    drafter: Any
    dtype: str
    n_drafts: int | None = None  # most drafts a cycle; None: as the drafter's policy says

    @property
    def most_drafts(self) -> int:
        """The same as a number."""
        own = self.drafter.generation_config.num_assistant_tokens
        whole: int = self.drafter.config.block_size - 1
        return self.n_drafts or own or whole


LoadPair = Callable[[str], Pair]


@dataclass(frozen=True, slots=True)
class Decoding:
    """What one call of ``generate`` made and took."""

    token_ids: tuple[int, ...]
    time_s: float  # the prompt's forward included
    target_forwards: int
    n_accepted: tuple[int, ...]  # drafts emitted, per cycle; empty when decoded plainly

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second, the prompt's forward included."""
        return len(self.token_ids) / self.time_s


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two decodings part, and how sure the target is there."""

    token_index: int  # among the new tokens
    plain_id: int | None  # None: the plain decoding has ended
    drafted_id: int | None
    top2_gap: float  # largest minus second largest logit of the target, after the common part


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt decoded both ways."""

    prompt: str
    plain: Decoding
    drafted: Decoding
    difference: Difference | None  # None: identical


@dataclass(frozen=True, slots=True)
class Timing:
    """How fast a pair decodes in one dtype, measured briefly."""

    dtype: str
    tokens_per_s_plain: float
    tokens_per_s_drafted: float
    n_drafts: int | None = None  # with which it was fastest; None: the drafter's policy


@dataclass(frozen=True, slots=True)
class Measures:
    """The figures of one prompt or of several; the keys of the JSON file."""

    identical: bool
    acceptance_length: float | None  # None: no cycle was run
    tokens_per_s_plain: float
    tokens_per_s_drafted: float
    speedup: float
    speedup_vs_best_plain: float | None  # None: only one dtype was timed
    target_forwards: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """All that a run measured."""

    dtype: str
    num_assistant_tokens: int  # most drafts a cycle
    timings: tuple[Timing, ...]  # empty unless both dtypes were timed
    comparisons: tuple[Comparison, ...]

    @property
    def overall(self) -> Measures:
        """The figures over all prompts: tokens over seconds, and the mean over all cycles."""
        return measure(self.comparisons, best_plain_factor(self.timings, self.dtype))


class View(Protocol):
    """What a run tells as it goes."""

    def loading(self, dtype: str) -> None:
        """The models are about to be loaded."""

    def timed(self, timings: Sequence[Timing], chosen: str) -> None:
        """Both dtypes were timed, and ``chosen`` is used."""

    def start_prompt(self, pair: Pair, index: int, n_prompts: int, prompt: str) -> None:
        """Prompt ``index`` (0-based) comes next."""

    def start_decoding(self, drafted: bool) -> None:
        """Tokens follow, plain ones first."""

    def tokens(self, token_ids: Sequence[int], n_accepted: int) -> None:
        """New tokens, of which the first ``n_accepted`` were accepted drafts."""

    def end_prompt(self, comparison: Comparison, measures: Measures) -> None:
        """Both decodings are done."""


class TokenStream(BaseStreamer):
    """Hands tokens on as ``generate`` makes them: one by one, or a whole cycle."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens = on_tokens
        self._prompt_is_due = True

    def put(self, value: Tensor) -> None:
        """Take the prompt first, which is dropped, then new tokens."""
        if self._prompt_is_due:
            self._prompt_is_due = False
        else:
            self._on_tokens(value.reshape(-1).tolist(), 0)

    def put_cycle(self, token_ids: Tensor, n_accepted: int) -> None:
        """Take one cycle of drafted decoding: accepted drafts, then the bonus token."""
        self._on_tokens(token_ids.tolist(), n_accepted)

    def end(self) -> None:
        """Nothing is held back."""


def run(
    load_pair: LoadPair,
    prompts: Sequence[str],
    *,
    dtype: str,
    max_new_tokens: int,
    view: View,
    time_both: bool = True,
) -> Report:
    """Decode every prompt both ways, in ``dtype`` or in the one where drafting is fastest.

    Where dtypes are timed, so is drafting `FEW_DRAFTS` tokens a cycle, unless the drafter's policy
    says how many; the quicker way is used.

    Args:
        load_pair: Loads the pair in a dtype.
        prompts: What to decode.
        dtype: "float32", "bfloat16", or "auto" for the one where drafted decoding is fastest.
        max_new_tokens: Most tokens for a prompt.
        view: What is told as it goes.
        time_both: Load and time both dtypes also when one is asked for, so that the speed-up over
            the fastest plain decoding is known. "auto" always does.
    """
    time_both = time_both or dtype == "auto"
    pair, timings = _pair_to_use(load_pair, prompts[0], dtype, view, time_both=time_both)
    factor = best_plain_factor(timings, pair.dtype)
    comparisons = []
    for index, prompt in enumerate(prompts):
        view.start_prompt(pair, index, len(prompts), prompt)
        comparison = compare(pair, prompt, max_new_tokens, view)
        view.end_prompt(comparison, measure([comparison], factor))
        comparisons.append(comparison)
    return Report(pair.dtype, pair.most_drafts, timings, tuple(comparisons))


def _pair_to_use(
    load_pair: LoadPair, prompt: str, dtype: str, view: View, *, time_both: bool
) -> tuple[Pair, tuple[Timing, ...]]:
    view.loading(dtype)
    if not time_both:
        pair = load_pair(dtype)
        _warm_up(pair, prompt)
        return pair, ()
    pairs = [load_pair(name) for name in DTYPES]
    timings = time_pairs(pairs, prompt)
    fastest = max(range(len(pairs)), key=lambda i: timings[i].tokens_per_s_drafted)
    chosen = fastest if dtype == "auto" else DTYPES.index(dtype)
    view.timed(timings, pairs[chosen].dtype)
    return replace(pairs[chosen], n_drafts=timings[chosen].n_drafts), timings


def time_pairs(pairs: Sequence[Pair], prompt: str) -> tuple[Timing, ...]:
    """Time both ways of decoding briefly, pair after pair in each round.

    Rounds are interleaved, and the best of them counts: what else the machine does then hits all
    pairs, not the one that happened to run.
    """
    numbers = [_numbers_of_drafts(pair) for pair in pairs]
    best: dict[tuple[int, bool, int | None], float] = {}
    for pair in pairs:
        _warm_up(pair, prompt)
    started_s = time.perf_counter()
    for n_rounds in range(TIMING_ROUNDS):
        if n_rounds > 0 and time.perf_counter() - started_s > TIMING_LIMIT_S:
            break
        for i, pair in enumerate(pairs):
            input_ids = encode(pair, prompt)
            for drafted, n_drafts in ((False, None), *((True, n) for n in numbers[i])):
                way = replace(pair, n_drafts=n_drafts)
                speed = decode(way, input_ids, TIMING_TOKENS, drafted=drafted).tokens_per_s
                best[i, drafted, n_drafts] = max(best.get((i, drafted, n_drafts), 0.0), speed)
    timings = []
    for i, pair in enumerate(pairs):
        n_drafts = max(numbers[i], key=lambda n: best[i, True, n])
        plain, drafted_speed = best[i, False, None], best[i, True, n_drafts]
        timings.append(Timing(pair.dtype, plain, drafted_speed, n_drafts))
    return tuple(timings)


def _numbers_of_drafts(pair: Pair) -> tuple[int | None, ...]:
    """What to time: the drafter's policy, and few drafts if it leaves the number open."""
    is_open = pair.drafter.generation_config.num_assistant_tokens is None
    if is_open and pair.drafter.config.block_size > FEW_DRAFTS + 1:
        return (None, FEW_DRAFTS)
    return (None,)


def _warm_up(pair: Pair, prompt: str) -> None:
    # The first calls set up kernels and memory pools: the first prompt would pay for all others.
    input_ids = encode(pair, prompt)
    for drafted in (False, True):
        decode(pair, input_ids, 4, drafted=drafted)


def compare(pair: Pair, prompt: str, max_new_tokens: int, view: View) -> Comparison:
    """Decode one prompt plainly, then with the drafter."""
    input_ids = encode(pair, prompt)
    decodings = []
    for drafted in (False, True):
        view.start_decoding(drafted)
        decodings.append(decode(pair, input_ids, max_new_tokens, view.tokens, drafted=drafted))
    plain, drafted_decoding = decodings
    difference = find_difference(pair, input_ids, plain.token_ids, drafted_decoding.token_ids)
    return Comparison(prompt, plain, drafted_decoding, difference)


def encode(pair: Pair, prompt: str) -> Tensor:
    """The prompt as one user turn, if the target is a chat model; ids (1, S).

    Raises:
        ValueError: The tokenizer makes no token of it.
    """
    ids = encode_prompt(pair.tokenizer, [{"role": "user", "content": prompt}])
    return ids.to(pair.target.device)


def decode(
    pair: Pair,
    input_ids: Tensor,
    max_new_tokens: int,
    on_tokens: OnTokens = lambda _ids, _n_accepted: None,
    *,
    drafted: bool,
) -> Decoding:
    """Decode greedily, with or without the drafter, streaming to ``on_tokens``."""
    started_s = time.perf_counter()
    output = pair.target.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=TokenStream(on_tokens),
        return_dict_in_generate=True,
        **_assistance(pair) if drafted else {},
    )
    time_s = time.perf_counter() - started_s
    token_ids = tuple(output.sequences[0, input_ids.shape[1] :].tolist())
    if not drafted:
        return Decoding(token_ids, time_s, len(token_ids), ())
    statistics = output.statistics
    return Decoding(token_ids, time_s, statistics.target_forwards, tuple(statistics.n_accepted))


def _assistance(pair: Pair) -> dict[str, Any]:
    number = {} if pair.n_drafts is None else {"num_assistant_tokens": pair.n_drafts}
    return {"assistant_model": pair.drafter, **number}


def find_difference(
    pair: Pair, input_ids: Tensor, plain_ids: Sequence[int], drafted_ids: Sequence[int]
) -> Difference | None:
    """Find the first token where two decodings differ, and the target's top-2 gap there."""
    if list(plain_ids) == list(drafted_ids):
        return None
    shortest = min(len(plain_ids), len(drafted_ids))
    agree = (a == b for a, b in zip(plain_ids, drafted_ids, strict=False))
    index = next((i for i, same in enumerate(agree) if not same), shortest)
    common = torch.cat([input_ids, input_ids.new_tensor([list(plain_ids[:index])])], dim=1)
    with torch.no_grad():
        logits = pair.target(common).logits[0, -1]
    first, second = logits.float().topk(2).values.tolist()
    plain_id, drafted_id = (
        ids[index] if index < len(ids) else None for ids in (plain_ids, drafted_ids)
    )
    return Difference(index, plain_id, drafted_id, first - second)


def best_plain_factor(timings: Sequence[Timing], dtype: str) -> float | None:
    """How much faster plain decoding is in its best dtype than in ``dtype``, at least 1."""
    plain = {timing.dtype: timing.tokens_per_s_plain for timing in timings}
    return max(plain.values()) / plain[dtype] if plain else None


def measure(comparisons: Sequence[Comparison], plain_factor: float | None) -> Measures:
    """Sum up one or more prompts: tokens over seconds, accepted drafts over all cycles."""
    plain_per_s = _tokens_per_s([c.plain for c in comparisons])
    drafted_per_s = _tokens_per_s([c.drafted for c in comparisons])
    emitted = [n + 1 for c in comparisons for n in c.drafted.n_accepted]
    speedup = drafted_per_s / plain_per_s
    return Measures(
        identical=all(c.difference is None for c in comparisons),
        acceptance_length=sum(emitted) / len(emitted) if emitted else None,
        tokens_per_s_plain=plain_per_s,
        tokens_per_s_drafted=drafted_per_s,
        speedup=speedup,
        speedup_vs_best_plain=None if plain_factor is None else speedup / plain_factor,
        target_forwards=sum(c.drafted.target_forwards for c in comparisons),
        n_tokens=sum(len(c.drafted.token_ids) for c in comparisons),
    )


def _tokens_per_s(decodings: Sequence[Decoding]) -> float:
    return sum(len(d.token_ids) for d in decodings) / sum(d.time_s for d in decodings)


def as_json(report: Report) -> str:
    """The report as JSON: how it was decoded, ``timings``, ``prompts`` and ``overall``.

    How: ``dtype`` and ``num_assistant_tokens``, most drafts a cycle. Each prompt repeats both.
    ``speedup_vs_best_plain`` is null and ``timings`` empty unless both dtypes were timed;
    ``acceptance_length`` is null if no cycle was run.
    """
    factor = best_plain_factor(report.timings, report.dtype)
    setting = {"dtype": report.dtype, "num_assistant_tokens": report.num_assistant_tokens}
    prompts = [
        {
            "prompt": c.prompt,
            **setting,
            **asdict(measure([c], factor)),
            "difference": None if c.difference is None else asdict(c.difference),
        }
        for c in report.comparisons
    ]
    document = {
        **setting,
        "timings": [asdict(timing) for timing in report.timings],
        "prompts": prompts,
        "overall": asdict(report.overall),
    }
    return json.dumps(document, indent=2) + "\n"
