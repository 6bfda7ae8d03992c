from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from hf_dflash import DFlashDraftModel, cli
from hf_dflash.card_blocks import blocks_of
from hf_dflash.card_figures import figure_without_source
from hf_dflash.measurement import (
    DrafterInfo,
    Measurement,
    Seconds,
    TargetInfo,
    write_measurement,
)
from hf_dflash.model_card import (
    CardOptions,
    check_card,
    tells_of_code,
    write_card,
)
from hf_dflash.provenance import sha256_of_weights
from hf_dflash.training_log import TrainingLog, write_training_log
from measurements import (
    measurement,
    one_token_runs,
    pair_of_runs,
    provenance,
    run,
    two_block_sizes,
)
from pairs import random_drafter, tiny_target

LOG = TrainingLog(
    target="org/target",
    date="2026-01-02T03:04:05+00:00",
    versions={"torch": "2.13.0"},
    device="cpu",
    n_processes=2,
    n_steps=120,
    settings={"learning_rate": 6e-4, "block_size": 8, "target_layer_ids": "0, 2"},
    data={"chat_template": "of the target", "thinking": "off"},
    log=[
        {"loss": 3.25, "step": 100},
        {"eval_loss": 2.5, "eval_acceptance_length": 1.75, "eval_runtime": 3.0, "step": 120},
        {"eval_decoding_acceptance_length": 1.875, "step": 120},
    ],
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    random_drafter(tiny_target()).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    place = tmp_path / "my-drafter"
    place.mkdir()
    for path in saved.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    return place


def measured(folder: Path, runs: Any = None, **overrides: Any) -> Measurement:
    """A measurement of the drafter in ``folder``."""
    sha256 = sha256_of_weights(str(folder))
    of_this = provenance(
        target=TargetInfo("org/target"),
        drafter=DrafterInfo("my-drafter", sha256, "dflash", 8, 2, 1000),
        **overrides,
    )
    return measurement(runs, provenance=of_this)


def bench_file(folder: Path, runs: Any = None, name: str = "bench.json") -> Path:
    path = folder.parent / name
    write_measurement(measured(folder, runs), path)
    return path


def carded(folder: Path, runs: Any = None, **options: Any) -> str:
    path = write_card(folder, benches=[bench_file(folder, runs)], options=CardOptions(**options))
    return path.read_text(encoding="utf-8")


# ---- what a card says ----


def test_the_hash_of_the_code_is_told_where_it_is_known(folder: Path) -> None:
    path = folder.parent / "bench.json"
    for hashed, told in (
        ("a1b2c3d4e5f6", ", sha256 of the source files begins with `a1b2c3d4e5f6` |"),
        (None, f", commit `{'0' * 40}` |"),
    ):
        write_measurement(measured(folder, code_sha256=hashed), path)
        card = write_card(folder, benches=[path], options=CardOptions())
        (versions,) = re.findall(r"^\| versions \|.*$", card.read_text(encoding="utf-8"), re.M)
        assert versions.endswith(told)
    check_card(folder)


def test_metadata_say_what_it_is_and_what_was_measured(folder: Path) -> None:
    data = ModelCard(carded(folder, name="me/my-drafter", licence="apache-2.0")).data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert (data.base_model, data.base_model_relation) == ("org/target", "adapter")
    assert data.license == "apache-2.0"
    assert {"dflash", "speculative-decoding", "arxiv:2602.06036"} <= set(data.tags)
    results = {r.metric_type: r for r in data.eval_results}
    assert results["speedup"].metric_value == 2.0
    assert results["acceptance_length"].metric_value == pytest.approx(3.667)
    assert results["speedup"].dataset_type == "gsm8k"
    assert results["speedup"].metric_args == {
        "device": "cpu",
        "dtype": "float32",
        "decoding": "greedy",
        "block_size": 8,
        "num_assistant_tokens": 7,
        "measured_in": "evaluation/bench.json",
    }


def test_the_fastest_number_of_drafts_stands_beside_the_trained_block(folder: Path) -> None:
    card = carded(folder, two_block_sizes())
    assert "writes 0.80 times as fast as without it, which is slower, with the 7 drafts" in card
    assert "2 drafts a cycle, the fastest measured, 1.60 times as fast (over all sec" in card
    assert "With 7 drafts, slower than plain decoding on: gsm8k (0.80x). With 2 drafts, f" in card
    results = [
        (r.metric_type, r.metric_args["num_assistant_tokens"], r.metric_value)
        for r in ModelCard(card).data.eval_results
    ]
    assert results == [
        ("acceptance_length", 7, 3.667),
        ("speedup", 7, 0.8),
        ("speedup_total", 7, 0.8),
        ("speedup", 2, 1.6),
        ("speedup_total", 2, 1.6),
    ]
    check_card(folder)


OPTION = (
    "    max_new_tokens=64,\n"
    "    # the fastest number of drafts measured on cpu, in float32\n"
    "    num_assistant_tokens=2,\n"
)


def test_the_snippets_use_the_fastest_number_of_drafts(folder: Path) -> None:
    card = carded(folder, two_block_sizes(), name="me/my-drafter")
    assert card.count(OPTION) == 2, "with the package, and with the code of the repository"
    check_card(folder)
    assert write_card(folder).read_text() == card, "the names are found again"
    edit(folder, "    num_assistant_tokens=2,\n", "    num_assistant_tokens=5,\n")
    with pytest.raises(ValueError, match=r"without a source in line .*num_assistant_tokens=5"):
        check_card(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_target_is_loaded_in_the_dtype_of_the_advised_number_of_drafts(
    folder: Path, dtype: str
) -> None:
    path = folder.parent / "bench.json"
    write_measurement(measured(folder, two_block_sizes(), dtype=dtype), path)
    use = write_card(folder, benches=[path]).read_text().split("## Use")[1]
    check_card(folder)
    assert f'"org/target",\n    dtype="{dtype}",' in use
    assert 'dtype="auto"' not in use
    assert use.count("dtype=target.dtype") == 2, "the drafter follows"


@pytest.mark.parametrize(
    "runs",
    [
        pair_of_runs(),
        two_block_sizes(2.0, 1.5),  # the whole block is the fastest
        two_block_sizes(0.5, 0.75),  # both are slower than plain decoding
        [*pair_of_runs(), run(block_size=16, seconds=Seconds(0.0, 0.0, 0.3))],  # not in this config
        None,
    ],
)
def test_other_snippets_stay(folder: Path, runs: Any) -> None:
    card = carded(folder, runs) if runs else write_card(folder).read_text()
    use = card.split("## Use")[1].split("## Training")[0]
    assert "num_assistant_tokens" not in use
    assert ', dtype="auto")' in use
    check_card(folder)


def test_the_snippets_are_of_the_first_measurement(folder: Path) -> None:
    fast, other = two_block_sizes(), pair_of_runs(3.0)
    for names, used in ((("a.json", "b.json"), True), (("d.json", "c.json"), False)):
        for path in (folder / "evaluation").glob("*"):
            path.unlink()
        benches = [
            bench_file(folder, runs, name=name)
            for runs, name in zip((fast, other), names, strict=True)
        ]
        assert (OPTION in write_card(folder, benches=benches).read_text()) == used


def test_right_answers_stand_beside_the_speed(folder: Path) -> None:
    text = next(blocks_of(carded(folder, pair_of_runs(correct=True)))).text
    assert "| micro | identical | right answers |" in text
    assert "| dflash, block 8 | 10.0 | 2.00x | 2.20x | 3.67 | 3.67 | 1/1 | 1/1 |" in text
    assert "| plain | 5.0 | - | - | - | - | - | 1/1 |" in text
    assert "are judged by the data set's own metric." in text
    assert "right answers" not in carded(folder)


def test_the_target_is_told_as_it_was_loaded(folder: Path) -> None:
    whole = measured(folder)
    copy = dataclasses.replace(whole.provenance, target=TargetInfo("target-q4-bf16"))
    path = folder.parent / "bench.json"
    write_measurement(dataclasses.replace(whole, provenance=copy), path)
    options = CardOptions(target="org/target")
    text = write_card(folder, benches=[path], options=options).read_text()
    told = "target-q4-bf16 (a local copy, which may differ from the model as published)"
    assert f"in float32, with the target {told}, one prompt at a time" in text
    assert f"| target | {told} |" in text
    assert 'AutoModelForCausalLM.from_pretrained("org/target"' in text
    again = write_card(folder).read_text()
    assert again == text, "the repository of the card that was there is kept"


def test_figures_come_with_what_they_were_measured_on(folder: Path) -> None:
    [block] = blocks_of(carded(folder))
    assert "writes 2.00 times as fast as without it" in block.text
    assert "The text is unchanged: the one output is token for token" in block.text
    assert "| dflash, block 8 | 10.0 | 2.00x | 2.20x | 3.67 | 3.67 | 1/1 |" in block.text
    for condition in ("cpu, 1 thread", "float32", "torch 2.13.0", "hf-dflash bench --target t"):
        assert condition in block.text
    assert sha256_of_weights(str(folder)) in block.text


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([2, 3, 8], ", products of 2, 3, 8 rows made the other way round |"),
        ([], " |"),
        (None, " |"),
    ],
)
def test_products_made_the_other_way_round_are_told(
    folder: Path, rows: list[int] | None, told: str
) -> None:
    path = folder.parent / "bench.json"
    write_measurement(measured(folder, few_rows=rows), path)
    card = write_card(folder, benches=[path]).read_text()
    assert f"| device | cpu, 1 thread, 1 process{told}\n" in card
    check_card(folder)


def test_slices_that_differ_are_told_and_slow_ones_named(folder: Path) -> None:
    german = {"dataset": "mt-bench", "language": "de", "thinking": True}
    text = carded(folder, [*pair_of_runs(), *pair_of_runs(0.5, **german)])
    assert "| de | 1 | 10.0 | 0.50x |" in text
    assert "| thinking | prompts |" in text
    assert "| turn | prompts |" not in text, "there is one turn only"
    assert "Faster than plain decoding on: gsm8k (2.00x); slower than it on: mt-be" in text


def test_prompts_and_turns_are_told_apart(folder: Path) -> None:
    first = [r for turn in (0, 1) for r in pair_of_runs(turn=turn)]
    text = carded(folder, [*first, *pair_of_runs(prompt_index=1)])
    assert "Median of 3 turns of 2 prompts" in text
    assert "| gsm8k | 2 (3 turns) | 10.0 |" in text
    assert "| 2 | 1 | 10.0 |" in text, "the second turn is one of one prompt"
    check_card(folder)


def test_a_card_of_several_measurements_keeps_them_apart(folder: Path) -> None:
    benches = [bench_file(folder), bench_file(folder, pair_of_runs(1.5), name="gpu.json")]
    card = write_card(folder, benches=benches).read_text()
    sources = [block.source for block in blocks_of(card)]
    assert sources == ["evaluation/bench.json", "evaluation/gpu.json"]
    speedups = [r for r in ModelCard(card).data.eval_results if r.metric_type == "speedup"]
    assert [r.metric_value for r in speedups] == [2.0, 1.5]


def test_without_a_measurement_there_is_no_figure(folder: Path) -> None:
    card = write_card(folder).read_text()
    assert "Not measured yet." in card
    assert ModelCard(card).data.eval_results is None
    assert figure_without_source(card) is None
    assert list(blocks_of(card)) == []
    check_card(folder)


def test_training_is_told_from_its_log(folder: Path) -> None:
    write_training_log(LOG, folder)
    [block] = blocks_of(write_card(folder).read_text())
    assert block.source == "training_log.json"
    assert "120 steps against org/target, 2 processes on cpu (torch 2.13.0" in block.text
    assert "| learning rate | 0.0006 |" in block.text
    assert "| thinking | off |" in block.text
    assert "| decoding acceptance length | 1.875 |" in block.text
    assert "runtime" not in block.text
    check_card(folder)


def test_a_training_log_can_be_given(folder: Path, tmp_path: Path) -> None:
    write_training_log(LOG, tmp_path)
    write_card(folder, training_log=tmp_path / "training_log.json")
    assert (folder / "training_log.json").is_file()
    check_card(folder)


def test_every_engine_has_its_command(folder: Path) -> None:
    card = carded(folder, name="me/my-drafter")
    assert '"model": "me/my-drafter", "num_speculative_tokens": 7}' in card
    assert "--speculative-draft-model-path me/my-drafter" in card
    assert "--speculative-num-draft-tokens 8" in card
    assert "vllm serve org/target" in card
    assert 'speculation_type="dflash"' in card
    assert "trust_remote_code=True" in card
    assert "The block loop that transformers has since 5.15 takes the same drafter:" in card


def test_what_no_engine_serves_is_said(tmp_path: Path) -> None:
    random_drafter(tiny_target(), architecture="dflare").save_pretrained(tmp_path)
    card = write_card(tmp_path).read_text()
    assert "Neither serves DFlare drafters" in card
    assert "vllm serve" not in card
    assert ModelCard(card).data.tags[0] == "dflare"


def test_windows_of_two_kinds_need_the_newer_runner(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    drafter = random_drafter(tiny_target(), layer_types=kinds, sliding_window=6)
    drafter.save_pretrained(tmp_path)
    card = write_card(tmp_path).read_text()
    assert "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve" in card
    assert "1 sliding (window 6), 1 full" in card


def test_a_folder_without_code_gets_it_by_the_push_so_the_card_tells_of_it(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "### transformers alone" in write_card(folder).read_text()
    without = write_card(folder, options=CardOptions(code=False)).read_text()
    assert "transformers alone" not in without
    assert not tells_of_code(folder)


def test_how_code_of_another_project_is_used_is_not_told(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "transformers alone" not in write_card(folder).read_text()


def test_the_python_of_a_card_is_python_and_its_first_block_decodes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's repository is a tiny one; the tokenizer a stand-in."""
    target = tiny_target()
    card = carded(folder, two_block_sizes(), name=str(folder), target="org/target")
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        ast.parse(block)
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: target
    )
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_: Tokenizer())
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(block, scope)
    assert scope["output"].shape == (1, 3 + 64)


class Tokenizer:
    def apply_chat_template(self, chat: Any, **options: Any) -> Any:
        import torch

        assert chat[0]["role"] == "user"
        assert options["add_generation_prompt"]
        return {"input_ids": torch.tensor([[5, 6, 7]])}

    def decode(self, ids: Any) -> str:
        return str(len(ids))


def test_text_of_ones_own_is_kept_apart(folder: Path) -> None:
    card = carded(folder, notes="Trained on answers of the target to 800 prompts.")
    assert card.rstrip().endswith("## Notes\n\nTrained on answers of the target to 800 prompts.")
    check_card(folder)


# ---- writing again ----


def test_a_card_written_again_keeps_what_no_file_tells(folder: Path) -> None:
    carded(folder, name="me/my-drafter", licence="mit")
    again = write_card(folder, options=CardOptions(name="me/my-drafter")).read_text()
    assert ModelCard(again).data.license == "mit"
    assert [block.source for block in blocks_of(again)] == ["evaluation/bench.json"]
    assert ModelCard(again).data.base_model == "org/target"


def test_notes_and_name_are_kept_by_a_card_that_is_written_again(folder: Path) -> None:
    first = carded(folder, name="me/my-drafter", notes="800 prompts.\n\n### Where\n\nMine.")
    assert write_card(folder).read_text() == first
    assert "Other." in carded(folder, notes="Other.")
    assert "800 prompts" not in (folder / "README.md").read_text()


def test_without_a_name_the_place_of_the_card_is_marked(folder: Path) -> None:
    card = carded(folder)
    assert "`<drafter>` stands for the folder or repository that this card lies in." in card
    assert 'DFlashDraftModel.from_pretrained("<drafter>"' in card
    assert "# DFlash drafter for target\n" in card
    check_card(folder)
    elsewhere = folder.rename(folder.parent / "drafter-2")
    check_card(elsewhere)
    assert "<drafter>" not in carded(elsewhere, name="me/my-drafter")


@pytest.mark.parametrize(
    "old",
    [
        "<!-- written by hf-dflash card; another template -->\n\n# Mine\n",
        "# Mine\n\n<!-- measured: evaluation/bench.json -->\n2x\n<!-- end -->\n",
    ],
)
def test_a_card_of_another_version_is_told_as_one(folder: Path, old: str) -> None:
    (folder / "README.md").write_text(old)
    with pytest.raises(ValueError, match=r"made by another version of .*may have.*--overwrite"):
        write_card(folder)
    assert (
        "Not measured yet." in write_card(folder, options=CardOptions(overwrite=True)).read_text()
    )


def test_a_card_written_by_hand_is_not_replaced_unasked(folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n")
    with pytest.raises(ValueError, match=r"was not written by `hf-dflash card`.*--overwrite"):
        write_card(folder)
    card = write_card(folder, options=CardOptions(overwrite=True)).read_text()
    assert ModelCard(card).data.license == "mit"


@pytest.mark.parametrize(("name", "told"), [(None, "my-drafter"), ("me/other", "me/other")])
def test_the_results_are_of_the_name_that_readers_load(
    folder: Path, name: str | None, told: str
) -> None:
    assert ModelCard(carded(folder, name=name)).data.model_name == told


def test_a_folder_as_target_is_no_base_model(folder: Path) -> None:
    data = ModelCard(carded(folder, target="/models/target")).data
    assert data.base_model is None
    assert "base_model_relation" not in data.to_dict()


def test_a_measurement_of_other_weights_is_refused(folder: Path) -> None:
    path = folder.parent / "bench.json"
    write_measurement(measurement(), path)
    with pytest.raises(ValueError, match=r"`benches` must be of the drafter in .* measured d with"):
        write_card(folder, benches=[path])
    assert not (folder / "evaluation").exists()


def test_a_measurement_with_another_drafting_policy_is_refused(folder: Path) -> None:
    before = carded(folder)
    drafter = DFlashDraftModel.from_pretrained(folder)
    drafter.generation_config.num_assistant_tokens = 2
    drafter.save_pretrained(folder)
    with pytest.raises(
        ValueError,
        match=r"as it is, but .* drafting policy \{\} .*, here \{'num_assistant_tokens': 2",
    ):
        write_card(folder)
    assert (folder / "README.md").read_text() == before


def test_a_measurement_of_other_taps_is_refused(folder: Path) -> None:
    now = measured(folder)
    other = dataclasses.replace(now.provenance.drafter, target_layer_ids=[0])
    path = folder.parent / "bench.json"
    told = dataclasses.replace(now.provenance, drafter=other)
    write_measurement(dataclasses.replace(now, provenance=told), path)
    with pytest.raises(ValueError, match=r"`target_layer_ids` \[0\], here"):
        write_card(folder, benches=[path])


def test_a_card_is_not_written_from_measurements_of_earlier_weights(folder: Path) -> None:
    before = carded(folder)
    random_drafter(tiny_target(), seed=5).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"evaluation/bench\.json measured my-drafter with other"):
        write_card(folder)
    assert (folder / "README.md").read_text() == before
    assert "2.00 times" in carded(folder), "a new measurement of that name takes its place"


def test_measurements_of_one_name_do_not_replace_each_other(folder: Path) -> None:
    (folder.parent / "gpu").mkdir()
    benches = [bench_file(folder), bench_file(folder, name="gpu/bench.json")]
    with pytest.raises(ValueError, match=r"`benches` must differ in their names"):
        write_card(folder, benches=benches)
    assert not (folder / "evaluation").exists()


def test_only_a_repository_is_linked(folder: Path) -> None:
    assert "[target](https://huggingface.co/org/target)" in carded(folder)
    assert "](https://huggingface.co" not in carded(folder, target="a-folder")


# ---- checking ----


def test_a_card_that_was_written_passes(folder: Path) -> None:
    carded(folder)
    check_card(folder)


def test_a_missing_card(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no README\.md\. Write one: `hf-dflash card"):
        check_card(folder)


def edit(folder: Path, old: str, new: str) -> None:
    card = folder / "README.md"
    text = card.read_text()
    assert old in text
    card.write_text(text.replace(old, new))


def test_an_edited_figure_is_found(folder: Path) -> None:
    carded(folder)
    edit(folder, "2.00 times as fast", "3.00 times as fast")
    said = r"says something else than evaluation/bench\.json does\. It was edited, or another"
    with pytest.raises(ValueError, match=said):
        check_card(folder)


def test_an_edited_result_in_the_metadata_is_found(folder: Path) -> None:
    carded(folder)
    edit(folder, "value: 2.0", "value: 4.0")
    with pytest.raises(ValueError, match=r"a result in its metadata .* speedup 4\.0 on gsm8k"):
        check_card(folder)


def test_a_measurement_that_is_gone_is_missed(folder: Path) -> None:
    carded(folder)
    (folder / "evaluation" / "bench.json").unlink()
    with pytest.raises(ValueError, match=r"figures of evaluation/bench\.json, which is not there"):
        check_card(folder)


def test_weights_that_were_replaced_are_found(folder: Path) -> None:
    carded(folder)
    random_drafter(tiny_target(), seed=5).save_pretrained(folder)
    with pytest.raises(ValueError, match="other weights"):
        check_card(folder)


@pytest.mark.parametrize(
    "line",
    [
        "Speed-up: 2.5x over plain decoding.",
        "Decoding is twice as fast as without it.",
        "| data set | speed-up |\n|---|---|\n| gsm8k | 2.4 |",
    ],
)
def test_a_figure_of_ones_own_is_found(folder: Path, line: str) -> None:
    carded(folder)
    card = folder / "README.md"
    card.write_text(f"{card.read_text()}\n{line}\n")
    with pytest.raises(ValueError, match="has a figure without a source in line"):
        check_card(folder)
    with pytest.raises(ValueError, match="`notes` must not hold figures, which come from measure"):
        write_card(folder, options=CardOptions(notes=line))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("It proposes 7 tokens in one pass", "It proposes 9 tokens in one pass"),
        ("| block size | 8: the anchor and 7 drafts |", "| block size | 9: the anchor and 8 |"),
        ("Block sizes above 8", "Block sizes above 80"),
        ('"num_speculative_tokens": 7', '"num_speculative_tokens": 15'),
        ("## Training\n", "## Training\n\nOn 800000 prompts.\n"),
    ],
)
def test_a_number_of_the_config_that_was_edited_is_found(folder: Path, old: str, new: str) -> None:
    write_training_log(LOG, folder)
    carded(folder, name="me/my-drafter", target="org/target", notes="800 prompts.")
    check_card(folder)
    edit(folder, old, new)
    with pytest.raises(ValueError, match=r"a figure without a source in line \d+: .*under Notes"):
        check_card(folder)


def test_the_lines_of_a_card_without_code_are_known_too(folder: Path) -> None:
    carded(folder, code=False)
    check_card(folder)


def test_the_card_of_the_shipped_drafter_holds_no_figure_of_its_own() -> None:
    places = [*(Path(__file__).parents[2] / "model_cards").glob("*/README.md")]
    assert places
    for card in places:
        check_card(card.parent)


def test_outputs_of_one_token_are_told_without_a_figure_of_decoding(folder: Path) -> None:
    text = next(blocks_of(carded(folder, one_token_runs()))).text
    assert "1.00 times as fast" in text
    assert "decoding alone" not in text
    assert not re.search(r"\b(nan|inf)\b", text, re.IGNORECASE)
    check_card(folder)


# ---- the command ----


def test_the_command_writes_a_card(folder: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("Made with care.")
    bench = str(bench_file(folder))
    options = ["--bench", bench, "--name", "me/d", "--license", "mit", "--notes", str(notes)]
    result = CliRunner().invoke(cli.app, ["card", str(folder), *options])
    assert result.exit_code == 0, result.stderr
    assert "Wrote" in result.stdout
    card = (folder / "README.md").read_text()
    assert "Made with care." in card
    assert ModelCard(card).data.license == "mit"


def test_the_command_says_that_readers_cannot_load_a_target_of_this_machine(folder: Path) -> None:
    options = ["card", str(folder), "--bench", str(bench_file(folder)), "--target"]
    alone = CliRunner().invoke(cli.app, [*options, "my-target"])
    assert "names no repository of the target" in alone.stdout
    named = CliRunner().invoke(cli.app, [*options, "me/target"])
    assert (named.exit_code, "names no repository" in named.stdout) == (0, False)
    assert named.stdout.count("\n") == 1, "the command to push is one line, to be copied"


def test_the_command_refuses_in_one_line(folder: Path) -> None:
    broken = folder.parent / "bench.json"
    broken.write_text("{")
    result = CliRunner().invoke(cli.app, ["card", str(folder), "--bench", str(broken)])
    assert result.exit_code == 2
    assert re.fullmatch(r"Error: .*bench\.json must be a JSON file of.*\n", result.stderr)


def test_gaps_at_differences_are_told(folder: Path) -> None:
    runs = [*pair_of_runs(), *pair_of_runs(prompt_index=1)]
    runs[3] = dataclasses.replace(runs[3], identical=False, first_difference=2, top2_gap=0.125)
    text = carded(folder, [*runs, run(prompt_index=2)])
    assert "2 of 3 outputs are token for token" in text
    assert "where the target's two best logits are at most 0.125 apart." in text
