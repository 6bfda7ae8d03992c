"""Let the target answer prompts itself, so that a drafter learns what the target really says.

A drafter that is trained on somebody else's answers learns text that the target would never
write. Source: DFlash (arXiv:2602.06036), training data.
"""

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from .answer_file import Answer, AnswerFile
from .chats import Chat
from .loss_mask import ChatEncoder, UnusableTurnError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Rows of a batch end at different times. After so many tokens the ended ones leave it; the others
# pay one prefill, which costs less than carrying dead rows to the longest answer's end.
SEGMENT_TOKENS = 64
# Prompts of similar length share a batch, within a stretch of so many batches only: the file
# stays a fair sample of the prompts at any time.
BATCHES_PER_STRETCH = 8

SAMPLING_FIELDS = ("top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class RegenerationReport:
    """What one call did.

    Attributes:
        n_answered: Prompts that were answered now.
        n_found: Prompts that were answered by an earlier call.
        n_left_out: Prompts that are too long for the target, or that the template refuses.
    """

    n_answered: int
    n_found: int
    n_left_out: int = 0


def prompt_id(prompt: Chat) -> str:
    """Name a prompt by its content, so that the same one is never answered twice."""
    content: list[Any] = [prompt.messages, prompt.tools]
    if prompt.template_options:
        content.append(prompt.template_options)
    return digest(content)


def regenerate_answers(
    target: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Chat],
    out_path: Path,
    *,
    batch_size: int = 32,
    max_new_tokens: int = 2048,
    temperature: float = 0.0,
    seed: int = 0,
    template_options: dict[str, Any] | None = None,
) -> RegenerationReport:
    """Answer ``prompts`` with ``target`` and append the answers to ``out_path``, batch by batch.

    A run that was interrupted continues where it stopped when it is called again.

    Args:
        target: Answers with its own generation config, but for the options given here.
        tokenizer: With the chat template that the target is served with.
        prompts: Chats that end before an assistant's turn.
        out_path: JSON lines of ``messages`` (the answer is the last), ``answer_ids`` (the very
            tokens, the end-of-turn token included), ``finished`` and the prompt's labels.
        batch_size: Prompts that are answered at once; no part of what identifies a run.
        max_new_tokens: Where an answer is cut.
        temperature: 0 is greedy; otherwise the target's own top-k and top-p stay in force.
        seed: Of the draws, with the prompts of a batch. Of no account when greedy.
        template_options: Passed to the chat template, such as ``{"enable_thinking": False}``,
            where a prompt has none of its own; kept with each answer.

    Raises:
        ValueError: If an option is out of range, ``max_new_tokens`` leaves no position of the
            target for a prompt, the tokenizer has no chat template, or ``out_path`` holds answers
            made with other settings.
    """
    check_options("batch_size", batch_size, max_new_tokens, temperature)
    room = _room(target, max_new_tokens)
    options = template_options or {}
    config = _generation_config(target, tokenizer, temperature)
    settings = {
        "made_by": "generate",
        "model": _model_name(target),
        "dtype": str(target.dtype),
        **common_settings(max_new_tokens, temperature, seed, options),
        "chat_template": digest(tokenizer.get_chat_template()),
        **{name: getattr(config, name, None) for name in SAMPLING_FIELDS if temperature},
    }
    wanted = distinct(prompts, options)
    rows = _usable_rows(ChatEncoder(tokenizer), wanted, room)
    writer = _LocalWriter(target, tokenizer, config, max_new_tokens, seed)
    with AnswerFile(Path(out_path), settings) as file:
        # Planned over all prompts: what is left of an interrupted run keeps its batches.
        missing = [i for i in rows if prompt_id(wanted[i]) not in file.done]
        with tqdm(total=len(missing), desc="Answers", unit="answer") as bar:
            for planned in _batches(rows, batch_size):
                batch = [i for i in planned if prompt_id(wanted[i]) not in file.done]
                answers = writer.answer([rows[i] for i in batch], on_ended=bar.update)
                file.append(map(record, [wanted[i] for i in batch], answers))
    return RegenerationReport(
        n_answered=len(missing),
        n_found=len(rows) - len(missing),
        n_left_out=len(wanted) - len(rows),
    )


class _LocalWriter:
    """Answers batches of prompts with the target."""

    def __init__(
        self,
        target: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        config: "GenerationConfig",
        max_new_tokens: int,
        seed: int,
    ):
        self.target: Any = target  # transformers types generate() on the classes that have it
        self.tokenizer = tokenizer
        self.config = config
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.end_ids = set(torch.tensor(config.eos_token_id).reshape(-1).tolist())

    def answer(self, rows: list[list[int]], on_ended: Callable[[int], object]) -> list[Answer]:
        """Answer the prompts ``rows`` of token ids; ``on_ended`` takes the count of those ended."""
        with torch.random.fork_rng(enabled=self.config.do_sample):
            if self.config.do_sample:
                # By the batch's content: the rest of an interrupted run draws as it would have.
                torch.manual_seed(int(digest([self.seed, rows])[:15], 16))
            return [self._answer(ids) for ids in self._generate(rows, on_ended)]

    def _answer(self, ids: list[int]) -> Answer:
        finished = ids[-1] in self.end_ids
        shown = ids[:-1] if finished else ids
        text = self.tokenizer.decode(shown, skip_special_tokens=True)
        return Answer({"role": "assistant", "content": text}, ids, finished)

    def _generate(
        self, rows: list[list[int]], on_ended: Callable[[int], object]
    ) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in rows]
        unfinished = list(range(len(rows)))
        n_made = 0
        while unfinished and n_made < self.max_new_tokens:
            n_new = min(SEGMENT_TOKENS, self.max_new_tokens - n_made)
            made = self._segment([rows[i] + answers[i] for i in unfinished], n_new)
            for i, ids in zip(unfinished, made, strict=True):
                answers[i] += ids
            n_made += n_new
            n_before = len(unfinished)
            unfinished = [i for i in unfinished if answers[i][-1] not in self.end_ids]
            on_ended(n_before - len(unfinished))
        on_ended(len(unfinished))  # cut
        return answers

    @torch.inference_mode()
    def _segment(self, rows: list[list[int]], n_new: int) -> list[list[int]]:
        width = max(map(len, rows))
        pads = [width - len(row) for row in rows]
        device = self.target.get_input_embeddings().weight.device
        padded = [[self.config.pad_token_id] * n + row for n, row in zip(pads, rows, strict=True)]
        self.config.max_new_tokens = n_new
        out = self.target.generate(
            torch.tensor(padded, device=device),
            attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in pads]).to(device),
            generation_config=self.config,
        )
        return [self._up_to_the_end(ids) for ids in out[:, width:].tolist()]

    def _up_to_the_end(self, ids: list[int]) -> list[int]:
        ends = [i for i, token in enumerate(ids) if token in self.end_ids]
        return ids[: ends[0] + 1] if ends else ids


def check_options(
    batch_name: str, batch_size: int, max_new_tokens: int, temperature: float
) -> None:
    """Refuse options out of range; ``batch_name`` is what the caller calls ``batch_size``."""
    for name, value in ((batch_name, batch_size), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"`temperature` must be 0 (greedy) or more, got {temperature}.")


def common_settings(
    max_new_tokens: int, temperature: float, seed: int, options: dict[str, Any]
) -> dict[str, Any]:
    """What identifies a run, wherever its answers are made."""
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": float(temperature),
        "seed": seed,
        "template_options": options,
    }


def distinct(prompts: Sequence[Chat], options: dict[str, Any]) -> list[Chat]:
    """Each prompt once, with the template options that it is answered with."""
    filled = (replace(p, template_options={**options, **p.template_options}) for p in prompts)
    return list({prompt_id(prompt): prompt for prompt in filled}.values())


def record(prompt: Chat, answer: Answer) -> dict[str, Any]:
    """What is written for an answer; :func:`hf_dflash.chats.chat_of` reads it back."""
    optional = {
        "tools": prompt.tools,
        "chat_template_kwargs": prompt.template_options,
        "answer_ids": answer.ids,
    }
    return {
        **prompt.labels,
        "id": prompt_id(prompt),
        "messages": [*prompt.messages, answer.message],
        **{name: value for name, value in optional.items() if value},
        "finished": answer.finished,
    }


def digest(value: Any) -> str:
    """A short name for any value that JSON can hold."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _generation_config(
    target: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", temperature: float
) -> "GenerationConfig":
    """The target's own, with the temperature asked for and without what greedy search ignores."""
    config = copy.deepcopy(target.generation_config)
    if config is None or config.eos_token_id is None:
        raise ValueError(
            "`target` needs `generation_config.eos_token_id`, the tokens that end a turn, got "
            "None. Set it: without it no answer ends."
        )
    config.max_length = None
    config.do_sample = temperature > 0
    config.temperature = temperature or None
    if temperature:
        # Said outright: what is left open, generate() fills with a top-k of 50.
        config.top_k, config.top_p = config.top_k or 0, config.top_p or 1.0
    else:
        config.top_k = config.top_p = config.min_p = None
    if config.pad_token_id is None:
        end_id = torch.tensor(config.eos_token_id).reshape(-1)[0].item()
        config.pad_token_id = end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return config


def _model_name(target: "PreTrainedModel") -> str:
    # The folder's own name only: the same answers may be continued on another machine.
    path = Path(target.config.name_or_path or "")
    return path.name if path.is_dir() else str(target.config.name_or_path)


def _room(target: "PreTrainedModel", max_new_tokens: int) -> int | None:
    """Most tokens of a prompt; None if the target's positions are not limited."""
    n_positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    if not n_positions:
        return None
    if max_new_tokens >= n_positions:
        raise ValueError(
            f"`max_new_tokens` must be less than the target's {n_positions} positions, which hold "
            f"the prompt, too, got {max_new_tokens}. Give less."
        )
    return int(n_positions - max_new_tokens)


def _usable_rows(
    encoder: ChatEncoder, prompts: Sequence[Chat], room: int | None
) -> dict[int, list[int]]:
    """The token ids of the prompts that can be answered, by their number."""
    rows = {}
    problems = []
    for i, prompt in enumerate(prompts):
        try:
            ids = encoder.prompt_ids(prompt)
        except UnusableTurnError as error:
            problems.append(f"{prompt.source}: {error}")
            continue
        if room is not None and len(ids) > room:
            problems.append(f"{prompt.source}: {len(ids)} tokens, of which {room} leave room")
        else:
            rows[i] = ids
    if problems:
        logger.warning("Left out %d prompts; first %s.", len(problems), problems[0])
    return rows


def _batches(rows: dict[int, list[int]], batch_size: int) -> Iterator[list[int]]:
    numbers = list(rows)
    stretch = batch_size * BATCHES_PER_STRETCH
    for start in range(0, len(numbers), stretch):
        by_length = sorted(numbers[start : start + stretch], key=lambda i: len(rows[i]))
        for first in range(0, len(by_length), batch_size):
            yield by_length[first : first + batch_size]
