"""One training method in a process of its own; `training_step.py` starts it and tells it when.

    python benchmarks/training_worker.py METHOD FOLDER

It reads `FOLDER/inputs.json`, the weights and the batches, and then a command a line: `check PATH`
(loss and gradients of the first batch, to a file), `step I` (one update with batch I), `memory`.
Each is answered by one line of JSON. Nothing here imports hf_dflash, so that a peer's environment
need not have it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Batch = dict[str, Tensor]
#: Where the class of a method is; a module is imported only in the process of its method.
METHODS = {
    "ours": ("training_methods", "Ours"),
    "plain": ("training_methods", "Plain"),
    "specforge": ("training_peers", "SpecForge"),
    "speculators": ("training_peers", "Speculators"),
}


@dataclass(frozen=True)
class Inputs:
    """What all methods train with.

    Attributes:
        sizes: ``drafter`` (fields of its config), ``gamma``, ``learning_rate``, ``chunk`` and
            ``chunk_blocks`` (rows and blocks of logits at once), ``threads``.
        drafter: Its weights, by the names of the wire format.
        target: ``embedding`` (V, Ht), ``head`` (V, Ht) and ``norm`` (Ht,), the final one.
        batches: ``input_ids``, ``position_ids``, ``document_ids``, ``loss_mask`` (N, S),
            ``anchors`` (N, A), ``labels`` and ``predicts`` (N, A, B), ``taps`` (N, S, T * Ht) and
            ``last_hidden_states`` (N, S, Ht), before the final norm.
    """

    sizes: dict[str, Any]
    drafter: dict[str, Tensor]
    target: dict[str, Tensor]
    batches: list[Batch]

    @classmethod
    def read(cls, folder: Path) -> Inputs:
        """Read what `training_step.py` wrote."""
        paths = sorted(folder.glob("batch_*.safetensors"))
        return cls(
            json.loads((folder / "inputs.json").read_text("utf-8")),
            load_file(folder / "drafter.safetensors"),
            load_file(folder / "target.safetensors"),
            [load_file(path) for path in paths],
        )


class Method(Protocol):
    """One implementation of the step."""

    drafter: torch.nn.Module

    def loss(self, batch: Batch) -> Tensor:
        """Loss of one batch, ready for its backward."""


class Worker:
    """Trains with one method.

    Args:
        method: Its implementation.
        inputs: What it trains with.
    """

    def __init__(self, method: Method, inputs: Inputs) -> None:
        self._method = method
        self._batches = inputs.batches
        trained = {n: p for n, p in method.drafter.named_parameters() if p.requires_grad}
        # A peer's module holds the target's ends too, frozen; what is trained is the same.
        if trained.keys() != inputs.drafter.keys():
            odd = sorted(trained.keys() ^ inputs.drafter.keys())
            raise ValueError(f"The method must train the drafter's tensors, got other: {odd}.")
        self._trained = trained
        self._optimizer = torch.optim.AdamW(trained.values(), lr=inputs.sizes["learning_rate"])
        self._baseline_bytes = memory("VmRSS")

    def check(self, path: str) -> dict[str, Any]:
        """Loss and gradients of the first batch; then the peak of memory is counted anew."""
        loss = self._method.loss(self._batches[0])
        loss.backward()
        save_file({n: p.grad.contiguous() for n, p in self._trained.items()}, path)
        self._optimizer.zero_grad()
        forget_peak()
        return {"loss": float(loss.detach())}

    def step(self, index: str) -> dict[str, Any]:
        """One update."""
        start_s = time.perf_counter()
        loss = self._method.loss(self._batches[int(index) % len(self._batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained.values(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"loss": float(loss.detach()), "seconds": time.perf_counter() - start_s}

    def memory(self) -> dict[str, Any]:
        """Peak of the resident memory above what lay there before the first step."""
        peak_bytes = memory("VmHWM")
        return {
            "baseline_bytes": self._baseline_bytes,
            "step_bytes": peak_bytes - self._baseline_bytes,
            "torch": torch.__version__,
            "transformers": importlib.import_module("transformers").__version__,
        }


def memory(name: str) -> int:
    """VmRSS (resident now) or VmHWM (its peak) of this process, in bytes; Linux only."""
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}. Peak memory is measured on Linux only.")


def forget_peak() -> None:
    """Set the peak to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", "utf-8")


def main() -> None:
    """Answer commands until there are none."""
    # What a package prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name, folder = sys.argv[1:]
    inputs = Inputs.read(Path(folder))
    torch.set_num_threads(inputs.sizes["threads"])
    torch.manual_seed(0)
    module, class_name = METHODS[name]
    worker = Worker(getattr(importlib.import_module(module), class_name)(inputs), inputs)
    print(json.dumps({"ready": name}), file=answers)
    for line in sys.stdin:
        command, *arguments = line.split()
        print(json.dumps(getattr(worker, command)(*arguments)), file=answers)


if __name__ == "__main__":
    main()
