"""Let the target answer prompts itself, so that a drafter learns what the target really says.

A drafter that is trained on somebody else's answers learns text that the target would never
write. Source: DFlash (arXiv:2602.06036), training data.
"""

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from .answer_file import Answer, AnswerFile
from .chats import Chat
from .loss_mask import ChatEncoder

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
    """What one call did: prompts answered now, found answered already, and left out as too long."""

    n_answered: int
    n_found: int
    n_too_long: int


def prompts_of(chats: Iterable[Chat]) -> list[Chat]:
    """Cut chats into prompts: one for every assistant turn, with all that stands before it.

    A chat that does not end with the assistant gives one for its end, too.

    Raises:
        ValueError: If a chat is a plain text, which has no turn to answer.
    """
    prompts = []
    for chat in chats:
        if chat.text is not None:
            raise ValueError(
                f"{chat.source}: a plain text has no turn to answer. Give chats or prompts."
            )
        roles = [message["role"] for message in chat.messages]
        ends = [i for i, role in enumerate(roles) if role == "assistant" and i > 0]
        if roles[-1] != "assistant":
            ends.append(len(roles))
        prompts += [replace(chat, messages=chat.messages[:n], answer_ids=None) for n in ends]
    return prompts


def prompt_id(prompt: Chat) -> str:
    """Name a prompt by its content, so that the same one is never answered twice."""
    content: list[Any] = [prompt.messages, prompt.tools]
    if prompt.template_options:
        content.append(prompt.template_options)
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
        prompts: Chats that end before an assistant's turn; see :func:`prompts_of`.
        out_path: JSON lines of ``messages`` (the answer is the last), ``answer_ids`` (the very
            tokens, the end-of-turn token included), ``finished`` and the prompt's labels.
        batch_size: Prompts that are answered at once; no part of what identifies a run.
        max_new_tokens: Where an answer is cut.
        temperature: 0 is greedy; otherwise the target's own top-k and top-p stay in force.
        seed: Of the draws, with the prompts of a batch. Of no account when greedy.
        template_options: Passed to the chat template, such as ``{"enable_thinking": False}``,
            where a prompt has none of its own; kept with each answer.

    Raises:
        ValueError: If an option is out of range, the tokenizer has no chat template, or
            ``out_path`` holds answers made with other settings.
    """
    _check_options(batch_size, max_new_tokens, temperature)
    options = template_options or {}
    encoder = ChatEncoder(tokenizer)
    config = _generation_config(target, tokenizer, temperature)
    writer = _LocalWriter(target, config, max_new_tokens, seed)
    settings = {
        "made_by": "generate",
        "model": _model_name(target),
        "dtype": str(target.dtype),
        **_common_settings(max_new_tokens, temperature, seed, options),
        "chat_template": _digest(tokenizer.get_chat_template()),
        **{name: getattr(config, name, None) for name in SAMPLING_FIELDS if temperature},
    }
    with AnswerFile(Path(out_path), settings) as file:
        waiting, n_found = _not_done(prompts, options, file)
        rows = [encoder.prompt_ids(prompt) for prompt in waiting]
        n_positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
        fits = [not n_positions or len(row) + max_new_tokens <= n_positions for row in rows]
        batches = _batches([i for i, fit in enumerate(fits) if fit], rows, batch_size)
        with tqdm(total=sum(fits), desc="Answers", unit="answer") as bar:
            for batch in batches:
                answers = writer.answer([rows[i] for i in batch], tokenizer)
                file.append(map(_record, [waiting[i] for i in batch], answers))
                bar.update(len(batch))
    n_too_long = fits.count(False)
    if n_too_long:
        logger.warning(
            "%d prompts were left out: with `max_new_tokens`=%d they exceed the target's %d "
            "positions.", n_too_long, max_new_tokens, n_positions,
        )  # fmt: skip
    return RegenerationReport(sum(fits), n_found, n_too_long)


def regenerate_answers_from_server(
    base_url: str,
    model: str,
    prompts: Sequence[Chat],
    out_path: Path,
    *,
    max_new_tokens: int = 2048,
    temperature: float = 0.0,
    seed: int = 0,
    n_threads: int = 16,
    api_key: str | None = None,
    template_options: dict[str, Any] | None = None,
) -> RegenerationReport:
    """Answer ``prompts`` through an OpenAI-compatible server; else as :func:`regenerate_answers`.

    Such a server gives text and no token ids, so the answers are tokenised again for training.

    Args:
        base_url: Such as ``http://localhost:8000/v1``.
        model: The model's name on that server.
        prompts: Chats that end before an assistant's turn; see :func:`prompts_of`.
        out_path: JSON lines; continued if it is there.
        max_new_tokens: Where an answer is cut.
        temperature: 0 is greedy.
        seed: Sent with each request.
        n_threads: Requests under way at once.
        api_key: Sent as a bearer token; never written to a file.
        template_options: Sent as ``chat_template_kwargs``, as vLLM and SGLang read them, where a
            prompt has none of its own; kept with each answer.

    Raises:
        ValueError: If an option is out of range, or ``out_path`` holds other answers.
        RuntimeError: If a request fails; what was answered before is kept.
    """
    from huggingface_hub import InferenceClient

    _check_options(n_threads, max_new_tokens, temperature, batch_name="n_threads")
    options = template_options or {}
    common = _common_settings(max_new_tokens, temperature, seed, options)
    settings = {"made_by": "server", "model": model, **common}
    client = InferenceClient(base_url=base_url, api_key=api_key)

    def ask(prompt: Chat) -> Answer:
        wanted = {"chat_template_kwargs": prompt.template_options, "tools": prompt.tools}
        extra = {name: value for name, value in wanted.items() if value}
        reply = client.chat_completion(
            prompt.messages,
            model=model,
            max_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            extra_body=extra or None,
        )
        return _server_answer(reply.choices[0])

    with AnswerFile(Path(out_path), settings) as file:
        waiting, n_found = _not_done(prompts, options, file)
        _ask_in_threads(ask, waiting, file, n_threads)
    return RegenerationReport(len(waiting), n_found, n_too_long=0)


class _LocalWriter:
    """Answers batches of prompts with the target."""

    def __init__(
        self, target: "PreTrainedModel", config: "GenerationConfig", max_new_tokens: int, seed: int
    ):
        self.target: Any = target  # transformers types generate() on the classes that have it
        self.config = config
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.end_ids = set(torch.tensor(config.eos_token_id).reshape(-1).tolist())

    def answer(
        self, rows: list[list[int]], tokenizer: "PreTrainedTokenizerBase"
    ) -> Iterator[Answer]:
        if self.config.do_sample:
            # By the batch's content: a resumed run draws for the rest what an unbroken one does.
            torch.manual_seed(int(_digest([self.seed, rows])[:15], 16))
        for ids in self._generate(rows):
            finished = ids[-1] in self.end_ids
            text = tokenizer.decode(ids[:-1] if finished else ids, skip_special_tokens=True)
            yield Answer({"role": "assistant", "content": text}, ids, finished)

    def _generate(self, rows: list[list[int]]) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in rows]
        unfinished = list(range(len(rows)))
        n_made = 0
        while unfinished and n_made < self.max_new_tokens:
            n_new = min(SEGMENT_TOKENS, self.max_new_tokens - n_made)
            made = self._segment([rows[i] + answers[i] for i in unfinished], n_new)
            for i, ids in zip(unfinished, made, strict=True):
                answers[i] += ids
            n_made += n_new
            unfinished = [i for i in unfinished if answers[i][-1] not in self.end_ids]
        return answers

    @torch.inference_mode()
    def _segment(self, rows: list[list[int]], n_new: int) -> Iterator[list[int]]:
        width = max(map(len, rows))
        pads = [width - len(row) for row in rows]
        pad_id = self.config.pad_token_id
        device = self.target.get_input_embeddings().weight.device
        self.config.max_new_tokens = n_new
        out = self.target.generate(
            torch.tensor([[pad_id] * n + row for n, row in zip(pads, rows, strict=True)]).to(
                device
            ),
            attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in pads]).to(device),
            generation_config=self.config,
        )
        return map(self._up_to_the_end, out[:, width:].tolist())

    def _up_to_the_end(self, ids: list[int]) -> list[int]:
        ends = [i for i, token in enumerate(ids) if token in self.end_ids]
        return ids[: ends[0] + 1] if ends else ids


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
    if not temperature:
        config.top_k = config.top_p = config.min_p = None
    if config.pad_token_id is None:
        end_id = torch.tensor(config.eos_token_id).reshape(-1)[0].item()
        config.pad_token_id = end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return config


def _model_name(target: "PreTrainedModel") -> str:
    # The folder's own name only: the same answers may be continued on another machine.
    path = Path(target.config.name_or_path or "")
    return path.name if path.is_dir() else str(target.config.name_or_path)


def _check_options(
    batch_size: int, max_new_tokens: int, temperature: float, batch_name: str = "batch_size"
) -> None:
    for name, value in ((batch_name, batch_size), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"`temperature` must be 0 (greedy) or more, got {temperature}.")


def _common_settings(
    max_new_tokens: int, temperature: float, seed: int, options: dict[str, Any]
) -> dict[str, Any]:
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": float(temperature),
        "seed": seed,
        "template_options": options,
    }


def _not_done(
    prompts: Sequence[Chat], options: dict[str, Any], file: AnswerFile
) -> tuple[list[Chat], int]:
    by_id = {}
    for given in prompts:
        prompt = replace(given, template_options={**options, **given.template_options})
        by_id[prompt_id(prompt)] = prompt
    waiting = [prompt for name, prompt in by_id.items() if name not in file.done]
    return waiting, len(by_id) - len(waiting)


def _batches(indices: list[int], rows: list[list[int]], batch_size: int) -> Iterator[list[int]]:
    stretch = batch_size * BATCHES_PER_STRETCH
    for start in range(0, len(indices), stretch):
        by_length = sorted(indices[start : start + stretch], key=lambda i: len(rows[i]))
        for first in range(0, len(by_length), batch_size):
            yield by_length[first : first + batch_size]


def _record(prompt: Chat, answer: Answer) -> dict[str, Any]:
    return {
        "id": prompt_id(prompt),
        **prompt.labels,
        "messages": [*prompt.messages, answer.message],
        **({"tools": prompt.tools} if prompt.tools else {}),
        **({"chat_template_kwargs": prompt.template_options} if prompt.template_options else {}),
        **({"answer_ids": answer.ids} if answer.ids is not None else {}),
        "finished": answer.finished,
    }


def _server_answer(choice: Any) -> Answer:
    message = {"role": "assistant", "content": choice.message.content or ""}
    # vLLM and SGLang put the thinking of a reasoning model here; templates read it back.
    if reasoning := getattr(choice.message, "reasoning_content", None):
        message["reasoning_content"] = reasoning
    return Answer(message, None, choice.finish_reason != "length")


def _ask_in_threads(
    ask: Callable[[Chat], Answer], prompts: list[Chat], file: AnswerFile, n_threads: int
) -> None:
    bar = tqdm(total=len(prompts), desc="Answers", unit="answer")
    with bar, ThreadPoolExecutor(n_threads) as pool:
        futures = {pool.submit(ask, prompt): prompt for prompt in prompts}
        for future in as_completed(futures):
            try:
                answer = future.result()
            except Exception as error:
                pool.shutdown(wait=True, cancel_futures=True)
                raise RuntimeError(
                    f"The server failed to answer a prompt: {error} Start the same command again "
                    f"to continue: {len(file.done)} answers are kept in {file.path}."
                ) from error
            file.append([_record(futures[future], answer)])
            bar.update()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
