"""Time one call of ``generate`` from outside, whatever method it decodes with.

Every second goes to exactly one of: the prompt's forward, the first drafts, decoding. Forward hooks
on the target and the drafter mark the borders; a streamer sees the tokens of every cycle. All
methods are watched in the same way, so that none pays for being watched more than another.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from .measurement_runs import CycleSeconds, Seconds


@dataclass(slots=True)
class Forward:
    """One forward of a module: when it began and ended, in seconds."""

    start: float
    end: float = 0.0


@dataclass(slots=True)
class Cycle:
    """What one forward of the target led to: accepted drafts, then one token of its own."""

    draft_ids: Tensor  # (K,) int64; empty where nothing was drafted
    n_accepted: int


@dataclass
class CallClock(BaseStreamer):
    """Watches one call; the streamer to pass to it.

    Args:
        target: The target model.
        n_prompt_tokens: Of the prompt.
        draft_model: The drafter or the assistant model; None if no model drafts.
    """

    target: Any
    n_prompt_tokens: int
    draft_model: Any | None = None
    target_forwards: list[Forward] = field(default_factory=list)
    draft_forwards: list[Forward] = field(default_factory=list)  # and of the head on their outputs
    # Of each forward of the target, counted from the prompt's first token; see `near_tie`.
    target_rows: list[range] = field(default_factory=list)
    _draft_ids: list[Tensor] = field(default_factory=list)  # of each forward of the target
    # Drafts and emitted tokens of each cycle, and how many drafts were accepted, if it was said.
    _emitted: list[tuple[Tensor, Tensor, int | None]] = field(default_factory=list)
    _n_emitted: int = 0
    _in_target: bool = False
    _saw_prompt: bool = False
    _start: float = 0.0
    _end: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is done within; one call of ``generate``."""
        with ExitStack() as hooks:
            self._watch(hooks)
            self._start = self._now(wait=True)
            yield
            self._end = self._now(wait=True)

    def put(self, value: Tensor) -> None:
        """Take the prompt, then the tokens of a forward."""
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        self._add_cycle(value.flatten(), None)

    def put_cycle(self, token_ids: Tensor, n_accepted: int) -> None:
        """Take a cycle of our own loop, which may have been cut at an accepted draft."""
        self._add_cycle(token_ids, n_accepted)

    def end(self) -> None:
        """Nothing is held back."""

    @property
    def cycles(self) -> list[Cycle]:
        """Drafts and acceptances of every cycle; counted here, not while the clock runs."""
        return [
            Cycle(drafts, n_agreed(drafts, emitted) if n is None else n)
            for drafts, emitted, n in self._emitted
        ]

    @property
    def seconds(self) -> Seconds:
        """The whole call, in buckets."""
        prompt = self.target_forwards[0]
        before = [f.start for f in self.draft_forwards if f.start < prompt.start]
        if before:  # an assistant model drafts before the target sees the prompt
            first_draft = prompt.start - before[0]
            return Seconds(
                prefill=prompt.end - self._start - first_draft,
                first_draft=first_draft,
                decode=self._end - prompt.end,
            )
        decode_start = self._decode_start()
        return Seconds(
            prefill=prompt.end - self._start,
            first_draft=decode_start - prompt.end,
            decode=self._end - decode_start,
        )

    @property
    def cycle_seconds(self) -> CycleSeconds | None:
        """What decoding went into.

        None on an accelerator: it runs behind the host, and to time each of its forwards is to make
        it wait for the host, which changes what is measured.
        """
        if self._is_accelerator():
            return None
        start = self._decode_start()
        draft, verify = (
            sum(f.end - f.start for f in forwards if f.start >= start)
            for forwards in (self.draft_forwards, self.target_forwards)
        )
        return CycleSeconds(draft=draft, verify=verify)

    def _decode_start(self) -> float:
        prompt_end = self.target_forwards[0].end
        if len(self.target_forwards) < 2:
            return prompt_end
        second = self.target_forwards[1].start
        drafted = any(prompt_end <= f.start < second for f in self.draft_forwards)
        before = any(f.start < self.target_forwards[0].start for f in self.draft_forwards)
        return second if drafted and not before else prompt_end

    def _watch(self, hooks: ExitStack) -> None:
        pairs: list[tuple[Any, Callable[..., None], Callable[..., None]]] = [
            (self.target, self._enter_target, self._leave_target)
        ]
        if self.draft_model is not None:
            head = self.target.get_output_embeddings()
            pairs += [
                (self.draft_model, self._enter_draft, self._leave_draft),
                (head, self._enter_head, self._leave_head),
            ]
        for module, enter, leave in pairs:
            handle = module.register_forward_pre_hook(enter, with_kwargs=True)
            hooks.callback(handle.remove)
            hooks.callback(module.register_forward_hook(leave).remove)

    def _enter_target(self, _module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        # A copy: the loop may write the next drafts into the same memory.
        self._draft_ids.append(ids[0, 1:].clone())
        self._in_target = True
        self.target_forwards.append(Forward(self._now(wait=len(self.target_forwards) == 1)))

    def _leave_target(self, _module: Any, _args: Any, outputs: Any) -> None:
        del outputs
        self._in_target = False
        self.target_forwards[-1].end = self._now(wait=len(self.target_forwards) == 1)

    def _enter_draft(self, _module: Any, _args: Any, _kwargs: Any) -> None:
        self.draft_forwards.append(Forward(self._now()))

    def _leave_draft(self, _module: Any, _args: Any, _outputs: Any) -> None:
        self.draft_forwards[-1].end = self._now()

    def _enter_head(self, module: Any, args: Any, kwargs: Any) -> None:
        if not self._in_target:
            self._enter_draft(module, args, kwargs)

    def _leave_head(self, module: Any, args: Any, outputs: Any) -> None:
        if not self._in_target:
            self._leave_draft(module, args, outputs)

    def _add_cycle(self, emitted: Tensor, n_accepted: int | None) -> None:
        draft_ids = self._draft_ids[-1]
        start = self.n_prompt_tokens + self._n_emitted - 1 if self.target_rows else 0
        self.target_rows.append(range(start, start + 1 + draft_ids.numel()))
        self._n_emitted += emitted.numel()
        if len(self._draft_ids) == 1:  # the prompt's forward; its last rows may be drafts
            draft_ids = draft_ids[self.n_prompt_tokens - 1 :]
            if draft_ids.numel() == 0:  # the token of the prompt's forward belongs to no cycle
                return
        self._emitted.append((draft_ids, emitted, n_accepted))

    def _now(self, *, wait: bool = False) -> float:
        if wait and self._is_accelerator():
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _is_accelerator(self) -> bool:
        return self.target.device.type not in ("cpu", "meta")


def n_agreed(draft_ids: Tensor, emitted_ids: Tensor) -> int:
    """How many drafts were emitted: a stop may end a cycle with one, so not all but the last.

    >>> n_agreed(torch.tensor([5, 6, 7]), torch.tensor([5, 6]))
    2
    """
    pairs = zip(draft_ids.tolist(), emitted_ids.tolist(), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
