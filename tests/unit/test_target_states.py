from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from families.zoo import TEXT_TARGETS, VISION_TARGETS
from hf_dflash import DFlashConfig
from hf_dflash.target import draft_logits
from hf_dflash.target_states import run_target
from training_pairs import random_ids, training_target

LAYERS = [0, 2]
# peft 0.21 asks by a name that transformers 5.24 has deprecated.
PEFT_WARNING = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
TARGETS = TEXT_TARGETS | VISION_TARGETS


def documents_of(lengths: list[int]) -> list[list[int]]:
    return [random_ids(length, seed) for seed, length in enumerate(lengths)]


def packed(documents: list[list[int]], n_tokens: int, left: int = 0) -> Any:
    """One row: padding, the documents, padding."""
    ids, numbers = [7] * left, [0] * left
    for number, document in enumerate(documents, start=1):
        ids += document
        numbers += [number] * len(document)
    rest = n_tokens - len(ids)
    return torch.tensor(ids + [0] * rest), torch.tensor(numbers + [0] * rest)


@torch.no_grad()
def by_hidden_states(target: Any, document: list[int]) -> Any:
    """Taps and last hidden states the way transformers returns them."""
    output = target(torch.tensor([document]), output_hidden_states=True, use_cache=False)
    states = output.hidden_states
    return torch.cat([states[i + 1] for i in LAYERS], dim=-1)[0], states[-1][0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_are_run_as_if_alone(attention: str) -> None:
    target = training_target()
    target.set_attn_implementation(attention)
    documents = documents_of([5, 9, 3, 7])
    rows = [packed(documents[:3], 20, left=2), packed(documents[3:], 20)]
    ids, numbers = (torch.stack(parts) for parts in zip(*rows, strict=True))
    states = run_target(target, LAYERS, ids, numbers, keeps_last=True)
    places = [(0, 2), (0, 7), (0, 16), (1, 0)]
    for document, (row, start) in zip(documents, places, strict=True):
        taps, last = by_hidden_states(target, document)
        here = slice(start, start + len(document))
        torch.testing.assert_close(states.taps[row, here], taps, atol=1e-5, rtol=1e-5)
        assert states.last_hidden_states is not None
        got = states.last_hidden_states[row, here]
        torch.testing.assert_close(got, last, atol=1e-5, rtol=1e-5)
    assert bool(states.taps.isfinite().all())


def test_no_more_tokens_at_once_than_the_batch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    target = training_target()
    shapes = []
    forward = type(target.model).forward

    def recording(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(target.model), "forward", recording)
    ids, numbers = packed(documents_of([9, 2, 2, 2, 2, 1]), 20)
    run_target(target, LAYERS, ids[None], numbers[None])
    assert max(n * length for n, length in shapes) <= 20
    assert len(shapes) < 6


def test_nothing_but_padding() -> None:
    target = training_target()
    zeros = torch.zeros(2, 3, dtype=torch.long)
    states = run_target(target, LAYERS, zeros, zeros, keeps_last=True)
    assert states.taps.shape == (2, 3, 64)
    assert states.last_hidden_states is not None
    assert states.last_hidden_states.shape == (2, 3, 32)


@pytest.mark.filterwarnings(PEFT_WARNING)
def test_an_adapted_target_is_run_with_its_adapter() -> None:
    plain = training_target()
    documents = documents_of([6])
    before = by_hidden_states(plain, documents[0])[0]
    torch.manual_seed(0)
    adapted = get_peft_model(
        plain, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    ).eval()
    ids, numbers = packed(documents, 6)
    taps = run_target(adapted, LAYERS, ids[None], numbers[None]).taps[0]
    torch.testing.assert_close(taps, by_hidden_states(adapted, documents[0])[0])
    assert not torch.allclose(taps, before)


@pytest.mark.parametrize("family", TARGETS)
def test_every_family(family: str) -> None:
    """Two packed documents and padding, against one document alone."""
    target = TARGETS[family]()
    documents = documents_of([6, 4])
    ids, numbers = packed(documents, 13, left=1)
    got = run_target(target, LAYERS, ids[None], numbers[None]).taps[0]
    for document, start in zip(documents, (1, 7), strict=True):
        alone = torch.tensor([document])
        want = run_target(target, LAYERS, alone, torch.ones_like(alone)).taps[0]
        here = got[start : start + len(document)]
        torch.testing.assert_close(here, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", sorted(TARGETS.keys() - {"opt-narrow-embedding"}))
def test_the_teacher_of_distillation_is_the_target(family: str) -> None:
    """Its law is taken from the last hidden states by the drafter's own head: scales, soft cap."""
    target = TARGETS[family]()
    config = DFlashConfig.for_target(target.config, num_taps=2, mask_token_id=95)
    ids = torch.tensor(documents_of([6]))
    states = run_target(target, LAYERS, ids, torch.ones_like(ids), keeps_last=True)
    with torch.no_grad():
        got = draft_logits(target, states.last_hidden_states, config)
        torch.testing.assert_close(got, target(ids).logits, atol=1e-4, rtol=1e-4)
