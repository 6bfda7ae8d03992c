"""What the context cache costs in memory and in work, alone and within a decoding call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from hf_dflash import drafting
from hf_dflash.context_cache import ContextCache
from pairs import random_drafter, scripted, tiny_target

SLIDING, FULL = "sliding_attention", "full_attention"


def rows(n_rows: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.arange(start, start + n_rows, dtype=torch.float32).reshape(1, 1, -1, 1)
    return keys, keys + 0.5


def test_an_empty_cache_takes_no_memory():
    assert ContextCache([None, 4]).n_bytes() == 0


def test_a_view_is_no_copy():
    cache = ContextCache([None])
    keys, values = cache.update(*rows(5), 0)
    cache.commit(5)
    again, _ = cache.update(*rows(2, 5), 0)
    assert again.data_ptr() == keys.data_ptr()
    assert keys.data_ptr() != values.data_ptr()


def test_growing_keeps_the_context():
    cache = ContextCache([None])
    for start in range(0, 2000, 40):
        keys, values = cache.update(*rows(48, start), 0)
        cache.commit(40)
    assert keys.flatten().tolist() == list(range(2008))
    assert torch.equal(values, keys + 0.5)


def test_block_rows_are_overwritten_by_the_next_context():
    cache = ContextCache([None, 3])
    for layer in (0, 1):
        cache.update(*rows(10), layer)
    cache.commit(4)  # six rows were a block
    assert cache.update(*rows(1, 70), 0)[0].flatten().tolist() == [0, 1, 2, 3, 70]
    assert cache.update(*rows(1, 70), 1)[0].flatten().tolist() == [2, 3, 70]


def test_dropped_rows_do_not_come_back_from_beyond_a_window():
    cache = ContextCache([None, 4])
    for layer in (0, 1):
        cache.update(*rows(10), layer)
    cache.commit(10)
    cache.drop(2)
    assert cache.n_context == 8
    assert cache.update(*rows(1, 90), 0)[0].flatten().tolist() == [*range(8), 90]
    assert cache.update(*rows(1, 90), 1)[0].flatten().tolist() == [7, 90]
    cache.drop(100)
    assert cache.n_context == 0
    assert [cache.update(*rows(1, 5), i)[0].shape[2] for i in (0, 1)] == [1, 1]


def test_a_windows_memory_does_not_grow_with_the_context():
    cache = ContextCache([32])
    sizes = set()
    for start in range(0, 5000, 3):
        cache.update(*rows(11, start), 0)
        cache.commit(3)
        sizes.add(cache.n_bytes())
    assert sizes == {2 * 4 * 256}


def test_a_drafters_cache_has_its_layers_windows():
    target = tiny_target()
    drafter = random_drafter(target, layer_types=[SLIDING, FULL], sliding_window=6)
    cache = drafter.new_cache()
    taps = torch.randn(1, 40, 64)
    with torch.no_grad():
        drafter.extend_context(taps, torch.arange(40)[None], cache)
    none = torch.empty(1, 2, 0, 8)
    assert [cache.update(none, none, i)[0].shape[2] for i in (0, 1)] == [5, 40]


class Rows:
    """Counts the rows that each of a drafter's linear layers is given."""

    def __init__(self, drafter: Any) -> None:
        self.total: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        for name, module in drafter.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._counter(name))

    def _counter(self, name: str) -> Any:
        def count(_module: nn.Module, args: tuple[torch.Tensor]) -> None:
            self.total[name] += args[0].shape[1]
            self.most[name] = max(self.most[name], args[0].shape[1])

        return count


@pytest.mark.parametrize("n_prompt", [1, 5, 30])
@pytest.mark.parametrize("layers", [{}, {"layer_types": [SLIDING, FULL], "sliding_window": 6}])
def test_every_token_is_projected_once_and_a_block_once_a_cycle(n_prompt, layers):
    target, n_new = tiny_target(), 40
    ids = torch.randint(1, 90, (1, n_prompt), generator=torch.Generator().manual_seed(1))
    drafter, plain = scripted(target, ids, n_new, lambda cycle: (3, 0, 7)[cycle % 3], **layers)
    counted = Rows(drafter)
    output = target.generate(
        ids,
        assistant_model=drafter,
        max_new_tokens=n_new,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == plain.tolist()
    statistics = output.statistics
    assert 0 < sum(statistics.n_accepted) < sum(statistics.n_drafted)
    assert statistics.target_forwards < n_new
    n_context = n_prompt + n_new - 1  # the target has not run on the last token
    n_block_rows = sum(n + 1 for n in statistics.n_drafted if n)
    assert counted.total["fc"] == n_context
    for i in (0, 1):
        assert counted.total[f"layers.{i}.self_attn.k_proj"] == n_context + n_block_rows
        assert counted.total[f"layers.{i}.self_attn.v_proj"] == n_context + n_block_rows
        assert counted.total[f"layers.{i}.self_attn.q_proj"] == n_block_rows


def test_dflare_projects_context_and_block_apart_and_once():
    target, n_new = tiny_target(), 40
    ids = torch.randint(1, 90, (1, 12), generator=torch.Generator().manual_seed(1))
    drafter, _ = scripted(target, ids, n_new, lambda cycle: cycle % 4, architecture="dflare")
    counted = Rows(drafter)
    output = target.generate(
        ids, assistant_model=drafter, max_new_tokens=n_new, return_dict_in_generate=True
    )
    statistics = output.statistics
    assert 0 < sum(statistics.n_accepted) < sum(statistics.n_drafted)
    assert counted.total["layers.1.self_attn.k_proj_target"] == 12 + n_new - 1
    n_block_rows = sum(n + 1 for n in statistics.n_drafted if n)
    assert counted.total["layers.1.self_attn.k_proj"] == n_block_rows


def test_a_long_prompt_is_projected_in_chunks():
    target = tiny_target(max_position_embeddings=4096)
    n_prompt, chunk = 2 * drafting._CONTEXT_CHUNK + 300, drafting._CONTEXT_CHUNK
    ids = torch.randint(1, 90, (1, n_prompt), generator=torch.Generator().manual_seed(1))
    drafter, plain = scripted(target, ids, 12, lambda cycle: 2 * (cycle % 2))
    counted = Rows(drafter)
    drafted = target.generate(ids, assistant_model=drafter, max_new_tokens=12, do_sample=False)
    assert drafted.tolist() == plain.tolist()
    assert counted.total["fc"] == n_prompt + 11
    assert counted.most["fc"] == counted.most["layers.0.self_attn.k_proj"] == chunk
