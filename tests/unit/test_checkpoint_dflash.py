"""Which format a checkpoint is in, whether its files are whole, and the drafting policy."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from hf_dflash.checkpoint_dflash import (
    check_loading_info,
    read_generation_config,
    save_generation_config,
    tensor_headers_of,
    validate_generation_config,
)
from hf_dflash.formats_dflash import detect_format

PLAIN = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
BODY = ["fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.mlp.gate_proj.weight"]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        ("layers.0.self_attn.q_proj.weight", "dflash"),
        ("layer_fusion_weights", "dflare"),
        ("encoder.fc.weight", "native"),
        ("prefix_gru.weight_ih_l0", "domino"),
        ("markov_head.markov_w1.weight", "dspark"),
        ("markov_w1", "dspark"),
        ("confidence_head.proj.weight", "dspark"),
        ("candidate_selector.hidden_projection.weight", "dflash2"),
        ("layers.0.attention_conv.base_kernel", "dflash2"),
        ("hidden_correction.gate_proj.weight", "dfly"),
        ("layers.0.self_attn.g_proj.weight", "laguna"),
        ("aux_hidden_norms.0.weight", "laguna"),
    ],
)
def test_tensor_names_say_more_than_the_class_name(tensor, expected):
    assert detect_format(PLAIN, [*BODY, tensor]) == expected


def test_dfly_is_not_taken_for_dflare():
    assert detect_format(PLAIN, ["layer_fusion.0.weight", "hidden_correction.x"]) == "dfly"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PLAIN, "dflash"),
        ({}, "dflash"),
        ({**PLAIN, "speculators_model_type": "dspark"}, "speculators"),
        ({"model_type": "muse_glimmer_assistant"}, "native"),
        ({"architectures": ["MuseGlimmerAssistantModel"]}, "native"),
        ({"architectures": ["QwenDFlareDraftModel"]}, "dflare"),
        ({**PLAIN, "dflare_config": {}}, "dflare"),
        ({**PLAIN, "dflash_config": {"projector_type": "domino"}}, "domino"),
    ],
    ids=str,
)
def test_the_config_says_the_rest(config, expected):
    assert detect_format(config) == expected


# ------------------------------------------------------------------ files


def test_tensor_names_are_read_from_the_header(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"b": torch.zeros(2, 3), "a": torch.zeros(1)}, path, metadata={"format": "pt"})
    assert sorted(tensor_headers_of(path)) == ["a", "b"]


@pytest.mark.parametrize("keep", [0, 4, 8, 30, -1])
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(64)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"truncated or is not a safetensors file.*again"):
        tensor_headers_of(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x05\0\0\0\0\0\0\0[1,2]")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        tensor_headers_of(path)


def test_a_git_lfs_pointer_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match=r"Git LFS pointer.*git lfs pull"):
        tensor_headers_of(path)


def test_the_loading_report_becomes_one_error():
    clean = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
    check_loading_info(clean, "folder")
    report = {
        "missing_keys": {"norm.weight", "fc.weight"},
        "unexpected_keys": {"lm_head.weight"},
        "mismatched_keys": {("hidden_norm.weight", (3,), (4,))},
        "error_msgs": ["boom"],
    }
    expected = (
        r"tensors of folder must be exactly.* 2 missing: fc.weight, norm.weight; 1 unexpected: "
        r"lm_head.weight; 1 wrongly shaped: hidden_norm.weight \(3,\) instead of \(4,\); "
        r"1 unreadable: boom. Check"
    )
    with pytest.raises(ValueError, match=expected):
        check_loading_info(report, "folder")


def test_a_long_report_is_cut():
    many = {f"x.{i:02}" for i in range(20)}
    report = {"missing_keys": many, "unexpected_keys": set(), "mismatched_keys": set()}
    with pytest.raises(ValueError, match=r"20 missing: x.00, .*x.11 and 8 more\."):
        check_loading_info(report, "folder")


# ------------------------------------------------------------------ drafting policy


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"num_assistant_tokens": 7},
        {"num_assistant_tokens": 1, "assistant_confidence_threshold": 0.5},
        {"assistant_confidence_threshold": 0.0, "num_assistant_tokens_schedule": "constant"},
        {"temperature": 0.0},
        {"temperature": 0.7, "draft_tree_nodes": 0},
    ],
    ids=str,
)
def test_a_policy_is_saved_and_read_back(policy, tmp_path):
    config = GenerationConfig()
    config.update(**policy)
    for name, value in policy.items():
        setattr(config, name, value)
    validate_generation_config(config, block_size=8)
    save_generation_config(config, tmp_path)
    read = read_generation_config(tmp_path, {})
    assert {name: getattr(read, name) for name in policy} == policy
    assert read.to_diff_dict() == config.to_diff_dict()


def test_no_policy_is_an_empty_one(tmp_path):
    assert read_generation_config(tmp_path, {}).num_assistant_tokens is None
    assert read_generation_config(None, {}).num_assistant_tokens is None


def test_a_policy_given_to_from_pretrained_wins(tmp_path):
    save_generation_config(GenerationConfig(num_assistant_tokens=3), tmp_path)
    given = GenerationConfig(num_assistant_tokens=5)
    assert read_generation_config(tmp_path, {"generation_config": given}) is given


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"generation_config\.json is not valid JSON \(.*\)\. Correct it, or get"),
        (b"", r"generation_config\.json is not valid JSON"),
        (b"\xff\xfe\xfa", r"generation_config\.json is not valid JSON"),
        (b"[]", r"generation_config\.json must hold a JSON object, got \[\]\. Get the file anew"),
        (b"null", r"generation_config\.json must hold a JSON object, got None"),
        (b'{"max_new_tokens": -1}', r"generation_config\.json is no generation config: .*delete"),
    ],
    ids=str,
)
def test_a_bad_policy_file_is_named(content, message, tmp_path):
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_generation_config(tmp_path, {})


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"num_assistant_tokens": 8}, r"`num_assistant_tokens` must be in 1..7 .*block size 8"),
        ({"num_assistant_tokens": 0}, r"`num_assistant_tokens` must be in 1..7"),
        ({"num_assistant_tokens": 2.5}, r"`num_assistant_tokens` must be in 1..7"),
        ({"assistant_confidence_threshold": 1.5}, "`assistant_confidence_threshold` must be in"),
        ({"assistant_confidence_threshold": -0.1}, "`assistant_confidence_threshold` must be in"),
        ({"temperature": -1.0}, "`temperature` of the drafter must be 0"),
        ({"top_p": 0.9}, r"Options \['top_p'\] .*Pass them to generate"),
        ({"nonsense": 1}, r"Options \['nonsense'\] of the drafter's `generation_config`"),
    ],
    ids=str,
)
def test_unknown_and_impossible_policies_are_refused(policy, message):
    config = GenerationConfig()
    for name, value in policy.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        validate_generation_config(config, block_size=8)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"num_assistant_tokens_schedule": "heuristic"}, r'`num_assistant_tokens_sch.*"constant"'),
        ({"draft_tree_nodes": 8}, r"`draft_tree_nodes` must be 0 \(a chain\), got 8"),
    ],
    ids=str,
)
def test_policies_not_there_yet_are_refused(policy, message):
    config = GenerationConfig()
    for name, value in policy.items():
        setattr(config, name, value)
    with pytest.raises(NotImplementedError, match=message):
        validate_generation_config(config, block_size=8)


def test_what_describes_the_tokenizer_is_no_policy():
    config = GenerationConfig(eos_token_id=[1, 2], pad_token_id=0, bos_token_id=1)
    validate_generation_config(config, block_size=8)
    assert json.loads(config.to_json_string())["eos_token_id"] == [1, 2]
