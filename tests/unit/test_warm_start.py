from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from hf_dflash import DFlashDraftModel
from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from hf_dflash.warm_start import _copy, _effective_weights, init_from_target, merge_adapter
from pairs import random_drafter
from training_pairs import BLOCK, generated_rows, training_drafter, training_target

# peft 0.21 asks by a name that transformers 5.24 has deprecated.
PEFT_WARNING = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
pytestmark = pytest.mark.filterwarnings(PEFT_WARNING)


@pytest.fixture(scope="module")
def target() -> Any:
    return training_target()


def target_of(family: str) -> Any:
    """A target of another family: Llama, say, does not norm its queries and keys."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=96, pad_token_id=0, **sizes, **heads
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def train(model: Any, target: Any, folder: Path, **options: Any) -> DFlashTrainer:
    args = DFlashTrainingArguments(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        n_anchors=6,
        max_steps=options.pop("max_steps", 3),
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=2,
        **options,
    )
    trainer = DFlashTrainer(model, target, args, generated_rows(target, 6, n_new=12))
    trainer.train()
    return trainer


@pytest.mark.parametrize("architecture", ["dflash", "dflare"])
def test_layers_are_copied_where_they_fit(target: Any, architecture: str) -> None:
    drafter = random_drafter(target, BLOCK, architecture=architecture)
    before = {name: p.clone() for name, p in drafter.named_parameters()}
    copied = init_from_target(drafter, target)
    layers = target.model.layers
    for i, source in ((0, layers[1]), (1, layers[3])):
        ours = drafter.layers[i]
        assert torch.equal(ours.self_attn.q_proj.weight, source.self_attn.q_proj.weight)
        assert torch.equal(ours.mlp.down_proj.weight, source.mlp.down_proj.weight)
        assert torch.equal(ours.input_layernorm.weight, source.input_layernorm.weight)
        if architecture == "dflare":
            assert torch.equal(ours.self_attn.k_proj_target.weight, source.self_attn.k_proj.weight)
    torch.testing.assert_close(drafter.norm.weight, target.model.norm.weight)
    for name, parameter in drafter.named_parameters():
        if name not in copied:
            assert torch.equal(parameter, before[name])
    assert any(not torch.equal(p, before[name]) for name, p in drafter.named_parameters())


@pytest.mark.parametrize("architecture", ["dflash", "dflare"])
def test_the_features_start_as_a_tap_normed_as_the_target_does(
    target: Any, architecture: str
) -> None:
    drafter = random_drafter(target, BLOCK, architecture=architecture)
    copied = init_from_target(drafter, target)  # layers 1 and 3, taps 0 and 2
    taps = torch.randn(1, 5, 2 * target.config.hidden_size)
    features = drafter.fuse_context(taps)
    wanted = target.model.layers[1].input_layernorm(taps[..., : target.config.hidden_size])
    assert "hidden_norm.weight" in copied
    if architecture == "dflash":
        torch.testing.assert_close(features[0], wanted)
    for mixed in features:  # of DFlare, 95 % that tap
        assert torch.cosine_similarity(mixed, wanted, dim=-1).min() > 0.9


def test_norms_of_heads_get_the_targets_scale() -> None:
    target = target_of("Llama")
    drafter = random_drafter(target, BLOCK)
    ids = torch.arange(1, 30)[None]
    assert not any("q_norm" in name for name in init_from_target(drafter, target))
    copied = init_from_target(drafter, target, input_ids=ids)
    assert {f"layers.{i}.self_attn.{kind}_norm.weight" for i in (0, 1) for kind in "qk"} <= set(
        copied
    )
    layer = target.model.layers[1]
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states[1]
        heads = layer.self_attn.q_proj(layer.input_layernorm(states))[:, 1:].unflatten(
            -1, (-1, drafter.config.head_dim)
        )
    norm = drafter.layers[0].self_attn.q_norm.weight
    assert norm.unique().numel() == 1
    torch.testing.assert_close(norm[0], heads.square().mean(dim=-1).sqrt().mean())


def test_the_heads_scale_leaves_out_a_bias_that_the_drafter_lacks() -> None:
    target = target_of("Qwen2")
    ids = torch.arange(1, 30)[None]
    plain, biased = random_drafter(target, BLOCK), random_drafter(target, BLOCK)
    init_from_target(plain, target, [3, 3], input_ids=ids)
    # It is in all keys alike.
    target.model.layers[3].self_attn.k_proj.bias.data.fill_(50.0)
    init_from_target(biased, target, [3, 3], input_ids=ids)
    one, other = (d.layers[0].self_attn.k_norm.weight for d in (plain, biased))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=0)


def test_the_heads_scale_is_that_behind_a_norm_of_all_heads() -> None:
    target = target_of("Olmo2")
    target.model.layers[3].self_attn.q_norm.weight.data.fill_(7.0)
    drafter = random_drafter(target, BLOCK)
    init_from_target(drafter, target, [2, 3], input_ids=torch.arange(1, 30)[None])
    assert drafter.layers[1].self_attn.q_norm.weight.data.mean() == pytest.approx(7.0, rel=0.1)


@pytest.mark.parametrize("family", ["Gemma2", "Olmo2"])
def test_norms_are_copied_by_where_they_act(family: str) -> None:
    target = target_of(family)
    drafter = random_drafter(target, BLOCK)
    for name, norm in target.model.layers[3].named_children():
        if "layernorm" in name:
            norm.weight.data.fill_({"pre_feedforward_layernorm": 2.0}.get(name, 5.0))
    copied = init_from_target(drafter, target, [2, 3])
    weight = drafter.layers[1].post_attention_layernorm.weight.data
    if family == "Olmo2":  # it norms nothing before its MLP
        assert "layers.1.post_attention_layernorm.weight" not in copied
        assert torch.equal(weight, torch.ones_like(weight))
    else:
        assert "layers.1.post_attention_layernorm.weight" in copied
        torch.testing.assert_close(weight, torch.full_like(weight, 3.0))  # 1 + its weight


def test_half_of_a_layer_is_copied_whole_or_not_at_all(
    target: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the MLP's matrices is quantised."""
    quantised = copy.deepcopy(target)
    up = quantised.model.layers[3].mlp.up_proj
    up.weight = torch.nn.Parameter(up.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    copied = init_from_target(random_drafter(target, BLOCK), quantised, [2, 3])
    halves = {".".join(name.split(".")[:3]) for name in copied if name.startswith("layers.")}
    assert halves == {
        "layers.0.self_attn",
        "layers.0.input_layernorm",
        "layers.0.mlp",
        "layers.0.post_attention_layernorm",
        "layers.1.self_attn",
        "layers.1.input_layernorm",
    }
    assert "The MLP of draft layers [1] stays as it was" in caplog.text
    assert "The attention of" not in caplog.text


@pytest.mark.parametrize("family", ["Phi3", "Glm"])
def test_joint_projections_are_taken_apart(family: str, caplog: pytest.LogCaptureFixture) -> None:
    target = target_of(family)
    drafter = random_drafter(target, BLOCK)
    copied = init_from_target(drafter, target, [2, 3], input_ids=torch.arange(1, 30)[None])
    x, layer, ours = torch.randn(1, 5, 32), target.model.layers[3], drafter.layers[1]
    torch.testing.assert_close(ours.mlp(x), layer.mlp(x))
    if family == "Glm":  # turns half of each head
        assert not any("self_attn" in name for name in copied)
        assert "The attention of draft layers [0, 1] stays as it was" in caplog.text
    else:
        q, k, v = layer.self_attn.qkv_proj(x).split([32, 16, 16], dim=-1)
        torch.testing.assert_close(ours.self_attn.q_proj(x), q)
        torch.testing.assert_close(ours.self_attn.k_proj(x), k)
        torch.testing.assert_close(ours.self_attn.v_proj(x), v)
        assert {f"layers.1.self_attn.{kind}_norm.weight" for kind in "qk"} <= set(copied)
        assert "as it was" not in caplog.text


def test_heads_that_turn_neighbours_are_put_in_order() -> None:
    """The same scores come of Cohere's queries and keys, turned its way, as of ours."""
    from transformers.models.cohere import modeling_cohere
    from transformers.models.qwen3 import modeling_qwen3

    target = target_of("Cohere")
    drafter = random_drafter(target, BLOCK, rope_parameters=target.config.rope_parameters)
    copied = init_from_target(drafter, target, [2, 3])
    assert "layers.1.mlp.down_proj.weight" in copied
    x, positions = torch.randn(1, 6, 32), torch.arange(6)[None]
    scores = []
    for module, attention, rotary in (
        (modeling_cohere, target.model.layers[3].self_attn, target.model.rotary_emb),
        (modeling_qwen3, drafter.layers[1].self_attn, drafter.rotary_emb),
    ):
        heads = (
            p(x).unflatten(-1, (-1, 8)).transpose(1, 2)
            for p in (attention.q_proj, attention.k_proj)
        )
        q, k = module.apply_rotary_pos_emb(*heads, *rotary(x, positions))
        scores.append(q[:, ::2] @ k.transpose(2, 3))
    torch.testing.assert_close(scores[1], scores[0])
    norm = target.model.layers[3].input_layernorm.weight
    assert torch.equal(drafter.layers[1].post_attention_layernorm.weight, norm)


def test_a_norm_that_adds_one_to_its_weight_is_copied_as_it_acts() -> None:
    class GemmaRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((4,), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * (1 + self.weight)

    copy_into = torch.nn.Module()
    copy_into.weight = torch.nn.Parameter(torch.zeros(4))
    with torch.no_grad():
        weights = _effective_weights(GemmaRMSNorm())
        assert _copy(copy_into, weights, "norm.") == ["norm.weight"]
    torch.testing.assert_close(copy_into.weight.data, torch.full((4,), 1.5))


def test_what_has_another_shape_stays(target: Any) -> None:
    drafter = random_drafter(target, BLOCK, intermediate_size=40)
    copied = init_from_target(drafter, target, [0, 3])
    assert not any("mlp" in name for name in copied)
    assert "layers.0.self_attn.q_proj.weight" in copied


def test_a_target_that_fits_nowhere_is_refused(target: Any) -> None:
    drafter = random_drafter(target, BLOCK)
    with pytest.raises(ValueError, match=r"`layer_ids` must name a layer .* 2 draft layers, got"):
        init_from_target(drafter, target, [0, 4])
    with pytest.raises(ValueError, match=r"`layer_ids` must name a layer .* got \[1\]"):
        init_from_target(drafter, target, [1])
    with pytest.raises(ValueError, match=r"`input_ids` must be a text of at least 2 .*\(1, 1\)"):
        init_from_target(drafter, target, input_ids=torch.tensor([[5]]))


def test_a_target_of_other_matrices_is_refused() -> None:
    target = target_of("GPTNeoX")  # of whose layers norms would fit
    with pytest.raises(ValueError, match="No matrix of `GPTNeoXForCausalLM`'s layers fits"):
        init_from_target(random_drafter(target, BLOCK), target)


def test_a_saved_drafter_is_trained_further(target: Any, tmp_path: Path) -> None:
    training_drafter(target).to(torch.bfloat16).save_pretrained(tmp_path / "old")
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "old", dtype=torch.float32)
    before = drafter.norm.weight.detach().clone()
    trainer = train(drafter, target, tmp_path / "new")
    assert trainer.model is drafter
    assert not torch.equal(drafter.norm.weight, before)


def lora(drafter: Any) -> Any:
    return get_peft_model(drafter, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "fc"]))


def test_an_adapter_is_trained_resumed_saved_and_merged(target: Any, tmp_path: Path) -> None:
    base = training_drafter(target)
    base.save_pretrained(tmp_path / "base")
    before = {name: p.clone() for name, p in base.state_dict().items()}
    trainer = train(lora(base), target, tmp_path / "run")
    names = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert names
    assert all("lora_" in name for name in names)
    trainer.save_model(str(tmp_path / "adapter"))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == len(names)

    fresh = DFlashDraftModel.from_pretrained(tmp_path / "base")
    again = DFlashTrainer(lora(fresh), target, trainer.args, generated_rows(target, 6, n_new=12))
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for name, parameter in again.model.named_parameters():
        assert torch.equal(parameter, dict(trainer.model.named_parameters())[name]), name

    merged = merge_adapter(trainer.model)
    merged.save_pretrained(tmp_path / "merged")
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "merged")
    changed = [n for n, p in loaded.state_dict().items() if not torch.equal(p, before[n])]
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "fc"}
    prompt = torch.tensor([[5, 6, 7]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    drafted = target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=loaded)
    assert torch.equal(plain, drafted)
    assert hasattr(trainer.model, "peft_config")  # still as it was


def test_an_adapter_on_a_drafter_in_half_precision(target: Any, tmp_path: Path) -> None:
    base = training_drafter(target).to(torch.bfloat16)
    trainer = train(lora(base), target, tmp_path, ema_decay=0.5)
    assert base.dtype == torch.bfloat16
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}


def test_merging_does_not_round_small_changes_away(target: Any) -> None:
    base = training_drafter(target).to(torch.bfloat16)
    before = base.layers[0].self_attn.q_proj.weight.detach().float()
    model = lora(base)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # a change of every weight by 4 * 1e-2 ** 2 = 4e-4
            assert parameter.dtype == torch.float32
            parameter.data.fill_(1e-2)
    scale = 8 / 4  # alpha / rank, PEFT's defaults and ours
    merged = merge_adapter(model).layers[0].self_attn.q_proj.weight
    change = torch.full_like(before, 4e-4 * scale)
    torch.testing.assert_close(merged - before, change, rtol=0.01, atol=0)
    assert base.dtype == torch.bfloat16
    rounded = (before + 4e-4 * scale).to(torch.bfloat16).float()
    assert (rounded == before).float().mean() > 0.2  # what bfloat16 would have lost


def test_nothing_to_merge_is_said(target: Any) -> None:
    with pytest.raises(TypeError, match="must be a drafter with an adapter of PEFT, got DFlashDra"):
        merge_adapter(training_drafter(target))
