"""Drafters' configs that are refused: values out of range or of the wrong kind, other formats."""

import pytest

from drafter_configs import MIXED, SIZES, TIES, config, zlab
from hf_dflash import DFlashConfig
from hf_dflash.values_dflash import plain_field_errors


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids"])
def test_a_drafter_without_mask_token_or_taps_is_refused(key, tmp_path):
    incomplete = DFlashConfig(**SIZES, **{k: v for k, v in TIES.items() if k != key})
    with pytest.raises(ValueError, match=f"`{key}` is missing.*DFlashConfig"):
        incomplete.validate_drafter()
    with pytest.raises(ValueError, match=f"`{key}` is missing"):
        incomplete.save_pretrained(tmp_path)
    raw = zlab()
    del raw["dflash_config"][key]
    with pytest.raises(ValueError, match=f"`{key}` is missing"):
        DFlashConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_token_id": 96}, r"`mask_token_id` must be in \[0, 95\], got 96.*`vocab_size`"),
        ({"mask_token_id": -1}, r"`mask_token_id` must be in \[0, 95\], got -1"),
        ({"block_size": 1}, "`block_size` must be at least 2, got 1"),
        ({"num_target_layers": 0}, "`num_target_layers` must be at least 1"),
        ({"target_layer_ids": [1, 1]}, r"distinct layers of the target \(4 layers, 0..3\)"),
        ({"target_layer_ids": [0, 4]}, r"`target_layer_ids` must be distinct.*got \[0, 4\]"),
        ({"target_layer_ids": [-1, 2]}, "`target_layer_ids` must be distinct.*Negative ids"),
        ({"target_layer_ids": []}, "`target_layer_ids` must be distinct"),
        (
            {"target_layer_ids": [-1], "num_target_layers": None},
            r"distinct layers of the target \(0-based\)",
        ),
        ({"layer_types": ["full_attention"]}, "`layer_types` must have one entry .* 2 draft"),
        ({"layer_types": ["conv", "full_attention"]}, "`layer_types` must be among"),
        ({"layer_types": ["sliding_attention"] * 2}, "`sliding_window` is missing"),
        ({**MIXED, "sliding_window": 0}, "`sliding_window` must be at least 1"),
        ({"num_key_value_heads": 3}, "`num_attention_heads` .* multiple of `num_key_value_heads`"),
        ({"hidden_size": 0}, "`hidden_size` must be at least 1"),
        ({"hidden_act": "nope"}, "`hidden_act` must be an activation"),
        ({"architecture": "other"}, '`architecture` must be "dflash" or "dflare"'),
        (
            {"architecture": "dflare", "target_hidden_size": 48},
            "`target_hidden_size` of a DFlare drafter must equal `hidden_size`",
        ),
        ({"input_embedding_scale": 0.0}, "`input_embedding_scale` must be positive"),
        ({"output_multiplier": float("inf")}, "`output_multiplier` must be positive and finite"),
        ({"final_logit_softcapping": -1.0}, "`final_logit_softcapping` must be positive"),
        ({"foo": 1}, r"Unknown keys \['foo'\] in the drafter's config"),
        ({"dflash_config": {"foo": 1}}, r"Unknown keys \['foo'\] in dflash_config"),
        ({"dflash_config": {"hidden_size": 8}}, r"Unknown keys \['hidden_size'\] in dflash_config"),
        ({"num_assistant_tokens": 3}, "`num_assistant_tokens` belongs in .*generation_config"),
        ({"temperature": 0.5}, "`temperature` belongs in .*generation_config"),
        ({"draft_vocab_size": 32}, r"`draft_vocab_size` must equal `vocab_size` \(96\), got 32"),
        ({"dflash_config": {"attention_sink_bias": True}}, "`attention_sink_bias` = True"),
        ({"dflash_config": {"attention_value_scale": 0.5}}, "`attention_value_scale` = 0.5"),
        ({"dflash_config": {"attention_mode": "mla"}}, "`attention_mode` = 'mla'"),
        ({"dflash_config": {"projector_type": "other"}}, "`projector_type` = 'other'"),
        ({"sample_from_anchor": True}, "`sample_from_anchor` = True"),
        ({"use_gemma_norm": True}, "`use_gemma_norm` = True"),
        ({**MIXED, "dflash_config": {"use_swa": False}}, "`dflash_config.use_swa` is false"),
        ({"is_causal": True, "dflash_config": {"causal": False}}, "`is_causal` .* must agree"),
        ({"model_type": "llama"}, "`model_type` of a DFlash drafter is \"qwen3\".*'llama'"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


WRONG_KINDS = ("1,8", 1.5, [1], {"a": 1}, True)
WIDTHS = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@pytest.mark.parametrize("value", WRONG_KINDS, ids=str)
@pytest.mark.parametrize("key", [*WIDTHS, "block_size", "mask_token_id", "num_hidden_layers"])
def test_a_size_of_the_wrong_kind_is_named(key, value):
    with pytest.raises(TypeError, match=f"`{key}` (must be an integer|is of the wrong kind: )"):
        DFlashConfig.from_dict({**zlab(), "dflash_config": TIES, key: value} | _nested(key, value))


def _nested(key, value):
    return {"dflash_config": {**TIES, key: value}} if key in ("block_size", *TIES) else {}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rms_norm_eps", "1e-6", "is of the wrong kind: expected float, got str .*config.json"),
        ("use_cache", "no", "is of the wrong kind: expected bool"),
        ("hidden_act", [1], "is of the wrong kind: expected str"),
        ("architectures", 3, "must be a list of names, got 3"),
        ("architectures", [1], r"must be a list of names, got \[1\]"),
        ("layer_types", 3, "must be a list of names, got 3"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(key, value, message):
    with pytest.raises(TypeError, match=f"`{key}` {message}"):
        DFlashConfig.from_dict({**zlab(), key: value})


@pytest.mark.parametrize("value", ["1,8", "float99", [1], "nn"])
def test_a_dtype_that_torch_does_not_have_is_refused(value):
    with pytest.raises(ValueError, match=r"`(torch_)?dtype` must be a dtype of torch such as"):
        DFlashConfig.from_dict({**zlab(), "dtype": value, "torch_dtype": value})


def test_an_error_that_is_not_of_a_field_stays_itself():
    with pytest.raises(RuntimeError, match="else"), plain_field_errors():
        raise RuntimeError("else")


def test_an_odd_head_is_refused():
    with pytest.raises(ValueError, match="`head_dim` must be even"):
        config(head_dim=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": "8"}, "`block_size` must be an integer"),
        ({"mask_token_id": True}, "`mask_token_id` must be an integer"),
        ({"num_hidden_layers": "2"}, "`num_hidden_layers` must be an integer"),
        ({"target_layer_ids": 3}, "`target_layer_ids` must be a list of integers"),
        ({"target_layer_ids": ["1"]}, "`target_layer_ids` must be a list of integers"),
        ({"is_causal": "yes"}, "`is_causal` must be true, false or null"),
        ({"output_multiplier": "2"}, "`output_multiplier` must be a number"),
        ({"dflash_config": 3}, "`dflash_config` must be an object"),
        ({"rope_scaling": 3}, "`rope_scaling` must be an object"),
    ],
    ids=str,
)
def test_values_of_the_wrong_kind_are_refused(fields, message):
    with pytest.raises(TypeError, match=message):
        config(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "`rope_theta` .* must agree"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "`rope_scaling.factor` .* must agree",
        ),
        (
            {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}},
            "`rope_scaling` has `type` 'yarn' and `rope_type` 'linear'",
        ),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` must be 1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "`partial_rotary_factor` must be"),
        ({"rope_parameters": {"rope_type": "axial"}}, "`rope_parameters.rope_type` must be one"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"of type 'linear' need \['factor'\]"),
        (
            {"rope_parameters": {"rope_type": "default", "factor": 2.0}},
            r"of type 'default' cannot honour \['factor'\]",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"cannot honour \['full_attention'\]",
        ),
    ],
    ids=str,
)
def test_rotary_embeddings_that_would_not_be_honoured_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"speculators_model_type": "dflash"},
            "speculators checkpoint.*hf-dflash convert PATH OUT",
        ),
        ({"architectures": ["DSparkDraftModel"]}, "DSpark / DeepSpec drafter.*Use a plain"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}, "DSpark / DeepSpec"),
        ({"dflash_config": {"projector_type": "dspark"}}, "DSpark / DeepSpec"),
        ({"dflash_config": {"projector_type": "domino"}}, "Domino drafter"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2 drafter"),
        ({"dflash_config": {"conv_kernel_size": 2}}, "DFlash 2 drafter"),
        ({"dflash_config": {"enable_hidden_correction": True}}, "DFly drafter"),
        ({"architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna"}, "Laguna drafter"),
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            r"`architectures` must be one of .*Qwen3ForCausalLM.*AutoModelForCausalLM",
        ),
    ],
    ids=str,
)
def test_other_formats_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        DFlashConfig.from_dict(zlab(**fields))


def test_overrides_of_from_pretrained_are_checked(tmp_path):
    config().save_pretrained(tmp_path)
    assert DFlashConfig.from_pretrained(tmp_path, block_size=4).block_size == 4
    with pytest.raises(ValueError, match="`block_size` must be at least 2"):
        DFlashConfig.from_pretrained(tmp_path, block_size=1)
    _, unused = DFlashConfig.from_pretrained(tmp_path, return_unused_kwargs=True, nope=1)
    assert unused == {"nope": 1}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mask_token_id", None, "`mask_token_id` is missing"),
        ("mask_token_id", 96, r"`mask_token_id` must be in \[0, 95\], got 96"),
        ("target_layer_ids", None, "`target_layer_ids` is missing"),
        ("target_layer_ids", [2, 2], r"`target_layer_ids` must be distinct.*got \[2, 2\]"),
        ("target_layer_ids", [0, 4], r"`target_layer_ids` must be distinct.*got \[0, 4\]"),
        ("block_size", 1, "`block_size` must be at least 2, got 1"),
        ("num_hidden_layers", 0, "`num_hidden_layers` must be at least 1, got 0"),
        ("num_hidden_layers", 3, "`layer_types` must have one entry .* 3 draft layers, got 2"),
        ("layer_types", ["sliding_attention"] * 2, "`sliding_window` is missing"),
        ("architecture", "other", '`architecture` must be "dflash" or "dflare"'),
        ("output_multiplier", 0.0, "`output_multiplier` must be positive"),
    ],
    ids=str,
)
def test_a_config_that_was_changed_is_checked_again(field, value, message, tmp_path):
    changed = config()
    changed.validate_drafter()
    setattr(changed, field, value)
    with pytest.raises(ValueError, match=message):
        changed.validate_drafter()
    with pytest.raises(ValueError, match=message):
        changed.save_pretrained(tmp_path)


def test_an_architecture_that_is_no_word_is_refused():
    with pytest.raises(ValueError, match=r"`architecture` must be .* got \['dflash'\]"):
        config(architecture=["dflash"])
