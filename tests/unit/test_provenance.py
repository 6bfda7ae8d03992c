from __future__ import annotations

import hashlib
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dflash import provenance
from hf_dflash.provenance import (
    commit_of_checkout,
    device_name,
    hash_of_code,
    provenance_of,
    published_command,
    published_name,
    published_path,
    sha256_of_weights,
)
from made_with import CODE
from pairs import random_drafter, tiny_target


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Any, Any]:
    target = tiny_target()
    drafter = random_drafter(target)
    for name, model in (("target", target), ("drafter", drafter)):
        model.save_pretrained(tmp_path / name)
        model.name_or_path = str(tmp_path / name)
    return target, drafter


def test_what_decoded_is_told(pair: tuple[Any, Any], tmp_path: Path) -> None:
    found = provenance_of(*pair, command="hf-dflash bench", seed=3, n_processes=2)
    assert (found.command, found.seed, found.n_processes) == ("hf-dflash bench", 3, 2)
    assert (found.dtype, found.threads) == ("float32", torch.get_num_threads())
    assert found.versions["torch"] == torch.__version__
    assert (found.target.name, found.target.revision) == ("target", None)
    drafter = found.drafter
    assert (drafter.name, drafter.architecture, drafter.block_size) == ("drafter", "dflash", 8)
    assert drafter.n_parameters == sum(p.numel() for p in pair[1].parameters())
    weights = (tmp_path / "drafter" / "model.safetensors").read_bytes()
    assert drafter.sha256 == hashlib.sha256(weights).hexdigest()
    assert (drafter.target_layer_ids, drafter.policy) == (pair[1].config.target_layer_ids, {})
    assert found.date.endswith("+00:00")
    assert found.code_sha256 == hash_of_code()


def test_the_drafting_policy_is_told(pair: tuple[Any, Any]) -> None:
    policy = {"num_assistant_tokens": 2, "assistant_confidence_threshold": 0.3}
    pair[1].generation_config.update(**policy)
    assert provenance_of(*pair, command="hf-dflash bench", seed=3).drafter.policy == policy


@pytest.mark.parametrize("rows", [[2, 3, 4, 5], []])
def test_how_few_rows_are_multiplied_is_told(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, rows: list[int]
) -> None:
    monkeypatch.setattr("hf_dflash.few_rows.rows_quicker_the_other_way", lambda _: frozenset(rows))
    assert provenance_of(*pair, command="hf-dflash bench", seed=3).few_rows == rows


def test_a_folder_on_this_machine_is_not_told(tmp_path: Path) -> None:
    assert published_name(str(tmp_path / "mine")) == "mine"
    assert published_name("org/model") == "org/model"
    assert published_name("snapshots/mine") == "snapshots/mine"


def test_a_folder_that_is_named_from_within_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert published_name(".") == "mine"


def test_a_command_names_no_place_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, work = tmp_path / "home" / "me", tmp_path / "srv" / "work"
    for folder in (home, work):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    arguments = [
        *("bench", "--target", "org/target", "--drafter", f"{home}/my models/d"),
        *("--dataset", f"{work}/rows.jsonl", "--dataset", f"{tmp_path}/elsewhere/more.jsonl"),
        *(f"--json={work}/out/bench.json", "--template-option", "enable_thinking=false"),
    ]
    assert published_command("hf-dflash", arguments) == (
        "hf-dflash bench --target org/target --drafter ~/'my models/d' --dataset rows.jsonl "
        "--dataset more.jsonl --json out/bench.json --template-option enable_thinking=false"
    )
    assert shlex.split(published_command("hf-dflash", arguments))[5] == "~/my models/d"


def test_the_root_is_no_working_directory_to_name_paths_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    monkeypatch.chdir("/")
    assert published_path("/srv/me/drafter") == "drafter"
    assert published_path("/") == "/"
    assert published_path("a text") == "a text"


def test_weights_of_the_hub_come_from_its_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    random_drafter(tiny_target()).save_pretrained(tmp_path)

    def cached(_repository: str, name: str, **_: Any) -> str:
        return str(tmp_path / name)

    monkeypatch.setattr("hf_dflash.checkpoint_dflash.cached_file", cached)
    assert sha256_of_weights("org/drafter") == sha256_of_weights(str(tmp_path))


def test_only_what_is_loaded_counts(tmp_path: Path) -> None:
    random_drafter(tiny_target()).save_pretrained(tmp_path)
    before = sha256_of_weights(str(tmp_path))
    (tmp_path / "ema.safetensors").write_bytes(b"0")
    assert sha256_of_weights(str(tmp_path)) == before
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    random_drafter(tiny_target()).save_pretrained(tmp_path, max_shard_size="30KB")
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    content = b"".join((tmp_path / name).read_bytes() for name in shards)
    assert len(shards) > 1
    assert sha256_of_weights(str(tmp_path)) == hashlib.sha256(content).hexdigest()


def test_a_drafter_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        sha256_of_weights(str(tmp_path))


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_says_whether_the_code_was_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "src" / "hf_dflash"
    package.mkdir(parents=True)
    code = package / "provenance.py"
    code.write_text("1\n")
    monkeypatch.setattr(provenance, "__file__", str(code))
    assert commit_of_checkout() is None
    git(tmp_path, "init", "-q")
    assert commit_of_checkout() is None, "no commit yet"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "m")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of_checkout() == commit
    (tmp_path / "notes.txt").write_text("not code")
    assert commit_of_checkout() == commit
    benchmarks = tmp_path / "benchmarks"
    (benchmarks / "results").mkdir(parents=True)
    (benchmarks / "results" / "cycle.json").write_text("{}")
    assert commit_of_checkout(CODE) == commit, "a result is no code"
    (benchmarks / "cycle.py").write_text("1\n")
    assert commit_of_checkout() == commit, "the package alone"
    assert commit_of_checkout(CODE) == f"{commit}-dirty"
    code.write_text("2\n")
    assert commit_of_checkout() == f"{commit}-dirty"


def test_changed_checkouts_of_one_commit_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without git as well."""
    package = tmp_path / "hf_dflash"
    package.mkdir()
    files = {"provenance.py": "1\n", "other.py": "2\n"}
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))

    def hash_of(changes: dict[str, str]) -> str:
        for name, text in (files | changes).items():
            (package / name).write_text(text)
        found = hash_of_code()
        for name in changes:
            (package / name).unlink()
        return found

    clean = hash_of({})
    changed = [hash_of(c) for c in ({"other.py": "3\n"}, {"new.py": ""}, {"other.py": "2\n\n"})]
    moved = hash_of({"provenance.py": "1\n2\n", "other.py": ""})
    assert len({clean, moved, *changed}) == 5
    assert hash_of({"notes.txt": "no code"}) == clean
    assert (len(clean), int(clean, 16) > 0) == (12, True)


def test_the_device_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_name(torch.device("cpu")).startswith("cpu: ")
    assert torch.backends.cpu.get_cpu_capability() in device_name(torch.device("cpu"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    assert device_name(torch.device("cuda")) == "cuda: NVIDIA H200"
    assert device_name(torch.device("meta")) == "meta"
