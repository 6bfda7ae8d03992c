"""Conversions that are refused: the field or the file is named, and nothing is written."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import published_folders as folders
from hf_dflash.convert import convert
from pairs import random_drafter, tiny_target

SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": 16}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_target().save_pretrained(folder)
    return str(folder)


def saved(folder, **overrides):
    random_drafter(tiny_target(), num_target_layers=4, **overrides).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("to", "overrides", "message"),
    [
        ("zlab", {"architecture": "dflare"}, "`architecture` = 'dflare' .*DFlash drafters only"),
        ("native", {"architecture": "dflare"}, "`architecture` = 'dflare'"),
        ("native", {"attention_bias": True}, "`attention_bias` = True .*no bias"),
        ("native", {"target_hidden_size": 48}, "`target_hidden_size` = 48"),
        ("native", MIXED, "`is_causal` = None .*look both ways"),
        ("native", {"is_causal": True}, "`is_causal` = True"),
        ("native", {"input_embedding_scale": 2.0}, "`input_embedding_scale` = 2.0 .*ignore"),
        ("speculators", {"output_multiplier": 0.5}, "`output_multiplier` = 0.5"),
        ("speculators", {"is_causal": True}, "`is_causal` = True"),
        ("modelopt", {"final_logit_softcapping": 30.0}, "`final_logit_softcapping` = 30.0"),
        ("modelopt", MIXED, "`layer_types` = .*one kind of attention"),
    ],
)
def test_what_a_format_cannot_hold_is_named(to, overrides, message, target, tmp_path):
    source = saved(tmp_path / "source", **overrides)
    with pytest.raises(ValueError, match=f"The format {to} cannot hold this drafter: {message}"):
        convert(source, tmp_path / "out", to=to, target=target)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "gguf"}, "`to` must be one of hf-dflash, zlab.*got 'gguf'"),
        ({"to": "zlab", "source_format": "x"}, "`from` must be one of"),
        ({"to": "zlab", "source_format": "native"}, "`from` says native, but .* hf-dflash"),
        ({"to": "native", "rope": "theta"}, "`rope` must be parameters for the format native"),
        ({"to": "speculators"}, "`target` is needed for the format speculators, which names it"),
        ({"to": "zlab", "draft_vocabulary": "ids.json"}, "`draft_vocabulary` must be left out"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, tmp_path):
    source = saved(tmp_path / "source")
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_output_with_content_is_refused(tmp_path):
    source = saved(tmp_path / "source")
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", to="zlab")  # empty is fine
    with pytest.raises(ValueError, match="`output` must be a folder that does not exist"):
        convert(source, tmp_path / "out", to="zlab")
    with pytest.raises(ValueError, match="`output` must be a folder that does not exist"):
        convert(source, source / "config.json", to="zlab")


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="`path` must be a folder"):
        convert(tmp_path / "nothing", tmp_path / "out", to="zlab")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"lm_head.weight": torch.zeros(96, 32)}), "only speculators' format"),
        (lambda t: t.update({"model.fc.weight": t["fc.weight"] + 1}), "Two tensors .* `fc.weight`"),
        (lambda t: t.pop("norm.weight"), "1 missing: norm.weight"),
        (
            lambda t: t.update({"layers.0.mlp.up_proj.weight_scale": torch.zeros(1)}),
            "1 unexpected: layers.0.mlp.up_proj.weight_scale",
        ),
        (lambda t: t.update({"fc.weight": torch.zeros(4, 4)}), "1 wrongly shaped: fc.weight"),
        (lambda t: t.update({"prefix_gru.weight_ih_l0": torch.zeros(4)}), "a Domino drafter"),
    ],
)
def test_tensors_that_do_not_belong_are_named(change, message, tmp_path):
    source = folders.zlab(tmp_path / "source")
    folders.edit_tensors(source, change)
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "out", to="flat")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("mask_embedding.pt", "has `mask_embedding.pt` .*embedding of its own"),
        ("hf_quant_config.json", "has `hf_quant_config.json` .*quantised weights"),
    ],
)
def test_files_that_no_other_format_has_are_refused(file, message, tmp_path):
    source = folders.zlab(tmp_path / "source")
    (source / file).write_text("{}")
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "out", to="flat")


def test_a_quantised_drafter_is_refused(tmp_path):
    source = folders.modelopt(tmp_path / "source", quantization_config={"quant_algo": "FP8"})
    with pytest.raises(ValueError, match="is quantised"):
        convert(source, tmp_path / "out", to="zlab")


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_record_is_named(content, tmp_path):
    source = folders.zlab(tmp_path / "source")
    (source / "speculators.json").write_text(content)
    with pytest.raises(ValueError, match=r"speculators.json (is not valid JSON|must hold a JSON)"):
        convert(source, tmp_path / "out", to="flat")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dflash2"}, '`speculators_model_type` must be "dflash"'),
        ({"sample_from_anchor": True}, "`sample_from_anchor` must be false"),
        ({"aux_hidden_state_layer_ids": None}, "`aux_hidden_state_layer_ids` must list"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, "`aux_hidden_state_layer_ids` must be at least 1"),
        ({"transformer_layer_config": None}, "`transformer_layer_config` must be an object"),
        ({"conv_kernel_size": 2}, r"Unknown keys \['conv_kernel_size'\] in a speculators"),
        ({"mask_token_id": None}, "`mask_token_id` is missing"),
        ({"mask_token_id": 96}, "`mask_token_id` must be in"),
    ],
)
def test_a_speculators_config_that_asks_for_more_is_refused(changes, message, target, tmp_path):
    source = folders.speculators(tmp_path / "source", tiny_target(), "org/target", **changes)
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "out", to="zlab", target=target)


def test_a_reduced_vocabulary_is_not_dropped_unasked(target, tmp_path):
    source = folders.speculators(tmp_path / "source", tiny_target(), "org/target", [1, 5])
    with pytest.raises(ValueError, match=r"`draft_vocab_size` = 2 .*--whole-vocabulary"):
        convert(source, tmp_path / "out", to="zlab", target=target)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_trained_head_is_not_dropped(name, target, tmp_path):
    source = folders.speculators(tmp_path / "source", tiny_target(), "org/target")
    folders.edit_tensors(source, lambda tensors: tensors[name][3].add_(1))
    with pytest.raises(ValueError, match=f"`{name}` differs from the one of"):
        convert(source, tmp_path / "out", to="zlab", target=target)


def test_a_trained_head_is_not_replaced_where_its_vocabulary_is_reduced(target, tmp_path):
    source = folders.speculators(tmp_path / "source", tiny_target(), "org/target")
    folders.edit_tensors(source, lambda tensors: tensors["lm_head.weight"][3].add_(1))
    (tmp_path / "ids.json").write_text("[1, 5]")
    options = {"target": target, "draft_vocabulary": tmp_path / "ids.json"}
    with pytest.raises(ValueError, match=r"`lm_head\.weight` differs from the one of"):
        convert(source, tmp_path / "out", to="speculators", **options)


def test_copies_of_the_target_are_not_dropped_unseen(tmp_path):
    source = folders.speculators(tmp_path / "source", tiny_target(), "org/target")
    with pytest.raises(ValueError, match=r"`target` is needed: \['embed_tokens.weight', 'lm_head"):
        convert(source, tmp_path / "out", to="zlab")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("d2t"), "`d2t` must have 2 rows .* got None"),
        (lambda t: t.update({"t2d": torch.zeros(4, dtype=torch.bool)}), "`t2d` must have 96 rows"),
        (lambda t: t.update({"d2t": torch.tensor([1, 5])}), "`d2t` .* and `t2d` must name"),
        (lambda t: t.pop("lm_head.weight"), "`lm_head.weight` must have 2 rows"),
    ],
)
def test_vocabulary_maps_that_disagree_are_refused(change, message, target, tmp_path):
    source = folders.speculators(tmp_path / "source", tiny_target(), "org/target", [1, 5])
    folders.edit_tensors(source, change)
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "out", to="zlab", target=target, whole_vocabulary=True)


def test_maps_of_the_whole_vocabulary_must_be_whole(target, tmp_path):
    source = folders.speculators(tmp_path / "source", tiny_target(), "org/target")
    folders.edit_tensors(source, lambda t: t.update({"d2t": torch.zeros(96, dtype=torch.int64)}))
    with pytest.raises(ValueError, match=r"`t2d` must have 96 rows .* got None"):
        convert(source, tmp_path / "out", to="zlab", target=target)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ('["a"]', "must hold a JSON list of token ids"),
        ("[]", "must be ascending token ids"),
        ("[5, 1]", "must be ascending token ids"),
        ("[1, 96]", r"ascending token ids in 0..95"),
    ],
)
def test_a_bad_draft_vocabulary_is_refused(content, message, target, tmp_path):
    (tmp_path / "ids.json").write_text(content)
    source = saved(tmp_path / "source")
    options = {"target": target, "draft_vocabulary": tmp_path / "ids.json"}
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "out", to="speculators", **options)


def test_another_target_is_refused(tmp_path):
    tiny_target(vocab_size=64).save_pretrained(tmp_path / "target")
    source = saved(tmp_path / "source")
    with pytest.raises(ValueError, match=r"`embed_tokens.weight` of .* must be \(96, 32\)"):
        convert(source, tmp_path / "out", to="speculators", target=str(tmp_path / "target"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.embed_tokens.weight"), "must have its embeddings under one name"),
        (lambda t: t.pop("lm_head.weight"), "must have a head .* or tie it"),
        (
            lambda t: t.update({"vision.embed_tokens.weight": torch.zeros(2)}),
            "must have one tensor that ends in",
        ),
    ],
)
def test_a_target_whose_tensors_are_not_found_is_refused(change, message, tmp_path):
    tiny_target(tie_word_embeddings=False).save_pretrained(tmp_path / "target")
    folders.edit_tensors(tmp_path / "target", change)
    source = saved(tmp_path / "source")
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "out", to="speculators", target=str(tmp_path / "target"))


def test_a_tied_head_is_the_embeddings(tmp_path):
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "target")
    source = saved(tmp_path / "source")
    convert(source, tmp_path / "out", to="speculators", target=str(tmp_path / "target"))
    tensors = folders.tensors_of(tmp_path / "out")
    assert torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"])
