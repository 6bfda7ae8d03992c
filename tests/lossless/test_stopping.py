"""Whatever ends plain decoding ends decoding with a drafter, at the same token."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria

from checks import assert_drafts_mattered, assert_equal_to_plain, decode_both, prompt
from pairs import ScriptedDrafter, random_drafter, tiny_target

PROMPT = prompt(5, seed=5)
N_PROMPT = PROMPT.shape[1]


@pytest.fixture(scope="module")
def target():
    return tiny_target(2)


@pytest.fixture(scope="module")
def tokens(target):
    """What plain decoding emits, the first 13 all different."""
    new = target.generate(PROMPT, max_new_tokens=24)[0, N_PROMPT:].tolist()
    assert len(set(new[:13])) == 13
    return new


def decode_with_two_drafters(target, **kwargs):
    """Decode with stops at every place of a block: as a draft, as the bonus, after a mistake."""
    call = {"max_new_tokens": 24, **kwargs}
    script = target.generate(PROMPT, max_new_tokens=40)[0].tolist()
    plain = target.generate(PROMPT, **call)
    outputs = []
    for n_right in (lambda _: 3, lambda cycle: 7 if cycle else 1):
        drafter = ScriptedDrafter(target, script, n_right)
        output = target.generate(
            PROMPT, assistant_model=drafter, return_dict_in_generate=True, **call
        )
        assert torch.equal(output.sequences, plain)
        outputs.append(output)
    return outputs


def test_end_token_at_every_place(target, tokens):
    outputs = []
    for place in range(13):
        ended = decode_with_two_drafters(target, eos_token_id=tokens[place], pad_token_id=0)
        assert all(o.sequences.shape[1] == N_PROMPT + place + 1 for o in ended)
        outputs += ended
    assert_drafts_mattered(outputs, N_PROMPT)
    # With 3 right drafts a cycle emits 4 tokens; so stops fell on drafts and on the bonus.
    last = [(o.statistics.n_accepted or [None])[-1] for o in outputs[::2]]
    assert last == [None, 1, 2, 3, 3, 1, 2, 3, 3, 1, 2, 3, 3]


def test_list_of_end_tokens(target, tokens):
    outputs = []
    for first, second in [(11, 9), (9, 12), (0, 3), (7, 6)]:
        outputs += decode_with_two_drafters(
            target, eos_token_id=[95, tokens[first], tokens[second]], pad_token_id=0
        )
        assert outputs[-1].sequences.shape[1] == N_PROMPT + min(first, second) + 1
    assert_drafts_mattered(outputs, N_PROMPT)


def test_draft_after_a_draft_that_ends(target, tokens):
    """The drafter is right about tokens that plain decoding never reaches."""
    drafter = ScriptedDrafter(target, [*PROMPT[0].tolist(), *tokens])
    output = target.generate(
        PROMPT,
        max_new_tokens=24,
        eos_token_id=tokens[3],
        pad_token_id=0,
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    assert output.sequences[0, N_PROMPT:].tolist() == tokens[:4]
    assert output.statistics.n_accepted == [3]


def test_wrong_draft_of_the_end_token(target, tokens):
    """A rejected end token ends nothing."""
    script = [*PROMPT[0].tolist(), *tokens]
    output = target.generate(
        PROMPT,
        max_new_tokens=24,
        eos_token_id=(tokens[3] + 1) % 96,
        pad_token_id=0,
        assistant_model=ScriptedDrafter(target, script, lambda _: 2),
        return_dict_in_generate=True,
    )
    plain = target.generate(
        PROMPT, max_new_tokens=24, eos_token_id=(tokens[3] + 1) % 96, pad_token_id=0
    )
    assert torch.equal(output.sequences, plain)
    assert output.sequences.shape[1] > N_PROMPT + 4
    assert_drafts_mattered([output], N_PROMPT)


@pytest.mark.parametrize("n_least", [1, 4, 6, 20])
def test_min_new_tokens(target, tokens, n_least):
    outputs = decode_with_two_drafters(
        target, min_new_tokens=n_least, eos_token_id=tokens[4], pad_token_id=0
    )
    assert_drafts_mattered(outputs, N_PROMPT)


def test_min_length(target, tokens):
    outputs = decode_with_two_drafters(
        target, min_length=N_PROMPT + 9, eos_token_id=[tokens[4], tokens[6]], pad_token_id=0
    )
    assert_drafts_mattered(outputs, N_PROMPT)


def test_own_length_criterion_takes_the_place_of_the_default(target):
    for length in (N_PROMPT + 9, N_PROMPT + 30):
        criteria = StoppingCriteriaList([MaxLengthCriteria(length)])
        outputs = decode_with_two_drafters(target, stopping_criteria=criteria)
        assert {o.sequences.shape[1] for o in outputs} == {length}
        assert_drafts_mattered(outputs, N_PROMPT)


class LastTokenIs(StoppingCriteria):
    """Stops at a token; remembers every sequence that it saw."""

    def __init__(self, token):
        self.token = token
        self.seen = []
        self.scores = []

    def __call__(self, input_ids, scores, **_):
        self.seen.append(input_ids[0].tolist())
        self.scores.append(None if scores is None else torch.cat(scores))
        return torch.full((1,), self.seen[-1][-1] == self.token)


class AfterCalls(StoppingCriteria):
    """Stops at its n-th call."""

    def __init__(self, n_calls):
        self.n_left = n_calls

    def __call__(self, *_, **__):
        self.n_left -= 1
        return torch.full((1,), self.n_left <= 0)


@pytest.mark.parametrize("place", [0, 2, 5, 9])
def test_custom_criterion_sees_token_by_token(target, tokens, place):
    criteria = []

    def fresh():
        criteria.append(LastTokenIs(tokens[place]))
        return {"stopping_criteria": StoppingCriteriaList(criteria[-1:])}

    call = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 24}
    output = decode_both(target, PROMPT, lambda _: 3, fresh=fresh, **call)
    assert output.sequences.shape[1] == N_PROMPT + place + 1
    plain, drafted = criteria
    assert drafted.seen == plain.seen
    assert [len(ids) for ids in drafted.seen] == list(range(N_PROMPT + 1, N_PROMPT + place + 2))
    for ours, theirs in zip(drafted.scores, plain.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_custom_criterion_without_scores(target, tokens):
    criterion = LastTokenIs(tokens[9])
    decode_both(target, PROMPT, stopping_criteria=[criterion], max_new_tokens=24)
    assert set(criterion.scores) == {None}


@pytest.mark.parametrize("n_calls", [1, 6, 7, 8, 9, 20])
def test_criterion_that_counts(target, n_calls):
    output = decode_both(
        target,
        PROMPT,
        fresh=lambda: {"stopping_criteria": StoppingCriteriaList([AfterCalls(n_calls)])},
        max_new_tokens=30,
    )
    assert output.sequences.shape[1] == N_PROMPT + n_calls


def test_several_criteria_at_once(target, tokens):
    output = assert_equal_to_plain(
        target,
        PROMPT,
        fresh=lambda: {
            "stopping_criteria": StoppingCriteriaList([AfterCalls(15), LastTokenIs(tokens[12])])
        },
        eos_token_id=95,
        pad_token_id=0,
        max_new_tokens=30,
        max_time=1e6,
    )
    assert output.sequences.shape[1] == N_PROMPT + 13


def test_no_time_left(target):
    output = decode_both(target, PROMPT, max_new_tokens=30, max_time=1e-9)
    assert output.sequences.shape[1] == N_PROMPT + 1


@pytest.fixture(scope="module")
def tokenizer():
    """18 letters and 78 pairs of a small and a capital letter, written without spaces."""
    small, capital = "abcdefgh", "ABCDEFGHIJ"
    pairs = [(x, y) for x in small for y in capital][:78]
    vocabulary = [*small, *capital, *(x + y for x, y in pairs)]
    ids = {text: i for i, text in enumerate(vocabulary)}
    model = Tokenizer(models.BPE(ids, merges=pairs))
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model)


def test_stop_strings(target, tokenizer, tokens):
    words = tokenizer.convert_ids_to_tokens(tokens)
    stops = {
        6: words[6],  # a whole token
        8: words[7] + words[8],  # ends with a token
        10: words[9] + words[10][0],  # ends inside a token
        12: words[10][-1] + words[11] + words[12],
    }
    outputs = []
    for place, text in stops.items():
        output = decode_with_two_drafters(target, stop_strings=[text, "??"], tokenizer=tokenizer)
        assert all(o.sequences.shape[1] == N_PROMPT + place + 1 for o in output)
        outputs += output
    assert_drafts_mattered(outputs, N_PROMPT)


def test_stop_strings_are_refused_in_the_stock_block_loop(target, tokenizer, tokens):
    """It goes on behind them to the end of the block."""
    stops = {"stop_strings": tokenizer.convert_ids_to_tokens(tokens)[6], "tokenizer": tokenizer}
    stock = {"assistant_model": random_drafter(target), "speculation_type": "dflash"}
    with pytest.raises(NotImplementedError, match=r"plain decoding with `stop_strings`\. Leave"):
        target.generate(prompt(N_PROMPT), **stock, **stops, max_new_tokens=20)


def test_stop_strings_without_a_tokenizer(target):
    drafter = ScriptedDrafter(target, [])
    with pytest.raises(ValueError, match="tokenizer"):
        target.generate(prompt(3), assistant_model=drafter, stop_strings="ab", max_new_tokens=4)
