"""Tokens and accepted drafts against z-lab's own package, replayed from records.

The pairs were made by `python benchmarks/zlab_pairs.py tests/parity/data/zlab`, and recorded, in an
environment with torch 2.13.0, transformers 5.15.0 and the package `dflash` 0.1.0, by

    for folder in tests/parity/data/zlab/*/*/; do case $folder in */target/) ;; *)
        python benchmarks/zlab_oracle.py record --target $folder/../target --drafter $folder \
            --prompts tests/parity/data/zlab/prompts.jsonl --out $folder/zlab.json;;
    esac; done

and for SmolLM2, whose folder `hf_dflash.smollm2.target_folder()` names, by

    python benchmarks/zlab_oracle.py record --target FOLDER --stop-ids 2 --step 8 \
        --drafter model_cards/smollm2-135m-instruct-dflash --prompts benchmarks/prompts.jsonl \
        --out tests/parity/data/zlab/smollm2.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_dflash.smollm2 import target_folder
from zlab_oracle import compare

DATA = Path(__file__).parent / "data" / "zlab"
DRAFTER_OF_SMOLLM2 = Path(__file__).parents[2] / "model_cards" / "smollm2-135m-instruct-dflash"
TINY = [
    "gemma3/scaled_capped",
    "llama/full",
    "llama/full_causal",
    "llama/mixed",
    "llama/sliding",
    "llama/sliding_both_ways",
    "qwen3/bias_yarn",
    "qwen3/mixed_window_1",
]


def _recorded(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def _differences(name: str, recorded: dict[str, Any]) -> list[str]:
    return compare(recorded, DATA / name / ".." / "target", DATA / name)


@pytest.mark.parametrize("name", TINY)
def test_every_cycle_of_a_tiny_pair_emits_what_z_labs_package_emits(name):
    recorded = _recorded(DATA / name / "zlab.json")
    assert _differences(name, recorded) == []

    emitted = [n for run in recorded["runs"] for n in run["n_emitted"]]
    assert emitted.count(1) > 10  # nothing accepted
    assert sum(n > 2 for n in emitted) > 10  # several accepted, then one rejected


def test_a_pair_that_accepts_otherwise_is_noticed():
    recorded = _recorded(DATA / "llama/mixed" / "zlab.json")
    recorded["runs"] = recorded["runs"][:1]
    recorded["runs"][0]["n_emitted"][0] += 1
    (difference,) = _differences("llama/mixed", recorded)
    assert "prompt 0: tokens of each cycle" in difference


def test_a_pair_that_chooses_otherwise_is_noticed():
    recorded = _recorded(DATA / "llama/mixed" / "zlab.json")
    recorded["runs"] = recorded["runs"][:1]
    recorded["runs"][0]["new_ids"][-1] += 1
    (difference,) = _differences("llama/mixed", recorded)
    assert "prompt 0: tokens\n" in difference


def test_other_weights_than_the_recorded_ones_are_refused():
    recorded = _recorded(DATA / "llama/mixed" / "zlab.json")
    with pytest.raises(RuntimeError, match=r"sliding are not those of the record"):
        _differences("llama/sliding", recorded)


@pytest.mark.slow
def test_every_cycle_of_smollm2_emits_what_z_labs_package_emits():
    recorded = _recorded(DATA / "smollm2.json")
    try:
        target = target_folder()
    except RuntimeError as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")
    assert compare(recorded, target, DRAFTER_OF_SMOLLM2) == []

    emitted = [n for run in recorded["runs"] for n in run["n_emitted"]]
    assert emitted.count(1) > 10
    assert sum(n > 2 for n in emitted) > 10
