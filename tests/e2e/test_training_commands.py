"""`hf-dflash prepare` and `train`, from chats to a drafter, and what they say to bad input."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
)
from typer.testing import CliRunner

from chat_tokenizers import OPENS_THINKING, STRICT_ROLES
from hf_dflash import DFlashDraftModel, cli, taps_cache
from hf_dflash.data import load_rows
from hf_dflash.model_card import check_card
from hf_dflash.training_log import read_data_record, read_training_log
from saved_pairs import save_chats, save_target

SMALL = ["--num_draft_layers=1", "--num_taps=2", "--block_size=4", "--n_anchors=8"]
FEW_STEPS = ["--max_steps=4", "--per_device_train_batch_size=2", "--save_steps=2", "--use_cpu=true"]
QUIET = ["--logging_steps=1", "--disable_tqdm=true"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, chats and their rows."""
    folder = tmp_path_factory.mktemp("place")
    save_target(folder / "target")
    save_chats(folder / "chats.jsonl")
    prepare(folder, "chats.jsonl", "rows.jsonl")
    prepare(folder, save_chats(folder / "held_out.jsonl", 3).name, "eval.jsonl")
    return folder


def invoke(*words: Any) -> Any:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def prepare(folder: Path, source: str, out: str, *options: Any) -> Any:
    target = ["--target", folder / "target"]
    result = invoke("prepare", folder / source, folder / out, *target, *options)
    assert result.exit_code == 0, result.output
    return result


def train(folder: Path, out: Path, *options: Any) -> Any:
    data = ["--target", folder / "target", "--data", folder / "rows.jsonl", "--output_dir", out]
    return invoke("train", *data, *SMALL, *FEW_STEPS, *QUIET, *options)


def trained(folder: Path, out: Path, *options: Any) -> Any:
    result = train(folder, out, *options)
    assert result.exit_code == 0, result.output
    return result


def assert_refused(result: Any, pattern: str) -> None:
    assert result.exit_code == 2, result.output
    line = result.stderr.splitlines()[-1]
    assert re.match(f"Error: .*{pattern}", line), line


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    for name, weight in weights(one).items():
        assert torch.equal(weight, weights(other)[name]), name


# ---- prepare ----


def test_chats_become_rows_and_are_shown(place: Path) -> None:
    result = prepare(place, "chats.jsonl", "shown.jsonl", "--show", 1, "--max-length", 30)
    rows = load_rows(place / "shown.jsonl").rows
    n_cut = sum(len(row.input_ids) == 30 for row in rows)
    n_lost = 8 - len(rows)
    assert n_cut
    assert n_lost
    assert max(len(row.input_ids) for row in rows) == 30
    assert re.search(rf"│ rows +│ +{len(rows)} │", result.stdout)
    assert re.search(rf"│ rows cut at --max-length +│ +{n_cut} │", result.stdout)
    lost = rf"skipped: nothing supervised before `max_length` +│ +{n_lost} │"
    assert re.search(lost, result.stdout)
    assert "<|im_start|>user\u21b5" in result.stdout


def test_skipped_chats_are_counted_by_reason(place: Path, tmp_path: Path) -> None:
    extra = [
        {"messages": [{"role": "user", "content": "a"}]},
        {"prompt": "a", "response": ""},
        {"messages": [{"role": "assistant", "content": "a"}]},
    ]
    save_chats(tmp_path / "chats.jsonl", 2, extra)
    words = ["--target", place / "target"]
    result = invoke("prepare", tmp_path / "chats.jsonl", tmp_path / "rows.jsonl", *words)
    assert re.search(r"skipped: there is no assistant turn +│ +2 │", result.stdout)
    assert re.search(r"skipped: fewer than two supervised tokens in a row +│ +1 │", result.stdout)
    assert "Skipped 1: fewer than two supervised tokens in a row; first" in result.stderr
    assert len(load_rows(tmp_path / "rows.jsonl")) == 2


def test_the_target_answers_anew_and_goes_on(place: Path) -> None:
    options = ["--regenerate", "--max-new-tokens", 6, "--no-thinking", "--template-option", "a=1"]
    options += ["--template-option", "b=word"]
    result = prepare(place, "chats.jsonl", "made.jsonl.gz", *options)
    assert "Answers: 8 made now, 0 found, 0 prompts left out" in result.stdout
    answers = place / "made.jsonl.answers.jsonl"
    first = json.loads(answers.read_text().splitlines()[0])
    assert first["chat_template_kwargs"] == {"enable_thinking": False, "a": 1, "b": "word"}
    target = AutoModelForCausalLM.from_pretrained(place / "target")
    tokenizer = AutoTokenizer.from_pretrained(place / "target")
    prompt = tokenizer.apply_chat_template(
        first["messages"][:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    new = target.generate(**prompt, max_new_tokens=6, do_sample=False)[
        0, len(prompt["input_ids"][0]) :
    ]
    assert new.tolist()[: len(first["answer_ids"])] == first["answer_ids"]
    assert load_rows(place / "made.jsonl.gz").rows[0].input_ids[-1] == first["answer_ids"][-1]
    about = read_data_record(place / "made.jsonl.gz")
    assert about["answers"] == "the target's own, temperature 0"
    assert (about["chats"], about["rows"], about["thinking"]) == ("chats.jsonl", 8, "off")
    again = prepare(place, "chats.jsonl", "made.jsonl.gz", *options)
    assert "Answers: 0 made now, 8 found" in again.stdout


def test_rows_are_packed(place: Path) -> None:
    prepare(place, "chats.jsonl", "packed.jsonl", "--pack", 100)
    packed, rows = load_rows(place / "packed.jsonl"), load_rows(place / "rows.jsonl")
    assert len(packed) < len(rows)
    assert sum(max(packed[i]["document_ids"]) for i in range(len(packed))) == len(rows)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--template-option", "x"], "`template_option` must be NAME=VALUE, got 'x'"),
        (["--regenerate"], "`max_new_tokens` must be less than the target's 512 positions.*2048"),
        (["--show", -1], "`show` must be at least 0, got -1"),
        (["--taps-dtype", "int4", "--cache-taps", "x"], "`taps_dtype` must be one of .*'int4'"),
        (["--max-length", 1], "`max_length` must be at least 2, got 1"),
        (["--pack", 9], r"`lengths` must lie in 1..9, .*Cut the rows with `max_length`"),
    ],
)
def test_bad_options_of_prepare(place: Path, tmp_path: Path, options: Any, pattern: str) -> None:
    target = ["--target", place / "target"]
    result = invoke("prepare", place / "chats.jsonl", tmp_path / "r.jsonl", *target, *options)
    assert_refused(result, pattern)
    assert not list(tmp_path.iterdir())


ANSWERING = ["--regenerate", "--max-new-tokens=9"]
SERVER = [*ANSWERING, "--server=http://x"]
UNREAD = [
    *(
        ([f"--{name}={value}"], f"`{name.replace('-', '_')}` is read with --regenerate only")
        for name, value in {
            "answers": "a.jsonl", "server": "http://x", "batch-size": 32, "max-new-tokens": 7,
            "temperature": 0.0, "seed": 0,
        }.items()
    ),
    *(
        ([*ANSWERING, f"--{name}={value}"], f"`{name.replace('-', '_')}` is read with --server")
        for name, value in {"model": "x", "api-key": "x", "n-threads": 16, "timeout": 600}.items()
    ),
    *(
        ([f"--{name}={value}"], f"`{name.replace('-', '_')}` is read with --cache-taps only")
        for name, value in {
            "taps-dtype": "float8", "drafter": "x", "architecture": "dflare", "num-taps": 5,
            "target-layer-id": 1,
        }.items()
    ),
    ([*SERVER, "--batch-size=4"], "`batch_size` is not read with --server"),
    *(
        (["--cache-taps=x", "--drafter=x", option], "` is not read with --drafter: leave one")
        for option in ("--architecture=dflare", "--num-taps=5", "--target-layer-id=1")
    ),
    (["--target-dtype=float32"], "`target_dtype` is read where .* Leave --target-dtype out"),
    ([*SERVER, "--target-dtype=float32"], "`target_dtype` is read where .* no --server"),
    (["--split=test"], "`split` is for a dataset on the Hub, but .* Leave --split out"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "pattern"), UNREAD)
def test_an_option_that_is_not_read_is_refused(
    place: Path, tmp_path: Path, options: Any, pattern: str
) -> None:
    target = ["--target", place / "target"]
    result = invoke("prepare", place / "chats.jsonl", tmp_path / "r.jsonl", *target, *options)
    assert_refused(result, pattern)
    assert not list(tmp_path.iterdir())


def test_prompts_that_are_all_left_out(place: Path, tmp_path: Path) -> None:
    words = ["--target", place / "target", "--regenerate", "--max-new-tokens", 511]
    result = invoke("prepare", place / "chats.jsonl", tmp_path / "r.jsonl", *words)
    assert_refused(result, "all 8 were left out; .* lower `max_new_tokens` .511")
    save_chats(tmp_path / "none.jsonl", 0)
    result = invoke("prepare", tmp_path / "none.jsonl", tmp_path / "none_r.jsonl", *words)
    assert_refused(result, "must hold a turn to answer, got none. Is the file empty?")


@pytest.mark.parametrize("name", ["rows.txt", "nowhere/rows.jsonl"])
def test_an_out_that_cannot_be_written(place: Path, tmp_path: Path, name: str) -> None:
    target = ["--target", place / "target"]
    result = invoke("prepare", place / "chats.jsonl", tmp_path / name, *target)
    assert_refused(result, "`out` must be a .jsonl or .jsonl.gz file in an existing folder")


# ---- train ----


def test_chats_become_a_drafter_that_loads_everywhere(place: Path, tmp_path: Path) -> None:
    evaluation = ["--eval_data", place / "eval.jsonl", "--decoding_prompts=2"]
    evaluation += ["--decoding_max_new_tokens=6", "--eval_strategy=steps", "--eval_steps=2"]
    result = trained(place, tmp_path / "out", *evaluation)
    assert result.stdout.count("eval_decoding_acceptance_length") == 2
    assert result.stdout.count("eval_accuracy_1") == 2  # the last step is not evaluated twice
    assert f"The drafter is in {tmp_path / 'out'}." in result.stderr
    assert "Memory plan: drafter" in result.stderr
    target = AutoModelForCausalLM.from_pretrained(place / "target")
    drafter = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert drafter.config.block_size == 4
    assert drafter.config.mask_token_id == target.config.vocab_size - 1  # no token of the text
    prompt = torch.tensor([[5, 6, 7]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    drafted = target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert torch.equal(plain, drafted)
    log = read_training_log(tmp_path / "out" / "training_log.json")
    assert log.data["chats"] == "chats.jsonl"
    assert log.n_steps == 4
    assert "eval_decoding_acceptance_length" in log.last_evaluation()


def test_slices_are_told_apart(place: Path, tmp_path: Path) -> None:
    prepare(place, "chats.jsonl", "cut.jsonl", "--max-length", 40)
    slices = ["--eval_data", place / "eval.jsonl", place / "cut.jsonl", "--decoding_prompts=1"]
    result = trained(place, tmp_path / "out", *slices, "--decoding_max_new_tokens=4")
    for name in ("eval_eval_acceptance_length", "eval_cut_acceptance_length"):
        assert result.stdout.count(name) == 1
    assert result.stdout.count("eval_decoding_acceptance_length") == 1
    twice = ["--eval_data", place / "eval.jsonl", tmp_path / "eval.jsonl"]
    shutil.copy(place / "eval.jsonl", tmp_path)
    result = train(place, tmp_path / "new", *twice)
    assert_refused(result, "`eval_data` must be files of different names")


def test_a_file_and_flags_train_alike_and_a_resumed_run_too(place: Path, tmp_path: Path) -> None:
    trained(place, tmp_path / "flags")
    settings = {"target": str(place / "target"), "data": str(place / "rows.jsonl")}
    for word in SMALL + FEW_STEPS + QUIET:
        name, value = word.removeprefix("--").split("=")
        settings[name] = json.loads(value)
    (tmp_path / "run.yaml").write_text(json.dumps(settings))  # which is YAML, too
    result = invoke("train", tmp_path / "run.yaml", "--output_dir", tmp_path / "file")
    assert result.exit_code == 0, result.output
    assert_same_weights(tmp_path / "flags", tmp_path / "file")

    (tmp_path / "stopped").mkdir()
    (tmp_path / "flags" / "checkpoint-2").rename(tmp_path / "stopped" / "checkpoint-2")
    trained(place, tmp_path / "stopped", "--resume_from_checkpoint=true")
    assert_same_weights(tmp_path / "flags", tmp_path / "stopped")


def test_a_finished_run_stays_as_it_is(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    trained(place, out)
    before = {path: path.stat().st_mtime_ns for path in sorted(out.rglob("*"))}
    result = trained(place, out, "--resume_from_checkpoint=true")
    assert "Nothing is left to train" in result.stderr
    assert "is that of step 4 already" in result.stderr
    assert {path: path.stat().st_mtime_ns for path in sorted(out.rglob("*"))} == before

    (out / "training_log.json").unlink()  # stopped between the last checkpoint and the drafter
    expected = weights(out)
    (out / "model.safetensors").unlink()
    trained(place, out, "--resume_from_checkpoint=true")
    for name, weight in expected.items():
        assert torch.equal(weights(out)[name], weight), name
    assert read_training_log(out / "training_log.json").n_steps == 4


def test_a_trained_drafter_is_gone_on_with(place: Path, tmp_path: Path) -> None:
    options = [*SMALL[-1:], *FEW_STEPS, *QUIET]
    data = ["--target", place / "target", "--data", place / "rows.jsonl"]
    trained(place, tmp_path / "first", "--export_dtype=bfloat16")
    warm = [*data, *options, "--drafter", tmp_path / "first"]
    assert invoke("train", *warm, "--output_dir", tmp_path / "warm").exit_code == 0
    first, second = weights(tmp_path / "first"), weights(tmp_path / "warm")
    assert second["fc.weight"].dtype == torch.float32
    moved = (second["fc.weight"] - first["fc.weight"].float()).abs().max()
    assert 0 < moved < 0.01  # four steps from there, not from anywhere


def test_a_trained_drafter_is_gone_on_with_in_blocks_of_another_size(
    place: Path, tmp_path: Path
) -> None:
    trained(place, tmp_path / "first")
    data = ["--target", place / "target", "--data", place / "rows.jsonl", *SMALL[-1:]]
    longer = [*data, *FEW_STEPS, *QUIET, "--drafter", tmp_path / "first"]
    result = invoke("train", *longer, "--block_size=6", "--output_dir", tmp_path / "longer")
    assert result.exit_code == 0, result.output
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "longer")
    assert drafter.config.block_size == 6
    first, second = weights(tmp_path / "first"), weights(tmp_path / "longer")
    assert 0 < (second["fc.weight"] - first["fc.weight"]).abs().max() < 0.01
    result = invoke("train", *longer, "--block_size=1", "--output_dir", tmp_path / "none")
    assert_refused(result, "`block_size` must be .*got 1")


@pytest.mark.parametrize("merged", [True, False])
def test_an_adapter_is_trained_and_merged_or_kept(
    place: Path, tmp_path: Path, merged: bool
) -> None:
    trained(place, tmp_path / "first")
    data = ["--target", place / "target", "--data", place / "rows.jsonl"]
    lora = ["--drafter", tmp_path / "first", "--lora_rank=2", f"--lora_merge={merged}"]
    options = [*lora, "--ema_decay=0.5", *FEW_STEPS, *QUIET, "--output_dir", tmp_path / "lora"]
    result = invoke("train", *data, *options)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "lora" / "adapter_model.safetensors").exists() != merged
    if merged:
        before, after = weights(tmp_path / "first"), weights(tmp_path / "lora")
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert {"fc.weight", "layers.0.mlp.up_proj.weight"} <= changed
        assert not {name for name in changed if "norm" in name}
        DFlashDraftModel.from_pretrained(tmp_path / "lora")


def test_what_is_saved_is_pushed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed = []
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda *_, **__: None)
    monkeypatch.setattr(
        "hf_dflash.exporting.push_folder",
        lambda folder, name, **options: pushed.append((folder, name, options["private"])),
    )
    hub = ["--push_to_hub=true", "--hub_model_id=me/mine"]
    trained(place, tmp_path / "out", *hub, "--hub_private_repo=true")
    assert pushed == [(tmp_path / "out", "me/mine", True)]
    check_card(tmp_path / "out")


def test_layers_of_the_target_are_a_start(place: Path, tmp_path: Path) -> None:
    result = trained(place, tmp_path / "out", "--init_from_target=true", "--learning_rate=0")
    assert re.search(r"Set \d+ of the drafter's parameters by the target's", result.stderr)
    target = AutoModelForCausalLM.from_pretrained(place / "target")
    copied = weights(tmp_path / "out")["layers.0.mlp.up_proj.weight"]
    assert torch.equal(copied, target.model.layers[-1].mlp.up_proj.weight)


def test_norms_of_heads_start_with_the_targets_scale_on_the_first_row(
    place: Path, tmp_path: Path
) -> None:
    shutil.copytree(place / "target", tmp_path / "target")
    config = AutoConfig.from_pretrained(tmp_path / "target").to_dict()
    names = ("vocab_size", "hidden_size", "head_dim", "num_hidden_layers", "eos_token_id")
    llama = LlamaConfig(  # it does not norm its queries and keys
        **{name: config[name] for name in names}, num_attention_heads=4, intermediate_size=64
    )
    LlamaForCausalLM(llama).save_pretrained(tmp_path / "target")
    options = ["--init_from_target=true", "--learning_rate=0", "--target", tmp_path / "target"]
    trained(place, tmp_path / "out", *options)
    norm = weights(tmp_path / "out")["layers.0.self_attn.q_norm.weight"]
    assert norm.unique().numel() == 1
    assert float(norm[0]) != 1.0
    # A row that is filled up for the kernel's sake is no other text.
    trained(place, tmp_path / "filled", *options, "--pad_to_multiple_of=128")
    assert torch.equal(weights(tmp_path / "filled")["layers.0.self_attn.q_norm.weight"], norm)


def test_cached_taps_train_as_the_target_does(place: Path, tmp_path: Path) -> None:
    cache = ["--cache-taps", tmp_path / "taps", "--taps-dtype", "float32", "--num-taps", 2]
    result = prepare(place, "chats.jsonl", "rows.jsonl", *cache)
    told = re.search(
        r"Taps of 8 rows: 0.00 GiB in .*taps \(layers \[0, 2\] of (\d+) tok", result.stderr
    )
    assert told
    rows = load_rows(place / "rows.jsonl").rows
    assert int(told[1]) == sum(len(row.input_ids) for row in rows)
    trained(place, tmp_path / "online")
    result = trained(place, tmp_path / "cached", "--taps", tmp_path / "taps")
    assert "The target's layers are not loaded onto the device" in result.stderr
    one, other = weights(tmp_path / "online"), weights(tmp_path / "cached")
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, atol=1e-5, rtol=0)
    with_drafter = ["--cache-taps", tmp_path / "again", "--drafter", tmp_path / "online"]
    prepare(place, "chats.jsonl", "rows.jsonl", *with_drafter)
    with_ids = ["--cache-taps", tmp_path / "ids", "--target-layer-id", 0, "--target-layer-id", 2]
    prepare(place, "chats.jsonl", "rows.jsonl", *with_ids)
    layouts = [json.loads((tmp_path / f / "taps.json").read_text()) for f in ("again", "ids")]
    assert layouts[0] == layouts[1]


def test_help_lists_our_arguments_and_the_usual_ones_of_transformers() -> None:
    result = invoke("train", "--help")
    assert result.exit_code == 0
    for name in (
        "--target TEXT",
        "--data TEXT",
        "--n_anchors N",
        "--learning_rate X",
        "(default: 0.0006)",
    ):
        assert name in result.stdout
    assert "--adam_beta2" not in result.stdout, "a hundred more would hide ours"
    assert "accelerate launch -m hf_dflash.cli train" in result.stdout


# ---- bad input ----


def test_data_without_a_supervised_token(place: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "response": ""}\n')
    target = ["--target", place / "target"]
    result = invoke("prepare", tmp_path / "chats.jsonl", tmp_path / "rows.jsonl", *target)
    assert_refused(result, "`chats` must have a supervised token: none of the 2 chats")
    assert not (tmp_path / "rows.jsonl").exists()
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2], "loss_mask": [0, 1]}\n')
    result = train(place, tmp_path / "out", "--data", tmp_path / "rows.jsonl")
    assert_refused(result, "`train_dataset` must have a row with two supervised tokens next to")
    (tmp_path / "rows.jsonl").write_text("")
    result = train(place, tmp_path / "out", "--data", tmp_path / "rows.jsonl")
    assert_refused(result, r"rows\.jsonl is empty\. Make rows of chats with `hf-dflash prepare`")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("template", "message", "reason"),
    [
        (OPENS_THINKING, "<think>why</think>", "the chat template rewrites the answer"),
        (STRICT_ROLES, "yes", "the chat template refuses the chat"),
    ],
)
def test_a_template_that_drops_or_refuses(
    tmp_path: Path, template: str, message: str, reason: str
) -> None:
    """What serving would show otherwise is no row; the other turns are."""
    save_target(tmp_path / "target", template=template)
    turns = [("user", "a"), ("assistant", "<think>x</think>fine"), ("user", "b")]
    turns += [("user", "c")] * (template == STRICT_ROLES)
    chat = [{"role": role, "content": content} for role, content in turns]
    chat.append({"role": "assistant", "content": message})
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    result = prepare(tmp_path, "chats.jsonl", "rows.jsonl")
    assert re.search(rf"skipped: {reason} +│ +1 │", result.stdout)
    assert len(load_rows(tmp_path / "rows.jsonl")) == 1


def test_answers_shorter_than_a_block_are_trained_on(place: Path, tmp_path: Path) -> None:
    short = [{"prompt": "a", "response": "b"}] * 3
    save_chats(tmp_path / "chats.jsonl", 0, short)
    words = ["--target", place / "target"]
    assert invoke("prepare", tmp_path / "chats.jsonl", tmp_path / "r.jsonl", *words).exit_code == 0
    no_answer = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}
    with (tmp_path / "r.jsonl").open("a") as file:
        file.write(json.dumps(no_answer) + "\n")
    result = trained(place, tmp_path / "out", "--data", tmp_path / "r.jsonl")
    losses = [float(loss) for loss in re.findall(r"'loss': '?([^',]+)", result.stdout)]
    assert len(losses) == 4
    assert all(loss == loss and loss > 0 for loss in losses)  # no NaN
    assert "'rows_without_block': '2'" in result.stdout  # one row in each of two epochs
    assert all(torch.isfinite(weight).all() for weight in weights(tmp_path / "out").values())


def test_a_tokenizer_without_a_free_token(tmp_path: Path) -> None:
    save_target(tmp_path / "target", has_spare_row=False)
    save_chats(tmp_path / "chats.jsonl")
    prepare(tmp_path, "chats.jsonl", "rows.jsonl")
    result = train(tmp_path, tmp_path / "out")
    assert_refused(result, "`mask_token_id` must be given: the tokenizer has no mask token")
    used = load_rows(tmp_path / "rows.jsonl").rows[0].input_ids[-1]
    result = train(tmp_path, tmp_path / "out", f"--mask_token_id={used}")
    assert_refused(result, f"`input_ids` must not hold the drafter's mask token {used}")
    trained(tmp_path, tmp_path / "out", "--mask_token_id=4")  # <|eot|> is in no chat


def test_another_configuration_is_not_resumed(place: Path, tmp_path: Path) -> None:
    trained(place, tmp_path / "out")
    before = weights(tmp_path / "out")
    again = train(place, tmp_path / "out")
    assert_refused(again, r"`output_dir` .*has checkpoints of an earlier run \(checkpoint-4\)")
    other = train(place, tmp_path / "out", "--resume_from_checkpoint=true", "--n_anchors=5")
    assert_refused(other, r"had another configuration: `n_anchors` was 8, is 5. Set it back")
    for given in ("true", tmp_path / "none"):
        new = train(place, tmp_path / "new", f"--resume_from_checkpoint={given}")
        assert_refused(new, "`resume_from_checkpoint` needs a checkpoint, but there is none in")
    for name, weight in before.items():
        assert torch.equal(weight, weights(tmp_path / "out")[name])


def test_a_disk_too_small_for_the_cache(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taps_cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    words = ["--target", place / "target", "--cache-taps", tmp_path / "taps", "--num-taps", 2]
    result = invoke("prepare", place / "chats.jsonl", tmp_path / "rows.jsonl", *words)
    assert_refused(result, "The disk of `folder` is too small: the taps take 0.00 GiB, 0.00 GiB")
    assert not list((tmp_path / "taps").iterdir())
    result = train(place, tmp_path / "out", "--taps", tmp_path / "taps")
    assert_refused(result, "`folder` must hold a complete cache, but .*taps has no taps.json")


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--shard_target=true"], "`shard_target` needs several processes, got one"),
        (["--data=none.jsonl"], "There are no prepared rows at none.jsonl"),
        (["--target=/no/where"], "`target` must be a folder or a Hub repository"),
        (["--architecture=dflare", "--num_taps=9"], r"`num_taps` must lie in 1..4"),
        (["--drafter_attention=flex_attention"], "cannot be trained on CPUs"),
        (["--output_dirs=x"], r"no argument of a run: `output_dirs` \(meant: output_dir\?\)"),
    ],
)
def test_bad_options_of_train(place: Path, tmp_path: Path, options: Any, pattern: str) -> None:
    assert_refused(train(place, tmp_path / "out", *options), pattern)
    assert not list(tmp_path.glob("out/checkpoint*"))


def test_an_error_that_is_not_ours_keeps_its_traceback(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    result = train(place, tmp_path / "out")
    assert isinstance(result.exception, RuntimeError)
    assert str(result.exception) == "CUDA error"


def test_a_missing_package_is_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(place, tmp_path / "first")
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    data = ["--target", place / "target", "--data", place / "rows.jsonl", *FEW_STEPS]
    lora = ["--drafter", tmp_path / "first", "--lora_rank=2", "--output_dir", tmp_path / "out"]
    assert_refused(invoke("train", *data, *lora), "`lora_rank` needs `peft`: pip install")
