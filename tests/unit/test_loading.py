"""A drafter's folder: what is in it, and who can load it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    GenerationConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    configuration_utils,
)

from hf_dflash import DFlashDraftModel
from pairs import random_drafter, tiny_target

MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
PUBLISHED = Path(__file__).parents[2] / "model_cards" / "smollm2-135m-instruct-dflash"
LAYER = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
# Runs where `hf_dflash` cannot be imported, installed or not: only what travelled is there.
REMOTE = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_dflash":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hide())
import torch
from pathlib import Path
from transformers import AutoConfig, AutoModel

for work in map(Path, sys.argv[1:]):
    drafter = AutoModel.from_pretrained(work / "drafter", trust_remote_code=True)
    assert type(drafter).__name__ == "DFlashDraftModel", type(drafter)
    assert drafter.generation_config.num_assistant_tokens == 3
    config = AutoConfig.from_pretrained(work / "drafter", trust_remote_code=True)
    assert config.to_diff_dict() == drafter.config.to_diff_dict()
    with torch.no_grad():
        output = drafter(**torch.load(work / "inputs.pt")).last_hidden_state
    torch.save(output, work / "output.pt")
    drafter.save_pretrained(work / "again")
assert "hf_dflash" not in sys.modules
"""


def drafter_inputs(drafter, n_context=6, seed=3):
    torch.manual_seed(seed)
    width = drafter.config.target_hidden_size * len(drafter.config.target_layer_ids)
    n_block = drafter.config.block_size
    return {
        "noise_embeds": torch.randn(1, n_block, drafter.config.hidden_size),
        "context_hidden_states": torch.randn(1, n_context, width),
        "position_ids": torch.arange(n_context + n_block)[None],
    }


def output(drafter, inputs=None):
    with torch.no_grad():
        return drafter(**(inputs or drafter_inputs(drafter))).last_hidden_state


def edit_config(folder, **changes):
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "DELETE"}))


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


VARIANTS = {
    "dflash": {},
    "dflare": {"architecture": "dflare"},
    "bias": {"attention_bias": True},
    "mixed": MIXED,
    "bidirectional windows": {**MIXED, "is_causal": False},
    "wide target": {"target_hidden_size": 48},
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_drafter_loads_as_it_was(overrides, dtype, tmp_path):
    saved = random_drafter(tiny_target(), **overrides).to(dtype)
    saved.generation_config.num_assistant_tokens = 3
    saved.generation_config.temperature = 0.0
    saved.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == dtype
    assert loaded.config == saved.config
    assert loaded.state_dict().keys() == saved.state_dict().keys()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    assert loaded.generation_config.num_assistant_tokens == 3
    assert loaded.generation_config.temperature == 0.0
    assert not loaded.training


def test_the_saved_tensors_are_the_wire_format(folder):
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{i}.{name}" for i in range(2) for name in LAYER}
    assert set(load_file(folder / "model.safetensors")) == expected
    assert len(expected) == 3 + 11 * 2


def test_the_saved_tensors_of_dflare_are_angelslims(tmp_path):
    random_drafter(tiny_target(), architecture="dflare").save_pretrained(tmp_path)
    names = (*LAYER, "self_attn.k_proj_target.weight", "self_attn.v_proj_target.weight")
    expected = {"layer_fusion_weights", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{i}.{name}" for i in range(2) for name in names}
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == expected
    assert len(expected) == 3 + 13 * 2
    assert tensors["layer_fusion_weights"].shape == (2, 2)


def test_the_saved_config_is_the_portable_one_with_its_code(folder):
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 8
    assert raw["dtype"] == raw["torch_dtype"] == "float32"
    assert raw["auto_map"] == {
        "AutoConfig": "configuration_dflash.DFlashConfig",
        "AutoModel": "modeling_dflash.DFlashDraftModel",
    }
    for reference in raw["auto_map"].values():
        assert (folder / f"{reference.split('.')[0]}.py").is_file()
    assert (folder / "generation_config.json").is_file()


def test_a_new_dflare_drafter_starts_from_its_papers_mix():
    new = random_drafter(
        tiny_target(num_hidden_layers=8), architecture="dflare", target_layer_ids=[1, 3, 5, 6]
    )
    assert new.layer_fusion_weights.tolist() == [[2.0, 0, 0, 0], [0, 0, 2.0, 0]]


def test_the_folder_alone_is_enough_for_auto_model(tmp_path):
    drafters = {
        tmp_path / name: random_drafter(tiny_target(), **VARIANTS[name]) for name in VARIANTS
    }
    for work, saved in drafters.items():
        saved.generation_config.num_assistant_tokens = 3
        saved.save_pretrained(work / "drafter")
        torch.save(drafter_inputs(saved), work / "inputs.pt")
    # transformers may be another release than the installed one, put first on the path.
    libraries = [path for path in sys.path if (Path(path) / "transformers").is_dir()]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(libraries),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    run = subprocess.run(
        [sys.executable, "-c", REMOTE, *map(str, drafters)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for work, saved in drafters.items():
        expected = output(saved)
        assert torch.equal(torch.load(work / "output.pt"), expected)
        # What it saved in turn is a drafter like any other.
        assert torch.equal(output(DFlashDraftModel.from_pretrained(work / "again")), expected)


def test_auto_model_without_trust_builds_a_random_qwen3(folder):
    """The trap the docstrings warn of: if this ever changes, so may they."""
    misloaded = AutoModel.from_pretrained(folder)
    assert type(misloaded).__name__ == "Qwen3Model"
    target = tiny_target()
    with pytest.raises(TypeError, match=r"DFlashDraftModel\.from_pretrained"):
        target.generate(torch.tensor([[1, 2]]), assistant_model=misloaded, max_new_tokens=2)


def test_the_published_drafter_loads():
    if not PUBLISHED.is_dir():
        pytest.skip("model_cards/smollm2-135m-instruct-dflash is not in this checkout")
    drafter, info = DFlashDraftModel.from_pretrained(
        PUBLISHED, dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert drafter.dtype == torch.bfloat16
    assert drafter.config.mask_token_id == 16
    raw = json.loads((PUBLISHED / "config.json").read_text())
    written = drafter.config.to_diff_dict()
    elsewhere = {"auto_map", "transformers_version"}
    assert {key: written[key] for key in raw if key not in elsewhere} == {
        key: value for key, value in raw.items() if key not in elsewhere
    }


# ------------------------------------------------------------------ other spellings


def test_native_tensor_names_load_and_are_saved_under_ours(tmp_path, monkeypatch):
    native = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            sliding_window=64,
            block_size=8,
            mask_token_id=95,
            target_layer_ids=[0, 2],
        )
    ).eval()
    native.save_pretrained(tmp_path / "native")
    assert "encoder.fc.weight" in load_file(tmp_path / "native" / "model.safetensors")
    warnings = []
    monkeypatch.setattr(configuration_utils.logger, "warning", warnings.append)
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "native")
    assert warnings == []  # of its `model_type`, which is not Qwen3's
    inputs = drafter_inputs(loaded)
    with torch.no_grad():
        expected = native(**inputs).last_hidden_state
    assert torch.allclose(output(loaded, inputs), expected, atol=1e-5)
    loaded.save_pretrained(tmp_path / "ours")
    assert "fc.weight" in load_file(tmp_path / "ours" / "model.safetensors")
    again = DFlashDraftModel.from_pretrained(tmp_path / "ours")
    assert torch.equal(output(again, inputs), output(loaded, inputs))


@pytest.mark.parametrize(
    "pattern",
    [(r"^", "model."), (r"^fc\.", "encoder.fc."), (r"^hidden_norm", "encoder.output_norm_enc")],
    ids=str,
)
def test_prefixes_and_aliases_load(drafter, folder, pattern):
    def spell(tensors):
        for name in list(tensors):
            tensors[re.sub(*pattern, name)] = tensors.pop(name)

    edit_weights(folder, spell)
    assert torch.equal(output(DFlashDraftModel.from_pretrained(folder)), output(drafter))


def test_training_names_of_dflare_load(tmp_path):
    saved = random_drafter(tiny_target(), architecture="dflare")
    saved.save_pretrained(tmp_path)

    def spell(tensors):
        tensors["context_norm.weight"] = tensors.pop("hidden_norm.weight")
        tensors["final_norm.weight"] = tensors.pop("norm.weight")

    edit_weights(tmp_path, spell)
    assert torch.equal(output(DFlashDraftModel.from_pretrained(tmp_path)), output(saved))


def test_the_tensors_tell_dflare_from_dflash(tmp_path):
    saved = random_drafter(tiny_target(), architecture="dflare")
    saved.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["DFlashDraftModel"])
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert loaded.config.architecture == "dflare"
    assert torch.equal(output(loaded), output(saved))


def test_an_auto_map_to_other_code_is_not_followed(drafter, folder):
    (folder / "dflash.py").write_text("raise SystemExit('never imported')\n")
    edit_config(folder, auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    loaded = DFlashDraftModel.from_pretrained(folder)
    assert torch.equal(output(loaded), output(drafter))


def test_sharded_weights_load(drafter, tmp_path):
    drafter.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert torch.equal(output(DFlashDraftModel.from_pretrained(tmp_path)), output(drafter))
    next(tmp_path.glob("model-00002-*")).unlink()
    with pytest.raises(ValueError, match=r"`model-00002-.*` is missing from .*Download it again"):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_a_variant_and_a_subfolder_load(drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "inner", variant="fp32")
    loaded = DFlashDraftModel.from_pretrained(tmp_path, subfolder="inner", variant="fp32")
    assert torch.equal(output(loaded), output(drafter))


def test_weights_can_be_given(drafter):
    state = drafter.state_dict()
    loaded = DFlashDraftModel.from_pretrained(None, config=drafter.config, state_dict=state)
    assert torch.equal(output(loaded), output(drafter))


def test_config_overrides_and_policy_are_taken(folder):
    policy = GenerationConfig(num_assistant_tokens=2)
    loaded = DFlashDraftModel.from_pretrained(folder, block_size=4, generation_config=policy)
    assert (loaded.config.block_size, loaded.generation_config.num_assistant_tokens) == (4, 2)


def test_a_config_can_be_read_from_elsewhere(drafter, folder, tmp_path):
    drafter.config.save_pretrained(tmp_path / "elsewhere")
    edit_config(folder, block_size="DELETE", dflash_config="DELETE")
    loaded = DFlashDraftModel.from_pretrained(folder, config=tmp_path / "elsewhere")
    assert torch.equal(output(loaded), output(drafter))
