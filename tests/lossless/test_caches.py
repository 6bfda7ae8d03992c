"""Caches of every kind, made by `generate` or carried over the turns of a chat."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from transformers import (
    DynamicCache,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    StoppingCriteria,
)

from checks import assert_drafts_mattered, assert_equal_to_plain, decode_both, mixed, prompt
from hf_dflash.outputs_dflash import CACHE_NAME
from pairs import ScriptedDrafter, random_drafter, tiny_target

STATIC_WINDOW_SAYS_IF_CROPPABLE = CACHE_NAME == "cache"  # from transformers 5.24 on


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def windowed_target(window):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
    )
    return MistralForCausalLM(config).eval()


def convolving_target():
    """LFM2: its convolutions keep the last few inputs, and can be rolled back."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"],
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Lfm2ForCausalLM(config).eval()


TARGETS = {
    "full": tiny_target,
    "window": lambda: windowed_target(7),
    "convolution": convolving_target,
}


def slots(cache):
    return int(cache.get_seq_length())


def extended(ids, n_new, seed):
    """The conversation so far and what the user says next."""
    return torch.cat([ids, prompt(n_new, seed=seed)], dim=1)


def chat(target, n_turns=3, n_new=14):
    """Prompts and outputs of a conversation, decoded plainly and without a cache kept."""
    ids, turns = prompt(6), []
    for turn in range(n_turns):
        ids = ids if turn == 0 else extended(ids, 4, seed=turn)
        answer = target.generate(ids, max_new_tokens=n_new)
        turns.append((ids, answer))
        ids = answer
    return turns


def turn_with(target, cache, ids, answer, drafter=None, **kwargs):
    """One turn with a cache; returns the output."""
    drafter = drafter or ScriptedDrafter(target, answer[0].tolist(), mixed)
    output = target.generate(
        ids,
        max_new_tokens=answer.shape[1] - ids.shape[1],
        assistant_model=drafter,
        return_dict_in_generate=True,
        **{CACHE_NAME: cache},
        **kwargs,
    )
    assert torch.equal(output.sequences, answer)
    assert slots(cache) == answer.shape[1] - 1
    assert_drafts_mattered([output], ids.shape[1])
    return output


@pytest.mark.parametrize("kind", list(TARGETS))
def test_chat_with_one_cache(kind):
    target = TARGETS[kind]()
    turns = chat(target)
    drafter = ScriptedDrafter(target, turns[-1][1][0].tolist(), mixed)
    cache = DynamicCache(config=target.config)
    for ids, answer in turns:
        turn_with(target, cache, ids, answer, drafter)
        key, context = cache.dflash_context
        assert key == drafter.context_key
        assert context.n_context == answer.shape[1] - 1


def test_chat_with_a_cache_of_no_config():
    """Its layers are all full ones, also for a windowed target."""
    target = windowed_target(7)
    cache = DynamicCache()
    for ids, answer in chat(target):
        turn_with(target, cache, ids, answer)


def test_chat_with_only_the_new_ids(target):
    cache = DynamicCache(config=target.config)
    turns = chat(target)
    drafter = ScriptedDrafter(target, turns[-1][1][0].tolist(), mixed)
    for turn, (ids, answer) in enumerate(turns):
        n_old = 0 if turn == 0 else turns[turn - 1][1].shape[1] - 1
        output = target.generate(
            ids[:, n_old:],
            attention_mask=torch.ones_like(ids),
            max_new_tokens=14,
            assistant_model=drafter,
            return_dict_in_generate=True,
            **{CACHE_NAME: cache},
        )
        assert torch.equal(output.sequences, answer[:, n_old:])
        assert_drafts_mattered([output], ids.shape[1] - n_old)
        assert slots(cache) == answer.shape[1] - 1
        assert cache.dflash_context[1].n_context == answer.shape[1] - 1


def test_context_carried_over_is_the_context_of_one_call(target):
    """A later turn drafts what a call drafts that sees the whole prompt at once."""
    drafter = random_drafter(target)
    cache = DynamicCache(config=target.config)
    seen = []
    drafter.register_forward_hook(lambda _m, _a, out: seen.append(out.last_hidden_state))
    for ids, _ in chat(target):
        del seen[:]
        target.generate(ids, max_new_tokens=14, assistant_model=drafter, **{CACHE_NAME: cache})
    carried = list(seen)
    del seen[:]
    target.generate(ids, max_new_tokens=14, assistant_model=drafter)
    assert len(seen) == len(carried)
    for ours, whole in zip(carried, seen, strict=True):
        torch.testing.assert_close(ours, whole, atol=1e-4, rtol=1e-4)


def test_padding_in_the_first_turn(target):
    ids, n_pad = prompt(6), 3
    answer = target.generate(ids, max_new_tokens=14)
    second = extended(answer, 4, seed=1)
    final = target.generate(second, max_new_tokens=14)
    cache = DynamicCache(config=target.config)
    pad = torch.zeros(1, n_pad, dtype=torch.long)
    drafter = ScriptedDrafter(target, final[0].tolist(), mixed)
    for before, after in ((ids, answer), (second, final)):
        padded = torch.cat([pad, before], dim=1)
        mask = torch.cat([pad, torch.ones_like(before)], dim=1)
        output = target.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=14,
            assistant_model=drafter,
            return_dict_in_generate=True,
            **{CACHE_NAME: cache},
        )
        assert torch.equal(output.sequences[:, n_pad:], after)
        assert_drafts_mattered([output], padded.shape[1])
        assert cache.dflash_context[1].n_context == after.shape[1] - 1


def test_prefix_shared_by_copies_of_a_cache(target):
    ids = prompt(12)
    drafter = random_drafter(target)
    cache = DynamicCache(config=target.config)
    first = target.generate(ids, max_new_tokens=2, assistant_model=drafter, **{CACHE_NAME: cache})
    for seed in (1, 2, 3):
        branch = copy.deepcopy(cache)
        asked = extended(first, 5, seed)
        answer = target.generate(asked, max_new_tokens=14)
        scripted = ScriptedDrafter(target, answer[0].tolist(), mixed)
        scripted.context_key = drafter.context_key
        turn_with(target, branch, asked, answer, scripted)
        assert branch.dflash_context[1].n_context == answer.shape[1] - 1
    assert slots(cache) == first.shape[1] - 1
    assert cache.dflash_context[1].n_context == first.shape[1] - 1


@pytest.mark.parametrize("kept", [20, 6, 3])
def test_cache_cropped_between_turns(target, kept):
    """An answer is withdrawn, or generated again."""
    (ids, answer), *_ = chat(target)
    cache = DynamicCache(config=target.config)
    drafter = ScriptedDrafter(target, answer[0].tolist(), mixed)
    turn_with(target, cache, ids, answer, drafter)
    kept = min(kept, slots(cache))
    cache.crop(-(slots(cache) - kept))
    again = extended(answer[:, :kept], 3, seed=7)
    other = target.generate(again, max_new_tokens=14)
    drafter.script = other[0].tolist()
    turn_with(target, cache, again, other, drafter)
    assert cache.dflash_context[1].n_context == other.shape[1] - 1


@pytest.mark.parametrize("first", [torch.inference_mode, nullcontext])
@pytest.mark.parametrize("second", [torch.inference_mode, nullcontext])
def test_turns_inside_and_outside_of_inference_mode(target, first, second):
    """Tensors made in inference mode cannot be written to outside of it."""
    (ids, answer), (later, final) = chat(target, n_turns=2)
    drafter = ScriptedDrafter(target, final[0].tolist(), mixed)
    cache = DynamicCache(config=target.config)
    with first():
        turn_with(target, cache, ids, answer, drafter)
    with second():
        turn_with(target, cache, later, final, drafter)
    assert cache.dflash_context[1].n_context == final.shape[1] - 1


def test_drafter_cast_between_turns(target):
    (ids, answer), (later, final) = chat(target, n_turns=2)
    drafter = ScriptedDrafter(target, final[0].tolist(), mixed)
    cache = DynamicCache(config=target.config)
    turn_with(target, cache, ids, answer, drafter)
    turn_with(target, cache, later, final, drafter.to(torch.bfloat16))
    assert cache.dflash_context[1].n_context == final.shape[1] - 1


def test_cache_stored_between_turns(target):
    (ids, answer), (later, final) = chat(target, n_turns=2)
    drafter = ScriptedDrafter(target, final[0].tolist(), mixed)
    cache = DynamicCache(config=target.config)
    turn_with(target, cache, ids, answer, drafter)
    cache = pickle.loads(pickle.dumps(cache))
    turn_with(target, cache, later, final, drafter)
    assert cache.dflash_context[1].n_context == final.shape[1] - 1


def test_cache_reset_between_turns(target):
    (ids, answer), *_ = chat(target)
    cache = DynamicCache(config=target.config)
    turn_with(target, cache, ids, answer)
    cache.reset()
    turn_with(target, cache, ids, answer)
    assert cache.dflash_context[1].n_context == answer.shape[1] - 1


@pytest.mark.parametrize("kind", list(TARGETS))
def test_plain_and_drafted_turns_by_turns(kind):
    """First plain, then drafted, then plain again, with one cache."""
    target = TARGETS[kind]()
    cache = DynamicCache(config=target.config)
    for turn, (ids, answer) in enumerate(chat(target, n_turns=4)):
        if turn % 2 == 0:
            plain = target.generate(ids, max_new_tokens=14, **{CACHE_NAME: cache})
            assert torch.equal(plain, answer)
        else:
            turn_with(target, cache, ids, answer)
        assert not any(getattr(layer, "record_past", False) for layer in cache.layers)


def test_cache_filled_by_a_forward(target):
    ids, answer = chat(target)[1]
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids[:, :10], **{CACHE_NAME: cache})
    turn_with(target, cache, ids, answer)


def test_two_drafters_by_turns_on_one_cache(target):
    turns = chat(target, n_turns=4)
    script = turns[-1][1][0].tolist()
    drafters = [ScriptedDrafter(target, script, mixed, block_size=b) for b in (8, 4)]
    cache = DynamicCache(config=target.config)
    for turn, (ids, answer) in enumerate(turns):
        turn_with(target, cache, ids, answer, drafters[turn % 2])
        assert cache.dflash_context[0] == drafters[turn % 2].context_key


def test_windowed_layers_hold_a_window_after_decoding():
    target = windowed_target(7)
    cache = DynamicCache(config=target.config)
    ids, answer = chat(target)[-1]
    turn_with(target, cache, ids, answer)
    assert {layer.keys.shape[2] for layer in cache.layers} == {6}


class Interrupt(StoppingCriteria):
    """What a server does when its client has gone."""

    def __init__(self, n_calls):
        self.n_left = n_calls

    def __call__(self, *_, **__):
        self.n_left -= 1
        if self.n_left == 0:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)


@pytest.mark.parametrize("kind", list(TARGETS))
@pytest.mark.parametrize("n_calls", [1, 4, 7])
def test_cache_of_an_interrupted_call_can_be_used(kind, n_calls):
    target = TARGETS[kind]()
    (ids, answer), (second, final) = chat(target, n_turns=2)
    cache = DynamicCache(config=target.config)
    drafter = ScriptedDrafter(target, answer[0].tolist(), lambda _: 4)
    with pytest.raises(KeyboardInterrupt):
        target.generate(
            ids,
            max_new_tokens=14,
            assistant_model=drafter,
            stopping_criteria=[Interrupt(n_calls)],
            **{CACHE_NAME: cache},
        )
    # The prompt and whole cycles of 5 tokens; the token after them is not forwarded yet.
    assert slots(cache) == 6 + 5 * ((n_calls - 2) // 5 if n_calls > 1 else 0)
    assert not any(m._forward_hooks for m in target.modules())
    turn_with(target, cache, second, final)


def test_cache_of_a_forward_that_failed_can_be_used():
    """The layers before the failure hold the block, those after it do not."""
    target = tiny_target()
    (ids, answer), (second, final) = chat(target, n_turns=2)
    cache = DynamicCache(config=target.config)
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")

    handle = target.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        target.generate(
            ids,
            max_new_tokens=14,
            assistant_model=ScriptedDrafter(target, answer[0].tolist(), mixed),
            **{CACHE_NAME: cache},
        )
    handle.remove()
    assert len({layer.get_seq_length() for layer in cache.layers}) == 1
    turn_with(target, cache, second, final)


@pytest.mark.parametrize("n_new", [1, 2, 9, 21, 30])
def test_static_cache(n_new):
    """The last block is cut to what the cache has room for."""
    call = {"max_new_tokens": n_new, "cache_implementation": "static"}
    output = decode_both(tiny_target(), prompt(5), **call)
    assert isinstance(output[CACHE_NAME], StaticCache)
    assert slots(output[CACHE_NAME]) == 5 + n_new - 1
    if n_new > 8:
        assert_drafts_mattered([output], 5)


def test_static_cache_with_a_custom_criterion():
    class Never(StoppingCriteria):
        def __call__(self, *_, **__):
            return torch.zeros(1, dtype=torch.bool)

    assert_equal_to_plain(
        tiny_target(),
        prompt(5),
        max_new_tokens=21,
        cache_implementation="static",
        stopping_criteria=[Never()],
    )


def test_static_cache_over_a_chat(target):
    cache = StaticCache(config=target.config, max_cache_len=80)
    turns = chat(target)
    drafter = ScriptedDrafter(target, turns[-1][1][0].tolist(), mixed)
    for ids, answer in turns:
        turn_with(target, cache, ids, answer, drafter)
        assert cache.dflash_context[1].n_context == answer.shape[1] - 1


@pytest.mark.parametrize("prefill", [None, 4])
def test_static_cache_with_padding_and_embeddings(prefill):
    target = tiny_target()
    embeds = target.get_input_embeddings()(prompt(5)).detach()
    call = {"inputs_embeds": embeds, "max_new_tokens": 21, "cache_implementation": "static"}
    plain = target.generate(**call)
    script = [*prompt(5)[0].tolist(), *plain[0].tolist()]
    drafter = ScriptedDrafter(target, script, mixed)
    output = target.generate(assistant_model=drafter, return_dict_in_generate=True, **call)
    assert torch.equal(output.sequences, plain)
    assert_drafts_mattered([output], 0)
    if prefill is not None:
        assert_equal_to_plain(
            target,
            prompt(13),
            max_new_tokens=21,
            cache_implementation="static",
            prefill_chunk_size=prefill,
        )


@pytest.mark.parametrize("name", ["offloaded", "offloaded_static"])
def test_offloaded_cache_is_refused_or_equal(name):
    target = tiny_target()
    if not torch.cuda.is_available():
        pytest.skip("offloading a cache needs an accelerator")
    assert_equal_to_plain(target, prompt(5), max_new_tokens=21, cache_implementation=name)


def count_forwards(target):
    forwards = []
    target.register_forward_pre_hook(lambda *_: forwards.append(1))
    return forwards


def test_static_cache_of_a_windowed_target_is_refused():
    target = windowed_target(7)
    forwards = count_forwards(target)
    with pytest.raises(NotImplementedError, match=r"StaticSlidingWindowLayer.*dynamic"):
        target.generate(
            prompt(5),
            max_new_tokens=21,
            cache_implementation="static",
            assistant_model=random_drafter(target),
        )
    assert forwards == []
    assert_equal_to_plain(target, prompt(5), max_new_tokens=21)


@pytest.mark.skipif(not STATIC_WINDOW_SAYS_IF_CROPPABLE, reason="transformers before 5.24")
def test_static_cache_within_the_window():
    """No token ever leaves the window: nothing is overwritten, so the cache can be rolled back."""
    target = windowed_target(64)
    assert_equal_to_plain(target, prompt(5), max_new_tokens=21, cache_implementation="static")


def test_quantized_cache_is_refused(target):
    """Quantised rows cannot be taken back exactly."""
    from transformers.cache_utils import Cache, QuantizedLayer

    class Rounded(QuantizedLayer):
        def _quantize(self, tensor, _axis):
            return tensor.half()

        def _dequantize(self, tensor):
            return tensor.float()

    cache = Cache(layers=[Rounded() for _ in range(4)])
    target = tiny_target()
    forwards = count_forwards(target)
    with pytest.raises(NotImplementedError, match=r"Rounded.*dynamic"):
        target.generate(
            prompt(5),
            max_new_tokens=21,
            assistant_model=random_drafter(target),
            **{CACHE_NAME: cache},
        )
    assert forwards == []
