"""Processors and warpers see, once a token, what they see in plain decoding; so do their states."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, WatermarkingConfig

from checks import assert_equal_to_plain, decode_both, mixed, prompt
from pairs import ScriptedDrafter, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def tokens(target):
    """What plain greedy decoding emits when nothing is asked of it."""
    return target.generate(prompt(5), max_new_tokens=30)[0, 5:].tolist()


def options(tokens):
    """Arguments of `generate`, by name, each of which adds one processor."""
    return {
        "repetition_penalty": {"repetition_penalty": 1.5},
        "no_repeat_ngram": {"no_repeat_ngram_size": 2},
        "bad_words": {"bad_words_ids": [[tokens[3]], tokens[6:8]]},
        "suppress": {"suppress_tokens": [tokens[1], tokens[5]]},
        "begin_suppress": {"begin_suppress_tokens": [tokens[0]]},
        "forced_eos": {"forced_eos_token_id": 9},
        "sequence_bias": {"sequence_bias": [[[tokens[4]], -20.0], [tokens[6:8], -20.0]]},
        "length_penalty": {"exponential_decay_length_penalty": (6, 1.5)},
        "min_new_tokens": {"min_new_tokens": 12},
        "remove_invalid": {"remove_invalid_values": True},
        "renormalize": {"renormalize_logits": True},
        "watermark": {"watermarking_config": WatermarkingConfig(bias=8.0)},
        "watermark_self": {
            "watermarking_config": WatermarkingConfig(bias=8.0, seeding_scheme="selfhash")
        },
        "prefix_allowed": {
            "prefix_allowed_tokens_fn": lambda _, ids: [int(ids[-1] + 1) % 96, len(ids), 17]
        },
        "all_at_once": {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "suppress_tokens": [tokens[2]],
            "min_new_tokens": 8,
        },
    }


@pytest.mark.parametrize("name", list(options([0] * 30)))
def test_every_processor(target, tokens, name):
    kwargs = options(tokens)[name]
    call = {"max_new_tokens": 30, "eos_token_id": 7, "pad_token_id": 0, **kwargs}
    output = assert_equal_to_plain(target, prompt(5), **call)
    if name not in ("remove_invalid", "renormalize", "min_new_tokens"):
        assert output.sequences[0, 5:].tolist() != tokens


def test_forced_first_token(target):
    output = assert_equal_to_plain(target, prompt(1), max_new_tokens=30, forced_bos_token_id=9)
    assert output.sequences[0, 1] == 9


def test_encoder_processors(target):
    """They look at the prompt."""
    call = {"max_new_tokens": 30, "encoder_repetition_penalty": 1.4}
    call["encoder_no_repeat_ngram_size"] = 2
    assert_equal_to_plain(target, prompt(9), **call)


def test_min_length_with_an_end_token(target, tokens):
    output = assert_equal_to_plain(
        target, prompt(5), max_new_tokens=30, min_length=24, eos_token_id=tokens[4], pad_token_id=0
    )
    assert output.sequences.shape[1] >= 24


@pytest.mark.parametrize("negative", [False, True])
def test_guidance(target, tokens, negative):
    """Classifier-free guidance runs the target itself and keeps a cache of its own."""
    kwargs = {"negative_prompt_ids": prompt(3, seed=8)} if negative else {}
    output = assert_equal_to_plain(
        target, prompt(5), max_new_tokens=30, guidance_scale=1.8, **kwargs
    )
    assert output.sequences[0, 5:].tolist() != tokens


def test_guidance_does_not_spoil_the_context(target):
    """Forwards that a processor runs on the target are no context of the drafter."""
    plain = target.generate(prompt(5), max_new_tokens=20, guidance_scale=1.8)
    drafter = ScriptedDrafter(target, plain[0].tolist(), mixed)
    n_rows = []
    drafter.register_forward_pre_hook(
        lambda _m, _a, kwargs: n_rows.append(kwargs["context_hidden_states"].shape[1]),
        with_kwargs=True,
    )
    output = target.generate(
        prompt(5),
        max_new_tokens=20,
        guidance_scale=1.8,
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, plain)
    # The prompt's 5 tokens, then of each cycle its anchor and its accepted drafts.
    accepted = output.statistics.n_accepted
    assert n_rows == [5, *(n + 1 for n in accepted)][: len(n_rows)]


class Recorder(LogitsProcessor):
    """Counts its calls and lets its state decide: forbids a token that depends on the count."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        forbidden = scores.topk(2 if len(self.seen) % 3 == 0 else 1).indices[0]
        scores[0, forbidden[: len(self.seen) % 3 == 0]] = -float("inf")
        return scores


class Strict(LogitsProcessor):
    """An automaton as constrained decoding has it: it accepts each token exactly once."""

    def __init__(self):
        self.ids = None

    def __call__(self, input_ids, scores):
        ids = input_ids[0].tolist()
        if self.ids is not None and ids[:-1] != self.ids:
            raise RuntimeError(f"got {ids} after {self.ids}")
        self.ids = ids
        scores[0, sum(ids) % 96] -= 50.0
        return scores


@pytest.mark.parametrize("kind", [Recorder, Strict])
def test_stateful_processor(target, tokens, kind):
    processors = []

    def fresh():
        processors.append(kind())
        return {"logits_processor": LogitsProcessorList(processors[-1:])}

    output = assert_equal_to_plain(target, prompt(5), fresh=fresh, max_new_tokens=30)
    if kind is Recorder:
        plain, drafted = processors
        assert output.sequences[0, 5:].tolist() != tokens
        assert drafted.seen == plain.seen
        assert [len(ids) for ids in drafted.seen] == list(range(5, 35))


def test_stateful_processor_up_to_a_stop(target, tokens):
    """It is not called for drafts behind the token that ended the output."""
    processors = []

    def fresh():
        processors.append(Strict())
        return {"logits_processor": LogitsProcessorList(processors[-1:])}

    output = decode_both(
        target, prompt(5), None, fresh=fresh, max_new_tokens=30, eos_token_id=tokens[3]
    )
    plain, drafted = processors
    assert drafted.ids == plain.ids == output.sequences[0, :-1].tolist()


WARPERS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 1},
    "top_p": {"top_k": 0, "top_p": 1e-6},
    "min_p": {"top_k": 0, "min_p": 1.0},
    "typical": {"top_k": 1, "typical_p": 0.9},
    "epsilon": {"top_k": 1, "epsilon_cutoff": 0.1},
    "eta": {"top_k": 1, "eta_cutoff": 0.1},
    "top_h": {"top_k": 1, "top_h": 0.4},
}


@pytest.mark.parametrize("name", list(WARPERS)[1:])
def test_warpers_that_leave_one_token(target, tokens, name):
    """Sampling from a law of one token is greedy: only a warper that is honoured gives this."""
    kwargs = WARPERS[name]
    output = assert_equal_to_plain(target, prompt(5), do_sample=True, max_new_tokens=30, **kwargs)
    assert output.sequences[0, 5:].tolist() == tokens


@pytest.mark.parametrize("name", list(WARPERS))
def test_scores_of_sampling(target, name):
    """Scores are the raw logits after every warper, row by row."""
    kwargs = {**WARPERS[name], "top_k": 5} if WARPERS[name].get("top_k") else WARPERS[name]
    torch.manual_seed(0)
    plain = target.generate(prompt(5), max_new_tokens=20)
    drafter = ScriptedDrafter(target, plain[0].tolist(), mixed)
    output = target.generate(
        prompt(5),
        do_sample=True,
        max_new_tokens=12,
        assistant_model=drafter,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **kwargs,
    )
    replay = target.generate(
        prompt(5),
        do_sample=True,
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_scores=True,
        logits_processor=[Replay(output.sequences[0].tolist())],
        output_logits=True,
        **kwargs,
    )
    assert torch.equal(replay.sequences, output.sequences)
    for ours, theirs in zip(output.logits, replay.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    ids = output.sequences[0, 5:]
    for scores, token in zip(output.scores, ids, strict=True):
        assert scores[0, token].isfinite()
    if kwargs.get("top_k"):
        assert all(int(s.isfinite().sum()) <= 5 for s in output.scores)


class Replay(LogitsProcessor):
    """Makes plain decoding emit given tokens."""

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        token = self.ids[input_ids.shape[1]]
        scores[0, token] = scores.max() + 1e4
        return scores
