"""`doctor` passes good folders, says who they are for, and prints how to serve them."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import published_folders as folders
from hf_dflash.convert import convert
from hf_dflash.doctor import as_dict, examine
from hf_dflash.doctor_facts import ENGINES
from hf_dflash.doctor_view import show
from pairs import random_drafter, tiny_target

PUBLISHED = Path(__file__).parents[2] / "model_cards"
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS = {"layer_types": [SLIDING] * 2, "sliding_window": 16, "is_causal": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_target().save_pretrained(folder)
    return str(folder)


def saved(folder, **overrides):
    drafter = random_drafter(tiny_target(), num_target_layers=4, **overrides)
    drafter.to(torch.bfloat16).save_pretrained(folder)
    return folder


def states(examination):
    return {verdict.engine: verdict.state for verdict in examination.verdicts}


def loading(examination):
    return {engine for engine, state in states(examination).items() if state == "loads"}


def assert_good(examination, *engines):
    assert "faulty" not in states(examination).values(), as_dict(examination)
    assert examination.exit_code == 0
    assert loading(examination) == set(engines)


@pytest.mark.parametrize("folder", sorted(PUBLISHED.iterdir()), ids=lambda path: path.name)
def test_what_this_repository_publishes_is_good(folder):
    examination = examine(folder)
    assert "faulty" not in states(examination).values(), as_dict(examination)
    assert {"hf-dflash"} <= loading(examination)


@pytest.mark.parametrize(
    "overrides",
    [{}, WINDOWS, {"attention_bias": True}, {"layer_types": [SLIDING, FULL], "sliding_window": 8}],
    ids=["full", "windows", "bias", "mixed"],
)
def test_a_saved_drafter_loads_in_the_engines_of_its_format(overrides, target, tmp_path):
    examination = examine(saved(tmp_path / "d", **overrides), target)
    assert_good(examination, "hf-dflash", "trust_remote_code", "vllm", "sglang", "llama.cpp")


def test_a_saved_dflare_drafter_is_for_this_package(target, tmp_path):
    examination = examine(saved(tmp_path / "d", architecture="dflare"), target)
    assert_good(examination, "hf-dflash", "trust_remote_code")
    vllm = next(v for v in examination.verdicts if v.engine == "vllm")
    assert vllm.reason == "it has no DFlare drafters"


@pytest.mark.parametrize(
    ("to", "engines"),
    [
        ("zlab", ["hf-dflash", "vllm", "sglang", "llama.cpp"]),
        ("flat", ["hf-dflash", "vllm", "sglang", "llama.cpp"]),
        ("modelopt", ["hf-dflash", "vllm", "sglang", "llama.cpp"]),
        ("speculators", ["vllm", "speculators"]),
        ("native", ["hf-dflash", "transformers", "vllm", "sglang"]),
        ("angelslim", ["hf-dflash"]),
    ],
)
def test_a_converted_drafter_loads_in_the_engine_it_is_for(to, engines, target, tmp_path):
    convert(saved(tmp_path / "d"), tmp_path / "out", to=to, target=target)
    assert_good(examine(tmp_path / "out", target), *engines)


@pytest.mark.parametrize("to", ["zlab", "flat", "speculators", "native"])
def test_windows_that_look_both_ways_load_too(to, target, tmp_path):
    convert(saved(tmp_path / "d", **WINDOWS), tmp_path / "out", to=to, target=target)
    assert "vllm" in loading(examine(tmp_path / "out", target))


def test_a_width_that_is_the_target_s_own_is_no_fault(tmp_path):
    source = folders.speculators(tmp_path / "d", tiny_target(), "org/t", target_hidden_size=32)
    assert examine(source, engines=["speculators"]).exit_code == 0


def test_the_native_class_has_two_names_in_vllm(tmp_path):
    native = folders.native(tmp_path / "d", architectures=["DFlashMuseGlimmerAssistantModel"])
    assert examine(native, engines=["vllm"]).exit_code == 0


def test_code_of_another_repository_need_not_be_in_the_folder(tmp_path):
    source = folders.zlab(
        tmp_path / "d", auto_map={"AutoModel": "org/code--dflash.DFlashDraftModel"}
    )
    assert examine(source, engines=["trust_remote_code"]).exit_code == 0


def test_a_reduced_vocabulary_loads_where_it_is_known(target, tmp_path):
    source = folders.speculators(
        tmp_path / "d", tiny_target(), "org/t", [1, 9], sliding_window_non_causal=True
    )
    assert_good(examine(source, target), "vllm", "speculators")


def test_the_commands_count_as_each_engine_counts(target, tmp_path):
    commands = examine(saved(tmp_path / "d"), target).commands
    assert '"num_speculative_tokens": 7' in commands["vllm"]
    assert f"vllm serve {target}" in commands["vllm"]
    assert "--speculative-num-draft-tokens 8" in commands["sglang"]
    assert f"--target-model-dir {target}" in commands["llama.cpp"]


def test_the_target_s_name_is_found_in_the_card_or_the_config(target, tmp_path):
    source = saved(tmp_path / "d")
    (source / "README.md").write_text("---\nbase_model: org/target\n---\n")
    assert "vllm serve org/target" in examine(source).commands["vllm"]
    convert(source, tmp_path / "out", to="speculators", target=target)
    assert examine(tmp_path / "out").commands["vllm"] == f"vllm serve {tmp_path / 'out'}"


def test_an_engine_that_is_asked_must_load_it(tmp_path):
    source = saved(tmp_path / "d")
    assert examine(source, engines=["vllm", "sglang"]).exit_code == 0
    examination = examine(source, engines=["transformers"])
    assert examination.exit_code == 1
    finding = examination.verdicts[0].findings[0]
    assert "AutoModel alone builds a random Qwen3" in finding.reason
    assert "--to native" in finding.remedy


@pytest.mark.parametrize(
    "changes",
    [{"architectures": ["DSparkDraftModel"]}, {"architectures": ["DFlash2DraftModel"]}],
    ids=str,
)
def test_another_method_loads_nowhere(changes, tmp_path):
    examination = examine(folders.zlab(tmp_path / "d", **changes))
    assert set(states(examination).values()) == {"not for it"}
    assert examination.exit_code == 1
    assert examination.commands == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: None, "`path` must be a folder or a Hub repository"),
        (lambda folder: folder.mkdir(), "has no config.json"),
        (lambda folder: folders.write_folder(folder, [1], {}), "must hold a JSON object"),
        (
            lambda folder: (folders.zlab(folder) / "config.json").write_text("{"),
            "config.json is not valid JSON",
        ),
        (
            lambda folder: (folders.zlab(folder) / "generation_config.json").write_text("{"),
            "generation_config.json is not valid JSON",
        ),
    ],
)
def test_bad_input_is_refused(make, message, tmp_path):
    make(tmp_path / "d")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        examine(tmp_path / "d")


def test_an_unknown_engine_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`engine` must be among .*got \['tgi'\]"):
        examine(folders.zlab(tmp_path / "d"), engines=["tgi"])


def test_a_repository_must_be_downloaded_first(monkeypatch):
    monkeypatch.setattr("hf_dflash.doctor_facts.check_folder_exists", lambda *_: None)
    with pytest.raises(ValueError, match="`path` must be a local folder, got org/drafter"):
        examine("org/drafter")


def test_the_table_and_the_json_say_the_same(target, tmp_path):
    source = saved(tmp_path / "d")
    folders.edit_config(source, use_sliding_window=False, layer_types=[SLIDING] * 2)
    examination = examine(source, target)
    console = Console(width=200, record=True, file=io.StringIO())
    show(examination, console)
    text = console.export_text()
    content = json.loads(json.dumps(as_dict(examination)))
    assert content["exit_code"] == 1
    for engine, verdict in content["engines"].items():
        assert engine in text
        for finding in verdict["findings"]:
            assert finding["subject"] in text
    assert "use_sliding_window" in text


def shown(examination):
    console = Console(width=200, record=True, file=io.StringIO())
    show(examination, console)
    return console.export_text()


def test_a_fault_that_engines_share_is_told_once(tmp_path):
    source = saved(tmp_path / "d")
    (source / "model.safetensors").unlink()
    text = shown(examine(source))
    assert text.count("has no model.safetensors") == 1
    rows = [line.split("\u2502") for line in text.splitlines() if "\u2502" in line]
    names = [cells[1].strip() for cells in rows]
    assert names[:2] == ["hf-dflash", "trust_remote_code"], "one row of several engines"
    assert rows[1][2].strip() == ""
    assert {*ENGINES} <= {*names}
    nested = folders.config_of(source)["dflash_config"]
    folders.edit_config(source, is_causal=True, dflash_config={**nested, "causal": False})
    text = shown(examine(source))
    assert text.count("has no model.safetensors") == 1
    assert "weights: as for hf-dflash." in text, "where an engine has another fault besides"
    assert text.count("differ. Write `is_causal`") == 1
