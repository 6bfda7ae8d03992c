"""New drafters: their shape follows from their target's config."""

import math

import pytest
import transformers
from transformers import PreTrainedTokenizerFast

from hf_dflash import DFlashConfig
from hf_dflash.geometry_dflash import choose_mask_token_id, default_target_layer_ids

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


# ------------------------------------------------------------------ taps


@pytest.mark.parametrize(
    ("n_layers", "n_taps", "expected"),
    [
        (36, 1, [18]),
        (36, 5, [1, 9, 17, 25, 33]),
        (32, 5, [1, 8, 15, 22, 29]),
        (24, 5, [1, 6, 11, 16, 21]),
        (40, 8, [1, 6, 11, 16, 22, 27, 32, 37]),
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 7, [1, 6, 12, 17, 22, 28, 33]),
        (36, 9, [1, 5, 9, 13, 17, 21, 25, 29, 33]),
        (30, 5, [1, 8, 14, 20, 27]),
    ],
)
def test_taps_are_those_published(n_layers, n_taps, expected):
    assert default_target_layer_ids(n_layers, n_taps) == expected


def test_taps_are_distinct_ascending_layers_for_every_size():
    for n_layers in range(1, 70):
        for n_taps in range(1, n_layers + 1):
            ids = default_target_layer_ids(n_layers, n_taps)
            assert len(ids) == n_taps
            assert ids == sorted(set(ids))
            assert 0 <= ids[0] <= ids[-1] < n_layers
            # The last layer is left out wherever there are others.
            assert n_layers - 1 not in ids or n_taps in (1, n_layers)


@pytest.mark.parametrize("n_taps", [0, 5])
def test_more_taps_than_layers_are_refused(n_taps):
    with pytest.raises(ValueError, match=rf"`num_taps` must lie in 1..4 .*got {n_taps}"):
        default_target_layer_ids(4, n_taps)
    with pytest.raises(ValueError, match=r"`num_taps` must lie in 1..4"):
        DFlashConfig.for_target(
            target_config("Qwen3", num_hidden_layers=4), num_taps=n_taps, mask_token_id=0
        )


@pytest.mark.parametrize(
    ("n_layers", "expected"), [(1, [0]), (2, [1]), (3, [0, 1]), (4, [0, 1, 2])]
)
def test_default_taps_shrink_with_tiny_targets(n_layers, expected):
    assert drafter_for("Qwen3", num_hidden_layers=n_layers).target_layer_ids == expected


# ------------------------------------------------------------------ families


def test_a_drafter_of_qwen3_takes_its_shape():
    drafter = drafter_for("Qwen3", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    for key in SIZES:
        if key != "num_hidden_layers":
            assert getattr(drafter, key) == SIZES[key]
    assert (drafter.num_hidden_layers, drafter.block_size, drafter.architecture) == (
        5,
        16,
        "dflash",
    )
    assert drafter.target_layer_ids == [1, 3, 5, 7, 9]
    assert (drafter.num_target_layers, drafter.target_hidden_size) == (12, 32)
    assert drafter.layer_types == ["full_attention"] * 5
    assert drafter.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert (drafter.attention_bias, drafter.rms_norm_eps) == (False, 1e-6)
    assert (drafter.input_embedding_scale, drafter.output_multiplier) == (1.0, 1.0)


def test_dflare_has_its_papers_sizes():
    drafter = DFlashConfig.for_target(
        target_config("Qwen3", num_hidden_layers=36), architecture="dflare", mask_token_id=0
    )
    assert (drafter.architecture, drafter.num_hidden_layers) == ("dflare", 7)
    assert drafter.target_layer_ids == [1, 5, 9, 13, 17, 21, 25, 29, 33]


def test_everything_can_be_overridden():
    drafter = DFlashConfig.for_target(
        target_config("Qwen3"),
        num_draft_layers=2,
        block_size=4,
        mask_token_id=3,
        target_layer_ids=[7, 2],
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
        intermediate_size=48,
    )
    assert (drafter.num_hidden_layers, drafter.block_size, drafter.mask_token_id) == (2, 4, 3)
    assert (drafter.target_layer_ids, drafter.intermediate_size) == ([7, 2], 48)
    assert drafter.layer_window(0) == 16


def test_llamas_and_mistrals_rope_and_norm_are_taken():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    drafter = drafter_for("Llama", rope_parameters=rope, rms_norm_eps=1e-5)
    assert drafter.rope_parameters == rope
    assert drafter.rms_norm_eps == 1e-5
    assert drafter_for("Mistral", sliding_window=8).layer_types == ["full_attention"] * 5


@pytest.mark.parametrize("name", ["Gemma", "Gemma2", "Gemma3Text"])
def test_gemma_scales_its_embeddings(name):
    assert drafter_for(name).input_embedding_scale == pytest.approx(math.sqrt(32))


def test_xglm_scales_its_embeddings():
    xglm = transformers.XGLMConfig(
        vocab_size=96, d_model=32, ffn_dim=64, num_layers=6, attention_heads=4
    )
    drafter = DFlashConfig.for_target(xglm, mask_token_id=95)
    assert drafter.input_embedding_scale == pytest.approx(math.sqrt(32))


def test_gemma2s_soft_cap_is_taken():
    assert drafter_for("Gemma2", final_logit_softcapping=30.0).final_logit_softcapping == 30.0


def test_gemma3s_global_rope_is_taken():
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    local = {"rope_type": "default", "rope_theta": 1e4}
    rope = {"full_attention": dict(full), "sliding_attention": local}
    assert drafter_for("Gemma3Text", rope_parameters=rope).rope_parameters == full


def test_gpt_osss_bias_and_rope_are_taken_and_its_expert_width_is_not():
    drafter = drafter_for("GptOss", hidden_size=2880, num_local_experts=4, intermediate_size=2880)
    assert drafter.attention_bias
    assert drafter.rope_parameters["rope_type"] == "yarn"
    assert drafter.intermediate_size == 7680


def test_a_mixture_of_experts_gets_a_dense_mlp():
    drafter = drafter_for("Qwen3Moe", num_experts=8, moe_intermediate_size=16, hidden_size=96)
    assert drafter.intermediate_size == 256


def test_granites_multipliers_are_taken():
    drafter = drafter_for("Granite", embedding_multiplier=12.0, logits_scaling=8.0)
    assert (drafter.input_embedding_scale, drafter.output_multiplier) == (12.0, 0.125)


def test_coheres_logit_scale_is_taken():
    assert drafter_for("Cohere", logit_scale=0.0625).output_multiplier == 0.0625


def test_targets_without_rotary_embedding_get_the_default_one():
    gpt2 = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=6, n_head=4, n_positions=64)
    drafter = DFlashConfig.for_target(gpt2, mask_token_id=95)
    assert drafter.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (drafter.hidden_size, drafter.head_dim, drafter.intermediate_size) == (32, 8, 128)
    assert (drafter.num_key_value_heads, drafter.max_position_embeddings) == (4, 64)
    opt = transformers.OPTConfig(
        vocab_size=96,
        hidden_size=32,
        ffn_dim=72,
        num_hidden_layers=6,
        num_attention_heads=4,
        word_embed_proj_dim=32,
    )
    assert DFlashConfig.for_target(opt, mask_token_id=95).intermediate_size == 72


def test_a_vision_models_language_model_is_the_target():
    text = {**SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    drafter = DFlashConfig.for_target(
        transformers.Qwen2_5_VLConfig(text_config=text), mask_token_id=95
    )
    assert (drafter.hidden_size, drafter.vocab_size, drafter.num_target_layers) == (32, 96, 12)
    assert drafter.rope_parameters["rope_type"] == "default"
    assert set(drafter.rope_parameters) == {"rope_type", "rope_theta"}


def test_partial_rotation_becomes_whole_heads():
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    drafter = drafter_for("Qwen3_5Text", rope_parameters=rope)
    assert drafter.rope_parameters == {"rope_type": "default", "rope_theta": 1e7}


def test_targets_that_cannot_have_a_drafter_are_refused():
    with pytest.raises(ValueError, match="decoder-only model, got 't5'"):
        DFlashConfig.for_target(transformers.T5Config(), mask_token_id=0)
    narrow = transformers.OPTConfig(hidden_size=32, num_attention_heads=4, word_embed_proj_dim=16)
    with pytest.raises(ValueError, match="`word_embed_proj_dim` 16"):
        DFlashConfig.for_target(narrow, mask_token_id=0)
    with pytest.raises(ValueError, match='`architecture` must be "dflash" or "dflare"'):
        DFlashConfig.for_target(target_config("Qwen3"), architecture="eagle", mask_token_id=0)
    with pytest.raises(ValueError, match="`mask_token_id` must be in"):
        DFlashConfig.for_target(target_config("Qwen3"), mask_token_id=96)


# ------------------------------------------------------------------ mask token


def tokenizer(*tokens, **special):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def test_the_tokenizers_own_mask_token_comes_first():
    own = tokenizer("<unk>", "a", "<mask>", "<reserved_0>", mask_token="<mask>")
    assert choose_mask_token_id(16, own) == 2


def test_a_spare_row_of_the_embedding_comes_next():
    assert choose_mask_token_id(16, tokenizer("<unk>", "a", "<reserved_0>")) == 3


@pytest.mark.parametrize(
    "name", ["<|reserved_200000|>", "<|reserved_special_token_0|>", "<unused0>", "<empty_output>"]
)
def test_a_reserved_token_comes_last(name):
    assert choose_mask_token_id(3, tokenizer("<unk>", "a", name)) == 2


def test_a_processor_is_asked_for_its_tokenizer():
    class Processor:
        tokenizer = tokenizer("<unk>", "a")

    assert choose_mask_token_id(16, Processor()) == 2


def test_padding_is_never_taken():
    padded = tokenizer("<unk>", "a", "<unused0>", pad_token="<unused0>", mask_token="<unused0>")
    with pytest.raises(ValueError, match=r"`mask_token_id` must be given.*not the padding"):
        choose_mask_token_id(3, padded)


def test_words_of_the_language_are_never_taken():
    with pytest.raises(ValueError, match=r"`mask_token_id` must be given.*\(3 rows\)"):
        choose_mask_token_id(3, tokenizer("<unk>", "reserved", "empty"))


def test_no_tokenizer_is_refused():
    with pytest.raises(ValueError, match="`mask_token_id` cannot be chosen without"):
        DFlashConfig.for_target(target_config("Qwen3"))


def test_for_target_chooses_the_mask_token():
    drafter = DFlashConfig.for_target(target_config("Qwen3"), tokenizer=tokenizer("<unk>", "a"))
    assert drafter.mask_token_id == 2
