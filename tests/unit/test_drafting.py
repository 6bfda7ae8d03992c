"""Drafting: the laws that drafts are drawn from, and what transformers' stock loop gets of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as lp

from hf_dflash.drafting import (
    DFlashCandidateGenerator,
    DraftingPolicy,
    Proposal,
    _confident_part,
    _sample_rows,
)
from hf_dflash.verification import DraftLaw
from laws import (
    PROMPT,
    NearTarget,
    call_processors,
    law_target,
    next_law,
    output_law,
    p_value,
    prefix_logits,
)
from pairs import random_drafter, scripted, tiny_target

V, K, N_DRAWS = 12, 3, 20_000
ANCHOR = torch.cat([PROMPT, torch.tensor([[2]])], dim=1)

WARPERS = {
    "none": [],
    "temperature": [lp.TemperatureLogitsWarper(0.6)],
    "top-k": [lp.TopKLogitsWarper(5)],
    "top-k above the vocabulary": [lp.TopKLogitsWarper(50)],
    "two top-k": [lp.TopKLogitsWarper(7), lp.TopKLogitsWarper(2, min_tokens_to_keep=4)],
    "top-p": [lp.TopPLogitsWarper(0.8)],
    "the usual three": [
        lp.TemperatureLogitsWarper(0.7),
        lp.TopKLogitsWarper(6),
        lp.TopPLogitsWarper(0.9),
    ],
    "min-p": [lp.TemperatureLogitsWarper(1.5), lp.TopKLogitsWarper(9), lp.MinPLogitsWarper(0.1)],
    "typical": [lp.TopKLogitsWarper(8), lp.TypicalLogitsWarper(0.8)],
    "cutoffs": [lp.TopKLogitsWarper(9), lp.EpsilonLogitsWarper(0.03), lp.EtaLogitsWarper(0.1)],
    "renormalised": [lp.TopKLogitsWarper(6), lp.LogitNormalization()],
}

# Each processor that may be applied to drafts, as a call would ask for it.
CALLS = {
    "repetition penalty": {"repetition_penalty": 1.7, "temperature": 0.8},
    "no repeated n-gram": {"no_repeat_ngram_size": 2, "top_k": 4},
    "bad words": {"bad_words_ids": [[3], [2, 5], [2, 7, 1]], "top_p": 0.9},
    "bias": {"sequence_bias": [[[4], 2.0], [[2, 6], -3.0]], "typical_p": 0.9},
    "minimal length": {"min_length": 7, "min_new_tokens": 2, "eos_token_id": [3, 6]},
    "suppressed": {"suppress_tokens": [1, 8], "begin_suppress_tokens": [2], "min_p": 0.05},
    "forced end": {"forced_eos_token_id": 7, "eta_cutoff": 0.1, "epsilon_cutoff": 0.02},
    "decay": {"exponential_decay_length_penalty": (1, 1.3), "eos_token_id": 5},
    "finite": {"remove_invalid_values": True, "renormalize_logits": True},
}


@pytest.fixture(scope="module")
def target() -> Any:
    return law_target(V)


@pytest.fixture(scope="module")
def logits() -> Tensor:
    return 2 * torch.randn(K, V, generator=torch.Generator().manual_seed(5))


def candidates(
    target: Any, logits: Tensor, processors: Any = (), *, do_sample: bool = True, **policy: Any
) -> DFlashCandidateGenerator:
    """A generator whose drafter makes the given logits."""
    options = {"n_drafts": K, "confidence_threshold": None, "temperature": None, **policy}
    generator = DFlashCandidateGenerator(
        random_drafter(target, K + 1),
        target,
        logits_processor=processors,
        do_sample=do_sample,
        policy=DraftingPolicy(**options),
    )
    generator._draft = lambda _anchor, _position, n_drafts: logits[:n_drafts]
    return generator


def propose(generator: DFlashCandidateGenerator, max_drafts: int = K) -> Proposal:
    return generator.propose(ANCHOR, ANCHOR.shape[1] - 1, max_drafts)


def assert_law(proposal: Proposal, expected: list[Tensor]) -> None:
    """The reported law is the expected one, and the drafts' own probabilities belong to it."""
    assert proposal.law is not None
    assert len(proposal.draft_ids) == len(expected)
    for i, (draft, row) in enumerate(zip(proposal.draft_ids.tolist(), expected, strict=True)):
        torch.testing.assert_close(proposal.law.dense(i, V), row.float(), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(proposal.law.draft_probs[i], row[draft].float())
        assert row[draft] > 0


def laws_along(processors: Any, draft_ids: Tensor, logits: Tensor) -> list[Tensor]:
    """The law of each draft by the processors on the ids before it."""
    after_prompt = (*ANCHOR[0, PROMPT.shape[1] :].tolist(), *draft_ids.tolist())
    return [next_law(processors, after_prompt[: i + 1], logits[i]) for i in range(len(draft_ids))]


@pytest.mark.parametrize("warpers", WARPERS.values(), ids=WARPERS)
def test_rows_report_the_law_of_the_warpers(warpers: Any, logits: Tensor) -> None:
    torch.manual_seed(0)
    for _ in range(20):
        proposal = _sample_rows(logits, warpers)
        assert_law(proposal, laws_along(warpers, proposal.draft_ids, logits))


@pytest.mark.parametrize("warpers", WARPERS.values(), ids=WARPERS)
def test_rows_are_drawn_from_the_law_that_they_report(warpers: Any, logits: Tensor) -> None:
    torch.manual_seed(2)
    flat = logits[1] / 2  # so that every warper leaves several tokens
    proposal = _sample_rows(flat.expand(N_DRAWS, V), warpers)
    law = proposal.law.dense(0, V).double()
    law = {(token,): p / float(law.sum()) for token, p in enumerate(law.tolist()) if p > 0}
    assert p_value(((token,) for token in proposal.draft_ids.tolist()), law) > 0.01


def test_only_the_tokens_that_a_top_k_leaves_are_looked_at(logits: Tensor) -> None:
    law = _sample_rows(logits, [lp.TopKLogitsWarper(5), lp.TopKLogitsWarper(3)]).law
    assert law.token_ids.shape == law.probs.shape == (K, 3)
    assert _sample_rows(logits, [lp.TopKLogitsWarper(V)]).law.token_ids is None


def test_ties_at_the_kth_place_leave_a_law_that_is_still_the_drafts_own() -> None:
    proposal = _sample_rows(torch.zeros(200, V), [lp.TopKLogitsWarper(3)])
    law = proposal.law
    assert all(int(law.dense(i, V).count_nonzero()) == 3 for i in range(200))
    picked = [float(law.dense(i, V)[d]) for i, d in enumerate(proposal.draft_ids.tolist())]
    assert picked == pytest.approx(law.draft_probs.tolist())
    assert min(picked) > 0.3


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_drafts_in_order_report_the_law_of_the_processors(
    call: dict[str, Any], target: Any, logits: Tensor
) -> None:
    call = {"top_k": 0, "max_new_tokens": 4, "do_sample": True, **call}
    processors = call_processors(target, call)
    generator = candidates(target, logits, processors)
    assert generator._processors == list(processors)  # none is left out
    torch.manual_seed(2)
    for _ in range(20):
        proposal = propose(generator)
        assert_law(proposal, laws_along(processors, proposal.draft_ids, logits))


def test_drafts_in_order_are_drawn_from_the_law_that_they_report(target: Any) -> None:
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    processors = [lp.RepetitionPenaltyLogitsProcessor(1.5), lp.TemperatureLogitsWarper(1.3)]
    generator = candidates(target, logits, processors, n_drafts=2)
    law = {}
    for first in range(4):
        rows = laws_along(processors, torch.tensor([first, 0]), logits)
        law.update(
            {(first, second): float(rows[0][first] * rows[1][second]) for second in range(4)}
        )
    torch.manual_seed(3)
    drafts = [tuple(propose(generator).draft_ids.tolist()) for _ in range(4000)]
    assert p_value(drafts, law) > 0.01


@pytest.mark.parametrize("own", [0.4, 3.0])
@pytest.mark.parametrize("others", [[], [lp.NoRepeatNGramLogitsProcessor(2)]], ids=len)
def test_the_drafters_temperature_replaces_that_of_the_call(
    own: float, others: list[Any], target: Any, logits: Tensor
) -> None:
    call = [*others, lp.TemperatureLogitsWarper(0.9), lp.TopKLogitsWarper(6)]
    expected = [lp.TemperatureLogitsWarper(own), *others, lp.TopKLogitsWarper(6)]
    proposal = propose(candidates(target, logits, call, temperature=own))
    assert_law(proposal, laws_along(expected, proposal.draft_ids, logits))


@pytest.mark.parametrize(
    "how", [{"do_sample": False}, {"temperature": 0.0}], ids=["greedy", "temperature 0"]
)
def test_argmax_drafts_have_no_law(how: dict[str, Any], target: Any, logits: Tensor) -> None:
    warpers = [lp.TemperatureLogitsWarper(0.7), lp.TopKLogitsWarper(3)]
    generator = candidates(target, logits, warpers, **how)
    state = torch.get_rng_state()
    proposal = propose(generator)
    assert torch.equal(torch.get_rng_state(), state)
    assert proposal.law is None
    assert torch.equal(proposal.draft_ids, logits.argmax(dim=-1))

    penalty = lp.RepetitionPenaltyLogitsProcessor(5.0)
    proposal = propose(candidates(target, logits, [penalty, *warpers], **how))
    rows = laws_along([penalty], proposal.draft_ids, logits)
    assert proposal.law is None
    assert proposal.draft_ids.tolist() == [int(row.argmax()) for row in rows]
    assert not torch.equal(proposal.draft_ids, logits.argmax(dim=-1))


def test_no_more_drafts_than_asked_for_or_than_the_policy_allows(
    target: Any, logits: Tensor
) -> None:
    assert len(propose(candidates(target, logits), 2).draft_ids) == 2
    assert len(propose(candidates(target, logits, n_drafts=1)).draft_ids) == 1


def test_drafts_go_on_where_every_token_is_forbidden(target: Any, logits: Tensor) -> None:
    # Plain decoding would have ended before: the drafts have used up what may follow.
    forbid = lp.SuppressTokensLogitsProcessor(list(range(V)))
    proposal = propose(candidates(target, logits, [forbid]))
    assert_law(proposal, [torch.full((V,), 1 / V)] * K)


def refuse(*_: Any) -> Tensor:
    raise AssertionError("called for drafts")


class Custom(LogitsProcessor):
    __call__ = refuse


class CustomTopK(lp.TopKLogitsWarper):
    __call__ = refuse


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "build",
    [
        lambda _: Custom(),
        lambda _: CustomTopK(3),
        lambda _: refuse,
        lambda _: lp.PrefixConstrainedLogitsProcessor(refuse, 1),
        lambda _: lp.WatermarkLogitsProcessor(V, "cpu"),
        lambda target: lp.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, target),
    ],
    ids=["custom", "subclass", "function", "prefix_allowed_tokens_fn", "watermark", "guidance"],
)
def test_processors_that_may_hold_state_are_never_called_for_drafts(
    build: Any, do_sample: bool, target: Any, logits: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = build(target)
    if isinstance(processor, LogitsProcessor):
        monkeypatch.setattr(type(processor), "__call__", refuse)
    for known in ([], [lp.RepetitionPenaltyLogitsProcessor(1.2)]):
        generator = candidates(target, logits, [*known, processor], do_sample=do_sample)
        assert len(propose(generator).draft_ids) == K


CONFIDENCE_LOGITS = torch.tensor([[0.9, 0.06, 0.04], [0.7, 0.2, 0.1], [0.4, 0.3, 0.3]]).log()


@pytest.mark.parametrize(
    ("threshold", "n_kept"), [(0.0, 3), (0.3, 3), (0.5, 2), (0.8, 1), (0.95, 0), (1.0, 0)]
)
def test_confidence_keeps_the_drafts_before_the_first_unlikely_one(threshold, n_kept) -> None:
    argmax = Proposal(CONFIDENCE_LOGITS.argmax(dim=-1), None)
    kept = _confident_part(argmax, CONFIDENCE_LOGITS, threshold)
    assert kept.law is None
    assert torch.equal(kept.draft_ids, argmax.draft_ids[:n_kept])


@pytest.mark.parametrize("token_ids", [None, torch.tensor([[2, 0, 1]]).expand(3, 3)])
def test_confidence_cuts_a_law_with_its_drafts(token_ids: Tensor | None) -> None:
    probs = CONFIDENCE_LOGITS.exp()
    law = DraftLaw(token_ids, probs, probs[:, 2])
    kept = _confident_part(Proposal(torch.tensor([2, 1, 0]), law), CONFIDENCE_LOGITS, 0.5)
    assert kept.draft_ids.tolist() == [2, 1]
    assert torch.equal(kept.law.probs, probs[:2])
    assert torch.equal(kept.law.draft_probs, probs[:2, 2])
    assert torch.equal(kept.law.dense(1, 3), law.dense(1, 3))


def test_a_drawn_draft_does_not_decide_whether_it_is_kept(target: Any) -> None:
    # Were unlikely draws dropped, those that are kept would not follow the law they report.
    generator = candidates(target, CONFIDENCE_LOGITS, confidence_threshold=0.6)
    torch.manual_seed(0)
    drafts = torch.stack([propose(generator).draft_ids for _ in range(300)])
    assert drafts.shape == (300, 2)
    assert set(drafts[:, 1].tolist()) == {0, 1, 2}


# Transformers' stock assisted loop, with this package's generator in place of its own.


def in_stock_loop(target: Any, drafter: Any, monkeypatch: Any, **options: Any) -> None:
    def build(**call: Any) -> DFlashCandidateGenerator:
        return DFlashCandidateGenerator(
            drafter,
            target,
            logits_processor=call["logits_processor"],
            do_sample=call["generation_config"].do_sample,
            policy=DraftingPolicy(drafter.config.block_size - 1, **options),
        )

    monkeypatch.setattr(target, "_get_candidate_generator", build, raising=False)


def test_stock_loop_gives_the_same_tokens_when_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    ids = torch.tensor([[5, 9, 17, 3]])
    drafter, plain = scripted(target, ids, 24, n_right=lambda cycle: cycle % 8)
    options = {"confidence_threshold": None, "temperature": None}
    in_stock_loop(target, drafter, monkeypatch, **options)
    drafted = target.generate(ids, prompt_lookup_num_tokens=2, max_new_tokens=24, do_sample=False)
    assert torch.equal(drafted, plain)
    assert 2 < drafter.n_calls < 12


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_stock_loop_follows_the_law_that_it_is_told(
    threshold: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = law_target()
    logits = prefix_logits(target, 4)
    drafter = NearTarget(target, logits, noise=1.0)
    call = {"do_sample": True, "max_new_tokens": 4, "temperature": 1.2, "top_k": 3}
    law = output_law(logits, call_processors(target, call), 4)
    in_stock_loop(target, drafter, monkeypatch, confidence_threshold=threshold, temperature=None)
    torch.manual_seed(0)
    outputs = [target.generate(PROMPT, prompt_lookup_num_tokens=2, **call) for _ in range(300)]
    assert p_value((tuple(o[0, PROMPT.shape[1] :].tolist()) for o in outputs), law) > 0.01


def outputs_with_hidden_states(target: Any, ids: Tensor) -> Any:
    return target(ids, output_hidden_states=True)


def test_get_candidates_gives_logarithms_of_the_laws(target: Any, logits: Tensor) -> None:
    warpers = [lp.TopKLogitsWarper(4)]
    generator = candidates(target, logits, warpers)
    outputs = outputs_with_hidden_states(target, PROMPT)
    ids, log_laws = generator.get_candidates(ANCHOR, model_outputs=outputs)
    assert torch.equal(ids[:, :-K], ANCHOR)
    assert log_laws.shape == (1, K, V)
    expected = torch.stack(laws_along(warpers, ids[0, -K:], logits)).float()
    torch.testing.assert_close(log_laws[0].softmax(dim=-1), expected)


@pytest.mark.parametrize(
    ("policy", "n_drafts"),
    [({"do_sample": False}, K), ({"temperature": 0.0}, K), ({"confidence_threshold": 1.0}, 0)],
    ids=["greedy", "temperature 0", "no draft is kept"],
)
def test_get_candidates_gives_no_laws_where_there_are_none(
    policy: dict[str, Any], n_drafts: int, target: Any, logits: Tensor
) -> None:
    generator = candidates(target, logits, **policy)
    outputs = outputs_with_hidden_states(target, PROMPT)
    ids, log_laws = generator.get_candidates(ANCHOR, model_outputs=outputs)
    assert ids.shape[1] == ANCHOR.shape[1] + n_drafts
    assert log_laws is None


def test_get_candidates_proposes_nothing_before_the_prompt_has_run(
    target: Any, logits: Tensor
) -> None:
    generator = candidates(target, logits)
    ids, log_laws = generator.get_candidates(PROMPT, is_first_iteration=True)
    assert torch.equal(ids, PROMPT)
    assert log_laws is None


@pytest.mark.parametrize("outputs", [None, SimpleNamespace(hidden_states=None)])
def test_get_candidates_needs_hidden_states(outputs: Any, target: Any, logits: Tensor) -> None:
    with pytest.raises(ValueError, match=r"`model_outputs` must hold the hidden states of all"):
        candidates(target, logits).get_candidates(ANCHOR, model_outputs=outputs)
