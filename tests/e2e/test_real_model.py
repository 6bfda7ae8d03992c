"""A real language model and a trained drafter: SmolLM2-135M-Instruct and the one in model_cards.

Prompts are those of `benchmarks/prompts.jsonl`; `benchmarks/equality.py` runs all of them, longer.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dflash import DFlashDraftModel
from hf_dflash.outputs_dflash import CACHE_NAME
from hf_dflash.smollm2 import load_target
from near_tie import CycleRecorder, examine, first_difference

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DRAFTER = ROOT / "model_cards" / "smollm2-135m-instruct-dflash"
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (ROOT / "benchmarks" / "prompts.jsonl").read_text("utf-8").splitlines()
]
N_NEW = 48


def _load(dtype: torch.dtype) -> SimpleNamespace:
    try:
        target, tokenizer = load_target(dtype)
    except RuntimeError as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")
    drafter = DFlashDraftModel.from_pretrained(DRAFTER, dtype=dtype).eval()
    return SimpleNamespace(target=target, tokenizer=tokenizer, drafter=drafter)


@pytest.fixture(scope="module")
def pair() -> SimpleNamespace:
    return _load(torch.float32)


@pytest.fixture(scope="module")
def bfloat16_pair() -> SimpleNamespace:
    return _load(torch.bfloat16)


def _encode(pair: Any, prompt: str) -> Tensor:
    chat = [{"role": "user", "content": prompt}]
    encoded = pair.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


def _plain(pair: Any, ids: Tensor, **options: Any) -> Any:
    options = {"max_new_tokens": N_NEW, "do_sample": False, **options}
    return pair.target.generate(ids, attention_mask=torch.ones_like(ids), **options)


def _drafted(pair: Any, ids: Tensor, **options: Any) -> Any:
    return _plain(pair, ids, assistant_model=pair.drafter, return_dict_in_generate=True, **options)


def _accepts_and_rejects(statistics: Any) -> bool:
    n_accepted, n_drafted = sum(statistics.n_accepted), sum(statistics.n_drafted)
    return 0 < n_accepted < n_drafted


# One of each kind, and a second table: the drafter is good at some and bad at others.
@pytest.mark.parametrize("number", [0, 14, 24, 32, 41, 47])
def test_float32_tokens_are_those_of_plain_decoding_in_fewer_forwards(pair, number):
    ids = _encode(pair, PROMPTS[number])
    output = _drafted(pair, ids)
    assert torch.equal(output.sequences, _plain(pair, ids))
    assert _accepts_and_rejects(output.statistics)
    assert output.statistics.target_forwards < output.sequences.shape[1] - ids.shape[1]


def _bfloat16_cycles(pair: Any, ids: Tensor) -> tuple[list[int], CycleRecorder, Any]:
    recorder = CycleRecorder()
    statistics = _drafted(pair, ids, streamer=recorder).statistics
    return _plain(pair, ids)[0, ids.shape[1] :].tolist(), recorder, statistics


def test_bfloat16_tokens_differ_at_near_ties_only(pair, bfloat16_pair):
    ids = _encode(pair, PROMPTS[41])
    plain, recorder, statistics = _bfloat16_cycles(bfloat16_pair, ids)
    difference = examine(
        bfloat16_pair.target,
        pair.target,
        ids,
        plain,
        cycles=recorder.cycles,
        n_drafted=statistics.n_drafted,
    )
    assert _accepts_and_rejects(statistics)
    assert difference is None or difference.is_near_tie, difference


def test_a_wrong_bfloat16_token_is_no_near_tie(pair, bfloat16_pair):
    ids = _encode(pair, PROMPTS[41])
    plain, recorder, statistics = _bfloat16_cycles(bfloat16_pair, ids)
    cycles = [list(cycle) for cycle in recorder.cycles]
    cycles[1][0] = (plain[1] + 1) % pair.target.config.vocab_size
    difference = examine(
        bfloat16_pair.target,
        pair.target,
        ids,
        plain,
        cycles=cycles,
        n_drafted=statistics.n_drafted,
    )
    assert difference.token_index == 1
    assert not difference.is_near_tie
    assert replace(difference, distance=0.0).is_near_tie


def test_a_missed_stop_is_no_rounding():
    with pytest.raises(RuntimeError, match=r"2 tokens and drafted decoding 3"):
        first_difference([5, 6], [5, 6, 7])


def test_a_wrong_first_token_is_no_rounding():
    with pytest.raises(RuntimeError, match="first token differs"):
        examine(None, None, torch.tensor([[1]]), [5], cycles=[[6]], n_drafted=[])


def test_sampled_tokens_come_from_the_targets_top_k(pair):
    ids = _encode(pair, PROMPTS[47])
    torch.manual_seed(0)
    output = _drafted(pair, ids, do_sample=True, temperature=0.7, top_k=20)
    new_ids = output.sequences[0, ids.shape[1] :]
    assert len(new_ids) <= N_NEW
    assert _accepts_and_rejects(output.statistics)
    with torch.inference_mode():
        logits = pair.target(output.sequences).logits[0, ids.shape[1] - 1 : -1]
    chosen = logits.gather(1, new_ids[:, None])[:, 0]
    least = logits.topk(20).values[:, -1]
    assert bool((chosen >= least - 1e-3).all())  # the slack is for the shape of this one forward


def test_a_second_turn_goes_on_from_the_cache_of_the_first(pair):
    ids = _encode(pair, PROMPTS[40])
    first = _drafted(pair, ids, max_new_tokens=24)
    follow_up = (
        "<|im_end|>\n<|im_start|>user\nAdd two more rows.<|im_end|>\n<|im_start|>assistant\n"
    )
    question = pair.tokenizer(follow_up, add_special_tokens=False, return_tensors="pt").input_ids
    both = torch.cat([first.sequences, question], dim=1)
    n_seen = first[CACHE_NAME].get_seq_length()
    second = _drafted(pair, both, max_new_tokens=24, **{CACHE_NAME: first[CACHE_NAME]})
    assert n_seen == first.sequences.shape[1] - 1
    assert torch.equal(second.sequences, _plain(pair, both, max_new_tokens=24))
    assert _accepts_and_rejects(second.statistics)
    assert second.statistics.target_forwards < 24
