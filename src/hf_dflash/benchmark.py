"""Decode every prompt with every method, and record what each call made and took.

Methods take turns within a prompt and another one begins each time, so what else the machine does
then hits them alike and their ratios can be paired. Outputs are compared while measuring.
"""

import copy
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .benchmark_clock import CallClock
from .benchmark_data import BenchmarkPrompt
from .benchmark_quality import Judge
from .demo import Pair, find_difference
from .measurement_runs import Run, Settings, Variant
from .near_tie import doubt, replayed_scores
from .prompt_encoding import THINKING, Options, encode_prompt

#: Tokens that each method decodes before anything counts: kernels are chosen, memory is pooled.
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Models:
    """What decodes."""

    target: Any
    tokenizer: Any
    drafter: Any
    assistant: Any | None = None  # a small model of the target's vocabulary
    # The target in another dtype, for plain decoding in it.
    other_target: Any | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One turn of a prompt, ready to be decoded by every method."""

    dataset: str
    prompt_index: int
    turn: int
    repeat: int
    prompt: BenchmarkPrompt
    input_ids: Tensor  # (1, n) int64

    def seed(self, base: int) -> int:
        """Of the sampling; methods share it."""
        key = (self.dataset, self.prompt_index, self.turn, self.repeat, base)
        return zlib.crc32(repr(key).encode())

    @property
    def is_last_turn(self) -> bool:
        """Whether the answer ends the conversation; only that one is judged."""
        return self.turn == len(self.prompt.turns) - 1


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a method made of a call."""

    run: Run
    target_rows: list[range]  # of each forward of the target, see `CallClock`


class Benchmark:
    """Measures prompts one by one.

    Args:
        models: What decodes; all on one device, in evaluation mode.
        settings: What to measure.
        seed: Of the sampling.
        judge: Of the answers.
    """

    def __init__(self, models: Models, settings: Settings, *, seed: int, judge: Judge) -> None:
        self.models, self.settings, self.seed, self.judge = models, settings, seed, judge
        self.variants = variants_of(settings)
        self._assistant_config = (
            None if models.assistant is None else copy.deepcopy(models.assistant.generation_config)
        )

    def warm_up(self, prompt: BenchmarkPrompt) -> float:
        """Decode a few tokens with every method.

        After it all methods meet the same target: transformers' own loops leave inactive hooks on
        it, which would cost only those that come later.

        Returns:
            About how many seconds one turn will take, with all methods, if each output is as long
            as it may be.
        """
        call = Call("", 0, 0, 0, prompt, self._encode(prompt, []))
        n_tokens = min(WARM_UP_TOKENS, self.settings.max_new_tokens)
        expected_s = 0.0
        for variant in self.variants:
            token_ids, clock = self._decode(variant, call, n_tokens)
            n_times = (self.settings.max_new_tokens - 1) / max(len(token_ids) - 1, 1)
            seconds = clock.seconds
            expected_s += seconds.prefill + seconds.first_draft + seconds.decode * n_times
        return expected_s

    def run_prompt(self, dataset: str, index: int, prompt: BenchmarkPrompt) -> list[Run]:
        """Decode all turns of a prompt with all methods, repeatedly.

        Later turns follow the answers of plain decoding, whatever the method, so that all methods
        decode the same prompts.
        """
        runs: list[Run] = []
        answers: list[str] = []
        for turn in range(len(prompt.turns)):
            input_ids = self._encode(prompt, answers)
            of_turn: list[Run] = []
            for repeat in range(self.settings.repeats):
                of_turn += self._run_methods(Call(dataset, index, turn, repeat, prompt, input_ids))
            answers.append(self._text(next(r for r in of_turn if r.method == "plain")))
            runs += of_turn
        return runs

    def _run_methods(self, call: Call) -> list[Run]:
        """Decode once with each method, in rotated order, and compare what they made.

        Plain decoding in another dtype is not compared: it is no claim that its outputs are equal.
        """
        first = (call.prompt_index + call.turn + call.repeat) % len(self.variants)
        made = [self._run(v, call) for v in self.variants[first:] + self.variants[:first]]
        made.sort(key=lambda one: self.variants.index(one.run.variant))
        runs = [one.run for one in made]
        if self.settings.temperature == 0:
            plain = next(one for one in made if one.run.method == "plain")
            runs = [
                m.run if m.run.variant.is_plain else self._compared(m, plain, call) for m in made
            ]
        if call.is_last_turn:
            judged = (self.judge.judge(call.prompt, self._text(run)) for run in runs)
            runs = [
                replace(run, correct=is_right) for run, is_right in zip(runs, judged, strict=True)
            ]
        return runs

    def _run(self, variant: Variant, call: Call) -> Decoded:
        token_ids, clock = self._decode(variant, call, self.settings.max_new_tokens)
        cycles = None if variant.is_plain else clock.cycles
        run = Run(
            dataset=call.dataset,
            prompt_index=call.prompt_index,
            language=call.prompt.language,
            thinking=self.thinks(call.prompt),
            turn=call.turn,
            method=variant.method,
            mode=variant.mode,
            block_size=variant.block_size,
            repeat=call.repeat,
            n_prompt_tokens=call.input_ids.shape[1],
            token_ids=token_ids,
            seconds=clock.seconds,
            cycle_seconds=clock.cycle_seconds,
            n_accepted=None if cycles is None else [c.n_accepted for c in cycles],
            n_drafted=None if cycles is None else [c.draft_ids.numel() for c in cycles],
            rejected_ids=(
                None if cycles is None else [c.draft_ids[c.n_accepted :].tolist() for c in cycles]
            ),
        )
        return Decoded(run, clock.target_rows)

    def _compared(self, made: Decoded, plain_made: Decoded, call: Call) -> Run:
        models, run, plain = self.models, made.run, plain_made.run
        pair = Pair(models.target, models.tokenizer, models.drafter, "")
        found = find_difference(pair, call.input_ids, plain.token_ids, run.token_ids)
        if found is None:
            return replace(run, identical=True)
        index, gap = found.token_index, found.top2_gap
        run = replace(run, identical=False, first_difference=index, top2_gap=gap)
        if found.plain_id is None or found.drafted_id is None:
            return replace(run, rounding=0.0)  # a stop was missed, which no rounding explains
        rows = [self._row(one, call, index) for one in (plain_made, made)]
        chosen = doubt(rows, [found.plain_id, found.drafted_id], models.target.dtype)
        return replace(run, distance=chosen.distance, rounding=chosen.rounding)

    def _row(self, made: Decoded, call: Call, index: int) -> Tensor:
        """Scores (V,) of new token ``index``, by forwards of the shapes that led to it."""
        last = call.input_ids.shape[1] + index - 1
        n_forwards = sum(rows.start <= last for rows in made.target_rows)
        return replayed_scores(
            self.models.target,
            call.input_ids,
            made.run.token_ids[:index],
            made.target_rows[:n_forwards],
            **(self._sampling() | self._stops()),
        )

    def _text(self, run: Run) -> str:
        text: str = self.models.tokenizer.decode(run.token_ids, skip_special_tokens=True)
        return text

    def _decode(
        self, variant: Variant, call: Call, max_new_tokens: int
    ) -> tuple[list[int], CallClock]:
        models, n_prompt = self.models, call.input_ids.shape[1]
        draft_model = {
            "dflash": models.drafter,
            "stock_dflash": models.drafter,
            "assistant_model": models.assistant,
        }.get(variant.method)
        in_other_dtype = variant.is_plain and variant.method != "plain"
        target: Any = models.other_target if in_other_dtype else models.target
        clock = CallClock(target, n_prompt, draft_model)
        torch.manual_seed(call.seed(self.seed))
        options = self._sampling() | self._method(variant) | self._stops()
        with self._prepared(variant), clock.running():
            output = target.generate(
                input_ids=call.input_ids,
                attention_mask=torch.ones_like(call.input_ids),
                max_new_tokens=max_new_tokens,
                streamer=clock,
                **options,
            )
        return output[0, n_prompt:].tolist(), clock

    def _sampling(self) -> dict[str, Any]:
        temperature = self.settings.temperature
        # The target's own distribution at that temperature, as in the papers: nothing else of
        # what the model's generation config may ask for.
        own = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}
        # Only where they are asked for: a processor that changes nothing would cost time as well.
        others = ("min_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size")
        asked = self.models.target.generation_config
        own |= {name: 0 for name in others if getattr(asked, name, None)}
        cut = own if temperature else {"top_k": 50, "top_p": 1.0}
        return {"do_sample": temperature > 0, "temperature": temperature or 1.0, **cut}

    def _stops(self) -> dict[str, Any]:
        if self.settings.stops_at_eos:
            return {}
        # An id that no token has: None would mean "as the model's generation config says".
        pad_id = getattr(self.models.tokenizer, "pad_token_id", None) or 0
        vocab_size = self.models.target.get_output_embeddings().weight.shape[0]
        return {"eos_token_id": vocab_size, "pad_token_id": pad_id}

    def _method(self, variant: Variant) -> dict[str, Any]:
        if variant.method == "prompt_lookup":
            return {"prompt_lookup_num_tokens": self.settings.n_lookup_tokens}
        if variant.method == "assistant_model":
            return {"assistant_model": self.models.assistant}
        if variant.method == "dflash":
            return {"assistant_model": self.models.drafter}
        if variant.method == "stock_dflash":
            return {"assistant_model": self.models.drafter, "speculation_type": "dflash"}
        return {}

    @contextmanager
    def _prepared(self, variant: Variant) -> Iterator[None]:
        """Bring the model that drafts into the state that a call begins with."""
        if variant.method == "assistant_model" and self.models.assistant is not None:
            # Its schedule is adapted by every call.
            self.models.assistant.generation_config = copy.deepcopy(self._assistant_config)
        if variant.block_size is None:
            yield
            return
        config, policy = self.models.drafter.config, self.models.drafter.generation_config
        kept = config.block_size, policy.num_assistant_tokens
        try:
            if variant.block_size != config.block_size or variant.method == "stock_dflash":
                config.block_size, policy.num_assistant_tokens = variant.block_size, None
            yield
        finally:
            config.block_size, policy.num_assistant_tokens = kept

    def _encode(self, prompt: BenchmarkPrompt, answers: list[str]) -> Tensor:
        """The conversation so far, ending where the target is to answer; ids (1, n).

        Raises:
            ValueError: The tokenizer makes no token of it.
        """
        messages = _messages(prompt.turns[: len(answers) + 1], answers)
        ids = encode_prompt(self.models.tokenizer, messages, **self._template_options(prompt))
        return ids.to(self.models.target.device)

    def _template_options(self, prompt: BenchmarkPrompt) -> dict[str, Any]:
        return {**self.settings.template_options, **prompt.template_options}

    def thinks(self, prompt: BenchmarkPrompt) -> bool:
        """Whether the target is asked to think before it answers."""
        return _thinks(self.models.tokenizer, self._template_options(prompt))


def variants_of(settings: Settings) -> list[Variant]:
    """The methods of a measurement, plain decoding first, block methods once for each block size.

    >>> made = variants_of(Settings(8, 0.0, {}, 1, methods=["plain", "dflash"], block_sizes=[4, 8]))
    >>> [variant.label for variant in made]
    ['plain', 'dflash, block 4', 'dflash, block 8']
    """
    variants: list[Variant] = []
    for method in settings.methods:
        sizes = settings.block_sizes if method in ("dflash", "stock_dflash") else [None]
        variants += [Variant(method, "chain", size) for size in sizes]  # type: ignore[arg-type]
    return variants


def _thinks(tokenizer: Any, options: Options) -> bool:
    """Whether the template asks the target to think, which some do unless told not to."""
    for name in THINKING:
        if name in options:
            return bool(options[name])
    if not getattr(tokenizer, "chat_template", None):
        return False

    def written(**more: Any) -> str:
        chat = [{"role": "user", "content": "?"}]
        every = {"add_generation_prompt": True, "tokenize": False, **options, **more}
        return str(tokenizer.apply_chat_template(chat, **every))

    prompt = written()
    return prompt.rstrip().endswith("<think>") or prompt != written(enable_thinking=False)


def _messages(turns: tuple[str, ...], answers: list[str]) -> list[dict[str, str]]:
    messages = []
    for turn, answer in zip(turns, [*answers, None], strict=True):
        messages.append({"role": "user", "content": turn})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return messages
