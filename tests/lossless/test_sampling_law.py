"""Sampled outputs follow the target's law, which is enumerated exactly.

Seeds are fixed, so a run repeats itself. A change of the order in which random numbers are drawn
draws every cell anew, and each then has a chance of 1 in 100 to fail: give such a cell ten times
the samples and another seed before believing it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from hf_dflash import chain_decoding, drafting
from hf_dflash.drafting import Proposal
from hf_dflash.verification import DraftLaw, residual
from laws import (
    PROMPT,
    NearTarget,
    Tokens,
    call_processors,
    law_target,
    output_law,
    p_value,
    prefix_logits,
)
from pairs import random_drafter

N_SAMPLES = 500


class LastTokenBias(LogitsProcessor):
    """A user's own processor, a function of the last token and the length."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        bias = torch.zeros_like(scores)
        bias[:, (int(input_ids[0, -1]) + input_ids.shape[1]) % scores.shape[1]] = 1.5
        return scores + bias


@dataclass(frozen=True)
class Cell:
    """One way to call `generate`, and the drafter to do it with."""

    name: str
    call: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)  # of the drafter's generation config
    block_size: int = 4
    n_new: int = 4
    noise: float | None = 1.0  # of the drafter's logits; None: a random drafter
    seed: int = 0

    @property
    def arguments(self) -> dict[str, Any]:
        options = {"do_sample": True, "max_new_tokens": self.n_new, "top_k": 0, **self.call}
        if self.name == "custom":
            options["logits_processor"] = [LastTokenBias()]
        return options


def odd_after_odd(_: int, ids: Tensor) -> list[int]:
    """For `prefix_allowed_tokens_fn`."""
    return [0, 1, 3] if int(ids[-1]) % 2 else [1, 2, 3, 4]


CELLS = [
    Cell("plain"),
    Cell("plain, five tokens", n_new=5, block_size=6, noise=0.5, seed=1),
    Cell("plain, random drafter", noise=None, seed=2),
    Cell("top-p, top-k", {"temperature": 0.7, "top_p": 0.8, "top_k": 4}),
    Cell("hot, top-p, top-k", {"temperature": 1.4, "top_p": 0.9, "top_k": 3}, n_new=5, seed=1),
    Cell("top-k, random drafter", {"temperature": 1.3, "top_k": 3}, noise=None),
    Cell("repetition penalty", {"repetition_penalty": 1.6}),
    Cell("min-p", {"min_p": 0.1, "temperature": 1.5}),
    Cell("typical", {"typical_p": 0.7, "temperature": 1.2}),
    Cell("epsilon, eta", {"epsilon_cutoff": 0.05, "eta_cutoff": 0.1, "renormalize_logits": True}),
    Cell("no repeat, eos", {"no_repeat_ngram_size": 2, "eos_token_id": [4, 0]}),
    Cell(
        "eos, length, bias",
        {
            "eos_token_id": 2,
            "min_new_tokens": 2,
            "exponential_decay_length_penalty": (1, 1.5),
            "sequence_bias": [[[3], 0.7], [[1, 2], -1.0]],
        },
    ),
    Cell("bad words", {"bad_words_ids": [[1, 3], [4]], "top_k": 3, "temperature": 1.5}),
    Cell("allowed prefixes", {"prefix_allowed_tokens_fn": odd_after_odd, "temperature": 1.3}),
    Cell("custom"),
    Cell("argmax drafts", {"top_k": 4}, {"temperature": 0.0}),
    Cell("argmax drafts, penalty", {"repetition_penalty": 1.4}, {"temperature": 0.0}, seed=1),
    Cell("cold drafter", {"top_k": 4}, {"temperature": 0.5}),
    Cell("hot drafter", {"repetition_penalty": 1.3}, {"temperature": 2.0}),
    Cell("confident", {}, {"assistant_confidence_threshold": 0.3}, noise=0.3),
    Cell("confident, top-k", {"top_k": 3}, {"assistant_confidence_threshold": 0.6}, noise=2.0),
    Cell("one draft", {"top_p": 0.9}, {"num_assistant_tokens": 1}),
    Cell("block of two", {"temperature": 1.2}, block_size=2),
    Cell("block of three", {"top_k": 4}, block_size=3, n_new=5),
]


@functools.cache
def enumerated(n_new: int) -> Any:
    target = law_target()
    return target, prefix_logits(target, n_new)


def drafter_of(cell: Cell) -> Any:
    target, logits = enumerated(cell.n_new)
    if cell.noise is None:
        drafter = random_drafter(target, cell.block_size)
    else:
        drafter = NearTarget(target, logits, cell.noise, cell.block_size)
    for name, value in cell.policy.items():
        setattr(drafter.generation_config, name, value)
    return drafter


def sample(cell: Cell, n_samples: int) -> tuple[list[Tokens], int, int]:
    """Outputs, and how many drafts were accepted and how many cycles ended with a rejection."""
    target, drafter = enumerated(cell.n_new)[0], drafter_of(cell)
    mask = torch.ones_like(PROMPT)
    outputs, n_accepted, n_rejections = [], 0, 0
    torch.manual_seed(cell.seed)
    for _ in range(n_samples):
        output = target.generate(
            PROMPT,
            attention_mask=mask,
            assistant_model=drafter,
            return_dict_in_generate=True,
            **cell.arguments,
        )
        outputs.append(tuple(output.sequences[0, PROMPT.shape[1] :].tolist()))
        cycles = list(zip(output.statistics.n_accepted, output.statistics.n_drafted, strict=True))
        n_accepted += sum(accepted for accepted, _ in cycles)
        # The last cycle may have been cut by a stop.
        n_rejections += sum(accepted < drafted for accepted, drafted in cycles[:-1])
    return outputs, n_accepted, n_rejections


def law_of(cell: Cell) -> dict[Tokens, float]:
    target, logits = enumerated(cell.n_new)
    stops = cell.call.get("eos_token_id", [])
    with torch.no_grad():
        processors = call_processors(target, cell.arguments)
    stops = [stops] if isinstance(stops, int) else stops
    return output_law(logits, processors, cell.n_new, stops)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_samples_follow_the_exactly_enumerated_law(cell: Cell) -> None:
    law = law_of(cell)
    assert sum(law.values()) == pytest.approx(1)
    outputs, n_accepted, n_rejections = sample(cell, N_SAMPLES)
    assert n_accepted > N_SAMPLES / 20
    assert n_rejections > N_SAMPLES / 20
    assert p_value(outputs, law) > 0.01


def accept_always(p: Tensor, draft_id: int | None, *_: Any) -> tuple[int, bool]:
    return (int(torch.multinomial(p, 1)), False) if draft_id is None else (draft_id, True)


def replace_from_p(p: Tensor, draft_id: int | None, law: Any, row: int, *_: Any) -> Any:
    if draft_id is not None and torch.rand(()) * law.draft_probs[row] < p[draft_id]:
        return draft_id, True
    return int(torch.multinomial(p, 1)), False


def accept_without_q(p: Tensor, draft_id: int | None, law: Any, row: int, *_: Any) -> Any:
    if draft_id is not None and torch.rand(()) < p[draft_id]:
        return draft_id, True
    left_over = p if draft_id is None else residual(p, law.dense(row, len(p)))
    return int(torch.multinomial(left_over, 1)), False


@pytest.mark.parametrize("biased", [accept_always, replace_from_p, accept_without_q])
def test_the_same_samples_would_show_a_biased_verification(
    biased: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_decoding, "sample_or_accept", biased)
    cell = Cell("plain", noise=2.0)
    outputs, *_ = sample(cell, N_SAMPLES)
    assert p_value(outputs, law_of(cell)) < 1e-6


def drop_unlikely_draws(proposal: Proposal, _: Tensor, threshold: float) -> Proposal:
    law = proposal.law
    n_kept = int((law.draft_probs >= threshold).cumprod(dim=0).sum())
    kept = DraftLaw(law.token_ids, law.probs[:n_kept], law.draft_probs[:n_kept])
    return Proposal(proposal.draft_ids[:n_kept], kept)


def test_the_same_samples_would_show_drafts_that_were_dropped_for_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting, "_confident_part", drop_unlikely_draws)
    cell = next(cell for cell in CELLS if cell.name == "confident")
    outputs, *_ = sample(cell, N_SAMPLES)
    assert p_value(outputs, law_of(cell)) < 1e-6


# Randomness: one seed, one output; none where nothing is drawn.


def generate(cell: Cell, seed: int, **options: Any) -> Any:
    target, drafter = enumerated(cell.n_new)[0], drafter_of(cell)
    torch.manual_seed(seed)
    call = {**cell.arguments, "max_new_tokens": 4, **options}
    return target.generate(
        PROMPT, assistant_model=drafter, return_dict_in_generate=True, output_scores=True, **call
    )


@pytest.mark.parametrize("cell", [CELLS[0], CELLS[3], CELLS[6], CELLS[15], CELLS[19]], ids=str)
def test_one_seed_gives_one_output_and_many_seeds_give_many(cell: Cell) -> None:
    first, second = ([generate(cell, seed) for seed in range(20)] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.sequences, other.sequences)
        assert one.statistics == other.statistics
        for scores, again in zip(one.scores, other.scores, strict=True):
            assert torch.equal(scores, again)
    assert len({tuple(output.sequences[0].tolist()) for output in first}) > 5
    assert sum(sum(output.statistics.n_accepted) for output in first) > 5


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_sampling_from_one_token_is_greedy_decoding(penalty: float) -> None:
    cell = Cell("top-1", {"top_k": 1, "repetition_penalty": penalty}, noise=0.3)
    target = enumerated(cell.n_new)[0]
    greedy = target.generate(PROMPT, max_new_tokens=4, do_sample=False, repetition_penalty=penalty)
    outputs = [generate(cell, seed) for seed in range(5)]
    assert all(torch.equal(output.sequences, greedy) for output in outputs)
    n_accepted = [sum(output.statistics.n_accepted) for output in outputs]
    assert max(n_accepted) > 0


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_decoding_draws_no_random_number(penalty: float) -> None:
    cell = Cell("greedy", {"repetition_penalty": penalty, "top_k": None}, noise=0.3)
    target, drafter = enumerated(cell.n_new)[0], drafter_of(cell)
    call = {**cell.arguments, "do_sample": False}
    state = torch.get_rng_state()
    drafted = target.generate(PROMPT, assistant_model=drafter, return_dict_in_generate=True, **call)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(drafted.sequences, target.generate(PROMPT, **call))
    assert sum(drafted.statistics.n_accepted) > 0
