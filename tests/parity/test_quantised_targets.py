"""Targets that are really quantised: the drafter learns from their states, and decoding agrees.

Each kind runs where its package is installed; none of them is needed for anything else. To run them
all: ``pip install torchao bitsandbytes optimum-quanto``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_dflash.target_states import run_target
from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from training_pairs import (
    assert_same_as_decoding,
    generated_rows,
    random_ids,
    row_of,
    training_drafter,
    training_target,
)

# The packages warn of one another's versions.
pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS = [0, 2]


def _torchao() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _bitsandbytes() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def _quanto() -> Any:
    from transformers import QuantoConfig

    return QuantoConfig(weights="int8")


CONFIGS: dict[str, Callable[[], Any]] = {
    "torchao": _torchao,
    "bitsandbytes": _bitsandbytes,
    "optimum.quanto": _quanto,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    training_target().save_pretrained(folder)
    return folder


#: Those whose layers round no activations. Those of bitsandbytes do, in 8 bits by what they find in
#: all rows of a pass: so rows together differ from one by one, and training from decoding.
WEIGHT_ONLY = pytest.mark.parametrize("target", ["torchao", "optimum.quanto"], indirect=True)


@pytest.fixture
def target(request: pytest.FixtureRequest, saved: Path) -> Any:
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    low = AutoModelForCausalLM.from_pretrained(
        saved, quantization_config=CONFIGS[request.param](), device_map="cpu"
    )
    assert low.is_quantized
    return low.eval()


def taps_of(target: Any, ids: torch.Tensor) -> torch.Tensor:
    return run_target(target, LAYERS, ids, torch.ones_like(ids)).taps


@pytest.mark.parametrize("target", CONFIGS, indirect=True)
def test_the_drafter_learns_from_the_quantised_states(target: Any, tmp_path: Path) -> None:
    plain = training_target()
    ids = torch.tensor([random_ids(12, 1)])
    taps, exact = taps_of(target, ids), taps_of(plain, ids)
    with torch.no_grad():
        states = target(ids, output_hidden_states=True, use_cache=False).hidden_states
    assert torch.equal(taps, torch.cat([states[i + 1] for i in LAYERS], dim=-1))
    assert not torch.equal(taps, exact)
    assert float((taps - exact).norm() / exact.norm()) < 0.5

    args = DFlashTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=5,
        logging_steps=1,
        learning_rate=0.01,
        n_anchors=8,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    drafter = training_drafter(plain)
    before = drafter.fc.weight.detach().clone()
    trainer = DFlashTrainer(drafter, target, args, generated_rows(target, 6, n_new=12))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 5
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert not torch.equal(drafter.fc.weight, before)
    assert torch.equal(taps_of(target, ids), taps)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


@WEIGHT_ONLY
@torch.no_grad()
def test_training_sees_what_decoding_sees(target: Any) -> None:
    drafter = training_drafter(training_target())
    documents = [random_ids(length, length) for length in (14, 9, 11)]
    assert_same_as_decoding(
        target, drafter, [row_of(document) for document in documents], documents, tolerance=1e-4
    )


@WEIGHT_ONLY
def test_greedy_text_is_the_quantised_targets_own(target: Any) -> None:
    prompt = torch.tensor([random_ids(6, 3)])
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    plain = target.generate(prompt, **options)
    drafted = target.generate(
        prompt, assistant_model=training_drafter(training_target()), **options
    )
    assert torch.equal(drafted, plain)
