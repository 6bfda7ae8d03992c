"""The whole command on a tiny pair from disk, in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bench_pairs import WRITTEN, chat_tokenizer, saved_models
from chat_tokenizers import DROPS_REASONING, byte_tokenizer, with_template
from hf_dflash import benchmark_command, chain_decoding, cli
from hf_dflash.benchmark import Benchmark
from hf_dflash.benchmark_command import BenchOptions, run_bench
from hf_dflash.measurement import Measurement, Run, read_measurement
from hf_dflash.report import report_html
from hf_dflash.verification import verify_greedy
from pairs import random_drafter, tiny_target
from refused_targets import tiny_mamba, tiny_qwen3_next

ROWS = [
    {"prompt": "Hello", "answer": "7"},
    {"turns": ["yes", "think"], "language": "de"},
    {"prompt": "the answer"},
]
N_METHODS = 5


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return saved_models(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def options(pair: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "120")
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "out").mkdir()
    return [
        *("--dataset", str(data), "--json", str(tmp_path / "out" / "bench.json")),
        *(part for name, path in pair.items() for part in (f"--{name}", path)),
        *("--max-new-tokens", "12", "--lookup", "3"),
    ]


def bench(*options: str) -> Any:
    return CliRunner().invoke(cli.app, ["bench", *options])


def result_of(tmp_path: Path) -> Measurement:
    return read_measurement(tmp_path / "out" / "bench.json")


def test_everything_is_measured_shown_and_written(options: list[str], tmp_path: Path) -> None:
    shown = bench(*options)
    assert shown.exit_code == 0, shown.output
    parts = ("mine", "dflash B4", "stock B4", "lookup", "assistant", "4/4", "to go, less where")
    for part in parts:
        assert part in shown.stdout, part
    assert "All of it took" in " ".join(shown.stdout.split())
    measurement = result_of(tmp_path)
    assert len(measurement.runs) == 4 * N_METHODS  # one prompt has two turns
    assert measurement.prompts == {"mine": [["Hello"], ["yes", "think"], ["the answer"]]}
    assert {run.language for run in measurement.runs} == {"en", "de"}
    assert measurement.settings.n_prompts == {"mine": 3}
    assert measurement.settings.metrics == ["exact_match (string equality)"]
    assert measurement.provenance.target.name == "target"
    assert measurement.provenance.dtype == "float32"
    drafted = measurement.summary.overall[1]
    assert drafted.identity.n_identical == drafted.identity.n_compared == 4
    assert 1 < drafted.acceptance.micro < 4
    assert drafted.quality.n_judged == 1
    assistant = measurement.summary.overall[-1]
    assert assistant.method == measurement.settings.methods[-1] == "assistant_model"
    assert assistant.identity.n_identical == 4
    n_drafts = sum(sum(r.n_drafted) for r in measurement.runs if r.method == "assistant_model")
    n_accepted = sum(sum(r.n_accepted) for r in measurement.runs if r.method == "assistant_model")
    assert 0 < n_accepted < n_drafts
    assert assistant.speedup.n == 4
    spelled = {i for run in measurement.runs for i in run.token_ids}
    assert {str(i) for i in spelled} <= {*measurement.token_texts}
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["bench.json"]


def test_the_file_names_no_place_of_this_machine(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/hf-dflash", "bench", *options])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # wherever temporary files lie
    assert bench(*options, "--n-prompts", "1").exit_code == 0
    document = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert document["provenance"]["command"].startswith(
        "hf-dflash bench --dataset mine.jsonl --json out/bench.json --target target "
    )
    assert document["settings"]["assistant_model"] == "assistant"
    rest = json.dumps({name: part for name, part in document.items() if name != "runs"})
    assert str(tmp_path.parent) not in rest
    assert "somewhere" not in rest


class Interrupted:
    """Stops the second prompt, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        self.error: BaseException | None = error
        self.measured: list[int] = []
        run_prompt = Benchmark.run_prompt

        def stopped(benchmark: Benchmark, dataset: str, index: int, prompt: Any) -> list[Run]:
            if index == 1 and self.error is not None:
                error, self.error = self.error, None
                raise error
            self.measured.append(index)
            return run_prompt(benchmark, dataset, index, prompt)

        monkeypatch.setattr(Benchmark, "run_prompt", stopped)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_run_goes_on(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    watched = Interrupted(monkeypatch, error)
    stopped = bench(*options)
    assert stopped.exit_code != 0
    said = " ".join(stopped.stdout.split())
    assert "1 of 3 prompts are kept in" in said
    assert "the same command goes on" in said
    assert not (tmp_path / "out" / "bench.json").exists()
    assert bench(*options).exit_code == 0
    assert watched.measured == [0, 1, 2], "the first prompt was not measured twice"
    whole = result_of(tmp_path)
    assert len(whole.runs) == 4 * N_METHODS
    assert whole.wall_s > sum(run.seconds.total for run in whole.runs), "both sittings count"


def test_a_result_that_finds_no_room_is_written_by_the_same_command(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Interrupted(monkeypatch, KeyboardInterrupt())
    watched.error = None
    with monkeypatch.context() as full:

        def no_room(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        full.setattr("hf_dflash.benchmark_command.write_measurement", no_room)
        stopped = bench(*options)
    assert stopped.exit_code == 2
    said = "".join(stopped.output.split())
    assert "bench.jsoncannotbewritten:Nospaceleftondevice.Allpromptsarekeptin" in said
    assert "bench.json.rank0.jsonl" in said
    assert bench(*options).exit_code == 0
    assert watched.measured == [0, 1, 2], "no prompt was measured twice"
    assert len(result_of(tmp_path).runs) == 4 * N_METHODS


@pytest.mark.parametrize(
    ("answers", "told"), [([{2, 4}, {2, 4}], [2, 4]), ([(), ()], []), ([{2, 4}, {4}], None)]
)
def test_a_run_goes_on_whichever_way_the_clock_chose_and_tells_it(
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[Iterable[int]],
    told: list[int] | None,
) -> None:
    def quicker(rows: Iterable[int]) -> None:
        name = "hf_dflash.few_rows.rows_quicker_the_other_way"
        monkeypatch.setattr(name, lambda _: frozenset(rows))

    Interrupted(monkeypatch, KeyboardInterrupt())
    for answer in answers:
        quicker(answer)
        done = bench(*options, "--no-stock", "--lookup", "0")
    assert done.exit_code == 0, done.output
    assert result_of(tmp_path).provenance.few_rows == told
    quicker({8})
    assert bench(*options, "--no-stock", "--lookup", "0").exit_code == 0, "shown again"


def test_a_finished_run_is_shown_again_and_another_one_refused(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Interrupted(monkeypatch, ValueError())
    watched.error = None
    first = bench(*options)
    before = (tmp_path / "out" / "bench.json").read_bytes()
    again = bench(*options)
    assert (again.exit_code, watched.measured) == (0, [0, 1, 2])
    assert again.stdout.split("tokens/s")[1] == first.stdout.split("tokens/s")[1]
    other = bench(*options, "--repeats", "2")
    assert other.exit_code == 2
    assert "holds another measurement (repeats: 1 there, 2 now)" in other.stderr
    assert (tmp_path / "out" / "bench.json").read_bytes() == before


def test_a_run_does_not_go_on_with_other_code(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Interrupted(monkeypatch, KeyboardInterrupt())
    assert bench(*options).exit_code != 0
    path = tmp_path / "out" / "bench.json.rank0.jsonl"
    kept = path.read_bytes()
    with monkeypatch.context() as changed:
        changed.setattr("hf_dflash.provenance.hash_of_code", lambda: "0123456789ab")
        other = bench(*options)
    assert other.exit_code == 2
    assert "0123456789ab now). Use the same options" in other.stderr
    assert path.read_bytes() == kept
    assert bench(*options).exit_code == 0, "it goes on with the code that began"


def one_draft_too_many(draft_ids: Any, target_ids: Any, stop_ids: Any) -> Any:
    """A verifier that believes the first draft whatever the target says."""
    believed = target_ids.clone()
    believed[: min(1, len(draft_ids))] = draft_ids[:1]
    return verify_greedy(draft_ids, believed, stop_ids)


def test_plain_decoding_in_another_dtype_is_by_a_target_of_that_dtype(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []

    class Watched(Benchmark):
        def _decode(self, variant: Any, *rest: Any) -> Any:
            models = self.models
            other = models.other_target
            seen = []
            handles = [
                model.register_forward_pre_hook(lambda module, _, seen=seen: seen.append(module))
                for model in (models.target, other)
            ]
            try:
                return super()._decode(variant, *rest)
            finally:
                for handle in handles:
                    handle.remove()
                decoded.append((variant.label, {module.dtype for module in seen}))

    monkeypatch.setattr(benchmark_command, "Benchmark", Watched)
    few = ("--no-stock", "--lookup", "0", "--plain-dtype", "bfloat16")
    shown = bench(*options, *few)
    assert shown.exit_code == 0, shown.output
    dtypes = {label: found for label, found in decoded if found}
    assert dtypes["plain bfloat16"] == {torch.bfloat16}
    assert dtypes["plain"] == dtypes["dflash, block 4"] == {torch.float32}
    assert "Over all seconds plain decoding is" in " ".join(shown.stdout.split())
    whole = result_of(tmp_path)
    other = [run for run in whole.runs if run.method == "plain_bfloat16"]
    assert len(other) == 4
    assert {(run.identical, run.n_accepted) for run in other} == {(None, None)}


@pytest.mark.parametrize("dtype", ["float32", "float8"])
def test_another_dtype_for_plain_decoding_is_one_that_is_measured_not_anyway(
    options: list[str], dtype: str
) -> None:
    refused = bench(*options, "--plain-dtype", dtype)
    assert refused.exit_code != 0
    assert f"and not `dtype`, got '{dtype}'." in " ".join(refused.stderr.split())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_verifier_fails_in_every_dtype_after_the_result_is_written(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(chain_decoding, "verify_greedy", one_draft_too_many)
    shown = bench(*options, "--dtype", dtype)
    assert shown.exit_code == 1
    assert f"FAILED: in {dtype} outputs may part from plain decoding's" in shown.stderr
    assert "dflash, block 4 (" in shown.stderr
    assert "stock" not in shown.stderr
    assert ", NO near tie" in shown.stdout
    differing = result_of(tmp_path).summary.overall[1].identity.differences
    assert any(d.is_near_tie is False and d.top2_gap > 0.1 for d in differing)
    assert bench(*options, "--dtype", dtype).exit_code == 1, "the kept result fails, too"


class Twins:
    """Makes two tokens' rows of the target's head alike, and the drafter's outputs name either."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        decode = Benchmark._decode

        def other_twin(benchmark: Benchmark, variant: Any, call: Any, n: int) -> Any:
            rows = benchmark.models.target.lm_head.weight.data
            rows[WRITTEN[1]] = rows[WRITTEN[0]]
            ids, clock = decode(benchmark, variant, call, n)
            if variant.method == "dflash":
                ids = [WRITTEN[1] if i == WRITTEN[0] else i for i in ids]
            return ids, clock

        monkeypatch.setattr(Benchmark, "_decode", other_twin)


@pytest.mark.parametrize(("dtype", "status"), [("float32", 1), ("bfloat16", 0), ("float16", 0)])
def test_a_tie_is_an_error_in_float32_only(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, status: int
) -> None:
    Twins(monkeypatch)
    shown = bench(*options, "--dtype", dtype)
    assert shown.exit_code == status, shown.output
    assert ("FAILED: in float32" in shown.stderr) == (status == 1)
    drafted = result_of(tmp_path).summary.overall[1]
    assert drafted.identity.differences
    assert all(d.is_near_tie for d in drafted.identity.differences)
    assert "0.0000, a near tie" in shown.stdout


def thinking_target(options: list[str]) -> None:
    """Make the target one that thinks unless told not to, and may be told a style."""
    place = options.index("--target") + 1
    copy = Path(options[options.index("--json") + 1]).parents[1] / "thinking"
    shutil.copytree(options[place], copy)
    refuses = "{% if style == 'loud' %}{{ raise_exception('be quiet') }}{% endif %}"
    with_template(byte_tokenizer(), refuses + DROPS_REASONING).save_pretrained(copy)
    options[place] = str(copy)


def with_rows(options: list[str], *template_options: Any) -> None:
    """Give the data set one prompt for each options of the chat template."""
    rows = [{"prompt": "Hello", "chat_template_kwargs": own} for own in template_options]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    Path(options[options.index("--dataset") + 1]).write_text(text)


def test_one_run_holds_prompts_with_thinking_and_without(
    options: list[str], tmp_path: Path
) -> None:
    thinking_target(options)
    with_rows(options, {"enable_thinking": True}, {"enable_thinking": False}, None)
    off = ["--template-option", "enable_thinking=false"]
    assert bench(*options, *off).exit_code == 0
    measurement = result_of(tmp_path)
    thinking = [True, False, False]
    assert all(run.thinking == thinking[run.prompt_index] for run in measurement.runs)
    own = [{"enable_thinking": True}, {"enable_thinking": False}, {}]
    assert measurement.prompt_options == {"mine": own}
    slices = measurement.summary.slices["thinking"]
    assert {value: s[0].n_prompts for value, s in slices.items()} == {"on": 1, "off": 2}
    page = report_html(measurement)
    assert "enable_thinking False; 2 prompts with others" in page
    assert "by thinking" in page
    before = (tmp_path / "out" / "bench.json").read_bytes()
    with_rows(options, {"enable_thinking": True}, None, None)
    other = bench(*options, *off)
    assert other.exit_code == 2
    assert "holds another measurement (prompt_options:" in other.stderr
    assert (tmp_path / "out" / "bench.json").read_bytes() == before


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"enable_thinkin": True},
            "must be options that the target's chat template reads, got ['en",
        ),
        (
            {"add_generation_prompt": False},
            "must be options that the target's chat template reads, got ['add_gen",
        ),
        (
            {"style": "loud"},
            "must be options that the target's chat template takes, got {'style': 'loud'}: be q",
        ),
        ({"enable_thinking": "no"}, "enable_thinking must be true or false, got 'no'"),
        ("no", "must be a dict or its JSON text, got 'no'"),
    ],
)
def test_an_option_that_the_template_does_not_know_is_named_with_its_line(
    options: list[str], tmp_path: Path, own: Any, message: str
) -> None:
    thinking_target(options)
    with_rows(options, None, own)
    shown = bench(*options)
    assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1)
    assert f"{tmp_path / 'mine.jsonl'}, line 2: `chat_template_kwargs` {message}" in shown.stderr
    assert not [*(tmp_path / "out").iterdir()]


def test_baselines_can_be_left_out(options: list[str], tmp_path: Path) -> None:
    without = ["--no-stock", "--lookup", "0", "--block-size", "3", "--block-size", "4"]
    thinking_target(options)
    kept = [o for i, o in enumerate(options) if "assistant" not in {o[2:], options[i - 1][2:]}]
    extra = ["--template-option", "enable_thinking=false", "--template-option", "style=plain"]
    assert bench(*kept, *without, *extra, "--temperature", "1").exit_code == 0
    measurement = result_of(tmp_path)
    assert measurement.settings.methods == ["plain", "dflash"]
    assert measurement.settings.block_sizes == [3, 4]
    assert measurement.settings.template_options == {"enable_thinking": False, "style": "plain"}
    assert all(run.identical is None for run in measurement.runs)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--dtype", "int8"], "`dtype` must be one of float32, bfloat16, float16, got 'int8'"),
        (["--n-prompts", "0"], "`n_prompts` must be at least 1, got 0"),
        (["--max-new-tokens", "1"], "`max_new_tokens` must be at least 2, got 1"),
        (["--temperature", "-1"], "`temperature` must be 0 or more, got -1.0"),
        (["--block-size", "1"], "`block_size` must be at least 2, each once, got [1]"),
        (["--block-size", "4", "--block-size", "4"], "each once, got [4, 4]"),
        (["--repeats", "0"], "`repeats` must be at least 1, got 0"),
        (["--lookup", "-1"], "`lookup` must be 0 or more, got -1"),
        (["--json", "/no/such/folder/f.json"], "`json` must be a file in an existing folder"),
        (["--dataset", "other/mine.jsonl"], "`dataset` must not name two of the same name"),
        (["--dataset", "gsm9k"], "`dataset` must be one of gsm8k, math500"),
        (["--target", "/no/such/folder"], "`target` must be a folder or a Hub repository"),
        (["--drafter", "/no/such/folder"], "`drafter` must be a folder or a Hub repository"),
        (["--assistant", "/no/such/folder"], "`assistant` must be a folder or a Hub repository"),
        (["--template-option", "thinking"], "`template_option` must be NAME=VALUE, got 'thinking'"),
        (["--template-option", "a=[1]"], "`template_option` a must be a text, a number"),
        (["--template-option", "thinking=off"], "`template_option` thinking must be true or false"),
        (["--metrics", "/no/such/folder"], "`metrics` must be a folder with exact_match/exact_mat"),
        (  # before anything is loaded
            ["--metrics", "/no/such/folder", "--dataset", "gsm9k"],
            "`metrics` must be a folder with exact_match/exact_match.py or code_eval/code_eval.py",
        ),
        (
            ["--run-code"],
            "`run_code` needs prompts with tests, got 3 without. Leave out --run-code",
        ),
        (["--template-option", "a=NaN"], "`template_option` a must be a finite number, got nan"),
        (["--template-option", "a=1"], "`template_option` must be options that the target's chat"),
    ],
)
def test_bad_input_is_one_line(options: list[str], extra: list[str], message: str) -> None:
    shown = bench(*options, *extra)
    assert shown.exit_code == 2
    assert shown.stderr.count("\n") == 1
    assert message in shown.stderr


def test_an_assistant_must_be_a_model_of_the_targets_vocabulary(
    options: list[str], pair: dict[str, str], tmp_path: Path
) -> None:
    tiny_target(vocab_size=300).save_pretrained(tmp_path / "other")
    for folder, message in (
        (str(tmp_path / "other"), "have the target's vocabulary of 360 tokens, got 300. Give a"),
        (pair["drafter"], "be a model that writes text by itself, got"),
    ):
        shown = bench(*options, "--assistant", folder)
        assert shown.exit_code == 2
        assert f"`assistant` must {message}" in shown.stderr


def test_a_data_set_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`dataset` must be given at least once, got \[\]"):
        run_bench(BenchOptions([], tmp_path / "bench.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_target_layers": 9}, "another target: its `num_target_layers` is 9, this Qwen3"),
        ({"target_hidden_size": 64}, "another target: its `target_hidden_size` is 64, this Qwen3"),
        ({"hidden_size": 64}, "drafter's `hidden_size` 64 is not the width of the target's embedd"),
        (
            {"vocab_size": 300, "mask_token_id": 299},
            "another target: its `vocab_size` is 300, this Qwen3ForCausalLM has 360. Load the",
        ),
        (
            {"num_target_layers": None, "target_layer_ids": [0, 4]},
            "`target_layer_ids` must be layers of the target (0..3), got [0, 4]. Load the drafter",
        ),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_before_anything_is_touched(
    options: list[str], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    random_drafter(tiny_target(vocab_size=360), 4, **changes).save_pretrained(tmp_path / "drafter")
    refused_untouched([*options, "--drafter", str(tmp_path / "drafter")], tmp_path, message)


def test_a_mask_token_beyond_the_vocabulary_is_refused_before_anything_is_touched(
    options: list[str], pair: dict[str, str], tmp_path: Path
) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(pair["drafter"], drafter)
    fields = json.loads((drafter / "config.json").read_text())
    fields["dflash_config"]["mask_token_id"] = 360
    (drafter / "config.json").write_text(json.dumps(fields))
    message = "`mask_token_id` must be in [0, 359], got 360. It is a row of the target's embedding"
    refused_untouched([*options, "--drafter", str(drafter)], tmp_path, message)


@pytest.mark.parametrize(
    ("recurrent", "name"),
    [(tiny_mamba, "MambaForCausalLM"), (tiny_qwen3_next, "Qwen3NextForCausalLM")],
)
def test_a_target_that_cannot_be_rolled_back_is_refused_before_anything_is_touched(
    options: list[str], tmp_path: Path, recurrent: Callable[..., Any], name: str
) -> None:
    target = recurrent(vocab_size=360)
    target.save_pretrained(tmp_path / "recurrent")
    chat_tokenizer().save_pretrained(tmp_path / "recurrent")
    random_drafter(target).save_pretrained(tmp_path / "drafter")
    folders = [f"--target={tmp_path / 'recurrent'}", f"--drafter={tmp_path / 'drafter'}"]
    message = f"not support {name}, whose recurrent state cannot be rolled back, yet. Use plain"
    refused_untouched([*options, *folders], tmp_path, message)


def refused_untouched(options: list[str], tmp_path: Path, message: str) -> None:
    """One line says why, with and without an earlier result and journal, which are not read."""
    out = tmp_path / "out"
    for kept in ({}, {"bench.json": "a result", "bench.json.rank0.jsonl": "half a line"}):
        for name, text in kept.items():
            (out / name).write_text(text)
        shown = bench(*options)
        assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1), shown.stderr
        assert message in shown.stderr
        assert {path.name: path.read_text() for path in out.iterdir()} == kept


def test_without_options_it_is_the_shipped_pair(
    monkeypatch: pytest.MonkeyPatch, pair: dict[str, str], options: list[str]
) -> None:
    folders: dict[str, Callable[..., Path]] = {
        "demo_drafter_folder": lambda: Path(pair["drafter"]),
        "target_folder": lambda **_: Path(pair["target"]),
    }
    for name, folder in folders.items():
        monkeypatch.setattr(benchmark_command, name, folder)
    assert bench(*options[:4], "--max-new-tokens", "4").exit_code == 0


def test_help_has_an_example_and_units() -> None:
    shown = bench("--help").stdout
    for part in ("hf-dflash bench --dataset gsm8k-pypi", "--json", "accelerate launch", "float32"):
        assert part in " ".join(shown.split()), part
