"""Transformers' own loops as an independent oracle: our drafter, and our generator, inside them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from families.zoo import TEXT_TARGETS, prompt
from hf_dflash import DFlashCandidateGenerator
from hf_dflash.generation_dflash import install_dispatch, remove_dispatch
from pairs import ScriptedDrafter, random_drafter

FULL, SLIDING = "full_attention", "sliding_attention"
N_RIGHT = (2, 0, 7, 5, 1)
BLOCK = 8
LAYERS = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": [SLIDING] * 2, "sliding_window": 6},
    "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 12, "is_causal": False},
    "dflare": {"architecture": "dflare"},
}


@functools.cache
def target_of(family: str) -> Any:
    return TEXT_TARGETS[family]()


def inputs_of(n_tokens: int, n_padding: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.cat([torch.zeros(1, n_padding, dtype=torch.long), prompt(n_tokens)], dim=1)
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) >= n_padding)[None] * 1}


def scripted_drafter(target: Any, inputs: Any, n_new: int, **overrides: Any) -> ScriptedDrafter:
    plain = target.generate(**inputs, max_new_tokens=n_new, do_sample=False)
    n_padding = int((inputs["attention_mask"] == 0).sum())
    script = plain[0, n_padding:].tolist()
    n_right = N_RIGHT
    return ScriptedDrafter(target, script, lambda c: n_right[c % 5], BLOCK, **overrides)


class Watch:
    """Counts the target's forwards and keeps what the drafter's final norm puts out."""

    def __init__(self, target: Any, drafter: Any) -> None:
        self.n_forwards = 0  # of the target
        self.blocks: list[torch.Tensor] = []
        self._hooks = [
            target.register_forward_pre_hook(self._count),
            drafter.norm.register_forward_hook(lambda _m, _a, out: self.blocks.append(out)),
        ]

    def _count(self, *_: object) -> None:
        self.n_forwards += 1

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def run(target: Any, drafter: Any, inputs: Any, n_new: int, **options: Any) -> Any:
    with Watch(target, drafter) as watch:
        options = {"do_sample": False, **options}
        out = target.generate(**inputs, assistant_model=drafter, max_new_tokens=n_new, **options)
    if hasattr(drafter, "n_calls"):
        drafter.n_calls = 0
    return out, watch


def assert_same_blocks(ours: Watch, stock: Watch) -> None:
    """What the drafter made of its two caches, in every cycle that drafts a whole block."""
    assert len(ours.blocks) == len(stock.blocks)
    whole = [(a, b) for a, b in zip(ours.blocks, stock.blocks, strict=True) if a.shape == b.shape]
    assert len(whole) > 3
    for our_block, stock_block in whole:
        torch.testing.assert_close(our_block, stock_block, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("n_prompt", "n_padding"), [(1, 0), (5, 0), (26, 0), (9, 4)])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3", "gpt_oss", "gpt2"])
def test_the_stock_block_loop_takes_the_same_steps(family, n_prompt, n_padding):
    target, inputs, n_new = target_of(family), inputs_of(n_prompt, n_padding), 36
    # The stock loop embeds as the target does; ours as the drafter's config says.
    scale = getattr(target.get_input_embeddings(), "scalar_embed_scale", 1.0)
    drafter = scripted_drafter(target, inputs, n_new, input_embedding_scale=scale)
    plain = target.generate(**inputs, max_new_tokens=n_new, do_sample=False)
    stock, stock_watch = run(target, drafter, inputs, n_new, speculation_type="dflash")
    ours, our_watch = run(target, drafter, inputs, n_new, return_dict_in_generate=True)
    assert stock.tolist() == plain.tolist()
    assert ours.sequences.tolist() == plain.tolist()
    # As many forwards of both models, so as many drafts accepted in each cycle.
    assert ours.statistics.target_forwards == stock_watch.n_forwards == our_watch.n_forwards
    assert ours.statistics.draft_forwards == len(stock_watch.blocks)
    assert 0 < sum(ours.statistics.n_accepted) < sum(ours.statistics.n_drafted)
    assert ours.statistics.target_forwards < n_new
    assert_same_blocks(our_watch, stock_watch)


@pytest.mark.parametrize("n_padding", [0, 4])
@pytest.mark.parametrize("layers", LAYERS)
def test_every_kind_of_draft_layer_gives_the_same_blocks_in_both(layers, n_padding):
    target, inputs, n_new = target_of("qwen3"), inputs_of(21, n_padding), 40
    drafter = scripted_drafter(target, inputs, n_new, **LAYERS[layers])
    stock, stock_watch = run(target, drafter, inputs, n_new, speculation_type="dflash")
    ours, our_watch = run(target, drafter, inputs, n_new)
    assert ours.tolist() == stock.tolist()
    assert_same_blocks(our_watch, stock_watch)


@pytest.mark.parametrize("layers", LAYERS)
def test_a_random_drafter_in_the_stock_block_loop(layers):
    target, inputs = target_of("qwen3"), inputs_of(11)
    drafter = random_drafter(target, BLOCK, **LAYERS[layers])
    plain = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    stock, stock_watch = run(target, drafter, inputs, 20, speculation_type="dflash")
    ours, our_watch = run(target, drafter, inputs, 20, return_dict_in_generate=True)
    assert stock.tolist() == ours.sequences.tolist() == plain.tolist()
    assert sum(ours.statistics.n_drafted) > sum(ours.statistics.n_accepted)
    assert_same_blocks(our_watch, stock_watch)


def test_the_stock_block_loop_samples_with_our_drafter():
    target, inputs = target_of("qwen3"), inputs_of(11)
    drafter = scripted_drafter(target, inputs, 24)
    torch.manual_seed(0)
    options = {"speculation_type": "dflash", "do_sample": True, "top_k": 1}
    sampled, watch = run(target, drafter, inputs, 24, **options)
    plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert sampled.tolist() == plain.tolist()
    assert watch.n_forwards < 24


@contextmanager
def our_generator_in_the_stock_loop(target: Any, drafter: Any) -> Iterator[list[Any]]:
    """Transformers' own assisted loop, which asks the target for a candidate generator."""
    made = []

    def get_candidate_generator(
        generation_config: Any, logits_processor: Any, **_: Any
    ) -> DFlashCandidateGenerator:
        generator = DFlashCandidateGenerator(
            drafter,
            target,
            logits_processor=logits_processor,
            do_sample=generation_config.do_sample,
        )
        made.append(generator)
        return generator

    remove_dispatch()
    target._get_candidate_generator = get_candidate_generator
    try:
        yield made
    finally:
        del target._get_candidate_generator
        install_dispatch()


@pytest.mark.parametrize(("n_prompt", "n_padding"), [(1, 0), (5, 0), (26, 0), (9, 4)])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3", "gpt2"])
def test_our_generator_inside_the_stock_assisted_loop(family, n_prompt, n_padding):
    target, inputs, n_new = target_of(family), inputs_of(n_prompt, n_padding), 36
    drafter = scripted_drafter(target, inputs, n_new)
    plain = target.generate(**inputs, max_new_tokens=n_new, do_sample=False)
    with our_generator_in_the_stock_loop(target, drafter) as made:
        stock, watch = run(target, drafter, inputs, n_new)
    assert stock.tolist() == plain.tolist()
    assert len(made) == 1
    ours, our_watch = run(target, drafter, inputs, n_new, return_dict_in_generate=True)
    assert 0 < sum(ours.statistics.n_accepted) < sum(ours.statistics.n_drafted)
    assert watch.n_forwards == ours.statistics.target_forwards < n_new
    assert_same_blocks(our_watch, watch)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_k": 5, "temperature": 1.2}, {}])
def test_our_generator_samples_inside_the_stock_assisted_loop(options):
    target, inputs, n_new = target_of("qwen3"), inputs_of(9), 24
    drafter = scripted_drafter(target, inputs, n_new)
    torch.manual_seed(3)
    with our_generator_in_the_stock_loop(target, drafter):
        sampled, _ = run(target, drafter, inputs, n_new, do_sample=True, **options)
    assert sampled.shape == (1, 9 + n_new)
    logits = target(sampled).logits[0, 8:-1]
    rank = (logits > logits.gather(1, sampled[0, 9:, None])).sum(dim=1)
    assert int(rank.max()) < options.get("top_k", 96)


def test_our_generator_tells_when_hidden_states_are_missing():
    target, inputs = target_of("qwen3"), inputs_of(9)
    generator = DFlashCandidateGenerator(random_drafter(target), target)
    ids = inputs["input_ids"]
    assert generator.get_candidates(ids, is_first_iteration=True) == (ids, None)
    with pytest.raises(ValueError, match="`model_outputs` must hold the hidden states"):
        generator.get_candidates(ids, model_outputs=target(ids))
