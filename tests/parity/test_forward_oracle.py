"""`DFlashDraftModel.forward` against the definition, written as plain loops in float64.

The oracle has no cache, no batch and no vectorised attention: token by token, head by head. It
shares nothing with the model but its weights and its rotary frequencies.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parity.drafters import BLOCK, VARIANTS, inputs_for, make_drafter, whole


def _rms_norm(row: Tensor, weight: Tensor, eps: float) -> Tensor:
    return row / math.sqrt(float((row * row).mean()) + eps) * weight


def _turned(row: Tensor, position: int, frequencies: Tensor, factor: float) -> Tensor:
    half = row.shape[0] // 2
    turned = torch.empty_like(row)
    for i in range(half):
        cos = math.cos(position * float(frequencies[i])) * factor
        sin = math.sin(position * float(frequencies[i])) * factor
        turned[i] = row[i] * cos - row[i + half] * sin
        turned[i + half] = row[i + half] * cos + row[i] * sin
    return turned


class Oracle:
    """The definition: checkpoint formats, section 0, and DFlare's differences."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.weights = {name: w.detach().double() for name, w in model.state_dict().items()}
        self.frequencies = model.rotary_emb.inv_freq.double()
        self.factor = float(model.rotary_emb.attention_scaling)

    def _linear(self, name: str, row: Tensor) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        product = self.weights[f"{name}.weight"] @ row
        return product if bias is None else product + bias

    def _norm(self, name: str, row: Tensor) -> Tensor:
        return _rms_norm(row, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def context_feature(self, taps: Tensor, layer: int) -> Tensor:
        if self.config.architecture == "dflash":
            return self._norm("hidden_norm", self._linear("fc", taps))
        mix = self.weights["layer_fusion_weights"][layer].exp()
        features = taps.reshape(len(mix), -1)
        total = sum(mix[t] / mix.sum() * features[t] for t in range(len(mix)))
        return self._norm("hidden_norm", total)

    def _heads(self, name: str, row: Tensor, norm: str | None, position: int) -> list[Tensor]:
        heads = list(self._linear(name, row).split(self.config.head_dim))
        if norm is None:
            return heads
        eps = self.config.rms_norm_eps
        normed = [_rms_norm(head, self.weights[f"{norm}.weight"], eps) for head in heads]
        return [_turned(head, position, self.frequencies, self.factor) for head in normed]

    def _sees(self, layer: int, query: int, key: int) -> bool:
        """Whether slot ``query`` may look at slot ``key``; both count context rows too."""
        sliding = self.config.layer_types[layer] == "sliding_attention"
        causal = sliding if self.config.is_causal is None else self.config.is_causal
        if causal and key > query:
            return False
        return not sliding or abs(query - key) < self.config.sliding_window

    def layer(self, states: list[Tensor], taps: Tensor, positions: list[int], i: int) -> Any:
        attention = f"layers.{i}.self_attn"
        on_target = "_target" if self.config.architecture == "dflare" else ""
        keys, values = [], []
        for row, position in zip(taps, positions, strict=False):
            feature = self.context_feature(row, i)
            k_norm = f"{attention}.k_norm"
            keys.append(self._heads(f"{attention}.k_proj{on_target}", feature, k_norm, position))
            values.append(self._heads(f"{attention}.v_proj{on_target}", feature, None, position))
        n_context = len(taps)
        normed = [self._norm(f"layers.{i}.input_layernorm", row) for row in states]
        for row, position in zip(normed, positions[n_context:], strict=True):
            keys.append(self._heads(f"{attention}.k_proj", row, f"{attention}.k_norm", position))
            values.append(self._heads(f"{attention}.v_proj", row, None, position))
        out = []
        for slot, (row, state) in enumerate(zip(normed, states, strict=True)):
            position = positions[n_context + slot]
            queries = self._heads(f"{attention}.q_proj", row, f"{attention}.q_norm", position)
            seen = [k for k in range(len(keys)) if self._sees(i, n_context + slot, k)]
            mixed = torch.cat(self._attend(queries, keys, values, seen))
            out.append(self._mlp(state + self._linear(f"{attention}.o_proj", mixed), i))
        return out

    def _attend(self, queries: Any, keys: Any, values: Any, seen: list[int]) -> list[Tensor]:
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        mixed = []
        for head, query in enumerate(queries):
            scores = [
                float(query @ keys[k][head // group]) / math.sqrt(self.config.head_dim)
                for k in seen
            ]
            weights = [math.exp(score - max(scores)) for score in scores]
            total = sum(weights)
            pairs = zip(weights, seen, strict=True)
            mixed.append(sum(w / total * values[k][head // group] for w, k in pairs))
        return mixed

    def _mlp(self, state: Tensor, i: int) -> Tensor:
        row = self._norm(f"layers.{i}.post_attention_layernorm", state)
        gate = self._linear(f"layers.{i}.mlp.gate_proj", row)
        up = self._linear(f"layers.{i}.mlp.up_proj", row)
        silu = gate / (1 + (-gate).exp())
        return state + self._linear(f"layers.{i}.mlp.down_proj", silu * up)

    def forward(self, noise: Tensor, taps: Tensor, positions: list[int]) -> Tensor:
        """(B, H) of one sequence: noise (B, H), taps (S, T * Ht), S + B positions."""
        states = list(noise.double())
        for i in range(self.config.num_hidden_layers):
            states = self.layer(states, taps.double(), positions, i)
        return torch.stack([self._norm("norm", row) for row in states])


def assert_is_the_oracle(model: Any, output: Tensor, noise: Tensor, taps: Tensor, pos: Any) -> None:
    expected = Oracle(model).forward(noise, taps, pos.tolist())
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_is_the_definition(variant, is_causal, attention):
    model = make_drafter(attention, is_causal=is_causal, **VARIANTS[variant])
    noise, taps, positions = inputs_for(model, 9)
    output = whole(model, noise, taps, positions)
    assert_is_the_oracle(model, output[0], noise[0], taps[0], positions[0])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "yarn",
            "rope_theta": 1.5e5,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_embeddings_use_the_positions_given(rope, attention):
    model = make_drafter(attention, rope_parameters=rope)
    noise, taps, positions = inputs_for(model, 7)
    positions = positions + 150  # a prompt that was cut at its front
    output = whole(model, noise, taps, positions)
    assert_is_the_oracle(model, output[0], noise[0], taps[0], positions[0])


def test_rotary_embeddings_of_each_kind_differ():
    # Else the test above would not show that the kind is honoured.
    kinds = [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ]
    outputs = []
    for rope in kinds:
        model = make_drafter(rope_parameters=rope)
        outputs.append(whole(model, *inputs_for(model, 7)))
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fewer_slots_than_trained_and_no_context(variant):
    model = make_drafter("sdpa", **VARIANTS[variant])
    for n_context, n_block in ((0, BLOCK), (5, 2), (0, 1)):
        noise, taps, positions = inputs_for(model, n_context, n_block)
        output = whole(model, noise, taps, positions)
        assert_is_the_oracle(model, output[0], noise[0], taps[0], positions[0])


@settings(max_examples=25)
@given(
    variant=st.sampled_from(sorted(VARIANTS)),
    attention=st.sampled_from(["eager", "sdpa"]),
    cuts=st.lists(st.integers(0, 24), max_size=5),
    n_last=st.integers(0, 7),
)
def test_any_split_of_the_context_gives_the_same(variant, attention, cuts, n_last):
    """Pieces through extend_context, the last through forward, blocks drafted in between."""
    model = make_drafter(attention, **VARIANTS[variant])
    noise, taps, positions = inputs_for(model, 24 + n_last)
    expected = whole(model, noise, taps, positions)
    cache = model.new_cache()
    bounds = [0, *sorted(cuts), 24]
    with torch.no_grad():
        for k, (start, stop) in enumerate(pairwise(bounds)):
            piece, where = taps[:, start:stop], positions[:, start:stop]
            if k % 2:
                block = torch.arange(stop, stop + BLOCK)[None]
                model(noise + k, piece, torch.cat([where, block], dim=1), cache=cache)
            else:
                model.extend_context(piece, where, cache)
        output = whole(model, noise, taps[:, 24:], positions[:, 24:], cache=cache)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert cache.n_context == 24 + n_last


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_left_padding_in_a_batch_is_never_seen(variant, attention):
    model = make_drafter(attention, **VARIANTS[variant])
    long = inputs_for(model, 9)
    short = inputs_for(model, 6, seed=2)
    n_padding = 3
    noise = torch.cat([long[0], short[0]])
    garbage = torch.full((1, n_padding, long[1].shape[-1]), 7.0)
    taps = torch.cat([long[1], torch.cat([garbage, short[1]], dim=1)])
    position_ids = torch.cat([long[2], (long[2] - n_padding).clamp(min=0)])
    mask = torch.ones(2, 9 + BLOCK, dtype=torch.long)
    mask[1, :n_padding] = 0
    output = whole(model, noise, taps, position_ids, attention_mask=mask)
    for row, (n, t, p) in enumerate((long, short)):
        assert_is_the_oracle(model, output[row], n[0], t[0], p[0])


@pytest.mark.parametrize("variant", ["full", "mixed", "dflare"])
def test_left_padding_that_went_through_the_cache(variant):
    model = make_drafter("sdpa", **VARIANTS[variant])
    noise, taps, positions = inputs_for(model, 9)
    n_padding = 4
    garbage = torch.full((1, n_padding, taps.shape[-1]), 7.0)
    padded = torch.cat([garbage, taps], dim=1)
    position_ids = torch.cat([torch.zeros(1, n_padding, dtype=torch.long), positions], dim=1)
    mask = torch.ones(1, n_padding + 9 + BLOCK, dtype=torch.long)
    mask[:, :n_padding] = 0
    cache = model.new_cache()
    with torch.no_grad():
        model.extend_context(padded[:, :7], position_ids[:, :7], cache)
        output = whole(
            model, noise, padded[:, 7:], position_ids[:, 7:], attention_mask=mask, cache=cache
        )
    assert_is_the_oracle(model, output[0], noise[0], taps[0], positions[0])
