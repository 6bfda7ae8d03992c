"""Our forward and that of transformers' own block drafter, with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from hf_dflash.outputs_dflash import CACHE_NAME
from parity.drafters import BLOCK, HIDDEN, inputs_for, make_drafter, whole

FULL, SLIDING = "full_attention", "sliding_attention"
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
WINDOW = 5


def make_pair(attention: str, layer_types: list[str], native_window: int = WINDOW) -> Any:
    """Our drafter, not causal anywhere as the native class, and the native one."""
    ours = make_drafter(
        attention,
        target_hidden_size=HIDDEN,
        layer_types=layer_types,
        sliding_window=WINDOW,
        is_causal=False,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )
    shared = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shared += ("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "block_size")
    shared += ("mask_token_id", "target_layer_ids", "rope_parameters", "max_position_embeddings")
    config = MuseGlimmerAssistantConfig(
        **{name: getattr(ours.config, name) for name in shared},
        layer_types=layer_types,
        sliding_window=native_window,
        attn_implementation=attention,
    )
    native = MuseGlimmerAssistantModel(config).eval()
    native.load_state_dict({RENAMED.get(k, k): w for k, w in ours.state_dict().items()})
    return ours, native


def native_forward(native: Any, noise: Any, taps: Any, positions: Any) -> Any:
    # It learns from its cache how many keys there are.
    cache = DFlashCache(config=native.config)
    cache.set_previous_accepted_tokens(taps.shape[1])
    with torch.no_grad():
        return native(noise, taps, position_ids=positions, **{CACHE_NAME: cache}).last_hidden_state


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("n_context", [1, 11])
def test_full_layers_agree(attention, n_context):
    ours, native = make_pair(attention, [FULL] * 3)
    noise, taps, positions = inputs_for(ours, n_context)
    expected = native_forward(native, noise, taps, positions)
    torch.testing.assert_close(whole(ours, noise, taps, positions), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sliding_layers_agree_at_a_window_one_shorter(attention):
    # Its masks reach distance W and the field's W - 1, so W there is W + 1 here.
    ours, native = make_pair(attention, [SLIDING, FULL, SLIDING], native_window=WINDOW - 1)
    noise, taps, positions = inputs_for(ours, 11)
    output = whole(ours, noise, taps, positions)
    expected = native_forward(native, noise, taps, positions)
    _, same_number = make_pair(attention, [SLIDING, FULL, SLIDING])
    other = native_forward(same_number, noise, taps, positions)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(output, other, rtol=1e-3, atol=1e-3)


def test_our_drafter_runs_on_the_native_loops_cache():
    """That cache gets whole blocks and is cropped by its loop; ours takes only the context."""
    ours, native = make_pair("sdpa", [FULL] * 3)
    noise, taps, positions = inputs_for(ours, 12)
    caches = [DFlashCache(config=model.config) for model in (ours, native)]
    for cache in caches:
        cache.activate_past_recording()
    start = 0
    for n_new in (5, 1, 6):
        stop = start + n_new
        where = positions[:, start : stop + BLOCK]
        outputs = []
        for model, cache in zip((ours, native), caches, strict=True):
            cache.set_previous_accepted_tokens(n_new)
            if start:
                cache.crop(-BLOCK)
            with torch.no_grad():
                outputs.append(
                    model(
                        noise_embeds=noise,
                        context_hidden_states=taps[:, start:stop],
                        position_ids=where,
                        **{CACHE_NAME: cache},
                    ).last_hidden_state
                )
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
        start = stop
    torch.testing.assert_close(
        outputs[0], whole(ours, noise, taps, positions), rtol=1e-5, atol=1e-5
    )
