from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_dflash.loading import load_model
from hf_dflash.sharding import check_one_forward_a_batch, shard_target
from hf_dflash.training_checks import check_device
from training_pairs import row_of, training_drafter, training_target


def test_one_process_cannot_shard() -> None:
    with pytest.raises(RuntimeError, match="`shard_target` needs several processes, got one"):
        shard_target(training_target(), torch.device("cpu"))


def test_packed_rows_are_refused_with_a_sharded_target() -> None:
    """Each process would run the target another number of times, and wait for ever."""
    packed = row_of([1, 2, 3, 4], document_ids=[1, 1, 2, 2])
    check_one_forward_a_batch([row_of([1, 2, 3, 4])], "data")
    check_one_forward_a_batch([], "eval_data")
    with pytest.raises(NotImplementedError, match="`data` holds packed rows, which `shard_target`"):
        check_one_forward_a_batch([packed], "data")


def test_several_processes_do_not_spread_the_target_each(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"`target_device_map` spreads .* there are 2 processes"):
        load_model(str(tmp_path), device_map="auto")


def test_fsdp_that_leaves_the_target_empty_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = training_drafter(training_target()).config
    args = SimpleNamespace(device=torch.device("cpu"), fsdp=True, ema_decay=None)
    check_device(config, args, shards=True)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    with pytest.raises(ValueError, match="`fsdp_cpu_ram_efficient_loading` must be false, got tr"):
        check_device(config, args, shards=True)
