"""Every family's greedy output is plain decoding's, bit for bit, whatever the drafter proposes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers

from families.zoo import TEXT_TARGETS, VISION_TARGETS, image_inputs, prompt
from pairs import ScriptedDrafter, random_drafter, tiny_target

FAMILIES = [*TEXT_TARGETS, *VISION_TARGETS]
N_RIGHT = (0, 3, 15, 1, 7)  # right drafts of successive cycles, then one wrong


@functools.cache
def target_of(family: str) -> Any:
    return {**TEXT_TARGETS, **VISION_TARGETS}[family]()


def text_inputs(n_tokens: int, n_padding: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.cat([torch.zeros(1, n_padding, dtype=torch.long), prompt(n_tokens)], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :n_padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def plain(target: Any, inputs: dict[str, torch.Tensor], n_new: int) -> torch.Tensor:
    return target.generate(**inputs, max_new_tokens=n_new, do_sample=False)


def drafted(target: Any, inputs: Any, drafter: Any, n_new: int, **options: Any) -> Any:
    options = {"do_sample": False, "return_dict_in_generate": True, **options}
    return target.generate(**inputs, assistant_model=drafter, max_new_tokens=n_new, **options)


def scripted_drafter(target: Any, script: torch.Tensor, block_size: int = 16) -> ScriptedDrafter:
    return ScriptedDrafter(
        target, script[0].tolist(), lambda cycle: N_RIGHT[cycle % len(N_RIGHT)], block_size
    )


def assert_same_with_hits_and_misses(target: Any, inputs: Any, n_new: int) -> None:
    expected = plain(target, inputs, n_new)
    n_prompt = inputs["input_ids"].shape[1]
    assert expected[0, n_prompt:].unique().numel() > 4  # a constant output would prove little
    n_padding = int((inputs["attention_mask"] == 0).sum())
    script = expected[:, n_padding:]  # by position id
    output = drafted(target, inputs, scripted_drafter(target, script), n_new)
    assert output.sequences.tolist() == expected.tolist()
    statistics = output.statistics
    n_accepted = sum(statistics.n_accepted)
    assert n_accepted > 0
    assert sum(statistics.n_drafted) > n_accepted
    assert statistics.target_forwards < n_new


@pytest.mark.parametrize("n_prompt", [1, 6, 21])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_prompts_with_right_and_wrong_drafts(family, n_prompt):
    assert_same_with_hits_and_misses(target_of(family), text_inputs(n_prompt), 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_prompts(family):
    assert_same_with_hits_and_misses(target_of(family), text_inputs(6, n_padding=5), 40)


@pytest.mark.parametrize("n_text", [2, 15])
@pytest.mark.parametrize("family", VISION_TARGETS)
def test_image_prompts_with_right_and_wrong_drafts(family, n_text):
    assert_same_with_hits_and_misses(target_of(family), image_inputs(family, n_text), 40)


@pytest.mark.parametrize("family", VISION_TARGETS)
def test_the_image_matters(family):
    # Else the tests with images would be tests of text.
    target, inputs = target_of(family), image_inputs(family)
    other = {**inputs, "pixel_values": -inputs["pixel_values"]}
    assert plain(target, inputs, 12).tolist() != plain(target, other, 12).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_that_is_never_right_changes_nothing(family):
    target, inputs = target_of(family), text_inputs(6)
    output = drafted(target, inputs, random_drafter(target, 16), 16)
    assert output.sequences.tolist() == plain(target, inputs, 16).tolist()
    assert sum(output.statistics.n_drafted) > sum(output.statistics.n_accepted)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_only_chooses_what_the_target_may_choose(family):
    target, inputs, n_new = target_of(family), text_inputs(9), 24
    drafter = scripted_drafter(target, plain(target, inputs, n_new))
    torch.manual_seed(0)
    sampled = drafted(target, inputs, drafter, n_new, do_sample=True, top_k=3, temperature=1.3)
    logits = target(sampled.sequences).logits[0, 8:-1]
    chosen = sampled.sequences[0, 9:]
    rank = (logits > logits.gather(1, chosen[:, None])).sum(dim=1)
    assert chosen.shape == (n_new,)
    assert int(rank.max()) in (1, 2)  # never beyond the top 3, and not always the first


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_from_one_token_is_greedy_decoding(family):
    target, inputs = target_of(family), text_inputs(9)
    expected = plain(target, inputs, 24)
    drafter = scripted_drafter(target, expected)
    output = drafted(target, inputs, drafter, 24, do_sample=True, top_k=1)
    assert output.sequences.tolist() == expected.tolist()
    assert sum(output.statistics.n_accepted) > 0


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Mamba", {"state_size": 4, "num_hidden_layers": 2}),
        ("Qwen3Next", {"num_hidden_layers": 2, "num_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_recurrent_targets_are_refused_before_any_work(name, sizes):
    config = getattr(transformers, f"{name}Config")(vocab_size=96, hidden_size=32, **sizes)
    target = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    drafter = random_drafter(tiny_target())
    called = []
    target.register_forward_pre_hook(lambda *_: called.append(1))
    with pytest.raises(NotImplementedError, match="recurrent state cannot be rolled back"):
        target.generate(prompt(4), assistant_model=drafter, max_new_tokens=4)
    assert not called
