"""Greedy decoding with a drafter gives the tokens of plain greedy decoding, however it is cut."""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from checks import assert_drafts_mattered, assert_equal_to_plain, decode_both, mixed, prompt
from hf_dflash.outputs_dflash import CACHE_NAME
from pairs import ScriptedDrafter, random_drafter, tiny_target

B = 8


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("n_right", range(1, B))
def test_every_acceptance_count(target, n_right):
    # Right all along but for the first cycle, so that a rejection is in every run.
    output = assert_equal_to_plain(
        target, prompt(5), lambda cycle: n_right if cycle else 0, max_new_tokens=24
    )
    assert output.statistics.n_accepted[:2] == [0, n_right]


def test_no_draft_is_ever_right(target):
    output = decode_both(target, prompt(5), lambda _: 0, max_new_tokens=12)
    assert output.statistics.n_accepted == [0] * 11
    assert output.statistics.target_forwards == 12


def test_long_output(target):
    """Nothing drifts: neither positions nor caches."""
    output = assert_equal_to_plain(target, prompt(5), max_new_tokens=300)
    assert len(output.sequences[0, 200:].unique()) > 10


def test_prompt_of_the_first_token_alone(target):
    plain = target.generate(bos_token_id=3, max_new_tokens=20)
    drafter = ScriptedDrafter(target, plain[0].tolist(), mixed)
    call = {"bos_token_id": 3, "max_new_tokens": 20, "return_dict_in_generate": True}
    output = target.generate(assistant_model=drafter, **call)
    assert torch.equal(output.sequences, plain)
    assert_drafts_mattered([output], 1)


@pytest.mark.parametrize(
    "mask", [[1, 1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0, 1, 1]]
)
def test_masks_with_holes(target, mask):
    """Odd, but plain decoding takes them."""
    ids, mask = prompt(8), torch.tensor([mask])
    call = {"attention_mask": mask, "max_new_tokens": 20, "return_dict_in_generate": True}
    plain = target.generate(ids, **call).sequences
    script = [*ids[mask == 1].tolist(), *plain[0, 8:].tolist()]
    output = target.generate(ids, assistant_model=ScriptedDrafter(target, script, mixed), **call)
    assert torch.equal(output.sequences, plain)
    assert_drafts_mattered([output], 8)


@pytest.mark.parametrize("more", [{"cache_implementation": "static"}, {"prefill_chunk_size": 2}])
def test_left_padding_and(target, more):
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt(5)], dim=1)
    mask = (torch.arange(8)[None] >= 3).long()
    call = {"attention_mask": mask, "max_new_tokens": 20, "return_dict_in_generate": True, **more}
    plain = target.generate(ids, **call).sequences
    drafter = ScriptedDrafter(target, plain[0, 3:].tolist(), mixed)
    output = target.generate(ids, assistant_model=drafter, **call)
    assert torch.equal(output.sequences, plain)
    assert_drafts_mattered([output], 8)


def test_random_drafter(target):
    plain = target.generate(prompt(5), max_new_tokens=24)
    drafted = target.generate(prompt(5), max_new_tokens=24, assistant_model=random_drafter(target))
    assert torch.equal(drafted, plain)


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_block_sizes(target, block_size):
    output = assert_equal_to_plain(target, prompt(5), block_size=block_size, max_new_tokens=50)
    assert max(output.statistics.n_accepted) == block_size - 1


def test_prompt_lengths(target):
    outputs = [decode_both(target, prompt(n), max_new_tokens=11) for n in range(1, B + 4)]
    for n, output in enumerate(outputs, start=1):
        assert_drafts_mattered([output], n)


def test_numbers_of_new_tokens(target):
    outputs = [
        decode_both(target, prompt(3), lambda c: mixed(c + 2), max_new_tokens=n)
        for n in range(1, 2 * B + 2)
    ]
    assert [o.sequences.shape[1] - 3 for o in outputs] == list(range(1, 2 * B + 2))
    assert_drafts_mattered(outputs, 3)


@pytest.mark.parametrize("max_length", [5, 6, 13, 20])
def test_max_length(target, max_length):
    output = decode_both(target, prompt(4), max_length=max_length)
    assert output.sequences.shape[1] == max_length
    assert output.statistics.target_forwards <= max_length - 4


@pytest.mark.parametrize("n_most", range(1, B))
def test_number_of_drafts_from_the_drafter(target, n_most):
    plain = target.generate(prompt(5), max_new_tokens=20)
    drafter = ScriptedDrafter(target, plain[0].tolist(), mixed)
    drafter.generation_config.num_assistant_tokens = n_most
    output = target.generate(
        prompt(5), max_new_tokens=20, assistant_model=drafter, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain)
    assert_drafts_mattered([output], 5)
    assert max(output.statistics.n_drafted) == n_most


@pytest.mark.parametrize("n_most", range(1, B))
def test_number_of_drafts_from_the_call(target, n_most):
    output = assert_equal_to_plain(
        target, prompt(5), max_new_tokens=20, num_assistant_tokens=n_most
    )
    assert max(output.statistics.n_drafted) == n_most


@pytest.mark.parametrize("threshold", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_confidence_threshold(target, threshold):
    # A head of rank 32 makes some drafts of 96 tokens unsure: blocks are cut at various places.
    output = decode_both(
        target, prompt(5), max_new_tokens=40, assistant_confidence_threshold=threshold
    )
    assert sum(output.statistics.n_accepted) < sum(output.statistics.n_drafted)
    if threshold == 0.0:
        assert_drafts_mattered([output], 5)


def test_threshold_nothing_reaches(target):
    output = decode_both(target, prompt(5), max_new_tokens=9, assistant_confidence_threshold=1.0)
    assert sum(output.statistics.n_drafted) == 0
    assert output.statistics.n_cycles == 8


def test_left_padding(target):
    ids, n_pad = prompt(5), 4
    padded = torch.cat([torch.zeros(1, n_pad, dtype=torch.long), ids], dim=1)
    call = {
        "attention_mask": (torch.arange(n_pad + 5)[None] >= n_pad).long(),
        "max_new_tokens": 24,
        "return_dict_in_generate": True,
    }
    plain = target.generate(padded, **call)
    drafter = ScriptedDrafter(target, plain.sequences[0, n_pad:].tolist(), mixed)
    output = target.generate(padded, assistant_model=drafter, **call)
    assert torch.equal(output.sequences, plain.sequences)
    assert_drafts_mattered([output], n_pad + 5)


def test_prompt_as_embeddings(target):
    ids = prompt(5)
    embeds = target.get_input_embeddings()(ids).detach()
    call = {"inputs_embeds": embeds, "max_new_tokens": 24, "return_dict_in_generate": True}
    plain = target.generate(**call)
    script = [*ids[0].tolist(), *plain.sequences[0].tolist()]
    drafter = ScriptedDrafter(target, script, mixed)
    output = target.generate(assistant_model=drafter, **call)
    assert torch.equal(output.sequences, plain.sequences)
    assert_drafts_mattered([output], 0)


@pytest.mark.parametrize("chunk", [1, 3, 7, 20])
def test_prompt_in_chunks(target, chunk):
    output = assert_equal_to_plain(target, prompt(17), max_new_tokens=20, prefill_chunk_size=chunk)
    whole = decode_both(target, prompt(17), max_new_tokens=20)
    _, chunked_context = output[CACHE_NAME].dflash_context
    _, whole_context = whole[CACHE_NAME].dflash_context
    assert chunked_context.n_context == whole_context.n_context == 17 + 19


@pytest.mark.parametrize("window", [4, 9])
def test_target_with_a_sliding_window(window):
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
    target = MistralForCausalLM(config).eval()
    outputs = [
        decode_both(target, prompt(n), max_new_tokens=30) for n in (1, window - 1, window + 8)
    ]
    assert_drafts_mattered(outputs, window + 8)


@pytest.mark.parametrize(
    ("target_dtype", "drafter_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_drafter_in_another_dtype(target_dtype, drafter_dtype):
    target = tiny_target().to(target_dtype)
    plain = target.generate(
        prompt(5), max_new_tokens=24, return_dict_in_generate=True, output_logits=True
    )
    drafter = ScriptedDrafter(target, plain.sequences[0].tolist(), mixed).to(drafter_dtype)
    output = target.generate(
        prompt(5), max_new_tokens=24, assistant_model=drafter, return_dict_in_generate=True
    )
    assert_drafts_mattered([output], 5)
    differs = (output.sequences != plain.sequences)[0].nonzero()
    if target_dtype == torch.float32:
        assert len(differs) == 0
    elif len(differs):  # a block rounds otherwise than a single row: only a near tie may flip
        top = plain.logits[int(differs[0]) - 5][0].topk(2).values
        assert top[0] - top[1] <= 2**-6 * top[0].abs()


# peft 0.21 reads a property of the model that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_target():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    target = get_peft_model(tiny_target(), lora)
    plain = target.generate(input_ids=prompt(5), max_new_tokens=24)
    drafter = ScriptedDrafter(target, plain[0].tolist(), mixed)
    output = target.generate(
        input_ids=prompt(5),
        max_new_tokens=24,
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, plain)
    assert_drafts_mattered([output], 5)
    without = tiny_target().generate(prompt(5), max_new_tokens=24)
    assert not torch.equal(plain, without)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_adapter_of_virtual_tokens_is_refused(kind):
    """PEFT passes one token a forward on, whatever it is asked for."""
    import peft

    target = tiny_target()
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    adapted = peft.get_peft_model(target, config).eval()
    call = {"input_ids": prompt(5), "max_new_tokens": 8}
    with pytest.raises(NotImplementedError, match=r"adapter of virtual tokens.*LoRA"):
        adapted.generate(assistant_model=random_drafter(target), **call)
    assert not any(m._forward_hooks for m in target.modules())


# Before 5.24 transformers warns of inputs that are not on the "meta" device.
@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_target(place, tmp_path):
    from accelerate import cpu_offload, disk_offload

    target = tiny_target()
    plain = target.generate(prompt(5), max_new_tokens=24)
    drafter = ScriptedDrafter(target, plain[0].tolist(), mixed)
    if place == "cpu":
        cpu_offload(target, execution_device=torch.device("cpu"))
    else:
        disk_offload(target, str(tmp_path), execution_device=torch.device("cpu"))
    assert next(target.parameters()).device.type == "meta"
    output = target.generate(
        prompt(5), max_new_tokens=24, assistant_model=drafter, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain)
    assert_drafts_mattered([output], 5)
