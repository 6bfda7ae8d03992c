"""DFlare from a trained DFlash drafter: draft layers copied, the context's path fitted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_dflash import DFlashDraftModel
from hf_dflash.warm_start_dflare import init_from_dflash
from training_pairs import training_drafter, training_target


@pytest.fixture
def source() -> Any:
    return training_drafter(training_target()).eval()


def dflare(source: Any, **sizes: Any) -> Any:
    config = copy.deepcopy(source.config)
    config.architecture = "dflare"
    for name, value in sizes.items():
        setattr(config, name, value)
    torch.manual_seed(1)
    return DFlashDraftModel(config).eval()


def random_taps(source: Any, n_tokens: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    width = source.fc.weight.shape[1]
    return torch.randn(1, n_tokens, width, generator=generator)


def context_rows(drafter: Any, taps: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cos, sin = drafter.rotary_emb(taps, torch.arange(taps.shape[1])[None])
    features = drafter.fuse_context(taps)
    return [
        layer.self_attn.keys_values(states, states[:, :0], cos, sin)
        for layer, states in zip(drafter.layers, features, strict=True)
    ]


@torch.no_grad()
def test_a_context_of_one_tap_is_met_closely(source: Any) -> None:
    """What DFlare can express is found: the source looks at its second tap only."""
    width = source.config.target_hidden_size
    source.fc.weight[:, :width] = 0.0
    source.fc.weight[:, 2 * width :] = 0.0
    new = dflare(source)
    lost = init_from_dflash(new, source, random_taps(source))
    assert list(lost) == [f"layers.{i}" for i in range(len(new.layers))]
    assert max(lost.values()) < 0.1
    assert new.layer_fusion_weights.argmax(dim=1).tolist() == [1] * len(new.layers)
    taps = random_taps(source, 300)[:, 256:]  # not those that were fitted
    for (keys, values), (old_keys, old_values) in zip(
        context_rows(new, taps), context_rows(source, taps), strict=True
    ):
        for ours, theirs in ((keys, old_keys), (values, old_values)):
            assert torch.cosine_similarity(ours, theirs, dim=-1).mean() > 0.9


@torch.no_grad()
def test_draft_layers_are_copied_with_their_biases(source: Any) -> None:
    source = dflare(source, architecture="dflash", attention_bias=True)
    for parameter in source.parameters():
        parameter.add_(0.1)
    new = dflare(source)
    init_from_dflash(new, source, random_taps(source))
    weights, old = dict(new.named_parameters()), dict(source.named_parameters())
    shared = [name for name in weights if name in old and name != "hidden_norm.weight"]
    assert any("q_proj.bias" in name for name in shared)
    for name in shared:
        assert torch.equal(weights[name], old[name]), name
    for i in range(len(new.layers)):
        for kind in ("k", "v"):
            bias = weights[f"layers.{i}.self_attn.{kind}_proj_target.bias"]
            assert torch.equal(bias, old[f"layers.{i}.self_attn.{kind}_proj.bias"])


def test_what_does_not_fit_is_refused(source: Any) -> None:
    taps = random_taps(source)
    with pytest.raises(ValueError, match=r'must be of the architectures "dflare" and "dflash"'):
        init_from_dflash(source, source, taps)
    other = dflare(source, intermediate_size=2 * source.config.intermediate_size)
    with pytest.raises(ValueError, match=r"`drafter` must have the source's `intermediate_size`"):
        init_from_dflash(other, source, taps)
    with pytest.raises(ValueError, match=r"must be of at least \d+ tokens to fit"):
        init_from_dflash(dflare(source), source, taps[:, :8])
