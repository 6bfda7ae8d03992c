"""`return_dict_in_generate`: every record is plain decoding's, tensor by tensor."""

import pickle

import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, MistralConfig, MistralForCausalLM
from transformers.generation.utils import GenerateDecoderOnlyOutput

from checks import assert_equal_to_plain, decode_both, mixed, prompt
from hf_dflash.outputs_dflash import CACHE_NAME
from pairs import ScriptedDrafter, tiny_target

EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
}

FIELDS = {"scores", "logits", "attentions", "hidden_states"}


@pytest.fixture(scope="module")
def target():
    return tiny_target(attn_implementation="eager")


@pytest.fixture(scope="module")
def windowed():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="eager",
    )
    return MistralForCausalLM(config).eval()


def assert_same_records(target, input_ids, n_right=mixed, **call):
    """Decode both ways and compare every field of the outputs."""
    call = {"max_new_tokens": 22, **EVERYTHING, **call}
    plain = target.generate(input_ids, **call)
    drafter = ScriptedDrafter(target, plain.sequences[0].tolist(), n_right)
    output = target.generate(input_ids, assistant_model=drafter, **call)
    assert torch.equal(output.sequences, plain.sequences)
    assert set(output.keys()) == {*plain.keys(), "statistics"}
    same_records(output, plain)
    cache, other = output[CACHE_NAME], plain[CACHE_NAME]
    assert type(cache) is type(other)
    assert int(cache.get_seq_length()) == int(other.get_seq_length())
    return output, plain


def same_records(output, plain):
    for name in FIELDS:
        if plain.get(name) is not None:
            same_tensors(output[name], plain[name], name)


def same_tensors(ours, theirs, path):
    if isinstance(theirs, tuple):
        assert len(ours) == len(theirs), path
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same_tensors(a, b, f"{path}[{i}]")
        return
    assert ours.shape == theirs.shape, path
    assert ours.dtype == theirs.dtype, path
    # A block's sums round otherwise than a single row's, relative to the largest value.
    scale = max(1.0, float(theirs.abs().max()))
    torch.testing.assert_close(
        ours / scale, theirs / scale, atol=1e-5, rtol=0, msg=lambda m: f"{path}: {m}"
    )


@pytest.mark.parametrize("n_prompt", [1, 5])
def test_records(target, n_prompt):
    output, _ = assert_same_records(target, prompt(n_prompt))
    assert len(output.scores) == len(output.logits) == len(output.attentions) == 22
    assert isinstance(output, GenerateDecoderOnlyOutput)
    assert 0 < sum(output.statistics.n_accepted) < sum(output.statistics.n_drafted)


def test_records_with_processors(target):
    output, _ = assert_same_records(target, prompt(5), repetition_penalty=1.4)
    assert not torch.equal(output.scores[3], output.logits[3])


def test_records_up_to_a_stop(target):
    ids = target.generate(prompt(5), max_new_tokens=22)[0, 5:].tolist()
    for place in (2, 5, 6):
        output, _ = assert_same_records(
            target, prompt(5), lambda _: 3, eos_token_id=ids[place], pad_token_id=0
        )
        assert len(output.hidden_states) == ids.index(ids[place]) + 1


@pytest.mark.parametrize("n_prompt", [2, 5, 6, 13])
def test_records_of_a_windowed_target(windowed, n_prompt):
    assert_same_records(windowed, prompt(n_prompt))


def test_records_of_a_target_whose_layers_share_keys():
    """Layers without a cache of their own show what the layer shows whose keys they use."""
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=8,
        sliding_window=6,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding") * 2][:5],
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=96,
        hidden_size_per_layer_input=8,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="eager",
    )
    assert_same_records(Gemma4ForCausalLM(config).eval(), prompt(5))


def test_records_with_a_static_cache(target):
    output, _ = assert_same_records(target, prompt(5), cache_implementation="static")
    assert {w.shape[-1] for step in output.attentions[1:] for w in step} == {26}


def test_records_of_a_prompt_with_padding(target):
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt(5)], dim=1)
    mask = (torch.arange(8)[None] >= 3).long()
    call = {"attention_mask": mask, "max_new_tokens": 22, **EVERYTHING}
    plain = target.generate(ids, **call)
    drafter = ScriptedDrafter(target, plain.sequences[0, 3:].tolist(), mixed)
    output = target.generate(ids, assistant_model=drafter, **call)
    assert torch.equal(output.sequences, plain.sequences)
    same_records(output, plain)


def test_records_of_a_later_turn(target):
    """With a cache carried over, the first entry covers what is new of the prompt."""
    records = []
    for drafted in (False, True):
        first = target.generate(prompt(5), max_new_tokens=9, return_dict_in_generate=True)
        cache = first[CACHE_NAME]
        ids = torch.cat([first.sequences, prompt(4, seed=3)], dim=1)
        call = {"max_new_tokens": 12, **EVERYTHING}
        if drafted:
            script = records[0].sequences[0].tolist()
            call["assistant_model"] = ScriptedDrafter(target, script, mixed)
        records.append(target.generate(ids, **{CACHE_NAME: cache}, **call))
    plain, output = records
    assert torch.equal(output.sequences, plain.sequences)
    same_records(output, plain)


@pytest.mark.parametrize(
    "asked", ["output_scores", "output_logits", "output_attentions", "output_hidden_states"]
)
def test_only_what_is_asked_for(target, asked):
    call = dict.fromkeys(list(EVERYTHING)[1:], False)
    output, _ = assert_same_records(target, prompt(5), **{**call, asked: True})
    field = asked.removeprefix("output_")
    assert FIELDS & set(output.keys()) == {field}


def test_records_keep_no_rejected_rows_alive(target):
    """Each tensor has its own memory: a long output does not hold every block's logits."""
    output, _ = assert_same_records(target, prompt(5))
    for name in ("scores", "logits"):
        rows = output[name][1:]
        bytes_held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in rows}
        assert sum(bytes_held.values()) == len(rows) * 96 * 4
    for step in output.hidden_states[1:]:
        assert all(layer.untyped_storage().nbytes() == 32 * 4 for layer in step)


def test_transition_scores(target):
    call = {"max_new_tokens": 22, "return_dict_in_generate": True, "output_scores": True}
    plain = target.generate(prompt(5), **call)
    output = decode_both(target, prompt(5), **call)
    ours, theirs = (
        target.compute_transition_scores(o.sequences, o.scores, normalize_logits=True)
        for o in (output, plain)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_without_a_dict(target):
    plain = target.generate(prompt(5), max_new_tokens=22)
    drafter = ScriptedDrafter(target, plain[0].tolist(), mixed)
    ids = target.generate(prompt(5), max_new_tokens=22, assistant_model=drafter, output_scores=True)
    assert torch.equal(ids, plain)
    assert ids.is_contiguous()


def test_prompt_is_not_changed(target):
    ids = prompt(5)
    decode_both(target, ids, max_new_tokens=22)
    assert torch.equal(ids, prompt(5))


def test_statistics_add_up(target):
    output = assert_equal_to_plain(target, prompt(5), max_new_tokens=30)
    statistics = output.statistics
    assert sum(statistics.n_accepted) + statistics.n_cycles + 1 == 30
    assert statistics.target_forwards == statistics.n_cycles + 1
    assert statistics.draft_forwards == sum(n > 0 for n in statistics.n_drafted)
    pairs = zip(statistics.n_accepted, statistics.n_drafted, strict=True)
    assert all(0 <= accepted <= drafted <= 7 for accepted, drafted in pairs)
    assert statistics.acceptance_length == 29 / statistics.n_cycles


def test_statistics_of_a_cut_cycle(target):
    """A stop that is an accepted draft leaves its cycle without a bonus token."""
    ids = target.generate(prompt(5), max_new_tokens=22)[0, 5:].tolist()
    for place in range(1, 7):
        output = decode_both(
            target, prompt(5), None, max_new_tokens=22, eos_token_id=ids[place], pad_token_id=0
        )
        statistics = output.statistics
        n_new = output.sequences.shape[1] - 5
        assert sum(statistics.n_accepted) + statistics.n_cycles + 1 == n_new + 1


def test_statistics_of_one_token(target):
    output = decode_both(target, prompt(5), max_new_tokens=1)
    assert output.statistics.n_cycles == 0
    assert output.statistics.target_forwards == 1
    assert output.statistics.acceptance_length != output.statistics.acceptance_length


def test_output_can_be_pickled(target):
    output = decode_both(target, prompt(5), max_new_tokens=12)
    again = pickle.loads(pickle.dumps(output))
    assert torch.equal(again.sequences, output.sequences)
    assert again.statistics == output.statistics
