from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Subset

from hf_dflash import taps_cache
from hf_dflash.collator import EpochRows
from hf_dflash.resuming import rows_digest, run_settings
from hf_dflash.taps_cache import DTYPES, CachedTaps, check_taps, drop_layers, plan_cache, write_taps
from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from training_pairs import (
    batch_of,
    generated_rows,
    random_ids,
    row_of,
    step_of,
    training_drafter,
    training_target,
)


@pytest.fixture(scope="module")
def target() -> Any:
    return training_target()


@pytest.fixture(scope="module")
def rows(target: Any) -> list[Any]:
    whole = generated_rows(target, 7, n_new=16)
    return [{name: column[: 20 - i] for name, column in row.items()} for i, row in enumerate(whole)]


@pytest.fixture(scope="module")
def config(target: Any) -> Any:
    return training_drafter(target).config


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("taps-*.safetensors"))


@pytest.mark.parametrize(
    ("dtype", "relative"),
    [("float32", 1e-5), ("bfloat16", 0.005), ("float16", 0.001), ("float8", 0.07)],
)
def test_what_is_read_is_what_the_target_says(
    target: Any, rows: Any, config: Any, tmp_path: Path, dtype: str, relative: float
) -> None:
    layout = write_taps(
        target, config, rows, tmp_path, dtype=dtype, shard_bytes=8000, tokens_at_once=45
    )
    cached = CachedTaps(rows, tmp_path, config)
    assert len(shards(tmp_path)) > 1
    assert len(cached) == len(rows)
    step = step_of(target, training_drafter(target))
    for i, row in enumerate(rows):
        exact = step.target_states(batch_of([row])).taps[0]
        got = cached[i]["taps"].float()
        assert got.shape == exact.shape
        assert float((got - exact).abs().max()) <= relative * float(exact.abs().max())
    stored = sum(
        t.numel() * t.element_size() for p in shards(tmp_path) for t in load_file(p).values()
    )
    assert stored == layout.n_bytes == plan_cache(config, rows, dtype).n_bytes


def train(target: Any, rows: Any, folder: Path, **options: Any) -> Any:
    args = DFlashTrainingArguments(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        n_anchors=6,
        max_steps=5,
        per_device_train_batch_size=3,
        save_strategy="no",
        **options,
    )
    trainer = DFlashTrainer(training_drafter(target), target, args, rows)
    trainer.train()
    return trainer.model.state_dict()


@pytest.mark.parametrize("n_workers", [0, 2])
def test_training_from_the_cache_is_training_online(
    target: Any, rows: Any, config: Any, tmp_path: Path, n_workers: int
) -> None:
    write_taps(target, config, rows, tmp_path / "taps", dtype="float32")
    cached = CachedTaps(rows, tmp_path / "taps", config)
    online = train(target, rows, tmp_path / "a")
    offline = train(target, cached, tmp_path / "b", dataloader_num_workers=n_workers)
    for name, weight in online.items():
        torch.testing.assert_close(offline[name], weight, atol=1e-6, rtol=1e-4)


def test_rows_with_names_of_their_own_are_cached_and_trained_on_alike(
    target: Any, rows: Any, config: Any, tmp_path: Path
) -> None:
    named = [{**row, "example_id": f"train-{i % 2}"} for i, row in enumerate(rows)]
    write_taps(target, config, named, tmp_path / "taps", dtype="float32")
    first = train(target, CachedTaps(rows, tmp_path / "taps", config), tmp_path / "a")
    second = train(target, CachedTaps(named, tmp_path / "taps", config), tmp_path / "b")
    for name, weight in first.items():
        assert torch.equal(second[name], weight)


def test_training_from_the_cache_needs_no_layers(
    target: Any, rows: Any, config: Any, tmp_path: Path
) -> None:
    write_taps(target, config, rows, tmp_path / "taps", dtype="float32")
    cached = CachedTaps(rows, tmp_path / "taps", config)
    ends = copy.deepcopy(target)
    drop_layers(ends)
    kept = {name.split(".")[-2] for name, _ in ends.named_parameters()}
    assert kept == {"embed_tokens", "norm", "lm_head"}
    whole, without = train(target, cached, tmp_path / "a"), train(ends, cached, tmp_path / "b")
    for name, weight in whole.items():
        assert torch.equal(without[name], weight)


def test_packed_rows_are_cached_document_by_document(
    target: Any, rows: Any, config: Any, tmp_path: Path
) -> None:
    packed = {
        "input_ids": rows[0]["input_ids"] + rows[1]["input_ids"] + [0, 0],
        "loss_mask": rows[0]["loss_mask"] + rows[1]["loss_mask"] + [0, 0],
        "document_ids": [1] * 20 + [2] * 19 + [0] * 2,
    }
    precise = copy.deepcopy(target).double()  # what rounding does depends on the CPU
    write_taps(precise, config, [packed], tmp_path, dtype="float32")
    taps = CachedTaps([packed], tmp_path, config)[0]["taps"]
    alone = step_of(precise, training_drafter(target)).target_states(batch_of([rows[1]])).taps[0]
    torch.testing.assert_close(taps[20:39], alone.float())


def test_a_stopped_cache_goes_on_and_is_not_taken_for_complete(
    target: Any,
    rows: Any,
    config: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = []
    run = taps_cache._run_rows

    def stops(*args: Any) -> Any:
        runs.append(args)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(taps_cache, "_run_rows", stops)
    options = {"dtype": "float32", "shard_bytes": 8000}
    with pytest.raises(KeyboardInterrupt):
        write_taps(target, config, rows, tmp_path, **options)
    assert len(shards(tmp_path)) == 1
    with pytest.raises(ValueError, match="`folder` must hold a complete cache, but"):
        CachedTaps(rows, tmp_path, config)
    layout = write_taps(target, config, rows, tmp_path, **options)
    n_shards = layout.rows[-1].shard + 1
    assert len(runs) == n_shards + 1  # the first shard was not made again
    assert "Taps: 100%" in capsys.readouterr().err  # its tokens are counted
    assert len(shards(tmp_path)) == n_shards
    assert not list(tmp_path.glob("*.part"))


def test_a_disk_too_small_is_said_before_anything_is_written(
    target: Any, rows: Any, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr(taps_cache.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RuntimeError, match=r"`folder` is too small: the taps take 0.00 GiB"):
        write_taps(target, config, rows, tmp_path)
    assert not shards(tmp_path)


def test_the_size_is_told_first(
    target: Any, rows: Any, config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hf_dflash.taps_cache"):
        write_taps(target, config, rows, tmp_path)
    assert "Taps of 7 rows: 0.00 GiB" in caplog.text
    # The papers' example: five taps of width 2560 in bfloat16 are 25.6 kB a token.
    qwen = SimpleNamespace(target_layer_ids=[1, 9, 17, 25, 33], target_hidden_size=2560)
    assert plan_cache(qwen, []).bytes_per_token == 25_600


def test_caches_of_something_else_are_refused(
    target: Any, rows: Any, config: Any, tmp_path: Path
) -> None:
    write_taps(target, config, rows, tmp_path)
    other = training_drafter(target, target_layer_ids=[1, 2]).config
    with pytest.raises(ValueError, match=r"must hold the drafter's `target_layer_ids`.*\[1, 2\]"):
        CachedTaps(rows, tmp_path, other)
    with pytest.raises(ValueError, match="must hold the drafter's `target_layer_ids`"):
        CachedTaps(rows[:3], tmp_path, config)
    changed = [{**rows[0], "input_ids": [9, *rows[0]["input_ids"][1:]]}, *rows[1:]]
    with pytest.raises(ValueError, match="Row 0 has other `input_ids` than when its taps were"):
        CachedTaps(changed, tmp_path, config)[0]
    with pytest.raises(ValueError, match="holds taps of other rows or layers"):
        write_taps(target, other, rows, tmp_path)
    with pytest.raises(ValueError, match=r"`dtype` must be one of .*got 'int4'"):
        write_taps(target, config, rows, tmp_path, dtype="int4")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_the_cache_of_another_target_is_refused(
    target: Any, rows: Any, config: Any, tmp_path: Path, dtype: str
) -> None:
    write_taps(target, config, rows, tmp_path, dtype=dtype)
    cached = CachedTaps(rows, tmp_path, config)
    check_taps(target, cached)
    with pytest.raises(ValueError, match=r"is of another target: .*row 0 differ by \d+% from"):
        check_taps(training_target(seed=1), cached)


def test_a_cache_is_not_gone_on_with_by_another_target(
    target: Any, rows: Any, config: Any, tmp_path: Path
) -> None:
    write_taps(target, config, rows, tmp_path)
    write_taps(target, config, rows, tmp_path)
    with pytest.raises(ValueError, match=r"another target: .*taps-00000.*, row 0 differ by"):
        write_taps(training_target(seed=1), config, rows, tmp_path)


def test_one_large_token_does_not_hide_another_target(config: Any, tmp_path: Path) -> None:
    one, other = training_target(), training_target(seed=1)
    one.model.embed_tokens.weight.data[91] *= 1e5  # as a first token's states often are
    other.model.embed_tokens.weight.data[91] = one.model.embed_tokens.weight.data[91]
    rows = [row_of([91, *random_ids(12, seed=0)])]
    write_taps(one, config, rows, tmp_path)
    cached = CachedTaps(rows, tmp_path, config)
    check_taps(one, cached)
    with pytest.raises(ValueError, match="of another target"):
        check_taps(other, cached)


def test_states_beyond_float16_are_refused(rows: Any, config: Any, tmp_path: Path) -> None:
    large = training_target()
    large.model.embed_tokens.weight.data *= 1e6
    with pytest.raises(ValueError, match=r"holds numbers up to 65504, but row \d has .*bfloat16"):
        write_taps(large, config, rows, tmp_path, dtype="float16")
    write_taps(large, config, rows, tmp_path, dtype="bfloat16")


def test_a_cache_travels_to_worker_processes(
    target: Any, rows: Any, config: Any, tmp_path: Path
) -> None:
    write_taps(target, config, rows, tmp_path)
    cached = CachedTaps(rows, tmp_path, config)
    first = cached[0]["taps"]
    assert torch.equal(pickle.loads(pickle.dumps(cached))[0]["taps"], first)
    assert json.loads((tmp_path / "taps.json").read_text())["dtype"] == "bfloat16"


def test_a_resumed_run_reads_the_same_cache(
    target: Any, rows: Any, config: Any, tmp_path: Path
) -> None:
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    settings = {"online": run_settings(config, args, EpochRows(rows), target)}
    for dtype in ("bfloat16", "float8"):
        write_taps(target, config, rows, tmp_path / dtype, dtype=dtype)
        cached = EpochRows(CachedTaps(rows, tmp_path / dtype, config))
        settings[dtype] = run_settings(config, args, cached, target)
    digests = {kind: values.pop("rows_sha256") for kind, values in settings.items()}
    assert len(set(digests.values())) == 1
    assert [values.pop("taps_dtype") for values in settings.values()] == [None, *DTYPES[::3]]
    # The layers of a target whose taps are cached may be there or not: they are no part of a run.
    assert [kind for kind, values in settings.items() if "target_sha256" in values] == ["online"]
    del settings["online"]["target_sha256"]
    assert settings["online"] == settings["bfloat16"] == settings["float8"]


@pytest.mark.parametrize("part", ["all rows", "some rows"])
def test_the_trainer_refuses_a_cache_of_another_target(
    target: Any, rows: Any, config: Any, tmp_path: Path, part: str
) -> None:
    write_taps(target, config, rows, tmp_path / "taps")
    cached: Any = CachedTaps(rows, tmp_path / "taps", config)
    chosen = cached if part == "all rows" else Subset(cached, range(4))
    tuned = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(parameter.std() * torch.randn_like(parameter))
    with pytest.raises(ValueError, match="The cache is of another target"):
        train(tuned, chosen, tmp_path / "a")


def test_a_part_of_a_cache_is_still_a_cache(
    target: Any, rows: Any, config: Any, tmp_path: Path
) -> None:
    drafter, args = training_drafter(target), DFlashTrainingArguments(output_dir=str(tmp_path))
    write_taps(target, config, rows, tmp_path / "taps", dtype="float8")
    part: Any = Subset(CachedTaps(rows, tmp_path / "taps", config), range(2, 6))
    told = run_settings(drafter.config, args, EpochRows(part), target)
    assert told["taps_dtype"] == "float8"
    assert told["rows_sha256"] == rows_digest(rows[2:6])
    with pytest.raises(NotImplementedError, match="`on_policy` needs the target itself"):
        train(target, part, tmp_path / "a", loss_type="forward_kl", on_policy=True)


def test_distillation_from_cached_taps_is_refused(
    target: Any, rows: Any, config: Any, tmp_path: Path
) -> None:
    write_taps(target, config, rows, tmp_path / "taps")
    cached = CachedTaps(rows, tmp_path / "taps", config)
    with pytest.raises(NotImplementedError, match=r"last hidden states, which cached taps lack"):
        train(target, cached, tmp_path / "a", loss_type="forward_kl")
    with pytest.raises(NotImplementedError, match="`on_policy` needs the target itself"):
        train(target, cached, tmp_path / "a", loss_type="forward_kl", on_policy=True)
