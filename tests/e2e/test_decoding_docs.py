"""docs/decoding.md does what it says: on a tiny pair, and where it takes longer on the real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, MambaConfig, MambaForCausalLM
from transformers.cache_utils import Cache, QuantizedLayer
from typer.testing import CliRunner

from hf_dflash import DFlashDraftModel, cli
from hf_dflash.smollm2 import demo_drafter_folder, target_folder
from pages import blocks, text_of, to_run
from pairs import random_drafter, tiny_target
from saved_pairs import save_target

PAGE = "decoding.md"
COMMANDS = to_run("decoding.md")
SHORT_BENCH = ["--n-prompts", "1", "--max-new-tokens", "8", "--dtype", "float32"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny pair under the page's names."""
    monkeypatch.chdir(tmp_path)
    target = save_target(tmp_path / "my-target")
    random_drafter(target).save_pretrained(tmp_path / "my-drafter")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Hello"}))
    return tmp_path


def run_python(program: str, place: Path) -> str:
    """In a process of its own: remote code and dispatch leave nothing behind."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=place,
        env={**os.environ, "HF_MODULES_CACHE": str(place / "modules")},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_python_runs_on_a_tiny_pair(place: Path) -> None:
    printed = run_python("\n".join(blocks(PAGE, "python")), place)
    assert printed.splitlines()[-1].endswith("of 24 tokens were drafts")
    policy = json.loads((place / "my-drafter-4" / "generation_config.json").read_text())
    assert policy["num_assistant_tokens"] == 4


@pytest.mark.slow
def test_the_python_decodes_the_same_tokens_on_the_real_pair(tmp_path: Path) -> None:
    (tmp_path / "my-target").symlink_to(target_folder())
    drafter = DFlashDraftModel.from_pretrained(demo_drafter_folder())
    drafter.save_pretrained(tmp_path / "my-drafter")  # with the code, which a push would add
    parts = []
    for block in blocks(PAGE, "python"):
        parts.append(block)
        if "target.generate(" in block and "do_sample" not in block:
            parts.append("ids = getattr(output, 'sequences', output)[0].tolist()")
            parts.append("plain = target.generate(**inputs, max_new_tokens=48)[0].tolist()")
            parts.append("assert len(ids) > inputs['input_ids'].shape[1]")
            parts.append("assert plain[: len(ids)] == ids")
        if "output.statistics" in block:
            parts.append("assert 0 < sum(statistics.n_accepted) < sum(statistics.n_drafted)")
    assert sum("assert plain" in part for part in parts) == 8
    run_python("\n".join(parts), tmp_path)


def test_the_commands_run(place: Path) -> None:
    ours = [words for words in COMMANDS if words[:2] != ["hf-dflash", "demo"]]
    assert len(ours) == 2
    for program, *words in ours:
        words += SHORT_BENCH if words[0] == "bench" else []
        result = CliRunner().invoke(cli.app, words)
        assert (program, result.exit_code) == ("hf-dflash", 0), f"{words}: {result.output}"
    assert (place / "bench.json").is_file()


@pytest.mark.slow
def test_the_demo_runs_with_the_options_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (words,) = [words for words in COMMANDS if words[:2] == ["hf-dflash", "demo"]]
    result = CliRunner().invoke(cli.app, [*words[1:], "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "figures.json").read_text())["overall"]["identical"]


def decode(target: Any, drafter: Any, n_rows: int = 1, **call: Any) -> None:
    ids = torch.tensor([[3, 1, 4, 1, 5]] * n_rows)
    target.generate(ids, assistant_model=drafter, **{"max_new_tokens": 6, **call})


def decode_with_a_changed_drafter(change: Callable[[Any], None]) -> None:
    target = tiny_target()
    drafter = random_drafter(target)
    change(drafter)
    decode(target, drafter)


def decode_for_another_target() -> None:
    decode(tiny_target(vocab_size=128), random_drafter(tiny_target()))


def decode_with_a_misloaded_drafter() -> None:
    random_drafter(tiny_target()).save_pretrained("drafter")
    decode(tiny_target(), AutoModel.from_pretrained("drafter"))


def decode_beyond_the_embedding() -> None:
    """A target whose embedding was made smaller than its config says."""
    target = tiny_target()
    drafter = random_drafter(target)
    target.set_input_embeddings(torch.nn.Embedding(90, 32))
    decode(target, drafter)


def load_from_other_files(change: Callable[[Path], None]) -> None:
    folder = Path("drafter")
    random_drafter(tiny_target()).save_pretrained(folder)
    change(folder)
    DFlashDraftModel.from_pretrained(folder)


def one_layer_more(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config["layer_types"].append("full_attention")
    (folder / "config.json").write_text(json.dumps(config))


def lfs_pointer(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / "model.safetensors").write_text(pointer)


def decode_with_a_quantised_cache() -> None:
    class Rounded(QuantizedLayer):
        def _quantize(self, tensor: Any, _axis: Any) -> Any:
            return tensor.half()

        def _dequantize(self, tensor: Any) -> Any:
            return tensor.float()

    target = tiny_target()
    cache = Cache(layers=[Rounded() for _ in range(4)])
    decode(target, random_drafter(target), cache=cache)


def decode_a_recurrent_target() -> None:
    config = MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=4, state_size=8)
    decode(MambaForCausalLM(config).eval(), random_drafter(tiny_target()))


def with_call(n_rows: int = 1, **call: Any) -> Callable[[], None]:
    def run() -> None:
        target = tiny_target()
        decode(target, random_drafter(target), n_rows, **call)

    return run


def set_top_p(drafter: Any) -> None:
    drafter.generation_config.top_p = 0.9


#: What brings about each error of the page.
CAUSES: dict[str, Callable[[], None]] = {
    "was made for another target": decode_for_another_target,
    "from a DFlash drafter's folder": decode_with_a_misloaded_drafter,
    "must be exactly those its config.json asks for": lambda: load_from_other_files(one_layer_more),
    "is a Git LFS pointer, not the weights": lambda: load_from_other_files(lfs_pointer),
    "is no row of the target's embedding": decode_beyond_the_embedding,
    "got a batch of 2": with_call(n_rows=2),
    "`num_assistant_tokens` must be in 1..7": with_call(num_assistant_tokens=8),
    "mean nothing to a drafter": lambda: decode_with_a_changed_drafter(set_top_p),
    "always drafts a whole block": with_call(speculation_type="dflash", num_assistant_tokens=3),
    "has no meaning for a DFlash drafter": with_call(prompt_lookup_num_tokens=3),
    "cannot be rolled back to the accepted tokens": decode_with_a_quantised_cache,
    "whose recurrent state cannot be rolled back": decode_a_recurrent_target,
}


def test_every_error_of_the_page_has_its_cause_here() -> None:
    assert re.findall(r'^\| "(.+?)" \|', text_of(PAGE), re.MULTILINE) == list(CAUSES)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("message", CAUSES)
def test_the_errors_say_what_the_page_says(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    errors = (ValueError, TypeError, NotImplementedError)
    with pytest.raises(errors, match=re.escape(message)):
        CAUSES[message]()
