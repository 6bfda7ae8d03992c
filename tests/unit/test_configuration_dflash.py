"""Every spelling of a drafter's config that is read, and the one that is written."""

import copy
import json

import pytest
from transformers import AutoConfig, MuseGlimmerAssistantConfig, Qwen3Config

from drafter_configs import MIXED, SIZES, TIES, config, zlab
from hf_dflash import DFlashConfig

YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


# ------------------------------------------------------------------ reading


def test_the_reference_format_is_read_into_flat_attributes():
    read = DFlashConfig.from_dict(zlab())
    assert (read.architecture, read.block_size, read.mask_token_id) == ("dflash", 8, 95)
    assert (read.target_layer_ids, read.num_target_layers) == ([0, 2], 4)
    assert read.target_hidden_size == read.hidden_size == 32
    assert (read.is_causal, read.sliding_window, read.tie_word_embeddings) == (None, None, False)
    assert read.rope_parameters == {"rope_theta": 1e6, "rope_type": "default"}
    assert (read.input_embedding_scale, read.output_multiplier) == (1.0, 1.0)
    assert read.final_logit_softcapping is None


def test_the_flat_format_is_read():
    """1.B: every drafter key at the top level, taps in any order and with any gaps."""
    flat = {**SIZES, "architectures": ["DFlashDraftModel"], "block_size": 8, "mask_token_id": 7}
    read = DFlashConfig.from_dict({**flat, "target_layer_ids": [24, 30, 31, 5]})
    assert (read.block_size, read.mask_token_id) == (8, 7)
    assert read.target_layer_ids == [24, 30, 31, 5]
    assert read.num_target_layers is None


@pytest.mark.parametrize(
    ("key", "outer", "inner"),
    [
        ("block_size", 4, 8),
        ("mask_token_id", 1, 2),
        ("target_layer_ids", [1], [0, 3]),
        ("input_embedding_scale", 2.0, 3.0),
        ("output_multiplier", 2.0, 3.0),
        ("final_logit_softcapping", 20.0, 30.0),
        ("num_target_layers", 6, 5),
        ("is_causal", True, False),
    ],
)
def test_the_nested_value_wins(key, outer, inner):
    read = DFlashConfig(**zlab(**{key: outer, "dflash_config": {key: inner}}))
    assert getattr(read, key) == inner
    nested = {k: v for k, v in zlab()["dflash_config"].items() if k != key}
    assert getattr(DFlashConfig(**{**zlab(), "dflash_config": nested, key: outer}), key) == outer


def test_a_null_nested_value_does_not_hide_the_outer_one():
    read = DFlashConfig(**zlab(block_size=4, dflash_config={"block_size": None}))
    assert read.block_size == 4


def test_block_size_is_the_fields_default_where_a_file_is_silent():
    silent = zlab()
    del silent["block_size"]
    assert DFlashConfig(**silent).block_size == 16


@pytest.mark.parametrize("name", ["QwenDFlashDraftModel", "Qwen3DFlashDraftModel"])
def test_other_names_of_dflash_are_read(name):
    residue = {"num_anchors": 512, "loss_decay_gamma": 7.0, "attention_backend": "flex"}
    read = DFlashConfig(**zlab(architectures=[name], dflash_config=residue, **residue))
    assert read.architecture == "dflash"
    assert "num_anchors" not in json.dumps(read.to_dict())
    assert read.to_dict()["architectures"] == ["DFlashDraftModel"]


@pytest.mark.parametrize("name", ["QwenDFlareDraftModel", "DFlareDraftModel"])
def test_dflare_is_read(name):
    assert DFlashConfig(**zlab(architectures=[name])).architecture == "dflare"


def test_the_communitys_dflare_section_is_read():
    raw = zlab()
    raw["dflare_config"] = raw.pop("dflash_config")
    read = DFlashConfig(**raw)
    assert (read.architecture, read.mask_token_id) == ("dflare", 95)


def test_transformers_own_block_drafter_is_read():
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    native = MuseGlimmerAssistantConfig(
        **sizes,
        architectures=["MuseGlimmerAssistantModel"],
        block_size=8,
        mask_token_id=201818,
        target_layer_ids=[1, 3],
        sliding_window=16,
    )
    read = DFlashConfig.from_dict(json.loads(native.to_json_string()))
    assert (read.architecture, read.block_size, read.mask_token_id) == ("dflash", 8, 201818)
    assert read.layer_types == ["sliding_attention"] * 2
    assert [read.layer_window(0), read.layer_is_causal(0)] == [16, False]
    assert read.rope_parameters["rope_theta"] == 500000.0
    assert read.vocab_size == 202048


def test_what_the_native_class_takes_for_granted_is_filled_in():
    silent = {**SIZES, **TIES, "model_type": "muse_glimmer_assistant", "sliding_window": 16}
    read = DFlashConfig(**silent)
    assert read.layer_types == ["sliding_attention"] * 2
    assert (read.is_causal, read.rope_parameters["rope_theta"]) == (False, 500000.0)
    told = DFlashConfig(**silent, is_causal=True, rope_theta=1e4)
    assert (told.is_causal, told.rope_parameters["rope_theta"]) == (True, 1e4)


def test_modelopts_window_flags_are_read():
    flags = {"use_swa": True, "swa_window_size": 16, "causal": False}
    read = DFlashConfig(**zlab(sliding_window=4, dflash_config=flags))
    assert read.layer_types == ["sliding_attention"] * 2
    assert (read.sliding_window, read.use_sliding_window, read.is_causal) == (16, True, False)


def test_modelopts_window_flags_keep_a_list_that_names_sliding_layers():
    read = DFlashConfig(**zlab(**MIXED, dflash_config={"use_swa": True, "swa_window_size": 5}))
    assert read.layer_types == MIXED["layer_types"]
    assert read.sliding_window == 5


def test_a_window_survives_although_use_sliding_window_is_false():
    read = DFlashConfig(**zlab(**MIXED, use_sliding_window=False))
    assert (read.sliding_window, read.use_sliding_window) == (16, True)
    assert [read.layer_window(i) for i in range(2)] == [16, None]


def test_a_window_that_no_layer_uses_is_dropped():
    read = DFlashConfig(**zlab(sliding_window=4096, use_sliding_window=False))
    assert (read.sliding_window, read.layer_window(0)) == (None, None)


def test_files_without_layer_types_follow_qwen3s_rule():
    raw = zlab(use_sliding_window=True, sliding_window=16, max_window_layers=1)
    del raw["layer_types"]
    assert DFlashConfig(**raw).layer_types == ["full_attention", "sliding_attention"]
    assert (
        DFlashConfig(**{**raw, "use_sliding_window": False}).layer_types == ["full_attention"] * 2
    )


@pytest.mark.parametrize(
    ("is_causal", "expected"), [(None, [True, False]), (True, [True, True]), (False, [False] * 2)]
)
def test_causality_rule(is_causal, expected):
    read = config(**MIXED, is_causal=is_causal)
    assert [read.layer_is_causal(i) for i in range(2)] == expected


def test_causality_is_read_from_either_place():
    assert DFlashConfig(**zlab(is_causal=False)).is_causal is False
    assert DFlashConfig(**zlab(dflash_config={"causal": True})).is_causal is True
    assert DFlashConfig(**zlab(is_causal=True, dflash_config={"causal": True})).is_causal is True


ROPE_CASES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", **YARN},
    {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", **YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    {"rope_type": "yarn", **YARN, "attention_factor": 1.2},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    {
        "rope_type": "longrope",
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "factor": 4.0,
    },
]


@pytest.mark.parametrize("rope", ROPE_CASES, ids=lambda rope: rope["rope_type"])
def test_both_rope_spellings_mean_the_same(rope):
    expected = {**rope, "rope_theta": 5e5}
    new = config(rope_parameters=dict(expected))
    legacy = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    old = config(rope_theta=5e5, rope_scaling=legacy)
    both = config(rope_theta=5e5, rope_scaling=dict(rope), rope_parameters=dict(expected))
    assert new.rope_parameters == old.rope_parameters == both.rope_parameters
    assert expected.items() <= new.rope_parameters.items()


def test_yarn_without_its_original_length_takes_the_drafters():
    read = config(rope_theta=1e4, rope_scaling={"type": "yarn", "factor": 4.0})
    assert read.rope_parameters["original_max_position_embeddings"] == 512
    assert DFlashConfig(**read.to_dict()) == read


def test_multi_axis_sections_say_nothing_about_one_axis():
    sections = {"rope_type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 1e7}
    read = config(rope_parameters=sections, partial_rotary_factor=1.0)
    assert read.rope_parameters == {"rope_type": "default", "rope_theta": 1e7}


def test_reading_leaves_its_argument_alone():
    raw = zlab(rope_scaling={"type": "yarn", **YARN})
    before = copy.deepcopy(raw)
    DFlashConfig.from_dict(raw)
    DFlashConfig(**raw)
    assert raw == before


# ------------------------------------------------------------------ writing


def test_the_portable_recipe_is_written_exactly():
    written = json.loads(config(dtype="bfloat16", rope_theta=1e6).to_json_string())
    del written["transformers_version"]
    assert written == {
        **SIZES,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 16,
        "dflash_config": {"block_size": 16, "mask_token_id": 95, "target_layer_ids": [0, 2]},
        "num_target_layers": 4,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def test_only_what_is_not_the_default_is_written_for_engines_that_react_to_presence():
    odd = config(
        **MIXED,
        is_causal=False,
        target_hidden_size=48,
        input_embedding_scale=5.5,
        output_multiplier=0.25,
        final_logit_softcapping=30.0,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e5, **YARN},
    )
    written = odd.to_diff_dict()
    assert written["is_causal"] is written["dflash_config"]["causal"] is False
    for key in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
        assert written[key] == written["dflash_config"][key] == getattr(odd, key)
    assert written["target_hidden_size"] == 48
    assert (written["sliding_window"], written["use_sliding_window"]) == (16, True)
    assert written["rope_scaling"] == {"rope_type": "yarn", **YARN}
    assert written["rope_parameters"] == {"rope_type": "yarn", "rope_theta": 1e5, **YARN}


def test_dflare_is_written_under_a_name_no_engine_takes_for_dflash():
    assert config(architecture="dflare").to_dict()["architectures"] == ["QwenDFlareDraftModel"]


ROUND_TRIPS = [
    {},
    {"architecture": "dflare"},
    {"block_size": 7, "target_layer_ids": [3, 0], "num_target_layers": None},
    MIXED,
    {**MIXED, "is_causal": False},
    {"is_causal": True},
    {"attention_bias": True, "target_hidden_size": 48, "dtype": "bfloat16"},
    {"input_embedding_scale": 5.5, "output_multiplier": 0.2, "final_logit_softcapping": 30.0},
    *({"rope_parameters": {**rope, "rope_theta": 5e5}} for rope in ROPE_CASES),
]


@pytest.mark.parametrize("fields", ROUND_TRIPS, ids=str)
def test_what_is_written_reads_back_equal(fields, tmp_path):
    original = config(**copy.deepcopy(fields))
    assert DFlashConfig(**original.to_dict()) == original
    original.save_pretrained(tmp_path)
    read = DFlashConfig.from_pretrained(tmp_path)
    assert read == original
    for key in ("architecture", "is_causal", "layer_types", "rope_parameters", "sliding_window"):
        assert getattr(read, key) == getattr(original, key)
    assert {p.name for p in tmp_path.iterdir()} >= {"config.json", "configuration_dflash.py"}
    remote = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(remote).__name__ == "DFlashConfig"
    assert type(remote) is not DFlashConfig
    assert remote.to_diff_dict() == read.to_diff_dict()


def test_configs_differ_where_their_files_would():
    assert config() != config(block_size=8)
    assert config() != Qwen3Config(**SIZES)
    assert config() == config()


def test_an_auto_map_to_other_code_is_not_written_back():
    read = DFlashConfig(**zlab())
    assert read.auto_map == {"AutoModel": "dflash.DFlashDraftModel"}
    assert "auto_map" not in read.to_dict()
    own = {"AutoModel": "org/repo--modeling_dflash.DFlashDraftModel"}
    assert DFlashConfig(**zlab(auto_map=own)).to_dict()["auto_map"] == {
        "AutoModel": "modeling_dflash.DFlashDraftModel"
    }


def test_the_nested_section_is_an_attribute_too():
    """vLLM reads `dflash_config` off the config object that trust_remote_code gives it."""
    assert config().dflash_config == config().to_dict()["dflash_config"]


def test_the_config_without_arguments_can_be_built_shown_and_copied():
    empty = DFlashConfig()
    assert "DFlashConfig" in repr(empty)
    assert copy.deepcopy(empty) == empty
    assert empty.mask_token_id is empty.target_layer_ids is None
