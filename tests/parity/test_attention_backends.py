"""eager, sdpa, flex and flash attention give the same; what each is handed is what it must get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash_utils

from hf_dflash.attention_masks import BlockMasks
from parity.drafters import BLOCK, VARIANTS, inputs_for, make_drafter, whole

# Compiled, flex attention takes half a minute a shape on a CPU. What it computes is the same.
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    # Raised where transformers calls torch, and where torch imports its own compiler.
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]


class FlashKernels:
    """Stand-ins for flash-attn's two kernels, dense, with the semantics that it documents.

    Queries are the last of the keys (bottom-right alignment), windows reach `left` keys back and
    `right` ahead, both ends included, and a causal call looks at no key ahead.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> Tensor:
        """(N, S, heads, hd) each; returns (N, queries, heads, hd)."""
        assert dropout_p == 0.0
        assert not deterministic
        call = {"causal": causal, "window": window_size, "n_keys": k.shape[1], "varlen": False}
        self.calls.append(call)
        return self._attend(q, k, v, softmax_scale, causal, window_size)

    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> Tensor:
        """Sequences of several lengths, one after another: (total, heads, hd)."""
        assert dropout_p == 0.0
        assert not deterministic
        assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
        assert int(cu_seqlens_k.diff().max()) == max_seqlen_k
        self.calls.append({"causal": causal, "window": window_size, "varlen": True})
        out = []
        for n in range(len(cu_seqlens_q) - 1):
            queries = slice(int(cu_seqlens_q[n]), int(cu_seqlens_q[n + 1]))
            keys = slice(int(cu_seqlens_k[n]), int(cu_seqlens_k[n + 1]))
            args = (q[None, queries], k[None, keys], v[None, keys])
            out.append(self._attend(*args, softmax_scale, causal, window_size)[0])
        return torch.cat(out)

    @staticmethod
    def _attend(q: Any, k: Any, v: Any, scale: Any, causal: bool, window: Any) -> Tensor:
        groups = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
        n_queries, n_keys = q.shape[1], k.shape[1]
        where = torch.arange(n_queries)[:, None] + n_keys - n_queries
        ahead = torch.arange(n_keys)[None] - where
        left, right = window
        seen = torch.ones(n_queries, n_keys, dtype=torch.bool)
        if left >= 0:
            seen &= ahead >= -left
        if right >= 0:
            seen &= ahead <= right
        if causal:
            seen &= ahead <= 0
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return torch.einsum("nhqk,nkhd->nqhd", weights, v)


@pytest.fixture
def flash_kernels(monkeypatch: pytest.MonkeyPatch) -> FlashKernels:
    """Transformers' own flash-attention code, over stand-ins for the kernels."""
    kernels = FlashKernels()
    replacements = {
        "_loaded_implementation": "flash_attention_2",
        "_flash_fn": kernels.dense,
        "_flash_varlen_fn": kernels.varlen,
        "_pad_fn": flash_utils._pad_input,
        "_unpad_fn": flash_utils._unpad_input,
        "_process_flash_kwargs_fn": flash_utils._lazy_define_process_function(kernels.varlen),
    }
    for name, value in replacements.items():
        monkeypatch.setattr(flash_utils, name, value)
    return kernels


@pytest.fixture(params=["sdpa", "flex_attention", "flash_attention_2"])
def backend(request: pytest.FixtureRequest, flash_kernels: FlashKernels) -> Any:
    """An attention backend that works here."""
    del flash_kernels
    with torch.compiler.set_stance("force_eager"):
        yield request.param


def drafter_with(attention: str, **overrides: Any) -> Any:
    """A drafter whose backend is set past transformers' check that its package is installed."""
    model = make_drafter("eager", **overrides)
    model.config._attn_implementation = attention
    assert {layer.self_attn.config._attn_implementation for layer in model.layers} == {attention}
    return model


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_backends_agree(backend, variant, is_causal):
    model = drafter_with(backend, is_causal=is_causal, **VARIANTS[variant])
    reference = make_drafter("eager", is_causal=is_causal, **VARIANTS[variant])
    for n_context in (0, 2, 17):
        inputs = inputs_for(model, n_context)
        torch.testing.assert_close(
            whole(model, *inputs), whole(reference, *inputs), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_backends_agree_over_a_cache(backend, variant):
    model = drafter_with(backend, **VARIANTS[variant])
    reference = make_drafter("eager", **VARIANTS[variant])
    noise, taps, positions = inputs_for(model, 20)
    expected = whole(reference, noise, taps, positions)
    cache = model.new_cache()
    with torch.no_grad():
        model.extend_context(taps[:, :11], positions[:, :11], cache)
        model(noise, taps[:, 11:14], positions[:, 11 : 14 + BLOCK], cache=cache)
    output = whole(model, noise, taps[:, 14:], positions[:, 14:], cache=cache)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("variant", ["full", "mixed", "mixed-wide", "dflare-mixed-bias"])
def test_backends_agree_on_a_left_padded_batch(backend, variant, is_causal):
    model = drafter_with(backend, is_causal=is_causal, **VARIANTS[variant])
    reference = make_drafter("eager", is_causal=is_causal, **VARIANTS[variant])
    noise, taps, positions = (torch.cat([x, x.flip(1)]) for x in inputs_for(model, 9))
    positions[1] = torch.tensor([0, 0, 0, *range(6 + BLOCK)])
    mask = torch.ones(2, 9 + BLOCK, dtype=torch.long)
    mask[1, :3] = 0
    torch.testing.assert_close(
        whole(model, noise, taps, positions, attention_mask=mask),
        whole(reference, noise, taps, positions, attention_mask=mask),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("variant", ["full", "mixed", "mixed-wide"])
def test_flash_attention_is_told_causality_and_window(flash_kernels, variant, is_causal):
    model = drafter_with("flash_attention_2", is_causal=is_causal, **VARIANTS[variant])
    whole(model, *inputs_for(model, 9))
    assert len(flash_kernels.calls) == model.config.num_hidden_layers
    for i, call in enumerate(flash_kernels.calls):
        window = model.config.layer_window(i)
        narrow = window is not None and window < 9 + BLOCK
        assert call == {
            "causal": model.config.layer_is_causal(i),
            "window": (window - 1, window - 1) if narrow else (-1, -1),
            "n_keys": 9 + BLOCK,
            "varlen": False,  # no mask without padding
        }


def test_flash_attention_gets_padding_as_lengths(flash_kernels):
    model = drafter_with("flash_attention_2", **VARIANTS["mixed"])
    mask = torch.ones(1, 9 + BLOCK, dtype=torch.long)
    whole(model, *inputs_for(model, 9), attention_mask=mask)
    assert not any(call["varlen"] for call in flash_kernels.calls)
    flash_kernels.calls.clear()
    mask[:, :2] = 0
    whole(model, *inputs_for(model, 9), attention_mask=mask)
    assert all(call["varlen"] for call in flash_kernels.calls)


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sdpa_is_never_left_to_align_causality_itself(monkeypatch, variant, is_causal):
    # Its own causal mask is top-left aligned: with a context, slot 0 would see one key only.
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    model = make_drafter("sdpa", is_causal=is_causal, **VARIANTS[variant])
    for n_context in (0, 9):
        whole(model, *inputs_for(model, n_context))
    assert len(calls) == 2 * model.config.num_hidden_layers
    assert not any(call.get("is_causal") for call in calls)


def test_masks_are_left_out_where_everything_is_seen():
    # A mask keeps sdpa from its fastest kernels, and costs time to build.
    for variant, attention_masked in (("full", []), ("mixed-wide", [0, 2]), ("mixed", [0, 2])):
        model = make_drafter("sdpa", **VARIANTS[variant])
        masks = BlockMasks(model.config, torch.zeros(1, BLOCK, 16), torch.ones(1, 9 + BLOCK))
        made = [masks.for_layer(layer.self_attn, 9 + BLOCK)[0].mask for layer in model.layers]
        assert [i for i, mask in enumerate(made) if mask is not None] == attention_masked


def test_flash_attention_refuses_a_mask_that_it_would_not_apply():
    class Rule:
        def visible(self, *_: Any) -> Any:
            raise AssertionError

    model = drafter_with("flash_attention_2")
    with pytest.raises(NotImplementedError, match="'flash_attention_2' cannot train several"):
        whole(model, *inputs_for(model, 9), attention_mask=Rule())
