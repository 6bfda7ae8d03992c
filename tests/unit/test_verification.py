"""Verification: examples, edges and errors, and the law of whole blocks at many samples."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dflash.verification import DraftLaw, residual, sample_or_accept, verify_greedy
from laws import p_value

DRAFTS = torch.tensor([5, 6, 7])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense_law(*rows: list[float], drafts: list[int]) -> DraftLaw:
    probs = torch.tensor(rows)
    return DraftLaw(None, probs, probs[torch.arange(len(rows)), drafts])


@pytest.mark.parametrize(
    ("choices", "stops", "emitted", "n_accepted", "stopped"),
    [
        ([5, 6, 7, 8], None, [5, 6, 7, 8], 3, False),
        ([9, 6, 7, 8], None, [9], 0, False),
        ([5, 6, 9, 8], [8], [5, 6, 9], 2, False),  # the stop is beyond the rejection
        ([5, 6, 7, 8], [6], [5, 6], 2, True),  # a draft stops
        ([5, 6, 9, 8], [9], [5, 6, 9], 2, True),  # the correction stops
        ([5, 6, 7, 8], [8, 0], [5, 6, 7, 8], 3, True),  # the bonus stops
        ([5, 5, 7, 8], [5], [5], 1, True),  # the first of two stops
        ([5, 6, 7, 8], [], [5, 6, 7, 8], 3, False),
    ],
)
def test_verify_greedy(choices, stops, emitted, n_accepted, stopped):
    stop_ids = None if stops is None else torch.tensor(stops, dtype=torch.long)
    result = verify_greedy(DRAFTS, torch.tensor(choices), stop_ids)
    assert result.emitted_ids.tolist() == emitted
    assert (result.n_accepted, result.stopped) == (n_accepted, stopped)


@pytest.mark.parametrize("stops", [None, torch.tensor([4])])
def test_verify_greedy_without_drafts_emits_the_one_choice(stops):
    result = verify_greedy(DRAFTS[:0], torch.tensor([4]), stops)
    assert result.emitted_ids.tolist() == [4]
    assert (result.n_accepted, result.stopped) == (0, stops is not None)


@pytest.mark.parametrize("n_rows", [0, 3, 5])
def test_verify_greedy_needs_one_row_more_than_drafts(n_rows):
    message = rf"`target_ids` needs one row more than `draft_ids`: \(4,\), got \({n_rows},\)"
    with pytest.raises(ValueError, match=message):
        verify_greedy(DRAFTS, torch.zeros(n_rows, dtype=torch.long))


def test_dense_law_is_its_own_row():
    law = dense_law([0.25, 0.75], [0.5, 0.5], drafts=[1, 0])
    assert law.dense(0, 2).tolist() == [0.25, 0.75]


def test_a_draft_that_the_target_forbids_is_never_kept():
    p = torch.tensor([0.0, 0.3, 0.7])
    law = dense_law([1e-30, 0.5, 0.5], drafts=[0])
    for seed in range(200):
        for drafted_from in (law, None):
            token, accepted = sample_or_accept(p, 0, drafted_from, 0, seeded(seed))
            assert token != 0
            assert not accepted


def test_a_draft_that_the_target_likes_better_is_always_kept():
    p = torch.tensor([0.2, 0.8])
    for q in ([0.8, 0.2], [0.2, 0.8], [1.0, 1e-38]):
        law = dense_law(q, drafts=[1])
        assert all(sample_or_accept(p, 1, law, 0, seeded(s)) == (1, True) for s in range(200))


def test_an_argmax_draft_of_probability_1_up_to_rounding_breaks_no_draw(monkeypatch):
    # The largest number that torch.rand gives in float32 is as large as this p.
    below_1 = torch.tensor(1 - 2.0**-24)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: below_1)
    p = torch.tensor([0.0, float(below_1)])
    assert sample_or_accept(p, 1, None, 0, seeded())[0] == 1


def test_equal_laws_rejected_by_rounding_leave_p():
    p = torch.tensor([0.1, 0.2, 0.7])
    assert torch.equal(residual(p, p.clone()), p)


def test_the_row_of_the_law_is_that_of_the_draft():
    p = torch.tensor([0.5, 0.5, 0.0])
    law = dense_law([0.0, 0.0, 1.0], [0.5, 0.0, 0.5], drafts=[2, 2])
    replaced = {sample_or_accept(p, 2, law, 1, seeded(seed))[0] for seed in range(50)}
    assert replaced == {1}  # max(p - q, 0) of row 1 leaves nothing else


def test_randomness_comes_from_the_generator_alone():
    p, law = torch.tensor([0.4, 0.6]), dense_law([0.9, 0.1], drafts=[0])
    state = torch.get_rng_state()
    results = [[sample_or_accept(p, 0, law, 0, seeded(s)) for s in range(20)] for _ in range(2)]
    assert results[0] == results[1]
    assert len(set(results[0])) > 1
    assert torch.equal(torch.get_rng_state(), state)


# The law of whole blocks: p and q hold the next token's law after each prefix of a block.
V, K, N_SAMPLES = 3, 2, 20_000
Laws = dict[tuple[int, ...], Tensor]


def random_laws(seed: int, sharpness: float) -> Laws:
    generator = seeded(seed)
    return {
        prefix: (sharpness * torch.randn(V, generator=generator)).softmax(dim=-1)
        for length in range(K + 1)
        for prefix in itertools.product(range(V), repeat=length)
    }


def without_least_likely(q: Tensor) -> Tensor:
    kept = q * (q > q.min())
    return kept / kept.sum()


@functools.cache
def block_laws(kind: str) -> tuple[Laws, Laws, dict[tuple[int, ...], float]]:
    p, q = random_laws(1, 1.0), random_laws(2, 1.5)
    if kind == "sparse":
        q = {prefix: without_least_likely(row) for prefix, row in q.items()}
    law = {
        output: math.prod(float(p[output[:i]][output[i]]) for i in range(K + 1))
        for output in itertools.product(range(V), repeat=K + 1)
    }
    return p, q, law


def draft_block(
    q: Laws, kind: str, generator: torch.Generator
) -> tuple[list[int], DraftLaw | None]:
    drafts: list[int] = []
    for _ in range(K):
        row = q[tuple(drafts)]
        token = row.argmax() if kind == "argmax" else torch.multinomial(row, 1, generator=generator)
        drafts.append(int(token))
    if kind == "argmax":
        return drafts, None
    rows = torch.stack([q[tuple(drafts[:i])] for i in range(K)])
    draft_probs = rows.gather(1, torch.tensor(drafts)[:, None])[:, 0]
    if kind == "dense":
        return drafts, DraftLaw(None, rows, draft_probs)
    top = rows.topk(V - 1, dim=-1)
    return drafts, DraftLaw(top.indices, top.values, draft_probs)


def sample_blocks(kind: str, choose: Any = sample_or_accept) -> list[tuple[tuple[int, ...], int]]:
    """Blocks of K + 1 tokens, each with how many of its drafts were accepted."""
    p, q, _ = block_laws(kind)
    generator = seeded(3)
    blocks = []
    for _ in range(N_SAMPLES):
        drafts, law = draft_block(q, kind, generator)
        emitted: list[int] = []
        accepted, n_accepted = True, 0
        while len(emitted) <= K:
            # After a rejection the target goes on alone.
            draft = drafts[len(emitted)] if accepted and len(emitted) < K else None
            target_probs = p[tuple(emitted)]
            token, accepted = choose(target_probs, draft, law, len(emitted), generator)
            emitted.append(token)
            n_accepted += accepted
        blocks.append((tuple(emitted), n_accepted))
    return blocks


@pytest.mark.parametrize("kind", ["dense", "sparse", "argmax"])
def test_blocks_follow_the_law_of_the_target(kind):
    blocks = sample_blocks(kind)
    assert min(sum(n == wanted for _, n in blocks) for wanted in range(K + 1)) > N_SAMPLES / 20
    assert p_value((output for output, _ in blocks), block_laws(kind)[2]) > 0.01


def slightly_generous(p: Tensor, draft: int | None, *others: Any) -> tuple[int, bool]:
    eased = p.clone()
    if draft is not None:
        eased[draft] *= 1.15
    return sample_or_accept(eased, draft, *others)


def test_the_same_blocks_would_show_a_small_bias():
    blocks = sample_blocks("dense", slightly_generous)
    assert p_value((output for output, _ in blocks), block_laws("dense")[2]) < 1e-6
