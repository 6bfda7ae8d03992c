"""Data sets: what their rows become, where they come from, and what is said of broken ones."""

from __future__ import annotations

import gzip
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hf_dflash import benchmark_data
from hf_dflash.benchmark_data import (
    SOURCES,
    BenchmarkPrompt,
    HubSource,
    WheelSource,
    dataset_name,
    load_prompts,
)
from hf_dflash.chats import read_chats

STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
HUMANEVAL = {"prompt": "def f():\n", "entry_point": "f", "test": "def check(c):\n    pass"}
#: A row of each data set as its repository has it, and the prompt that the papers make of it.
ROWS: dict[str, tuple[dict[str, Any], BenchmarkPrompt]] = {
    "gsm8k": (
        {"question": "How many?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
        BenchmarkPrompt(("How many?" + STEPS,), answer="4"),
    ),
    "math500": (
        {"problem": "Find x.", "answer": "\\frac{1}{2}", "level": 3},
        BenchmarkPrompt(("Find x." + STEPS,), answer="\\frac{1}{2}"),
    ),
    "aime25": (
        {"problem": "Find m+n.", "answer": 70},
        BenchmarkPrompt(("Find m+n." + STEPS,), answer="70"),
    ),
    "humaneval": (
        HUMANEVAL,
        BenchmarkPrompt(
            (
                "Write a solution to the following problem and make sure that it passes the tests:"
                "\n```python\ndef f():\n\n```",
            ),
            tests="def check(c):\n    pass\ncheck(f)",
            code_prefix="def f():\n",
        ),
    ),
    "mbpp": (
        {
            "prompt": "Write f.",
            "test_imports": ["import math"],
            "test_list": ["assert f() == 1", "assert f() > 0"],
        },
        BenchmarkPrompt(("Write f.",), tests="import math\nassert f() == 1\nassert f() > 0"),
    ),
    "mt-bench": (
        {"prompt": ["Write.", "Rewrite."], "category": "writing"},
        BenchmarkPrompt(("Write.", "Rewrite.")),
    ),
    "alpaca": (
        {"instruction": "Sort.", "input": "c, a", "output": "a, c"},
        BenchmarkPrompt(("Sort.\n\nInput:\nc, a",)),
    ),
    "gsm8k-pypi": (
        {"prompt": "How many?", "expected": "4"},
        BenchmarkPrompt(("How many?" + STEPS,), answer="4"),
    ),
    "mt-bench-pypi": ({"turns": ["A", "B"]}, BenchmarkPrompt(("A", "B"))),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_the_papers_prompt(name: str) -> None:
    row, prompt = ROWS[name]
    assert SOURCES[name].prompt_of(row) == prompt


def test_an_instruction_without_input_stands_alone() -> None:
    row = {"instruction": "Tell a joke.", "input": ""}
    assert SOURCES["alpaca"].prompt_of(row).turns == ("Tell a joke.",)


@pytest.mark.parametrize(
    ("starter", "asked"),
    [
        ("class S:", "### Format: Use the following code structure:\n```python\nclass S:\n```"),
        (
            "",
            "### Format: Write your code in the following format:\n"
            "```python\n# YOUR CODE HERE\n```",
        ),
    ],
)
def test_livecodebench_asks_in_its_own_words(starter: str, asked: str) -> None:
    row = {"question_content": "Add.", "starter_code": starter}
    (turn,) = SOURCES["livecodebench"].prompt_of(row).turns
    assert turn.startswith("You are an expert Python programmer.")
    assert f"\n\n### Question:\nAdd.\n\n{asked}\n\n### Answer: (use" in turn


class StandInForDatasets(types.ModuleType):
    """Serves rows, and keeps what it was asked for."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__("datasets")
        self.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        self.rows, self.calls = rows, []  # type: ignore[var-annotated]

    def load_dataset(self, *arguments: str, **options: Any) -> list[dict[str, Any]]:
        self.calls.append((arguments, options))
        return self.rows


@pytest.mark.parametrize("name", [n for n, s in SOURCES.items() if isinstance(s, HubSource)])
def test_a_data_set_of_the_hub_is_asked_for_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    row = {"question_content": "?"} if name == "livecodebench" else ROWS[name][0]
    hub = StandInForDatasets([row] * 5)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    said: list[str] = []
    assert len(load_prompts(name, 3, notify=said.append)) == 3
    assert said == [f"Loading {name} from the Hugging Face Hub"]
    ((arguments, options),) = hub.calls
    source = SOURCES[name]
    assert isinstance(source, HubSource)
    assert arguments == source.arguments
    assert options.pop("split") == source.split
    files = options.get("data_files", {}).get("test", [])
    assert len(files) == (6 if name == "livecodebench" else 0)


@pytest.mark.parametrize("name", [n for n, s in SOURCES.items() if isinstance(s, HubSource)])
def test_renamed_columns_of_the_hub_are_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source = SOURCES[name]
    assert isinstance(source, HubSource)
    monkeypatch.setitem(sys.modules, "datasets", StandInForDatasets([{"other": "?", "id": 1}]))
    expected = (
        rf"`dataset` {name}: row 1 of {re.escape(source.arguments[0])} must have the columns "
        rf"{re.escape(str(list(source.columns)))} .*got the columns \['other', 'id'\]"
    )
    with pytest.raises(ValueError, match=expected):
        load_prompts(name, 1)


def test_a_column_of_the_hub_that_holds_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = StandInForDatasets([{"prompt": ["one", "two"]}, {"prompt": [{"content": "one"}]}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(ValueError, match=r"row 2 of .*mt_bench_prompts must have .*got the turns"):
        load_prompts("mt-bench", 2)


def test_a_hub_that_cannot_be_reached_is_said_with_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = StandInForDatasets([])

    def no_route(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    hub.load_dataset = no_route  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setattr("hf_dflash.hub_errors.HfApi.auth_check", no_route)
    with pytest.raises(ConnectionError, match=r"openai/gsm8k cannot be read.*use gsm8k-pypi"):
        load_prompts("gsm8k", 1)
    with pytest.raises(ConnectionError, match=r"tatsu-lab/alpaca cannot .* and run it again"):
        load_prompts("alpaca", 1)
    with pytest.raises(ConnectionError, match=r"dataset livecodebench/code_generation_lite cannot"):
        load_prompts("livecodebench", 1)


def test_without_datasets_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_data, "find_spec", lambda _: None)
    with pytest.raises(RuntimeError, match=r"`datasets`, which is not installed: pip install"):
        load_prompts("gsm8k", 1)


@pytest.mark.parametrize("name", [n for n, s in SOURCES.items() if isinstance(s, WheelSource)])
def test_a_data_set_of_a_wheel_is_read_from_the_kept_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    source = SOURCES[name]
    assert isinstance(source, WheelSource)
    path = tmp_path / Path(source.file.member).name
    row = HUMANEVAL if name == "humaneval-pypi" else ROWS[name][0]
    content = (json.dumps(row) + "\n").encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    monkeypatch.setattr(benchmark_data, "kept_file", lambda *_, **__: path)
    assert load_prompts(name, 9) == [source.prompt_of(row)]


def test_held_out_prompts_were_not_trained_on() -> None:
    prompts = load_prompts("held-out", 10**6)
    assert len(prompts) > 50
    assert len({prompt.turns for prompt in prompts}) == len(prompts)


def test_held_out_prompts_need_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmark_data, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    with pytest.raises(RuntimeError, match=r"made by .*smollm2_prompts\.py, which is not there"):
        load_prompts("held-out", 1)


def lines(tmp_path: Path, *rows: Any, name: str = "mine.jsonl") -> str:
    path = tmp_path / name
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    content = "\n".join(texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def test_any_json_lines(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        {"prompt": "Hallo", "language": "de", "kind": "chat"},
        "",
        {"turns": ["one", "two"], "answer": "2"},
        name="mine.jsonl.gz",
    )
    assert load_prompts(path, 9) == [
        BenchmarkPrompt(("Hallo",), "de"),
        BenchmarkPrompt(("one", "two"), answer="2"),
    ]
    assert [p.source for p in load_prompts(path, 9)] == [f"{path}, line 1", f"{path}, line 3"]
    assert dataset_name(path) == "mine"
    assert dataset_name("gsm8k") == "gsm8k"


def test_a_row_may_say_what_the_chat_template_gets(tmp_path: Path) -> None:
    """As a row of training data does: the same records, read by either."""
    rows = [
        {"prompt": "a", "chat_template_kwargs": {"enable_thinking": False, "style": "dry"}},
        {"prompt": "b", "chat_template_kwargs": '{"enable_thinking": true}'},
        {"prompt": "c", "chat_template_kwargs": None},
        {"prompt": "d"},
    ]
    path = lines(tmp_path, *rows)
    found = [dict(prompt.template_options) for prompt in load_prompts(path, 9)]
    assert found == [{"enable_thinking": False, "style": "dry"}, {"enable_thinking": True}, {}, {}]
    assert found == [chat.template_options for chat in read_chats(path)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "cut of', r"line 2: not JSON \(Unterminated string.*column 12\).*file whole"),
        ("[1]", r"line 2: needs an object like .*, got '\[1\]'"),
        ('{"text": "x"}', r"line 2: needs an object like"),
        ('{"prompt": " "}', r"line 2: needs an object like"),
        ('{"turns": []}', r"line 2: needs an object like"),
        ('{"turns": "abc"}', r"line 2: needs an object like"),
        ('{"turns": ["a", 3]}', r"line 2: needs an object like"),
        ('{"prompt": "a", "answer": 3}', r"line 2: `language`, `answer` and `tests` must be texts"),
        (
            '{"prompt": "a", "chat_template_kwargs": [1]}',
            r"line 2: `chat_template_kwargs` must be a dict or its JSON text, got \[1\]",
        ),
        (
            '{"prompt": "a", "chat_template_kwargs": {"enable_thinking": "false"}}',
            r"line 2: `chat_template_kwargs` enable_thinking must be true or false, got 'false'",
        ),
        (
            '{"prompt": "a", "chat_template_kwargs": {"style": null}}',
            r"line 2: `chat_template_kwargs` style must be a text, a number, true or false, got No",
        ),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"mine\.jsonl, {message}"):
        load_prompts(lines(tmp_path, {"prompt": "good"}, line), 9)


def test_a_wheel_with_other_columns_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = Path(lines(tmp_path, {"question": "?"}))
    monkeypatch.setattr(benchmark_data, "kept_file", lambda *_, **__: path)
    with pytest.raises(ValueError, match=r"line 1: needs `prompt`, got the columns \['question'\]"):
        load_prompts("gsm8k-pypi", 1)


def test_a_gzip_file_that_was_cut_off(tmp_path: Path) -> None:
    path = Path(lines(tmp_path, {"prompt": "x" * 1000}, name="mine.jsonl.gz"))
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(ValueError, match=r"mine\.jsonl\.gz: not a whole gzip file"):
        load_prompts(str(path), 1)


def test_unknown_missing_and_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one of gsm8k, .*held-out, or a file .*, got 'gsm9k'"):
        load_prompts("gsm9k", 1)
    with pytest.raises(ValueError, match=r"`dataset` .*none\.jsonl is not there"):
        load_prompts(str(tmp_path / "none.jsonl"), 1)
    with pytest.raises(ValueError, match=r"must hold at least one prompt, got none"):
        load_prompts(lines(tmp_path), 1)


def test_a_draw_is_the_seeds(tmp_path: Path) -> None:
    path = lines(tmp_path, *({"prompt": f"{i}"} for i in range(50)))
    first, again, other = (load_prompts(path, 8, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len({*first}) == 8
    assert [p.turns[0] for p in load_prompts(path, 50)] == [str(i) for i in range(50)]
