"""Verification against plain loops written from the definitions."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_dflash.verification import (
    DraftLaw,
    argmax_rows,
    residual,
    sample_or_accept,
    verify_greedy,
)

TOKENS = st.integers(min_value=0, max_value=3)  # few tokens, so that agreement is common


@st.composite
def laws(draw, size=None):
    """Weights of which some are 0, normalised in float32."""
    size = draw(st.integers(2, 6)) if size is None else size
    weights = draw(
        st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(lambda w: sum(w) > 0)
    )
    return torch.tensor(weights, dtype=torch.float32) / sum(weights)


def decode_token_by_token(drafts, choices, stops):
    """What plain decoding emits of ``choices``, as long as the drafts let it go on."""
    emitted, n_accepted = [], 0
    for i, choice in enumerate(choices):
        emitted.append(choice)
        is_draft = i < len(drafts) and drafts[i] == choice
        n_accepted += is_draft
        if choice in stops:
            return emitted, n_accepted, True
        if not is_draft:
            break
    return emitted, n_accepted, False


@given(
    choices=st.lists(TOKENS, min_size=1, max_size=16),
    stops=st.none() | st.lists(TOKENS, max_size=3),
    data=st.data(),
)
def test_verify_greedy_emits_what_decoding_token_by_token_would(choices, stops, data):
    n_right = data.draw(st.integers(0, len(choices) - 1))
    n_other = len(choices) - 1 - n_right
    drafts = choices[:n_right] + data.draw(st.lists(TOKENS, min_size=n_other, max_size=n_other))
    result = verify_greedy(
        torch.tensor(drafts, dtype=torch.long),
        torch.tensor(choices),
        None if stops is None else torch.tensor(stops, dtype=torch.long),
    )
    got = result.emitted_ids.tolist(), result.n_accepted, result.stopped
    assert got == decode_token_by_token(drafts, choices, stops or [])


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    n_columns=st.sampled_from([1, 7, 64, 192, 512, 1536]),
    levels=st.integers(1, 5),  # few values, so that ties are everywhere
    seed=st.integers(0, 2**31),
)
def test_argmax_rows_finds_the_first_maximum(dtype, n_columns, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (3, n_columns), generator=generator).to(dtype)
    logits[logits == 0] = -torch.inf  # forbidden tokens, at times all of them
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert argmax_rows(logits).tolist() == expected


@given(laws(), st.data())
def test_residual_is_what_p_has_more_than_q(p, data):
    q = data.draw(laws(size=len(p)))
    more = [max(a - b, 0.0) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    expected = torch.tensor(more) if sum(more) > 0 else p
    assert torch.allclose(residual(p, q), expected, atol=1e-7)


@given(laws())
def test_residual_of_equal_laws_is_the_law(p):
    assert torch.equal(residual(p, p.clone()), p)


@given(laws(), st.data())
def test_residual_leaves_its_arguments_as_they_are(p, data):
    q = data.draw(laws(size=len(p)))
    before = p.clone(), q.clone()
    residual(p, q)
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**31))
def test_dense_puts_each_probability_at_its_token(n_listed, n_drafts, seed):
    generator = torch.Generator().manual_seed(seed)
    vocab_size = 8
    ids = torch.stack(
        [torch.randperm(vocab_size, generator=generator)[:n_listed] for _ in range(n_drafts)]
    )
    probs = torch.rand(n_drafts, n_listed, generator=generator)
    law = DraftLaw(ids, probs, probs[:, 0])
    for row in range(n_drafts):
        listed = dict(zip(ids[row].tolist(), probs[row].tolist(), strict=True))
        expected = [listed.get(token, 0.0) for token in range(vocab_size)]
        assert law.dense(row, vocab_size).tolist() == expected


def law_of_choice(p: Tensor, q: Tensor) -> Tensor:
    """The exact law of Algorithm 1's token, summed over drafts: accept or replace."""
    kept = [b * min(1.0, a / b) if b > 0 else 0.0 for a, b in zip(p, q, strict=True)]
    left_over = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    rejected, total = 1 - sum(kept), sum(left_over)
    replaced = [w / total * rejected if total > 0 else 0.0 for w in left_over]
    return torch.tensor([a + b for a, b in zip(kept, replaced, strict=True)])


@given(laws(), st.data())
def test_algorithm_1_gives_p_whatever_q_is(p, data):
    q = data.draw(laws(size=len(p)))
    assert torch.allclose(law_of_choice(p, q).float(), p, atol=1e-6)


@given(laws(), st.data(), st.booleans(), st.integers(0, 2**31))
def test_sample_or_accept_follows_algorithm_1_draw_for_draw(p, data, is_argmax, seed):
    vocab_size = len(p)
    q = (
        torch.nn.functional.one_hot(data.draw(laws(size=vocab_size)).argmax(), vocab_size).float()
        if is_argmax
        else data.draw(laws(size=vocab_size))
    )
    draft = int(torch.multinomial(q, 1, generator=torch.Generator().manual_seed(seed)))
    law = None if is_argmax else DraftLaw(None, q[None], q[draft][None])

    generator = torch.Generator().manual_seed(seed)
    chance = float(torch.rand((), generator=generator))
    if chance < float(p[draft]) / float(q[draft]):
        expected = draft, True
    else:
        left_over = (p - q).clamp(min=0)
        expected = int(torch.multinomial(left_over, 1, generator=generator)), False

    got = sample_or_accept(p, draft, law, 0, torch.Generator().manual_seed(seed))
    assert got == expected
    assert p[got[0]] > 0


@given(laws(), st.integers(0, 2**31))
def test_without_a_draft_the_token_is_drawn_from_p(p, seed):
    generator = torch.Generator().manual_seed(seed)
    token, accepted = sample_or_accept(p, None, None, 0, generator)
    expected = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(seed))
    assert (token, accepted) == (int(expected), False)
