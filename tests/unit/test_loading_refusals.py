"""Drafters' folders that are refused: what is wrong with them is named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_dflash import DFlashConfig, DFlashDraftModel, checkpoint_dflash
from pairs import random_drafter, tiny_target


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def drafter():
    return random_drafter(tiny_target())


@pytest.fixture
def folder(drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "1 missing: fc.weight"),
        (lambda t: t.pop("layers.1.self_attn.q_norm.weight"), "1 missing: layers.1.self_attn.q_"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(4, 4)}), "1 unexpected: lm_head.weight"),
        (
            lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
            "1 unexpected: layers.0.self_attn.q_proj.bias",
        ),
        (
            lambda t: t.update({"fc.weight": torch.zeros(32, 32)}),
            r"1 wrongly shaped: fc.weight \(32, 32\) instead of \(32, 64\)",
        ),
    ],
    ids=["missing", "missing in a layer", "unexpected", "bias", "shape"],
)
def test_tensors_that_do_not_fit_are_named(folder, change, message):
    edit_weights(folder, change)
    with pytest.raises(ValueError, match=f"{message}.*Check `num_hidden_layers`"):
        DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("prefix_gru.weight_ih_l0", "is a Domino drafter"),
        ("markov_head.markov_w1.weight", "is a DSpark"),
        ("candidate_selector.successor_codebook", "is a DFlash 2 drafter"),
        ("hidden_correction.up_proj.weight", "is a DFly drafter"),
    ],
)
def test_other_formats_are_told_by_their_tensors(folder, tensor, message):
    edit_weights(folder, lambda tensors: tensors.update({tensor: torch.zeros(2)}))
    with pytest.raises(ValueError, match=message):
        DFlashDraftModel.from_pretrained(folder)


def test_a_truncated_file_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is truncated or is not a safetensors file"):
        DFlashDraftModel.from_pretrained(folder)


def test_pickled_weights_are_refused(drafter, folder):
    (folder / "model.safetensors").unlink()
    torch.save(drafter.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"weights in pytorch_model.bin only.*Convert it once"):
        DFlashDraftModel.from_pretrained(folder)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model.safetensors. Check the path"):
        DFlashDraftModel.from_pretrained(folder)


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config.json. Save drafters with"):
        DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("source", ["/no/where", "./no", "../no", "~/no", "a/b/c", Path("/no")])
def test_a_folder_that_does_not_exist_is_refused(source):
    message = f"`pretrained_model_name_or_path` must .* there is no folder {source}. Check the path"
    with pytest.raises(FileNotFoundError, match=message):
        DFlashDraftModel.from_pretrained(source)


def test_a_folder_that_does_not_exist_beside_others_is_refused(folder, monkeypatch):
    monkeypatch.chdir(folder.parents[1])
    source = f"{folder.parent.name}/draftr"
    with pytest.raises(FileNotFoundError, match=f"no folder {source}, nor a repository: .+"):
        DFlashDraftModel.from_pretrained(source, local_files_only=True)
    good = f"{folder.parent.name}/{folder.name}"
    assert DFlashDraftModel.from_pretrained(good, local_files_only=True) is not None


def test_a_repository_is_looked_for_though_a_folder_has_its_owners_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("owner").mkdir()
    monkeypatch.setattr(checkpoint_dflash, "cached_file", lambda *_, **__: "config.json")
    checkpoint_dflash.check_folder_exists("owner/name", "drafter", {})
    checkpoint_dflash.check_folder_exists("name", "drafter", {})


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`pretrained_model_name_or_path` must be a folder"):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_a_repository_that_cannot_be_had_is_transformers_own_error():
    with pytest.raises(OSError, match="connect"):
        DFlashDraftModel.from_pretrained("no-such-organisation/none", local_files_only=True)


def test_an_ordinary_model_is_refused(tmp_path):
    tiny_target().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`architectures` must be one of.*Qwen3ForCausalLM"):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_weights_of_an_ordinary_model_under_a_drafters_config_are_refused(folder):
    edit_weights(folder, lambda tensors: tensors.clear())
    model = Qwen3ForCausalLM(Qwen3Config(**{**tiny_target().config.to_dict()}))
    save_file(model.model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: .*fc.weight.*unexpected: .*embed_tokens"):
        DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"ignore_mismatched_sizes": True}, "`ignore_mismatched_sizes`=True is not supported"),
        ({"use_safetensors": False}, "`use_safetensors`=False is not supported"),
        ({"gguf_file": "x.gguf"}, "`gguf_file` is not supported"),
    ],
    ids=str,
)
def test_options_that_load_less_than_everything_are_refused(folder, option, message):
    with pytest.raises(ValueError, match=message):
        DFlashDraftModel.from_pretrained(folder, **option)


def test_a_config_of_another_model_is_refused(folder):
    with pytest.raises(TypeError, match="`config` must be a DFlashConfig, got Qwen3Config"):
        DFlashDraftModel.from_pretrained(folder, config=Qwen3Config())


def test_a_config_of_the_other_architecture_is_refused(drafter, tmp_path):
    random_drafter(tiny_target(), architecture="dflare").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r'`config.architecture` is "dflash" but .*"dflare"'):
        DFlashDraftModel.from_pretrained(tmp_path, config=drafter.config)


def test_a_bad_policy_is_refused_when_saved_and_when_loaded(drafter, folder):
    drafter.generation_config.num_assistant_tokens = 8
    with pytest.raises(ValueError, match=r"`num_assistant_tokens` must be in 1..7"):
        drafter.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"num_assistant_tokens": 8}')
    with pytest.raises(ValueError, match=r"`num_assistant_tokens` must be in 1..7"):
        DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", r"config\.json is not valid JSON"),
        ("config.json", "[]", r"config\.json must hold a JSON object"),
        ("generation_config.json", "{", r"generation_config\.json is not valid JSON"),
        ("generation_config.json", "[]", r"generation_config\.json must hold a JSON object"),
        ("model.safetensors.index.json", "{", r"index\.json is not valid JSON"),
        ("model.safetensors.index.json", "{}", r"index\.json must have a `weight_map`, got None"),
    ],
)
def test_a_bad_file_of_a_folder_is_named(drafter, tmp_path, name, content, message):
    drafter.save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_a_model_of_an_incomplete_config_is_refused():
    with pytest.raises(ValueError, match="`mask_token_id` is missing"):
        DFlashDraftModel(DFlashConfig())
