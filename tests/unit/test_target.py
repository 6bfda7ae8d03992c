"""What is read of the target: taps, embeddings, head, and its cache rolled back."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    GitConfig,
    GitForCausalLM,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
)

from families.zoo import N_LAYERS, TEXT_TARGETS, VISION_TARGETS, image_inputs, prompt
from hf_dflash.outputs_dflash import CACHE_NAME
from hf_dflash.target import (
    TargetTaps,
    check_pair,
    decoder_layers,
    draft_logits,
    forget_past,
    noise_embeddings,
    roll_back,
    roll_back_to,
)
from pairs import drafter_config, tiny_target

ALL_TARGETS = {**TEXT_TARGETS, **VISION_TARGETS}
FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "embedding_norm")


def run_with_taps(target: Any, inputs: dict[str, torch.Tensor], layer_ids: Any) -> Any:
    with TargetTaps(target, layer_ids) as taps, taps.recording(), torch.no_grad():
        outputs = target(**inputs, output_hidden_states=True)
    return taps.take(), outputs.hidden_states


@pytest.mark.parametrize("family", ALL_TARGETS)
def test_tap_k_is_the_output_of_layer_k_bit_for_bit(family):
    target = ALL_TARGETS[family]()
    inputs = image_inputs(family) if family in VISION_TARGETS else {"input_ids": prompt(9)}
    taps, hidden_states = run_with_taps(target, inputs, range(N_LAYERS))
    for layer_id in range(N_LAYERS - 1):
        assert torch.equal(taps[layer_id], hidden_states[layer_id + 1])
    # What transformers calls the last hidden state is after the final norm; the tap is before.
    decoder = target.get_decoder()
    norm = next(getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name))
    last = norm(taps[-1])
    if getattr(decoder, "project_out", None) is not None:  # OPT with narrow embeddings
        last = decoder.project_out(last)
    assert torch.equal(last, hidden_states[-1])


def test_taps_keep_the_order_they_are_asked_for():
    taps, hidden_states = run_with_taps(tiny_target(), {"input_ids": prompt(5)}, [2, 0])
    assert torch.equal(taps[0], hidden_states[3])
    assert torch.equal(taps[1], hidden_states[1])


def test_taps_of_several_forwards_are_joined_and_taken_once():
    target, ids = tiny_target(), prompt(5)
    with TargetTaps(target, [1]) as taps:
        with taps.recording():
            target(ids[:, :2])
            target(ids[:, 2:])
        assert [tap.shape[1] for tap in taps.take()] == [5]
        with taps.recording():
            target(ids[:, :1])
        assert [tap.shape[1] for tap in taps.take()] == [1]


def test_taps_record_only_while_asked_and_only_their_own_thread():
    target, ids = tiny_target(), prompt(5)
    with TargetTaps(target, [1]) as taps:
        target(ids)  # a processor's own forward, say
        with taps.recording():
            other = threading.Thread(target=lambda: target(ids[:, :3]))
            other.start()
            other.join()
            target(ids[:, :2])
        assert taps.take()[0].shape[1] == 2
    assert not any(layer._forward_hooks for layer in decoder_layers(target))


def test_an_error_inside_leaves_no_hook_behind():
    target = tiny_target()
    with pytest.raises(ZeroDivisionError), TargetTaps(target, [0]):
        raise ZeroDivisionError
    assert not any(layer._forward_hooks for layer in decoder_layers(target))


def test_layers_of_a_vision_tower_are_not_taken_for_the_decoders():
    for make in VISION_TARGETS.values():
        target = make()
        assert len(decoder_layers(target)) == N_LAYERS
        names = {id(module): name for name, module in target.named_modules()}
        assert all("vis" not in names[id(layer)] for layer in decoder_layers(target))


def test_layers_of_an_image_encoder_inside_the_decoder_are_not_taken_for_its_own():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    vision = {**sizes, "num_hidden_layers": 3, "image_size": 4, "patch_size": 2}
    config = GitConfig(vision_config=vision, num_hidden_layers=3, vocab_size=32, **sizes)
    layers = decoder_layers(GitForCausalLM(config))
    assert [type(layer).__name__ for layer in layers] == ["GitLayer"] * 3


def test_a_head_that_is_called_decoder_is_not_taken_for_the_decoder():
    config = ModernBertDecoderConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    layers = decoder_layers(ModernBertDecoderForCausalLM(config))
    assert [type(layer).__name__ for layer in layers] == ["ModernBertDecoderLayer"] * 3


def test_a_target_whose_layers_are_not_found_is_an_error():
    target = tiny_target()
    target.model.layers = nn.Sequential(*target.model.layers)
    with pytest.raises(NotImplementedError, match="keeps its 4 decoder layers in no module list"):
        decoder_layers(target)


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "granite", "llava"])
def test_noise_embeddings_are_scaled_raw_rows(family, scale):
    target, ids = ALL_TARGETS[family](), prompt(4)
    rows = target.get_input_embeddings().weight[ids]
    torch.testing.assert_close(noise_embeddings(target, ids, scale), rows * scale)


def test_noise_embeddings_of_the_targets_own_scale_are_its_own():
    # In half precision a scale that was divided out and multiplied in again would round twice.
    target, ids = TEXT_TARGETS["gemma3"]().bfloat16(), prompt(4)
    table = target.get_input_embeddings()
    own = noise_embeddings(target, ids, table.scalar_embed_scale)
    assert torch.equal(own, table(ids))


def test_noise_embeddings_leave_a_norm_inside_the_table_out():
    target, ids = tiny_target(), prompt(4)
    table = target.get_input_embeddings()
    rows = table.weight[ids]
    table.embed_norm = nn.LayerNorm(32)  # as Muse Glimmer's
    table.register_forward_hook(lambda module, _args, output: module.embed_norm(output))
    assert torch.equal(noise_embeddings(target, ids, 1.0), rows)


def test_draft_logits_are_the_heads_scaled_then_capped():
    target = tiny_target()
    hidden_states = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0)) * 3
    plain = drafter_config(target)
    assert torch.equal(draft_logits(target, hidden_states, plain), target.lm_head(hidden_states))
    config = drafter_config(target, output_multiplier=0.5, final_logit_softcapping=2.0)
    expected = 2.0 * torch.tanh(target.lm_head(hidden_states) * 0.5 / 2.0)
    torch.testing.assert_close(draft_logits(target, hidden_states, config), expected)


def test_draft_logits_take_hidden_states_of_another_dtype():
    target = tiny_target().bfloat16()
    logits = draft_logits(target, torch.randn(1, 3, 32), drafter_config(target))
    assert logits.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ALL_TARGETS)
def test_a_drafter_made_for_the_target_is_accepted(family):
    target = ALL_TARGETS[family]()
    check_pair(target, drafter_config(target))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"target_hidden_size": 64}, "its `target_hidden_size` is 64, this Qwen3ForCausalLM has"),
        ({"vocab_size": 128}, "its `vocab_size` is 128"),
        ({"num_target_layers": 6}, "its `num_target_layers` is 6"),
        (
            {"target_layer_ids": [0, 4], "num_target_layers": None},
            r"layers of the target \(0..3\), got \[0, 4\]",
        ),
        ({"hidden_size": 48, "target_hidden_size": 32}, "`hidden_size` 48 is not the width"),
    ],
)
def test_a_drafter_made_for_another_target_is_refused(overrides, message):
    target = tiny_target()
    config = drafter_config(target, **overrides)
    with pytest.raises(ValueError, match=message):
        check_pair(target, config)


def test_a_mask_token_without_a_row_is_refused():
    target = tiny_target()
    config = drafter_config(target)
    target.set_input_embeddings(nn.Embedding(90, 32))  # shrunk behind the config's back
    with pytest.raises(ValueError, match=r"`mask_token_id` 95 is no row .*\(90 rows\)"):
        check_pair(target, config)


def test_a_target_without_a_head_is_refused():
    target = tiny_target()
    with pytest.raises(ValueError, match="`Qwen3Model` has no output embeddings"):
        check_pair(target.model, drafter_config(target))


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3", "lfm2"])
@pytest.mark.parametrize("n_removed", [0, 3])
def test_a_cache_rolled_back_goes_on_as_if_the_rest_had_never_been(family, n_removed):
    target, ids = TEXT_TARGETS[family](), prompt(20)
    n_kept = 20 - n_removed
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids[:, :12], **{CACHE_NAME: cache})
        cache.activate_past_recording()
        target(ids[:, 12:], **{CACHE_NAME: cache})
        roll_back(cache, n_removed)
        logits = target(ids[:, :6], **{CACHE_NAME: cache}).logits
        whole = target(torch.cat([ids[:, :n_kept], ids[:, :6]], dim=1)).logits
    torch.testing.assert_close(logits, whole[:, -6:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "lfm2"])
def test_a_cache_of_an_interrupted_forward_is_cut_to_what_all_its_layers_hold(family):
    target, ids = TEXT_TARGETS[family](), prompt(20)
    cache = DynamicCache(config=target.config)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        target(ids[:, :14], **{CACHE_NAME: cache})
        cache.activate_past_recording()
        hook = decoder_layers(target)[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            target(ids[:, 14:], **{CACHE_NAME: cache})
        hook.remove()
        roll_back_to(cache, 14)
        logits = target(ids[:, 14:], **{CACHE_NAME: cache}).logits
        whole = target(ids).logits
    torch.testing.assert_close(logits, whole[:, 14:], rtol=1e-4, atol=1e-4)


def test_a_window_that_forgets_its_past_keeps_its_length_only():
    target, ids = TEXT_TARGETS["mistral"](), prompt(30)
    cache = DynamicCache(config=target.config)
    cache.activate_past_recording()
    forget_past(cache)
    target(ids, **{CACHE_NAME: cache})
    assert {layer.keys.shape[2] for layer in cache.layers} == {target.config.sliding_window - 1}


def test_forgetting_is_no_matter_for_layers_that_keep_everything():
    layer = SimpleNamespace()
    forget_past(SimpleNamespace(layers=[layer]))
    assert vars(layer) == {}
