"""Measure a drafter in training by what it is for: decoding."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]
from torch import Tensor
from transformers import TrainerCallback

from .acceptance_counts import count_acceptance
from .target import input_device
from .training_checks import base_drafter

PREFIX = "eval_decoding_"


@dataclass(frozen=True, slots=True)
class PlainOutput:
    """What the target makes of a prompt without a drafter."""

    ids: Tensor  # (1, n) int64, on the host
    elapsed_s: float


class Evaluations:
    """Counts evaluations: one of several data sets, each of which is evaluated by itself, is one.

    >>> evaluations = Evaluations()
    >>> with evaluations.one(), evaluations.one():
    ...     evaluations.n_begun
    1
    """

    def __init__(self) -> None:
        self.n_begun = 0
        self._depth = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Begin one, unless within another."""
        self.n_begun += self._depth == 0
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def prompts_of(rows: Any, n_prompts: int) -> list[list[int]]:
    """The first prompts of a data set: what stands before each row's first supervised token.

    >>> prompts_of([{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}], 1)
    [[5, 6]]

    Args:
        rows: With ``input_ids`` and ``loss_mask``, not packed.
        n_prompts: Most prompts.
    """
    prompts: list[list[int]] = []
    for i in range(len(rows)):
        if len(prompts) == n_prompts:
            break
        row = rows[i]
        mask = list(row["loss_mask"])
        n_given = mask.index(1) if 1 in mask else 0
        if n_given > 0:
            prompts.append(list(row["input_ids"])[:n_given])
    return prompts


class DecodingCallback(TrainerCallback):
    """Decodes held-out prompts at every evaluation, with the drafter and once without.

    It adds to the metrics of the evaluation, and logs: ``eval_decoding_acceptance_length`` (mean
    over all cycles), ``eval_decoding_accepted`` (share of drafts), ``eval_decoding_speedup`` (time
    of plain decoding / time with the drafter, prompts included) and ``eval_decoding_mismatches``
    (prompts whose output differs: in half precision, ties may fall otherwise). So the best
    checkpoint can be chosen by them. The target does not change, so plain decoding is run once.

    Args:
        trainer: The `DFlashTrainer` that it is added to.
        prompts: Token ids.
        max_new_tokens: Most new tokens a prompt.
        **generate_kwargs: Others of `generate`; greedy by default.

    Raises:
        ValueError: There is no prompt.
        NotImplementedError: The drafter is sharded.
    """

    def __init__(
        self,
        trainer: Any,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        **generate_kwargs: Any,
    ) -> None:
        if not prompts:
            raise ValueError("`prompts` must hold at least one prompt, got none.")
        if trainer.is_fsdp_enabled:
            raise NotImplementedError(
                "`DecodingCallback` cannot decode with a sharded drafter (FSDP). Train with DDP, "
                "or decode with saved checkpoints."
            )
        self.trainer = trainer
        self.prompts = [torch.tensor([list(prompt)]) for prompt in prompts]
        self.options = {"do_sample": False, "max_new_tokens": max_new_tokens, **generate_kwargs}
        self._plain: list[PlainOutput] = []
        self._n_seen = 0  # evaluations

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decode, unless another slice of this evaluation has seen to it."""
        del args, control
        n_begun = self.trainer.evaluations.n_begun
        if self._n_seen == n_begun:
            return
        self._n_seen = n_begun
        measured = [self.measure() if state.is_world_process_zero else {}]
        if self.trainer.accelerator.num_processes > 1:  # all choose the best checkpoint alike
            broadcast_object_list(measured)
        kwargs["metrics"].update(measured[0])
        self.trainer.log(dict(measured[0]))

    def measure(self) -> dict[str, float]:
        """Decode all prompts and say how it went."""
        trainer = self.trainer
        drafter = base_drafter(trainer.accelerator.unwrap_model(trainer.model))
        was_training = drafter.training
        drafter.eval()
        try:
            return self._measure(drafter)
        finally:
            drafter.train(was_training)

    def _measure(self, drafter: Any) -> dict[str, float]:
        if not self._plain:
            self._decode(self.prompts[0])  # warm up
            self._plain = [PlainOutput(*self._decode(prompt)) for prompt in self.prompts]
        n_accepted: list[list[int]] = []
        n_drafted: list[list[int]] = []
        n_mismatches, elapsed_s = 0, 0.0
        self._decode(self.prompts[0], assistant_model=drafter)  # warm up
        for prompt, plain in zip(self.prompts, self._plain, strict=True):
            start = self._now()
            output = self._generate(prompt, assistant_model=drafter, return_dict_in_generate=True)
            elapsed_s += self._now() - start
            n_accepted.append(output.statistics.n_accepted)
            n_drafted.append(output.statistics.n_drafted)
            n_mismatches += not torch.equal(output.sequences.cpu(), plain.ids)
        counts = count_acceptance(n_accepted, n_drafted)  # None: each output is one token
        metrics = {
            "acceptance_length": counts.micro if counts else 1.0,
            "accepted": counts.accepted if counts else 0.0,
            "speedup": sum(plain.elapsed_s for plain in self._plain) / elapsed_s,
            "mismatches": float(n_mismatches),
        }
        return {PREFIX + name: value for name, value in metrics.items()}

    def _decode(self, prompt: Tensor, **options: Any) -> tuple[Tensor, float]:
        start = self._now()
        ids = self._generate(prompt, **options)
        return ids.cpu(), self._now() - start

    def _generate(self, prompt: Tensor, **options: Any) -> Any:
        target = self.trainer.target
        device = input_device(target.get_input_embeddings(), self.trainer.args.device)
        return target.generate(prompt.to(device), **self.options, **options)

    def _now(self) -> float:
        if self.trainer.args.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
