"""`DFlashConfig.for_target` for every family: what is derived, what is given, what is refused."""

import math

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_dflash import DFlashConfig
from hf_dflash.geometry_dflash import default_target_layer_ids
from pairs import scripted

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


def target_config(name, **overrides):
    return getattr(transformers, f"{name}Config")(**{**SIZES, **overrides})


def drafter_for(name, **overrides):
    return DFlashConfig.for_target(target_config(name, **overrides), mask_token_id=95)


def test_every_target_of_transformers_gets_a_drafter_or_is_told_why_not():
    """All decoders and image-text models, as their configs are without arguments."""
    names = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    refused, n_drafters = {}, 0
    for name in sorted(names):
        try:
            target = CONFIG_MAPPING[name]()
        except (StrictDataclassError, ValueError):  # its own defaults are not valid
            continue
        try:
            DFlashConfig.for_target(target, mask_token_id=0)
        except ValueError as error:
            refused[name] = str(error)
        else:
            n_drafters += 1
    for name, message in refused.items():
        assert message.startswith("`target_config` must be of a"), name
    attention_free = {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"}
    assert attention_free | {"bart", "whisper"} <= refused.keys()
    assert len(refused) < 30 < 200 < n_drafters


GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_hidden_layers": 6,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
}


def test_layers_of_two_kinds_give_the_global_ones_heads():
    drafter = drafter_for("Gemma4Text", **GEMMA4)
    assert (drafter.head_dim, drafter.num_key_value_heads) == (16, 1)
    assert drafter.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert drafter.input_embedding_scale == pytest.approx(math.sqrt(32))
    given = DFlashConfig.for_target(
        target_config("Gemma4Text", **GEMMA4),
        mask_token_id=95,
        head_dim=8,
        num_key_value_heads=4,
    )
    assert (given.head_dim, given.num_key_value_heads) == (8, 4)


def test_a_drafter_of_gemma4_decodes():
    torch.manual_seed(0)
    fields = {**GEMMA4, "tie_word_embeddings": False, "eos_token_id": None}
    config = target_config("Gemma4Text", **fields, initializer_range=0.3)
    target = transformers.Gemma4ForCausalLM(config).eval()
    derived = DFlashConfig.for_target(config, mask_token_id=95, num_draft_layers=2)
    names = ("head_dim", "num_key_value_heads", "rope_parameters", "input_embedding_scale")
    shape = {name: getattr(derived, name) for name in names}
    drafter, plain = scripted(
        target, torch.tensor([[3, 4, 5, 6, 7]]), 24, lambda cycle: cycle % 4, block_size=4, **shape
    )
    output = target.generate(
        plain[:, :5],
        max_new_tokens=24,
        do_sample=False,
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    assert len(set(plain[0, 5:].tolist())) > 5
    assert torch.equal(output.sequences, plain)
    assert output.statistics.n_accepted[:8] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_only_what_a_drafters_rotation_honours_is_taken():
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0}
    yarn["original_max_position_embeddings"] = 128
    extra = {"llama_4_scaling_beta": 0.1, "max_position_embeddings": 512, "type": "yarn"}
    assert drafter_for("Ministral3", rope_parameters=yarn | extra).rope_parameters == yarn


def test_longrope_is_taken_for_heads_of_the_targets_size_only():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 128,
    }
    target = target_config("Phi3", rope_parameters=rope)
    same = DFlashConfig.for_target(target, mask_token_id=95)
    assert same.rope_parameters["rope_type"] == "longrope"
    wider = DFlashConfig.for_target(target, mask_token_id=95, head_dim=16)
    assert wider.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


def test_heads_that_cannot_be_turned_in_pairs_are_widened():
    gpt2 = transformers.GPT2Config(vocab_size=96, n_embd=36, n_layer=6, n_head=4, n_positions=64)
    assert DFlashConfig.for_target(gpt2, mask_token_id=95).head_dim == 10


def test_targets_without_a_limit_of_positions_get_a_plain_one():
    xlnet = transformers.XLNetConfig(vocab_size=96, d_model=32, n_layer=6, n_head=4, d_inner=64)
    assert xlnet.max_position_embeddings == -1
    assert DFlashConfig.for_target(xlnet, mask_token_id=95).max_position_embeddings == 32768


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_draft_layers": 0}, "`num_draft_layers` must be an integer of at least 1, got 0"),
        ({"num_draft_layers": -1}, "`num_draft_layers` must be an integer of at least 1, got -1"),
        ({"num_draft_layers": "2"}, "`num_draft_layers` must be an integer .*, got '2'"),
        ({"num_draft_layers": True}, "`num_draft_layers` must be an integer .*, got True"),
        ({"num_attention_heads": 0}, "`num_attention_heads` must be an integer .*, got 0"),
        (
            {"num_taps": 3, "target_layer_ids": [1, 2]},
            r"`num_taps` \(3\) and `target_layer_ids` \(\[1, 2\], 2 taps\) must agree",
        ),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DFlashConfig.for_target(target_config("Qwen3"), mask_token_id=95, **arguments)


def test_numbers_that_agree_are_taken():
    drafter = DFlashConfig.for_target(
        target_config("Qwen3"), mask_token_id=95, num_taps=2, target_layer_ids=[1, 2]
    )
    assert drafter.target_layer_ids == [1, 2]
    silent = DFlashConfig.for_target(
        target_config("Qwen3"), mask_token_id=95, num_taps=2, target_layer_ids=None
    )
    assert silent.target_layer_ids == default_target_layer_ids(12, 2)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("Mamba", "num_attention_heads"),
        ("Mamba2", "num_attention_heads"),
        ("FalconMamba", "num_attention_heads"),
        ("Rwkv", "num_attention_heads"),
        ("xLSTM", "num_attention_heads"),
        ("Blt", "hidden_size"),
        ("PI0", "hidden_size"),
    ],
)
def test_targets_without_attention_are_refused_with_what_is_missing(name, missing):
    with pytest.raises(ValueError, match=f"{name}Config has no `{missing}`.*not supported"):
        DFlashConfig.for_target(getattr(transformers, f"{name}Config")(), mask_token_id=0)


@pytest.mark.parametrize(
    ("name", "options", "has_bias"),
    [
        ("Qwen2", {}, False),
        ("Llama", {"attention_bias": True}, True),
        ("Llama", {}, False),
    ],
)
def test_a_drafter_has_biases_where_its_target_has_them_on_all_projections(
    name: str, options: dict[str, bool], has_bias: bool
) -> None:
    """Qwen2 has them on queries, keys and values: no file format of a drafter tells such."""
    assert drafter_for(name, **options).attention_bias == has_bias
    target = getattr(transformers, f"{name}ForCausalLM")(target_config(name, **options))
    attention = target.model.layers[0].self_attn
    assert (attention.o_proj.bias is not None) == has_bias
    assert (attention.q_proj.bias is not None) == (has_bias or name == "Qwen2")
