"""The engines' own code reads our folders as we mean them, and where not, `doctor` says so.

Their packages are got without what they depend on, and asked in a process of their own: no GPU is
needed to read a config. Skipped, with the reason, where a package cannot be got.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import published_folders as folders
from hf_dflash import DFlashConfig
from hf_dflash.convert import convert
from hf_dflash.doctor import examine
from hf_dflash.drafter_files import read_drafter
from hf_dflash.speculators_format import SPECULATORS_VERSION
from hf_dflash.wire_formats import check_can_hold
from pairs import random_drafter, tiny_target

pytestmark = pytest.mark.slow

SGLANG, VLLM = "sglang==0.5.23", "vllm==0.33.0"
SPECULATORS = (
    f"speculators=={SPECULATORS_VERSION}",
    f"hs-connectors=={SPECULATORS_VERSION}",
    *("pydantic", "pydantic-core", "pydantic-settings", "annotated-types", "typing-inspection"),
    *("loguru", "python-dotenv"),
)
DOWNLOAD_TIMEOUT_S = 120
SLIDING, FULL = "sliding_attention", "full_attention"
HERE = Path(__file__).parent


def run_pip(*arguments: str) -> None:
    """Run pip; a package that cannot be got is no fault of ours."""
    command = [sys.executable, "-m", "pip", *arguments, "--no-deps", "--quiet"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip {' '.join(arguments[:2])} took more than {DOWNLOAD_TIMEOUT_S} s")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"pip {' '.join(arguments[:2])} failed: {reason}")


def code_of(package: str, folder: Path) -> Path:
    """The Python files of a package, unpacked from its wheel."""
    run_pip("download", package, "--only-binary", ":all:", "--dest", str(folder))
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder, [n for n in content.namelist() if n.endswith(".py")])
    wheel.unlink()
    return folder


def ask(script: str, *arguments: str, path: str = "") -> Any:
    """What an engine's code reads."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), path]).strip(":")}
    command = [sys.executable, "-W", "ignore", str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 16},
    "windows": {"layer_types": [SLIDING] * 2, "sliding_window": 16},
    "windows-both-ways": {
        "layer_types": [SLIDING] * 2,
        "sliding_window": 16,
        "is_causal": False,
    },
    "causal": {"is_causal": True},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}},
}


def can_be(config: DFlashConfig, to: str) -> bool:
    """Whether a format can hold a drafter."""
    try:
        check_can_hold(config, to)
    except ValueError:
        return False
    return True


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> str:
    folder = tmp_path_factory.mktemp("target")
    tiny_target().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any, target: str) -> dict[Path, DFlashConfig]:
    """Folders in every format that servers read, with what each of them means."""
    root, meant = tmp_path_factory.mktemp("drafters"), {}
    for kind, overrides in KINDS.items():
        drafter = random_drafter(tiny_target(), num_target_layers=4, **overrides)
        drafter.to(torch.bfloat16).save_pretrained(root / kind)
        meant[root / kind] = drafter.config
        for to in ("zlab", "flat", "speculators", "modelopt", "native"):
            if can_be(drafter.config, to):
                convert(root / kind, root / f"{kind}-{to}", to=to, target=target)
                meant[root / f"{kind}-{to}"] = drafter.config
    unset = folders.zlab(root / "window-unset", layer_types=[SLIDING] * 2, sliding_window=16)
    # As Qwen3's config class reads it: the window is gone, which no engine survives.
    meant[unset] = meant[root / "windows"]
    return meant


def is_loaded_by(engine: str, folder: Path) -> bool:
    return examine(folder, engines=[engine]).verdicts[0].state == "loads"


def layers_meant(config: DFlashConfig) -> list[tuple[int | None, bool]]:
    n_layers = config.num_hidden_layers
    return [(config.layer_window(i), config.layer_is_causal(i)) for i in range(n_layers)]


def test_sglang_reads_what_doctor_says_it_reads(made, tmp_path):
    code = code_of(SGLANG, tmp_path)
    readable = {f: c for f, c in made.items() if not f.name.endswith("-speculators")}
    answers = ask("engine_code.py", "sglang", str(code), *map(str, readable))
    outcomes = set()
    for folder, config in readable.items():
        answer = answers[str(folder)]
        layers = [(None if w < 0 else w + 1, kind == "DECODER") for w, kind in answer["layers"]]
        as_meant = layers == layers_meant(config) and "error" not in answer
        assert as_meant == is_loaded_by("sglang", folder), (folder.name, answer)
        outcomes.add(as_meant)
        if as_meant:
            assert answer["block_size"] == config.block_size
            assert answer["target_layer_ids"] == config.target_layer_ids
            assert answer["mask_token_id"] == config.mask_token_id
            assert folders.config_of(folder)["architectures"][0] in answer["architectures"]
    assert outcomes == {True, False}


def test_vllm_reads_what_doctor_says_it_reads(made, tmp_path):
    code = code_of(VLLM, tmp_path)
    answers = ask("engine_code.py", "vllm", str(code), *map(str, made))
    outcomes = set()
    for folder, config in made.items():
        answer = answers[str(folder)]
        as_meant = [tuple(layer) for layer in answer["layers"]] == layers_meant(config)
        assert as_meant == is_loaded_by("vllm", folder), (folder.name, answer)
        outcomes.add(as_meant)
        if as_meant:
            assert answer["taps"] == [index + 1 for index in config.target_layer_ids]
            assert answer["mask_token_id"] == config.mask_token_id
            assert answer["rope_theta"] == config.rope_parameters["rope_theta"]
            assert answer["architectures"][0].startswith("DFlash")
        if folder.name.endswith("-speculators"):
            assert answer["speculative"]["num_speculative_tokens"] == config.block_size - 1
    assert outcomes == {True, False}


def reduced(source: Path, folder: Path, target: str) -> Path:
    """The drafter with a head of four tokens."""
    folder.mkdir()
    (folder / "ids.json").write_text("[0, 3, 17, 95]")
    options = {"target": target, "draft_vocabulary": folder / "ids.json"}
    return convert(source, folder / "reduced", to="speculators", **options).output


def test_speculators_loads_our_folders_and_we_load_what_it_saves(made, target, tmp_path):
    run_pip("install", "--target", str(tmp_path / "package"), *SPECULATORS)
    full = next(folder for folder in made if folder.name == "full")
    source_of = {f: f.with_name(f.name[:-12]) for f in made if f.name.endswith("-speculators")}
    source_of[reduced(full, tmp_path / "made", target)] = full
    assert len(source_of) > 4
    (tmp_path / "saved").mkdir()
    answers = ask(
        "speculators_code.py",
        str(tmp_path / "saved"),
        *map(str, source_of),
        path=str(tmp_path / "package"),
    )
    for folder, source in source_of.items():
        assert_read_as_meant(answers[str(folder)], made[source], target)
        saved = tmp_path / "saved" / folder.name
        held, ours = torch.load(f"{saved}.pt"), folders.tensors_of(folder)
        assert held.keys() == ours.keys()
        assert all(torch.equal(held[name], ours[name]) for name in ours)
        back = tmp_path / f"{folder.name}-back"
        convert(saved, back, to="hf-dflash", target=target, whole_vocabulary=True)
        assert folders.same_tensors(source, back)
        assert read_drafter(back).config.layer_types == made[source].layer_types
    assert answers[str(folder)]["draft_vocab_size"] == 4


def assert_read_as_meant(read: dict[str, Any], config: DFlashConfig, target: str) -> None:
    assert read["taps"] == [index + 1 for index in config.target_layer_ids]
    assert read["block_size"] == config.block_size == read["proposal"] + 1
    assert read["mask_token_id"] == config.mask_token_id
    assert read["layer_types"] == config.layer_types
    assert read["sliding_window"] == config.sliding_window
    assert read["non_causal"] == (config.is_causal is False)
    assert read["rope"] == config.rope_parameters
    assert read["verifier"] == target
