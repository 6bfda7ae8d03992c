"""What tests of training share: tiny pairs, rows of them, and a batch's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_dflash.collator import DFlashCollator, EpochRows
from hf_dflash.drafting import DFlashCandidateGenerator
from hf_dflash.target import TargetTaps
from hf_dflash.training_arguments import DFlashTrainingArguments
from hf_dflash.training_step import TrainingStep
from pairs import random_drafter, tiny_target

FULL, SLIDING = "full_attention", "sliding_attention"
BLOCK = 4
TOLERANCE = 1e-5  # of logits in training and in decoding
#: Every kind of draft layer; windows shorter than a sequence and a block, and longer.
DRAFTERS = {
    "dflash": {},
    "dflare": {"architecture": "dflare"},
    "sliding": {"layer_types": [SLIDING] * 2, "sliding_window": 5},
    "sliding, both ways": {
        "layer_types": [SLIDING] * 2,
        "sliding_window": 3,
        "is_causal": False,
    },
    "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 6},
    "dflare, mixed": {
        "architecture": "dflare",
        "layer_types": [FULL, SLIDING],
        "sliding_window": 4,
    },
    "causal": {"is_causal": True},
    "scaled": {
        "input_embedding_scale": 3.0,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 4.0,
    },
}


def training_target(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny target that never writes its last token, the drafter's mask."""
    target = tiny_target(seed)
    target.to(dtype)
    target.lm_head.weight.data[-1] = 0.0
    return target


def training_drafter(target: Any, kind: str = "dflash", **overrides: Any) -> Any:
    """A drafter of any kind with weights wide enough that every input matters."""
    drafter = random_drafter(target, **{"block_size": BLOCK, **DRAFTERS[kind], **overrides})
    generator = torch.Generator().manual_seed(3)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.2 * noise + (1.0 if parameter.ndim == 1 else 0.0)
    return drafter.to(target.dtype)


def random_ids(n_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 90, (n_tokens,), generator=generator).tolist()


def row_of(ids: Sequence[int], n_prompt: int = 3, **columns: Any) -> dict[str, Any]:
    mask = [0] * n_prompt + [1] * (len(ids) - n_prompt)
    return {"input_ids": list(ids), "loss_mask": mask, **columns}


def batch_of(
    rows: Sequence[dict[str, Any]], n_anchors: int = 64, keeps_slots: bool = False
) -> dict[str, Tensor]:
    """A batch with every valid anchor."""
    numbered = EpochRows(list(rows))
    collator = DFlashCollator(BLOCK, n_anchors, keeps_slots=keeps_slots)
    return collator([numbered[i] for i in range(len(rows))])


def step_of(target: Any, drafter: Any, **options: Any) -> TrainingStep:
    args = DFlashTrainingArguments(output_dir="unused", use_cpu=True, report_to=[], **options)
    return TrainingStep(target, drafter.config, args)


def block_logits(target: Any, drafter: Any, batch: dict[str, Tensor]) -> Tensor:
    """Logits that training computes for every slot of every block: (N, A, B, V)."""
    step = step_of(target, drafter)
    with torch.no_grad():
        taps = step.target_states(batch).taps
        hidden = step.hidden_states(drafter, batch, taps)
        return step.head(hidden).unflatten(1, (-1, BLOCK))


def decoded_logits(target: Any, drafter: Any, document: list[int]) -> dict[int, Tensor]:
    """What decoding would draft after every prefix (K, V), by the place of the anchor.

    The context grows from anchor to anchor, as in decoding, and each piece of it comes from a
    forward of the target over that prefix and no more.
    """
    generator = DFlashCandidateGenerator(drafter, target)
    drafts, n_context = {}, 0
    for anchor in range(3, len(document) - 1):
        prefix = torch.tensor([document[:anchor]])
        with TargetTaps(target, drafter.config.target_layer_ids) as taps, taps.recording():
            target(prefix)
            rows = [tap[:, n_context:] for tap in taps.take()]
        generator.add_context(rows, torch.arange(n_context, anchor)[None])
        n_context = anchor
        anchor_id = torch.tensor([[document[anchor]]])
        drafts[anchor] = generator._draft(anchor_id, anchor, BLOCK - 1)
    return drafts


def assert_same_as_decoding(
    target: Any,
    drafter: Any,
    rows: list[Any],
    documents: list[list[int]],
    tolerance: float = TOLERANCE,
) -> None:
    """Compare every anchor of ``rows`` to decoding ``documents``, their documents in order."""
    batch = batch_of(rows)
    logits = block_logits(target, drafter, batch)
    n_compared = 0
    remaining = iter(documents)
    for n in range(len(rows)):
        for number in range(1, int(batch["document_ids"][n].max()) + 1):
            with torch.no_grad():
                expected = decoded_logits(target, drafter, next(remaining))
            start = int((batch["document_ids"][n] == number).nonzero()[0])
            for anchor, want in expected.items():
                slot = batch["anchors"][n].tolist().index(start + anchor)
                got = logits[n, slot, 1:]
                torch.testing.assert_close(got, want, atol=tolerance, rtol=TOLERANCE)
                n_compared += 1
    assert next(remaining, None) is None
    assert n_compared == int((batch["anchors"] >= 0).sum()) > 0


def generated_rows(target: Any, n_rows: int, n_prompt: int = 4, n_new: int = 24) -> list[Any]:
    """Prompts and the target's own greedy answers."""
    prompts = torch.tensor([random_ids(n_prompt, seed) for seed in range(n_rows)])
    output = target.generate(prompts, max_new_tokens=n_new, do_sample=False)
    return [row_of(ids, n_prompt) for ids in output.tolist()]


# Torch 2.13 cannot compile this mask for CPUs (its C++ does not build), and says so of the rest.
UNCOMPILED_WARNING = "ignore:flex_attention called without torch.compile:UserWarning"


def _uncompiled_flex(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
) -> Any:
    output = flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2), None


def _uncompiled_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any, device: Any, **_: Any
) -> Any:
    return create_block_mask(mask_function, batch_size, None, q_length, kv_length, device)


def leave_flex_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "flex_attention" run where it cannot be compiled."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flex_attention", _uncompiled_flex)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "flex_attention", _uncompiled_mask)
