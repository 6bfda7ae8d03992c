"""What the commands of ``hf-dflash`` do: check, load, run, show, write."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from .checkpoint_dflash import check_folder_exists
from .demo import DTYPES, LoadPair, Pair, as_json, run
from .demo_view import TerminalView
from .loading import check_source
from .modeling_dflash import DFlashDraftModel
from .smollm2 import demo_drafter_folder, load_target

# Kinds of text that the demo's drafter has learned, and one open question that it has not.
DEMO_PROMPTS = (
    "Count from 1 to 40, one number per line.",
    "List the even numbers from 2 to 60.",
    "Write a JSON list of five people with name, age and city.",
    "Make a table of ten fruits and their colors.",
    "Write a SQL query to create a table of customers with id, name, email and phone.",
    "Explain how a rainbow forms.",
)


def read_prompts(path: Path) -> list[str]:
    """Read a JSON Lines file of objects with ``prompt``; other keys are left alone.

    Raises:
        ValueError: A line is not such an object (the message has its number), or there is none.
        OSError: The file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"`prompts` must be a UTF-8 text file, got {path}: {error}.") from error
    prompts = [_prompt_of(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(
            f"`prompts` must hold at least one object with `prompt`, got none in {path}."
        )
    return prompts


def _prompt_of(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg}, column {error.colno}).") from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'{where}: needs an object like {{"prompt": "text"}}, got {line[:60]!r}.')
    return prompt


def run_demo(
    *, dtype: str, prompts_file: Path | None, max_new_tokens: int, json_file: Path | None
) -> None:
    """Decode the demo's prompts, or those of a file, with SmolLM2-135M-Instruct."""
    _check(dtype, max_new_tokens, json_file)
    prompts = DEMO_PROMPTS if prompts_file is None else read_prompts(prompts_file)
    drafter_folder = demo_drafter_folder()
    view = TerminalView(Console())

    def load_pair(name: str) -> Pair:
        target, tokenizer = load_target(name, notify=view.notify)
        drafter = DFlashDraftModel.from_pretrained(drafter_folder, dtype=name)
        return _on_device(Pair(target, tokenizer, drafter, name))

    _run(load_pair, prompts, dtype, max_new_tokens, json_file, view)


def run_pair(
    target: str,
    drafter: str,
    prompts: Sequence[str],
    *,
    dtype: str,
    max_new_tokens: int,
    json_file: Path | None,
) -> None:
    """Decode prompts with any target and a drafter made for it."""
    _check(dtype, max_new_tokens, json_file)
    _check_prompts(prompts)
    check_folder_exists(target, "target", {})
    check_folder_exists(drafter, "drafter", {})

    def load_pair(name: str) -> Pair:
        check_source(drafter, "drafter")
        check_source(target, "target")
        # The drafter first: it is small, and most mistakes are found in its config.
        draft_model = DFlashDraftModel.from_pretrained(drafter, dtype=name)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=name)
        tokenizer = AutoTokenizer.from_pretrained(target)
        return _on_device(Pair(model, tokenizer, draft_model, name))

    view = TerminalView(Console())
    _run(load_pair, prompts, dtype, max_new_tokens, json_file, view, time_both=False)


def _check(dtype: str, max_new_tokens: int, json_file: Path | None) -> None:
    _check_dtype(dtype)
    _check_max_new_tokens(max_new_tokens)
    _check_json_path(json_file)


def _check_dtype(dtype: str) -> None:
    """Refuse a dtype that the demo cannot run in."""
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"`dtype` must be auto, float32 or bfloat16, got {dtype!r}.")


def _check_max_new_tokens(max_new_tokens: int) -> None:
    """Refuse a number of tokens with which nothing is decoded."""
    if max_new_tokens < 1:
        raise ValueError(f"`max_new_tokens` must be at least 1, got {max_new_tokens}.")


def _check_prompts(prompts: Sequence[str]) -> None:
    """Refuse a prompt without a word, as in a file of prompts."""
    for prompt in prompts:
        if not prompt.strip():
            raise ValueError(f"`prompt` must be a text that is not empty, got {prompt!r}.")


def _check_json_path(path: Path | None) -> None:
    """Refuse, before minutes of work, a path that cannot be written after them."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"`json` must be a file in an existing folder, got {path}.")


def _on_device(pair: Pair) -> Pair:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, drafter = pair.target.to(device).eval(), pair.drafter.to(device).eval()
    return Pair(target, pair.tokenizer, drafter, pair.dtype)


def _run(
    load_pair: LoadPair,
    prompts: Sequence[str],
    dtype: str,
    max_new_tokens: int,
    json_file: Path | None,
    view: TerminalView,
    *,
    time_both: bool = True,
) -> None:
    transformers_logging.disable_progress_bar()
    report = run(
        load_pair,
        prompts,
        dtype=dtype,
        max_new_tokens=max_new_tokens,
        view=view,
        time_both=time_both,
    )
    # Before anything else that could fail: the figures may have taken minutes.
    if json_file is not None:
        json_file.write_text(as_json(report), encoding="utf-8")
    view.summary(report)
