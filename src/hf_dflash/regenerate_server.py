"""Let a target that runs on an OpenAI-compatible server (vLLM, SGLang, ...) answer prompts."""

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from huggingface_hub.errors import HTTPError
from tqdm.auto import tqdm

from .answer_file import Answer, AnswerFile
from .chats import Chat
from .hub_errors import answer_of, is_the_hubs_own, status_of
from .loss_mask import REASONING_FIELDS
from .regenerate import (
    RegenerationReport,
    check_options,
    common_settings,
    distinct,
    prompt_id,
    record,
)

logger = logging.getLogger(__name__)

#: Seconds before a request that failed is sent again; after the last of them the run ends.
PAUSES = (1.0, 4.0, 16.0)
#: What servers answer to a request that they cannot take: one prompt's fault, such as its length.
REFUSALS = (400, 413, 422)
#: If all of the first so many prompts fail, and nothing is answered, it is no prompt's fault.
FIRST_PROMPTS = 8


class UnusableAnswerError(ValueError):
    """An answer came that no chat template can take."""


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
    timeout: float = 600.0,
    api_key: str | None = None,
    template_options: dict[str, Any] | None = None,
) -> RegenerationReport:
    """Answer ``prompts`` and append the answers to ``out_path`` as they come.

    Such a server gives text and no token ids, so the answers are tokenised again for training.
    A run that was interrupted continues where it stopped when it is called again. A prompt that
    the server refuses (too long, as a rule), or that it answers with a call whose arguments are no
    JSON, is logged and left out.

    Args:
        base_url: Such as ``http://localhost:8000/v1``.
        model: The model's name on that server.
        prompts: Chats that end before an assistant's turn.
        out_path: JSON lines, as :func:`hf_dflash.regenerate.regenerate_answers` writes them.
        max_new_tokens: Where an answer is cut.
        temperature: 0 is greedy.
        seed: Sent with each request.
        n_threads: Requests under way at once.
        timeout: Most seconds that the server may be silent. A request that it does not answer, or
            answers with a fault of its own, is sent three times more.
        api_key: Sent as a bearer token; never written to a file.
        template_options: Sent as ``chat_template_kwargs``, as vLLM and SGLang read them, where a
            prompt has none of its own; kept with each answer.

    Raises:
        ValueError: If an option is out of range, or ``out_path`` holds other answers.
        RuntimeError: If a request fails for another reason, or nothing is answered and the first
            prompts are all left out; what was answered before is kept.
    """
    from huggingface_hub import InferenceClient

    check_options("n_threads", n_threads, max_new_tokens, temperature)
    if not 0 < timeout < float("inf"):
        raise ValueError(f"`timeout` must be a number of seconds above 0, got {timeout}.")
    options = template_options or {}
    client = InferenceClient(base_url=base_url, api_key=api_key, timeout=timeout)

    def ask(prompt: Chat) -> Answer:
        fields = {"chat_template_kwargs": prompt.template_options, "tools": prompt.tools}
        reply = client.chat_completion(
            prompt.messages,
            model=model,
            max_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            extra_body={name: value for name, value in fields.items() if value},
        )
        return _answer(reply.choices[0])

    common = common_settings(max_new_tokens, temperature, seed, options)
    wanted = distinct(prompts, options)
    with AnswerFile(Path(out_path), {"made_by": "server", "model": model, **common}) as file:
        waiting = [prompt for prompt in wanted if prompt_id(prompt) not in file.done]
        n_left_out = _ask_in_threads(ask, waiting, file, n_threads)
    return RegenerationReport(
        n_answered=len(waiting) - n_left_out,
        n_found=len(wanted) - len(waiting),
        n_left_out=n_left_out,
    )


def _answer(choice: Any) -> Answer:
    message: dict[str, Any] = {"role": "assistant", "content": choice.message.content or ""}
    # Servers differ in where the thinking of a reasoning model is; templates read it back here.
    said = (getattr(choice.message, name, None) for name in REASONING_FIELDS)
    if reasoning := next(filter(None, said), None):
        message["reasoning_content"] = reasoning
    if calls := choice.message.tool_calls:
        # Servers give the arguments as JSON text; templates take them as an object.
        functions = [
            {"name": call.function.name, "arguments": _arguments(call.function)} for call in calls
        ]
        message["tool_calls"] = [{"type": "function", "function": call} for call in functions]
    return Answer(message, None, choice.finish_reason != "length")


def _arguments(function: Any) -> Any:
    try:
        return json.loads(function.arguments)
    except (ValueError, TypeError) as error:
        raise UnusableAnswerError(
            f"the arguments of its call of {function.name} are not JSON ({error}): "
            f"{function.arguments!r:.80}"
        ) from error


def _ask_again(ask: Callable[[Chat], Answer], ended: Event, prompt: Chat) -> Answer:
    """Ask until an answer comes, some times, or until the run has ``ended``."""
    for pause in PAUSES:
        try:
            return ask(prompt)
        except Exception as error:
            if not _may_pass(error):
                raise
            logger.warning("%s Asking again in %g s.", str(error).partition("\n")[0], pause)
            if ended.wait(pause):
                raise
    return ask(prompt)


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later: silence, broken connections, server faults."""
    answer = answer_of(error)
    if answer is not None:
        return is_the_hubs_own(status_of(answer))
    return isinstance(error, (HTTPError, OSError))


def _is_one_prompts(error: Exception) -> bool:
    """Whether other prompts may be answered all the same."""
    return isinstance(error, UnusableAnswerError) or status_of(answer_of(error)) in REFUSALS


def _ask_in_threads(
    ask: Callable[[Chat], Answer], prompts: list[Chat], file: AnswerFile, n_threads: int
) -> int:
    """Append an answer for each prompt; how many were left out."""
    bar = tqdm(total=len(prompts), desc="Answers", unit="answer")
    left_out: set[Future[Answer]] = set()
    with bar, ThreadPoolExecutor(n_threads) as pool:
        ended = Event()
        again = partial(_ask_again, ask, ended)
        futures = {pool.submit(again, prompt): prompt for prompt in prompts}
        # By their order: refusals come sooner than answers.
        first = list(futures)[:FIRST_PROMPTS]
        for future in as_completed(futures):
            prompt = futures[future]
            try:
                answer = future.result()
            except Exception as error:
                left_out.add(future)
                nothing_works = not file.done and left_out.issuperset(first)
                if nothing_works or not _is_one_prompts(error):
                    ended.set()
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise RuntimeError(_failure(error, file)) from error
                logger.warning("Left out %s: %s", prompt.source, _reason(error))
            else:
                file.append([record(prompt, answer)])
            bar.update()
    return len(left_out)


def _failure(error: Exception, file: AnswerFile) -> str:
    slow = " Raise `timeout` if it is slow." if isinstance(error, TimeoutError) else ""
    return (
        f"The server failed to answer a prompt: {_reason(error)}{slow} Give the same options "
        f"again to continue: {len(file.done)} answers are kept in {file.path}."
    )


def _reason(error: Exception) -> str:
    """One line, with what the server says of it: the client shows that of some errors only."""
    refusal = answer_of(error)
    body = refusal.response.text if refusal is not None and refusal.response is not None else ""
    said = str(error) if body in str(error) else f"{error} {body[:300]}"
    return " ".join(said.split())
