"""A drafter converted to transformers' own form drafts the same, loaded by transformers alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModel
from transformers.cache_utils import DFlashCache

from hf_dflash.convert import convert
from hf_dflash.outputs_dflash import CACHE_NAME
from pairs import random_drafter, tiny_target
from parity.drafters import whole

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = {"layer_types": [SLIDING, FULL], "sliding_window": 32, "is_causal": False}


def converted(drafter: Any, folder: Any) -> Any:
    drafter.save_pretrained(folder / "ours")
    convert(folder / "ours", folder / "native", to="native")
    native = AutoModel.from_pretrained(folder / "native")
    assert type(native).__name__ == "MuseGlimmerAssistantModel"
    return native.eval()


@pytest.mark.parametrize("overrides", [{}, WINDOWS], ids=["full", "windows"])
def test_drafts_are_equal(overrides, tmp_path):
    target = tiny_target()
    ours = random_drafter(target, num_target_layers=4, **overrides)
    native = converted(ours, tmp_path)
    block = ours.config.block_size
    head = target.get_output_embeddings()
    generator = torch.Generator().manual_seed(7)
    taps = torch.randn(1, 9, 2 * 32, generator=generator)
    noise = torch.randn(1, block, 32, generator=generator)
    positions = torch.arange(9 + block)[None]
    cache = DFlashCache(config=native.config)
    cache.set_previous_accepted_tokens(9)
    with torch.no_grad():
        theirs = native(noise, taps, position_ids=positions, **{CACHE_NAME: cache})
        expected = head(whole(ours, noise, taps, positions))
        drafts = head(theirs.last_hidden_state)
    torch.testing.assert_close(drafts, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(drafts.argmax(-1), expected.argmax(-1))
    assert len(drafts.argmax(-1).unique()) > 2


def test_the_stock_loop_drafts_the_same_with_either(tmp_path, monkeypatch):
    target = tiny_target()
    ours = random_drafter(target, num_target_layers=4)
    native = converted(ours, tmp_path)
    ids = torch.arange(5, 17)[None]
    drafted = []
    for drafter in (ours, native):
        states = []
        forward = drafter.forward

        def record(*args: Any, forward: Any = forward, states: Any = states, **options: Any) -> Any:
            output = forward(*args, **options)
            states.append(output.last_hidden_state)
            return output

        monkeypatch.setattr(drafter, "forward", record)
        options = {"assistant_model": drafter, "speculation_type": "dflash"}
        tokens = target.generate(ids, max_new_tokens=24, do_sample=False, **options)
        drafted.append((tokens, states))
    (tokens, states), (native_tokens, native_states) = drafted
    assert torch.equal(tokens, native_tokens)
    assert len(states) > 3
    for one, other in zip(states, native_states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
