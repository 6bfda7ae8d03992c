from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_dflash.planner import available_bytes, plan_memory

GIB = 2**30
# The drafter of Qwen3-8B.
CONFIG = SimpleNamespace(
    block_size=16,
    hidden_size=4096,
    target_hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    num_hidden_layers=5,
    target_layer_ids=[1, 9, 17, 25, 33],
    vocab_size=151936,
)


def plan(available: int, **options: Any) -> Any:
    sizes = {"n_trained": 1_050_000_000, "target_bytes": 16 * GIB, "n_rows": 1, "n_tokens": 3072}
    return plan_memory(CONFIG, **sizes, n_anchors=512, available=available, **options)


def test_the_parts_of_the_published_recipe() -> None:
    memory = plan(200 * GIB)
    assert memory.drafter == 16 * 1_050_000_000
    assert memory.taps == 4 * 3072 * 5 * 4096
    assert memory.mask == 8192 * (3072 + 8192)
    assert memory.logits == 512 * 151936 * 14
    assert memory.logits_chunk_size == 512
    assert memory.fits
    assert "logits of 512 rows at once" in memory.summary()


def test_less_memory_gives_smaller_chunks_down_to_a_few_rows() -> None:
    needed = plan(0).needed
    middle = plan(needed + GIB)
    assert 64 < middle.logits_chunk_size < 512
    assert middle.fits
    tiny = plan(0)
    assert tiny.logits_chunk_size == 64
    assert not tiny.fits


def test_a_choice_is_kept_and_no_more_rows_than_there_are_are_planned() -> None:
    assert plan(200 * GIB, logits_chunk_size=7).logits_chunk_size == 7
    small = plan_memory(
        CONFIG, n_trained=1, target_bytes=1, n_rows=1, n_tokens=9, n_anchors=2, available=GIB
    )
    assert small.logits_chunk_size == 30
    assert plan(GIB, dense_mask=False).mask == 0


def test_the_free_memory_of_this_machine() -> None:
    assert available_bytes(torch.device("cpu")) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_free_memory_of_a_gpu() -> None:
    assert available_bytes(torch.device("cuda")) > 0
