"""The loop's own bookkeeping: what the drafter is given, and what the target is."""

import pytest
import torch

from checks import decode_both, mixed, prompt
from hf_dflash.chain_decoding import _attended, _context_of_earlier_turns
from hf_dflash.outputs_dflash import CACHE_NAME
from pairs import ScriptedDrafter, random_drafter, tiny_target


@pytest.fixture
def target():
    return tiny_target()


class Spy(ScriptedDrafter):
    """Writes down its inputs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.inputs = []

    def forward(self, noise_embeds, position_ids, **kwargs):
        rows = kwargs["context_hidden_states"]
        self.inputs.append((noise_embeds.clone(), rows.clone(), position_ids.tolist()[0]))
        return super().forward(noise_embeds, position_ids=position_ids, **kwargs)


def spied(target, ids, n_new=20, n_right=mixed, **call):
    plain = target.generate(ids, max_new_tokens=n_new, **call)
    spy = Spy(target, plain[0].tolist(), n_right)
    output = target.generate(
        ids, max_new_tokens=n_new, assistant_model=spy, return_dict_in_generate=True, **call
    )
    assert torch.equal(output.sequences, plain)
    return spy, output


def anchors(output, n_prompt):
    """Position of the anchor of every cycle."""
    position, result = n_prompt, []
    for n_accepted in output.statistics.n_accepted:
        result.append(position)
        position += n_accepted + 1
    return result


def test_drafter_gets_the_anchor_and_masks(target):
    spy, output = spied(target, prompt(5))
    table = target.get_input_embeddings().weight
    for (noise, _, _), anchor in zip(spy.inputs, anchors(output, 5), strict=False):
        assert torch.equal(noise[0, 0], table[output.sequences[0, anchor]])
        assert torch.equal(noise[0, 1:], table[95].expand(noise.shape[1] - 1, -1))


def test_drafter_gets_every_committed_token_once_as_context(target):
    """The anchor has no hidden state yet; it comes with the next cycle."""
    spy, output = spied(target, prompt(5))
    seen = []
    for (noise, rows, positions), anchor in zip(spy.inputs, anchors(output, 5), strict=False):
        n_block = noise.shape[1]
        assert positions[-n_block:] == list(range(anchor, anchor + n_block))
        assert len(positions) - n_block == rows.shape[1]
        seen += positions[:-n_block]
        assert seen == list(range(anchor))


def test_context_is_what_plain_forwards_show(target):
    spy, output = spied(target, prompt(5))
    hidden = target(output.sequences, output_hidden_states=True).hidden_states
    wanted = torch.cat([hidden[i + 1] for i in spy.config.target_layer_ids], dim=-1)
    rows = torch.cat([rows for _, rows, _ in spy.inputs], dim=1)
    assert rows.shape[1] > 12
    torch.testing.assert_close(rows, wanted[:, : rows.shape[1]], atol=1e-3, rtol=1e-3)


def test_long_prompt_is_context_before_the_first_draft(target):
    """More rows than a block are projected at once, not carried along as taps."""
    spy, _ = spied(target, prompt(40))
    assert spy.inputs[0][1].shape[1] == 0
    assert spy.inputs[0][2][0] == 40


def test_padding_is_no_context(target):
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt(5)], dim=1)
    mask = (torch.arange(8)[None] >= 3).long()
    call = {"attention_mask": mask, "max_new_tokens": 12}
    plain = target.generate(ids, **call)
    spy = Spy(target, plain[0, 3:].tolist(), mixed)
    assert torch.equal(target.generate(ids, assistant_model=spy, **call), plain)
    noise, rows, positions = spy.inputs[0]
    assert rows.shape[1] == 5
    assert positions == list(range(5 + noise.shape[1]))


def test_target_forwards_what_was_not_forwarded_before(target):
    sizes = []
    target.register_forward_pre_hook(
        lambda _m, _a, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    output = decode_both(target, prompt(5), max_new_tokens=20)
    drafted = sizes[20:]  # plain decoding runs 20 forwards
    assert sizes[:20] == [5] + [1] * 19
    assert drafted == [5, *(n + 1 for n in output.statistics.n_drafted)]


def test_no_draft_is_made_for_the_last_token(target):
    output = decode_both(target, prompt(5), lambda _: 2, max_new_tokens=5)
    assert output.statistics.n_accepted == [2, 0]
    assert output.statistics.n_drafted == [3, 0]
    assert output.statistics.draft_forwards == 1


@pytest.mark.parametrize("n_right", [lambda _: 0, lambda _: 3, mixed, None])
def test_both_ways_of_choosing_agree(target, n_right):
    """Tokens chosen for a whole block at once, and one by one for criteria that look at them."""
    at_once = decode_both(target, prompt(5), n_right, max_new_tokens=25)
    in_order = decode_both(
        target,
        prompt(5),
        n_right,
        max_new_tokens=25,
        stopping_criteria=[lambda *_, **__: torch.zeros(1, dtype=torch.bool)],
    )
    assert at_once.statistics == in_order.statistics


def test_model_that_feeds_one_token_whatever_it_is_asked_for(target):
    """Remote code may cut its inputs itself; verifying by it would be wrong."""
    own = target.prepare_inputs_for_generation

    def prepare(input_ids, next_sequence_length=None, is_first_iteration=False, **kwargs):
        length = next_sequence_length if is_first_iteration else 1
        return own(
            input_ids,
            next_sequence_length=length,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    target.prepare_inputs_for_generation = prepare
    drafter = random_drafter(target)
    with pytest.raises(NotImplementedError, match=r"`next_sequence_length`=8 tokens on, got 1\."):
        target.generate(prompt(5), max_new_tokens=20, assistant_model=drafter)
    assert not any(m._forward_hooks for m in target.modules())


def test_attended_slots():
    assert _attended(None, 3, torch.device("cpu")).tolist() == [1, 1, 1]
    mask = torch.tensor([[False, True, True, True]])
    assert _attended(mask, 3, torch.device("cpu")).tolist() == [0, 1, 1]


def test_context_is_taken_off_the_cache(target):
    """So that a call which is interrupted cannot leave one that does not fit."""
    drafter = random_drafter(target)
    output = target.generate(
        prompt(5), max_new_tokens=9, assistant_model=drafter, return_dict_in_generate=True
    )
    cache = output[CACHE_NAME]
    context = _context_of_earlier_turns(cache, drafter, n_past=10)
    assert context.n_context == 10
    assert not hasattr(cache, "dflash_context")
    assert _context_of_earlier_turns(cache, drafter, n_past=10) is None


def test_context_of_another_drafter_or_of_an_emptied_cache_is_not_used(target):
    drafter, other = random_drafter(target), random_drafter(target)
    for asked, n_past in ((other, 13), (drafter, 0)):
        output = target.generate(
            prompt(5), max_new_tokens=9, assistant_model=drafter, return_dict_in_generate=True
        )
        assert _context_of_earlier_turns(output[CACHE_NAME], asked, n_past) is None
