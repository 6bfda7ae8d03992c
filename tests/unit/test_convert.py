"""Conversions between formats: there and back bit for bit, and what cannot be held is named."""

import json

import pytest
import torch
from transformers import MuseGlimmerAssistantModel

import published_folders as folders
from hf_dflash import DFlashDraftModel
from hf_dflash import convert as convert_module
from hf_dflash.convert import convert
from hf_dflash.drafter_files import read_drafter
from hf_dflash.wire_formats import FORMATS
from pairs import random_drafter, tiny_target

SLIDING, FULL = "sliding_attention", "full_attention"
BOTH_WAYS = {"layer_types": [SLIDING, FULL], "sliding_window": 16, "is_causal": False}
PLAIN = [name for name in FORMATS if name != "hf-dflash"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_target().save_pretrained(folder)
    return str(folder)


def saved(folder, dtype=torch.bfloat16, **overrides):
    """A drafter as this package saves it."""
    drafter = random_drafter(tiny_target(), num_target_layers=4, **overrides).to(dtype)
    drafter.save_pretrained(folder)
    return folder


def assert_same_drafter(one, other):
    assert folders.same_tensors(one, other)
    assert folders.config_of(one) == folders.config_of(other)


@pytest.mark.parametrize("to", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}},
        {"layer_types": [SLIDING] * 2, "sliding_window": 16, "is_causal": False},
    ],
    ids=["full", "yarn", "windows"],
)
def test_there_and_back_is_bit_for_bit(to, dtype, overrides, target, tmp_path):
    source = saved(tmp_path / "source", dtype, **overrides)
    before = folders.fingerprint(source)
    convert(source, tmp_path / "there", to=to, target=target)
    convert(tmp_path / "there", tmp_path / "back", to="hf-dflash", target=target)
    assert_same_drafter(source, tmp_path / "back")
    assert folders.fingerprint(source) == before
    assert (to == "native") == ("encoder.fc.weight" in folders.tensors_of(tmp_path / "there"))


@pytest.mark.parametrize("to", ["zlab", "flat", "speculators"])
def test_a_causal_window_beside_a_full_layer_goes_there_and_back(to, target, tmp_path):
    source = saved(tmp_path / "source", layer_types=[SLIDING, FULL], sliding_window=16)
    convert(source, tmp_path / "there", to=to, target=target)
    convert(tmp_path / "there", tmp_path / "back", to="hf-dflash", target=target)
    assert_same_drafter(source, tmp_path / "back")


def test_a_dflare_drafter_goes_to_angelslim_and_back(tmp_path):
    source = saved(tmp_path / "source", architecture="dflare")
    convert(source, tmp_path / "there", to="angelslim")
    assert folders.config_of(tmp_path / "there")["architectures"] == ["QwenDFlareDraftModel"]
    convert(tmp_path / "there", tmp_path / "back", to="hf-dflash")
    assert_same_drafter(source, tmp_path / "back")


@pytest.mark.parametrize("rope", ["both", "theta", "parameters"])
def test_either_spelling_of_the_rotary_embedding_comes_back(rope, tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
    source = saved(tmp_path / "source", rope_parameters=yarn)
    convert(source, tmp_path / "there", to="zlab", rope=rope)
    keys = folders.config_of(tmp_path / "there").keys()
    assert ({"rope_theta", "rope_scaling"} <= keys) == (rope != "parameters")
    assert ("rope_parameters" in keys) == (rope != "theta")
    convert(tmp_path / "there", tmp_path / "back", to="hf-dflash")
    assert_same_drafter(source, tmp_path / "back")


PUBLISHED = {
    "zlab": folders.zlab,
    "flat": folders.flat,
    "modelopt": folders.modelopt,
    "angelslim": folders.angelslim,
    "native": folders.native,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_others_publish_is_this_package_s_and_goes_back(name, tmp_path):
    """The other way around: a folder that our writers did not write."""
    source = PUBLISHED[name](tmp_path / "source")
    result = convert(source, tmp_path / "ours", to="hf-dflash")
    assert result.source_format == name
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "ours", dtype="auto")
    assert drafter.config.target_layer_ids == [0, 2]
    convert(tmp_path / "ours", tmp_path / "back", to=name)
    assert folders.same_tensors(source, tmp_path / "back")
    one, other = read_drafter(source), read_drafter(tmp_path / "back")
    one.config.transformers_version = other.config.transformers_version
    assert one.config == other.config
    convert(tmp_path / "back", tmp_path / "again", to=name)
    assert folders.config_of(tmp_path / "again") == folders.config_of(tmp_path / "back")


def test_what_training_left_in_a_config_is_named(tmp_path):
    source = folders.angelslim(tmp_path / "source")
    (source / "README.md").write_text("# how AngelSlim serves it")
    (source / "LICENSE").write_text("its own")
    result = convert(source, tmp_path / "ours", to="hf-dflash")
    keys = ("attention_backend", "loss_decay_gamma", "num_anchors")
    assert result.left_out == (*(f"config.json: {key}" for key in keys), "README.md")
    assert (tmp_path / "ours" / "LICENSE").read_text() == "its own"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder that looks like a repository of the Hub."""
    folder = folders.zlab(tmp_path / "source")

    def cached(_source, name, **_options):
        return str(folder / name) if (folder / name).is_file() else None

    for module in ("checkpoint_dflash", "drafter_files"):
        monkeypatch.setattr(f"hf_dflash.{module}.cached_file", cached)
    content = (folders.config_of(folder), {})
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", lambda *_, **__: content)
    return folder


def test_a_repository_s_licence_comes_along(repository, tmp_path):
    (repository / "LICENSE").write_text("its own")
    convert("org/drafter", tmp_path / "out", to="flat")
    assert (tmp_path / "out" / "LICENSE").read_text() == "its own"


def test_what_a_repository_adds_to_a_drafter_is_not_dropped(repository, tmp_path):
    (repository / "mask_embedding.pt").write_text("")
    with pytest.raises(ValueError, match=r"org/drafter has `mask_embedding\.pt`"):
        convert("org/drafter", tmp_path / "out", to="flat")


def test_a_drafter_with_code_of_its_own_leaves_it_behind(tmp_path):
    source = folders.zlab(tmp_path / "source", auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    result = convert(source, tmp_path / "ours", to="zlab")
    assert result.left_out == ("config.json: auto_map",)
    assert "auto_map" not in folders.config_of(tmp_path / "ours")


def test_speculators_ids_are_one_more_and_its_copies_of_the_target_come_back(target, tmp_path):
    source = folders.speculators(tmp_path / "source", tiny_target(), "org/target")
    result = convert(source, tmp_path / "ours", to="hf-dflash", target=target)
    assert result.source_format == "speculators"
    ours = DFlashDraftModel.from_pretrained(tmp_path / "ours", dtype="auto")
    assert ours.config.target_layer_ids == [0, 2]
    assert "lm_head.weight" not in folders.tensors_of(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to="speculators", target=target)
    assert folders.same_tensors(source, tmp_path / "back")
    written = folders.config_of(tmp_path / "back")
    original = folders.config_of(source)
    for key in original.keys() - {"transformer_layer_config", "target_hidden_size"}:
        assert written[key] == original[key], key
    decoder = written["transformer_layer_config"]
    assert original["transformer_layer_config"].items() <= decoder.items()


def test_a_reduced_vocabulary_comes_back_bit_for_bit(target, tmp_path):
    ids = [0, 3, 4, 17, 95]
    source = folders.speculators(tmp_path / "source", tiny_target(), "org/target", ids)
    options = {"target": target, "whole_vocabulary": True}
    convert(source, tmp_path / "ours", to="zlab", **options)
    record = json.loads((tmp_path / "ours" / "speculators.json").read_text())
    assert record["draft_vocabulary"] == ids
    convert(tmp_path / "ours", tmp_path / "second", to="flat")
    convert(tmp_path / "second", tmp_path / "back", to="speculators", target=target)
    assert folders.same_tensors(source, tmp_path / "back")
    assert folders.config_of(tmp_path / "back")["draft_vocab_size"] == 5


@pytest.mark.parametrize("has_head", [True, False])
def test_a_reduced_vocabulary_of_every_token_comes_back_bit_for_bit(has_head, target, tmp_path):
    source = folders.speculators(tmp_path / "source", tiny_target(), "org/target", list(range(96)))
    if not has_head:  # as speculators 0.9.0 saves drafters of the whole vocabulary
        folders.edit_tensors(source, lambda t: [t.pop(f"{n}.weight") for n in COPIES])
    convert(source, tmp_path / "ours", to="zlab", target=target)  # nothing is given up
    convert(tmp_path / "ours", tmp_path / "second", to="hf-dflash")
    convert(tmp_path / "second", tmp_path / "back", to="speculators", target=target)
    assert {"d2t", "t2d"} <= folders.tensors_of(tmp_path / "back").keys()
    assert folders.same_tensors(source, tmp_path / "back")
    for key in ("draft_vocab_size", "speculators_config", "aux_hidden_state_layer_ids"):
        assert folders.config_of(tmp_path / "back")[key] == folders.config_of(source)[key]


COPIES = ("embed_tokens", "lm_head")


def test_every_token_can_be_named_as_the_draft_vocabulary(target, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(list(range(96))))
    source = saved(tmp_path / "source")
    convert(source, tmp_path / "there", to="speculators", target=target, draft_vocabulary=ids)
    assert folders.tensors_of(tmp_path / "there")["t2d"].all()
    convert(tmp_path / "there", tmp_path / "back", to="hf-dflash", target=target)
    assert_same_drafter(source, tmp_path / "back")


def test_a_vocabulary_can_be_reduced(target, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text("[1, 2, 9]")
    source = saved(tmp_path / "source")
    convert(source, tmp_path / "out", to="speculators", target=target, draft_vocabulary=ids)
    tensors = folders.tensors_of(tmp_path / "out")
    assert tensors["d2t"].tolist() == [1, 1, 7]
    assert tensors["t2d"].nonzero().flatten().tolist() == [1, 2, 9]
    own = tiny_target().get_output_embeddings().weight[[1, 2, 9]].bfloat16()
    assert torch.equal(tensors["lm_head.weight"], own)


def test_speculators_to_speculators_needs_no_target(tmp_path):
    source = folders.speculators(tmp_path / "source", tiny_target(), "org/target", [1, 2])
    convert(source, tmp_path / "out", to="speculators")
    assert folders.same_tensors(source, tmp_path / "out")


def test_full_layers_do_not_say_that_windows_are_causal(target, tmp_path):
    # vLLM takes "false" for "every layer is causal", the full ones too.
    convert(saved(tmp_path / "source"), tmp_path / "out", to="speculators", target=target)
    assert "sliding_window_non_causal" not in folders.config_of(tmp_path / "out")


def test_the_drafting_policy_goes_along(tmp_path):
    drafter = random_drafter(tiny_target())
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "there", to="native")
    convert(tmp_path / "there", tmp_path / "back", to="hf-dflash")
    back = DFlashDraftModel.from_pretrained(tmp_path / "back")
    assert back.generation_config.num_assistant_tokens == 3


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    source = saved(tmp_path / "source")

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "publish", fail)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", to="native")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_sharded_weights_are_read_whole(tmp_path):
    drafter = random_drafter(tiny_target())
    drafter.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    assert len(list((tmp_path / "source").glob("model-*.safetensors"))) > 1
    result = convert(tmp_path / "source", tmp_path / "out", to="zlab")
    assert result.left_out == ()
    assert folders.tensors_of(tmp_path / "out").keys() == drafter.state_dict().keys()


def test_transformers_loads_the_native_form_completely(tmp_path):
    source = saved(tmp_path / "source", torch.float32, **BOTH_WAYS)
    convert(source, tmp_path / "out", to="native")
    _, info = MuseGlimmerAssistantModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
